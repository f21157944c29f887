package kube

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/engine/sandbox/controlplane/kubelettest"
	"constellation/engine/support"
)

// bundleFiles returns the files of a bundle by their names below its folder.
func bundleFiles(t *testing.T, file string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	gz, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for r := tar.NewReader(gz); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		_, name, _ := strings.Cut(h.Name, "/")
		out[name] = string(b)
	}
}

// The values that no bundle may have, by where they are planted.
const (
	inSecret      = "canary-of-a-secret-01"
	inVariable    = "canary-of-a-variable-02"
	inAnnotation  = "canary-of-an-annotation-03"
	inApplied     = "canary-of-last-applied-04"
	inConfigMap   = "canary-of-a-configmap-05"
	inBootstrap   = "canary.0123456789abcdef"
	inToken       = "eyJhbGciOiJSUzI1NiJ9.eyJjYW5hcnkiOiJvZi1hLXRva2VuIn0.Y2FuYXJ5LTA2"
	inOtherEvent  = "canary-of-a-workload-07"
	inAddress     = "canary-of-an-address-08"
	inProbe       = "canary-of-a-probe-09"
	inBinaryData  = "canary-of-binary-data-10"
	supportedNode = "node-a"
)

// plantSupport makes objects with planted values, and a pod of the operator that serves metrics at a port.
func plantSupport(t *testing.T, core kubernetes.Interface, metrics int32) {
	t.Helper()
	ctx := t.Context()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(core.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}, metav1.CreateOptions{}))
	must(core.CoreV1().Secrets(Namespace).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"v": inSecret}}, metav1.CreateOptions{}))
	must(core.CoreV1().ConfigMaps("kube-system").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "of-others"}, Data: map[string]string{"v": inConfigMap}}, metav1.CreateOptions{}))
	must(core.CoreV1().ConfigMaps("kube-system").Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "join-config"}, Data: map[string]string{"v": "kept, without " + inBootstrap + " and " + inToken}, BinaryData: map[string][]byte{"b": []byte(inBinaryData)},
	}, metav1.CreateOptions{}))
	must(core.CoreV1().ServiceAccounts(Namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}))
	off := false
	must(core.CoreV1().Pods(Namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "operator-0", Labels: map[string]string{"app.kubernetes.io/name": "constellation-operator"},
			Annotations: map[string]string{"example.com/x": inAnnotation, corev1.LastAppliedConfigAnnotation: `{"v":"` + inApplied + `"}`, "constellation.edgeless.systems/x": "kept"},
		},
		Spec: corev1.PodSpec{
			NodeName: supportedNode, AutomountServiceAccountToken: &off,
			Containers: []corev1.Container{{
				Name: "operator", Image: "operator", Args: []string{"--proxy=http://me:" + inAddress + "@proxy:3128", "--level=info"},
				Env:           []corev1.EnvVar{{Name: "PASSWORD", Value: inVariable}},
				Ports:         []corev1.ContainerPort{{Name: "metrics", ContainerPort: metrics}},
				LivenessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(80), HTTPHeaders: []corev1.HTTPHeader{{Name: "X-Auth", Value: inProbe}}}}},
			}},
		},
	}, metav1.CreateOptions{}))
	p, err := core.CoreV1().Pods(Namespace).Get(ctx, "operator-0", metav1.GetOptions{})
	must(p, err)
	p.Status.Phase = corev1.PodRunning
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "operator", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}, LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 2}}}}
	must(core.CoreV1().Pods(Namespace).UpdateStatus(ctx, p, metav1.UpdateOptions{}))
	event := func(name, kind, message string) {
		must(core.CoreV1().Events("default").Create(ctx, &corev1.Event{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}, InvolvedObject: corev1.ObjectReference{Kind: kind, Name: supportedNode, Namespace: "default"}, Message: message,
		}, metav1.CreateOptions{}))
	}
	event("of-a-node", "Node", "Bearer "+inToken+" was refused, and password="+inConfigMap)
	event("of-a-workload", "Pod", inOtherEvent)
}

