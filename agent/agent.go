//go:build linux

// Package agent does the work on its host that requires the host's privileges: it reports the
// host's state, upgrades Kubernetes with kubeadm, and serves the host's member of etcd, so
// that no pod needs the host's files.
//
// It serves its contract, package upgradeproto, on a unix socket that only root and the
// operator's user can open, and verifies each caller's user with the kernel. The verbs are few
// and narrow: a fixed list limits which components can be installed, and where; everything is
// identified by its digest; no verb runs a caller's command.
//
// An upgrade does not depend on its caller. It is recorded in a journal, which every caller
// can read from any line on; kubeadm keeps running when the agent ends, and the next agent
// finds it again. All other data is read from the host on request.
//
// The agent does not decide whether anything should change. That is package operator's job. It
// uses the cluster's API for one thing, with the kubelet's identity: if the cloud announces that
// it will stop the host, the agent writes that as a condition of the host's Node.
package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"constellation/agent/upgradeproto"
	"constellation/engine/cloud/notice"
)

// DefaultSocket is where the agent of a host listens.
const DefaultSocket = "/run/constellation-agent/agent.sock"

const (
	// maxRequest is in bytes, far above any request of the contract.
	maxRequest = 64 << 10
	// maxConnections bounds the connections per user; further ones are closed. The operator needs
	// one.
	maxConnections = 32
	// maxStreams bounds the concurrent requests of one connection.
	maxStreams = 16
	// Burst of requests, and requests per second from then on, for all clients together: an
	// authorized client could do worse anyway.
	requestBurst = 100
	requestRate  = 50
	// answerTimeout bounds a request that is answered at once.
	answerTimeout = time.Minute
	// stopGrace is how long running requests may take during a shutdown.
	stopGrace = 5 * time.Second
)

// Server serves the operator. The zero value is not usable; see [New].
type Server struct {
	upgradeproto.UnimplementedAgentServer

	// Operator is the user that may connect besides root; zero means none. It owns the socket
	// then.
	Operator uint32
	// Notices is where the cloud announces that it will stop the host; nil: it announces nothing.
	Notices notice.Source

	host   Host
	socket string
	log    *slog.Logger

	// The rest is set by Run.
	upgrades *upgrader
	etcd     *etcd
	stop     <-chan struct{}
	limit    *rate.Limiter
}

// New returns a server for host that will listen on the unix socket at path.
func New(host Host, path string, log *slog.Logger) *Server {
	return &Server{host: host, socket: path, log: log}
}

// Run serves until ctx ends, and returns nil then. An upgrade in progress stops where the next
// agent can resume it; its kubeadm keeps running. Run fails if another agent listens on the
// socket, or if its path is not a socket. It is called once.
func (s *Server) Run(ctx context.Context) error {
	l, err := listen(ctx, s.socket, s.Operator)
	if err != nil {
		return err
	}
	life, end := context.WithCancel(ctx)
	// After the socket is acquired: two agents must not work on one host.
	s.upgrades, err = openUpgrader(life, s.host, s.log)
	if err != nil {
		end()
		l.Close()
		return err
	}
	defer s.upgrades.close()
	defer end()
	s.etcd, s.stop, s.limit = newEtcd(s.host), life.Done(), rate.NewLimiter(requestRate, requestBurst)

	g := grpc.NewServer(
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(16<<10),
		grpc.ConnectionTimeout(10*time.Second),
		// Requests are small, and many connections must not cost much.
		grpc.ReadBufferSize(4<<10),
		grpc.WriteBufferSize(16<<10),
		grpc.InitialWindowSize(64<<10),
		grpc.InitialConnWindowSize(128<<10),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: 5 * time.Minute, Time: time.Minute, Timeout: 20 * time.Second}),
		grpc.UnaryInterceptor(s.answer),
		grpc.StreamInterceptor(s.stream),
	)
	upgradeproto.RegisterAgentServer(g, s)

	var wg sync.WaitGroup
	defer wg.Wait()
	served := make(chan struct{})
	defer close(served)
	wg.Go(func() {
		select {
		case <-served:
			return
		case <-ctx.Done():
		}
		hard := time.AfterFunc(stopGrace, g.Stop)
		defer hard.Stop()
		g.GracefulStop()
	})
	if s.Notices != nil {
		told, stop := context.WithCancel(ctx)
		defer stop()
		wg.Go(func() { s.announce(told) })
	}
	s.log.Info("agent listened", "socket", s.socket)
	if err := g.Serve(newGuard(l, s.Operator, s.log)); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serve %s: %w", s.socket, err)
	}
	return nil
}

// answer bounds requests that are answered at once.
func (s *Server) answer(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if !s.limit.Allow() {
		return nil, errTooMany
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	r, err := handle(ctx, req)
	if err != nil {
		s.log.Warn("request not answered", "verb", info.FullMethod, "err", err)
		return nil, toStatus(err)
	}
	return r, nil
}

// stream bounds requests that are answered by streams.
func (s *Server) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if !s.limit.Allow() {
		return errTooMany
	}
	err := handle(srv, ss)
	if err != nil {
		s.log.Info("stream ended early", "verb", info.FullMethod, "err", err)
		return toStatus(err)
	}
	return nil
}

