package console

import (
	"slices"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// A console that has rendered many frames renders the same as a new one with the same events:
// its caches do not change the result.
func TestCachesDoNotChangeFrames(t *testing.T) {
	for _, name := range []string{"5-good", "5-failed", "5-resumed", "500-failed"} {
		events := enginefake.StreamOf(t, name)
		for _, keys := range [][]string{nil, {"s"}, {"m"}, {"l"}, {"/", "d", "r", "a", "enter"}} {
			at := enginefake.Start
			console := func() *console {
				c := newConsole(t.Context(), term.Display{Colours: term.Colours256}, consoleDeps{Options: Options{Engine: &enginefake.Engine{}, Now: func() time.Time { return at }}})
				c.w, c.h, c.screen, c.task.busy, c.ticking = 120, 40, c.watch, "", true
				c.watch.restart(watchScreen{origin: fromLive, board: &rollout.Board{}, ticks: true}, "")
				for _, k := range keys {
					c.key(keyOf(k))
				}
				return c
			}
			warm := console()
			for batch := range slices.Chunk(events, len(events)/12+1) {
				at = batch[len(batch)-1].Time
				warm.Update(watchBatch{0, batch})
				warm.View()
				at = at.Add(3 * time.Second)
				warm.Update(watchTick{0})
				anew := console()
				anew.Update(watchBatch{0, events[:slices.IndexFunc(events, func(e plan.Event) bool { return e.Seq == batch[len(batch)-1].Seq })+1]})
				if got, want := warm.View(), anew.View(); got != want {
					t.Fatalf("%s, keys %q, until %s:\n%s\nwant\n%s", name, keys, at, term.StripStyle(got), term.StripStyle(want))
				}
			}
		}
	}
}
