package atls

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"

	"constellation/engine/attestation"
)

const (
	protocol = "h2"
	// nonceProtocol is the prefix of the pseudo protocol name that carries the client's nonce in
	// hex.
	nonceProtocol = "constellation-atls-1/"
	// maxCertificate leaves room for what surrounds the document.
	maxCertificate = attestation.MaxDocument + 2048
)

// side is what both kinds of credentials share. It never changes after it was
// made.
type side struct {
	cfg Config
	key *ecdsa.PrivateKey
	// spki is key's public half as certificates hold it.
	spki []byte
	// broken is why no handshake can succeed.
	broken error
}

func newSide(cfg Config) *side {
	s := &side{cfg: cfg, broken: cfg.check()}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		s.broken = errors.Join(s.broken, fmt.Errorf("create key: %w", err))
		return s
	}
	s.key = key
	if s.spki, err = x509.MarshalPKIXPublicKey(key.Public()); err != nil {
		s.broken = errors.Join(s.broken, fmt.Errorf("encode key: %w", err))
	}
	return s
}

// failed reports err, once, and gives it back.
func (s *side) failed(conn net.Conn, err error) error {
	if s.cfg.OnFailure != nil {
		s.cfg.OnFailure(conn.RemoteAddr(), err)
	}
	return err
}

// config is what both roles have in common.
func (s *side) config() *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		MaxVersion:             tls.VersionTLS13,
		NextProtos:             []string{protocol},
		SessionTicketsDisabled: true,
	}
}

// checkPeer looks at what the other side sent before anything expensive is done
// with it, such as checking the signature of an oversized key.
func checkPeer(cs tls.ConnectionState) error {
	if cs.NegotiatedProtocol != protocol {
		return fmt.Errorf("%w: protocol %q was agreed on, want %s", attestation.ErrDocument, cs.NegotiatedProtocol, protocol)
	}
	if n := len(cs.PeerCertificates); n != 1 {
		return fmt.Errorf("%w: %d certificates were sent, want one", attestation.ErrDocument, n)
	}
	cert := cs.PeerCertificates[0]
	if len(cert.Raw) > maxCertificate {
		return fmt.Errorf("%w: certificate has %d bytes, at most %d are allowed", attestation.ErrDocument, len(cert.Raw), maxCertificate)
	}
	if key, ok := cert.PublicKey.(*ecdsa.PublicKey); !ok || key.Curve != elliptic.P256() {
		return fmt.Errorf("%w: key of the certificate is not on P-256", attestation.ErrDocument)
	}
	return nil
}

// validator returns the snapshot to judge one connection with; nil if no evidence
// is demanded.
func (s *side) validator() (attestation.Validator, error) {
	if s.cfg.Validator == nil {
		return nil, nil
	}
	v := s.cfg.Validator()
	if v == nil {
		return nil, errors.New("there are no measurements yet to judge the other side by")
	}
	return v, nil
}

// evidence returns the document that binds nonce; nil without an issuer.
func (s *side) evidence(ctx context.Context, of role, nonce []byte) ([]byte, error) {
	if s.cfg.Issuer == nil {
		return nil, nil
	}
	issue := func() ([]byte, error) { return s.cfg.Issuer.Issue(ctx, binding(s.cfg.Purpose, of, nonce, s.spki)) }
	if s.cfg.Evidence != nil && of == server {
		issue = func() ([]byte, error) { return s.cfg.Evidence(ctx, nonce, s.spki) }
	}
	doc, err := issue()
	if err != nil {
		return nil, fmt.Errorf("make evidence: %w", err)
	}
	return doc, nil
}

// certificate makes the certificate for one connection. With an issuer it carries
// evidence that binds nonce.
func (s *side) certificate(ctx context.Context, of role, nonce []byte) (*tls.Certificate, error) {
	doc, err := s.evidence(ctx, of, nonce)
	if err != nil {
		return nil, err
	}
	return s.selfSigned(doc)
}

