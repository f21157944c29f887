package operator

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"constellation/engine/cloud/notice"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/nodelock"
)

// graceOf is how many seconds the pods of a machine get to end, by the reason for which it stops. A preempted machine has 30 s
// from the announcement, of which the announcement and the evictions take some. Other machines have a minute or more.
var graceOf = map[notice.Reason]int64{notice.Preempted: 20, notice.HostTerminates: 45}

// disruptions cordons and drains each node whose machine the cloud will stop, as the agent of the machine has written to the
// node's condition. It uncordons the node when the announcement ends, and the machine was not stopped, or has booted again.
//
// A kubelet writes the condition of its own Node only, so a machine that lies has its own pods evicted, and no others.
// Evictions respect budgets. A machine that runs on during its announcement, because its host migrates it, is not drained.
//
// It is independent of rollouts, and of whether they are paused. It never creates or deletes a machine.
type disruptions struct {
	client client.Client
	events events.EventRecorder
	log    *slog.Logger
	now    func() time.Time
	drains *drainer // of its own: that of rollouts ends the drains that rollouts do not need

	mu   sync.Mutex
	told map[string]notice.Reason // by node: an event was recorded
}

// announcedOn returns what the cloud announces to the machine of a node; zero: nothing.
func announcedOn(n *corev1.Node) (r notice.Reason, text string) {
	for _, c := range n.Status.Conditions {
		if c.Type == notice.Condition && c.Status == corev1.ConditionTrue {
			return notice.Reason(c.Reason), c.Message
		}
	}
	return "", ""
}

func (r *disruptions) setup(mgr ctrl.Manager) error {
	concerned := predicate.NewPredicateFuncs(func(o client.Object) bool {
		n, ok := o.(*corev1.Node)
		if !ok {
			return false
		}
		reason, _ := announcedOn(n)
		return reason != "" || n.Annotations[v1alpha1.AnnotationDisrupted] != "" || r.knows(n.Name)
	})
	if err := ctrl.NewControllerManagedBy(mgr).Named("disruption").For(&corev1.Node{}, builder.WithPredicates(concerned)).Complete(r); err != nil {
		return fmt.Errorf("add controller of disruptions: %w", err)
	}
	return nil
}

func (r *disruptions) knows(node string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.told[node] != ""
}

// Reconcile implements reconcile.Reconciler.
func (r *disruptions) Reconcile(ctx context.Context, q ctrl.Request) (ctrl.Result, error) {
	var n corev1.Node
	if err := r.client.Get(ctx, q.NamespacedName, &n); err != nil {
		if !apierrors.IsNotFound(err) {
			return ctrl.Result{}, fmt.Errorf("read node %s: %w", q.Name, err)
		}
		r.forget(q.Name)
		return ctrl.Result{}, nil
	}
	reason, text := announcedOn(&n)
	if !reason.Stops() {
		r.record(&n, reason, text)
		r.keepOthers(n.Name)
		return ctrl.Result{}, r.release(ctx, &n)
	}
	if err := r.cordon(ctx, &n); err != nil {
		return ctrl.Result{}, err
	}
	r.record(&n, reason, text)
	r.drains.hurry(n.Name, graceOf[reason])
	return ctrl.Result{}, nil
}

// cordon cordons a node, unless it is cordoned.
func (r *disruptions) cordon(ctx context.Context, n *corev1.Node) error {
	if n.Spec.Unschedulable {
		return nil
	}
	next := n.DeepCopy()
	next.Spec.Unschedulable = true
	if next.Annotations == nil {
		next.Annotations = map[string]string{}
	}
	next.Annotations[v1alpha1.AnnotationDisrupted] = r.now().UTC().Format(time.RFC3339)
	if err := r.client.Patch(ctx, next, client.MergeFromWithOptions(n, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("cordon node %s: %w", n.Name, err)
	}
	r.log.Info("node cordoned", "node", n.Name, "reason", "disruption")
	return nil
}

// release uncordons a node that this controller cordoned. The cordon of a rollout or a Plan that began meanwhile stays.
func (r *disruptions) release(ctx context.Context, n *corev1.Node) error {
	if n.Annotations[v1alpha1.AnnotationDisrupted] == "" {
		return nil
	}
	next := n.DeepCopy()
	delete(next.Annotations, v1alpha1.AnnotationDisrupted)
	if _, rollout := n.Annotations[v1alpha1.AnnotationCordoned]; !rollout && n.Annotations[v1alpha1.AnnotationHeir] == "" && n.Annotations[nodelock.AnnotationCordonedForPlan] == "" {
		next.Spec.Unschedulable = false
	}
	if err := r.client.Patch(ctx, next, client.MergeFromWithOptions(n, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("uncordon node %s: %w", n.Name, err)
	}
	r.log.Info("node uncordoned", "node", n.Name, "reason", "disruption")
	return nil
}

// record records an event about each new announcement.
func (r *disruptions) record(n *corev1.Node, reason notice.Reason, text string) {
	r.mu.Lock()
	before := r.told[n.Name]
	if r.told == nil {
		r.told = map[string]notice.Reason{}
	}
	if r.told[n.Name] = reason; reason == "" {
		delete(r.told, n.Name)
	}
	r.mu.Unlock()
	if reason == before {
		return
	}
	kind := corev1.EventTypeNormal
	if reason.Stops() {
		kind = corev1.EventTypeWarning
	}
	if reason != "" {
		r.log.Warn("cloud announced a disruption", "node", n.Name, "reason", reason)
		r.events.Eventf(n, nil, kind, "CloudDisruption", "Drain", "%s", text)
	}
}

// keepOthers ends the drain of a node.
func (r *disruptions) keepOthers(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	keep := map[string]bool{}
	for name, reason := range r.told {
		keep[name] = name != node && reason.Stops()
	}
	r.drains.keep(keep)
}

// forget ends the work on a node that is gone.
func (r *disruptions) forget(node string) {
	r.mu.Lock()
	delete(r.told, node)
	r.mu.Unlock()
	r.keepOthers(node)
}
