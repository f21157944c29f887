package atls

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"encoding/hex"
	"errors"
	"io"
	"math/big"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	workspace "constellation/engine/attestation/authority"
	"constellation/engine/cloud"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a cloud with one machine of each kind.
type world struct {
	ca      *attestationtest.CA
	node    *attestationtest.SoftwareIssuer // unused
	service *attestationtest.SoftwareIssuer // member of a cluster
	images  attestation.Measurements
}

func identity(name string, r cloud.Role) attestation.Identity {
	return attestation.Identity{
		Name: name, ProviderID: "sandbox://demo/" + name, UID: "demo",
		Group: "sandboxes/demo/groups/" + string(r), Role: r, IP: netip.MustParseAddr("10.42.0.20"),
	}
}

func events(image string) []attestation.MeasuredEvent {
	d := sha256.Sum256([]byte(image))
	return []attestation.MeasuredEvent{
		{PCR: 4, Digest: d[:], Description: image},
		{PCR: 11, Digest: d[:], Description: image},
	}
}

func newWorld(t testing.TB) world {
	t.Helper()
	cert, key, err := attestationtest.CreateCA("cloud")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := attestationtest.ParseCA(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return world{
		ca:      ca,
		node:    machine(t, ca, identity("worker-0", cloud.Worker), "v1.1.0", nil),
		service: machine(t, ca, identity("control-plane-0", cloud.ControlPlane), "v1.1.0", []byte("cluster")),
		images:  attestation.Enforced(attestation.PredictPCRs(events("v1.1.0"))),
	}
}

func machine(t testing.TB, ca *attestationtest.CA, id attestation.Identity, image string, cluster []byte) *attestationtest.SoftwareIssuer {
	t.Helper()
	i, err := attestationtest.NewSoftwareIssuer(ca, id, events(image), cluster)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// accepts returns a source of validators with this rule.
func (w world) accepts(r attestation.PCR15) func() attestation.Validator {
	v := attestation.NewTPMValidator(w.ca.Roots(), w.images, attestation.Options{PCR15: r})
	return func() attestation.Validator { return v }
}

// serverConfig and clientConfig are the two sides of a join.
func (w world) serverConfig() Config {
	return Config{Purpose: PurposeJoin, Issuer: w.service, Validator: w.accepts(attestation.PCR15Zero()), HandshakeTimeout: 30 * time.Second}
}

func (w world) clientConfig() Config {
	return Config{Purpose: PurposeJoin, Issuer: w.node, Validator: w.accepts(attestation.PCR15Member()), HandshakeTimeout: 30 * time.Second}
}

// pipe returns both ends of a connection, which are closed with the test.
func pipe(t testing.TB) (client, server net.Conn) {
	t.Helper()
	client, server, err := socketpair()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, server
}

// socketpair returns both ends of a connection. It is no port, which some other
// program of a busy computer could find open.
func socketpair() (client, server net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pipe")
		c, cerr := net.FileConn(f)
		ends[i], err = c, errors.Join(err, cerr)
		f.Close() // the connection has its own
	}
	return ends[0], ends[1], err
}

// outcome is how a handshake ended.
type outcome struct {
	client, server       error
	toClient, toServer   *attestation.Statement // what each learned of the other
	clientSaw, serverSaw []error                // through OnFailure
}

// meet connects two Configs.
func meet(t testing.TB, c, s Config) outcome {
	t.Helper()
	var (
		o  outcome
		mu sync.Mutex
		wg sync.WaitGroup
	)
	c.OnFailure = func(_ net.Addr, err error) { mu.Lock(); defer mu.Unlock(); o.clientSaw = append(o.clientSaw, err) }
	s.OnFailure = func(_ net.Addr, err error) { mu.Lock(); defer mu.Unlock(); o.serverSaw = append(o.serverSaw, err) }
	cr, sr := pipe(t)
	wg.Go(func() {
		conn, info, err := NewServer(s).ServerHandshake(sr)
		if o.server = err; err == nil {
			o.toServer = info.(AuthInfo).Statement
			echo(conn)
		}
	})
	conn, info, err := NewClient(c).ClientHandshake(t.Context(), "ignored:1", cr)
	if o.client = err; err == nil {
		o.toClient = info.(AuthInfo).Statement
		if _, err := conn.Write([]byte("ping")); err != nil {
			t.Errorf("write after the handshake: %v", err)
		}
		b := make([]byte, 4)
		if _, err := io.ReadFull(conn, b); err != nil || string(b) != "ping" {
			t.Errorf("read after the handshake: %q, %v", b, err)
		}
		conn.Close()
	}
	wg.Wait()
	return o
}

// echo sends four bytes back and waits for the end.
func echo(c net.Conn) {
	b := make([]byte, 4)
	if _, err := io.ReadFull(c, b); err == nil {
		c.Write(b)
		io.Copy(io.Discard, c)
	}
	c.Close()
}

func TestHandshakeSucceeds(t *testing.T) {
	w := newWorld(t)
	for _, tt := range []struct {
		name               string
		client, server     Config
		toClient, toServer string // name of the instance that each side learns of
	}{
		{name: "both sides attest", client: w.clientConfig(), server: w.serverConfig(), toClient: "control-plane-0", toServer: "worker-0"},
		{
			name:     "the server alone attests",
			client:   Config{Purpose: PurposeInit, Validator: w.accepts(attestation.PCR15Zero())},
			server:   Config{Purpose: PurposeInit, Issuer: w.node},
			toClient: "worker-0",
		},
		{
			name:     "the client alone attests",
			client:   Config{Purpose: PurposeJoin, Issuer: w.node},
			server:   Config{Purpose: PurposeJoin, Validator: w.accepts(attestation.PCR15Zero())},
			toClient: "", toServer: "worker-0",
		},
		{
			name:     "a client that could attest meets a server that does not ask",
			client:   w.clientConfig(),
			server:   Config{Purpose: PurposeJoin, Issuer: w.service},
			toClient: "control-plane-0",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := meet(t, tt.client, tt.server)
			if o.client != nil || o.server != nil {
				t.Fatalf("client: %v, server: %v", o.client, o.server)
			}
			if got := nameOf(o.toClient); got != tt.toClient {
				t.Errorf("client learned of %q, want %q", got, tt.toClient)
			}
			if got := nameOf(o.toServer); got != tt.toServer {
				t.Errorf("server learned of %q, want %q", got, tt.toServer)
			}
			if len(o.clientSaw)+len(o.serverSaw) > 0 {
				t.Errorf("failures were reported: %v, %v", o.clientSaw, o.serverSaw)
			}
		})
	}
}

