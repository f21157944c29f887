package bootstrapper

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"

	"constellation/bootstrapper/initproto"
	"constellation/engine/atls"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/engine/registry"
	"constellation/engine/release"
	"constellation/engine/version"
)

const (
	// apiPort is the API server's port on each control plane, and at most load balancers.
	apiPort = 6443
	// clusterIDSize is in bytes.
	clusterIDSize = 32
	// maxSANs bounds the names in the API server's certificate.
	maxSANs = 64
	// maxItems bounds the items of hardening that a request switches off; there are about a dozen.
	maxItems = 64
	// probeTimeout bounds the probe for an existing cluster.
	probeTimeout = 3 * time.Second
	// maxSecret bounds an init secret in bytes; ours has 32.
	maxSecret = 1 << 10
	// maxRequest bounds a request in bytes. Components may carry small inline content.
	maxRequest = 1 << 20

	// Limits for unauthenticated callers. A console sends its secret at once.
	maxSilent     = 1024
	maxHandshakes = 256
	maxUnproven   = 64
	proofTimeout  = 15 * time.Second
)

// initServer lets a console initialize a cluster on this machine and follow the progress.
type initServer struct {
	initproto.UnimplementedBootstrapperServer

	b   *bootstrapper
	rec *record
	// spawn runs the work in the bootstrapper's context, so that it outlives every connection;
	// the bootstrapper waits for it at the end.
	spawn    func(func(context.Context))
	limiter  limiter
	refusals refusals
	stopping chan struct{} // closed when streams must end
	acked    chan struct{} // closed when the result was fetched
	// recovered is closed when a member with lost keys has them. awaitKeys owns it.
	recovered chan struct{}
	lost      []lostKeys // of a member; mu guards them

	mu      sync.Mutex // serializes decisions
	working bool
	// dirty means that kubeadm may have left files. The work owns it while it runs.
	dirty   bool
	ackOnce sync.Once

	asking chan struct{} // full while a call uses secret
	secret []byte        // SHA-256 from the cloud; nil until it was read
	// noSecret is the error of the last read, and its time.
	noSecret error
	asked    time.Time
}

func newInitServer(b *bootstrapper, rec *record, spawn func(func(context.Context))) *initServer {
	return &initServer{b: b, rec: rec, spawn: spawn, stopping: make(chan struct{}), acked: make(chan struct{}), recovered: make(chan struct{}), asking: make(chan struct{}, 1)}
}

// run serves on l until stop is closed.
func (s *initServer) run(l net.Listener, stop <-chan struct{}) error {
	log := s.b.m.Log
	g := grpc.NewServer(
		grpc.Creds(atls.NewServer(atls.Config{
			Purpose: atls.PurposeInit, Issuer: s.b.m.Issuer,
			MaxSilent: maxSilent, MaxHandshakes: maxHandshakes, MaxConnections: maxUnproven, ProofTimeout: proofTimeout,
			OnFailure: func(peer net.Addr, err error) { log.Debug("handshake failed", "peer", peer.String(), "err", err) },
		})),
		grpc.ConnectionTimeout(15*time.Second),
		grpc.MaxConcurrentStreams(8), grpc.MaxRecvMsgSize(maxRequest),
		grpc.MaxHeaderListSize(16<<10),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 2 * time.Second, PermitWithoutStream: true}),
	)
	initproto.RegisterBootstrapperServer(g, s)
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-stop:
		case <-ended:
		}
		close(s.stopping)
		hard := time.AfterFunc(stopGrace, g.Stop)
		defer hard.Stop()
		g.GracefulStop()
	}()
	err := g.Serve(l)
	close(ended)
	<-done
	if err != nil {
		return fmt.Errorf("serve a console: %w", err)
	}
	return nil
}

// Init implements the contract of package initproto.
func (s *initServer) Init(req *initproto.InitRequest, stream grpc.ServerStreamingServer[initproto.InitResponse]) error {
	ctx := stream.Context()
	err := s.authorize(ctx, req.GetInitSecret())
	if err == nil {
		err = s.begin(ctx, req)
	}
	if err == nil {
		err = s.rec.follow(ctx, s.stopping, func(m *initproto.InitResponse) error {
			m, err := withKubeconfig(s.b.state, m)
			if err != nil {
				return err
			}
			return stream.Send(m)
		})
	}
	if err != nil && ctx.Err() == nil {
		s.refused(ctx, err)
	}
	return answer(err)
}

