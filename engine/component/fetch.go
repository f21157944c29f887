//go:build unix

package component

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"constellation/internal/delay"
)

const bufferSize = 256 << 10

var errStalled = errors.New("data arrived too slowly, or none")

// NewClient returns a client that bounds every wait but that for the body, and refuses to be
// redirected from https to http.
func NewClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
			TLSHandshakeTimeout:   10 * time.Second,
			ResponseHeaderTimeout: 30 * time.Second,
			MaxIdleConnsPerHost:   parallel,
			IdleConnTimeout:       30 * time.Second,
			ForceAttemptHTTP2:     true,
			DisableCompression:    true,
		},
		CheckRedirect: func(req *http.Request, via []*http.Request) error {
			if len(via) >= 10 {
				return errors.New("more than 10 redirects")
			}
			if via[0].URL.Scheme == "https" && req.URL.Scheme != "https" {
				return errors.New("redirected from https to http")
			}
			return nil
		},
	}
}

// download is what has arrived of one component. The file and the hash always
// cover the same n bytes.
type download struct {
	c      Component
	f      *os.File
	h      hash.Hash
	n      int64
	total  int64 // 0: unknown
	etag   string
	limits limits
	report func(done, total int64)
	told   time.Time
	// doubtful says that pieces were joined on trust, or that an end was taken for
	// complete without a length: a wrong digest may then be our own doing.
	doubtful bool
	again    bool // everything was fetched again because of a doubt
}

// fetch fills f, which may hold a beginning from an earlier call, with the content
// of c and returns its size.
func (in *Installer) fetch(ctx context.Context, client *http.Client, c Component, f *os.File, report func(done, total int64)) (int64, error) {
	d := &download{c: c, f: f, h: c.newHash(), limits: in.limit(), report: report}
	if strings.HasPrefix(strings.ToLower(c.URL), "data:") {
		return d.inline()
	}
	if err := d.takeUp(ctx); err != nil {
		return 0, err
	}
	if d.n > 0 && d.correct() {
		return d.n, nil
	}
	pause := d.limits.pause
	for failures := 0; ; {
		before := d.n
		err := d.attempt(ctx, client)
		if err == nil {
			if d.correct() {
				return d.n, nil
			}
			err = fmt.Errorf("%w: %s delivers %d bytes with %s, want %s", ErrDigest, source(c.URL), d.n, d.digest(), c.Digest)
			if !d.doubtful || d.again {
				return 0, &finalError{err}
			}
			if err := d.restart(); err != nil {
				return 0, err
			}
			d.again = true
		}
		var final *finalError
		if errors.As(err, &final) {
			return 0, err
		}
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		if d.n-before >= d.limits.progress {
			failures, pause = 0, d.limits.pause
		} else if failures++; failures >= d.limits.attempts {
			return 0, fmt.Errorf("gave up after %d attempts: %w", failures, err)
		}
		// Decorrelated jitter: nodes that were cut off together do not come back together.
		pause = min(d.limits.pauseMax, d.limits.pause+rand.N(3*pause))
		wait := pause
		var later *retryLater
		if errors.As(err, &later) && later.after > wait {
			wait = min(later.after, 4*d.limits.pauseMax)
		}
		in.log().Debug("download interrupted", "component", c.Name, "bytes", d.n, "attempt", failures, "wait", wait, "err", err)
		if !delay.For(ctx, wait) {
			return 0, context.Cause(ctx)
		}
	}
}

// takeUp hashes what an earlier process left in the file.
func (d *download) takeUp(ctx context.Context) error {
	i, err := d.f.Stat()
	if err != nil {
		return d.writeError(err)
	}
	if i.Size() == 0 {
		return nil
	}
	if i.Size() > d.limits.size {
		return d.restart()
	}
	if _, err := d.f.Seek(0, io.SeekStart); err != nil {
		return d.writeError(err)
	}
	if err := hashInto(ctx, d.h, d.f); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return d.writeError(err)
	}
	d.n, d.doubtful = i.Size(), true
	return nil
}

