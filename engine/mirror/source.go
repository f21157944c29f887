package mirror

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"constellation/engine/chart"
	"constellation/internal/ocipack"
)

// source has the parts of a release.
type source interface {
	// contents returns the file of contents and its signature, which is empty without one.
	contents(ctx context.Context, release string) (file string, b, sig []byte, err error)
	// manifest returns a manifest of an artifact. It is not verified.
	manifest(ctx context.Context, a Artifact, d v1.Descriptor) ([]byte, error)
	// blob returns a blob of an artifact from at most offset on, and where it begins. It is not
	// verified.
	blob(ctx context.Context, a Artifact, d v1.Descriptor, offset int64) (io.ReadCloser, int64, error)
	// tagged returns what the tag of an artifact names. Only the repository, layout and tag of the
	// artifact are read.
	tagged(ctx context.Context, a Artifact) (v1.Descriptor, error)
	// file is blob for a file of the release.
	file(ctx context.Context, c *Contents, f File, offset int64) (io.ReadCloser, int64, error)
}

// folder is a release in a folder.
type folder struct{ dir string }

func (f folder) contents(_ context.Context, release string) (string, []byte, []byte, error) {
	names, err := filepath.Glob(filepath.Join(f.dir, ContentsPrefix+"*"+ContentsSuffix))
	if err != nil {
		return "", nil, nil, err
	}
	var found []string
	for _, n := range names {
		b, err := readAtMost(n, maxContents)
		if err != nil {
			return "", nil, nil, err
		}
		if c, err := Parse(b); err != nil || release == "" || c.Release == release {
			found = append(found, n)
		}
	}
	switch {
	case len(found) == 0:
		return "", nil, nil, fmt.Errorf("%w: %s has no file %s*%s", chart.ErrAbsent, f.dir, ContentsPrefix, ContentsSuffix)
	case len(found) > 1:
		return "", nil, nil, fmt.Errorf("%w: %s has %d files %s*%s, want one", ErrContents, f.dir, len(found), ContentsPrefix, ContentsSuffix)
	}
	b, err := readAtMost(found[0], maxContents)
	if err != nil {
		return "", nil, nil, err
	}
	sig, err := readAtMost(found[0]+signatureSuffix, maxContents)
	if errors.Is(err, fs.ErrNotExist) {
		sig, err = nil, nil
	}
	return filepath.Base(found[0]), b, sig, err
}

func (f folder) manifest(_ context.Context, a Artifact, d v1.Descriptor) ([]byte, error) {
	return readAtMost(f.blobPath(a, d), maxManifest)
}

func (f folder) blob(_ context.Context, a Artifact, d v1.Descriptor, offset int64) (io.ReadCloser, int64, error) {
	return openAt(f.blobPath(a, d), offset)
}

func (f folder) tagged(_ context.Context, a Artifact) (v1.Descriptor, error) {
	file := filepath.Join(f.dir, filepath.FromSlash(a.Layout), "index.json")
	b, err := readAtMost(file, maxManifest)
	if err != nil {
		return v1.Descriptor{}, err
	}
	index, err := v1.ParseIndexManifest(bytes.NewReader(b))
	if err != nil {
		return v1.Descriptor{}, fmt.Errorf("%w: %s: %w", ErrContents, file, err)
	}
	for _, d := range index.Manifests {
		if d.Annotations[ocipack.TagAnnotation] == a.Tag {
			return v1.Descriptor{MediaType: d.MediaType, Digest: d.Digest, Size: d.Size}, nil
		}
	}
	return v1.Descriptor{}, fmt.Errorf("%w: %s has no tag %s", chart.ErrAbsent, file, a.Tag)
}

func (f folder) file(_ context.Context, _ *Contents, file File, offset int64) (io.ReadCloser, int64, error) {
	return openAt(filepath.Join(f.dir, file.Name), offset)
}

func (f folder) blobPath(a Artifact, d v1.Descriptor) string {
	return filepath.Join(f.dir, filepath.FromSlash(a.Layout), "blobs", "sha256", d.Digest.Hex)
}

func openAt(file string, offset int64) (io.ReadCloser, int64, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, 0, absent(err)
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, offset, nil
}

