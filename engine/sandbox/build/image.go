package build

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// images writes archives and adopts them.
func (b *builder) images(ctx context.Context, specs []imageSpec) error {
	if len(specs) == 0 {
		return nil
	}
	stage, remove, err := b.stage()
	if err != nil {
		return err
	}
	defer remove()
	for n, spec := range specs {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		out := filepath.Join(stage, spec.name)
		digest, err := b.image(spec, out)
		if err != nil {
			return b.fail("write image "+spec.ref, err)
		}
		r := record{Key: b.imageKey(b.recipe, spec), Image: digest}
		for _, name := range spec.programs() {
			r.From = append(r.From, "bin/"+name)
		}
		if spec.tools {
			r.From = append(r.From, toolsPath)
		}
		if err := b.adopt(out, spec.path(), r); err != nil {
			return b.fail("keep image "+spec.ref, err)
		}
		b.meter.advance(costImage, StageImage, fmt.Sprintf("wrote image %d of %d: %s", n+1, len(specs), spec.ref))
	}
	return nil
}

// image writes the archive of spec to out and returns the image's digest.
func (b *builder) image(spec imageSpec, out string) (string, error) {
	var layers []*fileLayer
	if spec.tools {
		tools, err := layerFromFile(b.path(toolsPath))
		if err != nil {
			return "", err
		}
		layers = append(layers, tools)
	}
	var files []string
	for _, name := range spec.programs() {
		files = append(files, b.path("bin/"+name))
	}
	layer, err := spec.layer(b.recipe.date, files[0], files[1:]...)
	if err != nil {
		return "", err
	}
	img, err := newImage(spec, b.recipe.date, append(layers, layer)...)
	if err != nil {
		return "", err
	}
	return writeArchive(out, spec.ref, img)
}

// layer makes the layer that has binary, programs beside it, and little else.
func (spec imageSpec) layer(date time.Time, binary string, beside ...string) (*fileLayer, error) {
	entries := append(slices.Clone(baseFiles), entry{path: spec.at, file: binary, mode: 0o755})
	for _, file := range beside {
		entries = append(entries, entry{path: path.Join(path.Dir(spec.at), filepath.Base(file)), file: file, mode: 0o755})
	}
	for at, target := range spec.links {
		entries = append(entries, entry{path: at, link: target})
	}
	return newLayer(date, entries)
}

// baseFiles are in every image: a place for temporary files, and names for the users
// that programs look up.
var baseFiles = []entry{
	{path: "/etc/passwd", content: "root:x:0:0:root:/:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n", mode: 0o644},
	{path: "/etc/group", content: "root:x:0:\nnobody:x:65534:\n", mode: 0o644},
	{path: "/tmp", dir: true, mode: 0o1777},
}

// newImage describes an image for this computer's architecture.
func newImage(spec imageSpec, date time.Time, layers ...*fileLayer) (v1.Image, error) {
	config := &v1.ConfigFile{
		Architecture: runtime.GOARCH,
		OS:           "linux",
		Created:      v1.Time{Time: date},
		Config: v1.Config{
			Entrypoint: spec.entrypoint,
			Cmd:        spec.cmd,
			User:       spec.user,
			WorkingDir: "/",
			Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		},
		RootFS: v1.RootFS{Type: "layers"},
	}
	img, err := mutate.ConfigFile(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON), config)
	if err != nil {
		return nil, fmt.Errorf("describe image: %w", err)
	}
	for _, l := range layers {
		img, err = mutate.Append(img, mutate.Addendum{
			Layer:   l,
			History: v1.History{Created: v1.Time{Time: date}, CreatedBy: "constellation"},
		})
		if err != nil {
			return nil, fmt.Errorf("describe image: %w", err)
		}
	}
	return img, nil
}

// An entry is one file of a layer: a regular file with content or the content of
// file, a link, or a directory. Directories above it need no entry.
type entry struct {
	path    string // absolute
	content string
	file    string
	link    string
	dir     bool
	mode    int64
}

// fileLayer is an uncompressed layer. Compression would cost more time than it saves:
// images travel from one directory of this computer to another.
type fileLayer struct {
	digest v1.Hash
	size   int64
	write  func(io.Writer) error
}

var _ v1.Layer = (*fileLayer)(nil)

