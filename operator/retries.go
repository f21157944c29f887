package operator

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"constellation/engine/cloud"
)

// retries remembers by key what is in progress and what has failed. A key runs once at a time, and
// failures have exponential backoff. It is safe for concurrent use.
type retries struct {
	now func() time.Time

	mu  sync.Mutex
	all map[string]*retry
	// done has the keys that succeeded since the last round started, which cannot have observed that.
	done map[string]bool
}

type retry struct {
	running  bool
	wanted   bool      // it runs when its backoff is over
	outdated bool      // its last result is stale
	fails    int       // in a row
	since    time.Time // when it began to fail
	conflict bool      // the last failure was a conflict
	next     time.Time
	used     time.Time
	last     string // error
	most     int    // size of one request; 0: no limit
	began    time.Time
	took     time.Duration // of the last success
}

func newRetries(now func() time.Time) *retries {
	return &retries{now: now, all: map[string]*retry{}, done: map[string]bool{}}
}

// round starts a round, which observes all earlier successes.
func (e *retries) round() {
	e.mu.Lock()
	defer e.mu.Unlock()
	clear(e.done)
}

func (e *retries) of(key string) *retry {
	t := e.all[key]
	if t == nil {
		t = &retry{}
		e.all[key] = t
	}
	t.used = e.now()
	return t
}

// begin reports whether key may run now, and marks it as running. A key that succeeded in this round
// was decided from an earlier observation, and waits for the next round.
func (e *retries) begin(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.done[key] {
		return false
	}
	t := e.of(key)
	if t.running {
		return false
	}
	if e.now().Before(t.next) {
		t.wanted = true
		return false
	}
	if !t.wanted && e.now().Sub(t.next) > conflictLasts { // an old failure does not count
		t.fails = 0
	}
	t.running, t.wanted, t.outdated, t.began = true, false, false, e.now()
	return true
}

// ready reports whether begin would return true. If key is in backoff, it is remembered as wanted.
func (e *retries) ready(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.of(key)
	wait := e.now().Before(t.next)
	t.wanted = t.wanted || wait && !t.running
	return !wait && !t.running
}

func (e *retries) running(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.all[key]
	return t != nil && t.running
}

// end ends a run of key. After a success key rests for that time. It reports whether the error is new.
func (e *retries) end(key string, rest time.Duration, err error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.of(key)
	t.running = false
	if err == nil {
		if rest == 0 {
			delete(e.all, key)
			e.done[key] = true
			return false
		}
		t.fails, t.last, t.next, t.took = 0, "", e.now().Add(rest), e.now().Sub(t.began)
		if t.most > 0 {
			t.most *= 2
		}
		return false
	}
	if t.fails == 0 {
		t.since = e.now()
	}
	t.next, t.wanted = e.now().Add(pauseAfter(t.fails, err)), true
	t.fails++
	text := err.Error()
	t.conflict = apierrors.IsConflict(err)
	news := t.last != text && !t.conflict
	t.last = text
	return news
}

// pauseAfter is the backoff after that many failures and one more.
func pauseAfter(fails int, err error) time.Duration {
	least, most := 250*time.Millisecond, 10*time.Second
	switch {
	case apierrors.IsConflict(err):
		least, most = 30*time.Millisecond, time.Second // the cache is behind
	case errors.Is(err, cloud.ErrThrottled), apierrors.IsTooManyRequests(err):
		least, most = time.Second, 30*time.Second
	}
	d := min(most, least<<min(fails, 10))
	d = d/2 + rand.N(d/2)
	// A cloud that reports when it accepts requests again gets none before.
	if until := time.Until(cloud.ThrottledUntil(err)); until > d {
		d = min(until, maxThrottle) + rand.N(d)
	}
	return d
}

// maxThrottle bounds the wait that a cloud can ask for.
const maxThrottle = 10 * time.Minute

// some returns the part of all for one request: everything, unless larger requests have failed. The
// choice is random, so that one bad item does not stop the others.
func (e *retries) some(key string, all []string) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.of(key)
	all = slices.Clone(all)
	slices.Sort(all)
	all = slices.Compact(all)
	if t.fails > 0 {
		t.most = max(1, min(len(all), cmp.Or(t.most, len(all)))/2)
	}
	if t.most > 0 && len(all) > t.most {
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return all[:t.most]
	}
	return all
}

// hurry ends the backoff of key.
func (e *retries) hurry(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.all[key]; t != nil {
		t.next = time.Time{}
	}
}

// slow reports whether the last success of key took long.
func (e *retries) slow(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.all[key]
	return t != nil && t.took >= fleetLeast
}

func (e *retries) outdate(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.of(key).outdated = true
}

func (e *retries) outdated(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.all[key]
	return t != nil && t.outdated && !t.running
}

// conflictLasts is how long conflicts are not reported: while the cache is stale, each retry conflicts
// within milliseconds.
const conflictLasts = 10 * time.Second

// unwanted is how long a failed key waits for a retry before it is dropped: its purpose was reached in
// another way.
const unwanted = time.Second

// failing returns a key that has failed several times in a row and is still wanted, and its last error.
func (e *retries) failing() (key, text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	most := 2
	for k, t := range e.all {
		if t.fails > most && (t.running || t.wanted) && (!t.conflict || e.now().Sub(t.since) >= conflictLasts) {
			key, text, most = k, t.last, t.fails
		}
	}
	return key, text
}

// trouble returns the last error of key.
func (e *retries) trouble(key string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.all[key]; t != nil {
		return t.last
	}
	return ""
}

// due returns when the next wanted key may run, and forgets keys that were not used for long.
func (e *retries) due(now time.Time) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	next := resting
	for key, t := range e.all {
		switch {
		case t.running:
		case now.Sub(t.used) > resting:
			delete(e.all, key)
		case t.wanted && now.Sub(t.next) > unwanted:
			t.wanted, next = false, pace // its failure is no longer reported
		case t.wanted:
			next = min(next, max(pace, t.next.Sub(now)))
		}
	}
	return next
}