// Ack implements the contract of package initproto.
func (s *initServer) Ack(ctx context.Context, req *initproto.AckRequest) (*initproto.AckResponse, error) {
	err := s.authorize(ctx, req.GetInitSecret())
	if err == nil {
		err = s.acknowledge()
	}
	if err != nil {
		s.refused(ctx, err)
		return nil, answer(err)
	}
	return &initproto.AckResponse{}, nil
}

// refused logs why a request was refused. Guesses of the secret may be many, so the log is
// rate-limited.
func (s *initServer) refused(ctx context.Context, err error) {
	attrs := []any{"peer", source(ctx), "err", err}
	var limited *limitedError
	if errors.Is(err, errSecret) || errors.As(err, &limited) {
		unlogged, ok := s.refusals.next(time.Now())
		if !ok {
			return
		}
		attrs = append(attrs, "unlogged", unlogged)
	}
	s.b.m.Log.Warn("init request refused", attrs...)
}

// authorize passes callers with the right init secret. All others learn only that it is wrong,
// or that they must wait.
func (s *initServer) authorize(ctx context.Context, secret []byte) error {
	want, err := s.secretHash(ctx)
	if err != nil {
		return err
	}
	// The secret is checked before any limit: 256 bits cannot be guessed, but a guesser must not
	// lock out the console that has the right one.
	if len(secret) <= maxSecret {
		if got := sha256.Sum256(secret); subtle.ConstantTimeCompare(got[:], want) == 1 {
			atls.Prove(ctx)
			return nil
		}
	}
	if wait := s.limiter.wrong(source(ctx), time.Now()); wait > 0 {
		return &limitedError{wait}
	}
	return errSecret
}

