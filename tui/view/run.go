package view

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"constellation/engine/plan"
	"constellation/tui/term"
)

// LogLevels are in ascending order.
var LogLevels = []string{"", "info", "warn", "error"}

// StepsRemark counts the finished steps.
func StepsRemark(pg Page, t *Timeline) string {
	return fmt.Sprintf("%d of %d done", t.Finished(), len(t.Steps))
}

// stepRow is a line of the steps pane.
type stepRow struct {
	Line    string
	current bool // the step under way
	inner   bool // progress of the step under way
}

// CurrentRow is the row to show in the middle of h rows: the step under way, or a row below
// it if its progress needs the room.
func CurrentRow(pg Page, rows []stepRow, h int) int {
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

// StepRows renders the steps; the one under way has its progress below it.
func StepRows(pg Page, w int, t *Timeline, running bool) []stepRow {
	var rows []stepRow
	title := 24
	for _, s := range t.Steps {
		title = max(title, term.Width(s.Title))
	}
	title = min(title, w-12)
	for i := range t.Steps {
		s := &t.Steps[i]
		sign, st := StepSign(pg, s, running)
		r := pg.Row(w).Add(term.Plain, " ").Add(st, sign).Add(term.Plain, " ")
		name := term.Plain
		if s.State == "" {
			name = term.Faint
		}
		if s.State == plan.StateRunning {
			name = term.Strong
		}
		r.Col(name, s.Title, title).Pad(1)
		tail := ""
		switch s.State {
		case plan.StateRunning:
			tail = term.Duration(pg.Now.Sub(s.Began))
		case plan.StateSkipped:
			tail = "already done"
		case "":
			if s.final {
				tail = "then the cluster continues on its own"
			}
		default:
			tail = term.Duration(s.Took)
		}
		if room := w - r.Used - term.Width(tail) - 3; room > 12 && s.Text != tail && s.State != "" && s.State != plan.StateRunning {
			r.Add(term.Faint, term.Cut(s.Text, room, pg.Ellipsis))
		}
		r.Right(term.Faint, tail)
		rows = append(rows, stepRow{Line: r.String(), current: s.State == plan.StateRunning})
		if s.State != plan.StateRunning {
			continue
		}
		if s.Text != "" || s.Total > 0 {
			bar := pg.Row(w).Pad(3)
			if s.Total > 0 {
				bar.Add(term.Accent, pg.Meter(s.Progress, s.Total, min(24, w/4))).Add(term.Faint, s.Amount(" ")+"  ")
			}
			rows = append(rows, stepRow{Line: bar.Add(term.Plain, s.Text).String(), inner: true})
		}
		for _, p := range s.parts {
			for _, l := range partRows(pg, p, w) {
				rows = append(rows, stepRow{Line: l, inner: true})
			}
		}
	}
	return rows
}

// partRows renders a part of a step; text that does not fit its row goes below it.
func partRows(pg Page, p part, w int) []string {
	sign, st := pg.Spin(), term.Accent
	switch {
	case p.state == plan.StateFailed:
		sign, st = pg.Fail, term.Bad
	case p.state == plan.StateSkipped:
		sign, st = pg.Skipped, term.Good
	case p.ended():
		sign, st = pg.OK, term.Good
	}
	r := pg.Row(w).Pad(3).Add(st, sign).Add(term.Plain, " ").Col(term.Plain, p.name, 22)
	if p.total > 0 && !p.ended() {
		r.Add(term.Accent, pg.Meter(p.current, p.total, min(16, w/6))).Add(term.Plain, " "+Amount(p.current, p.total)+" ")
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

// StepSign is the sign of a step's state and its style.
func StepSign(pg Page, s *Step, running bool) (string, term.Style) {
	switch s.State {
	case plan.StateRunning:
		if running {
			return pg.Spin(), term.Accent
		}
		return pg.Stopped, term.Caution
	case plan.StateDone:
		return pg.OK, term.Good
	case plan.StateSkipped:
		return pg.Skipped, term.Good
	case plan.StateFailed:
		return pg.Fail, term.Bad
	case plan.StateStopped, plan.StateDetached:
		return pg.Stopped, term.Caution
	}
	return pg.Dot, term.Faint
}

// NodeSign is the sign of a machine's state and its style.
func NodeSign(pg Page, state string) (string, term.Style) {
	switch state {
	case plan.NodeReady:
		return pg.OK, term.Good
	case plan.NodeFailed:
		return pg.Fail, term.Bad
	case plan.NodeNotReady:
		return pg.Warn, term.Caution
	case plan.NodeJoining:
		return pg.Running, term.Accent
	case plan.NodeReplacing, plan.NodeDraining, plan.NodeUpgrading, plan.NodeLeaving:
		return pg.Running, term.Caution
	case plan.NodeGone:
		return pg.Fail, term.Faint
	}
	return pg.Pending, term.Faint
}

// MachineList renders each machine, and the number of machines of the plan not seen yet.
func MachineList(pg Page, w int, t *Timeline, upgrades, running bool) []string {
	names := 14
	for i := range t.Machines {
		names = max(names, term.Width(t.Machines[i].Name))
	}
	names = min(names, w/3)
	var rows []string
	for i := range t.Machines {
		m := &t.Machines[i]
		sign, st := NodeSign(pg, m.State)
		replaced := m.State == plan.NodeGone && upgrades
		if replaced {
			sign = pg.Dot // not a failure: an upgrade replaces it
		}
		r := pg.Row(w).Add(term.Plain, " ").Add(st, sign).Add(term.Plain, " ").Col(term.Plain, m.Name, names).Col(st, m.State, 9)
		tail := term.Duration(pg.Now.Sub(m.since))
		if replaced {
			tail = ""
		}
		if m.State == plan.NodeReady {
			tail = ""
			if m.Took > 0 {
				tail = "in " + term.Duration(m.Took)
			}
		}
		text := m.Text
		if m.attempt > 1 {
			text = fmt.Sprintf("try %d  %s", m.attempt, text)
		}
		if room := w - r.Used - term.Width(tail) - 3; room > 4 {
			r.Add(term.Faint, term.Cut(text, room, pg.Ellipsis))
		}
		rows = append(rows, r.Right(term.Faint, tail).String())
	}
	if running && !upgrades {
		for _, g := range t.Missing() {
			rows = append(rows, pg.Row(w).Add(term.Faint, " "+pg.Dot+" ").Col(term.Faint, g.Group, names).Add(term.Faint, fmt.Sprintf("%d not seen yet", g.Total)).String())
		}
	}
	return rows
}

// FirstUnready is the index of the first machine that is not ready.
func FirstUnready(pg Page, t *Timeline) int {
	for i := range t.Machines {
		if s := t.Machines[i].State; s != plan.NodeReady && s != plan.NodeGone {
			return i
		}
	}
	return 0
}

// SourceColumn is the source column of log lines.
type SourceColumn struct {
	Node  string // the node of all lines; "" if they differ
	Width int
}

// SourceColumnOf computes the source column of n lines. If all come from one machine, its name is
// in the heading and not in each line.
func SourceColumnOf(pg Page, w int, line func(int) LogLine, n int) SourceColumn {
	var s SourceColumn
	for i := range n {
		x := line(i)
		if i == 0 {
			s.Node = x.Node
		}
		if x.Node != s.Node {
			s.Node = ""
			break
		}
	}
	for i := range n {
		s.Width = max(s.Width, term.Width(s.of(line(i))))
	}
	s.Width = min(s.Width, max(14, w/4))
	return s
}

func (s SourceColumn) of(x LogLine) string {
	if s.Node != "" && x.source != "" {
		return x.source
	}
	return Source(x)
}

// LogRow is a log line on one row.
func LogRow(pg Page, x LogLine, w int, col SourceColumn) string {
	r := pg.Row(w).Add(term.Faint, " "+x.at.UTC().Format("15:04:05")+" ").Col(term.Accent, col.of(x), col.Width)
	sign, st := " ", term.Plain
	switch x.Level {
	case "warn":
		sign, st = pg.Warn, term.Caution
	case "error":
		sign, st = pg.Fail, term.Bad
	case "debug":
		st = term.Faint
	}
	return r.Add(st, sign+" "+x.Text).String()
}

// Rehearsed lists what each step of a rehearsal would do.
func Rehearsed(pg Page, w int, steps []Step) []string {
	var lines []string
	for i := range steps {
		s := &steps[i]
		sign, st := StepSign(pg, s, false)
		r := pg.Row(w).Add(term.Plain, "  ").Add(st, sign).Add(term.Plain, " ").Col(term.Strong, s.ID, 17)
		if s.State == plan.StateSkipped {
			lines = append(lines, r.Add(term.Faint, "already done").String())
			continue
		}
		for n, l := range term.Wrap(cmp.Or(s.Text, s.Title), max(20, w-24)) {
			if n > 0 {
				r = pg.Row(w).Pad(22)
			}
			lines = append(lines, r.Add(term.Plain, l).String())
		}
	}
	return lines
}

// FilesWritten lists the files that a run wrote, those in the workspace dir by relative paths.
// An empty dir means that the workspace is unknown.
func FilesWritten(pg Page, w int, files []plan.File, dir string) []string {
	if len(files) == 0 {
		return nil
	}
	where := ""
	if dir != "" {
		where = " in " + term.CutMiddle(dir, w-18, pg.Ellipsis)
	}
	lines := []string{"", pg.Row(w).Add(term.Plain, " ").Add(term.Strong, "Files written"+where).String()}
	path := func(f plan.File) string {
		p := term.Clean(f.Path)
		if rel, ok := strings.CutPrefix(p, dir+"/"); ok && dir != "" {
			return rel
		}
		return p
	}
	names := 20
	for _, f := range files {
		names = max(names, term.Width(path(f)))
	}
	names = min(names, w/2)
	for _, f := range files {
		r := pg.Row(w).Pad(2).Col(term.Plain, term.CutMiddle(path(f), names, pg.Ellipsis), names)
		if f.Secret {
			r.Col(term.Caution, "SECRET", 6)
		} else {
			r.Pad(7)
		}
		r.Col(term.Faint, term.Clean(f.Mode), 4)
		note := term.Clean(f.Note)
		if r.Fits(" " + note) {
			lines = append(lines, r.Add(term.Plain, " "+note).String())
		} else {
			lines = append(append(lines, r.String()), pg.Below(w, 4, 2, term.Faint, note)...)
		}
	}
	return lines
}

// NextCommands lists the commands to run next; the first one can be copied.
func NextCommands(pg Page, w int, next []string) []string {
	if len(next) == 0 {
		return nil
	}
	lines := []string{""}
	for i, n := range next {
		for j, l := range strings.Split(ansi.Hardwrap(pg.Commands.Line(term.Clean(n)), w-8, true), "\n") {
			r := pg.Row(w)
			if i == 0 && j == 0 {
				r.Add(term.Plain, " ").Col(term.Strong, "Next", 5)
			} else {
				r.Pad(7)
			}
			lines = append(lines, r.Add(term.Accent, l).String())
		}
		if i == 0 {
			lines = append(lines, pg.Row(w).Pad(7).Add(term.Faint, "y copies it").String())
		}
	}
	return lines
}
