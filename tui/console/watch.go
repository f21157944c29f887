package console

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/words"
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
	defaults
	c     *console
	board *rollout.Board // gets all events, also while the view is frozen
	// frozen, if not nil, is shown instead: a copy as of frozenAt on the board's clock.
	frozen   *rollout.Board
	frozenAt time.Time
	origin   watchOrigin
	back     screen // where Esc leads from the table
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
	pulse  engine.APIHealth   // of the API server
	ticks  bool               // a tick is pending
	player player
}

func (scr *watchScreen) title() string   { return scr.lens.title() }
func (scr *watchScreen) mode() string    { return "" } // its header shows it
func (scr *watchScreen) takesText() bool { return scr.typing }
func (scr *watchScreen) safety() string  { return scr.boardSafety() }

func (scr *watchScreen) why() []string {
	if by := scr.c.upg.lockedBy; by != "" {
		return append(scr.c.th.Below(scr.c.w, 1, 2, term.Caution, "Read-only: "+by), scr.watchWhy()...)
	}
	return scr.watchWhy()
}

func (scr *watchScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	switch msg.(type) {
	case watchBatch, watchEnded, watchTick:
		return scr.takeMsg(msg), true
	}
	return nil, false
}

// Messages of the watch screen.
type (
	// watchBatch are events of a live watch, in order.
	watchBatch struct {
		gen    int
		events []plan.Event
	}
	watchEnded struct {
		gen int
		err error
	}
	// watchTick updates the clocks of the screen.
	watchTick struct{ gen int }
)

func (scr *watchScreen) filterKey() binding {
	return on("/", "/", "filter: state:drain group:x node:a* age>5m try>1 word", "find", act(func() { scr.typing = true })).footed("filter")
}

func (scr *watchScreen) freezeKey() binding {
	return binding{keys: []string{" "}, label: "space", help: "freeze the view, the rollout continues; pause a replay", group: "view", footLabel: "freeze", do: scr.freeze}
}

func (scr *watchScreen) backKey() binding {
	return on("esc", "Esc", "back", "back", scr.leave).footed("back")
}

func (scr *watchScreen) earlierKey() binding {
	return on("[", "[", "back one minute", "replay", act(func() { scr.seek(-time.Minute) })).unless(scr.noReplay)
}

func (scr *watchScreen) laterKey() binding {
	return on("]", "]", "forward one minute", "replay", act(func() { scr.seek(time.Minute) })).unless(scr.noReplay)
}

func (scr *watchScreen) fasterKey() binding {
	return on("+ =", "+", "faster", "replay", act(func() { scr.player.faster(1) })).unless(scr.noReplay)
}

func (scr *watchScreen) slowerKey() binding {
	return on("-", "-", "slower", "replay", act(func() { scr.player.faster(-1) })).unless(scr.noReplay)
}

func (scr *watchScreen) firstKey() binding {
	return on("{", "{", "to the beginning", "replay", act(func() { scr.seekTo(scr.player.first()) })).unless(scr.noReplay)
}

func (scr *watchScreen) lastKey() binding {
	return on("}", "}", "to the end", "replay", act(func() { scr.seekTo(scr.player.last()) })).unless(scr.noReplay)
}

func (scr *watchScreen) lensTroubleKey() binding {
	return on("t", "t", "failures and possible actions", "view", act(func() { scr.showLens(lensTrouble) })).footed("trouble").unless(scr.noTrouble)
}

func (scr *watchScreen) lensLogKey() binding {
	return on("l L", "l", "log of operator and machines", "view", act(func() { scr.showLens(lensLog) })).footed("log")
}

// lensKeys are the keys of every lens.
func (scr *watchScreen) lensKeys() []binding {
	return slices.Concat([]binding{scr.freezeKey(), scr.earlierKey(), scr.laterKey(), scr.fasterKey(), scr.slowerKey(), scr.firstKey(), scr.lastKey()}, scr.c.rollout.keys())
}

