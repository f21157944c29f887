package operator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

func TestAutoscalerArgs(t *testing.T) {
	group := func(role v1alpha1.Role, scaled bool, name string, least, most int32) v1alpha1.ScalingGroup {
		return v1alpha1.ScalingGroup{Spec: v1alpha1.ScalingGroupSpec{Role: role, Autoscaling: scaled, AutoscalerGroupName: name, Min: least, Max: most}}
	}
	for _, tt := range []struct {
		name   string
		extra  map[string]string
		groups []v1alpha1.ScalingGroup
		want   []string
	}{
		{name: "no groups and no extra arguments", want: nil},
		{name: "extra arguments are sorted", extra: map[string]string{"v": "2", "logtostderr": "true", "cloud-provider": "x"}, want: []string{"--cloud-provider=x", "--logtostderr=true", "--v=2"}},
		{
			name:  "only groups of workers with autoscaling have an argument",
			extra: map[string]string{"v": "2", "balance": "true"},
			groups: []v1alpha1.ScalingGroup{
				group(v1alpha1.WorkerRole, true, "pool-b", 2, 7),
				group(v1alpha1.WorkerRole, false, "pool-c", 1, 3),
				group(v1alpha1.ControlPlaneRole, true, "cp", 1, 3),
				group(v1alpha1.WorkerRole, true, "", 1, 3),
				group(v1alpha1.WorkerRole, true, "pool-a", 0, 10),
			},
			want: []string{"--balance=true", "--nodes=0:10:pool-a", "--nodes=2:7:pool-b", "--v=2"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := autoscalerArgs(tt.extra, tt.groups); !slices.Equal(got, tt.want) {
				t.Errorf("arguments %q, want %q", got, tt.want)
			}
		})
	}
}

// scaled runs the controller with the rights of the chart.
func (c *cluster) scaled() *autoscaling {
	c.t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		c.t.Fatal(err)
	}
	mgr, err := manager.New(c.access(), manager.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: ptr(true)},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	r := newAutoscaling(mgr.GetClient(), mgr.GetAPIReader(), slog.New(slog.DiscardHandler))
	if err := r.setup(mgr); err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	c.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			c.t.Error(err)
		}
	})
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		c.t.Fatal("no cache")
	}
	return r
}

const scalerName = "constellation-cluster-autoscaler"

func (c *cluster) scaler() *appsv1.Deployment {
	c.t.Helper()
	var d appsv1.Deployment
	if err := c.admin.Get(c.t.Context(), client.ObjectKey{Namespace: "kube-system", Name: scalerName}, &d); err != nil {
		c.t.Fatal(err)
	}
	return &d
}

func (c *cluster) theStrategy() *v1alpha1.AutoscalingStrategy {
	c.t.Helper()
	var s v1alpha1.AutoscalingStrategy
	if !c.get(v1alpha1.AutoscalingStrategyName, &s) {
		c.t.Fatal("no AutoscalingStrategy")
	}
	return &s
}

func (c *cluster) observes(r *autoscaling, want decision.Autoscaler) {
	c.t.Helper()
	c.eventually(fmt.Sprintf("the autoscaler is %+v", want), func() (string, bool) {
		got, err := r.observe(c.t.Context())
		return fmt.Sprintf("%+v, %v", got, err), err == nil && got == want
	})
}

// says waits for conditions of the strategy: pairs of type and reason.
func (c *cluster) says(want ...string) {
	c.t.Helper()
	c.eventually(fmt.Sprint("conditions of the AutoscalingStrategy: ", want), func() (string, bool) {
		s := c.theStrategy()
		var is []string
		for _, k := range s.Status.Conditions {
			is = append(is, fmt.Sprintf("%s=%s %s", k.Type, k.Status, k.Reason))
		}
		return fmt.Sprint(is), s.Status.ObservedGeneration == s.Generation && slices.Equal(is, want)
	})
}

