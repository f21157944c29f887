package check

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"constellation/assets"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// Kinds of rows of the version table that are not parts of others.
const (
	rowKubernetes = "kubernetes"
	rowImage      = "image"
	rowServices   = "services"
	rowCLI        = "cli"
)

// CheckConfigTarget is the ID of the finding about the upgrade target in the configuration.
const CheckConfigTarget = "config-target"

// components fills the version table. reach is the result of the compatibility matrix; nil if the
// cluster is unreachable.
func (c *Run) components(reach []compat.Reach) {
	versions := func(component string) []version.Version {
		for _, r := range reach {
			if r.Component == component {
				return r.Versions
			}
		}
		return nil
	}
	images := c.Now.ControlPlaneImage.Add(c.Now.WorkerImage.Oldest).Add(c.Now.WorkerImage.Newest)
	newest, newestKubernetes := compat.NewestOf(c.Releases)
	main := func(name, kind string, now compat.Span, at func(compat.Planned) version.Version, newest version.Version) plan.ComponentCheck {
		row := plan.ComponentCheck{Name: name, Kind: kind, Now: now.String(), Reachable: texts(versions(kind))}
		if newest = laterThan(newest, now.Newest); !newest.IsZero() {
			row.Newest = newest.String()
		}
		hops, last := 0, -1
		before := now
		for i, h := range c.Path {
			to := at(h.Planned())
			if to.IsZero() || before.Is(to) {
				continue
			}
			if i == 0 {
				row.NextHop = to.String()
			}
			hops, last, before = hops+1, i, compat.At(to)
		}
		switch {
		case hops == 1 && last > 0:
			row.Verdict = fmt.Sprintf("in hop %d", last+1)
		case hops == 1:
			row.Verdict = "1 hop"
		case hops > 1:
			row.Verdict = fmt.Sprintf("%d hops", hops)
		case row.Newest != "":
			row.Verdict = c.unreached()
		default:
			row.Verdict = "not updated"
		}
		if hops > 0 {
			row.Goal = before.Newest.String()
			if row.Newest != "" && row.Newest != row.Goal {
				row.Verdict = row.Goal + " in " + strings.TrimPrefix(row.Verdict, "in ")
			}
		}
		if hops > 0 && !c.Path[last].CLI.Equal(c.CLI) {
			row.Verdict += ", another CLI"
		}
		return row
	}
	rows := []plan.ComponentCheck{main("Kubernetes", rowKubernetes, c.Now.Kubernetes, func(p compat.Planned) version.Version { return p.Kubernetes }, newestKubernetes)}
	rows = append(rows, c.kubernetesParts(versions(rowKubernetes), newestKubernetes)...)
	if !c.Now.NoImages {
		rows = append(rows, main("OS image", rowImage, images, func(p compat.Planned) version.Version { return p.Image }, newest))
	}
	rows = append(rows,
		main("Services", rowServices, c.Now.Services, func(p compat.Planned) version.Version { return p.Services }, newest))
	rows = append(rows, c.releaseParts(images, versions(rowServices), versions(rowImage), newest)...)
	rows = append(rows, c.cliRow(versions(rowCLI)))
	c.Out.Components = rows
}

// unreached is the verdict of a row with a newer version that no hop leads to.
func (c *Run) unreached() string {
	if c.there || c.asked() && c.Hop != nil {
		return "not asked for"
	}
	return "not reachable"
}

// laterThan returns v if it is newer than now; otherwise the zero value.
func laterThan(v, now version.Version) version.Version {
	if now.Less(v) {
		return v
	}
	return version.Version{}
}

func texts(versions []version.Version) (out []string) {
	for _, v := range versions {
		out = append(out, v.String())
	}
	return out
}

