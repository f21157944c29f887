package engine

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
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/rollout"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// CheckVersions is the Object of the check event that carries the versions and the path:
// a [Check] without what takes longer, in Data.
const CheckVersions = "versions"

// surge is how many machines a rollout makes beyond the wanted number.
const surge = 1

// checkLimit bounds how long the cluster is asked which versions it runs, and how long
// the cloud is asked what it has.
const checkLimit = 15 * time.Second

// Check says what may be gone to from what runs, by which path, what the next hop will
// change and what it would trip over. It changes nothing but the configuration, and that
// only if the request says so.
//
// emit gets a check event called CheckVersions as soon as versions and path are known,
// then those of the preflight; calls do not overlap. If the cluster cannot be asked, the
// event and the result hold what is known without it, and the error says why; it has
// ExitUsage if workspace or request are at fault.
//
// Exit of the result is ExitBlocked if there is something newer and no way to it, or the
// preflight forbids the next hop; ExitUpgradeAvailable if there is a next hop; else zero.
func (e *Engine) Check(ctx context.Context, r CheckRequest, emit func(plan.Event)) (Check, error) {
	c := &checkRun{e: e, request: r}
	if err := c.begin(); err != nil {
		return Check{}, err
	}
	if err := c.look(ctx); err != nil {
		return Check{}, err
	}
	if c.down != nil {
		c.without()
		c.tell(emit)
		return c.out, c.down
	}
	if err := c.decide(ctx); err != nil {
		return Check{}, err
	}
	c.tell(emit)
	if err := c.foresee(ctx, emit); err != nil {
		return Check{}, err
	}
	if err := c.foreseeCharts(ctx); err != nil {
		return Check{}, err
	}
	if err := c.write(); err != nil {
		c.sort()
		c.out.Exit = plan.ExitCode(err)
		return c.out, err
	}
	c.finish()
	return c.out, nil
}

// checkRun is one check and what it has learned. Its methods run one after the other.
type checkRun struct {
	e       *Engine
	request CheckRequest
	cli     version.Version
	out     Check

	text     []byte // of the configuration
	config   *workspace.Config
	state    *workspace.State
	location string // of the feed
	keys     []release.Key

	now  compat.Running
	down error // why the cluster could not be asked

	provider   Provider
	images     []cloud.Image
	kubernetes []version.Version // that the cloud has; nil if it has what releases name
	arch       string            // of machines
	silent     error             // why the cloud could not be asked

	known    *knowledge
	fetched  map[string]*chart.Chart // of the hop
	releases []release.Summary       // oldest first
	past     rollout.History

	matrix *compat.Matrix
	offer  compat.Offer
	goal   compat.Planned
	there  bool // what the request asks for runs already
	path   []compat.Hop
	hop    *compat.Hop          // the first of path; nil if there is none
	inUse  []cluster.Components // that get a statement in the hop
	enrols []cluster.Node       // whose agents get to verify in the hop
	next   *workspace.Config    // nil if there is no hop
	edited []byte               // the configuration with the values of the next hop; nil if it is not to be written
	// unmeasured is why the measurements of the next hop's image are not known.
	unmeasured error

	// prepares says that the next hop is to be prepared: it may be another one than that of
	// the shortest path then, and is as the configuration has it if configured is set.
	prepares, configured bool
	// applies says that the hop is also carried out, beginning with the services.
	applies      bool
	acknowledged []string // IDs of findings
}

