package kube

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/operator/api/upgradev1"
)

// Plans of either controller are converted.
func TestPlanStates(t *testing.T) {
	conditions := func(status corev1.ConditionStatus, reason, message string) []upgradev1.Condition {
		return []upgradev1.Condition{
			{Type: upgradev1.ConditionValidated, Status: corev1.ConditionTrue},
			{Type: upgradev1.ConditionResolved, Status: corev1.ConditionTrue},
			{Type: upgradev1.ConditionComplete, Status: status, Reason: reason, Message: message},
		}
	}
	ours := func(total, done, applying, failed int32, waits string, nodes ...upgradev1.NodeStatus) *upgradev1.RolloutStatus {
		s := &upgradev1.RolloutStatus{Counts: upgradev1.Counts{Total: total, Done: done, Applying: applying, Failed: failed}, Nodes: nodes}
		if waits != "" {
			s.Waiting = &upgradev1.Waiting{Reason: "Window", Message: waits}
		}
		return s
	}
	retry := "fix the cause, then retry with `kubectl -n default patch plans.upgrade.cattle.io k3s --type=merge -p '{\"spec\":{\"constellation\":{\"retry\":\"3\"}}}'`"
	for name, tt := range map[string]struct {
		spec   upgradev1.PlanSpec
		status upgradev1.PlanStatus
		want   cluster.NodePlan
	}{
		"not observed by a controller yet": {
			spec: upgradev1.PlanSpec{Version: "v1"}, status: upgradev1.PlanStatus{}, want: cluster.NodePlan{Version: "v1", State: cluster.PlanUnseen},
		},
		"it is applied to nodes, one of which is drained": {
			spec: upgradev1.PlanSpec{Channel: "https://example.org/stable", Constellation: &upgradev1.Rollout{Alone: true}},
			status: upgradev1.PlanStatus{LatestVersion: "v2", Applying: []string{"a", "b"}, Conditions: conditions(corev1.ConditionFalse, "SyncJob", "version v2 is applied to Nodes a,b"), Constellation: ours(
				5, 1, 2, 0, "", upgradev1.NodeStatus{Name: "b", State: upgradev1.NodeRunning, Reason: "Draining", Message: "drains"}, upgradev1.NodeStatus{Name: "a", State: upgradev1.NodeSettling, Message: "soaks"},
			)},
			want: cluster.NodePlan{
				Version: "v2", Channel: "https://example.org/stable", State: cluster.PlanApplying, Alone: true, Total: 5, Done: 1, Applying: 2, Pending: 2,
				Nodes: []cluster.NodePlanNode{{Name: "a", State: plan.NodeUpgrading, Text: "soaks"}, {Name: "b", State: plan.NodeDraining, Text: "drains"}},
			},
		},
		"a drain is blocked": {
			spec: upgradev1.PlanSpec{Version: "v1"},
			status: upgradev1.PlanStatus{Applying: []string{"a", "b"}, Conditions: conditions(corev1.ConditionFalse, "SyncJob", "version v1 is applied to Nodes a,b"), Constellation: ours(
				2, 0, 2, 0, "", upgradev1.NodeStatus{Name: "a", State: upgradev1.NodeRunning, Reason: "DrainBlocked", Message: "pod c/d may not be evicted"}, upgradev1.NodeStatus{Name: "b", State: upgradev1.NodeRunning, Reason: "ImagePullError", Message: "no image"},
			)},
			want: cluster.NodePlan{
				Version: "v1", State: cluster.PlanApplying, Total: 2, Applying: 2,
				Nodes: []cluster.NodePlanNode{
					{Name: "a", State: plan.NodeDraining, Text: "pod c/d may not be evicted", Held: "add a replica to its workload, or relax the PodDisruptionBudget; the drain is retried every few seconds"},
					{Name: "b", State: plan.NodeUpgrading, Text: "no image", Held: "make the image available to the node, or change the Plan's image"},
				},
			},
		},
		"a node failed and stays in the list": {
			spec:   upgradev1.PlanSpec{Version: "v1"},
			status: upgradev1.PlanStatus{Applying: []string{"a", "b"}, Conditions: conditions(corev1.ConditionFalse, "JobFailed", "why"), Constellation: ours(4, 1, 2, 1, "", upgradev1.NodeStatus{Name: "a", State: upgradev1.NodeFailed, Message: "why"})},
			want: cluster.NodePlan{
				Version: "v1", State: cluster.PlanFailed, Text: "why", Remedy: retry, Total: 4, Done: 1, Applying: 1, Failed: 1, Pending: 1,
				Nodes: []cluster.NodePlanNode{{Name: "a", State: plan.NodeFailed, Text: "why"}},
			},
		},
		"a node failed and left the list": {
			spec:   upgradev1.PlanSpec{Version: "v1", Constellation: &upgradev1.Rollout{FailureBudget: new(intstr.FromInt32(2))}},
			status: upgradev1.PlanStatus{Applying: []string{"b"}, Conditions: conditions(corev1.ConditionFalse, "JobFailed", "why"), Constellation: ours(4, 1, 1, 1, "")},
			want:   cluster.NodePlan{Version: "v1", State: cluster.PlanFailed, Text: "why", Remedy: retry, Total: 4, Done: 1, Applying: 1, Failed: 1, Pending: 1},
		},
		"it waits for its window": {
			spec:   upgradev1.PlanSpec{Version: "v1"},
			status: upgradev1.PlanStatus{Conditions: conditions(corev1.ConditionFalse, "Waiting", "opens"), Constellation: ours(2, 0, 0, 0, "opens")},
			want:   cluster.NodePlan{Version: "v1", State: cluster.PlanWaiting, Text: "opens", Total: 2, Pending: 2},
		},
		"it is paused": {
			spec:   upgradev1.PlanSpec{Version: "v1", Constellation: &upgradev1.Rollout{State: upgradev1.Paused}},
			status: upgradev1.PlanStatus{Conditions: conditions(corev1.ConditionFalse, "Waiting", "paused"), Constellation: ours(2, 1, 0, 0, "paused")},
			want:   cluster.NodePlan{Version: "v1", State: cluster.PlanPaused, Text: "paused", Total: 2, Done: 1, Pending: 1},
		},
		"it is complete": {
			spec:   upgradev1.PlanSpec{Version: "v1"},
			status: upgradev1.PlanStatus{Conditions: conditions(corev1.ConditionTrue, "Complete", ""), Constellation: ours(2, 2, 0, 0, "")},
			want:   cluster.NodePlan{Version: "v1", State: cluster.PlanComplete, Total: 2, Done: 2},
		},
		"it is invalid": {
			spec:   upgradev1.PlanSpec{Version: "v1"},
			status: upgradev1.PlanStatus{Conditions: []upgradev1.Condition{{Type: upgradev1.ConditionValidated, Status: corev1.ConditionFalse, Reason: "Error", Message: "spec.window is invalid"}}},
			want:   cluster.NodePlan{Version: "v1", State: cluster.PlanInvalid, Text: "spec.window is invalid", Remedy: "correct it: `kubectl -n default edit plans.upgrade.cattle.io k3s`"},
		},
		"another controller applies it": {
			spec:   upgradev1.PlanSpec{Version: "v1"},
			status: upgradev1.PlanStatus{LatestVersion: "v1", Applying: []string{"a"}, Conditions: conditions(corev1.ConditionFalse, "SyncJob", "")},
			want:   cluster.NodePlan{Version: "v1", State: cluster.PlanApplying, Applying: 1, Nodes: []cluster.NodePlanNode{{Name: "a", State: plan.NodeUpgrading}}},
		},
		"another controller has failed": {
			spec:   upgradev1.PlanSpec{Version: "v1"},
			status: upgradev1.PlanStatus{Applying: []string{"a", "b"}, Conditions: conditions(corev1.ConditionFalse, "JobFailed", "Job default/x failed on Node a: BackoffLimitExceeded: x")},
			want: cluster.NodePlan{
				Version: "v1", State: cluster.PlanFailed, Text: "Job default/x failed on Node a: BackoffLimitExceeded: x", Remedy: "inspect its jobs: `kubectl -n default get jobs,pods -l upgrade.cattle.io/plan=k3s`",
				Applying: 1, Failed: 1, Nodes: []cluster.NodePlanNode{{Name: "a", State: plan.NodeFailed}, {Name: "b", State: plan.NodeUpgrading}},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := &upgradev1.Plan{ObjectMeta: metav1.ObjectMeta{Name: "k3s", Namespace: "default", Generation: 3}, Spec: tt.spec, Status: tt.status}
			tt.want.Name = "default/k3s"
			got, err := toPlan(asUnstructured(t, p))
			if d := cmp.Diff(tt.want, got); d != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, d)
			}
		})
	}
}
