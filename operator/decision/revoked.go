package decision

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/revocation"
	"constellation/operator/api/v1alpha1"
)

// A revoked machine is expected to work against the cluster. It differs from other
// machines that leave in three ways: the operator waits for no drain, it trusts the
// cloud and not the Node, and it deletes the Node without waiting for the cloud. The
// console has already written the record, which refuses the machine's tickets and writes,
// and a taint, by which Kubernetes deletes the pods of the node.
//
// The record of the intent is an annotation of the PendingNode. The intent of the machine
// that is made in its place is called refill-<node>; it has a token. It takes no surge slot,
// because the group has one machine less meanwhile.

// refills reports whether in is the intent of a machine that is made in place of a revoked
// one.
func (in *Intent) refills() bool {
	return strings.HasPrefix(in.Name, revocation.RefillPrefix) && in.Token != "" && in.OldNode != ""
}

// A cloud can give the name of a revoked machine to a later one, which the join service refuses until
// the certificates of the name have expired. If the operator deleted such a machine first, the
// next one could get the name again. So its intent ends, and another machine is created for the
// same purpose meanwhile. The refused machine is tracked like any other without a Node: it is
// deleted when its time to join is over. It takes no surge slot, because it never joins.

// refillAgain records the intent of another machine in place of the one of in, whose name is refused.
// That intent ends afterwards. It reports whether it did either.
func (d *Decision) refillAgain(in *Intent, m *Instance) bool {
	if !d.refused(m) || d.w.Now.After(in.Deadline) {
		return false
	}
	sum := sha256.Sum256([]byte(in.Token + "\x00" + m.ID))
	next := *in
	next.Token = hex.EncodeToString(sum[:12])
	next.Name = revocation.RefillPrefix + in.OldNode + "." + next.Token[:8]
	if !slices.ContainsFunc(d.w.Intents, func(o Intent) bool { return o.Name == next.Name }) {
		d.do(Action{Kind: RecordIntent, Intent: next})
		return true
	}
	d.do(Action{Kind: ClearIntent, Intent: *in})
	return true
}

// removeRevoked removes a revoked machine: etcd member, machine and Node. The order of the first
// two is kept, since a member without a machine weakens etcd.
func (d *Decision) removeRevoked(in *Intent) {
	about := v1alpha1.Reference{Kind: "PendingNode", Name: in.Name}
	m := d.Instance(in.Machine)
	switch {
	case m == nil:
		d.Wait("MachineUnknown", fmt.Sprintf("the cloud has returned no data about machine %s of revoked node %s yet", in.Machine, in.Node), about, time.Time{})
		return
	case m.Name != "" && m.Name != in.Node:
		// A Node may claim the machine of another one. The cloud's names decide.
		d.Wait("OtherMachine", fmt.Sprintf("machine %s is called %s in the cloud, unlike the revoked node %s, so it is not deleted; delete this PendingNode", in.Machine, m.Name, in.Node), about, time.Time{})
		return
	}
	n := d.Nodes[in.Node]
	for i := range d.w.Impostors { // the Node of a revoked machine may claim another one
		if o := &d.w.Impostors[i]; n == nil && o.Name == in.Node {
			n = &o.Node
		}
	}
	if n != nil && !cloud.SameMachine(n.ProviderID, in.Machine) {
		if o := d.Instance(n.ProviderID); o != nil && o.Name == n.Name {
			n = nil // another machine of that name, which the cloud confirms
		}
	}
	if n != nil {
		d.keepCordoned[n.Name] = true
		if !d.must(ruleLeaseMoved, d.w.LeaderNode != n.Name) {
			d.do(Action{Kind: YieldLease, Node: n.Name})
			return
		}
	}
	if d.roleOfMachine(in, m) == v1alpha1.ControlPlaneRole && !d.must(ruleMemberFirst, d.memberGone(in, n, in.Node)) {
		return
	}
	if m.State != "Terminating" && !Gone(m) {
		d.do(Action{Kind: DeleteInstance, Machine: m.ID, Node: in.Node})
	}
	// A Node without an incarnation can be that of a later machine with the same name and ID, which
	// the cloud's list may not contain yet.
	unclear := n != nil && cloud.SameMachine(n.ProviderID, in.Machine) && isBare(n.ProviderID, &Instance{ID: in.Machine})
	switch {
	case n != nil && !unclear:
		d.do(Action{Kind: DeleteNode, Node: n.Name, Machine: n.ProviderID})
	case !d.must(ruleGone, Gone(m)):
		d.Wait("MachineLeaves", fmt.Sprintf("the cloud has not confirmed that machine %s of revoked node %s is deleted", in.Machine, in.Node), about, time.Time{})
	default:
		d.do(Action{Kind: ClearIntent, Intent: *in})
	}
}

