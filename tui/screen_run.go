package tui

import (
	"fmt"
	"strconv"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
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
		return len(c.stepRows(c.w))
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
		return title + " " + c.th.cursor
	}
	return title
}

func (c *console) runView(w, h int) []string {
	if c.plan == nil {
		return []string{"", c.th.row(w).add(accent, "  "+c.th.spin(c.frame)+" ").add(plain, c.busy).String()}
	}
	steps := c.stepRows(w)
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
	lines := []string{c.th.rule(w, c.paneTitle(paneSteps, "Steps"), c.stepsRemark())}
	from, to := c.part(paneSteps, len(steps), sh, c.currentRow(steps, sh))
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
	steps := c.stepRows(left)
	machineRows := c.rows(paneMachines)
	if machineRows > manyMachines && c.run.at[paneMachines] < 0 {
		machineRows = len(c.t.groups())
	}
	top := max(min(max(len(steps), machineRows)+1, h*3/5), min(8, h/2))
	lines := []string{c.th.rule(left, c.paneTitle(paneSteps, "Steps"), c.stepsRemark())}
	from, to := c.part(paneSteps, len(steps), top-1, c.currentRow(steps, top-1))
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
		out = append(out, l+strings.Repeat(" ", max(0, left-styledWidth(l)))+c.th.paint(faint, c.th.side)+r)
	}
	return append(out, c.logTail(w, h-len(out))...)
}

func (c *console) stepsRemark() string {
	return fmt.Sprintf("%d of %d done", c.t.finished(), len(c.t.steps))
}

// stepRow is a line of the steps pane.
type stepRow struct {
	line    string
	current bool // the step under way
	inner   bool // progress of the step under way
}

