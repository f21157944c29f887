package engine

import (
	"context"
	"fmt"

	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// Cloud is what the engine needs from the cloud that the machines are in. Errors
// wrap those of package cloud.
type Cloud interface {
	// Describe says what the machines belong to.
	Describe(ctx context.Context) (cluster.ProviderInfo, error)
	Groups(ctx context.Context) ([]cloud.Group, error)
	// Machines returns all instances.
	Machines(ctx context.Context) ([]cluster.CloudMachine, error)
	Images(ctx context.Context) ([]cloud.Image, error)
	// Components returns what a node must have installed for a Kubernetes version, with what
	// vouches for it. The error wraps cloud.ErrNotFound and names what there is.
	Components(ctx context.Context, v version.Version) (component.Signed, error)
}

// NewCloud returns the cloud that configuration and state name.
func NewCloud(_ context.Context, c *workspace.Config, s *workspace.State) (Cloud, error) {
	from, err := providers.Known(s.Infrastructure.Provider)
	if err != nil {
		return nil, err
	}
	if c.Provider.Name != from.Name {
		return nil, fmt.Errorf("open provider %s: configuration names provider %q", from.Name, c.Provider.Name)
	}
	return from.Console(c.Provider.Section, s.Infrastructure.Section)
}