// refill creates a machine in place of a revoked one. It ends when the Node of the new machine has
// replaced the revoked node.
func (d *Decision) refill(in *Intent) {
	about := v1alpha1.Reference{Kind: "PendingNode", Name: in.Name}
	m := d.ByToken[in.Token]
	var n *Node
	if m != nil {
		n = d.NodeOf[m.ID]
	}
	switch {
	case m == nil:
		d.createRefill(in, about)
	case Gone(m):
		if n == nil { // else its Node goes first
			d.do(Action{Kind: ClearIntent, Intent: *in})
		}
	case d.refillAgain(in, m):
	case n == nil:
		if over := m.Since.Add(JoinDeadline); !d.giveUpRefill(in, m, over) {
			d.Wait("MachineJoins", fmt.Sprintf("machine %s, which replaces the revoked node %s, has not joined yet; it is deleted when its time to join is over", m.Name, in.OldNode), about, over)
		}
	case !d.known(n):
		d.Wait("HeirUnknown", fmt.Sprintf("the image and components of %s are not known yet", n.Name), NodeReference(n.Name), time.Time{})
	case d.Nodes[in.OldNode] != nil && d.Nodes[in.OldNode] != n && n.OldNode != in.OldNode:
		// Labels and taints are not inherited from a Node that its own machine could write.
		d.Wait("MachineLeaves", fmt.Sprintf("%s replaces the revoked node %s when that Node is deleted", n.Name, in.OldNode), NodeReference(in.OldNode), time.Time{})
	case n.OldNode != in.OldNode:
		d.do(Action{Kind: AdoptReplacement, Node: n.Name, OldNode: in.OldNode})
	case !d.joined(n):
		// The machine could not be given up after the intent has ended, if its join broke off.
		if over := m.Since.Add(JoinDeadline); !d.giveUpRefill(in, m, over) {
			d.Wait(ReasonNeverReady, neverReady(n), NodeReference(n.Name), over)
		}
	default:
		d.do(Action{Kind: ClearIntent, Intent: *in})
	}
}

// createRefill creates the machine of in, unless the cloud may have created it already or nothing has to be
// refilled any more.
func (d *Decision) createRefill(in *Intent, about v1alpha1.Reference) {
	switch late := d.w.Now.After(in.Deadline); {
	case late && !d.w.Complete:
		d.Wait(ReasonPartial, fmt.Sprintf("waiting for a complete list of machines from the cloud, to see whether it has created the machine for %s", in.OldNode), about, time.Time{})
	case !d.must(ruleNoLateCreate, !late):
		if d.when(ruleUnseenOverdue, true) {
			d.do(Action{Kind: ClearIntent, Intent: *in})
		}
	case d.placeTaken(in):
		d.do(Action{Kind: ClearIntent, Intent: *in})
	case !d.must(ruleSpentToken, !in.Seen):
		d.Wait("IntentSettles", fmt.Sprintf("the cloud does not list the machine that it created for %s; no second one is created", in.OldNode), about, in.Deadline)
	case d.mayRefill(in, about):
		d.do(Action{Kind: CreateInstance, Intent: *in})
	}
}

// giveUpRefill binds the intent of a machine that replaces a revoked one to its removal, once
// its time to join is over or the machine has failed. It reports whether it did.
func (d *Decision) giveUpRefill(in *Intent, m *Instance, over time.Time) bool {
	if !d.when(ruleOverdue, d.w.Now.After(over) || m.State == "Failed") {
		return false
	}
	bound := *in
	bound.Goal, bound.Machine, bound.Node = v1alpha1.LeaveGoal, m.ID, m.Name
	d.do(Action{Kind: BindIntent, Intent: bound})
	return true
}

// mayRefill reports whether the machine may be created now. Else it adds a wait. The removal comes
// first.
func (d *Decision) mayRefill(in *Intent, about v1alpha1.Reference) bool {
	g, role := d.Group(in.Group), d.roleOf(in)
	switch {
	case d.Nodes[in.OldNode] != nil || d.removalPending(in.OldNode):
		d.Wait("MachineLeaves", fmt.Sprintf("the machine that replaces the revoked node %s is created when that Node is deleted", in.OldNode), about, time.Time{})
	case d.beingReplaced(in.OldNode):
		d.Wait("IntentSettles", fmt.Sprintf("the replacement of %s that started before its revocation must end first", in.OldNode), about, time.Time{})
	case g == nil || g.NotListed:
		d.Wait("GroupMissing", fmt.Sprintf("the cloud does not list group %s, so no machine can be created in place of the revoked node %s", in.Group, in.OldNode), about, time.Time{})
	case !d.must(ruleWholeList, d.w.Complete):
		d.Wait(ReasonPartial, "the cloud's list of machines is incomplete, so no machine is created", about, time.Time{})
	case !d.must(ruleAutoscalerStopped, !d.w.Autoscaler.Running):
		d.Wait("AutoscalerRuns", "the cluster autoscaler has not stopped yet", about, time.Time{})
	case d.w.Before.JoinComponents.Worker == "" || d.w.Before.JoinComponents.ControlPlane == "":
		return false // what joining machines install was never published, which is reported already
	case role == v1alpha1.ControlPlaneRole && !d.must(ruleOneControlPlane, !d.otherControlPlaneMoves(in)):
		d.Wait("ControlPlaneMoves", "another control plane is joining or leaving; the next one waits for it", about, time.Time{})
	default:
		return true
	}
	return false
}
