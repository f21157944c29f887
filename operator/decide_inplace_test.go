package operator

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/operator/api/v1alpha1"
)

// upgradable is a rollout of which the control planes are done and the workers stay:
// they have an old Kubernetes and are upgraded in place.
func upgradable(edit ...func(*v1alpha1.NodeVersionSpec, *world)) (v1alpha1.NodeVersionSpec, world) {
	s, w := rollout()
	s.KubernetesClusterVersion, s.KubernetesComponentsReference = "v1.36.3", refB
	w.before.JoinComponents = v1alpha1.JoinComponents{ControlPlane: refB, Worker: refB}
	w.groups[1].strategy = v1alpha1.InPlaceStrategy
	for i := range w.nodes {
		n := &w.nodes[i]
		if n.kubelet, n.components = "v1.36.3", refB; n.role == v1alpha1.WorkerRole {
			n.kubelet, n.components, n.marked = "v1.35.4", refA, true
		}
	}
	for _, e := range edit {
		e(&s, &w)
	}
	agree(&w)
	return s, w
}

// upgrading puts the upgrade of worker-0 into a world, which is cordoned and empty, and of
// whose agent run was heard.
func upgrading(run upgradeRun, edit ...func(*v1alpha1.NodeVersionSpec, *world)) func(*v1alpha1.NodeVersionSpec, *world) {
	return func(s *v1alpha1.NodeVersionSpec, w *world) {
		n := &w.nodes[3]
		w.intents = append(w.intents, intent{name: "replace-0", goal: v1alpha1.UpgradeGoal, machine: n.providerID, node: n.name, group: n.group, deadline: modelNow.Add(time.Minute)})
		w.runs = map[string]upgradeRun{n.providerID: run}
		n.cordon, n.cordonedSince, n.drained = cordonedByUs, modelNow.Add(-time.Minute), true
		for _, e := range edit {
			e(s, w)
		}
	}
}

