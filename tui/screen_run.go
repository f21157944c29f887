package tui

import (
	"fmt"
	"strconv"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/tui/term"
	"constellation/tui/view"
)

// pane is a part of the run screen that can be scrolled.
type pane int

const (
	paneSteps pane = iota
	paneMachines
	paneLog
	panes
)

// runScreen is the state of the run screen: the scroll position of each pane and the focus.
type runScreen struct {
	c *console
	focus pane
	at    [panes]int // last row shown, or -1 to follow the newest
}

func newRunView(c *console) *runScreen { return &runScreen{c: c, focus: paneLog, at: [panes]int{-1, -1, -1}} }

var runKeys = []binding{
	on("tab", "Tab", "next pane", "panes", act(func(c *console) { c.run.focus = (c.run.focus + 1) % panes })).footed("pane"),
	on("shift+tab", "⇧Tab", "previous pane", "panes", act(func(c *console) { c.run.focus = (c.run.focus + panes - 1) % panes })),
	on("up k", "↑ k", "scroll up", "move", act(func(c *console) { c.scrollRun(-1) })),
	on("down j", "↓ j", "scroll down", "move", act(func(c *console) { c.scrollRun(1) })),
	on("G end f", "G", "follow the newest", "move", act(func(c *console) { c.run.at[c.run.focus] = -1 })),
	on("l", "l", "full log", "view", act(func(c *console) { c.openLog() })).footed("full log"),
	on("y", "y", "copy the newest line of the log", "copy", act((*console).copyLastLine)).footed("copy line"),
}

func (c *console) copyLastLine() {
	if n := c.t.Log.Len(); n > 0 {
		c.copyText(c.t.Log.At(n-1).Text, "the line")
		return
	}
	c.copyText("", "")
}

// rows returns how many rows a pane has.
func (c *console) rows(p pane) int {
	switch p {
	case paneSteps:
		return len(view.StepRows(c.page(), c.w, &c.t, c.running))
	case paneMachines:
		if c.upgrading() {
			return len(c.t.Machines) // the run has not changed the others yet
		}
		return len(c.t.Machines) + len(c.t.Missing())
	}
	return c.t.Log.Len()
}

func (c *console) scrollRun(by int) {
	p := c.run.focus
	n := c.rows(p)
	at := c.run.at[p]
	if at < 0 {
		at = max(0, n-1)
	}
	at += by
	switch {
	case at >= n-1:
		c.run.at[p] = -1
	default:
		c.run.at[p] = max(at, 0)
	}
}

// part returns the range of h rows of a pane of n rows: at the scroll position, or around row end.
func (c *console) part(p pane, n, h, end int) (from, to int) {
	if at := c.run.at[p]; at >= 0 {
		to = min(n, max(at+1, h))
		return max(0, to-h), to
	}
	return view.Window(n, end, h)
}

func (c *console) paneTitle(p pane, title string) string {
	if c.run.focus == p {
		return title + " " + c.th.Cursor
	}
	return title
}

func (c *console) runView(w, h int) []string {
	if c.plan == nil {
		return []string{"", c.th.Row(w).Add(term.Accent, "  "+c.th.Spin(c.frame)+" ").Add(term.Plain, c.busy).String()}
	}
	steps := view.StepRows(c.page(), w, &c.t, c.running)
	if w >= 120 {
		return c.runWide(w, h)
	}
	// Steps come first, then machines; the log gets the rest, but at least three lines.
	const least = 4
	machines := c.rows(paneMachines)
	sh := min(len(steps), max(3, h-2-least-min(machines+1, 4)))
	mh := 0
	if n := machines; n > 0 {
		mh = min(n, max(1, h-sh-2-least))
		if h >= 24 {
			mh = min(n, max(mh, 3))
		} else {
			mh = min(mh, max(3, (h-sh)/3))
		}
	}
	lines := []string{c.th.Rule(w, c.paneTitle(paneSteps, "Steps"), view.StepsRemark(c.page(), &c.t))}
	from, to := c.part(paneSteps, len(steps), sh, view.CurrentRow(c.page(), steps, sh))
	for _, s := range steps[from:to] {
		lines = append(lines, s.Line)
	}
	if mh > 0 {
		lines = append(lines, c.machinesView(w, mh)...)
	}
	return append(lines, c.logTail(w, h-len(lines))...)
}

