package operator

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// groups maintains a ScalingGroup for each group of the cloud, and the one AutoscalingStrategy. One
// reconcile handles all groups, so that it needs one request to the cloud.
type groups struct {
	client   client.Client
	cloud    cloudAPI
	events   events.EventRecorder
	log      *slog.Logger
	interval time.Duration

	mu    sync.Mutex
	queue workqueue.TypedRateLimitingInterface[ctrl.Request]
}

// wake starts a new discovery of groups. It is safe for concurrent use.
func (r *groups) wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.queue != nil {
		r.queue.Add(named(allGroups))
	}
}

// allGroups is the only request of the controller.
const allGroups = "all"

// missingAgain is the interval of discovery while the cloud does not list a group.
const missingAgain = time.Minute

// settle is the delay of a discovery after a change of nodes, to cover a burst of changes.
const settle = 15 * time.Second

func (r *groups) setup(mgr manager.Manager) error {
	all := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []ctrl.Request { return []ctrl.Request{named(allGroups)} })
	later := func(q workqueue.TypedRateLimitingInterface[ctrl.Request]) { q.AddAfter(named(allGroups), settle) }
	err := ctrl.NewControllerManagedBy(mgr).Named("scalinggroup").
		Watches(&v1alpha1.ScalingGroup{}, all, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&v1alpha1.NodeVersion{}, all, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Node{}, handler.Funcs{
			CreateFunc: func(_ context.Context, _ event.CreateEvent, q workqueue.TypedRateLimitingInterface[ctrl.Request]) {
				later(q)
			},
			DeleteFunc: func(_ context.Context, _ event.DeleteEvent, q workqueue.TypedRateLimitingInterface[ctrl.Request]) {
				later(q)
			},
		}).
		WatchesRawSource(source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[ctrl.Request]) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.queue = q
			return nil
		})).
		Complete(r)
	if err != nil {
		return fmt.Errorf("add controller of ScalingGroup: %w", err)
	}
	// A cluster without nodes and objects has no event that would start a reconcile.
	start := manager.RunnableFunc(func(ctx context.Context) error {
		if _, err := r.Reconcile(ctx, named(allGroups)); err != nil && ctx.Err() == nil {
			r.log.Warn("scaling groups not read", "err", err)
		}
		return nil
	})
	if err := mgr.Add(start); err != nil {
		return fmt.Errorf("add start of ScalingGroup: %w", err)
	}
	return nil
}

// Reconcile implements reconcile.Reconciler.
func (r *groups) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	if err := r.ensureStrategy(ctx); err != nil {
		return ctrl.Result{}, err
	}
	var known v1alpha1.ScalingGroupList
	if err := r.client.List(ctx, &known); err != nil {
		return ctrl.Result{}, fmt.Errorf("list ScalingGroups: %w", err)
	}
	target, err := r.target(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	found, cloudErr := r.cloud.Groups(ctx)
	for i := range known.Items {
		g := &known.Items[i]
		c := groupCondition(g, target, found, cloudErr)
		image := g.Status.ImageReference
		if f := groupByID(found, g.Spec.GroupID); f != nil {
			image = f.Image
			if err := r.describe(ctx, g, *f); err != nil {
				return ctrl.Result{}, err
			}
		}
		if err := r.report(ctx, g, image, c); err != nil {
			return ctrl.Result{}, err
		}
	}
	if cloudErr != nil {
		return ctrl.Result{}, fmt.Errorf("find scaling groups: %w", cloudErr)
	}
	created := false
	for _, f := range found {
		if objectByID(known.Items, f.ID) == nil {
			if err := r.create(ctx, f, known.Items); err != nil {
				return ctrl.Result{}, err
			}
			created = true
		}
	}
	if created {
		return ctrl.Result{RequeueAfter: time.Second}, nil // for their status
	}
	next := r.interval
	if slices.ContainsFunc(known.Items, func(g v1alpha1.ScalingGroup) bool { return groupByID(found, g.Spec.GroupID) == nil }) {
		next = min(next, missingAgain) // the list may have been partial
	}
	return ctrl.Result{RequeueAfter: next}, nil
}

// noImage is the target of groups in a cloud that selects no image.
const noImage = "none"

// target returns the target image of groups, or noImage; empty: no target yet.
func (r *groups) target(ctx context.Context) (string, error) {
	var nv v1alpha1.NodeVersion
	err := r.client.Get(ctx, client.ObjectKey{Name: v1alpha1.NodeVersionName}, &nv)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("read NodeVersion: %w", err)
	}
	if err == nil && nv.Spec.Image == "" {
		return noImage, nil
	}
	return nv.Spec.Image, nil
}

// groupCondition reports whether a group creates machines with the target's image. A group that is
// missing from a list is not gone, because lists may be partial.
func groupCondition(g *v1alpha1.ScalingGroup, target string, found []cloud.Group, err error) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionOutdated, Status: metav1.ConditionUnknown, ObservedGeneration: g.Generation}
	f := groupByID(found, g.Spec.GroupID)
	switch {
	case err != nil:
		c.Reason, c.Message = "CloudUnavailable", decision.TruncateMessage(err.Error())
	case f == nil:
		c.Reason, c.Message = reasonNotListed, "the cloud does not list this group; the object is kept, delete it if the group is gone"
	case target == "":
		c.Reason, c.Message = "NoTarget", "there is no NodeVersion "+v1alpha1.NodeVersionName+" yet"
	case target == noImage:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, "UpToDate", "the target names no image"
	case strings.EqualFold(f.Image, target):
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, "UpToDate", "new machines of this group are made from the target's image"
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, "ImageDiffers", "new machines of this group would be made from another image than the target's"
	}
	return c
}

