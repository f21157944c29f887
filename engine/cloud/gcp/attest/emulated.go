package attest

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"slices"
	"sync"

	"constellation/engine/attestation"
)

// Emulated is how machines of a sandbox that emulates Google Cloud prove what they are: as Google's machines, with certificates
// of the sandbox's authority in Google's format, under a variant of its own. It refuses everything under roots of which one is
// Google's. So a machine at Google, whose roots those are, does not accept evidence of a sandbox, even if it got the addresses of
// an emulator.
func Emulated(c Config) attestation.Method {
	m := methodOf(c, attestation.Vendor{Variant: attestation.EmulatedVendorTPM2}) // the authority itself certifies keys: nothing is fetched
	validator := m.Validator
	m.Validator = func(roots *x509.CertPool, measurements attestation.Measurements, o attestation.Options) attestation.Validator {
		if trustsGoogle(roots) {
			return closed{m.Variant}
		}
		return validator(roots, measurements, o)
	}
	return m
}

// googles are the certificates of Roots.
var googles = sync.OnceValue(func() []*x509.Certificate { return mustParse(rootsPEM) })

// mustParse returns the certificates in a file of this package.
func mustParse(rest []byte) (out []*x509.Certificate) {
	for {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			return out
		}
		c, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			panic(fmt.Sprintf("parse certificates of this program: %v", err))
		}
		out = append(out, c)
	}
}

// trustsGoogle reports whether one of the certificates of this package is in a pool, or was certified by one of it.
func trustsGoogle(roots *x509.CertPool) bool {
	if roots == nil {
		return false
	}
	return slices.ContainsFunc(slices.Concat(googles(), pinned()), func(c *x509.Certificate) bool {
		_, err := c.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: c.NotBefore, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		return err == nil
	})
}

// closed is a validator that accepts nothing.
type closed struct{ variant attestation.Variant }

// Variant implements attestation.Validator.
func (r closed) Variant() attestation.Variant { return r.variant }

// Validate implements attestation.Validator.
func (closed) Validate(context.Context, []byte, []byte) (attestation.Statement, error) {
	return attestation.Statement{}, fmt.Errorf("%w: the trust roots are Google's, and the addresses of the cloud are those of an emulator: evidence of a sandbox is not accepted there; remove the addresses, or use the roots of the sandbox", attestation.ErrTrust)
}
