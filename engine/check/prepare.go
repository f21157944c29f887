package check

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// ruleOldest is the rule that a new minor version of Kubernetes comes after the image.
const ruleOldest = "oldest-supports-kubernetes"

// Acknowledgeable are the IDs of the findings that block until they are acknowledged by name.
// Other blocking findings cannot be forced.
var Acknowledgeable = []string{RuleWeaker, ruleOldest}

// Set reports whether the requested versions are the target of all nodes while some nodes still
// run others.
func (c *Run) Set() bool {
	n, t := &c.Now, c.Now.Target
	image, err := version.Parse(t.ImageVersion)
	if n.NoImages {
		image, err = version.Version{}, nil
	}
	kubernetes, err2 := version.Parse(t.Kubernetes)
	if err != nil || err2 != nil {
		return false
	}
	reached := func(images, kubelets compat.Span) bool { return images.Is(image) && kubelets.Is(kubernetes) }
	etcd := !slices.ContainsFunc(n.Nodes, func(o cluster.Node) bool { return !t.HasEtcd(&o) })
	if etcd && reached(n.ControlPlaneImage, n.ControlPlaneKubelet) && (t.KeepWorkers || n.WorkerKubelet.IsZero() || reached(n.WorkerImage, n.WorkerKubelet)) {
		return false
	}
	if c.asked() {
		r := c.Request
		if !etcd && kubernetes.Less(r.Kubernetes) { // the hop of etcd that comes before the requested version
			return r.Release.IsZero() || n.NoImages || r.Release.Equal(image)
		}
		return (r.Release.IsZero() || n.NoImages || r.Release.Equal(image)) && (r.Kubernetes.IsZero() || r.Kubernetes.Equal(kubernetes))
	}
	f := c.Config
	_, newer := c.configuredHop()
	return !newer || f.Image.Equal(image) && f.Kubernetes.Equal(kubernetes) && f.KeepWorkers == t.KeepWorkers
}

// Nothing explains why there is nothing to prepare.
func (c *Run) Nothing() error {
	e := &plan.Error{Err: errors.New("nothing to prepare: no newer version is reachable than what runs"), Remedy: "`constellation upgrade check` lists the versions", Exit: plan.ExitNothing}
	if c.there {
		e.Err = errors.New("nothing to prepare: the cluster runs the requested versions already")
	}
	return e
}

// choose picks the hop to prepare. Without a requested target, that is the hop to the configured
// versions.
func (c *Run) choose() {
	if h, ok := c.configuredHop(); ok && !c.asked() {
		c.Path, c.there, c.configured = []compat.Hop{h}, false, true
		return
	}
	c.join()
	if len(c.Path) == 0 {
		return
	}
	// The user may keep workers that match the control planes. Workers kept by an earlier hop
	// must be upgraded now.
	h := &c.Path[0]
	n := &c.Now
	same := func(a, b compat.Span) bool { return a.Oldest.Equal(b.Oldest) && a.Newest.Equal(b.Newest) }
	behind := !same(n.WorkerImage, n.ControlPlaneImage) || !same(n.WorkerKubelet, n.ControlPlaneKubelet)
	if c.Config.KeepWorkers && h.ReplaceControlPlanes && h.ReplaceWorkers && !behind {
		to := h.Planned()
		to.KeepWorkers = true
		against := slices.DeleteFunc(compat.Blocks(c.Matrix.Check(h.CLI, c.Now, to, c.offer)), func(r *compat.RuleResult) bool { return slices.Contains(c.Acknowledged, r.Rule) })
		h.ReplaceWorkers = len(against) > 0
	}
}

// verb is the verb for the hop, flag the option that acknowledges a finding by name.
func (c *Run) verb() string {
	if c.Applies {
		return "upgrade"
	}
	return "prepare"
}

func (c *Run) flag() string {
	if c.Applies {
		return "--ack"
	}
	return "--acknowledge"
}

