package operator

import (
	"constellation/operator/decision"

	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
)

// writers is how many writes to the API server are made at a time: a wave of a hundred
// machines that become Ready together does not wait for its own first half.
const writers = 128

// Replacements begin a few at a time: a hundred machines that are made in the same moment
// boot, register, empty and go in the same moments, and all wait there for the API server,
// which has nothing to do in between. Of each wave that costs more than the first of them
// loses by beginning over some seconds.
const startRate, startBurst = 60, 25 // per second, and at once

// act lets what was decided be done, and does not wait for it: a round that waits for
// the slowest of a hundred writes sees late what has happened meanwhile. What is under
// way is not begun again; what fails is decided again in the next round, and tried again
// after a pause that grows. It returns what joining machines shall get, if that is to
// change.
func (r *nodeVersions) act(o *observed, actions []decision.Action) *v1alpha1.JoinComponents {
	var (
		publish  *v1alpha1.JoinComponents
		creates  = map[string][]string{} // tokens by group
		deletes  []string
		draining = map[string]bool{}
		begins   = false
		held     = false
	)
	for _, a := range actions {
		begins = begins || a.Kind == decision.RecordIntent
		switch a.Kind {
		case decision.PublishComponents:
			join := a.JoinComponents
			publish = &join
		case decision.CreateInstance:
			if p := o.pending[a.Intent.Name]; p != nil && p.Spec.Goal == v1alpha1.JoinGoal && p.Spec.Token == a.Intent.Token {
				creates[p.Spec.GroupID] = append(creates[p.Spec.GroupID], a.Intent.Token)
			}
		case decision.DeleteInstance:
			// No machine is deleted that nothing is written about, and none of a control plane
			// by an old view of etcd.
			if !r.fleet.goes(a.Machine) && o.bound(a.Machine) && (!o.controlPlane(a.Node) || r.hostView.fresh(r.now(), actMembers)) {
				deletes = append(deletes, a.Machine)
			}
		case decision.DrainNode:
			draining[a.Node] = true
		case decision.SetGroupImage:
			r.effort(a, "image of "+a.Group, func(ctx context.Context) error {
				err := r.fleet.SetGroupImage(ctx, a.Group, a.Image)
				if err == nil {
					r.regrouped()
				}
				return err
			})
		case decision.YieldLease:
			r.effort(a, "leave", r.leave)
		case decision.MoveLeader, decision.RemoveMember:
			r.member(a)
		case decision.StartUpgrade:
			r.follow(a)
		case decision.UpgradeNode:
			// No control plane by an old view of etcd.
			if !o.controlPlane(a.Node) || r.hostView.fresh(r.now(), actMembers) {
				r.upgradeNode(o, a)
			}
		default:
			if a.Kind == decision.BindIntent && r.host != nil && o.controlPlane(a.Intent.Node) && !r.hostView.fresh(r.now(), actMembers) {
				continue
			}
			if a.Kind == decision.RecordIntent && !o.begins {
				continue // which places are free is known when the last ones are taken
			}
			if a.Kind == decision.RecordIntent && !r.starts.AllowN(r.now(), 1) {
				held = true
				continue
			}
			r.put(o, a)
		}
	}
	r.gather(o, begins, creates, deletes)
	if held {
		r.ripens = min(r.ripens, time.Second/startRate)
	}
	r.drain(o, draining)
	r.ask(o)
	if run, known := r.hostView.run(); known && r.host != nil && run.Active() && run.Components != "" {
		r.follow(decision.Action{Kind: decision.StartUpgrade, Version: run.Version, Components: run.Components}) // begun before we were
	}
	return publish
}

