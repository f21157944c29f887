package rollout

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// While a Plan makes progress there is no wait event; otherwise the event has the most severe
// cause, with a remedy.
func TestWaitOfPlans(t *testing.T) {
	failed := cluster.NodePlan{Name: "a/failed", State: cluster.PlanFailed, Text: "no space left", Remedy: "make room", Failed: 1, Nodes: []cluster.NodePlanNode{{Name: "n1", State: plan.NodeFailed, Text: "no space left"}}}
	waits := cluster.NodePlan{Name: "a/waits", State: cluster.PlanWaiting, Text: "the window opens at noon"}
	held := cluster.NodePlan{Name: "a/held", State: cluster.PlanApplying, Applying: 1, Nodes: []cluster.NodePlanNode{{Name: "n2", State: plan.NodeDraining, Text: "pod b/c may not be evicted", Held: "relax its budget"}}}
	goes := cluster.NodePlan{Name: "a/goes", State: cluster.PlanApplying, Applying: 1, Nodes: []cluster.NodePlanNode{{Name: "n3", State: plan.NodeUpgrading}}}
	other := cluster.NodePlan{Name: "a/other", State: cluster.PlanApplying, Applying: 1}
	both := cluster.NodePlan{Name: "a/both", State: cluster.PlanApplying, Applying: 2, Nodes: append([]cluster.NodePlanNode{{Name: "n3", State: plan.NodeUpgrading}}, held.Nodes...)}
	for _, tt := range []struct {
		name  string
		plans []cluster.NodePlan
		want  plan.Event
	}{
		{name: "none", want: plan.Event{}},
		{name: "one waits", plans: []cluster.NodePlan{waits}, want: plan.Event{Object: "a/waits", State: cluster.PlanWaiting, Text: "plan a/waits waits: the window opens at noon"}},
		{name: "one waits and one goes on", plans: []cluster.NodePlan{waits, goes}, want: plan.Event{}},
		{name: "a node is held up", plans: []cluster.NodePlan{waits, held}, want: plan.Event{Object: "a/held", State: cluster.PlanApplying, Node: "n2", Text: "plan a/held at node n2: pod b/c may not be evicted", Remedy: "relax its budget"}},
		{name: "one node is blocked and another makes progress", plans: []cluster.NodePlan{both}, want: plan.Event{}},
		{name: "one node is blocked and another Plan makes progress", plans: []cluster.NodePlan{held, goes}, want: plan.Event{}},
		{name: "one node is blocked and another controller's Plan makes progress", plans: []cluster.NodePlan{held, other}, want: plan.Event{}},
		{name: "one failed and a node is held up", plans: []cluster.NodePlan{held, failed}, want: plan.Event{Object: "a/failed", State: cluster.PlanFailed, Text: "plan a/failed has failed: no space left", Remedy: "make room"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.want.Kind = plan.KindWait
			if d := cmp.Diff(tt.want, WhyPlans(tt.plans)); d != "" {
				t.Error(d)
			}
		})
	}
}
