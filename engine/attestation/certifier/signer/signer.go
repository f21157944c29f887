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
	"sync"
	"time"

	"constellation/engine/attestation/authority"
	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
)

const (
	// challengeLife is how long a challenge can be answered. A TPM may take seconds.
	challengeLife = time.Minute
	// maxChallenges bounds the unanswered challenges; the oldest one is forgotten.
	maxChallenges = 1024
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
	return keyprocess.Store(ctx, dir, SealedFile, tpm, clusterID, keys)
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
	b, err := keyprocess.Load(ctx, c.Dir, SealedFile, c.TPM)
	if err != nil {
		return nil, fmt.Errorf("open certifier: %w", err)
	}
	defer clear(b)
	keys, err := Parse(b)
	if err != nil {
		return nil, err
	}
	s := &Server{c: c, log: c.Log, pending: map[string]pending{}}
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

// Serve serves the callers of a listener of keyprocess.Listen until ctx ends. It closes the listener.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	s.log.Info("certifier started", "generation", s.generation())
	return keyprocess.Serve(ctx, l, s.log, s.answer)
}

func (s *Server) generation() uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keys.generation
}

func (s *Server) answer(ctx context.Context, m keyprocess.Message, log *slog.Logger) (keyprocess.Message, error) {
	switch m.Op {
	case keyprocess.Challenge:
		return s.challenge(m)
	case keyprocess.Certify:
		return s.certify(m, log)
	case keyprocess.Authorities:
		s.mu.Lock()
		defer s.mu.Unlock()
		return keyprocess.Message{Authorities: s.keys.Authorities(s.c.now()), Generation: s.keys.generation}, nil
	case keyprocess.HandOver:
		return s.handOver(m, log)
	case keyprocess.Rotate:
		return s.rotate(ctx, m, log)
	}
	return keyprocess.Message{}, fmt.Errorf("operation %.20q is not known", m.Op)
}

// challenge begins a certification.
func (s *Server) challenge(m keyprocess.Message) (keyprocess.Message, error) {
	s.mu.Lock()
	a := s.authority
	s.mu.Unlock()
	challenge, expect, err := a.Challenge(m.Request)
	if err != nil {
		return keyprocess.Message{}, err
	}
	random := make([]byte, 16)
	rand.Read(random)
	id := hex.EncodeToString(random)
	s.remember(id, pending{m.Request, expect, a, s.c.now().Add(challengeLife)})
	return keyprocess.Message{ID: id, Challenge: challenge}, nil
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
func (s *Server) certify(m keyprocess.Message, log *slog.Logger) (_ keyprocess.Message, err error) {
	if m.Machine == nil {
		return keyprocess.Message{}, errors.New("the request names no machine")
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
		return keyprocess.Message{}, err
	}
	if p.expect.Key != m.Key {
		return keyprocess.Message{}, fmt.Errorf("the request is for the key %s, and the evidence by %.80q", p.expect.Key, m.Key)
	}
	der, err := p.issuer.CertifyVendorKey(p.request, m.Answer, p.expect, id, certifier.Life)
	if err != nil {
		return keyprocess.Message{}, err
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		return keyprocess.Message{}, err
	}
	log.Info("attestation key certified", "key", p.expect.Key, "ek", p.expect.EK, "serial", c.SerialNumber.Text(16), "issuer", c.Issuer.CommonName, "until", c.NotAfter)
	return keyprocess.Message{Certificate: der}, nil
}

// handOver returns the secret keys for a new control plane.
func (s *Server) handOver(m keyprocess.Message, log *slog.Logger) (keyprocess.Message, error) {
	if m.Machine == nil || m.Machine.Role != cloud.ControlPlane {
		return keyprocess.Message{}, errors.New("only control planes get the keys of the certifier")
	}
	s.mu.Lock()
	keys := s.keys
	s.mu.Unlock()
	b, err := keys.Encode()
	if err != nil {
		return keyprocess.Message{}, err
	}
	log.Info("certifier keys handed over", "node", m.Machine.Name, "provider_id", m.Machine.ProviderID, "generation", keys.generation)
	return keyprocess.Message{Keys: b}, nil
}

// rotate stores the keys of a rotation, then uses them.
func (s *Server) rotate(ctx context.Context, m keyprocess.Message, log *slog.Logger) (keyprocess.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next, err := s.keys.rotate(m.Rotation, s.c.now())
	if err != nil {
		log.Warn("certifier rotation refused", "generation", s.keys.generation, "err", err)
		return keyprocess.Message{}, err
	}
	if next == s.keys {
		return keyprocess.Message{Generation: next.generation}, nil
	}
	b, err := next.Encode()
	if err != nil {
		return keyprocess.Message{}, err
	}
	defer clear(b)
	if err := Store(ctx, s.c.Dir, s.c.TPM, s.c.ClusterID, b); err != nil {
		return keyprocess.Message{}, err
	}
	if err := s.use(next); err != nil {
		return keyprocess.Message{}, err
	}
	log.Info("certifier keys rotated", "generation", next.generation)
	return keyprocess.Message{Generation: next.generation}, nil
}
