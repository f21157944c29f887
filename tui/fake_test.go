package tui

import (
	"context"
	"encoding/json"
	"path/filepath"
	"slices"
	"time"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
)

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

func (f *fakeEngine) PlanRevoke(_ context.Context, r engine.RevokeRequest) (*plan.Plan, error) {
	f.revokedAs = r
	return f.plan, f.planErr
}

func (f *fakeEngine) PlanRestore(_ context.Context, r engine.RestoreRequest, emit func(plan.Event)) (*plan.Plan, error) {
	f.restoredAs = r
	emit(plan.Event{Kind: plan.KindProgress, Object: "verify", Text: "backup " + r.ID, Current: 1, Total: 2})
	return f.plan, f.planErr
}

func (f *fakeEngine) Differ(_ context.Context, r engine.RestoreRequest, _ func(plan.Event), report func(engine.Difference)) (engine.Compared, error) {
	f.restoredAs = r
	for _, d := range f.differences {
		report(d)
	}
	return f.compared, f.planErr
}

func (f *fakeEngine) ShowBackup(string, string) (engine.BackupManifest, string, error) {
	return f.manifest, "/runs/" + f.manifest.ID + "/backups", nil
}

func (f *fakeEngine) PruneBackups(context.Context, string, int) ([]string, error) {
	return f.pruned, f.verifyErr
}
