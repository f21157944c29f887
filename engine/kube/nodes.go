package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/operator/api/v1alpha1"
)

const roleLabel = "node-role.kubernetes.io/control-plane"

// toNode converts a node. The cluster itself has the name of its group.
func (c *Client) toNode(ctx context.Context, n *corev1.Node) *cluster.Node {
	out := nodeOf(n)
	out.Group = c.groupName(ctx, out.GroupID)
	return out
}

func nodeOf(n *corev1.Node) *cluster.Node {
	out := &cluster.Node{
		Name: n.Name, Role: "worker", State: plan.NodeNotReady, Kubernetes: n.Status.NodeInfo.KubeletVersion,
		Image: n.Annotations[v1alpha1.AnnotationImage], Components: n.Annotations[v1alpha1.AnnotationComponents],
		ProviderID: cloud.Key(n.Spec.ProviderID, n.Annotations[v1alpha1.AnnotationIncarnation]), Cordoned: n.Spec.Unschedulable, Created: n.CreationTimestamp.Time,
		Heir: n.Annotations[v1alpha1.AnnotationHeir], Donor: n.Annotations[v1alpha1.AnnotationDonor],
		Skipped: n.Annotations[v1alpha1.AnnotationHeld] == "true", InPlace: n.Labels[v1alpha1.LabelInPlace] == "true",
	}
	out.GroupID, out.UID = n.Annotations[v1alpha1.AnnotationGroup], string(n.UID)
	if _, ok := n.Labels[roleLabel]; ok {
		out.Role = "control-plane"
	}
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP && out.IP == "" {
			out.IP = a.Address
		}
	}
	out.Message = "the kubelet has not reported yet"
	for _, x := range n.Status.Conditions {
		if x.Type != corev1.NodeReady {
			continue
		}
		out.Message = x.Message
		switch x.Status {
		case corev1.ConditionTrue:
			out.State, out.Message = plan.NodeReady, ""
		case corev1.ConditionUnknown:
			out.Message = "the kubelet has stopped reporting"
		}
	}
	return out
}

func toExpected(j *v1alpha1.JoiningNode) cluster.ExpectedNode {
	out := cluster.ExpectedNode{Name: j.Spec.Name, Components: j.Spec.ComponentsReference, ControlPlane: j.Spec.IsControlPlane, ProviderID: j.Spec.ProviderID}
	if j.Spec.Deadline != nil {
		out.Deadline = j.Spec.Deadline.Time
	}
	return out
}

// mirror is a copy of all objects of one kind while a watch runs. Its values are shared and
// immutable: a change replaces the value.
type mirror[T any] struct {
	mu    sync.Mutex
	live  int      // number of watches that maintain it
	names []string // sorted
	items []*T     // by name, in that order
	lent  bool     // items is shared with callers and must be copied before a change
}

// get returns all, by name. They are shared and must not be changed.
func (m *mirror[T]) get() (items []*T, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.live == 0 {
		return nil, false
	}
	m.lent = true
	return slices.Clip(m.items), true
}

// own copies items before a change if they are shared. The caller holds mu.
func (m *mirror[T]) own() {
	if m.lent {
		m.items, m.lent = slices.Clone(m.items), false
	}
}

func (m *mirror[T]) begin(items map[string]*T) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live++
	m.names = slices.Sorted(maps.Keys(items))
	m.items, m.lent = make([]*T, len(m.names)), false
	for i, name := range m.names {
		m.items[i] = items[name]
	}
}

func (m *mirror[T]) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.live--; m.live == 0 {
		m.names, m.items, m.lent = nil, nil, false
	}
}

// set replaces the entry of the same name with v, and reports whether there was one.
func (m *mirror[T]) set(name string, v *T) (news bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i, there := slices.BinarySearch(m.names, name)
	if there && reflect.DeepEqual(m.items[i], v) {
		return false
	}
	m.own()
	if !there {
		m.names, m.items = slices.Insert(m.names, i, name), slices.Insert(m.items, i, v)
		return true
	}
	m.items[i] = v
	return true
}

func (m *mirror[T]) remove(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i, there := slices.BinarySearch(m.names, name); there {
		m.own()
		m.names, m.items = slices.Delete(m.names, i, i+1), slices.Delete(m.items, i, i+1)
	}
}

// values dereferences pointers.
func values[T any](shared []*T) []T {
	out := make([]T, len(shared))
	for i, v := range shared {
		out[i] = *v
	}
	return out
}

