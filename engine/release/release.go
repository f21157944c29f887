// Package release lists the releases of this product and their content: services and their
// images, charts, and the Kubernetes versions with the digest of every component that a
// node installs.
//
// # Feeds
//
// The same files are embedded in the program, stored in a directory, or served over HTTP.
// All names are relative to the location of the feed:
//
//	index.json                        names every other file with its SHA-256 and length;
//	                                  sequence, creation, end, and all key sets
//	summaries.json                    the facts for version decisions, of all releases
//	majors/v1.json                    the minors of a major
//	minors/v1.1.json                  the releases of a minor
//	releases/v1.1.0.yaml              a release, see below
//	releases/v1.1.0/images.json       OS images by provider, container images, digests
//	releases/v1.1.0/measurements/<provider>.json
//	releases/v1.1.0/components.json   components that machines may install, see Trust; not
//	                                  in the index
//	keys/1.json                       the key sets, equal to those in the index
//	<file>.sig                        of each: base64 of an ASN.1 signature, ECDSA P-256
//	                                  over SHA-256, for `cosign verify-blob --key`
//
// A client trusts an index that one of its keys signed. It trusts any other file only with
// the digest and length in this index, and if the content states the requested version
// (and provider). So files of two publications do not mix. The sequence never goes back:
// the client stores the newest one for each location and set of keys, and also refuses the
// same sequence with other content. A publication that has expired, or is from the future,
// is refused. After a refusal the client uses the last good copy, marked as stale with the
// reason; without one it returns an error.
//
// Keys are rotated by key sets. Each is signed by a key of an earlier set, and from then on
// only its keys may sign, until it expires. The index has all sets, so a client can follow
// them from any set that it trusts, in the same three requests.
//
// Facts that are learned after the publication of a release do not change its file:
// summaries.json lists faulty versions and downloads. For a release that is also in the
// program, a feed may add these facts only; other content is an error.
//
// The releases in the program are not signed: write access to them is write access to the
// program. There is no official feed yet, and so no embedded key.
//
// # Files of releases
//
// A release is one YAML file, <version>.yaml. It is decoded strictly: an unknown key, a
// missing digest or a dangling name makes the file invalid, because it determines
// everything that is installed on a node.
//
//	schema: "1"              format of the file; another one is refused
//	version: v1.1.0          the release; the same as the file's name
//	upgradeFrom: v1.0.0      oldest release that can be upgraded to this one; absent
//	                         if there is none
//	published: 2026-11-21T12:00:00Z   optional
//	services:                versioned programs of the cluster
//	- name: operator         unique
//	  kind: release          the default; or kubernetes: kube-proxy, coredns and
//	                         cluster-autoscaler, whose versions follow below
//	  version: v1.1.0
//	  image: host/name:tag   absent for a part of the OS image
//	  chart: name            the chart that installs it; with image only
//	charts:                  in the order of installation
//	- name: ...              unique; a directory of the charts that come with the program
//	  namespace: ...
//	  values: {...}          merged over those of the chart
//	  needs: [...]           charts above that must be ready before
//	- name: cert-manager     a third-party chart; the name of its Helm release
//	  namespace: ...
//	  chart: cert-manager    its name in its Chart.yaml, if that is another
//	  source: oci://...      file:, https: or oci:, see package engine/chart
//	  version: v1.19.1       as in its Chart.yaml
//	  digest: sha256:...     of the archive, or for oci: of the manifest
//	  crds: skip             its folder crds is ignored; absent: applied before the chart
//	  destructive: ...       the loss when another version replaces it; absent: none
//	crds: [...]              names of the definitions that the charts need
//	artifacts:               by component: kubeadm, kubelet, kubectl, crictl, cni-plugins
//	  kubeadm:
//	    url: https://...     with {version} (with v) and {arch}
//	    path: /usr/...       the file, or with extract the directory to fill
//	    extract: false
//	archives:                digests of crictl and cni-plugins: version, architecture
//	  crictl: {v1.36.0: {amd64: "sha256:...", arm64: "sha256:..."}}
//	images:                  kubeadm's images, with {kubernetes} {etcd} {coredns} {pause}
//	kubernetes:              oldest first
//	- version: v1.36.3
//	  etcd: 3.6.8-0          tags of the images of this kubeadm version
//	  coredns: v1.14.2
//	  pause: "3.10.2"
//	  autoscaler: v1.36.0    tag of a cluster-autoscaler for this minor; optional
//	  crictl: v1.36.0        which archive
//	  cni-plugins: v1.9.1
//	  digests: {amd64: {kubeadm: "sha256:...", ...}, arm64: {...}}
//	- version: v1.37.2       a patch whose digests are not known; only a cloud with
//	  unpinned: <why>        components and digests of its own can install it
//	defaultKubernetes: v1.35.4
//
// The package does not decide which upgrades are possible; package engine does.
package release

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"constellation/engine/component"
	"constellation/engine/lifecycle"
	"constellation/engine/version"
)

