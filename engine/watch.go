package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/workspace"
)

// WatchRequest says what is watched, and for how long.
type WatchRequest struct {
	// Kubeconfig is the path of the cluster's kubeconfig; empty means that of the workspace.
	// Permission to read nodes and our kinds is sufficient; without permission for Plans none is
	// reported, without permission for the logs of constellation-system no lines are.
	Kubeconfig string
	// Cluster is the watched cluster without a workspace; nil means that of Kubeconfig.
	Cluster *cluster.Selected
	// Once ends the watch after the present state was reported. Stay continues when all nodes are
	// at the target and no Plan has a node in progress; otherwise the watch ends then.
	Once, Stay bool
	// After is what the watch waits with until it looks again whether the API server answers:
	// [time.After], or what does the same at moments at which the caller works anyway, so that
	// the computer is not woken more often. Nil means the former.
	After func(time.Duration) <-chan time.Time
}

// Watch tells where the nodes of the cluster are on their way to its target, first all and
// then what changes, as the events of a run that does nothing. The cluster does not notice,
// and nothing is recorded. While the API server is away Watch says so and goes on when it
// answers. Leaving is no error.
func (e *Engine) Watch(ctx context.Context, r WatchRequest, emit func(plan.Event)) error {
	i, err := e.watcher(ctx, "watch the cluster", r)
	if err != nil {
		return err
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbWatch, now), Verb: plan.VerbWatch, Cluster: i.state.Infrastructure.Name, Simulated: e.simulated(), NotAttested: e.notAttested(), Created: now.UTC()}
	p.End.Command = e.command(string(plan.VerbWatch))
	if s := r.Cluster; s != nil {
		p.End.Command += accessFlags(s.Access, s.Context)
	}
	p.Steps = []plan.Step{{ID: plan.StepRollout, Title: "Watch the nodes", Effect: "nothing changes", Run: func(ctx context.Context, to *plan.Reporter) error {
		return i.watch(ctx, to, r, p)
	}}}
	// The target comes first if it is available soon. With Once the wait is longer, but bounded.
	limit := e.limits.quiet
	if r.Once {
		limit = e.limits.glance
	}
	if r.Cluster != nil || r.Kubeconfig != "" {
		limited, cancel := context.WithTimeout(ctx, limit)
		i.cluster = asFound(limited, i.cluster)
		cancel()
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	v, err := rollout.See(limited, i.cluster, &rollout.NodeDiff{}, e.now())
	cancel()
	switch {
	case err == nil:
		aim(p, &v)
	case ctx.Err() == nil && (r.Once || errors.Is(err, cluster.ErrDenied) || errors.Is(err, cluster.ErrAbsent)):
		return i.unseen(err)
	}
	return e.Run(ctx, p, emit)
}

// watcher connects to the cluster that a request means, for op. No file of the workspace but the
// kubeconfig is needed.
func (e *Engine) watcher(ctx context.Context, op string, r WatchRequest) (*clusterRun, error) {
	path, remedy := e.ws.Path(workspace.KubeconfigFile), "restore the file from a backup, or name another one with `--kubeconfig`"
	read := e.ws.Kubeconfig
	if r.Kubeconfig != "" {
		path, remedy = r.Kubeconfig, "pass a valid kubeconfig of the cluster"
		read = func() ([]byte, error) { return readKubeconfig(path) }
	}
	if s := r.Cluster; s != nil {
		path, remedy = fmt.Sprintf("context %q", s.Context), "correct the kubeconfig"
		read = func() ([]byte, error) { return s.Kubeconfig, nil }
		ctx = cluster.WithRequestTimeout(ctx, s.RequestTimeout)
	}
	b, err := read()
	if r.Kubeconfig == "" && r.Cluster == nil && errors.Is(err, workspace.ErrAbsent) {
		return nil, &plan.Error{
			Op: op, Err: e.ws.Absent(workspace.KubeconfigFile), Exit: plan.ExitUsage,
			Remedy: "name a kubeconfig of the cluster with `--kubeconfig`, or another directory with -C",
		}
	}
	if err != nil {
		var own *plan.Error
		if errors.As(err, &own) {
			return nil, err
		}
		return nil, &plan.Error{Op: "read " + path, Err: workspace.WithoutPath(err), Remedy: remedy, Exit: plan.ExitUsage}
	}
	k, err := e.connect(ctx, b)
	if err != nil {
		return nil, &plan.Error{Op: "read " + path, Err: err, Remedy: remedy, Exit: plan.ExitUsage}
	}
	i := &clusterRun{e: e, facts: &facts{state: &workspace.State{}}, cluster: k, after: r.After}
	if _, server, err := workspace.KubeconfigServer(b); err == nil {
		if u, err := url.Parse(server.Value); err == nil {
			i.state.Infrastructure.ClusterEndpoint = u.Host
		}
	}
	if r.Cluster != nil {
		i.state.Infrastructure.Name = r.Cluster.Context
	}
	if r.Kubeconfig == "" && r.Cluster == nil {
		if s, err := e.ws.State(); err == nil {
			i.state = s
		}
		if c, err := e.ws.Config(); err == nil {
			i.state.Infrastructure.Name = c.Name
		}
	}
	i.state.Infrastructure.Name = cmp.Or(i.state.Infrastructure.Name, i.state.Infrastructure.ClusterEndpoint)
	return i, nil
}

