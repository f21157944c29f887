package backup

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"maps"
	"slices"
)

// EtcdState is what etcd has at one revision, as one SHA-256 for each key. etcd's own hash
// of a revision will not do against forgery: it is a CRC-32C, which four chosen bytes
// make any number. The zero value is empty.
type EtcdState struct {
	keys map[[sha256.Size]byte][sha256.Size]byte // by the hash of the key
	hash hash.Hash
}

// Put notes the latest entry of a key. An entry without a key is no object: restoring a
// snapshot with a higher revision writes one.
func (s *EtcdState) Put(e EtcdEntry) {
	if len(e.Key) == 0 {
		return
	}
	if s.keys == nil {
		s.keys, s.hash = map[[sha256.Size]byte][sha256.Size]byte{}, sha256.New()
	}
	key := sha256.Sum256(e.Key)
	if e.Deleted {
		delete(s.keys, key)
		return
	}
	s.hash.Reset()
	b := slices.Concat([]byte(nil), key[:])
	for _, n := range []int64{e.Created, e.Modified, e.Version, e.Lease} {
		b = binary.BigEndian.AppendUint64(b, uint64(n))
	}
	s.hash.Write(b)
	s.hash.Write(e.Value)
	s.keys[key] = [sha256.Size]byte(s.hash.Sum(nil))
}

// Len returns how many keys there are.
func (s *EtcdState) Len() int { return len(s.keys) }

// Sum returns the SHA-256 of the hashes of all keys, in the order of the hashed keys. For
// each, the hash of the key (32 bytes), then revisions of creation and change, version and
// lease (8 bytes each, big endian) and the value are hashed.
func (s *EtcdState) Sum() []byte {
	h := sha256.New()
	for _, k := range slices.SortedFunc(maps.Keys(s.keys), func(a, b [sha256.Size]byte) int { return bytes.Compare(a[:], b[:]) }) {
		v := s.keys[k]
		h.Write(v[:])
	}
	return h.Sum(nil)
}
