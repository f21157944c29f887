// Package kube is the engine's client of a cluster: it implements [engine.Cluster] with the
// Kubernetes API and Helm's SDK.
//
// It hides server-side apply, watches, the storage of charts, and which of the API server's
// errors are transient. Transient errors are retried until the caller's context ends;
// permanent errors are returned as one of the engine's errors. The package makes no decisions,
// keeps only caches between calls, and writes secrets to the API alone.
package kube

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/kube/preflight"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/operator/api/v1alpha1"
)

// Namespaces that we use.
const (
	// Namespace is the namespace of our services.
	Namespace = "constellation-system"
	// systemNamespace is the namespace of the ConfigMaps.
	systemNamespace = "kube-system"
)

// fieldManager owns the fields that the engine sets.
const fieldManager = "constellation"

// Client is a cluster. It is safe for concurrent use.
type Client struct {
	config     *rest.Config
	kubeconfig clientcmd.ClientConfig
	core       kubernetes.Interface
	dynamic    dynamic.Interface
	log        *slog.Logger

	discovery discovery.CachedDiscoveryInterface

	nodes    mirror[cluster.Node]
	expected mirror[cluster.ExpectedNode]
	rollouts mirror[cluster.Rollout] // by the name of NodeVersion; without moves
	moves    mirror[cluster.Move]
	plans    mirror[cluster.NodePlan]
	planless unseen
	groups   groupNames
}

var (
	_ engine.Cluster   = (*Client)(nil)
	_ engine.Snapshots = (*Client)(nil)
	_ engine.Encryptor = (*Client)(nil)
)

// Connect returns the client for a kubeconfig. It sends no request.
func Connect(kubeconfig []byte, log *slog.Logger) (*Client, error) {
	cc, err := clientcmd.NewClientConfigFromBytes(kubeconfig)
	if err != nil {
		return nil, errors.New("read kubeconfig: it is not valid") // the error could quote secrets of the kubeconfig
	}
	config, err := cc.ClientConfig()
	if err != nil {
		return nil, errors.New("read kubeconfig: it is not valid")
	}
	c, err := ForConfig(config, log)
	if err != nil {
		return nil, err
	}
	c.kubeconfig = cc
	return c, nil
}

// ConnectIn is Connect, with the request timeout of ctx.
func ConnectIn(ctx context.Context, kubeconfig []byte, log *slog.Logger) (*Client, error) {
	c, err := Connect(kubeconfig, log)
	limit := cluster.RequestTimeout(ctx)
	if err != nil || limit <= 0 {
		return c, err
	}
	cc, config := c.kubeconfig, rest.CopyConfig(c.config)
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return bounded{rt, limit} })
	if c, err = ForConfig(config, log); err == nil {
		c.kubeconfig = cc
	}
	return c, err
}

// bounded bounds each request, except watches and logs that are followed.
type bounded struct {
	next  http.RoundTripper
	limit time.Duration
}

// RoundTrip implements [http.RoundTripper].
func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	if q := r.URL.Query(); q.Get("watch") != "" || q.Get("follow") != "" {
		return b.next.RoundTrip(r)
	}
	ctx, cancel := context.WithTimeout(r.Context(), b.limit)
	answer, err := b.next.RoundTrip(r.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	answer.Body = boundedBody{answer.Body, cancel}
	return answer, nil
}

// boundedBody ends the limit of a request when its answer was read.
type boundedBody struct {
	io.ReadCloser
	cancel context.CancelFunc
}

// Close implements [io.Closer].
func (b boundedBody) Close() error {
	defer b.cancel()
	return b.ReadCloser.Close()
}

// Manages reports whether the cluster serves our kinds. Others upgrade a cluster without them.
func (c *Client) Manages(ctx context.Context) (bool, error) {
	var groups metav1.APIGroupList
	err := retry(ctx, func(ctx context.Context) error {
		b, err := c.core.Discovery().RESTClient().Get().AbsPath("/apis").SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
		if err != nil {
			return err
		}
		return unmarshal(b, &groups)
	})
	if err != nil {
		return false, fmt.Errorf("read API groups: %w", err)
	}
	return slices.ContainsFunc(groups.Groups, func(g metav1.APIGroup) bool { return g.Name == v1alpha1.GroupVersion.Group }), nil
}

// StuckDrains returns what keeps pods on nodes that they should leave, with the command that frees
// each. It sends list requests alone.
func (c *Client) StuckDrains(ctx context.Context) ([]plan.Finding, error) {
	found, err := preflight.StuckDrains(ctx, c.config)
	return found, classify(err)
}

// WatchNodes is WatchRollout of a cluster without our kinds.
func (c *Client) WatchNodes(ctx context.Context, changed func()) error {
	return together(ctx,
		func(ctx context.Context) error { return c.watchNodes(ctx, changed) },
		func(ctx context.Context) error { return c.watchPlans(ctx, changed) })
}

