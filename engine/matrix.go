package engine

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"constellation/engine/attestation"
	"constellation/engine/release"
	"constellation/engine/version"
)

// Matrix knows which versions go together: what releases contain, as data, and the
// rules over it, as code. It is immutable and may be used concurrently.
//
// What it does not know is what a user wants and what a cluster does meanwhile: the
// first is in [Planned], the second in [Running], and both are only read.
type Matrix struct {
	releases []known // oldest first
	// patches are those of Kubernetes that any release has, oldest first, each once.
	patches []patch
	etcd    map[string]version.Version // by tag
}

// known is a release with what rules ask for worked out.
type known struct {
	release.Summary
	patches []patch // of Kubernetes, oldest first
	minors  []minor // of Kubernetes, oldest first
	// supported is "v1.34 and v1.35".
	supported string
}

// minor is one of Kubernetes that a release supports.
type minor struct {
	oldest version.Version
	choice string // "choose v1.35.4 or v1.35.7"; empty if all are faulty
}

// patch is a version of Kubernetes that a release has.
type patch struct {
	version, etcd version.Version // etcd is zero if nobody said, or its tag is none of etcd's
	faulty        string
}

// Planned is where a hop leads. A zero version means as it is: the oldest that runs.
// Planned values can be compared with ==.
type Planned struct {
	Services, Image, Kubernetes version.Version
	// KeepWorkers leaves the workers as they are; a later hop replaces them.
	KeepWorkers bool
	// Attestation is what joining machines must show after the hop, in the format of
	// [JoinConfig.Attestation]; empty if that does not change.
	Attestation string
}

// Offer is the provider's word on what it has. A nil function offers everything. If
// something is not offered, why and remedy say what to tell the user.
type Offer struct {
	Images, Kubernetes func(version.Version) (ok bool, why, remedy string)
}

// Where rules come from.
const (
	policyPage   = "docs/compatibility.md"
	semverPage   = "https://semver.org/#spec-item-8"
	skewPage     = "https://kubernetes.io/releases/version-skew-policy/"
	kubeletKEP   = "https://kubernetes.io/releases/version-skew-policy/#kubelet, KEP-3935"
	kubeadmPage  = "https://kubernetes.io/docs/reference/config-api/kubeadm-config.v1beta4/"
	kubeadmMinor = "https://kubernetes.io/docs/tasks/administer-cluster/kubeadm/kubeadm-upgrade/"
	etcdPage     = "https://etcd.io/docs/v3.6/upgrades/upgrade_3_6/"
)

// rule is one condition that every hop must satisfy. title is what is true if it
// does; judge returns Info and no texts then, because it is asked very often.
type rule struct {
	id, title, source string
	judge             func(*step) (s Severity, title, remedy string)
}

// rules are all rules, in the order in which they are told: what cannot be at all,
// then distances, then what must go together, then what the provider has.
var rules = [...]rule{
	{"unknown-release", "every release that is gone to is known", policyPage, judgeUnknownRelease},
	{"faulty", "nothing that was found faulty is gone to, even if it was released", policyPage, judgeFaulty},
	{"same-major", "the major of services, image, Kubernetes and CLI stays", semverPage, judgeSameMajor},
	{"never-down", "services, image and Kubernetes never go down", policyPage, judgeNeverDown},
	{"minor-drift", "services and image go up by one minor per hop at most", policyPage, judgeMinorDrift},
	{"upgrade-from", "the services that run are as new as the new release wants them to be", policyPage, judgeUpgradeFrom},
	{"cli-services", "a CLI brings the services of its own release, and takes over those of one minor before", policyPage, judgeCLIServices},
	{"cli-image", "a new image is of the CLI's minor, in any patch; an image that stays may be one minor older", policyPage, judgeCLIImage},
	{"image-services", "no image is newer in minor than the services, or more than one minor older", policyPage, judgeImageServices},
	{"oldest-supports-kubernetes", "a new minor of Kubernetes is supported by the oldest image of the control planes, the new image and the new services", policyPage, judgeOldestSupports},
	{"services-support-kubernetes", "new services support the Kubernetes that runs, because charts come first", policyPage, judgeServicesSupport},
	{"kubernetes-minor", "Kubernetes goes up by one minor per hop at most", kubeadmMinor, judgeKubernetesMinor},
	{"kubernetes-offered", "the patch of Kubernetes that is gone to is in the release; an old patch may stay", policyPage, judgeKubernetesOffered},
	{"kubelet-skew", "kubelets are not newer than the API server, and at most three minors older (two before v1.25)", kubeletKEP, judgeKubeletSkew},
	{"control-plane-skew", "API servers are at most one minor apart", skewPage + "#kube-apiserver", judgeControlPlaneSkew},
	{"kubeadm-floor", "kubeadm can read the configuration that this program writes (v1beta4, from v1.31 on)", kubeadmPage, judgeKubeadmFloor},
	{"etcd-step", "etcd goes up by one minor at most, and to v3.6 only from v3.5.26 or newer", etcdPage, judgeEtcdStep},
	{"offered-image", "the provider has the image", policyPage, judgeOfferedImage},
	{"offered-kubernetes", "the provider has the components of this Kubernetes", policyPage, judgeOfferedKubernetes},
	{"variant", "the attestation variant stays", policyPage, judgeVariant},
	{"measurements-weaker", "every register that is enforced stays enforced", policyPage, judgeMeasurements},
	{"rollout-running", "no other rollout is under way", policyPage, judgeRolloutRunning},
}

