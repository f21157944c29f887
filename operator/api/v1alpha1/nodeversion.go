package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// NodeVersion is the target that every node of the cluster is brought to: OS image
// and Kubernetes. There is one object, constellation-version. Change all of the
// target in one write, so that no node is replaced twice.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=nv
// +kubebuilder:validation:XValidation:rule="self.metadata.name == 'constellation-version'",message="the only NodeVersion of a cluster is called constellation-version"
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.spec.imageVersion`
// +kubebuilder:printcolumn:name="Kubernetes",type=string,JSONPath=`.spec.kubernetesClusterVersion`
// +kubebuilder:printcolumn:name="Nodes",type=integer,JSONPath=`.status.nodes.total`
// +kubebuilder:printcolumn:name="Up-to-date",type=integer,JSONPath=`.status.nodes.upToDate`
// +kubebuilder:printcolumn:name="Outdated",type=integer,JSONPath=`.status.nodes.outdated`
// +kubebuilder:printcolumn:name="Upgrade",type=string,JSONPath=`.status.upgrade.phase`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type NodeVersion struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the target.
	// +required
	Spec NodeVersionSpec `json:"spec"`
	// status is what the operator found and does about it.
	// +optional
	Status NodeVersionStatus `json:"status,omitzero"`
}

// NodeVersionSpec is the target of all nodes.
//
// +kubebuilder:validation:XValidation:rule="self.kubernetesClusterVersion == oldSelf.kubernetesClusterVersion || self.kubernetesComponentsReference != oldSelf.kubernetesComponentsReference",message="kubernetesClusterVersion changed alone: set kubernetesComponentsReference to the components of that version in the same write"
// +kubebuilder:validation:XValidation:rule="self.imageVersion == oldSelf.imageVersion || self.image != oldSelf.image",message="imageVersion changed alone: set image to the image of that version in the same write"
type NodeVersionSpec struct {
	// image is the cloud's reference of the OS image that every node shall run, for
	// example sandboxes/demo/images/v1.1.0 or
	// projects/constellation-images/global/images/v1-1-0.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Image string `json:"image"`
	// imageVersion is the release that the image belongs to, for example v1.1.0.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.matches('^v(0|[1-9][0-9]*)[.](0|[1-9][0-9]*)[.](0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?$')",message="imageVersion is not a full version such as v1.1.0"
	ImageVersion string `json:"imageVersion"`
	// kubernetesComponentsReference is the name of the ConfigMap in kube-system that
	// lists what a node must have installed, with digests.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^k8s-components-sha256-[0-9a-f]{64}$')",message="kubernetesComponentsReference is not of the form k8s-components-sha256-<64 hex digits>"
	KubernetesComponentsReference string `json:"kubernetesComponentsReference"`
	// kubernetesClusterVersion is the version of Kubernetes that control plane and
	// nodes shall run, for example v1.35.4.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.matches('^v(0|[1-9][0-9]*)[.](0|[1-9][0-9]*)[.](0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?$')",message="kubernetesClusterVersion is not a full version such as v1.35.4"
	KubernetesClusterVersion string `json:"kubernetesClusterVersion"`
	// rollout says how nodes are brought to the target.
	// +optional
	// +kubebuilder:default={}
	Rollout Rollout `json:"rollout,omitzero"`
}

// Rollout says how nodes are brought to the target.
type Rollout struct {
	// paused starts no further replacement; those under way are finished.
	// +optional
	Paused bool `json:"paused,omitempty"`
	// maxSurge is how many machines may exist at a time beyond those that the groups
	// shall have: a number, or a percentage of all nodes, rounded up. Control planes
	// are replaced one at a time whatever it says.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? int(self) >= 1 : string(self).matches('^([1-9][0-9]?|100)%$')",message="maxSurge is neither a number of at least 1 nor a percentage from 1% to 100%"
	MaxSurge *intstr.IntOrString `json:"maxSurge,omitempty"`
	// cancel ends the rollout where it stands: replacements under way are finished,
	// the autoscaler is given back, and nodes stay as they are until it is false again.
	// +optional
	Cancel bool `json:"cancel,omitempty"`
	// keepWorkers leaves workers as they are: only control planes are replaced. New
	// workers get the target all the same, and a later rollout without it replaces the
	// kept ones.
	// +optional
	KeepWorkers bool `json:"keepWorkers,omitempty"`
}

// NodeVersionStatus is what was found. It is bounded: at most 4 kB however many
// nodes there are. The lists are examples, at most 20 in all; nodes counts.
type NodeVersionStatus struct {
	// observedGeneration is the generation of the spec that this status speaks about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// nodes counts the nodes of the cluster by class. Every node is in exactly one.
	// +optional
	Nodes NodeCounts `json:"nodes,omitzero"`
	// groups counts per scaling group, control planes first, then those with most
	// outdated nodes.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	Groups []GroupCounts `json:"groups,omitempty"`

	// outdated nodes differ from the target and nothing is done about them yet.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Outdated []Reference `json:"outdated,omitempty"`
	// upToDate nodes are at the target.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	UpToDate []Reference `json:"upToDate,omitempty"`
	// donors are outdated nodes that are being replaced.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Donors []Reference `json:"donors,omitempty"`
	// heirs are the nodes that replace donors.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Heirs []Reference `json:"heirs,omitempty"`
	// mints are new nodes that have no donor yet.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Mints []Reference `json:"mints,omitempty"`
	// awaitingAnnotation are nodes of which it is not known yet what they run.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	AwaitingAnnotation []Reference `json:"awaitingAnnotation,omitempty"`
	// pending are machines that are joining or leaving.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Pending []Reference `json:"pending,omitempty"`
	// obsolete nodes are removed without a replacement.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Obsolete []Reference `json:"obsolete,omitempty"`
	// invalid nodes cannot be matched with a machine of the cloud.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Invalid []Reference `json:"invalid,omitempty"`

	// budget is how many more machines may be created now.
	// +optional
	Budget int32 `json:"budget,omitempty"`
	// activeclusterversionupgrade is true while the agent of a control plane is seen
	// upgrading Kubernetes. It is an observation, not a lock.
	// +optional
	ActiveClusterVersionUpgrade bool `json:"activeclusterversionupgrade,omitempty"`
	// joinComponents is what joining machines get installed. It follows the spec only
	// after the control plane has been upgraded, so that no kubelet is newer than the
	// API server that it talks to.
	// +optional
	JoinComponents JoinComponents `json:"joinComponents,omitzero"`
	// upgrade is the run of the agent that upgrades Kubernetes on a control plane.
	// +optional
	Upgrade *UpgradeProgress `json:"upgrade,omitempty"`
	// waiting says why nothing moves at the moment; absent while something does, or
	// nothing needs to.
	// +optional
	Waiting *Waiting `json:"waiting,omitempty"`
	// conditions: Outdated, Ready, Reconciling and Stalled.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// NodeCounts counts nodes by class; see the lists of the same names.
type NodeCounts struct {
	// total is the sum of all classes but pending.
	Total int32 `json:"total"`
	// upToDate counts nodes at the target.
	UpToDate int32 `json:"upToDate"`
	// outdated counts nodes that differ from the target and are not being replaced.
	Outdated int32 `json:"outdated"`
	// donors counts nodes that are being replaced.
	// +optional
	Donors int32 `json:"donors,omitempty"`
	// heirs counts nodes that replace donors.
	// +optional
	Heirs int32 `json:"heirs,omitempty"`
	// mints counts new nodes that have no donor yet.
	// +optional
	Mints int32 `json:"mints,omitempty"`
	// awaitingAnnotation counts nodes of which it is not known yet what they run.
	// +optional
	AwaitingAnnotation int32 `json:"awaitingAnnotation,omitempty"`
	// pending counts machines that are joining or leaving; they are not nodes.
	// +optional
	Pending int32 `json:"pending,omitempty"`
	// obsolete counts nodes that are removed without a replacement.
	// +optional
	Obsolete int32 `json:"obsolete,omitempty"`
	// invalid counts nodes that cannot be matched with a machine of the cloud.
	// +optional
	Invalid int32 `json:"invalid,omitempty"`
}

// GroupCounts counts the nodes of one scaling group.
type GroupCounts struct {
	// name of the ScalingGroup object.
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// role of the group's nodes.
	Role Role `json:"role"`
	// total is the number of nodes in the group.
	Total int32 `json:"total"`
	// upToDate is how many of them are at the target.
	UpToDate int32 `json:"upToDate"`
	// ready is how many of them are Ready.
	Ready int32 `json:"ready"`
}

// JoinComponents names, per role, the components ConfigMap that a joining machine
// is given. An empty name means that no machine of that role may join now.
type JoinComponents struct {
	// controlPlane is what joining control planes install.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	ControlPlane string `json:"controlPlane,omitempty"`
	// worker is what joining workers install.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Worker string `json:"worker,omitempty"`
}

// UpgradeProgress is how far the agent has come.
type UpgradeProgress struct {
	// version that the agent upgrades to.
	// +kubebuilder:validation:MaxLength=64
	Version string `json:"version"`
	// node whose agent it is.
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node"`
	// phase of the run: download, plan, apply, done or failed.
	// +kubebuilder:validation:Enum=download;plan;apply;done;failed
	Phase string `json:"phase"`
	// line is the last line that kubeadm printed, or the stage that has begun since,
	// shortened.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Line string `json:"line,omitempty"`
	// started is when the run began.
	// +optional
	Started metav1.Time `json:"started,omitzero"`
	// nextTry is when a run that has failed is tried again, if nobody asks for that before.
	// +optional
	NextTry metav1.Time `json:"nextTry,omitzero"`
}

// Waiting says why nothing moves.
type Waiting struct {
	// reason is a word for programs, such as PodDisruptionBudget.
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason"`
	// message is the same for people: what is awaited and what would unblock it.
	// +kubebuilder:validation:MaxLength=512
	Message string `json:"message"`
	// object is whom it is waited for.
	// +optional
	Object *Reference `json:"object,omitempty"`
	// since is when the waiting began.
	Since metav1.Time `json:"since"`
	// nextTry is when it is tried again; absent if an event will wake the operator.
	// +optional
	NextTry *metav1.Time `json:"nextTry,omitempty"`
}

// NodeVersionList is a list of NodeVersions.
//
// +kubebuilder:object:root=true
type NodeVersionList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []NodeVersion `json:"items"`
}
