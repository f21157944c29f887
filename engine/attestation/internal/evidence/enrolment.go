package evidence

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
)

// The messages of an enrolment, as JSON: a machine's request, the authority's challenge, the
// machine's answer. A certificate in PEM ends it. Package authority has the authority's half.
type (
	// MachineRequest asks for the certificate of a machine's key.
	MachineRequest struct {
		Version int  `json:"version"`
		Kind    Kind `json:"kind"`
		// CSR is a PKCS #10 request by the key, in DER.
		CSR []byte `json:"csr"`
	}
	// MachineChallenge is what only the holder of the requested key can answer.
	MachineChallenge struct {
		Version int    `json:"version"`
		Nonce   []byte `json:"nonce"`
	}
	// MachineAnswer is the answer to a challenge.
	MachineAnswer struct {
		Version int `json:"version"`
		// Signature is by the key, over the nonce.
		Signature []byte `json:"signature"`
	}
)

// EnrolmentVersion is the version of all messages, NonceSize the size of a challenge's nonce.
const (
	EnrolmentVersion = 1
	NonceSize        = 32
)

// maxMessage bounds a message of an enrolment, in bytes.
const maxMessage = 64 << 10

// EncodeMessage returns one line of JSON.
func EncodeMessage(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	return append(b, '\n'), err
}

// DecodeMessage reads exactly one message, whose version is at version.
func DecodeMessage(b []byte, to any, version *int) error {
	if len(b) > maxMessage {
		return fmt.Errorf("it has %d bytes, at most %d are allowed", len(b), maxMessage)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("unexpected data after it")
	}
	if *version != EnrolmentVersion {
		return fmt.Errorf("it has version %d, this program reads version %d", *version, EnrolmentVersion)
	}
	return nil
}

// AnswerHash is what a key signs to answer a nonce.
func AnswerHash(nonce []byte) []byte {
	return boundHash("constellation: answer to a challenge of an enrolment, version 1", nonce)
}

// RequestIdentity returns the request of the machine whose identity is in dir. On first use it
// creates the directory and the key; later the key stays the same.
func RequestIdentity(ctx context.Context, dir string) ([]byte, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create identity: %w", err)
	}
	var out []byte
	err := changeMachine(ctx, dir, func(m machine) error {
		key, err := m.key()
		if err == nil && key == nil {
			key, err = m.newKey()
		}
		if err != nil {
			return err
		}
		csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
		if err != nil {
			return err
		}
		out, err = EncodeMessage(MachineRequest{Version: EnrolmentVersion, Kind: KindKey, CSR: csr})
		return err
	})
	return out, err
}

// AnswerIdentity answers a challenge with the key in dir.
func AnswerIdentity(dir string, challenge []byte) ([]byte, error) {
	var c MachineChallenge
	if err := DecodeMessage(challenge, &c, &c.Version); err != nil {
		return nil, fmt.Errorf("read challenge: %w", err)
	}
	if len(c.Nonce) != NonceSize {
		return nil, fmt.Errorf("read challenge: nonce has %d bytes, want %d", len(c.Nonce), NonceSize)
	}
	var out []byte
	err := withMachine(dir, func(m machine) error {
		key, err := m.key()
		if err != nil {
			return err
		}
		if key == nil {
			return errors.New("this machine has no key: run `bootstrapper identity request` first")
		}
		a := MachineAnswer{Version: EnrolmentVersion}
		if a.Signature, err = ecdsa.SignASN1(rand.Reader, key, AnswerHash(c.Nonce)); err != nil {
			return err
		}
		out, err = EncodeMessage(a)
		return err
	})
	return out, err
}

// EnrolledIdentity is who an enrolled machine is.
type EnrolledIdentity struct {
	Kind Kind `json:"kind"`
	// Attested is whether a TPM holds the key.
	Attested bool     `json:"attested"`
	Machine  Identity `json:"machine"`
}

// StoreIdentity stores the certificate of the key in dir. It refuses one of another key, and one
// of another workspace while the machine belongs to a cluster.
func StoreIdentity(ctx context.Context, dir string, certificate []byte) (EnrolledIdentity, error) {
	out := EnrolledIdentity{Kind: KindKey}
	cert, err := parseMachineCertificate(certificate)
	if err != nil {
		return out, err
	}
	if out.Machine, err = certified(cert); err != nil {
		return out, fmt.Errorf("read certificate of the machine: %w", err)
	}
	return out, changeMachine(ctx, dir, func(m machine) error {
		key, err := m.key()
		switch {
		case err != nil:
			return err
		case key == nil:
			return errors.New("this machine has no key: run `bootstrapper identity request` first")
		case !key.PublicKey.Equal(cert.PublicKey):
			return errors.New("the certificate was issued for another key: run `bootstrapper identity request` again")
		case !out.Kind.certifies(cert):
			return fmt.Errorf("the certificate is not one of a key of kind %s", out.Kind)
		}
		if err := m.checkWorkspace(out.Machine); err != nil {
			return err
		}
		return m.replace(certificateFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}))
	})
}

// checkWorkspace returns an error if the machine belongs to a cluster of another workspace than
// next does.
func (m machine) checkWorkspace(next Identity) error {
	now, err := m.membership()
	if err != nil || isZero(now) {
		return err
	}
	cert, err := m.certificate()
	if cert == nil {
		return err
	}
	old, err := certified(cert)
	if err != nil {
		return err
	}
	if old.UID != next.UID {
		return fmt.Errorf("the machine is %s in a cluster of the workspace %s, and the certificate is of workspace %s: run `bootstrapper reset` on it first", old.Name, old.UID, next.UID)
	}
	return nil
}

// CertifyMachine returns the certificate, in PEM, that says that key is the key of the machine id.
func CertifyMachine(ca *CA, key *ecdsa.PublicKey, kind Kind, id Identity) ([]byte, error) {
	der, err := ca.certify(key, kind.usage(), id)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}
