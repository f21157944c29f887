package signer

import (
	"bytes"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/hpke"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"constellation/engine/attestation/authority"
	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/keyprocess"
)

// SealedFile is the file with the sealed keys in the directory of a Server.
const SealedFile = "certifier-keys.json"

// formerLife is how long authorities are accepted after a rotation: until the last certificate of them has ended, with an
// allowance for clocks.
const formerLife = certifier.Life + 24*time.Hour

const (
	version = 1
	// SecretSize is the size of the secret that keys are derived from, in bytes.
	SecretSize = 32
	// maxGeneration bounds how often keys are rotated.
	maxGeneration = 1 << 20
	maxFormer     = 64
)

// Owner authorizes rotations. It has the secret of the cluster's owner, see workspace.MasterSecret, and never leaves the owner's computer.
type Owner struct {
	secret []byte
	key    *ecdsa.PrivateKey
}

// NewOwner returns the owner with a secret of SecretSize bytes. The same secret always gives the same keys.
func NewOwner(secret []byte) (*Owner, error) {
	if len(secret) != SecretSize {
		return nil, fmt.Errorf("derive keys of the certifier: the secret has %d bytes, want %d", len(secret), SecretSize)
	}
	key, err := derive(secret, "owner")
	if err != nil {
		return nil, err
	}
	return &Owner{bytes.Clone(secret), key}, nil
}

// derive returns the P-256 key of one use, named by info.
func derive(secret []byte, info string) (*ecdsa.PrivateKey, error) {
	for n := range 256 { // about one of 2^32 candidates is no key
		b, err := hkdf.Key(sha256.New, secret, nil, fmt.Sprintf("constellation: certifier, version 1: %s, candidate %d", info, n), 32)
		if err != nil {
			return nil, fmt.Errorf("derive keys of the certifier: %w", err)
		}
		if k, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), b); err == nil {
			return k, nil
		}
	}
	return nil, errors.New("derive keys of the certifier: no candidate is a key")
}

// Keys returns the keys of a generation, 1 or more. They are what the first control plane of a cluster gets, and what replaces
// all of them that were lost.
func (o *Owner) Keys(generation uint32) (*Keys, error) {
	if generation < 1 || generation > maxGeneration {
		return nil, fmt.Errorf("derive keys of the certifier: generation %d is not one of 1 to %d", generation, maxGeneration)
	}
	k := &Keys{generation: generation}
	var err error
	if k.key, err = derive(o.secret, fmt.Sprintf("generation %d", generation)); err != nil {
		return nil, err
	}
	if k.owner, err = x509.MarshalPKIXPublicKey(o.key.Public()); err != nil {
		return nil, fmt.Errorf("derive keys of the certifier: %w", err)
	}
	certPEM, _, err := authority.CreateOf(fmt.Sprintf("constellation certifier, generation %d", generation), k.key)
	if err != nil {
		return nil, err
	}
	k.certificate, err = parseAuthority(certPEM)
	return k, err
}

// Rotation returns what makes certifiers with the keys of a generation use the next one. Only the keys of that generation decrypt it.
// Certificates of earlier keys are accepted until they end, unless revoke is set: after a theft.
func (o *Owner) Rotation(from uint32, revoke bool) ([]byte, error) {
	old, err := o.Keys(from)
	if err != nil {
		return nil, err
	}
	next, err := o.Keys(from + 1)
	if err != nil {
		return nil, err
	}
	public, err := old.key.PublicKey.ECDH()
	if err != nil {
		return nil, fmt.Errorf("rotate keys of the certifier: %w", err)
	}
	to, err := hpke.NewDHKEMPublicKey(public)
	if err != nil {
		return nil, fmt.Errorf("rotate keys of the certifier: %w", err)
	}
	plain, err := next.Encode()
	if err != nil {
		return nil, err
	}
	defer clear(plain)
	r := rotation{Version: version, Generation: next.generation, Revoke: revoke}
	if r.Keys, err = hpke.Seal(to, hpke.HKDFSHA256(), hpke.AES256GCM(), []byte(rotationPurpose), plain); err != nil {
		return nil, fmt.Errorf("rotate keys of the certifier: %w", err)
	}
	if r.Signature, err = ecdsa.SignASN1(rand.Reader, o.key, r.hash()); err != nil {
		return nil, fmt.Errorf("rotate keys of the certifier: %w", err)
	}
	return json.Marshal(r)
}

