// Package v1alpha1 is the API through which a cluster's nodes are brought to the
// versions that its owner wants: group update.edgeless.systems, five kinds, all
// cluster-scoped.
//
// [NodeVersion] is the only kind that people write. [ScalingGroup] and
// [AutoscalingStrategy] describe what the cluster was found to have; their specs
// may be tuned. [PendingNode] and [JoiningNode] are the durable notes of machines
// that are not nodes yet, or no longer: the operator and the join service write
// them, and deleting one by hand makes them forget.
//
// What the API server can check it checks: formats, bounds, what may never change
// and what may only be set once are validation rules of the CRDs. The package
// holds no behaviour, and imports nothing but apimachinery.
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

// Annotations of a Node. The operator writes them; nobody else needs to. Taking one
// off by hand loses no machine.
const (
	// AnnotationImage is the reference of the OS image that the machine was created from.
	AnnotationImage = "constellation.edgeless.systems/node-image"
	// AnnotationComponents names the components ConfigMap that the machine was joined with.
	AnnotationComponents = "constellation.edgeless.systems/kubernetes-components"
	// AnnotationGroup is the ID of the scaling group that owns the machine.
	AnnotationGroup = "constellation.edgeless.systems/scaling-group-id"
	// AnnotationIncarnation distinguishes the machine from earlier ones with the same
	// provider ID; absent in clouds that never reuse an ID.
	AnnotationIncarnation = "constellation.edgeless.systems/incarnation"
	// AnnotationDonor, on an heir, names the node that it replaces.
	AnnotationDonor = "constellation.edgeless.systems/donor"
	// AnnotationHeir, on a donor, names the node that replaces it.
	AnnotationHeir = "constellation.edgeless.systems/heir"
	// AnnotationObsolete marks a node ("true") that is to go without a replacement.
	AnnotationObsolete = "constellation.edgeless.systems/obsolete"
	// AnnotationCordoned says since when (RFC 3339) the operator keeps new pods off the
	// node. A node that is unschedulable without it was cordoned by somebody else.
	AnnotationCordoned = "constellation.edgeless.systems/cordoned"
	// AnnotationPostponed says until when (RFC 3339) other nodes are replaced first.
	AnnotationPostponed = "constellation.edgeless.systems/postponed-until"
)

// LabelInPlace is "true" on Nodes of groups that are upgraded in place. The operator
// writes it; the relay, through which it reaches the agents of other machines, runs on
// those Nodes only.
const LabelInPlace = "constellation.edgeless.systems/in-place"

// AnnotationStatement on a ConfigMap of components is the statement of the release builder
// who vouches for them, see package release. It is no part of the data, which is immutable:
// a new statement may come with other keys.
const AnnotationStatement = "constellation.edgeless.systems/components-statement"

// AnnotationAgent on a ConfigMap of components is the enrolment program as a component in JSON:
// what agents that verify no statements install and run once, before they install the list. A
// Node with these components has an agent that verifies, because the operator saw to that first.
const AnnotationAgent = "constellation.edgeless.systems/components-agent"

// AnnotationUnenrolled on a ConfigMap of components names, separated by commas, the Nodes that
// had the components before AnnotationAgent was written. Their agents may verify nothing.
const AnnotationUnenrolled = "constellation.edgeless.systems/components-unenrolled"

// AnnotationHeld is "true" on a Node or a ScalingGroup that people want left as it is, the
// latter with all its nodes, until they take it off. The operator never writes it.
const AnnotationHeld = "constellation.edgeless.systems/held"

// AnnotationRetry on a Node, with any text, has a failed upgrade tried again now: of the node
// in place, or of Kubernetes by the agent of this control plane. People write it. The
// operator puts the name of the run in its place that it is for, and takes it off when
// there is another one, or nothing to try.
const AnnotationRetry = "constellation.edgeless.systems/retry"

// AnnotationRevoked on a PendingNode that leaves says that its machine was revoked, and by
// whom and why: the operator removes it without a drain. A taint of the same key, with the
// effect NoExecute, is on the Node from before that.
const AnnotationRevoked = "constellation.edgeless.systems/revoked"

// AnnotationPaused is "true" on the AutoscalingStrategy while it is the operator
// that has stopped the autoscaler.
const AnnotationPaused = "constellation.edgeless.systems/paused"

// Condition types. Ready, Reconciling and Stalled are those that generic tools
// know how to wait for.
const (
	// ConditionOutdated is True while nodes, or a group's image, differ from the target.
	ConditionOutdated = "Outdated"
	// ConditionReady is True when the target is reached everywhere.
	ConditionReady = "Ready"
	// ConditionReconciling is True while something is being done about the difference.
	ConditionReconciling = "Reconciling"
	// ConditionStalled is True when nothing can be done until somebody intervenes.
	ConditionStalled = "Stalled"
)

// Reference names an object that a status speaks about.
type Reference struct {
	// kind of the object: Node, PendingNode or JoiningNode.
	Kind string `json:"kind"`
	// name of the object.
	Name string `json:"name"`
}
