package decision

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/v1alpha1"
)

// Weak points of other systems that replace machines. Each is a test that fails with the order of
// steps of those systems. Other packages have tests under the same names: R8 and R9 in package
// agent, R21 of the charts in package assets, R22 of the feed in package engine/release.

// decided returns the decision in a world, as text.
func decided(off rule, edit ...func(*v1alpha1.NodeVersionSpec, *World)) []string {
	s, w := rollout(edit...)
	out := []string{}
	for _, a := range plan(s, w, off).Actions {
		out = append(out, a.String())
	}
	return out
}

func wantActions(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if d := cmp.Diff(append([]string{}, want...), got); d != "" {
		t.Errorf("%s: actions, want and got:\n%s", what, d)
	}
}

// replacing adds a replacement of worker-0 to a world: its intent and, if given, the machine and the
// Node of the replacement node.
func replacing(goal v1alpha1.Goal, machineState v1alpha1.InstanceState, newNode bool) func(*v1alpha1.NodeVersionSpec, *World) {
	return func(_ *v1alpha1.NodeVersionSpec, w *World) {
		in := Intent{Name: "replace-0", Goal: goal, Token: "t", OldNode: "worker-0", Group: workerGroup, Deadline: modelNow.Add(time.Minute)}
		if goal == v1alpha1.LeaveGoal {
			in.Machine, in.Node = "sandbox://t/worker-0", "worker-0"
		}
		w.Intents = []Intent{in}
		if machineState != "" {
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-9", Name: "worker-9", Group: workerGroup, Token: "t", State: machineState, Since: modelNow})
		}
		if newNode {
			w.Nodes = append(w.Nodes, machine("worker-9", func(n *Node) { n.OldNode = "worker-0" }))
			d := &w.Nodes[3]
			d.Replacement, d.Cordon, d.CordonedSince, d.Drained = "worker-9", CordonedByUs, modelNow, true
		}
	}
}

// leavingControlPlane is a world in which control-plane-0 is bound to leave and drained, and its
// replacement node votes.
func leavingControlPlane(edit func(*World)) func(*v1alpha1.NodeVersionSpec, *World) {
	return func(_ *v1alpha1.NodeVersionSpec, w *World) {
		d := &w.Nodes[0]
		d.Image, d.Replacement, d.Cordon, d.CordonedSince, d.Drained = image1, "control-plane-9", CordonedByUs, modelNow, true
		w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
		w.Nodes = append(w.Nodes, machine("control-plane-9", func(n *Node) { n.OldNode = "control-plane-0" }))
		w.Instances = append(w.Instances, Instance{ID: "sandbox://t/control-plane-9", Name: "control-plane-9", Group: cpGroup, Token: "t", State: "Ready", Since: modelNow})
		w.Intents = []Intent{{Name: "replace-0", Goal: v1alpha1.LeaveGoal, Token: "t", OldNode: "control-plane-0", Group: cpGroup, Machine: "sandbox://t/control-plane-0", Node: "control-plane-0", Deadline: modelNow.Add(time.Hour)}}
		w.Etcd = append(w.Etcd, Member{Node: "control-plane-9", Voter: true, Healthy: true})
		w.Etcd[0].Leader, w.Etcd[1].Leader = false, true
		if edit != nil {
			edit(w)
		}
	}
}

// The old order: the cloud creates a machine, and then a PendingNode is recorded. After a crash in
// between the machine is orphaned.
func TestWeakPointR1IntentBeforeMachine(t *testing.T) {
	wantActions(t, "no intent is written yet", decided(everyRule), "record intent replace-0 Join donor=worker-0")
	wantActions(t, "the intent is written", decided(everyRule, replacing(v1alpha1.JoinGoal, "", false)), "create machine replace-0 Join donor=worker-0")
	wantActions(t, "the operator crashed after the machine was created", decided(everyRule, replacing(v1alpha1.JoinGoal, "Creating", false)))
	wantActions(t, "an orphaned machine", decided(everyRule, func(s *v1alpha1.NodeVersionSpec, w *World) {
		s.Rollout.Paused = true
		w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-9", Name: "worker-9", Group: workerGroup, State: "Ready", Since: modelNow})
	}), "record intent machine-worker-9 Join machine=sandbox://t/worker-9")
}

