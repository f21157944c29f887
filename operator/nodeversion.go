package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
	"constellation/operator/nodelock"
	"constellation/operator/readiness"
)

// nodeVersions reconciles the NodeVersion: observe, decide, act, report. One reconciliation runs at a
// time. Requests to the cloud and the host run in the background and wake it.
type nodeVersions struct {
	client   client.Client
	live     client.Reader // past the cache
	gate     *readinessGate
	fleet    *fleet
	host     host   // nil: none
	agents   agents // nil: none
	drains   drains
	lock     *nodelock.Lock // of the cluster's nodes; nil: no other program locks them
	scaling  scaling
	sizes    *sizes // nil: the cloud keeps groups at their size
	events   events.EventRecorder
	gauges   *gauges
	counters *counters
	log      *slog.Logger
	nodeName string
	interval time.Duration // of lists of the cloud's machines while some come or go
	// leave makes another replica the leader.
	leave func(context.Context) error
	// regrouped starts a discovery of groups after one was changed.
	regrouped func()
	now       func() time.Time
	// spawn runs a function in the background.
	spawn func(func(context.Context))
	// at is called before and after each effect; see package crash.
	at func(point string)

	view     *view
	clocks   decision.FirstSeen
	hostView *hostView
	runs     nodeRuns
	retries  *retries
	writes   chan struct{} // semaphore of concurrent writes
	answered atomic.Bool   // the API server has answered a write
	// beginning is the number of PendingNodes that are being created.
	beginning atomic.Int32
	// gathered are the batches of requests to the cloud, and ripens is when the first is due.
	gathered map[string]gathering
	ripens   time.Duration
	versions map[string]string // Kubernetes of components, by name
	revoked  revokedNames
	cached   func() []any // the Nodes of the cache
	book     nodeBook
	nodes    []decision.Node // buffer for those of a world; see nodesOf

	// woken is the arrival of the first event since the last round, in nanoseconds; 0: none.
	woken atomic.Int64

	queueMu sync.Mutex
	queue   workqueue.TypedRateLimitingInterface[ctrl.Request]

	begun          time.Time
	last           time.Time     // when the last reconciliation began
	took           time.Duration // approximate duration of a round: observe, decide, start actions
	heard          time.Time     // when the API server last answered past the cache
	behind         time.Time     // since when the cache is behind it; zero: it is not
	assessed       time.Time     // when the status was computed last
	reported       time.Time     // when the status was written last
	told           map[string]string
	reportedDrains map[string]string // by node
	// reportedImpostors is the last message about each impostor, by node.
	reportedImpostors map[string]string
	lines             map[string]time.Time // when the run of a machine's agent was last reported
	waiting           map[string]waited    // by reason and object; see lasting
	starts            *rate.Limiter        // of replacements
	telling           *rate.Limiter
	recording         *rate.Limiter
}

// scaling is the cluster autoscaler.
type scaling interface {
	observe(context.Context) (decision.Autoscaler, error)
	pause(context.Context) error
	resume(context.Context) error
}

// Times of a reconciliation.
const (
	// pace is the minimum time between two rounds, so that a burst of events causes one round. In a large
	// cluster it is a multiple of a round's duration, up to paceUp, so that the cost of a rollout per
	// node does not grow with the number of nodes.
	pace, paceUp = 15 * time.Millisecond, 100 * time.Millisecond
	paceTimes    = 3
	// statusPace is the minimum time between two writes of a status in which only counters changed.
	statusPace = time.Second
	// assessPace is the minimum time between two computations of the status.
	assessPace = 200 * time.Millisecond
	// Deadlines are checked this often: while something is in progress, and otherwise.
	restless, resting = 10 * time.Second, 5 * time.Minute
	// The API server is read past the cache after askAgain. No action is based on an observation, of it or
	// of the cloud, that could not be renewed for tooOld.
	askAgain, tooOld = 20 * time.Second, time.Minute
	// staleView is how long the cache is given to catch up.
	staleView = 100 * time.Millisecond
	// offline is the pause after an error of the API server.
	offline = 2 * time.Second
	// While a complete list of machines is missing, they are listed every partialPace intervals, because
	// some clouds fail for longer.
	partialPace = 5
)

