package decision

import (
	"fmt"
	"time"

	"constellation/operator/api/v1alpha1"
)

// Action is one effect. Each is conditional on what it names: to carry it out twice or late has
// the same effect as once or not at all. See [ActionKind]. Equal actions request the same effect.
type Action struct {
	Kind        ActionKind
	Node        string // name of the Node, or of the member's node
	Replacement string // name of the old node's replacement node; of MoveLeader: of the next leader
	OldNode     string // name
	Machine     string // ID in the cloud
	Group       string // ID
	Image       string
	Intent      Intent

	Version, Components string
	JoinComponents      v1alpha1.JoinComponents
	Etcd                string // of UpgradeNode: mark of the etcd that the target names
	Addons              string // of UpgradeAddons: names, separated by commas
	Until               time.Time
	MinVoters           int
	Address             string    // of RemoveMember: of the member, see [Member]; empty: not known
	Ended               time.Time // of the failed run that is retried; zero: no retry
	RetryMark           string    // of MarkRetry: mark of that run; empty: the request is removed
	Uncordon            bool      // of MarkInPlace: the label is removed
	Plan                string    // of LendNode: namespace/name
	KeepKubelet         bool      // of StartUpgrade: the node's kubelet is replaced later, when the node is drained
}

// ActionKind is what an action does, and its condition.
type ActionKind int

const (
	_ ActionKind = iota
	// PauseAutoscaler disables the AutoscalingStrategy and marks it as paused by the operator, in
	// one write, if it is enabled.
	PauseAutoscaler
	// ResumeAutoscaler enables it and removes the mark, if the mark is there.
	ResumeAutoscaler
	// SetGroupImage sets the image of the group's next machines.
	SetGroupImage
	// RecordIntent creates the PendingNode. If its name exists, nothing happens.
	RecordIntent
	// BindIntent sets machine, node and the goal Leave, if the PendingNode with that token is not
	// bound yet and is the observed object. It is final: it decides which machine leaves and which
	// stays.
	BindIntent
	// ClearIntent deletes the PendingNode if it is unchanged.
	ClearIntent
	// CreateInstance requests one machine with the intent's token, if the intent exists and is not
	// bound. The same token never makes a second machine.
	CreateInstance
	// AdoptReplacement writes the old node's name to the replacement node and copies labels and taints.
	AdoptReplacement
	// CordonNode cordons the node and writes the time, unless it is cordoned already, and writes
	// the name of its replacement node. It changes the Node only if it is unchanged.
	CordonNode
	// LendNode writes to the Node that a Plan may upgrade it now, if the Node is unchanged.
	LendNode
	// ReleaseNode removes the name of the replacement node, and the operator's cordon if Uncordon is set.
	// Cordons of others stay, and so does that of a Plan to which the node was lent. It changes the Node only if it is unchanged.
	ReleaseNode
	// PostponeNode writes until when other nodes come first.
	PostponeNode
	// DrainNode evicts the remaining pods as PodDisruptionBudgets allow, and records what blocks.
	DrainNode
	// YieldLease stops the operator's leader on the node, so that another replica leads.
	YieldLease
	// MoveLeader makes replacement node the leader of etcd.
	MoveLeader
	// RemoveMember removes the node's etcd member at Address, if at least MinVoters started voters remain.
	RemoveMember
	// DeleteInstance requests the deletion of the machine. A machine that is gone is no error.
	DeleteInstance
	// DeleteNode deletes the Node if it is still the Node of the machine.
	DeleteNode
	// StartUpgrade requests an upgrade of Kubernetes from the node's agent, or attaches to that run.
	// With KeepKubelet, a new run keeps the kubelet.
	StartUpgrade
	// UpgradeNode requests an upgrade from the node's own agent, or attaches to that run. It retries
	// only the run that ended at Ended.
	UpgradeNode
	// NoteComponents writes the components that its agent has installed to the Node, if it is still
	// the Node of the machine and unchanged.
	NoteComponents
	// MarkInPlace labels the Node as one that is upgraded in place, or removes the label.
	MarkInPlace
	// MarkRetry writes to the Node which failed run is retried now, or removes that. It changes the
	// Node only if it is unchanged.
	MarkRetry
	// UpgradeAddons requests an upgrade of add-ons from the node's agent, or attaches to that run.
	UpgradeAddons
	// PublishComponents writes the components of joining machines to the status, if it is unchanged.
	PublishComponents

	actionKinds = iota // one more than the last kind
)

