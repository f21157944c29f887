package decision

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/engine/version"
	"constellation/operator/api/v1alpha1"
)

// observed is the target, the observed world, and what follows from them alone. Decision.index sets the
// fields, and nothing changes them afterwards. The methods are questions: none of them takes an
// action or adds a wait. Those about members of etcd are in members.go.
type observed struct {
	off  rule
	spec v1alpha1.NodeVersionSpec
	w    World

	*Lookup
	groups               map[string]*Group
	replacements         []replacement      // replacements in progress, by slot
	leaving              map[string]*Intent // by ID of the machine
	orphanedReplacements []*Instance        // machines that the operator created and whose intent was deleted
	// A control plane joins or leaves outside of the one slot: its intent was deleted, or an intent
	// without a slot is bound to it.
	untrackedControlPlane bool
	refusal               string // why the target is refused; empty: it is accepted
	controlPlanesDone     bool   // every control plane is at the target, and none joins or leaves
	controlPlanesOutdated bool   // a control plane must be replaced
	controlPlaneOnHold    bool   // a control plane that must be replaced is on hold
	controlPlaneUnknown   bool   // the cloud does not describe the machine of a control plane
	surge                 int
	stuckGroups           map[string]int // stuck in-place upgrades, by group in lower case
	stuckSlots            int            // surge slots that stuck upgrades hold
}

// must is for safety conditions. It returns ok, or true if the rule is switched off.
func (x *observed) must(r rule, ok bool) bool { return ok || x.off == r }

// when is for branches of progress. It returns ok, or false if the rule is switched off.
func (x *observed) when(r rule, ok bool) bool { return ok && x.off != r }

// Group returns the scaling group with this ID; an empty one if it is not known.
func (x *observed) Group(id string) *Group {
	if g := x.groups[id]; g != nil {
		return g
	}
	return x.groups[strings.ToLower(id)]
}

// idOf returns the ID of a machine as the cloud writes it now.
func (x *observed) idOf(id string) string {
	if m := x.Instance(id); m != nil {
		return m.ID
	}
	return id
}

func (x *observed) leaves(n *Node) bool { return x.leaving[n.ProviderID] != nil }

// roleOf returns the role of the machine of an intent. The cloud's role comes before the recorded
// one, which may be a Node's claim.
func (x *observed) roleOf(in *Intent) v1alpha1.Role {
	m := x.Instance(in.Machine)
	if m == nil {
		m = x.ByToken[in.Token]
	}
	if m != nil {
		if g := x.Group(m.Group); g != nil {
			return g.Role
		}
	}
	if g := x.Group(in.Group); g != nil {
		return g.Role
	}
	if n := x.Nodes[in.OldNode]; n != nil {
		return n.Role
	}
	return ""
}

// roleOfMachine is the role of the group that the cloud names, else of the intent's.
func (x *observed) roleOfMachine(in *Intent, m *Instance) v1alpha1.Role {
	if g := x.Group(m.Group); g != nil {
		return g.Role
	}
	return x.roleOf(in)
}

// known reports whether image, components and machine of n are known, and the version of its etcd
// if the target names one. A target without an image needs none.
func (x *observed) known(n *Node) bool {
	return n.Confirmed && (n.Image != "" || x.spec.Image == "") && n.Components != "" && n.ProviderID != "" && etcdKnown(x.spec, n)
}

// sameImage reports whether an image is the one of the target. A target without an image is met by
// every image: the cloud selects none.
func sameImage(have, want string) bool { return want == "" || strings.EqualFold(have, want) }

// atTarget reports whether n has the target's components, image and etcd. The image of a node that is
// upgraded in place does not count.
func (x *observed) atTarget(n *Node) bool {
	return n.Confirmed && n.Components == x.spec.KubernetesComponentsReference && (sameImage(n.Image, x.spec.Image) || x.inPlace(n)) && hasEtcd(x.spec, n)
}

// inPlace reports whether n is upgraded in place.
func (x *observed) inPlace(n *Node) bool {
	g := x.Group(n.Group)
	return g != nil && g.Strategy == v1alpha1.InPlaceStrategy
}

