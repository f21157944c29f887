package decision

import (
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
)

// IntentOf reads an intent from a PendingNode.
func IntentOf(p *v1alpha1.PendingNode) Intent {
	in := Intent{
		Name: p.Name, Goal: p.Spec.Goal, Token: p.Spec.Token, OldNode: p.Spec.Donor, Machine: p.Spec.ProviderID,
		Node: p.Spec.NodeName, Group: p.Spec.GroupID, Revoked: p.Annotations[v1alpha1.AnnotationRevoked] != "",
		Seen: p.Status.CSPState != "",
	}
	if p.Spec.Deadline != nil {
		in.Deadline = p.Spec.Deadline.Time
	} else { // written by hand
		in.Deadline = p.CreationTimestamp.Add(JoinDeadline)
	}
	return in
}

// unknownGroup stands for a group that is not known.
const unknownGroup = "unknown"

// PendingNode returns the object of a new intent.
func (in Intent) PendingNode() *v1alpha1.PendingNode {
	p := &v1alpha1.PendingNode{
		ObjectMeta: metav1.ObjectMeta{Name: strings.ToLower(in.Name)},
		Spec: v1alpha1.PendingNodeSpec{
			ProviderID: in.Machine, GroupID: in.Group, NodeName: in.Node, Goal: in.Goal, Token: in.Token, Donor: in.OldNode,
		},
	}
	if p.Spec.GroupID == "" {
		p.Spec.GroupID = unknownGroup
	}
	if !in.Deadline.IsZero() {
		p.Spec.Deadline = &metav1.Time{Time: in.Deadline.Truncate(time.Second)}
	}
	return p
}

// Bind binds p to the machine that leaves, unless p is bound already.
func (in Intent) Bind(p *v1alpha1.PendingNode, now time.Time) bool {
	s := &p.Spec
	if s.Goal != v1alpha1.JoinGoal || s.Token != in.Token || s.ProviderID != "" && s.ProviderID != in.Machine || in.Machine == "" {
		return false
	}
	s.Goal, s.ProviderID = v1alpha1.LeaveGoal, in.Machine
	if s.NodeName == "" {
		s.NodeName = in.Node
	}
	s.Deadline = &metav1.Time{Time: now.Add(JoinDeadline).Truncate(time.Second)}
	return true
}

// PendingStatus returns the status of an intent. run is the latest run of the machine's agent.
// Fields that are not known keep their value in before.
func PendingStatus(in Intent, w *Lookup, run UpgradeRun, before v1alpha1.PendingNodeStatus) v1alpha1.PendingNodeStatus {
	m := w.Instance(in.Machine)
	if in.Machine == "" {
		m = w.ByToken[in.Token]
	}
	s := before
	if in.Goal == v1alpha1.UpgradeGoal && run.Phase != "" {
		s.Upgrade = run.progress()
	}
	if m == nil {
		return s
	}
	s.CSPState = m.State
	switch in.Goal {
	case v1alpha1.LeaveGoal:
		s.ReachedGoal = Gone(m)
	case v1alpha1.JoinGoal:
		s.ReachedGoal = w.NodeOf[m.ID] != nil
	case v1alpha1.UpgradeGoal: // then it is removed
	}
	return s
}

// Reasons of a PendingNode's conditions, beside those of waits in stalling.
const (
	reasonGoalReached   = "GoalReached"
	reasonMachineFailed = "MachineFailed"
	reasonCreating      = "MachineCreating"
	reasonJoins         = "MachineJoining"
	reasonLeaves        = "MachineLeaving"
	reasonNodeUpgrades  = "NodeUpgrading"
)

// SetPendingConditions adds the conditions for generic tools to a status that PendingStatus
// returned. waits are those that have lasted for StallGrace. Nothing is added before the
// first observation of the machine: until then the default of observedGeneration marks the status as old.
func SetPendingConditions(s *v1alpha1.PendingNodeStatus, in Intent, generation int64, waits []Wait, now time.Time) {
	if s.CSPState == "" && s.Upgrade == nil && s.ObservedGeneration <= 0 {
		return
	}
	s.ObservedGeneration = generation
	s.Conditions = slices.Clone(s.Conditions)
	reason, text, stalled := pendingStep(s, in, waits)
	for _, c := range []metav1.Condition{
		NewCondition(v1alpha1.ConditionReady, s.ReachedGoal, generation, reason, "%s", Truncate(text, 140)),
		NewCondition(v1alpha1.ConditionReconciling, !s.ReachedGoal && !stalled, generation, reason, "%s", Truncate(text, 140)),
		NewCondition(v1alpha1.ConditionStalled, stalled, generation, reason, "%s", Truncate(text, 140)),
	} {
		SetCondition(&s.Conditions, c, metav1.NewTime(now.Truncate(time.Second)))
	}
}

// pendingStep returns how far an intent is, and whether somebody must intervene.
func pendingStep(s *v1alpha1.PendingNodeStatus, in Intent, waits []Wait) (reason, text string, stalled bool) {
	switch {
	case s.ReachedGoal && in.Goal == v1alpha1.LeaveGoal:
		return reasonGoalReached, "the machine has left", false
	case s.ReachedGoal:
		return reasonGoalReached, "the machine has joined", false
	case in.Goal == v1alpha1.LeaveGoal:
		return reasonLeaves, "the machine is leaving", false
	case string(s.CSPState) == string(cloud.Failed):
		return reasonMachineFailed, "the cloud reports that the machine failed", true
	}
	for _, w := range waits {
		if w.Stalls(&in) {
			return w.Reason, w.Message, true
		}
	}
	switch {
	case in.Goal == v1alpha1.UpgradeGoal:
		return reasonNodeUpgrades, "the node is being upgraded", false
	case string(s.CSPState) == string(cloud.Ready):
		return reasonJoins, "the machine runs and has not joined yet", false
	}
	return reasonCreating, "the machine is being created", false
}

