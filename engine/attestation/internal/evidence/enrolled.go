package evidence

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	encasn1 "encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"
)

// Kind is where the key of an enrolled machine is.
type Kind string

const (
	// KindKey is a file. Everyone who can read it can be the machine: nothing is attested.
	KindKey Kind = "key"
	// KindTPM is a TPM 2.0, which never exports the key and quotes its registers with it.
	KindTPM Kind = "tpm"
)

// kinds are in the order of their numbers on the wire, from 1 on.
func kinds() []Kind { return []Kind{KindKey, KindTPM} }

// number of the kind on the wire; 0: unknown.
func (k Kind) number() int64 { return int64(slices.Index(kinds(), k) + 1) }

// usage is the extended key usage of certificates for keys of this kind. It is in no
// certificate for another kind: a key in a file cannot pass as one in a TPM, and neither as one
// that a cloud certified.
func (k Kind) usage() encasn1.ObjectIdentifier {
	return encasn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 32473, 3, int(k.number())}
}

// certifies reports whether c is a certificate of a key of this kind.
func (k Kind) certifies(c *x509.Certificate) bool {
	return slices.ContainsFunc(c.UnknownExtKeyUsage, k.usage().Equal)
}

const (
	enrolledVersion = 1
	// maxProof bounds the proof of an enrolled document, in bytes.
	maxProof = 8 << 10
)

// enrolled is the evidence of an enrolled machine as it travels, in DER:
//
//	Enrolled ::= SEQUENCE {
//	  version     INTEGER (1),
//	  kind        INTEGER, -- 1: a key in a file, 2: a key in a TPM
//	  certificate OCTET STRING, -- X.509 certificate of the machine's key
//	  membership  OCTET STRING, -- value of register 15, 32 bytes
//	  proof       OCTET STRING  -- of the other fields and the user data
//	}
//
// A proof by a key in a file is an ECDSA signature. One by a TPM is an Evidence, see document,
// without certificate and log: what it binds takes the place of the user data in the quote.
type enrolled struct {
	kind                           Kind
	certificate, membership, proof []byte
}

func (e enrolled) marshal() ([]byte, error) {
	var b cryptobyte.Builder
	b.AddASN1(asn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1Int64(enrolledVersion)
		b.AddASN1Int64(e.kind.number())
		b.AddASN1OctetString(e.certificate)
		b.AddASN1OctetString(e.membership)
		b.AddASN1OctetString(e.proof)
	})
	return b.Bytes()
}

// parseEnrolled reads a document. The result refers to b's memory.
func parseEnrolled(b []byte) (enrolled, error) {
	var (
		e             enrolled
		version, kind int64
		in            = cryptobyte.String(b)
		body          cryptobyte.String
	)
	if !in.ReadASN1(&body, asn1.SEQUENCE) || !in.Empty() {
		return enrolled{}, errors.New("it is not one DER sequence")
	}
	if !body.ReadASN1Integer(&version) || !body.ReadASN1Integer(&kind) {
		return enrolled{}, errors.New("it has no version or no kind")
	}
	if version != enrolledVersion {
		return enrolled{}, fmt.Errorf("it has version %d, this program reads version %d", version, enrolledVersion)
	}
	if kind < 1 || kind > int64(len(kinds())) {
		return enrolled{}, fmt.Errorf("it has the unknown kind %d", kind)
	}
	e.kind = kinds()[kind-1]
	for _, f := range []struct {
		name     string
		to       *[]byte
		min, max int
	}{
		{"certificate", &e.certificate, 1, maxCertificate},
		{"membership", &e.membership, pcrSize, pcrSize},
		{"proof", &e.proof, 1, maxProof},
	} {
		if !readOctets(&body, f.to) {
			return enrolled{}, fmt.Errorf("its %s cannot be read", f.name)
		}
		if n := len(*f.to); n < f.min || n > f.max {
			return enrolled{}, fmt.Errorf("its %s has %d bytes, want %d to %d", f.name, n, f.min, f.max)
		}
	}
	if !body.Empty() {
		return enrolled{}, errors.New("unexpected data after its last field")
	}
	return e, nil
}

// binding is the hash that the proof covers: every other field, and the caller's data.
func (e enrolled) binding(userData []byte) []byte {
	return boundHash("constellation: evidence of an enrolled machine, version 1", []byte(e.kind), e.certificate, e.membership, userData)
}

