package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/kube"
	"constellation/engine/sandbox/controlplane"
	"constellation/tui"
)

// runHere runs the program in this process, without a terminal.
func runHere(args ...string) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	a := tui.App{Release: "v1.1.0", Program: "constellation", Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Engine: newEngine, Clusters: kube.NewClusters(), Env: func(string) string { return "" }}
	code = a.Run(args)
	return out.String(), errs.String(), code
}

// TestBackupOfSilentCluster checks that a backup of a cluster that does not answer fails fast and
// leaves no file.
func TestBackupOfSilentCluster(t *testing.T) {
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer silent.Close()
	gone := httptest.NewServer(nil)
	gone.Close()
	path := filepath.Join(t.TempDir(), "config")
	kubeconfig := fmt.Sprintf(`apiVersion: v1
kind: Config
contexts: [{name: silent, context: {cluster: silent, user: u}}, {name: gone, context: {cluster: gone, user: u}}]
clusters: [{name: silent, cluster: {server: %q}}, {name: gone, cluster: {server: %q}}]
users: [{name: u, user: {token: x}}]
`, silent.URL, gone.URL)
	if err := os.WriteFile(path, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, context, format string }{
		{name: "the connection is refused", context: "gone", format: "text"},
		{name: "no answer", context: "silent", format: "text"},
		{name: "no answer, as events", context: "silent", format: "json"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			t.Chdir(dir)
			started := time.Now()
			out, errs, code := runHere("backup", "create", "--kubeconfig", path, "--context", tt.context, "--request-timeout", "300ms", "-o", tt.format)
			if took := time.Since(started); code != 1 || took > 15*time.Second {
				t.Errorf("exit %d after %s, want 1 at once", code, took)
			}
			if want := "kubectl --kubeconfig " + path + " --context " + tt.context + " version"; !strings.Contains(out+errs, "does not answer") || !strings.Contains(out+errs, want) {
				t.Errorf("no cause or no remedy %q in\n%s%s", want, out, errs)
			}
			if tt.format == "json" && !strings.Contains(out, `"kind":"result"`) {
				t.Errorf("no result in %s", out)
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// TestVerbsOnAnyCluster runs the verbs without a workspace on a real API server that has nothing of
// ours, with a planted drain that a budget blocks.
func TestVerbsOnAnyCluster(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"}})
	core, err := kubernetes.NewForConfig(cp.Config())
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(err)
	ctx := t.Context()
	for _, name := range []string{"node-a", "node-b"} {
		n, err := core.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{Unschedulable: name == "node-b"}}, metav1.CreateOptions{})
		must(err)
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		n.Status.NodeInfo.KubeletVersion = "v1.35.1"
		_, err = core.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{})
		must(err)
	}
	p, err := core.CoreV1().Pods("default").Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{"app": "web"}},
		Spec:       corev1.PodSpec{NodeName: "node-b", Containers: []corev1.Container{{Name: "c", Image: "example.com/c:1"}}},
	}, metav1.CreateOptions{})
	must(err)
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	_, err = core.CoreV1().Pods("default").UpdateStatus(ctx, p, metav1.UpdateOptions{})
	must(err)
	b, err := core.PolicyV1().PodDisruptionBudgets("default").Create(ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MaxUnavailable: new(intstr.FromInt32(0)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
	}, metav1.CreateOptions{})
	must(err)
	b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: b.Generation, ExpectedPods: 1, CurrentHealthy: 1, DesiredHealthy: 1}
	_, err = core.PolicyV1().PodDisruptionBudgets("default").UpdateStatus(ctx, b, metav1.UpdateOptions{})
	must(err)

	dir := t.TempDir()
	t.Chdir(dir)
	kubeconfig, err := cp.Kubeconfig()
	must(err)
	path := filepath.Join(t.TempDir(), "config")
	must(os.WriteFile(path, kubeconfig, 0o600))
	sel, err := kube.NewClusters().Contexts(cluster.Access{Kubeconfig: path})
	must(err)
	run := runHere
	const command = `kubectl -n default patch poddisruptionbudget web --type=merge -p '{"spec":{"maxUnavailable":1}}'`
	for _, tt := range []struct {
		args []string
		want []string
	}{
		{[]string{"watch", "--once", "--kubeconfig", path, "--request-timeout", "20s"}, []string{"1 of 2 nodes ready and not cordoned", "node-b", "cordoned", "node node-b waits for pod default/web: PodDisruptionBudget default/web allows no eviction", command, "Risk: ", "The cluster has no NodeVersion"}},
		{[]string{"status", "--kubeconfig", path, "--context", sel[0]}, []string{"2 of 2 nodes ready, 1 cordoned", "v1.35.1", "waits for pod default/web", strings.TrimPrefix(command, "kubectl "), "Risk: ", "The cluster has no NodeVersion"}},
		{[]string{"status", "--kubeconfig", path, "--as", "stranger"}, []string{"nodes could not be read"}},
		{[]string{"check", "--kubeconfig", path}, []string{"node node-b waits for pod default/web"}},
	} {
		out, errs, code := run(tt.args...)
		if code != 0 {
			t.Errorf("%v: exit %d: %s", tt.args, code, errs)
		}
		flat := strings.Join(strings.Fields(out+errs), " ")
		for _, w := range tt.want {
			if !strings.Contains(flat, w) {
				t.Errorf("%v: no %q in\n%s%s", tt.args, w, out, errs)
			}
		}
	}
	var st engine.Status
	out, _, _ := run("status", "-o", "json", "--kubeconfig", path)
	if err := json.Unmarshal([]byte(out), &st); err != nil || !st.Unmanaged || !st.Reachable || len(st.Nodes) != 2 || st.Counts["cordoned"] != 1 || len(st.Health) != 2 || st.Health[1].Command != command {
		t.Errorf("status as JSON: %v: %s", err, out)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("verbs that read left files: %v, %v", entries, err)
	}

	out, errs, code := run("backup", "create", "--kubeconfig", path)
	if code != 0 || !strings.Contains(out, "without a snapshot of etcd") {
		t.Errorf("backup: exit %d: %s%s", code, out, errs)
	}
	if all, _ := filepath.Glob(filepath.Join(dir, engine.FolderOf(sel[0]), "constellation-upgrade", "backup-*", "backups", "manifest.json")); len(all) == 0 {
		t.Errorf("no backup in a folder with the name of the context: %s", out)
	}
	if out, errs, code := run("-C", engine.FolderOf(sel[0]), "backup", "list"); code != 0 || !strings.Contains(out, "backup-") {
		t.Errorf("backup list: exit %d: %s%s", code, out, errs)
	}
	for _, verb := range [][]string{{"watch", "--once"}, {"status"}, {"backup", "create"}} {
		if _, errs, code := run(append(verb, "--kubeconfig", path, "--context", "none")...); code != 2 || !strings.Contains(errs, sel[0]) {
			t.Errorf("%v with a context that does not exist: exit %d: %s", verb, code, errs)
		}
	}
	cp.StopAPIServer()
	for _, verb := range [][]string{{"watch", "--once"}, {"status"}} {
		if _, errs, code := run(append(verb, "--kubeconfig", path)...); code != 1 {
			t.Errorf("%v without an API server: exit %d: %s", verb, code, errs)
		}
	}
}