// The old order: the Node is deleted first. If the cloud refuses to delete the machine, that is only
// logged. The machine keeps running as an orphan.
func TestWeakPointR2NodeAfterMachine(t *testing.T) {
	state := func(oldNode v1alpha1.InstanceState, node bool) func(*v1alpha1.NodeVersionSpec, *World) {
		return func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.Rollout.KeepWorkers = true // nothing else begins
			replacing(v1alpha1.LeaveGoal, "Ready", true)(s, w)
			for i := range w.Instances {
				if w.Instances[i].Name == "worker-0" {
					w.Instances[i].State = oldNode
				}
			}
			if !node {
				w.Nodes = slices.Delete(w.Nodes, 3, 4)
			}
		}
	}
	wantActions(t, "the machine runs", decided(everyRule, state("Ready", true)), "delete machine worker-0 sandbox://t/worker-0")
	wantActions(t, "the cloud deletes it", decided(everyRule, state("Terminating", true)), "delete node worker-0 sandbox://t/worker-0")
	wantActions(t, "the cloud has lost the request", decided(everyRule, state("Ready", false)), "delete machine worker-0 sandbox://t/worker-0")
	wantActions(t, "the deletion is in progress", decided(everyRule, state("Terminating", false)))
	const clear = "clear intent replace-0 Leave donor=worker-0 machine=sandbox://t/worker-0"
	wantActions(t, "the machine is deleted", decided(everyRule, state("Terminated", false)), clear)
	wantActions(t, "without the rule the intent ends while the machine runs", decided(ruleGone, state("Ready", false)), "delete machine worker-0 sandbox://t/worker-0", clear)
}

// The old order: list machines, request one more, and take the first that was not in the list. That
// one may be the autoscaler's.
func TestWeakPointR3ReplacementByToken(t *testing.T) {
	strangers := func(s *v1alpha1.NodeVersionSpec, w *World) {
		for _, name := range []string{"worker-7", "worker-8"} {
			w.Nodes = append(w.Nodes, machine(name))
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/" + name, Name: name, Group: workerGroup, State: "Ready", Since: modelNow.Add(time.Second)})
		}
		w.Nodes[4].Image = image2 // no other node is outdated
	}
	wantActions(t, "the machine of the token is not listed", decided(everyRule, strangers, replacing(v1alpha1.JoinGoal, "", false)), "create machine replace-0 Join donor=worker-0")
	wantActions(t, "the machine of the token is created", decided(everyRule, strangers, replacing(v1alpha1.JoinGoal, "Ready", false)))
	wantActions(t, "the machine of the token has joined", decided(everyRule, strangers, replacing(v1alpha1.JoinGoal, "Ready", false), func(_ *v1alpha1.NodeVersionSpec, w *World) {
		w.Nodes = append(w.Nodes, machine("worker-9"))
	}), "adopt heir worker-9 donor=worker-0")
}

