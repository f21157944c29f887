package sandboxapi

import (
	"context"

	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// Console is the sandbox as the console on the same computer reaches it: through the
// socket of the control API.
type Console struct{ client *Client }

// NewConsole returns a console's client of the sandbox whose control API has a socket at
// path. It sends nothing yet.
func NewConsole(path string) Console { return Console{NewClient("unix:"+path, "")} }

// Describe returns the sandbox and its addresses.
func (c Console) Describe(ctx context.Context) (cloud.Info, error) {
	i, err := c.client.Sandbox(ctx)
	out := cloud.Info{UID: i.UID, Name: i.Name, ClusterEndpoint: i.KubernetesEndpoint, InitEndpoint: i.InitEndpoint, Kubernetes: []version.Version{}}
	for _, s := range i.KubernetesVersions {
		if v, err := version.Parse(s); err == nil {
			out.Kubernetes = append(out.Kubernetes, v)
		}
	}
	return out, err
}

// Groups returns the groups of the sandbox.
func (c Console) Groups(ctx context.Context) ([]cloud.Group, error) { return c.client.Groups(ctx) }

// Images returns the catalogue of images.
func (c Console) Images(ctx context.Context) ([]cloud.Image, error) { return c.client.Images(ctx) }

// Components returns the components of a Kubernetes version.
func (c Console) Components(ctx context.Context, v version.Version) (component.Signed, error) {
	return c.client.Components(ctx, v.String())
}

// Machines returns the machines, and how far they have booted.
func (c Console) Machines(ctx context.Context) ([]cloud.Machine, error) {
	i, err := c.client.Sandbox(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]cloud.Machine, 0, len(i.Machines))
	for _, m := range i.Machines {
		x := cloud.Machine{Instance: m.Instance, Since: m.Started, Console: m.Console}
		_, x.GroupName, _ = ParseGroupID(m.Group)
		switch {
		case m.State == cloud.Terminating || m.State == cloud.Terminated:
			x.Stage = plan.NodeGone
		case m.State == cloud.Failed || m.State == cloud.Stopped || m.Boot == BootFailed || m.Boot == BootStopped:
			x.Stage = plan.NodeFailed
		case m.Boot == BootCreating:
			x.Stage = plan.NodeCreating
		case m.Boot == BootBooting:
			x.Stage = plan.NodeBooting
		}
		out = append(out, x)
	}
	return out, nil
}
