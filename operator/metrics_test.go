package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/yaml"

	"constellation/assets/render"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// figures returns the metrics of c: "name{label=value,...}" to value; of a histogram its count and
// sum.
func figures(t *testing.T, c ...prometheus.Collector) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	for _, f := range gathered(t, c...) {
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			name := f.GetName()
			if len(labels) > 0 {
				name += "{" + strings.Join(labels, ",") + "}"
			}
			switch {
			case m.Gauge != nil:
				out[name] = m.Gauge.GetValue()
			case m.Counter != nil:
				out[name] = m.Counter.GetValue()
			case m.Histogram != nil:
				out[name+" count"] = float64(m.Histogram.GetSampleCount())
				out[name+" sum"] = m.Histogram.GetSampleSum()
			}
		}
	}
	return out
}

func gathered(t *testing.T, c ...prometheus.Collector) []*dto.MetricFamily {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c...)
	all, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// freshGauges are not those of the process.
func freshGauges() *gauges {
	return &gauges{drained: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "constellation_drain_duration_seconds"}), emptying: map[string]bool{}}
}

func TestGaugesDescribeARollout(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	g := freshGauges()
	if got := figures(t, g); len(got) != 0 {
		t.Errorf("before the first round there are %v", got)
	}
	status := v1alpha1.NodeVersionStatus{
		Nodes:   v1alpha1.NodeCounts{Total: 6, UpToDate: 1, Outdated: 2, Donors: 1, Heirs: 1, AwaitingAnnotation: 1, Pending: 2},
		Groups:  []v1alpha1.GroupCounts{{Name: "workers", Role: v1alpha1.WorkerRole, Total: 6, UpToDate: 1, Ready: 5}},
		Budget:  3,
		Upgrade: &v1alpha1.UpgradeProgress{Phase: "apply", Started: metav1.NewTime(at.Add(-time.Minute))},
		Waiting: &v1alpha1.Waiting{Reason: "DrainBlocked", Since: metav1.NewTime(at.Add(-time.Hour))},
		Conditions: []metav1.Condition{
			{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: decision.ReasonRollout},
			{Type: v1alpha1.ConditionStalled, Status: metav1.ConditionTrue, Reason: "DrainBlocked"},
		},
	}
	w := decision.World{
		Now: at, Autoscaler: decision.Autoscaler{PausedByUs: true},
		Nodes: []decision.Node{
			{Name: "a", Cordon: decision.CordonedByUs, CordonedSince: at.Add(-40 * time.Second)},
			{Name: "b", Cordon: decision.CordonedByUs, CordonedSince: at.Add(-30 * time.Second), DrainBlocker: "budget web"},
			{Name: "c", Cordon: decision.CordonedByOthers, DrainBlocker: "whatever"},
			{Name: "d"},
		},
		Intents: []decision.Intent{
			{Name: "replace-0", Goal: v1alpha1.JoinGoal},
			{Name: "replace-1", Goal: v1alpha1.LeaveGoal, Machine: "m"},
			{Name: "machine-x", Goal: v1alpha1.LeaveGoal, Machine: "x"},
		},
	}
	g.set(status)
	g.observe(w)
	g.reconciled(at)
	want := map[string]float64{
		"constellation_nodes{class=up_to_date}": 1, "constellation_nodes{class=outdated}": 2, "constellation_nodes{class=donor}": 1,
		"constellation_nodes{class=heir}": 1, "constellation_nodes{class=mint}": 0, "constellation_nodes{class=awaiting_annotation}": 1,
		"constellation_nodes{class=obsolete}": 0, "constellation_nodes{class=invalid}": 0, "constellation_nodes{class=pending}": 2,
		"constellation_group_nodes{group=workers,role=Worker}": 6, "constellation_group_nodes_up_to_date{group=workers,role=Worker}": 1,
		"constellation_group_nodes_ready{group=workers,role=Worker}": 5,
		"constellation_target_reached":                               0,
		"constellation_condition{type=Ready}":                        0, "constellation_condition{type=Stalled}": 1,
		"constellation_surge_budget":                                         3,
		"constellation_waiting_since_timestamp_seconds{reason=DrainBlocked}": 1_799_996_400,
		"constellation_upgrade_phase{phase=download}":                        0, "constellation_upgrade_phase{phase=plan}": 0,
		"constellation_upgrade_phase{phase=apply}": 1, "constellation_upgrade_phase{phase=done}": 0, "constellation_upgrade_phase{phase=failed}": 0,
		"constellation_upgrade_started_timestamp_seconds": 1_799_999_940,
		"constellation_replacements_in_flight":            2,
		"constellation_pending_machines{goal=join}":       1, "constellation_pending_machines{goal=leave}": 2, "constellation_pending_machines{goal=upgrade}": 0,
		"constellation_draining_nodes":                   2,
		"constellation_blocked_drains":                   1,
		"constellation_autoscaler_paused":                1,
		"constellation_last_reconcile_timestamp_seconds": 1_800_000_000,
	}
	if d := cmp.Diff(want, figures(t, g)); d != "" {
		t.Errorf("during the rollout (-want +got):\n%s", d)
	}

	// A finished rollout leaves no series behind.
	g.set(v1alpha1.NodeVersionStatus{Nodes: v1alpha1.NodeCounts{Total: 1, UpToDate: 1}, Conditions: []metav1.Condition{
		{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: decision.ReasonUpToDate},
	}})
	g.observe(decision.World{Now: at})
	got := figures(t, g)
	for name := range got {
		if strings.Contains(name, "waiting_since") || strings.Contains(name, "phase") || strings.Contains(name, "group=") || strings.Contains(name, "Stalled") {
			t.Errorf("%s is still there", name)
		}
	}
	if got["constellation_target_reached"] != 1 || got["constellation_replacements_in_flight"] != 0 {
		t.Errorf("after the rollout: %v", got)
	}
}

