package engine_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/workspace"
)

// TestWatchSeesARollout watches while apply and the operator bring all nodes to the target,
// from the moment that the target is set, without a lock, a lease or a record of its own.
func TestWatchSeesARollout(t *testing.T) {
	s := newApplyStage(t)
	var list []plan.Event
	began, ended := make(chan bool), make(chan error, 1)
	_, _, err := s.apply(t.Context(), upgrade, func(ev plan.Event) {
		if ev.Kind != plan.KindStep || ev.Step != plan.StepRollout || ev.State != plan.StateRunning {
			return
		}
		go func() {
			told := false
			ended <- s.engine().Watch(t.Context(), engine.WatchRequest{}, func(ev plan.Event) {
				list = append(list, ev)
				if !told && ev.Kind == plan.KindProgress { // all nodes were reported
					told = true
					close(began)
				}
			})
		}()
		<-began
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	checkStream(t, list, nil)
	var b rollout.Board
	for _, ev := range list {
		b.Apply(ev)
		if ev.Kind == plan.KindProgress && len(ev.Counts) > 0 && ev.Object == "" && !cmp.Equal(ev.Counts, b.Counts()) {
			t.Errorf("event %d counts %v, the board %v", ev.Seq, ev.Counts, b.Counts())
		}
	}
	if !strings.Contains(b.To, "Kubernetes v1.36.3") || b.Outcome != "3 of 3 nodes at the target" || b.Exit != 0 {
		t.Errorf("to %q, it ended with %q, exit %d", b.To, b.Outcome, b.Exit)
	}
	if diff := cmp.Diff(map[string]int64{"ready": 3}, b.Counts()); diff != "" {
		t.Errorf("at the end (-want +got):\n%s", diff)
	}
	runs, err := os.ReadDir(filepath.Join(s.dir, plan.RunsDir))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range runs {
		if strings.HasPrefix(r.Name(), "watch") {
			t.Errorf("the watch left %s", r.Name())
		}
	}
}

func TestWatchOnce(t *testing.T) {
	s := newApplyStage(t)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(s.read(workspace.KubeconfigFile)), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name    string
		request engine.WatchRequest
		before  func()
		exit    int
		says    string
	}{
		{name: "of the workspace", request: engine.WatchRequest{Once: true}, says: "3 of 3 nodes at the target"},
		{name: "of a kubeconfig", request: engine.WatchRequest{Once: true, Kubeconfig: kubeconfig}, says: "3 of 3 nodes at the target"},
		{name: "no kubeconfig", request: engine.WatchRequest{Once: true, Kubeconfig: kubeconfig + "-none"}, exit: plan.ExitUsage, says: "no such file"},
		{name: "the API server does not answer", request: engine.WatchRequest{Once: true}, before: func() { s.cluster.SetDown(true) }, exit: plan.ExitFailed, says: "look at the rollout of demo"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.before != nil {
				tt.before()
			}
			var events []plan.Event
			err := s.engine().Watch(t.Context(), tt.request, func(ev plan.Event) { events = append(events, ev) })
			if plan.ExitCode(err) != tt.exit {
				t.Fatalf("exit %d, want %d: %v", plan.ExitCode(err), tt.exit, err)
			}
			if err != nil {
				if !strings.Contains(err.Error(), tt.says) || plan.Remedy(err) == "" {
					t.Errorf("error %v (remedy %q), want %s", err, plan.Remedy(err), tt.says)
				}
				return
			}
			checkStream(t, events, nil)
			if last := events[len(events)-1]; last.Text != tt.says {
				t.Errorf("it ended with %q, want %q", last.Text, tt.says)
			}
		})
	}
}

// A watch with only a kubeconfig has no configuration, and reports an outage with a remedy as well.
func TestWatchOfAKubeconfigReportsAnOutage(t *testing.T) {
	s := newApplyStage(t)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(s.read(workspace.KubeconfigFile)), 0o600); err != nil {
		t.Fatal(err)
	}
	s.must(s.cluster.SetNodeTarget(t.Context(), cluster.NodeTarget{Image: "x", ImageVersion: "v1.2.0", Kubernetes: "v1.36.4"}))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var outage plan.Event
	_ = s.engine().Watch(ctx, engine.WatchRequest{Kubeconfig: kubeconfig}, func(ev plan.Event) {
		switch {
		case ev.Kind == plan.KindProgress:
			s.cluster.SetDown(true)
		case ev.Kind == plan.KindWait && ev.Object == "api-server":
			outage = ev
			cancel()
		}
	})
	if !strings.Contains(outage.Text, "has not answered since") || outage.Remedy == "" {
		t.Errorf("the outage was reported as %+v", outage)
	}
}

// strangeTwin is a cluster that is looked at without a workspace. Unless it is managed, it has none
// of our kinds.
type strangeTwin struct {
	engine.Cluster
	managed bool
}

