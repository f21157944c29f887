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
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/internal/golden"
	"constellation/tui/internal/enginefake"
)

// TestMain runs this test binary as the program in scripts, with the real engine on a
// workspace or, if FAKE_RUN names a recorded run, with a fake engine.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"constellation": func() { os.Exit(fakeApp().Main()) }})
}

// fakeApp is the program without real machines. One can be checked and added, with a password for sudo:
//
//	FAKE_RUN     file with the events of a recorded run, which init replays
//	FAKE_PACE    factor of its speed; 0 or unset: at once
//	FAKE_CHECK   file with the result of upgrade check
//	FAKE_HANGS   set: that check blocks before its first finding until it is cancelled
//	FAKE_STAGE   stage of the workspace that the fake engine reports
//	FAKE_NO_IMAGES   set: the cloud is moon, which selects no image
//	FAKE_NO_SANDBOX  set: constellation-sandbox is not installed
//	FAKE_BOOTSTRAPPER  file that machines which call fetch
//	FAKE_ENDLESS       set: the check of a machine that calls does not end
//	FAKE_PANIC   set: reading the workspace panics
func fakeApp() App {
	if os.Getenv("FAKE_NO_IMAGES") != "" {
		providers.Register(providers.Provider{
			Name: "moon", NoImages: true, Config: section.Schema{{Name: "crater", Required: true}},
			Example: func(cluster string) section.Values { return section.Values{"crater": cluster} },
		})
	}
	machines := &enrolStage{checked: checkedMachines()[:1], fails: map[string]error{}, bootstrapper: os.Getenv("FAKE_BOOTSTRAPPER")}
	machines.checkCaller = machines.checkLocalCaller
	if os.Getenv("FAKE_ENDLESS") != "" {
		machines.checkCaller = func(context.Context, machinecheck.Machine, machinecheck.Needs) machinecheck.Result { select {} }
	}
	return App{
		CheckMachines: machines.askingForSudo, Enrol: machines.enrol(),
		Release: "v1.1.0", Kubernetes: []string{"v1.35.4", "v1.36.3"}, Releases: []string{"v1.1.0", "v1.0.0"},
		Engine: func(ws *workspace.Workspace, log *slog.Logger) (Engine, error) {
			if os.Getenv("FAKE_RUN") != "" {
				return fakeRun(ws)
			}
			if name := os.Getenv("FAKE_CHECK"); name != "" {
				b, err := os.ReadFile(name)
				if err != nil {
					return nil, err
				}
				f := &enginefake.Engine{HomeData: enginefake.UpgradeHome(), StatusData: enginefake.DemoStatus()}
				if os.Getenv("FAKE_HANGS") != "" {
					f.CheckPause = 1
				}
				if os.Getenv("FAKE_NO_IMAGES") != "" {
					f.WithoutImages()
				}
				return f, json.Unmarshal(b, &f.CheckData)
			}
			return engine.New(ws, engine.Deps{Log: log}), nil
		},
		RunSandbox: func(args []string) (int, error) {
			if os.Getenv("FAKE_NO_SANDBOX") != "" {
				return 0, &plan.Error{Op: "find the program constellation-sandbox", Err: errors.New("not found"), Exit: plan.ExitUsage, Remedy: "install it"}
			}
			fmt.Printf("sandbox program: %q\n", args)
			return 9, nil
		},
	}
}

func fakeRun(ws *workspace.Workspace) (*enginefake.Engine, error) {
	b, err := os.ReadFile(os.Getenv("FAKE_RUN"))
	if err != nil {
		return nil, err
	}
	f := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady), StatusData: enginefake.DemoStatus(), Panics: os.Getenv("FAKE_PANIC") != ""}
	if s := os.Getenv("FAKE_STAGE"); s != "" {
		f.HomeData.Stage = engine.Stage(s)
	}
	f.HomeData.Dir = ws.Dir()
	f.Pace, _ = strconv.ParseFloat(os.Getenv("FAKE_PACE"), 64)
	for sc := bufio.NewScanner(bytes.NewReader(b)); sc.Scan(); {
		var ev plan.Event
		if err := json.Unmarshal(sc.Bytes(), &ev); err != nil {
			return nil, err
		}
		f.Events = append(f.Events, ev)
		switch ev.Kind {
		case plan.KindPlan:
			f.Plan = &plan.Plan{}
			if err := json.Unmarshal(ev.Data, f.Plan); err != nil {
				return nil, err
			}
			f.Findings = f.Plan.Findings
		case plan.KindResult:
			if *ev.Exit != 0 {
				f.RunErr = &plan.Error{Op: "init demo", Err: errors.New(ev.Text), Remedy: ev.Remedy, Exit: *ev.Exit}
			}
		}
	}
	if os.Getenv("FAKE_NO_IMAGES") != "" {
		f.WithoutImages()
	}
	return f, nil
}

// shellOf returns the blocks of shell commands of a page, in their order.
func shellOf(t *testing.T, page string) string {
	t.Helper()
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	inside := false
	for line := range strings.Lines(string(b)) {
		switch text := strings.TrimSpace(line); {
		case text == "```sh":
			inside = true
		case text == "```":
			inside = false
		case inside:
			out.WriteString(line)
		}
	}
	if out.Len() == 0 {
		t.Fatalf("%s has no commands", page)
	}
	return out.String()
}

func TestScripts(t *testing.T) {
	streams, err := filepath.Abs("internal/enginefake/testdata/streams")
	if err != nil {
		t.Fatal(err)
	}
	releases, err := filepath.Abs("../assets/releases/releases")
	if err != nil {
		t.Fatal(err)
	}
	ceremony := filepath.Join(t.TempDir(), "ceremony.sh")
	if err := os.WriteFile(ceremony, []byte(shellOf(t, "../docs/feed-keys.md")), 0o600); err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		UpdateScripts:       golden.Updating(),
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("STREAMS", streams)
			e.Setenv("RELEASES", releases)
			e.Setenv("CEREMONY", ceremony)
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
