//go:build linux

// Package signer is the process of a certifier, and what its keys are. Package certifier has the reasons, and the client.
//
// A [Server] serves a unix socket that root alone can open, and uses no network. The keys are in its memory, and in a file that is
// sealed to the machine's TPM (attestation.Seal). It signs if a machine proves that its TPM has the key of the request and the
// endorsement key (package authority). It logs each signature, hand-over and rotation.
//
// It does not decide which machine is which: a caller states that.
package signer

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"constellation/engine/attestation"
	"constellation/engine/attestation/authority"
	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/certifier/internal/protocol"
	"constellation/engine/cloud"
	"constellation/internal/journal"
	"constellation/internal/peercred"
)

const (
	// challengeLife is how long a challenge can be answered. A TPM may take seconds.
	challengeLife = time.Minute
	// maxChallenges bounds the unanswered challenges; the oldest one is forgotten.
	maxChallenges = 1024
	// maxConnections bounds the connections at one time; further ones wait.
	maxConnections = 32
)

// Config configures a Server.
type Config struct {
	// Dir has SealedFile. Only root has access.
	Dir string
	// TPM is the address of the machine's TPM, see attestation.OpenTPM.
	TPM string
	// ClusterID is that of the cluster, to seal rotated keys.
	ClusterID []byte
	// Log gets each signature. Nil: none.
	Log *slog.Logger

	now func() time.Time
}

// Server is a certifier. Create it with Open.
type Server struct {
	c   Config
	log *slog.Logger

	mu        sync.Mutex
	keys      *Keys
	authority *authority.Authority
	pending   map[string]pending
	order     []string // of pending, the oldest first

	// Refusals are logged once a second: there may be thousands.
	seldom  rate.Sometimes
	refused int
}

// pending is a challenge without an answer.
type pending struct {
	request []byte
	expect  authority.Expectation
	issuer  *authority.Authority
	until   time.Time
}

// Store seals keys, as Keys.Encode returns them, for the Server of a directory on a machine that is, or becomes, a member of the
// cluster. The file replaces an earlier one, whole or not at all.
func Store(ctx context.Context, dir, tpm string, clusterID, keys []byte) error {
	if _, err := Parse(keys); err != nil {
		return err
	}
	sealed, err := attestation.Seal(ctx, tpm, clusterID, keys)
	if err != nil {
		return fmt.Errorf("store keys of the certifier: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("store keys of the certifier: %w", err)
	}
	defer root.Close()
	f, err := journal.Replace(root, SealedFile, sealed)
	if err != nil {
		return fmt.Errorf("store keys of the certifier: %w", err)
	}
	return f.Close()
}

// Open returns a Server with the unsealed keys of its directory. The error wraps attestation.ErrSealed if this machine, as it
// booted, cannot read them, and fs.ErrNotExist without any.
func Open(ctx context.Context, c Config) (*Server, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.now == nil {
		c.now = time.Now
	}
	sealed, err := os.ReadFile(filepath.Join(c.Dir, SealedFile))
	if err != nil {
		return nil, fmt.Errorf("open certifier: %w", err)
	}
	b, err := attestation.Unseal(ctx, c.TPM, sealed)
	if err != nil {
		return nil, fmt.Errorf("open certifier: %w; if this machine was changed on purpose, replace it: the new control plane gets the keys of another one", err)
	}
	defer clear(b)
	keys, err := Parse(b)
	if err != nil {
		return nil, err
	}
	s := &Server{c: c, log: c.Log, pending: map[string]pending{}, seldom: rate.Sometimes{Interval: time.Second}}
	return s, s.use(keys)
}

// use makes keys the present ones. The caller holds mu, or has exclusive access to s.
func (s *Server) use(keys *Keys) error {
	a, err := keys.authority()
	if err != nil {
		return err
	}
	s.keys, s.authority = keys, a
	return nil
}

// Listen makes the socket at path, which root alone can open. A socket that a former process left is replaced.
func Listen(ctx context.Context, path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen for join services: %w", err)
	}
	// Under a name of its own until root alone can open it.
	next := path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen for join services: %w", err)
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
		return nil, fmt.Errorf("listen for join services: %w", err)
	}
	return l, nil
}

// Serve serves callers of root, and of the process's own user, until ctx ends. It closes the listener.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	s.log.Info("certifier started", "generation", s.generation())
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
			return fmt.Errorf("accept join service: %w", err)
		}
		wg.Go(func() {
			defer func() { <-slots }()
			defer conn.Close()
			s.serve(ctx, conn)
		})
	}
}

func (s *Server) generation() uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keys.generation
}

// serve answers the one request of a connection.
func (s *Server) serve(ctx context.Context, conn net.Conn) {
	peer, err := peercred.Of(conn)
	if err == nil && peer.UID != 0 && peer.UID != uint32(os.Geteuid()) {
		err = errors.New("it is not root")
	}
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.refused++
		s.seldom.Do(func() {
			s.log.Warn("certifier callers refused", "count", s.refused, "uid", peer.UID, "err", err)
			s.refused = 0
		})
		return
	}
	ctx, cancel := context.WithTimeout(ctx, protocol.Timeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var req protocol.Message
	if err := protocol.Receive(conn, &req); err != nil {
		return // the caller is gone, or no join service
	}
	answer, err := s.answer(ctx, req, s.log.With("caller_pid", peer.PID))
	if err != nil {
		answer = protocol.Message{Error: err.Error()}
	}
	_ = protocol.Send(conn, answer) // the caller may be gone
}

