package decision

import (
	"fmt"
	"time"

	"constellation/operator/api/v1alpha1"
)

// LastRun returns the latest known run of an agent: that of this host's journal or, if the leader has
// moved since, the run in the last status.
//
// A run on another host cannot be followed. It is over when that host's agent has answered so. Only
// hosts that are upgraded in place can be asked, and only their kubelets may be kept. On others the
// kubelet is upgraded last, so the run is over when the Node has the version. It is also over when the
// Node is Ready after another boot, because no agent continues a run by itself then. Otherwise we wait
// as long as a run takes, so that no second control plane restarts meanwhile, and then retry from here.
//
// answer is the latest run of that host's agent; zero: not known. known is the time since the run's
// first-seen time; its start was measured by another clock.
func LastRun(journal UpgradeRun, reported *v1alpha1.UpgradeProgress, answer UpgradeRun, known time.Duration, spec v1alpha1.NodeVersionSpec, x Lookup, here string) UpgradeRun {
	if prevails(journal, reported, spec, here) {
		// The next leader compares the boot with that of the Node, which must not be that of an earlier
		// boot.
		if n := x.Nodes[here]; n == nil || n.BootID != journal.BootID {
			journal.BootID = ""
		}
		return journal
	}
	r := UpgradeRun{Version: reported.Version, Node: reported.Node, Phase: reported.Phase, Line: reported.Line, BootID: reported.BootID, Started: reported.Started.Time}
	if reported.Version == spec.KubernetesClusterVersion {
		r.Components = spec.KubernetesComponentsReference
	}
	n := x.Nodes[reported.Node]
	switch {
	case !r.Active():
	case answer.ends(reported):
		r.Phase, r.Line, r.Components = answer.Phase, answer.Line, answer.Components
	case n != nil && n.Ready && n.Kubelet == reported.Version:
		r.Phase = "done"
	case n != nil && n.Ready && rebooted(r.BootID, n.BootID) && known > bootSeen:
		r.Phase, r.Line = "failed", fmt.Sprintf("%s was restarted during the upgrade", reported.Node)
	case n == nil, known > lostRun:
		r.Phase, r.Line = "failed", fmt.Sprintf("the state of the upgrade on %s is unknown since the operator moved to another node", reported.Node)
	}
	return r // a failed run here has no end time, so its retry needs no pause
}

// ends reports whether r, as an agent answered it, is the end of the reported run. An interrupted run
// has no end: its agent may continue it.
func (r UpgradeRun) ends(reported *v1alpha1.UpgradeProgress) bool {
	return r.Node == reported.Node && r.Version == reported.Version && !r.InPlace && !r.Addons && !r.Active() && !r.Ended.IsZero()
}

// prevails reports whether the run in this host's journal is later than the one in the status. Their
// starts do not decide that alone: a run that continues after an interruption keeps its start.
func prevails(journal UpgradeRun, reported *v1alpha1.UpgradeProgress, spec v1alpha1.NodeVersionSpec, here string) bool {
	if reported == nil || reported.Node == here || journal.Active() {
		return true
	}
	active := UpgradeRun{Phase: reported.Phase}.Active()
	atTarget := journal.Version == spec.KubernetesClusterVersion && journal.Components == spec.KubernetesComponentsReference
	switch {
	case journal.Phase == "failed" && active: // a leader started it after this one had failed
		return false
	case journal.Phase == "done" && atTarget && !active:
		return true
	}
	return !reported.Started.After(journal.Started)
}

// stillReported reports whether the status has a run on a host as active that has ended. The next run
// there must wait for the status: another leader would take the boot of the earlier run for that of
// the later one.
func stillReported(reported *v1alpha1.UpgradeProgress, run UpgradeRun, host string) bool {
	return reported != nil && reported.Node == host && reported.BootID != "" && !run.Active()
}

// rebooted reports whether two boots of a machine differ. Kubelets and agents of old images report
// none.
func rebooted(before, now string) bool { return before != "" && now != "" && before != now }

const (
	// lostRun is longer than a run of the agent takes.
	lostRun = 30 * time.Minute
	// bootSeen is longer than an observation of a Ready Node may lag behind: that of a new leader may be
	// older than the status.
	bootSeen = time.Minute
)