// Events and status updates about single machines are rate-limited, so that reporting a rollout of
// thousands of nodes does not cost the API server more than the rollout.
const (
	eventBurst, eventRate   = 100, 0.5
	statusBurst, statusRate = 50, 1
)

func (r *nodeVersions) init() {
	if r.now == nil {
		r.now = time.Now
	}
	if r.interval == 0 {
		r.interval = fleetMoves
	}
	if r.at == nil {
		r.at = func(string) {}
	}
	if r.regrouped == nil {
		r.regrouped = func() {}
	}
	r.begun = r.now()
	r.view, r.hostView, r.retries = newView(r.client, r.now), &hostView{}, newRetries(r.now)
	r.writes, r.gathered = make(chan struct{}, writers), map[string]gathering{}
	r.versions, r.told, r.reportedDrains, r.lines = map[string]string{}, map[string]string{}, map[string]string{}, map[string]time.Time{}
	r.reportedImpostors = map[string]string{}
	r.starts = rate.NewLimiter(startRate, startBurst)
	r.telling, r.recording = rate.NewLimiter(statusRate, statusBurst), rate.NewLimiter(eventRate, eventBurst)
}

func (r *nodeVersions) setup(mgr manager.Manager) error {
	it := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []ctrl.Request {
		r.news()
		return []ctrl.Request{named(v1alpha1.NodeVersionName)}
	})
	// The listed objects belong to the cache, so a list of thousands copies nothing.
	informer, err := mgr.GetCache().GetInformer(context.Background(), &corev1.Node{}, cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("add controller of NodeVersion: %w", err)
	}
	store, ok := informer.(toolscache.SharedInformer)
	if !ok {
		return fmt.Errorf("add controller of NodeVersion: the cache of Nodes is a %T", informer)
	}
	r.cached = store.GetStore().List
	err = ctrl.NewControllerManagedBy(mgr).Named("nodeversion").
		For(&v1alpha1.NodeVersion{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Node{}, it, builder.WithPredicates(nodeMatters())).
		Watches(&v1alpha1.ScalingGroup{}, it).
		Watches(&v1alpha1.AutoscalingStrategy{}, it).
		Watches(&v1alpha1.PendingNode{}, it, builder.WithPredicates(intentMatters())).
		Watches(&v1alpha1.JoiningNode{}, it, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		WatchesRawSource(source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[ctrl.Request]) error {
			r.queueMu.Lock()
			defer r.queueMu.Unlock()
			r.queue = q
			return nil
		})).
		Complete(r)
	if err != nil {
		return fmt.Errorf("add controller of NodeVersion: %w", err)
	}
	return nil
}

// news records that a change has come in since the last round.
func (r *nodeVersions) news() { r.woken.CompareAndSwap(0, time.Now().UnixNano()) }

// wake starts a round. It is safe for concurrent use.
func (r *nodeVersions) wake() {
	r.news()
	r.queueMu.Lock()
	defer r.queueMu.Unlock()
	if r.queue != nil {
		r.queue.Add(named(v1alpha1.NodeVersionName))
	}
}

// nodeMatters passes changes that decisions depend on. Most other changes are heartbeats.
func nodeMatters() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		o, ok1 := e.ObjectOld.(*corev1.Node)
		n, ok2 := e.ObjectNew.(*corev1.Node)
		return ok1 && ok2 && (readiness.Node(o) != readiness.Node(n) || keyOf(o) != keyOf(n) || roleOf(o) != roleOf(n) ||
			o.Spec.Unschedulable != n.Spec.Unschedulable || o.Status.NodeInfo.KubeletVersion != n.Status.NodeInfo.KubeletVersion || o.Status.NodeInfo.BootID != n.Status.NodeInfo.BootID ||
			o.Labels[v1alpha1.LabelInPlace] != n.Labels[v1alpha1.LabelInPlace] || !maps.Equal(o.Annotations, n.Annotations))
	}}
}

// intentMatters passes changes of an intent's spec, not of its status.
func intentMatters() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool { return e.ObjectOld.GetGeneration() != e.ObjectNew.GetGeneration() }}
}

func sortIntents(all []decision.Intent) {
	slices.SortFunc(all, func(a, b decision.Intent) int { return strings.Compare(a.Name, b.Name) })
}

