package operator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"constellation/engine/cloud"
	"constellation/engine/kubeadm"
	"constellation/internal/kubeletcsr"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/readiness"
)

// A joining machine holds a bootstrap token, with which it requests the client certificate of its
// kubelet. In a kubeadm cluster the controller manager approves such requests, for any node name
// in them. Here the operator approves them instead. The API server authenticates the token, the
// token's ID identifies the machine that it was made for, and the cloud confirms that the machine
// exists. The controller manager still approves renewals, which a node requests for itself.

const bootstrapGroup = "system:bootstrappers"

// A kubelet requests exactly one of these sets; the second is for keys that can only sign.
var clientUsages = [][]certificatesv1.KeyUsage{
	{certificatesv1.UsageClientAuth, certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment},
	{certificatesv1.UsageClientAuth, certificatesv1.UsageDigitalSignature},
}

// judgeClient returns the verdict on a request for a kubelet's client certificate, the reason, and
// the request's Node if it exists.
func (r *servingRequests) judgeClient(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) (verdict, string, *corev1.Node) {
	// The API server sets both fields when it authenticates the caller.
	if !strings.HasPrefix(csr.Spec.Username, kubeadm.TokenUser) || !slices.Contains(csr.Spec.Groups, bootstrapGroup) {
		return foreign, "no bootstrap token has asked for it", nil
	}
	// People create other tokens, and approve the requests that are made with them.
	ours := slices.Contains(csr.Spec.Groups, kubeadm.JoinGroup)
	refuse := func(format string, args ...any) (verdict, string, *corev1.Node) {
		if !ours {
			return foreign, "the bootstrap token was not made by the join service", nil
		}
		return denied, fmt.Sprintf(format, args...), nil
	}
	c, err := parseKubeletRequest(csr.Spec.Request)
	if err != nil {
		return refuse("%v", err)
	}
	name, ok := strings.CutPrefix(c.Subject.CommonName, kubeletcsr.UserPrefix)
	if !ok || name == "" || !kubeletcsr.HasSubject(c, kubeletcsr.UserPrefix+name) {
		return refuse("its subject is %.200q, want that of a node", c.Subject.String())
	}
	if csr.Spec.Username != kubeadm.TokenUser+kubeadm.TokenID(name) {
		return refuse("its bootstrap token is that of another machine than %.100q", name)
	}
	if got, ok := usagesAre(csr.Spec.Usages, clientUsages); !ok {
		return denied, fmt.Sprintf("its usages are %q, not those of a client's certificate", got), nil
	}
	if len(c.Extensions) > 0 {
		return denied, "it asks for more than a subject", nil
	}
	node := r.node(ctx, name)
	if node != nil && readiness.Node(node) {
		return undecided, fmt.Sprintf("Node %s is Ready, and a machine that joins is not", name), node
	}
	id, err := r.machineOf(ctx, name, node)
	if err != nil {
		return undecided, err.Error(), node
	}
	instance, err := r.cloud.Instance(ctx, id)
	switch {
	case errors.Is(err, cloud.ErrNotFound):
		return undecided, fmt.Sprintf("the cloud does not know machine %s", id), node
	case err != nil:
		return undecided, fmt.Sprintf("the cloud does not say what machine %s is: %v", id, err), node
	case instance.State == cloud.Terminating || instance.State == cloud.Terminated:
		return undecided, fmt.Sprintf("machine %s is being deleted", id), node
	case !cloud.SameMachine(instance.Key(), id) || instance.Name != name:
		return denied, fmt.Sprintf("machine %s is called %s, so it is not %s", id, instance.Name, name), node
	}
	return approved, fmt.Sprintf("the bootstrap token is that of machine %s", id), node
}

// machineOf returns the ID of the machine that joins as name. The join service records it when it
// issues the ticket. After that record is deleted, the Node has it.
func (r *servingRequests) machineOf(ctx context.Context, name string, node *corev1.Node) (string, error) {
	var jn v1alpha1.JoiningNode
	err := r.client.Get(ctx, client.ObjectKey{Name: name}, &jn)
	switch {
	case err == nil && jn.Spec.ProviderID != "":
		return jn.Spec.ProviderID, nil
	case err != nil && !apierrors.IsNotFound(err):
		return "", fmt.Errorf("JoiningNode %s cannot be read: %w", name, err)
	case node != nil && node.Spec.ProviderID != "":
		return keyOf(node), nil
	}
	return "", fmt.Errorf("there is no JoiningNode %s that names its machine", name)
}

// autoApproval is the ClusterRoleBinding with which every holder of a kubeadm bootstrap token can
// become any node. kubeadm creates it at init and at each upgrade of a control plane.
const autoApproval = "kubeadm:node-autoapprove-bootstrap"

// autoApprovals removes that binding whenever it appears.
type autoApprovals struct {
	client client.Client
	log    *slog.Logger
}

func (r *autoApprovals) setup(mgr manager.Manager) error {
	if err := ctrl.NewControllerManagedBy(mgr).Named("autoapproval").For(&rbacv1.ClusterRoleBinding{}).Complete(r); err != nil {
		return fmt.Errorf("add controller of ClusterRoleBinding %s: %w", autoApproval, err)
	}
	return nil
}

// Reconcile implements reconcile.Reconciler.
func (r *autoApprovals) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	if req.Name != autoApproval {
		return ctrl.Result{}, nil
	}
	err := r.client.Delete(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: autoApproval}})
	if apierrors.IsNotFound(err) {
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("delete ClusterRoleBinding %s: %w", autoApproval, err)
	}
	r.log.Info("auto-approval binding deleted", "binding", autoApproval)
	return ctrl.Result{}, nil
}
