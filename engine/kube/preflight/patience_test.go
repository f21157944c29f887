package preflight

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A source may take long while its pages arrive: 50,000 pods of a slow API server are a hundred
// pages.
func TestPagesExtendTheWait(t *testing.T) {
	for _, tt := range []struct {
		name  string
		every time.Duration // between two pages; zero: none arrives
		want  time.Duration
	}{
		{name: "no page", every: 0, want: 30 * time.Second},
		{name: "slow pages", every: 20 * time.Second, want: 300 * time.Second},
		{name: "pages that are too slow", every: 40 * time.Second, want: 30 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				ctx, cancel := whilePagesArrive(t.Context(), 30*time.Second)
				defer cancel()
				if tt.every > 0 {
					tick := time.NewTicker(tt.every)
					defer tick.Stop()
					for ctx.Err() == nil {
						select {
						case <-tick.C:
							pageArrived(ctx)
						case <-ctx.Done():
						}
					}
				}
				<-ctx.Done()
				if took := time.Since(began); took != tt.want || !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
					t.Errorf("ended after %s by %v, want %s by a deadline", took, context.Cause(ctx), tt.want)
				}
				if got := reason(ctx, ctx.Err()); got != "the API server did not answer in time" {
					t.Errorf("reason %q", got)
				}
			})
		})
	}
}
