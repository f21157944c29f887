package sandbox

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/release"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/simulated"
	"constellation/engine/version"
)

// TestASandboxVouchesForWhatItServes makes a sandbox, and has a machine of its image verify
// the components that its cloud serves.
func TestASandboxVouchesForWhatItServes(t *testing.T) {
	dirs := Dirs{Cache: t.TempDir(), State: t.TempDir()}
	st := newState("demo", "/w", time.Now())
	st.Simulated = true
	if err := st.buildReleases(); err != nil {
		t.Fatal(err)
	}
	dir := dirs.of("demo")
	program := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(program, []byte("x"), 0o755); err != nil {
		t.Fatal(err)
	}
	img, err := simulated.Image(dir, "v1.1.0", map[string]string{"agent": program, "bootstrapper": program}, []byte("[]"), st.releaseKey.PEM())
	if err != nil {
		t.Fatal(err)
	}
	if err := (&Sandboxes{dirs: dirs, log: discard()}).writeNew(t.Context(), st); err != nil {
		t.Fatal(err)
	}
	if i, err := os.Stat(dirs.of("demo", releaseKeyName)); err != nil || i.Mode().Perm() != 0o600 {
		t.Errorf("the key: %v, %v", i, err)
	}

	// Images with different keys differ.
	b, err := release.NewPrivateKey("other")
	if err != nil {
		t.Fatal(err)
	}
	other := machine.Image{Version: img.Version, Dir: t.TempDir()}
	for _, name := range []string{"agent", "bootstrapper", "peers.json"} {
		c, err := os.ReadFile(filepath.Join(img.Dir, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(other.Dir, name), c, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	without := simulated.Measure(other)
	if err := os.WriteFile(filepath.Join(other.Dir, filepath.Base(release.MachineKeys)), b.PEM(), 0o644); err != nil {
		t.Fatal(err)
	}
	with := simulated.Measure(other)
	n := len(with) - 1
	if string(with[n].Digest) == string(without[n].Digest) || string(with[n].Digest) == string(img.Events[n].Digest) {
		t.Error("the measurements do not cover the release keys")
	}

	d := &daemon{dirs: dirs, name: "demo", log: discard()}
	a, f, _ := testAPI(t)
	if a.mirror.key, err = d.releaseKey(); err != nil {
		t.Fatal(err)
	}
	scale(t, f, 1, 0)
	from := f.Instances()[0].IP.String()
	c := sandboxapi.NewClient(callFrom(t, a.control(), &from).URL, "the-token")
	got, err := c.Components(t.Context(), "v1.35.4")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	keys, err := os.ReadFile(filepath.Join(img.Dir, filepath.Base(release.MachineKeys)))
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(root, release.MachineKeys)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(at, keys, 0o644); err != nil {
		t.Fatal(err)
	}
	trust, err := release.MachineTrust(root)
	if err != nil {
		t.Fatal(err)
	}
	if err := trust.Verify(got.Statement, version.MustParse("v1.35.4"), runtime.GOARCH, got.List); err != nil {
		t.Error(err)
	}
	if again, err := c.Components(t.Context(), "v1.35.4"); err != nil || again.Statement != got.Statement {
		t.Errorf("asked again: %v, another statement %t", err, again.Statement != got.Statement)
	}

	// A sandbox that an older program made has no key, and still works.
	if err := os.Remove(dirs.of("demo", releaseKeyName)); err != nil {
		t.Fatal(err)
	}
	if a.mirror.key, err = d.releaseKey(); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Components(t.Context(), "v1.35.4"); err != nil || got.Statement != "" || len(got.List) == 0 {
		t.Errorf("an older sandbox: %+v, %v", got, err)
	}
}
