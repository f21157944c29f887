// Next drafts the data of the next minor of Kubernetes from the sources of two versions.
//
// It compares the feature gates, the API types with the versions in which they are stored, and
// kubeadm's constants in the Go modules of both versions, and the flags and admission plugins of
// the components in the cache of `constellation sandbox fetch`. What
// it cannot know, it marks with "# CHECK" in the draft: a person reads the changelog for that.
// `make next-kubernetes FROM=v1.36.4 TO=v1.37.2` runs it.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"constellation/engine/version"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	out := flag.String("o", "", "write the draft to this `file` instead of standard output")
	flag.Parse()
	if flag.NArg() != 2 {
		return errors.New("usage: next [-o FILE] FROM TO, such as v1.36.4 v1.37.2")
	}
	from, err := read(ctx, flag.Arg(0))
	if err != nil {
		return err
	}
	to, err := read(ctx, flag.Arg(1))
	if err != nil {
		return err
	}
	if from.version.MinorDistance(to.version) != 1 {
		return fmt.Errorf("compare %s with %s: want the minor after it", from.version, to.version)
	}
	text := draft(from, to)
	if *out == "" {
		_, err = os.Stdout.WriteString(text)
		return err
	}
	return os.WriteFile(*out, []byte(text), 0o644)
}

// facts is what the sources of one version say.
type facts struct {
	version version.Version
	// gates has, for each feature gate, whether it is locked and to which value.
	gates map[string]lock
	// apis has, for each type of k8s.io/api, the minor that no longer serves it; zero if none is named.
	apis map[api]int
	// groupVersions are those that k8s.io/api has.
	groupVersions map[[2]string]bool
	// priority has the versions of each group, the one in which objects are stored first. A kind is
	// stored in the first one that has it.
	priority     map[string][]string
	configs      []string // versions of kubeadm's configuration, without the placeholder
	kubeadmGates []string
	etcd         string
	externalEtcd string
	// flags of components with their defaults; a component whose binary is not in the cache is
	// missing.
	flags map[string]map[string]string
	// plugins are the admission plugins of the API server, if its binary is in the cache.
	plugins []string
	// notes are the "Urgent Upgrade Notes" of the minor's changelog.
	notes []string
}

// lock is the last stage of a feature gate.
type lock struct {
	locked, on bool
	stage      string // Alpha, Beta, GA or Deprecated
}

type api struct{ group, version, kind string }

// read reads the facts of a version. It downloads its modules.
func read(ctx context.Context, v string) (*facts, error) {
	parsed, err := version.Parse(v)
	if err != nil {
		return nil, err
	}
	f := &facts{version: parsed, flags: map[string]map[string]string{}}
	main, err := download(ctx, "k8s.io/kubernetes@"+v)
	if err != nil {
		return nil, err
	}
	types, err := download(ctx, "k8s.io/api@"+strings.Replace(v, "v1.", "v0.", 1))
	if err != nil {
		return nil, err
	}
	return f, errors.Join(f.readGates(main), f.readAPIs(types), f.readPriority(filepath.Join(main, "pkg", "apis")), f.readKubeadm(filepath.Join(main, "cmd", "kubeadm", "app")), f.readNotes(filepath.Join(main, "CHANGELOG")), f.readFlags(ctx, v))
}

// download returns the directory of a module in Go's module cache.
func download(ctx context.Context, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module)
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOWORK=off")
	cmd.Dir = os.TempDir() // outside of any module
	b, err := cmd.Output()
	var have struct{ Dir, Error string }
	if json.Unmarshal(b, &have) == nil && have.Error != "" {
		err = errors.New(have.Error)
	}
	if err != nil {
		return "", fmt.Errorf("download %s: %w", module, err)
	}
	return have.Dir, nil
}

func (f *facts) readGates(dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, "test/compatibility_lifecycle/reference/versioned_feature_list.yaml"))
	if err != nil {
		return fmt.Errorf("read feature gates: %w", err)
	}
	if f.gates, err = parseGates(b); err != nil {
		return fmt.Errorf("read feature gates: %w", err)
	}
	return nil
}

