package engine

import (
	"fmt"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/workspace"
)

// SetLimits shortens what init waits for.
func (e *Engine) SetLimits(contact, silence, api, ack, chart, still time.Duration) {
	e.limits = limits{contact: contact, silence: silence, api: api, ack: ack, chart: chart, still: still, glance: time.Second, poll: 20 * time.Millisecond, gather: 5 * time.Millisecond, services: 300 * time.Millisecond, gone: 300 * time.Millisecond, quiet: 50 * time.Millisecond, members: 300 * time.Millisecond, denials: 300 * time.Millisecond}
}

// Names of files that only tests look into.
const (
	PendingFile = workspace.PendingFile
	EventsFile  = plan.EventsFile
	PlanFile    = workspace.PlanFile
)

// PlanFor returns a plan of steps for tests of Run.
func PlanFor(e *Engine, steps ...plan.Step) *plan.Plan {
	return &plan.Plan{ID: newRunID(plan.VerbInit, e.now()), Verb: plan.VerbInit, Cluster: "demo", Steps: steps, Created: e.now()}
}

// ParseLine is what takes lines of the join service apart.
// OpenReleasesOf is OpenReleases with other releases of the program.
var OpenReleasesOf = openReleases

var ParseLine = rollout.ParseLine

// BenchLook merges and tells n machines, one of which changes each time.
func BenchLook(b *testing.B, n int) {
	var machines []cluster.CloudMachine
	var nodes []*cluster.Node
	for i := range n {
		name := fmt.Sprintf("worker-%d", i)
		machines = append(machines, cluster.CloudMachine{Instance: cloud.Instance{Name: name, Group: "sandboxes/demo/groups/workers"}, GroupName: "workers"})
		nodes = append(nodes, &cluster.Node{Name: name, State: plan.NodeReady})
	}
	i := &clusterRun{}
	r := plan.NewReporter(&run{plan: &plan.Plan{}, now: time.Now, out: func(plan.Event) {}}, "")
	i.tell(r, rollout.Join(machines, nodes, nil, nil))
	b.ReportAllocs()
	for b.Loop() {
		nodes[0].State = map[string]string{plan.NodeReady: plan.NodeNotReady, plan.NodeNotReady: plan.NodeReady}[nodes[0].State]
		if !i.tell(r, rollout.Join(machines, nodes, nil, nil)) {
			b.Fatal("nothing changed")
		}
	}
}
