package operator

import (
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/v1alpha1"
)

// wait is a reason why something does not move.
type wait struct {
	reason, message string
	object          v1alpha1.Reference
	next            time.Time // zero: an event will wake us
}

const (
	reasonPaused    = "Paused"
	reasonPartial   = "CloudListPartial"
	reasonCancelled = "Cancelled"
	reasonRollout   = "RollingOut"
	reasonKept      = "WorkersKept"
	reasonLeftAlone = "GroupsLeftAlone"
	reasonHeld      = "NodesHeld"
	reasonRejected  = "NodesRejected"
)

// stalling are the reasons that last until somebody intervenes.
var stalling = []string{"TargetRefused", "ComponentsUnknown", "DrainBlocked", "UpgradeFailed", "Postponed", "EtcdUnhealthy", "HeirCordoned", "GroupMissing", "ControlPlaneHeld", "NodeNotReady"}

func (d *decision) wait(reason, message string, object v1alpha1.Reference, next time.Time) {
	d.waits = append(d.waits, wait{reason: reason, message: message, object: object, next: next})
}

func ref(node string) v1alpha1.Reference { return v1alpha1.Reference{Kind: "Node", Name: node} }

// status tells what was found and decided. It is bounded like that of assess, on
// which it builds.
func (d *decision) status() v1alpha1.NodeVersionStatus {
	w := d.w
	var kept, left, held int32
	for i := range w.nodes {
		n := &w.nodes[i]
		outdated := d.outdated(n)
		if outdated && d.held(n) && !d.donors[n.name] {
			held++
		}
		if !outdated && known(n) && !d.atTarget(n) && !d.leaves(n) && !n.obsolete {
			if d.group(n.group) != nil {
				kept++
			} else {
				left++
			}
		}
	}
	s := assessSorted(d.spec, w.generation, w.before, w, w.now, d.marked)
	s.JoinComponents = w.before.JoinComponents
	s.Budget = int32(max(0, d.surge-d.inFlight))
	s.ActiveClusterVersionUpgrade = w.run.active()
	if w.run.phase != "" {
		s.Upgrade = w.run.progress()
	}
	s.Waiting = d.waiting()
	now := metav1.NewTime(w.now.Truncate(time.Second))
	for _, c := range d.conditions(s, kept, left, held) {
		setCondition(&s.Conditions, c, now)
	}
	return s
}

// marked reports whether another node replaces n, and whether n replaces one. A mark of
// a replacement that is over is history.
func (d *decision) marked(n *node) (hasHeir, hasDonor bool) {
	if n.heir != "" {
		h := d.nodes[n.heir]
		hasHeir = h != nil && h.donor == n.name && d.replaces(h, n)
	}
	if n.donor != "" {
		o := d.nodes[n.donor]
		hasDonor = o != nil && !d.atTarget(o) && d.replaces(n, o)
	}
	return hasHeir, hasDonor
}

// progress is what is told of a run.
func (r upgradeRun) progress() *v1alpha1.UpgradeProgress {
	p := &v1alpha1.UpgradeProgress{Version: r.version, Node: r.node, Phase: r.phase, Line: limited(r.line, 100), Started: metav1.NewTime(r.started.Truncate(time.Second))}
	if r.mark() != "" {
		p.NextTry = metav1.NewTime(r.ended.Add(upgradeRetry).Truncate(time.Second))
	}
	return p
}

// waiting returns the first reason why nothing moves; nil if something does or nothing
// needs to. What somebody must see to comes first.
func (d *decision) waiting() *v1alpha1.Waiting {
	if len(d.waits) == 0 {
		return nil
	}
	first := d.waits[0]
	for _, w := range d.waits {
		if slices.Contains(stalling, w.reason) {
			first = w
			break
		}
	}
	blocked := slices.Contains(stalling, first.reason)
	if !blocked && slices.ContainsFunc(d.actions, action.moves) {
		return nil
	}
	out := &v1alpha1.Waiting{Reason: first.reason, Message: limited(first.message, 200), Since: metav1.NewTime(d.w.now.Truncate(time.Second))}
	if first.object.Name != "" {
		out.Object = &first.object
	}
	if !first.next.IsZero() {
		next := metav1.NewTime(first.next.Truncate(time.Second))
		out.NextTry = &next
	}
	if b := d.w.before.Waiting; b != nil && b.Reason == out.Reason && (b.Object == nil) == (out.Object == nil) && (b.Object == nil || *b.Object == *out.Object) {
		out.Since = b.Since
	}
	return out
}

