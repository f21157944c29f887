package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/kube/kubetest"
	"constellation/engine/plan"
)

// told are the reports of a set: "probe done".
type told struct {
	mu    sync.Mutex
	lines []string
}

func (x *told) report(chart, state, text string, _, _ int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if state != plan.StateRunning {
		x.lines = append(x.lines, strings.TrimSpace(fmt.Sprintf("%s %s %s", chart, state, text)))
	}
}

func setOf(version string, charts ...string) engine.ChartSet {
	s := engine.ChartSet{Limit: 10 * time.Second}
	for _, c := range charts {
		name, needs, _ := strings.Cut(c, " after ")
		s.Charts = append(s.Charts, cluster.Chart{Name: name, Namespace: "n", Version: version, Needs: strings.Fields(needs)})
	}
	return s
}

// applied returns the charts that were applied, in order.
func applied(c *kubetest.Cluster) (out []string) {
	for _, call := range c.Calls() {
		if name, ok := strings.CutPrefix(call, "ApplyChart "); ok {
			out = append(out, name)
		}
	}
	return out
}

func TestChartsWaitForThoseThatTheyNeed(t *testing.T) {
	c := kubetest.New()
	set := setOf("1.0.0", "a", "b after a", "c after b a")
	set.Report = (&told{}).report
	if err := set.Apply(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"a", "b", "c"}, applied(c)); d != "" {
		t.Errorf("order (-want +got):\n%s", d)
	}
}

