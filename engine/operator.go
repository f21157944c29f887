package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"

	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// IDs of the steps of `adopt --operator` and of its undo that other verbs do not have.
const (
	StepInventory    = "inventory"
	StepSigningKey   = "signing-key"
	StepMachines     = "machines"
	StepRemoveTarget = "remove-target"
	StepRemoveCharts = "remove-charts"
	StepRemoveAgents = "remove-agents"
	StepRemoveData   = "remove-data"
)

// Adopter is what installing the operator in an adopted cluster needs of the cluster besides [Cluster]. Every
// method is idempotent.
type Adopter interface {
	// Nodes returns the nodes, sorted by name.
	Nodes(ctx context.Context) ([]*cluster.Node, error)
	// Versions returns the versions of Kubernetes of kubeadm-config and of the API servers' pods, sorted, each once.
	Versions(ctx context.Context) ([]string, error)
	// HasInventory reports whether the cluster has this inventory, and each Node the provider ID of it.
	HasInventory(ctx context.Context, i machines.Inventory) (bool, error)
	// SetInventory makes it so. A provider ID is set once; the error names a Node that has another one.
	SetInventory(ctx context.Context, i machines.Inventory) error
	// LackAgents returns the nodes whose agent is not of this release with these keys.
	LackAgents(ctx context.Context, release string, keys []byte) ([]string, error)
	// InstallAgents installs the agent on all machines, by a DaemonSet that it removes again. The error names
	// the first machine that refuses, and why. report says how many machines have it.
	InstallAgents(ctx context.Context, image, release string, keys []byte, secrets []string, report func(text string, ready, wanted int64)) error
	// RemoveAgents removes the agents, in the same way. It returns what stays on machines, by node.
	RemoveAgents(ctx context.Context, image string, secrets []string, report func(text string, ready, wanted int64)) (map[string]string, error)
	// HasGroups reports whether the groups of an inventory are upgraded in place, and their Nodes have components.
	HasGroups(ctx context.Context, i machines.Inventory) (bool, error)
	// SetGroups makes it so. Nodes that have components keep them.
	SetGroups(ctx context.Context, i machines.Inventory, components string) error
	// RemoveTarget deletes NodeVersion, by which the operator has nothing to do. It is an error while a node is
	// being upgraded.
	RemoveTarget(ctx context.Context) error
	// RemoveData deletes our kinds, our ConfigMaps, and our labels and annotations of Nodes, and at last the
	// namespace of our services.
	RemoveData(ctx context.Context) error
}

// operatorRun is what the steps of `adopt --operator` share.
type operatorRun struct {
	*clusterRun
	inventory machines.Inventory
	image     string // that installs the agent
	secrets   []string
	target    cluster.NodeTarget
}