// schema is the supported format.
const schema = "1"

// Architectures are those for which every release has components.
var architectures = []string{"amd64", "arm64"}

// names of the components of a node, in the order of a list.
var (
	binaries = []string{"kubeadm", "kubelet", "kubectl"}
	archives = []string{"crictl", "cni-plugins"}
	// bound are the services whose version follows from that of Kubernetes.
	bound = []string{"kube-proxy", "coredns", "cluster-autoscaler"}
)

// ErrNotOffered means that a release lacks a version or a file. The error lists the available
// ones.
var ErrNotOffered = errors.New("not offered")

// ErrUnpinned means that a release has no digests of a Kubernetes version's components. A provider
// that installs it must have digests of its own, because nothing is trusted on first use.
var ErrUnpinned = errors.New("not pinned")

// Release is what one release contains.
type Release struct {
	Version version.Version
	// UpgradeFrom is the oldest release that can be upgraded to this one; zero if none can.
	UpgradeFrom version.Version
	Services    []Service
	Charts      []Chart // in the order of installation
	CRDs        []string
	Kubernetes  []Kubernetes // oldest first
	// DefaultKubernetes is the version of new clusters without a configured one.
	DefaultKubernetes version.Version
	// Published is the publication date; zero if unknown.
	Published time.Time
	// Faulty is the reason why upgrades to this release are refused; empty if it is fine. CLI
	// lists its downloads. Neither is part of the file, which never changes.
	Faulty string
	CLI    []Download

	artifacts map[string]artifact
	archives  map[string]map[string]map[string]string // name, version, architecture
	images    map[string]string
}

// Service is a versioned program in a cluster of a release.
type Service struct {
	Name string `yaml:"name" json:"name"`
	// Kind is OfRelease or OfKubernetes.
	Kind string `yaml:"kind" json:"kind"`
	// Version is zero for services bound to Kubernetes.
	Version version.Version `yaml:"version" json:"version,omitzero"`
	// Image is empty for a part of the OS image.
	Image string `yaml:"image" json:"image,omitempty"`
	// Chart is the name of the chart that installs it.
	Chart string `yaml:"chart" json:"chart,omitempty"`
}

// Kubernetes is a patch release of Kubernetes that a release offers.
type Kubernetes struct {
	Version version.Version `yaml:"version"`
	// Etcd, CoreDNS and Pause are tags of the images that kubeadm deploys.
	Etcd    string `yaml:"etcd"`
	CoreDNS string `yaml:"coredns"`
	Pause   string `yaml:"pause"`
	// Crictl and CNIPlugins are versions of archives.
	Crictl     string `yaml:"crictl"`
	CNIPlugins string `yaml:"cni-plugins"`
	// Autoscaler is the tag of the cluster-autoscaler for this minor; may be empty.
	Autoscaler string `yaml:"autoscaler"`
	// Faulty is the reason why upgrades to this patch are refused; empty if it is fine. It is not
	// part of the file.
	Faulty string `yaml:"-"`

	// Digests are of the binaries: architecture, name.
	Digests map[string]map[string]string `yaml:"digests"`
	// Unpinned is why the release has no Digests of this patch; empty if it has them. Only a
	// provider with components and digests of its own can install such a patch.
	Unpinned string `yaml:"unpinned"`
}

