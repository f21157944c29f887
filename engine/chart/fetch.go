package chart

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"constellation/engine/release"
)

// Timeouts of a source: to connect, to send response headers, and for one chart with all
// retries. The backoff between attempts starts with pause and doubles.
const (
	dialTimeout   = 10 * time.Second
	headerTimeout = 20 * time.Second
	fetchTimeout  = 2 * time.Minute
	attempts      = 3
	pause         = 500 * time.Millisecond
)

// layerType is the media type of the archive in a manifest of a chart.
const layerType = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"

// Store fetches charts. The zero value caches nothing. It may be used concurrently.
type Store struct {
	// Cache is the directory of the cache; empty means no cache.
	Cache string
	// Base is the directory of relative file: sources; empty means the working directory.
	Base string
	// Bundle returns a file of the bundle by its digest; the error wraps ErrAbsent if the
	// bundle does not hold it. Nil means no bundle.
	Bundle func(digest string) ([]byte, error)
	// Transport sends requests; nil means a default one with the proxy of the environment.
	Transport http.RoundTripper
}

// Fetch returns the chart of r from the bundle, the cache or its source, in this order. The
// result has the digest of r.
//
// An unreachable source is retried twice with backoff. A retry resumes a partial download if
// the server supports ranges. The error wraps one of the package's errors, or that of ctx.
// ErrDigest and ErrArchive are permanent.
func (s *Store) Fetch(ctx context.Context, r Ref) (*Chart, error) {
	if problem, _ := release.BadDigest(r.Digest); problem != "" {
		return nil, fmt.Errorf("fetch chart %s: %s", r, problem)
	}
	if problem, _ := release.BadSource(r.Source); problem != "" {
		return nil, fmt.Errorf("fetch chart %s: its source %s", r, problem)
	}
	limited, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	c := &Chart{Ref: r, Blobs: map[string][]byte{}}
	err := s.fill(limited, c)
	if err != nil {
		switch {
		case ctx.Err() != nil:
			err = ctx.Err()
		case limited.Err() != nil:
			err = fmt.Errorf("%w: no result within %s", ErrUnreachable, fetchTimeout)
		}
		return nil, fmt.Errorf("fetch chart %s from %s: %w", r, r.Source, err)
	}
	return c, nil
}

// fill fetches blobs and files of c.
func (s *Store) fill(ctx context.Context, c *Chart) error {
	scheme, rest, _ := strings.Cut(c.Source, ":")
	from := func(ctx context.Context, dgst string) ([]byte, error) {
		return s.fetchHTTP(ctx, c.file(c.Source), dgst)
	}
	archive := c.Digest
	switch scheme {
	case "file":
		from = func(context.Context, string) ([]byte, error) { return s.read(c.file(rest)) }
	case "oci":
		var err error
		if archive, err = s.manifest(ctx, c); err != nil {
			return err
		}
		from = func(ctx context.Context, dgst string) ([]byte, error) { return s.layer(ctx, c.Source, dgst) }
	}
	b, err := s.blob(ctx, archive, from)
	if err != nil {
		return err
	}
	c.Blobs[archive] = b
	c.Files, err = unpack(b, c.Ref)
	return err
}

// blob returns the content of a digest from the bundle, the cache or from.
func (s *Store) blob(ctx context.Context, dgst string, from func(context.Context, string) ([]byte, error)) ([]byte, error) {
	if s.Bundle != nil {
		if b, err := s.Bundle(dgst); err == nil || !errors.Is(err, ErrAbsent) {
			return b, err
		}
	}
	if b, ok := s.cached(dgst); ok {
		return b, nil
	}
	b, err := from(ctx, dgst)
	if err != nil {
		return nil, err
	}
	if got := digest(b); got != dgst {
		return nil, fmt.Errorf("%w: got %s, want %s", ErrDigest, got, dgst)
	}
	s.keep(dgst, b)
	return b, nil
}

func (s *Store) path(dgst string) string {
	return filepath.Join(s.Cache, strings.TrimPrefix(dgst, "sha256:"))
}

// cached returns a file of the cache unless it is missing or damaged.
func (s *Store) cached(dgst string) ([]byte, bool) {
	if s.Cache == "" {
		return nil, false
	}
	b, err := readFile(s.path(dgst))
	return b, err == nil && digest(b) == dgst
}

// keep stores a file in the cache. Errors are ignored: the file is then fetched again next
// time.
func (s *Store) keep(dgst string, b []byte) {
	if s.Cache == "" || os.MkdirAll(s.Cache, 0o700) != nil {
		return
	}
	f, err := os.CreateTemp(s.Cache, ".new-*")
	if err != nil {
		return
	}
	_, err = f.Write(b)
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), s.path(dgst))
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
}

