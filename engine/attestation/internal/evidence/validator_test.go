package evidence

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"encoding/hex"
	"errors"
	"math/big"
	mathrand "math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	"golang.org/x/crypto/cryptobyte"

	"constellation/engine/cloud"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var nonce = bytes.Repeat([]byte{7}, MaxUserData)

// forger makes evidence piece by piece, so that each piece can be wrong.
type forger struct {
	ca       *CA
	key      crypto.Signer
	template x509.Certificate
	// certified is the key in the certificate; nil stands for key.
	certified crypto.PublicKey
	public    []byte
	quote     quote
	pcrs      []register
	log       []byte
	// rehash makes the quote fit pcrs. It is set unless a case clears it.
	rehash bool
	// rename makes the quote name public as its signer.
	rename bool

	editQuote     func([]byte) []byte
	scheme        uint16
	editSignature func([]byte) []byte
	editDocument  func(*document)
	editBytes     func([]byte) []byte
}

func newForger(t testing.TB, ca *CA) *forger {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ext, err := worker(0).marshal()
	if err != nil {
		t.Fatal(err)
	}
	f := &forger{
		ca:     ca,
		key:    key,
		public: ecPublic(t, &key.PublicKey),
		quote:  quote{extraData: nonce, resets: 1, safe: 1, firmware: 1},
		rehash: true,
		rename: true,
		scheme: algECDSA,
		template: x509.Certificate{
			NotBefore:             time.Now().Add(-time.Hour),
			NotAfter:              time.Now().Add(time.Hour),
			KeyUsage:              x509.KeyUsageDigitalSignature,
			UnknownExtKeyUsage:    []encasn1.ObjectIdentifier{oidAttestationKey()},
			BasicConstraintsValid: true,
			ExtraExtensions:       []pkix.Extension{{Id: oidIdentity(), Value: ext}},
		},
		log: newEventLog(),
	}
	for _, e := range boot() {
		f.log = appendEvent(f.log, e)
	}
	f.measured(boot())
	return f
}

// measured replaces the registers, not the log.
func (f *forger) measured(events []MeasuredEvent) {
	f.pcrs = nil
	pcrs := PredictPCRs(events)
	for i := range uint32(quotedPCRs) {
		if pcrs[i] == nil {
			pcrs[i] = make([]byte, pcrSize)
		}
		f.pcrs = append(f.pcrs, register{i, pcrs[i]})
	}
}

func ecPublic(t testing.TB, k *ecdsa.PublicKey) []byte {
	t.Helper()
	p, err := k.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	return akPublic(p[1:33], p[33:])
}

// withAttributes returns public with other attributes.
func withAttributes(public []byte, attributes uint32) []byte {
	p := bytes.Clone(public)
	p[4], p[5], p[6], p[7] = byte(attributes>>24), byte(attributes>>16), byte(attributes>>8), byte(attributes)
	return p
}

// useRSA replaces the key by an RSA key of the given size.
func (f *forger) useRSA(t testing.TB, bits int, scheme uint16) {
	t.Helper()
	k, err := rsa.GenerateKey(rand.Reader, bits)
	if err != nil {
		t.Fatal(err)
	}
	var b cryptobyte.Builder
	b.AddUint16(algRSA)
	b.AddUint16(algSHA256)
	b.AddUint32(akAttributes | attrUserWithAuth | attrNoDA)
	addSized(&b, nil)
	b.AddUint16(algNull)
	b.AddUint16(scheme)
	b.AddUint16(algSHA256)
	b.AddUint16(uint16(bits))
	b.AddUint32(0)
	addSized(&b, k.N.Bytes())
	f.key, f.scheme, f.public = k, scheme, b.BytesOrPanic()
}

