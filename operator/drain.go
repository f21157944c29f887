package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	appsclient "k8s.io/client-go/kubernetes/typed/apps/v1"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/kubectl/pkg/drain"

	"constellation/internal/delay"
)

const (
	// evictionsAtOnce and listsAtOnce limit the concurrent evictions and lists of pods for all nodes
	// together. Most of the time such a request waits about 100 ms for the API server's watch
	// cache, which costs the API server little. Lists that may be stale do not count.
	evictionsAtOnce, listsAtOnce = 128, 32
	// evictionTimeout bounds one request.
	evictionTimeout = 15 * time.Second
	// A refused eviction is retried with exponential backoff. A budget permits evictions again when
	// pods on other nodes are Ready, which takes seconds.
	evictAgainMin = 250 * time.Millisecond
	evictAgainMax = 5 * time.Second
	// A pod may exceed its grace period by this much before it is reported as the blocker. Finalizers do
	// not delay the kubelet, which ends the pod as usual.
	endMargin       = 30 * time.Second
	finalizerMargin = 5 * time.Second
	// daemonSetsFor is how long the existence of a DaemonSet is cached. It is checked for each of its
	// pods on each node.
	daemonSetsFor = 10 * time.Second
)

// drainer drains nodes in the background: it evicts the pods that `kubectl drain` would, and
// retries while budgets refuse. It never deletes a pod and never cordons; a node takes
// new pods unless it is cordoned by others. It is safe for concurrent use.
//
// Pods of DaemonSets and mirror pods stay; pods without a controller and pods with
// data in emptyDir do not. A pod that tolerates the unschedulable node and was created
// after the first list stays too, because its controller would create it again.
//
// It needs to list and watch pods, to create pods/eviction, to get daemonsets, and to
// list poddisruptionbudgets, in case the API server's refusal does not name the budget.
type drainer struct {
	client kubernetes.Interface
	wake   func()
	log    *slog.Logger
	slots  chan struct{} // semaphore of eviction requests
	looks  chan struct{} // semaphore of current lists of pods

	mu   sync.Mutex
	work map[string]*emptying
	wg   sync.WaitGroup
}

// newDrainer returns a drainer that calls wake, from any goroutine, when a state
// changes. wake must not call the drainer.
func newDrainer(c kubernetes.Interface, wake func(), log *slog.Logger) *drainer {
	return &drainer{
		client: &knownDaemonSets{Interface: c, known: map[string]time.Time{}}, wake: wake, log: log,
		slots: make(chan struct{}, evictionsAtOnce), looks: make(chan struct{}, listsAtOnce), work: map[string]*emptying{},
	}
}

// drain starts or continues evictions from the node. It returns at once.
func (d *drainer) drain(node string) { d.begin(node, 0) }

func (d *drainer) begin(node string, most int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.work[node] != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	e := &emptying{drainer: d, node: node, most: most, cancel: cancel, begun: time.Now(), again: evictAgainMin}
	d.work[node] = e
	d.wg.Go(func() { e.run(ctx) })
}

// hurry starts or continues evictions from the node, as drain does. Pods get most seconds to end, if their own grace period is
// longer.
func (d *drainer) hurry(node string, most int64) {
	d.mu.Lock()
	if e := d.work[node]; e != nil && e.most != most { // it goes on with the new limit
		e.cancel()
		delete(d.work, node)
	}
	d.mu.Unlock()
	d.begin(node, most)
}

// state returns the last observation: whether nothing is left to evict, and what blocks. It returns
// false and "" for a node that is not being drained.
func (d *drainer) state(node string) (drained bool, blocker string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.work[node]
	if e == nil {
		return false, ""
	}
	return e.drained, e.blocker
}

// keep ends work on all other nodes and forgets them. It does not wait for requests
// that are in progress: each evicts one pod, which does no harm.
func (d *drainer) keep(nodes map[string]bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for node, e := range d.work {
		if !nodes[node] {
			e.cancel()
			delete(d.work, node)
		}
	}
}

// close ends all work and waits for its end.
func (d *drainer) close() {
	d.keep(nil)
	d.wg.Wait()
}

