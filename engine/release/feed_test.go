package release

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"constellation/engine/version"
	"constellation/internal/testneeds"
)

// today is the day of the tests.
var today = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func at(t time.Time) func() time.Time { return func() time.Time { return t } }

func newTestKey(t testing.TB, name string) *PrivateKey {
	t.Helper()
	k, err := NewPrivateKey(name)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// sources is the input of a publisher: the releases of the program, with images, measurements
// and downloads of his own.
func sources(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for _, v := range []string{"v1.0.0", "v1.1.0"} {
		b, err := os.ReadFile("../../assets/releases/releases/" + v + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		write(t, dir, v+".yaml", string(b))
	}
	write(t, dir, "v1.1.0/measurements/cloudy.json", measured("v1.1.0", "cloudy"))
	write(t, dir, "v1.1.0/images.yaml", "os:\n- provider: cloudy\n  reference: image-0815\ncontainers:\n  registry.k8s.io/coredns/coredns:v1.14.6: sha256:"+strings.Repeat("ab", 32)+"\n")
	write(t, dir, "v1.1.0/downloads.yaml", "- {os: linux, arch: amd64, url: 'https://releases.example/v1.1.0/linux-amd64', digest: 'sha256:"+strings.Repeat("cd", 32)+"'}\n")
	return dir
}

func measured(v, provider string) string {
	return fmt.Sprintf(`{"schema": "1", "version": %q, "provider": %q, "measurements": {"4": %q, "9": %q}}`, v, provider, strings.Repeat("04", 32), strings.Repeat("09", 32))
}

func write(t testing.TB, dir, name, content string) {
	t.Helper()
	at := filepath.Join(dir, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(at, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t testing.TB, dir, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(name)))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func publish(t testing.TB, o BuildOptions) BuildReport {
	t.Helper()
	if o.Now == nil {
		o.Now = at(today)
	}
	r, err := Build(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// feed publishes the sources once and returns the directory.
func feed(t testing.TB, key *PrivateKey) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: sources(t), Out: out, Key: key})
	return out
}

// forge replaces the index of a feed by a changed one with a valid signature.
func forge(t testing.TB, dir string, key *PrivateKey, change func(*index)) {
	t.Helper()
	i, err := parseIndex(read(t, dir, indexName))
	if err != nil {
		t.Fatal(err)
	}
	change(i)
	b, err := encodeJSON(i)
	if err != nil {
		t.Fatal(err)
	}
	resign(t, dir, indexName, key, b)
}

func resign(t testing.TB, dir, name string, key *PrivateKey, b []byte) {
	t.Helper()
	sig, err := key.sign(b)
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir, name, string(b))
	write(t, dir, name+signature, string(sig))
}

// substitute replaces a file and makes the index match.
func substitute(t testing.TB, dir, name string, key *PrivateKey, b []byte) {
	t.Helper()
	resign(t, dir, name, key, b)
	forge(t, dir, key, func(i *index) { i.Files[name] = entryOf(b) })
}

// served is a feed over HTTP on this computer that counts requests.
type served struct {
	*httptest.Server
	mu    sync.Mutex
	asked []string
	// instead answers in place of the feed if it returns true.
	instead func(http.ResponseWriter, *http.Request) bool
}

func serve(t testing.TB, dir string) *served {
	t.Helper()
	s := &served{}
	files := http.FileServer(http.Dir(dir))
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.asked = append(s.asked, strings.TrimPrefix(r.URL.Path, "/"))
		instead := s.instead
		s.mu.Unlock()
		if instead != nil && instead(w, r) {
			return
		}
		if b, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(r.URL.Path))); err == nil {
			w.Header().Set("ETag", `"`+digest(b)+`"`)
		}
		files.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *served) requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.asked
	s.asked = nil
	return out
}

