package kube

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cluster"
	"constellation/engine/kube/preflight"
	"constellation/engine/plan"
	"constellation/engine/secretscan"
	"constellation/engine/support"
)

// SupportBundle writes a bundle for maintainers.
func SupportBundle(ctx context.Context, r support.Request) (support.Result, error) {
	if r.Workspace != nil {
		if b, err := r.Workspace.Kubeconfig(); err == nil { // else it has no credentials to remove
			r.Secrets = append(r.Secrets, credentialSecrets(b)...)
		}
	}
	if r.Cluster == nil {
		return support.Write(ctx, r, nil)
	}
	r.Secrets = append(r.Secrets, credentialSecrets(r.Cluster.Kubeconfig)...)
	f, err := OpenReadOnly(r.Cluster.Kubeconfig, r.Cluster.RequestTimeout, nil)
	if err != nil {
		return support.Result{}, &plan.Error{Op: fmt.Sprintf("use context %q", r.Cluster.Context), Err: err, Exit: plan.ExitUsage, Remedy: "correct the kubeconfig"}
	}
	w, err := f.client.wire()
	if err != nil {
		return support.Result{}, err
	}
	forwards, err := Connect(r.Cluster.Kubeconfig, nil)
	if err != nil {
		return support.Result{}, err
	}
	return support.Write(ctx, r, &supportAPI{reads: f, wire: w, forwards: forwards})
}

// SupportRole is the manifest of the least ClusterRole for a complete bundle.
func SupportRole() string {
	var rights []preflight.Right
	for _, l := range support.Lists {
		rights = append(rights, preflight.Right{Verb: "list", Group: l.Group, Resource: l.Resource})
	}
	for _, u := range support.URLs {
		rights = append(rights, preflight.Right{Verb: "get", URL: u})
	}
	rights = append(rights, preflight.Right{Verb: "get", Resource: "pods"}, preflight.Right{Verb: "get", Resource: "pods/log"}, preflight.Right{Verb: "create", Resource: "pods/portforward"})
	return preflight.ClusterRole("constellation-support-bundle", rights)
}

// supportRequest bounds one request of a bundle.
const supportRequest = 30 * time.Second

// credentialSecrets returns the credentials of a kubeconfig.
func credentialSecrets(kubeconfig []byte) (out []secretscan.Secret) {
	for _, s := range Credentials(kubeconfig) {
		out = append(out, secretscan.Secret{Kind: "credential of a kubeconfig", Value: []byte(s)})
	}
	return out
}

// supportAPI implements [support.API].
type supportAPI struct {
	reads *Foreign
	wire  *wire
	// forwards opens port-forwards, which a read-only client refuses.
	forwards *Client
	denied   []preflight.Right
}

// Get implements [support.API].
func (a *supportAPI) Get(ctx context.Context, path string, query url.Values) (int, io.ReadCloser, error) {
	u := a.wire.base + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(a.reads.config.Timeout, supportRequest))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		cancel()
		return 0, nil, err
	}
	req.Header.Set("Accept", "application/json, */*")
	resp, err := a.wire.client.Do(req) //nolint:bodyclose // the caller of Get closes it
	if err != nil {
		cancel()
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err // the request is named by the caller
		}
		return 0, nil, classify(err)
	}
	return resp.StatusCode, boundedBody{resp.Body, cancel}, nil
}

// Metrics implements [support.API].
func (a *supportAPI) Metrics(ctx context.Context, namespace, pod string, port int32) (io.ReadCloser, error) {
	ctx, cancel := context.WithTimeout(ctx, supportRequest)
	fail := func(err error) (io.ReadCloser, error) {
		cancel()
		if errors.Is(classify(err), cluster.ErrForbidden) {
			a.denied = append(a.denied, preflight.Right{Verb: "create", Resource: "pods/portforward"})
		}
		return nil, err
	}
	p, err := a.reads.client.core.CoreV1().Pods(namespace).Get(ctx, pod, metav1.GetOptions{})
	if err != nil {
		return fail(err)
	}
	if p.Status.Phase != corev1.PodRunning {
		return fail(fmt.Errorf("the pod is %s, want %s", p.Status.Phase, corev1.PodRunning))
	}
	conn, err := a.forwards.tunnel(ctx, p, port)
	if err != nil {
		return fail(err)
	}
	closed := context.AfterFunc(ctx, func() { _ = conn.Close() }) // deadlines have no effect on it
	end := func() { closed(); _ = conn.Close(); cancel() }
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+pod+"/metrics", nil)
	if err == nil {
		req.Close = true
		err = req.Write(conn)
	}
	var resp *http.Response
	if err == nil {
		resp, err = http.ReadResponse(bufio.NewReader(conn), req) //nolint:bodyclose // it ends with the connection, or the caller closes it
	}
	if err != nil {
		end()
		return fail(fmt.Errorf("read metrics: %w", err))
	}
	if resp.StatusCode != http.StatusOK {
		end()
		return fail(fmt.Errorf("read metrics: %s", resp.Status))
	}
	return boundedBody{resp.Body, end}, nil
}

// MissingRules implements [support.API].
func (a *supportAPI) MissingRules() string {
	denied := append(a.reads.requests.Denied(), a.denied...)
	if len(denied) == 0 {
		return ""
	}
	return preflight.ClusterRole("constellation-support-bundle-missing", slices.Compact(denied))
}
