// Package lifecycle answers: what does a minor of Kubernetes or of etcd remove, refuse or demand?
//
// The answers are data: one file per minor of Kubernetes, and one each for etcd, for deprecated fields
// and for add-ons, in the directory data. People write and review them, and each row names its source. The program reads the files
// strictly: an unknown field or a row without a source is an error, which the tests find.
// Checks read this data, so that no check has a version in its code.
package lifecycle

import (
	"bytes"
	"cmp"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"

	"gopkg.in/yaml.v3"

	"constellation/engine/version"
)

//go:embed data/*.yaml
var files embed.FS

// A Minor is what one minor of Kubernetes changes in comparison with the minor before.
type Minor struct {
	// Kubernetes is "v1.37".
	Kubernetes string `yaml:"kubernetes"`
	// Partial is whether the rows are a part of what changes. Checks of such a minor report
	// "not checked" where they find nothing.
	Partial bool `yaml:"partial"`
	// Sources has the sources of rows by the name that rows use.
	Sources map[string]string `yaml:"sources"`

	Flags   []Flags   `yaml:"flags"`
	Values  []Values  `yaml:"values"`
	Gates   []Gates   `yaml:"gates"`
	APIs    []API     `yaml:"apis"`
	Kubeadm []Kubeadm `yaml:"kubeadm"`
	Kubelet []Kubelet `yaml:"kubelet"`
	Actions []Action  `yaml:"actions"`

	number int
}

// Flags are command line flags with which a component does not start any more.
type Flags struct {
	Component string   `yaml:"component"`
	Removed   []string `yaml:"removed"`
	// Defaults are the values of removed flags that nobody wrote, unless they are zero values. A
	// kubelet reports the values of all its flags, and not which of them its command line has.
	Defaults map[string]string `yaml:"defaults"`
	Source   string            `yaml:"source"`
}

// IsDefault reports whether a removed flag has a value although no command line has the flag.
func (f Flags) IsDefault(name, value string) bool {
	if d, ok := f.Defaults[name]; ok {
		return value == d
	}
	return slices.Contains([]string{"", "0", "0s", "false", "[]"}, value)
}

// Values are elements of a list in a flag with which a component does not start any more.
type Values struct {
	Component string   `yaml:"component"`
	Flag      string   `yaml:"flag"`
	Refused   []string `yaml:"refused"`
	Source    string   `yaml:"source"`
}

// Gates are feature gates. A component that is started with a removed gate, or with another
// value of a locked one, does not start.
type Gates struct {
	Removed   []string `yaml:"removed"`
	LockedOn  []string `yaml:"lockedOn"`
	LockedOff []string `yaml:"lockedOff"`
	Source    string   `yaml:"source"`
}

// API is a version of an API that is no longer served.
type API struct {
	Group    string `yaml:"group"`
	Version  string `yaml:"version"`
	Resource string `yaml:"resource"`
	Kind     string `yaml:"kind"`
	// Replacement is the version of the group to use instead; empty if the types do not say.
	Replacement string `yaml:"replacement"`
	// Deleted is whether no other version reads stored objects, which must be deleted before.
	Deleted bool   `yaml:"deleted"`
	Source  string `yaml:"source"`
}

// Kubeadm is what kubeadm reads and deploys. A row holds until a later minor has another.
type Kubeadm struct {
	// Configs are the versions of ClusterConfiguration that it reads.
	Configs []string `yaml:"configs"`
	// RemovedGates are invalid in featureGates of ClusterConfiguration.
	RemovedGates []string `yaml:"removedGates"`
	// Etcd is the tag of the etcd that it deploys.
	Etcd string `yaml:"etcd"`
	// ExternalEtcd is the oldest etcd that it accepts outside the cluster.
	ExternalEtcd version.Version `yaml:"externalEtcd"`
	Source       string          `yaml:"source"`
}

