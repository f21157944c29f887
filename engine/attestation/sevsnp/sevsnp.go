// Package sevsnp judges attestation reports of confidential virtual machines with SEV-SNP by AMD. The
// processor signs them. They state what firmware a machine started with, and bind 64 bytes.
//
// A report is accepted if AMD certified the key of the processor, nothing in the chain is revoked, and each
// part of the trusted computing base has at least the version that the policy demands. Machines that their
// host can debug are refused, and those with a migration agent. The library go-sev-guest verifies signatures,
// certificates and versions against roots of AMD that it contains. A [Collateral] fetches the rest from AMD.
//
// Only one report was judged, the one that the library contains. It does not satisfy the policy: its machine
// can be debugged, and no revocation list came with it. No program uses this package yet.
package sevsnp

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/go-sev-guest/abi"
	"github.com/google/go-sev-guest/kds"
	pb "github.com/google/go-sev-guest/proto/sevsnp"
	"github.com/google/go-sev-guest/validate"
	"github.com/google/go-sev-guest/verify"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Collateral returns what AMD publishes at an address: certificates and revocation lists. Signatures of AMD
// protect it, not the connection.
type Collateral func(ctx context.Context, url string) ([]byte, error)

// Get implements trust.HTTPSGetter of go-sev-guest.
func (c Collateral) Get(url string) ([]byte, error) { return c(context.Background(), url) }

// GetContext implements trust.ContextHTTPSGetter of go-sev-guest.
func (c Collateral) GetContext(ctx context.Context, url string) ([]byte, error) { return c(ctx, url) }

const (
	// BindingSize is the size of what a report binds, in bytes.
	BindingSize = 64
	// MeasurementSize is the size of a measurement, in bytes.
	MeasurementSize = 48
)

// ErrReport means that a report is not accepted.
var ErrReport = errors.New("report of a confidential machine is not accepted")

// Versions are those of the parts of a trusted computing base.
type Versions struct{ BootLoader, TEE, SNP, Microcode uint8 }

// Policy is what a report must satisfy. All fields except Measurement and Now are required.
type Policy struct {
	Collateral Collateral
	// Binding is what the report must bind, BindingSize bytes.
	Binding []byte
	// Processor is Milan or Genoa. Reports of version 2 do not name it.
	Processor string
	// Minimum are the lowest accepted versions. AMD publishes the current ones in its security bulletins, and in
	// no form that a program can read.
	Minimum Versions
	// Measurement is that of the firmware, MeasurementSize bytes. Nil: any.
	Measurement []byte
	// Now is the time of the judgement; zero: the current time.
	Now time.Time
}

// product returns the processor of p, or why p cannot judge a report.
func (p Policy) product() (*pb.SevProduct, error) {
	names := map[string]pb.SevProduct_SevProductName{"Milan": pb.SevProduct_SEV_PRODUCT_MILAN, "Genoa": pb.SevProduct_SEV_PRODUCT_GENOA}
	name, known := names[p.Processor]
	switch {
	case !known:
		return nil, fmt.Errorf("judge report: processor %q is not known, use Milan or Genoa", p.Processor)
	case p.Collateral == nil:
		return nil, errors.New("judge report: the policy has no collateral")
	case p.Minimum == Versions{}:
		return nil, errors.New("judge report: the policy has no minimum versions, so outdated firmware would be accepted")
	case len(p.Binding) != BindingSize:
		return nil, fmt.Errorf("judge report: binding has %d bytes, want %d", len(p.Binding), BindingSize)
	case p.Measurement != nil && len(p.Measurement) != MeasurementSize:
		return nil, fmt.Errorf("judge report: measurement has %d bytes, want %d", len(p.Measurement), MeasurementSize)
	}
	return &pb.SevProduct{Name: name, MachineStepping: &wrapperspb.UInt32Value{}}, nil
}

// weakness drops parts of the policy. Only tests have one, because the recorded report does not satisfy them.
type weakness struct {
	debug       bool // machines that can be debugged
	revocations bool // certificates that may be revoked
}

// Judge judges a report and returns the measurement in it. A report that is not accepted is an error that wraps
// ErrReport. So is collateral that cannot be fetched, because nothing is accepted without it.
func Judge(ctx context.Context, report []byte, p Policy) (measurement []byte, err error) {
	return judge(ctx, report, p, weakness{})
}

func judge(ctx context.Context, report []byte, p Policy, w weakness) ([]byte, error) {
	product, err := p.product()
	if err != nil {
		return nil, err
	}
	if len(report) != abi.ReportSize {
		return nil, fmt.Errorf("%w: it has %d bytes, want %d", ErrReport, len(report), abi.ReportSize)
	}
	r, err := abi.ReportToProto(report)
	if err != nil {
		return nil, fmt.Errorf("%w: read report: %w", ErrReport, err)
	}
	o := &verify.Options{CheckRevocations: !w.revocations, Getter: p.Collateral, Now: p.Now, Product: product}
	if o.Now.IsZero() {
		o.Now = time.Now()
	}
	a, err := verify.GetAttestationFromReportContext(ctx, r, o)
	if err != nil {
		return nil, fmt.Errorf("%w: fetch certificates: %w", ErrReport, err)
	}
	if err := verify.SnpAttestationContext(ctx, a, o); err != nil {
		return nil, fmt.Errorf("%w: verify signature: %w", ErrReport, err)
	}
	minimum := kds.TCBParts{BlSpl: p.Minimum.BootLoader, TeeSpl: p.Minimum.TEE, SnpSpl: p.Minimum.SNP, UcodeSpl: p.Minimum.Microcode}
	if err := validate.SnpAttestation(a, &validate.Options{
		// Two threads of a core belong to the same machine in clouds, so multithreading is accepted.
		GuestPolicy: abi.SnpPolicy{SMT: true, Debug: w.debug}, ReportData: p.Binding, Measurement: p.Measurement,
		MinimumTCB: minimum, MinimumLaunchTCB: minimum, PermitProvisionalFirmware: true,
	}); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrReport, err)
	}
	return r.GetMeasurement(), nil
}
