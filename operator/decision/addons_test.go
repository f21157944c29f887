package decision

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/v1alpha1"
)

const (
	oldProxy = "registry.k8s.io/kube-proxy:v1.35.4"
	newProxy = "mirror.example:5000/k8s/kube-proxy:v1.36.3@sha256:0123"
	anyDNS   = "registry.k8s.io/coredns/coredns:v1.13.1"
)

// TestAddonsFollowTheLastControlPlane decides about the add-ons of a cluster whose control planes are at
// the target, and whose workers are kept.
func TestAddonsFollowTheLastControlPlane(t *testing.T) {
	at := func(d time.Duration) metav1.Time { return metav1.NewTime(modelNow.Add(d)) }
	run := func(phase string, ended time.Duration) UpgradeRun {
		return UpgradeRun{Addons: true, Version: "v1.36.3", Components: refB, Node: "control-plane-0", Phase: phase, Line: "the line", Ended: modelNow.Add(ended)}
	}
	before := func(components, phase string, since, next time.Duration) *v1alpha1.AddonsProgress {
		return &v1alpha1.AddonsProgress{Components: components, Phase: phase, Message: "before", Since: at(since), NextTry: at(next)}
	}
	for _, tt := range []struct {
		name  string
		edit  func(*v1alpha1.NodeVersionSpec, *World)
		want  string // action
		phase string // of the status
		ready string
	}{
		{"both are older", func(*v1alpha1.NodeVersionSpec, *World) {}, "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", "upgrading", "False RollingOut"},
		{"kube-proxy is at the target: kubeadm has upgraded both", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.KubeProxy = newProxy }, "", "done", "True WorkersKept"},
		{"a newer kube-proxy is not downgraded", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.KubeProxy = "registry.k8s.io/kube-proxy:v1.37.0" }, "", "done", "True WorkersKept"},
		{"both were removed", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons = Addons{Read: true} }, "", "done", "True WorkersKept"},
		{"CoreDNS was removed", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.CoreDNS = "" }, "upgrade add-ons control-plane-0 v1.36.3 kube-proxy", "upgrading", "False RollingOut"},
		{"kube-proxy is the user's own", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.KubeProxy = "mine.example/proxy:v1.35.4" }, "", "done", "True WorkersKept"},
		{"the tag of kube-proxy is no version", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.KubeProxy = "mine.example/kube-proxy:latest" }, "", "done", "True WorkersKept"},
		{"kube-proxy was removed, and no hop is known: the operator alone was upgraded", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.KubeProxy = "" }, "", "done", "True WorkersKept"},
		{"kube-proxy was removed before this hop", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Addons.KubeProxy, w.Before.Addons = "", before(refA, "done", -time.Hour, 0)
		}, "upgrade add-ons control-plane-0 v1.36.3 coredns", "upgrading", "False RollingOut"},
		{"they are settled for this target: a user may change them again", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Before.Addons = before(refB, "done", -time.Hour, 0) }, "", "done", "True WorkersKept"},
		{"they were not read yet", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons = Addons{} }, "", "", "True WorkersKept"},
		{"a control plane is older", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[2].Components = refA }, "", "", "False RollingOut"},
		{"a control plane joins", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/control-plane-9", Name: "control-plane-9", Group: cpGroup, State: "Ready"})
		}, "", "", "True WorkersKept"},
		{"the rollout is paused", func(s *v1alpha1.NodeVersionSpec, _ *World) { s.Rollout.Paused = true }, "", "", "False Paused"},
		{"the leader's node is not Ready", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[0].Ready = false }, "", "", "True WorkersKept"},
		{"the agent works", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.AddonRun = run("apply", 0) }, "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", "upgrading the line", "False RollingOut"},
		{"the agent has finished", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.AddonRun = run("done", -time.Second) }, "", "done", "True WorkersKept"},
		{"a run for an earlier target does not count", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun = run("done", -time.Second)
			w.AddonRun.Components = refA
		}, "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", "upgrading", "False RollingOut"},
		{"a run was interrupted", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun = run("failed", 0)
			w.AddonRun.Ended = time.Time{}
		}, "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", "upgrading", "False RollingOut"},
		{"a first failure pauses", func(_ *v1alpha1.NodeVersionSpec, w *World) { w.AddonRun = run("failed", -time.Second) }, "", "failed the line 12:01:59", "True WorkersKept"},
		{"later failures pause as long as the attempts took", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun, w.Before.Addons = run("failed", -time.Second), before(refB, "failed", -21*time.Minute-time.Second, 0)
		}, "", "failed the line 12:20:59", "True WorkersKept"},
		{"but not longer than an hour", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun, w.Before.Addons = run("failed", -time.Second), before(refB, "upgrading", -100*time.Hour, 0)
		}, "", "failed the line 12:59:59", "True WorkersKept"},
		{"the pause is over", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun, w.Before.Addons = run("failed", -time.Hour), before(refB, "failed", -2*time.Hour, -time.Second)
		}, "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", "failed the line 12:00:00", "True WorkersKept"},
		{"a retry is requested", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun = run("failed", -time.Second)
			w.Nodes[0].RetryRequest = w.AddonRun.RetryMark()
		}, "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", "failed the line 12:01:59", "True WorkersKept"},
		{"a retry does not gate the rollout", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun, w.Before.Addons = run("apply", 0), before(refB, "failed", -10*time.Minute, -time.Second)
		}, "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", "upgrading the line", "True WorkersKept"},
		{"a new leader pauses, too", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Before.Addons = before(refB, "failed", -time.Hour, time.Minute)
		}, "", "failed before 12:01:00", "True WorkersKept"},
		{"an attempt without an end gates the rollout for an hour", func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun, w.Before.Addons = run("apply", 0), before(refB, "upgrading", -61*time.Minute, 0)
			w.Before.Addons.NextTry = metav1.Time{}
		}, "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", "upgrading the line", "True WorkersKept"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, w := upgradable(func(s *v1alpha1.NodeVersionSpec, w *World) {
				s.Rollout.KeepWorkers = true
				w.LeaderNode, w.Addons = "control-plane-0", Addons{Read: true, CoreDNS: anyDNS, KubeProxy: oldProxy}
				w.Autoscaler = Autoscaler{Enabled: true}
				tt.edit(s, w)
			})
			d := Decide(s, w)
			got, phase := "", ""
			for _, a := range d.Actions {
				if a.Kind == UpgradeAddons {
					got += a.String()
				}
			}
			status := d.Status()
			if a := status.Addons; a != nil && a.Components == refB {
				phase = a.Phase
				if a.Phase != "done" && a.Message != "" {
					phase += " " + a.Message
				}
				if a.Phase == "failed" {
					phase += " " + a.NextTry.UTC().Format("15:04:05")
				}
			}
			if diff := cmp.Diff([]string{tt.want, tt.phase, tt.ready}, []string{got, phase, conditionText(status, "Ready")}); diff != "" {
				t.Errorf("action, phase and Ready, want and got:\n%s", diff)
			}
		})
	}
}

