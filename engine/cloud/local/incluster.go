package local

import (
	"context"
	"errors"
	"strings"
	"sync"

	"constellation/engine/cloud"
)

// InCluster is the control API as a control plane reaches it: with the token that
// the metadata server gives to control planes. It is safe for concurrent use.
type InCluster struct {
	metadata *Metadata
	address  string

	mu     sync.Mutex
	client *Client
}

// NewInCluster returns a InCluster that asks metadata for the token of the
// control API at address when it first needs it, and again when it is refused. An
// address of the form unix:PATH is the host's own socket, which wants no token.
func NewInCluster(metadata *Metadata, address string) *InCluster {
	return &InCluster{metadata: metadata, address: address}
}

// Groups returns the scaling groups.
func (c *InCluster) Groups(ctx context.Context) ([]cloud.Group, error) {
	return call(ctx, c, func(l *Client) ([]cloud.Group, error) { return l.Groups(ctx) })
}

// Instances returns all instances, as [Client.Instances] does.
func (c *InCluster) Instances(ctx context.Context) ([]cloud.Instance, error) {
	return call(ctx, c, func(l *Client) ([]cloud.Instance, error) { return l.Instances(ctx) })
}

// Instance returns one instance; the error wraps cloud.ErrNotFound if there is none.
func (c *InCluster) Instance(ctx context.Context, providerID string) (cloud.Instance, error) {
	return call(ctx, c, func(l *Client) (cloud.Instance, error) { return l.Instance(ctx, providerID) })
}

// Describe returns those of the instances that there are; it is one call.
func (c *InCluster) Describe(ctx context.Context, providerIDs []string) ([]cloud.Instance, error) {
	return call(ctx, c, func(l *Client) ([]cloud.Instance, error) { return l.Describe(ctx, providerIDs) })
}

// SetGroupImage sets the image of a group's future instances.
func (c *InCluster) SetGroupImage(ctx context.Context, groupID, image string) error {
	_, err := call(ctx, c, func(l *Client) (struct{}, error) { return struct{}{}, l.SetGroupImage(ctx, groupID, image) })
	return err
}

// CreateInstances adds an instance to a group for each token, once per token, as
// [Client.CreateInstances] does.
func (c *InCluster) CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error) {
	return call(ctx, c, func(l *Client) ([]cloud.Instance, error) { return l.CreateInstances(ctx, groupID, tokens) })
}

// DeleteInstances deletes instances; that some are not there is no error.
func (c *InCluster) DeleteInstances(ctx context.Context, providerIDs []string) error {
	_, err := call(ctx, c, func(l *Client) (struct{}, error) { return struct{}{}, l.DeleteInstances(ctx, providerIDs) })
	return err
}

func call[T any](ctx context.Context, c *InCluster, f func(*Client) (T, error)) (T, error) {
	var none T
	l, err := c.connect(ctx, nil)
	if err != nil {
		return none, err
	}
	v, err := f(l)
	if !errors.Is(err, cloud.ErrDenied) {
		return v, err
	}
	// The token is replaced when the cloud restarts.
	if l, err = c.connect(ctx, l); err != nil {
		return none, err
	}
	return f(l)
}

// connect returns a client that is not stale.
func (c *InCluster) connect(ctx context.Context, stale *Client) (*Client, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.client != nil && c.client != stale {
		return c.client, nil
	}
	var token string
	if !strings.HasPrefix(c.address, "unix:") {
		var err error
		if token, err = c.metadata.Token(ctx); err != nil {
			return nil, err
		}
	}
	c.client = NewClient(c.address, token)
	return c.client, nil
}