// String describes the action for logs: "cordon worker-1 heir=worker-4".
func (a Action) String() string {
	s := a.Kind.String()
	add := func(key, value string) {
		if value != "" {
			s += " " + key + value
		}
	}
	add("", a.Node)
	add("donor=", a.OldNode)
	add("heir=", a.Replacement)
	add("", a.Machine)
	add("", a.Group)
	add("image=", a.Image)
	if in := a.Intent; in.Name != "" {
		add("", in.Name)
		add("", string(in.Goal))
		add("donor=", in.OldNode)
		add("machine=", in.Machine)
	}
	add("", a.Version)
	add("", a.Addons)
	if a.KeepKubelet {
		add("kubelet=", "kept")
	}
	add("", a.RetryMark)
	add("plan=", a.Plan)
	if a.JoinComponents != (v1alpha1.JoinComponents{}) {
		s += fmt.Sprintf(" control-plane=%s worker=%s", a.JoinComponents.ControlPlane, a.JoinComponents.Worker)
	}
	if a.Kind == RemoveMember {
		s += fmt.Sprintf(" leaving=%d", a.MinVoters)
	}
	return s
}

func (d *Decision) do(a Action) { d.Actions = append(d.Actions, a) }

// moves reports whether an action brings the rollout forward by itself. A retry request that
// is removed does not.
func (a Action) moves() bool {
	return actionTable[a.Kind].moves && (a.Kind != MarkRetry || a.RetryMark != "")
}

// actionTable has the name of each kind in metrics, log keys and crash points, and whether its
// actions bring the rollout forward. Evictions, creations and deletions do not: they are
// repeated until something else happens.
var actionTable = [actionKinds]struct {
	name  string
	moves bool
}{
	PauseAutoscaler:   {"pause autoscaler", true},
	ResumeAutoscaler:  {"resume autoscaler", true},
	SetGroupImage:     {"set image of group", true},
	RecordIntent:      {"record intent", true},
	BindIntent:        {"bind intent", true},
	ClearIntent:       {"clear intent", true},
	CreateInstance:    {"create machine", false},
	AdoptReplacement:  {"adopt heir", true},
	CordonNode:        {"cordon", true},
	LendNode:          {"lend to plan", true},
	ReleaseNode:       {"release", true},
	PostponeNode:      {"postpone", true},
	DrainNode:         {"drain", false},
	YieldLease:        {"yield lease", true},
	MoveLeader:        {"move etcd leader", true},
	RemoveMember:      {"remove etcd member", true},
	DeleteInstance:    {"delete machine", false},
	DeleteNode:        {"delete node", true},
	StartUpgrade:      {"start upgrade", true},
	UpgradeNode:       {"upgrade node", true},
	NoteComponents:    {"note components", true},
	MarkInPlace:       {"mark in-place", true},
	MarkRetry:         {"mark retry", true},
	UpgradeAddons:     {"upgrade add-ons", false},
	PublishComponents: {"publish components", true},
}

// String names the kind.
func (k ActionKind) String() string { return actionTable[k].name }

// ActionKinds returns all kinds.
func ActionKinds() []ActionKind {
	var all []ActionKind
	for kind := PauseAutoscaler; int(kind) < len(actionTable); kind++ {
		all = append(all, kind)
	}
	return all
}
