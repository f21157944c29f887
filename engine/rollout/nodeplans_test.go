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
		{"none", nil, plan.Event{}},
		{"one waits", []cluster.NodePlan{waits}, plan.Event{Object: "a/waits", State: cluster.PlanWaiting, Text: "plan a/waits waits: the window opens at noon"}},
		{"one waits and one goes on", []cluster.NodePlan{waits, goes}, plan.Event{}},
		{"a node is held up", []cluster.NodePlan{waits, held}, plan.Event{Object: "a/held", State: cluster.PlanApplying, Node: "n2", Text: "plan a/held at node n2: pod b/c may not be evicted", Remedy: "relax its budget"}},
		{"one node is blocked and another makes progress", []cluster.NodePlan{both}, plan.Event{}},
		{"one node is blocked and another Plan makes progress", []cluster.NodePlan{held, goes}, plan.Event{}},
		{"one node is blocked and another controller's Plan makes progress", []cluster.NodePlan{held, other}, plan.Event{}},
		{"one failed and a node is held up", []cluster.NodePlan{held, failed}, plan.Event{Object: "a/failed", State: cluster.PlanFailed, Text: "plan a/failed has failed: no space left", Remedy: "make room"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.want.Kind = plan.KindWait
			if d := cmp.Diff(tt.want, WhyPlans(tt.plans)); d != "" {
				t.Error(d)
			}
		})
	}
}
