package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"constellation/assets"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/engine/version"
)

// counted returns a real control plane without controllers, a client of it, and the number of
// the client's requests.
func counted(t controlplanetest.T) (*controlplane.ControlPlane, *Client, *atomic.Int64) {
	t.Helper()
	// Pods are created by hand here, in namespaces without a ServiceAccount.
	cp := controlplanetest.Lend(t, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}})
	requests := &atomic.Int64{}
	config := cp.Config()
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			requests.Add(1)
			return rt.RoundTrip(r)
		})
	})
	c, err := ForConfig(config, nil)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return cp, c, requests
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// putPod creates a pod of kube-system with an image and a readiness.
func putPod(t *testing.T, c *Client, name, node, image string, labels map[string]string, ready corev1.ConditionStatus) {
	t.Helper()
	pods := c.core.CoreV1().Pods(systemNamespace)
	p, err := pods.Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: image}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}}
	if _, err := pods.UpdateStatus(t.Context(), p, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func TestRunningNeedsEightRequests(t *testing.T) {
	cp, c, requests := counted(t)
	ctx, w := t.Context(), world{t, c}

	t.Run("an empty cluster reports everything as missing", func(t *testing.T) {
		requests.Store(0)
		r, err := c.Running(ctx)
		if err != nil {
			t.Fatal(err)
		}
		want := compat.Running{Kubernetes: compat.At(version.MustParse(build.DefaultVersion)), Missing: []string{
			"NodeVersion: not in the cluster", "join-config: not in the cluster", "kinds: not in the cluster",
		}}
		r.Nodes, r.Parts = nil, nil // empty or nil is the same
		if d := cmp.Diff(want, r); d != "" {
			t.Error(d)
		}
		if n := requests.Load(); n > 8 {
			t.Errorf("%d requests", n)
		}
	})

	// A rollout that is half done.
	if err := c.ApplyKinds(ctx, ownCRDs(t), func(string) {}); err != nil {
		t.Fatal(err)
	}
	if err := c.PublishJoinConfig(ctx, cluster.JoinConfig{Attestation: "{}", TrustRoots: "pem", ClusterID: "aa"}); err != nil {
		t.Fatal(err)
	}
	target := cluster.NodeTarget{Image: "ami-2", ImageVersion: "v1.1.0", Components: "k8s-components-sha256-" + strings.Repeat("1", 64), Kubernetes: "v1.36.3"}
	if err := c.SetNodeTarget(ctx, target); err != nil {
		t.Fatal(err)
	}
	for _, n := range []cluster.Node{
		{Name: "control-1", Role: "control-plane", State: plan.NodeReady, Kubernetes: "v1.36.3", Image: "ami-2", IP: "10.0.0.1"},
		{Name: "control-2", Role: "control-plane", State: plan.NodeReady, Kubernetes: "v1.35.4", Image: "sandboxes/demo/images/v1.0.0", IP: "10.0.0.2"},
		{Name: "control-3", Role: "control-plane", State: plan.NodeReady, Kubernetes: "v1.35.4", Image: "ami-1", IP: "10.0.0.3"},
		{Name: "worker-1", Role: "worker", State: plan.NodeReady, Kubernetes: "v1.34.4", Image: "sandboxes/demo/images/v1.0.0", IP: "10.0.0.4"},
		{Name: "worker-2", Role: "worker", State: plan.NodeReady, Kubernetes: "v\u202enew", IP: "10.0.0.5"},
	} {
		w.PutNode(n)
	}
	control := func(component string) map[string]string {
		return map[string]string{"component": component, "tier": "control-plane"}
	}
	putPod(t, c, "kube-apiserver-control-1", "control-1", "registry.k8s.io/kube-apiserver:v1.36.3", control("kube-apiserver"), corev1.ConditionTrue)
	putPod(t, c, "kube-apiserver-control-2", "control-2", "registry.k8s.io/kube-apiserver:v1.35.4", control("kube-apiserver"), corev1.ConditionFalse)
	putPod(t, c, "etcd-control-1", "control-1", "registry.k8s.io/etcd:3.6.8-0", control("etcd"), corev1.ConditionTrue)
	putPod(t, c, "etcd-control-2", "control-2", "registry.k8s.io/etcd:3.6.6-0@sha256:"+fmt.Sprintf("%064d", 1), control("etcd"), corev1.ConditionTrue)
	putPod(t, c, "coredns-1", "worker-1", "registry.k8s.io/coredns/coredns:v1.13.1", map[string]string{"k8s-app": "kube-dns"}, corev1.ConditionTrue)
	// Each node has one of these, and they must not be listed.
	putPod(t, c, "kube-proxy-1", "worker-1", "registry.k8s.io/kube-apiserver:v1.30.0", map[string]string{"component": "kube-apiserver", "controller-revision-hash": "x"}, corev1.ConditionTrue)
	for _, manifest := range []string{
		workload("DaemonSet", systemNamespace, "kube-proxy", "registry.k8s.io/kube-proxy:v1.35.4", nil),
		workload("DaemonSet", systemNamespace, "cni", "example/cni:v9.9.9", nil),
		workload("DaemonSet", Namespace, "joinservice", "example/joinservice:v1.1.0", map[string]string{partOfLabel: partOf, versionLabel: "v1.1.0"}),
		workload("Deployment", Namespace, "constellation-operator", "example/operator:v1.0.0", map[string]string{partOfLabel: partOf, versionLabel: "v1.0.0"}),
		workload("Deployment", Namespace, "other", "example/other:v3.0.0", nil),
	} {
		if err := cp.Apply(ctx, []byte(manifest)); err != nil {
			t.Fatal(err)
		}
	}

	requests.Store(0)
	r, err := c.Running(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if r.JoinConfig.Revision == "" {
		t.Error("join-config has no revision")
	}
	r.JoinConfig.Revision = ""
	if n := requests.Load(); n > 8 {
		t.Errorf("%d requests", n)
	}
	v := version.MustParse
	read := target
	read.MaxSurge = "1" // the API server's defaults
	want := compat.Running{
		Services:            compat.Span{Oldest: v("v1.0.0"), Newest: v("v1.1.0")},
		ControlPlaneImage:   compat.At(v("v1.1.0")),
		Kubernetes:          compat.Span{Oldest: v("v1.35.4"), Newest: v(build.DefaultVersion)},
		ControlPlaneKubelet: compat.Span{Oldest: v("v1.35.4"), Newest: v("v1.36.3")}, WorkerKubelet: compat.At(v("v1.34.4")),
		Etcd: "3.6.6-0",
		Parts: []cluster.Service{
			{Name: "coredns", Version: "v1.13.1", Kind: cluster.ServiceOfKubernetes, Ready: 1, Wanted: 1},
			{Name: "join-service", Version: "v1.1.0", Kind: cluster.ServiceOfRelease},
			{Name: "kube-proxy", Version: "v1.35.4", Kind: cluster.ServiceOfKubernetes},
			{Name: "operator", Version: "v1.0.0", Kind: cluster.ServiceOfRelease, Wanted: 1},
		},
		Target: read, JoinConfig: cluster.JoinConfig{Attestation: "{}", TrustRoots: "pem", ClusterID: "aa"},
		Kinds: []string{
			"autoscalingstrategies.update.edgeless.systems", "joiningnodes.update.edgeless.systems", "nodeversions.update.edgeless.systems",
			"pendingnodes.update.edgeless.systems", "scalinggroups.update.edgeless.systems",
		},
		Missing: []string{
			"API server on control-2: not ready",
			"API server on control-3: no pod found",
			`kubelet of worker-2: invalid version "v\u202enew"`,
			"image of worker-2: annotation is missing",
		},
	}
	if len(r.Nodes) != 5 || r.Nodes[0].Name != "control-1" || r.Nodes[4].Name != "worker-2" {
		t.Errorf("nodes %+v", r.Nodes)
	}
	nodes := r.Nodes
	r.Nodes = nil
	if d := cmp.Diff(want, r); d != "" {
		t.Error(d)
	}
	r.Nodes = nodes
	r.AddImages(cloud.NewCatalogue(nil, func() ([]cloud.Image, error) {
		return []cloud.Image{{Reference: "sandboxes/demo/images/v1.0.0", Version: "v1.0.0"}}, nil
	}).Version)
	if r.ControlPlaneImage.String() != "v1.0.0-v1.1.0" || r.WorkerImage.String() != "v1.0.0" {
		t.Errorf("images %s and %s", r.ControlPlaneImage, r.WorkerImage)
	}
	if last := r.Missing[len(r.Missing)-1]; last != `image of control-3: the cloud's catalogue has no image "ami-1": not found` {
		t.Error(last)
	}

	t.Run("a user who may read only nodes gets the missing permissions reported", func(t *testing.T) {
		// No user has system:node-reader; the role is made for this test.
		if err := cp.Apply(ctx, []byte(nodeReader)); err != nil {
			t.Fatal(err)
		}
		config := rest.CopyConfig(c.config)
		config.Impersonate.UserName = "reader"
		reader, err := ForConfig(config, nil)
		if err != nil {
			t.Fatal(err)
		}
		r, err := reader.Running(ctx)
		for deadline := time.Now().Add(10 * time.Second); err == nil && len(r.Nodes) == 0 && time.Now().Before(deadline); {
			r, err = reader.Running(ctx) // the API server's authorizer lags behind
		}
		if err != nil {
			t.Fatal(err)
		}
		want := []string{
			`kubelet of worker-2: invalid version "v\u202enew"`, "image of worker-2: annotation is missing",
		}
		if d := cmp.Diff(want, r.Missing); d != "" {
			t.Error(d)
		}
		denied := []cluster.Denial{
			{Verb: "get", Resource: "configmaps", Namespace: "kube-system", User: "reader"},
			{Verb: "list", Resource: "daemonsets.apps", User: "reader"},
			{Verb: "list", Resource: "deployments.apps", Namespace: "constellation-system", User: "reader"},
			{Verb: "get", Resource: "nodeversions.update.edgeless.systems", User: "reader"},
			{Verb: "list", Resource: "pods", Namespace: "kube-system", User: "reader"},
		}
		if d := cmp.Diff(denied, r.Denied); d != "" {
			t.Error(d)
		}
	})
	t.Run("a user without any permission gets an error", func(t *testing.T) {
		config := rest.CopyConfig(c.config)
		config.Impersonate.UserName = "nobody"
		nobody, err := ForConfig(config, nil)
		if err != nil {
			t.Fatal(err)
		}
		r, err := nobody.Running(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(r.Denied, cluster.Denial{Verb: "list", Resource: "nodes", User: "nobody"}) {
			t.Errorf("denied %+v", r.Denied)
		}
	})
}

func TestRunningDoesNotWaitForAnAPIServerThatIsDown(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	url := s.URL
	s.Close()
	c, err := ForConfig(&rest.Config{Host: url}, nil)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	_, err = c.Running(t.Context())
	if !errors.Is(err, cluster.ErrUnreachable) {
		t.Errorf("error %v", err)
	}
	if took := time.Since(start); took > inspectLimit/2 {
		t.Errorf("took %s", took)
	}
}

func TestPreflightErrors(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status int // of every answer; zero: nothing listens
		want   error
	}{
		{name: "an API server that is down", status: 0, want: cluster.ErrUnreachable},
		{name: "a kubeconfig of another cluster", status: http.StatusUnauthorized, want: cluster.ErrDenied},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(tt.status) }))
			defer s.Close()
			if tt.status == 0 {
				s.Close()
			}
			c, err := ForConfig(&rest.Config{Host: s.URL}, nil)
			if err != nil {
				t.Fatal(err)
			}
			found, err := c.Preflight(t.Context(), []check.PreflightRequest{{}}, func(e plan.Event) { t.Errorf("event %+v", e) })
			if !errors.Is(err, tt.want) || found != nil {
				t.Errorf("found %v, error %v", found, err)
			}
		})
	}
}