// Reconcile implements reconcile.Reconciler.
func (r *nodeVersions) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	if left := max(pace, min(r.took*paceTimes, paceUp)) - r.now().Sub(r.last); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	r.last = r.now()
	var nv v1alpha1.NodeVersion
	if err := r.client.Get(ctx, req.NamespacedName, &nv); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	again, err := r.reconcile(ctx, &nv)
	if err != nil && ctx.Err() == nil {
		// The framework's backoff grows to 15 minutes, which is too long after an API server was away for a
		// minute.
		once(r.told, "reconcile", err.Error(), func() { r.log.Warn("cluster not observed", "err", err) })
		return ctrl.Result{RequeueAfter: offline}, nil
	}
	r.quiet("reconcile")
	return ctrl.Result{RequeueAfter: again}, nil
}

// reconcile runs one round and returns when the next is due.
func (r *nodeVersions) reconcile(ctx context.Context, nv *v1alpha1.NodeVersion) (time.Duration, error) {
	current, err := r.current(ctx, nv)
	if err != nil {
		return 0, fmt.Errorf("reach API server: %w", err)
	}
	began := r.now()
	o, err := r.observe(ctx, nv)
	if err != nil {
		return 0, fmt.Errorf("observe cluster: %w", err)
	}
	_, _, age, _ := r.fleet.view()
	if age == never && r.now().Sub(r.begun) < tooOld { // nothing is known yet
		r.renew(o, nil, age, false, false)
		return r.interval, nil
	}
	d := decision.Decide(o.version.Spec, o.World)
	r.able(d)
	switch {
	case r.lock == nil:
	case d.Exclusive:
		r.lock.Want(nodelock.Replacements, r.wake)
	default:
		r.lock.Drop(nodelock.Replacements)
	}
	waits := d.Waits
	// Such a wait ends with a complete list.
	lacking := slices.ContainsFunc(waits, func(w decision.Wait) bool { return w.Reason == decision.ReasonPartial })
	moving, poll := r.renew(o, d.Actions, age, lacking, d.WantsEtcdTag())
	if d.WantsAddons() && r.host != nil {
		poll = min(poll, freshTag)
		r.renewAddons()
	}
	stale := current && len(d.Actions) > 0 && age > tooOld
	actions, instead := r.usable(d.Actions, current, stale)
	published := r.act(o, actions)
	r.reportPending(o, actions, r.lasting(waits))
	// Time without a processor does not count.
	if took := r.now().Sub(began); took < r.took || r.took == 0 {
		r.took = took
	} else {
		r.took += (took - r.took) / 8
	}
	r.reportDrains(o)
	r.reportImpostors(o)
	// A status costs as much as a decision, but is needed less often.
	again := assessPace - r.now().Sub(r.assessed)
	if again <= 0 || again > assessPace || published != nil {
		r.assessed = r.now()
		status := d.Status()
		if instead != nil {
			status.Waiting = d.WaitingFor(*instead)
		}
		if key, text := r.retries.failing(); key != "" && status.Waiting == nil {
			status.Waiting = d.WaitingFor(decision.Wait{Reason: "Failing", Message: decision.Truncate(key+" failed, will retry: "+text, 500)})
		}
		if published != nil {
			status.JoinComponents = *published
		}
		if again, err = r.report(ctx, o, status, published != nil); err != nil {
			return 0, err
		}
		r.gauges.set(status)
	}
	r.gauges.observe(o.World)
	r.gauges.reconciled(r.now())
	next := min(r.nextRound(o, waits, moving, lacking), poll, r.retries.due(r.now()), r.ripens)
	if len(actions) > 0 {
		next = min(next, restless)
	}
	if stale {
		next = min(next, r.interval)
	}
	if again > 0 {
		next = min(next, again)
	}
	return max(next, pace), nil
}

