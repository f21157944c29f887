package engine

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"constellation/engine/backup"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// ApplySteps are the IDs of the steps of `upgrade apply`, in order.
var ApplySteps = []string{check.StepBackup, StepComponents, check.StepAgents, StepJoinConfig, StepEncryptPrepare, plan.StepCharts, StepRevocations, StepEtcdTag, check.StepTarget, plan.StepRollout, StepEtcdMembers, StepEncryptKeys, StepEncryptSecrets}

// ApplyRequest says to what the cluster is upgraded, and how.
type ApplyRequest struct {
	// PrepareRequest names the hop. What it acknowledges are findings that `--yes` does not
	// accept.
	PrepareRequest
	// Skip are IDs of steps that are left out.
	Skip []string
	// Surge is how many machines there may be beyond the wanted number: a number or a
	// percentage; empty leaves it as it is.
	Surge string
	// Detach ends the run when the target is set, Rehearse makes one that has no effect.
	Detach, Rehearse bool
}

var surgeRE = regexp.MustCompile(`^([1-9][0-9]{0,4}|([1-9][0-9]?|100)%)$`)

func (r ApplyRequest) check() error {
	if r.Surge != "" && !surgeRE.MatchString(r.Surge) {
		return &plan.Error{Err: fmt.Errorf("surge is %q", r.Surge), Remedy: "give a number of machines of at least 1, or a percentage of all nodes from 1% to 100%", Exit: plan.ExitUsage}
	}
	for _, id := range r.Skip {
		if !slices.Contains(ApplySteps, id) {
			return &plan.Error{Err: fmt.Errorf("there is no step %q to skip", id), Remedy: "the steps are " + words.And(ApplySteps), Exit: plan.ExitUsage}
		}
	}
	return nil
}

// flags are the arguments that make the same request, with a leading space each.
func (r ApplyRequest) flags() string {
	s := strings.ReplaceAll(r.PrepareRequest.flags(), " --acknowledge ", " --ack ")
	if r.Surge != "" {
		s += " --surge " + r.Surge
	}
	if len(r.Skip) > 0 {
		s += " --skip-phases " + strings.Join(r.Skip, ",")
	}
	return s
}

func (r ApplyRequest) skips(id string) bool { return slices.Contains(r.Skip, id) }

