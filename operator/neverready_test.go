package operator

import (
	"testing"
	"time"

	"constellation/operator/api/v1alpha1"
)

// TestHalfJoinedMachines: a join that breaks off after the Node was made is given up like one
// that breaks off before, because the join service gives a machine that has a Node no ticket.
func TestHalfJoinedMachines(t *testing.T) {
	const id = "sandbox://t/worker-1"
	joins := func(w *world, left time.Duration) {
		w.intents = []intent{{name: "machine-worker-1", goal: v1alpha1.JoinGoal, machine: id, node: "worker-1", group: workerGroup, deadline: w.now.Add(left)}}
	}
	const track = "record intent machine-worker-1 Join machine=" + id
	for _, tt := range []struct {
		name    string
		edit    func(*world)
		want    []string
		waiting string
	}{
		{"a machine whose Node is Ready has joined", func(w *world) { joins(w, time.Minute) }, []string{"clear intent machine-worker-1 Join machine=" + id}, ""},
		{"one whose Node is not Ready has time", func(w *world) {
			w.nodes[4].ready = false
			joins(w, joinDeadline)
		}, nil, ""},
		{"after half of it the status names the node", func(w *world) {
			w.nodes[4].ready = false
			joins(w, joinDeadline/2-time.Minute)
		}, nil, "NodeNeverReady"},
		{"and is given up when it is over", func(w *world) {
			w.nodes[4].ready = false
			joins(w, -time.Minute)
		}, []string{"bind intent machine-worker-1 Leave machine=" + id}, ""},
		{"unless its owner holds it", func(w *world) {
			w.nodes[4].ready, w.nodes[4].held = false, true
			joins(w, -time.Minute)
		}, []string{"clear intent machine-worker-1 Join machine=" + id}, ""},
		{"a Node that is there before the operator sees the machine is tracked while its ticket is noted", func(w *world) {
			w.nodes[4].ready, w.joining = false, map[string]bool{"worker-1": true}
		}, []string{track}, ""},
		{"one that is Ready is not", func(w *world) { w.joining = map[string]bool{"worker-1": true} }, nil, ""},
		{"a node that is NotReady long after its join is left alone", func(w *world) { w.nodes[4].ready = false }, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantDecision(t, tt.want, tt.waiting)(decide(atRest(tt.edit)))
		})
	}
}
