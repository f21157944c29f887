// Package evidence implements packages attestation and attestationtest. It exists to keep them
// apart: verifying evidence and quoting a TPM is for production, while everything that can forge
// evidence is exported by attestationtest alone.
package evidence

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"unicode/utf8"

	"constellation/engine/cloud"
	"constellation/engine/plain"
)

// Variant names a kind of evidence. Both sides of a connection must speak the
// same one.
type Variant string

// TPM2 is evidence by a TPM 2.0 whose attestation key the cloud certified.
const TPM2 Variant = "tpm2"

// Enrolled is evidence by the key of a machine that the authority of a workspace certified.
const Enrolled Variant = "enrolled"

// MaxDocument is the size in bytes that no document exceeds. Issuers refuse to
// make a larger one; validators refuse it before they look inside. Most of it is
// the event log: those of real servers have up to 60 kB.
const MaxDocument = 128 << 10

// MaxUserData is the greatest length in bytes of what a quote can bind. Callers
// with more hash it.
const MaxUserData = 32

// Issuer makes evidence about the machine that it runs on.
type Issuer interface {
	Variant() Variant
	// Issue returns a document that binds userData, which has 1 to MaxUserData
	// bytes. It may be called concurrently.
	Issue(ctx context.Context, userData []byte) (document []byte, err error)
}

// Validator judges evidence about another machine.
type Validator interface {
	Variant() Variant
	// Validate returns what document states if it is genuine, binds exactly
	// userData and describes an acceptable machine. Errors wrap one of the
	// package's sentinels, or one of package cloud if the cloud's API is needed
	// and cannot be asked. It may be called concurrently and holds no lock.
	Validate(ctx context.Context, document, userData []byte) (Statement, error)
}

// Why evidence is refused. An error of a Validator wraps at most one of them.
var (
	// ErrDocument means that the document cannot be read: malformed, too large,
	// or inconsistent in itself.
	ErrDocument = errors.New("evidence is malformed")
	// ErrTrust means that no trusted cloud vouches for the attestation key.
	ErrTrust = errors.New("attestation key is not trusted")
	// ErrQuote means that the quote is not what it must be: wrong signature,
	// made for another connection, or not over the registers carried beside it.
	ErrQuote = errors.New("quote is not valid")
	// ErrMeasurement means that the machine runs something else than allowed.
	ErrMeasurement = errors.New("measurements differ")
	// ErrMember means that PCR 15 breaks the rule: a used machine asks to start over, or a
	// machine that should be a member of a cluster is not a member.
	ErrMember = errors.New("cluster membership differs")
	// ErrIdentity means that the evidence is sound, but of the wrong instance.
	ErrIdentity = errors.New("wrong instance")
)

// ErrTPM means that the TPM of this machine, or the enrolled identity in its place, could not be
// used.
var ErrTPM = errors.New("TPM not usable")

// Identity is what the cloud certified about the instance that owns a TPM. It is never part of a
// request, but of the attestation key's certificate. Certificates of variant VendorTPM2 name the
// instance, and the API of the cloud has the rest.
type Identity struct {
	Name       string `json:"name"`
	ProviderID string `json:"providerID"`
	// Incarnation is that of the cloud.Instance; empty if the evidence does not prove it. Certificates
	// of CA have no field for it.
	Incarnation string `json:"incarnation,omitempty"`
	// UID identifies the sandbox or project that the instance belongs to.
	UID   string     `json:"uid"`
	Group string     `json:"group"`
	Role  cloud.Role `json:"role"`
	IP    netip.Addr `json:"ip"`
}

// check refuses what a certificate must not say.
func (id Identity) check() error {
	for _, f := range []struct{ name, value string }{
		{"name", id.Name},
		{"provider ID", id.ProviderID},
		{"UID", id.UID},
		{"group", id.Group},
	} {
		switch {
		case f.value == "":
			return fmt.Errorf("%s of the instance is empty", f.name)
		case len(f.value) > maxIdentityField:
			return fmt.Errorf("%s of the instance has %d bytes, at most %d are allowed", f.name, len(f.value), maxIdentityField)
		case !printable(f.value):
			return fmt.Errorf("%s of the instance holds characters that cannot be printed", f.name)
		}
	}
	if len(id.Incarnation) > maxIdentityField || !printable(id.Incarnation) {
		return errors.New("incarnation of the instance is too long, or holds characters that cannot be printed")
	}
	if !id.Role.Valid() {
		return fmt.Errorf("role of the instance is %q", id.Role)
	}
	if !id.IP.IsValid() || id.IP.IsUnspecified() || id.IP.Is4In6() || id.IP.Zone() != "" {
		return errors.New("address of the instance is not an IP address")
	}
	return nil
}

// maxIdentityField is in bytes; provider IDs of public clouds have up to 250.
const maxIdentityField = 256

func printable(s string) bool {
	if !utf8.ValidString(s) {
		return false
	}
	var f plain.Filter
	for _, r := range s {
		if !f.Shows(r) {
			return false
		}
	}
	return true
}

// Statement is what accepted evidence says.
type Statement struct {
	Identity Identity `json:"identity"`
	// Attested is whether a TPM vouches for the registers. Without one, the machine's own word
	// is all there is.
	Attested bool `json:"attested"`
	// Key is sha256: and the hash, in hex, of the certified public key (SubjectPublicKeyInfo).
	// Evidence of variant TPM2 lacks it.
	Key string `json:"key,omitempty"`
	// PCRs are the quoted SHA-256 registers, 32 bytes each.
	PCRs map[uint32][]byte `json:"pcrs"`
	// Warnings name registers that differ from a measurement which only warns.
	Warnings []string `json:"warnings,omitempty"`
	// OfCertifier is the certificate in DER that a certifier made for the key, if the evidence has one. It is of that key. Its
	// issuer was judged only if Certified is set.
	OfCertifier []byte `json:"ofCertifier,omitempty"`
	// SecureBoot is SecureBootOn or SecureBootOff. Only evidence of variant VendorTPM2 has it.
	SecureBoot string `json:"secureBoot,omitempty"`
	// Certified is whether a certificate of the cluster's certifier states Identity, in the place of the vendor's API.
	Certified bool `json:"certified,omitempty"`
	// Firmware is the version that the TPM reports, Resets how often it was reset.
	Firmware uint64 `json:"firmware"`
	Resets   uint32 `json:"resets"`
}
