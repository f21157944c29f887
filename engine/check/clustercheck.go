package check

import (
	"time"

	"constellation/engine/distribution"
	"constellation/engine/plan"
)

// ClusterCheck is the result of `check` without a workspace. Its JSON is the document of -o json.
// Any source of objects can fill it in: a live cluster, a backup, or a directory of manifests.
type ClusterCheck struct {
	Schema string    `json:"schema"`
	Time   time.Time `json:"time"`
	// CLI is the version of this program.
	CLI string `json:"cli"`
	// Source is where the objects come from: one of the Source constants.
	Source string `json:"source"`
	// Name is the name of the source: a context of the kubeconfig, or a directory. Server is the
	// address of the API server; empty without one.
	Name   string `json:"name"`
	Server string `json:"server,omitempty"`
	// Kubernetes is the version that runs, Target the one that the last hop leads to.
	Kubernetes   string                    `json:"kubernetes,omitempty"`
	Target       string                    `json:"target"`
	Distribution distribution.Distribution `json:"distribution"`
	// Hops are the steps of one minor each, the next one first. A finding is in the first hop
	// that it concerns.
	Hops []HopCheck `json:"hops"`
	// NotApplicable are the checks that cannot apply to this distribution or source.
	NotApplicable []Inapplicable `json:"notApplicable"`
	// MissingRules are the RBAC rules that the user lacks for a complete check, as YAML of a
	// ClusterRole.
	MissingRules string `json:"missingRules,omitempty"`
	// DryRun is set if dry-run requests were sent. Otherwise, findings about drains are computed.
	DryRun bool     `json:"dryRun"`
	Notes  []string `json:"notes,omitempty"`
}

// Sources of a ClusterCheck.
const (
	SourceCluster   = "cluster"
	SourceBackup    = "backup"
	SourceManifests = "manifests"
)

// HopCheck is one step of an upgrade path with its findings, the worst first.
type HopCheck struct {
	From     string         `json:"from"`
	To       string         `json:"to"`
	Findings []plan.Finding `json:"findings"`
}

// Inapplicable is a check that cannot apply.
type Inapplicable struct {
	ID    string `json:"id"`
	Title string `json:"title,omitempty"`
	Why   string `json:"why"`
}

// Findings returns the findings of all hops.
func (k *ClusterCheck) Findings() (out []plan.Finding) {
	for _, h := range k.Hops {
		out = append(out, h.Findings...)
	}
	return out
}
