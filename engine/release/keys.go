package release

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// Key is a public key that a feed may be signed with: ECDSA on P-256.
type Key struct {
	// Name is for people: the file it was read from, without .pub; may be empty.
	Name string
	// File is where whoever reads keys found it; may be empty. Nothing here looks at it.
	File   string
	public *ecdsa.PublicKey
	id     string
}

// ID is the first 16 hex digits of the SHA-256 of the key in DER (SubjectPublicKeyInfo).
func (k Key) ID() string { return k.id }

// String is "name (id)", or the ID of a key without a name.
func (k Key) String() string {
	if k.Name == "" {
		return "key " + k.id
	}
	return fmt.Sprintf("%s (%s)", k.Name, k.id)
}

// PEM returns the key as a file holds it.
func (k Key) PEM() []byte {
	der, err := x509.MarshalPKIXPublicKey(k.public)
	if err != nil { // newKey has marshalled it before
		panic(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

func newKey(name string, public *ecdsa.PublicKey) (Key, error) {
	if public.Curve != elliptic.P256() {
		return Key{}, errors.New("is not on the curve P-256")
	}
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return Key{}, err
	}
	sum := sha256.Sum256(der)
	return Key{Name: name, public: public, id: hex.EncodeToString(sum[:8])}, nil
}

// ParseKeys reads public keys in PEM, one or more. Nothing else may be between them.
func ParseKeys(name string, b []byte) ([]Key, error) {
	var keys []Key
	for rest := bytes.TrimSpace(b); len(rest) > 0; rest = bytes.TrimSpace(rest) {
		if !bytes.HasPrefix(rest, []byte("-----BEGIN ")) {
			return nil, fmt.Errorf("read key %s: it holds something that is not PEM", name)
		}
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return nil, fmt.Errorf("read key %s: it holds something that is not PEM", name)
		}
		if strings.Contains(block.Type, "PRIVATE") {
			return nil, fmt.Errorf("read key %s: it is a private key, and a public one is needed", name)
		}
		public, err := x509.ParsePKIXPublicKey(block.Bytes)
		p, ok := public.(*ecdsa.PublicKey)
		if block.Type != "PUBLIC KEY" || err != nil || !ok {
			return nil, fmt.Errorf("read key %s: it is no public key of ECDSA", name)
		}
		k, err := newKey(name, p)
		if err != nil {
			return nil, fmt.Errorf("read key %s: it %w", name, err)
		}
		keys = append(keys, k)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("read key %s: it is empty", name)
	}
	return keys, nil
}

// EmbeddedKeys returns the keys that come with the program, keys/*.pub of dir, which
// is assets.Releases(). There may be none: then no feed is official.
func EmbeddedKeys(dir fs.FS) ([]Key, error) {
	names, err := fs.Glob(dir, "keys/*.pub")
	if err != nil {
		return nil, err
	}
	var keys []Key
	for _, name := range names {
		b, err := fs.ReadFile(dir, name)
		if err != nil {
			return nil, err
		}
		k, err := ParseKeys(strings.TrimSuffix(path.Base(name), ".pub"), b)
		if err != nil {
			return nil, err
		}
		keys = append(keys, k...)
	}
	return keys, nil
}

// PrivateKey signs a feed.
type PrivateKey struct {
	Key
	private *ecdsa.PrivateKey
}

// NewPrivateKey makes a key.
func NewPrivateKey(name string) (*PrivateKey, error) {
	p, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	k, err := newKey(name, &p.PublicKey)
	if err != nil {
		return nil, err
	}
	return &PrivateKey{k, p}, nil
}

// PrivatePEM returns the private key as its file holds it: PKCS#8, not encrypted.
func (k *PrivateKey) PrivatePEM() ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(k.private)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// ParsePrivateKey reads a private key in PEM: PKCS#8 or SEC 1, not encrypted. No error
// of it quotes b.
func ParsePrivateKey(name string, b []byte) (*PrivateKey, error) {
	block, rest := pem.Decode(b)
	if block == nil || len(bytes.TrimSpace(rest)) > 0 {
		return nil, fmt.Errorf("read private key %s: it is not one block of PEM", name)
	}
	var parsed any
	var err error
	switch {
	case strings.Contains(block.Type, "ENCRYPTED"):
		return nil, fmt.Errorf("read private key %s: it is encrypted, and only keys that are not can be used", name)
	case block.Type == "PRIVATE KEY":
		parsed, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	case block.Type == "EC PRIVATE KEY":
		parsed, err = x509.ParseECPrivateKey(block.Bytes)
	default:
		return nil, fmt.Errorf("read private key %s: it holds a %q", name, block.Type)
	}
	p, ok := parsed.(*ecdsa.PrivateKey)
	if err != nil || !ok {
		return nil, fmt.Errorf("read private key %s: it is no key of ECDSA", name)
	}
	k, err := newKey(name, &p.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("read private key %s: it %w", name, err)
	}
	return &PrivateKey{k, p}, nil
}

// sign returns what <file>.sig holds for a file with the content b: the base64 of an
// ASN.1 signature over its SHA-256, which `cosign verify-blob --key` takes.
func (k *PrivateKey) sign(b []byte) ([]byte, error) { return k.signWith(rand.Reader, b) }

// signAgain returns the same signature each time, as RFC 6979 makes it.
func (k *PrivateKey) signAgain(b []byte) ([]byte, error) { return k.signWith(nil, b) }

func (k *PrivateKey) signWith(random io.Reader, b []byte) ([]byte, error) {
	sum := sha256.Sum256(b)
	sig, err := k.private.Sign(random, sum[:], crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("sign: %w", err)
	}
	return []byte(base64.StdEncoding.EncodeToString(sig)), nil
}

// maxSignature bounds a .sig file in bytes; a real one has about 96.
const maxSignature = 1 << 10

// ErrSigner means that a signature does not fit. A signature does not say which key made
// it, so the key may be another one, or the file.
var ErrSigner = errors.New("its signature does not fit: a key signed it that is not trusted, or it was altered or replaced after it was signed")

// verify returns which of keys signed b. The error wraps ErrSigner if none did.
func verify(b, sig []byte, keys []Key) (Key, error) {
	der, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(sig)))
	if err != nil || len(sig) > maxSignature {
		return Key{}, errors.New("its signature is not base64")
	}
	sum := sha256.Sum256(b)
	for _, k := range keys {
		if ecdsa.VerifyASN1(k.public, sum[:], der) {
			return k, nil
		}
	}
	var names []string
	for _, k := range keys {
		names = append(names, k.String())
	}
	return Key{}, fmt.Errorf("%w; trusted: %s", ErrSigner, strings.Join(names, ", "))
}

// hasKey reports whether keys holds one with that ID.
func hasKey(keys []Key, id string) bool {
	return slices.ContainsFunc(keys, func(k Key) bool { return k.id == id })
}