// report records a state. It ignores reports of an earlier drain of the node.
func (d *drainer) report(e *emptying, drained bool, blocker string) {
	d.mu.Lock()
	changed := d.work[e.node] == e && (e.drained != drained || e.blocker != blocker)
	was := e.drained
	if changed {
		e.drained, e.blocker = drained, blocker
	}
	d.mu.Unlock()
	if !changed {
		return
	}
	switch {
	case drained:
		d.log.Info("node drained", "node", e.node, "took", time.Since(e.begun).Round(time.Millisecond))
	case was:
		d.log.Info("node has pods again", "node", e.node)
	case blocker != "":
		d.log.Info("drain blocked", "node", e.node, "blocker", blocker)
	}
	d.wake()
}

// emptying is the drain of one node. Only its goroutine uses the fields below cancel, except drained
// and blocker, which the drainer's lock guards.
type emptying struct {
	*drainer
	node   string
	most   int64 // seconds that pods get to end; zero: their own grace period
	cancel context.CancelFunc

	drained bool
	blocker string

	begun  time.Time
	looked bool   // the pods at the start have been listed
	empty  bool   // at the last list
	heeded string // version of the last pod from the watch
	left   map[types.UID]*leaving
	stays  map[types.UID]bool // created later, and would be created again
	again  time.Duration      // pause before the next list after an error
}

// leaving is a pod to evict.
type leaving struct {
	pod     corev1.Pod
	refused string        // why its eviction was refused; empty: it was accepted or not requested yet
	pause   time.Duration // before the next request
	next    time.Time     // time of the next request
	ending  time.Time     // since when it is observed to be terminating; zero: it is not
}

func (l *leaving) name() string { return l.pod.Namespace + "/" + l.pod.Name }

// overdue returns the time by which a terminating pod should be gone.
func (l *leaving) overdue() time.Time {
	grace, margin := int64(corev1.DefaultTerminationGracePeriodSeconds), endMargin
	if s := cmp.Or(l.pod.DeletionGracePeriodSeconds, l.pod.Spec.TerminationGracePeriodSeconds); s != nil {
		grace = *s
	}
	if len(l.pod.Finalizers) > 0 {
		margin = finalizerMargin
	}
	return l.ending.Add(time.Duration(grace)*time.Second + margin)
}

// blocker returns what keeps the pod; empty: nothing.
func (l *leaving) blocker(now time.Time) string {
	switch {
	case !l.ending.IsZero() && !now.Before(l.overdue()) && len(l.pod.Finalizers) > 0:
		return fmt.Sprintf("pod %s was evicted, but its finalizer %s prevents its deletion", l.name(), strings.Join(l.pod.Finalizers, ", "))
	case !l.ending.IsZero() && !now.Before(l.overdue()):
		return fmt.Sprintf("pod %s was evicted, and still runs %s after its grace period", l.name(), endMargin)
	case l.refused != "":
		return fmt.Sprintf("pod %s: %s", l.name(), l.refused)
	}
	return ""
}

// run works until ctx ends.
func (e *emptying) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := e.follow(ctx); err != nil && ctx.Err() == nil {
			e.log.Warn("node not drained yet, will retry", "node", e.node, "err", err)
			delay.For(ctx, e.again)
			e.again = min(2*e.again, evictAgainMax)
		}
	}
}

