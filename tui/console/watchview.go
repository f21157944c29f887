package console

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/rollout"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// header is the header of the watch screen: cluster, target, mode, clocks and ETA, and
// below it the progress line.
func (scr *watchScreen) header() []string {
	b, now := scr.shown(), scr.clock()
	r := scr.c.th.Row(scr.c.w).Add(term.Accent, " "+scr.c.th.Brand+" ").Add(term.Strong, cmp.Or(term.Clean(b.Cluster), "cluster")).Add(term.Caution, view.MarkIf(scr.page(), scr.c.w, b.Simulated))
	word, st := scr.badge(b)
	tail := []string{now.UTC().Format("15:04:05 UTC")}
	if !b.Started.IsZero() {
		tail = append(tail, term.Clock(now.Sub(b.Started)))
	}
	if eta := view.ETA(scr.page(), b, now); eta != "" {
		tail = append(tail, eta)
	}
	right := strings.Join(tail, "  ")
	if to := view.TargetText(scr.page(), b); to != "" && r.Used+term.Width(to)+term.Width(word)+term.Width(right)+8 <= scr.c.w {
		r.Add(term.Faint, "  "+to)
	}
	if room := scr.c.w - r.Used - term.Width(term.AsciiIf(scr.c.th.Ascii, word)) - 4; term.Width(right) > room {
		right = strings.Join(tail[:1], "  ")
		if eta := view.ETA(scr.page(), b, now); eta != "" && term.Width(tail[0]+"  "+eta) <= room {
			right += "  " + eta
		}
	}
	gap := scr.c.w - r.Used - term.Width(term.AsciiIf(scr.c.th.Ascii, word)) - term.Width(term.AsciiIf(scr.c.th.Ascii, right)) - 3
	r.Pad(max(2, gap)).Add(st, word).Add(term.Faint, "  "+right)
	return []string{r.String(), view.BoardRail(scr.c.page(), scr.c.w, b)}
}

// badge is the mode in the header: live, frozen, stale, replay or ended.
func (scr *watchScreen) badge(b *rollout.Board) (string, term.Style) {
	w := scr
	word, st := "LIVE", term.Good
	switch {
	case w.origin == fromReplay:
		word, st = "REPLAY "+"×"+strconv.Itoa(speeds[w.player.speed]), term.Accent
		switch {
		case w.player.at == len(w.player.events):
			word = "REPLAY end"
		case !w.player.playing:
			word = "REPLAY paused"
		}
	case w.frozen != nil:
		word, st = "FROZEN "+term.Duration(scr.c.now.Sub(w.frozenAt)), term.Caution
	case !b.UnreachableSince.IsZero():
		word, st = "STALE "+term.Duration(scr.c.now.Sub(b.UnreachableSince)), term.Bad
	case b.Result != nil || w.ended:
		word, st = "ENDED", term.Faint
	case scr.opening():
		word, st = "REPLAY opening", term.Faint
	case b.Events == 0:
		word, st = "connecting", term.Faint
	}
	if w.origin == fromLive && (scr.c.deps.Watch.Kubeconfig != "" || scr.c.upg.lockedBy != "") {
		word = "READ-ONLY " + word
	}
	return word, st
}

// stale reports whether the watch screen may be out of date.
func (scr *watchScreen) stale() bool {
	return scr.origin != fromReplay && scr.frozen == nil && !scr.shown().UnreachableSince.IsZero()
}

// view renders the lens in w columns and h lines.
func (scr *watchScreen) view(w, h int) []string {
	b := scr.shown()
	switch scr.lens {
	case lensMap:
		return scr.mapView(b, w, h)
	case lensNode:
		return scr.nodeView(b, w, h)
	case lensLog:
		return scr.linesView(b, w, h)
	case lensTrouble:
		return scr.troubleView(b, w, h)
	}
	return scr.tableView(b, w, h)
}

