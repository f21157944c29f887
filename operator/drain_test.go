package operator

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilwait "k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/internal/syncbuffer"
)

// workshop is a real control plane with controllers and scheduler, and two kubemark-style hollow
// nodes. Their pods report that they run, and end when they are deleted.
type workshop struct {
	*cluster
	client kubernetes.Interface
}

func newWorkshop(t *testing.T, setup ...controlplanetest.Setup) *workshop {
	t.Helper()
	cp := controlplanetest.Lend(t, controlplane.Options{Controllers: true}, setup...)
	cfg := cp.Config()
	cfg.QPS, cfg.Burst = 200, 400
	c, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &workshop{&cluster{t: t, cp: cp}, c}
	for _, name := range []string{"n1", "n2"} {
		n, err := c.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourcePods: resource.MustParse("100"), corev1.ResourceCPU: resource.MustParse("8"), corev1.ResourceMemory: resource.MustParse("8Gi")}
		n.Status.Capacity = n.Status.Allocatable
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		n.ResourceVersion = "" // controllers may have changed the Node meanwhile
		if _, err := c.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { utilwait.UntilWithContext(ctx, w.kubelets, 100*time.Millisecond) })
	w.eventually("scheduler takes the nodes for usable", func() (string, bool) {
		l, err := c.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err.Error(), false
		}
		for _, n := range l.Items {
			if len(n.Spec.Taints) > 0 {
				return fmt.Sprint(n.Name, n.Spec.Taints), false
			}
		}
		return "", true
	})
	return w
}

// kubelets does the current work of the kubelets of all nodes. It retries while the API server is
// unavailable.
func (w *workshop) kubelets(ctx context.Context) {
	for _, name := range []string{"n1", "n2"} {
		l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "kube-node-lease"}, Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &name, LeaseDurationSeconds: ptr(int32(40)), RenewTime: ptr(metav1.NowMicro()),
		}}
		if _, err := w.client.CoordinationV1().Leases(l.Namespace).Update(ctx, l, metav1.UpdateOptions{}); err != nil {
			w.client.CoordinationV1().Leases(l.Namespace).Create(ctx, l, metav1.CreateOptions{})
		}
	}
	pods, err := w.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return
	}
	for _, p := range pods.Items {
		switch {
		case p.Spec.NodeName == "":
		case p.DeletionTimestamp != nil && (p.DeletionGracePeriodSeconds == nil || *p.DeletionGracePeriodSeconds > 0):
			w.client.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr(int64(0)), Preconditions: metav1.NewUIDPreconditions(string(p.UID))})
		case p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodPending:
			p.Status.Phase = corev1.PodRunning
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue})
			w.client.CoreV1().Pods(p.Namespace).UpdateStatus(ctx, &p, metav1.UpdateOptions{})
		}
	}
}

// on returns names of pods of a namespace on a node that are ready and do not end.
func (w *workshop) on(ns, node string) []string {
	w.t.Helper()
	l, err := w.client.CoreV1().Pods(ns).List(w.t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return []string{err.Error()}
	}
	var names []string
	for _, p := range l.Items {
		if p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning {
			names = append(names, p.Name)
		}
	}
	return names
}

func (w *workshop) cordon(node string, yes bool) {
	w.t.Helper()
	patch := fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, yes)
	if _, err := w.client.CoreV1().Nodes().Patch(w.t.Context(), node, "application/merge-patch+json", patch, metav1.PatchOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func podSpec(change func(*corev1.PodSpec)) corev1.PodSpec {
	s := corev1.PodSpec{
		TerminationGracePeriodSeconds: ptr(int64(1)),
		Containers:                    []corev1.Container{{Name: "app", Image: "registry.example/app:v1"}},
	}
	if change != nil {
		change(&s)
	}
	return s
}

func (w *workshop) deployment(ns, name string, replicas int32, change func(*corev1.PodSpec)) {
	w.t.Helper()
	labels := map[string]string{"app": name}
	must[*appsv1.Deployment](w.t)(w.client.AppsV1().Deployments(ns).Create(w.t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: podSpec(change)},
		},
	}, metav1.CreateOptions{}))
}

