package release

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
)

// The root of a feed is a role whose private keys stay offline. A version of the root lists the
// root keys, how many of them must sign the next version, and the index keys that may sign
// publications. A stolen index key can therefore be revoked, and it can name no other keys.
//
// A client pins the file root.json of any version. Its identity is the digest of version 1, so
// it is the same feed at every location.

// Limits of a root.
const (
	// DefaultIndexDays bounds the validity of a publication in days, unless the root says otherwise.
	DefaultIndexDays = 90
	// MaxIndexDays bounds what a root may say.
	MaxIndexDays = int(MaxExpiry / (24 * time.Hour))
	// DefaultRootExpiry is the lifetime of a version of the root.
	DefaultRootExpiry = 365 * 24 * time.Hour

	rootName  = "root.json" // the file of a feed, which no index names
	maxRoots  = 1 << 20     // bytes
	rootType  = "constellation-release-root"
	rootsType = "constellation-release-roots"
)

// Reasons for refusing a root.
var (
	// ErrRoot means that a feed does not have the root that the client trusts.
	ErrRoot = errors.New("its root is not trusted")
	// ErrUnsigned means that too few root keys signed the newest version of a root.
	ErrUnsigned = errors.New("too few root keys signed it")
)

// RootKey is a key in a version of the root.
type RootKey struct {
	Name string `json:"name"`
	ID   string `json:"id"`
}

// Root is one version of the root of a feed.
type Root struct {
	Version uint64    `json:"version"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires"`
	// Since is when an index key was last revoked. Older publications are refused, and the count
	// of publications may start again.
	Since time.Time `json:"since"`
	// Threshold of Keys sign the next version.
	Threshold int       `json:"threshold"`
	Keys      []RootKey `json:"keys"`
	// IndexKeys may sign publications, each alone, for at most IndexDays.
	IndexKeys []RootKey `json:"indexKeys"`
	IndexDays int       `json:"indexDays"`
}

// root is a version of the root as it is signed.
type root struct {
	Schema    string    `json:"schema"`
	Type      string    `json:"type"`
	Version   uint64    `json:"version"`
	Created   time.Time `json:"created"`
	Expires   time.Time `json:"expires"`
	Since     time.Time `json:"since"`
	Threshold int       `json:"threshold"`
	Keys      []setKey  `json:"keys"`
	IndexKeys []setKey  `json:"indexKeys"`
	IndexDays int       `json:"indexDays"`

	keys, indexKeys []Key
}

func (r *root) public() Root {
	return Root{r.Version, r.Created, r.Expires, r.Since, r.Threshold, rootKeys(r.keys), rootKeys(r.indexKeys), r.IndexDays}
}

func rootKeys(keys []Key) []RootKey {
	out := []RootKey{}
	for _, k := range keys {
		out = append(out, RootKey{k.Name, k.id})
	}
	return out
}

func parseRoot(b []byte) (*root, error) {
	var r root
	if err := strictJSON(b, &r); err != nil {
		return nil, err
	}
	lifetime := r.Expires.Sub(r.Created)
	switch {
	case r.Schema != schema:
		return nil, fmt.Errorf("its format is %q, want %q; a newer program may support it", shorten(r.Schema), schema)
	case r.Type != rootType:
		return nil, fmt.Errorf("its type is %q, want %q", shorten(r.Type), rootType)
	case r.Version == 0 || r.Version > maxSequence:
		return nil, fmt.Errorf("version %d is out of bounds", r.Version)
	case r.Created.IsZero() || lifetime < MinExpiry || lifetime > MaxExpiry:
		return nil, fmt.Errorf("it is valid from %s to %s, want 1 hour to 400 days", minute(r.Created), minute(r.Expires))
	case r.Since.IsZero() || r.Since.After(r.Created):
		return nil, fmt.Errorf("since is %s, want a time before %s", minute(r.Since), minute(r.Created))
	case r.IndexDays < 1 || r.IndexDays > MaxIndexDays:
		return nil, fmt.Errorf("indexDays is %d, want 1 to %d", r.IndexDays, MaxIndexDays)
	}
	var err error
	if r.keys, err = parseSetKeys(r.Keys); err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	if r.indexKeys, err = parseSetKeys(r.IndexKeys); err != nil {
		return nil, fmt.Errorf("indexKeys: %w", err)
	}
	for _, k := range r.keys {
		if hasKey(r.indexKeys, k.id) {
			return nil, fmt.Errorf("%s is a root key and an index key, want different keys", k)
		}
	}
	if r.Threshold < 1 || r.Threshold > len(r.keys) {
		return nil, fmt.Errorf("the threshold is %d of %d keys", r.Threshold, len(r.keys))
	}
	return &r, nil
}

