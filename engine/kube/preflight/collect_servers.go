package preflight

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// apiServer is the state of one API server, as it reports it.
type apiServer struct {
	address string // host:port of the request; the balancer's for those behind it
	version string // such as v1.35.4; unvalidated
	// cert is its serving certificate, ca that of its authority; nil without TLS or without
	// verification.
	cert, ca *x509.Certificate
	// failing are its failing readiness checks: "etcd"; notReady is why they could not be
	// read.
	failing  []string
	notReady string
	// metrics are nil if the user may not read them.
	metrics *serverMetrics
	date    time.Time // of its clock; zero if unknown
}

// serverMetrics are the metrics of an API server that checks use, counted since started.
type serverMetrics struct {
	started time.Time
	// deprecated are requested APIs with the release that removes them.
	deprecated []deprecatedUse
	// storage is the size of etcd's database in bytes, by endpoint.
	storage map[string]int64
	// requests and rejected count all requests, and those that priority and fairness
	// rejected.
	requests, rejected float64
	rejectedLevel      string // the priority level with the most of them
}

// deprecatedUse is a deprecated API that clients requested.
type deprecatedUse struct {
	group, version, resource, removed string
	verbs                             map[string]float64
}

const (
	// dialLimit bounds a connection attempt. Many addresses are unreachable from a user's
	// network, and no round trip on earth takes longer.
	dialLimit = 1500 * time.Millisecond
	// serverLimit bounds a handshake or a short response.
	serverLimit = 4 * time.Second
	// metricsLimit bounds everything, including megabytes of metrics.
	metricsLimit = 20 * time.Second
	// maxAnswer bounds the size of a response.
	maxAnswer = 128 << 20
	// attemptsPerServer is the number of connections per API server behind a balancer. With it,
	// one of three servers is missed once in ten thousand runs.
	attemptsPerServer = 8
)

// servers queries every API server. Servers that are unreachable by their own address are
// reached through the kubeconfig's load balancer: each connection leads to any of them, and
// their certificates tell them apart.
func (r *reader) servers(ctx context.Context) error {
	addresses, err := r.serverAddresses(ctx)
	if err != nil {
		return err
	}
	found := make([]*apiServer, len(addresses))
	failed := make([]error, len(addresses))
	var asking sync.WaitGroup
	for i, a := range addresses {
		asking.Go(func() {
			if r.config.Insecure {
				// Another host with that address would get the token of the user.
				failed[i] = errors.New("it was not queried: the kubeconfig does not verify certificates")
				return
			}
			c := rest.CopyConfig(r.config)
			c.Host = "https://" + a
			// The name is in every API server's certificate, its address need not be.
			c.ServerName = cmp.Or(c.ServerName, "kubernetes.default.svc")
			found[i], failed[i] = askServer(ctx, c, a, nil, func(done func()) { done() })
		})
	}
	asking.Wait()
	for i, s := range found {
		if s != nil {
			r.w.servers = append(r.w.servers, *s)
			continue
		}
		r.w.silent = append(r.w.silent, silentServer{addresses[i], serverProblem(failed[i]), expired(failed[i])})
	}
	if len(r.w.silent) > 0 || len(addresses) == 0 {
		if err := r.behindBalancer(ctx, max(1, len(addresses))); err != nil && len(r.w.servers) == 0 {
			return err
		}
	}
	if len(r.w.servers) >= len(addresses) {
		// All were reached through the balancer.
		r.w.silent = slices.DeleteFunc(r.w.silent, func(s silentServer) bool { return s.expired == nil })
	}
	return nil
}

// noMetrics reports API servers without readable metrics.
func (w *world) noMetrics() {
	for i := range w.servers {
		if w.servers[i].metrics == nil {
			w.unread[sourceMetrics] = fmt.Sprintf("API server %s: the kubeconfig's user may not read them, or it does not have them", printable(w.servers[i].address))
			return
		}
	}
}

