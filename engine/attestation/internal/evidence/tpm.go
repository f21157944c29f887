package evidence

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"github.com/google/go-tpm/tpm2/transport/linuxtpm"
	"golang.org/x/sys/unix"
)

// tpmTimeout bounds one use of a TPM if the caller's context does not. A hardware
// TPM may take most of a second for a single command.
const tpmTimeout = 30 * time.Second

// lockPoll is the poll interval for the lock of the TPM; a quote takes a few milliseconds.
const lockPoll = 2 * time.Millisecond

// OpenTPM opens the TPM at address, "unix:" and the path of the socket of an emulator, or the
// path of a device such as /dev/tpmrm0.
//
// An emulator serves one client at a time and blocks others silently, so clients lock the file
// beside the socket whose name ends in ".lock": open, use, close quickly. ctx bounds the wait
// and all use of the result. The device /dev/tpmrm0 needs no lock; the kernel separates its
// users. Errors wrap ErrTPM.
func OpenTPM(ctx context.Context, address string) (transport.TPMCloser, error) {
	path, socket := strings.CutPrefix(address, "unix:")
	if !socket {
		if !filepath.IsAbs(address) {
			return nil, fmt.Errorf("%w: address %q is neither unix:PATH nor the path of a device", ErrTPM, address)
		}
		t, err := linuxtpm.Open(address)
		if err != nil {
			return nil, fmt.Errorf("%w: open %s: %w", ErrTPM, address, err)
		}
		return t, nil
	}
	lock, err := lockFile(ctx, path+".lock")
	if err != nil {
		return nil, fmt.Errorf("%w: wait for other users of %s: %w", ErrTPM, path, err)
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("%w: %w", ErrTPM, err)
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(tpmTimeout)
	}
	if err := conn.SetDeadline(deadline); err != nil {
		conn.Close()
		lock.Close()
		return nil, fmt.Errorf("%w: %w", ErrTPM, err)
	}
	e := &emulator{
		ctx:  ctx,
		conn: conn,
		lock: lock,
		stop: context.AfterFunc(ctx, func() { conn.Close() }),
	}
	if err := forget(e); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", ErrTPM, err), e.Close())
	}
	return e, nil
}

// forget flushes the objects and sessions of clients that died: an emulator has room for three
// of each, and no resource manager as a device has. The holder of the lock is the only user. A
// TPM that was not started yet has none, and neither has one that does not know the kind: simulated
// TPMs of older releases keep no sessions.
func forget(t transport.TPM) error {
	for _, kind := range []tpm2.TPMHT{tpm2.TPMHTTransient, tpm2.TPMHTHMACSession} { // the latter for sessions of all kinds
		got, err := tpm2.GetCapability{Capability: tpm2.TPMCapHandles, Property: uint32(kind) << 24, PropertyCount: 16}.Execute(t)
		if errors.Is(err, tpm2.TPMRCInitialize) {
			return nil
		}
		if errors.Is(err, tpm2.TPMRCValue) {
			continue
		}
		if err != nil {
			return fmt.Errorf("look for objects of dead clients: %w", err)
		}
		handles, err := got.CapabilityData.Data.Handles()
		if err != nil {
			return fmt.Errorf("look for objects of dead clients: %w", err)
		}
		for _, h := range handles.Handle {
			if _, err := (tpm2.FlushContext{FlushHandle: h}).Execute(t); err != nil {
				return fmt.Errorf("flush an object of a dead client: %w", err)
			}
		}
	}
	return nil
}

// emulator speaks to a TPM behind a unix socket: commands go in, responses come
// out, both with their length in the header.
type emulator struct {
	ctx  context.Context // the use's, so it ends with the value
	conn net.Conn
	lock *os.File
	stop func() bool
}

const (
	tpmHeader      = 10
	maxTPMResponse = 1 << 16
)

// sendAttempts is how often a command is sent that the TPM asks to send again;
// retryPause lies between two attempts. For a device the kernel does this.
const (
	sendAttempts = 100
	retryPause   = time.Millisecond
)