func (f *forger) document(t testing.TB) []byte {
	t.Helper()
	certified := f.certified
	if certified == nil {
		certified = f.key.Public()
	}
	cert, err := x509.CreateCertificate(rand.Reader, &f.template, f.ca.cert, certified, f.ca.key)
	if err != nil {
		t.Fatal(err)
	}
	q := f.quote
	if f.rehash {
		h := sha256.New()
		q.selected = 0
		for _, r := range f.pcrs {
			h.Write(r.value)
			q.selected |= 1 << r.index
		}
		q.digest = h.Sum(nil)
	}
	if f.rename {
		q.signer = publicArea{raw: f.public}.qualifiedName()
	}
	raw, err := q.marshal()
	if err != nil {
		t.Fatal(err)
	}
	if f.editQuote != nil {
		raw = f.editQuote(raw)
	}
	h := sha256.Sum256(raw)
	sig := signature{scheme: f.scheme}
	switch k := f.key.(type) {
	case *ecdsa.PrivateKey:
		r, s, err := ecdsa.Sign(rand.Reader, k, h[:])
		if err != nil {
			t.Fatal(err)
		}
		sig.r, sig.s = r.Bytes(), s.Bytes()
	case *rsa.PrivateKey:
		if f.scheme == algRSAPSS {
			sig.rsa, err = rsa.SignPSS(rand.Reader, k, crypto.SHA256, h[:], nil)
		} else {
			sig.rsa, err = rsa.SignPKCS1v15(rand.Reader, k, crypto.SHA256, h[:])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	rawSig, err := sig.marshal()
	if err != nil {
		t.Fatal(err)
	}
	if f.editSignature != nil {
		rawSig = f.editSignature(rawSig)
	}
	d := document{certificate: cert, public: f.public, quote: raw, signature: rawSig, pcrs: f.pcrs, log: f.log}
	if f.editDocument != nil {
		f.editDocument(&d)
	}
	out, err := d.marshal()
	if err != nil {
		t.Fatal(err)
	}
	if f.editBytes != nil {
		out = f.editBytes(out)
	}
	return out
}

func digest(s string) []byte { h := sha256.Sum256([]byte(s)); return h[:] }

func images() Measurements { return Enforced(PredictPCRs(boot())) }

// setPCR replaces one register.
func (f *forger) setPCR(i uint32, v []byte) {
	f.pcrs = slices.Clone(f.pcrs)
	f.pcrs[i] = register{i, v}
}

func TestValidateAccepts(t *testing.T) {
	ca := newCA(t, "cloud")
	cluster := []byte("cluster")
	for _, tt := range []struct {
		name     string
		edit     func(*forger)
		opts     Options
		images   func(Measurements)
		warnings int
	}{
		{name: "an unused machine"},
		{name: "a machine without an event log", edit: func(f *forger) { f.log = nil }},
		{name: "a machine of the demanded project and role", opts: Options{UID: "demo", Role: cloud.Worker}},
		{
			name: "a member of this cluster", edit: func(f *forger) { f.setPCR(15, ClusterIDPCR(cluster)) },
			opts: Options{PCR15: PCR15ClusterID(cluster)},
		},
		{
			name: "a member of any cluster", edit: func(f *forger) { f.setPCR(15, ClusterIDPCR(cluster)) },
			opts: Options{PCR15: PCR15Member()},
		},
		{name: "an RSA key that signs by PKCS #1", edit: func(f *forger) { f.useRSA(t, 2048, algRSASSA) }},
		{name: "an RSA key that signs by PSS", edit: func(f *forger) { f.useRSA(t, 2048, algRSAPSS) }},
		{name: "a register that only warns", images: func(m Measurements) { m[4] = Measurement{digest("other"), true} }, warnings: 1},
		{
			name: "another accepted image", images: func(m Measurements) { m[4] = Measurement{digest("other"), false} },
			opts: Options{Alternatives: []Measurements{{4: {digest("third"), false}}, images()}},
		},
		{name: "a key whose caller chooses the scheme", edit: func(f *forger) {
			p := bytes.Clone(f.public[:12])
			f.public = append(append(p, 0, algNull), f.public[16:]...)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, m := newForger(t, ca), images()
			if tt.edit != nil {
				tt.edit(f)
			}
			if tt.images != nil {
				tt.images(m)
			}
			st, err := NewTPMValidator(ca.Roots(), m, tt.opts).Validate(t.Context(), f.document(t), nonce)
			if err != nil {
				t.Fatal(err)
			}
			want := Statement{Identity: worker(0), Attested: true, PCRs: map[uint32][]byte{}, Firmware: 1, Resets: 1}
			for _, r := range f.pcrs {
				want.PCRs[r.index] = r.value
			}
			if d := cmp.Diff(want, st, cmpopts.EquateComparable(netip.Addr{}), cmpopts.IgnoreFields(Statement{}, "Warnings")); d != "" {
				t.Errorf("statement (-want +got):\n%s", d)
			}
			if len(st.Warnings) != tt.warnings {
				t.Errorf("warnings %q, want %d", st.Warnings, tt.warnings)
			}
		})
	}
}

// TestValidateRefuses has one honest machine and everything that can be wrong with
// its evidence.
func TestValidateRefuses(t *testing.T) {
	ca, foreign := newCA(t, "cloud"), newCA(t, "foreign cloud")
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ext := func(f *forger, der []byte) { f.template.ExtraExtensions[0].Value = der }
	idExt := func(f *forger, edit func(*Identity)) {
		id := worker(0)
		edit(&id)
		// marshal refuses what it should, so the pieces are put together here.
		var b cryptobyte.Builder
		b.AddASN1(0x30, func(b *cryptobyte.Builder) {
			b.AddASN1Int64(identityVersion)
			for _, s := range []string{id.Name, id.ProviderID, id.UID, id.Group, string(id.Role)} {
				b.AddASN1(0x0c, func(b *cryptobyte.Builder) { b.AddBytes([]byte(s)) })
			}
			b.AddASN1OctetString(id.IP.AsSlice())
		})
		ext(f, b.BytesOrPanic())
	}
	for _, tt := range []struct {
		name   string
		edit   func(*forger)
		opts   Options
		images func(Measurements) Measurements
		roots  func(*x509.CertPool) *x509.CertPool
		nonce  []byte // nil: the right one
		want   error
		text   string
	}{
		// The connection.
		{name: "the evidence was made for another nonce", nonce: bytes.Repeat([]byte{8}, MaxUserData), want: ErrQuote, text: "another connection"},
		{name: "the evidence was made for a longer nonce", nonce: nonce[:31], want: ErrQuote, text: "another connection"},
		{name: "the nonce is empty", nonce: []byte{}, edit: func(f *forger) { f.quote.extraData = nil }, want: ErrQuote, text: "0 bytes"},
		{name: "the nonce is too long", nonce: make([]byte, 33), want: ErrQuote, text: "33 bytes"},

		// The document.
		{name: "the document is empty", edit: func(f *forger) { f.editBytes = func([]byte) []byte { return nil } }, want: ErrDocument},
		{name: "the document is cut off", edit: func(f *forger) { f.editBytes = func(b []byte) []byte { return b[:len(b)-1] } }, want: ErrDocument},
		{name: "something follows the document", edit: func(f *forger) { f.editBytes = func(b []byte) []byte { return append(b, 0) } }, want: ErrDocument},
		{name: "the document is too large", edit: func(f *forger) { f.editBytes = func([]byte) []byte { return make([]byte, MaxDocument+1) } }, want: ErrDocument, text: "at most 131072"},
		{name: "the document has 1 MB", edit: func(f *forger) { f.editBytes = func([]byte) []byte { return make([]byte, 1<<20) } }, want: ErrDocument},
		{name: "the document's certificate is too large", edit: func(f *forger) {
			f.editDocument = func(d *document) { d.certificate = make([]byte, maxCertificate+1) }
		}, want: ErrDocument, text: "its certificate has 4097 bytes"},
		{name: "the event log is too large", edit: func(f *forger) { f.log = make([]byte, maxLog+1) }, want: ErrDocument, text: "its event log has"},
		{name: "the registers are out of order", edit: func(f *forger) { f.pcrs[3], f.pcrs[4] = f.pcrs[4], f.pcrs[3] }, want: ErrDocument, text: "ascending"},
		{name: "a register comes twice", edit: func(f *forger) { f.pcrs[3] = f.pcrs[4] }, want: ErrDocument, text: "ascending"},
		{name: "a register has 20 bytes", edit: func(f *forger) { f.setPCR(4, make([]byte, 20)) }, want: ErrDocument, text: "20 bytes"},
		{name: "a register does not exist", edit: func(f *forger) { f.pcrs = append(f.pcrs, register{24, make([]byte, 32)}) }, want: ErrDocument, text: "PCR 24"},
		{name: "the public area of the key is noise", edit: func(f *forger) { f.editDocument = func(d *document) { d.public = []byte("noise") } }, want: ErrDocument},
		{name: "the event log is noise", edit: func(f *forger) { f.log = []byte("noise") }, want: ErrDocument, text: "event log"},
		{name: "the event log is cut off", edit: func(f *forger) { f.log = f.log[:len(f.log)-1] }, want: ErrDocument, text: "cut off"},
		{
			name: "the event log is that of another boot", edit: func(f *forger) { f.log = appendEvent(f.log, MeasuredEvent{9, digest("more"), "more"}) },
			want: ErrDocument, text: "PCR 9 (kernel and initrd) is",
		},

		// Trust in the key.
		{name: "another cloud certified the key", edit: func(f *forger) { f.ca = foreign }, want: ErrTrust, text: "unknown authority"},
		{name: "a cloud of the same name certified the key", edit: func(f *forger) { f.ca = newCA(t, "cloud") }, want: ErrTrust},
		{name: "no trusted root", roots: func(*x509.CertPool) *x509.CertPool { return nil }, want: ErrTrust},
		{name: "the certificate is signed by the key itself", edit: func(f *forger) {
			f.ca = &CA{cert: &f.template, key: f.key}
		}, want: ErrTrust},
		{name: "the certificate has expired", opts: Options{Now: func() time.Time { return time.Now().Add(2 * time.Hour) }}, want: ErrTrust, text: "expired"},
		{name: "the certificate is not valid yet", opts: Options{Now: func() time.Time { return time.Now().Add(-2 * time.Hour) }}, want: ErrTrust, text: "not yet valid"},
		{name: "the certificate is not one", edit: func(f *forger) { f.editDocument = func(d *document) { d.certificate = []byte("x") } }, want: ErrTrust},
		{name: "the authority's own certificate stands in", edit: func(f *forger) { f.editDocument = func(d *document) { d.certificate = ca.cert.Raw } }, want: ErrTrust},
		{name: "the certificate is that of an authority", edit: func(f *forger) { f.template.IsCA = true }, want: ErrTrust, text: "not one of a signing key"},
		{name: "the key may not sign", edit: func(f *forger) { f.template.KeyUsage = x509.KeyUsageKeyEncipherment }, want: ErrTrust},
		{name: "the certificate is for a TLS server", edit: func(f *forger) {
			f.template.UnknownExtKeyUsage, f.template.ExtKeyUsage = nil, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		}, want: ErrTrust, text: "not one of an attestation key"},
		{name: "the certificate has no extended usage", edit: func(f *forger) { f.template.UnknownExtKeyUsage = nil }, want: ErrTrust},
		{name: "the certificate names no instance", edit: func(f *forger) { f.template.ExtraExtensions = nil }, want: ErrTrust, text: "names no instance"},
		{name: "the instance lies under another identifier", edit: func(f *forger) { f.template.ExtraExtensions[0].Id = encasn1.ObjectIdentifier{1, 3, 9900, 1} }, want: ErrTrust, text: "names no instance"},
		{name: "something follows the instance", edit: func(f *forger) { ext(f, append(f.template.ExtraExtensions[0].Value, 0)) }, want: ErrTrust},
		{name: "the instance has no name", edit: func(f *forger) { idExt(f, func(id *Identity) { id.Name = "" }) }, want: ErrTrust, text: "name of the instance is empty"},
		{name: "the instance's name holds an escape", edit: func(f *forger) { idExt(f, func(id *Identity) { id.Name = "worker\x1b[2J" }) }, want: ErrTrust, text: "cannot be printed"},
		{name: "the instance's role is unheard of", edit: func(f *forger) { idExt(f, func(id *Identity) { id.Role = "master" }) }, want: ErrTrust, text: `role of the instance is "master"`},
		{name: "the instance has no address", edit: func(f *forger) { idExt(f, func(id *Identity) { id.IP = netip.Addr{} }) }, want: ErrTrust, text: "address"},
		{name: "a certified machine certified another", edit: func(f *forger) {
			f.template.SubjectKeyId = []byte{1}
			der, err := x509.CreateCertificate(rand.Reader, &f.template, ca.cert, other.Public(), ca.key)
			if err != nil {
				t.Fatal(err)
			}
			leaf, err := x509.ParseCertificate(der)
			if err != nil {
				t.Fatal(err)
			}
			f.ca = &CA{cert: leaf, key: other}
		}, want: ErrTrust},

		// The key.
		{name: "the certificate is another machine's", edit: func(f *forger) { f.certified = other.Public() }, want: ErrTrust, text: "another key"},
		{name: "the public area is another key's", edit: func(f *forger) { f.public = ecPublic(t, &other.PublicKey) }, want: ErrTrust, text: "another key"},
		{name: "the key signs anything", edit: func(f *forger) { f.public = withAttributes(f.public, akAttributes&^attrRestricted) }, want: ErrTrust, text: "may sign things"},
		{name: "the key came from outside of the TPM", edit: func(f *forger) { f.public = withAttributes(f.public, akAttributes&^attrSensitiveDataOrigin) }, want: ErrTrust},
		{name: "the key may leave its TPM", edit: func(f *forger) { f.public = withAttributes(f.public, akAttributes&^attrFixedTPM) }, want: ErrTrust},
		{name: "the key decrypts as well", edit: func(f *forger) { f.public = withAttributes(f.public, akAttributes|attrDecrypt) }, want: ErrTrust},
		{name: "a key that signs anything is passed off as restricted", edit: func(f *forger) {
			f.quote.signer = publicArea{raw: withAttributes(f.public, akAttributes&^attrRestricted)}.qualifiedName()
			f.rename = false
		}, want: ErrQuote, text: "names another key"},
		{name: "the quote names no key", edit: func(f *forger) { f.rename = false }, want: ErrQuote},
		{name: "an RSA key of 1024 bits", edit: func(f *forger) {
			f.useRSA(t, 1024, algRSASSA)
		}, want: ErrDocument, text: "not 2048 bits"},

		// The signature.
		{name: "another key signed", edit: func(f *forger) { f.certified = f.key.Public(); f.key = other }, want: ErrQuote, text: "signature is invalid"},
		{name: "the quote was changed after it was signed", edit: func(f *forger) {
			f.editDocument = func(d *document) { d.quote = bytes.Clone(d.quote); d.quote[len(d.quote)-60] ^= 1 } // firmware version
		}, want: ErrQuote},
		{name: "the signature is another quote's", edit: func(f *forger) {
			d, err := parseDocument(newForger(t, ca).document(t))
			if err != nil {
				t.Fatal(err)
			}
			f.editSignature = func([]byte) []byte { return d.signature }
		}, want: ErrQuote, text: "signature is invalid"},
		{name: "the signature is zero", edit: func(f *forger) {
			f.editSignature = func([]byte) []byte { return []byte{0, algECDSA, 0, algSHA256, 0, 0, 0, 0} }
		}, want: ErrQuote, text: "signature is invalid"},
		{name: "the signature is as large as the curve's order", edit: func(f *forger) {
			n := elliptic.P256().Params().N
			f.editSignature = func([]byte) []byte {
				b, _ := signature{scheme: algECDSA, r: n.Bytes(), s: new(big.Int).Add(n, big.NewInt(1)).Bytes()}.marshal()
				return b
			}
		}, want: ErrQuote},
		{name: "the signature is made with SHA-1", edit: func(f *forger) {
			f.editSignature = func(b []byte) []byte { b[3] = 4; return b }
		}, want: ErrQuote, text: "hash algorithm 0x0004"},
		{name: "the signature is of an unknown scheme", edit: func(f *forger) {
			f.editSignature = func(b []byte) []byte { b[1] = 0x1c; return b } // Schnorr
		}, want: ErrQuote, text: "scheme 0x001c"},
		{name: "the signature says it is HMAC", edit: func(f *forger) {
			f.editSignature = func(b []byte) []byte { b[1] = 5; return b }
		}, want: ErrQuote},
		{name: "the signature is RSA's under a key of P-256", edit: func(f *forger) {
			f.editSignature = func([]byte) []byte { b, _ := signature{scheme: algRSASSA, rsa: make([]byte, 256)}.marshal(); return b }
		}, want: ErrQuote, text: "another scheme"},
		{name: "something follows the signature", edit: func(f *forger) { f.editSignature = func(b []byte) []byte { return append(b, 0) } }, want: ErrQuote},

		// The quote.
		{name: "the TPM did not generate the quote", edit: func(f *forger) { f.editQuote = func(b []byte) []byte { b[0] = 0; return b } }, want: ErrQuote, text: "not generated by a TPM"},
		{name: "the quote certifies a key", edit: func(f *forger) { f.editQuote = func(b []byte) []byte { b[3+2] = 0x17; return b } }, want: ErrQuote, text: "type 0x8017"},
		{name: "something follows the quote", edit: func(f *forger) { f.editQuote = func(b []byte) []byte { return append(b, 0) } }, want: ErrQuote},
		{name: "the quote is cut off", edit: func(f *forger) { f.editQuote = func(b []byte) []byte { return b[:20] } }, want: ErrQuote, text: "cut off"},
		{name: "the quote is over SHA-1 registers", edit: func(f *forger) {
			f.editQuote = func(b []byte) []byte { b[len(b)-39] = 4; return b }
		}, want: ErrQuote, text: "algorithm 0x0004"},
		{name: "the quote is over two banks", edit: func(f *forger) {
			f.editQuote = func(b []byte) []byte { b[len(b)-41] = 2; return b }
		}, want: ErrQuote, text: "2 banks"},
		{name: "a register beside the quote was changed", edit: func(f *forger) {
			f.editDocument = func(d *document) { d.pcrs = slices.Clone(d.pcrs); d.pcrs[9].value = digest("x") }
		}, want: ErrQuote, text: "not the quoted ones"},
		{name: "a register beside the quote was left out", edit: func(f *forger) {
			f.editDocument = func(d *document) { d.pcrs = d.pcrs[1:] }
		}, want: ErrQuote, text: "other registers"},
		{name: "the quote covers no register", edit: func(f *forger) { f.pcrs = nil; f.log = nil }, want: ErrMeasurement, text: "not part of the evidence"},
		{name: "the quote leaves out a measured register", edit: func(f *forger) { f.pcrs = f.pcrs[5:] }, want: ErrMeasurement, text: "PCR 4 (boot loader) is not part of the evidence"},
		{name: "the quote leaves out the cluster ID", edit: func(f *forger) { f.pcrs = f.pcrs[:15] }, want: ErrQuote, text: "does not cover PCR 15"},
		{name: "the TPM slept through a change of software", edit: func(f *forger) { f.quote.restarts = 1 }, want: ErrQuote, text: "suspended and resumed"},

		// What the machine is.
		{
			name: "the machine runs another boot loader", edit: func(f *forger) { f.setPCR(4, digest("evil")); f.log = nil }, want: ErrMeasurement,
			text: "measurements differ: PCR 4 (boot loader) is " + hex.EncodeToString(digest("evil")) + ", expected " + hex.EncodeToString(PredictPCRs(boot())[4]),
		},
		{
			name: "the machine was booted for debugging", edit: func(f *forger) {
				f.measured(append(boot(), MeasuredEvent{12, digest("systemd.debug_shell"), "command line"}))
			}, images: func(m Measurements) Measurements { m[12] = Measurement{Expected: make([]byte, 32)}; return m },
			want: ErrMeasurement, text: "PCR 12 (kernel command line)",
		},
		{name: "no measurements are configured", images: func(Measurements) Measurements { return nil }, want: ErrMeasurement, text: "none are configured"},
		{name: "a measurement is of a register that no quote covers", images: func(m Measurements) Measurements { m[17] = m[4]; return m }, want: ErrMeasurement, text: "PCR 17 is not part"},
		{
			name: "the machine fits half of each accepted image", edit: func(f *forger) { f.setPCR(4, digest("b4")); f.log = nil },
			opts: Options{Alternatives: []Measurements{{4: {digest("b4"), false}, 9: {digest("b9"), false}, 11: {digest("b11"), false}}}},
			want: ErrMeasurement, text: "PCR 4",
		},
		{
			name: "the machine is close to the second accepted image", edit: func(f *forger) { f.setPCR(11, digest("x")); f.log = nil },
			images: func(Measurements) Measurements {
				return Measurements{4: {digest("b4"), false}, 9: {digest("b9"), false}, 11: {digest("b11"), false}}
			},
			opts: Options{Alternatives: []Measurements{images()}}, want: ErrMeasurement, text: "measurements differ: PCR 11 (unified kernel image) is",
		},
		{name: "the machine is a member and should be unused", edit: func(f *forger) { f.setPCR(15, ClusterIDPCR([]byte("c"))) }, want: ErrMember, text: "already belongs to a cluster"},
		{name: "the machine is unused and should be a member", opts: Options{PCR15: PCR15Member()}, want: ErrMember, text: "belongs to no cluster"},
		{name: "the machine is unused and should be a member of this cluster", opts: Options{PCR15: PCR15ClusterID([]byte("c"))}, want: ErrMember, text: "belongs to no cluster"},
		{
			name: "the machine is a member of another cluster", edit: func(f *forger) { f.setPCR(15, ClusterIDPCR([]byte("d"))) },
			opts: Options{PCR15: PCR15ClusterID([]byte("c"))}, want: ErrMember, text: "another cluster",
		},
		{name: "the machine belongs to another project", opts: Options{UID: "prod"}, want: ErrIdentity, text: `worker-0 belongs to "demo", expected "prod"`},
		{name: "the machine has another role", opts: Options{Role: cloud.ControlPlane}, want: ErrIdentity, text: "worker-0 is a worker, expected a control-plane"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, m, roots, n := newForger(t, ca), images(), ca.Roots(), nonce
			if tt.edit != nil {
				tt.edit(f)
			}
			if tt.images != nil {
				m = tt.images(m)
			}
			if tt.roots != nil {
				roots = tt.roots(roots)
			}
			if tt.nonce != nil {
				n = tt.nonce
			}
			st, err := NewTPMValidator(roots, m, tt.opts).Validate(t.Context(), f.document(t), n)
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %v with %q", err, tt.want, tt.text)
			}
			if st.PCRs != nil || st.Identity != (Identity{}) {
				t.Errorf("a refused document still states %v", st)
			}
			for _, s := range []error{ErrDocument, ErrTrust, ErrQuote, ErrMeasurement, ErrMember, ErrIdentity} {
				if !errors.Is(s, tt.want) && errors.Is(err, s) {
					t.Errorf("the error wraps %v as well", s)
				}
			}
		})
	}
}

