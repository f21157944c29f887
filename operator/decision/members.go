package decision

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"constellation/operator/api/v1alpha1"
)

func (x *observed) votes(name string) bool {
	return slices.ContainsFunc(x.w.Etcd, func(m Member) bool { return m.Node == name && m.Voter && m.Healthy })
}

func (x *observed) isMember(name string) bool {
	return slices.ContainsFunc(x.w.Etcd, func(m Member) bool { return m.Node == name })
}

// memberOf returns the index of the member of a machine, which is called name; -1: it has none.
// A machine that got the name later may have a member too. Addresses distinguish the two.
func (x *observed) memberOf(machine, name string) int {
	leaving := x.Instance(machine)
	return slices.IndexFunc(x.w.Etcd, func(m Member) bool {
		if m.NotStarted {
			return x.owns(name, m)
		}
		return m.Node == name && x.must(ruleMemberAddress, leaving == nil || atAddress(leaving, m) || !x.otherHas(name, leaving, m))
	})
}

// memberOn returns the member of n; one without an address, if it has none.
func (x *observed) memberOn(n *Node) Member {
	if i := x.memberOf(n.ProviderID, n.Name); i >= 0 {
		return x.w.Etcd[i]
	}
	return Member{Node: n.Name}
}

// otherHas reports whether another existing machine called name has the address of m.
func (x *observed) otherHas(name string, but *Instance, m Member) bool {
	return slices.ContainsFunc(x.w.Instances, func(i Instance) bool {
		return i.Name == name && i.ID != but.ID && i.Address != "" && i.Address == m.Address && !Gone(&i)
	})
}

// owns reports whether a member that has not started belongs to the machine called name. Only its
// address is known.
func (x *observed) owns(name string, m Member) bool {
	return m.Address != "" && slices.ContainsFunc(x.w.Instances, func(i Instance) bool {
		g := x.Group(i.Group)
		return i.Name == name && i.Address == m.Address && !Gone(&i) && (g == nil || g.Role == v1alpha1.ControlPlaneRole)
	})
}

// hasMember reports whether m can be the member of the machine i; nil: of a machine that is not known.
// A machine that got the name of a member later does not keep that member in etcd.
func (x *observed) hasMember(i *Instance, m Member) bool {
	return i == nil || x.off == ruleMemberAddress || atAddress(i, m)
}

// atAddress reports whether the member m can be that of the machine i, as far as addresses are known.
func atAddress(i *Instance, m Member) bool {
	return i.Address == "" || m.Address == "" || i.Address == m.Address
}

// same reports whether two members are one. Machines that had one name after the other have members
// of one name, at different addresses.
func (m Member) same(o Member) bool { return m.Node == o.Node && m.Address == o.Address }

// hasLeftEtcd reports whether n is a control plane that was bound to leave and whose member has left
// etcd, while somebody deleted its intent. It must still leave. A member is removed only after the
// binding, so a stale observation changes nothing. We recognise n by our cordon or, if a stale
// reconcile removed that, by a replacement node that votes. Replacement nodes join one at a time, so
// n does not become a member then.
func (x *observed) hasLeftEtcd(n *Node) bool {
	if n.Role != v1alpha1.ControlPlaneRole || len(x.w.Etcd) == 0 || x.isMember(n.Name) {
		return false
	}
	return n.Cordon == CordonedByUs || x.when(ruleReplacementVotes, x.replacementVotes(n))
}

// replacementVotes reports whether a replacement node of n that stays votes in etcd.
func (x *observed) replacementVotes(n *Node) bool {
	return slices.ContainsFunc(x.w.Nodes, func(h Node) bool {
		return h.Role == v1alpha1.ControlPlaneRole && h.OldNode == n.Name && h.Name != n.Name && !x.leaves(&h) && x.votes(h.Name)
	})
}

// replacementOf returns the name of the replacement node of n that stays. Machines count, because a Node may be missing
// from the observation.
func (x *observed) replacementOf(n *Node, in *Intent) string {
	if m := x.ByToken[in.Token]; m != nil && !Gone(m) && x.leaving[m.ID] == nil {
		return m.Name
	}
	for i := range x.w.Nodes {
		if h := &x.w.Nodes[i]; h.Role == v1alpha1.ControlPlaneRole && h.OldNode == n.Name && !x.leaves(h) && !Gone(x.Instance(h.ProviderID)) {
			return h.Name
		}
	}
	return ""
}

// A machine is a member of etcd before its etcd has started and reported its name. That takes
// seconds, or as long as the pull of an image.
const memberStarts = 2 * time.Minute

// abandoned reports whether the machine of a member that has not started is gone. Such a member blocks
// all other members, so it is removed even while control planes move, unless an address is not
// known.
func (x *observed) abandoned(m Member) bool {
	if x.w.Now.Before(m.Since.Add(memberStarts)) {
		return false
	}
	known := m.Address != ""
	for i := range x.w.Instances {
		o := &x.w.Instances[i]
		if g := x.Group(o.Group); Gone(o) || g != nil && g.Role != v1alpha1.ControlPlaneRole {
			continue
		}
		if known && o.Address == m.Address {
			return false
		}
		known = known && o.Address != ""
	}
	return known && x.seeControlPlanes() || !x.controlPlaneMoves() && !x.controlPlaneJoins()
}

// othersHealthy reports whether all members but one are started, healthy voters.
func (x *observed) othersHealthy(but Member) bool {
	return x.must(ruleMembersHealthy, !slices.ContainsFunc(x.w.Etcd, func(m Member) bool { return !m.same(but) && (!m.Voter || !m.Healthy) }))
}

// unhealthyOther describes the other member that blocks the removal.
func (x *observed) unhealthyOther(but Member) string {
	for _, m := range x.w.Etcd {
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

func (x *observed) votersWithout(but Member) int {
	n := 0
	for _, m := range x.w.Etcd {
		if m.Voter && !m.same(but) {
			n++
		}
	}
	return n
}

func (x *observed) nextLeader(but string) string {
	for _, m := range x.w.Etcd {
		n := x.Nodes[m.Node]
		if m.Node != but && m.Voter && m.Healthy && n != nil && !x.leaves(n) {
			return m.Node
		}
	}
	return ""
}

// onlyControlPlane reports whether n has the only member of etcd. It is not drained: its pods,
// the operator among them, have no other node, and they survive the kubelet's restart.
func (x *observed) onlyControlPlane(n *Node) bool {
	return n.Role == v1alpha1.ControlPlaneRole && len(x.w.Etcd) == 1 && x.w.Etcd[0].Node == n.Name
}

// etcdMark identifies the etcd that an in-place upgrade brings to n; empty: that of Kubernetes.
func (x *observed) etcdMark(n *Node) string {
	switch {
	case n.Role != v1alpha1.ControlPlaneRole:
		return ""
	case len(x.spec.EtcdImageTag) <= longestMark:
		return x.spec.EtcdImageTag
	}
	sum := sha256.Sum256([]byte(x.spec.EtcdImageTag))
	return hex.EncodeToString(sum[:])[:longestMark]
}

// longestMark bounds a mark, so that it fits into the token of a run.
const longestMark = 16
