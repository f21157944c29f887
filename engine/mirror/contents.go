// Package mirror copies a release to another registry or folder: container images, charts, files
// and the feed. Everything is copied by digest. What exists at the destination is not copied again,
// and a cut download continues where it ended.
//
// A release in a folder is what `make release` writes: files, and one OCI layout per image and
// chart. In a registry, each layout is a repository, and the files are the layers of the artifact
// "release". The signed file of contents names all of them, so a mirror adds no trust and can be
// the source of the next one.
package mirror

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"constellation/engine/release"
)

// Names of the files of contents in a folder: the prefix, the version and the suffix.
const (
	ContentsPrefix  = "constellation_"
	ContentsSuffix  = "_contents.json"
	signatureSuffix = ".sig"
)

// schema is the version of the format of contents.
const schema = "1"

// Limits of what a registry sends, in bytes.
const (
	maxContents = 1 << 20
	maxManifest = 4 << 20
)

// Contents lists all parts of a release.
type Contents struct {
	Schema  string `json:"schema"`
	Release string `json:"release"`
	// Artifacts are the manifests of images and charts, with signatures and SBOMs.
	Artifacts []Artifact `json:"artifacts"`
	// Files are the files beside the layouts.
	Files []File `json:"files"`
}

// Artifact is a manifest in a layout or repository.
type Artifact struct {
	// Repository is the path below the registry, such as operator or charts/constellation-plans.
	Repository string `json:"repository"`
	// Layout is the folder of the OCI layout, relative to that of the release.
	Layout string `json:"layout"`
	// Tag is empty for what is found by its subject alone, such as an SBOM.
	Tag       string          `json:"tag,omitempty"`
	MediaType types.MediaType `json:"mediaType"`
	Digest    v1.Hash         `json:"digest"`
	Size      int64           `json:"size"`
}

func (a Artifact) descriptor() v1.Descriptor {
	return v1.Descriptor{MediaType: a.MediaType, Digest: a.Digest, Size: a.Size}
}

func (a Artifact) String() string {
	if a.Tag == "" {
		return a.Repository + "@" + a.Digest.String()
	}
	return a.Repository + ":" + a.Tag
}

// File is a file of a release.
type File struct {
	Name   string  `json:"name"`
	Digest v1.Hash `json:"digest"`
	Size   int64   `json:"size"`
}

func (f File) descriptor() v1.Descriptor {
	return v1.Descriptor{MediaType: fileType, Digest: f.Digest, Size: f.Size, Annotations: map[string]string{titleAnnotation: f.Name}}
}

// ErrContents means that a file of contents is not one of ours, or names what it must not.
var ErrContents = errors.New("invalid file of contents")

var (
	repositoryRE = regexp.MustCompile(`^[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$`)
	tagRE        = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
)

// Parse reads contents and checks every name in it.
func Parse(b []byte) (*Contents, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var c Contents
	if err := d.Decode(&c); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrContents, err)
	}
	if c.Schema != schema {
		return nil, fmt.Errorf("%w: schema is %q, want %q", ErrContents, c.Schema, schema)
	}
	if !tagRE.MatchString(c.Release) {
		return nil, fmt.Errorf("%w: release is %q", ErrContents, c.Release)
	}
	for _, a := range c.Artifacts {
		switch {
		case !repositoryRE.MatchString(a.Repository) || reserved(a.Repository):
			return nil, fmt.Errorf("%w: repository %q", ErrContents, a.Repository)
		case !fs.ValidPath(a.Layout) || a.Layout == "." || strings.Contains(a.Layout, `\`):
			return nil, fmt.Errorf("%w: layout %q", ErrContents, a.Layout)
		case a.Tag != "" && !tagRE.MatchString(a.Tag):
			return nil, fmt.Errorf("%w: tag %q", ErrContents, a.Tag)
		case !digestOK(a.Digest) || a.Size < 1 || a.Size > maxManifest:
			return nil, fmt.Errorf("%w: %s has digest %s and size %d", ErrContents, a.Repository, a.Digest, a.Size)
		case !a.MediaType.IsIndex() && !a.MediaType.IsImage():
			return nil, fmt.Errorf("%w: %s has type %q", ErrContents, a.Repository, a.MediaType)
		}
	}
	for _, f := range c.Files {
		if f.Name != path.Base(f.Name) || !fs.ValidPath(f.Name) || f.Name == "." || strings.Contains(f.Name, `\`) || !digestOK(f.Digest) || f.Size < 0 {
			return nil, fmt.Errorf("%w: file %q", ErrContents, f.Name)
		}
	}
	return &c, nil
}

// reserved reports whether this package stores files in a repository.
func reserved(repository string) bool {
	return slices.Contains([]string{releaseRepository, feedRepository}, repository)
}

var hexRE = regexp.MustCompile(`^[0-9a-f]{64}$`)

func digestOK(h v1.Hash) bool { return h.Algorithm == "sha256" && hexRE.MatchString(h.Hex) }

// verify parses contents and verifies their signature, unless keys is nil.
func verify(b, sig []byte, keys []release.Key) (*Contents, string, error) {
	signer := ""
	if keys != nil {
		if len(sig) == 0 {
			return nil, "", fmt.Errorf("%w: it has no signature", release.ErrUntrusted)
		}
		k, err := release.VerifyFile(b, sig, keys)
		if err != nil {
			return nil, "", err
		}
		signer = k.String()
	}
	c, err := Parse(b)
	return c, signer, err
}
