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
	told := func(edit func(*v1alpha1.UpgradeProgress)) *v1alpha1.UpgradeProgress {
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
	for _, tt := range []struct {
		name    string
		journal UpgradeRun
		told    *v1alpha1.UpgradeProgress
		known   time.Duration
		x       Lookup
		want    UpgradeRun
	}{
		{"nobody ever ran", UpgradeRun{}, nil, 0, old, UpgradeRun{}},
		{"the journal of this host knows best of its own run", ours, told(func(u *v1alpha1.UpgradeProgress) { u.Node = here; u.Phase = "plan" }), 0, old, ours},
		{"a journal that was lost is believed", UpgradeRun{}, told(func(u *v1alpha1.UpgradeProgress) { u.Node = here }), 0, old, UpgradeRun{}},
		{"a run here after that of another host counts", with(ours, func(r *UpgradeRun) { r.Started = begun.Add(time.Minute) }), told(nil), 0, old, with(ours, func(r *UpgradeRun) { r.Started = begun.Add(time.Minute) })},
		{"a run on another host goes on", UpgradeRun{}, told(nil), 0, old, theirs},
		{"and is later than one here", with(ours, func(r *UpgradeRun) { r.Started = begun.Add(-time.Hour); r.Phase = "failed" }), told(nil), 0, old, theirs},
		{"it is over when the Node has the version", UpgradeRun{}, told(nil), 0, other(func(n *Node) { n.Kubelet = "v1.36.3" }), with(theirs, func(r *UpgradeRun) { r.Phase = "done" })},
		{"but not before the Node is Ready", UpgradeRun{}, told(nil), 0, other(func(n *Node) { n.Kubelet, n.Ready = "v1.36.3", false }), theirs},
		{"one that finished stays so", UpgradeRun{}, told(func(u *v1alpha1.UpgradeProgress) { u.Phase = "done" }), 0, old, with(theirs, func(r *UpgradeRun) { r.Phase = "done" })},
		{"one that failed may be tried again at once", UpgradeRun{}, told(func(u *v1alpha1.UpgradeProgress) { u.Phase = "failed" }), 0, old, with(theirs, func(r *UpgradeRun) { r.Phase = "failed" })},
		{"with the host it is lost", UpgradeRun{}, told(nil), 0, Lookup{}, with(theirs, func(r *UpgradeRun) {
			r.Phase, r.Line = "failed", "nothing was heard of the upgrade on control-plane-1 since the operator has left it"
		})},
		{"and after the time that a run takes", UpgradeRun{}, told(nil), lostRun + time.Second, old, with(theirs, func(r *UpgradeRun) {
			r.Phase, r.Line = "failed", "nothing was heard of the upgrade on control-plane-1 since the operator has left it"
		})},
		{"but not by what another clock says of its beginning", UpgradeRun{}, told(func(u *v1alpha1.UpgradeProgress) { u.Started = metav1.NewTime(modelNow.Add(-lostRun - time.Second)) }), 0, old, with(theirs, func(r *UpgradeRun) {
			r.Started = modelNow.Add(-lostRun - time.Second)
		})},
		{"that of another target says nothing of this one's components", UpgradeRun{}, told(func(u *v1alpha1.UpgradeProgress) { u.Version, u.Phase = "v1.35.9", "done" }), 0, old, UpgradeRun{Version: "v1.35.9", Node: there, Phase: "done", Line: "theirs", Started: begun}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := LastRun(tt.journal, tt.told, tt.known, s, tt.x, here)
			if d := cmp.Diff(tt.want, got, cmp.AllowUnexported(UpgradeRun{})); d != "" {
				t.Errorf("run, want and got:\n%s", d)
			}
		})
	}
}
