package console

import (
	"context"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
)

// task is the background work of the console: at most one at a time. Messages of an earlier
// one are dropped.
type task struct {
	c      *console
	busy   string // the work, for display; "" if there is none
	id     int    // of the current task
	cancel context.CancelFunc
	take   func([]plan.Event) tea.Cmd // takes the events of the task
}

type (
	// batch are events of a task, in order.
	batch struct {
		task   int
		events []plan.Event
	}
	// ended is the end of a task; msg is its outcome.
	ended struct {
		task int
		msg  tea.Msg
	}
)

// launch starts a background task that emits events. Its events and its outcome arrive as
// messages; take gets the events, and is nil for a task that emits none. It cancels the
// previous task, whose messages are dropped.
func (t *task) launch(what string, take func([]plan.Event) tea.Cmd, work func(context.Context, func(plan.Event)) tea.Msg) tea.Cmd {
	t.stop()
	t.id++
	id, send := t.id, t.c.deps.send
	ctx, cancel := context.WithCancel(t.c.ctx)
	t.cancel, t.busy, t.take = cancel, what, take
	return func() (msg tea.Msg) {
		defer cancel()
		collect(func(b []plan.Event) { send(batch{id, b}) }, func(emit func(plan.Event)) { msg = work(ctx, emit) })
		return ended{id, msg}
	}
}

// stop cancels the task. Its outcome still arrives.
func (t *task) stop() {
	if t.cancel != nil {
		t.cancel()
	}
}

// drop cancels the task. Its late messages are dropped.
func (t *task) drop() {
	t.stop()
	t.cancel, t.busy = nil, ""
	t.id++
}

// current reports whether a message belongs to the current task.
func (t *task) current(id int) bool { return id == t.id }