// parseGates reads the list of feature gates. The last specification of a gate holds.
func parseGates(b []byte) (map[string]lock, error) {
	var list []struct {
		Name           string `yaml:"name"`
		VersionedSpecs []struct {
			Default       bool   `yaml:"default"`
			LockToDefault bool   `yaml:"lockToDefault"`
			PreRelease    string `yaml:"preRelease"`
		} `yaml:"versionedSpecs"`
	}
	if err := yaml.Unmarshal(b, &list); err != nil {
		return nil, err
	}
	gates := map[string]lock{}
	for _, g := range list {
		if n := len(g.VersionedSpecs); n > 0 {
			last := g.VersionedSpecs[n-1]
			gates[g.Name] = lock{last.LockToDefault, last.Default, last.PreRelease}
		}
	}
	if len(gates) == 0 {
		return nil, errors.New("the list is empty")
	}
	return gates, nil
}

var (
	typeRE    = regexp.MustCompile(`&(\w+)\{\}`)
	removedRE = regexp.MustCompile(`func \(in \*(\w+)\) APILifecycleRemoved\(\) \(major, minor int\) \{\s*return 1, (\d+)`)
	groupRE   = regexp.MustCompile(`(?m)^const GroupName = "([^"]*)"`)
)

func (f *facts) readAPIs(dir string) error {
	f.apis, f.groupVersions = map[api]int{}, map[[2]string]bool{}
	files, err := filepath.Glob(filepath.Join(dir, "*", "v*", "register.go"))
	if err != nil {
		return err
	}
	for _, register := range files {
		b, err := os.ReadFile(register)
		if err != nil {
			return err
		}
		group := groupRE.FindSubmatch(b)
		if group == nil {
			continue // no group of an API
		}
		gv := [2]string{string(group[1]), filepath.Base(filepath.Dir(register))}
		f.groupVersions[gv] = true
		for _, m := range typeRE.FindAllSubmatch(b, -1) {
			f.apis[api{gv[0], gv[1], string(m[1])}] = 0
		}
		b, err = os.ReadFile(filepath.Join(filepath.Dir(register), "zz_generated.prerelease-lifecycle.go"))
		if errors.Is(err, fs.ErrNotExist) {
			continue // stable, or an alpha without lifecycle methods
		}
		if err != nil {
			return err
		}
		for _, m := range removedRE.FindAllSubmatch(b, -1) {
			var minor int
			if _, err := fmt.Sscan(string(m[2]), &minor); err != nil {
				return fmt.Errorf("read lifecycle of %s: %w", m[1], err)
			}
			f.apis[api{gv[0], gv[1], string(m[1])}] = minor
		}
	}
	if len(f.apis) == 0 {
		return fmt.Errorf("read API types: %s has none", dir)
	}
	return nil
}

var (
	priorityRE = regexp.MustCompile(`(?s)SetVersionPriority\((.*?)\)\)`)
	schemeRE   = regexp.MustCompile(`(v\d+(?:(?:alpha|beta)\d+)?)\.SchemeGroupVersion`)
)

// readPriority reads the order of versions in pkg/apis of k8s.io/kubernetes.
func (f *facts) readPriority(dir string) error {
	f.priority = map[string][]string{}
	files, err := filepath.Glob(filepath.Join(dir, "*", "install", "install.go"))
	if err != nil {
		return err
	}
	for _, install := range files {
		b, err := os.ReadFile(install)
		if err != nil {
			return err
		}
		register, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(install)), "register.go"))
		if err != nil {
			return err
		}
		group, call := groupRE.FindSubmatch(register), priorityRE.FindSubmatch(b)
		if group == nil || call == nil {
			return fmt.Errorf("read storage versions: %s has no priority of versions", install)
		}
		for _, m := range schemeRE.FindAllSubmatch(call[1], -1) {
			f.priority[string(group[1])] = append(f.priority[string(group[1])], string(m[1]))
		}
	}
	if len(f.priority) == 0 {
		return fmt.Errorf("read storage versions: %s has no groups", dir)
	}
	return nil
}

// stored returns the version in which objects of a kind are stored by default; empty if unknown.
func (f *facts) stored(group, kind string) string {
	for _, v := range f.priority[group] {
		if _, ok := f.apis[api{group, v, kind}]; ok {
			return v
		}
	}
	return ""
}