type artifact struct {
	URL     string `yaml:"url"`
	Path    string `yaml:"path"`
	Extract bool   `yaml:"extract"`
}

// file is the schema of a release's file.
type file struct {
	Schema            string                                  `yaml:"schema"`
	Version           version.Version                         `yaml:"version"`
	UpgradeFrom       version.Version                         `yaml:"upgradeFrom"`
	Published         time.Time                               `yaml:"published"`
	Services          []Service                               `yaml:"services"`
	Charts            []Chart                                 `yaml:"charts"`
	CRDs              []string                                `yaml:"crds"`
	Artifacts         map[string]artifact                     `yaml:"artifacts"`
	Archives          map[string]map[string]map[string]string `yaml:"archives"`
	Images            map[string]string                       `yaml:"images"`
	Kubernetes        []Kubernetes                            `yaml:"kubernetes"`
	DefaultKubernetes version.Version                         `yaml:"defaultKubernetes"`
}

// Parse reads one release. The error joins all problems.
func Parse(b []byte) (*Release, error) {
	var f file
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&f); err != nil {
		return nil, fmt.Errorf("parse release: %w", err)
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("parse release: unexpected data after the document")
	}
	if f.Schema != schema {
		return nil, fmt.Errorf("parse release: its format is %q, want %q", f.Schema, schema)
	}
	for i := range f.Services {
		if f.Services[i].Kind == "" {
			f.Services[i].Kind = OfRelease
		}
	}
	if errs := f.check(); len(errs) > 0 {
		return nil, fmt.Errorf("parse release %s: %w", f.Version, errors.Join(errs...))
	}
	return &Release{
		Version: f.Version, UpgradeFrom: f.UpgradeFrom, Services: f.Services, Charts: f.Charts, CRDs: f.CRDs,
		Kubernetes: f.Kubernetes, DefaultKubernetes: f.DefaultKubernetes,
		Published: f.Published,
		artifacts: f.Artifacts, archives: f.Archives, images: f.Images,
	}, nil
}

var (
	digestRE = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	nameRE   = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)
	imageRE  = regexp.MustCompile(`^[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+:[A-Za-z0-9._-]{1,128}(@sha256:[0-9a-f]{64})?$`)
	tagRE    = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
	fieldRE  = regexp.MustCompile(`\{[a-z]*\}`)
)

// check returns the problems of f, in the order of the file.
func (f *file) check() []error {
	var errs problems
	if f.Version.IsZero() {
		errs.add("version: missing")
	} else if !validVersion(f.Version.String()) {
		errs.add("version: not usable as a file name")
	}
	if !f.UpgradeFrom.IsZero() && !f.UpgradeFrom.Less(f.Version) {
		errs.add("upgradeFrom: %s is not older than the release", f.UpgradeFrom)
	}
	f.checkCharts(&errs)
	f.checkArtifacts(&errs)
	f.checkArchives(&errs)
	f.checkImages(&errs)
	for i := range f.Kubernetes {
		f.checkKubernetes(&errs, i)
	}
	if len(f.Kubernetes) == 0 {
		errs.add("kubernetes: missing")
	}
	if !slices.ContainsFunc(f.Kubernetes, func(k Kubernetes) bool { return k.Version.Equal(f.DefaultKubernetes) }) {
		errs.add("defaultKubernetes: %q is not among kubernetes", f.DefaultKubernetes)
	}
	return errs
}

