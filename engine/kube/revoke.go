package kube

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/revocation"
	"constellation/operator/api/v1alpha1"
)

// Revoked implements [engine.Cluster]. A damaged entry is listed without its details.
func (c *Client) Revoked(ctx context.Context) (revocation.List, error) {
	cm, err := c.record(ctx)
	if err != nil || cm == nil {
		return nil, err
	}
	list, err := revocation.Parse(cm.Data)
	if err != nil {
		c.log.Warn("revocation record damaged", "err", err)
	}
	return list, nil
}

// record returns the ConfigMap of revoked machines, nil if there is none.
func (c *Client) record(ctx context.Context) (cm *corev1.ConfigMap, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		cm, err = c.core.CoreV1().ConfigMaps(revocation.Namespace).Get(ctx, revocation.ConfigMap, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			cm, err = nil, nil
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read ConfigMap %s: %w", revocation.ConfigMap, err)
	}
	return cm, nil
}

// Revoke implements [engine.Cluster]. The record is written first, since a join service that
// writes a token reads the record afterwards.
func (c *Client) Revoke(ctx context.Context, node string, e revocation.Entry) error {
	news, err := c.writeEntry(ctx, node, e)
	if err != nil {
		return fmt.Errorf("write ConfigMap %s: %w", revocation.ConfigMap, err)
	}
	gone := func(what string, remove func(context.Context) error) error {
		err := retry(ctx, func(ctx context.Context) error {
			if err := remove(ctx); !apierrors.IsNotFound(err) {
				return err
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("delete %s: %w", what, err)
		}
		return nil
	}
	if err := gone("bootstrap token of "+node, func(ctx context.Context) error {
		return c.core.CoreV1().Secrets(systemNamespace).Delete(ctx, revocation.TokenSecret(node), metav1.DeleteOptions{})
	}); err != nil {
		return err
	}
	if err := gone("JoiningNode "+node, func(ctx context.Context) error {
		return c.dynamic.Resource(joiningNodes).Delete(ctx, node, metav1.DeleteOptions{})
	}); err != nil {
		return err
	}
	if news {
		c.reportRevocation(ctx, node, e)
	}
	return nil
}

// writeEntry writes one entry with optimistic locking, and reports whether the machine was new
// in the record.
func (c *Client) writeEntry(ctx context.Context, node string, e revocation.Entry) (news bool, err error) {
	value, err := e.Encode()
	if err != nil {
		return false, err
	}
	maps := c.core.CoreV1().ConfigMaps(revocation.Namespace)
	for {
		cm, err := c.record(ctx)
		if err != nil {
			return false, err
		}
		if cm == nil {
			fresh := &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: revocation.ConfigMap, Namespace: revocation.Namespace, Labels: map[string]string{partOfLabel: partOf}},
				Data:       map[string]string{node: value},
			}
			err = retry(ctx, func(ctx context.Context) error {
				_, err := maps.Create(ctx, fresh, metav1.CreateOptions{FieldManager: fieldManager})
				if apierrors.IsNotFound(err) {
					if err = c.ownNamespace(ctx); err == nil {
						_, err = maps.Create(ctx, fresh, metav1.CreateOptions{FieldManager: fieldManager})
					}
				}
				return err
			})
			if apierrors.IsAlreadyExists(err) {
				continue
			}
			return true, err
		}
		list, _ := revocation.Parse(cm.Data) // a damaged entry stays
		have, there := list[node]
		if there && cm.Data[node] == value {
			return false, nil
		}
		for _, name := range list.Expired(time.Now()) {
			delete(cm.Data, name)
		}
		if cm.Data == nil {
			cm.Data = map[string]string{}
		}
		cm.Data[node] = value
		err = retry(ctx, func(ctx context.Context) error {
			_, err := maps.Update(ctx, cm, metav1.UpdateOptions{FieldManager: fieldManager})
			return err
		})
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			continue
		}
		return !there || !cloud.SameMachine(have.ProviderID, e.ProviderID), err
	}
}

