package bootstrapper

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestWrongSecretsAreLimitedAndForgiven(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l limiter
		for i := range sourceBurst {
			if wait := l.wrong("a", time.Now()); wait != 0 {
				t.Fatalf("attempt %d has to wait %s", i, wait)
			}
		}
		wait := l.wrong("a", time.Now())
		if wait <= 0 || wait > sourceRefill {
			t.Fatalf("too many: wait %s", wait)
		}
		if other := l.wrong("b", time.Now()); other != 0 {
			t.Error("another source is limited, too")
		}
		time.Sleep(wait)
		if wait := l.wrong("a", time.Now()); wait != 0 {
			t.Errorf("after the wait: %s more", wait)
		}
		if wait := l.wrong("a", time.Now()); wait == 0 {
			t.Error("one wait bought two attempts")
		}
		// In a minute, five.
		n := 0
		for range 60 {
			time.Sleep(time.Second)
			if wait := l.wrong("a", time.Now()); wait == 0 {
				n++
			}
		}
		if n != 5 {
			t.Errorf("%d attempts in a minute", n)
		}
	})
}

func TestRefusalsAreLoggedOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r refusals
		if n, ok := r.next(time.Now()); !ok || n != 0 {
			t.Errorf("the first one: %d, %v", n, ok)
		}
		for range 7 {
			if _, ok := r.next(time.Now()); ok {
				t.Error("a second one in the same second is logged")
			}
		}
		time.Sleep(refusalEvery)
		if n, ok := r.next(time.Now()); !ok || n != 7 {
			t.Errorf("a second later: %d, %v, want 7 unlogged ones", n, ok)
		}
	})
}

func TestLimitHoldsForAttemptsAtTheSameTime(t *testing.T) {
	var l limiter
	var passed atomic.Int64
	var wg sync.WaitGroup
	now := time.Now()
	for i := range 500 {
		wg.Go(func() {
			if wait := l.wrong(fmt.Sprint("s", i%50), now); wait == 0 {
				passed.Add(1)
			}
		})
	}
	wg.Wait()
	if passed.Load() != globalBurst {
		t.Errorf("%d passed, all sources together may %d times", passed.Load(), globalBurst)
	}
}

func TestMemoryOfSourcesIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l limiter
		for i := range 20 * maxSources {
			l.wrong(fmt.Sprint("s", i), time.Now())
			time.Sleep(10 * time.Millisecond)
		}
		if len(l.sources) > maxSources+1 {
			t.Errorf("%d sources are remembered", len(l.sources))
		}
	})
}
