package check

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/engine/distribution"
	"constellation/engine/plan"
)

// Security is how a cluster stands against the published guides. Its JSON is the document of
// `check --security -o json`.
type Security struct {
	Schema string    `json:"schema"`
	Time   time.Time `json:"time"`
	// CLI is the version of this program.
	CLI string `json:"cli"`
	// Name is a context of the kubeconfig, Server the address of its API server.
	Name   string `json:"name"`
	Server string `json:"server"`
	// Simulated and NotAttested are about the machines of a workspace.
	Simulated    bool                      `json:"simulated,omitempty"`
	NotAttested  bool                      `json:"notAttested,omitempty"`
	Kubernetes   string                    `json:"kubernetes"`
	Distribution distribution.Distribution `json:"distribution"`
	// Nodes is the number of nodes that were looked at, Workloads that of owners of pods.
	Nodes     int `json:"nodes"`
	Workloads int `json:"workloads"`
	// Guides are the sources of the checks.
	Guides []Guide `json:"guides"`
	// Counts are the numbers of results by status.
	Counts map[SecurityStatus]int `json:"counts"`
	// Results are in the order of the guides.
	Results []SecurityResult `json:"results"`
	// MissingRules are the RBAC rules that the user lacks, as YAML of a ClusterRole.
	MissingRules string   `json:"missingRules,omitempty"`
	Notes        []string `json:"notes,omitempty"`
}

// Guide is a published list of what makes a cluster secure.
type Guide struct {
	// ID is the prefix of IDs: "cis".
	ID      string `json:"id"`
	Title   string `json:"title"`
	Version string `json:"version"`
	URL     string `json:"url"`
}

// SecurityStatus is the result of a check.
type SecurityStatus string

// Statuses of a check.
const (
	SecurityFailed SecurityStatus = "failed"
	SecurityPassed SecurityStatus = "passed"
	// SecurityNotVisible: the API does not show it, or the user may not read it.
	SecurityNotVisible SecurityStatus = "not-visible"
	// SecurityManual: a person must decide. The evidence helps.
	SecurityManual SecurityStatus = "manual"
	// SecurityNotApplicable: this cluster does not have what the check is about.
	SecurityNotApplicable SecurityStatus = "not-applicable"
)

// SecurityStatuses are all statuses, the worst first.
var SecurityStatuses = []SecurityStatus{SecurityFailed, SecurityNotVisible, SecurityManual, SecurityPassed, SecurityNotApplicable}

// SecurityCheck is a demand of the guides.
type SecurityCheck struct {
	// ID is stable: the guide and the number that it has there, such as "cis-1.2.6".
	ID string `json:"id"`
	// Section groups checks: "1.2 API server".
	Section string `json:"section"`
	// Title is true if the check passes.
	Title string `json:"title"`
	// Sources are the places in the guides.
	Sources []string `json:"sources"`
	// Level is that of CIS: 1 for all clusters, 2 for those with a higher need; 0 if the guide has none.
	Level int `json:"level,omitempty"`
	// Automated is whether the program decides. Otherwise it shows evidence, and a person decides.
	Automated bool `json:"automated"`
	// LooksAt is the evidence that decides the result.
	LooksAt string `json:"looksAt"`
	// Remedy is what to do if the check fails, Command how to check manually.
	Remedy  string `json:"remedy,omitempty"`
	Command string `json:"command,omitempty"`
}

// SecurityResult is the result of a check.
type SecurityResult struct {
	SecurityCheck
	Status SecurityStatus `json:"status"`
	// Reason is why the result is not visible or not applicable.
	Reason string `json:"reason,omitempty"`
	// Evidence is what was seen, what is wrong first.
	Evidence []Evidence `json:"evidence,omitempty"`
}

// Evidence is what was seen of one or several objects.
type Evidence struct {
	Text string `json:"text"`
	// Wrong is set if it fails the check.
	Wrong bool `json:"wrong,omitempty"`
	// Objects have it, "kind/namespace/name", the first few hundred. More is the number of the others.
	Objects []string `json:"objects,omitempty"`
	More    int      `json:"more,omitempty"`
}

// Findings returns the results that failed or are not visible. A failed check of level 1 blocks, and
// others warn. Objects of RBAC and workloads have a finding each, so that one can be ignored.
func (s *Security) Findings() []plan.Finding {
	out := []plan.Finding{}
	for i := range s.Results {
		r := &s.Results[i]
		f := plan.Finding{ID: r.ID, Title: r.Title, Remedy: r.Remedy, Command: r.Command, Source: r.Section, Reference: strings.Join(r.Sources, ", ")}
		switch r.Status {
		case SecurityNotVisible:
			f.Severity, f.Title, f.Detail = plan.NotChecked, "not visible: "+r.Title, r.Reason
			out = append(out, f)
		case SecurityFailed:
			f.Severity = plan.Warn
			if r.Level == 1 {
				f.Severity = plan.Block
			}
			out = append(out, r.failures(f)...)
		}
	}
	return out
}

// failures returns f for each object of a failed check, or once if the objects are nodes or there are none.
func (r *SecurityResult) failures(f plan.Finding) (out []plan.Finding) {
	var rest []string
	for _, e := range r.Evidence {
		if !e.Wrong {
			continue
		}
		if len(e.Objects) == 0 || strings.HasPrefix(e.Objects[0], "node/") {
			rest = append(rest, e.String())
			continue
		}
		for _, o := range e.Objects {
			one := f
			one.Detail, one.Objects = e.Text, []string{o}
			out = append(out, one)
		}
	}
	if len(rest) > 0 || len(out) == 0 {
		f.Detail = strings.Join(rest, "; ")
		out = append(out, f)
	}
	slices.SortStableFunc(out, func(a, b plan.Finding) int {
		return strings.Compare(strings.Join(a.Objects, ""), strings.Join(b.Objects, ""))
	})
	return out
}

// shownObjects is the number of objects in the text of evidence.
const shownObjects = 4

// String is the text with the first objects.
func (e Evidence) String() string {
	if len(e.Objects) == 0 {
		return e.Text
	}
	return e.Text + ": " + e.Names(shownObjects)
}

// Names are the first objects, and how many others there are. Of nodes and namespaces it has the names
// alone.
func (e Evidence) Names(most int) string {
	names := make([]string, 0, most)
	for _, o := range e.Objects[:min(len(e.Objects), most)] {
		names = append(names, strings.TrimPrefix(strings.TrimPrefix(o, "node/"), "namespace/"))
	}
	s := strings.Join(names, ", ")
	if n := len(e.Objects) - len(names) + e.More; n > 0 {
		s += fmt.Sprintf(" and %d more", n)
	}
	return s
}