// Kubelet is what kubelets demand. A row holds until a later minor has another.
type Kubelet struct {
	// MinorsBehind is the number of minors by which they may be older than an API server;
	// MinorsBehindBefore that of kubelets of earlier minors.
	MinorsBehind       int `yaml:"minorsBehind"`
	MinorsBehindBefore int `yaml:"minorsBehindBefore"`
	// Configs are the versions of KubeletConfiguration that they and kubeadm read.
	Configs []string `yaml:"configs"`
	// RefusesCgroupV1 is whether they do not start on a host with cgroup v1, unless their
	// configuration has failCgroupV1: false.
	RefusesCgroupV1 bool `yaml:"refusesCgroupV1"`
	// Runtime is the name of a container runtime, and OldestRuntime the oldest that they use.
	Runtime       string          `yaml:"runtime"`
	OldestRuntime version.Version `yaml:"oldestRuntime"`
	Source        string          `yaml:"source"`
}

// Action is a note of the changelog that requires an action of users. A row says how the cluster
// shows that it is affected, with one of the fields below, or why nothing in the API shows it.
type Action struct {
	Title  string `yaml:"title"`
	Remedy string `yaml:"remedy"`
	// KubeletField has the value KubeletValue in a KubeletConfiguration.
	KubeletField string `yaml:"kubeletField"`
	KubeletValue string `yaml:"kubeletValue"`
	// Flag is on the command line of Component.
	Component string `yaml:"component"`
	Flag      string `yaml:"flag"`
	// Permission is a resource of the core group, such as nodes/log, that a ClusterRole grants.
	// Roles that every cluster has do not count.
	Permission string `yaml:"permission"`
	// Objects of this resource exist, written as in "resourceslices.resource.k8s.io". With
	// Containing, one of them has this text.
	Objects    string `yaml:"objects"`
	Containing string `yaml:"containing"`
	// SharedSELinux is whether pods with different SELinux labels share a volume whose driver
	// mounts volumes with a label.
	SharedSELinux bool `yaml:"sharedSELinux"`
	// Undetected is why nothing in the API shows it.
	Undetected string `yaml:"undetected"`
	Source     string `yaml:"source"`
}

// complete reports whether the action names exactly one way to detect it.
func (a Action) complete() bool {
	ways := 0
	for _, way := range []bool{a.KubeletField != "", a.Flag != "", a.Permission != "", a.Objects != "", a.SharedSELinux, a.Undetected != ""} {
		if way {
			ways++
		}
	}
	return ways == 1 && a.Title != "" && a.Remedy != "" &&
		(a.KubeletField == "") == (a.KubeletValue == "") && (a.Flag == "") == (a.Component == "") && (a.Objects != "" || a.Containing == "")
}

// etcdFile is the content of data/etcd.yaml.
type etcdFile struct {
	Sources map[string]string `yaml:"sources"`
	Etcd    []EtcdStep        `yaml:"etcd"`
	Flags   []EtcdFlags       `yaml:"flags"`
}

// EtcdStep is a step of etcd to a minor.
type EtcdStep struct {
	// Version is "v3.7".
	Version string `yaml:"version"`
	// From is the oldest patch of the previous minor that can be upgraded to it.
	From version.Version `yaml:"from"`
	// Tag is that of an image with From or a newer patch, which no kubeadm deploys by itself:
	// clusters get it with etcd.local.imageTag. Empty if a patch of Kubernetes has it.
	Tag string `yaml:"tag"`
	// Source is the page or document itself.
	Source string `yaml:"source"`
}

// EtcdFlags are flags with which a minor of etcd does not start.
type EtcdFlags struct {
	Version string   `yaml:"version"`
	Removed []string `yaml:"removed"`
	Source  string   `yaml:"source"`
}

// data is the content of all files.
type data struct {
	minors []Minor // oldest first
	etcd   etcdFile
	fields fieldsFile
	addOns addOnsFile
}

