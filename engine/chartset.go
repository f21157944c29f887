package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// ChartSet are charts that are brought to a cluster together.
type ChartSet struct {
	Charts []cluster.Chart
	// Limit is how long all of them may take.
	Limit time.Duration
	// Report tells how far a chart is: state is that of a step, ready of wanted are pods. It
	// may be called concurrently.
	Report func(chart, state, text string, ready, wanted int64)
	// Explain makes an error of the cluster one for people; nil leaves it as it is.
	Explain func(op string, err error) error
}

// chartWork is what becomes of one chart.
type chartWork struct {
	cluster.Chart
	before   int           // the revision from before the set began, zero for none
	deployed int           // the revision that is deployed as this call begins
	ready    chan struct{} // closed when it is
	err      error
	// changed says that it is not, or may not be, what it was before.
	changed bool
}

// Apply brings all charts at once, each when those are ready that it needs; those that are
// just so are left alone. If one fails where there were charts before, the others are not
// waited for, and all go back to the revisions that they had; the error says so. On a
// cluster without any of them what is ready stays. Whoever cancels ctx finds what was
// applied, and another call goes on from there.
//
// What the charts were is recorded in the cluster before the first one is changed, until
// the set has come to an end. So a call that goes on where another one was cut off knows
// what to go back to.
func (s ChartSet) Apply(ctx context.Context, k Cluster) error {
	working, cancel := context.WithTimeout(ctx, s.Limit)
	defer cancel()
	recorded, err := k.ChartSet(working)
	if err != nil {
		return s.explain("look at what charts were", err)
	}
	before := maps.Clone(recorded)
	if before == nil {
		before = map[string]int{}
	}
	all := make([]*chartWork, len(s.Charts))
	upgrades := false
	for n, c := range s.Charts {
		revision, err := k.ChartRevision(working, c)
		if err != nil {
			return s.explain("look at chart "+c.Name, err)
		}
		w := &chartWork{Chart: c, before: revision, deployed: revision, ready: make(chan struct{})}
		if was, ok := recorded[cluster.ChartKey(c)]; ok {
			w.before, w.changed = was, true // perhaps, by the run that was cut off
		}
		before[cluster.ChartKey(c)] = w.before
		upgrades = upgrades || w.before > 0
		all[n] = w
	}
	noted := recorded != nil
	record := sync.OnceValue(func() error {
		if maps.Equal(before, recorded) {
			return nil
		}
		noted = true
		return k.SetChartSet(working, before)
	})
	together, stop := context.WithCancel(working)
	defer stop()
	var wg sync.WaitGroup
	for _, c := range all {
		wg.Go(func() {
			if c.err = s.bring(together, k, c, all, record); c.err != nil && upgrades {
				stop() // the others go back as well
			}
		})
	}
	wg.Wait()
	var errs []error
	for _, c := range all {
		if c.err != nil && !errors.Is(c.err, context.Canceled) {
			errs = append(errs, c.err)
		}
	}
	if n := slices.IndexFunc(all, func(c *chartWork) bool { return c.err != nil }); n >= 0 && len(errs) == 0 {
		// The time was over just when nothing was under way.
		errs = append(errs, fmt.Errorf("chart %s was not begun within %s", all[n].Name, s.Limit))
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case len(errs) > 0 && !upgrades:
		return errors.Join(errs...)
	case len(errs) > 0:
		return s.goBack(ctx, k, all, errors.Join(errs...))
	case noted:
		return s.forget(ctx, k)
	}
	return nil
}

// forget ends the set in the record.
func (s ChartSet) forget(ctx context.Context, k Cluster) error {
	if err := k.SetChartSet(ctx, nil); err != nil {
		return s.explain("forget what charts were", err)
	}
	return nil
}

func (s ChartSet) explain(op string, err error) error {
	if s.Explain == nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return s.Explain(op, err)
}

// bring applies one chart when those are ready that it needs, and record has noted what
// all of them were.
func (s ChartSet) bring(ctx context.Context, k Cluster, c *chartWork, all []*chartWork, record func() error) error {
	for _, other := range all {
		if !slices.Contains(c.Needs, other.Name) {
			continue
		}
		select {
		case <-other.ready:
		case <-ctx.Done():
			return context.Canceled // its own work has not begun
		}
	}
	current, err := k.ChartCurrent(ctx, c.Chart)
	if err == nil && current {
		s.Report(c.Name, plan.StateSkipped, c.Version+", as before", 0, 0)
		close(c.ready)
		return nil
	}
	if err == nil {
		err = record()
	}
	if err == nil {
		c.changed = true
		s.Report(c.Name, plan.StateRunning, "install "+c.Version, 0, 0)
		err = k.ApplyChart(ctx, c.Chart, func(text string, ready, wanted int64) {
			s.Report(c.Name, plan.StateRunning, text, ready, wanted)
		})
	}
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		s.Report(c.Name, plan.StateStopped, "", 0, 0)
		return ctx.Err()
	case err != nil:
		// It was taken back to what was deployed, or the error says why not.
		c.changed = c.deployed != c.before
		s.Report(c.Name, plan.StateFailed, err.Error(), 0, 0)
		return s.explain("install chart "+c.Name, err)
	}
	s.Report(c.Name, plan.StateDone, c.Version, 0, 0)
	close(c.ready)
	return nil
}

// goBackLimit bounds the way back of a set.
const goBackLimit = 2 * time.Minute

// goBack brings all charts of a set that failed because of cause back to the revisions that
// they had, and returns the one error that tells of it.
func (s ChartSet) goBack(ctx context.Context, k Cluster, all []*chartWork, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), goBackLimit)
	defer cancel()
	var told []string
	whole := true
	for _, c := range slices.Backward(all) { // those that need others first
		if !c.changed {
			continue
		}
		what, state := fmt.Sprintf("chart %s is back at revision %d", c.Name, c.before), plan.StateStopped
		if c.before == 0 {
			what = fmt.Sprintf("chart %s was removed again", c.Name)
		}
		if err := k.RevertChart(ctx, c.Chart, c.before); err != nil {
			whole = false
			what, state = fmt.Sprintf("chart %s could not be brought back to revision %d: %v", c.Name, c.before, err), plan.StateFailed
		}
		told = append(told, what)
		s.Report(c.Name, state, what, 0, 0)
	}
	if whole { // else the next run goes back to the same
		if err := s.forget(ctx, k); err != nil {
			told = append(told, err.Error())
		}
	}
	if len(told) == 0 {
		return cause
	}
	return &plan.Error{
		Op: "upgrade the services", Err: fmt.Errorf("%w; %s", cause, strings.Join(told, "; ")),
		Remedy: cmp.Or(plan.Remedy(cause), "run the same command again; finished steps are skipped"),
	}
}