// PlanApply checks the next hop as Check does and returns the plan to carry it out: backup,
// what nodes install and must prove, charts, the target, and the waiting until all nodes
// are there. Where the target is set already, what is left is the waiting. It changes
// nothing. emit gets the events of the check; calls do not overlap.
//
// Findings that forbid the plan are in it. The error has ExitNothing if there is nothing
// to do, and ExitUsage if workspace or request are at fault.
func (e *Engine) PlanApply(ctx context.Context, r ApplyRequest, emit func(plan.Event)) (*plan.Plan, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	if err := e.ws.OnMachines(plan.VerbApply); err != nil {
		return nil, err
	}
	r.WriteConfig = false
	c := &check.Run{Deps: e.checkDeps(), Request: r.Request, Prepares: true, Applies: true, Acknowledged: r.Acknowledge}
	if err := c.Begin(); err != nil {
		return nil, err
	}
	if err := c.Look(ctx); err != nil {
		return nil, err
	}
	if c.Down != nil {
		return nil, c.Down
	}
	now := e.now()
	p := &plan.Plan{
		ID: newRunID(plan.VerbApply, now), Verb: plan.VerbApply, Cluster: c.Config.Name, Simulated: e.simulated(), NotAttested: e.notAttested(), Nodes: c.Config.Counts(), Created: now.UTC(),
		Acknowledged: r.Acknowledge, Rehearsal: r.Rehearse,
	}
	p.End.Command = e.command(string(plan.VerbApply)) + r.flags()
	if under, err := e.underWay(ctx, c, p, r); under || err != nil {
		return p, err
	}
	if err := c.Decide(ctx); err != nil {
		return nil, err
	}
	if !r.skips(plan.StepCharts) {
		c.CompareRegistry(ctx)
	}
	p.From = c.Out.Current
	p.LastBackup, _ = e.lastBackup(c.State) // one that cannot be looked for is none
	if c.Hop == nil {
		c.Sort()
		p.To, p.Findings = c.Out.Goal, c.Out.Findings
		if len(p.Blocked()) > 0 {
			return p, nil
		}
		return nil, c.Current()
	}
	if err := c.Foresee(ctx, emit); err != nil {
		return nil, err
	}
	if !r.skips(plan.StepCharts) {
		if err := c.ForeseeCharts(ctx); err != nil {
			return nil, err
		}
	}
	list := c.JudgePrepare(ctx)
	c.VouchInUse(ctx, list)
	c.JudgeApply(r.skips)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c.Name()
	c.Sort()
	p.To, p.Findings, p.Changes = c.Hop.To, c.Out.Findings, c.Out.Changes
	p.Surge = cmp.Or(r.Surge, c.Now.Target.MaxSurge)
	p.Components = slices.DeleteFunc(slices.Clone(c.Out.Components), func(x plan.ComponentCheck) bool { return x.NextHop == "" })
	if len(p.Blocked()) > 0 {
		return p, nil
	}
	prepared, err := e.prepareRun(c, list)
	if err != nil {
		return nil, err
	}
	a := &applyRun{clusterRun: prepared.clusterRun, prepared: prepared, request: r, plan: p}
	a.want(c.Config)
	a.controlPlanes = c.ControlPlanes()
	a.fetched, a.accepted = c.Fetched, p.Accepted
	if a.release, err = c.Known.Release(ctx, c.Hop.Planned().Services); err != nil {
		return nil, &plan.Error{Op: "read release " + c.Hop.To.Release, Err: err, Remedy: "point `--feed` to where it is published"}
	}
	a.prepared.weaker = slices.ContainsFunc(p.Findings, func(f plan.Finding) bool { return f.ID == check.RuleWeaker }) // Run makes sure that it is accepted
	a.prepared.target.MaxSurge = r.Surge
	if c.Now.Etcd != "" && (c.Hop.To.Etcd != "" || c.Hop.To.Kubernetes != c.Hop.From.Kubernetes) {
		a.etcd = c.Etcd()
	}
	return p, a.fill(ctx, c)
}

// underWay fills the plan if an earlier upgrade is not complete, and reports whether it did.
func (e *Engine) underWay(ctx context.Context, c *check.Run, p *plan.Plan, r ApplyRequest) (bool, error) {
	if c.Set() && !c.Now.Services.Oldest.Less(c.Services()) {
		return true, e.goOn(ctx, c, p, r)
	}
	if r.skips(StepEncryptSecrets) {
		return false, nil
	}
	pending, err := e.encryptionPending(ctx, c)
	if pending && err == nil {
		err = e.encryptOnly(ctx, c, p, r)
	}
	return pending, err
}

// applyRun is what the steps of one upgrade share. Steps run one after the other.
type applyRun struct {
	*clusterRun
	prepared *prepareRun // what the rollout is prepared with
	request  ApplyRequest
	plan     *plan.Plan
	// migration is the encryption that this upgrade brings to the cluster; nil: none.
	migration *migrating
	waited    bool            // for the rollout
	etcd      version.Version // that the members are to run after the hop; zero: it does not matter
}