// all parses the files once. A file that is wrong is a defect of the program, found by its tests.
var all = sync.OnceValue(func() data {
	d, err := parse(files)
	if err != nil {
		panic(err)
	}
	return d
})

func parse(files fs.FS) (data, error) {
	var d data
	names, err := fs.Glob(files, "data/*.yaml")
	if err != nil {
		return d, err
	}
	for _, name := range names {
		b, err := fs.ReadFile(files, name)
		if err != nil {
			return d, err
		}
		switch name {
		case "data/etcd.yaml":
			if err = strict(b, &d.etcd); err == nil {
				err = d.etcd.check()
			}
		case "data/fields.yaml":
			if err = strict(b, &d.fields); err == nil {
				err = d.fields.check()
			}
		case "data/addons.yaml":
			if err = strict(b, &d.addOns); err == nil {
				err = d.addOns.check()
			}
		default:
			var m Minor
			if err = strict(b, &m); err == nil {
				if err = m.check(); err == nil && name != "data/"+m.Kubernetes+".yaml" {
					err = fmt.Errorf("it is of %s", m.Kubernetes)
				}
			}
			d.minors = append(d.minors, m)
		}
		if err != nil {
			return d, fmt.Errorf("read %s: %w", name, err)
		}
	}
	slices.SortFunc(d.minors, func(a, b Minor) int { return cmp.Compare(a.number, b.number) })
	return d, nil
}

func strict(b []byte, into any) error {
	dec := yaml.NewDecoder(bytes.NewReader(b))
	dec.KnownFields(true)
	return dec.Decode(into)
}

// check reports rows that say nothing or have no source, and sources that no row uses.
func (m *Minor) check() error {
	v, err := version.Parse(m.Kubernetes + ".0")
	if err != nil || v.Major() != 1 {
		return fmt.Errorf("kubernetes is %q, want a minor such as v1.37", m.Kubernetes)
	}
	m.number = v.Minor()
	c := checker{sources: m.Sources, used: map[string]bool{}}
	for i, r := range m.Flags {
		defaults := slices.Collect(maps.Keys(r.Defaults))
		known := !slices.ContainsFunc(defaults, func(name string) bool { return !slices.Contains(r.Removed, name) })
		c.row("flags", i, r.Source, r.Component != "" && len(r.Removed) > 0 && known, r.Removed)
	}
	for i, r := range m.Values {
		c.row("values", i, r.Source, r.Component != "" && r.Flag != "" && len(r.Refused) > 0, r.Refused)
	}
	for i, r := range m.Gates {
		names := slices.Concat(r.Removed, r.LockedOn, r.LockedOff)
		c.row("gates", i, r.Source, len(names) > 0, names)
	}
	for i, r := range m.APIs {
		c.row("apis", i, r.Source, r.Group != "" && r.Version != "" && r.Resource != "" && r.Kind != "", nil)
	}
	for i, r := range m.Kubeadm {
		c.row("kubeadm", i, r.Source, len(r.Configs) > 0 || r.Etcd != "", slices.Concat(r.Configs, r.RemovedGates))
	}
	for i, r := range m.Kubelet {
		c.row("kubelet", i, r.Source, r.MinorsBehind > 0 || len(r.Configs) > 0 || r.RefusesCgroupV1 || r.Runtime != "" && !r.OldestRuntime.IsZero(), r.Configs)
	}
	for i, r := range m.Actions {
		c.row("actions", i, r.Source, r.complete(), nil)
	}
	return c.done()
}

func (e *etcdFile) check() error {
	c := checker{sources: e.Sources, used: map[string]bool{}}
	for i, r := range e.Etcd {
		c.row("etcd", i, r.Source, r.Version != "" && !r.From.IsZero(), nil)
		e.Etcd[i].Source = e.Sources[r.Source]
	}
	for i, r := range e.Flags {
		c.row("flags", i, r.Source, r.Version != "" && len(r.Removed) > 0, r.Removed)
	}
	return c.done()
}

