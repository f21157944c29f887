package operator

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/internal/gitopstest"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// healthWatch records how Flux and Argo CD see the objects of a kind over time.
type healthWatch struct {
	mu   sync.Mutex
	seen map[string][]string // by object and its goal, without repetitions
}

// watchHealth starts a healthWatch, which ends with the test.
func (r *rolling) watchHealth(resource string) *healthWatch {
	r.t.Helper()
	objects, err := dynamic.NewForConfig(r.cp.Config())
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w, err := objects.Resource(v1alpha1.GroupVersion.WithResource(resource)).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		cancel()
		r.t.Fatal(err)
	}
	h, done := &healthWatch{seen: map[string][]string{}}, make(chan struct{})
	r.t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		for e := range w.ResultChan() {
			o, ok := e.Object.(*unstructured.Unstructured)
			if !ok || e.Type == "DELETED" {
				continue
			}
			goal, _, _ := unstructured.NestedString(o.Object, "spec", "goal")
			argo, _ := gitopstest.Argo(r.t, "../docs/gitops/health.lua", o.Object)
			h.mu.Lock()
			key, now := cmp.Or(goal, o.GetName()), gitopstest.Kstatus(r.t, o.Object)+"/"+argo
			if all := h.seen[key]; len(all) == 0 || all[len(all)-1] != now {
				h.seen[key] = append(all, now)
			}
			h.mu.Unlock()
		}
	}()
	return h
}

// sees waits until an object is seen so.
func (r *rolling) sees(h *healthWatch, key, want string) {
	r.t.Helper()
	r.within(time.Minute, key+" is "+want, func() (string, bool) {
		h.mu.Lock()
		defer h.mu.Unlock()
		all := h.seen[key]
		return fmt.Sprint(all), len(all) > 0 && all[len(all)-1] == want
	})
}

// genericToolsFollow follows NodeVersion and PendingNodes on the API server through a rollout: the control
// plane is replaced, and the drain of the worker, which is upgraded in place, is blocked for a while.
func genericToolsFollow(t *testing.T, r *rolling) {
	const working, stuck, done = "InProgress/Progressing", "Failed/Degraded", "Current/Healthy"
	r.agents = &agentsInTest{cloudInTest: r.cloud, runs: map[string]decision.UpgradeRun{}, fails: map[string]int{}, active: map[string]int{}}
	version, pending := r.watchHealth("nodeversions"), r.watchHealth("pendingnodes")
	r.sees(version, v1alpha1.NodeVersionName, working) // no operator has seen it
	r.operate()
	r.inPlace(rolloutGroupW)
	r.sees(version, v1alpha1.NodeVersionName, done)

	r.pod("db", "w-2")
	var db corev1.Pod
	if err := r.admin.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "db"}, &db); err != nil {
		t.Fatal(err)
	}
	db.Status.Phase, db.Status.Conditions = corev1.PodRunning, []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	if err := r.admin.Status().Update(t.Context(), &db); err != nil {
		t.Fatal(err)
	}
	// No controller reports the budget's status, so every eviction is refused.
	r.create(&policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "default"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{}},
	})
	r.edit(toNew)
	r.sees(version, v1alpha1.NodeVersionName, working)
	blocked := func() (string, bool) {
		var nv v1alpha1.NodeVersion
		r.get(v1alpha1.NodeVersionName, &nv)
		return fmt.Sprintf("%+v", nv.Status.Waiting), nv.Status.Waiting != nil && nv.Status.Waiting.Reason == "DrainBlocked"
	}
	r.within(time.Minute, "the drain of the worker is blocked", blocked)
	r.sees(pending, "Upgrade", working) // evictions are refused for a moment in most rollouts
	r.pass(2 * decision.StallGrace)
	r.sees(version, v1alpha1.NodeVersionName, stuck)
	r.sees(pending, "Upgrade", stuck)
	if err := r.admin.Delete(t.Context(), &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "default"}}); err != nil {
		t.Fatal(err)
	}
	r.sees(version, v1alpha1.NodeVersionName, done)
	var nodes corev1.NodeList
	if err := r.admin.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		if len(nodes.Items) != 2 || n.Annotations[v1alpha1.AnnotationComponents] != refB {
			t.Errorf("NodeVersion is current with %d nodes; %s has %s", len(nodes.Items), n.Name, n.Annotations[v1alpha1.AnnotationComponents])
		}
	}
	r.within(20*time.Second, "no PendingNode is left", func() (string, bool) {
		var l v1alpha1.PendingNodeList
		err := r.admin.List(t.Context(), &l)
		return fmt.Sprint(len(l.Items), err), err == nil && len(l.Items) == 0
	})
	version.mu.Lock()
	defer version.mu.Unlock()
	pending.mu.Lock()
	defer pending.mu.Unlock()
	// The stall ends before the rollout is done.
	if all := version.seen[v1alpha1.NodeVersionName]; !slices.Equal(all[len(all)-3:], []string{stuck, working, done}) {
		t.Errorf("NodeVersion was %q", all)
	}
	if all := pending.seen["Join"]; !slices.Equal(all, []string{working, done}) {
		t.Errorf("the PendingNode of the new control plane was %q", all)
	}
	if all := pending.seen["Leave"]; !slices.Equal(all, []string{working}) {
		t.Errorf("the PendingNode of the old control plane was %q", all)
	}
	if all := pending.seen["Upgrade"]; !slices.Equal(all[:2], []string{working, stuck}) || all[len(all)-1] != working && all[len(all)-1] != stuck {
		t.Errorf("the PendingNode of the worker was %q", all)
	}
}

// TestLastingWait checks which waits have lasted for a minute when they are absent in some rounds.
func TestLastingWait(t *testing.T) {
	drain := decision.Wait{Reason: "DrainBlocked", Object: decision.NodeReference("w-1")}
	for _, tt := range []struct {
		name  string
		gap   time.Duration // between the rounds with the wait, of which the middle one has none
		lasts bool
	}{
		{name: "a drain that began again", gap: time.Second, lasts: true},
		{name: "the longest gap", gap: waitGap - 1, lasts: true},
		{name: "ended, and began again", gap: waitGap},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now := time.Date(2026, 11, 27, 8, 0, 0, 0, time.UTC)
			r := &nodeVersions{now: func() time.Time { return now }}
			round := func(after time.Duration, waits ...decision.Wait) bool {
				now = now.Add(after)
				return slices.Contains(r.lasting(waits), drain)
			}
			if round(0, drain) || round(decision.StallGrace-1, drain) {
				t.Error("it lasts before the grace is over")
			}
			if !round(1, drain) {
				t.Error("it does not last after the grace")
			}
			if round(1) {
				t.Error("it lasts while it is absent")
			}
			if got := round(tt.gap, drain); got != tt.lasts {
				t.Errorf("it lasts %t after a gap, want %t", got, tt.lasts)
			}
			if round(waitGap); len(r.waiting) != 1 {
				t.Errorf("%d waits are known at the beginning of a gap", len(r.waiting))
			}
			if round(waitGap); len(r.waiting) != 0 {
				t.Errorf("%d waits are known after a gap", len(r.waiting))
			}
		})
	}
}
