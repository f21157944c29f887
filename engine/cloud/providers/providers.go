// Package providers lists the clouds that daemons and charts can use. Daemons name
// none of them.
//
// # A new cloud
//
// A cloud is a package below engine/cloud and an entry of [All]. The package
// implements three views of the cloud:
//
//   - [Metadata]: what a machine may ask about itself. The bootstrapper uses it
//     before the machine is a node, the join service on control planes.
//   - [Control]: groups and machines, as the operator on a control plane reaches
//     them, with the credentials of that machine.
//   - the view of the console on the user's computer: Provider of package engine,
//     added to its NewProvider.
//
// Errors wrap those of package cloud, and [constellation/engine/cloud/cloudtest]
// has the tests that every Control must pass.
package providers

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
)

// Metadata is what a machine may ask its cloud about itself. It is safe for
// concurrent use.
type Metadata interface {
	// Self returns the machine that asks.
	Self(context.Context) (cloud.Instance, error)
	// Peers returns all machines of the cluster, this one included. The list may lag.
	Peers(context.Context) ([]cloud.Instance, error)
	// LoadBalancer returns the host, without a port, of the load balancer in front of
	// the control planes.
	LoadBalancer(context.Context) (string, error)
	// InitSecretHash returns the SHA-256 of the init secret, 32 bytes.
	InitSecretHash(context.Context) ([]byte, error)
}

// Control creates and deletes machines. It is safe for concurrent use. After an
// error, whether the request took effect is unknown.
type Control interface {
	// Groups returns the scaling groups. With an error that wraps cloud.ErrPartial the
	// list lacks some.
	Groups(context.Context) ([]cloud.Group, error)
	// Instances returns the machines of all groups, also those that are being
	// deleted. The list may lag, and may be partial as that of Groups.
	Instances(context.Context) ([]cloud.Instance, error)
	// Instance returns the current state of one machine. The error wraps
	// cloud.ErrNotFound if the cloud does not know the key, or no longer, even if another
	// incarnation of the machine exists.
	Instance(ctx context.Context, key string) (cloud.Instance, error)
	// SetGroupImage sets the image of machines that the group will create.
	SetGroupImage(ctx context.Context, groupID, image string) error
	// CreateInstances creates a machine for each token and returns them in the order
	// of the tokens, before they have booted. A token never makes a second machine:
	// a repeated one returns the first machine, with state cloud.Terminated after its
	// deletion, for cloud.TokenMemory at least. Tokens are 24 hexadecimal digits.
	CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error)
	// DeleteInstances starts to delete the machines with these keys. Those that do not exist
	// are no error. Another incarnation of a machine is not deleted.
	DeleteInstances(ctx context.Context, keys []string) error
}

// Provider is a cloud.
type Provider struct {
	// Name is the value of --provider, of CONSTELLATION_PROVIDER and of the charts'
	// value provider, and the key of the cloud's section in configuration and state.
	Name string
	// MetadataAddress and ControlAddress are the default addresses of the two services;
	// see the package of the cloud for their formats.
	MetadataAddress, ControlAddress string
	// TPMAddress is the address of a machine's TPM in pods; see attestation.OpenTPM.
	TPMAddress string
	// AutoscalerStandIn is whether the operator's chart installs a Deployment in the place
	// of the cluster autoscaler, which knows no groups of this cloud.
	AutoscalerStandIn bool
	// Metadata returns a client of the metadata server at address. It sends nothing yet.
	Metadata func(address string) Metadata
	// Control returns a client of the control API at address for a control plane whose
	// metadata server has the credentials. It sends nothing yet.
	Control func(metadata, address string) Control
}

// ChartValues returns the values of our charts that depend on the provider, by path.
// A chart that lacks one of them is of an older release and has it built in.
func (p Provider) ChartValues() map[string]any {
	return map[string]any{
		"provider":                    p.Name,
		"metadataURL":                 p.MetadataAddress,
		"cloudURL":                    p.ControlAddress,
		"joinservice.tpm":             p.TPMAddress,
		"operator.autoscaler.standIn": p.AutoscalerStandIn,
	}
}

// All returns the providers of this program, sorted by name.
func All() []Provider {
	return []Provider{{
		Name:            "sandbox",
		MetadataAddress: sandboxapi.DefaultMetadata,
		ControlAddress:  sandboxapi.DefaultControl,
		TPMAddress:      "unix:/run/tpm/tpm.sock",

		AutoscalerStandIn: true,
		Metadata:          func(address string) Metadata { return sandboxapi.NewMetadata(address) },
		Control: func(metadata, address string) Control {
			return sandboxapi.NewInCluster(sandboxapi.NewMetadata(metadata), address)
		},
	}}
}

// Names returns the names of all providers, sorted.
func Names() []string {
	var names []string
	for _, p := range All() {
		names = append(names, p.Name)
	}
	return names
}

// Find returns the provider of a name. The error lists the names that there are.
func Find(name string) (Provider, error) {
	all := All()
	if n := slices.IndexFunc(all, func(p Provider) bool { return p.Name == name }); n >= 0 {
		return all[n], nil
	}
	return Provider{}, fmt.Errorf("provider %q is not known: use %s", name, strings.Join(Names(), " or "))
}