// fill completes the plan.
func (a *applyRun) fill(ctx context.Context, c *check.Run) error {
	join, err := a.prepared.joinConfigSteps(ctx)
	if err != nil {
		return err
	}
	var note string
	if a.migration, note, err = a.e.migrates(ctx, c, a.clusterRun, a.request); err != nil {
		return err
	}
	if note != "" {
		a.prepared.notes = append(a.prepared.notes, note)
	}
	p := a.plan
	p.Notes = a.prepared.notes
	replaced, groups := perGroup(c.Out.Changes.Nodes)
	kept, keptGroups := perGroup(c.Out.Changes.InPlace)
	charts := a.chartsStep()
	for _, x := range c.Out.Changes.ChartChanges {
		charts.Details = append(charts.Details, x.Line())
	}
	if len(c.Out.Changes.ChartChanges) == 0 {
		for _, x := range c.Out.Changes.Charts {
			charts.Details = append(charts.Details, "chart "+x)
		}
	}
	for _, x := range []struct {
		what  string
		kinds []string
	}{{"is new", c.Out.Changes.KindsAdded}, {"changes", c.Out.Changes.KindsChanged}} {
		for _, k := range x.kinds {
			charts.Details = append(charts.Details, "kind "+k+" "+x.what)
		}
	}
	steps := append(append(a.componentsSteps(), join...), charts)
	expired, err := a.expired(ctx)
	if err != nil {
		return err
	}
	if len(expired) > 0 {
		steps = append(steps, a.revocationsStep(expired))
	}
	if !a.prepared.removesEtcdTag() || !a.request.skips(check.StepTarget) {
		steps = append(steps, a.prepared.etcdSteps()...)
	}
	steps = append(steps, a.targetStep(groups, keptGroups), a.rolloutStep())
	wait := &steps[len(steps)-1]
	wait.Effect = "all nodes are at the target"
	switch {
	case replaced > 0 && kept > 0:
		wait.Effect = "replaces " + words.Count(replaced, "node") + " and upgrades " + words.Count(kept, "node") + " in place" + inOrder(replaced+kept)
	case replaced > 0:
		wait.Effect = "replaces " + words.Count(replaced, "node") + inOrder(replaced)
	case kept > 0:
		wait.Effect = "upgrades " + words.Count(kept, "node") + " in place" + inOrder(kept) + ": no machine is replaced"
	}
	wait.Details = append(wait.Details, fmt.Sprintf("takes about %s: %s", rollout.Interval{Least: c.Out.Changes.Least, Most: c.Out.Changes.Most}, c.Out.Changes.Basis))
	// What mutates decides whether a backup is needed.
	steps = append([]plan.Step{a.backupStep(steps[:len(steps)-1])}, steps...)
	steps = a.migrate(append(steps, a.membersSteps()...))
	if err := a.skip(ctx, steps); err != nil {
		return err
	}
	what := a.prepared.target.String()
	p.End.Done = fmt.Sprintf("cluster %s runs release %s with %s", p.Cluster, p.To.Release, what)
	p.End.Nothing = p.End.Done + " already: nothing to do"
	if a.prepared.hops > 1 {
		p.End.Done += fmt.Sprintf("; that was hop 1 of %d, the same command makes the next one", a.prepared.hops)
	}
	a.finish(fmt.Sprintf("the target of cluster %s is set to %s; the cluster upgrades itself", p.Cluster, what))
	return nil
}

// finish applies what the request says about how the plan ends.
func (a *applyRun) finish(detached string) {
	p := a.plan
	p.Hold = func(ctx context.Context, r *plan.Reporter, lost func(error)) (func(), error) {
		return a.hold(ctx, r, p.ID, lost)
	}
	p.End.Next = []string{a.e.command("status")}
	if p.End.Done == "" || !slices.ContainsFunc(p.Steps, func(s plan.Step) bool { return s.ID == plan.StepRollout }) {
		p.End.Done = detached
		p.End.Next = append([]string{a.e.command(string(plan.VerbApply))}, p.End.Next...)
	}
	if a.request.Rehearse {
		p.End.Done = wasRehearsal
		for i := range p.Steps {
			s := &p.Steps[i]
			s.Final = false
			s.Run = a.rehearsed(s)
		}
	}
}