// configuredHop is the hop to the configured versions; false if none of them is newer than the
// running ones.
func (c *Run) configuredHop() (compat.Hop, bool) {
	f, n := c.Config, &c.Now
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

// join merges the path into one hop if its only violation is the order of image and Kubernetes,
// and the user acknowledged that. Without the acknowledgement it adds a note that the merge is
// possible.
func (c *Run) join() {
	if len(c.Path) < 2 {
		return
	}
	first, last := c.Path[0], c.Path[len(c.Path)-1]
	h := compat.Hop{Number: 1, CLI: first.CLI, From: first.From, To: last.To, ReplaceControlPlanes: true, ReplaceWorkers: last.ReplaceWorkers}
	found := compat.Blocks(c.Matrix.Check(h.CLI, c.Now, h.Planned(), c.offer))
	same := func(o compat.Hop) bool { return o.CLI.Equal(h.CLI) }
	if len(found) != 1 || found[0].Rule != ruleOldest || slices.ContainsFunc(c.Path, func(o compat.Hop) bool { return !same(o) }) {
		return
	}
	if slices.Contains(c.Acknowledged, ruleOldest) {
		c.Path = []compat.Hop{h}
		return
	}
	c.Out.Notes = append(c.Out.Notes, fmt.Sprintf(
		"This is hop 1 of %d; %s again when its rollout has ended. `%s %s` %s all of them for one write, in which control planes of image %s run Kubernetes %s until they are replaced.",
		len(c.Path), c.verb(), c.flag(), ruleOldest, c.verb()+"s", first.From.Image, last.To.Kubernetes))
}

// JudgePrepare finds obstacles to preparing the hop. It returns the components that its nodes
// install.
func (c *Run) JudgePrepare(ctx context.Context) cluster.Components {
	to := c.Hop.Planned()
	block := func(id, source, title, detail, remedy string) {
		c.Find(plan.Finding{ID: id, Severity: plan.Block, Source: source, Title: title, Detail: detail, Remedy: remedy})
	}
	if !c.Hop.CLI.Equal(c.CLI) {
		block("cli", "release", fmt.Sprintf("the hop needs constellation %s, and this is %s", c.Hop.CLI, c.CLI), "", cmp.Or(c.Hop.Get, c.Matrix.Get(c.Hop.CLI)))
	}
	if !c.Applies && !c.Now.Services.Is(to.Services) {
		block("services-first", "release", fmt.Sprintf("services %s run, and the hop needs those of release %s", c.Now.Services, to.Services),
			"the operator and the join service in the cluster do the work, and those of another release may not support the hop",
			fmt.Sprintf("write microserviceVersion: %s into %s, with %s, and bring the services with `constellation init`; then prepare again", to.Services, workspace.ConfigFile, c.asItRuns()))
	}
	if c.Now.Target.Components == "" {
		block("node-version", "versions", "the cluster has no NodeVersion constellation-version", "without it no target can be set", "`constellation init` makes it")
	}
	if j := c.Now.JoinConfig; j.TrustRoots != "" && !c.State.Enrolled() && strings.TrimSpace(j.TrustRoots) != strings.TrimSpace(c.Config.Attestation.TPM2.TrustRoots) {
		c.Find(plan.Finding{
			ID: "trust-roots", Field: "attestation.tpm2.trustRoots", Severity: plan.Warn, Source: "attestation", Title: "the trust roots of " + workspace.ConfigFile + " are not those of the cluster",
			Detail: "trust roots select the trusted clouds; preparing an upgrade does not change those of the cluster", Remedy: "write those of the cluster: `kubectl -n kube-system get configmap join-config -o jsonpath={.data.trustRoots}`",
		})
	}
	if c.silent != nil {
		a := c.Config.Advice()
		err := CloudError("ask "+a.Cloud, a, c.silent)
		c.drop("cloud-offers")
		block("cloud", "cloud", "the cloud does not list its "+c.catalogue(), err.Error(), cmp.Or(plan.Remedy(err), "try again when it answers"))
		return cluster.Components{}
	}
	if !c.Now.NoImages {
		c.judgeRegisters(ctx, to.Image)
	}
	if c.Image(to.Image) == nil && !c.Now.NoImages {
		// Only an unchanged image can be unknown: the rules cover new ones.
		block("image", "cloud", "the cloud has no image "+to.Image.String(), "", "choose one that it has: `constellation upgrade check`")
	}
	list, err := c.list(ctx, to.Kubernetes)
	switch {
	case errors.As(err, new(statementError)):
		f := plan.Finding{
			ID: "components-statement", Severity: plan.Block, Source: "release", Title: "the feed's statement over the components of Kubernetes " + to.Kubernetes.String() + " is not genuine",
			Detail: err.Error(), Remedy: "inspect the feed with " + VerifyCommand(c.location, c.keys) + ", and download it again from its publisher: machines would refuse these components",
		}
		if !errors.Is(err, release.ErrUntrusted) && !errors.Is(err, release.ErrAltered) {
			f.Title, f.Remedy = "the feed's statement over the components of Kubernetes "+to.Kubernetes.String()+" cannot be read", "remove the cause and try again; machines install nothing without the statement"
			if errors.Is(err, release.ErrUnreachable) {
				f.Remedy = "try again when the feed answers; machines install nothing without the statement"
			}
		}
		c.Find(f)
	case err != nil:
		err = CloudError("list components", c.Config.Advice(), err)
		remedy := cmp.Or(plan.Remedy(err), "try again when the cloud answers")
		if errors.Is(err, cloud.ErrNotFound) {
			remedy = c.Config.Advice().OfferOf(to.Kubernetes.String()) + ", or choose a version that is there"
		}
		block("components", "cloud", "Kubernetes "+to.Kubernetes.String()+" is not available here", err.Error(), remedy)
	case list.Statement == "" && c.location != "":
		c.Find(plan.Finding{
			ID: "components-unsigned", Severity: plan.Warn, Source: "release", Title: "there is no statement over the components of Kubernetes " + to.Kubernetes.String(),
			Detail: "neither the cloud nor the feed has a statement over the list " + list.List.Digest() + "; machines whose image holds release keys install none of it",
			Remedy: "have the publisher of the feed sign the list: put it into releases/" + to.Services.String() + "/components/ and run `constellation release build`",
		})
	}
	return list
}

// VouchInUse finds components without a statement of the release builder that machines may still
// join with, next to next, the target's. Older programs published no statement, and machines of a
// newer image install nothing without one.
func (c *Run) VouchInUse(ctx context.Context, next cluster.Components) {
	if c.InUse = nil; next.Statement == "" {
		return // images of this cloud have no release keys
	}
	used := []string{c.Now.Target.Components}
	for i := range c.Now.Nodes {
		used = append(used, c.Now.Nodes[i].Components)
	}
	slices.Sort(used)
	var k Published
	kubeconfig, err := c.Ws.Kubeconfig()
	if err == nil {
		k, err = c.Connect(ctx, kubeconfig)
	}
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
				c.InUse = append(c.InUse, offered)
			}
		case have.Statement != "": // any publisher counts
		case name == c.Now.Target.Components: // other components are not sure to be used by joining machines
			detail := "the cloud offers other components for Kubernetes " + have.Kubernetes
			if why != nil {
				detail = why.Error()
			}
			c.Find(plan.Finding{
				ID: "components-statement", Severity: plan.Block, Source: "release", Title: "no release builder has signed the components that the cluster uses", Detail: detail,
				Remedy: c.Config.Advice().OfferOf(cmp.Or(have.Kubernetes, "VERSION")) + " again, with a statement: machines of the new image join with the components until the control planes are upgraded",
			})
		}
	}
}

