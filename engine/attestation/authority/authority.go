// Package authority is the authority of a workspace: it certifies the keys of machines that the
// workspace's owner enrols. The machine's half of the exchange, and what its certificate proves
// later, are in package attestation.
//
// A machine sends a request, gets a challenge that only the holder of the requested key can
// answer, and gets the certificate for a correct answer. The exchange proves that the key answers.
// The caller decides which machine that is, by the connection over which it spoke.
//
// Only the console links the package: with an authority's key it makes evidence of any machine.
package authority

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"

	"constellation/engine/attestation"
	"constellation/engine/attestation/internal/evidence"
)

// Authority certifies machines. Its methods may be called concurrently.
type Authority struct {
	ca *evidence.CA
}

// Create makes a new authority with a P-256 key in PKCS #8, valid for ten years. The key is as
// secret as every machine of the workspace together.
func Create(name string) (certPEM, keyPEM []byte, err error) { return evidence.CreateCA(name) }

// Parse reads the output of Create.
func Parse(certPEM, keyPEM []byte) (*Authority, error) {
	ca, err := evidence.ParseCA(certPEM, keyPEM)
	if err != nil {
		return nil, err
	}
	return &Authority{ca: ca}, nil
}

// Expectation is what the authority remembers of a challenge until the answer.
type Expectation struct {
	// Kind is where the machine's key is.
	Kind attestation.Kind

	request [sha256.Size]byte
	nonce   []byte
}

// Challenge returns a challenge for the machine of request. Each one is answered once.
func (a *Authority) Challenge(request []byte) (challenge []byte, expect Expectation, err error) {
	_, kind, err := parseRequest(request)
	if err != nil {
		return nil, Expectation{}, fmt.Errorf("read request of the machine: %w", err)
	}
	e := Expectation{Kind: kind, request: sha256.Sum256(request), nonce: make([]byte, evidence.NonceSize)}
	if _, err := rand.Read(e.nonce); err != nil {
		return nil, Expectation{}, fmt.Errorf("create challenge: %w", err)
	}
	challenge, err = evidence.EncodeMessage(evidence.MachineChallenge{Version: evidence.EnrolmentVersion, Nonce: e.nonce})
	if err != nil {
		return nil, Expectation{}, fmt.Errorf("create challenge: %w", err)
	}
	return challenge, e, nil
}

// Certify returns a certificate, in PEM, that says that the key of request is the key of the
// machine id, if answer is the answer to the challenge that expect remembers.
func (a *Authority) Certify(request, answer []byte, expect Expectation, id attestation.Identity) (certificate []byte, err error) {
	if sha256.Sum256(request) != expect.request {
		return nil, errors.New("certify machine: the challenge was made for another request")
	}
	key, kind, err := parseRequest(request)
	if err != nil {
		return nil, fmt.Errorf("read request of the machine: %w", err)
	}
	var m evidence.MachineAnswer
	if err := evidence.DecodeMessage(answer, &m, &m.Version); err != nil {
		return nil, fmt.Errorf("read answer of the machine: %w", err)
	}
	if !ecdsa.VerifyASN1(key, evidence.AnswerHash(expect.nonce), m.Signature) {
		return nil, errors.New("check answer of the machine: it is by another key, or to another challenge")
	}
	certificate, err = evidence.CertifyMachine(a.ca, key, kind, id)
	if err != nil {
		return nil, fmt.Errorf("certify machine: %w", err)
	}
	return certificate, nil
}

// parseRequest returns the key in a request that the key signed.
func parseRequest(b []byte) (*ecdsa.PublicKey, attestation.Kind, error) {
	var r evidence.MachineRequest
	if err := evidence.DecodeMessage(b, &r, &r.Version); err != nil {
		return nil, "", err
	}
	if r.Kind != attestation.KindKey {
		return nil, "", fmt.Errorf("its kind is %q, want %q", r.Kind, attestation.KindKey)
	}
	csr, err := x509.ParseCertificateRequest(r.CSR)
	if err != nil {
		return nil, "", err
	}
	key, ok := csr.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, "", errors.New("its key is not on P-256")
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, "", fmt.Errorf("its key did not sign it: %w", err)
	}
	return key, r.Kind, nil
}