// skip puts the steps into the plan, without those that are skipped, and notes which of
// them are done.
func (a *applyRun) skip(ctx context.Context, steps []plan.Step) error {
	p := a.plan
	for _, s := range steps {
		done, err := s.Done(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.Finished = err == nil && done
		leave := a.request.skips(s.ID)
		switch {
		case leave && !s.Finished && s.ID == StepEtcdTag && !a.request.skips(check.StepTarget):
			p.Findings = append([]plan.Finding{{
				ID: "skipped-step", Severity: plan.Block, Source: "versions", Title: "without step " + s.ID + " no control plane would get the etcd of the target",
				Remedy: "leave `--skip-phases " + s.ID + "` out, or skip " + check.StepTarget + ", too",
			}}, p.Findings...)
			continue
		case leave && !s.Finished && (s.ID == StepComponents || s.ID == StepJoinConfig) && !a.request.skips(check.StepTarget):
			p.Findings = append([]plan.Finding{{
				ID: "skipped-step", Severity: plan.Block, Source: "versions", Title: "without step " + s.ID + " no machine could join with the target",
				Remedy: "leave `--skip-phases " + s.ID + "` out, or skip " + check.StepTarget + ", too",
			}}, p.Findings...)
			continue
		case leave:
			p.Notes = append(p.Notes, "Step "+s.ID+" is left out on request.")
			continue
		case (s.ID == plan.StepRollout || s.ID == StepEtcdMembers || s.ID == StepEncryptKeys || s.ID == StepEncryptSecrets) && (a.request.Detach || a.request.skips(check.StepTarget)):
			continue
		}
		p.Steps = append(p.Steps, s)
	}
	return nil
}

// nodeVersionKind is the definition of NodeVersions.
const nodeVersionKind = "nodeversions.update.edgeless.systems"

func (a *applyRun) chartsStep() plan.Step {
	return plan.Step{ID: plan.StepCharts, Title: "Upgrade the services", Effect: a.chartsEffect(), Done: a.chartsDone, Run: a.installCharts}
}

// perGroup is the sum of the numbers of nodes of groups, and each as "2 of workers".
func perGroup(nodes map[string]int) (sum int, each []string) {
	for _, g := range slices.Sorted(maps.Keys(nodes)) {
		sum += nodes[g]
		each = append(each, fmt.Sprintf("%d of %s", nodes[g], g))
	}
	return sum, each
}

// targetStep sets the target, by which nodes of groups are replaced, and others upgraded in
// place.
func (a *applyRun) targetStep(replaced, kept []string) plan.Step {
	s := plan.Step{
		ID:    check.StepTarget,
		Title: "Set the target of all nodes",
		Effect: fmt.Sprintf("NodeVersion %s is set to %s in one write%s; from then on the operator continues even if this program ends",
			nodeVersionName, a.prepared.target, a.prepared.workers()),
		Final: true,
		Done:  a.targetSet,
		Run: func(ctx context.Context, r *plan.Reporter) error {
			return a.inCluster(ctx, r, "set the target", func(ctx context.Context, k Cluster) error { return k.SetNodeTarget(ctx, a.prepared.target) })
		},
	}
	if len(kept) > 0 {
		s.Details = []string{"upgraded in place: " + strings.Join(kept, ", ") + "; these machines and their disks stay"}
		s.Warning = "Kubernetes cannot be downgraded. Back up etcd before; services can be rolled back with helm, nodes cannot."
	}
	if len(replaced) > 0 {
		s.Details = append([]string{
			"replaced: " + strings.Join(replaced, ", "),
			"kubelets get new certificates; the certificate authority of the cluster stays",
		}, s.Details...)
		s.Warning = "The disks of replaced nodes are deleted, and Kubernetes cannot be downgraded. Back up etcd and local volumes before; services can be rolled back with helm, nodes cannot."
	}
	if a.request.Surge != "" {
		s.Details = append(s.Details, "at any moment at most "+a.request.Surge+" beyond the wanted number of machines")
	}
	return s
}

// targetSet reports whether the target is set as requested and may be set.
func (a *applyRun) targetSet(ctx context.Context) (bool, error) {
	return a.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		got, err := k.NodeTarget(ctx)
		return got.Same(a.prepared.target) && got.KeepWorkers == a.prepared.target.KeepWorkers && !got.Cancelled && (a.request.Surge == "" || got.MaxSurge == a.request.Surge), err
	})
}