// ExpireRevocations implements [engine.Cluster]. A damaged entry stays, as one without an end.
func (c *Client) ExpireRevocations(ctx context.Context, now time.Time) error {
	for {
		cm, err := c.record(ctx)
		if err != nil || cm == nil {
			return err
		}
		list, _ := revocation.Parse(cm.Data) // a damaged entry stays
		expired := list.Expired(now)
		if len(expired) == 0 {
			return nil
		}
		for _, node := range expired {
			delete(cm.Data, node)
		}
		// Bound to what was read: a revocation that was written meanwhile is kept.
		err = retry(ctx, func(ctx context.Context) error {
			_, err := c.core.CoreV1().ConfigMaps(revocation.Namespace).Update(ctx, cm, metav1.UpdateOptions{FieldManager: fieldManager})
			return err
		})
		switch {
		case apierrors.IsConflict(err) || apierrors.IsNotFound(err):
			continue
		case err != nil:
			return fmt.Errorf("write ConfigMap %s: %w", revocation.ConfigMap, err)
		}
		for _, node := range expired {
			c.log.Info("expired revocation removed", "node", node, "until", list[node].Until)
		}
		return nil
	}
}

// reportRevocation emits events on the Node and on the NodeVersion. The record is
// authoritative, so a failed event is not an error.
func (c *Client) reportRevocation(ctx context.Context, node string, e revocation.Entry) {
	at := metav1.NewTime(e.Since)
	text := fmt.Sprintf("machine %s of node %s was revoked by %s", e.ProviderID, node, revokedBy(e))
	for _, about := range []corev1.ObjectReference{
		{APIVersion: "v1", Kind: "Node", Name: node, UID: types.UID(e.UID)},
		{APIVersion: v1alpha1.GroupVersion.String(), Kind: "NodeVersion", Name: v1alpha1.NodeVersionName},
	} {
		ev := &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{GenerateName: about.Name + ".", Namespace: metav1.NamespaceDefault},
			InvolvedObject: about, Reason: "MachineRevoked", Message: text, Type: corev1.EventTypeWarning, Count: 1,
			FirstTimestamp: at, LastTimestamp: at, Source: corev1.EventSource{Component: "constellation"}, ReportingController: "constellation",
		}
		limited, cancel := context.WithTimeout(ctx, requestLimit)
		_, err := c.core.CoreV1().Events(metav1.NamespaceDefault).Create(limited, ev, metav1.CreateOptions{FieldManager: fieldManager})
		cancel()
		if err != nil {
			c.log.Warn("revocation event not written", "object", about.Kind+"/"+about.Name, "err", err)
		}
	}
}

// revokedBy describes the user who revoked a machine, and why.
func revokedBy(e revocation.Entry) string {
	if e.Reason == "" {
		return e.By
	}
	return e.By + ": " + e.Reason
}

// RemoveMachine implements [engine.Cluster].
//
// The taint comes first: Kubernetes then evicts the node's pods, so that they run elsewhere
// while the machine is being removed.
func (c *Client) RemoveMachine(ctx context.Context, node string, e revocation.Entry) error {
	if err := c.taint(ctx, node); err != nil {
		return fmt.Errorf("taint node %s: %w", node, err)
	}
	return c.createPending(ctx, &v1alpha1.PendingNode{
		ObjectMeta: metav1.ObjectMeta{Name: revocation.RemovalPrefix + node, Annotations: map[string]string{v1alpha1.AnnotationRevoked: "by " + revokedBy(e)}},
		Spec:       v1alpha1.PendingNodeSpec{Goal: v1alpha1.LeaveGoal, ProviderID: e.ProviderID, NodeName: node, GroupID: groupOr(e.Group)},
	})
}

// groupOr is a group's ID, or the operator's placeholder for an unknown group.
func groupOr(id string) string {
	if id == "" {
		return "unknown"
	}
	return id
}

