package bootstrapper

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/internal/testneeds"
	"constellation/joinservice/joinproto"
)

// certifierKeys are keys of a certifier, and what of them must be nowhere.
func certifierKeys(t *testing.T) (keys []byte, canaries [][]byte) {
	t.Helper()
	o, err := signer.NewOwner(bytes.Repeat([]byte{3}, signer.SecretSize))
	if err != nil {
		t.Fatal(err)
	}
	k, err := o.Keys(1)
	if err != nil {
		t.Fatal(err)
	}
	if keys, err = k.Encode(); err != nil {
		t.Fatal(err)
	}
	_, after, ok := bytes.Cut(keys, []byte(`"key":"`))
	inBase64, _, ok2 := bytes.Cut(after, []byte(`"`))
	raw, err := base64.StdEncoding.DecodeString(string(inBase64))
	if err != nil || !ok || !ok2 || len(raw) != 32 {
		t.Fatalf("the keys have another form: %v", err)
	}
	return keys, [][]byte{inBase64, raw, []byte(hex.EncodeToString(raw)), []byte(base64.StdEncoding.EncodeToString(keys)[:60])}
}

// scan fails the test if a canary is in a file of the machine, or in its log.
func (r *rig) scan(when string, canaries [][]byte) {
	r.t.Helper()
	look := func(where string, b []byte) {
		for _, c := range canaries {
			if bytes.Contains(b, c) {
				r.t.Errorf("%s: %s has the key", when, where)
			}
		}
	}
	look("the log", []byte(r.logged()))
	err := filepath.WalkDir(r.ctl, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		look(path, b)
		return err
	})
	if err != nil {
		r.t.Error(err)
	}
}

// serveCertifier runs the certifier of a machine, and returns its client.
func (r *rig) serveCertifier() (c certifier.Client, stop func()) {
	r.t.Helper()
	c.Socket = filepath.Join(r.ctl, "run-certifier", "certifier.sock")
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	m := Machine{StateDir: r.m.StateDir, TPM: r.m.TPM, Log: r.m.Log, Ready: sync.OnceFunc(func() { close(ready) })}
	go func() { done <- RunCertifier(ctx, m, c.Socket) }()
	select {
	case <-ready:
	case err := <-done:
		r.t.Fatalf("the certifier ended: %v", err)
	}
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Errorf("the certifier ended: %v", err)
		}
	})
	r.t.Cleanup(stop)
	return c, stop
}

// TestJoinSealsTheKeysOfTheCertifier joins a control plane whose ticket has the keys. The process dies in the middle of the join.
func TestJoinSealsTheKeysOfTheCertifier(t *testing.T) {
	t.Parallel()
	keys, canaries := certifierKeys(t)
	r, p := newRig(t, cloud.ControlPlane), lab.NewProject(t)
	group := p.Group("control-planes", cloud.ControlPlane, gcptest.UID)
	host, v := p.Start(group, nil), p.Start(group, nil)
	host.Join(clusterB)
	r.atGoogle(p, v, host)
	r.script("hang-join", "")
	r.serveJoins(func(s *service) {
		s.issuer = host.Issuer()
		s.change = func(t *joinproto.IssueJoinTicketResponse) { t.CertifierKeys = bytes.Clone(keys) }
	})
	x := r.start()
	wait(t, "kubeadm hangs", func() bool { return exists(filepath.Join(r.ctl, "hanging-join")) })
	r.scan("in the middle of the join", canaries)
	x.stop(t)
	r.scan("after a crash", canaries)
	r.unscript("hang-join")
	if err := r.start().end(t); err != nil {
		t.Fatalf("%v\n%s", err, r.logged())
	}
	if i, err := os.Stat(filepath.Join(r.m.StateDir, signer.SealedFile)); err != nil || i.Mode().Perm() != 0o600 {
		t.Errorf("sealed keys: %v, %v", i, err)
	}
	c, stop := r.serveCertifier()
	if _, g, err := c.Authorities(t.Context()); err != nil || g != 1 {
		t.Errorf("generation %d, %v", g, err)
	}
	if got, err := c.HandOver(t.Context(), v.Identity()); err != nil || !bytes.Equal(got, keys) {
		t.Errorf("handed over %d bytes, %v; want those of the ticket", len(got), err)
	}
	stop()
	r.scan("at the end", canaries)
	if !strings.Contains(r.logged(), "certifier keys sealed") {
		t.Error("the log does not have it")
	}
}

// withSecret is the metadata of a machine whose owner has initSecret.
type withSecret struct{ Metadata }

// InitSecretHash implements Metadata.
func (withSecret) InitSecretHash(context.Context) ([]byte, error) {
	h := sha256.Sum256(initSecret)
	return h[:], nil
}

