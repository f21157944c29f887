package engine

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"constellation/assets"
	"constellation/engine/chart"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// facts are the data known before init starts. Unknown fields are zero, and a Block finding
// has the reason.
type facts struct {
	config   *workspace.Config
	state    *workspace.State
	release  *release.Release
	provider Cloud
	about    cluster.ProviderInfo
	groups   []cloud.Group
	machines []cluster.CloudMachine
	image    cloud.Image
	list     component.List
	// statement vouches for list.
	statement string
	// extra are the charts of the configuration, fetched those that do not come with the
	// program, by name.
	extra   []release.Chart
	noPlans bool // the cluster is not to carry out Plans
	// noNetworkPolicies: our namespaces get none.
	noNetworkPolicies bool
	section           section.Values // of the provider
	// pods and kubernetes are podCIDR and kubernetesVersion of the configuration.
	pods       netip.Prefix
	kubernetes version.Version
	// pulls is where images are pulled from; nil: from their publishers. login is the same with what
	// its file holds, once the preflight has read it.
	pulls   *workspace.RegistryConfig
	login   registry.Registry
	feed    string // where releases are looked up
	fetched map[string]*chart.Chart
	// foreign is why the workspace's files are not of these machines; nil if they are.
	foreign error
	// controlPlanes is the number of control planes: of the configuration until machines join,
	// of the cluster afterwards. Zero is unknown and counts as one.
	controlPlanes int
}

// nextEtcd returns the tag of etcd's image with which a new cluster starts; empty: that of Kubernetes.
func (f *facts) nextEtcd() string {
	if f.release == nil {
		return "" // a finding blocks
	}
	return f.release.NextEtcd(f.config.Kubernetes)
}

// Preflight checks everything that init needs and can know beforehand, changes
// nothing, and emits two events for each check: when it begins and when it ends.
// The error is about the checking itself; what the checks say is in the findings.
func (e *Engine) Preflight(ctx context.Context, emit func(plan.Event)) ([]plan.Finding, error) {
	_, findings, err := e.examine(ctx, emit)
	return findings, err
}

// initCheck is one question of the preflight. It returns nil if everything is fine.
type initCheck struct {
	id, source, title string
	needs             string // IDs of the checks without which this one cannot be made, with spaces between
	run               func(context.Context) *plan.Finding
}

func block(title, detail, remedy string) *plan.Finding {
	return &plan.Finding{Severity: plan.Block, Title: title, Detail: detail, Remedy: remedy}
}

func warn(title, detail, remedy string) *plan.Finding {
	return &plan.Finding{Severity: plan.Warn, Title: title, Detail: detail, Remedy: remedy}
}

// blockErr makes a finding of an error.
func blockErr(title string, err error) *plan.Finding {
	return block(title, err.Error(), plan.Remedy(err))
}

// ofImages are the checks that a cloud without images is spared.
var ofImages = []string{"image-version", "image", "measurements"}

// examine makes the checks of init, in order, and returns what it learned on the way.
func (e *Engine) examine(ctx context.Context, emit func(plan.Event)) (*facts, []plan.Finding, error) {
	f := &facts{}
	var findings []plan.Finding
	failed := map[string]bool{}
	for _, c := range e.checks(f) {
		if slices.ContainsFunc(strings.Fields(c.needs), func(id string) bool { return failed[id] }) {
			failed[c.id] = true // the reason was reported
			continue
		}
		if f.config != nil && f.config.Image.IsZero() && slices.Contains(ofImages, c.id) {
			continue
		}
		emit(plan.Event{Kind: plan.KindCheck, Object: c.id, Source: c.source, State: plan.StateRunning, Text: c.title, Time: e.now().UTC()})
		start := e.now()
		found := c.run(ctx)
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		if found == nil {
			found = &plan.Finding{Severity: plan.Info, Title: c.title}
		}
		found.ID, found.Source, found.Took = c.id, c.source, e.now().Sub(start)
		if found.Severity == plan.Block {
			failed[c.id] = true
		}
		findings = append(findings, *found)
		ev := plan.CheckEvent(*found)
		ev.Time = e.now().UTC()
		emit(ev)
	}
	return f, findings, nil
}

