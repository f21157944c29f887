// Package metadata reads the metadata server of a machine in Google Cloud, through Google's own client. It links no client of
// Compute Engine, so that small programs can use it.
package metadata

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"cloud.google.com/go/compute/metadata"

	"constellation/engine/cloud"
)

// Default is the address of the metadata server of every machine.
const Default = "http://metadata.google.internal"

// ComputePath is the path of the API of Compute Engine.
const ComputePath = "/compute/v1/"

// timeout is the time that an answer may take. It needs milliseconds.
const timeout = 5 * time.Second

// Server is a metadata server. It is safe for concurrent use.
type Server struct {
	// Compute is the endpoint of Compute Engine that the address of an emulator names; empty: Google's.
	Compute string
	// Transport reaches the server, without a proxy.
	Transport *http.Transport

	base string
}

// Open returns the server at an address: its URL, or that of an emulator, whose parameter "compute" names the endpoint of the
// emulated Compute Engine. An emulator serves both at a socket, with the address unix:PATH. Empty: Default. It sends nothing
// yet.
func Open(address string) Server {
	dialer := &net.Dialer{Timeout: timeout}
	transport := &http.Transport{Proxy: nil, DialContext: dialer.DialContext, MaxIdleConnsPerHost: 2, IdleConnTimeout: 30 * time.Second}
	s := Server{base: cmp.Or(address, Default), Transport: transport}
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return dialer.DialContext(ctx, "unix", path) }
		s.base, s.Compute = "http://emulator", "http://emulator"+ComputePath
		return s
	}
	if u, err := url.Parse(s.base); err == nil {
		s.Compute = u.Query().Get("compute")
		u.RawQuery = ""
		s.base = strings.TrimSuffix(u.String(), "/")
	}
	return s
}

// RoundTrip sends a request of Google's client to the server. It implements http.RoundTripper.
func (s Server) RoundTrip(r *http.Request) (*http.Response, error) {
	to, err := url.Parse(s.base)
	if err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.URL.Scheme, r.URL.Host, r.Host = to.Scheme, to.Host, ""
	answer, err := s.Transport.RoundTrip(r)
	if err == nil && answer.Header.Get("Metadata-Flavor") != "Google" {
		answer.Body.Close()
		return nil, fmt.Errorf("the answer lacks the header Metadata-Flavor: %s is no metadata server of Google", s.base)
	}
	return answer, err
}

// client is how requests are sent.
func (s Server) client() *http.Client {
	return &http.Client{Transport: s, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// Get reads an entry. Google's client repeats a failed request for some seconds.
func (s Server) Get(ctx context.Context, path string) (string, error) {
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	text, err := metadata.NewWithOptions(&metadata.Options{Client: s.client()}).GetWithContext(limited, path)
	if err == nil {
		return strings.TrimSpace(text), nil
	}
	path, _, _ = strings.Cut(path, "?")
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	if _, ok := errors.AsType[metadata.NotDefinedError](err); ok {
		return "", fmt.Errorf("read metadata %s: %w", path, cloud.ErrNotFound)
	}
	if refused, ok := errors.AsType[*metadata.Error](err); ok && refused.Code == http.StatusForbidden {
		return "", fmt.Errorf("read metadata %s: %w: %s", path, cloud.ErrDenied, strings.TrimSpace(refused.Message))
	}
	if limited.Err() != nil {
		return "", fmt.Errorf("read metadata %s: %w: no answer of %s within %v", path, cloud.ErrUnavailable, s.base, timeout)
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err // it repeats method and URL
	}
	return "", fmt.Errorf("read metadata %s: %w: %w", path, cloud.ErrUnavailable, err)
}

const (
	// hanging is how long the server may wait for a change before it answers.
	hanging = time.Minute
	// maxEntry bounds an entry, in bytes.
	maxEntry = 64 << 10
)

// change returns an entry when its version is another one than last, or unchanged after a minute. last is empty for the first
// read, which returns at once. Google's client cannot be used: its loop does not end with its context.
func (s Server) change(ctx context.Context, path, last string) (text, version string, err error) {
	limited, cancel := context.WithTimeout(ctx, hanging+timeout)
	defer cancel()
	query := url.Values{}
	if last != "" {
		query = url.Values{"wait_for_change": {"true"}, "last_etag": {last}, "timeout_sec": {strconv.Itoa(int(hanging / time.Second))}}
	}
	req, err := http.NewRequestWithContext(limited, http.MethodGet, Default+"/computeMetadata/v1/"+path+"?"+query.Encode(), nil)
	if err != nil {
		return "", "", err
	}
	req.Header.Set("Metadata-Flavor", "Google")
	answer, err := s.client().Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err
		}
		return "", "", fmt.Errorf("wait for metadata %s: %w: %w", path, cloud.ErrUnavailable, err)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(io.LimitReader(answer.Body, maxEntry))
	switch {
	case err != nil:
		return "", "", fmt.Errorf("wait for metadata %s: %w: %w", path, cloud.ErrUnavailable, err)
	case answer.StatusCode == http.StatusNotFound:
		return "", "", fmt.Errorf("wait for metadata %s: %w", path, cloud.ErrNotFound)
	case answer.StatusCode != http.StatusOK:
		return "", "", fmt.Errorf("wait for metadata %s: %w: status %d", path, cloud.ErrUnavailable, answer.StatusCode)
	}
	if version = answer.Header.Get("ETag"); version == "" {
		return "", "", fmt.Errorf("wait for metadata %s: %w: the answer has no version", path, cloud.ErrUnavailable)
	}
	return strings.TrimSpace(string(b)), version, nil
}
