package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// PendingNode is a machine that is on its way into the cluster or out of it, or that
// is upgraded as it is. It is written before the cloud, or the machine's agent, is asked
// for anything, so that no machine is ever unaccounted for. The operator makes and
// removes these objects.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=pn
// +kubebuilder:printcolumn:name="Goal",type=string,JSONPath=`.spec.goal`
// +kubebuilder:printcolumn:name="Machine",type=string,JSONPath=`.status.cspState`
// +kubebuilder:printcolumn:name="Agent",type=string,JSONPath=`.status.upgrade.phase`
// +kubebuilder:printcolumn:name="Reached",type=boolean,JSONPath=`.status.reachedGoal`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.nodeName`
// +kubebuilder:printcolumn:name="Donor",type=string,JSONPath=`.spec.donor`
// +kubebuilder:printcolumn:name="Deadline",type=string,format=date-time,JSONPath=`.spec.deadline`
// +kubebuilder:printcolumn:name="Provider-ID",type=string,priority=1,JSONPath=`.spec.providerID`
// +kubebuilder:printcolumn:name="Group",type=string,priority=1,JSONPath=`.spec.groupID`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type PendingNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec says which machine it is and where it is going.
	// +required
	Spec PendingNodeSpec `json:"spec"`
	// status is how far it has come.
	// +optional
	Status PendingNodeStatus `json:"status,omitzero"`
}

// Goal is where a pending machine is going.
//
// +kubebuilder:validation:Enum=Join;Leave;Upgrade
type Goal string

// The goals. A machine that is upgraded is a node before, meanwhile and afterwards.
const (
	JoinGoal    Goal = "Join"
	LeaveGoal   Goal = "Leave"
	UpgradeGoal Goal = "Upgrade"
)

// PendingNodeSpec says which machine it is and where it is going.
//
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.providerID) || (has(self.providerID) && self.providerID == oldSelf.providerID)",message="providerID cannot be changed once it is set"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.nodeName) || (has(self.nodeName) && self.nodeName == oldSelf.nodeName)",message="nodeName cannot be changed once it is set"
// +kubebuilder:validation:XValidation:rule="has(self.token) == has(oldSelf.token) && (!has(self.token) || self.token == oldSelf.token)",message="token cannot be changed: the cloud knows the request by it"
// +kubebuilder:validation:XValidation:rule="self.goal != 'Leave' || has(self.providerID)",message="a machine that leaves needs a providerID"
// +kubebuilder:validation:XValidation:rule="self.goal != 'Join' || has(self.providerID) || has(self.token)",message="a machine that joins needs a token until its providerID is known"
// +kubebuilder:validation:XValidation:rule="self.goal != 'Upgrade' || has(self.providerID) && has(self.nodeName) && !has(self.token)",message="a machine that is upgraded is a node already: it needs a providerID and a nodeName, and no token"
type PendingNodeSpec struct {
	// providerID of the machine, as in the Node's spec. Empty until the cloud has named
	// the machine.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	ProviderID string `json:"providerID,omitempty"`
	// groupID is the ID in the cloud of the group that the machine belongs to.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="groupID cannot be changed"
	GroupID string `json:"groupID"`
	// nodeName is the name of the machine's Node. Empty until the cloud has named it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`
	// goal is Join, Leave, or Upgrade for a machine that is upgraded as it is. A machine
	// that was told to leave does not come back.
	// +kubebuilder:validation:XValidation:rule="oldSelf != 'Leave' || self == 'Leave'",message="a machine that leaves cannot be told to join again"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf || oldSelf == 'Leave' || self == 'Leave' && oldSelf == 'Join'",message="only a machine that joins can be given another goal, to leave"
	Goal Goal `json:"goal"`
	// deadline for the goal. A machine that has not joined by then is removed; for one
	// that has not left, the request is repeated; of one that is to be upgraded, the agent
	// must have answered.
	// +optional
	Deadline *metav1.Time `json:"deadline,omitempty"`
	// token makes the request to the cloud repeatable: the same token gives the same
	// machine.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Token string `json:"token,omitempty"`
	// donor is the name of the Node that the machine is to replace.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Donor string `json:"donor,omitempty"`
}

// InstanceState is where a machine is in its life, as the cloud says.
//
// +kubebuilder:validation:Enum=Unknown;Creating;Ready;Stopped;Terminating;Terminated;Failed
type InstanceState string

// PendingNodeStatus is how far the machine has come.
type PendingNodeStatus struct {
	// cspState is what the cloud says about the machine.
	// +optional
	CSPState InstanceState `json:"cspState,omitempty"`
	// reachedGoal is true when the machine is where it was going.
	// +optional
	ReachedGoal bool `json:"reachedGoal,omitempty"`
	// upgrade is the run of the machine's own agent that brings it to another Kubernetes;
	// absent until the agent has begun one, and for every goal but Upgrade.
	// +optional
	Upgrade *UpgradeProgress `json:"upgrade,omitempty"`
	// conditions say what is in the way, if something is.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PendingNodeList is a list of PendingNodes.
//
// +kubebuilder:object:root=true
type PendingNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PendingNode `json:"items"`
}
