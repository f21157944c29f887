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

// Times of the policy, all measured by our own clock. Creating is short because the
// cloud accepts a request or does not; joining is as long as the slowest machine that
// was seen to join.
const (
	CreateDeadline  = 5 * time.Minute
	JoinDeadline    = 30 * time.Minute
	DrainDeadline   = 15 * time.Minute
	Postponement    = 10 * time.Minute
	UpgradeRetry    = 2 * time.Minute
	pausedGivesBack = 10 * time.Minute
)

// Decide returns what to do next to bring the world to spec, and what to tell about
// it. It is pure, and all policy is in it and in the table of rules.
//
// The actions are independent of each other: each is safe by itself, in any order,
// when the others fail, when it is done twice, and when the world has moved on since
// it was observed. So a reader may go through the rules one by one, and whoever acts
// may stop after any of them.
func Decide(spec v1alpha1.NodeVersionSpec, w World) *Decision { return plan(spec, w, everyRule) }

// plan decides with one rule switched off; everyRule is none.
func plan(spec v1alpha1.NodeVersionSpec, w World, off rule) *Decision {
	d := &Decision{off: off, spec: spec, w: w}
	d.index()
	d.upgradeKubernetes()
	for i := range d.replacements {
		d.advanceReplacement(&d.replacements[i])
	}
	for i := range w.Intents {
		d.advanceIntent(&w.Intents[i])
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
	groups  map[string]*Group
	replacements  []replacement      // those under way, by place
	donors  map[string]bool    // names of nodes with a replacement
	leaving map[string]*Intent // by ID of the machine
	tracked map[string]bool    // IDs and tokens that an intent speaks of
	takenSlots   map[int]bool       // places that an intent holds
	orphanedHeirs    []*Instance        // machines of ours that lost their intent
	// A control plane is on its way in or out beside the one place: its intent was
	// deleted, or it is bound to leave by an intent that holds no place.
	untrackedControlPlane bool
	keepCordoned          map[string]bool // nodes whose cordon is meant
	refusal           string          // why the target is not gone to; empty: it is
	controlPlanesDone            bool            // every control plane is at the target, and none on its way in or out
	controlPlanesOutdated            bool            // a control plane is to be replaced
	controlPlaneOnHold            bool            // one that is to be replaced is held by its owner
	controlPlaneUnknown         bool            // the cloud does not describe one's machine
	inFlight          int             // machines beyond those that the groups shall have, or upgraded in place
	surge             int
	stuckGroups             map[string]int // upgrades in place that do not get on, by group, in lower case
	stuckSlots       int            // that these hold

	Actions []Action
	Waits   []Wait
	// Exclusive says that the cluster's nodes are not to be touched by others: some are being replaced
	// or upgraded, or are to be.
	Exclusive bool
}

// replacement is an intent with what it speaks of; each of donor, machine and heir
// may be missing.
type replacement struct {
	*Intent
	slot   int
	donor   *Node
	machine *Instance
	heir    *Node
}

// placePrefix begins the names of intents that hold a place of the surge budget. Names
// are unique, so two leaders cannot exceed the budget, whatever they last saw.
const (
	slotPrefix   = "replace-"
	MachinePrefix = "machine-"
)

func SurgeSlot(name string) (int, bool) {
	s, ok := strings.CutPrefix(name, slotPrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 0
}

// index orders what was observed.
func (d *Decision) index() {
	d.groups, d.leaving = make(map[string]*Group, 2*len(d.w.Groups)), map[string]*Intent{}
	d.tracked, d.keepCordoned, d.donors, d.takenSlots, d.stuckGroups = map[string]bool{}, map[string]bool{}, map[string]bool{}, map[int]bool{}, map[string]int{}
	if d.Lookup = d.w.Lookup; d.Lookup == nil || !byName(d.w.Nodes) {
		d.w.Nodes = sorted(d.w.Nodes) // a copy, because they are judged
		d.Lookup = lookupWithout(&d.w, d.off)
	}
	for i := range d.w.Groups {
		g := &d.w.Groups[i]
		d.groups[g.ID], d.groups[strings.ToLower(g.ID)] = g, g
	}
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
				d.donors[in.Node] = true
			}
			if in.Goal == v1alpha1.JoinGoal {
				d.replacements = append(d.replacements, d.replacement(in, p))
			}
			if in.Donor != "" {
				d.donors[in.Donor] = true
			}
		}
	}
	slices.SortFunc(d.replacements, func(a, b replacement) int { return cmp.Compare(a.slot, b.slot) })
	for i := range d.w.Instances {
		m := &d.w.Instances[i]
		leaves := m.State == "Terminating" && d.NodeOf[m.ID] == nil && !d.tracked[m.ID] && !d.tracked[m.Token]
		lost := d.isOrphanedHeir(m)
		if lost {
			d.orphanedHeirs = append(d.orphanedHeirs, m)
		}
		if g := d.Group(m.Group); g != nil && g.Role == v1alpha1.ControlPlaneRole {
			d.untrackedControlPlane = d.untrackedControlPlane || lost || leaves
		}
		if d.when(ruleStrayBudget, lost || leaves) {
			d.inFlight++
		}
	}
	confirmed := 0
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		d.untrackedControlPlane = d.untrackedControlPlane || d.hasLeftEtcd(n) && !d.leaves(n)
		if n.Confirmed { // no others raise what is a part of all
			confirmed++
		}
	}
	d.surge = surge(d.spec.Rollout.MaxSurge, confirmed-d.surplusNodes())
	d.refusal = d.refuse()
	d.controlPlanes()
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

// surplusNodes counts the nodes beyond those that there shall be: of a replacement whose
// donor and heir are both Nodes, one is to go. One whose heir has not joined has none. An
// heir that lost its intent is one as well.
func (d *Decision) surplusNodes() int {
	n := 0
	for _, m := range d.orphanedHeirs {
		if d.NodeOf[m.ID] != nil {
			n++
		}
	}
	for i := range d.w.Intents {
		in := &d.w.Intents[i]
		if _, ok := SurgeSlot(in.Name); !ok || d.Nodes[in.Donor] == nil {
			continue
		}
		if m := d.ByToken[in.Token]; m != nil && d.NodeOf[m.ID] != nil {
			n++
		}
	}
	return n
}

