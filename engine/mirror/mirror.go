package mirror

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"constellation/engine/chart"
	"constellation/engine/release"
)

// Scheme is the prefix of registries: oci://registry.example.com/path. Other places are folders.
const Scheme = "oci://"

// Timeouts of a registry: to connect, and to send response headers.
const (
	dialTimeout   = 10 * time.Second
	headerTimeout = 60 * time.Second
)

// Options say what to copy where.
type Options struct {
	// From and To are folders or registries, see [Scheme].
	From, To string
	// Release is the release to copy. A folder with one release needs none.
	Release string
	// Keys verify the contents; nil accepts unsigned ones.
	Keys []release.Key
	// Feed has the files of a feed, which is copied too; it may be nil.
	Feed map[string][]byte
	// Images are images of Kubernetes, which are copied too, below the folder
	// [constellation/engine/registry.Kubernetes].
	Images []Image
	// ImagesFrom is a mirror, or a registry with the layout of the publisher's, that has Images;
	// empty: From if it has them, else their publisher's registry.
	ImagesFrom string
	// Stage is a folder for blobs on their way to a registry. It keeps parts for the next call.
	Stage string
	// Progress is called after each step; it may be nil.
	Progress func(Progress)
	// Transport sends requests to registries; nil means a default one.
	Transport http.RoundTripper
}

// Progress is what was copied.
type Progress struct {
	// Part is what was just finished, such as operator:v1.1.0; empty during a transfer.
	Part string
	// Parts of Total are finished.
	Parts, Total int
	// Bytes arrived in this call.
	Bytes int64
}

// Report is what a mirror has.
type Report struct {
	Release   string `json:"release"`
	Signer    string `json:"signer,omitempty"`
	Artifacts int    `json:"artifacts"`
	Files     int    `json:"files"`
	FeedFiles int    `json:"feedFiles"`
	// Images are the images of Kubernetes.
	Images []Copied `json:"images,omitempty"`
	// Bytes are those that this call transferred.
	Bytes int64 `json:"bytes"`
}

// Copy copies a release. It can be repeated: what exists is not copied again. The error of an
// image of Kubernetes is an [ImageError]. The error wraps one of the errors of package chart, [ErrContents], one of package release, or that of ctx.
func Copy(ctx context.Context, o Options) (Report, error) {
	from, err := o.sourceAt(o.From)
	if err != nil {
		return Report{}, err
	}
	to, err := o.destination()
	if err != nil {
		return Report{}, err
	}
	file, b, sig, err := from.contents(ctx, o.Release)
	if err != nil {
		return Report{}, err
	}
	c, signer, err := verify(b, sig, o.Keys)
	if err != nil {
		return Report{}, fmt.Errorf("verify %s: %w", file, err)
	}
	if o.Release != "" && c.Release != o.Release {
		return Report{}, fmt.Errorf("%w: %s is of release %s, want %s", ErrContents, file, c.Release, o.Release)
	}
	r := &run{Options: o, to: to}
	r.at.Total = len(c.Artifacts) + len(o.Images) + 1
	if len(o.Feed) > 0 {
		r.at.Total++
	}
	for _, a := range c.Artifacts {
		if err := r.manifest(ctx, origin{from, a}, a, a.descriptor(), a.Tag, 0); err != nil {
			return Report{}, fmt.Errorf("copy %s: %w", a, err)
		}
		r.finished(a.String())
	}
	var images []Copied
	for _, i := range o.Images {
		got, err := r.image(ctx, i)
		if err != nil {
			return Report{}, &ImageError{i.Reference, err}
		}
		images = append(images, got)
		r.finished(got.Name)
	}
	if len(o.Feed) > 0 {
		if err := to.feed(ctx, o.Feed); err != nil {
			return Report{}, fmt.Errorf("copy feed: %w", err)
		}
		r.finished("the feed")
	}
	// Last: a mirror that has the contents is complete.
	open := func(f File) opened {
		return func(ctx context.Context, offset int64) (io.ReadCloser, int64, error) {
			return from.file(ctx, c, f, offset)
		}
	}
	if err := to.files(ctx, c, namedFile{file, b}, sig, open, r.count); err != nil {
		return Report{}, err
	}
	r.finished("files")
	return Report{c.Release, signer, len(c.Artifacts), len(c.Files), len(o.Feed), images, r.at.Bytes}, nil
}