func (s *strangeTwin) Manages(ctx context.Context) (bool, error) {
	_, err := s.Version(ctx)
	return s.managed, err
}

func (s *strangeTwin) StuckDrains(context.Context) ([]plan.Finding, error) {
	return []plan.Finding{{ID: "stuck-drain", Title: "node worker-0 waits for pod a/b", Remedy: "remove it"}}, nil
}

func (s *strangeTwin) WatchNodes(ctx context.Context, changed func()) error {
	return s.WatchRollout(ctx, changed)
}

func (s *strangeTwin) NodeTarget(ctx context.Context) (cluster.NodeTarget, error) {
	if !s.managed {
		return cluster.NodeTarget{}, cluster.ErrAbsent
	}
	return s.Cluster.NodeTarget(ctx)
}

func (s *strangeTwin) Rollout(ctx context.Context) (cluster.Rollout, error) {
	if !s.managed {
		return cluster.Rollout{}, cluster.ErrAbsent
	}
	return s.Cluster.Rollout(ctx)
}

// TestWatchThatBeginsInAnOutage watches a cluster of a context whose API server does not answer at
// first. What the cluster is, is found by the first answer.
func TestWatchThatBeginsInAnOutage(t *testing.T) {
	for _, tt := range []struct {
		name    string
		managed bool
		logs    int    // how often the missing NodeVersion is mentioned
		until   string // text of the event that ends the watch
	}{
		{name: "others upgrade the cluster", logs: 1, until: "node worker-0 waits for pod a/b"},
		{name: "the cluster is ours", managed: true, until: "3 of 3 nodes at the target"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newApplyStage(t)
			s.cluster.SetRollout(func(r *cluster.Rollout) { r.Observed, r.Reached = true, true })
			if !tt.managed {
				nodes, err := s.cluster.Nodes(t.Context())
				s.must(err)
				cordoned := *nodes[0]
				cordoned.Cordoned = true
				s.cluster.PutNode(cordoned)
			}
			s.cluster.SetDown(true)
			w, err := workspace.OpenWorkspace(s.dir)
			s.must(err)
			e := engine.New(w, engine.Deps{Connect: func(context.Context, []byte) (engine.Cluster, error) {
				return &strangeTwin{Cluster: s.cluster, managed: tt.managed}, nil
			}})
			e.SetLimits(time.Second, time.Second, time.Second, time.Second, time.Second, time.Second)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			logs, found := 0, false
			err = e.Watch(ctx, engine.WatchRequest{Cluster: &cluster.Selected{Context: "prod", Kubeconfig: []byte(s.read(workspace.KubeconfigFile)), Access: cluster.Access{Kubeconfig: "/some/config"}}}, func(ev plan.Event) {
				if again := " --kubeconfig /some/config --context prod\""; ev.Kind == plan.KindResult && !tt.managed && !strings.Contains(string(ev.Data), again) {
					t.Errorf("no command to watch again in %s", ev.Data)
				}
				if strings.Contains(ev.Text, "no NodeVersion") {
					logs++
				}
				switch {
				case ev.Kind == plan.KindWait && ev.Object == "api-server":
					s.cluster.SetDown(false)
				case strings.Contains(ev.Text, tt.until):
					found = true
					cancel()
				}
			})
			if err != nil || !found || logs != tt.logs {
				t.Errorf("seen %t, %d notes about the NodeVersion, want %d: %v", found, logs, tt.logs, err)
			}
		})
	}
}