var errTooMany = status.Error(codes.ResourceExhausted, "too many requests; retry in a second")

// Status returns the state of this host.
func (s *Server) Status(ctx context.Context, _ *upgradeproto.StatusRequest) (*upgradeproto.StatusResponse, error) {
	r, err := s.host.Status(ctx)
	if err != nil {
		return nil, err
	}
	r.Run, r.VerifiesComponents, r.UpgradesPackages = s.upgrades.status(), true, true
	return r, nil
}

// Upgrade starts a run, or attaches to the one in progress.
func (s *Server) Upgrade(req *upgradeproto.UpgradeRequest, stream grpc.ServerStreamingServer[upgradeproto.UpgradeResponse]) error {
	o, err := parseOrder(req)
	if err != nil {
		return status.Error(codes.InvalidArgument, clip(err.Error()))
	}
	// Before anything of the host changes, and also for a caller that attaches.
	if err := s.host.vouched(o); err != nil {
		return status.Error(codes.FailedPrecondition, clip("components: "+err.Error()))
	}
	started, begun, err := s.upgrades.take(stream.Context(), o)
	if err != nil {
		return err
	}
	after := req.GetAfter()
	if begun {
		after = 0 // numbers of another run have no meaning
	}
	return s.upgrades.journal.follow(stream.Context(), s.stop, started, after, stream.Send)
}

// EtcdMembers lists the members of the cluster's etcd.
func (s *Server) EtcdMembers(ctx context.Context, _ *upgradeproto.EtcdMembersRequest) (*upgradeproto.EtcdMembersResponse, error) {
	return s.etcd.members(ctx)
}

// RemoveEtcdMember removes a member from the cluster's etcd.
func (s *Server) RemoveEtcdMember(ctx context.Context, req *upgradeproto.RemoveEtcdMemberRequest) (*upgradeproto.RemoveEtcdMemberResponse, error) {
	r, err := s.etcd.remove(ctx, req)
	if r.GetRemoved() {
		s.log.Info("etcd member removed", "id", fmt.Sprintf("%x", req.GetId()), "name", req.GetName())
	}
	return r, err
}

// MoveEtcdLeader ensures that a member of etcd is not the leader.
func (s *Server) MoveEtcdLeader(ctx context.Context, req *upgradeproto.MoveEtcdLeaderRequest) (*upgradeproto.MoveEtcdLeaderResponse, error) {
	r, err := s.etcd.move(ctx, req)
	if r.GetMoved() {
		s.log.Info("etcd leader moved", "from", fmt.Sprintf("%x", req.GetAwayFrom()), "to", fmt.Sprintf("%x", r.GetLeader()))
	}
	return r, err
}

// SnapshotEtcd streams a snapshot of this host's member of etcd.
func (s *Server) SnapshotEtcd(_ *upgradeproto.SnapshotEtcdRequest, stream grpc.ServerStreamingServer[upgradeproto.SnapshotEtcdResponse]) error {
	return s.etcd.snapshot(stream.Context(), stream.Send)
}

// EtcdState returns the state of this host's member of etcd at a revision.
func (s *Server) EtcdState(ctx context.Context, req *upgradeproto.EtcdStateRequest) (*upgradeproto.EtcdStateResponse, error) {
	return s.etcd.state(ctx, req.GetRevision())
}

// listen takes path over from an agent that has ended, never from a running one.
// The socket belongs to operator, whose user may enter its directory then.
func listen(ctx context.Context, path string, operator uint32) (net.Listener, error) {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("stat the agent's socket: %w", err)
	case fi.Mode().Type() != fs.ModeSocket:
		return nil, fmt.Errorf("listen on %s: it is not a socket; remove it", path)
	default:
		var d net.Dialer
		c, err := d.DialContext(ctx, "unix", path)
		if err == nil {
			c.Close()
			return nil, fmt.Errorf("listen on %s: another agent answers there", path)
		}
		// A socket without listener refuses connections; any other error proves nothing.
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, fmt.Errorf("probe for another agent: %w", err)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove the socket of an agent that has ended: %w", err)
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("create the socket's directory: %w", err)
	}
	if operator != 0 {
		// Its owner can enter the directory, but not list it.
		if err := os.Chmod(filepath.Dir(path), 0o711); err != nil {
			return nil, fmt.Errorf("open the socket's directory to the operator: %w", err)
		}
	}
	// The socket is created under a secret name, gets its mode, and is then renamed: at no moment
	// can another user connect to it.
	tmp := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove an unfinished socket: %w", err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", tmp)
	if err != nil {
		return nil, fmt.Errorf("listen on the agent's socket: %w", err)
	}
	ul := l.(*net.UnixListener)
	ul.SetUnlinkOnClose(false)
	err = os.Chmod(tmp, 0o600)
	if err == nil && operator != 0 {
		err = os.Chown(tmp, int(operator), -1)
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("rename the agent's socket: %w", err)
	}
	return l, nil
}
