package engine

import (
	"context"
	"errors"
	"fmt"

	"constellation/engine/cloud"
	"constellation/engine/cloud/local"
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
	Describe(ctx context.Context) (ProviderInfo, error)
	Groups(ctx context.Context) ([]cloud.Group, error)
	// Machines returns all instances.
	Machines(ctx context.Context) ([]cluster.CloudMachine, error)
	Images(ctx context.Context) ([]cloud.Image, error)
	// Components returns what a node must have installed for a Kubernetes version, with what
	// vouches for it. The error wraps cloud.ErrNotFound and names what there is.
	Components(ctx context.Context, v version.Version) (component.Signed, error)
}

// ProviderInfo is what machines belong to.
type ProviderInfo struct {
	// UID names this incarnation of the infrastructure.
	UID  string
	Name string
	// ClusterEndpoint and InitEndpoint are host:port as this computer reaches them;
	// empty if the cloud does not tell.
	ClusterEndpoint string
	InitEndpoint    string
	// Kubernetes are the versions that the cloud has components of; nil if it has what
	// releases name.
	Kubernetes []version.Version
	// Arch is the architecture of machines in Go's words; empty: this computer's.
	Arch string
}

// sandboxProvider speaks to the sandbox on this computer through its socket.
type sandboxProvider struct{ client *local.Client }

// NewProvider returns the provider that configuration and state name.
func NewProvider(_ context.Context, c *workspace.Config, s *workspace.State) (Provider, error) {
	if c.Provider.Sandbox == nil || s.Infrastructure.Sandbox == nil {
		return nil, fmt.Errorf("provider %q is not in this release", s.Infrastructure.Provider)
	}
	return sandboxProvider{local.NewClient("unix:"+s.Infrastructure.Sandbox.Socket, "")}, nil
}

func (p sandboxProvider) Describe(ctx context.Context) (ProviderInfo, error) {
	i, err := p.client.Sandbox(ctx)
	out := ProviderInfo{UID: i.UID, Name: i.Name, ClusterEndpoint: i.KubernetesEndpoint, InitEndpoint: i.InitEndpoint, Kubernetes: []version.Version{}}
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
		case m.State == cloud.Failed || m.State == cloud.Stopped || m.Boot == local.BootFailed || m.Boot == local.BootStopped:
			c.Stage = plan.NodeFailed
		case m.Boot == local.BootCreating:
			c.Stage = plan.NodeCreating
		case m.Boot == local.BootBooting:
			c.Stage = plan.NodeBooting
		}
		out = append(out, c)
	}
	return out, nil
}

// cloudError puts an error of a provider into the user's words.
func cloudError(op, name string, err error) error {
	e := &plan.Error{Op: op, Err: err}
	switch {
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, cloud.ErrUnavailable):
		e.Remedy = fmt.Sprintf("is sandbox %s running? `constellation sandbox status` tells, `constellation sandbox up` starts it", name)
	case errors.Is(err, cloud.ErrDenied):
		e.Remedy = "run as the user that started the sandbox"
	}
	return e
}