func nameOf(st *attestation.Statement) string {
	if st == nil {
		return ""
	}
	return st.Identity.Name
}

// TestHandshakeIsRefused pairs two of our own sides that must not come together.
// Both learn why, the refused one no more than the class.
func TestHandshakeIsRefused(t *testing.T) {
	w, other := newWorld(t), newWorld(t)
	with := func(c Config, f func(*Config)) Config { f(&c); return c }
	for _, tt := range []struct {
		name           string
		client, server Config
		wantClient     error  // wrapped by the client's error
		clientText     string // part of it
		wantServer     error
		serverText     string
	}{
		{
			name:   "the server runs another image",
			client: w.clientConfig(),
			server: with(w.serverConfig(), func(c *Config) {
				c.Issuer = machine(t, w.ca, identity("control-plane-0", cloud.ControlPlane), "evil", []byte("cluster"))
			}),
			wantClient: attestation.ErrMeasurement, clientText: "evidence of the server: measurements differ: PCR 4 (boot loader) is ",
			wantServer: ErrRefused, serverText: "bad certificate",
		},
		{
			name:       "the client runs another image",
			client:     with(w.clientConfig(), func(c *Config) { c.Issuer = machine(t, w.ca, identity("worker-0", cloud.Worker), "evil", nil) }),
			server:     w.serverConfig(),
			wantClient: &RefusedError{ReasonMeasurements}, clientText: "the machine's measurements are not among the accepted ones",
			wantServer: attestation.ErrMeasurement, serverText: "PCR 11 (unified kernel image) is ",
		},
		{
			name:   "the server was certified by another cloud",
			client: w.clientConfig(), server: with(w.serverConfig(), func(c *Config) { c.Issuer = other.service }),
			wantClient: attestation.ErrTrust, wantServer: ErrRefused,
		},
		{
			name:   "the client was certified by another cloud",
			client: with(w.clientConfig(), func(c *Config) { c.Issuer = other.node }), server: w.serverConfig(),
			wantClient: &RefusedError{ReasonTrust}, wantServer: attestation.ErrTrust,
		},
		{
			name:       "a used machine joins again",
			client:     with(w.clientConfig(), func(c *Config) { c.Issuer = w.service }),
			server:     w.serverConfig(),
			wantClient: &RefusedError{ReasonMember}, wantServer: attestation.ErrMember, serverText: "already belongs to a cluster",
		},
		{
			name:       "a used machine initializes a cluster",
			client:     Config{Purpose: PurposeInit, Validator: w.accepts(attestation.PCR15Zero())},
			server:     Config{Purpose: PurposeInit, Issuer: w.service},
			wantClient: attestation.ErrMember, clientText: "already belongs to a cluster", wantServer: ErrRefused,
		},
		{
			name:   "an unused machine poses as the join service",
			client: w.clientConfig(), server: with(w.serverConfig(), func(c *Config) { c.Issuer = w.node }),
			wantClient: attestation.ErrMember, clientText: "belongs to no cluster", wantServer: ErrRefused,
		},
		{
			name:   "evidence of the service for init reaches a client that joins",
			client: w.clientConfig(), server: with(w.serverConfig(), func(c *Config) { c.Purpose = PurposeInit }),
			wantClient: attestation.ErrQuote, clientText: "another connection", wantServer: ErrRefused,
		},
		{
			name:       "evidence of a machine for init reaches the join service",
			client:     with(w.clientConfig(), func(c *Config) { c.Purpose, c.Validator = PurposeInit, nil }),
			server:     w.serverConfig(),
			wantClient: &RefusedError{ReasonQuote}, wantServer: attestation.ErrQuote,
		},
		{
			name:   "the server attests nothing",
			client: w.clientConfig(), server: with(w.serverConfig(), func(c *Config) { c.Issuer = nil }),
			wantClient: attestation.ErrDocument, clientText: "carries no evidence", wantServer: ErrRefused,
		},
		{
			name:   "the client has no evidence to give",
			client: with(w.clientConfig(), func(c *Config) { c.Issuer = nil }), server: w.serverConfig(),
			clientText: "demands evidence of this side, which has none", serverText: "atls handshake",
		},
		{
			name:   "the server's TPM does not answer",
			client: w.clientConfig(), server: with(w.serverConfig(), func(c *Config) { c.Issuer = attestation.NewTPMIssuer("unix:/nonexistent/tpm.sock") }),
			clientText: "the server could not make its evidence", wantServer: attestation.ErrTPM,
		},
		{
			name:       "the client's TPM does not answer",
			client:     with(w.clientConfig(), func(c *Config) { c.Issuer = attestation.NewTPMIssuer("unix:/nonexistent/tpm.sock") }),
			server:     w.serverConfig(),
			wantClient: attestation.ErrTPM, clientText: "make evidence", serverText: "atls handshake",
		},
		{
			name:       "the server has no measurements yet",
			client:     w.clientConfig(),
			server:     with(w.serverConfig(), func(c *Config) { c.Validator = func() attestation.Validator { return nil } }),
			clientText: "atls handshake", serverText: "there are no measurements yet",
		},
		{
			name:   "the server would attest nobody",
			client: w.clientConfig(), server: Config{Purpose: PurposeJoin},
			clientText: "atls handshake", serverText: "an issuer or a validator is needed",
		},
		{
			name:   "the client would attest nobody",
			client: Config{Purpose: PurposeJoin}, server: w.serverConfig(),
			clientText: "an issuer or a validator is needed",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := meet(t, tt.client, tt.server)
			check := func(who string, err, want error, text string, saw []error) {
				t.Helper()
				var refused *RefusedError
				switch {
				case err == nil:
					t.Errorf("%s: no error", who)
				case errors.As(want, &refused):
					var got *RefusedError
					if !errors.As(err, &got) || got.Reason != refused.Reason || !errors.Is(err, ErrRefused) {
						t.Errorf("%s: %v, want %v", who, err, want)
					}
				case want != nil && !errors.Is(err, want):
					t.Errorf("%s: %v, want %v", who, err, want)
				}
				if err != nil && !strings.Contains(err.Error(), text) {
					t.Errorf("%s: %v, want it to say %q", who, err, text)
				}
				if len(saw) != 1 || !errors.Is(saw[0], err) {
					t.Errorf("%s: OnFailure got %v, want the error once", who, saw)
				}
			}
			check("client", o.client, tt.wantClient, tt.clientText, o.clientSaw)
			if tt.wantServer == nil && tt.serverText == "" {
				return // a client that never speaks
			}
			check("server", o.server, tt.wantServer, tt.serverText, o.serverSaw)
			// A refused client learns the class and no value of a register.
			if errors.Is(o.client, ErrRefused) {
				for _, m := range w.images {
					if strings.Contains(o.client.Error(), hex.EncodeToString(m.Expected)) {
						t.Errorf("the refused client learned what is expected: %v", o.client)
					}
				}
			}
		})
	}
}