func (scr *watchScreen) tableKeys() []binding {
	return slices.Concat([]binding{
		on("up k", "↑ k", "up", "move", act(func() { scr.moveRow(-1) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.moveRow(1) })),
		on("pgup ctrl+u", "PgUp", "page up", "move", act(func() { scr.moveRow(-scr.c.h / 2) })),
		on("pgdown ctrl+d", "PgDn", "page down", "move", act(func() { scr.moveRow(scr.c.h / 2) })),
		on("g home", "g", "first", "move", act(func() { scr.moveRow(-1 << 30) })),
		on("G end", "G", "last", "move", act(func() { scr.moveRow(1 << 30) })),
		on("enter", "Enter", "details of the machine", "view", scr.openRow).footed("node").unless(func() string {
			if len(scr.machines()) == 0 {
				return "no machine is listed"
			}
			return ""
		}),
		on("m", "m", "map of all nodes", "view", act(func() { scr.lens = lensMap })).footed("map"),
		scr.lensLogKey(), scr.lensTroubleKey(), scr.filterKey(),
		on("s", "s", "sort by another column", "view", act(func() { scr.sort = (scr.sort + 1) % view.Sorts })).footed("sort"),
		on("y", "y", "copy the row", "copy", act(scr.copyRow)),
		scr.backKey(),
	}, scr.lensKeys())
}

func (scr *watchScreen) mapKeys() []binding {
	return slices.Concat([]binding{
		on("up k", "↑ k", "up", "move", act(func() { scr.moveCell(-1, 0) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.moveCell(1, 0) })),
		on("left h", "← h", "left", "move", act(func() { scr.moveCell(0, -1) })),
		on("right", "→", "right", "move", act(func() { scr.moveCell(0, 1) })),
		on("tab", "Tab", "next group", "move", act(func() { scr.nextGroup(1) })).footed("group"),
		on("shift+tab", "⇧Tab", "previous group", "move", act(func() { scr.nextGroup(-1) })),
		on("n", "n", "next cell with a failed or moving node", "move", scr.nextActiveCell).footed("next active"),
		on("enter", "Enter", "details of the worst machine in the cell", "view", scr.openCell).footed("node"),
		on("m", "m", "table", "view", act(func() { scr.lens = lensTable })).footed("table"),
		scr.backKey(), scr.lensLogKey(), scr.lensTroubleKey(),
		on("y", "y", "copy the names in the cell", "copy", act(scr.copyCell)),
	}, scr.lensKeys())
}

func (scr *watchScreen) nodeKeys() []binding {
	return slices.Concat([]binding{
		on("up k", "↑ k", "older lines", "move", act(func() { scr.moveLine(-1) })),
		on("down j", "↓ j", "newer lines", "move", act(func() { scr.moveLine(1) })),
		on("left p", "←", "previous machine", "move", act(func() { scr.stepNode(-1) })),
		on("right n", "→", "next machine", "move", act(func() { scr.stepNode(1) })).footed("next"),
		on("o", "o", "the other machine of the replacement", "view", act(scr.otherNode)).footed("other").unless(func() string {
			if n := scr.shown().Node(scr.node); n == nil || scr.shown().Node(n.Counterpart) == nil {
				return "no other machine is known"
			}
			return ""
		}),
		on("l L", "l", "its log, with filters", "view", act(func() {
			scr.log.filter = "node:" + strings.ReplaceAll(scr.node, " ", "?") // filter terms cannot contain spaces
			scr.showLens(lensLog)
		})).footed("log"),
		on("y", "y", "copy its newest log line, or its state", "copy", act(scr.copyNode)).footed("copy"),
		scr.backKey(),
	}, scr.lensKeys())
}

