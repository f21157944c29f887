package gcp

import (
	"context"
	"fmt"
	"strings"
	"time"

	"cloud.google.com/go/auth/credentials"
	compute "google.golang.org/api/compute/v1"
	"google.golang.org/api/option"

	"constellation/engine/cloud"
)

// Client sends requests to Compute Engine: with credentials, below the rate limits, and with errors of this
// package. It is safe for concurrent use.
type Client struct {
	API    *compute.Service // for the functions of this type
	limits *limits
}

// Dial returns a client. It sends nothing yet, but may read files that have credentials.
func Dial(ctx context.Context, o Options) (*Client, error) {
	opts := []option.ClientOption{option.WithUserAgent("constellation")}
	if o.Endpoint != "" {
		opts = append(opts, option.WithEndpoint(o.Endpoint))
	}
	if o.HTTP != nil {
		opts = append(opts, option.WithHTTPClient(o.HTTP))
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

// Credentials returns the default credentials.
func Credentials() (option.ClientOption, error) {
	found, err := credentials.DetectDefault(&credentials.DetectOptions{Scopes: []string{scope}})
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

// endless is how long an operation is waited for. The next request with its ID attaches to it.
const endless = 5 * time.Minute

// Begin sends a request that changes something. Its operation has not ended yet.
func (c *Client) Begin(ctx context.Context, op string, send func() (*compute.Operation, error)) (o *compute.Operation, err error) {
	err = c.limits.do(ctx, writes, op, func() (err error) {
		o, err = send()
		return err
	})
	return o, err
}

// Change sends a request that changes something, and waits until its operation has ended.
func (c *Client) Change(ctx context.Context, project, op string, send func() (*compute.Operation, error)) error {
	o, err := c.Begin(ctx, op, send)
	if err != nil {
		return err
	}
	return c.Finish(ctx, project, op, o, endless)
}

// Finish waits until an operation has ended, for a time at most, and returns its error.
func (c *Client) Finish(ctx context.Context, project, op string, o *compute.Operation, limit time.Duration) error {
	name, zone, region, begun := o.Name, base(o.Zone), base(o.Region), time.Now()
	for o.Status != "DONE" {
		if time.Since(begun) >= limit {
			return &Error{Op: op, Kind: cloud.ErrUnavailable, Message: fmt.Sprintf("operation %s has not ended for %v", name, limit)}
		}
		if err := c.limits.do(ctx, operations, op, func() (err error) {
			switch {
			case zone != "":
				o, err = c.API.ZoneOperations.Wait(project, zone, name).Context(ctx).Do()
			case region != "":
				o, err = c.API.RegionOperations.Wait(project, region, name).Context(ctx).Do()
			default:
				o, err = c.API.GlobalOperations.Wait(project, name).Context(ctx).Do()
			}
			return err
		}); err != nil {
			return err
		}
	}
	return explainOperation(op, o, time.Now())
}
