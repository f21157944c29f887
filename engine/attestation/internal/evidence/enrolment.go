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

	"github.com/google/go-tpm/tpm2/transport"
)

// The messages of an enrolment, as JSON: a machine's request, the authority's challenge, the
// machine's answer. A certificate in PEM ends it. Package authority has the authority's half.
type (
	// MachineRequest asks for the certificate of a machine's key.
	MachineRequest struct {
		Version int  `json:"version"`
		Kind    Kind `json:"kind"`
		// CSR is a PKCS #10 request by a key in a file, in DER.
		CSR []byte `json:"csr,omitempty"`
		// AK is the TPMT_PUBLIC of a key in a TPM, EK that of the TPM's endorsement key.
		// EKCertificate is in DER, and empty if the TPM has none.
		AK            []byte `json:"ak,omitempty"`
		EK            []byte `json:"ek,omitempty"`
		EKCertificate []byte `json:"ekCertificate,omitempty"`
	}
	// MachineChallenge is what only the holder of the requested key can answer.
	MachineChallenge struct {
		Version int `json:"version"`
		// Nonce is for a key in a file.
		Nonce []byte `json:"nonce,omitempty"`
		// Credential and Secret are for a TPM: TPMS_ID_OBJECT and the content of
		// TPM2B_ENCRYPTED_SECRET.
		Credential []byte `json:"credential,omitempty"`
		Secret     []byte `json:"secret,omitempty"`
	}
	// MachineAnswer is the answer to a challenge.
	MachineAnswer struct {
		Version int `json:"version"`
		// Signature is by a key in a file, over the nonce.
		Signature []byte `json:"signature,omitempty"`
		// Secret is what a TPM found in the credential.
		Secret []byte `json:"secret,omitempty"`
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
	return decodeVersioned(b, to, version, EnrolmentVersion)
}

// decodeVersioned reads exactly one JSON document, whose version is at version.
func decodeVersioned(b []byte, to any, version *int, want int) error {
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
	if *version != want {
		return fmt.Errorf("it has version %d, this program reads version %d", *version, want)
	}
	return nil
}

// AnswerHash is what a key signs to answer a nonce.
func AnswerHash(nonce []byte) []byte {
	return boundHash("constellation: answer to a challenge of an enrolment, version 1", nonce)
}

// RequestIdentity returns the request of the machine whose identity is in dir. On first use it
// creates the directory and the key; later the key stays the same. tpm is the address of the TPM
// that makes the key, AutoTPM or NoTPM. "" stands for the present key, and for NoTPM without one. unused
// is why AutoTPM made a key in a file on a machine with a TPM.
func RequestIdentity(ctx context.Context, dir, tpm string) (out []byte, unused, err error) {
	return requestIdentity(ctx, dir, tpm, deviceTPM)
}

// requestIdentity is RequestIdentity on a machine whose first TPM is at the address first, if it has one.
func requestIdentity(ctx context.Context, dir, tpm, first string) (out []byte, unused, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, fmt.Errorf("create identity: %w", err)
	}
	err = changeMachine(ctx, dir, func(m machine) error {
		key, err := m.key()
		if err != nil {
			return err
		}
		address, err := chooseTPM(key, tpm, first)
		if err != nil {
			return err
		}
		var r MachineRequest
		if address != "" {
			r, err = m.requestTPM(ctx, key.tpm, address)
			if key.kind() == "" && tpm == AutoTPM && errors.Is(err, ErrTPM) && !errors.Is(err, errUsedTPM) && ctx.Err() == nil {
				address, unused = "", err
			}
		}
		if address == "" {
			r, err = m.requestFile(key.file)
		}
		if err != nil {
			return err
		}
		out, err = EncodeMessage(r)
		return err
	})
	return out, unused, err
}

