package operator

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// gauges are the metrics of the NodeVersion. All values are from the same round, the last one.
// There are none before the first round, so a replica that does not lead exports nothing. No label
// names a node or a machine, so the number of series does not grow with the cluster.
//
// It is safe for concurrent use.
type gauges struct {
	drained prometheus.Histogram

	mu       sync.Mutex
	status   *v1alpha1.NodeVersionStatus
	rollout  *rolloutCounts
	last     time.Time // of a round without an error
	emptying map[string]bool
}

// rolloutCounts are counts of a world that the status does not contain.
type rolloutCounts struct {
	inFlight, joining, leaving, upgrading, draining, blocked int
	autoscalerPaused                                         bool
}

var (
	descNodes      = desc("nodes", "Nodes of the cluster by class; every node is in exactly one, pending machines are not nodes.", "class")
	descGroup      = desc("group_nodes", "Nodes of a scaling group. Of many groups, the 16 that the status of the NodeVersion lists.", "group", "role")
	descGroupNew   = desc("group_nodes_up_to_date", "Nodes of a scaling group that are at the target.", "group", "role")
	descGroupReady = desc("group_nodes_ready", "Nodes of a scaling group that are Ready.", "group", "role")
	descReached    = desc("target_reached", "1 if every node is at the target of the NodeVersion, else 0.")
	descCondition  = desc("condition", "1 if the condition of the NodeVersion is True, else 0.", "type")
	descBudget     = desc("surge_budget", "How many more machines may be created now.")
	descWaiting    = desc("waiting_since_timestamp_seconds", "Since when the rollout makes no progress, by reason; absent while it progresses and when it is complete.", "reason")
	descPhase      = desc("upgrade_phase", "1 for the phase of the latest run of an agent that upgrades Kubernetes, 0 for the others; absent before the first run.", "phase")
	descStarted    = desc("upgrade_started_timestamp_seconds", "When the latest upgrade of Kubernetes began.")
	descInFlight   = desc("replacements_in_flight", "Replacements under way, each in a surge slot.")
	descPending    = desc("pending_machines", "Machines that are joining, leaving or being upgraded in place, by goal.", "goal")
	descDraining   = desc("draining_nodes", "Nodes that the operator cordoned and has not drained yet.")
	descBlocked    = desc("blocked_drains", "Nodes of those whose last eviction was refused.")
	descPaused     = desc("autoscaler_paused", "1 while the operator has paused the cluster autoscaler, else 0.")
	descLast       = desc("last_reconcile_timestamp_seconds", "When the operator last completed a reconciliation without an error.")

	// phases of an agent's run, as in UpgradeProgress.
	phases = []string{"download", "plan", "apply", "done", "failed"}
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("constellation_"+name, help, labels, nil)
}

// newGauges registers the gauges with controller-runtime's registry, or finds them there.
func newGauges() (*gauges, error) {
	drained, err := register(prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "constellation_drain_duration_seconds", Help: "Time from the cordon of a node until it was drained.",
		Buckets: []float64{1, 3, 10, 30, 60, 120, 300, 600, 900, 1800, 3600},
	}))
	if err != nil {
		return nil, err
	}
	return register(&gauges{drained: drained, emptying: map[string]bool{}})
}

func register[C prometheus.Collector](c C) (C, error) {
	err := metrics.Registry.Register(c)
	var known prometheus.AlreadyRegisteredError
	if errors.As(err, &known) {
		if same, ok := known.ExistingCollector.(C); ok {
			return same, nil
		}
	}
	return c, err
}

// set stores the status and decision of a round.
func (g *gauges) set(s v1alpha1.NodeVersionStatus) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.status = s.DeepCopy()
}

// observe stores counts of a round that the status lacks. It records the drain durations of nodes
// that are empty for the first time.
func (g *gauges) observe(w decision.World) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var c rolloutCounts
	for _, in := range w.Intents {
		if _, ok := decision.SurgeSlot(in.Name); ok {
			c.inFlight++
		}
		switch in.Goal {
		case v1alpha1.LeaveGoal:
			c.leaving++
		case v1alpha1.JoinGoal:
			c.joining++
		case v1alpha1.UpgradeGoal:
			c.upgrading++
		}
	}
	emptying := make(map[string]bool, len(g.emptying))
	for i := range w.Nodes {
		n := &w.Nodes[i]
		switch {
		case n.Cordon != decision.CordonedByUs:
		case !n.Drained:
			emptying[n.Name] = true
			c.draining++
			if n.DrainBlocker != "" {
				c.blocked++
			}
		case g.emptying[n.Name] && !n.CordonedSince.IsZero():
			g.drained.Observe(max(0, w.Now.Sub(n.CordonedSince).Seconds()))
		}
	}
	c.autoscalerPaused = w.Autoscaler.PausedByUs
	g.rollout, g.emptying = &c, emptying
}