// follow lists the node's pods and watches them until the watch ends.
func (e *emptying) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A list from the API server's watch cache suffices at first: evictions can start before the cache
	// is current and before all watches have started.
	if !e.looked {
		if err := e.list(ctx, "0"); err != nil {
			return err
		}
		e.evict(ctx)
	}
	// The watch starts before the list, so that no event between the two is missed.
	w, err := e.client.CoreV1().Pods("").Watch(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", e.node).String()})
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	defer w.Stop()
	if err := e.list(ctx, ""); err != nil {
		return err
	}
	e.again = evictAgainMin
	for {
		e.evict(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if len(e.left) == 0 && !e.empty {
			// The events suggest it. Only a list that is not older than the events confirms it.
			if err := e.list(ctx, e.heeded); err != nil {
				return err
			}
			if len(e.left) > 0 {
				continue
			}
		}
		e.publish()
		list, err := e.await(ctx, w)
		switch {
		case errors.Is(err, errWatchEnded):
			return nil
		case err != nil:
			return err
		}
		if list {
			if err := e.list(ctx, e.heeded); err != nil {
				return err
			}
		}
	}
}

// errWatchEnded is not a failure: watches end after some minutes.
var errWatchEnded = errors.New("watch of pods ended")

// await waits until work is due, and reports whether pods must be listed.
func (e *emptying) await(ctx context.Context, w watch.Interface) (list bool, err error) {
	t := time.NewTimer(e.nextCheck(time.Now()))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-t.C:
		return false, nil
	case ev, ok := <-w.ResultChan():
		for ok { // and events that arrived meanwhile
			if ev.Type == watch.Error {
				return false, apierrors.FromObject(ev.Object)
			}
			list = e.heard(ev) || list
			select {
			case ev, ok = <-w.ResultChan():
			default:
				return list, nil
			}
		}
		return false, errWatchEnded
	}
}

// heard processes an event and reports whether it shows an unknown pod.
func (e *emptying) heard(ev watch.Event) bool {
	p, ok := ev.Object.(*corev1.Pod)
	if !ok {
		return false
	}
	e.heeded = p.ResourceVersion
	l := e.left[p.UID]
	switch {
	case ev.Type == watch.Deleted:
		delete(e.left, p.UID)
		return false
	case l != nil:
		l.see(*p, time.Now())
		return false
	}
	return !e.stays[p.UID] && !isDaemon(p)
}

// isDaemon reports whether a pod belongs to its node.
func isDaemon(p *corev1.Pod) bool {
	_, mirror := p.Annotations[corev1.MirrorPodAnnotationKey]
	c := metav1.GetControllerOf(p)
	return mirror || c != nil && c.Kind == "DaemonSet" && c.APIVersion == appsv1.SchemeGroupVersion.String()
}

// see records the current state of the pod.
func (l *leaving) see(p corev1.Pod, now time.Time) {
	p.ManagedFields = nil
	l.pod = p
	// By our own clock, because others may differ.
	if p.DeletionTimestamp != nil && l.ending.IsZero() {
		l.ending, l.refused = now, ""
	}
}

// nextCheck returns the time until the next deadline.
func (e *emptying) nextCheck(now time.Time) time.Duration {
	next := now.Add(time.Hour)
	for _, l := range e.left {
		t := l.next
		if !l.ending.IsZero() {
			if t = l.overdue(); !now.Before(t) {
				continue // named already
			}
		}
		if t.Before(next) {
			next = t
		}
	}
	return max(0, next.Sub(now))
}

// list lists the pods to evict: the current ones or, if version is not empty, those of that version
// or later. A list at version "0" may be stale, so it does not prove that the node is empty.
func (e *emptying) list(ctx context.Context, version string) error {
	if version == "" { // other lists do not wait in the API server
		if !slot(ctx, e.looks) {
			return ctx.Err()
		}
		defer func() { <-e.looks }()
	}
	h := drain.Helper{Ctx: ctx, Client: podsNotBefore{e.client, version}, Force: true, IgnoreAllDaemonSets: true, DeleteEmptyDirData: true, GracePeriodSeconds: -1}
	list, errs := h.GetPodsForDeletion(e.node)
	if len(errs) > 0 {
		return fmt.Errorf("list pods of %s: %w", e.node, errors.Join(errs...))
	}
	now, left, stays := time.Now(), map[types.UID]*leaving{}, map[types.UID]bool{}
	for _, p := range list.Pods() {
		l := e.left[p.UID]
		if l == nil {
			if e.stays[p.UID] || e.looked && toleratesCordon(&p) {
				stays[p.UID] = true
				continue
			}
			l = &leaving{pause: evictAgainMin}
		}
		l.see(p, now)
		left[p.UID] = l
	}
	if version == "0" {
		e.left = left
		return nil
	}
	e.left, e.stays, e.looked, e.empty = left, stays, true, len(left) == 0
	return nil
}