// currentRow is the row to show in the middle of h rows: the step under way, or a row below
// it if its progress needs the room.
func (c *console) currentRow(rows []stepRow, h int) int {
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
func (c *console) stepRows(w int) []stepRow {
	var rows []stepRow
	title := 24
	for _, s := range c.t.steps {
		title = max(title, width(s.title))
	}
	title = min(title, w-12)
	for i := range c.t.steps {
		s := &c.t.steps[i]
		sign, st := c.stepSign(s)
		r := c.th.row(w).add(plain, " ").add(st, sign).add(plain, " ")
		name := plain
		if s.state == "" {
			name = faint
		}
		if s.state == engine.StateRunning {
			name = strong
		}
		r.col(name, s.title, title).pad(1)
		tail := ""
		switch s.state {
		case engine.StateRunning:
			tail = short(c.now.Sub(s.began))
		case engine.StateSkipped:
			tail = "already done"
		case "":
			if s.final {
				tail = "then the cluster continues on its own"
			}
		default:
			tail = short(s.took)
		}
		if room := w - r.used - width(tail) - 3; room > 12 && s.text != tail && s.state != "" && s.state != engine.StateRunning {
			r.add(faint, cut(s.text, room, c.th.ellipsis))
		}
		r.right(faint, tail)
		rows = append(rows, stepRow{line: r.String(), current: s.state == engine.StateRunning})
		if s.state != engine.StateRunning {
			continue
		}
		if s.text != "" || s.total > 0 {
			bar := c.th.row(w).pad(3)
			if s.total > 0 {
				bar.add(accent, c.th.meter(s.progress, s.total, min(24, w/4))).add(faint, s.amount(" ")+"  ")
			}
			rows = append(rows, stepRow{line: bar.add(plain, s.text).String(), inner: true})
		}
		for _, p := range s.parts {
			for _, l := range c.partRows(p, w) {
				rows = append(rows, stepRow{line: l, inner: true})
			}
		}
	}
	return rows
}

// partRows renders a part of a step; text that does not fit its row goes below it.
func (c *console) partRows(p part, w int) []string {
	sign, st := c.th.spin(c.frame), accent
	switch {
	case p.state == engine.StateFailed:
		sign, st = c.th.fail, bad
	case p.state == engine.StateSkipped:
		sign, st = c.th.skipped, good
	case p.ended():
		sign, st = c.th.ok, good
	}
	r := c.th.row(w).pad(3).add(st, sign).add(plain, " ").col(plain, p.name, 22)
	if p.total > 0 && !p.ended() {
		r.add(accent, c.th.meter(p.current, p.total, min(16, w/6))).add(plain, " "+amount(p.current, p.total)+" ")
	}
	var below []string
	if width(p.text) > w-r.used-8 {
		below = c.th.below(w, 5, 3, faint, p.text)
	} else {
		r.add(faint, p.text)
	}
	if p.took > 0 {
		r.right(faint, short(p.took))
	}
	return append([]string{r.String()}, below...)
}

func (c *console) stepSign(s *step) (string, style) {
	switch s.state {
	case engine.StateRunning:
		if c.running {
			return c.th.spin(c.frame), accent
		}
		return c.th.stopped, caution
	case engine.StateDone:
		return c.th.ok, good
	case engine.StateSkipped:
		return c.th.skipped, good
	case engine.StateFailed:
		return c.th.fail, bad
	case engine.StateStopped, engine.StateDetached:
		return c.th.stopped, caution
	}
	return c.th.dot, faint
}

// nodeSign is the sign of a machine's state and its style.
func (c *console) nodeSign(state string) (string, style) {
	switch state {
	case engine.NodeReady:
		return c.th.ok, good
	case engine.NodeFailed:
		return c.th.fail, bad
	case engine.NodeNotReady:
		return c.th.warn, caution
	case engine.NodeJoining:
		return c.th.running, accent
	case engine.NodeReplacing, engine.NodeDraining, engine.NodeUpgrading, engine.NodeLeaving:
		return c.th.running, caution
	case engine.NodeGone:
		return c.th.fail, faint
	}
	return c.th.pending, faint
}

// machinesView shows the machines in h lines below a heading; many machines are shown by group.
func (c *console) machinesView(w, h int) []string {
	ready, wanted := c.t.ready()
	lines := []string{c.th.rule(w, c.paneTitle(paneMachines, "Machines"), fmt.Sprintf("%d of %d ready", ready, wanted))}
	if len(c.t.machines) > manyMachines && c.run.at[paneMachines] < 0 {
		groups := c.t.groups()
		for _, g := range groups[:min(len(groups), h)] {
			done := g.states[engine.NodeReady]
			r := c.th.row(w).add(plain, " ").col(plain, g.group, 16).num(plain, fmt.Sprintf("%d/%d", done, g.total), 11)
			r.add(good, c.th.meter(int64(done), int64(g.total), min(30, w/4))).pad(2)
			for _, s := range nodeStates[1:] {
				if k := g.states[s]; k > 0 {
					_, st := c.nodeSign(s)
					r.add(st, strconv.Itoa(k)+" "+s+" ")
				}
			}
			lines = append(lines, r.String())
		}
		return lines
	}
	rows := c.machineRows(w)
	from, to := c.part(paneMachines, len(rows), h, c.firstUnready())
	if to-from == len(rows) || h < 2 {
		return append(lines, rows[from:to]...)
	}
	lines = append(lines, rows[from:to-1]...)
	return append(lines, c.th.row(w).pad(3).add(faint, fmt.Sprintf("… %d more: Tab to here, then ↑↓", len(rows)-(to-from)+1)).String())
}

// machineRows renders each machine, and the number of machines of the plan not seen yet.
func (c *console) machineRows(w int) []string {
	names := 14
	for i := range c.t.machines {
		names = max(names, width(c.t.machines[i].name))
	}
	names = min(names, w/3)
	var rows []string
	for i := range c.t.machines {
		m := &c.t.machines[i]
		sign, st := c.nodeSign(m.state)
		replaced := m.state == engine.NodeGone && c.upgrading()
		if replaced {
			sign = c.th.dot // not a failure: an upgrade replaces it
		}
		r := c.th.row(w).add(plain, " ").add(st, sign).add(plain, " ").col(plain, m.name, names).col(st, m.state, 9)
		tail := short(c.now.Sub(m.since))
		if replaced {
			tail = ""
		}
		if m.state == engine.NodeReady {
			tail = ""
			if m.took > 0 {
				tail = "in " + short(m.took)
			}
		}
		text := m.text
		if m.attempt > 1 {
			text = fmt.Sprintf("try %d  %s", m.attempt, text)
		}
		if room := w - r.used - width(tail) - 3; room > 4 {
			r.add(faint, cut(text, room, c.th.ellipsis))
		}
		rows = append(rows, r.right(faint, tail).String())
	}
	if c.running && !c.upgrading() {
		for _, g := range c.t.missing() {
			rows = append(rows, c.th.row(w).add(faint, " "+c.th.dot+" ").col(faint, g.group, names).add(faint, fmt.Sprintf("%d not seen yet", g.total)).String())
		}
	}
	return rows
}

func (c *console) firstUnready() int {
	for i := range c.t.machines {
		if s := c.t.machines[i].state; s != engine.NodeReady && s != engine.NodeGone {
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
	lines := []string{c.th.rule(w, c.paneTitle(paneLog, "Log"), remark)}
	if n == 0 {
		what := "log lines of kubeadm and the bootstrapper appear here"
		if c.upgrading() {
			what = "log lines of services, operator and kubeadm appear here"
		}
		return append(lines, c.th.row(w).add(faint, "   "+what).String())
	}
	from, to := c.part(paneLog, n, h-1, n-1)
	if c.run.at[paneLog] < 0 {
		from, to = max(0, n-h+1), n
	}
	col := c.sourceColumn(func(i int) logLine { return c.t.log.at(from + i) }, to-from)
	if col.node != "" {
		lines[0] = c.th.rule(w, c.paneTitle(paneLog, "Log of "+col.node), remark)
	}
	for i := from; i < to; i++ {
		lines = append(lines, c.logRow(c.t.log.at(i), w, col))
	}
	return lines
}

// sourceColumn is the source column of log lines.
type sourceColumn struct {
	node  string // the node of all lines; "" if they differ
	width int
}

// sourceColumn computes the source column of n lines. If all come from one machine, its name is
// in the heading and not in each line.
func (c *console) sourceColumn(line func(int) logLine, n int) sourceColumn {
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
		s.width = max(s.width, width(s.of(line(i))))
	}
	s.width = min(s.width, max(14, c.w/4))
	return s
}

func (s sourceColumn) of(x logLine) string {
	if s.node != "" && x.source != "" {
		return x.source
	}
	return source(x)
}

func (c *console) logRow(x logLine, w int, col sourceColumn) string {
	r := c.th.row(w).add(faint, " "+x.at.UTC().Format("15:04:05")+" ").col(accent, col.of(x), col.width)
	sign, st := " ", plain
	switch x.level {
	case "warn":
		sign, st = c.th.warn, caution
	case "error":
		sign, st = c.th.fail, bad
	case "debug":
		st = faint
	}
	return r.add(st, sign+" "+x.text).String()
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
