// Package upgradev1 is the API for upgrading nodes in place: group upgrade.cattle.io,
// version v1, one kind, [Plan].
//
// The kind is that of system-upgrade-controller, with all of its fields: a Plan written for
// one controller works with the other. Fields that only this project implements are below
// spec.constellation and status.constellation, except for status.observedGeneration, which generic
// tools read there.
//
// The package has no behaviour, and imports only Kubernetes' types.
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
	// LabelVersion is the version that a Job installs.
	LabelVersion = Group + "/version"
	// AnnotationTTL is how long a finished Job is kept, in seconds.
	AnnotationTTL = Group + "/ttl-seconds-after-finished"
	// AnnotationDigest of a Plan lists the fields that are part of status.latestHash: dotted
	// paths, separated by commas.
	AnnotationDigest = Group + "/digest"
)

// LabelOfPlan is the label of a Node that has the hash with which the Plan last upgraded it.
// The value [Disabled] excludes the node.
func LabelOfPlan(plan string) string { return "plan." + Group + "/" + plan }

// Disabled is the value of [LabelOfPlan] that excludes a node from a Plan.
const Disabled = "disabled"

// Condition types.
const (
	// ConditionResolved is True when the target version has been determined.
	ConditionResolved = "LatestResolved"
	// ConditionValidated is True when the Plan's spec is valid.
	ConditionValidated = "Validated"
	// ConditionComplete is True when no node is left to upgrade.
	ConditionComplete = "Complete"
	// ConditionReady is True when no node is left to upgrade. Generic tools read it, and the two
	// below.
	ConditionReady = "Ready"
	// ConditionReconciling is True while nodes are upgraded, or are upgraded later without
	// anybody's action.
	ConditionReconciling = "Reconciling"
	// ConditionStalled is True when somebody must intervene.
	ConditionStalled = "Stalled"
)
