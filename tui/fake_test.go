package tui

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cloud/section"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/workspace"
	"constellation/internal/golden"
	"constellation/tui/term"
	"constellation/tui/view"
)

// checkGolden compares got with a file in testdata, or writes it with -update.
func checkGolden(t *testing.T, name, got string) {
	t.Helper()
	golden.Equal(t, filepath.Join("testdata", filepath.FromSlash(name)), got)
}

// recorded returns the events of a recorded run.
func recorded(t testing.TB, name string) []plan.Event {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "streams", name+".jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	var list []plan.Event
	for sc := bufio.NewScanner(bytes.NewReader(b)); sc.Scan(); {
		var ev plan.Event
		if err := json.Unmarshal(sc.Bytes(), &ev); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		list = append(list, ev)
	}
	if len(list) == 0 {
		t.Fatalf("%s holds no events", name)
	}
	return list
}

// planIn returns the plan that a recorded run began with.
func planIn(t testing.TB, events []plan.Event) *plan.Plan {
	t.Helper()
	for _, ev := range events {
		if ev.Kind == plan.KindPlan {
			var p plan.Plan
			if err := json.Unmarshal(ev.Data, &p); err != nil {
				t.Fatal(err)
			}
			return &p
		}
	}
	t.Fatal("no plan in the stream")
	return nil
}

// fakeEngine is an engine that replays recorded events.
type fakeEngine struct {
	home     engine.Home
	homeErr  error
	findings []plan.Finding
	plan     *plan.Plan
	planErr  error
	status   engine.Status
	// events are the events of Run. It blocks before event pauseAt, if that is not zero,
	// until its context ends. With a pace it takes the duration of the recorded run divided
	// by pace.
	events  []plan.Event
	pauseAt int
	pace    float64
	runErr  error
	panics  bool

	statusErr error
	ran       int

	// check is the result of Check, which first emits events of its findings.
	check     check.Check
	checkErr  error
	checkedAs check.Request
	// preparedAs is the request of PlanPrepare.
	preparedAs engine.PrepareRequest
	// appliedAs is the request of PlanApply or PlanExecute, changed that of ChangeRollout,
	// which returns rollout.
	appliedAs engine.ApplyRequest
	changed   cluster.RolloutChange
	rollout   cluster.Rollout
	// skipped and skips are the arguments of Skip, holding its result.
	skipped string
	skips   bool
	holding cluster.SkipState
	// backedUpAs is the request of PlanBackup; the others are results about backups.
	backedUpAs engine.BackupRequest
	// revokedAs is the request of PlanRevoke.
	revokedAs engine.RevokeRequest
	// restoredAs is the request of PlanRestore or Differ; the others are results of Differ.
	restoredAs  engine.RestoreRequest
	differences []engine.Difference
	compared    engine.Compared
	backups     []engine.BackupEntry
	backupsErr  error
	verifyErr   error
	local       cluster.LocalData
	localErr    error
	manifest    engine.BackupManifest
	pruned      []string
	// checkPause, if not zero, is the number of events after which Check with a preflight
	// blocks until its context ends.
	checkPause int
	// watchedAs is the request of Watch, watched its events; the others are recorded runs.
	watchedAs engine.WatchRequest
	watched   []plan.Event
	watchErr  error
	runs      []plan.RunSummary
	past      rollout.PastRun
	pastErr   error
	records   string
	pulse     engine.APIHealth
}