// part is a row that belongs to another row. of maps a version of that row to the version of the
// part, empty if the part is absent there.
func (c *Run) part(name, kind, now, in string, reach []version.Version, at func(compat.Planned) version.Version, newest version.Version, of func(version.Version) string) plan.ComponentCheck {
	row := plan.ComponentCheck{Name: name, Kind: kind, Part: true, Now: now, Verdict: "not updated"}
	runs, unread := version.Parse(now)
	if unread != nil {
		runs, unread = version.Parse(now[strings.LastIndex(now, "-v")+1:]) // newest of the range
	}
	later := func(s string) bool {
		v, err := version.Parse(s)
		if err != nil || unread != nil {
			return s != "" && s != now
		}
		return runs.Less(v)
	}
	for _, v := range reach {
		if s := of(v); later(s) && !slices.Contains(row.Reachable, s) {
			row.Reachable = append(row.Reachable, s)
		}
	}
	if s := of(newest); !newest.IsZero() && later(s) {
		row.Newest, row.Verdict = s, c.unreached()
	}
	if n := len(c.Path); n > 0 {
		if end := at(c.Path[n-1].Planned()); !end.IsZero() && later(of(end)) {
			row.Goal = of(end)
		}
	}
	if next := at(c.after()); !next.IsZero() && later(of(next)) {
		row.NextHop, row.Verdict = of(next), in
	} else if c.Hop != nil && (len(row.Reachable) > 0 || row.Newest != "" && len(c.Path) > 1) {
		row.Verdict = in
	}
	return row
}

// after returns the version after the next hop; zero if there is none.
func (c *Run) after() compat.Planned {
	if c.Hop == nil {
		return compat.Planned{}
	}
	return c.Hop.Planned()
}

// kubernetesParts returns the rows of running components whose version depends on Kubernetes.
func (c *Run) kubernetesParts(reach []version.Version, newest version.Version) (rows []plan.ComponentCheck) {
	for _, p := range c.Now.Parts {
		if p.Kind != cluster.ServiceOfKubernetes {
			continue
		}
		of := func(v version.Version) string { return c.bound(p.Name, v) }
		rows = append(rows, c.part(p.Name, cluster.ServiceOfKubernetes, p.Version, "in Kubernetes", reach, func(p compat.Planned) version.Version { return p.Kubernetes }, newest, of))
	}
	return rows
}

// bound returns the version of a service for a version of Kubernetes, according to the newest
// release with that Kubernetes; empty if there is none.
func (c *Run) bound(name string, v version.Version) string {
	for _, s := range slices.Backward(c.Releases) {
		for _, k := range s.Kubernetes {
			if k.Version.Equal(v) && s.Faulty == "" {
				return k.Service(name)
			}
		}
	}
	return ""
}

// releaseParts returns the rows of the services of a release. Services inside the OS image have
// the version that the image contains, so they have no row without images.
func (c *Run) releaseParts(images compat.Span, reach, reachImages []version.Version, newest version.Version) (rows []plan.ComponentCheck) {
	running := map[string]bool{}
	for _, p := range c.Now.Parts {
		if p.Kind != cluster.ServiceOfRelease {
			continue
		}
		running[p.Name] = true
		of := func(v version.Version) string { return c.serviceIn(p.Name, v) }
		rows = append(rows, c.part(p.Name, cluster.ServiceOfRelease, p.Version, "in services", reach, func(p compat.Planned) version.Version { return p.Services }, newest, of))
	}
	at := newest
	if !c.Now.Services.IsZero() {
		at = c.Now.Services.Newest
	}
	if c.Hop != nil {
		at = c.after().Services
	}
	s := c.summary(at)
	if s == nil {
		return rows
	}
	for _, x := range s.Services {
		if x.Kind != release.OfRelease || running[x.Name] || x.Image == "" && c.Now.NoImages || x.Name == release.JoinService && c.State.Adopted() {
			continue
		}
		of := func(v version.Version) string { return c.serviceIn(x.Name, v) }
		if x.Image == "" {
			rows = append(rows, c.part(x.Name, cluster.ServiceOfRelease, c.serviceSpan(x.Name, images), "in OS image", reachImages, func(p compat.Planned) version.Version { return p.Image }, newest, of))
			continue
		}
		rows = append(rows, c.part(x.Name, cluster.ServiceOfRelease, "", "in services", reach, func(p compat.Planned) version.Version { return p.Services }, newest, of))
	}
	slices.SortFunc(rows, func(a, b plan.ComponentCheck) int { return strings.Compare(a.Name, b.Name) })
	return rows
}

