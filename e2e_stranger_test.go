package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/internal/testneeds"
)

// strangerInit is the configuration of a plain kubeadm. It differs from kubeadm's defaults only in
// what machines that are containers need.
const strangerInit = `apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
nodeRegistration:
  criSocket: unix:///run/containerd/containerd.sock
  ignorePreflightErrors: [SystemVerification, Swap, Mem, NumCPU]
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: %s
controlPlaneEndpoint: 10.42.0.1:6443
networking: {podSubnet: 10.244.0.0/16}
apiServer: {certSANs: [127.0.0.1]}
controllerManager: {extraArgs: [{name: allocate-node-cidrs, value: "false"}]}
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: systemd
failCgroupV1: false
failSwapOn: false
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`

// strangerWeb runs on any node, and its budget never allows the eviction of its only pod.
const strangerWeb = `apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 100, preference: {matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [worker-0]}]}}]}}
      tolerations: [{key: node-role.kubernetes.io/control-plane, operator: Exists}]
      containers: [{name: web, image: "%s", command: [/agnhost, pause]}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: web}
spec: {minAvailable: 1, selector: {matchLabels: {app: web}}}
`

// TestStranger makes a cluster by plain kubeadm init and join on machines without anything of ours. A user who has only the program and a kubeconfig
// checks, watches and backs it up, and a running drain that cannot end is untied by the command of
// the advice.
//
//	CONSTELLATION_E2E_STRANGER=1 go test -run TestStranger .
func TestStranger(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_STRANGER", "a minute or two")
	const version = "v1.35.4"
	c := newCloud(t, 1, 1, "--kubernetes", version)
	// What the user has: a kubeconfig, the program, and an empty folder.
	kubeconfig, home := c.plainKubeadm(version, 1, 1), t.TempDir()
	env := append(os.Environ(), "NO_COLOR=1", "KUBECONFIG="+kubeconfig, "PATH="+c.bin+":"+os.Getenv("PATH"))
	user := func(args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "constellation"), args...)
		cmd.Dir, cmd.Env = home, env
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Run(); err != nil {
			t.Fatalf("constellation %s: %v\n%s%s", strings.Join(args, " "), err, out.String(), errs.String())
		}
		return out.String()
	}
	kubectl := func(ctx context.Context, in string, args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "kubectl"), append([]string{"--kubeconfig", kubeconfig}, args...)...)
		cmd.Stdin = strings.NewReader(in)
		b, err := cmd.CombinedOutput()
		return string(b), err
	}
	mustKubectl := func(in string, args ...string) string {
		t.Helper()
		out, err := kubectl(t.Context(), in, args...)
		if err != nil {
			t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return out
	}
	mustKubectl("", "wait", "nodes", "--all", "--for=condition=Ready", "--timeout=110s")
	mustKubectl("", "-n", "kube-system", "rollout", "status", "daemonset/kube-proxy", "--timeout=110s")
	mustKubectl("", "-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=110s")
	mustKubectl("", "-n", "kube-system", "wait", "pods", "--all", "--for=condition=Ready", "--timeout=110s")
	if out := mustKubectl("", "get", "crds,namespaces", "-o", "name"); strings.Contains(out, "edgeless") || strings.Contains(out, "constellation") {
		t.Fatalf("the cluster has something of ours:\n%s", out)
	}

	var k check.ClusterCheck
	checked := func() {
		t.Helper()
		k = check.ClusterCheck{}
		out := user("check", "-o", "json")
		if err := json.Unmarshal([]byte(out), &k); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	began := time.Now()
	checked()
	t.Logf("the first check took %s", time.Since(began).Round(10*time.Millisecond))
	if k.Kubernetes != version || k.Distribution.Name != "kubeadm" || len(k.Hops) != 1 {
		t.Errorf("checked %s of %s in %d hops", k.Kubernetes, k.Distribution.Name, len(k.Hops))
	}
	for _, f := range k.Findings() {
		if f.Severity != plan.Info {
			t.Logf("%s %s: %s", f.Severity, f.ID, f.Title)
		}
		if f.Severity == plan.Block || f.Severity == plan.Warn {
			t.Errorf("a new cluster has the finding %s: %s", f.ID, f.Title)
		}
	}
	user("check", "--dry-run-requests")

	mustKubectl(fmt.Sprintf(strangerWeb, agnhost), "apply", "-f", "-")
	mustKubectl("", "rollout", "status", "deployment/web", "--timeout=110s")
	if node := mustKubectl("", "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].spec.nodeName}"); node != "worker-0" {
		t.Fatalf("the pod runs on %s, want worker-0", node)
	}
	checked()
	if !slices.ContainsFunc(k.Findings(), func(f plan.Finding) bool { return f.ID == "pdb-room" && f.Severity == plan.Block }) {
		t.Errorf("the budget is not reported before the drain")
	}
	type drained struct {
		out string
		err error
	}
	draining := make(chan drained, 1)
	go func() {
		out, err := kubectl(t.Context(), "", "drain", "worker-0", "--ignore-daemonsets", "--timeout=180s")
		draining <- drained{out, err}
	}()
	var advice plan.Finding
	for deadline := time.Now().Add(time.Minute); advice.Command == ""; time.Sleep(time.Second) {
		checked()
		for _, f := range k.Findings() {
			if f.ID == "stuck-drain" && f.Command != "" && slices.Contains(f.Objects, "poddisruptionbudget/default/web") {
				advice = f
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("no advice within a minute: %+v", k.Findings())
		}
	}
	for _, verb := range []string{"status -o json", "watch --once"} {
		if out := user(strings.Fields(verb)...); !strings.Contains(strings.Join(strings.Fields(out), " "), advice.Command) {
			t.Errorf("%s lacks the advice %q:\n%s", verb, advice.Command, out)
		}
	}
	select {
	case d := <-draining:
		t.Fatalf("the drain ended before the advice: %v, %s", d.err, d.out)
	default:
	}
	t.Logf("advice: %s", advice.Command)
	cmd := exec.CommandContext(t.Context(), "sh", "-c", advice.Command)
	cmd.Env = env
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", advice.Command, err, out)
	}
	if d := <-draining; d.err != nil {
		t.Fatalf("`%s` did not untie the drain: %v, %s", advice.Command, d.err, d.out)
	}

	user("backup", "create", "--context", k.Name)
	if all, _ := filepath.Glob(filepath.Join(home, engine.FolderOf(k.Name), "constellation-upgrade", "backup-*", "backups", "manifest.json")); len(all) != 1 {
		t.Errorf("%d backups in the folder of the context, want 1", len(all))
	}
	if out := user("-C", engine.FolderOf(k.Name), "backup", "list"); !strings.Contains(out, "backup-") {
		t.Errorf("backup list does not list the backup:\n%s", out)
	}
}
