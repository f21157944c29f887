package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// writers is the number of concurrent writes to the API server. It is large, so that a hundred machines
// that become Ready together do not wait for each other.
const writers = 128

// Replacements start a few at a time. A hundred machines that are created together also boot,
// register, drain and leave together, and wait for the API server each time. A start over some
// seconds costs less.
const startRate, startBurst = 60, 25 // per second, and at once

// act starts the actions and does not wait for them: a round that waits for the slowest of a hundred
// writes observes changes late. An action in progress is not started again. A failed action is
// decided again in the next round, with exponential backoff. act returns the components to
// publish for joining machines, or nil.
func (r *nodeVersions) act(o *observed, actions []decision.Action) *v1alpha1.JoinComponents {
	b := &batch{o: o, creates: map[string][]string{}, draining: map[string]bool{}}
	for _, a := range actions {
		effects[a.Kind].begin(r, b, a)
	}
	r.gather(o, b.begins, b.creates, b.deletes)
	if b.startsDelayed {
		r.ripens = min(r.ripens, time.Second/startRate)
	}
	r.drain(o, b.draining)
	r.ask(o)
	if run, known := r.hostView.run(); known && r.host != nil && run.Active() && run.Components != "" {
		here := o.find().Nodes[r.nodeName] // an earlier leader started the run
		r.follow(decision.Action{Kind: decision.StartUpgrade, Version: run.Version, Components: run.Components, KeepKubelet: here != nil && o.KeepsKubelet(here)})
	}
	return b.publish
}

// put starts a write to the API server in the background.
func (r *nodeVersions) put(o *observed, a decision.Action, e write) {
	key := a.String()
	if !r.retries.begin(key) {
		return
	}
	if a.Kind == decision.RecordIntent {
		r.beginning.Add(1)
	}
	o = o.of(a) // the rest belongs to this round
	r.spawn(func(ctx context.Context) {
		r.writes <- struct{}{}
		r.point("before", a.Kind)
		r.counters.asked(o.woken)
		did, err := e.send(r, ctx, o, a)
		<-r.writes
		r.counters.action(a.Kind, err)
		if err == nil {
			r.point("after", a.Kind)
			r.answered.Store(true)
		}
		if r.retries.end(key, 0, err) && ctx.Err() == nil {
			r.log.Warn("action failed, will retry", "action", key, "err", err)
		}
		if did && err == nil {
			r.logDone(a, e.log)
			if e.event != nil {
				e.event(r, o, a)
			}
		}
		if a.Kind == decision.RecordIntent {
			r.beginning.Add(-1)
		}
		r.wake()
	})
}

// Machines are created and deleted in batches. A request waits until a part of the machines in
// progress has been collected, or no more come for a while, or its patience ends. Patience grows
// with the number of machines in progress. If requests take long, a part is not enough: the rest would
// wait for the end of the request.
const (
	gatherPart, gatherLess = 4, 6
	gatherQuiet            = 100 * time.Millisecond
	patience               = 12 * time.Millisecond // for each that is in progress
	patienceUp             = 1200 * time.Millisecond
)

// gathering is a batch for the cloud that waits for more machines.
type gathering struct {
	since, grown time.Time // when the first came, and the last
	n            int
}

// left returns how long a batch waits for more machines; zero or less: it is large enough. progress is the number of machines in
// progress, and slow whether requests take long.
func (g gathering) left(progress int, slow bool, now time.Time) time.Duration {
	if g.n*gatherPart >= progress && !slow {
		return 0
	}
	// A smaller batch waits longer for more machines before it is sent.
	quiet := max(gatherQuiet, gatherQuiet*time.Duration(progress)/time.Duration(max(1, g.n*gatherLess)))
	return min(min(patience*time.Duration(progress), patienceUp)-now.Sub(g.since), quiet-now.Sub(g.grown))
}

// gather requests machines and deletions from the cloud when a batch is large enough. begins is
// whether more replacements start in this round.
func (r *nodeVersions) gather(o *observed, begins bool, creates map[string][]string, deletes []string) {
	before, waits, now := r.gathered, map[string]gathering{}, r.now()
	r.gathered, r.ripens = waits, never
	ripe := func(key string, n int, all bool) bool {
		if r.retries.running(key) {
			return false // they include the machines of this action
		}
		g, ok := before[key]
		if !ok {
			g.since = now
		}
		if n != g.n {
			g.n, g.grown = n, now
		}
		waits[key] = g
		left := g.left(len(o.Intents), r.retries.slow(key), now)
		if all || left <= 0 {
			return true
		}
		r.ripens = min(r.ripens, left)
		return false
	}
	for group, tokens := range creates {
		// More machines follow while intents are being written.
		if ripe(creating+group, len(tokens), o.begins && !begins) {
			r.create(group, tokens)
		}
	}
	if len(deletes) > 0 && ripe(deleting, len(deletes), false) {
		r.remove(deletes)
	}
}

// Keys of retries for requests to the cloud about many machines.
const (
	creating = "create in " // and the group
	deleting = "delete machines"
)

