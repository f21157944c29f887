package attest

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"io"
	mathrand "math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/attest/attesttest"
	"constellation/internal/mutation"
)

var worker = attesttest.Machine{Project: "demo-project", Zone: "europe-west3-a", Name: "workers-0123", ProjectNumber: 42, Number: 1 << 62}

func newAuthority(t testing.TB) *attesttest.Authority {
	t.Helper()
	a, err := attesttest.New()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func poolOf(list ...*x509.Certificate) *x509.CertPool {
	p := x509.NewCertPool()
	for _, c := range list {
		p.AddCert(c)
	}
	return p
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// issue returns the certificate that a makes from a template.
func issue(t testing.TB, a *attesttest.Authority, template *x509.Certificate) *x509.Certificate {
	t.Helper()
	der, err := a.Sign(template, newKey(t).Public())
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// tpmName is the alternative name of a TPM: sets of attributes in a directory name.
func tpmName(t testing.TB, attributes ...string) pkix.Extension {
	t.Helper()
	var rdns pkix.RDNSequence
	for n, v := range attributes {
		rdns = append(rdns, pkix.RelativeDistinguishedNameSET{{Type: asn1.ObjectIdentifier{2, 23, 133, 2, n + 1}, Value: asn1.RawValue{Tag: asn1.TagUTF8String, Bytes: []byte(v)}}})
	}
	name, err := asn1.Marshal(rdns)
	if err != nil {
		t.Fatal(err)
	}
	directory, err := asn1.Marshal(asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 4, IsCompound: true, Bytes: name})
	if err != nil {
		t.Fatal(err)
	}
	names, err := asn1.Marshal(asn1.RawValue{Tag: asn1.TagSequence, IsCompound: true, Bytes: directory})
	if err != nil {
		t.Fatal(err)
	}
	return pkix.Extension{Id: oidAlternativeName(), Critical: true, Value: names}
}

func TestCertificates(t *testing.T) {
	a := newAuthority(t)
	extend := func(c *x509.Certificate, e pkix.Extension) { c.ExtraExtensions = append(c.ExtraExtensions, e) }
	extension := func(f func(*attesttest.Machine)) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			m := worker
			f(&m)
			*c = *attesttest.Template(m)
		}
	}
	for _, tt := range []struct {
		name string
		edit func(*x509.Certificate)
		text string // empty: accepted
	}{
		{name: "as Google makes it", edit: func(*x509.Certificate) {}},
		{name: "without a subject", edit: func(c *x509.Certificate) { c.Subject = pkix.Name{} }},
		{name: "with the usage of endorsement keys", edit: func(c *x509.Certificate) { c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{oidEKCertificate()} }},
		{name: "with the usage of attestation keys", edit: func(c *x509.Certificate) { c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{oidAIKCertificate()} }},
		{name: "with the name of the TPM", edit: func(c *x509.Certificate) { extend(c, tpmName(t, manufacturer, model, "id:20160511")) }},

		{name: "of a TPM of another manufacturer", edit: func(c *x509.Certificate) { extend(c, tpmName(t, "id:49424D00", model, "id:20160511")) }, text: "alternative name"},
		{name: "of a TPM of another model", edit: func(c *x509.Certificate) { extend(c, tpmName(t, manufacturer, "swtpm", "id:20160511")) }, text: "alternative name"},
		{name: "of a TPM without a version", edit: func(c *x509.Certificate) { extend(c, tpmName(t, manufacturer, model)) }, text: "alternative name"},
		{name: "with another critical extension", edit: func(c *x509.Certificate) {
			extend(c, pkix.Extension{Id: asn1.ObjectIdentifier{1, 2, 3}, Critical: true, Value: []byte{5, 0}})
		}, text: "unhandled critical"},
		{name: "of an authority", edit: func(c *x509.Certificate) { c.IsCA = true }, text: "signing key alone"},
		{name: "of a key that decrypts", edit: func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement }, text: "signing key alone"},
		{name: "of a key that does both", edit: func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageKeyEncipherment }, text: "signing key alone"},
		{name: "without a key usage", edit: func(c *x509.Certificate) { c.KeyUsage = 0 }, text: "signing key alone"},
		{name: "of a server", edit: func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }, text: "another usage"},
		{name: "for an unknown usage", edit: func(c *x509.Certificate) { c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{1, 2, 3}} }, text: "another usage"},
		{name: "that is over", edit: func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }, text: "compare the clock"},
		{name: "without an instance", edit: func(c *x509.Certificate) { c.ExtraExtensions = nil }, text: "Shielded VM"},
		{name: "with the subject of another zone", edit: func(c *x509.Certificate) { c.Subject.Locality = []string{"europe-west3-b"} }, text: "names another instance"},
		{name: "with the subject of another project", edit: func(c *x509.Certificate) { c.Subject.OrganizationalUnit = []string{"other"} }, text: "names another instance"},
		{name: "with the subject of another number", edit: func(c *x509.Certificate) { c.Subject.CommonName = "7" }, text: "names another instance"},
		{name: "with the subject of another product", edit: func(c *x509.Certificate) { c.Subject.Organization = []string{"Test"} }, text: "names another instance"},
		{name: "with more in its subject", edit: func(c *x509.Certificate) { c.Subject.Country = []string{"US"} }, text: "names another instance"},
		{name: "with a path in the name", edit: extension(func(m *attesttest.Machine) { m.Name = "a/b" }), text: "no instance can be"},
		{name: "with a fragment in the name", edit: extension(func(m *attesttest.Machine) { m.Name = "a#1" }), text: "no instance can be"},
		{name: "with an empty zone", edit: extension(func(m *attesttest.Machine) { m.Zone = "" }), text: "no instance can be"},
		{name: "with a line break in the project", edit: extension(func(m *attesttest.Machine) { m.Project = "demo\n" }), text: "no instance can be"},
		{name: "with the number zero", edit: extension(func(m *attesttest.Machine) { m.Number = 0 }), text: "impossible"},
		{name: "of a TPM that is not in production", edit: func(c *x509.Certificate) {
			v := slices.Clone(c.ExtraExtensions[0].Value)
			n := strings.Index(string(v), "\xa1\x03\x01\x01\xff")
			v[n+4] = 0
			c.ExtraExtensions[0].Value = v
		}, text: "not in production"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			template := attesttest.Template(worker)
			tt.edit(template)
			i, err := certified([]*x509.Certificate{issue(t, a, template), a.Intermediate}, poolOf(a.Root), time.Now())
			switch {
			case tt.text == "" && (err != nil || i != (instance{worker.Zone, worker.Project, worker.Name, worker.ProjectNumber, worker.Number})):
				t.Errorf("got %+v, %v", i, err)
			case tt.text != "" && (err == nil || !strings.Contains(err.Error(), tt.text)):
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
}

func TestChains(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	leaf := issue(t, a, attesttest.Template(worker))
	for _, tt := range []struct {
		name  string
		chain []*x509.Certificate
		roots *x509.CertPool
		text  string
	}{
		{name: "with its authority", chain: []*x509.Certificate{leaf, a.Intermediate}, roots: poolOf(a.Root)},
		{name: "with the root, too", chain: []*x509.Certificate{leaf, a.Intermediate, a.Root}, roots: poolOf(a.Root)},
		{name: "without its authority", chain: []*x509.Certificate{leaf}, roots: poolOf(a.Root), text: "unknown authority"},
		{name: "with another authority of that name", chain: []*x509.Certificate{leaf, other.Intermediate}, roots: poolOf(other.Root), text: "unknown authority"},
		{name: "with one authority more", chain: []*x509.Certificate{leaf, a.Intermediate, other.Intermediate}, roots: poolOf(a.Root), text: "do not vouch"},
		{name: "for Google's roots", chain: []*x509.Certificate{leaf, a.Intermediate, a.Root}, roots: roots(t), text: "trustRoots"},
		{name: "for the roots of the operating system", chain: []*x509.Certificate{leaf, a.Intermediate}, roots: x509.NewCertPool(), text: "trustRoots"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := certified(tt.chain, tt.roots, time.Now())
			if tt.text == "" && err != nil || tt.text != "" && (err == nil || !strings.Contains(err.Error(), tt.text)) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
}

// TestMutatedExtensions has a trusted authority sign mutated extensions. No mutation may be read as the same
// instance, except in properties that are not judged.
func TestMutatedExtensions(t *testing.T) {
	original := attesttest.Extension(worker)
	want, err := parseInstance(original)
	if err != nil {
		t.Fatal(err)
	}
	names := original[2 : strings.Index(string(original), worker.Name)+len(worker.Name)] // from the zone to the name
	var refused, others, same int
	for seed := range 100_000 {
		r := mathrand.New(mathrand.NewPCG(uint64(seed), 24))
		b := mutation.Bytes(r, original)
		got, err := parseInstance(b)
		switch {
		case err != nil:
			refused++
		case got != want:
			others++ // the API decides
		default:
			same++
			if !bytes.Contains(b, names) {
				t.Errorf("seed %d is another spelling of the same instance: %x", seed, b)
			}
		}
	}
	t.Logf("%d refused, %d other instances, %d with other properties", refused, others, same)
}

func FuzzParseInstance(f *testing.F) {
	f.Add(attesttest.Extension(worker))
	f.Fuzz(func(t *testing.T, b []byte) {
		i, err := parseInstance(b)
		if err != nil {
			return
		}
		if p, z, n, ok := gcp.ParseProviderID(gcp.ProviderID(i.project, i.zone, i.name)); !ok || p != i.project || z != i.zone || n != i.name {
			t.Errorf("%+v has no provider ID", i)
		}
	})
}

// files answers requests from a map of addresses.
type files map[string]string

// RoundTrip implements http.RoundTripper.
func (f files) RoundTrip(r *http.Request) (*http.Response, error) {
	body, ok := f[r.URL.String()]
	code := http.StatusOK
	if !ok {
		code = http.StatusNotFound
	}
	return &http.Response{StatusCode: code, Status: http.StatusText(code), Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
}

func TestCertificatesOfUnknownAuthoritiesAreFetched(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	for _, tt := range []struct {
		name    string
		address string
		body    string
		text    string
	}{
		{name: "in DER", address: attesttest.Address, body: string(a.Intermediate.Raw)},
		{name: "over TLS", address: "https://pki.goog/cloud_integrity/ca.crt", body: string(a.Intermediate.Raw)},
		{name: "of another authority", address: attesttest.Address, body: string(other.Intermediate.Raw), text: "not the issuer's"},
		{name: "no certificate", address: attesttest.Address, body: "<html>", text: "fetch certificate"},
		{name: "too large", address: attesttest.Address, body: strings.Repeat("a", maxFetched+1), text: "more than"},
		{name: "missing", address: attesttest.Address, text: "allow machines to reach"},
		{name: "elsewhere", address: "http://example.com/ca.crt", text: "no address of Google"},
		{name: "at another port", address: "http://pki.goog:8080/ca.crt", text: "no address of Google"},
		{name: "in a file", address: "file:///etc/passwd", text: "no address of Google"},
		{name: "at a name that ends alike", address: "http://pki.goog.example.com/ca.crt", text: "no address of Google"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			template := attesttest.Template(worker)
			template.IssuingCertificateURL = []string{tt.address}
			served := files{}
			if tt.body != "" {
				served[tt.address] = tt.body
			}
			got, err := fetcher{&http.Client{Transport: served}}.intermediates(t.Context(), issue(t, a, template))
			switch {
			case tt.text == "" && (err != nil || len(got) != 1 || string(got[0]) != string(a.Intermediate.Raw)):
				t.Errorf("got %d certificates, %v", len(got), err)
			case tt.text != "" && (!errors.Is(err, cloud.ErrUnavailable) || !strings.Contains(err.Error(), tt.text)):
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
	// Recorded certificates need nothing.
	c, err := x509.ParseCertificate(sample(t, recorded, sha256Bank).Certificate)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := (fetcher{&http.Client{Transport: files{}}}).intermediates(t.Context(), c); err != nil || len(got) > 0 {
		t.Errorf("got %d certificates, %v", len(got), err)
	}
}
