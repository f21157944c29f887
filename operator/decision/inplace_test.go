package decision

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/operator/api/v1alpha1"
)

// upgradable is a rollout whose control planes are at the target. Its workers have an old
// Kubernetes and are upgraded in place.
func upgradable(edit ...func(*v1alpha1.NodeVersionSpec, *World)) (v1alpha1.NodeVersionSpec, World) {
	s, w := rollout()
	s.KubernetesClusterVersion, s.KubernetesComponentsReference = "v1.36.3", refB
	w.Before.JoinComponents = v1alpha1.JoinComponents{ControlPlane: refB, Worker: refB}
	w.Groups[1].Strategy = v1alpha1.InPlaceStrategy
	for i := range w.Nodes {
		n := &w.Nodes[i]
		if n.Kubelet, n.Components = "v1.36.3", refB; n.Role == v1alpha1.WorkerRole {
			n.Kubelet, n.Components, n.InPlaceLabel = "v1.35.4", refA, true
		}
	}
	for _, e := range edit {
		e(&s, &w)
	}
	agree(&w)
	return s, w
}

// upgrading adds the upgrade of worker-0 to a world. The node is cordoned and drained, and its agent
// has reported run.
func upgrading(run UpgradeRun, edit ...func(*v1alpha1.NodeVersionSpec, *World)) func(*v1alpha1.NodeVersionSpec, *World) {
	return func(s *v1alpha1.NodeVersionSpec, w *World) {
		n := &w.Nodes[3]
		w.Intents = append(w.Intents, Intent{Name: "replace-0", Goal: v1alpha1.UpgradeGoal, Machine: n.ProviderID, Node: n.Name, Group: n.Group, Deadline: modelNow.Add(time.Minute)})
		w.NodeRuns = map[string]UpgradeRun{n.ProviderID: run}
		n.Cordon, n.CordonedSince, n.Drained = CordonedByUs, modelNow.Add(-time.Minute), true
		for _, e := range edit {
			e(s, w)
		}
	}
}

