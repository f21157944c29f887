package operator

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

const (
	// Intervals between two reads of the autoscaler: while its pods end, while it is paused, and
	// otherwise. Somebody may scale it by hand.
	endingPace, stoppedPace, runningPace = 500 * time.Millisecond, 10 * time.Second, time.Minute
	// observedFor is how long an observation of the Deployment counts. Rounds need it more often than
	// that, so the Deployment is read again in the background after observeAgain.
	observedFor, observeAgain = 2 * time.Second, 500 * time.Millisecond
)

// autoscaling controls the cluster autoscaler. As a controller it sets the replicas and arguments
// of the autoscaler's Deployment from AutoscalingStrategy and ScalingGroups. It also pauses and
// resumes the autoscaler. It is safe for concurrent use.
//
// A cluster without the Deployment has no autoscaler, and nothing waits for it. If the operator may
// not read the Deployment, it assumes that the autoscaler runs.
//
// It needs to get and patch the one Deployment, which it does not watch, and to list
// the pods of its namespace.
type autoscaling struct {
	client client.Client
	live   client.Reader // not cached
	log    *slog.Logger

	looking sync.Mutex // held while the API server is read

	mu     sync.Mutex
	looked time.Time
	seen   deployed
}

// deployed is an observation of a Deployment.
type deployed struct {
	deployment *appsv1.Deployment // nil: it does not exist or may not be read
	reason     string             // why it is not as requested; empty: it is
	runs       bool               // pods of it may run
}

const reasonNotFound, reasonForbidden = "DeploymentNotFound", "DeploymentForbidden"

func newAutoscaling(c client.Client, live client.Reader, log *slog.Logger) *autoscaling {
	return &autoscaling{client: c, live: live, log: log}
}

func (r *autoscaling) setup(mgr manager.Manager) error {
	it := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []ctrl.Request {
		return []ctrl.Request{named(v1alpha1.AutoscalingStrategyName)}
	})
	err := ctrl.NewControllerManagedBy(mgr).Named("autoscalingstrategy").
		For(&v1alpha1.AutoscalingStrategy{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&v1alpha1.ScalingGroup{}, it, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Complete(r)
	if err != nil {
		return fmt.Errorf("add controller of AutoscalingStrategy: %w", err)
	}
	return nil
}

// strategy returns the AutoscalingStrategy. If it does not exist, strategy returns a disabled one
// with the default Deployment.
func (r *autoscaling) strategy(ctx context.Context) (s *v1alpha1.AutoscalingStrategy, exists bool, err error) {
	s = &v1alpha1.AutoscalingStrategy{}
	err = r.client.Get(ctx, client.ObjectKey{Name: v1alpha1.AutoscalingStrategyName}, s)
	if apierrors.IsNotFound(err) {
		n := newStrategy()
		n.Spec.Enabled = false
		return n, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("read AutoscalingStrategy: %w", err)
	}
	return s, true, nil
}

// newStrategy is the AutoscalingStrategy of a new cluster.
func newStrategy() *v1alpha1.AutoscalingStrategy {
	return &v1alpha1.AutoscalingStrategy{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.AutoscalingStrategyName},
		Spec: v1alpha1.AutoscalingStrategySpec{
			Enabled: true, DeploymentName: "constellation-cluster-autoscaler", DeploymentNamespace: "kube-system",
			AutoscalerExtraArgs: map[string]string{"logtostderr": "true", "stderrthreshold": "info", "v": "2", "namespace": "kube-system"},
		},
	}
}

// observe returns whether the autoscaler is enabled, whether it may still run, and who paused it.
func (r *autoscaling) observe(ctx context.Context) (decision.Autoscaler, error) {
	s, _, err := r.strategy(ctx)
	if err != nil {
		return decision.Autoscaler{}, err
	}
	// While it stops, rounds wait until it has stopped.
	age := observeAgain
	if seen, old, ok := r.last(s.Spec); ok && (s.Spec.Enabled || !seen.runs) {
		age = observedFor
		if old > observeAgain && old < observedFor && r.looking.TryLock() {
			go func() {
				defer r.looking.Unlock()
				_, _ = r.ask(ctx, s.Spec) // a round that waits meets the error again
			}()
		}
	}
	seen, err := r.refresh(ctx, s.Spec, age)
	if err != nil {
		return decision.Autoscaler{}, err
	}
	runs := seen.runs || seen.deployment != nil && s.Spec.Enabled // soon
	return decision.Autoscaler{Enabled: s.Spec.Enabled, Running: runs, PausedByUs: s.Annotations[v1alpha1.AnnotationPaused] == "true"}, nil
}

// pause disables the autoscaler and marks it as paused by the operator, in one write, if it is
// enabled. The write fails if the AutoscalingStrategy has changed since it was read.
func (r *autoscaling) pause(ctx context.Context) error {
	return r.enable(ctx, false)
}