// A checker collects the defects of a file.
type checker struct {
	sources map[string]string
	used    map[string]bool
	errs    []error
}

func (c *checker) row(list string, i int, source string, complete bool, names []string) {
	row := fmt.Sprintf("row %d of %s", i+1, list)
	if c.sources[source] == "" {
		c.errs = append(c.errs, fmt.Errorf("%s: source %q is not listed", row, source))
	}
	c.used[source] = true
	if !complete {
		c.errs = append(c.errs, fmt.Errorf("%s: fields are missing", row))
	}
	slices.Sort(names)
	for j, name := range names {
		if strings.TrimSpace(name) != name || name == "" || j > 0 && names[j-1] == name {
			c.errs = append(c.errs, fmt.Errorf("%s: name %q is empty, padded or listed twice", row, name))
		}
	}
}

func (c *checker) done() error {
	for name := range c.sources {
		if !c.used[name] {
			c.errs = append(c.errs, fmt.Errorf("source %q has no row", name))
		}
	}
	return errors.Join(c.errs...)
}

// Known reports whether the data has all that a minor changes.
func Known(v version.Version) bool {
	m, ok := Of(v)
	return ok && !m.Partial
}

// UnknownMinors returns the minors after from, up to to, whose changes are not complete in the
// data, as their first patches.
func UnknownMinors(from, to version.Version) (out []version.Version) {
	for n := from.Minor() + 1; n <= to.Minor(); n++ {
		if v := version.MustParse(fmt.Sprintf("v1.%d.0", n)); !Known(v) {
			out = append(out, v)
		}
	}
	return out
}

// Newest returns the first patch of the newest minor whose changes are complete in the data.
func Newest() (newest version.Version) {
	for _, m := range all().minors {
		if !m.Partial {
			newest = version.MustParse(m.Kubernetes + ".0")
		}
	}
	return newest
}

// Of returns the data of a minor. ok is false if there is none.
func Of(v version.Version) (m *Minor, ok bool) {
	minors := all().minors
	for i := range minors {
		if v.Major() == 1 && minors[i].number == v.Minor() {
			return &minors[i], true
		}
	}
	return nil, false
}

// Minors returns the data of all minors, oldest first. Callers must not change it.
func Minors() []Minor { return all().minors }

// Number is the minor's number: 37 of v1.37.
func (m *Minor) Number() int { return m.number }

// KubeletSkew returns the number of minors by which a kubelet may be older than an API server.
func KubeletSkew(kubelet version.Version) (skew int) {
	for _, m := range all().minors {
		for _, r := range m.Kubelet {
			switch {
			case r.MinorsBehind == 0:
			case m.number <= kubelet.Minor():
				skew = r.MinorsBehind
			case skew == 0:
				skew = r.MinorsBehindBefore
			}
		}
	}
	return skew
}

// KubeletSkewRule is "at most three minors older (two before v1.25)", without the words for numbers.
func KubeletSkewRule() (behind, before int, since string) {
	for _, m := range all().minors {
		for _, r := range m.Kubelet {
			if r.MinorsBehind > 0 {
				behind, before, since = r.MinorsBehind, r.MinorsBehindBefore, m.Kubernetes
			}
		}
	}
	return behind, before, since
}

// Answer is whether a version reads a format. The data may not know.
type Answer int

// The answers.
const (
	Unknown Answer = iota
	No
	Yes
)

// ReadsKubeadmConfig reports whether a kubeadm reads a version of ClusterConfiguration.
func ReadsKubeadmConfig(kubeadm version.Version, config string) Answer {
	return reads(kubeadm, config, func(m *Minor) (rows [][]string) {
		for _, r := range m.Kubeadm {
			rows = append(rows, r.Configs)
		}
		return rows
	})
}