func (scr *watchScreen) tableView(b *rollout.Board, w, h int) []string {
	if b.Events == 0 || b.Moves() == 0 && b.Running() == nil && scr.origin == fromLive {
		return scr.emptyWatch(b, w)
	}
	lines := view.Pipeline(scr.page(), b, w, h)
	if g := b.Groups(); h >= 30 && len(g) > 1 {
		lines = append(lines, view.GroupRows(scr.page(), b, w, min(len(g), h/6))...)
	}
	if n := min(len(b.Plans), max(1, h/8)); n > 0 && h-len(lines) >= n+4 {
		lines = append(lines, view.NodePlanRows(scr.page(), b, w, n)...)
	}
	said := 0
	if h-len(lines) >= 8 {
		said = min(max(4, (h-len(lines))/3), 14)
	}
	lines = append(lines, view.FlightView(scr.page(), b, scr.flight(), w, h-len(lines)-said)...)
	if said > 0 { // with the room that few machines leave
		lines = append(lines, view.LogExcerpt(scr.page(), b, w, h-len(lines))...)
	}
	return lines
}

// emptyWatch is the screen before the first events.
func (scr *watchScreen) emptyWatch(b *rollout.Board, w int) []string {
	switch {
	case scr.err != nil:
		return append([]string{""}, view.Problem(scr.page(), w, scr.err)...)
	case scr.opening():
		return []string{"", scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Running+" ").Add(term.Plain, "opening the record "+term.Clean(scr.c.deps.Replay.Path)).String()}
	case b.Events == 0 && scr.origin == fromRun:
		return []string{"", scr.c.th.Row(w).Add(term.Faint, "  No run is in progress here. Esc goes back.").String()}
	}
	return []string{"", scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Running+" ").Add(term.Plain, "listing the nodes of the cluster").String()}
}

// reason is reason for the board on the screen, or why there is none.
func (scr *watchScreen) reason() (text, remedy string) {
	switch {
	case scr.err != nil && scr.frozen == nil:
		x := view.Explain(scr.err, scr.c.deps.Commands)
		return "The watch has ended: " + x.What, x.Remedy
	case scr.opening():
		return "Opening the record", ""
	}
	return view.BoardReason(scr.page(), scr.shown())
}

// watchWhy is the why line of the watch screen and the remedy, if there is one.
func (scr *watchScreen) watchWhy() []string {
	text, remedy := scr.reason()
	most := 3
	if scr.c.h < 22 || scr.lens == lensTrouble {
		most = 1
	}
	lines := scr.c.th.Below(scr.c.w, 1, most, term.Strong, text)
	if scr.lens == lensTrouble { // which shows the remedy itself
		return lines
	}
	if remedy != "" {
		for i, l := range scr.c.th.Below(scr.c.w, 8, most, term.Accent, scr.c.deps.Commands.Text(remedy)) {
			if i == 0 {
				l = " " + scr.c.th.Paint(term.Faint, "To do:") + " " + strings.TrimLeft(l, " ")
			}
			lines = append(lines, l)
		}
	}
	return lines
}

// boardSafety is view.WatchSafety for the board on the screen.
func (scr *watchScreen) boardSafety() string {
	api, backup := "", time.Time{}
	if scr.origin != fromReplay {
		if !scr.ended {
			api = view.APIStatus(scr.c.page(), scr.pulse)
		}
		if scr.c.home != nil && scr.c.home.Backup != nil {
			backup = scr.c.home.Backup.Created
		}
	}
	return view.WatchSafety(scr.c.page(), scr.shown(), scr.c.w, api, backup)
}

// linesView is the log lens.
func (scr *watchScreen) linesView(b *rollout.Board, w, h int) []string {
	list := scr.lines()
	v := &scr.log
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
	lines := []string{scr.c.th.Rule(w, "Log", remark)}
	r := scr.c.th.Row(w).Add(term.Faint, " sources ")
	counts := b.Log.Sources()
	for _, s := range scr.sources()[1:] {
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
	r = scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, "/ ")
	switch {
	case scr.typing:
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
		return append(lines, scr.c.th.Row(w).Add(term.Faint, "   "+text).String())
	}
	return append(lines, scr.linePart(b, list, w, h-len(lines), v.wrap)...)
}

