package kube

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cluster"
)

// A read-only client sends no request that could change a cluster or start something in it.
func TestReadOnlySendsNoChange(t *testing.T) {
	for _, tt := range []struct {
		method, path string
		sent         bool
	}{
		{"GET", "/api/v1/pods", true},
		{"GET", "/api/v1/namespaces/proxy/pods", true},
		{"GET", "/api/v1/namespaces/proxy/pods/exec", true}, // names, not subresources
		{"GET", "/apis/apps/v1/namespaces/a/deployments/attach", true},
		{"GET", "/k8s/clusters/c-1/api/v1/namespaces/a/pods/b/exec", false},
		{"GET", "/api/v1/namespaces/a/pods/b/../c/exec", false},
		{"GET", "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachineinstances/b/portforward/22", false},
		{"HEAD", "/healthz", true},
		{"POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", true},
		{"POST", "/k8s/clusters/c-1/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", true},
		{"POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", false},
		{"POST", "/api/v1/namespaces/a/pods/b/eviction", false},
		{"POST", "/api/v1/namespaces/a/serviceaccounts/b/token", false},
		{"PUT", "/api/v1/nodes/a", false},
		{"PATCH", "/api/v1/nodes/a", false},
		{"DELETE", "/api/v1/nodes/a", false},
		{"GET", "/api/v1/nodes/a/proxy/configz", false},
		{"GET", "/api/v1/nodes/a/proxy/run/ns/pod/c", false},
		{"GET", "/api/v1/namespaces/a/pods/b/exec", false},
		{"GET", "/api/v1/namespaces/a/pods/b/portforward", false},
	} {
		sent := false
		rt := readOnly{roundTripper(func(r *http.Request) (*http.Response, error) {
			sent = true
			return httptest.NewRecorder().Result(), nil
		})}
		resp, err := rt.RoundTrip(httptest.NewRequestWithContext(t.Context(), tt.method, "https://host"+tt.path, http.NoBody))
		if resp != nil {
			resp.Body.Close()
		}
		if sent != tt.sent || !sent && !errors.Is(err, ErrReadOnly) {
			t.Errorf("%s %s: sent %v, want %v; %v", tt.method, tt.path, sent, tt.sent, err)
		}
	}
}

func TestReadOnlyClient(t *testing.T) {
	requests := 0
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests++ }))
	defer srv.Close()
	sel, err := Select(cluster.Access{Kubeconfig: kubeconfigOf(t, "a", srv.URL, "token: secret-token")}, "")
	if err != nil {
		t.Fatal(err)
	}
	c, err := ConnectReadOnly(sel.Kubeconfig, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.core.CoreV1().Namespaces().Create(context.Background(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{})
	if !errors.Is(err, ErrReadOnly) || requests > 0 {
		t.Errorf("create: %v, %d requests", err, requests)
	}
	if got := Credentials(sel.Kubeconfig); len(got) != 1 || got[0] != "secret-token" {
		t.Errorf("credentials %q", got)
	}
}
