package plan

import (
	"time"
)

// Complete reports whether the run left a complete cluster, if it was an init.
func (r RunSummary) Complete() bool {
	return r.Status == StateDone || r.Status == StateNothing || r.Status == StateDetached
}

// EventsFile is the file of events in the directory of a run, one JSON object per line. Its
// mode is 0600.
const EventsFile = "events.jsonl"

// RunSummary summarizes a past or current run from its directory.
type RunSummary struct {
	ID      string `json:"id"`
	Verb    Verb   `json:"verb"`
	Cluster string `json:"cluster,omitempty"`
	// By is who ran it, such as ops@laptop; empty in records of older programs.
	By string `json:"by,omitempty"`
	To Target `json:"to,omitzero"`
	// Node is the one node that the run was about; empty if it was about all.
	Node    string    `json:"node,omitempty"`
	Started time.Time `json:"started"`
	Ended   time.Time `json:"ended,omitzero"` // zero if it was cut off or still runs
	// Status is a state of a run; "interrupted" if the record has no result.
	Status string `json:"status"`
	// Step is the last step that the run was in.
	Step   string `json:"step,omitempty"`
	Text   string `json:"text,omitempty"`
	Exit   int    `json:"exit"`
	Events int    `json:"events"`
	Dir    string `json:"dir"`
}

// Files of a workspace.
const (
	RunsDir = "constellation-upgrade"
)
