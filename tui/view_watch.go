package tui

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/tui/term"
	"constellation/tui/view"
)

// watchHeader is the header of the watch screen: cluster, target, mode, clocks and ETA, and
// below it the progress line.
func (c *console) watchHeader() []string {
	b, now := c.wat.shown(), c.watchNow()
	r := c.th.Row(c.w).Add(term.Accent, " "+c.th.Brand+" ").Add(term.Strong, cmp.Or(term.Clean(b.Cluster), "cluster")).Add(term.Caution, view.MarkIf(c.boardPage(), c.w, b.Simulated))
	word, st := c.watchMode(b)
	tail := []string{now.UTC().Format("15:04:05 UTC")}
	if !b.Started.IsZero() {
		tail = append(tail, term.Clock(now.Sub(b.Started)))
	}
	if eta := view.ETA(c.boardPage(), b, now); eta != "" {
		tail = append(tail, eta)
	}
	right := strings.Join(tail, "  ")
	if to := view.TargetText(c.boardPage(), b); to != "" && r.Used+term.Width(to)+term.Width(word)+term.Width(right)+8 <= c.w {
		r.Add(term.Faint, "  "+to)
	}
	if room := c.w - r.Used - term.Width(term.AsciiIf(c.th.Ascii, word)) - 4; term.Width(right) > room {
		right = strings.Join(tail[:1], "  ")
		if eta := view.ETA(c.boardPage(), b, now); eta != "" && term.Width(tail[0]+"  "+eta) <= room {
			right += "  " + eta
		}
	}
	gap := c.w - r.Used - term.Width(term.AsciiIf(c.th.Ascii, word)) - term.Width(term.AsciiIf(c.th.Ascii, right)) - 3
	r.Pad(max(2, gap)).Add(st, word).Add(term.Faint, "  "+right)
	return []string{r.String(), c.watchRail(b)}
}

// watchMode is the mode in the header: live, frozen, stale, replay or ended.
func (c *console) watchMode(b *engine.Board) (string, term.Style) {
	w := c.wat
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
		word, st = "FROZEN "+term.Duration(c.now.Sub(w.frozenAt)), term.Caution
	case !b.Away.IsZero():
		word, st = "STALE "+term.Duration(c.now.Sub(b.Away)), term.Bad
	case b.Result != nil || w.ended:
		word, st = "ENDED", term.Faint
	case c.opening():
		word, st = "REPLAY opening", term.Faint
	case b.Events == 0:
		word, st = "connecting", term.Faint
	}
	if w.origin == fromLive && (c.deps.watch.Kubeconfig != "" || c.upg.lockedBy != "") {
		word = "READ-ONLY " + word
	}
	return word, st
}

// railPart is an entry of the progress line.
type railPart struct {
	name, state string
}

// watchRail is the progress line: the steps of the run, then the groups of the rollout.
func (c *console) watchRail(b *engine.Board) string {
	var parts []railPart
	for _, s := range b.Steps {
		if s.ID == engine.StepRollout {
			continue
		}
		parts = append(parts, railPart{term.Clean(s.ID), term.Clean(s.State)})
	}
	steps := len(parts)
	for _, s := range b.Steps {
		for _, p := range s.Parts {
			if s.ID == engine.StepRollout && p.Name == "kubernetes" {
				parts = append(parts, railPart{"kubeadm", term.Clean(p.State)})
			}
		}
	}
	for _, control := range []bool{true, false} {
		for _, g := range b.Groups() {
			if g.Control != control || g.Total == 0 {
				continue
			}
			p := railPart{fmt.Sprintf("%s %d/%d", term.Clean(g.Name), g.Done(), g.Total), engine.StateRunning}
			switch {
			case g.Done() == g.Total:
				p.state = engine.StateDone
			case g.Counts[engine.NodeFailed] > 0:
				p.state = engine.StateFailed
			case g.Counts[engine.NodeOutdated]+g.Done() == g.Total:
				p.state = ""
			}
			parts = append(parts, p)
		}
	}
	long := func(ps []railPart) int {
		n := 1
		for _, p := range ps {
			n += term.Width(p.name) + 5
		}
		return n
	}
	if steps > 1 && long(parts) > c.w && !slices.ContainsFunc(parts[:steps], func(p railPart) bool { return p.state != engine.StateDone && p.state != engine.StateSkipped }) {
		parts = append([]railPart{{fmt.Sprintf("%d steps", steps), engine.StateDone}}, parts[steps:]...)
	}
	if most := max(2, (c.w-20)/14); len(parts) > most && long(parts) > c.w { // only the first groups fit
		more := len(parts) - most
		parts = append(parts[:most:most], railPart{fmt.Sprintf("%d more", more), ""})
	}
	r := c.th.Row(c.w).Add(term.Plain, " ")
	for i, p := range parts {
		sign, st, name := c.th.Pending, term.Faint, term.Faint
		switch p.state {
		case engine.StateDone, engine.StateSkipped:
			sign, st, name = c.th.OK, term.Good, term.Plain
		case engine.StateRunning:
			sign, st, name = c.th.Running, term.Accent, term.Strong
		case engine.StateFailed:
			sign, st, name = c.th.Fail, term.Bad, term.Strong
		case engine.StateStopped, engine.StateDetached:
			sign, st, name = c.th.Stopped, term.Caution, term.Plain
		}
		if i > 0 {
			line := c.th.Signs.Rule
			if p.state != "" {
				line = c.th.Heavy
			}
			r.Add(term.Faint, " "+line+" ")
		}
		r.Add(st, sign).Add(name, " "+p.name)
	}
	if len(parts) == 0 {
		r.Add(term.Faint, "nothing is known yet")
	}
	return r.String()
}

