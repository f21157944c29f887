package enginefake

import (
	"context"
	"encoding/json"
	"path/filepath"
	"slices"
	"time"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/rollout"
)

// Engine is an engine that replays recorded events.
type Engine struct {
	HomeData   engine.Home
	homeErr    error
	Findings   []plan.Finding
	Plan       *plan.Plan
	PlanErr    error
	StatusData engine.Status
	// Events are the events of Run. It blocks before event pauseAt, if that is not zero,
	// until its context ends. With a pace it takes the duration of the recorded run divided
	// by pace.
	Events  []plan.Event
	PauseAt int
	Pace    float64
	RunErr  error
	Panics  bool

	StatusErr error
	Ran       int

	// check is the result of Check, which first emits events of its findings.
	CheckData check.Check
	CheckErr  error
	CheckedAs check.Request
	// preparedAs is the request of PlanPrepare.
	preparedAs engine.PrepareRequest
	// AppliedAs is the request of PlanApply or PlanExecute, changed that of ChangeRollout,
	// which returns rollout.
	AppliedAs engine.ApplyRequest
	Changed   cluster.RolloutChange
	Rollout   cluster.Rollout
	// Skipped and skips are the arguments of Skip, holding its result.
	Skipped string
	Skips   bool
	Holding cluster.SkipState
	// BackedUpAs is the request of PlanBackup; the others are results about backups.
	BackedUpAs engine.BackupRequest
	// Measured and MeasuredErr are what Measure returns.
	Measured    engine.MeasuredMachine
	MeasuredErr error
	// Verification and VerifiedErr are what Verify returns.
	Verification engine.Verification
	VerifiedErr  error
	// RotatedAs is the request of PlanRotate.
	RotatedAs engine.RotateRequest
	// RecoveredAs and KeyRotatedAs are the requests of PlanRecover and PlanRotateKey, Encrypted is what Encryption returns.
	RecoveredAs  engine.RecoverRequest
	KeyRotatedAs engine.RotateKeyRequest
	// DisabledAs is the request of PlanDisableEncryption.
	DisabledAs engine.DisableEncryptionRequest
	Encrypted  engine.EncryptionStatus
	// RevokedAs is the request of PlanRevoke.
	RevokedAs engine.RevokeRequest
	// Infra and Roles are results of Infrastructure and InfraRoles.
	Infra engine.InfraReport
	Roles []infra.Role
	// RestoredAs is the request of PlanRestore or Differ; the others are results of Differ.
	RestoredAs  engine.RestoreRequest
	Differences []engine.Difference
	Compared    engine.Compared
	Backups     []engine.BackupEntry
	BackupsErr  error
	VerifyErr   error
	// BackupVerified is the result of VerifyBackup.
	BackupVerified engine.BackupVerification
	// Identity is the argument of UseIdentity.
	Identity string
	Local    cluster.LocalData
	LocalErr error
	Manifest engine.BackupManifest
	Pruned   []string
	// CheckPause, if not zero, is the number of events after which Check with a preflight
	// blocks until its context ends.
	CheckPause int
	// watchedAs is the request of Watch, watched its events; the others are recorded runs.
	watchedAs engine.WatchRequest
	Watched   []plan.Event
	WatchErr  error
	RunList   []plan.RunSummary
	Past      rollout.PastRun
	pastErr   error
	Records   string
	Pulse     engine.APIHealth
}

