package operator

import (
	"context"
	"fmt"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// leave moves the operator to another node: it evicts the operator's own pod. The pod's replacement
// starts on another node, because this one is cordoned. The process then gets a termination signal
// and releases the leader election lease. A pod that is gone or terminating is a success.
//
// Outside of the cluster pod is empty, and leave only releases the lease, if it still exists. The
// caller must end then, or it is elected again.
func leave(ctx context.Context, c kubernetes.Interface, namespace, pod string) error {
	if pod == "" {
		return release(ctx, c, namespace)
	}
	err := c.CoreV1().RESTClient().Post().Namespace(namespace).Resource("pods").Name(pod).SubResource("eviction").MaxRetries(0).
		Body(&policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pod}}).Do(ctx).Error()
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("evict the operator's own pod %s: %s: %w", pod, refusedEviction(err), err)
	}
	return nil
}

// release frees the lease for the next candidate at once. It fails if the lease has changed since it
// was read.
func release(ctx context.Context, c kubernetes.Interface, namespace string) error {
	leases := c.CoordinationV1().Leases(namespace)
	l, err := leases.Get(ctx, LeaseName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the leader's lease: %w", err)
	}
	if l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity == "" {
		return nil
	}
	l.Spec.HolderIdentity, l.Spec.LeaseDurationSeconds = ptr(""), ptr(int32(1))
	if _, err := leases.Update(ctx, l, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("release the leader's lease: %w", err)
	}
	return nil
}