// serverAddresses returns the addresses that the API servers publish, if any.
func (r *reader) serverAddresses(ctx context.Context) ([]string, error) {
	l, err := r.core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
	if err != nil {
		return nil, err
	}
	var out []string
	for _, s := range l.Items {
		for _, port := range s.Ports {
			if port.Port == nil {
				continue
			}
			for _, e := range s.Endpoints {
				for _, a := range e.Addresses {
					out = append(out, net.JoinHostPort(a, strconv.Itoa(int(*port.Port))))
				}
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// behindBalancer opens new connections to the kubeconfig's address until wanted API servers
// are known.
func (r *reader) behindBalancer(ctx context.Context, wanted int) error {
	known := map[string]bool{}
	for _, s := range r.w.servers {
		known[s.identity()] = true
	}
	u, err := url.Parse(r.config.Host)
	address := r.config.Host
	if err == nil && u.Host != "" {
		address = u.Host
	}
	// Connections stay open until the end: a least-connections balancer would otherwise choose
	// the same server every time.
	var open []func()
	defer func() {
		for _, done := range open {
			done()
		}
	}()
	for range attemptsPerServer * wanted {
		if len(r.w.servers) >= wanted {
			return nil
		}
		s, err := askServer(ctx, rest.CopyConfig(r.config), address, known, func(done func()) { open = append(open, done) })
		switch {
		case err != nil:
			return err
		case s != nil:
			known[s.identity()] = true
			r.w.servers = append(r.w.servers, *s)
		}
	}
	return nil
}

// identity distinguishes API servers by their certificates.
func (s *apiServer) identity() string {
	if s.cert == nil {
		return ""
	}
	return string(s.cert.Signature)
}

// askServer queries one API server over a new connection. It returns nil if its identity is
// known already. The error is that of the first request. It passes the function that closes
// the connection to after.
func askServer(ctx context.Context, config *rest.Config, address string, known map[string]bool, after func(done func())) (*apiServer, error) {
	client, done, err := ownConnection(config)
	if err != nil {
		return nil, err
	}
	defer after(done)
	base := config.Host
	if !strings.Contains(base, "://") {
		base = "https://" + base
	}
	get := func(path string, limit time.Duration) (status int, header http.Header, state *tls.ConnectionState, body []byte, err error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(base, "/")+path, nil)
		if err != nil {
			return 0, nil, nil, nil, err
		}
		resp, err := client.Do(req)
		if err != nil {
			return 0, nil, nil, nil, err
		}
		defer resp.Body.Close()
		body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
		return resp.StatusCode, resp.Header, resp.TLS, body, err
	}

	out := &apiServer{address: address}
	status, header, state, body, err := get("/version", serverLimit)
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return nil, fmt.Errorf("it responds with status %d", status)
	}
	if state != nil && len(state.PeerCertificates) > 0 {
		out.cert = state.PeerCertificates[0]
		for _, chain := range state.VerifiedChains {
			out.ca = chain[len(chain)-1]
		}
	}
	if known[out.identity()] {
		return nil, nil
	}
	var v struct {
		GitVersion string `json:"gitVersion"`
	}
	if err := json.Unmarshal(body, &v); err != nil {
		return nil, errors.New("it does not respond like an API server")
	}
	out.version = v.GitVersion
	if t, err := http.ParseTime(header.Get("Date")); err == nil {
		out.date = t
	}

	switch status, _, _, body, err := get("/readyz?verbose", metricsLimit); {
	case err != nil:
		out.notReady = serverProblem(err)
	case status == http.StatusForbidden || status == http.StatusUnauthorized:
		out.notReady = "forbidden: the kubeconfig's user may not read it"
	default:
		out.failing = failingChecks(string(body))
		if status != http.StatusOK && len(out.failing) == 0 {
			out.notReady = fmt.Sprintf("it responds with status %d", status)
		}
	}
	if status, _, _, body, err := get("/metrics", metricsLimit); err == nil && status == http.StatusOK {
		if m, err := parseMetrics(body); err == nil {
			out.metrics = m
		}
	}
	return out, nil
}

// ownConnection returns a client with connections of its own and the function that closes
// them.
func ownConnection(config *rest.Config) (client *http.Client, done func(), err error) {
	if config.Transport != nil {
		// A configured transport handles the connection itself.
		rt, err := rest.HTTPWrappersForConfig(config, config.Transport)
		return &http.Client{Transport: rt}, func() {}, err
	}
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, nil, err
	}
	dial := config.Dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	limited := func(ctx context.Context, network, address string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialLimit)
		defer cancel()
		return dial(ctx, network, address)
	}
	t := &http.Transport{TLSClientConfig: tlsConfig, DialContext: limited, Proxy: config.Proxy, MaxConnsPerHost: 1, TLSHandshakeTimeout: serverLimit}
	if t.Proxy == nil {
		t.Proxy = http.ProxyFromEnvironment
	}
	rt, err := rest.HTTPWrappersForConfig(config, t)
	if err != nil {
		return nil, nil, err
	}
	return &http.Client{Transport: rt}, t.CloseIdleConnections, nil
}

