package tui

import (
	"context"
	"sync"
	"time"

	"constellation/engine"
)

// collector stands between a run and the console. The run never waits for the
// screen: emit only appends. The console gets what has come together as one batch,
// the first event at once, later ones at most every frameGap. Nothing is dropped.
//
// All methods may be called concurrently.
type collector struct {
	send func([]engine.Event)

	mu    sync.Mutex
	batch []engine.Event
	wake  chan struct{}

	sending sync.Mutex // held while a batch is on its way, so that batches stay in order
}

func newCollector(send func([]engine.Event)) *collector {
	return &collector{send: send, wake: make(chan struct{}, 1)}
}

// emit takes an event. It never blocks.
func (c *collector) emit(ev engine.Event) {
	c.mu.Lock()
	c.batch = append(c.batch, ev)
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// flush sends what has been taken so far and returns when the console has it.
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

// Run sends batches until ctx ends. It sleeps while there are none.
func (c *collector) Run(ctx context.Context) {
	var next time.Time // before which nothing is sent
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		}
		if wait := time.Until(next); wait > 0 { // a timer that nothing waits for would wake the computer
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
		}
		c.flush()
		next = time.Now().Add(frameGap)
	}
}
