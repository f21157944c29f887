package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
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

// exitSummaryLines is the maximum number of lines that stay on the terminal after the console.
const exitSummaryLines = 12

// exitSummary returns the lines that stay on the terminal after the console: the state of the
// run and the command that comes back to it.
func (c *console) exitSummary() []string {
	t, w := c.th.Printed(), min(max(c.w, minWidth), 120)
	var lines []string
	add := func(r *term.Row) { lines = append(lines, r.String()) }
	back := c.deps.commands.Command("")
	if c.upgrading() && (c.t.Result == nil || c.t.Result.Status != plan.StateDone) {
		back = c.resumeCommand()
	}
	frame := c.lastFrame()
	switch {
	case c.deps.onlyWatch:
		return c.watch.exitSummary()
	case !c.ran && c.upgrading():
		what := "nothing has been changed; come back: "
		if c.err != nil {
			x := view.Explain(c.err, c.deps.commands)
			add(t.Row(w).Add(term.Bad, t.Fail+" ").Add(term.Strong, x.What))
			for _, p := range [][2]string{{"why", x.Why}, {"fix", x.Remedy}} {
				if p[1] != "" {
					add(t.Row(w).Add(term.Faint, "  "+p[0]+"  ").Add(term.Plain, p[1]))
				}
			}
		}
		add(t.Row(w).Add(term.Faint, what).Add(term.Accent, back))
		return lines
	case !c.ran:
		if c.home == nil || c.home.Stage == engine.StageCluster {
			return nil
		}
		what := "nothing has been created; come back: "
		if c.home != nil && c.home.Stage == engine.StagePartial {
			what = "nothing has been changed; come back: "
		}
		add(t.Row(w).Add(term.Faint, what).Add(term.Accent, back))
		return lines
	case c.running || c.leaving && !c.succeeded():
		add(t.Row(w).Add(term.Caution, t.Stopped+" ").Add(term.Strong, c.t.Cluster+": ").Add(term.Plain, fmt.Sprintf("left after %s, %s", term.Clock(c.t.Elapsed(c.now)), view.StepsRemark(c.page(), &c.t))))
	case c.succeeded():
		text := "done"
		if c.t.Result != nil && c.t.Result.Text != "" {
			text = c.t.Result.Text
		}
		add(t.Row(w).Add(term.Good, t.OK+" ").Add(term.Strong, c.t.Cluster+": ").Add(term.Plain, text))
	default:
		x := view.Explain(c.err, c.deps.commands)
		add(t.Row(w).Add(term.Bad, t.Fail+" ").Add(term.Strong, c.t.Cluster+": ").Add(term.Plain, x.What))
		if x.Why != "" {
			add(t.Row(w).Add(term.Faint, "  why  ").Add(term.Plain, x.Why))
		}
		if x.Remedy != "" {
			add(t.Row(w).Add(term.Faint, "  fix  ").Add(term.Plain, x.Remedy))
		}
	}
	var steps []string
	for i := range c.t.Steps {
		s := &c.t.Steps[i]
		if s.State == plan.StateRunning || s.State == plan.StateStopped || s.State == plan.StateFailed {
			steps = append(steps, s.Title)
		}
	}
	if len(steps) > 0 {
		add(t.Row(w).Add(term.Faint, "  at   ").Add(term.Plain, strings.Join(steps, ", ")))
	}
	if n, total := c.atTarget(); total > 0 && c.upgrading() {
		add(t.Row(w).Add(term.Faint, "  nodes ").Add(term.Plain, fmt.Sprintf("%d of %d at the target", n, total)))
	} else if ready, wanted := c.t.Ready(); wanted > 0 && !c.upgrading() {
		add(t.Row(w).Add(term.Faint, "  nodes ").Add(term.Plain, fmt.Sprintf("%d of %d ready", ready, wanted)))
	}
	if c.succeeded() && !c.leaving && c.t.Result != nil {
		for _, n := range c.t.Result.Next {
			add(t.Row(w).Add(term.Faint, "  next ").Add(term.Accent, c.deps.commands.Line(term.Clean(n))))
		}
	}
	add(t.Row(w).Add(term.Faint, "  back ").Add(term.Accent, back))
	if c.t.Run != "" && c.deps.ws != nil && c.upg.lockedBy == "" && (c.plan == nil || !c.plan.Rehearsal) {
		add(t.Row(w).Add(term.Faint, "  log  ").Add(term.Plain, c.deps.ws.Path(plan.RunsDir+"/"+c.t.Run)))
	}
	return append(frame, lines[:min(len(lines), exitSummaryLines)]...)
}

// lastFrame is the last frame of an upgrade without overlays and prompts; nil if there was
// no run.
func (c *console) lastFrame() []string {
	if c.screen == c.log {
		c.screen = c.back
	}
	shows := c.aboutUpgrade(c.screen) || c.screen == c.watch
	if !c.upgrading() || !c.ran || !shows || c.w < minWidth || c.h < minHeight {
		return nil
	}
	c.help, c.pal, c.confirmLeave, c.rolloutPrompt, c.note = false, palette{}, false, nil, ""
	head, foot := c.header(), c.footer()
	lines := append(head, c.screen.view(c.w, c.h-len(head)-len(foot))...)
	for len(lines) > 0 && strings.TrimSpace(term.StripStyle(lines[len(lines)-1])) == "" {
		lines = lines[:len(lines)-1]
	}
	return append(lines, c.th.Paint(term.Faint, strings.Repeat(c.th.Signs.Rule, c.w)))
}

// exitSummary is exitSummary for a watch: its progress and the command that opens it again.
func (scr *watchScreen) exitSummary() []string {
	t, w := scr.c.th.Printed(), min(max(scr.c.w, minWidth), 120)
	b, now := scr.shown(), scr.clock()
	if b.Events == 0 {
		if scr.err != nil {
			x := view.Explain(scr.err, scr.c.deps.commands)
			return []string{t.Row(w).Add(term.Bad, t.Fail+" ").Add(term.Plain, x.What).String(), t.Row(w).Add(term.Faint, "  fix  ").Add(term.Plain, x.Remedy).String()}
		}
		return nil
	}
	done, total := b.Places()
	head := fmt.Sprintf("%d of %s at the target", done, words.Count(total, "node"))
	if eta := view.ETA(scr.c.page(), b, now); eta != "" {
		head += ", " + eta
	}
	if scr.origin == fromReplay {
		head += ", recorded"
	}
	reason, _ := scr.reason()
	return []string{
		t.Row(w).Add(term.Strong, cmp.Or(term.Clean(b.Cluster), "cluster")+": ").Add(term.Plain, head+", "+now.UTC().Format("15:04:05Z")).String(),
		t.Row(w).Add(term.Faint, "  why  ").Add(term.Plain, term.AsciiIf(t.Ascii, reason)).String(),
		t.Row(w).Add(term.Faint, "  back ").Add(term.Accent, scr.command()).String(),
	}
}
