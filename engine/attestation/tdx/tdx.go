// Package tdx judges quotes of confidential virtual machines with TDX by Intel. An enclave of Intel on the machine's
// processor signs them. They state what firmware a machine started with, and bind 64 bytes.
//
// A quote is accepted if Intel certified the processor, nothing in the chain is revoked, and Intel rates the
// versions of the trusted computing base and of the enclave as up to date. Machines that their host can debug are
// refused. The library go-tdx-guest verifies signatures, certificates and levels against the root of Intel. A
// [Collateral] fetches the rest from Intel.
//
// Only one quote was judged, the one that the library contains. It does not satisfy the policy: no level of the recorded
// collateral has its versions. No program uses this package yet.
package tdx

import (
	"context"
	"crypto/x509"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/google/go-tdx-guest/abi"
	pb "github.com/google/go-tdx-guest/proto/tdx"
	"github.com/google/go-tdx-guest/validate"
	"github.com/google/go-tdx-guest/verify"
)

// Collateral returns what Intel publishes at an address: revocation lists, levels and the identity of the enclave, with
// the headers of the answer. Signatures of Intel protect it, not the connection.
type Collateral func(ctx context.Context, url string) (header map[string][]string, body []byte, err error)

// Get implements trust.HTTPSGetter of go-tdx-guest.
func (c Collateral) Get(url string) (map[string][]string, []byte, error) {
	return c(context.Background(), url)
}

// GetContext implements trust.ContextHTTPSGetter of go-tdx-guest.
func (c Collateral) GetContext(ctx context.Context, url string) (map[string][]string, []byte, error) {
	return c(ctx, url)
}

const (
	// BindingSize is the size of what a quote binds, in bytes.
	BindingSize = 64
	// MeasurementSize is the size of a measurement, in bytes.
	MeasurementSize = 48
	// MaxQuote bounds a quote, in bytes. Quotes have about 5,000.
	MaxQuote = 32 << 10

	// debug is the attribute of machines that their host can debug (Intel TDX Module 1.5 ABI, TD attributes).
	debug = 1
)

// intel is the certificate Intel SGX Root CA, as https://certificates.trustedservices.intel.com publishes it. Its SHA-256 is
// 44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3.
//
//go:embed intel-sgx-root.pem
var intel []byte

// ErrQuote means that a quote is not accepted.
var ErrQuote = errors.New("quote of a confidential machine is not accepted")

// Policy is what a quote must satisfy. Collateral and Binding are required.
type Policy struct {
	Collateral Collateral
	// Binding is what the quote must bind, BindingSize bytes.
	Binding []byte
	// Measurement is that of the firmware (MRTD), MeasurementSize bytes. Nil: any.
	Measurement []byte
	// Now is the time of the judgement; zero: the current time.
	Now time.Time
}

// check returns why p cannot judge a quote.
func (p Policy) check() error {
	switch {
	case p.Collateral == nil:
		return errors.New("judge quote: the policy has no collateral")
	case len(p.Binding) != BindingSize:
		return fmt.Errorf("judge quote: binding has %d bytes, want %d", len(p.Binding), BindingSize)
	case p.Measurement != nil && len(p.Measurement) != MeasurementSize:
		return fmt.Errorf("judge quote: measurement has %d bytes, want %d", len(p.Measurement), MeasurementSize)
	}
	return nil
}

// weakness drops parts of the policy. Only tests have one, because the recorded quote does not satisfy them.
type weakness struct {
	collateral bool // levels that are out of date, and certificates that may be revoked
}

// Judge judges a quote and returns the measurement in it. A quote that is not accepted is an error that wraps ErrQuote.
// So is collateral that cannot be fetched, because nothing is accepted without it.
func Judge(ctx context.Context, quote []byte, p Policy) (measurement []byte, err error) {
	return judge(ctx, quote, p, weakness{})
}

func judge(ctx context.Context, quote []byte, p Policy, w weakness) (measurement []byte, err error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	if len(quote) > MaxQuote {
		return nil, fmt.Errorf("%w: it has %d bytes, at most %d are read", ErrQuote, len(quote), MaxQuote)
	}
	defer func() {
		// go-tdx-guest indexes by lengths in a quote without a check of them.
		if what := recover(); what != nil {
			measurement, err = nil, fmt.Errorf("%w: it is malformed: %v", ErrQuote, what)
		}
	}()
	any, err := abi.QuoteToProto(quote)
	if err != nil {
		return nil, fmt.Errorf("%w: read quote: %w", ErrQuote, err)
	}
	q, ok := any.(*pb.QuoteV4)
	if !ok {
		return nil, fmt.Errorf("%w: its format is not version 4", ErrQuote)
	}
	now := p.Now
	if now.IsZero() {
		now = time.Now()
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(intel) {
		return nil, errors.New("judge quote: the root of Intel cannot be read")
	}
	if err := verify.TdxQuoteContext(ctx, q, &verify.Options{
		TrustedRoots: roots, GetCollateral: !w.collateral, CheckRevocations: !w.collateral, Getter: p.Collateral,
		Now: &verify.TimeSet{PckCertChain: now, TcbInfo: now, QeIdentity: now, PckCrl: now, RootCaCrl: now},
	}); err != nil {
		return nil, fmt.Errorf("%w: verify quote: %w", ErrQuote, err)
	}
	// It does not name the attribute debug among those that it refuses.
	body := q.GetTdQuoteBody()
	if binary.LittleEndian.Uint64(body.GetTdAttributes())&debug != 0 {
		return nil, fmt.Errorf("%w: its machine can be debugged", ErrQuote)
	}
	if err := validate.TdxQuote(q, &validate.Options{TdQuoteBodyOptions: validate.TdQuoteBodyOptions{ReportData: p.Binding, MrTd: p.Measurement}}); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrQuote, err)
	}
	return body.GetMrTd(), nil
}