// NewMatrix makes a matrix of releases, in any order. The summaries are not changed,
// and must not be afterwards.
func NewMatrix(releases []release.Summary) *Matrix {
	m := &Matrix{etcd: map[string]version.Version{}}
	for _, s := range releases {
		k := known{Summary: s}
		for _, p := range s.Kubernetes {
			if _, ok := m.etcd[p.Etcd]; !ok {
				m.etcd[p.Etcd] = parseEtcd(p.Etcd)
			}
			k.patches = append(k.patches, patch{p.Version, m.etcd[p.Etcd], p.Faulty})
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
	// Of two that differ in build metadata only, one is as good as the other; the
	// same one is taken whatever the order was.
	m.releases = slices.CompactFunc(m.releases, func(a, b known) bool { return a.Version.Equal(b.Version) })
	for _, k := range m.releases {
		m.patches = append(m.patches, k.patches...)
	}
	slices.SortStableFunc(m.patches, byVersion)
	m.patches = slices.CompactFunc(m.patches, func(a, b patch) bool { return a.version.Equal(b.version) })
	return m
}

// sumUp works out the minors: their sentences are asked for very often.
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
			m.choice = "choose " + enumerate(choices, " or ")
		}
		k.minors = append(k.minors, m)
	}
	k.supported = and(names)
}

func byVersion(a, b patch) int { return a.version.Compare(b.version) }

// parseEtcd reads the tag of etcd's image: 3.6.6-0 is etcd v3.6.6. Zero if it is none.
func parseEtcd(tag string) version.Version {
	core, _, _ := strings.Cut(tag, "-")
	v, err := version.Parse(core)
	if err != nil {
		return version.Version{}
	}
	return v
}

// find returns the release, or nil if it is not known.
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

// patch returns what the release knows about a version of Kubernetes; nil if nothing.
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

// minor returns the minor that v is of; nil if the release has no patch of it.
func (k *known) minor(v version.Version) *minor {
	for i := range k.minors {
		if k.minors[i].oldest.SameMinor(v) {
			return &k.minors[i]
		}
	}
	return nil
}

// and joins words: "a, b and c".
func and(words []string) string { return enumerate(words, " and ") }

func enumerate(words []string, last string) string {
	switch n := len(words); n {
	case 0:
		return "nothing"
	case 1:
		return words[0]
	default:
		return strings.Join(words[:n-1], ", ") + last + words[n-1]
	}
}

