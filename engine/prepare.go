package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/words"
)

// StepTargetFile is the ID of the step of `upgrade prepare` that init does not have.
const StepTargetFile = "target-file"

// TargetFile holds the target that was prepared, as an object for kubectl and GitOps.
const TargetFile = "constellation-nodeversion.yaml"

// PrepareRequest selects what a prepare publishes.
type PrepareRequest struct {
	// Request names the goal, of which the next hop is prepared. Without one it is what
	// the configuration asks for; if nothing of that is newer than what runs, the newest
	// that can be reached. WriteConfig is not looked at.
	check.Request
	// Acknowledge are the IDs of findings that the user accepts: of warnings, and of what
	// blocks for as long as it is not acknowledged.
	Acknowledge []string
}

// PlanPrepare checks the next hop as Check does, and returns the plan to publish what
// its nodes need: what they install and what they must prove. Nothing is replaced by it:
// what sets the target is the user's business, and the plan's result says how. It changes
// nothing yet. emit gets the events of the check; calls do not overlap.
//
// Findings that forbid the plan are in it, and it has no steps if there is no hop for
// them. The error has ExitNothing if there is nothing to prepare, and ExitUsage if
// workspace or request are at fault.
func (e *Engine) PlanPrepare(ctx context.Context, r PrepareRequest, emit func(plan.Event)) (*plan.Plan, error) {
	r.WriteConfig = false
	if err := e.ws.OnMachines(plan.VerbPrepare); err != nil {
		return nil, err
	}
	c := &check.Run{Deps: e.checkDeps(), Request: r.Request, Prepares: true, Acknowledged: r.Acknowledge}
	if err := c.Begin(); err != nil {
		return nil, err
	}
	if err := c.Look(ctx); err != nil {
		return nil, err
	}
	if c.Down != nil {
		return nil, c.Down
	}
	if c.Set() {
		return nil, &plan.Error{
			Err:    fmt.Errorf("nothing to prepare: the target of all nodes is %s already", c.Now.Target),
			Remedy: "`constellation status` shows how far the rollout is", Exit: plan.ExitNothing,
		}
	}
	if err := c.Decide(ctx); err != nil {
		return nil, err
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbPrepare, now), Verb: plan.VerbPrepare, Cluster: c.Config.Name, Simulated: e.simulated(), NotAttested: e.notAttested(), From: c.Out.Current, Created: now.UTC()}
	p.End.Command = e.command(string(plan.VerbPrepare)) + r.flags()
	if c.Hop == nil {
		c.Sort()
		p.To, p.Findings = c.Out.Goal, c.Out.Findings
		if len(p.Blocked()) > 0 {
			return p, nil
		}
		return nil, c.Nothing()
	}
	if err := c.Foresee(ctx, emit); err != nil {
		return nil, err
	}
	list := c.JudgePrepare(ctx)
	c.VouchInUse(ctx, list)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c.Settle()
	c.Sort()
	p.To, p.Findings = c.Hop.To, c.Out.Findings
	if err := c.Unknown(); err != nil {
		return nil, err
	}
	if len(p.Blocked()) > 0 {
		return p, nil
	}
	run, err := e.prepareRun(c, list)
	if err != nil {
		return nil, err
	}
	return p, run.plan(ctx, p)
}

// flags are the arguments that make the same request, with a leading space each.
func (r PrepareRequest) flags() string {
	var b strings.Builder
	add := func(flag, value string) { b.WriteString(" --" + flag + " " + check.ShellQuote(value)) }
	if !r.Release.IsZero() {
		add("to", r.Release.String())
	}
	if !r.Kubernetes.IsZero() {
		add("kubernetes", r.Kubernetes.String())
	}
	if r.Feed != "" {
		add("feed", r.Feed)
	}
	for _, k := range r.FeedKeys {
		add("feed-key", k)
	}
	if r.NoDryRun {
		b.WriteString(" --no-dry-run")
	}
	for _, a := range r.Acknowledge {
		add("acknowledge", a)
	}
	return b.String()
}

// prepareRun is what the steps of one plan share. Steps run one after the other.
type prepareRun struct {
	*clusterRun
	hop      compat.Hop
	now      compat.Running
	target   cluster.NodeTarget
	demanded string // of machines of the target's image
	changes  []plan.MeasurementChange
	images   *cloud.Catalogue
	weaker   bool // is acknowledged
	notes    []string
	hops     int
	patch    []byte // JSON
	file     []byte // YAML
}

