package operator

import (
	"context"
	"log/slog"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/api/v1alpha1"
)

func TestHeirsSettleBeforeTheyCount(t *testing.T) {
	c := newCluster(t)
	c.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: "default"}})
	heir := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "heir"}}
	c.create(heir)
	yes := true
	proxy := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy", Namespace: "kube-system", OwnerReferences: []metav1.OwnerReference{{
			APIVersion: "apps/v1", Kind: "DaemonSet", Name: "kube-proxy", UID: "1", Controller: &yes,
		}}},
		Spec: corev1.PodSpec{NodeName: "heir", PriorityClassName: "system-node-critical", Containers: []corev1.Container{{Name: "main", Image: "image"}}},
	}
	other := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "app", Namespace: "default"},
		Spec:       corev1.PodSpec{NodeName: "heir", Containers: []corev1.Container{{Name: "main", Image: "image"}}},
	}
	c.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: "kube-system"}})
	c.create(proxy)
	c.create(other) // never Ready, and nobody needs it

	now := time.Now()
	r := &nodeVersions{
		live: c.admin, efforts: newEfforts(func() time.Time { return now }), log: slog.New(slog.DiscardHandler),
		spawn: func(do func(context.Context)) { do(t.Context()) },
	}
	ready := func(goal v1alpha1.Goal) bool {
		t.Helper()
		now = now.Add(time.Hour) // no effort pauses
		o := &observed{nodes: map[string]*corev1.Node{"heir": heir, "donor": {}}}
		o.world = world{
			nodes:     []node{{name: "heir", providerID: "id", ready: true}, {name: "donor", providerID: "old", ready: true}},
			instances: []instance{{id: "id", token: "token"}},
			intents:   []intent{{name: "replace-0", token: "token", goal: goal, donor: "donor"}},
		}
		r.settle(o, newLookup(&o.world))
		if !o.world.nodes[1].ready {
			t.Error("a node that is no heir is not Ready any more")
		}
		return o.world.nodes[0].ready
	}
	for range 2 {
		if ready(v1alpha1.JoinGoal) {
			t.Fatal("the heir counts though kube-proxy does not run on it")
		}
	}
	if !ready(v1alpha1.LeaveGoal) {
		t.Error("an heir that was settled for is looked at again")
	}
	var is corev1.Pod
	if err := c.admin.Get(t.Context(), client.ObjectKeyFromObject(proxy), &is); err != nil {
		t.Fatal(err)
	}
	is.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	if err := c.admin.Status().Update(t.Context(), &is); err != nil {
		t.Fatal(err)
	}
	ready(v1alpha1.JoinGoal) // looks
	if !ready(v1alpha1.JoinGoal) {
		t.Error("the heir does not count though all that is critical runs on it")
	}
}