// PlanOperator returns the plan to install the operator in the cluster of a workspace that `adopt` wrote, with
// an agent on each machine. From then on the verbs of `upgrade` work. It changes nothing. The error has
// ExitNothing if all of it is there, and ExitUsage if the workspace is at fault.
func (e *Engine) PlanOperator(ctx context.Context) (*plan.Plan, error) {
	run, k, err := e.operatorRun(ctx)
	if err != nil {
		return nil, err
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbAdopt, now), Verb: plan.VerbAdopt, Cluster: run.config.Name, NotAttested: true, Nodes: run.config.Counts(), Created: now.UTC()}
	nodes, err := k.Nodes(ctx)
	if err != nil {
		return nil, run.clusterError("read the nodes", err)
	}
	served, err := run.cluster.Version(ctx)
	if err != nil {
		return nil, run.clusterError("read the version of the API server", err)
	}
	v, err := version.Parse(served)
	if err != nil {
		return nil, fmt.Errorf("read the version of the API server: %w", err)
	}
	p.To = plan.Target{Release: run.release.Version.String(), Kubernetes: v.String()}
	_, err = run.cluster.EtcdTag(ctx)
	external := errors.Is(err, kubeadm.ErrExternalEtcd)
	if err != nil && !external {
		return nil, run.clusterError("read where etcd runs", err)
	}
	versions, err := k.Versions(ctx)
	if err != nil {
		return nil, run.clusterError("read the versions of the control planes", err)
	}
	if p.Findings = run.judge(nodes, v, versions, external); len(p.Blocked()) > 0 {
		return p, nil
	}
	run.target.Kubernetes = v.String()
	if err := run.sign(ctx); err != nil {
		p.Findings = append(p.Findings, plan.Finding{
			ID: "components", Severity: plan.Block, Source: "adopt", Title: "the components of Kubernetes " + v.String() + " are not known", Detail: err.Error(),
			Remedy: run.config.Advice().OfferOf(v.String()),
		})
		return p, nil
	}
	p.Steps = run.steps(k)
	p.Files = []plan.File{{Path: e.ws.Path(workspace.SigningKeyFile), Mode: "0600", Secret: true, Note: "signs what machines install: keep a copy offline"}}
	p.Notes = []string{
		"A pod with root rights runs on each machine once, installs the agent, and is removed again. The machines are not attested.",
		"kubeadm, kubelet, containers and workloads are not restarted. `constellation adopt --undo` takes everything out again, except the provider IDs of Nodes, which Kubernetes keeps.",
	}
	all := true
	for i := range p.Steps {
		s := &p.Steps[i]
		done, err := s.Done(ctx)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		s.Finished = err == nil && done
		all = all && s.Finished
	}
	if all {
		return nil, &plan.Error{Op: "the operator of release " + run.release.Version.String() + " runs in cluster " + p.Cluster + " already; nothing was changed", Exit: plan.ExitNothing}
	}
	p.End.Command = e.command("adopt") + " --operator"
	p.End.Done = fmt.Sprintf("cluster %s has the operator, and each of %s an agent: upgrades work", p.Cluster, words.Count(len(nodes), "machine"))
	p.End.Next = []string{e.command("upgrade check"), e.command("status")}
	return p, nil
}

// operatorRun reads the workspace of an adopted cluster and connects to it.
func (e *Engine) operatorRun(ctx context.Context) (*operatorRun, Adopter, error) {
	s, err := e.ws.State()
	if errors.Is(err, workspace.ErrAbsent) {
		return nil, nil, &plan.Error{Op: "install the operator", Err: errors.New("no cluster was adopted in " + e.ws.Dir()), Exit: plan.ExitUsage, Remedy: "run `" + e.command("adopt") + "` first, or name the folder with -C"}
	}
	if err != nil {
		return nil, nil, err
	}
	c, err := e.ws.Config()
	if err != nil {
		return nil, nil, err
	}
	if !s.Adopted() {
		return nil, nil, &plan.Error{Op: "install the operator", Err: errors.New("this is not the workspace of an adopted cluster"), Exit: plan.ExitUsage, Remedy: "run `" + e.command("init") + "`, which installs it in clusters of constellation"}
	}
	if err := e.ws.Belong(c, s); err != nil {
		return nil, nil, err
	}
	own, err := version.Parse(version.Release)
	if err != nil {
		return nil, nil, fmt.Errorf("read own version: %w", err)
	}
	source, err := e.releases(ctx, "", nil)
	if err != nil {
		return nil, nil, err
	}
	rel, err := source.Release(ctx, own)
	if err != nil {
		return nil, nil, fmt.Errorf("read release %s: %w", own, err)
	}
	run := &operatorRun{clusterRun: &clusterRun{e: e, facts: &facts{config: c, state: s, release: rel}}}
	run.want(c)
	run.controlPlanes = c.ControlPlanes()
	if c.Registry != nil {
		run.secrets = []string{registry.SecretName}
	}
	image := rel.AgentImage()
	if image == "" {
		return nil, nil, &plan.Error{Op: "install the operator", Err: fmt.Errorf("release %s has no image that installs the agent", own), Exit: plan.ExitUsage, Remedy: "use a newer program"}
	}
	run.image = run.imageOf(image)
	for _, m := range machines.List(c.Provider.Section) {
		if m.ProviderID == "" {
			m.ProviderID = machines.ProviderID(s.Infrastructure.UID, m.Name)
		}
		run.inventory.Machines = append(run.inventory.Machines, m.Entry())
	}
	run.inventory.Schema, run.inventory.Cluster = "1", s.Infrastructure.UID
	run.inventory.SetPackages(c.Provider.Section)
	k, err := run.connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	a, ok := k.(Adopter)
	if !ok {
		return nil, nil, errors.New("install the operator: this program has no Kubernetes client")
	}
	return run, a, nil
}

