package console

import (
	"fmt"
	"slices"
	"strconv"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/rollout"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// logLens shows the log. The machine lens shows lines through it.
type logLens struct {
	scr    *watchScreen
	filter string
	source string // "" for all
	level  int    // index into view.LogLevels: the lowest level shown
	wrap   bool
	// pinned keeps line number at, counted from the first line ever logged, in view; else the
	// view follows the newest line.
	pinned  bool
	at      int
	matched matchedLines
}

func (l *logLens) title() string { return "watch: log" }

// matchedLines caches the numbers of the lines that match a filter. It grows with the log as
// long as the inputs stay the same.
type matchedLines struct {
	board        *rollout.Board
	filter, only string
	source       string
	level        int
	upTo         int
	list         []int
	err          error
}

func (l *logLens) keys() []binding {
	return slices.Concat([]binding{
		on("/", "/", "filter: source:operator node:a* level:warn word", "find", act(func() { l.scr.typing = true })).footed("filter"),
		on("f", "f", "cycle through the sources", "find", act(l.nextSource)).footed("source"),
		on("e", "e", "toggle: warnings and errors only", "find", act(func() { l.level = (l.level + 2) % 4 })).footed("errors"),
		on("w", "w", "wrap long lines", "view", act(func() { l.wrap = !l.wrap })).footed("wrap"),
		on("up k", "↑ k", "up", "move", act(func() { l.moveLine(-1) })),
		on("down j", "↓ j", "down", "move", act(func() { l.moveLine(1) })),
		on("pgup ctrl+u", "PgUp", "page up", "move", act(func() { l.moveLine(-l.scr.c.h / 2) })),
		on("pgdown ctrl+d", "PgDn", "page down", "move", act(func() { l.moveLine(l.scr.c.h / 2) })),
		on("g home", "g", "first line", "move", act(func() { l.moveLine(-1 << 30) })),
		on("G end", "G", "follow the newest", "move", act(func() { l.pinned = false })).footed("follow"),
		on("enter", "Enter", "details of the machine in the line", "view", l.openLine).unless(func() string {
			if x, ok := l.lineAt(); !ok || l.scr.shown().Node(x.Node) == nil {
				return "the line names no machine"
			}
			return ""
		}),
		on("y", "y", "copy the line", "copy", act(l.copyLine)).footed("copy"),
		l.scr.backKey(),
	}, l.scr.lensKeys())
}

// lines are the numbers of the lines that the log lens shows. For the node lens they are
// those of its machine and of the other machine of the replacement.
func (l *logLens) lines() []int {
	b := l.scr.shown()
	key := matchedLines{board: b, filter: l.filter, source: l.source, level: l.level}
	if l.scr.lens == lensNode {
		key = matchedLines{board: b, only: l.scr.machine.name}
	}
	f := &l.matched
	if f.board != key.board || f.filter != key.filter || f.source != key.source || f.level != key.level || f.only != key.only {
		*f = key
	}
	chosen, err := view.ParseFilter(f.filter)
	f.err = err
	other := ""
	if n := b.Node(f.only); n != nil {
		other = n.Counterpart
	}
	gone := b.Log.Dropped()
	for i := max(0, f.upTo-gone); i < b.Log.Len(); i++ {
		x := b.Log.At(i)
		switch {
		case f.only != "" && x.Node != f.only && (other == "" || x.Node != other):
		case f.source != "" && x.Source != f.source:
		case f.level > 0 && slices.Index(view.LogLevels, x.Level) < f.level:
		case !chosen.Line(&x):
		default:
			f.list = append(f.list, gone+i)
		}
	}
	f.upTo = gone + b.Log.Len()
	if k, _ := slices.BinarySearch(f.list, gone); k > 0 {
		f.list = f.list[k:]
	}
	return f.list
}

// lineIndex is the index of the line under the cursor.
func (l *logLens) lineIndex(list []int) int {
	if !l.pinned {
		return len(list) - 1
	}
	i, _ := slices.BinarySearch(list, l.at)
	return min(i, len(list)-1)
}

func (l *logLens) moveLine(by int) {
	list := l.lines()
	if len(list) == 0 {
		return
	}
	i := max(0, min(l.lineIndex(list)+by, len(list)-1))
	l.pinned, l.at = i < len(list)-1, list[i]
}

// lineAt is the line under the cursor.
func (l *logLens) lineAt() (x rollout.BoardLine, ok bool) {
	list := l.lines()
	if len(list) == 0 {
		return x, false
	}
	log := &l.scr.shown().Log
	return log.At(list[l.lineIndex(list)] - log.Dropped()), true
}

func (l *logLens) copyLine() {
	x, _ := l.lineAt()
	l.scr.c.copyText(term.Clean(x.Text), "the line")
}

func (l *logLens) openLine() tea.Cmd {
	if x, ok := l.lineAt(); ok {
		l.scr.openNode(x.Node)
	}
	return nil
}

// nextSource filters by the next source.
func (l *logLens) nextSource() {
	all := l.sources()
	i := slices.Index(all, l.source)
	l.source = all[(i+1)%len(all)]
	l.pinned = false
}

// sources are the names of the log's sources in order, after "" for all.
func (l *logLens) sources() []string {
	out := []string{""}
	for s := range l.scr.shown().Log.Sources() {
		if s != "" {
			out = append(out, s)
		}
	}
	slices.Sort(out)
	return out
}

// view is the log lens.
func (l *logLens) view(b *rollout.Board, w, h int) []string {
	list := l.lines()
	v := l
	remark := words.Count(b.Log.Len(), "line")
	if len(list) != b.Log.Len() {
		remark = fmt.Sprintf("%d of %s", len(list), remark)
	}
	if d := b.Log.Dropped(); d > 0 {
		remark += fmt.Sprintf(", %d older lines in the record", d)
	}
	if !v.pinned {
		remark += ", following"
	}
	lines := []string{l.scr.c.th.Rule(w, "Log", remark)}
	r := l.scr.c.th.Row(w).Add(term.Faint, " sources ")
	counts := b.Log.Sources()
	for _, s := range l.sources()[1:] {
		st := term.Faint
		if v.source == "" || v.source == s {
			st = term.Accent
		}
		r.Add(st, term.Clean(s)).Add(term.Faint, " "+strconv.Itoa(counts[s])+"  ")
	}
	if v.level > 1 {
		r.Right(term.Caution, view.LogLevels[v.level]+" and above")
	}
	lines = append(lines, r.String())
	r = l.scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, "/ ")
	switch {
	case l.scr.typing:
		r.Add(term.Strong, v.filter).Add(term.Accent, "▏").Add(term.Faint, "  Enter applies the filter, Esc clears it")
	case v.filter != "":
		r.Add(term.Plain, v.filter)
	default:
		r.Add(term.Faint, "no filter")
	}
	if v.matched.err != nil {
		r.Add(term.Caution, "  "+term.Clean(v.matched.err.Error()))
	}
	lines = append(lines, r.String())
	if len(list) == 0 {
		text := "no log lines yet"
		if b.Log.Len() > 0 {
			text = "no line matches; Esc clears the filter"
		}
		return append(lines, l.scr.c.th.Row(w).Add(term.Faint, "   "+text).String())
	}
	return append(lines, l.linePart(b, list, w, h-len(lines), v.wrap)...)
}

