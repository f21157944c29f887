// Package mutation changes bytes at random, for tests of what must refuse every change.
package mutation

import (
	"bytes"
	"math/rand/v2"
	"slices"
)

// Bytes returns a copy of b with one to four changes: bits, bytes, the edges of numbers, and pieces that are cut out or
// doubled. The result differs from b and may have another length. Equal states of r give equal results.
func Bytes(r *rand.Rand, b []byte) []byte {
	return differing(b, func(out []byte) []byte {
		for range 1 + r.IntN(4) {
			if len(out) == 0 {
				return []byte{byte(r.Uint32())}
			}
			i := r.IntN(len(out))
			switch r.IntN(6) {
			case 0, 1:
				out[i] ^= 1 << r.IntN(8)
			case 2:
				out[i] = byte(r.Uint32())
			case 3:
				out[i] = []byte{0, 1, 0x7f, 0x80, 0xff}[r.IntN(5)]
			case 4:
				out = slices.Delete(out, i, min(len(out), i+1+r.IntN(8)))
			case 5:
				k := min(len(out), i+1+r.IntN(16))
				out = slices.Insert(out, i, slices.Clone(out[i:k])...)
			}
		}
		return out
	})
}

// Layout is Bytes for structures of a fixed length: it changes bits and bytes, and copies pieces of b to other places. It
// panics if b is empty.
func Layout(r *rand.Rand, b []byte) []byte {
	return differing(b, func(out []byte) []byte {
		for range 1 + r.IntN(4) {
			i := r.IntN(len(out))
			switch r.IntN(3) {
			case 0:
				out[i] ^= 1 << r.IntN(8)
			case 1:
				out[i] = byte(r.Uint32())
			case 2:
				k := r.IntN(len(out))
				copy(out[i:], b[k:min(len(b), k+1+r.IntN(64))])
			}
		}
		return out
	})
}

// differing changes copies of b until one differs from it: later changes may undo earlier ones.
func differing(b []byte, change func(out []byte) []byte) []byte {
	for {
		if out := change(bytes.Clone(b)); !bytes.Equal(out, b) {
			return out
		}
	}
}
