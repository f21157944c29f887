// Package compat answers: which versions go together, and by which hops does a cluster reach
// a newer one?
//
// A [Matrix] is made of releases and judges a hop by rules, and a path is the shortest list
// of hops that it allows. The package is pure: it asks no cluster, no cloud and no file.
package compat

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"constellation/engine/cluster"
	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/words"
)

// NewestOf returns the newest release and the newest Kubernetes that are known and fine;
// pre-releases are left out.
func NewestOf(all []release.Summary) (r, k version.Version) {
	for _, s := range all {
		if s.Faulty != "" || s.Version.Prerelease() != "" {
			continue
		}
		if r.Less(s.Version) {
			r = s.Version
		}
		for _, x := range s.Kubernetes {
			if x.Faulty == "" && k.Less(x.Version) {
				k = x.Version
			}
		}
	}
	return r, k
}

// Matrix is the compatibility matrix: the contents of releases as data, and the upgrade
// rules over them as code. It is immutable and may be used concurrently.
//
// The versions of a cluster are in [Running], the versions that a hop leads to in [Planned].
// Both are only read.
type Matrix struct {
	releases []known // oldest first
	// patches are the Kubernetes patches of all releases, oldest first, without duplicates.
	patches []patch
	etcd    map[string]version.Version // by tag
}

// known is a release with the values that rules need precomputed.
type known struct {
	release.Summary
	patches []patch // of Kubernetes, oldest first
	minors  []minor // of Kubernetes, oldest first
	// supported is "v1.34 and v1.35".
	supported string
}

// minor is a Kubernetes minor that a release supports.
type minor struct {
	oldest version.Version
	choice string // "choose v1.35.4 or v1.35.7"; empty if all are faulty
}

// patch is a Kubernetes version that a release contains.
type patch struct {
	version, etcd version.Version // etcd is zero if it is unknown or its tag is invalid
	faulty        string
	unpinned      string // why the release has no digests of its components; empty: it has them
}

// Planned is the target of a hop. A zero version means no change: the oldest running
// version. Planned values can be compared with ==.
type Planned struct {
	Services, Image, Kubernetes version.Version
	// Etcd is the tag of the image that etcd gets without another Kubernetes, such as 3.6.11-0;
	// empty if that does not change.
	Etcd string
	// KeepWorkers does not replace the workers; a later hop replaces them.
	KeepWorkers bool
	// Attestation is the attestation policy for joining machines after the hop, in the
	// format of [JoinConfig.Attestation]; empty if it does not change.
	Attestation string
}

// Offer reports which versions the provider offers. A nil function offers everything. If a
// version is not offered, why and remedy are texts for the user.
type Offer struct {
	Images, Kubernetes func(version.Version) (ok bool, why, remedy string)
}

// Sources of rules.
const (
	PolicyPage   = "docs/compatibility.md"
	semverPage   = "https://semver.org/#spec-item-8"
	skewPage     = "https://kubernetes.io/releases/version-skew-policy/"
	kubeletKEP   = "https://kubernetes.io/releases/version-skew-policy/#kubelet, KEP-3935"
	kubeadmPage  = "https://kubernetes.io/docs/reference/config-api/kubeadm-config.v1beta4/"
	kubeadmMinor = "https://kubernetes.io/docs/tasks/administer-cluster/kubeadm/kubeadm-upgrade/"
	etcdPage     = "https://etcd.io/docs/v3.6/upgrades/upgrade_3_6/"
)

// rule is one condition that every hop must satisfy. title states the condition. If it
// holds, judge returns Info and empty texts, because the planner calls it very often.
type rule struct {
	ID, title, source string
	judge             func(*step) (s plan.Severity, title, remedy string)
}

// Rules are all rules in the order of the output: validity of versions, distances between
// versions, compatibility of components, offers of the provider.
var Rules = [...]rule{
	{"unknown-release", "target releases are known", PolicyPage, judgeUnknownRelease},
	{"faulty", "no target version is marked faulty", PolicyPage, judgeFaulty},
	{"same-major", "services, image, Kubernetes and CLI keep their major version", semverPage, judgeSameMajor},
	{"never-down", "services, image and Kubernetes are never downgraded", PolicyPage, judgeNeverDown},
	{"minor-drift", "services and image go up by one minor per hop at most", PolicyPage, judgeMinorDrift},
	{"upgrade-from", "the running services are at least as new as the target release requires", PolicyPage, judgeUpgradeFrom},
	{"cli-services", "a CLI installs the services of its own release, over services at most one minor older", PolicyPage, judgeCLIServices},
	{"cli-image", "a new image has the CLI's minor, in any patch; an unchanged image may be one minor older", PolicyPage, judgeCLIImage},
	{"image-services", "images are not of a newer minor than the services, and at most one minor older", PolicyPage, judgeImageServices},
	{"oldest-supports-kubernetes", "a new minor of Kubernetes is supported by the oldest image of the control planes, the new image and the new services", PolicyPage, judgeOldestSupports},
	{"services-support-kubernetes", "new services support the running Kubernetes, because charts are upgraded first", PolicyPage, judgeServicesSupport},
	{"kubernetes-minor", "Kubernetes goes up by one minor per hop at most", kubeadmMinor, judgeKubernetesMinor},
	{"kubernetes-offered", "the release contains the target Kubernetes patch; the running patch may stay", PolicyPage, judgeKubernetesOffered},
	{"kubelet-skew", "kubelets are not newer than the API server, and " + kubeletSkew(), kubeletKEP, judgeKubeletSkew},
	{"kubelet-in-place", "kubelets of workers that are upgraded in place go up by one minor per hop", kubeadmMinor, judgeKubeletInPlace},
	{"control-plane-skew", "API servers are at most one minor apart", skewPage + "#kube-apiserver", judgeControlPlaneSkew},
	{"kubeadm-floor", "kubeadm can read the configuration that this program writes (v1beta4, from " + kubeadmFloor.MinorString() + " on)", kubeadmPage, judgeKubeadmFloor},
	{"etcd-step", "etcd goes up by one minor at most, and only from a patch that the next minor accepts (" + etcdFloors() + ")", etcdPage, judgeEtcdStep},
	{"offered-image", "the provider offers the image", PolicyPage, judgeOfferedImage},
	{"offered-kubernetes", "the provider offers the components of the target Kubernetes", PolicyPage, judgeOfferedKubernetes},
	{"variant", "the attestation variant does not change", PolicyPage, judgeVariant},
	{"measurements-weaker", "every register that is enforced stays enforced", PolicyPage, judgeMeasurements},
	{"rollout-running", "no other rollout is in progress", PolicyPage, judgeRolloutRunning},
}