// step is a hop as the rules see it.
type step struct {
	m   *Matrix
	cli version.Version
	now *Running
	to  Planned
	o   *Offer

	// services, image and kubernetes are what there will be.
	services, image, kubernetes version.Version
	// runsImage and runsKubernetes are what the control planes run, widened by what the
	// operator was told to bring them to.
	runsImage, runsKubernetes Span
	// anyImage is of the OS of all nodes.
	anyImage Span
	// release, imageRelease and oldestRelease are of the services and the image after
	// the hop, and of the oldest image of the control planes; nil if not known.
	release, imageRelease, oldestRelease *known
	// patch is what release knows about kubernetes; nil if nothing.
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
	s.servicesChange = !n.Services.is(s.services)
	s.imageChange = !s.runsImage.is(s.image)
	s.kubernetesChange = !s.runsKubernetes.is(s.kubernetes)
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

// widen adds a target that the operator works on, if it is another one.
func widen(s Span, target string) Span {
	if s.IsZero() || target == "" || target == s.Newest.String() {
		return s
	}
	v, err := version.Parse(target)
	if err != nil {
		return s // no version: the operator reports it, and no rule can use it
	}
	return s.Add(v)
}

// is reports whether v, and nothing else, runs.
func (s Span) is(v version.Version) bool { return s.Oldest.Equal(v) && s.Newest.Equal(v) }

// fine are the results of a hop that all rules agree with. They are shared by all who
// ask, because most rules agree with most hops.
var fine = func() (out [len(rules)]*RuleResult) {
	for i, r := range rules {
		out[i] = &RuleResult{Rule: r.id, Severity: Info, Title: r.title, Reference: r.source}
	}
	return out
}()

// String is "block minor-drift: services would go ..."; the remedy is left out.
func (r *RuleResult) String() string { return string(r.Severity) + " " + r.Rule + ": " + r.Title }

// question is a step with what it points to, so that asking costs no memory.
type question struct {
	step  step
	now   Running
	offer Offer
}

var questions = sync.Pool{New: func() any { return new(question) }}

// Check applies all rules to a hop that the CLI of a release makes. It returns one
// result per rule, always in the same order, those that are satisfied included. The
// results must not be changed: those of satisfied rules are the same for everybody.
func (m *Matrix) Check(cli version.Version, now Running, to Planned, o Offer) []*RuleResult {
	now.Parts, now.Nodes, now.Kinds, now.Missing = nil, nil, nil, nil // no rule asks for them, and the pool shall keep nobody's nodes
	q := questions.Get().(*question)
	q.now, q.offer = now, o
	q.step.m, q.step.cli, q.step.now, q.step.to, q.step.o = m, cli, &q.now, to, &q.offer
	q.step.prepare()
	// Few rules have something to say, so there is room for a few here, and for no
	// more than there are in what is returned.
	var room [4]RuleResult
	var at [len(rules)]int
	said := room[:0]
	for i := range rules {
		if severity, title, remedy := rules[i].judge(&q.step); severity != Info {
			at[len(said)] = i
			said = append(said, RuleResult{Rule: rules[i].id, Severity: severity, Title: title, Reference: rules[i].source, Remedy: remedy})
		}
	}
	q.offer = Offer{}
	questions.Put(q)
	out := make([]*RuleResult, len(fine))
	copy(out, fine[:])
	kept := slices.Clone(said)
	for i := range kept {
		out[at[i]] = &kept[i]
	}
	return out
}

// allowed reports whether no rule forbids the hop.
func (s *step) allowed() bool {
	for i := range rules {
		if sev, _, _ := rules[i].judge(s); sev == Block {
			return false
		}
	}
	return true
}

// blocks returns the results that forbid a hop.
func blocks(results []*RuleResult) []*RuleResult {
	return slices.DeleteFunc(results, func(r *RuleResult) bool { return r.Severity != Block })
}

// minorsUp is how many minors to is ahead of from; 0 across majors, which are the
// business of one rule alone.
func minorsUp(from, to version.Version) int {
	if from.Major() != to.Major() {
		return 0
	}
	return to.Minor() - from.Minor()
}

// unknown is what a rule says if it cannot be asked.
func unknown(what string) (Severity, string, string) {
	return NotChecked, "not known which version of " + what + " runs", "the findings say what could not be read, and why; when it can be, check again"
}

// with is how to say that another CLI does it.
func with(v version.Version) string { return "with constellation " + v.String() }

// Each judge is a pure function. The versions in its sentences are joined, not
// formatted: a planner asks millions of times.

func judgeUnknownRelease(s *step) (Severity, string, string) {
	switch {
	case s.release == nil && s.services.IsZero():
		return unknown("the services")
	case s.release == nil && s.servicesChange:
		return Block, "release " + s.services.String() + " is not known", "known are " + s.m.list() + "; if it is newer than that, point `--feed` to where it is published"
	case s.imageRelease == nil && s.image.IsZero():
		return unknown("the image")
	case s.imageRelease == nil && s.imageChange:
		return Block, "image " + s.image.String() + " is of no known release", "known are " + s.m.list()
	case s.release == nil:
		return Warn, "the services that run are of release " + s.services.String() + ", which is not known", "known are " + s.m.list() + "; if it is your own, point `--feed` to where it is published"
	case s.imageRelease == nil:
		return Warn, "the image that runs is of release " + s.image.String() + ", which is not known", "known are " + s.m.list() + "; if it is your own, point `--feed` to where it is published"
	}
	return Info, "", ""
}

// list names the releases, the newest eight.
func (m *Matrix) list() string {
	var out []string
	for _, k := range m.releases[max(0, len(m.releases)-8):] {
		out = append(out, k.Version.String())
	}
	return and(out)
}

func judgeFaulty(s *step) (Severity, string, string) {
	if s.release != nil && s.release.Faulty != "" {
		return Block, "release " + s.services.String() + " is faulty: " + s.release.Faulty, s.m.insteadOf(s.services)
	}
	image := s.imageRelease != nil && s.imageRelease.Faulty != ""
	if image && s.imageChange {
		return Block, "image " + s.image.String() + " is faulty: " + s.imageRelease.Faulty, s.m.insteadOf(s.image)
	}
	p := s.patch
	kubernetes := p != nil && p.faulty != ""
	switch {
	case kubernetes && s.kubernetesChange:
		return Block, "Kubernetes " + s.kubernetes.String() + " is faulty: " + p.faulty, s.choose()
	case kubernetes:
		return Warn, "Kubernetes " + s.kubernetes.String() + ", which runs, is faulty: " + p.faulty, s.choose()
	case image:
		return Warn, "image " + s.image.String() + ", which runs, is faulty: " + s.imageRelease.Faulty, s.m.insteadOf(s.image)
	}
	return Info, "", ""
}

// insteadOf names the next release of the same minor that is not faulty.
func (m *Matrix) insteadOf(v version.Version) string {
	for i := range m.releases {
		if k := &m.releases[i]; v.Less(k.Version) && k.Version.SameMinor(v) && k.Faulty == "" {
			return "take " + k.Version.String() + " instead"
		}
	}
	return "wait for a newer patch of " + v.MinorString()
}

// choose names what the release after the hop has of a minor of Kubernetes that may be
// gone to: nothing faulty, nothing that the provider does not have, nothing older than
// what runs.
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
	lacking := "" // of the newest that the provider does not have
	for i := range s.release.patches {
		p := &s.release.patches[i]
		if !p.version.SameMinor(s.kubernetes) || p.faulty != "" || p.version.Less(runs) {
			continue
		}
		if s.o.Kubernetes != nil && !p.version.Equal(runs) { // what runs may stay
			if ok, why, remedy := s.o.Kubernetes(p.version); !ok {
				lacking = orElse(why, "the provider does not have "+p.version.String()) + ": " + orElse(remedy, "choose another minor")
				continue
			}
		}
		choices = append(choices, p.version.String())
	}
	switch {
	case len(choices) > 0:
		return "choose " + enumerate(choices, " or ")
	case lacking != "":
		return lacking
	}
	return "wait for a newer patch of " + s.kubernetes.MinorString() + " or choose a newer minor"
}

