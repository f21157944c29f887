package tui

import (
	"context"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/tui/term"
	"constellation/tui/view"
)

// lens is a view of the watch screen on a board.
type lens int

const (
	lensTable   lens = iota // pipeline, machines in flight, and log
	lensMap                 // all nodes, one cell each
	lensNode                // details of one machine
	lensLog                 // the log
	lensTrouble             // failures and possible actions
)

func (l lens) title() string {
	return [...]string{"watch", "watch: map", "watch: node", "watch: log", "watch: trouble"}[l]
}

// watchOrigin is the source of a board's events.
type watchOrigin int

const (
	fromRun    watchOrigin = iota // a run of this console
	fromLive                      // a live watch
	fromReplay                    // the record of a run
)

// watchScreen shows the board of a run of this console, of a live watch, or of a replay.
// The zero value has no board yet.
type watchScreen struct {
	c *console
	board *engine.Board // gets all events, also while the view is frozen
	// frozen, if not nil, is shown instead: a copy as of frozenAt on the board's clock.
	frozen   *engine.Board
	frozenAt time.Time
	origin   watchOrigin
	back     screenID // where Esc leads from the table
	lens     lens
	from     lens // where Esc leads from a machine, the log and trouble

	at     string // name of the machine under the cursor; empty: the first
	node   string // the machine of the node lens
	sort   view.SortBy
	filter string
	typing bool // keys go into the filter of the table or the log
	rows   machineCache
	place  mapCursor
	log    lineView
	choice int // index of the selected action of the trouble lens

	gen    int                // generation of the watch: messages of others are dropped
	cancel context.CancelFunc // ends a live watch; nil if there is none
	err    error              // why a live watch ended
	ended  bool               // the live watch has ended
	pulse  engine.Pulse       // of the API server
	ticks  bool               // a tick is pending
	player player
}

// Messages of the watch screen.
type (
	// watchBatch are events of a live watch, in order.
	watchBatch struct {
		gen    int
		events []engine.Event
	}
	watchEnded struct {
		gen int
		err error
	}
	// watchTick updates the clocks of the screen.
	watchTick struct{ gen int }
)

var filterKey = on("/", "/", "filter: state:drain group:x node:a* age>5m try>1 word", "find", act(func(c *console) { c.wat.typing = true })).footed("filter")

var freezeKey = binding{keys: []string{" "}, label: "space", help: "freeze the view, the rollout continues; pause a replay", group: "view", footLabel: "freeze", do: (*console).freeze}

var backKey = on("esc", "Esc", "back", "back", (*console).watchBack).footed("back")

var earlier = on("[", "[", "back one minute", "replay", act(func(c *console) { c.seek(-time.Minute) })).unless((*console).noReplay)

var later = on("]", "]", "forward one minute", "replay", act(func(c *console) { c.seek(time.Minute) })).unless((*console).noReplay)

var faster = on("+ =", "+", "faster", "replay", act(func(c *console) { c.wat.player.faster(1) })).unless((*console).noReplay)

var slower = on("-", "-", "slower", "replay", act(func(c *console) { c.wat.player.faster(-1) })).unless((*console).noReplay)

var toFirst = on("{", "{", "to the beginning", "replay", act(func(c *console) { c.seekTo(c.wat.player.first()) })).unless((*console).noReplay)

var toLast = on("}", "}", "to the end", "replay", act(func(c *console) { c.seekTo(c.wat.player.last()) })).unless((*console).noReplay)

var lensTroubleKey = on("t", "t", "failures and possible actions", "view", act(func(c *console) { c.showLens(lensTrouble) })).footed("trouble").unless((*console).noTrouble)

var lensLogKey = on("l L", "l", "log of operator and machines", "view", act(func(c *console) { c.showLens(lensLog) })).footed("log")

// lensKeys are the keys of every lens.
var lensKeys = slices.Concat([]binding{freezeKey, earlier, later, faster, slower, toFirst, toLast}, rolloutKeys)

var watchTableKeys = slices.Concat([]binding{
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.moveRow(-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.moveRow(1) })),
	on("pgup ctrl+u", "PgUp", "page up", "move", act(func(c *console) { c.moveRow(-c.h / 2) })),
	on("pgdown ctrl+d", "PgDn", "page down", "move", act(func(c *console) { c.moveRow(c.h / 2) })),
	on("g home", "g", "first", "move", act(func(c *console) { c.moveRow(-1 << 30) })),
	on("G end", "G", "last", "move", act(func(c *console) { c.moveRow(1 << 30) })),
	on("enter", "Enter", "details of the machine", "view", (*console).openRow).footed("node").unless(func(c *console) string {
		if len(c.machines()) == 0 {
			return "no machine is listed"
		}
		return ""
	}),
	on("m", "m", "map of all nodes", "view", act(func(c *console) { c.wat.lens = lensMap })).footed("map"),
	lensLogKey, lensTroubleKey, filterKey,
	on("s", "s", "sort by another column", "view", act(func(c *console) { c.wat.sort = (c.wat.sort + 1) % view.Sorts })).footed("sort"),
	on("y", "y", "copy the row", "copy", act((*console).copyRow)),
	backKey,
}, lensKeys)