func (f *Engine) Check(ctx context.Context, r check.Request, emit func(plan.Event)) (check.Check, error) {
	f.CheckedAs = r
	first := f.CheckData
	first.Findings = slices.DeleteFunc(slices.Clone(f.CheckData.Findings), func(x plan.Finding) bool { return x.Source != "matrix" })
	data, err := json.Marshal(first)
	if err != nil {
		return check.Check{}, err
	}
	emit(plan.Event{Time: Start, Kind: plan.KindCheck, Object: check.CheckVersions, State: string(plan.Info), Text: "Versions and path", Data: data})
	if r.NoPreflight {
		return first, f.CheckErr
	}
	for _, x := range f.CheckData.Findings {
		if x.Source != "matrix" {
			emit(plan.Event{Time: Start, Kind: plan.KindCheck, Object: x.ID, State: plan.StateRunning, Text: x.Title, Source: x.Source})
		}
	}
	for i, x := range f.CheckData.Findings {
		if f.CheckPause > 0 && i+1 == f.CheckPause {
			emit(plan.Event{Time: Start, Kind: plan.KindProgress, Object: "drain-rehearsal", Current: 42, Total: 300})
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
		emit(plan.Event{Time: Start, Kind: plan.KindCheck, Object: x.ID, State: string(x.Severity), Text: x.Title, Source: x.Source, Data: data})
	}
	return f.CheckData, f.CheckErr
}

func (f *Engine) Home(context.Context) (engine.Home, error) {
	if f.Panics {
		panic("the fake engine was asked to")
	}
	return f.HomeData, f.homeErr
}

func (f *Engine) Preflight(_ context.Context, emit func(plan.Event)) ([]plan.Finding, error) {
	for i, x := range f.Findings {
		data, err := json.Marshal(x)
		if err != nil {
			return nil, err
		}
		emit(plan.Event{Seq: uint64(i + 1), Time: Start, Kind: plan.KindCheck, Object: x.ID, State: string(x.Severity), Text: x.Title, Source: x.Source, Data: data})
	}
	return f.Findings, nil
}

func (f *Engine) PlanApply(_ context.Context, r engine.ApplyRequest, _ func(plan.Event)) (*plan.Plan, error) {
	f.AppliedAs = r
	if len(r.Acknowledge) > 0 {
		f.Plan.Accept(r.Acknowledge...)
	}
	return f.Plan, f.PlanErr
}

func (f *Engine) PlanExecute(_ context.Context, r engine.ApplyRequest) (*plan.Plan, error) {
	f.AppliedAs = r
	return f.Plan, f.PlanErr
}

func (f *Engine) ChangeRollout(_ context.Context, c cluster.RolloutChange) (cluster.Rollout, error) {
	f.Changed = c
	return f.Rollout, f.PlanErr
}

func (f *Engine) Skip(_ context.Context, name string, skip bool) (cluster.SkipState, error) {
	f.Skipped, f.Skips = name, skip
	return f.Holding, f.PlanErr
}

func (f *Engine) PlanPrepare(_ context.Context, r engine.PrepareRequest, _ func(plan.Event)) (*plan.Plan, error) {
	f.preparedAs = r
	return f.Plan, f.PlanErr
}

func (f *Engine) PlanBackup(_ context.Context, r engine.BackupRequest) (*plan.Plan, error) {
	f.BackedUpAs = r
	return f.Plan, f.PlanErr
}

func (f *Engine) ListBackups(context.Context, string, bool, func(string, int64, int64)) ([]engine.BackupEntry, error) {
	return f.Backups, f.BackupsErr
}

func (f *Engine) VerifyBackup(_ context.Context, _, _ string, progress func(done, total int64)) (engine.BackupVerification, error) {
	progress(1<<20, 2<<20)
	return f.BackupVerified, f.VerifyErr
}

func (f *Engine) UseIdentity(path string) error {
	f.Identity = path
	return nil
}

func (f *Engine) DecryptBackup(_ context.Context, _, id, to string, _ func(done, total int64)) (string, error) {
	return to + "/" + id + "/backups", f.VerifyErr
}

func (f *Engine) LocalData(context.Context) (cluster.LocalData, error) {
	return f.Local, f.LocalErr
}

func (f *Engine) Watch(ctx context.Context, r engine.WatchRequest, emit func(plan.Event)) error {
	f.watchedAs = r
	for _, ev := range f.Watched {
		emit(ev)
	}
	if r.Stay && f.WatchErr == nil {
		<-ctx.Done()
	}
	return f.WatchErr
}

func (f *Engine) Runs() ([]plan.RunSummary, error) { return f.RunList, nil }

func (f *Engine) PastRun(string) (rollout.PastRun, error) { return f.Past, f.pastErr }

func (f *Engine) APIHealth() engine.APIHealth { return f.Pulse }

func (f *Engine) Record(id string) (string, error) { return filepath.Join(f.Records, id), nil }

func (f *Engine) PlanInit(context.Context) (*plan.Plan, error) { return f.Plan, f.PlanErr }

func (f *Engine) Run(ctx context.Context, _ *plan.Plan, emit func(plan.Event)) error {
	f.Ran++
	began := time.Now()
	for i, ev := range f.Events {
		var pause <-chan time.Time
		switch {
		case f.PauseAt > 0 && i == f.PauseAt:
			pause = make(chan time.Time)
		case f.Pace > 0:
			due := began.Add(time.Duration(float64(ev.Time.Sub(f.Events[0].Time)) / f.Pace))
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
	return f.RunErr
}

func (f *Engine) Status(context.Context) (engine.Status, error) { return f.StatusData, f.StatusErr }

// StatusOf returns the same data as Status, as of the selected cluster.
func (f *Engine) StatusOf(_ context.Context, s cluster.Selected) (engine.Status, error) {
	st := f.StatusData
	st.Cluster, st.Server = s.Context, s.Server
	return st, f.StatusErr
}

// Measure returns Measured.
func (f *Engine) Measure(_ context.Context, write bool) (engine.MeasuredMachine, error) {
	m := f.Measured
	m.Written = write
	return m, f.MeasuredErr
}

// Verify returns Verification.
func (f *Engine) Verify(context.Context) (engine.Verification, error) {
	return f.Verification, f.VerifiedErr
}

func (f *Engine) PlanRevoke(_ context.Context, r engine.RevokeRequest) (*plan.Plan, error) {
	f.RevokedAs = r
	return f.Plan, f.PlanErr
}

// PlanRotate returns Plan.
func (f *Engine) PlanRotate(_ context.Context, r engine.RotateRequest) (*plan.Plan, error) {
	f.RotatedAs = r
	return f.Plan, f.PlanErr
}

// PlanRecover returns Plan.
func (f *Engine) PlanRecover(_ context.Context, r engine.RecoverRequest) (*plan.Plan, error) {
	f.RecoveredAs = r
	return f.Plan, f.PlanErr
}

// PlanDisableEncryption returns Plan.
func (f *Engine) PlanDisableEncryption(_ context.Context, r engine.DisableEncryptionRequest) (*plan.Plan, error) {
	f.DisabledAs = r
	return f.Plan, f.PlanErr
}

// PlanRotateKey returns Plan.
func (f *Engine) PlanRotateKey(_ context.Context, r engine.RotateKeyRequest) (*plan.Plan, error) {
	f.KeyRotatedAs = r
	return f.Plan, f.PlanErr
}

// Encryption returns Encrypted.
func (f *Engine) Encryption(context.Context) (engine.EncryptionStatus, error) {
	return f.Encrypted, f.PlanErr
}

func (f *Engine) Infrastructure(context.Context) (engine.InfraReport, error) {
	return f.Infra, f.PlanErr
}

func (f *Engine) InfraRoles() ([]infra.Role, error) { return f.Roles, f.PlanErr }

func (f *Engine) PlanInfraCreate(context.Context) (*plan.Plan, error) { return f.Plan, f.PlanErr }

func (f *Engine) PlanInfraTerminate(context.Context) (*plan.Plan, error) { return f.Plan, f.PlanErr }

func (f *Engine) PlanOperator(context.Context) (*plan.Plan, error) { return f.Plan, f.PlanErr }

func (f *Engine) PlanRemoveOperator(context.Context) (*plan.Plan, error) { return f.Plan, f.PlanErr }

func (f *Engine) PlanRestore(_ context.Context, r engine.RestoreRequest, emit func(plan.Event)) (*plan.Plan, error) {
	f.RestoredAs = r
	emit(plan.Event{Kind: plan.KindProgress, Object: "verify", Text: "backup " + r.ID, Current: 1, Total: 2})
	return f.Plan, f.PlanErr
}

func (f *Engine) Differ(_ context.Context, r engine.RestoreRequest, _ func(plan.Event), report func(engine.Difference)) (engine.Compared, error) {
	f.RestoredAs = r
	for _, d := range f.Differences {
		report(d)
	}
	return f.Compared, f.PlanErr
}

func (f *Engine) ShowBackup(string, string) (engine.BackupManifest, string, error) {
	return f.Manifest, "/runs/" + f.Manifest.ID + "/backups", nil
}

func (f *Engine) PruneBackups(context.Context, string, int) ([]string, error) {
	return f.Pruned, f.VerifyErr
}
