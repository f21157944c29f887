package engine_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/kube/kubetest"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// withChart adds a chart called cni to the configuration, of that version, from the
// workspace's folder charts.
func (s *applyStage) withChart(version, more string) {
	s.Helper()
	s.Setenv("XDG_CACHE_HOME", s.TempDir())
	dir := filepath.Join(s.dir, "charts")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		s.Fatal(err)
	}
	digest := kubetest.PackChart(s.T, dir, "cni", map[string]string{
		"Chart.yaml":       "apiVersion: v2\nname: cni\nversion: " + version + "\n",
		"templates/a.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: cni}\n",
	})
	s.setCharts(fmt.Sprintf("charts:\n- {name: cni, namespace: kube-system, source: 'file:charts', version: %s, digest: '%s'%s}\n", version, digest, more))
}

// setCharts replaces what the configuration says about charts.
func (s *applyStage) setCharts(text string) {
	s.Helper()
	path := filepath.Join(s.dir, workspace.ConfigFile)
	b, err := os.ReadFile(path)
	if err != nil {
		s.Fatal(err)
	}
	before, _, _ := strings.Cut(string(b), "\ncharts:")
	if err := os.WriteFile(path, []byte(before+"\n"+text), 0o600); err != nil {
		s.Fatal(err)
	}
}

// execute plans and runs the charts alone.
func (s *applyStage) execute(r engine.ApplyRequest) (*plan.Plan, error) {
	s.Helper()
	e := s.engine()
	p, err := e.PlanExecute(s.Context(), r)
	if err != nil {
		return nil, err
	}
	return p, e.Run(s.Context(), p, func(plan.Event) {})
}

func TestChartsOfTheConfigurationAreAppliedWithTheOthers(t *testing.T) {
	s := newApplyStage(t)
	s.withChart("1.16.0", ", values: {replicas: 1, adminPassword: S3CR3T}")
	p, events, err := s.apply(t.Context(), upgrade, nil)
	if err != nil {
		t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
	}
	cni := cluster.Chart{Name: "cni", Namespace: "kube-system"}
	if n := s.cluster.Revisions(cni); n != 1 {
		t.Errorf("%d revisions of the chart", n)
	}
	if !slices.Contains(p.Changes.Charts, "cni 1.16.0 (new)") {
		t.Errorf("the plan changes %v", p.Changes.Charts)
	}
	// Unchanged it is left alone, silently.
	if _, err := s.execute(engine.ApplyRequest{}); plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("again: %v", err)
	}
	// Another version, with other values: the plan says which, and keeps the secret.
	s.withChart("1.17.4", ", values: {replicas: 2, adminPassword: S3CR3T2}, destructive: policies that were made by hand")
	p, err = s.execute(engine.ApplyRequest{})
	want := []plan.ChartChange{{
		Chart: "cni", Namespace: "kube-system", From: "1.16.0", To: "1.17.4", Destroys: []string{"policies that were made by hand"},
		Values: []plan.ValueChange{{Path: "adminPassword", Hidden: true}, {Path: "replicas", From: "1", To: "2"}},
	}}
	if d := cmp.Diff(want, p.Changes.ChartChanges); d != "" {
		t.Errorf("changes (-want +got):\n%s", d)
	}
	lines := []string{"chart cni 1.16.0 to 1.17.4, 2 values change"}
	if d := cmp.Diff(lines, p.Steps[len(p.Steps)-1].Details); d != "" {
		t.Errorf("what the step says (-want +got):\n%s", d)
	}
	// Data loss is accepted by its name only.
	named := p.Unacknowledged()
	if plan.ExitCode(err) != plan.ExitUnacknowledged || len(named) != 1 || named[0].ID != "destructive-cni" || !strings.Contains(named[0].Remedy, "`--ack destructive-cni`") || s.cluster.Revisions(cni) != 1 {
		t.Fatalf("not accepted: %v, %+v, %d revisions", err, named, s.cluster.Revisions(cni))
	}
	r := engine.ApplyRequest{}
	r.Acknowledge = []string{"destructive-cni"}
	if _, err := s.execute(r); err != nil || s.cluster.Revisions(cni) != 2 {
		t.Errorf("accepted: %v, %d revisions", err, s.cluster.Revisions(cni))
	}
	all, err := json.Marshal([]any{p, events})
	if err != nil || strings.Contains(string(all), "S3CR3T") {
		t.Errorf("the error has a secret: %v", err)
	}
}

