package console

import (
	"context"
	"sync"
	"time"

	"constellation/engine/plan"
	"constellation/tui/term"
)

// collector batches the events of a run for the console. The run never waits for the
// screen: emit only appends. The console gets the first event at once and later ones in
// batches, at most one per term.FrameGap. No event is dropped.
//
// All methods may be called concurrently.
type collector struct {
	send func([]plan.Event)

	mu    sync.Mutex
	batch []plan.Event
	wake  chan struct{}

	sending sync.Mutex // held while a batch is sent, to keep batches in order
}

func newCollector(send func([]plan.Event)) *collector {
	return &collector{send: send, wake: make(chan struct{}, 1)}
}

// emit appends an event to the batch. It never blocks.
func (c *collector) emit(ev plan.Event) {
	c.mu.Lock()
	c.batch = append(c.batch, ev)
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// flush sends the current batch and returns when the console has received it.
func (c *collector) flush() {
	c.sending.Lock()
	defer c.sending.Unlock()
	c.mu.Lock()
	batch := c.batch
	c.batch = nil
	c.mu.Unlock()
	if len(batch) > 0 {
		c.send(batch)
	}
}

// Run sends batches until ctx ends. It blocks while there are no events.
func (c *collector) Run(ctx context.Context) {
	var next time.Time // earliest time of the next batch
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		}
		if wait := time.Until(next); wait > 0 { // no ticker: an idle console must not wake the CPU
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
		}
		c.flush()
		next = time.Now().Add(term.FrameGap)
	}
}

// collect runs work and sends the events that it emits in batches. It returns when all have
// been sent.
func collect(send func([]plan.Event), work func(emit func(plan.Event))) {
	events := newCollector(send)
	collecting, stop := context.WithCancel(context.Background())
	gone := make(chan struct{})
	go func() { defer close(gone); events.Run(collecting) }()
	work(events.emit)
	stop()
	<-gone
	events.flush()
}