// Send implements transport.TPM.
func (e *emulator) Send(command []byte) ([]byte, error) {
	for attempt := 1; ; attempt++ {
		response, err := e.exchange(command)
		if err != nil || attempt == sendAttempts {
			return response, err
		}
		switch tpm2.TPMRC(binary.BigEndian.Uint32(response[6:])) {
		case tpm2.TPMRCRetry, tpm2.TPMRCYielded, tpm2.TPMRCTesting:
		default:
			return response, nil
		}
		select {
		case <-e.ctx.Done():
			return nil, context.Cause(e.ctx)
		case <-time.After(retryPause):
		}
	}
}

func (e *emulator) exchange(command []byte) ([]byte, error) {
	if _, err := e.conn.Write(command); err != nil {
		return nil, e.cause(err)
	}
	response := make([]byte, tpmHeader, 1024)
	if _, err := io.ReadFull(e.conn, response); err != nil {
		return nil, e.cause(err)
	}
	size := binary.BigEndian.Uint32(response[2:])
	if size < tpmHeader || size > maxTPMResponse {
		return nil, fmt.Errorf("response announces %d bytes", size)
	}
	response = append(response, make([]byte, size-tpmHeader)...)
	if _, err := io.ReadFull(e.conn, response[tpmHeader:]); err != nil {
		return nil, e.cause(err)
	}
	return response, nil
}

// cause prefers why the use ended to what that did to the socket.
func (e *emulator) cause(err error) error {
	if c := context.Cause(e.ctx); c != nil {
		return c
	}
	if errors.Is(err, os.ErrDeadlineExceeded) { // ctx's own timer is about to go off
		return context.DeadlineExceeded
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the emulator hung up")
	}
	return err
}

// Close implements io.Closer. The lock goes last, so that the next user finds the
// emulator free.
func (e *emulator) Close() error {
	e.stop()
	err := e.conn.Close()
	if errors.Is(err, net.ErrClosed) { // ctx ended first
		err = nil
	}
	return errors.Join(err, e.lock.Close())
}

// lockFile creates the file if need be and locks it for this user alone. Closing
// the file, or the end of the process, unlocks it. It is opened for reading only,
// which suffices for a lock and works where the folder is mounted read-only.
func lockFile(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if err != unix.EWOULDBLOCK && err != unix.EINTR {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		// The kernel's own wait cannot be cancelled.
		select {
		case <-ctx.Done():
			f.Close()
			return nil, context.Cause(ctx)
		case <-time.After(lockPoll):
		}
	}
}

// use opens the TPM, calls f, and closes it.
func use(ctx context.Context, address string, f func(transport.TPM) error) error {
	t, err := OpenTPM(ctx, address)
	if err != nil {
		return err
	}
	err = f(t)
	if cerr := t.Close(); err == nil && cerr != nil {
		err = cerr
	}
	if err != nil && !errors.Is(err, ErrTPM) {
		err = fmt.Errorf("%w: %w", ErrTPM, err)
	}
	return err
}

// startUp does what firmware does first. A TPM that already is started stays as
// it is.
func startUp(t transport.TPM) error {
	_, err := tpm2.Startup{StartupType: tpm2.TPMSUClear}.Execute(t)
	if err != nil && !errors.Is(err, tpm2.TPMRCInitialize) {
		return fmt.Errorf("start up: %w", err)
	}
	return nil
}

// selection names registers of the SHA-256 bank.
func selection(indices ...uint32) tpm2.TPMLPCRSelection {
	u := make([]uint, len(indices))
	for i, v := range indices {
		u[i] = uint(v)
	}
	return tpm2.TPMLPCRSelection{PCRSelections: []tpm2.TPMSPCRSelection{{
		Hash:      tpm2.TPMAlgSHA256,
		PCRSelect: tpm2.PCClientCompatible.PCRs(u...),
	}}}
}