func TestDecideInPlace(t *testing.T) {
	type change = func(*v1alpha1.NodeVersionSpec, *World)
	ran := func(phase, components, version string) UpgradeRun {
		return UpgradeRun{Version: version, Components: components, Node: "worker-0", Phase: phase, Line: "the disk is full", InPlace: true, Ended: modelNow.Add(-time.Hour)}
	}
	failed := ran("failed", refB, "v1.36.3")
	now := failed
	now.Ended = modelNow
	none := UpgradeRun{}
	const (
		clear   = "clear intent replace-0 Upgrade machine=sandbox://t/worker-0"
		release = "release worker-0"
		begin   = "upgrade node worker-0 sandbox://t/worker-0 v1.36.3"
		other   = "record intent replace-0 Upgrade machine=sandbox://t/control-plane-1"
	)
	open := func(w *World) {
		n := &w.Nodes[3]
		n.Cordon, n.Drained, n.CordonedSince = Uncordoned, false, time.Time{}
	}
	controlPlane := func(_ *v1alpha1.NodeVersionSpec, w *World) {
		w.Groups[0].Strategy, w.Before.JoinComponents.Worker = v1alpha1.InPlaceStrategy, refA
		for i := range 3 {
			w.Nodes[i].InPlaceLabel = true
		}
		w.Nodes[1].Components, w.Nodes[1].Kubelet = refA, "v1.35.4"
	}
	// The agent of control-plane-1 has upgraded the cluster's Kubernetes, and now it is the turn of the node.
	turn := func(phase string, edit ...change) change {
		return func(s *v1alpha1.NodeVersionSpec, w *World) {
			controlPlane(s, w)
			n := &w.Nodes[1]
			w.Intents = append(w.Intents, Intent{Name: "replace-0", Goal: v1alpha1.UpgradeGoal, Machine: n.ProviderID, Node: n.Name, Group: n.Group, Deadline: modelNow.Add(time.Minute)})
			w.NodeRuns = map[string]UpgradeRun{n.ProviderID: {Version: "v1.36.3", Components: refB, Node: n.Name, Phase: phase, Ended: modelNow.Add(-time.Second)}}
			for _, e := range edit {
				e(s, w)
			}
		}
	}
	target := func(s *v1alpha1.NodeVersionSpec, w *World) { // Kubernetes is not upgraded yet
		controlPlane(s, w)
		w.LeaderNode, w.Before.JoinComponents.ControlPlane = "control-plane-1", refA
		for i := range w.Nodes {
			w.Nodes[i].Components, w.Nodes[i].Kubelet = refA, "v1.35.4"
		}
	}
	for _, tt := range []struct {
		name    string
		edit    change
		want    []string
		waiting string
	}{
		{name: "the upgrade of Kubernetes keeps the kubelet of a node that takes pods", edit: target, want: []string{"start upgrade control-plane-1 v1.36.3 kubelet=kept"}},
		{name: "it replaces the kubelet of the only control plane, which is not drained", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			target(s, w)
			w.Etcd = []Member{{Node: "control-plane-1", Voter: true, Healthy: true, Leader: true}}
		}, want: []string{"start upgrade control-plane-1 v1.36.3"}},
		{name: "it replaces the kubelet of a node that is replaced", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			target(s, w)
			w.Groups[0].Strategy = v1alpha1.ReplaceStrategy
			for i := range 3 {
				w.Nodes[i].InPlaceLabel = false
			}
		}, want: []string{"start upgrade control-plane-1 v1.36.3"}},
		{name: "a node whose kubelet was kept is cordoned in its own turn", edit: turn("done"), want: []string{"cordon control-plane-1"}},
		{name: "a failed upgrade of Kubernetes does not delay the node's own turn", edit: turn("failed"), want: []string{"cordon control-plane-1"}},
		{name: "a node whose kubelet was replaced is recorded", edit: turn("done", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[1].Kubelet = "v1.36.3" }), want: []string{"note components control-plane-1 sandbox://t/control-plane-1"}},
		{name: "a node whose kubelet was replaced becomes Ready first", edit: turn("done", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[1].Kubelet, w.Nodes[1].Ready = "v1.36.3", false }), want: nil, waiting: "NodeNotReady"},
		{name: "the first action is an intent", edit: func(*v1alpha1.NodeVersionSpec, *World) {}, want: []string{"record intent replace-0 Upgrade machine=sandbox://t/worker-0"}},
		{name: "as many upgrades at a time as maxSurge", edit: func(s *v1alpha1.NodeVersionSpec, _ *World) {
			surge := intstr.FromInt32(2)
			s.Rollout.MaxSurge = &surge
		}, want: []string{"record intent replace-0 Upgrade machine=sandbox://t/worker-0", "record intent replace-1 Upgrade machine=sandbox://t/worker-1"}},
		{name: "another image alone needs no upgrade", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Components, w.Nodes[4].Components = refB, refB
		}, want: []string{"resume autoscaler"}},
		{name: "nodes of in-place groups are labelled for the relay, others are not", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Components, w.Nodes[4].Components, w.Nodes[3].InPlaceLabel, w.Nodes[0].InPlaceLabel = refB, refB, false, true
		}, want: []string{"mark in-place control-plane-0", "mark in-place worker-0", "resume autoscaler"}},
		{name: "the autoscaler is stopped first", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Autoscaler = Autoscaler{Enabled: true, Running: true} }, want: []string{"pause autoscaler"}},
		{name: "nothing starts while paused", edit: func(s *v1alpha1.NodeVersionSpec, _ *World) { s.Rollout.Paused = true }, want: nil, waiting: "Paused"},
		{name: "keepWorkers keeps workers", edit: func(s *v1alpha1.NodeVersionSpec, _ *World) { s.Rollout.KeepWorkers = true }, want: []string{"resume autoscaler"}},
		{name: "a node on hold is skipped", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[3].OnHold = true }, want: []string{"record intent replace-0 Upgrade machine=sandbox://t/worker-1"}},

		{name: "a node whose agent has not responded is not changed", edit: upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *World) { w.NodeRuns = nil; open(w) }), want: nil, waiting: "AgentUnknown"},
		{name: "a node whose agent does not respond in time is postponed", edit: upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.NodeRuns, w.Intents[0].Deadline = nil, modelNow.Add(-time.Second)
			open(w)
		}), want: []string{"postpone worker-0"}, waiting: "Postponed"},
		{name: "the node is cordoned", edit: upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *World) { open(w) }), want: []string{"cordon worker-0"}},
		{name: "the node is drained", edit: upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[3].Drained = false }), want: []string{"drain worker-0"}},
		{name: "the agent of a drained node starts", edit: upgrading(none), want: []string{begin}},
		{name: "an agent whose last run had another target starts", edit: upgrading(ran("done", refA, "v1.35.4")), want: []string{begin}},
		{name: "a drain that is blocked for long is postponed", edit: upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Drained, w.Nodes[3].DrainBlocker, w.Nodes[3].CordonedSince = false, "PodDisruptionBudget web/web", modelNow.Add(-2*DrainDeadline)
		}), want: []string{"drain worker-0", "postpone worker-0"}, waiting: "DrainBlocked"},
		{name: "a run finishes, although the rollout is paused and the node on hold", edit: upgrading(ran("apply", refB, "v1.36.3"), func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.Rollout.Paused, w.Nodes[3].OnHold = true, true
		}), want: nil, waiting: "NodeUpgrades"},
		{name: "an upgrade that has not started is given up when the rollout is paused", edit: upgrading(none, func(s *v1alpha1.NodeVersionSpec, _ *World) { s.Rollout.Paused = true }), want: []string{clear, release}},
		{name: "a failed upgrade is given up when the node is put on hold", edit: upgrading(failed, func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[3].OnHold = true }), want: []string{clear, release}},
		{name: "an upgrade that has not started is given up when the node is put on hold", edit: upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[3].OnHold = true }), want: []string{clear, release}},
		{name: "an upgrade that has not started is given up when the strategy changes to Replace", edit: upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Groups[1].Strategy, w.Nodes[4].InPlaceLabel = v1alpha1.ReplaceStrategy, false
		}), want: []string{clear, release, "mark in-place worker-0"}},
		{name: "an upgrade that has not started is given up when a control plane needs the surge slot", edit: upgrading(none, func(s *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[1].Components = refA }), want: []string{clear, release}},
		{name: "an upgrade that has not started is given up when its machine is deleted", edit: upgrading(none, func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Instances[3].State, w.Nodes = "Terminated", append(w.Nodes[:3], w.Nodes[4])
		}), want: []string{clear}},
		{name: "the cordon of somebody else stays", edit: upgrading(none, func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.Rollout.Paused, w.Nodes[3].Cordon = true, CordonedByOthers
		}), want: []string{clear}},
		{name: "the components of a finished run are recorded", edit: upgrading(ran("done", refB, "v1.36.3"), func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[3].Kubelet = "v1.36.3" }), want: []string{"note components worker-0 sandbox://t/worker-0"}},
		{name: "the components of a finished run are not recorded before the kubelet has the version", edit: upgrading(ran("done", refB, "v1.36.3")), want: nil, waiting: "NodeNotReady"},
		{name: "a node at the target is uncordoned", edit: upgrading(ran("done", refB, "v1.36.3"), func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Components, w.Nodes[3].Kubelet = refB, "v1.36.3"
		}), want: []string{clear, release}},
		{name: "a node at the target is not uncordoned before it is Ready", edit: upgrading(ran("done", refB, "v1.36.3"), func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Components, w.Nodes[3].Kubelet, w.Nodes[3].Ready = refB, "v1.36.3", false
		}), want: nil, waiting: "NodeNotReady"},
		{name: "a node at the target is lent to the Plan that waits for it", edit: upgrading(ran("done", refB, "v1.36.3"), func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Components, w.Nodes[3].Kubelet, w.Nodes[3].Plan = refB, "v1.36.3", "ns/os"
		}), want: []string{"lend to plan worker-0 plan=ns/os"}},
		{name: "a node is not lent before it is Ready", edit: upgrading(ran("done", refB, "v1.36.3"), func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Components, w.Nodes[3].Kubelet, w.Nodes[3].Plan, w.Nodes[3].Ready = refB, "v1.36.3", "ns/os", false
		}), want: nil, waiting: "NodeNotReady"},
		{name: "a node that the operator has not cordoned is not lent", edit: upgrading(ran("done", refB, "v1.36.3"), func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Components, w.Nodes[3].Kubelet, w.Nodes[3].Plan, w.Nodes[3].Cordon = refB, "v1.36.3", "ns/os", Uncordoned
		}), want: []string{clear}},
		{name: "a lent node stays cordoned, also while it restarts", edit: upgrading(ran("done", refB, "v1.36.3"), func(_ *v1alpha1.NodeVersionSpec, w *World) {
			n := &w.Nodes[3]
			n.Components, n.Kubelet, n.Plan, n.Lent, n.Ready = refB, "v1.36.3", "ns/os", true, false
		}), want: nil, waiting: "PlanUpgrades"},
		{name: "a new target does not start while the node is lent", edit: upgrading(ran("done", refA, "v1.35.4"), func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Plan, w.Nodes[3].Lent = "ns/os", true
		}), want: nil, waiting: "PlanUpgrades"},
		{name: "a pause does not interrupt a Plan", edit: upgrading(ran("done", refA, "v1.35.4"), func(s *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Plan, w.Nodes[3].Lent, s.Rollout.Paused = "ns/os", true, true
		}), want: nil, waiting: "PlanUpgrades"},
		{name: "a Plan that waits does not keep a node that is given up", edit: upgrading(none, func(s *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Plan, s.Rollout.Paused = "ns/os", true
		}), want: []string{clear, release}},
		{name: "a failure is reported, and other nodes of the group wait", edit: upgrading(now), want: nil, waiting: "UpgradeFailed"},
		{name: "a failed upgrade is retried", edit: upgrading(failed), want: []string{begin}},
		{name: "a failed upgrade does not block other groups", edit: upgrading(now, func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Groups = append(w.Groups, Group{Name: "more", ID: "more", Role: v1alpha1.WorkerRole, Image: image2, Strategy: v1alpha1.InPlaceStrategy})
			w.Nodes[4].Group = "more"
		}), want: []string{"record intent replace-1 Upgrade machine=sandbox://t/worker-1"}, waiting: "UpgradeFailed"},

		{name: "a control plane uses the first surge slot", edit: controlPlane, want: []string{other}},
		{name: "a control plane waits until every member of etcd is healthy", edit: func(s *v1alpha1.NodeVersionSpec, w *World) { controlPlane(s, w); w.Etcd[2].Healthy = false }, want: nil, waiting: "EtcdUnhealthy"},
		{name: "the operator's leader leaves a control plane before its drain", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			controlPlane(s, w)
			w.LeaderNode, w.Nodes[1].Cordon = "control-plane-1", CordonedByUs
			w.Intents = []Intent{{Name: "replace-0", Goal: v1alpha1.UpgradeGoal, Machine: w.Nodes[1].ProviderID, Node: "control-plane-1", Group: cpGroup, Deadline: modelNow.Add(time.Minute)}}
			w.NodeRuns = map[string]UpgradeRun{w.Nodes[1].ProviderID: none}
		}, want: []string{"yield lease control-plane-1"}},
		{name: "the only control plane is not drained", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			controlPlane(s, w)
			w.LeaderNode, w.Nodes, w.Instances, w.Etcd = "control-plane-1", w.Nodes[1:2], w.Instances[1:2], w.Etcd[1:2]
			w.Intents = []Intent{{Name: "replace-0", Goal: v1alpha1.UpgradeGoal, Machine: w.Nodes[0].ProviderID, Node: "control-plane-1", Group: cpGroup, Deadline: modelNow.Add(time.Minute)}}
			w.NodeRuns = map[string]UpgradeRun{w.Nodes[0].ProviderID: none}
		}, want: []string{"upgrade node control-plane-1 sandbox://t/control-plane-1 v1.36.3"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantDecision(t, tt.want, tt.waiting)(decide(upgradable(tt.edit)))
		})
	}
}

