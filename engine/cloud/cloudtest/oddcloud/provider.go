package oddcloud

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// Name is the name of the provider.
const Name = "odd"

// UID names the infrastructure of every odd cloud.
const UID = "0dd0dd0dd0dd0dd0"

// InitSecret is the init secret of every odd cloud.
const InitSecret = "odd-secret-0123456789-abcdefghij"

// Provider returns the entry of this cloud in the registry. Its control API has the address
// odd://demo. The metadata server of a machine has the address odd://demo/NAME.
func (c *Cloud) Provider() providers.Provider {
	return providers.Provider{
		Name: Name, NoImages: len(c.images) == 0,
		Config:  section.Schema{{Name: "realm", Required: true, Identity: true}, {Name: "zones", Kind: section.List}},
		State:   section.Schema{{Name: "realm", Required: true, Identity: true}},
		About:   "odd is a cloud of tests.",
		Example: func(cluster string) section.Values { return section.Values{"realm": cluster} },
		Advice:  providers.Advice{Cloud: "realm {realm}", Create: "create realm {realm}"},
		Console: func(config, _ section.Values) (providers.Console, error) {
			if realm := config.Text("realm"); realm != "demo" {
				return nil, fmt.Errorf("open realm %s: %w", realm, cloud.ErrNotFound)
			}
			return console{c}, nil
		},
		MetadataAddress: ID("control-plane-0"), ControlAddress: strings.TrimSuffix(ID(""), "/"),
		Attestation: attestation.TPMMethod(), KubeletCloudProvider: "external",
		TPMAddress: "/dev/tpmrm0", TPMDevice: "/dev/tpmrm0",
		Metadata: func(address string) providers.Metadata { return metadata{c, strings.TrimPrefix(address, ID(""))} },
		Control:  func(string, string) providers.Control { return c },
	}
}

// console implements providers.Console.
type console struct{ *Cloud }

// Describe returns what the machines belong to. The cloud reports no addresses and no versions.
func (c console) Describe(ctx context.Context) (cloud.Info, error) {
	return cloud.Info{UID: UID, Name: "demo"}, c.enter(ctx)
}

// Machines returns the machines, as late as Instances. The cloud does not report how far a machine
// has booted.
func (c console) Machines(ctx context.Context) ([]cloud.Machine, error) {
	all, err := c.Instances(ctx)
	out := make([]cloud.Machine, 0, len(all))
	for _, i := range all {
		m := cloud.Machine{Instance: i, GroupName: groupName(i.Group)}
		switch i.State {
		case cloud.Creating:
			m.Stage = plan.NodeCreating
		case cloud.Failed, cloud.Stopped:
			m.Stage = plan.NodeFailed
		case cloud.Terminated:
			m.Stage = plan.NodeGone
		}
		out = append(out, m)
	}
	return out, err
}

// Images returns Options.Images.
func (c console) Images(ctx context.Context) ([]cloud.Image, error) { return c.images, c.enter(ctx) }

// Components returns Options.Components.
func (c console) Components(ctx context.Context, _ version.Version) (component.Signed, error) {
	return c.components, c.enter(ctx)
}

// metadata implements providers.Metadata for one machine.
type metadata struct {
	*Cloud
	name string
}

// Self returns the machine.
func (m metadata) Self(ctx context.Context) (cloud.Instance, error) {
	return m.Instance(ctx, ID(m.name))
}

// Peers returns all machines, as late as Instances.
func (m metadata) Peers(ctx context.Context) ([]cloud.Instance, error) { return m.Instances(ctx) }

// LoadBalancer fails: the cloud has none.
func (m metadata) LoadBalancer(ctx context.Context) (string, error) {
	return "", errors.Join(m.enter(ctx), fmt.Errorf("load balancer: %w", cloud.ErrNotFound))
}

// InitSecretHash returns the hash of InitSecret.
func (m metadata) InitSecretHash(ctx context.Context) ([]byte, error) {
	sum := sha256.Sum256([]byte(InitSecret))
	return sum[:], m.enter(ctx)
}
