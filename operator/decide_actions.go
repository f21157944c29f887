package operator

import (
	"fmt"
	"time"

	"constellation/operator/api/v1alpha1"
)

// action is one effect. Each is conditional on what it names, so that doing it twice,
// or late, is the same as doing it once or not at all; see actionKind. Two actions
// that are equal ask for the same effect.
type action struct {
	kind    actionKind
	node    string // name of the Node, or of the member's node
	heir    string // name of the donor's heir; of moveLeader: of the next leader
	donor   string // name
	machine string // ID in the cloud
	group   string // ID
	image   string
	intent  intent

	version, components string
	join                v1alpha1.JoinComponents
	until               time.Time
	voters              int
	ended               time.Time // of the failed run that is tried again; zero: none is
	mark                string    // of markRetry: of that run; empty: what is noted is taken off
	uncordon            bool      // of markInPlace: the label is taken off
}

// actionKind is what an action does, and on what condition.
type actionKind int

const (
	_ actionKind = iota
	// pauseAutoscaler sets the AutoscalingStrategy to not enabled and marks it as ours,
	// in one write, if it is enabled.
	pauseAutoscaler
	// resumeAutoscaler sets it to enabled and takes the mark off, if the mark is there.
	resumeAutoscaler
	// setGroupImage sets the image of the group's next machines.
	setGroupImage
	// recordIntent creates the PendingNode. If one of its name exists nothing happens.
	recordIntent
	// bindIntent sets machine, node and Leave, if the PendingNode with that token is
	// not bound yet and is the object that was seen. It is never taken back: what goes
	// and what stays is settled here.
	bindIntent
	// clearIntent deletes the PendingNode as it was seen.
	clearIntent
	// createInstance asks the cloud for one machine with the intent's token, if the
	// intent is still there and not bound. The same token never makes a second one.
	createInstance
	// adoptHeir notes the donor on the heir and copies labels and taints.
	adoptHeir
	// cordonNode marks the node as unschedulable, by us and since when, unless it is
	// so already, and notes its heir. It changes the Node only as it was seen.
	cordonNode
	// releaseNode takes the note of an heir off, and our cordon if uncordon is set. A
	// cordon of others stays. It changes the Node only as it was seen.
	releaseNode
	// postponeNode notes until when others come first.
	postponeNode
	// drainNode evicts what is left, as budgets allow, and notes what refuses.
	drainNode
	// yieldLease makes the operator's leader on the node stop, for another to take over.
	yieldLease
	// moveLeader makes heir the leader of etcd.
	moveLeader
	// removeMember removes the node's member, if at least voters started voters stay.
	removeMember
	// deleteInstance asks the cloud to delete the machine; one that is gone is no error.
	deleteInstance
	// deleteNode deletes the Node, if it is still the Node of the machine.
	deleteNode
	// startUpgrade asks the node's agent for the version; it attaches to the same run.
	startUpgrade
	// upgradeNode asks the node's own agent for the version; it attaches to the same run,
	// and tries no other one again than that which has ended then.
	upgradeNode
	// noteComponents notes on the Node what its agent has finished, if it is still the
	// Node of the machine. It changes the Node only as it was seen.
	noteComponents
	// markInPlace labels the Node as one that is upgraded in place, or takes the label
	// off.
	markInPlace
	// markRetry notes on the Node which failed run is tried again now, or takes the note
	// off. It changes the Node only as it was seen.
	markRetry
	// publishComponents writes what joining machines get into the status, as it was seen.
	publishComponents
)

// String says what the action does, for logs: "cordon worker-1 heir=worker-4".
func (a action) String() string {
	s := actionNames[a.kind]
	add := func(key, value string) {
		if value != "" {
			s += " " + key + value
		}
	}
	add("", a.node)
	add("donor=", a.donor)
	add("heir=", a.heir)
	add("", a.machine)
	add("", a.group)
	add("image=", a.image)
	if in := a.intent; in.name != "" {
		add("", in.name)
		add("", string(in.goal))
		add("donor=", in.donor)
		add("machine=", in.machine)
	}
	add("", a.version)
	add("", a.mark)
	if a.join != (v1alpha1.JoinComponents{}) {
		s += fmt.Sprintf(" control-plane=%s worker=%s", a.join.ControlPlane, a.join.Worker)
	}
	if a.kind == removeMember {
		s += fmt.Sprintf(" leaving=%d", a.voters)
	}
	return s
}

func (d *decision) do(a action) { d.actions = append(d.actions, a) }

// moves reports whether an action brings the rollout on by itself. Evictions,
// creations and deletions are only repeated until something else has happened.
func (a action) moves() bool {
	return a.kind != drainNode && a.kind != createInstance && a.kind != deleteInstance && (a.kind != markRetry || a.mark != "")
}

// actionNames name the kinds in metrics, log keys and crash points.
var actionNames = [...]string{
	pauseAutoscaler: "pause autoscaler", resumeAutoscaler: "resume autoscaler", setGroupImage: "set image of group", recordIntent: "record intent",
	bindIntent: "bind intent", clearIntent: "clear intent", createInstance: "create machine", adoptHeir: "adopt heir", cordonNode: "cordon",
	releaseNode: "release", postponeNode: "postpone", drainNode: "drain", yieldLease: "yield lease", moveLeader: "move etcd leader",
	removeMember: "remove etcd member", deleteInstance: "delete machine", deleteNode: "delete node", startUpgrade: "start upgrade", upgradeNode: "upgrade node",
	noteComponents: "note components", markInPlace: "mark in-place", markRetry: "mark retry", publishComponents: "publish components",
}

// String names the kind.
func (k actionKind) String() string { return actionNames[k] }

// actionKinds returns all kinds.
func actionKinds() []actionKind {
	var all []actionKind
	for kind := pauseAutoscaler; int(kind) < len(actionNames); kind++ {
		all = append(all, kind)
	}
	return all
}
