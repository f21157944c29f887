package check

import (
	"context"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// Inspector is what a check needs to see of a cluster. It changes nothing: no request
// of it leaves a trace but in the audit log. Methods may be called concurrently.
type Inspector interface {
	// Running returns which versions run. It makes at most 8 requests, however many
	// kinds the cluster has.
	Running(ctx context.Context) (compat.Running, error)
	// Preflight checks hops for obstacles, the next one and others as if they came next, and
	// returns the findings of each. It reads the cluster once. emit gets an event when a check of
	// the first hop begins and when it ends; calls do not overlap. A check that could not run is
	// a finding with the severity NotChecked. The error concerns the whole preflight: the API
	// server does not answer, or ctx ended.
	Preflight(ctx context.Context, hops []PreflightRequest, emit func(plan.Event)) ([][]plan.Finding, error)
	// LocalData returns what is on the disks of nodes and in no backup.
	LocalData(ctx context.Context) (cluster.LocalData, error)
}

// PreflightRequest says what is planned.
type PreflightRequest struct {
	// From and To are the versions of Kubernetes before and after the hop; equal if it
	// does not change.
	From, To version.Version
	// Release is the release after the hop, Etcd the tag of etcd's image after it.
	Release version.Version
	Etcd    string
	// ReplaceControlPlanes and ReplaceWorkers say which nodes are replaced, and so drained.
	ReplaceControlPlanes, ReplaceWorkers bool
	// Surge is how many machines may exist beyond the wanted number.
	Surge int
	// DrainTimeout is how long a drain waits for one node; zero means the default.
	DrainTimeout time.Duration
	// DryRun allows dry-run requests to the API server.
	DryRun bool
}

// Check is what `upgrade check` found. Its JSON is the document of -o json.
type Check struct {
	Schema  string `json:"schema"`
	Cluster string `json:"cluster"`
	// Simulated says that the machines only do as machines would.
	Simulated bool      `json:"simulated,omitempty"`
	Provider  string    `json:"provider"`
	Time      time.Time `json:"time"`
	// CLI is the version of this program.
	CLI string `json:"cli"`
	// Current is what runs, Goal what the path leads to.
	Current plan.Target `json:"current"`
	Goal    plan.Target `json:"goal"`
	// Components are the rows of the version table, in the order of display. Parts of a
	// release follow the row they belong to.
	Components []plan.ComponentCheck `json:"components"`
	// Path are the hops to Goal; empty if nothing is newer, or there is no path, which
	// Blocked explains.
	Path []compat.Hop `json:"path"`
	// Blocked are the rules that forbid unreachable versions.
	Blocked []compat.Unreachable `json:"blocked,omitempty"`
	// Notes are sentences that people must read: "In newer CLI versions there are even
	// newer versions available."
	Notes []string `json:"notes,omitempty"`
	// Changes is what the next hop will change; nil if there is none.
	Changes *plan.Changes `json:"changes,omitempty"`
	// Findings of matrix and preflight, the worst first.
	Findings []plan.Finding `json:"findings"`
	// Feed is where the knowledge about releases comes from.
	Feed FeedState `json:"feed"`
	// Config is what --write-config would write, or has written.
	Config *ConfigChange `json:"config,omitempty"`
	// Exit is the exit code with --exit-code: 4, 6 or 0; that of the error if there is one.
	Exit int `json:"exit"`
}

// FeedState says where the knowledge about releases comes from, and how fresh it is.
type FeedState struct {
	// Source is "embedded", a directory or an address.
	Source string `json:"source"`
	// Fetched is when the copy that was used was last confirmed; zero for embedded.
	Fetched time.Time `json:"fetched,omitzero"`
	// Stale says that an older copy was used, and Problem why.
	Stale   bool   `json:"stale,omitempty"`
	Problem string `json:"problem,omitempty"`
	Remedy  string `json:"remedy,omitempty"`
	// Signer names the key; Sequence counts the feed's publications.
	Signer   string `json:"signer,omitempty"`
	Sequence uint64 `json:"sequence,omitempty"`
}

// ConfigChange is a change of the configuration file.
type ConfigChange struct {
	Path string `json:"path"`
	// Written is false if it was only worked out.
	Written bool                    `json:"written"`
	Fields  []workspace.FieldChange `json:"fields"`
}

// Request configures a check.
type Request struct {
	// Release and Kubernetes are the goal; zero means the newest that can be reached.
	Release, Kubernetes version.Version
	// NoDryRun omits dry-run requests to the API server, NoPreflight everything except versions
	// and path.
	NoDryRun, NoPreflight bool
	// WriteConfig writes the values of the next hop into the configuration.
	WriteConfig bool
	// Feed and FeedKeys override the configuration: a directory or address, and files
	// with public keys.
	Feed     string
	FeedKeys []string
}
