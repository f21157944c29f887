package operator

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

const (
	// rotationPoll is the poll interval of a rotation. API servers read the key of their key service once a minute.
	rotationPoll = 5 * time.Second
	// reportsPoll is the poll interval until a first join service has reported.
	reportsPoll = time.Minute
	// rotationAgain is when a rewriting that failed is tried again.
	rotationAgain = 10 * time.Minute
	// migrationName begins the names of StorageVersionMigrations. The generation follows.
	migrationName = "constellation-secrets-"
	// joinConfig is the ConfigMap in kube-system for join services.
	joinConfig = "join-config"
)

// keyRotations rotates the key that encrypts Secrets in etcd after each upgrade of all nodes, without a console. It publishes the next
// generation in join-config, waits until each API server encrypts with it, and has the controller manager write all Secrets again
// (StorageVersionMigration, KEP-4192). It needs no right to read Secrets. Each step is recorded in join-config before the next one, so a
// new leader continues.
type keyRotations struct {
	client client.Client
	// fresh reads from the API server, not from the cache.
	fresh     client.Reader
	events    events.EventRecorder
	log       *slog.Logger
	now       func() time.Time
	namespace string // of join services

	waited string // for what, as last logged
}

func (r *keyRotations) setup(mgr manager.Manager) error {
	if err := ctrl.NewControllerManagedBy(mgr).Named("key-rotation").For(&v1alpha1.NodeVersion{}).Complete(r); err != nil {
		return fmt.Errorf("add rotation of the key of Secrets: %w", err)
	}
	return nil
}

// Reconcile implements reconcile.Reconciler.
func (r *keyRotations) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var nv v1alpha1.NodeVersion
	if err := r.client.Get(ctx, req.NamespacedName, &nv); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if ready := readyCondition(nv.Status); ready.Reason != decision.ReasonUpToDate || ready.ObservedGeneration != nv.Generation {
		return ctrl.Result{}, nil // its change comes here
	}
	config := &corev1.ConfigMap{}
	if err := r.fresh.Get(ctx, client.ObjectKey{Namespace: mirrorNamespace, Name: joinConfig}, config); err != nil {
		return ctrl.Result{}, wrap("read ConfigMap "+joinConfig, client.IgnoreNotFound(err))
	}
	k, err := kms.RotationOf(config.Data, config.Annotations)
	if err != nil {
		return ctrl.Result{}, err
	}
	if k.Target == targetOf(&nv) {
		if pending(k) {
			return r.complete(ctx, &nv, config, k)
		}
		return ctrl.Result{}, nil
	}
	return r.begin(ctx, &nv, config, k)
}

// targetOf identifies what the nodes run.
func targetOf(nv *v1alpha1.NodeVersion) string {
	s := nv.Spec
	h := sha256.Sum256([]byte(strings.Join([]string{s.Image, s.KubernetesComponentsReference, s.KubernetesClusterVersion}, "\n")))
	return hex.EncodeToString(h[:8])
}

