package kube

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestPaceHalvesWhenThrottled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPace()
		begin := func() time.Time {
			t.Helper()
			at, err := p.begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
			return at
		}
		var turns []time.Time
		for range firstWriters {
			turns = append(turns, begin())
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if _, err := p.begin(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("one more than allowed: %v", err)
		}
		// All are rejected together: that halves the limit once.
		refused := time.Now()
		for _, at := range turns {
			p.end(at, true, 3*time.Second)
		}
		if p.limit != firstWriters/2 {
			t.Errorf("limit %v", p.limit)
		}
		turns = []time.Time{begin()}
		if waited := turns[0].Sub(refused); waited != 3*time.Second {
			t.Errorf("began after %v", waited)
		}
		for len(turns) < firstWriters/2 {
			turns = append(turns, begin())
		}
		for _, at := range turns {
			p.end(at, false, 0)
		}
		// However often it halves, one writer remains.
		for range 10 {
			p.end(begin(), true, 0)
		}
		if p.limit != 1 {
			t.Errorf("limit %v after ten refusals", p.limit)
		}
		// Successful writes raise the limit up to the maximum.
		for range 2000 {
			p.end(begin(), false, 0)
		}
		if p.limit != mostWriters {
			t.Errorf("limit %v after all went well", p.limit)
		}
	})
}
