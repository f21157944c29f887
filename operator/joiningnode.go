package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
	"constellation/operator/readiness"
)

// joiningNodes copies the record of a machine's ticket (JoiningNode) to annotations of its Node, and
// then deletes the record. A record whose machine never registers is deleted at its deadline. If
// the Node exists, the record is kept until the Node is annotated, even if the cloud does not
// answer for long.
type joiningNodes struct {
	client client.Client
	cloud  cloudAPI
	events events.EventRecorder
	log    *slog.Logger
	now    func() time.Time
	clocks decision.FirstSeen
}

func (r *joiningNodes) setup(mgr manager.Manager) error {
	err := ctrl.NewControllerManagedBy(mgr).Named("joiningnode").
		For(&v1alpha1.JoiningNode{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		// A Node has the same name as its record.
		Watches(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []ctrl.Request {
			return []ctrl.Request{named(o.GetName())}
		}), builder.WithPredicates(nodeAppears())).
		WithOptions(controller.Options{MaxConcurrentReconciles: joiners}).
		Complete(r)
	if err != nil {
		return fmt.Errorf("add controller of JoiningNode: %w", err)
	}
	return nil
}

// joiners is the number of records processed concurrently: machines that were created together join
// together.
const joiners = writers

// nodeAppears passes events after which a Node may be annotated, and drops heartbeats.
func nodeAppears() predicate.Predicate {
	return predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool {
			o, ok1 := e.ObjectOld.(*corev1.Node)
			n, ok2 := e.ObjectNew.(*corev1.Node)
			return ok1 && ok2 && o.Spec.ProviderID != n.Spec.ProviderID
		},
		DeleteFunc:  func(event.DeleteEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
	}
}

// Reconcile implements reconcile.Reconciler.
func (r *joiningNodes) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var jn v1alpha1.JoiningNode
	if err := r.client.Get(ctx, req.NamespacedName, &jn); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if jn.DeletionTimestamp != nil {
		return ctrl.Result{}, nil
	}
	var node corev1.Node
	err := r.client.Get(ctx, client.ObjectKey{Name: jn.Spec.Name}, &node)
	if apierrors.IsNotFound(err) {
		return r.absent(ctx, &jn)
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("read Node %s: %w", jn.Spec.Name, err)
	}
	wait, err := r.annotate(ctx, &jn, &node)
	if err != nil {
		if w := r.report(ctx, &jn, "CloudUnavailable", err.Error()); w != nil {
			err = errors.Join(err, w)
		}
		return ctrl.Result{}, err // retried with backoff
	}
	if wait != nil {
		return ctrl.Result{RequeueAfter: retryUnknown}, r.report(ctx, &jn, wait.reason, wait.message)
	}
	if err := r.remove(ctx, &jn); err != nil {
		return ctrl.Result{}, err
	}
	r.log.Info("node joined", "node", node.Name, "components", jn.Spec.ComponentsReference, "control_plane", jn.Spec.IsControlPlane)
	return ctrl.Result{}, nil
}

// retryUnknown is the retry interval for a Node that contradicts its record, or the cloud.
const retryUnknown = 30 * time.Second

// absent waits for a machine that has not registered yet, until its deadline.
func (r *joiningNodes) absent(ctx context.Context, jn *v1alpha1.JoiningNode) (ctrl.Result, error) {
	if jn.Spec.Deadline == nil {
		return ctrl.Result{}, nil // the event of the new Node starts the next reconcile
	}
	// The join service wrote the deadline by its clock. By our clock the machine gets the same duration.
	given := jn.Spec.Deadline.Sub(jn.CreationTimestamp.Time)
	over := r.clocks.Until(string(jn.UID)+jn.Spec.Deadline.String(), jn.Spec.Deadline.Time, r.now(), given)
	if left := over.Sub(r.now()); left > 0 {
		return ctrl.Result{RequeueAfter: left + time.Second}, nil
	}
	if err := r.remove(ctx, jn); err != nil {
		return ctrl.Result{}, err
	}
	r.events.Eventf(jn, nil, corev1.EventTypeWarning, "JoinExpired", "Join", "machine %s was given a ticket and has not registered by %s", jn.Spec.Name, jn.Spec.Deadline.UTC().Format(time.RFC3339))
	r.log.Warn("joining node given up", "node", jn.Spec.Name, "deadline", jn.Spec.Deadline.Time, "provider_id", jn.Spec.ProviderID)
	return ctrl.Result{}, nil
}

// refusal is the reason why a Node cannot be annotated now.
type refusal struct{ reason, message string }