// liar is a hostile side that speaks TLS by hand.
type liar struct {
	key      *ecdsa.PrivateKey
	spki     []byte
	template x509.Certificate
}

func newLiar(t testing.TB) *liar {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	spki, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	return &liar{key: key, spki: spki, template: x509.Certificate{NotBefore: time.Unix(0, 0), NotAfter: time.Now().Add(time.Hour)}}
}

// with returns a certificate with doc as evidence.
func (l *liar) with(t testing.TB, doc []byte, oid encasn1.ObjectIdentifier) *tls.Certificate {
	t.Helper()
	c := l.template
	if doc != nil {
		c.ExtraExtensions = []pkix.Extension{{Id: oid, Value: doc}}
	}
	der, err := x509.CreateCertificate(rand.Reader, &c, &c, l.key.Public(), l.key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: l.key}
}

func issue(t testing.TB, i attestation.Issuer, userData []byte) []byte {
	t.Helper()
	doc, err := i.Issue(t.Context(), userData)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func helloNonce(t testing.TB, h *tls.ClientHelloInfo) []byte {
	t.Helper()
	for _, p := range h.SupportedProtos {
		if s, ok := strings.CutPrefix(p, nonceProtocol); ok {
			n, err := parseNonce(s)
			if err != nil {
				t.Error(err)
			}
			return n
		}
	}
	t.Error("the client sent no nonce")
	return nil
}

// TestClientRefusesHostileServers lets our client meet servers that have an honest
// machine's evidence, or none, but are not that machine.
func TestClientRefusesHostileServers(t *testing.T) {
	w := newWorld(t)
	l := newLiar(t)
	oid := attestation.TPM2.OID()
	honest := newSide(w.serverConfig())
	for _, tt := range []struct {
		name string
		// serve makes the certificate for the client that sent nonce.
		serve func(nonce []byte) *tls.Certificate
		tls   func(*tls.Config)
		want  error
		text  string
	}{
		{
			name: "it replays evidence of an earlier connection", want: attestation.ErrQuote, text: "another connection",
			serve: func([]byte) *tls.Certificate {
				return l.with(t, issue(t, w.service, binding(PurposeJoin, server, make([]byte, 32), l.spki)), oid)
			},
		},
		{
			name: "it relays the evidence that an honest machine made for this nonce", want: attestation.ErrQuote, text: "another connection",
			serve: func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.service, binding(PurposeJoin, server, n, honest.spki)), oid)
			},
		},
		{
			name: "it relays the whole certificate that an honest machine made for this nonce", text: "invalid signature",
			serve: func(n []byte) *tls.Certificate {
				c, err := honest.certificate(t.Context(), server, n)
				if err != nil {
					t.Error(err)
					return nil
				}
				return &tls.Certificate{Certificate: c.Certificate, PrivateKey: l.key}
			},
		},
		{
			name: "it reflects evidence that a client made", want: attestation.ErrQuote,
			serve: func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.service, binding(PurposeJoin, client, n, l.spki)), oid)
			},
		},
		{
			name: "it has evidence for another purpose", want: attestation.ErrQuote,
			serve: func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.service, binding(PurposeInit, server, n, l.spki)), oid)
			},
		},
		{
			name: "its evidence binds the nonce alone", want: attestation.ErrQuote,
			serve: func(n []byte) *tls.Certificate { return l.with(t, issue(t, w.service, n), oid) },
		},
		{
			name: "its evidence binds the key alone", want: attestation.ErrQuote,
			serve: func([]byte) *tls.Certificate {
				h := sha256.Sum256(l.spki)
				return l.with(t, issue(t, w.service, h[:]), oid)
			},
		},
		{
			name: "the parts of the bound data are split differently", want: attestation.ErrQuote,
			serve: func(n []byte) *tls.Certificate {
				h := sha256.New()
				for _, p := range [][]byte{[]byte(domain), []byte(PurposeJoin), []byte(server), n, l.spki} {
					h.Write(p)
				}
				return l.with(t, issue(t, w.service, h.Sum(nil)), oid)
			},
		},
		{
			name: "its evidence lies under another identifier", want: attestation.ErrDocument, text: "carries no evidence of variant tpm2",
			serve: func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.service, binding(PurposeJoin, server, n, l.spki)), encasn1.ObjectIdentifier{1, 3, 9900, 5, 1})
			},
		},
		{
			name: "it has no evidence", want: attestation.ErrDocument,
			serve: func([]byte) *tls.Certificate { return l.with(t, nil, nil) },
		},
		{
			name: "its evidence is empty", want: attestation.ErrDocument,
			serve: func([]byte) *tls.Certificate { return l.with(t, []byte{}, oid) },
		},
		{
			name: "its evidence is noise", want: attestation.ErrDocument,
			serve: func([]byte) *tls.Certificate { return l.with(t, []byte("evidence"), oid) },
		},
		{
			name: "its evidence has 1 MB", text: "exceeds maximum",
			serve: func([]byte) *tls.Certificate { return l.with(t, make([]byte, 1<<20), oid) },
		},
		{
			name: "its evidence has 200 kB", want: attestation.ErrDocument, text: "at most",
			serve: func([]byte) *tls.Certificate { return l.with(t, make([]byte, 200<<10), oid) },
		},
		{
			name: "its evidence is one byte too long", want: attestation.ErrDocument, text: "at most",
			serve: func([]byte) *tls.Certificate {
				return l.with(t, make([]byte, attestation.MaxDocument+1), oid)
			},
		},
		{
			name: "honest evidence has something behind it", want: attestation.ErrDocument,
			serve: func(n []byte) *tls.Certificate {
				return l.with(t, append(issue(t, w.service, binding(PurposeJoin, server, n, l.spki)), 0), oid)
			},
		},
		{
			name: "it sends two certificates", want: attestation.ErrDocument, text: "2 certificates",
			serve: func(n []byte) *tls.Certificate {
				c := l.with(t, issue(t, w.service, binding(PurposeJoin, server, n, l.spki)), oid)
				c.Certificate = append(c.Certificate, c.Certificate[0])
				return c
			},
		},
		{
			name: "its key is RSA", want: attestation.ErrDocument, text: "not on P-256",
			serve: func(n []byte) *tls.Certificate { return rsaCertificate(t, w.service, n) },
		},
		{
			name: "it speaks TLS 1.2", text: "protocol version",
			serve: func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.service, binding(PurposeJoin, server, n, l.spki)), oid)
			},
			tls: func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 },
		},
		{
			name: "it agrees on no protocol", want: attestation.ErrDocument, text: `protocol ""`,
			serve: func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.service, binding(PurposeJoin, server, n, l.spki)), oid)
			},
			tls: func(c *tls.Config) { c.NextProtos = nil },
		},
		{
			name: "it asks for evidence without a nonce", text: "demands evidence without a nonce",
			serve: func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.service, binding(PurposeJoin, server, n, l.spki)), oid)
			},
			tls: func(c *tls.Config) { c.ClientAuth = tls.RequireAnyClientCert },
		},
		{
			name: "it asks for evidence with a short nonce", text: "nonce is not 64 hex digits",
			serve: func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.service, binding(PurposeJoin, server, n, l.spki)), oid)
			},
			tls: func(c *tls.Config) {
				name, _ := authority([]byte("short"))
				c.ClientAuth, c.ClientCAs = tls.RequireAnyClientCert, x509.NewCertPool()
				c.ClientCAs.AddCert(&x509.Certificate{Raw: []byte{1}, RawSubject: name})
			},
		},
		{
			name: "it asks for evidence with two nonces", text: "without a nonce",
			serve: func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.service, binding(PurposeJoin, server, n, l.spki)), oid)
			},
			tls: func(c *tls.Config) {
				c.ClientAuth, c.ClientCAs = tls.RequireAnyClientCert, x509.NewCertPool()
				for i := range byte(2) {
					name, _ := authority(bytes.Repeat([]byte{i}, nonceSize))
					c.ClientCAs.AddCert(&x509.Certificate{Raw: []byte{i}, RawSubject: name})
				}
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cr, sr := pipe(t)
			var wg sync.WaitGroup
			wg.Go(func() {
				cfg := &tls.Config{NextProtos: []string{protocol}}
				cfg.GetCertificate = func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
					return tt.serve(helloNonce(t, h)), nil
				}
				if tt.tls != nil {
					tt.tls(cfg)
				}
				conn := tls.Server(sr, cfg)
				if conn.Handshake() == nil {
					conn.Write([]byte{byte(accepted)}) // a liar says yes
					io.Copy(io.Discard, conn)
				}
				sr.Close()
			})
			_, _, err := NewClient(w.clientConfig()).ClientHandshake(t.Context(), "", cr)
			cr.Close()
			wg.Wait()
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %v with %q", err, tt.want, tt.text)
			}
		})
	}
}

