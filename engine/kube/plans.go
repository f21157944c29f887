package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/operator/api/upgradev1"
)

var plans = upgradev1.GroupVersion.WithResource("plans")

// planless is the retry interval while Plans cannot be listed. Their kind may be installed at
// any time, but rarely is.
const planless = time.Minute

// unseen is the reason why Plans cannot be listed, while a watch has found one.
type unseen struct {
	mu  sync.Mutex
	err error
}

func (u *unseen) set(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.err = err
}

func (u *unseen) get() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.err
}

// Plans implements [engine.Cluster]. While a WatchRollout runs it sends no request.
func (c *Client) Plans(ctx context.Context) ([]cluster.NodePlan, error) {
	if seen, ok := c.plans.get(); ok {
		return values(seen), nil
	}
	if err := c.planless.get(); err != nil {
		return nil, err
	}
	var out []cluster.NodePlan
	err := retry(ctx, func(ctx context.Context) error {
		l, err := c.dynamic.Resource(plans).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		out = nil
		for i := range l.Items {
			p, err := toPlan(&l.Items[i])
			if err != nil {
				return err
			}
			out = append(out, p)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list Plans: %w", err)
	}
	slices.SortFunc(out, func(a, b cluster.NodePlan) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// watchPlans keeps a copy of all Plans. If their kind is missing or access is denied, it
// waits, and the other watches go on.
func (c *Client) watchPlans(ctx context.Context, changed func()) error {
	defer c.planless.set(nil)
	for {
		err := watchAll(ctx, c, plans, &c.plans, changed, toPlan)
		if ctx.Err() != nil || !errors.Is(err, cluster.ErrAbsent) && !errors.Is(err, cluster.ErrForbidden) {
			return err
		}
		c.planless.set(err)
		changed()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(planless):
		}
	}
}

// toPlan converts a Plan. Of a Plan that another controller applies, only the reported status
// is known.
func toPlan(u *unstructured.Unstructured) (cluster.NodePlan, error) {
	var p upgradev1.Plan
	name := keyOf(u)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &p); err != nil {
		// An invalid Plan must not hide the others or the nodes.
		return cluster.NodePlan{Name: name, State: cluster.PlanInvalid, Text: "invalid Plan: " + err.Error()}, nil
	}
	s := &p.Status
	out := cluster.NodePlan{
		Name: name, Version: cmp.Or(s.LatestVersion, p.Spec.Version), Channel: p.Spec.Channel, Applying: int64(len(s.Applying)), State: cluster.PlanUnseen,
	}
	if p.Spec.Version != "" {
		out.Channel = ""
	}
	wants := cmp.Or(p.Spec.Constellation, &upgradev1.Rollout{})
	if s.Constellation != nil {
		addOwnNodes(&out, s, wants)
	} else {
		addForeignNodes(&out, s)
	}
	slices.SortFunc(out.Nodes, func(a, b cluster.NodePlanNode) int { return strings.Compare(a.Name, b.Name) })
	setPlanState(&out, &p, wants)
	return out, nil
}

// addOwnNodes adds the nodes and counts that our operator reports.
func addOwnNodes(out *cluster.NodePlan, s *upgradev1.PlanStatus, wants *upgradev1.Rollout) {
	c := s.Constellation.Counts
	out.Total, out.Done, out.Applying, out.Failed = int64(c.Total), int64(c.Done), int64(c.Applying), int64(c.Failed)
	if wants.FailureBudget == nil { // failed nodes remain in the list
		out.Applying = max(0, out.Applying-out.Failed)
	}
	out.Pending = max(0, out.Total-out.Done-out.Applying-out.Failed)
	out.Alone = wants.Alone && len(s.Applying) > 0
	for _, n := range s.Constellation.Nodes {
		out.Nodes = append(out.Nodes, cluster.NodePlanNode{Name: n.Name, State: stateOf(n), Text: n.Message, Held: held(n)})
	}
}

// addForeignNodes adds the nodes of a Plan that another controller applies.
func addForeignNodes(out *cluster.NodePlan, s *upgradev1.PlanStatus) {
	for _, host := range s.Applying {
		x := cluster.NodePlanNode{Name: host, State: plan.NodeUpgrading}
		if c := conditionOf(s, upgradev1.ConditionComplete); jobFailed(c) && strings.Contains(c.Message, "on Node "+host+":") {
			x.State = plan.NodeFailed
			out.Applying, out.Failed = out.Applying-1, out.Failed+1
		}
		out.Nodes = append(out.Nodes, x)
	}
}

// jobFailed reports whether the condition Complete is false because a job failed.
func jobFailed(complete *upgradev1.Condition) bool {
	return complete != nil && complete.Reason == "JobFailed"
}

// setPlanState derives the state of a Plan, with text and remedy, from its conditions and from its
// wanted state.
func setPlanState(out *cluster.NodePlan, p *upgradev1.Plan, wants *upgradev1.Rollout) {
	s := &p.Status
	for _, kind := range []string{upgradev1.ConditionValidated, upgradev1.ConditionResolved} {
		if c := conditionOf(s, kind); c != nil && c.Status == corev1.ConditionFalse {
			out.State, out.Text = cluster.PlanInvalid, c.Message
			out.Remedy = fmt.Sprintf("correct it: `kubectl -n %s edit plans.upgrade.cattle.io %s`", p.Namespace, p.Name)
			return
		}
	}
	own, complete := s.Constellation, conditionOf(s, upgradev1.ConditionComplete)
	switch {
	case complete == nil:
	case jobFailed(complete):
		out.State, out.Text = cluster.PlanFailed, complete.Message
		out.Remedy = fmt.Sprintf("inspect its jobs: `kubectl -n %s get jobs,pods -l upgrade.cattle.io/plan=%s`", p.Namespace, p.Name)
		if own != nil {
			out.Remedy = fmt.Sprintf("fix the cause, then retry with `kubectl -n %s patch plans.upgrade.cattle.io %s --type=merge -p '{\"spec\":{\"constellation\":{\"retry\":\"%d\"}}}'`",
				p.Namespace, p.Name, p.Generation) // unique per retry
		}
	case complete.Status == corev1.ConditionTrue:
		out.State, out.Text = cluster.PlanComplete, complete.Message
	case complete.Reason == "ValidationFailed":
		out.State, out.Text = cluster.PlanInvalid, complete.Message
	case out.Applying > 0:
		out.State = cluster.PlanApplying
	default:
		out.State, out.Text = cluster.PlanWaiting, complete.Message
	}
	if own != nil && own.Waiting != nil && out.State != cluster.PlanFailed {
		out.Text = own.Waiting.Message
	}
	switch {
	case out.State != cluster.PlanWaiting && out.State != cluster.PlanApplying:
	case wants.State == upgradev1.Paused:
		out.State = cluster.PlanPaused
	case wants.State == upgradev1.Cancelled:
		out.State = cluster.PlanCancelled
	}
}

// stateOf is the state of a node that a Plan applies to.
func stateOf(n upgradev1.NodeStatus) string {
	switch {
	case n.State == upgradev1.NodeFailed:
		return plan.NodeFailed
	case n.State == upgradev1.NodeRunning && (n.Reason == "Draining" || n.Reason == "DrainBlocked"):
		return plan.NodeDraining
	}
	return plan.NodeUpgrading
}

// remediesOfPods are the remedies for a node whose pod makes no progress, by reason.
var remediesOfPods = map[string]string{
	"DrainBlocked":     "add a replica to its workload, or relax the PodDisruptionBudget; the drain is retried every few seconds",
	"PodUnschedulable": "add tolerations of the node's taints to the Plan, or free resources on the node",
	"ImagePullError":   "make the image available to the node, or change the Plan's image",
	"ContainerError":   "correct the Plan's container settings",
}

// held is the remedy for a node that is blocked; empty if it makes progress or is done.
func held(n upgradev1.NodeStatus) string {
	if n.State != upgradev1.NodeRunning {
		return ""
	}
	return remediesOfPods[n.Reason]
}

func conditionOf(s *upgradev1.PlanStatus, kind string) *upgradev1.Condition {
	if i := slices.IndexFunc(s.Conditions, func(c upgradev1.Condition) bool { return c.Type == kind }); i >= 0 {
		return &s.Conditions[i]
	}
	return nil
}