// put lets an action be done that the API server does.
func (r *nodeVersions) put(o *observed, a decision.Action) {
	key := a.String()
	if !r.efforts.begin(key) {
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
		did, err := r.write(ctx, o, a)
		<-r.writes
		r.counters.action(a.Kind, err)
		if err == nil {
			r.point("after", a.Kind)
			r.answered.Store(true)
		}
		if r.efforts.end(key, 0, err) && ctx.Err() == nil {
			r.log.Warn("action failed, will retry", "action", key, "err", err)
		}
		if did && err == nil {
			r.did(o, a)
		}
		if a.Kind == decision.RecordIntent {
			r.beginning.Add(-1)
		}
		r.wake()
	})
}

// Machines are created and deleted in few requests: one waits for others until a part of
// those under way has come together, which is at once if they are few; or, if it is a
// smaller part, no more come for a while; or patience, which grows with their number, has
// an end.
const (
	gatherPart, gatherLess = 4, 6
	gatherQuiet            = 100 * time.Millisecond
	patience               = 12 * time.Millisecond // for each that is under way
	patienceUp             = 1200 * time.Millisecond
)

// gathering is a request to the cloud that waits for more.
type gathering struct {
	since, grown time.Time // when the first came, and the last
	n            int
}

// gather asks the cloud for machines and for their deletion when enough has come
// together. begins is whether more replacements begin in this round.
func (r *nodeVersions) gather(o *observed, begins bool, creates map[string][]string, deletes []string) {
	before, waits, now := r.gathered, map[string]gathering{}, r.now()
	r.gathered, r.ripens = waits, never
	ripe := func(key string, n int, all bool) bool {
		if r.efforts.running(key) {
			return false // what it asks for is among them
		}
		g, ok := before[key]
		if !ok {
			g.since = now
		}
		if n != g.n {
			g.n, g.grown = n, now
		}
		waits[key] = g
		left := min(patience*time.Duration(len(o.Intents)), patienceUp) - now.Sub(g.since)
		// The smaller a part is, the longer no more may come before it goes alone.
		quiet := max(gatherQuiet, gatherQuiet*time.Duration(len(o.Intents))/time.Duration(max(1, n*gatherLess)))
		left = min(left, quiet-now.Sub(g.grown))
		if all || n*gatherPart >= len(o.Intents) || left <= 0 {
			return true
		}
		r.ripens = min(r.ripens, left)
		return false
	}
	for group, tokens := range creates {
		// More come as long as intents are written down.
		if ripe(creating+group, len(tokens), o.begins && !begins) {
			r.create(group, tokens)
		}
	}
	if len(deletes) > 0 && ripe(deleting, len(deletes), false) {
		r.remove(deletes)
	}
}

// Keys of efforts that are asked of the cloud for many machines at a time.
const (
	creating = "create in " // and the group
	deleting = "delete machines"
)

// Keys of efforts that follow what an agent does.
const (
	upgradeHere = "upgrade"
	upgradeOn   = "upgrade " // and the node
)

// actMembers is how old the members may be when one of them is to go, counted from when they
// were asked for: an agent takes 5 s to find out that one does not answer, and just then one
// may have to go. The agent looks again, and refuses what a quorum cannot do without.
const actMembers = 10 * time.Second

func (r *nodeVersions) point(when string, kind decision.ActionKind) { r.at(when + ":" + kind.String()) }

