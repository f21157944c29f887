package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// ScalingGroup is a group of cloud machines that share role and image. The operator creates
// one object for each group of the cloud. Set min and max yourself; the cloud does not
// define them.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=sg
// +kubebuilder:printcolumn:name="Role",type=string,JSONPath=`.spec.role`
// +kubebuilder:printcolumn:name="Strategy",type=string,JSONPath=`.spec.strategy`
// +kubebuilder:printcolumn:name="Autoscaling",type=boolean,JSONPath=`.spec.autoscaling`
// +kubebuilder:printcolumn:name="Min",type=integer,JSONPath=`.spec.min`
// +kubebuilder:printcolumn:name="Max",type=integer,JSONPath=`.spec.max`
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.status.imageReference`
// +kubebuilder:printcolumn:name="Outdated",type=string,JSONPath=`.status.conditions[?(@.type=="Outdated")].status`
// +kubebuilder:printcolumn:name="Group",type=string,priority=1,JSONPath=`.spec.groupId`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Outdated")].message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ScalingGroup struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec identifies the group and controls how its nodes are upgraded.
	// +required
	Spec ScalingGroupSpec `json:"spec"`
	// status is the observed state of the group in the cloud.
	// +optional
	Status ScalingGroupStatus `json:"status,omitzero"`
}

// Role is the role of the nodes of a group.
//
// +kubebuilder:validation:Enum=ControlPlane;Worker
type Role string

// The two roles.
const (
	ControlPlaneRole Role = "ControlPlane"
	WorkerRole       Role = "Worker"
)

// Strategy is how a node of a group is brought to the target.
//
// +kubebuilder:validation:Enum=Replace;InPlace
type Strategy string

// The two strategies.
const (
	// ReplaceStrategy creates a new machine, drains the old one and deletes it.
	ReplaceStrategy Strategy = "Replace"
	// InPlaceStrategy upgrades Kubernetes on the existing machine; its OS image stays.
	InPlaceStrategy Strategy = "InPlace"
)

// ScalingGroupSpec identifies the group and controls how its nodes are upgraded.
//
// +kubebuilder:validation:XValidation:rule="self.min <= self.max",message="min is greater than max"
// +kubebuilder:validation:XValidation:rule="!(has(self.autoscaling) && self.autoscaling) || self.role == 'Worker'",message="only groups of workers can be autoscaled"
type ScalingGroupSpec struct {
	// nodeImage is the name of the NodeVersion that the group's nodes follow.
	// +optional
	// +kubebuilder:default=constellation-version
	// +kubebuilder:validation:MaxLength=253
	NodeImage string `json:"nodeImage,omitempty"`
	// groupId is the ID of the group in the cloud, for example
	// sandboxes/demo/groups/workers or
	// projects/<project>/zones/<zone>/instanceGroupManagers/<name>.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="groupId cannot be changed: create another ScalingGroup"
	GroupID string `json:"groupId"`
	// autoscalerGroupName is the name of the group in the cluster autoscaler.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	AutoscalerGroupName string `json:"autoscalerGroupName,omitempty"`
	// nodeGroupName is the group's name in the cluster's configuration.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	NodeGroupName string `json:"nodeGroupName,omitempty"`
	// autoscaling allows the cluster autoscaler to change the number of machines between
	// min and max. Control planes are never autoscaled.
	// +optional
	// +kubebuilder:default=false
	Autoscaling bool `json:"autoscaling,omitempty"`
	// min is the smallest number of machines for the autoscaler.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	Min int32 `json:"min"`
	// max is the greatest number of machines for the autoscaler.
	// +optional
	// +kubebuilder:default=10
	// +kubebuilder:validation:Minimum=0
	Max int32 `json:"max"`
	// role of the group's nodes.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="role cannot be changed: nodes cannot change their role"
	Role Role `json:"role"`
	// strategy is how nodes of the group are brought to the target: Replace creates a
	// new machine for each, InPlace upgrades Kubernetes on the existing machine.
	// +optional
	// +kubebuilder:default=Replace
	Strategy Strategy `json:"strategy,omitempty"`
}

// ScalingGroupStatus is the observed state of the group in the cloud.
type ScalingGroupStatus struct {
	// observedGeneration is the generation of the spec that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// imageReference is the image of new machines of the group.
	// +optional
	ImageReference string `json:"imageReference,omitempty"`
	// conditions: Outdated is True while imageReference is not the target's image, and
	// Unknown while the cloud API is unreachable.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// ScalingGroupList is a list of ScalingGroups.
//
// +kubebuilder:object:root=true
type ScalingGroupList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ScalingGroup `json:"items"`
}
