package console

import (
	"context"
	"errors"
	"os"
	"runtime"
	"runtime/debug"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/tui/term"
)

// End is what a console leaves behind.
type End struct {
	// Summary are the lines that stay on the terminal.
	Summary []string
	// Exit is the exit code of the program.
	Exit int
}

// watchGarbage is GOGC while the cluster is watched, in percent of the live heap.
const watchGarbage = 40

// Run shows the console on the terminal and returns when the user leaves. in and out are
// terminals.
func Run(ctx context.Context, in, out *os.File, env func(string) string, o Options) (End, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tty := term.NewTerminal(in, out, env)
	if o.Display != nil {
		tty.Display = o.Display(tty.Display)
	}
	if m := o.Machines; m != nil && m.Close != nil {
		tty.OnCrash = m.Close
		defer m.Close()
	}
	c := newConsole(ctx, tty.Display, consoleDeps{Options: o, send: tty.Send, copy: tty.Copy, redraw: func() { tty.Redraw() }})
	if o.OnlyWatch {
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
		c.watch.table.filter, c.screen = o.Filter, c.watch
	}
	c.w, c.h = tty.Width, tty.Height
	// The context ends the run, not the screen: the console decides when to quit.
	m, err := tty.Run(context.WithoutCancel(ctx), c)
	if end, ok := m.(*console); ok {
		c = end
	}
	cancel()
	end := End{Summary: c.exitSummary(), Exit: c.quit.exit}
	if err != nil && !errors.Is(err, tea.ErrProgramKilled) {
		return end, &plan.Error{Op: "show the console", Err: err, Remedy: "use --non-interactive"}
	}
	return end, nil
}
