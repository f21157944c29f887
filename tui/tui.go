// Package tui is the user interface on the command line: the verbs (cobra commands), the session
// of one invocation, the plain printer and JSON Lines output. Its rooms are packages, and
// imports go from left to right only:
//
//		tui ──► tui/console ──► tui/view ──► tui/term
//
//	  - tui/console is the console: the only Bubble Tea model, and its screens.
//	  - tui/view draws pages: pure functions of a theme, a width and values.
//	  - tui/term talks to the terminal and formats text.
//
// All of them render the data of package engine. The console and the plain printer fold the
// events of a run into the same view.Timeline, so the two cannot disagree. JSON Lines are the
// events themselves.
//
// A verb is a function that makes its command for a session (session.go); rootCommand
// (commands.go) lists all of them. It opens the console with showConsole (console.go) if it needs
// one and the terminal allows it. Verbs that only print, such as status, build no console.
//
// # Rules
//
// The packages make no decision about a cluster and have no connection to one; they import
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
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/adopt"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/conformance"
	"constellation/engine/enrol"
	"constellation/engine/findings"
	"constellation/engine/infra"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/support"
	"constellation/engine/workspace"
	"constellation/tui/console"
	"constellation/tui/view"
)

// Engine is what this package needs of one workspace. *engine.Engine implements it.
type Engine interface {
	console.Engine

	// Measure reads the registers of an unused control plane, and writes those that are not known.
	Measure(ctx context.Context, write bool) (engine.MeasuredMachine, error)
	// Verify judges fresh evidence of the control planes.
	Verify(context.Context) (engine.Verification, error)
	// StatusOf describes a cluster without a workspace.
	StatusOf(context.Context, cluster.Selected) (engine.Status, error)
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
	// UseIdentity has later calls decrypt backups with a file of age-keygen; empty: that of the environment.
	UseIdentity(path string) error
	// DecryptBackup writes a backup without encryption and returns the path of its files.
	DecryptBackup(ctx context.Context, dir, id, to string, progress func(done, total int64)) (path string, err error)
	// ShowBackup returns the manifest of a backup and its path.
	ShowBackup(dir, id string) (engine.BackupManifest, string, error)
	// PruneBackups deletes all backups except the newest complete ones.
	PruneBackups(ctx context.Context, dir string, keep int) (removed []string, err error)
	// PlanRestore returns the plan to restore objects that the cluster lacks. It changes
	// nothing. The caller must close the plan.
	PlanRestore(context.Context, engine.RestoreRequest, func(plan.Event)) (*plan.Plan, error)
	// PlanOperator returns the plan to install the operator in an adopted cluster, PlanRemoveOperator that to
	// take it out again. Both change nothing.
	PlanOperator(context.Context) (*plan.Plan, error)
	PlanRemoveOperator(context.Context) (*plan.Plan, error)
	// PlanRotate returns the plan to rotate the keys of the certifier. It changes nothing.
	PlanRotate(context.Context, engine.RotateRequest) (*plan.Plan, error)
	// PlanRecover returns the plan to send secret keys to control planes that lost theirs. It changes nothing.
	PlanRecover(context.Context, engine.RecoverRequest) (*plan.Plan, error)
	// PlanRotateKey returns the plan to rotate the key that encrypts Secrets. It changes nothing.
	PlanRotateKey(context.Context, engine.RotateKeyRequest) (*plan.Plan, error)
	// PlanDisableEncryption returns the plan to store Secrets without encryption. It changes nothing.
	PlanDisableEncryption(context.Context, engine.DisableEncryptionRequest) (*plan.Plan, error)
	// Encryption describes the key that encrypts Secrets.
	Encryption(context.Context) (engine.EncryptionStatus, error)
	// PlanRevoke returns the plan to revoke a machine and to delete it. It changes nothing.
	PlanRevoke(context.Context, engine.RevokeRequest) (*plan.Plan, error)
	// Infrastructure reports what the cluster needs of its cloud, and what exists. It changes nothing.
	Infrastructure(context.Context) (engine.InfraReport, error)
	// InfraRoles returns the least roles for it. It asks no cloud.
	InfraRoles() ([]infra.Role, error)
	// PlanInfraCreate returns the plan to make it, PlanInfraTerminate that to delete it. Both change nothing.
	PlanInfraCreate(context.Context) (*plan.Plan, error)
	PlanInfraTerminate(context.Context) (*plan.Plan, error)
	// Differ compares the cluster with a backup and reports each object that differs.
	Differ(context.Context, engine.RestoreRequest, func(plan.Event), func(engine.Difference)) (engine.Compared, error)
}