// usable returns the actions, or none if the observation is too old to act on or incomplete, and
// then why. current is whether the cache is fresh, and stale whether the view of the cloud is too
// old.
func (r *nodeVersions) usable(actions []decision.Action, current, stale bool) ([]decision.Action, *decision.Wait) {
	switch {
	case !current:
		return nil, &decision.Wait{Reason: "ClusterStale", Message: "the observation of the cluster is too old to act on; it is being renewed"}
	case stale:
		if why := r.retries.trouble(listing); why != "" {
			return nil, &decision.Wait{Reason: "CloudUnavailable", Message: decision.Truncate("the cloud has not listed its machines for a minute: "+why, 200)}
		}
		return nil, nil
	case r.host != nil && !r.runKnown(): // a run of the agent may be in progress
		if why := r.retries.trouble(recalling); why != "" {
			return nil, &decision.Wait{Reason: "AgentUnavailable", Message: decision.Truncate("the agent of "+r.nodeName+" does not respond: "+why, 200)}
		}
		return nil, nil
	}
	return actions, nil
}

// nextRound returns when a round is due by the observed state: at deadlines, and while
// something moves. moving says that machines come or go, and lacking that the cloud's list is
// partial.
func (r *nodeVersions) nextRound(o *observed, waits []decision.Wait, moving, lacking bool) time.Duration {
	next := resting
	if len(o.Intents) > 0 {
		next = restless
	}
	for _, w := range waits {
		if left := w.Next.Sub(r.now()); !w.Next.IsZero() && left > 0 {
			next = min(next, left+10*time.Millisecond)
		}
	}
	if moving {
		next = min(next, restless, r.interval)
	}
	if lacking {
		next = min(next, partialPace*r.interval)
	}
	if o.Autoscaler.Running && !o.Autoscaler.Enabled { // no event reports its end
		next = min(next, time.Second)
	}
	return next
}

// able removes actions that this replica cannot carry out, and adds a wait for them.
func (r *nodeVersions) able(d *decision.Decision) {
	d.Actions = slices.DeleteFunc(d.Actions, func(a decision.Action) bool {
		if a.Kind == decision.SetGroupImage {
			g := d.Group(a.Group)
			return g != nil && g.Image == "" // about to be read
		}
		if a.Kind != decision.StartUpgrade || r.host != nil && a.Node == r.nodeName {
			return false
		}
		d.Wait("NoAgent", fmt.Sprintf("the agent of %s must upgrade Kubernetes, and this operator has no connection to it", a.Node), decision.NodeReference(a.Node), time.Time{})
		return true
	})
}

// current sometimes reads past the cache, and reports whether the cache is fresh enough to act on. It
// fails if the API server does not answer for too long.
func (r *nodeVersions) current(ctx context.Context, nv *v1alpha1.NodeVersion) (bool, error) {
	now := r.now()
	if r.answered.Swap(false) {
		r.heard = now
	}
	if now.Sub(r.heard) > askAgain || !r.behind.IsZero() {
		try, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		var is v1alpha1.NodeVersion
		if err := r.live.Get(try, client.ObjectKeyFromObject(nv), &is); err != nil {
			if now.Sub(r.heard) > tooOld {
				return false, err
			}
			return true, nil
		}
		r.heard = now
		switch {
		case !newer(&is, nv):
			r.behind = time.Time{}
		case r.behind.IsZero():
			r.behind = now
		}
	}
	return r.behind.IsZero() || now.Sub(r.behind) < tooOld, nil
}

// Keys of retries that are not actions.
const (
	listing    = "list machines"
	describing = "ask for machines"
	asking     = "list etcd members"
	recalling  = "read the agent's run"
	tagging    = "read kubeadm's configuration"

	addonsReading = "read the add-ons"
	reporting     = "report on NodeVersion"
)

