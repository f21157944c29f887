package decision

import (
	"fmt"
	"time"

	"constellation/operator/api/v1alpha1"
)

// LastRun returns the latest known run of an agent: that of this host's journal or, if the leader has
// moved since, the run in the last status.
//
// A run on another host cannot be followed. It is over when its Node has the version, because the
// kubelet is upgraded last. Otherwise we wait as long as a run takes, so that no second control
// plane restarts meanwhile, and then retry from here. known is the time since its first-seen
// time; its start was measured by another clock.
func LastRun(journal UpgradeRun, told *v1alpha1.UpgradeProgress, known time.Duration, spec v1alpha1.NodeVersionSpec, x Lookup, here string) UpgradeRun {
	if told == nil || told.Node == here || !told.Started.After(journal.Started) {
		return journal
	}
	r := UpgradeRun{Version: told.Version, Node: told.Node, Phase: told.Phase, Line: told.Line, Started: told.Started.Time}
	if told.Version == spec.KubernetesClusterVersion {
		r.Components = spec.KubernetesComponentsReference
	}
	n := x.Nodes[told.Node]
	switch {
	case !r.Active():
	case n != nil && n.Ready && n.Kubelet == told.Version:
		r.Phase = "done"
	case n == nil, known > lostRun:
		r.Phase, r.Line = "failed", fmt.Sprintf("nothing was heard of the upgrade on %s since the operator has left it", told.Node)
	}
	return r // a failed run here has no end time, so its retry needs no pause
}

// lostRun is longer than a run of the agent takes.
const lostRun = 30 * time.Minute
