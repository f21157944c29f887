package engine

import (
	"context"
	"fmt"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// Provider is what the engine needs from the cloud that the machines are in. Errors
// wrap those of package cloud.
type Provider interface {
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

// sandboxProvider speaks to the sandbox on this computer through its socket.
type sandboxProvider struct{ client *sandboxapi.Client }

// NewProvider returns the provider that configuration and state name.
func NewProvider(_ context.Context, c *workspace.Config, s *workspace.State) (Provider, error) {
	if c.Provider.Sandbox == nil || s.Infrastructure.Sandbox == nil {
		return nil, fmt.Errorf("provider %q is not in this release", s.Infrastructure.Provider)
	}
	return sandboxProvider{sandboxapi.NewClient("unix:"+s.Infrastructure.Sandbox.Socket, "")}, nil
}

func (p sandboxProvider) Describe(ctx context.Context) (cluster.ProviderInfo, error) {
	i, err := p.client.Sandbox(ctx)
	out := cluster.ProviderInfo{UID: i.UID, Name: i.Name, ClusterEndpoint: i.KubernetesEndpoint, InitEndpoint: i.InitEndpoint, Kubernetes: []version.Version{}}
	for _, s := range i.KubernetesVersions {
		if v, err := version.Parse(s); err == nil {
			out.Kubernetes = append(out.Kubernetes, v)
		}
	}
	return out, err
}

func (p sandboxProvider) Groups(ctx context.Context) ([]cloud.Group, error) {
	return p.client.Groups(ctx)
}

func (p sandboxProvider) Images(ctx context.Context) ([]cloud.Image, error) {
	return p.client.Images(ctx)
}

func (p sandboxProvider) Components(ctx context.Context, v version.Version) (component.Signed, error) {
	return p.client.Components(ctx, v.String())
}

func (p sandboxProvider) Machines(ctx context.Context) ([]cluster.CloudMachine, error) {
	i, err := p.client.Sandbox(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]cluster.CloudMachine, 0, len(i.Machines))
	for _, m := range i.Machines {
		c := cluster.CloudMachine{Instance: m.Instance, Since: m.Started, Console: m.Console}
		switch {
		case m.State == cloud.Terminating || m.State == cloud.Terminated:
			c.Stage = plan.NodeGone
		case m.State == cloud.Failed || m.State == cloud.Stopped || m.Boot == sandboxapi.BootFailed || m.Boot == sandboxapi.BootStopped:
			c.Stage = plan.NodeFailed
		case m.Boot == sandboxapi.BootCreating:
			c.Stage = plan.NodeCreating
		case m.Boot == sandboxapi.BootBooting:
			c.Stage = plan.NodeBooting
		}
		out = append(out, c)
	}
	return out, nil
}
