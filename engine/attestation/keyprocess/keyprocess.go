//go:build linux

// Package keyprocess is what processes that hold secret keys of the cluster on control planes have in common: the certifier
// (package signer), the key service (package kms), and the CA signer (package joinservice), whose keys kubeadm stores.
//
// Such a process uses no network. Its keys are in its memory, and in a file that is sealed to the machine's TPM ([Store], [Load]). It
// serves a unix socket that root alone can open ([Listen]), one request for each connection ([Serve], [Call]).
//
// The package does not decide who gets a key. That is up to the process, which logs it.
package keyprocess

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"constellation/engine/attestation"
	"constellation/internal/journal"
	"constellation/internal/peercred"
)

// maxConnections bounds the connections of Serve at one time; further ones wait.
const maxConnections = 32

// Store seals keys in the file name of dir on a machine that is, or becomes, a member of the cluster. The file replaces an earlier
// one, whole or not at all.
func Store(ctx context.Context, dir, name, tpm string, clusterID, keys []byte) error {
	sealed, err := attestation.Seal(ctx, tpm, clusterID, keys)
	if err != nil {
		return fmt.Errorf("store %s: %w", name, err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("store %s: %w", name, err)
	}
	defer root.Close()
	f, err := journal.Replace(root, name, sealed)
	if err != nil {
		return fmt.Errorf("store %s: %w", name, err)
	}
	return f.Close()
}

// Load returns the unsealed keys of Store. The error wraps attestation.ErrSealed if this machine, as it booted, cannot read them,
// and fs.ErrNotExist without any.
func Load(ctx context.Context, dir, name, tpm string) ([]byte, error) {
	sealed, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return nil, fmt.Errorf("read sealed keys: %w", err)
	}
	keys, err := attestation.Unseal(ctx, tpm, sealed)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w; if this machine was changed on purpose, `constellation recover` sends it the keys, or replace it: the new control plane gets those of another one", name, err)
	}
	return keys, nil
}

// Protect keeps the keys of this process out of core dumps, and from debuggers of other processes.
func Protect() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("protect memory: %w", err)
	}
	return nil
}

// Listen makes the socket at path, which root alone can open. A socket that a former process left is replaced. Connections of other
// users than root and the process's own one are refused, and logged.
func Listen(ctx context.Context, path string, log *slog.Logger) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	// Under a name of its own until root alone can open it.
	next := path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", next)
	if err == nil {
		l.(*net.UnixListener).SetUnlinkOnClose(false)
		if err = os.Chmod(next, 0o600); err == nil {
			err = os.Rename(next, path)
		}
		if err != nil {
			l.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &listener{UnixListener: l.(*net.UnixListener), log: log, seldom: rate.Sometimes{Interval: time.Second}}, nil
}

// listener accepts connections of root alone.
type listener struct {
	*net.UnixListener
	log *slog.Logger

	// Refusals are logged once a second: there may be thousands.
	mu      sync.Mutex
	seldom  rate.Sometimes
	refused int
}

// caller is a connection of root.
type caller struct {
	*net.UnixConn
	pid int32
}

// Accept returns the next connection of root.
func (l *listener) Accept() (net.Conn, error) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		peer, err := peercred.Of(conn)
		if err == nil && peer.UID != 0 && peer.UID != uint32(os.Geteuid()) {
			err = errors.New("it is not root")
		}
		if err == nil {
			return caller{conn, peer.PID}, nil
		}
		conn.Close()
		l.mu.Lock()
		l.refused++
		l.seldom.Do(func() {
			l.log.Warn("callers of a process with keys refused", "count", l.refused, "uid", peer.UID, "err", err)
			l.refused = 0
		})
		l.mu.Unlock()
	}
}

// Serve has answer called for the request of each connection until ctx ends. It closes the listener, which is of Listen. A failed
// answer is sent as a refusal, so its error contains no secret.
func Serve(ctx context.Context, l net.Listener, log *slog.Logger, answer func(context.Context, Message, *slog.Logger) (Message, error)) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	slots := make(chan struct{}, maxConnections)
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept caller: %w", err)
		}
		wg.Go(func() {
			defer func() { <-slots }()
			defer conn.Close()
			serve(ctx, conn, log, answer)
		})
	}
}

// serve answers the one request of a connection.
func serve(ctx context.Context, conn net.Conn, log *slog.Logger, answer func(context.Context, Message, *slog.Logger) (Message, error)) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var req Message
	if err := Receive(conn, &req); err != nil {
		return // the caller is gone, or no join service
	}
	if c, ok := conn.(caller); ok {
		log = log.With("caller_pid", c.pid)
	}
	reply, err := contained(ctx, req, log, answer)
	if err != nil {
		e := (*UnavailableError)(nil)
		reply = Message{Error: err.Error(), Unavailable: errors.As(err, &e)}
	}
	_ = Send(conn, reply) // the caller may be gone
}

// contained is answer, whose panic ends one request alone. Its value may quote a secret, so it is not logged.
func contained(ctx context.Context, req Message, log *slog.Logger, answer func(context.Context, Message, *slog.Logger) (Message, error)) (reply Message, err error) {
	defer func() {
		if recover() != nil {
			log.Error("request to a process with keys panicked", "stack", string(debug.Stack()))
			reply, err = Message{}, errors.New("the process failed, see its log")
		}
	}()
	return answer(ctx, req, log)
}

// Call sends one request to the process that serves a socket, and returns the answer. process names it in errors. The error is a
// *RefusedError if the process refused.
func Call(ctx context.Context, process, socket string, m Message) (Message, error) {
	op := m.Op
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	fail := func(err error) (Message, error) { return Message{}, fmt.Errorf("ask the %s: %w", process, err) }
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return fail(err)
	}
	defer conn.Close()
	// Another user could have made the socket.
	if p, err := peercred.Of(conn); err != nil || p.UID != 0 && p.UID != uint32(os.Geteuid()) {
		return fail(fmt.Errorf("user %d listens at %s, want root", p.UID, socket))
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var answer Message
	if err := Send(conn, m); err != nil {
		return fail(err)
	}
	if err := Receive(conn, &answer); err != nil {
		return fail(err)
	}
	switch {
	case answer.Unavailable:
		return fail(errors.New(answer.Error))
	case answer.Error != "":
		return Message{}, &RefusedError{process, op, answer.Error}
	}
	return answer, nil
}
