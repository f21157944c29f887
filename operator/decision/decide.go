package decision

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/engine/version"
	"constellation/operator/api/v1alpha1"
)

// Deadlines of the policy, by the operator's own clock. Creating is short, because the cloud
// accepts a request or does not. Joining is as long as the slowest join that was measured.
const (
	CreateDeadline  = 5 * time.Minute
	JoinDeadline    = 30 * time.Minute
	DrainDeadline   = 15 * time.Minute
	Postponement    = 10 * time.Minute
	UpgradeRetry    = 2 * time.Minute
	pausedGivesBack = 10 * time.Minute
)

// Decide returns the next actions that bring the world to spec, and the status. It is pure, and
// all policy is in it and in the table of rules.
//
// The actions are independent. Each is safe by itself, in any order, if the others fail, if it is
// repeated, and if the world has changed since it was observed. So the rules can be read one by
// one, and the caller may stop after any action.
func Decide(spec v1alpha1.NodeVersionSpec, w World) *Decision { return plan(spec, w, everyRule) }

// plan decides with one rule switched off; everyRule is none.
func plan(spec v1alpha1.NodeVersionSpec, w World, off rule) *Decision {
	d := &Decision{off: off, spec: spec, w: w}
	d.index()
	d.upgradeKubernetes()
	for i := range d.replacements {
		d.advanceReplacement(&d.replacements[i])
	}
	for i := range d.w.Intents {
		d.advanceIntent(&d.w.Intents[i])
	}
	d.trackOrphans()
	d.startReplacements()
	d.releaseCordons()
	d.labelInPlace()
	d.settleRetryRequests()
	d.autoscaling()
	return d
}

// Decision is the working state of one call of decide.
type Decision struct {
	off  rule
	spec v1alpha1.NodeVersionSpec
	w    World

	*Lookup
	groups               map[string]*Group
	replacements         []replacement      // replacements in progress, by slot
	oldNodes             map[string]bool    // names of nodes with a replacement
	leaving              map[string]*Intent // by ID of the machine
	tracked              map[string]bool    // IDs and tokens that an intent names
	takenSlots           map[int]bool       // surge slots that an intent holds
	orphanedReplacements []*Instance        // machines that the operator created and whose intent was deleted
	// A control plane joins or leaves outside of the one slot: its intent was deleted, or an intent
	// without a slot is bound to it.
	untrackedControlPlane bool
	keepCordoned          map[string]bool // nodes that stay cordoned; releaseCordons uncordons all others
	refusal               string          // why the target is refused; empty: it is accepted
	controlPlanesDone     bool            // every control plane is at the target, and none joins or leaves
	controlPlanesOutdated bool            // a control plane must be replaced
	controlPlaneOnHold    bool            // a control plane that must be replaced is on hold
	controlPlaneUnknown   bool            // the cloud does not describe the machine of a control plane
	inFlight              int             // machines above the sizes of the groups, or upgraded in place
	surge                 int
	stuckGroups           map[string]int // stuck in-place upgrades, by group in lower case
	stuckSlots            int            // surge slots that stuck upgrades hold

	Actions []Action
	Waits   []Wait
	// Exclusive says that the operator needs the node lock: nodes are being replaced or upgraded, or
	// will be.
	Exclusive bool
}

// replacement is an intent with the objects that it names. Each of these objects may be missing.
type replacement struct {
	*Intent
	slot    int
	oldNode *Node
	machine *Instance
	newNode *Node
}

// slotPrefix begins the names of intents that hold a surge slot. Names are unique, so two leaders
// cannot exceed the budget, even with stale observations.
const (
	slotPrefix    = "replace-"
	MachinePrefix = "machine-"
)

// SurgeSlot returns the number of a replacement slot from the name of its PendingNode.
func SurgeSlot(name string) (int, bool) {
	s, ok := strings.CutPrefix(name, slotPrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 0
}

// index builds the lookups and counts of one decision.
func (d *Decision) index() {
	d.groups, d.leaving = make(map[string]*Group, 2*len(d.w.Groups)), map[string]*Intent{}
	d.tracked, d.keepCordoned, d.oldNodes, d.takenSlots, d.stuckGroups = map[string]bool{}, map[string]bool{}, map[string]bool{}, map[int]bool{}, map[string]int{}
	if d.Lookup = d.w.Lookup; d.Lookup == nil || !byName(d.w.Nodes) {
		d.w.Nodes = sorted(d.w.Nodes) // a copy, because judge changes it
		d.Lookup = lookupWithout(&d.w, d.off)
	}
	for i := range d.w.Groups {
		g := &d.w.Groups[i]
		d.groups[g.ID], d.groups[strings.ToLower(g.ID)] = g, g
	}
	d.indexIntents()
	slices.SortFunc(d.replacements, func(a, b replacement) int { return cmp.Compare(a.slot, b.slot) })
	for i := range d.w.Instances {
		m := &d.w.Instances[i]
		leaves := m.State == "Terminating" && d.NodeOf[m.ID] == nil && !d.tracked[m.ID] && !d.tracked[m.Token]
		lost := d.isOrphanedReplacement(m)
		if lost {
			d.orphanedReplacements = append(d.orphanedReplacements, m)
		}
		if g := d.Group(m.Group); g != nil && g.Role == v1alpha1.ControlPlaneRole {
			d.untrackedControlPlane = d.untrackedControlPlane || lost || leaves
		}
		if d.when(ruleOrphanBudget, lost || leaves) {
			d.inFlight++
		}
	}
	confirmed := 0
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		d.untrackedControlPlane = d.untrackedControlPlane || d.hasLeftEtcd(n) && !d.leaves(n)
		if n.Confirmed { // only confirmed nodes raise a percentage
			confirmed++
		}
	}
	d.surge = surge(d.spec.Rollout.MaxSurge, confirmed-d.surplusNodes())
	d.refusal = d.refuse()
	d.controlPlanes()
}

// indexIntents finds what intents track, hold and replace.
func (d *Decision) indexIntents() {
	for i := range d.w.Intents {
		in := &d.w.Intents[i]
		_, place := SurgeSlot(in.Name)
		if in.Goal == v1alpha1.LeaveGoal {
			d.leaving[d.idOf(in.Machine)] = in
			d.untrackedControlPlane = d.untrackedControlPlane || !place && d.roleOf(in) == v1alpha1.ControlPlaneRole
		} else if in.refills() {
			d.untrackedControlPlane = d.untrackedControlPlane || d.roleOf(in) == v1alpha1.ControlPlaneRole
		}
		if in.Machine != "" {
			d.tracked[d.idOf(in.Machine)] = true
		}
		if in.Token != "" {
			d.tracked[in.Token] = true
		}
		if p, ok := SurgeSlot(in.Name); ok {
			d.takenSlots[p] = true
			if d.when(ruleInPlaceStuck, d.isStuck(in)) {
				d.stuckGroups[strings.ToLower(in.Group)]++
				d.stuckSlots++
			} else {
				d.inFlight++
			}
			if in.Goal == v1alpha1.UpgradeGoal {
				d.oldNodes[in.Node] = true
			}
			if in.Goal == v1alpha1.JoinGoal {
				d.replacements = append(d.replacements, d.replacement(in, p))
			}
			if in.OldNode != "" {
				d.oldNodes[in.OldNode] = true
			}
		}
	}
}

// byName reports whether nodes are in the order of their names.
func byName(nodes []Node) bool {
	for i := 1; i < len(nodes); i++ {
		if nodes[i].Name < nodes[i-1].Name {
			return false
		}
	}
	return true
}

// sorted returns a copy of nodes in the order of their names. It sorts pointers, because
// a node is large.
func sorted(nodes []Node) []Node {
	if byName(nodes) {
		return slices.Clone(nodes)
	}
	order := make([]*Node, len(nodes))
	for i := range nodes {
		order[i] = &nodes[i]
	}
	slices.SortStableFunc(order, func(a, b *Node) int { return strings.Compare(a.Name, b.Name) })
	out := make([]Node, len(nodes))
	for i, n := range order {
		out[i] = *n
	}
	return out
}

