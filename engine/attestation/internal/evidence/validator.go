package evidence

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"constellation/engine/cloud"
)

// Options refine the acceptance of a validator. The zero value requires an unused machine,
// of any role and any project that the roots certify.
type Options struct {
	// PCR15 is the rule for the register that carries the cluster ID.
	PCR15 PCR15
	// UID is the sandbox or project that the instance must belong to; empty: any.
	UID string
	// Role is what the instance must be; empty: any.
	Role cloud.Role
	// Alternatives are the measurements of further images that are accepted as well. A
	// validator that judges no measurements ignores them.
	Alternatives []Measurements
	// Certifiers are authorities of the cluster's certifier. Their certificates take the place of the vendor's API in evidence of
	// variant VendorTPM2; nil: the API is asked. Validators of other variants ignore it.
	Certifiers *x509.CertPool
	// Now is for tests; nil stands for time.Now.
	Now func() time.Time
}

// identify returns an error that wraps ErrIdentity unless id is an instance of the project and
// the role that o demands.
func (o Options) identify(id Identity) error {
	switch {
	case o.UID != "" && o.UID != id.UID:
		return fmt.Errorf("%w: %s belongs to %q, expected %q", ErrIdentity, id.Name, id.UID, o.UID)
	case o.Role != "" && o.Role != id.Role:
		return fmt.Errorf("%w: %s is a %s, expected a %s", ErrIdentity, id.Name, id.Role, o.Role)
	}
	return nil
}

// TPMValidator verifies documents of variant TPM2. It is immutable, so it may be used
// concurrently without a lock: new measurements need a new validator.
type TPMValidator struct {
	roots  *x509.CertPool
	images []Measurements
	opts   Options
}

// NewTPMValidator returns a validator that trusts the clouds in roots and accepts
// machines whose registers fit m. Neither is read again later. Without a root, or
// with measurements that name no register, everything is refused.
func NewTPMValidator(roots *x509.CertPool, m Measurements, opts Options) *TPMValidator {
	v := &TPMValidator{roots: x509.NewCertPool(), images: []Measurements{m.Clone()}, opts: opts}
	if roots != nil { // x509 takes nil for the roots of the operating system
		v.roots = roots.Clone()
	}
	for _, a := range opts.Alternatives {
		v.images = append(v.images, a.Clone())
	}
	if opts.Now == nil {
		v.opts.Now = time.Now
	}
	return v
}

// Variant implements Validator.
func (*TPMValidator) Variant() Variant { return TPM2 }

// Validate implements Validator.
//
// Cheap checks come first. The attestation key's public area is part of the evidence: the
// quote names its signer by a hash over that area, so the TPM itself proves that the key is
// restricted and never left it, independently of the cloud's certification.
func (v *TPMValidator) Validate(ctx context.Context, doc, userData []byte) (Statement, error) {
	if err := ctx.Err(); err != nil {
		return Statement{}, err
	}
	c, err := parseClaims(doc, userData)
	if err != nil {
		return Statement{}, err
	}
	cert, id, err := verifyKey(c.doc.certificate, oidAttestationKey(), v.roots, v.opts.Now())
	if err != nil {
		return Statement{}, fmt.Errorf("%w: %w", ErrTrust, err)
	}
	if err := c.signedBy(cert); err != nil {
		return Statement{}, err
	}
	if err := checkLog(c.doc.log, c.pcrs); err != nil {
		return Statement{}, fmt.Errorf("%w: event log: %w", ErrDocument, err)
	}
	if err := v.opts.identify(id); err != nil {
		return Statement{}, err
	}
	warnings, err := v.measure(c.pcrs)
	if err != nil {
		return Statement{}, err
	}
	if c.pcrs[pcrCluster] == nil {
		return Statement{}, fmt.Errorf("%w: it does not cover PCR 15 (cluster ID)", ErrQuote)
	}
	if err := v.opts.PCR15.check(c.pcrs[pcrCluster]); err != nil {
		return Statement{}, err
	}
	return Statement{Identity: id, Attested: true, PCRs: c.pcrs, Warnings: warnings, Firmware: c.quoted.firmware, Resets: c.quoted.resets}, nil
}

// claims are the decoded parts of a document. Nothing has verified their signature yet.
type claims struct {
	doc    document
	quoted quote
	pcrs   map[uint32][]byte // by index
	key    publicArea
	sig    signature
}

