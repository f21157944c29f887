package attest

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"constellation/engine/cloud"
)

const (
	fetchTimeout = 5 * time.Second
	// maxFetched bounds a certificate that is fetched, in bytes; maxFetches how many are.
	maxFetched = 8 << 10
	maxFetches = 3
)

// fetcher fetches certificates of Google's authorities from where a certificate says they are. Their
// signatures protect them, not the connection.
type fetcher struct{ http *http.Client }

// intermediates returns the authorities between c and a root that this package does not have. It sends
// nothing if it has them all.
func (f fetcher) intermediates(ctx context.Context, c *x509.Certificate) ([][]byte, error) {
	var out [][]byte
	for range maxFetches {
		if slices.ContainsFunc(pinned(), func(p *x509.Certificate) bool { return c.CheckSignatureFrom(p) == nil }) {
			return out, nil
		}
		if len(c.IssuingCertificateURL) == 0 {
			return out, nil // its issuer can be a root
		}
		next, err := f.issuer(ctx, c)
		if err != nil {
			return nil, fmt.Errorf("%w: %w; allow machines to reach the address of the certificate, or upgrade to a release that has it", cloud.ErrUnavailable, err)
		}
		if next.CheckSignatureFrom(next) == nil { // a root, which verifiers have
			return out, nil
		}
		out = append(out, next.Raw)
		c = next
	}
	return nil, fmt.Errorf("more than %d authorities are between it and a root", maxFetches)
}

// issuer fetches the certificate of the issuer of c.
func (f fetcher) issuer(ctx context.Context, c *x509.Certificate) (*x509.Certificate, error) {
	address := c.IssuingCertificateURL[0]
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Port() != "" || u.Host != "pki.goog" && !strings.HasSuffix(u.Host, ".storage.googleapis.com") {
		return nil, fmt.Errorf("fetch certificate: %q is no address of Google's authorities", address)
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, fmt.Errorf("fetch certificate: %w", err)
	}
	res, err := f.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("fetch certificate: %w", err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxFetched+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("fetch certificate from %s: %w", address, err)
	case res.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("fetch certificate from %s: %s", address, res.Status)
	case len(body) > maxFetched:
		return nil, fmt.Errorf("fetch certificate from %s: it has more than %d bytes", address, maxFetched)
	}
	if b, _ := pem.Decode(body); b != nil {
		body = b.Bytes
	}
	out, err := x509.ParseCertificate(body)
	if err != nil {
		return nil, fmt.Errorf("fetch certificate from %s: %w", address, err)
	}
	if err := c.CheckSignatureFrom(out); err != nil {
		return nil, fmt.Errorf("fetch certificate from %s: %w", address, errors.Join(errors.New("it is not the issuer's"), err))
	}
	return out, nil
}