// Nodes implements [engine.Cluster]. While a Watch runs it sends no request.
func (c *Client) Nodes(ctx context.Context) ([]*cluster.Node, error) {
	nodes, ok := c.nodes.get()
	if !ok {
		err := retry(ctx, func(ctx context.Context) (err error) {
			nodes = nil
			_, err = c.listNodes(ctx, func(n *corev1.Node) { nodes = append(nodes, c.toNode(ctx, n)) })
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("list nodes: %w", err)
		}
		slices.SortFunc(nodes, func(a, b *cluster.Node) int { return cmp.Compare(a.Name, b.Name) })
	}
	return nodes, nil
}

// Expected implements [engine.Cluster]. While a Watch runs it sends no request.
func (c *Client) Expected(ctx context.Context) ([]cluster.ExpectedNode, error) {
	shared, ok := c.expected.get()
	nodes := values(shared)
	if !ok {
		err := retry(ctx, func(ctx context.Context) (err error) {
			nodes = nil
			_, err = c.listExpected(ctx, func(j *v1alpha1.JoiningNode) { nodes = append(nodes, toExpected(j)) })
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("list JoiningNodes: %w", err)
		}
	}
	slices.SortFunc(nodes, func(a, b cluster.ExpectedNode) int { return cmp.Compare(a.Name, b.Name) })
	return nodes, nil
}

// listNodes calls f for every node and returns the resourceVersion at which a watch can start.
func (c *Client) listNodes(ctx context.Context, f func(*corev1.Node)) (resourceVersion string, err error) {
	o := metav1.ListOptions{Limit: 200} // a node with its images has about 15 kB
	for {
		l, err := c.core.CoreV1().Nodes().List(ctx, o)
		if err != nil {
			return "", err
		}
		for i := range l.Items {
			f(&l.Items[i])
		}
		if o.Continue = l.Continue; o.Continue == "" {
			return l.ResourceVersion, nil // all pages are of the same resourceVersion
		}
	}
}

func (c *Client) listExpected(ctx context.Context, f func(*v1alpha1.JoiningNode)) (resourceVersion string, err error) {
	l, err := c.dynamic.Resource(joiningNodes).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	for i := range l.Items {
		j, err := asJoiningNode(&l.Items[i])
		if err != nil {
			return "", err
		}
		f(j)
	}
	return l.GetResourceVersion(), nil
}

func asJoiningNode(u *unstructured.Unstructured) (*v1alpha1.JoiningNode, error) {
	var j v1alpha1.JoiningNode
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &j); err != nil {
		return nil, fmt.Errorf("decode JoiningNode %s: %w", u.GetName(), err)
	}
	return &j, nil
}

// Watch implements [engine.Cluster].
func (c *Client) Watch(ctx context.Context, changed func()) error {
	return together(ctx,
		func(ctx context.Context) error { return c.watchNodes(ctx, changed) },
		func(ctx context.Context) error { return c.watchExpected(ctx, changed) })
}

func (c *Client) watchNodes(ctx context.Context, changed func()) error {
	items := map[string]*cluster.Node{}
	rv, err := c.listNodes(ctx, func(n *corev1.Node) { items[n.Name] = c.toNode(ctx, n) })
	if err != nil {
		return fmt.Errorf("list nodes: %w", classify(err))
	}
	w, err := c.core.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{ResourceVersion: rv, AllowWatchBookmarks: true})
	if err != nil {
		return fmt.Errorf("watch nodes: %w", classify(err))
	}
	defer w.Stop()
	c.nodes.begin(items)
	defer c.nodes.end()
	changed()
	return each(ctx, w, func(t watch.EventType, o runtime.Object) error {
		n, ok := o.(*corev1.Node)
		switch {
		case !ok:
			return fmt.Errorf("watch nodes: got a %T", o)
		case t == watch.Deleted:
			c.nodes.remove(n.Name)
		case !c.nodes.set(n.Name, c.toNode(ctx, n)):
			return nil // heartbeats of kubelets change nothing that is shown
		}
		changed()
		return nil
	})
}

func (c *Client) watchExpected(ctx context.Context, changed func()) error {
	items := map[string]*cluster.ExpectedNode{}
	rv, err := c.listExpected(ctx, func(j *v1alpha1.JoiningNode) { e := toExpected(j); items[j.Name] = &e })
	if err != nil {
		return fmt.Errorf("list JoiningNodes: %w", classify(err))
	}
	w, err := c.dynamic.Resource(joiningNodes).Watch(ctx, metav1.ListOptions{ResourceVersion: rv, AllowWatchBookmarks: true})
	if err != nil {
		return fmt.Errorf("watch JoiningNodes: %w", classify(err))
	}
	defer w.Stop()
	c.expected.begin(items)
	defer c.expected.end()
	changed()
	return each(ctx, w, func(t watch.EventType, o runtime.Object) error {
		u, ok := o.(*unstructured.Unstructured)
		if !ok {
			return fmt.Errorf("watch JoiningNodes: got a %T", o)
		}
		if t == watch.Deleted {
			c.expected.remove(u.GetName())
		} else {
			j, err := asJoiningNode(u)
			if err != nil {
				return err
			}
			e := toExpected(j)
			if !c.expected.set(j.Name, &e) {
				return nil
			}
		}
		changed()
		return nil
	})
}

// each calls f for every event of a watch until it ends.
func each(ctx context.Context, w watch.Interface, f func(watch.EventType, runtime.Object) error) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, ok := <-w.ResultChan():
			switch {
			case !ok:
				return fmt.Errorf("watch: %w", errors.Join(cluster.ErrUnreachable, ctx.Err()))
			case e.Type == watch.Error:
				return fmt.Errorf("watch: %w", classify(apierrors.FromObject(e.Object)))
			case e.Type == watch.Bookmark:
			default:
				if err := f(e.Type, e.Object); err != nil {
					return err
				}
			}
		}
	}
}
