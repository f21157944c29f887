package engine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// StepTargetFile is the ID of the step of `upgrade prepare` that init does not have.
const StepTargetFile = "target-file"

// TargetFile holds the target that was prepared, as an object for kubectl and GitOps.
const TargetFile = "constellation-nodeversion.yaml"

// ruleOldest is the rule that a new minor of Kubernetes comes after the image.
const ruleOldest = "oldest-supports-kubernetes"

// acknowledgeable are the IDs of the findings that block until they are acknowledged by
// name. All others that block cannot be forced.
var acknowledgeable = []string{ruleWeaker, ruleOldest}

// PrepareRequest says what is to be prepared.
type PrepareRequest struct {
	// CheckRequest names the goal, of which the next hop is prepared. Without one it is what
	// the configuration asks for; if nothing of that is newer than what runs, the newest
	// that can be reached. WriteConfig is not looked at.
	CheckRequest
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
	c := &checkRun{e: e, request: r.CheckRequest, prepares: true, acknowledged: r.Acknowledge}
	if err := c.begin(); err != nil {
		return nil, err
	}
	if err := c.look(ctx); err != nil {
		return nil, err
	}
	if c.down != nil {
		return nil, c.down
	}
	if c.set() {
		return nil, &plan.Error{
			Err:    fmt.Errorf("nothing to prepare: image %s and Kubernetes %s are the target of all nodes already", c.now.Target.ImageVersion, c.now.Target.Kubernetes),
			Remedy: "`constellation status` shows how far the rollout is", Exit: plan.ExitNothing,
		}
	}
	if err := c.decide(ctx); err != nil {
		return nil, err
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbPrepare, now), Verb: plan.VerbPrepare, Cluster: c.config.Name, Simulated: e.simulated(), From: c.out.Current, Created: now.UTC()}
	p.End.Command = e.command(string(plan.VerbPrepare)) + r.flags()
	if c.hop == nil {
		c.sort()
		p.To, p.Findings = c.out.Goal, c.out.Findings
		if len(p.Blocked()) > 0 {
			return p, nil
		}
		return nil, c.nothing()
	}
	if err := c.foresee(ctx, emit); err != nil {
		return nil, err
	}
	list := c.judgePrepare(ctx)
	c.vouchInUse(ctx, list)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c.settle()
	c.sort()
	p.To, p.Findings = c.hop.To, c.out.Findings
	if err := c.unknown(); err != nil {
		return nil, err
	}
	if len(p.Blocked()) > 0 {
		return p, nil
	}
	run, err := c.prepareRun(list)
	if err != nil {
		return nil, err
	}
	return p, run.plan(ctx, p)
}

