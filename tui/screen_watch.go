package tui

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
)

// lens is what the watch screen shows of a board.
type lens int

const (
	lensTable   lens = iota // pipeline, machines in flight, and what is said
	lensMap                 // all nodes, each at its place
	lensNode                // one machine
	lensLog                 // what is said
	lensTrouble             // what has gone wrong, and what can be done
)

func (l lens) title() string {
	return [...]string{"watch", "watch: map", "watch: node", "watch: log", "watch: trouble"}[l]
}

// watchOrigin is where the events of a board come from.
type watchOrigin int

const (
	fromRun    watchOrigin = iota // a run of this console
	fromLive                      // a watch
	fromReplay                    // a record
)

// watchScreen shows a board: that of a run of this console, of a live watch, or of a
// replay. The zero value shows nothing yet.
type watchScreen struct {
	board *engine.Board // takes events, whatever is shown
	// frozen is shown instead if it is not nil, as of frozenAt on the board's clock.
	frozen   *engine.Board
	frozenAt time.Time
	origin   watchOrigin
	back     screenID // where Esc leads from the table
	lens     lens
	from     lens // where Esc leads from a machine, the log and trouble

	at     string // name of the machine under the cursor; empty: the first
	node   string // that the node lens is about
	sort   sortBy
	filter string
	typing bool // the filter, or that of the log
	rows   machineRows
	place  mapCursor
	log    lineView
	choice int // under the cursor, of what can be done

	gen    int                // of what is watched: messages of others are not taken
	cancel context.CancelFunc // ends a live watch; nil if there is none
	err    error              // why a live watch ended
	ended  bool               // it has
	pulse  engine.Pulse       // of the API server
	ticks  bool               // one is under way
	player player
}

// sortBy is the order of a list of machines.
type sortBy int

const (
	sortSlowest sortBy = iota
	sortName
	sortState
	sortGroup
	sorts
)

func (s sortBy) String() string { return [...]string{"slowest", "name", "state", "group"}[s] }

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
	// watchTick moves the clocks of the screen.
	watchTick struct{ gen int }
)

var (
	filterKey = on("/", "/", "filter: state:drain group:x node:a* age>5m try>1 word", "find", act(func(c *console) { c.wat.typing = true })).footed("filter")
	freezeKey = binding{keys: []string{" "}, label: "space", help: "freeze the view, and the rollout goes on; hold a replay", group: "view", word: "freeze", do: (*console).freeze}
	backKey   = on("esc", "Esc", "back", "back", (*console).watchBack).footed("back")
	earlier   = on("[", "[", "a minute back", "replay", act(func(c *console) { c.seek(-time.Minute) })).unless((*console).noReplay)
	later     = on("]", "]", "a minute on", "replay", act(func(c *console) { c.seek(time.Minute) })).unless((*console).noReplay)
	faster    = on("+ =", "+", "faster", "replay", act(func(c *console) { c.wat.player.faster(1) })).unless((*console).noReplay)
	slower    = on("-", "-", "slower", "replay", act(func(c *console) { c.wat.player.faster(-1) })).unless((*console).noReplay)
	toFirst   = on("{", "{", "to the beginning", "replay", act(func(c *console) { c.seekTo(c.wat.player.first()) })).unless((*console).noReplay)
	toLast    = on("}", "}", "to the end", "replay", act(func(c *console) { c.seekTo(c.wat.player.last()) })).unless((*console).noReplay)
	troubleOf = on("t", "t", "what has gone wrong, and what can be done", "view", act(func(c *console) { c.lookThrough(lensTrouble) })).footed("trouble").unless((*console).noTrouble)
	logOf     = on("l L", "l", "what operator and machines say", "view", act(func(c *console) { c.lookThrough(lensLog) })).footed("log")

	// always are keys of every lens.
	always = slices.Concat([]binding{freezeKey, earlier, later, faster, slower, toFirst, toLast}, rolloutKeys)
)

