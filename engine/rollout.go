package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/workspace"
	"constellation/internal/delay"
)

// rolloutDone reports whether all nodes are at a target.
func (i *clusterRun) rolloutDone(ctx context.Context, want cluster.NodeTarget) (bool, error) {
	return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		ro, err := k.Rollout(ctx)
		return ro.Observed && ro.Reached && ro.Reason != rollout.SomeSkipped && ro.Target.Same(want) && ro.Target.KeepWorkers == want.KeepWorkers, err
	})
}

// ending finds the last observation of a rollout. The watches of nodes and machines can be behind
// that of NodeVersion, and the last report must have their end, too. The value is the number of
// observations that showed nodes under way after the end of the rollout.
type ending int

// mostBehind is how many such observations are waited for.
const mostBehind = 2

func (e *ending) seen(now *rollout.View) bool {
	switch {
	case !now.Observed || !now.Reached:
		*e = 0
		return false
	case now.Current >= now.Total:
		return true
	}
	*e++
	return *e > mostBehind
}

// waitRollout watches until all nodes are at a target. It changes nothing, so it can be
// canceled at any time.
func (i *clusterRun) waitRollout(ctx context.Context, r *plan.Reporter, want cluster.NodeTarget) error {
	k, err := i.connect(ctx)
	if err != nil {
		return err
	}
	var end ending
	err = i.followRollout(ctx, r, k, func(now *rollout.View) (bool, error) {
		return end.seen(now), now.Over(want)
	})
	if err != nil {
		return err
	}
	return i.waitServices(ctx, r, k)
}

// followRollout reports the rollout until seen, which gets each observation, returns true for
// the last one, or ctx ends.
func (i *clusterRun) followRollout(ctx context.Context, r *plan.Reporter, k Cluster, seen func(*rollout.View) (last bool, err error)) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	// A watch that ends is the first sign of an API server that goes. One that hangs is found
	// out by asking, which wakes this computer and need not be often.
	monitor, stop := i.monitorAPI(ctx, r, k, i.e.limits.quiet)
	defer stop()
	changed := make(chan struct{}, 1) // holds the news that there is some
	wg.Go(func() {
		i.keepWatching(ctx, func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		}, func(ctx context.Context, changed func()) error {
			defer monitor.poll()
			return k.WatchRollout(ctx, changed)
		})
	})
	for _, service := range []string{"constellation-operator", "joinservice"} {
		wg.Go(func() { i.followService(ctx, r, k, service) })
	}
	outlook := rollout.NewEstimate(rollout.ReadHistory(i.e.ws.Path(plan.RunsDir)))
	r.Forecast(outlook.Complete)

	poll := i.timer(rollout.RestPoll * i.e.limits.poll)
	var line rollout.NodeDiff
	var plans rollout.PlanTeller
	var told map[string]int64
	var agent cluster.AgentRun
	var drains advice
	var denied denials
	for {
		limited, end := context.WithTimeout(ctx, i.e.limits.glance)
		now, err := rollout.See(limited, k, &line, i.e.now())
		end()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case denied.last(err, i.e.now(), i.e.limits.denials):
			return i.clusterError("watch the rollout", err)
		case err != nil:
			i.e.log.Debug("rollout not seen", "err", err) // of an API server that is away the monitor tells
		default:
			if now.Unmanaged {
				now.Stuck = drains.look(ctx, k, &now)
			}
			monitor.remember("last seen at " + now.At.UTC().Format("15:04:05Z") + ": " + now.String())
			outlook.Look(&now)
			i.tellRollout(r, &now)
			plans.Tell(r, now.Plans, now.Planless)
			// Nodes are reported one by one, and counted as reported.
			if states := i.nodes.Counts(); !maps.Equal(states, told) {
				told = states
				r.Counts(now.Current, now.Total, states)
			}
			if a := now.Agent; now.Observed && a.Phase != "" && a != agent && a.Version == now.Target.Kubernetes {
				agent = a
				i.tellAgent(r, a)
			}
			r.SetNodes(int(now.Current))
			last, err := seen(&now)
			if err != nil {
				return err
			}
			if last {
				tellEnd(r, &now)
				return nil
			}
			if !monitor.away() {
				r.Send(now.Why())
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
			if !delay.For(ctx, i.e.limits.gather) { // one change seldom comes alone
				return ctx.Err()
			}
		case <-poll:
			poll = i.timer(rollout.RestPoll * i.e.limits.poll)
		}
	}
}

