// Package plan answers: what will be done to a cluster, and what does a run report?
//
// It holds the values that every package of the engine and every frontend share: a [Plan]
// of [Step] values with its [Finding] values, the [Event] values of a run, and an [Error]
// with an exit code and a remedy. Steps carry functions, but this package runs nothing:
// package engine makes plans and runs them.
//
// It imports nothing of this module but other leaves.
package plan

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"
)

// IDs of the steps of `upgrade apply` that other verbs do not have.
const (
	StepRollout = "wait-for-rollout"
)

// Unacknowledged returns the findings that must be accepted by name and are not.
func (p *Plan) Unacknowledged() []Finding {
	var out []Finding
	for _, f := range p.Findings {
		if f.Named && f.Severity != Block && !slices.Contains(p.Acknowledged, f.ID) {
			out = append(out, f)
		}
	}
	return out
}

// Accepted reports whether the finding with this ID was accepted.
func (p *Plan) Accepted(id string) bool { return slices.Contains(p.Acknowledged, id) }

// Accept notes that findings were accepted by their IDs; in a rehearsal, of which nothing
// need be accepted, all are.
func (p *Plan) Accept(ids ...string) {
	if p.Rehearsal {
		for _, f := range p.Unacknowledged() {
			ids = append(ids, f.ID)
		}
	}
	for _, id := range ids {
		if !slices.Contains(p.Acknowledged, id) {
			p.Acknowledged = append(p.Acknowledged, id)
		}
	}
}

// OnlyWatches reports whether all that is left of the plan is to wait: it changes nothing.
func (p *Plan) OnlyWatches() bool {
	for _, s := range p.Steps {
		if !s.Finished && s.ID != StepRollout {
			return false
		}
	}
	return true
}

// IDs of the steps of init.
const (
	StepCharts = "charts"
)

// Verb is what a plan does.
type Verb string

// Verbs that have a plan.
const (
	VerbInit    Verb = "init"
	VerbPrepare Verb = "upgrade prepare"
	VerbBackup  Verb = "backup create"
	VerbRestore Verb = "backup restore"
	VerbApply   Verb = "upgrade apply"
	VerbExecute Verb = "upgrade execute"
	VerbWatch   Verb = "watch"
	VerbRevoke  Verb = "machine revoke"
	VerbRotate  Verb = "certifier rotate"
	VerbAdopt   Verb = "adopt"
	VerbRecover Verb = "recover"
	VerbEncrypt Verb = "encryption rotate"
	VerbDecrypt Verb = "encryption disable"

	VerbInfraCreate    Verb = "infra create"
	VerbInfraTerminate Verb = "infra terminate"
)

// Target is what a cluster is brought to. Empty fields are not known or do not change.
type Target struct {
	Release    string `json:"release,omitempty"`
	Image      string `json:"image,omitempty"`
	Kubernetes string `json:"kubernetes,omitempty"`
	// Etcd is the tag of etcd's image, if a hop changes that alone.
	Etcd string `json:"etcd,omitempty"`
}

// Plan is what will be done, as a value: shown, exported, executed and resumed.
// Nothing of it is remembered between two runs: to resume is to plan again.
type Plan struct {
	// ID names the run and its directory: "init-20261121070501-1a2b3c4d".
	ID      string `json:"id"`
	Verb    Verb   `json:"verb"`
	Cluster string `json:"cluster"`
	// Node is the one node that the plan is about; empty if it is about all.
	Node string `json:"node,omitempty"`
	// Simulated says that the cluster's machines only do as machines would.
	Simulated bool `json:"simulated,omitempty"`
	// NotAttested says that no evidence of hardware vouches for the cluster's machines.
	NotAttested bool   `json:"notAttested,omitempty"`
	From        Target `json:"from,omitzero"`
	To          Target `json:"to"`
	// Nodes is how many machines the cluster will have, by group.
	Nodes    map[string]int `json:"nodes,omitempty"`
	Findings []Finding      `json:"findings,omitempty"`
	// Acknowledged are the IDs of the findings that were accepted by name.
	Acknowledged []string `json:"acknowledged,omitempty"`
	// Components are the rows of the version table that the plan changes, Changes what else
	// it does; empty for verbs that change no versions.
	Components []ComponentCheck `json:"components,omitempty"`
	Changes    *Changes         `json:"changes,omitempty"`
	// Surge is how many machines there may be beyond the wanted number, such as 2 or 10%;
	// empty if that is not known.
	Surge string `json:"surge,omitempty"`
	// LastBackup is the newest whole backup of the cluster when an upgrade was planned; nil if
	// there was none.
	LastBackup *LastBackup `json:"lastBackup,omitempty"`
	// Rehearsal says that running the plan has no effect.
	Rehearsal bool   `json:"rehearsal,omitempty"`
	Steps     []Step `json:"steps"`
	// Notes are sentences that people must read before they accept the plan.
	Notes []string `json:"notes,omitempty"`
	// Files will be there afterwards.
	Files   []File    `json:"files,omitempty"`
	Created time.Time `json:"created"`
	// By is who runs it, such as ops@laptop; empty until somebody does.
	By string `json:"by,omitempty"`

	// Hold locks the cluster for the run, which ends with lost; nil if no lock is needed.
	Hold func(ctx context.Context, r *Reporter, lost func(error)) (release func(), err error) `json:"-"`
	// End is what the result says; zero fields have defaults.
	End Ending `json:"-"`
	// OnClose gives back what the plan holds open; nil if it holds nothing.
	OnClose func() `json:"-"`
}

