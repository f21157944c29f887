package console

import (
	"testing"
	"testing/synctest"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
	"constellation/tui/view"
)

// The console has the counts of the timeline after every event, as the printer does.
func TestConsoleFoldsTheTimeline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, name := range []string{"init", "many", "resumed", "taken-up"} {
			events := enginefake.Recorded(t, name)
			s := newStage(t, &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}, term.Display{}, 80, 24)
			s.c.plan = enginefake.PlanIn(t, events)
			s.c.screen, s.c.running, s.c.ran = s.c.run, true, true
			s.c.t.SetPlan(s.c.plan)
			var tl view.Timeline
			tl.SetPlan(s.c.plan)
			for i, ev := range events {
				s.tell(batch{s.c.task.id, []plan.Event{ev}})
				tl.Apply(ev)
				if a, b := enginefake.CountsOf(&s.c.t), enginefake.CountsOf(&tl); a != b {
					t.Fatalf("%s, event %d: the console has %s, the timeline %s", name, i+1, a, b)
				}
			}
		}
	})
}
