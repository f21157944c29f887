package joinservice

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/keyprocess"
	"constellation/joinservice/joinproto"
)

const (
	// certifyTimeout bounds a certification: two uses of the TPM of a machine.
	certifyTimeout = 30 * time.Second
	// certifierPoll is the poll interval for the certifier.
	certifierPoll = time.Minute
	// ownRenewal is the age at which this machine's certificate is renewed.
	ownRenewal = certifier.Life / 4
)

// certified is an issuer that adds a certificate of a certifier to evidence.
type certified interface {
	attestation.Issuer
	RequestCertificate(context.Context) ([]byte, error)
	AnswerChallenge(ctx context.Context, challenge []byte) ([]byte, error)
	UseCertificate(der []byte) error
}

// certification is the use of the certifier of this machine.
type certification struct {
	certifier.Client
	// authorities are those of the certifier; nil: not known yet.
	authorities atomic.Pointer[authorities]
	// rotation is the newest one that the certifier accepted. runCertification owns it.
	rotation string
	// busy has the keys whose certification is in progress.
	busy sync.Map
	// every is the poll interval for authorities, which change with a rotation, and for a rotation in join-config.
	every time.Duration
	// changed holds one signal while a change of authorities is unread.
	changed chan struct{}
}

type authorities struct {
	roots      *x509.CertPool
	generation uint32
}

// keyRotation is the key of join-config with the newest rotation of the certifier's keys, if there was one. The owner of the cluster
// makes it, and only certifiers can read it.
const keyRotation = "certifierRotation"

// roots returns the accepted authorities of the certifier; nil without one.
func (c *certification) roots() *x509.CertPool {
	if c == nil {
		return nil
	}
	if a := c.authorities.Load(); a != nil {
		return a.roots
	}
	return nil
}

// generation returns that of the certifier's keys; 0 if it is not known yet.
func (c *certification) generation() uint32 {
	if a := c.authorities.Load(); a != nil {
		return a.generation
	}
	return 0
}

// signal returns a channel with changes of roots; nil without a certifier.
func (c *certification) signal() <-chan struct{} {
	if c == nil {
		return nil
	}
	return c.changed
}

// poll reads the authorities. Those of former keys end by themselves, so they are replaced each time.
func (c *certification) poll(ctx context.Context) error {
	roots, generation, err := c.Authorities(ctx)
	if err != nil {
		return err
	}
	old := c.authorities.Swap(&authorities{roots, generation})
	if old == nil || !old.roots.Equal(roots) {
		select {
		case c.changed <- struct{}{}:
		default: // the reader has not seen the last change yet, and will see this one too
		}
	}
	return nil
}

// rotate has the certifier use the rotation in join-config, if it has not yet.
func (s *Server) rotate(ctx context.Context) error {
	r := s.kube.config()[keyRotation]
	if r == "" || r == s.certification.rotation {
		return nil
	}
	generation, err := s.certification.Rotate(ctx, []byte(r))
	if err != nil {
		return fmt.Errorf("use %s of join-config: %w", keyRotation, err)
	}
	s.certification.rotation = r
	s.log.Info("rotation passed to the certifier", "generation", generation)
	return nil
}

// runCertification polls the certifier, and keeps this machine's own certificate valid, until ctx ends.
func (s *Server) runCertification(ctx context.Context, ready <-chan struct{}) {
	if s.certification == nil {
		return
	}
	select {
	case <-ctx.Done():
		return
	case <-ready:
	}
	var renew time.Time
	var by uint32               // the generation of the keys that certified this machine
	told := map[string]string{} // the errors that were logged, by message
	for tick := time.NewTimer(0); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		tick.Reset(s.certification.every)
		// A rotation that is refused leaves the present keys in use.
		if err := s.rotate(ctx); told["rotation"] != text(err) && ctx.Err() == nil {
			if told["rotation"] = text(err); err != nil {
				s.log.Warn("rotation not accepted by the certifier", "err", err)
			}
		}
		err := s.certification.poll(ctx)
		now := s.certification.generation()
		if err == nil && (time.Now().After(renew) || by != now) {
			if err = s.certifySelf(ctx); err == nil {
				renew, by = time.Now().Add(ownRenewal), now
				s.log.Info("certificate of this machine renewed", "next", renew)
			}
		}
		if told["certificate"] != text(err) && ctx.Err() == nil {
			if told["certificate"] = text(err); err != nil {
				s.log.Warn("certificate of this machine not renewed", "err", err, "retry_in", s.certification.every)
			}
		}
	}
}

