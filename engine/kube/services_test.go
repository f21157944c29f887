package kube

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// An unschedulable pod is reported with the resource pressure of nodes: the scheduler only
// reports taints.
func TestUnschedulablePodReportsPressure(t *testing.T) {
	_, c, _ := counted(t)
	nodes := c.core.CoreV1().Nodes()
	put := func(name string, conditions ...corev1.NodeCondition) {
		t.Helper()
		n, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		n.Status.Conditions = conditions
		if _, err := nodes.UpdateStatus(t.Context(), n, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	waits := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/2 nodes are available: 2 node(s) had untolerated taint(s). preemption: 0/2 nodes are available.",
		}}},
	}
	placed := waits.DeepCopy()
	placed.Spec.NodeName = "worker-0"
	check := func(what string, p *corev1.Pod, want string) {
		t.Helper()
		if got := c.trouble(t.Context(), p); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	const why = "web: Unschedulable: 0/2 nodes are available: 2 node(s) had untolerated taint(s)"
	put("worker-0",
		corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue}, corev1.NodeCondition{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse})
	check("no node has pressure", waits, why)
	put("worker-1", corev1.NodeCondition{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue}, corev1.NodeCondition{Type: corev1.NodePIDPressure, Status: corev1.ConditionUnknown})
	check("one node has", waits, why+": node worker-1 has DiskPressure")
	check("a scheduled pod does not wait for a node", placed, why)
	for i := 2; i < 5; i++ {
		put(fmt.Sprintf("worker-%d", i), corev1.NodeCondition{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionTrue})
	}
	check("many nodes have", waits, why+": node worker-1 has DiskPressure, node worker-2 has MemoryPressure, node worker-3 has MemoryPressure, and 1 more")
}