// readPCRs reads registers of the SHA-256 bank. A TPM returns up to eight at once.
func readPCRs(t transport.TPM, indices []uint32) (map[uint32][]byte, error) {
	pcrs := make(map[uint32][]byte, len(indices))
	for len(pcrs) < len(indices) {
		var missing []uint32
		for _, i := range indices {
			if pcrs[i] == nil {
				missing = append(missing, i)
			}
		}
		r, err := tpm2.PCRRead{PCRSelectionIn: selection(missing...)}.Execute(t)
		if err != nil {
			return nil, fmt.Errorf("read PCRs: %w", err)
		}
		before := len(pcrs)
		values := r.PCRValues.Digests
		for _, s := range r.PCRSelectionOut.PCRSelections {
			for i := range uint32(8 * len(s.PCRSelect)) {
				if s.PCRSelect[i/8]&(1<<(i%8)) == 0 {
					continue
				}
				if len(values) == 0 || len(values[0].Buffer) != pcrSize {
					return nil, errors.New("read PCRs: the response is not about the SHA-256 bank")
				}
				pcrs[i] = values[0].Buffer
				values = values[1:]
			}
		}
		if len(pcrs) == before {
			return nil, fmt.Errorf("read PCRs: the TPM has no SHA-256 bank, or no PCR %d in it", missing[0])
		}
	}
	return pcrs, nil
}

func extendPCR(t transport.TPM, index uint32, digest []byte) error {
	_, err := tpm2.PCRExtend{
		PCRHandle: tpm2.AuthHandle{Handle: tpm2.TPMHandle(index), Auth: tpm2.PasswordAuth(nil)},
		Digests: tpm2.TPMLDigestValues{Digests: []tpm2.TPMTHA{{
			HashAlg: tpm2.TPMAlgSHA256,
			Digest:  digest,
		}}},
	}.Execute(t)
	if err != nil {
		return fmt.Errorf("extend PCR %d: %w", index, err)
	}
	return nil
}

// ReadPCRs reads SHA-256 registers, 0 to 23, of the TPM or the enrolled identity at
// address. Errors wrap ErrTPM.
func ReadPCRs(ctx context.Context, address string, indices ...uint32) (map[uint32][]byte, error) {
	for _, i := range indices {
		if i > lastPCR {
			return nil, fmt.Errorf("%w: PCR %d does not exist: registers are numbered 0 to %d", ErrTPM, i, lastPCR)
		}
	}
	var pcrs map[uint32][]byte
	address, dir, err := locate(address)
	if err != nil {
		return nil, err
	}
	if dir != "" {
		err := useMachine(dir, func(m machine) (err error) { pcrs, err = m.registers(indices); return err })
		return pcrs, err
	}
	err = use(ctx, address, func(t transport.TPM) (err error) {
		pcrs, err = readPCRs(t, indices)
		return err
	})
	return pcrs, err
}

// ExtendClusterID marks the machine as a member of the cluster until its TPM is
// reset: PCR 15 becomes ClusterIDPCR(clusterID). Repeating it changes nothing. On
// a member of another cluster the error wraps ErrMember, otherwise ErrTPM.
func ExtendClusterID(ctx context.Context, address string, clusterID []byte) error {
	if len(clusterID) == 0 {
		return errors.New("extend cluster ID: it is empty")
	}
	address, dir, err := locate(address)
	if err != nil {
		return err
	}
	var foreign error
	if dir != "" {
		err = useMachine(dir, func(m machine) (err error) { foreign, err = m.extend(clusterID); return err })
		return errors.Join(foreign, err)
	}
	err = use(ctx, address, func(t transport.TPM) error {
		pcrs, err := readPCRs(t, []uint32{pcrCluster})
		if err != nil {
			return err
		}
		if now := pcrs[pcrCluster]; !isZero(now) {
			foreign = PCR15ClusterID(clusterID).check(now) // nil if it is this cluster
			return nil
		}
		return extendPCR(t, pcrCluster, clusterIDDigest(clusterID))
	})
	return errors.Join(foreign, err)
}