// kubectl shows when a failed upgrade is retried, even if the error message is long.
func TestNextTryIsReported(t *testing.T) {
	failed := UpgradeRun{Version: "v1.36.3", Components: refB, Node: "worker-0", Phase: "failed", Line: strings.Repeat("no space left on device ", 20), InPlace: true, Ended: modelNow.Add(-time.Second)}
	_, status := decide(upgradable(upgrading(failed)))
	next := failed.Ended.Add(UpgradeRetry)
	if w := status.Waiting; w == nil || w.NextTry == nil || !w.NextTry.Time.Equal(next) {
		t.Errorf("waiting is %+v, want a next try at %s", w, next)
	}
	c := *meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionReady)
	if want := "; next try at " + next.Format("15:04:05Z"); !strings.HasPrefix(c.Message, "the upgrade of worker-0 to Kubernetes v1.36.3 failed: no space") || !strings.HasSuffix(c.Message, want) || len(c.Message) > 150 {
		t.Errorf("the message of Ready is %q, want the end %q", c.Message, want)
	}
	if p := failed.progress(); !p.NextTry.Time.Equal(next) {
		t.Errorf("status of the run: %+v", p)
	}
	failed.Phase = "apply"
	if p := failed.progress(); !p.NextTry.IsZero() {
		t.Errorf("status of an active run: %+v", p)
	}
}