func TestAutoscalerIsPausedAndResumed(t *testing.T) {
	c := newCluster(t) // its chart brings the stand-in
	c.create(newStrategy())
	c.create(&v1alpha1.ScalingGroup{
		ObjectMeta: metav1.ObjectMeta{Name: "workers"},
		Spec:       v1alpha1.ScalingGroupSpec{GroupID: workerGroup, AutoscalerGroupName: "w", Role: v1alpha1.WorkerRole, Autoscaling: true, Min: 1, Max: 4},
	})
	if d := c.scaler(); d.Labels["constellation.edgeless.systems/stand-in"] != "true" || !strings.HasSuffix(d.Spec.Template.Spec.Containers[0].Name, "stand-in") {
		t.Fatalf("the stand-in does not log its start: %v, %s", d.Labels, d.Spec.Template.Spec.Containers[0].Name)
	}
	r := c.scaled()
	c.observes(r, decision.Autoscaler{Enabled: true, Running: true})
	c.says("Stalled=False DeploymentFound", "Reconciling=False Runs")
	args := []string{"--logtostderr=true", "--namespace=kube-system", "--nodes=1:4:w", "--stderrthreshold=info", "--v=2"}
	c.eventually("the Deployment has its arguments", func() (string, bool) {
		d := c.scaler()
		return fmt.Sprint(d.Spec.Template.Spec.Containers[0].Args), *d.Spec.Replicas == 1 && slices.Equal(d.Spec.Template.Spec.Containers[0].Args, args)
	})
	if cmd := c.scaler().Spec.Template.Spec.Containers[0].Command; !slices.Equal(cmd, []string{"/usr/local/bin/operator", "--role=autoscaler-stand-in"}) {
		t.Errorf("the command was changed to %q", cmd)
	}

	// A pod of it still runs; there is no controller here that would end it.
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "scaler", Labels: c.scaler().Spec.Template.Labels},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example/c:v1"}}, ServiceAccountName: "default"},
	}
	c.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "default"}})
	c.create(p)
	for range 2 { // pausing is idempotent
		c.eventually("it is paused", func() (string, bool) { err := r.pause(t.Context()); return fmt.Sprint(err), err == nil })
	}
	c.eventually("the Deployment requests no replicas", func() (string, bool) { d := c.scaler(); return fmt.Sprint(*d.Spec.Replicas), *d.Spec.Replicas == 0 })
	c.deploymentSeen()
	c.says("Stalled=False DeploymentFound", "Reconciling=True Ending")
	c.observes(r, decision.Autoscaler{Running: true, PausedByUs: true})
	if err := c.admin.Delete(t.Context(), p, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	c.observes(r, decision.Autoscaler{PausedByUs: true})
	c.says("Stalled=False DeploymentFound", "Reconciling=False Stopped")

	for range 2 {
		c.eventually("the autoscaler is resumed", func() (string, bool) { err := r.resume(t.Context()); return fmt.Sprint(err), err == nil })
	}
	c.observes(r, decision.Autoscaler{Enabled: true, Running: true})
	c.eventually("the Deployment requests one replica", func() (string, bool) { d := c.scaler(); return fmt.Sprint(*d.Spec.Replicas), *d.Spec.Replicas == 1 })
	c.says("Stalled=False DeploymentFound", "Reconciling=False Runs")

	// The operator does not resume what the owner has paused.
	c.owner(func(s *v1alpha1.AutoscalingStrategySpec) { s.Enabled = false })
	c.deploymentStops()
	c.observes(r, decision.Autoscaler{})
	if err := errors.Join(r.resume(t.Context()), r.pause(t.Context())); err != nil {
		t.Fatal(err)
	}
	if s := c.theStrategy(); s.Spec.Enabled || s.Annotations[v1alpha1.AnnotationPaused] != "" {
		t.Errorf("an autoscaler that its owner stopped has enabled=%t, annotations %v", s.Spec.Enabled, s.Annotations)
	}

	// Without the Deployment nothing waits.
	if err := c.admin.Delete(t.Context(), c.scaler()); err != nil {
		t.Fatal(err)
	}
	c.owner(func(s *v1alpha1.AutoscalingStrategySpec) { s.Enabled = true })
	c.observes(r, decision.Autoscaler{Enabled: true})
	c.says("Stalled=True DeploymentNotFound", "Reconciling=False DeploymentNotFound")
	c.denied.mu.Lock()
	if len(c.denied.all) > 0 {
		t.Errorf("the chart's role lacks: %v", c.denied.all)
	}
	c.denied.mu.Unlock()

	// A Deployment that the operator may not read counts as running.
	c.owner(func(s *v1alpha1.AutoscalingStrategySpec) { s.DeploymentName = "mine" })
	c.observes(r, decision.Autoscaler{Enabled: true, Running: true})
	c.says("Stalled=True DeploymentForbidden", "Reconciling=False DeploymentForbidden")
}