// begin publishes the next generation after an upgrade. The first target that it sees is that of init, or of an upgrade which brought it.
func (r *keyRotations) begin(ctx context.Context, nv *v1alpha1.NodeVersion, config *corev1.ConfigMap, k kms.Rotation) (ctrl.Result, error) {
	used, _, err := r.used(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	if len(used) == 0 { // no API server encrypts, or none has reported yet
		return ctrl.Result{RequeueAfter: reportsPoll}, nil
	}
	last := k.Generation
	for _, g := range used {
		last = max(last, g)
	}
	next := k
	next.Target = targetOf(nv)
	switch why, err := r.unable(ctx, config, k); {
	case err != nil:
		return ctrl.Result{}, err
	case k.Target == "":
	case why != "":
		r.log.Info("key of Secrets not rotated", "reason", why)
	default:
		next.Generation, next.Operator = last+1, last+1
		next.Record = fmt.Sprintf("generation %d by constellation-operator at %s: all nodes were upgraded, to image %s and Kubernetes %s",
			next.Generation, r.now().UTC().Format(time.RFC3339), cmp.Or(nv.Spec.ImageVersion, nv.Spec.Image), nv.Spec.KubernetesClusterVersion)
	}
	if err := r.write(ctx, config, next); err != nil {
		return ctrl.Result{}, err
	}
	if next.Generation != k.Generation {
		r.log.Info("generation of the key of Secrets published", "generation", next.Generation)
	}
	if pending(next) {
		return ctrl.Result{RequeueAfter: rotationPoll}, nil
	}
	return ctrl.Result{}, nil
}

// pending reports whether the operator has a rotation to complete; a console completes its own.
func pending(k kms.Rotation) bool { return k.Operator == k.Generation && k.Rewritten < k.Generation }

// unable returns why the key is not rotated now; empty: it is.
func (r *keyRotations) unable(ctx context.Context, config *corev1.ConfigMap, k kms.Rotation) (string, error) {
	if config.Data[kms.FingerprintKey] != "" && kubeadm.Encryption(config.Data[kms.ModeKey]) != kubeadm.Encrypt {
		return "an upgrade has not encrypted all Secrets yet", nil
	}
	if k.Rewritten < k.Generation {
		return fmt.Sprintf("the rotation to generation %d is under way", k.Generation), nil
	}
	var none storagemigrationv1.StorageVersionMigration
	err := r.fresh.Get(ctx, client.ObjectKey{Name: migrationName + "0"}, &none)
	if meta.IsNoMatchError(err) {
		return "the API server has no storagemigration.k8s.io/v1: Kubernetes v1.37 has it", nil
	}
	return "", wrap("read StorageVersionMigration", client.IgnoreNotFound(err))
}

// complete continues a rotation that was published.
func (r *keyRotations) complete(ctx context.Context, nv *v1alpha1.NodeVersion, config *corev1.ConfigMap, k kms.Rotation) (ctrl.Result, error) {
	again := ctrl.Result{RequeueAfter: rotationPoll}
	used, nodes, err := r.used(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	if behind := slices.DeleteFunc(nodes, func(name string) bool { return used[name] >= k.Generation }); len(behind) > 0 {
		r.wait(fmt.Sprintf("API servers of %s to encrypt with generation %d", strings.Join(behind, ", "), k.Generation))
		return again, nil
	}
	m := &storagemigrationv1.StorageVersionMigration{ObjectMeta: metav1.ObjectMeta{Name: migrationName + strconv.FormatUint(uint64(k.Generation), 10)}}
	err = r.fresh.Get(ctx, client.ObjectKeyFromObject(m), m)
	if apierrors.IsNotFound(err) {
		m.Labels = map[string]string{"app.kubernetes.io/part-of": "constellation"}
		m.Spec.Resource = metav1.GroupResource{Resource: "secrets"}
		err = r.client.Create(ctx, m)
	}
	if err != nil {
		return ctrl.Result{}, wrap("have Secrets written again", err)
	}
	if failed := meta.FindStatusCondition(m.Status.Conditions, string(storagemigrationv1.MigrationFailed)); failed != nil && failed.Status == metav1.ConditionTrue {
		r.log.Warn("Secrets not written again", "generation", k.Generation, "reason", failed.Reason, "message", failed.Message, "retry_in", rotationAgain)
		r.events.Eventf(nv, nil, corev1.EventTypeWarning, "KeyRotationFailed", "Rotate", "Secrets are not all encrypted with generation %d yet: %s. `constellation encryption rotate` names those that were refused", k.Generation, failed.Message)
		if r.now().Sub(failed.LastTransitionTime.Time) < rotationAgain {
			return ctrl.Result{RequeueAfter: rotationAgain}, nil
		}
		return again, wrap("delete StorageVersionMigration", client.IgnoreNotFound(r.client.Delete(ctx, m)))
	}
	if !meta.IsStatusConditionTrue(m.Status.Conditions, string(storagemigrationv1.MigrationSucceeded)) {
		r.wait(fmt.Sprintf("the controller manager to write Secrets again with generation %d", k.Generation))
		return again, nil
	}
	next := k
	next.Rewritten = k.Generation
	if err := r.write(ctx, config, next); err != nil {
		return ctrl.Result{}, err
	}
	r.log.Info("key of Secrets rotated", "generation", k.Generation)
	r.events.Eventf(nv, nil, corev1.EventTypeNormal, "KeyRotated", "Rotate", "All Secrets are encrypted with the key of generation %d", k.Generation)
	return ctrl.Result{}, wrap("delete StorageVersionMigration", client.IgnoreNotFound(r.client.Delete(ctx, m)))
}

// wait logs for what a rotation waits, once.
func (r *keyRotations) wait(text string) {
	if r.waited != text {
		r.waited = text
		r.log.Info("rotation of the key of Secrets waiting", "for", text)
	}
}

// used returns the generations with which API servers encrypt, by the name of their Node, as join services report them.
func (r *keyRotations) used(ctx context.Context) (out map[string]uint32, nodes []string, err error) {
	var list corev1.NodeList
	if err := r.client.List(ctx, &list, client.HasLabels{controlPlaneLabel}); err != nil {
		return nil, nil, wrap("list control planes", err)
	}
	reports := &corev1.ConfigMap{}
	if err := r.fresh.Get(ctx, client.ObjectKey{Namespace: r.namespace, Name: kms.UseConfigMap}, reports); err != nil {
		return nil, nil, wrap("read ConfigMap "+kms.UseConfigMap, client.IgnoreNotFound(err))
	}
	out = map[string]uint32{}
	for _, n := range list.Items {
		nodes = append(nodes, n.Name)
		if g, err := strconv.ParseUint(reports.Data[n.Name], 10, 32); err == nil {
			out[n.Name] = uint32(g)
		}
	}
	return out, nodes, nil
}

// write records a rotation if join-config is unchanged.
func (r *keyRotations) write(ctx context.Context, seen *corev1.ConfigMap, next kms.Rotation) error {
	data, notes := next.Fields()
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": seen.ResourceVersion, "annotations": notes}, "data": data})
	if err != nil {
		return err
	}
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: seen.Namespace, Name: seen.Name}}
	return wrap("write ConfigMap "+seen.Name, r.client.Patch(ctx, m, client.RawPatch(types.MergePatchType, body)))
}
