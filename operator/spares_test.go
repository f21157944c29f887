package operator

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets/render"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/providers"
	"constellation/operator/api/v1alpha1"
)

func TestNodeStatesForTheSizesOfGroups(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_800_000_000, 0)
	r := &sizes{now: func() time.Time { return now }}
	ready := []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	node := func(name string, change func(*corev1.Node)) corev1.Node {
		n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{}}, Spec: corev1.NodeSpec{ProviderID: "machines://c/" + name}}
		change(&n)
		return n
	}
	nodes := []corev1.Node{
		node("fine", func(n *corev1.Node) {
			n.Status.Conditions = ready
			n.UID = "1"
			n.Annotations[v1alpha1.AnnotationIncarnation] = "3"
		}),
		node("dead", func(n *corev1.Node) { n.UID = "2" }),
		node("cordoned", func(n *corev1.Node) { n.UID = "3"; n.Spec.Unschedulable = true }),
		node("obsolete", func(n *corev1.Node) {
			n.UID = "4"
			n.Status.Conditions = ready
			n.Annotations[v1alpha1.AnnotationObsolete] = "true"
		}),
		node("upgraded", func(n *corev1.Node) { n.UID = "5" }),
		node("leaving", func(n *corev1.Node) { n.UID = "6"; n.Status.Conditions = ready }),
	}
	pending := []v1alpha1.PendingNode{
		{Spec: v1alpha1.PendingNodeSpec{NodeName: "upgraded", Goal: v1alpha1.UpgradeGoal}},
		{Spec: v1alpha1.PendingNodeSpec{NodeName: "leaving", Goal: v1alpha1.LeaveGoal}},
		{Spec: v1alpha1.PendingNodeSpec{NodeName: "dead", Goal: v1alpha1.JoinGoal}},
	}
	r.states(nodes, pending)
	now = now.Add(time.Minute)
	want := map[string]machines.NodeState{
		"fine":     {Machine: "machines://c/fine#3", Ready: true},
		"dead":     {Machine: "machines://c/dead", Since: time.Minute},
		"cordoned": {Machine: "machines://c/cordoned", Since: time.Minute, Kept: true},
		"obsolete": {Machine: "machines://c/obsolete", Ready: true, Leaves: true},
		"upgraded": {Machine: "machines://c/upgraded", Since: time.Minute, Kept: true},
		"leaving":  {Machine: "machines://c/leaving", Ready: true, Leaves: true},
	}
	if d := cmp.Diff(want, r.states(nodes, pending)); d != "" {
		t.Error(d)
	}

	// The time of a new Node of the name begins at zero, and so does that of one that was Ready meanwhile.
	nodes[1].UID = "7"
	nodes[4].Status.Conditions = ready
	r.states(nodes, pending)
	nodes[4].Status.Conditions = nil
	got := r.states(nodes, pending)
	if got["dead"].Since != 0 || got["upgraded"].Since != 0 {
		t.Errorf("%+v", got)
	}
}