// flags are the arguments that make the same request, with a leading space each.
func (r PrepareRequest) flags() string {
	var b strings.Builder
	add := func(flag, value string) { b.WriteString(" --" + flag + " " + shellQuote(value)) }
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

// set reports whether what is asked for is the target of all nodes, and some of them are
// not there yet.
func (c *checkRun) set() bool {
	n, t := &c.now, c.now.Target
	image, err := version.Parse(t.ImageVersion)
	kubernetes, err2 := version.Parse(t.Kubernetes)
	if err != nil || err2 != nil {
		return false
	}
	reached := func(images, kubelets compat.Span) bool { return images.Is(image) && kubelets.Is(kubernetes) }
	if reached(n.ControlPlaneImage, n.ControlPlaneKubelet) && (t.KeepWorkers || n.WorkerKubelet.IsZero() || reached(n.WorkerImage, n.WorkerKubelet)) {
		return false
	}
	if c.asked() {
		r := c.request
		return (r.Release.IsZero() || r.Release.Equal(image)) && (r.Kubernetes.IsZero() || r.Kubernetes.Equal(kubernetes))
	}
	f := c.config
	_, newer := c.configuredHop()
	return !newer || f.Image.Equal(image) && f.Kubernetes.Equal(kubernetes) && f.KeepWorkers == t.KeepWorkers
}

// nothing says why there is nothing to prepare.
func (c *checkRun) nothing() error {
	e := &plan.Error{Err: errors.New("nothing to prepare: nothing that can be reached is newer than what runs"), Remedy: "`constellation upgrade check` says what there is", Exit: plan.ExitNothing}
	if c.there {
		e.Err = errors.New("nothing to prepare: what is asked for runs already")
	}
	return e
}

// choose decides which hop is prepared: without a goal, what the configuration asks for.
func (c *checkRun) choose() {
	if h, ok := c.configuredHop(); ok && !c.asked() {
		c.path, c.there, c.configured = []compat.Hop{h}, false, true
		return
	}
	c.join()
	if len(c.path) == 0 {
		return
	}
	// Workers that are as the control planes may be kept on request; those that were kept
	// by an earlier hop have waited long enough.
	h := &c.path[0]
	n := &c.now
	same := func(a, b compat.Span) bool { return a.Oldest.Equal(b.Oldest) && a.Newest.Equal(b.Newest) }
	behind := !same(n.WorkerImage, n.ControlPlaneImage) || !same(n.WorkerKubelet, n.ControlPlaneKubelet)
	if c.config.KeepWorkers && h.ReplaceControlPlanes && h.ReplaceWorkers && !behind {
		to := h.Planned()
		to.KeepWorkers = true
		against := slices.DeleteFunc(compat.Blocks(c.matrix.Check(h.CLI, c.now, to, c.offer)), func(r *compat.RuleResult) bool { return slices.Contains(c.acknowledged, r.Rule) })
		h.ReplaceWorkers = len(against) > 0
	}
}

// verb is what is done with the hop, flag how a finding is accepted by name.
func (c *checkRun) verb() string {
	if c.applies {
		return "upgrade"
	}
	return "prepare"
}

func (c *checkRun) flag() string {
	if c.applies {
		return "--ack"
	}
	return "--acknowledge"
}

// configuredHop is the hop to what the configuration asks for; false if nothing of that
// is newer than what runs.
func (c *checkRun) configuredHop() (compat.Hop, bool) {
	f, n := c.config, &c.now
	images := n.ControlPlaneImage.Add(n.WorkerImage.Oldest).Add(n.WorkerImage.Newest)
	if !n.Services.Newest.Less(f.Services) && !images.Newest.Less(f.Image) && !n.Kubernetes.Newest.Less(f.Kubernetes) {
		return compat.Hop{}, false
	}
	differ := func(image, kubelet compat.Span) bool { return !image.Is(f.Image) || !kubelet.Is(f.Kubernetes) }
	h := compat.Hop{
		Number: 1, CLI: f.Services, From: plan.Target{Release: n.Services.String(), Image: images.String(), Kubernetes: n.Kubernetes.String()},
		To:                   plan.Target{Release: f.Services.String(), Image: f.Image.String(), Kubernetes: f.Kubernetes.String()},
		ReplaceControlPlanes: differ(n.ControlPlaneImage, n.ControlPlaneKubelet),
	}
	h.ReplaceWorkers = !f.KeepWorkers && !n.WorkerKubelet.IsZero() && differ(n.WorkerImage, n.WorkerKubelet)
	if n.WorkerKubelet.IsZero() {
		h.ReplaceWorkers = !f.KeepWorkers
	}
	return h, true
}

// join makes one hop of the whole path if nothing but the order of image and Kubernetes
// stands against it, and that is acknowledged. If it is not, a note says that it could be.
func (c *checkRun) join() {
	if len(c.path) < 2 {
		return
	}
	first, last := c.path[0], c.path[len(c.path)-1]
	h := compat.Hop{Number: 1, CLI: first.CLI, From: first.From, To: last.To, ReplaceControlPlanes: true, ReplaceWorkers: last.ReplaceWorkers}
	found := compat.Blocks(c.matrix.Check(h.CLI, c.now, h.Planned(), c.offer))
	same := func(o compat.Hop) bool { return o.CLI.Equal(h.CLI) }
	if len(found) != 1 || found[0].Rule != ruleOldest || slices.ContainsFunc(c.path, func(o compat.Hop) bool { return !same(o) }) {
		return
	}
	if slices.Contains(c.acknowledged, ruleOldest) {
		c.path = []compat.Hop{h}
		return
	}
	c.out.Notes = append(c.out.Notes, fmt.Sprintf(
		"This is hop 1 of %d; %s again when its rollout has ended. `%s %s` %s all of them for one write, in which control planes of image %s run Kubernetes %s until they are replaced.",
		len(c.path), c.verb(), c.flag(), ruleOldest, c.verb()+"s", first.From.Image, last.To.Kubernetes))
}

// judgePrepare finds what stands against preparing the hop, and returns what its nodes
// install.
func (c *checkRun) judgePrepare(ctx context.Context) cluster.Components {
	to := c.hop.Planned()
	block := func(id, source, title, detail, remedy string) {
		c.find(plan.Finding{ID: id, Severity: plan.Block, Source: source, Title: title, Detail: detail, Remedy: remedy})
	}
	if !c.hop.CLI.Equal(c.cli) {
		block("cli", "release", fmt.Sprintf("the hop needs constellation %s, and this is %s", c.hop.CLI, c.cli), "", cmp.Or(c.hop.Get, c.matrix.Get(c.hop.CLI)))
	}
	if !c.applies && !c.now.Services.Is(to.Services) {
		block("services-first", "release", fmt.Sprintf("services %s run, and the hop needs those of release %s", c.now.Services, to.Services),
			"the operator and the join service in the cluster do the work, and those of another release may not know how",
			fmt.Sprintf("write microserviceVersion: %s into %s, with image and kubernetesVersion as they run, and bring the services with `constellation init`; then prepare again", to.Services, workspace.ConfigFile))
	}
	if c.now.Target.Image == "" {
		block("node-version", "versions", "the cluster has no NodeVersion constellation-version", "there is nothing to set the target in", "`constellation init` makes it")
	}
	if j := c.now.JoinConfig; j.TrustRoots != "" && strings.TrimSpace(j.TrustRoots) != strings.TrimSpace(c.config.Attestation.TPM2.TrustRoots) {
		c.find(plan.Finding{
			ID: "trust-roots", Field: "attestation.tpm2.trustRoots", Severity: plan.Warn, Source: "attestation", Title: "the trust roots of " + workspace.ConfigFile + " are not those of the cluster",
			Detail: "they say whose machines are trusted; preparing an upgrade leaves those of the cluster", Remedy: "write those of the cluster: `kubectl -n kube-system get configmap join-config -o jsonpath={.data.trustRoots}`",
		})
	}
	if c.silent != nil {
		name := c.config.Provider.Sandbox.Name
		err := cloudError("ask sandbox "+name, name, c.silent)
		c.drop("cloud-offers")
		block("cloud", "cloud", "the cloud does not say what it has", err.Error(), cmp.Or(plan.Remedy(err), "try again when it answers"))
		return cluster.Components{}
	}
	c.judgeRegisters(ctx, to.Image)
	if c.image(to.Image) == nil {
		// Only an image that stays can be unknown: the rules speak of new ones.
		block("image", "cloud", "the cloud has no image "+to.Image.String(), "", "choose one that it has: `constellation upgrade check`")
	}
	list, err := c.list(ctx, to.Kubernetes)
	switch {
	case errors.As(err, new(statementError)):
		f := plan.Finding{
			ID: "components-statement", Severity: plan.Block, Source: "release", Title: "the feed's statement over the components of Kubernetes " + to.Kubernetes.String() + " is not genuine",
			Detail: err.Error(), Remedy: "look at the feed with " + verifyCommand(c.location, c.keys) + ", and get it anew from its publisher: machines would refuse these components",
		}
		if !errors.Is(err, release.ErrUntrusted) && !errors.Is(err, release.ErrAltered) {
			f.Title, f.Remedy = "the feed's statement over the components of Kubernetes "+to.Kubernetes.String()+" cannot be read", "remove the cause and try again; machines install nothing without the statement"
			if errors.Is(err, release.ErrUnreachable) {
				f.Remedy = "try again when the feed answers; machines install nothing without the statement"
			}
		}
		c.find(f)
	case err != nil:
		err = cloudError("list components", c.config.Provider.Sandbox.Name, err)
		remedy := cmp.Or(plan.Remedy(err), "try again when the cloud answers")
		if errors.Is(err, cloud.ErrNotFound) {
			remedy = "run `constellation sandbox fetch " + to.Kubernetes.String() + "`, or choose a version that is there"
		}
		block("components", "cloud", "Kubernetes "+to.Kubernetes.String()+" cannot be had here", err.Error(), remedy)
	case list.Statement == "" && c.location != "":
		c.find(plan.Finding{
			ID: "components-unsigned", Severity: plan.Warn, Source: "release", Title: "nobody vouches for the components of Kubernetes " + to.Kubernetes.String(),
			Detail: "neither the cloud nor the feed has a statement over the list " + list.List.Digest() + "; machines whose image holds release keys install none of it",
			Remedy: "have the publisher of the feed sign the list: put it into releases/" + to.Services.String() + "/components/ and run `constellation release build`",
		})
	}
	return list
}

// vouchInUse finds the components that machines may still join with beside those of the
// target, which is next, and that lack a statement of the release builder: an older program
// published none, and machines of a newer image install nothing without one.
func (c *checkRun) vouchInUse(ctx context.Context, next cluster.Components) {
	if c.inUse = nil; next.Statement == "" {
		return // the cloud's images have no release keys either
	}
	used := []string{c.now.Target.Components}
	for i := range c.now.Nodes {
		used = append(used, c.now.Nodes[i].Components)
	}
	slices.Sort(used)
	k, err := (&clusterRun{e: c.e, facts: &facts{config: c.config, state: c.state, provider: c.provider}}).connect(ctx)
	for _, name := range slices.Compact(used) {
		if name == "" || name == next.Name || ctx.Err() != nil {
			continue
		}
		var have cluster.Components
		why := err
		if why == nil {
			have, why = k.Components(ctx, name)
		}
		var offered cluster.Components
		if v, bad := version.Parse(have.Kubernetes); why == nil && bad == nil {
			offered, why = c.list(ctx, v)
		}
		switch {
		case errors.Is(why, cluster.ErrAbsent): // no machine can join with it
		case why == nil && offered.Name == name && offered.Statement != "":
			if !have.Serves(offered) {
				c.inUse = append(c.inUse, offered)
			}
		case have.Statement != "": // of whoever published it
		case name == c.now.Target.Components: // only with this one machines join for sure
			detail := "the cloud offers other components for Kubernetes " + have.Kubernetes
			if why != nil {
				detail = why.Error()
			}
			c.find(plan.Finding{
				ID: "components-statement", Severity: plan.Block, Source: "release", Title: "no release builder vouches for the components that the cluster uses", Detail: detail,
				Remedy: "offer the components of Kubernetes " + cmp.Or(have.Kubernetes, "the version that runs") + " again, with `constellation sandbox fetch`: machines of the new image join with them until the control planes are upgraded",
			})
		}
	}
}

// judgeRegisters makes sure that machines of an image satisfy what will be demanded.
func (c *checkRun) judgeRegisters(ctx context.Context, image version.Version) {
	known, err := c.registersOf(ctx, image)
	if c.unmeasured != nil {
		c.drop("measurements-unknown")
		c.find(plan.Finding{
			ID: "measurements-unknown", Field: "attestation.tpm2.measurements", Severity: plan.Block, Source: "attestation",
			Title: fmt.Sprintf("the measurements of image %s are not known", image), Detail: c.unmeasured.Error(),
			Remedy: "get them from whoever published the image, and write both into " + workspace.ConfigFile,
		})
		return
	}
	if err != nil {
		return // they are the user's own, which is fine
	}
	var wrong []string
	after := c.next.Attestation.TPM2.Measurements
	for _, i := range slices.Sorted(maps.Keys(after)) {
		if b, ok := known[i]; ok && !after[i].WarnOnly && !bytes.Equal(b, after[i].Expected) {
			wrong = append(wrong, fmt.Sprintf("PCR %d is %x, and %x is demanded", i, b, after[i].Expected))
		}
	}
	if len(wrong) > 0 {
		c.find(plan.Finding{
			ID: "measurements", Field: "attestation.tpm2.measurements", Severity: plan.Block, Source: "attestation",
			Title: fmt.Sprintf("machines of image %s would not be let in: the measurements of %s are not theirs", image, workspace.ConfigFile), Detail: strings.Join(wrong, "; "),
			Remedy: "write those of the image; `constellation upgrade check --write-config` writes image and measurements together",
		})
	}
}

// drop takes findings back.
func (c *checkRun) drop(id string) {
	c.out.Findings = slices.DeleteFunc(c.out.Findings, func(f plan.Finding) bool { return f.ID == id })
}

// settle makes warnings of what blocks, may be acknowledged and is.
func (c *checkRun) settle() {
	for i := range c.out.Findings {
		f := &c.out.Findings[i]
		switch {
		case f.Severity != plan.Block || !slices.Contains(acknowledgeable, f.ID):
		case slices.Contains(c.acknowledged, f.ID):
			f.Severity, f.Title = plan.Warn, f.Title+" (acknowledged)"
		default:
			f.Remedy += "; if it is meant as it is, `--acknowledge " + f.ID + "`"
		}
	}
}

// occasional are the IDs of findings that are not rules and are only told when there is
// something to tell.
var occasional = []string{
	findingAgents, "components-unsigned", "api-server", "cli", "cli-older", "cloud", "cloud-offers", "components", "feed", "image", "measurements", "measurements-unknown", "node-version", "preflight",
	"running", "running-denied", "running-kubernetes", "running-release", "services-first", "trust-roots",
}

// unknown refuses IDs that no finding has: a word that was mistyped would be taken for
// one that was given. One whose finding did not come up this time is no mistake: the
// same command may be given again.
func (c *checkRun) unknown() error {
	var open []string // what a word would change
	known := map[string]bool{}
	for _, id := range slices.Concat(acknowledgeable, occasional) {
		known[id] = true
	}
	for _, r := range compat.Rules {
		known[r.ID] = true
	}
	for _, f := range c.out.Findings {
		known[f.ID] = true
		if f.Severity == plan.Warn || f.Severity == plan.Block && slices.Contains(acknowledgeable, f.ID) {
			open = append(open, f.ID)
		}
	}
	var wrong []string
	for _, id := range c.acknowledged {
		if !known[id] {
			wrong = append(wrong, id)
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	slices.Sort(open)
	remedy := "nothing needs to be acknowledged here; leave it out"
	if open = slices.Compact(open); len(open) > 0 {
		remedy = "here these can be: " + strings.Join(open, ", ")
	}
	return &plan.Error{Op: "acknowledge " + strings.Join(wrong, ", "), Err: errors.New("no finding has this ID"), Remedy: remedy, Exit: plan.ExitUsage}
}

// prepareRun is what the steps of one plan share. Steps run one after the other.
type prepareRun struct {
	*clusterRun
	hop      compat.Hop
	now      compat.Running
	target   cluster.NodeTarget
	demanded string // of machines of the target's image
	changes  []plan.MeasurementChange
	images   []cloud.Image
	weaker   bool // is acknowledged
	notes    []string
	hops     int
	patch    []byte // JSON
	file     []byte // YAML
}

func (c *checkRun) prepareRun(list cluster.Components) (*prepareRun, error) {
	demanded, err := attestationJSON(c.next)
	if err != nil {
		return nil, err
	}
	to := c.hop.Planned()
	image := c.image(to.Image)
	p := &prepareRun{
		clusterRun: &clusterRun{e: c.e, facts: &facts{config: c.config, state: c.state, provider: c.provider}, components: list, inUse: c.inUse, enrols: c.enrols},
		hop:        *c.hop, now: c.now, demanded: demanded, changes: c.measurementChanges(), images: c.images, hops: len(c.path), notes: c.out.Notes,
		weaker: slices.Contains(c.acknowledged, ruleWeaker),
		target: cluster.NodeTarget{Image: image.Reference, ImageVersion: image.Version, Components: list.Name, Kubernetes: list.Kubernetes, KeepWorkers: !c.hop.ReplaceWorkers},
	}
	return p, p.write()
}

// nodeVersionSpec is the part of a NodeVersion that is set in one write.
type nodeVersionSpec struct {
	Image        string       `json:"image" yaml:"image"`
	ImageVersion string       `json:"imageVersion" yaml:"imageVersion"`
	Components   string       `json:"kubernetesComponentsReference" yaml:"kubernetesComponentsReference"`
	Kubernetes   string       `json:"kubernetesClusterVersion" yaml:"kubernetesClusterVersion"`
	Rollout      *rolloutSpec `json:"rollout,omitempty" yaml:"rollout,omitempty"`
}

type rolloutSpec struct {
	KeepWorkers bool `json:"keepWorkers" yaml:"keepWorkers"`
}

// write makes patch and file. Whether workers are kept is named if they are, or were
// until now.
func (p *prepareRun) write() (err error) {
	spec := nodeVersionSpec{Image: p.target.Image, ImageVersion: p.target.ImageVersion, Components: p.target.Components, Kubernetes: p.target.Kubernetes}
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
	what := fmt.Sprintf("image %s and Kubernetes %s", p.target.ImageVersion, p.target.Kubernetes)
	out.End.Done = fmt.Sprintf("cluster %s is prepared for %s; nothing is replaced until the target is set", p.config.Name, what)
	out.End.Nothing = fmt.Sprintf("cluster %s was prepared for %s before: nothing to do until the target is set", p.config.Name, what)
	out.End.Next = []string{"kubectl patch nodeversion " + nodeVersionName + " --type merge -p " + shellQuote(string(p.patch))}
	out.End.Patch = p.patch
	out.Notes = p.notes
	out.Files = []plan.File{{Path: p.e.ws.Path(TargetFile), Mode: "0644", Note: "the same target as an object, for GitOps"}}
	join, err := p.joinConfigStep(ctx)
	if err != nil {
		return err
	}
	out.Steps = append(p.componentsSteps(), join, plan.Step{
		ID:     StepTargetFile,
		Title:  "Write the target to a file",
		Effect: TargetFile + " asks for " + what + p.workers(),
		Done: func(context.Context) (bool, error) {
			b, err := os.ReadFile(p.e.ws.Path(TargetFile))
			return err == nil && bytes.Equal(b, p.file), nil // what cannot be read is written anew
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

// joinConfigStep publishes what machines of the target's image must prove, beside what
// those of images that still run must.
func (p *prepareRun) joinConfigStep(ctx context.Context) (plan.Step, error) {
	effect := fmt.Sprintf("ConfigMap join-config demands of machines of image %s what it demands now", p.target.ImageVersion)
	var details, names []string
	for _, m := range p.changes {
		names = append(names, fmt.Sprint(m.PCR))
		details = append(details, m.String())
	}
	if len(names) > 0 {
		effect = fmt.Sprintf("ConfigMap join-config lets in machines of image %s, too: PCR %s differ", p.target.ImageVersion, words.And(names))
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
			details = append(details, "machines of image "+image+" are let in as before")
		}
	}
	for _, image := range gone {
		details = append(details, "machines of image "+image+" are not let in any more: none runs it")
	}
	return plan.Step{
		ID: StepJoinConfig, Title: "Publish what machines must prove", Effect: effect, Details: details,
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
							Remedy: "look at the new plan: run the same command again", Exit: plan.ExitBlocked,
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

// generations returns what join-config becomes, and the images that lose their generation:
// those that no machine runs and that are older than what nodes are brought to. A newer
// one may have been prepared by somebody else. Nil for inUse means that nobody knows.
func (p *prepareRun) generations(have cluster.JoinConfig, inUse map[string]bool) (want cluster.JoinConfig, gone []string) {
	want = have
	want.Generations = maps.Clone(have.Generations)
	if want.Generations == nil {
		want.Generations = map[string]string{}
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

// readInUse is imagesInUse of what the cluster says now.
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
	known := map[string]string{target.Image: target.ImageVersion}
	for _, i := range p.images {
		known[i.Reference] = i.Version
	}
	add := func(reference string) bool {
		v, ok := known[reference]
		if !ok {
			parsed, err := version.Parse(reference[strings.LastIndexByte(reference, '/')+1:])
			if v, ok = parsed.String(), err == nil; !ok {
				return false
			}
		}
		out[v] = true
		return true
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
