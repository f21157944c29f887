package main

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"constellation/engine/plan"
	"constellation/engine/revocation"
	"constellation/engine/workspace"
)

// A worker whose credentials were copied is revoked and replaced. The workload keeps its replicas,
// the join service refuses the name, and the copied credentials cannot write anything once the
// admission policy reads the record.
func TestRevokeOnSimulatedMachines(t *testing.T) {
	t.Parallel()
	c, _ := newCluster(t, simulatedMachines, 1, 2)
	c.failsAsListed()
	stolen := c.stolenCredentials("worker-1")
	c.apply("e2e", `apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 4
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: registry.k8s.io/pause:3.10}]}
`)
	replicas := func() string {
		return c.kubectl("get", "deployment", "web", "-o", "jsonpath={.status.readyReplicas}")
	}
	await := func(limit time.Duration, what string, holds func() bool) {
		t.Helper()
		for deadline := time.Now().Add(limit); !holds(); time.Sleep(time.Second) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: not so after %v", what, limit)
			}
		}
	}
	await(time.Minute, "4 replicas are ready", func() bool { return replicas() == "4" })
	if _, err := stolen.CoreV1().Nodes().Get(t.Context(), "worker-1", metav1.GetOptions{}); err != nil {
		t.Fatalf("the copied credentials do not work before: %v", err)
	}

	c.run(time.Minute, "machine", "revoke", "worker-7", "--yes").want(plan.ExitUsage)
	last := c.run(time.Minute, "machine", "revoke", "control-plane-0", "--non-interactive", "--yes").want(plan.ExitBlocked)
	if !strings.Contains(last.stdout+last.stderr, "only control plane") {
		t.Errorf("the last control plane:\n%s\n%s", last.stdout, last.stderr)
	}
	c.run(time.Minute, "machine", "revoke", "worker-1", "--replace", "--non-interactive").want(plan.ExitUnacknowledged)
	c.run(time.Minute, "machine", "revoke", "worker-1", "--replace", "--dry-run").want(plan.ExitDone)
	if got := c.status(); len(got.Nodes) != 3 {
		t.Fatalf("nodes after a dry run: %+v", got.Nodes)
	}

	began := time.Now()
	r := c.run(5*time.Minute, "machine", "revoke", "worker-1", "--replace", "--reason", "its key was copied", "--yes", "-o", "json").want(plan.ExitDone)
	t.Logf("revoked and replaced in %v", time.Since(began).Round(100*time.Millisecond))
	events := r.events()
	if text := events[len(events)-1].Text; !strings.Contains(text, "has taken its place and is Ready") {
		t.Errorf("it ended with %q", text)
	}
	var data map[string]string
	if err := json.Unmarshal([]byte(c.kubectl("-n", revocation.Namespace, "get", "configmap", revocation.ConfigMap, "-o", "jsonpath={.data}")), &data); err != nil {
		t.Fatal(err)
	}
	record, err := revocation.Parse(data)
	e := record["worker-1"]
	if err != nil || e.Reason != "its key was copied" || e.By == "" || e.Removed.IsZero() || e.Replacement == "" || e.Replacement == "worker-1" {
		t.Errorf("entry %+v, %v", e, err)
	}
	st := c.status()
	var names []string
	for _, n := range st.Nodes {
		names = append(names, n.Name)
		if n.State != plan.NodeReady {
			t.Errorf("%s is %s", n.Name, n.State)
		}
	}
	if want := []string{"control-plane-0", "worker-0", e.Replacement}; !slices.Equal(names, want) || len(st.Machines) > 0 {
		t.Errorf("nodes %v and machines %v, want %v alone", names, st.Machines, want)
	}
	// Kubernetes deletes pods of a deleted Node within a minute; their replacements exist
	// earlier.
	await(90*time.Second, "4 replicas are ready, none on the old node", func() bool {
		return replicas() == "4" && !strings.Contains(c.kubectl("get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].spec.nodeName}"), "worker-1")
	})
	if got := c.kubectl("get", "events", "--field-selector", "reason=MachineRevoked", "-o", "jsonpath={.items[*].message}"); !strings.Contains(got, "its key was copied") {
		t.Errorf("events %q", got)
	}
	if out := c.run(time.Minute, "history").want(plan.ExitDone).stdout; !strings.Contains(out, "machine-revoke-") || !strings.Contains(out, "worker-1") {
		t.Errorf("history:\n%s", out)
	}
	if left := c.kubectl("get", "pendingnodes", "-o", "name"); left != "" {
		t.Errorf("left %s", left)
	}
	c.run(time.Minute, "machine", "revoke", "worker-1", "--replace", "--yes").want(plan.ExitNothing)

	c.writesNothing(stolen, "worker-1")
}

