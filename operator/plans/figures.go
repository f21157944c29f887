package plans

import (
	"errors"
	"maps"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"constellation/operator/api/upgradev1"
)

// figures are metrics of the Plans, from the last decision about each. No label names a node. It is
// safe for concurrent use.
type figures struct {
	decided, worked prometheus.Histogram

	mu    sync.Mutex
	plans map[string]upgradev1.PlanStatus
}

var (
	descNodes     = prometheus.NewDesc("constellation_plan_nodes", "Nodes of a Plan: total, done, applying and failed.", []string{"plan", "state"}, nil)
	descCondition = prometheus.NewDesc("constellation_plan_condition", "1 if the condition of the Plan is True, else 0.", []string{"plan", "type"}, nil)
	descWaiting   = prometheus.NewDesc("constellation_plan_waiting_since_timestamp_seconds", "Since when a Plan starts no more nodes, by reason; absent while it starts nodes.", []string{"plan", "reason"}, nil)
	descPolled    = prometheus.NewDesc("constellation_plan_channel_polled_timestamp_seconds", "When the channel of a Plan was last polled.", []string{"plan"}, nil)
)

func newFigures() (*figures, error) {
	histogram := func(name, help string) (prometheus.Histogram, error) {
		return register(prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: []float64{.0001, .00025, .0005, .001, .002, .003, .004, .005, .01, .025, .05, .1, .5}}))
	}
	decided, err := histogram("constellation_plan_decision_seconds", "Time to observe and decide about a Plan, without requests to the API server and without the actions.")
	if err != nil {
		return nil, err
	}
	worked, err := histogram("constellation_plan_decision_cpu_seconds", "Processor time to observe and decide about a Plan; the difference is time without a processor.")
	if err != nil {
		return nil, err
	}
	return register(&figures{decided: decided, worked: worked, plans: map[string]upgradev1.PlanStatus{}})
}

// stopwatch is a start time, in wall-clock time and in processor time of the thread.
type stopwatch struct {
	at  time.Time
	cpu time.Duration
}

// start starts a measurement. It locks the goroutine to its thread until stop.
func start() stopwatch {
	runtime.LockOSThread()
	return stopwatch{time.Now(), threadTime()}
}

// stop returns the elapsed time since start, and the processor time of the thread.
func (s stopwatch) stop() (took, worked time.Duration) {
	took, worked = time.Since(s.at), threadTime()-s.cpu
	runtime.UnlockOSThread()
	return took, worked
}

// threadTime returns the processor time of this thread; zero on systems without that data.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0
	}
	return time.Duration(t.Nano())
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

// set stores the decision about a Plan, and its duration.
func (f *figures) set(plan string, s upgradev1.PlanStatus, took, worked time.Duration) {
	f.decided.Observe(took.Seconds())
	f.worked.Observe(worked.Seconds())
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
