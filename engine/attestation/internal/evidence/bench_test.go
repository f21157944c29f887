package evidence

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"testing"
)

// BenchmarkValidate is one document of a machine that was not seen before: both
// signatures and the chain are checked.
func BenchmarkValidate(b *testing.B) {
	ca := newCA(b, "cloud")
	i, err := NewSoftwareIssuer(ca, worker(0), boot(), nil)
	if err != nil {
		b.Fatal(err)
	}
	d, err := i.Issue(context.Background(), nonce)
	if err != nil {
		b.Fatal(err)
	}
	v := NewTPMValidator(ca.Roots(), images(), Options{})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := v.Validate(context.Background(), d, nonce); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkValidateBareSignatures is what validation cannot do without: two
// signatures of P-256.
func BenchmarkValidateBareSignatures(b *testing.B) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		b.Fatal(err)
	}
	h := digest("x")
	sig, err := ecdsa.SignASN1(rand.Reader, k, h)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		for range 2 {
			if !ecdsa.VerifyASN1(&k.PublicKey, h, sig) {
				b.Fatal("signature does not fit")
			}
		}
	}
}

// BenchmarkRefuse is what a stranger costs who sends evidence of another connection.
func BenchmarkRefuse(b *testing.B) {
	ca := newCA(b, "cloud")
	i, err := NewSoftwareIssuer(ca, worker(0), boot(), nil)
	if err != nil {
		b.Fatal(err)
	}
	d, err := i.Issue(context.Background(), make([]byte, 32))
	if err != nil {
		b.Fatal(err)
	}
	v := NewTPMValidator(ca.Roots(), images(), Options{})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := v.Validate(context.Background(), d, nonce); err == nil {
			b.Fatal("accepted")
		}
	}
}

func BenchmarkIssueSoftware(b *testing.B) {
	i, err := NewSoftwareIssuer(newCA(b, "cloud"), worker(0), boot(), nil)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := i.Issue(context.Background(), nonce); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkIssueTPM is a quote of an emulated TPM, with opening, the key, and all
// registers.
func BenchmarkIssueTPM(b *testing.B) {
	i := NewTPMIssuer(bootedTPM(b, newCA(b, "cloud"), worker(0)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := i.Issue(context.Background(), nonce); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkIssueTPMContended has several users of one TPM at a time.
func BenchmarkIssueTPMContended(b *testing.B) {
	i := NewTPMIssuer(bootedTPM(b, newCA(b, "cloud"), worker(0)))
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := i.Issue(context.Background(), nonce); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