// serviceIn returns the version of a service in a release; empty if it has none.
func (c *Run) serviceIn(name string, v version.Version) string {
	if s := c.summary(v); s != nil {
		for _, x := range s.Services {
			if x.Name == name {
				return x.Version.String()
			}
		}
	}
	return ""
}

// serviceSpan is serviceIn for several releases that run at the same time.
func (c *Run) serviceSpan(name string, of compat.Span) string {
	var s compat.Span
	for _, v := range []version.Version{of.Oldest, of.Newest} {
		if x, err := version.Parse(c.serviceIn(name, v)); err == nil {
			s = s.Add(x)
		}
	}
	return s.String()
}

func (c *Run) cliRow(reach []version.Version) plan.ComponentCheck {
	row := plan.ComponentCheck{Name: "CLI", Kind: rowCLI, Now: c.CLI.String(), Reachable: texts(reach), Verdict: "not updated"}
	newest, _ := compat.NewestOf(c.Releases)
	if v := laterThan(newest, c.CLI); !v.IsZero() {
		row.Newest = v.String()
	}
	for i, h := range c.Path {
		if h.CLI.Equal(c.CLI) {
			continue
		}
		if i == 0 {
			row.NextHop, row.Verdict = h.CLI.String(), "hop 1 needs "+h.CLI.String()
		} else {
			row.Verdict = fmt.Sprintf("hop %d needs %s", i+1, h.CLI)
		}
		break
	}
	return row
}

// Find adds a finding.
func (c *Run) Find(f plan.Finding) { c.Out.Findings = append(c.Out.Findings, f) }

// joinConfig is the ConfigMap with what joining machines must prove.
const joinConfig = "join-config"

// judgeRunning adds findings about anomalies in the running versions.
func (c *Run) judgeRunning() {
	if f := deniedFinding(c.Now.Denied); f != nil {
		c.Find(*f)
	}
	for _, m := range c.Now.Missing {
		what, why, found := strings.Cut(m, ": ")
		if what == joinConfig && c.State.Adopted() {
			continue // its machines join by kubeadm
		}
		f := plan.Finding{ID: "running", Severity: plan.NotChecked, Title: "not known: " + what, Detail: why, Source: "versions", Remedy: "repair the named problem, then check again"}
		if !found {
			f.Title, f.Detail = m, ""
		}
		c.Find(f)
	}
	if c.CLI.Less(c.Now.Services.Newest) {
		severity := plan.Block // this program cannot fix it
		if c.Hop != nil {
			severity = plan.Warn // the path names the program that can
		}
		c.Find(plan.Finding{
			ID: "cli-older", Severity: severity, Title: fmt.Sprintf("the cluster runs release %s, which is newer than this program, %s", c.Now.Services.Newest, c.CLI), Source: "versions",
			Remedy: c.Matrix.Get(c.Now.Services.Newest),
		})
	}
	for _, v := range slices.CompactFunc([]version.Version{c.Now.Services.Oldest, c.Now.Services.Newest}, version.Version.Equal) {
		if !v.IsZero() && c.summary(v) == nil {
			c.Find(plan.Finding{
				ID: "running-release", Severity: plan.Warn, Title: fmt.Sprintf("the running release %s is unknown", v), Source: "versions",
				Detail: "known are " + c.Matrix.List(), Remedy: "point `--feed` to where it is published",
			})
		}
	}
	c.judgeFaulty()
	s := c.summary(c.Now.Services.Oldest)
	for _, v := range slices.CompactFunc([]version.Version{c.Now.Kubernetes.Oldest, c.Now.Kubernetes.Newest}, version.Version.Equal) {
		if v.IsZero() || s == nil || slices.ContainsFunc(s.Kubernetes, func(k release.KubernetesSummary) bool { return k.Version.Equal(v) }) {
			continue
		}
		var have []string
		for _, k := range s.Kubernetes {
			if k.Version.SameMinor(v) && v.Less(k.Version) && k.Faulty == "" && c.offered(k.Version) {
				have = append(have, k.Version.String())
			}
		}
		f := plan.Finding{
			ID: "running-kubernetes", Severity: plan.Warn, Title: fmt.Sprintf("the running Kubernetes %s is not in release %s", v, s.Version), Source: "versions",
			Detail: "the release has no data to create nodes of this version", Remedy: "go to " + words.Or(have),
		}
		if len(have) == 0 {
			f.Remedy = "upgrade to a newer minor, or to a release that has a newer Kubernetes " + v.MinorString()
		}
		c.Find(f)
	}
}

