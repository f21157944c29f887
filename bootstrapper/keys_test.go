package bootstrapper

import (
	"bytes"
	"context"
	"encoding/base64"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/bootstrapper/initproto"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/internal/delay"
	"constellation/joinservice/joinproto"
)

// kmsKeys are keys of a key service, and what of them must be nowhere.
func kmsKeys(t *testing.T) (keys []byte, canaries [][]byte) {
	t.Helper()
	secret := bytes.Repeat([]byte{0x5a, 0xc3}, kms.SecretSize/2)
	k, err := kms.First(secret, 1)
	if err != nil {
		t.Fatal(err)
	}
	if keys, err = k.Encode(); err != nil {
		t.Fatal(err)
	}
	return keys, [][]byte{secret, []byte(base64.StdEncoding.EncodeToString(secret)), []byte(base64.StdEncoding.EncodeToString(keys)[:60])}
}

// serveKeys runs the key service of a machine as its unit does: it is started again until the TPM opens the keys.
func (r *rig) serveKeys() (stop func()) {
	r.t.Helper()
	m := r.m
	ctx, cancel := context.WithCancel(context.Background())
	m.Ready = nil
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			if err := RunKeyService(ctx, m, filepath.Join(r.ctl, "k", "kms.sock")); err == nil || !delay.For(ctx, m.hurry) {
				return
			}
		}
	}()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	r.t.Cleanup(stop)
	return stop
}

// encryption is the file that has the API server of the machine encrypt.
func (r *rig) encryption() string {
	b, err := os.ReadFile(filepath.Join(r.m.Root, "etc/kubernetes/constellation/encryption.yaml"))
	if err != nil {
		return ""
	}
	return string(b)
}

// started returns the starts of the kubelet.
func (r *rig) started() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.kubelets)
}

// TestInitEncryptsSecrets makes the first control plane of a cluster with keys for its API server. Its key service works
// before kubeadm runs.
func TestInitEncryptsSecrets(t *testing.T) {
	t.Parallel()
	keys, canaries := kmsKeys(t)
	r, p := newRig(t, cloud.ControlPlane), lab.NewProject(t)
	v := p.Start(p.Group("control-planes", cloud.ControlPlane, gcptest.UID), nil)
	r.atGoogle(p, v, v)
	r.m.Metadata = withSecret{r.m.Metadata}
	stop := r.serveKeys()
	r.script("hang-init-phase-certs-ca", "")
	x := r.start()
	req := r.request(clusterB)
	req.KmsKeys = []byte("none")
	if _, err := collect(r.console(x.addr).Init(t.Context(), req)); status.Code(err) == codes.OK {
		t.Error("malformed keys were accepted")
	}
	if _, held := r.holder(); held {
		t.Fatal("the machine is claimed")
	}
	req.KmsKeys = bytes.Clone(keys)
	if _, err := r.console(x.addr).Init(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	wait(t, "kubeadm runs", func() bool { return exists(filepath.Join(r.ctl, "hanging-init-phase-certs-ca")) })
	c := kms.Client{Socket: r.m.KeysSocket}
	if g, err := c.Ready(t.Context()); err != nil || g != 1 {
		t.Errorf("while kubeadm runs, the key service has generation %d, %v", g, err)
	}
	if !strings.Contains(r.encryption(), kubeadm.KMSSocket) {
		t.Errorf("the API server gets the configuration %q", r.encryption())
	}
	r.scan("in the middle of the init", canaries)
	// The next process has no request with keys any more.
	x.stop(t)
	r.unscript("hang-init-phase-certs-ca")
	x = r.start()
	all, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterB)))
	if err != nil {
		t.Fatalf("%v\n%s", err, r.logged())
	}
	if s := success(all); s == nil || !s.EncryptsSecrets {
		t.Errorf("the console gets %v", s)
	}
	x.stop(t)
	if got, err := c.HandOver(t.Context(), v.Identity()); err != nil || !bytes.Equal(got, keys) {
		t.Errorf("handed over %d bytes, %v", len(got), err)
	}
	r.scan("at the end", canaries)

	// After a restart of the machine, the kubelet waits for the key service.
	stop()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, r.m) }()
	wait(t, "it waits", func() bool { return strings.Contains(r.logged(), "waiting for the key service") })
	if n := len(r.started()); n != 0 {
		t.Errorf("the kubelet was started %d times", n)
	}
	r.serveKeys()
	wait(t, "the kubelet is started", func() bool { return len(r.started()) == 1 })
	cancel()
	<-done
}

// success returns the result of an init.
func success(all []*initproto.InitResponse) *initproto.Success {
	for _, m := range all {
		if s := m.GetSuccess(); s != nil {
			return s
		}
	}
	return nil
}

