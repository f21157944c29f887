package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/check"
	"constellation/engine/plan"
)

// trouble has obstacles to an upgrade, one of each kind: an aggregated API without a backend,
// a PodDisruptionBudget that allows no disruption, a webhook with a single pod.
var trouble = `
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.broken.example.com}
spec:
  group: broken.example.com
  version: v1
  groupPriorityMinimum: 100
  versionPriority: 10
  insecureSkipTLSVerify: true
  service: {name: gone, namespace: shop}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: frontend, namespace: shop}
spec:
  replicas: 2
  selector: {matchLabels: {app: frontend}}
  template:
    metadata: {labels: {app: frontend}}
    spec:
      containers: [{name: web, image: "` + agnhost + `", args: [netexec, --http-port=8080]}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: frontend, namespace: shop}
spec:
  minAvailable: 2
  selector: {matchLabels: {app: frontend}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: guard, namespace: shop}
spec:
  replicas: 1
  selector: {matchLabels: {app: guard}}
  template:
    metadata: {labels: {app: guard}}
    spec:
      containers: [{name: web, image: "` + agnhost + `", args: [netexec, --http-port=8443]}]
---
apiVersion: v1
kind: Service
metadata: {name: guard, namespace: shop}
spec:
  selector: {app: guard}
  ports: [{port: 443, targetPort: 8443}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: shop-guard}
webhooks:
- name: guard.shop.example.com
  failurePolicy: Fail
  sideEffects: None
  admissionReviewVersions: [v1]
  timeoutSeconds: 5
  clientConfig: {service: {name: guard, namespace: shop, path: /}}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: shop}}
`

// oldAPI is an object that a client writes through an API that v1.37 removes.
const oldAPI = `
apiVersion: networking.k8s.io/v1beta1
kind: ServiceCIDR
metadata: {name: extra}
spec: {cidrs: [10.200.0.0/24]}
`

// check runs `upgrade check -o json`.
func (c *cloud) check(code int, args ...string) check.Check {
	c.t.Helper()
	var k check.Check
	out := c.run(2*time.Minute, append([]string{"upgrade", "check", "-o", "json"}, args...)...).want(code).stdout
	if err := json.Unmarshal([]byte(out), &k); err != nil {
		c.t.Fatalf("upgrade check: %v\n%s", err, tail(out))
	}
	return k
}

// severe lists findings above info, such as "block pdb-room".
func severe(k check.Check) []string {
	var out []string
	for _, f := range k.Findings {
		if f.Severity != plan.Info {
			out = append(out, string(f.Severity)+" "+f.ID)
		}
	}
	return out
}