// rootSignature is a signature over the text of a version of the root.
type rootSignature struct {
	Key       string `json:"key"` // ID
	Signature string `json:"signature"`
}

// signedRoot is a version of the root as text, to preserve the signed bytes.
type signedRoot struct {
	Root       string          `json:"root"`
	Signatures []rootSignature `json:"signatures"`

	root *root
}

// signers returns the keys of keys that signed the version, each once.
func (s *signedRoot) signers(keys []Key) (out []Key) {
	for _, sig := range s.Signatures {
		n := slices.IndexFunc(keys, func(k Key) bool { return k.id == sig.Key })
		if n < 0 || hasKey(out, sig.Key) {
			continue
		}
		if _, err := verify([]byte(s.Root), []byte(sig.Signature), keys[n:n+1]); err == nil {
			out = append(out, keys[n])
		}
	}
	return out
}

// signed returns an error that wraps ErrUnsigned unless enough keys of the version before, nil for
// the first, and enough of its own signed it.
func (s *signedRoot) signed(before *root) error {
	for _, by := range []*root{before, s.root} {
		if by == nil {
			continue
		}
		if n := len(s.signers(by.keys)); n < by.Threshold {
			return fmt.Errorf("version %d: %w: %d of the keys of version %d, want %d", s.root.Version, ErrUnsigned, n, by.Version, by.Threshold)
		}
	}
	return nil
}

// Roots are all versions of the root of a feed, as in root.json.
type Roots struct {
	Schema string       `json:"schema"`
	Type   string       `json:"type"`
	Roots  []signedRoot `json:"roots"` // oldest first
}

// ParseRoots reads root.json. Each version must be signed; the error wraps ErrUnsigned if only the
// newest is not.
func ParseRoots(b []byte) (*Roots, error) {
	r, err := ParseRootDraft(b)
	if err != nil {
		return nil, err
	}
	if err := r.signedFrom(len(r.Roots) - 1); err != nil {
		return nil, fmt.Errorf("read root: %w", err)
	}
	return r, nil
}

// ParseRootDraft is ParseRoots, but the newest version may lack signatures.
func ParseRootDraft(b []byte) (*Roots, error) {
	r, err := readRoots(b)
	if err != nil {
		return nil, err
	}
	draft := *r
	draft.Roots = r.Roots[:len(r.Roots)-1]
	if err := draft.signedFrom(0); err != nil {
		return nil, fmt.Errorf("read root: %w", err)
	}
	return r, nil
}

// readRoots reads root.json without verifying signatures.
func readRoots(b []byte) (*Roots, error) {
	if len(b) > maxRoots {
		return nil, fmt.Errorf("read root: it has %d bytes, more than %d", len(b), maxRoots)
	}
	var r Roots
	if err := strictJSON(b, &r); err != nil {
		return nil, fmt.Errorf("read root: %w", err)
	}
	switch {
	case r.Schema != schema:
		return nil, fmt.Errorf("read root: its format is %q, want %q; a newer program may support it", shorten(r.Schema), schema)
	case r.Type != rootsType:
		return nil, fmt.Errorf("read root: its type is %q, want %q", shorten(r.Type), rootsType)
	case len(r.Roots) == 0:
		return nil, errors.New("read root: it has no version")
	}
	for n := range r.Roots {
		s := &r.Roots[n]
		var err error
		if s.root, err = parseRoot([]byte(s.Root)); err != nil {
			return nil, fmt.Errorf("read root: version %d: %w", n+1, err)
		}
		if len(s.Signatures) > 64 {
			return nil, fmt.Errorf("read root: version %d has %d signatures", n+1, len(s.Signatures))
		}
		if s.root.Version != uint64(n+1) {
			return nil, fmt.Errorf("read root: version %d is called %d", n+1, s.root.Version)
		}
		if n == 0 {
			continue
		}
		if before := r.Roots[n-1].root; s.root.Created.Before(before.Created) || s.root.Since.Before(before.Since) {
			return nil, fmt.Errorf("read root: version %d is older than version %d", n+1, n)
		}
	}
	return &r, nil
}

