package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// rootOnly is a listener that hangs up on everyone but root. The file's mode says
// the same; this holds if someone loosens it, or bind-mounts the socket elsewhere.
type rootOnly struct {
	net.Listener
	log *slog.Logger
	// slots holds one token for each connection that is open.
	slots chan struct{}
}

// Accept returns the next connection of root. The agent of a machine is root itself;
// one that a developer runs serves its own user as well, who could trace it anyway.
func (l *rootOnly) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		uid, err := peerUID(c)
		if err == nil && (uid == 0 || int(uid) == os.Geteuid()) {
			select {
			case l.slots <- struct{}{}:
				return &counted{Conn: c, release: sync.OnceFunc(func() { <-l.slots })}, nil
			default:
				err = errors.New("too many connections")
			}
		}
		l.log.Warn("caller refused", "uid", uid, "err", err)
		c.Close()
	}
}

// counted gives its slot back when it is closed.
type counted struct {
	net.Conn
	release func()
}

// Close implements net.Conn.
func (c *counted) Close() error {
	defer c.release()
	return c.Conn.Close()
}

// peerUID asks the kernel who connected.
func peerUID(c net.Conn) (uint32, error) {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return ^uint32(0), fmt.Errorf("connection is %T, not a unix socket", c)
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return ^uint32(0), err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return ^uint32(0), err
	}
	if credErr != nil {
		return ^uint32(0), credErr
	}
	return cred.Uid, nil
}
