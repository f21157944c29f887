package ocipack

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Both are names that tools look for when they import an archive.
const (
	refAnnotation        = "org.opencontainers.image.ref.name"
	containerdAnnotation = "io.containerd.image.name"
)

// WriteArchive writes img to a file as an OCI archive: an image layout in a tar file.
// It returns the digest of the image.
func WriteArchive(name, ref string, img v1.Image) (digest string, err error) {
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

// LoadArchive opens the image in an OCI archive. Only its descriptions are read now, layers whenever
// they are asked for; the file must stay.
//
// It reads what [WriteArchive] writes: one image, with every blob in the archive.
func LoadArchive(name string) (v1.Image, error) {
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
