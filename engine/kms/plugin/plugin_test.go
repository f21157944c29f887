//go:build linux

package plugin

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	kmsapi "k8s.io/kms/apis/v2"

	"constellation/engine/attestation"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/kms"
	"constellation/internal/syncbuffer"
)

var clusterID = bytes.Repeat([]byte{7}, 32)

// machine is a control plane with a TPM and sealed keys.
type machine struct {
	t              testing.TB
	vm             *lab.VM
	dir            string
	socket, joiner string
	log            syncbuffer.Buffer
	now            func() time.Time // nil: the real time
}

// encoded returns keys of a secret that is seed, 32 times.
func encoded(t testing.TB, seed byte, generation uint32) []byte {
	t.Helper()
	k, err := kms.First(bytes.Repeat([]byte{seed}, kms.SecretSize), generation)
	if err != nil {
		t.Fatal(err)
	}
	b, err := k.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func newMachine(t testing.TB) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("", "kms") // a short path, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p := lab.NewProject(t)
	m := &machine{t: t, vm: p.Start(p.Group("control-planes", cloud.ControlPlane, gcptest.UID), nil), dir: dir}
	m.socket, m.joiner = filepath.Join(dir, "kms.sock"), filepath.Join(dir, "keys.sock")
	return m
}

// store seals keys and makes the machine a member.
func (m *machine) store(keys []byte) {
	m.t.Helper()
	if err := Store(m.t.Context(), m.dir, m.vm.TPM, clusterID, keys); err != nil {
		m.t.Fatal(err)
	}
}

// serve starts the key service, until stop.
func (m *machine) serve() (stop func()) {
	m.t.Helper()
	log := slog.New(slog.NewJSONHandler(&m.log, nil))
	s, err := Open(m.t.Context(), Config{Dir: m.dir, TPM: m.vm.TPM, ClusterID: clusterID, Log: log, now: m.now})
	if err != nil {
		m.t.Fatal(err)
	}
	var l [2]net.Listener
	for n, path := range []string{m.socket, m.joiner} {
		if l[n], err = keyprocess.Listen(m.t.Context(), path, log); err != nil {
			m.t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l[0], l[1]) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			m.t.Errorf("the key service ended: %v", err)
		}
	})
	m.t.Cleanup(stop)
	return stop
}

