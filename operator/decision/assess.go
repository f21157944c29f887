package decision

import (
	"cmp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/version"
	"constellation/operator/api/v1alpha1"
)

// class is the state of a node in the rollout. Every node is in exactly one class.
type class int

const (
	upToDate class = iota
	invalid
	awaiting
	obsolete
	outdated
	oldNode
	newNode
	mint
)

// classify returns the class of n; the first rule that matches counts.
// inPlace is whether its group is upgraded in place, so that its image stays. hasReplacement
// and replacesOther are whether another node replaces it, and whether it replaces one.
func classify(spec v1alpha1.NodeVersionSpec, n *Node, inPlace, hasReplacement, replacesOther bool, mints map[string]bool) class {
	switch {
	case n.ProviderID == "":
		return invalid
	case n.Obsolete:
		return obsolete
	case n.Image == "" && spec.Image != "" || n.Components == "" || !etcdKnown(spec, n):
		return awaiting
	case !inPlace && !sameImage(n.Image, spec.Image) || n.Components != spec.KubernetesComponentsReference || !hasEtcd(spec, n):
		if hasReplacement {
			return oldNode
		}
		return outdated
	case replacesOther:
		return newNode
	case mints[n.Name]:
		return mint
	}
	return upToDate
}

// Reasons of the condition Ready. The texts of Outdated are those that scripts of
// older clusters look for.
const (
	ReasonUpToDate = "UpToDate"
	reasonJoining  = "NodesJoining"
	reasonInvalid  = "NodesInvalid"
	reasonNoNodes  = "NoNodes"

	textUpToDate = "Node version of every node is up to date"
	textOutdated = "Some node versions are out of date"
)

// The bounds of a status, so that it stays below 4 kB at any number of nodes and any
// length of names: bytes for examples and for groups.
const (
	maxExamples     = 20
	maxExampleBytes = 1200
	maxGroups       = 16
	maxGroupBytes   = 1000
)

// assess returns the part of the status that needs no decision: counts, examples and the
// condition Outdated. before is the previous status: the times of its conditions and the
// published components are kept.
func assess(spec v1alpha1.NodeVersionSpec, generation int64, before v1alpha1.NodeVersionStatus, w World, now time.Time) v1alpha1.NodeVersionStatus {
	w.Nodes = sorted(w.Nodes)
	return assessSorted(spec, generation, before, w, now, func(n *Node) (bool, bool) { return n.Replacement != "", n.OldNode != "" })
}

// assessSorted is assess of a world whose nodes are in the order of their names, and
// stay as they are. marks reports whether another node replaces a node, and whether it
// replaces one.
func assessSorted(spec v1alpha1.NodeVersionSpec, generation int64, before v1alpha1.NodeVersionStatus, w World, now time.Time,
	marks func(*Node) (hasReplacement, replacesOther bool),
) v1alpha1.NodeVersionStatus {
	s := v1alpha1.NodeVersionStatus{
		ObservedGeneration: generation,
		JoinComponents:     joinComponents(spec, before.JoinComponents, w),
		Conditions:         slices.Clone(before.Conditions),
		EtcdMembers:        etcdMembers(w.LastEtcd),
		Addons:             before.Addons,
	}
	if w.LastEtcd == nil { // a new leader has not listed them yet
		s.EtcdMembers = before.EtcdMembers
	}
	waiting, mints := pendingMachines(w)
	var byClass [mint + 1]struct {
		n     int32
		first []v1alpha1.Reference // as many as the status lists
	}
	counts, inPlace := map[string]*v1alpha1.GroupCounts{}, map[string]bool{}
	for _, g := range w.Groups {
		inPlace[strings.ToLower(g.ID)] = g.Strategy == v1alpha1.InPlaceStrategy
		counts[strings.ToLower(g.ID)] = &v1alpha1.GroupCounts{Name: g.Name, Role: g.Role}
	}
	for i := range w.Nodes {
		n := &w.Nodes[i]
		id := strings.ToLower(n.Group)
		hasReplacement, replacesOther := marks(n)
		c := classify(spec, n, inPlace[id], hasReplacement, replacesOther, mints)
		if byClass[c].n++; byClass[c].n <= maxExamples {
			byClass[c].first = append(byClass[c].first, v1alpha1.Reference{Kind: "Node", Name: n.Name})
		}
		if g := counts[id]; g != nil {
			g.Total++
			if n.Ready {
				g.Ready++
			}
			if c == upToDate || c == newNode || c == mint {
				g.UpToDate++
			}
		}
	}
	for i := range w.Impostors {
		if byClass[invalid].n++; byClass[invalid].n <= maxExamples {
			byClass[invalid].first = append(byClass[invalid].first, v1alpha1.Reference{Kind: "Node", Name: w.Impostors[i].Name})
		}
	}
	n := func(c class) int32 { return byClass[c].n }
	s.Nodes = v1alpha1.NodeCounts{
		Total: int32(len(w.Nodes) + len(w.Impostors)), UpToDate: n(upToDate), Outdated: n(outdated), Donors: n(oldNode), Heirs: n(newNode), Mints: n(mint),
		AwaitingAnnotation: n(awaiting), Obsolete: n(obsolete), Invalid: n(invalid), Pending: int32(len(waiting)),
	}
	s.Groups = groupCounts(counts)
	// Nodes that need attention come first; the rest fill the remaining room.
	room := examples{n: maxExamples, bytes: maxExampleBytes}
	s.Invalid = room.of(byClass[invalid].first)
	s.AwaitingAnnotation = room.of(byClass[awaiting].first)
	s.Pending = room.of(waiting)
	s.Obsolete = room.of(byClass[obsolete].first)
	s.Donors = room.of(byClass[oldNode].first)
	s.Heirs = room.of(byClass[newNode].first)
	s.Mints = room.of(byClass[mint].first)
	s.Outdated = room.of(byClass[outdated].first)
	s.UpToDate = room.of(byClass[upToDate].first)

	outdated := NewCondition(v1alpha1.ConditionOutdated, false, generation, "NodeVersionsUpToDate", textUpToDate)
	if s.Nodes.Outdated+s.Nodes.Donors+s.Nodes.Obsolete > 0 {
		outdated = NewCondition(v1alpha1.ConditionOutdated, true, generation, "NodeVersionsOutOfDate", textOutdated)
	}
	SetCondition(&s.Conditions, outdated, metav1.NewTime(now.Truncate(time.Second)))
	return s
}