// TestSupportBundleOfARealAPIServer has planted values in each kind of object, a kubelet that serves no logs, and an operator.
func TestSupportBundleOfARealAPIServer(t *testing.T) {
	cp := controlplanetest.Lend(t, controlplane.Options{})
	core := kubernetes.NewForConfigOrDie(cp.Config())
	metrics := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "constellation_nodes{class=\"ready\"} 3\n# %s %s\n", r.URL.Path, inBootstrap)
	}))
	defer metrics.Close()
	kubelet := kubelettest.New()
	defer kubelet.Close()
	if err := kubelet.Register(t.Context(), core, supportedNode); err != nil {
		t.Fatal(err)
	}
	plantSupport(t, core, int32(metrics.Listener.Addr().(*net.TCPAddr).Port))
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	kubeconfig, err := cp.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	sel := selectedOf(t, kubeconfig)
	r, err := SupportBundle(t.Context(), support.Request{Cluster: &sel, File: file, Release: "v1.1.0", Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	files := bundleFiles(t, file)
	for name, content := range files {
		for _, canary := range []string{inSecret, inVariable, inAnnotation, inApplied, inConfigMap, "0123456789abcdef", inToken, inOtherEvent, inAddress, inProbe, inBinaryData} {
			if strings.Contains(content, canary) {
				t.Errorf("%s has %s", name, canary)
			}
		}
		if strings.HasSuffix(name, ".json") && !json.Valid([]byte(content)) {
			t.Errorf("%s is no JSON", name)
		}
		if strings.Contains(content, `"kind":"Secret"`) {
			t.Errorf("%s has a Secret", name)
		}
	}
	for name, part := range map[string]string{
		"cluster/version.json":                      `"gitVersion": "` + r.Index.Kubernetes,
		"cluster/readyz.txt":                        "[+]etcd ok",
		"cluster/nodes.json":                        `"name":"` + supportedNode + `"`,
		"cluster/kube-system/configmaps.json":       "kept, without (redacted: bootstrap token) and (redacted: JSON web token)",
		"cluster/constellation-system/pods.json":    `"constellation.edgeless.systems/x":"kept"`,
		"cluster/default/events.json":               "(redacted: ",
		"metrics/operator-0.txt":                    `constellation_nodes{class="ready"} 3`,
		"cluster/failed-requests.txt":               `code="404"`,
		"cluster/constellation-system/pods.json ":   "--level=info",
		"cluster/constellation-system/pods.json  ":  `"name":"PASSWORD","value":"(left out)"`,
		"cluster/constellation-system/pods.json   ": "http://me:(redacted: password in an address)@proxy:3128",
	} {
		if !strings.Contains(files[strings.TrimSpace(name)], part) {
			t.Errorf("%s lacks %s:\n%.2000s", name, part, files[strings.TrimSpace(name)])
		}
	}
	for _, what := range []string{"logs/constellation-system/operator-0/operator.log", "logs/constellation-system/operator-0/operator.previous.log", "nodeversions"} {
		if !slices.ContainsFunc(r.Index.Missing, func(m support.Missing) bool { return strings.Contains(m.What, what) && m.Why != "" }) {
			t.Errorf("%s is not missing: %+v", what, r.Index.Missing)
		}
	}
	if !r.Index.Reachable || r.Index.MissingRules != "" {
		t.Errorf("the index: %+v", r.Index)
	}
}

// TestSupportBundleWithFewRights impersonates a user who may list nodes alone. The missing rules make the bundle complete.
func TestSupportBundleWithFewRights(t *testing.T) {
	cp := controlplanetest.Lend(t, controlplane.Options{})
	core := kubernetes.NewForConfigOrDie(cp.Config())
	grant := func(name string, role *rbacv1.ClusterRole) {
		t.Helper()
		role.Name = name
		if _, err := core.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := core.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}, Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "few"}},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	grant("few", &rbacv1.ClusterRole{Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"list"}}}})
	kubeconfig, err := cp.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	sel, err := Select(cluster.Access{Kubeconfig: path, As: "few"}, "")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	collect := func() support.Result {
		t.Helper()
		r, err := SupportBundle(t.Context(), support.Request{Cluster: &sel, File: file, Overwrite: true, Release: "v1.1.0", Now: time.Now()})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := collect()
	if files := bundleFiles(t, file); !strings.Contains(files["cluster/nodes.json"], "items") || files["cluster/kube-system/pods.json"] != "" {
		t.Error("the bundle has other files than the rights allow")
	}
	denied := 0
	for _, m := range r.Index.Missing {
		if strings.Contains(m.Why, "a right is missing: ") {
			denied++
		}
	}
	if denied < 10 || !strings.Contains(r.Index.MissingRules, "kind: ClusterRole") || !strings.Contains(r.Index.MissingRules, `"events"`) || !strings.Contains(r.Index.MissingRules, `"/metrics"`) {
		t.Errorf("%d denied:\n%s", denied, r.Index.MissingRules)
	}
	var complete rbacv1.ClusterRole
	if err := yaml.UnmarshalStrict([]byte(SupportRole()), &complete); err != nil {
		t.Fatal(err)
	}
	grant("complete", &complete)
	if r = collect(); r.Index.MissingRules != "" {
		t.Errorf("the role of --print-rbac lacks\n%s", r.Index.MissingRules)
	}
}

// TestSupportBundleWithoutAnAnswer has an address where nothing listens, and a server of another program.
func TestSupportBundleWithoutAnAnswer(t *testing.T) {
	stranger := httptest.NewServer(http.NotFoundHandler())
	defer stranger.Close()
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	for name, server := range map[string]string{"nothing listens": gone.URL, "another server": stranger.URL} {
		t.Run(name, func(t *testing.T) {
			sel := selectedOf(t, fmt.Appendf(nil, "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nclusters: [{name: c, cluster: {server: %q}}]\nusers: [{name: u, user: {token: a-token-of-the-user}}]\n", server))
			file := filepath.Join(t.TempDir(), "b.tar.gz")
			r, err := SupportBundle(t.Context(), support.Request{Cluster: &sel, File: file, Release: "v1.1.0", Now: time.Now()})
			if err != nil {
				t.Fatal(err)
			}
			if r.Index.Reachable || r.Index.Server != server || !slices.ContainsFunc(r.Index.Missing, func(m support.Missing) bool { return m.What == "cluster" && m.Why != "" && m.Remedy != "" }) {
				t.Errorf("the index: %+v", r.Index)
			}
			for name, content := range bundleFiles(t, file) {
				if strings.Contains(content, "a-token-of-the-user") {
					t.Errorf("%s has the user's token", name)
				}
			}
		})
	}
	bad := cluster.Selected{Context: "c", Kubeconfig: []byte("no: kubeconfig")}
	if _, err := SupportBundle(t.Context(), support.Request{Cluster: &bad, File: filepath.Join(t.TempDir(), "b.tar.gz")}); plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("a bad kubeconfig: %v", err)
	}
}

// selectedOf returns the cluster of a kubeconfig.
func selectedOf(t *testing.T, kubeconfig []byte) cluster.Selected {
	t.Helper()
	if _, err := clientcmd.Load(kubeconfig); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	sel, err := Select(cluster.Access{Kubeconfig: path}, "")
	if err != nil {
		t.Fatal(err)
	}
	return sel
}
