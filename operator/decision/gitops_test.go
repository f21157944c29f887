package decision

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/internal/gitopstest"
	"constellation/operator/api/v1alpha1"
)

const healthScript = "../../docs/gitops/health.lua"

// TestHealthOfANodeVersion follows a NodeVersion through a rollout, as Flux and Argo CD see it.
func TestHealthOfANodeVersion(t *testing.T) {
	now := time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC)
	nv := &v1alpha1.NodeVersion{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "NodeVersion"},
		ObjectMeta: metav1.ObjectMeta{Name: "constellation", Generation: 1}, Spec: spec(),
	}
	old := func(n *Node) { n.Image = image1 }
	groups := []Group{
		{Name: "control-plane", ID: cpGroup, Role: v1alpha1.ControlPlaneRole, Image: image2},
		{Name: "workers", ID: workerGroup, Role: v1alpha1.WorkerRole, Image: image2},
	}
	world := func(edit ...func(*World)) World {
		w := World{Nodes: []Node{machine("control-plane-0"), machine("worker-0")}, Groups: groups, Complete: true, Generation: nv.Generation, Now: now}
		for _, e := range edit {
			e(&w)
		}
		return w
	}
	decided := func(w World, waits ...Wait) {
		t.Helper()
		waiting := nv.Status.Waiting
		nv.Status = assess(nv.Spec, nv.Generation, nv.Status, w, now)
		w.Before, w.Before.Waiting = nv.Status, waiting
		d := &Decision{observed: observed{w: w, spec: nv.Spec}, Waits: waits}
		for _, c := range d.conditions(v1alpha1.NodeVersionStatus{Nodes: nv.Status.Nodes, Waiting: d.waiting()}, 0, 0, 0) {
			SetCondition(&nv.Status.Conditions, c, metav1.NewTime(now))
		}
	}
	health := func(when, kstatus, argo string) {
		t.Helper()
		if got := gitopstest.Kstatus(t, nv); got != kstatus {
			t.Errorf("%s: kstatus is %s, want %s: %+v", when, got, kstatus, nv.Status.Conditions)
		}
		if got, message := gitopstest.Argo(t, healthScript, nv); got != argo || message == "" {
			t.Errorf("%s: Argo CD reports %s (%q), want %s", when, got, message, argo)
		}
	}
	decided(world())
	health("at the target", "Current", "Healthy")
	nv.Generation++
	health("a new target that no operator has seen", "InProgress", "Progressing")
	outdated := world(func(w *World) { w.Nodes[1] = machine("worker-0", old) })
	decided(outdated)
	health("an outdated node", "InProgress", "Progressing")
	drain := Wait{Reason: "DrainBlocked", Message: "a budget allows no disruption", Object: NodeReference("worker-0")}
	decided(outdated, drain)
	health("a blocked drain", "Failed", "Degraded")
	replaced := outdated
	replaced.Intents = []Intent{{Name: "replace-0", OldNode: "worker-0"}}
	decided(replaced, drain)
	health("a blocked drain of a node whose replacement runs", "InProgress", "Progressing")
	nv.Status.Waiting = &v1alpha1.Waiting{Reason: drain.Reason, Object: &drain.Object, Since: metav1.NewTime(now.Add(-StallGrace))}
	decided(replaced, drain)
	health("the same after a minute", "Failed", "Degraded")
	working := outdated
	working.Intents = []Intent{{}}
	decided(working, drain)
	health("a blocked drain while another node is replaced", "InProgress", "Progressing")
	nv.Spec.Rollout.Paused = true
	decided(outdated)
	health("paused", "InProgress", "Suspended")
	nv.Spec.Rollout.Paused = false
	decided(world())
	health("at the new target", "Current", "Healthy")
}

// TestHealthOfAPendingNode follows PendingNodes of each goal, as Flux and Argo CD see them.
func TestHealthOfAPendingNode(t *testing.T) {
	now := time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC)
	failed := Wait{Reason: "UpgradeFailed", Message: "kubeadm has failed", Object: NodeReference("worker-0")}
	for _, tt := range []struct {
		name          string
		goal          v1alpha1.Goal
		status        v1alpha1.PendingNodeStatus
		waits         []Wait
		stale         bool
		kstatus, argo string
	}{
		{name: "nothing is known", goal: v1alpha1.JoinGoal, kstatus: "InProgress", argo: "Progressing"},
		{name: "created", goal: v1alpha1.JoinGoal, status: v1alpha1.PendingNodeStatus{CSPState: "Creating"}, kstatus: "InProgress", argo: "Progressing"},
		{name: "booted", goal: v1alpha1.JoinGoal, status: v1alpha1.PendingNodeStatus{CSPState: "Ready"}, kstatus: "InProgress", argo: "Progressing"},
		{name: "failed", goal: v1alpha1.JoinGoal, status: v1alpha1.PendingNodeStatus{CSPState: "Failed"}, kstatus: "Failed", argo: "Degraded"},
		{name: "joined", goal: v1alpha1.JoinGoal, status: v1alpha1.PendingNodeStatus{CSPState: "Ready", ReachedGoal: true}, kstatus: "Current", argo: "Healthy"},
		{name: "a failed machine leaves", goal: v1alpha1.LeaveGoal, status: v1alpha1.PendingNodeStatus{CSPState: "Failed"}, kstatus: "InProgress", argo: "Progressing"},
		{name: "upgraded", goal: v1alpha1.UpgradeGoal, status: v1alpha1.PendingNodeStatus{CSPState: "Ready"}, kstatus: "InProgress", argo: "Progressing"},
		{name: "another node stalls", goal: v1alpha1.UpgradeGoal, status: v1alpha1.PendingNodeStatus{CSPState: "Ready"}, waits: []Wait{{Reason: "UpgradeFailed", Object: NodeReference("worker-1")}}, kstatus: "InProgress", argo: "Progressing"},
		{name: "the upgrade failed", goal: v1alpha1.UpgradeGoal, status: v1alpha1.PendingNodeStatus{CSPState: "Ready"}, waits: []Wait{failed}, kstatus: "Failed", argo: "Degraded"},
		{name: "the goal changed since", goal: v1alpha1.JoinGoal, status: v1alpha1.PendingNodeStatus{CSPState: "Ready", ReachedGoal: true}, stale: true, kstatus: "InProgress", argo: "Progressing"},
	} {
		p := &v1alpha1.PendingNode{
			TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "PendingNode"}, ObjectMeta: metav1.ObjectMeta{Name: "replace-0", Generation: 1},
			Spec: v1alpha1.PendingNodeSpec{Goal: tt.goal, NodeName: "worker-0"}, Status: tt.status,
		}
		p.Status.ObservedGeneration = -1 // the default of the field
		SetPendingConditions(&p.Status, IntentOf(p), p.Generation, tt.waits, now)
		if tt.stale {
			p.Generation++
		}
		if got := gitopstest.Kstatus(t, p); got != tt.kstatus {
			t.Errorf("%s: kstatus is %s, want %s: %+v", tt.name, got, tt.kstatus, p.Status)
		}
		if got, message := gitopstest.Argo(t, healthScript, p); got != tt.argo || message == "" {
			t.Errorf("%s: Argo CD reports %s (%q), want %s", tt.name, got, message, tt.argo)
		}
	}
}
