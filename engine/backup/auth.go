package backup

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"regexp"
)

// What the tag at the end of a manifest proves, see [Backup.Authentication].
const (
	// Authenticated means that a key of Keys.Secret made the tag.
	Authenticated = "authenticated"
	// Foreign means that another key made the tag.
	Foreign = "foreign"
	// Unauthenticated means that there is no tag, as in backups of older programs.
	Unauthenticated = "unauthenticated"
)

// Keys are the secrets of a reader. The zero value authenticates nothing.
type Keys struct {
	// Secret is what the keys of tags are derived from; empty without a master secret.
	Secret []byte
	// Identities decrypt encrypted backups.
	Identities []Identity
}

// The authentication tag of a manifest, around its hex digits. The brace that it leaves open is
// the first one of sumHead: a reader that knows no tags finds the digest at the same place.
const (
	tagHead = "},\n\"authentication\":{\"tag\":\""
	tagTail = "\""
	tagSize = len(tagHead) + 2*sha256.Size + len(tagTail)
)

const keyIDSize = 16

var keyIDRE = regexp.MustCompile(`^[0-9a-f]{32}$`)

// tagKey derives the key that authenticates backups of a cluster, and the ID of the key. The ID
// reveals nothing about the key.
func tagKey(secret []byte, cluster string) (key []byte, id string) {
	out, err := hkdf.Key(sha256.New, secret, []byte(cluster), "constellation backup authentication", sha256.Size+keyIDSize)
	if err != nil { // only for more bytes, or a secret too short under FIPS 140
		panic(fmt.Sprintf("derive key of backups: %v", err))
	}
	return out[:sha256.Size], hex.EncodeToString(out[sha256.Size:])
}

// tag is the part of a manifest that holds the tag.
func tag(mac hash.Hash) string { return tagHead + hex.EncodeToString(mac.Sum(nil)) + tagTail }

// mac computes the tag of the manifest; nil if the secret is not that of the backup.
func (k Keys) mac(m *Manifest) hash.Hash {
	if len(k.Secret) == 0 || m.AuthenticatedBy == "" {
		return nil
	}
	key, id := tagKey(k.Secret, m.Cluster.UID)
	if id != m.AuthenticatedBy {
		return nil
	}
	return hmac.New(sha256.New, key)
}

// Authentication is one of the constants above. It is what the manifest claims: only without
// damage in the result of [Backup.Verify] or [Backup.Look] is it proven.
func (b *Backup) Authentication() string {
	switch {
	case b.front.AuthenticatedBy == "":
		return Unauthenticated
	case b.keys.mac(&b.front) == nil:
		return Foreign
	}
	return Authenticated
}
