package cloud

import (
	"time"

	"constellation/engine/version"
)

// Info describes what machines belong to.
type Info struct {
	// UID names this incarnation of the infrastructure.
	UID  string
	Name string
	// ClusterEndpoint and InitEndpoint are host:port as this computer reaches them;
	// empty if the cloud does not report them.
	ClusterEndpoint string
	InitEndpoint    string
	// Kubernetes are the versions that the cloud has components of; nil if it has what
	// releases name.
	Kubernetes []version.Version
	// Arch is the architecture of machines in Go's words; empty: this computer's.
	Arch string
}

// Machine is an instance and how far its start has come.
type Machine struct {
	Instance
	// GroupName is the Name of its Group. IDs of groups need not contain names.
	GroupName string
	// Stage is plan.NodeCreating, NodeBooting, NodeFailed or NodeGone; empty when the
	// machine is up.
	Stage string
	Since time.Time // of the last start; zero if the cloud does not report it
	// Console is the path of its console's log; empty if there is none here.
	Console string
	// Verifies is whether its agent verifies components whatever its image is.
	Verifies bool
}