func TestDecideInPlace(t *testing.T) {
	type change = func(*v1alpha1.NodeVersionSpec, *world)
	ran := func(phase, components, version string) upgradeRun {
		return upgradeRun{version: version, components: components, node: "worker-0", phase: phase, line: "the disk is full", inPlace: true, ended: modelNow.Add(-time.Hour)}
	}
	failed := ran("failed", refB, "v1.36.3")
	now := failed
	now.ended = modelNow
	none := upgradeRun{}
	const (
		clear   = "clear intent replace-0 Upgrade machine=sandbox://t/worker-0"
		release = "release worker-0"
		begin   = "upgrade node worker-0 sandbox://t/worker-0 v1.36.3"
		other   = "record intent replace-0 Upgrade machine=sandbox://t/control-plane-1"
	)
	open := func(w *world) {
		n := &w.nodes[3]
		n.cordon, n.drained, n.cordonedSince = uncordoned, false, time.Time{}
	}
	controlPlane := func(_ *v1alpha1.NodeVersionSpec, w *world) {
		w.groups[0].strategy, w.before.JoinComponents.Worker = v1alpha1.InPlaceStrategy, refA
		for i := range 3 {
			w.nodes[i].marked = true
		}
		w.nodes[1].components, w.nodes[1].kubelet = refA, "v1.35.4"
	}
	for _, tt := range []struct {
		name    string
		edit    change
		want    []string
		waiting string
	}{
		{"it begins with an intent", func(*v1alpha1.NodeVersionSpec, *world) {}, []string{"record intent replace-0 Upgrade machine=sandbox://t/worker-0"}, ""},
		{"as many at a time as the surge", func(s *v1alpha1.NodeVersionSpec, _ *world) {
			surge := intstr.FromInt32(2)
			s.Rollout.MaxSurge = &surge
		}, []string{"record intent replace-0 Upgrade machine=sandbox://t/worker-0", "record intent replace-1 Upgrade machine=sandbox://t/worker-1"}, ""},
		{"another image alone is nothing to do", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.nodes[3].components, w.nodes[4].components = refB, refB
		}, []string{"resume autoscaler"}, ""},
		{"a node is labelled for the relay, and others are not", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.nodes[3].components, w.nodes[4].components, w.nodes[3].marked, w.nodes[0].marked = refB, refB, false, true
		}, []string{"mark in-place control-plane-0", "mark in-place worker-0", "resume autoscaler"}, ""},
		{"the autoscaler is stopped first", func(_ *v1alpha1.NodeVersionSpec, w *world) { w.autoscaler = autoscaler{enabled: true, running: true} }, []string{"pause autoscaler"}, ""},
		{"nothing is begun while paused", func(s *v1alpha1.NodeVersionSpec, _ *world) { s.Rollout.Paused = true }, nil, "Paused"},
		{"kept workers are kept", func(s *v1alpha1.NodeVersionSpec, _ *world) { s.Rollout.KeepWorkers = true }, []string{"resume autoscaler"}, ""},
		{"a held node is left as it is", func(_ *v1alpha1.NodeVersionSpec, w *world) { w.nodes[3].held = true }, []string{"record intent replace-0 Upgrade machine=sandbox://t/worker-1"}, ""},

		{"nothing is done to a node whose agent has not answered", upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *world) { w.runs = nil; open(w) }), nil, "AgentUnknown"},
		{"others come first if it does not answer in time", upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.runs, w.intents[0].deadline = nil, modelNow.Add(-time.Second)
			open(w)
		}), []string{"postpone worker-0"}, "Postponed"},
		{"it is cordoned", upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *world) { open(w) }), []string{"cordon worker-0"}, ""},
		{"it is emptied", upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *world) { w.nodes[3].drained = false }), []string{"drain worker-0"}, ""},
		{"then its agent begins", upgrading(none), []string{begin}, ""},
		{"an agent that has done something else begins", upgrading(ran("done", refA, "v1.35.4")), []string{begin}, ""},
		{"a drain that is blocked for long gives way to others", upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.nodes[3].drained, w.nodes[3].blocker, w.nodes[3].cordonedSince = false, "PodDisruptionBudget web/web", modelNow.Add(-2*drainDeadline)
		}), []string{"drain worker-0", "postpone worker-0"}, "DrainBlocked"},
		{"a run is let end, though the rollout is paused and the node held", upgrading(ran("apply", refB, "v1.36.3"), func(s *v1alpha1.NodeVersionSpec, w *world) {
			s.Rollout.Paused, w.nodes[3].held = true, true
		}), nil, "NodeUpgrades"},
		{"before it has begun it is given up when it is paused", upgrading(none, func(s *v1alpha1.NodeVersionSpec, _ *world) { s.Rollout.Paused = true }), []string{clear, release}, ""},
		{"one whose upgrade has failed is given back when its owner holds it", upgrading(failed, func(_ *v1alpha1.NodeVersionSpec, w *world) { w.nodes[3].held = true }), []string{clear, release}, ""},
		{"and when its owner holds it", upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *world) { w.nodes[3].held = true }), []string{clear, release}, ""},
		{"and when it is to be replaced instead", upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.groups[1].strategy, w.nodes[4].marked = v1alpha1.ReplaceStrategy, false
		}), []string{clear, release, "mark in-place worker-0"}, ""},
		{"and when a control plane needs the place", upgrading(none, func(s *v1alpha1.NodeVersionSpec, w *world) { w.nodes[1].components = refA }), []string{clear, release}, ""},
		{"and when its machine is gone", upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.instances[3].state, w.nodes = "Terminated", append(w.nodes[:3], w.nodes[4])
		}), []string{clear}, ""},
		{"what others have cordoned stays cordoned", upgrading(none, func(s *v1alpha1.NodeVersionSpec, w *world) {
			s.Rollout.Paused, w.nodes[3].cordon = true, cordonedByOthers
		}), []string{clear}, ""},
		{"what its agent has finished is noted", upgrading(ran("done", refB, "v1.36.3"), func(_ *v1alpha1.NodeVersionSpec, w *world) { w.nodes[3].kubelet = "v1.36.3" }), []string{"note components worker-0 sandbox://t/worker-0"}, ""},
		{"but not before its kubelet says so", upgrading(ran("done", refB, "v1.36.3")), nil, "NodeNotReady"},
		{"a node at the target is uncordoned", upgrading(ran("done", refB, "v1.36.3"), func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.nodes[3].components, w.nodes[3].kubelet = refB, "v1.36.3"
		}), []string{clear, release}, ""},
		{"but not before it is Ready", upgrading(ran("done", refB, "v1.36.3"), func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.nodes[3].components, w.nodes[3].kubelet, w.nodes[3].ready = refB, "v1.36.3", false
		}), nil, "NodeNotReady"},
		{"a failure is told, and others of its group wait", upgrading(now), nil, "UpgradeFailed"},
		{"and tried again", upgrading(failed), []string{begin}, ""},
		{"it keeps no other group from its turn", upgrading(now, func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.groups = append(w.groups, group{name: "more", id: "more", role: v1alpha1.WorkerRole, image: image2, strategy: v1alpha1.InPlaceStrategy})
			w.nodes[4].group = "more"
		}), []string{"record intent replace-1 Upgrade machine=sandbox://t/worker-1"}, "UpgradeFailed"},

		{"a control plane uses the first place", controlPlane, []string{other}, ""},
		{"and waits for every member of etcd", func(s *v1alpha1.NodeVersionSpec, w *world) { controlPlane(s, w); w.etcd[2].healthy = false }, nil, "EtcdUnhealthy"},
		{"the operator leaves it before it is emptied", func(s *v1alpha1.NodeVersionSpec, w *world) {
			controlPlane(s, w)
			w.leader, w.nodes[1].cordon = "control-plane-1", cordonedByUs
			w.intents = []intent{{name: "replace-0", goal: v1alpha1.UpgradeGoal, machine: w.nodes[1].providerID, node: "control-plane-1", group: cpGroup, deadline: modelNow.Add(time.Minute)}}
			w.runs = map[string]upgradeRun{w.nodes[1].providerID: none}
		}, []string{"yield lease control-plane-1"}, ""},
		{"a lone one is not emptied", func(s *v1alpha1.NodeVersionSpec, w *world) {
			controlPlane(s, w)
			w.leader, w.nodes, w.instances, w.etcd = "control-plane-1", w.nodes[1:2], w.instances[1:2], w.etcd[1:2]
			w.intents = []intent{{name: "replace-0", goal: v1alpha1.UpgradeGoal, machine: w.nodes[0].providerID, node: "control-plane-1", group: cpGroup, deadline: modelNow.Add(time.Minute)}}
			w.runs = map[string]upgradeRun{w.nodes[0].providerID: none}
		}, []string{"upgrade node control-plane-1 sandbox://t/control-plane-1 v1.36.3"}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantDecision(t, tt.want, tt.waiting)(decide(upgradable(tt.edit)))
		})
	}
}