// begin reads the workspace.
func (c *checkRun) begin() (err error) {
	e := c.e
	if c.cli, err = version.Parse(version.Release); err != nil {
		return fmt.Errorf("read own version: %w", err)
	}
	if c.config, c.state, err = e.load(); err != nil {
		return err
	}
	// Read again: what is edited must be what was looked at.
	if c.text, err = e.ws.ReadConfig(); err != nil {
		return err
	}
	if c.config, err = workspace.ParseConfig(c.text); err != nil {
		return &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "correct the file; `constellation config validate` checks it again"}
	}
	if !e.ws.Has(workspace.KubeconfigFile) {
		err := &plan.Error{Op: "check for upgrades", Err: e.ws.Absent(workspace.KubeconfigFile), Exit: plan.ExitUsage, Remedy: "create the cluster first: `" + e.command("init") + "`"}
		runs, _ := e.Runs() // without them less is known
		switch {
		case len(c.state.ClusterValues.ClusterID) == 0:
		case e.ws.Has(workspace.PendingFile):
			err.Remedy = "the cluster was begun and is not complete: `" + e.command("init") + "` goes on"
		case completed(e.ws, runs):
			err.Remedy = restoreKubeconfig
		default:
			err.Remedy = "if the cluster was complete before, " + restoreKubeconfig + ". If it never was: `" + e.command("init") + "` goes on"
		}
		return err
	}
	c.location, c.keys, err = e.feedOf(c.config, c.request)
	if err != nil {
		return err
	}
	c.out = Check{
		Schema: plan.Schema, Cluster: c.config.Name, Simulated: e.simulated(), Provider: c.config.Provider.Name(), Time: e.now().UTC(), CLI: c.cli.String(),
		Components: []plan.ComponentCheck{}, Path: []compat.Hop{}, Findings: []plan.Finding{},
	}
	return nil
}

// look asks cluster, cloud and releases at the same time.
func (c *checkRun) look(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() {
		limited, cancel := context.WithTimeout(ctx, checkLimit)
		defer cancel()
		b, err := c.e.ws.Kubeconfig()
		var i Inspector
		if err == nil {
			if i, err = c.e.inspect(limited, b); err != nil {
				c.down = c.e.ws.BadKubeconfig(err)
				return
			}
		}
		if err == nil {
			c.now, err = i.Running(limited)
		}
		if c.down = c.clusterDown(err); c.down != nil {
			c.now = compat.Running{}
		} else if c.now.Services.IsZero() || c.now.ControlPlaneImage.IsZero() || c.now.Kubernetes.IsZero() {
			c.down = c.denied() // nothing can be planned
		}
	})
	wg.Go(func() {
		limited, cancel := context.WithTimeout(ctx, checkLimit)
		defer cancel()
		c.silent = c.askCloud(limited)
	})
	var releasesErr error
	wg.Go(func() {
		if c.known, releasesErr = c.e.learnReleases(ctx, c.location, c.keys); releasesErr == nil {
			c.releases, releasesErr = c.known.summaries(ctx)
		}
	})
	wg.Go(func() { c.past = rollout.ReadHistory(c.e.ws.Path(plan.RunsDir)) })
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	if releasesErr != nil {
		return releasesErr
	}
	c.out.Feed = c.known.state
	id := hex.EncodeToString(c.state.ClusterValues.ClusterID)
	if j := c.now.JoinConfig; c.down == nil && j.ClusterID != "" && j.ClusterID != id {
		return c.e.ws.ForeignKubeconfig()
	}
	return nil
}

// askCloud learns what the cloud has. A foreign cloud is as good as none.
func (c *checkRun) askCloud(ctx context.Context) error {
	p, err := c.e.provider(ctx, c.config, c.state)
	if err != nil {
		return err
	}
	about, err := p.Describe(ctx)
	if err != nil {
		return err
	}
	if about.UID != c.state.Infrastructure.UID {
		return &plan.Error{
			Err:    fmt.Errorf("it is not the one of %s: it was made anew", workspace.StateFile),
			Remedy: "the cluster went with the earlier sandbox: use another directory with -C, or move this one's files away",
		}
	}
	if c.images, err = p.Images(ctx); err != nil {
		return err
	}
	c.provider, c.kubernetes, c.arch = p, about.Kubernetes, cmp.Or(about.Arch, runtime.GOARCH)
	return nil
}

