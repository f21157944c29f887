package mirror

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"constellation/engine/chart"
	"constellation/engine/release"
	"constellation/internal/ocipack"
)

func init() { pause = time.Millisecond }

// testRelease is a release in a folder, and its key.
type testRelease struct {
	dir      string
	keys     []release.Key
	contents *Contents
	// big is the digest of the largest blob, and its size.
	big  v1.Hash
	size int64
}

// bigLayer is the size of the largest blob: more than what a network buffers.
const bigLayer = 3 << 20

// newRelease writes a release: an image for two architectures with an SBOM and a tag of a
// signature, a chart and a file.
func newRelease(t *testing.T) *testRelease {
	t.Helper()
	r := &testRelease{dir: t.TempDir()}
	r.contents = &Contents{Schema: schema, Release: "v1.1.0"}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	add := func(repository, layout string, d v1.Descriptor, tag string, l *ocipack.Layout) {
		l.Add(d, tag)
		r.contents.Artifacts = append(r.contents.Artifacts, Artifact{repository, layout, tag, d.MediaType, d.Digest, d.Size})
	}
	l, err := ocipack.NewLayout(filepath.Join(r.dir, "images/operator"))
	must(err)
	random := rand.New(rand.NewPCG(1, 2))
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	for _, arch := range []string{"amd64", "arm64"} {
		content := make([]byte, bigLayer)
		for i := range content {
			content[i] = byte(random.Uint32())
		}
		layer, err := ocipack.NewLayer(time.Unix(0, 0), []ocipack.File{{Path: "/operator", Content: string(content), Mode: 0o755}})
		must(err)
		img, err := ocipack.NewImage(ocipack.Config{Architecture: arch}, layer)
		must(err)
		d, err := l.Image(img)
		must(err)
		index.Manifests = append(index.Manifests, d)
		r.big, err = layer.Digest()
		must(err)
		r.size, err = layer.Size()
		must(err)
	}
	d, err := l.JSON(types.OCIImageIndex, index)
	must(err)
	add("operator", "images/operator", d, "v1.1.0", l)
	blob, err := l.Blob("application/spdx+json", []byte(`{"spdxVersion":"SPDX-2.3"}`))
	must(err)
	sbom, err := l.Artifact("application/spdx+json", &index.Manifests[0], blob)
	must(err)
	add("operator", "images/operator", sbom, "", l)
	must(l.Close())

	l, err = ocipack.NewLayout(filepath.Join(r.dir, "constellation-plans-1.1.0.oci"))
	must(err)
	blob, err = l.Blob("application/vnd.cncf.helm.chart.content.v1.tar+gzip", []byte("a chart"))
	must(err)
	d, err = l.Artifact("application/vnd.cncf.helm.config.v1+json", nil, blob)
	must(err)
	add("charts/constellation-plans", "constellation-plans-1.1.0.oci", d, "1.1.0", l)
	must(l.Close())

	file := []byte("a package")
	must(os.WriteFile(filepath.Join(r.dir, "constellation.deb"), file, 0o644))
	r.contents.Files = []File{{"constellation.deb", digestOf(file), int64(len(file))}}
	b, err := json.Marshal(r.contents)
	must(err)
	key, err := release.NewPrivateKey("release")
	must(err)
	sig, err := key.SignFile(b)
	must(err)
	must(os.WriteFile(filepath.Join(r.dir, "constellation_1.1.0_contents.json"), b, 0o644))
	must(os.WriteFile(filepath.Join(r.dir, "constellation_1.1.0_contents.json.sig"), sig, 0o644))
	r.keys = []release.Key{key.Key}
	return r
}

// files returns the content of all files below dir.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		rel, _ := filepath.Rel(dir, p)
		out[filepath.ToSlash(rel)] = digestOf(b).Hex
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// faulty is a registry with faults.
type faulty struct {
	*httptest.Server
	mu sync.Mutex
	// fault answers instead of the registry if it returns true. n is the number of the request with
	// the same method and path, from 1 on.
	fault  func(w http.ResponseWriter, r *http.Request, n int) bool
	seen   map[string]int
	ranges []string
	real   http.Handler
}