func (d *Decision) replacement(in *Intent, place int) replacement {
	r := replacement{Intent: in, slot: place, donor: d.Nodes[in.Donor], machine: d.ByToken[in.Token]}
	if r.machine != nil {
		r.heir = d.NodeOf[r.machine.ID]
	}
	return r
}

// idOf returns the ID of a machine as the cloud writes it now.
func (d *Decision) idOf(id string) string {
	if m := d.Instance(id); m != nil {
		return m.ID
	}
	return id
}

// isOrphanedHeir reports whether m was created by us to replace a node that is still there,
// and its intent is gone, because somebody has deleted it.
func (d *Decision) isOrphanedHeir(m *Instance) bool {
	if m.Token == "" || d.tracked[m.Token] || Gone(m) {
		return false
	}
	n := d.NodeOf[m.ID]
	replaced, pinned := d.madeFor(m)
	pinned = pinned && d.off != ruleMadeFor
	if n == nil || !known(n) || d.leaves(n) {
		// Once what it was made for is gone it is a machine like any other, whatever its
		// Node claims or keeps to itself.
		return !pinned || !d.w.Complete || replaced != nil && !Gone(replaced)
	}
	if !d.atTarget(n) || d.inPlace(n) {
		return false
	}
	donor := d.donorOf(m, n)
	return donor != nil && d.outdated(donor)
}

// donorOf returns the node that m was made to replace, if that is still a node; nil:
// there is none. n is the node of m. The token of m says which it is. The Node of one
// that an older operator has created says it, and is believed if its donor agrees.
func (d *Decision) donorOf(m *Instance, n *Node) *Node {
	replaced, pinned := d.madeFor(m)
	switch {
	case d.off == ruleMadeFor:
		return d.Nodes[n.Donor]
	case pinned && replaced != nil:
		return d.NodeOf[replaced.ID]
	case pinned:
		return nil
	}
	if donor := d.Nodes[n.Donor]; donor != nil && donor.Heir == n.Name {
		return donor
	}
	return nil
}

// surge returns how many machines there may be beyond those that shall be.
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

func Gone(m *Instance) bool { return m != nil && m.State == "Terminated" }

// known reports whether it is certain what n is made from.
func known(n *Node) bool {
	return n.Confirmed && n.Image != "" && n.Components != "" && n.ProviderID != ""
}

// atTarget reports whether n is what the target says. The image of a node that is
// upgraded in place stays.
func (d *Decision) atTarget(n *Node) bool {
	return n.Confirmed && n.Components == d.spec.KubernetesComponentsReference && (strings.EqualFold(n.Image, d.spec.Image) || d.inPlace(n))
}

// inPlace reports whether n is upgraded as it is.
func (d *Decision) inPlace(n *Node) bool {
	g := d.Group(n.Group)
	return g != nil && g.Strategy == v1alpha1.InPlaceStrategy
}

func (d *Decision) leaves(n *Node) bool { return d.leaving[n.ProviderID] != nil }

func (d *Decision) Group(id string) *Group {
	if g := d.groups[id]; g != nil {
		return g
	}
	return d.groups[strings.ToLower(id)]
}

// roleOf returns the role of the machine of an intent. What the cloud says comes before
// what was written down, which may have been a Node's claim.
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
	if n := d.Nodes[in.Donor]; n != nil {
		return n.Role
	}
	return ""
}

// outdated reports whether n is to be replaced or upgraded, now or later.
func (d *Decision) outdated(n *Node) bool {
	return d.must(ruleKnown, known(n)) && !d.atTarget(n) && !n.Obsolete && !d.leaves(n) && d.Group(n.Group) != nil &&
		d.must(ruleKeepWorkers, n.Role == v1alpha1.ControlPlaneRole || !d.spec.Rollout.KeepWorkers)
}

// postponed reports whether n is not to be replaced now. A replacement that is under way is
// given up, unless its donor cannot stay any more.
func (d *Decision) postponed(n *Node) bool { return d.w.Now.Before(n.PostponedUntil) || d.onHold(n) }

// onHold reports whether the owner of n wants it left as it is.
func (d *Decision) onHold(n *Node) bool {
	g := d.Group(n.Group)
	return !d.must(ruleHeld, !n.OnHold && (g == nil || !g.OnHold))
}

// stopped reports whether nothing new is to begin.
func (d *Decision) stopped() bool {
	return !d.must(ruleStoppedBegins, !d.spec.Rollout.Paused && !d.spec.Rollout.Cancel) || d.refusal != ""
}

// controlPlanes finds out how far the control planes are.
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
	d.controlPlanesDone = d.controlPlanesDone && !d.controlPlaneJoins() // one may be about to join
}

// refuse says why the target cannot be gone to, whatever the cluster does.
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
	// A kubelet reports its own version. A worker's is never above what was published.
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
		return fmt.Sprintf("the cluster runs Kubernetes %s already and never goes down to %s; set kubernetesClusterVersion to %s or newer", newest, want, newest)
	}
	if have, err := version.Parse(d.w.Versions[d.w.Before.JoinComponents.ControlPlane]); err == nil && (have.Major() != want.Major() || want.Minor() > have.Minor()+1) {
		return fmt.Sprintf("Kubernetes %s is more than one minor version above %s; go to v%d.%d first", want, have, have.Major(), have.Minor()+1)
	}
	return ""
}

