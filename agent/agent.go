//go:build linux

// Package agent does on the host it runs on what needs the host's rights: it tells
// what the host is, upgrades Kubernetes on it with kubeadm, and serves the host's
// member of etcd, so that nothing in a pod needs the host's files.
//
// It serves its contract, package upgradeproto, on a unix socket that only root and
// the operator's user can open, and asks the kernel who each caller is besides. The
// verbs are few and narrow: what may be installed, and where, is a list; everything is
// named by its digest; no verb runs what a caller writes.
//
// An upgrade does not depend on who asked for it. It is kept in a journal, which every
// caller is told from the line that it names on; kubeadm itself goes on when the agent
// ends, and the next agent finds it again. Everything else is read from the host when
// it is asked.
//
// The agent never decides whether anything should change, and never talks to the
// cluster's API. That is package operator's job.
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
)

// DefaultSocket is where the agent of a host listens.
const DefaultSocket = "/run/constellation-agent/agent.sock"

const (
	// maxRequest is in bytes; no request of the contract comes near.
	maxRequest = 64 << 10
	// maxConnections bounds who may be connected at a time, for each user; others are
	// hung up on. The operator needs one.
	maxConnections = 32
	// maxStreams bounds what one connection may ask at a time.
	maxStreams = 16
	// A client may ask for so much at once, and so often in a second from then on. The
	// bound is for all together: whoever may ask at all may do worse than that.
	requestBurst = 100
	requestRate  = 50
	// answerTimeout is how long a request may take that is answered at once.
	answerTimeout = time.Minute
	// stopGrace is how long running requests may take after the end was asked for.
	stopGrace = 5 * time.Second
)

// Server answers the operator. The zero value is not usable; see [New].
type Server struct {
	upgradeproto.UnimplementedAgentServer

	// Operator is the user that may ask besides root; zero means nobody. It owns the
	// socket then.
	Operator uint32

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

// Run serves until ctx ends, and returns nil then. An upgrade that is under way stops
// where the next agent can go on; its kubeadm is left alone. Run fails if another
// agent listens on the socket, or if something that is no socket stands in its place.
// It is called once.
func (s *Server) Run(ctx context.Context) error {
	l, err := listen(ctx, s.socket, s.Operator)
	if err != nil {
		return err
	}
	life, end := context.WithCancel(ctx)
	// After the socket is ours: two agents must not work on one host.
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

var errTooMany = status.Error(codes.ResourceExhausted, "too many requests; ask again in a second")

// Status says what this host is and what it runs.
func (s *Server) Status(ctx context.Context, _ *upgradeproto.StatusRequest) (*upgradeproto.StatusResponse, error) {
	r, err := s.host.Status(ctx)
	if err != nil {
		return nil, err
	}
	r.Run, r.VerifiesComponents = s.upgrades.status(), true
	return r, nil
}

// Upgrade begins a run, or attaches to the one that is under way.
func (s *Server) Upgrade(req *upgradeproto.UpgradeRequest, stream grpc.ServerStreamingServer[upgradeproto.UpgradeResponse]) error {
	o, err := parseOrder(req)
	if err != nil {
		return status.Error(codes.InvalidArgument, clip(err.Error()))
	}
	// Before anything of the host changes, and for whoever only attaches.
	if err := s.host.vouched(o); err != nil {
		return status.Error(codes.FailedPrecondition, clip("components: "+err.Error()))
	}
	started, begun, err := s.upgrades.take(stream.Context(), o)
	if err != nil {
		return err
	}
	after := req.GetAfter()
	if begun {
		after = 0 // numbers of another run mean nothing
	}
	return s.upgrades.journal.follow(stream.Context(), s.stop, started, after, stream.Send)
}

// EtcdMembers lists the members of the cluster's etcd.
func (s *Server) EtcdMembers(ctx context.Context, _ *upgradeproto.EtcdMembersRequest) (*upgradeproto.EtcdMembersResponse, error) {
	return s.etcd.members(ctx)
}

// RemoveEtcdMember takes a member out of the cluster's etcd.
func (s *Server) RemoveEtcdMember(ctx context.Context, req *upgradeproto.RemoveEtcdMemberRequest) (*upgradeproto.RemoveEtcdMemberResponse, error) {
	r, err := s.etcd.remove(ctx, req)
	if r.GetRemoved() {
		s.log.Info("etcd member removed", "id", fmt.Sprintf("%x", req.GetId()), "name", req.GetName())
	}
	return r, err
}

// MoveEtcdLeader makes sure that a member of etcd does not lead.
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

// EtcdState says what this host's member of etcd has at a revision.
func (s *Server) EtcdState(ctx context.Context, req *upgradeproto.EtcdStateRequest) (*upgradeproto.EtcdStateResponse, error) {
	return s.etcd.state(ctx, req.GetRevision())
}

// listen takes path over from an agent that is gone, never from one that lives.
// The socket belongs to operator, whose user may enter its directory then.
func listen(ctx context.Context, path string, operator uint32) (net.Listener, error) {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("look at the agent's socket: %w", err)
	case fi.Mode().Type() != fs.ModeSocket:
		return nil, fmt.Errorf("listen on %s: there is something that is no socket; remove it", path)
	default:
		var d net.Dialer
		c, err := d.DialContext(ctx, "unix", path)
		if err == nil {
			c.Close()
			return nil, fmt.Errorf("listen on %s: another agent answers there", path)
		}
		// A socket that nobody listens on refuses; any other error says nothing about that.
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, fmt.Errorf("find out whether another agent listens: %w", err)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove the socket of an agent that is gone: %w", err)
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("make the socket's directory: %w", err)
	}
	if operator != 0 {
		// Its owner comes through the directory, and sees nothing of it.
		if err := os.Chmod(filepath.Dir(path), 0o711); err != nil {
			return nil, fmt.Errorf("open the socket's directory to the operator: %w", err)
		}
	}
	// The socket is made under a name that nobody knows, gets its mode, and is then
	// put in place: at no moment can somebody else connect to it.
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
		return nil, fmt.Errorf("put the agent's socket in place: %w", err)
	}
	return l, nil
}