func (s *served) answer(f func(http.ResponseWriter, *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instead = f
}

func names(all []Summary) (out []string) {
	for _, s := range all {
		out = append(out, s.Version.String())
	}
	return out
}

func TestTheSameLayoutWorksEmbeddedFromADirectoryAndOverHTTP(t *testing.T) {
	key := newTestKey(t, "tests")
	dir := feed(t, key)
	server := serve(t, dir)
	embedded, err := Embedded(os.DirFS("../../assets/releases"))
	if err != nil {
		t.Fatal(err)
	}
	want, err := embedded.Summaries(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want[1].CLI = []Download{{"linux", "amd64", "https://releases.example/v1.1.0/linux-amd64", "sha256:" + strings.Repeat("cd", 32)}}; embedded.State().Source != "embedded" {
		t.Errorf("source %q", embedded.State().Source)
	}
	for _, location := range []string{dir, server.URL, server.URL + "/"} {
		f, err := Open(t.Context(), location, Options{Keys: []Key{key.Key}, Now: at(today), Cache: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		got, err := f.Summaries(t.Context())
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: summaries %+v, %v; want %+v", location, got, err, want)
		}
		state := State{Source: strings.TrimSuffix(location, "/"), Fetched: today, Signer: key.String(), Sequence: 1, Expires: today.Add(DefaultExpiry), Warning: legacyWarning()}
		if f.State() != state {
			t.Errorf("%s: state %+v, want %+v", location, f.State(), state)
		}
		r, err := f.Release(t.Context(), version.MustParse("v1.1.0"))
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(canonical(r.Summary()), canonical(want[1])) {
			t.Errorf("%s: release %+v", location, r.Summary())
		}
		m, err := f.Measurements(t.Context(), version.MustParse("v1.1.0"), "cloudy")
		if w := map[uint32]string{4: strings.Repeat("04", 32), 9: strings.Repeat("09", 32)}; err != nil || !maps.Equal(m, w) {
			t.Errorf("%s: measurements %v, %v", location, m, err)
		}
		for _, provider := range []string{"sunny", "../../v1.0.0", "cloudy.json\x1b[2J"} {
			if _, err := f.Measurements(t.Context(), version.MustParse("v1.1.0"), provider); !errors.Is(err, ErrNotOffered) || strings.ContainsRune(err.Error(), 0x1b) {
				t.Errorf("%s: measurements for %q: %v", location, provider, err)
			}
		}
		i, err := f.Images(t.Context(), version.MustParse("v1.1.0"))
		if err != nil {
			t.Fatal(err)
		}
		if w := []OSImage{{Provider: "cloudy", Reference: "image-0815"}}; !slices.Equal(i.OS, w) {
			t.Errorf("%s: OS images %v", location, i.OS)
		}
		if !slices.Contains(i.Containers, ContainerImage{"registry.k8s.io/coredns/coredns:v1.14.6", "sha256:" + strings.Repeat("ab", 32)}) || !slices.Contains(i.Containers, ContainerImage{Reference: "registry.constellation.example/operator:v1.1.0"}) {
			t.Errorf("%s: containers %v", location, i.Containers)
		}
		if _, err := f.Release(t.Context(), version.MustParse("v1.2.0")); !errors.Is(err, ErrNotOffered) || !strings.Contains(err.Error(), "v1.0.0, v1.1.0") {
			t.Errorf("%s: unknown release: %v", location, err)
		}
	}
}

func TestRequestsPerCheck(t *testing.T) {
	key, next := newTestKey(t, "tests"), newTestKey(t, "next")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: from, Out: dir, Key: key, Trust: []Key{key.Key, next.Key}})
	server := serve(t, dir)
	o := Options{Keys: []Key{key.Key}, Now: at(today), Cache: t.TempDir()}
	for _, tt := range []struct {
		name string
		want []string
	}{
		{"the first", []string{"index.json", "index.json.sig", "summaries.json"}},
		{"unchanged", []string{"index.json"}},
		{"unchanged still", []string{"index.json"}},
		{"a new publication with the same releases", []string{"index.json", "index.json.sig"}},
	} {
		if strings.HasPrefix(tt.name, "a new") {
			publish(t, BuildOptions{From: from, Out: dir, Key: next})
		}
		if _, err := Open(t.Context(), server.URL, o); err != nil {
			t.Fatal(err)
		}
		if got := server.requests(); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// cosign verify-blob --key takes the base64 of an ASN.1 signature over the SHA-256 of the
// file, and a public key in PKIX; this test verifies with Go's crypto.
func TestSignaturesMatchCosign(t *testing.T) {
	key, next := newTestKey(t, "tests"), newTestKey(t, "next")
	dir := filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: sources(t), Out: dir, Key: key, Trust: []Key{key.Key, next.Key}})
	block, rest := pem.Decode(key.PEM())
	if block == nil || len(rest) > 0 || block.Type != "PUBLIC KEY" {
		t.Fatalf("public key: %s", key.PEM())
	}
	parsed, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	public := parsed.(*ecdsa.PublicKey)
	n := 0
	err = filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(at, ".sig") {
			return err
		}
		n++
		b, err := os.ReadFile(at)
		if err != nil {
			return err
		}
		sig, err := os.ReadFile(at + ".sig")
		if err != nil {
			return err
		}
		der, err := base64.StdEncoding.DecodeString(string(sig))
		if err != nil {
			return err
		}
		sum := sha256.Sum256(b)
		if !ecdsa.VerifyASN1(public, sum[:], der) {
			t.Errorf("%s: the signature is not good", at)
		}
		sum[0] ^= 1
		if ecdsa.VerifyASN1(public, sum[:], der) {
			t.Errorf("%s: the signature is good for anything", at)
		}
		return nil
	})
	if err != nil || n != 13 {
		t.Errorf("%d files, %v; want 13", n, err)
	}
}