func judgeSameMajor(s *step) (Severity, string, string) {
	const remedy = "make a new cluster of the new major and move to it"
	n := s.now
	switch {
	case n.Services.IsZero():
		return unknown("the services")
	case s.services.Major() != n.Services.Oldest.Major() || s.services.Major() != n.Services.Newest.Major():
		return Block, "services " + s.services.String() + " are of another major than " + n.Services.String() + ", which run", remedy
	case s.cli.Major() != s.services.Major():
		return Block, "this CLI, " + s.cli.String() + ", is of another major than services " + s.services.String(), "take a CLI of " + s.services.MinorString()
	case s.image.Major() != s.services.Major() && !s.image.IsZero():
		return Block, "image " + s.image.String() + " is of another major than services " + s.services.String(), "choose an image of " + s.services.MinorString()
	case !s.runsImage.IsZero() && s.image.Major() != s.runsImage.Oldest.Major():
		return Block, "image " + s.image.String() + " is of another major than " + s.runsImage.String() + ", which runs", remedy
	case !n.Kubernetes.IsZero() && s.kubernetes.Major() != n.Kubernetes.Oldest.Major():
		return Block, "Kubernetes " + s.kubernetes.String() + " is of another major than " + n.Kubernetes.String() + ", which runs", remedy
	}
	return Info, "", ""
}

func judgeNeverDown(s *step) (Severity, string, string) {
	const remedy = "leave out this version: nothing can be taken back by an upgrade"
	n := s.now
	switch {
	case n.Services.IsZero():
		return unknown("the services")
	case !s.to.Services.IsZero() && s.services.Less(n.Services.Newest):
		return Block, "services would go down from " + n.Services.Newest.String() + " to " + s.services.String(), remedy
	case n.ControlPlaneImage.IsZero():
		return unknown("the image")
	case !s.to.Image.IsZero() && s.image.Less(s.anyImage.Newest):
		return Block, "the image would go down from " + s.anyImage.Newest.String() + " to " + s.image.String(), remedy
	case n.Kubernetes.IsZero():
		return unknown("Kubernetes")
	case !s.to.Kubernetes.IsZero() && s.kubernetes.Less(s.runsKubernetes.Newest):
		return Block, "Kubernetes would go down from " + s.runsKubernetes.Newest.String() + " to " + s.kubernetes.String(), remedy
	}
	return Info, "", ""
}

func judgeMinorDrift(s *step) (Severity, string, string) {
	n := s.now
	switch {
	case n.Services.IsZero():
		return unknown("the services")
	case minorsUp(n.Services.Oldest, s.services) > 1:
		return Block, "services would go from " + n.Services.Oldest.String() + " to " + s.services.String() + ", more than one minor", s.m.firstTo(n.Services.Oldest)
	case s.anyImage.IsZero():
		return unknown("the image")
	case minorsUp(s.anyImage.Oldest, s.image) > 1:
		return Block, "the image would go from " + s.anyImage.Oldest.String() + " to " + s.image.String() + ", more than one minor", s.m.firstTo(s.anyImage.Oldest)
	}
	return Info, "", ""
}

