// Next drafts the data of the next minor of Kubernetes from the sources of two versions.
//
// It compares the feature gates, the API types and kubeadm's constants in the Go modules of both
// versions, and the flags of the components in the cache of `constellation sandbox fetch`. What
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
	configs       []string // versions of kubeadm's configuration, without the placeholder
	kubeadmGates  []string
	etcd          string
	externalEtcd  string
	// flags of components; a component whose binary is not in the cache is missing.
	flags map[string][]string
}

type lock struct{ locked, on bool }

type api struct{ group, version, kind string }

// read reads the facts of a version. It downloads its modules.
func read(ctx context.Context, v string) (*facts, error) {
	parsed, err := version.Parse(v)
	if err != nil {
		return nil, err
	}
	f := &facts{version: parsed, flags: map[string][]string{}}
	main, err := download(ctx, "k8s.io/kubernetes@"+v)
	if err != nil {
		return nil, err
	}
	types, err := download(ctx, "k8s.io/api@"+strings.Replace(v, "v1.", "v0.", 1))
	if err != nil {
		return nil, err
	}
	return f, errors.Join(f.readGates(main), f.readAPIs(types), f.readKubeadm(filepath.Join(main, "cmd", "kubeadm", "app")), f.readFlags(ctx, v))
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
			Default       bool `yaml:"default"`
			LockToDefault bool `yaml:"lockToDefault"`
		} `yaml:"versionedSpecs"`
	}
	if err := yaml.Unmarshal(b, &list); err != nil {
		return nil, err
	}
	gates := map[string]lock{}
	for _, g := range list {
		if n := len(g.VersionedSpecs); n > 0 {
			last := g.VersionedSpecs[n-1]
			gates[g.Name] = lock{last.LockToDefault, last.Default}
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
	}
	return nil
}

var flagRE = regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z0-9][a-z0-9-]*)`)

// parseFlags returns the flags in the output of --help, sorted.
func parseFlags(help string) (flags []string) {
	for _, m := range flagRE.FindAllStringSubmatch(help, -1) {
		flags = append(flags, m[1])
	}
	slices.Sort(flags)
	return slices.Compact(flags)
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
	line("  lifecycle: lifecycle methods of k8s.io/api %s", strings.Replace(to.version.String(), "v1.", "v0.", 1))
	line("  absence: absence from k8s.io/api %s", strings.Replace(to.version.MinorString(), "v1.", "v0.", 1))
	line("  kubeadm: cmd/kubeadm/app/constants, apis and features of k8s.io/kubernetes %s", to.version)
	flags(line, list, from, to)
	line("# CHECK values: admission plugins in pkg/kubeapiserver/options/plugins.go, group versions for runtime-config")
	gates(line, list, from, to)
	apis(line, from, to)
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
		gone := missing(old, now)
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
		if r.source == "absence" {
			line("  # CHECK deleted: true if no other version of the group reads stored objects")
			extra = " deleted: true,"
		}
		line("  - { group: %s, version: %s, resource: %s, kind: %s,%s source: %s }", r.group, r.version, plural(r.kind), r.kind, extra, r.source)
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