// judge returns what stands against installing the operator in a cluster with these nodes, whose etcd may be
// external. versions are those of its control planes.
func (o *operatorRun) judge(nodes []*cluster.Node, v version.Version, versions []string, external bool) (found []plan.Finding) {
	block := func(id, title, detail, remedy string) {
		found = append(found, plan.Finding{ID: id, Severity: plan.Block, Source: "adopt", Title: title, Detail: detail, Remedy: remedy})
	}
	if external {
		block("adopt-external-etcd", "etcd is external, and the operator upgrades control planes with stacked etcd alone",
			"before each control plane the operator needs the health of every member of etcd, and it reads that with kubeadm's certificates of a stacked member",
			"upgrade this cluster with kubeadm; check, status, watch and backup create work without the operator")
	}
	if slices.ContainsFunc(versions, func(s string) bool { other, err := version.Parse(s); return err != nil || !other.Equal(v) }) {
		block("adopt-mixed-versions", "an upgrade is in progress or unfinished: the API server that answered has "+v.String(), "kubeadm-config and API servers have "+words.And(versions),
			"let it end: `kubeadm upgrade apply` on the first control plane, and `kubeadm upgrade node` on the other machines")
	}
	var older, unlisted, absent, unready []string
	listed := map[string]bool{}
	for _, m := range o.inventory.Machines {
		listed[m.Name] = true
	}
	for _, n := range nodes {
		if k, err := version.Parse(n.Kubernetes); err != nil || !k.Equal(v) {
			older = append(older, n.Name)
		}
		if !listed[n.Name] {
			unlisted = append(unlisted, n.Name)
		}
		if n.State != plan.NodeReady {
			unready = append(unready, n.Name)
		}
		delete(listed, n.Name)
	}
	for name := range listed {
		absent = append(absent, name)
	}
	slices.Sort(absent)
	if len(older) > 0 {
		block("adopt-kubelets", "not all kubelets run Kubernetes "+v.String()+" of the API server", "others: "+words.And(older), "complete the upgrade first: `kubeadm upgrade node` on each of these machines, and the new kubelet")
	}
	if len(unready) > 0 {
		block("adopt-nodes", words.Count(len(unready), "node")+" not Ready", words.And(unready), "repair them first: a pod on each machine installs the agent")
	}
	if len(unlisted)+len(absent) > 0 {
		var detail []string
		if len(unlisted) > 0 {
			detail = append(detail, "not in the configuration: "+words.And(unlisted))
		}
		if len(absent) > 0 {
			detail = append(detail, "no nodes: "+words.And(absent))
		}
		block("adopt-inventory", "the machines of "+workspace.ConfigFile+" are not the nodes of the cluster", words.And(detail), "correct provider.machines.machines there")
	}
	return found
}

// hardeningEffect lists the policies beyond those for our own accounts.
func (o *operatorRun) hardeningEffect() string {
	list := o.config.Provider.Section.List(machines.HardeningList)
	if len(list) == 0 {
		return ""
	}
	return ", and the policies " + words.And(list)
}

// sign reads what machines install for the running version: what the configuration has, otherwise what the
// release has. The key of the workspace signs it, if there is one.
func (o *operatorRun) sign(ctx context.Context) error {
	v, err := version.Parse(o.target.Kubernetes)
	if err != nil {
		return err
	}
	p, err := o.e.provider(ctx, o.config, o.state)
	if err != nil {
		return err
	}
	l, err := p.Components(ctx, v)
	if err != nil {
		return err
	}
	o.components = cluster.Components{Name: cluster.ComponentsName(l.List), Kubernetes: v.String(), List: l.List, Statement: l.Statement}
	o.target.Components = o.components.Name
	return nil
}

