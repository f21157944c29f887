// Package authority is the authority of a workspace: it certifies the keys of machines that the
// workspace's owner enrols. The machine's half of the exchange, and what its certificate proves
// later, are in package attestation.
//
// A machine sends a request, gets a challenge that only the holder of the requested key can
// answer, and gets the certificate for a correct answer. The exchange proves that the key answers.
// The caller decides which machine that is, by the connection over which it spoke.
//
// The key is in a file, or in a TPM 2.0. Of the latter the exchange proves that one TPM holds it
// together with the endorsement key, and uses it for quotes alone (TPM2_ActivateCredential). A
// certificate of the vendor says that the endorsement key is that of a TPM. Without one, the
// caller pins the endorsement key: it trusts the first enrolment, and recognises the same TPM in
// later ones.
//
// A machine whose key a vendor certified sends the same messages (package attestation, VendorIssuer). For them
// the authority is the key of a cluster's certifier; see package certifier.
//
// Only the console and the certifier link the package: with an authority's key it makes evidence of any machine.
package authority

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	encasn1 "encoding/asn1"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-tpm/tpm2"

	"constellation/engine/attestation"
	"constellation/engine/attestation/internal/evidence"
)

// Authority certifies machines. Its methods may be called concurrently.
type Authority struct {
	// EKRoots are authorities of vendors of TPMs, and their intermediate ones. With nil, no
	// certificate of an endorsement key is verified: all are pinned.
	EKRoots *x509.CertPool

	ca *evidence.CA
}

// Create makes a new authority with a P-256 key in PKCS #8, valid for ten years. The key is as
// secret as every machine of the workspace together.
func Create(name string) (certPEM, keyPEM []byte, err error) { return evidence.CreateCA(name) }

// CreateOf is Create with a key that exists.
func CreateOf(name string, key *ecdsa.PrivateKey) (certPEM, keyPEM []byte, err error) {
	return evidence.CreateCAOf(name, key)
}

// Parse reads the output of Create.
func Parse(certPEM, keyPEM []byte) (*Authority, error) {
	ca, err := evidence.ParseCA(certPEM, keyPEM)
	if err != nil {
		return nil, err
	}
	return &Authority{ca: ca}, nil
}

// ErrVendor means that no authority of EKRoots certified the endorsement key.
var ErrVendor = errors.New("none of the given vendors certified this TPM")

// ReadEKRoots reads the certificates of a folder, for Authority.EKRoots: files in PEM or DER whose names end in
// .pem, .crt, .cer or .der. All must be of authorities.
func ReadEKRoots(dir string) (*x509.CertPool, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	p, n := x509.NewCertPool(), 0
	for _, f := range files {
		if ext := strings.ToLower(filepath.Ext(f.Name())); f.IsDir() || !slices.Contains([]string{".pem", ".crt", ".cer", ".der"}, ext) {
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			return nil, err
		}
		for rest := b; ; n++ {
			block, after := pem.Decode(rest)
			der := rest
			if block != nil {
				der, rest = block.Bytes, after
			} else if len(bytes.TrimSpace(rest)) == 0 && len(rest) < len(b) {
				break
			}
			c, err := x509.ParseCertificate(der)
			if err == nil && !c.IsCA {
				err = errors.New("it is not the certificate of an authority")
			}
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", filepath.Join(dir, f.Name()), err)
			}
			p.AddCert(c)
			if block == nil {
				n++
				break
			}
		}
	}
	if n == 0 {
		return nil, fmt.Errorf("%s has no certificate: no file .pem, .crt, .cer or .der", dir)
	}
	return p, nil
}

// Expectation is what the authority remembers of a challenge until the answer.
type Expectation struct {
	// Kind is where the machine's key is.
	Kind attestation.Kind
	// Key identifies the machine's key, as the Key of a statement of its evidence does.
	Key string
	// EK identifies the machine's TPM: the SHA-256 of its endorsement key, in hex. It stays the same
	// as long as the TPM. It is "" for a key in a file.
	EK string
	// Vendor is the root of the endorsement key's verified certificate. It is "" if nothing but EK
	// says which TPM this is: then the key is pinned.
	Vendor string

	request [sha256.Size]byte
	secret  []byte // nonce of a key in a file, content of the credential for a TPM
}

