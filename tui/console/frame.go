package console

import (
	"fmt"
	"strings"

	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// View renders the screen. It is pure: the same model gives the same frame.
func (c *console) View() string {
	if c.w < view.MinWidth || c.h < view.MinHeight {
		return strings.Join(c.tooSmall(), "\n")
	}
	head := c.header()
	foot := c.footer()
	room := c.h - len(head) - len(foot)
	var body []string
	switch {
	case c.pal.open:
		body = c.pal.view(c.page(), c.screen.title(), c.actions(), c.w, room)
	case c.help:
		body = c.helpView(c.w, room)
	default:
		body = c.screen.view(c.w, room)
	}
	if len(body) > room {
		body = body[:room]
	}
	for len(body) < room {
		body = append(body, "")
	}
	if c.screen.stale() {
		for i := range body {
			body[i] = view.Dim(c.page(), body[i])
		}
	}
	return strings.Join(append(append(head, body...), foot...), "\n")
}

// tooSmall replaces the screen in a window that is too small.
func (c *console) tooSmall() []string {
	var short []string
	if c.w < view.MinWidth {
		short = append(short, fmt.Sprintf("width %d of %d", c.w, view.MinWidth))
	}
	if c.h < view.MinHeight {
		short = append(short, fmt.Sprintf("height %d of %d", c.h, view.MinHeight))
	}
	lines := []string{"The window is too small: " + strings.Join(short, ", ")}
	if c.running {
		lines = append(lines, c.why(), "The run continues.")
	}
	lines = append(lines, "q: "+c.quitLabel())
	if c.confirmLeave {
		lines = append(lines, "Leave? Enter leaves, Esc stays")
	}
	var out []string
	for _, l := range lines {
		out = append(out, term.Wrap(term.AsciiIf(c.th.Ascii, l), max(c.w, 1))...)
	}
	return out[:min(len(out), max(c.h, 1))]
}

// header is the top of the screen: cluster, target, mode, and the progress of the steps.
func (c *console) header() []string {
	if s, ok := c.screen.(interface{ header() []string }); ok {
		return s.header()
	}
	name := "no cluster yet"
	switch {
	case c.t.Cluster != "" && (c.ran || c.upgrading()):
		name = c.t.Cluster
	case c.home != nil && c.home.Cluster != "":
		name = term.Clean(c.home.Cluster)
	}
	r := c.th.Row(c.w).Add(term.Accent, " "+c.th.Brand+" ").Add(term.Strong, name).Add(term.Caution, c.mark())
	if to := c.headTarget(); to != "" {
		r.Add(term.Faint, "  "+to)
	}
	r.Right(term.Faint, c.screen.mode())
	lines := []string{r.String()}
	if rail := c.screen.rail(); rail != "" {
		lines = append(lines, rail)
	}
	return lines
}

// mark is the label behind the cluster's name in the header.
func (c *console) mark() string {
	return view.MarkIf(c.page(), c.w, c.t.Simulated || c.home != nil && c.home.Simulated || c.plan != nil && c.plan.Simulated)
}

// aboutUpgrade reports whether a screen belongs to an upgrade.
func (c *console) aboutUpgrade(s screen) bool {
	return c.upgrading() && (s == c.upgradePlan || s == c.upgradeConfirm || s == c.run || s == c.result)
}

func (c *console) headTarget() string {
	if c.plan != nil && c.upgrading() {
		if !c.aboutUpgrade(c.screen) && c.screen != c.log {
			return "" // the upgrade has ended
		}
		return view.ChangeSummary(c.page(), c.plan)
	}
	if c.plan != nil && c.w >= 80 {
		var parts []string
		for _, v := range []string{c.plan.To.Kubernetes, c.plan.To.Release} {
			if v != "" {
				parts = append(parts, term.Clean(v))
			}
		}
		return strings.Join(parts, " "+c.th.Dot+" ")
	}
	return ""
}

// rail shows the screens of init as a progress line.
func (c *console) rail(at int) string {
	r := c.th.Row(c.w).Add(term.Plain, " ")
	link := 4
	if c.w < 80 {
		link = 1
	}
	for i, s := range c.wizardSteps() {
		sign, st, line := c.th.Pending, term.Faint, c.th.Signs.Rule
		switch {
		case !c.succeeded() && at == len(c.wizardSteps())-1 && i >= c.failedAt():
			sign, st = c.th.Fail, term.Bad
			if i > c.failedAt() && i < at {
				sign, st = c.th.Pending, term.Faint
			}
		case i < at || i == at && s.screen == c.result:
			sign, st = c.th.OK, term.Good
		case i == at:
			sign, st = c.th.Running, term.Accent
		}
		if i < at {
			line = c.th.Heavy
		}
		name := term.Plain
		if i > at {
			name = term.Faint
		}
		if i == at {
			name = term.Strong
		}
		r.Add(st, sign).Add(name, " "+s.name)
		if i < len(c.wizardSteps())-1 {
			r.Add(term.Faint, " "+strings.Repeat(line, link)+" ")
		}
	}
	return r.String()
}

// failedAt is the index of the failed screen on the rail.
func (c *console) failedAt() int {
	if c.ran {
		return c.wizardAt(c.run)
	}
	return c.wizardAt(c.preflight)
}

func (c *console) succeeded() bool {
	return c.err == nil || plan.ExitCode(c.err) == plan.ExitNothing
}

// footer is the bottom of the screen: why line or question, key line, safety line.
func (c *console) footer() []string {
	var lines []string
	if q := c.rolloutPrompt; q != nil {
		lines = append(lines, c.th.Row(c.w).Add(term.Plain, " ").Add(term.Caution, c.th.Warn+" "+q.text+" ").String())
		lines = append(lines, c.th.Below(c.w, 3, 2, term.Plain, q.detail+" Enter confirms, Esc goes back.")...)
	} else if c.confirmLeave {
		lines = append(lines, c.leaveQuestion()...)
	} else {
		lines = append(lines, c.screen.why()...)
	}
	lines = append(lines, c.th.Paint(term.Faint, strings.Repeat(c.th.Signs.Rule, c.w)))
	if c.note != "" {
		lines = append(lines, c.th.Below(c.w, 1, 2, term.Caution, c.note)...)
	} else {
		lines = append(lines, c.keyLine(c.w))
	}
	if s := c.screen.safety(); s != "" {
		lines = append(lines, c.th.Row(c.w).Add(term.Faint, " "+s).String())
	}
	return lines
}

// leaveQuestion asks whether to leave and says what that does.
func (c *console) leaveQuestion() []string {
	what := "The current step finishes first; the same command resumes."
	if c.backup.running {
		return []string{
			c.th.Row(c.w).Add(term.Plain, " ").Add(term.Caution, c.th.Warn+" Stop this backup, and leave? ").Add(term.Plain, "Its files are deleted.").String(),
			c.th.Row(c.w).Add(term.Faint, "   Enter leaves, Esc stays. Complete backups are kept.").String(),
		}
	}
	if c.t.PastFinal() {
		what = "The cluster continues alone; the same command reattaches."
	}
	return []string{
		c.th.Row(c.w).Add(term.Plain, " ").Add(term.Caution, c.th.Warn+" Leave this run? ").Add(term.Plain, what).String(),
		c.th.Row(c.w).Add(term.Faint, "   Enter leaves, Esc stays, Ctrl-C again leaves at once. Nothing is lost.").String(),
	}
}

// why is the line that says what the run waits for or does.
func (c *console) why() string {
	switch {
	case c.leaving:
		return "Leaving when this step can be resumed. Ctrl-C leaves at once."
	case c.running && c.t.Why.Text != "":
		return "Why waiting (" + term.Duration(c.now.Sub(c.t.Why.Since)) + "): " + c.t.Why.Text
	case c.running:
		s := c.t.Running()
		if s == nil {
			return "Reading the current state"
		}
		text := "Now (" + term.Duration(c.now.Sub(s.Began)) + "): " + s.Title
		if d := s.Doing(); d != "" {
			text += ": " + d
		}
		return text
	case c.busy != "":
		return "Now: " + c.busy
	}
	return ""
}

// Boxes are centred in w columns. Their lines have at most inner columns.

// page is what the pages of this frame share.
func (c *console) page() view.Page {
	return view.Page{Theme: c.th, Now: c.now, Frame: c.frame, Commands: c.deps.Commands}
}

// page is page at the time on the clock of the board.
func (scr *watchScreen) page() view.Page {
	p := scr.c.page()
	p.Now = scr.clock()
	return p
}
