package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
)

// wire exchanges raw bytes of objects with the API server. It does not limit requests: its
// callers do.
type wire struct {
	client *http.Client
	base   string // without a slash at the end
}

func (c *Client) wire() (*wire, error) {
	config := rest.CopyConfig(c.config)
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("make HTTP client: %w", err)
	}
	u, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("make HTTP client: %w", err)
	}
	return &wire{client, strings.TrimSuffix(u.String(), "/")}, nil
}

// maxAnswer bounds one answer in bytes: a page of large objects.
const maxAnswer = 256 << 20

// onlyMetadata requests only the metadata of an answer, since the sender of an object has the
// rest.
const onlyMetadata = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"

// do makes one request. A rejected request returns an error of package apierrors.
func (w *wire) do(ctx context.Context, method, path string, query url.Values, accept string, body []byte) ([]byte, error) {
	u := w.base + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	var in io.Reader
	if body != nil {
		in = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, u, in)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", accept)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := w.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode < 300 {
		return b, nil
	}
	return nil, refusalOf(resp, b)
}

// refusalOf converts an error answer.
func refusalOf(resp *http.Response, b []byte) error {
	wait, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
	var s metav1.Status
	if json.Unmarshal(b, &s) != nil || s.Kind != "Status" || s.Code == 0 {
		return apierrors.NewGenericServerResponse(resp.StatusCode, resp.Request.Method, schema.GroupResource{}, "", strings.TrimSpace(string(b[:min(len(b), 200)])), wait, true)
	}
	if wait > 0 {
		if s.Details == nil {
			s.Details = &metav1.StatusDetails{}
		}
		s.Details.RetryAfterSeconds = int32(wait)
	}
	return &apierrors.StatusError{ErrStatus: s}
}

// The length of a page is chosen to fit livePage, by the size of earlier objects.
const (
	livePage = 4 << 20
	mostLive = 2000
)

// list yields the objects of a collection one by one, in the order of their keys in etcd. The
// bytes are valid until the next iteration. An expired list continues at the same key with
// newer objects. A kind that does not exist has no objects.
func (w *wire) list(ctx context.Context, path string, query url.Values) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		limit, next := 500, ""
		for {
			q := url.Values{"limit": {strconv.Itoa(limit)}}
			for k, v := range query {
				q[k] = v
			}
			if next != "" {
				q.Set("continue", next)
			}
			var page []byte
			hard := 0
			err := retry(ctx, func(ctx context.Context) (err error) {
				page, err = w.do(ctx, http.MethodGet, path, q, "application/json", nil)
				if hard++; apierrors.IsInternalError(err) && hard == hardTries {
					// A failing conversion webhook does not recover soon.
					return errors.New(err.Error())
				}
				return err
			})
			if apierrors.IsResourceExpired(err) && next != "" {
				var s apierrors.APIStatus
				if asStatus(err, &s) && s.Status().Continue != "" {
					next = s.Status().Continue
					continue
				}
			}
			if apierrors.IsNotFound(err) {
				return
			}
			if err != nil {
				yield(nil, err)
				return
			}
			n := 0
			next, err = items(page, func(item []byte) bool {
				n++
				return yield(item, nil)
			})
			switch {
			case errors.Is(err, errStopped):
				return
			case err != nil:
				yield(nil, fmt.Errorf("decode list: %w", err))
				return
			case next == "":
				return
			}
			if n > 0 {
				limit = min(max(livePage/(len(page)/n+1), 1), mostLive)
			}
		}
	}
}

// errStopped ends a list when the caller breaks.
var errStopped = errors.New("stopped")

// items calls f with each item of a list until f returns false, and returns the continue
// token.
func items(page []byte, f func([]byte) bool) (next string, err error) {
	d := json.NewDecoder(bytes.NewReader(page))
	if _, err := d.Token(); err != nil {
		return "", err
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return "", err
		}
		switch key {
		case "metadata":
			var m metav1.ListMeta
			if err := d.Decode(&m); err != nil {
				return "", err
			}
			next = m.Continue
		case "items":
			t, err := d.Token()
			if err != nil {
				return "", err
			}
			if t == nil { // null
				continue
			}
			var item json.RawMessage
			for d.More() {
				if err := d.Decode(&item); err != nil {
					return "", err
				}
				if !f(item) {
					return "", errStopped
				}
			}
			if _, err := d.Token(); err != nil {
				return "", err
			}
		default:
			var skip json.RawMessage
			if err := d.Decode(&skip); err != nil {
				return "", err
			}
		}
	}
	return next, nil
}
