package evidence

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"
)

// VendorTPM2 is evidence by a TPM 2.0 whose attestation key the vendor of the cloud certified, in
// the vendor's own format. A [Vendor] judges it.
const VendorTPM2 Variant = "vendor-tpm2"

// EmulatedVendorTPM2 is VendorTPM2 of an emulated vendor. It is another variant, so a program that judges a vendor's evidence
// does not read it.
const EmulatedVendorTPM2 Variant = "emulated-vendor-tpm2"

// Vendor is how a cloud certifies the keys of its machines' TPMs. Package evidence judges the rest.
type Vendor struct {
	// Variant is EmulatedVendorTPM2 for an emulated vendor; empty: VendorTPM2.
	Variant Variant
	// Keys are where the TPMs have attestation keys, the preferred one first.
	Keys []NVKey
	// Intermediates returns certificates in DER that connect the certificate of a key with a root,
	// from the issuer of the key upwards. Certificates that every verifier has may be missing. Nil:
	// verifiers have all. Errors wrap one of package cloud.
	Intermediates func(ctx context.Context, key *x509.Certificate) ([][]byte, error)
	// Certified returns the machine whose key the first certificate of chain certifies, if one of
	// roots vouches for it at the time now. The other certificates are the intermediates that came
	// with it. It refuses those that are not needed.
	Certified func(chain []*x509.Certificate, roots *x509.CertPool, now time.Time) (Certified, error)
	// SecureBoot refuses machines that booted without Secure Boot. SecureBootRemedy is what an
	// owner can do about it.
	SecureBoot       bool
	SecureBootRemedy string
}

// NVKey is where a TPM has an attestation key: indices of its memory.
type NVKey struct {
	// Certificate has the X.509 certificate of the key in DER, Template the TPMT_PUBLIC that the
	// endorsement hierarchy makes it from.
	Certificate, Template uint32
}

// Certified is a machine as its vendor certified it.
type Certified interface {
	// String names the machine as its certificate does, which the vendor's API has not confirmed yet.
	fmt.Stringer
	// Names returns nil if id can be of the certified machine: all that the vendor's certificate states agrees, and the cluster is
	// the one of the verifier. It does not ask the API.
	Names(ctx context.Context, id Identity) error
	// Identify returns what the vendor's API has about the machine. The error wraps ErrIdentity if
	// the machine is none of the cluster. If the API cannot be asked, it wraps an error of package
	// cloud instead.
	Identify(context.Context) (Identity, error)
}

const (
	vendorVersion = 1
	// emulatedVersion is that of documents of variant EmulatedVendorTPM2.
	emulatedVersion = 1001
	// maxIntermediates is how many certificates a document may have beside that of the key.
	maxIntermediates = 3
)

// vendorDocument is the evidence as it travels, in DER:
//
//	VendorEvidence ::= SEQUENCE {
//	  version       INTEGER (1), -- 1001 for an emulated vendor
//	  intermediates SEQUENCE OF OCTET STRING, -- X.509 certificates
//	  evidence      OCTET STRING, -- an Evidence, see document, whose log is a BootLog
//	  certificate   OCTET STRING OPTIONAL -- X.509 certificate of the key by the cluster's certifier
//	}
type vendorDocument struct {
	emulated      bool
	intermediates [][]byte
	evidence      []byte
	certificate   []byte
}

func (d vendorDocument) marshal() ([]byte, error) {
	var b cryptobyte.Builder
	b.AddASN1(asn1.SEQUENCE, func(b *cryptobyte.Builder) {
		if d.emulated {
			b.AddASN1Int64(emulatedVersion)
		} else {
			b.AddASN1Int64(vendorVersion)
		}
		b.AddASN1(asn1.SEQUENCE, func(b *cryptobyte.Builder) {
			for _, c := range d.intermediates {
				b.AddASN1OctetString(c)
			}
		})
		b.AddASN1OctetString(d.evidence)
		if len(d.certificate) > 0 {
			b.AddASN1OctetString(d.certificate)
		}
	})
	return finish(&b)
}