// bound reports whether a PendingNode says that the machine goes.
func (o *observed) bound(machine string) bool {
	for _, p := range o.pending {
		if p.Spec.Goal == v1alpha1.LeaveGoal && p.Spec.ProviderID == machine && machine != "" {
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

// write does an action that the API server does. did is false if it was not needed.
func (r *nodeVersions) write(ctx context.Context, o *observed, a decision.Action) (did bool, err error) {
	switch a.Kind {
	case decision.PauseAutoscaler:
		return true, r.scaling.pause(ctx)
	case decision.ResumeAutoscaler:
		return true, r.scaling.resume(ctx)
	case decision.RecordIntent:
		p := a.Intent.PendingNode()
		err := r.client.Create(ctx, p)
		if apierrors.IsAlreadyExists(err) {
			return false, nil
		}
		if err == nil {
			r.view.wrote(kindPending, p)
		}
		return true, err
	case decision.BindIntent:
		return r.patchPending(ctx, o.pending[a.Intent.Name], func(p *v1alpha1.PendingNode) bool { return a.Intent.Bind(p, r.now()) })
	case decision.ClearIntent:
		p := o.pending[a.Intent.Name]
		if p == nil || p.Spec.Goal != a.Intent.Goal || p.Spec.Token != a.Intent.Token {
			return false, nil
		}
		err := r.client.Delete(ctx, p.DeepCopy(), client.Preconditions{UID: &p.UID, ResourceVersion: &p.ResourceVersion})
		if client.IgnoreNotFound(err) == nil {
			r.view.deleted(kindPending, p.Name, p.UID)
		}
		return err == nil, client.IgnoreNotFound(err)
	case decision.AdoptHeir:
		return r.adopt(ctx, o.nodes[a.Node], o.nodes[a.Donor], a.Donor)
	case decision.CordonNode:
		return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
			if !n.Spec.Unschedulable {
				n.Spec.Unschedulable = true
				metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationCordoned, r.now().UTC().Format(time.RFC3339))
			}
			if a.Heir != "" {
				metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationHeir, a.Heir)
			}
			return true
		})
	case decision.ReleaseNode:
		return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
			delete(n.Annotations, v1alpha1.AnnotationHeir)
			if _, ours := n.Annotations[v1alpha1.AnnotationCordoned]; ours && a.Uncordon {
				delete(n.Annotations, v1alpha1.AnnotationCordoned)
				n.Spec.Unschedulable = false
			}
			return true
		})
	case decision.MarkInPlace:
		return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
			if a.Uncordon {
				delete(n.Labels, v1alpha1.LabelInPlace)
			} else {
				metav1.SetMetaDataLabel(&n.ObjectMeta, v1alpha1.LabelInPlace, "true")
			}
			return true
		})
	case decision.NoteComponents:
		return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
			if !strings.EqualFold(n.Spec.ProviderID, a.Machine) {
				return false
			}
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationComponents, a.Components)
			return true
		})
	case decision.MarkRetry:
		return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
			delete(n.Annotations, v1alpha1.AnnotationRetry)
			if a.RetryMark != "" {
				metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationRetry, a.RetryMark)
			}
			return true
		})
	case decision.PostponeNode:
		return r.patchNode(ctx, o.nodes[a.Node], func(n *corev1.Node) bool {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationPostponed, a.Until.UTC().Format(time.RFC3339))
			return true
		})
	case decision.DeleteNode:
		n := o.nodes[a.Node]
		if n == nil || !strings.EqualFold(n.Spec.ProviderID, a.Machine) {
			return false, nil
		}
		err := r.client.Delete(ctx, n.DeepCopy(), client.Preconditions{UID: &n.UID})
		if client.IgnoreNotFound(err) == nil {
			r.view.deleted(kindNode, n.Name, n.UID)
		}
		return err == nil, client.IgnoreNotFound(err)
	}
	return false, fmt.Errorf("unknown action %q", a.Kind.String())
}

// patchNode changes a Node as it was seen; if it has changed since, nothing happens
// and the error is a conflict.
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