// A retry request permits one retry of a failed upgrade. The operator records the failed run in the
// request, retries the upgrade, and removes the request.
func TestDecideRetry(t *testing.T) {
	type change = func(*v1alpha1.NodeVersionSpec, *World)
	failed := UpgradeRun{Version: "v1.36.3", Components: refB, Node: "worker-0", Phase: "failed", Line: "the disk is full", InPlace: true, Ended: modelNow.Add(-time.Second)}
	const mark, begin, off = "run-1893499199000", "upgrade node worker-0 sandbox://t/worker-0 v1.36.3", "mark retry worker-0"
	noted := func(text string, more ...change) change {
		return func(s *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].RetryRequest = text
			for _, e := range more {
				e(s, w)
			}
		}
	}
	after := func(edit func(*UpgradeRun)) UpgradeRun {
		r := failed
		edit(&r)
		return r
	}
	// apply is the failed upgrade of Kubernetes by the agent of control-plane-1.
	apply := func(text string, phase string) change {
		return func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Before.JoinComponents = v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}
			w.LeaderNode, w.Nodes[1].RetryRequest, w.Nodes[3].Components, w.Nodes[4].Components = "control-plane-1", text, refB, refB
			w.Run = UpgradeRun{Version: "v1.36.3", Components: refB, Node: "control-plane-1", Phase: phase, Ended: modelNow.Add(-time.Second)}
		}
	}
	for _, tt := range []struct {
		name    string
		edit    change
		want    []string
		waiting string
	}{
		{name: "no retry without a request", edit: upgrading(failed), want: nil, waiting: "UpgradeFailed"},
		{name: "the failed run is recorded in the request first", edit: upgrading(failed, noted("now")), want: []string{off + " " + mark}, waiting: "UpgradeFailed"},
		{name: "the recorded run is retried", edit: upgrading(failed, noted(mark)), want: []string{begin}},
		{name: "the request is removed while the retry is active", edit: upgrading(after(func(r *UpgradeRun) { r.Phase = "apply" }), noted(mark)), want: []string{off}, waiting: "NodeUpgrades"},
		{name: "a failed retry is not repeated by the same request", edit: upgrading(after(func(r *UpgradeRun) { r.Ended = modelNow }), noted(mark)), want: []string{off}, waiting: "UpgradeFailed"},
		{name: "an active run is not retried", edit: upgrading(after(func(r *UpgradeRun) { r.Phase = "apply" }), noted("now")), want: []string{off}, waiting: "NodeUpgrades"},
		{name: "an interrupted run needs no retry request", edit: upgrading(after(func(r *UpgradeRun) { r.Ended = time.Time{} }), noted("now")), want: []string{begin, off}},
		{name: "the request stays until the agent has responded", edit: upgrading(failed, noted("now", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.NodeRuns = nil })), want: nil, waiting: "AgentUnknown"},
		{name: "the request stays until the node gets a surge slot", edit: func(s *v1alpha1.NodeVersionSpec, w *World) { s.Rollout.Paused, w.Nodes[3].RetryRequest = true, "now" }, want: nil, waiting: "Paused"},
		{name: "the request of a node at the target is removed", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Components, w.Nodes[4].Components, w.Nodes[3].RetryRequest = refB, refB, "now"
		}, want: []string{off, "resume autoscaler"}},
		{name: "the request of a node that is replaced is removed", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.Rollout.Paused, w.Groups[1].Strategy, w.Nodes[3].InPlaceLabel, w.Nodes[4].InPlaceLabel, w.Nodes[3].RetryRequest = true, v1alpha1.ReplaceStrategy, false, false, "now"
		}, want: []string{off}, waiting: "Paused"},
		{name: "the failed upgrade of the control plane is recorded in the request first", edit: apply("now", "failed"), want: []string{"mark retry control-plane-1 " + mark}, waiting: "UpgradeFailed"},
		{name: "the recorded upgrade of the control plane is retried", edit: apply(mark, "failed"), want: []string{"start upgrade control-plane-1 v1.36.3"}},
		{name: "the request is removed while the control plane is upgraded", edit: apply(mark, "plan"), want: []string{"mark retry control-plane-1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantDecision(t, tt.want, tt.waiting)(decide(upgradable(tt.edit)))
		})
	}
}
