package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// TestMain runs this test binary as the program in scripts, with a sandbox in memory.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"constellation": func() { os.Exit(fakeParts().app().Main()) }})
}

// fakeParts are parts without machines. With FAKE_PACKAGES the computer lacks packages.
func fakeParts() *parts {
	return &parts{
		kubernetes: []string{"v1.35.4", "v1.36.3"}, images: []string{"v1.1.0", "v1.0.0"}, releases: []string{"v1.1.0", "v1.0.0"},
		faults: []string{"quota=", "registry-empty"},
		sandbox: func(*slog.Logger) (engine.Sandbox, error) {
			_, err := os.Stat(".fake-sandbox")
			return &rememberedSandbox{fakeSandbox{running: err == nil, needs: os.Getenv("FAKE_PACKAGES") != ""}}, nil
		},
		drills: func(*slog.Logger) (engine.Drills, error) { return fakeDrills{}, nil },
		daemon: func(_ context.Context, name string, log *slog.Logger) error {
			log.Info("daemon started", "name", name)
			return nil
		},
	}
}

// start is the time of the fake sandbox's first event.
var start = time.Date(2026, 11, 21, 7, 5, 1, 0, time.UTC)

// rememberedSandbox is a fake whose state survives from one command to the next.
type rememberedSandbox struct{ fakeSandbox }

func (r *rememberedSandbox) Up(ctx context.Context, spec engine.SandboxSpec, emit func(plan.Event)) (workspace.SandboxInfo, error) {
	info, err := r.fakeSandbox.Up(ctx, spec, emit)
	if err == nil {
		err = os.WriteFile(".fake-sandbox", nil, 0o600)
	}
	return info, err
}

func (r *rememberedSandbox) Down(ctx context.Context, name string, emit func(plan.Event)) error {
	if err := r.fakeSandbox.Down(ctx, name, emit); err != nil {
		return err
	}
	return os.RemoveAll(".fake-sandbox")
}

// fakeSandbox is a sandbox in memory.
type fakeSandbox struct {
	needs   bool // packages, until Install is set
	running bool
	spec    engine.SandboxSpec
	status  *engine.SandboxStatus // if set, what Status returns
}

var errNoSandbox = fmt.Errorf("%w: there is no such sandbox", cloud.ErrNotFound)

func (f *fakeSandbox) Up(_ context.Context, spec engine.SandboxSpec, emit func(plan.Event)) (workspace.SandboxInfo, error) {
	f.spec = spec
	emit(plan.Event{Time: start, Kind: plan.KindStep, Step: "check-computer", State: plan.StateRunning, Text: "Check this computer"})
	if f.needs && !spec.Install {
		err := &plan.Error{Op: "start sandbox demo", Err: errors.New("the Debian packages runc and swtpm are missing"), Remedy: "apt-get install runc swtpm", Exit: plan.ExitUnacknowledged}
		emit(plan.Event{Time: start, Kind: plan.KindStep, Step: "check-computer", State: plan.StateFailed, Text: err.Error()})
		return workspace.SandboxInfo{}, err
	}
	emit(plan.Event{Time: start.Add(time.Second), Kind: plan.KindStep, Step: "check-computer", State: plan.StateDone, Text: "it can run these machines", TookMS: 1000})
	for i, n := range []string{"control-plane-0", "worker-0"} {
		emit(plan.Event{Time: start.Add(time.Duration(2+i) * time.Second), Kind: plan.KindNode, Node: n, From: plan.NodeCreating, To: "ready"})
	}
	f.running = true
	return workspace.SandboxInfo{Name: "demo", Kubernetes: "v1.35.4", Image: "v1.1.0", ControlPlanes: 1, Workers: 1}, nil
}

func (f *fakeSandbox) Down(_ context.Context, _ string, emit func(plan.Event)) error {
	emit(plan.Event{Time: start, Kind: plan.KindStep, Step: "remove-machines", State: plan.StateDone, Text: "nothing is left", TookMS: 400})
	f.running = false
	return nil
}

