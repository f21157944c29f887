package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/kube/kubetest"
	"constellation/engine/kubeadm"
	"constellation/engine/plan"
	"constellation/engine/revocation"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/operator/api/v1alpha1"
)

// start returns a client of a real control plane with controllers and without nodes.
func start(t *testing.T) *Client {
	t.Helper()
	kubeconfig, err := controlplanetest.Lend(t, controlplane.Options{Controllers: true}).Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	c, err := Connect(kubeconfig, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// world stands in for kubelets and users of a real cluster.
type world struct {
	t *testing.T
	c *Client
}

func (w world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w world) PutNode(n cluster.Node) {
	w.t.Helper()
	ctx, nodes := w.t.Context(), w.c.core.CoreV1().Nodes()
	o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: map[string]string{}, Annotations: map[string]string{}}, Spec: corev1.NodeSpec{ProviderID: n.ProviderID}}
	if n.Role == "control-plane" {
		o.Labels[roleLabel] = ""
	}
	for k, v := range map[string]string{v1alpha1.AnnotationImage: n.Image, v1alpha1.AnnotationComponents: n.Components} {
		if v != "" {
			o.Annotations[k] = v
		}
	}
	if n.Group != "" {
		o.Annotations[v1alpha1.AnnotationGroup] = "sandboxes/demo/groups/" + n.Group
	}
	have, err := nodes.Create(ctx, o, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		have, err = nodes.Get(ctx, n.Name, metav1.GetOptions{})
	}
	w.must(err)
	ready := corev1.ConditionFalse
	if n.State == plan.NodeReady {
		ready = corev1.ConditionTrue
	}
	status := fmt.Sprintf(`{"status":{"nodeInfo":{"kubeletVersion":%q},"addresses":[{"type":"InternalIP","address":%q}],"conditions":[{"type":"Ready","status":%q,"message":"m","lastHeartbeatTime":%q}]}}`,
		n.Kubernetes, n.IP, ready, time.Now().UTC().Format(time.RFC3339))
	_, err = nodes.Patch(ctx, have.Name, types.StrategicMergePatchType, []byte(status), metav1.PatchOptions{}, "status")
	w.must(err)
}

func (w world) RemoveNode(name string) {
	w.must(w.c.core.CoreV1().Nodes().Delete(w.t.Context(), name, metav1.DeleteOptions{}))
}

func (w world) SetPaused(paused bool) {
	b := fmt.Sprintf(`{"spec":{"rollout":{"paused":%t}}}`, paused)
	_, err := w.c.dynamic.Resource(nodeVersions).Patch(w.t.Context(), v1alpha1.NodeVersionName, types.MergePatchType, []byte(b), metav1.PatchOptions{FieldManager: "somebody"})
	w.must(err)
}

func (w world) Paused() bool {
	u, err := w.c.dynamic.Resource(nodeVersions).Get(w.t.Context(), v1alpha1.NodeVersionName, metav1.GetOptions{})
	w.must(err)
	spec, _ := u.Object["spec"].(map[string]any)
	rollout, _ := spec["rollout"].(map[string]any)
	paused, _ := rollout["paused"].(bool)
	return paused
}

func (w world) Revisions(ch cluster.Chart) int {
	cfg, err := w.c.helm(ch.Namespace)
	w.must(err)
	all, err := cfg.Releases.History(ch.Name)
	w.must(err)
	return len(all)
}

func (w world) GiveToken(node string) {
	_, err := w.c.core.CoreV1().Secrets(systemNamespace).Create(w.t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: revocation.TokenSecret(node)}, Type: corev1.SecretTypeBootstrapToken,
		StringData: map[string]string{"token-id": kubeadm.TokenID(node), "token-secret": "0123456789abcdef"},
	}, metav1.CreateOptions{})
	w.must(err)
}

func (w world) HasToken(node string) bool {
	_, err := w.c.core.CoreV1().Secrets(systemNamespace).Get(w.t.Context(), revocation.TokenSecret(node), metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		w.must(err)
	}
	return err == nil
}

func (w world) Tainted(node string) bool {
	n, err := w.c.core.CoreV1().Nodes().Get(w.t.Context(), node, metav1.GetOptions{})
	w.must(err)
	for _, t := range n.Spec.Taints {
		if t.Key == v1alpha1.AnnotationRevoked && t.Effect == corev1.TaintEffectNoExecute {
			return n.Spec.Unschedulable
		}
	}
	return false
}

func (w world) EndMove(name string) {
	w.must(w.c.dynamic.Resource(pendingNodes).Delete(w.t.Context(), name, metav1.DeleteOptions{}))
}

