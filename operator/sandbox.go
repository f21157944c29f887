package operator

import (
	"context"
	"errors"
	"strings"
	"sync"

	"constellation/engine/cloud"
	"constellation/engine/cloud/local"
)

// SandboxCloud is the cloud on this computer, as a control plane reaches it. It is
// safe for concurrent use.
type SandboxCloud struct {
	metadata *local.Metadata
	address  string

	mu     sync.Mutex
	client *local.Client
}

// NewSandboxCloud returns a SandboxCloud that asks metadata for the token of the
// control API at address when it first needs it, and again when it is refused. An
// address of the form unix:PATH is the host's own socket, which wants no token.
func NewSandboxCloud(metadata *local.Metadata, address string) *SandboxCloud {
	return &SandboxCloud{metadata: metadata, address: address}
}

// Groups returns the scaling groups.
func (c *SandboxCloud) Groups(ctx context.Context) ([]cloud.Group, error) {
	return call(ctx, c, func(l *local.Client) ([]cloud.Group, error) { return l.Groups(ctx) })
}

// Instances returns all instances, as [local.Client.Instances] does.
func (c *SandboxCloud) Instances(ctx context.Context) ([]cloud.Instance, error) {
	return call(ctx, c, func(l *local.Client) ([]cloud.Instance, error) { return l.Instances(ctx) })
}

// Instance returns one instance; the error wraps cloud.ErrNotFound if there is none.
func (c *SandboxCloud) Instance(ctx context.Context, providerID string) (cloud.Instance, error) {
	return call(ctx, c, func(l *local.Client) (cloud.Instance, error) { return l.Instance(ctx, providerID) })
}

// Describe returns those of the instances that there are; it is one call.
func (c *SandboxCloud) Describe(ctx context.Context, providerIDs []string) ([]cloud.Instance, error) {
	return call(ctx, c, func(l *local.Client) ([]cloud.Instance, error) { return l.Describe(ctx, providerIDs) })
}

// SetGroupImage sets the image of a group's future instances.
func (c *SandboxCloud) SetGroupImage(ctx context.Context, groupID, image string) error {
	_, err := call(ctx, c, func(l *local.Client) (struct{}, error) { return struct{}{}, l.SetGroupImage(ctx, groupID, image) })
	return err
}

// CreateInstances adds an instance to a group for each token, once per token, as
// [local.Client.CreateInstances] does.
func (c *SandboxCloud) CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error) {
	return call(ctx, c, func(l *local.Client) ([]cloud.Instance, error) { return l.CreateInstances(ctx, groupID, tokens) })
}

// DeleteInstances deletes instances; that some are not there is no error.
func (c *SandboxCloud) DeleteInstances(ctx context.Context, providerIDs []string) error {
	_, err := call(ctx, c, func(l *local.Client) (struct{}, error) { return struct{}{}, l.DeleteInstances(ctx, providerIDs) })
	return err
}

func call[T any](ctx context.Context, c *SandboxCloud, f func(*local.Client) (T, error)) (T, error) {
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
func (c *SandboxCloud) connect(ctx context.Context, stale *local.Client) (*local.Client, error) {
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
	c.client = local.NewClient(c.address, token)
	return c.client, nil
}