// runningFaulty is the ID of the finding about running versions that are known to be faulty.
const runningFaulty = "running-faulty"

// judgeFaulty adds findings about running versions that were found faulty after their release.
// They replace the rule's violation on the same subject if a hop leaves it unchanged.
func (c *Run) judgeFaulty() {
	c.Out.Findings = slices.DeleteFunc(c.Out.Findings, func(f plan.Finding) bool { return f.ID == "faulty" && f.Severity == plan.Warn })
	told := map[string]bool{}
	tell := func(what string, v version.Version, workers bool, why string, newer []version.Version, at func(compat.Planned) version.Version) {
		if why == "" || told[what+v.String()] {
			return
		}
		told[what+v.String()] = true
		f := plan.Finding{
			ID: runningFaulty, Severity: plan.Warn, Title: fmt.Sprintf("the running %s %s is marked as faulty: %s", what, v, why), Source: "versions",
			Detail: "said by the releases of " + c.Out.Feed.Source, Remedy: "wait for a newer version, and check again then", Reference: compat.PolicyPage,
		}
		if len(newer) > 0 {
			f.Remedy = fmt.Sprintf("upgrade to %s when a path exists: the findings and `-o json` show what blocks it", newer[0])
		}
		for i, h := range c.Path {
			if to := at(h.Planned()); v.Less(to) && (!workers || h.ReplaceWorkers) {
				f.Remedy = fmt.Sprintf("hop %d leads away from it, to %s", i+1, to)
				if i == 0 {
					f.Remedy = "the next hop leads away from it, to " + to.String()
				}
				break
			}
		}
		c.Find(f)
	}
	for _, v := range []version.Version{c.Now.Services.Oldest, c.Now.Services.Newest} {
		why, newer := c.faultyRelease(v)
		tell("release", v, false, why, newer, func(p compat.Planned) version.Version { return p.Services })
	}
	for i, s := range []compat.Span{c.Now.ControlPlaneImage, c.Now.WorkerImage} {
		for _, v := range []version.Version{s.Oldest, s.Newest} {
			if why, newer := c.faultyRelease(v); !told["release"+v.String()] { // image and release have the same one
				tell("image", v, i == 1, why, newer, func(p compat.Planned) version.Version { return p.Image })
			}
		}
	}
	for i, s := range []compat.Span{c.Now.Kubernetes, c.Now.ControlPlaneKubelet, c.Now.WorkerKubelet} {
		for _, v := range []version.Version{s.Oldest, s.Newest} {
			why, newer := c.faultyKubernetes(v)
			tell("Kubernetes", v, i == 2, why, newer, func(p compat.Planned) version.Version { return p.Kubernetes })
		}
	}
}

// faultyRelease returns why a release is faulty, empty if it is not, and the newer releases that
// are not faulty.
func (c *Run) faultyRelease(v version.Version) (why string, newer []version.Version) {
	s := c.summary(v)
	for _, r := range c.Releases {
		if s != nil && v.Less(r.Version) && r.Faulty == "" && r.Version.Prerelease() == "" {
			newer = append(newer, r.Version)
		}
	}
	if s != nil {
		why = s.Faulty
	}
	return why, newer
}

// faultyKubernetes is faultyRelease for a version of Kubernetes; newer is sorted.
func (c *Run) faultyKubernetes(v version.Version) (why string, newer []version.Version) {
	for _, r := range c.Releases {
		for _, k := range r.Kubernetes {
			switch {
			case k.Version.Equal(v):
				why = cmp.Or(why, k.Faulty)
			case v.Less(k.Version) && k.Faulty == "" && r.Faulty == "":
				newer = append(newer, k.Version)
			}
		}
	}
	slices.SortFunc(newer, version.Version.Compare)
	return why, newer
}

