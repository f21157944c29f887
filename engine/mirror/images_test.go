package mirror

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"constellation/engine/chart"
)

// publisher is a registry with the layout of registry.k8s.io.
type publisher struct {
	*faulty
	digests map[string]string // by repository and tag
	images  []Image
	layer   v1.Hash // of coredns
}

// newPublisher serves coredns, for two platforms in Docker's format with a layer that only its owner serves, and pause.
func newPublisher(t *testing.T) *publisher {
	t.Helper()
	p := &publisher{faulty: newFaulty(t), digests: map[string]string{}}
	host := strings.TrimPrefix(p.URL, "http://")
	ref := func(s string) name.Reference {
		r, err := name.ParseReference(host+"/"+s, name.Insecure)
		if err != nil {
			t.Fatal(err)
		}
		p.images = append(p.images, Image{Reference: "registry.k8s.io/" + s})
		return r
	}
	img, err := random.Image(1<<16, 2)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err == nil {
		p.layer, err = layers[0].Digest()
	}
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := mutate.Append(img, mutate.Addendum{Layer: static.NewLayer([]byte("of Windows"), types.DockerForeignLayer), URLs: []string{"https://example.com/layer"}})
	if err != nil {
		t.Fatal(err)
	}
	index := mutate.AppendManifests(mutate.IndexMediaType(random0(t), types.DockerManifestList), mutate.IndexAddendum{Add: img}, mutate.IndexAddendum{Add: foreign})
	if err := remote.WriteIndex(ref("coredns/coredns:v1.14.6"), index); err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref("pause:3.10.2"), img); err != nil {
		t.Fatal(err)
	}
	for at, d := range map[string]interface{ Digest() (v1.Hash, error) }{"coredns:v1.14.6": index, "pause:3.10.2": img} {
		h, err := d.Digest()
		if err != nil {
			t.Fatal(err)
		}
		p.digests["kubernetes/"+at] = h.String()
	}
	return p
}

