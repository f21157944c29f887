package controlplane

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"constellation/engine/sandbox/build"
)

func TestFindBinaries(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	t.Setenv("HOME", cache) // where macOS looks
	t.Setenv(binDirEnv, "")
	root, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	put := func(version string) string {
		t.Helper()
		dir := filepath.Join(root, "constellation", "kubernetes", version, "bin")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"kube-apiserver", "etcd"} {
			if err := os.WriteFile(filepath.Join(dir, name), nil, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	expect := func(want string) {
		t.Helper()
		if got, err := FindBinaries(); err != nil || got != want {
			t.Errorf("FindBinaries() = %q, %v; want %q", got, err, want)
		}
	}

	if _, err := FindBinaries(); !errors.Is(err, ErrNoBinaries) {
		t.Errorf("an empty cache: %v, want ErrNoBinaries", err)
	}
	newer := put(build.NextVersion)
	expect(newer)
	older := put("v1.0.0")
	expect(older)
	expect(put(build.DefaultVersion))
	t.Setenv(binDirEnv, older)
	expect(older)
}
