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
		{method: "GET", path: "/api/v1/pods", sent: true},
		{method: "GET", path: "/api/v1/namespaces/proxy/pods", sent: true},
		{method: "GET", path: "/api/v1/namespaces/proxy/pods/exec", sent: true}, // names, not subresources
		{method: "GET", path: "/apis/apps/v1/namespaces/a/deployments/attach", sent: true},
		{method: "GET", path: "/k8s/clusters/c-1/api/v1/namespaces/a/pods/b/exec", sent: false},
		{method: "GET", path: "/api/v1/namespaces/a/pods/b/../c/exec", sent: false},
		{method: "GET", path: "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachineinstances/b/portforward/22", sent: false},
		{method: "HEAD", path: "/healthz", sent: true},
		{method: "POST", path: "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", sent: true},
		{method: "POST", path: "/k8s/clusters/c-1/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", sent: true},
		{method: "POST", path: "/apis/authorization.k8s.io/v1/subjectaccessreviews", sent: false},
		{method: "POST", path: "/api/v1/namespaces/a/pods/b/eviction", sent: false},
		{method: "POST", path: "/api/v1/namespaces/a/serviceaccounts/b/token", sent: false},
		{method: "PUT", path: "/api/v1/nodes/a", sent: false},
		{method: "PATCH", path: "/api/v1/nodes/a", sent: false},
		{method: "DELETE", path: "/api/v1/nodes/a", sent: false},
		{method: "GET", path: "/api/v1/nodes/a/proxy/configz", sent: false},
		{method: "GET", path: "/api/v1/nodes/a/proxy/run/ns/pod/c", sent: false},
		{method: "GET", path: "/api/v1/namespaces/a/pods/b/exec", sent: false},
		{method: "GET", path: "/api/v1/namespaces/a/pods/b/portforward", sent: false},
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