// clusterDown puts why a cluster cannot be asked into the user's words.
func (c *checkRun) clusterDown(err error) error {
	if err == nil {
		return nil
	}
	out := &plan.Error{Op: "ask the cluster which versions it runs", Err: err}
	switch {
	case errors.Is(err, cluster.ErrForbidden):
		out.Remedy = "use a kubeconfig that may do this, such as the one that `constellation init` wrote"
	case errors.Is(err, cluster.ErrDenied):
		out.Remedy = workspace.KubeconfigFile + " is not of this cluster or not its administrator's: restore the file"
	case errors.Is(err, cluster.ErrUnreachable) || errors.Is(err, context.DeadlineExceeded):
		out.Err = fmt.Errorf("the API server at %s does not answer: %w", c.state.Infrastructure.ClusterEndpoint, err)
		out.Remedy = "is the control plane up? `" + c.e.command("status") + "` tells what the cloud knows; run the same command again afterwards"
	default:
		out.Remedy = "`" + c.e.command("status") + "` tells more"
	}
	return out
}

// denied is why the cluster could not be asked if the API server refused to tell; nil
// if it did not.
func (c *checkRun) denied() error {
	f := deniedFinding(c.now.Denied)
	if f == nil {
		return nil
	}
	return &plan.Error{Op: "ask the cluster which versions it runs", Err: fmt.Errorf("%w: %s", cluster.ErrForbidden, f.Detail), Remedy: f.Remedy}
}

