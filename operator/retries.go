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

// retries remembers what is under way and what has failed, so that nothing is done
// twice at a time and what fails is tried less and less often. It is safe for
// concurrent use.
type retries struct {
	now func() time.Time

	mu  sync.Mutex
	all map[string]*retry
	// done has what has ended well since the last round began, which cannot have seen it.
	done map[string]bool
}

type retry struct {
	running  bool
	wanted   bool      // it is to be done when its pause is over
	outdated bool      // what it read last has changed since
	fails    int       // in a row
	since    time.Time // when it began to fail
	conflict bool      // the last failure was one
	next     time.Time
	used     time.Time
	last     string // error
	most     int    // of what one request may hold; 0: everything
}

func newRetries(now func() time.Time) *retries {
	return &retries{now: now, all: map[string]*retry{}, done: map[string]bool{}}
}

// round begins a round, which sees what was done before.
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

// begin reports whether key may be done now, and takes it. What ended in this round was
// decided again from before it, and waits for the next.
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
	if !t.wanted && e.now().Sub(t.next) > conflictLasts { // what failed then was for another reason
		t.fails = 0
	}
	t.running, t.wanted, t.outdated = true, false, false
	return true
}

// ready reports whether begin would, and if not, remembers that key was to be done.
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

// end gives key back. After a success it rests for so long. It reports whether an
// error is news.
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
		t.fails, t.last, t.next = 0, "", e.now().Add(rest)
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

// pauseAfter is how long to wait after so many failures and one more.
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
	// A cloud that says when it answers again is not asked before.
	if until := time.Until(cloud.ThrottledUntil(err)); until > d {
		d = min(until, maxThrottle) + rand.N(d)
	}
	return d
}

// maxThrottle bounds the wait that a cloud can ask for.
const maxThrottle = 10 * time.Minute

// some returns as much as one request may hold: all, unless larger requests have
// failed. Which is chance, so that one that always fails does not stop the others.
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

// hurry ends the pause of key.
func (e *retries) hurry(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.all[key]; t != nil {
		t.next = time.Time{}
	}
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

// conflictLasts is how long something may meet conflicts before that is told: until the
// cache has caught up, each try meets one, and they follow each other within milliseconds.
const conflictLasts = 10 * time.Second

// unwanted is how long something may be tried again before it is known that nobody wants
// it any more: it failed, and what it was for has come about without it.
const unwanted = time.Second

// failing returns what has failed several times in a row and is still to be done, and the
// last error.
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

// trouble is the last error of key.
func (e *retries) trouble(key string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.all[key]; t != nil {
		return t.last
	}
	return ""
}

// due returns when the next of what was refused may be done, and forgets what was not
// asked for in a long time.
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
			t.wanted, next = false, pace // that it failed is not told any more
		case t.wanted:
			next = min(next, max(pace, t.next.Sub(now)))
		}
	}
	return next
}