// apply runs kubectl apply with a field manager.
func (c *cloud) apply(manager, objects string) {
	c.t.Helper()
	file := filepath.Join(c.t.TempDir(), "objects.yaml")
	if err := os.WriteFile(file, []byte(objects), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.kubectl("apply", "--field-manager="+manager, "-f", file)
}

// eventually runs kubectl until its output meets a condition.
func (c *cloud) eventually(limit time.Duration, what string, wanted func(out string) bool, args ...string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for {
		cmd := c.inNetwork(ctx, append([]string{filepath.Join(c.bin, "kubectl"), "--kubeconfig", filepath.Join(c.dir, "constellation-admin.conf")}, args...)...)
		out, err := cmd.CombinedOutput()
		if err == nil && wanted(string(out)) {
			return
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("timeout after %v waiting until %s: kubectl %s: %v\n%s", limit, what, strings.Join(args, " "), err, tail(string(out)))
		case <-time.After(time.Second):
		}
	}
}

// isClean runs upgrade check on a clean cluster of an older release: the only finding is the
// missing backup, and after a backup there is none. Real machines have containerd 1.x, which is
// reported one minor before kubelets refuse it.
func (c *cloud) isClean(kind machineKind) {
	t := c.t
	t.Helper()
	// Without a goal, the path leads to the newest minor that this computer has compiled.
	flags := []string{"--exit-code", "--kubernetes", next}
	var always []string
	if kind == realMachines {
		always = []string{"warn container-runtime"}
	}
	got := severe(c.check(plan.ExitUpgradeAvailable, flags...))
	if slices.Sort(got); !slices.Equal(got, append([]string{"warn backup-age"}, always...)) {
		t.Errorf("a cluster that was never backed up: %q", got)
	}
	c.run(2*time.Minute, "backup", "create").want(plan.ExitDone)
	k := c.check(plan.ExitUpgradeAvailable, flags...)
	if got := severe(k); !slices.Equal(got, always) {
		t.Errorf("a clean cluster: %q: %+v", got, k.Findings)
	}
	if len(k.Path) == 0 || k.Path[0].To.Release != "v1.1.0" || k.Path[0].To.Image != "v1.1.0" || k.Path[0].To.Kubernetes != current || k.Path[0].Get != "" {
		t.Errorf("path %+v, want release v1.1.0 with this program first", k.Path)
	}
	if k.Changes == nil || k.Changes.Nodes["control-plane"] != 1 || len(k.Changes.Measurements) == 0 || k.Changes.Most == 0 {
		t.Errorf("changes %+v", k.Changes)
	}
	c.kubectl("get", "nodes") // the check has left everything as it was
	if out := c.kubectl("get", "events", "-A", "--field-selector=reason=Evicted", "-o", "name"); strings.Contains(out, "event") {
		t.Errorf("the check evicted pods: %s", out)
	}
}

// findsTrouble plants obstacles in a clean cluster. The check must find all of them and
// nothing else.
func (c *cloud) findsTrouble() {
	t := c.t
	t.Helper()
	c.apply("kubectl", trouble)
	for name, replicas := range map[string]string{"frontend": "2", "guard": "1"} {
		c.eventually(5*time.Minute, "deployment "+name+" is available", func(out string) bool { return out == replicas },
			"-n", "shop", "get", "deployment", name, "-o", "jsonpath={.status.availableReplicas}")
	}
	const manifest = "etc/kubernetes/manifests/kube-apiserver.yaml"
	c.run(time.Minute, "sandbox", "shell", "control-plane-0", "--", "sed", "-i",
		`s|    - kube-apiserver$|&\n    - --runtime-config=networking.k8s.io/v1beta1=true|`, manifest).want(0)
	c.eventually(2*time.Minute, "the API is served", func(string) bool { return true }, "get", "--raw", "/apis/networking.k8s.io/v1beta1")
	c.eventually(5*time.Minute, "the API server's pod runs with the new argument", func(pod string) bool {
		return strings.Contains(pod, "--runtime-config=networking.k8s.io/v1beta1=true") && strings.Contains(pod, "Ready=True")
	}, "-n", "kube-system", "get", "pod", "kube-apiserver-control-plane-0", "-o", `jsonpath={.spec.containers[0].command} {range .status.conditions[*]}{.type}={.status} {end}`)
	c.apply("argocd-controller", oldAPI)

	// The budget's pods and the webhook's pod run on workers. The second hop replaces the
	// workers if the mirror has its Kubernetes, which is not certain, so the test takes both
	// targets from the path.
	path := c.check(plan.ExitDone, "--no-preflight").Path
	want := []string{"block api-services", "warn webhook-ca", "warn webhook-exemption"}
	if len(path) > 1 {
		want = append(want, "warn webhook-one-node", "warn pdb-room", "warn drain-rehearsal", "warn removed-apis-used", "warn single-replica")
	} else if path[0].ReplaceWorkers {
		want = append(want, "block webhook-one-node", "block pdb-room", "block drain-rehearsal", "warn single-replica")
	}
	slices.Sort(want)
	// The controllers lost their leases with the API server; the check reports that until
	// they have them again.
	var found check.Check
	for deadline := time.Now().Add(4 * time.Minute); ; time.Sleep(time.Second) {
		found = c.check(plan.ExitBlocked, "--exit-code")
		got := severe(found)
		slices.Sort(got)
		d := cmp.Diff(want, got)
		if d == "" {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("planted trouble (-want +got):\n%s", d)
			break
		}
	}
	for _, f := range found.Findings {
		switch {
		case f.Severity == plan.Info:
		case f.Title == "" || f.Reference == "" || f.Remedy == "" && f.Command == "":
			t.Errorf("finding without detail or remedy: %+v", f)
		case f.ID == "removed-apis-used" && f.Owner != "argocd-controller":
			t.Errorf("owner %q", f.Owner)
		case f.ID == "pdb-room" && !strings.Contains(f.Command, "patch poddisruptionbudget frontend"):
			t.Errorf("command %q", f.Command)
		}
	}

	// A kubelet overwrites its version within seconds, so the test checks until the planted
	// version was seen.
	seen := false
	for range 20 {
		var node struct {
			Status struct {
				NodeInfo map[string]any `json:"nodeInfo"`
			} `json:"status"`
		}
		if err := json.Unmarshal([]byte(c.kubectl("get", "--raw", "/api/v1/nodes/worker-1")), &node); err != nil {
			t.Fatal(err)
		}
		node.Status.NodeInfo["kubeletVersion"] = "v1.31.9"
		patch, err := json.Marshal(node)
		if err != nil {
			t.Fatal(err)
		}
		c.kubectl("patch", "node", "worker-1", "--subresource=status", "--type=merge", "-p", string(patch))
		old := c.check(plan.ExitDone)
		if seen = slices.ContainsFunc(old.Findings, func(f plan.Finding) bool {
			return f.Severity != plan.Info && strings.Contains(fmt.Sprint(f.Title, f.Detail), "v1.31.9")
		}); seen {
			break
		}
	}
	if !seen {
		t.Error("an old kubelet was not found")
	}

	c.eventually(2*time.Minute, "the kubelet has corrected its version", func(v string) bool { return v == current },
		"get", "node", "worker-1", "-o", "jsonpath={.status.nodeInfo.kubeletVersion}")
	before, err := os.ReadFile(filepath.Join(c.dir, "constellation-conf.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	written := c.check(plan.ExitDone, "--write-config", "--to", "v1.1.0", "--no-preflight")
	after, err := os.ReadFile(filepath.Join(c.dir, "constellation-conf.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if written.Config == nil || !written.Config.Written || !strings.Contains(string(after), "microserviceVersion: v1.1.0") || strings.Count(string(after), "#") < strings.Count(string(before), "#") {
		t.Errorf("written %+v:\n%s", written.Config, after)
	}
	c.run(time.Minute, "config", "validate").want(plan.ExitDone)
}

// restores takes a backup, deletes objects, and restores them unchanged.
func (c *cloud) restores() {
	t := c.t
	t.Helper()
	c.apply("kubectl", definition)
	c.kubectl("wait", "crd/widgets.example.com", "--for=condition=Established", "--timeout=110s")
	c.apply("kubectl", widget)
	c.run(2*time.Minute, "backup", "create").want(plan.ExitDone)
	var list struct{ Backups []struct{ ID string } }
	if err := json.Unmarshal([]byte(c.run(time.Minute, "backup", "list", "-o", "json").want(plan.ExitDone).stdout), &list); err != nil || len(list.Backups) == 0 {
		t.Fatalf("backups %+v, %v", list, err)
	}
	id := list.Backups[0].ID // the newest
	restore := []string{"backup", "restore", id, "--non-interactive", "--only", "example.com/widgets"}
	c.kubectl("delete", "crd", "widgets.example.com")
	c.run(time.Minute, restore...).want(plan.ExitUnacknowledged)
	c.run(2*time.Minute, append(restore, "--yes")...).want(plan.ExitDone)
	if size := c.kubectl("get", "widget", "kept", "-o", "jsonpath={.spec.size}"); size != "3" {
		t.Errorf("the restored object has the size %q", size)
	}
	c.run(time.Minute, append(restore, "--yes")...).want(plan.ExitNothing)
}

// definition and widget are a custom resource and its definition.
const (
	definition = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: widgets, singular: widget, kind: Widget, listKind: WidgetList}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`
	widget = `
apiVersion: example.com/v1
kind: Widget
metadata: {name: kept, namespace: default}
spec: {size: 3}
`
)