// NewMatrix returns the matrix of releases, which may be in any order. The caller must not
// change the summaries afterwards.
func NewMatrix(releases []release.Summary) *Matrix {
	m := &Matrix{etcd: map[string]version.Version{}}
	for _, s := range releases {
		k := known{Summary: s}
		for _, p := range s.Kubernetes {
			if _, ok := m.etcd[p.Etcd]; !ok {
				m.etcd[p.Etcd] = parseEtcd(p.Etcd)
			}
			k.patches = append(k.patches, patch{p.Version, m.etcd[p.Etcd], p.Faulty, p.Unpinned})
		}
		slices.SortFunc(k.patches, byVersion)
		k.sumUp()
		m.releases = append(m.releases, k)
	}
	slices.SortFunc(m.releases, func(a, b known) int {
		if c := a.Version.Compare(b.Version); c != 0 {
			return c
		}
		return strings.Compare(a.Version.String(), b.Version.String())
	})
	// Releases that differ only in build metadata are equal; the sort above makes the
	// choice independent of the input order.
	m.releases = slices.CompactFunc(m.releases, func(a, b known) bool { return a.Version.Equal(b.Version) })
	for _, k := range m.releases {
		m.patches = append(m.patches, k.patches...)
	}
	slices.SortStableFunc(m.patches, byVersion)
	m.patches = slices.CompactFunc(m.patches, func(a, b patch) bool { return a.version.Equal(b.version) })
	return m
}

// sumUp precomputes the minors and their texts, which rules use very often.
func (k *known) sumUp() {
	var names []string
	for rest := k.patches; len(rest) > 0; {
		m := minor{oldest: rest[0].version}
		names = append(names, m.oldest.MinorString())
		var choices []string
		for len(rest) > 0 && rest[0].version.SameMinor(m.oldest) {
			if rest[0].faulty == "" {
				choices = append(choices, rest[0].version.String())
			}
			rest = rest[1:]
		}
		if len(choices) > 0 {
			m.choice = "choose " + words.Enumerate(choices, " or ")
		}
		k.minors = append(k.minors, m)
	}
	k.supported = words.And(names)
}

func byVersion(a, b patch) int { return a.version.Compare(b.version) }

// parseEtcd parses the tag of an etcd image: 3.6.6-0 is etcd v3.6.6. It returns the zero
// version if the tag is invalid.
func parseEtcd(tag string) version.Version {
	core, _, _ := strings.Cut(tag, "-")
	v, err := version.Parse(core)
	if err != nil {
		return version.Version{}
	}
	return v
}

// find returns a release, or nil if it is unknown.
func (m *Matrix) find(v version.Version) *known {
	low, high := 0, len(m.releases)
	for low < high {
		middle := (low + high) / 2
		switch c := m.releases[middle].Version.Compare(v); {
		case c == 0:
			return &m.releases[middle]
		case c < 0:
			low = middle + 1
		default:
			high = middle
		}
	}
	return nil
}

// patch returns the release's entry of a Kubernetes version, or nil.
func (k *known) patch(v version.Version) *patch { return findPatch(k.patches, v) }

func findPatch(patches []patch, v version.Version) *patch {
	low, high := 0, len(patches)
	for low < high {
		middle := (low + high) / 2
		switch c := patches[middle].version.Compare(v); {
		case c == 0:
			return &patches[middle]
		case c < 0:
			low = middle + 1
		default:
			high = middle
		}
	}
	return nil
}

// supports reports whether the release has any patch of v's minor.
func (k *known) supports(v version.Version) bool { return k.minor(v) != nil }

// minor returns the release's entry of v's minor, or nil.
func (k *known) minor(v version.Version) *minor {
	for i := range k.minors {
		if k.minors[i].oldest.SameMinor(v) {
			return &k.minors[i]
		}
	}
	return nil
}

// step is a hop with the values that rules need.
type step struct {
	m   *Matrix
	cli version.Version
	now *Running
	to  Planned
	o   *Offer

	// services, image and kubernetes are the versions after the hop.
	services, image, kubernetes version.Version
	// runsImage and runsKubernetes are the versions of the control planes, widened by the
	// target of a rollout in progress.
	runsImage, runsKubernetes Span
	// anyImage spans the OS images of all nodes.
	anyImage Span
	// release, imageRelease and oldestRelease are the releases of services and image after
	// the hop, and of the oldest image of the control planes; nil if unknown.
	release, imageRelease, oldestRelease *known
	// patch is the entry of kubernetes in release; nil if there is none.
	patch *patch

	servicesChange, imageChange, kubernetesChange bool
}

