package evidence

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// VendorParts are the parts of evidence of variant VendorTPM2, as tools for TPMs make them.
type VendorParts struct {
	// Certificate and Intermediates are in DER.
	Certificate   []byte
	Intermediates [][]byte
	// Public is a TPMT_PUBLIC, Quote a TPMS_ATTEST, Signature a TPMT_SIGNATURE.
	Public, Quote, Signature []byte
	PCRs                     map[uint32][]byte
	// Log is the event log of firmware. BootLog replaces what an issuer makes of it; nil: it does not.
	Log, BootLog []byte
	// OfCertifier is the certificate of the key by a certifier, in DER; nil: none.
	OfCertifier []byte
}

// BootLog returns what an issuer makes of an event log of firmware.
func BootLog(log []byte) ([]byte, error) {
	b, err := newBootLog(log)
	if err != nil {
		return nil, err
	}
	return b.marshal()
}

// Document puts the parts into a document, as an issuer does. It checks nothing.
func (p VendorParts) Document() ([]byte, error) {
	d := document{certificate: p.Certificate, public: p.Public, quote: p.Quote, signature: p.Signature, log: p.BootLog}
	for _, i := range slices.Sorted(maps.Keys(p.PCRs)) {
		d.pcrs = append(d.pcrs, register{i, p.PCRs[i]})
	}
	if d.log == nil {
		var err error
		if d.log, err = BootLog(p.Log); err != nil {
			return nil, fmt.Errorf("read event log: %w", err)
		}
	}
	inner, err := d.marshal()
	if err != nil {
		return nil, err
	}
	return vendorDocument{intermediates: p.Intermediates, evidence: inner, certificate: p.OfCertifier}.marshal()
}

// ParseVendorDocument is the inverse of Document, with BootLog instead of Log.
func ParseVendorDocument(b []byte) (VendorParts, error) {
	v, err := parseVendorDocument(b)
	if err != nil {
		return VendorParts{}, err
	}
	d, err := parseDocument(v.evidence)
	if err != nil {
		return VendorParts{}, err
	}
	p := VendorParts{Certificate: d.certificate, Intermediates: v.intermediates, Public: d.public, Quote: d.quote, Signature: d.signature, PCRs: map[uint32][]byte{}, BootLog: d.log, OfCertifier: v.certificate}
	for _, r := range d.pcrs {
		p.PCRs[r.index] = r.value
	}
	return p, nil
}

// ProvisionKey does what a vendor does: it has the TPM at address make an attestation key, of RSA or on
// P-256, and stores its template and the certificate that certify returns for it at the indices of at. It
// must precede HandOver in a boot.
func ProvisionKey(ctx context.Context, address string, at NVKey, rsa bool, certify func(crypto.PublicKey) ([]byte, error)) error {
	return use(ctx, address, func(t transport.TPM) error { return provisionKey(t, at, rsa, certify) })
}

func provisionKey(t transport.TPM, at NVKey, rsa bool, certify func(crypto.PublicKey) ([]byte, error)) (err error) {
	if err := startUp(t); err != nil {
		return err
	}
	template := akPublic(make([]byte, 32), make([]byte, 32))
	if rsa {
		template = akRSA()
	}
	key, public, err := primary(t, template)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, flush(t, key)) }()
	area, err := tpm2.Unmarshal[tpm2.TPMTPublic](public)
	if err != nil {
		return err
	}
	pub, err := tpm2.Pub(*area)
	if err != nil {
		return err
	}
	cert, err := certify(pub)
	if err != nil {
		return fmt.Errorf("certify attestation key: %w", err)
	}
	if err := writeNV(t, tpm2.TPMHandle(at.Template), template); err != nil {
		return fmt.Errorf("store template of the attestation key: %w", err)
	}
	if err := writeNV(t, tpm2.TPMHandle(at.Certificate), cert); err != nil {
		return fmt.Errorf("store certificate of the attestation key: %w", err)
	}
	return nil
}

// akRSA returns the template of an attestation key of RSA, 2048 bits.
func akRSA() []byte {
	return tpm2.Marshal(tpm2.TPMTPublic{
		Type: tpm2.TPMAlgRSA, NameAlg: tpm2.TPMAlgSHA256,
		ObjectAttributes: tpm2.TPMAObject{FixedTPM: true, FixedParent: true, SensitiveDataOrigin: true, UserWithAuth: true, NoDA: true, Restricted: true, SignEncrypt: true},
		Parameters: tpm2.NewTPMUPublicParms(tpm2.TPMAlgRSA, &tpm2.TPMSRSAParms{
			Scheme:  tpm2.TPMTRSAScheme{Scheme: tpm2.TPMAlgRSASSA, Details: tpm2.NewTPMUAsymScheme(tpm2.TPMAlgRSASSA, &tpm2.TPMSSigSchemeRSASSA{HashAlg: tpm2.TPMAlgSHA256})},
			KeyBits: 2048,
		}),
		Unique: tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{Buffer: make([]byte, 256)}),
	})
}