// staleWatch reports whether the watch screen may be out of date.
func (c *console) staleWatch() bool {
	return c.wat.origin != fromReplay && c.wat.frozen == nil && !c.wat.shown().Away.IsZero()
}

// watchView renders the lens in w columns and h lines.
func (c *console) watchView(w, h int) []string {
	b := c.wat.shown()
	switch c.wat.lens {
	case lensMap:
		return c.mapView(b, w, h)
	case lensNode:
		return c.nodeView(b, w, h)
	case lensLog:
		return c.linesView(b, w, h)
	case lensTrouble:
		return c.troubleView(b, w, h)
	}
	return c.tableView(b, w, h)
}

func (c *console) tableView(b *engine.Board, w, h int) []string {
	if b.Events == 0 || b.Moves() == 0 && b.Running() == nil && c.wat.origin == fromLive {
		return c.emptyWatch(b, w)
	}
	lines := view.Pipeline(c.boardPage(), b, w, h)
	if g := b.Groups(); h >= 30 && len(g) > 1 {
		lines = append(lines, view.GroupRows(c.boardPage(), b, w, min(len(g), h/6))...)
	}
	if n := min(len(b.Plans), max(1, h/8)); n > 0 && h-len(lines) >= n+4 {
		lines = append(lines, view.NodePlanRows(c.boardPage(), b, w, n)...)
	}
	said := 0
	if h-len(lines) >= 8 {
		said = min(max(4, (h-len(lines))/3), 14)
	}
	lines = append(lines, view.FlightView(c.boardPage(), b, c.flight(), w, h-len(lines)-said)...)
	if said > 0 { // with the room that few machines leave
		lines = append(lines, view.LogExcerpt(c.boardPage(), b, w, h-len(lines))...)
	}
	return lines
}

// emptyWatch is the screen before the first events.
func (c *console) emptyWatch(b *engine.Board, w int) []string {
	switch {
	case c.wat.err != nil:
		return append([]string{""}, view.Problem(c.boardPage(), w, c.wat.err)...)
	case c.opening():
		return []string{"", c.th.Row(w).Add(term.Accent, "  "+c.th.Running+" ").Add(term.Plain, "opening the record "+term.Clean(c.deps.replay.path)).String()}
	case b.Events == 0 && c.wat.origin == fromRun:
		return []string{"", c.th.Row(w).Add(term.Faint, "  No run is in progress here. Esc goes back.").String()}
	}
	return []string{"", c.th.Row(w).Add(term.Accent, "  "+c.th.Running+" ").Add(term.Plain, "listing the nodes of the cluster").String()}
}

// watchReason is reason for the board on the screen, or why there is none.
func (c *console) watchReason() (text, remedy string) {
	switch {
	case c.wat.err != nil && c.wat.frozen == nil:
		x := view.Explain(c.wat.err, c.deps.commands)
		return "The watch has ended: " + x.What, x.Remedy
	case c.opening():
		return "Opening the record", ""
	}
	return view.BoardReason(c.boardPage(), c.wat.shown())
}

// watchWhy is the why line of the watch screen and the remedy, if there is one.
func (c *console) watchWhy() []string {
	text, remedy := c.watchReason()
	most := 3
	if c.h < 22 || c.wat.lens == lensTrouble {
		most = 1
	}
	lines := c.th.Below(c.w, 1, most, term.Strong, text)
	if c.wat.lens == lensTrouble { // which shows the remedy itself
		return lines
	}
	if remedy != "" {
		for i, l := range c.th.Below(c.w, 8, most, term.Accent, c.deps.commands.Text(remedy)) {
			if i == 0 {
				l = " " + c.th.Paint(term.Faint, "To do:") + " " + strings.TrimLeft(l, " ")
			}
			lines = append(lines, l)
		}
	}
	return lines
}