const reasonNotListed = "NotListed"

// notListed reports whether the cloud's last list lacked a group.
func notListed(g *v1alpha1.ScalingGroup) bool {
	return slices.ContainsFunc(g.Status.Conditions, func(c metav1.Condition) bool {
		return c.Type == v1alpha1.ConditionOutdated && c.Reason == reasonNotListed
	})
}

// describe copies the cloud's data of the group. The owner's settings stay.
func (r *groups) describe(ctx context.Context, g *v1alpha1.ScalingGroup, f cloud.Group) error {
	changed := g.DeepCopy()
	changed.Spec.NodeGroupName, changed.Spec.AutoscalerGroupName = f.Name, f.AutoscalerName
	if changed.Spec == g.Spec {
		return nil
	}
	if err := r.client.Patch(ctx, changed, client.MergeFrom(g)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("update ScalingGroup %s: %w", g.Name, err))
	}
	*g = *changed
	return nil
}

func (r *groups) report(ctx context.Context, g *v1alpha1.ScalingGroup, image string, c metav1.Condition) error {
	changed := g.DeepCopy()
	changed.Status.ObservedGeneration, changed.Status.ImageReference = g.Generation, image
	decision.SetCondition(&changed.Status.Conditions, c, metav1.Now())
	if equality.Semantic.DeepEqual(changed.Status, g.Status) {
		return nil
	}
	if err := r.client.Status().Patch(ctx, changed, client.MergeFrom(g)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("report on ScalingGroup %s: %w", g.Name, err))
	}
	if c.Status == metav1.ConditionUnknown && c.Reason != "NoTarget" {
		r.events.Eventf(changed, nil, corev1.EventTypeWarning, c.Reason, "Observe", "%s", c.Message)
	}
	r.log.Info("scaling group observed", "group", g.Name, "image", image, "outdated", string(c.Status), "reason", c.Reason)
	return nil
}

// create creates the object of a discovered group. Another leader may be faster.
func (r *groups) create(ctx context.Context, f cloud.Group, known []v1alpha1.ScalingGroup) error {
	role := v1alpha1.WorkerRole
	if f.Role == cloud.ControlPlane {
		role = v1alpha1.ControlPlaneRole
	}
	g := &v1alpha1.ScalingGroup{
		ObjectMeta: metav1.ObjectMeta{Name: objectName(f, known)},
		Spec: v1alpha1.ScalingGroupSpec{
			NodeImage: v1alpha1.NodeVersionName, GroupID: f.ID, NodeGroupName: f.Name, AutoscalerGroupName: f.AutoscalerName,
			Min: 1, Max: 10, Role: role,
		},
	}
	if err := r.client.Create(ctx, g); err != nil {
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return fmt.Errorf("create ScalingGroup %s: %w", g.Name, err)
	}
	r.log.Info("scaling group found", "group", g.Name, "id", f.ID, "role", string(role))
	return nil
}

// ensureStrategy creates the AutoscalingStrategy of a new cluster.
func (r *groups) ensureStrategy(ctx context.Context) error {
	err := r.client.Get(ctx, client.ObjectKey{Name: v1alpha1.AutoscalingStrategyName}, &v1alpha1.AutoscalingStrategy{})
	if apierrors.IsNotFound(err) {
		err = r.client.Create(ctx, newStrategy())
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create AutoscalingStrategy: %w", err)
	}
	return nil
}

func groupByID(all []cloud.Group, id string) *cloud.Group {
	for i := range all {
		if strings.EqualFold(all[i].ID, id) { // some clouds change the case between calls
			return &all[i]
		}
	}
	return nil
}

func objectByID(all []v1alpha1.ScalingGroup, id string) *v1alpha1.ScalingGroup {
	for i := range all {
		if strings.EqualFold(all[i].Spec.GroupID, id) {
			return &all[i]
		}
	}
	return nil
}

var notInNames = regexp.MustCompile(`[^a-z0-9-]+`)

// objectName converts the group's name to a valid object name. If two groups would share it, the
// later one gets a part of its ID's hash.
func objectName(f cloud.Group, known []v1alpha1.ScalingGroup) string {
	const maxName = 54 // leaves room for the hash in 63
	name := strings.Trim(notInNames.ReplaceAllString(strings.ToLower(f.Name), "-"), "-")
	name = strings.TrimRight(name[:min(len(name), maxName)], "-")
	taken := name == ""
	for _, g := range known {
		taken = taken || g.Name == name
	}
	if !taken {
		return name
	}
	sum := sha256.Sum256([]byte(strings.ToLower(f.ID)))
	return strings.TrimLeft(name+"-"+hex.EncodeToString(sum[:4]), "-")
}