// pendingMachines are the machines without a Node, sorted by name, and the names of Nodes whose
// PendingNode is ready.
func pendingMachines(w World) (waiting []v1alpha1.Reference, mints map[string]bool) {
	exists := map[string]bool{}
	mints = map[string]bool{}
	for _, p := range w.Pending {
		exists[p.Node] = false // for all we know
	}
	for i := range w.Nodes {
		if _, asked := exists[w.Nodes[i].Name]; asked {
			exists[w.Nodes[i].Name] = true
		}
	}
	pending := map[string]v1alpha1.Reference{}
	for _, p := range w.Pending {
		if p.Kind == "PendingNode" && p.Ready {
			mints[p.Node] = true
		}
		// A machine may have a JoiningNode and a PendingNode, of which the PendingNode is more exact.
		// An object whose Node exists is about to be deleted.
		key := cmp.Or(p.Node, p.Name)
		if _, seen := pending[key]; !exists[p.Node] && (!seen || p.Kind == "PendingNode") {
			pending[key] = v1alpha1.Reference{Kind: p.Kind, Name: p.Name}
		}
	}
	for i := range w.Impostors {
		if _, asked := exists[w.Impostors[i].Name]; asked {
			exists[w.Impostors[i].Name] = true
		}
	}
	for _, r := range pending {
		waiting = append(waiting, r)
	}
	slices.SortFunc(waiting, func(a, b v1alpha1.Reference) int { return strings.Compare(a.Name, b.Name) })
	return waiting, mints
}

// joinComponents returns the components of joining machines. Published components stay: they
// follow the spec only after the control plane was upgraded. A new cluster starts with its
// target if the kubelets of its control planes have that version, because no kubelet may be
// newer than its API server.
func joinComponents(spec v1alpha1.NodeVersionSpec, before v1alpha1.JoinComponents, w World) v1alpha1.JoinComponents {
	if before.ControlPlane != "" && before.Worker != "" {
		return before
	}
	want, err := version.Parse(spec.KubernetesClusterVersion)
	if err != nil {
		return before
	}
	seen := false
	for i := range w.Nodes {
		n := &w.Nodes[i]
		if n.Role != v1alpha1.ControlPlaneRole {
			continue
		}
		is, err := version.Parse(n.Kubelet)
		if err != nil || is.Compare(want) != 0 {
			return before
		}
		seen = true
	}
	if !seen {
		return before
	}
	return v1alpha1.JoinComponents{
		ControlPlane: cmp.Or(before.ControlPlane, spec.KubernetesComponentsReference),
		Worker:       cmp.Or(before.Worker, spec.KubernetesComponentsReference),
	}
}

// groupCounts orders the groups: control planes, then those with most to do.
func groupCounts(all map[string]*v1alpha1.GroupCounts) []v1alpha1.GroupCounts {
	var out []v1alpha1.GroupCounts
	for _, g := range all {
		out = append(out, *g)
	}
	slices.SortFunc(out, func(a, b v1alpha1.GroupCounts) int {
		if a.Role != b.Role {
			return strings.Compare(string(a.Role), string(b.Role)) // ControlPlane, Worker
		}
		return cmp.Or(cmp.Compare(b.Total-b.UpToDate, a.Total-a.UpToDate), strings.Compare(a.Name, b.Name))
	})
	bytes := 0
	for i, g := range out {
		if bytes += len(g.Name) + 75; i == maxGroups || bytes > maxGroupBytes {
			return out[:i]
		}
	}
	return out
}

// examples limits the names in a status.
type examples struct{ n, bytes int }

func (e *examples) of(all []v1alpha1.Reference) []v1alpha1.Reference {
	var out []v1alpha1.Reference
	for _, r := range all {
		size := len(r.Name) + len(r.Kind) + len(`{"kind":"","name":""},`)
		if e.n == 0 || size > e.bytes {
			break
		}
		e.n, e.bytes = e.n-1, e.bytes-size
		out = append(out, r)
	}
	return out
}
