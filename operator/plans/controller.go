package plans

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"constellation/operator/api/upgradev1"
	"constellation/operator/nodelock"
	"constellation/operator/replica"
)

// controller carries out the Plans of one namespace.
type controller struct {
	Config
	client  client.Client
	live    client.Reader
	pods    corev1client.PodsGetter
	cache   cache.Cache
	events  *eventWriter
	figures *figures
	book    *book
	queue   workqueue.TypedRateLimitingInterface[string]
	lock    *nodelock.Lock
	leads   chan struct{} // closed when this replica acts
	noPatch atomic.Bool   // Nodes may be updated, and not patched

	mu      sync.Mutex
	answers map[string]*answer      // of channels, by Plan
	hashes  map[string]secretRecord // of Secrets
	cluster string                  // UID of kube-system
	tasks   tasks
}

// secretRecord is the hash of a version of a Secret.
type secretRecord struct{ version, hash string }

// answer is the last answer of a channel.
type answer struct {
	channel string
	version string
	err     error // of the last poll
	asked   time.Time
	asking  bool
	failed  int // in a row
}

func newController(c Config, mgr manager.Manager, f *figures) *controller {
	k := &controller{
		Config: c, client: mgr.GetClient(), live: mgr.GetAPIReader(), cache: mgr.GetCache(), events: newEventWriter(mgr.GetClient(), c.Name, c.Log), figures: f,
		queue:   workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](200*time.Millisecond, time.Minute)),
		answers: map[string]*answer{}, hashes: map[string]secretRecord{}, leads: make(chan struct{}),
	}
	k.book = newBook(labelValue(c.Name), c.now, func(plan string, after time.Duration) { k.queue.AddAfter(plan, after) })
	k.lock = nodelock.New(k.client, k.live, c.now)
	if k.Threads <= 0 {
		k.Threads = 2
	}
	return k
}

// watch connects the informers to the book.
func (k *controller) watch(ctx context.Context, c cache.Cache) error {
	var errs []error
	on := func(o client.Object, set func(any), gone func(any)) {
		errs = append(errs, inform(ctx, c, o, set, gone))
	}
	on(&upgradev1.Plan{}, func(o any) { k.book.setPlan(o.(*upgradev1.Plan), false) }, func(o any) { k.book.dropPlan(o.(*upgradev1.Plan).Name) })
	on(&corev1.Node{}, func(o any) { k.book.setNode(o.(*node), false) }, func(o any) { k.book.dropNode(o.(*node)) })
	on(&batchv1.Job{}, func(o any) { k.book.setJob(o.(*job), false) }, func(o any) { k.book.dropJob(o.(*job)) })
	// The content of Secrets is read when it is needed, and not cached.
	secrets := &metav1.PartialObjectMetadata{}
	secrets.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	on(secrets, func(o any) { s := o.(*metav1.PartialObjectMetadata); k.book.setSecret(s.Name, s.ResourceVersion) },
		func(o any) { k.book.setSecret(o.(*metav1.PartialObjectMetadata).Name, "") })
	return errors.Join(errs...)
}

// inform adds handlers to the informer of a kind: set for existing objects, gone for deleted ones.
func inform(ctx context.Context, c cache.Cache, o client.Object, set func(any), gone func(any)) error {
	i, err := c.GetInformer(ctx, o, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	_, err = i.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: set, UpdateFunc: func(_, obj any) { set(obj) },
		DeleteFunc: func(obj any) {
			if t, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
				obj = t.Obj
			}
			gone(obj)
		},
	})
	return err
}

// podsDenied is the pause after the API server denied access to pods.
const podsDenied = 30 * time.Second