func newFaulty(t *testing.T) *faulty {
	t.Helper()
	f := &faulty{seen: map[string]int{}, real: ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

func (f *faulty) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	key := r.Method + " " + r.URL.Path
	if before, _, ok := strings.Cut(key, "/uploads/"); ok { // each upload has a path of its own
		key = before + "/uploads/"
	}
	f.seen[key]++
	n, fault := f.seen[key], f.fault
	if v := r.Header.Get("Range"); v != "" {
		f.ranges = append(f.ranges, v)
	}
	f.mu.Unlock()
	if fault == nil || !fault(w, r, n) {
		f.real.ServeHTTP(w, r)
	}
}

// breaks sets the fault and forgets the requests.
func (f *faulty) breaks(fault func(w http.ResponseWriter, r *http.Request, n int) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fault, f.seen, f.ranges = fault, map[string]int{}, nil
}

func (f *faulty) count(method, path string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for key, times := range f.seen {
		if m, p, _ := strings.Cut(key, " "); m == method && strings.Contains(p, path) {
			n += times
		}
	}
	return n
}

func (f *faulty) base() string { return Scheme + strings.TrimPrefix(f.URL, "http://") + "/mirror" }

func (r *testRelease) copy(t *testing.T, from, to string) (Report, error) {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	return Copy(t.Context(), Options{From: from, To: to, Release: "v1.1.0", Keys: r.keys, Stage: filepath.Join(r.dir, "../stage")})
}

// A release goes from folder to folder, to a registry and back, and stays the same.
func TestMirrorKeepsEverything(t *testing.T) {
	r := newRelease(t)
	want := files(t, r.dir)
	first, last := t.TempDir(), t.TempDir()
	reg, other := newFaulty(t), newFaulty(t)
	feed := map[string][]byte{"index.json": []byte("i"), "index.json.sig": []byte("s"), "releases/v1.1.0.yaml": []byte("r")}
	for _, step := range []struct{ from, to string }{{r.dir, first}, {first, reg.base()}, {reg.base(), other.base()}, {other.base(), last}} {
		var parts []string
		report, err := Copy(t.Context(), Options{
			From: step.from, To: step.to, Release: "v1.1.0", Keys: r.keys, Stage: t.TempDir(), Feed: feed,
			Progress: func(p Progress) {
				if p.Part != "" {
					parts = append(parts, fmt.Sprintf("%d/%d %s", p.Parts, p.Total, p.Part))
				}
			},
		})
		if err != nil {
			t.Fatalf("%s to %s: %v", step.from, step.to, err)
		}
		if report.Artifacts != 3 || report.Files != 1 || report.FeedFiles != 3 || report.Bytes < 2*bigLayer || !strings.HasPrefix(report.Signer, "release") {
			t.Errorf("%s to %s: report %+v", step.from, step.to, report)
		}
		if len(parts) != 5 || parts[0] != "1/5 operator:v1.1.0" || parts[4] != "5/5 files" {
			t.Errorf("%s to %s: progress %q", step.from, step.to, parts)
		}
	}
	for _, dir := range []string{first, last} {
		got := files(t, dir)
		for name := range feed {
			if got["feed/"+name] != digestOf(feed[name]).Hex {
				t.Errorf("%s: feed/%s differs", dir, name)
			}
			delete(got, "feed/"+name)
		}
		for name := range want { // the index of a layout has no platform and may have another order
			if strings.HasSuffix(name, "/index.json") {
				delete(got, name)
				continue
			}
			if got[name] != want[name] {
				t.Errorf("%s: %s differs or is missing", dir, name)
			}
			delete(got, name)
		}
		if len(got) > 0 {
			t.Errorf("%s has other files: %v", dir, got)
		}
	}
	// Again, nothing is transferred.
	reg.breaks(nil)
	report, err := r.copy(t, first, reg.base())
	if err != nil || report.Bytes != 0 || reg.count(http.MethodPost, "/blobs/uploads/") != 0 {
		t.Errorf("again: %+v, %v, %d uploads", report, err, reg.count(http.MethodPost, "/blobs/uploads/"))
	}
}

// mirrored returns a registry that has the release.
func (r *testRelease) mirrored(t *testing.T) *faulty {
	t.Helper()
	f := newFaulty(t)
	if _, err := r.copy(t, r.dir, f.base()); err != nil {
		t.Fatal(err)
	}
	return f
}

func answers(status int, times int, path string) func(http.ResponseWriter, *http.Request, int) bool {
	return func(w http.ResponseWriter, r *http.Request, n int) bool {
		if n > times || !strings.Contains(r.URL.Path, path) {
			return false
		}
		if status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", `Basic realm="mirror"`)
		}
		w.WriteHeader(status)
		return true
	}
}