func TestValidateHonoursItsContext(t *testing.T) {
	ca := newCA(t, "cloud")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := NewTPMValidator(ca.Roots(), images(), Options{}).Validate(ctx, newForger(t, ca).document(t), nonce)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// TestValidatorIsASnapshot changes what a validator was made from.
func TestValidatorIsASnapshot(t *testing.T) {
	ca := newCA(t, "cloud")
	other := Measurements{4: {digest("other"), false}}
	for _, tt := range []struct {
		name       string
		first, alt Measurements
	}{
		{name: "the image", first: images(), alt: other},
		{name: "an alternative", first: other, alt: images()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			alternatives := []Measurements{tt.alt}
			v := NewTPMValidator(ca.Roots(), tt.first, Options{Alternatives: alternatives})
			for _, m := range []Measurements{tt.first, tt.alt} {
				m[4].Expected[0] ^= 1
				delete(m, 9)
			}
			alternatives[0] = nil
			if _, err := v.Validate(t.Context(), newForger(t, ca).document(t), nonce); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestStatementOutlivesTheDocument overwrites the document that was validated.
func TestStatementOutlivesTheDocument(t *testing.T) {
	ca := newCA(t, "cloud")
	d := newForger(t, ca).document(t)
	st, err := NewTPMValidator(ca.Roots(), images(), Options{}).Validate(t.Context(), d, nonce)
	if err != nil {
		t.Fatal(err)
	}
	clear(d)
	if _, err := images().Compare(st.PCRs); err != nil || st.Identity != worker(0) {
		t.Errorf("the statement changed: %v, %v", st.Identity, err)
	}
}

// TestMutatedDocuments flips every bit of a document, and then bytes at random:
// each result is refused, or says the same.
func TestMutatedDocuments(t *testing.T) {
	ca := newCA(t, "cloud")
	v := NewTPMValidator(ca.Roots(), images(), Options{})
	honest := newForger(t, ca).document(t)
	want, err := v.Validate(t.Context(), honest, nonce)
	if err != nil {
		t.Fatal(err)
	}
	same, mu := 0, sync.Mutex{}
	check := func(d []byte, what string) {
		got, err := v.Validate(context.Background(), d, nonce)
		if err != nil {
			if got.PCRs != nil {
				t.Errorf("%s: refused, and yet it states %v", what, got)
			}
			return
		}
		mu.Lock()
		same++
		mu.Unlock()
		if !cmp.Equal(want, got, cmpopts.EquateComparable(netip.Addr{})) {
			t.Errorf("%s: accepted, and it states something else", what)
		}
	}
	for i := range honest {
		for bit := range 8 {
			d := bytes.Clone(honest)
			d[i] ^= 1 << bit
			check(d, "bit "+string(rune('0'+bit)))
		}
	}
	t.Logf("%d of %d documents with a flipped bit state the same", same, 8*len(honest))
	// The text of the event log is not measured, so it may change.
	text := 0
	for _, e := range boot() {
		text += 8 * len(e.Description)
	}
	// An event's type is not measured either (8 × 4 bits each), nor is the opening event's version.
	if limit := text + 8*4*len(boot()) + 8*80; same > limit {
		t.Errorf("%d documents with a flipped bit are accepted, more than the %d bits of the log that mean nothing", same, limit)
	}
	r := mathrand.New(mathrand.NewPCG(1, 2))
	n := 10000
	if testing.Short() {
		n = 1000
	}
	for range n {
		d := bytes.Clone(honest)
		switch r.IntN(3) {
		case 0: // some bytes
			for range 1 + r.IntN(8) {
				d[r.IntN(len(d))] = byte(r.Uint32())
			}
		case 1: // a piece is missing
			at := r.IntN(len(d))
			d = slices.Delete(d, at, min(len(d), at+1+r.IntN(16)))
		case 2: // a piece is doubled
			at := r.IntN(len(d))
			d = slices.Insert(d, at, bytes.Clone(d[at:min(len(d), at+1+r.IntN(64))])...)
		}
		check(d, "random")
	}
}

func TestValidateConcurrently(t *testing.T) {
	ca := newCA(t, "cloud")
	v := NewTPMValidator(ca.Roots(), images(), Options{})
	var wg sync.WaitGroup
	for n := range 50 {
		i, err := NewSoftwareIssuer(ca, worker(n), boot(), nil)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			d, err := i.Issue(context.Background(), nonce)
			if err != nil {
				t.Error(err)
				return
			}
			st, err := v.Validate(context.Background(), d, nonce)
			if err != nil || st.Identity != worker(n) {
				t.Errorf("worker %d: %v, %v", n, st.Identity, err)
			}
		})
	}
	wg.Wait()
}
