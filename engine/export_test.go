package engine

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// SetLimits shortens what init waits for.
func (e *Engine) SetLimits(contact, silence, api, ack, chart, still time.Duration) {
	e.limits = limits{contact: contact, silence: silence, api: api, ack: ack, chart: chart, still: still, glance: time.Second, poll: 20 * time.Millisecond, services: 300 * time.Millisecond, gone: 300 * time.Millisecond, quiet: 50 * time.Millisecond, denials: 300 * time.Millisecond}
}

// Names of files that only tests look into.
const (
	PendingFile = pendingFile
	EventsFile  = plan.EventsFile
	PlanFile    = planFile
)

// PlanFor returns a plan of steps for tests of Run.
func PlanFor(e *Engine, steps ...plan.Step) *plan.Plan {
	return &plan.Plan{ID: newRunID(plan.VerbInit, e.now()), Verb: plan.VerbInit, Cluster: "demo", Steps: steps, Created: e.now()}
}

// ParseLine is what takes lines of the join service apart.
var ParseLine = parseLine

// BenchLook merges and tells n machines, one of which changes each time.
func BenchLook(b *testing.B, n int) {
	var machines []cluster.CloudMachine
	var nodes []*cluster.Node
	for i := range n {
		name := fmt.Sprintf("worker-%d", i)
		machines = append(machines, cluster.CloudMachine{Instance: cloud.Instance{Name: name, Group: "sandboxes/demo/groups/workers"}})
		nodes = append(nodes, &cluster.Node{Name: name, State: plan.NodeReady})
	}
	i := &initRun{}
	r := plan.NewReporter(&run{plan: &plan.Plan{}, now: time.Now, out: func(plan.Event) {}}, "")
	i.tell(r, call(machines, nodes, nil, nil))
	b.ReportAllocs()
	for b.Loop() {
		nodes[0].State = map[string]string{plan.NodeReady: plan.NodeNotReady, plan.NodeNotReady: plan.NodeReady}[nodes[0].State]
		if !i.tell(r, call(machines, nodes, nil, nil)) {
			b.Fatal("nothing changed")
		}
	}
}

// Lineup is what state each machine of a rollout is in: "worker-0 draining".
func Lineup(ro cluster.Rollout, nodes []cluster.Node, expected []cluster.ExpectedNode) (out []string) {
	var shared []*cluster.Node
	for _, n := range nodes {
		shared = append(shared, &n)
	}
	var l lineup
	l.look(ro, nil, shared, expected)
	for m := range l.all() {
		out = append(out, m.name+" "+m.state)
	}
	slices.Sort(out)
	return out
}

// Experience is how long things took in earlier rollouts.
type Experience struct{ Boot, Drain, Kept []time.Duration }

// Over is in how long at least, and at most, a rollout will be over of which nothing is done
// yet and left nodes are to be brought to the target, kept of them in place; zero: nobody knows.
func Over(x Experience, left, kept int, surge string) (least, most time.Duration) {
	o, now := newOutlook(experience{boot: x.Boot, drain: x.Drain, kept: x.Kept}), time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	for i := range left {
		o.complete(&plan.Event{Kind: plan.KindNode, Time: now, Node: fmt.Sprintf("worker-%d", i), Group: "workers", To: plan.NodeOutdated})
	}
	o.look(&rolloutView{Rollout: cluster.Rollout{Observed: true, Target: cluster.NodeTarget{MaxSurge: surge}}, total: int64(left), machines: &lineup{kept: int64(kept)}})
	a, b := o.over(now)
	if a.IsZero() {
		return 0, 0
	}
	return a.Sub(now), b.Sub(now)
}