// taint evicts all pods of a node that do not tolerate everything, and blocks scheduling.
// Other programs change the list of taints, too, so the update is conditional on the version
// that was read. A missing Node needs no taint. Finalizers are removed too:
// they would keep the Node from being deleted.
func (c *Client) taint(ctx context.Context, node string) error {
	nodes := c.core.CoreV1().Nodes()
	for {
		var n *corev1.Node
		err := retry(ctx, func(ctx context.Context) (err error) {
			n, err = nodes.Get(ctx, node, metav1.GetOptions{})
			return err
		})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		has := false
		for _, t := range n.Spec.Taints {
			has = has || t.Key == v1alpha1.AnnotationRevoked
		}
		if has && n.Spec.Unschedulable && len(n.Finalizers) == 0 {
			return nil
		}
		// Its kubelet could set finalizers before the admission policies came. The record keeps it
		// from setting others.
		if len(n.Finalizers) > 0 {
			c.log.Warn("finalizers of a revoked node removed", "node", node, "finalizers", strings.Join(n.Finalizers, ", "))
			n.Finalizers = nil
		}
		if !has {
			now := metav1.Now()
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: v1alpha1.AnnotationRevoked, Effect: corev1.TaintEffectNoExecute, TimeAdded: &now})
		}
		n.Spec.Unschedulable = true
		err = retry(ctx, func(ctx context.Context) error {
			_, err := nodes.Update(ctx, n, metav1.UpdateOptions{FieldManager: fieldManager})
			return err
		})
		switch {
		case apierrors.IsConflict(err): // conflicts are frequent: its kubelet reports every few seconds
		case apierrors.IsNotFound(err):
			return nil
		default:
			return err
		}
	}
}

// RefillMachine implements [engine.Cluster].
func (c *Client) RefillMachine(ctx context.Context, node string, e revocation.Entry, token string, deadline time.Time) error {
	d := metav1.NewTime(deadline.UTC().Truncate(time.Second))
	return c.createPending(ctx, &v1alpha1.PendingNode{
		ObjectMeta: metav1.ObjectMeta{Name: revocation.RefillPrefix + node},
		Spec:       v1alpha1.PendingNodeSpec{Goal: v1alpha1.JoinGoal, GroupID: groupOr(e.Group), Token: token, Donor: node, Deadline: &d},
	})
}

// createPending creates a PendingNode unless it exists. One that is bound to another machine
// is an error.
func (c *Client) createPending(ctx context.Context, p *v1alpha1.PendingNode) error {
	p.TypeMeta = metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "PendingNode"}
	o, err := runtime.DefaultUnstructuredConverter.ToUnstructured(p)
	if err != nil {
		return fmt.Errorf("encode PendingNode %s: %w", p.Name, err)
	}
	delete(o, "status")
	all := c.dynamic.Resource(pendingNodes)
	err = retry(ctx, func(ctx context.Context) error {
		_, err := all.Create(ctx, &unstructured.Unstructured{Object: o}, metav1.CreateOptions{FieldManager: fieldManager})
		return err
	})
	if apierrors.IsAlreadyExists(err) {
		var have *unstructured.Unstructured
		err = retry(ctx, func(ctx context.Context) (err error) {
			have, err = all.Get(ctx, p.Name, metav1.GetOptions{})
			return err
		})
		if apierrors.IsNotFound(err) { // it was deleted in the meantime
			return nil
		}
		if err == nil {
			if id, _, _ := unstructured.NestedString(have.Object, "spec", "providerID"); p.Spec.ProviderID != "" && !cloud.SameMachine(id, p.Spec.ProviderID) {
				return fmt.Errorf("create PendingNode %s: one of this name is bound to machine %q: %w", p.Name, id, cluster.ErrConflict)
			}
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("create PendingNode %s: %w", p.Name, err)
	}
	return nil
}
