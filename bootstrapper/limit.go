package bootstrapper

import (
	"sync"
	"time"
)

const (
	// A source may fail this often at once, and once more per sourceRefill. The secret has 256
	// bits; the limit makes guessing slow and visible.
	sourceBurst  = 5
	sourceRefill = 12 * time.Second
	// All sources together, which may share an address behind a load balancer.
	globalBurst  = 20
	globalRefill = 3 * time.Second
	// maxSources bounds memory; further sources share one allowance.
	maxSources = 1024
)

// limiter bounds how often a caller with a wrong secret is answered. It never applies to the
// right secret, so a guesser cannot lock out a console. A guess beyond the limit costs one
// hash and one comparison, and gets the same answer as a guess that was not checked. The zero
// value is ready to use.
type limiter struct {
	mu      sync.Mutex
	global  bucket
	sources map[string]*bucket
}

// bucket counts failures that have not expired.
type bucket struct {
	n    int
	last time.Time // when the last one expired
}

// forgive expires one failure per refill.
func (b *bucket) forgive(now time.Time, refill time.Duration) {
	if k := int(now.Sub(b.last) / refill); b.n > 0 && k > 0 {
		b.n = max(0, b.n-k)
		b.last = b.last.Add(time.Duration(k) * refill)
	}
}

// wait is how long until another failure is allowed; zero if it is now.
func (b *bucket) wait(now time.Time, burst int, refill time.Duration) time.Duration {
	b.forgive(now, refill)
	if b.n < burst {
		return 0
	}
	return max(time.Millisecond, refill-now.Sub(b.last))
}

func (b *bucket) add(now time.Time) {
	if b.n == 0 {
		b.last = now
	}
	b.n++
}

// wrong records a failure of source, and returns how long source must wait if it exceeds the
// limit. Attempts beyond the limit do not extend the wait.
func (l *limiter) wrong(source string, now time.Time) (wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.bucket(source, now)
	if wait = max(b.wait(now, sourceBurst, sourceRefill), l.global.wait(now, globalBurst, globalRefill)); wait > 0 {
		return wait
	}
	b.add(now)
	l.global.add(now)
	return 0
}

// bucket returns that of source, and removes unused ones. The caller holds mu.
func (l *limiter) bucket(source string, now time.Time) *bucket {
	if b := l.sources[source]; b != nil {
		return b
	}
	if l.sources == nil {
		l.sources = map[string]*bucket{}
	}
	if len(l.sources) >= maxSources {
		for s, b := range l.sources {
			if b.forgive(now, sourceRefill); b.n == 0 {
				delete(l.sources, s)
			}
		}
	}
	if len(l.sources) >= maxSources {
		source = "" // shared
	}
	b := l.sources[source]
	if b == nil {
		b = &bucket{}
		l.sources[source] = b
	}
	return b
}

// refusals limits the log of refused requests to one per second, with the number of the
// others. The zero value is ready to use.
type refusals struct {
	mu       sync.Mutex
	last     time.Time
	unlogged int
}

// next reports whether a refusal at now is logged, and how many were dropped since the last
// one.
func (r *refusals) next(now time.Time) (unlogged int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.last.IsZero() && now.Sub(r.last) < refusalEvery {
		r.unlogged++
		return 0, false
	}
	unlogged, r.unlogged, r.last = r.unlogged, 0, now
	return unlogged, true
}

const refusalEvery = time.Second