// plainUser are the names that a shell takes as they are.
var plainUser = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9:@._-]*$`)

// deniedFinding is the one finding about all reads that the API server refused, and how
// to allow them; nil if there are none.
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
		ID: runningDenied, Severity: plan.NotChecked, Source: "versions", Title: who + " may not read all that tells which versions run",
		Detail: "the API server refused to " + words.And(reads), Reference: "https://kubernetes.io/docs/reference/access-authn-authz/rbac/",
		Remedy: "use a kubeconfig that may, such as the one that `constellation init` wrote, or let an administrator allow it",
	}
	if slices.ContainsFunc(denied, func(d cluster.Denial) bool { return d.User == "" }) {
		return f // in words that no command can be made of
	}
	f.Command = fmt.Sprintf("kubectl create clusterrole constellation-check --verb=%s --resource=%s && kubectl create clusterrolebinding constellation-check --clusterrole=constellation-check %s",
		strings.Join(slices.Compact(verbs), ","), strings.Join(slices.Compact(resources), ","), subject)
	f.Remedy += ": `" + f.Command + "`"
	return f
}

// runningDenied is the ID of the finding about what the API server refused to tell.
const runningDenied = "running-denied"

// without fills what can be told without the cluster, or with the little that it told.
func (c *checkRun) without() {
	if f := deniedFinding(c.now.Denied); f != nil {
		f.Severity = plan.Block
		c.find(*f)
	} else {
		c.find(plan.Finding{
			ID: "api-server", Severity: plan.Block, Title: "the cluster could not be asked", Detail: c.down.Error(), Remedy: plan.Remedy(c.down), Source: "versions",
		})
	}
	c.matrix = compat.NewMatrix(c.releases)
	c.judgeFeed()
	c.judgeCloud()
	c.components(nil)
	for i := range c.out.Components {
		if r := &c.out.Components[i]; r.Kind != rowCLI {
			r.Verdict = "not known"
		}
	}
	c.out.Exit = plan.ExitCode(c.down)
}

// decide works out versions, path and what the next hop writes.
func (c *checkRun) decide(ctx context.Context) error {
	c.matrix = compat.NewMatrix(c.releases)
	c.offer = c.offers()
	c.out.Current = plan.Target{Release: c.now.Services.String(), Image: c.now.ControlPlaneImage.Add(c.now.WorkerImage.Oldest).Add(c.now.WorkerImage.Newest).String(), Kubernetes: c.now.Kubernetes.String()}

	var results []*compat.RuleResult
	for read := map[string]bool{}; ; c.matrix = compat.NewMatrix(c.releases) {
		c.goal = compat.Planned{Services: c.request.Release, Kubernetes: c.request.Kubernetes}
		if c.asked() {
			c.path, results = c.matrix.Path(c.now, c.goal, c.offer)
			c.there = len(c.path)+len(results) == 0
		}
		if !c.there {
			c.goal = c.matrix.Goal(c.now, c.goal, c.offer)
			c.path, results = c.matrix.Path(c.now, c.goal, c.offer)
		}
		if !c.refuse(ctx, read) {
			break
		}
	}
	if c.prepares {
		c.choose()
	}
	c.out.Path = append(c.out.Path, c.path...)
	c.out.Goal = c.reached()
	if len(c.path) > 0 {
		c.hop = &c.path[0]
		if c.configured {
			c.next = c.config
		} else if err := c.prepare(ctx); err != nil {
			return err
		}
		results = c.matrix.Check(c.hop.CLI, c.now, c.planned(), c.offer)
	}
	for _, r := range results {
		f := plan.Finding{ID: r.Rule, Severity: r.Severity, Title: r.Title, Remedy: r.Remedy, Reference: r.Reference, Source: "matrix"}
		if weakens(f) {
			f.Detail = c.weaker(ctx)
		}
		c.find(f)
	}
	reach := c.matrix.Reachable(c.cli, c.now, c.offer)
	for _, r := range reach {
		if c.there {
			break // nobody asks for what is newer
		}
		c.out.Blocked = append(c.out.Blocked, r.Blocked...)
	}
	c.beyond()
	c.components(reach)
	c.judgeRunning()
	c.judgeConfig()
	c.judgeMeasured()
	c.judgeFeed()
	c.judgeCloud()
	c.out.Notes = append(c.out.Notes, c.matrix.Notes(c.cli, c.now)...)
	switch {
	case c.hop != nil:
		c.out.Changes = c.changes(ctx)
		if !c.prepares { // which destroys nothing
			last, err := c.e.lastBackup(c.state)
			c.find(c.e.backupFinding(last, err))
		}
	case c.there:
		c.out.Notes = append(c.out.Notes, "What is asked for runs already.")
	case len(results) == 0 && len(c.out.Blocked) == 0:
		c.out.Notes = append(c.out.Notes, "Nothing that is known is newer than what runs.")
	}
	return nil
}

// beyond says why versions of Kubernetes that are newer than where the path ends cannot
// be gone to from there: what is in the way now the path clears.
func (c *checkRun) beyond() {
	if len(c.path) == 0 {
		return
	}
	end := c.path[len(c.path)-1].Planned()
	at := compat.Running{
		Services: compat.At(end.Services), ControlPlaneImage: compat.At(end.Image), Kubernetes: compat.At(end.Kubernetes), ControlPlaneKubelet: compat.At(end.Kubernetes),
		JoinConfig: c.now.JoinConfig,
	}
	if !c.now.WorkerKubelet.IsZero() {
		at.WorkerImage, at.WorkerKubelet = compat.At(end.Image), compat.At(end.Kubernetes)
	}
	for i := range c.out.Blocked {
		b := &c.out.Blocked[i]
		v, err := version.Parse(b.Version)
		if err != nil || b.Component != rowKubernetes || !end.Kubernetes.Less(v) {
			continue
		}
		if found := compat.Blocks(c.matrix.Check(end.Services, at, compat.Planned{Services: end.Services, Image: end.Image, Kubernetes: v}, c.offer)); len(found) > 0 {
			b.Rule, b.Reason, b.Remedy, b.Reference = found[0].Rule, found[0].Title, found[0].Remedy, found[0].Reference
		}
	}
}

// asked reports whether the request names a goal.
func (c *checkRun) asked() bool { return !c.request.Release.IsZero() || !c.request.Kubernetes.IsZero() }

// reached is where the path ends.
func (c *checkRun) reached() plan.Target {
	if n := len(c.path); n > 0 {
		return c.path[n-1].To
	}
	return plan.Target{
		Release: cmp.Or(c.goal.Services.String(), c.now.Services.Oldest.String()), Image: cmp.Or(c.goal.Image.String(), c.now.ControlPlaneImage.Oldest.String()),
		Kubernetes: cmp.Or(c.goal.Kubernetes.String(), c.now.Kubernetes.Oldest.String()),
	}
}

// offers is the cloud's word. What a cloud that does not answer has is not known, and
// told as such; it forbids nothing.
func (c *checkRun) offers() compat.Offer {
	if c.silent != nil {
		return compat.Offer{}
	}
	o := compat.Offer{Images: func(v version.Version) (bool, string, string) {
		if c.image(v) != nil {
			return true, "", ""
		}
		var have []string
		for _, i := range c.images {
			have = append(have, i.Version)
		}
		return false, "the cloud has no image " + v.String(), "the cloud has " + words.And(have) + "; the sandbox of constellation " + v.String() + " has this one"
	}}
	if c.kubernetes != nil {
		o.Kubernetes = func(v version.Version) (bool, string, string) {
			if slices.ContainsFunc(c.kubernetes, v.Equal) {
				return true, "", ""
			}
			why := "the mirror has no " + v.String()
			if b := c.e.buildable; len(b) > 0 && !slices.Contains(b, v.String()) {
				return false, why, "of this Kubernetes a sandbox can have " + words.Or(b) + " only"
			}
			return false, why, "`constellation sandbox fetch " + v.String() + "`"
		}
	}
	return o
}

// image returns the cloud's image of a release; nil if it has none.
func (c *checkRun) image(v version.Version) *cloud.Image {
	for i := range c.images {
		if x, err := version.Parse(c.images[i].Version); err == nil && x.Equal(v) {
			return &c.images[i]
		}
	}
	return nil
}

// summary returns what is known about a release; nil if nothing is.
func (c *checkRun) summary(v version.Version) *release.Summary {
	for i := range c.releases {
		if c.releases[i].Version.Equal(v) {
			return &c.releases[i]
		}
	}
	return nil
}

// prepare works out the configuration of the next hop.
func (c *checkRun) prepare(ctx context.Context) error {
	to := c.hop.Planned()
	behind := !c.now.WorkerKubelet.IsZero() && (!c.now.WorkerKubelet.Is(to.Kubernetes) || !c.now.WorkerImage.Is(to.Image))
	h := workspace.HopConfig{Image: to.Image, Services: to.Services, Kubernetes: to.Kubernetes, KeepWorkers: to.KeepWorkers && c.hop.ReplaceControlPlanes && behind}
	if h.Measurements, c.unmeasured = c.measured(ctx, to.Image); ctx.Err() != nil {
		return ctx.Err()
	}
	c.next = h.Apply(c.config)
	out, fields, err := workspace.EditConfig(c.text, h)
	switch {
	case err != nil && c.request.WriteConfig:
		return err
	case err != nil:
		c.out.Notes = append(c.out.Notes, fmt.Sprintf("--write-config cannot be used: %v; %s", err, plan.Remedy(err)))
		c.out.Config = &ConfigChange{Path: c.e.ws.Path(workspace.ConfigFile), Fields: []workspace.FieldChange{}}
	case c.unmeasured != nil && c.request.WriteConfig:
		return &plan.Error{
			Op: "write " + c.e.ws.Path(workspace.ConfigFile), Err: fmt.Errorf("the measurements of image %s are not known: %w", to.Image, c.unmeasured),
			Remedy: "image and measurements belong together: get them from whoever published the image, and write both by hand",
		}
	default:
		c.out.Config = &ConfigChange{Path: c.e.ws.Path(workspace.ConfigFile), Fields: append([]workspace.FieldChange{}, fields...)}
		c.edited = out
	}
	return nil
}

// measured returns what the configuration demands with another image: registers that
// the new image is known to leave otherwise get their new value, those that only the old
// one is known to leave go, those that only the new one does come. Others are the
// user's own and stay. Nil if nothing is known about an image that the configuration has
// already.
func (c *checkRun) measured(ctx context.Context, v version.Version) (attestation.Measurements, error) {
	then, err := c.registersOf(ctx, v)
	switch {
	case err != nil && v.Equal(c.config.Image):
		return nil, nil
	case err != nil:
		return nil, err
	}
	before, err := c.registersOf(ctx, c.config.Image)
	if err != nil {
		before = then // what comes and goes is not known
	}
	out := c.config.Attestation.TPM2.Measurements.Clone()
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

// registersOf returns what a machine that booted an image has measured: the cloud knows
// its own images, the feed all others.
func (c *checkRun) registersOf(ctx context.Context, v version.Version) (map[uint32][]byte, error) {
	var text map[uint32]string
	if i := c.image(v); i != nil {
		text = i.Measurements
	}
	if len(text) == 0 {
		var err error
		if text, err = c.known.measurements(ctx, v, c.out.Provider); err != nil {
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

// ruleWeaker is the rule that no register is enforced less.
const ruleWeaker = "measurements-weaker"

func weakens(f plan.Finding) bool { return f.ID == ruleWeaker && f.Severity == plan.Block }

// weaker says which values the registers should have that the configuration weakens.
func (c *checkRun) weaker(ctx context.Context) string {
	var now cluster.Demand
	if json.Unmarshal([]byte(c.now.JoinConfig.Attestation), &now) != nil || c.next == nil {
		return ""
	}
	of := c.hop.To.Image
	known, err := c.registersOf(ctx, c.hop.Planned().Image)
	if err != nil {
		c.e.log.Debug("registers not known", "image", of, "err", err)
	}
	var out []string
	for _, i := range slices.Sorted(maps.Keys(now.Measurements)) {
		m := now.Measurements[i]
		if then, ok := c.next.Attestation.TPM2.Measurements[i]; m.WarnOnly || ok && !then.WarnOnly {
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

// planned is the next hop as the rules take it.
func (c *checkRun) planned() compat.Planned {
	to := c.hop.Planned()
	if b, err := attestationJSON(c.next); err == nil {
		to.Attestation = b
	}
	return to
}

// tell emits what is known so far.
func (c *checkRun) tell(emit func(plan.Event)) {
	c.sort()
	data, err := json.Marshal(c.out)
	if err != nil {
		c.e.log.Warn("check not told", "err", err)
		return
	}
	ev := plan.Event{Kind: plan.KindCheck, Object: CheckVersions, Source: "versions", State: string(plan.Info), Text: "Versions and path", Time: c.e.now().UTC(), Data: data}
	if c.down != nil {
		ev.State, ev.Text, ev.Remedy = string(plan.Block), c.down.Error(), plan.Remedy(c.down)
	}
	emit(ev)
}

// foresee makes the preflight of the next hop, and asks cluster and cloud what else it
// will change.
func (c *checkRun) foresee(ctx context.Context, emit func(plan.Event)) error {
	if c.hop == nil || c.request.NoPreflight {
		return nil
	}
	b, err := c.e.ws.Kubeconfig()
	if err != nil {
		return err
	}
	i, err := c.e.inspect(ctx, b)
	if err != nil {
		return c.clusterDown(err)
	}
	to := c.hop.Planned()
	r := PreflightRequest{
		From: c.now.Kubernetes.Oldest, To: to.Kubernetes, Release: to.Services, Etcd: c.etcd(to), Surge: surge, DryRun: !c.request.NoDryRun,
		ReplaceControlPlanes: c.hop.ReplaceControlPlanes, ReplaceWorkers: c.hop.ReplaceWorkers,
	}
	hops := append([]PreflightRequest{r}, c.later(r)...)
	var found [][]plan.Finding
	var kinds, components error
	var list cluster.Components
	var outdated []string
	var wg sync.WaitGroup
	wg.Go(func() { found, err = i.Preflight(ctx, hops, emit) })
	wg.Go(func() {
		if kinds = errNotAsked; !c.request.NoDryRun {
			outdated, kinds = c.outdated(ctx, b)
		}
	})
	wg.Go(func() { list, components = c.list(ctx, to.Kubernetes) })
	wg.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		why := c.clusterDown(err)
		c.find(plan.Finding{
			ID: "preflight", Severity: plan.NotChecked, Title: "not checked what the hop would trip over", Detail: why.Error(), Remedy: plan.Remedy(why), Source: "preflight",
		})
	}
	for n, f := range found {
		if n > 0 {
			f = onlyLater(found[0], f)
			emit(plan.Event{Kind: plan.KindCheck, Object: laterHops, Source: "path", State: string(f[0].Severity), Text: f[0].Title, Time: c.e.now().UTC()})
		}
		c.out.Findings = append(c.out.Findings, f...)
	}
	if kinds == nil {
		c.out.Changes.KindsAdded, c.out.Changes.KindsChanged = nil, nil
		for _, k := range outdated {
			if slices.Contains(c.now.Kinds, k) {
				c.out.Changes.KindsChanged = append(c.out.Changes.KindsChanged, k)
			} else {
				c.out.Changes.KindsAdded = append(c.out.Changes.KindsAdded, k)
			}
		}
	} else if !errors.Is(kinds, assets.ErrUnknownRelease) && !errors.Is(kinds, errNotAsked) {
		c.e.log.Debug("kinds not compared", "err", kinds)
	}
	if components == nil {
		c.judgeAgents(ctx, b, list)
	}
	if components == nil && list.Name != c.now.Target.Components {
		c.out.Changes.ConfigMaps = append([]string{"kube-system/" + list.Name + " (new)"}, c.out.Changes.ConfigMaps...)
	}
	return nil
}

// errNotAsked means that the request leaves a question out.
var errNotAsked = errors.New("not asked")

// laterHops is the ID of the check of what comes after the next hop.
const laterHops = "later-hops"

// later is what the hops after the next one do, taken together; nothing if there are
// none.
func (c *checkRun) later(r PreflightRequest) []PreflightRequest {
	if len(c.path) < 2 {
		return nil
	}
	end := c.path[len(c.path)-1].Planned()
	r.To, r.Release, r.Etcd = end.Kubernetes, end.Services, c.etcd(end)
	for _, h := range c.path[1:] {
		r.ReplaceControlPlanes = r.ReplaceControlPlanes || h.ReplaceControlPlanes
		r.ReplaceWorkers = r.ReplaceWorkers || h.ReplaceWorkers
	}
	return []PreflightRequest{r}
}

// onlyLater returns what later hops would trip over and the next one does not, as far as
// it can be seen from here. Nothing of it is in the way yet, so it only warns. There is
// one finding at least.
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
		out = []plan.Finding{{ID: laterHops, Severity: plan.Info, Title: "the hops after the next one find nothing in their way that can be seen from here", Source: "path"}}
	}
	return out
}

// etcd returns the tag of etcd after a hop; empty if it is not known.
func (c *checkRun) etcd(to compat.Planned) string {
	if s := c.summary(to.Services); s != nil {
		for _, k := range s.Kubernetes {
			if k.Version.Equal(to.Kubernetes) {
				return k.Etcd
			}
		}
	}
	return ""
}

// outdated asks the cluster, by a dry run, which definitions of the next hop's release it
// does not have just so.
func (c *checkRun) outdated(ctx context.Context, kubeconfig []byte) ([]string, error) {
	want, err := c.kindsOf(ctx, c.hop.Planned().Services)
	if err != nil {
		return nil, err
	}
	k, err := c.e.connect(ctx, kubeconfig)
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	return k.OutdatedKinds(limited, want)
}

// list returns what nodes install in the next hop, with the statement of the cloud or, if that
// has none, of the feed. The error wraps release.ErrUntrusted if the feed's is not genuine.
func (c *checkRun) list(ctx context.Context, v version.Version) (cluster.Components, error) {
	if c.provider == nil {
		return cluster.Components{}, c.silent
	}
	limited, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	l, err := c.provider.Components(limited, v)
	if err == nil && l.Statement == "" && c.hop != nil {
		l.Statement, err = c.known.vouch(limited, c.hop.Planned().Services, v, c.arch, l.List)
		if running := c.now.Services.Oldest; err == nil && l.Statement == "" && running != c.hop.Planned().Services {
			l.Statement, err = c.known.vouch(limited, running, v, c.arch, l.List) // components in use can be older than the target
		}
		if err != nil {
			err = statementError{err}
		}
	}
	out := cluster.Components{Name: cluster.ComponentsName(l.List), Kubernetes: v.String(), List: l.List, Statement: l.Statement, Agent: l.Agent}
	if out.Name == c.now.Target.Components {
		out.Agent = nil // it would say that the nodes were enrolled
	}
	if out.Agent != nil {
		out.Unenrolled = withComponents(c.now.Nodes, out.Name)
	}
	return out, err
}

// statementError is why the feed's statement over components is not there: the feed's fault or
// that of this computer, and not the cloud's.
type statementError struct{ error }

func (e statementError) Unwrap() error { return e.error }

// write replaces the configuration, if that is asked for.
func (c *checkRun) write() error {
	if !c.request.WriteConfig {
		return nil
	}
	for _, f := range c.out.Findings {
		if weakens(f) {
			c.out.Notes = append(c.out.Notes, fmt.Sprintf("--write-config leaves measurements weakened: %s (%s); %s.", f.Title, f.Detail, f.Remedy))
		}
	}
	if c.out.Config == nil || len(c.out.Config.Fields) == 0 {
		note := "Nothing to write: " + workspace.ConfigFile + " says already what the next hop needs."
		switch {
		case c.hop == nil:
			note = "Nothing to write: there is no next hop."
		case slices.ContainsFunc(c.out.Findings, weakens):
			note = "Nothing else to write: " + workspace.ConfigFile + " says already what the next hop needs but for the measurements."
		}
		c.out.Notes = append(c.out.Notes, note)
		return nil
	}
	if err := c.e.ws.UpdateConfig(c.text, c.edited); err != nil {
		return err
	}
	c.out.Config.Written = true
	// What was said about values that are not there any more.
	c.out.Findings = slices.DeleteFunc(c.out.Findings, func(f plan.Finding) bool { return f.ID == CheckConfigTarget })
	return nil
}

// finish sorts, and says how to exit.
func (c *checkRun) finish() {
	c.sort()
	blocked := func(f plan.Finding) bool { return f.Severity == plan.Block }
	switch {
	case c.hop != nil && !slices.ContainsFunc(c.out.Findings, blocked):
		c.out.Exit = plan.ExitUpgradeAvailable
	case c.hop != nil || slices.ContainsFunc(c.out.Findings, blocked) || len(c.out.Blocked) > 0 && !c.asked():
		c.out.Exit = plan.ExitBlocked
	}
}

// sort brings the worst findings to the front and leaves the order of equals.
func (c *checkRun) sort() {
	order := []plan.Severity{plan.Block, plan.Warn, plan.NotChecked, plan.Info}
	slices.SortStableFunc(c.out.Findings, func(a, b plan.Finding) int {
		return cmp.Compare(slices.Index(order, a.Severity), slices.Index(order, b.Severity))
	})
}

// attestationJSON is what the join service demands of joining machines under a
// configuration.
func attestationJSON(c *workspace.Config) (string, error) {
	b, err := json.Marshal(cluster.Demand{Variant: string(attestation.TPM2), Measurements: c.Attestation.TPM2.Measurements})
	if err != nil {
		return "", fmt.Errorf("marshal measurements: %w", err)
	}
	return string(b), nil
}
