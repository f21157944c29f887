package rollout

import (
	"fmt"
	"slices"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// Lineup is what state each machine of a rollout is in: "worker-0 draining".
func Lineup(ro cluster.Rollout, nodes []cluster.Node, expected []cluster.ExpectedNode) (out []string) {
	var shared []*cluster.Node
	for _, n := range nodes {
		shared = append(shared, &n)
	}
	var l NodeDiff
	l.look(ro, nil, shared, expected)
	for m := range l.All() {
		out = append(out, m.Name+" "+m.State)
	}
	slices.Sort(out)
	return out
}

// Experience is how long things took in earlier rollouts.
type Experience struct{ Boot, Drain, Kept []time.Duration }

// Over estimates the least and most time of a rollout that has not begun: left nodes need the
// target, kept of them in place. Zero means that there is no estimate.
func Over(x Experience, left, kept int, surge string) (least, most time.Duration) {
	o, now := NewEstimate(History{boot: x.Boot, drain: x.Drain, kept: x.Kept}), time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	for i := range left {
		o.Complete(&plan.Event{Kind: plan.KindNode, Time: now, Node: fmt.Sprintf("worker-%d", i), Group: "workers", To: plan.NodeOutdated})
	}
	o.Look(&View{Rollout: cluster.Rollout{Observed: true, Target: cluster.NodeTarget{MaxSurge: surge}}, Total: int64(left), Machines: &NodeDiff{kept: int64(kept)}})
	a, b := o.over(now)
	if a.IsZero() {
		return 0, 0
	}
	return a.Sub(now), b.Sub(now)
}