// TestInitWithoutKeysOfTheAPIServer is that of a console which sends none, such as one of an earlier release.
func TestInitWithoutKeysOfTheAPIServer(t *testing.T) {
	t.Parallel()
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	all, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterB)))
	if err != nil {
		t.Fatalf("%v\n%s", err, r.logged())
	}
	if s := success(all); s == nil || s.EncryptsSecrets || r.encryption() != "" {
		t.Errorf("the console gets %v, and the API server %q", s, r.encryption())
	}
	x.stop(t)
}

// TestJoinEncryptsSecrets joins a control plane whose ticket has keys for its API server. The process dies in the middle.
func TestJoinEncryptsSecrets(t *testing.T) {
	t.Parallel()
	keys, canaries := kmsKeys(t)
	r, p := newRig(t, cloud.ControlPlane), lab.NewProject(t)
	group := p.Group("control-planes", cloud.ControlPlane, gcptest.UID)
	host, v := p.Start(group, nil), p.Start(group, nil)
	host.Join(clusterB)
	r.atGoogle(p, v, host)
	r.serveKeys()
	r.script("hang-join", "")
	r.serveJoins(func(s *service) {
		s.issuer = host.Issuer()
		s.change = func(t *joinproto.IssueJoinTicketResponse) { t.KmsKeys = bytes.Clone(keys) }
	})
	x := r.start()
	wait(t, "kubeadm hangs", func() bool { return exists(filepath.Join(r.ctl, "hanging-join")) })
	c := kms.Client{Socket: r.m.KeysSocket}
	if g, err := c.Ready(t.Context()); err != nil || g != 1 || r.encryption() == "" {
		t.Errorf("while kubeadm runs, the key service has generation %d, %v, and the configuration is %q", g, err, r.encryption())
	}
	r.scan("in the middle of the join", canaries)
	x.stop(t)
	r.unscript("hang-join")
	if err := os.RemoveAll(filepath.Join(r.m.Root, "etc/kubernetes/constellation")); err != nil {
		t.Fatal(err)
	}
	var err error
	wait(t, "the process ends", func() bool { // a program that another test starts may have the lock for a moment
		err = r.start().end(t)
		return err == nil || !strings.Contains(err.Error(), "another bootstrapper is running")
	})
	if err != nil { // with the stored ticket, which has no keys any more
		t.Fatalf("%v\n%s", err, r.logged())
	}
	if r.encryption() == "" {
		t.Error("after a crash, the API server gets no configuration")
	}
	if got, err := c.HandOver(t.Context(), v.Identity()); err != nil || !bytes.Equal(got, keys) {
		t.Errorf("handed over %d bytes, %v; want those of the ticket", len(got), err)
	}
	r.scan("at the end", canaries)
}

