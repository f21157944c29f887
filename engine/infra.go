package engine

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/enrol"
	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// IDs of the steps of `infra` that change the workspace.
const (
	StepRecordUID   = "record-uid"
	StepWriteState  = "write-state"
	StepRemoveState = "remove-state"
)

// InfraReport is the infrastructure of a cluster, as `infra plan` reports it.
type InfraReport struct {
	Schema   string    `json:"schema"`
	Time     time.Time `json:"time"`
	CLI      string    `json:"cli"`
	Cluster  string    `json:"cluster"`
	Provider string    `json:"provider"`
	// Cloud names where the objects are: "project demo".
	Cloud string `json:"cloud"`
	// UID marks the objects; empty: create chooses it.
	UID string `json:"uid,omitempty"`
	// Objects are in the order in which create makes them.
	Objects  []infra.Object `json:"objects"`
	Findings []plan.Finding `json:"findings"`
	// Notes are sentences about what create does not do.
	Notes []string `json:"notes,omitempty"`
}

// Blocked returns the findings that stand in the way of create.
func (r *InfraReport) Blocked() (out []plan.Finding) {
	for _, f := range r.Findings {
		if f.Severity == plan.Block {
			out = append(out, f)
		}
	}
	return out
}

// infraRun is the infrastructure of the workspace.
type infraRun struct {
	e        *Engine
	config   *workspace.Config
	state    *workspace.State // nil before create
	complete bool             // the state file has it
	cloud    infra.Cloud
	note     string // of the vendor
}

// vendor returns the vendor of a configuration.
func (e *Engine) vendor(c *workspace.Config) (infra.Vendor, providers.Provider, error) {
	p, ok := providers.Named(c.Provider.Name)
	v, made := e.infra[p.Name]
	if !ok || !made {
		return v, p, &plan.Error{
			Op: "use the infrastructure of provider " + c.Provider.Name, Err: errors.New("this program makes none of it"), Exit: plan.ExitUsage,
			Remedy: c.Advice().Create + "; `infra` is for provider " + words.Or(slices.Sorted(maps.Keys(e.infra))),
		}
	}
	return v, p, nil
}

// openInfra opens the infrastructure of the workspace. fresh returns the state of one that was not begun; nil: there is none.
func (e *Engine) openInfra(ctx context.Context, c *workspace.Config, fresh func(section.Values) (*workspace.State, error)) (*infraRun, error) {
	v, p, err := e.vendor(c)
	if err != nil {
		return nil, err
	}
	r := &infraRun{e: e, config: c, note: v.Note}
	r.state, r.complete, err = e.ws.Infra()
	switch {
	case errors.Is(err, workspace.ErrAbsent) && fresh != nil:
		values := section.Values{}
		for _, f := range p.State {
			if x, ok := c.Provider.Section[f.Name]; ok {
				values[f.Name] = x
			}
		}
		r.state, err = fresh(values)
	case errors.Is(err, workspace.ErrAbsent):
		err = nil
	case err != nil:
	case r.state.Emulated():
		err = &plan.Error{Op: "use the infrastructure of " + e.ws.Path(workspace.StateFile), Err: errors.New("its machines are those of an emulator, which has made them"), Exit: plan.ExitUsage, Remedy: "use another folder with -C for machines of " + c.Advice().Cloud}
	case fresh == nil: // it is read or deleted; a lost master secret does not stand in the way
		err = e.ws.SameProvider(c, r.state)
	default:
		err = e.ws.Belong(c, r.state)
	}
	if err != nil {
		return nil, err
	}
	q := infra.Request{Cluster: c.Name, Config: c.Provider.Section, Image: c.Image, PodCIDR: c.PodCIDR, ServiceCIDR: c.ServiceCIDR}
	for _, name := range slices.Sorted(maps.Keys(c.NodeGroups)) {
		g := c.NodeGroups[name]
		q.Groups = append(q.Groups, infra.Group{Name: name, Role: g.Role, Count: g.Count})
	}
	if r.state != nil {
		sum := sha256.Sum256(r.state.Infrastructure.InitSecret)
		q.UID, q.InitSecretHash, q.Known = r.state.Infrastructure.UID, sum[:], r.state.Infrastructure.Section
	}
	first, err := e.firstBoot(v, p, c)
	if err != nil {
		return nil, err
	}
	q.UserData, q.BootScript = first.CloudInit, first.Script
	r.cloud, err = v.Open(ctx, q)
	return r, err
}

