package evidence

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"math/big"
	"testing"

	"github.com/google/go-eventlog/tcg"
	"github.com/google/go-tpm/tpm2"
)

// FuzzDocument feeds arbitrary documents to a validator. It must neither panic nor accept a
// document of a dishonest machine.
func FuzzDocument(f *testing.F) {
	ca := fixedCA(f)
	honest := newForger(f, ca)
	honest.key = fixedKey(f, "attestation key")
	honest.public = ecPublic(f, honest.key.Public().(*ecdsa.PublicKey))
	f.Add(honest.document(f))
	honest.log = nil
	f.Add(honest.document(f))
	rsa := newForger(f, ca)
	rsa.useRSA(f, 2048, algRSAPSS)
	f.Add(rsa.document(f))
	f.Add([]byte{})
	v := NewTPMValidator(ca.Roots(), images(), Options{})
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		st, err := v.Validate(context.Background(), b, nonce)
		if !bytes.Equal(before, b) {
			t.Error("the document was changed")
		}
		if err == nil {
			if _, err := images().Compare(st.PCRs); err != nil || st.Identity != worker(0) {
				t.Errorf("accepted: %+v", st)
			}
			return
		}
		n := 0
		for _, s := range []error{ErrDocument, ErrTrust, ErrQuote, ErrMeasurement, ErrMember, ErrIdentity} {
			if errors.Is(err, s) {
				n++
			}
		}
		if n != 1 {
			t.Errorf("the error wraps %d reasons: %v", n, err)
		}
		// A decoded document encodes to the same bytes.
		if d, err := parseDocument(b); err == nil {
			if again, err := d.marshal(); err != nil || !bytes.Equal(again, b) {
				t.Errorf("the document has two forms: %x and %x, %v", b, again, err)
			}
		}
	})
}

// fixedCA is an authority for fuzzers, which run in several processes that must agree on the keys.
func fixedCA(t testing.TB) *CA {
	t.Helper()
	ca := newCA(t, "cloud")
	ca.key = fixedKey(t, "CA")
	root := x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: ca.cert.Subject, NotBefore: ca.cert.NotBefore, NotAfter: ca.cert.NotAfter,
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, &root, &root, ca.key.Public(), ca.key)
	if err != nil {
		t.Fatal(err)
	}
	if ca.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return ca
}

func fixedKey(t testing.TB, seed string) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), digest(seed))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// FuzzQuote holds our reader of a quote against go-tpm's.
func FuzzQuote(f *testing.F) {
	d, err := parseDocument(newForger(f, newCA(f, "cloud")).document(f))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(d.quote)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := parseQuote(b)
		if err != nil {
			return
		}
		theirs, err := tpm2.Unmarshal[tpm2.TPMSAttest](b)
		if err != nil {
			t.Fatalf("go-tpm cannot read it: %v", err)
		}
		if theirs.Magic != tpm2.TPMGeneratedValue || theirs.Type != tpm2.TPMSTAttestQuote ||
			!bytes.Equal(theirs.ExtraData.Buffer, q.extraData) || !bytes.Equal(theirs.QualifiedSigner.Buffer, q.signer) ||
			theirs.ClockInfo.ResetCount != q.resets || theirs.ClockInfo.RestartCount != q.restarts || theirs.FirmwareVersion != q.firmware {
			t.Errorf("go-tpm reads %+v, we read %+v", theirs, q)
		}
		info, err := theirs.Attested.Quote()
		if err != nil {
			t.Fatal(err)
		}
		s := info.PCRSelect.PCRSelections
		if len(s) != 1 || s[0].Hash != tpm2.TPMAlgSHA256 || len(s[0].PCRSelect) != 3 || !bytes.Equal(info.PCRDigest.Buffer, q.digest) ||
			uint32(s[0].PCRSelect[0])|uint32(s[0].PCRSelect[1])<<8|uint32(s[0].PCRSelect[2])<<16 != q.selected {
			t.Errorf("go-tpm reads %+v, we read %+v", info, q)
		}
		if again, err := q.marshal(); err != nil || !bytes.Equal(again, b) {
			t.Errorf("the quote has two forms: %x and %x, %v", b, again, err)
		}
	})
}