// TestJoinWithoutKeys joins a control plane of a cluster that is about to encrypt Secrets. It gets its keys afterwards, also after a restart.
func TestJoinWithoutKeys(t *testing.T) {
	t.Parallel()
	keys, canaries := kmsKeys(t)
	k, err := kms.Parse(keys)
	if err != nil {
		t.Fatal(err)
	}
	r, p := newRig(t, cloud.ControlPlane), lab.NewProject(t)
	group := p.Group("control-planes", cloud.ControlPlane, gcptest.UID)
	host, v := p.Start(group, nil), p.Start(group, nil)
	host.Join(clusterB)
	r.atGoogle(p, v, host)
	r.m.Metadata = withSecret{r.m.Metadata}
	r.serveKeys()
	r.serveJoins(func(s *service) {
		s.issuer = host.Issuer()
		s.change = func(t *joinproto.IssueJoinTicketResponse) {
			t.KmsFingerprint, t.KmsMode = k.Fingerprint(), string(kubeadm.Decrypt)
		}
	})
	content := func(mode kubeadm.Encryption) (text string) {
		for _, b := range kubeadm.EncryptionFiles(mode) {
			text = string(b)
		}
		return text
	}
	x := r.start()
	wait(t, "it waits for keys", func() bool { return strings.Contains(r.logged(), "waiting for the first keys") })
	if r.encryption() != content(kubeadm.AwaitKeys) {
		t.Errorf("the API server of a machine without keys has the configuration\n%s", r.encryption())
	}
	for name := range kubeadm.EncryptionPatch() {
		if !exists(filepath.Join(r.m.Root, name)) {
			t.Errorf("%s is missing", name)
		}
	}
	x.stop(t)
	e := &encrypting{rig: r, vm: v, kms: keys, canaries: canaries}
	e.judge = memberOf(func(rule attestation.PCR15) attestation.Validator {
		return v.Method().Validator(r.m.Roots, lab.Measurements(), attestation.Options{PCR15: rule, UID: gcptest.UID})
	}, clusterB)
	x = e.again()
	if x.addr == "" {
		t.Fatalf("after a restart, it does not listen\n%s", r.logged())
	}
	c := r.console(x.addr)
	lost, err := c.Recovery(t.Context(), &initproto.RecoveryRequest{InitSecret: initSecret})
	if err != nil || len(lost.GetLost()) != 1 || lost.GetLost()[0].GetFingerprint() != k.Fingerprint() || !strings.Contains(lost.GetLost()[0].GetReason(), "about to encrypt") {
		t.Fatalf("it waits for %v, %v", lost, err)
	}
	if _, err := c.Recover(t.Context(), recovery(clusterB, keys)); err != nil {
		t.Fatalf("%v\n%s", err, r.logged())
	}
	if err := x.end(t); err != nil {
		t.Error(err)
	}
	wait(t, "the API server may read encrypted Secrets", func() bool { return r.encryption() == content(kubeadm.Decrypt) })
	service := kms.Client{Socket: r.m.KeysSocket}
	for _, tt := range []struct {
		mode string
		want kubeadm.Encryption
		err  string
	}{
		{mode: "encrypt", want: kubeadm.Encrypt},
		{mode: "encrypt", want: kubeadm.Encrypt},
		{mode: "await-keys", want: kubeadm.Encrypt, err: `mode of encryption is "await-keys"`},
		{mode: "", want: kubeadm.Encrypt, err: `mode of encryption is ""`},
		{mode: "read", want: kubeadm.Decrypt},
	} {
		err := service.SetEncryption(t.Context(), tt.mode)
		if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("mode %q: %v, want %q", tt.mode, err, tt.err)
		}
		if r.encryption() != content(tt.want) {
			t.Errorf("after mode %q, the configuration is\n%s", tt.mode, r.encryption())
		}
	}
	own := filepath.Join(r.m.Root, "etc/kubernetes/constellation/encryption.yaml")
	if err := os.WriteFile(own, []byte("# changed by hand"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := service.SetEncryption(t.Context(), "encrypt"); err == nil || !strings.Contains(err.Error(), "no configuration of encryption that this release knows") {
		t.Errorf("a configuration that was changed by hand is replaced: %v", err)
	}
	r.scan("at the end", canaries)
}

// TestTicketOfAnExistingCluster has tickets of a cluster that is about to encrypt Secrets.
func TestTicketOfAnExistingCluster(t *testing.T) {
	t.Parallel()
	keys, _ := kmsKeys(t)
	k, err := kms.Parse(keys)
	if err != nil {
		t.Fatal(err)
	}
	id := k.Fingerprint()
	for _, tt := range []struct {
		name     string
		id, mode string
		keys     []byte
		want     string
	}{
		{name: "a cluster without encryption"},
		{name: "a cluster that encrypts since its init", keys: keys},
		{name: "keys come later", id: id, mode: "read"},
		{name: "keys are there", id: id, mode: "encrypt", keys: keys},
		{name: "a mode without keys", mode: "read", want: "fingerprint of the keys of the key service is malformed"},
		{name: "a fingerprint of another form", id: "../etc", mode: "read", want: "fingerprint of the keys of the key service is malformed"},
		{name: "an unknown mode", id: id, mode: "plain", want: `mode of encryption is "plain"`},
		{name: "no mode", id: id, want: `mode of encryption is ""`},
		{name: "other keys", id: "0123456789abcdef", mode: "read", keys: keys, want: "its keys of the key service have the fingerprint " + id},
		{name: "damaged keys", id: id, mode: "read", keys: []byte("{"), want: "they are malformed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			err := checkEncryption(&joinproto.IssueJoinTicketResponse{KmsFingerprint: tt.id, KmsMode: tt.mode, KmsKeys: tt.keys})
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

// TestWorkerRefusesSecretKeys has a join service that sends keys of control planes to the wrong machine.
func TestWorkerRefusesSecretKeys(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		keys func(*testing.T) (keys []byte, canaries [][]byte)
		send func(*joinproto.IssueJoinTicketResponse, []byte)
		file string
	}{
		{name: "of the certifier", keys: certifierKeys, send: func(t *joinproto.IssueJoinTicketResponse, keys []byte) { t.CertifierKeys = keys }, file: signer.SealedFile},
		{name: "of the API server", keys: kmsKeys, send: func(t *joinproto.IssueJoinTicketResponse, keys []byte) { t.KmsKeys = keys }, file: kms.SealedFile},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			keys, canaries := tt.keys(t)
			r := newRig(t, cloud.Worker)
			r.serveJoins(func(s *service) {
				s.change = func(t *joinproto.IssueJoinTicketResponse) { tt.send(t, bytes.Clone(keys)) }
			})
			x := r.start()
			wait(t, "the ticket is refused", func() bool { return strings.Contains(r.logged(), "which a worker must not have") })
			x.stop(t)
			r.scan("at the end", canaries)
			if exists(filepath.Join(r.m.StateDir, tt.file)) || exists(filepath.Join(r.m.StateDir, ticketFile)) {
				t.Error("something was stored")
			}
		})
	}
}
