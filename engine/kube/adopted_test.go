package kube

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"constellation/assets"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cluster"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/operator/api/v1alpha1"
)

// agentPods does the work of kubelets and the scheduler for the DaemonSet of agents: the setup of each pod ends as outcome says.
func agentPods(ctx context.Context, c *Client, outcome func(node string) corev1.ContainerStatus) error {
	for ctx.Err() == nil {
		l, err := c.core.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=" + agentSetup})
		if err != nil {
			return err
		}
		for i := range l.Items {
			p := &l.Items[i]
			switch {
			case p.DeletionTimestamp != nil:
				err = c.core.CoreV1().Pods(Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
			case p.Spec.NodeName == "": // there is no scheduler
				node := p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0].Values[0]
				err = c.core.CoreV1().Pods(Namespace).Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: p.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: node}}, metav1.CreateOptions{})
			case len(p.Status.InitContainerStatuses) == 0:
				p.Status.InitContainerStatuses = []corev1.ContainerStatus{outcome(p.Spec.NodeName)}
				_, err = c.core.CoreV1().Pods(Namespace).UpdateStatus(ctx, p, metav1.UpdateOptions{})
			}
			if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
				return err
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nil
}

// TestAdoptedCluster makes an adopted cluster ready for the operator on a real API server, and takes everything out
// again. Labels and annotations of others stay.
func TestAdoptedCluster(t *testing.T) {
	t.Parallel()
	kubeconfig, err := controlplanetest.Lend(t, controlplane.Options{Controllers: true}).Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	c, err := Connect(kubeconfig, nil)
	if err != nil {
		t.Fatal(err)
	}
	components := "k8s-components-sha256-" + strings.Repeat("0", 64)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	nodes := c.core.CoreV1().Nodes()
	for name, id := range map[string]string{"cp": "other://cp", "w": ""} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"example.com/l": "1"}, Annotations: map[string]string{"example.com/a": "1"}}, Spec: corev1.NodeSpec{ProviderID: id}}
		if _, err := nodes.Create(ctx, n, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	inventory := machines.Inventory{Schema: "1", Cluster: "c", Machines: []machines.Entry{
		{Name: "cp", Group: cloud.ControlPlane, ProviderID: "other://cp"}, {Name: "w", Group: cloud.Worker, ProviderID: machines.ProviderID("c", "w")},
	}}
	check := func(what string, want bool, got bool, err error) {
		t.Helper()
		if got != want || err != nil && !errors.Is(err, cluster.ErrAbsent) {
			t.Errorf("%s: %t, %v, want %t", what, got, err, want)
		}
	}
	got, err := c.HasInventory(ctx, inventory)
	check("inventory before", false, got, err)
	wrong := inventory
	wrong.Machines = slices.Clone(inventory.Machines)
	wrong.Machines[0].ProviderID = "machines://c/cp"
	if err := c.SetInventory(ctx, wrong); err == nil || !strings.Contains(err.Error(), "other://cp") {
		t.Errorf("an inventory with another provider ID: %v", err)
	}
	for range 2 {
		if err := c.SetInventory(ctx, inventory); err != nil {
			t.Fatal(err)
		}
	}
	got, err = c.HasInventory(ctx, inventory)
	check("inventory", true, got, err)
	got, err = c.UpgradesPackages(ctx)
	check("packages upgraded", false, got, err)
	inventory.Packages = machines.PackagesUpgrade
	got, err = c.HasInventory(ctx, inventory) // the switch is part of it
	check("inventory with another switch", false, got, err)
	if err := c.SetInventory(ctx, inventory); err != nil {
		t.Fatal(err)
	}
	got, err = c.UpgradesPackages(ctx)
	check("packages upgraded after the switch", true, got, err)

	// An upgrade of somebody else has replaced one of two API servers.
	if _, err := c.core.CoreV1().ConfigMaps(systemNamespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: kubeadmConfigName}, Data: map[string]string{
		keyClusterConfig: "kind: ClusterConfiguration\nkubernetesVersion: v1.37.2\n",
	}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for node, image := range map[string]string{"cp": "registry.k8s.io/kube-apiserver:v1.37.2", "cp-1": "r.example.com:5000/k8s/kube-apiserver:v1.36.4@sha256:" + strings.Repeat("0", 64), "cp-2": "r.example.com:5000/kube-apiserver:mine"} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "kube-apiserver-" + node, Labels: map[string]string{"component": "kube-apiserver", "tier": "control-plane"}}, Spec: corev1.PodSpec{
			NodeName: "cp", Containers: []corev1.Container{{Name: "kube-apiserver", Image: image}},
		}}
		if _, err := c.core.CoreV1().Pods(systemNamespace).Create(ctx, p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := c.Versions(ctx); err != nil || !slices.Equal(got, []string{"v1.36.4", "v1.37.2"}) {
		t.Errorf("versions of the control planes: %q, %v", got, err)
	}

	// Agents. The first machine refuses at first.
	kinds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.ApplyKinds(ctx, kinds, func(string) {}); err != nil {
		t.Fatal(err)
	}
	setup := func(outcome func(node string) corev1.ContainerStatus, f func() error) error {
		limited, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- agentPods(limited, c, outcome) }()
		err := f()
		stop()
		if err := <-ended; err != nil && limited.Err() == nil {
			t.Error(err)
		}
		return err
	}
	ok := func(message string) corev1.ContainerStatus {
		return corev1.ContainerStatus{Name: "setup", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Message: message}}}
	}
	refuses := func(node string) corev1.ContainerStatus {
		if node == "w" {
			return ok("")
		}
		return corev1.ContainerStatus{Name: "setup", RestartCount: setupRetries, LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Message: "agent: no systemctl"}}}
	}
	install := func() error {
		return c.InstallAgents(ctx, "example.com/agent:v1", "v1.1.0", []byte("keys"), nil, func(string, int64, int64) {})
	}
	if err := setup(refuses, install); err == nil || !strings.Contains(err.Error(), "machine cp: agent: no systemctl") {
		t.Errorf("a machine that refuses: %v", err)
	}
	if lack, err := c.LackAgents(ctx, "v1.1.0", []byte("keys")); err != nil || len(lack) != 2 {
		t.Errorf("after a refusal %q lack agents, %v", lack, err)
	}
	if err := setup(func(string) corev1.ContainerStatus { return ok("") }, install); err != nil {
		t.Fatal(err)
	}
	if _, err := c.core.AppsV1().DaemonSets(Namespace).Get(ctx, agentSetup, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the DaemonSet is still there: %v", err)
	}
	for release, want := range map[string]int{"v1.1.0": 0, "v1.2.0": 2} {
		if lack, err := c.LackAgents(ctx, release, []byte("keys")); err != nil || len(lack) != want {
			t.Errorf("%q lack agents of %s, %v", lack, release, err)
		}
	}

	got, err = c.HasGroups(ctx, inventory)
	check("groups before", false, got, err)
	for range 2 {
		if err := c.SetGroups(ctx, inventory, components); err != nil {
			t.Fatal(err)
		}
	}
	got, err = c.HasGroups(ctx, inventory)
	check("groups", true, got, err)
	for _, name := range []string{"cp", "w"} {
		n, err := nodes.Get(ctx, name, metav1.GetOptions{})
		if err != nil || n.Annotations[v1alpha1.AnnotationComponents] != components || n.Annotations["example.com/a"] != "1" || n.Labels["example.com/l"] != "1" {
			t.Errorf("node %s has labels %v and annotations %v, %v", name, n.Labels, n.Annotations, err)
		}
	}
	if err := c.SetNodeTarget(ctx, cluster.NodeTarget{Components: components, Kubernetes: "v1.36.4"}); err != nil {
		t.Fatal(err)
	}

	// Back out.
	pending := groupObject(cloud.Group{})
	pending.SetKind("PendingNode")
	pending.SetName("replace-0")
	pending.Object["spec"] = map[string]any{"providerID": "other://cp", "groupID": "g", "nodeName": "cp", "goal": "Upgrade"}
	if _, err := c.dynamic.Resource(resourceOf("pendingnodes")).Create(ctx, pending, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := c.RemoveTarget(ctx); err == nil || !strings.Contains(err.Error(), "cp is being upgraded") {
		t.Errorf("during an upgrade: %v", err)
	}
	if err := c.deleteAll(ctx, "pendingnodes"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := c.RemoveTarget(ctx); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := json.Marshal(map[string]any{"kept": map[string]string{"/usr/local/bin/kubelet": "in use"}})
	if err != nil {
		t.Fatal(err)
	}
	var left map[string]string
	err = setup(func(node string) corev1.ContainerStatus { return ok(map[string]string{"w": string(kept)}[node]) }, func() (err error) {
		left, err = c.RemoveAgents(ctx, "example.com/agent:v1", nil, func(string, int64, int64) {})
		return err
	})
	if want := map[string]string{"w": "/usr/local/bin/kubelet"}; err != nil || !maps.Equal(left, want) {
		t.Errorf("left on machines: %v, %v, want %v", left, err, want)
	}
	for range 2 {
		if err := c.RemoveData(ctx); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"cp", "w"} {
		n, err := nodes.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ours := func(k string) bool { return strings.HasPrefix(k, "constellation.edgeless.systems/") }
		if slices.ContainsFunc(slices.Concat(slices.Collect(maps.Keys(n.Labels)), slices.Collect(maps.Keys(n.Annotations))), ours) || n.Annotations["example.com/a"] != "1" || n.Labels["example.com/l"] != "1" {
			t.Errorf("node %s is left with labels %v and annotations %v", name, n.Labels, n.Annotations)
		}
	}
	if _, err := c.core.CoreV1().Namespaces().Get(ctx, Namespace, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the namespace is still there: %v", err)
	}
	if _, err := c.dynamic.Resource(kindsOfKinds).Get(ctx, "nodeversions."+v1alpha1.GroupVersion.Group, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the kind NodeVersion is still there: %v", err)
	}
}

// cutting loses the answer to one request that writes. The API server has executed it.
type cutting struct {
	next http.RoundTripper

	mu    sync.Mutex
	after int // writes until the answer is lost; 0: it was lost, or none will be
}

var errCut = errors.New("the connection was cut")

// RoundTrip implements [http.RoundTripper].
func (c *cutting) RoundTrip(r *http.Request) (*http.Response, error) {
	cut := false
	if r.Method != http.MethodGet {
		c.mu.Lock()
		cut = c.after == 1
		c.after = max(0, c.after-1)
		c.mu.Unlock()
	}
	out, err := c.next.RoundTrip(r)
	if err != nil || !cut {
		return out, err
	}
	out.Body.Close()
	return nil, errCut
}

// cutAt sets the write whose answer is lost, and returns whether an earlier one was.
func (c *cutting) cutAt(n int) (was bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was = c.after == 0
	c.after = n
	return was
}

// TestAdoptionIsCut loses the answer to each write of an adoption and of its undo. The same call again completes it.
func TestAdoptionIsCut(t *testing.T) {
	t.Parallel()
	cp := controlplanetest.Lend(t, controlplane.Options{Controllers: true})
	kubeconfig, err := cp.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	sound, err := Connect(kubeconfig, nil)
	if err != nil {
		t.Fatal(err)
	}
	line := &cutting{}
	config := rest.CopyConfig(cp.Config())
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { line.next = next; return line })
	c, err := ForConfig(config, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	kinds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	inventory := machines.Inventory{Schema: "1", Cluster: "c", Machines: []machines.Entry{{Name: "cp", Group: cloud.ControlPlane, ProviderID: machines.ProviderID("c", "cp")}}}
	if _, err := sound.core.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cp"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	done := corev1.ContainerStatus{Name: "setup", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}
	go func() { _ = agentPods(ctx, sound, func(string) corev1.ContainerStatus { return done }) }()

	components := "k8s-components-sha256-" + strings.Repeat("0", 64)
	silent := func(string, int64, int64) {}
	absent := func(err error) (bool, error) {
		return errors.Is(err, cluster.ErrAbsent) || apierrors.IsNotFound(err), nil
	}
	for _, step := range []struct {
		name string
		run  func(*Client) error
		done func() (bool, error)
	}{
		{name: "inventory", run: func(c *Client) error { return c.SetInventory(ctx, inventory) }, done: func() (bool, error) { return sound.HasInventory(ctx, inventory) }},
		{name: "kinds", run: func(c *Client) error { return c.ApplyKinds(ctx, kinds, func(string) {}) }, done: func() (bool, error) {
			_, err := sound.dynamic.Resource(kindsOfKinds).Get(ctx, "nodeversions."+v1alpha1.GroupVersion.Group, metav1.GetOptions{})
			return err == nil, err
		}},
		{name: "agents", run: func(c *Client) error {
			return c.InstallAgents(ctx, "example.com/agent:v1", "v1.1.0", []byte("keys"), nil, silent)
		}, done: func() (bool, error) {
			lack, err := sound.LackAgents(ctx, "v1.1.0", []byte("keys"))
			_, left := sound.core.AppsV1().DaemonSets(Namespace).Get(ctx, agentSetup, metav1.GetOptions{})
			return len(lack) == 0 && apierrors.IsNotFound(left), err
		}},
		{name: "groups", run: func(c *Client) error { return c.SetGroups(ctx, inventory, components) }, done: func() (bool, error) { return sound.HasGroups(ctx, inventory) }},
		{name: "target", run: func(c *Client) error {
			return c.SetNodeTarget(ctx, cluster.NodeTarget{Components: components, Kubernetes: "v1.36.4"})
		}, done: func() (bool, error) {
			got, err := sound.NodeTarget(ctx)
			return got.Components == components, err
		}},
		{name: "undo of the target", run: func(c *Client) error { return c.RemoveTarget(ctx) }, done: func() (bool, error) {
			_, err := sound.NodeTarget(ctx)
			return absent(err)
		}},
		{name: "undo of the agents", run: func(c *Client) error { _, err := c.RemoveAgents(ctx, "example.com/agent:v1", nil, silent); return err }, done: func() (bool, error) {
			_, err := sound.core.AppsV1().DaemonSets(Namespace).Get(ctx, agentSetup, metav1.GetOptions{})
			return absent(err)
		}},
		{name: "undo of the data", run: func(c *Client) error { return c.RemoveData(ctx) }, done: func() (bool, error) {
			n, err := sound.core.CoreV1().Nodes().Get(ctx, "cp", metav1.GetOptions{})
			if err != nil {
				return false, err
			}
			for _, k := range slices.Concat(slices.Collect(maps.Keys(n.Labels)), slices.Collect(maps.Keys(n.Annotations))) {
				if strings.HasPrefix(k, "constellation.edgeless.systems/") {
					return false, errors.New("the node keeps " + k)
				}
			}
			_, err = sound.core.CoreV1().Namespaces().Get(ctx, Namespace, metav1.GetOptions{})
			return absent(err)
		}},
	} {
		cuts := 0
		for n := 1; ; n++ {
			line.cutAt(n)
			err := step.run(c)
			if cut := line.cutAt(0); !cut {
				if err != nil {
					t.Fatalf("%s, after %d cuts: %v", step.name, cuts, err)
				}
				break
			}
			cuts++
			if err != nil && !errors.Is(err, errCut) {
				t.Errorf("%s, cut at write %d: %v", step.name, n, err)
			}
		}
		if is, err := step.done(); err != nil || !is {
			t.Errorf("%s, after %d cuts and a call without one: done %t, %v", step.name, cuts, is, err)
		}
		if cuts == 0 {
			t.Errorf("%s wrote nothing", step.name)
		}
	}
}
