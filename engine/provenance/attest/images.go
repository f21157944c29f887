package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"

	"constellation/engine/provenance"
	"constellation/engine/release"
	"constellation/internal/ocipack"
)

// imageUser is the user of all images: not root, without a password or a shell.
const imageUser = 65532

// releaseImages are the images of a release. Each has one program.
var releaseImages = []struct{ name, title, description string }{
	{"agent", "constellation agent", "Installs the agent on machines of adopted clusters"},
	{"constellation", "constellation", "Create, upgrade and operate Kubernetes on attested machines: the console for pipelines"},
	{"joinservice", "constellation join service", "Verifies the evidence of joining machines and issues tickets"},
	{"operator", "constellation operator", "Upgrades nodes; carries out Plans; relays to agents"},
}

// imageLimit is the largest compressed size of an image in bytes, which each node downloads.
const imageLimit = 45_000_000

// imageArchitectures are the architectures of the images.
var imageArchitectures = []string{"amd64", "arm64"}

// Media types of what is attached to an image: the list of its modules, and cosign's signature.
const (
	spdxType    types.MediaType = "application/spdx+json"
	signingType types.MediaType = "application/vnd.dev.cosign.simplesigning.v1+json"
)

// images packs the images of a release as OCI layouts, one folder per image. A target whose
// binaries are missing is left out.
func images(args []string) error {
	var o provenance.Options
	f := flags("images", &o)
	binaries, out, key := f.String("binaries", "", "`folder` with one folder per target, such as linux_amd64"), f.String("out", "", "`folder` of the layouts"), f.String("key", "", "private key `file`; none: no signature")
	commit, seconds := f.String("commit", "", "commit"), f.Int64("date", 0, "`time` of the commit in seconds since 1970")
	if err := f.Parse(args); err != nil {
		return err
	}
	p := &packer{Options: o, binaries: *binaries, commit: *commit, date: time.Unix(*seconds, 0).UTC(), limit: imageLimit, report: os.Stdout}
	if *key != "" {
		b, err := os.ReadFile(*key)
		if err != nil {
			return err
		}
		if p.key, err = release.ParsePrivateKey(filepath.Base(*key), b); err != nil {
			return err
		}
	}
	for _, image := range releaseImages {
		if err := p.pack(image.name, image.title, image.description, filepath.Join(*out, image.name)); err != nil {
			return fmt.Errorf("pack image %s: %w", image.name, err)
		}
	}
	return nil
}

// packer packs images of one release.
type packer struct {
	provenance.Options
	binaries, commit string
	date             time.Time
	key              *release.PrivateKey // nil: no signatures
	limit            int64               // of the compressed size of an image
	report           io.Writer           // gets a line with the size of each image
}

// pack writes the layout of one image: an index of all architectures, the SBOM of each, and the
// signature.
func (p *packer) pack(name, title, description, out string) error {
	l, err := ocipack.NewLayout(out)
	if err != nil {
		return err
	}
	labels := map[string]string{
		"org.opencontainers.image.title": title, "org.opencontainers.image.description": description,
		"org.opencontainers.image.version": p.Release, "org.opencontainers.image.revision": p.commit,
		"org.opencontainers.image.source": p.Source, "org.opencontainers.image.licenses": "Apache-2.0",
		"org.opencontainers.image.created": p.date.Format(time.RFC3339),
	}
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Annotations: labels}
	var documents []v1.Descriptor
	for _, arch := range imageArchitectures {
		binary := filepath.Join(p.binaries, "linux_"+arch, name)
		if _, err := os.Stat(binary); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		image, err := p.image(l, name, binary, arch, labels)
		if err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
		index.Manifests = append(index.Manifests, image)
		document, err := p.sbom(l, name, binary, image)
		if err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
		documents = append(documents, document)
	}
	if len(index.Manifests) == 0 {
		return fmt.Errorf("no binary %s for Linux in %s", name, p.binaries)
	}
	d, err := l.JSON(types.OCIImageIndex, index)
	if err != nil {
		return err
	}
	l.Add(d, p.Release)
	for _, document := range documents {
		l.Add(document, "")
	}
	if p.key != nil {
		if err := p.sign(l, d); err != nil {
			return err
		}
	}
	return l.Close()
}