// ReadsKubeletConfig reports whether a kubelet reads a version of KubeletConfiguration.
func ReadsKubeletConfig(kubelet version.Version, config string) Answer {
	return reads(kubelet, config, func(m *Minor) (rows [][]string) {
		for _, r := range m.Kubelet {
			rows = append(rows, r.Configs)
		}
		return rows
	})
}

// reads finds a format in the rows that hold for v. A format that a minor dropped does not come
// back. Apart from that, nothing is known about minors without complete data that are newer than
// those that have it, and about minors before the first row.
func reads(v version.Version, format string, rows func(*Minor) [][]string) (a Answer) {
	for i := range all().minors {
		m := &all().minors[i]
		if m.number > v.Minor() {
			break
		}
		for _, formats := range rows(m) {
			switch {
			case slices.Contains(formats, format):
				a = Yes
			case len(formats) > 0:
				a = No
			}
		}
	}
	dropped := a == No && everListed(format, rows)
	if newest := Newest(); v.Minor() > newest.Minor() && !dropped {
		return Unknown
	}
	return a
}

func everListed(format string, rows func(*Minor) [][]string) bool {
	for i := range all().minors {
		for _, formats := range rows(&all().minors[i]) {
			if slices.Contains(formats, format) {
				return true
			}
		}
	}
	return false
}

// Reads returns the first minor whose kubeadm reads a version of ClusterConfiguration, as
// its first patch; zero if none does.
func Reads(config string) version.Version {
	for _, m := range all().minors {
		for _, r := range m.Kubeadm {
			if slices.Contains(r.Configs, config) {
				return version.MustParse(m.Kubernetes + ".0")
			}
		}
	}
	return version.Version{}
}

// DeployedEtcd returns the tag of the etcd that a kubeadm deploys; empty if unknown.
func DeployedEtcd(kubeadm version.Version) (tag string) {
	if m, ok := Of(kubeadm); ok {
		for _, r := range m.Kubeadm {
			tag = cmp.Or(r.Etcd, tag)
		}
	}
	return tag
}

// ExternalEtcd returns the oldest etcd outside the cluster that a kubeadm accepts; zero if
// unknown.
func ExternalEtcd(kubeadm version.Version) (oldest version.Version) {
	for _, m := range all().minors {
		for _, r := range m.Kubeadm {
			if !r.ExternalEtcd.IsZero() && m.number <= kubeadm.Minor() {
				oldest = r.ExternalEtcd
			}
		}
	}
	return oldest
}

// Etcd returns the step to a version's minor of etcd. ok is false if the minor has no floor.
func Etcd(to version.Version) (s EtcdStep, ok bool) {
	for _, s := range all().etcd.Etcd {
		if s.Version == to.MinorString() {
			return s, true
		}
	}
	return EtcdStep{}, false
}

// EtcdSteps returns all steps of etcd that have a floor, oldest first.
func EtcdSteps() []EtcdStep { return all().etcd.Etcd }

// BelowFloor reports whether etcd cannot be upgraded from one version to another directly,
// because the step wants a newer patch first.
func BelowFloor(from, to version.Version) (s EtcdStep, below bool) {
	s, ok := Etcd(to)
	if !ok || from.MinorDistance(to) != 1 || !from.SameMinor(s.From) || !from.Less(s.From) {
		return EtcdStep{}, false
	}
	return s, true
}

// EtcdFlagRows returns the flags that minors of etcd refuse, oldest first. Callers must not change
// them.
func EtcdFlagRows() []EtcdFlags { return all().etcd.Flags }

// EtcdFlagsRemoved returns the flags that one of the minors after from, up to to, refuses.
func EtcdFlagsRemoved(from, to version.Version) (out []string) {
	for _, f := range all().etcd.Flags {
		v, err := version.Parse(f.Version + ".0")
		if err == nil && v.Major() == to.Major() && from.Minor() < v.Minor() && v.Minor() <= to.Minor() {
			out = append(out, f.Removed...)
		}
	}
	return out
}