// boundHash hashes fields, each with its length, for one purpose alone.
func boundHash(purpose string, fields ...[]byte) []byte {
	h := sha256.New()
	for _, f := range append([][]byte{[]byte(purpose)}, fields...) {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(f))))
		h.Write(f)
	}
	return h.Sum(nil)
}

// EnrolledValidator verifies documents of variant Enrolled. It is immutable, so it may be used
// concurrently without a lock.
type EnrolledValidator struct {
	roots *x509.CertPool
	opts  Options
}

// NewEnrolledValidator returns a validator that trusts the authorities in roots. It judges no
// measurements. Without a root, everything is refused.
func NewEnrolledValidator(roots *x509.CertPool, opts Options) *EnrolledValidator {
	v := &EnrolledValidator{roots: x509.NewCertPool(), opts: opts}
	if roots != nil { // x509 takes nil for the roots of the operating system
		v.roots = roots.Clone()
	}
	if opts.Now == nil {
		v.opts.Now = time.Now
	}
	return v
}

// Variant implements Validator.
func (*EnrolledValidator) Variant() Variant { return Enrolled }

// Validate implements Validator.
func (v *EnrolledValidator) Validate(ctx context.Context, doc, userData []byte) (Statement, error) {
	if err := ctx.Err(); err != nil {
		return Statement{}, err
	}
	if len(userData) == 0 || len(userData) > MaxUserData {
		return Statement{}, fmt.Errorf("%w: %d bytes were to be bound, want 1 to %d", ErrQuote, len(userData), MaxUserData)
	}
	e, err := parseEnrolled(doc)
	if err != nil {
		return Statement{}, fmt.Errorf("%w: %w", ErrDocument, err)
	}
	cert, id, err := verifyKey(e.certificate, e.kind.usage(), v.roots, v.opts.Now())
	if err != nil {
		return Statement{}, fmt.Errorf("%w: %w", ErrTrust, remedied(err))
	}
	// Registers are copied, because they outlive the document.
	st := Statement{Identity: id, Key: KeyHash(cert.RawSubjectPublicKeyInfo), PCRs: map[uint32][]byte{pcrCluster: bytes.Clone(e.membership)}}
	if e.kind == KindTPM {
		c, err := e.quoted(cert, userData)
		if err != nil {
			return Statement{}, err
		}
		st.Attested, st.PCRs, st.Firmware, st.Resets = true, c.pcrs, c.quoted.firmware, c.quoted.resets
	} else if err := e.signed(cert, userData); err != nil {
		return Statement{}, err
	}
	if err := v.opts.identify(id); err != nil {
		return Statement{}, err
	}
	if err := v.opts.PCR15.check(e.membership); err != nil {
		return Statement{}, err
	}
	return st, nil
}

// remedied adds to the reason why a certificate is not trusted what its machine's owner can do.
func remedied(err error) error {
	var invalid x509.CertificateInvalidError
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Errorf("%w; compare the clocks of the console and the control planes, then run `constellation machine add`, which certifies the machine again", err)
	case errors.As(err, &unknown):
		return fmt.Errorf("%w; if the machine was enrolled in another workspace, run `constellation machine remove` there, then `constellation machine add` here", err)
	}
	return err
}

// KeyHash identifies a public key: sha256: and the hash of its SubjectPublicKeyInfo in hex.
func KeyHash(spki []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(spki)) }

// signed returns nil if the key that cert certifies signed e for userData.
func (e enrolled) signed(cert *x509.Certificate, userData []byte) error {
	key, ok := cert.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return fmt.Errorf("%w: the machine's key is not on P-256", ErrTrust)
	}
	if !ecdsa.VerifyASN1(key, e.binding(userData), e.proof) {
		return fmt.Errorf("%w: the certified key did not sign it for this connection", ErrQuote)
	}
	return nil
}

// quoted returns what a TPM with the key that cert certifies quoted for e and userData.
func (e enrolled) quoted(cert *x509.Certificate, userData []byte) (claims, error) {
	c, err := parseClaims(e.proof, e.binding(userData))
	if err != nil {
		return claims{}, err
	}
	if len(c.doc.certificate)+len(c.doc.log) > 0 {
		return claims{}, fmt.Errorf("%w: the quote in it has a certificate or an event log of its own", ErrDocument)
	}
	if err := c.signedBy(cert); err != nil {
		return claims{}, err
	}
	if !bytes.Equal(c.pcrs[pcrCluster], e.membership) {
		return claims{}, fmt.Errorf("%w: PCR 15 (cluster ID) in it is not the quoted one", ErrQuote)
	}
	return c, nil
}