// boardSafety is view.WatchSafety for the board on the screen.
func (c *console) boardSafety() string {
	api, backup := "", time.Time{}
	if c.wat.origin != fromReplay {
		if !c.wat.ended {
			api = view.APIStatus(c.page(), c.wat.pulse)
		}
		if c.home != nil && c.home.Backup != nil {
			backup = c.home.Backup.Created
		}
	}
	return view.WatchSafety(c.page(), c.wat.shown(), c.w, api, backup)
}

// linesView is the log lens.
func (c *console) linesView(b *engine.Board, w, h int) []string {
	list := c.lines()
	v := &c.wat.log
	remark := term.Count(b.Log.Len(), "line")
	if len(list) != b.Log.Len() {
		remark = fmt.Sprintf("%d of %s", len(list), remark)
	}
	if d := b.Log.Dropped(); d > 0 {
		remark += fmt.Sprintf(", %d older lines in the record", d)
	}
	if !v.pinned {
		remark += ", following"
	}
	lines := []string{c.th.Rule(w, "Log", remark)}
	r := c.th.Row(w).Add(term.Faint, " sources ")
	counts := b.Log.Sources()
	for _, s := range c.sources()[1:] {
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
	r = c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, "/ ")
	switch {
	case c.wat.typing:
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
		return append(lines, c.th.Row(w).Add(term.Faint, "   "+text).String())
	}
	return append(lines, c.linePart(b, list, w, h-len(lines), v.wrap)...)
}

