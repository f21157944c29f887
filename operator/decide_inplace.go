package operator

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/operator/api/v1alpha1"
)

// Nodes of groups with the strategy InPlace stay: their own agents bring them to the
// target's components, one place of the surge budget each. Nothing is made in the cloud
// and nothing deleted, so meanwhile there is one node less, and not one more.

// upgradeInPlace takes the next step for a node that is upgraded as it is. The order is:
// its agent has answered, cordon, drain, the agent's run, Ready again, components noted.
// Then the intent is cleared, and by that the node uncordoned.
func (d *decision) upgradeInPlace(in *intent) {
	n, clear := d.machineOf[in.machine], action{kind: clearIntent, intent: *in}
	run, heard := d.w.runs[in.machine]
	overdue := d.w.now.After(in.deadline)
	switch {
	case gone(d.instance(in.machine)):
		d.do(clear)
		return
	case !d.must(ruleInPlaceEnds, !run.active()):
		if n != nil {
			d.cordoned[n.name] = true
		}
		text := fmt.Sprintf("the agent of %s brings it to Kubernetes %s", in.node, run.version)
		if run.line != "" {
			text += ": " + shorten(run.line)
		}
		d.wait("NodeUpgrades", text, ref(in.node), time.Time{})
		return
	case n == nil:
		if d.when(ruleOverdue, overdue) {
			d.do(clear)
			return
		}
		d.wait("NodeMissing", fmt.Sprintf("%s, which is upgraded, is no node at the moment", in.node), ref(in.node), in.deadline)
		return
	}
	if !n.confirmed {
		d.cordoned[n.name] = true
		d.wait("MachineUnknown", fmt.Sprintf("the cloud does not describe the machine of %s at the moment, so it stays as it is", n.name), ref(n.name), time.Time{})
		return
	}
	// First of all: the target may have gone back to what the Node says while its agent was
	// bringing it to another one.
	if what := d.finished(n, run); what != "" {
		d.cordoned[n.name] = true
		d.do(action{kind: noteComponents, node: n.name, machine: n.providerID, components: what})
		return
	}
	if known(n) && d.atTarget(n) {
		if !d.must(ruleInPlaceReady, n.ready) {
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
	d.cordoned[n.name] = true
	version, components := d.spec.KubernetesClusterVersion, d.spec.KubernetesComponentsReference
	same, alone := d.aimsAt(run), d.onlyControlPlane(n)
	switch {
	case !heard:
		if d.when(ruleOverdue, overdue && n.cordon != cordonedByUs) {
			d.postponeUpgrade(n, "its agent does not answer")
			return
		}
		// It is asked again all the time; at the deadline it only loses its turn.
		d.wait("AgentUnknown", fmt.Sprintf("the agent of %s has not answered yet; without an answer others come first from %s on", n.name, in.deadline.UTC().Format("15:04:05Z")), ref(n.name), time.Time{})
	case same && run.phase == "done":
		d.notReadyAgain(n)
	case same && run.phase == "failed" && !d.when(ruleRetry, true):
	case same && run.phase == "failed" && d.w.now.Before(run.ended.Add(upgradeRetry)) && !again(n, run):
		d.wait("UpgradeFailed", fmt.Sprintf("the upgrade of %s to Kubernetes %s failed: %s", n.name, version, shorten(run.line)), ref(n.name), run.ended.Add(upgradeRetry))
	case n.role != v1alpha1.ControlPlaneRole && !d.must(ruleControlPlaneFirst, d.cpDone):
		d.wait("ControlPlanesFirst", "workers wait until all control planes are at the target", ref(n.name), time.Time{})
	case !d.mayUpgrade(n):
	case !alone && n.cordon == uncordoned:
		d.do(action{kind: cordonNode, node: n.name})
	case !alone && !d.must(ruleLeaseMoved, d.w.leader != n.name):
		d.do(action{kind: yieldLease, node: n.name})
	case !alone && !d.must(ruleInPlaceDrained, n.drained):
		d.drain(n)
		late := n.cordon == cordonedByUs && d.w.now.After(n.cordonedSince.Add(drainDeadline))
		if d.when(ruleBlockedGoesBy, late && d.othersWait(n)) {
			d.postponeUpgrade(n, "its drain is blocked: "+shorten(n.blocker))
		}
	default:
		a := action{kind: upgradeNode, node: n.name, machine: n.providerID, version: version, components: components}
		if same {
			a.ended = run.ended
		}
		d.do(a)
	}
}

// finished returns the components that n's agent has finished and that n's Node does not
// say yet; empty: there are none. It may be another target's: what an agent did last is
// what its machine runs.
func (d *decision) finished(n *node, run upgradeRun) string {
	done := run.phase == "done" && run.components != "" && n.ready && n.kubelet == run.version
	what := run.components
	if !done {
		what = d.spec.KubernetesComponentsReference
	}
	if !d.must(ruleInPlaceNoted, done) || what == n.components {
		return ""
	}
	return what
}

func (d *decision) notReadyAgain(n *node) {
	d.cordoned[n.name] = true
	d.wait("NodeNotReady", fmt.Sprintf("the agent of %s has finished, and its kubelet is not Ready with the new version", n.name), ref(n.name), time.Time{})
}

func (d *decision) postponeUpgrade(n *node, why string) {
	d.do(action{kind: postponeNode, node: n.name, until: d.w.now.Add(postponement)})
	d.wait("Postponed", fmt.Sprintf("the upgrade of %s is tried again later: %s", n.name, why), ref(n.name), d.w.now.Add(postponement))
}

// upgradeWanted reports whether n is still to be upgraded by in.
func (d *decision) upgradeWanted(in *intent, n *node) bool {
	if !d.outdated(n) || !d.inPlace(n) || d.postponed(n) || d.stopped() || !d.published(n.role) {
		return false // what is not given to its role yet may take until others have had this place
	}
	place, _ := placeOf(in.name)
	if place == 0 && d.cpWork && n.role != v1alpha1.ControlPlaneRole {
		return false // a control plane needs this place
	}
	return !slices.ContainsFunc(d.w.intents, func(o intent) bool {
		p, ok := placeOf(o.name)
		return ok && o.goal == v1alpha1.UpgradeGoal && o.machine == in.machine && p < place
	})
}

// upgrades reports whether n is being upgraded as it is.
func (d *decision) upgrades(n *node) bool {
	return slices.ContainsFunc(d.w.intents, func(o intent) bool {
		return o.goal == v1alpha1.UpgradeGoal && o.machine == n.providerID
	})
}

// mayUpgrade reports whether n's agent might begin now, and says what it waits for.
func (d *decision) mayUpgrade(n *node) bool {
	switch {
	case !d.must(ruleAutoscalerStopped, !d.w.autoscaler.running):
		d.wait("AutoscalerRuns", "the cluster autoscaler has not stopped yet", v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(rulePublishedFirst, d.published(n.role)):
		return false
	case n.role != v1alpha1.ControlPlaneRole:
		return true
	case !d.must(ruleInPlaceMembers, len(d.w.etcd) > 0 && !slices.ContainsFunc(d.w.etcd, func(m member) bool { return !m.voter || !m.healthy })):
		d.wait("EtcdUnhealthy", fmt.Sprintf("not every member of etcd is a healthy voter, so %s is not upgraded", n.name), ref(n.name), time.Time{})
		return false
	case !d.onlyControlPlane(n) && !d.otherIsOpen(n):
		d.wait("NoControlPlane", fmt.Sprintf("%s is emptied when another control plane is Ready and not cordoned", n.name), ref(n.name), time.Time{})
		return false
	}
	return true
}

// published reports whether machines that join with a role get the target's components.
func (d *decision) published(role v1alpha1.Role) bool {
	given := d.w.before.JoinComponents.Worker
	if role == v1alpha1.ControlPlaneRole {
		given = d.w.before.JoinComponents.ControlPlane
	}
	return given == d.spec.KubernetesComponentsReference
}

// onlyControlPlane reports whether n has the only member of etcd. What runs there can go
// nowhere else, the operator too, so it stays: pods outlive their kubelet's restart.
func (d *decision) onlyControlPlane(n *node) bool {
	return n.role == v1alpha1.ControlPlaneRole && len(d.w.etcd) == 1 && d.w.etcd[0].node == n.name
}

// otherIsOpen reports whether another control plane takes what has to leave n.
func (d *decision) otherIsOpen(n *node) bool {
	return slices.ContainsFunc(d.w.nodes, func(o node) bool {
		return o.role == v1alpha1.ControlPlaneRole && o.name != n.name && o.ready && o.cordon == uncordoned && !d.leaves(&o)
	})
}

// stands reports whether a worker that is upgraded as it is does not get on: its agent has
// failed, does not answer any more, or its node is not Ready afterwards. It stays
// cordoned and keeps its place. No other node of its group is begun then; other groups
// get another place instead, since it is unavailable in any case.
func (d *decision) stands(in *intent) bool {
	n := d.machineOf[in.machine]
	if in.goal != v1alpha1.UpgradeGoal || n == nil || n.role == v1alpha1.ControlPlaneRole {
		return false
	}
	run, heard := d.w.runs[in.machine]
	same, late := d.aimsAt(run), d.w.now.After(in.deadline)
	switch {
	case !heard:
		return late && n.cordon == cordonedByUs
	case same && run.phase == "done":
		return late && !n.ready
	}
	return same && run.phase == "failed"
}

// again reports whether a run that has failed is tried again now, because somebody wants it.
func again(n *node, run upgradeRun) bool { return n != nil && n.retry != "" && n.retry == run.mark() }

// retries settles what people want tried again now. Which run that is for is written down
// before it is tried again: so it is one try, whoever leads, and however soon that fails.
// Then it is taken off.
func (d *decision) retries() {
	for i := range d.w.nodes {
		n := &d.w.nodes[i]
		if n.retry == "" {
			continue
		}
		run, known := d.failedOn(n)
		mark := run.mark()
		if strings.HasPrefix(n.retry, markPrefix) && n.retry != mark {
			mark = "" // it has been tried again
		}
		if known && mark != n.retry {
			d.do(action{kind: markRetry, node: n.name, mark: mark})
		}
	}
}

// failedOn returns the latest run on n of an upgrade to the target; zero: there is none, and
// there will be none. It is not known of a node that waits for its turn, or whose agent has
// not answered.
func (d *decision) failedOn(n *node) (run upgradeRun, known bool) {
	if d.w.run.node == n.name && d.w.run.phase == "failed" && d.aimsAt(d.w.run) {
		return d.w.run, true
	}
	if !n.confirmed {
		return upgradeRun{}, false
	}
	if !d.inPlace(n) || !d.outdated(n) || d.held(n) {
		return upgradeRun{}, true
	}
	run, known = d.w.runs[n.providerID]
	if !d.aimsAt(run) {
		run = upgradeRun{}
	}
	return run, known
}

// aimsAt reports whether a run is, or was, one to the target.
func (d *decision) aimsAt(run upgradeRun) bool {
	return run.version == d.spec.KubernetesClusterVersion && run.components == d.spec.KubernetesComponentsReference
}

// marks labels the nodes that are upgraded in place, and no others: on them runs what the
// operator reaches their agents through.
func (d *decision) marks() {
	some := slices.ContainsFunc(d.w.groups, func(g group) bool { return g.strategy == v1alpha1.InPlaceStrategy })
	for i := range d.w.nodes {
		n := &d.w.nodes[i]
		if want := some && d.inPlace(n); want != n.marked && n.confirmed {
			d.do(action{kind: markInPlace, node: n.name, uncordon: !want})
		}
	}
	for i := range d.w.impostors { // what runs on marked nodes is not to come to these
		if n := &d.w.impostors[i]; n.marked {
			d.do(action{kind: markInPlace, node: n.name, uncordon: true})
		}
	}
}

// stuckGroup reports whether an upgrade in n's group does not get on.
func (d *decision) stuckGroup(n *node) bool { return d.stuck[strings.ToLower(n.group)] > 0 }
