package kube

import (
	"context"
	"sync"
	"time"
)

// Number of concurrent writers at the start, and its maximum.
const (
	firstWriters = 16
	mostWriters  = 32
)

// pace limits the number of concurrent writes. After a round of successful writes it allows
// one more. If the API server throttles, it allows half as many, and starts no write before
// the time that the server names. It is safe for concurrent use.
type pace struct {
	mu     sync.Mutex
	limit  float64
	now    int           // in flight
	until  time.Time     // no write starts before
	cut    time.Time     // when limit was halved last
	change chan struct{} // closed when a write may start
}

func newPace() *pace { return &pace{limit: firstWriters, change: make(chan struct{})} }

// begin waits for a slot. Each slot must be released with end.
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

// end releases a slot. If slow, the API server throttled the write and asked for a retry after
// wait; several throttled writes that were in flight together count once.
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