// TestKeyServiceServesBothCallers encrypts as an API server, and asks for keys as a join service.
func TestKeyServiceServesBothCallers(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	keys := encoded(t, 0xc4, 1)
	m.store(keys)
	if _, err := Open(t.Context(), Config{Dir: m.dir, TPM: m.vm.TPM}); !errors.Is(err, attestation.ErrSealed) {
		t.Errorf("before it is a member, the machine opens the keys: %v", err)
	}
	m.vm.Join(clusterID)
	stop := m.serve()
	conn, err := grpc.NewClient("unix://"+m.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	api := kmsapi.NewKeyManagementServiceClient(conn)
	st, err := api.Status(t.Context(), &kmsapi.StatusRequest{})
	if err != nil || st.Healthz != "ok" || st.Version != "v2" || !strings.HasSuffix(st.KeyId, "-1") {
		t.Fatalf("status %v, %v", st, err)
	}
	plain := bytes.Repeat([]byte{0x5e}, 32)
	e, err := api.Encrypt(t.Context(), &kmsapi.EncryptRequest{Plaintext: plain, Uid: "1"})
	if err != nil || e.KeyId != st.KeyId {
		t.Fatalf("encrypted by %v, %v", e, err)
	}
	d, err := api.Decrypt(t.Context(), &kmsapi.DecryptRequest{Ciphertext: e.Ciphertext, KeyId: e.KeyId, Uid: "2"})
	if err != nil || !bytes.Equal(d.Plaintext, plain) {
		t.Errorf("decrypted to %v, %v", d, err)
	}
	if _, err := api.Decrypt(t.Context(), &kmsapi.DecryptRequest{Ciphertext: plain, KeyId: e.KeyId, Uid: "the-third"}); err == nil || !strings.Contains(m.log.String(), "the-third") {
		t.Errorf("changed data: %v\n%s", err, &m.log)
	}

	c := kms.Client{Socket: m.joiner}
	if g, err := c.Ready(t.Context()); err != nil || g != 1 {
		t.Errorf("generation %d, %v", g, err)
	}
	if got, err := c.HandOver(t.Context(), m.vm.Identity()); err != nil || !bytes.Equal(got, keys) {
		t.Errorf("handed over %d bytes, %v", len(got), err)
	}
	worker := m.vm.Identity()
	worker.Role = cloud.Worker
	var refused *keyprocess.RefusedError
	if got, err := c.HandOver(t.Context(), worker); !errors.As(err, &refused) || got != nil {
		t.Errorf("a worker got %d bytes, %v", len(got), err)
	}
	for _, socket := range []string{m.socket, m.joiner} {
		if i, err := os.Stat(socket); err != nil || i.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", socket, i, err)
		}
	}
	// Neither socket serves the callers of the other one.
	if _, err := (kms.Client{Socket: m.socket}).HandOver(t.Context(), m.vm.Identity()); err == nil {
		t.Error("the socket of the API server hands keys over")
	}
	stop()
	if _, err := c.Ready(t.Context()); err == nil {
		t.Error("it answers after its end")
	}
	canary := bytes.Repeat([]byte{0xc4}, 8)
	if strings.Contains(m.log.String(), string(canary)) || strings.Contains(m.log.String(), "xMTExMTE") {
		t.Error("the log has the secret")
	}
	err = filepath.WalkDir(m.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if bytes.Contains(b, canary) || bytes.Contains(b, []byte("xMTExMTE")) {
			t.Errorf("%s has the secret", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// TestKeysAreOfOneMachine copies the sealed file to another machine, and boots something else on the first one.
func TestKeysAreOfOneMachine(t *testing.T) {
	t.Parallel()
	m, other := newMachine(t), newMachine(t)
	m.store(encoded(t, 1, 1))
	b, err := os.ReadFile(filepath.Join(m.dir, kms.SealedFile))
	if err == nil {
		err = os.WriteFile(filepath.Join(other.dir, kms.SealedFile), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.vm.Join(clusterID)
	other.vm.Join(clusterID)
	if _, err := Open(t.Context(), Config{Dir: other.dir, TPM: other.vm.TPM}); !errors.Is(err, attestation.ErrSealed) {
		t.Errorf("another machine opens the keys: %v", err)
	}
	m.serve()()
	m.vm.Measure(11, "another image")
	if _, err := Open(t.Context(), Config{Dir: m.dir, TPM: m.vm.TPM}); !errors.Is(err, attestation.ErrSealed) {
		t.Errorf("another image opens the keys: %v", err)
	}
	if _, err := Open(t.Context(), Config{Dir: t.TempDir(), TPM: m.vm.TPM}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without keys: %v", err)
	}
	if err := Store(t.Context(), m.dir, m.vm.TPM, clusterID, []byte("none")); err == nil {
		t.Error("malformed keys are stored")
	}
}

// TestGenerationIsRaised has a join service raise the generation, and try what the key service refuses.
func TestGenerationIsRaised(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	clock := time.Now()
	m.now = func() time.Time { return clock }
	m.store(encoded(t, 1, 1))
	m.vm.Join(clusterID)
	stop := m.serve()
	c := kms.Client{Socket: m.joiner}
	raise := func(to, want uint32, refusal string) {
		t.Helper()
		got, err := c.Raise(t.Context(), to)
		if refusal == "" && (err != nil || got != want) || refusal != "" && (err == nil || !strings.Contains(err.Error(), refusal)) {
			t.Errorf("raised to %d: %d, %v, want %d or %q", to, got, err, want, refusal)
		}
		if now, err := c.Ready(t.Context()); err != nil || now != want {
			t.Errorf("raised to %d: it uses %d, %v, want %d", to, now, err, want)
		}
	}
	conn, err := grpc.NewClient("unix://"+m.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	api := kmsapi.NewKeyManagementServiceClient(conn)
	poll := func(times int) {
		t.Helper()
		for range times {
			if _, err := api.Status(t.Context(), &kmsapi.StatusRequest{}, grpc.WaitForReady(true)); err != nil {
				t.Fatal(err)
			}
		}
	}
	used := func(want uint32) {
		t.Helper()
		if got, err := c.Used(t.Context()); err != nil || got != want {
			t.Errorf("the API server uses generation %d, %v; want %d", got, err, want)
		}
	}
	raise(1, 1, "")
	used(0)
	poll(1)
	used(0) // it may use that of a former process
	if _, err := api.Encrypt(t.Context(), &kmsapi.EncryptRequest{Plaintext: []byte("seed"), Uid: "1"}); err != nil {
		t.Fatal(err)
	}
	used(1)
	raise(2, 2, "")
	poll(1)
	used(1)
	raise(2, 2, "")
	poll(1) // it has nothing encrypted, so its seed is of this key already
	used(2)
	raise(1, 2, "") // never back
	raise(3, 2, "less than 30s ago")
	clock = clock.Add(raiseEvery)
	raise(3+kms.MaxRaise, 2, "at most 16 more are allowed at once")
	raise(1<<31, 2, "at most 16 more are allowed at once")
	raise(2+kms.MaxRaise, 18, "")
	stop()
	stop = m.serve()
	used(0)
	poll(2)
	used(18)
	if now, err := c.Ready(t.Context()); err != nil || now != 18 {
		t.Errorf("after a restart: %d, %v", now, err)
	}
	if keys, err := c.HandOver(t.Context(), attestation.Identity{Role: cloud.ControlPlane}); err != nil || !bytes.Equal(keys, encoded(t, 1, 18)) {
		t.Errorf("a new control plane gets %d bytes, %v", len(keys), err)
	}
	// The key service does not use a generation that it cannot store.
	if err := os.Rename(m.dir+"/"+kms.SealedFile, m.dir+"/away"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(m.dir+"/"+kms.SealedFile, 0o700); err != nil {
		t.Fatal(err)
	}
	raise(19, 18, "store "+kms.SealedFile)
	stop()
	if !strings.Contains(m.log.String(), `"msg":"generation of the key service raised"`) {
		t.Error("a raise was not logged")
	}
}