// firstBoot returns what prepares machines with a stock image at their first boot: the same that `machine add` brings to a
// machine. It is empty for other images, and where only parts of a configuration are known.
func (e *Engine) firstBoot(v infra.Vendor, p providers.Provider, c *workspace.Config) (enrol.FirstBoot, error) {
	if v.Stock == nil || c.Attestation.TPM2 == nil {
		return enrol.FirstBoot{}, nil
	}
	stock, ok := v.Stock(c.Provider.Section, c.Image)
	if !ok || stock.Programs == "" { // without an address, the plan is blocked
		return enrol.FirstBoot{}, nil
	}
	release := c.Services.String()
	from := enrol.Sources{Address: stock.Programs, Programs: map[string]enrol.Programs{}, Reread: stock.Reread}
	var missing error
	for _, arch := range enrol.Architectures() {
		programs, err := e.programs("", release, arch)
		if err != nil {
			missing = cmp.Or(missing, err)
			continue
		}
		from.Programs[arch] = programs
	}
	if len(from.Programs) == 0 {
		return enrol.FirstBoot{}, &plan.Error{
			Op: "prepare the first boot of machines", Err: missing, Exit: plan.ExitUsage,
			Remedy: fmt.Sprintf("unpack the archive of the release for linux, such as constellation_%s_linux_amd64.tar.gz, and put its bootstrapper and agent into the folder releases/%s/linux_amd64 beside this program", strings.TrimPrefix(release, "v"), release),
		}
	}
	spec := enrol.Spec{Cluster: c.Name, ClusterName: c.Name, Release: release, Proxy: stock.Proxy, Files: []enrol.File{
		{Path: enrol.EnvironmentFile, Mode: 0o644, Data: []byte("CONSTELLATION_PROVIDER=" + p.Name + "\n")},
		{Path: "/etc/constellation/attestation-roots.pem", Mode: 0o644, Data: []byte(c.Attestation.TPM2.TrustRoots)},
		{Path: "/usr/lib/constellation/peers.json", Mode: 0o644, Data: []byte("[]\n")},
		// The unit of the kubelet names the folder, and a kubelet does not start without it.
		{Path: "/usr/lib/constellation/kubelet.conf.d/00-stock.conf", Mode: 0o644, Data: []byte("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n")},
	}}
	for _, f := range stock.Files {
		spec.Files = append(spec.Files, enrol.File{Path: f.Path, Mode: 0o644, Data: []byte(f.Text)})
	}
	if stock.Proxy != "" {
		spec.Files = append(spec.Files, enrol.Proxy(stock.Proxy, append(slices.Clone(stock.Direct), c.PodCIDR.String(), c.ServiceCIDR.String()))...)
	}
	spec, err := enrol.StockNode(spec, &from)
	if err != nil {
		return enrol.FirstBoot{}, err
	}
	return enrol.NewFirstBoot(spec, from)
}

// notes are what people must know before they create machines.
func (r *infraRun) notes() (out []string) {
	if r.note != "" {
		out = append(out, r.note)
	}
	return append(out, "The cloud charges for machines, disks and the address until `constellation infra terminate` has deleted them.")
}

