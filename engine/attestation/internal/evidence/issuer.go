package evidence

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// TPMIssuer makes evidence with the TPM of this machine. It may be used concurrently, and
// beside issuers in other processes: each quote opens the TPM and closes it again.
//
// Data common to all quotes is cached for keepKey: the certificate of the attestation key and
// the key itself, in the wrapped form in which a TPM exports keys. Such a key is usable only
// by the TPM that created it, until its reset. A TPM that was reset or exchanged rejects it,
// and then everything is read and created again.
type TPMIssuer struct {
	address string
	log     string
	keys    []NVKey         // where the certified key is; the first one that the TPM has counts
	machine *tpmKey         // nil: the key that a cloud certified
	turn    chan struct{}   // full while a quote is made
	kept    *attestationKey // owned by the holder of the slot; nil: create it
}

// keepKey bounds the use of a cached attestation key. Only a reset invalidates it; the bound
// is a precaution.
const keepKey = time.Minute

// attestationKey is the data common to all quotes.
type attestationKey struct {
	made                time.Time
	certificate, public []byte
	name                tpm2.TPM2BName
	saved               tpm2.TPMSContext
}

// NewTPMIssuer returns an issuer for the TPM at address; see OpenTPM. The event
// log is the one at EventLogPath(address); a machine without one gives evidence
// without one.
func NewTPMIssuer(address string) *TPMIssuer {
	return &TPMIssuer{address: address, log: EventLogPath(address), keys: []NVKey{{Certificate: uint32(nvCertificate), Template: uint32(nvTemplate)}}, turn: make(chan struct{}, 1)}
}

// Variant implements Issuer.
func (*TPMIssuer) Variant() Variant { return TPM2 }

// quoteAttempts bounds the attempts while another process extends the registers between
// reading and quoting them.
const quoteAttempts = 3

// Issue implements Issuer. It takes some ten milliseconds with an emulator and up
// to a second with hardware. Errors wrap ErrTPM.
func (i *TPMIssuer) Issue(ctx context.Context, userData []byte) ([]byte, error) {
	if len(userData) == 0 || len(userData) > MaxUserData {
		return nil, fmt.Errorf("issue evidence: %d bytes are to be bound, want 1 to %d", len(userData), MaxUserData)
	}
	d, err := i.issue(ctx, userData)
	if err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	out, err := d.marshal()
	if err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	return out, nil
}

func (i *TPMIssuer) issue(ctx context.Context, userData []byte) (document, error) {
	log, err := readEventLog(i.log)
	if err != nil {
		return document{}, err
	}
	d := document{log: log}
	select {
	case i.turn <- struct{}{}:
		defer func() { <-i.turn }()
	case <-ctx.Done():
		return document{}, fmt.Errorf("%w: wait for other quotes: %w", ErrTPM, context.Cause(ctx))
	}
	err = use(ctx, i.address, func(t transport.TPM) error { return i.quote(t, &d, userData) })
	return d, err
}

// quote fills in everything except the log. The caller holds the slot.
func (i *TPMIssuer) quote(t transport.TPM, d *document, userData []byte) (err error) {
	key, handle, err := i.key(t)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, flush(t, handle)); err != nil {
			i.kept = nil
		}
	}()
	d.certificate, d.public = key.certificate, key.public
	return d.quoteWith(t, handle, userData)
}

// key returns the attestation key, loaded into the TPM. The caller flushes it.
func (i *TPMIssuer) key(t transport.TPM) (*attestationKey, tpm2.NamedHandle, error) {
	if k := i.kept; k != nil && time.Since(k.made) < keepKey {
		r, err := tpm2.ContextLoad{Context: k.saved}.Execute(t)
		if err == nil {
			return k, tpm2.NamedHandle{Handle: r.LoadedHandle, Name: k.name}, nil
		}
		if !errors.As(err, new(tpm2.TPMRC)) { // the TPM did not answer
			return nil, tpm2.NamedHandle{}, fmt.Errorf("load attestation key: %w", err)
		}
	}
	i.kept = nil
	k, handle, err := i.create(t)
	if err != nil {
		return nil, tpm2.NamedHandle{}, err
	}
	k.made, k.name = time.Now(), handle.Name
	// A TPM that does not export the key creates it for each quote.
	if saved, err := (tpm2.ContextSave{SaveHandle: handle.Handle}).Execute(t); err == nil {
		k.saved = saved.Context
		i.kept = k
	}
	return k, handle, nil
}

// create has the TPM create the attestation key.
func (i *TPMIssuer) create(t transport.TPM) (*attestationKey, tpm2.NamedHandle, error) {
	if m := i.machine; m != nil {
		handle, err := m.load(t)
		return &attestationKey{public: m.public.raw}, handle, err
	}
	at, template, err := i.template(t)
	if err != nil {
		return nil, tpm2.NamedHandle{}, fmt.Errorf("read template of the attestation key (was the TPM provisioned?): %w", err)
	}
	k := &attestationKey{}
	if k.certificate, err = readNV(t, tpm2.TPMHandle(at.Certificate)); err != nil {
		return nil, tpm2.NamedHandle{}, fmt.Errorf("read certificate of the attestation key (was the TPM provisioned?): %w", err)
	}
	handle, public, err := primary(t, template)
	k.public = public
	return k, handle, err
}

// template returns what the TPM makes the first key from that it has.
func (i *TPMIssuer) template(t transport.TPM) (at NVKey, template []byte, err error) {
	for _, at = range i.keys {
		template, err = readNV(t, tpm2.TPMHandle(at.Template))
		if !errors.Is(err, tpm2.TPMRCHandle) {
			break
		}
	}
	return at, template, err
}

// quoteWith fills in the quote, its signature and the registers.
func (d *document) quoteWith(t transport.TPM, key tpm2.NamedHandle, userData []byte) error {
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
