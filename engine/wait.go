package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/internal/delay"
)

// look asks cloud and cluster.
func (i *clusterRun) look(ctx context.Context, k Cluster) (rollout.Joining, error) {
	machines, err := i.provider.Machines(ctx)
	if err != nil {
		return rollout.Joining{}, check.CloudError("list machines", i.config.Advice(), err)
	}
	nodes, err := k.Nodes(ctx)
	if err != nil {
		return rollout.Joining{}, err
	}
	expected, err := k.Expected(ctx)
	if err != nil && !errors.Is(err, cluster.ErrAbsent) {
		return rollout.Joining{}, err
	}
	if i.state.Enrolled() {
		machines = withoutSpares(machines, nodes, i.config.Counts())
	}
	return rollout.Join(machines, nodes, expected, i.config.Counts()), nil
}

// withoutSpares drops enrolled machines that are not expected to be nodes: spares, and, in a group that has its size, those
// whose place a spare has taken.
func withoutSpares(list []cluster.CloudMachine, nodes []*cluster.Node, wanted map[string]int) []cluster.CloudMachine {
	isNode := map[string]bool{}
	for _, n := range nodes {
		isNode[n.Name] = true
	}
	have := map[string]int{}
	for _, m := range list {
		if isNode[m.Name] {
			have[m.GroupName]++
		}
	}
	return slices.DeleteFunc(slices.Clone(list), func(m cluster.CloudMachine) bool {
		return !isNode[m.Name] && (m.Spare || have[m.GroupName] >= wanted[m.GroupName])
	})
}

func (i *initRun) allReady(ctx context.Context) (bool, error) {
	return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		r, err := i.look(ctx, k)
		return r.Complete(), err
	})
}

// waitReady watches until every machine is a Ready node. It changes nothing, so it can be
// canceled at any time.
func (i *initRun) waitReady(ctx context.Context, r *plan.Reporter) error {
	k, err := i.connect(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	changed := make(chan struct{}, 1) // holds the news that there is some
	poke := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	wg.Go(func() { i.keepWatching(ctx, poke, k.Watch) })
	wg.Go(func() { i.followService(ctx, r, k, "joinservice") })
	monitor, stop := i.monitorAPI(ctx, r, k, i.e.limits.poll)
	defer stop()

	poll := time.NewTicker(i.e.limits.poll)
	defer poll.Stop()
	progress := i.e.now() // when something last changed
	answered := progress  // when somebody last did
	var last map[string]int64
	for {
		limited, end := context.WithTimeout(ctx, i.e.limits.glance)
		now, err := i.look(limited, k)
		end()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			// The API health monitor reports an unreachable API server with more detail.
			if i.e.now().Sub(answered) > 2*i.e.limits.quiet && !monitor.away() {
				r.Wait("cloud", "", fmt.Sprintf("no answer (%v); machines continue to join meanwhile", err))
			}
		default:
			answered = i.e.now()
			if i.tell(r, now) {
				progress = i.e.now()
			}
			counts, ready, wanted := now.Counts()
			if !maps.Equal(counts, last) {
				r.Counts(ready, wanted, counts)
				last = counts
			}
			r.SetNodes(int(ready))
			if now.Complete() {
				r.Wait("", "", "") // for machines; the remaining waits are reported when they are known
				return i.waitServices(ctx, r, k)
			}
			if err := now.Hopeless(i.config.Advice()); err != nil {
				return err
			}
			if !monitor.away() {
				r.Wait("nodes", "", now.Pending(i.e.now()))
			}
		}
		if still := i.e.now().Sub(progress); still > i.e.limits.still {
			e := &plan.Error{Op: "wait for the nodes", Remedy: i.config.Advice().Failed + ", `constellation status` shows the cluster; run the same command again to continue waiting"}
			e.Err = fmt.Errorf("nothing changed for %s: %s", still.Round(time.Second), now.Pending(i.e.now()))
			if err != nil {
				e.Err = fmt.Errorf("no answer for %s: %w", still.Round(time.Second), err)
				if errors.Is(err, cloud.ErrUnavailable) {
					e.Remedy = i.restart() + ". Then run the same command again to continue waiting"
				}
			}
			return e
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
			// One change seldom comes alone, and a look costs as much for ten as for one.
			if !delay.For(ctx, i.e.limits.gather) {
				return ctx.Err()
			}
		case <-poll.C:
		}
	}
}

// waitServices waits a little for the services on the nodes: a node is Ready a moment before
// its kube-proxy is, and until then services do not answer from there. Slower services are
// reported and left to the cluster.
func (i *clusterRun) waitServices(ctx context.Context, r *plan.Reporter, k Cluster) error {
	limited, cancel := context.WithTimeout(ctx, i.e.limits.services)
	defer cancel()
	poll := time.NewTicker(i.e.limits.poll)
	defer poll.Stop()
	var late []string // as last seen
	for {
		all, err := k.Services(limited)
		switch {
		case limited.Err() != nil: // said below
		case err != nil:
			late = []string{err.Error()}
		default:
			late = nil
			for _, s := range all {
				if s.Ready < s.Wanted {
					late = append(late, named(fmt.Sprintf("%s is ready on %d of %d", s.Name, s.Ready, s.Wanted), s.Message))
				}
			}
			if len(late) == 0 {
				return nil
			}
		}
		r.Wait("services", "", some(late))
		select {
		case <-limited.Done():
			if err := ctx.Err(); err != nil {
				return err
			}
			for _, l := range late {
				r.Log("engine", "", "warn", l)
			}
			return nil
		case <-poll.C:
		}
	}
}

// tell emits the changes since the last observation.
func (i *clusterRun) tell(r *plan.Reporter, now rollout.Joining) (changed bool) {
	names := map[string]bool{}
	for _, m := range now.Machines {
		names[m.Name] = true
		changed = i.tellMachine(r, m) || changed
	}
	return i.nodes.Forget(r, names, nil) || changed
}

// tellMachine reports a machine's state, and whether it changed.
func (i *clusterRun) tellMachine(r *plan.Reporter, m rollout.Entry) (changed bool) {
	if k := rollout.Rank[m.State]; k > 0 && k < rollout.Rank[plan.NodeNotReady] && k < rollout.Rank[i.nodes.State(m.Name)] {
		return false // a cloud that lags behind
	}
	return i.nodes.Set(r, m)
}

// followService passes on a service's log from now on, such as the join service's about
// joining machines.
func (i *clusterRun) followService(ctx context.Context, r *plan.Reporter, k Cluster, service string) {
	since := i.e.now()
	wait := backoff{least: 500 * time.Millisecond, most: 10 * time.Second}
	for ctx.Err() == nil {
		err := k.Follow(ctx, service, since, func(l cluster.LogLine) {
			since = l.Time
			e := rollout.ParseLine(l.Text)
			if e.Source == "" {
				e.Source = rollout.LogSources[service]
			}
			e.Kind = plan.KindLog
			r.Send(e)
		})
		i.e.log.Debug("log ended", "service", service, "err", err)
		if !delay.For(ctx, wait.next()) {
			return
		}
	}
}
