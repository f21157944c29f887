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
		{name: "both are older", edit: func(*v1alpha1.NodeVersionSpec, *World) {}, want: "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", phase: "upgrading", ready: "False RollingOut"},
		{name: "kube-proxy is at the target: kubeadm has upgraded both", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.KubeProxy = newProxy }, want: "", phase: "done", ready: "True WorkersKept"},
		{name: "a newer kube-proxy is not downgraded", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.KubeProxy = "registry.k8s.io/kube-proxy:v1.37.0" }, want: "", phase: "done", ready: "True WorkersKept"},
		{name: "both were removed", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons = Addons{Read: true} }, want: "", phase: "done", ready: "True WorkersKept"},
		{name: "CoreDNS was removed", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.CoreDNS = "" }, want: "upgrade add-ons control-plane-0 v1.36.3 kube-proxy", phase: "upgrading", ready: "False RollingOut"},
		{name: "kube-proxy is the user's own", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.KubeProxy = "mine.example/proxy:v1.35.4" }, want: "", phase: "done", ready: "True WorkersKept"},
		{name: "the tag of kube-proxy is no version", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.KubeProxy = "mine.example/kube-proxy:latest" }, want: "", phase: "done", ready: "True WorkersKept"},
		{name: "kube-proxy was removed, and no hop is known: the operator alone was upgraded", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons.KubeProxy = "" }, want: "", phase: "done", ready: "True WorkersKept"},
		{name: "kube-proxy was removed before this hop", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Addons.KubeProxy, w.Before.Addons = "", before(refA, "done", -time.Hour, 0)
		}, want: "upgrade add-ons control-plane-0 v1.36.3 coredns", phase: "upgrading", ready: "False RollingOut"},
		{name: "they are settled for this target: a user may change them again", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Before.Addons = before(refB, "done", -time.Hour, 0) }, want: "", phase: "done", ready: "True WorkersKept"},
		{name: "they were not read yet", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Addons = Addons{} }, want: "", ready: "True WorkersKept"},
		{name: "a control plane is older", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[2].Components = refA }, want: "", ready: "False RollingOut"},
		{name: "a control plane joins", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/control-plane-9", Name: "control-plane-9", Group: cpGroup, State: "Ready"})
		}, want: "", ready: "True WorkersKept"},
		{name: "the rollout is paused", edit: func(s *v1alpha1.NodeVersionSpec, _ *World) { s.Rollout.Paused = true }, want: "", ready: "False Paused"},
		{name: "the leader's node is not Ready", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[0].Ready = false }, want: "", ready: "True WorkersKept"},
		{name: "the agent works", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.AddonRun = run("apply", 0) }, want: "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", phase: "upgrading the line", ready: "False RollingOut"},
		{name: "the agent has finished", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.AddonRun = run("done", -time.Second) }, want: "", phase: "done", ready: "True WorkersKept"},
		{name: "a run for an earlier target does not count", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun = run("done", -time.Second)
			w.AddonRun.Components = refA
		}, want: "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", phase: "upgrading", ready: "False RollingOut"},
		{name: "a run was interrupted", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun = run("failed", 0)
			w.AddonRun.Ended = time.Time{}
		}, want: "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", phase: "upgrading", ready: "False RollingOut"},
		{name: "a first failure pauses", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.AddonRun = run("failed", -time.Second) }, want: "", phase: "failed the line 12:01:59", ready: "True WorkersKept"},
		{name: "later failures pause as long as the attempts took", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun, w.Before.Addons = run("failed", -time.Second), before(refB, "failed", -21*time.Minute-time.Second, 0)
		}, want: "", phase: "failed the line 12:20:59", ready: "True WorkersKept"},
		{name: "but not longer than an hour", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun, w.Before.Addons = run("failed", -time.Second), before(refB, "upgrading", -100*time.Hour, 0)
		}, want: "", phase: "failed the line 12:59:59", ready: "True WorkersKept"},
		{name: "the pause is over", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun, w.Before.Addons = run("failed", -time.Hour), before(refB, "failed", -2*time.Hour, -time.Second)
		}, want: "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", phase: "failed the line 12:00:00", ready: "True WorkersKept"},
		{name: "a retry is requested", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun = run("failed", -time.Second)
			w.Nodes[0].RetryRequest = w.AddonRun.RetryMark()
		}, want: "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", phase: "failed the line 12:01:59", ready: "True WorkersKept"},
		{name: "a retry does not gate the rollout", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun, w.Before.Addons = run("apply", 0), before(refB, "failed", -10*time.Minute, -time.Second)
		}, want: "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", phase: "upgrading the line", ready: "True WorkersKept"},
		{name: "a new leader pauses, too", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Before.Addons = before(refB, "failed", -time.Hour, time.Minute)
		}, want: "", phase: "failed before 12:01:00", ready: "True WorkersKept"},
		{name: "an attempt without an end gates the rollout for an hour", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.AddonRun, w.Before.Addons = run("apply", 0), before(refB, "upgrading", -61*time.Minute, 0)
			w.Before.Addons.NextTry = metav1.Time{}
		}, want: "upgrade add-ons control-plane-0 v1.36.3 coredns,kube-proxy", phase: "upgrading the line", ready: "True WorkersKept"},
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
