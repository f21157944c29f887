package check

import (
	"errors"
	"fmt"
	"strings"

	"constellation/engine/chart"
	"constellation/engine/plan"
)

// IDs of findings about charts.
const (
	FindingChartSource = "chart-source"
	FindingChartValues = "chart-values"
	findingChartByHand = "chart-by-hand"
	// FindingDestructive is a prefix: the name of the chart follows.
	FindingDestructive = "destructive-"
)

// ChartRemedy is the remedy for a chart that cannot be fetched.
func ChartRemedy(err error) string {
	const carry = "where it can be reached, `constellation release bundle` packs it for `--feed bundle:FILE`"
	switch {
	case errors.Is(err, chart.ErrDigest):
		return "contact its publisher before you use it; if the new content is intended, write its digest"
	case errors.Is(err, chart.ErrAbsent):
		return "look at source, version and digest of the chart; " + carry
	case errors.Is(err, chart.ErrDenied):
		return "log in with `helm registry login` or `docker login`, or give yourself access; " + carry
	case errors.Is(err, chart.ErrArchive):
		return "name an archive that `helm package` has made, with name and version as in its Chart.yaml"
	}
	return "check the address and the network, and try again; " + carry
}

// ChartFindings are the facts that the user must see or acknowledge before the chart is applied.
func ChartFindings(x plan.ChartChange) (out []plan.Finding) {
	if len(x.Destroys) > 0 {
		out = append(out, plan.Finding{
			ID: FindingDestructive + x.Chart, Severity: plan.Warn, Named: true, Source: "charts", Title: fmt.Sprintf("chart %s deletes data that it cannot restore", x),
			Detail: strings.Join(x.Destroys, "; "), Objects: x.Objects, Remedy: "copy what you need before",
		})
	}
	if x.ByHand != "" {
		f := plan.Finding{
			ID: findingChartByHand, Severity: plan.Warn, Source: "charts", Title: fmt.Sprintf("chart %s was changed by hand; the changes are overwritten by release and configuration", x.Chart),
			Detail: x.ByHand + "; no value of it changes", Remedy: "move changes to keep into the values of the chart",
			Command: "helm history -n " + x.Namespace + " " + x.Chart,
		}
		if len(x.Values) > 0 {
			f.Detail = x.ByHand + "; overwritten: " + strings.Join(x.ValueLines(), ", ")
		}
		out = append(out, f)
	}
	return out
}
