package bootstrapper

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// wrong is a limiter whose every caller is wrong.
type wrong struct{ limiter }

func (w *wrong) try(source string, now time.Time) (ok bool, wait time.Duration) {
	return w.judge(source, now, func() bool { return false })
}

func TestWrongSecretsAreLimitedAndForgiven(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := wrong{}
		for i := range sourceBurst {
			if _, wait := l.try("a", time.Now()); wait != 0 {
				t.Fatalf("attempt %d has to wait %s", i, wait)
			}
		}
		_, wait := l.try("a", time.Now())
		if wait <= 0 || wait > sourceRefill {
			t.Fatalf("too many: wait %s", wait)
		}
		if _, other := l.try("b", time.Now()); other != 0 {
			t.Error("another source pays for it")
		}
		time.Sleep(wait)
		if _, wait := l.try("a", time.Now()); wait != 0 {
			t.Errorf("after the wait: %s more", wait)
		}
		if _, wait := l.try("a", time.Now()); wait == 0 {
			t.Error("one wait bought two attempts")
		}
		// In a minute, five.
		n := 0
		for range 60 {
			time.Sleep(time.Second)
			if _, wait := l.try("a", time.Now()); wait == 0 {
				n++
			}
		}
		if n != 5 {
			t.Errorf("%d attempts in a minute", n)
		}
	})
}

func TestWhoIsRightPaysNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l limiter
		for i := range 1000 {
			if ok, wait := l.judge("a", time.Now(), func() bool { return true }); !ok {
				t.Fatalf("attempt %d has to wait %s", i, wait)
			}
		}
	})
}

func TestLimitHoldsForAttemptsAtTheSameTime(t *testing.T) {
	l := wrong{}
	var passed atomic.Int64
	var wg sync.WaitGroup
	now := time.Now()
	for i := range 500 {
		wg.Go(func() {
			if _, wait := l.try(fmt.Sprint("s", i%50), now); wait == 0 {
				passed.Add(1)
			}
		})
	}
	wg.Wait()
	if passed.Load() != globalBurst {
		t.Errorf("%d passed, all sources together may %d times", passed.Load(), globalBurst)
	}
}

func TestManySourcesCostNoMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := wrong{}
		for i := range 20 * maxSources {
			l.try(fmt.Sprint("s", i), time.Now())
			time.Sleep(10 * time.Millisecond)
		}
		if len(l.sources) > maxSources+1 {
			t.Errorf("%d sources are remembered", len(l.sources))
		}
	})
}