// outdated reports whether n must be replaced or upgraded, now or later.
func (x *observed) outdated(n *Node) bool {
	return x.must(ruleKnown, x.known(n)) && !x.atTarget(n) && !n.Obsolete && !x.leaves(n) && x.Group(n.Group) != nil &&
		x.must(ruleKeepWorkers, n.Role == v1alpha1.ControlPlaneRole || !x.spec.Rollout.KeepWorkers)
}

// onHold reports whether n or its group is on hold.
func (x *observed) onHold(n *Node) bool {
	g := x.Group(n.Group)
	return !x.must(ruleHeld, !n.OnHold && (g == nil || !g.OnHold))
}

// postponed reports whether n must not be replaced now. A replacement in progress is given up,
// unless its old node cannot stay.
func (x *observed) postponed(n *Node) bool { return x.w.Now.Before(n.PostponedUntil) || x.onHold(n) }

// stopped reports whether nothing new may start.
func (x *observed) stopped() bool {
	return !x.must(ruleStoppedBegins, !x.spec.Rollout.Paused && !x.spec.Rollout.Cancel) || x.refusal != ""
}

// behind reports whether a node must be replaced or upgraded, now or later.
func (x *observed) behind() bool {
	for i := range x.w.Nodes {
		if x.outdated(&x.w.Nodes[i]) {
			return true
		}
	}
	return false
}

// joined reports whether a joining machine has joined. A join can fail after the Node was created,
// and the join service gives a machine with a Node no second ticket. Such a machine would never
// become Ready. A node on hold is not changed.
func (x *observed) joined(n *Node) bool {
	return n.Ready || n.OnHold || !x.when(ruleNeverReady, true)
}

// replaces reports whether the machine of n was created to replace o, by its token or by
// an intent.
func (x *observed) replaces(n, o *Node) bool {
	m := x.Instance(n.ProviderID)
	if m == nil || !n.Confirmed {
		return false
	}
	return x.oldNodeOf(m, n) == o || slices.ContainsFunc(x.w.Intents, func(in Intent) bool { return m.Token != "" && in.Token == m.Token && in.OldNode == o.Name })
}

// oldNodeOf returns the node that m was created to replace, or nil. n is the node of m. The token of
// m names the old node. If an older operator created m, its Node names the old node, which counts if
// the old node's Node names n.
func (x *observed) oldNodeOf(m *Instance, n *Node) *Node {
	replaced, pinned := x.madeFor(m)
	switch {
	case x.off == ruleMadeFor:
		return x.Nodes[n.OldNode]
	case pinned && replaced != nil:
		return x.NodeOf[replaced.ID]
	case pinned:
		return nil
	}
	if oldNode := x.Nodes[n.OldNode]; oldNode != nil && oldNode.Replacement == n.Name {
		return oldNode
	}
	return nil
}

// replacement is an intent with the objects that it names. Each of these objects may be missing.
type replacement struct {
	*Intent
	slot    int
	oldNode *Node
	machine *Instance
	newNode *Node
}

func (x *observed) replacement(in *Intent, place int) replacement {
	r := replacement{Intent: in, slot: place, oldNode: x.Nodes[in.OldNode], machine: x.ByToken[in.Token]}
	if r.machine != nil {
		r.newNode = x.NodeOf[r.machine.ID]
	}
	if r.oldNode != nil && !x.must(ruleDonorMachine, x.isOldNode(&r)) {
		r.oldNode = nil
	}
	return r
}

// isOldNode reports whether the Node with the old node's name is that of the old machine. The new
// machine, or any other, can have the name of a deleted one.
func (x *observed) isOldNode(r *replacement) bool {
	hash := ReplacedHash(r.Token)
	if r.machine != nil {
		hash = r.machine.ReplacesHash
	}
	m := x.Instance(r.oldNode.ProviderID)
	return r.oldNode != r.newNode && (hash == "" || m == nil || !r.oldNode.Confirmed || m.Hash == hash)
}