// A failure of the add-ons is the reason of Ready, if there is no other, and the next upgrade of
// Kubernetes waits for a run in progress.
func TestAddonsAreReported(t *testing.T) {
	s, w := upgradable(func(s *v1alpha1.NodeVersionSpec, w *World) {
		w.LeaderNode, w.Addons = "control-plane-0", Addons{Read: true, CoreDNS: anyDNS, KubeProxy: oldProxy}
		w.AddonRun = UpgradeRun{Addons: true, Version: "v1.36.3", Components: refB, Node: "control-plane-0", Phase: "failed", Line: "no space left on device", Ended: modelNow}
		for i := range w.Nodes {
			w.Nodes[i].Components, w.Nodes[i].Kubelet = refB, "v1.36.3"
		}
		w.Autoscaler = Autoscaler{Enabled: true}
	})
	status := Decide(s, w).Status()
	if got := conditionText(status, "Ready"); got != "True AddonsFailed" {
		t.Errorf("Ready is %s", got)
	}
	for _, c := range status.Conditions {
		if c.Type == "Ready" && !strings.Contains(c.Message, "no space left on device") {
			t.Errorf("message %q", c.Message)
		}
	}

	s, w = upgradable(func(_ *v1alpha1.NodeVersionSpec, w *World) {
		w.Before.JoinComponents, w.Autoscaler = v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}, Autoscaler{PausedByUs: true}
		for i := range w.Nodes {
			w.Nodes[i].Components, w.Nodes[i].Kubelet = refA, "v1.35.4"
		}
	})
	for _, working := range []bool{false, true} {
		if working {
			w.AddonRun = UpgradeRun{Addons: true, Version: "v1.35.4", Components: refA, Node: "control-plane-0", Phase: "apply"}
		}
		starts, waits := false, false
		d := Decide(s, w)
		for _, a := range d.Actions {
			starts = starts || a.Kind == StartUpgrade
		}
		for _, a := range d.Waits {
			waits = waits || a.Reason == "AddonsUpgrade"
		}
		if starts == working || waits != working {
			t.Errorf("while the agent upgrades add-ons (%t): starts %t, waits %t", working, starts, waits)
		}
	}
}
