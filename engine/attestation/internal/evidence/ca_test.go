package evidence

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/pem"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestCreateCA(t *testing.T) {
	certPEM, keyPEM, err := CreateCA("sandbox demo")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := ParseCA(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	if ca.cert.Subject.CommonName != "sandbox demo" || !ca.cert.IsCA || !ca.cert.MaxPathLenZero {
		t.Errorf("its certificate is of %v", ca.cert.Subject)
	}
	if left := time.Until(ca.cert.NotAfter); left < caLife-time.Minute || left > caLife {
		t.Errorf("it is valid for %v", left)
	}
	if bytes.Contains(certPEM, []byte("PRIVATE")) {
		t.Error("the key is in the file of the certificate")
	}
	roots, err := ParseRoots(certPEM)
	if err != nil {
		t.Fatal(err)
	}
	if !roots.Equal(ca.Roots()) {
		t.Error("the roots are others")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := ca.certify(key.Public(), oidAttestationKey(), worker(0))
	if err != nil {
		t.Fatal(err)
	}
	c, id, err := verifyKey(der, oidAttestationKey(), roots, ca.cert.NotAfter.Add(-time.Second))
	if err != nil || id != worker(0) {
		t.Fatalf("at the end of its life the certificate says %v, %v", id, err)
	}
	if c.NotBefore.Before(ca.cert.NotBefore) || c.NotAfter.After(ca.cert.NotAfter) {
		t.Errorf("it is valid from %v to %v, the authority from %v to %v", c.NotBefore, c.NotAfter, ca.cert.NotBefore, ca.cert.NotAfter)
	}
	bad := worker(0)
	bad.Group = strings.Repeat("g", maxIdentityField+1)
	if _, err := ca.certify(key.Public(), oidAttestationKey(), bad); err == nil || !strings.Contains(err.Error(), "group of the instance has 257 bytes") {
		t.Errorf("certified %d bytes: %v", len(bad.Group), err)
	}
}

func TestFilesOfAuthorities(t *testing.T) {
	cert, key, err := CreateCA("cloud")
	if err != nil {
		t.Fatal(err)
	}
	cert2, key2, err := CreateCA("another cloud")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := ParseCA(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	ak, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := ca.certify(ak.Public(), oidAttestationKey(), worker(0))
	if err != nil {
		t.Fatal(err)
	}
	leaf := pemBlock("CERTIFICATE", der)
	for _, tt := range []struct {
		name      string
		cert, key []byte
		text      string // empty: it is read
	}{
		{name: "an authority", cert: cert, key: key},
		{name: "an authority with white space behind it", cert: append(bytes.Clone(cert), '\n', ' '), key: append(bytes.Clone(key), '\n')},
		{name: "the key of another authority", cert: cert, key: key2, text: "does not belong to the certificate"},
		{name: "two certificates", cert: append(bytes.Clone(cert), cert2...), key: key, text: "exactly one certificate"},
		{name: "the certificate of a machine", cert: leaf, key: key, text: "certificate of an authority"},
		{name: "no certificate", key: key, text: "exactly one certificate"},
		{name: "a key in place of the certificate", cert: key, key: key, text: "PEM block PRIVATE KEY"},
		{name: "a certificate in place of the key", cert: cert, key: cert, text: "PEM block PRIVATE KEY"},
		{name: "two keys", cert: cert, key: append(bytes.Clone(key), key...), text: "exactly one PEM block"},
		{name: "a key that is noise", cert: cert, key: pemBlock("PRIVATE KEY", []byte("noise")), text: "not PKCS #8"},
		{name: "a certificate that is noise", cert: pemBlock("CERTIFICATE", []byte("noise")), key: key, text: "read certificate of the CA"},
		{name: "no PEM", cert: []byte("hello"), key: key, text: "not PEM"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ParseCA(tt.cert, tt.key)
			if (err == nil) != (tt.text == "") || err != nil && !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
	for _, tt := range []struct {
		name string
		pem  []byte
		text string
	}{
		{name: "one certificate", pem: cert, text: ""},
		{name: "two certificates", pem: append(bytes.Clone(cert), cert2...), text: ""},
		{name: "no certificate", text: "there is no certificate"},
		{name: "the certificate of a machine", pem: append(bytes.Clone(cert), leaf...), text: "is not the certificate of an authority"},
		{name: "certificates with a key among them", pem: append(bytes.Clone(cert), key...), text: "PEM block PRIVATE KEY"},
		{name: "certificates with noise behind them", pem: append(bytes.Clone(cert), "noise"...), text: "not PEM"},
		{name: "certificates with noise before them", pem: append([]byte("noise\n"), cert...), text: "text beside its PEM blocks"},
		{name: "certificates with noise between them", pem: slices.Concat(cert, []byte("noise\n"), cert2), text: "text beside its PEM blocks"},
		{name: "certificates with a damaged one between them", pem: slices.Concat(cert, bytes.Replace(cert2, []byte("MII"), []byte("!!!"), 1), cert2), text: "damaged PEM block"},
		{name: "certificates with white space between them", pem: slices.Concat([]byte("\n"), cert, []byte("\r\n \n"), cert2), text: ""},
	} {
		t.Run("roots: "+tt.name, func(t *testing.T) {
			_, err := ParseRoots(tt.pem)
			if (err == nil) != (tt.text == "") || err != nil && !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
}

func TestIdentitiesAreRefused(t *testing.T) {
	good, err := worker(0).marshal()
	if err != nil {
		t.Fatal(err)
	}
	long := append(bytes.Clone(good), 0x0c, 0)
	long[1] += 2
	for _, tt := range []struct {
		name, text string
		b          []byte
	}{
		{name: "another version", text: "version 3", b: edited(good, 4, 3)},
		{name: "version 2 without an incarnation", text: "cannot be read", b: edited(good, 4, 2)},
		{name: "version 2 with an empty incarnation", text: "cannot be read", b: edited(long, 4, 2)},
		{name: "something behind the last field", text: "cannot be read", b: long},
		{name: "something behind the identity", text: "cannot be read", b: append(bytes.Clone(good), 0)},
		{name: "a field of another type", text: "cannot be read", b: edited(good, 5, 0x13)},
		{name: "an address of five bytes", text: "cannot be read", b: edited(good, len(good)-5, 5)},
		{name: "an empty identity", text: "cannot be read"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := parseIdentity(tt.b); err == nil || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
}

func pemBlock(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
