package controlplanetest

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"constellation/engine/sandbox/controlplane"
)

func TestMain(m *testing.M) { os.Exit(Run(m)) }

// borrower is a test that borrows a control plane and ends.
type borrower struct {
	*testing.T
	failed   bool
	cleanups []func()
	log      []string
}

func (b *borrower) Cleanup(f func()) { b.cleanups = append(b.cleanups, f) }
func (b *borrower) Failed() bool     { return b.failed }
func (b *borrower) Logf(format string, args ...any) {
	b.log = append(b.log, fmt.Sprintf(format, args...))
}

func (b *borrower) end() {
	for _, f := range slices.Backward(b.cleanups) {
		f()
	}
}

// traces are objects of many kinds: cluster-wide and not, of own definitions, with finalizers, and rights.
const traces = `
{apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
{apiVersion: v1, kind: Node, metadata: {name: worker-0}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: held, namespace: shop, finalizers: [example.com/hold]}, data: {canary: swordfish}}
---
{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {clusterIP: 10.96.0.77, type: NodePort, ports: [{port: 80, nodePort: 30077}]}}
---
{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: xs.example.com}, spec: {group: example.com, scope: Cluster, names: {plural: xs, singular: x, kind: X, listKind: XList}, versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]}}
---
{apiVersion: example.com/v1, kind: X, metadata: {name: one, finalizers: [example.com/hold]}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: somebody}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}, subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: somebody}]}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {name: reader, namespace: kube-system}, rules: [{apiGroups: [""], resources: [pods], verbs: [get]}]}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {name: reader, namespace: kube-system}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}, subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: reader}]}
`

func allowed(t *testing.T, core kubernetes.Interface, user, resource string) bool {
	t.Helper()
	r := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: user, ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "get", Resource: resource, Namespace: "kube-system"}}}
	got, err := core.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), r, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return got.Status.Allowed
}

