// Package atls is TLS whose certificates carry attestation evidence: who answers
// is not who holds a certificate, but which machine it is and what it booted.
//
// [NewClient] and [NewServer] return credentials for gRPC. Only TLS 1.3 is spoken,
// without session tickets, resumption or early data, so every connection is a
// handshake of its own, and every handshake has evidence of its own. Each side
// makes a self-signed certificate for the connection, with the document of its
// [attestation.Issuer] in an extension. The document binds the SHA-256 of, each
// with its length before it, the name of this protocol, the [Purpose], the role
// of its maker (client or server), the other side's fresh nonce, and the public
// key of the certificate. The TLS handshake proves possession of that key. So
// evidence that was recorded, relayed, or made for another service or the other
// role is refused.
//
// The client's nonce travels in the ClientHello as an extra protocol name of ALPN,
// "constellation-atls-1/" and 64 hex digits; a server name would do as well, but
// load balancers route and log by it. The server's nonce travels in its
// CertificateRequest, as the common name of the one authority that it says it
// accepts. Both are covered by the handshake's transcript.
//
// A client judges the server before it shows evidence of its own. A server judges
// the client when the TLS handshake is through, and then sends one byte: zero, or
// the class of the error, so that a refused client can show the reason although the
// details stay in the server's log. Beyond key and evidence, the content of the
// certificate (its signature, names and dates) is ignored: the key is bound by the
// evidence, and a nonce is a better proof of freshness than two clocks.
//
// A server bounds what strangers cost it and shares that fairly among sources:
// connections without a ClientHello, handshakes, and quotes, which a TPM makes one
// at a time. See [Config] and admission.go. Beyond that the package keeps no state
// between connections, and it holds no lock while it judges evidence. It never
// judges what a genuine peer may do: that is for who asks PeerStatement.
package atls

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"constellation/engine/attestation"
)

// Purpose separates the services that speak atls: evidence that was made for one
// is refused by another.
type Purpose string

// The services of a cluster.
const (
	PurposeInit Purpose = "init" // a console and the first machine
	PurposeJoin Purpose = "join" // a machine and the join service
)

// defaultTimeout is enough for two quotes of a slow hardware TPM.
const defaultTimeout = 10 * time.Second

// Config is what one side of a connection shows and demands. It must have an
// Issuer, a Validator or both; which of them has to match the other side's.
type Config struct {
	Purpose Purpose
	// Issuer makes this side's evidence; nil shows none.
	Issuer attestation.Issuer
	// Evidence makes the evidence of a server instead, if another process has the TPM and computes what evidence binds, by
	// ServerBinding. Issuer names the variant then. Nil: Issuer makes it.
	Evidence func(ctx context.Context, nonce, publicKey []byte) (document []byte, err error)
	// Validator returns what to judge the other side's evidence with. It is called
	// once for each connection, so that a new snapshot counts from the next
	// connection on. If it returns nil the connection fails. A nil func demands no
	// evidence.
	Validator func() attestation.Validator
	// HandshakeTimeout bounds a handshake with everything in it; zero stands for
	// 10 seconds.
	HandshakeTimeout time.Duration
	// MaxSilent, MaxHandshakes and MaxConnections bound the connections of a server
	// that have sent no complete ClientHello, that are in a handshake, and that are
	// past it. Zero stands for 2048, 1024 and 4096. A server that is full closes the
	// oldest connection of the source that holds the most: an IPv4 address, an IPv6
	// network of 64 bits, or, past the handshake, an attested machine. Clients ignore
	// these fields and the next two.
	MaxSilent, MaxHandshakes, MaxConnections int
	// HelloTimeout is when a server closes a connection without a complete
	// ClientHello; zero stands for 3 seconds.
	HelloTimeout time.Duration
	// ProofTimeout is when a server without a Validator closes a connection for which
	// Prove was not called; until then it counts against MaxConnections. Zero stands
	// for no limit. With a Validator the evidence is proof.
	ProofTimeout time.Duration
	// OnFailure, if set, is called once for each handshake that fails, with the
	// full reason: gRPC keeps nothing of it at a server, and only the text at a
	// client, where errors.Is no longer works. It may be called concurrently. A
	// connection that is closed before it sent anything, as load balancers do to
	// see whether a port is open, does not count.
	OnFailure func(peer net.Addr, err error)
}

func (c Config) timeout() time.Duration {
	if c.HandshakeTimeout > 0 {
		return c.HandshakeTimeout
	}
	return defaultTimeout
}

