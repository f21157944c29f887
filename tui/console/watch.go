package console

import (
	"cmp"
	"context"
	"fmt"
	"slices"
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

// watchLens is one lens of the watch screen, with its own cursor and keys.
type watchLens interface {
	title() string
	keys() []binding
	// view renders b in w columns and h lines.
	view(b *rollout.Board, w, h int) []string
}

// shownLens returns the lens that is shown.
func (scr *watchScreen) shownLens() watchLens {
	return [...]watchLens{lensTable: &scr.table, lensMap: &scr.fleet, lensNode: &scr.machine, lensLog: &scr.log, lensTrouble: &scr.trouble}[scr.lens]
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

	typing bool // keys go into the filter of the table or the log

	table   tableLens
	fleet   fleetLens
	machine machineLens
	log     logLens
	trouble troubleLens

	gen    int                // generation of the watch: messages of others are dropped
	cancel context.CancelFunc // ends a live watch; nil if there is none
	err    error              // why a live watch ended
	ended  bool               // the live watch has ended
	pulse  engine.APIHealth   // of the API server
	ticks  bool               // a tick is pending
	player player
}

func newWatchScreen(c *console) *watchScreen {
	scr := &watchScreen{c: c}
	scr.restart(watchScreen{}, "")
	return scr
}

// restart replaces the state of the screen. Its lenses lose theirs, except that the table gets filter.
func (scr *watchScreen) restart(state watchScreen, filter string) {
	state.c = scr.c
	*scr = state
	scr.table = tableLens{scr: scr, filter: filter}
	scr.fleet = fleetLens{scr: scr}
	scr.machine = machineLens{scr: scr}
	scr.log = logLens{scr: scr}
	scr.trouble = troubleLens{scr: scr}
}

func (scr *watchScreen) title() string   { return scr.shownLens().title() }
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

func (scr *watchScreen) lensTroubleKey() binding {
	return on("t", "t", "failures and possible actions", "view", act(func() { scr.showLens(lensTrouble) })).footed("trouble").unless(scr.trouble.none)
}

func (scr *watchScreen) lensLogKey() binding {
	return on("l L", "l", "log of operator and machines", "view", act(func() { scr.showLens(lensLog) })).footed("log")
}

// lensKeys are the keys of every lens.
func (scr *watchScreen) lensKeys() []binding {
	return slices.Concat([]binding{
		scr.freezeKey(),
		on("[", "[", "back one minute", "replay", act(func() { scr.seek(-time.Minute) })).unless(scr.noReplay),
		on("]", "]", "forward one minute", "replay", act(func() { scr.seek(time.Minute) })).unless(scr.noReplay),
		on("+ =", "+", "faster", "replay", act(func() { scr.player.faster(1) })).unless(scr.noReplay),
		on("-", "-", "slower", "replay", act(func() { scr.player.faster(-1) })).unless(scr.noReplay),
		on("{", "{", "to the beginning", "replay", act(func() { scr.seekTo(scr.player.first()) })).unless(scr.noReplay),
		on("}", "}", "to the end", "replay", act(func() { scr.seekTo(scr.player.last()) })).unless(scr.noReplay),
	}, scr.c.rollout.keys())
}

// keys are the keys of the current lens.
func (scr *watchScreen) keys() []binding { return scr.shownLens().keys() }

// shown is the board on the screen: the frozen copy or the live one.
func (scr *watchScreen) shown() *rollout.Board {
	if scr.frozen != nil {
		return scr.frozen
	}
	if scr.board == nil {
		scr.board = &rollout.Board{}
	}
	return scr.board
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
	scr.restart(watchScreen{origin: fromLive, gen: scr.gen + 1, board: &rollout.Board{}}, scr.table.filter)
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
	plays := scr.origin == fromReplay && scr.player.playing
	if scr.ticks || scr.c.screen != scr || scr.frozen != nil && !plays || scr.origin == fromReplay && !plays {
		return nil
	}
	scr.ticks = true
	gap := time.Second
	if plays {
		gap = playGap
	}
	gen := scr.gen
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
	switch {
	case scr.origin == fromReplay:
		scr.player.toggle()
		return scr.ticking()
	case scr.frozen != nil:
		scr.frozen = nil
		return scr.ticking()
	}
	scr.frozenAt = scr.clock()
	scr.frozen = scr.shown().Clone()
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
	switch {
	case scr.lens == lensLog && scr.log.filter != "":
		scr.log.filter = ""
	case scr.lens == lensTable && scr.table.filter != "":
		scr.table.filter = ""
	case scr.lens == lensMap:
		scr.lens = lensTable
	case scr.lens != lensTable:
		scr.lens = scr.from
		if scr.lens == lensNode || scr.lens == lensLog || scr.lens == lensTrouble {
			scr.lens = lensTable
		}
	case scr.origin == fromRun:
		scr.c.screen = scr.back
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

func (scr *watchScreen) openNode(name string) {
	scr.showLens(lensNode)
	scr.machine.name, scr.table.at = name, name
	scr.log.pinned = false
}

// typed handles a key of the filter of the table or the log.
func (scr *watchScreen) typed(k tea.KeyMsg) {
	text := &scr.table.filter
	if scr.lens == lensLog {
		text = &scr.log.filter
	}
	*text, scr.typing = editFilter(*text, k)
	scr.log.pinned = false
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
	if scr.table.filter != "" {
		args += " --filter " + view.QuoteArg(scr.table.filter)
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
