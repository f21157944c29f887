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
		{name: "a machine whose Node is Ready has joined", edit: func(w *World) { joins(w, time.Minute) }, want: []string{"clear intent machine-worker-1 Join machine=" + id}},
		{name: "a machine whose Node is not Ready has time to join", edit: func(w *World) {
			w.Nodes[4].Ready = false
			joins(w, JoinDeadline)
		}, want: nil},
		{name: "after half of the time the status names the node", edit: func(w *World) {
			w.Nodes[4].Ready = false
			joins(w, JoinDeadline/2-time.Minute)
		}, want: nil, waiting: "NodeNeverReady"},
		{name: "the machine is given up when its time to join is over", edit: func(w *World) {
			w.Nodes[4].Ready = false
			joins(w, -time.Minute)
		}, want: []string{"bind intent machine-worker-1 Leave machine=" + id}},
		{name: "a machine on hold is not given up", edit: func(w *World) {
			w.Nodes[4].Ready, w.Nodes[4].OnHold = false, true
			joins(w, -time.Minute)
		}, want: []string{"clear intent machine-worker-1 Join machine=" + id}},
		{name: "a Node that exists before its machine is listed is tracked while it has a JoiningNode", edit: func(w *World) {
			w.Nodes[4].Ready, w.Joining = false, map[string]bool{"worker-1": true}
		}, want: []string{track}},
		{name: "a Ready Node is not tracked", edit: func(w *World) { w.Joining = map[string]bool{"worker-1": true} }, want: nil},
		{name: "a node that becomes NotReady long after its join is not changed", edit: func(w *World) { w.Nodes[4].Ready = false }, want: nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantDecision(t, tt.want, tt.waiting)(decide(atRest(tt.edit)))
		})
	}
}
