package tui

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/workspace"
	"constellation/tui/internal/enginefake"
)

// The plain printer writes one line for each change of a Plan.
func TestPlansInPlainOutput(t *testing.T) {
	var out bytes.Buffer
	p := newPlainPrinter(&guarded{w: &out}, nil, func() time.Time { return enginefake.Start })
	for _, ev := range enginefake.WithPlans(t) {
		if ev.Kind == plan.KindNodePlan {
			p.event(ev)
			p.event(ev)
		}
	}
	p.event(plan.Event{Time: enginefake.Start, Kind: plan.KindNodePlan, Object: "a/b", State: cluster.PlanFailed, Text: "Job a/c failed", Remedy: "mend it"})
	p.close()
	want := `07:06:10Z node-plan          complete  system-upgrade/os-patches 24.04: 8 of 8 nodes done
07:06:10Z node-plan          waiting   system-upgrade/k3s-agent v1.36.3-k3s1: 0 of 5 nodes done, 5 pending; Plan k3s-server is not complete
07:06:10Z node-plan          applying  system-upgrade/k3s-server v1.36.3-k3s1: 1 of 3 nodes done, 1 applying, 1 pending; exclusive
07:06:10Z node-plan          complete  system-upgrade/gone
07:06:10Z node-plan          gone      system-upgrade/gone deleted
07:05:01Z node-plan          FAILED    a/b: Job a/c failed; to do: mend it
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestWatchVerb runs the verb without a terminal.
func TestWatchVerb(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "events.jsonl")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	events := enginefake.RolloutOf(t, 5)
	var lines bytes.Buffer
	for _, ev := range events {
		jsonPrinter{&lines}.event(ev)
	}
	if _, err := f.Write(append(slices.Clone(lines.Bytes()), "no event\n"...)); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	const lacks = "The cluster has no NodeVersion: target, replacements and services are shown for clusters of constellation alone."
	others := slices.Insert(slices.Clone(events), 2, plan.Event{Time: enginefake.Start, Kind: plan.KindLog, Source: "watch", Level: "info", Text: lacks})
	denied := &plan.Error{Op: "look at the rollout of demo", Err: errors.New("denied by the API server"), Remedy: "ask for the right"}
	for _, tt := range []struct {
		name string
		args []string
		eng  enginefake.Engine
		exit int
		// out and stderr are parts of what is printed.
		out, stderr []string
	}{
		{name: "once", args: []string{"watch", "--once"}, eng: enginefake.Engine{Watched: enginefake.Until(events, 70*time.Second)}, out: []string{"cluster prod-eu", "In progress 2 of 8", "control-plane-1", "Nothing is stuck"}},
		{name: "once, as events", args: []string{"watch", "--once", "-o", "json"}, eng: enginefake.Engine{Watched: events}, out: []string{strings.SplitN(lines.String(), "\n", 2)[0], `"kind":"result"`}},
		{name: "live, until the end", args: []string{"watch"}, eng: enginefake.Engine{Watched: events}, out: []string{"07:05:22Z node               ready     control-plane-3", "done               ok "}},
		{name: "live, some of it", args: []string{"watch", "--filter", "node:worker-0004"}, eng: enginefake.Engine{Watched: events}, out: []string{"worker-0004", "done               ok "}},
		{name: "live, a cluster of others", args: []string{"watch"}, eng: enginefake.Engine{Watched: others}, out: []string{"07:05:01Z watch              info      " + lacks}},
		{name: "live, a cluster of others, some of it", args: []string{"watch", "--filter", "node:worker-0004"}, eng: enginefake.Engine{Watched: others}, out: []string{lacks}},
		{name: "once, a cluster of others", args: []string{"watch", "--once"}, eng: enginefake.Engine{Watched: others}, stderr: []string{lacks}},
		{name: "not allowed", args: []string{"watch", "--once"}, eng: enginefake.Engine{WatchErr: denied}, exit: 1, stderr: []string{"look at the rollout of demo", "ask for the right"}},
		{name: "invalid filter", args: []string{"watch", "--filter", "age:5"}, eng: enginefake.Engine{}, exit: 2, stderr: []string{"age>…"}},
		{name: "a record", args: []string{"watch", "--replay", path}, eng: enginefake.Engine{}, out: []string{"control-plane-3 (control-plane)", "done               ok "}, stderr: []string{"line " + fmt.Sprint(len(events)+1) + ": it is not JSON"}},
		{name: "a record, as events", args: []string{"watch", "--replay", path, "-o", "json"}, eng: enginefake.Engine{}, out: []string{lines.String()}},
		{name: "a record at a time", args: []string{"watch", "--replay", path + "@+70s", "--once"}, eng: enginefake.Engine{}, out: []string{"recorded, as of 2026-11-21 07:06:11Z", "In progress 2 of 8"}},
		{name: "a record of the workspace", args: []string{"watch", "--replay", "events.jsonl@07:06:11", "--once"}, eng: enginefake.Engine{Records: dir}, out: []string{"as of 2026-11-21 07:06:11Z"}},
		{name: "a record from a time on", args: []string{"watch", "--replay", path + "@+70s", "-o", "json"}, eng: enginefake.Engine{}, out: []string{from(events, 70*time.Second)}},
		{name: "a record from before its beginning", args: []string{"watch", "--replay", path + "@07:04:59", "-o", "json"}, eng: enginefake.Engine{}, out: []string{lines.String()}, stderr: []string{"2026-11-21 07:04:59Z is before the record: playing from its beginning at 2026-11-21 07:05:01Z"}},
		{name: "a record from after its end", args: []string{"watch", "--replay", path + "@+9h"}, eng: enginefake.Engine{}, exit: 2, stderr: []string{"2026-11-21 16:05:01Z is after the end: the record lasts from 2026-11-21 07:05:01Z to ", "pass a time such as"}},
		{name: "a clock time after its end", args: []string{"watch", "--replay", path + "@23:00"}, eng: enginefake.Engine{}, exit: 2, stderr: []string{"2026-11-21 23:00:00Z is after the end"}},
		{name: "a directory", args: []string{"watch", "--replay", dir}, eng: enginefake.Engine{}, exit: 2, stderr: []string{"is a directory", "history` lists the runs"}},
		{name: "no such record", args: []string{"watch", "--replay", filepath.Join(dir, "none")}, eng: enginefake.Engine{}, exit: 2, stderr: []string{"no such file"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, stderr, exit := runVerb(t, &tt.eng, tt.args...)
			if exit != tt.exit {
				t.Errorf("exit %d, want %d\n%s", exit, tt.exit, stderr)
			}
			for _, want := range tt.out {
				if !strings.Contains(out, want) {
					t.Errorf("stdout has no %q:\n%s", want, out)
				}
			}
			for _, want := range tt.stderr {
				if !strings.Contains(stderr, want) {
					t.Errorf("stderr has no %q:\n%s", want, stderr)
				}
			}
			if tt.name == "live, some of it" && strings.Contains(out, "worker-0003") {
				t.Errorf("the filter passed another node:\n%s", out)
			}
		})
	}
}

