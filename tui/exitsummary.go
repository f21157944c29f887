package tui

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
	t, w := c.th.Printed(), min(max(c.w, view.MinWidth), 120)
	var lines []string
	add := func(r *term.Row) { lines = append(lines, r.String()) }
	back := c.deps.Commands.Command("")
	if c.upgrading() && (c.t.Result == nil || c.t.Result.Status != plan.StateDone) {
		back = c.resumeCommand()
	}
	frame := c.lastFrame()
	switch {
	case c.deps.OnlyWatch:
		return c.watch.exitSummary()
	case !c.ran && c.upgrading():
		what := "nothing has been changed; come back: "
		if c.err != nil {
			x := view.Explain(c.err, c.deps.Commands)
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
		x := view.Explain(c.err, c.deps.Commands)
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
			add(t.Row(w).Add(term.Faint, "  next ").Add(term.Accent, c.deps.Commands.Line(term.Clean(n))))
		}
	}
	add(t.Row(w).Add(term.Faint, "  back ").Add(term.Accent, back))
	if c.t.Run != "" && c.deps.Workspace != nil && c.upg.lockedBy == "" && (c.plan == nil || !c.plan.Rehearsal) {
		add(t.Row(w).Add(term.Faint, "  log  ").Add(term.Plain, c.deps.Workspace.Path(plan.RunsDir+"/"+c.t.Run)))
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
	if !c.upgrading() || !c.ran || !shows || c.w < view.MinWidth || c.h < view.MinHeight {
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