func (f *fakeSandbox) Status(context.Context, string) (engine.SandboxStatus, error) {
	if f.status != nil {
		return *f.status, nil
	}
	if !f.running {
		return engine.SandboxStatus{}, &plan.Error{Op: "look at sandbox demo", Err: errNoSandbox, Remedy: "start it with `constellation sandbox up`"}
	}
	return engine.SandboxStatus{
		SandboxInfo: workspace.SandboxInfo{Name: "demo", Kubernetes: "v1.35.4", Image: "v1.1.0", Release: "v1.1.0", ClusterEndpoint: "127.0.0.1:41943", InitEndpoint: "127.0.0.1:43871"},
		State:       "running", KubernetesVersions: []string{"v1.35.4"}, Faults: f.spec.Faults,
		Machines: []engine.SandboxMachine{
			{Name: "control-plane-0", Group: "control-plane", IP: "10.42.0.2", Image: "v1.1.0", Boot: "ready"},
			{Name: "worker-0", Group: "workers", IP: "10.42.0.3", Image: "v1.1.0", Boot: "failed", Message: "no \x1b[31mmetadata\x1b[0m"},
		},
	}, nil
}

func (f *fakeSandbox) Exec(_ context.Context, _, machine string, command []string, _ io.Reader, stdout, _ io.Writer, _ bool) (int, error) {
	if machine != "worker-0" {
		return 0, &plan.Error{Op: "run command in " + machine, Err: errors.New("no such machine"), Exit: plan.ExitUsage}
	}
	fmt.Fprintln(stdout, strings.Join(command, " "))
	return len(command), nil
}

func (f *fakeSandbox) Fetch(_ context.Context, version string, from engine.FetchOptions, emit func(plan.Event)) error {
	if from != (engine.FetchOptions{}) {
		emit(plan.Event{Time: start, Kind: plan.KindLog, Step: "build-kubernetes", Source: "sandbox", Level: "warn", Text: fmt.Sprintf("from source %t, mirror %q", from.FromSource, from.Mirror)})
	}
	emit(plan.Event{Time: start, Kind: plan.KindStep, Step: "build-kubernetes", State: plan.StateSkipped, Text: version + " is in the cache"})
	return nil
}

func (f *fakeSandbox) Power(_ context.Context, _ string, action engine.PowerAction, machines []string, emit func(plan.Event)) error {
	if len(machines) == 0 {
		machines = []string{"control-plane-0", "worker-0"}
	}
	emit(plan.Event{Time: start, Kind: plan.KindStep, Step: "switch-machines", State: plan.StateDone, Text: fmt.Sprintf("%s: %s", action, strings.Join(machines, ", "))})
	return nil
}

func (f *fakeSandbox) SetFaults(_ context.Context, _ string, faults []string) error {
	f.spec.Faults = faults
	return nil
}

func (f *fakeSandbox) FaultKinds(string) []engine.FaultKind {
	return []engine.FaultKind{{Name: "quota", Form: "quota=MACHINES", Does: "machine creation fails above this number"}, {Name: "registry-empty", Form: "registry-empty", Does: "it has no image"}}
}

// fakeDrills passes drills with an even seed and fails the others; seed 7 injects no fault.
type fakeDrills struct{}

func (fakeDrills) Faults() []engine.DrillFault {
	return []engine.DrillFault{{Name: "power-cut", Does: "a machine loses its power", Machines: []string{"real"}, Points: []string{"cordoned"}, InPlacePoints: []string{"upgrading", "upgraded"}}}
}

func (fakeDrills) Versions(spec engine.DrillSpec) (engine.DrillSpec, error) {
	spec.KubernetesFrom, spec.Kubernetes = cmp.Or(spec.KubernetesFrom, "v1.35.4"), cmp.Or(spec.Kubernetes, "v1.36.3")
	return spec, nil
}

