package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"constellation/assets"
	"constellation/engine/chart"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// IDs of findings about charts.
const (
	findingChartSource = "chart-source"
	findingChartValues = "chart-values"
	findingChartByHand = "chart-by-hand"
	// findingDestructive is followed by the name of the chart.
	findingDestructive = "destructive-"
	findingOtherPlans  = "plans-elsewhere"
)

// foreignCharts returns the charts that do not come with the program: those of the release, then
// those of the configuration.
func (f *facts) foreignCharts() (out []release.Chart) {
	if f.release != nil {
		for _, c := range f.release.Charts {
			if c.Source != "" {
				out = append(out, c)
			}
		}
	}
	return append(out, f.extra...)
}

// chartStore is what fetches charts; those that are in a bundle, if feed is one, come from
// there.
func (e *Engine) chartStore(feed string) (*chart.Store, error) {
	s := &chart.Store{Base: e.ws.Dir()}
	bundle, err := openBundle(feed)
	if err != nil {
		return nil, err
	}
	if bundle != nil {
		s.Bundle = func(dgst string) ([]byte, error) {
			b, ok, err := bundle.Blob(dgst)
			if err == nil && !ok {
				err = chart.ErrAbsent
			}
			return b, err
		}
	}
	if dir, err := os.UserCacheDir(); err == nil {
		s.Cache = filepath.Join(dir, "constellation", "charts")
	}
	return s, nil
}

// fetchCharts fetches the charts that do not come with the program, and returns what
// stands in the way. Those that are there already it leaves.
func (i *clusterRun) fetchCharts(ctx context.Context) (found []plan.Finding) {
	all := i.foreignCharts()
	if len(all) == 0 {
		return nil
	}
	store, err := i.e.chartStore(i.feed)
	if err != nil {
		return []plan.Finding{{ID: findingChartSource, Severity: plan.Block, Source: "charts", Title: "the bundle cannot be used", Detail: err.Error(), Remedy: plan.Remedy(err)}}
	}
	if i.fetched == nil {
		i.fetched = map[string]*chart.Chart{}
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	own := len(all) - len(i.extra)
	for n, c := range all {
		field := ""
		if n >= own {
			field = fmt.Sprintf("charts[%d]", n-own)
		}
		if i.release != nil && n >= own && slices.ContainsFunc(i.release.Charts, func(o release.Chart) bool { return o.Name == c.Name }) {
			found = append(found, plan.Finding{
				ID: findingChartSource, Severity: plan.Block, Source: "charts", Field: field + ".name", Title: fmt.Sprintf("release %s brings a chart called %s, too", i.release.Version, c.Name),
				Remedy: "remove it from " + workspace.ConfigFile + ", or give it another name",
			})
			continue
		}
		if _, ok := i.fetched[c.Name]; ok {
			continue
		}
		wg.Go(func() {
			got, err := store.Fetch(ctx, chart.RefOf(c))
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				i.fetched[c.Name] = got
				return
			}
			if field != "" {
				field += ".source"
			}
			found = append(found, plan.Finding{
				ID: findingChartSource, Severity: plan.Block, Source: "charts", Field: field, Title: fmt.Sprintf("chart %s %s cannot be had", c.Name, c.Version),
				Detail: err.Error(), Remedy: chartRemedy(err),
			})
		})
	}
	wg.Wait()
	slices.SortStableFunc(found, func(a, b plan.Finding) int { return strings.Compare(a.Title, b.Title) })
	return found
}

// chartRemedy says what to do about a chart that cannot be fetched.
func chartRemedy(err error) string {
	const carry = "where it can be reached, `constellation release bundle` packs it for `--feed bundle:FILE`"
	switch {
	case errors.Is(err, chart.ErrDigest):
		return "do not use it before its publisher has said why; if the new content is meant, write its digest"
	case errors.Is(err, chart.ErrAbsent):
		return "look at source, version and digest of the chart; " + carry
	case errors.Is(err, chart.ErrDenied):
		return "log in with `helm registry login` or `docker login`, or give yourself access; " + carry
	case errors.Is(err, chart.ErrArchive):
		return "name an archive that `helm package` has made, with name and version as in its Chart.yaml"
	}
	return "look at the address and the network, and try again; " + carry
}

// foreignChart is a chart that was fetched, as the cluster takes it.
func (i *clusterRun) foreignChart(c release.Chart) (cluster.Chart, error) {
	got := i.fetched[c.Name]
	if got == nil {
		return cluster.Chart{}, fmt.Errorf("chart %s %s was not fetched", c.Name, c.Version)
	}
	out := cluster.Chart{
		Name: c.Name, Namespace: c.Namespace, Version: c.Version, Values: deepCopy(c.Values), Needs: c.Needs,
		Foreign: true, OwnName: c.Chart, SkipKinds: c.CRDs == release.SkipCRDs, Destructive: c.Destructive,
	}
	for _, f := range got.Files {
		out.Files = append(out.Files, assets.File{Name: f.Name, Data: f.Data})
	}
	return out, nil
}