// Infrastructure reports the infrastructure of the workspace's configuration. It changes nothing.
func (e *Engine) Infrastructure(ctx context.Context) (InfraReport, error) {
	c, err := e.ws.UnfilledConfig()
	if err != nil {
		return InfraReport{}, err
	}
	r, err := e.openInfra(ctx, c, nil)
	if err != nil {
		return InfraReport{}, err
	}
	out := InfraReport{Schema: plan.Schema, Time: e.now().UTC(), CLI: version.Release, Cluster: c.Name, Provider: c.Provider.Name, Cloud: c.Advice().Cloud, Notes: r.notes()}
	if r.state != nil {
		out.UID = r.state.Infrastructure.UID
	}
	out.Objects, out.Findings, err = r.cloud.Look(infra.Hasty(ctx))
	if out.Findings == nil {
		out.Findings = []plan.Finding{}
	}
	return out, err
}

// InfraRoles returns the least roles of the provider of the configuration. It asks no cloud.
func (e *Engine) InfraRoles() ([]infra.Role, error) {
	c, err := workspace.PartOfConfig(e.ws, "provider")
	if err != nil {
		return nil, err
	}
	if c.Provider.Name == "" { // without a configuration, of the only vendor that there is
		for _, name := range slices.Sorted(maps.Keys(e.infra)) {
			c.Provider.Name = name
		}
	}
	v, _, err := e.vendor(c)
	if err != nil {
		return nil, err
	}
	return v.Roles(c.Provider.Section), nil
}

// PlanInfraCreate returns the plan to make what the cluster needs of its cloud. It changes nothing.
func (e *Engine) PlanInfraCreate(ctx context.Context) (*plan.Plan, error) {
	c, err := e.ws.UnfilledConfig()
	if err != nil {
		return nil, err
	}
	r, err := e.openInfra(ctx, c, func(values section.Values) (*workspace.State, error) { return e.ws.NewInfra(c, values) })
	if err != nil {
		return nil, err
	}
	ctx = infra.Hasty(ctx)
	objects, findings, err := r.cloud.Look(ctx)
	if err != nil {
		return nil, err
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbInfraCreate, now), Verb: plan.VerbInfraCreate, Cluster: c.Name, Nodes: c.Counts(), Findings: findings, Created: now.UTC(), Notes: r.notes()}
	p.End.Done = "the infrastructure of cluster " + c.Name + " exists"
	p.End.Nothing = p.End.Done + " already: nothing to do"
	p.Files = []plan.File{{Path: e.ws.Path(workspace.StateFile), Mode: "0600", Secret: true, Note: "UID, addresses and init secret: keep it, terminate needs it"}}
	if len(p.Blocked()) > 0 {
		return p, nil
	}
	if !r.complete {
		p.Steps = append(p.Steps, r.recordUID())
	}
	made := infra.Create(r.cloud, objects)
	steps := append(made, r.writeState(p))
	all := !slices.ContainsFunc(objects, func(o infra.Object) bool { return !o.There() })
	for n := range steps {
		if s := &steps[n]; all && !s.Finished && n >= len(made)-1 { // machines and state, of which the objects tell nothing
			if s.Finished, err = s.Done(ctx); err != nil {
				return nil, err
			}
		}
	}
	p.Steps = append(p.Steps, steps...)
	return p, nil
}

// recordUID is the step before the first object: every later object can be found again by its UID.
func (r *infraRun) recordUID() plan.Step {
	ws := r.e.ws
	return plan.Step{
		ID: StepRecordUID, Title: "Record UID and init secret", Effect: fmt.Sprintf("%s has the UID %s, by which an interrupted create continues", workspace.InfraFile, r.state.Infrastructure.UID),
		Finished: ws.Has(workspace.InfraFile),
		Done:     func(context.Context) (bool, error) { return ws.Has(workspace.InfraFile), nil },
		Run: func(_ context.Context, to *plan.Reporter) error {
			to.Hide(r.state.Infrastructure.InitSecret)
			return ws.BeginInfra(r.state)
		},
	}
}

