// Package swtpm runs TPM emulators for tests.
package swtpm

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"constellation/internal/testneeds"
)

// Start runs a new TPM until the test ends and returns its address.
func Start(t testing.TB) (address string) {
	t.Helper()
	program := testneeds.Program(t, "swtpm", "swtpm")
	dir, err := os.MkdirTemp("", "tpm") // t.TempDir can be too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "tpm.sock")
	cmd := exec.CommandContext(t.Context(), program, "socket", "--tpm2", "--tpmstate", "dir="+dir, "--server", "type=unixio,path="+socket, "--flags", "not-need-init,startup-clear")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Wait() // the end of the test's context killed it
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		if c, err := new(net.Dialer).DialContext(t.Context(), "unix", socket); err == nil {
			_ = c.Close()
			return "unix:" + socket
		}
		if time.Now().After(deadline) {
			t.Fatal("swtpm does not listen")
		}
	}
}
