package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
)

// nodeSettings gives Nodes the labels and taints that the list of machines has for them. The machine has no part in it.
// An annotation of the Node records what was set, so that settings that a later list lacks can be removed. Labels and
// taints of others stay.
type nodeSettings struct {
	client client.Client
	cloud  settingsLister
	log    *slog.Logger
	told   string // the error that was logged last
}

// settingsLister is a cloud whose owner sets labels and taints of Nodes.
type settingsLister interface {
	// NodeSettings returns them by the provider ID. The result counts also if there is an error.
	NodeSettings(ctx context.Context) (map[string]cloud.NodeSettings, error)
}

// settingsEvery is how often the list is read. A change of a Node starts a reconcile at once.
const settingsEvery = 10 * time.Second

func (r *nodeSettings) setup(mgr manager.Manager) error {
	all := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []ctrl.Request { return []ctrl.Request{named(allNodes)} })
	err := ctrl.NewControllerManagedBy(mgr).Named("nodesettings").
		Watches(&corev1.Node{}, all, builder.WithPredicates(predicate.Funcs{
			UpdateFunc: func(e event.UpdateEvent) bool {
				o, ok1 := e.ObjectOld.(*corev1.Node)
				n, ok2 := e.ObjectNew.(*corev1.Node)
				return ok1 && ok2 && (!maps.Equal(o.Labels, n.Labels) || !equality.Semantic.DeepEqual(o.Spec.Taints, n.Spec.Taints) ||
					o.Annotations[v1alpha1.AnnotationSettings] != n.Annotations[v1alpha1.AnnotationSettings] || o.Spec.ProviderID != n.Spec.ProviderID)
			},
			DeleteFunc: func(event.DeleteEvent) bool { return false },
		})).
		Complete(r)
	if err != nil {
		return fmt.Errorf("add controller of labels and taints: %w", err)
	}
	return nil
}

// allNodes is the only request of the controller.
const allNodes = "nodes"

// Reconcile implements reconcile.Reconciler.
func (r *nodeSettings) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	list, err := r.cloud.NodeSettings(ctx)
	if err != nil && err.Error() != r.told {
		r.log.Warn("labels and taints of machines not read", "err", err)
	}
	if r.told = ""; err != nil {
		r.told = err.Error()
	}
	var nodes corev1.NodeList
	if err := r.client.List(ctx, &nodes); err != nil {
		return ctrl.Result{}, fmt.Errorf("list Nodes: %w", err)
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		want, ok := list[n.Spec.ProviderID]
		if !ok || want.Name != n.Name {
			continue // the list does not describe this machine
		}
		after := n.DeepCopy()
		if !applySettings(after, want) {
			continue
		}
		if err := r.client.Patch(ctx, after, client.MergeFromWithOptions(n, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
			return ctrl.Result{}, fmt.Errorf("set labels and taints of Node %s: %w", n.Name, err)
		}
		r.log.Info("labels and taints of node set", "node", n.Name, "record", after.Annotations[v1alpha1.AnnotationSettings])
	}
	return ctrl.Result{RequeueAfter: settingsEvery}, nil
}

// settingsRecord is the content of the annotation.
type settingsRecord struct {
	Labels map[string]string `json:"labels,omitempty"`
	Taints []cloud.Taint     `json:"taints,omitempty"`
}

// applySettings changes n to what the list has for it, and reports whether that differs from before. A label or taint that
// was there already with the same value is somebody else's, and is not recorded.
func applySettings(n *corev1.Node, want cloud.NodeSettings) (changed bool) {
	var was, now settingsRecord
	text := n.Annotations[v1alpha1.AnnotationSettings]
	_ = json.Unmarshal([]byte(text), &was) // only the operator writes it; a damaged one takes nothing away
	changed = now.labels(n, want.Labels, was.Labels)
	changed = now.taints(n, want.Taints, was.Taints) || changed
	next := ""
	if len(now.Labels)+len(now.Taints) > 0 {
		b, err := json.Marshal(now)
		if err != nil {
			return false // without a record nothing is set
		}
		next = string(b)
	}
	switch next {
	case text:
		return changed
	case "":
		delete(n.Annotations, v1alpha1.AnnotationSettings)
	default:
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationSettings, next)
	}
	return true
}

func (now *settingsRecord) labels(n *corev1.Node, want, was map[string]string) (changed bool) {
	for k, v := range was {
		if _, listed := want[k]; !listed && n.Labels[k] == v {
			delete(n.Labels, k)
			changed = true
		}
	}
	now.Labels = map[string]string{}
	for k, v := range want {
		have, ok := n.Labels[k]
		if !ok || have != v {
			metav1.SetMetaDataLabel(&n.ObjectMeta, k, v)
			changed = true
		} else if _, ours := was[k]; !ours {
			continue
		}
		now.Labels[k] = v
	}
	return changed
}

func (now *settingsRecord) taints(n *corev1.Node, want, was []cloud.Taint) (changed bool) {
	in := func(list []cloud.Taint, t cloud.Taint) bool {
		return slices.ContainsFunc(list, func(o cloud.Taint) bool { return o.Key == t.Key && o.Effect == t.Effect })
	}
	for _, t := range was {
		if k := indexTaint(n, t); !in(want, t) && k >= 0 && n.Spec.Taints[k].Value == t.Value {
			n.Spec.Taints = slices.Delete(n.Spec.Taints, k, k+1)
			changed = true
		}
	}
	for _, t := range want {
		switch k := indexTaint(n, t); {
		case k < 0:
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: corev1.TaintEffect(t.Effect)})
			changed = true
		case n.Spec.Taints[k].Value != t.Value:
			n.Spec.Taints[k].Value, changed = t.Value, true
		case !in(was, t):
			continue
		}
		now.Taints = append(now.Taints, t)
	}
	return changed
}

// indexTaint returns the index of the Node's taint with the key and effect of t; -1: it has none.
func indexTaint(n *corev1.Node, t cloud.Taint) int {
	return slices.IndexFunc(n.Spec.Taints, func(o corev1.Taint) bool { return o.Key == t.Key && string(o.Effect) == t.Effect })
}
