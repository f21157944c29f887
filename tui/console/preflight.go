package console

import (
	"context"
	"fmt"
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// preflightScreen is the screen of the preflight checks and their results.
type preflightScreen struct {
	defaults
	c        *console
	t        view.Timeline
	done     bool
	err      error
	findings []plan.Finding
	at       int
}

// preflightEnded is the end of the checks.
type preflightEnded struct {
	findings []plan.Finding
	err      error
}

func (scr *preflightScreen) title() string   { return "preflight" }
func (scr *preflightScreen) mode() string    { return scr.c.wizard.mode(scr) }
func (scr *preflightScreen) rail() string    { return scr.c.wizard.rail(scr.c.wizard.at(scr)) }
func (scr *preflightScreen) safety() string  { return "scripted  " + scr.command() }
func (scr *preflightScreen) command() string { return scr.c.runCommand() }

func (scr *preflightScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	if msg, ok := msg.(preflightEnded); ok {
		scr.done, scr.err, scr.findings = true, msg.err, msg.findings
		scr.selectWorst()
		return nil, true
	}
	return nil, false
}

// takeEvents takes events of the checks.
func (scr *preflightScreen) takeEvents(events []plan.Event) tea.Cmd {
	for _, ev := range events {
		scr.t.Apply(ev)
	}
	return nil
}

// results returns the results: the checks of events, and findings without an event.
func (p *preflightScreen) results() []view.Check {
	list := p.t.Checks
	for _, f := range p.findings {
		if !slices.ContainsFunc(list, func(c view.Check) bool { return c.ID == term.Clean(f.ID) }) {
			list = append(list[:len(list):len(list)], view.CheckOf(f))
		}
	}
	return list
}

// selectWorst selects the worst check.
func (p *preflightScreen) selectWorst() {
	for _, s := range []plan.Severity{plan.Block, plan.Warn} {
		if i := slices.IndexFunc(p.results(), func(c view.Check) bool { return c.State == string(s) }); i >= 0 {
			p.at = i
			return
		}
	}
}

func (p *preflightScreen) counts() (done, warn, block, total int) {
	for _, c := range p.results() {
		total++
		switch plan.Severity(c.State) {
		case plan.Warn:
			warn++
			done++
		case plan.Block:
			block++
			done++
		case plan.Info:
			done++
		}
	}
	return done, warn, block, total
}

func (scr *preflightScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "continue to the plan", "wizard", scr.c.wizard.makePlan).footed("show plan").unless(func() string {
			_, _, block, _ := scr.counts()
			switch {
			case !scr.done:
				return "the checks are still running"
			case scr.err != nil:
				return "the checks could not run"
			case block > 0:
				return words.Count(block, "check") + " failed; fix it, then r"
			case scr.c.task.busy != "":
				return "planning"
			}
			return ""
		}),
		on("r", "r", "run the checks again", "wizard", scr.c.preflight.start).footed("check again"),
		on("up k", "↑ k", "previous check", "move", act(func() { scr.at = max(0, scr.at-1) })),
		on("down j", "↓ j", "next check", "move", act(func() { scr.at = max(0, min(len(scr.results())-1, scr.at+1)) })),
		on("y", "y", "copy the remedy of the selected check", "copy", act(func() {
			if l := scr.results(); scr.at < len(l) {
				scr.c.copyText(scr.c.deps.Commands.Text(l[scr.at].Remedy), "the remedy")
			}
		})).footed("copy fix"),
		on("esc", "Esc", "back to the configuration", "back", act(func() {
			scr.c.task.stop()
			scr.c.screen = scr.c.config
		})).footed("back"),
	}
}

func (p *preflightScreen) why() []string {
	c := p.c
	r := c.th.Row(c.w).Add(term.Plain, " ")
	_, warn, block, _ := p.counts()
	switch {
	case p.err != nil:
		r.Add(term.Bad, c.th.Fail+" ").Add(term.Strong, "The checks could not run. Nothing has been created.")
	case !p.done || c.task.busy != "":
		r.Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Plain, c.task.busy)
	case block > 0:
		r.Add(term.Bad, c.th.Fail+" ").Add(term.Strong, "Blocked: "+words.Count(block, "failed check")+". Fix it and press r; nothing has been created yet.")
	case warn > 0:
		r.Add(term.Caution, c.th.Warn+" ").Add(term.Strong, words.Count(warn, "warning")+": read before you continue. Enter shows the plan.")
	default:
		r.Add(term.Good, c.th.OK+" ").Add(term.Strong, "All checks passed. Enter shows the plan; nothing has been created yet.")
	}
	return []string{r.String()}
}

func (scr *preflightScreen) view(w, h int) []string {
	p := scr
	done, warn, block, total := p.counts()
	remark := fmt.Sprintf("%d of %d done", done, total)
	if warn > 0 {
		remark += ", " + words.Count(warn, "warning")
	}
	if block > 0 {
		remark += fmt.Sprintf(", %d failed", block)
	}
	lines := []string{scr.c.th.Rule(w, "Preflight", remark)}
	if p.err != nil {
		return append(lines, view.Problem(scr.c.page(), w, p.err)...)
	}
	list := p.results()
	if len(list) == 0 && p.done {
		return append(lines, scr.c.th.Row(w).Add(term.Faint, "   there was nothing to check").String())
	}
	left := w
	if w >= 110 { // the details of the selected check are beside the list
		left = w * 6 / 10
	}
	var rows []string
	top := 0
	for i, x := range list {
		if i == p.at {
			top = len(rows)
		}
		rows = append(rows, view.CheckRow(scr.c.page(), x, left, i == p.at))
		if left == w && (i == p.at || plan.Severity(x.State) == plan.Block || plan.Severity(x.State) == plan.Warn) {
			rows = append(rows, view.CheckDetail(scr.c.page(), x, w, 16)...)
		}
	}
	from, to := view.Window(len(rows), top, h-1)
	if hidden := len(rows) - (to - from); hidden > 0 && h > 3 { // the last row shows their number
		from, to = view.Window(len(rows), top, h-2)
		rows = append(rows[from:to:to], scr.c.th.Row(left).Pad(3).Add(term.Faint, fmt.Sprintf("%s %s: ↑↓ scrolls", scr.c.th.Ellipsis, words.Count(hidden+1, "more line"))).String())
	} else {
		rows = rows[from:to]
	}
	if left == w {
		return append(lines, rows...)
	}
	var side []string
	if p.at < len(list) {
		x := list[p.at]
		for _, l := range term.Wrap(x.Title, w-left-4) {
			side = append(side, scr.c.th.Paint(term.Strong, l))
		}
		side = append(side, "")
		side = append(side, view.CheckDetail(scr.c.page(), x, w-left-3, 0)...)
	}
	for i := range max(len(rows), len(side)) {
		var l, r string
		if i < len(rows) {
			l = rows[i]
		}
		if i < len(side) {
			r = side[i]
		}
		lines = append(lines, l+strings.Repeat(" ", max(0, left-term.StyledWidth(l)))+scr.c.th.Paint(term.Faint, scr.c.th.Side)+" "+r)
	}
	return lines
}

// start runs the checks.
func (scr *preflightScreen) start() tea.Cmd {
	scr.c.screen = scr.c.preflight
	*scr.c.preflight, scr.c.upg = preflightScreen{c: scr.c}, upgradeState{c: scr.c}
	return scr.c.task.launch("checking", scr.takeEvents, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		f, err := scr.c.deps.Engine.Preflight(ctx, emit)
		return preflightEnded{f, err}
	})
}
