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
		{"one control plane begins", func(*v1alpha1.NodeVersionSpec, *World) {}, RecordIntent, "control-plane-0", ""},
		{"none begins while kubeadm would give an older etcd", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.KubeadmEtcdTag = "" }, 0, "", "EtcdTagMissing"},
		{"none begins before kubeadm's configuration was read, which stalls nothing", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.KubeadmEtcdTag, w.KubeadmRead = "", false
		}, 0, "", "EtcdTagUnread"},
		{"none begins while a member is unhealthy", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Etcd[2].Healthy = false }, 0, "", "EtcdUnhealthy"},
		{"a run before the target named an etcd does not count", func(_ *v1alpha1.NodeVersionSpec, w *World) { first(w, before) }, UpgradeNode, "control-plane-0", ""},
		{"after the run the member's version is waited for", func(_ *v1alpha1.NodeVersionSpec, w *World) { first(w, hopped) }, 0, "", "EtcdMemberOutdated"},
		{"directly after the run the member may still restart", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			run := hopped
			run.Ended = modelNow.Add(-time.Second)
			first(w, run)
		}, 0, "", "NodeUpgrades"},
		{"a requested retry names the run, although it is done", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			first(w, hopped)
			w.Nodes[0].RetryRequest = "now"
		}, MarkRetry, "control-plane-0", "EtcdMemberOutdated"},
		{"then the agent runs again", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			first(w, hopped)
			w.Nodes[0].RetryRequest = hopped.failed().RetryMark()
		}, UpgradeNode, "control-plane-0", ""},
		{"once: the request ends with the next run", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			run := hopped
			run.Ended = run.Ended.Add(time.Minute)
			first(w, run)
			w.Nodes[0].RetryRequest = hopped.failed().RetryMark()
		}, MarkRetry, "control-plane-0", "EtcdMemberOutdated"},
		{"a node that is skipped meanwhile is given up", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			first(w, hopped)
			w.Nodes[0].OnHold = true
		}, ClearIntent, "control-plane-0", "ControlPlaneHeld"},
		{"a member with the version ends the upgrade", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			first(w, hopped)
			w.Nodes[0].Etcd = "3.6.11"
		}, ClearIntent, "control-plane-0", ""},
		{"then the next one begins", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[0].Etcd = "3.6.11" }, RecordIntent, "control-plane-1", ""},
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
		{"an older member", "3.6.11-0", "3.6.8", true},
		{"all members have the version", "3.6.11-0", "3.6.11", false},
		{"the target names no etcd", "", "3.6.8", false},
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