// The release's controller executes Plans, unless the configuration disables it or another
// controller does so already.
func TestPlansHaveOneController(t *testing.T) {
	s := newApplyStage(t)
	s.cluster.SetOtherPlans("system-upgrade-controller")
	_, _, err := s.apply(t.Context(), upgrade, nil)
	if err != nil {
		t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
	}
	plans := func() any { return s.cluster.Values("constellation-system", "constellation-operator")["plans"] }
	off := map[string]any{"enabled": false}
	if d := cmp.Diff(any(off), plans()); d != "" {
		t.Errorf("beside another controller (-want +got):\n%s", d)
	}
	var told []plan.Finding
	p, err := s.execute(engine.ApplyRequest{})
	if plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("again: %v", err)
	}
	for _, f := range p.Findings {
		if f.ID == "plans-elsewhere" {
			told = append(told, f)
		}
	}
	if len(told) != 1 || told[0].Severity != plan.Warn || told[0].Command != "kubectl scale -n system-upgrade --replicas=0 deployment/system-upgrade-controller" {
		t.Errorf("told: %+v", told)
	}
	s.cluster.SetOtherPlans("")
	if _, err := s.execute(engine.ApplyRequest{}); err != nil || plans() != nil {
		t.Errorf("when that one is gone: %v, values %v", err, plans())
	}
	s.setCharts("plans: false\n")
	if p, err := s.execute(engine.ApplyRequest{}); err != nil || !cmp.Equal(any(off), plans()) || len(p.Findings) > 0 && p.Findings[0].ID == "plans-elsewhere" {
		t.Errorf("not wanted: %v, values %v", err, plans())
	}
}

func TestChartsThatCannotBeHadBlockBeforeTheFirstEffect(t *testing.T) {
	for _, tt := range []struct {
		name, text, title, remedy string
		spoil                     func(dir string) error
	}{
		{
			name: "a missing archive", title: "chart cni 1.16.0 cannot be fetched", remedy: "look at source, version and digest",
			spoil: func(dir string) error { return os.Remove(filepath.Join(dir, "charts", "cni-1.16.0.tgz")) },
		},
		{
			name: "an archive that was changed", title: "chart cni 1.16.0 cannot be fetched", remedy: "contact its publisher",
			spoil: func(dir string) error {
				return os.WriteFile(filepath.Join(dir, "charts", "cni-1.16.0.tgz"), []byte("x"), 0o600)
			},
		},
		{
			name: "a source that nobody serves", text: "charts:\n- {name: cni, namespace: n, source: 'https://127.0.0.1:1', version: 1.0.0, digest: 'sha256:" + strings.Repeat("a", 64) + "'}\n",
			title: "chart cni 1.0.0 cannot be fetched", remedy: "constellation release bundle",
		},
		{
			name: "the name of one of ours", text: "charts:\n- {name: constellation-operator, namespace: n, source: 'https://127.0.0.1:1', version: 1.0.0, digest: 'sha256:" + strings.Repeat("a", 64) + "'}\n",
			title: "release v1.1.0 has a chart named constellation-operator, too", remedy: "give it another name",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newApplyStage(t)
			s.withChart("1.16.0", "")
			if tt.text != "" {
				s.setCharts(tt.text)
			}
			if tt.spoil != nil {
				if err := tt.spoil(s.dir); err != nil {
					t.Fatal(err)
				}
			}
			p, events, err := s.apply(t.Context(), upgrade, nil)
			if p == nil || len(p.Blocked()) != 1 || plan.ExitCode(err) != plan.ExitBlocked {
				t.Fatalf("%+v: %v", p, err)
			}
			b := p.Blocked()[0]
			if b.ID != "chart-source" || b.Title != tt.title || !strings.Contains(b.Remedy, tt.remedy) || !strings.HasPrefix(b.Field, "charts[0].") {
				t.Errorf("%+v", b)
			}
			if done := steps(events); len(done) > 0 {
				t.Errorf("steps %v", done)
			}
		})
	}
}