// watchPods feeds pods into the book as soon as RBAC permits it. The state of pods is only reported
// and never affects decisions, so nothing waits for it. The roles of system-upgrade-controller permit
// to list pods and not to watch them, and an API server that starts denies everything for a moment.
func (k *controller) watchPods(ctx context.Context) {
	for said := false; ; {
		err := k.probePods(ctx)
		if !apierrors.IsForbidden(err) {
			// The last state of a deleted pod is kept.
			if err = inform(ctx, k.cache, &corev1.Pod{}, func(o any) { k.book.setPod(o.(*pod)) }, func(any) {}); err == nil {
				return
			}
		}
		if !said && ctx.Err() == nil {
			said = true
			k.Log.Warn("pods not watched, so the status of nodes lacks their state", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(podsDenied):
		}
	}
}

// probePods lists and watches pods once, as their informer does. An informer that may not do both
// logs an error again and again.
func (k *controller) probePods(ctx context.Context) error {
	pods, o := k.pods.Pods(k.Namespace), metav1.ListOptions{LabelSelector: ours(k.Name).String(), Limit: 1}
	if _, err := pods.List(ctx, o); err != nil {
		return err
	}
	o.Limit, o.TimeoutSeconds = 0, new(int64(1))
	w, err := pods.Watch(ctx, o)
	if err == nil {
		w.Stop()
	}
	return err
}

// Start implements manager.Runnable: it works until ctx ends.
func (k *controller) Start(ctx context.Context) error {
	if !k.cache.WaitForCacheSync(ctx) {
		return nil
	}
	if err := k.identify(ctx); err != nil {
		return err
	}
	for name := range k.book.names(k.Namespace) {
		k.queue.Add(name)
	}
	for range k.Threads {
		k.tasks.Go(func() {
			for {
				name, end := k.queue.Get()
				if end {
					return
				}
				k.one(ctx, name)
				k.queue.Done(name)
			}
		})
	}
	for range eventWriters {
		k.tasks.Go(func() { k.events.run(ctx) })
	}
	k.tasks.Go(func() { k.lock.Keep(ctx) })
	k.tasks.Go(func() { k.watchPods(ctx) })
	k.tasks.Go(func() { k.listenToDrains(ctx) })
	<-ctx.Done()
	k.queue.ShutDown()
	k.wait()
	return nil
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (*controller) NeedLeaderElection() bool { return true }

func (k *controller) wait() { k.tasks.Wait() }

// identify reads the cluster's identity that is sent to channels.
func (k *controller) identify(ctx context.Context) error {
	for {
		var ns corev1.Namespace
		err := k.live.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, &ns)
		switch {
		case err == nil:
			k.cluster = string(ns.UID)
			return nil
		case ctx.Err() != nil:
			return nil
		case apierrors.IsForbidden(err):
			return fmt.Errorf("read namespace %s, which identifies the cluster to channels: %w", metav1.NamespaceSystem, err)
		}
		k.Log.Warn("API server not reachable, will retry", "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(replica.RetryPeriod):
		}
	}
}

// one runs one round, and schedules the next one.
func (k *controller) one(ctx context.Context, name string) {
	again, err := k.round(ctx, name)
	switch {
	case ctx.Err() != nil:
	case apierrors.IsConflict(err):
		// Another writer was faster. Its write arrives as an event; the requeue is for the case that the
		// event has already arrived.
		k.queue.AddAfter(name, soon)
	case err != nil:
		k.Log.Warn("plan not processed, will retry", "plan", name, "err", err)
		k.queue.AddRateLimited(name)
	default:
		k.queue.Forget(name)
		if !again.IsZero() {
			k.queue.AddAfter(name, max(again.Sub(k.now()), time.Millisecond))
		}
	}
}

// round observes a Plan, decides and acts. It returns when the next round is due without an event.
func (k *controller) round(ctx context.Context, name string) (time.Time, error) {
	p := k.book.plan(name)
	if p == nil || p.DeletionTimestamp != nil {
		k.figures.drop(name)
		k.lock.Drop(k.holder(name))
		k.mu.Lock()
		delete(k.answers, name)
		k.mu.Unlock()
		return time.Time{}, k.releaseDeleted(ctx, name)
	}
	watch := start()
	v, ok, err := k.see(ctx, p)
	if err != nil || !ok {
		watch.stop()
		return v.polled, err
	}
	d := decide(v)
	took, worked := watch.stop()
	k.figures.set(name, d.status, took-v.asked, worked)
	if d.completes && len(d.marks) == 0 {
		if behind, err := k.behind(ctx, v); err != nil || behind {
			return k.now().Add(soon), err
		}
	}
	if d.lock {
		k.lock.Want(k.holder(name), func() { k.queue.Add(name) })
		if d.pass {
			k.lock.Pass(k.holder(name))
		}
	} else if len(d.status.Applying) == 0 {
		k.lock.Drop(k.holder(name))
	}
	if err := k.act(ctx, v, d); err != nil {
		// Check Jobs again that an earlier round has checked.
		for _, s := range v.suspects {
			k.book.suspect(name, s.job.name)
		}
		return time.Time{}, err
	}
	if next := k.nextPoll(p); !next.IsZero() {
		d.at(next)
	}
	return d.again, nil
}

// behind reports whether the API server has a Node to upgrade that the informer had not delivered before the decision. A
// Plan that was created together with its Nodes may be delivered before them, and is not complete.
func (k *controller) behind(ctx context.Context, v view) (bool, error) {
	if _, selectable := v.selector.Requirements(); !selectable {
		return false, nil
	}
	left := v.selector.DeepCopySelector()
	for _, r := range []struct {
		key  string
		op   selection.Operator
		vals []string
	}{
		{upgradev1.LabelOfPlan(v.plan.Name), selection.NotIn, []string{v.hash, upgradev1.Disabled}},
		{corev1.LabelHostname, selection.Exists, nil},
		{corev1.LabelHostname, selection.NotEquals, []string{""}},
	} {
		one, err := labels.NewRequirement(r.key, r.op, r.vals)
		if err != nil {
			return false, fmt.Errorf("select Nodes of Plan %s: %w", v.plan.Name, err)
		}
		left = left.Add(*one)
	}
	var nodes metav1.PartialObjectMetadataList
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	if err := k.live.List(ctx, &nodes, client.MatchingLabelsSelector{Selector: left}, client.Limit(1)); err != nil {
		return false, fmt.Errorf("list Nodes of Plan %s: %w", v.plan.Name, err)
	}
	return slices.ContainsFunc(nodes.Items, func(n metav1.PartialObjectMetadata) bool { return !k.book.hadNode(&v, n.Name, n.ResourceVersion) }), nil
}

func (k *controller) holder(plan string) string { return "plan " + k.Namespace + "/" + plan }

// see collects the input of the decision. ok is false during the first poll of a channel.
func (k *controller) see(ctx context.Context, p *upgradev1.Plan) (v view, ok bool, err error) {
	v = view{plan: p, now: k.now(), settings: k.Settings}
	if v.rules, v.invalid = validate(p); v.invalid == nil {
		for _, s := range p.Spec.Secrets {
			if !s.IgnoreUpdates && k.book.secret(s.Name) == "" {
				v.invalid = apierrors.NewNotFound(corev1.Resource("secrets"), s.Name)
			}
		}
	}
	if v.invalid != nil {
		return v, true, nil
	}
	switch {
	case p.Spec.Version != "":
		v.version = imageTag(p.Spec.Version)
	case p.Spec.Channel == "":
		v.unresolved = errUnresolvable
		return v, true, nil
	default:
		a := k.resolve(ctx, p)
		if a.asked.IsZero() {
			return view{}, false, nil // the answer starts a round of the Plan
		}
		v.version, v.polled, v.channel = imageTag(a.version), a.asked, a.channel
		switch {
		case a.version == "":
			v.unresolved = a.err
			return v, true, nil
		case a.err != nil:
			v.stale = a.err
		}
	}
	v.hash, err = latestHash(p, v.version, func(name string) (string, error) {
		begun := time.Now()
		defer func() { v.asked += time.Since(begun) }()
		return k.secretHash(ctx, name)
	})
	if apierrors.IsNotFound(err) {
		v.invalid = err
		return v, true, nil
	}
	if err != nil {
		return v, false, err
	}
	v.depends = k.awaited(p, v.version)
	v.mayLock, v.lock, v.lockTrouble = k.lock.State(k.holder(p.Name))
	v.awaited = k.lock.Awaited()
	k.book.arrange(p.Name, v.selector, v.hash)
	k.book.fill(&v)
	return v, true, nil
}

// secretHash returns the hash of a Secret. It reads the Secret only after a change.
func (k *controller) secretHash(ctx context.Context, name string) (string, error) {
	version := k.book.secret(name)
	k.mu.Lock()
	known, ok := k.hashes[name]
	k.mu.Unlock()
	if ok && known.version == version {
		return known.hash, nil
	}
	var s corev1.Secret
	if err := k.live.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: name}, &s); err != nil {
		return "", err
	}
	sum, err := secretHash(&s)
	if err != nil {
		return "", fmt.Errorf("hash Secret %s: %w", name, err)
	}
	k.mu.Lock()
	k.hashes[name] = secretRecord{s.ResourceVersion, sum}
	k.mu.Unlock()
	return sum, nil
}

