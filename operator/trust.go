package operator

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// A kubelet writes its own Node, so a captured machine chooses the Node's providerID,
// annotations and version. What a Node claims is therefore compared with the cloud
// before anything is decided from it:
//
//   - A Node whose machine bears its name is confirmed. Its role, group and image are
//     those of the machine.
//   - A Node whose machine has another name is an impostor. Nothing is decided from it.
//   - A Node whose machine the cloud has not described is unknown. It is not replaced
//     and not deleted, and a control plane keeps workers waiting.
//
// Names of Nodes are unique, so of several Nodes that claim one machine at most one is
// confirmed. What a Node replaces follows from the token of its machine; see token.

// impostor is a Node that the cloud contradicts.
type impostor struct {
	node
	machine string // name of the machine whose ID the Node claims
}

func (i *impostor) why() string {
	return fmt.Sprintf("Node %s claims machine %s, which the cloud calls %s", i.name, i.providerID, i.machine)
}

// judge compares what the Nodes of w claim with the cloud. Impostors move from w.nodes
// to w.impostors, and confirmed nodes get what the cloud says of them.
func (x *lookup) judge(w *world, off rule) {
	groups := make(map[string]*group, 2*len(w.groups))
	for i := range w.groups {
		g := &w.groups[i]
		groups[g.id], groups[strings.ToLower(g.id)] = g, g
	}
	// Most nodes are of the group of the node before.
	last, lastID := groups[""], ""
	groupOf := func(id string) *group {
		if id != lastID {
			if last, lastID = groups[id], id; last == nil {
				last = groups[strings.ToLower(id)]
			}
		}
		return last
	}
	kept := 0
	w.impostors = nil
	for i := range w.nodes {
		n := &w.nodes[i]
		m := x.instance(n.providerID)
		n.confirmed = m != nil && m.name == n.name
		switch {
		case n.confirmed:
		case m == nil || m.name == "":
			n.confirmed = off == ruleUnknownKept && n.providerID != ""
			m = nil
		case off == ruleMachinesName:
			n.confirmed = true
		default:
			w.impostors = append(w.impostors, impostor{node: *n, machine: m.name})
			continue
		}
		if m != nil {
			n.providerID = m.id // some clouds change the case between calls
			if off != ruleCloudGroup {
				n.group = m.group
			}
			if off != ruleCloudImage {
				n.image = m.image
			}
			if g := groupOf(n.group); g != nil {
				n.role = g.role
			} else {
				n.role = cmp.Or(m.role, n.role)
			}
		}
		if kept != i {
			w.nodes[kept] = *n
		}
		kept++
	}
	w.nodes = w.nodes[:kept]
	for i := range w.nodes {
		n := &w.nodes[i]
		x.nodes[n.name] = n
		if n.confirmed {
			x.machineOf[n.providerID] = n
		}
	}
	// Our own record names the Node of a machine that the cloud does not describe now.
	for i := range w.intents {
		in := &w.intents[i]
		if in.machine == "" || in.node == "" || x.machineOf[in.machine] != nil {
			continue
		}
		if m := x.instance(in.machine); m != nil && m.name != "" {
			continue
		}
		if n := x.nodes[in.node]; n != nil && strings.EqualFold(n.providerID, in.machine) {
			x.machineOf[in.machine] = n
		}
	}
}

// madeFor returns the machine that m was created to replace, if the cloud still lists
// it. pinned is false if the token does not name one, as those of older operators.
func (k *finder) madeFor(m *instance) (replaced *instance, pinned bool) {
	if m == nil || m.replaces == "" {
		return nil, false
	}
	return k.marks[m.replaces], true
}

// markLength is that of the mark of a machine, in hex digits.
const markLength = 16

// markOf names a machine in the token of the one that replaces it. The same ID in
// another case has the same mark.
func markOf(id string) string {
	sum := sha256.Sum256([]byte("machine\x00" + strings.ToLower(id)))
	return hex.EncodeToString(sum[:markLength/2])
}

// replacedBy returns the mark of the machine that a token's machine replaces; empty if
// the token has none.
func replacedBy(token string) string {
	_, mark, ok := strings.Cut(token, tokenSeparator)
	if !ok || len(mark) != markLength {
		return ""
	}
	return mark
}

const tokenSeparator = "-"
