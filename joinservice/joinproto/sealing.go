package joinproto

import (
	"context"
	"crypto/hpke"
	"crypto/sha256"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"
)

// The keys of a cluster pass through the join service, which the network reaches. So a joining control plane makes a key pair for its
// request, and evidence that binds the public key. The CA signer judges that evidence by itself and encrypts to that key (HPKE, RFC
// 9180). A join service that an attacker has captured sees ciphertext alone. Evidence without nonce suffices: old evidence names a
// key pair that is gone.

// sealingContext separates these ciphertexts and digests from all others.
const sealingContext = "constellation: secrets of a joining control plane, v1"

// MaxSealingKey bounds a public key, in bytes.
const MaxSealingKey = 2048

func suite() (hpke.KEM, hpke.KDF, hpke.AEAD) {
	return hpke.MLKEM768X25519(), hpke.HKDFSHA256(), hpke.AES256GCM()
}

// Sealing is a key pair of a joining control plane with evidence that binds it. The private key is in memory alone.
type Sealing struct {
	key      hpke.PrivateKey
	evidence []byte
}

// NewSealing makes a key pair, and its evidence with issue, see attestation.Issuer.
func NewSealing(ctx context.Context, issue func(context.Context, []byte) ([]byte, error)) (*Sealing, error) {
	kem, _, _ := suite()
	key, err := kem.GenerateKey()
	if err != nil {
		return nil, fmt.Errorf("make key for the secrets of a control plane: %w", err)
	}
	evidence, err := issue(ctx, SealingUserData(key.PublicKey().Bytes()))
	if err != nil {
		return nil, fmt.Errorf("attest key for the secrets of a control plane: %w", err)
	}
	return &Sealing{key, evidence}, nil
}

// SealingUserData returns what the evidence for a public key binds.
func SealingUserData(public []byte) []byte {
	d := sha256.Sum256(append([]byte(sealingContext+"\x00"), public...))
	return d[:]
}

// Ask adds the public key and its evidence to a request.
func (s *Sealing) Ask(r *IssueJoinTicketRequest) {
	r.SealingKey, r.SealingEvidence = s.key.PublicKey().Bytes(), s.evidence
}

// Open decrypts the secrets of a ticket and puts them into the fields that tickets without encryption have. With them came what the machine
// does with the keys, which replaces the statements of the ticket. A ticket without encrypted
// secrets is not changed: join services of earlier releases encrypt nothing.
func (s *Sealing) Open(t *IssueJoinTicketResponse) error {
	sealed := t.GetSealedSecrets()
	if len(sealed) == 0 {
		return nil
	}
	if len(t.GetControlPlaneFiles())+len(t.GetCertifierKeys())+len(t.GetKmsKeys()) > 0 {
		return errors.New("the ticket has secrets twice")
	}
	_, kdf, aead := suite()
	b, err := hpke.Open(s.key, kdf, aead, []byte(sealingContext), sealed)
	if err != nil {
		return errors.New("the secrets of the ticket are for another key, or damaged")
	}
	defer clear(b)
	var secrets ControlPlaneSecrets
	if proto.Unmarshal(b, &secrets) != nil {
		return errors.New("the secrets of the ticket are malformed")
	}
	t.ControlPlaneFiles, t.CertifierKeys, t.KmsKeys, t.SealedSecrets = secrets.GetFiles(), secrets.GetCertifierKeys(), secrets.GetKmsKeys(), nil
	t.ApiServerEndpoint, t.KmsFingerprint, t.KmsMode = secrets.GetApiServerEndpoint(), secrets.GetKmsFingerprint(), secrets.GetKmsMode()
	return nil
}

// Seal encrypts secrets to a public key. Its errors contain nothing of them.
func Seal(public []byte, secrets *ControlPlaneSecrets) ([]byte, error) {
	if len(public) > MaxSealingKey {
		return nil, fmt.Errorf("the public key has %d bytes, at most %d are allowed", len(public), MaxSealingKey)
	}
	kem, kdf, aead := suite()
	key, err := kem.NewPublicKey(public)
	if err != nil {
		return nil, errors.New("the public key is malformed")
	}
	b, err := proto.Marshal(secrets)
	if err != nil {
		return nil, errors.New("encode secrets of a control plane") // the cause could quote one
	}
	defer clear(b)
	return hpke.Seal(key, kdf, aead, []byte(sealingContext), b)
}
