package operator

import (
	"context"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
	"constellation/operator/nodelock"
)

// logMessage is a log message that is chosen by a variable.
type logMessage string

// effect is how actions of one kind are carried out: a write or a start.
type effect interface {
	// begin begins the action and does not block.
	begin(r *nodeVersions, b *batch, a decision.Action)
}

// write is an effect that is one change of an object in the API server.
type write struct {
	log logMessage // logged once the change has succeeded
	// send sends the change. did is false if nothing had to change.
	send func(r *nodeVersions, ctx context.Context, o *observed, a decision.Action) (did bool, err error)
	// event records events after a change; nil: there are none.
	event func(r *nodeVersions, o *observed, a decision.Action)
}

func (e write) begin(r *nodeVersions, b *batch, a decision.Action) {
	if r.mayWrite(b, a) {
		r.put(b.o, a, e)
	}
}

// start is an effect that starts long work, or adds the action to the batch of the round. It logs
// by itself.
type start func(r *nodeVersions, b *batch, a decision.Action)

func (e start) begin(r *nodeVersions, b *batch, a decision.Action) { e(r, b, a) }

// effects has one effect for each kind of action.
var effects = [...]effect{
	decision.PauseAutoscaler: write{log: "autoscaler paused", send: func(r *nodeVersions, ctx context.Context, _ *observed, _ decision.Action) (bool, error) {
		return true, r.scaling.pause(ctx)
	}},
	decision.ResumeAutoscaler: write{log: "autoscaler resumed", send: func(r *nodeVersions, ctx context.Context, _ *observed, _ decision.Action) (bool, error) {
		return true, r.scaling.resume(ctx)
	}},
	decision.SetGroupImage:    start((*nodeVersions).setGroupImage),
	decision.RecordIntent:     write{log: "pending node created", send: (*nodeVersions).createPending, event: (*nodeVersions).recordStart},
	decision.BindIntent:       write{log: "pending node bound", send: (*nodeVersions).bindPending, event: (*nodeVersions).recordBound},
	decision.ClearIntent:      write{log: "pending node deleted", send: (*nodeVersions).deletePending},
	decision.CreateInstance:   start((*nodeVersions).addCreation),
	decision.AdoptReplacement: write{log: "replacement node adopted", send: (*nodeVersions).adoptReplacement, event: (*nodeVersions).recordAdopted},
	decision.CordonNode:       write{log: "node cordoned", send: (*nodeVersions).cordon, event: (*nodeVersions).recordCordoned},
	decision.LendNode:         write{log: "node lent to plan", send: (*nodeVersions).lend, event: (*nodeVersions).recordLent},
	decision.ReleaseNode:      write{log: "node released", send: (*nodeVersions).release, event: (*nodeVersions).recordReleased},
	decision.PostponeNode:     write{log: "node postponed", send: (*nodeVersions).postpone, event: (*nodeVersions).recordPostponed},
	decision.DrainNode:        start(func(_ *nodeVersions, b *batch, a decision.Action) { b.draining[a.Node] = true }),
	decision.YieldLease:       start((*nodeVersions).yieldLease),
	decision.MoveLeader:       start((*nodeVersions).moveLeader),
	decision.RemoveMember:     start((*nodeVersions).removeMember),
	decision.DeleteInstance:   start((*nodeVersions).addDeletion),
	decision.DeleteNode:       write{log: "node deleted", send: (*nodeVersions).deleteNode, event: (*nodeVersions).recordDeleted},
	decision.StartUpgrade:     start(func(r *nodeVersions, _ *batch, a decision.Action) { r.follow(a) }),
	decision.UpgradeNode:      start((*nodeVersions).upgradeFresh),
	decision.NoteComponents:   write{log: "components of node recorded", send: (*nodeVersions).noteComponents, event: (*nodeVersions).recordUpgraded},
	decision.MarkInPlace:      write{log: "in-place label changed", send: (*nodeVersions).labelInPlace},
	decision.MarkRetry:        write{log: "retry request changed", send: (*nodeVersions).markRetry, event: (*nodeVersions).endRetryPause},
	decision.UpgradeAddons:    start(func(r *nodeVersions, _ *batch, a decision.Action) { r.upgradeAddons(a) }),
	decision.PublishComponents: start(func(_ *nodeVersions, b *batch, a decision.Action) {
		join := a.JoinComponents
		b.publish = &join
	}),
}

