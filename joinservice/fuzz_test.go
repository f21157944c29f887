package joinservice

import (
	"crypto/x509"
	"testing"
	"unicode"
	"unicode/utf8"
)

// FuzzRequest checks that an accepted request names its machine and no other, whatever the
// machine sends.
func FuzzRequest(f *testing.F) {
	f.Add(csr(f, worker1, p256(f), nil))
	f.Add(csr(f, worker1, p256(f), func(r *x509.CertificateRequest) { r.DNSNames = nil }))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, der []byte) {
		r, err := parseRequest(der, worker1)
		if err != nil {
			return
		}
		if r.Subject.CommonName != "system:node:worker-1" || len(r.Subject.Names) != 2 || len(r.DNSNames) != 1 || len(r.IPAddresses) != 1 || r.PublicKey == nil {
			t.Errorf("accepted %+v", r)
		}
	})
}

// FuzzPrintable checks that no text in a report can control a terminal or end a line.
func FuzzPrintable(f *testing.F) {
	for _, s := range []string{"", "a\nb", "\x1b[2J", "\xff", "a\u202eb", "größer"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := printable(s, maxText)
		if !utf8.ValidString(got) || len(got) > maxText+64 {
			t.Fatalf("%d bytes, valid %v", len(got), utf8.ValidString(got))
		}
		for _, r := range got {
			if !unicode.IsPrint(r) {
				t.Fatalf("%q holds %U", got, r)
			}
		}
	})
}
