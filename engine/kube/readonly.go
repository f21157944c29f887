package kube

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// ErrReadOnly is the error of a request that a read-only client does not send.
var ErrReadOnly = errors.New("this connection is read-only")

// reviews are the requests with which users ask for their own rights. They are POST, and they
// store nothing.
var reviews = []string{
	"/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
	"/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
	"/apis/authentication.k8s.io/v1/selfsubjectreviews",
}

// effective are the subresources whose GET requests can start something in a pod or on a node.
var effective = []string{"proxy", "exec", "attach", "portforward"}

// readOnly refuses all requests that could change a cluster or start something in it.
type readOnly struct{ next http.RoundTripper }

func (r readOnly) RoundTrip(req *http.Request) (*http.Response, error) {
	if !reads(req) {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, fmt.Errorf("%s %s: %w", req.Method, req.URL.Path, ErrReadOnly)
	}
	return r.next.RoundTrip(req)
}

// reads reports whether a request can only read.
func reads(req *http.Request) bool {
	switch req.Method {
	case http.MethodGet, http.MethodHead:
		return req.Header.Get("Upgrade") == "" && !startsSomething(req.URL.Path)
	case http.MethodPost:
		return slices.ContainsFunc(reviews, func(p string) bool { return strings.HasSuffix(req.URL.Path, p) })
	}
	return false
}

// startsSomething reports whether a path of the API has one of the subresources effective. Servers
// may have a path of their own before that of the API.
func startsSomething(urlPath string) bool {
	s := strings.Split(path.Clean("/"+urlPath), "/")
	for i := range s {
		rest := s[i:]
		switch {
		case rest[0] == "api" && len(rest) > 2:
			rest = rest[2:] // behind the version
		case rest[0] == "apis" && len(rest) > 3:
			rest = rest[3:] // behind group and version
		default:
			continue
		}
		if rest[0] == "namespaces" && len(rest) > 3 {
			rest = rest[2:]
		}
		if len(rest) > 2 && slices.Contains(effective, rest[2]) { // resource, name, subresource
			return true
		}
	}
	return false
}

// ConnectReadOnly is Connect for a client that cannot change the cluster: requests that could do
// so fail with ErrReadOnly before they are sent.
func ConnectReadOnly(kubeconfig []byte, log *slog.Logger) (*Client, error) {
	c, err := Connect(kubeconfig, log)
	if err != nil {
		return nil, err
	}
	config := rest.CopyConfig(c.config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return readOnly{next} })
	return ForConfig(config, log)
}

// OpenReadOnly is Open for a cluster that is only read; see ConnectReadOnly.
func OpenReadOnly(kubeconfig []byte, timeout time.Duration, log *slog.Logger) (*Foreign, error) {
	c, err := ConnectReadOnly(kubeconfig, log)
	if err != nil {
		return nil, err
	}
	return open(c, timeout, log)
}

// Credentials returns the secrets in a kubeconfig: tokens, passwords and private keys.
func Credentials(kubeconfig []byte) (out []string) {
	c, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil
	}
	for _, u := range c.AuthInfos {
		out = append(out, u.Token, u.Password, string(u.ClientKeyData))
		if u.AuthProvider != nil {
			out = slices.AppendSeq(out, maps.Values(u.AuthProvider.Config))
		}
		if u.Exec != nil {
			for _, e := range u.Exec.Env {
				out = append(out, e.Value)
			}
		}
	}
	return slices.DeleteFunc(out, func(s string) bool { return s == "" })
}
