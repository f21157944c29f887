package sandbox

import (
	"bytes"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/simulated"
)

// TestRenewImagesOfAnOlderSandbox has a sandbox of an older build, which signed nothing. This build replaces the images that no machine has.
func TestRenewImagesOfAnOlderSandbox(t *testing.T) {
	exe, err := os.Executable()
	if err == nil {
		exe, err = filepath.EvalSymlinks(exe)
	}
	if err != nil {
		t.Fatal(err)
	}
	releases := filepath.Join(filepath.Dir(exe), "releases") // where programs look for those of releases
	t.Cleanup(func() { os.RemoveAll(releases) })
	names := []string{"bootstrapper", "agent", "joinservice", "operator"}
	write := func(file, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	programs := func(text string) {
		t.Helper()
		for _, v := range []string{"v1.0.0", "v1.1.0"} {
			for _, name := range names {
				write(filepath.Join(releases, v, name), text)
			}
		}
	}

	s := &Sandboxes{dirs: Dirs{Cache: t.TempDir(), State: t.TempDir()}, log: discard()}
	dir, file := s.dirs.of("demo"), s.dirs.of("demo", stateName)
	st := newState("demo", "/w", time.Now())
	st.Simulated, st.Release, st.Image = true, "v1.0.0", "v1.0.0"
	for i := range st.Groups {
		st.Groups[i].Image = st.Image
	}
	programs("older")
	for _, v := range []string{"v1.0.0", "v1.1.0"} {
		from := filepath.Join(releases, v)
		img, err := simulated.Image(dir, v, map[string]string{"agent": from + "/agent", "bootstrapper": from + "/bootstrapper"}, []byte("[]"), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(img.Dir, path.Base(release.MachineKeys))); err != nil { // older images have none
			t.Fatal(err)
		}
		img.Events = simulated.Measure(img)
		st.Catalogue = append(st.Catalogue, img)
		for _, name := range names[1:] {
			if st.Containers[build.ServiceReference(name, v)], err = simulated.Service(dir, name, v, from+"/"+name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := st.write(file); err != nil {
		t.Fatal(err)
	}

	programs("newer")
	var told []string
	renew := func() []byte {
		t.Helper()
		told = nil
		if err := s.renewImages("demo", newTeller(func(e plan.Event) { told = append(told, e.Text) })); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	first := renew()
	if len(told) != 1 || !strings.Contains(told[0], "images v1.1.0 are of this program") {
		t.Errorf("it tells %q", told)
	}
	got, err := readState(file)
	if err != nil {
		t.Fatal(err)
	}
	for n, want := range []string{"older", "newer"} {
		img := got.Catalogue[n]
		for _, f := range []string{filepath.Join(img.Dir, "bootstrapper"), got.Containers[build.ServiceReference("operator", img.Version)]} {
			if b, err := os.ReadFile(f); err != nil || string(b) != want {
				t.Errorf("%s has %q (%v), want %q", f, b, err, want)
			}
		}
		if measured := predict(img); !bytes.Equal(measured[11], predict(st.Catalogue[n])[11]) != (want == "newer") {
			t.Errorf("register 11 of image %s is %x", img.Version, measured[11])
		}
	}
	key, err := (&daemon{dirs: s.dirs, name: "demo"}).releaseKey()
	if err != nil || key == nil {
		t.Fatalf("the sandbox has no release key: %v", err)
	}
	if b, err := os.ReadFile(filepath.Join(got.Catalogue[1].Dir, path.Base(release.MachineKeys))); err != nil || !bytes.Equal(b, key.PEM()) {
		t.Errorf("the new image trusts %q: %v", b, err)
	}

	if again := renew(); !bytes.Equal(again, first) || told != nil {
		t.Errorf("the same build changes the sandbox again, and tells %q", told)
	}
	got.Instances = append(got.Instances, &instance{Name: "worker-0", Group: "workers", Image: "v1.1.0"})
	if err := got.write(file); err != nil {
		t.Fatal(err)
	}
	programs("newest")
	renew()
	if b, err := os.ReadFile(filepath.Join(got.Catalogue[1].Dir, "bootstrapper")); err != nil || string(b) != "newer" || told != nil {
		t.Errorf("the image of a machine has %q (%v), and it tells %q", b, err, told)
	}

	// A builder of releases took the key away, which machines trust.
	got.Instances = nil
	if err := got.write(file); err != nil {
		t.Fatal(err)
	}
	keyFile := s.dirs.of("demo", releaseKeyName)
	if err := os.Remove(keyFile); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if after := renew(); !bytes.Equal(after, before) || told != nil {
		t.Errorf("a sandbox whose key was taken away is renewed, and tells %q", told)
	}
	if _, err := os.Stat(keyFile); err == nil {
		t.Error("the sandbox got another key")
	}
}