func (f *fakeEngine) Check(ctx context.Context, r check.Request, emit func(plan.Event)) (check.Check, error) {
	f.checkedAs = r
	first := f.check
	first.Findings = slices.DeleteFunc(slices.Clone(f.check.Findings), func(x plan.Finding) bool { return x.Source != "matrix" })
	data, err := json.Marshal(first)
	if err != nil {
		return check.Check{}, err
	}
	emit(plan.Event{Time: start, Kind: plan.KindCheck, Object: check.CheckVersions, State: string(plan.Info), Text: "Versions and path", Data: data})
	if r.NoPreflight {
		return first, f.checkErr
	}
	for _, x := range f.check.Findings {
		if x.Source != "matrix" {
			emit(plan.Event{Time: start, Kind: plan.KindCheck, Object: x.ID, State: plan.StateRunning, Text: x.Title, Source: x.Source})
		}
	}
	for i, x := range f.check.Findings {
		if f.checkPause > 0 && i+1 == f.checkPause {
			emit(plan.Event{Time: start, Kind: plan.KindProgress, Object: "drain-rehearsal", Current: 42, Total: 300})
			<-ctx.Done()
			return check.Check{}, ctx.Err()
		}
		if x.Source == "matrix" {
			continue
		}
		data, err := json.Marshal(x)
		if err != nil {
			return check.Check{}, err
		}
		emit(plan.Event{Time: start, Kind: plan.KindCheck, Object: x.ID, State: string(x.Severity), Text: x.Title, Source: x.Source, Data: data})
	}
	return f.check, f.checkErr
}

func (f *fakeEngine) Home(context.Context) (engine.Home, error) {
	if f.panics {
		panic("the fake engine was asked to")
	}
	return f.home, f.homeErr
}

func (f *fakeEngine) Preflight(_ context.Context, emit func(plan.Event)) ([]plan.Finding, error) {
	for i, x := range f.findings {
		data, err := json.Marshal(x)
		if err != nil {
			return nil, err
		}
		emit(plan.Event{Seq: uint64(i + 1), Time: start, Kind: plan.KindCheck, Object: x.ID, State: string(x.Severity), Text: x.Title, Source: x.Source, Data: data})
	}
	return f.findings, nil
}

func (f *fakeEngine) PlanApply(_ context.Context, r engine.ApplyRequest, _ func(plan.Event)) (*plan.Plan, error) {
	f.appliedAs = r
	if len(r.Acknowledge) > 0 {
		f.plan.Accept(r.Acknowledge...)
	}
	return f.plan, f.planErr
}

func (f *fakeEngine) PlanExecute(_ context.Context, r engine.ApplyRequest) (*plan.Plan, error) {
	f.appliedAs = r
	return f.plan, f.planErr
}

func (f *fakeEngine) ChangeRollout(_ context.Context, c cluster.RolloutChange) (cluster.Rollout, error) {
	f.changed = c
	return f.rollout, f.planErr
}

func (f *fakeEngine) Skip(_ context.Context, name string, skip bool) (cluster.SkipState, error) {
	f.skipped, f.skips = name, skip
	return f.holding, f.planErr
}

func (f *fakeEngine) PlanPrepare(_ context.Context, r engine.PrepareRequest, _ func(plan.Event)) (*plan.Plan, error) {
	f.preparedAs = r
	return f.plan, f.planErr
}

func (f *fakeEngine) PlanBackup(_ context.Context, r engine.BackupRequest) (*plan.Plan, error) {
	f.backedUpAs = r
	return f.plan, f.planErr
}

func (f *fakeEngine) ListBackups(context.Context, string, bool, func(string, int64, int64)) ([]engine.BackupEntry, error) {
	return f.backups, f.backupsErr
}

func (f *fakeEngine) VerifyBackup(_ context.Context, _, _ string, progress func(done, total int64)) error {
	progress(1<<20, 2<<20)
	return f.verifyErr
}

func (f *fakeEngine) LocalData(context.Context) (cluster.LocalData, error) {
	return f.local, f.localErr
}

func (f *fakeEngine) Watch(ctx context.Context, r engine.WatchRequest, emit func(plan.Event)) error {
	f.watchedAs = r
	for _, ev := range f.watched {
		emit(ev)
	}
	if r.Stay && f.watchErr == nil {
		<-ctx.Done()
	}
	return f.watchErr
}