// read returns a local file.
func (s *Store) read(file string) ([]byte, error) {
	if !filepath.IsAbs(file) {
		file = filepath.Join(s.Base, file)
	}
	b, err := readFile(file)
	var p *fs.PathError
	if errors.As(err, &p) {
		err = p.Err
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: %s is missing", ErrAbsent, file)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%w: %s cannot be read", ErrDenied, file)
	case err != nil:
		return nil, fmt.Errorf("%w: %s: %w", ErrArchive, file, err)
	}
	return b, nil
}

// readFile reads a regular file of at most maxArchive bytes.
func readFile(file string) ([]byte, error) {
	info, err := os.Stat(file)
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular(): // opening a pipe would block forever
		return nil, errors.New("not a regular file")
	case info.Size() > maxArchive:
		return nil, tooLarge(info.Size())
	}
	return os.ReadFile(file)
}

func tooLarge(n int64) error {
	return fmt.Errorf("%w: %d bytes, limit is %d", ErrArchive, n, maxArchive)
}

// guard rejects unencrypted requests, except to loopback addresses, and limits the size of
// responses.
type guard struct{ next http.RoundTripper }

func (g guard) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" && !loopback(r.URL.Hostname()) {
		return nil, errPlain
	}
	res, err := g.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if res.ContentLength > maxArchive {
		_ = res.Body.Close()
		return nil, tooLarge(res.ContentLength)
	}
	res.Body = &bounded{res.Body, maxArchive}
	return res, nil
}

var errPlain = errors.New("connection is not encrypted")

// bounded is a body that returns an error after a number of bytes.
type bounded struct {
	io.ReadCloser
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left < 0 {
		return 0, tooLarge(maxArchive + 1)
	}
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, tooLarge(maxArchive + 1)
	}
	return n, err
}

func (s *Store) transport() http.RoundTripper {
	if s.Transport != nil {
		return guard{s.Transport}
	}
	return guard{&http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:   dialTimeout,
		ResponseHeaderTimeout: headerTimeout,
		ForceAttemptHTTP2:     true,
		DisableKeepAlives:     true, // a chart takes few requests, and nothing closes idle connections
	}}
}