// firstTo says where to go first from v: to the newest release of the next minor.
func (m *Matrix) firstTo(v version.Version) string {
	for i := range slices.Backward(m.releases) {
		if k := &m.releases[i]; minorsUp(v, k.Version) == 1 && k.Faulty == "" {
			return "go to " + k.Version.String() + " first, " + with(k.Version)
		}
	}
	return "one minor at a time: no release of v" + strconv.Itoa(v.Major()) + "." + strconv.Itoa(v.Minor()+1) + " is known, so point `--feed` to where it is published"
}

func judgeUpgradeFrom(s *step) (Severity, string, string) {
	n := s.now
	switch {
	case n.Services.IsZero():
		return unknown("the services")
	case s.release == nil || !s.servicesChange || s.services.Less(n.Services.Newest):
		return Info, "", "" // not known, or down: other rules speak
	case n.Services.Newest.Equal(s.services) && n.Services.Oldest.SameMinor(s.services):
		return Info, "", "" // the end of an upgrade that has begun
	case s.release.UpgradeFrom.IsZero():
		return Block, "release " + s.services.String() + " is for new clusters only: it says of no release that it can be upgraded", "choose another release"
	case n.Services.Oldest.Less(s.release.UpgradeFrom):
		return Block, "release " + s.services.String() + " can be gone to from " + s.release.UpgradeFrom.String() + " on, and services " + n.Services.Oldest.String() + " run",
			"go to " + s.release.UpgradeFrom.String() + " first, " + with(s.release.UpgradeFrom)
	}
	return Info, "", ""
}

func judgeCLIServices(s *step) (Severity, string, string) {
	n := s.now
	switch {
	case n.Services.IsZero():
		return unknown("the services")
	case s.cli.Less(n.Services.Newest):
		return Block, "this CLI, " + s.cli.String() + ", is older than the services that run, " + n.Services.Newest.String(), "take constellation " + n.Services.Newest.String() + " or newer"
	case minorsUp(n.Services.Oldest, s.cli) > 1:
		return Block, "this CLI, " + s.cli.String() + ", is more than one minor newer than the services that run, " + n.Services.Oldest.String(), s.m.firstTo(n.Services.Oldest)
	case !s.services.Equal(s.cli):
		return Block, "services " + s.services.String() + " come with constellation " + s.services.String() + ", and this is " + s.cli.String(), "take constellation " + s.services.String() + ", or plan services " + s.cli.String()
	}
	return Info, "", ""
}

func judgeCLIImage(s *step) (Severity, string, string) {
	if s.runsImage.IsZero() {
		return unknown("the image")
	}
	d := minorsUp(s.image, s.cli)
	switch {
	case d < 0:
		return Block, "image " + s.image.String() + " is of a newer minor than this CLI, " + s.cli.String(), "take a CLI of " + s.image.MinorString()
	case s.imageChange && d > 0:
		return Block, "image " + s.image.String() + " is not of the minor of this CLI, " + s.cli.String(), "choose an image of " + s.cli.MinorString()
	case d > 1:
		return Block, "image " + s.image.String() + ", which would stay, is more than one minor older than this CLI, " + s.cli.String(), s.m.firstTo(s.image)
	}
	return Info, "", ""
}

func judgeImageServices(s *step) (Severity, string, string) {
	if s.anyImage.IsZero() {
		return unknown("the image")
	}
	switch n := s.now; {
	case minorsUp(s.services, s.image) > 0:
		return Block, "image " + s.image.String() + " is newer in minor than services " + s.services.String(), "bring the services to " + s.image.MinorString() + " in the same hop"
	case minorsUp(s.services, s.anyImage.Newest) > 0:
		return Block, "image " + s.anyImage.Newest.String() + ", which runs, is newer in minor than services " + s.services.String(), "bring the services to " + s.anyImage.Newest.MinorString()
	case minorsUp(s.image, s.services) > 1:
		return Block, "image " + s.image.String() + " is more than one minor older than services " + s.services.String(), "choose an image of " + s.services.MinorString()
	case minorsUp(s.runsImage.Oldest, s.services) > 1:
		return Block, "control planes run image " + s.runsImage.Oldest.String() + ", more than one minor older than services " + s.services.String(), "bring the image up in a hop before"
	case n.WorkerImage.IsZero() && !n.WorkerKubelet.IsZero():
		return NotChecked, "not known which image the workers run", "the findings say what could not be read, and why; when it can be, check again"
	case !n.WorkerImage.IsZero() && minorsUp(n.WorkerImage.Oldest, s.services) > 1:
		return Block, "workers run image " + n.WorkerImage.Oldest.String() + ", more than one minor older than services " + s.services.String(), "replace the workers in a hop before"
	}
	return Info, "", ""
}