var watchTableKeys = slices.Concat([]binding{
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.moveRow(-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.moveRow(1) })),
	on("pgup ctrl+u", "PgUp", "page up", "move", act(func(c *console) { c.moveRow(-c.h / 2) })),
	on("pgdown ctrl+d", "PgDn", "page down", "move", act(func(c *console) { c.moveRow(c.h / 2) })),
	on("g home", "g", "first", "move", act(func(c *console) { c.moveRow(-1 << 30) })),
	on("G end", "G", "last", "move", act(func(c *console) { c.moveRow(1 << 30) })),
	on("enter", "Enter", "the machine's own page", "view", (*console).openRow).footed("node").unless(func(c *console) string {
		if len(c.machines()) == 0 {
			return "no machine is listed"
		}
		return ""
	}),
	on("m", "m", "map of all nodes", "view", act(func(c *console) { c.wat.lens = lensMap })).footed("map"),
	logOf, troubleOf, filterKey,
	on("s", "s", "sort by another column", "view", act(func(c *console) { c.wat.sort = (c.wat.sort + 1) % sorts })).footed("sort"),
	on("y", "y", "copy the line of the machine", "copy", act((*console).copyRow)),
	backKey,
}, always)

var watchMapKeys = slices.Concat([]binding{
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.moveCell(-1, 0) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.moveCell(1, 0) })),
	on("left h", "← h", "left", "move", act(func(c *console) { c.moveCell(0, -1) })),
	on("right", "→", "right", "move", act(func(c *console) { c.moveCell(0, 1) })),
	on("tab", "Tab", "next group", "move", act(func(c *console) { c.nextGroup(1) })).footed("group"),
	on("shift+tab", "⇧Tab", "group before", "move", act(func(c *console) { c.nextGroup(-1) })),
	on("n", "n", "next cell where something goes wrong or moves", "move", (*console).nextBusy).footed("next that moves"),
	on("enter", "Enter", "the machine's own page: the one that matters in the cell", "view", (*console).openCell).footed("node"),
	on("m", "m", "table", "view", act(func(c *console) { c.wat.lens = lensTable })).footed("table"),
	backKey, logOf, troubleOf,
	on("y", "y", "copy the names in the cell", "copy", act((*console).copyCell)),
}, always)

var watchNodeKeys = slices.Concat([]binding{
	on("up k", "↑ k", "older lines", "move", act(func(c *console) { c.moveLine(-1) })),
	on("down j", "↓ j", "newer lines", "move", act(func(c *console) { c.moveLine(1) })),
	on("left p", "←", "machine before", "move", act(func(c *console) { c.stepNode(-1) })),
	on("right n", "→", "next machine", "move", act(func(c *console) { c.stepNode(1) })).footed("next"),
	on("o", "o", "the other machine of the replacement", "view", act((*console).otherNode)).footed("other").unless(func(c *console) string {
		if n := c.wat.shown().Node(c.wat.node); n == nil || c.wat.shown().Node(n.With) == nil {
			return "no other machine is known"
		}
		return ""
	}),
	on("l L", "l", "all that it said, with filters", "view", act(func(c *console) {
		c.wat.log.filter = "node:" + strings.ReplaceAll(c.wat.node, " ", "?") // a word of a filter has no spaces
		c.lookThrough(lensLog)
	})).footed("log"),
	on("y", "y", "copy its newest line, or what it is", "copy", act((*console).copyNode)).footed("copy"),
	backKey,
}, always)

var watchLogKeys = slices.Concat([]binding{
	on("/", "/", "filter: source:operator node:a* level:warn word", "find", act(func(c *console) { c.wat.typing = true })).footed("filter"),
	on("f", "f", "one source after the other, then all", "find", act((*console).nextSource)).footed("source"),
	on("e", "e", "only warnings and errors, then all", "find", act(func(c *console) { c.wat.log.level = (c.wat.log.level + 2) % 4 })).footed("errors"),
	on("w", "w", "wrap long lines", "view", act(func(c *console) { c.wat.log.wrap = !c.wat.log.wrap })).footed("wrap"),
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.moveLine(-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.moveLine(1) })),
	on("pgup ctrl+u", "PgUp", "page up", "move", act(func(c *console) { c.moveLine(-c.h / 2) })),
	on("pgdown ctrl+d", "PgDn", "page down", "move", act(func(c *console) { c.moveLine(c.h / 2) })),
	on("g home", "g", "first line", "move", act(func(c *console) { c.moveLine(-1 << 30) })),
	on("G end", "G", "follow the newest", "move", act(func(c *console) { c.wat.log.pinned = false })).footed("follow"),
	on("enter", "Enter", "the page of the machine that the line is about", "view", (*console).openLine).unless(func(c *console) string {
		if x, ok := c.lineAt(); !ok || c.wat.shown().Node(x.Node) == nil {
			return "the line names no machine"
		}
		return ""
	}),
	on("y", "y", "copy the line", "copy", act((*console).copyLine)).footed("copy"),
	backKey,
}, always)

