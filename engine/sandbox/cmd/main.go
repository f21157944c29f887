// Command constellation-sandbox runs local test clouds: simulated and real machines,
// Kubernetes built from source, and fault injection. Production programs link none of this.
//
// The program constellation executes it for the verb sandbox, with the same arguments; see
// package sandboxexec. Both have the same name in help, messages and printed commands.
package main

import (
	"context"
	"log/slog"
	"os"

	"constellation/engine"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/drill"
	"constellation/engine/sandbox/hollow"
	"constellation/engine/sandbox/machine/disk"
	"constellation/engine/sandbox/simulated"
	"constellation/engine/version"
)

func main() {
	if args := os.Args[1:]; disk.IsServer(args) {
		os.Exit(disk.Main(args))
	} else if simulated.IsStandIn(args) {
		os.Exit(simulated.Main(args))
	}
	p := &parts{
		kubernetes: build.Versions(),
		images:     []string{version.Release, "v1.0.0"},
		releases:   []string{version.Release, "v1.0.0"},
		faults:     sandbox.FaultNames(),
		sandbox:    newSandbox,
		drills:     newDrills,
		daemon:     serve,
	}
	os.Exit(p.app().Main())
}

func newSandbox(log *slog.Logger) (engine.Sandbox, error) {
	dirs, err := sandbox.DefaultDirs()
	if err != nil {
		return nil, err
	}
	return sandbox.New(dirs, "", log), nil
}

func newDrills(log *slog.Logger) (engine.Drills, error) {
	dirs, err := sandbox.DefaultDirs()
	if err != nil {
		return nil, err
	}
	return drill.New(dirs, sandbox.New(dirs, "", log), log), nil
}

func serve(ctx context.Context, name string, log *slog.Logger) error {
	dirs, err := sandbox.DefaultDirs()
	if err != nil {
		return err
	}
	return sandbox.Serve(ctx, dirs, name, log, hollow.Serve)
}