var kubeadmGateRE = regexp.MustCompile(`(?m)^\t[A-Z]\w* += "([A-Z]\w*)"$`)

func (f *facts) readKubeadm(dir string) error {
	constants, err := os.ReadFile(filepath.Join(dir, "constants", "constants.go"))
	if err != nil {
		return err
	}
	for name, into := range map[string]*string{"DefaultEtcdVersion": &f.etcd, "MinExternalEtcdVersion": &f.externalEtcd} {
		m := regexp.MustCompile(`\b` + name + ` += "([^"]+)"`).FindSubmatch(constants)
		if m == nil {
			return fmt.Errorf("read constants of kubeadm: %s is missing", name)
		}
		*into = string(m[1])
	}
	features, err := os.ReadFile(filepath.Join(dir, "features", "features.go"))
	if err != nil {
		return err
	}
	for _, m := range kubeadmGateRE.FindAllSubmatch(features, -1) {
		f.kubeadmGates = append(f.kubeadmGates, string(m[1]))
	}
	dirs, err := filepath.Glob(filepath.Join(dir, "apis", "kubeadm", "v*beta*"))
	if err != nil {
		return err
	}
	for _, d := range dirs {
		f.configs = append(f.configs, "kubeadm.k8s.io/"+filepath.Base(d))
	}
	return nil
}

// readNotes reads the notes of the minor's first release. A patch .0 does not have them.
func (f *facts) readNotes(dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, "CHANGELOG-"+strings.TrimPrefix(f.version.MinorString(), "v")+".md"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // marked in the draft
	}
	if err != nil {
		return err
	}
	_, notes, _ := strings.Cut(string(b), "\n## Urgent Upgrade Notes")
	notes, _, _ = strings.Cut(notes, "\n## ")
	for line := range strings.Lines(notes) {
		if note, ok := strings.CutPrefix(strings.TrimSpace(line), "- "); ok {
			f.notes = append(f.notes, note)
		}
	}
	return nil
}

// components are the programs whose flags are compared.
var components = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "etcd"}

func (f *facts) readFlags(ctx context.Context, v string) error {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil // marked in the draft
	}
	for _, name := range components {
		program := filepath.Join(cache, "constellation", "kubernetes", v, "bin", name)
		if _, err := os.Stat(program); err != nil {
			continue
		}
		b, err := exec.CommandContext(ctx, program, "--help").CombinedOutput()
		if err != nil && len(b) == 0 {
			return fmt.Errorf("read flags of %s: %w", name, err)
		}
		f.flags[name] = parseFlags(string(b))
		if name == "kube-apiserver" {
			f.plugins = parsePlugins(string(b))
		}
	}
	return nil
}

var (
	flagRE    = regexp.MustCompile(`^ +(?:-\w, )?--([a-z0-9][a-z0-9-]*)`)
	defaultRE = regexp.MustCompile(`\(default "?([^")]*)"?\)`)
	pluginsRE = regexp.MustCompile(`(?m)^ +--enable-admission-plugins .*Comma-delimited list of admission plugins: ([A-Za-z, ]+)\.`)
)

// parseFlags returns the flags in the output of --help with their defaults. Hidden flags are not
// in it.
func parseFlags(help string) map[string]string {
	flags := map[string]string{}
	for line := range strings.Lines(help) {
		m := flagRE.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		flags[m[1]] = ""
		if d := defaultRE.FindStringSubmatch(line); d != nil {
			flags[m[1]] = d[1]
		}
	}
	return flags
}

// parsePlugins returns the admission plugins in the output of --help.
func parsePlugins(help string) []string {
	m := pluginsRE.FindStringSubmatch(help)
	if m == nil {
		return nil
	}
	return strings.Split(m[1], ", ")
}

// missing returns the elements of a that b lacks, sorted.
func missing(a, b []string) (out []string) {
	for _, s := range a {
		if !slices.Contains(b, s) {
			out = append(out, s)
		}
	}
	slices.Sort(out)
	return out
}

