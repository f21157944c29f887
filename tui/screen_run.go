package tui

import (
	"fmt"
	"strconv"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/tui/term"
)

// pane is a part of the run screen that can be scrolled.
type pane int

const (
	paneSteps pane = iota
	paneMachines
	paneLog
	panes
)

// runView is the state of the run screen: the scroll position of each pane and the focus.
type runView struct {
	focus pane
	at    [panes]int // last row shown, or -1 to follow the newest
}

func newRunView() runView { return runView{focus: paneLog, at: [panes]int{-1, -1, -1}} }

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
	if n := c.t.log.len(); n > 0 {
		c.copyText(c.t.log.at(n-1).text, "the line")
		return
	}
	c.copyText("", "")
}

// rows returns how many rows a pane has.
func (c *console) rows(p pane) int {
	switch p {
	case paneSteps:
		return len(stepRows(c.page(), c.w, &c.t, c.running))
	case paneMachines:
		if c.upgrading() {
			return len(c.t.machines) // the run has not changed the others yet
		}
		return len(c.t.machines) + len(c.t.missing())
	}
	return c.t.log.len()
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
	return window(n, end, h)
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
	steps := stepRows(c.page(), w, &c.t, c.running)
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
	lines := []string{c.th.Rule(w, c.paneTitle(paneSteps, "Steps"), stepsRemark(c.page(), &c.t))}
	from, to := c.part(paneSteps, len(steps), sh, currentRow(c.page(), steps, sh))
	for _, s := range steps[from:to] {
		lines = append(lines, s.line)
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
	steps := stepRows(c.page(), left, &c.t, c.running)
	machineRows := c.rows(paneMachines)
	if machineRows > manyMachines && c.run.at[paneMachines] < 0 {
		machineRows = len(c.t.groups())
	}
	top := max(min(max(len(steps), machineRows)+1, h*3/5), min(8, h/2))
	lines := []string{c.th.Rule(left, c.paneTitle(paneSteps, "Steps"), stepsRemark(c.page(), &c.t))}
	from, to := c.part(paneSteps, len(steps), top-1, currentRow(c.page(), steps, top-1))
	for _, s := range steps[from:to] {
		lines = append(lines, s.line)
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

func stepsRemark(pg page, t *timeline) string {
	return fmt.Sprintf("%d of %d done", t.finished(), len(t.steps))
}

// stepRow is a line of the steps pane.
type stepRow struct {
	line    string
	current bool // the step under way
	inner   bool // progress of the step under way
}

// currentRow is the row to show in the middle of h rows: the step under way, or a row below
// it if its progress needs the room.
func currentRow(pg page, rows []stepRow, h int) int {
	for i, r := range rows {
		if !r.current {
			continue
		}
		end := i + 1
		for end < len(rows) && rows[end].inner {
			end++
		}
		from := min(i, max(i-h/2, end-h))
		return from + h/2
	}
	return 0
}

// stepRows renders the steps; the one under way has its progress below it.
func stepRows(pg page, w int, t *timeline, running bool) []stepRow {
	var rows []stepRow
	title := 24
	for _, s := range t.steps {
		title = max(title, term.Width(s.title))
	}
	title = min(title, w-12)
	for i := range t.steps {
		s := &t.steps[i]
		sign, st := stepSign(pg, s, running)
		r := pg.Row(w).Add(term.Plain, " ").Add(st, sign).Add(term.Plain, " ")
		name := term.Plain
		if s.state == "" {
			name = term.Faint
		}
		if s.state == engine.StateRunning {
			name = term.Strong
		}
		r.Col(name, s.title, title).Pad(1)
		tail := ""
		switch s.state {
		case engine.StateRunning:
			tail = term.Duration(pg.now.Sub(s.began))
		case engine.StateSkipped:
			tail = "already done"
		case "":
			if s.final {
				tail = "then the cluster continues on its own"
			}
		default:
			tail = term.Duration(s.took)
		}
		if room := w - r.Used - term.Width(tail) - 3; room > 12 && s.text != tail && s.state != "" && s.state != engine.StateRunning {
			r.Add(term.Faint, term.Cut(s.text, room, pg.Ellipsis))
		}
		r.Right(term.Faint, tail)
		rows = append(rows, stepRow{line: r.String(), current: s.state == engine.StateRunning})
		if s.state != engine.StateRunning {
			continue
		}
		if s.text != "" || s.total > 0 {
			bar := pg.Row(w).Pad(3)
			if s.total > 0 {
				bar.Add(term.Accent, pg.Meter(s.progress, s.total, min(24, w/4))).Add(term.Faint, s.amount(" ")+"  ")
			}
			rows = append(rows, stepRow{line: bar.Add(term.Plain, s.text).String(), inner: true})
		}
		for _, p := range s.parts {
			for _, l := range partRows(pg, p, w) {
				rows = append(rows, stepRow{line: l, inner: true})
			}
		}
	}
	return rows
}

// partRows renders a part of a step; text that does not fit its row goes below it.
func partRows(pg page, p part, w int) []string {
	sign, st := pg.Spin(), term.Accent
	switch {
	case p.state == engine.StateFailed:
		sign, st = pg.Fail, term.Bad
	case p.state == engine.StateSkipped:
		sign, st = pg.Skipped, term.Good
	case p.ended():
		sign, st = pg.OK, term.Good
	}
	r := pg.Row(w).Pad(3).Add(st, sign).Add(term.Plain, " ").Col(term.Plain, p.name, 22)
	if p.total > 0 && !p.ended() {
		r.Add(term.Accent, pg.Meter(p.current, p.total, min(16, w/6))).Add(term.Plain, " "+amount(p.current, p.total)+" ")
	}
	var below []string
	if term.Width(p.text) > w-r.Used-8 {
		below = pg.Below(w, 5, 3, term.Faint, p.text)
	} else {
		r.Add(term.Faint, p.text)
	}
	if p.took > 0 {
		r.Right(term.Faint, term.Duration(p.took))
	}
	return append([]string{r.String()}, below...)
}

func stepSign(pg page, s *step, running bool) (string, term.Style) {
	switch s.state {
	case engine.StateRunning:
		if running {
			return pg.Spin(), term.Accent
		}
		return pg.Stopped, term.Caution
	case engine.StateDone:
		return pg.OK, term.Good
	case engine.StateSkipped:
		return pg.Skipped, term.Good
	case engine.StateFailed:
		return pg.Fail, term.Bad
	case engine.StateStopped, engine.StateDetached:
		return pg.Stopped, term.Caution
	}
	return pg.Dot, term.Faint
}

// nodeSign is the sign of a machine's state and its style.
func nodeSign(pg page, state string) (string, term.Style) {
	switch state {
	case engine.NodeReady:
		return pg.OK, term.Good
	case engine.NodeFailed:
		return pg.Fail, term.Bad
	case engine.NodeNotReady:
		return pg.Warn, term.Caution
	case engine.NodeJoining:
		return pg.Running, term.Accent
	case engine.NodeReplacing, engine.NodeDraining, engine.NodeUpgrading, engine.NodeLeaving:
		return pg.Running, term.Caution
	case engine.NodeGone:
		return pg.Fail, term.Faint
	}
	return pg.Pending, term.Faint
}

// machinesView shows the machines in h lines below a heading; many machines are shown by group.
func (c *console) machinesView(w, h int) []string {
	ready, wanted := c.t.ready()
	lines := []string{c.th.Rule(w, c.paneTitle(paneMachines, "Machines"), fmt.Sprintf("%d of %d ready", ready, wanted))}
	if len(c.t.machines) > manyMachines && c.run.at[paneMachines] < 0 {
		groups := c.t.groups()
		for _, g := range groups[:min(len(groups), h)] {
			done := g.states[engine.NodeReady]
			r := c.th.Row(w).Add(term.Plain, " ").Col(term.Plain, g.group, 16).Num(term.Plain, fmt.Sprintf("%d/%d", done, g.total), 11)
			r.Add(term.Good, c.th.Meter(int64(done), int64(g.total), min(30, w/4))).Pad(2)
			for _, s := range nodeStates[1:] {
				if k := g.states[s]; k > 0 {
					_, st := nodeSign(c.page(), s)
					r.Add(st, strconv.Itoa(k)+" "+s+" ")
				}
			}
			lines = append(lines, r.String())
		}
		return lines
	}
	rows := machineList(c.page(), w, &c.t, c.upgrading(), c.running)
	from, to := c.part(paneMachines, len(rows), h, firstUnready(c.page(), &c.t))
	if to-from == len(rows) || h < 2 {
		return append(lines, rows[from:to]...)
	}
	lines = append(lines, rows[from:to-1]...)
	return append(lines, c.th.Row(w).Pad(3).Add(term.Faint, fmt.Sprintf("… %d more: Tab to here, then ↑↓", len(rows)-(to-from)+1)).String())
}

// machineList renders each machine, and the number of machines of the plan not seen yet.
func machineList(pg page, w int, t *timeline, upgrades, running bool) []string {
	names := 14
	for i := range t.machines {
		names = max(names, term.Width(t.machines[i].name))
	}
	names = min(names, w/3)
	var rows []string
	for i := range t.machines {
		m := &t.machines[i]
		sign, st := nodeSign(pg, m.state)
		replaced := m.state == engine.NodeGone && upgrades
		if replaced {
			sign = pg.Dot // not a failure: an upgrade replaces it
		}
		r := pg.Row(w).Add(term.Plain, " ").Add(st, sign).Add(term.Plain, " ").Col(term.Plain, m.name, names).Col(st, m.state, 9)
		tail := term.Duration(pg.now.Sub(m.since))
		if replaced {
			tail = ""
		}
		if m.state == engine.NodeReady {
			tail = ""
			if m.took > 0 {
				tail = "in " + term.Duration(m.took)
			}
		}
		text := m.text
		if m.attempt > 1 {
			text = fmt.Sprintf("try %d  %s", m.attempt, text)
		}
		if room := w - r.Used - term.Width(tail) - 3; room > 4 {
			r.Add(term.Faint, term.Cut(text, room, pg.Ellipsis))
		}
		rows = append(rows, r.Right(term.Faint, tail).String())
	}
	if running && !upgrades {
		for _, g := range t.missing() {
			rows = append(rows, pg.Row(w).Add(term.Faint, " "+pg.Dot+" ").Col(term.Faint, g.group, names).Add(term.Faint, fmt.Sprintf("%d not seen yet", g.total)).String())
		}
	}
	return rows
}

func firstUnready(pg page, t *timeline) int {
	for i := range t.machines {
		if s := t.machines[i].state; s != engine.NodeReady && s != engine.NodeGone {
			return i
		}
	}
	return 0
}

// logTail shows the end of the log in h lines, heading included.
func (c *console) logTail(w, h int) []string {
	if h < 2 {
		return nil
	}
	n := c.t.log.len()
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
	col := sourceColumnOf(c.page(), c.w, func(i int) logLine { return c.t.log.at(from + i) }, to-from)
	if col.node != "" {
		lines[0] = c.th.Rule(w, c.paneTitle(paneLog, "Log of "+col.node), remark)
	}
	for i := from; i < to; i++ {
		lines = append(lines, logRow(c.page(), c.t.log.at(i), w, col))
	}
	return lines
}

// sourceColumn is the source column of log lines.
type sourceColumn struct {
	node  string // the node of all lines; "" if they differ
	width int
}

// sourceColumnOf computes the source column of n lines. If all come from one machine, its name is
// in the heading and not in each line.
func sourceColumnOf(pg page, w int, line func(int) logLine, n int) sourceColumn {
	var s sourceColumn
	for i := range n {
		x := line(i)
		if i == 0 {
			s.node = x.node
		}
		if x.node != s.node {
			s.node = ""
			break
		}
	}
	for i := range n {
		s.width = max(s.width, term.Width(s.of(line(i))))
	}
	s.width = min(s.width, max(14, w/4))
	return s
}

func (s sourceColumn) of(x logLine) string {
	if s.node != "" && x.source != "" {
		return x.source
	}
	return source(x)
}

func logRow(pg page, x logLine, w int, col sourceColumn) string {
	r := pg.Row(w).Add(term.Faint, " "+x.at.UTC().Format("15:04:05")+" ").Col(term.Accent, col.of(x), col.width)
	sign, st := " ", term.Plain
	switch x.level {
	case "warn":
		sign, st = pg.Warn, term.Caution
	case "error":
		sign, st = pg.Fail, term.Bad
	case "debug":
		st = term.Faint
	}
	return r.Add(st, sign+" "+x.text).String()
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
