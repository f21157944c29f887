package decision

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/v1alpha1"
)

func TestLastRun(t *testing.T) {
	const here, there = "control-plane-0", "control-plane-1"
	s := spec()
	s.KubernetesClusterVersion, s.KubernetesComponentsReference = "v1.36.3", refB
	begun := modelNow.Add(-10 * time.Minute)
	ours := UpgradeRun{Version: "v1.36.3", Components: refB, Node: here, Phase: "apply", Line: "ours", Started: begun}
	reported := func(edit func(*v1alpha1.UpgradeProgress)) *v1alpha1.UpgradeProgress {
		u := &v1alpha1.UpgradeProgress{Version: "v1.36.3", Node: there, Phase: "apply", Line: "theirs", Started: metav1.NewTime(begun)}
		if edit != nil {
			edit(u)
		}
		return u
	}
	theirs := UpgradeRun{Version: "v1.36.3", Components: refB, Node: there, Phase: "apply", Line: "theirs", Started: begun}
	ended := func(phase string) UpgradeRun { // as the agent answers
		return UpgradeRun{Version: "v1.36.3", Components: refB, Node: there, Phase: phase, Line: "theirs", Started: begun, Ended: modelNow}
	}
	with := func(r UpgradeRun, edit func(*UpgradeRun)) UpgradeRun { edit(&r); return r }
	other := func(edit func(*Node)) Lookup { // control plane
		n := machine(there, edit)
		return Lookup{Nodes: map[string]*Node{there: &n}}
	}
	old := other(func(n *Node) { n.Kubelet = "v1.35.4" })
	boot := func(id string) Lookup { return other(func(n *Node) { n.Kubelet, n.BootID = "v1.35.4", id }) }
	booted := reported(func(u *v1alpha1.UpgradeProgress) { u.BootID = "one" })
	for _, tt := range []struct {
		name     string
		journal  UpgradeRun
		reported *v1alpha1.UpgradeProgress
		answer   UpgradeRun
		known    time.Duration
		x        Lookup
		want     UpgradeRun
	}{
		{name: "no run", journal: UpgradeRun{}, x: old, want: UpgradeRun{}},
		{name: "the journal of this host prevails for its own run", journal: ours, reported: reported(func(u *v1alpha1.UpgradeProgress) { u.Node = here; u.Phase = "plan" }), x: old, want: ours},
		{name: "a lost journal means no run", journal: UpgradeRun{}, reported: reported(func(u *v1alpha1.UpgradeProgress) { u.Node = here }), x: old, want: UpgradeRun{}},
		{name: "a later run on this host prevails", journal: with(ours, func(r *UpgradeRun) { r.Started = begun.Add(time.Minute) }), reported: reported(nil), x: old, want: with(ours, func(r *UpgradeRun) { r.Started = begun.Add(time.Minute) })},
		{name: "a run on another host continues", journal: UpgradeRun{}, reported: reported(nil), x: old, want: theirs},
		{name: "a later run on another host prevails", journal: with(ours, func(r *UpgradeRun) { r.Started = begun.Add(-time.Hour); r.Phase = "failed" }), reported: reported(nil), x: old, want: theirs},
		{name: "a run on another host is done when the Node has the version", journal: UpgradeRun{}, reported: reported(nil), x: other(func(n *Node) { n.Kubelet = "v1.36.3" }), want: with(theirs, func(r *UpgradeRun) { r.Phase = "done" })},
		{name: "a run on another host is not done before the Node is Ready", journal: UpgradeRun{}, reported: reported(nil), x: other(func(n *Node) { n.Kubelet, n.Ready = "v1.36.3", false }), want: theirs},
		{name: "a run on another host that keeps the kubelet is done when its agent has answered so", answer: ended("done"), reported: reported(nil), x: old, want: with(theirs, func(r *UpgradeRun) { r.Phase = "done" })},
		{name: "a run on another host has failed when its agent has answered so, and is retried without a pause", answer: ended("failed"), reported: reported(nil), x: old, want: with(theirs, func(r *UpgradeRun) { r.Phase = "failed" })},
		{name: "the components of a finished run on another host are those of the answer", answer: with(ended("done"), func(r *UpgradeRun) { r.Components = refA }), reported: reported(nil), x: old, want: with(theirs, func(r *UpgradeRun) { r.Phase, r.Components = "done", refA })},
		{name: "a run on another host continues while its agent has not answered", reported: reported(nil), known: lostRun, x: old, want: theirs},
		{name: "a run on another host continues while its agent works", answer: with(ended("apply"), func(r *UpgradeRun) { r.Ended = time.Time{} }), reported: reported(nil), x: old, want: theirs},
		{name: "an interrupted run on another host may continue", answer: with(ended("failed"), func(r *UpgradeRun) { r.Ended = time.Time{} }), reported: reported(nil), x: old, want: theirs},
		{name: "an in-place upgrade of another host does not end the upgrade of Kubernetes", answer: with(ended("done"), func(r *UpgradeRun) { r.InPlace = true }), reported: reported(nil), x: old, want: theirs},
		{name: "an upgrade of add-ons does not end the upgrade of Kubernetes", answer: with(ended("done"), func(r *UpgradeRun) { r.Addons = true }), reported: reported(nil), x: old, want: theirs},
		{name: "a run of another version does not end the upgrade of Kubernetes", answer: with(ended("done"), func(r *UpgradeRun) { r.Version = "v1.35.9" }), reported: reported(nil), x: old, want: theirs},
		{name: "an answer about a lost run prevails over its time", answer: ended("done"), reported: reported(nil), known: lostRun + time.Second, x: old, want: with(theirs, func(r *UpgradeRun) { r.Phase = "done" })},
		{name: "a finished run on another host stays finished", journal: UpgradeRun{}, reported: reported(func(u *v1alpha1.UpgradeProgress) { u.Phase = "done" }), x: old, want: with(theirs, func(r *UpgradeRun) { r.Phase = "done" })},
		{name: "a failed run on another host is retried without a pause", journal: UpgradeRun{}, reported: reported(func(u *v1alpha1.UpgradeProgress) { u.Phase = "failed" }), x: old, want: with(theirs, func(r *UpgradeRun) { r.Phase = "failed" })},
		{name: "a run on a deleted host has failed", journal: UpgradeRun{}, reported: reported(nil), x: Lookup{}, want: with(theirs, func(r *UpgradeRun) {
			r.Phase, r.Line = "failed", "the state of the upgrade on control-plane-1 is unknown since the operator moved to another node"
		})},
		{name: "a run on another host has failed after the time that a run takes", journal: UpgradeRun{}, reported: reported(nil), known: lostRun + time.Second, x: old, want: with(theirs, func(r *UpgradeRun) {
			r.Phase, r.Line = "failed", "the state of the upgrade on control-plane-1 is unknown since the operator moved to another node"
		})},
		{name: "a run on this host that continues after a later one elsewhere prevails", journal: ours, reported: reported(func(u *v1alpha1.UpgradeProgress) {
			u.Phase, u.Started = "failed", metav1.NewTime(begun.Add(time.Minute))
		}), x: old, want: ours},
		{name: "a run on this host that reached the target prevails over a later failed one", journal: with(ours, func(r *UpgradeRun) { r.Phase = "done" }), reported: reported(func(u *v1alpha1.UpgradeProgress) {
			u.Phase, u.Started = "failed", metav1.NewTime(begun.Add(time.Minute))
		}), x: old, want: with(ours, func(r *UpgradeRun) { r.Phase = "done" })},
		{name: "a run to another target does not prevail over a later failed one", journal: with(ours, func(r *UpgradeRun) { r.Phase, r.Components = "done", refA }), reported: reported(func(u *v1alpha1.UpgradeProgress) {
			u.Phase, u.Started = "failed", metav1.NewTime(begun.Add(time.Minute))
		}), x: old, want: with(theirs, func(r *UpgradeRun) { r.Phase, r.Started = "failed", begun.Add(time.Minute) })},
		{name: "a run that continues on another host prevails over a later failed one", journal: with(ours, func(r *UpgradeRun) { r.Phase, r.Started = "failed", begun.Add(time.Minute) }), reported: reported(nil), x: old, want: theirs},
		{name: "a run on another host continues while its Node reports the same boot", journal: UpgradeRun{}, reported: booted, known: 2 * bootSeen, x: boot("one"), want: with(theirs, func(r *UpgradeRun) { r.BootID = "one" })},
		{name: "a run on another host has failed when its Node is Ready after another boot", journal: UpgradeRun{}, reported: booted, known: 2 * bootSeen, x: boot("two"), want: with(theirs, func(r *UpgradeRun) {
			r.BootID, r.Phase, r.Line = "one", "failed", "control-plane-1 was restarted during the upgrade"
		})},
		{name: "another boot of a Node that is not Ready proves nothing", journal: UpgradeRun{}, reported: booted, known: 2 * bootSeen, x: other(func(n *Node) { n.Kubelet, n.BootID, n.Ready = "v1.35.4", "two", false }), want: with(theirs, func(r *UpgradeRun) { r.BootID = "one" })},
		{name: "a kubelet that reports no boot proves nothing", journal: UpgradeRun{}, reported: booted, known: 2 * bootSeen, x: old, want: with(theirs, func(r *UpgradeRun) { r.BootID = "one" })},
		{name: "a run without a boot is waited for", journal: UpgradeRun{}, reported: reported(nil), known: 2 * bootSeen, x: boot("two"), want: theirs},
		{name: "the start time of another clock does not count", journal: UpgradeRun{}, reported: reported(func(u *v1alpha1.UpgradeProgress) { u.Started = metav1.NewTime(modelNow.Add(-lostRun - time.Second)) }), x: old, want: with(theirs, func(r *UpgradeRun) {
			r.Started = modelNow.Add(-lostRun - time.Second)
		})},
		{name: "a run of another target does not have this target's components", journal: UpgradeRun{}, reported: reported(func(u *v1alpha1.UpgradeProgress) { u.Version, u.Phase = "v1.35.9", "done" }), x: old, want: UpgradeRun{Version: "v1.35.9", Node: there, Phase: "done", Line: "theirs", Started: begun}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := LastRun(tt.journal, tt.reported, tt.answer, tt.known, s, tt.x, here)
			if d := cmp.Diff(tt.want, got, cmp.AllowUnexported(UpgradeRun{})); d != "" {
				t.Errorf("run, want and got:\n%s", d)
			}
		})
	}
}
