// Package attestation creates and verifies evidence of what a machine booted.
//
// A machine's TPM 2.0 measures the boot into platform configuration registers (PCRs). An
// [Issuer] has the TPM sign a quote over PCRs 0 to 15 and a value of the caller's choice; the
// result is a document. A [Validator] accepts a document if the quote was signed by a key that
// the cloud certified, if it contains the caller's value, and if the PCRs match those of a
// known operating system image: its [Measurements]. The result is a [Statement]: which
// instance of the cloud this is, and what it runs.
//
// PCR 15 marks a machine as used. It is zero until the machine belongs to a cluster and then
// contains [ClusterIDPCR] of the cluster's ID. A register can only be extended, so a former
// member can neither initialize nor join a cluster before its TPM is reset. Only a power cycle
// resets a TPM, never software: a member that reboots starts with a zero PCR 15 and extends it
// again from the ID on its disk, before anything on it listens. To reuse a machine, stop it,
// wipe its disk and give it a new TPM state, in this order.
//
// A machine that no cloud vouches for can be enrolled: the authority of a workspace, in package
// authority, certifies the machine's own key, and documents of variant [Enrolled] prove its
// possession. The address of such an identity is enrolled: and the path of its directory. With a
// key in a TPM, documents have a quote, and PCR 15 is that of the TPM. A key in a file proves only
// that somebody has that file: the Statement is not Attested, and a file takes the place of PCR 15.
// That file survives reboots, and [ClearClusterID] removes it. Measurements are judged of neither.
//
// Clouds that certify keys in a format of their own have a [Vendor], which judges their certificates
// and asks their API which group, role and address a machine has. Documents of variant [VendorTPM2]
// have the digests of the event log in the place of the log, and prove the state of Secure Boot.
//
// The cloud's half, which certifies attestation keys, is in package attestationtest: only a test
// cloud needs it. The trust root is configuration; nothing in here trusts anyone by default. The
// implementation is in internal/evidence, the order of a validator's checks in its validator.go.
//
// The package uses no network and handles no secrets: documents, certificates and logs are
// public.
package attestation

import (
	"cmp"
	"context"
	"crypto/x509"

	"github.com/google/go-tpm/tpm2/transport"

	"constellation/engine/attestation/internal/evidence"
)

// Variant names a kind of evidence. Both sides of a connection must use the same one.
type Variant = evidence.Variant

// TPM2 is evidence by a TPM 2.0 whose attestation key the cloud certified.
const TPM2 = evidence.TPM2

// Enrolled is evidence by the key of a machine that the authority of a workspace certified.
const Enrolled = evidence.Enrolled

// VendorTPM2 is evidence by a TPM 2.0 whose attestation key the vendor of the cloud certified in a
// format of its own. See Vendor.
const VendorTPM2 = evidence.VendorTPM2

// EmulatedVendorTPM2 is VendorTPM2 of an emulation of the vendor.
const EmulatedVendorTPM2 = evidence.EmulatedVendorTPM2

// States of Secure Boot in a Statement.
const (
	SecureBootOn  = evidence.SecureBootOn
	SecureBootOff = evidence.SecureBootOff
)

// Kinds of enrolled machines.
const (
	// KindKey means that the key is in a file. Everyone who can read it can be the machine: nothing
	// is attested.
	KindKey = evidence.KindKey
	// KindTPM means that the key is in a TPM 2.0, which never exports it and quotes its registers
	// with it.
	KindTPM = evidence.KindTPM
)

// What RequestIdentity takes instead of the address of a TPM.
const (
	// AutoTPM is the first TPM that Linux shows, or a key in a file without one that can be used.
	AutoTPM = evidence.AutoTPM
	// NoTPM is a key in a file.
	NoTPM = evidence.NoTPM
)

// Limits in bytes.
const (
	// MaxDocument is the maximum size of a document. Issuers make no larger one. Validators
	// refuse a larger one before they parse it.
	MaxDocument = evidence.MaxDocument
	// MaxUserData is the maximum size of the value that a quote can bind.
	MaxUserData = evidence.MaxUserData
)

// Why a validator refuses a document. An error of package cloud means instead that the method must
// ask the cloud's API and cannot.
var (
	// ErrDocument means that the document is malformed, too large or inconsistent in itself.
	ErrDocument = evidence.ErrDocument
	// ErrTrust means that no trusted cloud certified the attestation key.
	ErrTrust = evidence.ErrTrust
	// ErrQuote means that the quote has a wrong signature, was made for another connection, or
	// does not cover the registers in the document.
	ErrQuote = evidence.ErrQuote
	// ErrMeasurement means that the machine runs something else than allowed.
	ErrMeasurement = evidence.ErrMeasurement
	// ErrMember means that PCR 15 breaks the rule for members of clusters.
	ErrMember = evidence.ErrMember
	// ErrIdentity means that the evidence is valid, but of the wrong instance.
	ErrIdentity = evidence.ErrIdentity
)

// ErrSealed means that this machine, as it booted, cannot read a sealed secret.
var ErrSealed = evidence.ErrSealed