// The old order: an etcd member is removed before its Node is deleted. Only etcd checks whether the
// quorum survives, and the machine is deleted even if the removal fails. TestHostChangesEtcd and the
// agent's TestQuorumIsKept test the last guard with real etcd.
func TestWeakPointR5MembersAreGuarded(t *testing.T) {
	remove, deleted := "remove etcd member control-plane-0 leaving=3", "delete machine control-plane-0 sandbox://t/control-plane-0"
	sick := func(w *World) { w.Etcd[2].Healthy = false }
	learner := func(w *World) { w.Etcd[2].Voter = false }
	leads := func(w *World) { w.Etcd[0].Leader, w.Etcd[1].Leader = true, false }
	replacementLearns := func(w *World) { w.Etcd[3].Voter = false }
	for _, tt := range []struct {
		name string
		edit func(*World)
		off  rule // without it the old order applies
		want []string
		old  []string
	}{
		{name: "all members are healthy", off: ruleMemberFirst, want: []string{remove}, old: []string{remove, deleted}},
		{name: "another one is not healthy", edit: sick, off: ruleMembersHealthy, want: nil, old: []string{remove}},
		{name: "another one is a learner", edit: learner, off: ruleMembersHealthy, want: nil, old: []string{"remove etcd member control-plane-0 leaving=2"}},
		{name: "the member is the leader", edit: leads, off: ruleLeaderMoved, want: []string{"move etcd leader control-plane-0 heir=control-plane-1"}, old: []string{remove}},
		{name: "the replacement node does not vote yet", edit: replacementLearns, off: ruleMemberFirst, want: nil, old: []string{deleted}},
		{name: "the members are unknown", edit: func(w *World) { w.Etcd = nil }, off: ruleMemberFirst, want: nil, old: []string{deleted}},
		{name: "the member has left", edit: func(w *World) { w.Etcd = w.Etcd[1:] }, off: everyRule, want: []string{deleted}, old: []string{deleted}},
	} {
		wantActions(t, tt.name, decided(everyRule, leavingControlPlane(tt.edit)), tt.want...)
		wantActions(t, "with the old order, "+tt.name, decided(tt.off, leavingControlPlane(tt.edit)), tt.old...)
	}
}

// The old code: the list of nodes that await their annotation is the list of replacement nodes and
// one more. Here each class has its own count, and the counts add up.
func TestWeakPointR6ListsAreOfTheirOwnClass(t *testing.T) {
	_, w := rollout(replacing(v1alpha1.JoinGoal, "Ready", true), func(_ *v1alpha1.NodeVersionSpec, w *World) {
		w.Nodes = append(w.Nodes, machine("worker-5", func(n *Node) { n.Image, n.Components, n.Group = "", "", "" }))
		w.Pending = []PendingMachine{{Kind: "JoiningNode", Name: "worker-5", Node: "worker-5"}}
	})
	s := assess(spec(), 1, v1alpha1.NodeVersionStatus{}, w, modelNow)
	want := v1alpha1.NodeCounts{Total: 7, UpToDate: 3, Outdated: 1, Donors: 1, Heirs: 1, AwaitingAnnotation: 1}
	if d := cmp.Diff(want, s.Nodes); d != "" {
		t.Errorf("counts, want and got:\n%s", d)
	}
}

// The old lock: a field of the status marks an upgrade as active. The next write of the status
// resets it, and a crash leaves it set indefinitely. Here the agent's journal decides: an operator
// that starts attaches to the agent's run and ignores the status.
func TestWeakPointR7UpgradeIsNotLockedByAField(t *testing.T) {
	target := func(s *v1alpha1.NodeVersionSpec, w *World) {
		s.KubernetesClusterVersion, s.KubernetesComponentsReference, w.LeaderNode = "v1.36.3", refB, "control-plane-0"
	}
	run := UpgradeRun{Version: "v1.36.3", Components: refB, Node: "control-plane-0", Phase: "apply", Started: modelNow}
	attached := func(s *v1alpha1.NodeVersionSpec, w *World) { target(s, w); w.Run = run }
	const begin = "start upgrade control-plane-0 v1.36.3"
	wantActions(t, "no run", decided(everyRule, target), begin)
	wantActions(t, "a run is active, and the status was reset", decided(everyRule, attached))
	wantActions(t, "the status has an active run, and no run is active", decided(everyRule, func(s *v1alpha1.NodeVersionSpec, w *World) {
		target(s, w)
		w.Before.Upgrade = &v1alpha1.UpgradeProgress{Version: "v1.36.3", Node: "control-plane-0", Phase: "apply", Started: metav1.NewTime(modelNow)}
		w.Run = LastRun(UpgradeRun{}, w.Before.Upgrade, UpgradeRun{}, 0, *s, *NewLookup(w), w.LeaderNode)
	}), begin)
	wantActions(t, "a run of another host takes longer than any run", decided(everyRule, func(s *v1alpha1.NodeVersionSpec, w *World) {
		target(s, w)
		reported := &v1alpha1.UpgradeProgress{Version: "v1.36.3", Node: "control-plane-1", Phase: "apply", Started: metav1.NewTime(modelNow)}
		w.Run = LastRun(UpgradeRun{}, reported, UpgradeRun{}, lostRun+time.Minute, *s, *NewLookup(w), w.LeaderNode)
	}), begin)
}