func rsaCertificate(t testing.TB, i attestation.Issuer, nonce []byte) *tls.Certificate {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Error(err)
		return nil
	}
	spki, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Error(err)
		return nil
	}
	c := x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		ExtraExtensions: []pkix.Extension{{Id: attestation.TPM2.OID(), Value: issue(t, i, binding(PurposeJoin, server, nonce, spki))}},
	}
	der, err := x509.CreateCertificate(rand.Reader, &c, &c, key.Public(), key)
	if err != nil {
		t.Error(err)
		return nil
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// TestServerRefusesHostileClients lets our server meet clients by hand.
func TestServerRefusesHostileClients(t *testing.T) {
	w := newWorld(t)
	l := newLiar(t)
	oid := attestation.TPM2.OID()
	honest := newSide(w.clientConfig())
	protos := []string{protocol, nonceProtocol + strings.Repeat("ab", nonceSize)}
	certificate := func(f func(nonce []byte) *tls.Certificate) func(*tls.Config) {
		return func(c *tls.Config) {
			c.GetClientCertificate = func(r *tls.CertificateRequestInfo) (*tls.Certificate, error) {
				n, err := parseAuthority(r.AcceptableCAs[0])
				if err != nil {
					t.Error(err)
				}
				return f(n), nil
			}
		}
	}
	for _, tt := range []struct {
		name    string
		tls     func(*tls.Config)
		want    error
		text    string
		verdict Reason // zero: none arrives
	}{
		{
			name: "it replays evidence of an earlier connection", want: attestation.ErrQuote, text: "another connection", verdict: ReasonQuote,
			tls: certificate(func([]byte) *tls.Certificate {
				return l.with(t, issue(t, w.node, binding(PurposeJoin, client, make([]byte, 32), l.spki)), oid)
			}),
		},
		{
			name: "it relays evidence that an honest machine made for this nonce", want: attestation.ErrQuote, verdict: ReasonQuote,
			tls: certificate(func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.node, binding(PurposeJoin, client, n, honest.spki)), oid)
			}),
		},
		{
			name: "it relays the whole certificate of an honest machine", text: "invalid signature",
			tls: certificate(func(n []byte) *tls.Certificate {
				c, err := honest.certificate(t.Context(), client, n)
				if err != nil {
					t.Error(err)
					return nil
				}
				return &tls.Certificate{Certificate: c.Certificate, PrivateKey: l.key}
			}),
		},
		{
			name: "it reflects evidence that a server made", want: attestation.ErrQuote, verdict: ReasonQuote,
			tls: certificate(func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.node, binding(PurposeJoin, server, n, l.spki)), oid)
			}),
		},
		{
			name: "it has evidence for another purpose", want: attestation.ErrQuote, verdict: ReasonQuote,
			tls: certificate(func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.node, binding(PurposeInit, client, n, l.spki)), oid)
			}),
		},
		{
			name: "its evidence lies under another identifier", want: attestation.ErrDocument, verdict: ReasonDocument,
			tls: certificate(func(n []byte) *tls.Certificate {
				return l.with(t, issue(t, w.node, binding(PurposeJoin, client, n, l.spki)), encasn1.ObjectIdentifier{1, 3, 9900, 1, 1})
			}),
		},
		{
			name: "it has a certificate without evidence", want: attestation.ErrDocument, verdict: ReasonDocument,
			tls: certificate(func([]byte) *tls.Certificate { return l.with(t, nil, nil) }),
		},
		{
			name: "it has no certificate", text: "didn't provide a certificate",
			tls: certificate(func([]byte) *tls.Certificate { return &tls.Certificate{} }),
		},
		{
			name: "its evidence has 1 MB", text: "exceeds maximum",
			tls: certificate(func([]byte) *tls.Certificate { return l.with(t, make([]byte, 1<<20), oid) }),
		},
		{
			name: "its evidence has 200 kB", want: attestation.ErrDocument, text: "at most",
			tls: certificate(func([]byte) *tls.Certificate { return l.with(t, make([]byte, 200<<10), oid) }),
		},
		{
			name: "it sends two certificates", want: attestation.ErrDocument, text: "2 certificates",
			tls: certificate(func(n []byte) *tls.Certificate {
				c := l.with(t, issue(t, w.node, binding(PurposeJoin, client, n, l.spki)), oid)
				c.Certificate = append(c.Certificate, c.Certificate[0])
				return c
			}),
		},
		{
			name: "its key is RSA", want: attestation.ErrDocument, text: "not on P-256",
			tls: certificate(func(n []byte) *tls.Certificate { return rsaCertificate(t, w.node, n) }),
		},
		{
			name: "it speaks TLS 1.2 at most", text: "unsupported versions",
			tls: func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 },
		},
		{
			name: "it sends no nonce", text: "sent no nonce",
			tls: func(c *tls.Config) { c.NextProtos = protos[:1] },
		},
		{
			name: "it sends a short nonce", text: "nonce is not 64 hex digits",
			tls: func(c *tls.Config) { c.NextProtos = []string{protocol, nonceProtocol + "abcd"} },
		},
		{
			name: "its nonce is not hex", text: "nonce is not 64 hex digits",
			tls: func(c *tls.Config) { c.NextProtos = []string{protocol, nonceProtocol + strings.Repeat("x", 64)} },
		},
		{
			name: "it sends two nonces", text: "two nonces",
			tls: func(c *tls.Config) { c.NextProtos = append(protos, nonceProtocol+strings.Repeat("cd", nonceSize)) },
		},
		{
			name: "it speaks HTTP/1.1", want: attestation.ErrDocument, text: `protocol ""`,
			tls: func(c *tls.Config) {
				c.NextProtos = []string{"http/1.1", protos[1]}
				certificate(func(n []byte) *tls.Certificate {
					return l.with(t, issue(t, w.node, binding(PurposeJoin, client, n, l.spki)), oid)
				})(c)
			},
		},
		{
			name: "it speaks another protocol", text: "unsupported application protocols",
			tls: func(c *tls.Config) { c.NextProtos = []string{"ssh", protos[1]} },
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cr, sr := pipe(t)
			var (
				wg      sync.WaitGroup
				verdict = make([]byte, 2)
				n       int
			)
			wg.Go(func() {
				defer cr.Close()
				cfg := &tls.Config{NextProtos: protos, InsecureSkipVerify: true}
				cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
					return &tls.Certificate{}, nil
				}
				if tt.tls != nil {
					tt.tls(cfg)
				}
				conn := tls.Client(cr, cfg)
				if conn.Handshake() == nil {
					n, _ = io.ReadFull(conn, verdict)
				}
			})
			_, _, err := NewServer(w.serverConfig()).ServerHandshake(sr)
			wg.Wait()
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %v with %q", err, tt.want, tt.text)
			}
			switch {
			case tt.verdict != accepted && (n != 1 || Reason(verdict[0]) != tt.verdict):
				t.Errorf("the client got %d bytes %v, want the verdict %d", n, verdict, tt.verdict)
			case tt.verdict == accepted && n != 0:
				t.Errorf("the client got %d bytes %v, want none", n, verdict)
			}
		})
	}
}

