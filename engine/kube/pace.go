package kube

import (
	"context"
	"sync"
	"time"
)

// Writers at the same time: the first, and the most.
const (
	firstWriters = 16
	mostWriters  = 32
)

// pace bounds how many writes are under way. It allows one more for each round of writes
// that went well and half as many when the API server says that it has enough, and then
// lets nobody begin before the API server said. It is safe for concurrent use.
type pace struct {
	mu     sync.Mutex
	limit  float64
	now    int           // under way
	until  time.Time     // nobody begins before
	cut    time.Time     // when limit was halved last
	change chan struct{} // closed when somebody may begin
}

func newPace() *pace { return &pace{limit: firstWriters, change: make(chan struct{})} }

// begin waits for a turn. Each turn has to be given back with end.
func (p *pace) begin(ctx context.Context) (began time.Time, err error) {
	for {
		p.mu.Lock()
		now := time.Now()
		wait := p.until.Sub(now)
		if wait <= 0 && p.now < int(p.limit) {
			p.now++
			p.mu.Unlock()
			return now, nil
		}
		change := p.change
		p.mu.Unlock()
		var after <-chan time.Time
		if wait > 0 {
			after = time.After(wait)
			change = nil
		}
		select {
		case <-ctx.Done():
			return time.Time{}, ctx.Err()
		case <-change:
		case <-after:
		}
	}
}

// end gives a turn back. With slow the API server had enough, and said to come back after
// wait; many that were under way together count once.
func (p *pace) end(began time.Time, slow bool, wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now--
	if slow {
		now := time.Now()
		if !began.Before(p.cut) {
			p.limit = max(1, p.limit/2)
			p.cut = now
		}
		if t := now.Add(wait); t.After(p.until) {
			p.until = t
		}
	} else {
		p.limit = min(mostWriters, p.limit+1/p.limit)
	}
	close(p.change)
	p.change = make(chan struct{})
}