func TestUntrustedFeedsAreRefused(t *testing.T) {
	testneeds.Time(t, "10 s")
	key, stranger := newTestKey(t, "tests"), newTestKey(t, "stranger")
	for _, tt := range []struct {
		name   string
		change func(t *testing.T, dir string)
		now    time.Time
		is     error
		want   string
	}{
		{
			name:   "no signature",
			change: func(t *testing.T, dir string) { remove(t, dir, "index.json.sig") },
			is:     ErrUntrusted, want: "it is not signed",
		},
		{
			name:   "an empty signature",
			change: func(t *testing.T, dir string) { write(t, dir, "index.json.sig", "") },
			is:     ErrSigner, want: "or it was modified or replaced after it was signed; trusted: tests (",
		},
		{
			name:   "a signature that is no base64",
			change: func(t *testing.T, dir string) { write(t, dir, "index.json.sig", "\x1b[2J") },
			is:     ErrUntrusted, want: "is not base64",
		},
		{
			name:   "a signature without end",
			change: func(t *testing.T, dir string) { write(t, dir, "index.json.sig", strings.Repeat("A", 1<<20)) },
			is:     ErrAltered, want: "it has 1048576 bytes, more than 1024",
		},
		{
			name:   "another key",
			change: func(t *testing.T, dir string) { forge(t, dir, stranger, func(*index) {}) },
			is:     ErrSigner, want: "an untrusted key signed it, or it was modified",
		},
		{
			name: "an index of another publication",
			change: func(t *testing.T, dir string) {
				write(t, dir, "index.json", strings.Replace(string(read(t, dir, "index.json")), `"sequence": `, `"sequence": 1`, 1))
			},
			is: ErrSigner, want: "an untrusted key signed it, or it was modified",
		},
		{
			name: "a signed file in place of the index",
			change: func(t *testing.T, dir string) {
				write(t, dir, "index.json", string(read(t, dir, "summaries.json")))
				write(t, dir, "index.json.sig", string(read(t, dir, "summaries.json.sig")))
			},
			is: ErrUntrusted, want: `unknown field "releases"`,
		},
		{
			name: "an index of another type", is: ErrUntrusted, want: `its type is "constellation-something"`,
			change: func(t *testing.T, dir string) {
				forge(t, dir, key, func(i *index) { i.Type = "constellation-something" })
			},
		},
		{
			name: "a format of the future", is: ErrUntrusted, want: "a newer program may support it",
			change: func(t *testing.T, dir string) { forge(t, dir, key, func(i *index) { i.Schema = "2" }) },
		},
		{
			name: "no sequence", is: ErrUntrusted, want: "its sequence is zero",
			change: func(t *testing.T, dir string) { forge(t, dir, key, func(i *index) { i.Sequence = 0 }) },
		},
		{
			name: "a sequence out of reach", is: ErrUntrusted, want: "is out of bounds",
			change: func(t *testing.T, dir string) { forge(t, dir, key, func(i *index) { i.Sequence = 1 << 60 }) },
		},
		{
			name: "no end", is: ErrUntrusted, want: "creation or expiry is missing",
			change: func(t *testing.T, dir string) { forge(t, dir, key, func(i *index) { i.Expires = time.Time{} }) },
		},
		{
			name: "a summary that was altered", is: ErrAltered, want: "its digest differs from the index",
			change: func(t *testing.T, dir string) {
				write(t, dir, "summaries.json", strings.Replace(string(read(t, dir, "summaries.json")), "v1.36.4", "v1.36.9", 1))
			},
		},
		{
			name: "a summary that is too short", is: ErrAltered, want: "bytes, want",
			change: func(t *testing.T, dir string) { write(t, dir, "summaries.json", "{}") },
		},
		{
			name: "a summary that is too long", is: ErrAltered, want: "bytes, more than",
			change: func(t *testing.T, dir string) {
				write(t, dir, "summaries.json", string(read(t, dir, "summaries.json"))+" ")
			},
		},
		{
			name: "a summary that is missing", is: ErrAltered, want: "it is missing",
			change: func(t *testing.T, dir string) { remove(t, dir, "summaries.json") },
		},
		{
			name: "no index", is: ErrAbsent, want: "not found",
			change: func(t *testing.T, dir string) { remove(t, dir, "index.json") },
		},
		{
			name: "an index of ten megabytes", is: ErrAltered, want: "it has 10485760 bytes",
			change: func(t *testing.T, dir string) {
				resign(t, dir, "index.json", key, bytes.Repeat([]byte(" "), 10<<20))
			},
		},
		{
			name: "a file of ten megabytes", is: ErrUntrusted, want: "invalid size of summaries.json: 10485760 bytes",
			change: func(t *testing.T, dir string) {
				substituteIndexOnly(t, dir, key, "summaries.json", entry{strings.Repeat("0", 64), 10 << 20})
			},
		},
		{
			name: "a key that occurs twice", is: ErrUntrusted, want: `the key "sequence" occurs twice`,
			change: func(t *testing.T, dir string) {
				resign(t, dir, "index.json", key, []byte(strings.Replace(string(read(t, dir, "index.json")), `"sequence": `, `"Sequence": 9, "sequence": `, 1)))
			},
		},
		{
			name: "an unknown key", is: ErrUntrusted, want: `unknown field "more"`,
			change: func(t *testing.T, dir string) {
				resign(t, dir, "index.json", key, []byte(strings.Replace(string(read(t, dir, "index.json")), `"sequence": `, `"more": 9, "sequence": `, 1)))
			},
		},
		{
			name: "a second document", is: ErrUntrusted, want: "unexpected data after the document",
			change: func(t *testing.T, dir string) {
				resign(t, dir, "index.json", key, append(read(t, dir, "index.json"), "{}"...))
			},
		},
		{
			name: "deep nesting", is: ErrUntrusted, want: "nested too deeply",
			change: func(t *testing.T, dir string) {
				resign(t, dir, "index.json", key, []byte(strings.Repeat("[", 500_000)))
			},
		},
		{
			name: "a path that climbs", is: ErrUntrusted, want: `"releases/../../../etc/passwd" is not a file of a feed`,
			change: func(t *testing.T, dir string) {
				substituteIndexOnly(t, dir, key, "releases/../../../etc/passwd", entry{strings.Repeat("0", 64), 1})
			},
		},
		{
			name: "a name with control characters", is: ErrUntrusted, want: `"releases/v1.0.0?[2J.yaml" is not a file of a feed`,
			change: func(t *testing.T, dir string) {
				substituteIndexOnly(t, dir, key, "releases/v1.0.0\x1b[2J.yaml", entry{strings.Repeat("0", 64), 1})
			},
		},
		{
			name: "a reason with control characters", want: "faulty is not one line of text",
			change: func(t *testing.T, dir string) {
				substitute(t, dir, "summaries.json", key, []byte(strings.Replace(string(read(t, dir, "summaries.json")), `"version": "v1.0.0",`, `"version": "v1.0.0", "faulty": "\u001b[2Jfine",`, 1)))
			},
		},
		{
			name: "a release of the summaries that has no file", want: "the index does not name releases/v1.2.0.yaml",
			change: func(t *testing.T, dir string) {
				substitute(t, dir, "summaries.json", key, []byte(strings.Replace(string(read(t, dir, "summaries.json")), `"version": "v1.1.0",`, `"version": "v1.2.0",`, 1)))
			},
		},
		{
			name: "a notice with control characters", want: "notices[0]: a notice needs a reason, one line of text",
			change: func(t *testing.T, dir string) {
				all, _, err := parseSummaries(read(t, dir, "summaries.json"))
				if err != nil {
					t.Fatal(err)
				}
				b, err := encodeJSON(summaries{schema, all, []Notice{{Release: version.MustParse("v9.0.0"), Reason: "\x1b[2Jfine"}}})
				if err != nil {
					t.Fatal(err)
				}
				substitute(t, dir, "summaries.json", key, b)
			},
		},
		{name: "a feed that has expired", now: today.Add(DefaultExpiry), is: ErrExpired, want: "it ended on 2026-12-21 12:00 UTC, and this computer's clock says 2026-12-21 12:00 UTC"},
		{name: "a clock a year ahead", now: today.AddDate(1, 0, 0), is: ErrExpired, want: "this computer's clock says 2027-11-21 12:00 UTC"},
		{name: "a clock a year behind", now: today.AddDate(-1, 0, 0), is: ErrFuture, want: "it was made on 2026-11-21 12:00 UTC, and this computer's clock says 2025-11-21 12:00 UTC"},
		{name: "a clock half an hour behind is fine", now: today.Add(-30 * time.Minute)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.now.IsZero() {
				tt.now = today
			}
			dir := feed(t, key)
			o := Options{Keys: []Key{key.Key}, Now: at(tt.now), Cache: t.TempDir()}
			if tt.change != nil {
				tt.change(t, dir)
			}
			for _, location := range []string{dir, serve(t, dir).URL} {
				f, err := Open(t.Context(), location, o)
				if tt.want == "" {
					if err != nil {
						t.Error(err)
					}
					continue
				}
				if err == nil {
					t.Fatalf("%s was believed: %+v", location, f.State())
				}
				if !strings.Contains(err.Error(), tt.want) || tt.is != nil && !errors.Is(err, tt.is) || strings.ContainsRune(err.Error(), 0x1b) {
					t.Errorf("%s: %v, want %q", location, err, tt.want)
				}
				// Nothing of it is stored that would block a good feed.
				if s, err := os.ReadFile(filepath.Join(o.Cache, "seen.json")); err == nil {
					t.Errorf("%s was remembered: %s", location, s)
				}
			}
			// With an earlier good copy, that is used and marked as stale.
			o.Cache = t.TempDir()
			o.Now = at(today)
			from, again := sources(t), filepath.Join(t.TempDir(), "feed")
			publish(t, BuildOptions{From: from, Out: again, Key: key})
			if _, err := Open(t.Context(), again, o); err != nil {
				t.Fatal(err)
			}
			if tt.change == nil {
				o.Now = at(tt.now)
			} else {
				write(t, from, "notices.yaml", "schema: \"1\"\nfaulty:\n- {kubernetes: v1.35.0, reason: loses volumes}\n")
				publish(t, BuildOptions{From: from, Out: again, Key: key})
				tt.change(t, again)
			}
			f, err := Open(t.Context(), again, o)
			if err != nil {
				t.Fatal(err)
			}
			got, err := f.Summaries(t.Context())
			if s := f.State(); s.Stale != (tt.want != "") || !strings.Contains(s.Problem, tt.want) || tt.want != "" && s.Fetched != today || err != nil || !slices.Equal(names(got), []string{"v1.0.0", "v1.1.0"}) {
				t.Errorf("state %+v, releases %v, %v", s, names(got), err)
			}
		})
	}
}