func (w world) PutKubeadmConfig() {
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: kubeadmConfigName}, Data: map[string]string{keyClusterConfig: "imageRepository: registry.k8s.io\nkind: ClusterConfiguration\n"}}
	_, err := w.c.core.CoreV1().ConfigMaps(systemNamespace).Create(w.t.Context(), m, metav1.CreateOptions{})
	w.must(err)
}

func TestRealClusterKeepsTheContract(t *testing.T) {
	c := start(t)
	kubetest.Contract(t, c, world{t, c})

	t.Run("our own charts are accepted by the API server", func(t *testing.T) { ourCharts(t, c) })
	t.Run("a killed console's pending revision is adopted", func(t *testing.T) { adopt(t, c) })
	t.Run("a failed set of charts is rolled back", func(t *testing.T) { set(t, c) })
	t.Run("unready services report the reason", func(t *testing.T) { services(t, c) })
	t.Run("all parts of a registry are compared", func(t *testing.T) { registryParts(t, c) })
	t.Run("history is bounded", func(t *testing.T) { boundedHistory(t, c) })
}

// ourCharts applies the charts of each release. The only node has no kubelet, so no pod
// becomes ready: an object rejected by the API server would be a different error.
func ourCharts(t *testing.T, c *Client) {
	for _, tt := range []struct {
		release, chart, service string
		pods                    int
	}{
		{release: "v1.0.0", chart: "constellation-services", service: "joinservice", pods: 1},
		{release: "v1.1.0", chart: "constellation-services", service: "joinservice", pods: 1},
		{release: "v1.0.0", chart: "constellation-operator", service: "operator", pods: 2}, // and the stand-in of the autoscaler
		{release: "v1.1.0", chart: "constellation-operator", service: "operator", pods: 3}, // and the controller of Plans
	} {
		files, err := assets.ChartFor(tt.chart, tt.release)
		if err != nil {
			t.Fatal(err)
		}
		// The scheduler's message takes a moment on a busy computer.
		for patience := 1500 * time.Millisecond; patience < 20*time.Second; patience *= 2 {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			values := map[string]any{"release": tt.release, tt.service: map[string]any{"image": "registry.constellation.example/" + tt.service + ":" + tt.release}}
			assets.SetValues(values, files, providers.LocalValues())
			err = c.ApplyChart(ctx, cluster.Chart{Name: tt.chart, Namespace: Namespace, Version: tt.release[1:], Files: files, Values: values}, func(string, int64, int64) {})
			cancel()
			if err == nil || strings.Contains(err.Error(), "Unschedulable") {
				break
			}
		}
		if err == nil || !strings.Contains(err.Error(), "Unschedulable") || !strings.HasSuffix(err.Error(), fmt.Sprintf(": not ready in time, 0 of %d pods are ready; it was removed again", tt.pods)) {
			t.Errorf("%s of %s without a kubelet: %v", tt.chart, tt.release, err)
		}
	}
	n, err := c.core.CoreV1().Namespaces().Get(t.Context(), Namespace, metav1.GetOptions{})
	if err != nil || n.Labels["pod-security.kubernetes.io/enforce"] != "privileged" {
		t.Errorf("namespace: labels %v, %v", n.Labels, err)
	}
}

// set upgrades two charts and installs a third. The second chart never becomes ready, so all
// roll back, and helm finds a deployed revision of each.
func set(t *testing.T, c *Client) {
	chartOf := func(name, text string, replicas int, needs ...string) cluster.Chart {
		return cluster.Chart{
			Name: name, Namespace: Namespace, Version: "1.0.0", Values: map[string]any{"text": text, "replicas": replicas}, Needs: needs,
			Files: []assets.File{
				{Name: "Chart.yaml", Data: []byte("apiVersion: v2\nname: " + name + "\nversion: 1.0.0\n")},
				{Name: "templates/all.yaml", Data: []byte(`apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Chart.Name }}, namespace: constellation-system}
data: {text: {{ .Values.text }}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: {{ .Chart.Name }}, namespace: constellation-system}
spec:
  replicas: {{ .Values.replicas }}
  selector: {matchLabels: {app: {{ .Chart.Name }}}}
  template:
    metadata: {labels: {app: {{ .Chart.Name }}}}
    spec: {containers: [{name: c, image: registry.constellation.example/c:v1}]}
`)},
			},
		}
	}
	apply := func(limit time.Duration, charts ...cluster.Chart) error {
		return engine.ChartSet{Charts: charts, Limit: limit, Report: func(string, string, string, int64, int64) {}}.Apply(t.Context(), c)
	}
	old := []cluster.Chart{chartOf("set-a", "old", 0), chartOf("set-b", "old", 0)}
	if err := apply(time.Minute, old...); err != nil {
		t.Fatal(err)
	}
	err := apply(3*time.Second, chartOf("set-a", "new", 0), chartOf("set-c", "new", 0, "set-a"), chartOf("set-b", "new", 1, "set-c"))
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"install chart set-b: ", "0 of 1 pods are ready; revision 1 is back", "chart set-c was removed again", "chart set-a is back at revision 1"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	for _, ch := range old {
		if ok, err := c.ChartCurrent(t.Context(), ch); !ok || err != nil {
			t.Errorf("chart %s is at its previous revision: %t, %v", ch.Name, ok, err)
		}
		if m, err := c.core.CoreV1().ConfigMaps(Namespace).Get(t.Context(), ch.Name, metav1.GetOptions{}); err != nil || m.Data["text"] != "old" {
			t.Errorf("object of %s: %v, %v", ch.Name, m.Data, err)
		}
	}
	if _, err := c.core.AppsV1().Deployments(Namespace).Get(t.Context(), "set-c", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the new chart's deployment: %v", err)
	}
}