// newLayer makes a layer of entries that is the same on every computer: sorted, owned
// by root, and as old as date. Files are read again whenever the layer is; they must
// not change meanwhile.
func newLayer(date time.Time, entries []entry) (*fileLayer, error) {
	all := make(map[string]entry)
	for _, e := range entries {
		all[e.path] = e
	}
	for _, e := range entries {
		for dir := path.Dir(e.path); dir != "/"; dir = path.Dir(dir) {
			if _, ok := all[dir]; !ok {
				all[dir] = entry{path: dir, dir: true, mode: 0o755}
			}
		}
	}
	sorted := slices.SortedFunc(maps.Values(all), func(a, b entry) int { return strings.Compare(a.path, b.path) })
	return measure(func(w io.Writer) error {
		t := tar.NewWriter(w)
		for _, e := range sorted {
			if err := e.writeTo(t, date); err != nil {
				return err
			}
		}
		return t.Close()
	})
}

// layerFromFile makes a layer of a tar file.
func layerFromFile(name string) (*fileLayer, error) {
	return measure(func(w io.Writer) error {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(w, f)
		return err
	})
}

func measure(write func(io.Writer) error) (*fileLayer, error) {
	h := sha256.New()
	n := &counter{}
	if err := write(io.MultiWriter(h, n)); err != nil {
		return nil, fmt.Errorf("make layer: %w", err)
	}
	return &fileLayer{digest: v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(h.Sum(nil))}, size: n.n, write: write}, nil
}

type counter struct{ n int64 }

func (c *counter) Write(p []byte) (int, error) { c.n += int64(len(p)); return len(p), nil }

func (e entry) writeTo(t *tar.Writer, date time.Time) error {
	h := &tar.Header{Name: strings.TrimPrefix(e.path, "/"), Mode: e.mode, ModTime: date, Format: tar.FormatUSTAR, Typeflag: tar.TypeReg}
	var content io.Reader
	switch {
	case e.dir:
		h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
	case e.link != "":
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, e.link, 0o777
	case e.file != "":
		f, err := os.Open(e.file)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return err
		}
		h.Size, content = info.Size(), f
	default:
		h.Size, content = int64(len(e.content)), strings.NewReader(e.content)
	}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	if content == nil {
		return nil
	}
	_, err := io.Copy(t, content)
	return err
}

func (l *fileLayer) writeFile(name string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(l.write(f), f.Close())
}

func (l *fileLayer) Digest() (v1.Hash, error)            { return l.digest, nil }
func (l *fileLayer) DiffID() (v1.Hash, error)            { return l.digest, nil }
func (l *fileLayer) Size() (int64, error)                { return l.size, nil }
func (l *fileLayer) MediaType() (types.MediaType, error) { return types.OCIUncompressedLayer, nil }
func (l *fileLayer) Compressed() (io.ReadCloser, error)  { return l.Uncompressed() }
func (l *fileLayer) Uncompressed() (io.ReadCloser, error) {
	r, w := io.Pipe()
	go func() { w.CloseWithError(l.write(w)) }() // ends when r is closed
	return r, nil
}

// Both are names that tools look for when they import an archive.
const (
	refAnnotation        = "org.opencontainers.image.ref.name"
	containerdAnnotation = "io.containerd.image.name"
)

// writeArchive writes img to a file as an OCI archive: an image layout in a tar file.
// It returns the digest of the image.
func writeArchive(name, ref string, img v1.Image) (digest string, err error) {
	f, err := os.Create(name)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()

	hash, err := img.Digest()
	if err != nil {
		return "", err
	}
	configName, err := img.ConfigName()
	if err != nil {
		return "", err
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return "", err
	}
	manifest, err := img.RawManifest()
	if err != nil {
		return "", err
	}
	_, tag, _ := strings.Cut(path.Base(ref), ":")
	index, err := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), mutate.IndexAddendum{
		Add: img,
		Descriptor: v1.Descriptor{
			MediaType:   types.OCIManifestSchema1,
			Platform:    &v1.Platform{OS: "linux", Architecture: runtime.GOARCH},
			Annotations: map[string]string{refAnnotation: tag, containerdAnnotation: ref},
		},
	}).RawManifest()
	if err != nil {
		return "", err
	}

	t := tar.NewWriter(f)
	for _, part := range []struct {
		name    string
		content []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{"index.json", index},
		{blobPath(hash), manifest},
		{blobPath(configName), config},
	} {
		if err := t.WriteHeader(&tar.Header{Name: part.name, Mode: 0o644, Size: int64(len(part.content)), Format: tar.FormatUSTAR}); err != nil {
			return "", err
		}
		if _, err := t.Write(part.content); err != nil {
			return "", err
		}
	}
	layers, err := img.Layers()
	if err != nil {
		return "", err
	}
	for _, l := range layers {
		h, err := l.Digest()
		if err != nil {
			return "", err
		}
		size, err := l.Size()
		if err != nil {
			return "", err
		}
		if err := t.WriteHeader(&tar.Header{Name: blobPath(h), Mode: 0o644, Size: size, Format: tar.FormatUSTAR}); err != nil {
			return "", err
		}
		content, err := l.Compressed()
		if err != nil {
			return "", err
		}
		_, err = io.Copy(t, content)
		if err := errors.Join(err, content.Close()); err != nil {
			return "", fmt.Errorf("write layer: %w", err)
		}
	}
	return hash.String(), t.Close()
}

