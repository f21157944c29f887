// Package joinservice admits machines to the cluster.
//
// A machine that wants to become a node proves over attested TLS what it booted and which
// instance of the cloud it is, and receives a ticket: the input of kubeadm join, and nothing
// more. Everything in the ticket follows from the attested identity; a request supplies only
// the public key for the kubelet's certificate. Joining machines report their progress on the
// same connection.
//
// The checks of a ticket in order: evidence; the instance matches the cloud's data; it is not
// scheduled for removal; it was not revoked; there is no Node of its name; the operator has
// published components for the role; the Secret of the registry, if one is configured, is
// valid; a control plane holds the join turn. Then come the
// certificate, bound to the identity; a JoiningNode, which tracks the machine; and a bootstrap
// token. A control plane also gets the keys of the CA, of the certifier and of the key service. No secret is created or read before the
// checks pass, and repeating a request at any point is safe.
//
// The process that the network reaches has none of these keys: a [Server] asks the [Signer] beside it, which judges new control planes
// by itself and encrypts their keys for them.
//
// Several replicas run independently: state that outlives a request is in the API server. The
// package does not decide which version a machine gets, and never stores or logs a token or a
// key.
package joinservice

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/timestamppb"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/component/componentproto"
	"constellation/engine/kms"
	"constellation/joinservice/joinproto"
)

// metadata is the part of the cloud's metadata service that the join service uses.
type metadata interface {
	// Peers returns all instances of the cluster. The list may lag.
	Peers(context.Context) ([]cloud.Instance, error)
	// LoadBalancer returns the host of the load balancer in front of the API servers.
	LoadBalancer(context.Context) (string, error)
}

// Config configures a Server.
type Config struct {
	// Access has the namespace with the Lease of the control planes' join turn.
	Access
	// Signer is the socket of the CA signer, which has the identity of this machine and the keys of the cluster.
	Signer string
	// APIServerPort is the API server's port at the load balancer.
	APIServerPort int
	// RegistrySecret is the Secret in Namespace with the registry of joining machines; empty: none.
	RegistrySecret string
	// Certifier is whether the cluster has a certifier. Without, the vendor's API confirms each machine.
	Certifier bool
	// KMS is whether API servers encrypt Secrets.
	KMS bool

	certifierPoll time.Duration // 0: certifierPoll
	kmsPoll       time.Duration // 0: kmsPoll
}

// Server issues tickets. Create it with New.
type Server struct {
	joinproto.UnimplementedJoinServiceServer

	*judge
	turn      *turn
	signer    *signerClient
	metadata  metadata
	apiPort   int
	registers *registers
	// kms is nil if API servers do not encrypt. kmsEvery is the poll interval for a greater generation in join-config.
	kms      *kms.Client
	kmsEvery time.Duration

	// slots limits the number of concurrent tickets.
	slots chan struct{}
	// reporters limits the reports of each joining machine.
	reporters reporters
	// refusals limits the log of refused connections.
	refusals quiet
	// sources has the addresses whose connections are closed; nil: none.
	sources atomic.Pointer[map[netip.Addr]string]
}

const (
	// ticketTimeout bounds the total work on one ticket.
	ticketTimeout = 10 * time.Second
	// concurrent tickets keep the API server busy without overloading it; further requests wait
	// up to patience and are then asked to retry.
	concurrent = 64
	patience   = 5 * time.Second
	// joinDeadline is when a machine with a ticket is given up. It is longer than tokenTTL, since
	// a machine may register at the last moment.
	joinDeadline = 20 * time.Minute

	// signerTimeout bounds how long a probe waits for the CA signer. The kubelet waits a second.
	signerTimeout = 900 * time.Millisecond

	// A request is a CSR, with evidence of a control plane, or a line of a report.
	maxMessage = 64<<10 + attestation.MaxDocument
	// Idle connections cost this much for a thousand joiners.
	bufferSize = 4 << 10
	// A peer that does not answer for this long is disconnected. With turnDuration, it bounds how
	// long a dead control plane keeps the turn.
	pingEvery, pingTimeout = 4 * time.Second, 4 * time.Second
)