// upgradeKubernetes brings the control plane's Kubernetes to the target through the agent,
// once per target, then lets joining machines have it, role by role, and gives groups
// their image. What is published is the memory of what was done: no API server is
// asked which version it is.
func (d *Decision) upgradeKubernetes() {
	pub, want := d.w.Before.JoinComponents, d.spec.KubernetesComponentsReference
	if pub.ControlPlane == "" || pub.Worker == "" {
		if first := joinComponents(d.spec, pub, d.w); first != pub {
			d.publish(first)
		} else {
			d.Wait("ComponentsUnknown", "what joining machines shall install was never published, and the control plane does not run the target's Kubernetes", v1alpha1.Reference{}, time.Time{})
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
		if given == want && !g.NotListed && !strings.EqualFold(g.Image, d.spec.Image) {
			d.do(Action{Kind: SetGroupImage, Group: g.ID, Image: d.spec.Image})
		}
	}
}

// upgraded reports whether control planes may be made from the target's components.
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
		return // seen in status.upgrade
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
		d.Wait("ControlPlaneMoves", "a control plane is on its way in or out; Kubernetes is upgraded when it has settled", v1alpha1.Reference{}, time.Time{})
	case host == nil:
		d.Wait("NoControlPlane", "no control plane is Ready whose agent could upgrade Kubernetes", v1alpha1.Reference{}, time.Time{})
	default:
		a := Action{Kind: StartUpgrade, Node: host.Name, Version: d.spec.KubernetesClusterVersion, Components: d.spec.KubernetesComponentsReference}
		if same {
			a.Ended = r.Ended
		}
		d.do(a)
	}
}

// isBarred reports whether nothing may begin now, and says what is waited for.
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

// controlPlaneJoins reports whether the cloud has a machine of a control plane that is no Node yet.
func (d *Decision) controlPlaneJoins() bool {
	return slices.ContainsFunc(d.w.Instances, func(m Instance) bool {
		g := d.Group(m.Group)
		return g != nil && g.Role == v1alpha1.ControlPlaneRole && d.NodeOf[m.ID] == nil && !Gone(&m)
	})
}

// agent returns the control plane whose agent upgrades Kubernetes: the one that the
// operator is on, whose socket it has.
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

// advanceReplacement does the next thing for a replacement that is under way.
func (d *Decision) advanceReplacement(r *replacement) {
	switch {
	case r.machine == nil:
		d.create(r)
	case Gone(r.machine):
		if r.heir == nil { // else its Node goes first
			d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
		}
	case d.when(ruleHeirStays, d.replaced(r)):
		if r.heir == nil {
			d.Wait("IntentSettles", fmt.Sprintf("the etcd member of %s votes, and its Node is not seen", r.machine.Name), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, time.Time{})
			return
		}
		d.do(Action{Kind: ClearIntent, Intent: *r.Intent}) // the donor goes as one that is half gone
	case d.unneeded(r) || r.donor != nil && d.postponed(r.donor):
		d.giveUp(r)
	case r.heir == nil:
		late := d.w.Now.After(r.machine.Since.Add(JoinDeadline)) || r.machine.State == "Failed"
		if d.when(ruleOverdue, late) {
			d.postpone(r, "")
			return
		}
		d.Wait("MachineJoins", fmt.Sprintf("machine %s, which replaces %s, has not joined yet; it is given up when its time is over", r.machine.Name, r.Intent.Donor), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, r.machine.Since.Add(JoinDeadline))
	default:
		d.completeReplacement(r)
	}
}

// unneeded reports whether the donor of r is not to be replaced by r any more.
func (d *Decision) unneeded(r *replacement) bool {
	if r.machine != nil && d.leaving[r.machine.ID] != nil || r.heir != nil && d.hasLeftEtcd(r.heir) {
		return true
	}
	if r.donor == nil || !r.donor.Confirmed {
		return false
	}
	// A donor whose member has left etcd cannot stay, so its heir has to.
	if !d.hasLeftEtcd(r.donor) && (known(r.donor) && d.atTarget(r.donor) || r.donor.Obsolete || d.leaves(r.donor) || !d.must(ruleInPlace, !d.inPlace(r.donor)) || d.upgrades(r.donor)) {
		return true
	}
	for i := range d.replacements {
		if o := &d.replacements[i]; o.Intent.Donor == r.Intent.Donor && o.slot < r.slot {
			return true
		}
	}
	for i := range d.w.Intents { // one that is already bound to the donor
		if o := &d.w.Intents[i]; o.Name != r.Name && o.Donor == r.Intent.Donor && o.Machine == r.donor.ProviderID {
			return true
		}
	}
	return r.heir != nil && r.heir.Obsolete
}

// replaced reports whether the donor of r has left etcd, and the heir votes in its
// place. The intent under which that happened was deleted by somebody. It is settled
// all the same that the donor goes, and the heir must not be given up any more,
// however long the donor's drain takes. Members are not known to be gone by Nodes,
// which may not be seen.
func (d *Decision) replaced(r *replacement) bool {
	return d.roleOf(r.Intent) == v1alpha1.ControlPlaneRole && r.donor != nil && !d.isMember(r.donor.Name) && d.votes(r.machine.Name) &&
		(r.heir == nil || d.donorOf(r.machine, r.heir) == r.donor)
}

// create asks the cloud for the machine of an intent. It is the same request however
// often it is made, since the token is the same.
func (d *Decision) create(r *replacement) {
	late := d.w.Now.After(r.Deadline)
	needed := r.donor != nil && d.outdated(r.donor) && !d.onHold(r.donor) && !d.unneeded(r)
	switch role, g := d.roleOf(r.Intent), d.Group(r.Group); {
	case late && !d.w.Complete:
		d.Wait(ReasonPartial, fmt.Sprintf("whether the cloud has made a machine for %s is known when it lists all machines again", r.Intent.Donor), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, time.Time{})
	case !d.must(ruleNoLateCreate, !late):
		// A request that is still on its way has arrived or failed by now.
		if needed && !d.postponed(r.donor) {
			d.postpone(r, "the cloud has not made its machine")
		} else if d.when(ruleUnseenOverdue, true) {
			d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
		}
	case !needed:
		if !d.when(ruleUnseenKept, true) {
			d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
			return
		}
		d.Wait("IntentSettles", fmt.Sprintf("%s needs no replacement any more; whether the cloud has made a machine for it is known soon", r.Intent.Donor), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, r.Deadline)
	case d.orphanedHeirFor(r.donor) != nil:
		d.Wait("IntentSettles", fmt.Sprintf("a machine that can replace %s is there already; its intent was deleted", r.Intent.Donor), v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, r.Deadline)
	case role == v1alpha1.ControlPlaneRole && !d.must(ruleCountedTwice, !d.untrackedControlPlane):
		d.Wait("ControlPlaneMoves", "another control plane is on its way in or out; the next one waits until it has settled", v1alpha1.Reference{Kind: "PendingNode", Name: r.Name}, r.Deadline)
	case !d.mayCreate(role, g):
	default:
		d.do(Action{Kind: CreateInstance, Intent: *r.Intent})
	}
}