// Charts that do not depend on each other are installed concurrently: each call waits until all
// have begun.
func TestIndependentChartsAreInstalledConcurrently(t *testing.T) {
	c := kubetest.New()
	var all sync.WaitGroup
	all.Add(3)
	c.OnCall(func(call string) error {
		if strings.HasPrefix(call, "ApplyChart ") {
			all.Done()
			all.Wait()
		}
		return nil
	})
	set := setOf("1.0.0", "a", "b", "c")
	set.Report = (&told{}).report
	if err := set.Apply(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

func TestUnchangedChartsAreSkipped(t *testing.T) {
	c := kubetest.New()
	x := &told{}
	set := setOf("1.0.0", "a", "b")
	set.Report = x.report
	for range 2 {
		if err := set.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(x.lines)
	if d := cmp.Diff([]string{"a done 1.0.0", "a skipped 1.0.0, as before", "b done 1.0.0", "b skipped 1.0.0, as before"}, x.lines); d != "" {
		t.Errorf("told (-want +got):\n%s", d)
	}
	if n := len(applied(c)); n != 2 {
		t.Errorf("%d charts were applied, want 2", n)
	}
}

// If one chart of a set fails, all are rolled back: the one that was ready, the one that was
// being installed, and the new one, which is uninstalled.
func TestFailedSetOfChartsIsRolledBack(t *testing.T) {
	c := kubetest.New()
	old := setOf("1.0.0", "ready", "slow", "bad")
	old.Report = (&told{}).report
	if err := old.Apply(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	set := setOf("1.1.0", "ready", "fresh after ready", "slow", "bad after fresh")
	x := &told{}
	waits := make(chan struct{})
	var once sync.Once
	set.Report = func(chart, state, text string, ready, wanted int64) {
		x.report(chart, state, text, ready, wanted)
		if text == "deployment slow" {
			once.Do(func() { close(waits) })
		}
	}
	c.NeverReady(func(ch cluster.Chart) bool { return ch.Name == "slow" && ch.Version == "1.1.0" })
	c.OnCall(func(call string) error {
		if call == "ApplyChart bad" {
			<-waits
			return errors.New("deployment bad: not ready in time; revision 1 is back")
		}
		return nil
	})
	err := set.Apply(t.Context(), c)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"install chart bad: deployment bad: not ready in time", "chart slow is back at revision 1", "chart fresh was removed again", "chart ready is back at revision 1"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	for _, ch := range old.Charts {
		if ok, err := c.ChartCurrent(t.Context(), ch); !ok || err != nil {
			t.Errorf("chart %s is what it was: %t, %v", ch.Name, ok, err)
		}
	}
	if n, err := c.ChartRevision(t.Context(), set.Charts[1]); n != 0 || err != nil {
		t.Errorf("the new chart has revision %d, %v", n, err)
	}
	if !slices.Contains(x.lines, "ready stopped chart ready is back at revision 1") {
		t.Errorf("told %q", x.lines)
	}
}

// The first install of charts is not rolled back: the next run installs only the missing ones.
func TestFailedFirstInstallIsNotRolledBack(t *testing.T) {
	c := kubetest.New()
	c.OnCall(func(call string) error {
		if call == "ApplyChart bad" {
			return errors.New("not ready")
		}
		return nil
	})
	set := setOf("1.0.0", "good", "bad after good")
	set.Report = (&told{}).report
	if err := set.Apply(t.Context(), c); err == nil || strings.Contains(err.Error(), "removed") {
		t.Errorf("got %v", err)
	}
	if ok, err := c.ChartCurrent(t.Context(), set.Charts[0]); !ok || err != nil {
		t.Errorf("the chart that was ready: %t, %v", ok, err)
	}
}

// A run that is interrupted leaves the applied charts in place: no rollback.
func TestInterruptedSetOfChartsStays(t *testing.T) {
	c := kubetest.New()
	old := setOf("1.0.0", "a", "slow")
	old.Report = (&told{}).report
	if err := old.Apply(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	set := setOf("1.1.0", "a", "slow after a")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c.NeverReady(func(ch cluster.Chart) bool { return ch.Name == "slow" && ch.Version == "1.1.0" })
	set.Report = func(chart, state, text string, _, _ int64) {
		if chart == "slow" && text == "deployment slow" {
			cancel()
		}
	}
	if err := set.Apply(ctx, c); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if ok, err := c.ChartCurrent(t.Context(), set.Charts[0]); !ok || err != nil {
		t.Errorf("the new chart: %t, %v", ok, err)
	}
}

// A console that is killed at any moment of a set leaves behind a record of the previous
// revisions: if the next run fails, all charts are rolled back to those before the first run.
func TestPreviousRevisionsSurviveAKill(t *testing.T) {
	charts := []string{"a", "b after a", "c after b", "d after c"}
	for at := range 2 * len(charts) {
		t.Run(fmt.Sprintf("killed at effect %d", at), func(t *testing.T) {
			c := kubetest.New()
			old := setOf("1.0.0", "a", "b after a", "c after b") // d is new
			old.Report = (&told{}).report
			if err := old.Apply(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			// After the kill, the first run has no further effect.
			ctx, kill := context.WithCancel(t.Context())
			n := 0
			c.OnCall(func(call string) error {
				if strings.HasPrefix(call, "ApplyChart") || strings.HasPrefix(call, "SetChartSet") {
					if n++; n > at {
						kill()
						return context.Canceled
					}
				}
				return nil
			})
			set := setOf("2.0.0", charts...)
			set.Report = (&told{}).report
			if err := set.Apply(ctx, c); err == nil && at < 5 {
				t.Fatal("it was not killed")
			}
			c.OnCall(func(string) error { return nil })
			c.NeverReady(func(ch cluster.Chart) bool { return ch.Name == "d" && ch.Version == "3.0.0" })
			next := setOf("3.0.0", charts...)
			next.Report, next.Limit = (&told{}).report, 200*time.Millisecond
			err := next.Apply(t.Context(), c)
			if err == nil {
				t.Fatal("no error")
			}
			want := "1.0.0"
			if at >= 6 { // it had come to its end
				want = "2.0.0"
			}
			for _, ch := range old.Charts {
				got, err := c.CompareChart(t.Context(), ch)
				if err != nil || got.From != want {
					t.Errorf("chart %s is %s, want %s: %v", ch.Name, got.From, want, err)
				}
			}
			if n, err := c.ChartRevision(t.Context(), next.Charts[3]); err != nil || n != 0 && at < 6 {
				t.Errorf("chart d, which was not there, has revision %d: %v", n, err)
			}
			if before, err := c.ChartSet(t.Context()); before != nil || err != nil {
				t.Errorf("the previous revisions are still stored: %v, %v", before, err)
			}
		})
	}
}

func TestValuesAreComparedWithoutSecrets(t *testing.T) {
	from := map[string]any{
		"replicas": 1, "image": map[string]any{"tag": "v1", "pullPolicy": "Always"}, "gone": true, "same": []any{"a"},
		"db": map[string]any{"password": "one", "url": "postgres://db"}, "tls": map[string]any{"privateKey": map[string]any{"pem": "x"}},
		"env":  []any{map[string]any{"name": "API_TOKEN", "value": "t1"}, map[string]any{"name": "LEVEL", "value": "info"}},
		"keys": []string{"a"}, "monkey": "chimp",
	}
	to := map[string]any{
		"replicas": 2, "image": map[string]any{"tag": "v2", "pullPolicy": "Always"}, "new": map[string]any{}, "same": []any{"a"},
		"db": map[string]any{"password": "two", "url": "postgres://me:pw@db"}, "tls": map[string]any{"privateKey": map[string]any{"pem": "y"}},
		"env":  []any{map[string]any{"name": "API_TOKEN", "value": "t2"}, map[string]any{"name": "LEVEL", "value": "debug"}},
		"keys": []string{"a", "b"}, "monkey": "gibbon\x1b[2J",
	}
	var got []string
	for _, v := range engine.DiffValues(from, to) {
		got = append(got, v.String())
	}
	want := []string{
		"db.password: (hidden, changed)", "db.url: (hidden, changed)", "env[0].value: (hidden, changed)", `env[1].value: "info" to "debug"`,
		"gone: true (removed)", `image.tag: "v1" to "v2"`, `keys[1]: "b" (new)`, `monkey: "chimp" to "gibbon\u001b[2J"`, "new: {} (new)", "replicas: 1 to 2", "tls.privateKey.pem: (hidden, changed)",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// A set that times out between two charts is rolled back like any other failed set.
func TestSetOfChartsTimesOutBetweenTwoCharts(t *testing.T) {
	c := kubetest.New()
	old := setOf("1.0.0", "a", "b after a")
	old.Report = (&told{}).report
	if err := old.Apply(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	set := setOf("2.0.0", "a", "b after a")
	set.Limit = 300 * time.Millisecond
	over := make(chan struct{})
	time.AfterFunc(2*set.Limit, func() { close(over) })
	set.Report = func(chart, state, _ string, _, _ int64) {
		if chart == "a" && state == plan.StateDone {
			<-over // b may begin only then
		}
	}
	if err := set.Apply(t.Context(), c); err == nil || !strings.Contains(err.Error(), "chart a is back at revision 1") {
		t.Errorf("%v", err)
	}
}