func TestDrainsAreMeasuredOnce(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	ours := func(name string, drained bool) decision.Node {
		return decision.Node{Name: name, Cordon: decision.CordonedByUs, CordonedSince: start, Drained: drained}
	}
	g := freshGauges()
	for _, w := range []decision.World{
		{Now: start.Add(5 * time.Second), Nodes: []decision.Node{ours("a", false), ours("b", false), ours("c", false)}},
		{Now: start.Add(20 * time.Second), Nodes: []decision.Node{ours("a", true), ours("b", false), {Name: "c"}}},
		{Now: start.Add(25 * time.Second), Nodes: []decision.Node{ours("a", true), ours("b", false)}},
		{Now: start.Add(60 * time.Second), Nodes: []decision.Node{ours("b", true), ours("never seen full", true)}},
	} {
		g.observe(w)
	}
	want := map[string]float64{"constellation_drain_duration_seconds count": 2, "constellation_drain_duration_seconds sum": 80}
	if d := cmp.Diff(want, figures(t, g.drained)); d != "" {
		t.Errorf("drains (-want +got):\n%s", d)
	}
}

func TestActionsAndCallsAreCountedByResult(t *testing.T) {
	c, err := newCounters()
	if err != nil {
		t.Fatal(err)
	}
	c.actions.Reset()
	c.calls.Reset()
	nodes := schema.GroupResource{Resource: "nodes"}
	for _, err := range []error{nil, apierrors.NewConflict(nodes, "a", nil), fmt.Errorf("cordon: %w", apierrors.NewNotFound(nodes, "a")), context.Canceled, errors.New("x")} {
		c.action(decision.CordonNode, err)
	}
	c.action(decision.RemoveMember, nil)
	want := map[string]float64{
		"constellation_actions_total{kind=cordon,result=ok}": 1, "constellation_actions_total{kind=cordon,result=conflict}": 2,
		"constellation_actions_total{kind=cordon,result=cancelled}": 1, "constellation_actions_total{kind=cordon,result=error}": 1,
		"constellation_actions_total{kind=remove_etcd_member,result=ok}": 1,
	}
	if d := cmp.Diff(want, figures(t, c.actions)); d != "" {
		t.Errorf("actions (-want +got):\n%s", d)
	}
	for _, err := range []error{
		nil, cloud.ErrPartial, cloud.ErrNotFound, fmt.Errorf("list: %w", cloud.ErrThrottled), cloud.ErrDenied, cloud.ErrUnavailable,
		context.DeadlineExceeded, context.Canceled, errors.New("x"),
	} {
		c.cloudCall("get_instance", time.Now(), err)
	}
	calls := figures(t, c.calls)
	maps.DeleteFunc(calls, func(name string, _ float64) bool { return strings.HasSuffix(name, " sum") })
	want = map[string]float64{}
	for result, n := range map[string]float64{"ok": 1, "partial": 1, "not_found": 1, "throttled": 1, "denied": 1, "unavailable": 2, "cancelled": 1, "error": 1} {
		want["constellation_cloud_call_duration_seconds{result="+result+",verb=get_instance} count"] = n
	}
	if d := cmp.Diff(want, calls); d != "" {
		t.Errorf("calls (-want +got):\n%s", d)
	}
}

