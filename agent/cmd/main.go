// The agent of a host: see package agent.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"constellation/agent"
	"constellation/engine/version"
)

func main() {
	socket := flag.String("socket", agent.DefaultSocket, "unix socket to listen on, `path`")
	show := flag.Bool("version", false, "print the version and exit")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "agent tells the operator what this host is and runs, on a unix socket that only root can open.\n\nUsage:\n  agent [flags]\n\nFlags:\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "agent: unexpected argument %q; see agent -h\n", flag.Arg(0))
		os.Exit(2)
	}
	if *show {
		fmt.Println(version.Release)
		return
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := agent.New(agent.Host{}, *socket, log).Run(ctx); err != nil {
		log.Error("agent ended", "err", err)
		stop()
		os.Exit(1)
	}
}
