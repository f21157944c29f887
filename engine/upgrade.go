package engine

import (
	"context"
	"strings"
	"time"

	"constellation/engine/plan"
	"constellation/engine/version"
)

// Span is the versions of one component that run side by side: the oldest and the
// newest. They are equal unless a rollout is under way. The zero value is unknown.
type Span struct {
	Oldest version.Version `json:"oldest"`
	Newest version.Version `json:"newest"`
}

// At is the span of a component that runs in one version.
func At(v version.Version) Span { return Span{v, v} }

// Add widens s so that it holds v. A zero v changes nothing.
func (s Span) Add(v version.Version) Span {
	if v.IsZero() {
		return s
	}
	if s.Oldest.IsZero() || v.Less(s.Oldest) {
		s.Oldest = v
	}
	if s.Newest.IsZero() || s.Newest.Less(v) {
		s.Newest = v
	}
	return s
}

// IsZero reports whether nothing is known.
func (s Span) IsZero() bool { return s.Oldest.IsZero() }

// Mixed reports whether more than one version runs.
func (s Span) Mixed() bool { return !s.Oldest.Equal(s.Newest) }

// String is "v1.35.4", or "v1.35.4-v1.36.3" for a mixed span; empty if unknown.
func (s Span) String() string {
	if s.Mixed() {
		return s.Oldest.String() + "-" + s.Newest.String()
	}
	return s.Oldest.String()
}

// Running is which versions a cluster runs, as its API server tells.
type Running struct {
	// Services is of what comes with a release and runs in the cluster.
	Services Span
	// Images are those of the OS by role, from the nodes' annotations.
	ControlPlaneImage, WorkerImage Span
	// Kubernetes is of the API servers, by asking each that can be reached.
	Kubernetes Span
	// Kubelets by role. A cluster without workers has a zero WorkerKubelet.
	ControlPlaneKubelet, WorkerKubelet Span
	// Etcd is the tag of the image of its pods, such as 3.6.6-0; empty if unknown.
	Etcd string
	// Parts are the services one by one, sorted by name.
	Parts []Service
	// Nodes are all nodes, sorted by name.
	Nodes []Node
	// Target is what NodeVersion asks for; JoinConfig what joining machines must show.
	Target     NodeTarget
	JoinConfig JoinConfig
	// Kinds are the names of the definitions of ours that the cluster has.
	Kinds []string
	// Missing says what could not be learned, and why: "image of worker-3: it has no annotation".
	Missing []string
	// Denied are the reads that the API server refused, sorted by resource.
	Denied []Denial
}

// Denial is a request that the API server refused to a user that it knows.
type Denial struct {
	Verb     string // list
	Resource string // with its group: deployments.apps
	// Namespace is empty if it is asked for in all of them, or in none.
	Namespace string
	// User is empty if the API server does not tell. It is not cleaned.
	User string
}

// String is "list deployments.apps in kube-system".
func (d Denial) String() string {
	s := strings.TrimSpace(d.Verb + " " + d.Resource)
	if d.Namespace != "" {
		s += " in " + d.Namespace
	}
	return s
}

// Inspector is what a check needs to see of a cluster. It changes nothing: no request
// of it leaves a trace but in the audit log. Methods may be called concurrently.
type Inspector interface {
	// Running returns which versions run. It makes at most 8 requests, however many
	// kinds the cluster has.
	Running(ctx context.Context) (Running, error)
	// Preflight looks for what hops would trip over, the next one and others as if they
	// came next, and returns the findings of each. It reads the cluster once. emit gets
	// an event when a check of the first begins and when it ends; calls do not overlap. A check that could not be
	// made is a finding with the severity NotChecked. The error is about the checking
	// as a whole: the API server does not answer, or ctx ended.
	Preflight(ctx context.Context, hops []PreflightRequest, emit func(plan.Event)) ([][]plan.Finding, error)
	// LocalData returns what is on the disks of nodes and in no backup.
	LocalData(ctx context.Context) (LocalData, error)
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
	// DryRun allows requests that the API server is told not to carry out.
	DryRun bool
}

// Hop is one upgrade: one run of `upgrade apply`.
type Hop struct {
	Number int `json:"hop"` // 1 is the next one
	// CLI is the version of this program that the hop needs; it is also that of the
	// services afterwards.
	CLI  version.Version `json:"cli"`
	From plan.Target     `json:"from"`
	To   plan.Target     `json:"to"`
	// ReplaceControlPlanes and ReplaceWorkers say which nodes are made anew. Workers
	// that are kept are replaced by a later hop.
	ReplaceControlPlanes bool `json:"replaceControlPlanes"`
	ReplaceWorkers       bool `json:"replaceWorkers"`
	// Why explains what forces this hop, a sentence each.
	Why []string `json:"why,omitempty"`
	// Get says how to get the CLI: empty if it is this program.
	Get string `json:"get,omitempty"`
}

// RuleResult is what one rule of the matrix says about a step from one state to another.
type RuleResult struct {
	// Rule is its ID, kebab-case and stable: "minor-skew".
	Rule     string        `json:"rule"`
	Severity plan.Severity `json:"severity"`
	// Title is a sentence with the versions in it, Reference where the rule comes from
	// (policy page, RFC), Remedy what to do.
	Title     string `json:"title"`
	Reference string `json:"reference"`
	Remedy    string `json:"remedy,omitempty"`
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
	Path []Hop `json:"path"`
	// Blocked are the rules that forbid what is not reachable.
	Blocked []Unreachable `json:"blocked,omitempty"`
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

// Unreachable says why a newer version cannot be gone to.
type Unreachable struct {
	Component string `json:"component"`
	Version   string `json:"version"`
	Rule      string `json:"rule"`
	Reason    string `json:"reason"`
	Remedy    string `json:"remedy,omitempty"`
	Reference string `json:"reference,omitempty"`
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
	Written bool          `json:"written"`
	Fields  []FieldChange `json:"fields"`
}

// FieldChange is one value of the configuration: "kubernetesVersion", from, to.
type FieldChange struct {
	Field string `json:"field"`
	From  string `json:"from"`
	To    string `json:"to"`
}

// CheckRequest says what is asked.
type CheckRequest struct {
	// Release and Kubernetes are the goal; zero means the newest that can be reached.
	Release, Kubernetes version.Version
	// NoDryRun leaves out requests that the API server is told not to carry out,
	// NoPreflight everything but versions and path.
	NoDryRun, NoPreflight bool
	// WriteConfig writes the values of the next hop into the configuration.
	WriteConfig bool
	// Feed and FeedKeys override the configuration: a directory or address, and files
	// with public keys.
	Feed     string
	FeedKeys []string
}
