package main

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"constellation/engine/cluster"
	"constellation/engine/kube"
	"constellation/engine/sandbox/controlplane"
	"constellation/tui"
)

// auditPolicy records all requests, without their content.
const auditPolicy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n"

// TestMCPOnARealControlPlane calls every tool for a real API server with the SDK's own client. By
// the API server's audit log, the server only read. Answers contain no values of Secrets.
func TestMCPOnARealControlPlane(t *testing.T) {
	dir := t.TempDir()
	policy, log := filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "audit.log")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		t.Fatal(err)
	}
	cp := controlplane.ForTest(t, controlplane.Options{APIServerArgs: []string{
		"--disable-admission-plugins=ServiceAccount", "--audit-policy-file=" + policy, "--audit-log-path=" + log, "--audit-log-mode=blocking-strict",
	}})
	admin, err := kubernetes.NewForConfig(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	const value = "value-of-a-secret-7391"
	plantForAssistants(t, admin, value)

	user, err := cp.ConfigFor("assistant", "system:masters")
	if err != nil {
		t.Fatal(err)
	}
	selected, err := kube.NewClusters().Select(cluster.Access{Kubeconfig: writeKubeconfig(t, dir, user)})
	if err != nil {
		t.Fatal(err)
	}
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	served := make(chan error, 1)
	go func() { served <- serveMCP(t.Context(), tui.MCPRequest{Selected: selected, In: inR, Out: outW}) }()
	c, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "v1"}, nil).Connect(t.Context(), &mcp.IOTransport{Reader: outR, Writer: inW}, nil)
	if err != nil {
		t.Fatal(err)
	}
	listed, err := c.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	answers := map[string]string{}
	for _, tool := range listed.Tools {
		args := map[string]any{}
		if tool.Name == "findings" {
			args["limit"] = 100
		}
		r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: tool.Name, Arguments: args})
		if err != nil || r.IsError {
			t.Fatalf("%s: %v %+v", tool.Name, err, r)
		}
		answers[tool.Name] = r.Content[0].(*mcp.TextContent).Text
		if strings.Contains(answers[tool.Name], value) || strings.Contains(answers[tool.Name], "PRIVATE KEY") {
			t.Errorf("%s: the answer contains a secret: %s", tool.Name, answers[tool.Name])
		}
	}
	for tool, wants := range map[string][]string{
		"check":    {`"kubernetes":"v1.`, `"id":"pdb-room"`, `"severity":"block"`},
		"findings": {"poddisruptionbudget", "kubectl"},
		"status":   {`"state":"reachable"`, `"name":"worker-1"`, `"id":"nodes-not-ready"`},
		"history":  {"without one"},
	} {
		for _, want := range wants {
			if !strings.Contains(answers[tool], want) {
				t.Errorf("%s: the answer lacks %s: %s", tool, want, answers[tool])
			}
		}
	}
	c.Close()
	inW.Close()
	if err := <-served; err != nil {
		t.Errorf("the server ended with %v", err)
	}
	wantOnlyReads(t, log, "assistant")
}

// plantForAssistants makes a node, a budget that blocks a drain, and Secrets with a value.
func plantForAssistants(t *testing.T, admin kubernetes.Interface, value string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx, meta := t.Context(), func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name, Namespace: "default"} }
	_, err := admin.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-1"}}, metav1.CreateOptions{})
	must(err)
	labels := map[string]string{"app": "web"}
	pod := &corev1.Pod{ObjectMeta: meta("web-0"), Spec: corev1.PodSpec{NodeName: "worker-1", Containers: []corev1.Container{{
		Name: "web", Image: "web", Env: []corev1.EnvVar{{Name: "PASSWORD", Value: value}},
	}}}}
	pod.Labels = labels
	pod, err = admin.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{})
	must(err)
	pod.Status.Phase = corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	_, err = admin.CoreV1().Pods("default").UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	must(err)
	all := intstr.FromString("100%")
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: meta("web"), Spec: policyv1.PodDisruptionBudgetSpec{MinAvailable: &all, Selector: &metav1.LabelSelector{MatchLabels: labels}}}
	budget, err = admin.PolicyV1().PodDisruptionBudgets("default").Create(ctx, budget, metav1.CreateOptions{})
	must(err)
	budget.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: budget.Generation, CurrentHealthy: 1, DesiredHealthy: 1, ExpectedPods: 1}
	_, err = admin.PolicyV1().PodDisruptionBudgets("default").UpdateStatus(ctx, budget, metav1.UpdateOptions{})
	must(err)
	secret := &corev1.Secret{ObjectMeta: meta("database"), StringData: map[string]string{"password": value}}
	secret.Annotations = map[string]string{"kubectl.kubernetes.io/last-applied-configuration": `{"stringData":{"password":"` + value + `"}}`}
	_, err = admin.CoreV1().Secrets("default").Create(ctx, secret, metav1.CreateOptions{})
	must(err)
	release := &corev1.Secret{ObjectMeta: meta("sh.helm.release.v1.web.v1"), Type: "helm.sh/release.v1", StringData: map[string]string{"release": value}}
	release.Labels = map[string]string{"owner": "helm", "name": "web", "status": "deployed", "version": "1"}
	_, err = admin.CoreV1().Secrets("default").Create(ctx, release, metav1.CreateOptions{})
	must(err)
}

// writeKubeconfig writes a kubeconfig with one context and returns its path.
func writeKubeconfig(t *testing.T, dir string, c *rest.Config) string {
	t.Helper()
	k := clientcmdapi.NewConfig()
	k.Clusters["c"] = &clientcmdapi.Cluster{Server: c.Host, CertificateAuthorityData: c.CAData}
	k.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: c.CertData, ClientKeyData: c.KeyData}
	k.Contexts["foreign"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	k.CurrentContext = "foreign"
	path := filepath.Join(dir, "kubeconfig")
	if err := clientcmd.WriteToFile(*k, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// wantOnlyReads reads an audit log and reports requests of a user that do more than read.
func wantOnlyReads(t *testing.T, log, user string) {
	t.Helper()
	f, err := os.Open(log)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	reads := 0
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e struct {
			Verb, RequestURI string
			User             struct{ Username string }
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatal(err)
		}
		if e.User.Username != user {
			continue
		}
		if !slices.Contains([]string{"get", "list", "watch"}, e.Verb) {
			t.Errorf("the server sent %s %s", e.Verb, e.RequestURI)
		}
		reads++
	}
	if err := lines.Err(); err != nil || reads < 20 {
		t.Errorf("%d requests of %s in the audit log, want at least 20; %v", reads, user, err)
	}
}
