// Package releasetest stands for release builders in tests: keys and signatures are real.
package releasetest

import (
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"constellation/engine/component"
	"constellation/engine/release"
)

// T is what the functions need of a test.
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

// Furnish puts the builder's public key where the machine has it whose file system begins
// at root, as an image does.
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

// Vouch is the builder's statement over what machines of this computer's architecture
// install for a version of Kubernetes.
func Vouch(t T, kubernetes string, l component.List) string {
	t.Helper()
	s, err := Key(t).Vouch(release.Vouched{kubernetes: {runtime.GOARCH: l.Digest()}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}