// TestNonceIsNotChangedOnTheWay flips a digit of the nonce inside the ClientHello.
func TestNonceIsNotChangedOnTheWay(t *testing.T) {
	w := newWorld(t)
	cr, middleClient := pipe(t)
	middleServer, sr := pipe(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 16<<10)
		n, err := middleClient.Read(b)
		if err != nil {
			t.Error(err)
		}
		at := bytes.Index(b[:n], []byte(nonceProtocol))
		if at < 0 {
			t.Error("no nonce in the first packet")
		} else {
			at += len(nonceProtocol)
			b[at] = map[bool]byte{true: '1', false: '0'}[b[at] == '0']
		}
		middleServer.Write(b[:n])
		io.Copy(middleServer, middleClient)
		middleServer.Close()
	})
	wg.Go(func() { io.Copy(middleClient, middleServer); middleClient.Close() })
	var serverErr error
	wg.Go(func() {
		_, _, serverErr = NewServer(w.serverConfig()).ServerHandshake(sr)
		sr.Close()
	})
	_, _, err := NewClient(w.clientConfig()).ClientHandshake(t.Context(), "", cr)
	cr.Close()
	wg.Wait()
	if err == nil || serverErr == nil {
		t.Errorf("client: %v, server: %v, want both to fail", err, serverErr)
	}
}