func (f *fakeEngine) Runs() ([]plan.RunSummary, error) { return f.runs, nil }

func (f *fakeEngine) PastRun(string) (rollout.PastRun, error) { return f.past, f.pastErr }

func (f *fakeEngine) APIHealth() engine.APIHealth { return f.pulse }

func (f *fakeEngine) Record(id string) (string, error) { return filepath.Join(f.records, id), nil }

func (f *fakeEngine) PlanInit(context.Context) (*plan.Plan, error) { return f.plan, f.planErr }

func (f *fakeEngine) Run(ctx context.Context, _ *plan.Plan, emit func(plan.Event)) error {
	f.ran++
	began := time.Now()
	for i, ev := range f.events {
		var pause <-chan time.Time
		switch {
		case f.pauseAt > 0 && i == f.pauseAt:
			pause = make(chan time.Time)
		case f.pace > 0:
			due := began.Add(time.Duration(float64(ev.Time.Sub(f.events[0].Time)) / f.pace))
			pause, ev.Time = time.After(time.Until(due)), due.UTC()
		}
		if pause != nil {
			select {
			case <-pause:
			case <-ctx.Done():
				return &plan.Error{Op: "init demo", Err: context.Canceled, Exit: plan.ExitStopped, Remedy: "run the same command again"}
			}
		}
		emit(ev)
	}
	return f.runErr
}

func (f *fakeEngine) Status(context.Context) (engine.Status, error) { return f.status, f.statusErr }

// start is the start time of all recorded runs.
var start = time.Date(2026, 11, 21, 7, 5, 1, 0, time.UTC)

// stage drives a console without a terminal: it delivers messages, runs commands at once and
// delivers their messages. Its clock is that of the events. It works only in a synctest
// bubble.
type stage struct {
	t      *testing.T
	c      *console
	eng    *fakeEngine
	clock  time.Time
	copied []string
	quit   bool
	queue  chan tea.Msg
}

func newStage(t *testing.T, eng *fakeEngine, l term.Display, w, h int, change ...func(*consoleDeps)) *stage {
	t.Helper()
	s := &stage{t: t, eng: eng, clock: start, queue: make(chan tea.Msg, 1024)}
	t.Cleanup(func() { time.Sleep(time.Hour) }) // of the bubble: ticks under way end
	ws, err := workspace.OpenWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	d := consoleDeps{
		engine: eng, ws: ws, commands: view.CommandFormatter{Dir: ".demo", Home: "/home/ops/demo", Kubeconfig: "/home/ops/demo/constellation-admin.conf"}, versions: []string{"v1.35.4", "v1.36.3"},
		now:  func() time.Time { return s.clock },
		send: func(m tea.Msg) { s.queue <- m },
		copy: func(text string) bool { s.copied = append(s.copied, text); return true },
	}
	for _, f := range change {
		f(&d)
	}
	s.c = newConsole(t.Context(), l, d)
	s.c.w, s.c.h = w, h
	return s
}

// begin starts the console, which reads the workspace.
func (s *stage) begin() *stage {
	s.do(s.c.Init())
	return s
}

// do runs a command and delivers its immediate messages. Commands that wait for time or for
// a run continue; settle delivers their messages.
func (s *stage) do(cmd tea.Cmd) {
	s.t.Helper()
	if cmd == nil {
		return
	}
	go func() {
		if m := cmd(); m != nil {
			s.queue <- m
		}
	}()
	s.settle()
}

func (s *stage) tell(m tea.Msg) {
	s.t.Helper()
	switch m := m.(type) {
	case nil, tick, refresh, stopTimedOut: // time is the test's
		return
	case tea.QuitMsg:
		s.quit = true
		return
	case tea.BatchMsg:
		for _, c := range m {
			s.do(c)
		}
		return
	}
	_, cmd := s.c.Update(m)
	s.do(cmd)
}