// batch collects the actions of a round that are carried out together.
type batch struct {
	o        *observed
	publish  *v1alpha1.JoinComponents
	creates  map[string][]string // tokens by group
	deletes  []string            // IDs of machines
	draining map[string]bool     // names of nodes
	// begins says that a replacement begins in this round, and startsDelayed that one waits
	// for the rate limit of replacements.
	begins, startsDelayed bool
}

// mayWrite reports whether a write may start now.
func (r *nodeVersions) mayWrite(b *batch, a decision.Action) bool {
	switch a.Kind {
	case decision.BindIntent:
		// No control plane is removed while the list of etcd members is stale.
		return r.host == nil || !b.o.controlPlane(a.Intent.Node) || r.hostView.fresh(r.now(), actMembers)
	case decision.RecordIntent:
		b.begins = true
		if !b.o.begins {
			return false // free surge slots are known only after pending writes have taken theirs
		}
		if !r.starts.AllowN(r.now(), 1) {
			b.startsDelayed = true
			return false
		}
	default:
	}
	return true
}

func (r *nodeVersions) setGroupImage(_ *batch, a decision.Action) {
	r.runAction(a, "image of "+a.Group, "image of scaling group set", func(ctx context.Context) error {
		err := r.fleet.SetGroupImage(ctx, a.Group, a.Image)
		if err == nil {
			r.regrouped()
		}
		return err
	})
}

func (r *nodeVersions) addCreation(b *batch, a decision.Action) {
	if p := b.o.pending[a.Intent.Name]; p != nil && p.Spec.Goal == v1alpha1.JoinGoal && p.Spec.Token == a.Intent.Token {
		b.creates[p.Spec.GroupID] = append(b.creates[p.Spec.GroupID], a.Intent.Token)
	}
}

// addDeletion refuses a machine that no PendingNode is bound to, and a control plane's machine
// while the list of etcd members is stale.
func (r *nodeVersions) addDeletion(b *batch, a decision.Action) {
	if !r.fleet.goes(a.Machine) && b.o.bound(a.Machine) && (!b.o.controlPlane(a.Node) || r.hostView.fresh(r.now(), actMembers)) {
		b.deletes = append(b.deletes, a.Machine)
	}
}

func (r *nodeVersions) yieldLease(_ *batch, a decision.Action) {
	r.runAction(a, "leave", "leader election lease yielded", r.leave)
}

func (r *nodeVersions) moveLeader(_ *batch, a decision.Action) {
	r.changeMembers(a, "etcd leader moved", func(ctx context.Context) error { return r.host.MoveLeader(ctx, a.Node, a.Replacement) })
}

func (r *nodeVersions) removeMember(_ *batch, a decision.Action) {
	r.changeMembers(a, "etcd member removed", func(ctx context.Context) error { return r.host.RemoveMember(ctx, a.Node, a.Address, a.MinVoters) })
}

// upgradeFresh upgrades a node in place. A control plane requires a fresh list of etcd members.
func (r *nodeVersions) upgradeFresh(b *batch, a decision.Action) {
	if !b.o.controlPlane(a.Node) || r.hostView.fresh(r.now(), actMembers) {
		r.upgradeNode(b.o, a)
	}
}

// changeMembers changes the members of etcd, one change at a time, and never from a stale list.
func (r *nodeVersions) changeMembers(a decision.Action, log logMessage, change func(context.Context) error) {
	if r.host == nil || !r.hostView.fresh(r.now(), actMembers) {
		return
	}
	r.runAction(a, "etcd", log, func(ctx context.Context) error {
		defer r.hostView.outdate()
		return change(ctx)
	})
}

// runAction runs an action that may take long beside the rounds, and logs its success.
func (r *nodeVersions) runAction(a decision.Action, key string, log logMessage, do func(context.Context) error) {
	r.try(key, func(ctx context.Context) error {
		r.point("before", a.Kind)
		err := do(ctx)
		r.counters.action(a.Kind, err)
		if err == nil {
			r.point("after", a.Kind)
			r.log.Info(string(log), "action", a.String())
		}
		return err
	})
}

