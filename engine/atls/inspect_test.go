package atls

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"constellation/engine/attestation"
)

// inspect inspects a server with a configuration.
func inspect(t *testing.T, w world, p Purpose, s Config) (attestation.Statement, error) {
	t.Helper()
	client, server := pipe(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _, _ = NewServer(s).ServerHandshake(server)
		_ = server.Close()
	}()
	st, err := Inspect(t.Context(), p, w.accepts(attestation.PCR15Member())(), client)
	<-done
	return st, err
}

func TestInspect(t *testing.T) {
	w := newWorld(t)
	unasked := w.serverConfig()
	unasked.Validator = nil
	other := w.serverConfig()
	other.Issuer = w.node
	for _, tt := range []struct {
		name    string
		purpose Purpose
		server  Config
		want    error
	}{
		{name: "a server that demands evidence", server: w.serverConfig()},
		{name: "a server that demands none", server: unasked},
		{name: "another machine", server: other, want: attestation.ErrMember},
		{name: "another purpose", purpose: PurposeInit, server: w.serverConfig(), want: attestation.ErrQuote},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := PurposeJoin
			if tt.purpose != "" {
				p = tt.purpose
			}
			st, err := inspect(t, w, p, tt.server)
			if !errors.Is(err, tt.want) || tt.want == nil && (err != nil || st.Identity.Name != identity("control-plane-0", "").Name) || tt.want != nil && st.Identity.Name != "" {
				t.Errorf("got %+v, %v", st.Identity, err)
			}
		})
	}
}

// TestInspectRelayedEvidence has a server that gets fresh evidence for the nonce of its client from a genuine one, whose key
// it does not have.
func TestInspectRelayedEvidence(t *testing.T) {
	w := newWorld(t)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var relayed atomic.Bool
	relay := &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		toGenuine, genuine := pipe(t)
		go func() { _, _, _ = NewServer(w.serverConfig()).ServerHandshake(genuine) }()
		var certificate []byte
		stop := errors.New("got it")
		conn := tls.Client(toGenuine, &tls.Config{
			MinVersion: tls.VersionTLS13, NextProtos: hello.SupportedProtos, InsecureSkipVerify: true,
			VerifyConnection: func(cs tls.ConnectionState) error { certificate = cs.PeerCertificates[0].Raw; return stop },
		})
		if err := conn.HandshakeContext(t.Context()); !errors.Is(err, stop) {
			t.Errorf("the genuine server: %v", err)
		}
		relayed.Store(len(certificate) > 0)
		return &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{protocol}, Certificates: []tls.Certificate{{Certificate: [][]byte{certificate}, PrivateKey: key}}}, nil
	}}
	client, server := pipe(t)
	go func() {
		_ = tls.Server(server, relay).HandshakeContext(t.Context())
		_ = server.Close()
	}()
	st, err := Inspect(t.Context(), PurposeJoin, w.accepts(attestation.PCR15Member())(), client)
	if err == nil || !strings.Contains(err.Error(), "signature") || st.Identity.Name != "" || !relayed.Load() {
		t.Errorf("got %+v, %v; relayed: %t", st.Identity, err, relayed.Load())
	}
}