func judgeOldestSupports(s *step) (Severity, string, string) {
	old := s.runsKubernetes.Oldest
	if old.IsZero() {
		return unknown("Kubernetes")
	}
	up := minorsUp(old, s.kubernetes) > 0
	switch {
	case !up && !s.imageChange:
		return Info, "", ""
	case s.image.IsZero() || s.runsImage.IsZero():
		return unknown("the image")
	case up && s.release != nil && !s.release.supports(s.kubernetes):
		return Block, "services " + s.services.String() + " do not support Kubernetes " + s.kubernetes.MinorString() + ", but " + s.release.supported, s.m.whoSupports(s.kubernetes)
	case up && s.oldestRelease == nil:
		return Block, "not known whether image " + s.runsImage.Oldest.String() + " supports Kubernetes " + s.kubernetes.MinorString(), "go to the image of a known release first: " + s.m.list()
	case up && !s.oldestRelease.supports(s.kubernetes):
		return Block, "Kubernetes " + s.kubernetes.MinorString() + " needs an image that supports it on all control planes first, and image " + s.runsImage.Oldest.String() + " supports " + s.oldestRelease.supported,
			s.m.whoSupports(s.kubernetes)
	case s.imageRelease != nil && !s.imageRelease.supports(s.kubernetes) && (up || s.release == nil || s.release.supports(s.kubernetes)):
		// If the services do not support it either, services-support-kubernetes says so.
		return Block, "image " + s.image.String() + " does not support Kubernetes " + s.kubernetes.MinorString() + ", but " + s.imageRelease.supported, "choose an image that does"
	}
	return Info, "", ""
}

// whoSupports names the oldest release that supports v's minor.
func (m *Matrix) whoSupports(v version.Version) string {
	for i := range m.releases {
		if k := &m.releases[i]; k.Faulty == "" && k.supports(v) {
			return "go to release and image " + k.Version.String() + " first, and to Kubernetes " + v.MinorString() + " in the hop after it"
		}
	}
	return "no known release supports Kubernetes " + v.MinorString() + ": wait for one"
}

func judgeServicesSupport(s *step) (Severity, string, string) {
	runs := s.runsKubernetes
	switch {
	case runs.IsZero():
		return unknown("Kubernetes")
	case !s.servicesChange || s.release == nil:
		return Info, "", ""
	case !s.release.supports(runs.Oldest):
		return Block, "release " + s.services.String() + " does not support Kubernetes " + runs.Oldest.MinorString() + ", which runs, but " + s.release.supported, s.kubernetesFirst()
	case !s.release.supports(runs.Newest):
		return Block, "release " + s.services.String() + " does not support Kubernetes " + runs.Newest.MinorString() + ", which runs, but " + s.release.supported, s.kubernetesFirst()
	}
	return Info, "", ""
}

// kubernetesFirst says how to bring Kubernetes to what the new release supports.
func (s *step) kubernetesFirst() string {
	runs := s.runsKubernetes.Oldest
	for i := range s.release.patches {
		if v := s.release.patches[i].version; minorsUp(runs, v) > 0 {
			return "bring Kubernetes to " + v.MinorString() + " first, " + with(s.now.Services.Newest)
		}
	}
	return "choose a release that supports Kubernetes " + runs.MinorString()
}

func judgeKubernetesMinor(s *step) (Severity, string, string) {
	old := s.runsKubernetes.Oldest
	switch {
	case old.IsZero():
		return unknown("Kubernetes")
	case minorsUp(old, s.kubernetes) > 1:
		return Block, "Kubernetes would go from " + old.String() + " to " + s.kubernetes.String() + ", more than one minor", "go to Kubernetes v" + strconv.Itoa(old.Major()) + "." + strconv.Itoa(old.Minor()+1) + " first"
	}
	return Info, "", ""
}

func judgeKubernetesOffered(s *step) (Severity, string, string) {
	switch {
	case s.kubernetes.IsZero():
		return unknown("Kubernetes")
	case s.release == nil && s.kubernetesChange:
		return Block, "not known whether release " + s.services.String() + " has Kubernetes " + s.kubernetes.String(), "choose a known release: " + s.m.list()
	case s.release == nil:
		return Info, "", ""
	case s.kubernetesChange && s.patch == nil:
		return Block, "release " + s.services.String() + " has no Kubernetes " + s.kubernetes.String(), s.choose()
	case !s.kubernetesChange && !s.release.supports(s.kubernetes):
		return Warn, "Kubernetes " + s.kubernetes.String() + ", which runs, is not supported by release " + s.services.String() + " any more", "go to one of its minors: " + s.release.supported
	}
	return Info, "", ""
}

