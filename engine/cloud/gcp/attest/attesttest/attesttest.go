// Package attesttest imitates Google's authorities and the memory of its virtual TPMs, for tests and for sandboxes that emulate
// Google Cloud.
//
// With it, evidence of any machine can be forged for a program that trusts one of its roots. No production
// program imports it; a test of the module checks that.
package attesttest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/crypto/cryptobyte"
	der "golang.org/x/crypto/cryptobyte/asn1"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
)

// Address is where certificates name the authority that issued them. Nothing is there.
const Address = "http://privateca-content-test.storage.googleapis.com/ca.crt"

// Machine is what a certificate says about a machine.
type Machine struct {
	Project, Zone, Name   string
	ProjectNumber, Number uint64
}

// Authority certifies keys of virtual TPMs as Google does since the end of 2022.
type Authority struct {
	Root, Intermediate *x509.Certificate
	key                *ecdsa.PrivateKey // of Intermediate
}

// New makes an authority that is valid from an hour ago on, for ten years.
func New() (*Authority, error) {
	google := func(name string) pkix.Name {
		return pkix.Name{Country: []string{"US"}, Organization: []string{"Test LLC"}, CommonName: name}
	}
	root, rootKey, err := authority(google("EK/AK CA Root"), nil, nil)
	if err != nil {
		return nil, err
	}
	c, key, err := authority(google("EK/AK CA Intermediate"), root, rootKey)
	if err != nil {
		return nil, err
	}
	return &Authority{Root: root, Intermediate: c, key: key}, nil
}

// Of returns the authority that certifies keys itself with what attestationtest.CreateCA returned.
func Of(certPEM, keyPEM []byte) (*Authority, error) {
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("read authority: %w", err)
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("read authority: its key is a %T", pair.PrivateKey)
	}
	return &Authority{Root: pair.Leaf, Intermediate: pair.Leaf, key: key}, nil
}

// authority makes the certificate of an authority. Without a parent it signs itself.
func authority(name pkix.Name, parent *x509.Certificate, signer crypto.Signer) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("create key of %s: %w", name, err)
	}
	t := &x509.Certificate{
		Subject: name, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, UnknownExtKeyUsage: []asn1.ObjectIdentifier{{2, 23, 133, 8, 1}}, BasicConstraintsValid: true, IsCA: true,
	}
	if parent == nil {
		parent, signer = t, key
	}
	b, err := x509.CreateCertificate(rand.Reader, t, parent, key.Public(), signer)
	if err != nil {
		return nil, nil, fmt.Errorf("create certificate of %s: %w", name, err)
	}
	c, err := x509.ParseCertificate(b)
	return c, key, err
}

// RootPEM returns the certificate of the root in PEM.
func (a *Authority) RootPEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Root.Raw})
}

// Template returns the certificate of an attestation key of m before it is signed.
func Template(m Machine) *x509.Certificate {
	return &x509.Certificate{
		Subject: pkix.Name{
			Locality: []string{m.Zone}, Organization: []string{"Google Compute Engine"}, OrganizationalUnit: []string{m.Project}, CommonName: strconv.FormatUint(m.Number, 10),
		},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(9, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true, IssuingCertificateURL: []string{Address},
		ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 11129, 2, 1, 21}, Value: Extension(m)}},
	}
}

// Extension returns the extension that names m.
func Extension(m Machine) []byte {
	var b cryptobyte.Builder
	text := func(b *cryptobyte.Builder, s string) {
		b.AddASN1(der.UTF8String, func(b *cryptobyte.Builder) { b.AddBytes([]byte(s)) })
	}
	tag := func(n int) der.Tag { return der.Tag(n).Constructed().ContextSpecific() }
	b.AddASN1(der.SEQUENCE, func(b *cryptobyte.Builder) {
		text(b, m.Zone)
		b.AddASN1Uint64(m.ProjectNumber)
		text(b, m.Project)
		b.AddASN1Uint64(m.Number)
		text(b, m.Name)
		b.AddASN1(tag(0), func(b *cryptobyte.Builder) {
			b.AddASN1(der.SEQUENCE, func(b *cryptobyte.Builder) {
				b.AddASN1(tag(0), func(b *cryptobyte.Builder) { b.AddASN1Int64(0) })
				for n := 1; n <= 5; n++ {
					b.AddASN1(tag(n), func(b *cryptobyte.Builder) { b.AddASN1Boolean(n <= 2) })
				}
			})
		})
	})
	return b.BytesOrPanic()
}

// Sign returns the certificate of a key in DER.
func (a *Authority) Sign(t *x509.Certificate, key crypto.PublicKey) ([]byte, error) {
	b, err := x509.CreateCertificate(rand.Reader, t, a.Intermediate, key, a.key)
	if err != nil {
		return nil, fmt.Errorf("certify attestation key: %w", err)
	}
	return b, nil
}

// Provision has the TPM at address make the attestation key of m, of RSA or on P-256, and stores it where
// Google's virtual TPMs have it. It must precede attestationtest.HandOver in a boot.
func (a *Authority) Provision(ctx context.Context, address string, m Machine, rsa bool) error {
	return a.ProvisionTemplate(ctx, address, Template(m), rsa)
}

// ProvisionTemplate is Provision with a certificate before it is signed.
func (a *Authority) ProvisionTemplate(ctx context.Context, address string, t *x509.Certificate, rsa bool) error {
	at := attestation.NVKey{Certificate: 0x01c10002, Template: 0x01c10003}
	if rsa {
		at = attestation.NVKey{Certificate: 0x01c10000, Template: 0x01c10001}
	}
	return attestationtest.ProvisionKey(ctx, address, at, rsa, func(key crypto.PublicKey) ([]byte, error) { return a.Sign(t, key) })
}

// SecureBoot returns what firmware measures first into register 7.
func SecureBoot(on bool) []byte {
	value := byte(0)
	if on {
		value = 1
	}
	b := []byte{0x61, 0xdf, 0xe4, 0x8b, 0xca, 0x93, 0xd2, 0x11, 0xaa, 0x0d, 0x00, 0xe0, 0x98, 0x03, 0x2b, 0x8c, 10, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}
	for _, c := range []byte("SecureBoot") {
		b = append(b, c, 0)
	}
	return append(b, value)
}
