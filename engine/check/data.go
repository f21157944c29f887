package check

import (
	"context"
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
	switch {
	case c.Hop != nil:
		hop, end = c.Hop.Planned().Kubernetes, c.Path[len(c.Path)-1].Planned().Kubernetes
	case c.Request.Kubernetes.Major() == end.Major() && end.Less(c.Request.Kubernetes):
		hop, end = c.Request.Kubernetes, c.Request.Kubernetes
	}
	if f := beyondData(c.Now.Kubernetes.Oldest, hop, end, c.Prepares || c.Applies); f != nil {
		c.Find(*f)
	}
}

// beyondData returns the finding about minors that a cluster runs or reaches, and that are newer
// than the data; nil if there are none. hop is the Kubernetes of the next hop, end that of the
// path, or the one that was asked for. With changes, a hop to such a minor is refused.
func beyondData(running, hop, end version.Version, changes bool) *plan.Finding {
	newest := lifecycle.Newest()
	first, last := max(running.Minor(), newest.Minor()+1), end.Minor()
	if running.IsZero() || first > last {
		return nil
	}
	unknown, are := end.MinorString(), "is"
	switch {
	case first == last-1:
		unknown, are = words.And([]string{fmt.Sprintf("v1.%d", first), unknown}), "are"
	case first < last:
		unknown, are = fmt.Sprintf("v1.%d to %s", first, unknown), "are"
	}
	f := &plan.Finding{
		ID: FindingData, Severity: plan.NotChecked, Source: "versions", Reference: "docs/compatibility.md",
		Title:  "Kubernetes " + unknown + " " + are + " newer than the data of this program, which ends at " + newest.MinorString(),
		Detail: "removed APIs are found by the types in this program and by the metrics of the API servers; flags, feature gates, settings and demands on nodes are not checked",
		Remedy: "install a release of constellation with this data, or read the changelog of " + unknown,
	}
	if changes && hop.Minor() > newest.Minor() && running.MinorDistance(hop) > 0 {
		f.Severity = plan.Block
		f.Remedy = "install a release of constellation with this data; `constellation upgrade check` shows what can be checked without it"
	}
	return f
}

// maxUnknownMinors is the distance up to which a cluster is checked for a minor that no release has.
const maxUnknownMinors = 10

// foreseeUnknown runs the preflight checks for a minor that is newer than the data and that no path
// leads to, as if the cluster went there. They find what the types and the API servers announce.
func (c *Run) foreseeUnknown(ctx context.Context, emit func(plan.Event)) error {
	from, to := c.Now.Kubernetes.Oldest, c.Request.Kubernetes
	distance := from.MinorDistance(to)
	if c.Request.NoPreflight || c.Prepares || c.Applies || from.IsZero() || to.Major() != from.Major() || distance <= 0 || distance > maxUnknownMinors ||
		to.Minor() <= lifecycle.Newest().Minor() {
		return nil
	}
	b, err := c.Ws.Kubeconfig()
	if err != nil {
		return err
	}
	i, err := c.Inspect(ctx, b)
	if err != nil {
		return c.ClusterDown(err)
	}
	found, err := i.Preflight(ctx, []PreflightRequest{{From: from, To: to, Release: c.Now.Services.Oldest}}, emit)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		c.preflightFailed(err)
	}
	for _, f := range found {
		c.Out.Findings = append(c.Out.Findings, f...)
	}
	return nil
}

// preflightFailed reports that the preflight checks did not run.
func (c *Run) preflightFailed(err error) {
	why := c.ClusterDown(err)
	c.Find(plan.Finding{
		ID: "preflight", Severity: plan.NotChecked, Title: "preflight checks of the hop did not run", Detail: why.Error(), Remedy: plan.Remedy(why), Source: "preflight",
	})
}
