package joinservice

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
)

var worker1 = attestation.Identity{
	Name: "worker-1", ProviderID: "sandbox://test/worker-1", UID: "uid-1", Group: "sandboxes/test/groups/workers",
	Role: cloud.Worker, IP: netip.MustParseAddr("10.42.0.21"),
}

func p256(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// csr returns a request for the identity id, after edit.
func csr(t testing.TB, id attestation.Identity, key crypto.Signer, edit func(*x509.CertificateRequest)) []byte {
	t.Helper()
	r := &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: "system:node:" + id.Name, Organization: []string{"system:nodes"}},
		DNSNames: []string{id.Name}, IPAddresses: []net.IP{id.IP.AsSlice()},
	}
	if edit != nil {
		edit(r)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, r, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestRequestMustMatchTheCaller(t *testing.T) {
	key := p256(t)
	good := csr(t, worker1, key, nil)
	if _, err := parseRequest(good, worker1); err != nil {
		t.Fatalf("honest request: %v", err)
	}
	other := worker1
	other.Name, other.IP = "worker-2", netip.MustParseAddr("10.42.0.22")
	small, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		der  []byte
	}{
		{"another node's name", csr(t, worker1, key, func(r *x509.CertificateRequest) { r.Subject.CommonName = "system:node:control-plane-0" })},
		{"a user instead of a node", csr(t, worker1, key, func(r *x509.CertificateRequest) { r.Subject.CommonName = "kubernetes-admin" })},
		{"the administrators' group", csr(t, worker1, key, func(r *x509.CertificateRequest) { r.Subject.Organization = []string{"system:masters"} })},
		{"a second group", csr(t, worker1, key, func(r *x509.CertificateRequest) {
			r.Subject.Organization = []string{"system:nodes", "system:masters"}
		})},
		{"no group", csr(t, worker1, key, func(r *x509.CertificateRequest) { r.Subject.Organization = nil })},
		{"a second common name", csr(t, worker1, key, func(r *x509.CertificateRequest) {
			r.Subject.ExtraNames = []pkix.AttributeTypeAndValue{
				{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "system:node:control-plane-0"},
				{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "system:node:worker-1"},
			}
		})},
		{"an additional attribute in the subject", csr(t, worker1, key, func(r *x509.CertificateRequest) { r.Subject.OrganizationalUnit = []string{"x"} })},
		{"another node's address", csr(t, worker1, key, func(r *x509.CertificateRequest) { r.IPAddresses = []net.IP{{10, 42, 0, 10}} })},
		{"an additional address", csr(t, worker1, key, func(r *x509.CertificateRequest) {
			r.IPAddresses = append(r.IPAddresses, net.IP{10, 96, 0, 1})
		})},
		{"no address", csr(t, worker1, key, func(r *x509.CertificateRequest) { r.IPAddresses = nil })},
		{"the API server's DNS name", csr(t, worker1, key, func(r *x509.CertificateRequest) {
			r.DNSNames = append(r.DNSNames, "kubernetes.default.svc")
		})},
		{"no DNS name", csr(t, worker1, key, func(r *x509.CertificateRequest) { r.DNSNames = nil })},
		{"an e-mail address", csr(t, worker1, key, func(r *x509.CertificateRequest) { r.EmailAddresses = []string{"a@b"} })},
		{"a URI", csr(t, worker1, key, func(r *x509.CertificateRequest) { r.URIs = []*url.URL{{Scheme: "spiffe", Host: "x"}} })},
		{"a whole request of another node", csr(t, other, key, nil)},
		{"a short RSA key", csr(t, worker1, small, nil)},
		{"no request", nil},
		{"garbage", []byte("-----BEGIN CERTIFICATE REQUEST-----")},
		{"data after the request", append(bytes.Clone(good), 0)},
		{"a wrong signature", append(bytes.Clone(good[:len(good)-4]), 1, 2, 3, 4)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := parseRequest(tt.der, worker1); !errors.Is(err, errRequest) {
				t.Errorf("error %v, want the request refused", err)
			}
		})
	}
}

// newPKI writes a folder such as kubeadm's with a CA of the given key.
func newPKI(t testing.TB, key crypto.Signer, pemType string, until time.Time) string {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: until,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	var keyDER []byte
	switch k := key.(type) {
	case *rsa.PrivateKey:
		keyDER = x509.MarshalPKCS1PrivateKey(k)
	case *ecdsa.PrivateKey:
		keyDER, err = x509.MarshalECPrivateKey(k)
	default:
		keyDER, err = x509.MarshalPKCS8PrivateKey(k)
	}
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "etcd"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range controlPlaneFiles {
		b := []byte(name + "\n")
		switch name {
		case "ca.crt":
			b = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
		case "ca.key":
			b = pem.EncodeToMemory(&pem.Block{Type: pemType, Bytes: keyDER})
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestCertificateIsForServingTheNodeOnly(t *testing.T) {
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for _, ca := range []struct {
		name    string
		key     crypto.Signer
		pemType string
		until   time.Time
		want    time.Time
	}{
		{name: "kubeadm's RSA", key: rsaKey, pemType: "RSA PRIVATE KEY", until: now.AddDate(10, 0, 0), want: now.Add(certificateTTL)},
		{name: "ECDSA", key: p256(t), pemType: "EC PRIVATE KEY", until: now.AddDate(10, 0, 0), want: now.Add(certificateTTL)},
		{name: "PKCS #8, expiring soon", key: edKey, pemType: "PRIVATE KEY", until: now.Add(24 * time.Hour), want: now.Add(24 * time.Hour)},
	} {
		t.Run(ca.name, func(t *testing.T) {
			a, err := readAuthority(newPKI(t, ca.key, ca.pemType, ca.until))
			if err != nil {
				t.Fatal(err)
			}
			key := p256(t)
			r, err := parseRequest(csr(t, worker1, key, nil), worker1)
			if err != nil {
				t.Fatal(err)
			}
			p, err := a.sign(r, worker1, now)
			if err != nil {
				t.Fatal(err)
			}
			cert, err := x509.ParseCertificate(p)
			if err != nil {
				t.Fatal(err)
			}
			pool := x509.NewCertPool()
			pool.AddCert(a.cert)
			if _, err := cert.Verify(x509.VerifyOptions{Roots: pool, DNSName: "worker-1"}); err != nil {
				t.Errorf("as the node's server: %v", err)
			}
			if _, err := cert.Verify(x509.VerifyOptions{Roots: pool, DNSName: "10.42.0.21"}); err != nil {
				t.Errorf("by its address: %v", err)
			}
			if _, err := cert.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err == nil {
				t.Error("it authenticates a client")
			}
			if !key.PublicKey.Equal(cert.PublicKey) || cert.IsCA {
				t.Error("it is not for the requested key, or a CA")
			}
			if d := cert.NotAfter.Sub(ca.want).Abs(); d > time.Second {
				t.Errorf("valid until %v, want %v", cert.NotAfter, ca.want)
			}
		})
	}
}

func TestAuthorityRefusesAnotherKey(t *testing.T) {
	dir := newPKI(t, p256(t), "EC PRIVATE KEY", time.Now().Add(time.Hour))
	der, err := x509.MarshalECPrivateKey(p256(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readAuthority(dir); err == nil || !strings.Contains(err.Error(), "does not belong") {
		t.Errorf("error %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.key"), []byte("hunter2"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readAuthority(dir); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("error %v, want one that does not repeat the key", err)
	}
	if err := os.Remove(filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if _, err := readAuthority(dir); err == nil || !strings.Contains(err.Error(), "escapes") {
		t.Errorf("a link out of the PKI: error %v", err)
	}
}