// prepare fills s from its first five fields.
func (s *step) prepare() {
	n := s.now
	s.runsImage = widen(n.ControlPlaneImage, n.Target.ImageVersion)
	s.runsKubernetes = widen(n.Kubernetes, n.Target.Kubernetes)
	s.anyImage = s.runsImage.Add(n.WorkerImage.Oldest).Add(n.WorkerImage.Newest)
	s.services, s.image, s.kubernetes = s.to.Services, s.to.Image, s.to.Kubernetes
	if s.services.IsZero() {
		s.services = n.Services.Oldest
	}
	if s.image.IsZero() {
		s.image = s.runsImage.Oldest
	}
	if s.kubernetes.IsZero() {
		s.kubernetes = s.runsKubernetes.Oldest
	}
	s.servicesChange = !n.Services.Is(s.services)
	s.imageChange = !n.NoImages && !s.runsImage.Is(s.image)
	s.kubernetesChange = !s.runsKubernetes.Is(s.kubernetes)
	s.release, s.patch = s.m.find(s.services), nil
	if s.release != nil {
		s.patch = s.release.patch(s.kubernetes)
	}
	s.imageRelease, s.oldestRelease = s.release, s.release
	if !s.image.Equal(s.services) {
		s.imageRelease = s.m.find(s.image)
	}
	if old := s.runsImage.Oldest; old.Equal(s.image) {
		s.oldestRelease = s.imageRelease
	} else if !old.Equal(s.services) {
		s.oldestRelease = s.m.find(old)
	}
}

// widen adds the target of a rollout in progress to s.
func widen(s Span, target string) Span {
	if s.IsZero() || target == "" || target == s.Newest.String() {
		return s
	}
	v, err := version.Parse(target)
	if err != nil {
		return s // invalid: the operator reports it, and no rule can use it
	}
	return s.Add(v)
}

// satisfied are the results of a hop that satisfies all rules. All callers share them,
// because most hops satisfy most rules.
var satisfied = func() (out [len(Rules)]*RuleResult) {
	for i, r := range Rules {
		out[i] = &RuleResult{Rule: r.ID, Severity: plan.Info, Title: r.title, Reference: r.source}
	}
	return out
}()

// evaluation is a step with the values it points to; it is pooled to avoid allocations.
type evaluation struct {
	step  step
	now   Running
	offer Offer
}

var evaluations = sync.Pool{New: func() any { return new(evaluation) }}

// imageRules are the rules about images alone. They do not apply where a cloud selects no images.
var imageRules = []string{"cli-image", "image-services", "offered-image"}

// Check applies all rules to a hop that the CLI of a release makes. It returns one result per
// rule that applies to the cluster, in a fixed order, satisfied rules included. Callers must not
// change the results: those of satisfied rules are shared.
func (m *Matrix) Check(cli version.Version, now Running, to Planned, o Offer) []*RuleResult {
	now.Parts, now.Nodes, now.Kinds, now.Missing = nil, nil, nil, nil // no rule needs them, and the pool must not retain them
	q := evaluations.Get().(*evaluation)
	q.now, q.offer = now, o
	q.step.m, q.step.cli, q.step.now, q.step.to, q.step.o = m, cli, &q.now, to, &q.offer
	q.step.prepare()
	// Few rules are violated, so the buffer is small and the result is cloned to its size.
	var room [4]RuleResult
	var at [len(Rules)]int
	violated := room[:0]
	for i := range Rules {
		if severity, title, remedy := Rules[i].judge(&q.step); severity != plan.Info {
			at[len(violated)] = i
			violated = append(violated, RuleResult{Rule: Rules[i].ID, Severity: severity, Title: title, Reference: Rules[i].source, Remedy: remedy})
		}
	}
	q.offer = Offer{}
	evaluations.Put(q)
	out := make([]*RuleResult, len(satisfied))
	copy(out, satisfied[:])
	kept := slices.Clone(violated)
	for i := range kept {
		out[at[i]] = &kept[i]
	}
	if now.NoImages {
		out = slices.DeleteFunc(out, func(r *RuleResult) bool { return slices.Contains(imageRules, r.Rule) })
	}
	return out
}

// allowed reports whether no rule forbids the hop.
func (s *step) allowed() bool {
	for i := range Rules {
		if sev, _, _ := Rules[i].judge(s); sev == plan.Block {
			return false
		}
	}
	return true
}

// Blocks returns the results that forbid a hop.
func Blocks(results []*RuleResult) []*RuleResult {
	return slices.DeleteFunc(results, func(r *RuleResult) bool { return r.Severity != plan.Block })
}

// minorsUp returns how many minors to is ahead of from; 0 across majors, which only the
// rule same-major judges.
func minorsUp(from, to version.Version) int {
	if from.Major() != to.Major() {
		return 0
	}
	return to.Minor() - from.Minor()
}

// checkAgain is the remedy of rules that could not be evaluated.
const checkAgain = "the findings name what could not be read; fix that and check again"

// unknown is the result of a rule that could not be evaluated.
func unknown(what string) (plan.Severity, string, string) {
	return plan.NotChecked, "the running version of " + what + " is unknown", checkAgain
}

// with names the CLI for a remedy.
func with(v version.Version) string { return "with constellation " + v.String() }

// Each judge is a pure function. Its texts are concatenated, not formatted, because the
// planner calls judges millions of times.

func judgeUnknownRelease(s *step) (plan.Severity, string, string) {
	switch {
	case s.release == nil && s.services.IsZero():
		return unknown("the services")
	case s.release == nil && s.servicesChange:
		return plan.Block, "release " + s.services.String() + " is unknown", "known are " + s.m.List() + "; if it is newer, point `--feed` to the feed that publishes it"
	case s.imageRelease == nil && s.image.IsZero() && !s.now.NoImages:
		return unknown("the image")
	case s.imageRelease == nil && s.imageChange:
		return plan.Block, "image " + s.image.String() + " belongs to no known release", "known are " + s.m.List()
	case s.release == nil:
		return plan.Warn, "the running services are of the unknown release " + s.services.String(), "known are " + s.m.List() + "; if it is your own, point `--feed` to the feed that publishes it"
	case s.imageRelease == nil && !s.now.NoImages:
		return plan.Warn, "the running image is of the unknown release " + s.image.String(), "known are " + s.m.List() + "; if it is your own, point `--feed` to the feed that publishes it"
	}
	return plan.Info, "", ""
}

