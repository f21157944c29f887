package operator

import (
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/v1alpha1"
)

// intentOf is what a PendingNode says.
func intentOf(p *v1alpha1.PendingNode) intent {
	in := intent{
		name: p.Name, goal: p.Spec.Goal, token: p.Spec.Token, donor: p.Spec.Donor, machine: p.Spec.ProviderID,
		node: p.Spec.NodeName, group: p.Spec.GroupID, revoked: p.Annotations[v1alpha1.AnnotationRevoked] != "",
	}
	if p.Spec.Deadline != nil {
		in.deadline = p.Spec.Deadline.Time
	} else { // written by hand
		in.deadline = p.CreationTimestamp.Add(joinDeadline)
	}
	return in
}

// unknownGroup stands for the group of a machine of which nobody knows it.
const unknownGroup = "unknown"

// pendingNode is the object of a new intent.
func (in intent) pendingNode() *v1alpha1.PendingNode {
	p := &v1alpha1.PendingNode{
		ObjectMeta: metav1.ObjectMeta{Name: strings.ToLower(in.name)},
		Spec: v1alpha1.PendingNodeSpec{
			ProviderID: in.machine, GroupID: in.group, NodeName: in.node, Goal: in.goal, Token: in.token, Donor: in.donor,
		},
	}
	if p.Spec.GroupID == "" {
		p.Spec.GroupID = unknownGroup
	}
	if !in.deadline.IsZero() {
		p.Spec.Deadline = &metav1.Time{Time: in.deadline.Truncate(time.Second)}
	}
	return p
}

// bind tells p which machine goes, if it says so of none yet.
func (in intent) bind(p *v1alpha1.PendingNode, now time.Time) bool {
	s := &p.Spec
	if s.Goal != v1alpha1.JoinGoal || s.Token != in.token || s.ProviderID != "" && s.ProviderID != in.machine || in.machine == "" {
		return false
	}
	s.Goal, s.ProviderID = v1alpha1.LeaveGoal, in.machine
	if s.NodeName == "" {
		s.NodeName = in.node
	}
	s.Deadline = &metav1.Time{Time: now.Add(joinDeadline).Truncate(time.Second)}
	return true
}

// pendingStatus is how far the machine of an intent has come, of whose agent run was heard.
// before keeps what is not known.
func pendingStatus(in intent, w *lookup, run upgradeRun, before v1alpha1.PendingNodeStatus) v1alpha1.PendingNodeStatus {
	m := w.instance(in.machine)
	if in.machine == "" {
		m = w.tokens[in.token]
	}
	s := before
	if in.goal == v1alpha1.UpgradeGoal && run.phase != "" {
		s.Upgrade = run.progress()
	}
	if m == nil {
		return s
	}
	s.CSPState = m.state
	switch in.goal {
	case v1alpha1.LeaveGoal:
		s.ReachedGoal = gone(m)
	case v1alpha1.JoinGoal:
		s.ReachedGoal = w.machineOf[m.id] != nil
	case v1alpha1.UpgradeGoal: // then it is removed
	}
	return s
}

// lookup finds what a world holds.
type lookup struct {
	nodes     map[string]*node // by name, without impostors
	machineOf map[string]*node // by ID of the machine: the Node that the cloud or an intent confirms
	*finder
}

// finder finds instances by ID, by the token that they were created with, and by the mark
// that the token of the machine has that replaces one.
type finder struct {
	instances, tokens, marks map[string]*instance
	folded                   map[string]*instance // by ID in lower case, where that differs
}

func newFinder(all []instance) *finder {
	k := &finder{instances: make(map[string]*instance, len(all)), tokens: make(map[string]*instance, len(all))}
	pinned := false
	for i := range all {
		m := &all[i]
		k.instances[m.id] = m
		if folded := strings.ToLower(m.id); folded != m.id {
			if k.folded == nil {
				k.folded = map[string]*instance{}
			}
			k.folded[folded] = m
		}
		pinned = pinned || m.replaces != ""
		if m.token != "" {
			k.tokens[m.token] = m
		}
	}
	if pinned { // else nobody asks by mark
		k.marks = make(map[string]*instance, len(all))
		for i := range all {
			k.marks[all[i].mark] = &all[i]
		}
		delete(k.marks, "")
	}
	return k
}

// instance returns a machine by its ID in any case; nil if it is not known.
func (k *finder) instance(id string) *instance {
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

// newLookup judges the nodes of w, see judge, and finds what w holds.
func newLookup(w *world) *lookup { return lookupWithout(w, everyRule) }

// lookupWithout judges the nodes of w, see judge, and finds what w holds. off is the rule
// that is switched off.
func lookupWithout(w *world, off rule) *lookup {
	x := &lookup{nodes: make(map[string]*node, len(w.nodes)), machineOf: make(map[string]*node, len(w.nodes)), finder: w.finder}
	if x.finder == nil {
		x.finder = newFinder(w.instances)
	}
	x.judge(w, off)
	return x
}
