// Package check computes the reachable upgrade versions of a cluster and the obstacles to the
// next hop.
//
// A [Run] is one check with the observed state of cluster, cloud, releases and workspace.
// `upgrade check` shows it. Preparing and applying an upgrade add further checks to the same Run
// before package engine creates their steps. A check is read-only, except that it can write the
// configuration on request.
package check

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"constellation/assets"
	"constellation/engine/attestation"
	"constellation/engine/chart"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/rollout"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// IDs of the steps of `upgrade apply` that other verbs do not have.
const (
	StepBackup = "backup"
)

// CheckVersions is the Object of the check event that carries the versions and the upgrade path:
// its Data is a [Check] without the slow parts.
const CheckVersions = "versions"

// surge is the number of machines that a rollout may create beyond the desired count.
const surge = 1

// CheckLimit is the timeout for reading the versions from the cluster and the inventory of the
// cloud.
const CheckLimit = 15 * time.Second

// Run is one check and its observations. Its methods run one after the other.
type Run struct {
	Deps
	Request Request
	CLI     version.Version
	Out     Check

	text     []byte // of the configuration
	Config   *workspace.Config
	State    *workspace.State
	location string // of the feed
	keys     []release.Key

	Now  compat.Running
	Down error // why the cluster is unreachable

	Cloud      Cloud // nil if it is unreachable
	Images     []cloud.Image
	Catalogue  *cloud.Catalogue  // of Images; nil before the cluster is read
	kubernetes []version.Version // that the cloud offers; nil: those of the releases
	arch       string            // of machines
	silent     error             // why the cloud is unreachable

	Known    Known
	Fetched  map[string]*chart.Chart // of the hop
	Releases []release.Summary       // oldest first
	Past     rollout.History

	Matrix *compat.Matrix
	offer  compat.Offer
	goal   compat.Planned
	there  bool // the requested versions run already
	Path   []compat.Hop
	Hop    *compat.Hop          // the first of path; nil if there is none
	InUse  []cluster.Components // that get a statement in the hop
	Enrols []cluster.Node       // that get a verifying agent in the hop
	Next   *workspace.Config    // nil if there is no hop
	edited []byte               // configuration with the values of the next hop; nil: do not write
	// unmeasured is the reason why the measurements of the next hop's image are unknown.
	unmeasured error

	// prepares is set if the next hop is to be prepared. Then it may differ from the first hop of
	// the shortest path, and comes from the configuration if configured is set.
	Prepares, configured bool
	// applies is set if the hop is also executed, beginning with the services.
	Applies      bool
	Acknowledged []string // IDs of findings
}

// Begin reads the workspace.
func (c *Run) Begin() (err error) {
	if c.CLI, err = version.Parse(version.Release); err != nil {
		return fmt.Errorf("read own version: %w", err)
	}
	if c.Config, c.State, err = c.Ws.Load(); err != nil {
		return err
	}
	// Read the file again, so that the edit applies to the content that was checked.
	if c.text, err = c.Ws.ReadConfig(); err != nil {
		return err
	}
	if c.Config, err = workspace.ParseConfig(c.text); err != nil {
		return &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "correct the file; `constellation config validate` checks it again"}
	}
	if !c.Ws.Has(workspace.KubeconfigFile) {
		err := &plan.Error{Op: "check for upgrades", Err: c.Ws.Absent(workspace.KubeconfigFile), Exit: plan.ExitUsage, Remedy: "create the cluster first: `" + c.Command("init") + "`"}
		switch {
		case len(c.State.ClusterValues.ClusterID) == 0:
		case c.Ws.Has(workspace.PendingFile):
			err.Remedy = "init of the cluster is not complete: `" + c.Command("init") + "` goes on"
		case workspace.Completed(c.Ws, c.Runs()):
			err.Remedy = workspace.RestoreKubeconfig
		default:
			err.Remedy = "if the cluster was complete before, " + workspace.RestoreKubeconfig + ". If it never was: `" + c.Command("init") + "` goes on"
		}
		return err
	}
	c.location, c.keys, err = c.Feed(c.Config, c.Request)
	if err != nil {
		return err
	}
	c.Out = Check{
		Schema: plan.Schema, Cluster: c.Config.Name, Simulated: c.State.Simulated(), NotAttested: c.State.NotAttested(), Provider: c.Config.Provider.Name, Time: c.Clock().UTC(), CLI: c.CLI.String(),
		Components: []plan.ComponentCheck{}, Path: []compat.Hop{}, Findings: []plan.Finding{},
	}
	return nil
}