// renew polls the cloud and the host as often as needed. moving reports whether machines come or go,
// and poll is the time until the next poll. lacking says that a complete list is waited for,
// and tag that the tag of etcd's image in kubeadm's configuration is needed.
func (r *nodeVersions) renew(o *observed, actions []decision.Action, age time.Duration, lacking, tag bool) (moving bool, poll time.Duration) {
	moves, controlPlanes := machinesMoving(o), controlPlanesMove(o)
	due := r.listDue(o)
	if len(actions) > 0 {
		due = min(due, tooOld/2)
	}
	// Machines that come or go are described by ID, so the list is needed only for unknown ones.
	follow := never
	if moves > 0 {
		due = min(due, r.interval*time.Duration(min(moves, 10)))
		follow = r.interval * time.Duration(min(1+moves/20, 5))
	}
	if lacking {
		due = min(due, partialPace*r.interval)
	}
	if r.retries.outdated(describing) {
		follow = fleetLeast
	}
	switch {
	case age >= due && r.retries.ready(listing):
		about := o.claims()
		r.try(listing, func(ctx context.Context) error { return r.fleet.refresh(ctx, about) })
	case r.fleet.quiet() >= follow && r.retries.ready(describing):
		about := o.claims()
		r.try(describing, func(ctx context.Context) error { return r.fleet.follow(ctx, about) })
	}
	moving, poll = moves > 0, max(due-age, r.interval)
	if r.host == nil {
		return moving, poll
	}
	fresh := staleMembers / 2
	if controlPlanes {
		fresh = freshMembers
	}
	if o.version.Spec.EtcdImageTag != "" && slices.ContainsFunc(o.Nodes, func(n decision.Node) bool { return n.Role == v1alpha1.ControlPlaneRole && n.Etcd == "" }) {
		fresh = freshMembers // without the versions nothing is decided
		poll = min(poll, fresh)
	}
	if decision.EtcdMoves(o.LastEtcd) {
		fresh = freshMembers
		poll = min(poll, fresh)
	}
	if o.LostMember() { // no event reports that a member is dead
		poll = min(poll, fresh)
	}
	r.renewHost(fresh)
	if tag {
		poll = min(poll, freshTag)
		r.renewEtcdTag()
	}
	return moving || controlPlanes, poll
}

// machinesMoving returns how many machines come or go, or are unknown.
func machinesMoving(o *observed) (moves int) {
	for i := range o.Instances {
		if s := o.Instances[i].State; s == "Creating" || s == "Terminating" || s == "Unknown" {
			moves++
		}
	}
	x := o.find()
	for i := range o.Intents {
		in := &o.Intents[i]
		m := x.Instance(in.Machine)
		if in.Machine == "" {
			m = x.ByToken[in.Token]
		}
		if m == nil || in.Goal == v1alpha1.JoinGoal && x.NodeOf[m.ID] == nil || in.Goal == v1alpha1.LeaveGoal && !decision.Gone(m) && m.State != "Ready" {
			moves++
		}
	}
	return moves
}

// controlPlanesMove reports whether a control plane is replaced or upgraded.
func controlPlanesMove(o *observed) bool {
	for i := range o.Nodes {
		if n := &o.Nodes[i]; n.Role == v1alpha1.ControlPlaneRole && n.Cordon != decision.Uncordoned {
			return true
		}
	}
	for i := range o.Intents {
		if g := o.group(o.Intents[i].Group); g != nil && g.Role == v1alpha1.ControlPlaneRole {
			return true
		}
	}
	return false
}

// listDue returns how old the list of machines may be because of the nodes: a node without a machine, or one
// that is not Ready, needs a newer one.
func (r *nodeVersions) listDue(o *observed) time.Duration {
	due, x := resting*3, o.find()
	for i := range o.Nodes {
		n := &o.Nodes[i]
		if n.ProviderID != "" && x.Instance(n.ProviderID) == nil {
			due = min(due, r.interval)
		}
		if !n.Ready {
			due = min(due, fleetSick)
		}
	}
	return due
}

// renewHost reads what is older than fresh of the host: the members of etcd and the agent's run.
func (r *nodeVersions) renewHost(fresh time.Duration) {
	if !r.hostView.fresh(r.now(), fresh) {
		r.try(asking, func(ctx context.Context) error {
			asked := r.now()
			m, err := r.host.Members(ctx)
			if err == nil {
				r.hostView.setMembers(m, asked)
			}
			return err
		})
	}
	if !r.runKnown() {
		r.try(recalling, func(ctx context.Context) error {
			run, err := r.host.Run(ctx)
			if err == nil {
				r.hostView.setRun(run.OfCluster())
				r.hostView.setAddonRun(run.OfAddons())
			}
			return err
		})
	}
}

// freshTag is how old the tag of etcd's image may be. It is read without a watch, which would need
// the right to list ConfigMaps.
const freshTag = 5 * time.Second