func TestTagsAreComparedAsVersions(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{a: "3.5.9-0", b: "3.5.26-0", want: true},
		{a: "3.5.26-0", b: "3.5.9-0", want: false},
		{a: "3.6.6-0", b: "3.6.6-0", want: false},
		{a: "", b: "3.6.6-0", want: true},
		{a: "3.6.6-0", b: "latest", want: false},
	} {
		if got := older(tt.a, tt.b); got != tt.want {
			t.Errorf("%q older than %q: %t", tt.a, tt.b, got)
		}
	}
}

const nodeReader = `apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: node-reader}
rules:
- {apiGroups: [""], resources: [nodes], verbs: [get, list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: node-reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: node-reader}
subjects:
- {apiGroup: rbac.authorization.k8s.io, kind: User, name: reader}
`

// workload returns the manifest of a DaemonSet or Deployment.
func workload(kind, namespace, name, image string, labels map[string]string) string {
	set := "{"
	for k, v := range labels {
		set += fmt.Sprintf("%s: %q, ", k, v)
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Namespace
metadata: {name: %[2]s}
---
apiVersion: apps/v1
kind: %[1]s
metadata: {name: %[3]s, namespace: %[2]s, labels: %[5]s}}
spec:
  selector: {matchLabels: {app: %[3]s}}
  template:
    metadata: {labels: {app: %[3]s}}
    spec: {containers: [{name: main, image: %[4]q}]}
`, kind, namespace, name, image, set)
}

// ownCRDs returns the kinds of the newest release.
func ownCRDs(t controlplane.T) []assets.File {
	t.Helper()
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatalf("%v", err)
	}
	return crds
}

// BenchmarkRunning measures the requests of `upgrade check` to a cluster with few and with
// many third-party kinds.
func BenchmarkRunning(b *testing.B) {
	for _, kinds := range []int{0, 2000} {
		b.Run(fmt.Sprintf("%d kinds", kinds), func(b *testing.B) {
			_, c, requests := counted(b)
			if err := c.ApplyKinds(b.Context(), ownCRDs(b), func(string) {}); err != nil {
				b.Fatal(err)
			}
			putKinds(b, c, kinds)
			settle(b, c)
			requests.Store(0)
			for b.Loop() {
				if _, err := c.Running(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(requests.Load())/float64(b.N), "requests/op")
		})
	}
}

// putKinds creates n definitions in a few dozen groups.
func putKinds(b *testing.B, c *Client, n int) {
	b.Helper()
	const groups = 40
	group, ctx := errgroup.WithContext(b.Context())
	group.SetLimit(16)
	for i := range n {
		group.Go(func() error {
			u := &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
				"metadata": map[string]any{"name": fmt.Sprintf("thing%ds.g%d.example.com", i, i%groups)},
				"spec": map[string]any{
					"group": fmt.Sprintf("g%d.example.com", i%groups), "scope": "Cluster",
					"names": map[string]any{"kind": fmt.Sprintf("Thing%d", i), "plural": fmt.Sprintf("thing%ds", i), "singular": fmt.Sprintf("thing%d", i), "listKind": fmt.Sprintf("Thing%dList", i)},
					"versions": []any{map[string]any{
						"name": "v1", "served": true, "storage": true,
						"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
					}},
				},
			}}
			_, err := c.dynamic.Resource(kindsOfKinds).Create(ctx, u, metav1.CreateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		b.Fatal(err)
	}
}

// settle returns when the API server has processed its new kinds: all are served, and it is
// idle. Each kind makes it publish its schemas again for some seconds, during which unrelated
// requests, such as for the version, wait for a processor.
func settle(b *testing.B, c *Client) {
	b.Helper()
	const (
		limit  = 10 * time.Minute
		window = 3 * time.Second
		rest   = 0.15 // of a processor; with thousands of kinds it takes a twentieth
	)
	ctx, cancel := context.WithTimeout(b.Context(), limit)
	defer cancel()
	established := func(ctx context.Context) (bool, error) {
		l, err := c.dynamic.Resource(kindsOfKinds).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		for i := range l.Items {
			conditions, _, _ := unstructured.NestedSlice(l.Items[i].Object, "status", "conditions")
			if !slices.ContainsFunc(conditions, func(x any) bool {
				m, _ := x.(map[string]any)
				return m["type"] == "Established" && m["status"] == "True"
			}) {
				return false, nil
			}
		}
		return true, nil
	}
	if err := wait.PollUntilContextCancel(ctx, window, true, established); err != nil {
		b.Fatalf("wait until all kinds are served: %v", err)
	}
	last, at := cpuSeconds(b, c), time.Now()
	if err := wait.PollUntilContextCancel(ctx, window, false, func(context.Context) (bool, error) {
		before, since := last, time.Since(at)
		last, at = cpuSeconds(b, c), time.Now()
		return last-before < rest*since.Seconds(), nil
	}); err != nil {
		b.Fatalf("wait until the API server is idle: %v", err)
	}
}

// cpuSeconds is the processor time that the API server has used.
func cpuSeconds(b *testing.B, c *Client) float64 {
	b.Helper()
	text, err := c.core.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, "process_cpu_seconds_total "); ok {
			seconds, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
			if err != nil {
				b.Fatal(err)
			}
			return seconds
		}
	}
	b.Fatal("the API server's metrics lack its processor time")
	return 0
}
