package local

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"constellation/engine/cloud"
)

const (
	// requestTimeout bounds a call that the cloud answers from memory, bulkTimeout one
	// that may change thousands of instances, actionTimeout one that waits for
	// machines. An earlier deadline of the caller counts.
	requestTimeout = 15 * time.Second
	bulkTimeout    = 30 * time.Second
	actionTimeout  = 2 * time.Minute
	// maxBody bounds an answer: a thousand instances are about 400 kB.
	maxBody = 16 << 20
)

// Problem is the body of every answer that is not a success.
type Problem struct {
	// Message says what is wrong, for people.
	Message string `json:"error"`
	// Reason tells causes of one status apart; empty for most, and from sandboxes of
	// older releases.
	Reason string `json:"reason,omitempty"`
}

// Reasons of errors that wrap cloud.ErrCapacity and cloud.ErrQuota.
const (
	ReasonCapacity = "capacity"
	ReasonQuota    = "quota"
)

// endpoint is one HTTP server of the cloud.
type endpoint struct {
	base  string
	token string
	http  *http.Client
}

// newEndpoint accepts an http URL or "unix:" and a path.
func newEndpoint(address, token string) endpoint {
	dialer := &net.Dialer{Timeout: 5 * time.Second}
	t := &http.Transport{
		// A proxy would be asked in the machine's name and would answer for another cloud.
		Proxy:               nil,
		DialContext:         dialer.DialContext,
		MaxIdleConnsPerHost: 2,
		IdleConnTimeout:     30 * time.Second,
	}
	base := strings.TrimSuffix(address, "/")
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		base = "http://sandbox"
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", path)
		}
	}
	return endpoint{base: base, token: token, http: &http.Client{
		Transport: t,
		// The cloud never redirects, so a redirect comes from somebody else.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// call sends in, unless nil, as JSON and decodes the answer into out, unless nil.
func (e endpoint) call(ctx context.Context, method, path string, query url.Values, in, out any) error {
	return e.callWithin(ctx, requestTimeout, method, path, query, in, out)
}

func (e endpoint) callWithin(parent context.Context, limit time.Duration, method, path string, query url.Values, in, out any) error {
	ctx, cancel := context.WithTimeout(parent, limit)
	defer cancel()
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	target := e.base + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if e.token != "" {
		req.Header.Set("Authorization", "Bearer "+e.token)
	}
	resp, err := e.http.Do(req)
	if err != nil {
		if parent.Err() != nil {
			return parent.Err()
		}
		// url.Error repeats method and URL, which callers name better.
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err
		}
		return fmt.Errorf("%w: %w", cloud.ErrUnavailable, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err != nil {
		if parent.Err() != nil {
			return parent.Err()
		}
		return fmt.Errorf("%w: read answer: %w", cloud.ErrUnavailable, err)
	}
	if len(data) > maxBody {
		return fmt.Errorf("answer is larger than %d bytes", maxBody)
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return problem(resp.StatusCode, resp.Header, data)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(data, out); err != nil {
		return fmt.Errorf("decode answer: %w", err)
	}
	return nil
}

// problem returns the error of package cloud for a status and the server's message.
func problem(status int, header http.Header, body []byte) error {
	var p Problem
	if json.Unmarshal(body, &p) != nil || p.Message == "" {
		p.Message = "HTTP " + strings.ToLower(http.StatusText(status))
	}
	switch {
	case status == http.StatusNotFound || status == http.StatusGone:
		return fmt.Errorf("%w: %s", cloud.ErrNotFound, p.Message)
	case status == http.StatusTooManyRequests:
		if s, err := strconv.Atoi(header.Get("Retry-After")); err == nil && s > 0 {
			return &cloud.ThrottledError{Until: time.Now().Add(time.Duration(s) * time.Second), Message: p.Message}
		}
		return fmt.Errorf("%w: %s", cloud.ErrThrottled, p.Message)
	case p.Reason == ReasonCapacity:
		return fmt.Errorf("%w: %w: %s", cloud.ErrUnavailable, cloud.ErrCapacity, p.Message)
	case p.Reason == ReasonQuota:
		return fmt.Errorf("%w: %w: %s", cloud.ErrUnavailable, cloud.ErrQuota, p.Message)
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return fmt.Errorf("%w: %s", cloud.ErrDenied, p.Message)
	case status >= 500:
		return fmt.Errorf("%w: %s", cloud.ErrUnavailable, p.Message)
	}
	return errors.New(p.Message)
}
