// Package releasetest is a release builder for tests, with real keys and signatures.
package releasetest

import (
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"constellation/engine/component"
	"constellation/engine/release"
)

// T is the part of a test that the functions need.
type T interface {
	Helper()
	Fatal(args ...any)
}

var builder = sync.OnceValues(func() (*release.PrivateKey, error) { return release.NewPrivateKey("builder") })

// Key is the key of the release builder of this test binary.
func Key(t T) *release.PrivateKey {
	t.Helper()
	k, err := builder()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// Furnish stores the builder's public key where an image has it, for a machine whose file
// system is at root.
func Furnish(t T, root string) {
	t.Helper()
	path := filepath.Join(root, release.MachineKeys)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, Key(t).PEM(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Vouch returns the builder's statement over the components of this computer's architecture
// for a version of Kubernetes.
func Vouch(t T, kubernetes string, l component.List) string {
	t.Helper()
	s, err := Key(t).Vouch(release.Vouched{kubernetes: {runtime.GOARCH: l.Digest()}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}
