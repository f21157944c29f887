package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// NodeVersion is the target of every node of the cluster: OS image and Kubernetes version.
// There is one object, constellation-version. Change the whole target in one write, so
// that no node is replaced twice.
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
	// status is the observed state of the nodes, and what the operator waits for.
	// +optional
	// +kubebuilder:default={"observedGeneration":-1}
	Status NodeVersionStatus `json:"status,omitzero"`
}

// NodeVersionSpec is the target of all nodes.
//
// +kubebuilder:validation:XValidation:rule="self.kubernetesClusterVersion == oldSelf.kubernetesClusterVersion || self.kubernetesComponentsReference != oldSelf.kubernetesComponentsReference",message="kubernetesClusterVersion changed alone: set kubernetesComponentsReference to the components of that version in the same write"
// +kubebuilder:validation:XValidation:rule="(size(self.image) == 0) == (size(self.imageVersion) == 0)",message="image and imageVersion belong together: set both, or none"
// +kubebuilder:validation:XValidation:rule="self.imageVersion == oldSelf.imageVersion || self.image != oldSelf.image",message="imageVersion changed alone: set image to the image of that version in the same write"
type NodeVersionSpec struct {
	// image is the cloud's reference of the OS image that every node must run, for
	// example projects/constellation-images/global/images/v1-1-0. It is empty in a cloud
	// that selects no image.
	// +kubebuilder:validation:MaxLength=1024
	Image string `json:"image"`
	// imageVersion is the release that the image belongs to, for example v1.1.0; empty
	// without an image.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.matches('^(v(0|[1-9][0-9]*)[.](0|[1-9][0-9]*)[.](0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?)?$')",message="imageVersion is not a full version such as v1.1.0"
	ImageVersion string `json:"imageVersion"`
	// kubernetesComponentsReference is the name of the ConfigMap in kube-system that
	// lists the files to install on a node, with digests.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^k8s-components-sha256-[0-9a-f]{64}$')",message="kubernetesComponentsReference is not of the form k8s-components-sha256-<64 hex digits>"
	KubernetesComponentsReference string `json:"kubernetesComponentsReference"`
	// kubernetesClusterVersion is the version of Kubernetes that control plane and
	// nodes must run, for example v1.35.4.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.matches('^v(0|[1-9][0-9]*)[.](0|[1-9][0-9]*)[.](0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?$')",message="kubernetesClusterVersion is not a full version such as v1.35.4"
	KubernetesClusterVersion string `json:"kubernetesClusterVersion"`
	// etcdImageTag is the tag of etcd's image that control planes must run, or a newer one, for
	// example 3.6.11-0. It is set while the next minor of Kubernetes cannot start from the etcd of
	// this one. kubeadm reads the same tag from etcd.local.imageTag of ConfigMap kubeadm-config.
	// Empty: that of kubernetesClusterVersion.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="size(self) == 0 || self.matches('^[0-9]{1,4}[.][0-9]{1,4}[.][0-9]{1,4}(-[0-9A-Za-z.-]+)?$')",message="etcdImageTag is not a tag such as 3.6.11-0"
	EtcdImageTag string `json:"etcdImageTag,omitempty"`
	// rollout controls how nodes are brought to the target.
	// +optional
	// +kubebuilder:default={}
	Rollout Rollout `json:"rollout,omitzero"`
}

// Rollout controls how nodes are brought to the target.
type Rollout struct {
	// paused starts no further replacement; those under way are finished.
	// +optional
	Paused bool `json:"paused,omitempty"`
	// maxSurge is how many machines may exist at a time beyond the sizes of the groups: a
	// number, or a percentage of all nodes, rounded up. Control planes are replaced one at
	// a time whatever the value.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? int(self) >= 1 : string(self).matches('^([1-9][0-9]?|100)%$')",message="maxSurge is neither a number of at least 1 nor a percentage from 1% to 100%"
	MaxSurge *intstr.IntOrString `json:"maxSurge,omitempty"`
	// cancel ends the rollout: replacements under way are finished, the autoscaler is
	// resumed, and the other nodes stay as they are until cancel is false again.
	// +optional
	Cancel bool `json:"cancel,omitempty"`
	// keepWorkers replaces control planes only. New workers still get the target, and a
	// later rollout without keepWorkers replaces the others.
	// +optional
	KeepWorkers bool `json:"keepWorkers,omitempty"`
}