func (e *Engine) checks(f *facts) []initCheck {
	clusterBegun := func() bool { return len(f.state.ClusterValues.ClusterID) > 0 }
	return []initCheck{
		{"config", "config", workspace.ConfigFile + " can be read", "", func(context.Context) *plan.Finding {
			c, err := e.ws.Config()
			if err != nil {
				if list, ok := workspace.AsConfigErrors(err); ok {
					first := list.Errors[0]
					b := block(fmt.Sprintf("%s has %d problem(s)", workspace.ConfigFile, len(list.Errors)), list.Error(), plan.Remedy(err))
					b.Field = first.Field
					return b
				}
				return blockErr("no configuration", err)
			}
			f.config, f.controlPlanes = c, c.ControlPlanes()
			return nil
		}},
		{"state", "files", workspace.StateFile + " belongs to this configuration", "config", func(context.Context) *plan.Finding {
			s, err := e.ws.State()
			if err == nil {
				err = e.ws.Belong(f.config, s)
			}
			if err != nil {
				return blockErr("files do not fit together", err)
			}
			f.state = s
			return nil
		}},
		{"file-modes", "files", "secrets are readable by their owner alone", "state", func(context.Context) *plan.Finding {
			if l := e.ws.Loose(); len(l) > 0 {
				return warn("others can read "+strings.Join(l, ", "), "these files hold secrets", "chmod 0600 "+strings.Join(l, " "))
			}
			return nil
		}},
		{"workspace", "files", "files can be written", "config", func(context.Context) *plan.Finding {
			t, err := os.CreateTemp(e.ws.Dir(), ".constellation-*")
			if err == nil {
				t.Close()
				err = os.Remove(t.Name())
			}
			if err != nil {
				return block("files cannot be written", fmt.Sprintf("%s: %v", e.ws.Dir(), workspace.WithoutPath(err)), "make the directory writable for this user, or use another one with -C")
			}
			return nil
		}},
		{"secret", "files", "no master secret exists yet", "state", func(context.Context) *plan.Finding {
			if !clusterBegun() && e.ws.Has(workspace.MasterSecretFile) {
				return warn("an existing "+workspace.MasterSecretFile+" will be used", "an earlier init wrote it, or you did; the keys of the new cluster are derived from it",
					"move it away if it belongs to another cluster: a new one is made then")
			}
			return nil
		}},
		{"release", "release", "the release is known to this program", "config", func(context.Context) *plan.Finding {
			catalogue, err := release.Load(assets.Releases())
			if err != nil {
				return blockErr("release data cannot be read", err)
			}
			if f.release, err = catalogue.Release(f.config.Services); err != nil {
				b := blockErr(fmt.Sprintf("release %s is not known", f.config.Services), err)
				b.Field, b.Remedy = "microserviceVersion", "name one of them in "+workspace.ConfigFile+f.config.At("microserviceVersion")
				return b
			}
			return nil
		}},
		{check.FindingChartSource, "release", "charts that do not come with the program can be fetched", "release state", func(ctx context.Context) *plan.Finding {
			f.want(f.config)
			f.feed, _, _ = e.feedOf(f.config, check.Request{}) // its keys are not asked for
			i := &clusterRun{e: e, facts: f}
			if f.state != nil {
				if x := i.partsFinding(func() (string, error) { return f.config.Kubernetes.String(), nil }); x != nil {
					return x
				}
			}
			found := i.fetchCharts(ctx)
			if len(found) == 0 {
				return nil
			}
			first := found[0]
			for _, x := range found[1:] {
				first.Detail += "; " + x.Title + ": " + x.Detail
			}
			return &first
		}},
		{"registry", "files", "the registry can be used", "release", func(context.Context) (found *plan.Finding) {
			if f.login, found = e.readRegistry(f.config, f.release); found != nil {
				found.Field = "registry"
			}
			return found
		}},
		{"kubernetes-version", "release", "the release offers the Kubernetes version", "release", func(context.Context) *plan.Finding {
			if _, err := f.release.ForKubernetes(f.config.Kubernetes); err != nil {
				b := blockErr("Kubernetes "+f.config.Kubernetes.String()+" is not offered", err)
				b.Field, b.Remedy = "kubernetesVersion", "name one of them in "+workspace.ConfigFile+f.config.At("kubernetesVersion")
				return b
			}
			return nil
		}},
		{"image-version", "release", "image and services are compatible", "release", func(context.Context) *plan.Finding {
			i, s := f.config.Image, f.config.Services
			switch d := s.MinorDistance(i); {
			case d > 0:
				b := block(fmt.Sprintf("image %s is newer than the services %s", i, s), "services must be at least as new as the image that they run on",
					"write image: "+s.String()+", with its measurements, or take newer services")
				b.Field = "image"
				return b
			case d < -1:
				b := block(fmt.Sprintf("image %s is too old for the services %s", i, s), "they may be one minor apart at most", "take an image of "+s.MinorString())
				b.Field = "image"
				return b
			}
			return nil
		}},
		{"control-planes", "config", "the number of control planes suits etcd's quorum", "config", func(context.Context) *plan.Finding {
			if n := f.config.ControlPlanes(); n > 0 && n%2 == 0 { // none at all is a finding of its own
				w := warn(fmt.Sprintf("%d control planes survive no more losses than %d", n, n-1), "etcd needs more than half of its members", fmt.Sprintf("take %d or %d", n-1, n+1))
				w.Field = "nodeGroups"
				return w
			}
			return nil
		}},
		{"networks", "config", "address ranges fit the machines' network", "state", func(context.Context) *plan.Finding {
			i, c := f.state.Infrastructure, f.config
			if c.PodCIDR != i.PodCIDR && !f.state.Enrolled() { // else no cloud routes it
				b := block("podCIDR is not what the cloud routes", fmt.Sprintf("the configuration says %s, the machines' network %s", c.PodCIDR, i.PodCIDR), "write podCIDR: "+i.PodCIDR.String())
				b.Field = "podCIDR"
				return b
			}
			if c.ServiceCIDR.Overlaps(i.NodeCIDR) || c.PodCIDR.Overlaps(i.NodeCIDR) {
				b := block("address ranges overlap", fmt.Sprintf("the machines have %s", i.NodeCIDR), "choose serviceCIDR and podCIDR outside of it")
				b.Field = "serviceCIDR"
				return b
			}
			return nil
		}},
		{"cloud", "cloud", "the cloud API responds", "state", func(ctx context.Context) *plan.Finding {
			a := f.config.Advice()
			p, err := e.provider(ctx, f.config, f.state)
			if err != nil {
				return blockErr("no access to the cloud", err)
			}
			info, err := p.Describe(ctx)
			if err != nil {
				return e.whyCloudIsSilent(ctx, f.config, err)
			}
			if info.UID != f.state.Infrastructure.UID {
				f.foreign = &plan.Error{
					Op: "use " + e.ws.Path(workspace.StateFile), Err: fmt.Errorf("it belongs to earlier machines of %s, which were deleted", a.Cloud), Exit: plan.ExitUsage,
					Remedy: "move " + strings.Join(e.ws.ClusterFiles(), ", ") + " away and " + a.Create + ", which writes the file again",
				}
				return blockErr("the machines are not those of "+workspace.StateFile, f.foreign)
			}
			if f.groups, err = p.Groups(ctx); err == nil {
				f.machines, err = p.Machines(ctx)
			}
			if err != nil {
				return blockErr("the cloud does not answer", check.CloudError("list machines", a, err))
			}
			f.provider, f.about = p, info
			return nil
		}},
		{"endpoints", "cloud", "the addresses in " + workspace.StateFile + " are the cloud's", "cloud", func(context.Context) *plan.Finding { return f.checkEndpoints(e) }},
		{"machines", "cloud", "the cloud has the configured machines", "cloud", func(context.Context) *plan.Finding { return f.checkGroups() }},
		{"image", "cloud", "the catalogue has the image, and the machines run it", "cloud", func(ctx context.Context) *plan.Finding {
			images, err := f.provider.Images(ctx)
			if err != nil {
				return blockErr("the cloud does not answer", check.CloudError("list images", f.config.Advice(), err))
			}
			return f.checkImage(images)
		}},
		{"measurements", "attestation", "the measurements match the image", "image", func(context.Context) *plan.Finding { return f.checkMeasurements() }},
		{"components", "cloud", "the cloud offers the Kubernetes version", "cloud", func(ctx context.Context) *plan.Finding {
			l, err := f.provider.Components(ctx, f.config.Kubernetes)
			if err != nil {
				b := blockErr("Kubernetes "+f.config.Kubernetes.String()+" is not available here", check.CloudError("list components", f.config.Advice(), err))
				if errors.Is(err, cloud.ErrNotFound) {
					b.Field, b.Remedy = "kubernetesVersion", f.config.Advice().OfferOf(f.config.Kubernetes.String())+", or name a version that is there"
				}
				return b
			}
			for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
				if _, ok := l.List.ByName(name); !ok {
					return block("the cloud offers no "+name, "", f.config.Advice().OfferOf(f.config.Kubernetes.String())+" again")
				}
			}
			f.list, f.statement = l.List, l.Statement
			if l.Statement != "" || f.config.Releases.Feed == "" {
				return nil
			}
			location, keys, err := e.feedOf(f.config, check.Request{})
			var known *knowledge
			if err == nil {
				known, err = e.learnReleases(ctx, location, keys)
			}
			if err == nil {
				f.statement, err = known.Vouch(ctx, f.config.Services, f.config.Kubernetes, runtime.GOARCH, l.List)
			}
			if err != nil {
				return block("the feed's statement over the components of Kubernetes "+f.config.Kubernetes.String()+" cannot be used", err.Error(), "inspect the feed with "+check.VerifyCommand(location, keys))
			}
			return nil
		}},
		{"init-endpoint", "network", "the first machine can be reached", "machines endpoints", func(ctx context.Context) *plan.Finding {
			if e.ws.Has(workspace.KubeconfigFile) || e.ws.Has(workspace.PendingFile) {
				return nil // it has done its work
			}
			endpoint := f.state.Infrastructure.InitEndpoint
			d := net.Dialer{Timeout: 3 * time.Second}
			conn, err := d.DialContext(ctx, "tcp", endpoint)
			if err != nil {
				return warn(endpoint+" does not answer yet", err.Error(), "nothing, if the machines are still booting: init waits for them. Otherwise look at "+f.config.Advice().Look)
			}
			conn.Close()
			return nil
		}},
	}
}

