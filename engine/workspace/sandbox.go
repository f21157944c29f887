package workspace

import (
	"strings"

	"constellation/engine/cloud/section"
)

// SandboxInfo is what a workspace must know about its sandbox.
type SandboxInfo struct {
	Name string `json:"name"`
	// Hollow says that its machines are simulated, and that its cluster is there.
	Hollow     bool   `json:"hollow,omitempty"`
	UID        string `json:"uid"`
	Release    string `json:"release"`
	Kubernetes string `json:"kubernetes"`
	// Image is the version of the OS image, Measurements its expected registers:
	// PCR index to 64 hex digits.
	Image        string            `json:"image"`
	Measurements map[uint32]string `json:"measurements"`
	// TrustRoots are PEM certificates: the roots of attestation keys.
	TrustRoots string `json:"trustRoots"`
	// ClusterEndpoint and InitEndpoint are host:port on this computer;
	// InClusterEndpoint is the load balancer as machines see it.
	ClusterEndpoint   string `json:"clusterEndpoint"`
	InitEndpoint      string `json:"initEndpoint"`
	InClusterEndpoint string `json:"inClusterEndpoint"`
	NodeCIDR          string `json:"nodeCIDR"`
	PodCIDR           string `json:"podCIDR"`
	ServiceCIDR       string `json:"serviceCIDR"`
	ControlPlanes     int    `json:"controlPlanes"`
	Workers           int    `json:"workers"`
	// Socket is the path of the control API.
	Socket string `json:"socket"`
	// Simulated says that its machines are processes that only do as machines would.
	Simulated bool `json:"simulated,omitempty"`
	// InitSecret proves that the caller owns the machines. It goes into the state
	// file and nowhere else.
	InitSecret []byte `json:"-"`
	// Kubeconfig leads to the cluster, where that comes with the sandbox.
	Kubeconfig []byte `json:"-"`
}

// provider is the name of the provider that the information is of.
func (i SandboxInfo) provider() string { return "sandbox" }

// config returns the provider's section of a configuration.
func (i SandboxInfo) config() section.Values { return section.Values{"name": i.Name} }

// state returns the provider's section of a state.
func (i SandboxInfo) state() section.Values {
	return section.Values{"name": i.Name, "socket": i.Socket, "hollow": i.Hollow, "simulated": i.Simulated}
}

// hollowNote is the comment above the attestation of hollow machines.
const hollowNote = "The machines of this cluster are hollow: simulated, so they prove nothing, and what\n    # follows is never asked for."

// clusterName names the cluster in a sandbox. That of hollow machines says so, wherever
// it is shown.
func (i SandboxInfo) clusterName() string {
	if !i.Hollow || strings.Contains(i.Name, "hollow") {
		return i.Name
	}
	name := "hollow-" + i.Name
	return strings.TrimRight(name[:min(len(name), 37)], "-")
}