// text returns the text of an error, empty for none.
func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// certifySelf has the certifier certify this machine. The vendor's API confirms its evidence first.
func (s *Server) certifySelf(ctx context.Context) error {
	issuer, ok := s.issuer.(certified)
	demands := s.snapshot.Load()
	if !ok || demands == nil || demands.self == nil {
		return fmt.Errorf("evidence of variant %s needs no certificate", s.method.Variant)
	}
	ctx, cancel := context.WithTimeout(ctx, certifyTimeout)
	defer cancel()
	st, err := attestSelf(ctx, issuer, demands.self)
	if err != nil {
		return err
	}
	request, err := issuer.RequestCertificate(ctx)
	if err != nil {
		return err
	}
	c, err := s.certification.Begin(ctx, request)
	if err != nil {
		return err
	}
	answer, err := issuer.AnswerChallenge(ctx, c.Challenge)
	if err != nil {
		return err
	}
	der, err := c.Finish(ctx, answer, st)
	if err != nil {
		return err
	}
	return issuer.UseCertificate(der)
}

// attestSelf returns what fresh evidence of this machine states.
func attestSelf(ctx context.Context, issuer attestation.Issuer, judge attestation.Validator) (attestation.Statement, error) {
	nonce := make([]byte, attestation.MaxUserData)
	rand.Read(nonce)
	doc, err := issuer.Issue(ctx, nonce)
	if err != nil {
		return attestation.Statement{}, fmt.Errorf("attest this machine: %w", err)
	}
	if _, ok := issuer.(signerIssuer); ok {
		nonce = ownBinding(nonce)
	}
	st, err := judge.Validate(ctx, doc, nonce)
	if err != nil {
		return attestation.Statement{}, fmt.Errorf("attest this machine: %w", err)
	}
	return st, nil
}

// Certify implements the contract of package joinproto.
func (s *Server) Certify(stream joinproto.JoinService_CertifyServer) error {
	ctx, cancel := context.WithTimeout(stream.Context(), certifyTimeout)
	defer cancel()
	st, ok := atls.PeerStatement(ctx)
	if !ok {
		return answer(errNoEvidence)
	}
	log := s.log.With("node", st.Identity.Name, "role", string(st.Identity.Role), "peer", source(ctx).String())
	if err := s.certify(ctx, st, stream); err != nil {
		reply := answer(err)
		log.Warn("certificate refused", "code", code(reply), "err", err)
		return reply
	}
	log.Info("certificate issued", "key", st.Key)
	return nil
}

// certify certifies the attestation key of a machine that could get a ticket.
func (s *Server) certify(ctx context.Context, st attestation.Statement, stream joinproto.JoinService_CertifyServer) error {
	if s.certification == nil {
		return errNoCertifier
	}
	if st.Certified {
		return errCertified
	}
	// One at a time for each machine: an exchange can be slow.
	if _, busy := s.certification.busy.LoadOrStore(st.Key, true); busy {
		return errBusy
	}
	defer s.certification.busy.Delete(st.Key)
	if _, err := s.machine(ctx, st, source(ctx)); err != nil {
		return err
	}
	first, err := stream.Recv()
	if err != nil {
		return noMessage(err)
	}
	c, err := s.certification.Begin(ctx, first.GetRequest())
	if err != nil {
		return certifierError(err)
	}
	if err := stream.Send(&joinproto.CertifyResponse{Challenge: c.Challenge}); err != nil {
		return err
	}
	second, err := stream.Recv()
	if err != nil {
		return noMessage(err)
	}
	der, err := c.Finish(ctx, second.GetAnswer(), st)
	if err != nil {
		return certifierError(err)
	}
	return stream.Send(&joinproto.CertifyResponse{Certificate: der})
}

// noMessage returns the error of a stream that ended before its messages.
func noMessage(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: the caller sent too few messages", errCertification)
	}
	return err
}

// certifierError returns whether the certifier refused, or did not answer.
func certifierError(err error) error {
	if e := (*keyprocess.RefusedError)(nil); errors.As(err, &e) {
		return fmt.Errorf("%w: %w", errCertification, err)
	}
	return fmt.Errorf("%w: %w", errCertifier, err)
}
