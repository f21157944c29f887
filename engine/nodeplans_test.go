package engine

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/plan"
)

// While a Plan gets on nothing is waited for; else what is worst is told, with a remedy.
func TestWhyPlansDoNotGoOn(t *testing.T) {
	failed := NodePlan{Name: "a/failed", State: PlanFailed, Text: "no space left", Remedy: "make room", Failed: 1, Nodes: []NodePlanNode{{Name: "n1", State: plan.NodeFailed, Text: "no space left"}}}
	waits := NodePlan{Name: "a/waits", State: PlanWaiting, Text: "the window opens at noon"}
	held := NodePlan{Name: "a/held", State: PlanApplying, Applying: 1, Nodes: []NodePlanNode{{Name: "n2", State: plan.NodeDraining, Text: "pod b/c may not be evicted", Held: "relax its budget"}}}
	goes := NodePlan{Name: "a/goes", State: PlanApplying, Applying: 1, Nodes: []NodePlanNode{{Name: "n3", State: plan.NodeUpgrading}}}
	other := NodePlan{Name: "a/other", State: PlanApplying, Applying: 1}
	both := NodePlan{Name: "a/both", State: PlanApplying, Applying: 2, Nodes: append([]NodePlanNode{{Name: "n3", State: plan.NodeUpgrading}}, held.Nodes...)}
	for _, tt := range []struct {
		name  string
		plans []NodePlan
		want  plan.Event
	}{
		{"none", nil, plan.Event{}},
		{"one waits", []NodePlan{waits}, plan.Event{Object: "a/waits", State: PlanWaiting, Text: "plan a/waits waits: the window opens at noon"}},
		{"one waits and one goes on", []NodePlan{waits, goes}, plan.Event{}},
		{"a node is held up", []NodePlan{waits, held}, plan.Event{Object: "a/held", State: PlanApplying, Node: "n2", Text: "plan a/held at node n2: pod b/c may not be evicted", Remedy: "relax its budget"}},
		{"a node is held up and another gets on", []NodePlan{both}, plan.Event{}},
		{"a node is held up and another Plan gets on", []NodePlan{held, goes}, plan.Event{}},
		{"a node is held up and another controller's Plan gets on", []NodePlan{held, other}, plan.Event{}},
		{"one failed and a node is held up", []NodePlan{held, failed}, plan.Event{Object: "a/failed", State: PlanFailed, Text: "plan a/failed has failed: no space left", Remedy: "make room"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.want.Kind = plan.KindWait
			if d := cmp.Diff(tt.want, whyPlans(tt.plans)); d != "" {
				t.Error(d)
			}
		})
	}
}
