package tui

import (
	"time"

	"constellation/engine"
)

// lens is what the watch screen shows of a board.
type lens int

const (
	lensTable   lens = iota // pipeline, machines in flight, and what is said
	lensMap                 // all nodes, each at its place
	lensNode                // one machine
	lensLog                 // what is said
	lensTrouble             // what has gone wrong
)

func (l lens) title() string {
	return [...]string{"watch", "watch: map", "watch: node", "watch: log", "watch: trouble"}[l]
}

// watchScreen shows a board: that of a run of this console, of a live watch, or of a
// replay. The zero value shows nothing yet.
type watchScreen struct {
	board  *engine.Board // takes events, whatever is shown
	frozen *engine.Board // is shown instead, since frozenAt
	// frozenAt is the time on the board's clock.
	frozenAt time.Time
	origin   watchOrigin
	lens     lens
	from     lens // where Esc leads from a machine or the log
	back     screenID
	rows     rowList
	node     string // that the node lens is about
}

// watchOrigin is where the events of a board come from.
type watchOrigin int

const (
	fromRun watchOrigin = iota // a run of this console
	fromLive
	fromReplay
)

// rowList is the list of machines, with what it was made from.
type rowList struct {
	at     string // name of the machine under the cursor; empty: the first
	sort   sortBy
	filter string
	typing bool
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

var watchKeys = []binding{
	on("esc", "Esc", "back", "back", act(func(c *console) { c.screen = c.wat.back })).footed("back"),
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

// showWatch opens the watch screen on the board that the events go to.
func (c *console) showWatch(from watchOrigin) {
	if c.screen != screenWatch {
		c.wat.back = c.screen
	}
	c.screen, c.wat.origin, c.wat.lens = screenWatch, from, lensTable
	if c.wat.board == nil {
		c.wat.board = &engine.Board{}
	}
}

// board is what is shown.
func (w *watchScreen) shown() *engine.Board {
	switch {
	case w.frozen != nil:
		return w.frozen
	case w.board == nil:
		return &engine.Board{}
	}
	return w.board
}