// ErrTPM means that the TPM of this machine, or the enrolled identity in its place, could not be
// used.
var ErrTPM = evidence.ErrTPM

// Issuers, validators and what they work on.
type (
	// Issuer makes evidence about the machine that it runs on.
	Issuer = evidence.Issuer
	// Validator verifies evidence.
	Validator = evidence.Validator
	// TPMIssuer makes evidence with a TPM 2.0.
	TPMIssuer = evidence.TPMIssuer
	// TPMValidator verifies evidence of a TPM 2.0.
	TPMValidator = evidence.TPMValidator
	// EnrolledIssuer makes evidence with the identity of an enrolled machine.
	EnrolledIssuer = evidence.EnrolledIssuer
	// EnrolledValidator verifies evidence of enrolled machines.
	EnrolledValidator = evidence.EnrolledValidator
	// VendorIssuer makes evidence with a TPM 2.0 for a Vendor.
	VendorIssuer = evidence.VendorIssuer
	// VendorValidator verifies evidence that a Vendor judges.
	VendorValidator = evidence.VendorValidator
	// Vendor is how a cloud certifies the keys of its machines' TPMs.
	Vendor = evidence.Vendor
	// NVKey is where a TPM has an attestation key.
	NVKey = evidence.NVKey
	// Certified is a machine as its vendor certified it.
	Certified = evidence.Certified
	// Kind is where the key of an enrolled machine is.
	Kind = evidence.Kind
	// EnrolledIdentity is who an enrolled machine is.
	EnrolledIdentity = evidence.EnrolledIdentity
	// Options change what a validator accepts.
	Options = evidence.Options
	// Identity is the instance of the cloud that a machine is.
	Identity = evidence.Identity
	// Statement is the content of verified evidence.
	Statement = evidence.Statement
	// PCR15 is the expected state of the register with the cluster ID.
	PCR15 = evidence.PCR15
	// MeasuredEvent is one thing that firmware or a boot loader measures.
	MeasuredEvent = evidence.MeasuredEvent
	// Measurement is the expected value of one register.
	Measurement = evidence.Measurement
	// Measurements are the expected values of registers, by index.
	Measurements = evidence.Measurements
	// MeasurementError lists the registers that differ. It wraps ErrMeasurement.
	MeasurementError = evidence.MeasurementError
	// Mismatch is one register that differs.
	Mismatch = evidence.Mismatch
)

// NewTPMIssuer returns an issuer that uses the TPM at address; see OpenTPM.
func NewTPMIssuer(address string) *TPMIssuer { return evidence.NewTPMIssuer(address) }

// NewTPMValidator returns a validator that accepts quotes of keys that one of roots certified, if
// the registers are those of m.
func NewTPMValidator(roots *x509.CertPool, m Measurements, opts Options) *TPMValidator {
	return evidence.NewTPMValidator(roots, m, opts)
}

// NewEnrolledIssuer returns an issuer for the identity at address, enrolled: and its directory,
// which may be read-only.
func NewEnrolledIssuer(address string) *EnrolledIssuer { return evidence.NewEnrolledIssuer(address) }

// NewEnrolledValidator returns a validator that accepts machines that one of the authorities in
// roots enrolled. It judges no measurements.
func NewEnrolledValidator(roots *x509.CertPool, opts Options) *EnrolledValidator {
	return evidence.NewEnrolledValidator(roots, opts)
}

// Method is how the machines of a cloud prove what they are.
type Method struct {
	// Variant is that of the documents.
	Variant Variant
	// Unmeasured means that measurements are neither needed nor judged: the evidence proves
	// which machine it is, not what it booted.
	Unmeasured bool
	// Issuer returns what makes evidence about this machine. address names its TPM.
	Issuer func(address string) Issuer
	// Validator returns what verifies such evidence. It trusts the clouds in roots.
	Validator NewValidator
}

// NewValidator returns a validator that accepts machines that one of roots vouches for, if they
// booted what m or an alternative of opts describes.
type NewValidator func(roots *x509.CertPool, m Measurements, opts Options) Validator

// TPMMethod is the method of machines with a TPM 2.0 whose key their cloud certified.
func TPMMethod() Method {
	return Method{
		Variant: TPM2,
		Issuer:  func(address string) Issuer { return NewTPMIssuer(address) },
		Validator: func(roots *x509.CertPool, m Measurements, opts Options) Validator {
			return NewTPMValidator(roots, m, opts)
		},
	}
}

// VendorMethod is the method of machines with a TPM 2.0 whose key a vendor certified in a format of its
// own. The packages of clouds have the vendors.
func VendorMethod(v Vendor) Method {
	return Method{
		Variant: cmp.Or(v.Variant, VendorTPM2),
		Issuer:  func(address string) Issuer { return evidence.NewVendorIssuer(v, address) },
		Validator: func(roots *x509.CertPool, m Measurements, opts Options) Validator {
			return evidence.NewVendorValidator(v, roots, m, opts)
		},
	}
}