// TestNothingIsResumed gives a client a session cache; it stays empty.
func TestNothingIsResumed(t *testing.T) {
	w := newWorld(t)
	cfg := Config{Purpose: PurposeInit, Issuer: w.node}
	creds := NewServer(cfg)
	cache := &sessions{}
	for range 2 {
		cr, sr := pipe(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			conn, _, err := creds.ServerHandshake(sr)
			if err != nil {
				t.Error(err)
				return
			}
			echo(conn)
		})
		conn := tls.Client(cr, &tls.Config{
			ServerName: "x", InsecureSkipVerify: true, ClientSessionCache: cache,
			NextProtos: []string{protocol, nonceProtocol + strings.Repeat("ab", nonceSize)},
		})
		if err := conn.Handshake(); err != nil {
			t.Fatal(err)
		}
		conn.Write([]byte("ping"))
		io.ReadFull(conn, make([]byte, 4))
		if conn.ConnectionState().DidResume {
			t.Error("the connection was resumed")
		}
		conn.Close()
		wg.Wait()
	}
	if cache.puts != 0 {
		t.Errorf("the server gave out %d tickets", cache.puts)
	}
}

// sessions counts the tickets that a server gives out.
type sessions struct {
	last *tls.ClientSessionState
	puts int
}

func (s *sessions) Get(string) (*tls.ClientSessionState, bool) { return s.last, s.last != nil }
func (s *sessions) Put(_ string, cs *tls.ClientSessionState) {
	if cs != nil {
		s.last, s.puts = cs, s.puts+1
	}
}

// recorder remembers what an issuer was asked to bind.
type recorder struct {
	attestation.Issuer
	mu   sync.Mutex
	seen [][]byte
}

func (r *recorder) Issue(ctx context.Context, userData []byte) ([]byte, error) {
	r.mu.Lock()
	r.seen = append(r.seen, bytes.Clone(userData))
	r.mu.Unlock()
	return r.Issuer.Issue(ctx, userData)
}

// TestNoncesAreDistinct has 100 handshakes at once through one pair of credentials.
func TestNoncesAreDistinct(t *testing.T) {
	const n = 100
	w := newWorld(t)
	node, service := &recorder{Issuer: w.node}, &recorder{Issuer: w.service}
	cc, sc := w.clientConfig(), w.serverConfig()
	cc.Issuer, sc.Issuer = node, service
	cc.HandshakeTimeout, sc.HandshakeTimeout = time.Minute, time.Minute
	cl, se := NewClient(cc), NewServer(sc)
	var wg sync.WaitGroup
	for range n {
		cr, sr := pipe(t)
		wg.Go(func() {
			conn, info, err := se.Clone().ServerHandshake(sr)
			if err != nil {
				t.Errorf("server: %v", err)
				return
			}
			if got := nameOf(info.(AuthInfo).Statement); got != "worker-0" {
				t.Errorf("server learned of %q", got)
			}
			echo(conn)
		})
		wg.Go(func() {
			conn, _, err := cl.Clone().ClientHandshake(t.Context(), "", cr)
			if err != nil {
				t.Errorf("client: %v", err)
				return
			}
			conn.Close()
		})
	}
	wg.Wait()
	distinct := map[string]bool{}
	for _, r := range []*recorder{node, service} {
		if len(r.seen) != n {
			t.Errorf("%d quotes were made, want %d", len(r.seen), n)
		}
		for _, s := range r.seen {
			distinct[string(s)] = true
		}
	}
	if len(distinct) != 2*n {
		t.Errorf("%d distinct values were bound, want %d", len(distinct), 2*n)
	}
}

