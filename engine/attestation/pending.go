package attestation

import (
	"context"
	"crypto/x509"
	"errors"
	"time"

	"github.com/google/go-tpm/tpm2/transport"

	"constellation/engine/cloud"
)

// maxEventData bounds what an event of the log says, in bytes.
const maxEventData = 1024

var errPending = errors.New("attestation: under construction")

type CA struct{}

func CreateCA(name string) (certPEM, keyPEM []byte, err error) { return nil, nil, errPending }
func ParseCA(certPEM, keyPEM []byte) (*CA, error)              { return nil, errPending }
func (*CA) Roots() *x509.CertPool                              { return nil }

// ParseRoots reads trust roots from PEM.
func ParseRoots(pem []byte) (*x509.CertPool, error) { return nil, errPending }

func OpenTPM(ctx context.Context, address string) (transport.TPMCloser, error) {
	return nil, errPending
}

// EventLogPath returns where the event log of the TPM at address lies.
func EventLogPath(address string) string { return "" }

func Provision(ctx context.Context, tpmAddress string, ca *CA, id Identity) error { return errPending }
func Measure(ctx context.Context, tpmAddress, eventLogPath string, events []MeasuredEvent) error {
	return errPending
}
func ExtendClusterID(ctx context.Context, address string, clusterID []byte) error { return errPending }
func ReadPCRs(ctx context.Context, address string, indices ...uint32) (map[uint32][]byte, error) {
	return nil, errPending
}

type TPMIssuer struct{}

func NewTPMIssuer(address string) *TPMIssuer { return &TPMIssuer{} }
func (*TPMIssuer) Variant() Variant          { return TPM2 }
func (*TPMIssuer) Issue(ctx context.Context, userData []byte) ([]byte, error) {
	return nil, errPending
}

// Options refine what a TPMValidator accepts. The zero value demands an unused machine of any role and any project.
type Options struct {
	PCR15        PCR15
	UID          string         // project or sandbox that the instance must belong to; "" = any that the roots vouch for
	Role         cloud.Role     // role that the instance must have; "" = any
	Alternatives []Measurements // other images that are accepted too
	Now          func() time.Time
}

type TPMValidator struct{}

func NewTPMValidator(roots *x509.CertPool, m Measurements, o Options) *TPMValidator {
	return &TPMValidator{}
}
func (*TPMValidator) Variant() Variant { return TPM2 }
func (*TPMValidator) Validate(ctx context.Context, document, userData []byte) (Statement, error) {
	return Statement{}, errPending
}

// SoftwareIssuer signs quotes without a TPM, for load tests.
type SoftwareIssuer struct{}

// NewSoftwareIssuer: clusterID nil = PCR 15 zero.
func NewSoftwareIssuer(ca *CA, id Identity, events []MeasuredEvent, clusterID []byte) (*SoftwareIssuer, error) {
	return nil, errPending
}
func (*SoftwareIssuer) Variant() Variant { return TPM2 }
func (*SoftwareIssuer) Issue(ctx context.Context, userData []byte) ([]byte, error) {
	return nil, errPending
}
