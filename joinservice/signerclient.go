package joinservice

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"constellation/engine/attestation"
	"constellation/engine/attestation/keyprocess"
	"constellation/joinservice/joinproto"
)

// signerClient uses the CA signer of the same pod. It may be used concurrently.
type signerClient struct {
	socket string
}

func (c *signerClient) call(ctx context.Context, m keyprocess.Message) (keyprocess.Message, error) {
	a, err := keyprocess.Call(ctx, keyprocess.CASigner, c.socket, m)
	if e := (*keyprocess.RefusedError)(nil); err != nil && !errors.As(err, &e) {
		return a, fmt.Errorf("%w: %w", errSigner, err)
	}
	return a, err
}

// answers returns an error if the CA signer does not answer.
func (c *signerClient) answers(ctx context.Context) error {
	_, err := c.call(ctx, keyprocess.Message{Op: keyprocess.Authority})
	return err
}

// pinOf returns kubeadm's pin of a CA: sha256:<hex> of its public key.
func pinOf(ca *x509.Certificate) string {
	sum := sha256.Sum256(ca.RawSubjectPublicKeyInfo)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// sign adds to a ticket the kubelet's serving certificate, for a request of parseRequest, and the pin of the CA that signed it.
func (c *signerClient) sign(ctx context.Context, t *joinproto.IssueJoinTicketResponse, r *x509.CertificateRequest, st attestation.Statement) error {
	a, err := c.call(ctx, keyprocess.Message{Op: keyprocess.SignServing, Request: r.Raw, Machine: &st.Identity, Key: st.Key})
	if err != nil {
		return err
	}
	ca, err := x509.ParseCertificate(a.Authorities)
	if err != nil {
		return fmt.Errorf("read the CA of the cluster: %w", err)
	}
	t.KubeletCertificate, t.DiscoveryTokenCaCertHash = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate}), pinOf(ca)
	return nil
}

// addSecrets adds to a ticket what only control planes get. It is encrypted if the machine's request has a key for that.
func (c *signerClient) addSecrets(ctx context.Context, t *joinproto.IssueJoinTicketResponse, r *joinproto.IssueJoinTicketRequest, st attestation.Statement) error {
	a, err := c.call(ctx, keyprocess.Message{Op: keyprocess.SealSecrets, Recipient: r.GetSealingKey(), Document: r.GetSealingEvidence(), Machine: &st.Identity, Key: st.Key})
	if e := (*keyprocess.RefusedError)(nil); errors.As(err, &e) {
		return fmt.Errorf("%w: %w", errSecrets, err)
	}
	if err != nil {
		return err
	}
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
	t.KmsFingerprint, t.KmsMode = s.GetKmsFingerprint(), s.GetKmsMode()
	return nil
}

// evidence returns evidence about this machine as a server that machines join, see ServerBinding of package atls.
func (c *signerClient) evidence(ctx context.Context, nonce, publicKey []byte) ([]byte, error) {
	a, err := c.call(ctx, keyprocess.Message{Op: keyprocess.Evidence, Request: nonce, Recipient: publicKey})
	return a.Document, err
}

// ownBinding is what evidence of this machine about itself binds, apart from what evidence for others binds.
func ownBinding(nonce []byte) []byte {
	d := sha256.Sum256(append([]byte("constellation: a join service attests itself\x00"), nonce...))
	return d[:]
}

// signerIssuer makes evidence that only this process judges, by the CA signer.
type signerIssuer struct {
	*signerClient
	variant attestation.Variant
}

// Variant implements attestation.Issuer.
func (i signerIssuer) Variant() attestation.Variant { return i.variant }

// Issue implements attestation.Issuer. The document binds ownBinding of userData.
func (i signerIssuer) Issue(ctx context.Context, userData []byte) ([]byte, error) {
	a, err := i.call(ctx, keyprocess.Message{Op: keyprocess.OwnEvidence, Request: userData})
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