// A registry that has a fault for a short time delays a mirror, one that stays broken ends it.
func TestMirrorFromAFaultyRegistry(t *testing.T) {
	r := newRelease(t)
	reg := r.mirrored(t)
	defer func(was time.Duration) { idle = was }(idle)
	idle = 2 * time.Second
	blob := "/blobs/" + r.big.String()
	whole := func(w http.ResponseWriter, q *http.Request, change func([]byte) []byte) {
		rec := httptest.NewRecorder()
		q.Header.Del("Range")
		reg.real.ServeHTTP(rec, q)
		_, _ = w.Write(change(rec.Body.Bytes()))
	}
	for _, tt := range []struct {
		name  string
		fault func(http.ResponseWriter, *http.Request, int) bool
		want  error // nil: it ends well
	}{
		{name: "401", fault: answers(http.StatusUnauthorized, 99, blob), want: chart.ErrDenied},
		{name: "401 at the start", fault: answers(http.StatusUnauthorized, 99, "/v2/"), want: chart.ErrDenied},
		{name: "404", fault: answers(http.StatusNotFound, 99, blob), want: chart.ErrAbsent},
		{name: "429 once", fault: answers(http.StatusTooManyRequests, 1, blob), want: nil},
		{name: "429 always", fault: answers(http.StatusTooManyRequests, 99, blob), want: chart.ErrUnreachable},
		{name: "500 twice", fault: answers(http.StatusInternalServerError, 2, blob), want: nil},
		{name: "500 for a manifest", fault: answers(http.StatusInternalServerError, 2, "/manifests/sha256"), want: nil},
		{name: "500 always", fault: answers(http.StatusInternalServerError, 99, blob), want: chart.ErrUnreachable},
		{name: "wrong digest", fault: func(w http.ResponseWriter, q *http.Request, _ int) bool {
			if !strings.Contains(q.URL.Path, blob) {
				return false
			}
			whole(w, q, func(b []byte) []byte { b[100]++; return b })
			return true
		}, want: chart.ErrDigest},
		{name: "wrong digest once", fault: func(w http.ResponseWriter, q *http.Request, n int) bool {
			if n > 1 || !strings.Contains(q.URL.Path, blob) {
				return false
			}
			whole(w, q, func(b []byte) []byte { b[100]++; return b })
			return true
		}, want: nil},
		{name: "wrong manifest", fault: func(w http.ResponseWriter, q *http.Request, _ int) bool {
			if !strings.Contains(q.URL.Path, "/operator/manifests/sha256") {
				return false
			}
			whole(w, q, func(b []byte) []byte { return append(b, ' ') })
			return true
		}, want: chart.ErrDigest},
		{name: "endless body", fault: func(w http.ResponseWriter, q *http.Request, _ int) bool {
			if !strings.Contains(q.URL.Path, blob) {
				return false
			}
			w.WriteHeader(http.StatusOK)
			junk := bytes.Repeat([]byte("x"), 1<<16)
			for {
				if _, err := w.Write(junk); err != nil {
					return true
				}
			}
		}, want: chart.ErrDigest},
		{name: "silent in the middle, once", fault: func(w http.ResponseWriter, q *http.Request, n int) bool {
			if n > 1 || !strings.Contains(q.URL.Path, blob) {
				return false
			}
			w.WriteHeader(http.StatusOK)
			_, _ = w.Write(make([]byte, 100))
			w.(http.Flusher).Flush()
			<-q.Context().Done() // until the client gives up
			return true
		}, want: nil},
		{name: "cut and continued", fault: func(w http.ResponseWriter, q *http.Request, n int) bool {
			if n > 2 || !strings.Contains(q.URL.Path, blob) {
				return false
			}
			w.Header().Set("Content-Length", fmt.Sprint(r.size))
			whole(w, q, func(b []byte) []byte { return b[:1<<20] })
			panic(http.ErrAbortHandler)
		}, want: nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			reg.breaks(tt.fault)
			dir := t.TempDir()
			_, err := r.copy(t, reg.base(), dir)
			if !errors.Is(err, tt.want) || tt.want == nil && err != nil {
				t.Fatalf("error %v, want %v", err, tt.want)
			}
			_, serr := os.Stat(filepath.Join(dir, "constellation_1.1.0_contents.json"))
			if tt.want != nil && serr == nil {
				t.Error("a mirror that is not complete has the contents")
			}
			// The same command ends well when the fault is gone, and takes what arrived.
			reg.breaks(nil)
			if _, err := r.copy(t, reg.base(), dir); err != nil {
				t.Fatal(err)
			}
			if ok, err := matches(filepath.Join(dir, "images/operator/blobs/sha256", r.big.Hex), v1.Descriptor{Digest: r.big, Size: r.size}); !ok {
				t.Errorf("the blob is not whole: %v", err)
			}
		})
	}
}

