package operator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/api/upgradev1"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
	"constellation/operator/nodelock"
	"constellation/operator/plans"
)

func TestNotesOfPlansExpire(t *testing.T) {
	begin := time.Date(2026, 11, 28, 9, 0, 0, 0, time.UTC)
	now := begin
	r := &nodeVersions{now: func() time.Time { return now }}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{nodelock.AnnotationWaits: nodelock.Note("ns/os", begin.Add(-time.Hour))}}}
	check := func(what, plan string, lent bool) {
		t.Helper()
		if p, l := r.planOf(n); p != plan || l != lent {
			t.Errorf("%s: Plan %q, lent %t; want %q, %t", what, p, l, plan, lent)
		}
	}
	check("a note by a clock that is an hour off", "ns/os", false)
	now = begin.Add(nodelock.NoteExpiry + time.Second)
	check("a note that is not renewed", "", false)
	n.Annotations[nodelock.AnnotationWaits] = nodelock.Note("ns/os", now)
	check("a note that is renewed", "ns/os", false)
	n.Annotations[nodelock.AnnotationLent] = nodelock.Note("ns/other", now)
	check("a node that is lent to another Plan", "ns/os", false)
	n.Annotations[nodelock.AnnotationLent] = nodelock.Note("ns/os", now)
	check("a node that is lent", "ns/os", true)
	for range 61 {
		now = now.Add(time.Minute)
		n.Annotations[nodelock.AnnotationWaits] = nodelock.Note("ns/os", now)
		r.planOf(n)
	}
	check("a node that is lent for more than an hour", "", false)
}

// carryOutPlans runs the controller of Plans in a namespace of its own until the test ends, and returns a client that knows Plans.
func (r *rolling) carryOutPlans(ns string) client.Client {
	r.t.Helper()
	r.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), upgradev1.AddToScheme(scheme)); err != nil {
		r.t.Fatal(err)
	}
	admin, err := client.New(r.cp.Config(), client.Options{Scheme: scheme})
	if err != nil {
		r.t.Fatal(err)
	}
	settings := plans.DefaultSettings()
	settings.Privileged = false // this API server does not admit privileged pods
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- plans.Run(ctx, plans.Config{Cluster: r.cp.Config(), Name: "plans", Namespace: ns, Settings: settings})
	}()
	r.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			r.t.Error(err)
		}
	})
	return admin
}

// sharesDrains: a Plan waits for the node lock, which an upgrade in place holds. Its Job runs on each worker after the
// agent and before the node is uncordoned, so pods are moved once. On the last worker it fails, and the node stays
// cordoned. The operator is killed before and after each effect.
func sharesDrains(t *testing.T, r *rolling) { sharing(t, r, "shares", false) }

// givesWay is the same, but the Plan holds the lock first. It gives the lock to the operator after its first node, and
// shares the drains of the others.
func givesWay(t *testing.T, r *rolling) { sharing(t, r, "gives-way", true) }