// List names the newest eight releases.
func (m *Matrix) List() string {
	var out []string
	for _, k := range m.releases[max(0, len(m.releases)-8):] {
		out = append(out, k.Version.String())
	}
	return words.And(out)
}

func judgeFaulty(s *step) (plan.Severity, string, string) {
	if s.release != nil && s.release.Faulty != "" {
		return plan.Block, "release " + s.services.String() + " is faulty: " + s.release.Faulty, s.m.insteadOf(s.services)
	}
	image := s.imageRelease != nil && s.imageRelease.Faulty != ""
	if image && s.imageChange {
		return plan.Block, "image " + s.image.String() + " is faulty: " + s.imageRelease.Faulty, s.m.insteadOf(s.image)
	}
	p := s.patch
	kubernetes := p != nil && p.faulty != ""
	switch {
	case kubernetes && s.kubernetesChange:
		return plan.Block, "Kubernetes " + s.kubernetes.String() + " is faulty: " + p.faulty, s.choose()
	case kubernetes:
		return plan.Warn, "the running Kubernetes " + s.kubernetes.String() + " is faulty: " + p.faulty, s.choose()
	case image:
		return plan.Warn, "the running image " + s.image.String() + " is faulty: " + s.imageRelease.Faulty, s.m.insteadOf(s.image)
	}
	return plan.Info, "", ""
}

// insteadOf names the next release of the same minor that is not faulty.
func (m *Matrix) insteadOf(v version.Version) string {
	for i := range m.releases {
		if k := &m.releases[i]; v.Less(k.Version) && k.Version.SameMinor(v) && k.Faulty == "" {
			return "use " + k.Version.String() + " instead"
		}
	}
	return "wait for a newer patch of " + v.MinorString()
}

// choose names the reachable patches of the target Kubernetes minor in the release after
// the hop: not faulty, offered by the provider, not older than the running version.
func (s *step) choose() string {
	m := s.release.minor(s.kubernetes)
	if m == nil || m.choice == "" {
		return "release " + s.release.Version.String() + " has " + s.release.supported + ": choose one of these"
	}
	runs := s.runsKubernetes.Newest
	if s.o.Kubernetes == nil && minorsUp(runs, s.kubernetes) > 0 {
		return m.choice
	}
	var choices []string
	lacking := "" // text about the newest patch that the provider does not offer
	for i := range s.release.patches {
		p := &s.release.patches[i]
		if !p.version.SameMinor(s.kubernetes) || p.faulty != "" || p.version.Less(runs) {
			continue
		}
		if s.o.Kubernetes != nil && !p.version.Equal(runs) { // the running patch may stay
			if ok, why, remedy := s.o.Kubernetes(p.version); !ok {
				lacking = cmp.Or(why, "the provider does not offer "+p.version.String()) + ": " + cmp.Or(remedy, "choose another minor")
				continue
			}
		}
		choices = append(choices, p.version.String())
	}
	switch {
	case len(choices) > 0:
		return "choose " + words.Enumerate(choices, " or ")
	case lacking != "":
		return lacking
	}
	return "wait for a newer patch of " + s.kubernetes.MinorString() + " or choose a newer minor"
}

func judgeSameMajor(s *step) (plan.Severity, string, string) {
	const remedy = "create a new cluster with the new major version and migrate to it"
	n := s.now
	switch {
	case n.Services.IsZero():
		return unknown("the services")
	case s.services.Major() != n.Services.Oldest.Major() || s.services.Major() != n.Services.Newest.Major():
		return plan.Block, "services " + s.services.String() + " are of another major than the running " + n.Services.String(), remedy
	case s.cli.Major() != s.services.Major():
		return plan.Block, "this CLI, " + s.cli.String() + ", is of another major than services " + s.services.String(), "use a CLI of " + s.services.MinorString()
	case s.image.Major() != s.services.Major() && !s.image.IsZero():
		return plan.Block, "image " + s.image.String() + " is of another major than services " + s.services.String(), "choose an image of " + s.services.MinorString()
	case !s.runsImage.IsZero() && s.image.Major() != s.runsImage.Oldest.Major():
		return plan.Block, "image " + s.image.String() + " is of another major than the running " + s.runsImage.String(), remedy
	case !n.Kubernetes.IsZero() && s.kubernetes.Major() != n.Kubernetes.Oldest.Major():
		return plan.Block, "Kubernetes " + s.kubernetes.String() + " is of another major than the running " + n.Kubernetes.String(), remedy
	}
	return plan.Info, "", ""
}

func judgeNeverDown(s *step) (plan.Severity, string, string) {
	const remedy = "omit this version: downgrades are not supported"
	n := s.now
	switch {
	case n.Services.IsZero():
		return unknown("the services")
	case !s.to.Services.IsZero() && s.services.Less(n.Services.Newest):
		return plan.Block, "services would be downgraded from " + n.Services.Newest.String() + " to " + s.services.String(), remedy
	case n.ControlPlaneImage.IsZero() && !n.NoImages:
		return unknown("the image")
	case !s.to.Image.IsZero() && s.image.Less(s.anyImage.Newest):
		return plan.Block, "the image would be downgraded from " + s.anyImage.Newest.String() + " to " + s.image.String(), remedy
	case n.Kubernetes.IsZero():
		return unknown("Kubernetes")
	case !s.to.Kubernetes.IsZero() && s.kubernetes.Less(s.runsKubernetes.Newest):
		return plan.Block, "Kubernetes would be downgraded from " + s.runsKubernetes.Newest.String() + " to " + s.kubernetes.String(), remedy
	}
	return plan.Info, "", ""
}

