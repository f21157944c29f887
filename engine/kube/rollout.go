package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/operator/api/v1alpha1"
)

var (
	pendingNodes, scalingGroups = resourceOf("pendingnodes"), resourceOf("scalinggroups")
	v1Nodes                     = corev1.SchemeGroupVersion.WithResource("nodes")
)

// Rollout implements [engine.Cluster]. While a WatchRollout runs it sends no request.
func (c *Client) Rollout(ctx context.Context) (cluster.Rollout, error) {
	var ro cluster.Rollout
	if seen, ok := c.rollouts.get(); ok && len(seen) == 1 {
		ro = *seen[0]
	} else {
		nv, err := c.nodeVersion(ctx)
		if err != nil {
			return cluster.Rollout{}, err
		}
		ro = toRollout(nv)
	}
	shared, ok := c.moves.get()
	moves := values(shared)
	if !ok {
		err := retry(ctx, func(ctx context.Context) error {
			l, err := c.dynamic.Resource(pendingNodes).List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			moves = nil
			for i := range l.Items {
				m, err := c.toMove(ctx, &l.Items[i])
				if err != nil {
					return err
				}
				moves = append(moves, m)
			}
			return nil
		})
		if err != nil {
			return cluster.Rollout{}, fmt.Errorf("list PendingNodes: %w", err)
		}
	}
	slices.SortFunc(moves, func(a, b cluster.Move) int { return cmp.Compare(a.Name, b.Name) })
	ro.Moves = moves
	return ro, nil
}

func toRollout(nv *v1alpha1.NodeVersion) cluster.Rollout {
	s := nv.Status
	ro := cluster.Rollout{Target: targetOf(nv)}
	is := func(kind string) bool { return meta.IsStatusConditionTrue(s.Conditions, kind) }
	ro.Reached, ro.Busy, ro.Stalled = is(v1alpha1.ConditionReady), is(v1alpha1.ConditionReconciling), is(v1alpha1.ConditionStalled)
	if ready := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionReady); ready != nil {
		ro.Reason, ro.Message = ready.Reason, ready.Message
		ro.Observed = ready.ObservedGeneration == nv.Generation
	}
	if u := s.Upgrade; u != nil {
		ro.Agent = cluster.AgentRun{Version: u.Version, Node: u.Node, Phase: u.Phase, Line: u.Line, Started: u.Started.Time, NextTry: u.NextTry.Time}
	}
	if w := s.Waiting; w != nil {
		ro.Waiting = cluster.RolloutWait{Reason: w.Reason, Message: w.Message, Since: w.Since.Time}
		if w.Object != nil && w.Object.Kind == "Node" {
			ro.Waiting.Node = w.Object.Name
		}
		if w.NextTry != nil {
			ro.Waiting.NextTry = w.NextTry.Time
		}
	}
	return ro
}

func (c *Client) toMove(ctx context.Context, u *unstructured.Unstructured) (cluster.Move, error) {
	var p v1alpha1.PendingNode
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &p); err != nil {
		return cluster.Move{}, fmt.Errorf("decode PendingNode %s: %w", u.GetName(), err)
	}
	m := cluster.Move{
		Name: p.Name, Node: p.Spec.NodeName, Group: c.groupName(ctx, p.Spec.GroupID),
		Leaves: p.Spec.Goal == v1alpha1.LeaveGoal, Upgrades: p.Spec.Goal == v1alpha1.UpgradeGoal, Donor: p.Spec.Donor, Machine: string(p.Status.CSPState), Reached: p.Status.ReachedGoal,
		Revoked: p.Annotations[v1alpha1.AnnotationRevoked],
	}
	if u := p.Status.Upgrade; u != nil {
		m.Phase, m.Line, m.NextTry = u.Phase, u.Line, u.NextTry.Time
	}
	return m, nil
}

// ChangeRollout implements [engine.Cluster].
func (c *Client) ChangeRollout(ctx context.Context, change cluster.RolloutChange) error {
	how := map[string]any{}
	if change.Paused != nil {
		how["paused"] = *change.Paused
	}
	if change.Cancelled != nil {
		how["cancel"] = *change.Cancelled
	}
	b, err := json.Marshal(map[string]any{"spec": map[string]any{"rollout": how}})
	if err != nil {
		return fmt.Errorf("marshal patch: %w", err)
	}
	err = retry(ctx, func(ctx context.Context) error {
		_, err := c.dynamic.Resource(nodeVersions).Patch(ctx, v1alpha1.NodeVersionName, types.MergePatchType, b, metav1.PatchOptions{FieldManager: fieldManager})
		return err
	})
	if err != nil {
		return fmt.Errorf("patch NodeVersion: %w", err)
	}
	return nil
}