// Whoever looks at the cluster with kubectl sees when a failed upgrade is tried again, however
// long it says why it has failed.
func TestNextTryIsTold(t *testing.T) {
	failed := upgradeRun{version: "v1.36.3", components: refB, node: "worker-0", phase: "failed", line: strings.Repeat("no space left on device ", 20), inPlace: true, ended: modelNow.Add(-time.Second)}
	_, status := decide(upgradable(upgrading(failed)))
	next := failed.ended.Add(upgradeRetry)
	if w := status.Waiting; w == nil || w.NextTry == nil || !w.NextTry.Time.Equal(next) {
		t.Errorf("it waits for %+v, and not until %s", w, next)
	}
	c := *meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionReady)
	if want := "; next try at " + next.Format("15:04:05Z"); !strings.HasPrefix(c.Message, "the upgrade of worker-0 to Kubernetes v1.36.3 failed: no space") || !strings.HasSuffix(c.Message, want) || len(c.Message) > 150 {
		t.Errorf("Ready says %q, and not at the end %q", c.Message, want)
	}
	if p := failed.progress(); !p.NextTry.Time.Equal(next) {
		t.Errorf("its run says %+v", p)
	}
	failed.phase = "apply"
	if p := failed.progress(); !p.NextTry.IsZero() {
		t.Errorf("a run that is under way says %+v", p)
	}
}

