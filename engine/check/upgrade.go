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

// Inspector is the read-only view of the cluster that a check needs. Its requests leave no trace
// except in the audit log. Methods may be called concurrently.
type Inspector interface {
	// Running returns the running versions. It makes at most 8 requests, independent of the
	// number of kinds in the cluster.
	Running(ctx context.Context) (compat.Running, error)
	// Preflight checks several hops for obstacles: the next one, and each other one as if it were
	// next. It returns the findings of each hop and reads the cluster once. emit gets an event
	// when a check of the first hop begins and when it ends; calls do not overlap. A check that
	// could not run is a finding with the severity NotChecked. The error concerns the whole
	// preflight: the API server does not answer, or ctx ended.
	Preflight(ctx context.Context, hops []PreflightRequest, emit func(plan.Event)) ([][]plan.Finding, error)
	// LocalData returns the data on disks of nodes that no backup contains.
	LocalData(ctx context.Context) (cluster.LocalData, error)
}

// PreflightRequest describes the planned hop.
type PreflightRequest struct {
	// From and To are the versions of Kubernetes before and after the hop; equal if it does not
	// change.
	From, To version.Version
	// Release is the release after the hop, Etcd the tag of etcd's image after it.
	Release version.Version
	Etcd    string
	// EtcdBefore is the tag that the previous hop brings; empty if none does. EtcdTag is the
	// etcd.local.imageTag that this program has set, and changes with the hop; empty: none.
	EtcdBefore, EtcdTag string
	// EtcdHop is the tag that the hop brings without another Kubernetes; empty: none.
	EtcdHop string
	// ReplaceControlPlanes and ReplaceWorkers select the nodes that are replaced, and so drained.
	ReplaceControlPlanes, ReplaceWorkers bool
	// Surge is the number of machines allowed beyond the desired count.
	Surge int
	// DrainTimeout limits the drain of one node; zero means the default.
	DrainTimeout time.Duration
	// DryRun allows dry-run requests to the API server.
	DryRun bool
	// Quiet forbids requests to kubelets, whose logs show them.
	Quiet bool
	// Foreign means that others upgrade the cluster: nodes are drained, and may be kept.
	Foreign bool
	// NoImages is whether nodes run no OS image that an upgrade could change.
	NoImages bool
	// NotApplicable are the IDs of checks that do not run, with the reason.
	NotApplicable map[string]string
}

// Check is the result of `upgrade check`. Its JSON is the document of -o json.
type Check struct {
	Schema  string `json:"schema"`
	Cluster string `json:"cluster"`
	// Simulated is set if the machines are simulated.
	Simulated bool `json:"simulated,omitempty"`
	// NotAttested is set if no evidence of hardware vouches for the machines.
	NotAttested bool      `json:"notAttested,omitempty"`
	Provider    string    `json:"provider"`
	Time        time.Time `json:"time"`
	// CLI is the version of this program.
	CLI string `json:"cli"`
	// Current is the running state, Goal the end of the path.
	Current plan.Target `json:"current"`
	Goal    plan.Target `json:"goal"`
	// Components are the rows of the version table, in the order of display. Parts of a
	// release follow the row they belong to.
	Components []plan.ComponentCheck `json:"components"`
	// Path are the hops to Goal. It is empty if nothing is newer or no path exists; Blocked
	// explains the latter.
	Path []compat.Hop `json:"path"`
	// Blocked are the rules that forbid unreachable versions.
	Blocked []compat.Unreachable `json:"blocked,omitempty"`
	// Notes are sentences for the user, such as "In newer CLI versions there are even newer
	// versions available."
	Notes []string `json:"notes,omitempty"`
	// Changes is what the next hop will change; nil if there is none.
	Changes *plan.Changes `json:"changes,omitempty"`
	// Findings of compatibility matrix and preflight, the worst first.
	Findings []plan.Finding `json:"findings"`
	// Feed is the source of the release data.
	Feed FeedState `json:"feed"`
	// Config are the values that --write-config would write, or has written.
	Config *ConfigChange `json:"config,omitempty"`
	// Exit is the exit code with --exit-code: 4, 6 or 0; that of the error if there is one.
	Exit int `json:"exit"`
}

// FeedState describes the source of the release data and its age.
type FeedState struct {
	// Source is "embedded", a directory or an address.
	Source string `json:"source"`
	// Fetched is when the used copy was last confirmed; zero for embedded.
	Fetched time.Time `json:"fetched,omitzero"`
	// Stale is set if an older copy was used, and Problem is the reason.
	Stale   bool   `json:"stale,omitempty"`
	Problem string `json:"problem,omitempty"`
	Remedy  string `json:"remedy,omitempty"`
	// Signer names the key; Sequence counts the feed's publications.
	Signer   string `json:"signer,omitempty"`
	Sequence uint64 `json:"sequence,omitempty"`
	// Root is the version of the feed's root; zero if it has none. Warning is a weakness of the feed.
	Root    uint64 `json:"root,omitempty"`
	Warning string `json:"warning,omitempty"`
}

// ConfigChange is a change of the configuration file.
type ConfigChange struct {
	Path string `json:"path"`
	// Written is false if the change was only computed.
	Written bool                    `json:"written"`
	Fields  []workspace.FieldChange `json:"fields"`
}

// Request configures a check.
type Request struct {
	// Release and Kubernetes are the upgrade target; zero means the newest reachable version.
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
