package console

import (
	"context"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// Engine is what the console needs of one workspace. *engine.Engine implements it.
type Engine interface {
	// Home describes the workspace and the next commands.
	Home(context.Context) (engine.Home, error)
	// Preflight checks what init needs and emits each check as it begins and ends.
	Preflight(context.Context, func(plan.Event)) ([]plan.Finding, error)
	// PlanInit returns the plan of init, with its findings. It changes nothing.
	PlanInit(context.Context) (*plan.Plan, error)
	// PlanOperator returns the plan to install the operator in an adopted cluster. It changes nothing.
	PlanOperator(context.Context) (*plan.Plan, error)
	// Infrastructure reports what the cluster needs of its cloud, and what exists. PlanInfraCreate returns the plan to
	// make it. Both change nothing.
	Infrastructure(context.Context) (engine.InfraReport, error)
	PlanInfraCreate(context.Context) (*plan.Plan, error)
	// Run carries out a plan. The first event that it emits is hello and the last is
	// result; emit is never called concurrently.
	Run(context.Context, *plan.Plan, func(plan.Event)) error
	// Status describes the cluster as it is now.
	Status(context.Context) (engine.Status, error)
	// Check returns the reachable versions, the path to them, and the preflight findings of
	// the next hop.
	Check(context.Context, check.Request, func(plan.Event)) (check.Check, error)
	// PlanApply returns the plan of the next hop, with the findings of its check. PlanExecute
	// returns the plan to upgrade only the services. They change nothing.
	PlanApply(context.Context, engine.ApplyRequest, func(plan.Event)) (*plan.Plan, error)
	PlanExecute(context.Context, engine.ApplyRequest) (*plan.Plan, error)
	// ChangeRollout pauses, resumes or cancels the rollout and returns its previous state.
	ChangeRollout(context.Context, cluster.RolloutChange) (cluster.Rollout, error)
	// Watch emits the progress of a rollout until it or ctx ends; see engine.Engine.
	Watch(context.Context, engine.WatchRequest, func(plan.Event)) error
	// APIHealth returns the health of the API server while its health monitor runs.
	APIHealth() engine.APIHealth
	// PlanBackup returns the plan of a backup. It changes nothing.
	PlanBackup(context.Context, engine.BackupRequest) (*plan.Plan, error)
	// ListBackups returns the backups in a directory, newest first; an empty dir means the
	// workspace's. With verify it reads all files and verifies their digests.
	ListBackups(ctx context.Context, dir string, verify bool, progress func(id string, done, total int64)) ([]engine.BackupEntry, error)
	// VerifyBackup reads all files of a backup and returns nil if it is complete.
	VerifyBackup(ctx context.Context, dir, id string, progress func(done, total int64)) (engine.BackupVerification, error)
	// LocalData returns the data on the disks of nodes, which no backup contains.
	LocalData(context.Context) (cluster.LocalData, error)
}
