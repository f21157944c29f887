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

// Start runs a new TPM until the test ends. It returns its address and a function that resets it as a power cycle
// does.
func Start(t testing.TB) (address string, reset func()) {
	t.Helper()
	program := testneeds.Program(t, "swtpm", "swtpm")
	dir, err := os.MkdirTemp("", "tpm") // t.TempDir can be too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "tpm.sock")
	var cmd *exec.Cmd
	start := func() {
		t.Helper()
		cmd = exec.CommandContext(t.Context(), program, "socket", "--tpm2", "--tpmstate", "dir="+dir, "--server", "type=unixio,path="+socket, "--flags", "not-need-init,startup-clear")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			c, err := new(net.Dialer).DialContext(t.Context(), "unix", socket)
			if err == nil {
				_ = c.Close()
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("swtpm does not answer: %v", err)
			}
		}
	}
	start()
	t.Cleanup(func() {
		_ = cmd.Wait() // the end of the test's context killed it
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return "unix:" + socket, func() {
		t.Helper()
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if err := os.Remove(socket); err != nil {
			t.Fatal(err)
		}
		start()
	}
}