// FuzzSignature holds our reader of a signature against go-tpm's.
func FuzzSignature(f *testing.F) {
	for _, s := range []signature{
		{scheme: algECDSA, r: bytes.Repeat([]byte{1}, 32), s: bytes.Repeat([]byte{2}, 32)},
		{scheme: algRSASSA, rsa: make([]byte, 256)},
		{scheme: algRSAPSS, rsa: make([]byte, 256)},
	} {
		b, err := s.marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	ca := newCA(f, "cloud")
	f.Fuzz(func(t *testing.T, b []byte) {
		sig, err := parseSignature(b)
		if err != nil {
			return
		}
		theirs, err := tpm2.Unmarshal[tpm2.TPMTSignature](b)
		if err != nil {
			t.Fatalf("go-tpm cannot read it: %v", err)
		}
		if uint16(theirs.SigAlg) != sig.scheme {
			t.Errorf("go-tpm reads scheme %v, we read %#x", theirs.SigAlg, sig.scheme)
		}
		if sig.verify(ca.cert.PublicKey, []byte("message")) {
			t.Error("a signature out of nothing fits")
		}
	})
}

// FuzzPublic holds our reader of a public area against go-tpm's.
func FuzzPublic(f *testing.F) {
	fo := newForger(f, newCA(f, "cloud"))
	f.Add(fo.public)
	key := fo.key.Public()
	fo.useRSA(f, 2048, algRSASSA)
	f.Add(fo.public)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := parsePublic(b)
		if err != nil {
			return
		}
		p.is(key)
		theirs, err := tpm2.Unmarshal[tpm2.TPMTPublic](b)
		if err != nil {
			return // it knows fewer schemes than we let pass here; the signature decides
		}
		if theirs.ObjectAttributes.Restricted != (p.attributes&attrRestricted != 0) ||
			theirs.ObjectAttributes.Decrypt != (p.attributes&attrDecrypt != 0) ||
			theirs.ObjectAttributes.SignEncrypt != (p.attributes&attrSign != 0) ||
			theirs.ObjectAttributes.FixedTPM != (p.attributes&attrFixedTPM != 0) ||
			theirs.ObjectAttributes.FixedParent != (p.attributes&attrFixedParent != 0) ||
			theirs.ObjectAttributes.SensitiveDataOrigin != (p.attributes&attrSensitiveDataOrigin != 0) {
			t.Errorf("go-tpm reads attributes %+v, we read %#x", theirs.ObjectAttributes, p.attributes)
		}
	})
}

// FuzzLog holds our replay of an event log against go-eventlog's.
func FuzzLog(f *testing.F) {
	log := newEventLog()
	f.Add(log)
	for _, e := range boot() {
		log = appendEvent(log, e)
	}
	f.Add(log)
	for _, l := range realLogs() {
		f.Add(l)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		pcrs, err := replayLog(b)
		if err != nil || len(pcrs) == 0 {
			return
		}
		theirs, err := tcg.ParseEventLog(b, tcg.ParseOpts{})
		if err != nil {
			return // stricter in what does not matter to a replay
		}
		if _, err := theirs.Verify(mrs(pcrs)); err != nil {
			t.Errorf("go-eventlog replays it otherwise: %v", err)
		}
	})
}

func FuzzIdentity(f *testing.F) {
	b, err := worker(0).marshal()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		id, err := parseIdentity(b)
		if err != nil {
			return
		}
		if again, err := id.marshal(); err != nil || !bytes.Equal(again, b) {
			t.Errorf("the identity has two forms: %x and %x, %v", b, again, err)
		}
	})
}

func FuzzMeasurements(f *testing.F) {
	f.Add([]byte(`{"4":{"expected":"` + aa + `","warnOnly":true},"11":"` + bb + `"}`))
	f.Add([]byte(`{"4":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m Measurements
		if json.Unmarshal(b, &m) != nil || m == nil {
			return
		}
		if err := m.Check(); err != nil {
			t.Errorf("read, but wrong: %v", err)
		}
		out, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		var again Measurements
		if err := json.Unmarshal(out, &again); err != nil || !again.Equal(m) {
			t.Errorf("came back as %v, %v", again, err)
		}
	})
}