func (e *Engine) prepareRun(c *check.Run, list cluster.Components) (*prepareRun, error) {
	demanded, err := check.AttestationJSON(c.Next, c.State)
	if err != nil {
		return nil, err
	}
	to := c.Hop.Planned()
	image := c.Image(to.Image)
	if image == nil {
		image = &cloud.Image{} // a cloud that selects no image
	}
	p := &prepareRun{
		clusterRun: &clusterRun{e: e, facts: &facts{config: c.Config, state: c.State, provider: c.Cloud}, components: list, inUse: c.InUse, enrols: c.Enrols},
		hop:        *c.Hop, now: c.Now, demanded: demanded, changes: c.MeasurementChanges(), images: c.Catalogue, hops: len(c.Path), notes: c.Out.Notes,
		weaker: slices.Contains(c.Acknowledged, check.RuleWeaker),
		target: cluster.NodeTarget{Image: image.Reference, ImageVersion: image.Version, Components: list.Name, Kubernetes: list.Kubernetes, Etcd: c.EtcdTag(), KeepWorkers: !c.Hop.ReplaceWorkers},
	}
	return p, p.write()
}

// nodeVersionSpec is the part of a NodeVersion that is set in one write.
type nodeVersionSpec struct {
	Image        string       `json:"image" yaml:"image"`
	ImageVersion string       `json:"imageVersion" yaml:"imageVersion"`
	Components   string       `json:"kubernetesComponentsReference" yaml:"kubernetesComponentsReference"`
	Kubernetes   string       `json:"kubernetesClusterVersion" yaml:"kubernetesClusterVersion"`
	Etcd         *string      `json:"etcdImageTag,omitempty" yaml:"etcdImageTag,omitempty"`
	Rollout      *rolloutSpec `json:"rollout,omitempty" yaml:"rollout,omitempty"`
}

type rolloutSpec struct {
	KeepWorkers bool `json:"keepWorkers" yaml:"keepWorkers"`
}

// write makes patch and file. Whether workers are kept is named if they are, or were
// until now.
func (p *prepareRun) write() (err error) {
	spec := nodeVersionSpec{Image: p.target.Image, ImageVersion: p.target.ImageVersion, Components: p.target.Components, Kubernetes: p.target.Kubernetes}
	if p.target.Etcd != "" || p.now.Target.Etcd != "" {
		spec.Etcd = &p.target.Etcd
	}
	if p.target.KeepWorkers || p.now.Target.KeepWorkers {
		spec.Rollout = &rolloutSpec{p.target.KeepWorkers}
	}
	if p.patch, err = json.Marshal(map[string]any{"spec": spec}); err != nil {
		return fmt.Errorf("marshal patch: %w", err)
	}
	object := struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string `yaml:"kind"`
		Metadata   struct {
			Name string `yaml:"name"`
		} `yaml:"metadata"`
		Spec nodeVersionSpec `yaml:"spec"`
	}{APIVersion: "update.edgeless.systems/v1alpha1", Kind: "NodeVersion", Spec: spec}
	object.Metadata.Name = nodeVersionName
	var b bytes.Buffer
	fmt.Fprintf(&b, "# The target that `constellation upgrade prepare` has prepared for cluster %s.\n", p.config.Name)
	b.WriteString("# kubectl patch nodeversion " + nodeVersionName + " --type merge --patch-file " + TargetFile + "\n")
	y := yaml.NewEncoder(&b)
	y.SetIndent(2)
	if err := y.Encode(object); err != nil {
		return fmt.Errorf("marshal %s: %w", TargetFile, err)
	}
	p.file = b.Bytes()
	return nil
}

// nodeVersionName is the name of the only NodeVersion of a cluster.
const nodeVersionName = "constellation-version"

