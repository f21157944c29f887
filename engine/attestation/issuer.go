package attestation

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// TPMIssuer makes evidence with the TPM of this machine. It may be used
// concurrently, and beside issuers in other processes: each quote opens the TPM
// and closes it again.
type TPMIssuer struct {
	address string
	log     string
}

// NewTPMIssuer returns an issuer for the TPM at address; see OpenTPM. The event
// log is the one at EventLogPath(address); a machine without one gives evidence
// without one.
func NewTPMIssuer(address string) *TPMIssuer {
	return &TPMIssuer{address: address, log: EventLogPath(address)}
}

// Variant implements Issuer.
func (*TPMIssuer) Variant() Variant { return TPM2 }

// quoteAttempts is how often a quote is tried while something else extends the
// registers between reading and quoting them.
const quoteAttempts = 3

// Issue implements Issuer. It takes some ten milliseconds with an emulator and up
// to a second with hardware. Errors wrap ErrTPM.
func (i *TPMIssuer) Issue(ctx context.Context, userData []byte) ([]byte, error) {
	if len(userData) == 0 || len(userData) > MaxUserData {
		return nil, fmt.Errorf("issue evidence: %d bytes are to be bound, want 1 to %d", len(userData), MaxUserData)
	}
	log, err := readEventLog(i.log)
	if err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	d := document{log: log}
	if err := use(ctx, i.address, func(t transport.TPM) error { return d.quoteWith(t, userData) }); err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	out, err := d.marshal()
	if err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	return out, nil
}

// quoteWith fills in everything but the log.
func (d *document) quoteWith(t transport.TPM, userData []byte) (err error) {
	template, err := readNV(t, nvTemplate)
	if err != nil {
		return fmt.Errorf("read template of the attestation key (was the TPM provisioned?): %w", err)
	}
	if d.certificate, err = readNV(t, nvCertificate); err != nil {
		return fmt.Errorf("read certificate of the attestation key (was the TPM provisioned?): %w", err)
	}
	key, public, err := primary(t, template)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, flush(t, key)) }()
	d.public = public

	indices := make([]uint32, quotedPCRs)
	for i := range indices {
		indices[i] = uint32(i)
	}
	for range quoteAttempts {
		pcrs, err := readPCRs(t, indices)
		if err != nil {
			return err
		}
		r, err := tpm2.Quote{
			SignHandle:     tpm2.AuthHandle{Handle: key.Handle, Name: key.Name, Auth: tpm2.PasswordAuth(nil)},
			QualifyingData: tpm2.TPM2BData{Buffer: userData},
			InScheme:       tpm2.TPMTSigScheme{Scheme: tpm2.TPMAlgNull},
			PCRSelect:      selection(indices...),
		}.Execute(t)
		if err != nil {
			return fmt.Errorf("quote: %w", err)
		}
		d.quote, d.signature = r.Quoted.Bytes(), tpm2.Marshal(r.Signature)
		q, err := parseQuote(d.quote)
		if err != nil {
			return fmt.Errorf("quote: %w", err)
		}
		d.pcrs = d.pcrs[:0]
		h := sha256.New()
		for _, i := range indices {
			d.pcrs = append(d.pcrs, register{i, pcrs[i]})
			h.Write(pcrs[i])
		}
		if bytes.Equal(h.Sum(nil), q.digest) {
			return nil
		}
	}
	return fmt.Errorf("quote: the registers changed during each of %d attempts", quoteAttempts)
}