// Keys of retries for runs of agents.
const (
	upgradeHere = "upgrade"
	upgradeOn   = "upgrade " // and the node
	addonsKey   = "upgrade add-ons"
)

// actMembers is the maximum age of the member list when a member is removed, from the time of the
// request. An agent takes 5 s to detect a member that does not answer. The agent checks again and
// refuses a removal that would break the quorum.
const actMembers = 10 * time.Second

func (r *nodeVersions) point(when string, kind decision.ActionKind) { r.at(when + ":" + kind.String()) }

// bound reports whether a PendingNode is bound to the machine for its removal.
func (o *observed) bound(machine string) bool {
	for _, p := range o.pending {
		if p.Spec.Goal == v1alpha1.LeaveGoal && machine != "" && cloud.SameMachine(p.Spec.ProviderID, machine) {
			return true
		}
	}
	return false
}

func (o *observed) controlPlane(name string) bool {
	if n := o.find().Nodes[name]; n != nil && n.Role == v1alpha1.ControlPlaneRole {
		return true
	}
	n := o.nodes[name]
	return n != nil && roleOf(n) == v1alpha1.ControlPlaneRole
}

// patchNode changes the observed Node. If the Node has changed since, the error is a conflict.
func (r *nodeVersions) patchNode(ctx context.Context, n *corev1.Node, change func(*corev1.Node) bool) (did bool, err error) {
	if n == nil {
		return false, nil
	}
	before, after := n.DeepCopy(), n.DeepCopy()
	if !change(after) {
		return false, nil
	}
	err = r.client.Patch(ctx, after, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if err == nil {
		r.view.wrote(kindNode, after)
		return true, nil
	}
	if apierrors.IsConflict(err) {
		r.view.forget(kindNode, n.Name)
	}
	return false, client.IgnoreNotFound(err)
}

// adopt writes the old node's name to its replacement node, with the labels, annotations and taints
// that it inherits. The kubelet and controllers change a new Node often at first, so the
// write only requires that it is the same Node. The old node follows from the machine, so any other
// name in the Node is overwritten. Others change the list of taints too, so a write of taints
// requires an unchanged Node.
func (r *nodeVersions) adopt(ctx context.Context, newNode, oldNode *corev1.Node, name string) (did bool, err error) {
	change := func(n *corev1.Node) bool {
		if oldNode != nil {
			inherit(n, oldNode)
		}
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationDonor, name)
		return true
	}
	if newNode == nil {
		return false, nil
	}
	after := newNode.DeepCopy()
	switch {
	case !change(after):
		return false, nil
	case len(newNode.Annotations) == 0 || len(after.Spec.Taints) != len(newNode.Spec.Taints) || len(newNode.Labels) == 0 && len(after.Labels) > 0:
		return r.patchNode(ctx, newNode, change)
	}
	ops := []patchOp{{"test", "/metadata/uid", newNode.UID}}
	if d, ok := newNode.Annotations[v1alpha1.AnnotationDonor]; ok {
		ops = append(ops, patchOp{"test", pathOf("annotations", v1alpha1.AnnotationDonor), d}, patchOp{"replace", pathOf("annotations", v1alpha1.AnnotationDonor), name})
	}
	for field, m := range map[string][2]map[string]string{"labels": {newNode.Labels, after.Labels}, "annotations": {newNode.Annotations, after.Annotations}} {
		for k, v := range m[1] {
			if _, has := m[0][k]; !has { // null matches a missing entry
				ops = append(ops, patchOp{"test", pathOf(field, k), nil}, patchOp{"add", pathOf(field, k), v})
			}
		}
	}
	body, err := json.Marshal(ops)
	if err != nil {
		return false, fmt.Errorf("adopt Node %s: %w", newNode.Name, err)
	}
	changed := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: newNode.Name}}
	err = r.client.Patch(ctx, changed, client.RawPatch(types.JSONPatchType, body))
	if err == nil {
		r.view.wrote(kindNode, changed)
		return true, nil
	}
	if apierrors.IsInvalid(err) { // a test did not hold
		r.view.forget(kindNode, newNode.Name)
		err = apierrors.NewConflict(corev1.Resource("nodes"), newNode.Name, err)
	}
	return false, client.IgnoreNotFound(err)
}

// patchOp is an operation of a JSON patch (RFC 6902).
type patchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// pathOf is the path of an entry of an object's labels or annotations.
func pathOf(field, key string) string {
	return "/metadata/" + field + "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
}

