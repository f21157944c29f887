package enrol

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/authority"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/internal/swtpm"
)

// identityMachine runs the verbs of `bootstrapper identity` in this process, on a folder of its own.
type identityMachine struct {
	dir   string
	calls []string
	cut   string // the verb whose answer is lost
	noise string // of a startup file of the shell
	errs  string // on stderr
}

func (m *identityMachine) Target() sshhost.Target {
	return sshhost.Target{User: "root", Host: "10.0.0.11"}
}

func (m *identityMachine) Upload(context.Context, string, fs.FileMode, int64, io.Reader) error {
	return errors.New("nothing is uploaded")
}

func (m *identityMachine) Run(ctx context.Context, c sshhost.Command) (sshhost.Result, error) {
	verb, tpm := c.Argv[len(c.Argv)-1], attestation.NoTPM
	if n := slices.Index(c.Argv, "-tpm"); n >= 0 {
		verb, tpm = c.Argv[n-1], c.Argv[n+1]
	}
	m.calls = append(m.calls, verb)
	in, err := io.ReadAll(c.Stdin)
	if err != nil {
		return sshhost.Result{}, err
	}
	var out []byte
	switch verb {
	case "request":
		out, _, err = attestation.RequestIdentity(ctx, m.dir, tpm)
	case "answer":
		out, err = attestation.AnswerIdentity(ctx, m.dir, in)
	case "store":
		var id attestation.EnrolledIdentity
		if id, err = attestation.StoreIdentity(ctx, m.dir, in); err == nil {
			out, err = json.Marshal(id)
		}
	default:
		err = errors.New("unknown verb " + verb)
	}
	if err != nil {
		return sshhost.Result{Exit: 1, Stderr: []byte(err.Error())}, nil
	}
	if verb == m.cut {
		return sshhost.Result{}, sshhost.ErrLost
	}
	return sshhost.Result{Stdout: append([]byte(m.noise), out...), Stderr: []byte(m.errs)}, nil
}