// adopt interrupts an installation and an upgrade as a kill would: the revision is pending,
// and some objects exist.
func adopt(t *testing.T, c *Client) {
	ch := cluster.Chart{Name: "left", Namespace: Namespace, Version: "1.0.0", Values: map[string]any{"text": "a"}, Files: []assets.File{
		{Name: "Chart.yaml", Data: []byte("apiVersion: v2\nname: left\nversion: 1.0.0\n")},
		{Name: "templates/all.yaml", Data: []byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: left, namespace: constellation-system}\ndata: {text: {{ .Values.text }}}\n")},
	}}
	apply := func() {
		t.Helper()
		if err := c.ApplyChart(t.Context(), ch, func(string, int64, int64) {}); err != nil {
			t.Fatal(err)
		}
		m, err := c.core.CoreV1().ConfigMaps(Namespace).Get(t.Context(), "left", metav1.GetOptions{})
		if err != nil || m.Data["text"] != ch.Values["text"] {
			t.Errorf("object: %v, %v", m.Data, err)
		}
		if ok, err := c.ChartCurrent(t.Context(), ch); !ok || err != nil {
			t.Errorf("current: %t, %v", ok, err)
		}
	}
	pending := func(status string) {
		t.Helper()
		cfg, err := c.helm(Namespace)
		if err != nil {
			t.Fatal(err)
		}
		r, err := cfg.Releases.Last("left")
		if err != nil {
			t.Fatal(err)
		}
		if status == "pending-upgrade" {
			up := *r
			info := *r.Info
			up.Info, up.Version = &info, r.Version+1
			up.Info.Status = "pending-upgrade"
			if err := cfg.Releases.Create(&up); err != nil {
				t.Fatal(err)
			}
		} else {
			r.Info.Status = "pending-install"
			if err := cfg.Releases.Update(r); err != nil {
				t.Fatal(err)
			}
		}
		if ok, err := c.ChartCurrent(t.Context(), ch); ok || err != nil {
			t.Errorf("%s: current %t, %v", status, ok, err)
		}
	}
	apply()
	pending("pending-install")
	apply()
	pending("pending-upgrade")
	apply()
	pending("pending-upgrade")
	ch.Values = map[string]any{"text": "b"}
	apply()
}

