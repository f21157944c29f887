package operator

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/engine/revocation"
	"constellation/operator/api/v1alpha1"
)

// A revoked machine is expected to work against the cluster. It differs from other
// machines that leave in three ways: the operator waits for no drain, it believes the
// cloud and not the Node, and it deletes the Node without waiting for the cloud. The
// console has already written the record, which refuses the machine's tickets and writes,
// and a taint, by which Kubernetes deletes the pods of the node.
//
// The record of the intent is an annotation of the PendingNode. The intent of the machine
// that is made in its place is called refill-<node>; it has a token, and no place of the
// surge budget, since the group has one machine less meanwhile.

// refills reports whether in is the intent of a machine that is made in place of a revoked
// one.
func (in *intent) refills() bool {
	return strings.HasPrefix(in.name, revocation.RefillPrefix) && in.token != "" && in.donor != ""
}

// dismiss removes a revoked machine: etcd member, machine and Node. The order of the first
// two is kept, since a member without a machine weakens etcd.
func (d *decision) dismiss(in *intent) {
	about := v1alpha1.Reference{Kind: "PendingNode", Name: in.name}
	m := d.instance(in.machine)
	switch {
	case m == nil:
		d.wait("MachineUnknown", fmt.Sprintf("the cloud has not described machine %s of revoked node %s yet", in.machine, in.node), about, time.Time{})
		return
	case m.name != "" && m.name != in.node:
		// A Node may claim the machine of another one. The cloud's names decide.
		d.wait("OtherMachine", fmt.Sprintf("machine %s is %s in the cloud and not the revoked node %s, so it is not deleted; delete this PendingNode", in.machine, m.name, in.node), about, time.Time{})
		return
	}
	n := d.nodes[in.node]
	for i := range d.w.impostors { // the Node of a revoked machine may claim another one
		if o := &d.w.impostors[i]; n == nil && o.name == in.node {
			n = &o.node
		}
	}
	if n != nil && !strings.EqualFold(n.providerID, in.machine) {
		if o := d.instance(n.providerID); o != nil && o.name == n.name {
			n = nil // another machine of that name, which the cloud confirms
		}
	}
	if n != nil {
		d.cordoned[n.name] = true
		if !d.must(ruleLeaseMoved, d.w.leader != n.name) {
			d.do(action{kind: yieldLease, node: n.name})
			return
		}
	}
	if d.roleOfMachine(in, m) == v1alpha1.ControlPlaneRole && !d.must(ruleMemberFirst, d.memberGone(in, n, in.node)) {
		return
	}
	if m.state != "Terminating" && !gone(m) {
		d.do(action{kind: deleteInstance, machine: in.machine, node: in.node})
	}
	switch {
	case n != nil:
		d.do(action{kind: deleteNode, node: n.name, machine: n.providerID})
	case !d.must(ruleGone, gone(m)):
		d.wait("MachineLeaves", fmt.Sprintf("the cloud has not confirmed that machine %s of revoked node %s is gone", in.machine, in.node), about, time.Time{})
	default:
		d.do(action{kind: clearIntent, intent: *in})
	}
}

// roleOfMachine is the role of the group that the cloud names, else of the intent's.
func (d *decision) roleOfMachine(in *intent, m *instance) v1alpha1.Role {
	if g := d.group(m.group); g != nil {
		return g.role
	}
	return d.roleOf(in)
}

// refill makes a machine in place of a revoked one, and ends when its Node is known and
// has taken its place.
func (d *decision) refill(in *intent) {
	about := v1alpha1.Reference{Kind: "PendingNode", Name: in.name}
	m := d.tokens[in.token]
	var n *node
	if m != nil {
		n = d.machineOf[m.id]
	}
	switch late := d.w.now.After(in.deadline); {
	case m == nil && late && !d.w.complete:
		d.wait(reasonPartial, fmt.Sprintf("whether the cloud has made a machine for %s is known when it lists all machines again", in.donor), about, time.Time{})
	case m == nil && !d.must(ruleNoLateCreate, !late):
		if d.when(ruleUnseenOverdue, true) {
			d.do(action{kind: clearIntent, intent: *in})
		}
	case m == nil && d.placeTaken(in):
		d.do(action{kind: clearIntent, intent: *in})
	case m == nil:
		if d.mayRefill(in, about) {
			d.do(action{kind: createInstance, intent: *in})
		}
	case gone(m):
		if n == nil { // else its Node goes first
			d.do(action{kind: clearIntent, intent: *in})
		}
	case n == nil:
		if over := m.since.Add(joinDeadline); !d.giveUpRefill(in, m, over) {
			d.wait("MachineJoins", fmt.Sprintf("machine %s, which replaces the revoked node %s, has not joined yet; it is given up when its time is over", m.name, in.donor), about, over)
		}
	case !known(n):
		d.wait("HeirUnknown", fmt.Sprintf("it is not known yet what %s runs", n.name), ref(n.name), time.Time{})
	case d.nodes[in.donor] != nil && n.donor != in.donor:
		// Labels and taints are not inherited from a Node that its own machine could write.
		d.wait("MachineLeaves", fmt.Sprintf("%s takes the place of the revoked node %s when that Node is deleted", n.name, in.donor), ref(in.donor), time.Time{})
	case n.donor != in.donor:
		d.do(action{kind: adoptHeir, node: n.name, donor: in.donor})
	case !d.joined(n):
		// The machine could not be given up after the intent has ended, if its join broke off.
		if over := m.since.Add(joinDeadline); !d.giveUpRefill(in, m, over) {
			d.wait(reasonNeverReady, d.neverReady(n), ref(n.name), over)
		}
	default:
		d.do(action{kind: clearIntent, intent: *in})
	}
}