// asItRuns names the fields of the configuration that a change of the services leaves alone.
func (c *Run) asItRuns() string {
	if c.Now.NoImages {
		return "kubernetesVersion as it runs"
	}
	return "image and kubernetesVersion as they run"
}

// judgeRegisters ensures that machines of an image pass the attestation policy that will be
// enforced.
func (c *Run) judgeRegisters(ctx context.Context, image version.Version) {
	known, err := c.registersOf(ctx, image)
	if c.unmeasured != nil {
		c.drop("measurements-unknown")
		c.Find(plan.Finding{
			ID: "measurements-unknown", Field: "attestation.tpm2.measurements", Severity: plan.Block, Source: "attestation",
			Title: fmt.Sprintf("the measurements of image %s are not known", image), Detail: c.unmeasured.Error(),
			Remedy: "get them from the publisher of the image, and write both into " + workspace.ConfigFile,
		})
		return
	}
	if err != nil {
		return // the user's own values
	}
	var wrong []string
	after := c.Next.Attestation.TPM2.Measurements
	for _, i := range slices.Sorted(maps.Keys(after)) {
		if b, ok := known[i]; ok && !after[i].WarnOnly && !bytes.Equal(b, after[i].Expected) {
			wrong = append(wrong, fmt.Sprintf("PCR %d is %x, want %x", i, b, after[i].Expected))
		}
	}
	if len(wrong) > 0 {
		c.Find(plan.Finding{
			ID: "measurements", Field: "attestation.tpm2.measurements", Severity: plan.Block, Source: "attestation",
			Title: fmt.Sprintf("machines of image %s could not join: the measurements of %s are of another image", image, workspace.ConfigFile), Detail: strings.Join(wrong, "; "),
			Remedy: "write those of the image; `constellation upgrade check --write-config` writes image and measurements together",
		})
	}
}

// drop removes findings.
func (c *Run) drop(id string) {
	c.Out.Findings = slices.DeleteFunc(c.Out.Findings, func(f plan.Finding) bool { return f.ID == id })
}

// Settle turns acknowledged blocking findings into warnings, where an acknowledgement is
// possible.
func (c *Run) Settle() {
	for i := range c.Out.Findings {
		f := &c.Out.Findings[i]
		switch {
		case f.Severity != plan.Block || !slices.Contains(Acknowledgeable, f.ID):
		case slices.Contains(c.Acknowledged, f.ID):
			f.Severity, f.Title = plan.Warn, f.Title+" (acknowledged)"
		default:
			f.Remedy += "; to accept it, `--acknowledge " + f.ID + "`"
		}
	}
}

// occasional are the IDs of findings that are not rules and appear only under certain conditions.
var occasional = []string{
	findingAgents, "components-unsigned", "api-server", "cli", "cli-older", "cloud", "cloud-offers", "components", "feed", "image", "measurements", "measurements-unknown", "node-version", "preflight",
	"running", "running-denied", "running-kubernetes", "running-release", "services-first", "trust-roots",
}

// Unknown rejects IDs that no finding can have: a misspelt ID would look like an acknowledgement.
// An ID whose finding is absent this time is valid, so that the same command can be repeated.
func (c *Run) Unknown() error {
	var open []string // findings that an acknowledgement would unblock
	known := map[string]bool{}
	for _, id := range slices.Concat(Acknowledgeable, occasional) {
		known[id] = true
	}
	for _, r := range compat.Rules {
		known[r.ID] = true
	}
	for _, f := range c.Out.Findings {
		known[f.ID] = true
		if f.Severity == plan.Warn || f.Severity == plan.Block && slices.Contains(Acknowledgeable, f.ID) {
			open = append(open, f.ID)
		}
	}
	var wrong []string
	for _, id := range c.Acknowledged {
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