func (r *nodeVersions) createPending(ctx context.Context, _ *observed, a decision.Action) (bool, error) {
	p := a.Intent.PendingNode()
	err := r.client.Create(ctx, p)
	if apierrors.IsAlreadyExists(err) {
		return false, nil
	}
	if err == nil {
		r.view.wrote(kindPending, p)
	}
	return true, err
}

func (r *nodeVersions) bindPending(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	return r.patchPending(ctx, o.pending[a.Intent.Name], func(p *v1alpha1.PendingNode) bool { return a.Intent.Bind(p, r.now()) })
}

func (r *nodeVersions) deletePending(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	p := o.pending[a.Intent.Name]
	if p == nil || p.Spec.Goal != a.Intent.Goal || p.Spec.Token != a.Intent.Token {
		return false, nil
	}
	err := r.client.Delete(ctx, p.DeepCopy(), client.Preconditions{UID: &p.UID, ResourceVersion: &p.ResourceVersion})
	if client.IgnoreNotFound(err) == nil {
		r.view.deleted(kindPending, p)
	}
	return err == nil, client.IgnoreNotFound(err)
}

func (r *nodeVersions) adoptReplacement(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	return r.adopt(ctx, o.nodes[a.Node], o.nodes[a.OldNode], a.OldNode)
}

func (r *nodeVersions) cordon(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
		if !n.Spec.Unschedulable {
			n.Spec.Unschedulable = true
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationCordoned, r.now().UTC().Format(time.RFC3339))
		}
		if a.Replacement != "" {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationHeir, a.Replacement)
		}
		return true
	})
}

func (r *nodeVersions) release(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
		delete(n.Annotations, v1alpha1.AnnotationHeir)
		delete(n.Annotations, nodelock.AnnotationLent)
		if _, ours := n.Annotations[v1alpha1.AnnotationCordoned]; ours && a.Uncordon {
			delete(n.Annotations, v1alpha1.AnnotationCordoned)
			// A Plan that failed on the node keeps it cordoned.
			n.Spec.Unschedulable = n.Annotations[nodelock.AnnotationCordonedForPlan] != ""
		}
		return true
	})
}

func (r *nodeVersions) lend(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, nodelock.AnnotationLent, nodelock.Note(a.Plan, r.now()))
		return true
	})
}

func (r *nodeVersions) labelInPlace(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
		if a.Uncordon {
			delete(n.Labels, v1alpha1.LabelInPlace)
		} else {
			metav1.SetMetaDataLabel(&n.ObjectMeta, v1alpha1.LabelInPlace, "true")
		}
		return true
	})
}

func (r *nodeVersions) noteComponents(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
		if !cloud.SameMachine(keyOf(n), a.Machine) {
			return false
		}
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationComponents, a.Components)
		return true
	})
}

func (r *nodeVersions) markRetry(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
		delete(n.Annotations, v1alpha1.AnnotationRetry)
		if a.RetryMark != "" {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationRetry, a.RetryMark)
		}
		return true
	})
}

func (r *nodeVersions) postpone(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationPostponed, a.Until.UTC().Format(time.RFC3339))
		return true
	})
}

func (r *nodeVersions) deleteNode(ctx context.Context, o *observed, a decision.Action) (bool, error) {
	n := o.nodes[a.Node]
	if n == nil || !cloud.SameMachine(keyOf(n), a.Machine) {
		return false, nil
	}
	err := r.client.Delete(ctx, n.DeepCopy(), client.Preconditions{UID: &n.UID})
	if client.IgnoreNotFound(err) == nil {
		r.view.deleted(kindNode, n)
	}
	return err == nil, client.IgnoreNotFound(err)
}

