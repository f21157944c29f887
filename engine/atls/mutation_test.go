package atls

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"constellation/engine/attestation"
	"constellation/internal/testneeds"
)

// judgeBytes is what a server does with the certificate of a client.
func judgeBytes(s serverCredentials, v attestation.Validator, der, nonce []byte) (*attestation.Statement, error) {
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	if err := checkPeer(tls.ConnectionState{NegotiatedProtocol: protocol, PeerCertificates: []*x509.Certificate{cert}}); err != nil {
		return nil, err
	}
	return s.judge(context.Background(), v, cert, client, nonce)
}

// original is a genuine certificate of w's node, and what it states.
func original(t testing.TB, w world, nonce []byte) (s serverCredentials, v attestation.Validator, der []byte, st *attestation.Statement) {
	t.Helper()
	s = NewServer(w.serverConfig()).(serverCredentials)
	v = w.serverConfig().Validator()
	cert, err := newSide(w.clientConfig()).certificate(t.Context(), client, nonce)
	if err != nil {
		t.Fatal(err)
	}
	der = cert.Certificate[0]
	if st, err = judgeBytes(s, v, der, nonce); err != nil {
		t.Fatal(err)
	}
	return s, v, der, st
}

// TestMutatedCertificates changes a genuine certificate at random. A server must
// refuse each change or state exactly what it states of the original: what is outside
// of key and evidence means nothing.
func TestMutatedCertificates(t *testing.T) {
	total := 20_000
	if testing.Short() {
		total /= 10
	}
	total = testneeds.Number(t, "CONSTELLATION_EVIDENCE_MUTATIONS", total)
	nonce := bytes.Repeat([]byte{5}, nonceSize)
	s, v, der, want := original(t, newWorld(t), nonce)
	refused := 0
	for seed := range uint64(total) {
		r := rand.New(rand.NewPCG(seed, 18))
		b := bytes.Clone(der)
		for range 1 + r.IntN(3) {
			i := r.IntN(len(b))
			switch r.IntN(4) {
			case 0, 1:
				b[i] ^= 1 << r.IntN(8)
			case 2:
				b[i] = byte(r.Uint32())
			case 3:
				b = slices.Insert(slices.Delete(b, i, i+1), r.IntN(len(b)), byte(r.Uint32())) // of the same length
			}
		}
		st, err := judgeBytes(s, v, b, nonce)
		if err != nil {
			refused++
		} else if !reflect.DeepEqual(st, want) {
			t.Fatalf("seed %d: accepted as %+v: %x", seed, st, b)
		}
	}
	t.Logf("certificate of attested TLS: %d mutations, %d refused, %d that state what the original does", total, refused, total-refused)
	if refused < total/2 {
		t.Errorf("only %d of %d changes were refused", refused, total)
	}
}

// FuzzCertificate feeds anything to a server as the certificate of a client.
func FuzzCertificate(f *testing.F) {
	nonce := bytes.Repeat([]byte{5}, nonceSize)
	s, v, der, want := original(f, newWorld(f), nonce)
	f.Add(der)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if st, err := judgeBytes(s, v, b, nonce); err == nil && !reflect.DeepEqual(st, want) {
			t.Errorf("accepted: %+v", st)
		}
	})
}

// FuzzNonce feeds anything to the readers of the nonces of both sides.
func FuzzNonce(f *testing.F) {
	name, err := authority(make([]byte, nonceSize))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(name)
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, err := parseAuthority(b); err == nil && len(n) != nonceSize {
			t.Errorf("a nonce of %d bytes", len(n))
		}
		if n, err := parseNonce(string(b)); err == nil && len(n) != nonceSize {
			t.Errorf("a nonce of %d bytes", len(n))
		}
	})
}
