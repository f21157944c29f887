package sshhost

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"

	"constellation/engine/plan"
)

// Defaults of Options.
const (
	DefaultTimeout = 20 * time.Second
	DefaultSilence = 30 * time.Second
)

// Options are how a machine is reached.
type Options struct {
	Target Target
	// KnownHosts are files of host keys. Those that do not exist are empty. They are never changed.
	KnownHosts []string
	// Fingerprints are host keys to accept, as SHA256:…: a machine in no known_hosts file is accepted if
	// its key is one of them. If there are any, a known machine must have one of them, too.
	Fingerprints []string
	// Agent is the socket of an SSH agent; empty uses none.
	Agent string
	// Keys are the key files to try if the target names none.
	Keys []string
	// Passphrase returns the passphrase of a key file. Without it, encrypted keys are refused. The
	// bytes are overwritten after use.
	Passphrase func(ctx context.Context, keyFile string) ([]byte, error)
	// SudoPassword returns the password of the target's user for sudo. Without it, only sudo without a
	// password works. The bytes are overwritten when the connection is closed.
	SudoPassword func(ctx context.Context, t Target) ([]byte, error)
	// Timeout limits each connection with its login, without the time that callbacks take; zero is
	// DefaultTimeout. Silence closes a connection that answers nothing for as long; zero is
	// DefaultSilence.
	Timeout, Silence time.Duration
}

// Host is a machine that is connected. Its methods can be called concurrently.
type Host struct {
	target  Target
	key     ssh.PublicKey
	clients []*ssh.Client // jump hosts, then the target
	timeout time.Duration
	ask     func(context.Context, Target) ([]byte, error)
	stop    chan struct{}
	once    sync.Once
	silent  atomic.Bool // closed because nothing was answered

	mu       sync.Mutex
	uid      int // -1: not read
	password []byte
}

// Dial logs in to a machine. The end of ctx ends the attempt, and not the connection.
func Dial(ctx context.Context, o Options) (*Host, error) {
	keys, err := readHostKeys(o.KnownHosts, o.Fingerprints)
	if err != nil {
		return nil, err
	}
	limit := cmp.Or(o.Timeout, DefaultTimeout)
	h := &Host{target: o.Target, uid: -1, timeout: limit, ask: o.SudoPassword, stop: make(chan struct{})}
	via := o.Target.Jump
	for i, t := range append(via[:len(via):len(via)], o.Target) {
		t.KeyFile = cmp.Or(t.KeyFile, o.Target.KeyFile)
		if err := h.hop(ctx, &o, keys, t, via[:i], limit); err != nil {
			h.Close()
			return nil, err
		}
	}
	for _, c := range h.clients {
		go h.keepAlive(c, cmp.Or(o.Silence, DefaultSilence))
	}
	return h, nil
}