var watchTroubleKeys = slices.Concat([]binding{
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.wat.choice = max(0, c.wat.choice-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.wat.choice = min(c.wat.choice+1, len(c.choices())-1) })),
	on("enter", "Enter", "do it, asking again, or copy the command", "do", (*console).choose).footed("choose"),
	logOf,
	on("y", "y", "copy the cause", "copy", act(func(c *console) { c.copyText(c.cause(), "the cause") })).footed("copy cause"),
	backKey,
}, always)

// watchKeys are the keys of the lens that is shown.
func (c *console) watchKeys() []binding {
	return [...][]binding{watchTableKeys, watchMapKeys, watchNodeKeys, watchLogKeys, watchTroubleKeys}[c.wat.lens]
}

// shown is the board that is looked at.
func (w *watchScreen) shown() *engine.Board {
	if w.frozen != nil {
		return w.frozen
	}
	if w.board == nil {
		w.board = &engine.Board{}
	}
	return w.board
}

// watchEvents takes events into the board.
func (c *console) watchEvents(events []engine.Event) {
	if c.wat.board == nil {
		c.wat.board = &engine.Board{}
	}
	for _, ev := range events {
		c.wat.board.Apply(ev)
	}
}

// showWatch opens the watch screen on the board that the events of this console's run go
// to. The clock of the screen then runs.
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

