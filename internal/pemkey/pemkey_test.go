package pemkey

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"testing"
)

func TestParse(t *testing.T) {
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	block := func(kind string, der []byte, err error) []byte {
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	}
	sec1, err := x509.MarshalECPrivateKey(ec)
	ecPEM := block("EC PRIVATE KEY", sec1, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(ec)
	pkcs8PEM := block("PRIVATE KEY", pkcs8, err)
	damaged := block("EC PRIVATE KEY", sec1[:20], nil)
	for _, tt := range []struct {
		name string
		data []byte
		want crypto.Signer // nil: no key
	}{
		{name: "SEC 1", data: ecPEM, want: ec},
		{name: "SEC 1 after parameters", data: append(block("EC PARAMETERS", []byte{6, 0}, nil), ecPEM...), want: ec},
		{name: "PKCS #1", data: block("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(rsaKey), nil), want: rsaKey},
		{name: "PKCS #8", data: pkcs8PEM, want: ec},
		{name: "a damaged key hides the next one", data: append(damaged, pkcs8PEM...)},
		{name: "a certificate only", data: block("CERTIFICATE", sec1, nil)},
		{name: "no PEM", data: []byte("key")},
		{name: "empty"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := Parse(tt.data)
			if ok != (tt.want != nil) {
				t.Fatalf("Parse reported %v, want %v", ok, tt.want != nil)
			}
			if ok && !got.Public().(interface{ Equal(crypto.PublicKey) bool }).Equal(tt.want.Public()) {
				t.Error("Parse returned another key")
			}
		})
	}
}
