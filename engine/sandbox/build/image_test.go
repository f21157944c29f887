package build

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"constellation/internal/ocipack"
)

var day = time.Date(2026, 4, 15, 0, 0, 0, 0, time.UTC)

// packed writes an image of a binary with this content, and another beside it, and returns its archive.
func packed(t *testing.T, content string) (archive, digest string) {
	t.Helper()
	dir := t.TempDir()
	binary, beside := filepath.Join(dir, "prog"), filepath.Join(dir, "beside")
	for _, file := range []string{binary, beside} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	spec := imageSpec{name: "prog", ref: "example.org/a/prog:v1", at: "/usr/local/bin/prog", links: map[string]string{"/prog": "usr/local/bin/prog"}, entrypoint: []string{"/prog"}, cmd: []string{"run"}, user: "1:1"}
	layer, err := spec.layer(day, binary, beside)
	if err != nil {
		t.Fatal(err)
	}
	img, err := spec.describe(day, layer)
	if err != nil {
		t.Fatal(err)
	}
	archive = filepath.Join(dir, "prog.tar")
	if digest, err = ocipack.WriteArchive(archive, spec.ref, img); err != nil {
		t.Fatal(err)
	}
	return archive, digest
}

func TestImageIsWhatWasPutIn(t *testing.T) {
	archive, digest := packed(t, "#!binary")
	img, err := LoadImage(archive)
	if err != nil {
		t.Fatal(err)
	}
	checkDigests(t, img)
	if h, err := img.Digest(); err != nil || h.String() != digest {
		t.Errorf("the digest is %v, %v, want %s", h, err, digest)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	want := v1.Config{
		Entrypoint: []string{"/prog"}, Cmd: []string{"run"}, User: "1:1", WorkingDir: "/",
		Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	}
	if diff := cmp.Diff(want, config.Config); diff != "" || config.Architecture != runtime.GOARCH || config.OS != "linux" {
		t.Errorf("the image is for %s/%s and differs (-want +got):\n%s", config.OS, config.Architecture, diff)
	}

	type file struct {
		Name, Link, Content string
		Mode                int64
	}
	var got []file
	for _, h := range list(t, img) {
		if !h.ModTime.Equal(day) || h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%s belongs to %d:%d and is of %v, want root and the date of the release", h.Name, h.Uid, h.Gid, h.ModTime)
		}
		if h.Name == "etc/passwd" || h.Name == "etc/group" {
			h.content = ""
		}
		got = append(got, file{h.Name, h.Linkname, h.content, h.Mode})
	}
	wantFiles := []file{
		{Name: "etc/", Mode: 0o755},
		{Name: "etc/group", Mode: 0o644},
		{Name: "etc/passwd", Mode: 0o644},
		{Name: "prog", Link: "usr/local/bin/prog", Mode: 0o777},
		{Name: "tmp/", Mode: 0o1777},
		{Name: "usr/", Mode: 0o755},
		{Name: "usr/local/", Mode: 0o755},
		{Name: "usr/local/bin/", Mode: 0o755},
		{Name: "usr/local/bin/beside", Content: "#!binary", Mode: 0o755},
		{Name: "usr/local/bin/prog", Content: "#!binary", Mode: 0o755},
	}
	if diff := cmp.Diff(wantFiles, got); diff != "" {
		t.Errorf("files differ (-want +got):\n%s", diff)
	}
}

// checkDigests reads the whole image and compares it with what it says about itself.
func checkDigests(t *testing.T, img v1.Image) {
	t.Helper()
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	var ids []v1.Hash
	for _, l := range layers {
		digest, err := l.Digest()
		if err != nil {
			t.Fatal(err)
		}
		size, err := l.Size()
		if err != nil {
			t.Fatal(err)
		}
		r, err := l.Compressed()
		if err != nil {
			t.Fatal(err)
		}
		got, n, err := v1.SHA256(r)
		r.Close()
		if err != nil || got != digest || n != size {
			t.Errorf("a layer is %v of %d bytes, %v; its description says %v of %d", got, n, err, digest, size)
		}
		ids = append(ids, got) // layers are not compressed
	}
	if diff := cmp.Diff(config.RootFS.DiffIDs, ids); diff != "" {
		t.Errorf("the configuration names other layers (-named +there):\n%s", diff)
	}
}

type header struct {
	*tar.Header
	content string
}

// list returns the files of all layers, in order.
func list(t *testing.T, img v1.Image) []header {
	t.Helper()
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	var files []header
	for _, l := range layers {
		r, err := l.Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		for tr := tar.NewReader(r); ; {
			h, err := tr.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(io.LimitReader(tr, 1<<10))
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, header{h, string(b)})
		}
		r.Close()
	}
	return files
}

func TestImageOfTheSameBinaryIsTheSame(t *testing.T) {
	a, digest := packed(t, "one")
	time.Sleep(10 * time.Millisecond) // the files get other times
	b, again := packed(t, "one")
	if digest != again {
		t.Errorf("the digests are %s and %s", digest, again)
	}
	fileA, _, errA := digestFile(a)
	fileB, _, errB := digestFile(b)
	if errA != nil || errB != nil || fileA != fileB {
		t.Errorf("the archives are %s and %s (%v, %v)", fileA, fileB, errA, errB)
	}
	if _, other := packed(t, "two"); other == digest {
		t.Error("another binary has the same digest")
	}
}

func TestBrokenArchiveDoesNotLoad(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(b []byte) []byte
	}{
		{"empty", func([]byte) []byte { return nil }},
		{"cut off in the layer", func(b []byte) []byte { return b[:len(b)-3000] }},
		{"cut off in the manifest", func(b []byte) []byte { return b[:2500] }},
		{"not a tar file", func([]byte) []byte { return make([]byte, 300) }},
		{"with another manifest", func(b []byte) []byte {
			s := string(b)
			i := strings.Index(s, `"layers"`)
			return []byte(s[:i] + `"lAyers"` + s[i+8:])
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			archive, _ := packed(t, "content")
			b, err := os.ReadFile(archive)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(archive, tt.do(b), 0o644); err != nil {
				t.Fatal(err)
			}
			if _, err := LoadImage(archive); err == nil {
				t.Error("it loads")
			}
		})
	}
	if _, err := LoadImage(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing archive gives %v", err)
	}
}