// EnrolledMethod is the method of machines that the authority of a workspace certified.
func EnrolledMethod() Method {
	return Method{
		Variant:    Enrolled,
		Unmeasured: true,
		Issuer:     func(address string) Issuer { return NewEnrolledIssuer(address) },
		Validator: func(roots *x509.CertPool, _ Measurements, opts Options) Validator {
			return NewEnrolledValidator(roots, opts)
		},
	}
}

// ParseRoots reads trust roots from PEM. Anything but certificates of authorities and white space
// is an error, and so is an empty list.
func ParseRoots(pemBytes []byte) (*x509.CertPool, error) { return evidence.ParseRoots(pemBytes) }

// Enforced returns measurements that all must match.
func Enforced(pcrs map[uint32][]byte) Measurements { return evidence.Enforced(pcrs) }

// PredictPCRs returns the registers after a boot that measures events in this order. Registers
// without an event are left out.
func PredictPCRs(events []MeasuredEvent) map[uint32][]byte { return evidence.PredictPCRs(events) }

// PCR15Zero demands a machine that belongs to no cluster yet.
func PCR15Zero() PCR15 { return evidence.PCR15Zero() }

// PCR15ClusterID demands a member of exactly this cluster.
func PCR15ClusterID(clusterID []byte) PCR15 { return evidence.PCR15ClusterID(clusterID) }

// PCR15Member demands a member of some cluster. It is for callers that cannot know the cluster's
// ID yet; they must compare the Identity.
func PCR15Member() PCR15 { return evidence.PCR15Member() }

// ClusterIDPCR returns the value of PCR 15 on a member of the cluster: a zero register extended
// once with SHA-256(clusterID).
func ClusterIDPCR(clusterID []byte) []byte { return evidence.ClusterIDPCR(clusterID) }

// OpenTPM opens the TPM at address: the path of a device, or unix: and the path of an emulator's
// socket.
func OpenTPM(ctx context.Context, address string) (transport.TPMCloser, error) {
	return evidence.OpenTPM(ctx, address)
}

// ReadPCRs reads SHA-256 registers, 0 to 23, of the TPM or the enrolled identity at address. A
// machine without a TPM has zero in all but register 15. Errors wrap ErrTPM.
func ReadPCRs(ctx context.Context, address string, indices ...uint32) (map[uint32][]byte, error) {
	return evidence.ReadPCRs(ctx, address, indices...)
}

// ExtendClusterID marks the machine as a member of the cluster until its TPM is reset, or until
// ClearClusterID with SoftwareMembership. Repeating it changes nothing. On a member of another cluster the error wraps ErrMember, otherwise ErrTPM.
func ExtendClusterID(ctx context.Context, address string, clusterID []byte) error {
	return evidence.ExtendClusterID(ctx, address, clusterID)
}

// SoftwareMembership reports whether a file, instead of register 15 of a TPM, records the cluster
// that the machine belongs to. It survives reboots, and ClearClusterID removes it.
func SoftwareMembership(address string) bool { return evidence.SoftwareMembership(address) }

// ClearClusterID makes a machine with SoftwareMembership unused. It does nothing to others, whose
// TPM only a reset clears. Errors wrap ErrTPM.
func ClearClusterID(address string) error { return evidence.ClearClusterID(address) }

// RequestIdentity returns the request of the machine whose identity is in dir, for package
// authority. On first use it creates the directory and the key; later the key stays the same. tpm
// is the address of the TPM that makes the key, AutoTPM or NoTPM. "" stands for the present key, and
// for NoTPM without one. unused is why AutoTPM made a key in a file on a machine with a TPM.
func RequestIdentity(ctx context.Context, dir, tpm string) (request []byte, unused, err error) {
	return evidence.RequestIdentity(ctx, dir, tpm)
}

// AnswerIdentity answers the authority's challenge with the key in dir.
func AnswerIdentity(ctx context.Context, dir string, challenge []byte) ([]byte, error) {
	return evidence.AnswerIdentity(ctx, dir, challenge)
}

// StoreIdentity stores the certificate of the key in dir. It refuses one of another key, and one
// of another workspace while the machine belongs to a cluster.
func StoreIdentity(ctx context.Context, dir string, certificate []byte) (EnrolledIdentity, error) {
	return evidence.StoreIdentity(ctx, dir, certificate)
}

// Seal encrypts a secret such that only the TPM at address decrypts it: on a member of the cluster,
// with registers 4, 8, 9 and 11 as they are now. The machine need not be a member yet. Errors wrap ErrTPM.
func Seal(ctx context.Context, address string, clusterID, secret []byte) ([]byte, error) {
	return evidence.Seal(ctx, address, clusterID, secret)
}

// Unseal is the inverse of Seal. The error wraps ErrSealed if the TPM is another one, or the machine
// booted something else, or is not a member of the cluster.
func Unseal(ctx context.Context, address string, sealed []byte) ([]byte, error) {
	return evidence.Unseal(ctx, address, sealed)
}

// EventLogPath returns the path of the event log of the TPM at address.
func EventLogPath(address string) string { return evidence.EventLogPath(address) }
