//go:build unix

package component

import (
	"bytes"
	"encoding/base64"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"constellation/internal/testneeds"
)

// TestMutatedArchivesAreRefused has a server deliver a changed archive instead of that of a list. The installer refuses it, and nothing of it
// is installed. CONSTELLATION_FEED_MUTATIONS is the number of mutations.
func TestMutatedArchivesAreRefused(t *testing.T) {
	whole := archive(t, dir("bin"), file("bin/bridge", bytes.Repeat([]byte("bridge "), 100)), file("bin/host-local", []byte("host-local")), symlink("bin/portmap", "bridge"))
	n := 1000
	if testneeds.Short() {
		n = 100
	}
	n = testneeds.Number(t, "CONSTELLATION_FEED_MUTATIONS", n)
	root := t.TempDir()
	in := &Installer{Root: root, limits: fast}
	install := func(b []byte) error {
		return in.Install(t.Context(), List{{Name: "cni-plugins", URL: "data:;base64," + base64.StdEncoding.EncodeToString(b), Digest: digestOf(whole), Path: "/opt/cni", Extract: true}}, nil)
	}
	r := rand.New(rand.NewPCG(25, 4))
	for i := range n {
		b := slices.Clone(whole)
		for bytes.Equal(b, whole) {
			at := r.IntN(len(b))
			piece := min(1+r.IntN(40), len(b)-at)
			switch r.IntN(6) {
			case 0, 1:
				b[at] ^= 1 << r.UintN(8)
			case 2:
				b = slices.Delete(b, at, at+piece)
			case 3:
				b = slices.Insert(b, at, slices.Clone(b[at:at+piece])...)
			case 4:
				b = b[:at]
			case 5:
				b = append(b, byte(r.UintN(256)))
			}
		}
		if err := install(b); err == nil {
			t.Fatalf("mutation %d was accepted: %x", i, b)
		}
		if left := hidden(t, filepath.Join(root, "opt/cni")); left != nil {
			t.Fatalf("mutation %d left %v", i, left)
		}
	}
	t.Logf("%d mutations of an archive, %d refused, 0 accepted", n, n)
	if err := install(whole); err != nil {
		t.Errorf("the archive itself: %v", err)
	}
}
