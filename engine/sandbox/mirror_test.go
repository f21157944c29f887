package sandbox

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func testMirror(t *testing.T, spec ...string) (*mirror, *httptest.Server, map[string][]byte) {
	t.Helper()
	f, err := ParseFaults(spec)
	if err != nil {
		t.Fatal(err)
	}
	dir, files, digests, contents := t.TempDir(), map[string]string{}, map[string]string{}, map[string][]byte{}
	for i, n := range mirrored {
		b := make([]byte, 200_000+i)
		for j := range b {
			b[j] = byte(rand.Uint32())
		}
		sum := sha256.Sum256(b)
		files[n], digests[n], contents[n] = filepath.Join(dir, n), "sha256:"+hex.EncodeToString(sum[:]), b
		if err := os.WriteFile(files[n], b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	m := &mirror{log: discard(), faults: func() *Faults { return f }}
	s := httptest.NewServer(m)
	t.Cleanup(s.Close)
	m.base = s.URL
	if err := m.add("v1.35.4", files, digests); err != nil {
		t.Fatal(err)
	}
	return m, s, contents
}

func get(t *testing.T, url, rng string) (int, []byte, error) {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if rng != "" {
		req.Header.Set("Range", rng)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, b, err
}

func TestMirrorServesWhatItsDigestsSay(t *testing.T) {
	m, s, _ := testMirror(t)
	l, ok := m.components("v1.35.4")
	if !ok || len(l) != len(mirrored) {
		t.Fatalf("%v %t", l, ok)
	}
	for _, c := range l {
		status, b, err := get(t, c.URL, "")
		sum := sha256.Sum256(b)
		if status != 200 || err != nil || "sha256:"+hex.EncodeToString(sum[:]) != c.Digest {
			t.Errorf("%s: status %d, %d bytes, digest does not match: %v", c.Name, status, len(b), err)
		}
		if c.Path != "/usr/local/bin/"+c.Name || c.Mode != 0o755 {
			t.Errorf("%s goes to %s with mode %o", c.Name, c.Path, c.Mode)
		}
	}
	if _, ok := m.components("v1.0.0"); ok {
		t.Error("a version that nobody built is served")
	}
	for _, path := range []string{"/kubernetes/v1.35.4/etcd", "/kubernetes/v1.36.3/kubelet", "/kubernetes/../../etc/passwd", "/"} {
		if status, _, _ := get(t, s.URL+path, ""); status != http.StatusNotFound {
			t.Errorf("%s: status %d", path, status)
		}
	}
}

func TestMirrorResumes(t *testing.T) {
	_, s, contents := testMirror(t)
	status, b, err := get(t, s.URL+"/kubernetes/v1.35.4/kubelet", "bytes=150000-")
	if status != http.StatusPartialContent || err != nil || !bytes.Equal(b, contents["kubelet"][150000:]) {
		t.Errorf("status %d, %d bytes: %v", status, len(b), err)
	}
}

func TestMirrorInjectsFaults(t *testing.T) {
	_, s, contents := testMirror(t, "component-truncate=kubelet", "component-corrupt=kubeadm", "component-cut=kubectl")
	url := s.URL + "/kubernetes/v1.35.4/"

	if _, b, err := get(t, url+"kubelet", ""); err != nil || !bytes.Equal(b, contents["kubelet"][:len(contents["kubelet"])/2]) {
		t.Errorf("truncated: %d bytes: %v", len(b), err)
	}
	_, b, err := get(t, url+"kubeadm", "")
	diff := 0
	for i := range b {
		if b[i] != contents["kubeadm"][i] {
			diff++
		}
	}
	if err != nil || len(b) != len(contents["kubeadm"]) || diff != 1 {
		t.Errorf("corrupt: %d bytes, %d differ: %v", len(b), diff, err)
	}
	var whole []byte
	for i := 0; ; i++ {
		if i > 10 {
			t.Fatal("a cut download cannot be finished in parts")
		}
		_, part, err := get(t, url+"kubectl", fmt.Sprintf("bytes=%d-", len(whole)))
		whole = append(whole, part...)
		if i == 0 && err == nil {
			t.Error("the first download was not cut")
		}
		if err == nil {
			break
		}
	}
	if !bytes.Equal(whole, contents["kubectl"]) {
		t.Error("parts do not make the whole")
	}
}

// writeImage puts an image into a layout, and into an archive of it, and returns both paths.
func writeImage(t *testing.T) (dir, archive string) {
	t.Helper()
	img, err := random.Image(50_000, 2)
	if err != nil {
		t.Fatal(err)
	}
	dir = filepath.Join(t.TempDir(), "layout")
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AppendImage(img); err != nil {
		t.Fatal(err)
	}
	archive = filepath.Join(t.TempDir(), "image.tar")
	f, err := os.Create(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := tar.NewWriter(f)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return dir, archive
}

func TestRegistryServesLayoutsAndArchivesToARealClient(t *testing.T) {
	dir, archive := writeImage(t)
	r := &registry{log: discard()}
	if err := r.add("registry.k8s.io/kube-proxy:v1.35.4", dir); err != nil {
		t.Fatal(err)
	}
	if err := r.add("registry.constellation.example/operator:v1.1.0", archive); err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(r)
	defer s.Close()
	host := strings.TrimPrefix(s.URL, "http://")
	for _, ref := range []string{host + "/kube-proxy:v1.35.4", host + "/registry.k8s.io/kube-proxy:v1.35.4", host + "/operator:v1.1.0"} {
		tag, err := name.NewTag(ref, name.Insecure)
		if err != nil {
			t.Fatal(err)
		}
		img, err := remote.Image(tag)
		if err != nil {
			t.Errorf("%s: %v", ref, err)
			continue
		}
		if err := validate.Image(img); err != nil { // pulls every layer and checks every digest
			t.Errorf("%s: %v", ref, err)
		}
	}
}

func TestRegistryMirrorsTheRegistryThatContainerdNames(t *testing.T) {
	dir, _ := writeImage(t)
	r := &registry{log: discard()}
	for _, ref := range []string{"registry.k8s.io/pause:3.10.1", "busybox"} {
		if err := r.add(ref, dir); err != nil {
			t.Fatal(err)
		}
	}
	s := httptest.NewServer(r)
	defer s.Close()
	for path, want := range map[string]int{
		"/v2/": 200,
		"/v2/pause/manifests/3.10.1?ns=registry.k8s.io":     200,
		"/v2/pause/manifests/3.10.1?ns=docker.io":           404,
		"/v2/pause/manifests/3.9?ns=registry.k8s.io":        404,
		"/v2/library/busybox/manifests/latest?ns=docker.io": 200,
		"/v2/pause/blobs/sha256:" + strings.Repeat("0", 64): 404,
		"/v2/../../etc/passwd":                              404,
	} {
		if got, b, err := get(t, s.URL+path, ""); err != nil || got != want {
			t.Errorf("%s: %d, want %d: %s %v", path, got, want, b, err)
		}
	}
	resp, err := http.Post(s.URL+"/v2/pause/blobs/uploads/", "", nil)
	if err != nil || resp.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("upload: %v %v", resp.StatusCode, err)
	}
}

func TestEmptyRegistryServesNothing(t *testing.T) {
	dir, _ := writeImage(t)
	f, _ := ParseFaults([]string{"registry-empty"})
	r := &registry{log: discard(), faults: func() *Faults { return f }}
	if err := r.add("registry.k8s.io/pause:3.10.1", dir); err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(r)
	defer s.Close()
	if got, _, _ := get(t, s.URL+"/v2/pause/manifests/3.10.1?ns=registry.k8s.io", ""); got != http.StatusNotFound {
		t.Errorf("status %d", got)
	}
}

func TestRegistryRefusesBrokenImages(t *testing.T) {
	r := &registry{log: discard()}
	bad := filepath.Join(t.TempDir(), "bad.tar")
	os.WriteFile(bad, []byte("not a tar at all, and longer than nothing"), 0o644)
	for _, file := range []string{bad, filepath.Join(t.TempDir(), "absent"), t.TempDir()} {
		if err := r.add("registry.k8s.io/x:1", file); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: %v", file, err)
		}
	}
}