// resume enables the autoscaler and removes the operator's mark, in one write, if the mark is
// there. The write fails if the AutoscalingStrategy has changed since it was read.
func (r *autoscaling) resume(ctx context.Context) error {
	return r.enable(ctx, true)
}

func (r *autoscaling) enable(ctx context.Context, yes bool) error {
	s, exists, err := r.strategy(ctx)
	if err != nil {
		return err
	}
	_, ours := s.Annotations[v1alpha1.AnnotationPaused]
	if !exists || yes && !ours || !yes && !s.Spec.Enabled {
		return nil
	}
	changed := s.DeepCopy()
	changed.Spec.Enabled = yes
	delete(changed.Annotations, v1alpha1.AnnotationPaused)
	if !yes {
		metav1.SetMetaDataAnnotation(&changed.ObjectMeta, v1alpha1.AnnotationPaused, "true")
	}
	if err := r.client.Patch(ctx, changed, client.MergeFromWithOptions(s, client.MergeFromWithOptimisticLock{})); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("set AutoscalingStrategy to enabled=%t: %w", yes, err))
	}
	return nil
}

// last returns the last observation of the Deployment and its age. ok is false if there is none, or
// if it is of another Deployment.
func (r *autoscaling) last(s v1alpha1.AutoscalingStrategySpec) (seen deployed, age time.Duration, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := r.seen.deployment
	return r.seen, time.Since(r.looked), !r.looked.IsZero() && (d == nil || client.ObjectKeyFromObject(d) == deploymentOf(s))
}

func deploymentOf(s v1alpha1.AutoscalingStrategySpec) client.ObjectKey {
	return client.ObjectKey{Namespace: s.DeploymentNamespace, Name: s.DeploymentName}
}

// refresh reads the Deployment, unless the last observation is younger than age.
func (r *autoscaling) refresh(ctx context.Context, s v1alpha1.AutoscalingStrategySpec, age time.Duration) (deployed, error) {
	if seen, old, ok := r.last(s); ok && old < age {
		return seen, nil
	}
	r.looking.Lock()
	defer r.looking.Unlock()
	if seen, old, ok := r.last(s); ok && old < age { // another caller has read it meanwhile
		return seen, nil
	}
	return r.ask(ctx, s)
}

// ask reads the Deployment. If it has 0 replicas, ask lists its pods, because no count includes
// pods that are terminating. The caller holds looking.
func (r *autoscaling) ask(ctx context.Context, s v1alpha1.AutoscalingStrategySpec) (deployed, error) {
	key := deploymentOf(s)
	var d appsv1.Deployment
	err := r.live.Get(ctx, key, &d)
	switch {
	case apierrors.IsNotFound(err):
		return r.note(deployed{reason: reasonNotFound}), nil
	case apierrors.IsForbidden(err):
		return r.note(deployed{reason: reasonForbidden, runs: true}), nil // assume that it runs
	case err != nil:
		return deployed{}, fmt.Errorf("read Deployment %s: %w", key, err)
	}
	seen := deployed{deployment: &d, runs: true}
	if d.Spec.Replicas != nil && *d.Spec.Replicas == 0 && d.Status.ObservedGeneration >= d.Generation && d.Status.Replicas == 0 {
		sel, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
		if err != nil {
			return deployed{}, fmt.Errorf("read selector of Deployment %s: %w", key, err)
		}
		var pods corev1.PodList
		if err := r.live.List(ctx, &pods, client.InNamespace(key.Namespace), client.MatchingLabelsSelector{Selector: sel}); err != nil {
			return deployed{}, fmt.Errorf("list pods of Deployment %s: %w", key, err)
		}
		seen.runs = slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool {
			return p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed
		})
	}
	return r.note(seen), nil
}

func (r *autoscaling) note(s deployed) deployed {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen, r.looked = s, time.Now()
	return s
}

// Reconcile implements reconcile.Reconciler.
func (r *autoscaling) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	s, exists, err := r.strategy(ctx)
	if err != nil || !exists {
		return ctrl.Result{}, err
	}
	var groups v1alpha1.ScalingGroupList
	if err := r.client.List(ctx, &groups); err != nil {
		return ctrl.Result{}, fmt.Errorf("list ScalingGroups: %w", err)
	}
	seen, err := r.refresh(ctx, s.Spec, 0)
	if err != nil {
		return ctrl.Result{}, err
	}
	if seen.deployment != nil {
		if seen, err = r.adjust(ctx, s, groups.Items, seen); err != nil {
			return ctrl.Result{}, err
		}
	}
	if err := r.report(ctx, s, seen); err != nil {
		return ctrl.Result{}, err
	}
	switch {
	case seen.deployment != nil && !s.Spec.Enabled && seen.runs:
		return ctrl.Result{RequeueAfter: endingPace}, nil
	case seen.deployment != nil && !s.Spec.Enabled:
		return ctrl.Result{RequeueAfter: stoppedPace}, nil
	}
	return ctrl.Result{RequeueAfter: runningPace}, nil
}

