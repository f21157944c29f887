package console

import (
	"fmt"
	"strings"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// exitSummaryLines is the maximum number of lines that stay on the terminal after the console.
const exitSummaryLines = 12

// exitSummary returns the lines that stay on the terminal after the console: the state of the
// run and the command that comes back to it.
func (c *console) exitSummary() []string {
	x := summary{c: c, t: c.th.Printed(), w: min(max(c.w, view.MinWidth), 120), back: c.deps.Commands.Command("")}
	if c.upg.active() && (c.t.Result == nil || c.t.Result.Status != plan.StateDone) {
		x.back = c.upg.resumeCommand()
	}
	frame := c.lastFrame()
	switch {
	case c.deps.Clusters != nil && !c.ran:
		return nil
	case c.changes.resume != "":
		x.add(x.t.Row(x.w).Add(term.Caution, x.t.Stopped+" ").Add(term.Strong, "machines: ").Add(term.Plain, "left before the end; nothing is lost"))
		x.row("  back ", term.Accent, c.changes.resume)
		return x.lines
	case c.deps.OnlyWatch:
		return c.watch.exitSummary()
	case !c.ran && c.upg.active():
		x.upgradeNotStarted()
		return x.lines
	case !c.ran:
		x.initNotStarted()
		return x.lines
	}
	x.outcome()
	x.progress()
	x.commands()
	return append(frame, x.lines[:min(len(x.lines), exitSummaryLines)]...)
}

// summary collects the lines of exitSummary.
type summary struct {
	c     *console
	t     *term.Theme
	w     int
	back  string // the command that comes back
	lines []string
}

func (x *summary) add(r *term.Row) { x.lines = append(x.lines, r.String()) }

// row is a line with a label in front.
func (x *summary) row(label string, st term.Style, text string) {
	x.add(x.t.Row(x.w).Add(term.Faint, label).Add(st, text))
}

// failure adds what went wrong, why, and the remedy; named puts the cluster in front.
func (x *summary) failure(named bool) {
	e := view.Explain(x.c.err, x.c.deps.Commands)
	r := x.t.Row(x.w).Add(term.Bad, x.t.Fail+" ")
	if named {
		r.Add(term.Strong, x.c.t.Cluster+": ").Add(term.Plain, e.What)
	} else {
		r.Add(term.Strong, e.What)
	}
	x.add(r)
	for _, p := range [][2]string{{"  why  ", e.Why}, {"  fix  ", e.Remedy}} {
		if p[1] != "" {
			x.row(p[0], term.Plain, p[1])
		}
	}
}

// upgradeNotStarted is an upgrade that failed or was left before its run.
func (x *summary) upgradeNotStarted() {
	if x.c.err != nil {
		x.failure(false)
	}
	x.row("nothing has been changed; come back: ", term.Accent, x.back)
}

// initNotStarted is an init that was left before its run.
func (x *summary) initNotStarted() {
	h := x.c.home
	switch {
	case h == nil || h.Stage == engine.StageCluster:
	case h.Stage == engine.StagePartial:
		x.row("nothing has been changed; come back: ", term.Accent, x.back)
	case x.c.changes.made:
		x.row("machines were changed; come back: ", term.Accent, x.back)
	default:
		x.row("nothing has been created; come back: ", term.Accent, x.back)
	}
}

// outcome is the result of the run so far.
func (x *summary) outcome() {
	c, t := x.c, x.t
	switch {
	case c.running || c.quit.pending && !c.result.succeeded():
		x.add(t.Row(x.w).Add(term.Caution, t.Stopped+" ").Add(term.Strong, c.t.Cluster+": ").Add(term.Plain, fmt.Sprintf("left after %s, %s", term.Clock(c.t.Elapsed(c.now)), view.StepsRemark(c.page(), &c.t))))
	case c.result.succeeded():
		text := "done"
		if c.t.Result != nil && c.t.Result.Text != "" {
			text = c.t.Result.Text
		}
		x.add(t.Row(x.w).Add(term.Good, t.OK+" ").Add(term.Strong, c.t.Cluster+": ").Add(term.Plain, text))
	default:
		x.failure(true)
	}
}

// progress is the unfinished steps and the number of nodes.
func (x *summary) progress() {
	c := x.c
	var steps []string
	for i := range c.t.Steps {
		s := &c.t.Steps[i]
		if s.State == plan.StateRunning || s.State == plan.StateStopped || s.State == plan.StateFailed {
			steps = append(steps, s.Title)
		}
	}
	if len(steps) > 0 {
		x.row("  at   ", term.Plain, strings.Join(steps, ", "))
	}
	if n, total := c.upg.atTarget(); total > 0 && c.upg.active() {
		x.row("  nodes ", term.Plain, fmt.Sprintf("%d of %d at the target", n, total))
	} else if ready, wanted := c.t.Ready(); wanted > 0 && !c.upg.active() {
		x.row("  nodes ", term.Plain, fmt.Sprintf("%d of %d ready", ready, wanted))
	}
}

// commands are the next commands, the one that comes back, and the folder of the log.
func (x *summary) commands() {
	c := x.c
	if c.result.succeeded() && !c.quit.pending && c.t.Result != nil {
		for _, n := range c.t.Result.Next {
			x.row("  next ", term.Accent, c.deps.Commands.Line(term.Clean(n)))
		}
	}
	x.row("  back ", term.Accent, x.back)
	if c.t.Run != "" && c.deps.Workspace != nil && c.upg.lockedBy == "" && (c.plan == nil || !c.plan.Rehearsal) {
		x.row("  log  ", term.Plain, c.deps.Workspace.Path(plan.RunsDir+"/"+c.t.Run))
	}
}

// lastFrame is the last frame of an upgrade without overlays and prompts; nil if there was
// no run.
func (c *console) lastFrame() []string {
	if c.screen == c.log {
		c.screen = c.log.back
	}
	shows := c.upg.about(c.screen) || c.screen == c.watch
	if !c.upg.active() || !c.ran || !shows || c.w < view.MinWidth || c.h < view.MinHeight {
		return nil
	}
	c.help.open, c.pal, c.quit.asking, c.rollout.prompt, c.note = false, palette{}, false, nil, ""
	head, foot := c.header(), c.footer()
	lines := append(head, c.screen.view(c.w, c.h-len(head)-len(foot))...)
	for len(lines) > 0 && strings.TrimSpace(term.StripStyle(lines[len(lines)-1])) == "" {
		lines = lines[:len(lines)-1]
	}
	return append(lines, c.th.Paint(term.Faint, strings.Repeat(c.th.Signs.Rule, c.w)))
}
