package tui

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"constellation/engine"
	"constellation/internal/golden"
)

// TestMain runs this test binary as the program in scripts, with the real engine on a
// workspace or, if FAKE_RUN names a recorded run, with a fake engine.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"constellation": func() { os.Exit(fakeApp().Main()) }})
}

// fakeApp is the program without machines:
//
//	FAKE_RUN     file with the events of a recorded run, which init replays
//	FAKE_PACE    factor of its speed; 0 or unset: at once
//	FAKE_CHECK   file with the result of upgrade check
//	FAKE_HANGS   set: that check blocks before its first finding until it is cancelled
//	FAKE_STAGE   stage of the workspace that the fake engine reports
//	FAKE_PACKAGES  set: the sandbox misses packages
//	FAKE_PANIC   set: reading the workspace panics
func fakeApp() App {
	return App{
		Release: "v1.1.0", Kubernetes: []string{"v1.35.4", "v1.36.3"}, Images: []string{"v1.1.0", "v1.0.0"}, Releases: []string{"v1.1.0", "v1.0.0"},
		Faults: []string{"quota=", "registry-empty"},
		Engine: func(ws *engine.Workspace, log *slog.Logger) (Engine, error) {
			if os.Getenv("FAKE_RUN") != "" {
				return fakeRun(ws)
			}
			if name := os.Getenv("FAKE_CHECK"); name != "" {
				b, err := os.ReadFile(name)
				if err != nil {
					return nil, err
				}
				f := &fakeEngine{home: upgradeHome(), status: demoStatus()}
				if os.Getenv("FAKE_HANGS") != "" {
					f.checkPause = 1
				}
				return f, json.Unmarshal(b, &f.check)
			}
			return engine.New(ws, engine.Deps{Log: log, Sandbox: &fakeSandbox{}}), nil
		},
		Sandbox: func(*slog.Logger) (engine.Sandbox, error) {
			_, err := os.Stat(".fake-sandbox")
			return &rememberedSandbox{fakeSandbox{running: err == nil, needs: os.Getenv("FAKE_PACKAGES") != ""}}, nil
		},
		Drills: func(*slog.Logger) (engine.Drills, error) { return fakeDrills{}, nil },
		Daemon: func(ctx context.Context, name string, log *slog.Logger) error {
			log.Info("daemon started", "name", name)
			return nil
		},
	}
}

// rememberedSandbox is a fake whose state survives from one command to the next.
type rememberedSandbox struct{ fakeSandbox }

func (r *rememberedSandbox) Up(ctx context.Context, spec engine.SandboxSpec, emit func(engine.Event)) (engine.SandboxInfo, error) {
	info, err := r.fakeSandbox.Up(ctx, spec, emit)
	if err == nil {
		err = os.WriteFile(".fake-sandbox", nil, 0o600)
	}
	return info, err
}

func (r *rememberedSandbox) Down(ctx context.Context, name string, emit func(engine.Event)) error {
	if err := r.fakeSandbox.Down(ctx, name, emit); err != nil {
		return err
	}
	return os.RemoveAll(".fake-sandbox")
}

func fakeRun(ws *engine.Workspace) (*fakeEngine, error) {
	b, err := os.ReadFile(os.Getenv("FAKE_RUN"))
	if err != nil {
		return nil, err
	}
	f := &fakeEngine{home: demoHome(engine.StageReady), status: demoStatus(), panics: os.Getenv("FAKE_PANIC") != ""}
	if s := os.Getenv("FAKE_STAGE"); s != "" {
		f.home.Stage = engine.Stage(s)
	}
	f.home.Dir = ws.Dir()
	f.pace, _ = strconv.ParseFloat(os.Getenv("FAKE_PACE"), 64)
	for sc := bufio.NewScanner(bytes.NewReader(b)); sc.Scan(); {
		var ev engine.Event
		if err := json.Unmarshal(sc.Bytes(), &ev); err != nil {
			return nil, err
		}
		f.events = append(f.events, ev)
		switch ev.Kind {
		case engine.KindPlan:
			f.plan = &engine.Plan{}
			if err := json.Unmarshal(ev.Data, f.plan); err != nil {
				return nil, err
			}
			f.findings = f.plan.Findings
		case engine.KindResult:
			if *ev.Exit != 0 {
				f.runErr = &engine.Error{Op: "init demo", Err: errors.New(ev.Text), Remedy: ev.Remedy, Exit: *ev.Exit}
			}
		}
	}
	return f, nil
}

func TestScripts(t *testing.T) {
	streams, err := filepath.Abs("testdata/streams")
	if err != nil {
		t.Fatal(err)
	}
	releases, err := filepath.Abs("../assets/releases/releases")
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		UpdateScripts:       golden.Updating(),
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("STREAMS", streams)
			e.Setenv("RELEASES", releases)
			e.Setenv("CHECKS", filepath.Join(filepath.Dir(streams), "checks"))
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

func TestSandboxStatusNamesConsolesAndRemedy(t *testing.T) {
	s := &session{App: fakeApp(), dir: "."}
	s.Env = func(string) string { return "" }
	s.Now = func() time.Time { return start }
	machine := func(name, boot string) engine.SandboxMachine {
		return engine.SandboxMachine{Name: name, Boot: boot, Console: "/state/" + name + "/console.log"}
	}
	st := engine.SandboxStatus{State: "stopped", Machines: []engine.SandboxMachine{
		machine("worker-0", "ready"), machine("worker-1", "failed"), machine("worker-2", "stopped"),
	}}
	text := strings.Join(s.sandboxText(&st), "\n")
	for want, there := range map[string]bool{
		"/state/worker-0/console.log": false, "/state/worker-1/console.log": true, "/state/worker-2/console.log": true, "sandbox up` restarts it and keeps the machines": true,
	} {
		if strings.Contains(text, want) != there {
			t.Errorf("%q: want %t in\n%s", want, there, text)
		}
	}
	st.State = "running"
	if text := strings.Join(s.sandboxText(&st), "\n"); strings.Contains(text, "restarts it") {
		t.Errorf("a running sandbox has a remedy to start it:\n%s", text)
	}
}

// Hollow machines are marked as simulated and summarised by group.
func TestSandboxStatusOfHollowMachines(t *testing.T) {
	s := &session{App: fakeApp(), dir: "."}
	s.Env = func(string) string { return "" }
	s.Now = func() time.Time { return start }
	st := engine.SandboxStatus{SandboxInfo: engine.SandboxInfo{Name: "many", Hollow: true, Kubernetes: "v1.35.4"}, State: "running"}
	for n := range 500 {
		m := engine.SandboxMachine{Name: fmt.Sprint("worker-", n), Group: "workers", Boot: "ready", Image: "v1.0.0"}
		if n >= 480 {
			m.Boot, m.Image = "booting", "v1.1.0"
		}
		st.Machines = append(st.Machines, m)
	}
	lines := s.sandboxText(&st)
	text := strings.Join(lines, "\n")
	for _, want := range []string{"all machines are simulated: nothing runs in them", "Hollow machines 500", "480     ready     workers          v1.0.0", "20      booting   workers          v1.1.0"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if len(lines) > 10 {
		t.Errorf("%d lines for 500 machines:\n%s", len(lines), text)
	}
	st.State, st.Machines = "stopped", nil
	if text := strings.Join(s.sandboxText(&st), "\n"); !strings.Contains(text, "the daemon and the hollow cluster have ended") || strings.Contains(text, "keeps the machines") {
		t.Errorf("a stopped hollow sandbox prints\n%s", text)
	}
}