func (d *download) digest() string { return d.c.digestOf(d.h) }
func (d *download) correct() bool  { return d.digest() == d.c.Digest }

// restart forgets what has arrived.
func (d *download) restart() error {
	d.h.Reset()
	d.n, d.total, d.etag = 0, 0, ""
	if err := d.f.Truncate(0); err != nil {
		return d.writeError(err)
	}
	if _, err := d.f.Seek(0, io.SeekStart); err != nil {
		return d.writeError(err)
	}
	return nil
}

func (d *download) writeError(err error) error {
	return &finalError{fmt.Errorf("write %s: %w", d.c.Path, bare(err))}
}

func (d *download) add(b []byte) error {
	if d.n+int64(len(b)) > d.limits.size {
		return d.tooLarge()
	}
	if _, err := d.f.Write(b); err != nil {
		return d.writeError(err)
	}
	d.h.Write(b)
	d.n += int64(len(b))
	if now := time.Now(); now.Sub(d.told) >= reportEvery {
		d.told = now
		d.report(d.n, d.total)
	}
	return nil
}

func (d *download) tooLarge() error {
	return &finalError{fmt.Errorf("%s delivers more than %d bytes", source(d.c.URL), d.limits.size)}
}

// inline decodes a data: URL.
func (d *download) inline() (int64, error) {
	if err := d.restart(); err != nil {
		return 0, err
	}
	head, body, ok := strings.Cut(d.c.URL[len("data:"):], ",")
	var b []byte
	var err error
	switch {
	case !ok:
		err = errors.New("no comma")
	case strings.HasSuffix(head, ";base64"):
		b, err = base64.StdEncoding.DecodeString(body)
	default:
		var s string
		s, err = url.PathUnescape(body)
		b = []byte(s)
	}
	if err != nil {
		// The decoder's own words would quote the content.
		return 0, &finalError{errors.New("data URL is malformed")}
	}
	if err := d.add(b); err != nil {
		return 0, err
	}
	if !d.correct() {
		return 0, &finalError{fmt.Errorf("%w: the data URL holds %s, want %s", ErrDigest, d.digest(), d.c.Digest)}
	}
	return d.n, nil
}

// retryLater is a refusal that names the time after which to ask again.
type retryLater struct {
	err   error
	after time.Duration
}

func (e *retryLater) Error() string { return e.err.Error() }
func (e *retryLater) Unwrap() error { return e.err }

// truncatedError is a download that ended before its time; total is 0 if it is not
// known.
type truncatedError struct{ n, total int64 }

func (e *truncatedError) Error() string {
	if e.total == 0 {
		return fmt.Sprintf("ended after %d bytes, before its end", e.n)
	}
	return fmt.Sprintf("ended after %d of %d bytes", e.n, e.total)
}

func (e *truncatedError) Unwrap() error { return io.ErrUnexpectedEOF }

