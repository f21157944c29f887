package evidence

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/go-tpm-tools/client"
	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"constellation/internal/swtpm"
)

// TestLifeOfATPM follows a machine from its making over membership and reboot to
// the end of its use.
func TestLifeOfATPM(t *testing.T) {
	ca := newCA(t, "cloud")
	address, reset := swtpm.Start(t)
	ctx, log, cluster := t.Context(), EventLogPath(address), []byte("0123456789abcdef0123456789abcdef")
	issuer := NewTPMIssuer(address)
	validate := func(r PCR15) (Statement, error) {
		t.Helper()
		d, err := issuer.Issue(ctx, nonce)
		if err != nil {
			t.Fatal(err)
		}
		return NewTPMValidator(ca.Roots(), images(), Options{PCR15: r}).Validate(ctx, d, nonce)
	}

	if _, err := issuer.Issue(ctx, nonce); !errors.Is(err, ErrTPM) || !strings.Contains(err.Error(), "was the TPM provisioned?") {
		t.Errorf("before it is provisioned: %v", err)
	}
	if err := Provision(ctx, address, ca, worker(0)); err != nil {
		t.Fatal(err)
	}
	if _, err := validate(PCR15Zero()); !errors.Is(err, ErrMeasurement) {
		t.Errorf("before it is measured: %v", err)
	}
	if err := Measure(ctx, address, log, boot()[:2]); err != nil {
		t.Fatal(err)
	}
	if err := Measure(ctx, address, log, boot()[2:]); err != nil {
		t.Fatalf("measuring goes on: %v", err)
	}
	st, err := validate(PCR15Zero())
	if err != nil {
		t.Fatalf("fresh: %v", err)
	}
	if st.Identity != worker(0) || st.Resets == 0 || st.Firmware == 0 {
		t.Errorf("fresh: it states %+v", st)
	}
	pcrs, err := ReadPCRs(ctx, address, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(pcrs, st.PCRs); d != "" {
		t.Errorf("registers in the TPM and in the statement differ:\n%s", d)
	}

	for range 2 { // repeating it changes nothing
		if err := ExtendClusterID(ctx, address, cluster); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := validate(PCR15ClusterID(cluster)); err != nil {
		t.Errorf("member: %v", err)
	}
	if _, err := validate(PCR15Zero()); !errors.Is(err, ErrMember) {
		t.Errorf("a member that starts over: %v", err)
	}
	if err := ExtendClusterID(ctx, address, []byte("another")); !errors.Is(err, ErrMember) || errors.Is(err, ErrTPM) {
		t.Errorf("a member of another cluster: %v", err)
	}
	if _, err := validate(PCR15ClusterID(cluster)); err != nil {
		t.Errorf("a member after an attempt to take it over: %v", err)
	}

	// A reboot: the firmware measures again, and the member extends PCR 15 again.
	reset()
	if err := Measure(ctx, address, log, boot()); err != nil {
		t.Fatal(err)
	}
	again, err := validate(PCR15Zero())
	if err != nil {
		t.Fatalf("rebooted: %v", err)
	}
	if again.Resets != st.Resets+1 {
		t.Errorf("rebooted: %d resets, want %d", again.Resets, st.Resets+1)
	}
	if err := ExtendClusterID(ctx, address, cluster); err != nil {
		t.Fatal(err)
	}
	if _, err := validate(PCR15ClusterID(cluster)); err != nil {
		t.Errorf("rebooted member: %v", err)
	}
	// A warm restart of the machine that forgets to reset the TPM.
	if err := Measure(ctx, address, log, boot()); err != nil {
		t.Errorf("measuring goes on where the log stopped: %v", err)
	}
	if _, err := validate(PCR15ClusterID(cluster)); !errors.Is(err, ErrMeasurement) {
		t.Errorf("measured twice: %v", err)
	}
	if err := os.Remove(log); err != nil {
		t.Fatal(err)
	}
	if err := Measure(ctx, address, log, boot()); !errors.Is(err, ErrTPM) || !strings.Contains(err.Error(), "reset the TPM before the machine boots") {
		t.Errorf("measuring a TPM that was not reset: %v", err)
	}
}

func TestProvisionAgain(t *testing.T) {
	ca, ctx := newCA(t, "cloud"), t.Context()
	address := bootedTPM(t, ca, worker(0))
	key := func() []byte {
		t.Helper()
		d, err := NewTPMIssuer(address).Issue(ctx, nonce)
		if err != nil {
			t.Fatal(err)
		}
		p, err := parseDocument(d)
		if err != nil {
			t.Fatal(err)
		}
		st, err := NewTPMValidator(ca.Roots(), images(), Options{}).Validate(ctx, d, nonce)
		if err != nil {
			t.Fatal(err)
		}
		return append(p.public, st.Identity.Name...)
	}
	before := key()
	id := worker(1)
	id.ProviderID = "gce://project/europe-west3-b/" + strings.Repeat("x", 200) // more than a chunk
	id.IP = netip.MustParseAddr("fd00::1")
	if err := Provision(ctx, address, ca, id); err != nil {
		t.Fatal(err)
	}
	after := key()
	if n := len(before) - len("worker-0"); !bytes.Equal(before[:n], after[:n]) {
		t.Error("the key changed")
	}
	if !bytes.HasSuffix(after, []byte("worker-1")) {
		t.Error("the certificate did not change")
	}
	bad := worker(1)
	bad.Role = "master"
	if err := Provision(ctx, address, ca, bad); err == nil || errors.Is(err, ErrTPM) {
		t.Errorf("an impossible identity: %v", err)
	}
}

// TestGoogleToolsFindTheKey looks for the attestation key as go-tpm-tools does on
// Google's cloud.
func TestGoogleToolsFindTheKey(t *testing.T) {
	ca := newCA(t, "cloud")
	address := bootedTPM(t, ca, worker(0))
	conn, err := net.Dial("unix", strings.TrimPrefix(address, "unix:")) // go-tpm's old API wants a bare stream
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ak, err := client.GceAttestationKeyECC(conn)
	if err != nil {
		t.Fatal(err)
	}
	defer ak.Close()
	cert := ak.Cert()
	if cert == nil {
		t.Fatal("the key has no certificate")
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: ca.Roots(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		t.Error(err)
	}
	if _, id, err := verifyKey(cert.Raw, oidAttestationKey(), ca.Roots(), time.Now()); err != nil || id != worker(0) {
		t.Errorf("it names %v, %v", id, err)
	}
}

// TestMachineCannotChangeItsCertificate tries as everyone that an operating system
// can be.
func TestMachineCannotChangeItsCertificate(t *testing.T) {
	address, reset := swtpm.Start(t)
	ca, ctx := newCA(t, "cloud"), t.Context()
	if err := Provision(ctx, address, ca, worker(0)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := HandOver(ctx, address); err != nil {
			t.Fatal(err)
		}
	}
	tpm, err := OpenTPM(ctx, address)
	if err != nil {
		t.Fatal(err)
	}
	pub, err := tpm2.NVReadPublic{NVIndex: nvCertificate}.Execute(tpm)
	if err != nil {
		t.Fatal(err)
	}
	index := tpm2.NamedHandle{Handle: nvCertificate, Name: pub.NVName}
	for name, as := range map[string]tpm2.AuthHandle{
		"owner":    {Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)},
		"platform": {Handle: tpm2.TPMRHPlatform, Auth: tpm2.PasswordAuth(nil)},
		"index":    {Handle: nvCertificate, Name: pub.NVName, Auth: tpm2.PasswordAuth(nil)},
	} {
		if _, err := (tpm2.NVWrite{AuthHandle: as, NVIndex: index, Data: tpm2.TPM2BMaxNVBuffer{Buffer: []byte("x")}}).Execute(tpm); err == nil {
			t.Errorf("the %s may write it", name)
		}
		if _, err := (tpm2.NVUndefineSpace{AuthHandle: as, NVIndex: index}).Execute(tpm); err == nil {
			t.Errorf("the %s may remove it", name)
		}
	}
	for _, i := range []uint32{4, 15} {
		if _, err := (tpm2.PCRReset{PCRHandle: tpm2.AuthHandle{Handle: tpm2.TPMHandle(i), Auth: tpm2.PasswordAuth(nil)}}).Execute(tpm); err == nil {
			t.Errorf("software may reset PCR %d", i)
		}
	}
	if _, err := (tpm2.Startup{StartupType: tpm2.TPMSUClear}).Execute(tpm); err == nil {
		t.Error("software may start the TPM up again")
	}
	if err := tpm.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Provision(ctx, address, ca, worker(1)); !errors.Is(err, ErrTPM) {
		t.Errorf("provisioned after it was handed over: %v", err)
	}
	reset()
	if err := Provision(ctx, address, ca, worker(1)); err != nil {
		t.Errorf("provisioned after a reset: %v", err)
	}
}

// TestAnyKeyOfTheTPMIsNotEnough quotes with a key of the right TPM that the cloud
// did not certify, and with the right certificate.
func TestAnyKeyOfTheTPMIsNotEnough(t *testing.T) {
	ca := newCA(t, "cloud")
	address := bootedTPM(t, ca, worker(0))
	tpm, err := OpenTPM(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	defer tpm.Close()
	var d document
	if err := NewTPMIssuer("").quote(tpm, &d, nonce); err != nil {
		t.Fatal(err)
	}
	own := d.certificate
	template := akPublic(make([]byte, 32), append(make([]byte, 31), 1))
	key, public, err := primary(tpm, template)
	if err != nil {
		t.Fatal(err)
	}
	defer flush(tpm, key)
	r, err := tpm2.Quote{
		SignHandle:     tpm2.AuthHandle{Handle: key.Handle, Name: key.Name, Auth: tpm2.PasswordAuth(nil)},
		QualifyingData: tpm2.TPM2BData{Buffer: nonce},
		InScheme:       tpm2.TPMTSigScheme{Scheme: tpm2.TPMAlgNull},
		PCRSelect:      selection(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
	}.Execute(tpm)
	if err != nil {
		t.Fatal(err)
	}
	d.quote, d.signature, d.public, d.certificate = r.Quoted.Bytes(), tpm2.Marshal(r.Signature), public, own
	raw, err := d.marshal()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewTPMValidator(ca.Roots(), images(), Options{}).Validate(t.Context(), raw, nonce); !errors.Is(err, ErrTrust) {
		t.Errorf("got %v, want %v", err, ErrTrust)
	}
}

// meddler extends a register just before each of the first quotes.
type meddler struct {
	transport.TPM
	times, quotes int
}

func (m *meddler) Send(command []byte) ([]byte, error) {
	if tpm2.TPMCC(binary.BigEndian.Uint32(command[6:])) == tpm2.TPMCCQuote {
		m.quotes++
		if m.times > 0 {
			m.times--
			if err := extendPCR(m.TPM, 8, digest("meddling")); err != nil {
				return nil, err
			}
		}
	}
	return m.TPM.Send(command)
}

func TestQuoteWhileRegistersChange(t *testing.T) {
	ca := newCA(t, "cloud")
	tpm, err := OpenTPM(t.Context(), bootedTPM(t, ca, worker(0)))
	if err != nil {
		t.Fatal(err)
	}
	defer tpm.Close()
	m := &meddler{TPM: tpm, times: quoteAttempts - 1}
	var d document
	if err := NewTPMIssuer("").quote(m, &d, nonce); err != nil {
		t.Fatal(err)
	}
	if m.quotes != quoteAttempts {
		t.Errorf("%d quotes were made, want %d", m.quotes, quoteAttempts)
	}
	b, err := d.marshal()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewTPMValidator(ca.Roots(), images(), Options{}).Validate(t.Context(), b, nonce); err != nil {
		t.Error(err)
	}
	m.times = quoteAttempts
	if err := NewTPMIssuer("").quote(m, &d, nonce); err == nil || !strings.Contains(err.Error(), "changed during each of 3 attempts") {
		t.Errorf("got %v", err)
	}
}

func TestManyIssuersShareATPM(t *testing.T) {
	ca := newCA(t, "cloud")
	address := bootedTPM(t, ca, worker(0))
	v := NewTPMValidator(ca.Roots(), images(), Options{})
	var wg sync.WaitGroup
	for n := range byte(20) {
		issuer := NewTPMIssuer(address) // as another process has it
		wg.Go(func() {
			data := sha256.Sum256([]byte{n})
			d, err := issuer.Issue(context.Background(), data[:])
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := v.Validate(context.Background(), d, data[:]); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// No key was left behind: a TPM has room for three.
	tpm, err := OpenTPM(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	defer tpm.Close()
	r, err := tpm2.GetCapability{Capability: tpm2.TPMCapHandles, Property: 0x80000000, PropertyCount: 10}.Execute(tpm)
	if err != nil {
		t.Fatal(err)
	}
	if h, err := r.CapabilityData.Data.Handles(); err != nil || len(h.Handle) > 0 {
		t.Errorf("keys are left in the TPM: %v, %v", h, err)
	}
}

func TestTPMThatCannotBeUsed(t *testing.T) {
	silent, err := os.MkdirTemp("", "tpm")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(silent)
	regular := filepath.Join(silent, "file")
	if err := os.WriteFile(regular, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(silent, "tpm.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer l.Close()
	taken := make(chan net.Conn, 10)
	wg.Go(func() { // takes everyone in and says nothing
		for {
			c, err := l.Accept()
			if err != nil {
				close(taken)
				return
			}
			taken <- c
		}
	})
	defer func() {
		l.Close()
		for c := range taken {
			c.Close()
		}
	}()
	for _, tt := range []struct {
		name, address, text string
	}{
		{name: "no socket", address: "unix:" + filepath.Join(silent, "none"), text: "no such file"},
		{name: "no folder", address: "unix:/nonexistent/tpm.sock", text: "no such file"},
		{name: "a file that is no device", address: regular, text: "not a device"},
		{name: "an address of another kind", address: "tcp:127.0.0.1:2321", text: "neither unix:PATH nor the path of a device"},
		{name: "no address", address: "", text: "neither unix:PATH"},
		{name: "a TPM that says nothing", address: "unix:" + socket, text: "deadline exceeded"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := NewTPMIssuer(tt.address).Issue(ctx, nonce)
			if !errors.Is(err, ErrTPM) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %v with %q", err, ErrTPM, tt.text)
			}
		})
	}
	t.Run("a TPM that another process does not give back", func(t *testing.T) {
		holder, err := lockFile(t.Context(), socket+".lock") // as OpenTPM does first
		if err != nil {
			t.Fatal(err)
		}
		defer holder.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := ReadPCRs(ctx, "unix:"+socket, 4); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "wait for other users") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a register that does not exist", func(t *testing.T) {
		if _, err := ReadPCRs(t.Context(), "unix:"+socket, 24); !errors.Is(err, ErrTPM) {
			t.Errorf("got %v", err)
		}
	})
	for _, tt := range []struct {
		name, text string
		event      MeasuredEvent
	}{
		{name: "an event for the register of the cluster ID", text: "PCR 15 is not for measuring a boot", event: MeasuredEvent{15, digest("x"), "x"}},
		{name: "an event for a register that is not quoted", text: "PCR 16 is not for measuring a boot", event: MeasuredEvent{16, digest("x"), "x"}},
		{name: "an event of SHA-1", text: `digest of "x" has 20 bytes`, event: MeasuredEvent{4, make([]byte, 20), "x"}},
		{name: "an event with a novel", text: "description of an event of PCR 4 has 1025 bytes", event: MeasuredEvent{4, digest("x"), strings.Repeat("x", 1025)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := Measure(t.Context(), "unix:"+socket, filepath.Join(silent, "log"), []MeasuredEvent{tt.event})
			if err == nil || errors.Is(err, ErrTPM) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
			if _, err := NewSoftwareIssuer(newCA(t, "cloud"), worker(0), []MeasuredEvent{tt.event}, nil); err == nil {
				t.Error("the simulation takes it")
			}
		})
	}
	t.Run("an event log that is too long", func(t *testing.T) {
		log := filepath.Join(silent, "binary_bios_measurements")
		if err := os.WriteFile(log, make([]byte, maxLog+1), 0o600); err != nil {
			t.Fatal(err)
		}
		defer os.Remove(log)
		if _, err := NewTPMIssuer("unix:"+socket).Issue(t.Context(), nonce); err == nil || !strings.Contains(err.Error(), "has more than") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("an empty cluster ID", func(t *testing.T) {
		if err := ExtendClusterID(t.Context(), "unix:"+socket, nil); err == nil {
			t.Error("no error")
		}
	})
}

// emulatorScript answers commands with prepared responses.
func emulatorScript(t *testing.T, responses ...[]byte) (address string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "tpm")
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "tpm.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		buf := make([]byte, 4096)
		for _, r := range responses {
			if _, err := c.Read(buf); err != nil {
				return
			}
			c.Write(r)
		}
	}()
	t.Cleanup(func() { l.Close(); <-done; os.RemoveAll(dir) })
	return "unix:" + socket
}

func TestInvalidResponses(t *testing.T) {
	header := func(size uint32, rc uint32) []byte {
		return []byte{0x80, 1, byte(size >> 24), byte(size >> 16), byte(size >> 8), byte(size), byte(rc >> 24), byte(rc >> 16), byte(rc >> 8), byte(rc)}
	}
	for _, tt := range []struct {
		name      string
		responses [][]byte
		text      string
	}{
		{name: "the emulator hangs up", text: ""},
		{name: "a response is cut off", responses: [][]byte{{0x80, 1, 0}}, text: "hung up"},
		{name: "a response announces 4 GB", responses: [][]byte{header(0xffffffff, 0)}, text: "announces 4294967295 bytes"},
		{name: "a response announces less than its header", responses: [][]byte{header(3, 0)}, text: "announces 3 bytes"},
		{name: "a response is without content", responses: [][]byte{header(10, 0)}, text: ""},
		{name: "an error of the TPM", responses: [][]byte{header(10, 0x101)}, text: "TPM_RC_FAILURE"},
		{name: "a TPM that wants a retry and then fails", responses: [][]byte{header(10, 0x922), header(10, 0x908), header(10, 0x101)}, text: "TPM_RC_FAILURE"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ReadPCRs(t.Context(), emulatorScript(t, tt.responses...), 4)
			if !errors.Is(err, ErrTPM) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %v with %q", err, ErrTPM, tt.text)
			}
		})
	}
}

func TestSoftwareIssuerMakesTheSameDocument(t *testing.T) {
	ca, ctx := newCA(t, "cloud"), t.Context()
	address := bootedTPM(t, ca, worker(0))
	hard, err := NewTPMIssuer(address).Issue(ctx, nonce)
	if err != nil {
		t.Fatal(err)
	}
	si, err := NewSoftwareIssuer(ca, worker(0), boot(), nil)
	if err != nil {
		t.Fatal(err)
	}
	soft, err := si.Issue(ctx, nonce)
	if err != nil {
		t.Fatal(err)
	}
	v := NewTPMValidator(ca.Roots(), images(), Options{})
	want, err := v.Validate(ctx, hard, nonce)
	if err != nil {
		t.Fatal(err)
	}
	got, err := v.Validate(ctx, soft, nonce)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}), cmpopts.IgnoreFields(Statement{}, "Firmware")); d != "" {
		t.Errorf("statements (-TPM +software):\n%s", d)
	}
	h, s := must(parseDocument(hard))(t), must(parseDocument(soft))(t)
	if !bytes.Equal(h.log, s.log) || len(h.public) != len(s.public) || len(h.quote) != len(s.quote) {
		t.Errorf("documents differ in shape: log %d and %d bytes, public %d and %d, quote %d and %d",
			len(h.log), len(s.log), len(h.public), len(s.public), len(h.quote), len(s.quote))
	}
	for _, data := range [][]byte{nil, make([]byte, 33)} {
		if _, err := si.Issue(ctx, data); err == nil {
			t.Errorf("software bound %d bytes", len(data))
		}
		if _, err := NewTPMIssuer(address).Issue(ctx, data); err == nil {
			t.Errorf("the TPM bound %d bytes", len(data))
		}
	}
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestDeadClientsLeaveRoomInTheTPM(t *testing.T) {
	ca := newCA(t, "cloud")
	address := bootedTPM(t, ca, worker(1))
	for range 8 { // an emulator has room for three keys, and for three sessions
		c, err := OpenTPM(t.Context(), address)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := primary(c, akPublic(make([]byte, 32), make([]byte, 32))); err != nil {
			t.Fatal(err)
		}
		if _, _, err := tpm2.PolicySession(c, tpm2.TPMAlgSHA256, 16); err != nil {
			t.Fatal(err)
		}
		if err := c.Close(); err != nil { // without flushing, as the kernel does it for the dead
			t.Fatal(err)
		}
	}
	if _, err := NewTPMIssuer(address).Issue(t.Context(), []byte("nonce")); err != nil {
		t.Errorf("quote after eight clients died: %v", err)
	}
}

func TestLossesOfPowerDoNotLockTheTPM(t *testing.T) {
	address, reset := swtpm.Start(t)
	ca := newCA(t, "cloud")
	if err := Provision(t.Context(), address, ca, worker(1)); err != nil {
		t.Fatal(err)
	}
	for i := range 40 { // a TPM locks itself after 32 wrong guesses at the most
		if _, err := NewTPMIssuer(address).Issue(t.Context(), []byte("nonce")); err != nil {
			t.Fatalf("quote after %d losses of power: %v", i, err)
		}
		reset()
	}
}

// TestKeptKey is what an issuer keeps between quotes, and when it must not.
func TestKeptKey(t *testing.T) {
	ca, ctx := newCA(t, "cloud"), t.Context()
	address, reset := swtpm.Start(t)
	prepare := func(id Identity) {
		t.Helper()
		if err := errors.Join(Provision(ctx, address, ca, id), Measure(ctx, address, EventLogPath(address), boot())); err != nil {
			t.Fatal(err)
		}
	}
	prepare(worker(0))
	issuer := NewTPMIssuer(address)
	v := NewTPMValidator(ca.Roots(), images(), Options{})
	states := func(want Identity) Statement {
		t.Helper()
		d, err := issuer.Issue(ctx, nonce)
		if err != nil {
			t.Fatal(err)
		}
		st, err := v.Validate(ctx, d, nonce)
		if err != nil || st.Identity != want {
			t.Fatalf("it states %+v, %v, want %+v", st.Identity, err, want)
		}
		return st
	}
	states(worker(0))
	first := issuer.kept
	if first == nil {
		t.Fatal("nothing is kept")
	}
	states(worker(0))
	if issuer.kept != first {
		t.Error("the second quote created the key again")
	}

	before := states(worker(0))
	reset()
	if err := errors.Join(os.Remove(EventLogPath(address)), Measure(ctx, address, EventLogPath(address), boot())); err != nil {
		t.Fatal(err)
	}
	if after := states(worker(0)); after.Resets == before.Resets {
		t.Errorf("the quote after a reset is of before: %d resets", after.Resets)
	}
	if issuer.kept == first {
		t.Error("a key of before the reset is used")
	}

	// Another TPM at the same address: the old key is worthless there.
	path := strings.TrimPrefix(address, "unix:")
	state := filepath.Join(filepath.Dir(path), "tpm2-00.permall")
	second := issuer.kept
	if err := errors.Join(os.Remove(state), os.Remove(EventLogPath(address))); err != nil {
		t.Fatal(err)
	}
	reset()
	prepare(worker(1))
	states(worker(1))
	if issuer.kept == second {
		t.Error("the key of another TPM is used")
	}

	third := issuer.kept
	third.made = third.made.Add(-keepKey)
	states(worker(1))
	if issuer.kept == third {
		t.Error("a key is kept for longer than it may be")
	}
}

// TestQuotesLeaveTheTPMToOthers makes quotes without a pause, as a flood of
// handshakes does, while a claim needs the TPM.
func TestQuotesLeaveTheTPMToOthers(t *testing.T) {
	address := bootedTPM(t, newCA(t, "cloud"), worker(0))
	ctx, stop := context.WithCancel(t.Context())
	issuer := NewTPMIssuer(address)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if _, err := issuer.Issue(ctx, nonce); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	defer wg.Wait()
	defer stop()
	for range 10 {
		limited, cancel := context.WithTimeout(ctx, 2*time.Second)
		if err := ExtendClusterID(limited, address, []byte("cluster")); err != nil {
			t.Errorf("the claim waits for the quotes of strangers: %v", err)
		}
		cancel()
	}
}

// olderTPM answers as the simulated TPMs of older releases, which list transient objects alone.
type olderTPM struct{ refused int }

func (o *olderTPM) Send(command []byte) ([]byte, error) {
	if kind := command[14]; tpm2.TPMHT(kind) != tpm2.TPMHTTransient {
		o.refused++
		return []byte{0x80, 1, 0, 0, 0, 10, 0, 0, 1, 0xc4}, nil // TPM_RC_VALUE of the first parameter
	}
	return []byte{0x80, 1, 0, 0, 0, 19, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0}, nil // there are none, and no more
}

// TestTPMsOfOlderReleasesAreUsable opens a TPM that knows no sessions.
func TestTPMsOfOlderReleasesAreUsable(t *testing.T) {
	o := &olderTPM{}
	if err := forget(o); err != nil || o.refused != 1 {
		t.Errorf("got %v after %d refusals, want none after 1", err, o.refused)
	}
}
