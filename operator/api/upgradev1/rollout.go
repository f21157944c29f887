package upgradev1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// State is the desired state of a Plan.
//
// +kubebuilder:validation:Enum=Running;Paused;Cancelled
type State string

// States of a Plan. Empty means Running.
const (
	// Running upgrades nodes.
	Running State = "Running"
	// Paused starts no more nodes; upgrades under way are finished.
	Paused State = "Paused"
	// Cancelled stops the upgrades under way and uncordons their nodes.
	Cancelled State = "Cancelled"
)

// Rollout controls the order and the pace of a Plan. Its zero value behaves as
// system-upgrade-controller does.
type Rollout struct {
	// state is Running, Paused or Cancelled; empty means Running.
	// +optional
	State State `json:"state,omitempty"`
	// rerun upgrades all nodes again whenever it is set to a value that it did not have before.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Rerun string `json:"rerun,omitempty"`
	// retry repeats failed upgrades whenever it is set to another value.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Retry string `json:"retry,omitempty"`
	// dependsOn names Plans of the same namespace that must be complete first. One with the
	// same channel must also have resolved to the same version.
	// +optional
	// +kubebuilder:validation:MaxItems=32
	DependsOn []string `json:"dependsOn,omitempty"`
	// controlPlanesFirst upgrades all control planes of this Plan before any other node.
	// +optional
	ControlPlanesFirst bool `json:"controlPlanesFirst,omitempty"`
	// health is the condition for starting the next node.
	// +optional
	Health *Health `json:"health,omitempty"`
	// alone starts nodes only while no replacement of nodes, and no other Plan with alone, is
	// under way in the cluster.
	// +optional
	Alone bool `json:"alone,omitempty"`
	// retries is how often a failed upgrade is retried on the same node, each time with a new
	// Job. Missing means no retries.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Retries int32 `json:"retries,omitempty"`
	// retryDelay is the delay before a retry. Missing means a minute.
	// +optional
	RetryDelay *Duration `json:"retryDelay,omitempty"`
	// failureBudget is how many nodes, as a number or a percentage of the Plan's nodes, may fail
	// before no more nodes are started; until then a failed node frees its slot of concurrency.
	// Missing means that a failed node occupies its slot.
	// +optional
	FailureBudget *intstr.IntOrString `json:"failureBudget,omitempty"`
	// kubernetesVersions declares that the version is one of Kubernetes: then no node is
	// downgraded, and no minor version is skipped.
	// +optional
	KubernetesVersions bool `json:"kubernetesVersions,omitempty"`
	// caBundle has CA certificates, PEM in base64, that are trusted for the channel besides those
	// of the system.
	// +optional
	CABundle []byte `json:"caBundle,omitempty"`
	// notify is a webhook that is called when a rollout starts, when a node fails, and when the
	// rollout is complete.
	// +optional
	Notify *Notify `json:"notify,omitempty"`
}

// Health is the condition for starting the next node.
type Health struct {
	// soak is how long an upgraded node must be Ready without a break before it frees its slot
	// of concurrency.
	// +optional
	Soak *Duration `json:"soak,omitempty"`
	// maxUnavailable is how many nodes of the cluster, as a number or a percentage, may be
	// unavailable at a time. Nodes that are not Ready count, and cordoned ones, whether this Plan
	// or somebody else cordoned them.
	// +optional
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
}

// Notify is a webhook; set either url or secretName.
type Notify struct {
	// url receives a POST request with a JSON object.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	URL string `json:"url,omitempty"`
	// secretName names a Secret of the Plan's namespace whose key url is used instead, for
	// URLs that hold a token.
	// +optional
	SecretName string `json:"secretName,omitempty"`
}

// RolloutStatus is the progress of a Plan, node by node.
type RolloutStatus struct {
	// observedGeneration is the generation of the Plan that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// lastPolled is when the channel was last polled.
	// +optional
	LastPolled *metav1.Time `json:"lastPolled,omitempty"`
	// polledChannel is the channel that was polled.
	// +optional
	PolledChannel string `json:"polledChannel,omitempty"`
	// counts are the numbers of nodes that the selector matches, by state.
	// +optional
	Counts Counts `json:"counts,omitzero"`
	// waiting is why no more nodes are started; missing while nodes are started or none is left.
	// +optional
	Waiting *Waiting `json:"waiting,omitempty"`
	// nodes lists the nodes that are being upgraded, at most the first hundred, and all that failed.
	// +optional
	// +listType=map
	// +listMapKey=name
	Nodes []NodeStatus `json:"nodes,omitempty"`
}

// Counts are numbers of nodes.
type Counts struct {
	// total is how many nodes the selector matches, without the disabled ones.
	Total int32 `json:"total"`
	// done is how many of them have the latest hash.
	Done int32 `json:"done"`
	// applying is how many are being upgraded, and how many failed ones occupy a slot of concurrency.
	Applying int32 `json:"applying"`
	// failed is how many have failed.
	Failed int32 `json:"failed"`
}

// Waiting is the reason why a Plan makes no progress.
type Waiting struct {
	// reason is one word in CamelCase.
	Reason string `json:"reason"`
	// message is a sentence that names the awaited object or event.
	Message string `json:"message"`
	// since when.
	Since metav1.Time `json:"since"`
}

// NodeState is the progress of a node.
type NodeState string

// States of a node.
const (
	// NodeRunning has a Job.
	NodeRunning NodeState = "Running"
	// NodeSettling has been upgraded and occupies its slot until its delay or soak has passed.
	NodeSettling NodeState = "Settling"
	// NodeRetrying has failed and is retried.
	NodeRetrying NodeState = "Retrying"
	// NodeFailed has failed.
	NodeFailed NodeState = "Failed"
)

// NodeStatus is the progress of a node.
type NodeStatus struct {
	// name of the Node.
	Name string `json:"name"`
	// state is Running, Settling, Retrying or Failed.
	State NodeState `json:"state"`
	// reason is one word in CamelCase.
	// +optional
	Reason string `json:"reason,omitempty"`
	// message explains the reason.
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
	// retry is the value of spec.constellation.retry at that failure.
	// +optional
	Retry string `json:"retry,omitempty"`
	// hash is the value of status.latestHash at that failure.
	// +optional
	Hash string `json:"hash,omitempty"`
}