// parseClaims decodes a document and checks whatever needs no signature: that it is bound to
// userData, covers its registers, and describes this boot.
func parseClaims(doc, userData []byte) (c claims, err error) {
	if len(userData) == 0 || len(userData) > MaxUserData {
		return c, fmt.Errorf("%w: %d bytes were to be bound, want 1 to %d", ErrQuote, len(userData), MaxUserData)
	}
	if c.doc, err = parseDocument(doc); err != nil {
		return c, fmt.Errorf("%w: %w", ErrDocument, err)
	}
	if c.quoted, err = parseQuote(c.doc.quote); err != nil {
		return c, fmt.Errorf("%w: %w", ErrQuote, err)
	}
	if subtle.ConstantTimeCompare(c.quoted.extraData, userData) != 1 {
		return c, fmt.Errorf("%w: it was made for another connection", ErrQuote)
	}
	if c.pcrs, err = c.quoted.registers(c.doc.pcrs); err != nil {
		return c, fmt.Errorf("%w: %w", ErrQuote, err)
	}
	if c.quoted.restarts != 0 {
		return c, fmt.Errorf("%w: the TPM was suspended and resumed %d times, so its registers need not describe this boot", ErrQuote, c.quoted.restarts)
	}
	if c.key, err = parsePublic(c.doc.public); err != nil {
		return c, fmt.Errorf("%w: public area of the attestation key: %w", ErrDocument, err)
	}
	if c.sig, err = parseSignature(c.doc.signature); err != nil {
		return c, fmt.Errorf("%w: signature: %w", ErrQuote, err)
	}
	return c, nil
}

// signedBy returns nil if a restricted key of a TPM signed the quote, and cert is of that key.
func (c *claims) signedBy(cert *x509.Certificate) error {
	switch {
	case !c.key.is(cert.PublicKey):
		return fmt.Errorf("%w: the certificate belongs to another key", ErrTrust)
	case c.key.restricted() != nil:
		return fmt.Errorf("%w: %w", ErrTrust, c.key.restricted())
	case c.key.scheme != algNull && c.key.scheme != c.sig.scheme:
		return fmt.Errorf("%w: signature is of another scheme than its key", ErrQuote)
	case subtle.ConstantTimeCompare(c.quoted.signer, c.key.qualifiedName()) != 1:
		return fmt.Errorf("%w: it names another key, or one outside of the endorsement hierarchy", ErrQuote)
	case !c.sig.verify(cert.PublicKey, c.doc.quote):
		return fmt.Errorf("%w: signature is invalid", ErrQuote)
	}
	return nil
}

// registers checks that carried are the registers that q is about. The values
// are copied, because they outlive the document.
func (q quote) registers(carried []register) (map[uint32][]byte, error) {
	var (
		selected uint32
		all      = make([]byte, 0, len(carried)*pcrSize)
		pcrs     = make(map[uint32][]byte, len(carried))
	)
	for _, r := range carried {
		selected |= 1 << r.index
		all = append(all, r.value...)
		pcrs[r.index] = all[len(all)-pcrSize : len(all) : len(all)]
	}
	if selected != q.selected {
		return nil, errors.New("it is over other registers than the ones carried beside it")
	}
	if d := sha256.Sum256(all); subtle.ConstantTimeCompare(d[:], q.digest) != 1 {
		return nil, errors.New("the registers carried beside it are not the quoted ones")
	}
	return pcrs, nil
}

// checkLog replays the event log for the registers that it covers.
func checkLog(log []byte, pcrs map[uint32][]byte) error {
	replayed, err := replayLog(log)
	if err != nil {
		return err
	}
	var indices []uint32
	for i := range replayed {
		indices = append(indices, i)
	}
	slices.Sort(indices)
	for _, i := range indices {
		if got, ok := pcrs[i]; ok && subtle.ConstantTimeCompare(got, replayed[i]) != 1 {
			return fmt.Errorf("%s is %x, its events add up to %x", pcrName(i), got, replayed[i])
		}
	}
	return nil
}

// measure compares pcrs with the accepted images. If none fits, the error is
// about the one that comes closest, and the first one among equals.
func (v *TPMValidator) measure(pcrs map[uint32][]byte) ([]string, error) {
	var closest *MeasurementError
	for _, m := range v.images {
		if len(m) == 0 {
			continue
		}
		warnings, err := m.Compare(pcrs)
		if err == nil {
			return warnings, nil
		}
		var e *MeasurementError
		if errors.As(err, &e) && (closest == nil || len(e.Mismatches) < len(closest.Mismatches)) {
			closest = e
		}
	}
	if closest == nil {
		return nil, fmt.Errorf("%w: none are configured, so no machine is accepted", ErrMeasurement)
	}
	return nil, closest
}