// plan fills in a plan, which says what to do next with what was prepared.
func (p *prepareRun) plan(ctx context.Context, out *plan.Plan) error {
	what := p.target.String()
	out.End.Done = fmt.Sprintf("cluster %s is prepared for %s; nothing is replaced until the target is set", p.config.Name, what)
	out.End.Nothing = fmt.Sprintf("cluster %s was prepared for %s before: nothing to do until the target is set", p.config.Name, what)
	out.End.Next = []string{"kubectl patch nodeversion " + nodeVersionName + " --type merge -p " + check.ShellQuote(string(p.patch))}
	out.End.Patch = p.patch
	out.Notes = p.notes
	out.Files = []plan.File{{Path: p.e.ws.Path(TargetFile), Mode: "0644", Note: "the same target as an object, for GitOps"}}
	join, err := p.joinConfigSteps(ctx)
	if err != nil {
		return err
	}
	out.Steps = append(p.componentsSteps(), join...)
	if p.removesEtcdTag() {
		out.Notes = append(out.Notes, "ConfigMap kubeadm-config keeps etcd.local.imageTag "+p.now.Target.Etcd+", because control planes that join before the target is set need it. Remove it with "+
			"`kubectl -n kube-system edit configmap kubeadm-config` when you set the target: until then etcd stays at that version.")
	} else {
		out.Steps = append(out.Steps, p.etcdSteps()...)
	}
	out.Steps = append(out.Steps, plan.Step{
		ID:     StepTargetFile,
		Title:  "Write the target to a file",
		Effect: TargetFile + " sets " + what + p.workers(),
		Done: func(context.Context) (bool, error) {
			b, err := os.ReadFile(p.e.ws.Path(TargetFile))
			return err == nil && bytes.Equal(b, p.file), nil // an unreadable file is rewritten
		},
		Run: func(context.Context, *plan.Reporter) error { return p.e.ws.Write(TargetFile, p.file, 0o644) },
	})
	for i := range out.Steps {
		s := &out.Steps[i]
		done, err := s.Done(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.Finished = err == nil && done
	}
	return nil
}

func (p *prepareRun) workers() string {
	if p.target.KeepWorkers {
		return "; workers stay as they are (keepWorkers)"
	}
	return ""
}

// joinConfigSteps has joinConfigStep, unless machines join by kubeadm alone.
func (p *prepareRun) joinConfigSteps(ctx context.Context) ([]plan.Step, error) {
	if p.state.Adopted() {
		return nil, nil
	}
	s, err := p.joinConfigStep(ctx)
	return []plan.Step{s}, err
}

// joinConfigStep publishes what machines of the target's image must prove, beside what
// those of images that still run must.
func (p *prepareRun) joinConfigStep(ctx context.Context) (plan.Step, error) {
	machines := "machines"
	if v := p.target.ImageVersion; v != "" {
		machines = "machines of image " + v
	}
	effect := "ConfigMap join-config keeps its requirements for " + machines
	var details, names []string
	for _, m := range p.changes {
		names = append(names, fmt.Sprint(m.PCR))
		details = append(details, m.String())
	}
	if len(names) > 0 {
		effect = fmt.Sprintf("ConfigMap join-config also admits %s: PCR %s differ", machines, words.And(names))
		if len(names) == 1 {
			effect += "s"
		}
	}
	want, gone := p.generations(p.now.JoinConfig, p.imagesInUse(ctx, p.now.Nodes, p.now.Target))
	if ctx.Err() != nil {
		return plan.Step{}, ctx.Err()
	}
	for _, image := range slices.Sorted(maps.Keys(want.Generations)) {
		if image != p.target.ImageVersion {
			details = append(details, "machines of image "+image+" are admitted as before")
		}
	}
	for _, image := range gone {
		details = append(details, "machines of image "+image+" are not admitted any more: none runs it")
	}
	return plan.Step{
		ID: StepJoinConfig, Title: "Publish attestation requirements", Effect: effect, Details: details,
		Done: func(ctx context.Context) (bool, error) {
			return p.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
				have, err := k.JoinConfig(ctx)
				if err != nil {
					return false, err
				}
				inUse, err := p.readInUse(ctx, k)
				if err != nil {
					return false, err
				}
				want, _ := p.generations(have, inUse)
				return len(have.Generations) == 0 && len(want.Generations) == 1 && have.Attestation == want.Attestation ||
					have.Attestation == want.Attestation && maps.Equal(have.Generations, want.Generations), nil
			})
		},
		Run: func(ctx context.Context, r *plan.Reporter) error {
			return p.inCluster(ctx, r, "publish join configuration", func(ctx context.Context, k Cluster) error {
				inUse, err := p.readInUse(ctx, k)
				if err != nil {
					return err
				}
				return changeJoinConfig(ctx, k, func(have cluster.JoinConfig) (cluster.JoinConfig, error) {
					if have.Attestation == "" {
						return cluster.JoinConfig{}, fmt.Errorf("read join-config: %w", cluster.ErrAbsent)
					}
					lost, err := lostRegisters(have.Attestation, p.demanded)
					if err != nil {
						return cluster.JoinConfig{}, err
					}
					if len(lost) > 0 && !p.weaker {
						return cluster.JoinConfig{}, &plan.Error{
							Op: "publish join configuration", Err: fmt.Errorf("join-config changed after the plan was made, and %s would not be enforced any more", words.And(lost)),
							Remedy: "review the new plan: run the same command again", Exit: plan.ExitBlocked,
						}
					}
					want, _ := p.generations(have, inUse)
					if len(lost) > 0 {
						want.Weakened = weakened(have.Weakened, p.e.now(), p.target.ImageVersion, lost)
					}
					return want, nil
				})
			})
		},
	}, nil
}

