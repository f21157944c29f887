package mirror

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"constellation/engine/chart"
	"constellation/internal/ocipack"
)

// Names in registries.
const (
	releaseRepository = "release"
	feedRepository    = "feed"

	releaseType                   = "application/vnd.constellation.release.v1+json"
	feedType                      = "application/vnd.constellation.feed.v1+json"
	contentsType  types.MediaType = "application/vnd.constellation.contents.v1+json"
	signatureType types.MediaType = "application/vnd.constellation.signature.v1"
	fileType      types.MediaType = "application/octet-stream"

	titleAnnotation = "org.opencontainers.image.title"
)

// attempts is the number of times that a transfer is tried. The backoff starts with pause and
// doubles; a registry may ask for a longer one, up to maxPause.
const (
	attempts = 4
	maxPause = 30 * time.Second
)

var pause = 500 * time.Millisecond

func digestOf(b []byte) v1.Hash {
	sum := sha256.Sum256(b)
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
}

func loopbackHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// opened opens a blob from at most offset on, and returns where it begins.
type opened func(ctx context.Context, offset int64) (io.ReadCloser, int64, error)

// download writes a blob to a file with verified content. It does not open the blob if the
// file has that content. It continues a part of an earlier download, in file.part. count gets the number of bytes that
// arrived.
func download(ctx context.Context, file string, d v1.Descriptor, open opened, count func(int64)) error {
	if ok, err := matches(file, d); ok || err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	part := file + ".part"
	err := repeat(ctx, func(err error) bool { return errors.Is(err, chart.ErrUnreachable) || errors.Is(err, chart.ErrDigest) }, func() error {
		return continueDownload(ctx, part, d, open, count)
	})
	if err != nil {
		return err
	}
	return os.Rename(part, file)
}

// repeat does something again with backoff while again returns true for its error.
func repeat(ctx context.Context, again func(error) bool, do func() error) error {
	for n, wait := 1, pause; ; n, wait = n+1, 2*wait {
		err := do()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case n == attempts || !again(err):
			return err
		}
		var t *throttled
		if errors.As(err, &t) {
			wait = min(max(wait, t.after), maxPause)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
	}
}

// unreachable reports whether a registry may answer later.
func unreachable(err error) bool { return errors.Is(err, chart.ErrUnreachable) }

// continueDownload appends to part what is missing. After a wrong digest the part is removed.
func continueDownload(ctx context.Context, part string, d v1.Descriptor, open opened, count func(int64)) (err error) {
	f, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	sum := sha256.New()
	have, err := io.Copy(sum, io.LimitReader(f, d.Size))
	if err != nil {
		return err
	}
	if have < d.Size {
		err = fill(ctx, f, sum, have, d, open, count)
	} else {
		err = f.Truncate(d.Size)
	}
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != d.Digest.Hex {
		return errors.Join(fmt.Errorf("%w: got sha256:%s, want %s", chart.ErrDigest, got, d.Digest), os.Remove(part))
	}
	return f.Sync()
}

// fill reads the rest of a blob into f, and into sum what is in f already.
func fill(ctx context.Context, f *os.File, sum hash.Hash, have int64, d v1.Descriptor, open opened, count func(int64)) error {
	body, at, err := open(ctx, have)
	if err != nil {
		return err
	}
	defer body.Close()
	if at != have { // from the start
		have = at
		sum.Reset()
	}
	if _, err := f.Seek(have, io.SeekStart); err != nil {
		return err
	}
	if err := f.Truncate(have); err != nil {
		return err
	}
	// An endless body is cut one byte after the size that the manifest names.
	from := &readError{r: io.LimitReader(body, d.Size-have+1)}
	n, err := io.Copy(io.MultiWriter(f, sum, counter(count)), from)
	have += n
	switch {
	case from.err != nil:
		return fmt.Errorf("%w: the transfer ended after %d of %d bytes", chart.ErrUnreachable, have, d.Size)
	case err != nil: // of the file
		return err
	case have > d.Size:
		return errors.Join(fmt.Errorf("%w: more than %d bytes arrived", chart.ErrDigest, d.Size), f.Truncate(0))
	case have < d.Size:
		return fmt.Errorf("%w: the transfer ended after %d of %d bytes", chart.ErrUnreachable, have, d.Size)
	}
	return nil
}

// readError keeps the error of a reader, to tell it from one of the writer.
type readError struct {
	r   io.Reader
	err error
}

func (r *readError) Read(b []byte) (int, error) {
	n, err := r.r.Read(b)
	if err != nil && err != io.EOF {
		r.err = err
	}
	return n, err
}

type counter func(int64)

func (c counter) Write(b []byte) (int, error) { c(int64(len(b))); return len(b), nil }

// matches reports whether a file has a size and a digest.
func matches(file string, d v1.Descriptor) (bool, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() != d.Size {
		return false, err
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return false, err
	}
	return hex.EncodeToString(sum.Sum(nil)) == d.Digest.Hex, nil
}

