package evidence

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"

	"constellation/engine/cloud"
)

// Object identifiers of ours lie below 1.3.6.1.4.1.32473, which RFC 5612 sets
// aside and IANA never gives to anyone: nothing else can mean something by them.

// OID returns the object identifier of the certificate extension that carries a
// document of this variant.
func (v Variant) OID() encasn1.ObjectIdentifier {
	switch v {
	case TPM2:
		return encasn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 32473, 1, 1}
	case Enrolled:
		return encasn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 32473, 1, 2}
	case VendorTPM2:
		return encasn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 32473, 1, 3}
	case EmulatedVendorTPM2:
		return encasn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 32473, 1, 4}
	}
	return nil
}

// oidIdentity marks the extension of an attestation key's certificate that says
// which instance owns the TPM:
//
//	Instance ::= SEQUENCE {
//	  version    INTEGER (1),
//	  name       UTF8String,
//	  providerID UTF8String,
//	  uid        UTF8String,  -- of the sandbox or project
//	  group      UTF8String,
//	  role       UTF8String,
//	  ip         OCTET STRING -- 4 or 16 bytes
//	}
//
// Version 2 has the incarnation, a UTF8String, after these. Only certificates of a certifier have it.
func oidIdentity() encasn1.ObjectIdentifier {
	return encasn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 32473, 2, 1}
}

// oidAttestationKey is TCG's extended key usage tcg-kp-AIKCertificate. A
// certificate without it may be good for anything but not for quotes.
func oidAttestationKey() encasn1.ObjectIdentifier {
	return encasn1.ObjectIdentifier{2, 23, 133, 8, 3}
}

// oidVendorKey marks the certificate of an attestation key that a vendor certified for an instance, too: by it, the certifier
// of a cluster states what the vendor's API had about the instance. Kinds of enrolled machines have the numbers below it.
func oidVendorKey() encasn1.ObjectIdentifier {
	return encasn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 32473, 3, 3}
}

// Versions of an identity: without and with the incarnation.
const (
	identityVersion    = 1
	incarnationVersion = 2
)

func (id Identity) marshal() ([]byte, error) {
	if err := id.check(); err != nil {
		return nil, err
	}
	version := int64(identityVersion)
	if id.Incarnation != "" {
		version = incarnationVersion
	}
	var b cryptobyte.Builder
	b.AddASN1(asn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1Int64(version)
		for _, s := range []string{id.Name, id.ProviderID, id.UID, id.Group, string(id.Role)} {
			b.AddASN1(asn1.UTF8String, func(b *cryptobyte.Builder) { b.AddBytes([]byte(s)) })
		}
		b.AddASN1OctetString(id.IP.AsSlice())
		if version == incarnationVersion {
			b.AddASN1(asn1.UTF8String, func(b *cryptobyte.Builder) { b.AddBytes([]byte(id.Incarnation)) })
		}
	})
	return b.Bytes()
}

func parseIdentity(der []byte) (Identity, error) {
	var (
		in      = cryptobyte.String(der)
		body    cryptobyte.String
		version int64
		text    [5]cryptobyte.String
		ip      []byte
		number  cryptobyte.String
	)
	if !in.ReadASN1(&body, asn1.SEQUENCE) || !in.Empty() || !body.ReadASN1Integer(&version) {
		return Identity{}, errors.New("instance identity cannot be read")
	}
	if version != identityVersion && version != incarnationVersion {
		return Identity{}, fmt.Errorf("instance identity has version %d, this program reads versions %d and %d", version, identityVersion, incarnationVersion)
	}
	for i := range text {
		if !body.ReadASN1(&text[i], asn1.UTF8String) {
			return Identity{}, errors.New("instance identity cannot be read")
		}
	}
	if !readOctets(&body, &ip) || version == incarnationVersion && (!body.ReadASN1(&number, asn1.UTF8String) || len(number) == 0) || !body.Empty() {
		return Identity{}, errors.New("instance identity cannot be read")
	}
	addr, _ := netip.AddrFromSlice(ip) // check refuses the zero value
	id := Identity{
		Name:        string(text[0]),
		ProviderID:  string(text[1]),
		Incarnation: string(number),
		UID:         string(text[2]),
		Group:       string(text[3]),
		Role:        cloud.Role(text[4]),
		IP:          addr,
	}
	return id, id.check()
}

const (
	caLife = 10 * 365 * 24 * time.Hour
	// caSkew is how far a certificate starts in the past, for clocks that are late.
	caSkew = time.Hour
)

// CA is the cloud's authority that certifies attestation keys. Its methods may be
// called concurrently.
type CA struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// CreateCA makes a new authority with a P-256 key, valid for ten years. The key
// is in PKCS #8 and must be kept as secret as the cloud itself: who holds it can
// make evidence for any machine.
func CreateCA(name string) (certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("create key of the CA: %w", err)
	}
	return CreateCAOf(name, key)
}

// CreateCAOf is CreateCA with a key that exists.
func CreateCAOf(name string, key *ecdsa.PrivateKey) (certPEM, keyPEM []byte, err error) {
	now := time.Now()
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             now.Add(-caSkew),
		NotAfter:              now.Add(caLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}, &x509.Certificate{Subject: pkix.Name{CommonName: name}}, key.Public(), key)
	if err != nil {
		return nil, nil, fmt.Errorf("create certificate of the CA: %w", err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("encode key of the CA: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}), nil
}

// ParseCA reads what CreateCA returned.
func ParseCA(certPEM, keyPEM []byte) (*CA, error) {
	certs, err := parseCertificates(certPEM)
	if err != nil {
		return nil, fmt.Errorf("read certificate of the CA: %w", err)
	}
	if len(certs) != 1 || !certs[0].IsCA {
		return nil, errors.New("read certificate of the CA: want exactly one certificate of an authority")
	}
	block, rest := pem.Decode(keyPEM)
	if block == nil || block.Type != "PRIVATE KEY" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("read key of the CA: want exactly one PEM block PRIVATE KEY")
	}
	k, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("read key of the CA: it is not PKCS #8") // the cause could quote the key
	}
	key, ok := k.(*ecdsa.PrivateKey)
	if !ok || !key.PublicKey.Equal(certs[0].PublicKey) {
		return nil, errors.New("read key of the CA: it does not belong to the certificate")
	}
	return &CA{cert: certs[0], key: key}, nil
}