// TestSnapshotCountsFromTheNextConnection swaps the measurements between two.
func TestSnapshotCountsFromTheNextConnection(t *testing.T) {
	w := newWorld(t)
	strict := attestation.NewTPMValidator(w.ca.Roots(), attestation.Enforced(attestation.PredictPCRs(events("v1.2.0"))), attestation.Options{})
	current := w.accepts(attestation.PCR15Zero())()
	cfg := w.serverConfig()
	cfg.Validator = func() attestation.Validator { return current }
	if o := meet(t, w.clientConfig(), cfg); o.server != nil {
		t.Fatalf("before: %v", o.server)
	}
	current = strict
	if o := meet(t, w.clientConfig(), cfg); !errors.Is(o.server, attestation.ErrMeasurement) {
		t.Errorf("after: %v, want %v", o.server, attestation.ErrMeasurement)
	}
}

func TestHandshakeEnds(t *testing.T) {
	w := newWorld(t)
	t.Run("when the client stalls", func(t *testing.T) {
		_, sr := pipe(t)
		cfg := w.serverConfig()
		cfg.HandshakeTimeout = 50 * time.Millisecond
		_, _, err := NewServer(cfg).ServerHandshake(sr)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "longer than 50ms") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("when the server stalls", func(t *testing.T) {
		cr, _ := pipe(t)
		cfg := w.clientConfig()
		cfg.HandshakeTimeout = 50 * time.Millisecond
		_, _, err := NewClient(cfg).ClientHandshake(t.Context(), "", cr)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("when the user gives up", func(t *testing.T) {
		cr, sr := pipe(t)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			sr.Read(make([]byte, 1)) // the hello has come
			cancel()
		}()
		_, _, err := NewClient(w.clientConfig()).ClientHandshake(ctx, "", cr)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("when the server never gives its verdict", func(t *testing.T) {
		cr, sr := pipe(t)
		l := newLiar(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			name, _ := authority(make([]byte, nonceSize))
			pool := x509.NewCertPool()
			pool.AddCert(&x509.Certificate{Raw: []byte{1}, RawSubject: name})
			cfg := &tls.Config{NextProtos: []string{protocol}, ClientAuth: tls.RequireAnyClientCert, ClientCAs: pool}
			cfg.GetCertificate = func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
				return l.with(t, issue(t, w.service, binding(PurposeJoin, server, helloNonce(t, h), l.spki)), attestation.TPM2.OID()), nil
			}
			conn := tls.Server(sr, cfg)
			if err := conn.Handshake(); err != nil {
				t.Error(err)
			}
			cancel() // all that is left to wait for is the verdict
			io.Copy(io.Discard, conn)
		})
		_, _, err := NewClient(w.clientConfig()).ClientHandshake(ctx, "", cr)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		wg.Wait()
	})
	t.Run("when noise arrives", func(t *testing.T) {
		cr, sr := pipe(t)
		cr.Write([]byte("GET / HTTP/1.1\r\nHost: join\r\n\r\n"))
		_, _, err := NewServer(w.serverConfig()).ServerHandshake(sr)
		if err == nil || !strings.Contains(err.Error(), "does not look like a TLS handshake") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("when a client that need not attest speaks HTTP/1.1", func(t *testing.T) {
		cr, sr := pipe(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			tls.Client(cr, &tls.Config{
				InsecureSkipVerify: true, NextProtos: []string{"http/1.1", nonceProtocol + strings.Repeat("ab", nonceSize)},
			}).Handshake()
			cr.Close()
		})
		_, _, err := NewServer(Config{Purpose: PurposeInit, Issuer: w.node}).ServerHandshake(sr)
		wg.Wait()
		if err == nil || !strings.Contains(err.Error(), "the client does not speak h2") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("without a report when the port was only probed", func(t *testing.T) {
		cr, sr := pipe(t)
		cr.Close()
		cfg := w.serverConfig()
		cfg.OnFailure = func(_ net.Addr, err error) { t.Errorf("reported: %v", err) }
		if _, _, err := NewServer(cfg).ServerHandshake(sr); err == nil {
			t.Error("no error")
		}
	})
	t.Run("for the oldest when too many are under way", func(t *testing.T) {
		cfg := w.serverConfig()
		cfg.MaxSilent = 1
		creds := NewServer(cfg)
		_, sr := pipe(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, _, err := creds.ServerHandshake(sr); !errors.Is(err, ErrBusy) {
				t.Errorf("the stalled one ended with %v, want %v", err, ErrBusy)
			}
		})
		for creds.(serverCredentials).hello.size() == 0 {
			time.Sleep(time.Millisecond)
		}
		cr, third := pipe(t)
		wg.Go(func() {
			if conn, _, err := creds.ServerHandshake(third); err != nil {
				t.Errorf("afterwards: %v", err)
			} else {
				conn.Close()
			}
		})
		if _, _, err := NewClient(w.clientConfig()).ClientHandshake(t.Context(), "", cr); err != nil {
			t.Errorf("afterwards: %v", err)
		}
		wg.Wait()
	})
}

// TestJoinOfEnrolledMachines is a join between two machines without a TPM, and what happens when the
// machine that joined tries again.
func TestJoinOfEnrolledMachines(t *testing.T) {
	cert, key, err := workspace.Create("demo")
	if err != nil {
		t.Fatal(err)
	}
	a, err := workspace.Parse(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	roots, err := attestation.ParseRoots(cert)
	if err != nil {
		t.Fatal(err)
	}
	enrol := func(id attestation.Identity) string {
		t.Helper()
		dir := t.TempDir()
		if err := attestationtest.Enrol(t.Context(), a, dir, id); err != nil {
			t.Fatal(err)
		}
		return "enrolled:" + dir
	}
	node, service, cluster := enrol(identity("worker-0", cloud.Worker)), enrol(identity("control-plane-0", cloud.ControlPlane)), []byte("cluster")
	if err := attestation.ExtendClusterID(t.Context(), service, cluster); err != nil {
		t.Fatal(err)
	}
	config := func(address string, rule attestation.PCR15) Config {
		v := attestation.NewEnrolledValidator(roots, attestation.Options{PCR15: rule})
		return Config{Purpose: PurposeJoin, Issuer: attestation.NewEnrolledIssuer(address), Validator: func() attestation.Validator { return v }, HandshakeTimeout: 30 * time.Second}
	}
	client, server := config(node, attestation.PCR15Member()), config(service, attestation.PCR15Zero())
	if o := meet(t, client, server); o.client != nil || o.server != nil || nameOf(o.toClient) != "control-plane-0" || nameOf(o.toServer) != "worker-0" {
		t.Errorf("client: %v, server: %v", o.client, o.server)
	}
	if err := attestation.ExtendClusterID(t.Context(), node, cluster); err != nil {
		t.Fatal(err)
	}
	if o := meet(t, client, server); !errors.Is(o.server, attestation.ErrMember) || !errors.Is(o.client, ErrRefused) {
		t.Errorf("the member joined again: client: %v, server: %v", o.client, o.server)
	}
	w := newWorld(t)
	if o := meet(t, w.clientConfig(), server); o.client == nil || o.server == nil {
		t.Error("a machine of a cloud joined those of a workspace")
	}
}

// witness is a gRPC service that tells its caller apart.
type witness struct {
	healthpb.UnimplementedHealthServer
	saw chan attestation.Statement
}

func (w witness) Check(ctx context.Context, _ *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	st, ok := PeerStatement(ctx)
	if ok {
		w.saw <- st
	}
	return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}, nil
}

func TestGRPC(t *testing.T) {
	w := newWorld(t)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	svc := witness{saw: make(chan attestation.Statement, 1)}
	srv := grpc.NewServer(grpc.Creds(NewServer(w.serverConfig())))
	healthpb.RegisterHealthServer(srv, svc)
	var wg sync.WaitGroup
	wg.Go(func() { srv.Serve(lis) })
	defer wg.Wait()
	defer srv.Stop()

	t.Run("both sides know each other", func(t *testing.T) {
		conn, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(NewClient(w.clientConfig())))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var p peer.Peer
		if _, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}, grpc.Peer(&p)); err != nil {
			t.Fatal(err)
		}
		want := attestation.Statement{Identity: identity("worker-0", cloud.Worker), Attested: true}
		if d := cmp.Diff(want, <-svc.saw, cmpopts.EquateComparable(netip.Addr{}),
			cmpopts.IgnoreFields(attestation.Statement{}, "PCRs", "Firmware", "Resets")); d != "" {
			t.Errorf("the server's statement (-want +got):\n%s", d)
		}
		if st, ok := PeerStatement(peer.NewContext(t.Context(), &p)); !ok || st.Identity.Name != "control-plane-0" {
			t.Errorf("the client's statement: %v, %v", st.Identity, ok)
		}
	})
	t.Run("a refused client learns why from the call and from OnFailure", func(t *testing.T) {
		cfg := w.clientConfig()
		cfg.Issuer = machine(t, w.ca, identity("worker-0", cloud.Worker), "evil", nil)
		saw := make(chan error, 10)
		cfg.OnFailure = func(_ net.Addr, err error) { saw <- err }
		conn, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(NewClient(cfg)))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
		if err == nil || !strings.Contains(err.Error(), "measurements are not among the accepted ones") {
			t.Errorf("got %v", err)
		}
		if err := <-saw; !errors.Is(err, ErrRefused) {
			t.Errorf("OnFailure got %v", err)
		}
	})
	t.Run("a plain context has no statement", func(t *testing.T) {
		if _, ok := PeerStatement(t.Context()); ok {
			t.Error("there is one")
		}
	})
}