// failingChecks reads the names of checks that fail: lines like "[-]etcd failed: reason
// withheld".
func failingChecks(body string) (out []string) {
	for line := range strings.Lines(body) {
		if rest, ok := strings.CutPrefix(line, "[-]"); ok {
			name, _, _ := strings.Cut(rest, " ")
			out = append(out, strings.TrimSpace(name))
		}
	}
	return out
}

// silentServer is an API server that cannot be reached by its own address.
type silentServer struct {
	address, why string
	expired      *x509.Certificate // if that is why
}

func serverProblem(err error) string {
	var netErr net.Error
	switch {
	case errors.As(err, &netErr) && netErr.Timeout(), errors.Is(err, context.DeadlineExceeded):
		return "no response; this network may not reach it"
	case err == nil:
		return "it was not queried"
	}
	var op *net.OpError
	if errors.As(err, &op) {
		return printable(op.Err.Error())
	}
	var u *url.Error
	if errors.As(err, &u) {
		return printable(u.Err.Error())
	}
	return printable(err.Error())
}

// expired returns the expired certificate that caused err.
func expired(err error) *x509.Certificate {
	var invalid x509.CertificateInvalidError
	if errors.As(err, &invalid) && invalid.Reason == x509.Expired {
		return invalid.Cert
	}
	return nil
}

// wantedMetrics are the metrics that are parsed.
var wantedMetrics = []string{
	"apiserver_requested_deprecated_apis", "apiserver_request_total", "process_start_time_seconds",
	"apiserver_flowcontrol_rejected_requests_total",
	sizeMetrics[0], sizeMetrics[1], sizeMetrics[2],
}

// sizeMetrics are the names of the size of etcd's database since v1.28, in v1.26 and v1.27, and
// before.
var sizeMetrics = [...]string{"apiserver_storage_size_bytes", "apiserver_storage_db_total_size_in_bytes", "etcd_db_total_size_in_bytes"}

// parseMetrics reads the metrics of an API server.
func parseMetrics(text []byte) (*serverMetrics, error) {
	// Only wanted lines are parsed, because parsing tens of thousands is slow.
	var few bytes.Buffer
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Bytes()
		name := bytes.TrimPrefix(line, []byte("# TYPE "))
		if i := bytes.IndexAny(name, "{ "); i > 0 && slices.Contains(wantedMetrics, string(name[:i])) {
			few.Write(line)
			few.WriteByte('\n')
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(&few)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	out := &serverMetrics{storage: map[string]int64{}}
	each := func(name string, f func(labels map[string]string, value float64)) {
		for _, m := range families[name].GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			f(labels, value(m))
		}
	}
	each("process_start_time_seconds", func(_ map[string]string, v float64) {
		out.started = time.UnixMilli(int64(v * 1000)).UTC()
	})
	if out.started.IsZero() {
		return nil, errors.New("read metrics: start time is missing")
	}
	for _, name := range sizeMetrics {
		if len(out.storage) > 0 {
			break
		}
		each(name, func(l map[string]string, v float64) {
			out.storage[cmp.Or(l["storage_cluster_id"], l["endpoint"], l["cluster"])] = int64(v)
		})
	}
	most := 0.0
	levels := map[string]float64{}
	each("apiserver_flowcontrol_rejected_requests_total", func(l map[string]string, v float64) {
		out.rejected += v
		if levels[l["priority_level"]] += v; levels[l["priority_level"]] > most {
			most, out.rejectedLevel = levels[l["priority_level"]], l["priority_level"]
		}
	})
	uses := map[[3]string]*deprecatedUse{}
	each("apiserver_requested_deprecated_apis", func(l map[string]string, _ float64) {
		key := [3]string{l["group"], l["version"], l["resource"]}
		uses[key] = &deprecatedUse{group: key[0], version: key[1], resource: key[2], removed: l["removed_release"], verbs: map[string]float64{}}
	})
	each("apiserver_request_total", func(l map[string]string, v float64) {
		out.requests += v
		if u := uses[[3]string{l["group"], l["version"], l["resource"]}]; u != nil {
			u.verbs[strings.ToLower(l["verb"])] += v
		}
	})
	for _, u := range uses {
		out.deprecated = append(out.deprecated, *u)
	}
	slices.SortFunc(out.deprecated, func(a, b deprecatedUse) int {
		return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.version, b.version), cmp.Compare(a.resource, b.resource))
	})
	return out, nil
}

func value(m *dto.Metric) float64 {
	switch {
	case m.Counter != nil:
		return m.GetCounter().GetValue()
	case m.Gauge != nil:
		return m.GetGauge().GetValue()
	}
	return m.GetUntyped().GetValue()
}
