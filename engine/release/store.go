package release

import (
	"context"
	"crypto/tls"
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
)

// store stores the files of a feed. It verifies nothing; a Feed compares its files with the
// index.
type store interface {
	// location identifies the store in messages and in the cache.
	location() string
	// read returns a file of at most limit bytes. If the file still has a non-empty etag,
	// unchanged is true and there are no bytes. The error wraps ErrAbsent if there is no such
	// file, and ErrUnreachable if that is unknown.
	read(ctx context.Context, name string, limit int64, etag string) (answer, error)
}

type answer struct {
	bytes     []byte
	etag      string
	unchanged bool
}

// unconditional is a store that is read without ETags.
type unconditional struct{ store }

func (s unconditional) read(ctx context.Context, name string, limit int64, _ string) (answer, error) {
	return s.store.read(ctx, name, limit, "")
}

// openStore returns the store at a location: an https address, an http address of this
// computer, a bundle, or a directory.
func openStore(location string, o Options) (store, error) {
	if path, ok := strings.CutPrefix(location, BundleScheme); ok {
		b, err := OpenBundle(path)
		if err != nil {
			return nil, fmt.Errorf("open bundle %s: %w", shorten(path), err)
		}
		return bundleStore{b}, nil
	}
	scheme, _, isURL := strings.Cut(location, "://")
	if !isURL {
		return openDir(location)
	}
	u, err := url.Parse(location)
	switch {
	case err != nil:
		return nil, fmt.Errorf("open feed: %q is %w", shorten(location), ErrAddress)
	case u.User != nil:
		return nil, fmt.Errorf("open feed: an address with credentials is %w; a feed is public, its files are signed", ErrAddress)
	case u.Scheme == "http" && !loopback(u.Hostname()):
		return nil, fmt.Errorf("open feed: %s is %w: plain http is for this computer only", shorten(location), ErrAddress)
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("open feed: %q is %w", shorten(scheme)+"://", ErrAddress)
	case u.Host == "" || u.RawQuery != "" || u.Fragment != "" || u.Opaque != "":
		return nil, fmt.Errorf("open feed: %q is %w: it has no path", shorten(location), ErrAddress)
	}
	return &httpStore{base: u, client: restrict(o.Client)}, nil
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// dirStore is a local directory.
type dirStore struct{ dir string }

func openDir(dir string) (store, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open feed: %w", err)
	}
	return dirStore{abs}, nil
}

func (s dirStore) location() string { return s.dir }

// read stays in the directory, also across links.
func (s dirStore) read(ctx context.Context, name string, limit int64, _ string) (answer, error) {
	if err := ctx.Err(); err != nil {
		return answer{}, err
	}
	root, err := os.OpenRoot(s.dir)
	if err != nil {
		return answer{}, fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	defer root.Close()
	info, err := root.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return answer{}, ErrAbsent
	case err != nil:
		return answer{}, err
	case !info.Mode().IsRegular(): // opening a pipe would block indefinitely
		return answer{}, errors.New("it is not a regular file")
	case info.Size() > limit:
		return answer{}, tooLong(info.Size(), limit)
	}
	f, err := root.Open(name)
	if err != nil {
		return answer{}, err
	}
	defer f.Close()
	b, err := readAtMost(f, limit)
	return answer{bytes: b}, err
}

// fsStore has the releases in the program.
type fsStore struct{ dir fs.FS }

func (fsStore) location() string { return embeddedSource }

func (s fsStore) read(_ context.Context, name string, _ int64, _ string) (answer, error) {
	b, err := fs.ReadFile(s.dir, name)
	if errors.Is(err, fs.ErrNotExist) {
		return answer{}, ErrAbsent
	}
	return answer{bytes: b}, err
}

// Time limits of a server: connection, start of an answer, whole request.
const (
	dialTimeout    = 3 * time.Second
	headerTimeout  = 5 * time.Second
	requestTimeout = 20 * time.Second
	maxRedirects   = 3
)

// restrict returns a client that follows redirects to https only and that has time limits. c
// may be nil; it is not changed.
func restrict(c *http.Client) *http.Client {
	out := &http.Client{Transport: &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:   headerTimeout,
		ResponseHeaderTimeout: headerTimeout,
		ForceAttemptHTTP2:     true,
		MaxIdleConns:          2,
		IdleConnTimeout:       30 * time.Second,
	}, Timeout: requestTimeout}
	if c != nil {
		copied := *c
		out = &copied
		if out.Timeout == 0 {
			out.Timeout = requestTimeout
		}
	}
	out.Jar = nil
	out.CheckRedirect = func(r *http.Request, via []*http.Request) error {
		switch {
		case r.URL.Scheme != "https":
			return fmt.Errorf("%w to %s, but only https is allowed", ErrRedirect, shorten(r.URL.String()))
		case len(via) > maxRedirects:
			return fmt.Errorf("%w more than %d times", ErrRedirect, maxRedirects)
		}
		return nil
	}
	return out
}

type httpStore struct {
	base   *url.URL
	client *http.Client
}

func (s *httpStore) location() string { return strings.TrimSuffix(s.base.String(), "/") }

func (s *httpStore) read(ctx context.Context, name string, limit int64, etag string) (answer, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.base.JoinPath(strings.Split(name, "/")...).String(), nil)
	if err != nil {
		return answer{}, err
	}
	r.Header.Set("User-Agent", "constellation")
	r.Header.Set("Accept-Encoding", "identity") // lengths are those of the files
	if etag != "" {
		r.Header.Set("If-None-Match", etag)
	}
	res, err := s.client.Do(r)
	if err != nil {
		if ctx.Err() != nil {
			return answer{}, fmt.Errorf("%w: %w", ErrUnreachable, context.Cause(ctx))
		}
		var u *url.Error
		if errors.As(err, &u) { // its text repeats the address
			err = u.Err
		}
		if errors.Is(err, ErrRedirect) {
			return answer{}, err
		}
		return answer{}, fmt.Errorf("%w: %s", ErrUnreachable, shorten(err.Error()))
	}
	defer res.Body.Close()
	switch {
	case res.StatusCode == http.StatusNotModified && etag != "":
		return answer{etag: etag, unchanged: true}, nil
	case res.StatusCode == http.StatusNotFound || res.StatusCode == http.StatusGone:
		return answer{}, ErrAbsent
	case res.StatusCode != http.StatusOK:
		return answer{}, fmt.Errorf("%w: the server answers %d %s", ErrUnreachable, res.StatusCode, http.StatusText(res.StatusCode))
	case res.ContentLength > limit:
		return answer{}, tooLong(res.ContentLength, limit)
	}
	b, err := readAtMost(res.Body, limit)
	if err != nil && !errors.Is(err, ErrAltered) {
		err = fmt.Errorf("%w: %s", ErrUnreachable, shorten(err.Error()))
	}
	tag := res.Header.Get("ETag")
	if len(tag) > 256 || badText(tag) {
		tag = ""
	}
	return answer{bytes: b, etag: tag}, err
}

func tooLong(n, limit int64) error {
	return fmt.Errorf("%w: it has %d bytes, more than %d", ErrAltered, n, limit)
}

// readAtMost reads r to its end, which must come within limit bytes.
func readAtMost(r io.Reader, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("%w: it has more than %d bytes", ErrAltered, limit)
	}
	return b, nil
}
