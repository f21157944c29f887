package simulated

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/attestation/authority"
	"constellation/engine/cloud"
)

// startTPM serves the TPM in dir and returns its address and a function that switches it off.
func startTPM(t *testing.T, dir string) (address string, off func()) {
	t.Helper()
	m, err := openTPM(filepath.Join(dir, "tpm.json"))
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "tpm.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- m.serve(l) }()
	return "unix:" + socket, func() {
		t.Helper()
		l.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestSimulatedTPMDoesWhatAMachineNeeds(t *testing.T) {
	ctx := t.Context()
	dir, err := os.MkdirTemp("", "tpm") // t.TempDir can be too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	cert, key, err := attestationtest.CreateCA("test")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := attestationtest.ParseCA(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	roots, err := attestation.ParseRoots(cert)
	if err != nil {
		t.Fatal(err)
	}
	id := attestation.Identity{
		Name: "worker-0", ProviderID: "sandbox://demo/worker-0", UID: "demo", Group: "sandboxes/demo/groups/workers",
		Role: cloud.Worker, IP: netip.MustParseAddr("127.64.0.2"),
	}
	image := sha256.Sum256([]byte("image"))
	events := []attestation.MeasuredEvent{{PCR: 11, Digest: image[:], Description: "image"}}
	expected := attestation.Enforced(attestation.PredictPCRs(events))
	boot := func(address string) {
		t.Helper()
		log := attestation.EventLogPath(address)
		os.Remove(log)
		if err := attestationtest.Measure(ctx, address, log, events); err != nil {
			t.Fatal(err)
		}
	}
	validate := func(address string, rule attestation.PCR15) error {
		t.Helper()
		doc, err := attestation.NewTPMIssuer(address).Issue(ctx, []byte("nonce"))
		if err != nil {
			t.Fatal(err)
		}
		st, err := attestation.NewTPMValidator(roots, expected, attestation.Options{PCR15: rule}).Validate(ctx, doc, []byte("nonce"))
		if err == nil && st.Identity != id {
			t.Errorf("identity %+v, want %+v", st.Identity, id)
		}
		return err
	}

	address, off := startTPM(t, dir)
	boot(address)
	if err := attestationtest.Provision(ctx, address, ca, id); err != nil {
		t.Fatal(err)
	}
	if err := attestationtest.HandOver(ctx, address); err != nil {
		t.Fatal(err)
	}
	if err := validate(address, attestation.PCR15Zero()); err != nil {
		t.Errorf("an unused machine: %v", err)
	}
	if err := attestationtest.Provision(ctx, address, ca, id); err == nil {
		t.Error("a machine that was handed over changed its certificate")
	}
	cluster := []byte("a cluster's ID, of 32 bytes.....")
	if err := attestation.ExtendClusterID(ctx, address, cluster); err != nil {
		t.Fatal(err)
	}
	if err := validate(address, attestation.PCR15Zero()); !errors.Is(err, attestation.ErrMember) {
		t.Errorf("a member that says it is unused: %v", err)
	}
	if err := validate(address, attestation.PCR15ClusterID(cluster)); err != nil {
		t.Errorf("a member: %v", err)
	}
	off()

	// A reset clears the registers and nothing else.
	address, off = startTPM(t, dir)
	defer off()
	boot(address)
	if err := validate(address, attestation.PCR15Zero()); err != nil {
		t.Errorf("after a reset: %v", err)
	}
	pcrs, err := attestation.ReadPCRs(ctx, address, 11, 15)
	if err != nil {
		t.Fatal(err)
	}
	if want := attestation.PredictPCRs(events)[11]; !bytes.Equal(pcrs[11], want) || !bytes.Equal(pcrs[15], make([]byte, 32)) {
		t.Errorf("registers 11 and 15 are %x and %x", pcrs[11], pcrs[15])
	}
}

// TestSimulatedTPMSealsAndActivates has what a control plane with a certifier, and an enrolled machine, need.
func TestSimulatedTPMSealsAndActivates(t *testing.T) {
	ctx := t.Context()
	start := func() (address string, extend func(pcr uint32)) {
		dir, err := os.MkdirTemp("", "tpm") // t.TempDir can be too long for a socket's name
		if err != nil {
			t.Fatal(err)
		}
		address, off := startTPM(t, dir)
		t.Cleanup(func() { off(); os.RemoveAll(dir) })
		extend = func(pcr uint32) {
			t.Helper()
			digest := sha256.Sum256([]byte("event"))
			if err := attestationtest.Measure(ctx, address, attestation.EventLogPath(address), []attestation.MeasuredEvent{{PCR: pcr, Digest: digest[:], Description: "event"}}); err != nil {
				t.Fatal(err)
			}
		}
		extend(4)
		return address, extend
	}
	address, extend := start()
	secret, cluster := []byte("a secret of more than one block of the cipher"), []byte("a cluster's ID, of 32 bytes.....")
	sealed, err := attestation.Seal(ctx, address, cluster, secret)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(address, why, want string) {
		t.Helper()
		if got, err := attestation.Unseal(ctx, address, sealed); !errors.Is(err, attestation.ErrSealed) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %q, %v, want %q", why, got, err, want)
		}
	}
	refused(address, "a machine that belongs to no cluster", "PCR 15")
	if err := attestation.ExtendClusterID(ctx, address, cluster); err != nil {
		t.Fatal(err)
	}
	for range 4 { // no session and no object is left behind
		if got, err := attestation.Unseal(ctx, address, sealed); err != nil || !bytes.Equal(got, secret) {
			t.Fatalf("a member: %q, %v", got, err)
		}
	}
	other, _ := start()
	if err := attestation.ExtendClusterID(ctx, other, cluster); err != nil {
		t.Fatal(err)
	}
	refused(other, "another machine", "this TPM did not seal it")
	extend(9)
	refused(address, "another kernel", "PCR 9")

	certPEM, keyPEM, err := authority.Create("test")
	if err != nil {
		t.Fatal(err)
	}
	a, err := authority.Parse(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	third, _ := start()
	id := attestation.Identity{
		Name: "worker-0", ProviderID: "enrolled://demo/worker-0", UID: "demo", Group: "workers", Role: cloud.Worker, IP: netip.MustParseAddr("127.64.0.2"),
	}
	if err := attestationtest.EnrolTPM(ctx, a, filepath.Join(t.TempDir(), "identity"), third, id); err != nil {
		t.Errorf("credential activation: %v", err)
	}
}

func TestSimulatedTPMRefusesWhatItCannot(t *testing.T) {
	m, err := openTPM(filepath.Join(t.TempDir(), "tpm.json"))
	if err != nil {
		t.Fatal(err)
	}
	code := func(tag uint16, cc uint32, body ...byte) rc {
		b := m.respond(tag, cc, body)
		return rc(uint32(b[6])<<24 | uint32(b[7])<<16 | uint32(b[8])<<8 | uint32(b[9]))
	}
	if got := code(tagNoSessions, ccPCRRead, 0, 0, 0, 0); got != rcInitialize {
		t.Errorf("a register read before the start: %v", got)
	}
	if got := code(tagNoSessions, ccStartup, 0, 0); got != 0 {
		t.Fatalf("start: %v", got)
	}
	for name, c := range map[string]struct {
		got, want rc
	}{
		"a command that is not simulated":      {code(tagNoSessions, 0x17b, 0, 8), rcCommandCode},
		"an extension without authorisation":   {code(tagNoSessions, ccPCRExtend, 0, 0, 0, 1), rcAuthMissing},
		"a selection that is cut off":          {code(tagNoSessions, ccPCRRead, 0, 0, 0, 1, 0), rcCommandSize},
		"another bank":                         {code(tagNoSessions, ccPCRRead, 0, 0, 0, 1, 0, 4, 3, 1, 0, 0), rcValue},
		"an index that is not there":           {code(tagNoSessions, ccNVReadPublic, 1, 0xc1, 0, 2), rcHandle},
		"an authorisation longer than its own": {code(tagSessions, ccPCRExtend, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff), rcCommandSize},
		"flushing nothing":                     {code(tagNoSessions, ccFlushContext, 0x80, 0, 0, 0), rcHandle},
	} {
		if c.got != c.want {
			t.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}
}
