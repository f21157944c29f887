package kube

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"constellation/assets"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/revocation"
	"constellation/operator/api/v1alpha1"
)

func init() {
	leaseDuration, leaseRenewal, leaseLook = time.Second, 100*time.Millisecond, 20*time.Millisecond
}

// Objects written by the operator are converted, by requests and while a watch runs.
func TestRolloutIsReadAndWatched(t *testing.T) {
	c := start(t)
	ctx := t.Context()
	kinds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.ApplyKinds(ctx, kinds, func(string) {}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Rollout(ctx); !errors.Is(err, cluster.ErrAbsent) {
		t.Fatalf("without a NodeVersion: %v", err)
	}
	if _, err := c.Plans(ctx); !errors.Is(err, cluster.ErrAbsent) {
		t.Fatalf("Plans without their kind: %v", err)
	}
	target := cluster.NodeTarget{Image: "sandboxes/demo/images/v1.1.0", ImageVersion: "v1.1.0", Components: "k8s-components-sha256-" + fmt.Sprintf("%064d", 1), Kubernetes: "v1.35.4", MaxSurge: "2"}
	if err := c.SetNodeTarget(ctx, target); err != nil {
		t.Fatal(err)
	}
	changed := make(chan struct{}, 100)
	watching, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- c.WatchRollout(watching, func() { changed <- struct{}{} }) }()
	until := func(what string, is func(cluster.Rollout) bool) cluster.Rollout {
		t.Helper()
		limit := time.After(20 * time.Second)
		for {
			ro, err := c.Rollout(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if is(ro) {
				return ro
			}
			select {
			case <-changed:
			case <-limit:
				t.Fatalf("never %s: %+v", what, ro)
			}
		}
	}
	for range 5 { // each of the five watches reports that it has begun or failed
		<-changed
	}
	if _, err := c.Plans(ctx); !errors.Is(err, cluster.ErrAbsent) {
		t.Errorf("Plans without their kind, while a watch runs: %v", err)
	}

	since := time.Now().UTC().Truncate(time.Second)
	next := metav1.NewTime(since.Add(time.Minute))
	nv, err := c.nodeVersion(ctx)
	if err != nil {
		t.Fatal(err)
	}
	nv.Status = v1alpha1.NodeVersionStatus{
		Upgrade: &v1alpha1.UpgradeProgress{Version: "v1.35.4", Node: "control-plane-0", Phase: "apply", Line: "[upgrade] ...", Started: metav1.NewTime(since)},
		Waiting: &v1alpha1.Waiting{Reason: "DrainBlocked", Message: "pod shop/cart-1: no room", Object: &v1alpha1.Reference{Kind: "Node", Name: "worker-0"}, Since: metav1.NewTime(since), NextTry: &next},
		Conditions: []metav1.Condition{
			{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, ObservedGeneration: nv.Generation, Reason: "DrainBlocked", Message: "no room", LastTransitionTime: metav1.NewTime(since)},
			{Type: v1alpha1.ConditionReconciling, Status: metav1.ConditionTrue, Reason: "DrainBlocked", LastTransitionTime: metav1.NewTime(since)},
			{Type: v1alpha1.ConditionStalled, Status: metav1.ConditionTrue, Reason: "DrainBlocked", LastTransitionTime: metav1.NewTime(since)},
		},
	}
	put(t, c, "status", nv)
	pending := &v1alpha1.PendingNode{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "PendingNode"}, ObjectMeta: metav1.ObjectMeta{Name: "replace-0"},
		Spec: v1alpha1.PendingNodeSpec{ProviderID: "sandbox://demo/worker-0", GroupID: "sandboxes/demo/groups/workers", NodeName: "worker-0", Goal: v1alpha1.LeaveGoal, Donor: "worker-0"},
	}
	u := asUnstructured(t, pending)
	if _, err := c.dynamic.Resource(pendingNodes).Create(ctx, u, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	got := until("leaving", func(ro cluster.Rollout) bool { return len(ro.Moves) == 1 && ro.Waiting.Reason != "" })
	got.Target.Conditions = nil
	want := cluster.Rollout{
		Target: target, Observed: true, Busy: true, Stalled: true, Reason: "DrainBlocked", Message: "no room",
		Agent:   cluster.AgentRun{Version: "v1.35.4", Node: "control-plane-0", Phase: "apply", Line: "[upgrade] ...", Started: since.Local()},
		Waiting: cluster.RolloutWait{Reason: "DrainBlocked", Message: "pod shop/cart-1: no room", Node: "worker-0", Since: since.Local(), NextTry: next.Local()},
		Moves:   []cluster.Move{{Name: "replace-0", Node: "worker-0", Group: "workers", Leaves: true, Donor: "worker-0"}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("watched (-want +got):\n%s", d)
	}
	stop()
	<-ended
	asked, err := c.Rollout(ctx)
	asked.Target.Conditions = nil
	if d := cmp.Diff(want, asked); d != "" || err != nil {
		t.Errorf("asked (-want +got):\n%s%v", d, err)
	}

	followsPlans(t, c)

	// A changed target has a new generation without observed state.
	target.ImageVersion, target.Image = "v1.0.0", "sandboxes/demo/images/v1.0.0"
	if err := c.SetNodeTarget(ctx, target); err != nil {
		t.Fatal(err)
	}
	if ro, err := c.Rollout(ctx); err != nil || ro.Observed {
		t.Errorf("after a change: %+v, %v", ro, err)
	}
}

// followsPlans creates, changes and deletes a Plan while a watch runs.
func followsPlans(t *testing.T, c *Client) {
	t.Helper()
	ctx := t.Context()
	if err := c.ApplyKinds(ctx, []assets.File{{Name: "plans.upgrade.cattle.io", Data: assets.PlanKind()}}, func(string) {}); err != nil {
		t.Fatal(err)
	}
	if list, err := c.Plans(ctx); err != nil || len(list) > 0 {
		t.Fatalf("Plans with their kind alone: %v, %v", list, err)
	}
	watching, stop := context.WithCancel(ctx)
	changed, ended := make(chan struct{}, 100), make(chan error, 1)
	go func() { ended <- c.WatchRollout(watching, func() { changed <- struct{}{} }) }()
	for range 5 {
		<-changed
	}
	until := func(want ...cluster.NodePlan) {
		t.Helper()
		limit := time.After(20 * time.Second)
		for {
			got, err := c.Plans(ctx)
			d := cmp.Diff(want, got, cmpopts.EquateEmpty())
			if err == nil && d == "" {
				return
			}
			select {
			case <-changed:
			case <-limit:
				t.Fatalf("Plans: %v (-want +got):\n%s", err, d)
			}
		}
	}
	p := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "upgrade.cattle.io/v1", "kind": "Plan", "metadata": map[string]any{"name": "k3s", "namespace": "default"},
		"spec": map[string]any{"concurrency": int64(1), "version": "v1", "upgrade": map[string]any{"image": "busybox"}},
	}}
	to := c.dynamic.Resource(plans).Namespace("default")
	p, err := to.Create(ctx, p, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	until(cluster.NodePlan{Name: "default/k3s", Version: "v1", State: cluster.PlanUnseen})
	p.Object["status"] = map[string]any{"latestVersion": "v1", "applying": []any{"a"}, "conditions": []any{map[string]any{"type": "Complete", "status": "False", "reason": "SyncJob"}}}
	if _, err := to.UpdateStatus(ctx, p, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	until(cluster.NodePlan{Name: "default/k3s", Version: "v1", State: cluster.PlanApplying, Applying: 1, Nodes: []cluster.NodePlanNode{{Name: "a", State: plan.NodeUpgrading}}})
	if err := to.Delete(ctx, "k3s", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	until()
	stop()
	<-ended
}

func asUnstructured(t *testing.T, o any) *unstructured.Unstructured {
	t.Helper()
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		t.Fatal(err)
	}
	return &unstructured.Unstructured{Object: m}
}

// put writes a subresource of NodeVersion, in place of the operator.
func put(t *testing.T, c *Client, sub string, nv *v1alpha1.NodeVersion) {
	t.Helper()
	b, err := asUnstructured(t, nv).MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.dynamic.Resource(nodeVersions).Patch(t.Context(), nv.Name, types.MergePatchType, b, metav1.PatchOptions{FieldManager: "operator"}, sub); err != nil {
		t.Fatal(err)
	}
}

// The lease of a console that died is taken over once it has expired; a console that cannot
// reach the API server for a while keeps its lease.
func TestExpiredLeaseIsTakenOver(t *testing.T) {
	c := start(t)
	ctx := t.Context()
	if err := c.ownNamespace(ctx); err != nil {
		t.Fatal(err)
	}
	dead := cluster.Holder{User: "ops", Host: "gone", Workspace: "/w", PID: 1, Run: "upgrade-1", Since: time.Now().UTC().Truncate(time.Second)}
	if err := c.writeLease(ctx, nil, dead); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	heir := dead
	heir.Host, heir.Run = "here", "upgrade-2"
	release, err := c.Hold(ctx, heir, func(err error) { t.Error(err) })
	if took := time.Since(began); err != nil || took < leaseDuration {
		t.Fatalf("after %v: %v", took, err)
	}
	// The lease is deleted: it is created again.
	if err := c.core.CoordinationV1().Leases(Namespace).Delete(ctx, consoleLease, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for limit := time.Now().Add(10 * time.Second); ; {
		if _, by, err := c.readLease(ctx); err == nil && by == heir {
			break
		}
		if time.Now().After(limit) {
			t.Fatal("the lease was not created again")
		}
		time.Sleep(leaseRenewal)
	}
	release()
	if _, by, err := c.readLease(ctx); err == nil {
		t.Errorf("not released: %+v", by)
	}
	// Cancellation ends the wait at once.
	if err := c.writeLease(ctx, nil, dead); err != nil {
		t.Fatal(err)
	}
	leaving, leave := context.WithCancel(ctx)
	leave()
	if _, err := c.Hold(leaving, heir, func(error) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("left: %v", err)
	}
}

// Hold requests are stored on the Node or on its ScalingGroup, where the operator reads them.
func TestHoldRequestsOnNodesAndGroups(t *testing.T) {
	c := start(t)
	ctx := t.Context()
	kinds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.ApplyKinds(ctx, kinds, func(string) {}); err != nil {
		t.Fatal(err)
	}
	until := time.Date(2026, 11, 22, 7, 0, 0, 0, time.UTC)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-3", Annotations: map[string]string{
		v1alpha1.AnnotationGroup: "sandboxes/demo/groups/Edge", v1alpha1.AnnotationPostponed: until.Format(time.RFC3339),
	}}}
	if _, err := c.core.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	group := &v1alpha1.ScalingGroup{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "ScalingGroup"}, ObjectMeta: metav1.ObjectMeta{Name: "group-edge"},
		Spec: v1alpha1.ScalingGroupSpec{GroupID: "sandboxes/demo/groups/edge", Role: v1alpha1.WorkerRole},
	}
	if _, err := c.dynamic.Resource(scalingGroups).Create(ctx, asUnstructured(t, group), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	is := func(name string, want cluster.SkipState) {
		t.Helper()
		got, err := c.SkipState(ctx, name)
		if d := cmp.Diff(want, got); err != nil || d != "" {
			t.Errorf("%s (-want +got):\n%s%v", name, d, err)
		}
	}
	set := func(h cluster.SkipState, held bool) {
		t.Helper()
		if err := c.SetSkipState(ctx, h, held); err != nil {
			t.Fatal(err)
		}
	}
	worker := cluster.SkipState{Name: "worker-3", Kind: cluster.SkipNode, Postponed: until}
	edge := cluster.SkipState{Name: "group-edge", Kind: cluster.SkipGroup}
	is("worker-3", worker)
	is("edge", edge)
	is("group-edge", edge)

	// IDs of another cloud contain no names: the ScalingGroup has it.
	node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-0", Annotations: map[string]string{v1alpha1.AnnotationGroup: "pools/7F2a"}}}
	if _, err := c.core.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	group.Name, group.Spec = "group-7", v1alpha1.ScalingGroupSpec{GroupID: "pools/7f2a", NodeGroupName: "gpu", Role: v1alpha1.WorkerRole}
	if _, err := c.dynamic.Resource(scalingGroups).Create(ctx, asUnstructured(t, group), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	is("gpu", cluster.SkipState{Name: "group-7", Kind: cluster.SkipGroup})
	nodes, err := c.Nodes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	in := map[string]string{}
	for _, n := range nodes {
		in[n.Name] = n.Group
	}
	if d := cmp.Diff(map[string]string{"worker-3": "Edge", "gpu-0": "gpu"}, in); d != "" {
		t.Errorf("groups of nodes (-want +got):\n%s", d)
	}
	set(worker, true)
	worker.Held = true
	is("worker-3", worker)
	set(worker, false)
	worker.Held, worker.Postponed = false, time.Time{}
	is("worker-3", worker)
	if n, err := c.core.CoreV1().Nodes().Get(ctx, "worker-3", metav1.GetOptions{}); err != nil || n.Annotations[v1alpha1.AnnotationRetry] == "" {
		t.Errorf("no retry requested from the operator: %v, %v", n.Annotations, err)
	}
	pending := &v1alpha1.PendingNode{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "PendingNode"}, ObjectMeta: metav1.ObjectMeta{Name: "replace-0"},
		Spec: v1alpha1.PendingNodeSpec{GroupID: "sandboxes/demo/groups/edge", ProviderID: "sandbox://demo/worker-3", NodeName: "worker-3", Goal: v1alpha1.UpgradeGoal},
	}
	made, err := c.dynamic.Resource(pendingNodes).Create(ctx, asUnstructured(t, pending), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	run := map[string]any{"version": "v1.36.3", "node": "worker-3", "phase": "failed"}
	if err := unstructured.SetNestedMap(made.Object, run, "status", "upgrade"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.dynamic.Resource(pendingNodes).UpdateStatus(ctx, made, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := c.SetNodeTarget(ctx, cluster.NodeTarget{Image: "sandboxes/demo/images/v1.1.0", ImageVersion: "v1.1.0", Components: "k8s-components-sha256-" + fmt.Sprintf("%064d", 1), Kubernetes: "v1.36.3"}); err != nil {
		t.Fatal(err)
	}
	worker.Failed = true
	is("worker-3", worker)
	set(edge, true)
	edge.Held, worker.By = true, "group-edge"
	is("edge", edge)
	is("worker-3", worker)
	set(edge, false)
	edge.Held, worker.By = false, ""
	is("edge", edge)
	is("worker-3", worker)
	if h, err := c.SkipState(ctx, "nobody"); !errors.Is(err, cluster.ErrAbsent) {
		t.Errorf("%+v, %v", h, err)
	}
}

// The Node of a revoked machine can be deleted, though its kubelet had set finalizers before
// the admission policies came.
func TestRevokedNodeKeepsNoFinalizers(t *testing.T) {
	c := start(t)
	ctx := t.Context()
	kinds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.ApplyKinds(ctx, kinds, func(string) {}); err != nil {
		t.Fatal(err)
	}
	nodes := c.core.CoreV1().Nodes()
	for _, name := range []string{"worker-1", "worker-2"} {
		if _, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{"example.com/stays"}}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := nodes.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := c.RemoveMachine(ctx, "worker-1", revocation.Entry{ProviderID: "sandbox://demo/worker-1", By: "ops@laptop"}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := nodes.Get(ctx, "worker-1", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the Node of the revoked machine: %v", err)
	}
	if n, err := nodes.Get(ctx, "worker-2", metav1.GetOptions{}); err != nil || len(n.Finalizers) != 1 {
		t.Errorf("the Node of another machine: %v", err)
	}
}