// Challenge returns a challenge for the machine of request. Each one is answered once.
func (a *Authority) Challenge(request []byte) (challenge []byte, expect Expectation, err error) {
	r, err := parseRequest(request)
	if err != nil {
		return nil, Expectation{}, fmt.Errorf("read request of the machine: %w", err)
	}
	spki, err := x509.MarshalPKIXPublicKey(r.key)
	if err != nil {
		return nil, Expectation{}, fmt.Errorf("read request of the machine: %w", err)
	}
	e := Expectation{Kind: r.kind, Key: evidence.KeyHash(spki), request: sha256.Sum256(request), secret: make([]byte, evidence.NonceSize)}
	if _, err := rand.Read(e.secret); err != nil {
		return nil, Expectation{}, fmt.Errorf("create challenge: %w", err)
	}
	m := evidence.MachineChallenge{Version: evidence.EnrolmentVersion}
	if r.kind == attestation.KindTPM {
		id := sha256.Sum256(r.ek)
		e.EK = hex.EncodeToString(id[:])
		if e.Vendor, err = a.vendor(r); err != nil {
			return nil, Expectation{}, fmt.Errorf("verify certificate of the TPM's endorsement key: %w", err)
		}
		m.Credential, m.Secret, err = tpm2.CreateCredential(rand.Reader, r.encapsulate, r.name, e.secret)
	} else {
		m.Nonce = e.secret
	}
	if err == nil {
		challenge, err = evidence.EncodeMessage(m)
	}
	if err != nil {
		return nil, Expectation{}, fmt.Errorf("create challenge: %w", err)
	}
	return challenge, e, nil
}

// Certify returns a certificate, in PEM, that says that the key of request is the key of the
// machine id, if answer is the answer to the challenge that expect remembers.
func (a *Authority) Certify(request, answer []byte, expect Expectation, id attestation.Identity) (certificate []byte, err error) {
	r, err := expect.answered(request, answer)
	if err != nil {
		return nil, err
	}
	certificate, err = evidence.CertifyMachine(a.ca, r.key, r.kind, id)
	if err != nil {
		return nil, fmt.Errorf("certify machine: %w", err)
	}
	return certificate, nil
}

// CertifyVendorKey is Certify for the key of a machine that a vendor certified, too. The certificate is in DER, ends after life, and
// counts together with the vendor's certificate alone.
func (a *Authority) CertifyVendorKey(request, answer []byte, expect Expectation, id attestation.Identity, life time.Duration) (certificate []byte, err error) {
	r, err := expect.answered(request, answer)
	if err != nil {
		return nil, err
	}
	if r.kind != attestation.KindTPM {
		return nil, errors.New("certify machine: its key is in a file")
	}
	certificate, err = evidence.CertifyVendorKey(a.ca, r.key, id, life)
	if err != nil {
		return nil, fmt.Errorf("certify machine: %w", err)
	}
	return certificate, nil
}

// answered returns the decoded request if answer is the answer to the challenge that expect remembers.
func (expect Expectation) answered(b, answer []byte) (request, error) {
	if sha256.Sum256(b) != expect.request {
		return request{}, errors.New("certify machine: the challenge was made for another request")
	}
	r, err := parseRequest(b)
	if err != nil {
		return request{}, fmt.Errorf("read request of the machine: %w", err)
	}
	var m evidence.MachineAnswer
	if err := evidence.DecodeMessage(answer, &m, &m.Version); err != nil {
		return request{}, fmt.Errorf("read answer of the machine: %w", err)
	}
	right := false
	if r.kind == attestation.KindTPM {
		right = subtle.ConstantTimeCompare(m.Secret, expect.secret) == 1
	} else {
		right = ecdsa.VerifyASN1(r.key, evidence.AnswerHash(expect.secret), m.Signature)
	}
	if !right {
		return request{}, errors.New("check answer of the machine: it is by another key, or to another challenge")
	}
	return r, nil
}

// request is a decoded request.
type request struct {
	kind attestation.Kind
	key  *ecdsa.PublicKey

	// Of a key in a TPM:
	name          []byte // of key
	ek            []byte // TPMT_PUBLIC
	ekCertificate []byte
	encapsulate   tpm2.LabeledEncapsulationKey // ek
}

