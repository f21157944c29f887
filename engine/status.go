package engine

import "time"

// Status is a cluster as it is now. It marshals as the document of `status -o json`.
type Status struct {
	Schema  string `json:"schema"`
	Cluster string `json:"cluster"`
	// Provider is where the machines come from: sandbox.
	Provider string    `json:"provider"`
	Time     time.Time `json:"time"`
	// Stage is how far the cluster's life has come.
	Stage Stage `json:"stage"`
	// Reachable reports whether the API server answered. If it did not, Problem says
	// why and only what the cloud knows is filled in.
	Reachable bool   `json:"reachable"`
	Problem   string `json:"problem,omitempty"`
	Remedy    string `json:"remedy,omitempty"`
	// APIServer is the version that the API server says it has.
	APIServer string `json:"apiServer,omitempty"`
	// Target is what NodeVersion asks for; zero fields are not set.
	Target     Target      `json:"target"`
	Conditions []Condition `json:"conditions,omitempty"`
	Services   []Service   `json:"services,omitempty"`
	Nodes      []Node      `json:"nodes"`
	// Machines exist in the cloud and are not nodes yet, or no longer.
	Machines []Machine `json:"machines"`
	// Counts are the totals of the above: nodes, ready, current, machines, wanted.
	Counts map[string]int64 `json:"counts"`
	// Health is what is not as it should be; empty if all is well.
	Health []Finding `json:"health"`
}

// Condition is a condition of NodeVersion, in Kubernetes' sense.
type Condition struct {
	Type    string    `json:"type"`
	Status  string    `json:"status"`
	Reason  string    `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
	Since   time.Time `json:"since,omitzero"`
}

// Service is something that runs in the cluster and has a version.
type Service struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Kind    string `json:"kind"` // release (installed by a chart), kubernetes (bound to its version)
	Ready   int    `json:"ready"`
	Wanted  int    `json:"wanted"`
	Message string `json:"message,omitempty"` // why it is not ready
}

// Node is a node of the cluster.
type Node struct {
	Name  string `json:"name"`
	Group string `json:"group,omitempty"`
	Role  string `json:"role"` // control-plane, worker
	// State is one of the Node constants: ready, not-ready.
	State      string `json:"state"`
	Kubernetes string `json:"kubernetes"` // of the kubelet
	Image      string `json:"image,omitempty"`
	// Components is the name of the ConfigMap that the node was installed from.
	Components string `json:"components,omitempty"`
	IP         string `json:"ip,omitempty"`
	ProviderID string `json:"providerID,omitempty"`
	Cordoned   bool   `json:"cordoned,omitempty"`
	// Current reports whether image and components are the target's.
	Current bool      `json:"current"`
	Message string    `json:"message,omitempty"` // why it is not ready
	Created time.Time `json:"created,omitzero"`
}

// Machine is an instance of the cloud that is no node.
type Machine struct {
	Name       string    `json:"name"`
	Group      string    `json:"group"`
	Role       string    `json:"role"`
	State      string    `json:"state"` // one of the Node constants: creating, booting, joining, failed
	Image      string    `json:"image,omitempty"`
	IP         string    `json:"ip,omitempty"`
	ProviderID string    `json:"providerID,omitempty"`
	Message    string    `json:"message,omitempty"`
	Created    time.Time `json:"created,omitzero"`
}

// Stage is how far a workspace's cluster has come.
type Stage string

// Stages, in order.
const (
	StageEmpty      Stage = "empty"      // no configuration
	StageConfigured Stage = "configured" // a configuration, no machines
	StageReady      Stage = "ready"      // machines, no cluster: init can start
	StagePartial    Stage = "partial"    // init began and did not end
	StageCluster    Stage = "cluster"
)

// Home is what a workspace holds and what makes sense to do next.
type Home struct {
	Dir   string `json:"dir"`
	Stage Stage  `json:"stage"`
	// Cluster is its name; empty before there is a configuration.
	Cluster string `json:"cluster,omitempty"`
	// Config and State are nil if the file is absent or cannot be read; Problems says why.
	Config   *Config   `json:"config,omitempty"`
	State    *State    `json:"-"`
	Problems []Finding `json:"problems,omitempty"`
	// Next are the commands that make sense, the best one first.
	Next []Suggestion `json:"next"`
	// Runs are the past runs, the newest first.
	Runs []RunSummary `json:"runs,omitempty"`
}

// Suggestion is a command that makes sense now.
type Suggestion struct {
	Title   string `json:"title"`   // "Create the cluster"
	Command string `json:"command"` // "constellation init"
	Why     string `json:"why,omitempty"`
}

// RunSummary is a past or current run as its directory tells it.
type RunSummary struct {
	ID      string    `json:"id"`
	Verb    Verb      `json:"verb"`
	Cluster string    `json:"cluster,omitempty"`
	To      Target    `json:"to,omitzero"`
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