// logDone logs an action of the API server that has succeeded.
func (r *nodeVersions) logDone(a decision.Action, message logMessage) {
	args := []any{"action", a.Kind.String()}
	tracked, leaves := a.Intent.Machine, ""
	if a.Intent.Goal == v1alpha1.LeaveGoal {
		tracked, leaves = "", a.Intent.Machine
	}
	for _, f := range []struct{ key, value string }{
		{"node", a.Node},
		{"heir", a.Replacement},
		{"donor", a.OldNode},
		{"machine", a.Machine},
		{"group", a.Group},
		{"image", a.Image},
		{"pending_node", a.Intent.Name},
		{"replaces", a.Intent.OldNode},
		{"tracks", tracked},
		{"leaves", leaves},
	} {
		if f.value != "" {
			args = append(args, f.key, f.value)
		}
	}
	r.log.Info(string(message), args...)
}

func (r *nodeVersions) recordStart(o *observed, a decision.Action) {
	if oldNode := o.nodes[a.Intent.OldNode]; oldNode != nil {
		r.event(oldNode, corev1.EventTypeNormal, "ReplacementBegins", "Replace", "a machine at the target is requested, as "+a.Intent.Name)
	}
	if n := o.nodes[a.Intent.Node]; n != nil && a.Intent.Goal == v1alpha1.UpgradeGoal {
		r.event(n, corev1.EventTypeNormal, "UpgradeScheduled", "Upgrade", "this node is drained and then upgraded in place, as "+a.Intent.Name)
	}
}

func (r *nodeVersions) recordUpgraded(o *observed, a decision.Action) {
	if n := o.nodes[a.Node]; n != nil {
		r.event(n, corev1.EventTypeNormal, "UpgradeCompleted", "Upgrade", "this node now runs Kubernetes "+n.Status.NodeInfo.KubeletVersion)
	}
}

func (r *nodeVersions) recordAdopted(o *observed, a decision.Action) {
	r.event(o.nodes[a.Node], corev1.EventTypeNormal, "Replaces", "Replace", "this node replaces "+a.OldNode)
}

func (r *nodeVersions) recordCordoned(o *observed, a decision.Action) {
	if a.Replacement != "" {
		r.event(o.nodes[a.Node], corev1.EventTypeNormal, "Cordoned", "Cordon", "this node is drained and replaced by "+a.Replacement)
	}
}

func (r *nodeVersions) recordLent(o *observed, a decision.Action) {
	r.event(o.nodes[a.Node], corev1.EventTypeNormal, "LentToPlan", "Upgrade", "the Plan "+a.Plan+" upgrades this node, too, while it is drained")
}

func (r *nodeVersions) recordReleased(o *observed, a decision.Action) {
	if a.Uncordon {
		r.event(o.nodes[a.Node], corev1.EventTypeNormal, "Uncordoned", "Cordon", "this node is kept and takes pods again")
	}
}

// endRetryPause ends the backoff of upgrades, because a retry request ignores the number of failures.
func (r *nodeVersions) endRetryPause(_ *observed, a decision.Action) {
	if a.RetryMark != "" {
		r.retries.hurry(upgradeOn + a.Node)
		r.retries.hurry(upgradeHere)
		r.retries.hurry(addonsKey)
	}
}

func (r *nodeVersions) recordPostponed(o *observed, a decision.Action) {
	r.event(o.nodes[a.Node], corev1.EventTypeWarning, "Postponed", "Replace", "the replacement of this node is postponed until "+a.Until.UTC().Format(time.RFC3339))
}

func (r *nodeVersions) recordBound(o *observed, a decision.Action) {
	if p := o.pending[a.Intent.Name]; p != nil {
		r.event(p, corev1.EventTypeNormal, "Leaves", "Bind", "the machine of "+a.Intent.Node+" leaves the cluster")
	}
	if n := o.nodes[a.Intent.Node]; n != nil && strings.HasPrefix(a.Intent.Name, decision.MachinePrefix) {
		r.event(n, corev1.EventTypeWarning, decision.ReasonNeverReady, "Delete", "the machine did not finish its join in time: machine and Node are deleted; a new machine can join in its place")
	}
}

func (r *nodeVersions) recordDeleted(o *observed, a decision.Action) {
	if n := o.nodes[a.Node]; n != nil {
		r.event(n, corev1.EventTypeNormal, "Deleted", "Delete", "its machine "+a.Machine+" is deleted or being deleted")
	}
}