var watchMapKeys = slices.Concat([]binding{
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.moveCell(-1, 0) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.moveCell(1, 0) })),
	on("left h", "← h", "left", "move", act(func(c *console) { c.moveCell(0, -1) })),
	on("right", "→", "right", "move", act(func(c *console) { c.moveCell(0, 1) })),
	on("tab", "Tab", "next group", "move", act(func(c *console) { c.nextGroup(1) })).footed("group"),
	on("shift+tab", "⇧Tab", "previous group", "move", act(func(c *console) { c.nextGroup(-1) })),
	on("n", "n", "next cell with a failed or moving node", "move", (*console).nextActiveCell).footed("next active"),
	on("enter", "Enter", "details of the worst machine in the cell", "view", (*console).openCell).footed("node"),
	on("m", "m", "table", "view", act(func(c *console) { c.wat.lens = lensTable })).footed("table"),
	backKey, lensLogKey, lensTroubleKey,
	on("y", "y", "copy the names in the cell", "copy", act((*console).copyCell)),
}, lensKeys)

var watchNodeKeys = slices.Concat([]binding{
	on("up k", "↑ k", "older lines", "move", act(func(c *console) { c.moveLine(-1) })),
	on("down j", "↓ j", "newer lines", "move", act(func(c *console) { c.moveLine(1) })),
	on("left p", "←", "previous machine", "move", act(func(c *console) { c.stepNode(-1) })),
	on("right n", "→", "next machine", "move", act(func(c *console) { c.stepNode(1) })).footed("next"),
	on("o", "o", "the other machine of the replacement", "view", act((*console).otherNode)).footed("other").unless(func(c *console) string {
		if n := c.wat.shown().Node(c.wat.node); n == nil || c.wat.shown().Node(n.With) == nil {
			return "no other machine is known"
		}
		return ""
	}),
	on("l L", "l", "its log, with filters", "view", act(func(c *console) {
		c.wat.log.filter = "node:" + strings.ReplaceAll(c.wat.node, " ", "?") // filter terms cannot contain spaces
		c.showLens(lensLog)
	})).footed("log"),
	on("y", "y", "copy its newest log line, or its state", "copy", act((*console).copyNode)).footed("copy"),
	backKey,
}, lensKeys)

var watchLogKeys = slices.Concat([]binding{
	on("/", "/", "filter: source:operator node:a* level:warn word", "find", act(func(c *console) { c.wat.typing = true })).footed("filter"),
	on("f", "f", "cycle through the sources", "find", act((*console).nextSource)).footed("source"),
	on("e", "e", "toggle: warnings and errors only", "find", act(func(c *console) { c.wat.log.level = (c.wat.log.level + 2) % 4 })).footed("errors"),
	on("w", "w", "wrap long lines", "view", act(func(c *console) { c.wat.log.wrap = !c.wat.log.wrap })).footed("wrap"),
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.moveLine(-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.moveLine(1) })),
	on("pgup ctrl+u", "PgUp", "page up", "move", act(func(c *console) { c.moveLine(-c.h / 2) })),
	on("pgdown ctrl+d", "PgDn", "page down", "move", act(func(c *console) { c.moveLine(c.h / 2) })),
	on("g home", "g", "first line", "move", act(func(c *console) { c.moveLine(-1 << 30) })),
	on("G end", "G", "follow the newest", "move", act(func(c *console) { c.wat.log.pinned = false })).footed("follow"),
	on("enter", "Enter", "details of the machine in the line", "view", (*console).openLine).unless(func(c *console) string {
		if x, ok := c.lineAt(); !ok || c.wat.shown().Node(x.Node) == nil {
			return "the line names no machine"
		}
		return ""
	}),
	on("y", "y", "copy the line", "copy", act((*console).copyLine)).footed("copy"),
	backKey,
}, lensKeys)

