package kubeletcsr

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"net/url"
	"strings"
	"testing"
)

func request(t *testing.T, key crypto.Signer, edit func(*x509.CertificateRequest)) []byte {
	t.Helper()
	r := &x509.CertificateRequest{Subject: Subject("worker-0"), DNSNames: []string{"worker-0"}}
	if edit != nil {
		edit(r)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, r, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestParse(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("GODEBUG", "rsa1024min=0")
	weak, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	good := request(t, key, nil)
	forged := append([]byte(nil), good...)
	forged[len(forged)-1] ^= 1
	for _, tt := range []struct {
		name, want string
		der        []byte
	}{
		{name: "a request of an ECDSA key", want: "", der: good},
		{name: "no request", want: "PKCS #10", der: []byte("nothing")},
		{name: "a forged signature", want: "signature is wrong", der: forged},
		{name: "a weak RSA key", want: "1024 bits, want at least 2048", der: request(t, weak, nil)},
	} {
		_, err := Parse(tt.der)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

func TestSubjectAndNames(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name           string
		edit           func(*x509.CertificateRequest)
		subject, names bool
	}{
		{name: "a kubelet request", subject: true, names: true},
		{name: "another node", edit: func(r *x509.CertificateRequest) { r.Subject = Subject("worker-1") }, names: true},
		{name: "a second group", edit: func(r *x509.CertificateRequest) {
			r.Subject = pkix.Name{CommonName: UserPrefix + "worker-0", Organization: []string{Group, "system:masters"}}
		}, names: true},
		{name: "a URI", edit: func(r *x509.CertificateRequest) { r.URIs = []*url.URL{{Scheme: "spiffe", Host: "x"}} }, subject: true},
		{name: "an e-mail address", edit: func(r *x509.CertificateRequest) { r.EmailAddresses = []string{"a@b.example"} }, subject: true},
	} {
		r, err := Parse(request(t, key, tt.edit))
		if err != nil {
			t.Fatal(err)
		}
		if got := HasSubject(r, UserPrefix+"worker-0"); got != tt.subject {
			t.Errorf("%s: has the subject is %t, want %t", tt.name, got, tt.subject)
		}
		if err := CheckServerNames(r); (err == nil) != tt.names {
			t.Errorf("%s: names: %v", tt.name, err)
		}
	}
}
