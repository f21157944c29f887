package plans

import (
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"constellation/operator/api/upgradev1"
)

// figures are those of the Plans, as they were decided about last. No label names a node.
// It is safe for concurrent use.
type figures struct {
	decided prometheus.Histogram

	mu    sync.Mutex
	plans map[string]upgradev1.PlanStatus
}

var (
	descNodes     = prometheus.NewDesc("constellation_plan_nodes", "Nodes of a Plan: total, done, applying and failed.", []string{"plan", "state"}, nil)
	descCondition = prometheus.NewDesc("constellation_plan_condition", "1 if the condition of the Plan is True, else 0.", []string{"plan", "type"}, nil)
	descWaiting   = prometheus.NewDesc("constellation_plan_waiting_since_timestamp_seconds", "Since when a Plan takes no more nodes, and why; absent while it does.", []string{"plan", "reason"}, nil)
	descPolled    = prometheus.NewDesc("constellation_plan_channel_polled_timestamp_seconds", "When the channel of a Plan was asked last.", []string{"plan"}, nil)
)

func newFigures() (*figures, error) {
	h, err := register(prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "constellation_plan_decision_seconds", Help: "How long it took to look and to decide about a Plan, without what is asked of the API server before and done afterwards.",
		Buckets: []float64{.0001, .00025, .0005, .001, .002, .003, .004, .005, .01, .025, .05, .1, .5},
	}))
	if err != nil {
		return nil, err
	}
	return register(&figures{decided: h, plans: map[string]upgradev1.PlanStatus{}})
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

func (f *figures) set(plan string, s upgradev1.PlanStatus, took time.Duration) {
	f.decided.Observe(took.Seconds())
	f.mu.Lock()
	defer f.mu.Unlock()
	f.plans[plan] = s
}

func (f *figures) drop(plan string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.plans, plan)
}

// Describe implements prometheus.Collector.
func (f *figures) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descNodes, descCondition, descWaiting, descPolled} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (f *figures) Collect(out chan<- prometheus.Metric) {
	f.mu.Lock()
	plans := maps.Clone(f.plans)
	f.mu.Unlock()
	put := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for name, s := range plans {
		for _, c := range s.Conditions {
			is := 0.0
			if c.Status == "True" {
				is = 1
			}
			put(descCondition, is, name, c.Type)
		}
		o := s.Constellation
		if o == nil {
			continue
		}
		put(descNodes, float64(o.Counts.Total), name, "total")
		put(descNodes, float64(o.Counts.Done), name, "done")
		put(descNodes, float64(o.Counts.Applying), name, "applying")
		put(descNodes, float64(o.Counts.Failed), name, "failed")
		if o.Waiting != nil {
			put(descWaiting, float64(o.Waiting.Since.Unix()), name, o.Waiting.Reason)
		}
		if o.LastPolled != nil {
			put(descPolled, float64(o.LastPolled.Unix()), name)
		}
	}
}