func judgeMinorDrift(s *step) (plan.Severity, string, string) {
	n := s.now
	switch {
	case n.Services.IsZero():
		return unknown("the services")
	case minorsUp(n.Services.Oldest, s.services) > 1:
		return plan.Block, "services would go from " + n.Services.Oldest.String() + " to " + s.services.String() + ", more than one minor", s.m.firstTo(n.Services.Oldest)
	case s.anyImage.IsZero() && !n.NoImages:
		return unknown("the image")
	case !n.NoImages && minorsUp(s.anyImage.Oldest, s.image) > 1:
		return plan.Block, "the image would go from " + s.anyImage.Oldest.String() + " to " + s.image.String() + ", more than one minor", s.m.firstTo(s.anyImage.Oldest)
	}
	return plan.Info, "", ""
}

// firstTo names the intermediate release after v: the newest release of the next minor.
func (m *Matrix) firstTo(v version.Version) string {
	for i := range slices.Backward(m.releases) {
		if k := &m.releases[i]; minorsUp(v, k.Version) == 1 && k.Faulty == "" {
			return "upgrade to " + k.Version.String() + " first, " + with(k.Version)
		}
	}
	return "one minor at a time: no release of v" + strconv.Itoa(v.Major()) + "." + strconv.Itoa(v.Minor()+1) + " is known, so point `--feed` to the feed that publishes it"
}

func judgeUpgradeFrom(s *step) (plan.Severity, string, string) {
	n := s.now
	switch {
	case n.Services.IsZero():
		return unknown("the services")
	case s.release == nil || !s.servicesChange || s.services.Less(n.Services.Newest):
		return plan.Info, "", "" // unknown release or downgrade: other rules report it
	case n.Services.Newest.Equal(s.services) && n.Services.Oldest.SameMinor(s.services):
		return plan.Info, "", "" // resumes an upgrade in progress
	case s.release.UpgradeFrom.IsZero():
		return plan.Block, "release " + s.services.String() + " is for new clusters only: it declares no upgrade path", "choose another release"
	case n.Services.Oldest.Less(s.release.UpgradeFrom):
		return plan.Block, "release " + s.services.String() + " requires services " + s.release.UpgradeFrom.String() + " or newer, and services " + n.Services.Oldest.String() + " run",
			"upgrade to " + s.release.UpgradeFrom.String() + " first, " + with(s.release.UpgradeFrom)
	}
	return plan.Info, "", ""
}

func judgeCLIServices(s *step) (plan.Severity, string, string) {
	n := s.now
	switch {
	case n.Services.IsZero():
		return unknown("the services")
	case s.cli.Less(n.Services.Newest):
		return plan.Block, "this CLI, " + s.cli.String() + ", is older than the running services " + n.Services.Newest.String(), "use constellation " + n.Services.Newest.String() + " or newer"
	case minorsUp(n.Services.Oldest, s.cli) > 1:
		return plan.Block, "this CLI, " + s.cli.String() + ", is more than one minor newer than the running services " + n.Services.Oldest.String(), s.m.firstTo(n.Services.Oldest)
	case !s.services.Equal(s.cli):
		return plan.Block, "services " + s.services.String() + " come with constellation " + s.services.String() + ", and this is " + s.cli.String(), "use constellation " + s.services.String() + ", or plan services " + s.cli.String()
	}
	return plan.Info, "", ""
}

func judgeCLIImage(s *step) (plan.Severity, string, string) {
	if s.now.NoImages {
		return plan.Info, "", ""
	}
	if s.runsImage.IsZero() {
		return unknown("the image")
	}
	d := minorsUp(s.image, s.cli)
	switch {
	case d < 0:
		return plan.Block, "image " + s.image.String() + " is of a newer minor than this CLI, " + s.cli.String(), "use a CLI of " + s.image.MinorString()
	case s.imageChange && d > 0:
		return plan.Block, "image " + s.image.String() + " is not of the minor of this CLI, " + s.cli.String(), "choose an image of " + s.cli.MinorString()
	case d > 1:
		return plan.Block, "the unchanged image " + s.image.String() + " is more than one minor older than this CLI, " + s.cli.String(), s.m.firstTo(s.image)
	}
	return plan.Info, "", ""
}

func judgeImageServices(s *step) (plan.Severity, string, string) {
	if s.now.NoImages {
		return plan.Info, "", ""
	}
	if s.anyImage.IsZero() {
		return unknown("the image")
	}
	switch n := s.now; {
	case minorsUp(s.services, s.image) > 0:
		return plan.Block, "image " + s.image.String() + " is newer in minor than services " + s.services.String(), "upgrade the services to " + s.image.MinorString() + " in the same hop"
	case minorsUp(s.services, s.anyImage.Newest) > 0:
		return plan.Block, "the running image " + s.anyImage.Newest.String() + " is newer in minor than services " + s.services.String(), "upgrade the services to " + s.anyImage.Newest.MinorString()
	case minorsUp(s.image, s.services) > 1:
		return plan.Block, "image " + s.image.String() + " is more than one minor older than services " + s.services.String(), "choose an image of " + s.services.MinorString()
	case minorsUp(s.runsImage.Oldest, s.services) > 1:
		return plan.Block, "control planes run image " + s.runsImage.Oldest.String() + ", more than one minor older than services " + s.services.String(), "upgrade the image in an earlier hop"
	case n.WorkerImage.IsZero() && !n.WorkerKubelet.IsZero():
		return plan.NotChecked, "the image of the workers is unknown", checkAgain
	case !n.WorkerImage.IsZero() && minorsUp(n.WorkerImage.Oldest, s.services) > 1:
		return plan.Block, "workers run image " + n.WorkerImage.Oldest.String() + ", more than one minor older than services " + s.services.String(), "replace the workers in an earlier hop"
	}
	return plan.Info, "", ""
}