// runWide shows steps and machines side by side.
func (c *console) runWide(w, h int) []string {
	left := w * 55 / 100
	right := w - left - 1
	steps := view.StepRows(c.page(), left, &c.t, c.running)
	machineRows := c.rows(paneMachines)
	if machineRows > view.ManyMachines && c.run.at[paneMachines] < 0 {
		machineRows = len(c.t.Groups())
	}
	top := max(min(max(len(steps), machineRows)+1, h*3/5), min(8, h/2))
	lines := []string{c.th.Rule(left, c.paneTitle(paneSteps, "Steps"), view.StepsRemark(c.page(), &c.t))}
	from, to := c.part(paneSteps, len(steps), top-1, view.CurrentRow(c.page(), steps, top-1))
	for _, s := range steps[from:to] {
		lines = append(lines, s.Line)
	}
	machines := c.machinesView(right, top-1)
	out := make([]string, 0, h)
	for i := range top {
		var l, r string
		if i < len(lines) {
			l = lines[i]
		}
		if i < len(machines) {
			r = machines[i]
		}
		out = append(out, l+strings.Repeat(" ", max(0, left-term.StyledWidth(l)))+c.th.Paint(term.Faint, c.th.Side)+r)
	}
	return append(out, c.logTail(w, h-len(out))...)
}

// machinesView shows the machines in h lines below a heading; many machines are shown by group.
func (c *console) machinesView(w, h int) []string {
	ready, wanted := c.t.Ready()
	lines := []string{c.th.Rule(w, c.paneTitle(paneMachines, "Machines"), fmt.Sprintf("%d of %d ready", ready, wanted))}
	if len(c.t.Machines) > view.ManyMachines && c.run.at[paneMachines] < 0 {
		groups := c.t.Groups()
		for _, g := range groups[:min(len(groups), h)] {
			done := g.States[engine.NodeReady]
			r := c.th.Row(w).Add(term.Plain, " ").Col(term.Plain, g.Group, 16).Num(term.Plain, fmt.Sprintf("%d/%d", done, g.Total), 11)
			r.Add(term.Good, c.th.Meter(int64(done), int64(g.Total), min(30, w/4))).Pad(2)
			for _, s := range view.NodeStates[1:] {
				if k := g.States[s]; k > 0 {
					_, st := view.NodeSign(c.page(), s)
					r.Add(st, strconv.Itoa(k)+" "+s+" ")
				}
			}
			lines = append(lines, r.String())
		}
		return lines
	}
	rows := view.MachineList(c.page(), w, &c.t, c.upgrading(), c.running)
	from, to := c.part(paneMachines, len(rows), h, view.FirstUnready(c.page(), &c.t))
	if to-from == len(rows) || h < 2 {
		return append(lines, rows[from:to]...)
	}
	lines = append(lines, rows[from:to-1]...)
	return append(lines, c.th.Row(w).Pad(3).Add(term.Faint, fmt.Sprintf("… %d more: Tab to here, then ↑↓", len(rows)-(to-from)+1)).String())
}

// logTail shows the end of the log in h lines, heading included.
func (c *console) logTail(w, h int) []string {
	if h < 2 {
		return nil
	}
	n := c.t.Log.Len()
	remark := "following"
	switch {
	case n == 0:
		remark = ""
	case c.run.at[paneLog] >= 0:
		remark = fmt.Sprintf("line %d of %d, G follows", c.run.at[paneLog]+1, n)
	}
	lines := []string{c.th.Rule(w, c.paneTitle(paneLog, "Log"), remark)}
	if n == 0 {
		what := "log lines of kubeadm and the bootstrapper appear here"
		if c.upgrading() {
			what = "log lines of services, operator and kubeadm appear here"
		}
		return append(lines, c.th.Row(w).Add(term.Faint, "   "+what).String())
	}
	from, to := c.part(paneLog, n, h-1, n-1)
	if c.run.at[paneLog] < 0 {
		from, to = max(0, n-h+1), n
	}
	col := view.SourceColumnOf(c.page(), c.w, func(i int) view.LogLine { return c.t.Log.At(from + i) }, to-from)
	if col.Node != "" {
		lines[0] = c.th.Rule(w, c.paneTitle(paneLog, "Log of "+col.Node), remark)
	}
	for i := from; i < to; i++ {
		lines = append(lines, view.LogRow(c.page(), c.t.Log.At(i), w, col))
	}
	return lines
}

// openLog shows the log screen; Esc goes back.
func (c *console) openLog() {
	if c.screen != screenLog {
		c.back = c.screen
	}
	c.screen = screenLog
	c.log.follow = true
}

var _ tea.Model = (*console)(nil)