// create is how the machines are made or started again: an imperative.
func (e *Engine) create(a providers.Advice) string {
	if a.Up == "" {
		return a.Create
	}
	return "run `" + e.command(a.Up) + "`"
}

// whyCloudIsSilent distinguishes a deleted cloud from one whose service has ended, where
// this computer can find that out.
func (e *Engine) whyCloudIsSilent(ctx context.Context, c *workspace.Config, cause error) *plan.Finding {
	a := c.Advice()
	err := check.CloudError("ask "+a.Cloud, a, cause)
	if e.whySilent != nil && errors.Is(cause, cloud.ErrUnavailable) {
		switch e.whySilent(ctx, c) {
		case CloudGone:
			return block("there is no "+a.Cloud, "it was taken down, or belongs to another user",
				"move "+strings.Join(e.ws.ClusterFiles(), ", ")+" away and "+a.Create+", which makes a new one")
		case CloudStopped:
			return block("the daemon of "+a.Cloud+" has ended", err.Error(), e.create(a)+": it restarts the cloud and keeps its machines")
		}
	}
	return blockErr(a.Cloud+" does not answer", err)
}

// checkEndpoints compares the addresses of the state file with the cloud's. Otherwise init
// would wait for a wrong one until its timeout.
func (f *facts) checkEndpoints(e *Engine) *plan.Finding {
	s := f.state.Infrastructure
	for _, x := range []struct{ field, have, want string }{
		{"initEndpoint", s.InitEndpoint, f.about.InitEndpoint},
		{"clusterEndpoint", s.ClusterEndpoint, f.about.ClusterEndpoint},
	} {
		if x.want == "" || sameEndpoint(x.have, x.want) {
			continue
		}
		b := block(x.field+" in "+workspace.StateFile+" leads elsewhere", fmt.Sprintf("it says %s, and the cloud has %s", x.have, x.want),
			fmt.Sprintf("write %s: %s in %s, or %s, which writes the right addresses", x.field, x.want, workspace.StateFile, e.create(f.config.Advice())))
		b.Field = "infrastructure." + x.field
		return b
	}
	return nil
}