func (scr *watchScreen) logKeys() []binding {
	return slices.Concat([]binding{
		on("/", "/", "filter: source:operator node:a* level:warn word", "find", act(func() { scr.typing = true })).footed("filter"),
		on("f", "f", "cycle through the sources", "find", act(scr.nextSource)).footed("source"),
		on("e", "e", "toggle: warnings and errors only", "find", act(func() { scr.log.level = (scr.log.level + 2) % 4 })).footed("errors"),
		on("w", "w", "wrap long lines", "view", act(func() { scr.log.wrap = !scr.log.wrap })).footed("wrap"),
		on("up k", "↑ k", "up", "move", act(func() { scr.moveLine(-1) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.moveLine(1) })),
		on("pgup ctrl+u", "PgUp", "page up", "move", act(func() { scr.moveLine(-scr.c.h / 2) })),
		on("pgdown ctrl+d", "PgDn", "page down", "move", act(func() { scr.moveLine(scr.c.h / 2) })),
		on("g home", "g", "first line", "move", act(func() { scr.moveLine(-1 << 30) })),
		on("G end", "G", "follow the newest", "move", act(func() { scr.log.pinned = false })).footed("follow"),
		on("enter", "Enter", "details of the machine in the line", "view", scr.openLine).unless(func() string {
			if x, ok := scr.lineAt(); !ok || scr.shown().Node(x.Node) == nil {
				return "the line names no machine"
			}
			return ""
		}),
		on("y", "y", "copy the line", "copy", act(scr.copyLine)).footed("copy"),
		scr.backKey(),
	}, scr.lensKeys())
}

func (scr *watchScreen) troubleKeys() []binding {
	return slices.Concat([]binding{
		on("up k", "↑ k", "up", "move", act(func() { scr.choice = max(0, scr.choice-1) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.choice = min(scr.choice+1, len(scr.choices())-1) })),
		on("enter", "Enter", "do it (asks first), or copy the command", "do", scr.choose).footed("choose"),
		scr.lensLogKey(),
		on("y", "y", "copy the cause", "copy", act(func() { scr.c.copyText(scr.cause(), "the cause") })).footed("copy cause"),
		scr.backKey(),
	}, scr.lensKeys())
}

// keys are the keys of the current lens.
func (scr *watchScreen) keys() []binding {
	switch scr.lens {
	case lensMap:
		return scr.mapKeys()
	case lensNode:
		return scr.nodeKeys()
	case lensLog:
		return scr.logKeys()
	case lensTrouble:
		return scr.troubleKeys()
	}
	return scr.tableKeys()
}

// shown is the board on the screen: the frozen copy or the live one.
func (w *watchScreen) shown() *rollout.Board {
	if w.frozen != nil {
		return w.frozen
	}
	if w.board == nil {
		w.board = &rollout.Board{}
	}
	return w.board
}

// apply applies events to the board.
func (scr *watchScreen) apply(events []plan.Event) {
	if scr.board == nil {
		scr.board = &rollout.Board{}
	}
	for _, ev := range events {
		scr.board.Apply(ev)
	}
}

// show opens the watch screen on the board of this console's run and starts its clock.
func (scr *watchScreen) show() tea.Cmd {
	scr.origin = fromRun
	scr.enter()
	return scr.ticking()
}

func (scr *watchScreen) enter() {
	if scr.c.screen != scr {
		scr.back = scr.c.screen
	}
	scr.c.screen, scr.lens = scr, lensTable
}

// open starts a live watch of the cluster, or shows the one in progress.
func (scr *watchScreen) open() tea.Cmd {
	if scr.c.running {
		return scr.show()
	}
	if scr.cancel != nil && scr.origin == fromLive {
		scr.enter()
		return scr.ticking()
	}
	scr.close()
	*scr = watchScreen{c: scr.c, origin: fromLive, gen: scr.gen + 1, board: &rollout.Board{}, filter: scr.filter}
	scr.enter()
	gen, send, after := scr.gen, scr.c.deps.send, scr.c.deps.after
	ctx, cancel := context.WithCancel(scr.c.ctx)
	scr.cancel = cancel
	return tea.Batch(scr.ticking(), func() tea.Msg {
		r := scr.c.deps.Watch
		r.Stay, r.After = true, after
		var err error
		collect(func(b []plan.Event) { send(watchBatch{gen, b}) }, func(emit func(plan.Event)) {
			err = scr.c.deps.Engine.Watch(ctx, r, emit)
		})
		return watchEnded{gen, err}
	})
}