// selfSigned makes a certificate that carries doc, if that is not nil.
func (s *side) selfSigned(doc []byte) (*tls.Certificate, error) {
	t := &x509.Certificate{
		Subject:   pkix.Name{CommonName: domain},
		NotBefore: time.Unix(0, 0),
		NotAfter:  time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), // RFC 5280: no well-defined end
	}
	if doc != nil {
		t.ExtraExtensions = []pkix.Extension{{Id: s.cfg.Issuer.Variant().OID(), Value: doc}}
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, s.key.Public(), s.key)
	if err != nil {
		return nil, fmt.Errorf("create certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: s.key}, nil
}

// judge checks the evidence in the certificate of the other side, which must have
// passed checkPeer.
func (s *side) judge(ctx context.Context, v attestation.Validator, cert *x509.Certificate, of role, nonce []byte) (*attestation.Statement, error) {
	for _, e := range cert.Extensions { // the parser refuses two of a kind
		if !e.Id.Equal(v.Variant().OID()) {
			continue
		}
		st, err := v.Validate(ctx, e.Value, binding(s.cfg.Purpose, of, nonce, cert.RawSubjectPublicKeyInfo))
		if err != nil {
			return nil, err
		}
		return &st, nil
	}
	return nil, fmt.Errorf("%w: the certificate carries no evidence of variant %s", attestation.ErrDocument, v.Variant())
}

func newNonce() ([]byte, error) {
	n := make([]byte, nonceSize)
	if _, err := rand.Read(n); err != nil {
		return nil, fmt.Errorf("create nonce: %w", err)
	}
	return n, nil
}

func parseNonce(s string) ([]byte, error) {
	n, err := hex.DecodeString(s)
	if err != nil || len(n) != nonceSize {
		return nil, fmt.Errorf("nonce is not %d hex digits", 2*nonceSize)
	}
	return n, nil
}

// authority returns an X.501 name with nonce as its common name.
func authority(nonce []byte) ([]byte, error) {
	return encasn1.Marshal(pkix.Name{CommonName: hex.EncodeToString(nonce)}.ToRDNSequence())
}

func parseAuthority(der []byte) ([]byte, error) {
	var seq pkix.RDNSequence
	rest, err := encasn1.Unmarshal(der, &seq)
	if err != nil || len(rest) > 0 {
		return nil, errors.New("authority is not a name")
	}
	var n pkix.Name
	n.FillFromRDNSequence(&seq)
	return parseNonce(n.CommonName)
}

// alert returns what the other side said when it broke a handshake off, or "".
func alert(err error) string {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "remote error" {
		return strings.TrimPrefix(op.Err.Error(), "tls: ")
	}
	return ""
}

// clientCredentials implement credentials.TransportCredentials.
type clientCredentials struct{ *side }

// NewClient returns credentials for a gRPC client. They may be used for any number
// of connections at the same time. A Config that cannot work fails at the first
// handshake.
func NewClient(cfg Config) credentials.TransportCredentials {
	return clientCredentials{newSide(cfg)}
}

// Info implements credentials.TransportCredentials.
func (clientCredentials) Info() credentials.ProtocolInfo { return info() }

// Clone implements credentials.TransportCredentials.
func (c clientCredentials) Clone() credentials.TransportCredentials { return c }

// OverrideServerName implements credentials.TransportCredentials. Names mean
// nothing here.
func (clientCredentials) OverrideServerName(string) error { return nil }

// ServerHandshake implements credentials.TransportCredentials.
func (clientCredentials) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("credentials of an atls client cannot serve")
}

// ClientHandshake implements credentials.TransportCredentials. If the server
// refused, the error is a *RefusedError; if the server was refused, it wraps what
// the validator said.
func (c clientCredentials) ClientHandshake(ctx context.Context, _ string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, st, err := c.connect(ctx, raw)
	if err != nil {
		raw.Close()
		return nil, nil, c.failed(raw, err)
	}
	return conn, authInfo(st), nil
}

