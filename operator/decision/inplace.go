package decision

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/operator/api/v1alpha1"
)

// In groups with the strategy InPlace, the node's own agent installs the target's components. Each
// upgrade holds a surge slot. No machine is created or deleted, so one node is unavailable
// meanwhile.

// advanceUpgrade takes the next step of an in-place upgrade. The order is: the agent answers,
// cordon, drain, the agent's run, Ready again, components recorded. Then the intent is deleted,
// and the node is uncordoned.
func (d *Decision) advanceUpgrade(in *Intent) {
	n, clear := d.NodeOf[in.Machine], Action{Kind: ClearIntent, Intent: *in}
	run, heard := d.w.NodeRuns[in.Machine]
	overdue := d.w.Now.After(in.Deadline)
	switch {
	case Gone(d.Instance(in.Machine)):
		d.do(clear)
		return
	case !d.must(ruleInPlaceEnds, !run.Active()):
		if n != nil {
			d.keepCordoned[n.Name] = true
		}
		text := fmt.Sprintf("the agent of %s upgrades it to Kubernetes %s", in.Node, run.Version)
		if run.Line != "" {
			text += ": " + TruncateMessage(run.Line)
		}
		d.Wait("NodeUpgrades", text, NodeReference(in.Node), time.Time{})
		return
	case n == nil:
		if d.when(ruleOverdue, overdue) {
			d.do(clear)
			return
		}
		d.Wait("NodeMissing", fmt.Sprintf("%s is being upgraded, and its Node does not exist at the moment", in.Node), NodeReference(in.Node), in.Deadline)
		return
	}
	if !n.Confirmed {
		d.keepCordoned[n.Name] = true
		d.Wait("MachineUnknown", fmt.Sprintf("the cloud returns no data about the machine of %s at the moment, so the node is not upgraded", n.Name), NodeReference(n.Name), time.Time{})
		return
	}
	// This comes first: the target may have changed back to what the Node reports while its agent
	// installed another one.
	if what := d.finished(n, run); what != "" {
		d.keepCordoned[n.Name] = true
		d.do(Action{Kind: NoteComponents, Node: n.Name, Machine: n.ProviderID, Components: what})
		return
	}
	if d.known(n) && d.atTarget(n) {
		if !d.must(ruleInPlaceReady, n.Ready) {
			d.notReadyAgain(n)
			return
		}
		d.do(clear)
		return
	}
	if !d.upgradeWanted(in, n) {
		if d.when(ruleInPlaceEnough, true) {
			d.do(clear)
		}
		return
	}
	d.keepCordoned[n.Name] = true
	if !heard {
		d.waitForAgent(in, n, overdue)
		return
	}
	if !d.aimsAtNode(run, n) {
		d.startUpgrade(n, Action{})
		return
	}
	if !d.waitsAfterRun(n, run) {
		d.startUpgrade(n, Action{Ended: run.Ended})
	}
}

// waitForAgent waits until the agent of n reports its last run. After the deadline other nodes go first.
func (d *Decision) waitForAgent(in *Intent, n *Node, overdue bool) {
	if d.when(ruleOverdue, overdue && n.Cordon != CordonedByUs) {
		d.postponeUpgrade(n, "its agent does not respond")
		return
	}
	// The agent is polled.
	d.Wait("AgentUnknown", fmt.Sprintf("the agent of %s has not responded yet; other nodes are upgraded first after %s", n.Name, in.Deadline.UTC().Format("15:04:05Z")), NodeReference(n.Name), time.Time{})
}

// waitsAfterRun reports whether n waits after a run with the present target: for its kubelet to become
// Ready again, or for the retry.
func (d *Decision) waitsAfterRun(n *Node, run UpgradeRun) bool {
	switch {
	case run.Phase == "done" && n.Ready && n.Kubelet == run.Version && !hasEtcd(d.spec, n):
		reason := "EtcdMemberOutdated"
		if d.w.Now.Before(run.Ended.Add(UpgradeRetry)) {
			reason = "NodeUpgrades" // the member may still restart
		}
		d.Wait(reason, fmt.Sprintf("the agent of %s has finished, and its member of etcd still reports version %s, want %s", n.Name, cmp.Or(n.Etcd, "unknown"), d.spec.EtcdImageTag), NodeReference(n.Name), time.Time{})
	case run.Phase == "done":
		d.notReadyAgain(n)
	case run.Phase == "failed" && !d.when(ruleRetry, true):
	case run.Phase == "failed" && d.w.Now.Before(run.Ended.Add(UpgradeRetry)) && !retryRequested(n, run):
		d.Wait("UpgradeFailed", fmt.Sprintf("the upgrade of %s to Kubernetes %s failed: %s", n.Name, d.spec.KubernetesClusterVersion, TruncateMessage(run.Line)), NodeReference(n.Name), run.Ended.Add(UpgradeRetry))
	default:
		return false
	}
	return true
}