func TestPeerStatementOfTheUnattested(t *testing.T) {
	for name, p := range map[string]*peer.Peer{
		"a peer that was not asked": {AuthInfo: authInfo(nil)},
		"a peer without TLS":        {},
	} {
		if st, ok := PeerStatement(peer.NewContext(t.Context(), p)); ok {
			t.Errorf("%s states %v", name, st)
		}
	}
}

func TestNonceInAnAuthority(t *testing.T) {
	nonce := bytes.Repeat([]byte{7}, nonceSize)
	name, err := authority(nonce)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := parseAuthority(name); err != nil || !bytes.Equal(got, nonce) {
		t.Errorf("came back as %x, %v", got, err)
	}
	for what, der := range map[string][]byte{
		"nothing":                      nil,
		"noise":                        []byte("noise"),
		"a name with something behind": append(bytes.Clone(name), 0),
		"a name without a nonce":       {0x30, 0},
	} {
		if got, err := parseAuthority(der); err == nil {
			t.Errorf("%s was read as %x", what, got)
		}
	}
}

func TestBindingIsUnambiguous(t *testing.T) {
	seen := map[string]string{}
	for _, p := range []Purpose{PurposeInit, PurposeJoin, "", "joinc"} {
		for _, r := range []role{client, server, "", "lient"} {
			for _, n := range [][]byte{nil, {0}, make([]byte, 32)} {
				for _, k := range [][]byte{nil, {0}, []byte("key")} {
					what := string(p) + "/" + string(r) + "/" + hex.EncodeToString(n) + "/" + hex.EncodeToString(k)
					h := string(binding(p, r, n, k))
					if other, ok := seen[h]; ok {
						t.Errorf("%s and %s bind the same", what, other)
					}
					seen[h] = what
				}
			}
		}
	}
}