// Plans are reported once with the states of their nodes, then their changes, beside the rollout. A
// cluster without Plans is reported as well.
func TestWatchReportsPlans(t *testing.T) {
	s := newApplyStage(t)
	s.cluster.SetRollout(func(r *cluster.Rollout) { r.Observed, r.Reached = true, true })
	watch := func(change func(plan.Event)) (list []plan.Event) {
		t.Helper()
		err := s.engine().Watch(t.Context(), engine.WatchRequest{}, func(ev plan.Event) {
			if ev.Kind == plan.KindNodePlan || ev.Kind == plan.KindNode && ev.Node == "worker-0" || ev.Source == "plans" {
				list = append(list, plan.Event{Kind: ev.Kind, Object: ev.Object, State: ev.State, From: ev.From, To: ev.To, Text: ev.Text, Current: ev.Current, Total: ev.Total, Counts: ev.Counts})
			}
			change(ev)
		})
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	got := watch(func(plan.Event) {})
	want := []plan.Event{
		{Kind: plan.KindNode, To: plan.NodeReady},
		{Kind: plan.KindLog, Text: "there are no Plans: the cluster does not have the kind plans.upgrade.cattle.io"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("without Plans (-want +got):\n%s", diff)
	}
	p := cluster.NodePlan{
		Name: "a/b", Version: "v1", State: cluster.PlanApplying, Total: 3, Done: 1, Applying: 1, Pending: 1,
		Nodes: []cluster.NodePlanNode{{Name: "worker-0", State: plan.NodeDraining, Text: "drains"}},
	}
	s.cluster.SetPlans(p)
	got = watch(func(ev plan.Event) {
		if ev.Kind != plan.KindProgress { // all was reported
			return
		}
		switch {
		case p.Nodes == nil:
		case p.Nodes[0].State == plan.NodeDraining:
			p.Nodes = []cluster.NodePlanNode{{Name: "worker-0", State: plan.NodeUpgrading}}
		default:
			p.Nodes, p.State, p.Done, p.Applying, p.Pending = nil, cluster.PlanComplete, 3, 0, 0
		}
		s.cluster.SetPlans(p)
	})
	want = []plan.Event{
		{Kind: plan.KindNode, To: plan.NodeDraining, Text: "plan b: drains"},
		{Kind: plan.KindNodePlan, Object: "a/b", State: cluster.PlanApplying, Current: 1, Total: 3, Counts: map[string]int64{"done": 1, "applying": 1, "pending": 1}},
		{Kind: plan.KindNode, From: plan.NodeDraining, To: plan.NodeUpgrading, Text: "plan b"},
		{Kind: plan.KindNode, From: plan.NodeUpgrading, To: plan.NodeReady},
		{Kind: plan.KindNodePlan, Object: "a/b", State: cluster.PlanComplete, Current: 3, Total: 3, Counts: map[string]int64{"done": 3}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("with a Plan (-want +got):\n%s", diff)
	}
}

func TestReadRecordNamesBadLines(t *testing.T) {
	good := `{"seq":1,"time":"2026-11-21T07:05:01Z","kind":"hello"}`
	long := `{"text":"` + strings.Repeat("x", 17<<20) + `"}`
	text := strings.Join([]string{good, "", "no event", `{"kind":"node"}`, `{"seq":"x","time":"2026-11-21T07:05:01Z","kind":"node"}`, long, good, `{"seq":3,"time":"2026`}, "\n")
	n := 0
	bad, err := rollout.ReadRecord(strings.NewReader(text), func(plan.Event) error { n++; return nil })
	if err != nil || n != 2 {
		t.Errorf("%d events, %v, want 2", n, err)
	}
	var got []string
	for _, b := range bad {
		got = append(got, b.String())
	}
	want := []string{
		"line 3: it is not JSON, at character 2", "line 4: it is no event: it has no kind, or no time", "line 5: its seq is a string", "line 6: it is longer than 16 MB",
		"line 8: it is not JSON, at character 21",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("bad lines (-want +got):\n%s", diff)
	}
}

// TestPastRun reads what an upgrade has recorded.
func TestPastRun(t *testing.T) {
	s := newApplyStage(t)
	if _, _, err := s.apply(t.Context(), upgrade, nil); err != nil {
		t.Fatal(err)
	}
	e := s.engine()
	run, err := e.PastRun("last")
	if err != nil {
		t.Fatal(err)
	}
	if run.Verb != plan.VerbApply || run.Status != plan.StateDone || run.Exit != 0 || run.By == "" || !strings.HasPrefix(run.Tool, "constellation v") || run.TookMS <= 0 || run.Replaced != 3 || run.Failed != 0 {
		t.Errorf("run %+v", run.RunSummary)
	}
	var steps []string
	for _, st := range run.Steps {
		steps = append(steps, st.ID+" "+st.State)
	}
	if diff := cmp.Diff([]string{"backup done", "components done", "join-config done", "charts done", "set-target done", "wait-for-rollout done", "etcd-members done"}, steps); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
	var stages []string
	for _, st := range run.Stages {
		stages = append(stages, fmt.Sprint(st.State, " ", st.Machines))
	}
	if len(stages) == 0 || !strings.HasPrefix(stages[0], plan.NodeReplacing) {
		t.Errorf("stages %v", stages)
	}
	if b, err := json.Marshal(run); err != nil || bytes.Contains(b, []byte("null")) {
		t.Errorf("as JSON %s, %v: lists are never null", b, err)
	}
	for id, want := range map[string]string{"none": "this workspace has no record of it", "": "this workspace has no record of it"} {
		if _, err := e.PastRun(id); err == nil || !strings.Contains(err.Error(), want) || plan.ExitCode(err) != plan.ExitUsage {
			t.Errorf("run %q: %v", id, err)
		}
	}
	path, err := e.Record(run.ID[:len(run.ID)-3])
	if err != nil || filepath.Base(filepath.Dir(path)) != run.ID {
		t.Errorf("the record is %s, %v", path, err)
	}
}
