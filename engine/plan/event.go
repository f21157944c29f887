package plan

import (
	"encoding/json"
	"time"
)

// Kind says what an event tells.
type Kind string

// Kinds of events. The first event of a run is hello, the last is result; neither
// occurs twice.
const (
	KindHello    Kind = "hello"     // schema, tool, run and what it is about
	KindPlan     Kind = "plan"      // the plan, in Data
	KindCheck    Kind = "check"     // a finding of the preflight: Object is its ID, State running, ok, warn or block
	KindStep     Kind = "step"      // a step changed its state
	KindNode     Kind = "node"      // a machine went From one state To another
	KindLog      Kind = "log"       // one line of a program that runs somewhere else
	KindProgress Kind = "progress"  // Current of Total, or Counts
	KindWait     Kind = "wait"      // why nothing happens: Text says what is waited for; an empty Text ends the wait
	KindNodePlan Kind = "node-plan" // how a Plan of upgrade.cattle.io is: Object is its name, Counts those of its nodes, Data [NodePlanFacts]
	KindResult   Kind = "result"    // exit code, and how to go on
)

// Schema is the version of the event format. Additions raise its minor; readers
// ignore fields that they do not know.
const Schema = "1.0"

// States of a step and of a run.
const (
	StateRunning  = "running"
	StateDone     = "done"
	StateSkipped  = "skipped"  // its effect was there already
	StateFailed   = "failed"   // Text says why, Remedy what to do
	StateStopped  = "stopped"  // the user left; the same command goes on
	StateDetached = "detached" // the user left; the cluster continues on its own
	StateNothing  = "nothing"  // every step was done before
)

// States of a machine on its way into the cluster, as node events tell them.
const (
	NodeCreating = "creating" // the cloud makes the machine
	NodeBooting  = "booting"  // it runs, and has not been heard of
	NodeJoining  = "joining"  // it was attested and got its ticket
	NodeNotReady = "not-ready"
	NodeReady    = "ready"
	NodeFailed   = "failed"
	NodeGone     = "gone"
)

// Event is a fact about a run, in order, without gaps. Its JSON is the -o json
// format: lower snake case, empty fields left out. No event holds a secret.
type Event struct {
	// Seq counts 1, 2, 3, ... in each run of the program.
	Seq  uint64    `json:"seq"`
	Time time.Time `json:"time"`
	Kind Kind      `json:"kind"`

	Schema string `json:"schema,omitempty"`
	Tool   string `json:"tool,omitempty"`
	Run    string `json:"run,omitempty"`
	// Simulated says, in hello, that the machines only do as machines would.
	Simulated bool `json:"simulated,omitempty"`
	// NotAttested says, in hello, that no evidence of hardware vouches for the machines.
	NotAttested bool `json:"notAttested,omitempty"`
	// By is who started the run, in hello: ops@laptop.
	By string `json:"by,omitempty"`
	// Step is the ID of the step that the event belongs to.
	Step  string `json:"step,omitempty"`
	State string `json:"state,omitempty"`
	Node  string `json:"node,omitempty"`
	Group string `json:"group,omitempty"`
	From  string `json:"from,omitempty"`
	To    string `json:"to,omitempty"`
	// With is the other machine of a replacement: the replacement node of a node that leaves, the
	// old node of one that joins. Role is control-plane for control planes.
	With string `json:"with,omitempty"`
	Role string `json:"role,omitempty"`
	// ProviderID is the provider ID of the machine, as its Node has it; empty if it is not known.
	ProviderID string `json:"providerID,omitempty"`
	// Source is who speaks in a log event: kubeadm, bootstrapper, join-service.
	Source string `json:"source,omitempty"`
	// Level is debug, info, warn or error.
	Level string `json:"level,omitempty"`
	// Text is for people: a sentence, or the line of a log. It may hold hostile
	// characters when it comes from a machine; renderers clean it.
	Text string `json:"text,omitempty"`
	// Object names what the event is about when that is no node: a chart, a finding.
	Object string `json:"object,omitempty"`
	Remedy string `json:"remedy,omitempty"`

	Attempt int              `json:"attempt,omitempty"`
	TookMS  int64            `json:"took_ms,omitempty"`
	Current int64            `json:"current,omitempty"`
	Total   int64            `json:"total,omitempty"`
	Counts  map[string]int64 `json:"counts,omitempty"`
	// ETALeast and ETAMost say between which times all nodes will be at the target. They are
	// set in progress of a rollout, once anything is known about its pace.
	ETALeast time.Time       `json:"eta_least,omitzero"`
	ETAMost  time.Time       `json:"eta_most,omitzero"`
	Data     json.RawMessage `json:"data,omitempty"`
	// Exit is set in the result alone.
	Exit *int `json:"exit,omitempty"`
}

// Result is the Data of a result event.
type Result struct {
	// Status is a state of a run: done, nothing, failed, stopped, detached.
	Status string `json:"status"`
	// Files were written by the run or are what it left for the user.
	Files []File `json:"files,omitempty"`
	// Resume is the command that goes on where the run ended; empty if it is complete.
	Resume string `json:"resume,omitempty"`
	// Next are commands that make sense now.
	Next []string `json:"next,omitempty"`
	// Patch is the merge patch of NodeVersion that sets what was prepared.
	Patch json.RawMessage `json:"patch,omitempty"`
	// Etcd has a line for each member of etcd that was verified.
	Etcd []string `json:"etcd,omitempty"`
	// Nodes is how many nodes are Ready.
	Nodes  int   `json:"nodes,omitempty"`
	TookMS int64 `json:"took_ms"`
}

// File is a file that the user keeps.
type File struct {
	Path   string `json:"path"`
	Mode   string `json:"mode"` // "0600"
	Secret bool   `json:"secret"`
	// Note says what it is for, and what to do with it.
	Note   string `json:"note"`
	SHA256 string `json:"sha256,omitempty"` // hex; of files that are no secret
}

// States of a node that a rollout replaces, in node events. Its replacement node passes the
// states of any joining machine.
const (
	NodeOutdated  = "outdated"  // waits for a surge slot
	NodeReplacing = "replacing" // the machine that will replace it is on its way
	NodeDraining  = "draining"  // it takes no new pods, and those that it has are evicted
	NodeUpgrading = "upgrading" // its own agent brings Kubernetes on it to the target: it is upgraded in place
	NodeLeaving   = "leaving"   // it is no node any more, and its machine is deleted
)

// CheckEvent returns the event for a finding.
func CheckEvent(f Finding) Event {
	data, err := json.Marshal(f)
	if err != nil { // strings and a number
		panic(err)
	}
	return Event{Kind: KindCheck, Object: f.ID, State: string(f.Severity), Source: f.Source, Text: f.Title, Remedy: f.Remedy, TookMS: f.Took.Milliseconds(), Data: data}
}

// StateUnknown is the state of a machine in a Status if only the cloud was asked: it
// runs, and whether it is a node the API server would know.
const StateUnknown = "unknown"
