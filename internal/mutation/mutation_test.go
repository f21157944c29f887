package mutation_test

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"constellation/internal/mutation"
)

func TestMutationsDifferAndRepeat(t *testing.T) {
	for _, b := range [][]byte{nil, {0}, []byte("a manifest"), make([]byte, 300)} {
		was := slices.Clone(b)
		for seed := range uint64(2000) {
			out := mutation.Bytes(rand.New(rand.NewPCG(seed, 1)), b)
			if bytes.Equal(out, b) || !bytes.Equal(b, was) {
				t.Fatalf("Bytes of %q with seed %d: %q, and the original became %q", was, seed, out, b)
			}
			if again := mutation.Bytes(rand.New(rand.NewPCG(seed, 1)), b); !bytes.Equal(again, out) {
				t.Fatalf("Bytes of %q with seed %d: %q, then %q", was, seed, out, again)
			}
			if len(b) == 0 {
				continue
			}
			if out := mutation.Layout(rand.New(rand.NewPCG(seed, 1)), b); bytes.Equal(out, b) || len(out) != len(b) || !bytes.Equal(b, was) {
				t.Fatalf("Layout of %q with seed %d: %q, and the original became %q", was, seed, out, b)
			}
		}
	}
}