func (c Config) check() error {
	if c.Issuer == nil && c.Validator == nil {
		return errors.New("neither side of the connection would be attested: an issuer or a validator is needed")
	}
	return nil
}

// ErrRefused means that the other side refused our evidence. A *RefusedError
// says why, if the other side did.
var ErrRefused = errors.New("the other side refused the evidence of this machine")

// Reason is the class of what a server found wrong with a client's evidence. It
// is all that a refused client learns; the details are in the server's log.
type Reason uint8

// Reasons, as they travel. Zero means accepted and is never part of an error.
const (
	ReasonOther        Reason = 1
	ReasonDocument     Reason = 2
	ReasonTrust        Reason = 3
	ReasonQuote        Reason = 4
	ReasonMeasurements Reason = 5
	ReasonMember       Reason = 6
	ReasonIdentity     Reason = 7

	accepted Reason = 0
)

// String is a sentence part.
func (r Reason) String() string {
	switch r {
	case ReasonDocument:
		return "it could not be read"
	case ReasonTrust:
		return "no cloud that it trusts certified the machine"
	case ReasonQuote:
		return "the quote is not valid for this connection"
	case ReasonMeasurements:
		return "the machine's measurements are not among the accepted ones"
	case ReasonMember:
		return "the machine belongs, or does not belong, to a cluster already"
	case ReasonIdentity:
		return "the machine is not one of this cluster's instances"
	}
	return "its log says why"
}

// reasonFor is the class of a validator's error.
func reasonFor(err error) Reason {
	for _, c := range []struct {
		err    error
		reason Reason
	}{
		{attestation.ErrDocument, ReasonDocument},
		{attestation.ErrTrust, ReasonTrust},
		{attestation.ErrQuote, ReasonQuote},
		{attestation.ErrMeasurement, ReasonMeasurements},
		{attestation.ErrMember, ReasonMember},
		{attestation.ErrIdentity, ReasonIdentity},
	} {
		if errors.Is(err, c.err) {
			return c.reason
		}
	}
	return ReasonOther
}

// RefusedError is what a client gets whose evidence the server refused. It wraps
// ErrRefused.
type RefusedError struct{ Reason Reason }

func (e *RefusedError) Error() string { return fmt.Sprintf("%v: %v", ErrRefused, e.Reason) }

// Unwrap makes errors.Is(err, ErrRefused) true.
func (e *RefusedError) Unwrap() error { return ErrRefused }

// AuthInfo is what gRPC keeps with a connection.
type AuthInfo struct {
	credentials.CommonAuthInfo
	// Statement is what the other side's accepted evidence says; nil if none was
	// demanded.
	Statement *attestation.Statement

	// proof is called when the client proved what it knows; nil if there is nothing
	// to prove.
	proof func()
}

// AuthType implements credentials.AuthInfo.
func (AuthInfo) AuthType() string { return "atls" }

// PeerStatement returns what the evidence of the other side says. It works in the
// context of a handler, and with grpc.Peer in that of a client (see peer.NewContext).
// It is false if this side demanded no evidence, or if the connection is not atls.
func PeerStatement(ctx context.Context) (attestation.Statement, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return attestation.Statement{}, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	if !ok || info.Statement == nil {
		return attestation.Statement{}, false
	}
	return *info.Statement, true
}

// Prove marks the client of the handler that runs in ctx as authenticated; without client
// evidence only the handler can authenticate it. The connection then no longer counts
// against MaxConnections. Further calls, and calls on other connections, have no effect.
func Prove(ctx context.Context) {
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(AuthInfo); ok && info.proof != nil {
			info.proof()
		}
	}
}

// role is whose evidence it is.
type role string

const (
	client role = "client"
	server role = "server"
)

// domain separates what this protocol hashes from everything else that is hashed.
const domain = "constellation atls 1"

const nonceSize = 32

// ServerBinding is what the evidence of a server must bind in a connection with a purpose: the nonce of the client, and the server's public
// key in the form of a SubjectPublicKeyInfo.
func ServerBinding(p Purpose, nonce, publicKey []byte) []byte {
	return binding(p, server, nonce, publicKey)
}

// binding is what evidence must bind: the connection, who made it, and what for.
func binding(p Purpose, of role, nonce, publicKey []byte) []byte {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(domain), []byte(p), []byte(of), nonce, publicKey} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		h.Write(part)
	}
	return h.Sum(nil)
}
