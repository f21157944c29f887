package operator

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
	ours := upgradeRun{version: "v1.36.3", components: refB, node: here, phase: "apply", line: "ours", started: begun}
	told := func(edit func(*v1alpha1.UpgradeProgress)) *v1alpha1.UpgradeProgress {
		u := &v1alpha1.UpgradeProgress{Version: "v1.36.3", Node: there, Phase: "apply", Line: "theirs", Started: metav1.NewTime(begun)}
		if edit != nil {
			edit(u)
		}
		return u
	}
	theirs := upgradeRun{version: "v1.36.3", components: refB, node: there, phase: "apply", line: "theirs", started: begun}
	with := func(r upgradeRun, edit func(*upgradeRun)) upgradeRun { edit(&r); return r }
	other := func(edit func(*node)) lookup { // control plane
		n := machine(there, edit)
		return lookup{nodes: map[string]*node{there: &n}}
	}
	old := other(func(n *node) { n.kubelet = "v1.35.4" })
	for _, tt := range []struct {
		name    string
		journal upgradeRun
		told    *v1alpha1.UpgradeProgress
		known   time.Duration
		x       lookup
		want    upgradeRun
	}{
		{"nobody ever ran", upgradeRun{}, nil, 0, old, upgradeRun{}},
		{"the journal of this host knows best of its own run", ours, told(func(u *v1alpha1.UpgradeProgress) { u.Node = here; u.Phase = "plan" }), 0, old, ours},
		{"a journal that was lost is believed", upgradeRun{}, told(func(u *v1alpha1.UpgradeProgress) { u.Node = here }), 0, old, upgradeRun{}},
		{"a run here after that of another host counts", with(ours, func(r *upgradeRun) { r.started = begun.Add(time.Minute) }), told(nil), 0, old, with(ours, func(r *upgradeRun) { r.started = begun.Add(time.Minute) })},
		{"a run on another host goes on", upgradeRun{}, told(nil), 0, old, theirs},
		{"and is later than one here", with(ours, func(r *upgradeRun) { r.started = begun.Add(-time.Hour); r.phase = "failed" }), told(nil), 0, old, theirs},
		{"it is over when the Node has the version", upgradeRun{}, told(nil), 0, other(func(n *node) { n.kubelet = "v1.36.3" }), with(theirs, func(r *upgradeRun) { r.phase = "done" })},
		{"but not before the Node is Ready", upgradeRun{}, told(nil), 0, other(func(n *node) { n.kubelet, n.ready = "v1.36.3", false }), theirs},
		{"one that finished stays so", upgradeRun{}, told(func(u *v1alpha1.UpgradeProgress) { u.Phase = "done" }), 0, old, with(theirs, func(r *upgradeRun) { r.phase = "done" })},
		{"one that failed may be tried again at once", upgradeRun{}, told(func(u *v1alpha1.UpgradeProgress) { u.Phase = "failed" }), 0, old, with(theirs, func(r *upgradeRun) { r.phase = "failed" })},
		{"with the host it is lost", upgradeRun{}, told(nil), 0, lookup{}, with(theirs, func(r *upgradeRun) {
			r.phase, r.line = "failed", "nothing was heard of the upgrade on control-plane-1 since the operator has left it"
		})},
		{"and after the time that a run takes", upgradeRun{}, told(nil), lostRun + time.Second, old, with(theirs, func(r *upgradeRun) {
			r.phase, r.line = "failed", "nothing was heard of the upgrade on control-plane-1 since the operator has left it"
		})},
		{"but not by what another clock says of its beginning", upgradeRun{}, told(func(u *v1alpha1.UpgradeProgress) { u.Started = metav1.NewTime(modelNow.Add(-lostRun - time.Second)) }), 0, old, with(theirs, func(r *upgradeRun) {
			r.started = modelNow.Add(-lostRun - time.Second)
		})},
		{"that of another target says nothing of this one's components", upgradeRun{}, told(func(u *v1alpha1.UpgradeProgress) { u.Version, u.Phase = "v1.35.9", "done" }), 0, old, upgradeRun{version: "v1.35.9", node: there, phase: "done", line: "theirs", started: begun}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := lastRun(tt.journal, tt.told, tt.known, s, tt.x, here)
			if d := cmp.Diff(tt.want, got, cmp.AllowUnexported(upgradeRun{})); d != "" {
				t.Errorf("run, want and got:\n%s", d)
			}
		})
	}
}
