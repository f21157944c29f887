package engine

import (
	"context"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// Check lists the reachable versions and the upgrade path, the changes of the next hop, and the
// findings of its preflight. It changes nothing but the configuration, and that only on request.
//
// emit gets a check event called CheckVersions as soon as versions and path are known, then
// those of the preflight; calls do not overlap. If the cluster is unreachable, the event and
// the result have the data known without it, and the error has the reason; it has ExitUsage if
// workspace or request are at fault.
//
// Exit of the result is ExitBlocked if newer versions exist but none can be reached, or the
// preflight forbids the next hop; ExitUpgradeAvailable if there is a next hop; else zero.
func (e *Engine) Check(ctx context.Context, r check.Request, emit func(plan.Event)) (check.Check, error) {
	c := &check.Run{Deps: e.checkDeps(), Request: r}
	if err := c.Begin(); err != nil {
		return check.Check{}, err
	}
	if err := c.Look(ctx); err != nil {
		return check.Check{}, err
	}
	if c.Down != nil {
		c.Without()
		c.Tell(emit)
		return c.Out, c.Down
	}
	if err := c.Decide(ctx); err != nil {
		return check.Check{}, err
	}
	c.CompareRegistry(ctx)
	c.Tell(emit)
	if err := c.Foresee(ctx, emit); err != nil {
		return check.Check{}, err
	}
	if err := c.ForeseeCharts(ctx); err != nil {
		return check.Check{}, err
	}
	if err := c.Write(); err != nil {
		c.Sort()
		c.Out.Exit = plan.ExitCode(err)
		return c.Out, err
	}
	c.Finish()
	return c.Out, nil
}

// checkDeps is what a check needs of the engine.
func (e *Engine) checkDeps() check.Deps {
	return check.Deps{
		Ws: e.ws, Log: e.log, Clock: e.now, Buildable: e.buildable, Inspect: e.inspect, Command: e.command, Feed: e.feedOf,
		Connect: func(ctx context.Context, kubeconfig []byte) (check.Published, error) {
			return e.connect(ctx, kubeconfig)
		},
		Provider: func(ctx context.Context, c *workspace.Config, s *workspace.State) (check.Cloud, error) {
			return e.provider(ctx, c, s)
		},
		Know: func(ctx context.Context, location string, keys []release.Key) (check.Known, error) {
			return e.learnReleases(ctx, location, keys)
		},
		Charts: func(c *workspace.Config, s *workspace.State, rel *release.Release, location string, controlPlanes int) check.Charts {
			i := &clusterRun{e: e, facts: &facts{config: c, state: s, release: rel, feed: location, controlPlanes: controlPlanes}}
			i.want(c)
			return comparedCharts{i}
		},
		BringsEncryption: bringsEncryption,
		Runs: func() []plan.RunSummary {
			runs, _ := e.Runs() // without them less is known
			return runs
		},
		LastBackup: func(s *workspace.State) plan.Finding {
			last, err := e.lastBackup(s)
			return e.backupFinding(last, err)
		},
	}
}