// draft writes the data of to's minor.
func draft(from, to *facts) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	list := func(indent, key string, names []string) {
		if len(names) > 0 {
			line("%s%s:\n%s  - %s", indent, key, indent, strings.Join(names, "\n"+indent+"  - "))
		}
	}
	both := from.version.String() + " and " + to.version.String()
	line("# What Kubernetes %s removes, refuses and demands. Package engine/lifecycle defines the format.", to.version.MinorString())
	line("# Every row names a source of the list below.")
	line("# CHECK marks what the comparison of %s cannot know. Remove the marks after the review.", both)
	line("kubernetes: %s", to.version.MinorString())
	line("sources:")
	line("  gates: difference of test/compatibility_lifecycle/reference/versioned_feature_list.yaml in k8s.io/kubernetes %s", both)
	line("  flags: difference of the flags that the components register in k8s.io/kubernetes %s", both)
	line("  admission: admission plugins that kube-apiserver lists in k8s.io/kubernetes %s", both)
	line("  lifecycle: lifecycle methods of k8s.io/api %s", strings.Replace(to.version.String(), "v1.", "v0.", 1))
	line("  absence: absence from k8s.io/api %s", strings.Replace(to.version.MinorString(), "v1.", "v0.", 1))
	line("  kubeadm: cmd/kubeadm/app/constants, apis and features of k8s.io/kubernetes %s", to.version)
	flags(line, list, from, to)
	values(line, from, to)
	gates(line, list, from, to)
	apis(line, from, to)
	storage(line, from, to)
	line("kubeadm:")
	line("  - etcd: %s", to.etcd)
	line("    externalEtcd: v%s", strings.Split(to.externalEtcd, "-")[0])
	if len(missing(from.configs, to.configs)) > 0 {
		list("    ", "configs", to.configs)
	}
	list("    ", "removedGates", missing(from.kubeadmGates, to.kubeadmGates))
	line("    source: kubeadm")
	if etcdMinor(from.etcd) != etcdMinor(to.etcd) {
		line("# CHECK etcd: %s deploys %s after %s; read the upgrade guide of the new minor and write data/etcd.yaml", to.version, to.etcd, from.etcd)
	}
	line("# CHECK kubelet: skew, container runtimes and cgroups")
	line("# CHECK actions: \"Urgent Upgrade Notes\" of CHANGELOG/CHANGELOG-%s.md", strings.TrimPrefix(to.version.MinorString(), "v"))
	for _, note := range to.notes {
		line("# - %s", note)
	}
	return b.String()
}

func etcdMinor(tag string) string { return strings.Join(strings.SplitN(tag, ".", 3)[:2], ".") }

func flags(line func(string, ...any), list func(indent, key string, names []string), from, to *facts) {
	begun := false
	for _, c := range components {
		old, known := from.flags[c]
		now, knownToo := to.flags[c]
		if !known || !knownToo {
			line("# CHECK flags of %s: `constellation sandbox fetch` both versions, then run this again", c)
			continue
		}
		gone := missing(slices.Collect(maps.Keys(old)), slices.Collect(maps.Keys(now)))
		if len(gone) == 0 {
			continue
		}
		if c == "etcd" {
			line("# CHECK flags of etcd go to data/etcd.yaml: %s", strings.Join(gone, ", "))
			continue
		}
		if !begun {
			line("flags:")
			begun = true
		}
		line("  - source: flags")
		line("    component: %s", c)
		list("    ", "removed", gone)
		if c != "kubelet" {
			continue // a kubelet reports the values of flags, not which ones its command line has
		}
		begunDefaults := false
		for _, name := range gone {
			if slices.Contains([]string{"", "0", "0s", "false", "[]"}, old[name]) {
				continue
			}
			if !begunDefaults {
				line("    defaults:")
				begunDefaults = true
			}
			line("      %s: %q", name, old[name])
		}
	}
}

