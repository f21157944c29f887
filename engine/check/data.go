package check

import (
	"fmt"

	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/words"
)

// FindingData is the ID of the finding about minors of Kubernetes that are newer than the data of
// this program.
const FindingData = "kubernetes-data"

// judgeData reports minors that are newer than the data. It blocks nothing for `upgrade check`.
// Preparing or applying a hop to such a minor is refused.
func (c *Run) judgeData() {
	hop, end := c.Now.Kubernetes.Newest, c.Now.Kubernetes.Newest
	if c.Hop != nil {
		hop, end = c.Hop.Planned().Kubernetes, c.Path[len(c.Path)-1].Planned().Kubernetes
	}
	if f := beyondData(c.Now.Kubernetes.Oldest, hop, end, c.Prepares || c.Applies); f != nil {
		c.Find(*f)
	}
}

// beyondData returns the finding about minors that a cluster runs or reaches, and that are newer
// than the data; nil if there are none. hop is the Kubernetes of the next hop, end that of the
// path. With changes, a hop to such a minor is refused.
func beyondData(running, hop, end version.Version, changes bool) *plan.Finding {
	newest := lifecycle.Newest()
	var unknown []string
	for n := max(running.Minor(), newest.Minor()+1); n <= end.Minor(); n++ {
		unknown = append(unknown, fmt.Sprintf("v1.%d", n))
	}
	if running.IsZero() || len(unknown) == 0 {
		return nil
	}
	f := &plan.Finding{
		ID: FindingData, Severity: plan.NotChecked, Source: "versions", Reference: "docs/compatibility.md",
		Title:  "Kubernetes " + words.And(unknown) + " is newer than the data of this program, which ends at " + newest.MinorString(),
		Detail: "removed APIs are found by the types in this program and by the metrics of the API servers; flags, feature gates, settings and demands on nodes are not checked",
		Remedy: "install a release of constellation with this data, or read the changelog of " + words.And(unknown),
	}
	if changes && hop.Minor() > newest.Minor() && running.MinorDistance(hop) > 0 {
		f.Severity = plan.Block
		f.Remedy = "install a release of constellation with this data; `constellation upgrade check` shows what can be checked without it"
	}
	return f
}
