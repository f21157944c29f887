package provenance

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"constellation/engine/release"
)

var self = BuildOf(&debug.BuildInfo{
	Path: "constellation", GoVersion: "go1.26.8",
	Deps: []*debug.Module{
		{Path: "example.com/a", Version: "v1.2.3", Sum: "h1:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="},
		{Path: "example.com/b", Version: "v1.0.0", Replace: &debug.Module{Path: "./b"}},
	},
	Settings: []debug.BuildSetting{{Key: "GOOS", Value: "linux"}, {Key: "GOARCH", Value: "arm64"}, {Key: "vcs.revision", Value: "0123abcd"}, {Key: "-trimpath", Value: "true"}},
})

// installed makes an installation with signed statements, as `make release` does.
func installed(t *testing.T, key *release.PrivateKey) (dir string) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"constellation", "constellation-sandbox", "releases/v1.1.0/agent"} {
		put(t, filepath.Join(dir, name), "program "+name)
		sum := sha256.Sum256([]byte("program " + name))
		b, err := New(name, hex.EncodeToString(sum[:]), self, Options{Release: "v1.1.0", Builder: "urn:test", Source: "https://example.com/repo"}).Encode()
		if err != nil {
			t.Fatal(err)
		}
		sig, err := key.SignFile(b)
		if err != nil {
			t.Fatal(err)
		}
		put(t, filepath.Join(dir, Dir, name+Suffix), string(b))
		put(t, filepath.Join(dir, Dir, name+Suffix+SignatureSuffix), string(sig))
	}
	return dir
}

func put(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
}

func newKey(t *testing.T, name string) *release.PrivateKey {
	t.Helper()
	k, err := release.NewPrivateKey(name)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestVerify(t *testing.T) {
	key, other := newKey(t, "publisher"), newKey(t, "other")
	const statement = Dir + "/constellation" + Suffix
	for _, tt := range []struct {
		name   string
		change func(t *testing.T, dir string)
		keys   []release.Key
		want   []string // ID and file of each problem
	}{
		{name: "untouched", change: func(*testing.T, string) {}, keys: []release.Key{other.Key, key.Key}, want: nil},
		{name: "another key", change: func(*testing.T, string) {}, keys: []release.Key{other.Key}, want: []string{
			"invalid-signature provenance/constellation-sandbox.intoto.json", "invalid-signature provenance/constellation.intoto.json", "invalid-signature provenance/releases/v1.1.0/agent.intoto.json",
		}},
		{name: "no key", change: func(*testing.T, string) {}, want: []string{"no-key provenance"}},
		{name: "altered daemon", change: func(t *testing.T, dir string) { put(t, filepath.Join(dir, "releases/v1.1.0/agent"), "evil") }, keys: []release.Key{key.Key}, want: []string{"altered releases/v1.1.0/agent"}},
		{name: "altered program", change: func(t *testing.T, dir string) { put(t, filepath.Join(dir, "constellation"), "evil") }, keys: []release.Key{key.Key}, want: []string{"altered constellation", "no-statement constellation"}},
		{name: "daemon without statement", change: func(t *testing.T, dir string) { put(t, filepath.Join(dir, "releases/v1.1.0/more"), "evil") }, keys: []release.Key{key.Key}, want: []string{"no-statement releases/v1.1.0/more"}},
		{name: "daemon removed", change: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "releases/v1.1.0/agent")) }, keys: []release.Key{key.Key}, want: []string{"missing releases/v1.1.0/agent"}},
		{name: "no statements", change: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, Dir)) }, keys: []release.Key{key.Key}, want: []string{"no-statement constellation", "no-statement constellation-sandbox", "no-statement releases/v1.1.0/agent"}},
		{name: "no signature", change: func(t *testing.T, dir string) { remove(t, filepath.Join(dir, statement+SignatureSuffix)) }, keys: []release.Key{key.Key}, want: []string{"no-signature " + statement}},
		{name: "endless signature", change: func(t *testing.T, dir string) {
			put(t, filepath.Join(dir, statement+SignatureSuffix), strings.Repeat("a", 1<<20))
		}, keys: []release.Key{key.Key}, want: []string{"invalid-signature " + statement}},
		{name: "altered statement", change: func(t *testing.T, dir string) { edit(t, filepath.Join(dir, statement), "urn:test", "urn:evil") }, keys: []release.Key{key.Key}, want: []string{"invalid-signature " + statement}},
		{name: "statement that names a file outside", change: func(t *testing.T, dir string) {
			edit(t, filepath.Join(dir, statement), `"name": "constellation"`, `"name": "../constellation"`)
		}, keys: []release.Key{key.Key}, want: []string{"bad-statement " + statement, "no-statement constellation"}},
		{name: "cut statement", change: func(t *testing.T, dir string) { put(t, filepath.Join(dir, statement), "{") }, keys: []release.Key{key.Key}, want: []string{"bad-statement " + statement, "no-statement constellation"}},
		{name: "statement about another commit", change: func(t *testing.T, dir string) {
			edit(t, filepath.Join(dir, statement), "0123abcd", "4567abcd")
			b, err := os.ReadFile(filepath.Join(dir, statement))
			if err != nil {
				t.Fatal(err)
			}
			sig, err := key.SignFile(b)
			if err != nil {
				t.Fatal(err)
			}
			put(t, filepath.Join(dir, statement+SignatureSuffix), string(sig))
		}, keys: []release.Key{key.Key}, want: []string{"bad-statement " + statement}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := installed(t, key)
			tt.change(t, dir)
			// Users call the program through a symbolic link.
			link := filepath.Join(t.TempDir(), "constellation")
			if err := os.Symlink(filepath.Join(dir, "constellation"), link); err != nil {
				t.Fatal(err)
			}
			r, err := Verify(link, self, tt.keys)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, p := range r.Problems {
				got = append(got, p.ID+" "+p.File)
			}
			slices.Sort(got)
			if !slices.Equal(got, tt.want) || r.OK() != (len(tt.want) == 0) {
				t.Errorf("problems %q, want %q", got, tt.want)
			}
			if r.OK() {
				if p := r.Self(); p == nil || p.Commit != "0123abcd" || p.Builder != "urn:test" || p.Signer != key.String() || len(r.Programs) != 3 {
					t.Errorf("report: %+v", r)
				}
			}
		})
	}
}

func edit(t *testing.T, path, old, text string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(b), old) {
		t.Fatalf("%s does not contain %s", path, old)
	}
	put(t, path, strings.ReplaceAll(string(b), old, text))
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}

// The statement names each module with its checksum as the specification of in-toto wants it, and
// says nothing that differs between two builds.
func TestStatement(t *testing.T) {
	s := New("constellation", strings.Repeat("0", 64), self, Options{Release: "v1.1.0", Builder: "urn:test", Source: "https://example.com/repo"})
	d := s.Predicate.BuildDefinition
	if d.ExternalParameters.Target != "linux/arm64" || s.Commit() != "0123abcd" || d.InternalParameters["-trimpath"] != "true" || len(d.ResolvedDependencies) != 3 {
		t.Errorf("statement: %+v", s)
	}
	if r := d.ResolvedDependencies[1]; r.URI != "pkg:golang/example.com/a@v1.2.3" || r.Digest["goModuleH1"] != "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" {
		t.Errorf("module: %+v", r)
	}
	if r := d.ResolvedDependencies[2]; len(r.Digest) != 0 {
		t.Errorf("a replaced module has a checksum: %+v", r)
	}
}