// destination gets the parts of a release.
type destination interface {
	// blob stores a blob of an artifact unless it exists.
	blob(ctx context.Context, a Artifact, d v1.Descriptor, open opened, count func(int64)) error
	// manifest stores a manifest whose parts are stored. tag may be empty.
	manifest(ctx context.Context, a Artifact, d v1.Descriptor, b []byte, tag string) error
	// files stores the files of the release, the signed contents last.
	files(ctx context.Context, c *Contents, contents namedFile, sig []byte, open func(File) opened, count func(int64)) error
	// feed stores the files of a feed.
	feed(ctx context.Context, files map[string][]byte) error
}

type namedFile struct {
	name    string
	content []byte
}

// stored is a folder with a release.
type stored struct{ dir string }

func (s stored) blob(ctx context.Context, a Artifact, d v1.Descriptor, open opened, count func(int64)) error {
	return download(ctx, folder(s).blobPath(a, d), d, open, count)
}

func (s stored) manifest(_ context.Context, a Artifact, d v1.Descriptor, b []byte, tag string) error {
	if err := replaceFile(folder(s).blobPath(a, d), b); err != nil {
		return err
	}
	if a.Digest != d.Digest { // a part of the artifact
		return nil
	}
	dir := filepath.Join(s.dir, filepath.FromSlash(a.Layout))
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	if b, err := readAtMost(filepath.Join(dir, "index.json"), maxManifest); err == nil {
		if err := json.Unmarshal(b, &index); err != nil {
			return fmt.Errorf("read index of %s: %w", dir, err)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	index.Manifests = slices.DeleteFunc(index.Manifests, func(o v1.Descriptor) bool {
		return o.Digest == d.Digest || tag != "" && o.Annotations[ocipack.TagAnnotation] == tag
	})
	if tag != "" {
		d.Annotations = map[string]string{ocipack.TagAnnotation: tag}
	}
	index.Manifests = append(index.Manifests, d)
	out, err := json.Marshal(index)
	if err != nil {
		return err
	}
	if err := replaceFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	return replaceFile(filepath.Join(dir, "index.json"), out)
}

func (s stored) files(ctx context.Context, c *Contents, contents namedFile, sig []byte, open func(File) opened, count func(int64)) error {
	for _, f := range c.Files {
		if err := download(ctx, filepath.Join(s.dir, f.Name), f.descriptor(), open(f), count); err != nil {
			return fmt.Errorf("copy %s: %w", f.Name, err)
		}
	}
	if len(sig) > 0 {
		if err := replaceFile(filepath.Join(s.dir, contents.name+signatureSuffix), sig); err != nil {
			return err
		}
	}
	return replaceFile(filepath.Join(s.dir, contents.name), contents.content)
}

func (s stored) feed(_ context.Context, files map[string][]byte) error {
	// The index is last, so that it never names files that are not there.
	for _, name := range feedOrder(files) {
		if err := replaceFile(filepath.Join(s.dir, feedRepository, filepath.FromSlash(name)), files[name]); err != nil {
			return err
		}
	}
	return nil
}

// feedOrder returns the names of a feed's files, those of the index last.
func feedOrder(files map[string][]byte) []string {
	var names []string
	for name := range files {
		names = append(names, name)
	}
	last := func(name string) int {
		if strings.HasPrefix(name, "index.json") {
			return 1
		}
		return 0
	}
	slices.SortFunc(names, func(a, b string) int {
		if d := last(a) - last(b); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	return names
}

// replaceFile writes a file at once, unless it has the content already.
func replaceFile(file string, b []byte) error {
	if ok, err := matches(file, v1.Descriptor{Digest: digestOf(b), Size: int64(len(b))}); ok || err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(file), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// pushed is a registry with a release.
type pushed struct {
	*registry
	// stage has blobs between their download and their upload.
	stage string
}

func (p *pushed) options(ctx context.Context) []remote.Option {
	return []remote.Option{
		remote.WithContext(ctx), remote.WithTransport(p.next), remote.WithUserAgent("constellation"), remote.WithAuthFromKeychain(chart.Keychain()),
		remote.WithRetryBackoff(remote.Backoff{Duration: pause, Steps: 1}), // see repeat
	}
}

func (p *pushed) blob(ctx context.Context, a Artifact, d v1.Descriptor, open opened, count func(int64)) error {
	repo, err := p.repository(a.Repository)
	if err != nil {
		return err
	}
	there := false
	err = repeat(ctx, unreachable, func() error {
		l, err := remote.Layer(repo.Digest(d.Digest.String()), p.options(ctx)...)
		var size int64
		if err == nil {
			size, err = l.Size()
		}
		if err == nil {
			there = size == d.Size
			return nil
		}
		if err = chart.RegistryError(err); errors.Is(err, chart.ErrAbsent) {
			return nil
		}
		return err
	})
	if err != nil || there {
		return err
	}
	file := filepath.Join(p.stage, d.Digest.Hex)
	if err := download(ctx, file, d, open, count); err != nil {
		return err
	}
	err = repeat(ctx, unreachable, func() error {
		if err := remote.WriteLayer(repo, &fileLayer{d, file}, p.options(ctx)...); err != nil {
			return fmt.Errorf("upload to %s: %w", repo, chart.RegistryError(err))
		}
		return nil
	})
	if err != nil {
		return err
	}
	return os.Remove(file)
}

func (p *pushed) manifest(ctx context.Context, a Artifact, d v1.Descriptor, b []byte, tag string) error {
	repo, err := p.repository(a.Repository)
	if err != nil {
		return err
	}
	refs := []name.Reference{repo.Digest(d.Digest.String())}
	if tag != "" {
		refs = append(refs, repo.Tag(tag))
	}
	for _, ref := range refs {
		err := repeat(ctx, unreachable, func() error {
			if err := remote.Put(ref, rawManifest{d.MediaType, b}, p.options(ctx)...); err != nil {
				return fmt.Errorf("upload to %s: %w", ref, chart.RegistryError(err))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *pushed) files(ctx context.Context, c *Contents, contents namedFile, sig []byte, open func(File) opened, count func(int64)) error {
	var layers []v1.Descriptor
	add := func(d v1.Descriptor, open opened) error {
		layers = append(layers, d)
		if err := p.blob(ctx, Artifact{Repository: releaseRepository}, d, open, count); err != nil {
			return fmt.Errorf("copy %s: %w", d.Annotations[titleAnnotation], err)
		}
		return nil
	}
	titled := func(t types.MediaType, name string, b []byte) error {
		return add(v1.Descriptor{MediaType: t, Digest: digestOf(b), Size: int64(len(b)), Annotations: map[string]string{titleAnnotation: name}}, inMemory(b))
	}
	if err := titled(contentsType, contents.name, contents.content); err != nil {
		return err
	}
	if len(sig) > 0 {
		if err := titled(signatureType, contents.name+signatureSuffix, sig); err != nil {
			return err
		}
	}
	for _, f := range c.Files {
		if err := add(f.descriptor(), open(f)); err != nil {
			return err
		}
	}
	return p.artifact(ctx, releaseRepository, releaseType, c.Release, layers)
}

func (p *pushed) feed(ctx context.Context, files map[string][]byte) error {
	var layers []v1.Descriptor
	for _, name := range feedOrder(files) {
		b := files[name]
		d := v1.Descriptor{MediaType: fileType, Digest: digestOf(b), Size: int64(len(b)), Annotations: map[string]string{titleAnnotation: name}}
		layers = append(layers, d)
		if err := p.blob(ctx, Artifact{Repository: feedRepository}, d, inMemory(b), func(int64) {}); err != nil {
			return fmt.Errorf("copy %s of the feed: %w", name, err)
		}
	}
	return p.artifact(ctx, feedRepository, feedType, "latest", layers)
}

// artifact stores the manifest of files.
func (p *pushed) artifact(ctx context.Context, repository, artifactType, tag string, layers []v1.Descriptor) error {
	empty := []byte("{}")
	config := v1.Descriptor{MediaType: ocipack.EmptyType, Digest: digestOf(empty), Size: int64(len(empty))}
	at := Artifact{Repository: repository}
	if err := p.blob(ctx, at, config, inMemory(empty), func(int64) {}); err != nil {
		return err
	}
	b, err := json.Marshal(v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, ArtifactType: artifactType, Config: config, Layers: layers})
	if err != nil {
		return err
	}
	return p.manifest(ctx, at, v1.Descriptor{MediaType: types.OCIManifestSchema1, Digest: digestOf(b), Size: int64(len(b))}, b, tag)
}

// inMemory opens bytes.
func inMemory(b []byte) opened {
	return func(_ context.Context, offset int64) (io.ReadCloser, int64, error) {
		return io.NopCloser(strings.NewReader(string(b[offset:]))), offset, nil
	}
}

// fileLayer is a blob in a file, for the registry client.
type fileLayer struct {
	v1.Descriptor
	name string
}

func (l *fileLayer) Digest() (v1.Hash, error)             { return l.Descriptor.Digest, nil }
func (l *fileLayer) DiffID() (v1.Hash, error)             { return l.Descriptor.Digest, nil }
func (l *fileLayer) Size() (int64, error)                 { return l.Descriptor.Size, nil }
func (l *fileLayer) MediaType() (types.MediaType, error)  { return l.Descriptor.MediaType, nil }
func (l *fileLayer) Compressed() (io.ReadCloser, error)   { return os.Open(l.name) }
func (l *fileLayer) Uncompressed() (io.ReadCloser, error) { return os.Open(l.name) }

// rawManifest is a manifest, for the registry client.
type rawManifest struct {
	mediaType types.MediaType
	b         []byte
}

func (m rawManifest) RawManifest() ([]byte, error)        { return m.b, nil }
func (m rawManifest) MediaType() (types.MediaType, error) { return m.mediaType, nil }