func (w *workshop) budget(ns, name, app string) {
	w.t.Helper()
	one := intstr.FromInt32(1)
	must[*policyv1.PodDisruptionBudget](w.t)(w.client.PolicyV1().PodDisruptionBudgets(ns).Create(w.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &one, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
	}, metav1.CreateOptions{}))
	w.eventually("the budget counts", func() (string, bool) {
		b := must[*policyv1.PodDisruptionBudget](w.t)(w.client.PolicyV1().PodDisruptionBudgets(ns).Get(w.t.Context(), name, metav1.GetOptions{}))
		return fmt.Sprint(b.Status), b.Status.ObservedGeneration == b.Generation && b.Status.CurrentHealthy > 0
	})
}

func (w *workshop) pod(ns, name, node string, change func(*corev1.Pod)) {
	w.t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: podSpec(func(s *corev1.PodSpec) { s.NodeName = node })}
	if change != nil {
		change(p)
	}
	must[*corev1.Pod](w.t)(w.client.CoreV1().Pods(ns).Create(w.t.Context(), p, metav1.CreateOptions{}))
}

func (w *workshop) runs(ns, node string, n int) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("%d pods run on %s", n, node), func() (string, bool) {
		names := w.on(ns, node)
		return fmt.Sprint(names), len(names) == n
	})
}

func TestDrain(t *testing.T) {
	onN1 := func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{corev1.LabelHostname: "n1"} }
	w := newWorkshop(t)
	for _, tt := range []struct {
		name    string
		prepare func(w *workshop, ns string) // makes what n1 is drained of, before the cordon
		blocker string                       // "": none; ~ stands for the namespace
		free    func(w *workshop, ns string)
		stay    int // pods that run on n1 when it is drained
	}{
		{name: "a node with nothing on it is drained", prepare: func(*workshop, string) {}},
		{
			name: "the drain waits for a disruption budget",
			prepare: func(w *workshop, ns string) {
				w.deployment(ns, "web", 1, onN1)
				w.runs(ns, "n1", 1)
				w.budget(ns, "web-stays", "web")
			},
			blocker: "the disruption budget web-stays needs 1 healthy pods and has 1 currently",
			free: func(w *workshop, ns string) {
				patch := `{"spec":{"replicas":2,"template":{"spec":{"nodeSelector":null}}}}`
				must[*appsv1.Deployment](w.t)(w.client.AppsV1().Deployments(ns).Patch(w.t.Context(), "web", "application/merge-patch+json", []byte(patch), metav1.PatchOptions{}))
			},
		},
		{
			name: "a pod with two budgets is named as the blocker",
			prepare: func(w *workshop, ns string) {
				w.deployment(ns, "web", 1, onN1)
				w.runs(ns, "n1", 1)
				w.budget(ns, "one", "web")
				w.budget(ns, "two", "web")
				must[*policyv1.PodDisruptionBudget](w.t)(w.client.PolicyV1().PodDisruptionBudgets(ns).Create(w.t.Context(), &policyv1.PodDisruptionBudget{
					ObjectMeta: metav1.ObjectMeta{Name: "of-another"},
					Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "db"}}},
				}, metav1.CreateOptions{}))
			},
			blocker: "the PodDisruptionBudgets one and two select it, and a pod with more than one is never evicted; change them so that one selects it",
			free: func(w *workshop, ns string) {
				for _, b := range []string{"one", "two"} {
					if err := w.client.PolicyV1().PodDisruptionBudgets(ns).Delete(w.t.Context(), b, metav1.DeleteOptions{}); err != nil {
						w.t.Fatal(err)
					}
				}
			},
		},
		{
			name: "pods without a controller and pods with emptyDir data are evicted",
			prepare: func(w *workshop, ns string) {
				w.pod(ns, "lone", "n1", func(p *corev1.Pod) {
					p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
				})
				w.runs(ns, "n1", 1)
			},
		},
		{
			name: "a pod with a finalizer is named as the blocker",
			prepare: func(w *workshop, ns string) {
				w.pod(ns, "held", "n1", func(p *corev1.Pod) { p.Finalizers = []string{"example.com/hold"} })
				w.runs(ns, "n1", 1)
			},
			blocker: "pod ~/held was evicted, but its finalizer example.com/hold prevents its deletion",
			free: func(w *workshop, ns string) {
				must[*corev1.Pod](w.t)(w.client.CoreV1().Pods(ns).Patch(w.t.Context(), "held", "application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}))
			},
		},
		{
			name: "pods of DaemonSets and mirror pods stay",
			prepare: func(w *workshop, ns string) {
				labels := map[string]string{"app": "agent"}
				must[*appsv1.DaemonSet](w.t)(w.client.AppsV1().DaemonSets(ns).Create(w.t.Context(), &appsv1.DaemonSet{
					ObjectMeta: metav1.ObjectMeta{Name: "agent"},
					Spec: appsv1.DaemonSetSpec{
						Selector: &metav1.LabelSelector{MatchLabels: labels},
						Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: podSpec(nil)},
					},
				}, metav1.CreateOptions{}))
				w.pod(ns, "static", "n1", func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} })
				w.pod(ns, "lone", "n1", nil)
				w.runs(ns, "n1", 3)
			},
			stay: 2,
		},
		{
			name: "a pod that tolerates the cordon and comes back does not block",
			prepare: func(w *workshop, ns string) {
				w.deployment(ns, "sticky", 1, func(s *corev1.PodSpec) {
					onN1(s)
					s.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
				})
				w.runs(ns, "n1", 1)
			},
			stay: 1,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := &workshop{&cluster{t: t, cp: w.cp}, w.client}
			ns := must[*corev1.Namespace](t)(w.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "drain-"}}, metav1.CreateOptions{})).Name
			t.Cleanup(func() { w.clear(ns) })
			tt.prepare(w, ns)
			w.cordon("n1", true)
			defer w.cordon("n1", false)
			before := w.uids(ns, "n1")
			var woken atomic.Int64
			d := newDrainer(w.client, func() { woken.Add(1) }, slog.New(slog.DiscardHandler))
			defer d.close()
			d.drain("n1")
			if want := strings.ReplaceAll(tt.blocker, "~", ns); want != "" {
				w.eventually("the blocker is named", func() (string, bool) {
					drained, b := d.state("n1")
					return fmt.Sprint(drained, b), !drained && strings.HasPrefix(b, "pod "+ns+"/") && strings.HasSuffix(b, want)
				})
				if woken.Load() == 0 {
					t.Error("no round was started for the blocker")
				}
				n := woken.Load()
				tt.free(w, ns)
				defer func() {
					if woken.Load() == n {
						t.Error("no round was started at the end")
					}
				}()
			}
			w.eventually("the node is drained", func() (string, bool) {
				drained, b := d.state("n1")
				return fmt.Sprint(drained, b, w.on(ns, "n1")), drained && b == ""
			})
			w.runs(ns, "n1", tt.stay)
			if tt.name == "a pod that tolerates the cordon and comes back does not block" {
				for uid := range w.uids(ns, "n1") {
					if before[uid] {
						t.Error("the pod was not evicted even once")
					}
				}
			}
			d.keep(nil)
			if drained, b := d.state("n1"); drained || b != "" {
				t.Errorf("forgotten node is %t, %q", drained, b)
			}
		})
	}
}