// The operator's part of R22: an invalid version or a downgrade is refused by name, and nothing is
// changed. The feed's part is in package engine/release.
func TestWeakPointR22InvalidVersionIsRefused(t *testing.T) {
	for _, v := range []string{"", "latest", "index.html", "https://example.com/v1.36.3", "v1.34.1", "v1.36.3\n"} {
		s, w := rollout(func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.KubernetesClusterVersion, s.KubernetesComponentsReference = v, refB
			w.Autoscaler = Autoscaler{Enabled: true}
		})
		actions, status := decide(s, w)
		if len(actions) > 0 || status.Waiting == nil || status.Waiting.Reason != "TargetRefused" {
			t.Errorf("%q: actions %v, waiting %+v", v, actions, status.Waiting)
		}
	}
}

// The old order: a job that fails leaves its node cordoned, and keeps the surge slot that the next
// job needs.
func TestWeakPointR23FailureHoldsNothing(t *testing.T) {
	blocked := func(s *v1alpha1.NodeVersionSpec, w *World) {
		replacing(v1alpha1.JoinGoal, "Ready", true)(s, w)
		d := &w.Nodes[3]
		d.Drained, d.DrainBlocker, d.CordonedSince = false, "PodDisruptionBudget web/web allows no eviction", modelNow.Add(-DrainDeadline-time.Minute)
	}
	postpone, drain := "postpone worker-0", "drain worker-0"
	wantActions(t, "a drain that is blocked too long while others wait", decided(everyRule, blocked), drain, postpone)
	wantActions(t, "with the old order the drain waits indefinitely", decided(ruleBlockedGoesBy, blocked), drain)
	postponed := func(s *v1alpha1.NodeVersionSpec, w *World) {
		blocked(s, w)
		w.Nodes[3].PostponedUntil = modelNow.Add(Postponement)
	}
	const bind = "bind intent replace-0 Leave donor=worker-0 machine=sandbox://t/worker-9"
	wantActions(t, "its surge slot and its cordon are released", decided(everyRule, postponed), bind, "release worker-0")
	uncordon := func(off rule) bool {
		s, w := rollout(postponed)
		return slices.ContainsFunc(plan(s, w, off).Actions, func(a Action) bool { return a.Kind == ReleaseNode && a.Uncordon })
	}
	if !uncordon(everyRule) || uncordon(ruleUncordon) {
		t.Errorf("uncordoned: %t, with the old order: %t", uncordon(everyRule), uncordon(ruleUncordon))
	}
	wantActions(t, "the next replacement starts", decided(everyRule, postponed, func(_ *v1alpha1.NodeVersionSpec, w *World) {
		w.Intents, w.Nodes, w.Instances = nil, w.Nodes[:5], w.Instances[:5]
		w.Nodes[3].Replacement, w.Nodes[3].Cordon = "", Uncordoned
	}), "record intent replace-0 Join donor=worker-1")

	// A failed upgrade does not block the rollout either: it is retried, and can be cancelled at any
	// time.
	failed := func(ended time.Time, cancel bool) func(*v1alpha1.NodeVersionSpec, *World) {
		return func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.KubernetesClusterVersion, s.KubernetesComponentsReference, w.LeaderNode = "v1.36.3", refB, "control-plane-0"
			s.Rollout.Cancel = cancel
			w.Run = UpgradeRun{Version: "v1.36.3", Components: refB, Node: "control-plane-0", Phase: "failed", Started: ended, Ended: ended}
		}
	}
	wantActions(t, "right after the failure", decided(everyRule, failed(modelNow, false)))
	again := failed(modelNow.Add(-UpgradeRetry), false)
	wantActions(t, "after a pause", decided(everyRule, again), "start upgrade control-plane-0 v1.36.3")
	wantActions(t, "with the old order", decided(ruleRetry, again))
	wantActions(t, "cancelled", decided(everyRule, failed(modelNow, true)), "resume autoscaler")
}
