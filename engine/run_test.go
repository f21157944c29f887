package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/internal/testneeds"
)

func bare(t testing.TB) (*engine.Engine, string) {
	t.Helper()
	dir := t.TempDir()
	w, err := workspace.OpenWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	return engine.New(w, engine.Deps{}), dir
}

func runPlan(ctx context.Context, e *engine.Engine, steps ...plan.Step) ([]plan.Event, error) {
	var events []plan.Event
	err := e.Run(ctx, engine.PlanFor(e, steps...), func(ev plan.Event) { events = append(events, ev) })
	return events, err
}

func TestEventsOfConcurrentSendersAreNumberedInOrder(t *testing.T) {
	e, _ := bare(t)
	const speakers, lines = 20, 200
	events, err := runPlan(t.Context(), e, plan.Step{ID: "talk", Run: func(_ context.Context, r *plan.Reporter) error {
		var wg sync.WaitGroup
		for s := range speakers {
			wg.Go(func() {
				for l := range lines {
					r.Log(fmt.Sprint("speaker-", s), "", "info", fmt.Sprint(l))
				}
			})
		}
		wg.Wait()
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	checkStream(t, events, err)
	next := map[string]int{}
	for _, ev := range events {
		if ev.Kind == plan.KindLog {
			if ev.Text != fmt.Sprint(next[ev.Source]) {
				t.Fatalf("%s said %s, want %d", ev.Source, ev.Text, next[ev.Source])
			}
			next[ev.Source]++
		}
	}
	if len(next) != speakers || next["speaker-0"] != lines {
		t.Errorf("lines %v", next)
	}
}

func TestStepsEndTheRunAsTheyShould(t *testing.T) {
	for _, tt := range []struct {
		name string
		step func(cancel func()) plan.Step
		want string // states of the steps
		exit int
		text string
	}{
		{name: "a step that fails", step: func(func()) plan.Step {
			return plan.Step{ID: "x", Run: func(context.Context, *plan.Reporter) error {
				return &plan.Error{Op: "do x", Err: errors.New("no"), Remedy: "do y"}
			}}
		}, want: "x:running x:failed", exit: plan.ExitFailed, text: "do x: no"},
		{name: "a step that panics", step: func(func()) plan.Step {
			return plan.Step{ID: "x", Run: func(context.Context, *plan.Reporter) error { panic("boom") }}
		}, want: "x:running x:failed", exit: plan.ExitFailed, text: "run step x: bug in this program: boom"},
		{name: "a look that panics", step: func(func()) plan.Step {
			return plan.Step{ID: "x", Done: func(context.Context) (bool, error) { panic("boom") }}
		}, want: "x:failed", exit: plan.ExitFailed, text: "boom"},
		{name: "a look that fails", step: func(func()) plan.Step {
			return plan.Step{ID: "x", Done: func(context.Context) (bool, error) { return false, errors.New("dark") }}
		}, want: "x:failed", exit: plan.ExitFailed, text: "look at what step x has done: dark"},
		{name: "a step that is done", step: func(func()) plan.Step {
			return plan.Step{ID: "x", Done: func(context.Context) (bool, error) { return true, nil }}
		}, want: "x:skipped y:running y:done", exit: plan.ExitDone},
		{name: "the user leaves", step: func(cancel func()) plan.Step {
			return plan.Step{ID: "x", Run: func(ctx context.Context, _ *plan.Reporter) error { cancel(); return ctx.Err() }}
		}, want: "x:running x:stopped", exit: plan.ExitStopped, text: "stopped before step x was done"},
		{name: "the user leaves a step that finishes all the same", step: func(cancel func()) plan.Step {
			return plan.Step{ID: "x", Run: func(context.Context, *plan.Reporter) error { cancel(); return nil }}
		}, want: "x:running x:done", exit: plan.ExitStopped, text: "stopped before step y was done"},
		{name: "the user leaves after the point of no return", step: func(cancel func()) plan.Step {
			return plan.Step{ID: "x", Final: true, Run: func(context.Context, *plan.Reporter) error { cancel(); return nil }}
		}, want: "x:running x:done", exit: plan.ExitDone},
		{name: "a step fails while the user leaves", step: func(cancel func()) plan.Step {
			return plan.Step{ID: "x", Run: func(context.Context, *plan.Reporter) error { cancel(); return errors.New("broken") }}
		}, want: "x:running x:failed", exit: plan.ExitFailed, text: "broken"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e, _ := bare(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			events, err := runPlan(ctx, e, tt.step(cancel), plan.Step{ID: "y", Run: func(context.Context, *plan.Reporter) error { return nil }})
			checkStream(t, events, err)
			if states(events) != tt.want || plan.ExitCode(err) != tt.exit || tt.text != "" && !strings.Contains(err.Error(), tt.text) {
				t.Errorf("%s; %v (exit %d); want %s; %q (exit %d)", states(events), err, plan.ExitCode(err), tt.want, tt.text, tt.exit)
			}
			var res plan.Result
			if err := json.Unmarshal(events[len(events)-1].Data, &res); err != nil {
				t.Fatal(err)
			}
			if resumable := tt.exit != plan.ExitDone || tt.name == "the user leaves after the point of no return"; (res.Resume != "") != resumable {
				t.Errorf("resume %q", res.Resume)
			}
		})
	}
}

func TestBlockedPlansDoNothing(t *testing.T) {
	e, _ := bare(t)
	p := engine.PlanFor(e, plan.Step{ID: "x", Run: func(context.Context, *plan.Reporter) error { t.Error("it ran"); return nil }})
	p.Findings = []plan.Finding{{ID: "ok", Severity: plan.Info}, {ID: "b", Severity: plan.Block, Title: "no machines", Remedy: "make some"}}
	var events []plan.Event
	err := e.Run(t.Context(), p, func(ev plan.Event) { events = append(events, ev) })
	checkStream(t, events, err)
	if plan.ExitCode(err) != plan.ExitBlocked || plan.Remedy(err) != "make some" {
		t.Errorf("got %v, exit %d, remedy %q", err, plan.ExitCode(err), plan.Remedy(err))
	}
}

func TestTwoRunsInOneWorkspaceAreKeptApart(t *testing.T) {
	e, dir := bare(t)
	started, end := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		_, err := runPlan(context.Background(), e, plan.Step{ID: "x", Run: func(context.Context, *plan.Reporter) error { close(started); <-end; return nil }})
		done <- err
	}()
	<-started
	events, err := runPlan(t.Context(), e, plan.Step{ID: "x", Run: func(context.Context, *plan.Reporter) error { t.Error("it ran"); return nil }})
	checkStream(t, events, err)
	if plan.ExitCode(err) != plan.ExitHeld || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
		t.Errorf("got %v, exit %d", err, plan.ExitCode(err))
	}
	runs, rerr := e.Runs()
	if rerr != nil || len(runs) != 1 || runs[0].Status != plan.StateRunning || runs[0].Step != "x" {
		t.Errorf("runs %+v, %v", runs, rerr)
	}
	close(end)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if runs, _ = e.Runs(); len(runs) != 1 || runs[0].Status != plan.StateDone {
		t.Errorf("afterwards %+v", runs)
	}
	_ = dir
}

// A console that was killed leaves a record without a result, perhaps with half a line.
func TestRecordOfAKilledRunIsReadable(t *testing.T) {
	e, dir := bare(t)
	events, err := runPlan(t.Context(), e, plan.Step{ID: "x", Run: func(_ context.Context, r *plan.Reporter) error {
		for range 2000 {
			r.Log("kubeadm", "", "info", strings.Repeat("x", 100))
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, plan.RunsDir, events[0].Run, engine.EventsFile)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b[:len(b)-2000], 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, plan.RunsDir, "not-a-run"), 0o755); err != nil {
		t.Fatal(err)
	}
	runs, err := e.Runs()
	if err != nil || len(runs) != 1 || runs[0].Status != "interrupted" || runs[0].Step != "x" || runs[0].Exit != plan.ExitStopped || !runs[0].Started.Equal(events[0].Time) || runs[0].Events < 1900 {
		t.Errorf("runs %+v, %v", runs, err)
	}
}

const fullDisk = "ENGINE_TEST_FULL_DISK"

// The disk of the workspace is full at the worst moment: when the first node gives its
// result. Nothing is half-written, the machine keeps the result, and the same command
// goes on once there is room.
func TestFullDisk(t *testing.T) {
	if os.Getenv(fullDisk) == "" {
		testneeds.Root(t, "to mount a small disk in a mount namespace of its own")
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestFullDisk$", "-test.v")
		cmd.Env = append(os.Environ(), fullDisk+"="+t.TempDir())
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		if out, err := cmd.CombinedOutput(); err != nil {
			if strings.Contains(string(out), "operation not permitted") || errors.Is(err, syscall.EPERM) {
				t.Skip("no mount namespace here: ", err)
			}
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	disk := os.Getenv(fullDisk)
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	s := newStage(t, 1, 0)
	for _, f := range []string{workspace.ConfigFile, workspace.StateFile} {
		if err := os.WriteFile(filepath.Join(disk, f), []byte(s.read(f)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.dir = disk
	s.machines[0].chatty = 200
	filler := filepath.Join(disk, "filler")
	events, _, err := s.init(t.Context(), func(e plan.Event) {
		if e.Kind == plan.KindLog && e.Source == "kubeadm" {
			f, err := os.OpenFile(filler, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
			if err != nil {
				return
			}
			defer f.Close()
			for err == nil {
				_, err = f.Write(make([]byte, 512))
			}
		}
	})
	if plan.ExitCode(err) != plan.ExitFailed || !strings.Contains(err.Error(), "no space left on device") || !strings.Contains(plan.Remedy(err), "free some space") {
		t.Errorf("got %v, remedy %q", err, plan.Remedy(err))
	}
	for _, name := range list(t, disk) {
		if name == workspace.KubeconfigFile || name == engine.PendingFile || strings.HasPrefix(name, "."+engine.PendingFile) {
			t.Errorf("half-written: %s", name)
		}
	}
	told := false
	for _, e := range events {
		told = told || strings.Contains(e.Text, "the rest of this run is not recorded")
	}
	if !told {
		t.Error("no event reports that the recording has stopped")
	}
	if _, acks := s.machines[0].counts(); acks != 0 {
		t.Error("the machine received an acknowledgement of its result")
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	s.mustInit()
}

func BenchmarkEvents(b *testing.B) {
	e, _ := bare(b)
	n := 0
	b.ReportAllocs()
	err := e.Run(b.Context(), engine.PlanFor(e, plan.Step{ID: "x", Run: func(_ context.Context, r *plan.Reporter) error {
		for b.Loop() {
			r.Log("kubeadm", "control-plane-0", "info", "[control-plane] Creating static Pod manifest for \"kube-apiserver\"")
		}
		return nil
	}}), func(plan.Event) { n++ })
	if err != nil || n < b.N {
		b.Fatalf("%d events, %v", n, err)
	}
}

// BenchmarkLook measures one poll of a cluster of 5,000 nodes, of which one has changed.
func BenchmarkLook(b *testing.B) { engine.BenchLook(b, 5000) }
