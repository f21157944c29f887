package plans

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"time"

	// Images without a file system contain no CA certificates, and the host's are not accessible.
	_ "golang.org/x/crypto/x509roots/fallback"
)

const (
	// channelTimeout bounds one request to a channel, channelBody the bytes read from its answer.
	channelTimeout = 30 * time.Second
	channelBody    = 64 << 10
	// channelVersion bounds a version; a label's value is shorter, an image tag slightly longer.
	channelVersion = 128
)

// askChannel polls a channel for the latest version: the last element of the path that it
// redirects to with 302, or of the channel's own path if it answers with success or another
// redirection. Redirections are not followed. ca, if any, is trusted besides the system's.
func askChannel(ctx context.Context, channel, current, cluster string, ca []byte) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, channelTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, channel, nil)
	if err != nil {
		return "", fmt.Errorf("poll channel: %w", err)
	}
	// Names in the spelling of system-upgrade-controller, which Set would canonicalize. Before the
	// first answer there is no version.
	for name, value := range map[string]string{"X-SUC-Cluster-ID": cluster, "X-SUC-Latest-Version": current} {
		if value != "" {
			req.Header[name] = []string{value}
		}
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DisableKeepAlives = true
	if len(ca) > 0 {
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(ca) {
			return "", errors.New("poll channel: spec.constellation.caBundle has no certificate")
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	client := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		return "", fmt.Errorf("poll channel: %w", err)
	}
	defer resp.Body.Close()
	// A short body is read, so that the connection ends cleanly. A long one is dropped.
	_, _ = io.CopyN(io.Discard, resp.Body, channelBody)
	from := req.URL
	switch {
	case resp.StatusCode == http.StatusFound:
		if from, err = url.Parse(resp.Header.Get("Location")); err != nil {
			return "", fmt.Errorf("poll channel: %w", err)
		}
	case resp.StatusCode < 200 || resp.StatusCode > 399:
		return "", fmt.Errorf("poll channel: unexpected response: %s", resp.Status)
	}
	version := path.Base(from.Path)
	if version == "." || version == "/" || len(version) > channelVersion {
		return "", fmt.Errorf("poll channel: %s names no version", from.Redacted())
	}
	return version, nil
}
