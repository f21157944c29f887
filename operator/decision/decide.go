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
	d := &Decision{observed: observed{off: off, spec: spec, w: w}}
	d.index()
	d.upgradeKubernetes()
	for i := range d.replacements {
		d.advanceReplacement(&d.replacements[i])
	}
	for i := range d.w.Intents {
		d.advanceIntent(&d.w.Intents[i])
	}
	d.trackOrphans()
	for _, text := range w.Shortages {
		d.Wait("NoSpare", TruncateMessage(text), v1alpha1.Reference{Kind: "NodeVersion", Name: v1alpha1.NodeVersionName}, time.Time{})
	}
	d.startReplacements()
	d.releaseCordons()
	d.labelInPlace()
	d.upgradeAddons()
	d.settleRetryRequests()
	d.autoscaling()
	return d
}

// Decision is the working state of one call of Decide: what follows from the facts, as far as it is
// decided.
type Decision struct {
	observed

	// These begin with the intents that exist. Each start adds to them.
	oldNodes   map[string]bool // names of nodes with a replacement
	tracked    map[string]bool // IDs and tokens that an intent names
	takenSlots map[int]bool    // surge slots that an intent holds
	inFlight   int             // machines above the sizes of the groups, or upgraded in place

	keepCordoned map[string]bool // nodes that stay cordoned; releaseCordons uncordons all others

	addons       *v1alpha1.AddonsProgress // as the status reports them
	addonsWanted bool                     // their images decide what happens next

	Actions []Action
	Waits   []Wait
	// Exclusive says that the operator needs the node lock: nodes are being replaced or upgraded, or
	// will be.
	Exclusive bool
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

// isOrphanedReplacement reports whether the operator created m to replace a node that still exists, and
// somebody deleted the intent.
func (d *Decision) isOrphanedReplacement(m *Instance) bool {
	if m.Token == "" || d.tracked[m.Token] || Gone(m) || d.refused(m) {
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
	case d.w.AddonRun.Active():
		d.Wait("AddonsUpgrade", fmt.Sprintf("the agent of %s upgrades the add-ons of an earlier target; Kubernetes is upgraded after that", d.w.AddonRun.Node), NodeReference(d.w.AddonRun.Node), time.Time{})
	case host == nil:
		d.Wait("NoControlPlane", "no control plane is Ready, so no agent can upgrade Kubernetes", v1alpha1.Reference{}, time.Time{})
	case stillReported(d.w.Before.Upgrade, r, host.Name):
		// The status is written in this round.
	default:
		a := Action{Kind: StartUpgrade, Node: host.Name, Version: d.spec.KubernetesClusterVersion, Components: d.spec.KubernetesComponentsReference}
		a.KeepKubelet = !d.must(ruleInPlaceKubelet, !d.w.KeepsKubelet(host))
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
	case d.refused(r.machine):
		// trackOrphans tracks the machine, which keeps its name while the next one is created.
		d.do(Action{Kind: ClearIntent, Intent: *r.Intent})
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
		d.Wait(ReasonNeverReady, neverReady(n), NodeReference(n.Name), in.Deadline)
	}
}

// ReasonNeverReady is the reason of events about machines that are given up because their Node
// never became Ready.
const ReasonNeverReady = "NodeNeverReady"

// neverReady describes the removal of a node whose machine does not finish its join, and the
// remedy.
func neverReady(n *Node) string {
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

// removeMember removes m from etcd.
func (d *Decision) removeMember(m Member) {
	d.do(Action{Kind: RemoveMember, Node: m.Node, Address: m.Address, MinVoters: d.votersWithout(m)})
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