// linePart renders the lines around the cursor that fit into h rows.
func (scr *watchScreen) linePart(b *rollout.Board, list []int, w, h int, wraps bool) []string {
	at := scr.lineIndex(list)
	v := &scr.log
	first, last := at, at
	var rows []string
	entry := func(i int) []string {
		x := view.LineOf(b.Log.At(list[i] - b.Log.Dropped()))
		col := view.SourceColumn{Width: min(22, w/4)}
		here := i == at && v.pinned
		if !wraps || !here && term.Width(x.Text) < w-col.Width-14 {
			row := view.LogRow(scr.page(), x, w, col)
			if here {
				row = scr.c.th.Paint(term.Chosen, term.StripStyle(row))
			}
			return []string{row}
		}
		head := x
		parts := term.Wrap(x.Text, max(20, w-col.Width-14))
		head.Text = parts[0]
		out := []string{view.LogRow(scr.page(), head, w, col)}
		for _, p := range parts[1:] {
			out = append(out, scr.c.th.Row(w).Pad(col.Width+13).Add(term.Plain, p).String())
		}
		if here {
			for k := range out {
				out[k] = scr.c.th.Paint(term.Chosen, term.StripStyle(out[k]))
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

// mapCursor is a cell of the map.
type mapCursor struct {
	group string
	cell  int
	// Columns and nodes per cell of the last frame, for cursor keys.
	columns, each int
}

const mapName = 12 // columns of a group's name

func (scr *watchScreen) mapView(b *rollout.Board, w, h int) []string {
	groups := b.Groups()
	columns := w - mapName - 10
	if w >= 112 {
		columns = w - mapName - 10 - 36
	}
	room := h - 4
	each := view.MapScale(groups, columns, room)
	scr.place.columns, scr.place.each = columns, each
	remark := "1 cell = " + words.Count(each, "node")
	if each > 1 {
		remark += ", shows the worst"
	}
	lines := []string{scr.c.th.Rule(w, "Fleet map", remark)}
	at, cell := scr.cursorCell(groups)
	var rows []string
	cursorRow := 0
	for gi, g := range groups {
		cells := (len(g.Places) + each - 1) / each
		for row := 0; row == 0 || row*columns < cells; row++ {
			r := scr.c.th.Row(w).Pad(1)
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
					sign, st = view.MapCell(scr.page(), p.State())
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
		rows = view.BesideAt(scr.page(), rows, view.CellDetail(scr.page(), groups[at], cell, each, 34, room), w-36, room)
	}
	lines = append(lines, rows...)
	for len(lines) < h-3 {
		lines = append(lines, "")
	}
	if at >= 0 {
		lines = append(lines, view.CellLine(scr.page(), groups[at], cell, each, w))
	} else {
		lines = append(lines, scr.c.th.Row(w).Add(term.Faint, "   no node seen yet").String())
	}
	return append(lines, view.Legend(scr.page(), b, w)...)
}

// cursorCell is the group and the cell under the cursor; -1 if there are no groups.
func (scr *watchScreen) cursorCell(groups []*rollout.BoardGroup) (group, cell int) {
	if len(groups) == 0 {
		return -1, 0
	}
	i := max(0, slices.IndexFunc(groups, func(g *rollout.BoardGroup) bool { return g.Name == scr.place.group }))
	each := max(1, scr.place.each)
	cells := max(1, (len(groups[i].Places)+each-1)/each)
	return i, min(scr.place.cell, cells-1)
}

// moveCell moves the cursor of the map.
func (scr *watchScreen) moveCell(rows, columns int) {
	groups := scr.shown().Groups()
	g, cell := scr.cursorCell(groups)
	if g < 0 {
		return
	}
	p := &scr.place
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

func (scr *watchScreen) nextGroup(by int) {
	groups := scr.shown().Groups()
	if g, _ := scr.cursorCell(groups); g >= 0 {
		scr.place.group, scr.place.cell = groups[(g+by+len(groups))%len(groups)].Name, 0
	}
}

// nextActiveCell goes to the next cell with a failed or moving node.
func (scr *watchScreen) nextActiveCell() tea.Cmd {
	groups := scr.shown().Groups()
	g, cell := scr.cursorCell(groups)
	if g < 0 {
		return nil
	}
	each := max(1, scr.place.each)
	at := cell + 1
	for range len(groups) + 1 {
		cells := (len(groups[g].Places) + each - 1) / each
		for ; at < cells; at++ {
			if p := view.WorstPlace(view.CellPlaces(groups[g], at, each)); p != nil && p.Node() != nil && view.InFlight(p.Node()) {
				scr.place.group, scr.place.cell = groups[g].Name, at
				return nil
			}
		}
		g, at = (g+1)%len(groups), 0
	}
	scr.c.note = "no node is in progress"
	return nil
}

func (scr *watchScreen) openCell() tea.Cmd {
	groups := scr.shown().Groups()
	g, cell := scr.cursorCell(groups)
	if g >= 0 {
		if p := view.WorstPlace(view.CellPlaces(groups[g], cell, max(1, scr.place.each))); p != nil && p.Node() != nil {
			scr.openNode(p.Node().Name)
			return nil
		}
	}
	scr.c.note = "no machine in this cell"
	return nil
}

func (scr *watchScreen) copyCell() {
	groups := scr.shown().Groups()
	g, cell := scr.cursorCell(groups)
	var names []string
	if g >= 0 {
		for _, p := range view.CellPlaces(groups[g], cell, max(1, scr.place.each)) {
			if n := p.Node(); n != nil {
				names = append(names, term.Clean(n.Name))
			}
		}
	}
	scr.c.copyText(strings.Join(names, " "), words.Count(len(names), "name"))
}

// nodeView shows the details of one machine.
func (scr *watchScreen) nodeView(b *rollout.Board, w, h int) []string {
	n := b.Node(scr.node)
	if n == nil {
		return []string{scr.c.th.Rule(w, "Machine "+term.Clean(scr.node), ""), scr.c.th.Row(w).Add(term.Faint, "   not known now; Esc goes back").String()}
	}
	lines := []string{scr.c.th.Rule(w, "Machine "+term.Clean(n.Name), "group "+term.Clean(n.Group))}
	pair := []*rollout.BoardNode{n}
	if o := b.Node(n.Counterpart); o != nil {
		pair = []*rollout.BoardNode{o, n}
		if slices.Contains(rollout.StagesOld, n.State) {
			pair = []*rollout.BoardNode{n, o}
		}
	}
	for _, x := range pair {
		lines = append(lines, view.StateHistoryRows(scr.page(), b, x, x == n, w)...)
	}
	if len(pair) > 1 && h >= 16 {
		lines = append(lines, view.ReplacementTimeline(scr.page(), pair, w)...)
	}
	lines = append(lines, "")
	facts := []string{view.Facts(scr.page(), n)}
	if wt := b.Wait; wt.Node == n.Name && wt.Text != "" {
		facts = append(facts, "waiting: "+term.Clean(wt.Text))
	}
	if n.Text != "" {
		facts = append(facts, term.Clean(n.State)+": "+term.Clean(n.Text))
	}
	for _, f := range facts {
		lines = append(lines, scr.c.th.Below(w, 2, 2, term.Plain, f)...)
	}
	list := scr.lines()
	remark := words.Count(len(list), "line")
	if !scr.log.pinned {
		remark += ", following"
	}
	lines = append(lines, scr.c.th.Rule(w, "Log", remark))
	if len(list) == 0 {
		return append(lines, scr.c.th.Row(w).Add(term.Faint, "   no log lines yet").String())
	}
	return append(lines, scr.linePart(b, list, w, max(1, h-len(lines)), true)...)
}