func (c clientCredentials) connect(ctx context.Context, raw net.Conn) (_ net.Conn, st *attestation.Statement, err error) {
	if c.broken != nil {
		return nil, nil, c.broken
	}
	v, err := c.validator()
	if err != nil {
		return nil, nil, err
	}
	nonce, err := newNonce()
	if err != nil {
		return nil, nil, err
	}
	ctx, release := bound(ctx, c.cfg.timeout(), raw)
	defer func() { err = release(err) }()

	var (
		asked   bool  // the server demands evidence
		refused error // ours, of the server
		own     error // our evidence could not be made
	)
	cfg := c.config()
	cfg.InsecureSkipVerify = true // names and authorities mean nothing; VerifyConnection judges
	cfg.NextProtos = append(cfg.NextProtos, nonceProtocol+hex.EncodeToString(nonce))
	cfg.VerifyConnection = func(cs tls.ConnectionState) error {
		if refused = checkPeer(cs); refused == nil && v != nil {
			st, refused = c.judge(ctx, v, cs.PeerCertificates[0], server, nonce)
		}
		return refused
	}
	cfg.GetClientCertificate = func(r *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		asked = true
		cert, err := c.answer(ctx, r)
		own = err
		return cert, err
	}
	conn := tls.Client(raw, cfg)
	if err := conn.HandshakeContext(context.WithoutCancel(ctx)); err != nil {
		switch a := alert(err); {
		case refused != nil:
			return nil, nil, fmt.Errorf("evidence of the server: %w", refused)
		case own != nil:
			return nil, st, own
		case a == "internal error":
			return nil, nil, fmt.Errorf("atls handshake: the server could not make its evidence, its log says why: %w", err)
		case a != "":
			return nil, nil, fmt.Errorf("atls handshake: the server broke it off: %w", err)
		default:
			return nil, nil, fmt.Errorf("atls handshake: %w", err)
		}
	}
	if asked {
		verdict := make([]byte, 1)
		if _, err := io.ReadFull(conn, verdict); err != nil {
			if a := alert(err); a != "" {
				return nil, nil, fmt.Errorf("%w (%s)", ErrRefused, a)
			}
			return nil, nil, fmt.Errorf("wait for the server's verdict: %w", err)
		}
		if r := Reason(verdict[0]); r != accepted {
			return nil, nil, &RefusedError{r}
		}
	}
	return conn, st, nil
}

// errNoEvidence ends a handshake with a server that demands evidence. By then the server has proved possession of its key, and
// its evidence was accepted.
var errNoEvidence = errors.New("the server demands evidence of this side, which has none to give")

// Inspect returns what fresh evidence of a server states, if v accepts it. It shows no evidence of its own, so a server that
// demands some, such as a join service, is inspected all the same, and logs that this client was refused. It closes raw.
func Inspect(ctx context.Context, p Purpose, v attestation.Validator, raw net.Conn) (attestation.Statement, error) {
	defer raw.Close()
	c := clientCredentials{newSide(Config{Purpose: p, Validator: func() attestation.Validator { return v }})}
	conn, st, err := c.connect(ctx, raw)
	if err == nil {
		conn.Close()
	}
	if err != nil && !errors.Is(err, errNoEvidence) || st == nil {
		return attestation.Statement{}, err
	}
	return *st, nil
}

// answer makes the certificate that a server asks for.
func (c clientCredentials) answer(ctx context.Context, r *tls.CertificateRequestInfo) (*tls.Certificate, error) {
	if c.cfg.Issuer == nil {
		return nil, errNoEvidence
	}
	if len(r.AcceptableCAs) != 1 {
		return nil, errors.New("the server demands evidence without a nonce: it does not speak atls")
	}
	nonce, err := parseAuthority(r.AcceptableCAs[0])
	if err != nil {
		return nil, fmt.Errorf("the server demands evidence without a nonce: %w", err)
	}
	return c.certificate(ctx, client, nonce)
}

// serverCredentials implement credentials.TransportCredentials.
type serverCredentials struct {
	*side
	hello, handshake, connected *pool
	quotes                      *quotes
}