// Look reads cluster, cloud and releases concurrently.
func (c *Run) Look(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() {
		limited, cancel := context.WithTimeout(ctx, CheckLimit)
		defer cancel()
		b, err := c.Ws.Kubeconfig()
		var i Inspector
		if err == nil {
			if i, err = c.Inspect(limited, b); err != nil {
				c.Down = c.Ws.BadKubeconfig(err)
				return
			}
		}
		if err == nil {
			c.Now, err = i.Running(limited)
		}
		if c.Down = c.ClusterDown(err); c.Down != nil {
			c.Now = compat.Running{}
		}
	})
	wg.Go(func() {
		limited, cancel := context.WithTimeout(ctx, CheckLimit)
		defer cancel()
		c.silent = c.askCloud(limited)
	})
	var releasesErr error
	wg.Go(func() {
		if c.Known, releasesErr = c.Know(ctx, c.location, c.keys); releasesErr == nil {
			c.Releases, releasesErr = c.Known.Summaries(ctx)
		}
	})
	wg.Go(func() { c.Past = rollout.ReadHistory(c.Ws.Path(plan.RunsDir)) })
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	if releasesErr != nil {
		return releasesErr
	}
	if c.Down == nil {
		c.AddImages(func() ([]cloud.Image, error) { return c.Images, c.silent })
		if c.Now.Services.IsZero() || c.Now.ControlPlaneImage.IsZero() && !c.Now.NoImages || c.Now.Kubernetes.IsZero() {
			c.Down = c.denied() // nothing can be planned
		}
	}
	c.Out.Feed = c.Known.State()
	id := hex.EncodeToString(c.State.ClusterValues.ClusterID)
	if j := c.Now.JoinConfig; c.Down == nil && j.ClusterID != "" && j.ClusterID != id {
		return c.Ws.ForeignKubeconfig()
	}
	return nil
}

// AddImages adds the versions of the nodes' images to Now. list reads the catalogue of the cloud; it
// is called only if an image's version is needed and its reference does not contain it.
func (c *Run) AddImages(list func() ([]cloud.Image, error)) {
	c.Catalogue = c.State.Catalogue(list)
	c.Now.AddImages(c.Catalogue.Version)
}

// askCloud reads what the cloud offers. A foreign cloud counts as absent.
func (c *Run) askCloud(ctx context.Context) error {
	p, err := c.Provider(ctx, c.Config, c.State)
	if err != nil {
		return err
	}
	about, err := p.Describe(ctx)
	if err != nil {
		return err
	}
	if !c.State.Adopted() && about.UID != c.State.Infrastructure.UID { // an inventory has no identity
		return &plan.Error{
			Err:    fmt.Errorf("it is not the one of %s: it was recreated", workspace.StateFile),
			Remedy: "the cluster was deleted with the earlier machines: use another directory with -C, or move this one's files away",
		}
	}
	if c.Images, err = p.Images(ctx); err != nil {
		return err
	}
	c.Cloud, c.kubernetes, c.arch = p, about.Kubernetes, cmp.Or(about.Arch, runtime.GOARCH)
	return nil
}

// ClusterDown translates the error of an unreachable cluster for the user.
func (c *Run) ClusterDown(err error) error {
	if err == nil {
		return nil
	}
	out := &plan.Error{Op: "read the versions of the cluster", Err: err}
	switch {
	case errors.Is(err, cluster.ErrForbidden):
		out.Remedy = "use a kubeconfig with this right, such as the one that `constellation init` wrote"
	case errors.Is(err, cluster.ErrDenied):
		out.Remedy = workspace.KubeconfigFile + " is not of this cluster or not its administrator's: restore the file"
	case errors.Is(err, cluster.ErrUnreachable) || errors.Is(err, context.DeadlineExceeded):
		out.Err = fmt.Errorf("the API server at %s does not answer: %w", c.State.Infrastructure.ClusterEndpoint, err)
		out.Remedy = "is the control plane up? `" + c.Command("status") + "` shows the machines of the cloud; run the same command again afterwards"
	default:
		out.Remedy = "`" + c.Command("status") + "` tells more"
	}
	return out
}

// denied returns the error of a cluster whose API server denied reads; nil if it denied none.
func (c *Run) denied() error {
	f := deniedFinding(c.Now.Denied)
	if f == nil {
		return nil
	}
	return &plan.Error{Op: "read the versions of the cluster", Err: fmt.Errorf("%w: %s", cluster.ErrForbidden, f.Detail), Remedy: f.Remedy}
}