// A group of enrolled machines is scaled up by a spare and down again, by an operator with the rights of its chart. The
// test is the machines, the join service and the console.
func TestOperatorAssignsAndReleasesSpares(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	values := map[string]any{"release": "v1.1.0", "operator": map[string]any{"inventory": machines.InventoryConfigMap}}
	chart, err := render.Chart("constellation-operator", "v1.1.0", namespace, providers.LocalValues(), values)
	if err == nil {
		err = c.cp.Apply(t.Context(), chart)
	}
	if err != nil {
		t.Fatal(err)
	}
	list := machines.Inventory{Schema: "1", Cluster: "t", Endpoint: "api", Sizes: map[cloud.Role]int{cloud.Worker: 2}}
	for _, m := range []machines.Entry{{Name: "cp", Group: cloud.ControlPlane}, {Name: "w", Group: cloud.Worker, Labels: "disk=ssd"}, {Name: "s", Group: cloud.Worker, Spare: true}} {
		m.ProviderID = machines.ProviderID("t", m.Name)
		list.Machines = append(list.Machines, m)
	}
	write := func(name, key string, v any) {
		t.Helper()
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		var cm corev1.ConfigMap
		if err := c.admin.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, &cm); err != nil {
			t.Fatal(err)
		}
		cm.Data = map[string]string{key: string(b)}
		if err := c.admin.Update(t.Context(), &cm); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{machines.InventoryConfigMap, machines.SparesConfigMap, machines.SeenConfigMap} {
		c.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}})
	}
	write(machines.InventoryConfigMap, machines.InventoryKey, list)
	join := func(name, key string, controlPlane bool) {
		t.Helper()
		jn := joiningNode(name, refA, time.Hour)
		jn.Spec.ProviderID = key
		c.create(jn)
		c.nodeOf(name, machines.ProviderID("t", name), controlPlane)
	}
	join("cp", machines.ProviderID("t", "cp"), true)
	join("w", machines.ProviderID("t", "w"), false)
	c.create(&v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}, Spec: v1alpha1.NodeVersionSpec{KubernetesComponentsReference: refA, KubernetesClusterVersion: "v1.35.4"}})
	c.startCloud(c.access(), machines.NewControl("unused"))

	c.eventually("w has the label of the list", func() (string, bool) {
		var n corev1.Node
		c.get("w", &n)
		return fmt.Sprint(n.Labels), n.Labels["disk"] == "ssd"
	})
	c.eventually("the status says that there is no usable spare", func() (string, bool) {
		var nv v1alpha1.NodeVersion
		c.get(v1alpha1.NodeVersionName, &nv)
		w := nv.Status.Waiting
		return fmt.Sprintf("%+v", w), w != nil && w.Reason == "NoSpare" && strings.Contains(w.Message, "s: it has never asked to join")
	})
	record := func() machines.Assignment {
		t.Helper()
		var cm corev1.ConfigMap
		if err := c.admin.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: machines.SparesConfigMap}, &cm); err != nil {
			t.Fatal(err)
		}
		all, err := machines.ParseAssignments(cm.Data)
		if err != nil {
			t.Fatal(err)
		}
		return all["s"]
	}
	write(machines.SeenConfigMap, "s", machines.Seen{Time: time.Now()})
	c.eventually("the spare is assigned", func() (string, bool) {
		a := record()
		return fmt.Sprintf("%+v", a), a.State == machines.Assigned && a.Incarnation == 1
	})
	join("s", machines.ProviderID("t", "s")+"#1", false)
	c.eventually("the spare is a node", func() (string, bool) {
		var n corev1.Node
		c.get("s", &n)
		return fmt.Sprint(n.Annotations), n.Annotations[v1alpha1.AnnotationIncarnation] == "1" && n.Annotations[v1alpha1.AnnotationComponents] == refA
	})
	pending := func() (names []string) {
		t.Helper()
		var all v1alpha1.PendingNodeList
		if err := c.admin.List(t.Context(), &all); err != nil {
			t.Fatal(err)
		}
		for i := range all.Items {
			names = append(names, all.Items[i].Name+" "+string(all.Items[i].Spec.Goal))
		}
		return names
	}
	c.eventually("no intent is left", func() (string, bool) { return fmt.Sprint(pending()), len(pending()) == 0 })

	// Scaled down: its Node leaves as any node does, then the machine resets itself.
	list.Sizes[cloud.Worker] = 1
	write(machines.InventoryConfigMap, machines.InventoryKey, list)
	c.eventually("the spare is released, and its Node is gone", func() (string, bool) {
		a, n := record(), corev1.Node{}
		there := c.get("s", &n)
		return fmt.Sprintf("%+v, %+v, %v", a, n.Annotations, pending()), a.State == machines.Released && !there
	})
	if got := pending(); len(got) != 1 || got[0] != "machine-s Leave" {
		t.Errorf("before the reset the intents are %v", got)
	}
	write(machines.SeenConfigMap, "s", machines.Seen{Incarnation: 1, Time: time.Now()})
	c.eventually("the intent ends with the reset", func() (string, bool) { return fmt.Sprint(pending()), len(pending()) == 0 })
	var w corev1.Node
	if !c.get("w", &w) || w.Spec.Unschedulable {
		t.Errorf("the other worker is %+v", w.Spec)
	}
}