// linePart renders the lines around the cursor that fit into h rows.
func (c *console) linePart(b *engine.Board, list []int, w, h int, wraps bool) []string {
	at := c.lineIndex(list)
	v := &c.wat.log
	first, last := at, at
	var rows []string
	entry := func(i int) []string {
		x := view.LineOf(b.Log.At(list[i] - b.Log.Dropped()))
		col := view.SourceColumn{Width: min(22, w/4)}
		here := i == at && v.pinned
		if !wraps || !here && term.Width(x.Text) < w-col.Width-14 {
			row := view.LogRow(c.boardPage(), x, w, col)
			if here {
				row = c.th.Paint(term.Chosen, term.StripStyle(row))
			}
			return []string{row}
		}
		head := x
		parts := term.Wrap(x.Text, max(20, w-col.Width-14))
		head.Text = parts[0]
		out := []string{view.LogRow(c.boardPage(), head, w, col)}
		for _, p := range parts[1:] {
			out = append(out, c.th.Row(w).Pad(col.Width+13).Add(term.Plain, p).String())
		}
		if here {
			for k := range out {
				out[k] = c.th.Paint(term.Chosen, term.StripStyle(out[k]))
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

func (c *console) mapView(b *engine.Board, w, h int) []string {
	groups := b.Groups()
	columns := w - mapName - 10
	if w >= 112 {
		columns = w - mapName - 10 - 36
	}
	room := h - 4
	each := view.MapScale(groups, columns, room)
	c.wat.place.columns, c.wat.place.each = columns, each
	remark := "1 cell = " + term.Count(each, "node")
	if each > 1 {
		remark += ", shows the worst"
	}
	lines := []string{c.th.Rule(w, "Fleet map", remark)}
	at, cell := c.cursorCell(groups)
	var rows []string
	cursorRow := 0
	for gi, g := range groups {
		cells := (len(g.Places) + each - 1) / each
		for row := 0; row == 0 || row*columns < cells; row++ {
			r := c.th.Row(w).Pad(1)
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
					sign, st = view.MapCell(c.boardPage(), p.State())
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
		rows = view.BesideAt(c.boardPage(), rows, view.CellDetail(c.boardPage(), groups[at], cell, each, 34, room), w-36, room)
	}
	lines = append(lines, rows...)
	for len(lines) < h-3 {
		lines = append(lines, "")
	}
	if at >= 0 {
		lines = append(lines, view.CellLine(c.boardPage(), groups[at], cell, each, w))
	} else {
		lines = append(lines, c.th.Row(w).Add(term.Faint, "   no node seen yet").String())
	}
	return append(lines, view.Legend(c.boardPage(), b, w)...)
}

// cursorCell is the group and the cell under the cursor; -1 if there are no groups.
func (c *console) cursorCell(groups []*engine.BoardGroup) (group, cell int) {
	if len(groups) == 0 {
		return -1, 0
	}
	i := max(0, slices.IndexFunc(groups, func(g *engine.BoardGroup) bool { return g.Name == c.wat.place.group }))
	each := max(1, c.wat.place.each)
	cells := max(1, (len(groups[i].Places)+each-1)/each)
	return i, min(c.wat.place.cell, cells-1)
}

// moveCell moves the cursor of the map.
func (c *console) moveCell(rows, columns int) {
	groups := c.wat.shown().Groups()
	g, cell := c.cursorCell(groups)
	if g < 0 {
		return
	}
	p := &c.wat.place
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

func (c *console) nextGroup(by int) {
	groups := c.wat.shown().Groups()
	if g, _ := c.cursorCell(groups); g >= 0 {
		c.wat.place.group, c.wat.place.cell = groups[(g+by+len(groups))%len(groups)].Name, 0
	}
}

// nextActiveCell goes to the next cell with a failed or moving node.
func (c *console) nextActiveCell() tea.Cmd {
	groups := c.wat.shown().Groups()
	g, cell := c.cursorCell(groups)
	if g < 0 {
		return nil
	}
	each := max(1, c.wat.place.each)
	at := cell + 1
	for range len(groups) + 1 {
		cells := (len(groups[g].Places) + each - 1) / each
		for ; at < cells; at++ {
			if p := view.WorstPlace(view.CellPlaces(groups[g], at, each)); p != nil && p.Node() != nil && view.InFlight(p.Node()) {
				c.wat.place.group, c.wat.place.cell = groups[g].Name, at
				return nil
			}
		}
		g, at = (g+1)%len(groups), 0
	}
	c.note = "no node is in flight"
	return nil
}

func (c *console) openCell() tea.Cmd {
	groups := c.wat.shown().Groups()
	g, cell := c.cursorCell(groups)
	if g >= 0 {
		if p := view.WorstPlace(view.CellPlaces(groups[g], cell, max(1, c.wat.place.each))); p != nil && p.Node() != nil {
			c.openNode(p.Node().Name)
			return nil
		}
	}
	c.note = "no machine in this cell"
	return nil
}

func (c *console) copyCell() {
	groups := c.wat.shown().Groups()
	g, cell := c.cursorCell(groups)
	var names []string
	if g >= 0 {
		for _, p := range view.CellPlaces(groups[g], cell, max(1, c.wat.place.each)) {
			if n := p.Node(); n != nil {
				names = append(names, term.Clean(n.Name))
			}
		}
	}
	c.copyText(strings.Join(names, " "), term.Count(len(names), "name"))
}

// nodeView shows the details of one machine.
func (c *console) nodeView(b *engine.Board, w, h int) []string {
	n := b.Node(c.wat.node)
	if n == nil {
		return []string{c.th.Rule(w, "Machine "+term.Clean(c.wat.node), ""), c.th.Row(w).Add(term.Faint, "   not known now; Esc goes back").String()}
	}
	lines := []string{c.th.Rule(w, "Machine "+term.Clean(n.Name), "group "+term.Clean(n.Group))}
	pair := []*engine.BoardNode{n}
	if o := b.Node(n.With); o != nil {
		pair = []*engine.BoardNode{o, n}
		if slices.Contains(engine.StagesOld, n.State) {
			pair = []*engine.BoardNode{n, o}
		}
	}
	for _, x := range pair {
		lines = append(lines, view.StateHistoryRows(c.boardPage(), b, x, x == n, w)...)
	}
	if len(pair) > 1 && h >= 16 {
		lines = append(lines, view.ReplacementTimeline(c.boardPage(), pair, w)...)
	}
	lines = append(lines, "")
	facts := []string{view.Facts(c.boardPage(), n)}
	if wt := b.Wait; wt.Node == n.Name && wt.Text != "" {
		facts = append(facts, "waiting: "+term.Clean(wt.Text))
	}
	if n.Text != "" {
		facts = append(facts, term.Clean(n.State)+": "+term.Clean(n.Text))
	}
	for _, f := range facts {
		lines = append(lines, c.th.Below(w, 2, 2, term.Plain, f)...)
	}
	list := c.lines()
	remark := term.Count(len(list), "line")
	if !c.wat.log.pinned {
		remark += ", following"
	}
	lines = append(lines, c.th.Rule(w, "Log", remark))
	if len(list) == 0 {
		return append(lines, c.th.Row(w).Add(term.Faint, "   no log lines yet").String())
	}
	return append(lines, c.linePart(b, list, w, max(1, h-len(lines)), true)...)
}