func judgeOldestSupports(s *step) (plan.Severity, string, string) {
	old := s.runsKubernetes.Oldest
	if old.IsZero() {
		return unknown("Kubernetes")
	}
	up := minorsUp(old, s.kubernetes) > 0
	switch {
	case !up && !s.imageChange:
		return plan.Info, "", ""
	case (s.image.IsZero() || s.runsImage.IsZero()) && !s.now.NoImages:
		return unknown("the image")
	case up && s.release != nil && !s.release.supports(s.kubernetes):
		return plan.Block, "services " + s.services.String() + " do not support Kubernetes " + s.kubernetes.MinorString() + " (supported: " + s.release.supported + ")", s.firstSupporting()
	case s.now.NoImages:
		return plan.Info, "", ""
	case up && s.oldestRelease == nil:
		return plan.Block, "unknown whether image " + s.runsImage.Oldest.String() + " supports Kubernetes " + s.kubernetes.MinorString(), "upgrade to the image of a known release first: " + s.m.List()
	case up && !s.oldestRelease.supports(s.kubernetes):
		return plan.Block, "Kubernetes " + s.kubernetes.MinorString() + " needs an image that supports it on all control planes first, and image " + s.runsImage.Oldest.String() + " supports " + s.oldestRelease.supported,
			s.firstSupporting()
	case s.imageRelease != nil && !s.imageRelease.supports(s.kubernetes) && (up || s.release == nil || s.release.supports(s.kubernetes)):
		// If the services do not support it either, services-support-kubernetes reports it.
		return plan.Block, "image " + s.image.String() + " does not support Kubernetes " + s.kubernetes.MinorString() + " (supported: " + s.imageRelease.supported + ")", "choose an image that does"
	}
	return plan.Info, "", ""
}

// firstSupporting names the oldest release that supports the minor of the hop's Kubernetes.
func (s *step) firstSupporting() string {
	v, what := s.kubernetes, "release and image "
	if s.now.NoImages {
		what = "release "
	}
	for i := range s.m.releases {
		if k := &s.m.releases[i]; k.Faulty == "" && k.supports(v) {
			return "upgrade to " + what + k.Version.String() + " first, and to Kubernetes " + v.MinorString() + " in the hop after it"
		}
	}
	return "no known release supports Kubernetes " + v.MinorString() + ": wait for one"
}

func judgeServicesSupport(s *step) (plan.Severity, string, string) {
	runs := s.runsKubernetes
	switch {
	case runs.IsZero():
		return unknown("Kubernetes")
	case !s.servicesChange || s.release == nil:
		return plan.Info, "", ""
	case !s.release.supports(runs.Oldest):
		return plan.Block, "release " + s.services.String() + " does not support the running Kubernetes " + runs.Oldest.MinorString() + " (supported: " + s.release.supported + ")", s.kubernetesFirst()
	case !s.release.supports(runs.Newest):
		return plan.Block, "release " + s.services.String() + " does not support the running Kubernetes " + runs.Newest.MinorString() + " (supported: " + s.release.supported + ")", s.kubernetesFirst()
	}
	return plan.Info, "", ""
}

// kubernetesFirst names the Kubernetes minor to upgrade to before the release.
func (s *step) kubernetesFirst() string {
	runs := s.runsKubernetes.Oldest
	for i := range s.release.patches {
		if v := s.release.patches[i].version; minorsUp(runs, v) > 0 {
			return "upgrade Kubernetes to " + v.MinorString() + " first, " + with(s.now.Services.Newest)
		}
	}
	return "choose a release that supports Kubernetes " + runs.MinorString()
}

func judgeKubernetesMinor(s *step) (plan.Severity, string, string) {
	old := s.runsKubernetes.Oldest
	switch {
	case old.IsZero():
		return unknown("Kubernetes")
	case minorsUp(old, s.kubernetes) > 1:
		return plan.Block, "Kubernetes would go from " + old.String() + " to " + s.kubernetes.String() + ", more than one minor", "upgrade to Kubernetes v" + strconv.Itoa(old.Major()) + "." + strconv.Itoa(old.Minor()+1) + " first"
	}
	return plan.Info, "", ""
}

func judgeKubernetesOffered(s *step) (plan.Severity, string, string) {
	switch {
	case s.kubernetes.IsZero():
		return unknown("Kubernetes")
	case s.release == nil && s.kubernetesChange:
		return plan.Block, "unknown whether release " + s.services.String() + " contains Kubernetes " + s.kubernetes.String(), "choose a known release: " + s.m.List()
	case s.release == nil:
		return plan.Info, "", ""
	case s.kubernetesChange && s.patch == nil:
		return plan.Block, "release " + s.services.String() + " does not contain Kubernetes " + s.kubernetes.String(), s.choose()
	case !s.kubernetesChange && !s.release.supports(s.kubernetes):
		return plan.Warn, "the running Kubernetes " + s.kubernetes.String() + " is no longer supported by release " + s.services.String(), "upgrade to one of its minors: " + s.release.supported
	}
	return plan.Info, "", ""
}

// kubeletSkew is "at most three minors older (two before v1.25)".
func kubeletSkew() string {
	behind, before, since := lifecycle.KubeletSkewRule()
	return "at most " + number(behind) + " minors older (" + number(before) + " before " + since + ")"
}

