package console

import (
	"fmt"
	"strings"

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
	all := c.h - len(head) - len(foot)
	w, room := c.bodyWidth(), c.bodyRoom(all)
	var body []string
	switch {
	case c.pal.open:
		body = c.pal.view(c.page(), c.screen.title(), c.actions(), w, room)
	case c.help.open:
		body = c.help.view(w, room)
	default:
		body = c.screen.view(w, room)
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
	if c.guard.name() != "" {
		body = c.guard.frame(all, body)
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
		lines = append(lines, c.run.doing(), "The run continues.")
	}
	lines = append(lines, "q: "+c.quit.label())
	if c.quit.asking {
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
	case c.t.Cluster != "" && (c.ran || c.upg.active()):
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
	return view.MarkIf(c.page(), c.w, c.t.Simulated || c.home != nil && c.home.Simulated || c.plan != nil && c.plan.Simulated, c.t.NotAttested || c.home != nil && c.home.NotAttested || c.plan != nil && c.plan.NotAttested)
}

func (c *console) headTarget() string {
	if c.plan != nil && c.upg.active() {
		if !c.upg.about(c.screen) && c.screen != c.log {
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

// footer is the bottom of the screen: why line or question, key line, safety line.
func (c *console) footer() []string {
	var lines []string
	if q := c.rollout.prompt; q != nil {
		lines = append(lines, c.th.Row(c.w).Add(term.Plain, " ").Add(term.Caution, c.th.Warn+" "+q.text+" ").String())
		lines = append(lines, c.th.Below(c.w, 3, 2, term.Plain, q.detail+" Enter confirms, Esc goes back.")...)
	} else if c.quit.asking {
		lines = append(lines, c.quit.question()...)
	} else if c.guard.types {
		lines = append(lines, c.guard.prompt())
	} else if c.secret.open() {
		lines = append(lines, c.secret.prompt()...)
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
