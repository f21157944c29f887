package tui

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// printed runs a verb without a terminal and returns what it wrote.
func printed(t *testing.T, e *enginefake.Engine, program string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = App{
		Release: "v1.1.0", Program: program, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs,
		Env: func(k string) string { return map[string]string{"LANG": "C.UTF-8"}[k] }, Now: func() time.Time { return enginefake.Start },
		Engine: func(*workspace.Workspace, *slog.Logger) (Engine, error) { return e, nil },
	}.Run(append([]string{"-C", t.TempDir()}, args...))
	return out.String(), errs.String(), code
}

// Output to a pipe has no width limit.
func TestPrintedOutputIsNotTruncated(t *testing.T) {
	st := enginefake.WordyStatus()
	st.Nodes[2].Name = "worker-in-a-group-with-a-name-that-is-longer-than-any-column-1"
	out, _, code := printed(t, &enginefake.Engine{StatusData: st}, "", "status")
	for _, want := range []string{st.Nodes[1].Message, st.Nodes[2].Name, st.Services[1].Message, "join-service is not ready: 0 of 1 pods: " + st.Health[0].Detail, "show more there"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is truncated in\n%s", want, out)
		}
	}
	if code != 0 || strings.Contains(out, "…") {
		t.Errorf("exit %d:\n%s", code, out)
	}

	h := enginefake.DemoHome(engine.StageConfigured)
	h.Problems = []plan.Finding{{Severity: plan.Block, Title: "cannot use constellation-state.yaml", Detail: strings.Repeat("a long story ", 20) + "with an end"}}
	h.Runs = []plan.RunSummary{{Verb: plan.VerbInit, Status: plan.StateFailed, Started: enginefake.Start, Text: strings.Repeat("another story ", 20) + "with an end"}}
	if out, _, _ := printed(t, &enginefake.Engine{HomeData: h}, "", "--non-interactive"); strings.Count(out, "with an end") != 2 {
		t.Errorf("home is truncated:\n%s", out)
	}
}

// A blocked plan prints its findings and no steps.
func TestBlockedPlanPrintsNoSteps(t *testing.T) {
	p := enginefake.PlanIn(t, enginefake.Recorded(t, "init"))
	if out, _, code := printed(t, &enginefake.Engine{Plan: p}, "", "init", "--non-interactive"); code != plan.ExitUnacknowledged || strings.Count(out, " would ") != 8 {
		t.Errorf("a plan to be accepted: exit %d\n%s", code, out)
	}
	p.Findings = []plan.Finding{{ID: "machines", Severity: plan.Block, Title: "group workers has 2 machines, and the configuration wants 5", Remedy: "write count: 2"}}
	out, errs, code := printed(t, &enginefake.Engine{Plan: p}, "", "init", "--non-interactive", "--yes")
	if code != plan.ExitBlocked || strings.Contains(out, " would ") || !strings.Contains(out, " check              BLOCK     group workers has 2 machines") {
		t.Errorf("a blocked plan: exit %d\n%s", code, out)
	}
	if !strings.Contains(errs, "fix     write count: 2") {
		t.Errorf("stderr says %q", errs)
	}
}

// Printed commands run from the current directory.
func TestCommandsCanBeCopied(t *testing.T) {
	events := enginefake.Recorded(t, "init")
	h := enginefake.DemoHome(engine.StageReady)
	h.Next = []engine.Suggestion{{Title: "Create the cluster", Command: "constellation init -C /home/ops/demo"}}
	h.Problems = []plan.Finding{{Severity: plan.Warn, Title: "old", Remedy: "run `constellation sandbox up`"}}
	out, _, _ := printed(t, &enginefake.Engine{HomeData: h, Plan: enginefake.PlanIn(t, events), Events: events}, "bin/constellation", "--non-interactive")
	if !strings.Contains(out, "next      bin/constellation init -C /home/ops/demo ") || !strings.Contains(out, "run `bin/constellation -C /") {
		t.Errorf("home prints\n%s", out)
	}
	out, errs, _ := printed(t, &enginefake.Engine{Plan: enginefake.PlanIn(t, events), Events: enginefake.Recorded(t, "stopped")}, "bin/constellation", "init", "--non-interactive", "--yes")
	if !strings.Contains(out, " resume                       bin/constellation init") {
		t.Errorf("a stopped run prints\n%s%s", out, errs)
	}
}

// A wait with a remedy is printed with the remedy, and so is its end.
func TestWaitWithARemedyAndItsEndArePrinted(t *testing.T) {
	p, err := json.Marshal(plan.Plan{ID: "r", Verb: plan.VerbInit, Cluster: "demo", Steps: []plan.Step{{ID: "charts", Title: "Install the services"}}})
	if err != nil {
		t.Fatal(err)
	}
	at := func(s int) time.Time { return enginefake.Start.Add(time.Duration(s) * time.Second) }
	out := plainOf(t, []plan.Event{
		{Time: at(0), Kind: plan.KindPlan, Data: p},
		{Time: at(0), Kind: plan.KindStep, Step: "charts", State: plan.StateRunning},
		{Time: at(1), Kind: plan.KindWait, Step: "charts", Object: "api-server", Text: "no answer since 07:05:01Z", Remedy: "run `constellation sandbox up`"},
		{Time: at(9), Kind: plan.KindWait, Step: "charts"},
		{Time: at(9), Kind: plan.KindWait, Step: "charts", Object: "nodes", Text: "worker-0 is joining"},
		{Time: at(9), Kind: plan.KindWait, Step: "charts"},
	})
	want := `07:05:01Z plan               ok        init demo: 1 step
07:05:01Z charts             start     Install the services
07:05:02Z charts             wait      no answer since 07:05:01Z; to do: run ` + "`constellation sandbox up`" + `
07:05:10Z charts             go on     wait ended after 8.0s
07:05:10Z charts             wait      worker-0 is joining
`
	if out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
}

func TestTruncatedPathsKeepTheFileName(t *testing.T) {
	for _, tt := range []struct {
		s    string
		w    int
		want string
	}{
		{s: "/home/ops/demo/constellation-admin.conf", w: 60, want: "/home/ops/demo/constellation-admin.conf"},
		{s: "/home/ops/demo/constellation-admin.conf", w: 30, want: "/hom…/constellation-admin.conf"},
		{s: "/home/ops/demo/constellation-admin.conf", w: 12, want: "/hom…in.conf"},
		{s: "a sentence that has an end that matters", w: 20, want: "a sente…that matters"},
		{s: "short", w: 2, want: "s…"},
	} {
		if got := term.CutMiddle(tt.s, tt.w, "…"); term.Width(got) > tt.w || got != tt.want {
			t.Errorf("%q in %d columns: %q, want %q", tt.s, tt.w, got, tt.want)
		}
	}
}

// Every command has an imperative short help of at most 60 characters, a long help and an
// example.
func TestHelp(t *testing.T) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if n := len(c.Short); n == 0 || n > 60 || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: short help %q has %d characters, want 1 to 60 without a period", c.CommandPath(), c.Short, n)
		}
		if !c.Hidden && (c.Long == "" || c.Example == "") {
			t.Errorf("%s has no long help or no example", c.CommandPath())
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s --%s has no usage", c.CommandPath(), f.Name)
			}
		})
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(rootCommand(newSession(App{Program: "constellation"})))
}