// values writes the elements of lists in flags that the API server no longer accepts.
func values(line func(string, ...any), from, to *facts) {
	plugins := missing(from.plugins, to.plugins)
	if from.plugins == nil || to.plugins == nil {
		line("# CHECK values: admission plugins in pkg/kubeapiserver/options/plugins.go")
		plugins = nil
	}
	var versions []string
	for gv := range from.groupVersions {
		// Only versions that have an API of their own can be switched on.
		if !to.groupVersions[gv] && slices.ContainsFunc(slices.Collect(maps.Keys(from.apis)), func(a api) bool { return a.group == gv[0] && a.version == gv[1] }) {
			versions = append(versions, gv[0]+"/"+gv[1])
		}
	}
	slices.Sort(versions)
	if len(plugins)+len(versions) == 0 {
		return
	}
	line("values:")
	if len(plugins) > 0 {
		for _, name := range []string{"enable-admission-plugins", "disable-admission-plugins"} {
			line("  - { component: kube-apiserver, flag: %s, refused: [%s], source: admission }", name, strings.Join(plugins, ", "))
		}
	}
	if len(versions) > 0 {
		line("  - { component: kube-apiserver, flag: runtime-config, refused: [%s], source: absence }", strings.Join(versions, ", "))
	}
}

func gates(line func(string, ...any), list func(indent, key string, names []string), from, to *facts) {
	var on, off []string
	for name, l := range to.gates {
		if was, ok := from.gates[name]; !ok || !l.locked || was.locked {
			continue
		}
		if l.on {
			on = append(on, name)
		} else {
			off = append(off, name)
		}
	}
	slices.Sort(on)
	slices.Sort(off)
	line("gates:")
	line("  - source: gates")
	list("    ", "removed", missing(slices.Collect(maps.Keys(from.gates)), slices.Collect(maps.Keys(to.gates))))
	list("    ", "lockedOn", on)
	list("    ", "lockedOff", off)
	var changed []string
	for name, l := range to.gates {
		if was, ok := from.gates[name]; ok && was.on != l.on && !l.locked {
			changed = append(changed, fmt.Sprintf("%s is %s and %s", name, l.stage, map[bool]string{true: "on", false: "off"}[l.on]))
		}
	}
	if len(changed) > 0 {
		slices.Sort(changed)
		line("# CHECK gates whose default changes: %s", strings.Join(changed, ", "))
	}
}

func apis(line func(string, ...any), from, to *facts) {
	type row struct {
		api
		source string
	}
	var rows []row
	for a, minor := range to.apis {
		if minor == to.version.Minor() {
			rows = append(rows, row{a, "lifecycle"})
		}
	}
	for a, minor := range from.apis {
		if _, ok := to.apis[a]; ok || minor != 0 && minor <= from.version.Minor() {
			continue
		}
		if !to.groupVersions[[2]string{a.group, a.version}] {
			rows = append(rows, row{a, "absence"})
		}
	}
	rows = slices.DeleteFunc(rows, func(r row) bool { return strings.HasSuffix(r.kind, "List") })
	slices.SortFunc(rows, func(a, b row) int {
		return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.version, b.version), cmp.Compare(a.kind, b.kind))
	})
	if len(rows) == 0 {
		return
	}
	line("apis:")
	for _, r := range rows {
		extra := ""
		// No API server reads objects that were stored in a version without types.
		if r.source == "absence" && from.stored(r.group, r.kind) == r.version {
			extra = " deleted: true,"
		}
		line("  - { group: %s, version: %s, resource: %s, kind: %s,%s source: %s }", r.group, r.version, plural(r.kind), r.kind, extra, r.source)
	}
}

// storage lists the kinds whose objects are stored in another version.
func storage(line func(string, ...any), from, to *facts) {
	var changed []string
	for a := range from.apis {
		was, is := from.stored(a.group, a.kind), to.stored(a.group, a.kind)
		if a.version == was && is != "" && was != is && !strings.HasSuffix(a.kind, "List") {
			changed = append(changed, fmt.Sprintf("%s of %s from %s to %s", a.kind, cmp.Or(a.group, "core"), was, is))
		}
	}
	if len(changed) > 0 {
		slices.Sort(changed)
		line("# CHECK storage versions that change: %s", strings.Join(changed, ", "))
	}
}

// plural guesses the resource of a kind, as the API machinery does.
func plural(kind string) string {
	s := strings.ToLower(kind)
	switch {
	case strings.HasSuffix(s, "s"):
		return s + "es"
	case strings.HasSuffix(s, "y"):
		return strings.TrimSuffix(s, "y") + "ies"
	}
	return s + "s"
}
