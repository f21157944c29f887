package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// JoiningNode is a machine that received a join ticket and is not an annotated Node yet. It
// has the name of its future Node. The join service writes it. The operator copies the
// machine's components to the Node's annotations and deletes this object.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=jn
// +kubebuilder:validation:XValidation:rule="self.metadata.name == self.spec.name",message="a JoiningNode is called as its spec.name"
// +kubebuilder:printcolumn:name="Control-plane",type=boolean,JSONPath=`.spec.iscontrolplane`
// +kubebuilder:printcolumn:name="Waits-for",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Deadline",type=string,format=date-time,JSONPath=`.spec.deadline`
// +kubebuilder:printcolumn:name="Components",type=string,priority=1,JSONPath=`.spec.componentsreference`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type JoiningNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what the machine received with its ticket.
	// +required
	Spec JoiningNodeSpec `json:"spec"`
	// status is why the object still exists.
	// +optional
	Status JoiningNodeStatus `json:"status,omitzero"`
}

// JoiningNodeSpec is what the machine received with its ticket. With another ticket it gets
// the newest components and a new deadline.
type JoiningNodeSpec struct {
	// name of the machine's future Node.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$')",message="name is not the name of a Node"
	Name string `json:"name"`
	// componentsreference names the components ConfigMap that the machine received.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^k8s-components-sha256-[0-9a-f]{64}$')",message="componentsreference is not of the form k8s-components-sha256-<64 hex digits>"
	ComponentsReference string `json:"componentsreference"`
	// iscontrolplane is true if the machine received the secrets of a control plane.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="iscontrolplane cannot be changed: delete the JoiningNode and let the machine ask again"
	IsControlPlane bool `json:"iscontrolplane"`
	// providerID of the machine, as the cloud certified it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	ProviderID string `json:"providerID,omitempty"`
	// deadline is when this object is deleted if the Node does not exist. Without one it
	// stays until the Node exists.
	// +optional
	Deadline *metav1.Time `json:"deadline,omitempty"`
}

// JoiningNodeStatus is why a JoiningNode still exists.
type JoiningNodeStatus struct {
	// conditions: Ready is False, with the reason, while the Node cannot be annotated.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// JoiningNodeList is a list of JoiningNodes.
//
// +kubebuilder:object:root=true
type JoiningNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []JoiningNode `json:"items"`
}