// tellEnd reports the wait with the last observation, or its end.
func tellEnd(r *plan.Reporter, now *rollout.View) {
	if now.Unmanaged && len(now.Stuck) > 0 {
		r.Send(now.Why()) // the advice belongs to the present state
		return
	}
	r.Wait("", "", "")
}

// denials is the time since which the API server denies access; zero: it does not.
type denials time.Time

// last reports whether err, of an observation at now, denies access for limit or longer.
func (d *denials) last(err error, now time.Time, limit time.Duration) bool {
	if !errors.Is(err, cluster.ErrDenied) {
		if err == nil {
			*d = denials{}
		}
		return false
	}
	since := time.Time(*d)
	if since.IsZero() {
		*d = denials(now)
		return false
	}
	return now.Sub(since) >= limit
}

// tellRollout reports the changes since the last observation.
func (i *clusterRun) tellRollout(r *plan.Reporter, now *rollout.View) {
	for _, m := range now.Fresh {
		i.tellMachine(r, *m)
	}
	if i.nodes.Size() == now.Machines.Size() {
		return // all that are known are there
	}
	names, named := make(map[string]bool, now.Machines.Size()), map[string]string{}
	for m := range now.Machines.All() {
		names[m.Name] = true
		if !m.Unnamed && m.With != "" {
			named[m.With] = m.Name
		}
	}
	i.nodes.Forget(r, names, named)
}

// tellAgent passes on how far the agent is with Kubernetes.
func (i *clusterRun) tellAgent(r *plan.Reporter, a cluster.AgentRun) {
	state := plan.StateRunning
	switch a.Phase {
	case "done":
		state = plan.StateDone
	case "failed":
		state = plan.StateFailed
	}
	text := a.Version + " on " + a.Node + ", " + a.Phase + rollout.NextTry(a.NextTry)
	if a.Line != "" && state != plan.StateDone {
		text += ": " + a.Line
	}
	r.Part("kubernetes", state, text, 0, 0)
}

// keepWatching calls watch again whenever it ends, until ctx does.
func (i *clusterRun) keepWatching(ctx context.Context, changed func(), watch func(context.Context, func()) error) {
	wait := backoff{least: 200 * time.Millisecond, most: 5 * time.Second}
	for ctx.Err() == nil {
		began := i.e.now()
		err := watch(ctx, changed)
		i.e.log.Debug("watch ended", "err", err)
		if i.e.now().Sub(began) > time.Minute {
			wait.last = 0
		}
		if !delay.For(ctx, wait.next()) {
			return
		}
	}
}

// ChangeRollout pauses, resumes or cancels the rollout of the cluster and returns what it
// was before. The error has ExitNothing if it is so already.
func (e *Engine) ChangeRollout(ctx context.Context, c cluster.RolloutChange) (was cluster.Rollout, err error) {
	err = e.onCluster(ctx, "change the rollout", func(ctx context.Context, k Cluster) error {
		if was, err = k.Rollout(ctx); err != nil {
			return err
		}
		same := func(have bool, want *bool) bool { return want == nil || *want == have }
		if same(was.Target.Paused, c.Paused) && same(was.Target.Cancelled, c.Cancelled) {
			what := "is not paused and not cancelled"
			switch {
			case c.Cancelled != nil && *c.Cancelled:
				what = "is cancelled already"
			case c.Paused != nil && *c.Paused:
				what = "is paused already"
			}
			return rollout.NothingToDo("the rollout " + what)
		}
		return k.ChangeRollout(ctx, c)
	})
	return was, err
}