// parseVendorDocument reads a document. The result refers to b's memory.
func parseVendorDocument(b []byte) (vendorDocument, error) {
	var (
		d           vendorDocument
		version     int64
		in          = cryptobyte.String(b)
		body, certs cryptobyte.String
	)
	if len(b) > MaxDocument {
		return d, fmt.Errorf("it has %d bytes, at most %d are allowed", len(b), MaxDocument)
	}
	if !in.ReadASN1(&body, asn1.SEQUENCE) || !in.Empty() || !body.ReadASN1Integer(&version) {
		return d, errors.New("it is not one DER sequence with a version")
	}
	d.emulated = version == emulatedVersion
	if version != vendorVersion && !d.emulated {
		return d, fmt.Errorf("it has version %d, this program reads version %d", version, vendorVersion)
	}
	if !body.ReadASN1(&certs, asn1.SEQUENCE) {
		return d, errors.New("its intermediate certificates cannot be read")
	}
	for !certs.Empty() {
		var c []byte
		if !readOctets(&certs, &c) || len(c) > maxCertificate || len(d.intermediates) == maxIntermediates {
			return d, fmt.Errorf("its intermediate certificates cannot be read: at most %d of %d bytes are allowed", maxIntermediates, maxCertificate)
		}
		d.intermediates = append(d.intermediates, c)
	}
	if !readOctets(&body, &d.evidence) {
		return d, errors.New("its evidence cannot be read")
	}
	if !body.Empty() && (!readOctets(&body, &d.certificate) || len(d.certificate) == 0 || len(d.certificate) > maxCertificate || !body.Empty()) {
		return d, fmt.Errorf("its certificate by a certifier cannot be read: at most %d bytes are allowed", maxCertificate)
	}
	return d, nil
}

// chain returns the certificate of the key and the intermediates.
func (d vendorDocument) chain(key []byte) ([]*x509.Certificate, error) {
	var out []*x509.Certificate
	for _, der := range append([][]byte{key}, d.intermediates...) {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

// VendorValidator verifies documents of variant VendorTPM2. It is immutable, so it may be used
// concurrently without a lock.
type VendorValidator struct {
	vendor Vendor
	tpm    *TPMValidator // for roots, images and options
}

// NewVendorValidator returns a validator that trusts the vendor's authorities in roots and accepts
// machines whose registers fit m. Without a root, or with measurements that name no register,
// everything is refused.
func NewVendorValidator(v Vendor, roots *x509.CertPool, m Measurements, opts Options) *VendorValidator {
	return &VendorValidator{vendor: v, tpm: NewTPMValidator(roots, m, opts)}
}

// Variant implements Validator.
func (v *VendorValidator) Variant() Variant { return cmp.Or(v.vendor.Variant, VendorTPM2) }

// Validate implements Validator. The vendor's API is asked last, about machines whose evidence is
// genuine, unless Options.Certifiers vouch for what it had.
func (v *VendorValidator) Validate(ctx context.Context, doc, userData []byte) (Statement, error) {
	if err := ctx.Err(); err != nil {
		return Statement{}, err
	}
	d, err := parseVendorDocument(doc)
	if err != nil {
		return Statement{}, fmt.Errorf("%w: %w", ErrDocument, err)
	}
	if d.emulated != (v.Variant() == EmulatedVendorTPM2) {
		return Statement{}, fmt.Errorf("%w: it is not of variant %s: of a vendor, where an emulated one is expected, or the other way round", ErrDocument, v.Variant())
	}
	c, err := parseClaims(d.evidence, userData)
	if err != nil {
		return Statement{}, err
	}
	machine, cert, err := v.certified(d, &c)
	if err != nil {
		return Statement{}, err
	}
	st := Statement{
		Attested: true, Key: KeyHash(cert.RawSubjectPublicKeyInfo), PCRs: c.pcrs, Firmware: c.quoted.firmware, Resets: c.quoted.resets,
	}
	if st.SecureBoot, err = v.booted(c); err != nil {
		return Statement{}, err
	}
	// A connection through a load balancer has the address of the load balancer: only this names the machine.
	if st.Warnings, err = v.tpm.measure(c.pcrs); err != nil {
		return Statement{}, fmt.Errorf("machine %s: %w", machine, err)
	}
	if err := v.tpm.opts.PCR15.check(c.pcrs[pcrCluster]); err != nil {
		return Statement{}, err
	}
	if st.Identity, st.Certified, err = v.identify(ctx, d, cert, machine); err != nil {
		return Statement{}, err
	}
	st.OfCertifier = d.certificate
	if err := st.Identity.check(); err != nil {
		return Statement{}, fmt.Errorf("%w: the cloud's description of %q: %w", ErrIdentity, st.Identity.Name, err)
	}
	return st, v.tpm.opts.identify(st.Identity)
}

// certified returns the machine whose TPM signed the quote, and the certificate of its key, by the certificates in d.
func (v *VendorValidator) certified(d vendorDocument, c *claims) (Certified, *x509.Certificate, error) {
	chain, err := d.chain(c.doc.certificate)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrTrust, err)
	}
	machine, err := v.vendor.Certified(chain, v.tpm.roots, v.tpm.opts.Now())
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrTrust, err)
	}
	return machine, chain[0], c.signedBy(chain[0])
}

