package operator

import (
	"context"
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"constellation/engine/component"
	"constellation/operator/api/v1alpha1"
)

// agents are the agents of other machines, each asked about and for its own node alone.
// Its methods are called at the same time by several goroutines.
type agents interface {
	// Run returns the latest run of a node's agent; zero: there was none.
	Run(ctx context.Context, node string) (upgradeRun, error)
	// Upgrade asks for an upgrade of the node, or attaches to it, as host.Upgrade does
	// for the cluster's Kubernetes.
	Upgrade(ctx context.Context, node, token, version, reference string, components component.Signed, tell func(upgradeRun)) error
	// keep ends connections to all other nodes.
	keep(nodes map[string]bool)
}

// nodeRuns is what was last heard of the agents of machines that are upgraded in place,
// by ID. It is safe for concurrent use.
type nodeRuns struct {
	mu  sync.Mutex
	all map[string]*nodeRun
}

type nodeRun struct {
	upgradeRun
	heard bool
	gone  context.Context // ends when the machine is not upgraded any more
	end   context.CancelFunc
}

// keep forgets all other machines, ends what is asked of their agents, and returns what
// was heard of the rest; nil if nothing was.
func (r *nodeRuns) keep(machines map[string]bool) map[string]upgradeRun {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out map[string]upgradeRun
	for id, n := range r.all {
		switch {
		case !machines[id]:
			n.end()
			delete(r.all, id)
		case n.heard:
			if out == nil {
				out = map[string]upgradeRun{}
			}
			out[id] = n.upgradeRun
		}
	}
	for id := range machines {
		if r.all[id] == nil {
			if r.all == nil {
				r.all = map[string]*nodeRun{}
			}
			n := &nodeRun{}
			n.gone, n.end = context.WithCancel(context.Background())
			r.all[id] = n
		}
	}
	return out
}

// set notes what was heard, unless the machine is not upgraded any more.
func (r *nodeRuns) set(machine string, run upgradeRun) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.all[machine]; n != nil {
		n.upgradeRun, n.heard = run, true
	}
}

// while returns a context that ends when the machine is not upgraded any more.
func (r *nodeRuns) while(ctx context.Context, machine string) (context.Context, context.CancelFunc) {
	r.mu.Lock()
	n := r.all[machine]
	r.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	if n == nil {
		cancel()
		return ctx, cancel
	}
	stop := context.AfterFunc(n.gone, cancel)
	return ctx, func() { stop(); cancel() }
}

// hear returns what was heard of the agents of machines that are upgraded in place, and
// lets go of all others.
func (r *nodeVersions) hear(intents []intent) map[string]upgradeRun {
	machines, nodes := map[string]bool{}, map[string]bool{}
	for i := range intents {
		if in := &intents[i]; in.goal == v1alpha1.UpgradeGoal {
			machines[in.machine], nodes[in.node] = true, true
		}
	}
	heard := r.runs.keep(machines) // what is asked of others ends before its connection does
	if r.agents != nil {
		r.agents.keep(nodes)
	}
	return heard
}

// ask lets the agents be asked of which nothing was heard, and follows the runs that they
// have begun.
func (r *nodeVersions) ask(o *observed) {
	for i := range o.intents {
		in := &o.intents[i]
		if in.goal != v1alpha1.UpgradeGoal || r.agents == nil {
			continue
		}
		run, heard := o.runs[in.machine]
		switch {
		case run.active() && run.components != "":
			r.upgradeNode(o, action{kind: upgradeNode, node: in.node, machine: in.machine, version: run.version, components: run.components})
		case !heard || run.active(): // which was begun by somebody else, so it can only be looked at
			r.try("ask the agent of "+in.node, func(ctx context.Context) error {
				ctx, end := r.runs.while(ctx, in.machine)
				defer end()
				run, err := r.agents.Run(ctx, in.node)
				if err == nil {
					r.runs.set(in.machine, run)
				}
				return err
			})
		}
	}
}

// upgradeNode lets a node's agent upgrade it, or attaches to its run, and follows it to
// its end.
func (r *nodeVersions) upgradeNode(o *observed, a action) {
	if r.agents == nil {
		return
	}
	about := o.nodes[a.node]
	r.try(upgradeOn+a.node, func(ctx context.Context) error {
		ctx, end := r.runs.while(ctx, a.machine)
		defer end()
		last, err := r.agents.Run(ctx, a.node)
		if err != nil {
			return err
		}
		if last.mark() != "" && last.version == a.version && last.components == a.components && !last.ended.Equal(a.ended) {
			r.runs.set(a.machine, last) // it has failed since; when it is tried again is decided
			return nil
		}
		c, err := r.readComponents(ctx, a.components)
		if err != nil {
			return err
		}
		r.point("before", upgradeNode)
		r.log.Info("upgrade of a node followed", "node", a.node, "version", a.version, "components", a.components)
		if about != nil && !last.active() { // else it was told by who began it
			r.event(about, corev1.EventTypeNormal, "UpgradeStarted", "Upgrade", "its agent brings it to Kubernetes "+a.version)
		}
		failed := r.agents.Upgrade(ctx, a.node, upgradeToken(a.version, a.components, last), a.version, a.components, c.Signed, func(run upgradeRun) {
			r.runs.set(a.machine, run)
			r.wake()
		})
		r.counters.action(upgradeNode, failed)
		if failed == nil {
			r.point("after", upgradeNode)
		}
		run, err := r.agents.Run(ctx, a.node)
		switch {
		case ctx.Err() != nil: // what was told has ended the matter
			return nil
		case err != nil:
			return errors.Join(failed, err)
		}
		r.runs.set(a.machine, run)
		if failed != nil && about != nil {
			r.event(about, corev1.EventTypeWarning, "UpgradeFailed", "Upgrade", limited(failed.Error(), 500))
		}
		if failed != nil {
			return fmt.Errorf("upgrade %s: %w", a.node, failed)
		}
		return nil
	})
}
