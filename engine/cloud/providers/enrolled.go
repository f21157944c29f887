package providers

import (
	"constellation/engine/attestation"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/section"
)

// enrolled is the list of machines that `machine add` prepares, for new clusters.
func enrolled() Provider {
	return Provider{
		Name:       machines.Enrolled,
		Title:      "your machines",
		Enrolled:   true,
		DividePods: true,
		NoImages:   true,
		Config:     machines.EnrolledConfig(),
		State:      machines.EnrolledState(),
		About:      "enrolled is a list of Linux\nmachines that exist already; `constellation machine add` prepares and lists them. endpoint is\nthe name or address, without a port, of the load balancer in front of the control planes. With\none control plane that is its own address. balancer: {address: IP} has haproxy and keepalived set\nup on the control planes, which serve the API at this address and port 8443.",
		Example:    func(string) section.Values { return section.Values{"endpoint": "api.example.com"} },
		Console: func(config, state section.Values) (Console, error) {
			return machines.NewEnrolledConsole(config, state), nil
		},
		Metadata:  func(address string) Metadata { return machines.NewMetadata(address) },
		Control:   func(_, address string) Control { return machines.NewControl(address) },
		GroupName: machines.GroupName,

		MetadataAddress: machines.InventoryFile,
		ControlAddress:  machines.InventoryFile,
		Attestation:     attestation.EnrolledMethod(),
		TPMAddress:      "enrolled:" + machines.IdentityDir,
		IdentityDir:     machines.IdentityDir,
		Advice: Advice{
			Cloud:  "the list of machines",
			Look:   "`constellation machine list`",
			Failed: "`constellation machine logs` shows why",
			Create: "run `constellation machine add`",
			Renew:  "run `constellation machine remove`, then `constellation machine add`",
			Offer:  "add kubeadm, kubelet and kubectl of Kubernetes {version} to components in the configuration, each with url and digest",
		},
	}
}
