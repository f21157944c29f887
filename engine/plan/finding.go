package plan

import (
	"time"
)

// Severity is what a finding means for the plan.
type Severity string

// Severities. Info findings are fine, Warn findings are acknowledged by the user, Block
// findings cannot be forced. NotChecked means that the result is unknown, for the given
// reason.
const (
	Info       Severity = "ok"
	Warn       Severity = "warn"
	Block      Severity = "block"
	NotChecked Severity = "not-checked"
)

// Finding is what one check found.
type Finding struct {
	// ID is stable and kebab-case: "init-endpoint".
	ID string `json:"id"`
	// Field is the path of the configuration that it is about, such as
	// "nodeGroups.control-plane.count"; often empty.
	Field    string   `json:"field,omitempty"`
	Severity Severity `json:"severity"`
	// Named says that it is accepted by its ID alone, not together with the plan.
	Named bool `json:"named,omitempty"`
	// Title is one line, Detail the evidence, Remedy what to do about it.
	Title  string `json:"title"`
	Detail string `json:"detail,omitempty"`
	Remedy string `json:"remedy,omitempty"`
	// Source is the area that the finding belongs to: config, files, cloud, network, release.
	Source string `json:"source,omitempty"`
	// Owner is who can change it: "namespace shop, Helm release web", "argocd-controller".
	Owner string `json:"owner,omitempty"`
	// Objects are what it is about, "kind/namespace/name", the first few hundred.
	Objects []string `json:"objects,omitempty"`
	// Locations are where it stands in files, for findings of files alone.
	Locations []Location `json:"locations,omitempty"`
	// Command is the one command that clears it; empty if there is none.
	Command string `json:"command,omitempty"`
	// Reference is where the rule comes from: a policy page, a KEP, an RFC.
	Reference string `json:"reference,omitempty"`
	// Took is how long the check ran.
	Took time.Duration `json:"took,omitempty"` // nanoseconds in JSON
}

// Location is a line of a file.
type Location struct {
	// File is slash-separated, relative to the directory that was checked.
	File string `json:"file"`
	// Line counts from 1; zero is the whole file.
	Line int `json:"line,omitempty"`
}
