package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// PendingNode is a machine that is joining or leaving the cluster, or is upgraded in place.
// The operator writes the object before it calls the cloud or the machine's agent, so that
// every machine has a record. The operator creates and deletes these objects.
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

	// spec identifies the machine and sets its goal.
	// +required
	Spec PendingNodeSpec `json:"spec"`
	// status is the progress towards the goal.
	// +optional
	// +kubebuilder:default={"observedGeneration":-1}
	Status PendingNodeStatus `json:"status,omitzero"`
}

// Goal is the intended outcome for a pending machine.
//
// +kubebuilder:validation:Enum=Join;Leave;Upgrade
type Goal string

// The goals. A machine with UpgradeGoal is a node before, during and after the upgrade.
const (
	JoinGoal    Goal = "Join"
	LeaveGoal   Goal = "Leave"
	UpgradeGoal Goal = "Upgrade"
)

// PendingNodeSpec identifies the machine and sets its goal.
//
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.providerID) || (has(self.providerID) && self.providerID == oldSelf.providerID)",message="providerID cannot be changed once it is set"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.nodeName) || (has(self.nodeName) && self.nodeName == oldSelf.nodeName)",message="nodeName cannot be changed once it is set"
// +kubebuilder:validation:XValidation:rule="has(self.token) == has(oldSelf.token) && (!has(self.token) || self.token == oldSelf.token)",message="token cannot be changed: it identifies the request at the cloud"
// +kubebuilder:validation:XValidation:rule="self.goal != 'Leave' || has(self.providerID)",message="a machine that leaves needs a providerID"
// +kubebuilder:validation:XValidation:rule="self.goal != 'Join' || has(self.providerID) || has(self.token)",message="a machine that joins needs a token until its providerID is known"
// +kubebuilder:validation:XValidation:rule="self.goal != 'Upgrade' || has(self.providerID) && has(self.nodeName) && !has(self.token)",message="a machine that is upgraded is a node already: it needs a providerID and a nodeName, and no token"
type PendingNodeSpec struct {
	// providerID of the machine, as in the Node's spec. Empty until the cloud has returned
	// it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	ProviderID string `json:"providerID,omitempty"`
	// groupID is the ID in the cloud of the group that the machine belongs to.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="groupID cannot be changed"
	GroupID string `json:"groupID"`
	// nodeName is the name of the machine's Node. Empty until the cloud has returned it.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`
	// goal is Join, Leave, or Upgrade for a machine that is upgraded in place. Leave is
	// final.
	// +kubebuilder:validation:XValidation:rule="oldSelf != 'Leave' || self == 'Leave'",message="goal cannot be changed from Leave: a machine that leaves cannot join again"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf || oldSelf == 'Leave' || self == 'Leave' && oldSelf == 'Join'",message="goal can only be changed from Join to Leave"
	Goal Goal `json:"goal"`
	// deadline for the goal. A machine that has not joined by then is removed. For a machine
	// that has not left, the request is repeated. For an upgrade, the agent must have
	// responded by then.
	// +optional
	Deadline *metav1.Time `json:"deadline,omitempty"`
	// token makes the request to the cloud idempotent: the same token returns the same
	// machine.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Token string `json:"token,omitempty"`
	// The name of the old Node that the machine replaces.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Donor string `json:"donor,omitempty"`
}

// InstanceState is the state of a machine that the cloud reports.
//
// +kubebuilder:validation:Enum=Unknown;Creating;Ready;Stopped;Terminating;Terminated;Failed
type InstanceState string

// PendingNodeStatus is the progress towards the goal.
type PendingNodeStatus struct {
	// observedGeneration is the generation of the spec that the conditions describe; -1 before
	// the operator has written any.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// cspState is the state of the machine that the cloud reports.
	// +optional
	CSPState InstanceState `json:"cspState,omitempty"`
	// reachedGoal is true when the machine has joined, left or been upgraded.
	// +optional
	ReachedGoal bool `json:"reachedGoal,omitempty"`
	// upgrade is the run of the machine's agent that upgrades Kubernetes; absent until the
	// run starts, and for every goal but Upgrade.
	// +optional
	Upgrade *UpgradeProgress `json:"upgrade,omitempty"`
	// conditions: Ready is True when the goal is reached, Reconciling while the operator works
	// towards it, and Stalled if somebody must intervene.
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