// A download that was cut is continued from where it ended, also by another process.
func TestMirrorContinuesACutDownload(t *testing.T) {
	r := newRelease(t)
	reg := r.mirrored(t)
	// The test registry ignores ranges, this one does not.
	ranged := func(w http.ResponseWriter, q *http.Request, cut int) {
		rec := httptest.NewRecorder()
		h := q.Clone(q.Context())
		h.Header.Del("Range")
		reg.real.ServeHTTP(rec, h)
		if cut > 0 {
			w.Header().Set("Content-Length", fmt.Sprint(rec.Body.Len()))
			_, _ = w.Write(rec.Body.Bytes()[:cut])
			panic(http.ErrAbortHandler)
		}
		http.ServeContent(w, q, "", time.Time{}, bytes.NewReader(rec.Body.Bytes()))
	}
	blob := "/blobs/" + r.big.String()
	dir := t.TempDir()
	const cut = 1 << 20
	down := false
	reg.breaks(func(w http.ResponseWriter, q *http.Request, _ int) bool {
		switch {
		case !strings.Contains(q.URL.Path, blob):
			return false
		case down:
			w.WriteHeader(http.StatusServiceUnavailable)
		default:
			down = true
			ranged(w, q, cut)
		}
		return true
	})
	if _, err := r.copy(t, reg.base(), dir); !errors.Is(err, chart.ErrUnreachable) {
		t.Fatalf("error %v", err)
	}
	part := filepath.Join(dir, "images/operator/blobs/sha256", r.big.Hex+".part")
	info, err := os.Stat(part)
	if err != nil || info.Size() == 0 || info.Size() > cut {
		t.Fatalf("part: %v, %v", info, err)
	}
	reg.breaks(func(w http.ResponseWriter, q *http.Request, _ int) bool {
		if !strings.Contains(q.URL.Path, blob) {
			return false
		}
		ranged(w, q, 0)
		return true
	})
	report, err := r.copy(t, reg.base(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("bytes=%d-%d", info.Size(), r.size-1); len(reg.ranges) != 1 || reg.ranges[0] != want {
		t.Errorf("ranges %q, want %s", reg.ranges, want)
	}
	if report.Bytes >= r.size {
		t.Errorf("%d bytes were transferred again, of %d", report.Bytes, r.size)
	}
	if _, err := os.Stat(part); err == nil {
		t.Error("the part is still there")
	}
}

func TestMirrorToAFaultyRegistry(t *testing.T) {
	r := newRelease(t)
	for _, tt := range []struct {
		name  string
		fault func(http.ResponseWriter, *http.Request, int) bool
		want  error
	}{
		{name: "401", fault: func(w http.ResponseWriter, q *http.Request, _ int) bool {
			if q.Method == http.MethodGet {
				return false
			}
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}, want: chart.ErrDenied},
		{name: "429 once for each request", fault: func(w http.ResponseWriter, q *http.Request, n int) bool {
			if n > 1 || q.Method != http.MethodPost && q.Method != http.MethodPatch && !strings.Contains(q.URL.Path, "/manifests/") {
				return false
			}
			w.WriteHeader(http.StatusTooManyRequests)
			return true
		}, want: nil},
		{name: "500 once for each request", fault: func(w http.ResponseWriter, q *http.Request, n int) bool {
			if n > 1 || q.Method != http.MethodPost && q.Method != http.MethodPatch && !strings.Contains(q.URL.Path, "/manifests/") {
				return false
			}
			w.WriteHeader(http.StatusInternalServerError)
			return true
		}, want: nil},
		{name: "no uploads", fault: func(w http.ResponseWriter, q *http.Request, _ int) bool {
			if q.Method != http.MethodPost {
				return false
			}
			w.WriteHeader(http.StatusInternalServerError)
			return true
		}, want: chart.ErrUnreachable},
		{name: "an upload is cut", fault: func(_ http.ResponseWriter, q *http.Request, n int) bool {
			if q.Method != http.MethodPatch || n > 1 {
				return false
			}
			_, _ = io.CopyN(io.Discard, q.Body, 1<<16)
			panic(http.ErrAbortHandler)
		}, want: nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			reg := newFaulty(t)
			reg.breaks(tt.fault)
			_, err := r.copy(t, r.dir, reg.base())
			if !errors.Is(err, tt.want) || tt.want == nil && err != nil {
				t.Fatalf("error %v, want %v", err, tt.want)
			}
			reg.breaks(nil)
			if _, err := r.copy(t, r.dir, reg.base()); err != nil {
				t.Fatal(err)
			}
			if _, err := r.copy(t, reg.base(), t.TempDir()); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// Altered sources and contents of others are refused before anything is copied.
func TestMirrorRefusesUnsignedReleases(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(t *testing.T, r *testRelease)
		want error
	}{
		{name: "another key", do: func(t *testing.T, r *testRelease) { r.keys = newRelease(t).keys }, want: release.ErrSigner},
		{name: "altered contents", do: func(t *testing.T, r *testRelease) {
			change(t, filepath.Join(r.dir, "constellation_1.1.0_contents.json"), "constellation.deb", "constellation.rpm")
		}, want: release.ErrSigner},
		{name: "no signature", do: func(t *testing.T, r *testRelease) {
			if err := os.Remove(filepath.Join(r.dir, "constellation_1.1.0_contents.json.sig")); err != nil {
				t.Fatal(err)
			}
		}, want: release.ErrUntrusted},
		{name: "an altered file", do: func(t *testing.T, r *testRelease) { change(t, filepath.Join(r.dir, "constellation.deb"), "a", "b") }, want: chart.ErrDigest},
		{name: "an altered manifest", do: func(t *testing.T, r *testRelease) {
			change(t, filepath.Join(r.dir, "images/operator/blobs/sha256", r.contents.Artifacts[0].Digest.Hex), "linux", "plan9")
		}, want: chart.ErrDigest},
		{name: "no release", do: func(_ *testing.T, r *testRelease) { r.dir = filepath.Join(r.dir, "images") }, want: chart.ErrAbsent},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRelease(t)
			tt.do(t, r)
			to := t.TempDir()
			if _, err := r.copy(t, r.dir, to); !errors.Is(err, tt.want) {
				t.Fatalf("error %v, want %v", err, tt.want)
			}
			if _, err := os.Stat(filepath.Join(to, "constellation_1.1.0_contents.json")); err == nil {
				t.Error("the contents were copied")
			}
		})
	}
}

func change(t *testing.T, file, from, to string) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil || !bytes.Contains(b, []byte(from)) {
		t.Fatalf("%s has no %q: %v", file, from, err)
	}
	if err := os.WriteFile(file, bytes.Replace(b, []byte(from), []byte(to), 1), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestParseContents(t *testing.T) {
	ok := `{"schema":"1","release":"v1.1.0","artifacts":[{"repository":"a/b","layout":"x","tag":"t","mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:` + strings.Repeat("a", 64) + `","size":1}],"files":[{"name":"f","digest":"sha256:` + strings.Repeat("a", 64) + `","size":0}]}`
	if _, err := Parse([]byte(ok)); err != nil {
		t.Fatal(err)
	}
	for _, change := range [][2]string{
		{`"a/b"`, `"../b"`},
		{`"a/b"`, `"release"`},
		{`"a/b"`, `"feed"`},
		{`"a/b"`, `"A"`},
		{`"x"`, `"../x"`},
		{`"x"`, `"/x"`},
		{`"x"`, `"."`},
		{`"t"`, `"a b"`},
		{`"f"`, `"../f"`},
		{`"f"`, `"a/f"`},
		{`"f"`, `".."`},
		{`"schema":"1"`, `"schema":"2"`},
		{`"size":1`, `"size":0`},
		{`"size":1`, `"size":99999999999`},
		{"sha256:", "sha512:"},
		{"image.manifest.v1+json", "other"},
		{`"files"`, `"others"`},
		{`"v1.1.0"`, `""`},
	} {
		if _, err := Parse([]byte(strings.Replace(ok, change[0], change[1], 1))); !errors.Is(err, ErrContents) {
			t.Errorf("%s for %s: %v", change[1], change[0], err)
		}
	}
}

// TestDiskFull runs itself with a limit of the size of files, at which writes fail as on a full disk.
func TestDiskFull(t *testing.T) {
	if from := os.Getenv("MIRROR_FROM"); from != "" {
		_, err := Copy(context.Background(), Options{From: from, To: os.Getenv("MIRROR_TO")})
		fmt.Printf("result: %t %v\n", errors.Is(err, syscall.EFBIG), err)
		return
	}
	r := newRelease(t)
	to := t.TempDir()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// Blocks of 1024 bytes in bash: 1 MiB.
	cmd := exec.CommandContext(t.Context(), "bash", "-c", `trap "" XFSZ; ulimit -f 1024; exec "$0" -test.run '^TestDiskFull$'`, exe)
	cmd.Env = append(os.Environ(), "MIRROR_FROM="+r.dir, "MIRROR_TO="+to)
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("result: true ")) {
		t.Fatalf("%v\n%s", err, out)
	}
	if _, err := os.Stat(filepath.Join(to, "constellation_1.1.0_contents.json")); err == nil {
		t.Error("a mirror that is not complete has the contents")
	}
	// With room again, it continues.
	report, err := r.copy(t, r.dir, to)
	if err != nil {
		t.Fatal(err)
	}
	if report.Bytes >= 2*r.size {
		t.Errorf("%d bytes were copied, all of them", report.Bytes)
	}
	got := files(t, to)
	for name := range got {
		if strings.HasSuffix(name, ".part") || strings.Contains(name, ".new-") {
			t.Errorf("%s is left", name)
		}
	}
	if d := cmp.Diff(files(t, filepath.Join(r.dir, "images/operator/blobs")), files(t, filepath.Join(to, "images/operator/blobs"))); d != "" {
		t.Error(d)
	}
}