// weakened adds a line to the record of what was weakened, of which the newest lines stay.
func weakened(record string, at time.Time, image string, lost []string) string {
	const most = 20
	lines := strings.FieldsFunc(record, func(r rune) bool { return r == '\n' })
	lines = append(lines, fmt.Sprintf("%s image %s: %s not enforced any more", at.UTC().Format(time.RFC3339), image, words.And(lost)))
	return strings.Join(lines[max(0, len(lines)-most):], "\n")
}

// lostRegisters names the registers that one demand enforces and another does not.
func lostRegisters(before, after string) (lost []string, err error) {
	var a, b cluster.Demand
	if err := json.Unmarshal([]byte(before), &a); err != nil {
		return nil, fmt.Errorf("read join-config: %w", err)
	}
	if err := json.Unmarshal([]byte(after), &b); err != nil {
		return nil, fmt.Errorf("read planned attestation: %w", err)
	}
	for _, i := range a.WeakenedBy(b) {
		lost = append(lost, fmt.Sprintf("PCR %d", i))
	}
	return lost, nil
}

// generations returns the new content of join-config, and the images that lose their
// generation: those that no machine runs and that are older than the target. Another console
// may have prepared a newer one. Nil for inUse means unknown.
func (p *prepareRun) generations(have cluster.JoinConfig, inUse map[string]bool) (want cluster.JoinConfig, gone []string) {
	want = have
	want.Generations = maps.Clone(have.Generations)
	if want.Generations == nil {
		want.Generations = map[string]string{}
	}
	if p.target.ImageVersion == "" {
		// All machines run what the cloud gives them, so there is one demand.
		want.Attestation, want.Generations = p.demanded, have.Generations
		return want, nil
	}
	// init, and programs before v1.1.0, know the newest demand alone.
	if have.Attestation != "" && !slices.Contains(slices.Collect(maps.Values(want.Generations)), have.Attestation) {
		want.Generations[p.now.Target.ImageVersion] = have.Attestation
	}
	want.Attestation, want.Generations[p.target.ImageVersion] = p.demanded, p.demanded
	for image := range want.Generations {
		if image != p.target.ImageVersion && inUse != nil && !inUse[image] && older(image, p.now.Target.ImageVersion) {
			delete(want.Generations, image)
			gone = append(gone, image)
		}
	}
	slices.Sort(gone)
	return want, gone
}

func older(image, than string) bool {
	a, err := version.Parse(image)
	b, err2 := version.Parse(than)
	return err == nil && err2 == nil && a.Less(b)
}

// readInUse is imagesInUse of the cluster's present state.
func (p *prepareRun) readInUse(ctx context.Context, k Cluster) (map[string]bool, error) {
	nodes, err := k.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	target, err := k.NodeTarget(ctx)
	if err != nil {
		return nil, err
	}
	all := make([]cluster.Node, len(nodes))
	for i, n := range nodes {
		all[i] = *n
	}
	return p.imagesInUse(ctx, all, target), nil
}

// imagesInUse returns the versions of the images that nodes, machines and groups have, and
// the one that nodes are brought to; nil if one of them does not tell.
func (p *prepareRun) imagesInUse(ctx context.Context, nodes []cluster.Node, target cluster.NodeTarget) map[string]bool {
	out := map[string]bool{target.ImageVersion: true}
	add := func(reference string) bool {
		if reference == target.Image {
			return true
		}
		v, err := p.images.Version(reference)
		out[v.String()] = err == nil
		return err == nil
	}
	for _, n := range nodes {
		if !add(n.Image) {
			return nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, p.e.limits.glance)
	defer cancel()
	groups, err := p.provider.Groups(ctx)
	if err != nil {
		return nil
	}
	machines, err := p.provider.Machines(ctx)
	if err != nil {
		return nil
	}
	for _, g := range groups {
		if !add(g.Image) {
			return nil
		}
	}
	for _, m := range machines {
		if m.Stage != plan.NodeGone && !add(m.Image) {
			return nil
		}
	}
	return out
}