// fetchHTTP downloads an archive.
func (s *Store) fetchHTTP(ctx context.Context, address, dgst string) ([]byte, error) {
	client := &http.Client{Transport: s.transport(), CheckRedirect: func(_ *http.Request, via []*http.Request) error {
		if len(via) > 5 {
			return errors.New("more than 5 redirects")
		}
		return nil
	}}
	var b []byte
	restarted := false // the download was restarted because its parts did not match
	for n, wait := 1, pause; ; n, wait = n+1, 2*wait {
		got, err := s.piece(ctx, client, address, b)
		b = got
		if err == nil && digest(b) != dgst && n > 1 && !restarted { // parts of two different files
			restarted, b, err = true, nil, fmt.Errorf("%w: file changed during the download", ErrUnreachable)
		}
		if err == nil || n == attempts || !errors.Is(err, ErrUnreachable) {
			return b, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// piece downloads the rest of a file after arrived and returns the whole.
func (s *Store) piece(ctx context.Context, client *http.Client, address string, arrived []byte) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: invalid address", ErrUnreachable)
	}
	r.Header.Set("User-Agent", "constellation")
	r.Header.Set("Accept-Encoding", "identity")
	if len(arrived) > 0 {
		r.Header.Set("Range", fmt.Sprintf("bytes=%d-", len(arrived)))
	}
	res, err := client.Do(r)
	if err != nil {
		return arrived, plain(err)
	}
	defer res.Body.Close()
	switch {
	case res.StatusCode == http.StatusPartialContent && len(arrived) > 0:
	case res.StatusCode == http.StatusOK:
		arrived = nil
	default:
		return nil, answered(res.StatusCode)
	}
	b, err := io.ReadAll(res.Body)
	b = append(arrived, b...)
	if err != nil {
		return b, plain(err)
	}
	if len(b) > maxArchive {
		return nil, tooLarge(int64(len(b)))
	}
	return b, nil
}

// answered returns the error of an HTTP status.
func answered(status int) error {
	text := fmt.Sprintf("%d %s", status, http.StatusText(status))
	switch status {
	case http.StatusNotFound, http.StatusGone:
		return fmt.Errorf("%w: the server returned %s", ErrAbsent, text)
	case http.StatusUnauthorized, http.StatusForbidden:
		return fmt.Errorf("%w: the server returned %s", ErrDenied, text)
	}
	return fmt.Errorf("%w: the server returned %s", ErrUnreachable, text)
}

// plain returns the cause of a failed request without its address, because a redirect
// address may contain a signature.
func plain(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	var t *transport.Error
	switch {
	case errors.Is(err, ErrArchive), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.As(err, &t):
		return answered(t.StatusCode)
	}
	return fmt.Errorf("%w: %s", ErrUnreachable, shorten(err.Error()))
}

// manifest fetches the manifest of a chart in a registry and returns the archive's digest.
func (s *Store) manifest(ctx context.Context, c *Chart) (archive string, err error) {
	b, err := s.blob(ctx, c.Digest, func(ctx context.Context, dgst string) ([]byte, error) {
		repo, err := repository(c.Source)
		if err != nil {
			return nil, err
		}
		d, err := remote.Get(repo.Digest(dgst), s.options(ctx)...)
		if err != nil {
			return nil, RegistryError(err)
		}
		return d.Manifest, nil
	})
	if err != nil {
		return "", err
	}
	if len(b) > maxManifest {
		return "", fmt.Errorf("%w: manifest has %d bytes", ErrArchive, len(b))
	}
	m, err := v1.ParseManifest(strings.NewReader(string(b)))
	if err != nil {
		return "", fmt.Errorf("%w: manifest is not valid", ErrArchive)
	}
	for _, l := range m.Layers {
		if l.MediaType != layerType {
			continue
		}
		if l.Size > maxArchive {
			return "", tooLarge(l.Size)
		}
		if problem, _ := release.BadDigest(l.Digest.String()); problem != "" {
			return "", fmt.Errorf("%w: manifest names %s", ErrArchive, problem)
		}
		c.Blobs[c.Digest] = b
		return l.Digest.String(), nil
	}
	return "", fmt.Errorf("%w: manifest has no chart layer; it may be a container image", ErrArchive)
}

// layer fetches the archive of a chart from a registry.
func (s *Store) layer(ctx context.Context, source, dgst string) ([]byte, error) {
	repo, err := repository(source)
	if err != nil {
		return nil, err
	}
	l, err := remote.Layer(repo.Digest(dgst), s.options(ctx)...)
	if err != nil {
		return nil, RegistryError(err)
	}
	body, err := l.Compressed()
	if err != nil {
		return nil, RegistryError(err)
	}
	defer body.Close()
	b, err := io.ReadAll(io.LimitReader(body, maxArchive+1))
	if err != nil {
		return nil, RegistryError(err)
	}
	return b, nil
}

func (s *Store) options(ctx context.Context) []remote.Option {
	return []remote.Option{
		remote.WithContext(ctx), remote.WithTransport(s.transport()), remote.WithUserAgent("constellation"),
		remote.WithAuthFromKeychain(Keychain()),
		remote.WithRetryBackoff(remote.Backoff{Duration: pause, Factor: 2, Steps: attempts}),
	}
}

// RegistryError classifies an error of the registry client. The client has no typed error
// for a digest mismatch, so this matches its text.
func RegistryError(err error) error {
	var t *transport.Error
	if !errors.As(err, &t) && strings.Contains(err.Error(), "did not match digest") || strings.Contains(err.Error(), "error verifying") {
		return fmt.Errorf("%w: the registry returned other content", ErrDigest)
	}
	return plain(err)
}

// Keychain provides the credentials of `helm registry login` and of `docker login`.
func Keychain() authn.Keychain {
	return authn.NewMultiKeychain(helmKeychain{}, authn.DefaultKeychain)
}

// helmKeychain provides the credentials that `helm registry login` stored.
type helmKeychain struct{}

// Resolve implements [authn.Keychain].
func (helmKeychain) Resolve(r authn.Resource) (authn.Authenticator, error) {
	file := os.Getenv("HELM_REGISTRY_CONFIG")
	if file == "" {
		dir, err := os.UserConfigDir()
		if err != nil {
			return authn.Anonymous, nil
		}
		file = filepath.Join(dir, "helm", "registry", "config.json")
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return authn.Anonymous, nil
	}
	var known struct {
		Auths map[string]authn.AuthConfig `json:"auths"`
	}
	if json.Unmarshal(b, &known) != nil { // the error could quote the credentials
		return authn.Anonymous, nil
	}
	if c, ok := known.Auths[r.RegistryStr()]; ok && c != (authn.AuthConfig{}) {
		return authn.FromConfig(c), nil
	}
	return authn.Anonymous, nil
}
