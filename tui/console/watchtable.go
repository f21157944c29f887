package console

import (
	"slices"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/rollout"
	"constellation/tui/term"
	"constellation/tui/view"
)

// tableLens shows the pipeline, the machines in flight, and the end of the log.
type tableLens struct {
	scr    *watchScreen
	at     string // name of the machine under the cursor; empty: the first
	sort   view.SortBy
	filter string
	rows   machineCache
}

func (l *tableLens) title() string { return "watch" }

// machineCache caches a list of machines with the inputs it was computed from.
type machineCache struct {
	board  *rollout.Board
	moves  int
	filter string
	sort   view.SortBy
	second int64 // for filters by age
	list   []*rollout.BoardNode
	err    error // of the filter
}

func (l *tableLens) keys() []binding {
	return slices.Concat([]binding{
		on("up k", "↑ k", "up", "move", act(func() { l.moveRow(-1) })),
		on("down j", "↓ j", "down", "move", act(func() { l.moveRow(1) })),
		on("pgup ctrl+u", "PgUp", "page up", "move", act(func() { l.moveRow(-l.scr.c.h / 2) })),
		on("pgdown ctrl+d", "PgDn", "page down", "move", act(func() { l.moveRow(l.scr.c.h / 2) })),
		on("g home", "g", "first", "move", act(func() { l.moveRow(-1 << 30) })),
		on("G end", "G", "last", "move", act(func() { l.moveRow(1 << 30) })),
		on("enter", "Enter", "details of the machine", "view", l.openRow).footed("node").unless(func() string {
			if len(l.machines()) == 0 {
				return "no machine is listed"
			}
			return ""
		}),
		on("m", "m", "map of all nodes", "view", act(func() { l.scr.lens = lensMap })).footed("map"),
		l.scr.lensLogKey(), l.scr.lensTroubleKey(), l.scr.filterKey(),
		on("s", "s", "sort by another column", "view", act(func() { l.sort = (l.sort + 1) % view.Sorts })).footed("sort"),
		on("y", "y", "copy the row", "copy", act(l.copyRow)),
		l.scr.backKey(),
	}, l.scr.lensKeys())
}

// machines are the rows of the table: those in flight, or those that match the filter.
func (l *tableLens) machines() []*rollout.BoardNode {
	b, now := l.scr.shown(), l.scr.clock()
	f, err := view.ParseFilter(l.filter)
	r := machineCache{board: b, moves: b.Moves(), filter: l.filter, sort: l.sort}
	if f.UsesAge {
		r.second = now.Unix()
	}
	old := &l.rows
	if old.board == r.board && old.moves == r.moves && old.filter == r.filter && old.sort == r.sort && old.second == r.second && old.list != nil {
		return old.list
	}
	r.err = err
	r.list = view.MachinesOf(b, f, l.sort, now)
	*old = r
	return r.list
}

// flight is the list of machines on the screen.
func (l *tableLens) flight() view.Flight {
	list := l.machines()
	return view.Flight{List: list, At: l.rowAt(list), Sort: l.sort, Filter: l.filter, Typing: l.scr.typing, Err: l.rows.err}
}

// rowAt is the index of the machine under the cursor.
func (l *tableLens) rowAt(list []*rollout.BoardNode) int {
	return max(0, slices.IndexFunc(list, func(n *rollout.BoardNode) bool { return n.Name == l.at }))
}

func (l *tableLens) moveRow(by int) {
	list := l.machines()
	if len(list) == 0 {
		return
	}
	l.at = list[max(0, min(l.rowAt(list)+by, len(list)-1))].Name
}

func (l *tableLens) openRow() tea.Cmd {
	list := l.machines()
	l.scr.openNode(list[l.rowAt(list)].Name)
	return nil
}

func (l *tableLens) copyRow() {
	list := l.machines()
	if len(list) == 0 {
		l.scr.c.copyText("", "")
		return
	}
	l.scr.c.copyText(view.NodeLine(l.scr.page(), list[l.rowAt(list)]), "the line")
}

func (l *tableLens) view(b *rollout.Board, w, h int) []string {
	if b.Events == 0 || b.Moves() == 0 && b.Running() == nil && l.scr.origin == fromLive {
		return l.empty(b, w)
	}
	lines := view.Pipeline(l.scr.page(), b, w, h)
	if g := b.Groups(); h >= 30 && len(g) > 1 {
		lines = append(lines, view.GroupRows(l.scr.page(), b, w, min(len(g), h/6))...)
	}
	if n := min(len(b.Plans), max(1, h/8)); n > 0 && h-len(lines) >= n+4 {
		lines = append(lines, view.NodePlanRows(l.scr.page(), b, w, n)...)
	}
	said := 0
	if h-len(lines) >= 8 {
		said = min(max(4, (h-len(lines))/3), 14)
	}
	lines = append(lines, view.FlightView(l.scr.page(), b, l.flight(), w, h-len(lines)-said)...)
	if said > 0 { // with the room that few machines leave
		lines = append(lines, view.LogExcerpt(l.scr.page(), b, w, h-len(lines))...)
	}
	return lines
}

// empty is the screen before the first events.
func (l *tableLens) empty(b *rollout.Board, w int) []string {
	switch {
	case l.scr.err != nil:
		return append([]string{""}, view.Problem(l.scr.page(), w, l.scr.err)...)
	case l.scr.opening():
		return []string{"", l.scr.c.th.Row(w).Add(term.Accent, "  "+l.scr.c.th.Running+" ").Add(term.Plain, "opening the record "+term.Clean(l.scr.c.deps.Replay.Path)).String()}
	case b.Events == 0 && l.scr.origin == fromRun:
		return []string{"", l.scr.c.th.Row(w).Add(term.Faint, "  No run is in progress here. Esc goes back.").String()}
	}
	return []string{"", l.scr.c.th.Row(w).Add(term.Accent, "  "+l.scr.c.th.Running+" ").Add(term.Plain, "listing the nodes of the cluster").String()}
}