// The control plane on which the operator started is revoked and replaced: the operator continues on
// another one, the member leaves etcd before the machine is deleted, and a new control plane joins.
// The revocation is refused while no other control plane takes pods.
func TestRevokeOfAControlPlaneOnSimulatedMachines(t *testing.T) {
	t.Parallel()
	c, _ := newCluster(t, simulatedMachines, 3, 1)
	const leader = "control-plane-0" // the operator was installed when this was the only control plane
	if got := c.kubectl("-n", revocation.Namespace, "get", "pods", "-o", `jsonpath={range .items[*]}{.metadata.name} {.spec.nodeName}{"\n"}{end}`); !strings.Contains(got, " "+leader) {
		t.Fatalf("no pod of ours is on %s:\n%s", leader, got)
	}
	stolen := c.stolenCredentials(leader)

	var others []string
	for _, n := range c.status().Nodes {
		if strings.HasPrefix(n.Name, "control-plane-") && n.Name != leader {
			others = append(others, n.Name)
		}
	}
	for _, name := range others {
		c.kubectl("cordon", name)
	}
	if r := c.run(time.Minute, "machine", "revoke", leader, "--non-interactive", "--yes").want(plan.ExitBlocked); !strings.Contains(r.stdout+r.stderr, "no other control plane takes the pods of the operator") {
		t.Errorf("all others are cordoned:\n%s\n%s", r.stdout, r.stderr)
	}
	for _, name := range others {
		c.kubectl("uncordon", name)
	}

	began := time.Now()
	c.run(8*time.Minute, "machine", "revoke", leader, "--replace", "--non-interactive", "--yes").want(plan.ExitDone)
	t.Logf("%s revoked and replaced in %v", leader, time.Since(began).Round(100*time.Millisecond))
	var controlPlanes []string
	for _, n := range c.status().Nodes {
		if n.State != plan.NodeReady {
			t.Errorf("%s is %s", n.Name, n.State)
		}
		if strings.HasPrefix(n.Name, "control-plane-") {
			controlPlanes = append(controlPlanes, n.Name)
		}
	}
	if len(controlPlanes) != 3 || slices.Contains(controlPlanes, leader) || !slices.Contains(controlPlanes, others[0]) || !slices.Contains(controlPlanes, others[1]) {
		t.Errorf("control planes %v, want %v and another one than %s", controlPlanes, others, leader)
	}
	if left := c.kubectl("get", "pendingnodes", "-o", "name"); left != "" {
		t.Errorf("left %s", left)
	}
	c.writesNothing(stolen, leader)
}

// stolenCredentials is what root on a simulated machine can copy: the kubeconfig of its
// kubelet.
func (c *cloud) stolenCredentials(machine string) *kubernetes.Clientset {
	c.t.Helper()
	file := ""
	_ = filepath.WalkDir(c.sandboxDir(), func(p string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && strings.Contains(p, "/"+machine+"/") && strings.HasSuffix(p, "/etc/kubernetes/kubelet.conf") {
			file = p
			return fs.SkipAll
		}
		return nil // a process may remove files meanwhile
	})
	if file == "" {
		c.t.Fatalf("%s has no kubeconfig in %s", machine, c.sandboxDir())
	}
	own, err := clientcmd.BuildConfigFromFlags("", file)
	if err != nil {
		c.t.Fatal(err)
	}
	if own.CertFile != "" {
		if own.CertData, err = os.ReadFile(own.CertFile); err != nil {
			c.t.Fatal(err)
		}
		if own.KeyData, err = os.ReadFile(own.KeyFile); err != nil {
			c.t.Fatal(err)
		}
	}
	admin, err := clientcmd.BuildConfigFromFlags("", filepath.Join(c.dir, workspace.KubeconfigFile))
	if err != nil {
		c.t.Fatal(err)
	}
	k, err := kubernetes.NewForConfig(&rest.Config{Host: admin.Host, TLSClientConfig: rest.TLSClientConfig{CAData: admin.CAData, ServerName: admin.ServerName, CertData: own.CertData, KeyData: own.KeyData}})
	if err != nil {
		c.t.Fatal(err)
	}
	return k
}

// writesNothing attempts every write that a kubelet is permitted.
func (c *cloud) writesNothing(k *kubernetes.Clientset, name string) {
	c.t.Helper()
	ctx := c.t.Context()
	for what, try := range map[string]func() error{
		"register its Node again": func() error {
			_, err := k.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
			return err
		},
		"make a mirror pod": func() error {
			_, err := k.CoreV1().Pods("default").Create(ctx, &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: "mirror", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "x"}},
				Spec:       corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{Name: "a", Image: "a"}}},
			}, metav1.CreateOptions{})
			return err
		},
		"record an event": func() error {
			_, err := k.CoreV1().Events("default").Create(ctx, &corev1.Event{ObjectMeta: metav1.ObjectMeta{Name: "e", Namespace: "default"}, InvolvedObject: corev1.ObjectReference{Namespace: "default"}}, metav1.CreateOptions{})
			return err
		},
	} {
		if err := try(); err == nil {
			c.t.Errorf("a revoked machine could %s", what)
		}
	}
}
