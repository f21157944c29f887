package operator

import (
	"context"

	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/api/v1alpha1"
)

type strategy struct{ client client.Client }

func (s strategy) observe(ctx context.Context) (autoscaler, error) {
	var a v1alpha1.AutoscalingStrategy
	if err := s.client.Get(ctx, client.ObjectKey{Name: v1alpha1.AutoscalingStrategyName}, &a); err != nil {
		return autoscaler{}, client.IgnoreNotFound(err)
	}
	return autoscaler{enabled: a.Spec.Enabled, running: a.Status.Enabled || a.Status.Replicas > 0, ours: a.Annotations[v1alpha1.AnnotationPaused] == "true"}, nil
}

func (s strategy) pause(ctx context.Context) error  { return s.set(ctx, false) }
func (s strategy) resume(ctx context.Context) error { return s.set(ctx, true) }

func (s strategy) set(ctx context.Context, enabled bool) error {
	var a v1alpha1.AutoscalingStrategy
	if err := s.client.Get(ctx, client.ObjectKey{Name: v1alpha1.AutoscalingStrategyName}, &a); err != nil {
		return err
	}
	if a.Spec.Enabled == enabled {
		return nil
	}
	before := a.DeepCopy()
	a.Spec.Enabled = enabled
	if enabled {
		delete(a.Annotations, v1alpha1.AnnotationPaused)
	} else {
		metav1.SetMetaDataAnnotation(&a.ObjectMeta, v1alpha1.AnnotationPaused, "true")
	}
	return s.client.Patch(ctx, &a, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

func evictSelf(ctx context.Context, c kubernetes.Interface, namespace, pod string) error {
	return c.PolicyV1().Evictions(namespace).Evict(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: pod, Namespace: namespace}})
}