// Rotated returns the generation that a rotation of this owner leads to, and whether it revokes former certificates.
func (o *Owner) Rotated(b []byte) (generation uint32, revokes bool, err error) {
	var r rotation
	if err := keyprocess.Strict(b, &r); err != nil || r.Version != version {
		return 0, false, errors.New("read rotation: it is malformed, or of another release")
	}
	if !ecdsa.VerifyASN1(&o.key.PublicKey, r.hash(), r.Signature) {
		return 0, false, errors.New("read rotation: another owner signed it")
	}
	return r.Generation, r.Revoke, nil
}

const rotationPurpose = "constellation: rotation of a certifier, version 1"

// rotation is what Owner.Rotation returns, as JSON. The owner signs it. The former keys decrypt it.
type rotation struct {
	Version    int    `json:"version"`
	Generation uint32 `json:"generation"`
	Revoke     bool   `json:"revoke,omitempty"`
	Keys       []byte `json:"keys"`
	Signature  []byte `json:"signature"`
}

func (r rotation) hash() []byte {
	h := sha256.Sum256(fmt.Appendf(nil, "%s\n%d\n%t\n%x", rotationPurpose, r.Generation, r.Revoke, r.Keys))
	return h[:]
}

// Keys are the key that a certifier signs with, the authorities whose certificates are accepted, and the public key of the owner.
// A value is immutable. Nothing prints the secret key.
type Keys struct {
	generation  uint32
	key         *ecdsa.PrivateKey
	certificate *x509.Certificate
	owner       []byte // SubjectPublicKeyInfo
	former      []former
}

// former is the authority of an earlier generation.
type former struct {
	Certificate []byte    `json:"certificate"` // DER
	Until       time.Time `json:"until"`
}

// encoded is the JSON of Keys. It contains the secret key.
type encoded struct {
	Version     int      `json:"version"`
	Generation  uint32   `json:"generation"`
	Key         []byte   `json:"key"`
	Certificate []byte   `json:"certificate"` // DER
	Owner       []byte   `json:"owner"`
	Former      []former `json:"former,omitempty"`
}

// Encode returns the keys for Parse. The result is as secret as they are.
func (k *Keys) Encode() ([]byte, error) {
	raw, err := k.key.Bytes()
	if err != nil {
		return nil, errors.New("encode keys of the certifier")
	}
	defer clear(raw)
	return json.Marshal(encoded{version, k.generation, raw, k.certificate.Raw, k.owner, k.former})
}

// Parse reads the output of Encode. Its errors contain nothing of the secret.
func Parse(b []byte) (*Keys, error) {
	var e encoded
	if err := keyprocess.Strict(b, &e); err != nil || e.Version != version {
		return nil, errors.New("read keys of the certifier: they are malformed, or of another release")
	}
	defer clear(e.Key)
	k := &Keys{generation: e.Generation, owner: e.Owner, former: e.Former}
	var err error
	if k.key, err = ecdsa.ParseRawPrivateKey(elliptic.P256(), e.Key); err != nil {
		return nil, errors.New("read keys of the certifier: the key is malformed")
	}
	if k.certificate, err = x509.ParseCertificate(e.Certificate); err != nil || !k.certificate.IsCA || !k.key.PublicKey.Equal(k.certificate.PublicKey) {
		return nil, errors.New("read keys of the certifier: the certificate is not that of the key")
	}
	if _, err := k.ownerKey(); err != nil {
		return nil, err
	}
	if e.Generation < 1 || e.Generation > maxGeneration || len(e.Former) > maxFormer {
		return nil, errors.New("read keys of the certifier: the generation is out of range")
	}
	for _, f := range k.former {
		if c, err := x509.ParseCertificate(f.Certificate); err != nil || !c.IsCA {
			return nil, errors.New("read keys of the certifier: the certificate of a former generation is malformed")
		}
	}
	return k, nil
}

func (k *Keys) ownerKey() (*ecdsa.PublicKey, error) {
	p, err := x509.ParsePKIXPublicKey(k.owner)
	key, ok := p.(*ecdsa.PublicKey)
	if err != nil || !ok || key.Curve != elliptic.P256() {
		return nil, errors.New("read keys of the certifier: the key of the owner is malformed")
	}
	return key, nil
}

