package evidence

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// Provision prepares a new machine's TPM once, as a cloud does: it has the TPM at address
// create the attestation key, certifies with ca that the key belongs to the instance id, and
// stores certificate and template in the TPM's memory.
//
// Repeating it replaces the certificate; the key stays the same while the TPM keeps its state.
// It must precede HandOver in a boot. Errors wrap ErrTPM unless they are about id.
func Provision(ctx context.Context, address string, ca *CA, id Identity) error {
	if err := id.check(); err != nil {
		return fmt.Errorf("provision TPM of %q: %w", id.Name, err)
	}
	if err := use(ctx, address, func(t transport.TPM) error { return provision(t, ca, id) }); err != nil {
		return fmt.Errorf("provision TPM of %q: %w", id.Name, err)
	}
	return nil
}

func provision(t transport.TPM, ca *CA, id Identity) (err error) {
	if err := startUp(t); err != nil {
		return err
	}
	zero := make([]byte, 32)
	template := akPublic(zero, zero)
	key, public, err := primary(t, template)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, flush(t, key)) }()
	ak, err := parsePublic(public)
	if err != nil {
		return fmt.Errorf("read attestation key: %w", err)
	}
	pub, err := ak.ecdsa()
	if err != nil {
		return fmt.Errorf("read attestation key: %w", err)
	}
	cert, err := ca.certify(pub, oidAttestationKey(), id)
	if err != nil {
		return fmt.Errorf("certify attestation key: %w", err)
	}
	if err := writeNV(t, nvTemplate, template); err != nil {
		return fmt.Errorf("store template of the attestation key: %w", err)
	}
	if err := writeNV(t, nvCertificate, cert); err != nil {
		return fmt.Errorf("store certificate of the attestation key: %w", err)
	}
	return nil
}

// HandOver is the last step of firmware before an operating system runs: it disables the
// platform's authorization until the next reset of the TPM. From then on the machine can read
// the data of Provision, but neither change nor remove it. Repeating it changes nothing.
// Errors wrap ErrTPM.
func HandOver(ctx context.Context, address string) error {
	secret := make([]byte, sha256.Size)
	if _, err := rand.Read(secret); err != nil {
		return fmt.Errorf("hand TPM over: %w", err)
	}
	if err := use(ctx, address, func(t transport.TPM) error {
		_, err := tpm2.HierarchyChangeAuth{
			AuthHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHPlatform, Auth: tpm2.PasswordAuth(nil)},
			NewAuth:    tpm2.TPM2BAuth{Buffer: secret}, // never stored
		}.Execute(t)
		if errors.Is(err, tpm2.TPMRCBadAuth) { // it is gone already
			return nil
		}
		return err
	}); err != nil {
		return fmt.Errorf("hand TPM over: %w", err)
	}
	return nil
}

// writeNV replaces the index. It acts as the platform; see HandOver.
func writeNV(t transport.TPM, index tpm2.TPMHandle, data []byte) error {
	platform := tpm2.AuthHandle{Handle: tpm2.TPMRHPlatform, Auth: tpm2.PasswordAuth(nil)}
	if old, err := (tpm2.NVReadPublic{NVIndex: index}).Execute(t); err == nil {
		if _, err := (tpm2.NVUndefineSpace{
			AuthHandle: platform,
			NVIndex:    tpm2.NamedHandle{Handle: index, Name: old.NVName},
		}).Execute(t); err != nil {
			return err
		}
	} else if !errors.Is(err, tpm2.TPMRCHandle) {
		return err
	}
	if _, err := (tpm2.NVDefineSpace{
		AuthHandle: platform,
		PublicInfo: tpm2.New2B(tpm2.TPMSNVPublic{
			NVIndex: index,
			NameAlg: tpm2.TPMAlgSHA256,
			Attributes: tpm2.TPMANV{
				PPWrite:        true,
				PPRead:         true,
				OwnerRead:      true,
				AuthRead:       true,
				NoDA:           true,
				PlatformCreate: true,
				NT:             tpm2.TPMNTOrdinary,
			},
			DataSize: uint16(len(data)),
		}),
	}).Execute(t); err != nil {
		return err
	}
	for at := 0; at < len(data); at += nvChunk {
		// The first write changes an attribute, and with it the index's name.
		pub, err := tpm2.NVReadPublic{NVIndex: index}.Execute(t)
		if err != nil {
			return err
		}
		if _, err := (tpm2.NVWrite{
			AuthHandle: platform,
			NVIndex:    tpm2.NamedHandle{Handle: index, Name: pub.NVName},
			Data:       tpm2.TPM2BMaxNVBuffer{Buffer: data[at:min(at+nvChunk, len(data))]},
			Offset:     uint16(at),
		}).Execute(t); err != nil {
			return err
		}
	}
	return nil
}

// Measure performs the measurements of firmware and a boot loader at every boot: it extends
// the TPM at address with events, in order, and writes them to the event log at logPath, which
// EventLogPath names.
//
// After a reset of the TPM the log starts over. Called again in the same boot it continues. A
// TPM whose registers are neither fresh nor match the log was not reset since another boot,
// and is rejected. Errors wrap ErrTPM unless they are about an event.
func Measure(ctx context.Context, address, logPath string, events []MeasuredEvent) error {
	for _, e := range events {
		if err := e.check(); err != nil {
			return fmt.Errorf("measure boot: %w", err)
		}
	}
	log, err := readEventLog(logPath)
	if err != nil {
		return fmt.Errorf("measure boot: %w", err)
	}
	if err := use(ctx, address, func(t transport.TPM) error {
		var err error
		log, err = measure(t, log, events)
		return err
	}); err != nil {
		return fmt.Errorf("measure boot: %w", err)
	}
	if err := replaceFile(logPath, log); err != nil {
		return fmt.Errorf("write event log: %w", err)
	}
	return nil
}

// measure extends t and returns the log of the boot so far.
func measure(t transport.TPM, log []byte, events []MeasuredEvent) ([]byte, error) {
	if err := startUp(t); err != nil {
		return nil, err
	}
	indices := make([]uint32, pcrCluster)
	for i := range indices {
		indices[i] = uint32(i)
	}
	pcrs, err := readPCRs(t, indices)
	if err != nil {
		return nil, err
	}
	fresh := true
	for _, v := range pcrs {
		fresh = fresh && isZero(v)
	}
	if fresh {
		log = nil
	}
	if len(log) == 0 {
		log = newEventLog()
	}
	logged, err := replayLog(log)
	if err != nil {
		return nil, fmt.Errorf("event log: %w", err)
	}
	for _, i := range indices {
		want := logged[i]
		if want == nil {
			want = make([]byte, pcrSize)
		}
		if string(want) != string(pcrs[i]) {
			return nil, fmt.Errorf("%s is %x, but the event log adds up to %x: reset the TPM before the machine boots", pcrName(i), pcrs[i], want)
		}
	}
	for _, e := range events {
		if err := extendPCR(t, e.PCR, e.Digest); err != nil {
			return nil, err
		}
		log = appendEvent(log, e)
	}
	if len(log) > maxLog {
		return nil, fmt.Errorf("event log has %d bytes, at most %d are allowed", len(log), maxLog)
	}
	return log, nil
}

// replaceFile writes a file that everyone may read, whole or not at all.
func replaceFile(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails after the rename, as it should
	if _, err := f.Write(data); err != nil {
		f.Close()
		return err
	}
	if err := errors.Join(f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