// hop connects and logs in to t through the last client.
func (h *Host) hop(ctx context.Context, o *Options, keys *hostKeys, t Target, via []Target, limit time.Duration) error {
	l, err := o.login(ctx, t)
	if err != nil {
		return err
	}
	defer l.close()
	inTime, cancel := context.WithTimeout(ctx, limit)
	conn, err := h.connect(inTime, t)
	cancel()
	if err != nil {
		return connectError(ctx, t, limit, err)
	}
	var expired atomic.Bool
	timer := time.AfterFunc(limit, func() { expired.Store(true); _ = conn.Close() })
	defer timer.Stop()
	l.pause = func() func() {
		timer.Stop()
		return func() { timer.Reset(limit) }
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	var refused error    // of the host key
	var offered []string // methods of the machine
	c, chans, requests, err := ssh.NewClientConn(conn, t.Address(), &ssh.ClientConfig{
		User: t.User, Auth: []ssh.AuthMethod{ssh.PublicKeysCallback(func() ([]ssh.Signer, error) { return l.signers, nil })},
		HostKeyAlgorithms: keys.algorithms(t.Address()),
		HostKeyCallback: func(address string, remote net.Addr, key ssh.PublicKey) error {
			refused = keys.accept(address, remote, key, t, via)
			h.key = key
			return refused
		},
		AuthCallback: func(x *ssh.ClientAuthContext) (ssh.AuthMethod, error) {
			offered = x.AllowedMethods
			return nil, nil
		},
	})
	if !stop() && err == nil { // cancelled at the last moment
		_ = c.Close()
		return context.Cause(ctx)
	}
	if err == nil {
		h.clients = append(h.clients, ssh.NewClient(c, chans, requests))
		return nil
	}
	_ = conn.Close()
	op := "log in as " + t.String()
	var algorithms *ssh.AlgorithmNegotiationError
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case refused != nil:
		return refused
	case l.err != nil:
		return l.err
	case expired.Load():
		return &plan.Error{Op: op, Err: fmt.Errorf("%w: no login within %s", ErrSilent, limit), Remedy: "check that an SSH server listens on this port, and the load of the machine"}
	case strings.Contains(err.Error(), "unable to authenticate"), strings.Contains(err.Error(), "disconnect, reason 2"):
		return loginError(op, t, l, offered)
	case errors.As(err, &algorithms):
		return &plan.Error{Op: op, Err: errors.New("the machine supports no common algorithm for " + Text([]byte(algorithms.What))), Remedy: "upgrade its SSH server"}
	case lost(err):
		return lostError(op)
	}
	return &plan.Error{Op: op, Err: errors.New("the server does not speak SSH as expected: " + Text([]byte(err.Error()))), Remedy: "check that this is the port of an SSH server"}
}

func (h *Host) connect(ctx context.Context, t Target) (net.Conn, error) {
	if n := len(h.clients); n > 0 {
		return h.clients[n-1].DialContext(ctx, "tcp", t.Address())
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", t.Address())
}

// loginError explains that no key was accepted.
func loginError(op string, t Target, l *login, offered []string) error {
	why := l.remarks()
	if len(offered) > 0 && !slices.Contains(offered, "publickey") {
		why += "; it offers " + Text([]byte(strings.Join(offered, ", "))) + " alone"
	}
	key := ""
	if t.KeyFile != "" {
		key = " -i " + quote(t.KeyFile)
	}
	return &plan.Error{
		Op: op, Err: fmt.Errorf("%w of %d that were offered%s", ErrLogin, len(l.signers), why),
		Remedy: fmt.Sprintf("check the user's name, name another key with --key, or install the key: `ssh-copy-id%s -p %d %s@%s`", key, t.port(), t.User, t.Host),
	}
}

// keepAlive closes the connection if it answers nothing.
func (h *Host) keepAlive(c *ssh.Client, silence time.Duration) {
	for {
		select {
		case <-h.stop:
			return
		case <-time.After(silence / 2):
		}
		answered := make(chan error, 1)
		go func() {
			_, _, err := c.SendRequest("keepalive@openssh.com", true, nil) // any reply will do
			answered <- err
		}()
		select {
		case <-h.stop:
			return
		case err := <-answered:
			if err != nil {
				return
			}
		case <-time.After(silence / 2):
			h.silent.Store(true)
			h.Close()
			return
		}
	}
}

// Target returns the target, and Fingerprint the SHA256:… fingerprint of its host key.
func (h *Host) Target() Target { return h.target }

// Fingerprint returns the SHA256:… fingerprint of the host key.
func (h *Host) Fingerprint() string {
	if cert, is := h.key.(*ssh.Certificate); is {
		return ssh.FingerprintSHA256(cert.Key)
	}
	return ssh.FingerprintSHA256(h.key)
}

// Close ends the connection. Commands that run end with ErrLost.
func (h *Host) Close() {
	h.once.Do(func() { close(h.stop) })
	for _, c := range slices.Backward(h.clients) {
		_ = c.Close()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.password)
	h.password = nil
}
