package main

import (
	"archive/tar"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"constellation/engine/mirror"
	"constellation/engine/release"
	"constellation/internal/testneeds"
)

// packedRelease returns the folder of a release with images that have the test program.
func packedRelease(t *testing.T, key string) string {
	t.Helper()
	dir := t.TempDir()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, arch := range imageArchitectures {
		for _, image := range releaseImages {
			if arch == "arm64" && image.name != "operator" {
				continue // compressing all of them takes long
			}
			file := filepath.Join(dir, "bin", "linux_"+arch, image.name)
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(exe, file); err != nil {
				t.Fatal(err)
			}
		}
	}
	out := filepath.Join(dir, "release")
	err = images([]string{"-binaries", filepath.Join(dir, "bin"), "-out", filepath.Join(out, "images"), "-release", "v1.1.0", "-source", "https://example.com/source", "-commit", "abc", "-date", "1700000000", "-key", key})
	if err == nil {
		err = os.WriteFile(filepath.Join(out, "constellation.deb"), []byte("a package"), 0o644)
	}
	if err == nil {
		err = contents([]string{"-dir", out, "-out", filepath.Join(out, "constellation_1.1.0_contents.json"), "-release", "v1.1.0", "-key", key})
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func filesOf(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		rel, _ := filepath.Rel(dir, p)
		out[rel] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestImages(t *testing.T) {
	testneeds.Time(t, "10 s: it compresses programs")
	key, err := release.NewPrivateKey("release")
	if err != nil {
		t.Fatal(err)
	}
	private, err := key.PrivatePEM()
	if err != nil {
		t.Fatal(err)
	}
	keyFile := filepath.Join(t.TempDir(), "release.key")
	if err := os.WriteFile(keyFile, private, 0o600); err != nil {
		t.Fatal(err)
	}
	out := packedRelease(t, keyFile)
	if d := cmp.Diff(filesOf(t, out), filesOf(t, packedRelease(t, keyFile))); d != "" {
		t.Errorf("two runs differ: %d bytes of differences", len(d))
	}

	index, err := layout.ImageIndexFromPath(filepath.Join(out, "images/operator"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := index.IndexManifest()
	if err != nil || len(m.Manifests) != 4 { // the image, two SBOMs, the signature
		t.Fatalf("%+v, %v", m, err)
	}
	if tag := m.Manifests[0].Annotations["org.opencontainers.image.ref.name"]; tag != "v1.1.0" {
		t.Errorf("tag %q", tag)
	}
	multi, err := index.ImageIndex(m.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(multi); err != nil {
		t.Error(err)
	}
	platforms, err := multi.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	for i, arch := range imageArchitectures {
		d := platforms.Manifests[i]
		if d.Platform == nil || d.Platform.String() != "linux/"+arch {
			t.Errorf("platform %v, want linux/%s", d.Platform, arch)
		}
		img, err := multi.Image(d.Digest)
		if err != nil {
			t.Fatal(err)
		}
		checkImage(t, img, arch)
		checkSBOM(t, index, m.Manifests[1+i], d)
	}
	checkSignature(t, index, m.Manifests[3], m.Manifests[0].Digest, key.Key)

	// The contents name everything, and a mirror of it is the same.
	to := t.TempDir()
	r, err := mirror.Copy(t.Context(), mirror.Options{From: out, To: to, Keys: []release.Key{key.Key}})
	if err != nil {
		t.Fatal(err)
	}
	if r.Artifacts != 4+3*(len(releaseImages)-1) || r.Files != 1 {
		t.Errorf("mirrored %+v", r)
	}
	if got, want := len(filesOf(t, to)), len(filesOf(t, out)); got != want {
		t.Errorf("the mirror has %d files, want %d", got, want)
	}
}

func checkImage(t *testing.T, img v1.Image, arch string) {
	t.Helper()
	c, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if c.Architecture != arch || c.Config.User != "65532:65532" || len(c.Config.Entrypoint) != 1 || c.Config.Entrypoint[0] != "/usr/local/bin/operator" || c.Created.Unix() != 1700000000 {
		t.Errorf("configuration %+v", c)
	}
	for label, want := range map[string]string{"title": "constellation operator", "version": "v1.1.0", "revision": "abc", "source": "https://example.com/source", "licenses": "Apache-2.0"} {
		if got := c.Config.Labels["org.opencontainers.image."+label]; got != want {
			t.Errorf("label %s is %q, want %q", label, got, want)
		}
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]*tar.Header{}
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
			files[h.Name] = h
			if h.Name == "etc/ssl/certs/ca-certificates.crt" {
				b, err := io.ReadAll(tr)
				if pool := x509.NewCertPool(); err != nil || !pool.AppendCertsFromPEM(b) || strings.Count(string(b), "BEGIN CERTIFICATE") < 50 {
					t.Errorf("%d root certificates, %v", strings.Count(string(b), "BEGIN CERTIFICATE"), err)
				}
			}
		}
		r.Close()
	}
	if h := files["home/nonroot/"]; h == nil || h.Uid != imageUser || h.Mode != 0o700 {
		t.Errorf("home: %+v", h)
	}
	if h := files["usr/local/bin/operator"]; h == nil || h.Uid != 0 || h.Mode != 0o755 {
		t.Errorf("program: %+v", h)
	}
	if files["bin/sh"] != nil || files["etc/ssl/certs/ca-certificates.crt"] == nil {
		t.Errorf("%d files", len(files))
	}
}

// onlyBlob returns the manifest of an artifact and the content of its only blob.
func onlyBlob(t *testing.T, index v1.ImageIndex, d v1.Descriptor) (*v1.Manifest, []byte) {
	t.Helper()
	img, err := index.Image(d.Digest)
	if err != nil {
		t.Fatal(err)
	}
	m, err := img.Manifest()
	if err != nil || len(m.Layers) != 1 {
		t.Fatalf("manifest %+v, %v", m, err)
	}
	l, err := img.LayerByDigest(m.Layers[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	r, err := l.Compressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return m, b
}

func checkSBOM(t *testing.T, index v1.ImageIndex, d, subject v1.Descriptor) {
	t.Helper()
	m, b := onlyBlob(t, index, d)
	if m.Subject == nil || m.Subject.Digest != subject.Digest || m.ArtifactType != string(spdxType) || m.Layers[0].MediaType != spdxType {
		t.Errorf("manifest %+v", m)
	}
	var doc document
	if err := json.Unmarshal(b, &doc); err != nil || len(doc.Packages) < 10 || doc.Creation.Created != "2023-11-14T22:13:20Z" || doc.Packages[0].Checksums[0].Value != subject.Digest.Hex {
		t.Errorf("document of %d packages, created %s: %v", len(doc.Packages), doc.Creation.Created, err)
	}
}

func checkSignature(t *testing.T, index v1.ImageIndex, d v1.Descriptor, signed v1.Hash, key release.Key) {
	t.Helper()
	if tag := d.Annotations["org.opencontainers.image.ref.name"]; tag != "sha256-"+signed.Hex+".sig" {
		t.Errorf("tag %q", tag)
	}
	m, payload := onlyBlob(t, index, d)
	if _, err := release.VerifyFile(payload, []byte(m.Layers[0].Annotations["dev.cosignproject.cosign/signature"]), []release.Key{key}); err != nil {
		t.Error(err)
	}
	want := `{"critical":{"identity":{"docker-reference":""},"image":{"docker-manifest-digest":"` + signed.String() + `"},"type":"cosign container image signature"},"optional":null}`
	if string(payload) != want {
		t.Errorf("payload %s", payload)
	}
}

func TestLargeImageIsRefused(t *testing.T) {
	dir := t.TempDir()
	binary := filepath.Join(dir, "linux_amd64", "operator")
	if err := os.MkdirAll(filepath.Dir(binary), 0o755); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err == nil {
		err = os.Symlink(exe, binary)
	}
	if err != nil {
		t.Fatal(err)
	}
	var report strings.Builder
	p := &packer{binaries: dir, limit: 1_000_000, report: &report}
	if err := p.pack("operator", "", "", filepath.Join(dir, "out")); err == nil || !strings.Contains(err.Error(), "want at most 1000000") || report.Len() > 0 {
		t.Errorf("an image above the limit: %v, %q", err, &report)
	}
}
