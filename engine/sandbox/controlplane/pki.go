package controlplane

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

const (
	clientAuth = x509.ExtKeyUsageClientAuth
	serverAuth = x509.ExtKeyUsageServerAuth

	// validity is longer than any throwaway cluster lives; skew lets clocks differ.
	validity = 90 * 24 * time.Hour
	skew     = 10 * time.Minute
)

// pki is the folder of a control plane's certificates and keys.
type pki struct {
	dir     string
	cluster *authority
}

func (p pki) path(name string) string { return filepath.Join(p.dir, filepath.FromSlash(name)) }

// authority signs certificates.
type authority struct {
	cert    *x509.Certificate
	certPEM []byte
	keyPEM  []byte
	key     crypto.Signer
}

// newPKI makes the three CAs of kubeadm, and what etcd and the API server need of them.
func newPKI(dir string) (pki, error) {
	p := pki{dir: dir}
	if err := os.MkdirAll(p.path("etcd"), 0o700); err != nil {
		return p, err
	}
	cas := map[string]*authority{}
	for file, name := range map[string]string{"ca": "kubernetes", "front-proxy-ca": "front-proxy-ca", "etcd/ca": "etcd-ca"} {
		a, err := newAuthority(name)
		if err != nil {
			return p, err
		}
		cas[file] = a
		if err := p.write(file, a.certPEM, a.keyPEM); err != nil {
			return p, err
		}
	}
	p.cluster = cas["ca"]
	for _, c := range []struct {
		file, ca string
		name     pkix.Name
		usage    []x509.ExtKeyUsage
	}{
		{"apiserver", "ca", pkix.Name{CommonName: "kube-apiserver"}, []x509.ExtKeyUsage{serverAuth}},
		{"apiserver-etcd-client", "etcd/ca", pkix.Name{CommonName: "kube-apiserver-etcd-client"}, []x509.ExtKeyUsage{clientAuth}},
		{"etcd/server", "etcd/ca", pkix.Name{CommonName: "etcd"}, []x509.ExtKeyUsage{serverAuth, clientAuth}},
	} {
		cert, key, err := cas[c.ca].issue(c.name, c.usage...)
		if err != nil {
			return p, err
		}
		if err := p.write(c.file, cert, key); err != nil {
			return p, err
		}
	}
	sa, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return p, err
	}
	saKey, err := keyPEM(sa)
	if err != nil {
		return p, err
	}
	pub, err := x509.MarshalPKIXPublicKey(&sa.PublicKey)
	if err != nil {
		return p, err
	}
	if err := os.WriteFile(p.path("sa.pub"), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: pub}), 0o644); err != nil {
		return p, err
	}
	return p, os.WriteFile(p.path("sa.key"), saKey, 0o600)
}

func (p pki) write(name string, cert, key []byte) error {
	if err := os.WriteFile(p.path(name+".crt"), cert, 0o644); err != nil {
		return err
	}
	return os.WriteFile(p.path(name+".key"), key, 0o600)
}

func newAuthority(name string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotBefore: now.Add(-skew), NotAfter: now.Add(validity),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
		IsCA:     true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	a := &authority{key: key, certPEM: certPEM(der)}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	a.keyPEM, err = keyPEM(key)
	return a, err
}

// issue returns a new certificate for loopback, and its key, as PEM.
func (a *authority) issue(name pkix.Name, usage ...x509.ExtKeyUsage) (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, nil, err
	}
	now := time.Now()
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: name,
		NotBefore: now.Add(-skew), NotAfter: now.Add(validity),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment, ExtKeyUsage: usage,
		DNSNames:    []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(10, 96, 0, 1)},
	}, a.cert, k.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	key, err = keyPEM(k)
	return certPEM(der), key, err
}

func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func keyPEM(k *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}
