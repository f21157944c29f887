package rollout_test

import (
	"fmt"
	"testing"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
)

func TestNodesOfARolloutAreInOneState(t *testing.T) {
	target := cluster.NodeTarget{Image: "img/v2", Components: "c2"}
	old := func(name string, f func(*cluster.Node)) cluster.Node {
		n := cluster.Node{Name: name, Role: "worker", Group: "workers", State: plan.NodeReady, Image: "img/v1", Components: "c1"}
		if f != nil {
			f(&n)
		}
		return n
	}
	fresh := func(n *cluster.Node) { n.Image, n.Components = "IMG/v2", "c2" }
	for _, tt := range []struct {
		name     string
		node     *cluster.Node
		move     *cluster.Move
		expected string
		keep     bool
		want     string
	}{
		{name: "a node is not yet replaced", node: new(old("w", nil)), want: "w outdated"},
		{name: "a node is at the target, however the cloud writes its image", node: new(old("w", fresh)), want: "w ready"},
		{name: "a node is at the target and not ready", node: new(old("w", func(n *cluster.Node) { fresh(n); n.State = plan.NodeNotReady })), want: "w not-ready"},
		{name: "workers are kept", node: new(old("w", nil)), keep: true, want: "w ready"},
		{name: "a node is skipped", node: new(old("w", func(n *cluster.Node) { n.Skipped = true })), want: "w outdated"},
		{name: "the replacement is being created", node: new(old("w", nil)), move: &cluster.Move{Node: "", Donor: "w"}, want: "w replacing"},
		{name: "a node is drained", node: new(old("w", func(n *cluster.Node) { n.Cordoned, n.Heir = true, "x" })), move: &cluster.Move{Node: "w", Donor: "w", Leaves: true}, want: "w draining"},
		{name: "a node is drained before its PendingNode is bound", node: new(old("w", func(n *cluster.Node) { n.Cordoned, n.Heir = true, "x" })), want: "w draining"},
		{name: "a node is at the target in place, and its image stays", node: new(old("w", func(n *cluster.Node) { n.Components, n.InPlace = "c2", true })), want: "w ready"},
		{name: "a node is not yet upgraded in place", node: new(old("w", func(n *cluster.Node) { n.InPlace = true })), want: "w outdated"},
		{name: "the agent of a node is observed", node: new(old("w", func(n *cluster.Node) { n.InPlace = true })), move: &cluster.Move{Node: "w", Upgrades: true, Machine: "Ready"}, want: "w outdated"},
		{name: "a node is drained before its agent begins", node: new(old("w", func(n *cluster.Node) { n.InPlace, n.Cordoned = true, true })), move: &cluster.Move{Node: "w", Upgrades: true, Machine: "Ready"}, want: "w draining"},
		{name: "the agent upgrades a node", node: new(old("w", func(n *cluster.Node) { n.InPlace, n.Cordoned, n.State = true, true, plan.NodeNotReady })), move: &cluster.Move{Node: "w", Upgrades: true, Machine: "Ready", Phase: "apply", Line: "restart-kubelet"}, want: "w upgrading"},
		{name: "the agent of a node has failed", node: new(old("w", func(n *cluster.Node) { n.InPlace, n.Cordoned = true, true })), move: &cluster.Move{Node: "w", Upgrades: true, Machine: "Ready", Phase: "failed", Line: "no space left on device", NextTry: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)}, want: "w failed"},
		{name: "a machine has no Node while it is upgraded in place", move: &cluster.Move{Node: "w", Upgrades: true, Machine: "Ready"}, want: ""},
		{name: "the machine of a node is deleted", node: new(old("w", nil)), move: &cluster.Move{Node: "w", Leaves: true, Machine: "Terminating"}, want: "w leaving"},
		{name: "a machine that is deleted has no Node any more", move: &cluster.Move{Node: "w", Leaves: true}, want: "w leaving"},
		{name: "a new machine is created", move: &cluster.Move{Node: "x", Machine: "Creating"}, want: "x creating"},
		{name: "a new machine boots", move: &cluster.Move{Node: "x", Machine: "Ready"}, want: "x booting"},
		{name: "a new machine joins", move: &cluster.Move{Node: "x", Machine: "Ready"}, expected: "x", want: "x joining"},
		{name: "a new machine has joined, and its image is unknown", node: new(old("x", func(n *cluster.Node) { n.Image, n.Components = "", "" })), move: &cluster.Move{Node: "x"}, want: "x joining"},
		{name: "the cloud has given a new machine up", move: &cluster.Move{Node: "x", Machine: "Failed"}, want: "x failed"},
		{name: "somebody else's cordon changes nothing", node: new(old("w", func(n *cluster.Node) { n.Cordoned = true })), want: "w outdated"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ro := cluster.Rollout{Target: target}
			ro.Target.KeepWorkers = tt.keep
			var nodes []cluster.Node
			var expected []cluster.ExpectedNode
			if tt.node != nil {
				nodes = append(nodes, *tt.node)
			}
			if tt.move != nil {
				ro.Moves = append(ro.Moves, *tt.move)
			}
			if tt.expected != "" {
				expected = append(expected, cluster.ExpectedNode{Name: tt.expected})
			}
			if got := fmt.Sprint(rollout.Lineup(ro, nodes, expected)); got != "["+tt.want+"]" {
				t.Errorf("%s, want [%s]", got, tt.want)
			}
		})
	}
}