// adopt notes the donor on its heir, with what the heir takes over. A new Node changes
// several times within a moment, by its kubelet and by controllers, so what is written
// depends only on that it is the same Node. Which donor it has follows from its machine,
// so another that the Node names is overwritten. Taints are a list
// that others change, too: with them, the heir is changed as it was seen.
func (r *nodeVersions) adopt(ctx context.Context, heir, donor *corev1.Node, name string) (did bool, err error) {
	change := func(n *corev1.Node) bool {
		if donor != nil {
			inherit(n, donor)
		}
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationDonor, name)
		return true
	}
	if heir == nil {
		return false, nil
	}
	after := heir.DeepCopy()
	switch {
	case !change(after):
		return false, nil
	case len(heir.Annotations) == 0 || len(after.Spec.Taints) != len(heir.Spec.Taints) || len(heir.Labels) == 0 && len(after.Labels) > 0:
		return r.patchNode(ctx, heir, change)
	}
	ops := []patchOp{{"test", "/metadata/uid", heir.UID}}
	if d, ok := heir.Annotations[v1alpha1.AnnotationDonor]; ok {
		ops = append(ops, patchOp{"test", pathOf("annotations", v1alpha1.AnnotationDonor), d}, patchOp{"replace", pathOf("annotations", v1alpha1.AnnotationDonor), name})
	}
	for field, m := range map[string][2]map[string]string{"labels": {heir.Labels, after.Labels}, "annotations": {heir.Annotations, after.Annotations}} {
		for k, v := range m[1] {
			if _, has := m[0][k]; !has { // null fits what is not there
				ops = append(ops, patchOp{"test", pathOf(field, k), nil}, patchOp{"add", pathOf(field, k), v})
			}
		}
	}
	body, err := json.Marshal(ops)
	if err != nil {
		return false, fmt.Errorf("adopt Node %s: %w", heir.Name, err)
	}
	changed := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: heir.Name}}
	err = r.client.Patch(ctx, changed, client.RawPatch(types.JSONPatchType, body))
	if err == nil {
		r.view.wrote(kindNode, changed)
		return true, nil
	}
	if apierrors.IsInvalid(err) { // a test did not hold
		r.view.forget(kindNode, heir.Name)
		err = apierrors.NewConflict(corev1.Resource("nodes"), heir.Name, err)
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

// patchPending changes a PendingNode as it was seen.
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

// did tells what was done.
func (r *nodeVersions) did(o *observed, a decision.Action) {
	args := []any{"action", a.Kind.String()}
	tracked, leaves := a.Intent.Machine, ""
	if a.Intent.Goal == v1alpha1.LeaveGoal {
		tracked, leaves = "", a.Intent.Machine
	}
	for _, f := range []struct{ key, value string }{
		{"node", a.Node},
		{"heir", a.Heir},
		{"donor", a.Donor},
		{"machine", a.Machine},
		{"group", a.Group},
		{"image", a.Image},
		{"pending_node", a.Intent.Name},
		{"replaces", a.Intent.Donor},
		{"tracks", tracked},
		{"leaves", leaves},
	} {
		if f.value != "" {
			args = append(args, f.key, f.value)
		}
	}
	r.log.Info(string(actionLogs[a.Kind]), args...)
	normal := corev1.EventTypeNormal
	switch n := o.nodes[a.Node]; a.Kind {
	case decision.RecordIntent:
		if donor := o.nodes[a.Intent.Donor]; donor != nil {
			r.event(donor, normal, "ReplacementBegins", "Replace", "a machine of the target's image is asked for, as "+a.Intent.Name)
		}
		if up := o.nodes[a.Intent.Node]; up != nil && a.Intent.Goal == v1alpha1.UpgradeGoal {
			r.event(up, normal, "UpgradeScheduled", "Upgrade", "this node is emptied, and then upgraded as it is, as "+a.Intent.Name)
		}
	case decision.NoteComponents:
		if n != nil {
			r.event(n, normal, "UpgradeCompleted", "Upgrade", "this node runs Kubernetes "+n.Status.NodeInfo.KubeletVersion+" now")
		}
	case decision.AdoptHeir:
		r.event(n, normal, "Replaces", "Replace", "this node takes the place of "+a.Donor)
	case decision.CordonNode:
		if a.Heir != "" {
			r.event(n, normal, "Cordoned", "Cordon", "this node is emptied; its pods go to others, and "+a.Heir+" takes its place")
		}
	case decision.ReleaseNode:
		if a.Uncordon {
			r.event(n, normal, "Uncordoned", "Cordon", "this node stays")
		}
	case decision.MarkRetry:
		if a.RetryMark != "" { // how often it has failed does not count
			r.efforts.hurry(upgradeOn + a.Node)
			r.efforts.hurry(upgradeHere)
		}
	case decision.PostponeNode:
		r.event(n, corev1.EventTypeWarning, "Postponed", "Replace", "the replacement of this node is tried again after "+a.Until.UTC().Format(time.RFC3339))
	case decision.BindIntent:
		if p := o.pending[a.Intent.Name]; p != nil {
			r.event(p, normal, "Leaves", "Bind", "the machine of "+a.Intent.Node+" goes")
		}
		if n := o.nodes[a.Intent.Node]; n != nil && strings.HasPrefix(a.Intent.Name, decision.MachinePrefix) {
			r.event(n, corev1.EventTypeWarning, decision.ReasonNeverReady, "Delete", "the join of its machine broke off after the Node was made, and its time is over: machine and Node are deleted; a new machine can join in its place")
		}
	case decision.DeleteNode:
		if n != nil {
			r.event(n, normal, "Deleted", "Delete", "its machine "+a.Machine+" goes or is gone")
		}
	}
}

// effort does beside the rounds what may take its time.
func (r *nodeVersions) effort(a decision.Action, key string, do func(context.Context) error) {
	r.try(key, func(ctx context.Context) error {
		r.point("before", a.Kind)
		err := do(ctx)
		r.counters.action(a.Kind, err)
		if err == nil {
			r.point("after", a.Kind)
			r.log.Info(string(actionLogs[a.Kind]), "action", a.String())
		}
		return err
	})
}

// member changes the members of etcd, one thing at a time, and never from an old view.
func (r *nodeVersions) member(a decision.Action) {
	if r.host == nil || !r.hostView.fresh(r.now(), actMembers) {
		return
	}
	r.effort(a, "etcd", func(ctx context.Context) error {
		defer r.hostView.outdate()
		if a.Kind == decision.MoveLeader {
			return r.host.MoveLeader(ctx, a.Node, a.Heir)
		}
		return r.host.RemoveMember(ctx, a.Node, a.MinVoters)
	})
}

// create asks the cloud for the machines of a group in one request.
func (r *nodeVersions) create(group string, tokens []string) {
	key := creating + group
	r.try(key, func(ctx context.Context) error {
		tokens := r.efforts.some(key, tokens)
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

// remove asks the cloud to delete machines in one request, and then what it says of them.
func (r *nodeVersions) remove(ids []string) {
	r.try(deleting, func(ctx context.Context) error {
		ids := r.efforts.some(deleting, ids)
		r.point("before", decision.DeleteInstance)
		err := r.fleet.DeleteInstances(ctx, ids)
		r.counters.action(decision.DeleteInstance, err)
		if err == nil {
			r.point("after", decision.DeleteInstance)
			r.log.Info("machines deleted", "action", decision.DeleteInstance.String(), "machines", len(ids), "first", ids[0])
		}
		if err != nil || !r.fleet.bye(ctx, ids) { // what has become of them is what comes next
			r.efforts.outdate(describing)
		}
		return err
	})
}

// drain goes on with what is to be emptied, and ends the rest. What is empty is kept
// in mind as long as it takes no new pods.
func (r *nodeVersions) drain(o *observed, nodes map[string]bool) {
	keep := map[string]bool{}
	for i := range o.World.Nodes {
		if n := &o.World.Nodes[i]; n.Cordon != decision.Uncordoned && n.Drained {
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

// follow lets the host's agent upgrade Kubernetes, or attaches to its run, and follows
// it to its end.
func (r *nodeVersions) follow(a decision.Action) {
	version, reference := a.Version, a.Components
	r.try(upgradeHere, func(ctx context.Context) error {
		last, err := r.host.Run(ctx)
		if err != nil {
			return err
		}
		if !a.Ended.IsZero() && last.RetryMark() != "" && !last.Ended.Equal(a.Ended) { // it has been tried again
			r.hostView.setRun(last.OfCluster())
			return nil
		}
		c, err := r.readComponents(ctx, reference)
		if err != nil {
			return err
		}
		r.point("before", decision.StartUpgrade)
		r.log.Info("upgrade of Kubernetes followed", "node", r.nodeName, "version", version, "components", reference)
		if !last.Active() { // else it was told by who began it
			r.tellVersion(ctx, corev1.EventTypeNormal, "UpgradeStarted", fmt.Sprintf("the control plane's Kubernetes is brought to %s by the agent of %s", version, r.nodeName))
		}
		failed := r.host.Upgrade(ctx, upgradeToken(version, reference, last), version, reference, c.Signed, func(run decision.UpgradeRun) {
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
		r.hostView.setRun(run)
		if failed != nil {
			r.tellVersion(ctx, corev1.EventTypeWarning, "UpgradeFailed", decision.Truncate(failed.Error(), 500))
			return failed
		}
		r.tellVersion(ctx, corev1.EventTypeNormal, "UpgradeCompleted", fmt.Sprintf("the control plane runs Kubernetes %s", version))
		return nil
	})
}

// tellVersion records what is done about the cluster's Kubernetes, at the NodeVersion and at
// the Node whose agent does it.
func (r *nodeVersions) tellVersion(ctx context.Context, kind, reason, note string) {
	for name, about := range map[string]client.Object{v1alpha1.NodeVersionName: &v1alpha1.NodeVersion{}, r.nodeName: &corev1.Node{}} {
		if err := r.client.Get(ctx, client.ObjectKey{Name: name}, about); err == nil {
			r.event(about, kind, reason, "Upgrade", note)
		}
	}
}

// try does something beside the rounds, unless it is under way or has failed a moment
// ago, and wakes the next round at its end.
func (r *nodeVersions) try(key string, do func(context.Context) error) {
	if !r.efforts.begin(key) {
		return
	}
	r.spawn(func(ctx context.Context) {
		err := do(ctx)
		if r.efforts.end(key, fleetLeast/2, err) && ctx.Err() == nil {
			r.log.Warn("action failed, will retry", "action", key, "err", err)
		}
		r.wake()
	})
}

// efforts remembers what is under way and what has failed, so that nothing is done
// twice at a time and what fails is tried less and less often. It is safe for
// concurrent use.
type efforts struct {
	now func() time.Time

	mu  sync.Mutex
	all map[string]*effort
	// done has what has ended well since the last round began, which cannot have seen it.
	done map[string]bool
}

type effort struct {
	running  bool
	wanted   bool      // it is to be done when its pause is over
	outdated bool      // what it read last has changed since
	fails    int       // in a row
	since    time.Time // when it began to fail
	conflict bool      // the last failure was one
	next     time.Time
	used     time.Time
	last     string // error
	most     int    // of what one request may hold; 0: everything
}

func newEfforts(now func() time.Time) *efforts {
	return &efforts{now: now, all: map[string]*effort{}, done: map[string]bool{}}
}

// round begins a round, which sees what was done before.
func (e *efforts) round() {
	e.mu.Lock()
	defer e.mu.Unlock()
	clear(e.done)
}

func (e *efforts) of(key string) *effort {
	t := e.all[key]
	if t == nil {
		t = &effort{}
		e.all[key] = t
	}
	t.used = e.now()
	return t
}

// begin reports whether key may be done now, and takes it. What ended in this round was
// decided again from before it, and waits for the next.
func (e *efforts) begin(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.done[key] {
		return false
	}
	t := e.of(key)
	if t.running {
		return false
	}
	if e.now().Before(t.next) {
		t.wanted = true
		return false
	}
	if !t.wanted && e.now().Sub(t.next) > conflictLasts { // what failed then was for another reason
		t.fails = 0
	}
	t.running, t.wanted, t.outdated = true, false, false
	return true
}

// ready reports whether begin would, and if not, remembers that key was to be done.
func (e *efforts) ready(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.of(key)
	wait := e.now().Before(t.next)
	t.wanted = t.wanted || wait && !t.running
	return !wait && !t.running
}

func (e *efforts) running(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.all[key]
	return t != nil && t.running
}

// end gives key back. After a success it rests for so long. It reports whether an
// error is news.
func (e *efforts) end(key string, rest time.Duration, err error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.of(key)
	t.running = false
	if err == nil {
		if rest == 0 {
			delete(e.all, key)
			e.done[key] = true
			return false
		}
		t.fails, t.last, t.next = 0, "", e.now().Add(rest)
		if t.most > 0 {
			t.most *= 2
		}
		return false
	}
	if t.fails == 0 {
		t.since = e.now()
	}
	t.next, t.wanted = e.now().Add(pauseAfter(t.fails, err)), true
	t.fails++
	text := err.Error()
	t.conflict = apierrors.IsConflict(err)
	news := t.last != text && !t.conflict
	t.last = text
	return news
}

// pauseAfter is how long to wait after so many failures and one more.
func pauseAfter(fails int, err error) time.Duration {
	least, most := 250*time.Millisecond, 10*time.Second
	switch {
	case apierrors.IsConflict(err):
		least, most = 30*time.Millisecond, time.Second // the cache is behind
	case errors.Is(err, cloud.ErrThrottled), apierrors.IsTooManyRequests(err):
		least, most = time.Second, 30*time.Second
	}
	d := min(most, least<<min(fails, 10))
	d = d/2 + rand.N(d/2)
	// A cloud that says when it answers again is not asked before.
	if until := time.Until(cloud.ThrottledUntil(err)); until > d {
		d = min(until, maxThrottle) + rand.N(d)
	}
	return d
}

// maxThrottle bounds the wait that a cloud can ask for.
const maxThrottle = 10 * time.Minute

// some returns as much as one request may hold: all, unless larger requests have
// failed. Which is chance, so that one that always fails does not stop the others.
func (e *efforts) some(key string, all []string) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.of(key)
	all = slices.Clone(all)
	slices.Sort(all)
	all = slices.Compact(all)
	if t.fails > 0 {
		t.most = max(1, min(len(all), cmp.Or(t.most, len(all)))/2)
	}
	if t.most > 0 && len(all) > t.most {
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return all[:t.most]
	}
	return all
}

// hurry ends the pause of key.
func (e *efforts) hurry(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.all[key]; t != nil {
		t.next = time.Time{}
	}
}

func (e *efforts) outdate(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.of(key).outdated = true
}

func (e *efforts) outdated(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.all[key]
	return t != nil && t.outdated && !t.running
}

// conflictLasts is how long something may meet conflicts before that is told: until the
// cache has caught up, each try meets one, and they follow each other within milliseconds.
const conflictLasts = 10 * time.Second

// unwanted is how long something may be tried again before it is known that nobody wants
// it any more: it failed, and what it was for has come about without it.
const unwanted = time.Second

// failing returns what has failed several times in a row and is still to be done, and the
// last error.
func (e *efforts) failing() (key, text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	most := 2
	for k, t := range e.all {
		if t.fails > most && (t.running || t.wanted) && (!t.conflict || e.now().Sub(t.since) >= conflictLasts) {
			key, text, most = k, t.last, t.fails
		}
	}
	return key, text
}

// trouble is the last error of key.
func (e *efforts) trouble(key string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.all[key]; t != nil {
		return t.last
	}
	return ""
}

// due returns when the next of what was refused may be done, and forgets what was not
// asked for in a long time.
func (e *efforts) due(now time.Time) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	next := resting
	for key, t := range e.all {
		switch {
		case t.running:
		case now.Sub(t.used) > resting:
			delete(e.all, key)
		case t.wanted && now.Sub(t.next) > unwanted:
			t.wanted, next = false, pace // that it failed is not told any more
		case t.wanted:
			next = min(next, max(pace, t.next.Sub(now)))
		}
	}
	return next
}

// inherit copies to an heir what its donor was given by people: labels, taints, and
// the annotations that are listed here. docs/design/operator.md has the rules. What the
// heir has already is its own.
func inherit(heir, donor *corev1.Node) {
	for k, v := range donor.Labels {
		if _, has := heir.Labels[k]; !has && inherited(k) {
			metav1.SetMetaDataLabel(&heir.ObjectMeta, k, v)
		}
	}
	for k, v := range donor.Annotations {
		if _, has := heir.Annotations[k]; !has && (k == annotationScaleDown || strings.HasPrefix(k, ownersPrefix)) {
			metav1.SetMetaDataAnnotation(&heir.ObjectMeta, k, v)
		}
	}
	for _, t := range donor.Spec.Taints {
		has := slices.ContainsFunc(heir.Spec.Taints, func(o corev1.Taint) bool { return o.MatchTaint(&t) })
		if !has && taintInherited(t.Key) {
			heir.Spec.Taints = append(heir.Spec.Taints, t)
		}
	}
}

// Annotations of a Node that go to its heir: the autoscaler's, and those that an owner
// writes for this purpose.
const (
	annotationScaleDown = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
	ownersPrefix        = "node.constellation.edgeless.systems/"
)

// inherited reports whether a label goes to the heir: people's do, those of Kubernetes
// and of the machine's place do not.
func inherited(key string) bool {
	host, name, ok := strings.Cut(key, "/")
	if !ok {
		return true
	}
	switch {
	case host == "node-role.kubernetes.io":
		return name != "control-plane"
	case host == "node-restriction.kubernetes.io": // kubelets may not set them, so people did
		return true
	case strings.HasPrefix(host, "topology."):
		return false
	}
	return !reserved(host)
}

func taintInherited(key string) bool {
	if key == v1alpha1.AnnotationRevoked || key == "ToBeDeletedByClusterAutoscaler" || key == "DeletionCandidateOfClusterAutoscaler" {
		return false
	}
	host, _, _ := strings.Cut(key, "/")
	return host != "node.kubernetes.io" && host != "node.cloudprovider.kubernetes.io"
}

func reserved(host string) bool {
	for _, domain := range []string{"kubernetes.io", "k8s.io"} {
		if host == domain || strings.HasSuffix(host, "."+domain) {
			return true
		}
	}
	return false
}

// logMessage is a log message that is chosen by a variable.
type logMessage string

// actionLogs are the messages that are logged once an action has succeeded, one for each
// kind. A kind without one logs while it is carried out.
var actionLogs = [...]logMessage{
	decision.PauseAutoscaler: "autoscaler paused", decision.ResumeAutoscaler: "autoscaler resumed", decision.SetGroupImage: "image of scaling group set", decision.RecordIntent: "pending node created",
	decision.BindIntent: "pending node bound", decision.ClearIntent: "pending node deleted", decision.CreateInstance: "machines created", decision.AdoptHeir: "replacement node adopted", decision.CordonNode: "node cordoned",
	decision.ReleaseNode: "node released", decision.PostponeNode: "node postponed", decision.DrainNode: "", decision.YieldLease: "leader election lease yielded", decision.MoveLeader: "etcd leader moved",
	decision.RemoveMember: "etcd member removed", decision.DeleteInstance: "machines deleted", decision.DeleteNode: "node deleted", decision.StartUpgrade: "", decision.UpgradeNode: "",
	decision.NoteComponents: "components of node recorded", decision.MarkInPlace: "in-place label changed", decision.MarkRetry: "retry request changed", decision.PublishComponents: "",
}
