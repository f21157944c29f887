package evidence

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/go-tpm/tpm2/transport"
)

// CertifyVendorKey returns the certificate, in DER, that says that key is the key of the instance id, as the vendor's API had it. It
// expires after life.
func CertifyVendorKey(ca *CA, key *ecdsa.PublicKey, id Identity, life time.Duration) ([]byte, error) {
	if id.Incarnation == "" {
		return nil, errors.New("the incarnation of the instance is not known")
	}
	return ca.certifyUntil(key, oidVendorKey(), id, time.Now().Add(life))
}

// identify returns what the vendor's API has about the machine with the certified key. A certificate of a certifier takes the place
// of the API; without a valid one the API is asked.
func (v *VendorValidator) identify(ctx context.Context, d vendorDocument, key *x509.Certificate, machine Certified) (id Identity, certified bool, err error) {
	if len(d.certificate) == 0 {
		id, err = machine.Identify(ctx)
		return id, false, err
	}
	c, err := x509.ParseCertificate(d.certificate)
	if err != nil {
		return Identity{}, false, fmt.Errorf("%w: certificate of a certifier: %w", ErrDocument, err)
	}
	// Judged by everybody, also by those who trust no certifier.
	if equal, ok := key.PublicKey.(*ecdsa.PublicKey); !ok || !equal.Equal(c.PublicKey) {
		return Identity{}, false, fmt.Errorf("%w: certificate of a certifier: it is of another key", ErrDocument)
	}
	if v.tpm.opts.Certifiers == nil {
		id, err = machine.Identify(ctx)
		return id, false, err
	}
	_, id, why := verifyKey(d.certificate, oidVendorKey(), v.tpm.opts.Certifiers, v.tpm.opts.Now())
	if why == nil {
		if why = machine.Names(ctx, id); why == nil {
			return id, true, nil
		}
	}
	if id, err = machine.Identify(ctx); err != nil {
		err = fmt.Errorf("%w (its certificate by the cluster's certifier was not accepted: %w)", err, remark{why})
	}
	return id, false, err
}

// remark is an error that explains another one. It is none of the errors that it wraps: those of the other one decide.
type remark struct{ err error }

// Error implements error.
func (r remark) Error() string { return r.err.Error() }

// UseCertificate adds a certificate of a certifier, in DER, to the documents that i makes until the certificate expires. It refuses
// one of another usage. One of another key than the TPM has is left out of documents.
func (i *VendorIssuer) UseCertificate(der []byte) error {
	c, err := x509.ParseCertificate(der)
	if err == nil && (len(der) > maxCertificate || !slices.ContainsFunc(c.UnknownExtKeyUsage, oidVendorKey().Equal)) {
		err = errors.New("it is too large, or has another usage")
	}
	if err != nil {
		return fmt.Errorf("use certificate of a certifier: %w", err)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.certificate = c
	return nil
}

// ofCertifier returns the certificate of UseCertificate if it is of the certified key and valid, else nothing.
func (i *VendorIssuer) ofCertifier(key []byte) []byte {
	i.mu.Lock()
	c := i.certificate
	i.mu.Unlock()
	if c == nil || !time.Now().Before(c.NotAfter) {
		return nil
	}
	k, err := x509.ParseCertificate(key)
	if err != nil || !bytes.Equal(k.RawSubjectPublicKeyInfo, c.RawSubjectPublicKeyInfo) {
		return nil
	}
	return c.Raw
}

// RequestCertificate returns the request for a certificate of the key that the vendor certified, for package authority. The key must
// be on P-256. Errors wrap ErrTPM.
func (i *VendorIssuer) RequestCertificate(ctx context.Context) ([]byte, error) {
	r := MachineRequest{Version: EnrolmentVersion, Kind: KindTPM}
	err := use(ctx, i.tpm.address, func(t transport.TPM) error {
		k, err := i.key(t)
		if err != nil {
			return err
		}
		e, err := loadEndorsement(t)
		if err != nil {
			return err
		}
		r.AK, r.EK, r.EKCertificate = k.public.raw, e.public, e.certificate
		return flush(t, e.handle)
	})
	if err != nil {
		return nil, fmt.Errorf("request certificate: %w", err)
	}
	return EncodeMessage(r)
}

// AnswerChallenge answers the challenge to a request. Errors wrap ErrTPM.
func (i *VendorIssuer) AnswerChallenge(ctx context.Context, challenge []byte) ([]byte, error) {
	var c MachineChallenge
	if err := DecodeMessage(challenge, &c, &c.Version); err != nil {
		return nil, fmt.Errorf("read challenge: %w", err)
	}
	a := MachineAnswer{Version: EnrolmentVersion}
	err := use(ctx, i.tpm.address, func(t transport.TPM) error {
		k, err := i.key(t)
		if err != nil {
			return err
		}
		a.Secret, err = k.activate(t, c.Credential, c.Secret)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("answer challenge: %w", err)
	}
	return EncodeMessage(a)
}

// key returns the key that the vendor certified.
func (i *VendorIssuer) key(t transport.TPM) (*tpmKey, error) {
	_, template, err := i.tpm.template(t)
	if err != nil {
		return nil, fmt.Errorf("read template of the attestation key: %w", err)
	}
	h, public, err := primary(t, template)
	if err != nil {
		return nil, err
	}
	k := &tpmKey{address: i.tpm.address, template: template}
	k.public, err = parsePublic(public)
	return k, errors.Join(err, flush(t, h))
}