func services(t *testing.T, c *Client) {
	_, err := c.core.AppsV1().DaemonSets(Namespace).Create(t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "joinservice", Labels: map[string]string{podLabel: "joinservice", versionLabel: "v1.1.0", "app.kubernetes.io/part-of": "constellation"}},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{podLabel: "joinservice"}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{podLabel: "joinservice"}},
				Spec:       corev1.PodSpec{Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}}, Containers: []corev1.Container{{Name: "main", Image: "registry.constellation.example/joinservice:v1.1.0"}}},
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var all []cluster.Service
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) { // the controller creates a pod
		if all, err = c.Services(t.Context()); err != nil || len(all) == 1 && all[0].Message != "" {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 1 || all[0].Name != "join-service" || all[0].Version != "v1.1.0" || all[0].Kind != cluster.ServiceOfRelease ||
		all[0].Ready != 0 || all[0].Wanted != 1 || !strings.Contains(all[0].Message, "Unschedulable: 0/1 nodes are available") {
		t.Errorf("services %+v", all)
	}
}

func boundedHistory(t *testing.T, c *Client) {
	ch := cluster.Chart{Name: "many", Namespace: Namespace, Version: "1.0.0", Files: []assets.File{
		{Name: "Chart.yaml", Data: []byte("apiVersion: v2\nname: many\nversion: 1.0.0\n")},
		{Name: "templates/all.yaml", Data: []byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: many}\ndata: {n: {{ .Values.n | quote }}}\n")},
	}}
	for i := range maxRevisions + 3 {
		ch.Values = map[string]any{"n": i}
		if err := c.ApplyChart(t.Context(), ch, func(string, int64, int64) {}); err != nil {
			t.Fatal(err)
		}
	}
	if n := (world{t, c}).Revisions(ch); n > maxRevisions {
		t.Errorf("%d revisions are kept", n)
	}
}

func TestErrorClasses(t *testing.T) {
	gr := schema.GroupResource{Resource: "nodes"}
	for _, tt := range []struct {
		name string
		err  error
		want error // nil: none of the engine's
	}{
		{name: "absent", err: apierrors.NewNotFound(gr, "x"), want: cluster.ErrAbsent},
		{name: "forbidden", err: apierrors.NewForbidden(gr, "x", errors.New("no")), want: cluster.ErrForbidden},
		{name: "forbidden to the anonymous user", err: apierrors.NewForbidden(gr, "x", errors.New(`User "system:anonymous" cannot list resource "pods"`)), want: cluster.ErrDenied},
		{name: "a kubeconfig of another cluster", err: apierrors.NewUnauthorized("who?"), want: cluster.ErrDenied},
		{name: "a busy API server", err: apierrors.NewTooManyRequests("slow down", 1), want: cluster.ErrUnreachable},
		{name: "etcd without a leader", err: apierrors.NewInternalError(errors.New("etcdserver: no leader")), want: cluster.ErrUnreachable},
		{name: "a lost connection", err: fmt.Errorf("get: %w", io.EOF), want: cluster.ErrUnreachable},
		{name: "http2 gone", err: errors.New("http2: client connection lost"), want: cluster.ErrUnreachable},
		{name: "an invalid object", err: apierrors.NewInvalid(schema.GroupKind{}, "x", nil), want: nil},
		{name: "the user left", err: context.Canceled, want: nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := classify(tt.err)
			for _, kind := range []error{cluster.ErrAbsent, cluster.ErrDenied, cluster.ErrForbidden, cluster.ErrUnreachable} {
				if errors.Is(got, kind) != errors.Is(tt.want, kind) {
					t.Errorf("%v is %v: %t", got, kind, errors.Is(got, kind))
				}
			}
			if !errors.Is(got, tt.err) && tt.want == nil {
				t.Errorf("%v lost its cause", got)
			}
		})
	}
}

func TestTransientErrorsAreRetried(t *testing.T) {
	for _, tt := range []struct {
		name     string
		statuses []int
		requests int
		want     error
	}{
		{name: "an API server that comes back", statuses: []int{503, 429, 200}, requests: 3, want: nil},
		{name: "a refusal", statuses: []int{403}, requests: 1, want: cluster.ErrDenied},
		{name: "an absence", statuses: []int{404}, requests: 1, want: cluster.ErrAbsent},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var mu sync.Mutex
			n := 0
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				mu.Lock()
				defer mu.Unlock()
				status := tt.statuses[min(n, len(tt.statuses)-1)]
				n++
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(status)
				if status == 200 {
					io.WriteString(w, `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"join-config"},"data":{"clusterID":"aa"}}`)
				} else {
					fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d,"reason":%q}`, status, map[int]string{403: "Forbidden", 404: "NotFound", 429: "TooManyRequests", 503: "ServiceUnavailable"}[status])
				}
			}))
			defer s.Close()
			c, err := ForConfig(&rest.Config{Host: s.URL}, nil)
			if err != nil {
				t.Fatal(err)
			}
			j, err := c.JoinConfig(t.Context())
			if tt.want == nil && (err != nil || j.ClusterID != "aa") || tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("%+v, %v", j, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if n < tt.requests {
				t.Errorf("%d requests, want %d", n, tt.requests)
			}
			if tt.want != nil && n != tt.requests {
				t.Errorf("%d requests, want %d", n, tt.requests)
			}
		})
	}
}

func TestUnreachableErrorAtDeadline(t *testing.T) {
	c, err := ForConfig(&rest.Config{Host: "https://127.0.0.1:1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Version(t.Context()); !errors.Is(err, cluster.ErrUnreachable) {
		t.Errorf("version: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if _, err := c.Nodes(ctx); !errors.Is(err, cluster.ErrUnreachable) || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("nodes: %v", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if _, err := c.Nodes(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("nodes, left: %v", err)
	}
}

func TestKubeconfigErrorsHideContent(t *testing.T) {
	for _, k := range []string{"", "not yaml: [", "users:\n- name: x\n  user:\n    client-key-data: c3dvcmRmaXNo!\n", "apiVersion: v1\nkind: Config\nclusters: swordfish\n"} {
		_, err := Connect([]byte(k), nil)
		if err == nil || strings.Contains(err.Error(), "c3dvcmRmaXNo") || strings.Contains(err.Error(), "swordfish") {
			t.Errorf("%q: %v", k, err)
		}
	}
}