// sameEndpoint reports whether two host:port are equal without a request: this computer has
// several names for itself.
func sameEndpoint(a, b string) bool {
	hostA, portA, errA := net.SplitHostPort(a)
	hostB, portB, errB := net.SplitHostPort(b)
	if errA != nil || errB != nil {
		return a == b
	}
	self := func(h string) bool { return h == "localhost" || net.ParseIP(h).IsLoopback() }
	return portA == portB && (hostA == hostB || self(hostA) && self(hostB))
}

// checkGroups compares the cloud's groups with those of the configuration.
func (f *facts) checkGroups() *plan.Finding {
	byName := map[string]cloud.Group{}
	for _, g := range f.groups { // a group in several zones is several groups of the cloud
		g.Count += byName[g.Name].Count
		byName[g.Name] = g
	}
	bad := func(name, title, remedy string) *plan.Finding {
		b := block(title, "", remedy)
		b.Field = "nodeGroups." + name
		return b
	}
	if f.state.Enrolled() && f.config.ControlPlanes() == 0 {
		b := block("no machine is enrolled as a control plane", "a cluster needs one", "run `constellation machine add --group control-plane --ssh USER@HOST`")
		b.Field = "provider"
		return b
	}
	for _, name := range slices.Sorted(maps.Keys(f.config.NodeGroups)) {
		want := f.config.NodeGroups[name]
		have, ok := byName[name]
		at := workspace.ConfigFile + f.config.At("nodeGroups."+name)
		switch {
		case !ok:
			return bad(name, fmt.Sprintf("the cloud has no group %s", name), fmt.Sprintf("it has %s; correct %s", strings.Join(slices.Sorted(maps.Keys(byName)), " and "), at))
		case have.Role != want.Role:
			return bad(name, fmt.Sprintf("group %s has the role %s in the cloud", name, have.Role), "correct "+at)
		case have.Count != want.Count:
			return bad(name, fmt.Sprintf("group %s has %d machines, and the configuration wants %d", name, have.Count, want.Count),
				fmt.Sprintf("write count: %d in %s, or create the machines with other numbers", have.Count, at))
		}
		delete(byName, name)
	}
	for name, g := range byName {
		if g.Count > 0 {
			return bad(name, fmt.Sprintf("the cloud has a group %s with %d machines that the configuration does not name", name, g.Count), "add it to nodeGroups in "+workspace.ConfigFile)
		}
	}
	var broken []string
	for _, m := range f.machines {
		if m.Stage == plan.NodeFailed {
			broken = append(broken, m.Name+": "+m.Message)
		}
	}
	if n := len(broken); n > 0 && len(f.state.ClusterValues.ClusterID) > 0 {
		// An init that has begun continues without them, and reports them at its end.
		return warn(words.Count(n, "machine")+" failed to start", strings.Join(broken, "\n"), f.config.Advice().Failed+"; the others go on without them")
	}
	if len(broken) > 0 {
		return block(words.Count(len(broken), "machine")+" failed to start", strings.Join(broken, "\n"), f.config.Advice().Failed+". To begin again: "+f.config.Advice().Renew)
	}
	return nil
}

