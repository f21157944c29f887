// Package tui is the user interface: the commands, the console, the plain printer and JSON
// Lines output. It has these rooms, and imports go from left to right only:
//
//		tui ──► tui/view ──► tui/term
//
//	  - tui/term talks to the terminal and formats text.
//	  - tui/view draws pages: pure functions of a theme, a width and values.
//	  - tui, this package, has the console (the only Bubble Tea model), the verbs (cobra
//	    commands), the session of one invocation, the plain printer and JSON Lines.
//
// All of them render the data of package engine. The console and the plain printer fold the
// events of a run into the same view.Timeline, so the two cannot disagree. JSON Lines are the
// events themselves.
//
// # The console
//
// console (console.go) has what all screens share: the engine, the current task, the run, and
// the screen that is shown. A screen (screen.go) is one type in a file screen_*.go with its
// view, its keys, its command line, and the messages that it takes. To add a screen, write its
// type and add it to console and newScreens; the compiler reports what is missing.
//
// A key press becomes a command in keys.go: console.key looks the key up in console.bindings,
// which are those of the innermost prompt or overlay, or those of the current screen (its
// method keys) and globalKeys. The binding's action, do, returns the tea.Cmd. Key line, help
// and palette use the same bindings.
//
// The result of a command comes back as a message: console.take handles those of runs and
// tasks and gives all others to the screens' take.
//
// # Rules
//
// The package makes no decision about a cluster and has no connection to one; it imports
// package engine and its value packages only. Leaving the console never harms a run. Text from
// outside, such as a log line or the name of a node, is cleaned of terminal control characters
// before it is shown.
//
// Stdout gets the output of a verb or the events of its run. Stderr gets errors and remarks
// about the invocation.
package tui

import (
	"context"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/workspace"
	"constellation/tui/view"
)

// Engine is what this package needs of one workspace. *engine.Engine implements it.
type Engine interface {
	consoleEngine

	// Skip excludes a node or a group from rollouts, or resumes it, and returns its previous
	// state.
	Skip(ctx context.Context, name string, skip bool) (cluster.SkipState, error)
	// Runs returns the recorded runs of the workspace, newest first. PastRun returns the
	// details of one, Record the path of its events.
	Runs() ([]plan.RunSummary, error)
	PastRun(id string) (rollout.PastRun, error)
	Record(id string) (path string, err error)
	// PlanPrepare returns the plan to publish the requirements of the next hop, with the
	// findings of its check. It changes nothing.
	PlanPrepare(context.Context, engine.PrepareRequest, func(plan.Event)) (*plan.Plan, error)
	// ShowBackup returns the manifest of a backup and its path.
	ShowBackup(dir, id string) (engine.BackupManifest, string, error)
	// PruneBackups deletes all backups except the newest complete ones.
	PruneBackups(ctx context.Context, dir string, keep int) (removed []string, err error)
	// PlanRestore returns the plan to restore objects that the cluster lacks. It changes
	// nothing. The caller must close the plan.
	PlanRestore(context.Context, engine.RestoreRequest, func(plan.Event)) (*plan.Plan, error)
	// PlanRevoke returns the plan to revoke a machine and to delete it. It changes nothing.
	PlanRevoke(context.Context, engine.RevokeRequest) (*plan.Plan, error)
	// Differ compares the cluster with a backup and reports each object that differs.
	Differ(context.Context, engine.RestoreRequest, func(plan.Event), func(engine.Difference)) (engine.Compared, error)
}

// App is the program: its parts, which main provides, and its environment.
type App struct {
	// Release is the version of this program, such as v1.1.0.
	Release string
	// Kubernetes are the versions that a sandbox can run, the default first. They are
	// completions and choices.
	Kubernetes []string
	// Releases are the releases that the program knows, the default first. They are completions.
	Releases []string

	// Engine returns the engine of a workspace. It is called at most once, and only by verbs
	// that need it, so that all others start fast.
	Engine func(*workspace.Workspace, *slog.Logger) (Engine, error)
	// FindSandbox returns the sandbox of the workspace in dir, an absolute path. The error wraps
	// cloud.ErrNotFound if there is none.
	FindSandbox func(ctx context.Context, dir string) (engine.SandboxStatus, error)
	// RunSandbox executes the verb sandbox, its help and its completions in another program.
	// args are those of this program. It returns the exit code, or an error if the other program
	// did not start.
	RunSandbox func(args []string) (int, error)
	// Verbs returns the verbs of a program that has other verbs than this package defines.
	Verbs func(*Invocation) []*cobra.Command

	// Program is the program's name in commands that the user copies; the default is taken
	// from the process.
	Program string

	// Stdin, Stdout, Stderr, Env and Now default to the process's own.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Env            func(string) string
	Now            func() time.Time
}

// Main runs the program with the arguments of the process and returns its exit code.
func (a App) Main() int {
	if a.Program == "" && len(os.Args) > 0 {
		wd, _ := os.Getwd() // on error, paths stay absolute
		a.Program = view.CalledAs(os.Args[0], wd)
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