func judgeKubeletSkew(s *step) (plan.Severity, string, string) {
	n := s.now
	if n.Kubernetes.IsZero() {
		return unknown("Kubernetes")
	}
	for _, role := range [...]struct {
		name string
		span Span
	}{{"control planes", n.ControlPlaneKubelet}, {"workers", n.WorkerKubelet}} {
		if role.span.IsZero() {
			continue
		}
		old, newest := role.span.Oldest, role.span.Newest
		limit := lifecycle.KubeletSkew(old)
		d := minorsUp(old, s.kubernetes)
		switch {
		case d > limit:
			return plan.Block, "kubelets " + old.String() + " of " + role.name + " would be more than " + number(limit) + " minors behind Kubernetes " + s.kubernetes.String(), "replace these nodes in an earlier hop with the same Kubernetes minor"
		case minorsUp(s.kubernetes, newest) > 0 && minorsUp(n.Kubernetes.Newest, newest) > 0:
			return plan.Block, "kubelets " + newest.String() + " of " + role.name + " would be newer than Kubernetes " + s.kubernetes.String(), "upgrade to Kubernetes " + newest.MinorString() + " or newer"
		}
	}
	switch old := n.WorkerKubelet.Oldest; {
	case minorsUp(n.Kubernetes.Oldest, n.WorkerKubelet.Newest) > 0:
		return plan.Warn, "kubelets " + n.WorkerKubelet.Newest.String() + " of workers are newer than a running API server " + n.Kubernetes.Oldest.String(), "wait for the rollout of the control planes to end"
	case s.to.KeepWorkers && !old.IsZero() && s.kubernetesChange && minorsUp(old, s.kubernetes) == lifecycle.KubeletSkew(old):
		return plan.Warn, "workers with kubelets " + old.String() + " would stay " + number(lifecycle.KubeletSkew(old)) + " minors behind, the allowed maximum", "replace them before the next minor of Kubernetes"
	}
	return plan.Info, "", ""
}

// number is a small number as a word.
func number(n int) string {
	words := [...]string{"no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"}
	if n >= 0 && n < len(words) {
		return words[n]
	}
	return strconv.Itoa(n)
}

// judgeKubeletInPlace holds a rule of kubeadm on the machine, which the agent enforces. A replaced worker begins with
// the new kubelet.
func judgeKubeletInPlace(s *step) (plan.Severity, string, string) {
	old := s.now.WorkerKubelet.Oldest
	if s.now.WorkersInPlace && !s.to.KeepWorkers && !old.IsZero() && minorsUp(old, s.kubernetes) > 1 {
		return plan.Block, "kubelets " + old.String() + " of workers would skip a minor on the way to " + s.kubernetes.String() + ", and workers are upgraded in place", "upgrade the workers to the minor between them first, without keepWorkers"
	}
	return plan.Info, "", ""
}

func judgeControlPlaneSkew(s *step) (plan.Severity, string, string) {
	k := s.now.Kubernetes
	switch {
	case k.IsZero():
		return unknown("Kubernetes")
	case minorsUp(k.Oldest, k.Newest) > 1:
		return plan.Block, "API servers " + k.Oldest.String() + " and " + k.Newest.String() + " run side by side, more than one minor apart", "repair the control planes with " + k.Oldest.String() + " first"
	}
	return plan.Info, "", ""
}

// kubeadmFloor is the first kubeadm that reads the configuration format of this program.
var kubeadmFloor = lifecycle.Reads("kubeadm.k8s.io/v1beta4")

func judgeKubeadmFloor(s *step) (plan.Severity, string, string) {
	if s.kubernetesChange && s.kubernetes.Major() == 1 && s.kubernetes.Minor() < kubeadmFloor.Minor() {
		return plan.Block, "kubeadm " + s.kubernetes.String() + " cannot read the configuration of this program", "choose Kubernetes " + kubeadmFloor.MinorString() + " or newer"
	}
	return plan.Info, "", ""
}

// etcdFloors is "v3.6 from v3.5.26, v3.7 from v3.6.11".
func etcdFloors() string {
	var parts []string
	for _, s := range lifecycle.EtcdSteps() {
		parts = append(parts, s.Version+" from "+s.From.String())
	}
	return strings.Join(parts, ", ")
}

func judgeEtcdStep(s *step) (plan.Severity, string, string) {
	if !s.kubernetesChange && s.to.Etcd == "" {
		return plan.Info, "", ""
	}
	if s.now.ExternalEtcd {
		return plan.NotChecked, "etcd runs outside of the cluster: its version is not checked", "upgrade it as its manual says: " + etcdFloors()
	}
	from, to := s.m.etcdOf(s.now), version.Version{}
	switch {
	case s.to.Etcd != "" && s.kubernetesChange:
		return plan.Block, "etcd gets " + s.to.Etcd + " in a hop of its own, without another Kubernetes", "upgrade Kubernetes in the hop after it"
	case s.to.Etcd != "":
		to = parseEtcd(s.to.Etcd)
	case s.patch != nil:
		to = s.patch.etcd
	}
	d := minorsUp(from, to)
	switch {
	case from.IsZero():
		return plan.NotChecked, "the running version of etcd is unknown", checkAgain
	case to.IsZero():
		return plan.NotChecked, "the etcd version of Kubernetes " + s.kubernetes.String() + " is unknown", "choose a patch that the release contains"
	case from.Major() != to.Major():
		return plan.Block, "etcd would go from " + from.String() + " to " + to.String() + ", another major", "choose another version of Kubernetes"
	case d > 1:
		return plan.Block, "etcd would go from " + from.String() + " to " + to.String() + ", more than one minor", "choose a version of Kubernetes in between"
	case d < 0:
		return plan.Block, "etcd would be downgraded from " + from.String() + " to " + to.String(), "choose a newer version of Kubernetes"
	}
	if floor, below := lifecycle.BelowFloor(from, to); below {
		remedy := "choose a patch of Kubernetes " + s.runsKubernetes.Oldest.MinorString() + " that has etcd " + floor.From.String() + " or newer"
		switch {
		case floor.Tag != "" && s.now.Etcd == "":
			// A path needs the version that runs.
			remedy = "no etcd was found in the cluster, and its version is assumed: " + checkAgain
		case floor.Tag != "":
			remedy = "`constellation upgrade apply` brings etcd " + floor.Tag + " in a hop of its own: `constellation upgrade check` shows the path"
		}
		return plan.Block, "etcd " + from.String() + " cannot be upgraded to " + to.String() + " directly: " + floor.From.String() + " must come first", remedy
	}
	return plan.Info, "", ""
}

