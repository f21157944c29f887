package decision

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SetCondition sets c, and its transition time if the status changes.
func SetCondition(all *[]metav1.Condition, c metav1.Condition, now metav1.Time) {
	for i := range *all {
		old := &(*all)[i]
		if old.Type != c.Type {
			continue
		}
		c.LastTransitionTime = old.LastTransitionTime
		if old.Status != c.Status {
			c.LastTransitionTime = now
		}
		*old = c
		return
	}
	c.LastTransitionTime = now
	*all = append(*all, c)
}

// NewCondition returns a condition without a transition time.
func NewCondition(kind string, status bool, generation int64, reason, format string, args ...any) metav1.Condition {
	s := metav1.ConditionFalse
	if status {
		s = metav1.ConditionTrue
	}
	return metav1.Condition{Type: kind, Status: s, ObservedGeneration: generation, Reason: reason, Message: fmt.Sprintf(format, args...)}
}