// checkImage finds the image and compares it with what machines run.
func (f *facts) checkImage(images []cloud.Image) *plan.Finding {
	bad := func(title, detail, remedy string) *plan.Finding {
		b := block(title, detail, remedy)
		b.Field = "image"
		return b
	}
	var have []string
	found := false
	for _, i := range images {
		have = append(have, i.Version)
		if v, err := version.Parse(i.Version); err == nil && v.Equal(f.config.Image) {
			f.image, found = i, true
		}
	}
	if !found {
		return bad("image "+f.config.Image.String()+" is not in the catalogue", "it has "+strings.Join(have, ", "), "name one of them in "+workspace.ConfigFile+f.config.At("image")+", with its measurements")
	}
	for _, g := range f.groups {
		if g.Image != f.image.Reference && g.Count > 0 {
			return bad("machines run another image", fmt.Sprintf("group %s has %s, and the configuration says %s", g.Name, g.Image, f.image.Reference),
				"write the image that they have, with its measurements, or "+f.config.Advice().ImageOf(f.config.Image.String()))
		}
	}
	return nil
}

// checkMeasurements compares the configuration with the catalogue. The catalogue is
// the cloud's word and proves nothing; but where the two differ, a machine would be
// refused later.
func (f *facts) checkMeasurements() *plan.Finding {
	known := map[uint32][]byte{}
	for i, h := range f.image.Measurements {
		if b, err := hex.DecodeString(h); err == nil {
			known[i] = b
		}
	}
	if len(known) == 0 {
		return nil
	}
	m := f.config.Attestation.TPM2.Measurements.Clone()
	for i := range m {
		if _, ok := known[i]; !ok {
			delete(m, i) // the catalogue says nothing about it
		}
	}
	warnings, err := m.Compare(known)
	if err != nil {
		b := blockErr("the measurements are not those of image "+f.config.Image.String(), err)
		b.Field, b.Remedy = "attestation.tpm2.measurements", "every machine would be refused: write the value that the image has, which is named here"
		if list := f.config.Advice().Catalogue; list != "" {
			b.Remedy += ", or " + list + " lists them all"
		}
		return b
	}
	if len(warnings) > 0 {
		return warn("some measurements differ, and only warn", strings.Join(warnings, "\n"), "copy those of image "+f.config.Image.String())
	}
	return nil
}
