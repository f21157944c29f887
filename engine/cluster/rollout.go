package cluster

import (
	"fmt"
	"slices"
	"time"
)

// Rollout is the operator's report on the nodes' progress to the target.
type Rollout struct {
	Target NodeTarget
	// Observed reports whether the operator has seen the target as it is now. Until then
	// the rest is about another one.
	Observed bool
	// Reached means that all nodes are at the target, Busy that something is being done,
	// Stalled that nothing goes on until somebody does something. Reason and Message say
	// why it is so.
	Reached, Busy, Stalled bool
	Reason, Message        string
	// Agent is the upgrade of Kubernetes on a control plane; zero if there was none.
	Agent AgentRun
	// Waiting says why nothing moves; zero while something does.
	Waiting RolloutWait
	// Moves are the machines on their way in or out, sorted by name.
	Moves []Move
	// Unmanaged means that the cluster has no NodeVersion: others upgrade it. All other fields are
	// zero.
	Unmanaged bool
}

// AgentRun is how far the agent of a control plane is with Kubernetes.
type AgentRun struct {
	Version, Node string
	// Phase is download, plan, apply, done or failed.
	Phase string
	// Line is the last line that kubeadm printed.
	Line    string
	Started time.Time
	// NextTry is when one that has failed is tried again; zero if that is not known.
	NextTry time.Time
}

// Active reports whether it is under way.
func (a AgentRun) Active() bool {
	return a.Phase == "download" || a.Phase == "plan" || a.Phase == "apply"
}

// RolloutWait is why nothing moves.
type RolloutWait struct {
	// Reason is a word for programs, Message the same for people.
	Reason, Message string
	// Node is whom it is about; empty if that is no node.
	Node  string
	Since time.Time
	// NextTry is when it is tried again; zero if that is not known.
	NextTry time.Time
}

// Move is a machine on its way into a rollout's cluster, or out of it, or one that is
// upgraded as it is.
type Move struct {
	// Name is that of its record, which is there before the machine is asked for.
	Name string
	// Node is the name of the machine; empty until the cloud has named it.
	Node, Group string
	Leaves      bool
	// Upgrades says that it is a node, is upgraded as it is, and stays.
	Upgrades bool
	// Donor is the node that it replaces; for one that leaves often itself.
	Donor string
	// Machine is its state in the cloud: Creating, Ready, Terminating, Failed, ...
	Machine string
	// Phase is the stage of the agent's run for a node that is upgraded in place: download, plan,
	// apply, done or failed; empty before the agent has started. Line is its last line of output.
	Phase, Line string
	// NextTry is when a run that has failed is tried again; zero if that is not known.
	NextTry time.Time
	// Reached says that the machine is where it goes: a node, or gone.
	Reached bool
	// Revoked describes who revoked the machine, and why; empty if it was not revoked.
	Revoked string
}

// RolloutChange changes a rollout; nil fields stay.
type RolloutChange struct{ Paused, Cancelled *bool }

// SkipState is whether people have a rollout leave a node, or a group with all its nodes,
// as it is.
type SkipState struct {
	Name string `json:"name"`
	Kind string `json:"kind"` // node, group
	Held bool   `json:"skipped"`
	// By is the group that is left as it is with all its nodes, this one among them; empty
	// if there is none.
	By string `json:"by,omitempty"`
	// Postponed is until when others are replaced before it, because its replacement has
	// failed; zero if it is not.
	Postponed time.Time `json:"postponed,omitzero"`
	// Failed says that its upgrade in place has failed, or that of Kubernetes by the agent of
	// this control plane, and waits to be tried again.
	Failed bool `json:"failed,omitempty"`
}

// Kinds of a Holding.
const (
	SkipNode  = "node"
	SkipGroup = "group"
)

// FailedOn reports whether an upgrade that the agent of a node was to do has failed, and
// waits to be tried again.
func (ro Rollout) FailedOn(node string) bool {
	return ro.Agent.Node == node && ro.Agent.Phase == "failed" && ro.Agent.Version == ro.Target.Kubernetes || slices.ContainsFunc(ro.Moves, func(m Move) bool {
		return m.Upgrades && m.Node == node && m.Phase == "failed"
	})
}

// Holder is who works on a cluster.
type Holder struct {
	User string `json:"user"`
	Host string `json:"host"`
	// Workspace is a path on Host.
	Workspace string    `json:"workspace"`
	PID       int       `json:"pid"`
	Run       string    `json:"run"`
	Since     time.Time `json:"since"`
}

// String is "ops@laptop (process 4711, run upgrade-…) since 14:02:01Z".
func (h Holder) String() string {
	return fmt.Sprintf("%s@%s (process %d in %s, run %s) since %s", h.User, h.Host, h.PID, h.Workspace, h.Run, h.Since.UTC().Format(time.RFC3339))
}

// Same reports whether o is of the same workspace of the same user on the same computer.
func (h Holder) Same(o Holder) bool {
	return h.User == o.User && h.Host == o.Host && h.Workspace == o.Workspace
}

// HeldError means that somebody else works on the cluster.
type HeldError struct{ By Holder }

// Error names the holder.
func (e *HeldError) Error() string { return "it is held by " + e.By.String() }

// WithoutStrangers returns nodes without those that have just joined and that the operator has
// said nothing of yet. They are there already as machines, by their names or by what they are
// for, and stand in the group that they belong to. Of those that have been there for longer
// nothing else may come.
func (ro Rollout) WithoutStrangers(nodes []*Node, now time.Time) []*Node {
	strange := func(n *Node) bool { return n.Group == "" && n.Image == "" && now.Sub(n.Created) < strangeFor }
	if !slices.ContainsFunc(nodes, strange) {
		return nodes
	}
	named := map[string]bool{}
	for _, m := range ro.Moves {
		named[m.Node] = true
	}
	return slices.DeleteFunc(slices.Clone(nodes), func(n *Node) bool { return strange(n) && !named[n.Name] })
}

// strangeFor is how long a node may exist before the operator reports its state.
const strangeFor = 15 * time.Second