// A bundle is enough where no source is reachable. An incomplete bundle is refused with a
// sentence.
func TestBundlesReplaceEverySource(t *testing.T) {
	s := newApplyStage(t)
	s.withChart("1.16.0", "")
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	pack := func(name string) (engine.BundleReport, []byte) {
		t.Helper()
		r, err := engine.MakeBundle(t.Context(), w, engine.BundleRequest{Out: filepath.Join(s.dir, name)})
		if err != nil {
			t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
		}
		b, err := os.ReadFile(r.File)
		if err != nil {
			t.Fatal(err)
		}
		return r, b
	}
	report, first := pack("bundle.tar")
	if _, second := pack("again.tar"); string(first) != string(second) {
		t.Error("the same contents made other bytes")
	}
	if len(report.Charts) != 1 || report.Charts[0].Name != "cni" || report.Bytes != int64(len(first)) || report.Feed != "" {
		t.Errorf("%+v", report)
	}
	// Elsewhere: no source, no cache.
	s.Setenv("XDG_CACHE_HOME", s.TempDir())
	if err := os.RemoveAll(filepath.Join(s.dir, "charts")); err != nil {
		t.Fatal(err)
	}
	r := upgrade
	if p, _, err := s.apply(t.Context(), r, nil); plan.ExitCode(err) != plan.ExitBlocked {
		t.Fatalf("without the bundle: %+v, %v", p, err)
	}
	bad := filepath.Join(s.dir, "bad.tar")
	if err := os.WriteFile(bad, first[:len(first)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	r.Feed = "bundle:" + bad
	if _, _, err := s.apply(t.Context(), r, nil); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), "it is not a complete bundle: it ends") || !strings.Contains(plan.Remedy(err), "copy it again") {
		t.Fatalf("half a bundle: %v", err)
	}
	r.Feed = "bundle:" + report.File
	if _, _, err := s.apply(t.Context(), r, nil); err != nil {
		t.Fatalf("with the bundle: %v (remedy %q)", err, plan.Remedy(err))
	}
	if n := s.cluster.Revisions(cluster.Chart{Name: "cni", Namespace: "kube-system"}); n != 1 {
		t.Errorf("%d revisions of the chart", n)
	}
}

func TestBundlesOfNothingAreNotMade(t *testing.T) {
	s := newApplyStage(t)
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(s.dir, "bundle.tar")
	if _, err := engine.MakeBundle(t.Context(), w, engine.BundleRequest{Out: out}); plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("nothing to carry: %v", err)
	}
	s.withChart("1.16.0", "")
	if _, err := engine.MakeBundle(t.Context(), w, engine.BundleRequest{Out: filepath.Join(s.dir, "no", "where")}); plan.Remedy(err) == "" {
		t.Errorf("no folder: %v", err)
	}
	if err := os.RemoveAll(filepath.Join(s.dir, "charts")); err != nil {
		t.Fatal(err)
	}
	s.Setenv("XDG_CACHE_HOME", s.TempDir())
	if _, err := engine.MakeBundle(t.Context(), w, engine.BundleRequest{Out: out}); err == nil || !strings.Contains(err.Error(), "chart") {
		t.Errorf("a chart that is missing: %v", err)
	}
	if _, err := os.Stat(out); !os.IsNotExist(err) {
		t.Errorf("a file was left: %v", err)
	}
}