// awaited returns why another Plan must be complete first; empty: none.
func (k *controller) awaited(p *upgradev1.Plan, version string) string {
	for _, name := range rollout(p).DependsOn {
		other := k.book.plan(name)
		if other == nil {
			return fmt.Sprintf("Plan %s, on which this one depends, does not exist", name)
		}
		i := slices.IndexFunc(other.Status.Conditions, func(c upgradev1.Condition) bool { return c.Type == upgradev1.ConditionComplete })
		switch o := other.Status.Constellation; {
		case i < 0 || other.Status.Conditions[i].Status != corev1.ConditionTrue, o == nil, o.ObservedGeneration != other.Generation, o.Counts.Done < o.Counts.Total:
			return fmt.Sprintf("Plan %s is not complete", name)
		case other.Spec.Channel != "" && other.Spec.Channel == p.Spec.Channel && other.Spec.Version == "" && p.Spec.Version == "" && other.Status.LatestVersion != version:
			return fmt.Sprintf("Plan %s has the same channel, and is still at %s", name, other.Status.LatestVersion)
		}
	}
	return ""
}

// resolve returns the last answer of a channel, and polls it in the background when a poll is due.
func (k *controller) resolve(ctx context.Context, p *upgradev1.Plan) answer {
	k.mu.Lock()
	defer k.mu.Unlock()
	a := k.answers[p.Name]
	if a == nil || a.channel != p.Spec.Channel {
		a = &answer{channel: p.Spec.Channel}
		// The answer that an earlier process received still counts.
		if o := p.Status.Constellation; o != nil && o.LastPolled != nil && o.PolledChannel == a.channel && resolved(p) {
			a.version, a.asked = p.Status.LatestVersion, o.LastPolled.Time
		}
		k.answers[p.Name] = a
	}
	if due := a.due(k.Settings.PollingInterval); !a.asking && !k.now().Before(due) {
		a.asking = true
		current, ca := p.Status.LatestVersion, rollout(p).CABundle
		k.tasks.Go(func() {
			version, err := askChannel(ctx, a.channel, current, k.cluster, ca)
			k.mu.Lock()
			a.asking, a.err, a.asked = false, err, k.now()
			if err == nil {
				a.version, a.failed = version, 0
			} else {
				a.failed++
			}
			k.mu.Unlock()
			if ctx.Err() == nil {
				k.queue.Add(p.Name)
			}
		})
	}
	return *a
}

