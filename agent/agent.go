// Package agent answers for the host it runs on: what it is and what is installed.
//
// It serves its contract, package upgradeproto, on a unix socket that only root
// can open, and asks the kernel who each caller is besides. Everything it tells it
// reads from the host when it is asked; it remembers nothing.
//
// The agent never decides whether anything should change, and never talks to a
// cluster. That is package operator's job.
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

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"constellation/agent/upgradeproto"
)

// DefaultSocket is where the agent of a host listens.
const DefaultSocket = "/run/constellation-agent/agent.sock"

const (
	// maxRequest is in bytes; no request of the contract comes near.
	maxRequest = 64 << 10
	// maxConnections bounds who may be connected at a time; others are hung up on.
	// The operator needs one.
	maxConnections = 32
	// maxStreams bounds what one connection may ask at a time.
	maxStreams = 16
	// stopGrace is how long running requests may take after the end was asked for.
	stopGrace = 5 * time.Second
)

// Server answers the operator. The zero value is not usable; see [New].
type Server struct {
	upgradeproto.UnimplementedAgentServer

	host   Host
	socket string
	log    *slog.Logger
}

// New returns a server for host that will listen on the unix socket at path.
func New(host Host, path string, log *slog.Logger) *Server {
	return &Server{host: host, socket: path, log: log}
}

// Run serves until ctx ends, and returns nil then. It fails if another agent
// listens on the socket, or if something that is no socket stands in its place.
func (s *Server) Run(ctx context.Context) error {
	l, err := listen(ctx, s.socket)
	if err != nil {
		return err
	}
	g := grpc.NewServer(
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(16<<10),
		grpc.ConnectionTimeout(10*time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: 5 * time.Minute}),
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
	if err := g.Serve(&rootOnly{Listener: l, log: s.log, slots: make(chan struct{}, maxConnections)}); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serve %s: %w", s.socket, err)
	}
	return nil
}

// Status says what this host is and what it runs.
func (s *Server) Status(ctx context.Context, _ *upgradeproto.StatusRequest) (*upgradeproto.StatusResponse, error) {
	r, err := s.host.Status(ctx)
	if err != nil {
		s.log.Warn("host could not be described", "err", err)
		return nil, toStatus(err)
	}
	return r, nil
}

// listen takes path over from an agent that is gone, never from one that lives.
func listen(ctx context.Context, path string) (net.Listener, error) {
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
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("put the agent's socket in place: %w", err)
	}
	return l, nil
}