// A person who wants a failed upgrade tried again now gets one try for it: what is wanted is
// written down with the run that it is for, that is tried again, and then it is taken off.
func TestDecideRetry(t *testing.T) {
	type change = func(*v1alpha1.NodeVersionSpec, *world)
	failed := upgradeRun{version: "v1.36.3", components: refB, node: "worker-0", phase: "failed", line: "the disk is full", inPlace: true, ended: modelNow.Add(-time.Second)}
	const mark, begin, off = "run-1893499199000", "upgrade node worker-0 sandbox://t/worker-0 v1.36.3", "mark retry worker-0"
	noted := func(text string, more ...change) change {
		return func(s *v1alpha1.NodeVersionSpec, w *world) {
			w.nodes[3].retry = text
			for _, e := range more {
				e(s, w)
			}
		}
	}
	after := func(edit func(*upgradeRun)) upgradeRun {
		r := failed
		edit(&r)
		return r
	}
	// apply is the failed upgrade of Kubernetes by the agent of control-plane-1.
	apply := func(text string, phase string) change {
		return func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.before.JoinComponents = v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}
			w.leader, w.nodes[1].retry, w.nodes[3].components, w.nodes[4].components = "control-plane-1", text, refB, refB
			w.run = upgradeRun{version: "v1.36.3", components: refB, node: "control-plane-1", phase: phase, ended: modelNow.Add(-time.Second)}
		}
	}
	for _, tt := range []struct {
		name    string
		edit    change
		want    []string
		waiting string
	}{
		{"nobody wants it", upgrading(failed), nil, "UpgradeFailed"},
		{"it is written down first", upgrading(failed, noted("now")), []string{off + " " + mark}, "UpgradeFailed"},
		{"then it is tried again", upgrading(failed, noted(mark)), []string{begin}, ""},
		{"while that is under way it is taken off", upgrading(after(func(r *upgradeRun) { r.phase = "apply" }), noted(mark)), []string{off}, "NodeUpgrades"},
		{"when that has failed it is not tried once more", upgrading(after(func(r *upgradeRun) { r.ended = modelNow }), noted(mark)), []string{off}, "UpgradeFailed"},
		{"what is under way is not tried again", upgrading(after(func(r *upgradeRun) { r.phase = "apply" }), noted("now")), []string{off}, "NodeUpgrades"},
		{"what was interrupted needs nobody's wish", upgrading(after(func(r *upgradeRun) { r.ended = time.Time{} }), noted("now")), []string{begin, off}, ""},
		{"it is kept until the agent has answered", upgrading(failed, noted("now", func(_ *v1alpha1.NodeVersionSpec, w *world) { w.runs = nil })), nil, "AgentUnknown"},
		{"and until the node has its turn", func(s *v1alpha1.NodeVersionSpec, w *world) { s.Rollout.Paused, w.nodes[3].retry = true, "now" }, nil, "Paused"},
		{"a node at the target has nothing to try", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.nodes[3].components, w.nodes[4].components, w.nodes[3].retry = refB, refB, "now"
		}, []string{off, "resume autoscaler"}, ""},
		{"and neither has one that is replaced", func(s *v1alpha1.NodeVersionSpec, w *world) {
			s.Rollout.Paused, w.groups[1].strategy, w.nodes[3].marked, w.nodes[4].marked, w.nodes[3].retry = true, v1alpha1.ReplaceStrategy, false, false, "now"
		}, []string{off}, "Paused"},
		{"of the control plane's Kubernetes it is written down first", apply("now", "failed"), []string{"mark retry control-plane-1 " + mark}, "UpgradeFailed"},
		{"then that is tried again", apply(mark, "failed"), []string{"start upgrade control-plane-1 v1.36.3"}, ""},
		{"and taken off while it is under way", apply(mark, "plan"), []string{"mark retry control-plane-1"}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantDecision(t, tt.want, tt.waiting)(decide(upgradable(tt.edit)))
		})
	}
}