// limited keeps a text within so many bytes.
func limited(s string, bytes int) string {
	if len(s) <= bytes {
		return s
	}
	return strings.ToValidUTF8(s[:bytes], "") + "…"
}

// nameless reports whether the Node of a machine does not name it. A Node that no machine
// of the cloud can be is not waited for.
func (d *decision) nameless() bool {
	return slices.ContainsFunc(d.w.nodes, func(n node) bool {
		return n.providerID == "" && (!d.w.complete || slices.ContainsFunc(d.w.instances, func(m instance) bool { return m.name == n.name && !gone(&m) }))
	})
}

// conditions sums up what is left to do and why it is not done.
func (d *decision) conditions(s v1alpha1.NodeVersionStatus, kept, left, held int32) []metav1.Condition {
	c := s.Nodes
	todo := c.Outdated + c.Donors - kept - left - held
	working := len(d.w.intents) > 0 || d.w.run.active()
	reason, ready, text := "", false, ""
	busy, stalled, next := true, false, ""
	if w := s.Waiting; w != nil && w.NextTry != nil {
		next = "; next try at " + w.NextTry.UTC().Format("15:04:05Z")
	}
	switch w := s.Waiting; {
	case c.Total == 0:
		reason, text, busy = reasonNoNodes, "the cluster has no nodes yet", false
	case w != nil && slices.Contains(stalling, w.Reason):
		reason, text, stalled, busy = w.Reason, w.Message, true, working
	case d.nameless():
		reason, text, stalled, busy = reasonInvalid, "some nodes have no providerID, so nothing is known of their machines", true, working
	case working && w != nil:
		reason, text = w.Reason, w.Message
	case d.spec.Rollout.Cancel && todo > 0 && !working:
		reason, text, busy = reasonCancelled, "the rollout was cancelled; nodes stay as they are until spec.rollout.cancel is false", false
	case d.spec.Rollout.Paused && todo > 0 && !working:
		reason, text, busy = reasonPaused, "the rollout is paused; set spec.rollout.paused to false to go on", false
	case w != nil:
		reason, text = w.Reason, w.Message
	case working || todo > 0 || c.Obsolete > 0:
		reason, text = reasonRollout, "nodes are being brought to the target"
	case c.AwaitingAnnotation+c.Pending > 0:
		reason, text = reasonJoining, "machines are joining"
	case left > 0:
		reason, text, stalled, busy = reasonLeftAlone, "nodes that have no ScalingGroup are not at the target; this operator leaves them alone", true, false
	case held > 0:
		reason, text, ready, busy = reasonHeld, fmt.Sprintf("all other nodes are at the target; held as they are: %d", held), true, false
	case kept > 0:
		reason, text, ready, busy = reasonKept, "control planes are at the target; workers are kept as they are", true, false
	case len(d.w.impostors) > 0:
		reason, text, ready, busy = reasonRejected, d.w.impostors[0].why()+"; all other nodes are at the target", true, false
	default:
		reason, text, ready, busy = reasonUpToDate, "all nodes are at the target", true, false
	}
	is := func(kind string, status bool, bytes int) metav1.Condition {
		return condition(kind, status, d.w.generation, reason, "%s", limited(text, bytes))
	}
	if w := s.Waiting; w != nil && next != "" && text == w.Message { // which comes last, and is not cut
		text = limited(text, 137-len(next)) + next
	}
	return []metav1.Condition{is(v1alpha1.ConditionReady, ready, 140), is(v1alpha1.ConditionReconciling, busy, 50), is(v1alpha1.ConditionStalled, stalled, 50)}
}

// shorten keeps an error's text within a condition that people read.
func shorten(s string) string {
	const limit = 256
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}

// since is a wait of the status that has lasted since the same one was told.
func (d *decision) since(w wait) *v1alpha1.Waiting {
	d.waits, d.actions = []wait{w}, nil
	return d.waiting()
}