// signedFrom verifies the versions from index n.
func (r *Roots) signedFrom(n int) error {
	for ; n < len(r.Roots); n++ {
		var before *root
		if n > 0 {
			before = r.Roots[n-1].root
		}
		if err := r.Roots[n].signed(before); err != nil {
			return err
		}
	}
	return nil
}

// Bytes is the content of root.json.
func (r *Roots) Bytes() []byte {
	b, err := encodeJSON(r)
	if err != nil { // it consists of texts
		panic(err)
	}
	return b
}

func (r *Roots) newest() *root { return r.Roots[len(r.Roots)-1].root }

// Newest returns the newest version.
func (r *Roots) Newest() Root { return r.newest().public() }

// Digest is the SHA-256 of the newest version: what its signers compare before they sign.
func (r *Roots) Digest() string { return digest([]byte(r.Roots[len(r.Roots)-1].Root)) }

// Identity is the SHA-256 of the first version. It identifies the feed at every location.
func (r *Roots) Identity() string { return digest([]byte(r.Roots[0].Root)) }

// Signers returns who signed the newest version, of its own keys and those of the version before.
func (r *Roots) Signers() []RootKey {
	n := len(r.Roots) - 1
	all := slices.Clone(r.Roots[n].root.keys)
	if n > 0 {
		for _, k := range r.Roots[n-1].root.keys {
			if !hasKey(all, k.id) {
				all = append(all, k)
			}
		}
	}
	return rootKeys(r.Roots[n].signers(all))
}

// Missing returns nil if enough keys signed the newest version; the error wraps ErrUnsigned.
func (r *Roots) Missing() error { return r.signedFrom(len(r.Roots) - 1) }

// Anchor is the root as a trust anchor for [Options].
func (r *Roots) Anchor() Key {
	id := r.Identity()[:16]
	return Key{Name: "root", id: id, roots: r}
}

// everyIndexKey returns the index keys of all versions.
func (r *Roots) everyIndexKey() (out []Key) {
	for _, s := range r.Roots {
		for _, k := range s.root.indexKeys {
			if !hasKey(out, k.id) {
				out = append(out, k)
			}
		}
	}
	return out
}

// continues returns an error unless r starts with the versions of before. The error wraps
// ErrRollback if r is older.
func (r *Roots) continues(before *Roots) error {
	if r.Identity() != before.Identity() {
		return fmt.Errorf("%w: it belongs to feed %s, want %s", ErrRoot, r.Identity()[:16], before.Identity()[:16])
	}
	for n, s := range before.Roots {
		if n >= len(r.Roots) {
			return fmt.Errorf("%w: it has version %d of the root, but version %d is known", ErrRollback, len(r.Roots), len(before.Roots))
		}
		if r.Roots[n].Root != s.Root {
			return fmt.Errorf("%w: it has another version %d of the root", ErrRoot, n+1)
		}
	}
	return nil
}

