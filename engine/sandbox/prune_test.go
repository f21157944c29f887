package sandbox

import (
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"constellation/engine/sandbox/machine"
)

func TestCacheKeepsWhatASandboxNeedsHoweverOldItIs(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has a cache of machines")
	}
	d := Dirs{Cache: t.TempDir(), State: t.TempDir()}
	long := time.Now().Add(-2 * cacheUnused)
	for _, name := range []string{
		"rootfs/needed", "rootfs/old", "os-images/needed", "os-images/old",
		"services/v1/needed.tar", "services/v1/old.tar", "kubernetes/v1.30.0",
	} {
		if err := os.MkdirAll(filepath.Join(d.Cache, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if path := filepath.Join(d.Cache, name); filepath.Ext(name) == ".tar" {
			err = os.WriteFile(path, nil, 0o644)
		} else {
			err = os.Mkdir(path, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(filepath.Join(d.Cache, name), long, long); err != nil {
			t.Fatal(err)
		}
	}
	st := newState("demo", "/home/me/demo", time.Now())
	st.Catalogue = []machine.Image{{Version: "v1.1.0", Rootfs: filepath.Join(d.Cache, "rootfs/needed"), Dir: filepath.Join(d.Cache, "os-images/needed")}}
	st.Containers["registry.example/operator:v1"] = filepath.Join(d.Cache, "services/v1/needed.tar")
	if err := os.MkdirAll(d.of("demo"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := st.write(d.of("demo", stateName)); err != nil {
		t.Fatal(err)
	}
	s := New(d, "", slog.New(slog.NewTextHandler(t.Output(), nil)))
	have := func() []string {
		found, err := filepath.Glob(filepath.Join(d.Cache, "*", "*"))
		if err != nil {
			t.Fatal(err)
		}
		more, _ := filepath.Glob(filepath.Join(d.Cache, "services", "*", "*.tar"))
		var names []string
		for _, f := range append(found, more...) {
			if name, _ := filepath.Rel(d.Cache, f); filepath.Base(name) != "lock" {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		return names
	}

	// The needs of a sandbox that this program cannot read are unknown.
	if err := os.MkdirAll(d.of("foreign"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.of("foreign", stateName), []byte(`{"schema": 99}`), 0o600); err != nil {
		t.Fatal(err)
	}
	before := have()
	s.prune(t.Context(), newTeller(nil))
	if got := have(); !slices.Equal(got, before) {
		t.Errorf("beside a foreign sandbox the cache became %q", got)
	}

	if err := os.RemoveAll(d.of("foreign")); err != nil {
		t.Fatal(err)
	}
	s.prune(t.Context(), newTeller(nil))
	if got, want := have(), []string{"kubernetes/v1.30.0", "os-images/needed", "rootfs/needed", "services/v1", "services/v1/needed.tar"}; !slices.Equal(got, want) {
		t.Errorf("left are %q, want %q", got, want)
	}
}