// problems are the errors of a file.
type problems []error

func (p *problems) add(format string, args ...any) { *p = append(*p, fmt.Errorf(format, args...)) }

// checkCharts checks charts, services and CRDs.
func (f *file) checkCharts(errs *problems) {
	charts := map[string]bool{}
	for i, c := range f.Charts {
		for _, p := range c.Check(func(name string) bool { return charts[name] }) {
			errs.add("charts[%d]: %s", i, p)
		}
		charts[c.Name] = true
	}
	if len(f.Charts) == 0 {
		errs.add("charts: missing")
	}
	*errs = append(*errs, checkServices(f.Services, charts)...)
	if len(f.CRDs) == 0 {
		errs.add("crds: missing")
	}
	for i, c := range f.CRDs {
		if !nameRE.MatchString(c) || slices.Index(f.CRDs, c) != i {
			errs.add("crds[%d]: %q is not a name or occurs twice", i, c)
		}
	}
}

// checkArtifacts checks where components come from and go to.
func (f *file) checkArtifacts(errs *problems) {
	for _, name := range append(slices.Clone(binaries), archives...) {
		a, ok := f.Artifacts[name]
		u, err := url.Parse(a.expand("v1.0.0", "amd64"))
		switch {
		case !ok:
			errs.add("artifacts.%s: missing", name)
		case err != nil || u.Scheme != "https" || u.Host == "" || u.Path == "":
			errs.add("artifacts.%s: %q is not an https address", name, a.URL)
		case !strings.Contains(a.URL, "{version}") || !strings.Contains(a.URL, "{arch}") || fieldRE.MatchString(a.expand("v1.0.0", "amd64")):
			errs.add("artifacts.%s: the address must contain {version} and {arch} and nothing else in braces", name)
		case !path.IsAbs(a.Path) || path.Clean(a.Path) != a.Path || a.Path == "/":
			errs.add("artifacts.%s: path %q is not absolute and clean", name, a.Path)
		case a.Extract != slices.Contains(archives, name):
			errs.add("artifacts.%s: extract is %t", name, a.Extract)
		}
	}
	for name := range f.Artifacts {
		if !slices.Contains(binaries, name) && !slices.Contains(archives, name) {
			errs.add("artifacts.%s: there is no such component", name)
		}
	}
}

// checkArchives checks the versions and digests of archives.
func (f *file) checkArchives(errs *problems) {
	for name, versions := range f.Archives {
		if !slices.Contains(archives, name) {
			errs.add("archives.%s: there is no such archive", name)
		}
		for v, digests := range versions {
			if _, err := version.Parse(v); err != nil || v[0] != 'v' {
				errs.add("archives.%s: %q is not a version with a v", name, v)
			}
			*errs = append(*errs, checkDigests("archives."+name+"."+v, digests, architectures)...)
		}
	}
}

func (f *file) checkImages(errs *problems) {
	if len(f.Images) == 0 {
		errs.add("images: missing")
	}
	for name, image := range f.Images {
		if s := expandImage(image, Kubernetes{Version: version.MustParse("v1.0.0"), Etcd: "1", CoreDNS: "1", Pause: "1"}); !imageRE.MatchString(s) {
			errs.add("images.%s: %q is not an image with a tag", name, image)
		}
	}
}