func (fakeDrills) Drill(_ context.Context, spec engine.DrillSpec, tell func(string)) (engine.DrillReport, error) {
	tell("the upgrade \x1b[31mbegins")
	r := engine.DrillReport{
		Seed: spec.Seed, Machines: spec.Machines, InPlace: spec.InPlace, Cluster: "2 workers", Started: start, TookMS: 61250, RolledMS: 50000, Outcome: engine.DrillPassed,
		Injected: []engine.DrillInjection{
			{Fault: "power-cut", Point: "cordoned", Nth: 2, On: "worker-0", AtMS: 10000, EndMS: 12500},
			{Fault: "quota", Point: "going", Nth: 1, AtMS: -1, EndMS: -1},
		},
		Rules:   []engine.DrillRule{{Rule: "pairs"}, {Rule: "ready-floor", Excused: []string{"it was off (power-cut)"}}, {Rule: "etcd-voters", NotAsked: true}},
		Summary: []string{"makespan 50s"}, Repeat: []string{"sandbox", "drill", fmt.Sprint("--seed=", spec.Seed)},
	}
	if spec.KubernetesFrom == "v1.36.3" { // otherwise as an older program reports it
		r.KubernetesFrom, r.KubernetesTo = spec.KubernetesFrom, spec.Kubernetes
	}
	switch {
	case spec.Seed == 7:
		r.Outcome, r.Why = engine.DrillVoid, "nothing was tried"
	case spec.Seed%2 == 1:
		r.Outcome, r.Why = engine.DrillFailed, "pairs did not hold"
		r.Rules[0].Breaches = []string{"a and b"}
	}
	return r, nil
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("HOME", e.WorkDir)
			e.Setenv("LANG", "C.UTF-8")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// exits CODE COMMAND...: the command must end with that code.
			"exits": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) < 2 {
					ts.Fatalf("usage: exits code command...")
				}
				want, err := strconv.Atoi(args[0])
				ts.Check(err)
				err = ts.Exec(args[1], args[2:]...)
				var exit interface{ ExitCode() int }
				got := 0
				if errors.As(err, &exit) {
					got = exit.ExitCode()
				} else {
					ts.Check(err)
				}
				if got != want {
					ts.Fatalf("%v ended with %d, want %d", args[1:], got, want)
				}
			},
		},
		Deadline: time.Now().Add(2 * time.Minute),
	})
}

// statusText returns the output of `sandbox status`.
func statusText(t *testing.T, st engine.SandboxStatus) string {
	t.Helper()
	var out, errs bytes.Buffer
	p := fakeParts()
	p.sandbox = func(*slog.Logger) (engine.Sandbox, error) { return &fakeSandbox{status: &st}, nil }
	app := p.app()
	app.Stdin, app.Stdout, app.Stderr, app.Env = strings.NewReader(""), &out, &errs, func(string) string { return "" }
	if code := app.Run([]string{"sandbox", "status"}); code != 0 {
		t.Fatalf("sandbox status: exit code %d: %s", code, &errs)
	}
	return strings.TrimSpace(out.String())
}

func TestSandboxStatusNamesConsolesAndRemedy(t *testing.T) {
	machine := func(name, boot string) engine.SandboxMachine {
		return engine.SandboxMachine{Name: name, Boot: boot, Console: "/state/" + name + "/console.log"}
	}
	st := engine.SandboxStatus{State: "stopped", Machines: []engine.SandboxMachine{
		machine("worker-0", "ready"), machine("worker-1", "failed"), machine("worker-2", "stopped"),
	}}
	text := statusText(t, st)
	for want, there := range map[string]bool{
		"/state/worker-0/console.log": false, "/state/worker-1/console.log": true, "/state/worker-2/console.log": true, "sandbox up` restarts it and keeps the machines": true,
	} {
		if strings.Contains(text, want) != there {
			t.Errorf("%q: want %t in\n%s", want, there, text)
		}
	}
	st.State = "running"
	if text := statusText(t, st); strings.Contains(text, "restarts it") {
		t.Errorf("a running sandbox has a remedy to start it:\n%s", text)
	}
}

// Hollow machines are marked as simulated and summarised by group.
func TestSandboxStatusOfHollowMachines(t *testing.T) {
	st := engine.SandboxStatus{SandboxInfo: workspace.SandboxInfo{Name: "many", Hollow: true, Kubernetes: "v1.35.4"}, State: "running"}
	for n := range 500 {
		m := engine.SandboxMachine{Name: fmt.Sprint("worker-", n), Group: "workers", Boot: "ready", Image: "v1.0.0"}
		if n >= 480 {
			m.Boot, m.Image = "booting", "v1.1.0"
		}
		st.Machines = append(st.Machines, m)
	}
	text := statusText(t, st)
	lines := strings.Split(text, "\n")
	for _, want := range []string{"all machines are simulated: nothing runs in them", "Hollow machines 500", "480     ready     workers          v1.0.0", "20      booting   workers          v1.1.0"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if len(lines) > 10 {
		t.Errorf("%d lines for 500 machines:\n%s", len(lines), text)
	}
	st.State, st.Machines = "stopped", nil
	if text := statusText(t, st); !strings.Contains(text, "the daemon and the hollow cluster have ended") || strings.Contains(text, "keeps the machines") {
		t.Errorf("a stopped hollow sandbox prints\n%s", text)
	}
}
