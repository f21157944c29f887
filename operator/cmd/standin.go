package main

import (
	"context"
	"log/slog"

	"constellation/engine/version"
)

// roleStandIn makes this process one that stands in for the cluster autoscaler where
// there is none for the cloud: it can be started, stopped and given arguments.
const roleStandIn = "--role=autoscaler-stand-in"

// standIn says which arguments it was given and idles until it is asked to end. The
// arguments are those of a cluster autoscaler, so none is looked at.
func standIn(ctx context.Context, args []string, log *slog.Logger) {
	log.Info("autoscaler stand-in started: it scales nothing", "release", version.Release, "args", args)
	<-ctx.Done()
	log.Info("autoscaler stand-in ended")
}
