package decision

import (
	"fmt"
	"time"

	"constellation/operator/api/v1alpha1"
)

// Action is one effect. Each is conditional on what it names, so that doing it twice,
// or late, is the same as doing it once or not at all; see actionKind. Two actions
// that are equal ask for the same effect.
type Action struct {
	Kind    ActionKind
	Node    string // name of the Node, or of the member's node
	Heir    string // name of the donor's heir; of moveLeader: of the next leader
	Donor   string // name
	Machine string // ID in the cloud
	Group   string // ID
	Image   string
	Intent  Intent

	Version, Components string
	JoinComponents      v1alpha1.JoinComponents
	Until               time.Time
	MinVoters           int
	Ended               time.Time // of the failed run that is tried again; zero: none is
	RetryMark           string    // of markRetry: of that run; empty: what is noted is taken off
	Uncordon            bool      // of markInPlace: the label is taken off
}

// ActionKind is what an action does, and on what condition.
type ActionKind int

const (
	_ ActionKind = iota
	// PauseAutoscaler sets the AutoscalingStrategy to not enabled and marks it as ours,
	// in one write, if it is enabled.
	PauseAutoscaler
	// ResumeAutoscaler sets it to enabled and takes the mark off, if the mark is there.
	ResumeAutoscaler
	// SetGroupImage sets the image of the group's next machines.
	SetGroupImage
	// RecordIntent creates the PendingNode. If one of its name exists nothing happens.
	RecordIntent
	// BindIntent sets machine, node and Leave, if the PendingNode with that token is
	// not bound yet and is the object that was seen. It is never taken back: what goes
	// and what stays is settled here.
	BindIntent
	// ClearIntent deletes the PendingNode as it was seen.
	ClearIntent
	// CreateInstance asks the cloud for one machine with the intent's token, if the
	// intent is still there and not bound. The same token never makes a second one.
	CreateInstance
	// AdoptHeir notes the donor on the heir and copies labels and taints.
	AdoptHeir
	// CordonNode marks the node as unschedulable, by us and since when, unless it is
	// so already, and notes its heir. It changes the Node only as it was seen.
	CordonNode
	// ReleaseNode takes the note of an heir off, and our cordon if uncordon is set. A
	// cordon of others stays. It changes the Node only as it was seen.
	ReleaseNode
	// PostponeNode notes until when others come first.
	PostponeNode
	// DrainNode evicts what is left, as budgets allow, and notes what refuses.
	DrainNode
	// YieldLease makes the operator's leader on the node stop, for another to take over.
	YieldLease
	// MoveLeader makes heir the leader of etcd.
	MoveLeader
	// RemoveMember removes the node's member, if at least voters started voters stay.
	RemoveMember
	// DeleteInstance asks the cloud to delete the machine; one that is gone is no error.
	DeleteInstance
	// DeleteNode deletes the Node, if it is still the Node of the machine.
	DeleteNode
	// StartUpgrade asks the node's agent for the version; it attaches to the same run.
	StartUpgrade
	// UpgradeNode asks the node's own agent for the version; it attaches to the same run,
	// and tries no other one again than that which has ended then.
	UpgradeNode
	// NoteComponents notes on the Node what its agent has finished, if it is still the
	// Node of the machine. It changes the Node only as it was seen.
	NoteComponents
	// MarkInPlace labels the Node as one that is upgraded in place, or takes the label
	// off.
	MarkInPlace
	// MarkRetry notes on the Node which failed run is tried again now, or takes the note
	// off. It changes the Node only as it was seen.
	MarkRetry
	// PublishComponents writes what joining machines get into the status, as it was seen.
	PublishComponents
)

// String says what the action does, for logs: "cordon worker-1 heir=worker-4".
func (a Action) String() string {
	s := a.Kind.String()
	add := func(key, value string) {
		if value != "" {
			s += " " + key + value
		}
	}
	add("", a.Node)
	add("donor=", a.Donor)
	add("heir=", a.Heir)
	add("", a.Machine)
	add("", a.Group)
	add("image=", a.Image)
	if in := a.Intent; in.Name != "" {
		add("", in.Name)
		add("", string(in.Goal))
		add("donor=", in.Donor)
		add("machine=", in.Machine)
	}
	add("", a.Version)
	add("", a.RetryMark)
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
var actionTable = [...]struct {
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
	AdoptHeir:         {"adopt heir", true},
	CordonNode:        {"cordon", true},
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