// surplusNodes counts the nodes above the desired number: one for each replacement whose old node and
// replacement node are both Nodes, and one for each orphaned replacement node.
func (d *Decision) surplusNodes() int {
	n := 0
	for _, m := range d.orphanedReplacements {
		if d.NodeOf[m.ID] != nil {
			n++
		}
	}
	for i := range d.w.Intents {
		in := &d.w.Intents[i]
		if _, ok := SurgeSlot(in.Name); !ok || d.Nodes[in.OldNode] == nil {
			continue
		}
		if m := d.ByToken[in.Token]; m != nil && d.NodeOf[m.ID] != nil {
			n++
		}
	}
	return n
}

func (d *Decision) replacement(in *Intent, place int) replacement {
	r := replacement{Intent: in, slot: place, oldNode: d.Nodes[in.OldNode], machine: d.ByToken[in.Token]}
	if r.machine != nil {
		r.newNode = d.NodeOf[r.machine.ID]
	}
	if r.oldNode != nil && !d.must(ruleDonorMachine, d.isOldNode(&r)) {
		r.oldNode = nil
	}
	return r
}

// isOldNode reports whether the Node with the old node's name is that of the old machine. The new
// machine, or any other, can have the name of a deleted one.
func (d *Decision) isOldNode(r *replacement) bool {
	hash := ReplacedHash(r.Token)
	if r.machine != nil {
		hash = r.machine.ReplacesHash
	}
	m := d.Instance(r.oldNode.ProviderID)
	return r.oldNode != r.newNode && (hash == "" || m == nil || !r.oldNode.Confirmed || m.Hash == hash)
}

// idOf returns the ID of a machine as the cloud writes it now.
func (d *Decision) idOf(id string) string {
	if m := d.Instance(id); m != nil {
		return m.ID
	}
	return id
}

// isOrphanedReplacement reports whether the operator created m to replace a node that still exists, and
// somebody deleted the intent.
func (d *Decision) isOrphanedReplacement(m *Instance) bool {
	if m.Token == "" || d.tracked[m.Token] || Gone(m) {
		return false
	}
	n := d.NodeOf[m.ID]
	replaced, pinned := d.madeFor(m)
	pinned = pinned && d.off != ruleMadeFor
	if n == nil || !d.known(n) || d.leaves(n) {
		// After the replaced machine is deleted, m is an ordinary machine, whatever its Node claims.
		return !pinned || !d.w.Complete || replaced != nil && !Gone(replaced)
	}
	if !d.atTarget(n) || d.inPlace(n) {
		return false
	}
	oldNode := d.oldNodeOf(m, n)
	return oldNode != nil && d.outdated(oldNode)
}

// oldNodeOf returns the node that m was created to replace, or nil. n is the node of m. The token of
// m names the old node. If an older operator created m, its Node names the old node, which counts if
// the old node's Node names n.
func (d *Decision) oldNodeOf(m *Instance, n *Node) *Node {
	replaced, pinned := d.madeFor(m)
	switch {
	case d.off == ruleMadeFor:
		return d.Nodes[n.OldNode]
	case pinned && replaced != nil:
		return d.NodeOf[replaced.ID]
	case pinned:
		return nil
	}
	if oldNode := d.Nodes[n.OldNode]; oldNode != nil && oldNode.Replacement == n.Name {
		return oldNode
	}
	return nil
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

// known reports whether image, components and machine of n are known, and the version of its etcd
// if the target names one. A target without an image needs none.
func (d *Decision) known(n *Node) bool {
	return n.Confirmed && (n.Image != "" || d.spec.Image == "") && n.Components != "" && n.ProviderID != "" && etcdKnown(d.spec, n)
}

// sameImage reports whether an image is the one of the target. A target without an image is met by
// every image: the cloud selects none.
func sameImage(have, want string) bool { return want == "" || strings.EqualFold(have, want) }

// atTarget reports whether n has the target's components, image and etcd. The image of a node that is
// upgraded in place does not count.
func (d *Decision) atTarget(n *Node) bool {
	return n.Confirmed && n.Components == d.spec.KubernetesComponentsReference && (sameImage(n.Image, d.spec.Image) || d.inPlace(n)) && hasEtcd(d.spec, n)
}

// inPlace reports whether n is upgraded in place.
func (d *Decision) inPlace(n *Node) bool {
	g := d.Group(n.Group)
	return g != nil && g.Strategy == v1alpha1.InPlaceStrategy
}

func (d *Decision) leaves(n *Node) bool { return d.leaving[n.ProviderID] != nil }

// Group returns the scaling group with this ID; an empty one if it is not known.
func (d *Decision) Group(id string) *Group {
	if g := d.groups[id]; g != nil {
		return g
	}
	return d.groups[strings.ToLower(id)]
}

// roleOf returns the role of the machine of an intent. The cloud's role comes before the recorded
// one, which may be a Node's claim.
func (d *Decision) roleOf(in *Intent) v1alpha1.Role {
	m := d.Instance(in.Machine)
	if m == nil {
		m = d.ByToken[in.Token]
	}
	if m != nil {
		if g := d.Group(m.Group); g != nil {
			return g.Role
		}
	}
	if g := d.Group(in.Group); g != nil {
		return g.Role
	}
	if n := d.Nodes[in.OldNode]; n != nil {
		return n.Role
	}
	return ""
}

// outdated reports whether n must be replaced or upgraded, now or later.
func (d *Decision) outdated(n *Node) bool {
	return d.must(ruleKnown, d.known(n)) && !d.atTarget(n) && !n.Obsolete && !d.leaves(n) && d.Group(n.Group) != nil &&
		d.must(ruleKeepWorkers, n.Role == v1alpha1.ControlPlaneRole || !d.spec.Rollout.KeepWorkers)
}

// postponed reports whether n must not be replaced now. A replacement in progress is given up,
// unless its old node cannot stay.
func (d *Decision) postponed(n *Node) bool { return d.w.Now.Before(n.PostponedUntil) || d.onHold(n) }

// onHold reports whether n or its group is on hold.
func (d *Decision) onHold(n *Node) bool {
	g := d.Group(n.Group)
	return !d.must(ruleHeld, !n.OnHold && (g == nil || !g.OnHold))
}

// stopped reports whether nothing new may start.
func (d *Decision) stopped() bool {
	return !d.must(ruleStoppedBegins, !d.spec.Rollout.Paused && !d.spec.Rollout.Cancel) || d.refusal != ""
}

// controlPlanes computes the progress of the control planes.
func (d *Decision) controlPlanes() {
	d.controlPlanesDone = false
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		if n.Role == v1alpha1.ControlPlaneRole {
			d.controlPlanesDone = true
		}
	}
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		if n.Role != v1alpha1.ControlPlaneRole {
			continue
		}
		d.controlPlaneUnknown = d.controlPlaneUnknown || !n.Confirmed
		d.controlPlanesOutdated = d.controlPlanesOutdated || d.outdated(n)
		d.controlPlaneOnHold = d.controlPlaneOnHold || d.outdated(n) && d.onHold(n)
		d.controlPlanesDone = d.controlPlanesDone && d.atTarget(n) && !d.leaves(n) && !n.Obsolete
	}
	for i := range d.w.Intents {
		if d.roleOf(&d.w.Intents[i]) == v1alpha1.ControlPlaneRole {
			d.controlPlanesDone = false
		}
	}
	d.controlPlanesDone = d.controlPlanesDone && !d.controlPlaneJoins() // a control plane may join
}

// refuse returns why the cluster can never reach the target, or the empty string.
func (d *Decision) refuse() string {
	want, err := version.Parse(d.spec.KubernetesClusterVersion)
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
	for i := range d.w.Nodes {
		if n := &d.w.Nodes[i]; n.Role == v1alpha1.ControlPlaneRole || d.off == ruleOwnVersions {
			see(n.Kubelet)
		}
	}
	see(d.w.Versions[d.w.Before.JoinComponents.ControlPlane])
	if d.w.Run.Phase != "" && d.w.Run.Phase != "download" && d.w.Run.Phase != "plan" {
		see(d.w.Run.Version) // an apply that failed may have switched the API server
	}
	if newest.IsZero() {
		return ""
	}
	if !d.must(ruleNeverDown, !want.Less(newest)) {
		return fmt.Sprintf("the cluster runs Kubernetes %s, and a downgrade to %s is not supported; set kubernetesClusterVersion to %s or newer", newest, want, newest)
	}
	if have, err := version.Parse(d.w.Versions[d.w.Before.JoinComponents.ControlPlane]); err == nil && (have.Major() != want.Major() || want.Minor() > have.Minor()+1) {
		return fmt.Sprintf("Kubernetes %s is more than one minor version above %s; upgrade to v%d.%d first", want, have, have.Major(), have.Minor()+1)
	}
	return ""
}

