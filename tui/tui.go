// Package tui is everything the user sees: the commands, the console, the plain
// printer and JSON Lines.
//
// All of them render what package engine says. The events of a run are folded into
// one timeline, by the console and by the printer alike, so the two cannot disagree;
// JSON Lines are the events themselves. The console is one Bubble Tea model whose
// screens are values that return strings. What touches a terminal is in terminal.go
// and nowhere else.
//
// The package decides nothing about a cluster and talks to none; it imports package
// engine and nothing else of ours. Leaving the console never harms a run. Text that
// comes from outside, the line of a log or the name of a node, is cleaned of
// everything that a terminal would obey before it is shown.
//
// What stdout is for: the answer of a verb, or the events of its run. What stderr is
// for: errors, and remarks about the invocation.
package tui

import (
	"context"
	"io"
	"log/slog"
	"os"
	"time"

	"constellation/engine"
)

// Engine is what the console needs to know and to do about one workspace.
// *engine.Engine is one.
type Engine interface {
	// Home says what the workspace holds and what makes sense to do next.
	Home(context.Context) (engine.Home, error)
	// Preflight checks what init needs and emits each check as it begins and ends.
	Preflight(context.Context, func(engine.Event)) ([]engine.Finding, error)
	// PlanInit returns the plan of init, with its findings. It changes nothing.
	PlanInit(context.Context) (*engine.Plan, error)
	// Run carries out a plan. It emits the events of the run, the first of which is
	// hello and the last of which is result; emit is never called concurrently.
	Run(context.Context, *engine.Plan, func(engine.Event)) error
	// Status describes the cluster as it is now.
	Status(context.Context) (engine.Status, error)
	// Check says what may be gone to, by which path, and what the next hop would trip over.
	Check(context.Context, engine.CheckRequest, func(engine.Event)) (engine.Check, error)
	// PlanApply returns the plan to carry out the next hop, with the findings of its check;
	// PlanExecute that to upgrade the services alone. They change nothing.
	PlanApply(context.Context, engine.ApplyRequest, func(engine.Event)) (*engine.Plan, error)
	PlanExecute(context.Context, engine.ApplyRequest) (*engine.Plan, error)
	// ChangeRollout pauses, resumes or cancels the rollout and returns what it was.
	ChangeRollout(context.Context, engine.RolloutChange) (engine.Rollout, error)
	// Skip has rollouts leave a node or a group as it is, or lets it go, and returns what was
	// so before.
	Skip(ctx context.Context, name string, skip bool) (engine.Holding, error)
	// Watch tells how a rollout goes until it ends or ctx does; see engine.Engine.
	Watch(context.Context, engine.WatchRequest, func(engine.Event)) error
	// Runs are the runs that the workspace has a record of, the newest first; PastRun tells
	// all about one, and Record where its events are.
	Runs() ([]engine.RunSummary, error)
	PastRun(id string) (engine.PastRun, error)
	Record(id string) (path string, err error)
	// Pulse returns how the API server answers while something looks after it.
	Pulse() engine.Pulse
	// PlanPrepare returns the plan to publish what nodes need after the next hop, with the
	// findings of its check. It changes nothing.
	PlanPrepare(context.Context, engine.PrepareRequest, func(engine.Event)) (*engine.Plan, error)
	// PlanBackup returns the plan to back up what an upgrade can destroy. It changes nothing.
	PlanBackup(context.Context, engine.BackupRequest) (*engine.Plan, error)
	// ListBackups returns the backups in a directory, the newest first; empty means that of
	// the workspace. With verify each is read as a whole.
	ListBackups(ctx context.Context, dir string, verify bool, progress func(id string, done, total int64)) ([]engine.BackupEntry, error)
	// VerifyBackup reads all of a backup and returns nil if it is whole.
	VerifyBackup(ctx context.Context, dir, id string, progress func(done, total int64)) error
	// LocalData says what is on the disks of nodes and in no backup.
	LocalData(context.Context) (engine.LocalData, error)
	// ShowBackup returns what a backup holds, and where.
	ShowBackup(dir, id string) (engine.BackupManifest, string, error)
	// PruneBackups removes backups but for the newest whole ones.
	PruneBackups(ctx context.Context, dir string, keep int) (removed []string, err error)
	// PlanRestore returns the plan to bring back what a backup has and the cluster has not.
	// It changes nothing. The plan has to be closed.
	PlanRestore(context.Context, engine.RestoreRequest, func(engine.Event)) (*engine.Plan, error)
	// PlanRevoke returns the plan to shut a machine out and to remove it. It changes nothing.
	PlanRevoke(context.Context, engine.RevokeRequest) (*engine.Plan, error)
	// Differ compares the cluster with a backup, and reports each object that differs.
	Differ(context.Context, engine.RestoreRequest, func(engine.Event), func(engine.Difference)) (engine.Compared, error)
}

// App is the program: what main puts together, and the world around it.
type App struct {
	// Release is the version of this program, such as v1.1.0.
	Release string
	// Kubernetes are the versions that a sandbox can run, the default first; they are
	// offered as completions and choices.
	Kubernetes []string
	// Images and Releases are those that a sandbox can be made with, the default first.
	Images, Releases []string
	// Faults are the beginnings of the faults that a sandbox can have, such as "quota=";
	// they are offered as completions.
	Faults []string

	// Engine returns the engine of a workspace. It is called at most once, and only by
	// verbs that need it: starting must stay fast.
	Engine func(*engine.Workspace, *slog.Logger) (Engine, error)
	// Sandbox returns the cloud on this computer; the same holds.
	Sandbox func(*slog.Logger) (engine.Sandbox, error)
	// Drills returns what upgrades throwaway clusters while things go wrong; the same holds.
	Drills func(*slog.Logger) (engine.Drills, error)
	// Daemon runs a sandbox until ctx ends. It is what the hidden verb `sandbox
	// daemon` does, started by Sandbox.Up.
	Daemon func(ctx context.Context, name string, log *slog.Logger) error

	// Program is how the user calls the program, for commands to copy; the default is
	// taken from the process.
	Program string

	// Stdin, Stdout, Stderr, Env and Now default to those of the process.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Env            func(string) string
	Now            func() time.Time
}

// Main runs the program with the arguments of the process and returns its exit code.
func (a App) Main() int {
	if a.Program == "" && len(os.Args) > 0 {
		wd, _ := os.Getwd() // without one, paths stay whole
		a.Program = calledAs(os.Args[0], wd)
	}
	return a.Run(os.Args[1:])
}

// Run runs the program with args, without the program's name, and returns its exit
// code.
func (a App) Run(args []string) int {
	if a.Stdin == nil {
		a.Stdin = os.Stdin
	}
	if a.Stdout == nil {
		a.Stdout = os.Stdout
	}
	if a.Stderr == nil {
		a.Stderr = os.Stderr
	}
	if a.Env == nil {
		a.Env = os.Getenv
	}
	if a.Now == nil {
		a.Now = time.Now
	}
	return newSession(a).execute(args)
}
