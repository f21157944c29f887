package operator

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/v1alpha1"
)

// Weak points of other systems that replace machines, each as a test that fails on the
// order in which those do things. What belongs to other packages is there under the
// same names: the agent's (R8, R9) in package agent, the charts' (R21) in package
// assets, the feed's (R22) in package engine/release.

// decided returns what is decided in a world, as words.
func decided(off rule, edit ...func(*v1alpha1.NodeVersionSpec, *world)) []string {
	s, w := rollout(edit...)
	out := []string{}
	for _, a := range plan(s, w, off).actions {
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

// replacing puts a replacement of worker-0 into a world: its intent, and as far as they
// are given the machine and the Node of the heir.
func replacing(goal v1alpha1.Goal, machineState v1alpha1.InstanceState, heir bool) func(*v1alpha1.NodeVersionSpec, *world) {
	return func(_ *v1alpha1.NodeVersionSpec, w *world) {
		in := intent{name: "replace-0", goal: goal, token: "t", donor: "worker-0", group: workerGroup, deadline: modelNow.Add(time.Minute)}
		if goal == v1alpha1.LeaveGoal {
			in.machine, in.node = "sandbox://t/worker-0", "worker-0"
		}
		w.intents = []intent{in}
		if machineState != "" {
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-9", name: "worker-9", group: workerGroup, token: "t", state: machineState, since: modelNow})
		}
		if heir {
			w.nodes = append(w.nodes, machine("worker-9", func(n *node) { n.donor = "worker-0" }))
			d := &w.nodes[3]
			d.heir, d.cordon, d.cordonedSince, d.drained = "worker-9", cordonedByUs, modelNow, true
		}
	}
}

// leavingControlPlane is a world in which control-plane-0 is bound to leave, empty, and
// its heir is there and votes.
func leavingControlPlane(edit func(*world)) func(*v1alpha1.NodeVersionSpec, *world) {
	return func(_ *v1alpha1.NodeVersionSpec, w *world) {
		d := &w.nodes[0]
		d.image, d.heir, d.cordon, d.cordonedSince, d.drained = image1, "control-plane-9", cordonedByUs, modelNow, true
		w.nodes[3].image, w.nodes[4].image = image2, image2
		w.nodes = append(w.nodes, machine("control-plane-9", func(n *node) { n.donor = "control-plane-0" }))
		w.instances = append(w.instances, instance{id: "sandbox://t/control-plane-9", name: "control-plane-9", group: cpGroup, token: "t", state: "Ready", since: modelNow})
		w.intents = []intent{{name: "replace-0", goal: v1alpha1.LeaveGoal, token: "t", donor: "control-plane-0", group: cpGroup, machine: "sandbox://t/control-plane-0", node: "control-plane-0", deadline: modelNow.Add(time.Hour)}}
		w.etcd = append(w.etcd, member{node: "control-plane-9", voter: true, healthy: true})
		w.etcd[0].leader, w.etcd[1].leader = false, true
		if edit != nil {
			edit(w)
		}
	}
}

// The old order: the cloud makes a machine, and then a PendingNode is recorded. After a
// crash in between nobody knows the machine.
func TestWeakPointR1IntentBeforeMachine(t *testing.T) {
	wantActions(t, "nothing is written yet", decided(everyRule), "record intent replace-0 Join donor=worker-0")
	wantActions(t, "the intent is written", decided(everyRule, replacing(v1alpha1.JoinGoal, "", false)), "create machine replace-0 Join donor=worker-0")
	wantActions(t, "the crash was after the machine was made", decided(everyRule, replacing(v1alpha1.JoinGoal, "Creating", false)))
	wantActions(t, "a machine that nobody has written down", decided(everyRule, func(s *v1alpha1.NodeVersionSpec, w *world) {
		s.Rollout.Paused = true
		w.instances = append(w.instances, instance{id: "sandbox://t/worker-9", name: "worker-9", group: workerGroup, state: "Ready", since: modelNow})
	}), "record intent machine-worker-9 Join machine=sandbox://t/worker-9")
}

// The old order: the Node is deleted first, and that the cloud refuses to delete the
// machine is logged. It runs on, and nobody knows it.
func TestWeakPointR2NodeAfterMachine(t *testing.T) {
	state := func(donor v1alpha1.InstanceState, node bool) func(*v1alpha1.NodeVersionSpec, *world) {
		return func(s *v1alpha1.NodeVersionSpec, w *world) {
			s.Rollout.KeepWorkers = true // nothing else begins
			replacing(v1alpha1.LeaveGoal, "Ready", true)(s, w)
			for i := range w.instances {
				if w.instances[i].name == "worker-0" {
					w.instances[i].state = donor
				}
			}
			if !node {
				w.nodes = slices.Delete(w.nodes, 3, 4)
			}
		}
	}
	wantActions(t, "the machine runs", decided(everyRule, state("Ready", true)), "delete machine worker-0 sandbox://t/worker-0")
	wantActions(t, "the cloud deletes it", decided(everyRule, state("Terminating", true)), "delete node worker-0 sandbox://t/worker-0")
	wantActions(t, "the cloud has lost the request", decided(everyRule, state("Ready", false)), "delete machine worker-0 sandbox://t/worker-0")
	wantActions(t, "it is not gone yet", decided(everyRule, state("Terminating", false)))
	const clear = "clear intent replace-0 Leave donor=worker-0 machine=sandbox://t/worker-0"
	wantActions(t, "it is gone", decided(everyRule, state("Terminated", false)), clear)
	wantActions(t, "without the rule it is forgotten while it runs", decided(ruleGone, state("Ready", false)), "delete machine worker-0 sandbox://t/worker-0", clear)
}

// The old order: list, ask for one more, and take the first that was not in the list.
// That may be the autoscaler's.
func TestWeakPointR3HeirByToken(t *testing.T) {
	strangers := func(s *v1alpha1.NodeVersionSpec, w *world) {
		for _, name := range []string{"worker-7", "worker-8"} {
			w.nodes = append(w.nodes, machine(name))
			w.instances = append(w.instances, instance{id: "sandbox://t/" + name, name: name, group: workerGroup, state: "Ready", since: modelNow.Add(time.Second)})
		}
		w.nodes[4].image = image2 // nobody else is outdated
	}
	wantActions(t, "ours is not there", decided(everyRule, strangers, replacing(v1alpha1.JoinGoal, "", false)), "create machine replace-0 Join donor=worker-0")
	wantActions(t, "ours comes", decided(everyRule, strangers, replacing(v1alpha1.JoinGoal, "Ready", false)))
	wantActions(t, "ours has joined", decided(everyRule, strangers, replacing(v1alpha1.JoinGoal, "Ready", false), func(_ *v1alpha1.NodeVersionSpec, w *world) {
		w.nodes = append(w.nodes, machine("worker-9"))
	}), "adopt heir worker-9 donor=worker-0")
}

// The old order: a member of etcd is removed when its Node is to go, and whether the
// others can do without it is left to etcd; the machine goes even if that fails.
// TestHostChangesEtcd and the agent's TestQuorumIsKept try the last guard on real etcd.
func TestWeakPointR5MembersAreGuarded(t *testing.T) {
	remove, deleted := "remove etcd member control-plane-0 leaving=3", "delete machine control-plane-0 sandbox://t/control-plane-0"
	sick := func(w *world) { w.etcd[2].healthy = false }
	learner := func(w *world) { w.etcd[2].voter = false }
	leads := func(w *world) { w.etcd[0].leader, w.etcd[1].leader = true, false }
	heirLearns := func(w *world) { w.etcd[3].voter = false }
	for _, tt := range []struct {
		name string
		edit func(*world)
		off  rule // without which the old order is back
		want []string
		old  []string
	}{
		{"all are well", nil, ruleMemberFirst, []string{remove}, []string{remove, deleted}},
		{"another one is not healthy", sick, ruleMembersHealthy, nil, []string{remove}},
		{"another one is a learner", learner, ruleMembersHealthy, nil, []string{"remove etcd member control-plane-0 leaving=2"}},
		{"it leads", leads, ruleLeaderMoved, []string{"move etcd leader control-plane-0 heir=control-plane-1"}, []string{remove}},
		{"its heir does not vote yet", heirLearns, ruleMemberFirst, nil, []string{deleted}},
		{"nobody knows the members", func(w *world) { w.etcd = nil }, ruleMemberFirst, nil, []string{deleted}},
		{"it has left", func(w *world) { w.etcd = w.etcd[1:] }, everyRule, []string{deleted}, []string{deleted}},
	} {
		wantActions(t, tt.name, decided(everyRule, leavingControlPlane(tt.edit)), tt.want...)
		wantActions(t, "in the old order, "+tt.name, decided(tt.off, leavingControlPlane(tt.edit)), tt.old...)
	}
}

// The old code: the list of nodes that await their annotation is that of heirs and one
// more. Each class has its own number here, and all add up.
func TestWeakPointR6ListsAreOfTheirOwnClass(t *testing.T) {
	_, w := rollout(replacing(v1alpha1.JoinGoal, "Ready", true), func(_ *v1alpha1.NodeVersionSpec, w *world) {
		w.nodes = append(w.nodes, machine("worker-5", func(n *node) { n.image, n.components, n.group = "", "", "" }))
		w.pending = []pendingMachine{{kind: "JoiningNode", name: "worker-5", node: "worker-5"}}
	})
	s := assess(spec(), 1, v1alpha1.NodeVersionStatus{}, w, modelNow)
	want := v1alpha1.NodeCounts{Total: 7, UpToDate: 3, Outdated: 1, Donors: 1, Heirs: 1, AwaitingAnnotation: 1}
	if d := cmp.Diff(want, s.Nodes); d != "" {
		t.Errorf("counts, want and got:\n%s", d)
	}
}

// The old lock: a field of the status says that an upgrade is active. The next write of
// the status resets it, and a crash leaves it for ever. Here the agent's journal is what
// counts: whoever starts attaches to its run, whatever the status says.
func TestWeakPointR7UpgradeIsNotLockedByAField(t *testing.T) {
	target := func(s *v1alpha1.NodeVersionSpec, w *world) {
		s.KubernetesClusterVersion, s.KubernetesComponentsReference, w.leader = "v1.36.3", refB, "control-plane-0"
	}
	run := upgradeRun{version: "v1.36.3", components: refB, node: "control-plane-0", phase: "apply", started: modelNow}
	attached := func(s *v1alpha1.NodeVersionSpec, w *world) { target(s, w); w.run = run }
	const begin = "start upgrade control-plane-0 v1.36.3"
	wantActions(t, "no run", decided(everyRule, target), begin)
	wantActions(t, "one is active, and the status was reset", decided(everyRule, attached))
	wantActions(t, "the status says that one is active, and none is", decided(everyRule, func(s *v1alpha1.NodeVersionSpec, w *world) {
		target(s, w)
		w.before.Upgrade = &v1alpha1.UpgradeProgress{Version: "v1.36.3", Node: "control-plane-0", Phase: "apply", Started: metav1.NewTime(modelNow)}
		w.run = lastRun(upgradeRun{}, w.before.Upgrade, 0, *s, *newLookup(w), w.leader)
	}), begin)
	wantActions(t, "of another host, for longer than a run takes", decided(everyRule, func(s *v1alpha1.NodeVersionSpec, w *world) {
		target(s, w)
		told := &v1alpha1.UpgradeProgress{Version: "v1.36.3", Node: "control-plane-1", Phase: "apply", Started: metav1.NewTime(modelNow)}
		w.run = lastRun(upgradeRun{}, told, lostRun+time.Minute, *s, *newLookup(w), w.leader)
	}), begin)
}

// The operator's part of R22: what is no version, or goes down, is refused by name, and
// nothing is touched. The feed's part is in package engine/release.
func TestWeakPointR22WhatIsNoVersionIsRefused(t *testing.T) {
	for _, v := range []string{"", "latest", "index.html", "https://example.com/v1.36.3", "v1.34.1", "v1.36.3\n"} {
		s, w := rollout(func(s *v1alpha1.NodeVersionSpec, w *world) {
			s.KubernetesClusterVersion, s.KubernetesComponentsReference = v, refB
			w.autoscaler = autoscaler{enabled: true}
		})
		actions, status := decide(s, w)
		if len(actions) > 0 || status.Waiting == nil || status.Waiting.Reason != "TargetRefused" {
			t.Errorf("%q: actions %v, waiting %+v", v, actions, status.Waiting)
		}
	}
}

// The old way: a job that fails leaves its node cordoned, and keeps the place that the
// next one would need.
func TestWeakPointR23FailureHoldsNothing(t *testing.T) {
	blocked := func(s *v1alpha1.NodeVersionSpec, w *world) {
		replacing(v1alpha1.JoinGoal, "Ready", true)(s, w)
		d := &w.nodes[3]
		d.drained, d.blocker, d.cordonedSince = false, "PodDisruptionBudget web/web allows no eviction", modelNow.Add(-drainDeadline-time.Minute)
	}
	postpone, drain := "postpone worker-0", "drain worker-0"
	wantActions(t, "a drain that is blocked too long while others wait", decided(everyRule, blocked), drain, postpone)
	wantActions(t, "in the old way it waits for ever", decided(ruleBlockedGoesBy, blocked), drain)
	postponed := func(s *v1alpha1.NodeVersionSpec, w *world) {
		blocked(s, w)
		w.nodes[3].postponed = modelNow.Add(postponement)
	}
	const bind = "bind intent replace-0 Leave donor=worker-0 machine=sandbox://t/worker-9"
	wantActions(t, "its place and its cordon are given back", decided(everyRule, postponed), bind, "release worker-0")
	uncordon := func(off rule) bool {
		s, w := rollout(postponed)
		return slices.ContainsFunc(plan(s, w, off).actions, func(a action) bool { return a.kind == releaseNode && a.uncordon })
	}
	if !uncordon(everyRule) || uncordon(ruleUncordon) {
		t.Errorf("uncordoned: %t, in the old way: %t", uncordon(everyRule), uncordon(ruleUncordon))
	}
	wantActions(t, "and the next one begins", decided(everyRule, postponed, func(_ *v1alpha1.NodeVersionSpec, w *world) {
		w.intents, w.nodes, w.instances = nil, w.nodes[:5], w.instances[:5]
		w.nodes[3].heir, w.nodes[3].cordon = "", uncordoned
	}), "record intent replace-0 Join donor=worker-1")

	// An upgrade that fails holds nothing either: it is tried again, and cancelled at any time.
	failed := func(ended time.Time, cancel bool) func(*v1alpha1.NodeVersionSpec, *world) {
		return func(s *v1alpha1.NodeVersionSpec, w *world) {
			s.KubernetesClusterVersion, s.KubernetesComponentsReference, w.leader = "v1.36.3", refB, "control-plane-0"
			s.Rollout.Cancel = cancel
			w.run = upgradeRun{version: "v1.36.3", components: refB, node: "control-plane-0", phase: "failed", started: ended, ended: ended}
		}
	}
	wantActions(t, "a moment after it failed", decided(everyRule, failed(modelNow, false)))
	again := failed(modelNow.Add(-upgradeRetry), false)
	wantActions(t, "a while after", decided(everyRule, again), "start upgrade control-plane-0 v1.36.3")
	wantActions(t, "in the old way", decided(ruleRetry, again))
	wantActions(t, "cancelled", decided(everyRule, failed(modelNow, true)), "resume autoscaler")
}