// plainUser matches user names that a shell needs no quotes for.
var plainUser = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9:@._-]*$`)

// deniedFinding is the one finding about all reads that the API server denied, with the commands
// that allow them; nil if there are none.
func deniedFinding(denied []cluster.Denial) *plan.Finding {
	if len(denied) == 0 {
		return nil
	}
	who, subject := "the kubeconfig's user", "--user=NAME"
	if user := denied[0].User; user != "" {
		who = "user " + strconv.Quote(user)
		if plainUser.MatchString(user) {
			subject = "--user=" + user
		}
		if account, ok := strings.CutPrefix(user, "system:serviceaccount:"); ok && plainUser.MatchString(account) {
			subject = "--serviceaccount=" + account
		}
	}
	var reads, verbs, resources []string
	for _, d := range denied {
		reads, verbs, resources = append(reads, d.String()), append(verbs, d.Verb), append(resources, d.Resource)
	}
	slices.Sort(verbs)
	slices.Sort(resources)
	f := &plan.Finding{
		ID: runningDenied, Severity: plan.NotChecked, Source: "versions", Title: who + " may not read all objects that have the running versions",
		Detail: "the API server refused to " + words.And(reads), Reference: "https://kubernetes.io/docs/reference/access-authn-authz/rbac/",
		Remedy: "use a kubeconfig that may, such as the one that `constellation init` wrote, or let an administrator allow it",
	}
	if slices.ContainsFunc(denied, func(d cluster.Denial) bool { return d.User == "" }) {
		return f // without a command: these names do not fit into one
	}
	f.Command = fmt.Sprintf("kubectl create clusterrole constellation-check --verb=%s --resource=%s && kubectl create clusterrolebinding constellation-check --clusterrole=constellation-check %s",
		strings.Join(slices.Compact(verbs), ","), strings.Join(slices.Compact(resources), ","), subject)
	f.Remedy += ": `" + f.Command + "`"
	return f
}

// runningDenied is the ID of the finding about denied reads.
const runningDenied = "running-denied"

// Without fills in the facts that need no cluster, or only the reads that succeeded.
func (c *Run) Without() {
	if f := deniedFinding(c.Now.Denied); f != nil {
		f.Severity = plan.Block
		c.Find(*f)
	} else {
		c.Find(plan.Finding{
			ID: "api-server", Severity: plan.Block, Title: "the cluster could not be read", Detail: c.Down.Error(), Remedy: plan.Remedy(c.Down), Source: "versions",
		})
	}
	c.Matrix = compat.NewMatrix(c.Releases)
	c.judgeFeed()
	c.judgeCloud()
	c.components(nil)
	for i := range c.Out.Components {
		if r := &c.Out.Components[i]; r.Kind != rowCLI {
			r.Verdict = "not known"
		}
	}
	c.Out.Exit = plan.ExitCode(c.Down)
}

// Decide computes versions, path and the values that the next hop writes.
func (c *Run) Decide(ctx context.Context) error {
	c.Matrix = compat.NewMatrix(c.Releases)
	c.offer = c.offers()
	c.Out.Current = plan.Target{Release: c.Now.Services.String(), Image: c.Now.ControlPlaneImage.Add(c.Now.WorkerImage.Oldest).Add(c.Now.WorkerImage.Newest).String(), Kubernetes: c.Now.Kubernetes.String()}

	var results []*compat.RuleResult
	for read := map[string]bool{}; ; c.Matrix = compat.NewMatrix(c.Releases) {
		c.goal = compat.Planned{Services: c.Request.Release, Kubernetes: c.Request.Kubernetes}
		if c.asked() {
			c.Path, results = c.Matrix.Path(c.Now, c.goal, c.offer)
			c.there = len(c.Path)+len(results) == 0
		}
		if !c.there {
			c.goal = c.Matrix.Goal(c.Now, c.goal, c.offer)
			c.Path, results = c.Matrix.Path(c.Now, c.goal, c.offer)
		}
		if !c.refuse(ctx, read) {
			break
		}
	}
	if c.Prepares {
		c.choose()
	}
	c.markInPlace()
	c.Out.Path = append(c.Out.Path, c.Path...)
	c.Out.Goal = c.reached()
	if len(c.Path) > 0 {
		c.Hop = &c.Path[0]
		if c.configured {
			c.Next = c.Config
		} else if err := c.prepare(ctx); err != nil {
			return err
		}
		results = c.Matrix.Check(c.Hop.CLI, c.Now, c.planned(), c.offer)
	}
	for _, r := range results {
		f := plan.Finding{ID: r.Rule, Severity: r.Severity, Title: r.Title, Remedy: r.Remedy, Reference: r.Reference, Source: "matrix"}
		if weakens(f) {
			f.Detail = c.weaker(ctx)
		}
		c.Find(f)
	}
	reach := c.Matrix.Reachable(c.CLI, c.Now, c.offer)
	for _, r := range reach {
		if c.there {
			break // the requested versions run already
		}
		c.Out.Blocked = append(c.Out.Blocked, r.Blocked...)
	}
	c.beyond()
	c.components(reach)
	c.judgeData()
	c.judgeRunning()
	c.judgeConfig()
	c.judgeMeasured()
	c.judgeFeed()
	c.judgeCloud()
	c.Out.Notes = append(c.Out.Notes, c.Matrix.Notes(c.CLI, c.Now)...)
	if c.Hop == nil && !c.Prepares {
		if err := c.describe(ctx); err != nil {
			return err
		}
	}
	switch {
	case c.Hop != nil:
		c.Out.Changes = c.changes(ctx)
		if !c.Prepares { // preparing destroys nothing
			c.Find(c.LastBackup(c.State))
		}
	case c.there:
		c.Out.Notes = append(c.Out.Notes, "The cluster runs the requested versions already.")
	case len(results) == 0 && len(c.Out.Blocked) == 0:
		c.Out.Notes = append(c.Out.Notes, "The cluster runs the newest known versions.")
	}
	return nil
}

// beyond explains why Kubernetes versions above the end of the path are no upgrade targets from
// there. The path itself removes the present obstacles.
func (c *Run) beyond() {
	if len(c.Path) == 0 {
		return
	}
	end := c.Path[len(c.Path)-1].Planned()
	at := compat.Running{
		Services: compat.At(end.Services), ControlPlaneImage: compat.At(end.Image), Kubernetes: compat.At(end.Kubernetes), ControlPlaneKubelet: compat.At(end.Kubernetes),
		JoinConfig: c.Now.JoinConfig,
	}
	if !c.Now.WorkerKubelet.IsZero() {
		at.WorkerImage, at.WorkerKubelet = compat.At(end.Image), compat.At(end.Kubernetes)
	}
	for i := range c.Out.Blocked {
		b := &c.Out.Blocked[i]
		v, err := version.Parse(b.Version)
		if err != nil || b.Component != rowKubernetes || !end.Kubernetes.Less(v) {
			continue
		}
		if found := compat.Blocks(c.Matrix.Check(end.Services, at, compat.Planned{Services: end.Services, Image: end.Image, Kubernetes: v}, c.offer)); len(found) > 0 {
			b.Rule, b.Reason, b.Remedy, b.Reference = found[0].Rule, found[0].Title, found[0].Remedy, found[0].Reference
		}
	}
}

// asked reports whether the request has an upgrade target.
func (c *Run) asked() bool { return !c.Request.Release.IsZero() || !c.Request.Kubernetes.IsZero() }

// reached is the end of the path.
func (c *Run) reached() plan.Target {
	if n := len(c.Path); n > 0 {
		return c.Path[n-1].To
	}
	return plan.Target{
		Release: cmp.Or(c.goal.Services.String(), c.Now.Services.Oldest.String()), Image: cmp.Or(c.goal.Image.String(), c.Now.ControlPlaneImage.Oldest.String()),
		Kubernetes: cmp.Or(c.goal.Kubernetes.String(), c.Now.Kubernetes.Oldest.String()),
	}
}

// offers returns what the cloud offers. If the cloud does not answer, the offer is marked as
// unknown and forbids nothing.
func (c *Run) offers() compat.Offer {
	if c.silent != nil {
		return compat.Offer{}
	}
	o := compat.Offer{Images: func(v version.Version) (bool, string, string) {
		if c.Image(v) != nil {
			return true, "", ""
		}
		var have []string
		for _, i := range c.Images {
			have = append(have, i.Version)
		}
		return false, "the cloud has no image " + v.String(), "the cloud has " + words.And(have) + "; " + c.Config.Advice().ImageOf(v.String())
	}}
	if c.kubernetes != nil {
		o.Kubernetes = func(v version.Version) (bool, string, string) {
			if slices.ContainsFunc(c.kubernetes, v.Equal) {
				return true, "", ""
			}
			why := "the mirror has no " + v.String()
			if b := c.Buildable; len(b) > 0 && !slices.Contains(b, v.String()) {
				return false, why, "of this Kubernetes " + c.Config.Advice().Cloud + " can have " + words.Or(b) + " only"
			}
			return false, why, c.Config.Advice().OfferOf(v.String())
		}
	}
	return o
}

// Image returns the cloud's image of a release; nil if it has none.
func (c *Run) Image(v version.Version) *cloud.Image {
	for i := range c.Images {
		if x, err := version.Parse(c.Images[i].Version); err == nil && x.Equal(v) {
			return &c.Images[i]
		}
	}
	return nil
}

// summary returns the release data of a version; nil if there is none.
func (c *Run) summary(v version.Version) *release.Summary {
	for i := range c.Releases {
		if c.Releases[i].Version.Equal(v) {
			return &c.Releases[i]
		}
	}
	return nil
}

// prepare computes the configuration of the next hop.
func (c *Run) prepare(ctx context.Context) error {
	to := c.Hop.Planned()
	behind := !c.Now.WorkerKubelet.IsZero() && (!c.Now.WorkerKubelet.Is(to.Kubernetes) || !c.Now.WorkerImage.Is(to.Image))
	h := workspace.HopConfig{Image: to.Image, Services: to.Services, Kubernetes: to.Kubernetes, KeepWorkers: to.KeepWorkers && c.Hop.ReplaceControlPlanes && behind}
	if c.State.Adopted() {
		h.Services = version.Version{} // the configuration does not name it
	}
	if h.Measurements, c.unmeasured = c.measured(ctx, to.Image); ctx.Err() != nil {
		return ctx.Err()
	}
	c.Next = h.Apply(c.Config)
	return c.edit(h)
}

// edit computes the change of the configuration's file.
func (c *Run) edit(h workspace.HopConfig) error {
	out, fields, err := workspace.EditConfig(c.text, h)
	switch {
	case err != nil && c.Request.WriteConfig:
		return err
	case err != nil:
		c.Out.Notes = append(c.Out.Notes, fmt.Sprintf("--write-config cannot be used: %v; %s", err, plan.Remedy(err)))
		c.Out.Config = &ConfigChange{Path: c.Ws.Path(workspace.ConfigFile), Fields: []workspace.FieldChange{}}
	case c.unmeasured != nil && c.Request.WriteConfig:
		return &plan.Error{
			Op: "write " + c.Ws.Path(workspace.ConfigFile), Err: fmt.Errorf("the measurements of image %s are not known: %w", h.Image, c.unmeasured),
			Remedy: "image and measurements belong together: get them from the publisher of the image, and write both by hand",
		}
	default:
		c.Out.Config = &ConfigChange{Path: c.Ws.Path(workspace.ConfigFile), Fields: append([]workspace.FieldChange{}, fields...)}
		c.edited = out
	}
	return nil
}

// NoteOtherConfig is the note about a configuration that --write-config would change although there is no next hop.
const NoteOtherConfig = workspace.ConfigFile + " does not describe what the cluster runs. `verify` and `recover` go by it."

// settled reports whether all nodes are known to run the same versions, except workers that an upgrade keeps.
func (c *Run) settled() bool {
	n := &c.Now
	one := func(s compat.Span) bool { return !s.IsZero() && !s.Mixed() }
	image, kubernetes := n.ControlPlaneImage.Oldest, n.Kubernetes.Oldest
	if !one(n.Services) || !one(n.Kubernetes) || !n.ControlPlaneKubelet.Is(kubernetes) || !n.NoImages && !one(n.ControlPlaneImage) {
		return false
	}
	return c.Config.KeepWorkers || n.WorkerKubelet.IsZero() || n.WorkerKubelet.Is(kubernetes) && n.WorkerImage.Is(image)
}

// describe computes the configuration of what runs, for a cluster without a next hop. After `upgrade apply --to`, the
// configuration still has the former versions and measurements, and `verify` and `recover` judge by those. An attacker in the
// cluster could claim old versions: they count only if the user names their release.
func (c *Run) describe(ctx context.Context) error {
	n, f := &c.Now, c.Config
	if c.State.Adopted() || !c.settled() {
		return nil
	}
	h := workspace.HopConfig{Image: n.ControlPlaneImage.Oldest, Services: n.Services.Oldest, Kubernetes: n.Kubernetes.Oldest, KeepWorkers: f.KeepWorkers}
	if older := h.Services.Less(f.Services) || h.Kubernetes.Less(f.Kubernetes) || !n.NoImages && h.Image.Less(f.Image); older && !c.Request.Release.Equal(h.Services) {
		if c.Request.WriteConfig {
			c.Out.Notes = append(c.Out.Notes, fmt.Sprintf("%s names newer versions than the cluster runs. `constellation upgrade check --write-config --to %s` writes those that run.", workspace.ConfigFile, h.Services))
		}
		return nil
	}
	m, err := c.measured(ctx, h.Image)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		if c.Request.WriteConfig {
			c.Out.Notes = append(c.Out.Notes, fmt.Sprintf("The measurements of the running image %s are not known: %v. Get them from its publisher, and write image and measurements by hand.", h.Image, err))
		}
		return nil
	}
	h.Measurements = m
	if err := c.edit(h); err != nil {
		return err
	}
	if len(c.Out.Config.Fields) == 0 {
		c.Out.Config = nil
	} else if !c.Request.WriteConfig {
		c.Out.Notes = append(c.Out.Notes, NoteOtherConfig)
	}
	return nil
}

// measured returns the measurements that the configuration enforces with another image. Registers
// that the new image is known to change get their new value. Registers known only of the old
// image are removed, those known only of the new image are added. All other registers belong to
// the user and stay. The result is nil if nothing is known about an image that the configuration
// already has.
func (c *Run) measured(ctx context.Context, v version.Version) (attestation.Measurements, error) {
	if c.Now.NoImages {
		return nil, nil
	}
	then, err := c.registersOf(ctx, v)
	switch {
	case err != nil && v.Equal(c.Config.Image):
		return nil, nil
	case err != nil:
		return nil, err
	}
	before, err := c.registersOf(ctx, c.Config.Image)
	if err != nil {
		before = then // added and removed registers are unknown
	}
	out := c.Config.Attestation.TPM2.Measurements.Clone()
	for _, i := range slices.Sorted(maps.Keys(then)) {
		m, demanded := out[i]
		if _, known := before[i]; demanded || !known {
			m.Expected = then[i]
			out[i] = m
		}
	}
	for i := range before {
		if _, ok := then[i]; !ok {
			delete(out, i)
		}
	}
	delete(out, workspace.PCRCluster) // of a machine that belongs to no cluster
	return out, nil
}

// Expected returns the configuration with the measurements of the machines that an upgrade makes: of
// the hop, or else of the release that the user named. A release that the cluster alone names does
// not count: an attacker in the cluster could name an old one.
func (c *Run) Expected(ctx context.Context) (*workspace.Config, error) {
	named := c.Request.Release
	switch {
	case c.Next != nil:
		return c.Next, nil
	case named.IsZero() || named.Equal(c.Config.Image) || c.Config.Attestation.TPM2 == nil:
		return c.Config, nil
	}
	m, err := c.measured(ctx, named)
	if err != nil {
		return nil, &plan.Error{
			Op: "read the measurements of image " + named.String(), Err: err,
			Remedy: "write image and measurements of the running control planes into " + workspace.ConfigFile + ", and leave --to out",
		}
	}
	return workspace.HopConfig{Image: named, Measurements: m}.Apply(c.Config), nil
}

// registersOf returns the measurements of a machine that booted an image. The cloud has those of
// its own images, the feed those of all others.
func (c *Run) registersOf(ctx context.Context, v version.Version) (map[uint32][]byte, error) {
	var text map[uint32]string
	if i := c.Image(v); i != nil {
		text = i.Measurements
	}
	if len(text) == 0 {
		var err error
		if text, err = c.Known.Measurements(ctx, v, c.Out.Provider); err != nil {
			return nil, err
		}
	}
	out := make(map[uint32][]byte, len(text))
	for i, s := range text {
		b, err := hex.DecodeString(s)
		if err != nil || !workspace.IsDigest(s) {
			return nil, fmt.Errorf("register %d of image %s is %q, which is no SHA-256 value", i, v, s)
		}
		out[i] = b
	}
	return out, nil
}

// RuleWeaker is the rule that every register stays enforced.
const RuleWeaker = "measurements-weaker"

func weakens(f plan.Finding) bool { return f.ID == RuleWeaker && f.Severity == plan.Block }

// weaker returns the expected values of the registers whose enforcement the configuration
// weakens.
func (c *Run) weaker(ctx context.Context) string {
	var now cluster.Demand
	if json.Unmarshal([]byte(c.Now.JoinConfig.Attestation), &now) != nil || c.Next == nil {
		return ""
	}
	of := c.Hop.To.Image
	known, err := c.registersOf(ctx, c.Hop.Planned().Image)
	if err != nil {
		c.Log.Debug("registers not known", "image", of, "err", err)
	}
	var out []string
	for _, i := range slices.Sorted(maps.Keys(now.Measurements)) {
		m := now.Measurements[i]
		if then, ok := c.Next.Attestation.TPM2.Measurements[i]; m.WarnOnly || ok && !then.WarnOnly {
			continue
		}
		if b, ok := known[i]; ok {
			out = append(out, fmt.Sprintf("PCR %d of image %s is %x", i, of, b))
			continue
		}
		out = append(out, fmt.Sprintf("PCR %d of image %s is not known (the cluster demands %x now)", i, of, m.Expected))
	}
	return strings.Join(out, "; ")
}

// planned is the next hop in the form that the rules take.
func (c *Run) planned() compat.Planned {
	to := c.Hop.Planned()
	if b, err := AttestationJSON(c.Next, c.State); err == nil {
		to.Attestation = b
	}
	return to
}

// Tell emits the results so far.
func (c *Run) Tell(emit func(plan.Event)) {
	c.Sort()
	data, err := json.Marshal(c.Out)
	if err != nil {
		c.Log.Warn("check not told", "err", err)
		return
	}
	ev := plan.Event{Kind: plan.KindCheck, Object: CheckVersions, Source: "versions", State: string(plan.Info), Text: "Versions and path", Time: c.Clock().UTC(), Data: data}
	if c.Down != nil {
		ev.State, ev.Text, ev.Remedy = string(plan.Block), c.Down.Error(), plan.Remedy(c.Down)
	}
	emit(ev)
}

// Foresee runs the preflight checks of the next hop, and reads from cluster and cloud what else
// it will change.
func (c *Run) Foresee(ctx context.Context, emit func(plan.Event)) error {
	switch {
	case c.Hop == nil:
		return c.foreseeUnknown(ctx, emit)
	case c.Request.NoPreflight:
		return nil
	}
	b, err := c.Ws.Kubeconfig()
	if err != nil {
		return err
	}
	i, err := c.Inspect(ctx, b)
	if err != nil {
		return c.ClusterDown(err)
	}
	to := c.Hop.Planned()
	r := PreflightRequest{
		From: c.Now.Kubernetes.Oldest, To: to.Kubernetes, Release: to.Services, Etcd: c.etcd(to), EtcdTag: c.Now.Target.Etcd, EtcdHop: to.Etcd, Surge: surge, DryRun: !c.Request.NoDryRun,
		ReplaceControlPlanes: c.Hop.ReplaceControlPlanes, ReplaceWorkers: c.Hop.ReplaceWorkers, NoImages: c.Now.NoImages,
	}
	hops := append([]PreflightRequest{r}, c.later(r)...)
	var found [][]plan.Finding
	var kinds, components error
	var list cluster.Components
	var outdated []string
	var wg sync.WaitGroup
	wg.Go(func() { found, err = i.Preflight(ctx, hops, emit) })
	wg.Go(func() {
		if kinds = errNotAsked; !c.Request.NoDryRun {
			outdated, kinds = c.outdated(ctx, b)
		}
	})
	wg.Go(func() { list, components = c.list(ctx, to.Kubernetes) })
	wg.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		c.preflightFailed(err)
	}
	for n, f := range found {
		if n > 0 {
			f = onlyLater(found[0], f)
			emit(plan.Event{Kind: plan.KindCheck, Object: laterHops, Source: "path", State: string(f[0].Severity), Text: f[0].Title, Time: c.Clock().UTC()})
		}
		c.Out.Findings = append(c.Out.Findings, f...)
	}
	if kinds == nil {
		c.Out.Changes.KindsAdded, c.Out.Changes.KindsChanged = nil, nil
		for _, k := range outdated {
			if slices.Contains(c.Now.Kinds, k) {
				c.Out.Changes.KindsChanged = append(c.Out.Changes.KindsChanged, k)
			} else {
				c.Out.Changes.KindsAdded = append(c.Out.Changes.KindsAdded, k)
			}
		}
	} else if !errors.Is(kinds, assets.ErrUnknownRelease) && !errors.Is(kinds, errNotAsked) {
		c.Log.Debug("kinds not compared", "err", kinds)
	}
	if components == nil {
		c.judgeAgents(ctx, b, list)
	}
	c.judgePackages(ctx, b)
	if components == nil && list.Name != c.Now.Target.Components {
		c.Out.Changes.ConfigMaps = append([]string{"kube-system/" + list.Name + " (new)"}, c.Out.Changes.ConfigMaps...)
	}
	return nil
}

// errNotAsked is the cause of a check that the request excludes.
var errNotAsked = errors.New("not asked")

// laterHops is the ID of the preflight check for hops after the next one.
const laterHops = "later-hops"

// later combines the hops after the next one; nil if there are none.
func (c *Run) later(r PreflightRequest) []PreflightRequest {
	if len(c.Path) < 2 {
		return nil
	}
	end := c.Path[len(c.Path)-1].Planned()
	r.To, r.Release, r.Etcd, r.EtcdHop = end.Kubernetes, end.Services, c.etcd(end), ""
	for i, h := range c.Path {
		if i < len(c.Path)-1 && h.To.Etcd != "" {
			r.EtcdBefore, r.EtcdTag = h.To.Etcd, h.To.Etcd
		}
	}
	for _, h := range c.Path[1:] {
		r.ReplaceControlPlanes = r.ReplaceControlPlanes || h.ReplaceControlPlanes
		r.ReplaceWorkers = r.ReplaceWorkers || h.ReplaceWorkers
	}
	return []PreflightRequest{r}
}

// onlyLater returns the obstacles that block later hops but not the next one, as far as they can
// be predicted. They do not block yet, so they are warnings. It returns at least one finding.
func onlyLater(next, later []plan.Finding) (out []plan.Finding) {
	for _, f := range later {
		told := slices.ContainsFunc(next, func(o plan.Finding) bool {
			return o.ID == f.ID && (o.Title == f.Title || len(f.Objects) > 0 && slices.Equal(o.Objects, f.Objects))
		})
		if f.Severity == plan.Info || f.Severity == plan.NotChecked || told {
			continue
		}
		f.Severity, f.Title = plan.Warn, "a later hop: "+f.Title
		out = append(out, f)
	}
	if len(out) == 0 {
		out = []plan.Finding{{ID: laterHops, Severity: plan.Info, Title: "preflight of later hops found no problem", Source: "path"}}
	}
	return out
}

// etcd returns the tag of etcd after a hop; empty if it is unknown.
func (c *Run) etcd(to compat.Planned) string {
	if to.Etcd != "" {
		return to.Etcd
	}
	if s := c.summary(to.Services); s != nil {
		for _, k := range s.Kubernetes {
			if k.Version.Equal(to.Kubernetes) {
				return k.Etcd
			}
		}
	}
	return ""
}

// EtcdTag returns the tag that the target of the next hop names: that of a hop of etcd, or the one
// that an earlier such hop has set, until Kubernetes brings that etcd or a newer one itself.
func (c *Run) EtcdTag() string {
	to, set := c.Hop.Planned(), c.Now.Target.Etcd
	if to.Etcd != "" || set == "" {
		return to.Etcd
	}
	if brings := cluster.EtcdVersion(c.etcd(to)); brings.Less(cluster.EtcdVersion(set)) { // zero: the release does not name it
		return set
	}
	return ""
}

// Etcd returns the version of etcd after the next hop; zero if it is unknown.
func (c *Run) Etcd() version.Version {
	return cluster.EtcdVersion(cmp.Or(c.EtcdTag(), c.etcd(c.Hop.Planned())))
}

// EtcdOf returns the version of etcd that members run at a target; zero if it is unknown.
func (c *Run) EtcdOf(t cluster.NodeTarget) version.Version {
	kubernetes, err := version.Parse(t.Kubernetes)
	if t.Etcd != "" || err != nil {
		return cluster.EtcdVersion(t.Etcd)
	}
	return cluster.EtcdVersion(c.etcd(compat.Planned{Services: c.Now.Services.Newest, Kubernetes: kubernetes}))
}

// outdated lists, by a server-side dry run, the definitions of the next hop's release that the
// cluster lacks or has in another form.
func (c *Run) outdated(ctx context.Context, kubeconfig []byte) ([]string, error) {
	want, err := c.kindsOf(ctx, c.Hop.Planned().Services)
	if err != nil {
		return nil, err
	}
	k, err := c.Connect(ctx, kubeconfig)
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, CheckLimit)
	defer cancel()
	return k.OutdatedKinds(limited, want)
}

// list returns the components that nodes install in the next hop. Their statement is the cloud's
// or, without one, the feed's. The error wraps release.ErrUntrusted if the feed's statement is
// not genuine.
func (c *Run) list(ctx context.Context, v version.Version) (cluster.Components, error) {
	if c.Cloud == nil {
		return cluster.Components{}, c.silent
	}
	limited, cancel := context.WithTimeout(ctx, CheckLimit)
	defer cancel()
	l, err := c.Cloud.Components(limited, v)
	if err == nil && l.Statement == "" && c.Hop != nil {
		l.Statement, err = c.Known.Vouch(limited, c.Hop.Planned().Services, v, c.arch, l.List)
		if running := c.Now.Services.Oldest; err == nil && l.Statement == "" && running != c.Hop.Planned().Services {
			l.Statement, err = c.Known.Vouch(limited, running, v, c.arch, l.List) // components in use can be older than the target
		}
		if err != nil {
			err = statementError{err}
		}
	}
	out := cluster.Components{Name: cluster.ComponentsName(l.List), Kubernetes: v.String(), List: l.List, Statement: l.Statement, Agent: l.Agent}
	if out.Name == c.Now.Target.Components {
		out.Agent = nil // otherwise the nodes would count as enrolled
	}
	if out.Agent != nil {
		out.Unenrolled = withComponents(c.Now.Nodes, out.Name)
	}
	return out, err
}

// statementError is the reason why the feed's statement on components is missing. The fault lies
// with the feed or this computer, not with the cloud.
type statementError struct{ error }

func (e statementError) Unwrap() error { return e.error }

// Write replaces the configuration if the request includes that.
func (c *Run) Write() error {
	if !c.Request.WriteConfig {
		return nil
	}
	for _, f := range c.Out.Findings {
		if weakens(f) {
			c.Out.Notes = append(c.Out.Notes, fmt.Sprintf("--write-config leaves measurements weakened: %s (%s); %s.", f.Title, f.Detail, f.Remedy))
		}
	}
	if c.Out.Config == nil || len(c.Out.Config.Fields) == 0 {
		note := "Nothing to write: " + workspace.ConfigFile + " has the values of the next hop already."
		switch {
		case c.Hop == nil:
			note = "Nothing to write: there is no next hop."
		case slices.ContainsFunc(c.Out.Findings, weakens):
			note = "Nothing else to write: " + workspace.ConfigFile + " has the values of the next hop already, except the measurements."
		}
		c.Out.Notes = append(c.Out.Notes, note)
		return nil
	}
	if err := c.Ws.UpdateConfig(c.text, c.edited); err != nil {
		return err
	}
	c.Out.Config.Written = true
	// Drop findings about values that the new configuration replaced.
	c.Out.Findings = slices.DeleteFunc(c.Out.Findings, func(f plan.Finding) bool { return f.ID == CheckConfigTarget })
	return nil
}

// Finish sorts the findings and sets the exit code.
func (c *Run) Finish() {
	c.Sort()
	blocked := func(f plan.Finding) bool { return f.Severity == plan.Block }
	switch {
	case c.Hop != nil && !slices.ContainsFunc(c.Out.Findings, blocked):
		c.Out.Exit = plan.ExitUpgradeAvailable
	case c.Hop != nil || slices.ContainsFunc(c.Out.Findings, blocked) || len(c.Out.Blocked) > 0 && !c.asked():
		c.Out.Exit = plan.ExitBlocked
	}
}

// Sort moves the worst findings to the front, after the one that says what this program does not
// know. It is stable.
func (c *Run) Sort() { SortFindings(c.Out.Findings) }

// SortFindings is [Run.Sort] for other lists.
func SortFindings(found []plan.Finding) {
	order := []plan.Severity{plan.Block, plan.Warn, plan.NotChecked, plan.Info}
	rank := func(f plan.Finding) int {
		if f.ID == FindingData {
			return -1
		}
		return slices.Index(order, f.Severity)
	}
	slices.SortStableFunc(found, func(a, b plan.Finding) int { return cmp.Compare(rank(a), rank(b)) })
}

// AttestationJSON is the attestation policy that the join service enforces under a configuration, for the machines of a
// state; empty for an adopted cluster, which has none.
func AttestationJSON(c *workspace.Config, s *workspace.State) (string, error) {
	d := cluster.Demand{Variant: string(attestation.TPM2), Measurements: c.Attestation.TPM2.Measurements}
	p, ok := providers.Named(c.Provider.Name)
	if ok && s != nil {
		p = p.At(s.Infrastructure.Section)
	}
	if ok && p.Attestation.Variant != "" {
		d.Variant = string(p.Attestation.Variant)
	}
	if ok && p.Attestation.Unmeasured {
		d.Measurements = attestation.Measurements{}
	} else if d.Measurements == nil {
		return "", nil
	}
	b, err := json.Marshal(d)
	if err != nil {
		return "", fmt.Errorf("marshal measurements: %w", err)
	}
	return string(b), nil
}

// IDs of the steps of init.
const (
	StepTarget = "set-target"
)
