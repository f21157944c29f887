package decision

import (
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/v1alpha1"
)

// Wait is a reason why something does not progress.
type Wait struct {
	Reason, Message string
	Object          v1alpha1.Reference
	Next            time.Time // zero: an event starts the next round
}

// Reasons of conditions and of waits, beside those in stalling.
const (
	reasonPaused    = "Paused"
	ReasonPartial   = "CloudListPartial"
	reasonCancelled = "Cancelled"
	ReasonRollout   = "RollingOut"
	reasonKept      = "WorkersKept"
	reasonLeftAlone = "GroupsLeftAlone"
	reasonHeld      = "NodesHeld"
	reasonRejected  = "NodesRejected"
	reasonAddons    = "AddonsFailed"
)

// stalling are the reasons that last until somebody intervenes.
var stalling = []string{"TargetRefused", "ComponentsUnknown", "DrainBlocked", "UpgradeFailed", "Postponed", "EtcdUnhealthy", "EtcdTagMissing", "EtcdMemberOutdated", "HeirCordoned", "GroupMissing", "ControlPlaneHeld", "NodeNotReady"}

// StallGrace is how long such a reason applies to a node before its replacement or upgrade counts as
// stalled. Evictions are refused for a moment in most rollouts, and kubelets restart.
const StallGrace = time.Minute

// Stalls reports whether w lasts until somebody intervenes and is about a node or PendingNode of in.
func (w *Wait) Stalls(in *Intent) bool {
	if !slices.Contains(stalling, w.Reason) || w.Object.Name == "" {
		return false
	}
	return w.Object.Kind == "PendingNode" && w.Object.Name == in.Name || w.Object.Kind == "Node" && (w.Object.Name == in.Node || w.Object.Name == in.OldNode)
}

// othersMove reports whether a run or an intent continues that no stalling wait is about.
func (d *Decision) othersMove() bool {
	return d.w.Run.Active() || slices.ContainsFunc(d.w.Intents, func(in Intent) bool {
		return !slices.ContainsFunc(d.Waits, func(w Wait) bool { return w.Stalls(&in) })
	})
}

// Wait adds a wait to the status. next is when it can end by itself; zero: not known.
func (d *Decision) Wait(reason, message string, object v1alpha1.Reference, next time.Time) {
	d.Waits = append(d.Waits, Wait{Reason: reason, Message: message, Object: object, Next: next})
}

// NodeReference returns a reference to a Node.
func NodeReference(node string) v1alpha1.Reference {
	return v1alpha1.Reference{Kind: "Node", Name: node}
}

// Status returns the status after the decision. It adds to the status of assess, and its size is
// bounded in the same way.
func (d *Decision) Status() v1alpha1.NodeVersionStatus {
	w := d.w
	var kept, left, onHold int32
	for i := range w.Nodes {
		n := &w.Nodes[i]
		outdated := d.outdated(n)
		if outdated && d.onHold(n) && !d.oldNodes[n.Name] {
			onHold++
		}
		if !outdated && d.known(n) && !d.atTarget(n) && !d.leaves(n) && !n.Obsolete {
			if d.Group(n.Group) != nil {
				kept++
			} else {
				left++
			}
		}
	}
	s := assessSorted(d.spec, w.Generation, w.Before, w, w.Now, d.marked)
	s.JoinComponents = w.Before.JoinComponents
	s.Budget = int32(max(0, d.surge-d.inFlight))
	s.ActiveClusterVersionUpgrade = w.Run.Active()
	if w.Run.Phase != "" {
		s.Upgrade = w.Run.progress()
	}
	s.Waiting, s.Addons = d.waiting(), d.addons
	now := metav1.NewTime(w.Now.Truncate(time.Second))
	for _, c := range d.conditions(s, kept, left, onHold) {
		SetCondition(&s.Conditions, c, now)
	}
	return s
}

// marked reports whether another node replaces n, and whether n replaces one. A mark of a finished
// replacement does not count.
func (x *observed) marked(n *Node) (hasReplacement, replacesOther bool) {
	if n.Replacement != "" {
		h := x.Nodes[n.Replacement]
		hasReplacement = h != nil && h.OldNode == n.Name && x.replaces(h, n)
	}
	if n.OldNode != "" {
		o := x.Nodes[n.OldNode]
		replacesOther = o != nil && !x.atTarget(o) && x.replaces(n, o)
	}
	return hasReplacement, replacesOther
}

// progress returns a run as the status reports it.
func (r UpgradeRun) progress() *v1alpha1.UpgradeProgress {
	p := &v1alpha1.UpgradeProgress{Version: r.Version, Node: r.Node, Phase: r.Phase, Line: Truncate(r.Line, 100), Started: metav1.NewTime(r.Started.Truncate(time.Second))}
	if r.Active() {
		p.BootID = r.BootID
	}
	if r.RetryMark() != "" {
		p.NextTry = metav1.NewTime(r.Ended.Add(UpgradeRetry).Truncate(time.Second))
	}
	return p
}

