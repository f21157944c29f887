package kube

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cluster"
)

func TestJoinServiceOf(t *testing.T) {
	pod := func(name, node string, change func(*corev1.Pod)) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{
			Ports: []corev1.ContainerPort{{Name: "atls", ContainerPort: 9090}, {Name: "health", ContainerPort: 9091}},
		}}}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
		if change != nil {
			change(&p)
		}
		return p
	}
	ends := func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }
	for _, tt := range []struct {
		name string
		pods []corev1.Pod
		want cluster.JoinService
	}{
		{name: "it runs", pods: []corev1.Pod{pod("other", "cp-1", nil), pod("one", "cp-0", nil)}, want: cluster.JoinService{Node: "cp-0", Pod: "one", Port: 9090}},
		{name: "the one that ends does not count", pods: []corev1.Pod{pod("one", "cp-0", nil), pod("old", "cp-0", ends)}, want: cluster.JoinService{Node: "cp-0", Pod: "one", Port: 9090}},
		{name: "no pod", pods: []corev1.Pod{pod("other", "cp-1", nil)}, want: cluster.JoinService{Node: "cp-0", Problem: "no pod of the join service is on it"}},
		{
			name: "it waits", pods: []corev1.Pod{pod("one", "cp-0", func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending })},
			want: cluster.JoinService{Node: "cp-0", Pod: "one", Port: 9090, Problem: "the pod one does not run"},
		},
		{
			name: "another pod", pods: []corev1.Pod{pod("one", "cp-0", func(p *corev1.Pod) { p.Spec.Containers[0].Ports = nil })},
			want: cluster.JoinService{Node: "cp-0", Pod: "one", Problem: "the pod one serves no attested TLS"},
		},
		{name: "a pod without containers", pods: []corev1.Pod{pod("one", "cp-0", func(p *corev1.Pod) { p.Spec.Containers = nil })}, want: cluster.JoinService{Node: "cp-0", Pod: "one", Problem: "the pod one serves no attested TLS"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := joinServiceOf("cp-0", tt.pods); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}