// readAtMost reads a file that must not be larger than limit.
func readAtMost(file string, limit int64) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, absent(err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%w: %s has more than %d bytes", ErrContents, file, limit)
	}
	return b, err
}

func absent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", chart.ErrAbsent, err)
	}
	return err
}

// registry is a release in a registry.
type registry struct {
	base string // registry and path, such as registry.example.com/mirror
	next http.RoundTripper

	mu      sync.Mutex
	clients map[string]*http.Client // by repository and scope
}

// repository returns the repository of a path below the base.
func (r *registry) repository(at string) (name.Repository, error) {
	var o []name.Option
	if host, _, _ := strings.Cut(r.base, "/"); loopbackHost(host) {
		o = append(o, name.Insecure) // http on this computer alone
	}
	repo, err := name.NewRepository(path.Join(r.base, at), append(o, name.StrictValidation)...)
	if err != nil {
		return repo, fmt.Errorf("read registry %q: %w", r.base, err)
	}
	return repo, nil
}

// client returns a client with the credentials for a repository.
func (r *registry) client(ctx context.Context, repo name.Repository, scope string) (*http.Client, error) {
	key := repo.Name() + " " + scope
	r.mu.Lock()
	c := r.clients[key]
	r.mu.Unlock()
	if c != nil {
		return c, nil
	}
	auth, err := chart.Keychain().Resolve(repo)
	if err != nil {
		return nil, fmt.Errorf("read credentials of %s: %w", repo.RegistryStr(), err)
	}
	t, err := transport.NewWithContext(ctx, repo.Registry, auth, r.next, []string{repo.Scope(scope)})
	if err != nil {
		return nil, chart.RegistryError(err)
	}
	c = &http.Client{Transport: t}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.clients == nil {
		r.clients = map[string]*http.Client{}
	}
	r.clients[key] = c
	return c, nil
}

// get requests a part of a repository. The caller closes the body.
func (r *registry) get(ctx context.Context, at, kind, reference string, accept []types.MediaType, bytes string) (*http.Response, error) {
	repo, err := r.repository(at)
	if err != nil {
		return nil, err
	}
	c, err := r.client(ctx, repo, transport.PullScope)
	if err != nil {
		return nil, err
	}
	u := url.URL{Scheme: repo.Scheme(), Host: repo.RegistryStr(), Path: path.Join("/v2", repo.RepositoryStr(), kind, reference)}
	ctx, cancel := context.WithCancelCause(ctx)
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		cancel(nil)
		return nil, err
	}
	q.Header.Set("User-Agent", "constellation")
	q.Header.Set("Accept-Encoding", "identity")
	for _, t := range accept {
		q.Header.Add("Accept", string(t))
	}
	if bytes != "" {
		q.Header.Set("Range", "bytes="+bytes)
	}
	res, err := c.Do(q)
	if err != nil {
		cancel(nil)
		return nil, chart.RegistryError(err)
	}
	res.Body = &watched{res.Body, time.AfterFunc(idle, func() { cancel(errIdle) }), cancel}
	if res.StatusCode == http.StatusOK || bytes != "" && (res.StatusCode == http.StatusPartialContent || res.StatusCode == http.StatusRequestedRangeNotSatisfiable) {
		return res, nil
	}
	res.Body.Close()
	err = chart.RegistryError(&transport.Error{StatusCode: res.StatusCode, Request: q})
	if s, aerr := strconv.Atoi(res.Header.Get("Retry-After")); aerr == nil && s > 0 {
		err = &throttled{err, time.Duration(s) * time.Second}
	}
	return nil, err
}

// idle is how long a registry may send nothing in the middle of a body.
var idle = time.Minute

var errIdle = errors.New("the registry sent nothing for too long")

// watched is a body that ends with an error if its registry stops sending.
type watched struct {
	io.ReadCloser
	timer  *time.Timer
	cancel context.CancelCauseFunc
}

func (w *watched) Read(b []byte) (int, error) {
	n, err := w.ReadCloser.Read(b)
	w.timer.Reset(idle)
	return n, err
}

func (w *watched) Close() error {
	w.timer.Stop()
	w.cancel(nil)
	return w.ReadCloser.Close()
}

// throttled is an error with the delay that the registry requested.
type throttled struct {
	error
	after time.Duration
}