func (w *workshop) uids(ns, node string) map[string]bool {
	w.t.Helper()
	all := map[string]bool{}
	for _, p := range must[*corev1.PodList](w.t)(w.client.CoreV1().Pods(ns).List(w.t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})).Items {
		all[string(p.UID)] = true
	}
	return all
}

// clear deletes all objects of a case.
func (w *workshop) clear(ns string) {
	ctx := context.Background()
	w.client.CoreV1().Namespaces().Delete(ctx, ns, metav1.DeleteOptions{})
	w.client.AppsV1().DaemonSets(ns).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	w.client.AppsV1().Deployments(ns).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	w.eventually("the case is cleared", func() (string, bool) {
		l, err := w.client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		return fmt.Sprint(err), err == nil && len(l.Items) == 0
	})
}

func TestDrainOutlivesTheAPIServer(t *testing.T) {
	w := newWorkshop(t)
	w.deployment("default", "web", 1, func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{corev1.LabelHostname: "n1"} })
	w.runs("default", "n1", 1)
	w.budget("default", "web", "web")
	w.cordon("n1", true)
	var log syncbuffer.Buffer
	d := newDrainer(w.client, func() {}, slog.New(slog.NewTextHandler(&log, nil)))
	defer d.close()
	d.drain("n1")
	w.eventually("the budget refuses", func() (string, bool) {
		_, b := d.state("n1")
		return b, strings.Contains(b, "disruption budget web")
	})
	w.cp.StopAPIServer()
	w.eventually("the drain logs that the API server is unavailable", func() (string, bool) {
		return log.String(), strings.Contains(log.String(), "will retry")
	})
	if drained, _ := d.state("n1"); drained {
		t.Error("a node is reported as drained while its pods cannot be listed")
	}
	if err := w.cp.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.client.PolicyV1().PodDisruptionBudgets("default").Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.eventually("the node is drained", func() (string, bool) {
		drained, b := d.state("n1")
		return b, drained
	})
}
