//go:build linux

package certifier

import (
	"context"
	"crypto/x509"
	"errors"

	"constellation/engine/attestation"
	"constellation/engine/attestation/keyprocess"
)

// Client uses the certifier of the same machine. It may be used concurrently.
type Client struct {
	// Socket is the path of the certifier's socket.
	Socket string
}

// call sends one request and returns the answer.
func (c Client) call(ctx context.Context, m keyprocess.Message) (keyprocess.Message, error) {
	return keyprocess.Call(ctx, keyprocess.Certifier, c.Socket, m)
}

// Authorities returns the authorities whose certificates are accepted now, the present one first, and the generation of the keys.
func (c Client) Authorities(ctx context.Context) (*x509.CertPool, uint32, error) {
	a, err := c.call(ctx, keyprocess.Message{Op: keyprocess.Authorities})
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
	a, err := c.call(ctx, keyprocess.Message{Op: keyprocess.Challenge, Request: request})
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
	a, err := c.client.call(ctx, keyprocess.Message{Op: keyprocess.Certify, ID: c.id, Answer: answer, Key: st.Key, Machine: &st.Identity})
	return a.Certificate, err
}

// HandOver returns the secret keys for a new control plane, as signer.Store takes them. The certifier logs it.
func (c Client) HandOver(ctx context.Context, to attestation.Identity) ([]byte, error) {
	a, err := c.call(ctx, keyprocess.Message{Op: keyprocess.HandOver, Machine: &to})
	return a.Keys, err
}

// Rotate has the certifier use the keys of a rotation. Repeating it changes nothing.
func (c Client) Rotate(ctx context.Context, rotation []byte) (generation uint32, err error) {
	a, err := c.call(ctx, keyprocess.Message{Op: keyprocess.Rotate, Rotation: rotation})
	return a.Generation, err
}
