package tui

import (
	"context"
	"fmt"
	"os"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/preferences"
	"constellation/engine/workspace"
	"constellation/tui/console"
	"constellation/tui/term"
)

// consoleOptions are the flags that affect the console.
type consoleOptions struct {
	wizard  bool // open the init wizard
	yes     bool // the plan is accepted
	timeout time.Duration
	upgrade *console.Upgrade // to open at the start; nil if there is none
	// watch is set if the verb is watch; replay is then the record to show, if any.
	watch  *watchOptions
	replay *console.Record
}

// workspaceOptions are the options of a console of a workspace.
func workspaceOptions(s *session, eng Engine, ws *workspace.Workspace, dir string, g *guard) console.Options {
	return console.Options{
		Engine: eng, Workspace: ws, Commands: s.formatter(), Versions: s.Kubernetes, Now: s.Now, Newer: s.update.newer,
		Cluster: g.name, Guarded: g.guards,
		FixedBackground: g.prefs.Theme != preferences.ThemeAuto,
		Display:         func(d term.Display) term.Display { return themed(d, g.prefs.Theme) },
		Machines:        consoleMachines(s, eng, ws),
		Setup:           consoleSetup(s, eng, ws),
		Sandbox:         func(ctx context.Context) *workspace.SandboxInfo { return s.findSandbox(ctx, dir) },
	}
}

// showConsole shows the console on the terminal and returns when the user leaves.
func showConsole(ctx context.Context, s *session, o consoleOptions) error {
	eng, ws, dir, err := s.engineOf()
	if err != nil {
		return err
	}
	var access cluster.Access
	if o.watch == nil {
		if err := ws.NeedsOperator(); err != nil {
			return err
		}
	} else if o.watch.Cluster != nil {
		access = o.watch.Cluster.Access
	}
	g, err := guardOf(s, access)
	if err != nil {
		return err
	}
	if o.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.timeout)
		defer cancel()
	}
	if s.debug {
		if err := s.logToFile(ws); err != nil {
			return err
		}
		defer s.debugFile.Close()
	}
	with := workspaceOptions(s, eng, ws, dir, g)
	with.Wizard, with.Yes, with.Upgrade = o.wizard, o.yes, o.upgrade
	if o.watch != nil {
		with.Watch, with.OnlyWatch, with.Filter, with.Replay = o.watch.WatchRequest, true, o.watch.filter, o.replay
	}
	end, err := console.Run(ctx, s.Stdin.(*os.File), s.Stdout.(*os.File), s.Env, with) // term.NotInteractive has checked the files
	for _, l := range end.Summary {
		fmt.Fprintln(s.out, l)
	}
	if s.debugFile != nil {
		s.remark("debug log: %s", s.debugFile.Name())
	}
	if err != nil {
		return err
	}
	if end.Exit != 0 {
		return exitStatus(end.Exit)
	}
	return nil
}
