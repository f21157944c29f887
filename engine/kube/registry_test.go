package kube

import (
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	"constellation/engine"
	"constellation/engine/registry"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
)

func TestImageRepositoryAloneIsReplaced(t *testing.T) {
	const before = "apiVersion: kubeadm.k8s.io/v1beta4\ndns: {imageRepository: other.example.com}\nimageRepository: registry.k8s.io\nkind: ClusterConfiguration\n"
	got, err := withImageRepository(before, "registry.example.com:5000/mirror/kubernetes")
	if want := strings.Replace(before, ": registry.k8s.io", ": registry.example.com:5000/mirror/kubernetes", 1); err != nil || got != want {
		t.Errorf("%v\n%s\nwant\n%s", err, got, want)
	}
	got, err = withImageRepository("kind: ClusterConfiguration", "registry.example.com/kubernetes")
	if want := "kind: ClusterConfiguration\nimageRepository: registry.example.com/kubernetes\n"; err != nil || got != want {
		t.Errorf("without the field: %v\n%s\nwant\n%s", err, got, want)
	}
	for _, bad := range []string{"{a: b}", "a: ["} {
		if got, err := withImageRepository(bad, "registry.example.com/kubernetes"); err == nil {
			t.Errorf("%q became %q", bad, got)
		}
	}
}

// registryParts changes each part of a registry by hand on a real API server.
func registryParts(t *testing.T, c *Client) {
	ctx := t.Context()
	want := registry.Registry{Address: "one.example.com/mirror", Username: "robot", Password: "secret", CABundle: "PEM"}
	has := func(what string, plans, expected bool) {
		t.Helper()
		if is, err := c.HasRegistry(ctx, want, plans); err != nil || is != expected {
			t.Errorf("%s: the cluster has the registry: %t, %v", what, is, err)
		}
	}
	set := func(plans bool) {
		t.Helper()
		if _, err := c.SetRegistry(ctx, want, plans); err != nil {
			t.Fatal(err)
		}
	}
	secrets := func(ns string) corev1client.SecretInterface { return c.core.CoreV1().Secrets(ns) }
	repository := func(to string) string {
		t.Helper()
		all := c.core.CoreV1().ConfigMaps(systemNamespace)
		m, err := all.Get(ctx, kubeadmConfigName, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		is, err := imageRepository(m.Data[keyClusterConfig])
		if err == nil && to != "" {
			m.Data[keyClusterConfig] = "imageRepository: " + to + "\nkind: ClusterConfiguration\n"
			_, err = all.Update(ctx, m, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	// The contract's test has made and emptied the namespace of Plans.
	set(false)
	has("without Plans", false, true)
	has("with Plans", true, false)
	if _, err := secrets(engine.PlansNamespace).Get(ctx, registry.SecretName, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the namespace of Plans has the login without need: %v", err)
	}
	set(true)
	has("with Plans", true, true)
	if is := repository(""); is != want.Repository() {
		t.Errorf("kubeadm pulls from %s, want %s", is, want.Repository())
	}
	for _, ns := range registryNamespaces(true) {
		s, err := secrets(ns).Get(ctx, registry.SecretName, metav1.GetOptions{})
		if err != nil || s.Type != corev1.SecretTypeDockerConfigJson || string(s.Data[registry.KeyCA]) != want.CABundle {
			t.Errorf("Secret in %s has type %s and keys %v: %v", ns, s.Type, slices.Collect(maps.Keys(s.Data)), err)
			continue
		}
		s.Data[registry.KeyCA] = []byte("another")
		if _, err := secrets(ns).Update(ctx, s, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		has("other authorities in "+ns, true, false)
		set(true)
		if err := secrets(ns).Delete(ctx, registry.SecretName, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		has("no Secret in "+ns, true, false)
		set(true)
		has("repaired in "+ns, true, true)
	}
	repository(registry.Upstream)
	has("kubeadm pulls from its publisher", true, false)
	set(true)
	has("kubeadm repaired", true, true)

	// A Secret without a login that this program wrote is another registry, not an error.
	s, err := secrets(Namespace).Get(ctx, registry.SecretName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.Data[corev1.DockerConfigJsonKey] = []byte(`{"auths":{"other.example.com":{"auth":"cm9ib3Q6c2VjcmV0"}}}`)
	if _, err := secrets(Namespace).Update(ctx, s, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if is, err := c.Registry(ctx); err != nil || is.Address != want.Address || is.Username != "" {
		t.Errorf("registry with a login changed by hand: %q with user %q, %v", is.Address, is.Username, err)
	}
	has("login changed by hand", true, false)

	// A repository that is not ours stays when the registry is removed.
	repository("own.example.com")
	if changed, err := c.SetRegistry(ctx, registry.Registry{}, true); err != nil || changed {
		t.Errorf("removing changed kubeadm's configuration: %t, %v", changed, err)
	}
	if is := repository(""); is != "own.example.com" {
		t.Errorf("kubeadm pulls from %s, want what its owner wrote", is)
	}
	for _, ns := range registryNamespaces(true) {
		if _, err := secrets(ns).Get(ctx, registry.SecretName, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("the Secret in %s is left: %v", ns, err)
		}
	}
}

// An API server that restarts during a write loses the answer. The write is repeated, whether it was carried out or not.
func TestLostAnswersToWritesAreAskedForAgain(t *testing.T) {
	cp := controlplanetest.Lend(t, controlplane.Options{})
	config := cp.Config()
	var mu sync.Mutex
	lost := map[string]bool{}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			resp, err := next.RoundTrip(r)
			mu.Lock()
			defer mu.Unlock()
			if key := r.Method + " " + r.URL.Path; err == nil && r.Method != http.MethodGet && !lost[key] {
				lost[key] = true
				_ = resp.Body.Close()
				return nil, io.ErrUnexpectedEOF
			}
			return resp, err
		})
	})
	c, err := ForConfig(config, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetChartSet(t.Context(), map[string]int{"a": 1}); err != nil {
		t.Error(err)
	}
	if before, err := c.ChartSet(t.Context()); err != nil || before["a"] != 1 {
		t.Errorf("the chart set is %v, %v", before, err)
	}
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: kubeadmConfigName}, Data: map[string]string{keyClusterConfig: "kind: ClusterConfiguration\n"}}
	sure, err := ForConfig(cp.Config(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sure.core.CoreV1().ConfigMaps(systemNamespace).Create(t.Context(), m, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	want := registry.Registry{Address: "registry.example.com:5000"}
	if changed, err := c.SetRegistry(t.Context(), want, true); err != nil || !changed {
		t.Errorf("the registry is set: changed %t, %v", changed, err)
	}
	if has, err := c.HasRegistry(t.Context(), want, true); err != nil || !has {
		t.Errorf("the registry is set: %t, %v", has, err)
	}
	for _, path := range []string{"PATCH /api/v1/namespaces/" + Namespace, "POST /api/v1/namespaces/" + Namespace + "/configmaps", "PUT /api/v1/namespaces/kube-system/configmaps/" + kubeadmConfigName} {
		if !lost[path] {
			t.Errorf("the answer to %s was not lost; those were: %v", path, lost)
		}
	}
}