// offered reports whether the cloud offers a Kubernetes version. It is true if the offer is
// unknown.
func (c *Run) offered(v version.Version) bool {
	if c.offer.Kubernetes == nil {
		return true
	}
	ok, _, _ := c.offer.Kubernetes(v)
	return ok
}

// judgeConfig reports whether an upgrade to the configured target would be refused. It checks the
// configuration as it stands, independent of the path. So it only warns: the next hop writes the
// values that it needs.
func (c *Run) judgeConfig() {
	f := c.Config
	to := compat.Planned{Services: f.Services, Image: f.Image, Kubernetes: f.Kubernetes, KeepWorkers: f.KeepWorkers}
	if c.Now.Services.Is(to.Services) && c.Now.ControlPlaneImage.Is(to.Image) && c.Now.Kubernetes.Is(to.Kubernetes) {
		return
	}
	if c.configured {
		return // the rules check the next hop
	}
	if a, err := AttestationJSON(f, c.State); err == nil {
		to.Attestation = a
	}
	cli := c.CLI
	if c.Now.Services.Is(to.Services) {
		cli = to.Services // the configuration does not choose the program
	}
	said := map[string]bool{}
	for _, r := range compat.Blocks(c.Matrix.Check(cli, c.Now, to, c.offer)) {
		field := fieldOf(r.Rule, to, c.Now)
		if said[field] {
			continue // the first of several reasons is enough
		}
		said[field] = true
		remedy := r.Remedy
		switch {
		case r.Rule == "variant" || r.Rule == RuleWeaker: // they have their own findings
		case c.Hop != nil:
			remedy += "; `constellation upgrade check --write-config` writes what the next hop needs"
		default:
			remedy += "; the cluster runs " + versionsOf(c.Now.Services, c.Now.ControlPlaneImage, c.Now.Kubernetes)
		}
		c.Find(plan.Finding{
			ID: CheckConfigTarget, Field: field, Severity: plan.Warn, Title: fmt.Sprintf("%s%s requests an impossible combination: %s", workspace.ConfigFile, f.At(field), r.Title),
			Detail: "rule " + r.Rule + ": " + versionsOf(f.Services, f.Image, f.Kubernetes), Source: "config", Reference: r.Reference,
			Remedy: remedy,
		})
	}
}

// versionsOf lists the versions of a combination; without an image for a cloud that selects none.
func versionsOf(services, image, kubernetes fmt.Stringer) string {
	s := "services " + services.String()
	if i := image.String(); i != "" {
		s += ", image " + i
	}
	return s + ", Kubernetes " + kubernetes.String()
}

// fieldOf returns the field of the configuration that a rule concerns.
func fieldOf(rule string, to compat.Planned, now compat.Running) string {
	switch {
	case rule == "variant":
		return "attestation"
	case rule == "measurements-weaker":
		return "attestation.tpm2.measurements"
	case strings.Contains(rule, "kube") || rule == "etcd-step" || rule == "control-plane-skew":
		return "kubernetesVersion"
	case strings.Contains(rule, "image"):
		return "image"
	case now.Services.Is(to.Services) && !now.ControlPlaneImage.Is(to.Image):
		return "image"
	case now.Services.Is(to.Services):
		return "kubernetesVersion"
	}
	return "microserviceVersion"
}

// judgeMeasured adds a finding if the measurements of the next hop's image are unavailable.
func (c *Run) judgeMeasured() {
	if c.unmeasured != nil {
		c.Find(plan.Finding{
			ID: "measurements-unknown", Field: "attestation.tpm2.measurements", Severity: plan.Warn, Source: "attestation",
			Title:  fmt.Sprintf("the measurements of image %s are not known", c.Hop.To.Image),
			Detail: c.unmeasured.Error(), Remedy: "get them from the publisher of the image, and write both into " + workspace.ConfigFile,
		})
	}
}