// SoftwareMembership reports whether a file, instead of register 15 of a TPM, records
// the cluster that the machine belongs to. It survives reboots, and ClearClusterID
// removes it.
func SoftwareMembership(address string) bool {
	_, dir, err := locate(address)
	return dir != "" && err == nil
}

// ClearClusterID makes a machine with SoftwareMembership unused. It does nothing to
// others, whose TPM only a reset clears. Errors wrap ErrTPM.
func ClearClusterID(address string) error {
	_, dir, err := locate(address)
	if err != nil || dir == "" {
		return err
	}
	return useMachine(dir, machine.clear)
}

// EventLogPath returns where the event log of the TPM at address lies: beside the
// socket of an emulator under the name binary_bios_measurements, or where Linux
// shows that of a device.
func EventLogPath(address string) string {
	const name = "binary_bios_measurements"
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return filepath.Join(filepath.Dir(path), name)
	}
	return "/sys/kernel/security/tpm0/" + name
}

// readEventLog reads the log at path; without one it returns nothing.
func readEventLog(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read event log: %w", err)
	}
	defer f.Close()
	log, err := io.ReadAll(io.LimitReader(f, maxLog+1))
	if err != nil {
		return nil, fmt.Errorf("read event log: %w", err)
	}
	if len(log) > maxLog {
		return nil, fmt.Errorf("read event log: %s has more than %d bytes", path, maxLog)
	}
	return log, nil
}

// The certificate of the attestation key and the template it is made from lie in
// the TPM's own memory, where Google's cloud puts them, so that tools which know
// that cloud find them.
const (
	nvCertificate = tpm2.TPMHandle(0x01c10002)
	nvTemplate    = tpm2.TPMHandle(0x01c10003)
)

// nvChunk is how much is read or written at once, in bytes. Every TPM for a PC
// client can do that much.
const nvChunk = 512

// readNV reads all of an index with the index's own, empty, authorisation.
func readNV(t transport.TPM, index tpm2.TPMHandle) ([]byte, error) {
	pub, err := tpm2.NVReadPublic{NVIndex: index}.Execute(t)
	if err != nil {
		return nil, err
	}
	info, err := pub.NVPublic.Contents()
	if err != nil {
		return nil, err
	}
	if info.DataSize > maxCertificate {
		return nil, fmt.Errorf("it has %d bytes, at most %d are allowed", info.DataSize, maxCertificate)
	}
	out := make([]byte, 0, info.DataSize)
	for len(out) < int(info.DataSize) {
		r, err := tpm2.NVRead{
			AuthHandle: tpm2.AuthHandle{Handle: index, Name: pub.NVName, Auth: tpm2.PasswordAuth(nil)},
			NVIndex:    tpm2.NamedHandle{Handle: index, Name: pub.NVName},
			Size:       uint16(min(nvChunk, int(info.DataSize)-len(out))),
			Offset:     uint16(len(out)),
		}.Execute(t)
		if err != nil {
			return nil, err
		}
		if len(r.Data.Buffer) == 0 {
			return nil, errors.New("it ends early")
		}
		out = append(out, r.Data.Buffer...)
	}
	return out, nil
}

// primary recreates the attestation key from its template. The same template and the same TPM
// always give the same key.
func primary(t transport.TPM, template []byte) (handle tpm2.NamedHandle, public []byte, err error) {
	r, err := tpm2.CreatePrimary{
		PrimaryHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHEndorsement, Auth: tpm2.PasswordAuth(nil)},
		InPublic:      tpm2.BytesAs2B[tpm2.TPMTPublic](template),
	}.Execute(t)
	if err != nil {
		return tpm2.NamedHandle{}, nil, fmt.Errorf("create attestation key: %w", err)
	}
	return tpm2.NamedHandle{Handle: r.ObjectHandle, Name: r.Name}, r.OutPublic.Bytes(), nil
}

func flush(t transport.TPM, h tpm2.NamedHandle) error {
	if _, err := (tpm2.FlushContext{FlushHandle: h.Handle}).Execute(t); err != nil {
		return fmt.Errorf("flush object of the TPM: %w", err)
	}
	return nil
}