func judgeKubeletSkew(s *step) (Severity, string, string) {
	n := s.now
	if n.Kubernetes.IsZero() {
		return unknown("Kubernetes")
	}
	for _, role := range [...]struct {
		who  string
		span Span
	}{{"control planes", n.ControlPlaneKubelet}, {"workers", n.WorkerKubelet}} {
		if role.span.IsZero() {
			continue
		}
		old, newest := role.span.Oldest, role.span.Newest
		limit := kubeletLimit(old)
		d := minorsUp(old, s.kubernetes)
		switch {
		case d > limit:
			return Block, "kubelets " + old.String() + " of " + role.who + " would be more than " + number(limit) + " minors behind Kubernetes " + s.kubernetes.String(), "replace these nodes in a hop before, without going to a newer minor of Kubernetes"
		case minorsUp(s.kubernetes, newest) > 0 && minorsUp(n.Kubernetes.Newest, newest) > 0:
			return Block, "kubelets " + newest.String() + " of " + role.who + " would be newer than Kubernetes " + s.kubernetes.String(), "go to Kubernetes " + newest.MinorString() + " at least"
		}
	}
	switch old := n.WorkerKubelet.Oldest; {
	case minorsUp(n.Kubernetes.Oldest, n.WorkerKubelet.Newest) > 0:
		return Warn, "kubelets " + n.WorkerKubelet.Newest.String() + " of workers are newer than an API server that runs, " + n.Kubernetes.Oldest.String(), "let the rollout of the control planes end"
	case s.to.KeepWorkers && !old.IsZero() && s.kubernetesChange && minorsUp(old, s.kubernetes) == kubeletLimit(old):
		return Warn, "workers with kubelets " + old.String() + " would stay " + number(kubeletLimit(old)) + " minors behind, as far as is allowed", "replace them before Kubernetes goes to the next minor"
	}
	return Info, "", ""
}

// kubeletLimit is how many minors a kubelet may be behind its API server.
func kubeletLimit(kubelet version.Version) int {
	if kubelet.Major() == 1 && kubelet.Minor() < 25 {
		return 2
	}
	return 3
}

// number is a small number as a word.
func number(n int) string {
	words := [...]string{"no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"}
	if n >= 0 && n < len(words) {
		return words[n]
	}
	return strconv.Itoa(n)
}

func judgeControlPlaneSkew(s *step) (Severity, string, string) {
	k := s.now.Kubernetes
	switch {
	case k.IsZero():
		return unknown("Kubernetes")
	case minorsUp(k.Oldest, k.Newest) > 1:
		return Block, "API servers " + k.Oldest.String() + " and " + k.Newest.String() + " run side by side, more than one minor apart", "repair the control planes with " + k.Oldest.String() + " first"
	}
	return Info, "", ""
}

// The configuration that this program writes is read by kubeadm from here on.
var kubeadmFloor = version.MustParse("v1.31.0")

func judgeKubeadmFloor(s *step) (Severity, string, string) {
	if s.kubernetesChange && s.kubernetes.Major() == 1 && s.kubernetes.Minor() < kubeadmFloor.Minor() {
		return Block, "kubeadm " + s.kubernetes.String() + " cannot read the configuration of this program", "choose Kubernetes " + kubeadmFloor.MinorString() + " or newer"
	}
	return Info, "", ""
}

// etcd v3.6 refuses data of clusters that once had members which an older v3.5 did
// not count correctly; from this patch on they are put right.
var etcdFloor = version.MustParse("v3.5.26")

func judgeEtcdStep(s *step) (Severity, string, string) {
	if !s.kubernetesChange {
		return Info, "", ""
	}
	from, to := s.m.etcdOf(s.now), version.Version{}
	if s.patch != nil {
		to = s.patch.etcd
	}
	d := minorsUp(from, to)
	switch {
	case from.IsZero():
		return NotChecked, "not known which etcd runs", "the findings say what could not be read, and why; when it can be, check again"
	case to.IsZero():
		return NotChecked, "not known which etcd Kubernetes " + s.kubernetes.String() + " brings", "choose a patch that the release has"
	case from.Major() != to.Major():
		return Block, "etcd would go from " + from.String() + " to " + to.String() + ", another major", "choose another version of Kubernetes"
	case d > 1:
		return Block, "etcd would go from " + from.String() + " to " + to.String() + ", more than one minor", "choose a version of Kubernetes in between"
	case d < 0:
		return Block, "etcd would go down from " + from.String() + " to " + to.String(), "choose a newer version of Kubernetes"
	case d == 1 && from.SameMinor(etcdFloor) && from.Less(etcdFloor):
		return Block, "etcd " + from.String() + " cannot go to " + to.String() + ": " + etcdFloor.String() + " must come first", "choose a patch of Kubernetes " + s.runsKubernetes.Oldest.MinorString() + " that brings etcd " + etcdFloor.String() + " or newer"
	}
	return Info, "", ""
}

// etcdOf returns which etcd runs: as it was seen, or as the Kubernetes that runs
// brings it. Zero if nobody knows.
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

func judgeOfferedImage(s *step) (Severity, string, string) {
	if s.imageChange && s.o.Images != nil && !s.image.IsZero() {
		if ok, why, remedy := s.o.Images(s.image); !ok {
			return Block, orElse(why, "the provider does not have image "+s.image.String()), remedy
		}
	}
	return Info, "", ""
}