// vouching is the cloud of an adopted cluster and of enrolled machines. It adds the components of the releases, and the statements of
// the workspace's key.
type vouching struct {
	Cloud
	uid      string // of the cluster
	ws       *workspace.Workspace
	releases func(ctx context.Context, location string, keys []release.Key) (release.Source, error)
}

// vouched returns open, with vouching where machines are a list.
func vouched(open func(context.Context, *workspace.Config, *workspace.State) (Cloud, error), e *Engine) func(context.Context, *workspace.Config, *workspace.State) (Cloud, error) {
	return func(ctx context.Context, c *workspace.Config, s *workspace.State) (Cloud, error) {
		p, err := open(ctx, c, s)
		if err != nil || !s.Adopted() && !s.Enrolled() {
			return p, err
		}
		return vouching{p, s.Infrastructure.UID, e.ws, e.releases}, nil
	}
}

// Components implements [Cloud]. Before there is a key, the components have no statement.
func (c vouching) Components(ctx context.Context, v version.Version) (component.Signed, error) {
	l, err := c.Cloud.Components(ctx, v)
	if errors.Is(err, cloud.ErrNotFound) {
		var unpinned error
		if l.List, unpinned = c.ofRelease(ctx, v); unpinned == nil {
			err = nil
		} else {
			err = fmt.Errorf("%w, and %w", err, unpinned)
		}
	}
	if err != nil {
		return component.Signed{}, err
	}
	key, err := c.ws.SigningKeyIfAny()
	if err != nil || key == nil {
		return l, err
	}
	l.Statement, err = key.Vouch(release.Vouched{v.String(): {runtime.GOARCH: l.List.Digest()}})
	return l, err
}

// Machines implements [Cloud]: each has the ID that its Node has.
func (c vouching) Machines(ctx context.Context) ([]cluster.CloudMachine, error) {
	all, err := c.Cloud.Machines(ctx)
	for i := range all {
		m := &all[i]
		m.Group, m.GroupName = machines.GroupID(c.uid, m.Role), string(m.Role)
		m.ProviderID = cmp.Or(m.ProviderID, machines.ProviderID(c.uid, m.Name))
	}
	return all, err
}

// Groups implements [Cloud].
func (c vouching) Groups(ctx context.Context) ([]cloud.Group, error) {
	all, err := c.Cloud.Groups(ctx)
	for i := range all {
		all[i].ID = machines.GroupID(c.uid, all[i].Role)
	}
	return all, err
}

// Describe implements [Cloud]: the versions are those of the configuration, and those that the release pins.
func (c vouching) Describe(ctx context.Context) (cluster.ProviderInfo, error) {
	about, err := c.Cloud.Describe(ctx)
	if err != nil {
		return about, err
	}
	rel, err := c.release(ctx)
	if err != nil {
		return about, err
	}
	for _, k := range rel.Kubernetes {
		if k.Unpinned == "" {
			about.Kubernetes = append(about.Kubernetes, k.Version)
		}
	}
	return about, nil
}

// release returns the data of the program's own release.
func (c vouching) release(ctx context.Context) (*release.Release, error) {
	source, err := c.releases(ctx, "", nil)
	if err != nil {
		return nil, err
	}
	own, err := version.Parse(version.Release)
	if err != nil {
		return nil, fmt.Errorf("read own version: %w", err)
	}
	return source.Release(ctx, own)
}

// ofRelease returns the programs of Kubernetes that this release pins. What else it pins for a version belongs
// to the owner of the machines.
func (c vouching) ofRelease(ctx context.Context, v version.Version) (component.List, error) {
	rel, err := c.release(ctx)
	if err != nil {
		return nil, err
	}
	all, err := rel.Components(v, runtime.GOARCH)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(x component.Component) bool { return !machines.IsProgram(x.Name) }), nil
}