// linePart renders the lines around the cursor that fit into h rows.
func (l *logLens) linePart(b *rollout.Board, list []int, w, h int, wraps bool) []string {
	at := l.lineIndex(list)
	v := l
	first, last := at, at
	var rows []string
	entry := func(i int) []string {
		x := view.LineOf(b.Log.At(list[i] - b.Log.Dropped()))
		col := view.SourceColumn{Width: min(22, w/4)}
		here := i == at && v.pinned
		if !wraps || !here && term.Width(x.Text) < w-col.Width-14 {
			row := view.LogRow(l.scr.page(), x, w, col)
			if here {
				row = l.scr.c.th.Paint(term.Chosen, term.StripStyle(row))
			}
			return []string{row}
		}
		head := x
		parts := term.Wrap(x.Text, max(20, w-col.Width-14))
		head.Text = parts[0]
		out := []string{view.LogRow(l.scr.page(), head, w, col)}
		for _, p := range parts[1:] {
			out = append(out, l.scr.c.th.Row(w).Pad(col.Width+13).Add(term.Plain, p).String())
		}
		if here {
			for k := range out {
				out[k] = l.scr.c.th.Paint(term.Chosen, term.StripStyle(out[k]))
			}
		}
		return out
	}
	rows = entry(at)
	for len(rows) < h {
		grown := false
		if first > 0 {
			first--
			rows = append(entry(first), rows...)
			grown = true
		}
		if last < len(list)-1 && len(rows) < h {
			last++
			rows = append(rows, entry(last)...)
			grown = true
		}
		if !grown {
			break
		}
	}
	if n := len(rows) - h; n > 0 {
		rows = rows[n:]
	}
	return rows
}
