package decision

import (
	"testing"
	"time"

	"constellation/operator/api/v1alpha1"
)

// TestHalfJoinedMachines: a join that fails after the Node was created is given up like one that
// fails earlier, because the join service issues no ticket to a machine that has a Node.
func TestHalfJoinedMachines(t *testing.T) {
	const id = "sandbox://t/worker-1"
	joins := func(w *World, left time.Duration) {
		w.Intents = []Intent{{Name: "machine-worker-1", Goal: v1alpha1.JoinGoal, Machine: id, Node: "worker-1", Group: workerGroup, Deadline: w.Now.Add(left)}}
	}
	const track = "record intent machine-worker-1 Join machine=" + id
	for _, tt := range []struct {
		name    string
		edit    func(*World)
		want    []string
		waiting string
	}{
		{"a machine whose Node is Ready has joined", func(w *World) { joins(w, time.Minute) }, []string{"clear intent machine-worker-1 Join machine=" + id}, ""},
		{"a machine whose Node is not Ready has time to join", func(w *World) {
			w.Nodes[4].Ready = false
			joins(w, JoinDeadline)
		}, nil, ""},
		{"after half of the time the status names the node", func(w *World) {
			w.Nodes[4].Ready = false
			joins(w, JoinDeadline/2-time.Minute)
		}, nil, "NodeNeverReady"},
		{"the machine is given up when its time to join is over", func(w *World) {
			w.Nodes[4].Ready = false
			joins(w, -time.Minute)
		}, []string{"bind intent machine-worker-1 Leave machine=" + id}, ""},
		{"a machine on hold is not given up", func(w *World) {
			w.Nodes[4].Ready, w.Nodes[4].OnHold = false, true
			joins(w, -time.Minute)
		}, []string{"clear intent machine-worker-1 Join machine=" + id}, ""},
		{"a Node that exists before its machine is listed is tracked while it has a JoiningNode", func(w *World) {
			w.Nodes[4].Ready, w.Joining = false, map[string]bool{"worker-1": true}
		}, []string{track}, ""},
		{"a Ready Node is not tracked", func(w *World) { w.Joining = map[string]bool{"worker-1": true} }, nil, ""},
		{"a node that becomes NotReady long after its join is not changed", func(w *World) { w.Nodes[4].Ready = false }, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantDecision(t, tt.want, tt.waiting)(decide(atRest(tt.edit)))
		})
	}
}