// startUpgrade cordons and drains n, unless it is the only control plane, and then starts the upgrade.
// a has the end of the run that is repeated; zero: none is.
func (d *Decision) startUpgrade(n *Node, a Action) {
	alone := d.onlyControlPlane(n)
	switch {
	case n.Role != v1alpha1.ControlPlaneRole && !d.must(ruleControlPlaneFirst, d.controlPlanesDone):
		d.Wait("ControlPlanesFirst", "workers wait until all control planes are at the target", NodeReference(n.Name), time.Time{})
	case !d.mayUpgrade(n):
	case !alone && n.Cordon == Uncordoned:
		d.do(Action{Kind: CordonNode, Node: n.Name})
	case !alone && !d.must(ruleLeaseMoved, d.w.LeaderNode != n.Name):
		d.do(Action{Kind: YieldLease, Node: n.Name})
	case !alone && !d.must(ruleInPlaceDrained, n.Drained):
		d.drain(n)
		late := n.Cordon == CordonedByUs && d.w.Now.After(n.CordonedSince.Add(DrainDeadline))
		if d.when(ruleBlockedGoesBy, late && d.othersWait(n)) {
			d.postponeUpgrade(n, "its drain is blocked: "+TruncateMessage(n.DrainBlocker))
		}
	default:
		a.Kind, a.Node, a.Machine = UpgradeNode, n.Name, n.ProviderID
		a.Version, a.Components, a.Etcd = d.spec.KubernetesClusterVersion, d.spec.KubernetesComponentsReference, d.etcdMark(n)
		d.do(a)
	}
}

// finished returns the components that n's agent has installed and that are not recorded on its
// Node yet; empty: none. They may be those of another target: a machine runs what its agent
// installed last.
func (d *Decision) finished(n *Node, run UpgradeRun) string {
	done := run.Phase == "done" && run.Components != "" && n.Ready && n.Kubelet == run.Version
	what := run.Components
	if !done {
		what = d.spec.KubernetesComponentsReference
	}
	if !d.must(ruleInPlaceNoted, done) || what == n.Components {
		return ""
	}
	return what
}

func (d *Decision) notReadyAgain(n *Node) {
	d.keepCordoned[n.Name] = true
	d.Wait("NodeNotReady", fmt.Sprintf("the agent of %s has finished, but its kubelet is not Ready with the new version", n.Name), NodeReference(n.Name), time.Time{})
}

func (d *Decision) postponeUpgrade(n *Node, why string) {
	d.do(Action{Kind: PostponeNode, Node: n.Name, Until: d.w.Now.Add(Postponement)})
	d.Wait("Postponed", fmt.Sprintf("the upgrade of %s is postponed: %s", n.Name, why), NodeReference(n.Name), d.w.Now.Add(Postponement))
}

// upgradeWanted reports whether n must still be upgraded by in.
func (d *Decision) upgradeWanted(in *Intent, n *Node) bool {
	if !d.outdated(n) || !d.inPlace(n) || d.postponed(n) || d.stopped() || !d.published(n.Role) {
		return false // components that are not published for its role may take longer than the slot can wait
	}
	place, _ := SurgeSlot(in.Name)
	if place == 0 && d.controlPlanesOutdated && n.Role != v1alpha1.ControlPlaneRole {
		return false // a control plane needs this slot
	}
	return !slices.ContainsFunc(d.w.Intents, func(o Intent) bool {
		p, ok := SurgeSlot(o.Name)
		return ok && o.Goal == v1alpha1.UpgradeGoal && o.Machine == in.Machine && p < place
	})
}

// upgrades reports whether n is being upgraded in place.
func (d *Decision) upgrades(n *Node) bool {
	return slices.ContainsFunc(d.w.Intents, func(o Intent) bool {
		return o.Goal == v1alpha1.UpgradeGoal && o.Machine == n.ProviderID
	})
}

