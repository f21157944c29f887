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
// cordon, drain, the agent's run, Ready again, components recorded. A Plan that waits for the node then
// upgrades it, too, because it is drained. Then the intent is deleted, and the node is uncordoned.
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
		if n != nil && run.Etcd != "" && n.Kubelet == run.Version {
			text = fmt.Sprintf("the agent of %s upgrades its etcd", in.Node)
		}
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
	if d.isLent(n) {
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
		if n.Plan != "" && n.Cordon == CordonedByUs {
			d.keepCordoned[n.Name] = true
			d.do(Action{Kind: LendNode, Node: n.Name, Plan: n.Plan})
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

// isLent reports whether a Plan upgrades n. Neither a new target nor a pause interrupts it.
func (d *Decision) isLent(n *Node) bool {
	if n.Plan == "" || !n.Lent {
		return false
	}
	d.keepCordoned[n.Name] = true
	d.Wait("PlanUpgrades", fmt.Sprintf("the Plan %s upgrades %s while it is drained", n.Plan, n.Name), NodeReference(n.Name), time.Time{})
	return true
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
	case d.etcdStayed(n, run) && retryRequested(n, run.failed()):
		return false
	case d.etcdStayed(n, run):
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

func (d *Decision) notReadyAgain(n *Node) {
	d.keepCordoned[n.Name] = true
	d.Wait("NodeNotReady", fmt.Sprintf("the agent of %s has finished, but its kubelet is not Ready with the new version", n.Name), NodeReference(n.Name), time.Time{})
}

func (d *Decision) postponeUpgrade(n *Node, why string) {
	d.do(Action{Kind: PostponeNode, Node: n.Name, Until: d.w.Now.Add(Postponement)})
	d.Wait("Postponed", fmt.Sprintf("the upgrade of %s is postponed: %s", n.Name, why), NodeReference(n.Name), d.w.Now.Add(Postponement))
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