// secretHash asks the cloud once; the secret never changes. One caller asks at a time, and its
// failure answers all callers that waited, so that unauthenticated callers cannot flood the
// cloud through this machine.
func (s *initServer) secretHash(ctx context.Context) ([]byte, error) {
	came := time.Now()
	select {
	case s.asking <- struct{}{}:
		defer func() { <-s.asking }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if s.secret != nil {
		return s.secret, nil
	}
	if s.noSecret != nil && s.asked.After(came) {
		return nil, s.noSecret
	}
	asked := time.Now()
	h, err := s.b.m.Metadata.InitSecretHash(ctx)
	switch {
	case err != nil:
		err = fmt.Errorf("read hash of the init secret from the cloud: %w", err)
	case len(h) != sha256.Size:
		err = fmt.Errorf("read cloud metadata: init secret hash has %d bytes, want %d", len(h), sha256.Size)
	default:
		s.secret = h
		return h, nil
	}
	if ctx.Err() == nil { // otherwise it is this caller's own failure
		s.noSecret, s.asked = err, asked
	}
	return nil, err
}

// source identifies the caller for the limits.
func source(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	host, _, err := net.SplitHostPort(p.Addr.String())
	if err != nil {
		return p.Addr.String()
	}
	return host
}

// begin starts the work of req, or attaches to it.
func (s *initServer) begin(ctx context.Context, req *initproto.InitRequest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h, held := s.b.lock.holder(); held {
		if err := s.attach(h, req); err != nil || !h.Retry || s.working {
			return err
		}
		return s.again(ctx, req)
	}
	if _, err := s.b.understand(req); err != nil {
		return err
	}
	if err := s.noClusterYet(ctx); err != nil {
		return err
	}
	if err := s.b.storeKeys(ctx, req.GetClusterId(), secretKeys{req.GetCertifierKeys(), req.GetKmsKeys()}, ""); err != nil {
		return err
	}
	// On disk before the claim, so that every claim has a request.
	if err := keepRequest(s.b.state, req); err != nil {
		return err
	}
	if err := s.b.lock.take(byInit, req.GetClusterId()); err != nil {
		if h, _ := s.b.lock.holder(); h.By != byInit {
			err = errors.Join(err, removeAll(s.b.state, requestFile))
		}
		return err
	}
	s.b.m.Log.Info("node claimed by an init", "cluster", req.GetClusterName(), "version", req.GetKubernetesVersion())
	s.start(cloneRequest(req))
	return nil
}

// attach lets a console follow an init in progress.
func (s *initServer) attach(h holder, req *initproto.InitRequest) error {
	switch {
	case h.By == byJoin && h.State == claimed:
		return errJoinHolds
	case h.By == byJoin || h.State == member && s.rec.empty():
		return errMember
	case string(h.clusterID()) != string(req.GetClusterId()):
		return errOtherInit
	}
	return nil
}

// again restarts the work after a failure that is not final, with the new request: the
// configuration may have been the cause. The caller holds mu.
func (s *initServer) again(ctx context.Context, req *initproto.InitRequest) error {
	if _, err := s.b.understand(req); err != nil {
		return err
	}
	if err := s.b.storeKeys(ctx, req.GetClusterId(), secretKeys{req.GetCertifierKeys(), req.GetKmsKeys()}, ""); err != nil {
		return err
	}
	// The failure last: until it is removed, the next process reports it again.
	if err := keepRequest(s.b.state, req); err != nil {
		return err
	}
	s.rec.reopen()
	if err := s.b.lock.retry(); err != nil {
		return err
	}
	s.b.m.Log.Info("init retried", "cluster", req.GetClusterName(), "version", req.GetKubernetesVersion())
	s.start(cloneRequest(req))
	return nil
}

// resume continues an init of an earlier process.
func (s *initServer) resume() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, held := s.b.lock.holder()
	if !held || h.By != byInit {
		return nil
	}
	s.dirty = true // as far as this process is informed
	req, err := keptRequest(s.b.state)
	if err != nil {
		return err
	}
	if req == nil {
		return fmt.Errorf("%w: an init claimed it, but its request is missing; `bootstrapper reset` and a reboot make the machine unused", ErrStuck)
	}
	switch {
	case h.State == member && !s.rec.ended():
		// The process died between its success and its report.
		s.rec.add(s.success(h))
	case !s.rec.ended() && h.Failure != "":
		s.rec.add(failure("", h.Failure, h.Retry))
	case !s.rec.ended():
		s.b.m.Log.Info("init resumed", "claimed_at", h.Time)
		s.start(req)
	}
	return nil
}

// start starts the work, which no connection can end. The caller holds mu.
func (s *initServer) start(req *initproto.InitRequest) {
	if s.working {
		return
	}
	s.working = true
	s.spawn(func(ctx context.Context) { s.work(ctx, req) })
}

// acknowledge deletes the result and stops the server.
func (s *initServer) acknowledge() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, held := s.b.lock.holder()
	switch {
	case !held:
		return errNothing
	case h.By == byJoin:
		return errMember
	case h.Failure != "":
		return errFailedInit
	case h.State != member || !s.rec.ended():
		return errNotFinished
	}
	// The kubeconfig last: while it exists, the next start serves again.
	if err := removeAll(s.b.state, recordFile, requestFile, keyFile, requestCSR, kubeconfigFile); err != nil {
		return err
	}
	s.ackOnce.Do(func() { close(s.acked) })
	return nil
}

// noClusterYet returns errCluster if an API server answers behind the load balancer. A machine
// added to a running cluster is also free for a moment.
func (s *initServer) noClusterYet(ctx context.Context) error {
	host, err := s.b.m.Metadata.LoadBalancer(ctx)
	if err != nil {
		return fmt.Errorf("find the load balancer: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	// Its certificate does not matter: nothing else answers there.
	d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}}
	c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(s.b.m.APIServerPort)))
	if err != nil {
		return nil
	}
	c.Close()
	return errCluster
}

// demand is a validated request.
type demand struct {
	name        string
	clusterID   []byte
	version     version.Version
	etcdTag     string // empty: that of version
	registry    registry.Registry
	components  component.List
	kubeadm     component.Component
	sans        []string
	serviceCIDR netip.Prefix
	podCIDR     netip.Prefix
	off         []string // items of hardening
}