// TestIdentify loses the answer of each verb once. The next run certifies the same key.
func TestIdentify(t *testing.T) {
	t.Parallel()
	cert, key, err := authority.Create("test")
	if err != nil {
		t.Fatal(err)
	}
	a, err := authority.Parse(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	id := attestation.Identity{Name: "worker-1", ProviderID: "machines://u/worker-1", UID: "u", Group: "machines://u/worker", Role: "worker", IP: netip.MustParseAddr("10.0.0.11")}
	for _, cut := range []string{"", "request", "answer", "store"} {
		m := &identityMachine{dir: filepath.Join(t.TempDir(), "identity"), cut: cut}
		if _, err := Identify(t.Context(), m, Job{Authority: a, Identity: id}); (cut != "") != errors.Is(err, sshhost.ErrLost) {
			t.Errorf("cut at %q: %v", cut, err)
		}
		m.cut, m.noise = "", "Welcome!\n"
		if _, err := Identify(t.Context(), m, Job{Authority: a, Identity: id}); err != nil {
			t.Errorf("after a cut at %q: %v", cut, err)
		}
	}
	broken := &identityMachine{dir: filepath.Join(t.TempDir(), "identity"), noise: "{\x1b[2J"}
	if _, err := Identify(t.Context(), broken, Job{Authority: a, Identity: id}); err == nil || plan.Remedy(err) == "" || bytes.ContainsRune([]byte(err.Error()), 0x1b) || strings.Join(broken.calls, " ") != "request" {
		t.Errorf("a malformed request: %v after %q", err, broken.calls)
	}
}

// TestIdentifyVerifiesVendors has a TPM that the authority of swtpm certified, as vendors do, and others.
func TestIdentifyVerifiesVendors(t *testing.T) {
	t.Parallel()
	vendor := t.TempDir()
	certified := swtpm.StartOf(t, vendor)
	bare, _ := swtpm.Start(t)
	folder := func(files map[string]string) string {
		t.Helper()
		dir := t.TempDir()
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	read := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(vendor, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	cert, key, err := authority.Create("test")
	if err != nil {
		t.Fatal(err)
	}
	a, err := authority.Parse(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	der, _ := pem.Decode(cert)
	roots := func(files map[string]string) *x509.CertPool {
		t.Helper()
		p, err := VendorRoots(folder(files))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	ours := roots(map[string]string{"root.pem": read("swtpm-localca-rootca-cert.pem"), "issuer.crt": read("issuercert.pem"), "notes.txt": "of 2026"})
	theirs := roots(map[string]string{"other.der": string(der.Bytes)})
	id := attestation.Identity{Name: "worker-1", ProviderID: "machines://u/worker-1", UID: "u", Group: "machines://u/worker", Role: "worker", IP: netip.MustParseAddr("10.0.0.11")}
	for _, tt := range []struct {
		name, tpm, want string
		roots           *x509.CertPool
	}{
		{name: "the vendor", tpm: certified, roots: ours},
		{name: "another vendor", tpm: certified, roots: theirs, want: "none of the given vendors certified this TPM"},
		{name: "no vendor", tpm: bare, roots: ours, want: "its TPM has no certificate of its vendor"},
		{name: "no TPM", tpm: attestation.NoTPM, roots: ours, want: "its key is in a file"},
	} {
		a.EKRoots = tt.roots
		m := &identityMachine{dir: filepath.Join(t.TempDir(), "identity")}
		k, err := Identify(t.Context(), m, Job{Authority: a, Identity: id, TPM: tt.tpm})
		if tt.want == "" {
			if err != nil || !strings.Contains(k.Vendor, "swtpm-localca") {
				t.Errorf("%s: %+v, %v", tt.name, k, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(plan.Remedy(err), "--tpm-roots") || slices.Contains(m.calls, "store") {
			t.Errorf("%s: %v (%s) after %q", tt.name, err, plan.Remedy(err), m.calls)
		}
	}
	for _, files := range []map[string]string{{}, {"a.pem": "no certificate"}, {"a.crt": ""}, {"key.pem": string(key)}} {
		if _, err := VendorRoots(folder(files)); plan.ExitCode(err) != plan.ExitUsage || plan.Remedy(err) == "" {
			t.Errorf("a folder with %q: %v", files, err)
		}
	}
}

// TestIdentifyPins has machines be refused before they get a certificate, and reports where keys are.
func TestIdentifyPins(t *testing.T) {
	t.Parallel()
	cert, secret, err := authority.Create("test")
	if err != nil {
		t.Fatal(err)
	}
	a, err := authority.Parse(cert, secret)
	if err != nil {
		t.Fatal(err)
	}
	id := attestation.Identity{Name: "worker-1", ProviderID: "machines://u/worker-1", UID: "u", Group: "machines://u/worker", Role: "worker", IP: netip.MustParseAddr("10.0.0.11")}
	tpm, _ := swtpm.Start(t)
	var pinned string
	other := errors.New("another computer")
	accept := func(k Key) error {
		if pinned != "" && k.EK != pinned {
			return other
		}
		return nil
	}
	m := &identityMachine{dir: filepath.Join(t.TempDir(), "identity"), errs: "warning: " + unusedTPM + "\x1b[2Jit is old\nnoise\n"}
	key, err := Identify(t.Context(), m, Job{Authority: a, Identity: id, TPM: tpm, Accept: accept})
	if err != nil || !key.Attested || key.TPM != tpm || !strings.HasPrefix(key.EK, "sha256:") || len(key.Hash) != len(key.EK) || key.Unused != "" {
		t.Fatalf("a key in a TPM: %+v, %v", key, err)
	}
	pinned = key.EK
	again := &identityMachine{dir: filepath.Join(t.TempDir(), "identity"), noise: "Welcome!\n"}
	if k, err := Identify(t.Context(), again, Job{Authority: a, Identity: id, TPM: tpm, Accept: accept}); err != nil || k.EK != key.EK || k.Hash == key.Hash {
		t.Errorf("the same TPM after a reinstallation: %+v, %v", k, err)
	}
	file := &identityMachine{dir: filepath.Join(t.TempDir(), "identity")}
	if _, err := Identify(t.Context(), file, Job{Authority: a, Identity: id, Accept: accept}); !errors.Is(err, other) || slices.Contains(file.calls, "store") || slices.Contains(file.calls, "answer") {
		t.Errorf("another computer: %v after %q", err, file.calls)
	}
	pinned, file.errs = "", m.errs
	if k, err := Identify(t.Context(), file, Job{Authority: a, Identity: id, TPM: attestation.AutoTPM, Accept: accept}); err != nil || k.Attested || k.EK+k.TPM != "" || !strings.HasSuffix(k.Unused, "it is old") || strings.ContainsRune(k.Unused, 0x1b) {
		t.Errorf("a key in a file: %+v, %v", k, err)
	}
}
