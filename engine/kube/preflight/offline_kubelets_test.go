package preflight

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"constellation/engine/plan"
)

// A backup has nodes, and no kubelet that could report.
func TestChecksOfABackupAskNoKubelet(t *testing.T) {
	o := NewObjects(noon)
	o.Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-0"}}, schema.GroupVersionKind{Version: "v1", Kind: "Node"})
	o.HasSnapshot()
	found, err := o.Check(t.Context(), hop("v1.36.4", "v1.37.2"))
	if err != nil {
		t.Fatal(err)
	}
	var got []plan.Severity
	for _, f := range found {
		if f.ID == "running-kubelets" {
			got = append(got, f.Severity)
		}
	}
	if len(got) != 1 || got[0] != plan.NotChecked {
		t.Errorf("running-kubelets is %v, want not checked once", got)
	}
}