// judgeFeed adds a finding if the feed was stale or unusable.
func (c *Run) judgeFeed() {
	s := c.Out.Feed
	switch {
	case s.Problem != "" && s.Stale:
		c.Find(plan.Finding{ID: "feed", Severity: plan.Warn, Title: "an older copy of the feed was used", Detail: s.Problem, Remedy: s.Remedy, Source: "release"})
	case s.Problem != "":
		c.Find(plan.Finding{ID: "feed", Severity: plan.NotChecked, Title: "not checked what the feed knows", Detail: s.Problem, Remedy: s.Remedy, Source: "release"})
	}
}

// catalogue is what the cloud lists for upgrades.
func (c *Run) catalogue() string {
	if c.Now.NoImages {
		return "versions"
	}
	return "images and versions"
}

// judgeCloud adds a finding if the cloud's offer could not be read.
func (c *Run) judgeCloud() {
	if c.silent == nil {
		return
	}
	a := c.Config.Advice()
	err := CloudError("ask "+a.Cloud, a, c.silent)
	c.Find(plan.Finding{
		ID: "cloud-offers", Severity: plan.NotChecked, Title: "not checked whether the cloud has the " + c.catalogue(), Detail: err.Error(), Source: "cloud",
		Remedy: plan.Remedy(err),
	})
}

// kindsOf returns the definitions of a release. The error wraps assets.ErrUnknownRelease if only
// another version of this program contains them.
func (c *Run) kindsOf(ctx context.Context, v version.Version) ([]assets.File, error) {
	r, err := c.Known.Release(ctx, v)
	if err != nil {
		return nil, err
	}
	all, err := assets.CRDsFor(v.String())
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(f assets.File) bool { return !slices.Contains(r.CRDs, f.Name) }), nil
}

// markInPlace notes in the hops which nodes keep their machines. The planner does not decide that.
func (c *Run) markInPlace() {
	share := func(controlPlanes bool) compat.Share {
		kept, all := 0, 0
		for _, n := range c.Now.Nodes {
			if (n.Role == string(cloud.ControlPlane)) == controlPlanes {
				all++
				if n.InPlace {
					kept++
				}
			}
		}
		switch kept {
		case 0:
			return ""
		case all:
			return compat.AllNodes
		}
		return compat.SomeNodes
	}
	for i := range c.Path {
		h := &c.Path[i]
		if h.ReplaceControlPlanes {
			h.ControlPlanesInPlace = share(true)
		}
		if h.ReplaceWorkers {
			h.WorkersInPlace = share(false)
		}
	}
}

// changes computes the changes of the next hop, as far as possible without further requests.
func (c *Run) changes(ctx context.Context) *plan.Changes {
	to := c.Hop.Planned()
	out := &plan.Changes{Nodes: map[string]int{}}
	kubernetes := c.Hop.To.Kubernetes != c.Hop.From.Kubernetes
	replaced, kept, first := 0, 0, 0
	for _, n := range c.Now.Nodes {
		controlPlane := n.Role == string(cloud.ControlPlane)
		switch {
		case controlPlane && !c.Hop.ReplaceControlPlanes || !controlPlane && !c.Hop.ReplaceWorkers:
		case n.InPlace && !kubernetes && (!controlPlane || to.Etcd == ""): // its image stays and nothing else changes
		case n.InPlace:
			if out.InPlace == nil {
				out.InPlace = map[string]int{}
			}
			out.InPlace[cmp.Or(n.Group, n.Role)]++
			kept++
			if controlPlane && kubernetes {
				first = 1 // kubeadm upgrades the cluster on the first one
			}
		default:
			out.Nodes[cmp.Or(n.Group, n.Role)]++
			replaced++
		}
	}
	whole, basis := c.Past.Estimate(replaced, kept-first, kubernetes)
	out.Least, out.Most, out.Basis = whole.Least, whole.Most, basis
	out.Measurements = c.MeasurementChanges()
	if want, err := AttestationJSON(c.Next, c.State); err == nil && want != c.Now.JoinConfig.Attestation && c.Now.JoinConfig.Attestation != "" {
		out.ConfigMaps = append(out.ConfigMaps, "kube-system/join-config (changed)")
	}
	c.serviceChanges(ctx, out, to)
	return out
}