// reconciled records that a round has ended without an error.
func (g *gauges) reconciled(now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.last = now
}

// Describe implements prometheus.Collector.
func (g *gauges) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descNodes, descGroup, descGroupNew, descGroupReady, descReached, descCondition, descBudget, descWaiting, descPhase, descStarted,
		descInFlight, descPending, descDraining, descBlocked, descPaused, descLast,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (g *gauges) Collect(out chan<- prometheus.Metric) {
	g.mu.Lock()
	defer g.mu.Unlock()
	put := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	if !g.last.IsZero() {
		put(descLast, seconds(g.last))
	}
	if r := g.rollout; r != nil {
		put(descInFlight, float64(r.inFlight))
		put(descPending, float64(r.joining), "join")
		put(descPending, float64(r.leaving), "leave")
		put(descPending, float64(r.upgrading), "upgrade")
		put(descDraining, float64(r.draining))
		put(descBlocked, float64(r.blocked))
		put(descPaused, is(r.autoscalerPaused))
	}
	s := g.status
	if s == nil {
		return
	}
	for class, n := range map[string]int32{
		"up_to_date": s.Nodes.UpToDate, "outdated": s.Nodes.Outdated, "donor": s.Nodes.Donors, "heir": s.Nodes.Heirs, "mint": s.Nodes.Mints,
		"awaiting_annotation": s.Nodes.AwaitingAnnotation, "obsolete": s.Nodes.Obsolete, "invalid": s.Nodes.Invalid, "pending": s.Nodes.Pending,
	} {
		put(descNodes, float64(n), class)
	}
	for _, c := range s.Groups {
		put(descGroup, float64(c.Total), c.Name, string(c.Role))
		put(descGroupNew, float64(c.UpToDate), c.Name, string(c.Role))
		put(descGroupReady, float64(c.Ready), c.Name, string(c.Role))
	}
	put(descReached, is(readyCondition(*s).Reason == decision.ReasonUpToDate))
	for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled, v1alpha1.ConditionOutdated} {
		for _, c := range s.Conditions {
			if c.Type == kind {
				put(descCondition, is(c.Status == metav1.ConditionTrue), kind)
			}
		}
	}
	put(descBudget, float64(s.Budget))
	if w := s.Waiting; w != nil {
		put(descWaiting, seconds(w.Since.Time), w.Reason)
	}
	if u := s.Upgrade; u != nil {
		for _, p := range phases {
			put(descPhase, is(p == u.Phase), p)
		}
		put(descStarted, seconds(u.Started.Time))
	}
}

func is(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func seconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }

// counters count what the operator does. It is safe for concurrent use.
type counters struct {
	actions *prometheus.CounterVec
	calls   *prometheus.HistogramVec
	serving *prometheus.CounterVec
	client  *prometheus.CounterVec
	steps   prometheus.Histogram
}

// asked counts a request to the API server. It measures the delay since woken, the arrival of the
// event that caused it, if that is known.
func (c *counters) asked(woken time.Time) {
	if !woken.IsZero() {
		c.steps.Observe(time.Since(woken).Seconds())
	}
}