// patchPending changes a PendingNode if it is unchanged.
func (r *nodeVersions) patchPending(ctx context.Context, p *v1alpha1.PendingNode, change func(*v1alpha1.PendingNode) bool) (did bool, err error) {
	if p == nil {
		return false, nil
	}
	before, after := p.DeepCopy(), p.DeepCopy()
	if !change(after) {
		return false, nil
	}
	err = r.client.Patch(ctx, after, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if err == nil {
		r.view.wrote(kindPending, after)
		return true, nil
	}
	if apierrors.IsConflict(err) {
		r.view.forget(kindPending, p.Name)
	}
	return false, client.IgnoreNotFound(err)
}

// create requests the machines of a group from the cloud.
func (r *nodeVersions) create(group string, tokens []string) {
	key := creating + group
	r.try(key, func(ctx context.Context) error {
		tokens := r.retries.some(key, tokens)
		r.point("before", decision.CreateInstance)
		_, err := r.fleet.CreateInstances(ctx, group, tokens)
		r.counters.action(decision.CreateInstance, err)
		if err == nil {
			r.point("after", decision.CreateInstance)
			r.log.Info("machines created", "action", decision.CreateInstance.String(), "group", group, "machines", len(tokens))
		}
		return err
	})
}

// remove requests the deletion of machines from the cloud, and then describes them.
func (r *nodeVersions) remove(ids []string) {
	r.try(deleting, func(ctx context.Context) error {
		ids := r.retries.some(deleting, ids)
		r.point("before", decision.DeleteInstance)
		err := r.fleet.DeleteInstances(ctx, ids)
		r.counters.action(decision.DeleteInstance, err)
		if err == nil {
			r.point("after", decision.DeleteInstance)
			r.log.Info("machines deleted", "action", decision.DeleteInstance.String(), "machines", len(ids), "first", ids[0])
		}
		if err != nil || !r.fleet.confirmDeletion(ctx, ids) { // their new state decides the next round
			r.retries.outdate(describing)
		}
		return err
	})
}

// drain starts or continues the drains of nodes, and stops all others. A drained node is remembered
// while it is cordoned.
func (r *nodeVersions) drain(o *observed, nodes map[string]bool) {
	keep := map[string]bool{}
	for i := range o.Nodes {
		if n := &o.Nodes[i]; n.Cordon != decision.Uncordoned && n.Drained {
			keep[n.Name] = true
		}
	}
	for name := range nodes {
		keep[name] = true
	}
	r.drains.keep(keep)
	for name := range nodes {
		r.point("before", decision.DrainNode)
		r.drains.drain(name)
		r.point("after", decision.DrainNode)
	}
}

// follow starts an upgrade of Kubernetes by the host's agent or attaches to it, and follows it to its
// end.
func (r *nodeVersions) follow(a decision.Action) {
	version, reference := a.Version, a.Components
	r.try(upgradeHere, func(ctx context.Context) error {
		last, err := r.host.Run(ctx)
		if err != nil {
			return err
		}
		if !a.Ended.IsZero() && last.RetryMark() != "" && !last.Ended.Equal(a.Ended) { // it has been retried
			r.hostView.setRun(last.OfCluster())
			return nil
		}
		c, err := r.readComponents(ctx, reference)
		if err != nil {
			return err
		}
		r.point("before", decision.StartUpgrade)
		r.log.Info("upgrade of Kubernetes followed", "node", r.nodeName, "version", version, "components", reference)
		if !last.Active() { // else the leader that started it has recorded it
			r.recordVersion(ctx, corev1.EventTypeNormal, "UpgradeStarted", fmt.Sprintf("the agent of %[2]s upgrades the control plane's Kubernetes to %[1]s", version, r.nodeName))
		}
		failed := r.host.Upgrade(ctx, upgradeToken(version, reference, last), version, reference, c.Signed, a.KeepKubelet, func(run decision.UpgradeRun) {
			r.hostView.setRun(run)
			r.wake()
		})
		if failed == nil {
			r.point("after", decision.StartUpgrade)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		run, err := r.host.Run(ctx)
		if err != nil {
			return errors.Join(failed, err)
		}
		r.hostView.setRun(run.OfCluster())
		if failed != nil {
			r.recordVersion(ctx, corev1.EventTypeWarning, "UpgradeFailed", decision.Truncate(failed.Error(), 500))
			return failed
		}
		r.recordVersion(ctx, corev1.EventTypeNormal, "UpgradeCompleted", fmt.Sprintf("the control plane runs Kubernetes %s", version))
		return nil
	})
}

// recordVersion records an event about the cluster's Kubernetes on the NodeVersion and on the Node of
// the agent.
func (r *nodeVersions) recordVersion(ctx context.Context, kind, reason, note string) {
	for name, about := range map[string]client.Object{v1alpha1.NodeVersionName: &v1alpha1.NodeVersion{}, r.nodeName: &corev1.Node{}} {
		if err := r.client.Get(ctx, client.ObjectKey{Name: name}, about); err == nil {
			r.event(about, kind, reason, "Upgrade", note)
		}
	}
}

// try runs do in the background, unless it is in progress or in backoff, and starts a round at its
// end.
func (r *nodeVersions) try(key string, do func(context.Context) error) {
	if !r.retries.begin(key) {
		return
	}
	r.spawn(func(ctx context.Context) {
		err := do(ctx)
		if r.retries.end(key, fleetLeast/2, err) && ctx.Err() == nil {
			r.log.Warn("action failed, will retry", "action", key, "err", err)
		}
		r.wake()
	})
}