// mayCreate reports whether a new machine of a group would be at the target, and
// nobody else changes the number of machines meanwhile. It says what it waits for.
func (d *Decision) mayCreate(role v1alpha1.Role, g *Group) bool {
	switch {
	case g == nil || d.refusal != "":
		return false
	case g.NotListed:
		d.Wait("GroupMissing", fmt.Sprintf("the cloud does not list group %s, so none of its machines can be made; delete its ScalingGroup if it is gone", g.Name), v1alpha1.Reference{Kind: "ScalingGroup", Name: g.Name}, time.Time{})
		return false
	case !d.must(ruleWholeList, d.w.Complete):
		d.Wait(ReasonPartial, "the cloud did not list all machines, so no more are made", v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(ruleCountedTwice, d.inFlight <= d.surge):
		d.Wait("BudgetExceeded", fmt.Sprintf("%d machines are on their way in or out already, and %d may be", d.inFlight, d.surge), v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(ruleAutoscalerStopped, !d.w.Autoscaler.Running):
		d.Wait("AutoscalerRuns", "the cluster autoscaler has not stopped yet", v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(rulePublishedFirst, d.published(role)):
		return false
	case !d.must(ruleGroupImage, strings.EqualFold(g.Image, d.spec.Image)):
		d.Wait("GroupImage", fmt.Sprintf("the cloud makes machines of group %s from another image yet", g.Name), v1alpha1.Reference{Kind: "ScalingGroup", Name: g.Name}, time.Time{})
		return false
	case !d.must(ruleControlPlaneFirst, role == v1alpha1.ControlPlaneRole || d.controlPlanesDone):
		d.Wait("ControlPlanesFirst", "workers wait until all control planes are at the target", v1alpha1.Reference{}, time.Time{})
		return false
	}
	return true
}

// giveUp binds the intent to the heir: the machine goes, the donor stays.
func (d *Decision) giveUp(r *replacement) {
	in := *r.Intent
	in.Goal, in.Machine, in.Node = v1alpha1.LeaveGoal, r.machine.ID, r.machine.Name
	d.do(Action{Kind: BindIntent, Intent: in})
}

// postpone notes on the donor that others come first. The intent is given up after
// that, so that a crash in between cannot make the same attempt begin again.
func (d *Decision) postpone(r *replacement, why string) {
	switch {
	case r.donor != nil && d.outdated(r.donor):
		d.do(Action{Kind: PostponeNode, Node: r.donor.Name, Until: d.w.Now.Add(Postponement)})
		d.Wait("Postponed", fmt.Sprintf("the replacement of %s is tried again later: %s", r.donor.Name, cmp.Or(why, "its new machine did not join in time")), NodeReference(r.donor.Name), d.w.Now.Add(Postponement))
	case r.machine != nil:
		d.giveUp(r)
	}
}

// completeReplacement lets the heir, which is a Node, take the donor's place.
func (d *Decision) completeReplacement(r *replacement) {
	h, donor := r.heir, r.donor
	overdue := d.w.Now.After(r.machine.Since.Add(JoinDeadline))
	worker := h.Role != v1alpha1.ControlPlaneRole
	begun := donor != nil && donor.Heir == h.Name
	switch {
	case donor == nil:
		d.settleVanishedDonor(r)
		return
	case !donor.Confirmed:
		d.keepCordoned[donor.Name] = begun
		d.Wait("MachineUnknown", fmt.Sprintf("the cloud does not describe the machine of %s at the moment, so it stays", donor.Name), NodeReference(donor.Name), time.Time{})
		return
	case d.mispaired(r):
		// Without the intent the machine is found again for the one that it belongs to.
		d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
		return
	case !known(h):
		if d.when(ruleOverdue, overdue) {
			d.postpone(r, "")
			return
		}
		d.Wait("HeirUnknown", fmt.Sprintf("it is not known yet what %s runs", h.Name), NodeReference(h.Name), time.Time{})
		return
	case !d.must(ruleHeirVersion, d.atTarget(h)):
		d.giveUp(r)
		return
	case worker && !d.controlPlanesDone:
		if d.controlPlanesOutdated && r.slot == 0 {
			d.giveUp(r)
			return
		}
		d.keepCordoned[donor.Name] = begun
		d.Wait("ControlPlanesFirst", "workers wait until all control planes are at the target", NodeReference(donor.Name), time.Time{})
		return
	case !begun && h.Donor != donor.Name:
		// The intent says what it replaces, and the Node is only to repeat it.
		if d.when(ruleHeirDenies, d.refusesDonor(r)) {
			d.postpone(r, h.Name+", its new machine, does not keep the annotation that names what it replaces")
			return
		}
		d.do(Action{Kind: AdoptHeir, Node: h.Name, Donor: donor.Name})
		return
	}
	drainOverdue := donor.Cordon == CordonedByUs && d.w.Now.After(donor.CordonedSince.Add(DrainDeadline))
	late := overdue && !begun || begun && drainOverdue
	switch {
	case !d.must(ruleHeirReady, h.Ready):
		d.waitForHeir(r, late, "HeirNotReady", fmt.Sprintf("%s, which replaces %s, is not Ready%s", h.Name, donor.Name, prefixed(": pod ", h.NotReadyPod)))
		return
	case !d.must(ruleHeirOpen, h.Cordon == Uncordoned):
		d.waitForHeir(r, late, "HeirCordoned", fmt.Sprintf("%s, which replaces %s, is cordoned; uncordon it", h.Name, donor.Name))
		return
	case !worker && !d.votes(h.Name):
		d.waitForHeir(r, late, "HeirNotVoting", fmt.Sprintf("the etcd member of %s is not a started, healthy voter", h.Name))
		return
	case !begun || donor.Cordon == Uncordoned:
		d.keepCordoned[donor.Name] = true
		d.do(Action{Kind: CordonNode, Node: donor.Name, Heir: h.Name})
		return
	}
	d.keepCordoned[donor.Name] = true
	switch {
	case !d.must(ruleLeaseMoved, d.w.LeaderNode != donor.Name):
		d.do(Action{Kind: YieldLease, Node: donor.Name})
	case !d.must(ruleDrained, donor.Drained):
		d.drain(donor)
		if d.when(ruleBlockedGoesBy, drainOverdue && d.othersWait(donor)) {
			d.postpone(r, "its drain is blocked: "+TruncateMessage(donor.DrainBlocker))
		}
	case !worker && !d.othersHealthy(donor.Name):
		d.Wait("EtcdUnhealthy", d.unhealthyOther(donor.Name), NodeReference(donor.Name), time.Time{})
	default:
		in := *r.Intent
		in.Goal, in.Machine, in.Node = v1alpha1.LeaveGoal, donor.ProviderID, donor.Name
		d.do(Action{Kind: BindIntent, Intent: in})
	}
}

// mispaired reports whether r's machine was created to replace another node than r's donor.
func (d *Decision) mispaired(r *replacement) bool {
	if d.off == ruleMadeFor {
		return r.heir.Donor != "" && r.heir.Donor != r.Intent.Donor
	}
	replaced, _ := d.madeFor(r.machine)
	return replaced != nil && replaced.ID != r.donor.ProviderID
}

// refusesDonor reports whether the heir of r has had more time to take the note of its donor
// than it needs.
func (d *Decision) refusesDonor(r *replacement) bool {
	return d.w.Now.After(r.machine.Since.Add(JoinDeadline + CreateDeadline))
}

// prefixed is a text with what introduces it; empty if there is none.
func prefixed(with, text string) string {
	if text == "" {
		return ""
	}
	return with + text
}

// waitForHeir waits for an heir, as long as it has time.
func (d *Decision) waitForHeir(r *replacement, late bool, reason, message string) {
	if d.when(ruleOverdue, late) {
		d.postpone(r, message)
		return
	}
	if r.donor.Heir == r.heir.Name {
		d.keepCordoned[r.donor.Name] = true
	}
	d.Wait(reason, message, NodeReference(r.heir.Name), time.Time{})
}

// settleVanishedDonor ends a replacement whose donor's Node is gone. The heir takes its place if
// somebody deleted it. If another node was its heir, the replacement was begun from an
// old view, and the machine is one too many.
func (d *Decision) settleVanishedDonor(r *replacement) {
	for i := range d.w.Nodes {
		if n := &d.w.Nodes[i]; n.Confirmed && n.Name != r.heir.Name && d.sameDonor(r, n) {
			d.giveUp(r)
			return
		}
	}
	switch {
	case r.heir.Donor != r.Intent.Donor && !d.when(ruleHeirDenies, d.refusesDonor(r)): // whose place it has taken, whether it is known or not
		d.do(Action{Kind: AdoptHeir, Node: r.heir.Name, Donor: r.Intent.Donor})
	case d.when(ruleVanishedDonor, true):
		d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
	}
}

// sameDonor reports whether the machine of n was created to replace the same node as
// that of r.
func (d *Decision) sameDonor(r *replacement, n *Node) bool {
	if d.off == ruleMadeFor {
		return n.Donor == r.Intent.Donor
	}
	m := d.Instance(n.ProviderID)
	return m != nil && m.ReplacesHash != "" && m.ReplacesHash == r.machine.ReplacesHash
}

func (d *Decision) drain(n *Node) {
	d.do(Action{Kind: DrainNode, Node: n.Name})
	if n.DrainBlocker != "" {
		d.Wait("DrainBlocked", fmt.Sprintf("%s cannot be emptied: %s", n.Name, TruncateMessage(n.DrainBlocker)), NodeReference(n.Name), time.Time{})
	}
}

// othersWait reports whether another node could be replaced if n gave its place back.
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

// advanceIntent carries on with an intent that does not replace: one that is bound to a
// machine that goes, or one that tracks a machine nobody knows.
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
	m, n := d.Instance(in.Machine), d.NodeOf[in.Machine]
	switch {
	case Gone(m) || n != nil && d.joined(n):
		d.do(Action{Kind: ClearIntent, Intent: *in})
	case m != nil && m.Token != "" && d.tracked[m.Token]: // somebody else's heir
	case d.when(ruleOverdue, d.must(ruleStrayDeadline, d.w.Now.After(in.Deadline))):
		bound := *in
		bound.Goal = v1alpha1.LeaveGoal
		d.do(Action{Kind: BindIntent, Intent: bound})
	case n != nil && d.w.Now.Add(JoinDeadline/2).After(in.Deadline): // most machines need a few minutes
		d.Wait(ReasonNeverReady, d.neverReady(n), NodeReference(n.Name), in.Deadline)
	}
}

// joined reports whether a machine whose intent waits for it to join has done so. A join
// can break off after the Node was made, and the join service gives a machine that has a
// Node no other ticket: such a machine would stay as it is for ever. A node that its owner
// holds is left as it is.
func (d *Decision) joined(n *Node) bool {
	return n.Ready || n.OnHold || !d.when(ruleNeverReady, true)
}

const ReasonNeverReady = "NodeNeverReady"

// neverReady says what becomes of a node whose machine does not finish its join, and what
// a person can do.
func (d *Decision) neverReady(n *Node) string {
	return fmt.Sprintf("Node %s has not been Ready since its machine began to join, and a machine that has a Node gets no other ticket; machine and Node are deleted when its time is over, and at once with `constellation machine revoke %s`", n.Name, n.Name)
}

// removeMachine removes a machine that is bound to go: work, etcd member, machine, Node. The
// intent ends when the cloud has confirmed that the machine is gone.
func (d *Decision) removeMachine(in *Intent) {
	if d.when(ruleRevoked, in.Revoked) {
		d.removeRevoked(in)
		return
	}
	n, m := d.NodeOf[in.Machine], d.Instance(in.Machine)
	going := m != nil && (m.State == "Terminating" || m.State == "Terminated")
	name := in.Node
	if n != nil {
		name = n.Name
		d.keepCordoned[n.Name] = true
	}
	if n != nil && !going {
		switch {
		case n.Cordon == Uncordoned:
			d.do(Action{Kind: CordonNode, Node: n.Name, Heir: n.Heir})
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
		d.do(Action{Kind: DeleteInstance, Machine: in.Machine, Node: name})
	case n != nil:
		d.do(Action{Kind: DeleteNode, Node: n.Name, Machine: in.Machine})
	}
	if n == nil && !d.must(ruleGone, Gone(m)) {
		d.Wait("MachineLeaves", fmt.Sprintf("the cloud has not confirmed that machine %s is gone", in.Machine), v1alpha1.Reference{Kind: "PendingNode", Name: in.Name}, time.Time{})
	} else if n == nil {
		d.do(Action{Kind: ClearIntent, Intent: *in})
	}
}

// memberGone reports whether the member of a control plane that goes has left etcd,
// and takes the next step towards that otherwise.
func (d *Decision) memberGone(in *Intent, n *Node, name string) bool {
	if len(d.w.Etcd) == 0 {
		d.Wait("EtcdUnknown", "the members of etcd could not be listed", v1alpha1.Reference{}, time.Time{})
		return false
	}
	i := slices.IndexFunc(d.w.Etcd, func(m Member) bool { return m.Node == name || m.NotStarted && d.owns(name, m) })
	if i < 0 {
		return true
	}
	m := d.w.Etcd[i]
	member := m.Node
	if in.Donor == name && n != nil && m.Voter && m.Healthy {
		heir := d.heirOf(n, in)
		if heir == "" || !d.isMember(heir) {
			// The heir was lost after the donor was bound, or has left etcd: it voted when that
			// was done. As long as the donor's member is in etcd nothing of its machine was
			// touched, and it stays what it was.
			if m := d.ByToken[in.Token]; d.when(ruleRevive, heir != "" || Gone(m) || m == nil && d.w.Complete) {
				d.do(Action{Kind: ClearIntent, Intent: *in})
			}
			return false
		}
		if !d.votes(heir) {
			d.Wait("HeirNotVoting", fmt.Sprintf("the etcd member of %s is not a started, healthy voter", heir), NodeReference(heir), time.Time{})
			return false
		}
	}
	switch {
	case !d.othersHealthy(member):
		d.Wait("EtcdUnhealthy", d.unhealthyOther(member), NodeReference(name), time.Time{})
	case !d.must(ruleLeaderMoved, !m.Leader):
		if to := d.nextLeader(name); to != "" {
			d.do(Action{Kind: MoveLeader, Node: name, Heir: to})
		}
	default:
		d.do(Action{Kind: RemoveMember, Node: member, MinVoters: d.votersWithout(member)})
	}
	return false
}

// heirOf returns the name of what takes n's place and stays. A Node that is not seen
// may be there: what counts is the machine.
func (d *Decision) heirOf(n *Node, in *Intent) string {
	if m := d.ByToken[in.Token]; m != nil && !Gone(m) && d.leaving[m.ID] == nil {
		return m.Name
	}
	for i := range d.w.Nodes {
		if h := &d.w.Nodes[i]; h.Role == v1alpha1.ControlPlaneRole && h.Donor == n.Name && !d.leaves(h) && !Gone(d.Instance(h.ProviderID)) {
			return h.Name
		}
	}
	return ""
}

func (d *Decision) votes(name string) bool {
	return slices.ContainsFunc(d.w.Etcd, func(m Member) bool { return m.Node == name && m.Voter && m.Healthy })
}

// othersHealthy reports whether all members but one are started, healthy voters.
func (d *Decision) othersHealthy(but string) bool {
	return d.must(ruleMembersHealthy, !slices.ContainsFunc(d.w.Etcd, func(m Member) bool { return m.Node != but && (!m.Voter || !m.Healthy) }))
}

// unhealthyOther says which other member keeps one from leaving.
func (d *Decision) unhealthyOther(name string) string {
	for _, m := range d.w.Etcd {
		switch {
		case m.Node == name:
		case m.NotStarted:
			return fmt.Sprintf("the member %s of etcd has not started, so %s cannot leave", m.Node, name)
		case !m.Voter:
			return fmt.Sprintf("the member of etcd on %s does not vote yet, so %s cannot leave", m.Node, name)
		case !m.Healthy:
			return fmt.Sprintf("the member of etcd on %s is not healthy, so %s cannot leave", m.Node, name)
		}
	}
	return fmt.Sprintf("not every other member of etcd is healthy, so %s cannot leave", name)
}

func (d *Decision) votersWithout(name string) int {
	n := 0
	for _, m := range d.w.Etcd {
		if m.Voter && m.Node != name {
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

// trackOrphans tracks what nobody tracks, and removes what is left of machines that are gone.
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
		case d.when(ruleDeadNode, Gone(d.Instance(n.ProviderID))):
			d.do(Action{Kind: DeleteNode, Node: n.Name, Machine: n.ProviderID})
		case !n.Confirmed:
		case d.when(ruleHalfGone, d.hasLeftEtcd(n)) && !d.controlPlaneMoves(), n.Obsolete && !d.heirInPlace(n) && (n.Role != v1alpha1.ControlPlaneRole || !d.controlPlaneMoves()):
			d.do(Action{Kind: RecordIntent, Intent: Intent{
				Name: MachinePrefix + n.Name, Goal: v1alpha1.LeaveGoal, Machine: n.ProviderID, Node: n.Name, Group: n.Group, Deadline: d.w.Now.Add(JoinDeadline),
			}})
		}
	}
	d.deadMembers()
}

// hasLeftEtcd reports whether n is a control plane that was bound to leave and whose
// member has left etcd, while its intent was deleted by somebody: it goes all the
// same. A member is only removed after the bond, so this holds in any old view. It is
// known by our cordon or, where an old view has taken that off, by an heir that votes:
// heirs join one at a time, so n is not about to become a member then.
func (d *Decision) hasLeftEtcd(n *Node) bool {
	if n.Role != v1alpha1.ControlPlaneRole || len(d.w.Etcd) == 0 || d.isMember(n.Name) {
		return false
	}
	return n.Cordon == CordonedByUs || d.when(ruleHeirVotes, d.heirVotes(n))
}

// heirVotes reports whether a node that took n's place, and stays, votes in etcd.
func (d *Decision) heirVotes(n *Node) bool {
	return slices.ContainsFunc(d.w.Nodes, func(h Node) bool {
		return h.Role == v1alpha1.ControlPlaneRole && h.Donor == n.Name && h.Name != n.Name && !d.leaves(&h) && d.votes(h.Name)
	})
}

func (d *Decision) isMember(name string) bool {
	return slices.ContainsFunc(d.w.Etcd, func(m Member) bool { return m.Node == name })
}

// heirInPlace reports whether n is the heir of a replacement, which is given up as one.
func (d *Decision) heirInPlace(n *Node) bool {
	return slices.ContainsFunc(d.replacements, func(r replacement) bool { return r.heir == n })
}

// deadMembers removes members of etcd whose machine and Node are gone; they only
// weaken it.
func (d *Decision) deadMembers() {
	if !d.w.Complete {
		return
	}
	for _, m := range d.w.Etcd {
		n := d.Nodes[m.Node]
		exists := n != nil && n.ProviderID != "" || slices.ContainsFunc(d.w.Instances, func(i Instance) bool { return i.Name == m.Node && i.State != "Terminated" })
		bound := slices.ContainsFunc(d.w.Intents, func(i Intent) bool { return i.Node == m.Node && i.Goal == v1alpha1.LeaveGoal })
		if m.NotStarted && !d.abandoned(m) {
			continue // whose member it is shows when it starts
		}
		if d.when(ruleDeadMember, !exists && !bound && !m.Healthy) {
			d.do(Action{Kind: RemoveMember, Node: m.Node, MinVoters: d.votersWithout(m.Node)})
		}
	}
}

// A machine that joins etcd is a member before its etcd has started and told its name.
// That takes seconds, or as long as an image takes to be there.
const memberStarts = 2 * time.Minute

// owns reports whether a member that has not started is that of the machine called
// name. Its address is all that is known of it.
func (d *Decision) owns(name string, m Member) bool {
	return m.Address != "" && slices.ContainsFunc(d.w.Instances, func(i Instance) bool {
		g := d.Group(i.Group)
		return i.Name == name && i.Address == m.Address && !Gone(&i) && (g == nil || g.Role == v1alpha1.ControlPlaneRole)
	})
}

// abandoned reports whether the machine of a member that has not started is no more.
// Such a member keeps all others from joining and from leaving, so it does not wait
// until no control plane moves, unless the address of one is not known.
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

// seeControlPlanes reports whether the machine of each control plane, and of each that
// is asked for, is seen.
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

// candidate reports whether a replacement of n, or its upgrade, could begin now, given a
// place.
func (d *Decision) candidate(n *Node) bool {
	return d.outdated(n) && !d.donors[n.Name] && !d.postponed(n) && !d.hasLeftEtcd(n)
}

// startReplacements records intents for nodes that are to be replaced or upgraded, as far as there
// are places.
func (d *Decision) startReplacements() {
	if d.stopped() || len(d.w.Groups) == 0 {
		return
	}
	var next []*Node
	busy := map[string]int{} // replacements by group: all groups get their share
	for i := range d.replacements {
		busy[d.replacements[i].Group]++
	}
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		if n.Role == v1alpha1.ControlPlaneRole && d.outdated(n) && d.onHold(n) {
			d.Wait("ControlPlaneHeld", fmt.Sprintf("%s is held as it is, and workers wait for all control planes; let it go to go on", n.Name), NodeReference(n.Name), time.Time{})
		}
		if n.Role == v1alpha1.ControlPlaneRole && d.must(ruleOneControlPlane, !d.controlPlaneMoves()) || n.Role == v1alpha1.WorkerRole && d.must(ruleControlPlaneFirst, d.controlPlanesDone) {
			if d.candidate(n) {
				next = append(next, n)
			} else if d.outdated(n) && d.postponed(n) && !d.onHold(n) {
				d.Wait("Postponed", fmt.Sprintf("the replacement of %s is tried again later", n.Name), NodeReference(n.Name), n.PostponedUntil)
			}
		}
	}
	if len(next) > 0 && d.isBarred() {
		return
	}
	for len(next) > 0 && (d.inFlight < d.surge || len(d.orphanedHeirs) > 0) {
		// The group with the fewest under way comes next; within it those that were never
		// postponed, then by name.
		first := 0
		for i, n := range next {
			if o := next[first]; cmp.Or(strings.Compare(string(n.Role), string(o.Role)), boolOrder(!n.PostponedUntil.IsZero(), !o.PostponedUntil.IsZero()), cmp.Compare(busy[n.Group], busy[o.Group])) < 0 {
				first = i
			}
		}
		n := next[first]
		next = slices.Delete(next, first, first+1)
		place, inPlace := d.freeSlot(n.Role), !d.must(ruleInPlace, !d.inPlace(n))
		var lost *Instance
		if !inPlace {
			lost = d.orphanedHeirFor(n)
		}
		if place < 0 || lost == nil && d.inFlight >= d.surge {
			continue // a later one may have a machine already
		}
		if n.Role == v1alpha1.ControlPlaneRole && lost == nil && d.untrackedControlPlane {
			d.Wait("ControlPlaneMoves", "another control plane is on its way in or out; the next one waits until it has settled", NodeReference(n.Name), time.Time{})
			continue
		}
		if inPlace && (d.stuckGroup(n) || !d.mayUpgrade(n)) || !inPlace && !d.mayCreate(n.Role, d.Group(n.Group)) {
			next = slices.DeleteFunc(next, func(o *Node) bool { return o.Role == n.Role && o.Group == n.Group }) // nor for these
			continue
		}
		in := Intent{Name: slotPrefix + strconv.Itoa(place), Goal: v1alpha1.JoinGoal, Donor: n.Name, Group: n.Group, Deadline: d.w.Now.Add(CreateDeadline)}
		switch {
		case inPlace:
			in = Intent{Name: in.Name, Goal: v1alpha1.UpgradeGoal, Machine: n.ProviderID, Node: n.Name, Group: n.Group, Deadline: d.w.Now.Add(JoinDeadline)}
			d.inFlight++
		case lost != nil:
			in.Token = lost.Token // takes the place that it holds already
		default:
			in.Token = token(n, in.Name, d.w.Now)
			d.inFlight++
		}
		d.do(Action{Kind: RecordIntent, Intent: in})
		d.donors[n.Name], d.takenSlots[place] = true, true
		if in.Token != "" {
			d.tracked[in.Token] = true
		}
		busy[n.Group]++
	}
}

// replaces reports whether the machine of n was created to replace o, by its token or by
// an intent.
func (d *Decision) replaces(n, o *Node) bool {
	m := d.Instance(n.ProviderID)
	if m == nil || !n.Confirmed {
		return false
	}
	return d.donorOf(m, n) == o || slices.ContainsFunc(d.w.Intents, func(in Intent) bool { return m.Token != "" && in.Token == m.Token && in.Donor == o.Name })
}

// orphanedHeirFor returns a machine whose intent was lost and that can replace n.
func (d *Decision) orphanedHeirFor(n *Node) *Instance {
	for _, m := range d.orphanedHeirs {
		if !strings.EqualFold(m.Group, n.Group) || d.tracked[m.Token] || d.leaving[m.ID] != nil || m.State == "Terminating" {
			continue
		}
		if replaced, pinned := d.madeFor(m); pinned && d.off != ruleMadeFor && (replaced == nil || replaced.ID != n.ProviderID) {
			continue
		}
		if h := d.NodeOf[m.ID]; h == nil || !d.hasLeftEtcd(h) && (h.Donor == "" || h.Donor == n.Name || d.donorOf(m, h) == n) && d.atTarget(h) {
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

// freeSlot returns the lowest place that no intent holds, or -1. Control planes use
// the first place only, so that two leaders cannot replace two of them at a time.
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

// token names a request to the cloud. Decided again from the same world it is the
// same; a later attempt has another. It ends in the mark of the machine that is
// replaced. The cloud keeps it for as long as the new machine exists, so no Node can
// change what replaces what.
func token(n *Node, place string, now time.Time) string {
	sum := sha256.Sum256([]byte(n.ProviderID + "\x00" + place + "\x00" + now.UTC().Format(time.RFC3339Nano)))
	return hex.EncodeToString(sum[:12]) + tokenSeparator + MachineHash(n.ProviderID)
}

// releaseCordons takes back what we did to nodes that are not to go any more.
func (d *Decision) releaseCordons() {
	for i := range d.w.Nodes {
		n := &d.w.Nodes[i]
		if n.Heir == "" && n.Cordon == Uncordoned || !n.Confirmed {
			continue
		}
		if d.keepCordoned[n.Name] || n.Role == v1alpha1.ControlPlaneRole && n.Cordon == CordonedByUs && d.when(ruleHalfGone, !d.isMember(n.Name)) {
			continue
		}
		marked := n.Heir != ""
		ours := d.when(ruleUncordon, n.Cordon != Uncordoned && d.must(ruleForeignCordon, n.Cordon == CordonedByUs))
		if marked || ours {
			d.do(Action{Kind: ReleaseNode, Node: n.Name, Uncordon: ours})
		}
	}
}

// autoscaling pauses the autoscaler while there is something to do, and gives back
// what we took.
func (d *Decision) autoscaling() {
	a := d.w.Autoscaler
	work := d.when(ruleWorkBeforeGivenBack, len(d.w.Intents) > 0 || d.w.Run.Active()) ||
		slices.ContainsFunc(d.Actions, func(a Action) bool { return a.Kind == RecordIntent })
	place := func(in Intent) bool { _, ok := SurgeSlot(in.Name); return ok || in.refills() }
	d.Exclusive = d.w.Run.Active() || slices.ContainsFunc(d.w.Intents, place)
	if !d.stopped() {
		pub := d.w.Before.JoinComponents.ControlPlane
		due := pub != "" && pub != d.spec.KubernetesComponentsReference
		for i := range d.w.Nodes {
			due = due || d.candidate(&d.w.Nodes[i]) && (d.w.Nodes[i].Role == v1alpha1.ControlPlaneRole || d.controlPlanesDone || d.controlPlaneUnknown || d.controlPlanesOutdated && !d.controlPlaneOnHold)
		}
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
		d.Wait(reasonPaused, "the rollout is paused; set spec.rollout.paused to false to go on", v1alpha1.Reference{}, time.Time{})
		if d.w.Now.Before(until) && d.behind() {
			return
		}
	}
	if d.when(ruleGiveBack, !a.Enabled && d.must(ruleOthersAutoscaler, a.PausedByUs)) {
		d.do(Action{Kind: ResumeAutoscaler})
	}
}

// behind reports whether a node is to be replaced or upgraded, now or later.
func (d *Decision) behind() bool {
	for i := range d.w.Nodes {
		if d.outdated(&d.w.Nodes[i]) {
			return true
		}
	}
	return false
}