func (t *throttled) Unwrap() error { return t.error }

func (r *registry) contents(ctx context.Context, release string) (string, []byte, []byte, error) {
	res, err := r.get(ctx, releaseRepository, "manifests", release, []types.MediaType{types.OCIManifestSchema1}, "")
	if err != nil {
		return "", nil, nil, fmt.Errorf("read %s/%s:%s: %w", r.base, releaseRepository, release, err)
	}
	defer res.Body.Close()
	m, err := v1.ParseManifest(io.LimitReader(res.Body, maxManifest))
	if err != nil {
		return "", nil, nil, fmt.Errorf("%w: manifest of %s/%s:%s: %w", ErrContents, r.base, releaseRepository, release, err)
	}
	file, b, sig := "", []byte(nil), []byte(nil)
	for _, d := range m.Layers {
		title := d.Annotations[titleAnnotation]
		if d.MediaType != contentsType && d.MediaType != signatureType {
			continue
		}
		if d.Size > maxContents || !digestOK(d.Digest) || title != path.Base(title) {
			return "", nil, nil, fmt.Errorf("%w: layer %q of %d bytes", ErrContents, title, d.Size)
		}
		body, _, err := r.blob(ctx, Artifact{Repository: releaseRepository}, d, 0)
		if err != nil {
			return "", nil, nil, err
		}
		got, err := io.ReadAll(io.LimitReader(body, d.Size+1))
		body.Close()
		switch {
		case err != nil:
			return "", nil, nil, chart.RegistryError(err)
		case digestOf(got) != d.Digest:
			return "", nil, nil, fmt.Errorf("%w: %s of %s", chart.ErrDigest, title, r.base)
		case d.MediaType == contentsType:
			file, b = title, got
		default:
			sig = got
		}
	}
	if b == nil {
		return "", nil, nil, fmt.Errorf("%w: %s/%s:%s names none", ErrContents, r.base, releaseRepository, release)
	}
	return file, b, sig, nil
}

func (r *registry) manifest(ctx context.Context, a Artifact, d v1.Descriptor) ([]byte, error) {
	res, err := r.get(ctx, a.Repository, "manifests", d.Digest.String(), []types.MediaType{d.MediaType}, "")
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, d.Size+1))
	if err != nil {
		return nil, chart.RegistryError(err)
	}
	return b, nil
}

// manifestTypes are those of images and of indexes of images.
var manifestTypes = []types.MediaType{types.OCIImageIndex, types.DockerManifestList, types.OCIManifestSchema1, types.DockerManifestSchema2}

func (r *registry) tagged(ctx context.Context, a Artifact) (d v1.Descriptor, err error) {
	err = repeat(ctx, unreachable, func() error {
		res, err := r.get(ctx, a.Repository, "manifests", a.Tag, manifestTypes, "")
		if err != nil {
			return err
		}
		defer res.Body.Close()
		b, err := io.ReadAll(io.LimitReader(res.Body, maxManifest+1))
		if err != nil {
			return chart.RegistryError(err)
		}
		d = v1.Descriptor{MediaType: types.MediaType(res.Header.Get("Content-Type")), Digest: digestOf(b), Size: int64(len(b))}
		return nil
	})
	return d, err
}

func (r *registry) blob(ctx context.Context, a Artifact, d v1.Descriptor, offset int64) (io.ReadCloser, int64, error) {
	if offset > 0 {
		res, err := r.get(ctx, a.Repository, "blobs", d.Digest.String(), nil, fmt.Sprintf("%d-%d", offset, d.Size-1))
		switch {
		case err != nil:
			return nil, 0, err
		case res.StatusCode == http.StatusPartialContent:
			return res.Body, offset, nil
		case res.StatusCode == http.StatusOK: // the registry has no ranges
			return res.Body, 0, nil
		}
		res.Body.Close() // it refuses this range
	}
	res, err := r.get(ctx, a.Repository, "blobs", d.Digest.String(), nil, "")
	if err != nil {
		return nil, 0, err
	}
	return res.Body, 0, nil
}

func (r *registry) file(ctx context.Context, _ *Contents, f File, offset int64) (io.ReadCloser, int64, error) {
	return r.blob(ctx, Artifact{Repository: releaseRepository}, f.descriptor(), offset)
}
