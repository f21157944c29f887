package kube

import (
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

	"constellation/engine"
	"constellation/operator/api/upgradev1"
)

var plans = upgradev1.GroupVersion.WithResource("plans")

// planless is how long after Plans could not be seen it is tried again: the kind may come at
// any time, and seldom does.
const planless = time.Minute

// unseen is why no Plan can be seen, while a watch knows that.
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

// Plans implements [engine.Cluster]. While a WatchRollout runs it asks nobody.
func (c *Client) Plans(ctx context.Context) ([]engine.NodePlan, error) {
	if seen, ok := c.plans.get(); ok {
		return values(seen), nil
	}
	if err := c.planless.get(); err != nil {
		return nil, err
	}
	var out []engine.NodePlan
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
	slices.SortFunc(out, func(a, b engine.NodePlan) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// watchPlans keeps a copy of all Plans. Without their kind, or the right to it, there is
// nothing to keep, which is no reason to see nothing of the rest.
func (c *Client) watchPlans(ctx context.Context, changed func()) error {
	defer c.planless.set(nil)
	for {
		err := watchAll(ctx, c, plans, &c.plans, changed, toPlan)
		if ctx.Err() != nil || !errors.Is(err, engine.ErrAbsent) && !errors.Is(err, engine.ErrForbidden) {
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

// toPlan says how a Plan is. Of one that another controller carries out only what it says is
// known.
func toPlan(u *unstructured.Unstructured) (engine.NodePlan, error) {
	var p upgradev1.Plan
	name := keyOf(u)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &p); err != nil {
		// One that cannot be read must not hide the others, nor the nodes.
		return engine.NodePlan{Name: name, State: engine.PlanInvalid, Text: "it cannot be read: " + err.Error()}, nil
	}
	s := &p.Status
	out := engine.NodePlan{Name: name, Version: s.LatestVersion, Channel: p.Spec.Channel, Applying: int64(len(s.Applying)), State: engine.PlanUnseen}
	if out.Version == "" {
		out.Version = p.Spec.Version
	}
	if p.Spec.Version != "" {
		out.Channel = ""
	}
	own, wants := s.Constellation, p.Spec.Constellation
	if wants == nil {
		wants = &upgradev1.Rollout{}
	}
	complete := conditionOf(s, upgradev1.ConditionComplete)
	failed := complete != nil && complete.Reason == "JobFailed"
	if own != nil {
		c := own.Counts
		out.Total, out.Done, out.Applying, out.Failed = int64(c.Total), int64(c.Done), int64(c.Applying), int64(c.Failed)
		if wants.FailureBudget == nil { // those that failed keep their places
			out.Applying = max(0, out.Applying-out.Failed)
		}
		out.Pending = max(0, out.Total-out.Done-out.Applying-out.Failed)
		out.Alone = wants.Alone && len(s.Applying) > 0
		for _, n := range own.Nodes {
			out.Nodes = append(out.Nodes, engine.NodePlanNode{Name: n.Name, State: stateOf(n), Text: n.Message, Held: held(n)})
		}
	} else {
		for _, host := range s.Applying {
			x := engine.NodePlanNode{Name: host, State: engine.NodeUpgrading}
			if failed && strings.Contains(complete.Message, "on Node "+host+":") {
				x.State = engine.NodeFailed
				out.Applying, out.Failed = out.Applying-1, out.Failed+1
			}
			out.Nodes = append(out.Nodes, x)
		}
	}
	slices.SortFunc(out.Nodes, func(a, b engine.NodePlanNode) int { return strings.Compare(a.Name, b.Name) })
	for _, kind := range []string{upgradev1.ConditionValidated, upgradev1.ConditionResolved} {
		if c := conditionOf(s, kind); c != nil && c.Status == corev1.ConditionFalse {
			out.State, out.Text = engine.PlanInvalid, c.Message
			out.Remedy = fmt.Sprintf("correct it: `kubectl -n %s edit plans.upgrade.cattle.io %s`", p.Namespace, p.Name)
			return out, nil
		}
	}
	switch {
	case complete == nil:
	case failed && own != nil:
		out.State, out.Text = engine.PlanFailed, complete.Message
		out.Remedy = fmt.Sprintf("mend the cause, then `kubectl -n %s patch plans.upgrade.cattle.io %s --type=merge -p '{\"spec\":{\"constellation\":{\"retry\":\"%d\"}}}'` has it tried again",
			p.Namespace, p.Name, p.Generation) // which no earlier try had
	case failed:
		out.State, out.Text = engine.PlanFailed, complete.Message
		out.Remedy = fmt.Sprintf("see what its jobs say: `kubectl -n %s get jobs,pods -l upgrade.cattle.io/plan=%s`", p.Namespace, p.Name)
	case complete.Status == corev1.ConditionTrue:
		out.State, out.Text = engine.PlanComplete, complete.Message
	case complete.Reason == "ValidationFailed":
		out.State, out.Text = engine.PlanInvalid, complete.Message
	case out.Applying > 0:
		out.State = engine.PlanApplying
	default:
		out.State, out.Text = engine.PlanWaiting, complete.Message
	}
	if own != nil && own.Waiting != nil && out.State != engine.PlanFailed {
		out.Text = own.Waiting.Message
	}
	switch {
	case out.State != engine.PlanWaiting && out.State != engine.PlanApplying:
	case wants.State == upgradev1.Paused:
		out.State = engine.PlanPaused
	case wants.State == upgradev1.Cancelled:
		out.State = engine.PlanCancelled
	}
	return out, nil
}

// stateOf is how a node is that a Plan has to do with.
func stateOf(n upgradev1.NodeStatus) string {
	switch {
	case n.State == upgradev1.NodeFailed:
		return engine.NodeFailed
	case n.State == upgradev1.NodeRunning && (n.Reason == "Draining" || n.Reason == "DrainBlocked"):
		return engine.NodeDraining
	}
	return engine.NodeUpgrading
}

// remediesOfPods are what to do about a node whose pod does not get on, by its reason.
var remediesOfPods = map[string]string{
	"DrainBlocked":     "give what it belongs to another replica, or relax the PodDisruptionBudget; the drain tries again every few seconds",
	"PodUnschedulable": "give the Plan tolerations of the node's taints, or make room on the node",
	"ImagePullError":   "make the image available to the node, or name another one in the Plan",
	"ContainerError":   "correct what the Plan says of the container",
}

// held is what to do about a node that does not get on by itself; empty: it does, or it is over.
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