// Close gives back what the plan holds open, after which it cannot be run. It can be called
// more than once.
func (p *Plan) Close() {
	if p.OnClose != nil {
		p.OnClose()
		p.OnClose = nil
	}
}

// Ending is what a run reports when it has ended.
type Ending struct {
	Command string   // that resumes; the default is the verb
	Done    string   // the text of the result
	Nothing string   // the same if there was nothing to do
	Next    []string // commands that make sense then
	Patch   json.RawMessage
	// Etcd has a line for each verified member of etcd; a step sets it.
	Etcd    []string
	Cleanup func() // is called when the run is over, before its result is sent
}

// Blocked returns the findings that forbid the plan.
func (p *Plan) Blocked() []Finding { return p.with(Block) }

// Warnings returns the findings that the user must have seen.
func (p *Plan) Warnings() []Finding { return p.with(Warn) }

func (p *Plan) with(s Severity) []Finding {
	var out []Finding
	for _, f := range p.Findings {
		if f.Severity == s {
			out = append(out, f)
		}
	}
	return out
}

// Finished reports whether every step was done when the plan was made.
func (p *Plan) Finished() bool {
	for _, s := range p.Steps {
		if !s.Finished {
			return false
		}
	}
	return true
}

// Resumes reports whether some steps, but not all, were done when the plan was made.
func (p *Plan) Resumes() bool {
	for _, s := range p.Steps {
		if s.Finished {
			return !p.Finished()
		}
	}
	return false
}

// Step is one row of the plan.
type Step struct {
	// ID is stable and kebab-case; it is used in events, flags and docs.
	ID string `json:"id"`
	// Title is imperative: "Publish node components".
	Title string `json:"title"`
	// Effect says what will be different afterwards, with names and numbers.
	Effect string `json:"effect"`
	// Details say it line by line where there is more to say.
	Details []string `json:"details,omitempty"`
	// Warning, if set, must be acknowledged before Run.
	Warning string `json:"warning,omitempty"`
	// Final marks the point of no return: from here on the cluster continues on its own.
	Final bool `json:"final,omitempty"`
	// Finished is what Done observed when the plan was made.
	Finished bool `json:"finished,omitempty"`

	// Done observes the world; true means that Run has nothing to do. Nil means
	// that the step always runs.
	Done func(context.Context) (bool, error) `json:"-"`
	// Run makes the effect. It may be called again after any interruption. When its
	// context ends it returns soon, having finished what must not be cut in half.
	Run func(context.Context, *Reporter) error `json:"-"`
	// Undo takes the effect back; nil if there is nothing to take back. It is
	// offered, never automatic.
	Undo func(context.Context, *Reporter) error `json:"-"`
}

// String is "v1.1.0, image v1.0.0, Kubernetes v1.35.4" without unknown parts.
func (t Target) String() string {
	var parts []string
	if t.Release != "" {
		parts = append(parts, t.Release)
	}
	if t.Image != "" {
		parts = append(parts, "image "+t.Image)
	}
	if t.Kubernetes != "" {
		parts = append(parts, "Kubernetes "+t.Kubernetes)
	}
	if t.Etcd != "" {
		parts = append(parts, "etcd "+t.Etcd)
	}
	return strings.Join(parts, ", ")
}