// from are the events of a record from a time on, behind its hello and plan, as lines.
func from(events []plan.Event, d time.Duration) string {
	var b bytes.Buffer
	for _, ev := range events {
		if ev.Kind == plan.KindHello || ev.Kind == plan.KindPlan || !ev.Time.Before(enginefake.Start.Add(d)) {
			jsonPrinter{&b}.event(ev)
		}
	}
	return b.String()
}

func runVerb(t *testing.T, eng *enginefake.Engine, args ...string) (stdout, stderr string, exit int) {
	t.Helper()
	var out, errs bytes.Buffer
	a := App{
		Release: "v1.1.0", Program: "constellation", Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Env: func(string) string { return "" },
		Now:    func() time.Time { return enginefake.Start.Add(70 * time.Second) },
		Engine: func(*workspace.Workspace, *slog.Logger) (Engine, error) { return eng, nil },
	}
	exit = a.Run(append([]string{"-C", t.TempDir()}, args...))
	return out.String(), errs.String(), exit
}

func TestHistoryVerb(t *testing.T) {
	eng := enginefake.Engine{
		RunList: []plan.RunSummary{
			{ID: "upgrade-20261121070501-1a2b3c4d", Verb: plan.VerbApply, Cluster: "demo", By: "ops@laptop", To: plan.Target{Release: "v1.1.0", Kubernetes: "v1.36.3"}, Started: enginefake.Start, Ended: enginefake.Start.Add(34 * time.Minute), Status: plan.StateDone},
			{ID: "init-20261120070501-00000000", Verb: plan.VerbInit, Cluster: "demo", Started: enginefake.Start.Add(-24 * time.Hour), Status: "interrupted", Exit: 7},
		},
	}
	eng.Past = rollout.PastRun{
		RunSummary: eng.RunList[0], Tool: "constellation v1.1.0", From: plan.Target{Kubernetes: "v1.35.4"}, TookMS: 34 * 60 * 1000, Nodes: 10, Replaced: 5, Failed: 1,
		Accepted: []plan.Finding{{ID: "local-data", Named: true, Severity: plan.Warn, Title: "2 volumes go with their nodes"}, {ID: "pdb", Severity: plan.Warn, Title: "a budget is tight"}},
		Steps:    []rollout.PastStep{{ID: "backup", Title: "Back up", State: "done", TookMS: 4100}, {ID: "wait-for-rollout", Title: "Wait until all nodes are new", State: "done", TookMS: 1_900_000}},
		Stages:   []rollout.PastStage{{State: "draining", Machines: 5, P50MS: 24000, P95MS: 61000}},
		Waits:    []rollout.PastWait{{Text: "a budget \x1b[2Jallows no eviction", Since: enginefake.Start.Add(5 * time.Minute), TookMS: 120_000}},
	}
	for name, args := range map[string][]string{"list": {"history"}, "list.json": {"history", "-o", "json"}, "run": {"history", "last"}, "run.json": {"history", "last", "-o", "json"}} {
		out, stderr, exit := runVerb(t, &eng, args...)
		if exit != 0 || stderr != "" {
			t.Errorf("%v: exit %d, %s", args, exit, stderr)
		}
		dir := strings.Split(out, "constellation -C ")
		for i := 1; i < len(dir); i++ { // the directory of the test
			_, rest, _ := strings.Cut(dir[i], " ")
			dir[i] = "DIR " + rest
		}
		enginefake.CheckGolden(t, "plain/history-"+name+".txt", strings.Join(dir, "constellation -C "))
	}
}