// attempt asks for what is missing and reads until the end or an error. All errors
// but finalError are worth another attempt.
func (d *download) attempt(parent context.Context, client *http.Client) error {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	var arrived atomic.Int64
	least := int64(minRate * d.limits.stall.Seconds())
	var watch *time.Timer
	watch = time.AfterFunc(d.limits.stall, func() {
		if arrived.Swap(0) < least {
			cancel(errStalled)
			return
		}
		watch.Reset(d.limits.stall)
	})
	defer watch.Stop()
	why := func(err error) error {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return fmt.Errorf("read %s: %w", source(d.c.URL), &truncatedError{d.n, d.total})
		}
		if errors.Is(context.Cause(ctx), errStalled) {
			return fmt.Errorf("read %s: %w: less than %d bytes per second for %s", source(d.c.URL), errStalled, minRate, d.limits.stall)
		}
		// url.Error repeats the URL with its query, which may be a signature.
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err
		}
		return fmt.Errorf("read %s: %w", source(d.c.URL), err)
	}

	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.c.URL, nil)
	if err != nil {
		return &finalError{errors.New("url is malformed")}
	}
	req.Header.Set("Accept-Encoding", "identity") // the digest is of the bytes as published
	if d.n > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", d.n))
		if d.etag != "" {
			req.Header.Set("If-Range", d.etag)
		} else {
			d.doubtful = true
		}
	}
	resp, err := client.Do(req)
	if err != nil {
		return why(err)
	}
	defer resp.Body.Close()
	arrived.Add(least) // an answer is a sign of life
	if err := d.accept(resp); err != nil {
		return err
	}
	buf := make([]byte, bufferSize)
	for {
		n, err := resp.Body.Read(buf)
		if n > 0 {
			arrived.Add(int64(n))
			if err := d.add(buf[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return why(err)
		}
	}
	if d.total > 0 && d.n != d.total {
		return why(io.ErrUnexpectedEOF)
	}
	if d.total == 0 {
		d.doubtful = d.doubtful || resp.ContentLength < 0 && len(resp.TransferEncoding) == 0
		d.total = d.n
	}
	return nil
}

// accept decides what an answer means before its body is read.
func (d *download) accept(resp *http.Response) error {
	switch resp.StatusCode {
	case http.StatusOK:
		// Also the answer to a range request if the content has changed, or if the
		// server does not support ranges: everything is sent again.
		if d.n > 0 {
			if err := d.restart(); err != nil {
				return err
			}
		}
		d.total = max(resp.ContentLength, 0)
	case http.StatusPartialContent:
		from, total, ok := contentRange(resp.Header.Get("Content-Range"))
		changed := d.etag != "" && resp.Header.Get("ETag") != "" && resp.Header.Get("ETag") != d.etag
		if d.n == 0 || !ok || from != d.n || d.total > 0 && total > 0 && total != d.total || changed {
			if err := d.restart(); err != nil {
				return err
			}
			return fmt.Errorf("read %s: the server sent another range than asked for", source(d.c.URL))
		}
		d.total = total
	case http.StatusRequestedRangeNotSatisfiable:
		if d.n == 0 {
			return &finalError{statusError(resp)}
		}
		if err := d.restart(); err != nil {
			return err
		}
		return statusError(resp)
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests,
		http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return &retryLater{statusError(resp), retryAfter(resp.Header.Get("Retry-After"), time.Now())}
	default:
		return &finalError{statusError(resp)}
	}
	if d.total > d.limits.size {
		return d.tooLarge()
	}
	// A weak validator does not promise the same bytes.
	if e := resp.Header.Get("ETag"); strings.HasPrefix(e, `"`) {
		d.etag = e
	}
	return nil
}

func statusError(resp *http.Response) error {
	return fmt.Errorf("read %s: HTTP %d %s", source(resp.Request.URL.String()), resp.StatusCode, strings.ToLower(http.StatusText(resp.StatusCode)))
}

// contentRange reads "bytes from-to/total"; an unknown total is 0.
func contentRange(s string) (from, total int64, ok bool) {
	s, ok = strings.CutPrefix(s, "bytes ")
	if !ok {
		return 0, 0, false
	}
	span, all, ok := strings.Cut(s, "/")
	if !ok {
		return 0, 0, false
	}
	a, b, ok := strings.Cut(span, "-")
	if !ok {
		return 0, 0, false
	}
	from, err1 := strconv.ParseInt(a, 10, 64)
	to, err2 := strconv.ParseInt(b, 10, 64)
	if err1 != nil || err2 != nil || from < 0 || to < from {
		return 0, 0, false
	}
	if all != "*" {
		var err error
		if total, err = strconv.ParseInt(all, 10, 64); err != nil || total <= to {
			return 0, 0, false
		}
	}
	return from, total, true
}

// retryAfter reads the header in either of its forms; 0 if there is none.
func retryAfter(s string, now time.Time) time.Duration {
	if n, err := strconv.Atoi(s); err == nil && n > 0 {
		return time.Duration(min(n, 3600)) * time.Second
	}
	if t, err := http.ParseTime(s); err == nil && t.After(now) {
		return t.Sub(now)
	}
	return 0
}

// source names where content comes from without what may be secret in a URL.
func source(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "the source"
	}
	return u.Scheme + "://" + u.Host + u.Path
}