// due returns the time of the next poll: sooner after a failure, with backoff.
func (a *answer) due(interval time.Duration) time.Time {
	switch {
	case a.asked.IsZero():
		return time.Time{}
	case a.err != nil:
		return a.asked.Add(min(interval, 5*time.Second<<min(a.failed, 10)))
	}
	return a.asked.Add(interval)
}

func resolved(p *upgradev1.Plan) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == upgradev1.ConditionResolved {
			return c.Status == corev1.ConditionTrue && c.Reason == reasonChannel
		}
	}
	return false
}

// nextPoll returns the time of the next poll of a Plan's channel; zero: never.
func (k *controller) nextPoll(p *upgradev1.Plan) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	a := k.answers[p.Name]
	if a == nil || p.Spec.Version != "" || p.Spec.Channel != a.channel || a.asking {
		return time.Time{}
	}
	return a.due(k.Settings.PollingInterval)
}

// releaseDeleted cleans up after a deleted Plan: it ends its Jobs, and then uncordons its nodes.
func (k *controller) releaseDeleted(ctx context.Context, name string) error {
	jobs := k.book.jobsOfPlan(name)
	for _, j := range jobs {
		if err := k.deleteJob(ctx, j); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(jobs, func(j *job) bool { return j.phase == jobActive }) {
		return nil // their end starts the next round
	}
	cordoned, waited := k.book.marked(k.Namespace, name)
	for _, n := range waited {
		if err := k.mark(ctx, mark{node: upgraded{node: n}, waits: new("")}); err != nil {
			return err
		}
	}
	for _, n := range cordoned {
		if err := k.mark(ctx, mark{node: upgraded{node: n}, uncordon: n.unschedulable, cordonedFor: new("")}); err != nil {
			return err
		}
		k.Log.Info("node released", "node", n.name, "plan", name)
	}
	return nil
}
