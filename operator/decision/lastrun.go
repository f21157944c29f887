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
func LastRun(journal UpgradeRun, reported *v1alpha1.UpgradeProgress, known time.Duration, spec v1alpha1.NodeVersionSpec, x Lookup, here string) UpgradeRun {
	if reported == nil || reported.Node == here || !reported.Started.After(journal.Started) {
		return journal
	}
	r := UpgradeRun{Version: reported.Version, Node: reported.Node, Phase: reported.Phase, Line: reported.Line, Started: reported.Started.Time}
	if reported.Version == spec.KubernetesClusterVersion {
		r.Components = spec.KubernetesComponentsReference
	}
	n := x.Nodes[reported.Node]
	switch {
	case !r.Active():
	case n != nil && n.Ready && n.Kubelet == reported.Version:
		r.Phase = "done"
	case n == nil, known > lostRun:
		r.Phase, r.Line = "failed", fmt.Sprintf("the state of the upgrade on %s is unknown since the operator moved to another node", reported.Node)
	}
	return r // a failed run here has no end time, so its retry needs no pause
}

// lostRun is longer than a run of the agent takes.
const lostRun = 30 * time.Minute
