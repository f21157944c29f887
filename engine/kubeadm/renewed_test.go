package kubeadm

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// pair returns a certificate with its key.
func pair(t *testing.T) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	c, err := x509.CreateCertificate(rand.Reader, &template, &template, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	b, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: b}))
}

// A power cut while kubeadm renews a certificate leaves an empty one. The copy comes back, and with it the static pods.
func TestIncompleteFilesComeBackFromTheirCopies(t *testing.T) {
	t.Parallel()
	const peer, server, admin, config = "etc/kubernetes/pki/etcd/peer", "etc/kubernetes/pki/etcd/server", "etc/kubernetes/admin.conf", "var/lib/kubelet/config.yaml"
	const kubeconfig, kubelet = "apiVersion: v1\nkind: Config\nusers:\n- name: a\n  user:\n    client-key-data: eA==\n", "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
	cert, key := pair(t)
	otherCert, otherKey := pair(t)
	for _, tt := range []struct {
		name  string
		after map[string]string // what kubeadm wrote until the power cut; "-": the file is gone
		want  []string
	}{
		{name: "nothing was written", after: nil},
		{name: "an empty certificate", after: map[string]string{peer + ".key": otherKey, peer + ".crt": ""}, want: []string{"/" + peer + ".crt"}},
		{name: "half a certificate", after: map[string]string{peer + ".key": otherKey, peer + ".crt": otherCert[:100]}, want: []string{"/" + peer + ".crt"}},
		{name: "a new key alone", after: map[string]string{peer + ".key": otherKey}, want: []string{"/" + peer + ".crt"}},
		{name: "renewed", after: map[string]string{peer + ".key": otherKey, peer + ".crt": otherCert}},
		{name: "a certificate and no key", after: map[string]string{peer + ".key": "-"}, want: []string{"/" + peer + ".crt"}},
		{name: "removed by somebody", after: map[string]string{peer + ".key": "-", peer + ".crt": "-"}},
		{name: "an empty kubeconfig and an empty configuration", after: map[string]string{admin: "", config: ""}, want: []string{"/" + admin, "/" + config}},
		{name: "half a kubeconfig", after: map[string]string{admin: kubeconfig[:len(kubeconfig)-3]}, want: []string{"/" + admin}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir, private := t.TempDir(), t.TempDir()
			before := map[string]string{peer + ".crt": cert, peer + ".key": key, server + ".crt": otherCert, server + ".key": otherKey, admin: kubeconfig, config: kubelet}
			write := func(files map[string]string) {
				for name, content := range files {
					p := filepath.Join(dir, name)
					if content == "-" {
						if err := os.Remove(p); err != nil {
							t.Fatal(err)
						}
						continue
					}
					if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
						t.Fatal(err)
					}
					mode := os.FileMode(0o600)
					if strings.HasSuffix(name, ".crt") {
						mode = 0o644
					}
					if err := os.WriteFile(p, []byte(content), mode); err != nil {
						t.Fatal(err)
					}
				}
			}
			root, err := os.OpenRoot(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			copies, err := os.OpenRoot(private)
			if err != nil {
				t.Fatal(err)
			}
			defer copies.Close()
			write(before)
			if got, err := RestoreRenewed(root, copies); err != nil || len(got) > 0 {
				t.Errorf("without copies: restored %v, %v", got, err)
			}
			if err := KeepRenewed(root, copies); err != nil {
				t.Fatal(err)
			}
			write(tt.after)
			if got, err := RestoreRenewed(root, copies); err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("restored %v, %v; want %v", got, err, tt.want)
			}
			for name, was := range before {
				b, err := os.ReadFile(filepath.Join(dir, name))
				want, written := tt.after[name]
				if stem := strings.TrimSuffix(strings.TrimSuffix(name, ".crt"), ".key"); !written || slices.Contains(tt.want, "/"+stem+".crt") || slices.Contains(tt.want, "/"+name) {
					want = was
				}
				if want == "-" {
					want = ""
				}
				if string(b) != want {
					t.Errorf("%s is %q (%v), want %q", name, b, err, want)
				}
			}
			if info, err := os.Stat(filepath.Join(dir, server+".crt")); err != nil || info.Mode().Perm() != 0o644 {
				t.Errorf("mode of a certificate: %v, %v", info, err)
			}
			// An incomplete file does not replace its copy.
			write(map[string]string{peer + ".key": otherKey, peer + ".crt": ""})
			if err := KeepRenewed(root, copies); err != nil {
				t.Fatal(err)
			}
			if got, err := RestoreRenewed(root, copies); err != nil || !slices.Equal(got, []string{"/" + peer + ".crt"}) {
				t.Errorf("once more: restored %v, %v", got, err)
			}
			if err := ForgetRenewed(root, copies); err != nil {
				t.Error(err)
			}
			if left, err := os.ReadDir(private); err != nil || len(left) > 0 {
				t.Errorf("left %v, %v", left, err)
			}
		})
	}
}
