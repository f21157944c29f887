package ocipack

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// TagAnnotation is the annotation of a descriptor in the index of a layout: its tag.
const TagAnnotation = refAnnotation

// EmptyType is the media type of the empty configuration of an artifact.
const EmptyType types.MediaType = "application/vnd.oci.empty.v1+json"

// Layout writes an OCI image layout, a folder. The caller ends it with Close.
type Layout struct {
	dir   string
	index v1.IndexManifest
}

// NewLayout starts a layout in a folder.
func NewLayout(dir string) (*Layout, error) {
	l := &Layout{dir, v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{}}}
	return l, os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o755)
}

// Blob writes a blob.
func (l *Layout) Blob(mediaType types.MediaType, b []byte) (v1.Descriptor, error) {
	return l.stream(mediaType, bytes.NewReader(b))
}

// stream writes a blob of unknown digest.
func (l *Layout) stream(mediaType types.MediaType, r io.Reader) (v1.Descriptor, error) {
	d := v1.Descriptor{MediaType: mediaType}
	f, err := os.CreateTemp(l.dir, ".blob-*")
	if err != nil {
		return d, err
	}
	defer os.Remove(f.Name()) // renamed by then, if all went well
	sum := sha256.New()
	d.Size, err = io.Copy(io.MultiWriter(f, sum), r)
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return d, err
	}
	d.Digest = v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}
	return d, os.Rename(f.Name(), filepath.Join(l.dir, blobPath(d.Digest)))
}

// JSON writes a blob with the JSON of v.
func (l *Layout) JSON(mediaType types.MediaType, v any) (v1.Descriptor, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return v1.Descriptor{}, err
	}
	return l.Blob(mediaType, b)
}

// Image writes an image and returns the descriptor of its manifest, with its platform.
func (l *Layout) Image(img v1.Image) (v1.Descriptor, error) {
	layers, err := img.Layers()
	if err != nil {
		return v1.Descriptor{}, err
	}
	for _, layer := range layers {
		mediaType, err := layer.MediaType()
		if err != nil {
			return v1.Descriptor{}, err
		}
		r, err := layer.Compressed()
		if err != nil {
			return v1.Descriptor{}, err
		}
		_, err = l.stream(mediaType, r)
		if err := errors.Join(err, r.Close()); err != nil {
			return v1.Descriptor{}, err
		}
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return v1.Descriptor{}, err
	}
	if _, err := l.Blob(types.OCIConfigJSON, config); err != nil {
		return v1.Descriptor{}, err
	}
	manifest, err := img.RawManifest()
	if err != nil {
		return v1.Descriptor{}, err
	}
	d, err := l.Blob(types.OCIManifestSchema1, manifest)
	if err != nil {
		return d, err
	}
	c, err := img.ConfigFile()
	if err == nil && c.OS != "" {
		d.Platform = &v1.Platform{OS: c.OS, Architecture: c.Architecture}
	}
	return d, err
}

// Artifact writes the manifest of an artifact that is no image: its blobs, and the manifest that it
// is about, if any.
func (l *Layout) Artifact(artifactType string, subject *v1.Descriptor, blobs ...v1.Descriptor) (v1.Descriptor, error) {
	config, err := l.Blob(EmptyType, []byte("{}"))
	if err != nil {
		return v1.Descriptor{}, err
	}
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, ArtifactType: artifactType, Config: config, Layers: blobs}
	if subject != nil {
		m.Subject = &v1.Descriptor{MediaType: subject.MediaType, Size: subject.Size, Digest: subject.Digest}
	}
	d, err := l.JSON(types.OCIManifestSchema1, m)
	d.ArtifactType = artifactType
	return d, err
}

// Add adds a manifest to the index of the layout. tag may be empty.
func (l *Layout) Add(d v1.Descriptor, tag string) {
	if tag != "" {
		d.Annotations = map[string]string{TagAnnotation: tag}
	}
	l.index.Manifests = append(l.index.Manifests, d)
}

// Close writes the index.
func (l *Layout) Close() error {
	index, err := json.Marshal(l.index)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(l.dir, "index.json"), index, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(l.dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
}
