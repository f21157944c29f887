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
		known    time.Duration
		x        Lookup
		want     UpgradeRun
	}{
		{"no run", UpgradeRun{}, nil, 0, old, UpgradeRun{}},
		{"the journal of this host prevails for its own run", ours, reported(func(u *v1alpha1.UpgradeProgress) { u.Node = here; u.Phase = "plan" }), 0, old, ours},
		{"a lost journal means no run", UpgradeRun{}, reported(func(u *v1alpha1.UpgradeProgress) { u.Node = here }), 0, old, UpgradeRun{}},
		{"a later run on this host prevails", with(ours, func(r *UpgradeRun) { r.Started = begun.Add(time.Minute) }), reported(nil), 0, old, with(ours, func(r *UpgradeRun) { r.Started = begun.Add(time.Minute) })},
		{"a run on another host continues", UpgradeRun{}, reported(nil), 0, old, theirs},
		{"a later run on another host prevails", with(ours, func(r *UpgradeRun) { r.Started = begun.Add(-time.Hour); r.Phase = "failed" }), reported(nil), 0, old, theirs},
		{"a run on another host is done when the Node has the version", UpgradeRun{}, reported(nil), 0, other(func(n *Node) { n.Kubelet = "v1.36.3" }), with(theirs, func(r *UpgradeRun) { r.Phase = "done" })},
		{"a run on another host is not done before the Node is Ready", UpgradeRun{}, reported(nil), 0, other(func(n *Node) { n.Kubelet, n.Ready = "v1.36.3", false }), theirs},
		{"a finished run on another host stays finished", UpgradeRun{}, reported(func(u *v1alpha1.UpgradeProgress) { u.Phase = "done" }), 0, old, with(theirs, func(r *UpgradeRun) { r.Phase = "done" })},
		{"a failed run on another host is retried without a pause", UpgradeRun{}, reported(func(u *v1alpha1.UpgradeProgress) { u.Phase = "failed" }), 0, old, with(theirs, func(r *UpgradeRun) { r.Phase = "failed" })},
		{"a run on a deleted host has failed", UpgradeRun{}, reported(nil), 0, Lookup{}, with(theirs, func(r *UpgradeRun) {
			r.Phase, r.Line = "failed", "the state of the upgrade on control-plane-1 is unknown since the operator moved to another node"
		})},
		{"a run on another host has failed after the time that a run takes", UpgradeRun{}, reported(nil), lostRun + time.Second, old, with(theirs, func(r *UpgradeRun) {
			r.Phase, r.Line = "failed", "the state of the upgrade on control-plane-1 is unknown since the operator moved to another node"
		})},
		{"a run on this host that continues after a later one elsewhere prevails", ours, reported(func(u *v1alpha1.UpgradeProgress) {
			u.Phase, u.Started = "failed", metav1.NewTime(begun.Add(time.Minute))
		}), 0, old, ours},
		{"a run on this host that reached the target prevails over a later failed one", with(ours, func(r *UpgradeRun) { r.Phase = "done" }), reported(func(u *v1alpha1.UpgradeProgress) {
			u.Phase, u.Started = "failed", metav1.NewTime(begun.Add(time.Minute))
		}), 0, old, with(ours, func(r *UpgradeRun) { r.Phase = "done" })},
		{"a run to another target does not prevail over a later failed one", with(ours, func(r *UpgradeRun) { r.Phase, r.Components = "done", refA }), reported(func(u *v1alpha1.UpgradeProgress) {
			u.Phase, u.Started = "failed", metav1.NewTime(begun.Add(time.Minute))
		}), 0, old, with(theirs, func(r *UpgradeRun) { r.Phase, r.Started = "failed", begun.Add(time.Minute) })},
		{"a run that continues on another host prevails over a later failed one", with(ours, func(r *UpgradeRun) { r.Phase, r.Started = "failed", begun.Add(time.Minute) }), reported(nil), 0, old, theirs},
		{"a run on another host continues while its Node reports the same boot", UpgradeRun{}, booted, 2 * bootSeen, boot("one"), with(theirs, func(r *UpgradeRun) { r.BootID = "one" })},
		{"a run on another host has failed when its Node is Ready after another boot", UpgradeRun{}, booted, 2 * bootSeen, boot("two"), with(theirs, func(r *UpgradeRun) {
			r.BootID, r.Phase, r.Line = "one", "failed", "control-plane-1 was restarted during the upgrade"
		})},
		{"another boot of a Node that is not Ready proves nothing", UpgradeRun{}, booted, 2 * bootSeen, other(func(n *Node) { n.Kubelet, n.BootID, n.Ready = "v1.35.4", "two", false }), with(theirs, func(r *UpgradeRun) { r.BootID = "one" })},
		{"a kubelet that reports no boot proves nothing", UpgradeRun{}, booted, 2 * bootSeen, old, with(theirs, func(r *UpgradeRun) { r.BootID = "one" })},
		{"a run without a boot is waited for", UpgradeRun{}, reported(nil), 2 * bootSeen, boot("two"), theirs},
		{"the start time of another clock does not count", UpgradeRun{}, reported(func(u *v1alpha1.UpgradeProgress) { u.Started = metav1.NewTime(modelNow.Add(-lostRun - time.Second)) }), 0, old, with(theirs, func(r *UpgradeRun) {
			r.Started = modelNow.Add(-lostRun - time.Second)
		})},
		{"a run of another target does not have this target's components", UpgradeRun{}, reported(func(u *v1alpha1.UpgradeProgress) { u.Version, u.Phase = "v1.35.9", "done" }), 0, old, UpgradeRun{Version: "v1.35.9", Node: there, Phase: "done", Line: "theirs", Started: begun}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := LastRun(tt.journal, tt.reported, tt.known, s, tt.x, here)
			if d := cmp.Diff(tt.want, got, cmp.AllowUnexported(UpgradeRun{})); d != "" {
				t.Errorf("run, want and got:\n%s", d)
			}
		})
	}
}
