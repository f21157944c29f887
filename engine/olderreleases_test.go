package engine_test

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/release"
)

// olderReleases returns the program's releases without v1.36 in v1.0.0. With it, most paths of these
// tests would have one hop: a machine of image v1.0.0 could run the next minor.
var olderReleases = sync.OnceValues(func() (fs.FS, error) {
	dir, err := os.MkdirTemp("", "releases")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.CopyFS(dir, assets.Releases()); err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "releases", "v1.0.0.yaml")
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	before, _, _ := strings.Cut(string(b), "  - version: v1.36")
	if err := os.WriteFile(file, []byte(before), 0o600); err != nil {
		return nil, err
	}
	if err := release.Generate(dir); err != nil {
		return nil, err
	}
	out := fstest.MapFS{}
	err = fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(name)))
		out[name] = &fstest.MapFile{Data: b, Mode: 0o644}
		return err
	})
	return out, err
})

// openOlder opens olderReleases, joined with a feed if there is one.
func openOlder(ctx context.Context, location string, keys []release.Key) (release.Source, error) {
	own, err := olderReleases()
	if err != nil {
		return nil, err
	}
	return engine.OpenReleasesOf(ctx, own, location, keys)
}

// olderRelease returns the text of one of olderReleases.
func olderRelease(t *testing.T, name string) []byte {
	t.Helper()
	own, err := olderReleases()
	if err != nil {
		t.Fatal(err)
	}
	b, err := fs.ReadFile(own, "releases/"+name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
