package operator

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/readiness"
)

// configMaps is the store of the assignments of spares. It reads and writes without a cache.
type configMaps struct {
	client    client.Client
	reader    client.Reader
	namespace string
}

// Load implements [machines.Store].
func (s configMaps) Load(ctx context.Context, name string) (map[string]string, string, error) {
	var cm corev1.ConfigMap
	err := s.reader.Get(ctx, client.ObjectKey{Namespace: s.namespace, Name: name}, &cm)
	switch {
	case apierrors.IsNotFound(err):
		return nil, "", fmt.Errorf("read ConfigMap %s: %w", name, cloud.ErrNotFound)
	case err != nil:
		return nil, "", fmt.Errorf("read ConfigMap %s: %w: %w", name, cloud.ErrUnavailable, err)
	}
	return cm.Data, cm.ResourceVersion, nil
}

// Save implements [machines.Store].
func (s configMaps) Save(ctx context.Context, name string, data map[string]string, version string) error {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: name, ResourceVersion: version}, Data: data}
	err := s.client.Update(ctx, cm)
	switch {
	case apierrors.IsConflict(err):
		return fmt.Errorf("write ConfigMap %s: %w: %w", name, cloud.ErrConflict, err)
	case err != nil:
		return fmt.Errorf("write ConfigMap %s: %w: %w", name, cloud.ErrUnavailable, err)
	}
	return nil
}

// enrolledCloud is a cloud whose machines are enrolled, among them spares.
type enrolledCloud interface {
	Use(s machines.Store, now func() time.Time)
	Balance(ctx context.Context, nodes map[string]machines.NodeState) (machines.Balance, error)
}

// sizes keeps groups of enrolled machines at their size: it has spares assigned, and marks the Nodes of groups that are too
// large as obsolete. The rollout then removes these as it removes any node. A machine whose Node has not been Ready for
// long is given up when a spare can take its place.
type sizes struct {
	client client.Client
	cloud  enrolledCloud
	wake   func() // starts a round of the rollout
	log    *slog.Logger
	now    func() time.Time

	down map[string]time.Time // since when Nodes are not Ready, by UID and by our clock

	mu    sync.Mutex
	waits map[string]string // by group
}

// sizesEvery is how often groups are compared with their size. Events of Nodes start a comparison at once.
const sizesEvery = 5 * time.Second

// shortages returns sentences about groups that cannot get their size.
func (r *sizes) shortages() []string {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]string, 0, len(r.waits))
	for _, group := range slices.Sorted(maps.Keys(r.waits)) {
		out = append(out, r.waits[group])
	}
	return out
}

func (r *sizes) setup(mgr manager.Manager) error {
	all := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []ctrl.Request { return []ctrl.Request{named(allNodes)} })
	err := ctrl.NewControllerManagedBy(mgr).Named("sizes").
		Watches(&corev1.Node{}, all, builder.WithPredicates(predicate.Funcs{
			UpdateFunc: func(e event.UpdateEvent) bool {
				o, ok1 := e.ObjectOld.(*corev1.Node)
				n, ok2 := e.ObjectNew.(*corev1.Node)
				return ok1 && ok2 && readiness.Node(o) != readiness.Node(n)
			},
		})).
		Complete(r)
	if err != nil {
		return fmt.Errorf("add controller of the sizes of groups: %w", err)
	}
	return nil
}

// Reconcile implements reconcile.Reconciler.
func (r *sizes) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	var nodes corev1.NodeList
	var pending v1alpha1.PendingNodeList
	if err := r.client.List(ctx, &nodes); err != nil {
		return ctrl.Result{}, fmt.Errorf("list Nodes: %w", err)
	}
	if err := r.client.List(ctx, &pending); err != nil {
		return ctrl.Result{}, fmt.Errorf("list PendingNodes: %w", err)
	}
	b, err := r.cloud.Balance(ctx, r.states(nodes.Items, pending.Items))
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("compare groups with their sizes: %w", err)
	}
	for _, name := range b.Assigned {
		r.log.Info("spare assigned", "machine", name)
	}
	for _, name := range b.Lost {
		r.log.Warn("machine given up", "machine", name, "reason", "its Node was not Ready for long, and a spare takes its place")
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if !slices.Contains(b.Leave, n.Name) {
			continue
		}
		after := n.DeepCopy()
		metav1.SetMetaDataAnnotation(&after.ObjectMeta, v1alpha1.AnnotationObsolete, "true")
		if err := r.client.Patch(ctx, after, client.MergeFromWithOptions(n, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
			return ctrl.Result{}, fmt.Errorf("mark Node %s as obsolete: %w", n.Name, err)
		}
		r.log.Info("node marked as obsolete", "node", n.Name, "reason", "its group is larger than its size")
	}
	r.mu.Lock()
	changed := !maps.Equal(r.waits, b.Waits)
	for group, text := range b.Waits {
		if r.waits[group] != text {
			r.log.Warn("group waits for a machine", "group", group, "reason", text)
		}
	}
	r.waits = b.Waits
	r.mu.Unlock()
	if changed || len(b.Assigned)+len(b.Lost) > 0 {
		r.wake()
	}
	return ctrl.Result{RequeueAfter: sizesEvery}, nil
}

// states returns the states of Nodes by name.
func (r *sizes) states(nodes []corev1.Node, pending []v1alpha1.PendingNode) map[string]machines.NodeState {
	now, down, out := r.now(), map[string]time.Time{}, make(map[string]machines.NodeState, len(nodes))
	for i := range nodes {
		n := &nodes[i]
		s := machines.NodeState{Machine: keyOf(n), Ready: readiness.Node(n), Kept: n.Spec.Unschedulable, Leaves: n.Annotations[v1alpha1.AnnotationObsolete] == "true"}
		if !s.Ready {
			key := string(n.UID)
			if since, ok := r.down[key]; ok {
				down[key] = since
			} else {
				down[key] = now
			}
			s.Since = now.Sub(down[key])
		}
		for k := range pending {
			p := &pending[k].Spec
			if p.NodeName != n.Name {
				continue
			}
			// The record of a machine that joins does not end before its Node is Ready.
			s.Kept = s.Kept || p.Goal == v1alpha1.UpgradeGoal
			s.Leaves = s.Leaves || p.Goal == v1alpha1.LeaveGoal
		}
		out[n.Name] = s
	}
	r.down = down
	return out
}