// writeState is the step after the last object.
func (r *infraRun) writeState(p *plan.Plan) plan.Step {
	ws := r.e.ws
	wanted := func(ctx context.Context) (*workspace.State, error) {
		o, err := r.cloud.Outcome(ctx)
		if err != nil {
			return nil, err
		}
		have, _, err := ws.Infra() // init may have added to it
		if err != nil {
			return nil, err
		}
		return have.WithBalancer(o.Host, infra.APIPort, infra.InitPort, r.config, workspace.Infrastructure{NodeCIDR: o.NodeCIDR, Section: o.Section}), nil
	}
	return plan.Step{
		ID: StepWriteState, Title: "Write " + workspace.StateFile, Effect: "it has the UID, the addresses of the load balancer and the init secret",
		Done: func(ctx context.Context) (bool, error) {
			have, err := ws.State()
			if errors.Is(err, workspace.ErrAbsent) {
				return false, nil
			}
			if err != nil {
				return false, err
			}
			want, err := wanted(ctx)
			return err == nil && have.SameInfra(want), err
		},
		Run: func(ctx context.Context, to *plan.Reporter) error {
			want, err := wanted(ctx)
			if err != nil {
				return err
			}
			to.Hide(want.Infrastructure.InitSecret)
			if err := ws.CompleteInfra(want); err != nil {
				return err
			}
			p.End.Done += ", its load balancer is " + want.Infrastructure.InClusterEndpoint
			p.End.Next = []string{r.e.command("init")}
			if _, err := ws.Config(); err != nil { // registers have no values yet
				p.End.Next = slices.Insert(p.End.Next, 0, r.e.command("config measure --write"))
			}
			return nil
		},
	}
}

// PlanInfraTerminate returns the plan to delete all that bears the UID of the workspace's infrastructure. It changes
// nothing, and waits for earlier requests that are unfinished.
func (e *Engine) PlanInfraTerminate(ctx context.Context) (*plan.Plan, error) {
	c, err := workspace.PartOfConfig(e.ws, "name", "provider")
	if err != nil {
		return nil, err
	}
	s, _, err := e.ws.Infra()
	if errors.Is(err, workspace.ErrAbsent) {
		return nil, &plan.Error{
			Op: "there is no infrastructure to delete: " + e.ws.Dir() + " has neither " + workspace.StateFile + " nor " + workspace.InfraFile, Exit: plan.ExitNothing,
		}
	}
	if err != nil {
		return nil, err
	}
	if c.Provider.Name == "" { // the configuration is lost; the state has what is needed
		c.Name, c.Provider = s.Infrastructure.Name, workspace.ProviderConfig{Name: s.Infrastructure.Provider, Section: s.Infrastructure.Section}
	}
	r, err := e.openInfra(ctx, c, nil)
	if err != nil {
		return nil, err
	}
	objects, err := infra.Left(infra.Hasty(ctx), r.cloud)
	if err != nil {
		return nil, err
	}
	now := e.now()
	name, uid := s.Infrastructure.Name, s.Infrastructure.UID
	p := &plan.Plan{ID: newRunID(plan.VerbInfraTerminate, now), Verb: plan.VerbInfraTerminate, Cluster: name, Created: now.UTC()}
	p.Notes = []string{fmt.Sprintf("%s of cluster %s, with machines and their disks. Nothing restores them.", words.Count(len(objects), "object")+" "+words.Verb(len(objects), "are")+" deleted", name)}
	if e.ws.Has(workspace.KubeconfigFile) {
		p.Notes = append(p.Notes, "A cluster runs on these machines. Back it up first if you need its content: `constellation backup create`.")
	}
	p.End.Done = fmt.Sprintf("nothing of cluster %s is left in %s: no object bears the UID %s", name, c.Advice().Cloud, uid)
	p.Steps = append(infra.Terminate(r.cloud, uid, objects), plan.Step{
		ID: StepRemoveState, Title: "Remove " + workspace.StateFile, Effect: "the workspace describes no machines any more; configuration, kubeconfig and master secret stay",
		Run: func(context.Context, *plan.Reporter) error { return e.ws.ForgetInfra() },
	})
	return p, nil
}