func (a *applyRun) rolloutStep() plan.Step {
	return plan.Step{
		ID: plan.StepRollout, Title: "Wait for the rollout", Effect: "all nodes are at the target",
		Done: func(ctx context.Context) (bool, error) { return a.rolloutDone(ctx, a.prepared.target) },
		Run: func(ctx context.Context, r *plan.Reporter) error {
			a.waited = true
			if a.migration != nil {
				defer a.migration.supply(ctx, r)()
			}
			return a.waitRollout(ctx, r, a.prepared.target)
		},
	}
}

// goOn fills the plan where the target is set and not reached: what is left is to wait,
// and to end a cancelling.
func (e *Engine) goOn(ctx context.Context, c *check.Run, p *plan.Plan, r ApplyRequest) error {
	n, t := &c.Now, c.Now.Target
	images := n.ControlPlaneImage.Add(n.WorkerImage.Oldest).Add(n.WorkerImage.Newest)
	p.From = plan.Target{Release: n.Services.String(), Image: images.String(), Kubernetes: n.ControlPlaneKubelet.Add(n.WorkerKubelet.Oldest).Add(n.Kubernetes.Newest).String()}
	p.To = plan.Target{Release: n.Services.String(), Image: t.ImageVersion, Kubernetes: t.Kubernetes, Etcd: t.Etcd}
	run := &clusterRun{e: e, facts: &facts{config: c.Config, state: c.State, provider: c.Cloud}}
	a := &applyRun{clusterRun: run, prepared: &prepareRun{clusterRun: run, target: t}, request: r, plan: p}
	p.Surge = cmp.Or(r.Surge, t.MaxSurge)
	a.prepared.target.MaxSurge = p.Surge
	kubernetes, _ := version.Parse(t.Kubernetes) // one that cannot be read is another one
	left, inPlace, first := 0, 0, 0
	for _, node := range n.Nodes {
		if kept := t.KeepWorkers && node.Role != string(cloud.ControlPlane); !kept && !t.Has(&node) {
			left++
			if node.InPlace {
				inPlace++
				if node.Role == string(cloud.ControlPlane) && !n.Kubernetes.Is(kubernetes) {
					first = 1
				}
			}
		}
	}
	rollout := a.rolloutStep()
	rollout.Effect = "replaces " + words.Count(left, "node") + " not yet at the target"
	switch {
	case inPlace > 0 && inPlace == left:
		rollout.Effect = "upgrades " + words.Count(left, "node") + " not yet at the target in place: no machine is replaced"
	case inPlace > 0:
		rollout.Effect = fmt.Sprintf("of %s not yet at the target replaces %d, and upgrades %d in place: their machines stay", words.Count(left, "node"), left-inPlace, inPlace)
	}
	least, basis := c.Past.Estimate(left-inPlace, inPlace-first, !n.Kubernetes.Is(kubernetes))
	rollout.Details = []string{fmt.Sprintf("takes about %s: %s", least, basis)}
	if c.Now.Etcd != "" { // else etcd runs outside of the cluster
		a.etcd = c.EtcdOf(t)
	}
	if pending(c) {
		var err error
		if a.migration, err = e.migratingTo(ctx, c, run); err != nil {
			return err
		}
	}
	steps := a.migrate(append([]plan.Step{a.targetStep(nil, nil), rollout}, a.membersSteps()...))
	a.request.Skip = nil // what could be skipped is done
	if err := a.skip(ctx, steps); err != nil {
		return err
	}
	if t.Paused {
		p.Notes = append(p.Notes, "The rollout is paused; `constellation upgrade resume` continues it.")
	}
	what := t.String()
	p.End.Done = fmt.Sprintf("cluster %s runs release %s with %s", p.Cluster, p.To.Release, what)
	p.End.Nothing = p.End.Done + " already: nothing to do"
	if r.Detach {
		p.End.Nothing = fmt.Sprintf("the target of cluster %s is set to %s already; the cluster upgrades itself", p.Cluster, what)
	}
	a.finish(p.End.Nothing)
	return nil
}