func readKubeconfig(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, 1<<20))
}

// unseen is why nothing could be seen.
func (i *clusterRun) unseen(err error) error {
	e := &plan.Error{Op: "look at the rollout of " + i.state.Infrastructure.Name, Err: err, Remedy: "try again when the API server answers"}
	switch {
	case errors.Is(err, cluster.ErrForbidden):
		e.Remedy = "ask for the right to read nodes, and nodeversions, pendingnodes and joiningnodes of update.edgeless.systems"
	case errors.Is(err, cluster.ErrDenied):
		e.Remedy = "name the kubeconfig of this cluster with `--kubeconfig`"
	case errors.Is(err, cluster.ErrUnreachable) || errors.Is(err, context.DeadlineExceeded):
		e.Err = fmt.Errorf("the API server at %s does not answer: %w", i.state.Infrastructure.ClusterEndpoint, err)
	case errors.Is(err, cluster.ErrAbsent):
		e.Err = errors.New("the cluster has no NodeVersion: no target was ever set")
		e.Remedy = "`constellation init` sets the target of a cluster"
	}
	return e
}

// aim notes in the plan of a watch where the cluster goes, and reports whether it goes
// there only now.
func aim(p *plan.Plan, v *rollout.View) (news bool) {
	if v.Unmanaged {
		return false
	}
	to := plan.Target{Image: v.Target.ImageVersion, Kubernetes: v.Target.Kubernetes}
	if p.To == to && p.Surge == v.Target.MaxSurge {
		return false
	}
	p.To, p.From, p.Surge = to, plan.Target{Kubernetes: v.Oldest}, v.Target.MaxSurge
	return true
}

// watch is the only step of a watch.
func (i *clusterRun) watch(ctx context.Context, r *plan.Reporter, w WatchRequest, p *plan.Plan) error {
	p.End.Done = "you left; the cluster continues on its own"
	if c := w.Cluster; c != nil && c.Note != "" {
		r.Log("watch", "", "warn", c.Note)
	}
	_, told := i.cluster.(unmanaged)
	if told {
		r.Log("watch", "", "info", notManaged)
	}
	err := i.followRollout(ctx, r, i.cluster, func(now *rollout.View) (bool, error) {
		if now.Unmanaged && !told { // the API server was away when the watch began
			told = true
			r.Log("watch", "", "info", notManaged)
		}
		if aim(p, now) {
			if err := r.SendPlan(); err != nil {
				return false, err
			}
		}
		p.End.Done = now.String()
		if len(now.Stuck) > 0 {
			why := now.Why()
			p.End.Done += "; " + why.Text + "; " + why.Remedy
		}
		applying := slices.ContainsFunc(now.Plans, func(p cluster.NodePlan) bool { return p.Applying > 0 })
		return w.Once || !w.Stay && now.Observed && now.Reached && !applying, nil
	})
	if err != nil && (errors.Is(err, cluster.ErrDenied) || errors.Is(err, cluster.ErrAbsent)) {
		return i.unseen(err)
	}
	return err
}