// compareCharts returns what the charts change in the cluster, without those that change
// nothing, and what somebody has to know or to accept before.
func (i *clusterRun) compareCharts(ctx context.Context) (changes []plan.ChartChange, found []plan.Finding, err error) {
	k, err := i.connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	limited, cancel := context.WithTimeout(ctx, i.e.limits.api)
	defer cancel()
	others, err := i.otherPlans(limited, k)
	if err != nil {
		return nil, nil, err
	}
	charts, err := i.charts(others)
	if err != nil {
		return nil, nil, err
	}
	if others != "" {
		found = append(found, plan.Finding{
			ID: findingOtherPlans, Severity: plan.Warn, Source: "charts", Title: fmt.Sprintf("Deployment %s/%s carries out Plans, so the controller of the release stays off", PlansNamespace, others),
			Detail: "if that one goes, the release's takes over Plans, Jobs and the labels of nodes as they are", Objects: []string{"Deployment " + PlansNamespace + "/" + others},
			Remedy:  "leave it so with plans: false in " + workspace.ConfigFile + ", or scale it to zero and check again",
			Command: "kubectl scale -n " + PlansNamespace + " --replicas=0 deployment/" + others,
		})
	}
	all := make([]plan.ChartChange, len(charts))
	errs := make([]error, len(charts))
	var wg sync.WaitGroup
	for n, c := range charts {
		wg.Go(func() { all[n], errs[n] = k.CompareChart(limited, c) })
	}
	wg.Wait()
	for n, x := range all {
		switch err := errs[n]; {
		case ctx.Err() != nil:
			return nil, nil, ctx.Err()
		case errors.Is(err, ErrChart):
			found = append(found, plan.Finding{
				ID: findingChartValues, Severity: plan.Block, Source: "charts", Title: fmt.Sprintf("chart %s %s cannot be used with its values", x.Chart, x.To),
				Detail: err.Error(), Remedy: "correct the values of the chart, or take another version of it",
			})
		case err != nil:
			f := plan.Finding{
				ID: findingChartValues, Severity: plan.NotChecked, Source: "charts", Title: fmt.Sprintf("not checked what chart %s changes", x.Chart), Detail: err.Error(),
				Remedy: "look at the cluster, and try again",
			}
			if x.From != "" { // it is there, and what is not known may be lost
				f.ID, f.Severity, f.Named = findingDestructive+x.Chart, plan.Warn, true
				f.Title = fmt.Sprintf("not checked what chart %s destroys", x)
			}
			found = append(found, f)
		case !x.Same():
			changes = append(changes, x)
			found = append(found, chartFindings(x)...)
		}
	}
	return changes, found, nil
}

// chartFindings are what somebody has to know or to accept before the chart is applied.
func chartFindings(x plan.ChartChange) (out []plan.Finding) {
	if len(x.Destroys) > 0 {
		out = append(out, plan.Finding{
			ID: findingDestructive + x.Chart, Severity: plan.Warn, Named: true, Source: "charts", Title: fmt.Sprintf("chart %s destroys what it cannot bring back", x),
			Detail: strings.Join(x.Destroys, "; "), Objects: x.Objects, Remedy: "copy what you need before",
		})
	}
	if x.ByHand != "" {
		f := plan.Finding{
			ID: findingChartByHand, Severity: plan.Warn, Source: "charts", Title: fmt.Sprintf("chart %s was changed by hand, and goes to what release and configuration say", x.Chart),
			Detail: x.ByHand + "; no value of it changes", Remedy: "put what is to stay into the values of the chart",
			Command: "helm history -n " + x.Namespace + " " + x.Chart,
		}
		if len(x.Values) > 0 {
			f.Detail = x.ByHand + "; overwritten: " + strings.Join(x.ValueLines(), ", ")
		}
		out = append(out, f)
	}
	return out
}

// foreseeCharts fetches the charts of the hop and compares them with those that run.
func (c *checkRun) foreseeCharts(ctx context.Context) error {
	if c.hop == nil || c.request.NoPreflight || c.prepares && !c.applies {
		return nil
	}
	rel, err := c.known.release(ctx, c.hop.Planned().Services)
	if err != nil {
		c.e.log.Debug("release not read", "release", c.hop.To.Release, "err", err)
		return ctx.Err()
	}
	i := &clusterRun{e: c.e, facts: &facts{config: c.config, state: c.state, provider: c.provider, release: rel, feed: c.location}}
	i.want(c.config)
	changes, err := c.lookAtCharts(ctx, i)
	if err == nil && changes != nil {
		c.out.Changes.ChartChanges, c.out.Changes.Charts = changes, nil
		for _, x := range changes {
			c.out.Changes.Charts = append(c.out.Changes.Charts, x.String())
		}
	}
	c.fetched = i.fetched
	return ctx.Err()
}

// lookAtCharts notes what stands against the charts of a run, and returns what they change;
// nil if that is not known.
func (c *checkRun) lookAtCharts(ctx context.Context, i *clusterRun) ([]plan.ChartChange, error) {
	if blocked := i.fetchCharts(ctx); len(blocked) > 0 {
		c.out.Findings = append(c.out.Findings, blocked...)
		return nil, workspace.ErrAbsent
	}
	changes, found, err := i.compareCharts(ctx)
	if err != nil {
		if !errors.Is(err, assets.ErrUnknownRelease) { // only that release's program has its charts
			c.e.log.Debug("charts not compared", "err", err)
		}
		return nil, err
	}
	c.out.Findings = append(c.out.Findings, found...)
	if changes == nil {
		changes = []plan.ChartChange{}
	}
	return changes, nil
}
