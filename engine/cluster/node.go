package cluster

import (
	"strings"
	"time"

	"constellation/engine/cloud"
)

// ControlPlaneRole is the role of nodes that are one.
const ControlPlaneRole = string(cloud.ControlPlane)

// Condition is a condition of NodeVersion, in Kubernetes' sense.
type Condition struct {
	Type    string    `json:"type"`
	Status  string    `json:"status"`
	Reason  string    `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
	Since   time.Time `json:"since,omitzero"`
}

// Service is something that runs in the cluster and has a version.
type Service struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Kind    string `json:"kind"` // ServiceOfRelease or ServiceOfKubernetes
	Ready   int    `json:"ready"`
	Wanted  int    `json:"wanted"`
	Message string `json:"message,omitempty"` // why it is not ready
}

// Kinds of services.
const (
	ServiceOfRelease    = "release"    // installed by a chart of the release
	ServiceOfKubernetes = "kubernetes" // bound to the version of Kubernetes
)

// Node is a node of the cluster.
type Node struct {
	Name  string `json:"name"`
	Group string `json:"group,omitempty"`
	Role  string `json:"role"` // control-plane, worker
	// State is one of the Node constants: ready, not-ready.
	State      string `json:"state"`
	Kubernetes string `json:"kubernetes"` // of the kubelet
	Image      string `json:"image,omitempty"`
	// ImageVersion is the release of the image; empty if it is unknown.
	ImageVersion string `json:"imageVersion,omitempty"`
	// Components is the name of the ConfigMap that the node was installed from.
	Components string `json:"components,omitempty"`
	IP         string `json:"ip,omitempty"`
	ProviderID string `json:"providerID,omitempty"`
	Cordoned   bool   `json:"cordoned,omitempty"`
	// Current reports whether image and components are the target's.
	Current bool `json:"current"`
	// Heir is the node that replaces it, Donor the one that it replaces; empty outside of
	// a rollout.
	Heir  string `json:"heir,omitempty"`
	Donor string `json:"donor,omitempty"`
	// InPlace says that its group is upgraded in place: its image stays.
	InPlace bool `json:"inPlace,omitempty"`
	// Skipped says that people have rollouts leave it as it is. With a whole group it is not set.
	Skipped bool      `json:"skipped,omitempty"`
	Message string    `json:"message,omitempty"` // why it is not ready
	Created time.Time `json:"created,omitzero"`
	// UID is that of the object, GroupID the cloud's ID of the group.
	UID     string `json:"-"`
	GroupID string `json:"-"`
}

// Denial is a request that the API server refused to a user that it knows.
type Denial struct {
	Verb     string // list
	Resource string // with its group: deployments.apps
	// Namespace is empty if it is asked for in all of them, or in none.
	Namespace string
	// User is empty if the API server does not tell. It is not cleaned.
	User string
}

// String is "list deployments.apps in kube-system".
func (d Denial) String() string {
	s := strings.TrimSpace(d.Verb + " " + d.Resource)
	if d.Namespace != "" {
		s += " in " + d.Namespace
	}
	return s
}
