package joinservice

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	"constellation/engine/attestation"
	"constellation/engine/attestation/keyprocess"
	"constellation/joinservice/joinproto"
)

// signerClient uses the CA signer of the same pod. It may be used concurrently.
type signerClient struct {
	socket string
	// hash is kubeadm's pin of the CA; nil until it was read.
	hash atomic.Pointer[string]
}

func (c *signerClient) call(ctx context.Context, m keyprocess.Message) (keyprocess.Message, error) {
	a, err := keyprocess.Call(ctx, keyprocess.CASigner, c.socket, m)
	if e := (*keyprocess.RefusedError)(nil); err != nil && !errors.As(err, &e) {
		return a, fmt.Errorf("%w: %w", errSigner, err)
	}
	return a, err
}

// pin returns kubeadm's pin of the CA: sha256:<hex> of its public key.
func (c *signerClient) pin(ctx context.Context) (string, error) {
	if h := c.hash.Load(); h != nil {
		return *h, nil
	}
	a, err := c.call(ctx, keyprocess.Message{Op: keyprocess.Authority})
	if err != nil {
		return "", err
	}
	cert, err := x509.ParseCertificate(a.Certificate)
	if err != nil {
		return "", fmt.Errorf("read the CA of the cluster: %w", err)
	}
	h := pinOf(cert)
	c.hash.Store(&h)
	return h, nil
}

func pinOf(ca *x509.Certificate) string {
	sum := sha256.Sum256(ca.RawSubjectPublicKeyInfo)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// sign returns a kubelet's serving certificate as PEM, for a request of parseRequest.
func (c *signerClient) sign(ctx context.Context, r *x509.CertificateRequest, id attestation.Identity) ([]byte, error) {
	a, err := c.call(ctx, keyprocess.Message{Op: keyprocess.SignServing, Request: r.Raw, Machine: &id})
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate}), nil
}

// addSecrets adds to a ticket what only control planes get. It is encrypted if the machine's request has a key for that.
func (c *signerClient) addSecrets(ctx context.Context, t *joinproto.IssueJoinTicketResponse, r *joinproto.IssueJoinTicketRequest, id attestation.Identity) error {
	a, err := c.call(ctx, keyprocess.Message{Op: keyprocess.SealSecrets, Recipient: r.GetSealingKey(), Document: r.GetSealingEvidence(), Machine: &id})
	if e := (*keyprocess.RefusedError)(nil); errors.As(err, &e) {
		return fmt.Errorf("%w: %w", errSecrets, err)
	}
	if err != nil {
		return err
	}
	t.KmsFingerprint, t.KmsMode = a.ID, a.Encryption
	if len(r.GetSealingKey()) > 0 {
		t.SealedSecrets = a.Sealed
		return nil
	}
	defer clear(a.Keys)
	var s joinproto.ControlPlaneSecrets
	if proto.Unmarshal(a.Keys, &s) != nil {
		return fmt.Errorf("%w: its answer is malformed", errSigner)
	}
	t.ControlPlaneFiles, t.CertifierKeys, t.KmsKeys = s.GetFiles(), s.GetCertifierKeys(), s.GetKmsKeys()
	return nil
}

// signerIssuer makes evidence about this machine by its CA signer.
type signerIssuer struct {
	*signerClient
	variant attestation.Variant
}

// Variant implements attestation.Issuer.
func (i signerIssuer) Variant() attestation.Variant { return i.variant }

// Issue implements attestation.Issuer.
func (i signerIssuer) Issue(ctx context.Context, userData []byte) ([]byte, error) {
	a, err := i.call(ctx, keyprocess.Message{Op: keyprocess.Evidence, Request: userData})
	return a.Document, err
}

// RequestCertificate implements certified.
func (i signerIssuer) RequestCertificate(ctx context.Context) ([]byte, error) {
	a, err := i.call(ctx, keyprocess.Message{Op: keyprocess.RequestCertificate})
	return a.Request, err
}

// AnswerChallenge implements certified.
func (i signerIssuer) AnswerChallenge(ctx context.Context, challenge []byte) ([]byte, error) {
	a, err := i.call(ctx, keyprocess.Message{Op: keyprocess.AnswerChallenge, Challenge: challenge})
	return a.Answer, err
}

// UseCertificate implements certified.
func (i signerIssuer) UseCertificate(der []byte) error {
	_, err := i.call(context.Background(), keyprocess.Message{Op: keyprocess.UseCertificate, Certificate: der})
	return err
}