var watchTroubleKeys = slices.Concat([]binding{
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.wat.choice = max(0, c.wat.choice-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.wat.choice = min(c.wat.choice+1, len(c.choices())-1) })),
	on("enter", "Enter", "do it (asks first), or copy the command", "do", (*console).choose).footed("choose"),
	lensLogKey,
	on("y", "y", "copy the cause", "copy", act(func(c *console) { c.copyText(c.cause(), "the cause") })).footed("copy cause"),
	backKey,
}, lensKeys)

// watchKeys are the keys of the current lens.
func (c *console) watchKeys() []binding {
	return [...][]binding{watchTableKeys, watchMapKeys, watchNodeKeys, watchLogKeys, watchTroubleKeys}[c.wat.lens]
}

// shown is the board on the screen: the frozen copy or the live one.
func (w *watchScreen) shown() *engine.Board {
	if w.frozen != nil {
		return w.frozen
	}
	if w.board == nil {
		w.board = &engine.Board{}
	}
	return w.board
}

// watchEvents applies events to the board.
func (c *console) watchEvents(events []engine.Event) {
	if c.wat.board == nil {
		c.wat.board = &engine.Board{}
	}
	for _, ev := range events {
		c.wat.board.Apply(ev)
	}
}

// showWatch opens the watch screen on the board of this console's run and starts its clock.
func (c *console) showWatch() tea.Cmd {
	c.wat.origin = fromRun
	c.enterWatch()
	return c.watchTicking()
}

func (c *console) enterWatch() {
	if c.screen != screenWatch {
		c.wat.back = c.screen
	}
	c.screen, c.wat.lens = screenWatch, lensTable
}

// openWatch starts a live watch of the cluster, or shows the one in progress.
func (c *console) openWatch() tea.Cmd {
	if c.running {
		return c.showWatch()
	}
	if c.wat.cancel != nil && c.wat.origin == fromLive {
		c.enterWatch()
		return c.watchTicking()
	}
	c.closeWatch()
	c.wat = &watchScreen{c: c, origin: fromLive, gen: c.wat.gen + 1, board: &engine.Board{}, filter: c.wat.filter}
	c.enterWatch()
	gen, send, after := c.wat.gen, c.deps.send, c.deps.after
	ctx, cancel := context.WithCancel(c.ctx)
	c.wat.cancel = cancel
	return tea.Batch(c.watchTicking(), func() tea.Msg {
		events := newCollector(func(b []engine.Event) { send(watchBatch{gen, b}) })
		collecting, stop := context.WithCancel(context.Background())
		gone := make(chan struct{})
		go func() { defer close(gone); events.Run(collecting) }()
		r := c.deps.watch
		r.Stay, r.After = true, after
		err := c.deps.engine.Watch(ctx, r, events.emit)
		stop()
		<-gone
		events.flush()
		return watchEnded{gen, err}
	})
}

// closeWatch ends a live watch, if there is one.
func (c *console) closeWatch() {
	if c.wat.cancel != nil {
		c.wat.cancel()
		c.wat.cancel = nil
	}
}

// takeWatch handles the messages of the watch screen.
func (c *console) takeWatch(msg tea.Msg) tea.Cmd {
	switch msg := msg.(type) {
	case watchBatch:
		if msg.gen == c.wat.gen {
			if c.wat.board.Events == 0 && c.deps.releaseMemory != nil {
				c.deps.releaseMemory() // all nodes were read
			}
			c.watchEvents(msg.events)
			c.wat.pulse = c.deps.engine.Pulse()
		}
	case watchEnded:
		if msg.gen == c.wat.gen {
			c.wat.ended, c.wat.err, c.wat.cancel = true, msg.err, nil
		}
	case watchTick:
		if msg.gen != c.wat.gen {
			return nil
		}
		c.wat.ticks = false
		c.wat.pulse = c.deps.engine.Pulse()
		if c.wat.origin == fromReplay && c.wat.player.playing {
			c.play()
		}
		return c.watchTicking()
	}
	return nil
}

// watchTicking schedules the next clock tick while the screen is visible: every second, and
// more often during a replay. A frozen view has no ticks.
func (c *console) watchTicking() tea.Cmd {
	w := c.wat
	plays := w.origin == fromReplay && w.player.playing
	if w.ticks || c.screen != screenWatch || w.frozen != nil && !plays || w.origin == fromReplay && !plays {
		return nil
	}
	w.ticks = true
	gap := time.Second
	if plays {
		gap = playGap
	}
	gen := w.gen
	if c.deps.after != nil && !plays {
		second := c.deps.after(gap)
		return func() tea.Msg { <-second; return watchTick{gen} }
	}
	return tea.Tick(gap, func(time.Time) tea.Msg { return watchTick{gen} })
}

