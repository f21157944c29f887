//go:build linux

// Package peercred finds out which user is at the other end of a unix socket. The kernel answers, so a program cannot
// pose as that of another user.
package peercred

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// Peer is the program that connected, or that listens.
type Peer struct {
	UID uint32
	PID int32
}

// Of returns the peer of a connection.
func Of(c net.Conn) (Peer, error) {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return Peer{UID: ^uint32(0)}, fmt.Errorf("connection is %T, not a unix socket", c)
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return Peer{UID: ^uint32(0)}, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return Peer{UID: ^uint32(0)}, err
	}
	if credErr != nil {
		return Peer{UID: ^uint32(0)}, credErr
	}
	return Peer{UID: cred.Uid, PID: cred.Pid}, nil
}
