//go:build linux

package plugin

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/controlplane"
)

const canary = "canary-5e1f9d02c7"

// encrypted starts a control plane whose API server encrypts with the key service of a machine, and returns the directory of its
// files.
func (m *machine) encrypted(t testing.TB) (*controlplane.ControlPlane, string) {
	t.Helper()
	dir := t.TempDir()
	var config string
	for _, b := range kubeadm.EncryptionFiles(kubeadm.Encrypt) { // it is one
		config = strings.Replace(string(b), kubeadm.KMSSocket, m.socket, 1)
	}
	path := filepath.Join(m.dir, "encryption.yaml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return controlplane.ForTest(t, controlplane.Options{Dir: dir, APIServerArgs: []string{
		"--encryption-provider-config=" + path, "--encryption-provider-config-automatic-reload=true",
	}}), dir
}

func clientOf(t testing.TB, c *controlplane.ControlPlane) kubernetes.Interface {
	t.Helper()
	k, err := kubernetes.NewForConfig(c.Config())
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func etcdOf(t testing.TB, c *controlplane.ControlPlane) *clientv3.Client {
	t.Helper()
	pki := c.PKI()
	tls, err := transport.TLSInfo{
		CertFile: pki + "/apiserver-etcd-client.crt", KeyFile: pki + "/apiserver-etcd-client.key", TrustedCAFile: pki + "/etcd/ca.crt",
	}.ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	e, err := clientv3.New(clientv3.Config{Endpoints: []string{c.EtcdEndpoint()}, TLS: tls, DialTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

// stored returns what etcd has of a Secret.
func stored(t *testing.T, e *clientv3.Client, name string) []byte {
	t.Helper()
	r, err := e.Get(t.Context(), "/registry/secrets/default/"+name)
	if err != nil || len(r.Kvs) != 1 {
		t.Fatalf("read Secret %s of etcd: %v, %v", name, r, err)
	}
	return r.Kvs[0].Value
}

func put(t *testing.T, k kubernetes.Interface, name, value string) {
	t.Helper()
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{"value": []byte(value)}}
	if _, err := k.CoreV1().Secrets("default").Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func valueOf(ctx context.Context, k kubernetes.Interface, name string) (string, error) {
	s, err := k.CoreV1().Secrets("default").Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	return string(s.Data["value"]), nil
}

// eventually repeats a check until it succeeds, for a minute.
func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// restart restarts the API server, which is not ready without a key service.
func restart(t *testing.T, c *controlplane.ControlPlane) (ready <-chan error) {
	t.Helper()
	c.StopAPIServer()
	done := make(chan error, 1)
	go func() { done <- c.StartAPIServer(t.Context()) }()
	return done
}

// TestSecretsAreEncryptedInEtcd has a real API server encrypt. A ConfigMap, which it does not encrypt, shows that the search finds something.
func TestSecretsAreEncryptedInEtcd(t *testing.T) {
	m := newMachine(t)
	m.store(encoded(t, 1, 1))
	m.vm.Join(clusterID)
	stop := m.serve()
	c, dir := m.encrypted(t)
	k, e := clientOf(t, c), etcdOf(t, c)
	put(t, k, "first", canary)
	if v, err := valueOf(t.Context(), k, "first"); err != nil || v != canary {
		t.Errorf("the API server returns %q, %v", v, err)
	}
	if _, err := k.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "open"}, Data: map[string]string{"v": "open-4b7e01"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if b := stored(t, e, "first"); !bytes.HasPrefix(b, []byte("k8s:enc:kms:v2:constellation:")) {
		t.Errorf("etcd has %q", b)
	}
	// A kubelet restarts an API server that is not live. That helps nothing here, so this check is not one of those.
	for check, has := range map[string]bool{"/livez?verbose": false, "/readyz?verbose": true} {
		b, err := k.Discovery().RESTClient().Get().RequestURI(check).DoRaw(t.Context())
		if err != nil || strings.Contains(string(b), "[+]kms-providers ok") != has {
			t.Errorf("%s: %v\n%s", check, err, b)
		}
	}

	snapshot := filepath.Join(dir, "snapshot")
	r, err := e.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(snapshot)
	if err == nil {
		_, err = f.ReadFrom(r)
	}
	if err != nil || f.Close() != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	look := func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || !strings.Contains(path, "etcd-") && path != snapshot {
			return err
		}
		b, err := os.ReadFile(path)
		for name, s := range map[string]string{"secret": canary, "secret in base64": base64.StdEncoding.EncodeToString([]byte(canary))[:20], "control": "open-4b7e01"} {
			if bytes.Contains(b, []byte(s)) {
				found[name]++
				if name != "control" {
					t.Errorf("%s has the %s", path, name)
				}
			}
		}
		return err
	}
	if err := filepath.WalkDir(dir, look); err != nil {
		t.Fatal(err)
	}
	if found["control"] < 3 { // database, log of writes, snapshot
		t.Errorf("a ConfigMap is in %d files: the search finds too little", found["control"])
	}

	// A running API server needs the key service for nothing that it has seen. One that starts waits for it.
	stop()
	if v, err := valueOf(t.Context(), k, "first"); err != nil || v != canary {
		t.Errorf("without the key service, a running API server returns %q, %v", v, err)
	}
	ready := restart(t, c)
	eventually(t, "an API server without a key service answers", func() error {
		b, err := k.Discovery().RESTClient().Get().RequestURI("/readyz?verbose").DoRaw(t.Context())
		if err == nil || !strings.Contains(string(b), "[-]kms-providers failed") {
			return fmt.Errorf("%w\n%s", err, b)
		}
		return nil
	})
	if v, err := valueOf(t.Context(), k, "first"); err == nil {
		t.Errorf("without a key service, a new API server returns %q", v)
	}
	stop = m.serve()
	if err := <-ready; err != nil {
		t.Fatalf("the API server does not become ready: %v", err)
	}
	if v, err := valueOf(t.Context(), k, "first"); err != nil || v != canary {
		t.Errorf("after a restart of both: %q, %v", v, err)
	}

	// A key service with the keys of another cluster.
	stop()
	m.store(encoded(t, 2, 1))
	stop = m.serve()
	ready = restart(t, c)
	eventually(t, "an API server with the keys of another cluster reads nothing", func() error {
		v, err := valueOf(t.Context(), k, "first")
		if err == nil {
			t.Fatalf("it returns %q", v)
		}
		if !strings.Contains(err.Error(), "another master secret") {
			return err
		}
		return nil
	})

	// The next generation of the right keys reads everything, and a write replaces the key.
	stop()
	m.store(encoded(t, 1, 2))
	m.serve()
	if err := <-ready; err != nil {
		t.Fatalf("with the right keys, it does not become ready: %v", err)
	}
	if err := <-restart(t, c); err != nil {
		t.Fatal(err)
	}
	s, err := k.CoreV1().Secrets("default").Get(t.Context(), "first", metav1.GetOptions{})
	if err != nil || string(s.Data["value"]) != canary {
		t.Fatalf("with the next generation: %v, %v", s, err)
	}
	before := stored(t, e, "first")
	if _, err := k.CoreV1().Secrets("default").Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	after := stored(t, e, "first")
	if bytes.Contains(before, []byte("-2")) || !bytes.Contains(after, []byte("-2")) {
		t.Error("an update without a change did not encrypt the Secret with the next generation")
	}
}

// TestNewClusterReadsAnEncryptedSnapshot takes a Secret to a cluster whose control plane, with another TPM, has keys of the same master secret, and to
// one with others.
func TestNewClusterReadsAnEncryptedSnapshot(t *testing.T) {
	old := newMachine(t)
	old.store(encoded(t, 1, 3))
	old.vm.Join(clusterID)
	old.serve()
	from, _ := old.encrypted(t)
	put(t, clientOf(t, from), "kept", canary)
	b := stored(t, etcdOf(t, from), "kept")
	for _, tt := range []struct {
		name string
		seed byte
		want bool
	}{{name: "the same master secret", seed: 1, want: true}, {name: "another master secret", seed: 2}} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMachine(t)
			m.store(encoded(t, tt.seed, 1))
			m.vm.Join(clusterID)
			m.serve()
			c, _ := m.encrypted(t)
			if _, err := etcdOf(t, c).Put(t.Context(), "/registry/secrets/default/kept", string(b)); err != nil {
				t.Fatal(err)
			}
			v, err := valueOf(t.Context(), clientOf(t, c), "kept")
			if (v == canary && err == nil) != tt.want {
				t.Errorf("it reads %q, %v", v, err)
			}
		})
	}
}
