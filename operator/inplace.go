package operator

import (
	"context"
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"constellation/engine/component"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// agents are the agents of other machines. Each is used for its own node alone. The methods are
// called concurrently.
type agents interface {
	// Run returns the latest run of a node's agent; zero: there was none.
	Run(ctx context.Context, node string) (decision.UpgradeRun, error)
	// Upgrade requests an upgrade of the node, or attaches to it, as host.Upgrade does
	// for the cluster's Kubernetes.
	Upgrade(ctx context.Context, node, token, version, reference string, components component.Signed, tell func(decision.UpgradeRun)) error
	// keep ends connections to all other nodes.
	keep(nodes map[string]bool)
}

// nodeRuns has the last reported runs of agents of machines that are upgraded in place, by ID. It is
// safe for concurrent use.
type nodeRuns struct {
	mu  sync.Mutex
	all map[string]*nodeRun
}

type nodeRun struct {
	decision.UpgradeRun
	heard bool
	gone  context.Context // ends when the machine is no longer upgraded
	end   context.CancelFunc
}

// keep drops all other machines and ends requests to their agents. It returns the reported runs of
// the rest; nil if there are none.
func (r *nodeRuns) keep(machines map[string]bool) map[string]decision.UpgradeRun {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out map[string]decision.UpgradeRun
	for id, n := range r.all {
		switch {
		case !machines[id]:
			n.end()
			delete(r.all, id)
		case n.heard:
			if out == nil {
				out = map[string]decision.UpgradeRun{}
			}
			out[id] = n.UpgradeRun
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

// set records a run, unless the machine is no longer upgraded.
func (r *nodeRuns) set(machine string, run decision.UpgradeRun) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.all[machine]; n != nil {
		n.UpgradeRun, n.heard = run, true
	}
}

// while returns a context that ends when the machine is no longer upgraded.
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

// inPlaceRuns returns the reported runs of machines that are upgraded in place, and closes the
// connections to all other agents, except that of the upgrade of Kubernetes.
func (r *nodeVersions) inPlaceRuns(intents []decision.Intent, upgrade *v1alpha1.UpgradeProgress) map[string]decision.UpgradeRun {
	machines, nodes := map[string]bool{}, map[string]bool{}
	if upgrade != nil {
		nodes[upgrade.Node] = true
	}
	for i := range intents {
		if in := &intents[i]; in.Goal == v1alpha1.UpgradeGoal {
			machines[in.Machine], nodes[in.Node] = true, true
		}
	}
	heard := r.runs.keep(machines) // requests to other agents end before their connections
	if r.agents != nil {
		r.agents.keep(nodes)
	}
	return heard
}

// ask requests the runs of agents that have not reported, and follows the runs in progress.
func (r *nodeVersions) ask(o *observed) {
	r.askOther(o)
	for i := range o.Intents {
		in := &o.Intents[i]
		if in.Goal != v1alpha1.UpgradeGoal || r.agents == nil {
			continue
		}
		run, heard := o.NodeRuns[in.Machine]
		switch {
		case run.Active() && run.Components != "":
			r.upgradeNode(o, decision.Action{Kind: decision.UpgradeNode, Node: in.Node, Machine: in.Machine, Version: run.Version, Components: run.Components, Etcd: run.Etcd})
		case !heard || run.Active(): // another operator started it, so it can only be observed
			r.try("read the run of the agent of "+in.Node, func(ctx context.Context) error {
				ctx, end := r.runs.while(ctx, in.Machine)
				defer end()
				run, err := r.agents.Run(ctx, in.Node)
				if err == nil {
					r.runs.set(in.Machine, run)
				}
				return err
			})
		}
	}
}

// askOther requests the outcome of the upgrade of Kubernetes that an earlier leader started on another
// control plane, if a relay to its agent runs there.
func (r *nodeVersions) askOther(o *observed) {
	run := o.Run
	if r.agents == nil || !run.Active() || run.Node == r.nodeName {
		return
	}
	upgrade, n := o.version.Status.Upgrade, o.find().Nodes[run.Node]
	if upgrade == nil || upgrade.Node != run.Node || n == nil || !n.InPlaceLabel {
		return
	}
	of := runKey(upgrade)
	r.try("read the upgrade of Kubernetes by the agent of "+run.Node, func(ctx context.Context) error {
		answer, err := r.agents.Run(ctx, run.Node)
		if err == nil {
			r.hostView.setAnswer(of, answer)
		}
		return err
	})
}

// runKey names a reported run.
func runKey(u *v1alpha1.UpgradeProgress) string { return u.Node + " " + u.Started.String() }

// answerTo returns what the agent of another host last answered about a reported run; zero: nothing.
func (h *hostView) answerTo(u *v1alpha1.UpgradeProgress) decision.UpgradeRun {
	h.mu.Lock()
	defer h.mu.Unlock()
	if u == nil || h.answered != runKey(u) {
		return decision.UpgradeRun{}
	}
	return h.answer
}

func (h *hostView) setAnswer(of string, answer decision.UpgradeRun) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answered, h.answer = of, answer
}

// packagesKept records why the agent of a Node leaves packages as they are, if it does.
func (r *nodeVersions) packagesKept(about *corev1.Node, run decision.UpgradeRun) {
	if about != nil && run.PackagesKept != "" {
		r.event(about, corev1.EventTypeWarning, "PackagesKept", "Upgrade", run.PackagesKept)
	}
}

// upgradeNode starts an upgrade by a node's agent or attaches to its run, and follows it to its end.
func (r *nodeVersions) upgradeNode(o *observed, a decision.Action) {
	if r.agents == nil {
		return
	}
	about := o.nodes[a.Node]
	r.try(upgradeOn+a.Node, func(ctx context.Context) error {
		ctx, end := r.runs.while(ctx, a.Machine)
		defer end()
		last, err := r.agents.Run(ctx, a.Node)
		if err != nil {
			return err
		}
		if last.InPlace && last.RetryMark() != "" && last.Version == a.Version && last.Components == a.Components && last.Etcd == a.Etcd && !last.Ended.Equal(a.Ended) {
			r.runs.set(a.Machine, last) // it has failed since; Decide chooses the time of the retry
			return nil
		}
		attempt := last
		if again := !a.Ended.IsZero() && last.Phase == "done"; again && last.Ended.Equal(a.Ended) {
			attempt.Phase = "failed" // a finished run that is repeated needs a token of its own
		} else if again {
			r.runs.set(a.Machine, last) // it has been repeated
			return nil
		}
		c, err := r.readComponents(ctx, a.Components)
		if err != nil {
			return err
		}
		r.point("before", decision.UpgradeNode)
		r.log.Info("upgrade of a node followed", "node", a.Node, "version", a.Version, "components", a.Components)
		if about != nil && !last.Active() { // else the operator that started it has reported it
			what := "it to Kubernetes " + a.Version
			if a.Etcd != "" && about.Status.NodeInfo.KubeletVersion == a.Version {
				what = "its etcd"
			}
			r.event(about, corev1.EventTypeNormal, "UpgradeStarted", "Upgrade", "its agent upgrades "+what)
		}
		failed := r.agents.Upgrade(ctx, a.Node, nodeToken(a.Version, a.Components, a.Etcd, attempt), a.Version, a.Components, c.Signed, func(run decision.UpgradeRun) {
			r.packagesKept(about, run)
			r.runs.set(a.Machine, run)
			r.wake()
		})
		r.counters.action(decision.UpgradeNode, failed)
		if failed == nil {
			r.point("after", decision.UpgradeNode)
		}
		run, err := r.agents.Run(ctx, a.Node)
		switch {
		case ctx.Err() != nil: // the reported run has ended the upgrade
			return nil
		case err != nil:
			return errors.Join(failed, err)
		}
		r.runs.set(a.Machine, run)
		if failed != nil && about != nil {
			r.event(about, corev1.EventTypeWarning, "UpgradeFailed", "Upgrade", decision.Truncate(failed.Error(), 500))
		}
		if failed != nil {
			return fmt.Errorf("upgrade %s: %w", a.Node, failed)
		}
		return nil
	})
}
