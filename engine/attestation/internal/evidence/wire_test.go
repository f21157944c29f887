package evidence

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"math/big"
	"strings"
	"testing"
)

// edited returns a copy of b with v at the offset.
func edited(b []byte, at int, v ...byte) []byte {
	c := bytes.Clone(b)
	copy(c[at:], v)
	return c
}

func TestDocumentsAreRefused(t *testing.T) {
	d, err := parseDocument(newForger(t, newCA(t, "cloud")).document(t))
	if err != nil {
		t.Fatal(err)
	}
	good, err := d.marshal()
	if err != nil {
		t.Fatal(err)
	}
	inside := func(extra ...byte) []byte { // longer by extra, inside of the sequence
		b := append(bytes.Clone(good), extra...)
		n := len(b) - 4
		b[2], b[3] = byte(n>>8), byte(n)
		return b
	}
	if _, err := parseDocument(inside()); err != nil {
		t.Fatalf("the table is wrong: %v", err)
	}
	for _, tt := range []struct {
		name, text string
		b          []byte
	}{
		{name: "another version", text: "version 2", b: edited(good, 6, 2)},
		{name: "no version", text: "no version", b: edited(good, 4, 4)},
		{name: "something behind the last field", text: "unexpected data after its last field", b: inside(5, 0)},
		{name: "two sequences", text: "not one DER sequence", b: append(bytes.Clone(good), good...)},
		{name: "a length in more bytes than it needs", text: "not one DER sequence", b: append([]byte{0x30, 0x83, 0}, good[2:]...)},
		{name: "no certificate", text: "certificate cannot be read", b: edited(good, 7, 5)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := parseDocument(tt.b); err == nil || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
	d.log = make([]byte, MaxDocument)
	if _, err := d.marshal(); err == nil {
		t.Error("a document beyond the limit was made")
	}
}

func TestQuotesAreRefused(t *testing.T) {
	good, err := quote{signer: []byte{1}, extraData: []byte{2}, safe: 1, digest: make([]byte, 32)}.marshal()
	if err != nil {
		t.Fatal(err)
	}
	safe := 4 + 2 + 3 + 3 + 16
	for _, tt := range []struct {
		name, text string
		b          []byte
	}{
		{name: "a clock that is neither safe nor unsafe", text: "neither safe nor unsafe", b: edited(good, safe, 2)},
		{name: "a longer selection", text: "selects registers with 4 bytes", b: bytes.Replace(good, []byte{3, 0, 0, 0}, []byte{4, 0, 0, 0, 0}, 1)},
		{name: "a shorter selection", text: "selects registers with 2 bytes", b: bytes.Replace(good, []byte{3, 0, 0, 0}, []byte{2, 0, 0}, 1)},
		{name: "something behind the digest", text: "digest cannot be read", b: append(bytes.Clone(good), 0)},
		{name: "a digest that is cut off", text: "digest cannot be read", b: good[:len(good)-1]},
		{name: "a name longer than the quote", text: "cut off", b: edited(good, 6, 0xff, 0xff)},
		{name: "an empty quote", text: "cut off"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := parseQuote(tt.b); err == nil || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
}

func TestSignaturesAreRefused(t *testing.T) {
	number := bytes.Repeat([]byte{1}, 33)
	for _, tt := range []struct {
		name string
		sig  signature
	}{
		{"a first number of 33 bytes", signature{scheme: algECDSA, r: number, s: number[1:]}},
		{"a second number of 33 bytes", signature{scheme: algECDSA, r: number[1:], s: number}},
		{"RSA of 1024 bits", signature{scheme: algRSASSA, rsa: make([]byte, 128)}},
		{"RSA of 4096 bits", signature{scheme: algRSAPSS, rsa: make([]byte, 512)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, err := tt.sig.marshal()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := parseSignature(b); err == nil {
				t.Error("it was read")
			}
		})
	}
}

// TestSignatureOfAnotherScheme passes good signatures off as something else.
func TestSignatureOfAnotherScheme(t *testing.T) {
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rs, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.Sum256([]byte("message"))
	r, s, err := ecdsa.Sign(rand.Reader, ec, h[:])
	if err != nil {
		t.Fatal(err)
	}
	good := signature{scheme: algECDSA, r: r.Bytes(), s: s.Bytes()}
	if !good.verify(ec.Public(), []byte("message")) {
		t.Fatal("a good signature does not fit")
	}
	for name, ok := range map[string]bool{
		"another message": good.verify(ec.Public(), []byte("massage")),
		"RSA's scheme":    signature{scheme: algRSASSA, r: good.r, s: good.s}.verify(ec.Public(), []byte("message")),
		"an RSA key":      good.verify(rs.Public(), []byte("message")),
		"no key":          good.verify(nil, []byte("message")),
	} {
		if ok {
			t.Errorf("%s: it fits", name)
		}
	}
}

func TestPublicAreas(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ec := ecPublic(t, &key.PublicKey)
	f := newForger(t, newCA(t, "cloud"))
	f.useRSA(t, 2048, algRSASSA)
	rs := f.public
	for _, tt := range []struct {
		name, text string
		b          []byte
	}{
		{name: "a key named by SHA-1", text: "named by the hash algorithm 0x0004", b: edited(ec, 2, 0, 4)},
		{name: "a storage key", text: "not a signing key", b: edited(ec, 10, 0, 6)},
		{name: "a scheme with SHA-1", text: "does not hash with SHA-256", b: edited(ec, 14, 0, 4)},
		{name: "a key of P-384", text: "curve is not P-256", b: edited(ec, 16, 0, 4)},
		{name: "a key derivation", text: "curve is not P-256", b: edited(ec, 18, 0, 0x20)},
		{name: "a coordinate of 33 bytes", text: "curve is not P-256", b: akPublic(make([]byte, 33), make([]byte, 32))},
		{name: "something behind the point", text: "point cannot be read", b: append(bytes.Clone(ec), 0)},
		{name: "something behind the modulus", text: "modulus cannot be read", b: append(bytes.Clone(rs), 0)},
		{name: "a modulus shorter than announced", text: "not 2048 bits", b: edited(rs[:len(rs)-1], 22, 0, 255)},
		{name: "an HMAC key", text: "neither RSA nor ECC", b: edited(ec, 0, 0, 8)},
		{name: "a public area that is cut off", text: "cut off", b: ec[:5]},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := parsePublic(tt.b); err == nil || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
	p, err := parsePublic(ec)
	if err != nil {
		t.Fatal(err)
	}
	r, err := parsePublic(rs)
	if err != nil {
		t.Fatal(err)
	}
	rsaKey := f.key.Public().(*rsa.PublicKey)
	short := p
	short.x, short.y = bytes.TrimLeft(p.x, "\x00"), bytes.TrimLeft(p.y, "\x00")
	padded := p
	padded.x = append([]byte{0}, p.x...)
	for _, tt := range []struct {
		name string
		got  bool
		want bool
	}{
		{name: "a point and its key", got: p.is(key.Public()), want: true},
		{name: "a point without leading zeros and its key", got: short.is(key.Public()), want: true},
		{name: "a point with one more zero and its key", got: padded.is(key.Public()), want: true},
		{name: "a modulus and its key", got: r.is(rsaKey), want: true},
		{name: "a modulus and a key with another exponent", got: r.is(&rsa.PublicKey{N: rsaKey.N, E: 3}), want: false},
		{name: "a modulus and the key of another", got: r.is(&rsa.PublicKey{N: new(big.Int).Add(rsaKey.N, big.NewInt(2)), E: rsaKey.E}), want: false},
		{name: "a point against a modulus", got: p.is(rsaKey), want: false},
		{name: "a modulus against a point", got: r.is(key.Public()), want: false},
		{name: "no key", got: p.is(nil), want: false},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %v", tt.name, tt.got)
		}
	}
}
