// Package atls is TLS whose certificates carry attestation evidence bound to a fresh nonce.
package atls

import (
	"context"
	"errors"
	"net"
	"time"

	"google.golang.org/grpc/credentials"

	"constellation/engine/attestation"
)

// Purpose separates the services that speak atls: evidence made for one is refused by another.
type Purpose string

const (
	PurposeInit Purpose = "init"
	PurposeJoin Purpose = "join"
)

// ErrRefused means that the other side refused our evidence.
var ErrRefused = errors.New("the other side refused our evidence")

type Config struct {
	Purpose Purpose
	Issuer  attestation.Issuer // nil: present none
	// Validator returns the snapshot to judge one connection with; nil: verify none.
	Validator        func() attestation.Validator
	HandshakeTimeout time.Duration // zero: 10 s
	// OnFailure, if set, is called once for each failed handshake with the full reason: gRPC itself keeps
	// only a text at the client and nothing at the server. Servers log it, clients can test it with errors.Is.
	OnFailure func(peer net.Addr, err error)
}

// AuthInfo is what grpc's peer.AuthInfo holds on such a connection.
type AuthInfo struct {
	credentials.CommonAuthInfo
	// Statement is what the other side's evidence states; nil if none was asked for.
	Statement *attestation.Statement
}

// AuthType implements credentials.AuthInfo.
func (AuthInfo) AuthType() string { return "atls" }

func NewClient(cfg Config) credentials.TransportCredentials { return nil }
func NewServer(cfg Config) credentials.TransportCredentials { return nil }

// PeerStatement returns what the other side's evidence states.
func PeerStatement(ctx context.Context) (attestation.Statement, bool) {
	return attestation.Statement{}, false
}