func (p *packer) image(l *ocipack.Layout, name, binary, arch string, labels map[string]string) (v1.Descriptor, error) {
	at := "/usr/local/bin/" + name
	home := fmt.Sprintf("nonroot:x:%d:%[1]d:nonroot:/home/nonroot:/sbin/nologin\n", imageUser)
	files := append(ocipack.BaseFiles(),
		ocipack.File{Path: at, From: binary, Mode: 0o755},
		ocipack.File{Path: "/etc/ssl/certs/ca-certificates.crt", Content: roots(), Mode: 0o644},
		ocipack.File{Path: "/home/nonroot", Dir: true, Mode: 0o700, Owner: imageUser},
	)
	for i, f := range files {
		switch f.Path {
		case "/etc/passwd":
			files[i].Content += home
		case "/etc/group":
			files[i].Content += fmt.Sprintf("nonroot:x:%d:\n", imageUser)
		}
	}
	layer, err := ocipack.NewLayer(p.date, files)
	if err != nil {
		return v1.Descriptor{}, err
	}
	packed, err := ocipack.Compress(layer)
	if err != nil {
		return v1.Descriptor{}, err
	}
	img, err := ocipack.NewImage(ocipack.Config{
		Architecture: arch, Created: p.date, Entrypoint: []string{at}, User: fmt.Sprintf("%d:%[1]d", imageUser), Labels: labels,
	}, packed)
	if err != nil {
		return v1.Descriptor{}, err
	}
	m, err := img.Manifest()
	if err != nil {
		return v1.Descriptor{}, err
	}
	size := m.Config.Size
	for _, layer := range m.Layers {
		size += layer.Size
	}
	if size > p.limit {
		return v1.Descriptor{}, fmt.Errorf("its compressed size is %d bytes, want at most %d: find what %s links with `go version -m` and `go tool nm -size`", size, p.limit, binary)
	}
	fmt.Fprintf(p.report, "image %s linux/%s: %d bytes\n", name, arch, size)
	return l.Image(img)
}

// roots returns the certificates of Mozilla's root program, except those that are trusted under
// conditions that a file of certificates cannot state.
func roots() string {
	var b bytes.Buffer
	for r := range bundle.Roots() {
		if r.Constraint == nil {
			_ = pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: r.Certificate}) // into memory
		}
	}
	return b.String()
}

// sbom attaches the SPDX document of a binary to its image.
func (p *packer) sbom(l *ocipack.Layout, name, binary string, image v1.Descriptor) (v1.Descriptor, error) {
	content, err := os.ReadFile(binary)
	if err != nil {
		return v1.Descriptor{}, err
	}
	if _, err := buildinfo.Read(bytes.NewReader(content)); err != nil {
		return v1.Descriptor{}, err
	}
	d := newDocument("image-"+name, image.Digest.Hex, p.date)
	d.add("usr/local/bin/"+name, content, map[string]bool{})
	d.sort()
	b, err := json.MarshalIndent(d, "", " ")
	if err != nil {
		return v1.Descriptor{}, err
	}
	blob, err := l.Blob(spdxType, b)
	if err != nil {
		return v1.Descriptor{}, err
	}
	return l.Artifact(string(spdxType), &image, blob)
}

// sign adds a signature in the form of cosign: a tag made of the digest that is signed.
func (p *packer) sign(l *ocipack.Layout, d v1.Descriptor) error {
	type critical struct {
		Identity struct {
			Reference string `json:"docker-reference"`
		} `json:"identity"`
		Image struct {
			Digest string `json:"docker-manifest-digest"`
		} `json:"image"`
		Type string `json:"type"`
	}
	c := critical{Type: "cosign container image signature"}
	c.Image.Digest = d.Digest.String()
	payload, err := json.Marshal(map[string]any{"critical": c, "optional": nil})
	if err != nil {
		return err
	}
	sig, err := p.key.SignFile(payload)
	if err != nil {
		return err
	}
	blob, err := l.Blob(signingType, payload)
	if err != nil {
		return err
	}
	blob.Annotations = map[string]string{"dev.cosignproject.cosign/signature": strings.TrimSpace(string(sig))}
	config := v1.ConfigFile{OS: "linux", Architecture: "amd64", RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{blob.Digest}}}
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Layers: []v1.Descriptor{blob}}
	if m.Config, err = l.JSON(types.OCIConfigJSON, config); err != nil {
		return err
	}
	manifest, err := l.JSON(types.OCIManifestSchema1, m)
	if err != nil {
		return err
	}
	l.Add(manifest, "sha256-"+d.Digest.Hex+".sig")
	return nil
}
