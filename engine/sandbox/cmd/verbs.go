package main

import (
	"context"
	"log/slog"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/tui"
)

// parts are what the verbs need.
type parts struct {
	// kubernetes, images and releases are the versions that a sandbox can run, the default first.
	kubernetes, images, releases []string
	// faults are prefixes of the supported faults, such as "quota=". They are completions.
	faults []string

	// sandbox and drills are called only by verbs that need them, so that all others start fast.
	sandbox func(*slog.Logger) (engine.Sandbox, error)
	drills  func(*slog.Logger) (engine.Drills, error)
	// daemon runs a sandbox until ctx ends. It implements the hidden verb `sandbox daemon`,
	// which `sandbox up` starts.
	daemon func(ctx context.Context, name string, log *slog.Logger) error
}

// app returns the program.
func (p *parts) app() tui.App {
	return tui.App{
		Release: p.releases[0],
		Verbs: func(i *tui.Invocation) []*cobra.Command {
			return []*cobra.Command{(&verbs{i, p}).sandboxCommand()}
		},
	}
}

// verbs are the verbs of one call.
type verbs struct {
	*tui.Invocation
	*parts
}