// TestMetricNamesFollowConventions runs Prometheus' linter.
func TestMetricNamesFollowConventions(t *testing.T) {
	problems, err := promlint.NewWithMetricFamilies(sampleMetrics(t)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// sampleMetrics returns at least one sample of each of the operator's own metrics.
func sampleMetrics(t *testing.T) []*dto.MetricFamily {
	t.Helper()
	now := time.Now()
	g := freshGauges()
	g.set(v1alpha1.NodeVersionStatus{
		Groups: []v1alpha1.GroupCounts{{Name: "workers"}}, Waiting: &v1alpha1.Waiting{Reason: "DrainBlocked"}, Upgrade: &v1alpha1.UpgradeProgress{Phase: "plan"},
		Conditions: []metav1.Condition{
			{Type: v1alpha1.ConditionReady}, {Type: v1alpha1.ConditionStalled}, {Type: v1alpha1.ConditionReconciling}, {Type: v1alpha1.ConditionOutdated},
		},
	})
	g.observe(decision.World{Now: now, Nodes: []decision.Node{{Name: "a", Cordon: decision.CordonedByUs}}})
	g.reconciled(now)
	c, err := newCounters()
	if err != nil {
		t.Fatal(err)
	}
	c.action(decision.CordonNode, nil)
	c.cloudCall("list_groups", now, nil)
	c.asked(now)
	all := gathered(t, g, g.drained, c.actions, c.calls, c.serving, c.client, c.steps)
	slices.SortFunc(all, func(a, b *dto.MetricFamily) int { return strings.Compare(a.GetName(), b.GetName()) })
	return all
}

// expressions returns the PromQL expressions of the chart's dashboard and alerts, by their location.
func expressions(t *testing.T) map[string]string {
	t.Helper()
	chart, err := render.Chart("constellation-operator", "v1.1.0", namespace, providers.LocalValues(), map[string]any{
		"release": "v1.1.0", "metrics": map[string]any{"dashboard": true, "prometheusOperator": true},
	})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, doc := range strings.Split(string(chart), "\n---\n") {
		var o struct {
			Kind     string
			Metadata struct{ Labels map[string]string }
			Data     map[string]string `json:"data"`
			Spec     struct {
				Groups []struct {
					Rules []struct{ Alert, Expr string } `json:"rules"`
				} `json:"groups"`
			} `json:"spec"`
		}
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			continue // a kind whose spec is another
		}
		for _, g := range o.Spec.Groups {
			for _, r := range g.Rules {
				out["alert "+r.Alert] = r.Expr
			}
		}
		if o.Metadata.Labels["grafana_dashboard"] == "" {
			continue
		}
		for name, text := range o.Data {
			var d struct {
				Panels []struct {
					Title   string
					Targets []struct{ RefID, Expr string }
				}
			}
			if err := json.Unmarshal([]byte(text), &d); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			for _, p := range d.Panels {
				for _, target := range p.Targets {
					out["panel "+p.Title+" "+target.RefID] = target.Expr
				}
			}
		}
	}
	return out
}

var (
	metricName = regexp.MustCompile(`\b(?:constellation|controller_runtime)_[a-z0-9_]+`)
	selector   = regexp.MustCompile(`\b((?:constellation|controller_runtime)_[a-z0-9_]+)\{([^}]*)\}`)
	matcher    = regexp.MustCompile(`^([a-z_]+)(=|!=|=~|!~)"([^"]*)"$`)
)

// TestDashboardAndAlertsUseExistingMetrics: every metric and label in their expressions is exported,
// and every label can have the values that they compare it with.
func TestDashboardAndAlertsUseExistingMetrics(t *testing.T) {
	labels := map[string]map[string][]string{} // of each series name: labels to values
	framework, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(framework, sampleMetrics(t)...) {
		all := labels[f.GetName()]
		if all == nil {
			all = map[string][]string{}
		}
		for _, m := range f.Metric {
			for _, l := range m.Label {
				all[l.GetName()] = append(all[l.GetName()], l.GetValue())
			}
		}
		labels[f.GetName()] = all
		if f.GetType() == dto.MetricType_HISTOGRAM {
			for _, s := range []string{"_bucket", "_sum", "_count"} {
				labels[f.GetName()+s] = all
			}
		}
	}
	// Shows nothing before a controller has failed.
	labels["controller_runtime_reconcile_errors_total"] = map[string][]string{"controller": nil}
	exprs := expressions(t)
	alerts, panels := 0, 0
	for where, e := range exprs {
		if strings.HasPrefix(where, "alert ") {
			alerts++
		} else {
			panels++
		}
		names := metricName.FindAllString(e, -1)
		if len(names) == 0 {
			t.Errorf("%s uses no metric: %s", where, e)
		}
		for _, n := range names {
			if labels[n] == nil {
				t.Errorf("%s uses %s, which does not exist", where, n)
			}
		}
		for _, s := range selector.FindAllStringSubmatch(e, -1) {
			for _, m := range strings.Split(s[2], ",") {
				parts := matcher.FindStringSubmatch(m)
				if parts == nil {
					t.Errorf("%s: %q is not a matcher", where, m)
					continue
				}
				if _, ok := labels[s[1]][parts[1]]; !ok {
					t.Errorf("%s: %s has no label %s", where, s[1], parts[1])
				}
				// Values that always exist; others, such as reasons, come and go.
				if parts[2] == "=" && !slices.Contains(labels[s[1]][parts[1]], parts[3]) {
					t.Errorf("%s: %s of %s is never %q", where, parts[1], s[1], parts[3])
				}
			}
		}
		for _, pair := range []string{"()", "{}", "[]"} {
			if strings.Count(e, pair[:1]) != strings.Count(e, pair[1:]) {
				t.Errorf("%s: brackets do not match: %s", where, e)
			}
		}
	}
	if alerts < 5 || panels < 10 {
		t.Errorf("found %d alerts and %d panels; are they still rendered?", alerts, panels)
	}
}

// TestMetricsAreDocumented: the document lists exactly the exported metrics.
func TestMetricsAreDocumented(t *testing.T) {
	b, err := os.ReadFile("../docs/operator-metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, f := range sampleMetrics(t) {
		want = append(want, f.GetName())
	}
	got := regexp.MustCompile("(?m)^\\| `(constellation_[a-z_]+)`").FindAllStringSubmatch(string(b), -1)
	var listed []string
	for _, m := range got {
		listed = append(listed, m[1])
	}
	slices.Sort(listed)
	if d := cmp.Diff(want, listed); d != "" {
		t.Errorf("docs/operator-metrics.md (-exported +listed):\n%s", d)
	}
	for where := range expressions(t) {
		if name, ok := strings.CutPrefix(where, "alert "); ok && !strings.Contains(string(b), "`"+name+"`") {
			t.Errorf("docs/operator-metrics.md does not mention %s", name)
		}
	}
}
