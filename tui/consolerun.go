package tui

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/term"
)

// consoleOptions are the flags that affect the console.
type consoleOptions struct {
	wizard  bool // open the init wizard
	yes     bool // the plan is accepted
	timeout time.Duration
	upgrade *upgradeStart // to open at the start; nil if there is none
	// watch is set if the verb is watch; replay is then the record to show, if any.
	watch  *watchOptions
	replay *record
}

// watchGarbage is GOGC while the cluster is watched, in percent of the live heap.
const watchGarbage = 40

// console shows the console on the terminal and returns when the user leaves.
func (s *session) console(ctx context.Context, o consoleOptions) error {
	eng, ws, dir, err := s.engineOf()
	if err != nil {
		return err
	}
	if o.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.timeout)
		defer cancel()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	in, out := s.Stdin.(*os.File), s.Stdout.(*os.File) // term.NotInteractive has checked it
	if s.debug {
		if err := s.logToFile(ws); err != nil {
			return err
		}
		defer s.debugFile.Close()
	}
	tty := term.NewTerminal(in, out, s.Env)
	c := newConsole(ctx, tty.Display, consoleDeps{
		engine: eng, ws: ws, commands: s.formatter(), versions: s.Kubernetes, wizard: o.wizard, yes: o.yes, upgrade: o.upgrade, now: s.Now,
		sandbox: func(ctx context.Context) *workspace.SandboxInfo { return s.findSandbox(ctx, dir) },
		send:    tty.Send, copy: tty.Copy, redraw: func() { tty.Redraw() },
	})
	if o.watch != nil {
		// One processor suffices, and while idle most CPU time goes to threads that wake
		// each other.
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
		// A watch stays open for hours and produces little garbage: keep the heap small.
		defer debug.SetGCPercent(debug.SetGCPercent(watchGarbage))
		term.ReleaseStartupPages()
		c.deps.releaseMemory = term.ReleaseStartupPages
		a := term.NewAlarm()
		defer a.Close()
		c.deps.after = a.After
		c.deps.watch, c.deps.onlyWatch, c.deps.replay = o.watch.WatchRequest, true, o.replay
		c.watch.filter, c.screen = o.watch.filter, c.watch
	}
	c.w, c.h = tty.Width, tty.Height
	// The context ends the run, not the screen: the console decides when to quit.
	m, err := tty.Run(context.WithoutCancel(ctx), c)
	if end, ok := m.(*console); ok {
		c = end
	}
	cancel()
	for _, l := range c.exitSummary() {
		fmt.Fprintln(s.out, l)
	}
	if s.debugFile != nil {
		s.remark("debug log: %s", s.debugFile.Name())
	}
	if err != nil && !errors.Is(err, tea.ErrProgramKilled) {
		return &plan.Error{Op: "show the console", Err: err, Remedy: "use --non-interactive"}
	}
	if c.exit != 0 {
		return exitStatus(c.exit)
	}
	return nil
}

// logToFile writes the debug log to a file, so that it does not disturb the screen.
func (s *session) logToFile(ws *workspace.Workspace) error {
	f, err := os.OpenFile(ws.Path("constellation-debug.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return &plan.Error{Op: "open the debug log", Err: err}
	}
	s.debugFile = f
	return nil
}
