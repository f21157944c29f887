package engine

import (
	"constellation/engine/plan"
)

// What moved into packages of its own keeps its name here for packages that still use it.

// Moved to package plan.
type (
	Changes           = plan.Changes
	ChartChange       = plan.ChartChange
	ComponentCheck    = plan.ComponentCheck
	Ending            = plan.Ending
	Error             = plan.Error
	Event             = plan.Event
	File              = plan.File
	Finding           = plan.Finding
	ImageChange       = plan.ImageChange
	Kind              = plan.Kind
	LastBackup        = plan.LastBackup
	MeasurementChange = plan.MeasurementChange
	Plan              = plan.Plan
	Reporter          = plan.Reporter
	Result            = plan.Result
	RunSummary        = plan.RunSummary
	Severity          = plan.Severity
	Sink              = plan.Sink
	Step              = plan.Step
	Target            = plan.Target
	ValueChange       = plan.ValueChange
	Verb              = plan.Verb
)

// Moved to package plan.
const (
	BackupAge            = plan.BackupAge
	Block                = plan.Block
	ExitBlocked          = plan.ExitBlocked
	ExitDiffers          = plan.ExitDiffers
	ExitDone             = plan.ExitDone
	ExitFailed           = plan.ExitFailed
	ExitHeld             = plan.ExitHeld
	ExitHungUp           = plan.ExitHungUp
	ExitInterrupted      = plan.ExitInterrupted
	ExitNothing          = plan.ExitNothing
	ExitStopped          = plan.ExitStopped
	ExitTerminated       = plan.ExitTerminated
	ExitUnacknowledged   = plan.ExitUnacknowledged
	ExitUpgradeAvailable = plan.ExitUpgradeAvailable
	ExitUsage            = plan.ExitUsage
	Info                 = plan.Info
	KindCheck            = plan.KindCheck
	KindHello            = plan.KindHello
	KindLog              = plan.KindLog
	KindNode             = plan.KindNode
	KindNodePlan         = plan.KindNodePlan
	KindPlan             = plan.KindPlan
	KindProgress         = plan.KindProgress
	KindResult           = plan.KindResult
	KindStep             = plan.KindStep
	KindWait             = plan.KindWait
	NodeBooting          = plan.NodeBooting
	NodeCreating         = plan.NodeCreating
	NodeDraining         = plan.NodeDraining
	NodeFailed           = plan.NodeFailed
	NodeGone             = plan.NodeGone
	NodeJoining          = plan.NodeJoining
	NodeLeaving          = plan.NodeLeaving
	NodeNotReady         = plan.NodeNotReady
	NodeOutdated         = plan.NodeOutdated
	NodeReady            = plan.NodeReady
	NodeReplacing        = plan.NodeReplacing
	NodeUpgrading        = plan.NodeUpgrading
	NotChecked           = plan.NotChecked
	RunsDir              = plan.RunsDir
	Schema               = plan.Schema
	StateDetached        = plan.StateDetached
	StateDone            = plan.StateDone
	StateFailed          = plan.StateFailed
	StateNothing         = plan.StateNothing
	StateRunning         = plan.StateRunning
	StateSkipped         = plan.StateSkipped
	StateStopped         = plan.StateStopped
	StateUnknown         = plan.StateUnknown
	StepCharts           = plan.StepCharts
	StepRollout          = plan.StepRollout
	VerbApply            = plan.VerbApply
	VerbBackup           = plan.VerbBackup
	VerbExecute          = plan.VerbExecute
	VerbInit             = plan.VerbInit
	VerbPrepare          = plan.VerbPrepare
	VerbRestore          = plan.VerbRestore
	VerbRevoke           = plan.VerbRevoke
	VerbWatch            = plan.VerbWatch
	Warn                 = plan.Warn
)

// Moved to package plan.
var (
	ExitCode    = plan.ExitCode
	NewReporter = plan.NewReporter
	Remedy      = plan.Remedy
)
