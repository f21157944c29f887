package atls

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine/attestation"
)

// BenchmarkHandshake makes attested connections and, in turn with them, bare TLS
// 1.3 connections with the same certificate work: a certificate of the same size
// made per connection, and for each document one signature made, one certificate
// parsed and verified against its root, and one signature verified. The ratio
// bare/atls is how much of bare TLS's speed is left. Time is that of the processor
// for both ends, which other programs disturb least.
func BenchmarkHandshake(b *testing.B) {
	w := newWorld(b)
	for _, tt := range []struct {
		name           string
		client, server Config
	}{
		{name: "one-way", client: Config{Purpose: PurposeInit, Validator: w.accepts(attestation.PCR15Zero())}, server: Config{Purpose: PurposeInit, Issuer: w.node}},
		{name: "mutual", client: w.clientConfig(), server: w.serverConfig()},
	} {
		b.Run(tt.name, func(b *testing.B) {
			cl, se := NewClient(tt.client), NewServer(tt.server)
			attested := func(cr, sr net.Conn) error {
				return both(
					func() error { _, _, err := cl.ClientHandshake(context.Background(), "", cr); return err },
					func() error { _, _, err := se.ServerHandshake(sr); return err })
			}
			bare := newBare(b, w, tt.server.Validator != nil)
			var took [2]time.Duration
			for b.Loop() {
				for i, f := range []func(cr, sr net.Conn) error{attested, bare.handshake} {
					cr, sr, err := socketpair()
					if err != nil {
						b.Fatal(err)
					}
					start := cpu(b)
					if err := f(cr, sr); err != nil {
						b.Fatal(err)
					}
					took[i] += cpu(b) - start
					cr.Close()
					sr.Close()
				}
			}
			b.ReportMetric(float64(took[0].Nanoseconds())/float64(b.N), "atls-cpu-ns/op")
			b.ReportMetric(float64(took[1].Nanoseconds())/float64(b.N), "bare-cpu-ns/op")
			b.ReportMetric(float64(took[1])/float64(took[0]), "bare/atls")
		})
	}
}

// cpu is the processor time that this process has used.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// both runs the two sides of a handshake at the same time.
func both(client, server func() error) error {
	var (
		wg  sync.WaitGroup
		err error
	)
	wg.Go(func() { err = server() })
	return errors.Join(client(), func() error { wg.Wait(); return err }())
}

// bare is TLS 1.3 without attestation, but with its certificate work.
type bare struct {
	mutual  bool
	key, ak *ecdsa.PrivateKey
	akCert  []byte
	roots   *x509.CertPool
	doc     []byte
	sig     []byte // of doc by ak
}

func newBare(b *testing.B, w world, mutual bool) *bare {
	b.Helper()
	doc, err := w.node.Issue(context.Background(), make([]byte, 32))
	if err != nil {
		b.Fatal(err)
	}
	t := bare{mutual: mutual, doc: doc, roots: x509.NewCertPool()}
	var keys [3]*ecdsa.PrivateKey
	for i := range keys {
		if keys[i], err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			b.Fatal(err)
		}
	}
	t.key, t.ak = keys[0], keys[1]
	root := &x509.Certificate{
		Subject: pkix.Name{CommonName: "root"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, root, root, keys[2].Public(), keys[2])
	if err != nil {
		b.Fatal(err)
	}
	if root, err = x509.ParseCertificate(der); err != nil {
		b.Fatal(err)
	}
	t.roots.AddCert(root)
	leaf := &x509.Certificate{
		Subject: pkix.Name{CommonName: "worker-0"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:        x509.KeyUsageDigitalSignature,
		ExtraExtensions: []pkix.Extension{{Id: attestation.TPM2.OID(), Value: make([]byte, 120)}},
	}
	if t.akCert, err = x509.CreateCertificate(rand.Reader, leaf, root, t.ak.Public(), keys[2]); err != nil {
		b.Fatal(err)
	}
	h := sha256.Sum256(t.doc)
	if t.sig, err = ecdsa.SignASN1(rand.Reader, t.ak, h[:]); err != nil {
		b.Fatal(err)
	}
	return &t
}

// certificate is made per connection, with one signature more.
func (t *bare) certificate() (*tls.Certificate, error) {
	h := sha256.Sum256(t.doc)
	if _, err := ecdsa.SignASN1(rand.Reader, t.ak, h[:]); err != nil {
		return nil, err
	}
	c := &x509.Certificate{
		Subject: pkix.Name{CommonName: "bare"}, NotAfter: time.Now().Add(time.Hour),
		ExtraExtensions: []pkix.Extension{{Id: attestation.TPM2.OID(), Value: t.doc}},
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, t.key.Public(), t.key)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: t.key}, err
}

func (t *bare) verify() error {
	c, err := x509.ParseCertificate(t.akCert)
	if err != nil {
		return err
	}
	if _, err := c.Verify(x509.VerifyOptions{Roots: t.roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		return err
	}
	h := sha256.Sum256(t.doc)
	if !ecdsa.VerifyASN1(c.PublicKey.(*ecdsa.PublicKey), h[:], t.sig) {
		return errors.New("signature does not fit")
	}
	return nil
}

func (t *bare) handshake(cr, sr net.Conn) error {
	base := tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{protocol}, SessionTicketsDisabled: true, InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			if len(cs.PeerCertificates) == 0 {
				return nil
			}
			return t.verify()
		},
		GetCertificate:       func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return t.certificate() },
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return t.certificate() },
	}
	if t.mutual {
		base.ClientAuth = tls.RequireAnyClientCert
	}
	return both(
		func() error { return tls.Client(cr, base.Clone()).Handshake() },
		func() error {
			conn := tls.Server(sr, base.Clone())
			if err := conn.Handshake(); err != nil || !t.mutual {
				return err
			}
			_, err := conn.Write([]byte{0})
			return err
		})
}

// BenchmarkHandshakes is what one process does with both ends in it, eight
// connections at a time.
func BenchmarkHandshakes(b *testing.B) {
	w := newWorld(b)
	cl, se := NewClient(w.clientConfig()), NewServer(w.serverConfig())
	b.SetParallelism(4)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			cr, sr, err := socketpair()
			if err != nil {
				b.Error(err)
				return
			}
			if err := both(
				func() error { _, _, err := cl.ClientHandshake(context.Background(), "", cr); return err },
				func() error { _, _, err := se.ServerHandshake(sr); return err }); err != nil {
				b.Error(err)
			}
			cr.Close()
			sr.Close()
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "handshakes/s")
}

// BenchmarkStrangers is what a server pays for those who send nothing of use.
func BenchmarkStrangers(b *testing.B) {
	w := newWorld(b)
	se := NewServer(w.serverConfig())
	b.ReportAllocs()
	for b.Loop() {
		cr, sr, err := socketpair()
		if err != nil {
			b.Fatal(err)
		}
		io.WriteString(cr, "GET / HTTP/1.1\r\n\r\n")
		if _, _, err := se.ServerHandshake(sr); err == nil {
			b.Fatal("accepted")
		}
		cr.Close()
	}
}
