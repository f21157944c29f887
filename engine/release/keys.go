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

// Key is a public key that a feed may be signed with: ECDSA on P-256. As a trust anchor it may
// instead be the root of a feed, see [Roots.Anchor].
type Key struct {
	// Name is for display: the name of its file without .pub; may be empty.
	Name string
	// File is the path of its file; may be empty. This package ignores it.
	File   string
	public *ecdsa.PublicKey
	id     string
	roots  *Roots // nil for a public key
}

// IsRoot reports whether k is the root of a feed.
func (k Key) IsRoot() bool { return k.roots != nil }

// ID is the first 16 hex digits of the SHA-256 of the key in DER (SubjectPublicKeyInfo), or of the
// identity of a root.
func (k Key) ID() string { return k.id }

// String is "name (id)", or the ID of a key without a name.
func (k Key) String() string {
	if k.Name == "" {
		return "key " + k.id
	}
	return fmt.Sprintf("%s (%s)", k.Name, k.id)
}

// PEM returns the key in PEM; the root.json of a root.
func (k Key) PEM() []byte {
	if k.roots != nil {
		return k.roots.Bytes()
	}
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

// ParseKeys reads one or more public keys in PEM, without other text between them.
func ParseKeys(name string, b []byte) ([]Key, error) {
	var keys []Key
	for rest := bytes.TrimSpace(b); len(rest) > 0; rest = bytes.TrimSpace(rest) {
		if !bytes.HasPrefix(rest, []byte("-----BEGIN ")) {
			return nil, fmt.Errorf("read key %s: it contains data that is not PEM", name)
		}
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return nil, fmt.Errorf("read key %s: it contains data that is not PEM", name)
		}
		if strings.Contains(block.Type, "PRIVATE") {
			return nil, fmt.Errorf("read key %s: it is a private key, want a public one", name)
		}
		public, err := x509.ParsePKIXPublicKey(block.Bytes)
		p, ok := public.(*ecdsa.PublicKey)
		if block.Type != "PUBLIC KEY" || err != nil || !ok {
			return nil, fmt.Errorf("read key %s: it is not an ECDSA public key", name)
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

// ParseAnchors reads what a user trusts: a root.json, or public keys as for [ParseKeys].
func ParseAnchors(name string, b []byte) ([]Key, error) {
	if !bytes.HasPrefix(bytes.TrimSpace(b), []byte("{")) {
		return ParseKeys(name, b)
	}
	r, err := ParseRoots(b)
	if err != nil {
		return nil, fmt.Errorf("read key %s: %w", name, err)
	}
	k := r.Anchor()
	k.Name = name
	return []Key{k}, nil
}

// split separates the roots from the public keys of anchors.
func split(anchors []Key) (roots []*Roots, keys []Key) {
	for _, k := range anchors {
		if k.roots != nil {
			roots = append(roots, k.roots)
		} else {
			keys = append(keys, k)
		}
	}
	return roots, keys
}

// signing replaces each root by the index keys of its newest version.
func signing(anchors []Key) []Key {
	roots, keys := split(anchors)
	for _, r := range roots {
		keys = append(keys, r.newest().indexKeys...)
	}
	return keys
}

// EmbeddedKeys returns the program's trust anchors, keys/*.pub and keys/*.json of dir, which is
// assets.Releases(). Without them no feed is official.
func EmbeddedKeys(dir fs.FS) ([]Key, error) {
	var names []string
	for _, pattern := range []string{"keys/*.pub", "keys/*.json"} {
		some, err := fs.Glob(dir, pattern)
		if err != nil {
			return nil, err
		}
		names = append(names, some...)
	}
	var keys []Key
	for _, name := range names {
		b, err := fs.ReadFile(dir, name)
		if err != nil {
			return nil, err
		}
		k, err := ParseAnchors(strings.TrimSuffix(path.Base(name), path.Ext(name)), b)
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

// NewPrivateKey generates a key.
func NewPrivateKey(name string) (*PrivateKey, error) {
	p, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generate key: %w", err)
	}
	k, err := newKey(name, &p.PublicKey)
	if err != nil {
		return nil, err
	}
	return &PrivateKey{k, p}, nil
}

// PrivatePEM returns the private key as PKCS#8 PEM, not encrypted.
func (k *PrivateKey) PrivatePEM() ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(k.private)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// ParsePrivateKey reads a private key in PEM: PKCS#8 or SEC 1, not encrypted. Its errors never
// quote b.
func ParsePrivateKey(name string, b []byte) (*PrivateKey, error) {
	block, rest := pem.Decode(b)
	if block == nil || len(bytes.TrimSpace(rest)) > 0 {
		return nil, fmt.Errorf("read private key %s: it is not a single PEM block", name)
	}
	var parsed any
	var err error
	switch {
	case strings.Contains(block.Type, "ENCRYPTED"):
		return nil, fmt.Errorf("read private key %s: it is encrypted, want an unencrypted key", name)
	case block.Type == "PRIVATE KEY":
		parsed, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	case block.Type == "EC PRIVATE KEY":
		parsed, err = x509.ParseECPrivateKey(block.Bytes)
	default:
		return nil, fmt.Errorf("read private key %s: it contains a %q", name, block.Type)
	}
	p, ok := parsed.(*ecdsa.PrivateKey)
	if err != nil || !ok {
		return nil, fmt.Errorf("read private key %s: it is not an ECDSA key", name)
	}
	k, err := newKey(name, &p.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("read private key %s: it %w", name, err)
	}
	return &PrivateKey{k, p}, nil
}

// sign returns the content of <file>.sig for a file with content b: the base64 of an ASN.1
// signature over its SHA-256, for `cosign verify-blob --key`.
func (k *PrivateKey) sign(b []byte) ([]byte, error) { return k.signWith(rand.Reader, b) }

// signAgain returns a deterministic signature by RFC 6979.
func (k *PrivateKey) signAgain(b []byte) ([]byte, error) { return k.signWith(nil, b) }

func (k *PrivateKey) signWith(random io.Reader, b []byte) ([]byte, error) {
	sum := sha256.Sum256(b)
	sig, err := k.private.Sign(random, sum[:], crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("sign: %w", err)
	}
	return []byte(base64.StdEncoding.EncodeToString(sig)), nil
}

// SignFile returns the content of <file>.sig for a file that does not belong to a feed. Equal
// files get equal signatures.
func (k *PrivateKey) SignFile(b []byte) ([]byte, error) { return k.signAgain(b) }

// VerifyFile returns the key of keys that signed b with [PrivateKey.SignFile]. The error wraps
// ErrSigner if none did.
func VerifyFile(b, sig []byte, keys []Key) (Key, error) { return verify(b, sig, signing(keys)) }

// maxSignature bounds a .sig file in bytes; a real one has about 96.
const maxSignature = 1 << 10

// ErrSigner means that no trusted key verifies a signature. A signature does not name its key,
// so either the key is another one, or the file was modified.
var ErrSigner = errors.New("invalid signature: an untrusted key signed it, or it was modified or replaced after it was signed")

// verify returns the key of keys that signed b. The error wraps ErrSigner if none did.
func verify(b, sig []byte, keys []Key) (Key, error) {
	der, err := base64.StdEncoding.Strict().DecodeString(strings.TrimSpace(string(sig)))
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

// hasKey reports whether keys has one with that ID.
func hasKey(keys []Key, id string) bool {
	return slices.ContainsFunc(keys, func(k Key) bool { return k.id == id })
}
