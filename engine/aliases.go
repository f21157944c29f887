package engine

import (
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/workspace"
)

// What moved into packages of its own keeps its name here for packages that still use it.

// Moved to package cluster.
type (
	AgentRun      = cluster.AgentRun
	Chart         = cluster.Chart
	CloudMachine  = cluster.CloudMachine
	Components    = cluster.Components
	Condition     = cluster.Condition
	Denial        = cluster.Denial
	ExpectedNode  = cluster.ExpectedNode
	HeldError     = cluster.HeldError
	Holder        = cluster.Holder
	Holding       = cluster.Holding
	JoinConfig    = cluster.JoinConfig
	LocalData     = cluster.LocalData
	LocalVolume   = cluster.LocalVolume
	LogLine       = cluster.LogLine
	Move          = cluster.Move
	Node          = cluster.Node
	NodePlan      = cluster.NodePlan
	NodePlanFacts = cluster.NodePlanFacts
	NodePlanNode  = cluster.NodePlanNode
	NodeTarget    = cluster.NodeTarget
	Rollout       = cluster.Rollout
	RolloutChange = cluster.RolloutChange
	RolloutWait   = cluster.RolloutWait
	Service       = cluster.Service
)

// Moved to package cluster.
const (
	HoldingGroup        = cluster.HoldingGroup
	HoldingNode         = cluster.HoldingNode
	PlanApplying        = cluster.PlanApplying
	PlanCancelled       = cluster.PlanCancelled
	PlanComplete        = cluster.PlanComplete
	PlanFailed          = cluster.PlanFailed
	PlanGone            = cluster.PlanGone
	PlanInvalid         = cluster.PlanInvalid
	PlanPaused          = cluster.PlanPaused
	PlanUnseen          = cluster.PlanUnseen
	PlanWaiting         = cluster.PlanWaiting
	ServiceOfKubernetes = cluster.ServiceOfKubernetes
	ServiceOfRelease    = cluster.ServiceOfRelease
)

// Moved to package cluster.
var (
	ErrAbsent      = cluster.ErrAbsent
	ErrConflict    = cluster.ErrConflict
	ErrDenied      = cluster.ErrDenied
	ErrForbidden   = cluster.ErrForbidden
	ErrUnreachable = cluster.ErrUnreachable
)

// Moved to package cluster.
var (
	ChartKey       = cluster.ChartKey
	ComponentsName = cluster.ComponentsName
)

// Moved to package compat.
type (
	Hop         = compat.Hop
	Matrix      = compat.Matrix
	Offer       = compat.Offer
	Planned     = compat.Planned
	Reach       = compat.Reach
	RuleResult  = compat.RuleResult
	Running     = compat.Running
	Span        = compat.Span
	Unreachable = compat.Unreachable
)

// Moved to package compat.
const (
	NoteFinishServices = compat.NoteFinishServices
	NoteNewerCLI       = compat.NoteNewerCLI
)

// Moved to package compat.
var (
	At        = compat.At
	NewMatrix = compat.NewMatrix
)

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

// Moved to package rollout.
type (
	BadLine    = rollout.BadLine
	Board      = rollout.Board
	BoardGroup = rollout.BoardGroup
	BoardLine  = rollout.BoardLine
	BoardLog   = rollout.BoardLog
	BoardNode  = rollout.BoardNode
	BoardPart  = rollout.BoardPart
	BoardPlace = rollout.BoardPlace
	BoardPlan  = rollout.BoardPlan
	BoardStep  = rollout.BoardStep
	BoardWait  = rollout.BoardWait
	Moment     = rollout.Moment
	PastRun    = rollout.PastRun
	PastStage  = rollout.PastStage
	PastStep   = rollout.PastStep
	PastWait   = rollout.PastWait
)

// Moved to package rollout.
var (
	StagesNew = rollout.StagesNew
	StagesOld = rollout.StagesOld
)

// Moved to package rollout.
var (
	ReadRecord = rollout.ReadRecord
	Unnamed    = rollout.Unnamed
)

// Moved to package workspace.
type (
	AttestationConfig = workspace.AttestationConfig
	ClusterValues     = workspace.ClusterValues
	Config            = workspace.Config
	ConfigErrors      = workspace.ConfigErrors
	FieldChange       = workspace.FieldChange
	FieldError        = workspace.FieldError
	GenerateOptions   = workspace.GenerateOptions
	HexBytes          = workspace.HexBytes
	Infrastructure    = workspace.Infrastructure
	MasterSecret      = workspace.MasterSecret
	NodeGroup         = workspace.NodeGroup
	ProviderConfig    = workspace.ProviderConfig
	ReleasesConfig    = workspace.ReleasesConfig
	SandboxConfig     = workspace.SandboxConfig
	SandboxInfo       = workspace.SandboxInfo
	SandboxState      = workspace.SandboxState
	State             = workspace.State
	TPM2Config        = workspace.TPM2Config
	Workspace         = workspace.Workspace
)

// Moved to package workspace.
const (
	ConfigFile       = workspace.ConfigFile
	ConfigVersion    = workspace.ConfigVersion
	KubeconfigFile   = workspace.KubeconfigFile
	MasterSecretFile = workspace.MasterSecretFile
	StateFile        = workspace.StateFile
	StateVersion     = workspace.StateVersion
)

// Moved to package workspace.
var (
	GenerateConfig = workspace.GenerateConfig
	MigrateConfig  = workspace.MigrateConfig
	OpenWorkspace  = workspace.OpenWorkspace
	ParseConfig    = workspace.ParseConfig
	ParseState     = workspace.ParseState
)
