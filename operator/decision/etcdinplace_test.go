package decision

import (
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	"constellation/operator/api/v1alpha1"
)

// Control planes that stay get the etcd that the target names by their own agents, which have
// installed the target's components before.
func TestEtcdComesInPlace(t *testing.T) {
	const tag = "3.6.11-0"
	hop := func(edit func(*v1alpha1.NodeVersionSpec, *World)) (Decision, v1alpha1.NodeVersionStatus) {
		s, w := upgradable(func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.EtcdImageTag, s.Rollout.KeepWorkers = tag, true
			w.KubeadmEtcdTag, w.KubeadmRead = tag, true
			w.Groups[0].Strategy = v1alpha1.InPlaceStrategy
			for i := range 3 {
				n := &w.Nodes[i]
				n.Etcd, n.InPlaceLabel = "3.6.8", true
			}
			edit(s, w)
		})
		d := Decide(s, w)
		return *d, d.Status()
	}
	first := func(w *World, run UpgradeRun) {
		n := &w.Nodes[0]
		w.LeaderNode = w.Nodes[1].Name
		w.Intents = []Intent{{Name: "replace-0", Goal: v1alpha1.UpgradeGoal, Machine: n.ProviderID, Node: n.Name, Group: n.Group, Deadline: modelNow.Add(time.Minute)}}
		w.NodeRuns = map[string]UpgradeRun{n.ProviderID: run}
		n.Cordon, n.CordonedSince, n.Drained = CordonedByUs, modelNow.Add(-time.Minute), true
	}
	before := UpgradeRun{Version: "v1.36.3", Components: refB, Node: "control-plane-0", Phase: "done", InPlace: true, Ended: modelNow.Add(-time.Hour)}
	hopped := before
	hopped.Etcd = tag
	for _, tt := range []struct {
		name    string
		edit    func(*v1alpha1.NodeVersionSpec, *World)
		want    ActionKind
		node    string
		waiting string
	}{
		{name: "one control plane begins", edit: func(*v1alpha1.NodeVersionSpec, *World) {}, want: RecordIntent, node: "control-plane-0"},
		{name: "none begins while kubeadm would give an older etcd", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.KubeadmEtcdTag = "" }, want: 0, waiting: "EtcdTagMissing"},
		{name: "none begins before kubeadm's configuration was read, which stalls nothing", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.KubeadmEtcdTag, w.KubeadmRead = "", false
		}, want: 0, waiting: "EtcdTagUnread"},
		{name: "none begins while a member is unhealthy", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Etcd[2].Healthy = false }, want: 0, waiting: "EtcdUnhealthy"},
		{name: "a run before the target named an etcd does not count", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { first(w, before) }, want: UpgradeNode, node: "control-plane-0"},
		{name: "after the run the member's version is waited for", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { first(w, hopped) }, want: 0, waiting: "EtcdMemberOutdated"},
		{name: "directly after the run the member may still restart", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			run := hopped
			run.Ended = modelNow.Add(-time.Second)
			first(w, run)
		}, want: 0, waiting: "NodeUpgrades"},
		{name: "a requested retry names the run, although it is done", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			first(w, hopped)
			w.Nodes[0].RetryRequest = "now"
		}, want: MarkRetry, node: "control-plane-0", waiting: "EtcdMemberOutdated"},
		{name: "then the agent runs again", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			first(w, hopped)
			w.Nodes[0].RetryRequest = hopped.failed().RetryMark()
		}, want: UpgradeNode, node: "control-plane-0"},
		{name: "once: the request ends with the next run", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			run := hopped
			run.Ended = run.Ended.Add(time.Minute)
			first(w, run)
			w.Nodes[0].RetryRequest = hopped.failed().RetryMark()
		}, want: MarkRetry, node: "control-plane-0", waiting: "EtcdMemberOutdated"},
		{name: "a node that is skipped meanwhile is given up", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			first(w, hopped)
			w.Nodes[0].OnHold = true
		}, want: ClearIntent, node: "control-plane-0", waiting: "ControlPlaneHeld"},
		{name: "a member with the version ends the upgrade", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			first(w, hopped)
			w.Nodes[0].Etcd = "3.6.11"
		}, want: ClearIntent, node: "control-plane-0"},
		{name: "then the next one begins", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[0].Etcd = "3.6.11" }, want: RecordIntent, node: "control-plane-1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d, status := hop(tt.edit)
			moves := slices.DeleteFunc(slices.Clone(d.Actions), func(a Action) bool {
				return a.Kind != RecordIntent && a.Kind != UpgradeNode && a.Kind != ClearIntent && a.Kind != MarkRetry
			})
			reason := ""
			if status.Waiting != nil {
				reason = status.Waiting.Reason
			}
			if reason != tt.waiting || (tt.node == "") != (len(moves) == 0) {
				t.Fatalf("actions %v, waiting %+v", d.Actions, status.Waiting)
			}
			if stalled := meta.IsStatusConditionTrue(status.Conditions, "Stalled"); stalled != (tt.waiting != "" && !slices.Contains([]string{"EtcdTagUnread", "NodeUpgrades"}, tt.waiting)) {
				t.Errorf("Stalled is %t while %q is waited for", stalled, tt.waiting)
			}
			if tt.node == "" {
				return
			}
			a := moves[0]
			node := a.Node
			if a.Intent.Node != "" {
				node = a.Intent.Node
			}
			if len(moves) != 1 || a.Kind != tt.want || node != tt.node || a.Kind == UpgradeNode && a.Etcd != tag {
				t.Errorf("actions %v, want %s of %s", moves, tt.want, tt.node)
			}
		})
	}
}

// A mark fits into a token, whatever the length of the tag.
func TestEtcdMark(t *testing.T) {
	controlPlane, worker := &Node{Role: v1alpha1.ControlPlaneRole}, &Node{Role: v1alpha1.WorkerRole}
	mark := func(tag string, n *Node) string {
		d := Decision{observed: observed{spec: v1alpha1.NodeVersionSpec{EtcdImageTag: tag}}}
		return d.etcdMark(n)
	}
	long, other := mark("3.6.11-0-of-a-very-long-build", controlPlane), mark("3.6.11-0-of-another-long-build", controlPlane)
	if mark("3.6.11-0", controlPlane) != "3.6.11-0" || mark("", controlPlane) != "" || mark("3.6.11-0", worker) != "" || len(long) != longestMark || long == other {
		t.Errorf("marks %q, %q", long, other)
	}
}

// The operator reads kubeadm's configuration only while it decides something.
func TestEtcdTagIsWantedForAnOutdatedControlPlane(t *testing.T) {
	for _, tt := range []struct {
		name, tag, last string // the target's tag, and the version of the last member
		want            bool
	}{
		{name: "an older member", tag: "3.6.11-0", last: "3.6.8", want: true},
		{name: "all members have the version", tag: "3.6.11-0", last: "3.6.11", want: false},
		{name: "the target names no etcd", last: "3.6.8", want: false},
	} {
		s, w := upgradable(func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.EtcdImageTag = tt.tag
			for i, v := range []string{"3.6.11", "3.6.11", tt.last} {
				w.Nodes[i].Etcd, w.Nodes[i].Image, w.Nodes[i].Components = v, s.Image, s.KubernetesComponentsReference
			}
		})
		if got := Decide(s, w).WantsEtcdTag(); got != tt.want {
			t.Errorf("%s: wanted is %t", tt.name, got)
		}
	}
}
