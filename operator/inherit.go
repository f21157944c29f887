package operator

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/v1alpha1"
)

// inherit copies labels, taints and the annotations below from an old node to its replacement node, if
// people set them. Existing values of the replacement node stay. docs/design/operator.md has the
// rules.
func inherit(newNode, oldNode *corev1.Node) {
	for k, v := range oldNode.Labels {
		if _, has := newNode.Labels[k]; !has && inherited(k) {
			metav1.SetMetaDataLabel(&newNode.ObjectMeta, k, v)
		}
	}
	for k, v := range oldNode.Annotations {
		if _, has := newNode.Annotations[k]; !has && (k == annotationScaleDown || strings.HasPrefix(k, ownersPrefix)) {
			metav1.SetMetaDataAnnotation(&newNode.ObjectMeta, k, v)
		}
	}
	for _, t := range oldNode.Spec.Taints {
		has := slices.ContainsFunc(newNode.Spec.Taints, func(o corev1.Taint) bool { return o.MatchTaint(&t) })
		if !has && taintInherited(t.Key) {
			newNode.Spec.Taints = append(newNode.Spec.Taints, t)
		}
	}
}

// Annotations of a Node that go to its replacement node: the autoscaler's, and those that an owner
// writes for this purpose.
const (
	annotationScaleDown = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
	ownersPrefix        = "node.constellation.edgeless.systems/"
)

// inherited reports whether a label goes to the replacement node: people's do, those of Kubernetes
// and of the machine's place do not.
func inherited(key string) bool {
	host, name, ok := strings.Cut(key, "/")
	if !ok {
		return true
	}
	switch {
	case host == "node-role.kubernetes.io":
		return name != "control-plane"
	case host == "node-restriction.kubernetes.io": // kubelets may not set these, so people did
		return true
	case strings.HasPrefix(host, "topology."):
		return false
	}
	return !reserved(host)
}

func taintInherited(key string) bool {
	if key == v1alpha1.AnnotationRevoked || key == "ToBeDeletedByClusterAutoscaler" || key == "DeletionCandidateOfClusterAutoscaler" {
		return false
	}
	host, _, _ := strings.Cut(key, "/")
	return host != "node.kubernetes.io" && host != "node.cloudprovider.kubernetes.io"
}

func reserved(host string) bool {
	for _, domain := range []string{"kubernetes.io", "k8s.io"} {
		if host == domain || strings.HasSuffix(host, "."+domain) {
			return true
		}
	}
	return false
}