// upgradeKubernetes upgrades the control plane's Kubernetes through the agent, once per target. Then
// it publishes the components for joining machines, role by role, and sets the image of the
// groups. The published components record the progress, so no API server's version is read.
func (d *Decision) upgradeKubernetes() {
	pub, want := d.w.Before.JoinComponents, d.spec.KubernetesComponentsReference
	if pub.ControlPlane == "" || pub.Worker == "" {
		if first := joinComponents(d.spec, pub, d.w); first != pub {
			d.publish(first)
		} else {
			d.Wait("ComponentsUnknown", "the components of joining machines were never published, and the control plane does not run the target's Kubernetes version", v1alpha1.Reference{}, time.Time{})
		}
		return
	}
	if d.refusal != "" {
		d.Wait("TargetRefused", d.refusal, v1alpha1.Reference{}, time.Time{})
		return
	}
	if pub.ControlPlane != want {
		if d.upgraded(pub.ControlPlane) {
			pub.ControlPlane = want
			d.publish(pub)
		} else {
			d.upgrade()
		}
		return
	}
	if d.spec.Rollout.Cancel {
		return // groups and workers stay as they are
	}
	if pub.Worker != want && d.must(ruleWorkersLast, d.controlPlanesDone) {
		if d.when(ruleSecondPublish, true) {
			pub.Worker = want
			d.publish(pub)
		}
	}
	for i := range d.w.Groups {
		g := &d.w.Groups[i]
		given := pub.Worker
		if g.Role == v1alpha1.ControlPlaneRole {
			given = pub.ControlPlane
		}
		if given == want && !g.NotListed && !sameImage(g.Image, d.spec.Image) {
			d.do(Action{Kind: SetGroupImage, Group: g.ID, Image: d.spec.Image})
		}
	}
}

// upgraded reports whether control planes may join with the target's components.
func (d *Decision) upgraded(published string) bool {
	r, want := d.w.Run, d.spec.KubernetesClusterVersion
	done := r.Phase == "done" && r.Version == want && r.Components == d.spec.KubernetesComponentsReference
	return d.must(ruleAgentFirst, d.w.Versions[published] == want || d.when(ruleOnce, done))
}

func (d *Decision) upgrade() {
	r := d.w.Run
	same, host := d.aimsAt(r), d.agent()
	switch {
	case r.Active():
		return // status.upgrade reports it
	case d.stopped():
		return
	case same && r.Phase == "failed" && !d.when(ruleRetry, true):
		return
	case same && r.Phase == "failed" && d.w.Now.Before(r.Ended.Add(UpgradeRetry)) && !retryRequested(d.Nodes[r.Node], r):
		d.Wait("UpgradeFailed", fmt.Sprintf("the upgrade of Kubernetes to %s on %s failed: %s", r.Version, r.Node, TruncateMessage(r.Line)), NodeReference(r.Node), r.Ended.Add(UpgradeRetry))
	case d.isBarred():
	case d.w.Autoscaler.Running:
		d.Wait("AutoscalerRuns", "the cluster autoscaler has not stopped yet", v1alpha1.Reference{}, time.Time{})
	case d.controlPlaneMoves():
		d.Wait("ControlPlaneMoves", "a control plane is joining or leaving; Kubernetes is upgraded after that", v1alpha1.Reference{}, time.Time{})
	case host == nil:
		d.Wait("NoControlPlane", "no control plane is Ready, so no agent can upgrade Kubernetes", v1alpha1.Reference{}, time.Time{})
	case stillReported(d.w.Before.Upgrade, r, host.Name):
		// The status is written in this round.
	default:
		a := Action{Kind: StartUpgrade, Node: host.Name, Version: d.spec.KubernetesClusterVersion, Components: d.spec.KubernetesComponentsReference}
		if same {
			a.Ended = r.Ended
		}
		d.do(a)
	}
}

// isBarred reports whether another holder of the node lock forbids a start, and adds a wait.
func (d *Decision) isBarred() bool {
	if d.w.NodesLocked && d.w.NodesLockedBy != "" {
		d.Wait("NodesTaken", d.w.NodesLockedBy, v1alpha1.Reference{}, time.Time{})
	}
	return d.w.NodesLocked
}

// controlPlaneMoves reports whether a control plane is joining or leaving.
func (d *Decision) controlPlaneMoves() bool {
	for i := range d.w.Intents {
		if d.roleOf(&d.w.Intents[i]) == v1alpha1.ControlPlaneRole {
			return true
		}
	}
	return false
}

// controlPlaneJoins reports whether the cloud has a control plane's machine without a Node.
func (d *Decision) controlPlaneJoins() bool {
	return slices.ContainsFunc(d.w.Instances, func(m Instance) bool {
		g := d.Group(m.Group)
		return g != nil && g.Role == v1alpha1.ControlPlaneRole && d.NodeOf[m.ID] == nil && !Gone(&m)
	})
}

// agent returns the control plane whose agent upgrades Kubernetes: the leader's own, because the
// operator has its socket.
func (d *Decision) agent() *Node {
	if n := d.Nodes[d.w.LeaderNode]; n != nil && n.Ready && n.Role == v1alpha1.ControlPlaneRole && !d.leaves(n) {
		return n
	}
	for i := range d.w.Nodes {
		if n := &d.w.Nodes[i]; n.Ready && n.Role == v1alpha1.ControlPlaneRole && !d.leaves(n) {
			return n
		}
	}
	return nil
}

func (d *Decision) publish(j v1alpha1.JoinComponents) {
	d.do(Action{Kind: PublishComponents, JoinComponents: j})
}

// advanceReplacement takes the next step of a replacement.
func (d *Decision) advanceReplacement(r *replacement) {
	switch {
	case r.machine == nil:
		d.create(r)
	case Gone(r.machine):
		if r.newNode == nil { // else its Node is deleted first
			d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
		}
	case d.when(ruleReplacementStays, d.replaced(r)):
		if r.newNode == nil {
			d.Wait("IntentSettles", fmt.Sprintf("the etcd member of %s is a voter, but its Node is missing from the last observation", r.machine.Name), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, time.Time{})
			return
		}
		d.do(Action{Kind: ClearIntent, Intent: *r.Intent}) // trackOrphans removes the old node, which has left etcd
	case d.unneeded(r) || r.oldNode != nil && d.postponed(r.oldNode):
		d.giveUp(r)
	case r.newNode == nil:
		late := d.w.Now.After(r.machine.Since.Add(JoinDeadline)) || r.machine.State == "Failed"
		if d.when(ruleOverdue, late) {
			d.postpone(r, "")
			return
		}
		d.Wait("MachineJoins", fmt.Sprintf("machine %s, which replaces %s, has not joined yet; it is deleted when its time to join is over", r.machine.Name, r.OldNode), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, r.machine.Since.Add(JoinDeadline))
	default:
		d.completeReplacement(r)
	}
}

// unneeded reports whether r must no longer replace its old node.
func (d *Decision) unneeded(r *replacement) bool {
	if r.machine != nil && d.leaving[r.machine.ID] != nil || r.newNode != nil && d.hasLeftEtcd(r.newNode) {
		return true
	}
	if r.oldNode == nil || !r.oldNode.Confirmed {
		return false
	}
	// An old node whose member has left etcd cannot stay, so its replacement node has to.
	if !d.hasLeftEtcd(r.oldNode) && (d.known(r.oldNode) && d.atTarget(r.oldNode) || r.oldNode.Obsolete || d.leaves(r.oldNode) || !d.must(ruleInPlace, !d.inPlace(r.oldNode)) || d.upgrades(r.oldNode)) {
		return true
	}
	for i := range d.replacements {
		if o := &d.replacements[i]; o.OldNode == r.OldNode && o.slot < r.slot {
			return true
		}
	}
	for i := range d.w.Intents { // an intent that is bound to the old node already
		if o := &d.w.Intents[i]; o.Name != r.Name && o.OldNode == r.OldNode && o.Machine == r.oldNode.ProviderID {
			return true
		}
	}
	return r.newNode != nil && r.newNode.Obsolete
}

