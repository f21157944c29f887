package console

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine"
	"constellation/engine/adopt"
	"constellation/engine/cloud"
	"constellation/engine/distribution"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
	"constellation/tui/view"
)

// adoptFake has fixed answers to an adoption.
type adoptFake struct {
	report            adopt.Report
	examineErr        error
	writeErr          error
	examined, written []string
	eng               *enginefake.Engine
}

func newAdoptFake() *adoptFake {
	return &adoptFake{
		report: adopt.Report{
			Context: "dev", Server: "https://dev.example", Name: "dev", Kubernetes: "v1.36.4", Distribution: distribution.Distribution{Name: "kubeadm", Title: "kubeadm"},
			Etcd:     adopt.Etcd{Mode: adopt.Stacked, Members: []string{"a"}, Version: "3.6.11"},
			Nodes:    []adopt.Node{{Name: "a", Address: "10.0.0.1", Role: cloud.ControlPlane, Kubernetes: "v1.36.4", Runtime: "containerd 2.1", Ready: true}},
			Findings: []plan.Finding{{ID: "join-tokens", Severity: plan.Info, Title: "1 bootstrap token of yours can join nodes"}},
			Would:    []string{"write a workspace"}, Never: []string{"certificates"}, Upgrade: adopt.Upgrade,
		},
		eng: &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus(), Plan: operatorPlan()},
	}
}

func operatorPlan() *plan.Plan {
	return &plan.Plan{ID: "adopt-1", Verb: plan.VerbAdopt, Cluster: "dev", Steps: []plan.Step{
		{ID: "inventory", Title: "List the machines in the cluster"},
		{ID: "machines", Title: "Install an agent on each machine"},
	}}
}

func (f *adoptFake) adoption(s *stage) *Adoption {
	return &Adoption{
		Examine: func(_ context.Context, name string, emit func(plan.Event)) (adopt.Report, error) {
			f.examined = append(f.examined, name)
			emit(plan.Event{Kind: plan.KindProgress, Text: "reading nodes"})
			return f.report, f.examineErr
		},
		Folder: func(r *adopt.Report) string { return "/home/ops/" + r.Name },
		Write: func(name string, r *adopt.Report) (Adopted, error) {
			f.written = append(f.written, name)
			return f.adopted(s), f.writeErr
		},
		Own: map[string]Adopted{},
	}
}

func (f *adoptFake) adopted(s *stage) Adopted {
	with := s.c.deps.Options
	with.Engine, with.Commands, with.Clusters = f.eng, view.CommandFormatter{Dir: "dev"}, nil
	return Adopted{Dir: "/home/ops/dev", Written: []plan.File{{Path: "/home/ops/dev/constellation-conf.yaml", Mode: "0644"}}, Options: with}
}

// adoptStageOf shows the check of a cluster that can be adopted.
func adoptStageOf(t *testing.T, f *adoptFake, w, h int, names ...string) *stage {
	t.Helper()
	all := (&kubeconfigFake{}).clusters(contextsFake(names...)...)
	s := clustersStage(t, all, w, h)
	all.Adopt = f.adoption(s)
	s.do(s.c.Init())
	s.c.View()
	s.settle()
	s.view([]string{"enter"})
	s.settle()
	return s
}

// later lets the user read a question before an answer.
func (s *stage) later() *stage {
	s.clock = s.clock.Add(time.Second)
	s.c.now = s.clock
	return s
}

// A cluster is examined, its workspace is written, and the operator is installed. Each step is confirmed, and
// the cursor is on the safe answer.
func TestAdoptInTheConsole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newAdoptFake()
		s := adoptStageOf(t, f, 100, 40, "dev")
		s.press("a")
		for _, want := range []string{"can be adopted", "1 bootstrap token of yours", "written to /home/ops/dev", "step 1 of 3", "adopt --context dev"} {
			if !strings.Contains(text(s), want) {
				t.Errorf("the report lacks %q:\n%s", want, text(s))
			}
		}
		s.c.h = 16
		s.view([]string{"G"})
		if last := s.c.adopt.most; last == 0 || s.c.adopt.first != last || !strings.Contains(text(s), fmt.Sprintf("line %d of %d", last+1, last+1)) {
			t.Errorf("the end of the report, line %d of %d:\n%s", s.c.adopt.first, last, text(s))
		}
		s.press("g")
		s.c.h = 40
		s.press("right", "enter")
		if len(f.written) > 0 || !strings.Contains(s.c.note, "read it first") {
			t.Fatalf("an Enter that was typed ahead wrote %q, note %q", f.written, s.c.note)
		}
		s.later().press("enter")
		if got := text(s); len(f.written) != 1 || !strings.Contains(got, "constellation-conf.yaml") || !strings.Contains(got, "adopt --undo") {
			t.Fatalf("wrote %q:\n%s", f.written, got)
		}
		s.later().press("right", "enter")
		if got := text(s); !strings.Contains(got, "Install an agent on each machine") || !strings.Contains(got, "constellation -C dev adopt --operator") || f.eng.Ran != 0 {
			t.Fatalf("the plan of the operator:\n%s", got)
		}
		s.later().press("right", "enter")
		if got := text(s); f.eng.Ran != 1 || !strings.Contains(got, "dev has the operator") {
			t.Fatalf("%d runs:\n%s", f.eng.Ran, got)
		}
		s.press("enter")
		if got := text(s); s.c.screen != s.c.overview || !strings.Contains(got, "control-plane-0") {
			t.Errorf("the home of the workspace:\n%s", got)
		}
	})
}

