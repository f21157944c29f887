package nodelock

import (
	"strings"
	"time"
)

// Replacements is the holder of the lock while the operator replaces or upgrades nodes, whichever replica leads.
const Replacements = "node replacements"

// Annotations of a Node that a Plan upgrades while the operator has it drained, so that its pods are moved once.
// The operator keeps the lock meanwhile. The first two have the form of [Note].
const (
	// AnnotationWaits names the Plan that waits for the Node, or upgrades it. The controller of Plans writes it
	// and renews its time. It removes the annotation when the Plan needs the Node no longer.
	AnnotationWaits = "constellation.edgeless.systems/plan-waits"
	// AnnotationLent names the Plan that may upgrade the Node now. The operator writes it when its own upgrade of
	// the Node is complete, and removes it when it releases the Node.
	AnnotationLent = "constellation.edgeless.systems/lent-to-plan"
	// AnnotationCordonedForPlan is the Plan, as namespace/name, for which the Node is cordoned. The controller of
	// Plans writes it. An unschedulable Node without it was cordoned by somebody else.
	AnnotationCordonedForPlan = "constellation.edgeless.systems/cordoned-for-plan"
)

// The controller of Plans renews AnnotationWaits after NoteRenewal. It counts for NoteExpiry after the operator has
// seen its last change, by the operator's own clock: the controller may be on a control plane that restarts.
const (
	NoteRenewal = time.Minute
	NoteExpiry  = 5 * time.Minute
)

// Note formats a Plan's namespace/name and a time as the value of an annotation, such as
// "system-upgrade/os 2026-11-28T09:00:00Z".
func Note(plan string, at time.Time) string { return plan + " " + at.UTC().Format(time.RFC3339) }

// ParseNote parses such a value. The name is empty if the value is not valid.
func ParseNote(s string) (plan string, at time.Time) {
	plan, text, _ := strings.Cut(s, " ")
	at, err := time.Parse(time.RFC3339, text)
	if namespace, name, ok := strings.Cut(plan, "/"); err != nil || !ok || namespace == "" || name == "" {
		return "", time.Time{}
	}
	return plan, at
}
