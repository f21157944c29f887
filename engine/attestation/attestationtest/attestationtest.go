// Package attestationtest is the cloud's half of attestation, for test clouds and tests: an
// authority that certifies attestation keys, the provisioning of a TPM, the measurement of a
// boot, an issuer without a TPM, and documents from their parts. With an authority's key it forges evidence of any machine.
//
// No production program imports it; a test of the module checks that.
package attestationtest

import (
	"context"
	"crypto"

	"constellation/engine/attestation"
	"constellation/engine/attestation/authority"
	"constellation/engine/attestation/internal/evidence"
)

// CA is the cloud's authority that certifies attestation keys. Its methods may be called
// concurrently.
type CA = evidence.CA

// CreateCA makes a new authority with a P-256 key in PKCS #8, valid for ten years.
func CreateCA(name string) (certPEM, keyPEM []byte, err error) { return evidence.CreateCA(name) }

// ParseCA reads the output of CreateCA.
func ParseCA(certPEM, keyPEM []byte) (*CA, error) { return evidence.ParseCA(certPEM, keyPEM) }

// Provision has the TPM at address create the attestation key, certifies with ca that it is the
// key of the instance id, and stores certificate and template in the TPM. It must precede
// HandOver in a boot.
func Provision(ctx context.Context, address string, ca *CA, id attestation.Identity) error {
	return evidence.Provision(ctx, address, ca, id)
}

// HandOver disables the authorisation of the platform until the next reset of the TPM, as
// firmware does before an operating system runs.
func HandOver(ctx context.Context, address string) error { return evidence.HandOver(ctx, address) }

// Measure extends the TPM at address with the events of a boot and appends them to the event log
// at logPath.
func Measure(ctx context.Context, address, logPath string, events []attestation.MeasuredEvent) error {
	return evidence.Measure(ctx, address, logPath, events)
}

// Enrol enrols the machine with the identity in dir, in one process: a certifies a key in a file
// for id.
func Enrol(ctx context.Context, a *authority.Authority, dir string, id attestation.Identity) error {
	return EnrolTPM(ctx, a, dir, attestation.NoTPM, id)
}

// EnrolTPM is Enrol with a key in the TPM at address tpm.
func EnrolTPM(ctx context.Context, a *authority.Authority, dir, tpm string, id attestation.Identity) error {
	request, _, err := attestation.RequestIdentity(ctx, dir, tpm)
	if err != nil {
		return err
	}
	challenge, expect, err := a.Challenge(request)
	if err != nil {
		return err
	}
	answer, err := attestation.AnswerIdentity(ctx, dir, challenge)
	if err != nil {
		return err
	}
	certificate, err := a.Certify(request, answer, expect, id)
	if err != nil {
		return err
	}
	_, err = attestation.StoreIdentity(ctx, dir, certificate)
	return err
}

// VendorParts are the parts of evidence of variant attestation.VendorTPM2, as tools for TPMs make them.
type VendorParts = evidence.VendorParts

// ParseVendorDocument returns the parts of a document.
func ParseVendorDocument(b []byte) (VendorParts, error) { return evidence.ParseVendorDocument(b) }

// BootLog returns what an issuer of variant attestation.VendorTPM2 makes of an event log of firmware.
func BootLog(log []byte) ([]byte, error) { return evidence.BootLog(log) }

// ProvisionKey does what a vendor does: it has the TPM at address make an attestation key, of RSA or on
// P-256, and stores its template and the certificate that certify returns for it at the indices of at.
// It must precede HandOver in a boot.
func ProvisionKey(ctx context.Context, address string, at attestation.NVKey, rsa bool, certify func(crypto.PublicKey) ([]byte, error)) error {
	return evidence.ProvisionKey(ctx, address, at, rsa, certify)
}

// SoftwareIssuer makes the document that a TPM would make, without a TPM.
type SoftwareIssuer = evidence.SoftwareIssuer

// NewSoftwareIssuer simulates the instance id, which ca certifies, after a boot that measured
// events. With a clusterID it is a member of that cluster; nil stands for an unused machine.
func NewSoftwareIssuer(ca *CA, id attestation.Identity, events []attestation.MeasuredEvent, clusterID []byte) (*SoftwareIssuer, error) {
	return evidence.NewSoftwareIssuer(ca, id, events, clusterID)
}
