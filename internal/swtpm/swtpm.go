// Package swtpm runs TPM emulators for tests.
package swtpm

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"constellation/internal/testneeds"
)

// Start runs a new TPM until the test ends. It returns its address and a function that resets it as a power cycle
// does.
func Start(t testing.TB) (address string, reset func()) {
	t.Helper()
	return run(t, folder(t))
}

// StartOf is Start of a TPM that a vendor certified: the local authority of swtpm. Each folder has one, which is made on
// first use, with its certificates.
func StartOf(t testing.TB, vendor string) (address string) {
	t.Helper()
	dir := folder(t)
	certify(t, dir, vendor)
	address, _ = run(t, dir)
	return address
}

// StartForQEMU runs a new TPM until the test ends, which a vendor certified. It returns the control socket for QEMU, and the
// folder with the vendor's certificates.
func StartForQEMU(t testing.TB) (control, certificates string) {
	t.Helper()
	dir, vendor := folder(t), t.TempDir()
	certify(t, dir, vendor)
	certificates = t.TempDir()
	for _, name := range []string{"swtpm-localca-rootca-cert.pem", "issuercert.pem"} {
		b, err := os.ReadFile(filepath.Join(vendor, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(certificates, name), b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	control = filepath.Join(dir, "control.sock")
	program := testneeds.Program(t, "swtpm", "swtpm")
	cmd := exec.CommandContext(t.Context(), program, "socket", "--tpm2", "--tpmstate", "dir="+dir, "--ctrl", "type=unixio,path="+control, "--flags", "startup-clear")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Wait() // the end of the test's context killed it
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(2 * time.Millisecond) {
		if _, err := os.Stat(control); err == nil {
			return control, certificates
		} else if time.Now().After(deadline) {
			t.Fatalf("swtpm has no control socket: %v", err)
		}
	}
}

// certify makes the state of a TPM in dir, with a certificate of the authority in the folder vendor.
func certify(t testing.TB, dir, vendor string) {
	t.Helper()
	setup := testneeds.Program(t, "swtpm_setup", "swtpm-tools")
	issue := testneeds.Program(t, "swtpm_localca", "swtpm-tools")
	config := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(config, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	ca := file("ca.conf", fmt.Sprintf("statedir = %[1]s\nsigningkey = %[1]s/signkey.key\nissuercert = %[1]s/issuercert.pem\ncertserial = %[1]s/certserial\n", vendor))
	options := file("ca.options", "--platform-manufacturer Test\n--platform-version 1\n--platform-model Test\n")
	conf := file("setup.conf", fmt.Sprintf("create_certs_tool = %s\ncreate_certs_tool_config = %s\ncreate_certs_tool_options = %s\n", issue, ca, options))
	if out, err := exec.CommandContext(t.Context(), setup, "--tpm2", "--runas", strconv.Itoa(os.Geteuid()), "--tpmstate", dir, "--config", conf, "--create-ek-cert", "--pcr-banks", "sha256").CombinedOutput(); err != nil {
		t.Fatalf("swtpm_setup: %v\n%s", err, out)
	}
}

func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tpm") // t.TempDir can be too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// run runs the TPM whose state is in dir, and removes dir when the test ends.
func run(t testing.TB, dir string) (address string, reset func()) {
	t.Helper()
	program := testneeds.Program(t, "swtpm", "swtpm")
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