func (o *operatorRun) steps(k Adopter) []plan.Step {
	glance := func(look func(ctx context.Context) (bool, error)) func(context.Context) (bool, error) {
		return func(ctx context.Context) (bool, error) {
			return o.glance(ctx, func(ctx context.Context, _ Cluster) (bool, error) { return look(ctx) })
		}
	}
	do := func(op string, f func(ctx context.Context) error) func(context.Context, *plan.Reporter) error {
		return func(ctx context.Context, r *plan.Reporter) error {
			return o.inCluster(ctx, r, op, func(ctx context.Context, _ Cluster) error { return f(ctx) })
		}
	}
	n := words.Count(len(o.inventory.Machines), "machine")
	components := o.componentsStep()
	published := components.Done
	components.Done = func(ctx context.Context) (bool, error) {
		if o.components.Statement == "" { // there is no key yet
			return false, nil
		}
		return published(ctx)
	}
	return []plan.Step{
		{
			ID: StepSigningKey, Title: "Make the key that signs components",
			Effect: workspace.SigningKeyFile + " has the private key; machines install nothing that it has not signed",
			Done:   func(context.Context) (bool, error) { return o.e.ws.Has(workspace.SigningKeyFile), nil },
			Run: func(ctx context.Context, _ *plan.Reporter) error {
				if _, err := o.e.ws.SigningKey(); err != nil {
					return err
				}
				return o.sign(ctx)
			},
		},
		{
			ID: StepInventory, Title: "Write the inventory of machines",
			Effect: "ConfigMap " + machines.InventoryConfigMap + " lists " + n + "; Nodes without a providerID get one",
			Done:   glance(func(ctx context.Context) (bool, error) { return k.HasInventory(ctx, o.inventory) }),
			Run:    do("write the inventory", func(ctx context.Context) error { return k.SetInventory(ctx, o.inventory) }),
		},
		components,
		{
			ID: StepMachines, Title: "Install the agent on each machine",
			Effect: "a pod with root rights runs once on " + n + ", from image " + o.image,
			Done: glance(func(ctx context.Context) (bool, error) {
				key, err := o.e.ws.SigningKeyIfAny()
				if err != nil || key == nil {
					return false, err
				}
				lack, err := k.LackAgents(ctx, o.release.Version.String(), key.PEM())
				return err == nil && len(lack) == 0, err
			}),
			Run: func(ctx context.Context, r *plan.Reporter) error {
				key, err := o.e.ws.SigningKey()
				if err != nil {
					return err
				}
				from, err := o.e.ws.Registry(o.pulls)
				if err != nil {
					return err
				}
				r.Hide([]byte(from.Password))
				if err := o.publishRegistry(ctx, r, o.cluster, from, false); err != nil {
					return err
				}
				ctx, cancel := context.WithTimeout(ctx, o.e.limits.chart)
				defer cancel()
				return o.clusterError("install the agents", k.InstallAgents(ctx, o.image, o.release.Version.String(), key.PEM(), o.secrets, func(text string, ready, wanted int64) {
					r.Part("agents", plan.StateRunning, text, ready, wanted)
				}))
			},
		},
		{ID: plan.StepCharts, Title: "Install the operator", Effect: o.chartsEffect() + o.hardeningEffect(), Done: o.chartsDone, Run: o.installCharts},
		{
			ID: check.StepTarget, Title: "Set the target of all nodes",
			Effect: "NodeVersion " + nodeVersionName + " is set to Kubernetes " + o.target.Kubernetes + ", which runs; all groups are upgraded in place",
			Done: glance(func(ctx context.Context) (bool, error) {
				if !o.e.ws.Managed() {
					return false, nil
				}
				got, err := o.cluster.NodeTarget(ctx)
				if err != nil || got.Components == "" {
					return false, err
				}
				return k.HasGroups(ctx, o.inventory)
			}),
			Run: do("set the target", func(ctx context.Context) error {
				if err := k.SetGroups(ctx, o.inventory, o.components.Name); err != nil {
					return err
				}
				if got, err := o.cluster.NodeTarget(ctx); errors.Is(err, cluster.ErrAbsent) || err == nil && got.Components == "" {
					if err := o.cluster.SetNodeTarget(ctx, o.target); err != nil {
						return err
					}
				} else if err != nil {
					return err
				}
				return o.e.ws.SetManaged(true)
			}),
		},
		{
			ID: plan.StepRollout, Title: "Wait for the operator", Effect: "it reports all nodes at the target",
			Done: func(ctx context.Context) (bool, error) {
				if !o.e.ws.Managed() {
					return false, nil
				}
				return o.rolloutDone(ctx, o.target)
			},
			Run: func(ctx context.Context, r *plan.Reporter) error { return o.waitRollout(ctx, r, o.target) },
		},
	}
}