// renewEtcdTag reads the tag of etcd's image that kubeadm gives to control planes.
func (r *nodeVersions) renewEtcdTag() {
	if r.hostView.tagAge(r.now()) < freshTag {
		return
	}
	r.try(tagging, func(ctx context.Context) error {
		asked := r.now()
		var m corev1.ConfigMap
		if err := r.live.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "kubeadm-config"}, &m); err != nil {
			return fmt.Errorf("read ConfigMap kubeadm-config: %w", err)
		}
		tag, err := kubeadm.EtcdTag(m.Data["ClusterConfiguration"])
		if err != nil {
			return fmt.Errorf("read ConfigMap kubeadm-config: %w", err)
		}
		r.hostView.setEtcdTag(tag, asked)
		return nil
	})
}

func (o *observed) group(id string) *decision.Group {
	for i := range o.Groups {
		if strings.EqualFold(o.Groups[i].ID, id) {
			return &o.Groups[i]
		}
	}
	return nil
}

func (r *nodeVersions) runKnown() bool {
	_, known := r.hostView.run()
	return known
}

// report writes the status if it has changed: conditions at once, counters once a second. It returns
// when the rest is due.
func (r *nodeVersions) report(ctx context.Context, o *observed, status v1alpha1.NodeVersionStatus, publish bool) (time.Duration, error) {
	before := o.version
	if equality.Semantic.DeepEqual(status, before.Status) {
		return 0, nil
	}
	urgent := publish || status.ObservedGeneration != before.Status.ObservedGeneration || len(status.Conditions) != len(before.Status.Conditions)
	for i := range status.Conditions {
		if !urgent {
			urgent = status.Conditions[i].Status != before.Status.Conditions[i].Status
		}
	}
	if left := statusPace - r.now().Sub(r.reported); !urgent && left > 0 {
		return left, nil
	}
	changed := before.DeepCopy()
	changed.Status = status
	if !urgent { // no round waits for an update of counters
		if r.retries.begin(reporting) {
			r.reported = r.now()
			changed.Status = *status.DeepCopy() // the client stores the answer in it
			r.spawn(func(ctx context.Context) {
				err := r.writeStatus(ctx, before, changed)
				if r.retries.end(reporting, 0, err) && ctx.Err() == nil {
					r.log.Warn("action failed, will retry", "action", reporting, "err", err)
				}
			})
		}
		return statusPace, nil
	}
	if r.retries.running(reporting) {
		return staleView, nil // it changes the input of this status
	}
	if publish {
		r.point("before", decision.PublishComponents)
	}
	err := r.writeStatus(ctx, before, changed)
	if apierrors.IsConflict(err) {
		return staleView, nil // the cache is stale
	}
	if err != nil {
		return 0, client.IgnoreNotFound(fmt.Errorf("report on NodeVersion: %w", err))
	}
	if publish {
		r.point("after", decision.PublishComponents)
		r.wake()
	}
	r.reported, r.heard = r.now(), r.now()
	return 0, nil
}

