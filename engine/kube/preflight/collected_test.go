package preflight

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/check"
)

const plansCRD = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: plans.upgrade.cattle.io}
spec:
  group: upgrade.cattle.io
  names: {kind: Plan, plural: plans, singular: plan}
  scope: Namespaced
  versions:
    - name: v1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`

const testPlan = `{
  "apiVersion": "upgrade.cattle.io/v1", "kind": "Plan", "metadata": {"name": "k3s", "namespace": "shop"},
  "status": {"applying": ["worker-0"], "conditions": [{"type": "Complete", "status": "False", "lastUpdateTime": "yesterday"}]}
}`

// TestWhoDidItSurvivesReading makes trouble in a real cluster and wants to know who made it.
func TestWhoDidItSurvivesReading(t *testing.T) {
	c := startCluster(t)
	c.namespace("shop")
	for _, name := range []string{"worker-0", "worker-1"} {
		c.node(name)
	}
	c.must(c.cp.Apply(t.Context(), []byte(plansCRD)))
	_, err := c.core.Discovery().RESTClient().Post().AbsPath("/apis/upgrade.cattle.io/v1/namespaces/shop/plans").
		SetHeader("Content-Type", "application/json").Param("fieldManager", "rancher").Body([]byte(testPlan)).DoRaw(t.Context())
	c.must(err)
	_, err = c.core.CoreV1().Nodes().Patch(t.Context(), "worker-1", types.StrategicMergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{FieldManager: "kubectl-cordon"})
	c.must(err)
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "debug", Finalizers: []string{"shop.example/audit"}}, Spec: corev1.PodSpec{
		NodeName: "worker-0", Containers: []corev1.Container{{Name: "main", Image: "example.com/main:1"}},
		Volumes: []corev1.Volume{{Name: "cache", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}}},
	}}
	_, err = c.core.CoreV1().Pods("shop").Create(t.Context(), p, metav1.CreateOptions{FieldManager: "kubectl-run"})
	c.must(err)

	type told struct{ id, title, owner, command string }
	var got []told
	for _, id := range []string{"unmanaged-pods", "local-data", "cordoned-nodes", "node-actors"} {
		for _, f := range c.look(c.cp.Config(), id, check.PreflightRequest{ReplaceWorkers: true, Surge: 1}, nil) {
			got = append(got, told{f.ID, f.Title, f.Owner, f.Command})
		}
	}
	want := []told{
		{"unmanaged-pods", "1 pod in namespace shop without a controller: lost when the node is removed", "namespace shop", "kubectl -n shop get pods debug -o yaml > pods-of-shop.yaml"},
		{"local-data", "emptyDir volumes of 1 workload will be lost with the nodes", "namespace shop", ""},
		{"cordoned-nodes", "node worker-1 (worker) is cordoned", "", "kubectl uncordon worker-1"},
		{
			"node-actors", "Plan shop/k3s is being applied to worker-0", "namespace shop, rancher",
			`kubectl -n shop patch plans.upgrade.cattle.io k3s --type=merge -p '{"spec":{"concurrency":0}}'`,
		},
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(told{})); d != "" {
		t.Errorf("findings (-want +got):\n%s", d)
	}
}