// requestFile returns the request of a machine with a key in a file. If key is nil, it is made.
func (m machine) requestFile(key *ecdsa.PrivateKey) (r MachineRequest, err error) {
	if key == nil {
		if key, err = m.newFileKey(); err != nil {
			return r, err
		}
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	return MachineRequest{Version: EnrolmentVersion, Kind: KindKey, CSR: csr}, err
}

// AnswerIdentity answers a challenge with the key in dir.
func AnswerIdentity(ctx context.Context, dir string, challenge []byte) ([]byte, error) {
	var c MachineChallenge
	if err := DecodeMessage(challenge, &c, &c.Version); err != nil {
		return nil, fmt.Errorf("read challenge: %w", err)
	}
	var out []byte
	err := withMachine(dir, func(m machine) error {
		key, err := m.key()
		if err != nil {
			return err
		}
		a := MachineAnswer{Version: EnrolmentVersion}
		switch {
		case key.kind() == "":
			return errors.New("this machine has no key: run `bootstrapper identity request` first")
		case key.tpm != nil && (len(c.Credential) == 0 || len(c.Secret) == 0):
			return errors.New("the challenge is not for a key in a TPM: run `bootstrapper identity request` again")
		case key.tpm != nil:
			err = use(ctx, key.tpm.address, func(t transport.TPM) (err error) {
				a.Secret, err = key.tpm.activate(t, c.Credential, c.Secret)
				return err
			})
		case len(c.Nonce) != NonceSize:
			return fmt.Errorf("nonce of the challenge has %d bytes, want %d: run `bootstrapper identity request` again", len(c.Nonce), NonceSize)
		default:
			a.Signature, err = ecdsa.SignASN1(rand.Reader, key.file, AnswerHash(c.Nonce))
		}
		if err != nil {
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
	// TPM is its address on the machine.
	TPM string `json:"tpm,omitempty"`
}

// StoreIdentity stores the certificate of the key in dir. It refuses one of another key, and one
// of another workspace while the machine belongs to a cluster.
func StoreIdentity(ctx context.Context, dir string, certificate []byte) (out EnrolledIdentity, err error) {
	cert, err := parseMachineCertificate(certificate)
	if err != nil {
		return out, err
	}
	if out.Machine, err = certified(cert); err != nil {
		return out, fmt.Errorf("read certificate of the machine: %w", err)
	}
	err = changeMachine(ctx, dir, func(m machine) error {
		key, err := m.key()
		out.Kind, out.Attested = key.kind(), key.tpm != nil
		switch {
		case err != nil:
			return err
		case out.Kind == "":
			return errors.New("this machine has no key: run `bootstrapper identity request` first")
		case !key.is(cert.PublicKey):
			return errors.New("the certificate was issued for another key: run `bootstrapper identity request` again")
		case !out.Kind.certifies(cert):
			return fmt.Errorf("the certificate is not one of a key of kind %s", out.Kind)
		}
		if key.tpm != nil {
			out.TPM = key.tpm.address
		}
		if err := m.checkWorkspace(ctx, dir, out.Machine); err != nil {
			return err
		}
		return m.replace(certificateFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}))
	})
	return out, err
}

// checkWorkspace returns an error if the machine belongs to a cluster of another workspace than
// next does.
func (m machine) checkWorkspace(ctx context.Context, dir string, next Identity) error {
	cert, err := m.certificate()
	if cert == nil {
		return err
	}
	old, err := certified(cert)
	if err != nil || old.UID == next.UID {
		return err
	}
	pcrs, err := ReadPCRs(ctx, enrolledPrefix+dir, pcrCluster)
	if err != nil {
		return err
	}
	if !isZero(pcrs[pcrCluster]) {
		return fmt.Errorf("the machine is %s in a cluster of the workspace %s, and the certificate is of workspace %s: run `bootstrapper reset` on it first", old.Name, old.UID, next.UID)
	}
	return nil
}

// ParseAttestationKey returns the public key and the name of a key in a TPM, which the TPM uses for
// quotes alone.
func ParseAttestationKey(b []byte) (key *ecdsa.PublicKey, name []byte, err error) {
	p, err := parsePublic(b)
	if err != nil {
		return nil, nil, err
	}
	if err := p.restricted(); err != nil {
		return nil, nil, err
	}
	if key, err = p.ecdsa(); err != nil {
		return nil, nil, err
	}
	return key, p.name(), nil
}

// CertifyMachine returns the certificate, in PEM, that says that key is the key of the machine id.
func CertifyMachine(ca *CA, key *ecdsa.PublicKey, kind Kind, id Identity) ([]byte, error) {
	der, err := ca.certify(key, kind.usage(), id)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}
