package preflight

import (
	"reflect"
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
		{id: "unmanaged-pods", title: "1 pod in namespace shop without a controller: lost when the node is removed", owner: "namespace shop", command: "kubectl -n shop get pods debug -o yaml > pods-of-shop.yaml"},
		{id: "local-data", title: "emptyDir volumes of 1 workload will be lost with the nodes", owner: "namespace shop"},
		{id: "cordoned-nodes", title: "node worker-1 (worker) is cordoned", command: "kubectl uncordon worker-1"},
		{
			id: "node-actors", title: "Plan shop/k3s is being applied to worker-0", owner: "namespace shop, rancher",
			command: `kubectl -n shop patch plans.upgrade.cattle.io k3s --type=merge -p '{"spec":{"concurrency":0}}'`,
		},
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(told{})); d != "" {
		t.Errorf("findings (-want +got):\n%s", d)
	}
}

// TestPodsShareEqualValues adds pods of two controllers and one without. Equal values of one
// controller are kept once, and different ones stay as they are.
func TestPodsShareEqualValues(t *testing.T) {
	made := func(name, controller string, change func(*corev1.Pod)) pod {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "web"}},
			Spec: corev1.PodSpec{
				NodeName: "node-" + name, NodeSelector: map[string]string{"disk": "ssd"}, Containers: []corev1.Container{{Image: "web:1"}},
				Tolerations: []corev1.Toleration{{Key: "a", Effect: corev1.TaintEffectNoExecute, TolerationSeconds: new(int64(300))}},
				Affinity:    &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{}}, TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{MaxSkew: 1}},
			},
		}
		if controller != "" {
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: controller, UID: types.UID("uid of " + controller), Controller: new(true)}}
		}
		change(p)
		return slimPod(p)
	}
	same := func(*corev1.Pod) {}
	other := func(p *corev1.Pod) {
		p.Labels["pod-index"] = "3"
		p.Spec.NodeSelector["disk"] = "hdd"
		p.Spec.Containers[0].Image = "web:2"
		p.Spec.Tolerations[0].TolerationSeconds = new(int64(600))
		p.Spec.Affinity.PodAffinity = &corev1.PodAffinity{}
		p.Spec.TopologySpreadConstraints[0].MaxSkew = 2
	}
	all := func() []pod {
		return []pod{made("0", "a", same), made("1", "a", same), made("2", "a", other), made("3", "b", same), made("4", "", same)}
	}
	var w world
	firsts := map[types.UID]int{}
	for _, p := range all() {
		w.addPod(p, firsts)
	}
	if !reflect.DeepEqual(w.pods, all()) {
		t.Errorf("pods have changed: %+v", w.pods)
	}
	values := func(p *pod) []uintptr {
		return []uintptr{
			reflect.ValueOf(p.labels).Pointer(), reflect.ValueOf(p.nodeSelector).Pointer(), reflect.ValueOf(p.images).Pointer(),
			reflect.ValueOf(p.tolerations).Pointer(), reflect.ValueOf(p.affinity).Pointer(), reflect.ValueOf(p.spread).Pointer(),
		}
	}
	first := values(&w.pods[0])
	for i, want := range []int{6, 6, 0, 0, 0} {
		shared := 0
		for j, v := range values(&w.pods[i]) {
			if v == first[j] {
				shared++
			}
		}
		if shared != want {
			t.Errorf("pod %d shares %d values with the first one, want %d", i, shared, want)
		}
	}
}