// Fingerprint identifies an owner. Keys of all generations of one owner have the same one.
func (k *Keys) Fingerprint() string {
	h := sha256.Sum256(k.owner)
	return hex.EncodeToString(h[:8])
}

// Generation counts the rotations, from 1 on.
func (k *Keys) Generation() uint32 { return k.generation }

// Authorities returns the certificates whose signatures are accepted at a time, in PEM: first that of the present key, then
// those of former ones.
func (k *Keys) Authorities(now time.Time) []byte {
	out := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: k.certificate.Raw})
	for _, f := range k.former {
		if now.Before(f.Until) {
			out = append(out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.Certificate})...)
		}
	}
	return out
}

// errRotation means that a rotation does not follow the present keys.
var errRotation = errors.New("the rotation is not one of the owner for these keys")

// rotate returns the keys of a rotation. A repeated one returns k.
func (k *Keys) rotate(b []byte, now time.Time) (*Keys, error) {
	var r rotation
	if err := keyprocess.Strict(b, &r); err != nil || r.Version != version {
		return nil, fmt.Errorf("%w: it is malformed, or of another release", errRotation)
	}
	owner, err := k.ownerKey()
	if err != nil {
		return nil, err
	}
	if !ecdsa.VerifyASN1(owner, r.hash(), r.Signature) {
		return nil, fmt.Errorf("%w: the owner did not sign it", errRotation)
	}
	if r.Generation == k.generation {
		return k, nil
	}
	if r.Generation != k.generation+1 {
		return nil, fmt.Errorf("%w: it leads to generation %d, and this certifier has generation %d; replace this control plane", errRotation, r.Generation, k.generation)
	}
	own, err := k.key.ECDH()
	if err != nil {
		return nil, errors.New("rotate keys of the certifier")
	}
	plain, err := open(own, r.Keys)
	if err != nil {
		return nil, err
	}
	defer clear(plain)
	next, err := Parse(plain)
	if err != nil {
		return nil, err
	}
	if next.generation != r.Generation || !bytes.Equal(next.owner, k.owner) || len(next.former) > 0 {
		return nil, fmt.Errorf("%w: its content does not match", errRotation)
	}
	if r.Revoke {
		return next, nil
	}
	next.former = []former{{k.certificate.Raw, now.Add(formerLife).UTC().Truncate(time.Second)}}
	for _, f := range k.former {
		if now.Before(f.Until) && len(next.former) < maxFormer {
			next.former = append(next.former, f)
		}
	}
	return next, nil
}

func open(key *ecdh.PrivateKey, sealed []byte) ([]byte, error) {
	k, err := hpke.NewDHKEMPrivateKey(key)
	if err != nil {
		return nil, errors.New("rotate keys of the certifier")
	}
	plain, err := hpke.Open(k, hpke.HKDFSHA256(), hpke.AES256GCM(), []byte(rotationPurpose), sealed)
	if err != nil {
		return nil, fmt.Errorf("%w: it is encrypted for other keys", errRotation)
	}
	return plain, nil
}

// authority returns what certifies with k.
func (k *Keys) authority() (*authority.Authority, error) {
	der, err := x509.MarshalPKCS8PrivateKey(k.key)
	if err != nil {
		return nil, errors.New("read keys of the certifier")
	}
	defer clear(der)
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	defer clear(keyPEM)
	return authority.Parse(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: k.certificate.Raw}), keyPEM)
}

func parseAuthority(certPEM []byte) (*x509.Certificate, error) {
	b, _ := pem.Decode(certPEM)
	if b == nil {
		return nil, errors.New("read certificate of the certifier: it is not PEM")
	}
	return x509.ParseCertificate(b.Bytes)
}

const hidden = "(hidden)"

// String hides the secret from careless printing.
func (k *Keys) String() string { return hidden }

// GoString hides the secret from %#v.
func (k *Keys) GoString() string { return hidden }

// LogValue hides the secret from logs.
func (k *Keys) LogValue() slog.Value { return slog.StringValue(hidden) }

// MarshalJSON hides the secret from JSON; see Encode.
func (k *Keys) MarshalJSON() ([]byte, error) { return json.Marshal(hidden) }

// String hides the secret from careless printing.
func (o *Owner) String() string { return hidden }

// GoString hides the secret from %#v.
func (o *Owner) GoString() string { return hidden }

// LogValue hides the secret from logs.
func (o *Owner) LogValue() slog.Value { return slog.StringValue(hidden) }
