// Package api sends requests to Compute Engine, through Google's own client: with credentials, below the rate limits of the
// project, and with errors that have a remedy. It hides operations: a request that changes something returns when its
// operation has ended.
//
// It decides nothing about machines; packages gcp and infra do.
package api

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"cloud.google.com/go/auth/credentials"
	compute "google.golang.org/api/compute/v1"
	"google.golang.org/api/option"

	"constellation/engine/cloud"
)

// Scope is the access scope that machines and users need.
const Scope = "https://www.googleapis.com/auth/compute"

// Client sends requests to Compute Engine. It is safe for concurrent use.
type Client struct {
	API    *compute.Service // for the functions of this type
	limits *limits
}

// Dial returns a client. It sends nothing yet, but may read files that have credentials. endpoint is the URL of the API, up
// to and with the version; empty: Google's. sender sends the requests with their credentials; nil: the default credentials
// are found.
func Dial(ctx context.Context, endpoint string, sender *http.Client) (*Client, error) {
	opts := []option.ClientOption{option.WithUserAgent("constellation")}
	if endpoint != "" {
		opts = append(opts, option.WithEndpoint(endpoint))
	}
	if sender != nil {
		opts = append(opts, option.WithHTTPClient(sender))
	} else {
		found, err := Credentials()
		if err != nil {
			return nil, err
		}
		opts = append(opts, found)
	}
	api, err := compute.NewService(ctx, opts...)
	if err != nil {
		return nil, fmt.Errorf("open Google Cloud: %w", err)
	}
	return &Client{api, newLimits()}, nil
}

// NewReader returns a client without API, for Read of requests that the caller makes.
func NewReader() *Client { return &Client{limits: newLimits()} }

// Credentials returns the default credentials.
func Credentials() (option.ClientOption, error) {
	found, err := credentials.DetectDefault(&credentials.DetectOptions{Scopes: []string{Scope}})
	if err != nil {
		return nil, &Error{Op: "find credentials", Kind: cloud.ErrDenied, Message: err.Error(), Remedy: NoCredentials}
	}
	if strings.Contains(string(found.JSON()), `"private_key"`) {
		return nil, &Error{
			Op: "find credentials", Kind: cloud.ErrDenied, Message: "the default credentials are a key of a service account, which does not expire",
			Remedy: "delete the key, and use workload identity federation, the service account of the machine, or `gcloud auth application-default login --impersonate-service-account`",
		}
	}
	return option.WithAuthCredentials(found), nil
}

// Read sends a request that reads an object.
func (c *Client) Read(ctx context.Context, op string, send func() error) error {
	return c.limits.do(ctx, reads, op, send)
}

// List sends requests of a list until an answer has no token of a next page.
func (c *Client) List(ctx context.Context, op string, send func(token string) (next string, err error)) error {
	return c.limits.pages(ctx, op, send)
}

// Begin sends a request that changes something. Its operation has not ended yet.
func (c *Client) Begin(ctx context.Context, op string, send func() (*compute.Operation, error)) (o *compute.Operation, err error) {
	err = c.limits.do(ctx, writes, op, func() (err error) {
		o, err = send()
		return err
	})
	return o, err
}

// Change sends a request that changes something, and waits until its operation has ended, for a time at most.
func (c *Client) Change(ctx context.Context, project, op string, limit time.Duration, send func() (*compute.Operation, error)) error {
	o, err := c.Begin(ctx, op, send)
	if err != nil {
		return err
	}
	return c.Finish(ctx, project, op, o, limit)
}

// Finish waits until an operation has ended, for a time at most, and returns its error.
func (c *Client) Finish(ctx context.Context, project, op string, o *compute.Operation, limit time.Duration) error {
	name, zone, region := o.Name, last(o.Zone), last(o.Region)
	waits, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for o.Status != "DONE" {
		err := c.limits.do(waits, operations, op, func() (err error) {
			switch {
			case zone != "":
				o, err = c.API.ZoneOperations.Wait(project, zone, name).Context(waits).Do()
			case region != "":
				o, err = c.API.RegionOperations.Wait(project, region, name).Context(waits).Do()
			default:
				o, err = c.API.GlobalOperations.Wait(project, name).Context(waits).Do()
			}
			return err
		})
		switch {
		case err != nil && waits.Err() != nil && ctx.Err() == nil:
			return &Error{Op: op, Kind: cloud.ErrUnavailable, Message: fmt.Sprintf("operation %s has not ended for %v", name, limit), lost: true}
		case err != nil:
			return err
		}
	}
	return explainOperation(op, o, time.Now())
}

// last returns the last segment of a URL.
func last(url string) string { return url[strings.LastIndexByte(url, '/')+1:] }