// accept verifies the root.json of a feed against the pinned versions, and against the newest that
// was seen.
func accept(b []byte, pinned *Roots, last seen) (*Roots, error) {
	r, err := readRoots(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	if err := r.continues(pinned); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	if last.Root > uint64(len(r.Roots)) {
		return nil, fmt.Errorf("%w: %w: it has version %d of the root, but version %d was seen", ErrUntrusted, ErrRollback, len(r.Roots), last.Root)
	}
	if last.Root > 0 && digest([]byte(r.Roots[last.Root-1].Root)) != last.RootDigest {
		return nil, fmt.Errorf("%w: %w: there are two versions %d of the root", ErrUntrusted, ErrRoot, last.Root)
	}
	if err := r.signedFrom(len(pinned.Roots)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	return r, nil
}

// NewRootOptions configure the first version of a root.
type NewRootOptions struct {
	Threshold       int
	Keys, IndexKeys []Key
	// Expires is the lifetime of the version, IndexDays that of a publication; zero means the default.
	Expires   time.Duration
	IndexDays int
	Now       time.Time
}

// NewRoots returns the first version of a root, without signatures.
func NewRoots(o NewRootOptions) (*Roots, error) {
	now := o.Now.UTC().Truncate(time.Second)
	r := root{
		Schema: schema, Type: rootType, Version: 1, Created: now, Expires: now.Add(cmp.Or(o.Expires, DefaultRootExpiry)), Since: now,
		Threshold: o.Threshold, Keys: setKeys(o.Keys), IndexKeys: setKeys(o.IndexKeys), IndexDays: cmp.Or(o.IndexDays, DefaultIndexDays),
	}
	out := &Roots{Schema: schema, Type: rootsType}
	return out, out.add(r)
}

// RootChange is what the next version of a root changes. Its zero value only extends the validity.
type RootChange struct {
	AddKeys, AddIndexKeys []Key
	// RemoveKeys and RevokeIndexKeys are IDs.
	RemoveKeys, RevokeIndexKeys []string
	// Threshold and IndexDays stay if they are zero. Expires zero means the default.
	Threshold, IndexDays int
	Expires              time.Duration
	Now                  time.Time
}

// Change adds a version without signatures.
func (r *Roots) Change(c RootChange) error {
	if err := r.Missing(); err != nil {
		return err
	}
	last := r.newest()
	now := c.Now.UTC().Truncate(time.Second)
	if now.Before(last.Created) {
		return fmt.Errorf("version %d was made on %s, and this computer's clock says %s", last.Version, minute(last.Created), minute(now))
	}
	next := root{
		Schema: schema, Type: rootType, Version: last.Version + 1, Created: now, Expires: now.Add(cmp.Or(c.Expires, DefaultRootExpiry)), Since: last.Since,
		Threshold: cmp.Or(c.Threshold, last.Threshold), IndexDays: cmp.Or(c.IndexDays, last.IndexDays),
	}
	keys, err := changeKeys(last.keys, c.AddKeys, c.RemoveKeys)
	if err != nil {
		return err
	}
	indexKeys, err := changeKeys(last.indexKeys, c.AddIndexKeys, c.RevokeIndexKeys)
	if err != nil {
		return err
	}
	if len(c.RevokeIndexKeys) > 0 {
		next.Since = now
	}
	next.Keys, next.IndexKeys = setKeys(keys), setKeys(indexKeys)
	return r.add(next)
}

func changeKeys(keys, add []Key, remove []string) ([]Key, error) {
	out := slices.Clone(keys)
	for _, id := range remove {
		n := slices.IndexFunc(out, func(k Key) bool { return k.id == id })
		if n < 0 {
			return nil, fmt.Errorf("key %s is not in the root", id)
		}
		out = slices.Delete(out, n, n+1)
	}
	for _, k := range add {
		if hasKey(out, k.id) {
			return nil, fmt.Errorf("%s is in the root already", k)
		}
		out = append(out, k)
	}
	return out, nil
}

// add appends a version, and does nothing after an error.
func (r *Roots) add(next root) error {
	b, err := encodeJSON(next)
	if err != nil {
		return err
	}
	parsed, err := parseRoot(b)
	if err != nil {
		return fmt.Errorf("make root: %w", err)
	}
	r.Roots = append(r.Roots, signedRoot{Root: string(b), Signatures: []rootSignature{}, root: parsed})
	if _, err := readRoots(r.Bytes()); err != nil {
		r.Roots = r.Roots[:len(r.Roots)-1]
		return err
	}
	return nil
}

// Sign adds a signature to the newest version. The key must be a root key of it or of the version
// before. Signing twice changes nothing.
func (r *Roots) Sign(key *PrivateKey) error {
	n := len(r.Roots) - 1
	s := &r.Roots[n]
	known := hasKey(s.root.keys, key.id) || n > 0 && hasKey(r.Roots[n-1].root.keys, key.id)
	if !known {
		return fmt.Errorf("%w: %s is not a root key of version %d", ErrKeySet, key.Key, s.root.Version)
	}
	if slices.ContainsFunc(s.signers([]Key{key.Key}), func(k Key) bool { return k.id == key.id }) {
		return nil
	}
	sig, err := key.signAgain([]byte(s.Root))
	if err != nil {
		return err
	}
	s.Signatures = slices.DeleteFunc(s.Signatures, func(o rootSignature) bool { return o.Key == key.id })
	s.Signatures = append(s.Signatures, rootSignature{key.id, string(sig)})
	return nil
}
