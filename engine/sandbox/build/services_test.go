package build

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// tree makes a source tree of ours with prebuilt services and goes there.
func tree(t *testing.T, contents map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{"go.mod": "module constellation\n\ngo 1.26.0\n", "deep/down/x": ""}
	for name, content := range contents {
		files["bin/releases/v9.9.9/"+name] = content
	}
	for name, content := range files {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(filepath.Join(dir, "deep", "down"))
	return dir
}

func TestServicesArePackedOnce(t *testing.T) {
	dir := tree(t, map[string]string{"agent": "#!agent", "joinservice": "#!join", "operator": "#!operate"})
	cache := t.TempDir()
	images, err := Services(t.Context(), cache, "v9.9.9", nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct{ ref, path, content string }{
		{ref: "registry.constellation.example/agent:v9.9.9", path: "usr/local/bin/agent", content: "#!agent"},
		{ref: "registry.constellation.example/joinservice:v9.9.9", path: "usr/local/bin/joinservice", content: "#!join"},
		{ref: "registry.constellation.example/operator:v9.9.9", path: "usr/local/bin/operator", content: "#!operate"},
	} {
		img, err := LoadImage(images[i].Path)
		if err != nil {
			t.Fatal(err)
		}
		checkDigests(t, img)
		found := false
		for _, f := range list(t, img) {
			found = found || f.Name == want.path && f.content == want.content
		}
		if h, err := img.Digest(); images[i].Ref != want.ref || !found || err != nil || h.String() != images[i].Digest {
			t.Errorf("image %d is %+v, and it has the binary: %v, want %+v", i, images[i], found, want)
		}
	}

	before, err := os.Stat(images[0].Path)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Services(t.Context(), cache, "v9.9.9", nil)
	if err != nil || !slices.Equal(again, images) {
		t.Errorf("the second call gives %v, %v, want %v", again, err, images)
	}
	if after, err := os.Stat(images[0].Path); err != nil || !os.SameFile(before, after) {
		t.Errorf("the image was written again (%v)", err)
	}

	// A new build of a binary is a new image, and the old image stays available.
	if err := os.WriteFile(filepath.Join(dir, "bin/releases/v9.9.9/operator"), []byte("#!better"), 0o755); err != nil {
		t.Fatal(err)
	}
	newer, err := Services(t.Context(), cache, "v9.9.9", nil)
	if err != nil || !slices.Equal(newer[:2], images[:2]) || newer[2].Digest == images[2].Digest {
		t.Errorf("after a build of the operator there is %v, %v; before %v", newer, err, images)
	}
	if _, err := LoadImage(images[2].Path); err != nil {
		t.Errorf("the old image is gone: %v", err)
	}

	// A damaged one is written again.
	if err := os.Truncate(images[0].Path, 700); err != nil {
		t.Fatal(err)
	}
	if _, err := Services(t.Context(), cache, "v9.9.9", nil); err != nil {
		t.Fatal(err)
	}
	if img, err := LoadImage(images[0].Path); err != nil {
		t.Errorf("the damaged image is still there: %v", err)
	} else {
		checkDigests(t, img)
	}
}

func TestMissingServicesNameTheRemedy(t *testing.T) {
	tree(t, map[string]string{"joinservice": "#!join"})
	for _, tt := range []struct {
		name, release, remedy string
		missing               bool
	}{
		{name: "a service that was not built", release: "v9.9.9", remedy: "install this release again; in a source tree run `make build` and use its bin/constellation", missing: true},
		{name: "a release that was not built", release: "v0.1.0", remedy: "install this release again; in a source tree run `make build` and use its bin/constellation", missing: true},
		{name: "a path for a release", release: "../v9.9.9", remedy: "name a release such as v1.1.0"},
		{name: "nothing for a release", remedy: "name a release such as v1.1.0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Services(t.Context(), t.TempDir(), tt.release, nil)
			var known *Error
			if !errors.As(err, &known) || known.Remedy != tt.remedy || errors.Is(err, fs.ErrNotExist) != tt.missing {
				t.Errorf("the error is %v with %+v, want the remedy %q", err, known, tt.remedy)
			}
		})
	}
}

func TestUnusedServicesArePruned(t *testing.T) {
	dir := tree(t, map[string]string{"agent": "#!agent", "joinservice": "#!join", "operator": "#!operate"})
	cache := t.TempDir()
	const month = 30 * 24 * time.Hour
	age := func(images ...Image) {
		t.Helper()
		long := time.Now().Add(-2 * month)
		for _, i := range images {
			if err := os.Chtimes(i.Path, long, long); err != nil {
				t.Fatal(err)
			}
		}
	}
	first, err := Services(t.Context(), cache, "v9.9.9", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range services {
		if err := os.WriteFile(filepath.Join(dir, "bin/releases/v9.9.9", name), []byte("#!better "+name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	second, err := Services(t.Context(), cache, "v9.9.9", nil)
	if err != nil {
		t.Fatal(err)
	}
	age(append(first, second...)...)
	if _, err := Services(t.Context(), cache, "v9.9.9", nil); err != nil { // uses the second ones
		t.Fatal(err)
	}
	kubernetes := filepath.Join(cache, "kubernetes", "v1.30.0")
	if err := os.MkdirAll(kubernetes, 0o755); err != nil {
		t.Fatal(err)
	}

	removed, err := PruneServices(cache, []string{first[0].Path}, month)
	if want := []string{first[1].Path, first[2].Path}; err != nil || !slices.Equal(removed, want) {
		t.Errorf("removed %q, %v; want %q", removed, err, want)
	}
	for _, path := range []string{first[0].Path, second[0].Path, second[1].Path, second[2].Path, kubernetes} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	age(first[0], second[0], second[1], second[2])
	if removed, err := PruneServices(cache, nil, month); err != nil || len(removed) != 4 {
		t.Errorf("removed %q, %v; want the other four", removed, err)
	}
	if _, err := os.Stat(filepath.Join(cache, "services", "v9.9.9")); err == nil {
		t.Error("the empty directory of the release is left")
	}
}