// LoadImage opens the image in an OCI archive. Only its descriptions are read now,
// layers whenever they are asked for; the file must stay.
//
// It reads what this package writes: one image, with every blob in the archive.
func LoadImage(path string) (v1.Image, error) {
	img, err := loadImage(path)
	if err != nil {
		return nil, fmt.Errorf("load image %s: %w", filepath.Base(path), err)
	}
	return img, nil
}

func loadImage(name string) (v1.Image, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	a := &archive{name: name, parts: make(map[string]span)}
	for t := tar.NewReader(f); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		// The reader has read the header and nothing after it.
		at, err := f.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, err
		}
		a.parts[h.Name] = span{at, h.Size}
	}
	raw, err := a.read("index.json")
	if err != nil {
		return nil, err
	}
	index, err := v1.ParseIndexManifest(bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	if len(index.Manifests) != 1 {
		return nil, fmt.Errorf("read index: %d images where there should be one", len(index.Manifests))
	}
	d := index.Manifests[0]
	a.mediaType = d.MediaType
	if a.manifest, err = a.read(blobPath(d.Digest)); err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(a.manifest); hex.EncodeToString(sum[:]) != d.Digest.Hex {
		return nil, errors.New("read manifest: its digest is another")
	}
	if err := json.Unmarshal(a.manifest, &a.parsed); err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	return partial.CompressedToImage(a)
}

func blobPath(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

// An archive is an image whose blobs are parts of one file.
type archive struct {
	name      string
	parts     map[string]span
	mediaType types.MediaType
	manifest  []byte
	parsed    v1.Manifest
}

// A span is a part of a file.
type span struct{ at, size int64 }

var _ partial.CompressedImageCore = (*archive)(nil)

func (a *archive) open(part string) (io.ReadCloser, error) {
	s, ok := a.parts[part]
	if !ok {
		return nil, fmt.Errorf("open %s: %w", part, fs.ErrNotExist)
	}
	f, err := os.Open(a.name)
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.NewSectionReader(f, s.at, s.size), f}, nil
}

func (a *archive) read(part string) ([]byte, error) {
	r, err := a.open(part)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func (a *archive) MediaType() (types.MediaType, error) { return a.mediaType, nil }
func (a *archive) RawManifest() ([]byte, error)        { return a.manifest, nil }

func (a *archive) RawConfigFile() ([]byte, error) {
	return a.read(blobPath(a.parsed.Config.Digest))
}

func (a *archive) LayerByDigest(h v1.Hash) (partial.CompressedLayer, error) {
	for _, d := range append([]v1.Descriptor{a.parsed.Config}, a.parsed.Layers...) {
		if d.Digest == h {
			return blob{a, d}, nil
		}
	}
	return nil, fmt.Errorf("open layer %s: %w", h, fs.ErrNotExist)
}

// A blob is a layer, or the configuration, of an archive.
type blob struct {
	archive *archive
	v1.Descriptor
}

func (b blob) Digest() (v1.Hash, error)            { return b.Descriptor.Digest, nil }
func (b blob) Size() (int64, error)                { return b.Descriptor.Size, nil }
func (b blob) MediaType() (types.MediaType, error) { return b.Descriptor.MediaType, nil }
func (b blob) Compressed() (io.ReadCloser, error) {
	return b.archive.open(blobPath(b.Descriptor.Digest))
}
