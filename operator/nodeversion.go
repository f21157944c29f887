package operator

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"constellation/operator/api/v1alpha1"
)

// nodeVersions keeps the status of the NodeVersion: observe, assess, report.
type nodeVersions struct {
	client client.Client
	events events.EventRecorder
	gauges *gauges
	log    *slog.Logger
}

func (r *nodeVersions) setup(mgr manager.Manager) error {
	it := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []ctrl.Request {
		return []ctrl.Request{named(v1alpha1.NodeVersionName)}
	})
	err := ctrl.NewControllerManagedBy(mgr).Named("nodeversion").
		For(&v1alpha1.NodeVersion{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Node{}, it, builder.WithPredicates(nodeMatters())).
		Watches(&v1alpha1.ScalingGroup{}, it).
		Watches(&v1alpha1.PendingNode{}, it).
		Watches(&v1alpha1.JoiningNode{}, it, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Complete(r)
	if err != nil {
		return fmt.Errorf("add controller of NodeVersion: %w", err)
	}
	return nil
}

// nodeMatters lets through what assess looks at; heartbeats are most of the rest.
func nodeMatters() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		o, ok1 := e.ObjectOld.(*corev1.Node)
		n, ok2 := e.ObjectNew.(*corev1.Node)
		return ok1 && ok2 && (ready(o) != ready(n) || o.Spec.ProviderID != n.Spec.ProviderID || roleOf(o) != roleOf(n) ||
			o.Status.NodeInfo.KubeletVersion != n.Status.NodeInfo.KubeletVersion || !maps.Equal(o.Annotations, n.Annotations))
	}}
}

// staleView is how long the cache is given to catch up.
const staleView = 100 * time.Millisecond

// Reconcile implements reconcile.Reconciler.
func (r *nodeVersions) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var nv v1alpha1.NodeVersion
	if err := r.client.Get(ctx, req.NamespacedName, &nv); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	w, err := r.observe(ctx)
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("observe cluster: %w", err)
	}
	changed := nv.DeepCopy()
	changed.Status = assess(nv.Spec, nv.Generation, nv.Status, w, time.Now())
	r.gauges.set(changed.Status)
	if equality.Semantic.DeepEqual(changed.Status, nv.Status) {
		return ctrl.Result{}, nil
	}
	// What joining machines get must not be overwritten from a stale view.
	err = r.client.Status().Patch(ctx, changed, client.MergeFromWithOptions(&nv, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: staleView}, nil // the cache is behind our own last write
	}
	if err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(fmt.Errorf("report on NodeVersion: %w", err))
	}
	r.tell(&nv, changed)
	return ctrl.Result{}, nil
}

// tell logs and records what has changed for people.
func (r *nodeVersions) tell(before, after *v1alpha1.NodeVersion) {
	if j := after.Status.JoinComponents; j != before.Status.JoinComponents {
		r.log.Info("components of joining machines published", "control_plane", j.ControlPlane, "worker", j.Worker)
	}
	was, is := readyCondition(before.Status), readyCondition(after.Status)
	if was.Reason == is.Reason {
		return
	}
	n := after.Status.Nodes
	r.log.Info("node versions assessed", "reason", is.Reason, "nodes", n.Total, "up_to_date", n.UpToDate, "outdated", n.Outdated, "pending", n.Pending)
	kind := corev1.EventTypeNormal
	if is.Status != metav1.ConditionTrue && is.Reason != reasonJoining {
		kind = corev1.EventTypeWarning
	}
	r.events.Eventf(after, nil, kind, is.Reason, "Assess", "%s", is.Message)
}

func readyCondition(s v1alpha1.NodeVersionStatus) metav1.Condition {
	for _, c := range s.Conditions {
		if c.Type == v1alpha1.ConditionReady {
			return c
		}
	}
	return metav1.Condition{}
}

func (r *nodeVersions) observe(ctx context.Context) (world, error) {
	var (
		w       world
		nodes   corev1.NodeList
		groups  v1alpha1.ScalingGroupList
		pending v1alpha1.PendingNodeList
		joining v1alpha1.JoiningNodeList
	)
	for _, l := range []client.ObjectList{&nodes, &groups, &pending, &joining} {
		if err := r.client.List(ctx, l); err != nil {
			return w, err
		}
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		w.nodes = append(w.nodes, node{
			name: n.Name, role: roleOf(n), ready: ready(n), providerID: n.Spec.ProviderID, kubelet: n.Status.NodeInfo.KubeletVersion,
			image: n.Annotations[v1alpha1.AnnotationImage], components: n.Annotations[v1alpha1.AnnotationComponents],
			group: n.Annotations[v1alpha1.AnnotationGroup], donor: n.Annotations[v1alpha1.AnnotationDonor],
			heir: n.Annotations[v1alpha1.AnnotationHeir], obsolete: n.Annotations[v1alpha1.AnnotationObsolete] == "true",
		})
	}
	for i := range groups.Items {
		g := &groups.Items[i]
		w.groups = append(w.groups, group{name: g.Name, id: g.Spec.GroupID, role: g.Spec.Role, image: g.Status.ImageReference})
	}
	for i := range pending.Items {
		p := &pending.Items[i]
		w.pending = append(w.pending, pendingMachine{kind: "PendingNode", name: p.Name, node: p.Spec.NodeName, ready: p.Spec.Goal == v1alpha1.JoinGoal && p.Status.CSPState == "Ready"})
	}
	for i := range joining.Items {
		w.pending = append(w.pending, pendingMachine{kind: "JoiningNode", name: joining.Items[i].Name, node: joining.Items[i].Spec.Name})
	}
	return w, nil
}