// writeStatus writes a status over before. A conflict is an error, because a stale status must not
// overwrite the published components.
func (r *nodeVersions) writeStatus(ctx context.Context, before, changed *v1alpha1.NodeVersion) error {
	err := r.client.Status().Patch(ctx, changed, client.MergeFromWithOptions(before.DeepCopy(), client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		r.view.forget(kindVersion, before.Name)
	}
	if err != nil {
		return err
	}
	r.answered.Store(true)
	r.view.wrote(kindVersion, changed.DeepCopy())
	r.tell(before, changed)
	return nil
}

// tell logs changes of the status and records events.
func (r *nodeVersions) tell(before, after *v1alpha1.NodeVersion) {
	if j := after.Status.JoinComponents; j != before.Status.JoinComponents {
		r.log.Info("components of joining machines published", "control_plane", j.ControlPlane, "worker", j.Worker)
	}
	was, is := readyCondition(before.Status), readyCondition(after.Status)
	if w, b := after.Status.Waiting, before.Status.Waiting; w != nil && (b == nil || b.Reason != w.Reason || b.Message != w.Message) {
		r.log.Info("rollout waiting", "reason", w.Reason, "message", w.Message)
	}
	if was.Reason == is.Reason {
		return
	}
	n := after.Status.Nodes
	r.log.Info("node versions assessed", "reason", is.Reason, "nodes", n.Total, "up_to_date", n.UpToDate, "outdated", n.Outdated, "pending", n.Pending)
	kind := corev1.EventTypeNormal
	if stalled := conditionOf(after.Status, v1alpha1.ConditionStalled); stalled.Status == metav1.ConditionTrue {
		kind = corev1.EventTypeWarning
	}
	r.event(after, kind, is.Reason, "Assess", is.Message)
}

// event records an event, unless the rate limit is reached.
func (r *nodeVersions) event(about client.Object, kind, reason, action, note string) {
	if r.recording.AllowN(r.now(), 1) {
		r.events.Eventf(about, nil, kind, reason, action, "%s", note)
	}
}

func readyCondition(s v1alpha1.NodeVersionStatus) metav1.Condition {
	return conditionOf(s, v1alpha1.ConditionReady)
}

func conditionOf(s v1alpha1.NodeVersionStatus, kind string) metav1.Condition {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return metav1.Condition{}
}

// onlyLine reports whether a and b differ in the last line at most.
func onlyLine(a, b *v1alpha1.UpgradeProgress) bool {
	return a != nil && b != nil && a.Phase == b.Phase && a.Version == b.Version
}

// waited is when a wait began, and since when no round has had it; zero: the last round had it.
type waited struct{ began, absent time.Time }

// waitGap is how long a wait may be absent and still counts as the same. A drain that begins again, after
// the view of the cloud was too old to act on, knows its blocker only after an eviction, and one whose pod
// has just changed after the next, at most evictAgainMax later.
const waitGap = 2 * evictAgainMax

// lasting returns the waits that have lasted for decision.StallGrace, but for gaps. A wait that ended
// begins again, which decision.FirstSeen would not notice.
func (r *nodeVersions) lasting(waits []decision.Wait) (old []decision.Wait) {
	now, known := r.now(), make(map[string]waited, len(waits))
	for _, w := range waits {
		key := w.Reason + " " + w.Object.Kind + " " + w.Object.Name
		is, before := r.waiting[key]
		if !before || !is.absent.IsZero() && now.Sub(is.absent) >= waitGap {
			is.began = now
		}
		is.absent = time.Time{}
		if known[key] = is; now.Sub(is.began) >= decision.StallGrace {
			old = append(old, w)
		}
	}
	for key, is := range r.waiting {
		if _, present := known[key]; present {
			continue
		}
		if is.absent.IsZero() {
			is.absent = now
		}
		if now.Sub(is.absent) < waitGap {
			known[key] = is
		}
	}
	r.waiting = known
	return old
}

// reportPending writes the status of PendingNodes: the machine's state in the cloud, the progress of its
// agent, and conditions. It writes once per change, within a rate limit. PendingNodes that change in this round
// are left for a later one.
func (r *nodeVersions) reportPending(o *observed, actions []decision.Action, waits []decision.Wait) {
	change := map[string]bool{}
	for i := range actions {
		if a := &actions[i]; a.Kind == decision.RecordIntent || a.Kind == decision.BindIntent || a.Kind == decision.ClearIntent {
			change[a.Intent.Name] = true
		}
	}
	x := o.find()
	all := slices.Clone(o.Intents)
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, in := range all {
		p := o.pending[in.Name]
		if p == nil || change[in.Name] {
			continue
		}
		if cur := r.view.current(kindPending, in.Name); cur != nil {
			var ok bool
			if p, ok = cur.(*v1alpha1.PendingNode); !ok || p == nil { // changed or deleted in this round
				continue
			}
		}
		in = decision.IntentOf(p)
		status := decision.PendingStatus(in, x, o.NodeRuns[in.Machine], p.Status)
		decision.SetPendingConditions(&status, in, p.Generation, waits, r.now())
		if equality.Semantic.DeepEqual(status, p.Status) || in.Goal == v1alpha1.LeaveGoal && status.ReachedGoal {
			continue // a finished PendingNode is about to be deleted
		}
		if onlyLine(status.Upgrade, p.Status.Upgrade) && r.now().Sub(r.lines[in.Machine]) < statusPace {
			continue // kubeadm prints many lines at a time
		}
		if !r.telling.AllowN(r.now(), 1) {
			return
		}
		key := "status of " + in.Name
		if !r.retries.begin(key) {
			continue
		}
		if status.Upgrade != nil {
			r.lines[in.Machine] = r.now()
		}
		before, changed := p.DeepCopy(), p.DeepCopy()
		changed.Status = status
		r.spawn(func(ctx context.Context) {
			r.writes <- struct{}{}
			err := r.client.Status().Patch(ctx, changed, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
			<-r.writes
			if err == nil {
				r.view.wrote(kindPending, changed)
			}
			if apierrors.IsNotFound(err) {
				err = nil
			}
			if r.retries.end(key, 0, err) && ctx.Err() == nil {
				r.log.Warn("pending node not reported", "pending_node", changed.Name, "err", err)
			}
		})
	}
}

// reportDrains records the results of drains.
func (r *nodeVersions) reportDrains(o *observed) {
	for i := range o.Nodes {
		n := &o.Nodes[i]
		if n.Cordon == decision.Uncordoned {
			delete(r.reportedDrains, n.Name)
			continue
		}
		switch obj := o.nodes[n.Name]; {
		case n.Drained:
			once(r.reportedDrains, n.Name, "drained", func() {
				r.log.Info("node drained", "node", n.Name)
				r.event(obj, corev1.EventTypeNormal, "Drained", "Drain", "all pods are evicted")
			})
		case n.DrainBlocker != "":
			once(r.reportedDrains, n.Name, n.DrainBlocker, func() {
				r.log.Warn("drain blocked", "node", n.Name, "blocker", n.DrainBlocker)
				r.event(obj, corev1.EventTypeWarning, "DrainBlocked", "Drain", decision.Truncate(n.DrainBlocker, 500))
			})
		}
	}
	maps.DeleteFunc(r.reportedDrains, func(name, _ string) bool { return o.nodes[name] == nil })
}

// once calls tell if text differs from the last text for key.
func once(told map[string]string, key, text string, tell func()) {
	if told[key] != text {
		told[key] = text
		tell()
	}
}

func (r *nodeVersions) quiet(key string) { delete(r.told, key) }

// components is the content of a ConfigMap of components.
type components struct {
	version string
	component.Signed
}

// readComponents reads a components ConfigMap. The error of one that does not exist
// satisfies IsNotFound.
func (r *nodeVersions) readComponents(ctx context.Context, name string) (components, error) {
	var m corev1.ConfigMap
	if err := r.live.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: name}, &m); err != nil {
		return components{}, fmt.Errorf("read ConfigMap %s: %w", name, err)
	}
	c := components{version: m.Data["cluster-version"]}
	c.Statement = m.Annotations[v1alpha1.AnnotationStatement]
	if err := json.Unmarshal([]byte(m.Data["components"]), &c.List); err != nil {
		return components{}, fmt.Errorf("read ConfigMap %s: %w", name, err)
	}
	if text := m.Annotations[v1alpha1.AnnotationAgent]; text != "" {
		if err := json.Unmarshal([]byte(text), &c.Agent); err != nil {
			return components{}, fmt.Errorf("read ConfigMap %s: annotation %s: %w", name, v1alpha1.AnnotationAgent, err)
		}
	}
	return c, nil
}

// reportImpostors logs and records each impostor once, and again when its claim changes.
func (r *nodeVersions) reportImpostors(o *observed) {
	there := make(map[string]bool, len(o.Impostors))
	for i := range o.Impostors {
		n := &o.Impostors[i]
		there[n.Name] = true
		once(r.reportedImpostors, n.Name, n.Why(), func() {
			r.log.Warn("node rejected", "node", n.Name, "provider_id", n.ProviderID, "machine", n.Machine)
			if obj := o.nodes[n.Name]; obj != nil {
				r.event(obj, corev1.EventTypeWarning, "NodeRejected", "Verify", n.Why()+"; the operator ignores this Node: drain and delete it if it is not yours")
			}
		})
	}
	for name := range r.reportedImpostors {
		if !there[name] {
			delete(r.reportedImpostors, name)
		}
	}
}
