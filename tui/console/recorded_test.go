package console

import (
	"maps"
	"slices"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/tui/internal/enginefake"
	"constellation/tui/view"
)

// inTheMiddle is the time in a stream at which half of the recorded replacements are done, or
// the end of a blocked rollout.
func inTheMiddle(events []plan.Event) time.Duration {
	var told []plan.Event
	var blocked time.Time
	for _, e := range events {
		if e.Kind == plan.KindProgress && len(e.Counts) > 0 {
			told = append(told, e)
		}
		if e.Kind == plan.KindWait && e.State == "DrainBlocked" {
			blocked = e.Time
		}
	}
	last := told[len(told)-1]
	if !blocked.IsZero() && blocked.After(last.Time.Add(-time.Minute)) {
		return blocked.Sub(enginefake.Start)
	}
	half := (told[0].Current + last.Current) / 2
	i := slices.IndexFunc(told, func(e plan.Event) bool { return e.Current >= half })
	return told[i].Time.Sub(enginefake.Start)
}

// recordedScenes show each recorded rollout.
var recordedScenes = func() (all []scene) {
	for _, name := range enginefake.StreamNames {
		all = append(all, scene{"recorded-" + name, func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
			events := enginefake.StreamOf(t, name)
			d := inTheMiddle(events)
			return watching(s(&enginefake.Engine{Pulse: engine.APIHealth{At: enginefake.Start.Add(d), P99: 12 * time.Millisecond}}), enginefake.Until(events, d), d)
		}})
	}
	return all
}()

// In a recorded rollout the counts after every event are the same in the board (console,
// replay, history), in the printer's fold and in the events.
func TestCountsOfRecordedRollouts(t *testing.T) {
	for _, name := range enginefake.StreamNames {
		t.Run(name, func(t *testing.T) {
			var b rollout.Board
			var tl view.Timeline
			compared := 0
			for _, ev := range enginefake.StreamOf(t, name) {
				b.Apply(ev)
				tl.Apply(ev)
				if ev.Kind != plan.KindProgress || len(ev.Counts) == 0 || len(tl.Machines) > 1000 && ev.Seq%23 != 0 {
					continue
				}
				compared++
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
			}
			if compared < 3 {
				t.Errorf("%d events were compared", compared)
			}
		})
	}
}
