package console

import (
	"fmt"
	"maps"
	"testing"

	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/internal/testneeds"
	"constellation/tui/internal/enginefake"
	"constellation/tui/view"
)

// TestCountsAgree folds simulated rollouts and compares the counts of the board, the printer's
// fold and the event after every progress event.
func TestCountsAgree(t *testing.T) {
	testneeds.Time(t, "5 s")
	for _, tt := range []struct{ workers, surge, breaks int }{{workers: 5, surge: 1, breaks: 0}, {workers: 5, surge: 2, breaks: 2}, {workers: 500, surge: 10, breaks: 20}, {workers: 5000, surge: 75, breaks: 20}} {
		t.Run(fmt.Sprintf("%d workers, %d failures", tt.workers, tt.breaks), func(t *testing.T) {
			var b rollout.Board
			var tl view.Timeline
			for _, ev := range enginefake.Simulated(t, tt.workers, tt.surge, tt.breaks, 1) {
				b.Apply(ev)
				tl.Apply(ev)
				if ev.Kind != plan.KindProgress || len(tl.Machines) > 1000 && ev.Seq%97 != 0 {
					continue
				}
				folded := map[string]int64{}
				for _, g := range tl.Groups() {
					for s, n := range g.States {
						if s != plan.NodeGone {
							folded[s] += int64(n)
						}
					}
				}
				if !maps.Equal(ev.Counts, b.Counts()) || !maps.Equal(ev.Counts, folded) {
					t.Fatalf("event %d has %v, the board %v, the printer %v", ev.Seq, ev.Counts, b.Counts(), folded)
				}
				if done, total := b.Places(); int64(done) != ev.Current || int64(total) != ev.Total {
					t.Fatalf("event %d has %d of %d, the board %d of %d", ev.Seq, ev.Current, ev.Total, done, total)
				}
			}
		})
	}
}