func random0(t *testing.T) v1.ImageIndex {
	t.Helper()
	i, err := random.Index(0, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func (p *publisher) root() string { return Scheme + strings.TrimPrefix(p.URL, "http://") }

// Images go from their publisher to a folder, a registry and back, by the same digests, and a mirror is the source of the next.
func TestMirrorImagesOfKubernetes(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r, p := newRelease(t), newPublisher(t)
	folder, last := t.TempDir(), t.TempDir()
	reg := newFaulty(t)
	official := make([]Image, len(p.images)) // published by the test registry
	for i, image := range p.images {
		official[i] = Image{Reference: strings.TrimPrefix(p.root(), Scheme) + strings.TrimPrefix(image.Reference, "registry.k8s.io")}
	}
	for _, step := range []struct {
		from, to, images string
		list             []Image
		want             string
	}{
		{from: r.dir, to: folder, list: official, want: strings.TrimPrefix(p.root(), Scheme) + "/coredns/coredns:v1.14.6"},
		{from: r.dir, to: t.TempDir(), images: p.root(), list: p.images, want: strings.TrimPrefix(p.root(), Scheme) + "/coredns/coredns:v1.14.6"},
		{from: folder, to: reg.base(), list: p.images, want: folder + "/images/kubernetes/coredns:v1.14.6"},
		{from: r.dir, to: last, images: reg.base(), list: p.images, want: strings.TrimPrefix(reg.base(), Scheme) + "/kubernetes/coredns:v1.14.6"},
		{from: reg.base(), to: t.TempDir(), list: p.images, want: strings.TrimPrefix(reg.base(), Scheme) + "/kubernetes/coredns:v1.14.6"},
		{from: r.dir, to: t.TempDir(), images: folder, list: p.images, want: folder + "/images/kubernetes/coredns:v1.14.6"},
	} {
		var parts []string
		report, err := Copy(t.Context(), Options{
			From: step.from, To: step.to, Release: "v1.1.0", Keys: r.keys, Images: step.list, ImagesFrom: step.images, Stage: t.TempDir(),
			Progress: func(at Progress) {
				if at.Part != "" {
					parts = append(parts, at.Part)
				}
			},
		})
		if err != nil {
			t.Fatalf("to %s: %v", step.to, err)
		}
		got := map[string]string{}
		for _, i := range report.Images {
			got[i.Name] = i.Digest
		}
		if d := cmp.Diff(p.digests, got); d != "" || report.Images[0].From != step.want {
			t.Errorf("to %s: %s, from %s, want %s", step.to, d, report.Images[0].From, step.want)
		}
		if len(parts) != 6 || parts[3] != "kubernetes/coredns:v1.14.6" || parts[5] != "files" {
			t.Errorf("to %s: progress %q", step.to, parts)
		}
	}
	if d := cmp.Diff(files(t, filepath.Join(folder, "images/kubernetes")), files(t, filepath.Join(last, "images/kubernetes"))); d != "" {
		t.Errorf("the mirror of the mirror differs: %s", d)
	}
	reg.breaks(nil)
	report, err := Copy(t.Context(), Options{From: folder, To: reg.base(), Keys: r.keys, Images: p.images, Stage: t.TempDir()})
	if err != nil || report.Bytes != 0 || reg.count(http.MethodPost, "/blobs/uploads/") != 0 {
		t.Errorf("again: %+v, %v, %d uploads", report, err, reg.count(http.MethodPost, "/blobs/uploads/"))
	}
}

// An image that cannot be copied whole is an error that names it, and the release beside it is not complete.
func TestMirrorImagesFromAFaultyRegistry(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r, p := newRelease(t), newPublisher(t)
	tag, blob := "/coredns/coredns/manifests/v1.14.6", "/coredns/coredns/blobs/"+p.layer.String()
	changed := func(path string, change func([]byte) []byte) func(http.ResponseWriter, *http.Request, int) bool {
		return func(w http.ResponseWriter, q *http.Request, _ int) bool {
			if !strings.HasSuffix(q.URL.Path, path) {
				return false
			}
			rec := httptest.NewRecorder()
			p.real.ServeHTTP(rec, q)
			w.Header().Set("Content-Type", rec.Header().Get("Content-Type"))
			_, _ = w.Write(change(rec.Body.Bytes()))
			return true
		}
	}
	endless := func(path string) func(http.ResponseWriter, *http.Request, int) bool {
		return func(w http.ResponseWriter, q *http.Request, _ int) bool {
			if !strings.HasSuffix(q.URL.Path, path) {
				return false
			}
			for {
				if _, err := w.Write(bytes.Repeat([]byte("x"), 1<<16)); err != nil {
					return true
				}
			}
		}
	}
	for _, tt := range []struct {
		name   string
		fault  func(http.ResponseWriter, *http.Request, int) bool
		digest string
		want   error // nil: it ends well
		text   string
	}{
		{name: "absent", fault: answers(http.StatusNotFound, 99, tag), want: chart.ErrAbsent, text: "/coredns/coredns:v1.14.6 does not exist"},
		{name: "401", fault: answers(http.StatusUnauthorized, 99, "/coredns/"), want: chart.ErrDenied},
		{name: "403 of a blob", fault: answers(http.StatusForbidden, 99, blob), want: chart.ErrDenied},
		{name: "429 once", fault: answers(http.StatusTooManyRequests, 1, tag)},
		{name: "429 always", fault: answers(http.StatusTooManyRequests, 99, tag), want: chart.ErrUnreachable},
		{name: "500 twice", fault: answers(http.StatusInternalServerError, 2, tag)},
		{name: "500 of a blob", fault: answers(http.StatusInternalServerError, 99, blob), want: chart.ErrUnreachable},
		{name: "wrong digest of a blob", fault: changed(blob, func(b []byte) []byte { b[100]++; return b }), want: chart.ErrDigest},
		{name: "a page in place of a manifest", fault: func(w http.ResponseWriter, q *http.Request, _ int) bool {
			if !strings.HasSuffix(q.URL.Path, tag) {
				return false
			}
			w.Header().Set("Content-Type", "text/html")
			_, _ = w.Write([]byte("<html>log in</html>"))
			return true
		}, want: ErrContents, text: `has type "text/html", want an image`},
		{name: "endless manifest", fault: endless(tag), want: ErrContents},
		{name: "endless blob", fault: endless(blob), want: chart.ErrDigest},
		{name: "another digest than the release data", digest: "sha256:" + strings.Repeat("ab", 32), want: chart.ErrDigest, text: "the release data demand sha256:abab"},
		{name: "the digest of the release data", digest: p.digests["kubernetes/coredns:v1.14.6"]},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p.breaks(tt.fault)
			dir := t.TempDir()
			o := Options{From: r.dir, To: dir, Keys: r.keys, Images: []Image{{p.images[0].Reference, tt.digest}, p.images[1]}, ImagesFrom: p.root()}
			_, err := Copy(t.Context(), o)
			if !errors.Is(err, tt.want) || tt.want == nil && err != nil {
				t.Fatalf("error %v, want %v", err, tt.want)
			}
			if tt.want == nil {
				return
			}
			var image *ImageError
			if !errors.As(err, &image) || image.Reference != "registry.k8s.io/coredns/coredns:v1.14.6" || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v", err)
			}
			if _, err := os.Stat(filepath.Join(dir, "constellation_1.1.0_contents.json")); err == nil {
				t.Error("a mirror that is not complete has the contents")
			}
			p.breaks(nil)
			o.Images = p.images
			report, err := Copy(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			if report.Images[0].Digest != p.digests["kubernetes/coredns:v1.14.6"] {
				t.Errorf("images %+v", report.Images)
			}
		})
	}
}

// A source that denies what it lacks does not hide the publisher's registry. If none has an image, the error names all places.
func TestMirrorTriesThePublisherAfterTheSource(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r, p := newRelease(t), newPublisher(t)
	from := r.mirrored(t)
	from.breaks(answers(http.StatusForbidden, 99, "/kubernetes/"))
	host := strings.TrimPrefix(p.root(), Scheme)
	o := Options{From: from.base(), To: t.TempDir(), Release: "v1.1.0", Keys: r.keys, Images: []Image{{Reference: host + "/coredns/coredns:v1.14.6"}}}
	if _, err := Copy(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	o.Images[0].Reference = host + "/coredns/coredns:v0"
	_, err := Copy(t.Context(), o)
	if !errors.Is(err, chart.ErrAbsent) || !errors.Is(err, chart.ErrDenied) || !strings.Contains(err.Error(), "/mirror/kubernetes/coredns:v0") || !strings.Contains(err.Error(), host+"/coredns/coredns:v0 does not exist") {
		t.Errorf("error %v", err)
	}
}
