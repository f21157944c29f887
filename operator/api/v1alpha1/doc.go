// Package v1alpha1 is the API that sets the target versions of a cluster's nodes: group
// update.edgeless.systems, five kinds, all cluster-scoped.
//
// People write [NodeVersion] only. The operator creates [ScalingGroup] and
// [AutoscalingStrategy] from the groups and the autoscaler that it discovers; people may
// tune their specs. [PendingNode] and [JoiningNode] are records of machines that are not
// nodes yet, or no longer. The operator and the join service write them; with a deleted
// record they lose track of that machine.
//
// Validation rules of the CRDs check formats, bounds, immutable fields and fields that may
// be set once only. The package has no behaviour, and imports only apimachinery.
//
// Two names of the API need an explanation: a `donor` is an old node that is being replaced,
// and its `heir` is the replacement node.
//
// +kubebuilder:object:generate=true
// +groupName=update.edgeless.systems
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of the API.
var GroupVersion = schema.GroupVersion{Group: "update.edgeless.systems", Version: "v1alpha1"}

// AddToScheme registers the five kinds.
var AddToScheme = (&runtime.SchemeBuilder{addKnownTypes}).AddToScheme

func addKnownTypes(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&NodeVersion{}, &NodeVersionList{},
		&ScalingGroup{}, &ScalingGroupList{},
		&AutoscalingStrategy{}, &AutoscalingStrategyList{},
		&PendingNode{}, &PendingNodeList{},
		&JoiningNode{}, &JoiningNodeList{},
	)
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// Names of the two kinds of which a cluster has exactly one object.
const (
	NodeVersionName         = "constellation-version"
	AutoscalingStrategyName = "autoscalingstrategy"
)

// Annotations of a Node that the operator writes. It restores those that are removed by
// hand.
const (
	// AnnotationImage is the reference of the OS image that the machine was created from.
	AnnotationImage = "constellation.edgeless.systems/node-image"
	// AnnotationComponents names the components ConfigMap that the machine joined with.
	AnnotationComponents = "constellation.edgeless.systems/kubernetes-components"
	// AnnotationGroup is the ID of the scaling group that owns the machine.
	AnnotationGroup = "constellation.edgeless.systems/scaling-group-id"
	// AnnotationIncarnation distinguishes the machine from earlier ones with the same
	// provider ID; absent in clouds that never reuse an ID.
	AnnotationIncarnation = "constellation.edgeless.systems/incarnation"
	// AnnotationDonor, on a replacement node, names the old node.
	AnnotationDonor = "constellation.edgeless.systems/donor"
	// AnnotationHeir, on an old node, names the replacement node.
	AnnotationHeir = "constellation.edgeless.systems/heir"
	// AnnotationObsolete ("true") marks a node to be removed without a replacement.
	AnnotationObsolete = "constellation.edgeless.systems/obsolete"
	// AnnotationCordoned is when (RFC 3339) the operator cordoned the node. A node that is
	// unschedulable without it was cordoned by somebody else.
	AnnotationCordoned = "constellation.edgeless.systems/cordoned"
	// AnnotationDisrupted is when (RFC 3339) the operator cordoned the node because the cloud announced that its machine
	// stops. The node is uncordoned when the announcement ends. A node that is cordoned without an annotation was cordoned by
	// somebody else.
	AnnotationDisrupted = "constellation.edgeless.systems/disrupted"
	// AnnotationSettings is what the list of enrolled machines has set on the Node, in JSON: labels and taints. By
	// it the operator removes those that a later list lacks.
	AnnotationSettings = "constellation.edgeless.systems/settings"
	// AnnotationPostponed is until when (RFC 3339) other nodes are replaced first.
	AnnotationPostponed = "constellation.edgeless.systems/postponed-until"
)

// LabelInPlace is "true" on Nodes of groups that are upgraded in place. The operator
// writes it. The relay, which connects the operator to the agents of other machines, runs
// on those Nodes only.
const LabelInPlace = "constellation.edgeless.systems/in-place"

// AnnotationStatement on a components ConfigMap is the release statement that signs them,
// see package release. It is not part of the data, which is immutable: a new statement
// may be signed with other keys.
const AnnotationStatement = "constellation.edgeless.systems/components-statement"

// AnnotationAgent on a components ConfigMap is the enrolment program as a component in JSON.
// Agents that do not verify statements install it and run it once, before they install the
// list. The operator enrols each machine first, so a Node with these components has an agent
// that verifies.
const AnnotationAgent = "constellation.edgeless.systems/components-agent"

// AnnotationUnenrolled on a components ConfigMap names, separated by commas, the Nodes that
// had the components before AnnotationAgent was written. Their agents may not verify
// statements.
const AnnotationUnenrolled = "constellation.edgeless.systems/components-unenrolled"

// AnnotationHeld is "true" on a Node, or on a ScalingGroup for all its nodes, that the
// operator must not change. People write and remove it; the operator never does.
const AnnotationHeld = "constellation.edgeless.systems/held"

// AnnotationRetry on a Node, with any text, requests an immediate retry of a failed upgrade:
// of the node in place, or of Kubernetes by the agent of this control plane. People write
// it. The operator replaces the text by the name of the failed run, and removes the
// annotation when there is another run or nothing to retry.
const AnnotationRetry = "constellation.edgeless.systems/retry"

// AnnotationRevoked on a PendingNode that leaves records who revoked its machine and why:
// the operator removes the machine without a drain. The Node got a taint of the same key,
// with the effect NoExecute, earlier.
const AnnotationRevoked = "constellation.edgeless.systems/revoked"

// AnnotationPaused is "true" on the AutoscalingStrategy while the autoscaler is stopped
// by the operator.
const AnnotationPaused = "constellation.edgeless.systems/paused"

// Condition types. Generic tools can wait for Ready, Reconciling and Stalled.
const (
	// ConditionOutdated is True while nodes, or a group's image, differ from the target.
	ConditionOutdated = "Outdated"
	// ConditionReady is True when all nodes are at the target.
	ConditionReady = "Ready"
	// ConditionReconciling is True while the operator is working on the difference.
	ConditionReconciling = "Reconciling"
	// ConditionStalled is True when somebody must intervene.
	ConditionStalled = "Stalled"
)

// Reference names an object in a status.
type Reference struct {
	// kind of the object: Node, PendingNode or JoiningNode.
	Kind string `json:"kind"`
	// name of the object.
	Name string `json:"name"`
}