// settle delivers messages until all goroutines wait for time or for the test.
func (s *stage) settle() {
	s.t.Helper()
	for idle := false; ; {
		synctest.Wait()
		select {
		case m := <-s.queue:
			s.tell(m)
			idle = false
		default:
			if idle {
				return
			}
			idle = true
			time.Sleep(term.FrameGap) // of the bubble: a batch that is being collected comes
		}
	}
}

// press sends keys: single characters, or names such as "enter" and "ctrl+c".
func (s *stage) press(keys ...string) *stage {
	s.t.Helper()
	for _, k := range keys {
		s.tell(keyOf(k))
	}
	return s
}

func keyOf(name string) tea.KeyMsg {
	types := map[string]tea.KeyType{
		"enter": tea.KeyEnter, "esc": tea.KeyEsc, "tab": tea.KeyTab, "shift+tab": tea.KeyShiftTab, "up": tea.KeyUp, "down": tea.KeyDown,
		"left": tea.KeyLeft, "right": tea.KeyRight, "ctrl+c": tea.KeyCtrlC, "backspace": tea.KeyBackspace, "pgup": tea.KeyPgUp, "pgdown": tea.KeyPgDown,
		"home": tea.KeyHome, "end": tea.KeyEnd, "ctrl+l": tea.KeyCtrlL, "ctrl+u": tea.KeyCtrlU, "ctrl+d": tea.KeyCtrlD,
	}
	if kt, ok := types[name]; ok {
		return tea.KeyMsg{Type: kt}
	}
	return tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune(name)}
}

// at sets the clock to a time after start.
func (s *stage) at(d time.Duration) *stage {
	s.clock = start.Add(d)
	s.c.now = s.clock
	return s
}

// replay shows the run screen after the events of a recorded run up to a time.
func (s *stage) replay(events []plan.Event, until time.Duration) *stage {
	s.t.Helper()
	s.c.home = &s.eng.home
	s.c.busy = "running"
	s.c.plan = planIn(s.t, events)
	s.c.screen, s.c.running, s.c.ran = s.c.run, true, true
	s.c.t, *s.c.run = view.Timeline{}, *newRunScreen(s.c)
	s.c.t.SetPlan(s.c.plan)
	s.at(until)
	cut := slices.IndexFunc(events, func(e plan.Event) bool { return e.Time.After(s.clock) })
	if cut < 0 {
		cut = len(events)
	}
	s.tell(batch{s.c.task, events[:cut]})
	if s.c.t.Result != nil {
		var err error
		if code := s.c.t.Result.Exit; code != 0 {
			err = &plan.Error{Op: "init demo", Err: errors.New(s.c.t.Result.Text), Remedy: s.c.t.Result.Remedy, Exit: code}
		}
		s.tell(ended{s.c.task, runEnded{err}})
	}
	return s
}

// demoHome is a workspace at a stage.
func demoHome(stage engine.Stage) engine.Home {
	c := &workspace.Config{Name: "demo", Provider: workspace.ProviderConfig{Name: "sandbox", Section: section.Values{"name": "demo"}}, NodeGroups: map[string]workspace.NodeGroup{
		"control-plane": {Role: "control-plane", Count: 1}, "workers": {Role: "worker", Count: 2},
	}}
	for text, v := range map[string]interface{ UnmarshalText([]byte) error }{
		"v1.35.4": &c.Kubernetes, "v1.1.0": &c.Image, "1.1.0": &c.Services, "10.96.0.0/12": &c.ServiceCIDR, "10.244.0.0/16": &c.PodCIDR,
	} {
		if err := v.UnmarshalText([]byte(text)); err != nil {
			panic(err)
		}
	}
	return engine.Home{Dir: "/home/ops/demo", Stage: stage, Cluster: "demo", Config: c, Next: []engine.Suggestion{
		{Title: "Create the cluster", Command: "constellation -C .demo init", Why: "3 machines run"},
	}}
}