// replaced reports whether the old node of r has left etcd and the replacement node votes in its place, under an
// intent that somebody deleted. The old node must then leave, and the replacement node must not be given up,
// however long the drain takes. Nodes do not count here, because a Node may be missing from the
// observation.
func (x *observed) replaced(r *replacement) bool {
	return x.roleOf(r.Intent) == v1alpha1.ControlPlaneRole && r.oldNode != nil && !x.isMember(r.oldNode.Name) && x.votes(r.machine.Name) &&
		(r.newNode == nil || x.oldNodeOf(r.machine, r.newNode) == r.oldNode)
}

// unneeded reports whether r must no longer replace its old node.
func (x *observed) unneeded(r *replacement) bool {
	if r.machine != nil && x.leaving[r.machine.ID] != nil || r.newNode != nil && x.hasLeftEtcd(r.newNode) {
		return true
	}
	if r.oldNode == nil || !r.oldNode.Confirmed {
		return false
	}
	// An old node whose member has left etcd cannot stay, so its replacement node has to.
	if !x.hasLeftEtcd(r.oldNode) && (x.known(r.oldNode) && x.atTarget(r.oldNode) || r.oldNode.Obsolete || x.leaves(r.oldNode) || !x.must(ruleInPlace, !x.inPlace(r.oldNode)) || x.upgrades(r.oldNode)) {
		return true
	}
	for i := range x.replacements {
		if o := &x.replacements[i]; o.OldNode == r.OldNode && o.slot < r.slot {
			return true
		}
	}
	for i := range x.w.Intents { // an intent that is bound to the old node already
		if o := &x.w.Intents[i]; o.Name != r.Name && o.OldNode == r.OldNode && o.Machine == r.oldNode.ProviderID {
			return true
		}
	}
	return r.newNode != nil && r.newNode.Obsolete
}

// mispaired reports whether r's machine was created to replace another node than r's old node.
func (x *observed) mispaired(r *replacement) bool {
	if x.off == ruleMadeFor {
		return r.newNode.OldNode != "" && r.newNode.OldNode != r.OldNode
	}
	replaced, _ := x.madeFor(r.machine)
	return replaced != nil && replaced.ID != r.oldNode.ProviderID
}

// sameOldNode reports whether the machines of n and r were created to replace the same node.
func (x *observed) sameOldNode(r *replacement, n *Node) bool {
	if x.off == ruleMadeFor {
		return n.OldNode == r.OldNode
	}
	m := x.Instance(n.ProviderID)
	return m != nil && m.ReplacesHash != "" && m.ReplacesHash == r.machine.ReplacesHash
}

// refusesOldNode reports whether the replacement node of r does not keep the annotation that names its old node for
// longer than an honest Node needs.
func (x *observed) refusesOldNode(r *replacement) bool {
	return x.w.Now.After(r.machine.Since.Add(JoinDeadline + CreateDeadline))
}

// surplusNodes counts the nodes above the desired number: one for each replacement whose old node and
// replacement node are both Nodes, and one for each orphaned replacement node.
func (x *observed) surplusNodes() int {
	n := 0
	for _, m := range x.orphanedReplacements {
		if x.NodeOf[m.ID] != nil {
			n++
		}
	}
	for i := range x.w.Intents {
		in := &x.w.Intents[i]
		if _, ok := SurgeSlot(in.Name); !ok || x.Nodes[in.OldNode] == nil {
			continue
		}
		if m := x.ByToken[in.Token]; m != nil && x.NodeOf[m.ID] != nil {
			n++
		}
	}
	return n
}