func judgeOfferedKubernetes(s *step) (Severity, string, string) {
	if s.kubernetesChange && s.o.Kubernetes != nil && !s.kubernetes.IsZero() {
		if ok, why, remedy := s.o.Kubernetes(s.kubernetes); !ok {
			return Block, orElse(why, "the provider does not have Kubernetes "+s.kubernetes.String()), remedy
		}
	}
	return Info, "", ""
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// demand is what joining machines must show.
type demand struct {
	Variant      string                   `json:"variant"`
	Measurements attestation.Measurements `json:"measurements"`
}

// weakenedBy returns the registers that d enforces and then does not, in order.
func (d demand) weakenedBy(then demand) (lost []uint32) {
	for i, m := range d.Measurements {
		if after, ok := then.Measurements[i]; !m.WarnOnly && (!ok || after.WarnOnly) {
			lost = append(lost, i)
		}
	}
	slices.Sort(lost)
	return lost
}

// demands reads what is demanded now and after the hop.
func (s *step) demands() (now, then demand, err error) {
	if err = json.Unmarshal([]byte(s.now.JoinConfig.Attestation), &now); err != nil {
		return now, then, fmt.Errorf("read join-config: %w", err)
	}
	if err = json.Unmarshal([]byte(s.to.Attestation), &then); err != nil {
		return now, then, fmt.Errorf("read planned attestation: %w", err)
	}
	return now, then, nil
}

func judgeVariant(s *step) (Severity, string, string) {
	if s.to.Attestation == "" || s.to.Attestation == s.now.JoinConfig.Attestation {
		return Info, "", ""
	}
	now, then, err := s.demands()
	switch {
	case err != nil:
		return NotChecked, "attestation could not be compared: " + err.Error(), "repair what is named, then check again"
	case now.Variant != then.Variant:
		return Block, "the attestation variant would change from " + strconv.Quote(now.Variant) + " to " + strconv.Quote(then.Variant), "keep " + strconv.Quote(now.Variant) + "; another variant needs a new cluster"
	}
	return Info, "", ""
}

func judgeMeasurements(s *step) (Severity, string, string) {
	if s.to.Attestation == "" || s.to.Attestation == s.now.JoinConfig.Attestation {
		return Info, "", ""
	}
	now, then, err := s.demands()
	if err != nil {
		return NotChecked, "measurements could not be compared: " + err.Error(), "repair what is named, then check again"
	}
	lost := now.weakenedBy(then)
	if len(lost) == 0 {
		return Info, "", ""
	}
	var names []string
	for _, i := range lost {
		names = append(names, strconv.Itoa(int(i)))
	}
	return Block, "PCR " + and(names) + " would not be enforced any more", "write the expected value of PCR " + and(names) + " of the new image into the configuration, without warnOnly"
}

func judgeRolloutRunning(s *step) (Severity, string, string) {
	n := s.now
	what, nodes := "", true
	newMinor := minorsUp(n.Services.Newest, s.services) > 0
	switch {
	case s.runsKubernetes.Mixed():
		what = "Kubernetes " + s.runsKubernetes.Oldest.String() + " to " + s.runsKubernetes.Newest.String()
	case s.runsImage.Mixed():
		what = "image of the control planes " + s.runsImage.Oldest.String() + " to " + s.runsImage.Newest.String()
	case n.ControlPlaneKubelet.Mixed() || !n.ControlPlaneKubelet.IsZero() && !n.ControlPlaneKubelet.is(n.Kubernetes.Newest):
		what = "kubelets of the control planes " + n.ControlPlaneKubelet.Oldest.String() + " to " + n.Kubernetes.Newest.String()
	case n.WorkerImage.Mixed():
		what = "image of the workers " + n.WorkerImage.Oldest.String() + " to " + n.WorkerImage.Newest.String()
	case n.WorkerKubelet.Mixed():
		what = "kubelets of the workers " + n.WorkerKubelet.Oldest.String() + " to " + n.WorkerKubelet.Newest.String()
	case n.Services.Mixed():
		// Charts come first in a hop, and so end in it; a rollout of nodes does not.
		what, nodes = "services "+n.Services.Oldest.String()+" to "+n.Services.Newest.String(), false
	default:
		return Info, "", ""
	}
	const remedy = "`constellation status` shows how far it is; go to a new minor when it has ended"
	if nodes {
		newMinor = newMinor || minorsUp(s.runsKubernetes.Newest, s.kubernetes) > 0 || minorsUp(s.anyImage.Newest, s.image) > 0
	}
	if newMinor {
		return Block, "a rollout is under way (" + what + ") and must end before a new minor", remedy
	}
	return Warn, "a rollout is under way (" + what + ")", remedy
}