// checkKubernetes checks one version of Kubernetes: its order, tags and digests.
func (f *file) checkKubernetes(errs *problems, i int) {
	k := &f.Kubernetes[i]
	where := fmt.Sprintf("kubernetes[%d]", i)
	if k.Version.IsZero() {
		errs.add("%s: version is missing", where)
		return
	}
	where += " " + k.Version.String()
	if i > 0 && !f.Kubernetes[i-1].Version.Less(k.Version) {
		errs.add("%s: is not newer than the previous one", where)
	}
	if k.Autoscaler != "" && !tagRE.MatchString(k.Autoscaler) {
		errs.add("%s: autoscaler is not a tag", where)
	}
	if !tagRE.MatchString(k.Etcd) || !tagRE.MatchString(k.CoreDNS) || !tagRE.MatchString(k.Pause) {
		errs.add("%s: etcd, coredns or pause is not a tag", where)
	}
	if k.Unpinned != "" { // a field of its own, so that a forgotten digest is an error
		if len(k.Digests) > 0 || k.Crictl != "" || k.CNIPlugins != "" || badText(k.Unpinned) {
			errs.add("%s: unpinned excludes digests and archives, and is a line of text", where)
		}
		return
	}
	for _, name := range archives {
		if f.Archives[name][k.archive(name)] == nil {
			errs.add("%s: archives.%s has no %q", where, name, k.archive(name))
		}
	}
	for _, arch := range architectures {
		*errs = append(*errs, checkDigests(where+" "+arch, k.Digests[arch], binaries)...)
	}
	if len(k.Digests) > len(architectures) {
		errs.add("%s: digests for an unknown architecture", where)
	}
}

// checkServices validates the services of a release; charts are those of the release, nil if
// unknown.
func checkServices(all []Service, charts map[string]bool) (errs []error) {
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	services := map[string]bool{}
	for i, s := range all {
		switch {
		case !nameRE.MatchString(s.Name):
			bad("services[%d]: %q is not a name", i, s.Name)
		case services[s.Name]:
			bad("services[%d]: %s occurs twice", i, s.Name)
		case s.Kind == OfKubernetes && (!s.Version.IsZero() || s.Image != "" || s.Chart != ""):
			bad("services[%d]: %s is bound to Kubernetes and must not have version, image or chart", i, s.Name)
		case s.Kind == OfKubernetes && !slices.Contains(bound, s.Name):
			bad("services[%d]: %s is not bound to Kubernetes; only %s are", i, s.Name, strings.Join(bound, ", "))
		case s.Kind == OfKubernetes: // the Kubernetes version determines it
		case s.Kind != OfRelease:
			bad("services[%d]: kind %q is neither %s nor %s", i, s.Kind, OfRelease, OfKubernetes)
		case s.Version.IsZero():
			bad("services[%d]: %s has no version", i, s.Name)
		case (s.Image == "") != (s.Chart == ""):
			bad("services[%d]: %s needs both image and chart, or neither", i, s.Name)
		case s.Image != "" && !imageRE.MatchString(s.Image):
			bad("services[%d]: %q is not an image with a tag", i, s.Image)
		case s.Chart != "" && !nameRE.MatchString(s.Chart) || charts != nil && s.Chart != "" && !charts[s.Chart]:
			bad("services[%d]: there is no chart %s", i, s.Chart)
		}
		services[s.Name] = true
	}
	if len(all) == 0 {
		bad("services: missing")
	}
	return errs
}

// checkDownloads requires one address per platform.
func checkDownloads(all []Download) error {
	seen := map[string]bool{}
	for _, d := range all {
		u, err := url.Parse(d.URL)
		switch platform := d.OS + "/" + d.Arch; {
		case !nameRE.MatchString(d.OS) || !nameRE.MatchString(d.Arch) || seen[platform]:
			return fmt.Errorf("download for %q: unknown platform or duplicate", shorten(platform))
		case err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || badText(d.URL):
			return fmt.Errorf("download for %s: %q is not an https address", platform, shorten(d.URL))
		case d.Digest != "" && !digestRE.MatchString(d.Digest):
			return fmt.Errorf("download for %s: invalid digest %q", platform, shorten(d.Digest))
		default:
			seen[platform] = true
		}
	}
	return nil
}

