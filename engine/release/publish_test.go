package release

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestGenerateEmbeddedReleases(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "releases")
	if err := os.CopyFS(dir, os.DirFS("../../assets/releases")); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "minors/v0.9.json", "{}") // of a removed release
	if err := Generate(dir); err != nil {
		t.Fatal(err)
	}
	if got, want := tree(t, dir), tree(t, "../../assets/releases"); !reflect.DeepEqual(got, want) {
		t.Errorf("assets/releases is not what `make generate` makes: %d files, want %d", len(got), len(want))
		for name, b := range got {
			if b != want[name] {
				t.Errorf("%s differs", name)
			}
		}
	}
}

// tree returns all files of a directory.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(at string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(at)
		name, _ := filepath.Rel(dir, at)
		out[filepath.ToSlash(name)] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestPublicationContinuesThePreviousOne(t *testing.T) {
	key := newTestKey(t, "tests")
	from, parent := sources(t), t.TempDir()
	out := filepath.Join(parent, "feed")
	r := publish(t, BuildOptions{From: from, Out: out, Key: key, Expires: 48 * time.Hour})
	noDigest := r.NoDigest
	r.NoDigest = nil
	want := BuildReport{
		Out: out, Sequence: 1, Created: today, Expires: today.Add(48 * time.Hour), Signer: key.String(), Keys: []string{key.String()},
		Releases: []string{"v1.0.0", "v1.1.0"}, Added: []string{"v1.0.0", "v1.1.0"}, Files: 10, Warning: legacyWarning(),
	}
	if !reflect.DeepEqual(r, want) {
		t.Errorf("first: %+v, want %+v", r, want)
	}
	if !slices.Contains(noDigest, "OS image of v1.1.0 for cloudy: image-0815") || !slices.Contains(noDigest, "registry.k8s.io/kube-proxy:v1.36.4") || slices.Contains(noDigest, "registry.k8s.io/coredns/coredns:v1.14.6") {
		t.Errorf("without a digest: %v", noDigest)
	}
	write(t, from, "v1.2.0.yaml", strings.NewReplacer("v1.1.0", "v1.2.0", "upgradeFrom: v1.0.0", "upgradeFrom: v1.1.0").Replace(string(read(t, from, "v1.1.0.yaml"))))
	write(t, from, "v1.0.0/measurements/cloudy.json", measured("v1.0.0", "cloudy")) // another provider comes later
	r = publish(t, BuildOptions{From: from, Out: out, Key: key, Now: at(today.Add(time.Hour))})
	if r.Sequence != 2 || !slices.Equal(r.Added, []string{"v1.2.0"}) || r.Dropped != nil || r.Expires != today.Add(time.Hour+DefaultExpiry) {
		t.Errorf("second: %+v", r)
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	// Through a symbolic link, which stays.
	link := filepath.Join(parent, "current")
	if err := os.Symlink(out, link); err != nil {
		t.Fatal(err)
	}
	if r = publish(t, BuildOptions{From: from, Out: link, Key: key}); r.Sequence != 3 || r.Out != out {
		t.Errorf("through a link: %+v", r)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode().Type() != os.ModeSymlink {
		t.Errorf("the link: %v, %v", info, err)
	}
}

func TestPublishedReleasesAreImmutable(t *testing.T) {
	key := newTestKey(t, "tests")
	for _, tt := range []struct {
		name   string
		change func(t *testing.T, from string)
		want   string // empty: it is allowed
	}{
		{name: "a release is dropped", change: func(t *testing.T, from string) {
			remove(t, from, "v1.0.0.yaml")
		}, want: "drop release v1.0.0: it was published"},
		{name: "a faulty release is dropped", change: func(t *testing.T, from string) {
			remove(t, from, "v1.0.0.yaml")
			write(t, from, "notices.yaml", "schema: \"1\"\nfaulty:\n- {release: v1.0.0, reason: forgets its keys}\n")
		}, want: ""},
		{name: "a release with one faulty Kubernetes is dropped", change: func(t *testing.T, from string) {
			remove(t, from, "v1.0.0.yaml")
			write(t, from, "notices.yaml", "schema: \"1\"\nfaulty:\n- {release: v1.0.0, kubernetes: v1.34.0, reason: loses volumes}\n")
		}, want: "drop release v1.0.0: it was published"},
		{name: "a release is changed", change: func(t *testing.T, from string) {
			write(t, from, "v1.0.0.yaml", string(read(t, from, "v1.0.0.yaml"))+"# one more remark\n")
		}, want: "change releases/v1.0.0.yaml: it was published"},
		{name: "measurements are changed", change: func(t *testing.T, from string) {
			write(t, from, "v1.1.0/measurements/cloudy.json", strings.ReplaceAll(measured("v1.1.0", "cloudy"), "0404", "0505"))
		}, want: "change releases/v1.1.0/measurements/cloudy.json: it was published"},
		{name: "measurements are dropped", change: func(t *testing.T, from string) {
			remove(t, from, "v1.1.0/measurements/cloudy.json")
		}, want: "drop releases/v1.1.0/measurements/cloudy.json: it was published"},
		{name: "an OS image is replaced", change: func(t *testing.T, from string) {
			write(t, from, "v1.1.0/images.yaml", "os: [{provider: cloudy, reference: image-0816}]\ncontainers: {registry.k8s.io/coredns/coredns:v1.14.6: 'sha256:"+strings.Repeat("ab", 32)+"'}\n")
		}, want: "change the OS image of v1.1.0 for cloudy: it was published"},
		{name: "an OS image is dropped", change: func(t *testing.T, from string) {
			remove(t, from, "v1.1.0/images.yaml")
		}, want: "change the OS image of v1.1.0 for cloudy"},
		{name: "the digest of a container is replaced", change: func(t *testing.T, from string) {
			write(t, from, "v1.1.0/images.yaml", "os: [{provider: cloudy, reference: image-0815}]\ncontainers: {registry.k8s.io/coredns/coredns:v1.14.6: 'sha256:"+strings.Repeat("00", 32)+"'}\n")
		}, want: "change the digest of registry.k8s.io/coredns/coredns:v1.14.6: it was published"},
		{name: "digests become known", change: func(t *testing.T, from string) {
			write(t, from, "v1.1.0/images.yaml", "os: [{provider: cloudy, reference: image-0815, digest: 'sha256:"+strings.Repeat("12", 32)+"'}]\ncontainers: {registry.k8s.io/coredns/coredns:v1.14.6: 'sha256:"+strings.Repeat("ab", 32)+"', registry.k8s.io/etcd:3.7.0-0: 'sha256:"+strings.Repeat("34", 32)+"'}\n")
		}, want: ""},
		{name: "a download moves", change: func(t *testing.T, from string) {
			write(t, from, "v1.1.0/downloads.yaml", "- {os: linux, arch: amd64, url: 'https://elsewhere.example/cli'}\n")
		}, want: ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			from, out := sources(t), filepath.Join(t.TempDir(), "feed")
			publish(t, BuildOptions{From: from, Out: out, Key: key})
			before := tree(t, out)
			tt.change(t, from)
			r, err := Build(t.Context(), BuildOptions{From: from, Out: out, Key: key, Now: at(today)})
			if tt.want == "" {
				if err != nil || r.Sequence != 2 {
					t.Errorf("%+v, %v", r, err)
				}
				return
			}
			if !errors.Is(err, ErrPublished) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			if !reflect.DeepEqual(tree(t, out), before) {
				t.Error("the feed was changed")
			}
		})
	}
}

func TestBuildRejectsInvalidSources(t *testing.T) {
	key := newTestKey(t, "tests")
	for _, tt := range []struct{ name, file, content, want string }{
		{name: "a stray file", file: "notes.txt", content: "hello", want: `has "notes.txt", which is neither a release`},
		{name: "a hidden file", file: ".v1.1.0.yaml.swp", content: "hello", want: "which is neither a release"},
		{name: "a release under another name", file: "v1.3.0.yaml", want: "contains release v1.1.0"},
		{name: "a folder of no release", file: "v1.3.0/images.yaml", content: "os: []\n", want: "there is a folder v1.3.0 but no v1.3.0.yaml"},
		{name: "a stray file of a release", file: "v1.1.0/notes.txt", content: "hello", want: `"v1.1.0/notes.txt" is not images.yaml`},
		{name: "measurements of another release", file: "v1.0.0/measurements/cloudy.json", content: measured("v1.1.0", "cloudy"), want: `content is of image "v1.1.0"`},
		{name: "measurements of another provider", file: "v1.1.0/measurements/sunny.json", content: measured("v1.1.0", "cloudy"), want: `for "cloudy"`},
		{name: "invalid measurements", file: "v1.1.0/measurements/cloudy.json", content: strings.ReplaceAll(measured("v1.1.0", "cloudy"), "0404", "04"), want: "invalid PCR 4"},
		{name: "measurements of no register", file: "v1.1.0/measurements/cloudy.json", content: strings.ReplaceAll(measured("v1.1.0", "cloudy"), `"4"`, `"24"`), want: "invalid PCR 24"},
		{name: "a provider that is a path", file: "v1.1.0/measurements/Cloudy.json", content: measured("v1.1.0", "Cloudy"), want: "is not images.yaml"},
		{name: "images that nobody runs", file: "v1.1.0/images.yaml", content: "containers: {registry.k8s.io/pause:9: 'sha256:" + strings.Repeat("ab", 32) + "'}\n", want: `release v1.1.0 has no image "registry.k8s.io/pause:9"`},
		{name: "an invalid digest", file: "v1.1.0/images.yaml", content: "containers: {registry.k8s.io/coredns/coredns:v1.14.6: abc}\n", want: "invalid digest of registry.k8s.io/coredns/coredns:v1.14.6"},
		{name: "an OS image twice", file: "v1.1.0/images.yaml", content: "os: [{provider: a, reference: b}, {provider: a, reference: c}]\n", want: "a occurs twice"},
		{name: "an OS image with control characters", file: "v1.1.0/images.yaml", content: "os: [{provider: a, reference: \"\\e[2J\"}]\n", want: "has no printable reference"},
		{name: "an unknown key", file: "v1.1.0/images.yaml", content: "oss: []\n", want: "field oss not found"},
		{name: "a download over http", file: "v1.1.0/downloads.yaml", content: "- {os: linux, arch: amd64, url: 'http://releases.example/x'}\n", want: "is not an https address"},
		{name: "a notice without a reason", file: "notices.yaml", content: "faulty: [{release: v1.0.0}]\n", want: "notices.yaml: line 1: a notice needs a reason"},
		{name: "a notice about nothing", file: "notices.yaml", content: "schema: \"1\"\nfaulty: [{reason: bad}]\n", want: "names neither"},
		{name: "a notice about no release", file: "notices.yaml", content: "faulty:\n- {kubernetes: v1.35.4, reason: bad}\n- release: v1.0\n  reason: bad\n", want: `notices.yaml: line 3: parse version "v1.0": want MAJOR.MINOR.PATCH`},
		{name: "a notice about no patch", file: "notices.yaml", content: "faulty:\n- kubernetes: 1.35\n  reason: bad\n", want: `notices.yaml: line 2: parse version "1.35"`},
		{name: "a notice about a patch that a release does not offer", file: "notices.yaml", content: "faulty:\n- {release: v1.0.0, kubernetes: v1.20.0, reason: bad}\n", want: "notices.yaml: line 2: release v1.0.0 does not offer Kubernetes v1.20.0"},
		{name: "a notice with a key too many", file: "notices.yaml", content: "faulty:\n- {release: v1.0.0, reasons: bad}\n", want: "notices.yaml: line 2: field reasons not found"},
		{name: "a notice with a key twice", file: "notices.yaml", content: "faulty:\n- {release: v1.0.0, release: v1.1.0, reason: bad}\n", want: `line 2: "release" occurs twice`},
		{name: "an invalid notice", file: "notices.yaml", content: "faulty: [v1.0.0]\n", want: "line 1: a notice is {release, kubernetes, reason}"},
		{name: "notices of the future", file: "notices.yaml", content: "schema: \"2\"\n", want: `its format is "2"`},
		{name: "a notice in two lines", file: "notices.yaml", content: "schema: \"1\"\nfaulty: [{release: v1.0.0, reason: \"a\\nb\"}]\n", want: "one line of text"},
		{name: "an images.json of which the source is missing", file: "v1.0.0/images.json", content: `{"os": [{"provider": "a", "reference": "b"}]}`, want: "this file is generated from images.yaml, which is missing"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			from, out := sources(t), filepath.Join(t.TempDir(), "feed")
			if tt.content == "" {
				tt.content = string(read(t, from, "v1.1.0.yaml"))
			}
			write(t, from, tt.file, tt.content)
			_, err := Build(t.Context(), BuildOptions{From: from, Out: out, Key: key, Now: at(today)})
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.ContainsRune(err.Error(), 0x1b) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			if _, err := os.Stat(out); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("something was written: %v", err)
			}
		})
	}
	from := sources(t)
	for name, d := range map[string]time.Duration{"too short": time.Minute, "too long": 500 * 24 * time.Hour, "in the past": -time.Hour} {
		if _, err := Build(t.Context(), BuildOptions{From: from, Out: filepath.Join(t.TempDir(), "feed"), Key: key, Expires: d}); err == nil || !strings.Contains(err.Error(), "must be valid for 1 hour to 400 days, not for") {
			t.Errorf("%s: %v", name, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	out := filepath.Join(t.TempDir(), "feed")
	if _, err := Build(ctx, BuildOptions{From: from, Out: out, Key: key}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if left, err := os.ReadDir(filepath.Dir(out)); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestBuildKeepsUnrelatedFolders(t *testing.T) {
	key := newTestKey(t, "tests")
	from := sources(t)
	home := t.TempDir()
	write(t, home, "thesis.txt", "the only copy")
	if _, err := Build(t.Context(), BuildOptions{From: from, Out: home, Key: key}); err == nil || !strings.Contains(err.Error(), `has "thesis.txt", which is not a file of a feed`) {
		t.Errorf("got %v", err)
	}
	out := feed(t, key)
	write(t, out, "index.json", strings.Replace(string(read(t, out, "index.json")), `"sequence": 1`, `"sequence": 9007199254740990`, 1))
	if _, err := Build(t.Context(), BuildOptions{From: from, Out: out, Key: key, Now: at(today)}); !errors.Is(err, ErrSigner) {
		t.Errorf("an index that somebody changed: %v", err)
	}
}

func TestVerifyReportsEachInvalidFile(t *testing.T) {
	key, stranger := newTestKey(t, "tests"), newTestKey(t, "stranger")
	for _, tt := range []struct {
		name     string
		change   func(t *testing.T, dir string)
		keys     []Key
		now      time.Time
		problems []string          // of the feed
		files    map[string]string // file to a substring of its problem
	}{
		{name: "all is well"},
		{name: "a signature is missing", change: func(t *testing.T, dir string) { remove(t, dir, "majors/v1.json.sig") }, files: map[string]string{"majors/v1.json": "it is not signed"}},
		{name: "a file of a stranger", change: func(t *testing.T, dir string) { resign(t, dir, "minors/v1.0.json", stranger, []byte("{}")) }, files: map[string]string{"minors/v1.0.json": "it has 2 bytes"}},
		{
			name: "a signature of a stranger", change: func(t *testing.T, dir string) {
				resign(t, dir, "minors/v1.0.json", stranger, read(t, dir, "minors/v1.0.json"))
			},
			files: map[string]string{"minors/v1.0.json": "an untrusted key signed it"},
		},
		{
			name: "a list that disagrees", change: func(t *testing.T, dir string) {
				substitute(t, dir, "minors/v1.0.json", key, []byte(`{"schema": "1", "minor": "v1.0", "releases": ["v1.0.0", "v1.0.1"]}`))
			},
			files: map[string]string{"minors/v1.0.json": "contradicts summaries.json"},
		},
		{
			name: "a release that disagrees", change: func(t *testing.T, dir string) {
				substitute(t, dir, "releases/v1.1.0.yaml", key, []byte(strings.Replace(string(read(t, dir, "releases/v1.1.0.yaml")), "defaultKubernetes: v1.36.4", "defaultKubernetes: v1.35.3", 1)))
			},
			files: map[string]string{"releases/v1.1.0.yaml": "contradicts summaries.json"},
		},
		{name: "a file is altered", change: func(t *testing.T, dir string) {
			b := read(t, dir, "releases/v1.1.0/images.json")
			b[len(b)/2] ^= 1
			write(t, dir, "releases/v1.1.0/images.json", string(b))
		}, files: map[string]string{"releases/v1.1.0/images.json": "its digest differs from the index"}},
		{name: "a file is missing", change: func(t *testing.T, dir string) { remove(t, dir, "summaries.json") }, files: map[string]string{
			"summaries.json": "not found",
		}, problems: []string{"missing files cannot be determined without summaries.json"}},
		{name: "a file too many", change: func(t *testing.T, dir string) { write(t, dir, "backdoor\x1b.sh", "") }, problems: []string{`"backdoor?.sh" exists, but the index does not name it`}},
		{name: "a list too few", change: func(t *testing.T, dir string) {
			forge(t, dir, key, func(i *index) { delete(i.Files, "minors/v1.1.json") })
		}, problems: []string{`"minors/v1.1.json" exists`, `"minors/v1.1.json.sig" exists`, "does not name minors/v1.1.json"}},
		{name: "the feed has expired", now: today.AddDate(1, 0, 0), problems: []string{"it has expired: it ended on 2026-12-21 12:00 UTC, and this computer's clock says 2027-11-21"}},
		{name: "an untrusted key signed the feed", keys: []Key{stranger.Key}, files: map[string]string{
			"index.json": "an untrusted key signed it", "summaries.json": "an untrusted key signed it", "releases/v1.0.0.yaml": "an untrusted key signed it", "releases/v1.1.0.yaml": "", "releases/v1.0.0/images.json": "",
			"releases/v1.1.0/images.json": "", "releases/v1.1.0/measurements/cloudy.json": "", "majors/v1.json": "", "minors/v1.0.json": "", "minors/v1.1.json": "",
			"releases/v1.0.0/components.json": "an untrusted key signed it", "releases/v1.1.0/components.json": "an untrusted key signed it",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := feed(t, key)
			if tt.change != nil {
				tt.change(t, dir)
			}
			if tt.now.IsZero() {
				tt.now = today
			}
			if tt.keys == nil {
				tt.keys = []Key{key.Key}
			}
			r, err := Verify(t.Context(), dir, Options{Keys: tt.keys, Now: at(tt.now)})
			if err != nil {
				t.Fatal(err)
			}
			if r.OK() != (len(tt.problems)+len(tt.files) == 0) {
				t.Errorf("ok is %t", r.OK())
			}
			for _, f := range r.Files {
				part, bad := tt.files[f.Name]
				if bad != (f.Problem != "") || !strings.Contains(f.Problem, part) {
					t.Errorf("%s: problem %q, want %q", f.Name, f.Problem, part)
				}
				if f.Problem == "" && f.Signer != key.String() {
					t.Errorf("%s: signed by %q", f.Name, f.Signer)
				}
				delete(tt.files, f.Name)
			}
			if len(tt.files) > 0 {
				t.Errorf("not in the report: %v", tt.files)
			}
			if len(r.Problems) != len(tt.problems) {
				t.Errorf("problems %q, want %q", r.Problems, tt.problems)
			} else {
				for i, p := range r.Problems {
					if !strings.Contains(p, tt.problems[i]) {
						t.Errorf("problem %q, want %q", p, tt.problems[i])
					}
				}
			}
			if tt.name == "all is well" && (len(r.Files) != 12 || !slices.Contains(r.NoDigest, "registry.k8s.io/etcd:3.6.8-0") || !slices.Contains(r.NoDigest, "OS image of v1.1.0 for cloudy: image-0815") || r.Signer != key.String()) {
				t.Errorf("report %+v", r)
			}
		})
	}
}

func TestVerifyWithRotatedKeys(t *testing.T) {
	first, second := newTestKey(t, "first"), newTestKey(t, "second")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: from, Out: dir, Key: first, Trust: []Key{first.Key, second.Key}})
	publish(t, BuildOptions{From: from, Out: dir, Key: second, Trust: []Key{second.Key}})
	for _, root := range []*PrivateKey{first, second} {
		r, err := Verify(t.Context(), serve(t, dir).URL, Options{Keys: []Key{root.Key}, Now: at(today)})
		if err != nil || !r.OK() || r.KeySet != 2 || !slices.Equal(r.Keys, []string{second.String()}) || r.Signer != second.String() {
			t.Errorf("from %s: %+v, %v", root.Key, r, err)
		}
	}
	substitute(t, dir, "keys/1.json", second, []byte("{}"))
	r, err := Verify(t.Context(), dir, Options{Keys: []Key{second.Key}, Now: at(today)})
	if err != nil || r.OK() {
		t.Errorf("a key set that is not the one of the index: %+v, %v", r, err)
	}
}

func TestEmbeddedReleasesAreNotSigned(t *testing.T) {
	r, err := Verify(t.Context(), "../../assets/releases", Options{Now: at(today)})
	if err != nil || r.OK() || r.Files[0].Problem != "it is not signed" {
		t.Errorf("%+v, %v", r.Files, err)
	}
	if _, err := Verify(t.Context(), t.TempDir(), Options{}); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("an empty folder: %v", err)
	}
}

func TestKeysAreReadStrictly(t *testing.T) {
	key := newTestKey(t, "tests")
	private, err := key.PrivatePEM()
	if err != nil {
		t.Fatal(err)
	}
	again, err := ParsePrivateKey("again", private)
	if err != nil || again.ID() != key.ID() {
		t.Fatal(again, err)
	}
	other, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(&other.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"it is empty":                                 "",
		"it contains data that is not PEM":            "hello",
		"it is a private key":                         string(private),
		"contains data that is not PEM":               string(key.PEM()) + "hello",
		"it is not an ECDSA public key":               "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
		"read key bad: it is not an ECDSA public key": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
		"is not on the curve P-256":                   string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})),
	} {
		if _, err := ParseKeys("bad", []byte(content)); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want %q", err, name)
		}
	}
	for name, content := range map[string]string{
		"it is not a single PEM block": "",
		"it is encrypted":              "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED SIGSTORE PRIVATE KEY-----\n",
		`it contains a "PUBLIC KEY"`:   string(key.PEM()),
		"it is not an ECDSA key":       "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
	} {
		if _, err := ParsePrivateKey("bad", []byte(content)); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want %q", err, name)
		}
	}
}