func sharing(t *testing.T, r *rolling, ns string, planFirst bool) {
	const name = "os"
	plan := ns + "/" + name
	admin := r.carryOutPlans(ns)
	// An earlier holder would keep the lock for a minute.
	if err := client.IgnoreNotFound(admin.Delete(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: nodelock.Namespace, Name: nodelock.Name}})); err != nil {
		t.Fatal(err)
	}
	var workers []string
	var nodes corev1.NodeList
	if err := admin.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"kubernetes.io/hostname":"`+n.Name+`"}}}`))
		if err := admin.Patch(t.Context(), &n, patch); err != nil {
			t.Fatal(err)
		}
		if roleOf(&n) == v1alpha1.WorkerRole {
			workers = append(workers, n.Name)
			r.pod("stays-on-"+n.Name, n.Name, "example.com/test") // no drain is complete before the test permits it
		}
	}
	node := func(name string) (n corev1.Node) {
		t.Helper()
		if err := admin.Get(t.Context(), client.ObjectKey{Name: name}, &n); err != nil {
			t.Fatal(err)
		}
		return n
	}

	jobOn := func(worker string) (job *batchv1.Job) {
		t.Helper()
		r.eventually("the Plan's Job runs on "+worker, func() (string, bool) {
			var jobs batchv1.JobList
			err := admin.List(t.Context(), &jobs, client.InNamespace(ns))
			for i := range jobs.Items {
				if j := &jobs.Items[i]; worker == "" || j.Labels[upgradev1.LabelNode] == worker {
					job = j
				}
			}
			return fmt.Sprint(err), job != nil
		})
		return job
	}
	end := func(job *batchv1.Job, well bool) {
		t.Helper()
		now := metav1.Now()
		job.Status = batchv1.JobStatus{StartTime: &now, CompletionTime: &now, Succeeded: 1, Conditions: []batchv1.JobCondition{
			{Type: batchv1.JobSuccessCriteriaMet, Status: corev1.ConditionTrue, Reason: batchv1.JobReasonCompletionsReached, LastTransitionTime: now},
			{Type: batchv1.JobComplete, Status: corev1.ConditionTrue, Reason: batchv1.JobReasonCompletionsReached, LastTransitionTime: now},
		}}
		if !well {
			job.Status = batchv1.JobStatus{StartTime: &now, Failed: 1, Conditions: []batchv1.JobCondition{
				{Type: batchv1.JobFailureTarget, Status: corev1.ConditionTrue, Reason: batchv1.JobReasonBackoffLimitExceeded, LastTransitionTime: now},
				{Type: batchv1.JobFailed, Status: corev1.ConditionTrue, Reason: batchv1.JobReasonBackoffLimitExceeded, LastTransitionTime: now},
			}}
		}
		if err := admin.Status().Update(t.Context(), job); err != nil {
			t.Fatal(err)
		}
	}

	r.agents = &agentsInTest{cloudInTest: r.cloud, runs: map[string]decision.UpgradeRun{}, fails: map[string]int{}, active: map[string]int{}}
	r.crashes = true
	begin := func() {
		t.Helper()
		r.eventually("the Plan is accepted", func() (string, bool) {
			err := admin.Create(t.Context(), &upgradev1.Plan{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: upgradev1.PlanSpec{
				Concurrency: 1, Version: "v1", Upgrade: &upgradev1.ContainerSpec{Image: "i"}, Drain: &upgradev1.DrainSpec{}, Constellation: &upgradev1.Rollout{Alone: true},
				NodeSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "node-role.kubernetes.io/control-plane", Operator: metav1.LabelSelectorOpDoesNotExist}}},
			}})
			return fmt.Sprint(err), err == nil
		})
	}
	r.operate()
	r.inPlace(rolloutGroupW)
	alone := ""
	if planFirst {
		begin()
		job := jobOn("")
		alone = job.Labels[upgradev1.LabelNode]
		r.edit(toNew)
		r.eventually("the operator waits for the Plan", func() (string, bool) {
			var nv v1alpha1.NodeVersion
			r.get(v1alpha1.NodeVersionName, &nv)
			return fmt.Sprintf("%+v", nv.Status.Waiting), nv.Status.Waiting != nil && nv.Status.Waiting.Reason == "NodesTaken"
		})
		lease := func() (l coordinationv1.Lease) {
			t.Helper()
			if err := admin.Get(t.Context(), client.ObjectKey{Namespace: nodelock.Namespace, Name: nodelock.Name}, &l); err != nil {
				t.Fatal(err)
			}
			return l
		}
		r.eventually("the Plan has renewed the Lease since, so it knows that the operator waits", func() (string, bool) {
			l := lease()
			at, err := time.Parse(time.RFC3339Nano, l.Annotations["constellation.edgeless.systems/replacements-wait"])
			return fmt.Sprint(err, l.Annotations, l.Spec.RenewTime), err == nil && l.Spec.RenewTime.After(at)
		})
		end(job, true)
		r.eventually("the Plan gives way", func() (string, bool) {
			holder := *lease().Spec.HolderIdentity
			return holder, holder == nodelock.Replacements
		})
	} else {
		r.edit(toNew)
	}
	release := func(worker string) {
		t.Helper()
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "stays-on-" + worker}}
		if err := client.IgnoreNotFound(admin.Patch(t.Context(), pod, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))); err != nil {
			t.Fatal(err)
		}
	}
	begun := map[string]bool{}
	next := func() (name string) {
		t.Helper()
		r.eventually("the next worker is cordoned", func() (string, bool) {
			for _, w := range workers {
				if n := node(w); !begun[w] && n.Spec.Unschedulable && n.Annotations[v1alpha1.AnnotationCordoned] != "" {
					begun[w], name = true, w
					return "", true
				}
			}
			return "none", false
		})
		return name
	}
	first := next()
	if !planFirst {
		begin()
	}
	for i, worker := 0, first; ; i, worker = i+1, next() {
		last := i == len(workers)-1
		if worker == alone { // the Plan has upgraded it already
			release(worker)
			r.eventually("the operator releases "+worker, func() (string, bool) {
				n := node(worker)
				return fmt.Sprint(n.Annotations), n.Annotations[v1alpha1.AnnotationCordoned] == "" && !n.Spec.Unschedulable && n.Annotations[v1alpha1.AnnotationComponents] == refB
			})
			if last {
				break
			}
			continue
		}
		r.eventually("the Plan waits for "+worker, func() (string, bool) {
			n := node(worker)
			waits, _ := nodelock.ParseNote(n.Annotations[nodelock.AnnotationWaits])
			return fmt.Sprint(n.Annotations), waits == plan
		})
		release(worker)
		job := jobOn(worker)
		n := node(worker)
		lent, _ := nodelock.ParseNote(n.Annotations[nodelock.AnnotationLent])
		if !n.Spec.Unschedulable || n.Annotations[v1alpha1.AnnotationComponents] != refB || n.Status.NodeInfo.KubeletVersion != newKubernetes || lent != plan {
			t.Errorf("the Job began on %s with %v, kubelet %s, unschedulable %t", worker, n.Annotations, n.Status.NodeInfo.KubeletVersion, n.Spec.Unschedulable)
		}
		for _, w := range workers {
			if n := node(w); !begun[w] && n.Spec.Unschedulable {
				t.Errorf("%s is cordoned while the Plan upgrades %s", w, worker)
			}
		}
		end(job, !last)
		r.eventually("the operator releases "+worker, func() (string, bool) {
			n := node(worker)
			notes := maps.Clone(n.Annotations)
			_, cordoned := notes[v1alpha1.AnnotationCordoned]
			return fmt.Sprint(n.Spec.Unschedulable, notes), !cordoned && n.Spec.Unschedulable == last && notes[nodelock.AnnotationWaits] == "" && notes[nodelock.AnnotationLent] == "" &&
				(notes[nodelock.AnnotationCordonedForPlan] == plan) == last && (n.Labels[upgradev1.LabelOfPlan(name)] == "") == last
		})
		if last {
			break
		}
	}
	for _, point := range []string{"before:lend to plan", "after:lend to plan"} {
		if !r.crashed[point] {
			t.Errorf("no operator was killed %s", point)
		}
	}
	r.eventually("the rollout is complete", func() (string, bool) {
		var nv v1alpha1.NodeVersion
		r.get(v1alpha1.NodeVersionName, &nv)
		is := conditionText(nv.Status, v1alpha1.ConditionReady)
		return is, is == "True UpToDate"
	})
}