// TestInitSealsTheKeysOfTheCertifier makes the first control plane of a cluster, which gets the keys from the console.
func TestInitSealsTheKeysOfTheCertifier(t *testing.T) {
	t.Parallel()
	keys, canaries := certifierKeys(t)
	r, p := newRig(t, cloud.ControlPlane), lab.NewProject(t)
	v := p.Start(p.Group("control-planes", cloud.ControlPlane, gcptest.UID), nil)
	r.atGoogle(p, v, v)
	r.m.Metadata = withSecret{r.m.Metadata}
	x := r.start()
	req := r.request(clusterB)
	req.CertifierKeys = []byte("none")
	if _, err := collect(r.console(x.addr).Init(t.Context(), req)); status.Code(err) == codes.OK {
		t.Error("malformed keys were accepted")
	}
	if _, held := r.holder(); held {
		t.Fatal("the machine is claimed")
	}
	req.CertifierKeys = bytes.Clone(keys)
	if _, err := collect(r.console(x.addr).Init(t.Context(), req)); err != nil {
		t.Fatalf("%v\n%s", err, r.logged())
	}
	x.stop(t)
	r.scan("after the init", canaries)
	c, stop := r.serveCertifier()
	if got, err := c.HandOver(t.Context(), v.Identity()); err != nil || !bytes.Equal(got, keys) {
		t.Errorf("handed over %d bytes, %v", len(got), err)
	}
	stop()
	r.scan("at the end", canaries)
}

// TestCertifierNeedsAMember runs the certifier where it has nothing to serve.
func TestCertifierNeedsAMember(t *testing.T) {
	t.Parallel()
	m := Machine{StateDir: t.TempDir()}
	if err := RunCertifier(t.Context(), m, filepath.Join(m.StateDir, "sock")); err == nil || !strings.Contains(err.Error(), "belongs to no cluster") {
		t.Errorf("got %v", err)
	}
	b := []byte(`{"state":"member","by":"join","clusterID":"` + hex.EncodeToString(clusterB) + `","time":"2026-01-01T00:00:00Z"}`)
	if err := os.WriteFile(filepath.Join(m.StateDir, holderFile), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := RunCertifier(t.Context(), m, filepath.Join(m.StateDir, "sock")); err == nil || !strings.Contains(err.Error(), signer.SealedFile) {
		t.Errorf("without keys: %v", err)
	}
}

// certifierEnv has a copy of the test binary run the certifier: directory, TPM and socket, with spaces between.
const certifierEnv = "CONSTELLATION_TEST_CERTIFIER"

func certifierProcess(arg string) int {
	a := strings.Fields(arg)
	if err := RunCertifier(context.Background(), Machine{StateDir: a[0], TPM: a[1], Log: slog.New(slog.NewJSONHandler(os.Stderr, nil))}, a[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// TestCertifierUsesNoNetwork runs the certifier as a process in a network namespace without an interface. It is killed in between.
func TestCertifierUsesNoNetwork(t *testing.T) {
	testneeds.Root(t, "to make a network namespace")
	t.Parallel()
	keys, canaries := certifierKeys(t)
	p := lab.NewProject(t)
	v := p.Start(p.Group("control-planes", cloud.ControlPlane, gcptest.UID), nil)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, holderFile), []byte(`{"state":"member","by":"join","clusterID":"`+hex.EncodeToString(clusterB)+`","time":"2026-01-01T00:00:00Z"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := signer.Store(t.Context(), dir, v.TPM, clusterB, keys); err != nil {
		t.Fatal(err)
	}
	v.Join(clusterB)
	c := certifier.Client{Socket: filepath.Join(dir, "run", "certifier.sock")}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		var log bytes.Buffer
		cmd := exec.CommandContext(t.Context(), self)
		cmd.Env, cmd.Stderr = append(os.Environ(), certifierEnv+"="+strings.Join([]string{dir, v.TPM, c.Socket}, " ")), &log
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		wait(t, "it serves", func() bool {
			_, g, err := c.Authorities(t.Context())
			return err == nil && g == 1
		})
		for _, kind := range []string{"tcp", "tcp6", "udp", "udp6", "raw", "raw6", "packet"} {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", cmd.Process.Pid, kind))
			if n := bytes.Count(b, []byte("\n")); err != nil || n != 1 { // the title
				t.Errorf("%d sockets of %s, %v", n-1, kind, err)
			}
		}
		if i, err := os.Stat(filepath.Dir(c.Socket)); err != nil || i.Mode().Perm() != 0o700 {
			t.Errorf("the directory of the socket: %v, %v", i, err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // it was killed
		for _, canary := range canaries {
			if bytes.Contains(log.Bytes(), canary) {
				t.Error("the log has the key")
			}
		}
		if !strings.Contains(log.String(), `"msg":"certifier started"`) {
			t.Errorf("its log is %s", &log)
		}
	}
}