// surge returns how many machines may exist above the desired number.
func surge(max *intstr.IntOrString, nodes int) int {
	if max == nil {
		return 1
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(max, nodes, true)
	if err != nil || n < 1 {
		return 1
	}
	return n
}

// Gone reports whether the cloud has confirmed that the machine does not exist any more.
func Gone(m *Instance) bool { return m != nil && m.State == "Terminated" }

// controlPlaneMoves reports whether a control plane is joining or leaving.
func (x *observed) controlPlaneMoves() bool {
	for i := range x.w.Intents {
		if in := &x.w.Intents[i]; x.roleOf(in) == v1alpha1.ControlPlaneRole && !x.keepsName(in) {
			return true
		}
	}
	return false
}

// controlPlaneJoins reports whether the cloud has a control plane's machine without a Node.
func (x *observed) controlPlaneJoins() bool {
	return slices.ContainsFunc(x.w.Instances, func(m Instance) bool {
		g := x.Group(m.Group)
		return g != nil && g.Role == v1alpha1.ControlPlaneRole && x.NodeOf[m.ID] == nil && !Gone(&m) && !x.refused(&m)
	})
}

// seeControlPlanes reports whether the cloud lists the machine of every control plane, also of
// requested ones.
func (x *observed) seeControlPlanes() bool {
	for i := range x.w.Nodes {
		if n := &x.w.Nodes[i]; n.Role == v1alpha1.ControlPlaneRole && x.Instance(n.ProviderID) == nil {
			return false
		}
	}
	for i := range x.w.Intents {
		in := &x.w.Intents[i]
		if x.roleOf(in) == v1alpha1.ControlPlaneRole && in.Goal == v1alpha1.JoinGoal && x.ByToken[in.Token] == nil && x.Instance(in.Machine) == nil {
			return false
		}
	}
	return true
}

// otherControlPlaneMoves reports whether another control plane than that of in joins or
// leaves.
func (x *observed) otherControlPlaneMoves(in *Intent) bool {
	for i := range x.w.Intents {
		o := &x.w.Intents[i]
		if o.Name == in.Name || x.roleOf(o) != v1alpha1.ControlPlaneRole || x.keepsName(o) || o.OldNode == in.OldNode && o.refills() && x.refused(x.ByToken[o.Token]) {
			continue
		}
		// A replacement without a machine waits for this one.
		if _, place := SurgeSlot(o.Name); !place || o.Goal != v1alpha1.JoinGoal || x.ByToken[o.Token] != nil {
			return true
		}
	}
	return x.controlPlaneJoins()
}

// otherIsOpen reports whether another control plane can take the pods of n.
func (x *observed) otherIsOpen(n *Node) bool {
	return slices.ContainsFunc(x.w.Nodes, func(o Node) bool {
		return o.Role == v1alpha1.ControlPlaneRole && o.Name != n.Name && o.Ready && o.Cordon == Uncordoned && !x.leaves(&o)
	})
}

// agent returns the control plane whose agent upgrades Kubernetes: the leader's own, because the
// operator has its socket.
func (x *observed) agent() *Node {
	if n := x.Nodes[x.w.LeaderNode]; n != nil && n.Ready && n.Role == v1alpha1.ControlPlaneRole && !x.leaves(n) {
		return n
	}
	for i := range x.w.Nodes {
		if n := &x.w.Nodes[i]; n.Ready && n.Role == v1alpha1.ControlPlaneRole && !x.leaves(n) {
			return n
		}
	}
	return nil
}

// refuse returns why the cluster can never reach the target, or the empty string.
func (x *observed) refuse() string {
	want, err := version.Parse(x.spec.KubernetesClusterVersion)
	if err != nil {
		return err.Error()
	}
	newest := version.Version{}
	seen := map[string]bool{} // thousands of nodes run one or two versions
	see := func(s string) {
		if seen[s] {
			return
		}
		seen[s] = true
		if v, err := version.Parse(s); err == nil && (newest.IsZero() || newest.Less(v)) {
			newest = v
		}
	}
	// A kubelet reports its own version. A worker's is never newer than the published components.
	for i := range x.w.Nodes {
		if n := &x.w.Nodes[i]; n.Role == v1alpha1.ControlPlaneRole || x.off == ruleOwnVersions {
			see(n.Kubelet)
		}
	}
	see(x.w.Versions[x.w.Before.JoinComponents.ControlPlane])
	if x.w.Run.Phase != "" && x.w.Run.Phase != "download" && x.w.Run.Phase != "plan" {
		see(x.w.Run.Version) // an apply that failed may have switched the API server
	}
	if newest.IsZero() {
		return ""
	}
	if !x.must(ruleNeverDown, !want.Less(newest)) {
		return fmt.Sprintf("the cluster runs Kubernetes %s, and a downgrade to %s is not supported; set kubernetesClusterVersion to %s or newer", newest, want, newest)
	}
	if have, err := version.Parse(x.w.Versions[x.w.Before.JoinComponents.ControlPlane]); err == nil && (have.Major() != want.Major() || want.Minor() > have.Minor()+1) {
		return fmt.Sprintf("Kubernetes %s is more than one minor version above %s; upgrade to v%d.%d first", want, have, have.Major(), have.Minor()+1)
	}
	return ""
}

// upgraded reports whether control planes may join with the target's components.
func (x *observed) upgraded(published string) bool {
	r, want := x.w.Run, x.spec.KubernetesClusterVersion
	done := r.Phase == "done" && r.Version == want && r.Components == x.spec.KubernetesComponentsReference
	return x.must(ruleAgentFirst, x.w.Versions[published] == want || x.when(ruleOnce, done))
}

// published reports whether the target's components are published for a role.
func (x *observed) published(role v1alpha1.Role) bool {
	given := x.w.Before.JoinComponents.Worker
	if role == v1alpha1.ControlPlaneRole {
		given = x.w.Before.JoinComponents.ControlPlane
	}
	return given == x.spec.KubernetesComponentsReference
}

// aimsAt reports whether run is an upgrade to the target.
func (x *observed) aimsAt(run UpgradeRun) bool {
	return run.Version == x.spec.KubernetesClusterVersion && run.Components == x.spec.KubernetesComponentsReference
}

// aimsAtNode reports whether run is an in-place upgrade of n to the target. So is an upgrade of the
// cluster's Kubernetes that has replaced the kubelet of n. A control plane that reached the target's
// components before the target named an etcd is upgraded once more.
func (x *observed) aimsAtNode(run UpgradeRun, n *Node) bool {
	return x.aimsAt(run) && run.Etcd == x.etcdMark(n) && (run.InPlace || n.Kubelet == run.Version)
}

// failedOn returns the latest failed run on n of an upgrade to the target; zero: none. known is
// false for a node that waits for a surge slot, or whose agent has not answered.
func (x *observed) failedOn(n *Node) (run UpgradeRun, known bool) {
	if x.w.Run.Node == n.Name && x.w.Run.Phase == "failed" && x.aimsAt(x.w.Run) {
		return x.w.Run, true
	}
	if r := x.w.AddonRun; r.Node == n.Name && r.Phase == "failed" && x.aimsAt(r) {
		return r, true
	}
	if !n.Confirmed {
		return UpgradeRun{}, false
	}
	if !x.inPlace(n) || !x.outdated(n) || x.onHold(n) {
		return UpgradeRun{}, true
	}
	run, known = x.w.NodeRuns[n.ProviderID]
	if !x.aimsAtNode(run, n) {
		run = UpgradeRun{}
	}
	if x.etcdStayed(n, run) {
		run = run.failed()
	}
	return run, known
}

// etcdStayed reports whether the agent of n has finished, and the member of etcd has still an older version
// than the target's.
func (x *observed) etcdStayed(n *Node, run UpgradeRun) bool {
	return run.Phase == "done" && n.Ready && n.Kubelet == run.Version && !hasEtcd(x.spec, n)
}

// retryRequested reports whether a retry request names the failed run.
func retryRequested(n *Node, run UpgradeRun) bool {
	return n != nil && n.RetryRequest != "" && n.RetryRequest == run.RetryMark()
}

// finished returns the components that n's agent has installed and that are not recorded on its
// Node yet; empty: none. They may be those of another target: a machine runs what its agent
// installed last.
func (x *observed) finished(n *Node, run UpgradeRun) string {
	done := run.Phase == "done" && run.Components != "" && n.Ready && n.Kubelet == run.Version
	what := run.Components
	if !done {
		what = x.spec.KubernetesComponentsReference
	}
	if !x.must(ruleInPlaceNoted, done) || what == n.Components {
		return ""
	}
	return what
}

// upgrades reports whether n is being upgraded in place.
func (x *observed) upgrades(n *Node) bool {
	return slices.ContainsFunc(x.w.Intents, func(o Intent) bool {
		return o.Goal == v1alpha1.UpgradeGoal && o.Machine == n.ProviderID
	})
}

// upgradeWanted reports whether n must still be upgraded by in.
func (x *observed) upgradeWanted(in *Intent, n *Node) bool {
	if !x.outdated(n) || !x.inPlace(n) || x.postponed(n) || x.stopped() || !x.published(n.Role) {
		return false // components that are not published for its role may take longer than the slot can wait
	}
	place, _ := SurgeSlot(in.Name)
	if place == 0 && x.controlPlanesOutdated && n.Role != v1alpha1.ControlPlaneRole {
		return false // a control plane needs this slot
	}
	return !slices.ContainsFunc(x.w.Intents, func(o Intent) bool {
		p, ok := SurgeSlot(o.Name)
		return ok && o.Goal == v1alpha1.UpgradeGoal && o.Machine == in.Machine && p < place
	})
}

// isStuck reports whether the in-place upgrade of a worker makes no progress: its agent failed or
// stopped answering, or the node is not Ready afterwards. The node stays cordoned and keeps its
// slot. No other node of its group starts. Other groups get one more slot, because the node is
// unavailable in any case.
func (x *observed) isStuck(in *Intent) bool {
	n := x.NodeOf[in.Machine]
	if in.Goal != v1alpha1.UpgradeGoal || n == nil || n.Role == v1alpha1.ControlPlaneRole {
		return false
	}
	run, heard := x.w.NodeRuns[in.Machine]
	same, late := x.aimsAtNode(run, n), x.w.Now.After(in.Deadline)
	switch {
	case !heard:
		return late && n.Cordon == CordonedByUs
	case same && run.Phase == "done":
		return late && !n.Ready
	}
	return same && run.Phase == "failed"
}

// stuckGroup reports whether an upgrade in n's group is stuck.
func (x *observed) stuckGroup(n *Node) bool { return x.stuckGroups[strings.ToLower(n.Group)] > 0 }

// refused reports whether m has the name of another machine, which was revoked, and is no Node.
func (x *observed) refused(m *Instance) bool {
	if m == nil || m.Name == "" || Gone(m) || x.NodeOf[m.ID] != nil {
		return false
	}
	_, refused := x.w.Revoked.Refuses(m.Name, m.ID)
	_, revoked := x.w.Revoked.Revoked(m.Name, m.ID)
	return refused && !revoked
}

// keepsName reports whether in tracks a refused machine.
func (x *observed) keepsName(in *Intent) bool {
	return in.Goal == v1alpha1.JoinGoal && in.Token == "" && x.refused(x.Instance(in.Machine))
}

// beingReplaced reports whether a rollout has made a machine to replace a node, and has not
// settled yet which of the two goes.
func (x *observed) beingReplaced(oldNode string) bool {
	for i := range x.replacements {
		if r := &x.replacements[i]; r.OldNode == oldNode && r.machine != nil && !Gone(r.machine) {
			return true
		}
	}
	return false
}

// placeTaken reports whether a rollout had replaced the node before it was revoked.
func (x *observed) placeTaken(in *Intent) bool {
	if x.beingReplaced(in.OldNode) {
		return false
	}
	return slices.ContainsFunc(x.w.Nodes, func(n Node) bool { return n.OldNode == in.OldNode && n.Name != in.OldNode && !x.leaves(&n) })
}

// removalPending reports whether the machine of a revoked node exists and is not being deleted.
func (x *observed) removalPending(node string) bool {
	for i := range x.w.Intents {
		in := &x.w.Intents[i]
		if in.Revoked && in.Node == node {
			m := x.Instance(in.Machine)
			return m == nil || m.State != "Terminating" && !Gone(m)
		}
	}
	return false
}

// replacementInPlace reports whether n is the replacement node of a replacement in progress.
func (x *observed) replacementInPlace(n *Node) bool {
	return slices.ContainsFunc(x.replacements, func(r replacement) bool { return r.newNode == n })
}
