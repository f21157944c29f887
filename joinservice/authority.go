package joinservice

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"slices"
	"time"

	"constellation/engine/attestation"
	"constellation/internal/kubeletcsr"
	"constellation/internal/pemkey"
	"constellation/joinservice/joinproto"
)

const (
	// certificateTTL bounds how long a stolen kubelet key can impersonate its node's server: a
	// quarter of the year of kubeadm's own certificates.
	certificateTTL = 90 * 24 * time.Hour
	// clockSkew is how far the clock of a machine may lag behind.
	clockSkew = 10 * time.Minute
)

// controlPlaneFiles are the files for a joining control plane, relative to the PKI.
var controlPlaneFiles = []string{
	"ca.crt", "ca.key", "sa.key", "sa.pub", "front-proxy-ca.crt", "front-proxy-ca.key", "etcd/ca.crt", "etcd/ca.key",
}

// authority is the cluster's CA. It is read once and safe for concurrent use.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  crypto.Signer
	// hash is kubeadm's pin of the CA: sha256:<hex> of its public key.
	hash string
}

func readAuthority(dir string) (*authority, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open the cluster's PKI: %w", err)
	}
	defer root.Close()
	certPEM, err := readFile(root, "ca.crt")
	if err != nil {
		return nil, err
	}
	keyPEM, err := readFile(root, "ca.key")
	if err != nil {
		return nil, err
	}
	a := &authority{dir: dir}
	block, _ := pem.Decode(certPEM)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("read ca.crt of the cluster's PKI: not a PEM certificate")
	}
	if a.cert, err = x509.ParseCertificate(block.Bytes); err != nil {
		return nil, fmt.Errorf("read ca.crt of the cluster's PKI: %w", err)
	}
	var ok bool
	if a.key, ok = pemkey.Parse(keyPEM); !ok {
		return nil, errors.New("read ca.key of the cluster's PKI: not a private key in PEM")
	}
	pub, ok := a.key.Public().(interface{ Equal(crypto.PublicKey) bool })
	if !ok || !pub.Equal(a.cert.PublicKey) {
		return nil, errors.New("ca.key of the cluster's PKI does not belong to ca.crt")
	}
	a.hash = pinOf(a.cert)
	return a, nil
}

// parseRequest returns the request if it contains exactly the name and address that the cloud
// certified for the caller. Errors wrap errRequest.
func parseRequest(der []byte, id attestation.Identity) (*x509.CertificateRequest, error) {
	bad := func(format string, args ...any) (*x509.CertificateRequest, error) {
		return nil, fmt.Errorf("%w: "+format, append([]any{errRequest}, args...)...)
	}
	r, err := kubeletcsr.Parse(der)
	if err != nil {
		return bad("%w", err)
	}
	if subject := kubeletcsr.Subject(id.Name); !kubeletcsr.HasSubject(r, subject.CommonName) {
		return bad("its subject is %q, want %q", printable(r.Subject.String(), maxText), subject)
	}
	if !slices.Equal(r.DNSNames, []string{id.Name}) {
		return bad("its DNS names are %q, want only %q", printable(fmt.Sprint(r.DNSNames), maxText), id.Name)
	}
	if len(r.IPAddresses) != 1 || !r.IPAddresses[0].Equal(id.IP.AsSlice()) {
		return bad("its addresses are %v, want only %v", r.IPAddresses, id.IP)
	}
	if err := kubeletcsr.CheckServerNames(r); err != nil {
		return bad("%w", err)
	}
	return r, nil
}

// sign returns the kubelet's serving certificate in DER. Of the request only the
// public key is used.
func (a *authority) sign(r *x509.CertificateRequest, id attestation.Identity, now time.Time) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("sign certificate: %w", err)
	}
	until := now.Add(certificateTTL)
	if until.After(a.cert.NotAfter) {
		until = a.cert.NotAfter
	}
	usage := x509.KeyUsageDigitalSignature
	if _, ok := r.PublicKey.(*rsa.PublicKey); ok {
		usage |= x509.KeyUsageKeyEncipherment
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: kubeletcsr.Subject(id.Name),
		DNSNames: []string{id.Name}, IPAddresses: []net.IP{id.IP.AsSlice()},
		NotBefore: now.Add(-clockSkew), NotAfter: until,
		KeyUsage: usage,
		// For serving only: as a client the node authenticates with its token.
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}, a.cert, r.PublicKey, a.key)
	if err != nil {
		return nil, fmt.Errorf("sign certificate: %w", err)
	}
	return der, nil
}

// controlPlaneFiles reads the files for a control plane. It is called only for those that may join, so the keys of the other authorities
// are in memory only while their ticket is issued.
func (a *authority) controlPlaneFiles() ([]*joinproto.File, error) {
	root, err := os.OpenRoot(a.dir)
	if err != nil {
		return nil, fmt.Errorf("open the cluster's PKI: %w", err)
	}
	defer root.Close()
	var files []*joinproto.File
	for _, name := range controlPlaneFiles {
		b, err := readFile(root, name)
		if err != nil {
			return nil, err
		}
		files = append(files, &joinproto.File{Name: name, Data: b})
	}
	return files, nil
}

// readFile reads a file of the PKI without following a link out of it.
func readFile(root *os.Root, name string) ([]byte, error) {
	b, err := root.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read %s of the cluster's PKI: %w", name, err)
	}
	return b, nil
}