// PlanRemoveOperator returns the plan to take everything of ours out of an adopted cluster. Nodes, Kubernetes
// and workloads stay. The files of the workspace are not part of it.
func (e *Engine) PlanRemoveOperator(ctx context.Context) (*plan.Plan, error) {
	run, k, err := e.operatorRun(ctx)
	if err != nil {
		return nil, err
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbAdopt, now), Verb: plan.VerbAdopt, Cluster: run.config.Name, NotAttested: true, Created: now.UTC()}
	p.Steps = []plan.Step{
		{
			ID: StepRemoveTarget, Title: "End the operator's work", Effect: "NodeVersion is deleted, so no node is upgraded any more",
			Run: func(ctx context.Context, r *plan.Reporter) error {
				return run.inCluster(ctx, r, "end the operator's work", func(ctx context.Context, _ Cluster) error { return k.RemoveTarget(ctx) })
			},
		},
		{
			ID: StepRemoveCharts, Title: "Remove the operator", Effect: "our charts are uninstalled; Plans and what they need stay",
			Run: func(ctx context.Context, r *plan.Reporter) error {
				charts, err := run.charts("", func() (string, error) { return "", errors.New("an adopted cluster has no software of a cloud of ours") })
				if err != nil {
					return err
				}
				return run.inCluster(ctx, r, "remove the operator", func(ctx context.Context, c Cluster) error {
					for _, x := range slices.Backward(charts) {
						if err := c.RevertChart(ctx, x, 0); err != nil {
							return err
						}
					}
					return nil
				})
			},
		},
		{
			ID: StepRemoveAgents, Title: "Remove the agent from each machine", Effect: "a pod with root rights runs once on each machine, and removes the agent",
			Run: func(ctx context.Context, r *plan.Reporter) error {
				ctx, cancel := context.WithTimeout(ctx, e.limits.chart)
				defer cancel()
				left, err := k.RemoveAgents(ctx, run.image, run.secrets, func(text string, ready, wanted int64) { r.Part("agents", plan.StateRunning, text, ready, wanted) })
				if err != nil {
					return run.clusterError("remove the agents", err)
				}
				for node, what := range left {
					r.Log("agents", node, "info", "stays on the machine: "+what)
				}
				return nil
			},
		},
		{
			ID: StepRemoveData, Title: "Remove what else is ours", Effect: "our kinds, ConfigMaps, namespace, and labels and annotations of Nodes are deleted",
			Run: func(ctx context.Context, r *plan.Reporter) error {
				if err := run.inCluster(ctx, r, "remove our data", func(ctx context.Context, _ Cluster) error { return k.RemoveData(ctx) }); err != nil {
					return err
				}
				return e.ws.SetManaged(false)
			},
		},
	}
	p.Notes = []string{"Machines whose Kubernetes was upgraded keep its programs in /usr/local/bin, and the kubelet's drop-in that starts them. Provider IDs of Nodes stay, because Kubernetes does not allow to change them."}
	p.End.Done = fmt.Sprintf("cluster %s has nothing of constellation any more", p.Cluster)
	p.End.Command = e.command("adopt") + " --undo"
	return p, nil
}