// content is what etcd has, without what the API server changes all the time.
func content(t *testing.T, cp *controlplane.ControlPlane) map[string]string {
	t.Helper()
	etcd, err := dial(cp)
	if err != nil {
		t.Fatal(err)
	}
	defer etcd.Close()
	all, err := etcd.Get(t.Context(), "", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, kv := range all.Kvs {
		if !isOwn(string(kv.Key)) {
			out[string(kv.Key)] = string(kv.Value)
		}
	}
	return out
}

func TestNextBorrowerFindsNoTraces(t *testing.T) {
	first := &borrower{T: t}
	cp := Lend(first, controlplane.Options{Controllers: true})
	endpoint := cp.EtcdEndpoint()
	if err := cp.Apply(t.Context(), []byte(traces)); err != nil {
		t.Fatal(err)
	}
	core := kubernetes.NewForConfigOrDie(cp.Config())
	if _, err := core.CoreV1().Namespaces().Patch(t.Context(), "default", types.MergePatchType, []byte(`{"metadata":{"labels":{"a":"b"}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := core.RbacV1().ClusterRoles().Delete(t.Context(), "view", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for user, resource := range map[string]string{"somebody": "secrets", "reader": "pods"} {
		if err := poll(t.Context(), func() (bool, error) { return allowed(t, core, user, resource), nil }); err != nil {
			t.Fatal(err)
		}
	}
	first.end()

	another := &borrower{T: t}
	defer another.end()
	untouched := content(t, Lend(another, controlplane.Options{}, Setup{Name: "none", Run: func(context.Context, *controlplane.ControlPlane) error { return nil }}))
	for range 2 { // the second time with another API server
		next := &borrower{T: t}
		cp = Lend(next, controlplane.Options{})
		if cp.EtcdEndpoint() != endpoint {
			t.Fatalf("another control plane: %q", first.log)
		}
		core = kubernetes.NewForConfigOrDie(cp.Config())
		if cp.PID("kube-controller-manager") != 0 || cp.PID("kube-scheduler") != 0 {
			t.Error("controllers of the first borrower run")
		}
		for user, resource := range map[string]string{"somebody": "secrets", "reader": "pods"} {
			if allowed(t, core, user, resource) {
				t.Errorf("%s may still get %s", user, resource)
			}
		}
		if _, err := core.Discovery().ServerResourcesForGroupVersion("example.com/v1"); !apierrors.IsNotFound(err) {
			t.Errorf("example.com/v1: %v", err)
		}
		fresh := maps.Clone(untouched)
		for key, value := range content(t, cp) {
			if _, ok := fresh[key]; !ok {
				t.Errorf("%s is left", key)
			}
			if strings.Contains(value, "swordfish") || key == "/registry/namespaces/default" && strings.Contains(value, "\x01b") {
				t.Errorf("%s has a value of the first borrower", key)
			}
			delete(fresh, key)
		}
		for key := range fresh {
			t.Errorf("%s is missing", key)
		}
		// The cluster IP, the node port and the name of the namespace are free.
		if err := cp.Apply(t.Context(), []byte(traces)); err != nil {
			t.Error(err)
		}
		cp.StopAPIServer()
		if err := cp.StartAPIServer(t.Context()); err != nil {
			t.Fatal(err)
		}
		next.end()
	}
}

func TestSnapshotHasNoTraces(t *testing.T) {
	first := &borrower{T: t}
	cp := Lend(first, controlplane.Options{})
	if err := cp.Apply(t.Context(), []byte(traces)); err != nil {
		t.Fatal(err)
	}
	has := func() bool {
		t.Helper()
		etcd, err := dial(cp)
		if err != nil {
			t.Fatal(err)
		}
		defer etcd.Close()
		s, err := etcd.Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		var b strings.Builder
		if _, err := io.Copy(&b, s); err != nil {
			t.Fatal(err)
		}
		return strings.Contains(b.String(), "swordfish")
	}
	if !has() {
		t.Error("the snapshot lacks the ConfigMap")
	}
	first.end()
	next := &borrower{T: t}
	defer next.end()
	if again := Lend(next, controlplane.Options{}); again != cp {
		t.Fatalf("another control plane: %q", first.log)
	}
	if has() {
		t.Error("the snapshot has the ConfigMap of an earlier borrower")
	}
}

// An API server that is not used changes nothing that a reset would put back.
func TestContentIsCompleteAtTheStart(t *testing.T) {
	b := &borrower{T: t}
	defer b.end()
	cp := Lend(b, controlplane.Options{})
	p := planeOf(t, cp)
	core := kubernetes.NewForConfigOrDie(cp.Config())
	renewed := func() (out string) {
		t.Helper()
		l, err := core.CoordinationV1().Leases(metav1.NamespaceSystem).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range l.Items {
			out += x.Spec.RenewTime.String()
		}
		return out
	}
	// Two renewals of its lease are 20 seconds.
	for range 2 {
		was := renewed()
		if err := poll(t.Context(), func() (bool, error) { return renewed() != was, nil }); err != nil {
			t.Fatal(err)
		}
	}
	if differ, err := p.differences(t.Context()); len(differ) > 0 || err != nil {
		t.Errorf("%q changed, %v", differ, err)
	}
}

func planeOf(t *testing.T, cp *controlplane.ControlPlane) *plane {
	t.Helper()
	pool.mu.Lock()
	defer pool.mu.Unlock()
	for p := range pool.planes {
		if p.cp == cp {
			return p
		}
	}
	t.Fatal("the control plane is not in the pool")
	return nil
}

func TestControlPlanesThatAreNotLentAgain(t *testing.T) {
	for _, tt := range []struct {
		name, why string
		do        func(t *testing.T, b *borrower, cp *controlplane.ControlPlane)
	}{
		{name: "after a test that failed", why: "the test failed", do: func(_ *testing.T, b *borrower, _ *controlplane.ControlPlane) { b.failed = true }},
		{name: "without its API server", why: "the test ended kube-apiserver", do: func(_ *testing.T, _ *borrower, cp *controlplane.ControlPlane) { cp.StopAPIServer() }},
		{name: "with a quota that the API server remembers", why: "the API server remembers /registry/resourcequotas/default/small", do: func(t *testing.T, _ *borrower, cp *controlplane.ControlPlane) {
			q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "small"}}
			if _, err := kubernetes.NewForConfigOrDie(cp.Config()).CoreV1().ResourceQuotas("default").Create(t.Context(), q, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := &borrower{T: t}
			cp := Lend(b, controlplane.Options{})
			tt.do(t, b, cp)
			b.end()
			if want := "the control plane is not lent again: " + tt.why; !slices.Equal(b.log, []string{want}) {
				t.Errorf("it said %q, want %q", b.log, want)
			}
			if cp.PID("etcd") != 0 {
				t.Error("its etcd runs")
			}
			pool.mu.Lock()
			defer pool.mu.Unlock()
			for _, p := range pool.idle[kindOf(controlplane.Options{}, nil)] {
				if p.cp == cp {
					t.Error("it can be lent again")
				}
			}
		})
	}
}

func TestBorrowersAtTheSameTimeAndOfOtherKinds(t *testing.T) {
	ran := 0
	with := Setup{Name: "a definition and a namespace", Run: func(ctx context.Context, cp *controlplane.ControlPlane) error {
		ran++
		return cp.Apply(ctx, []byte(traces))
	}}
	a, b, c := &borrower{T: t}, &borrower{T: t}, &borrower{T: t}
	one, two, other := Lend(a, controlplane.Options{}, with), Lend(b, controlplane.Options{}), Lend(c, controlplane.Options{})
	if one == two || one == other || two == other {
		t.Error("two borrowers have the same control plane")
	}
	core := kubernetes.NewForConfigOrDie(one.Config())
	if err := core.CoreV1().Nodes().Delete(t.Context(), "worker-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	a.end()
	b.end()
	c.end()
	t.Logf("three resets took %v", time.Since(began).Round(time.Millisecond))
	again := &borrower{T: t}
	defer again.end()
	cp := Lend(again, controlplane.Options{}, with)
	if cp != one {
		t.Errorf("it is not the one that has the setup; %q", slices.Concat(a.log, b.log, c.log))
	}
	if _, err := kubernetes.NewForConfigOrDie(cp.Config()).CoreV1().Nodes().Get(t.Context(), "worker-0", metav1.GetOptions{}); err != nil {
		t.Errorf("an object of the setup: %v", err)
	}
	if ran != 1 {
		t.Errorf("the setup ran %d times, want 1", ran)
	}
}
