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

// KindKey is a file. Everyone who can read it can be the machine: nothing is attested.
const KindKey Kind = "key"

// number of the kind on the wire; 0: unknown.
func (k Kind) number() int64 {
	if k == KindKey {
		return 1
	}
	return 0
}

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
//	  kind        INTEGER (1), -- a key in a file
//	  certificate OCTET STRING, -- X.509 certificate of the machine's key
//	  membership  OCTET STRING, -- value of register 15, 32 bytes
//	  proof       OCTET STRING  -- ECDSA signature of the other fields and the user data
//	}
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
	if kind != KindKey.number() {
		return enrolled{}, fmt.Errorf("it has the unknown kind %d", kind)
	}
	e.kind = KindKey
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
		return Statement{}, fmt.Errorf("%w: %w", ErrTrust, err)
	}
	key, ok := cert.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return Statement{}, fmt.Errorf("%w: the machine's key is not on P-256", ErrTrust)
	}
	if !ecdsa.VerifyASN1(key, e.binding(userData), e.proof) {
		return Statement{}, fmt.Errorf("%w: the certified key did not sign it for this connection", ErrQuote)
	}
	if err := v.opts.identify(id); err != nil {
		return Statement{}, err
	}
	if err := v.opts.PCR15.check(e.membership); err != nil {
		return Statement{}, err
	}
	// The register is copied, because it outlives the document.
	return Statement{Identity: id, PCRs: map[uint32][]byte{pcrCluster: bytes.Clone(e.membership)}}, nil
}
