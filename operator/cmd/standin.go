package main

import (
	"context"
	"log/slog"

	"constellation/engine/version"
)

// roleStandIn makes this process a placeholder for the cluster autoscaler in clouds without one. It
// can be started, stopped and given arguments.
const roleStandIn = "--role=autoscaler-stand-in"

// standIn logs its arguments and idles until it is terminated. It ignores the arguments, which are
// those of a cluster autoscaler.
func standIn(ctx context.Context, args []string, log *slog.Logger) {
	log.Info("autoscaler stand-in started: it scales nothing", "release", version.Release, "args", args)
	<-ctx.Done()
	log.Info("autoscaler stand-in ended")
}