// The safe answer goes back. The workspace that was written stays, and the key installs the operator from then on.
func TestAdoptIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newAdoptFake()
		s := adoptStageOf(t, f, 100, 40, "dev", "other")
		before := s.c.deps.Commands
		s.press("a").later().press("enter")
		if s.c.screen != s.c.oneCluster || len(f.written) > 0 {
			t.Fatalf("the safe answer wrote %q", f.written)
		}
		s.press("a", "right").later().press("enter", "esc")
		if s.c.screen != s.c.oneCluster || !strings.Contains(s.c.note, "/home/ops/dev") || !strings.Contains(text(s), "dev") {
			t.Errorf("note %q:\n%s", s.c.note, text(s))
		}
		s.press("a") // plans now
		if len(f.examined) != 2 || s.c.adopt.stage != adoptPlanned || s.c.deps.Engine != Engine(f.eng) {
			t.Errorf("examined %q, stage %d", f.examined, s.c.adopt.stage)
		}
		s.press("esc")
		if s.c.deps.Commands != before || s.c.plan != nil || s.c.adopt.active {
			t.Error("the console still works in the workspace")
		}
		s.press("esc", "j", "enter", "a") // another cluster
		if len(f.examined) != 3 || f.examined[2] != "other" || s.c.adopt.stage != adoptExamined {
			t.Errorf("examined %q, stage %d", f.examined, s.c.adopt.stage)
		}
	})
}

// The screen shows findings in the way and errors, and the answer that would change something is off.
func TestAdoptStops(t *testing.T) {
	failed := &plan.Error{Op: "read the cluster", Err: errors.New("connection refused"), Remedy: "start the API server"}
	for _, tt := range []struct {
		name   string
		change func(*adoptFake)
		keys   []string // after the report
		want   string
	}{
		{name: "a blocking finding", change: func(f *adoptFake) {
			f.report.Findings = []plan.Finding{{ID: "etcd-member", Severity: plan.Block, Title: "an etcd member is not ready"}}
		}, want: "1 finding in the way"},
		{name: "a cluster that does not answer", change: func(f *adoptFake) { f.examineErr = failed }, want: "connection refused"},
		{name: "a folder of another cluster", change: func(f *adoptFake) { f.writeErr = failed }, keys: []string{"right", "enter"}, want: "connection refused"},
		{name: "a blocked plan", change: func(f *adoptFake) {
			f.eng.Plan.Findings = []plan.Finding{{ID: "nodes", Severity: plan.Block, Title: "a node is not Ready"}}
		}, keys: []string{"right", "enter", "right", "enter"}, want: "the plan is blocked"},
		{name: "a plan that fails", change: func(f *adoptFake) { f.eng.Plan, f.eng.PlanErr = nil, failed }, keys: []string{"right", "enter", "right", "enter"}, want: "connection refused"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newAdoptFake()
				tt.change(f)
				s := adoptStageOf(t, f, 80, 24, "dev")
				s.press("a")
				for _, k := range append(tt.keys, "right", "enter") {
					s.later().press(k)
				}
				if got := text(s); !strings.Contains(got, tt.want) || f.eng.Ran > 0 {
					t.Errorf("%d runs:\n%s", f.eng.Ran, got)
				}
				s.press("r", "esc")
				if s.c.screen != s.c.oneCluster {
					t.Errorf("Esc leads to %s", s.c.screen.title())
				}
			})
		})
	}
}

// A guarded cluster is not adopted before its name is typed.
func TestAdoptGuarded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newAdoptFake()
		s := adoptStageOf(t, f, 80, 24, "prod")
		s.press("a", "right").later().press("enter")
		if !strings.Contains(s.c.note, "guarded") || len(f.written) > 0 {
			t.Fatalf("note %q, wrote %q", s.c.note, f.written)
		}
		s.press("esc", "U", "p", "r", "o", "d", "enter", "a", "right").later().press("enter")
		if len(f.written) != 1 {
			t.Errorf("unlocked, it wrote %q:\n%s", f.written, text(s))
		}
	})
}

// The workspace of an adopted cluster offers the operator at once.
func TestOperatorInTheConsoleOfAnAdoptedCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newAdoptFake()
		s := adoptStageOf(t, f, 80, 24, "dev")
		maps.Copy(s.c.deps.Clusters.Adopt.Own, map[string]Adopted{"dev": f.adopted(s)})
		if !strings.Contains(text(s), "a operator") {
			t.Errorf("the key line:\n%s", text(s))
		}
		s.press("a")
		if got := text(s); !strings.Contains(got, "Install an agent on each machine") || len(f.examined) > 0 {
			t.Errorf("examined %q:\n%s", f.examined, got)
		}
	})
}