// Skip puts the node, or else the group, of a name on hold, or, if skip is false, resumes it
// and retries now. It returns the previous state. The error has ExitNothing if there is no
// change, and ExitUsage if there is neither node nor group.
func (e *Engine) Skip(ctx context.Context, name string, skip bool) (was cluster.SkipState, err error) {
	err = e.onCluster(ctx, "change what rollouts do with "+name, func(ctx context.Context, k Cluster) error {
		was, err = k.SkipState(ctx, name)
		switch {
		case errors.Is(err, cluster.ErrAbsent):
			return &plan.Error{Err: fmt.Errorf("no node and no group is called %q", name), Exit: plan.ExitUsage, Remedy: "`constellation status` lists both"}
		case err != nil:
			return err
		case skip && was.Held:
			return rollout.NothingToDo(was.Kind + " " + name + " is skipped already")
		case skip && was.By != "":
			return rollout.NothingToDo("node " + name + " is skipped already, with its group " + was.By)
		case !skip && was.By != "":
			return &plan.Error{
				Err: fmt.Errorf("node %s is skipped with all of its group %s", name, was.By), Exit: plan.ExitUsage,
				Remedy: "`constellation upgrade retry " + was.By + "` resumes the group",
			}
		case !skip && !was.Held && was.Postponed.IsZero() && !was.Failed:
			what := " is neither skipped nor postponed"
			if was.Kind == cluster.SkipNode {
				what += ", and no upgrade of it has failed"
			}
			return rollout.NothingToDo(was.Kind + " " + name + what)
		}
		if skip {
			return k.SetSkipState(ctx, was, true)
		}
		before, unknown := k.Rollout(ctx)
		if err := k.SetSkipState(ctx, was, false); err != nil {
			return err
		}
		if unknown == nil && before.Reached && before.Reason == rollout.SomeSkipped {
			noticed(ctx, k, before)
		}
		return nil
	})
	return was, err
}

// noticeLimit bounds the wait for the operator to notice that a node is resumed.
const noticeLimit = 10 * time.Second

// noticed waits until the operator has noticed that a node or group is resumed. Until then NodeVersion says that
// all other nodes are at the target, and a watch that begins now would end at once. It ends without an error
// after noticeLimit: an operator that is away notices later.
func noticed(ctx context.Context, k Cluster, before cluster.Rollout) {
	for end := time.Now().Add(noticeLimit); time.Now().Before(end); {
		ro, err := k.Rollout(ctx)
		if err == nil && (!ro.Reached || ro.Reason != before.Reason || ro.Message != before.Message) || !delay.For(ctx, 100*time.Millisecond) {
			return
		}
	}
}

// onCluster does something short with the cluster of the workspace.
func (e *Engine) onCluster(ctx context.Context, op string, f func(context.Context, Cluster) error) error {
	b, err := e.ws.Kubeconfig()
	if errors.Is(err, workspace.ErrAbsent) {
		return &plan.Error{Op: op, Err: e.ws.Absent(workspace.KubeconfigFile), Exit: plan.ExitUsage, Remedy: "copy the cluster's kubeconfig there under this name, or name another directory with -C"}
	}
	if err != nil {
		return err
	}
	if err := e.ws.NeedsOperator(); err != nil {
		return err
	}
	k, err := e.connect(ctx, b)
	if err != nil {
		return &plan.Error{Op: "read " + e.ws.Path(workspace.KubeconfigFile), Err: err, Remedy: "restore the file from a backup"}
	}
	ctx, cancel := context.WithTimeout(ctx, e.limits.api)
	defer cancel()
	err = f(ctx, k)
	if told := (*plan.Error)(nil); err == nil || errors.As(err, &told) {
		return err
	}
	out := &plan.Error{Op: op, Err: err, Remedy: "`constellation status` shows whether the control plane is up; run the same command again afterwards"}
	switch {
	case errors.Is(err, cluster.ErrAbsent):
		out.Remedy = "`constellation init` sets the target of a cluster"
	case errors.Is(err, cluster.ErrDenied):
		out.Remedy = workspace.KubeconfigFile + " is not of this cluster or not its administrator's"
	}
	return out
}