// rehearsed is what a step does in a rehearsal: it asks what it can ask.
func (a *applyRun) rehearsed(s *plan.Step) func(context.Context, *plan.Reporter) error {
	effect := s.Effect
	return func(ctx context.Context, r *plan.Reporter) error {
		r.Conclude("would: " + effect)
		if s.ID != check.StepTarget {
			return nil
		}
		if p := a.plan; p.Changes != nil && slices.Contains(p.Changes.KindsChanged, nodeVersionKind) && slices.ContainsFunc(p.Steps, func(s plan.Step) bool { return s.ID == plan.StepCharts && !s.Finished }) {
			r.Log("engine", "", "info", "the target was not sent to the API server: step "+plan.StepCharts+" changes its kind first")
			return nil
		}
		return a.inCluster(ctx, r, "dry-run the target", func(ctx context.Context, k Cluster) error {
			return k.TryNodeTarget(ctx, a.prepared.target)
		})
	}
}

// holdLimit bounds how long the cluster is waited for that somebody else may have.
const holdLimit = 30 * time.Second

// hold takes the cluster for a run.
func (a *applyRun) hold(ctx context.Context, r *plan.Reporter, run string, lost func(error)) (release func(), err error) {
	k, err := a.connect(ctx)
	if err != nil {
		return nil, err
	}
	h := cluster.Holder{User: "somebody", Workspace: a.e.ws.Dir(), PID: os.Getpid(), Run: run, Since: a.e.now().UTC().Truncate(time.Second)}
	if u, err := user.Current(); err == nil {
		h.User = u.Username
	}
	h.Host, _ = os.Hostname() // an empty one is as good
	held := func(err error) error {
		return &plan.Error{
			Op: "lock the cluster for this run", Err: err, Exit: plan.ExitHeld,
			Remedy: "wait for that run to end, or end its process; what it began can be resumed. `constellation status` shows the cluster meanwhile",
		}
	}
	ctx, cancel := context.WithTimeout(ctx, holdLimit)
	defer cancel()
	tell := time.AfterFunc(2*time.Second, func() {
		r.Wait("lease", "", "another run holds the lock of the cluster; within 15 seconds it is known whether that run is alive")
	})
	release, err = k.Hold(ctx, h, func(err error) { lost(held(err)) })
	if !tell.Stop() {
		r.Wait("", "", "")
	}
	var other *cluster.HeldError
	switch {
	case errors.As(err, &other):
		return nil, held(err)
	case errors.Is(err, cluster.ErrAbsent):
		return nil, &plan.Error{Op: "lock the cluster for this run", Err: err, Remedy: "the services are not installed: `constellation init` installs them"}
	}
	return release, a.clusterError("lock the cluster for this run", err)
}

// reusable is how long the backup of a run that did not get to its end serves the next one.
const reusable = time.Hour

// backupStep backs up what the given steps can destroy. It is done where they are done, or
// where an earlier run to the same target made a whole backup and got no further.
func (a *applyRun) backupStep(mutating []plan.Step) plan.Step {
	dir := a.e.ws.Path(filepath.Join(plan.RunsDir, a.plan.ID, backup.Dir))
	return plan.Step{
		ID: check.StepBackup, Title: "Back up what an upgrade can destroy",
		Effect: "every CustomResourceDefinition and custom resource, Helm's records and the ConfigMaps that an upgrade changes are in " + dir + ", with a snapshot of etcd if possible",
		Done: func(ctx context.Context) (bool, error) {
			all := true
			for _, s := range mutating {
				done, err := s.Done(ctx)
				if ctx.Err() != nil {
					return false, ctx.Err()
				}
				all = all && err == nil && done
			}
			return all || a.backedUp(ctx), nil
		},
		Run: a.backUp,
	}
}