// close ends a live watch, if there is one.
func (scr *watchScreen) close() {
	if scr.cancel != nil {
		scr.cancel()
		scr.cancel = nil
	}
}

// takeMsg handles the messages of the watch screen.
func (scr *watchScreen) takeMsg(msg tea.Msg) tea.Cmd {
	switch msg := msg.(type) {
	case watchBatch:
		if msg.gen == scr.gen {
			if scr.board.Events == 0 && scr.c.deps.releaseMemory != nil {
				scr.c.deps.releaseMemory() // all nodes were read
			}
			scr.apply(msg.events)
			scr.pulse = scr.c.deps.Engine.APIHealth()
		}
	case watchEnded:
		if msg.gen == scr.gen {
			scr.ended, scr.err, scr.cancel = true, msg.err, nil
		}
	case watchTick:
		if msg.gen != scr.gen {
			return nil
		}
		scr.ticks = false
		scr.pulse = scr.c.deps.Engine.APIHealth()
		if scr.origin == fromReplay && scr.player.playing {
			scr.play()
		}
		return scr.ticking()
	}
	return nil
}

// ticking schedules the next clock tick while the screen is visible: every second, and
// more often during a replay. A frozen view has no ticks.
func (scr *watchScreen) ticking() tea.Cmd {
	w := scr
	plays := w.origin == fromReplay && w.player.playing
	if w.ticks || scr.c.screen != scr || w.frozen != nil && !plays || w.origin == fromReplay && !plays {
		return nil
	}
	w.ticks = true
	gap := time.Second
	if plays {
		gap = playGap
	}
	gen := w.gen
	if scr.c.deps.after != nil && !plays {
		second := scr.c.deps.after(gap)
		return func() tea.Msg { <-second; return watchTick{gen} }
	}
	return tea.Tick(gap, func(time.Time) tea.Msg { return watchTick{gen} })
}

// clock is the time on the clock of the board on the screen: that of the freeze, of the
// replay, of the end of the run, or now.
func (scr *watchScreen) clock() time.Time {
	switch {
	case scr.frozen != nil:
		return scr.frozenAt
	case scr.origin == fromReplay:
		return scr.player.now
	case scr.board != nil && scr.board.Result != nil:
		return scr.board.Last
	}
	return scr.c.now
}

// freeze freezes or unfreezes the view; events are still applied to the board. It pauses or
// resumes a replay.
func (scr *watchScreen) freeze() tea.Cmd {
	w := scr
	switch {
	case w.origin == fromReplay:
		w.player.toggle()
		return scr.ticking()
	case w.frozen != nil:
		w.frozen = nil
		return scr.ticking()
	}
	w.frozenAt = scr.clock()
	w.frozen = w.shown().Clone()
	return nil
}

func (scr *watchScreen) showLens(l lens) {
	if scr.lens != lensNode && scr.lens != l {
		scr.from = scr.lens
	}
	if l == lensLog {
		scr.log.pinned = false
	}
	scr.lens = l
}

// leave clears the filter, leaves the lens, or leaves the screen.
func (scr *watchScreen) leave() tea.Cmd {
	w := scr
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
		scr.c.screen = w.back
	case scr.c.upg.lockedBy != "":
		scr.close()
		scr.c.screen = scr.c.result
	case scr.c.deps.OnlyWatch:
		return scr.c.quit.leave()
	default:
		scr.close()
		return scr.c.overview.show()
	}
	return nil
}

