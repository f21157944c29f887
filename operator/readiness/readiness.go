// Package readiness reads from Nodes and Pods whether they are Ready, for the operator and for
// the controller of Plans.
package readiness

import corev1 "k8s.io/api/core/v1"

// Node reports whether the kubelet of n reports it as Ready.
func Node(n *corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// Pod reports whether p is Ready.
func Pod(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
