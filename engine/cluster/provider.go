package cluster

import (
	"constellation/engine/version"
)

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