// replaced reports whether the old node of r has left etcd and the replacement node votes in its place, under an
// intent that somebody deleted. The old node must then leave, and the replacement node must not be given up,
// however long the drain takes. Nodes do not count here, because a Node may be missing from the
// observation.
func (d *Decision) replaced(r *replacement) bool {
	return d.roleOf(r.Intent) == v1alpha1.ControlPlaneRole && r.oldNode != nil && !d.isMember(r.oldNode.Name) && d.votes(r.machine.Name) &&
		(r.newNode == nil || d.oldNodeOf(r.machine, r.newNode) == r.oldNode)
}

// create requests the machine of an intent. The token makes the request idempotent.
func (d *Decision) create(r *replacement) {
	late := d.w.Now.After(r.Deadline)
	needed := r.oldNode != nil && d.outdated(r.oldNode) && !d.onHold(r.oldNode) && !d.unneeded(r)
	switch role, g := d.roleOf(r.Intent), d.Group(r.Group); {
	case late && !d.w.Complete:
		d.Wait(ReasonPartial, fmt.Sprintf("waiting for a complete list of machines from the cloud, to see whether it has created the machine for %s", r.OldNode), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, time.Time{})
	case !d.must(ruleNoLateCreate, !late):
		// A pending request has arrived or failed by now.
		if needed && !d.postponed(r.oldNode) {
			d.postpone(r, "the cloud has not created its machine")
		} else if d.when(ruleUnseenOverdue, true) {
			d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
		}
	case !needed:
		if !d.when(ruleUnseenKept, true) {
			d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
			return
		}
		d.Wait("IntentSettles", fmt.Sprintf("%s needs no replacement any more; waiting to see whether the cloud has created a machine for it", r.OldNode), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, r.Deadline)
	case d.orphanFor(r.oldNode) != nil:
		d.Wait("IntentSettles", fmt.Sprintf("a machine that can replace %s exists already; its PendingNode was deleted", r.OldNode), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, r.Deadline)
	case !d.must(ruleSpentToken, !r.Seen):
		d.Wait("IntentSettles", fmt.Sprintf("the cloud does not list the machine that it created for %s; no second one is created", r.OldNode), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, r.Deadline)
	case role == v1alpha1.ControlPlaneRole && !d.must(ruleCountedTwice, !d.untrackedControlPlane):
		d.Wait("ControlPlaneMoves", "another control plane is joining or leaving; the next one waits for it", v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, r.Deadline)
	case !d.mayCreate(role, g):
	default:
		d.do(Action{Kind: CreateInstance, Intent: *r.Intent})
	}
}