// checkDigests requires exactly one digest for each of keys.
func checkDigests(where string, got map[string]string, keys []string) (errs []error) {
	for _, k := range keys {
		if !digestRE.MatchString(got[k]) {
			errs = append(errs, fmt.Errorf("%s: invalid digest of %s: %q", where, k, got[k]))
		}
	}
	for k := range got {
		if !slices.Contains(keys, k) {
			errs = append(errs, fmt.Errorf("%s: %q is unknown", where, k))
		}
	}
	return errs
}

func (k Kubernetes) archive(name string) string {
	if name == "crictl" {
		return k.Crictl
	}
	return k.CNIPlugins
}

func (a artifact) expand(version, arch string) string {
	return strings.NewReplacer("{version}", version, "{arch}", arch).Replace(a.URL)
}

func expandImage(image string, k Kubernetes) string {
	return strings.NewReplacer("{kubernetes}", k.Version.String(), "{etcd}", k.Etcd, "{coredns}", k.CoreDNS, "{pause}", k.Pause).Replace(image)
}

// JoinService is the name of the service by which machines of a cloud join. Adopted clusters have none.
const JoinService = "join-service"

// Service returns the service called name.
func (r *Release) Service(name string) (Service, bool) {
	for _, s := range r.Services {
		if s.Name == name {
			return s, true
		}
	}
	return Service{}, false
}

// AgentImage returns the image that installs the agent on machines of adopted clusters: beside the operator's,
// with the same tag. It is empty for releases before FirstVerifying, and without an operator. Older programs
// refuse a service that has an image and no chart, so it is no service.
func (r *Release) AgentImage() string {
	s, _ := r.Service("operator")
	repository, tag, ok := strings.Cut(s.Image, "/operator:")
	if !ok || r.Version.Less(FirstVerifying) {
		return ""
	}
	return repository + "/agent:" + tag
}

// ForKubernetes returns a release's entry for a Kubernetes version. The error wraps
// ErrNotOffered.
func (r *Release) ForKubernetes(v version.Version) (Kubernetes, error) {
	var have []string
	for _, k := range r.Kubernetes {
		if k.Version.Equal(v) {
			return k, nil
		}
		have = append(have, k.Version.String())
	}
	return Kubernetes{}, fmt.Errorf("Kubernetes %s is %w by release %s; it has %s", v, ErrNotOffered, r.Version, strings.Join(have, ", "))
}

// Minors returns the minors of Kubernetes that the release offers, oldest first,
// such as "v1.35".
func (r *Release) Minors() []string {
	var out []string
	for _, k := range r.Kubernetes {
		out = append(out, k.Version.MinorString())
	}
	return slices.Compact(out)
}

// Components returns the components of a node for a Kubernetes version, as published upstream,
// for an architecture in Go's notation. The error wraps ErrNotOffered or ErrUnpinned.
func (r *Release) Components(v version.Version, arch string) (component.List, error) {
	k, err := r.ForKubernetes(v)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(architectures, arch) {
		return nil, fmt.Errorf("architecture %q is %w by release %s; it has %s", arch, ErrNotOffered, r.Version, strings.Join(architectures, ", "))
	}
	if k.Unpinned != "" {
		return nil, fmt.Errorf("components of Kubernetes %s are %w by release %s: %s", v, ErrUnpinned, r.Version, k.Unpinned)
	}
	var l component.List
	for _, name := range binaries {
		a := r.artifacts[name]
		l = append(l, component.Component{Name: name, URL: a.expand(v.String(), arch), Digest: k.Digests[arch][name], Path: a.Path, Mode: 0o755})
	}
	for _, name := range archives {
		a, av := r.artifacts[name], k.archive(name)
		l = append(l, component.Component{Name: name, URL: a.expand(av, arch), Digest: r.archives[name][av][arch], Path: a.Path, Extract: true})
	}
	return l, nil
}

// Images returns the images that kubeadm of a Kubernetes version deploys, by name.
// The error wraps ErrNotOffered.
func (r *Release) Images(v version.Version) (map[string]string, error) {
	k, err := r.ForKubernetes(v)
	if err != nil {
		return nil, err
	}
	out := make(map[string]string, len(r.images))
	for name, image := range r.images {
		out[name] = expandImage(image, k)
	}
	return out, nil
}

