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
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// IDs of findings about charts.
const (
	findingOtherPlans = "plans-elsewhere"
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
		return []plan.Finding{{ID: check.FindingChartSource, Severity: plan.Block, Source: "charts", Title: "the bundle cannot be used", Detail: err.Error(), Remedy: plan.Remedy(err)}}
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
				ID: check.FindingChartSource, Severity: plan.Block, Source: "charts", Field: field + ".name", Title: fmt.Sprintf("release %s has a chart named %s, too", i.release.Version, c.Name),
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
				ID: check.FindingChartSource, Severity: plan.Block, Source: "charts", Field: field, Title: fmt.Sprintf("chart %s %s cannot be fetched", c.Name, c.Version),
				Detail: err.Error(), Remedy: check.ChartRemedy(err),
			})
		})
	}
	wg.Wait()
	slices.SortStableFunc(found, func(a, b plan.Finding) int { return strings.Compare(a.Title, b.Title) })
	return found
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
	if f := i.partsFinding(runningVersion(limited, k)); f != nil {
		return nil, []plan.Finding{*f}, nil
	}
	charts, err := i.charts(others, runningVersion(limited, k))
	if err != nil {
		return nil, nil, err
	}
	if others != "" {
		found = append(found, plan.Finding{
			ID: findingOtherPlans, Severity: plan.Warn, Source: "charts", Title: fmt.Sprintf("Deployment %s/%s executes Plans, so the controller of the release stays off", PlansNamespace, others),
			Detail: "if that Deployment is removed, the release's controller takes over Plans, Jobs and the labels of nodes", Objects: []string{"Deployment " + PlansNamespace + "/" + others},
			Remedy:  "keep it so with plans: false in " + workspace.ConfigFile + ", or scale it to zero and check again",
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
				ID: check.FindingChartValues, Severity: plan.Block, Source: "charts", Title: fmt.Sprintf("chart %s %s cannot be used with its values", x.Chart, x.To),
				Detail: err.Error(), Remedy: "correct the values of the chart, or use another version of it",
			})
		case err != nil:
			f := plan.Finding{
				ID: check.FindingChartValues, Severity: plan.NotChecked, Source: "charts", Title: fmt.Sprintf("not checked what chart %s changes", x.Chart), Detail: err.Error(),
				Remedy: "check the cluster, and try again",
			}
			if x.From != "" { // it is installed, and unknown objects of it may be lost
				f.ID, f.Severity, f.Named = check.FindingDestructive+x.Chart, plan.Warn, true
				f.Title = fmt.Sprintf("not checked what chart %s destroys", x)
			}
			found = append(found, f)
		case !x.Same():
			changes = append(changes, x)
			found = append(found, check.ChartFindings(x)...)
		}
	}
	return changes, found, nil
}

// comparedCharts makes a run what a check compares charts with.
type comparedCharts struct{ *clusterRun }

// Fetch implements chartSet.
func (x comparedCharts) Fetch(ctx context.Context) []plan.Finding { return x.fetchCharts(ctx) }

// Fetched implements chartSet.
func (x comparedCharts) Fetched() map[string]*chart.Chart { return x.fetched }

// Compare implements chartSet.
func (x comparedCharts) Compare(ctx context.Context) ([]plan.ChartChange, []plan.Finding, error) {
	return x.compareCharts(ctx)
}