// New returns a Server that has read nothing yet.
func New(c Config) (*Server, error) {
	signer := &signerClient{socket: c.Signer}
	var by *certification
	if c.Certifier {
		by = &certification{Client: certifier.Client{Socket: c.Signer}, changed: make(chan struct{}, 1), every: cmp.Or(c.certifierPoll, certifierPoll)}
	}
	j, err := c.judge(signerIssuer{signer, c.Attestation.Variant}, by)
	if err != nil {
		return nil, err
	}
	j.kube.registrySecret = c.RegistrySecret
	s := &Server{
		judge: j, turn: newTurn(j.kube), signer: signer, metadata: c.Metadata, apiPort: c.APIServerPort,
		slots: make(chan struct{}, concurrent),
	}
	if c.KMS {
		s.kms, s.kmsEvery = &kms.Client{Socket: c.Signer}, cmp.Or(c.kmsPoll, kmsPoll)
	}
	if j.directory.listed {
		s.registers = &registers{kube: j.kube, told: map[string]machines.Registers{}}
	}
	return s, nil
}

// Run serves tickets on join and health on health until ctx ends; then it lets running
// requests finish for a few seconds. It accepts no connection before it has the attestation
// requirements. It closes both listeners.
func (s *Server) Run(ctx context.Context, join, health net.Listener) error {
	defer join.Close()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.serveHealth(ctx, health) })
	g.Go(func() error {
		s.kube.await(ctx, s.log)
		return s.kube.watch(ctx)
	})
	g.Go(func() error { s.turn.watch(ctx); return nil })
	g.Go(func() error { s.watchSources(ctx); return nil })
	first := make(chan struct{})
	g.Go(func() error { return s.watchDemands(ctx, sync.OnceFunc(func() { close(first) })) })
	g.Go(func() error { s.runCertification(ctx, first); return nil })
	g.Go(func() error { s.runKeyService(ctx, first); return nil })
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-first:
		}
		return s.serve(ctx, join)
	})
	return g.Wait()
}

func (s *Server) serve(ctx context.Context, l net.Listener) error {
	srv := grpc.NewServer(
		grpc.Creds(atls.NewServer(atls.Config{
			Purpose: atls.PurposeJoin, Issuer: s.issuer, Evidence: s.signer.evidence,
			Validator: func() attestation.Validator { return s.snapshot.Load().validator },
			OnFailure: s.refused,
		})),
		grpc.ConnectionTimeout(15*time.Second),
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxHeaderListSize(16<<10), grpc.MaxConcurrentStreams(8),
		grpc.ReadBufferSize(bufferSize), grpc.WriteBufferSize(bufferSize),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: 2 * time.Minute, Time: pingEvery, Timeout: pingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		grpc.UnaryInterceptor(s.recoverUnary), grpc.StreamInterceptor(s.recoverStream),
	)
	joinproto.RegisterJoinServiceServer(srv, s)
	s.log.Info("join service started", "address", l.Addr().String())
	done := make(chan struct{})
	go func() {
		defer close(done)
		<-ctx.Done()
		hard := time.AfterFunc(ticketTimeout, srv.Stop)
		defer hard.Stop()
		// Reports last as long as a join; their senders reconnect to another replica.
		s.reporters.close()
		srv.GracefulStop()
	}()
	err := srv.Serve(sourceFilter{l, s})
	if ctx.Err() != nil {
		<-done
		return nil
	}
	srv.Stop()
	return fmt.Errorf("serve join requests: %w", err)
}

// refused logs why a handshake failed. Anybody who reaches the port can cause it, so the log
// is rate-limited.
func (s *Server) refused(peer net.Addr, err error) {
	if n, ok := s.refusals.next(time.Now()); ok {
		s.log.Warn("connection refused", "peer", peer.String(), "err", printable(err.Error(), maxText), "unlogged", n)
	}
}

// IssueJoinTicket implements the contract of package joinproto.
func (s *Server) IssueJoinTicket(ctx context.Context, req *joinproto.IssueJoinTicketRequest) (*joinproto.IssueJoinTicketResponse, error) {
	start := time.Now()
	st, ok := atls.PeerStatement(ctx)
	if !ok {
		return nil, answer(errNoEvidence)
	}
	id := st.Identity
	log := s.log.With("node", id.Name, "role", string(id.Role))
	if s.registers != nil {
		s.registers.note(ctx, log, s.directory, st, source(ctx))
	}
	var t *joinproto.IssueJoinTicketResponse
	err := errUsedMachine
	switch {
	case unused(st):
		t, err = s.ticket(ctx, log, st, req)
	case s.spares != nil:
		err = s.spares.standing(ctx, id)
	}
	took := time.Since(start).Round(time.Millisecond)
	if err != nil {
		reply := answer(err)
		level := slog.LevelWarn
		if errors.Is(err, errUnassigned) || s.spares != nil && len(req.GetCertificateRequest()) == 0 {
			level = slog.LevelDebug // spares and members ask all the time
		}
		log.Log(ctx, level, "join ticket refused", "took", took, "peer", source(ctx).String(), "code", code(reply), "err", err)
		return nil, reply
	}
	for _, w := range st.Warnings {
		log.Warn("measurement differed", "warning", w)
	}
	log.Info("join ticket issued", "took", took, "provider_id", id.ProviderID, "ip", id.IP.String(), "peer", source(ctx).String(),
		"attested", st.Attested, "components", t.ComponentsReference, "version", t.KubernetesVersion)
	return t, nil
}