// ImagesToMirror returns the references of all images that a registry needs for clusters of a
// Kubernetes version: [Release.Images], and etcd of [Release.NextEtcd]. The error wraps
// ErrNotOffered.
func (r *Release) ImagesToMirror(v version.Version) ([]string, error) {
	k, err := r.ForKubernetes(v)
	if err != nil {
		return nil, err
	}
	all := map[string]bool{}
	for _, image := range r.images {
		all[expandImage(image, k)] = true
	}
	if tag := r.NextEtcd(v); tag != "" {
		k.Etcd = tag
		all[expandImage(r.images["etcd"], k)] = true
	}
	return slices.Sorted(maps.Keys(all)), nil
}

// NextEtcd returns the tag of the etcd that a cluster with a Kubernetes version must run before it
// gets the next minor that the release offers. New clusters start with it, so that no upgrade has a
// hop of etcd. It is empty if the etcd of the version is new enough, or if that is unknown.
func (r *Release) NextEtcd(v version.Version) string {
	now, err := r.ForKubernetes(v)
	if err != nil {
		return ""
	}
	from, err := etcdVersion(now.Etcd)
	for _, next := range r.Kubernetes {
		to, bad := etcdVersion(next.Etcd)
		if err != nil || bad != nil || v.MinorDistance(next.Version) != 1 {
			continue
		}
		if s, below := lifecycle.BelowFloor(from, to); below {
			return s.Tag
		}
	}
	return ""
}

// etcdVersion parses the tag of an image: 3.6.8-0 is etcd v3.6.8.
func etcdVersion(tag string) (version.Version, error) {
	v, _, _ := strings.Cut(tag, "-")
	return version.Parse(v)
}

// Catalogue is a set of releases.
type Catalogue struct{ releases []*Release }

// Load reads every release of dir, releases/<version>.yaml; dir is assets.Releases(). One
// invalid file makes the catalogue invalid: a gap would look like a release that does not
// exist.
func Load(dir fs.FS) (*Catalogue, error) {
	names, err := fs.Glob(dir, "releases/*.yaml")
	if err != nil {
		return nil, fmt.Errorf("list releases: %w", err)
	}
	c := &Catalogue{}
	for _, name := range names {
		b, err := fs.ReadFile(dir, name)
		if err != nil {
			return nil, fmt.Errorf("read release: %w", err)
		}
		r, err := Parse(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if name != releaseName(r.Version) {
			return nil, fmt.Errorf("%s: contains release %s", name, r.Version)
		}
		c.releases = append(c.releases, r)
	}
	if len(c.releases) == 0 {
		return nil, errors.New("list releases: none found")
	}
	slices.SortFunc(c.releases, func(a, b *Release) int { return a.Version.Compare(b.Version) })
	return c, nil
}

// Releases returns all releases, oldest first.
func (c *Catalogue) Releases() []*Release { return slices.Clone(c.releases) }

// Release returns one release. The error wraps ErrNotOffered and lists the available ones.
func (c *Catalogue) Release(v version.Version) (*Release, error) {
	var have []string
	for _, r := range c.releases {
		if r.Version.Equal(v) {
			return r, nil
		}
		have = append(have, r.Version.String())
	}
	return nil, fmt.Errorf("release %s is %w; this program has %s", v, ErrNotOffered, strings.Join(have, ", "))
}

// Kubernetes returns every Kubernetes version that some release offers, oldest first.
func (c *Catalogue) Kubernetes() []version.Version {
	all := map[string]version.Version{}
	for _, r := range c.releases {
		for _, k := range r.Kubernetes {
			all[k.Version.String()] = k.Version
		}
	}
	return slices.SortedFunc(maps.Values(all), version.Version.Compare)
}