// Clusters is what this package needs of clusters without a workspace. kube.Clusters implements
// it.
type Clusters interface {
	// Contexts returns the contexts that an access can select.
	Contexts(cluster.Access) ([]string, error)
	// Select returns the selected cluster. It sends no request.
	Select(cluster.Access) (cluster.Selected, error)
	// Check checks a cluster. Each of its requests is bounded by the timeout unless that is zero.
	Check(ctx context.Context, s cluster.Selected, timeout time.Duration, r check.ForeignRequest, emit func(plan.Event)) (check.ClusterCheck, error)
	// List returns the contexts of a kubeconfig.
	List(cluster.Access) (cluster.Contexts, error)
	// Reach returns an error with a remedy if the API server of a cluster does not answer.
	Reach(ctx context.Context, s cluster.Selected) error
	// Look observes a cluster within the deadline of ctx.
	Look(ctx context.Context, s cluster.Selected) check.Glance
	// Examine reports what adopting a cluster would do. It only reads.
	Examine(ctx context.Context, s cluster.Selected, r adopt.Request, emit func(plan.Event)) (adopt.Report, error)
	// Kubeconfig returns a kubeconfig with the selected context alone, which any program can use.
	Kubeconfig(cluster.Access) ([]byte, error)
	// CheckRole returns the manifest of the least ClusterRole for a check.
	CheckRole(dryRun bool) string
	// Security compares a cluster with the guides. only is the ID of one check; empty: all.
	Security(ctx context.Context, s cluster.Selected, timeout time.Duration, only string, emit func(plan.Event)) (check.Security, error)
	// SecurityChecks are the checks of the guides, SecurityRole the manifest of the least ClusterRole for them.
	SecurityChecks() []check.SecurityCheck
	SecurityRole() string
}

// Enrol is what this package needs to enrol machines. Packages enrol and machinecheck have the functions.
type Enrol struct {
	// Programs finds the programs of a release for an architecture.
	Programs func(dir, release, arch string) (enrol.Programs, error)
	// Check checks a machine that is connected.
	Check func(context.Context, machinecheck.Machine, machinecheck.Needs) machinecheck.Result
	// Install enrols machines, or reports what that would do. step and done are never called concurrently.
	Install func(ctx context.Context, b enrol.Batch, step func(i int, s enrol.Step), done func(i int, r enrol.Result)) []enrol.Result
	// Remove gives a machine back.
	Remove func(context.Context, enrol.Removal) (enrol.Outcome, error)
	// Logs writes messages of a machine, as the machine prints them.
	Logs func(context.Context, enrol.LogRequest, io.Writer) error
}

// App is the program: its parts, which main provides, and its environment.
type App struct {
	// Release is the version of this program, such as v1.1.0.
	Release string
	// Kubernetes are the versions that a sandbox can run, the oldest first. They are completions.
	Kubernetes []string
	// Minors are the minors of Kubernetes that `check` has data about, the newest first. They are
	// completions.
	Minors []string
	// Releases are the supported releases, the default first. They are completions.
	Releases []string

	// Engine returns the engine of a workspace. It is called at most once, and only by verbs
	// that need it, so that all others start fast.
	Engine func(*workspace.Workspace, *slog.Logger) (Engine, error)
	// Clusters are the clusters of kubeconfigs, without a workspace.
	Clusters Clusters
	// FindSandbox returns the sandbox of the workspace in dir, an absolute path. The error wraps
	// cloud.ErrNotFound if there is none.
	FindSandbox func(ctx context.Context, dir string) (engine.SandboxStatus, error)
	// CheckOffline checks manifests or a backup without a cluster.
	CheckOffline func(context.Context, findings.OfflineRequest) (*findings.Offline, error)
	// FixMachines runs the commands that mend findings of such a check. done is called after each machine, never
	// concurrently.
	FixMachines func(ctx context.Context, r machinecheck.Request, results []machinecheck.Result, done func(machinecheck.Fixed)) []machinecheck.Fixed
	// CheckMachines checks machines by SSH. done is called after each, never concurrently.
	CheckMachines func(ctx context.Context, r machinecheck.Request, done func(machinecheck.Result)) []machinecheck.Result
	// Enrol works on machines that become nodes.
	Enrol Enrol
	// WriteSupportBundle writes a bundle for maintainers. SupportRole is the manifest of the least ClusterRole for a complete one.
	WriteSupportBundle func(context.Context, support.Request) (support.Result, error)
	SupportRole        func() string
	// ServeMCP serves read-only tools to an assistant until its input ends.
	ServeMCP func(context.Context, MCPRequest) error
	// RunSandbox executes the verb sandbox, its help and its completions in another program.
	// args are those of this program. It returns the exit code, or an error if the other program
	// did not start.
	RunSandbox func(args []string) (int, error)
	// Conform runs the conformance suite of a cloud, with verbs of this program.
	Conform func(ctx context.Context, tool string, s conformance.Spec) (*conformance.Report, error)
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
	args := os.Args[1:]
	if len(os.Args) > 0 {
		args = pluginArgs(os.Args[0], args)
	}
	return a.Run(args)
}

// Command returns the program's commands, for documentation.
func (a App) Command() *cobra.Command {
	a.Env, a.Now = os.Getenv, time.Now
	return rootCommand(newSession(a))
}

// completionName is the name under which kubectl starts a plugin to complete its arguments.
const completionName = "kubectl_complete-constellation"

// pluginArgs returns the arguments of a program that was started as arg0.
func pluginArgs(arg0 string, args []string) []string {
	if strings.TrimSuffix(filepath.Base(arg0), ".exe") != completionName {
		return args
	}
	return append([]string{cobra.ShellCompRequestCmd}, args...)
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
