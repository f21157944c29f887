package operator

import (
	"log/slog"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

func TestReplacementNodesPassTheReadinessGate(t *testing.T) {
	c := newCluster(t)
	for _, ns := range []string{"default", "kube-system"} {
		c.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: ns}})
	}
	newNode := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "heir"}}
	c.create(newNode)
	yes := true
	daemon := func(name string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "kube-system", OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "apps/v1", Kind: "DaemonSet", Name: name, UID: "1", Controller: &yes,
			}}},
			Spec: corev1.PodSpec{NodeName: "heir", PriorityClassName: "system-node-critical", Containers: []corev1.Container{{Name: "main", Image: "image"}}},
		}
	}
	proxy, network := daemon("kube-proxy"), daemon("network")
	c.create(proxy)
	c.create(&corev1.Pod{ // never Ready, and not critical for the node
		ObjectMeta: metav1.ObjectMeta{Name: "app", Namespace: "default"},
		Spec:       corev1.PodSpec{NodeName: "heir", Containers: []corev1.Container{{Name: "main", Image: "image"}}},
	})
	works := func(p *corev1.Pod) {
		t.Helper()
		var is corev1.Pod
		if err := c.admin.Get(t.Context(), client.ObjectKeyFromObject(p), &is); err != nil {
			t.Fatal(err)
		}
		is.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		if err := c.admin.Status().Update(t.Context(), &is); err != nil {
			t.Fatal(err)
		}
	}

	woken := make(chan struct{}, 100)
	r := &nodeVersions{gate: newReadinessGate(kubernetes.NewForConfigOrDie(c.cp.Config()), func() { woken <- struct{}{} }, slog.New(slog.DiscardHandler))}
	t.Cleanup(r.gate.close)
	look := func(goal v1alpha1.Goal, ready bool) decision.Node {
		t.Helper()
		o := &observed{nodes: map[string]*corev1.Node{"heir": newNode, "donor": {}}}
		o.World = decision.World{
			Nodes:     []decision.Node{{Name: "heir", ProviderID: "id", Ready: ready}, {Name: "donor", ProviderID: "old", Ready: true}},
			Instances: []decision.Instance{{ID: "id", Name: "heir", Token: "token"}, {ID: "old", Name: "donor"}},
			Intents:   []decision.Intent{{Name: "replace-0", Token: "token", Goal: goal, OldNode: "donor"}},
		}
		r.gateReplacements(o, decision.NewLookup(&o.World))
		if !o.Nodes[1].Ready {
			t.Error("a node that is not a replacement node is marked as not Ready")
		}
		return o.Nodes[0]
	}
	lacks := func(pod string) {
		t.Helper()
		c.eventually("the replacement node lacks "+pod, func() (string, bool) {
			n := look(v1alpha1.JoinGoal, true)
			if n.Ready {
				t.Fatalf("the replacement node has passed the gate without %s", pod)
			}
			return n.NotReadyPod, n.NotReadyPod == pod
		})
	}
	if look(v1alpha1.JoinGoal, false).Ready {
		t.Error("a node that is not Ready is marked as Ready")
	}
	lacks("kube-system/kube-proxy")
	c.create(network)
	works(proxy)
	lacks("kube-system/network")
	works(network)
	<-woken
	if look(v1alpha1.JoinGoal, false).Ready {
		t.Error("a node that is not Ready is marked as Ready because of its pods")
	}
	if !look(v1alpha1.JoinGoal, true).Ready {
		t.Error("the replacement node has not passed the gate with all critical pods")
	}
	var is corev1.Pod
	if err := c.admin.Get(t.Context(), client.ObjectKeyFromObject(proxy), &is); err != nil {
		t.Fatal(err)
	}
	is.Status.Conditions[0].Status = corev1.ConditionFalse
	if err := c.admin.Status().Update(t.Context(), &is); err != nil {
		t.Fatal(err)
	}
	if !look(v1alpha1.JoinGoal, true).Ready {
		t.Error("a replacement node that has passed the gate is marked as not Ready")
	}
	if !look(v1alpha1.LeaveGoal, true).Ready {
		t.Error("a replacement node that has passed the gate is watched again")
	}
	if len(r.gate.nodes) > 0 {
		t.Error("a node that is no longer a replacement node is still watched")
	}
}