func (scr *watchScreen) readOnlyReason() string {
	switch {
	case scr.origin == fromReplay:
		return "this is a replay"
	case scr.c.upg.lockedBy != "":
		return "another run holds the lock of the cluster"
	case scr.c.deps.Watch.Kubeconfig != "":
		return "opened read-only with --kubeconfig"
	}
	return ""
}

func (scr *watchScreen) noReplay() string {
	if scr.origin != fromReplay {
		return "this is not a replay"
	}
	return ""
}

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

// machines are the rows of the table: those in flight, or those that match the filter.
func (scr *watchScreen) machines() []*rollout.BoardNode {
	w := scr
	b, now := w.shown(), scr.clock()
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
func (scr *watchScreen) flight() view.Flight {
	list := scr.machines()
	return view.Flight{List: list, At: scr.rowAt(list), Sort: scr.sort, Filter: scr.filter, Typing: scr.typing, Err: scr.rows.err}
}

// rowAt is the index of the machine under the cursor.
func (scr *watchScreen) rowAt(list []*rollout.BoardNode) int {
	return max(0, slices.IndexFunc(list, func(n *rollout.BoardNode) bool { return n.Name == scr.at }))
}

func (scr *watchScreen) moveRow(by int) {
	list := scr.machines()
	if len(list) == 0 {
		return
	}
	scr.at = list[max(0, min(scr.rowAt(list)+by, len(list)-1))].Name
}

func (scr *watchScreen) openRow() tea.Cmd {
	list := scr.machines()
	scr.openNode(list[scr.rowAt(list)].Name)
	return nil
}

func (scr *watchScreen) openNode(name string) {
	scr.showLens(lensNode)
	scr.node, scr.at = name, name
	scr.log.pinned = false
}

func (scr *watchScreen) copyRow() {
	list := scr.machines()
	if len(list) == 0 {
		scr.c.copyText("", "")
		return
	}
	scr.c.copyText(view.NodeLine(scr.page(), list[scr.rowAt(list)]), "the line")
}

// stepNode shows the previous or next machine, in the order of the table or, if the machine
// is not in the table, by name.
func (scr *watchScreen) stepNode(by int) {
	list := scr.machines()
	i := slices.IndexFunc(list, func(n *rollout.BoardNode) bool { return n.Name == scr.node })
	if i < 0 {
		list = list[:0:0]
		for n := range scr.shown().Nodes() {
			list = append(list, n)
		}
		slices.SortFunc(list, func(x, y *rollout.BoardNode) int { return strings.Compare(x.Name, y.Name) })
		i = slices.IndexFunc(list, func(n *rollout.BoardNode) bool { return n.Name == scr.node })
	}
	if len(list) > 0 {
		scr.openNode(list[max(0, min(i+by, len(list)-1))].Name)
	}
}

func (scr *watchScreen) otherNode() {
	if n := scr.shown().Node(scr.node); n != nil {
		scr.openNode(n.Counterpart)
	}
}

func (scr *watchScreen) copyNode() {
	if x, ok := scr.lineAt(); ok {
		scr.c.copyText(term.Clean(x.Text), "the line")
		return
	}
	if n := scr.shown().Node(scr.node); n != nil {
		scr.c.copyText(view.NodeLine(scr.page(), n), "its state")
		return
	}
	scr.c.copyText("", "")
}

// typed handles a key of the filter of the table or the log.
func (scr *watchScreen) typed(k tea.KeyMsg) {
	text := &scr.filter
	if scr.lens == lensLog {
		text = &scr.log.filter
	}
	*text, scr.typing = editFilter(*text, k)
	scr.log.pinned = false
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
	board        *rollout.Board
	filter, only string
	source       string
	level        int
	upTo         int
	list         []int
	err          error
}

// lines are the numbers of the lines that the log lens shows. For the node lens they are
// those of its machine and of the other machine of the replacement.
func (scr *watchScreen) lines() []int {
	w := scr
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
func (scr *watchScreen) lineIndex(list []int) int {
	if !scr.log.pinned {
		return len(list) - 1
	}
	i, _ := slices.BinarySearch(list, scr.log.at)
	return min(i, len(list)-1)
}

func (scr *watchScreen) moveLine(by int) {
	list := scr.lines()
	if len(list) == 0 {
		return
	}
	i := max(0, min(scr.lineIndex(list)+by, len(list)-1))
	scr.log.pinned, scr.log.at = i < len(list)-1, list[i]
}

// lineAt is the line under the cursor.
func (scr *watchScreen) lineAt() (x rollout.BoardLine, ok bool) {
	list := scr.lines()
	if len(list) == 0 {
		return x, false
	}
	l := &scr.shown().Log
	return l.At(list[scr.lineIndex(list)] - l.Dropped()), true
}

func (scr *watchScreen) copyLine() {
	x, _ := scr.lineAt()
	scr.c.copyText(term.Clean(x.Text), "the line")
}

func (scr *watchScreen) openLine() tea.Cmd {
	if x, ok := scr.lineAt(); ok {
		scr.openNode(x.Node)
	}
	return nil
}

// nextSource filters by the next source.
func (scr *watchScreen) nextSource() {
	all := scr.sources()
	i := slices.Index(all, scr.log.source)
	scr.log.source = all[(i+1)%len(all)]
	scr.log.pinned = false
}

// sources are the names of the log's sources in order, after "" for all.
func (scr *watchScreen) sources() []string {
	out := []string{""}
	for s := range scr.shown().Log.Sources() {
		if s != "" {
			out = append(out, s)
		}
	}
	slices.Sort(out)
	return out
}

// command returns the command line that reproduces the watch screen.
func (scr *watchScreen) command() string {
	args := "watch"
	if scr.origin == fromReplay {
		args += " --replay " + view.QuoteArg(scr.c.deps.Replay.Path+"@"+scr.player.now.UTC().Format(time.RFC3339))
	}
	if k := scr.c.deps.Watch.Kubeconfig; k != "" {
		args += " --kubeconfig " + view.QuoteArg(k)
	}
	if scr.filter != "" {
		args += " --filter " + view.QuoteArg(scr.filter)
	}
	return scr.c.deps.Commands.Command(args)
}

// begin is the initial command of the console when it was started by `watch`.
func (scr *watchScreen) begin() tea.Cmd {
	scr.c.task.busy = ""
	if scr.c.deps.Replay != nil {
		return scr.openReplay(scr.c.deps.Replay)
	}
	return scr.open()
}

// exitSummary is exitSummary for a watch: its progress and the command that opens it again.
func (scr *watchScreen) exitSummary() []string {
	t, w := scr.c.th.Printed(), min(max(scr.c.w, view.MinWidth), 120)
	b, now := scr.shown(), scr.clock()
	if b.Events == 0 {
		if scr.err != nil {
			x := view.Explain(scr.err, scr.c.deps.Commands)
			return []string{t.Row(w).Add(term.Bad, t.Fail+" ").Add(term.Plain, x.What).String(), t.Row(w).Add(term.Faint, "  fix  ").Add(term.Plain, x.Remedy).String()}
		}
		return nil
	}
	done, total := b.Places()
	head := fmt.Sprintf("%d of %s at the target", done, words.Count(total, "node"))
	if eta := view.ETA(scr.c.page(), b, now); eta != "" {
		head += ", " + eta
	}
	if scr.origin == fromReplay {
		head += ", recorded"
	}
	reason, _ := scr.reason()
	return []string{
		t.Row(w).Add(term.Strong, cmp.Or(term.Clean(b.Cluster), "cluster")+": ").Add(term.Plain, head+", "+now.UTC().Format("15:04:05Z")).String(),
		t.Row(w).Add(term.Faint, "  why  ").Add(term.Plain, term.AsciiIf(t.Ascii, reason)).String(),
		t.Row(w).Add(term.Faint, "  back ").Add(term.Accent, scr.command()).String(),
	}
}