// annotate writes the image and components of the machine to its Node. A refusal means that the Node
// is not, or not yet, the machine of the record.
func (r *joiningNodes) annotate(ctx context.Context, jn *v1alpha1.JoiningNode, node *corev1.Node) (*refusal, error) {
	id, attested := keyOf(node), jn.Spec.ProviderID
	switch {
	case id == "":
		return &refusal{"NoProviderID", fmt.Sprintf("Node %s has no providerID, so its machine cannot be found", node.Name)}, nil
	case attested != "" && !cloud.SameMachine(id, attested):
		return &refusal{"OtherMachine", fmt.Sprintf("Node %s claims machine %s, the ticket was given to %s", node.Name, id, attested)}, nil
	}
	if _, incarnation := cloud.SplitKey(attested); incarnation != "" {
		id = attested
	}
	want := map[string]string{v1alpha1.AnnotationComponents: jn.Spec.ComponentsReference}
	instance, err := r.cloud.Instance(ctx, id)
	if errors.Is(err, cloud.ErrNotFound) && r.outlived(node, id) {
		instance, err = r.cloud.Instance(ctx, node.Spec.ProviderID)
	}
	switch {
	case errors.Is(err, cloud.ErrNotFound):
		return &refusal{"InstanceUnknown", fmt.Sprintf("the cloud does not know machine %s", id)}, r.patchAttested(ctx, jn, node, want)
	case err != nil:
		return nil, errors.Join(fmt.Errorf("find machine of Node %s: %w", node.Name, err), r.patchAttested(ctx, jn, node, want))
	case instance.Name != node.Name:
		return &refusal{"OtherMachine", fmt.Sprintf("Node %s claims machine %s, which the cloud calls %s", node.Name, id, instance.Name)}, nil
	}
	want[v1alpha1.AnnotationImage], want[v1alpha1.AnnotationGroup] = instance.Image, instance.Group
	if instance.Incarnation != "" {
		want[v1alpha1.AnnotationIncarnation] = instance.Incarnation
	}
	return nil, r.patch(ctx, node, want)
}

// outlived reports whether a Node cannot be that of the machine with this key, which the cloud does
// not find: it stays Ready longer than the Node of a deleted machine. The join service got an old
// list, and recorded the incarnation of an earlier machine.
func (r *joiningNodes) outlived(node *corev1.Node, key string) bool {
	missing := r.clocks.Since("missing "+string(node.UID)+key, r.now())
	return node.Spec.ProviderID != key && readiness.Node(node) && r.now().Sub(missing) > 2*time.Minute
}

// patchAttested annotates the installed image and components. If the join service has verified the
// machine, that needs no data of the cloud.
func (r *joiningNodes) patchAttested(ctx context.Context, jn *v1alpha1.JoiningNode, node *corev1.Node, want map[string]string) error {
	if jn.Spec.ProviderID == "" {
		return nil
	}
	return r.patch(ctx, node, want)
}

// patch sets annotations, if one differs. It requires the observed Node's UID, because a new Node of
// the same name is another machine.
func (r *joiningNodes) patch(ctx context.Context, node *corev1.Node, want map[string]string) error {
	annotations := map[string]string{}
	for k, v := range want {
		if node.Annotations[k] != v {
			annotations[k] = v
		}
	}
	if len(annotations) == 0 {
		return nil
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": node.UID, "annotations": annotations}})
	if err != nil {
		return fmt.Errorf("annotate Node %s: %w", node.Name, err)
	}
	changed := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node.Name}}
	if err := r.client.Patch(ctx, changed, client.RawPatch(types.MergePatchType, body)); err != nil {
		return fmt.Errorf("annotate Node %s: %w", node.Name, err)
	}
	return nil
}

// remove deletes the record if it is unchanged. A record that a new ticket has changed stays.
func (r *joiningNodes) remove(ctx context.Context, jn *v1alpha1.JoiningNode) error {
	err := r.client.Delete(ctx, jn, client.Preconditions{UID: &jn.UID, ResourceVersion: &jn.ResourceVersion})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete JoiningNode %s: %w", jn.Name, err)
	}
	return nil
}

// report writes once to the record's status why the record still exists.
func (r *joiningNodes) report(ctx context.Context, jn *v1alpha1.JoiningNode, reason, message string) error {
	changed := jn.DeepCopy()
	decision.SetCondition(&changed.Status.Conditions, decision.NewCondition(v1alpha1.ConditionReady, false, jn.Generation, reason, "%s", message), metav1.Now())
	if equality.Semantic.DeepEqual(changed.Status, jn.Status) {
		return nil
	}
	if err := r.client.Status().Patch(ctx, changed, client.MergeFrom(jn)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("report on JoiningNode %s: %w", jn.Name, err))
	}
	r.events.Eventf(changed, nil, corev1.EventTypeWarning, reason, "Annotate", "%s", message)
	r.log.Warn("joining node waits", "node", jn.Spec.Name, "reason", reason, "message", message)
	return nil
}
