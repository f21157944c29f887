package decision

import (
	"fmt"
	"time"

	"constellation/operator/api/v1alpha1"
)

// LastRun is the latest run of an agent that is known of: that of this host's journal,
// or, if the leader has moved since, the one that the last status speaks of.
//
// A run on another host cannot be followed. It is over when its Node has the version,
// since the kubelet comes last. Otherwise it is given as long as a run takes, so that
// no second control plane restarts meanwhile, and is then tried again from here. known
// is how long we have known of it: when it began is told by the clock of its host.
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
	return r // a failed one has not ended a moment ago, so it needs no pause
}

// lostRun is longer than a run of the agent takes.
const lostRun = 30 * time.Minute