// deploymentSeen does what the Deployment's controller would, after its replicas are 0.
func (c *cluster) deploymentSeen() {
	c.t.Helper()
	d := c.scaler()
	d.Status.ObservedGeneration = d.Generation
	if err := c.admin.Status().Update(c.t.Context(), d); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) deploymentStops() {
	c.t.Helper()
	c.eventually("the Deployment requests no replicas", func() (string, bool) { d := c.scaler(); return fmt.Sprint(*d.Spec.Replicas), *d.Spec.Replicas == 0 })
	c.deploymentSeen()
}

// owner changes the AutoscalingStrategy as kubectl would.
func (c *cluster) owner(change func(*v1alpha1.AutoscalingStrategySpec)) {
	c.t.Helper()
	s := c.theStrategy()
	before := s.DeepCopy()
	change(&s.Spec)
	if err := c.admin.Patch(c.t.Context(), s, client.MergeFrom(before)); err != nil {
		c.t.Fatal(err)
	}
}

// A second leader, or one with a stale observation, does not overwrite what others decided.
func TestAutoscalerIsChangedOnlyAsObserved(t *testing.T) {
	c := newCluster(t)
	c.create(newStrategy())
	stale := c.theStrategy()
	s := c.theStrategy()
	s.Spec.AutoscalerExtraArgs = map[string]string{"v": "9"}
	if err := c.admin.Update(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	r := newAutoscaling(&frozen{c.admin, stale}, c.admin, slog.New(slog.DiscardHandler))
	if err := r.pause(t.Context()); !apierrors.IsConflict(err) {
		t.Errorf("paused from a stale observation: %v", err)
	}
	if s := c.theStrategy(); !s.Spec.Enabled || s.Annotations[v1alpha1.AnnotationPaused] != "" {
		t.Error("the AutoscalingStrategy was changed")
	}

	// Conflicts are not reported while the cache is stale. A lasting conflict is reported.
	now := time.Now()
	e := newRetries(func() time.Time { return now })
	tries := func(until time.Duration) (n int, message string) {
		for end := now.Add(until); now.Before(end); now = now.Add(10 * time.Millisecond) {
			if e.begin("pause autoscaler") {
				e.end("pause autoscaler", 0, r.pause(t.Context()))
				n++
			}
		}
		_, message = e.failing()
		return n, message
	}
	if n, message := tries(conflictLasts / 2); n < 5 || message != "" {
		t.Errorf("after %d short conflicts %q is reported", n, message)
	}
	if _, message := tries(conflictLasts); !strings.Contains(message, "the object has been modified") {
		t.Errorf("a lasting conflict is reported as %q", message)
	}
	// After its purpose was reached in another way, it is no longer reported and starts no round.
	now = now.Add(2 * unwanted)
	if left := e.due(now); left != pace {
		t.Errorf("the next round is due in %s", left)
	}
	if left := e.due(now); left != resting {
		t.Errorf("the following round is due in %s", left)
	}
	if _, message := e.failing(); message != "" {
		t.Errorf("a key that is no longer wanted is reported: %q", message)
	}
	now = now.Add(2 * conflictLasts)
	if n, message := tries(conflictLasts / 2); n < 5 || message != "" {
		t.Errorf("after %d later conflicts %q is reported", n, message)
	}
}

// frozen reads an old AutoscalingStrategy.
type frozen struct {
	client.Client
	s *v1alpha1.AutoscalingStrategy
}

func (f *frozen) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if s, ok := o.(*v1alpha1.AutoscalingStrategy); ok {
		f.s.DeepCopyInto(s)
		return nil
	}
	return f.Client.Get(ctx, key, o, opts...)
}