// mayUpgrade reports whether n's agent may start now. Else it adds a wait.
func (d *Decision) mayUpgrade(n *Node) bool {
	switch {
	case !d.must(ruleAutoscalerStopped, !d.w.Autoscaler.Running):
		d.Wait("AutoscalerRuns", "the cluster autoscaler has not stopped yet", v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(rulePublishedFirst, d.published(n.Role)):
		return false
	case n.Role != v1alpha1.ControlPlaneRole:
		return true
	case !d.must(ruleInPlaceMembers, len(d.w.Etcd) > 0 && !slices.ContainsFunc(d.w.Etcd, func(m Member) bool { return !m.Voter || !m.Healthy })):
		d.Wait("EtcdUnhealthy", fmt.Sprintf("not every member of etcd is a healthy voter, so %s is not upgraded", n.Name), NodeReference(n.Name), time.Time{})
		return false
	case !d.onlyControlPlane(n) && !d.otherIsOpen(n):
		d.Wait("NoControlPlane", fmt.Sprintf("%s is drained when another control plane is Ready and not cordoned", n.Name), NodeReference(n.Name), time.Time{})
		return false
	}
	return d.givesEtcd(n.Role)
}

// published reports whether the target's components are published for a role.
func (d *Decision) published(role v1alpha1.Role) bool {
	given := d.w.Before.JoinComponents.Worker
	if role == v1alpha1.ControlPlaneRole {
		given = d.w.Before.JoinComponents.ControlPlane
	}
	return given == d.spec.KubernetesComponentsReference
}

// onlyControlPlane reports whether n has the only member of etcd. It is not drained: its pods,
// the operator among them, have no other node, and they survive the kubelet's restart.
func (d *Decision) onlyControlPlane(n *Node) bool {
	return n.Role == v1alpha1.ControlPlaneRole && len(d.w.Etcd) == 1 && d.w.Etcd[0].Node == n.Name
}

// otherIsOpen reports whether another control plane can take the pods of n.
func (d *Decision) otherIsOpen(n *Node) bool {
	return slices.ContainsFunc(d.w.Nodes, func(o Node) bool {
		return o.Role == v1alpha1.ControlPlaneRole && o.Name != n.Name && o.Ready && o.Cordon == Uncordoned && !d.leaves(&o)
	})
}

// isStuck reports whether the in-place upgrade of a worker makes no progress: its agent failed or
// stopped answering, or the node is not Ready afterwards. The node stays cordoned and keeps its
// slot. No other node of its group starts. Other groups get one more slot, because the node is
// unavailable in any case.
func (d *Decision) isStuck(in *Intent) bool {
	n := d.NodeOf[in.Machine]
	if in.Goal != v1alpha1.UpgradeGoal || n == nil || n.Role == v1alpha1.ControlPlaneRole {
		return false
	}
	run, heard := d.w.NodeRuns[in.Machine]
	same, late := d.aimsAtNode(run, n), d.w.Now.After(in.Deadline)
	switch {
	case !heard:
		return late && n.Cordon == CordonedByUs
	case same && run.Phase == "done":
		return late && !n.Ready
	}
	return same && run.Phase == "failed"
}

// retryRequested reports whether a retry request names the failed run.
func retryRequested(n *Node, run UpgradeRun) bool {
	return n != nil && n.RetryRequest != "" && n.RetryRequest == run.RetryMark()
}

// settleRetryRequests processes retry requests. It first writes which run a request is for, so that
// it permits exactly one retry, even after a change of leader or an early failure. Then it
// removes the request.
func (d *Decision) settleRetryRequests() {
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		if n.RetryRequest == "" {
			continue
		}
		run, known := d.failedOn(n)
		mark := run.RetryMark()
		if strings.HasPrefix(n.RetryRequest, markPrefix) && n.RetryRequest != mark {
			mark = "" // the run has been retried
		}
		if known && mark != n.RetryRequest {
			d.do(Action{Kind: MarkRetry, Node: n.Name, RetryMark: mark})
		}
	}
}

// failedOn returns the latest failed run on n of an upgrade to the target; zero: none. known is
// false for a node that waits for a surge slot, or whose agent has not answered.
func (d *Decision) failedOn(n *Node) (run UpgradeRun, known bool) {
	if d.w.Run.Node == n.Name && d.w.Run.Phase == "failed" && d.aimsAt(d.w.Run) {
		return d.w.Run, true
	}
	if !n.Confirmed {
		return UpgradeRun{}, false
	}
	if !d.inPlace(n) || !d.outdated(n) || d.onHold(n) {
		return UpgradeRun{}, true
	}
	run, known = d.w.NodeRuns[n.ProviderID]
	if !d.aimsAtNode(run, n) {
		run = UpgradeRun{}
	}
	return run, known
}

// aimsAt reports whether run is an upgrade to the target.
func (d *Decision) aimsAt(run UpgradeRun) bool {
	return run.Version == d.spec.KubernetesClusterVersion && run.Components == d.spec.KubernetesComponentsReference
}

// aimsAtNode reports whether run is an in-place upgrade of n to the target. A control plane that
// reached the target's components before the target named an etcd is upgraded once more.
func (d *Decision) aimsAtNode(run UpgradeRun, n *Node) bool {
	return d.aimsAt(run) && run.Etcd == d.etcdMark(n)
}

// labelInPlace labels the nodes that are upgraded in place, and no others: the relay to the agents
// runs on labelled nodes.
func (d *Decision) labelInPlace() {
	some := slices.ContainsFunc(d.w.Groups, func(g Group) bool { return g.Strategy == v1alpha1.InPlaceStrategy })
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		if want := some && d.inPlace(n); want != n.InPlaceLabel && n.Confirmed {
			d.do(Action{Kind: MarkInPlace, Node: n.Name, Uncordon: !want})
		}
	}
	for i := range d.w.Impostors { // the relay must not run on these
		if n := &d.w.Impostors[i]; n.InPlaceLabel {
			d.do(Action{Kind: MarkInPlace, Node: n.Name, Uncordon: true})
		}
	}
}

// stuckGroup reports whether an upgrade in n's group is stuck.
func (d *Decision) stuckGroup(n *Node) bool { return d.stuckGroups[strings.ToLower(n.Group)] > 0 }