// backedUp reports whether an earlier run to the same target left a whole backup.
func (a *applyRun) backedUp(ctx context.Context) bool {
	runs, err := a.e.Runs()
	if err != nil {
		return false
	}
	for _, r := range runs {
		if r.Verb != a.plan.Verb || r.To != a.plan.To || r.Exit == plan.ExitDone || a.e.now().Sub(r.Started) > reusable {
			continue
		}
		if _, err := a.e.verify(ctx, a.e.ws.Path(plan.RunsDir), r.ID, nil); err == nil {
			return true
		}
	}
	return false
}

func (a *applyRun) backUp(ctx context.Context, r *plan.Reporter) error {
	kubeconfig, err := a.e.ws.Kubeconfig()
	if err != nil {
		return err
	}
	cluster, err := a.e.backups(ctx, kubeconfig)
	if err != nil {
		return &plan.Error{Op: "back up the cluster", Err: err, Remedy: "restore " + workspace.KubeconfigFile + " from a backup"}
	}
	b := &backupRun{
		e: a.e, own: true, dir: a.e.ws.Path(plan.RunsDir), id: a.plan.ID, name: a.plan.Cluster,
		clusterID: hex.EncodeToString(a.state.ClusterValues.ClusterID), cluster: cluster,
	}
	defer b.abort()
	if err := b.resources(ctx, r); err != nil {
		return err
	}
	if _, takes := cluster.(Snapshots); takes {
		if err := b.etcd(ctx, r); err != nil {
			return err
		}
	}
	if err := b.finish(ctx, r); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return &plan.Error{
			Op: "back up before the upgrade", Err: err,
			Remedy: strings.TrimPrefix(plan.Remedy(err)+"; ", "; ") + "nothing was changed. To continue without a backup: `--skip-phases " + check.StepBackup + " --ack " + check.FindingNoBackup + "`",
		}
	}
	text := fmt.Sprintf("Backed up %d objects of %d kinds, %s, verified", b.done.Objects, len(b.done.Types), workspace.SizeOf(b.done.Bytes))
	if b.done.Etcd == nil {
		text += "; without a snapshot of etcd"
	}
	r.Conclude(text)
	return nil
}

// executeFields are the fields of the configuration that PlanExecute needs.
func executeFields() []string {
	return []string{"releases", "charts", "plans", "registry", "provider", "podCIDR", "kubernetesVersion", "hardening"}
}