// waiting returns the first reason why nothing progresses, or nil. Reasons that need a person
// come first.
func (d *Decision) waiting() *v1alpha1.Waiting {
	if len(d.Waits) == 0 {
		return nil
	}
	first := d.Waits[0]
	for _, w := range d.Waits {
		if slices.Contains(stalling, w.Reason) {
			first = w
			break
		}
	}
	blocked := slices.Contains(stalling, first.Reason)
	if !blocked && slices.ContainsFunc(d.Actions, Action.moves) {
		return nil
	}
	out := &v1alpha1.Waiting{Reason: first.Reason, Message: Truncate(first.Message, 200), Since: metav1.NewTime(d.w.Now.Truncate(time.Second))}
	if first.Object.Name != "" {
		out.Object = &first.Object
	}
	if !first.Next.IsZero() {
		next := metav1.NewTime(first.Next.Truncate(time.Second))
		out.NextTry = &next
	}
	if b := d.w.Before.Waiting; b != nil && b.Reason == out.Reason && (b.Object == nil) == (out.Object == nil) && (b.Object == nil || *b.Object == *out.Object) {
		out.Since = b.Since
	}
	return out
}

// Truncate shortens s to that many bytes.
func Truncate(s string, bytes int) string {
	if len(s) <= bytes {
		return s
	}
	return strings.ToValidUTF8(s[:bytes], "") + "…"
}

// hasNodeWithoutMachine reports whether a Node has no providerID while the cloud has a machine of
// its name. A Node without such a machine is not waited for.
func (x *observed) hasNodeWithoutMachine() bool {
	return slices.ContainsFunc(x.w.Nodes, func(n Node) bool {
		return n.ProviderID == "" && (!x.w.Complete || slices.ContainsFunc(x.w.Instances, func(m Instance) bool { return m.Name == n.Name && !Gone(&m) }))
	})
}

// conditions summarizes what remains to do and why it is not done.
func (d *Decision) conditions(s v1alpha1.NodeVersionStatus, kept, left, onHold int32) []metav1.Condition {
	c := s.Nodes
	todo := c.Outdated + c.Donors - kept - left - onHold
	working := len(d.w.Intents) > 0 || d.w.Run.Active()
	reason, ready, text := "", false, ""
	busy, stalled, next := true, false, ""
	if w := s.Waiting; w != nil && w.NextTry != nil {
		next = "; next try at " + w.NextTry.UTC().Format("15:04:05Z")
	}
	switch w := s.Waiting; {
	case c.Total == 0:
		reason, text, busy = reasonNoNodes, "the cluster has no nodes yet", false
	case w != nil && slices.Contains(stalling, w.Reason):
		lasts := d.w.Now.Sub(w.Since.Time) >= StallGrace
		reason, text, stalled, busy = w.Reason, w.Message, true, working && (!lasts || d.othersMove())
	case d.hasNodeWithoutMachine():
		reason, text, stalled, busy = reasonInvalid, "some nodes have no providerID, so their machines are unknown", true, working
	case working && w != nil:
		reason, text = w.Reason, w.Message
	case d.spec.Rollout.Cancel && todo > 0 && !working:
		reason, text, busy = reasonCancelled, "the rollout was cancelled; nodes stay as they are until spec.rollout.cancel is false", false
	case d.spec.Rollout.Paused && todo > 0 && !working:
		reason, text, busy = reasonPaused, "the rollout is paused; set spec.rollout.paused to false to continue", false
	case w != nil:
		reason, text = w.Reason, w.Message
	case working || todo > 0 || c.Obsolete > 0:
		reason, text = ReasonRollout, "nodes are being brought to the target"
	case c.AwaitingAnnotation+c.Pending > 0:
		reason, text = reasonJoining, "machines are joining"
	case d.addonsGate(s.Addons):
		reason, text = ReasonRollout, "control planes are at the target; CoreDNS and kube-proxy are being upgraded"
	case left > 0:
		reason, text, stalled, busy = reasonLeftAlone, "nodes that have no ScalingGroup are not at the target; the operator does not change them", true, false
	case onHold > 0:
		reason, text, ready, busy = reasonHeld, fmt.Sprintf("all other nodes are at the target; on hold: %d", onHold), true, false
	case kept > 0:
		reason, text, ready, busy = reasonKept, "control planes are at the target; workers are not replaced, because keepWorkers is set", true, false
	case len(d.w.Impostors) > 0:
		reason, text, ready, busy = reasonRejected, d.w.Impostors[0].Why()+"; all other nodes are at the target", true, false
	case d.addonsAre(s.Addons, addonsFailed), d.addonsAre(s.Addons, addonsUpgrading):
		reason, text, ready, busy = reasonAddons, "all nodes are at the target; CoreDNS and kube-proxy are not yet: "+s.Addons.Message, true, false
	default:
		reason, text, ready, busy = ReasonUpToDate, "all nodes are at the target", true, false
	}
	is := func(kind string, status bool, bytes int) metav1.Condition {
		return NewCondition(kind, status, d.w.Generation, reason, "%s", Truncate(text, bytes))
	}
	if w := s.Waiting; w != nil && next != "" && text == w.Message { // the next try comes last and is not truncated
		text = Truncate(text, 137-len(next)) + next
	}
	return []metav1.Condition{is(v1alpha1.ConditionReady, ready, 140), is(v1alpha1.ConditionReconciling, busy, 50), is(v1alpha1.ConditionStalled, stalled, 50)}
}

// TruncateMessage shortens an error's text for a condition.
func TruncateMessage(s string) string {
	const limit = 256
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}

// WaitingFor replaces all waits by w and returns it for the status. It keeps the time since
// which the status has the same wait.
func (d *Decision) WaitingFor(w Wait) *v1alpha1.Waiting {
	d.Waits, d.Actions = []Wait{w}, nil
	return d.waiting()
}
