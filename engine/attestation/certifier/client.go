//go:build linux

package certifier

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"

	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier/internal/protocol"
	"constellation/internal/peercred"
)

// Client uses the certifier of the same machine. It may be used concurrently.
type Client struct {
	// Socket is the path of the certifier's socket.
	Socket string
}

// call sends one request and returns the answer.
func (c Client) call(ctx context.Context, m protocol.Message) (protocol.Message, error) {
	op := m.Op
	ctx, cancel := context.WithTimeout(ctx, protocol.Timeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.Socket)
	if err != nil {
		return protocol.Message{}, fmt.Errorf("ask the certifier: %w", err)
	}
	defer conn.Close()
	// Another user could have made the socket.
	if p, err := peercred.Of(conn); err != nil || p.UID != 0 && p.UID != uint32(os.Geteuid()) {
		return protocol.Message{}, fmt.Errorf("ask the certifier: user %d listens at %s, want root", p.UID, c.Socket)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var answer protocol.Message
	if err := protocol.Send(conn, m); err != nil {
		return protocol.Message{}, fmt.Errorf("ask the certifier: %w", err)
	}
	if err := protocol.Receive(conn, &answer); err != nil {
		return protocol.Message{}, fmt.Errorf("ask the certifier: %w", err)
	}
	if answer.Error != "" {
		return protocol.Message{}, &RefusedError{op, answer.Error}
	}
	return answer, nil
}

// RefusedError means that the certifier answered, and refused.
type RefusedError struct{ Op, Reason string }

// Error implements error.
func (e *RefusedError) Error() string { return "ask the certifier (" + e.Op + "): " + e.Reason }

// Authorities returns the authorities whose certificates are accepted now, the present one first, and the generation of the keys.
func (c Client) Authorities(ctx context.Context) (*x509.CertPool, uint32, error) {
	a, err := c.call(ctx, protocol.Message{Op: protocol.Authorities})
	if err != nil {
		return nil, 0, err
	}
	roots, err := attestation.ParseRoots(a.Authorities)
	return roots, a.Generation, err
}

// Certification is a certification in progress.
type Certification struct {
	// Challenge is for the machine.
	Challenge []byte

	client Client
	id     string
}

// Begin begins a certification with the request of a machine (attestation.VendorIssuer).
func (c Client) Begin(ctx context.Context, request []byte) (*Certification, error) {
	a, err := c.call(ctx, protocol.Message{Op: protocol.Challenge, Request: request})
	if err != nil {
		return nil, err
	}
	return &Certification{a.Challenge, c, a.ID}, nil
}

// Finish returns the certificate, in DER, for the right answer. st is what the evidence of the machine stated after the vendor's
// API was asked. It must be by the key of the request. A challenge is answered once.
func (c *Certification) Finish(ctx context.Context, answer []byte, st attestation.Statement) ([]byte, error) {
	if st.Certified { // else a machine could renew certificates without the vendor, again and again
		return nil, errors.New("certify machine: the vendor's API did not confirm the evidence")
	}
	a, err := c.client.call(ctx, protocol.Message{Op: protocol.Certify, ID: c.id, Answer: answer, Key: st.Key, Machine: &st.Identity})
	return a.Certificate, err
}

// HandOver returns the secret keys for a new control plane, as signer.Store takes them. The certifier logs it.
func (c Client) HandOver(ctx context.Context, to attestation.Identity) ([]byte, error) {
	a, err := c.call(ctx, protocol.Message{Op: protocol.HandOver, Machine: &to})
	return a.Keys, err
}

// Rotate has the certifier use the keys of a rotation. Repeating it changes nothing.
func (c Client) Rotate(ctx context.Context, rotation []byte) (generation uint32, err error) {
	a, err := c.call(ctx, protocol.Message{Op: protocol.Rotate, Rotation: rotation})
	return a.Generation, err
}