// NewServer returns credentials for a gRPC server. A Config that cannot work fails
// at the first handshake.
func NewServer(cfg Config) credentials.TransportCredentials {
	return serverCredentials{
		side:      newSide(cfg),
		hello:     newPool("hello", cmp.Or(max(0, cfg.MaxSilent), defaultSilent), 0),
		handshake: newPool("handshake", cmp.Or(max(0, cfg.MaxHandshakes), defaultHandshakes), maxFlights),
		connected: newPool("connection", cmp.Or(max(0, cfg.MaxConnections), defaultConnections), 0),
		quotes:    &quotes{},
	}
}

// Info implements credentials.TransportCredentials.
func (serverCredentials) Info() credentials.ProtocolInfo { return info() }

// Clone implements credentials.TransportCredentials.
func (s serverCredentials) Clone() credentials.TransportCredentials { return s }

// OverrideServerName implements credentials.TransportCredentials. Names mean
// nothing here.
func (serverCredentials) OverrideServerName(string) error { return nil }

// ClientHandshake implements credentials.TransportCredentials.
func (serverCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("credentials of an atls server cannot dial")
}

// errNothing means that a connection was closed before it sent anything.
var errNothing = errors.New("closed before it began")

// ServerHandshake implements credentials.TransportCredentials.
func (s serverCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	source := sourceOf(raw.RemoteAddr())
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	slot := &slot{end: func() { cancel(); reset(raw) }}
	g := newGuard(raw, slot)
	g.enter(s.hello, source)
	conn, st, err := s.accept(ctx, g, source)
	if why := slot.why(); why != nil && err != nil {
		err = why // what that did to the handshake tells nothing
	}
	var proof func()
	if err == nil {
		proof, err = s.keep(g, source, st)
	}
	if err != nil {
		g.Close()
		if !errors.Is(err, errNothing) {
			err = s.failed(raw, err)
		}
		return nil, nil, err
	}
	info := authInfo(st)
	info.proof = proof
	return conn, info, nil
}

// keep counts a connection whose handshake is through, and returns what to call when
// its client is proven.
func (s serverCredentials) keep(g *guard, source string, st *attestation.Statement) (proof func(), err error) {
	g.allow(-1)
	if st != nil {
		s.quotes.proven(source)
		return nil, g.move(s.connected, st.Identity.Name)
	}
	if s.cfg.ProofTimeout <= 0 {
		s.quotes.proven(source)
		return nil, g.move(s.connected, source)
	}
	if err := g.move(s.connected, source); err != nil {
		return nil, err
	}
	stop := g.slot.expire(s.connected, s.cfg.ProofTimeout, "no proof of being a rightful client")
	return sync.OnceFunc(func() {
		stop()
		s.quotes.proven(source)
		_ = g.move(nil, "") // it may have been closed meanwhile
	}), nil
}