// etcdOf returns the running etcd version: the observed one, else the one that belongs to
// the running Kubernetes. It is zero if unknown.
func (m *Matrix) etcdOf(n *Running) version.Version {
	if n.Etcd != "" {
		if v, ok := m.etcd[n.Etcd]; ok {
			return v
		}
		return parseEtcd(n.Etcd)
	}
	if p := findPatch(m.patches, n.Kubernetes.Oldest); p != nil {
		return p.etcd
	}
	return version.Version{}
}

func judgeOfferedImage(s *step) (plan.Severity, string, string) {
	if s.imageChange && s.o.Images != nil && !s.image.IsZero() {
		if ok, why, remedy := s.o.Images(s.image); !ok {
			return plan.Block, cmp.Or(why, "the provider does not offer image "+s.image.String()), remedy
		}
	}
	return plan.Info, "", ""
}

func judgeOfferedKubernetes(s *step) (plan.Severity, string, string) {
	if s.kubernetesChange && s.o.Kubernetes != nil && !s.kubernetes.IsZero() {
		if ok, why, remedy := s.o.Kubernetes(s.kubernetes); !ok {
			return plan.Block, cmp.Or(why, "the provider does not offer Kubernetes "+s.kubernetes.String()), remedy
		}
	} else if s.kubernetesChange && s.patch != nil && s.patch.unpinned != "" {
		return plan.Block, "release " + s.services.String() + " has no digests of the components of Kubernetes " + s.kubernetes.String() + ": " + s.patch.unpinned, "use a cloud that brings components and digests of its own, or a release that has them"
	}
	return plan.Info, "", ""
}

// demands parses the attestation policies before and after the hop.
func (s *step) demands() (now, then cluster.Demand, err error) {
	if err = json.Unmarshal([]byte(s.now.JoinConfig.Attestation), &now); err != nil {
		return now, then, fmt.Errorf("read join-config: %w", err)
	}
	if err = json.Unmarshal([]byte(s.to.Attestation), &then); err != nil {
		return now, then, fmt.Errorf("read planned attestation: %w", err)
	}
	return now, then, nil
}

func judgeVariant(s *step) (plan.Severity, string, string) {
	if s.to.Attestation == "" || s.to.Attestation == s.now.JoinConfig.Attestation {
		return plan.Info, "", ""
	}
	now, then, err := s.demands()
	switch {
	case err != nil:
		return plan.NotChecked, "attestation policies not compared: " + err.Error(), "repair the named policy, then check again"
	case now.Variant != then.Variant:
		return plan.Block, "the attestation variant would change from " + strconv.Quote(now.Variant) + " to " + strconv.Quote(then.Variant), "keep " + strconv.Quote(now.Variant) + "; another variant needs a new cluster"
	}
	return plan.Info, "", ""
}

func judgeMeasurements(s *step) (plan.Severity, string, string) {
	if s.to.Attestation == "" || s.to.Attestation == s.now.JoinConfig.Attestation {
		return plan.Info, "", ""
	}
	now, then, err := s.demands()
	if err != nil {
		return plan.NotChecked, "measurements not compared: " + err.Error(), "repair the named policy, then check again"
	}
	lost := now.WeakenedBy(then)
	if len(lost) == 0 {
		return plan.Info, "", ""
	}
	var names []string
	for _, i := range lost {
		names = append(names, strconv.Itoa(int(i)))
	}
	return plan.Block, "PCR " + words.And(names) + " would no longer be enforced", "write the expected value of PCR " + words.And(names) + " of the new image into the configuration, without warnOnly"
}

func judgeRolloutRunning(s *step) (plan.Severity, string, string) {
	n := s.now
	what, nodes := "", true
	newMinor := minorsUp(n.Services.Newest, s.services) > 0
	switch {
	case s.runsKubernetes.Mixed():
		what = "Kubernetes " + s.runsKubernetes.Oldest.String() + " to " + s.runsKubernetes.Newest.String()
	case s.runsImage.Mixed():
		what = "image of the control planes " + s.runsImage.Oldest.String() + " to " + s.runsImage.Newest.String()
	case n.ControlPlaneKubelet.Mixed() || !n.ControlPlaneKubelet.IsZero() && !n.ControlPlaneKubelet.Is(n.Kubernetes.Newest):
		what = "kubelets of the control planes " + n.ControlPlaneKubelet.Oldest.String() + " to " + n.Kubernetes.Newest.String()
	case n.WorkerImage.Mixed():
		what = "image of the workers " + n.WorkerImage.Oldest.String() + " to " + n.WorkerImage.Newest.String()
	case n.WorkerKubelet.Mixed():
		what = "kubelets of the workers " + n.WorkerKubelet.Oldest.String() + " to " + n.WorkerKubelet.Newest.String()
	case n.Services.Mixed():
		// A hop upgrades charts first and so completes this; it does not complete a rollout
		// of nodes.
		what, nodes = "services "+n.Services.Oldest.String()+" to "+n.Services.Newest.String(), false
	default:
		return plan.Info, "", ""
	}
	const remedy = "`constellation status` shows its progress; upgrade to a new minor after it has ended"
	if nodes {
		newMinor = newMinor || minorsUp(s.runsKubernetes.Newest, s.kubernetes) > 0 || minorsUp(s.anyImage.Newest, s.image) > 0
	}
	if newMinor {
		return plan.Block, "a rollout is in progress (" + what + ") and must end before a new minor", remedy
	}
	return plan.Warn, "a rollout is in progress (" + what + ")", remedy
}