func remove(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

func substituteIndexOnly(t *testing.T, dir string, key *PrivateKey, name string, e entry) {
	t.Helper()
	forge(t, dir, key, func(i *index) { i.Files[name] = e })
}

func TestServersThatMisbehaveAreRefused(t *testing.T) {
	key := newTestKey(t, "tests")
	dir := feed(t, key)
	elsewhere := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer elsewhere.Close()
	redirect := func(to string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Location", to+r.URL.Path)
			w.WriteHeader(http.StatusFound)
			return true
		}
	}
	for _, tt := range []struct {
		name   string
		answer func(http.ResponseWriter, *http.Request) bool
		is     error
		want   string
	}{
		{name: "a redirect to http", answer: redirect(elsewhere.URL), is: ErrRedirect, want: "but only https is allowed"},
		{name: "a redirect to a file", answer: redirect("file://" + dir), is: ErrRedirect, want: "but only https is allowed"},
		{name: "a redirect with control characters", answer: redirect("http://\x1b[2J"), want: "Location"},
		{name: "an error", answer: func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(http.StatusTeapot)
			return true
		}, is: ErrUnreachable, want: "418"},
		{name: "a body without end", answer: func(w http.ResponseWriter, r *http.Request) bool {
			for chunk := bytes.Repeat([]byte(" "), 64<<10); r.Context().Err() == nil; {
				if _, err := w.Write(chunk); err != nil {
					break
				}
			}
			return true
		}, is: ErrAltered, want: "more than 1048576 bytes"},
		{name: "a length that is too long", answer: func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Length", "99999999")
			w.WriteHeader(http.StatusOK)
			return true
		}, is: ErrAltered, want: "it has 99999999 bytes"},
		{name: "a body that ends early", answer: func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Length", "1000")
			_, _ = w.Write([]byte("{"))
			return true
		}, is: ErrUnreachable, want: "unexpected EOF"},
		{name: "a connection that is cut", answer: func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) }, is: ErrUnreachable, want: "EOF"},
		{name: "not modified, although nothing was asked", answer: func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(http.StatusNotModified)
			return true
		}, is: ErrUnreachable, want: "304"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := serve(t, dir)
			server.answer(tt.answer)
			_, err := Open(t.Context(), server.URL, Options{Keys: []Key{key.Key}, Now: at(today), Cache: t.TempDir()})
			if err == nil || tt.is != nil && !errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.want) || strings.ContainsRune(err.Error(), 0x1b) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestRedirectsToHTTPSAreFollowed(t *testing.T) {
	key := newTestKey(t, "tests")
	dir := feed(t, key)
	secure := httptest.NewTLSServer(http.FileServer(http.Dir(dir)))
	defer secure.Close()
	server := serve(t, dir)
	server.answer(func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, secure.URL+r.URL.Path, http.StatusFound)
		return true
	})
	o := Options{Keys: []Key{key.Key}, Now: at(today), Client: secure.Client()}
	if _, err := Open(t.Context(), server.URL, o); err != nil {
		t.Error(err)
	}
	if o.Client.CheckRedirect != nil || o.Client.Timeout != 0 {
		t.Error("the caller's client was changed")
	}
}

func TestLocations(t *testing.T) {
	key := newTestKey(t, "tests")
	for location, want := range map[string]string{
		"http://releases.example/v1":            "plain http is for this computer only",
		"http://10.0.0.1/v1":                    "plain http is for this computer only",
		"ftp://releases.example":                `"ftp://" is not a supported address`,
		"file:///etc":                           `"file://" is not a supported address`,
		"https://me:secret@releases.example":    "an address with credentials",
		"https://releases.example/?a=b":         "it has no path",
		"https:///v1":                           "it has no path",
		"https://releases.example/\x1b[2J":      "is not a supported address",
		filepath.Join(t.TempDir(), "not-there"): "cannot be reached",
	} {
		_, err := Open(t.Context(), location, Options{Keys: []Key{key.Key}})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") || strings.ContainsRune(err.Error(), 0x1b) {
			t.Errorf("%q: %v, want %q", location, err, want)
		}
	}
	if _, err := Open(t.Context(), t.TempDir(), Options{}); !errors.Is(err, ErrNoKeys) {
		t.Errorf("no keys: %v", err)
	}
}

func TestReadsStayInDirectory(t *testing.T) {
	key := newTestKey(t, "tests")
	dir := feed(t, key)
	secret := filepath.Join(t.TempDir(), "secret")
	write(t, filepath.Dir(secret), "secret", "{}")
	remove(t, dir, "summaries.json")
	if err := os.Symlink(secret, filepath.Join(dir, "summaries.json")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), dir, Options{Keys: []Key{key.Key}, Now: at(today)}); err == nil || !strings.Contains(err.Error(), "escapes") {
		t.Errorf("a link that leads out: %v", err)
	}
	remove(t, dir, "summaries.json")
	if err := syscall.Mkfifo(filepath.Join(dir, "summaries.json"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), dir, Options{Keys: []Key{key.Key}, Now: at(today)}); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a pipe: %v", err)
	}
}