// Roots returns a pool with the authority's certificate, for validators.
func (ca *CA) Roots() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(ca.cert)
	return p
}

// ParseRoots reads trust roots from PEM. Anything but certificates of authorities
// and white space is an error, and so is an empty list.
func ParseRoots(pemBytes []byte) (*x509.CertPool, error) {
	certs, err := parseCertificates(pemBytes)
	if err != nil {
		return nil, fmt.Errorf("read trust roots: %w", err)
	}
	if len(certs) == 0 {
		return nil, errors.New("read trust roots: there is no certificate")
	}
	p := x509.NewCertPool()
	for _, c := range certs {
		if !c.IsCA {
			return nil, fmt.Errorf("read trust roots: %q is not the certificate of an authority", c.Subject)
		}
		p.AddCert(c)
	}
	return p, nil
}

func parseCertificates(pemBytes []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	begin := []byte("-----BEGIN ")
	for rest := bytes.TrimSpace(pemBytes); len(rest) > 0; {
		b, after := pem.Decode(rest)
		if b == nil {
			return nil, errors.New("it is not PEM")
		}
		// The decoder skips what it does not understand, a damaged block as well.
		if read := rest[:len(rest)-len(after)]; !bytes.HasPrefix(read, begin) || bytes.Count(read, begin) != 1 {
			return nil, errors.New("it holds a damaged PEM block, or text beside its PEM blocks")
		}
		rest = bytes.TrimSpace(after)
		if b.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("it holds a PEM block %s", b.Type)
		}
		c, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return nil, err
		}
		certs = append(certs, c)
	}
	return certs, nil
}

// certify returns the certificate, in DER, that says that key is the key of the
// instance id, and of which kind: usage is its extended key usage. It is valid as long as the authority: the key lives as
// long as its TPM, which the cloud destroys with the instance.
func (ca *CA) certify(key crypto.PublicKey, usage encasn1.ObjectIdentifier, id Identity) ([]byte, error) {
	if id.Incarnation != "" {
		return nil, errors.New("a certificate of this usage has no field for the incarnation of an instance")
	}
	return ca.certifyUntil(key, usage, id, ca.cert.NotAfter)
}

// certifyUntil is certify with an end.
func (ca *CA) certifyUntil(key crypto.PublicKey, usage encasn1.ObjectIdentifier, id Identity, notAfter time.Time) ([]byte, error) {
	ext, err := id.marshal()
	if err != nil {
		return nil, err
	}
	notBefore := time.Now().Add(-caSkew)
	if notBefore.Before(ca.cert.NotBefore) {
		notBefore = ca.cert.NotBefore
	}
	if notAfter.After(ca.cert.NotAfter) {
		notAfter = ca.cert.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		Subject:               pkix.Name{CommonName: id.Name},
		NotBefore:             notBefore,
		NotAfter:              notAfter,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		UnknownExtKeyUsage:    []encasn1.ObjectIdentifier{usage},
		BasicConstraintsValid: true,
		ExtraExtensions:       []pkix.Extension{{Id: oidIdentity(), Value: ext}},
	}, ca.cert, key, ca.key)
	if err != nil {
		return nil, err
	}
	if len(der) > maxCertificate {
		return nil, fmt.Errorf("certificate has %d bytes, at most %d are allowed", len(der), maxCertificate)
	}
	return der, nil
}

// verifyKey checks that one of roots certified the key in der for usage, and returns
// the certificate and the instance that it names.
func verifyKey(der []byte, usage encasn1.ObjectIdentifier, roots *x509.CertPool, now time.Time) (*x509.Certificate, Identity, error) {
	c, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, Identity{}, err
	}
	id, err := certified(c)
	switch {
	case err != nil:
		return nil, Identity{}, err
	case c.IsCA || c.KeyUsage&x509.KeyUsageDigitalSignature == 0:
		return nil, Identity{}, errors.New("its certificate is not one of a signing key")
	case !slices.ContainsFunc(c.UnknownExtKeyUsage, usage.Equal):
		return nil, Identity{}, fmt.Errorf("its certificate is not one of an attestation key (usage %s)", usage)
	case (id.Incarnation != "") != usage.Equal(oidVendorKey()):
		return nil, Identity{}, errors.New("its certificate names an incarnation that its usage does not have, or lacks one")
	}
	if _, err := c.Verify(x509.VerifyOptions{
		Roots:       roots,
		CurrentTime: now,
		KeyUsages:   []x509.ExtKeyUsage{x509.ExtKeyUsageAny}, // ours was checked above; the package knows only its own
	}); err != nil {
		return nil, Identity{}, err
	}
	return c, id, nil
}

// certified returns the instance that a certificate names.
func certified(c *x509.Certificate) (Identity, error) {
	for _, e := range c.Extensions {
		if e.Id.Equal(oidIdentity()) { // the parser refuses certificates that repeat an extension
			return parseIdentity(e.Value)
		}
	}
	return Identity{}, fmt.Errorf("its certificate names no instance (extension %s)", oidIdentity())
}