// SkipState implements [engine.Cluster].
func (c *Client) SkipState(ctx context.Context, name string) (cluster.SkipState, error) {
	var groups *unstructured.UnstructuredList
	err := retry(ctx, func(ctx context.Context) (err error) {
		groups, err = c.dynamic.Resource(scalingGroups).List(ctx, metav1.ListOptions{})
		return err
	})
	if err != nil {
		return cluster.SkipState{}, fmt.Errorf("list ScalingGroups: %w", err)
	}
	var n *corev1.Node
	err = retry(ctx, func(ctx context.Context) (err error) {
		n, err = c.core.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		return err
	})
	if err != nil && !errors.Is(err, cluster.ErrAbsent) {
		return cluster.SkipState{}, fmt.Errorf("read node %s: %w", name, err)
	}
	absent := err
	h := cluster.SkipState{Name: name, Kind: cluster.SkipNode}
	if absent == nil {
		h.Held = n.Annotations[v1alpha1.AnnotationHeld] == "true"
		if until, err := time.Parse(time.RFC3339, n.Annotations[v1alpha1.AnnotationPostponed]); err == nil {
			h.Postponed = until
		}
		ro, err := c.Rollout(ctx)
		if err != nil && !errors.Is(err, cluster.ErrAbsent) {
			return cluster.SkipState{}, err
		}
		h.Failed = ro.FailedOn(name)
	}
	for i := range groups.Items {
		g := &groups.Items[i]
		id, group := groupOf(g)
		held := g.GetAnnotations()[v1alpha1.AnnotationHeld] == "true"
		switch {
		// Lists of nodes show the name that the ID or the ScalingGroup has, else the ID.
		case absent != nil && slices.Contains([]string{g.GetName(), group, id, providers.GroupName(id)}, name):
			return cluster.SkipState{Name: g.GetName(), Kind: cluster.SkipGroup, Held: held}, nil
		case absent == nil && held && strings.EqualFold(id, n.Annotations[v1alpha1.AnnotationGroup]):
			h.By = g.GetName()
		}
	}
	if absent != nil {
		return cluster.SkipState{}, fmt.Errorf("read node or group %s: %w", name, absent)
	}
	return h, nil
}

// SetSkipState implements [engine.Cluster].
func (c *Client) SetSkipState(ctx context.Context, h cluster.SkipState, held bool) error {
	marks, of := map[string]any{v1alpha1.AnnotationHeld: "true"}, v1Nodes
	if h.Kind == cluster.SkipGroup {
		of = scalingGroups
	}
	if !held {
		marks[v1alpha1.AnnotationHeld] = nil
		if h.Kind == cluster.SkipNode {
			// Without a failure to retry, the operator removes the annotation.
			marks[v1alpha1.AnnotationPostponed], marks[v1alpha1.AnnotationRetry] = nil, "now"
		}
	}
	b, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": marks}})
	if err != nil {
		return fmt.Errorf("marshal patch: %w", err)
	}
	err = retry(ctx, func(ctx context.Context) error {
		_, err := c.dynamic.Resource(of).Patch(ctx, h.Name, types.MergePatchType, b, metav1.PatchOptions{FieldManager: fieldManager})
		return err
	})
	if err != nil {
		return fmt.Errorf("annotate %s %s: %w", h.Kind, h.Name, err)
	}
	return nil
}

// WatchRollout implements [engine.Cluster].
func (c *Client) WatchRollout(ctx context.Context, changed func()) error {
	return together(ctx,
		func(ctx context.Context) error { return c.watchNodes(ctx, changed) },
		func(ctx context.Context) error { return c.watchExpected(ctx, changed) },
		func(ctx context.Context) error {
			return watchAll(ctx, c, nodeVersions, &c.rollouts, changed, func(u *unstructured.Unstructured) (cluster.Rollout, error) {
				var nv v1alpha1.NodeVersion
				err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &nv)
				return toRollout(&nv), err
			})
		},
		func(ctx context.Context) error {
			return watchAll(ctx, c, pendingNodes, &c.moves, changed, func(u *unstructured.Unstructured) (cluster.Move, error) { return c.toMove(ctx, u) })
		},
		func(ctx context.Context) error { return c.watchPlans(ctx, changed) })
}

// together runs watches concurrently until one ends, since the others alone would show an
// incomplete state.
func together(ctx context.Context, watches ...func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, len(watches))
	for _, w := range watches {
		go func() { ended <- w(ctx) }()
	}
	err := <-ended
	cancel()
	for range len(watches) - 1 {
		if e := <-ended; err == nil {
			err = e
		}
	}
	return err
}

// watchAll keeps a copy in m of all objects of one of our kinds, which are few, until the
// watch ends.
func watchAll[T any](ctx context.Context, c *Client, r schema.GroupVersionResource, m *mirror[T], changed func(), to func(*unstructured.Unstructured) (T, error)) error {
	l, err := c.dynamic.Resource(r).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list %s: %w", r.Resource, classify(err))
	}
	items := map[string]*T{}
	for i := range l.Items {
		v, err := to(&l.Items[i])
		if err != nil {
			return err
		}
		items[keyOf(&l.Items[i])] = &v
	}
	w, err := c.dynamic.Resource(r).Watch(ctx, metav1.ListOptions{ResourceVersion: l.GetResourceVersion(), AllowWatchBookmarks: true})
	if err != nil {
		return fmt.Errorf("watch %s: %w", r.Resource, classify(err))
	}
	defer w.Stop()
	m.begin(items)
	defer m.end()
	changed()
	return each(ctx, w, func(t watch.EventType, o runtime.Object) error {
		u, ok := o.(*unstructured.Unstructured)
		if !ok {
			return fmt.Errorf("watch %s: got a %T", r.Resource, o)
		}
		if t == watch.Deleted {
			m.remove(keyOf(u))
		} else {
			v, err := to(u)
			if err != nil {
				return err
			}
			if !m.set(keyOf(u), &v) {
				return nil
			}
		}
		changed()
		return nil
	})
}

// keyOf is namespace/name of an object, or the name of a cluster-scoped one.
func keyOf(u *unstructured.Unstructured) string {
	if ns := u.GetNamespace(); ns != "" {
		return ns + "/" + u.GetName()
	}
	return u.GetName()
}