func (s *Server) answer(ctx context.Context, m protocol.Message, log *slog.Logger) (protocol.Message, error) {
	switch m.Op {
	case protocol.Challenge:
		return s.challenge(m)
	case protocol.Certify:
		return s.certify(m, log)
	case protocol.Authorities:
		s.mu.Lock()
		defer s.mu.Unlock()
		return protocol.Message{Authorities: s.keys.Authorities(s.c.now()), Generation: s.keys.generation}, nil
	case protocol.HandOver:
		return s.handOver(m, log)
	case protocol.Rotate:
		return s.rotate(ctx, m, log)
	}
	return protocol.Message{}, fmt.Errorf("operation %.20q is not known", m.Op)
}

// challenge begins a certification.
func (s *Server) challenge(m protocol.Message) (protocol.Message, error) {
	s.mu.Lock()
	a := s.authority
	s.mu.Unlock()
	challenge, expect, err := a.Challenge(m.Request)
	if err != nil {
		return protocol.Message{}, err
	}
	random := make([]byte, 16)
	rand.Read(random)
	id := hex.EncodeToString(random)
	s.remember(id, pending{m.Request, expect, a, s.c.now().Add(challengeLife)})
	return protocol.Message{ID: id, Challenge: challenge}, nil
}

// remember keeps a challenge until it is answered.
func (s *Server) remember(id string, p pending) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.order) == maxChallenges {
		delete(s.pending, s.order[0])
		s.order = s.order[1:]
	}
	s.pending[id] = p
	s.order = append(s.order, id)
}

// take returns a challenge, once.
func (s *Server) take(id string) (pending, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.pending[id]
	delete(s.pending, id)
	for n, o := range s.order {
		if o == id {
			s.order = append(s.order[:n:n], s.order[n+1:]...)
			break
		}
	}
	if !ok || s.c.now().After(p.until) {
		return pending{}, errors.New("the challenge is not known, was answered, or is too old")
	}
	return p, nil
}

// certify ends a certification.
func (s *Server) certify(m protocol.Message, log *slog.Logger) (_ protocol.Message, err error) {
	if m.Machine == nil {
		return protocol.Message{}, errors.New("the request names no machine")
	}
	id := *m.Machine
	log = log.With("node", id.Name, "role", string(id.Role), "provider_id", id.ProviderID, "incarnation", id.Incarnation, "group", id.Group, "ip", id.IP.String())
	defer func() {
		if err != nil {
			log.Warn("certification refused", "err", err)
		}
	}()
	p, err := s.take(m.ID)
	if err != nil {
		return protocol.Message{}, err
	}
	if p.expect.Key != m.Key {
		return protocol.Message{}, fmt.Errorf("the request is for the key %s, and the evidence by %.80q", p.expect.Key, m.Key)
	}
	der, err := p.issuer.CertifyVendorKey(p.request, m.Answer, p.expect, id, certifier.Life)
	if err != nil {
		return protocol.Message{}, err
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		return protocol.Message{}, err
	}
	log.Info("attestation key certified", "key", p.expect.Key, "ek", p.expect.EK, "serial", c.SerialNumber.Text(16), "issuer", c.Issuer.CommonName, "until", c.NotAfter)
	return protocol.Message{Certificate: der}, nil
}

// handOver returns the secret keys for a new control plane.
func (s *Server) handOver(m protocol.Message, log *slog.Logger) (protocol.Message, error) {
	if m.Machine == nil || m.Machine.Role != cloud.ControlPlane {
		return protocol.Message{}, errors.New("only control planes get the keys of the certifier")
	}
	s.mu.Lock()
	keys := s.keys
	s.mu.Unlock()
	b, err := keys.Encode()
	if err != nil {
		return protocol.Message{}, err
	}
	log.Info("certifier keys handed over", "node", m.Machine.Name, "provider_id", m.Machine.ProviderID, "generation", keys.generation)
	return protocol.Message{Keys: b}, nil
}

// rotate stores the keys of a rotation, then uses them.
func (s *Server) rotate(ctx context.Context, m protocol.Message, log *slog.Logger) (protocol.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next, err := s.keys.rotate(m.Rotation, s.c.now())
	if err != nil {
		log.Warn("certifier rotation refused", "generation", s.keys.generation, "err", err)
		return protocol.Message{}, err
	}
	if next == s.keys {
		return protocol.Message{Generation: next.generation}, nil
	}
	b, err := next.Encode()
	if err != nil {
		return protocol.Message{}, err
	}
	defer clear(b)
	if err := Store(ctx, s.c.Dir, s.c.TPM, s.c.ClusterID, b); err != nil {
		return protocol.Message{}, err
	}
	if err := s.use(next); err != nil {
		return protocol.Message{}, err
	}
	log.Info("certifier keys rotated", "generation", next.generation)
	return protocol.Message{Generation: next.generation}, nil
}