// ForConfig returns the client for config.
func ForConfig(config *rest.Config, log *slog.Logger) (*Client, error) {
	quiet()
	config = rest.CopyConfig(config)
	// Enough for a full status at once; well below the capacity of an API server with one control
	// plane node.
	config.QPS, config.Burst = 50, 100
	config.UserAgent = "constellation/" + version.Release
	// A hung connection must not block a call indefinitely. Watches and logs have no limit.
	if config.Dial == nil {
		config.Dial = (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	c := &Client{config: config, log: log}
	var err error
	builtin := rest.CopyConfig(config) // kinds that are decoded from a slimmer form at a third of the cost
	builtin.AcceptContentTypes, builtin.ContentType = runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON, runtime.ContentTypeProtobuf
	if c.core, err = kubernetes.NewForConfig(builtin); err != nil {
		return nil, fmt.Errorf("make Kubernetes client: %w", err)
	}
	if c.dynamic, err = dynamic.NewForConfig(config); err != nil {
		return nil, fmt.Errorf("make Kubernetes client: %w", err)
	}
	c.discovery = memory.NewMemCacheClient(c.core.Discovery())
	c.kubeconfig = clientcmd.NewDefaultClientConfig(apiConfig(config), nil)
	return c, nil
}

// quiet keeps client-go's own log lines out of the console; relevant ones are returned as
// errors. Setting another output is not enough, since klog writes errors to stderr as well;
// with a logger it writes nowhere else. Clients log from the moment they are created.
var quiet = sync.OnceFunc(func() { klog.SetLogger(logr.Discard()) })

// requestLimit bounds one request. Each retry gets the full limit.
const requestLimit = 15 * time.Second

// Version implements [engine.Cluster]. It does not retry, so that it can probe reachability. Only if
// a credential plugin took the time of the request, it sends a second one.
func (c *Client) Version(ctx context.Context) (string, error) {
	v, err := c.version(ctx)
	plugin := c.config.ExecProvider != nil || c.config.AuthProvider != nil
	if plugin && errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return c.version(ctx)
	}
	return v, err
}

func (c *Client) version(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var v struct {
		GitVersion string `json:"gitVersion"`
	}
	b, err := c.core.Discovery().RESTClient().Get().AbsPath("/version").DoRaw(ctx)
	if err == nil {
		err = unmarshal(b, &v)
	}
	if err != nil {
		return "", fmt.Errorf("read version: %w", classify(err))
	}
	return v.GitVersion, nil
}

// retry calls f until it succeeds, fails permanently, or ctx ends. If ctx ends, it returns f's
// last error.
func retry(ctx context.Context, f func(ctx context.Context) error) error {
	wait := 100 * time.Millisecond
	var last error
	for {
		limited, cancel := context.WithTimeout(ctx, requestLimit)
		err := classify(f(limited))
		cancel()
		if err == nil || !errors.Is(err, cluster.ErrUnreachable) {
			return err
		}
		if last != nil && errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
			err = last // the error before the timeout is more specific
		}
		last = err
		t := time.NewTimer(wait/2 + rand.N(wait))
		select {
		case <-ctx.Done():
			t.Stop()
			if errors.Is(ctx.Err(), context.Canceled) {
				return ctx.Err()
			}
			return err
		case <-t.C:
		}
		wait = min(wait*2, 3*time.Second)
	}
}

// classify wraps err with the engine's error for its class.
func classify(err error) error {
	var status apierrors.APIStatus
	switch {
	case err == nil:
		return nil
	case errors.Is(err, cluster.ErrAbsent) || errors.Is(err, cluster.ErrUnreachable) || errors.Is(err, cluster.ErrDenied):
		return err
	case errors.Is(err, context.Canceled):
		return err
	case apierrors.IsNotFound(err) || meta.IsNoMatchError(err):
		return fmt.Errorf("%w: %w", cluster.ErrAbsent, err)
	case apierrors.IsForbidden(err) && !strings.Contains(err.Error(), `"system:anonymous"`):
		return fmt.Errorf("%w: %w", cluster.ErrForbidden, err)
	case apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err) || isCertificate(err):
		return fmt.Errorf("%w: %w", cluster.ErrDenied, err)
	case isOverloaded(err):
		return fmt.Errorf("%w: %w", cluster.ErrUnreachable, err)
	case errors.As(err, &status):
		return err // the API server understood the request and rejected it
	case isNetwork(err):
		return fmt.Errorf("%w: %w", cluster.ErrUnreachable, short(err))
	}
	return err
}

// isOverloaded reports whether the API server responds, but cannot process requests now.
func isOverloaded(err error) bool {
	return apierrors.IsTooManyRequests(err) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) ||
		apierrors.IsServiceUnavailable(err) || apierrors.IsInternalError(err) || apierrors.IsUnexpectedServerError(err)
}

// isNetwork reports whether no complete response came from the API server.
func isNetwork(err error) bool {
	var netErr net.Error
	return errors.As(err, &netErr) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNREFUSED) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, context.DeadlineExceeded) || isConnection(err.Error())
}

// isConnection recognises untyped errors of http2 and client-go.
func isConnection(text string) bool {
	for _, s := range []string{"http2: client connection lost", "GOAWAY", "connection reset", "connection refused", "use of closed network connection", "TLS handshake timeout", "client rate limiter Wait returned an error"} {
		if strings.Contains(text, s) {
			return true
		}
	}
	return false
}

func isCertificate(err error) bool {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var host x509.HostnameError
	return errors.As(err, &unknown) || errors.As(err, &invalid) || errors.As(err, &host)
}

// short strips method and URL from an error of the HTTP client, since the caller names the
// request.
func short(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op
	}
	return err
}