// States of Secure Boot in a Statement.
const (
	SecureBootOn  = "on"
	SecureBootOff = "off"
)

// booted judges the event log, and returns the state of Secure Boot in it.
func (v *VendorValidator) booted(c claims) (secureBoot string, err error) {
	for i := range uint32(quotedPCRs) {
		if c.pcrs[i] == nil {
			return "", fmt.Errorf("%w: it does not cover %s", ErrQuote, pcrName(i))
		}
	}
	log, err := parseBootLog(c.doc.log)
	if err != nil {
		return "", fmt.Errorf("%w: event log: %w", ErrDocument, err)
	}
	if err := log.explains(c.pcrs); err != nil {
		return "", fmt.Errorf("%w: event log: %w", ErrDocument, err)
	}
	on, err := log.secureBootEnabled()
	switch {
	case err != nil:
		return "", fmt.Errorf("%w: event log: %w", ErrDocument, err)
	case on:
		return SecureBootOn, nil
	case v.vendor.SecureBoot:
		return "", fmt.Errorf("%w: the machine booted without Secure Boot; %s", ErrMeasurement, v.vendor.SecureBootRemedy)
	}
	return SecureBootOff, nil
}

// VendorIssuer makes documents of variant VendorTPM2 with the TPM of this machine. It may be used
// concurrently.
type VendorIssuer struct {
	tpm    *TPMIssuer
	vendor Vendor

	mu          sync.Mutex
	known       chainOf
	certificate *x509.Certificate // by a certifier; nil: none
}

// chainOf are the intermediates of a certificate. It does not change while the TPM has that key.
type chainOf struct {
	certificate   []byte
	intermediates [][]byte
}

// NewVendorIssuer returns an issuer for the TPM at address; see OpenTPM. The event log is the one
// at EventLogPath(address), and required.
func NewVendorIssuer(v Vendor, address string) *VendorIssuer {
	tpm := NewTPMIssuer(address)
	tpm.keys = v.Keys
	return &VendorIssuer{tpm: tpm, vendor: v}
}

// Variant implements Issuer.
func (i *VendorIssuer) Variant() Variant { return cmp.Or(i.vendor.Variant, VendorTPM2) }

// Issue implements Issuer.
func (i *VendorIssuer) Issue(ctx context.Context, userData []byte) ([]byte, error) {
	if len(userData) == 0 || len(userData) > MaxUserData {
		return nil, fmt.Errorf("issue evidence: %d bytes are to be bound, want 1 to %d", len(userData), MaxUserData)
	}
	d, err := i.tpm.issue(ctx, userData)
	if err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	out, err := i.wrap(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	return out, nil
}

// wrap turns evidence with the firmware's event log into a document of this variant.
func (i *VendorIssuer) wrap(ctx context.Context, d document) ([]byte, error) {
	in, certificate := cryptobyte.String(d.certificate), cryptobyte.String(nil)
	if !in.ReadASN1Element(&certificate, asn1.SEQUENCE) { // the TPM's memory may be larger
		return nil, fmt.Errorf("%w: the certificate of the attestation key is not DER", ErrTPM)
	}
	d.certificate = certificate
	chain, err := i.intermediates(ctx, d.certificate)
	if err != nil {
		return nil, err
	}
	log, err := newBootLog(d.log)
	if err != nil {
		return nil, fmt.Errorf("%w: read event log: %w", ErrTPM, err)
	}
	if d.log, err = log.marshal(); err != nil {
		return nil, fmt.Errorf("read event log: %w", err)
	}
	inner, err := d.marshal()
	if err != nil {
		return nil, err
	}
	return vendorDocument{emulated: i.Variant() == EmulatedVendorTPM2, intermediates: chain, evidence: inner, certificate: i.ofCertifier(d.certificate)}.marshal()
}

func (i *VendorIssuer) intermediates(ctx context.Context, certificate []byte) ([][]byte, error) {
	if i.vendor.Intermediates == nil {
		return nil, nil
	}
	i.mu.Lock()
	known := i.known
	i.mu.Unlock()
	if known.certificate != nil && bytes.Equal(known.certificate, certificate) {
		return known.intermediates, nil
	}
	c, err := x509.ParseCertificate(certificate)
	if err != nil {
		return nil, fmt.Errorf("%w: read certificate of the attestation key: %w", ErrTPM, err)
	}
	chain, err := i.vendor.Intermediates(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("find certificates of the authority %q: %w", c.Issuer, err)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.known = chainOf{certificate, chain}
	return chain, nil
}
