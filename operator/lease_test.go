package operator

import (
	"fmt"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

func TestLeave(t *testing.T) {
	w := newWorkshop(t)
	for range 2 { // a pod that is gone is a success
		if err := leave(t.Context(), w.client, "default", "gone"); err != nil {
			t.Fatal(err)
		}
	}
	w.deployment("default", "operator", 1, nil)
	var first string
	w.eventually("the pod runs", func() (string, bool) {
		for _, node := range []string{"n1", "n2"} {
			if on := w.on("default", node); len(on) == 1 {
				first = node
			}
		}
		return first, first != ""
	})
	other := map[string]string{"n1": "n2", "n2": "n1"}[first]
	pod := w.on("default", first)[0]
	w.cordon(first, true)
	w.budget("default", "operator", "operator")
	if err := leave(t.Context(), w.client, "default", pod); err == nil || !strings.Contains(err.Error(), "the disruption budget operator needs 1 healthy pods and has 1 currently") {
		t.Errorf("left in spite of a budget: %v", err)
	}
	if err := w.client.PolicyV1().PodDisruptionBudgets("default").Delete(t.Context(), "operator", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.eventually("the pod leaves", func() (string, bool) { // the budget is gone from all caches
		err := leave(t.Context(), w.client, "default", pod)
		return fmt.Sprint(err), err == nil
	})
	w.runs("default", other, 1)
	w.runs("default", first, 0)
}

func TestLeaveReleasesTheLease(t *testing.T) {
	c := newCluster(t)
	k := kubernetes.NewForConfigOrDie(c.access())
	if err := leave(t.Context(), k, namespace, ""); err != nil {
		t.Fatalf("without a lease: %v", err)
	}
	c.create(&coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: LeaseName},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: ptr("me"), LeaseDurationSeconds: ptr(int32(15))},
	})
	for range 2 {
		if err := leave(t.Context(), k, namespace, ""); err != nil {
			t.Fatal(err)
		}
	}
	l, err := k.CoordinationV1().Leases(namespace).Get(t.Context(), LeaseName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if *l.Spec.HolderIdentity != "" {
		t.Errorf("the lease is held by %q", *l.Spec.HolderIdentity)
	}
	// The chart's rights are enough to evict oneself.
	c.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "default"}})
	c.create(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "operator-1"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example/c:v1"}}},
	})
	if err := leave(t.Context(), k, namespace, "operator-1"); err != nil {
		t.Fatal(err)
	}
	c.eventually("the pod is gone", func() (string, bool) {
		l, err := k.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=operator-1"})
		if err != nil {
			return err.Error(), false
		}
		return "still there", len(l.Items) == 0
	})
}