// ticket runs the checks in the order of the package comment.
func (s *Server) ticket(ctx context.Context, log *slog.Logger, st attestation.Statement, req *joinproto.IssueJoinTicketRequest) (*joinproto.IssueJoinTicketResponse, error) {
	id := st.Identity
	ctx, cancel := context.WithTimeout(ctx, ticketTimeout)
	defer cancel()
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-time.After(patience):
		return nil, errBusy
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	demands := s.snapshot.Load()
	if demands == nil {
		return nil, errNotReady
	}
	machine, err := s.machine(ctx, st, source(ctx))
	if err != nil {
		return nil, err
	}
	if err := s.kube.notYetNode(ctx, id); err != nil {
		return nil, err
	}
	csr, err := parseRequest(req.GetCertificateRequest(), id)
	if err != nil {
		return nil, err
	}
	t := &joinproto.IssueJoinTicketResponse{ClusterId: demands.clusterID}
	// Before the turn: a machine that cannot get a ticket yet must not occupy it.
	c, err := s.kube.components(ctx, id.Role)
	if err != nil {
		return nil, err
	}
	t.ComponentsReference, t.KubernetesVersion = c.name, c.version
	t.Components, t.ComponentsStatement = c.list, c.statement
	if t.Registry, err = s.kube.registry(ctx); err != nil {
		return nil, err
	}
	host, err := s.metadata.LoadBalancer(ctx)
	if err != nil {
		return nil, fmt.Errorf("find API server: %w", err)
	}
	t.ApiServerEndpoint = net.JoinHostPort(host, strconv.Itoa(s.apiPort))
	controlPlane := id.Role == cloud.ControlPlane
	if controlPlane && len(req.GetSealingKey()) == 0 && !acceptsOlder(s.kube.config()) {
		return nil, fmt.Errorf("%w: its bootstrapper is older than %s", errSecrets, oldestSealing)
	}
	if controlPlane {
		expires, err := s.turn.take(ctx, id.Name)
		if err != nil {
			return nil, err
		}
		log.Info("control-plane turn taken", "until", expires)
		t.TurnExpires = timestamppb.New(expires)
		// The watch may lag, and a machine that is being removed must not become a member of etcd.
		// The turn expires by itself: this machine may be half joined.
		if err := s.kube.stayingNow(ctx, machine); err != nil {
			return nil, err
		}
	}
	if err := s.signer.sign(ctx, t, csr, st); err != nil {
		return nil, err
	}
	if err := s.kube.expect(ctx, machine, c.name, time.Now().Add(joinDeadline)); err != nil {
		return nil, err
	}
	if t.Token, err = s.kube.putToken(ctx, id, time.Now().Add(tokenTTL)); err != nil {
		return nil, err
	}
	if err := s.confirm(ctx, log, machine); err != nil {
		return nil, err
	}
	if controlPlane {
		if err := s.signer.addSecrets(ctx, t, req, st); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// source is the address from which a call came; the zero value if it has none.
func source(ctx context.Context) netip.Addr {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return netip.Addr{}
	}
	tcp, ok := p.Addr.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return tcp.AddrPort().Addr().Unmap().WithZone("")
}

// components are the components that joining machines of a role install.
type components struct {
	name    string
	version string
	list    []*componentproto.Component
	// statement vouches for list. The machine verifies it, since this service may be deceived.
	statement string
	read      time.Time
}

func (s *Server) serveHealth(ctx context.Context, l net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if s.snapshot.Load() == nil {
			http.Error(w, errNotReady.Error(), http.StatusServiceUnavailable)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), signerTimeout)
		defer cancel()
		if err := s.signer.answers(ctx); err != nil {
			http.Error(w, errSigner.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, MaxHeaderBytes: 8 << 10}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.Serve(l); ctx.Err() == nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve health: %w", err)
	}
	return nil
}