func TestOlderThanLastSeenIsRefused(t *testing.T) {
	key := newTestKey(t, "tests")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: from, Out: dir, Key: key})
	first := t.TempDir()
	if err := os.CopyFS(filepath.Join(first, "feed"), os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	publish(t, BuildOptions{From: from, Out: dir, Key: key})
	for _, overHTTP := range []bool{false, true} {
		location, o := dir, Options{Keys: []Key{key.Key}, Now: at(today), Cache: t.TempDir()}
		if overHTTP {
			location = serve(t, dir).URL
		}
		f, err := Open(t.Context(), location, o)
		if err != nil || f.State().Sequence != 2 || f.State().Stale {
			t.Fatal(f, err)
		}
		second := filepath.Join(t.TempDir(), "second")
		if err := os.Rename(dir, second); err != nil {
			t.Fatal(err)
		}
		if err := os.CopyFS(dir, os.DirFS(filepath.Join(first, "feed"))); err != nil {
			t.Fatal(err)
		}
		f, err = Open(t.Context(), location, o)
		if err != nil {
			t.Fatal(err)
		}
		if s := f.State(); s.Sequence != 2 || !s.Stale || !errors.Is(s.Err, ErrRollback) || !strings.Contains(s.Problem, "it is publication 1, but 2 was seen") {
			t.Errorf("replayed: %+v", s)
		}
		// Two publications with one number mean an equivocating publisher.
		forge(t, dir, key, func(i *index) { i.Sequence, i.Created = 2, i.Created.Add(time.Second) })
		if f, err = Open(t.Context(), location, o); err != nil || !f.State().Stale || !strings.Contains(f.State().Problem, "two publications with the number 2") {
			t.Errorf("told twice: %+v, %v", f.State(), err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(second, dir); err != nil {
			t.Fatal(err)
		}
		if f, err = Open(t.Context(), location, o); err != nil || f.State().Stale {
			t.Errorf("the right one again: %+v, %v", f.State(), err)
		}
	}
}

func TestPublicationsDoNotMix(t *testing.T) {
	key := newTestKey(t, "tests")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: from, Out: dir, Key: key})
	old, oldSig := read(t, dir, "summaries.json"), read(t, dir, "summaries.json.sig")
	write(t, from, "notices.yaml", "schema: \"1\"\nfaulty:\n- {kubernetes: v1.36.4, reason: loses volumes}\n")
	publish(t, BuildOptions{From: from, Out: dir, Key: key})
	write(t, dir, "summaries.json", string(old))
	write(t, dir, "summaries.json.sig", string(oldSig))
	if _, err := Open(t.Context(), dir, Options{Keys: []Key{key.Key}, Now: at(today)}); !errors.Is(err, ErrAltered) {
		t.Errorf("summaries of the publication before: %v", err)
	}
	// One signed file in place of another.
	again := feed(t, key)
	write(t, again, "releases/v1.1.0.yaml", string(read(t, again, "releases/v1.0.0.yaml")))
	write(t, again, "releases/v1.1.0.yaml.sig", string(read(t, again, "releases/v1.0.0.yaml.sig")))
	f, err := Open(t.Context(), again, Options{Keys: []Key{key.Key}, Now: at(today)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Release(t.Context(), version.MustParse("v1.1.0")); !errors.Is(err, ErrAltered) {
		t.Errorf("a release in the place of another: %v", err)
	}
	// A publisher's mistake: everything is signed, but the file is of another release.
	substitute(t, again, "releases/v1.1.0.yaml", key, read(t, again, "releases/v1.0.0.yaml"))
	substitute(t, again, "releases/v1.1.0/measurements/cloudy.json", key, []byte(measured("v1.0.0", "cloudy")))
	if f, err = Open(t.Context(), again, Options{Keys: []Key{key.Key}, Now: at(today)}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Release(t.Context(), version.MustParse("v1.1.0")); err == nil || !strings.Contains(err.Error(), "it contains release v1.0.0") {
		t.Errorf("a release under another name: %v", err)
	}
	if _, err := f.Measurements(t.Context(), version.MustParse("v1.1.0"), "cloudy"); err == nil || !strings.Contains(err.Error(), `content is of image "v1.0.0"`) {
		t.Errorf("measurements under another name: %v", err)
	}
}

func TestLastGoodCopyWithoutSource(t *testing.T) {
	key := newTestKey(t, "tests")
	dir := feed(t, key)
	server := serve(t, dir)
	base := filepath.Join(t.TempDir(), "cache")
	o := Options{Keys: []Key{key.Key}, Now: at(today), Cache: base}
	f, err := Open(t.Context(), server.URL, o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Release(t.Context(), version.MustParse("v1.1.0")); err != nil {
		t.Fatal(err)
	}
	server.Close()
	o.Now = at(today.AddDate(0, 3, 0)) // long after its expiry
	if f, err = Open(t.Context(), server.URL, o); err != nil {
		t.Fatal(err)
	}
	s := f.State()
	if !s.Stale || !errors.Is(s.Err, ErrUnreachable) || s.Fetched != today || s.Sequence != 1 || s.Signer != key.String() {
		t.Errorf("state %+v", s)
	}
	if _, err := f.Release(t.Context(), version.MustParse("v1.1.0")); err != nil {
		t.Error(err)
	}
	if _, err := f.Release(t.Context(), version.MustParse("v1.0.0")); !errors.Is(err, ErrUnreachable) {
		t.Errorf("a release that was never read: %v", err)
	}
	// Other keys make it another feed with an empty cache.
	other := newTestKey(t, "other")
	if _, err := Open(t.Context(), server.URL, Options{Keys: []Key{other.Key}, Now: at(today), Cache: base}); !errors.Is(err, ErrUnreachable) {
		t.Errorf("other keys: %v", err)
	}
	// A modified copy is detected.
	err = filepath.WalkDir(base, func(at string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s is open to others: %s", at, info.Mode())
		}
		if filepath.Base(at) != "good.json" {
			return nil
		}
		b, err := os.ReadFile(at)
		if err != nil {
			return err
		}
		return os.WriteFile(at, bytes.Replace(b, []byte("v1.1.0.yaml"), []byte("v1.9.0.yaml"), 1), 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
	if f, err := Open(t.Context(), server.URL, o); err == nil {
		t.Errorf("a changed copy was used: %+v", f.State())
	}
}

func TestDamagedReplayProtectionIsAnError(t *testing.T) {
	key := newTestKey(t, "tests")
	dir, base := feed(t, key), t.TempDir()
	o := Options{Keys: []Key{key.Key}, Now: at(today), Cache: base}
	if _, err := Open(t.Context(), dir, o); err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(filepath.Join(base, "*", "seen.json"))
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	if err := os.WriteFile(found[0], []byte(`{"schema":"1","sequ`), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := Open(t.Context(), dir, o)
	if err != nil || !f.State().Stale || !strings.Contains(f.State().Problem, "remove that file to reset it") {
		t.Errorf("a torn record: %v, %v", f, err)
	}
	if err := os.Remove(found[0]); err != nil {
		t.Fatal(err)
	}
	if f, err := Open(t.Context(), dir, o); err != nil || f.State().Stale {
		t.Errorf("after the reset: %v, %v", f, err)
	}
}

func TestCanceledOpenReturnsNoOldCopy(t *testing.T) {
	key := newTestKey(t, "tests")
	dir := feed(t, key)
	server := serve(t, dir)
	o := Options{Keys: []Key{key.Key}, Now: at(today), Cache: t.TempDir()}
	if _, err := Open(t.Context(), server.URL, o); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan struct{})
	server.answer(func(_ http.ResponseWriter, r *http.Request) bool {
		close(waiting)
		<-r.Context().Done()
		return true
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-waiting; cancel() }()
	if _, err := Open(ctx, server.URL, o); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestKeysCanBeRotated(t *testing.T) {
	first, second, third := newTestKey(t, "first"), newTestKey(t, "second"), newTestKey(t, "third")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	old := Options{Keys: []Key{first.Key}, Now: at(today), Cache: t.TempDir()}    // updates regularly
	absent := Options{Keys: []Key{first.Key}, Now: at(today), Cache: t.TempDir()} // returns at the end
	open := func(o Options) State {
		t.Helper()
		f, err := Open(t.Context(), dir, o)
		if err != nil {
			t.Fatal(err)
		}
		return f.State()
	}
	publish(t, BuildOptions{From: from, Out: dir, Key: first})
	if s := open(old); s.Signer != first.String() {
		t.Errorf("signed by %s", s.Signer)
	}
	open(absent)
	if _, err := Build(t.Context(), BuildOptions{From: from, Out: dir, Key: second, Now: at(today)}); err == nil || !strings.Contains(err.Error(), "cannot continue") {
		t.Errorf("an untrusted key publishes: %v", err)
	}
	if _, err := Build(t.Context(), BuildOptions{From: from, Out: dir, Key: first, Trust: []Key{second.Key}, Now: at(today)}); err == nil || !strings.Contains(err.Error(), "would not be trusted") {
		t.Errorf("a key retires itself: %v", err)
	}
	r := publish(t, BuildOptions{From: from, Out: dir, Key: first, Trust: []Key{first.Key, second.Key}})
	if r.KeySet != 1 || !slices.Equal(r.Keys, []string{first.String(), second.String()}) {
		t.Errorf("key set %d: %v", r.KeySet, r.Keys)
	}
	open(old)
	publish(t, BuildOptions{From: from, Out: dir, Key: second})
	if s := open(old); s.Stale || s.Signer != second.String() {
		t.Errorf("signed by the second key: %+v", s)
	}
	both := t.TempDir()
	if err := os.CopyFS(filepath.Join(both, "feed"), os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	r = publish(t, BuildOptions{From: from, Out: dir, Key: second, Trust: []Key{second.Key, third.Key}}) // the first is revoked
	if r.KeySet != 2 {
		t.Errorf("key set %d", r.KeySet)
	}
	publish(t, BuildOptions{From: from, Out: dir, Key: third})
	for name, o := range map[string]Options{
		"a client that updates regularly": old, "a client that returns late": absent,
		"a client with the first key":         {Keys: []Key{first.Key}, Now: at(today)},
		"a client with the second key":        {Keys: []Key{second.Key}, Now: at(today)},
		"a client with the third key":         {Keys: []Key{third.Key}, Now: at(today)},
		"a client with an unrelated key also": {Keys: []Key{newTestKey(t, "x").Key, first.Key}, Now: at(today)},
	} {
		if s := open(o); s.Stale || s.Signer != third.String() || s.Sequence != 5 {
			t.Errorf("%s: %+v", name, s)
		}
	}
	if _, err := Open(t.Context(), dir, Options{Keys: []Key{newTestKey(t, "x").Key}, Now: at(today)}); !errors.Is(err, ErrUntrusted) || !strings.Contains(err.Error(), "no trusted key leads to its key set 2") {
		t.Errorf("a stranger's key: %v", err)
	}

	// The revoked key cannot deceive clients that have seen the revocation.
	forge(t, dir, first, func(i *index) { i.Sequence = 99 })
	if s := open(old); !s.Stale || !errors.Is(s.Err, ErrUntrusted) || s.Sequence != 5 {
		t.Errorf("signed by the revoked key: %+v", s)
	}
	set := signSet(t, first, keySet{Schema: schema, Type: keySetType, Sequence: 9, Created: today, Expires: today.AddDate(1, 0, 0), Keys: []setKey{{"first", string(first.PEM())}}})
	forge(t, dir, first, func(i *index) { i.Sequence, i.Keys = 99, append(i.Keys, set) })
	if s := open(old); !s.Stale || !strings.Contains(s.Problem, "no trusted key leads to its key set 9") {
		t.Errorf("a key set of the revoked key: %+v", s)
	}
	forge(t, dir, first, func(i *index) { i.Sequence, i.Keys = 99, nil })
	if s := open(old); !s.Stale || !strings.Contains(s.Problem, "key set 2 was seen before") {
		t.Errorf("the key sets are left out: %+v", s)
	}
	// An old feed does not restore the old keys either.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(both, "feed"))); err != nil {
		t.Fatal(err)
	}
	if s := open(old); !s.Stale || !strings.Contains(s.Problem, "key set 2 was seen before") || s.Sequence != 5 {
		t.Errorf("the feed of before: %+v", s)
	}
}

func signSet(t *testing.T, key *PrivateKey, s keySet) signedKeySet {
	t.Helper()
	b, err := encodeJSON(s)
	if err != nil {
		t.Fatal(err)
	}
	sig, err := key.sign(b)
	if err != nil {
		t.Fatal(err)
	}
	return signedKeySet{Set: string(b), Signatures: []string{string(sig)}}
}

func TestKeySetsExpireAndAreRenewed(t *testing.T) {
	key, next := newTestKey(t, "tests"), newTestKey(t, "next")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	month := 30 * 24 * time.Hour
	publish(t, BuildOptions{From: from, Out: dir, Key: key, Trust: []Key{key.Key, next.Key}, KeysExpire: month, Expires: 2 * month})
	_, err := Open(t.Context(), dir, Options{Keys: []Key{key.Key}, Now: at(today.Add(month))})
	if !errors.Is(err, ErrExpired) || !strings.Contains(err.Error(), "its key set ended on") {
		t.Errorf("after the end of the key set: %v", err)
	}
	if r := publish(t, BuildOptions{From: from, Out: dir, Key: key, KeysExpire: month, Now: at(today.Add(month / 4))}); r.KeySet != 1 {
		t.Errorf("renewed too early: %d", r.KeySet)
	}
	if r := publish(t, BuildOptions{From: from, Out: dir, Key: key, KeysExpire: month, Now: at(today.Add(month * 3 / 4))}); r.KeySet != 2 || len(r.Keys) != 2 {
		t.Errorf("not renewed: %d", r.KeySet)
	}
	if _, err := Open(t.Context(), dir, Options{Keys: []Key{key.Key}, Now: at(today.Add(month))}); err != nil {
		t.Error(err)
	}
}

func TestJoinFeedWithProgram(t *testing.T) {
	key := newTestKey(t, "tests")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	newer := strings.NewReplacer("v1.1.0", "v1.2.0", "upgradeFrom: v1.0.0", "upgradeFrom: v1.1.0").Replace(string(read(t, from, "v1.1.0.yaml")))
	write(t, from, "v1.2.0.yaml", newer)
	write(t, from, "notices.yaml", "schema: \"1\"\nfaulty:\n- {release: v1.0.0, reason: forgets its keys}\n- {kubernetes: v1.36.4, reason: loses volumes}\n")
	publish(t, BuildOptions{From: from, Out: dir, Key: key})
	embedded, err := Embedded(os.DirFS("../../assets/releases"))
	if err != nil {
		t.Fatal(err)
	}
	f, err := Open(t.Context(), dir, Options{Keys: []Key{key.Key}, Now: at(today)})
	if err != nil {
		t.Fatal(err)
	}
	all, err := Join(embedded, f)
	if err != nil {
		t.Fatal(err)
	}
	got, err := all.Summaries(t.Context())
	if err != nil || !slices.Equal(names(got), []string{"v1.0.0", "v1.1.0", "v1.2.0"}) {
		t.Fatal(names(got), err)
	}
	if got[0].Faulty != "forgets its keys" || got[1].Faulty != "" || len(got[1].CLI) != 1 {
		t.Errorf("summaries %+v", got[:2])
	}
	for _, v := range []string{"v1.1.0", "v1.2.0"} {
		r, err := all.Release(t.Context(), version.MustParse(v))
		if err != nil {
			t.Fatal(err)
		}
		if k, err := r.ForKubernetes(version.MustParse("v1.36.4")); err != nil || k.Faulty != "loses volumes" {
			t.Errorf("%s: Kubernetes %s is faulty: %q, %v", v, k.Version, k.Faulty, err)
		}
	}
	// It does not change the program's content.
	if own, err := embedded.Release(t.Context(), version.MustParse("v1.1.0")); err != nil || own.Kubernetes[len(own.Kubernetes)-1].Faulty != "" {
		t.Errorf("embedded: %v", err)
	}
	if own, _ := embedded.Summaries(t.Context()); own[0].Faulty != "" || own[1].Kubernetes[len(own[1].Kubernetes)-1].Faulty != "" {
		t.Error("the program's own summaries were changed")
	}
	if _, err := all.Measurements(t.Context(), version.MustParse("v1.1.0"), "cloudy"); err != nil {
		t.Error(err)
	}
	if all.State() != f.State() {
		t.Errorf("state %+v", all.State())
	}
	if _, err := all.Release(t.Context(), version.MustParse("v3.0.0")); !errors.Is(err, ErrNotOffered) || !strings.Contains(err.Error(), "v1.0.0, v1.1.0, v1.2.0") {
		t.Errorf("unknown: %v", err)
	}

	// The same version with other content.
	other := sources(t)
	write(t, other, "v1.1.0.yaml", strings.ReplaceAll(string(read(t, other, "v1.1.0.yaml")), "registry.constellation.example", "registry.example"))
	dir2 := filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: other, Out: dir2, Key: key})
	if f, err = Open(t.Context(), dir2, Options{Keys: []Key{key.Key}, Now: at(today)}); err != nil {
		t.Fatal(err)
	}
	if _, err := Join(embedded, f); !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "release v1.1.0 of ") {
		t.Errorf("another v1.1.0: %v", err)
	}

	why := errors.New("the moon is full")
	alone := Fallback(embedded, why)
	if got, err := alone.Summaries(t.Context()); err != nil || !slices.Equal(names(got), []string{"v1.0.0", "v1.1.0"}) {
		t.Errorf("fallback: %v, %v", names(got), err)
	}
	if s := alone.State(); !s.Stale || s.Source != "embedded" || s.Problem != why.Error() {
		t.Errorf("fallback: %+v", s)
	}
	if _, err := alone.Measurements(t.Context(), version.MustParse("v1.1.0"), "cloudy"); !errors.Is(err, ErrNotOffered) {
		t.Errorf("fallback: %v", err)
	}
	if r, err := alone.Release(t.Context(), version.MustParse("v1.1.0")); err != nil || r.Version.String() != "v1.1.0" {
		t.Errorf("fallback: %v", err)
	}
}

func TestNoticesAboutReleasesMissingInFeed(t *testing.T) {
	key := newTestKey(t, "tests")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	remove(t, from, "v1.0.0.yaml")
	write(t, from, "notices.yaml", `faulty:
- {release: v1.0.0, reason: forgets its keys}
- {release: v1.0.0, kubernetes: v1.34.2, reason: does not start}
- {kubernetes: v1.34.3, reason: loses volumes}
- {kubernetes: v1.35.4, reason: leaks}
- {release: v9.0.0, reason: from elsewhere}
`)
	r := publish(t, BuildOptions{From: from, Out: dir, Key: key})
	var elsewhere []string
	for _, n := range r.Elsewhere {
		elsewhere = append(elsewhere, n.String())
	}
	if want := []string{"v1.0.0", "Kubernetes v1.34.2 of v1.0.0", "Kubernetes v1.34.3", "v9.0.0"}; !slices.Equal(elsewhere, want) {
		t.Errorf("notices about unknown releases: %q, want %q", elsewhere, want)
	}
	embedded, err := Embedded(os.DirFS("../../assets/releases"))
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Keys: []Key{key.Key}, Now: at(today), Cache: t.TempDir()}
	for _, where := range []string{"the feed", "the last good copy"} {
		f, err := Open(t.Context(), dir, o)
		if err != nil {
			t.Fatal(err)
		}
		all, err := Join(embedded, f)
		if err != nil {
			t.Fatal(err)
		}
		got, err := all.Summaries(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var faulty []string
		for _, s := range got {
			faulty = append(faulty, s.Version.String()+": "+s.Faulty)
			for _, k := range s.Kubernetes {
				if k.Faulty != "" {
					faulty = append(faulty, s.Version.String()+" "+k.Version.String()+": "+k.Faulty)
				}
			}
		}
		want := []string{"v1.0.0: forgets its keys", "v1.0.0 v1.34.2: does not start", "v1.0.0 v1.34.3: loses volumes", "v1.0.0 v1.35.4: leaks", "v1.1.0: ", "v1.1.0 v1.35.4: leaks"}
		if !slices.Equal(faulty, want) {
			t.Errorf("%s: %q, want %q", where, faulty, want)
		}
		if r, err := all.Release(t.Context(), version.MustParse("v1.0.0")); err != nil || r.Faulty != "forgets its keys" {
			t.Errorf("%s: %v", where, err)
		}
		if where == "the feed" {
			remove(t, dir, "index.json")
		}
	}
	if own, _ := embedded.Summaries(t.Context()); own[0].Faulty != "" || slices.ContainsFunc(own[0].Kubernetes, func(k KubernetesSummary) bool { return k.Faulty != "" }) {
		t.Error("the program's own summaries were changed")
	}
}

func TestFeedIsConcurrencySafe(t *testing.T) {
	key := newTestKey(t, "tests")
	server := serve(t, feed(t, key))
	cache := t.TempDir()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			f, err := Open(t.Context(), server.URL, Options{Keys: []Key{key.Key}, Now: at(today), Cache: cache})
			if err != nil {
				t.Error(err)
				return
			}
			if f.State().Stale {
				t.Error(f.State().Problem)
			}
			for range 2 {
				wg.Go(func() {
					if _, err := f.Release(t.Context(), version.MustParse("v1.1.0")); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
	wg.Wait()
}

func FuzzIndex(f *testing.F) {
	if b, err := os.ReadFile("../../assets/releases/index.json"); err == nil {
		f.Add(b)
	}
	f.Add([]byte(`{"schema":"1","type":"constellation-release-index","keys":[{"set":"{}","signatures":[""]}],"files":{"summaries.json":{"sha256":"","length":1}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		i, err := parseIndex(b)
		if err != nil {
			if strings.ContainsFunc(err.Error(), func(r rune) bool { return r < ' ' || r == 0x7f }) {
				t.Errorf("%q", err)
			}
			return
		}
		for name := range i.Files {
			if !filepath.IsLocal(name) || badText(name) {
				t.Errorf("name %q", name)
			}
		}
		again, err := encodeJSON(i)
		if err != nil {
			t.Fatal(err)
		}
		if j, err := parseIndex(again); err != nil || !reflect.DeepEqual(i, j) {
			t.Errorf("read again: %v", err)
		}
	})
}

func FuzzSummaries(f *testing.F) {
	if b, err := os.ReadFile("../../assets/releases/summaries.json"); err == nil {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		all, _, err := parseSummaries(b)
		if err != nil {
			return
		}
		for _, s := range all {
			if s.Version.IsZero() || !validName(releaseName(s.Version)) || badText(s.Faulty) || len(s.Kubernetes) == 0 {
				t.Errorf("%+v", s)
			}
		}
	})
}

func FuzzRelease(f *testing.F) {
	if b, err := os.ReadFile("../../assets/releases/releases/v1.1.0.yaml"); err == nil {
		f.Add(b)
	}
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Parse(b)
		if err != nil {
			return
		}
		for _, k := range r.Kubernetes {
			for _, arch := range architectures {
				if l, err := r.Components(k.Version, arch); errors.Is(err, ErrUnpinned) != (k.Unpinned != "") || k.Unpinned == "" && (err != nil || len(l) != 5) {
					t.Errorf("%s %s: %v", k.Version, arch, err)
				}
			}
		}
		if b, err := json.Marshal(summaries{Schema: schema, Releases: []Summary{r.Summary()}}); err != nil {
			t.Error(err)
		} else if _, _, err := parseSummaries(b); err != nil {
			t.Errorf("its summary cannot be read: %v\n%s", err, b)
		}
	})
}

func BenchmarkEmbedded(b *testing.B) {
	dir := os.DirFS("../../assets/releases")
	for b.Loop() {
		if _, err := Embedded(dir); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkOffline opens the last good copy of a feed whose server is down.
func BenchmarkOffline(b *testing.B) {
	key := newTestKey(b, "tests")
	server := serve(b, feed(b, key))
	o := Options{Keys: []Key{key.Key}, Now: at(today), Cache: b.TempDir()}
	if _, err := Open(b.Context(), server.URL, o); err != nil {
		b.Fatal(err)
	}
	server.Close()
	for b.Loop() {
		if f, err := Open(b.Context(), server.URL, o); err != nil || !f.State().Stale {
			b.Fatal(f, err)
		}
	}
}

// BenchmarkUnchanged polls a local server without changes.
func BenchmarkUnchanged(b *testing.B) {
	key := newTestKey(b, "tests")
	server := serve(b, feed(b, key))
	o := Options{Keys: []Key{key.Key}, Now: at(today), Cache: b.TempDir()}
	for b.Loop() {
		if f, err := Open(b.Context(), server.URL, o); err != nil || f.State().Stale {
			b.Fatal(f, err)
		}
	}
}