// MeasurementChanges compares the enforced attestation policy of the cluster with the next one.
// If the cluster is unreachable, it compares with the policy of the configuration.
func (c *Run) MeasurementChanges() (out []plan.MeasurementChange) {
	before, after := c.Config.Attestation.TPM2.Measurements, c.Next.Attestation.TPM2.Measurements
	var now cluster.Demand
	if err := json.Unmarshal([]byte(c.Now.JoinConfig.Attestation), &now); err == nil {
		before = now.Measurements
	}
	for _, i := range workspace.Registers(before, after) {
		from, was := before[i]
		to, is := after[i]
		text := func(ok, warns bool, b []byte) string {
			switch {
			case !ok:
				return ""
			case warns:
				return fmt.Sprintf("%x (warns only)", b)
			}
			return fmt.Sprintf("%x", b)
		}
		m := plan.MeasurementChange{PCR: i, From: text(was, from.WarnOnly, from.Expected), To: text(is, to.WarnOnly, to.Expected)}
		m.Weaker = was && !from.WarnOnly && (!is || to.WarnOnly)
		if m.From != m.To {
			out = append(out, m)
		}
	}
	return out
}

// serviceChanges adds kinds, charts and images of services.
func (c *Run) serviceChanges(ctx context.Context, out *plan.Changes, to compat.Planned) {
	after, err := c.Known.Release(ctx, to.Services)
	if err != nil {
		c.Log.Debug("release not read", "release", to.Services, "err", err)
		return
	}
	before, err := c.Known.Release(ctx, c.Now.Services.Oldest)
	if err != nil {
		before = &release.Release{} // unknown: all count as new
	}
	image := func(name, from, now string) {
		if from != now && now != "" {
			out.Images = append(out.Images, plan.ImageChange{Service: name, From: from, To: now})
		}
	}
	if !c.Now.Services.Is(to.Services) {
		for _, x := range after.Charts {
			from := strings.TrimPrefix(c.Now.Services.Oldest.String(), "v")
			out.Charts = append(out.Charts, fmt.Sprintf("%s %s to %s", x.Name, from, strings.TrimPrefix(to.Services.String(), "v")))
		}
		for _, s := range after.Services {
			old, _ := before.Service(s.Name)
			image(s.Name, old.Image, s.Image)
		}
		c.kindChanges(ctx, out, to)
	}
	if !c.Now.Kubernetes.Is(to.Kubernetes) {
		old, _ := before.Images(c.Now.Kubernetes.Oldest)
		now, _ := after.Images(to.Kubernetes)
		for _, name := range []string{"kube-proxy", "coredns"} {
			image(name, old[name], now[name])
		}
	}
}

// kindChanges compares the definitions of two releases. The state of the definitions in the
// cluster is not part of it.
func (c *Run) kindChanges(ctx context.Context, out *plan.Changes, to compat.Planned) {
	after, err := c.kindsOf(ctx, to.Services)
	if err != nil {
		if errors.Is(err, assets.ErrUnknownRelease) {
			c.Out.Notes = append(c.Out.Notes, fmt.Sprintf("Which kinds hop 1 changes only constellation %s knows.", to.Services))
		}
		return
	}
	before, err := c.kindsOf(ctx, c.Now.Services.Oldest)
	if err != nil {
		before = nil
	}
	for _, f := range after {
		i := slices.IndexFunc(before, func(o assets.File) bool { return o.Name == f.Name })
		switch {
		case !slices.Contains(c.Now.Kinds, f.Name):
			out.KindsAdded = append(out.KindsAdded, f.Name)
		case i < 0 || string(before[i].Data) != string(f.Data):
			out.KindsChanged = append(out.KindsChanged, f.Name)
		}
	}
	for _, k := range c.Now.Kinds {
		if !slices.ContainsFunc(after, func(f assets.File) bool { return f.Name == k }) {
			out.KindsRemoved = append(out.KindsRemoved, k)
		}
	}
}
