package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"constellation/operator/api/v1alpha1"
)

// The ConfigMap in which scripts find the target of Kubernetes: its version and the
// name of its components' ConfigMap, as in the spec of the NodeVersion. The operator writes it and
// never uses its content: changes by people are overwritten.
const (
	mirrorNamespace = "kube-system"
	mirrorName      = "k8s-version"
	mirrorVersion   = "k8s-version"
	mirrorReference = "components"
)

// mirrorCheck is the interval of checks of the mirror without a change of the target.
const mirrorCheck = 10 * time.Minute

// mirror keeps that ConfigMap equal to the target. It reads the ConfigMap first and the target
// afterwards, and its write fails if the ConfigMap has changed since. So a former leader cannot
// overwrite a new target with an old one.
type mirror struct {
	client client.Client
	// fresh reads from the API server, not from the cache.
	fresh client.Reader
	log   *slog.Logger
}

func (r *mirror) setup(mgr manager.Manager) error {
	err := ctrl.NewControllerManagedBy(mgr).Named("mirror").
		For(&v1alpha1.NodeVersion{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Complete(r)
	if err != nil {
		return fmt.Errorf("add mirror of NodeVersion: %w", err)
	}
	return nil
}

// Reconcile implements reconcile.Reconciler.
func (r *mirror) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var nv v1alpha1.NodeVersion
	if err := r.client.Get(ctx, req.NamespacedName, &nv); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	m, err := r.read(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	if mirrors(m, nv.Spec) {
		return ctrl.Result{RequeueAfter: mirrorCheck}, nil
	}
	if err := r.fresh.Get(ctx, req.NamespacedName, &nv); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(fmt.Errorf("read NodeVersion: %w", err))
	}
	if mirrors(m, nv.Spec) {
		return ctrl.Result{RequeueAfter: mirrorCheck}, nil
	}
	err = r.write(ctx, m, nv.Spec)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return ctrl.Result{RequeueAfter: staleView}, nil // another writer was faster
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	r.log.Info("target mirrored", "configmap", mirrorName, "kubernetes", nv.Spec.KubernetesClusterVersion, "components", nv.Spec.KubernetesComponentsReference)
	return ctrl.Result{RequeueAfter: mirrorCheck}, nil
}

func mirrors(m *corev1.ConfigMap, s v1alpha1.NodeVersionSpec) bool {
	return m.Data[mirrorVersion] == s.KubernetesClusterVersion && m.Data[mirrorReference] == s.KubernetesComponentsReference
}

// read returns the ConfigMap, and creates it if it does not exist. The creation sets no field that
// another writer could have set, so it needs no condition.
func (r *mirror) read(ctx context.Context) (*corev1.ConfigMap, error) {
	m := &corev1.ConfigMap{}
	err := r.fresh.Get(ctx, client.ObjectKey{Namespace: mirrorNamespace, Name: mirrorName}, m)
	if err == nil || !apierrors.IsNotFound(err) {
		return m, wrap("read ConfigMap "+mirrorName, err)
	}
	// RBAC can restrict a creation to one name only with server-side apply.
	empty := applycorev1.ConfigMap(mirrorName, mirrorNamespace).WithLabels(map[string]string{"app.kubernetes.io/part-of": "constellation"})
	if err := r.client.Apply(ctx, empty, client.FieldOwner("constellation-operator-mirror")); err != nil {
		return nil, fmt.Errorf("create ConfigMap %s: %w", mirrorName, err)
	}
	err = r.fresh.Get(ctx, client.ObjectKey{Namespace: mirrorNamespace, Name: mirrorName}, m)
	return m, wrap("read ConfigMap "+mirrorName, err)
}

// write sets the two keys of the ConfigMap if it is unchanged, and keeps all others.
func (r *mirror) write(ctx context.Context, seen *corev1.ConfigMap, s v1alpha1.NodeVersionSpec) error {
	body, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": seen.ResourceVersion},
		"data":     map[string]string{mirrorVersion: s.KubernetesClusterVersion, mirrorReference: s.KubernetesComponentsReference},
	})
	if err != nil {
		return fmt.Errorf("write ConfigMap %s: %w", mirrorName, err)
	}
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: mirrorNamespace, Name: mirrorName}}
	return wrap("write ConfigMap "+mirrorName, r.client.Patch(ctx, m, client.RawPatch(types.MergePatchType, body)))
}

// wrap adds the failed operation to err; nil stays nil.
func wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, err)
}