// NodeVersionStatus is the observed state. It has at most 4 kB whatever the number of nodes:
// the lists have at most 20 examples in all, and nodes has the counts.
type NodeVersionStatus struct {
	// observedGeneration is the generation of the spec that this status describes; -1 before
	// the operator has written any.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// nodes counts the nodes of the cluster by class. Every node is in exactly one class.
	// +optional
	Nodes NodeCounts `json:"nodes,omitzero"`
	// groups counts the nodes of each scaling group: control planes first, then the groups
	// with the most outdated nodes.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	Groups []GroupCounts `json:"groups,omitempty"`

	// outdated nodes differ from the target and are not being replaced yet.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Outdated []Reference `json:"outdated,omitempty"`
	// upToDate nodes are at the target.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	UpToDate []Reference `json:"upToDate,omitempty"`
	// The old nodes: outdated nodes that are being replaced.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Donors []Reference `json:"donors,omitempty"`
	// The replacement nodes of the old ones.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Heirs []Reference `json:"heirs,omitempty"`
	// mints are new nodes that are not assigned to an old node yet.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	Mints []Reference `json:"mints,omitempty"`
	// awaitingAnnotation are nodes whose image and components are not recorded yet.
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
	// activeclusterversionupgrade is true while the agent of a control plane upgrades
	// Kubernetes. It is an observation, not a lock.
	// +optional
	ActiveClusterVersionUpgrade bool `json:"activeclusterversionupgrade,omitempty"`
	// joinComponents are the components that joining machines install. It follows the spec
	// only after the control plane has been upgraded, so that no kubelet is newer than its
	// API server.
	// +optional
	JoinComponents JoinComponents `json:"joinComponents,omitzero"`
	// upgrade is the run of the agent that upgrades Kubernetes on a control plane.
	// +optional
	Upgrade *UpgradeProgress `json:"upgrade,omitempty"`
	// addons is the upgrade of kubeadm's add-ons, CoreDNS and kube-proxy, after the last control
	// plane.
	// +optional
	Addons *AddonsProgress `json:"addons,omitempty"`
	// etcdMembers are the members of etcd and their versions, as they last answered.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=9
	EtcdMembers []EtcdMember `json:"etcdMembers,omitempty"`
	// waiting is why the rollout makes no progress; absent while it does, and when it is
	// complete.
	// +optional
	Waiting *Waiting `json:"waiting,omitempty"`
	// conditions: Outdated, Ready, Reconciling and Stalled.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// EtcdMember is a member of etcd.
type EtcdMember struct {
	// node that the member runs on.
	Node string `json:"node"`
	// version of its etcd, for example 3.6.11.
	Version string `json:"version"`
	// storageVersion is the version of the format of its data, for example 3.6.0; absent if it
	// is not known.
	// +optional
	StorageVersion string `json:"storageVersion,omitempty"`
}

// NodeCounts counts nodes by class; see the lists of the same names.
type NodeCounts struct {
	// total is the sum of all classes but pending.
	Total int32 `json:"total"`
	// upToDate counts nodes at the target.
	UpToDate int32 `json:"upToDate"`
	// outdated counts nodes that differ from the target and are not being replaced.
	Outdated int32 `json:"outdated"`
	// The number of old nodes, which are being replaced.
	// +optional
	Donors int32 `json:"donors,omitempty"`
	// The number of replacement nodes of the old ones.
	// +optional
	Heirs int32 `json:"heirs,omitempty"`
	// mints counts new nodes that are not assigned to an old node yet.
	// +optional
	Mints int32 `json:"mints,omitempty"`
	// awaitingAnnotation counts nodes whose image and components are not recorded yet.
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
// receives. An empty name means that no machine of that role may join now.
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

// UpgradeProgress is the progress of an agent's run.
type UpgradeProgress struct {
	// version that the agent upgrades to.
	// +kubebuilder:validation:MaxLength=64
	Version string `json:"version"`
	// node on which the agent runs.
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node"`
	// phase of the run: download, plan, apply, done or failed.
	// +kubebuilder:validation:Enum=download;plan;apply;done;failed
	Phase string `json:"phase"`
	// line is the last line that kubeadm printed, or the stage that has started since,
	// shortened.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Line string `json:"line,omitempty"`
	// started is when the run began.
	// +optional
	Started metav1.Time `json:"started,omitzero"`
	// nextTry is when a failed run is retried, unless a retry is requested earlier.
	// +optional
	NextTry metav1.Time `json:"nextTry,omitzero"`
	// bootID is the boot of the node in which the agent works. When the Node reports another one, the
	// run has been interrupted.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	BootID string `json:"bootID,omitempty"`
}

// AddonsProgress is the progress of the add-ons to a target.
type AddonsProgress struct {
	// components of the target that the add-ons follow.
	// +kubebuilder:validation:MaxLength=253
	Components string `json:"components"`
	// phase: upgrading, done or failed. With done, nothing remains to do: kubeadm has upgraded
	// the add-ons that exist and that it manages.
	// +kubebuilder:validation:Enum=upgrading;done;failed
	Phase string `json:"phase"`
	// message is the last line of kubeadm, or why it failed, shortened.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Message string `json:"message,omitempty"`
	// since is when the first attempt became due.
	// +optional
	Since metav1.Time `json:"since,omitzero"`
	// nextTry is when a failed attempt is retried, unless a retry is requested earlier.
	// +optional
	NextTry metav1.Time `json:"nextTry,omitzero"`
}

// Waiting is the reason why a rollout makes no progress.
type Waiting struct {
	// reason is one word in CamelCase, such as PodDisruptionBudget.
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason"`
	// message is a sentence: what is awaited and what would unblock it.
	// +kubebuilder:validation:MaxLength=512
	Message string `json:"message"`
	// object that is awaited.
	// +optional
	Object *Reference `json:"object,omitempty"`
	// since is when the waiting began.
	Since metav1.Time `json:"since"`
	// nextTry is the time of the next retry; absent if an event triggers it.
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