// podsNotBefore lists pods at a version or later; empty: the current pods.
type podsNotBefore struct {
	kubernetes.Interface
	version string
}

func (p podsNotBefore) CoreV1() coreclient.CoreV1Interface {
	return coreNotBefore{p.Interface.CoreV1(), p.version}
}

type coreNotBefore struct {
	coreclient.CoreV1Interface
	version string
}

func (c coreNotBefore) Pods(namespace string) coreclient.PodInterface {
	return podListNotBefore{c.CoreV1Interface.Pods(namespace), c.version}
}

type podListNotBefore struct {
	coreclient.PodInterface
	version string
}

func (p podListNotBefore) List(ctx context.Context, o metav1.ListOptions) (*corev1.PodList, error) {
	if o.ResourceVersion, o.ResourceVersionMatch = p.version, ""; p.version != "" {
		o.ResourceVersionMatch = metav1.ResourceVersionMatchNotOlderThan
	}
	return p.PodInterface.List(ctx, o)
}

// toleratesCordon reports whether the scheduler may put a pod on a node that is unschedulable.
func toleratesCordon(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Spec.Tolerations, func(t corev1.Toleration) bool {
		return (t.Key == "" && t.Operator == corev1.TolerationOpExists || t.Key == corev1.TaintNodeUnschedulable) && (t.Effect == "" || t.Effect == corev1.TaintEffectNoSchedule)
	})
}

// slot waits for a free slot of a semaphore; false: ctx has ended.
func slot(ctx context.Context, slots chan<- struct{}) bool {
	select {
	case slots <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// evict requests the eviction of all pods whose pause is over, and waits for the answers.
func (e *emptying) evict(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, l := range e.left {
		if !l.ending.IsZero() || time.Now().Before(l.next) {
			continue
		}
		if !slot(ctx, e.slots) {
			return
		}
		wg.Go(func() {
			defer func() { <-e.slots }()
			err := e.ask(ctx, &l.pod)
			if twoBudgets(err) {
				err = e.named(ctx, &l.pod, err)
			}
			l.answer(err, time.Now())
		})
	}
}

// ask requests one eviction. kubectl's implementation would evict a new pod of the same name on
// another node. client-go would wait for ten seconds, up to ten times, for a stale budget.
func (e *emptying) ask(ctx context.Context, p *corev1.Pod) error {
	ctx, cancel := context.WithTimeout(ctx, evictionTimeout)
	defer cancel()
	o := &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}}
	if own := p.Spec.TerminationGracePeriodSeconds; e.most > 0 && own != nil && *own > e.most {
		o.GracePeriodSeconds = &e.most
	}
	return e.client.CoreV1().RESTClient().Post().Namespace(p.Namespace).Resource("pods").Name(p.Name).SubResource("eviction").MaxRetries(0).
		Body(&policyv1.Eviction{
			ObjectMeta:    metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name},
			DeleteOptions: o,
		}).Do(ctx).Error()
}

// answer records the result of an eviction.
func (l *leaving) answer(err error, now time.Time) {
	if err == nil || apierrors.IsNotFound(err) {
		// The watch reports a pod that is gone.
		l.ending, l.refused = now, ""
		return
	}
	l.refused = refusedEviction(err)
	l.next = now.Add(l.pause)
	l.pause = min(2*l.pause, evictAgainMax)
}

// refusedEviction returns a readable reason why an eviction was refused.
func refusedEviction(err error) string {
	var s apierrors.APIStatus
	if !errors.As(err, &s) {
		return "request its eviction: " + err.Error()
	}
	if d := s.Status().Details; d != nil {
		for _, c := range d.Causes {
			if c.Type == policyv1.DisruptionBudgetCause {
				return lowerFirst(c.Message)
			}
		}
	}
	switch {
	case apierrors.IsConflict(err): // the pod has just changed, or is gone
		return ""
	case twoBudgets(err):
		budgets := "more than one PodDisruptionBudget selects it"
		if n := new(budgetsNamed); errors.As(err, &n) {
			budgets = "the PodDisruptionBudgets " + strings.Join(n.names[:len(n.names)-1], ", ") + " and " + n.names[len(n.names)-1] + " select it"
		}
		return budgets + ", and a pod with more than one is never evicted; change them so that one selects it"
	case apierrors.IsTooManyRequests(err):
		return "the API server is too busy to evict it"
	}
	return "its eviction was refused: " + s.Status().Message
}