// watchNow is the time on the clock of the board on the screen: that of the freeze, of the
// replay, of the end of the run, or now.
func (c *console) watchNow() time.Time {
	switch {
	case c.wat.frozen != nil:
		return c.wat.frozenAt
	case c.wat.origin == fromReplay:
		return c.wat.player.now
	case c.wat.board != nil && c.wat.board.Result != nil:
		return c.wat.board.Last
	}
	return c.now
}

// freeze freezes or unfreezes the view; events are still applied to the board. It pauses or
// resumes a replay.
func (c *console) freeze() tea.Cmd {
	w := c.wat
	switch {
	case w.origin == fromReplay:
		w.player.toggle()
		return c.watchTicking()
	case w.frozen != nil:
		w.frozen = nil
		return c.watchTicking()
	}
	w.frozenAt = c.watchNow()
	w.frozen = w.shown().Clone()
	return nil
}

func (c *console) showLens(l lens) {
	if c.wat.lens != lensNode && c.wat.lens != l {
		c.wat.from = c.wat.lens
	}
	if l == lensLog {
		c.wat.log.pinned = false
	}
	c.wat.lens = l
}

// watchBack clears the filter, leaves the lens, or leaves the screen.
func (c *console) watchBack() tea.Cmd {
	w := c.wat
	switch {
	case w.lens == lensLog && w.log.filter != "":
		w.log.filter = ""
	case w.lens == lensTable && w.filter != "":
		w.filter = ""
	case w.lens == lensMap:
		w.lens = lensTable
	case w.lens != lensTable:
		w.lens = w.from
		if w.lens == lensNode || w.lens == lensLog || w.lens == lensTrouble {
			w.lens = lensTable
		}
	case w.origin == fromRun:
		c.screen = w.back
	case c.upg.lockedBy != "":
		c.closeWatch()
		c.screen = screenResult
	case c.deps.onlyWatch:
		return c.leave()
	default:
		c.closeWatch()
		return c.goHome()
	}
	return nil
}

func (c *console) readOnlyReason() string {
	switch {
	case c.wat.origin == fromReplay:
		return "this is a replay"
	case c.upg.lockedBy != "":
		return "another run holds the lock of the cluster"
	case c.deps.watch.Kubeconfig != "":
		return "opened read-only with --kubeconfig"
	}
	return ""
}

func (c *console) noReplay() string {
	if c.wat.origin != fromReplay {
		return "this is not a replay"
	}
	return ""
}

// machineCache caches a list of machines with the inputs it was computed from.
type machineCache struct {
	board  *engine.Board
	moves  int
	filter string
	sort   view.SortBy
	second int64 // for filters by age
	list   []*engine.BoardNode
	err    error // of the filter
}

// machines are the rows of the table: those in flight, or those that match the filter.
func (c *console) machines() []*engine.BoardNode {
	w := c.wat
	b, now := w.shown(), c.watchNow()
	f, err := view.ParseFilter(w.filter)
	r := machineCache{board: b, moves: b.Moves(), filter: w.filter, sort: w.sort}
	if f.UsesAge {
		r.second = now.Unix()
	}
	old := &w.rows
	if old.board == r.board && old.moves == r.moves && old.filter == r.filter && old.sort == r.sort && old.second == r.second && old.list != nil {
		return old.list
	}
	r.err = err
	r.list = view.MachinesOf(b, f, w.sort, now)
	*old = r
	return r.list
}

// flight is the list of machines on the screen.
func (c *console) flight() view.Flight {
	list := c.machines()
	return view.Flight{List: list, At: c.rowAt(list), Sort: c.wat.sort, Filter: c.wat.filter, Typing: c.wat.typing, Err: c.wat.rows.err}
}

// rowAt is the index of the machine under the cursor.
func (c *console) rowAt(list []*engine.BoardNode) int {
	return max(0, slices.IndexFunc(list, func(n *engine.BoardNode) bool { return n.Name == c.wat.at }))
}

func (c *console) moveRow(by int) {
	list := c.machines()
	if len(list) == 0 {
		return
	}
	c.wat.at = list[max(0, min(c.rowAt(list)+by, len(list)-1))].Name
}

func (c *console) openRow() tea.Cmd {
	list := c.machines()
	c.openNode(list[c.rowAt(list)].Name)
	return nil
}

func (c *console) openNode(name string) {
	c.showLens(lensNode)
	c.wat.node, c.wat.at = name, name
	c.wat.log.pinned = false
}

func (c *console) copyRow() {
	list := c.machines()
	if len(list) == 0 {
		c.copyText("", "")
		return
	}
	c.copyText(view.NodeLine(c.boardPage(), list[c.rowAt(list)]), "the line")
}

