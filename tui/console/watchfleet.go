package console

import (
	"slices"
	"strconv"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/rollout"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// fleetLens shows all nodes, one cell each.
type fleetLens struct {
	scr    *watchScreen
	cursor mapCursor
}

func (l *fleetLens) title() string { return "watch: map" }

// mapCursor is a cell of the map.
type mapCursor struct {
	group string
	cell  int
	// Columns and nodes per cell of the last frame, for cursor keys.
	columns, each int
}

const mapName = 12 // columns of a group's name

func (l *fleetLens) keys() []binding {
	return slices.Concat([]binding{
		on("up k", "↑ k", "up", "move", act(func() { l.moveCell(-1, 0) })),
		on("down j", "↓ j", "down", "move", act(func() { l.moveCell(1, 0) })),
		on("left h", "← h", "left", "move", act(func() { l.moveCell(0, -1) })),
		on("right", "→", "right", "move", act(func() { l.moveCell(0, 1) })),
		on("tab", "Tab", "next group", "move", act(func() { l.nextGroup(1) })).footed("group"),
		on("shift+tab", "⇧Tab", "previous group", "move", act(func() { l.nextGroup(-1) })),
		on("n", "n", "next cell with a failed or moving node", "move", l.nextActiveCell).footed("next active"),
		on("enter", "Enter", "details of the worst machine in the cell", "view", l.openCell).footed("node"),
		on("m", "m", "table", "view", act(func() { l.scr.lens = lensTable })).footed("table"),
		l.scr.backKey(), l.scr.lensLogKey(), l.scr.lensTroubleKey(),
		on("y", "y", "copy the names in the cell", "copy", act(l.copyCell)),
	}, l.scr.lensKeys())
}

func (l *fleetLens) view(b *rollout.Board, w, h int) []string {
	groups := b.Groups()
	columns := w - mapName - 10
	if w >= 112 {
		columns = w - mapName - 10 - 36
	}
	room := h - 4
	each := view.MapScale(groups, columns, room)
	l.cursor.columns, l.cursor.each = columns, each
	remark := "1 cell = " + words.Count(each, "node")
	if each > 1 {
		remark += ", shows the worst"
	}
	lines := []string{l.scr.c.th.Rule(w, "Fleet map", remark)}
	at, cell := l.cursorCell(groups)
	var rows []string
	cursorRow := 0
	for gi, g := range groups {
		cells := (len(g.Places) + each - 1) / each
		for row := 0; row == 0 || row*columns < cells; row++ {
			r := l.scr.c.th.Row(w).Pad(1)
			switch row {
			case 0:
				r.Col(term.Plain, term.Clean(g.Name), mapName).Num(term.Faint, strconv.Itoa(g.Total), 6)
			default:
				r.Pad(mapName + 8)
			}
			// Cells of one state are written together: an escape sequence for each cell would
			// be ten times the bytes.
			var run strings.Builder
			style := term.Plain
			flush := func() {
				r.Raw(style, run.String())
				run.Reset()
			}
			for k := row * columns; k < min(cells, (row+1)*columns); k++ {
				sign, st := " ", term.Plain
				if p := view.WorstPlace(g.Places[k*each : min(len(g.Places), (k+1)*each)]); p != nil {
					sign, st = view.MapCell(l.scr.page(), p.State())
				}
				if gi == at && k == cell {
					flush()
					r.Raw(term.Chosen, sign)
					cursorRow = len(rows)
					continue
				}
				if st != style {
					flush()
					style = st
				}
				run.WriteString(sign)
			}
			flush()
			rows = append(rows, r.String())
		}
	}
	from, to := view.Window(len(rows), cursorRow, room)
	rows = rows[from:to]
	if w >= 112 && at >= 0 {
		rows = view.BesideAt(l.scr.page(), rows, view.CellDetail(l.scr.page(), groups[at], cell, each, 34, room), w-36, room)
	}
	lines = append(lines, rows...)
	for len(lines) < h-3 {
		lines = append(lines, "")
	}
	if at >= 0 {
		lines = append(lines, view.CellLine(l.scr.page(), groups[at], cell, each, w))
	} else {
		lines = append(lines, l.scr.c.th.Row(w).Add(term.Faint, "   no node seen yet").String())
	}
	return append(lines, view.Legend(l.scr.page(), b, w)...)
}

// cursorCell is the group and the cell under the cursor; -1 if there are no groups.
func (l *fleetLens) cursorCell(groups []*rollout.BoardGroup) (group, cell int) {
	if len(groups) == 0 {
		return -1, 0
	}
	i := max(0, slices.IndexFunc(groups, func(g *rollout.BoardGroup) bool { return g.Name == l.cursor.group }))
	each := max(1, l.cursor.each)
	cells := max(1, (len(groups[i].Places)+each-1)/each)
	return i, min(l.cursor.cell, cells-1)
}

// moveCell moves the cursor of the map.
func (l *fleetLens) moveCell(rows, columns int) {
	groups := l.scr.shown().Groups()
	g, cell := l.cursorCell(groups)
	if g < 0 {
		return
	}
	p := &l.cursor
	wide, each := max(1, p.columns), max(1, p.each)
	cells := func(i int) int { return max(1, (len(groups[i].Places)+each-1)/each) }
	to := cell + rows*wide + columns
	switch {
	case to < 0 && rows < 0 && g > 0: // to the last line of the group above
		g--
		to = min(cells(g)-1, (cells(g)-1)/wide*wide+cell%wide)
	case to >= cells(g) && rows > 0 && cell/wide == (cells(g)-1)/wide && g < len(groups)-1:
		g++
		to = min(cells(g)-1, cell%wide)
	}
	p.group, p.cell = groups[g].Name, max(0, min(to, cells(g)-1))
}

func (l *fleetLens) nextGroup(by int) {
	groups := l.scr.shown().Groups()
	if g, _ := l.cursorCell(groups); g >= 0 {
		l.cursor.group, l.cursor.cell = groups[(g+by+len(groups))%len(groups)].Name, 0
	}
}

// nextActiveCell goes to the next cell with a failed or moving node.
func (l *fleetLens) nextActiveCell() tea.Cmd {
	groups := l.scr.shown().Groups()
	g, cell := l.cursorCell(groups)
	if g < 0 {
		return nil
	}
	each := max(1, l.cursor.each)
	at := cell + 1
	for range len(groups) + 1 {
		cells := (len(groups[g].Places) + each - 1) / each
		for ; at < cells; at++ {
			if p := view.WorstPlace(view.CellPlaces(groups[g], at, each)); p != nil && p.Node() != nil && view.InFlight(p.Node()) {
				l.cursor.group, l.cursor.cell = groups[g].Name, at
				return nil
			}
		}
		g, at = (g+1)%len(groups), 0
	}
	l.scr.c.note = "no node is in progress"
	return nil
}

func (l *fleetLens) openCell() tea.Cmd {
	groups := l.scr.shown().Groups()
	g, cell := l.cursorCell(groups)
	if g >= 0 {
		if p := view.WorstPlace(view.CellPlaces(groups[g], cell, max(1, l.cursor.each))); p != nil && p.Node() != nil {
			l.scr.openNode(p.Node().Name)
			return nil
		}
	}
	l.scr.c.note = "no machine in this cell"
	return nil
}

func (l *fleetLens) copyCell() {
	groups := l.scr.shown().Groups()
	g, cell := l.cursorCell(groups)
	var names []string
	if g >= 0 {
		for _, p := range view.CellPlaces(groups[g], cell, max(1, l.cursor.each)) {
			if n := p.Node(); n != nil {
				names = append(names, term.Clean(n.Name))
			}
		}
	}
	l.scr.c.copyText(strings.Join(names, " "), words.Count(len(names), "name"))
}