// PlanExecute returns the plan to bring the services of the cluster to the release of this
// program, after a backup, and nothing else: no target is set. It needs no configuration.
// Of the request only Acknowledge, Skip and Rehearse count. It changes nothing.
//
// Findings that forbid the plan are in it. The error has ExitUsage if the workspace is at
// fault.
func (e *Engine) PlanExecute(ctx context.Context, r ApplyRequest) (*plan.Plan, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	if err := e.ws.OnMachines(plan.VerbApply); err != nil {
		return nil, err
	}
	s, err := e.ws.State()
	if err != nil {
		return nil, err
	}
	kubeconfig, err := e.ws.Kubeconfig()
	if errors.Is(err, workspace.ErrAbsent) {
		return nil, &plan.Error{Op: "upgrade the services", Err: e.ws.Absent(workspace.KubeconfigFile), Exit: plan.ExitUsage, Remedy: "create the cluster first: `" + e.command("init") + "`"}
	}
	if err != nil {
		return nil, err
	}
	c := &check.Run{Deps: e.checkDeps(), State: s, Acknowledged: r.Acknowledge}
	if c.CLI, err = version.Parse(version.Release); err != nil {
		return nil, fmt.Errorf("read own version: %w", err)
	}
	if c.Known, err = c.Know(ctx, "", nil); err != nil {
		return nil, err
	}
	if c.Releases, err = c.Known.Summaries(ctx); err != nil {
		return nil, err
	}
	if err := e.readRunning(ctx, c, kubeconfig); err != nil {
		return nil, err
	}
	c.Matrix = compat.NewMatrix(c.Releases)
	if !c.Now.Services.Is(c.CLI) {
		for _, x := range c.Matrix.Check(c.CLI, c.Now, compat.Planned{Services: c.CLI}, compat.Offer{}) {
			c.Find(plan.Finding{ID: x.Rule, Severity: x.Severity, Title: x.Title, Remedy: x.Remedy, Reference: x.Reference, Source: "matrix"})
		}
	}
	if r.skips(check.StepBackup) {
		c.Find(check.WithoutBackup)
	}
	run := &clusterRun{e: e, facts: &facts{state: s, controlPlanes: c.ControlPlanes()}}
	cfg, err := workspace.PartOfConfig(e.ws, executeFields()...) // the rest is not needed
	if err != nil {
		return nil, err
	}
	run.want(cfg)
	run.feed, _, _ = e.feedOf(cfg, check.Request{}) // its keys are not asked for
	if run.release, err = c.Known.Release(ctx, c.CLI); err != nil {
		return nil, &plan.Error{Op: "read release " + c.CLI.String(), Err: err, Remedy: "reinstall the program"}
	}
	var changes []plan.ChartChange
	if !r.skips(plan.StepCharts) {
		changes, _ = c.LookAtCharts(ctx, comparedCharts{run}) // the event has the result; the step reports the rest
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	c.Name()
	c.Sort()
	now := e.now()
	p := &plan.Plan{
		ID: newRunID(plan.VerbApply, now), Verb: plan.VerbExecute, Cluster: s.Infrastructure.Name, Simulated: e.simulated(), NotAttested: e.notAttested(), Findings: c.Out.Findings, Acknowledged: r.Acknowledge, Rehearsal: r.Rehearse, Created: now.UTC(),
		From: plan.Target{Release: c.Now.Services.String()}, To: plan.Target{Release: c.CLI.String()},
	}
	if cfg, err := e.ws.Config(); err == nil { // it is not needed
		p.Cluster = cfg.Name
	}
	if len(p.Blocked()) > 0 {
		return p, nil
	}
	a := &applyRun{clusterRun: run, prepared: &prepareRun{clusterRun: run}, request: r, plan: p}
	a.request.Detach = true
	a.accepted = p.Accepted
	charts := a.chartsStep()
	if len(changes) > 0 {
		p.Changes = &plan.Changes{ChartChanges: changes}
	}
	for _, x := range changes {
		charts.Details = append(charts.Details, x.Line())
		p.Changes.Charts = append(p.Changes.Charts, x.String())
	}
	if err := a.skip(ctx, []plan.Step{a.backupStep([]plan.Step{charts}), charts}); err != nil {
		return nil, err
	}
	p.End.Nothing = fmt.Sprintf("the services of cluster %s are those of release %s already: nothing to do", p.Cluster, c.CLI)
	a.finish(fmt.Sprintf("the services of cluster %s are those of release %s; nothing else was changed", p.Cluster, c.CLI))
	p.End.Command = e.command(string(plan.VerbExecute)) + " --helm" + r.flags()
	p.End.Next = []string{e.command("status")}
	return p, nil
}

// readRunning reads the versions that the cluster runs into c. It refuses the kubeconfig of another cluster.
func (e *Engine) readRunning(ctx context.Context, c *check.Run, kubeconfig []byte) error {
	limited, cancel := context.WithTimeout(ctx, check.CheckLimit)
	defer cancel()
	inside, err := e.inspect(limited, kubeconfig)
	if err == nil {
		c.Now, err = inside.Running(limited)
	}
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return c.ClusterDown(err)
	}
	if j := c.Now.JoinConfig; j.ClusterID != "" && j.ClusterID != hex.EncodeToString(c.State.ClusterValues.ClusterID) {
		return e.ws.ForeignKubeconfig()
	}
	c.AddImages(func() ([]cloud.Image, error) {
		cfg, err := e.ws.Config()
		if err != nil {
			return nil, err
		}
		p, err := e.provider(limited, cfg, c.State)
		if err != nil {
			return nil, err
		}
		return p.Images(limited)
	})
	return nil
}

// inOrder says how so many nodes are replaced, where that needs words.
func inOrder(n int) string {
	if n == 1 {
		return ""
	}
	return ", control planes first, one after the other"
}