// adjust sets the replicas and arguments of the Deployment. The owner sets everything else. The
// write fails if the Deployment has changed since it was read.
func (r *autoscaling) adjust(ctx context.Context, s *v1alpha1.AutoscalingStrategy, groups []v1alpha1.ScalingGroup, seen deployed) (deployed, error) {
	changed := seen.deployment.DeepCopy()
	changed.Spec.Replicas = ptr(int32(0))
	if s.Spec.Enabled {
		changed.Spec.Replicas = ptr(int32(1))
	}
	changed.Spec.Template.Spec.Containers[0].Args = autoscalerArgs(s.Spec.AutoscalerExtraArgs, groups)
	if equality.Semantic.DeepEqual(changed.Spec, seen.deployment.Spec) {
		return seen, nil
	}
	r.looking.Lock() // an earlier read must not be recorded after this write
	defer r.looking.Unlock()
	err := r.client.Patch(ctx, changed, client.StrategicMergeFrom(seen.deployment, client.MergeFromWithOptimisticLock{}))
	switch {
	case apierrors.IsForbidden(err):
		seen.reason = reasonForbidden
		return seen, nil
	case err != nil:
		return seen, fmt.Errorf("change Deployment %s: %w", s.Spec.DeploymentName, err)
	}
	r.log.Info("cluster autoscaler changed", "deployment", s.Spec.DeploymentName, "replicas", *changed.Spec.Replicas, "args", changed.Spec.Template.Spec.Containers[0].Args)
	return r.note(deployed{deployment: changed, runs: true}), nil
}

// autoscalerArgs are the arguments of the cluster autoscaler, sorted: the extra ones,
// and the bounds of each group that it may change. Control planes are never scaled.
func autoscalerArgs(extra map[string]string, groups []v1alpha1.ScalingGroup) []string {
	args := make([]string, 0, len(extra)+len(groups))
	for k, v := range extra {
		args = append(args, "--"+k+"="+v)
	}
	for _, g := range groups {
		if g.Spec.Autoscaling && g.Spec.Role == v1alpha1.WorkerRole && g.Spec.AutoscalerGroupName != "" {
			args = append(args, fmt.Sprintf("--nodes=%d:%d:%s", g.Spec.Min, g.Spec.Max, g.Spec.AutoscalerGroupName))
		}
	}
	slices.Sort(args)
	return args
}

// report writes the state of the Deployment to the status.
func (r *autoscaling) report(ctx context.Context, s *v1alpha1.AutoscalingStrategy, seen deployed) error {
	changed := s.DeepCopy()
	st, gen := &changed.Status, s.Generation
	st.ObservedGeneration, st.Enabled, st.Replicas = gen, false, 0
	name := s.Spec.DeploymentNamespace + "/" + s.Spec.DeploymentName
	stalled := decision.NewCondition(v1alpha1.ConditionStalled, false, gen, "DeploymentFound", "Deployment %s exists and can be changed", name)
	moving := decision.NewCondition(v1alpha1.ConditionReconciling, false, gen, "Stopped", "the autoscaler is stopped")
	switch seen.reason {
	case reasonNotFound:
		stalled = decision.NewCondition(v1alpha1.ConditionStalled, true, gen, seen.reason, "Deployment %s does not exist: the cluster is not autoscaled, and nodes are replaced without pausing an autoscaler", name)
	case reasonForbidden:
		stalled = decision.NewCondition(v1alpha1.ConditionStalled, true, gen, seen.reason, "the operator may not read and change Deployment %s, and no node is replaced while the autoscaler may run: grant get and patch to the operator", name)
	}
	if d := seen.deployment; d != nil {
		if st.Replicas = 1; d.Spec.Replicas != nil {
			st.Replicas = *d.Spec.Replicas
		}
		st.Enabled = st.Replicas > 0
	}
	switch {
	case seen.reason != "":
		moving.Reason, moving.Message = seen.reason, "the Deployment has the requested state"
	case st.Enabled:
		moving.Reason, moving.Message = "Runs", "the Deployment requests one replica of the autoscaler"
	case seen.runs:
		moving = decision.NewCondition(v1alpha1.ConditionReconciling, true, gen, "Ending", "pods of the autoscaler are terminating")
	}
	now := metav1.Now()
	decision.SetCondition(&st.Conditions, stalled, now)
	decision.SetCondition(&st.Conditions, moving, now)
	if equality.Semantic.DeepEqual(changed.Status, s.Status) {
		return nil
	}
	if err := r.client.Status().Patch(ctx, changed, client.MergeFrom(s)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("report on AutoscalingStrategy: %w", err))
	}
	if stalled.Status == metav1.ConditionTrue {
		r.log.Warn("cluster autoscaler not reachable", "deployment", name, "reason", stalled.Reason)
	}
	return nil
}
