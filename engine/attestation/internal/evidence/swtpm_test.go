package evidence

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/internal/testneeds"
)

// startTPM runs a new TPM emulator for the test and returns its address and a
// function that resets it as a power cycle does.
func startTPM(t testing.TB) (address string, reset func()) {
	t.Helper()
	swtpm := testneeds.Program(t, "swtpm", "swtpm")
	dir, err := os.MkdirTemp("", "tpm") // t.TempDir can be too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "tpm.sock")
	var cmd *exec.Cmd
	start := func() {
		t.Helper()
		cmd = exec.Command(swtpm, "socket", "--tpm2", "--tpmstate", "dir="+dir,
			"--server", "type=unixio,path="+socket, "--flags", "not-need-init,startup-clear")
		out := &lines{}
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			c, err := net.Dial("unix", socket)
			if err == nil {
				c.Close()
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("swtpm does not answer: %v\n%s", err, out)
			}
		}
	}
	stop := func() {
		cmd.Process.Kill()
		cmd.Wait()
		os.Remove(socket)
	}
	start()
	t.Cleanup(func() {
		stop()
		os.RemoveAll(dir)
	})
	return "unix:" + socket, func() { t.Helper(); stop(); start() }
}

// lines collects the output of a process.
type lines struct{ b []byte }

func (l *lines) Write(p []byte) (int, error) { l.b = append(l.b, p...); return len(p), nil }
func (l *lines) String() string              { return string(l.b) }

func newCA(t testing.TB, name string) *CA {
	t.Helper()
	cert, key, err := CreateCA(name)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := ParseCA(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func worker(n int) Identity {
	return Identity{
		Name:       fmt.Sprintf("worker-%d", n),
		ProviderID: fmt.Sprintf("sandbox://demo/worker-%d", n),
		UID:        "demo",
		Group:      "sandboxes/demo/groups/workers",
		Role:       cloud.Worker,
		IP:         netip.AddrFrom4([4]byte{10, 42, 0, byte(n + 20)}),
	}
}

// boot is what the image of the tests measures.
func boot() []MeasuredEvent {
	d := func(s string) []byte { h := sha256.Sum256([]byte(s)); return h[:] }
	return []MeasuredEvent{
		{4, d("boot loader"), "boot loader"},
		{9, d("kernel"), "kernel"},
		{9, d("initrd"), "initrd"},
		{11, d("image v1.1.0"), "image v1.1.0"},
	}
}

// bootedTPM is a provisioned and measured TPM.
func bootedTPM(t testing.TB, ca *CA, id Identity) string {
	t.Helper()
	address, _ := startTPM(t)
	if err := Provision(context.Background(), address, ca, id); err != nil {
		t.Fatal(err)
	}
	if err := Measure(context.Background(), address, EventLogPath(address), boot()); err != nil {
		t.Fatal(err)
	}
	return address
}