// stepNode shows the previous or next machine, in the order of the table or, if the machine
// is not in the table, by name.
func (c *console) stepNode(by int) {
	list := c.machines()
	i := slices.IndexFunc(list, func(n *engine.BoardNode) bool { return n.Name == c.wat.node })
	if i < 0 {
		list = list[:0:0]
		for n := range c.wat.shown().Nodes() {
			list = append(list, n)
		}
		slices.SortFunc(list, func(x, y *engine.BoardNode) int { return strings.Compare(x.Name, y.Name) })
		i = slices.IndexFunc(list, func(n *engine.BoardNode) bool { return n.Name == c.wat.node })
	}
	if len(list) > 0 {
		c.openNode(list[max(0, min(i+by, len(list)-1))].Name)
	}
}

func (c *console) otherNode() {
	if n := c.wat.shown().Node(c.wat.node); n != nil {
		c.openNode(n.With)
	}
}

func (c *console) copyNode() {
	if x, ok := c.lineAt(); ok {
		c.copyText(term.Clean(x.Text), "the line")
		return
	}
	if n := c.wat.shown().Node(c.wat.node); n != nil {
		c.copyText(view.NodeLine(c.boardPage(), n), "its state")
		return
	}
	c.copyText("", "")
}

// typedWatch handles a key of the filter of the table or the log.
func (c *console) typedWatch(k tea.KeyMsg) {
	text := &c.wat.filter
	if c.wat.lens == lensLog {
		text = &c.wat.log.filter
	}
	switch k.Type {
	case tea.KeyEnter:
		c.wat.typing = false
	case tea.KeyEsc:
		c.wat.typing, *text = false, ""
	case tea.KeyBackspace:
		if r := []rune(*text); len(r) > 0 {
			*text = string(r[:len(r)-1])
		}
	case tea.KeyCtrlU:
		*text = ""
	case tea.KeyRunes, tea.KeySpace:
		*text += term.Clean(string(k.Runes))
	}
	c.wat.log.pinned = false
}

// lineView is the state of the log lens.
type lineView struct {
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

// matchedLines caches the numbers of the lines that match a filter. It grows with the log as
// long as the inputs stay the same.
type matchedLines struct {
	board        *engine.Board
	filter, only string
	source       string
	level        int
	upTo         int
	list         []int
	err          error
}

// lines are the numbers of the lines that the log lens shows. For the node lens they are
// those of its machine and of the other machine of the replacement.
func (c *console) lines() []int {
	w := c.wat
	b := w.shown()
	key := matchedLines{board: b, filter: w.log.filter, source: w.log.source, level: w.log.level}
	if w.lens == lensNode {
		key = matchedLines{board: b, only: w.node}
	}
	f := &w.log.matched
	if f.board != key.board || f.filter != key.filter || f.source != key.source || f.level != key.level || f.only != key.only {
		*f = key
	}
	chosen, err := view.ParseFilter(f.filter)
	f.err = err
	other := ""
	if n := b.Node(f.only); n != nil {
		other = n.With
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
func (c *console) lineIndex(list []int) int {
	if !c.wat.log.pinned {
		return len(list) - 1
	}
	i, _ := slices.BinarySearch(list, c.wat.log.at)
	return min(i, len(list)-1)
}

func (c *console) moveLine(by int) {
	list := c.lines()
	if len(list) == 0 {
		return
	}
	i := max(0, min(c.lineIndex(list)+by, len(list)-1))
	c.wat.log.pinned, c.wat.log.at = i < len(list)-1, list[i]
}

// lineAt is the line under the cursor.
func (c *console) lineAt() (x engine.BoardLine, ok bool) {
	list := c.lines()
	if len(list) == 0 {
		return x, false
	}
	l := &c.wat.shown().Log
	return l.At(list[c.lineIndex(list)] - l.Dropped()), true
}

func (c *console) copyLine() {
	x, _ := c.lineAt()
	c.copyText(term.Clean(x.Text), "the line")
}

func (c *console) openLine() tea.Cmd {
	if x, ok := c.lineAt(); ok {
		c.openNode(x.Node)
	}
	return nil
}

// nextSource filters by the next source.
func (c *console) nextSource() {
	all := c.sources()
	i := slices.Index(all, c.wat.log.source)
	c.wat.log.source = all[(i+1)%len(all)]
	c.wat.log.pinned = false
}

// sources are the names of the log's sources in order, after "" for all.
func (c *console) sources() []string {
	out := []string{""}
	for s := range c.wat.shown().Log.Sources() {
		if s != "" {
			out = append(out, s)
		}
	}
	slices.Sort(out)
	return out
}