// openWatch begins to watch the cluster, or goes on with it.
func (c *console) openWatch() tea.Cmd {
	if c.running {
		return c.showWatch()
	}
	if c.wat.cancel != nil && c.wat.origin == fromLive {
		c.enterWatch()
		return c.watchTicking()
	}
	c.closeWatch()
	c.wat = watchScreen{origin: fromLive, gen: c.wat.gen + 1, board: &engine.Board{}, filter: c.wat.filter}
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
			if c.wat.board.Events == 0 && c.deps.settle != nil {
				c.deps.settle() // all nodes were read
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

// watchTicking keeps the clocks going while they are seen: once a second, and more often
// while a record is played. A frozen view has none.
func (c *console) watchTicking() tea.Cmd {
	w := &c.wat
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

// watchNow is the time on the clock of the board that is shown: that of the replay, or
// ours.
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

// freeze keeps what is seen as it is, or lets it go on. Whatever is watched goes on. A
// replay is held.
func (c *console) freeze() tea.Cmd {
	w := &c.wat
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

func (c *console) lookThrough(l lens) {
	if c.wat.lens != lensNode && c.wat.lens != l {
		c.wat.from = c.wat.lens
	}
	if l == lensLog {
		c.wat.log.pinned = false
	}
	c.wat.lens = l
}

// watchBack goes back by one: from a filter, a lens, the screen.
func (c *console) watchBack() tea.Cmd {
	w := &c.wat
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
	case c.upg.held != "":
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

func (c *console) cannotChange() string {
	switch {
	case c.wat.origin == fromReplay:
		return "this is a record of what was"
	case c.upg.held != "":
		return "somebody else holds the cluster"
	case c.deps.watch.Kubeconfig != "":
		return "opened with --kubeconfig, to look only"
	}
	return ""
}

func (c *console) noReplay() string {
	if c.wat.origin != fromReplay {
		return "this is no replay"
	}
	return ""
}

// machineRows is a list of machines, and what it was made from.
type machineRows struct {
	board  *engine.Board
	moves  int
	filter string
	sort   sortBy
	second int64 // for filters that ask for ages
	list   []*engine.BoardNode
	err    error // of the filter
}

// inFlight reports whether a machine is on its way, or will not come.
func inFlight(n *engine.BoardNode) bool {
	switch n.State {
	case engine.NodeOutdated, engine.NodeReady, engine.NodeGone:
		return false
	}
	return true
}

// machines are those that the table lists: in flight, or whatever the filter chooses.
func (c *console) machines() []*engine.BoardNode {
	w := &c.wat
	b, now := w.shown(), c.watchNow()
	f, err := parseFilter(w.filter)
	r := machineRows{board: b, moves: b.Moves(), filter: w.filter, sort: w.sort}
	if f.ages {
		r.second = now.Unix()
	}
	old := &w.rows
	if old.board == r.board && old.moves == r.moves && old.filter == r.filter && old.sort == r.sort && old.second == r.second && old.list != nil {
		return old.list
	}
	r.err = err
	r.list = make([]*engine.BoardNode, 0, 64)
	all := b.Nodes()
	if len(f.demands) == 0 {
		all = b.Moving()
	}
	for n := range all {
		if f.node(n, now) {
			r.list = append(r.list, n)
		}
	}
	if len(f.demands) == 0 && w.sort == sortSlowest { // as the board has them
		*old = r
		return r.list
	}
	slices.SortFunc(r.list, func(x, y *engine.BoardNode) int {
		var d int
		switch w.sort {
		case sortSlowest:
			d = x.Since.Compare(y.Since)
		case sortState:
			d = cmp.Compare(slices.Index(nodeStates, x.State), slices.Index(nodeStates, y.State))
		case sortGroup:
			d = strings.Compare(x.Group, y.Group)
		}
		return cmp.Or(d, strings.Compare(x.Name, y.Name))
	})
	*old = r
	return r.list
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
	c.lookThrough(lensNode)
	c.wat.node, c.wat.at = name, name
	c.wat.log.pinned = false
}

func (c *console) copyRow() {
	list := c.machines()
	if len(list) == 0 {
		c.copyText("", "")
		return
	}
	c.copyText(c.nodeLine(list[c.rowAt(list)]), "the line")
}

// nodeLine says what a machine is, as text.
func (c *console) nodeLine(n *engine.BoardNode) string {
	return strings.TrimSpace(fmt.Sprintf("%s  %s  %s  %s  %s", clean(n.Name), clean(n.Group), clean(n.State), c.age(n), clean(n.Text)))
}

// age is how long a machine has been in its state. Of one that was in it before anybody
// looked it is the least that it can be.
func (c *console) age(n *engine.BoardNode) string {
	d := seconds(c.watchNow().Sub(n.Since))
	if !n.Seen {
		return "≥" + d
	}
	return d
}

// seconds is short without parts of seconds, which would only flicker.
func seconds(d time.Duration) string {
	if d < 10*time.Second {
		return strconv.Itoa(int(max(d, 0)/time.Second)) + "s"
	}
	return short(d)
}

// stepNode goes to the machine before or after, in the order of the table, or of the names
// of all.
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
		c.copyText(clean(x.Text), "the line")
		return
	}
	if n := c.wat.shown().Node(c.wat.node); n != nil {
		c.copyText(c.nodeLine(n), "what it is")
		return
	}
	c.copyText("", "")
}

// typedWatch takes a key of the filter of the table or the log.
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
		*text += clean(string(k.Runes))
	}
	c.wat.log.pinned = false
}

// lineView is what the log lens remembers.
type lineView struct {
	filter string
	source string // "" for all
	level  int    // index into logLevels: this one and worse
	wrap   bool
	// pinned is whether the line with number at, among all that were ever said, is kept in
	// sight; else the newest is followed.
	pinned bool
	at     int
	found  foundLines
}

// foundLines are the numbers of the lines that some filter chooses, and what they were
// found with. New lines are added to them.
type foundLines struct {
	board        *engine.Board
	filter, only string
	source       string
	level        int
	upTo         int
	list         []int
	err          error
}

// lines are the numbers of the lines that the log lens shows, or of those of the machine
// of the node lens and of its other one.
func (c *console) lines() []int {
	w := &c.wat
	b := w.shown()
	key := foundLines{board: b, filter: w.log.filter, source: w.log.source, level: w.log.level}
	if w.lens == lensNode {
		key = foundLines{board: b, only: w.node}
	}
	f := &w.log.found
	if f.board != key.board || f.filter != key.filter || f.source != key.source || f.level != key.level || f.only != key.only {
		*f = key
	}
	chosen, err := parseFilter(f.filter)
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
		case f.level > 0 && slices.Index(logLevels, x.Level) < f.level:
		case !chosen.line(&x):
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
	c.copyText(clean(x.Text), "the line")
}

func (c *console) openLine() tea.Cmd {
	if x, ok := c.lineAt(); ok {
		c.openNode(x.Node)
	}
	return nil
}

// nextSource goes on to the lines of the next speaker.
func (c *console) nextSource() {
	all := c.sources()
	i := slices.Index(all, c.wat.log.source)
	c.wat.log.source = all[(i+1)%len(all)]
	c.wat.log.pinned = false
}

// sources are who has spoken, by name, after "" for all.
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