// versions describes what kubeadm installs.
func (d demand) versions() string {
	s := "Kubernetes " + d.version.String()
	if d.etcdTag != "" {
		s += " with etcd " + d.etcdTag
	}
	return s
}

var (
	etcdTagRE     = regexp.MustCompile(`^[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}(-[0-9A-Za-z.-]{1,40})?$`)
	clusterNameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	dnsNameRE     = regexp.MustCompile(`^(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
)

// understand parses a request and verifies that a trusted release builder vouches for its
// components. The init secret alone must not decide what runs as root.
func (b *bootstrapper) understand(r *initproto.InitRequest) (demand, error) {
	d, err := parseRequest(r)
	if err != nil {
		return demand{}, err
	}
	trust, err := release.MachineTrust(b.m.Root)
	if err != nil {
		return demand{}, err
	}
	if err := trust.Verify(r.GetComponentsStatement(), d.version, runtime.GOARCH, d.components); err != nil {
		return demand{}, &fieldError{"components_statement", err.Error()}
	}
	return d, nil
}

// parseRequest returns an error for the first invalid field.
func parseRequest(r *initproto.InitRequest) (demand, error) {
	d := demand{name: r.GetClusterName(), clusterID: r.GetClusterId(), sans: r.GetApiServerCertSans()}
	bad := func(field, format string, args ...any) (demand, error) {
		return demand{}, &fieldError{field, fmt.Sprintf(format, args...)}
	}
	if !clusterNameRE.MatchString(d.name) {
		return bad("cluster_name", "%.80q is not a DNS label", d.name)
	}
	if len(d.clusterID) != clusterIDSize {
		return bad("cluster_id", "has %d bytes, want %d", len(d.clusterID), clusterIDSize)
	}
	var err error
	if d.version, err = version.Parse(r.GetKubernetesVersion()); err != nil {
		return bad("kubernetes_version", "%.40q is not a version", r.GetKubernetesVersion())
	}
	if d.etcdTag = r.GetEtcdImageTag(); d.etcdTag != "" && !etcdTagRE.MatchString(d.etcdTag) {
		return bad("etcd_image_tag", "%.80q is not a tag such as 3.6.11-0", d.etcdTag)
	}
	if d.registry, err = registry.FromProto(r.GetRegistry()); err != nil {
		return bad("registry", "%v", err)
	}
	if d.components, err = component.FromProto(r.GetComponents()); err != nil {
		return bad("components", "%v", err)
	}
	for _, name := range []string{"kubeadm", "kubelet"} {
		if _, ok := d.components.ByName(name); !ok {
			return bad("components", "%s is missing", name)
		}
	}
	if d.kubeadm, _ = d.components.ByName("kubeadm"); d.kubeadm.Path != kubeadm.DefaultPath {
		return bad("components", "kubeadm must have the path %s", kubeadm.DefaultPath)
	}
	if len(d.sans) > maxSANs {
		return bad("api_server_cert_sans", "%d names, at most %d are allowed", len(d.sans), maxSANs)
	}
	for _, s := range d.sans {
		if _, err := netip.ParseAddr(s); err != nil && (len(s) > 253 || !dnsNameRE.MatchString(strings.ToLower(s))) {
			return bad("api_server_cert_sans", "%.80q is neither an address nor a name", s)
		}
	}
	if d.serviceCIDR, err = netip.ParsePrefix(r.GetServiceCidr()); err != nil {
		return bad("service_cidr", "%.40q is not a range", r.GetServiceCidr())
	}
	if d.podCIDR, err = netip.ParsePrefix(r.GetPodCidr()); err != nil {
		return bad("pod_cidr", "%.40q is not a range", r.GetPodCidr())
	}
	if d.off = r.GetHardeningOff(); len(d.off) > maxItems {
		return bad("hardening_off", "%d names, at most %d are allowed", len(d.off), maxItems)
	}
	if d.podCIDR.Overlaps(d.serviceCIDR) {
		return bad("pod_cidr", "%s overlaps the services' %s", d.podCIDR, d.serviceCIDR)
	}
	return d, nil
}
