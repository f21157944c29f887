// Package upgradev1 is the API by which nodes are upgraded where they are: group
// upgrade.cattle.io, version v1, one kind, [Plan].
//
// The kind is that of system-upgrade-controller, with all of its fields, so that a Plan
// written for one controller is understood by the other. What only this project knows is
// below spec.constellation and status.constellation.
//
// The package holds no behaviour, and imports nothing but Kubernetes' own types.
//
// +kubebuilder:object:generate=true
// +groupName=upgrade.cattle.io
// +versionName=v1
package upgradev1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Group is the API group, and begins the names of labels and annotations.
const Group = "upgrade.cattle.io"

// GroupVersion is the group and version of the API.
var GroupVersion = schema.GroupVersion{Group: Group, Version: "v1"}

// AddToScheme registers the kind.
var AddToScheme = (&runtime.SchemeBuilder{addKnownTypes}).AddToScheme

func addKnownTypes(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &Plan{}, &PlanList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// Labels and annotations of Jobs and their pods, of Nodes and of Plans.
const (
	// LabelController names the controller that made a Job.
	LabelController = Group + "/controller"
	// LabelExclusive is "true" on Jobs of exclusive Plans.
	LabelExclusive = Group + "/exclusive"
	// LabelNode names the Node that a Job upgrades.
	LabelNode = Group + "/node"
	// LabelPlan names the Plan of a Job.
	LabelPlan = Group + "/plan"
	// LabelVersion is the version that a Job brings.
	LabelVersion = Group + "/version"
	// AnnotationTTL says how long a finished Job is kept, in seconds.
	AnnotationTTL = Group + "/ttl-seconds-after-finished"
	// AnnotationDigest of a Plan lists dotted paths, with commas between them, of fields that
	// count for status.latestHash.
	AnnotationDigest = Group + "/digest"
)

// LabelOfPlan is the label of a Node that says which hash of the Plan it has; the value
// "disabled" keeps the node out of it.
func LabelOfPlan(plan string) string { return "plan." + Group + "/" + plan }

// Disabled is the value of [LabelOfPlan] that keeps a node out of a Plan.
const Disabled = "disabled"

// Condition types.
const (
	// ConditionResolved is True when the version is known.
	ConditionResolved = "LatestResolved"
	// ConditionValidated is True when the Plan can be carried out as it is written.
	ConditionValidated = "Validated"
	// ConditionComplete is True when no node is left to upgrade.
	ConditionComplete = "Complete"
)
