package tui

import (
	"fmt"

	"constellation/engine"
	"constellation/tui/term"
)

// logLevels are in ascending order.
var logLevels = []string{"", "info", "warn", "error"}

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