// Lookup finds the nodes and instances of a World.
type Lookup struct {
	Nodes  map[string]*Node // by name, without impostors
	NodeOf map[string]*Node // by ID of the machine: the Node that the cloud or an intent confirms
	*Index
}

// Index finds instances by ID, by the token that they were created with, and by the mark
// that the token of the machine has that replaces one.
type Index struct {
	instances, ByToken, marks map[string]*Instance
	folded                    map[string]*Instance // by ID in lower case, where that differs
	current                   map[string]*Instance // by ID without incarnation, in lower case: the machine that has it now
}

// NewIndex returns an index of all.
func NewIndex(all []Instance) *Index {
	k := &Index{instances: make(map[string]*Instance, len(all)), ByToken: make(map[string]*Instance, len(all))}
	pinned := false
	for i := range all {
		m := &all[i]
		k.instances[m.ID] = m
		if folded := strings.ToLower(m.ID); folded != m.ID {
			if k.folded == nil {
				k.folded = map[string]*Instance{}
			}
			k.folded[folded] = m
		}
		k.addCurrent(m)
		pinned = pinned || m.ReplacesHash != ""
		if m.Token != "" {
			k.ByToken[m.Token] = m
		}
	}
	if pinned { // else nothing is looked up by hash
		k.marks = make(map[string]*Instance, len(all))
		for i := range all {
			k.marks[all[i].Hash] = &all[i]
		}
		delete(k.marks, "")
	}
	return k
}

// addCurrent records m as the machine that has its ID now, unless a newer one has it.
func (k *Index) addCurrent(m *Instance) {
	id, incarnation := cloud.SplitKey(m.ID)
	if incarnation == "" {
		return
	}
	if k.current == nil {
		k.current = map[string]*Instance{}
	}
	id = strings.ToLower(id)
	o := k.current[id]
	switch {
	case o == nil:
	case described(o) != described(m):
		if described(o) {
			return
		}
	case Gone(o) && !Gone(m), Gone(o) == Gone(m) && o.Since.Before(m.Since):
	default:
		return
	}
	k.current[id] = m
}

// described reports whether the cloud has described a machine. The others are known by the claims
// of Nodes and PendingNodes only, and a Node can claim any incarnation.
func described(m *Instance) bool {
	return m.Group != "" || m.Role != "" || m.Image != "" || m.Address != ""
}

// Instance returns a machine by its ID in any case; nil if it is not known. An ID without
// incarnation names the machine that has it now. In a cloud without incarnations, the
// incarnation of an ID does not count.
func (k *Index) Instance(id string) *Instance {
	m := k.exact(id)
	if id == "" || m != nil && len(k.current) == 0 {
		return m
	}
	bare, incarnation := cloud.SplitKey(id)
	if incarnation == "" {
		if o := k.current[strings.ToLower(id)]; o != nil && (m == nil || !described(m) || described(o)) {
			return o
		}
		return m
	}
	if m == nil || !described(m) {
		if o := k.exact(bare); o != nil && described(o) {
			return o
		}
	}
	return m
}

// exact returns a machine by its ID in any case, with the incarnation of that ID.
func (k *Index) exact(id string) *Instance {
	m := k.instances[id]
	if m != nil || id == "" {
		return m
	}
	folded := strings.ToLower(id)
	if m = k.instances[folded]; m != nil {
		return m
	}
	return k.folded[folded]
}

// NewLookup judges the nodes of w (see judge) and builds its Lookup.
func NewLookup(w *World) *Lookup { return lookupWithout(w, everyRule) }

// lookupWithout is NewLookup with the rule off switched off.
func lookupWithout(w *World, off rule) *Lookup {
	if off == ruleIncarnation {
		forgetIncarnations(w)
	}
	x := &Lookup{Nodes: make(map[string]*Node, len(w.Nodes)), NodeOf: make(map[string]*Node, len(w.Nodes)), Index: w.Index}
	if x.Index == nil {
		x.Index = NewIndex(w.Instances)
	}
	x.judge(w, off)
	return x
}

// NodeOfMachine returns the Node of a machine by the ID that an intent has recorded.
func (x *Lookup) NodeOfMachine(id string) *Node {
	if m := x.Instance(id); m != nil {
		return x.NodeOf[m.ID]
	}
	return x.NodeOf[id]
}

// forgetIncarnations removes all incarnations from w, as if the cloud never reused an ID.
func forgetIncarnations(w *World) {
	bare := func(id *string) { *id, _ = cloud.SplitKey(*id) }
	w.Instances, w.Intents, w.Index = slices.Clone(w.Instances), slices.Clone(w.Intents), nil
	for i := range w.Instances {
		bare(&w.Instances[i].ID)
	}
	for i := range w.Intents {
		bare(&w.Intents[i].Machine)
	}
	for i := range w.Nodes {
		bare(&w.Nodes[i].ProviderID)
	}
}