// giveUpRefill binds the intent of a machine that replaces a revoked one to its removal, once
// its time to join is over or the machine has failed. It reports whether it did.
func (d *decision) giveUpRefill(in *intent, m *instance, over time.Time) bool {
	if !d.when(ruleOverdue, d.w.now.After(over) || m.state == "Failed") {
		return false
	}
	bound := *in
	bound.goal, bound.machine, bound.node = v1alpha1.LeaveGoal, m.id, m.name
	d.do(action{kind: bindIntent, intent: bound})
	return true
}

// mayRefill reports whether the machine may be created now, and says what it waits for.
// The removal comes first.
func (d *decision) mayRefill(in *intent, about v1alpha1.Reference) bool {
	g, role := d.group(in.group), d.roleOf(in)
	switch {
	case d.nodes[in.donor] != nil || d.dismissed(in.donor):
		d.wait("MachineLeaves", fmt.Sprintf("the machine that replaces the revoked node %s is made when that Node is deleted", in.donor), about, time.Time{})
	case d.beingReplaced(in.donor):
		d.wait("IntentSettles", fmt.Sprintf("a machine that was to replace %s before it was revoked is given up, or takes its place", in.donor), about, time.Time{})
	case g == nil || g.missing:
		d.wait("GroupMissing", fmt.Sprintf("the cloud does not list group %s, so no machine can be made in place of the revoked node %s", in.group, in.donor), about, time.Time{})
	case !d.must(ruleWholeList, d.w.complete):
		d.wait(reasonPartial, "the cloud did not list all machines, so no more are made", about, time.Time{})
	case !d.must(ruleAutoscalerStopped, !d.w.autoscaler.running):
		d.wait("AutoscalerRuns", "the cluster autoscaler has not stopped yet", about, time.Time{})
	case d.w.before.JoinComponents.Worker == "" || d.w.before.JoinComponents.ControlPlane == "":
		return false // what joining machines install was never published, which is reported already
	case role == v1alpha1.ControlPlaneRole && !d.must(ruleOneControlPlane, !d.otherControlPlaneMoves(in)):
		d.wait("ControlPlaneMoves", "another control plane is on its way in or out; the next one waits until it has settled", about, time.Time{})
	default:
		return true
	}
	return false
}

// beingReplaced reports whether a rollout has made a machine to replace a node, and has not
// settled yet which of the two goes.
func (d *decision) beingReplaced(donor string) bool {
	for i := range d.places {
		if r := &d.places[i]; r.intent.donor == donor && r.machine != nil && !gone(r.machine) {
			return true
		}
	}
	return false
}

// placeTaken reports whether a rollout had replaced the node before it was revoked.
func (d *decision) placeTaken(in *intent) bool {
	if d.beingReplaced(in.donor) {
		return false
	}
	return slices.ContainsFunc(d.w.nodes, func(n node) bool { return n.donor == in.donor && n.name != in.donor && !d.leaves(&n) })
}

// dismissed reports whether the machine of a revoked node exists and is not being deleted.
func (d *decision) dismissed(node string) bool {
	for i := range d.w.intents {
		in := &d.w.intents[i]
		if in.revoked && in.node == node {
			m := d.instance(in.machine)
			return m == nil || m.state != "Terminating" && !gone(m)
		}
	}
	return false
}

// otherControlPlaneMoves reports whether another control plane than that of in joins or
// leaves.
func (d *decision) otherControlPlaneMoves(in *intent) bool {
	for i := range d.w.intents {
		o := &d.w.intents[i]
		if o.name == in.name || d.roleOf(o) != v1alpha1.ControlPlaneRole {
			continue
		}
		// A replacement without a machine waits for this one.
		if _, place := placeOf(o.name); !place || o.goal != v1alpha1.JoinGoal || d.tokens[o.token] != nil {
			return true
		}
	}
	return d.cpComes()
}
