package decision

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"constellation/engine/cloud"
)

// A kubelet writes its own Node, so a captured machine chooses the Node's providerID,
// annotations and version. The operator therefore compares a Node's claims with the cloud
// before any decision uses it:
//
//   - A Node whose machine bears its name is confirmed. Its role, group and image are
//     those of the machine.
//   - A Node whose machine has another name is an impostor. Nothing is decided from it.
//   - A Node that does not name the incarnation of its machine is unknown, in a cloud that
//     reuses IDs: its machine may be that of the ID now, or an earlier one. A Node that joined
//     before the cloud reported incarnations is confirmed, if its machine is older than the Node.
//   - A Node whose machine the cloud has not described is unknown. It is not replaced
//     and not deleted, and if it is a control plane, workers wait.
//
// Names of Nodes are unique, so of several Nodes that claim one machine at most one is
// confirmed. The token of a Node's machine names the node that it replaces; see token.

// Impostor is a Node that the cloud contradicts.
type Impostor struct {
	Node
	Machine string // name of the machine whose ID the Node claims
}

// Why describes the false claim.
func (i *Impostor) Why() string {
	return fmt.Sprintf("Node %s claims machine %s, whose name in the cloud is %s", i.Name, i.ProviderID, i.Machine)
}

// judge compares the claims of the Nodes of w with the cloud. Impostors move from w.Nodes to
// w.Impostors. Confirmed nodes get group, role and image from the cloud.
func (x *Lookup) judge(w *World, off rule) {
	groups := make(map[string]*Group, 2*len(w.Groups))
	for i := range w.Groups {
		g := &w.Groups[i]
		groups[g.ID], groups[strings.ToLower(g.ID)] = g, g
	}
	// Most nodes are of the group of the node before.
	last, lastID := groups[""], ""
	groupOf := func(id string) *Group {
		if id != lastID {
			if last, lastID = groups[id], id; last == nil {
				last = groups[strings.ToLower(id)]
			}
		}
		return last
	}
	kept := 0
	w.Impostors = nil
	for i := range w.Nodes {
		n := &w.Nodes[i]
		m := x.Instance(n.ProviderID)
		n.Confirmed = m != nil && m.Name == n.Name
		switch {
		case n.Confirmed && off != ruleBareUnknown && isBare(n.ProviderID, m) && !joinedBefore(w, n, m):
			n.Confirmed, m = false, nil
		case n.Confirmed:
		case m == nil || m.Name == "":
			n.Confirmed = off == ruleUnknownKept && n.ProviderID != ""
			m = nil
		case off == ruleMachinesName:
			n.Confirmed = true
		default:
			w.Impostors = append(w.Impostors, Impostor{Node: *n, Machine: m.Name})
			continue
		}
		if m != nil {
			n.ProviderID = m.ID // some clouds change the case between calls
			if off != ruleCloudGroup {
				n.Group = m.Group
			}
			if off != ruleCloudImage {
				n.Image = m.Image
			}
			if g := groupOf(n.Group); g != nil {
				n.Role = g.Role
			} else {
				n.Role = cmp.Or(m.Role, n.Role)
			}
		}
		if kept != i {
			w.Nodes[kept] = *n
		}
		kept++
	}
	w.Nodes = w.Nodes[:kept]
	for i := range w.Nodes {
		n := &w.Nodes[i]
		x.Nodes[n.Name] = n
		if n.Confirmed {
			x.NodeOf[n.ProviderID] = n
		}
	}
	x.addRecorded(w)
}

// isBare reports whether a Node's ID lacks the incarnation that its machine m has.
func isBare(id string, m *Instance) bool {
	_, named := cloud.SplitKey(id)
	_, has := cloud.SplitKey(m.ID)
	return named == "" && has != ""
}

// joinedBefore reports whether a Node without an incarnation joined before its cloud reported
// incarnations. The operator has annotated it then, and does not repeat that. A later machine of the
// ID is younger than the Node. A Node of a later machine is annotated with its incarnation.
func joinedBefore(w *World, n *Node, m *Instance) bool {
	return n.Components != "" && !w.Joining[n.Name] && !m.Created.IsZero() && m.Created.Before(n.Created)
}

// addRecorded finds the Nodes of machines that the cloud does not describe now, by the names that
// intents have recorded.
func (x *Lookup) addRecorded(w *World) {
	for i := range w.Intents {
		in := &w.Intents[i]
		if in.Machine == "" || in.Node == "" || x.NodeOf[in.Machine] != nil {
			continue
		}
		if m := x.Instance(in.Machine); m != nil && m.Name != "" {
			continue
		}
		if n := x.Nodes[in.Node]; n != nil && cloud.SameMachine(n.ProviderID, in.Machine) {
			x.NodeOf[in.Machine] = n
		}
	}
}

// madeFor returns the machine that m was created to replace, if the cloud still lists
// it. pinned is false if the token does not name one, as those of older operators.
func (k *Index) madeFor(m *Instance) (replaced *Instance, pinned bool) {
	if m == nil || m.ReplacesHash == "" {
		return nil, false
	}
	return k.marks[m.ReplacesHash], true
}

// markLength is that of the mark of a machine, in hex digits.
const markLength = 16

// MachineHash names a machine in the token of the one that replaces it. The same ID in
// another case has the same mark.
func MachineHash(id string) string {
	sum := sha256.Sum256([]byte("machine\x00" + strings.ToLower(id)))
	return hex.EncodeToString(sum[:markLength/2])
}

// ReplacedHash returns the mark of the machine that a token's machine replaces; empty if
// the token has none.
func ReplacedHash(token string) string {
	_, mark, ok := strings.Cut(token, tokenSeparator)
	if !ok || len(mark) != markLength {
		return ""
	}
	return mark
}

const tokenSeparator = "-"