// mayCreate reports whether a new machine of a group would be at the target, and nothing else
// changes the number of machines meanwhile. Else it adds a wait.
func (d *Decision) mayCreate(role v1alpha1.Role, g *Group) bool {
	switch {
	case g == nil || d.refusal != "":
		return false
	case g.NotListed:
		d.Wait("GroupMissing", fmt.Sprintf("the cloud does not list group %s, so no machine can be created in it; delete its ScalingGroup if the group was deleted", g.Name), v1alpha1.Reference{Kind: "ScalingGroup", Name: g.Name}, time.Time{})
		return false
	case !d.must(ruleWholeList, d.w.Complete):
		d.Wait(ReasonPartial, "the cloud's list of machines is incomplete, so no machine is created", v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(ruleCountedTwice, d.inFlight <= d.surge):
		d.Wait("BudgetExceeded", fmt.Sprintf("%d machines are joining or leaving, the maximum is %d", d.inFlight, d.surge), v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(ruleAutoscalerStopped, !d.w.Autoscaler.Running):
		d.Wait("AutoscalerRuns", "the cluster autoscaler has not stopped yet", v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(rulePublishedFirst, d.published(role)):
		return false
	case !d.must(ruleGroupImage, sameImage(g.Image, d.spec.Image)):
		d.Wait("GroupImage", fmt.Sprintf("the cloud still creates machines of group %s from another image", g.Name), v1alpha1.Reference{Kind: "ScalingGroup", Name: g.Name}, time.Time{})
		return false
	case !d.must(ruleControlPlaneFirst, role == v1alpha1.ControlPlaneRole || d.controlPlanesDone):
		d.Wait("ControlPlanesFirst", "workers wait until all control planes are at the target", v1alpha1.Reference{}, time.Time{})
		return false
	}
	return d.givesEtcd(role)
}

// giveUp binds the intent to the replacement node: its machine leaves, the old node stays.
func (d *Decision) giveUp(r *replacement) {
	in := *r.Intent
	in.Goal, in.Machine, in.Node = v1alpha1.LeaveGoal, r.machine.ID, r.machine.Name
	d.do(Action{Kind: BindIntent, Intent: in})
}

// postpone records on the old node that other nodes come first. The intent is given up after that, so
// that a crash in between cannot start the same attempt again.
func (d *Decision) postpone(r *replacement, why string) {
	switch {
	case r.oldNode != nil && d.outdated(r.oldNode):
		d.do(Action{Kind: PostponeNode, Node: r.oldNode.Name, Until: d.w.Now.Add(Postponement)})
		d.Wait("Postponed", fmt.Sprintf("the replacement of %s is postponed: %s", r.oldNode.Name, cmp.Or(why, "its new machine did not join in time")), NodeReference(r.oldNode.Name), d.w.Now.Add(Postponement))
	case r.machine != nil:
		d.giveUp(r)
	}
}

// completeReplacement replaces the old node by the replacement node, which is a Node: adopt, cordon, drain, bind.
func (d *Decision) completeReplacement(r *replacement) {
	h, oldNode := r.newNode, r.oldNode
	if oldNode == nil {
		d.settleVanishedOldNode(r)
		return
	}
	begun := oldNode.Replacement == h.Name
	overdue := d.w.Now.After(r.machine.Since.Add(JoinDeadline))
	drainOverdue := oldNode.Cordon == CordonedByUs && d.w.Now.After(oldNode.CordonedSince.Add(DrainDeadline))
	if !d.replacementFits(r, begun, overdue) || !d.replacementServes(r, overdue && !begun || begun && drainOverdue) {
		return
	}
	d.keepCordoned[oldNode.Name] = true
	switch {
	case !begun || oldNode.Cordon == Uncordoned:
		d.do(Action{Kind: CordonNode, Node: oldNode.Name, Replacement: h.Name})
	case !d.must(ruleLeaseMoved, d.w.LeaderNode != oldNode.Name):
		d.do(Action{Kind: YieldLease, Node: oldNode.Name})
	case !d.must(ruleDrained, oldNode.Drained):
		d.drain(oldNode)
		if d.when(ruleBlockedGoesBy, drainOverdue && d.othersWait(oldNode)) {
			d.postpone(r, "its drain is blocked: "+TruncateMessage(oldNode.DrainBlocker))
		}
	case h.Role == v1alpha1.ControlPlaneRole && !d.othersHealthy(d.memberOn(oldNode)):
		d.Wait("EtcdUnhealthy", d.unhealthyOther(d.memberOn(oldNode)), NodeReference(oldNode.Name), time.Time{})
	default:
		in := *r.Intent
		in.Goal, in.Machine, in.Node = v1alpha1.LeaveGoal, oldNode.ProviderID, oldNode.Name
		d.do(Action{Kind: BindIntent, Intent: in})
	}
}

// replacementFits reports whether the replacement node is at the target, names the old node, and may
// replace it now. Otherwise it waits, or gives the replacement up. begun: the old node names the
// replacement node already.
func (d *Decision) replacementFits(r *replacement, begun, overdue bool) bool {
	h, oldNode := r.newNode, r.oldNode
	switch {
	case !oldNode.Confirmed:
		d.keepCordoned[oldNode.Name] = begun
		d.Wait("MachineUnknown", fmt.Sprintf("the cloud returns no data about the machine of %s at the moment, so the node stays", oldNode.Name), NodeReference(oldNode.Name), time.Time{})
	case d.mispaired(r):
		// Without the intent, the machine is an orphan and is matched with its own old node.
		d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
	case !d.known(h):
		if d.when(ruleOverdue, overdue) {
			d.postpone(r, "")
			return false
		}
		d.Wait("HeirUnknown", fmt.Sprintf("the image, components or etcd of %s are not known yet", h.Name), NodeReference(h.Name), time.Time{})
	case !d.must(ruleReplacementVersion, d.atTarget(h)):
		d.giveUp(r)
	case h.Role != v1alpha1.ControlPlaneRole && !d.controlPlanesDone:
		if d.controlPlanesOutdated && r.slot == 0 {
			d.giveUp(r)
			return false
		}
		d.keepCordoned[oldNode.Name] = begun
		d.Wait("ControlPlanesFirst", "workers wait until all control planes are at the target", NodeReference(oldNode.Name), time.Time{})
	case !begun && h.OldNode != oldNode.Name:
		// The intent names the old node. The annotation of the Node only repeats it.
		if d.when(ruleReplacementDenies, d.refusesOldNode(r)) {
			d.postpone(r, h.Name+", its replacement node, keeps removing the annotation with the old node's name")
			return false
		}
		d.do(Action{Kind: AdoptReplacement, Node: h.Name, OldNode: oldNode.Name})
	default:
		return true
	}
	return false
}

// replacementServes reports whether the replacement node can take over: it is Ready, takes pods, and as a
// control plane it has completed its join and votes. Otherwise it waits. late: the wait takes too long.
func (d *Decision) replacementServes(r *replacement, late bool) bool {
	h, oldNode := r.newNode, r.oldNode
	switch {
	case !d.must(ruleReplacementReady, h.Ready):
		d.waitForReplacement(r, late, "HeirNotReady", fmt.Sprintf("%s, which replaces %s, is not Ready%s", h.Name, oldNode.Name, prefixed(": pod ", h.NotReadyPod)))
	case h.Role == v1alpha1.ControlPlaneRole && !d.must(ruleReplacementReady, !h.Unlabeled):
		// The operator leaves the old node when it is cordoned, and only labeled nodes take its pod. Without
		// the operator, a join that a power cut interrupts gets no certificate.
		d.waitForReplacement(r, late, "HeirNotReady", fmt.Sprintf("%s, which replaces %s, has not completed its join: it lacks the label of control planes", h.Name, oldNode.Name))
	case !d.must(ruleReplacementOpen, h.Cordon == Uncordoned):
		d.waitForReplacement(r, late, "HeirCordoned", fmt.Sprintf("%s, which replaces %s, is cordoned; uncordon it", h.Name, oldNode.Name))
	case h.Role == v1alpha1.ControlPlaneRole && !d.votes(h.Name):
		d.waitForReplacement(r, late, "HeirNotVoting", fmt.Sprintf("the etcd member of %s is not a started, healthy voter", h.Name))
	default:
		return true
	}
	return false
}

// mispaired reports whether r's machine was created to replace another node than r's old node.
func (d *Decision) mispaired(r *replacement) bool {
	if d.off == ruleMadeFor {
		return r.newNode.OldNode != "" && r.newNode.OldNode != r.OldNode
	}
	replaced, _ := d.madeFor(r.machine)
	return replaced != nil && replaced.ID != r.oldNode.ProviderID
}

// refusesOldNode reports whether the replacement node of r does not keep the annotation that names its old node for
// longer than an honest Node needs.
func (d *Decision) refusesOldNode(r *replacement) bool {
	return d.w.Now.After(r.machine.Since.Add(JoinDeadline + CreateDeadline))
}

// prefixed returns with and text, or the empty string if text is empty.
func prefixed(with, text string) string {
	if text == "" {
		return ""
	}
	return with + text
}

// waitForReplacement waits for a replacement node until its deadline, and then postpones the replacement.
func (d *Decision) waitForReplacement(r *replacement, late bool, reason, message string) {
	if d.when(ruleOverdue, late) {
		d.postpone(r, message)
		return
	}
	if r.oldNode.Replacement == r.newNode.Name {
		d.keepCordoned[r.oldNode.Name] = true
	}
	d.Wait(reason, message, NodeReference(r.newNode.Name), time.Time{})
}

// settleVanishedOldNode ends a replacement whose old node's Node is gone. If somebody deleted the Node,
// the replacement node stays. If another node was its replacement node, the replacement started from a stale
// observation, and the machine leaves.
func (d *Decision) settleVanishedOldNode(r *replacement) {
	for i := range d.w.Nodes {
		if n := &d.w.Nodes[i]; n.Confirmed && n.Name != r.newNode.Name && d.sameOldNode(r, n) {
			d.giveUp(r)
			return
		}
	}
	switch {
	case r.newNode.OldNode != r.OldNode && !d.when(ruleReplacementDenies, d.refusesOldNode(r)): // the replacement node stays, so it gets the name of its old node
		d.do(Action{Kind: AdoptReplacement, Node: r.newNode.Name, OldNode: r.OldNode})
	case d.when(ruleVanishedOldNode, true):
		d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
	}
}

// sameOldNode reports whether the machines of n and r were created to replace the same node.
func (d *Decision) sameOldNode(r *replacement, n *Node) bool {
	if d.off == ruleMadeFor {
		return n.OldNode == r.OldNode
	}
	m := d.Instance(n.ProviderID)
	return m != nil && m.ReplacesHash != "" && m.ReplacesHash == r.machine.ReplacesHash
}

func (d *Decision) drain(n *Node) {
	d.do(Action{Kind: DrainNode, Node: n.Name})
	if n.DrainBlocker != "" {
		d.Wait("DrainBlocked", fmt.Sprintf("%s cannot be drained: %s", n.Name, TruncateMessage(n.DrainBlocker)), NodeReference(n.Name), time.Time{})
	}
}

// othersWait reports whether another node could be replaced if n released its slot.
func (d *Decision) othersWait(n *Node) bool {
	if d.freeSlot(n.Role) >= 0 && d.inFlight < d.surge {
		return false
	}
	for i := range d.w.Nodes {
		if o := &d.w.Nodes[i]; o.Name != n.Name && o.Role == n.Role && d.candidate(o) {
			return true
		}
	}
	return false
}

// advanceIntent takes the next step of an intent that is no replacement: one that is bound to a
// machine that leaves, upgrades a node in place, or tracks a joining machine.
func (d *Decision) advanceIntent(in *Intent) {
	switch in.Goal {
	case v1alpha1.LeaveGoal:
		d.removeMachine(in)
		return
	case v1alpha1.UpgradeGoal:
		d.advanceUpgrade(in)
		return
	case v1alpha1.JoinGoal:
	}
	if _, ok := SurgeSlot(in.Name); ok {
		return
	}
	if in.refills() {
		d.refill(in)
		return
	}
	m, n := d.Instance(in.Machine), d.NodeOfMachine(in.Machine)
	switch {
	case Gone(m) || n != nil && d.joined(n):
		d.do(Action{Kind: ClearIntent, Intent: *in})
	case m != nil && m.Token != "" && d.tracked[m.Token]: // the replacement node of another intent
	case d.when(ruleOverdue, d.must(ruleOrphanDeadline, d.w.Now.After(in.Deadline))):
		bound := *in
		bound.Goal = v1alpha1.LeaveGoal
		d.do(Action{Kind: BindIntent, Intent: bound})
	case n != nil && d.w.Now.Add(JoinDeadline/2).After(in.Deadline): // most machines need a few minutes
		d.Wait(ReasonNeverReady, d.neverReady(n), NodeReference(n.Name), in.Deadline)
	}
}

// joined reports whether a joining machine has joined. A join can fail after the Node was created,
// and the join service gives a machine with a Node no second ticket. Such a machine would never
// become Ready. A node on hold is not changed.
func (d *Decision) joined(n *Node) bool {
	return n.Ready || n.OnHold || !d.when(ruleNeverReady, true)
}

// ReasonNeverReady is the reason of events about machines that are given up because their Node
// never became Ready.
const ReasonNeverReady = "NodeNeverReady"

// neverReady describes the removal of a node whose machine does not finish its join, and the
// remedy.
func (d *Decision) neverReady(n *Node) string {
	return fmt.Sprintf("Node %s has never been Ready, and a machine with a Node gets no second join ticket; machine and Node are deleted when the time to join is over; to delete them now, run `constellation machine revoke %s`", n.Name, n.Name)
}

// removeMachine removes a machine that is bound to leave: drain, etcd member, machine, Node. The
// intent ends when the cloud has confirmed that the machine is gone.
func (d *Decision) removeMachine(in *Intent) {
	if d.when(ruleRevoked, in.Revoked) {
		d.removeRevoked(in)
		return
	}
	n, m := d.NodeOfMachine(in.Machine), d.Instance(in.Machine)
	going := m != nil && (m.State == "Terminating" || m.State == "Terminated")
	name := in.Node
	if n != nil {
		name = n.Name
		d.keepCordoned[n.Name] = true
	}
	if n != nil && !going {
		switch {
		case n.Cordon == Uncordoned:
			d.do(Action{Kind: CordonNode, Node: n.Name, Replacement: n.Replacement})
			return
		case !d.must(ruleLeaseMoved, d.w.LeaderNode != n.Name):
			d.do(Action{Kind: YieldLease, Node: n.Name})
			return
		case !d.must(ruleLeavingDrained, n.Drained):
			d.drain(n)
			return
		}
	}
	if d.roleOf(in) == v1alpha1.ControlPlaneRole && !d.must(ruleMemberFirst, d.memberGone(in, n, name)) {
		return
	}
	switch {
	case !going:
		d.do(Action{Kind: DeleteInstance, Machine: d.idOf(in.Machine), Node: name})
	case n != nil:
		d.do(Action{Kind: DeleteNode, Node: n.Name, Machine: in.Machine})
	}
	if n == nil && !d.must(ruleGone, Gone(m)) {
		d.Wait("MachineLeaves", fmt.Sprintf("the cloud has not confirmed that machine %s is deleted", in.Machine), v1alpha1.Reference{Kind: "PendingNode", Name: in.Name}, time.Time{})
	} else if n == nil {
		d.do(Action{Kind: ClearIntent, Intent: *in})
	}
}

// memberGone reports whether the member of a leaving control plane has left etcd. Else it takes the
// next step towards that.
func (d *Decision) memberGone(in *Intent, n *Node, name string) bool {
	if len(d.w.Etcd) == 0 {
		d.Wait("EtcdUnknown", "the members of etcd could not be listed", v1alpha1.Reference{}, time.Time{})
		return false
	}
	i := d.memberOf(in.Machine, name)
	if i < 0 {
		return true
	}
	m := d.w.Etcd[i]
	if in.OldNode == name && n != nil && m.Voter && m.Healthy {
		newNode := d.replacementOf(n, in)
		if newNode == "" || !d.isMember(newNode) {
			// The replacement node was lost or left etcd after the old node was bound; it voted at that time. While the
			// old node's member is in etcd, nothing of its machine was changed, so the old node stays.
			if m := d.ByToken[in.Token]; d.when(ruleRevive, newNode != "" || Gone(m) || m == nil && d.w.Complete) {
				d.do(Action{Kind: ClearIntent, Intent: *in})
			}
			return false
		}
		if !d.votes(newNode) {
			d.Wait("HeirNotVoting", fmt.Sprintf("the etcd member of %s is not a started, healthy voter", newNode), NodeReference(newNode), time.Time{})
			return false
		}
	}
	switch {
	case !d.othersHealthy(m):
		d.Wait("EtcdUnhealthy", d.unhealthyOther(m), NodeReference(name), time.Time{})
	case !d.must(ruleLeaderMoved, !m.Leader):
		if to := d.nextLeader(name); to != "" {
			d.do(Action{Kind: MoveLeader, Node: name, Replacement: to})
		}
	default:
		d.removeMember(m)
	}
	return false
}

// memberOf returns the index of the member of a machine, which is called name; -1: it has none.
// A machine that got the name later may have a member too. Addresses distinguish the two.
func (d *Decision) memberOf(machine, name string) int {
	leaving := d.Instance(machine)
	return slices.IndexFunc(d.w.Etcd, func(m Member) bool {
		if m.NotStarted {
			return d.owns(name, m)
		}
		return m.Node == name && d.must(ruleMemberAddress, leaving == nil || atAddress(leaving, m) || !d.otherHas(name, leaving, m))
	})
}

// memberOn returns the member of n; one without an address, if it has none.
func (d *Decision) memberOn(n *Node) Member {
	if i := d.memberOf(n.ProviderID, n.Name); i >= 0 {
		return d.w.Etcd[i]
	}
	return Member{Node: n.Name}
}

// otherHas reports whether another existing machine called name has the address of m.
func (d *Decision) otherHas(name string, but *Instance, m Member) bool {
	return slices.ContainsFunc(d.w.Instances, func(i Instance) bool {
		return i.Name == name && i.ID != but.ID && i.Address != "" && i.Address == m.Address && !Gone(&i)
	})
}

// atAddress reports whether the member m can be that of the machine i, as far as addresses are known.
func atAddress(i *Instance, m Member) bool {
	return i.Address == "" || m.Address == "" || i.Address == m.Address
}

// replacementOf returns the name of the replacement node of n that stays. Machines count, because a Node may be missing
// from the observation.
func (d *Decision) replacementOf(n *Node, in *Intent) string {
	if m := d.ByToken[in.Token]; m != nil && !Gone(m) && d.leaving[m.ID] == nil {
		return m.Name
	}
	for i := range d.w.Nodes {
		if h := &d.w.Nodes[i]; h.Role == v1alpha1.ControlPlaneRole && h.OldNode == n.Name && !d.leaves(h) && !Gone(d.Instance(h.ProviderID)) {
			return h.Name
		}
	}
	return ""
}

func (d *Decision) votes(name string) bool {
	return slices.ContainsFunc(d.w.Etcd, func(m Member) bool { return m.Node == name && m.Voter && m.Healthy })
}

// same reports whether two members are one. Machines that had one name after the other have members
// of one name, at different addresses.
func (m Member) same(o Member) bool { return m.Node == o.Node && m.Address == o.Address }

// removeMember removes m from etcd.
func (d *Decision) removeMember(m Member) {
	d.do(Action{Kind: RemoveMember, Node: m.Node, Address: m.Address, MinVoters: d.votersWithout(m)})
}

// othersHealthy reports whether all members but one are started, healthy voters.
func (d *Decision) othersHealthy(but Member) bool {
	return d.must(ruleMembersHealthy, !slices.ContainsFunc(d.w.Etcd, func(m Member) bool { return !m.same(but) && (!m.Voter || !m.Healthy) }))
}

// unhealthyOther describes the other member that blocks the removal.
func (d *Decision) unhealthyOther(but Member) string {
	for _, m := range d.w.Etcd {
		switch {
		case m.same(but):
		case m.NotStarted:
			return fmt.Sprintf("the member %s of etcd has not started, so %s cannot leave", m.Node, but.Node)
		case !m.Voter:
			return fmt.Sprintf("the member of etcd on %s does not vote yet, so %s cannot leave", m.Node, but.Node)
		case !m.Healthy && m.Node == but.Node:
			return fmt.Sprintf("the member of etcd of an earlier or later machine called %s, at %s, is not healthy, so %s cannot leave", m.Node, cmp.Or(m.Address, "an unknown address"), but.Node)
		case !m.Healthy:
			return fmt.Sprintf("the member of etcd on %s is not healthy, so %s cannot leave", m.Node, but.Node)
		}
	}
	return fmt.Sprintf("not every other member of etcd is healthy, so %s cannot leave", but.Node)
}

func (d *Decision) votersWithout(but Member) int {
	n := 0
	for _, m := range d.w.Etcd {
		if m.Voter && !m.same(but) {
			n++
		}
	}
	return n
}

func (d *Decision) nextLeader(but string) string {
	for _, m := range d.w.Etcd {
		n := d.Nodes[m.Node]
		if m.Node != but && m.Voter && m.Healthy && n != nil && !d.leaves(n) {
			return m.Node
		}
	}
	return ""
}

// trackOrphans records intents for orphaned machines, and removes Nodes and etcd members of machines
// that are gone.
func (d *Decision) trackOrphans() {
	for i := range d.w.Instances {
		m := &d.w.Instances[i]
		if n := d.NodeOf[m.ID]; m.Name == "" || n != nil && (!d.w.Joining[n.Name] || d.joined(n)) || d.tracked[m.ID] || m.Token != "" && d.tracked[m.Token] || Gone(m) || m.State == "Terminating" {
			continue
		}
		if d.when(ruleTrack, true) {
			d.do(Action{Kind: RecordIntent, Intent: Intent{
				Name: MachinePrefix + m.Name, Goal: v1alpha1.JoinGoal, Machine: m.ID, Node: m.Name, Group: m.Group, Deadline: d.w.Now.Add(JoinDeadline),
			}})
		}
	}
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		switch {
		case n.ProviderID == "" || d.leaves(n):
		case d.when(ruleDeadNode, Gone(d.Instance(n.ProviderID)) && (!d.w.Joining[n.Name] || !isBare(n.ProviderID, d.Instance(n.ProviderID)))):
			// A Node that joins and has no incarnation yet can be that of a later machine with the
			// same name and ID, which the cloud's list may not contain.
			d.do(Action{Kind: DeleteNode, Node: n.Name, Machine: n.ProviderID})
		case !n.Confirmed:
		case d.when(ruleHalfGone, d.hasLeftEtcd(n)) && !d.controlPlaneMoves(), n.Obsolete && !d.replacementInPlace(n) && (n.Role != v1alpha1.ControlPlaneRole || !d.controlPlaneMoves()):
			d.do(Action{Kind: RecordIntent, Intent: Intent{
				Name: MachinePrefix + n.Name, Goal: v1alpha1.LeaveGoal, Machine: n.ProviderID, Node: n.Name, Group: n.Group, Deadline: d.w.Now.Add(JoinDeadline),
			}})
		}
	}
	d.deadMembers()
}

// hasLeftEtcd reports whether n is a control plane that was bound to leave and whose member has left
// etcd, while somebody deleted its intent. It must still leave. A member is removed only after the
// binding, so a stale observation changes nothing. We recognise n by our cordon or, if a stale
// reconcile removed that, by a replacement node that votes. Replacement nodes join one at a time, so
// n does not become a member then.
func (d *Decision) hasLeftEtcd(n *Node) bool {
	if n.Role != v1alpha1.ControlPlaneRole || len(d.w.Etcd) == 0 || d.isMember(n.Name) {
		return false
	}
	return n.Cordon == CordonedByUs || d.when(ruleReplacementVotes, d.replacementVotes(n))
}

// replacementVotes reports whether a replacement node of n that stays votes in etcd.
func (d *Decision) replacementVotes(n *Node) bool {
	return slices.ContainsFunc(d.w.Nodes, func(h Node) bool {
		return h.Role == v1alpha1.ControlPlaneRole && h.OldNode == n.Name && h.Name != n.Name && !d.leaves(&h) && d.votes(h.Name)
	})
}

func (d *Decision) isMember(name string) bool {
	return slices.ContainsFunc(d.w.Etcd, func(m Member) bool { return m.Node == name })
}

// replacementInPlace reports whether n is the replacement node of a replacement in progress.
func (d *Decision) replacementInPlace(n *Node) bool {
	return slices.ContainsFunc(d.replacements, func(r replacement) bool { return r.newNode == n })
}

// deadMembers removes members of etcd whose machine and Node are gone.
func (d *Decision) deadMembers() {
	if !d.w.Complete {
		return
	}
	for _, m := range d.w.Etcd {
		n := d.Nodes[m.Node]
		exists := n != nil && n.ProviderID != "" && d.hasMember(d.Instance(n.ProviderID), m) ||
			slices.ContainsFunc(d.w.Instances, func(i Instance) bool {
				return i.Name == m.Node && i.State != "Terminated" && d.hasMember(&i, m)
			})
		bound := slices.ContainsFunc(d.w.Intents, func(i Intent) bool {
			return i.Node == m.Node && i.Goal == v1alpha1.LeaveGoal && d.hasMember(d.Instance(i.Machine), m)
		})
		if m.NotStarted && !d.abandoned(m) {
			continue // its name is known when it starts
		}
		if d.when(ruleDeadMember, !exists && !bound && !m.Healthy) {
			d.removeMember(m)
		}
	}
}

// hasMember reports whether m can be the member of the machine i; nil: of a machine that is not known.
// A machine that got the name of a member later does not keep that member in etcd.
func (d *Decision) hasMember(i *Instance, m Member) bool {
	return i == nil || d.off == ruleMemberAddress || atAddress(i, m)
}

// A machine is a member of etcd before its etcd has started and reported its name. That takes
// seconds, or as long as the pull of an image.
const memberStarts = 2 * time.Minute

// owns reports whether a member that has not started belongs to the machine called name. Only its
// address is known.
func (d *Decision) owns(name string, m Member) bool {
	return m.Address != "" && slices.ContainsFunc(d.w.Instances, func(i Instance) bool {
		g := d.Group(i.Group)
		return i.Name == name && i.Address == m.Address && !Gone(&i) && (g == nil || g.Role == v1alpha1.ControlPlaneRole)
	})
}

// abandoned reports whether the machine of a member that has not started is gone. Such a member blocks
// all other members, so it is removed even while control planes move, unless an address is not
// known.
func (d *Decision) abandoned(m Member) bool {
	if d.w.Now.Before(m.Since.Add(memberStarts)) {
		return false
	}
	known := m.Address != ""
	for i := range d.w.Instances {
		o := &d.w.Instances[i]
		if g := d.Group(o.Group); Gone(o) || g != nil && g.Role != v1alpha1.ControlPlaneRole {
			continue
		}
		if known && o.Address == m.Address {
			return false
		}
		known = known && o.Address != ""
	}
	return known && d.seeControlPlanes() || !d.controlPlaneMoves() && !d.controlPlaneJoins()
}

// seeControlPlanes reports whether the cloud lists the machine of every control plane, also of
// requested ones.
func (d *Decision) seeControlPlanes() bool {
	for i := range d.w.Nodes {
		if n := &d.w.Nodes[i]; n.Role == v1alpha1.ControlPlaneRole && d.Instance(n.ProviderID) == nil {
			return false
		}
	}
	for i := range d.w.Intents {
		in := &d.w.Intents[i]
		if d.roleOf(in) == v1alpha1.ControlPlaneRole && in.Goal == v1alpha1.JoinGoal && d.ByToken[in.Token] == nil && d.Instance(in.Machine) == nil {
			return false
		}
	}
	return true
}

// candidate reports whether the replacement or upgrade of n could start now, given a slot.
func (d *Decision) candidate(n *Node) bool {
	return d.outdated(n) && !d.oldNodes[n.Name] && !d.postponed(n) && !d.hasLeftEtcd(n)
}

// startReplacements records intents for nodes that must be replaced or upgraded, while slots are free.
func (d *Decision) startReplacements() {
	if d.stopped() || len(d.w.Groups) == 0 {
		return
	}
	busy := map[string]int{} // replacements by group: all groups get their share
	for i := range d.replacements {
		busy[d.replacements[i].Group]++
	}
	next := d.candidates()
	if len(next) > 0 && d.isBarred() {
		return
	}
	for len(next) > 0 && (d.inFlight < d.surge || len(d.orphanedReplacements) > 0) {
		first := firstCandidate(next, busy)
		n := next[first]
		next = slices.Delete(next, first, first+1)
		place, inPlace := d.freeSlot(n.Role), !d.must(ruleInPlace, !d.inPlace(n))
		var lost *Instance
		if !inPlace {
			lost = d.orphanFor(n)
		}
		if place < 0 || lost == nil && d.inFlight >= d.surge {
			continue // a later node may have an orphaned replacement node
		}
		if n.Role == v1alpha1.ControlPlaneRole && lost == nil && d.untrackedControlPlane {
			d.Wait("ControlPlaneMoves", "another control plane is joining or leaving; the next one waits for it", NodeReference(n.Name), time.Time{})
			continue
		}
		if inPlace && (d.stuckGroup(n) || !d.mayUpgrade(n)) || !inPlace && !d.mayCreate(n.Role, d.Group(n.Group)) {
			next = slices.DeleteFunc(next, func(o *Node) bool { return o.Role == n.Role && o.Group == n.Group }) // the others of this group cannot start either
			continue
		}
		d.start(n, place, inPlace, lost)
		busy[n.Group]++
	}
}

// candidates returns the nodes that may be replaced or upgraded now, as far as they themselves and the order
// of roles are concerned. It reports those that wait.
func (d *Decision) candidates() (next []*Node) {
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		if n.Role == v1alpha1.ControlPlaneRole && d.outdated(n) && d.onHold(n) {
			d.Wait("ControlPlaneHeld", fmt.Sprintf("control plane %s is on hold, and workers wait for all control planes; resume it to continue", n.Name), NodeReference(n.Name), time.Time{})
		}
		if n.Role == v1alpha1.ControlPlaneRole && d.must(ruleOneControlPlane, !d.controlPlaneMoves()) || n.Role == v1alpha1.WorkerRole && d.must(ruleControlPlaneFirst, d.controlPlanesDone) {
			if d.candidate(n) {
				next = append(next, n)
			} else if d.outdated(n) && d.postponed(n) && !d.onHold(n) {
				d.Wait("Postponed", fmt.Sprintf("the replacement of %s is postponed", n.Name), NodeReference(n.Name), n.PostponedUntil)
			}
		}
	}
	return next
}

// firstCandidate returns the index of the node that comes next: of the group with the fewest replacements, and
// within it nodes that were never postponed, then by name.
func firstCandidate(next []*Node, busy map[string]int) (first int) {
	for i, n := range next {
		if o := next[first]; cmp.Or(strings.Compare(string(n.Role), string(o.Role)), boolOrder(!n.PostponedUntil.IsZero(), !o.PostponedUntil.IsZero()), cmp.Compare(busy[n.Group], busy[o.Group])) < 0 {
			first = i
		}
	}
	return first
}

// start records the intent to upgrade n in place, to replace it by the orphaned machine lost, or by a new one,
// in that order, and takes the slot.
func (d *Decision) start(n *Node, place int, inPlace bool, lost *Instance) {
	in := Intent{Name: slotPrefix + strconv.Itoa(place), Goal: v1alpha1.JoinGoal, OldNode: n.Name, Group: n.Group, Deadline: d.w.Now.Add(CreateDeadline)}
	switch {
	case inPlace:
		in = Intent{Name: in.Name, Goal: v1alpha1.UpgradeGoal, Machine: n.ProviderID, Node: n.Name, Group: n.Group, Deadline: d.w.Now.Add(JoinDeadline)}
		d.inFlight++
	case lost != nil:
		in.Token = lost.Token // the orphaned replacement node holds its slot already
	default:
		in.Token = token(n, in.Name, d.w.Now)
		d.inFlight++
	}
	d.do(Action{Kind: RecordIntent, Intent: in})
	d.oldNodes[n.Name], d.takenSlots[place] = true, true
	if in.Token != "" {
		d.tracked[in.Token] = true
	}
}

// replaces reports whether the machine of n was created to replace o, by its token or by
// an intent.
func (d *Decision) replaces(n, o *Node) bool {
	m := d.Instance(n.ProviderID)
	if m == nil || !n.Confirmed {
		return false
	}
	return d.oldNodeOf(m, n) == o || slices.ContainsFunc(d.w.Intents, func(in Intent) bool { return m.Token != "" && in.Token == m.Token && in.OldNode == o.Name })
}

// orphanFor returns an orphaned machine that can replace n, or nil.
func (d *Decision) orphanFor(n *Node) *Instance {
	for _, m := range d.orphanedReplacements {
		if !strings.EqualFold(m.Group, n.Group) || d.tracked[m.Token] || d.leaving[m.ID] != nil || m.State == "Terminating" {
			continue
		}
		if replaced, pinned := d.madeFor(m); pinned && d.off != ruleMadeFor && (replaced == nil || replaced.ID != n.ProviderID) {
			continue
		}
		if h := d.NodeOf[m.ID]; h == nil || !d.hasLeftEtcd(h) && (h.OldNode == "" || h.OldNode == n.Name || d.oldNodeOf(m, h) == n) && d.atTarget(h) {
			return m
		}
	}
	return nil
}

func boolOrder(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// freeSlot returns the lowest free surge slot, or -1. Control planes use the first slot only, so that
// two leaders cannot replace two of them at a time.
func (d *Decision) freeSlot(role v1alpha1.Role) int {
	places := d.surge + d.stuckSlots
	if d.when(ruleOneControlPlane, role == v1alpha1.ControlPlaneRole) {
		places = 1
	}
	for p := range places {
		if !d.takenSlots[p] {
			return p
		}
	}
	return -1
}

// token makes a create request idempotent. The same world yields the same token, a later attempt
// another. It ends in the hash of the replaced machine. The cloud keeps it while the new machine
// exists, so no Node can change what a machine replaces.
func token(n *Node, place string, now time.Time) string {
	sum := sha256.Sum256([]byte(n.ProviderID + "\x00" + place + "\x00" + now.UTC().Format(time.RFC3339Nano)))
	return hex.EncodeToString(sum[:12]) + tokenSeparator + MachineHash(n.ProviderID)
}

// releaseCordons uncordons nodes that stay, and removes the names of their replacement nodes. Cordons of others
// stay.
func (d *Decision) releaseCordons() {
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		if n.Replacement == "" && n.Cordon == Uncordoned || !n.Confirmed {
			continue
		}
		if d.keepCordoned[n.Name] || n.Role == v1alpha1.ControlPlaneRole && n.Cordon == CordonedByUs && d.when(ruleHalfGone, !d.isMember(n.Name)) {
			continue
		}
		marked := n.Replacement != ""
		ours := d.when(ruleUncordon, n.Cordon != Uncordoned && d.must(ruleForeignCordon, n.Cordon == CordonedByUs))
		if marked || ours {
			d.do(Action{Kind: ReleaseNode, Node: n.Name, Uncordon: ours})
		}
	}
}

// autoscaling pauses the autoscaler while there is work, and resumes it if the operator paused it.
func (d *Decision) autoscaling() {
	a := d.w.Autoscaler
	work := d.when(ruleWorkBeforeGivenBack, len(d.w.Intents) > 0 || d.w.Run.Active()) ||
		slices.ContainsFunc(d.Actions, func(a Action) bool { return a.Kind == RecordIntent })
	place := func(in Intent) bool { _, ok := SurgeSlot(in.Name); return ok || in.refills() }
	d.Exclusive = d.w.Run.Active() || slices.ContainsFunc(d.w.Intents, place)
	if !d.stopped() {
		due := d.workDue()
		work, d.Exclusive = work || due, d.Exclusive || due
	}
	if work {
		if a.Enabled && !d.w.NodesLocked {
			d.do(Action{Kind: PauseAutoscaler})
		}
		return
	}
	if d.spec.Rollout.Paused && !d.spec.Rollout.Cancel && d.refusal == "" {
		since := d.w.Now
		if b := d.w.Before.Waiting; b != nil && b.Reason == reasonPaused {
			since = b.Since.Time
		}
		until := since.Add(pausedGivesBack)
		d.Wait(reasonPaused, "the rollout is paused; set spec.rollout.paused to false to continue", v1alpha1.Reference{}, time.Time{})
		if d.w.Now.Before(until) && d.behind() {
			return
		}
	}
	if d.when(ruleGiveBack, !a.Enabled && d.must(ruleOthersAutoscaler, a.PausedByUs)) {
		d.do(Action{Kind: ResumeAutoscaler})
	}
}

// workDue reports whether an upgrade of Kubernetes, a replacement or an in-place upgrade could
// start, apart from conditions that end by themselves.
func (d *Decision) workDue() bool {
	pub := d.w.Before.JoinComponents.ControlPlane
	if pub != "" && pub != d.spec.KubernetesComponentsReference {
		return true
	}
	workers := d.controlPlanesDone || d.controlPlaneUnknown || d.controlPlanesOutdated && !d.controlPlaneOnHold
	for i := range d.w.Nodes {
		if n := &d.w.Nodes[i]; (n.Role == v1alpha1.ControlPlaneRole || workers) && d.candidate(n) {
			return true
		}
	}
	return false
}

// behind reports whether a node must be replaced or upgraded, now or later.
func (d *Decision) behind() bool {
	for i := range d.w.Nodes {
		if d.outdated(&d.w.Nodes[i]) {
			return true
		}
	}
	return false
}