// parseRequest reads a request. A key in a file has signed it.
func parseRequest(b []byte) (request, error) {
	var m evidence.MachineRequest
	if err := evidence.DecodeMessage(b, &m, &m.Version); err != nil {
		return request{}, err
	}
	switch m.Kind {
	case attestation.KindKey:
		return parseFileRequest(m)
	case attestation.KindTPM:
		return parseTPMRequest(m)
	}
	return request{}, fmt.Errorf("its kind is %q, want %q or %q", m.Kind, attestation.KindKey, attestation.KindTPM)
}

func parseFileRequest(m evidence.MachineRequest) (request, error) {
	if len(m.EK)+len(m.AK)+len(m.EKCertificate) > 0 {
		return request{}, errors.New("it has keys of a TPM, and is for a key in a file")
	}
	csr, err := x509.ParseCertificateRequest(m.CSR)
	if err != nil {
		return request{}, err
	}
	key, ok := csr.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return request{}, errors.New("its key is not on P-256")
	}
	if err := csr.CheckSignature(); err != nil {
		return request{}, fmt.Errorf("its key did not sign it: %w", err)
	}
	return request{kind: m.Kind, key: key}, nil
}

// maxEK bounds the public area of an endorsement key, in bytes.
const maxEK = 1 << 10

func parseTPMRequest(m evidence.MachineRequest) (request, error) {
	if len(m.CSR) > 0 {
		return request{}, errors.New("it has a CSR, and is for a key in a TPM")
	}
	r := request{kind: m.Kind, ek: m.EK, ekCertificate: m.EKCertificate}
	var err error
	if r.key, r.name, err = evidence.ParseAttestationKey(m.AK); err != nil {
		return request{}, fmt.Errorf("attestation key: %w", err)
	}
	if len(m.EK) > maxEK {
		return request{}, fmt.Errorf("endorsement key has %d bytes, at most %d are allowed", len(m.EK), maxEK)
	}
	ek, err := tpm2.Unmarshal[tpm2.TPMTPublic](m.EK)
	if err != nil {
		return request{}, fmt.Errorf("endorsement key: %w", err)
	}
	if !bytes.Equal(tpm2.Marshal(*ek), m.EK) { // Expectation.EK is a hash of the bytes
		return request{}, errors.New("endorsement key: it is encoded in another way than a TPM does")
	}
	// The whole template is compared: a key that decrypts for its owner would release the
	// credential of another attestation key.
	template := *ek
	switch ek.Type {
	case tpm2.TPMAlgECC:
		template.Unique = tpm2.ECCEKTemplate.Unique
	case tpm2.TPMAlgRSA:
		template.Unique = tpm2.RSAEKTemplate.Unique
	}
	if got := tpm2.Marshal(template); !bytes.Equal(got, tpm2.Marshal(tpm2.ECCEKTemplate)) && !bytes.Equal(got, tpm2.Marshal(tpm2.RSAEKTemplate)) {
		return request{}, errors.New("endorsement key: it was not made from a template of the TCG")
	}
	if r.encapsulate, err = tpm2.ImportEncapsulationKey(ek); err != nil {
		return request{}, fmt.Errorf("endorsement key: %w", err)
	}
	return r, nil
}

// vendor returns the root of the endorsement key's certificate, "" if there is none to verify.
func (a *Authority) vendor(r request) (string, error) {
	if len(r.ekCertificate) == 0 {
		return "", nil
	}
	c, err := x509.ParseCertificate(r.ekCertificate)
	if err != nil {
		return "", err
	}
	if !evidence.EndorsementKeyIs(r.ek, c.PublicKey) {
		return "", errors.New("it is of another key")
	}
	if a.EKRoots == nil {
		return "", nil
	}
	// The TCG has the TPM's model in a critical extension that package x509 cannot read.
	subjectAltName := encasn1.ObjectIdentifier{2, 5, 29, 17}
	c.UnhandledCriticalExtensions = slices.DeleteFunc(c.UnhandledCriticalExtensions, subjectAltName.Equal)
	chains, err := c.Verify(x509.VerifyOptions{Roots: a.EKRoots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrVendor, err)
	}
	chain := chains[0]
	return chain[len(chain)-1].Subject.String(), nil
}