// newCounters registers the counters with controller-runtime's registry, or finds them there.
func newCounters() (*counters, error) {
	var errs [5]error
	c := &counters{}
	c.actions, errs[0] = register(prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "constellation_actions_total", Help: "Actions of the operator by kind and result: ok, conflict, cancelled or error.",
	}, []string{"kind", "result"}))
	c.calls, errs[1] = register(prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "constellation_cloud_call_duration_seconds",
		Help:    "How long calls of the cloud's API took, by verb and result: ok, partial, not_found, throttled, denied, unavailable, cancelled or error.",
		Buckets: []float64{.005, .02, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
	}, []string{"verb", "result"}))
	c.serving, errs[2] = register(prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "constellation_serving_requests_total",
		Help: "Requests of kubelets for serving certificates by result: approved, denied, waiting (each time that one could not be judged yet) or left (not a kubelet's).",
	}, []string{"result"}))
	c.client, errs[3] = register(prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "constellation_client_requests_total",
		Help: "Requests of joining machines for their first client certificate by result: approved, denied, waiting (each time that one could not be judged yet) or left (not by a token of the join service).",
	}, []string{"result"}))
	c.steps, errs[4] = register(prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "constellation_event_to_action_duration_seconds",
		Help:    "Time from the arrival of an event until the resulting request to the API server. If a decision covers several events, the first one counts.",
		Buckets: []float64{.001, .0025, .005, .01, .015, .02, .025, .03, .04, .05, .075, .1, .15, .25, .5, 1, 2.5},
	}))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	// Counters start at zero, so that a query sees the first failure as an increase.
	for _, result := range verdictNames {
		c.serving.WithLabelValues(result)
		c.client.WithLabelValues(result)
	}
	for _, kind := range decision.ActionKinds() {
		c.actions.WithLabelValues(metricKind(kind), "ok")
		c.actions.WithLabelValues(metricKind(kind), "error")
	}
	return c, nil
}

func metricKind(k decision.ActionKind) string { return strings.ReplaceAll(k.String(), " ", "_") }

// action counts an action and its result. A conflict is not an error, because the next round decides
// again.
func (c *counters) action(k decision.ActionKind, err error) {
	result := "error"
	switch {
	case err == nil:
		result = "ok"
	case errors.Is(err, context.Canceled):
		result = "cancelled"
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err):
		result = "conflict"
	}
	c.actions.WithLabelValues(metricKind(k), result).Inc()
}

// cloudCall counts a call of the cloud that began at start, and its result.
func (c *counters) cloudCall(verb string, start time.Time, err error) {
	result := "error"
	switch {
	case err == nil:
		result = "ok"
	case errors.Is(err, context.Canceled):
		result = "cancelled"
	case errors.Is(err, cloud.ErrPartial):
		result = "partial"
	case errors.Is(err, cloud.ErrNotFound):
		result = "not_found"
	case errors.Is(err, cloud.ErrThrottled):
		result = "throttled"
	case errors.Is(err, cloud.ErrDenied):
		result = "denied"
	case errors.Is(err, cloud.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
		result = "unavailable"
	}
	c.calls.WithLabelValues(verb, result).Observe(time.Since(start).Seconds())
}

// countedCloud counts the requests to a cloud.
type countedCloud struct {
	cloudAPI
	counters *counters
}

func counted[T any](c *counters, verb string, ask func() (T, error)) (T, error) {
	start := time.Now()
	v, err := ask()
	c.cloudCall(verb, start, err)
	return v, err
}

func (c countedCloud) Groups(ctx context.Context) ([]cloud.Group, error) {
	return counted(c.counters, "list_groups", func() ([]cloud.Group, error) { return c.cloudAPI.Groups(ctx) })
}

func (c countedCloud) Instance(ctx context.Context, key string) (cloud.Instance, error) {
	return counted(c.counters, "get_instance", func() (cloud.Instance, error) { return c.cloudAPI.Instance(ctx, key) })
}

func (c countedCloud) Instances(ctx context.Context) ([]cloud.Instance, error) {
	return counted(c.counters, "list_instances", func() ([]cloud.Instance, error) { return c.cloudAPI.Instances(ctx) })
}

func (c countedCloud) CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error) {
	return counted(c.counters, "create_instances", func() ([]cloud.Instance, error) { return c.cloudAPI.CreateInstances(ctx, groupID, tokens) })
}

func (c countedCloud) DeleteInstances(ctx context.Context, keys []string) error {
	_, err := counted(c.counters, "delete_instances", func() (struct{}, error) { return struct{}{}, c.cloudAPI.DeleteInstances(ctx, keys) })
	return err
}

func (c countedCloud) SetGroupImage(ctx context.Context, groupID, image string) error {
	_, err := counted(c.counters, "set_group_image", func() (struct{}, error) { return struct{}{}, c.cloudAPI.SetGroupImage(ctx, groupID, image) })
	return err
}

// Describe implements describer, if the cloud does.
func (c countedCloud) Describe(ctx context.Context, ids []string) ([]cloud.Instance, error) {
	d, ok := c.cloudAPI.(describer)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return counted(c.counters, "get_instances", func() ([]cloud.Instance, error) { return d.Describe(ctx, ids) })
}
