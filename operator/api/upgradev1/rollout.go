package upgradev1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// State is what a person wants of a Plan for now.
//
// +kubebuilder:validation:Enum=Running;Paused;Cancelled
type State string

// States of a Plan. Empty means Running.
const (
	// Running takes nodes.
	Running State = "Running"
	// Paused takes no more nodes; those that were begun are finished.
	Paused State = "Paused"
	// Cancelled ends what was begun and gives the nodes back.
	Cancelled State = "Cancelled"
)

// Rollout is how a Plan goes through the nodes. Its zero value is how
// system-upgrade-controller does it.
type Rollout struct {
	// state is Running, Paused or Cancelled; empty means Running.
	// +optional
	State State `json:"state,omitempty"`
	// rerun, whenever it is given a value that it did not have, upgrades all nodes again.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Rerun string `json:"rerun,omitempty"`
	// retry, whenever it is given another value, tries again where the upgrade failed.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Retry string `json:"retry,omitempty"`
	// dependsOn names Plans of the same namespace that have to be complete before. A Plan
	// with the same channel must have come to the same version, too.
	// +optional
	// +kubebuilder:validation:MaxItems=32
	DependsOn []string `json:"dependsOn,omitempty"`
	// controlPlanesFirst takes no other node while a control plane of this Plan is not done.
	// +optional
	ControlPlanesFirst bool `json:"controlPlanesFirst,omitempty"`
	// health is what has to be well before the next node is taken.
	// +optional
	Health *Health `json:"health,omitempty"`
	// alone takes nodes only while no other Plan with alone, and no replacement of nodes,
	// is under way anywhere in the cluster.
	// +optional
	Alone bool `json:"alone,omitempty"`
	// retries is how often an upgrade that failed is tried again on the same node, each time
	// with a new Job. Missing means that it is not.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Retries int32 `json:"retries,omitempty"`
	// retryDelay is how long is waited before. Missing means a minute.
	// +optional
	RetryDelay *Duration `json:"retryDelay,omitempty"`
	// failureBudget is how many nodes, or how many percent of the Plan's nodes, may fail before
	// no more nodes are taken; until then a failed node gives its place to another one. Missing
	// means that a failed node keeps its place.
	// +optional
	FailureBudget *intstr.IntOrString `json:"failureBudget,omitempty"`
	// kubernetesVersions says that the version is that of the nodes' Kubernetes: then no node is brought to
	// an older one, nor over a minor version.
	// +optional
	KubernetesVersions bool `json:"kubernetesVersions,omitempty"`
	// caBundle holds certificates, PEM in base64, that the channel is verified with besides those
	// of the system.
	// +optional
	CABundle []byte `json:"caBundle,omitempty"`
	// notify is told when a rollout begins, when a node fails, and when it is complete.
	// +optional
	Notify *Notify `json:"notify,omitempty"`
}

// Health is what has to be well before the next node is taken.
type Health struct {
	// soak is how long a node that was upgraded has to be Ready, without a break, before
	// its place is given to another one.
	// +optional
	Soak *Duration `json:"soak,omitempty"`
	// maxUnavailable is how many nodes of the cluster, or how many percent, may be unavailable
	// at a time, those that are upgraded included: not Ready or cordoned, by whomever.
	// +optional
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
}

// Notify is a webhook.
type Notify struct {
	// url gets a POST with a JSON object.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	URL string `json:"url,omitempty"`
	// secretName names a Secret of the Plan's namespace whose key url is used instead, for
	// URLs that hold a token.
	// +optional
	SecretName string `json:"secretName,omitempty"`
}

// RolloutStatus is how far a Plan is, node by node.
type RolloutStatus struct {
	// observedGeneration is the generation of the Plan that all of the status is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// lastPolled is when the channel was asked last.
	// +optional
	LastPolled *metav1.Time `json:"lastPolled,omitempty"`
	// polledChannel is the channel that was asked.
	// +optional
	PolledChannel string `json:"polledChannel,omitempty"`
	// counts are those of the nodes that the selector matches.
	// +optional
	Counts Counts `json:"counts,omitzero"`
	// waiting says why no more nodes are taken; missing if they are, or none is left.
	// +optional
	Waiting *Waiting `json:"waiting,omitempty"`
	// nodes lists those that are being upgraded and those that failed. Of many, the first hundred
	// of the former.
	// +optional
	// +listType=map
	// +listMapKey=name
	Nodes []NodeStatus `json:"nodes,omitempty"`
}

// Counts are numbers of nodes.
type Counts struct {
	// total is how many nodes the selector matches, those that are disabled not counted.
	Total int32 `json:"total"`
	// done is how many of them have the latest hash.
	Done int32 `json:"done"`
	// applying is how many are upgraded now, those that failed included while they keep their place.
	Applying int32 `json:"applying"`
	// failed is how many have failed.
	Failed int32 `json:"failed"`
}

// Waiting says what is waited for.
type Waiting struct {
	// reason is one word.
	Reason string `json:"reason"`
	// message is a sentence that names what is waited for.
	Message string `json:"message"`
	// since when.
	Since metav1.Time `json:"since"`
}

// NodeState is how far a node is.
type NodeState string

// States of a node.
const (
	// NodeRunning has a Job.
	NodeRunning NodeState = "Running"
	// NodeSettling has been upgraded and keeps its place until its delay or soak is over.
	NodeSettling NodeState = "Settling"
	// NodeRetrying has failed and is tried again.
	NodeRetrying NodeState = "Retrying"
	// NodeFailed has failed.
	NodeFailed NodeState = "Failed"
)

// NodeStatus is how far a node is.
type NodeStatus struct {
	// name of the Node.
	Name string `json:"name"`
	// state is Running, Settling, Retrying or Failed.
	State NodeState `json:"state"`
	// reason is one word.
	// +optional
	Reason string `json:"reason,omitempty"`
	// message says more.
	// +optional
	Message string `json:"message,omitempty"`
	// since when it is in this state.
	Since metav1.Time `json:"since"`
	// attempts is how many Jobs have failed.
	// +optional
	Attempts int32 `json:"attempts,omitempty"`
	// job is the UID of the last Job that failed.
	// +optional
	Job string `json:"job,omitempty"`
	// generation of the Plan whose upgrade failed.
	// +optional
	Generation int64 `json:"generation,omitempty"`
	// retry is what spec.constellation.retry was then.
	// +optional
	Retry string `json:"retry,omitempty"`
	// hash is what status.latestHash was then.
	// +optional
	Hash string `json:"hash,omitempty"`
}