func (s serverCredentials) accept(ctx context.Context, raw *guard, source string) (_ net.Conn, st *attestation.Statement, err error) {
	if s.broken != nil {
		return nil, nil, s.broken
	}
	v, err := s.validator()
	if err != nil {
		return nil, nil, err
	}
	ctx, release := bound(ctx, s.cfg.timeout(), raw)
	defer func() { err = release(err) }()
	stop := raw.slot.expire(s.hello, cmp.Or(max(0, s.cfg.HelloTimeout), defaultHello), "no complete ClientHello")
	defer stop()

	var (
		nonce   []byte
		begun   bool
		own     error // our evidence could not be made
		refused error // theirs
	)
	cfg := s.config()
	if v != nil {
		if nonce, err = newNonce(); err != nil {
			return nil, nil, err
		}
		name, err := authority(nonce)
		if err != nil {
			return nil, nil, fmt.Errorf("encode nonce: %w", err)
		}
		cfg.ClientAuth = tls.RequireAnyClientCert
		cfg.ClientCAs = x509.NewCertPool()
		cfg.ClientCAs.AddCert(&x509.Certificate{Raw: nonce, RawSubject: name})
		cfg.VerifyConnection = func(cs tls.ConnectionState) error {
			refused = checkPeer(cs)
			return refused
		}
	}
	cfg.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		begun = true
		stop()
		raw.allow(maxFlight)
		return nil, raw.move(s.handshake, source)
	}
	cfg.GetCertificate = func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
		cert, err := s.present(ctx, h, raw, source)
		own = err
		return cert, err
	}
	conn := tls.Server(raw, cfg)
	if err := conn.HandshakeContext(context.WithoutCancel(ctx)); err != nil {
		switch a := alert(err); {
		case own != nil:
			return nil, st, own
		case !begun && errors.Is(err, io.EOF):
			return nil, nil, errNothing
		case a == "bad certificate":
			return nil, nil, fmt.Errorf("%w (%s)", ErrRefused, a)
		case refused != nil:
			return nil, nil, fmt.Errorf("evidence of the client: %w", refused)
		default:
			return nil, nil, fmt.Errorf("atls handshake: %w", err)
		}
	}
	cs := conn.ConnectionState()
	if cs.NegotiatedProtocol != protocol {
		return nil, nil, fmt.Errorf("atls handshake: the client does not speak %s", protocol)
	}
	if v == nil {
		return conn, nil, nil
	}
	if st, refused = s.judge(ctx, v, cs.PeerCertificates[0], client, nonce); refused != nil {
		// Best effort: the client may have gone, and the connection ends either way.
		_, _ = conn.Write([]byte{byte(reasonFor(refused))})
		_ = conn.Close()
		return nil, nil, fmt.Errorf("evidence of the client: %w", refused)
	}
	if _, err := conn.Write([]byte{byte(accepted)}); err != nil {
		return nil, nil, fmt.Errorf("tell the client that it is accepted: %w", err)
	}
	return conn, st, nil
}

// present makes the certificate for the client that said hello. A client that sent
// no nonce, or that hung up, costs no evidence.
func (s serverCredentials) present(ctx context.Context, h *tls.ClientHelloInfo, raw *guard, source string) (*tls.Certificate, error) {
	if s.cfg.Issuer == nil {
		return s.selfSigned(nil)
	}
	var text string
	for _, p := range h.SupportedProtos {
		if rest, ok := strings.CutPrefix(p, nonceProtocol); ok {
			if text != "" {
				return nil, errors.New("the client sent two nonces")
			}
			text = rest
		}
	}
	if text == "" {
		return nil, errors.New("the client sent no nonce: it does not speak atls")
	}
	nonce, err := parseNonce(text)
	if err != nil {
		return nil, fmt.Errorf("the client's %w", err)
	}
	doc, err := s.quote(ctx, raw, source, nonce)
	if err != nil {
		return nil, err
	}
	return s.selfSigned(doc)
}

// quote makes the server's evidence when it is the turn of source.
func (s serverCredentials) quote(ctx context.Context, raw *guard, source string, nonce []byte) ([]byte, error) {
	if err := s.quotes.acquire(ctx, source); err != nil {
		return nil, fmt.Errorf("wait for a quote: %w", err)
	}
	defer s.quotes.release()
	if hungUp(raw.Conn) {
		return nil, errors.New("the client hung up before the server's evidence was made")
	}
	return s.evidence(ctx, server, nonce)
}

func info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "atls"}
}

func authInfo(st *attestation.Statement) AuthInfo {
	return AuthInfo{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		Statement:      st,
	}
}

// bound closes conn when ctx ends or timeout has passed. The deadlines of conn are
// gRPC's and stay as they are. release ends that, and replaces what the closing
// did to a handshake by why it was closed.
func bound(ctx context.Context, timeout time.Duration, conn net.Conn) (context.Context, func(error) error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	return ctx, func(err error) error {
		defer cancel()
		closed := !stop()
		if !closed || err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.ErrClosedPipe) {
			return err
		}
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("atls handshake took longer than %s: %w", timeout, ctx.Err())
		}
		return fmt.Errorf("atls handshake: %w", ctx.Err())
	}
}