// twoBudgets reports whether the API server has found more than one budget for a pod.
// The API server does not name them.
func twoBudgets(err error) bool {
	var s apierrors.APIStatus
	return errors.As(err, &s) && s.Status().Code == 500 && strings.Contains(s.Status().Message, "more than one PodDisruptionBudget")
}

// budgetsNamed is a refusal with the names of its two or more budgets.
type budgetsNamed struct {
	error
	names []string
}

func (b *budgetsNamed) Unwrap() error { return b.error }

// named adds the names of the budgets that select the pod to a refusal. If they cannot be read, the
// refusal stays unchanged.
func (e *emptying) named(ctx context.Context, p *corev1.Pod, refused error) error {
	ctx, cancel := context.WithTimeout(ctx, evictionTimeout)
	defer cancel()
	l, err := e.client.PolicyV1().PodDisruptionBudgets(p.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		e.log.Debug("budgets not read", "namespace", p.Namespace, "err", err)
		return refused
	}
	var names []string
	for i := range l.Items {
		// As in the API server, an empty selector selects all pods.
		if s, err := metav1.LabelSelectorAsSelector(l.Items[i].Spec.Selector); err == nil && s.Matches(labels.Set(p.Labels)) {
			names = append(names, l.Items[i].Name)
		}
	}
	if len(names) < 2 { // the budgets have changed meanwhile
		return refused
	}
	slices.Sort(names)
	return &budgetsNamed{refused, names}
}

func lowerFirst(s string) string {
	if s == "" {
		return s
	}
	return strings.ToLower(s[:1]) + s[1:]
}

// publish reports the state, with the first pod by name that is blocked.
func (e *emptying) publish() {
	now := time.Now()
	var blockers []string
	for _, l := range slices.SortedFunc(maps.Values(e.left), func(a, b *leaving) int { return cmp.Compare(a.name(), b.name()) }) {
		if b := l.blocker(now); b != "" {
			blockers = append(blockers, b)
		}
	}
	blocker := ""
	if len(blockers) > 0 {
		blocker = blockers[0]
	}
	if len(blockers) > 1 {
		blocker = fmt.Sprintf("%s; and %d more", blockers[0], len(blockers)-1)
	}
	e.report(e, len(e.left) == 0, blocker)
}

// knownDaemonSets caches for a while which DaemonSets exist.
type knownDaemonSets struct {
	kubernetes.Interface
	mu    sync.Mutex
	known map[string]time.Time
}

func (k *knownDaemonSets) AppsV1() appsclient.AppsV1Interface {
	return appsWithKnown{k.Interface.AppsV1(), k}
}

type appsWithKnown struct {
	appsclient.AppsV1Interface
	k *knownDaemonSets
}

func (a appsWithKnown) DaemonSets(namespace string) appsclient.DaemonSetInterface {
	return daemonSetsWithKnown{a.AppsV1Interface.DaemonSets(namespace), namespace, a.k}
}

type daemonSetsWithKnown struct {
	appsclient.DaemonSetInterface
	namespace string
	k         *knownDaemonSets
}

// Get returns an object without content if the DaemonSet exists.
func (d daemonSetsWithKnown) Get(ctx context.Context, name string, o metav1.GetOptions) (*appsv1.DaemonSet, error) {
	key, now := d.namespace+"/"+name, time.Now()
	d.k.mu.Lock()
	defer d.k.mu.Unlock() // concurrent callers wait for one request
	if now.Before(d.k.known[key].Add(daemonSetsFor)) {
		return &appsv1.DaemonSet{}, nil
	}
	s, err := d.DaemonSetInterface.Get(ctx, name, o)
	if err == nil {
		d.k.known[key] = now
	}
	return s, err
}
