// Package kms has the key that encrypts Secrets in etcd.
//
// The owner of a cluster derives a secret from the master secret ([First]). Control planes seal it to their TPMs. A process on each of
// them, package plugin, serves its API server as a KMS v2 plugin. Keys of all generations follow from the secret, so each control
// plane decrypts what any other one encrypted, at any time. A cluster with the same master secret decrypts snapshots of an earlier one.
//
// The API server encrypts each Secret with a key of its own, which it has encrypted here. The key of a generation encrypts a few of
// those for each start of an API server.
//
// The package does not decide which machine gets the secret, or which resources are encrypted.
package kms

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"

	"constellation/engine/attestation/keyprocess"
)

const (
	// SealedFile is the file with the sealed secret in the state directory of a control plane.
	SealedFile = "kms-key.json"
	// KeysSocket is where the process serves the CA signer of its machine, which asks for the join service, too. Only root may enter the directory. The API server's
	// socket is kubeadm.KMSSocket.
	KeysSocket = "/run/constellation-kms-keys/keys.sock"
	// UseConfigMap is the ConfigMap in the namespace of join services in which each of them writes the generation with which the API server
	// of its machine encrypts, by the name of the Node. It is no secret.
	UseConfigMap = "constellation-encryption"
	// SecretSize is the size of the secret that keys are derived from, in bytes.
	SecretSize = 32

	// MaxRaise bounds how far one request raises the generation, so that a forged number uses few of them up.
	MaxRaise = 16

	version = 1
	// maxGeneration bounds how often keys are rotated.
	maxGeneration = 1 << 20
	// maxPlain bounds what is encrypted, in bytes. An API server sends 32.
	maxPlain = 4 << 10
	purpose  = "constellation: key service, version 1: "
)

// Keys are the keys of all generations, one of which encrypts. A value is immutable. Nothing prints the secret.
type Keys struct {
	secret     []byte
	generation uint32
}

// First returns the keys of a cluster with a secret of SecretSize bytes, see workspace.MasterSecret. generation, 1 or more, encrypts.
func First(secret []byte, generation uint32) (*Keys, error) {
	if len(secret) != SecretSize {
		return nil, fmt.Errorf("derive keys of the key service: the secret has %d bytes, want %d", len(secret), SecretSize)
	}
	if generation < 1 || generation > maxGeneration {
		return nil, fmt.Errorf("derive keys of the key service: generation %d is not one of 1 to %d", generation, maxGeneration)
	}
	return &Keys{append([]byte(nil), secret...), generation}, nil
}

// encoded is the JSON of Keys. It contains the secret.
type encoded struct {
	Version    int    `json:"version"`
	Generation uint32 `json:"generation"`
	Secret     []byte `json:"secret"`
}

// Encode returns the keys for Parse. The result is as secret as they are.
func (k *Keys) Encode() ([]byte, error) {
	return json.Marshal(encoded{version, k.generation, k.secret})
}

// Parse reads the output of Encode. Its errors contain nothing of the secret.
func Parse(b []byte) (*Keys, error) {
	var e encoded
	if err := keyprocess.Strict(b, &e); err != nil || e.Version != version {
		return nil, errors.New("read keys of the key service: they are malformed, or of another release")
	}
	defer clear(e.Secret)
	return First(e.Secret, e.Generation)
}

// Generation is the generation that encrypts.
func (k *Keys) Generation() uint32 { return k.generation }

// ID names the key that encrypts: a fingerprint of the secret and the generation, such as "5f0c3a9be1d27a46-1".
func (k *Keys) ID() string {
	return k.Fingerprint() + "-" + strconv.FormatUint(uint64(k.generation), 10)
}

// Fingerprint identifies a secret and reveals nothing else about it. Keys of all generations have the same one.
func (k *Keys) Fingerprint() string { return hex.EncodeToString(k.derive("fingerprint", 8)) }

// Raised returns the keys with a greater generation that encrypts, at most MaxRaise more.
func (k *Keys) Raised(generation uint32) (*Keys, error) {
	switch {
	case generation <= k.generation:
		return nil, fmt.Errorf("raise generation of the key service: it is %d already, and never falls to %d", k.generation, generation)
	case generation-k.generation > MaxRaise:
		return nil, fmt.Errorf("raise generation of the key service: from %d to %d, at most %d more are allowed at once", k.generation, generation, MaxRaise)
	}
	return First(k.secret, generation)
}

// HashedID is an ID of a key as metrics of API servers have it.
func HashedID(id string) string {
	h := sha256.Sum256([]byte(id))
	return "sha256:" + hex.EncodeToString(h[:])
}

// derive returns n bytes for one use, named by info.
func (k *Keys) derive(info string, n int) []byte {
	b, err := hkdf.Key(sha256.New, k.secret, nil, purpose+info, n)
	if err != nil { // only for more than 255 times 32 bytes, or a secret too short under FIPS 140
		panic(fmt.Sprintf("derive %s: %v", info, err))
	}
	return b
}

func (k *Keys) aead(generation uint32) (cipher.AEAD, error) {
	key := k.derive(fmt.Sprintf("generation %d", generation), 32)
	defer clear(key)
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// Encrypt encrypts a key of an API server, and returns the ID of the key that did.
func (k *Keys) Encrypt(plain []byte) (ciphertext []byte, id string, err error) {
	if len(plain) == 0 || len(plain) > maxPlain {
		return nil, "", fmt.Errorf("encrypt: %d bytes, want 1 to %d", len(plain), maxPlain)
	}
	a, err := k.aead(k.generation)
	if err != nil {
		return nil, "", fmt.Errorf("encrypt: %w", err)
	}
	id = k.ID()
	return a.Seal(nil, nil, plain, []byte(purpose+id)), id, nil
}

// ErrOtherKey means that the key of another secret encrypted something: the cluster had another master secret.
var ErrOtherKey = errors.New("it was encrypted with the keys of another master secret")

// Decrypt is the inverse of Encrypt. id can be that of any generation. The error wraps ErrOtherKey if it is that of another secret.
func (k *Keys) Decrypt(ciphertext []byte, id string) ([]byte, error) {
	fingerprint, number, ok := strings.Cut(id, "-")
	generation, err := strconv.ParseUint(number, 10, 32)
	if !ok || err != nil || generation < 1 || generation > maxGeneration {
		return nil, fmt.Errorf("decrypt: %.80q is no ID of a key", id)
	}
	if fingerprint != k.Fingerprint() {
		return nil, fmt.Errorf("decrypt: %w: key %.80s, and this control plane has %s", ErrOtherKey, id, k.ID())
	}
	a, err := k.aead(uint32(generation))
	if err != nil {
		return nil, fmt.Errorf("decrypt: %w", err)
	}
	plain, err := a.Open(nil, nil, ciphertext, []byte(purpose+id))
	if err != nil {
		return nil, fmt.Errorf("decrypt with key %s: the data was changed", id)
	}
	return plain, nil
}

const hidden = "(hidden)"

// Format hides the secret from careless printing, with every verb.
func (k *Keys) Format(s fmt.State, _ rune) { io.WriteString(s, hidden) } //nolint:errcheck // fmt ignores it, too

// LogValue hides the secret from logs.
func (k *Keys) LogValue() slog.Value { return slog.StringValue(hidden) }

// MarshalJSON hides the secret from JSON; see Encode.
func (k *Keys) MarshalJSON() ([]byte, error) { return json.Marshal(hidden) }