// run is one call of Copy.
type run struct {
	Options
	to destination
	at Progress
}

func (r *run) finished(part string) {
	r.at.Parts++
	if r.Progress != nil {
		p := r.at
		p.Part = part
		r.Progress(p)
	}
}

func (r *run) count(n int64) {
	r.at.Bytes += n
	if r.Progress != nil {
		r.Progress(r.at)
	}
}

// maxDepth bounds manifests that name manifests: an index of images has two levels.
const maxDepth = 3

// origin is where an artifact is copied from. Its repository may have another name there.
type origin struct {
	source
	Artifact
}

// manifest copies a manifest of an artifact with all that it names, its parts first.
func (r *run) manifest(ctx context.Context, from origin, a Artifact, d v1.Descriptor, tag string, depth int) error {
	b, err := from.fetchManifest(ctx, d)
	if err != nil {
		return err
	}
	var children, blobs []v1.Descriptor
	switch {
	case depth == maxDepth:
		return fmt.Errorf("%w: manifests are nested more than %d times", ErrContents, maxDepth)
	case d.MediaType.IsIndex():
		m, err := v1.ParseIndexManifest(strings.NewReader(string(b)))
		if err != nil {
			return fmt.Errorf("%w: %w", ErrContents, err)
		}
		children = m.Manifests
	default:
		m, err := v1.ParseManifest(strings.NewReader(string(b)))
		if err != nil {
			return fmt.Errorf("%w: %w", ErrContents, err)
		}
		blobs = append(slices.Clone(m.Layers), m.Config)
	}
	for _, child := range children {
		if !digestOK(child.Digest) || child.Size < 1 || child.Size > maxManifest {
			return fmt.Errorf("%w: manifest %s of %d bytes", ErrContents, child.Digest, child.Size)
		}
		if err := r.manifest(ctx, from, a, child, "", depth+1); err != nil {
			return err
		}
	}
	for _, blob := range blobs {
		if !blob.MediaType.IsDistributable() { // the layer of an OS that its owner alone serves
			continue
		}
		if !digestOK(blob.Digest) || blob.Size < 0 {
			return fmt.Errorf("%w: blob %s of %d bytes", ErrContents, blob.Digest, blob.Size)
		}
		open := func(ctx context.Context, offset int64) (io.ReadCloser, int64, error) {
			return from.blob(ctx, from.Artifact, blob, offset)
		}
		if err := r.to.blob(ctx, a, blob, open, r.count); err != nil {
			return fmt.Errorf("blob %s: %w", blob.Digest, err)
		}
	}
	return r.to.manifest(ctx, a, d, b, tag)
}

// fetchManifest reads a manifest and verifies its digest. It repeats as downloads do.
func (o origin) fetchManifest(ctx context.Context, d v1.Descriptor) (b []byte, err error) {
	err = repeat(ctx, unreachable, func() error {
		if b, err = o.manifest(ctx, o.Artifact, d); err == nil && digestOf(b) != d.Digest {
			err = fmt.Errorf("%w: manifest %s", chart.ErrDigest, d.Digest)
		}
		return err
	})
	return b, err
}

// sourceAt returns the source at a folder or registry.
func (o *Options) sourceAt(from string) (source, error) {
	if base, ok := strings.CutPrefix(from, Scheme); ok {
		r := &registry{base: strings.TrimSuffix(base, "/"), next: o.transport()}
		_, err := r.repository(releaseRepository)
		return r, err
	}
	dir, err := filepath.Abs(from)
	return folder{dir}, err
}

func (o *Options) destination() (destination, error) {
	if base, ok := strings.CutPrefix(o.To, Scheme); ok {
		r := &registry{base: strings.TrimSuffix(base, "/"), next: o.transport()}
		_, err := r.repository(releaseRepository)
		return &pushed{r, o.Stage}, err
	}
	dir, err := filepath.Abs(o.To)
	return stored{dir}, err
}

func (o *Options) transport() http.RoundTripper {
	if o.Transport != nil {
		return o.Transport
	}
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:   dialTimeout,
		ResponseHeaderTimeout: headerTimeout,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   4,
		IdleConnTimeout:       30 * time.Second,
	}
}
