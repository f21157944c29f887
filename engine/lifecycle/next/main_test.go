package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"gopkg.in/yaml.v3"

	"constellation/engine/lifecycle"
	"constellation/engine/version"
	"constellation/internal/testneeds"
)

// write makes files below a new directory.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// kubernetes are the sources of an invented version, as far as they are read.
func kubernetes(t *testing.T, v, gates, etcd, features string, configs ...string) *facts {
	t.Helper()
	files := map[string]string{
		"test/compatibility_lifecycle/reference/versioned_feature_list.yaml": gates,
		"cmd/kubeadm/app/constants/constants.go":                             "const (\n\tMinExternalEtcdVersion = \"3.5.24-0\"\n\tDefaultEtcdVersion = \"" + etcd + "\"\n)\n",
		"cmd/kubeadm/app/features/features.go":                               "const (\n" + features + ")\n",
		"pkg/apis/batch/register.go":                                         "const GroupName = \"batch\"\n",
		"pkg/apis/batch/install/install.go":                                  "utilruntime.Must(scheme.SetVersionPriority(v1.SchemeGroupVersion, batchv1alpha1.SchemeGroupVersion))",
		"pkg/apis/apps/register.go":                                          "const GroupName = \"apps\"\n",
		"pkg/apis/apps/install/install.go":                                   "utilruntime.Must(scheme.SetVersionPriority(v1.SchemeGroupVersion,\n\t\tv1beta1.SchemeGroupVersion))",
		"cmd/kubeadm/app/apis/kubeadm/v1/doc.go":                             "package v1\n",
	}
	for _, c := range configs {
		files["cmd/kubeadm/app/apis/kubeadm/"+c+"/doc.go"] = "package " + c + "\n"
	}
	dir := write(t, files)
	f := &facts{version: version.MustParse(v), flags: map[string]map[string]string{}}
	if err := f.readGates(dir); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.readPriority(filepath.Join(dir, "pkg/apis")), f.readKubeadm(filepath.Join(dir, "cmd/kubeadm/app"))); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestDraft(t *testing.T) {
	gate := func(name, locked, value string) string {
		return "- name: " + name + "\n  versionedSpecs:\n  - {default: false, lockToDefault: false}\n  - {default: " + value + ", lockToDefault: " + locked + ", preRelease: Beta}\n"
	}
	from := kubernetes(t, "v1.90.1", gate("Gone", "true", "true")+gate("Stays", "false", "true")+gate("On", "false", "true")+gate("Off", "false", "false")+gate("LockedBefore", "true", "true"),
		"3.8.2-0", "\tOldGate = \"OldGate\"\n\tKept = \"Kept\"\n", "v1beta4", "v1beta5")
	to := kubernetes(t, "v1.91.0", gate("Stays", "false", "false")+gate("On", "true", "true")+gate("Off", "true", "false")+gate("LockedBefore", "true", "true")+gate("New", "true", "true"),
		"3.9.0-0", "\tKept = \"Kept\"\n", "v1beta5")
	from.flags["kubelet"], to.flags["kubelet"] = parseFlags("  -v, --v Level\n      --old-flag int   an old one (default 7) (DEPRECATED)\n      --old-bool\n      --stays\nsee --text\n"), parseFlags("      --stays\n  -v, --v Level\n")
	from.flags["etcd"], to.flags["etcd"] = map[string]string{"experimental-x": ""}, map[string]string{}
	from.plugins = parsePlugins("      --enable-admission-plugins strings   on by default (A). Comma-delimited list of admission plugins: A, Gone. The order\n")
	to.plugins = []string{"A"}
	for f, types := range map[*facts]map[string]string{
		from: {
			"batch/v1alpha1/register.go": "const GroupName = \"batch\"\n\t\t&Thing{},\n\t\t&ThingList{},\n",
			"apps/v1beta1/register.go":   "const GroupName = \"apps\"\n\t\t&Policy{},\n",
		},
		to: {
			"apps/v1/register.go":                               "const GroupName = \"apps\"\n\t\t&Policy{},\n",
			"apps/v1beta1/register.go":                          "const GroupName = \"apps\"\n\t\t&Policy{},\n",
			"apps/v1beta1/zz_generated.prerelease-lifecycle.go": "func (in *Policy) APILifecycleRemoved() (major, minor int) {\n\treturn 1, 91\n}\n",
		},
	} {
		if err := f.readAPIs(write(t, types)); err != nil {
			t.Fatal(err)
		}
	}
	changelog := write(t, map[string]string{"CHANGELOG-1.91.md": "## Urgent Upgrade Notes\n# v1.91.0\n\n## Urgent Upgrade Notes \n\n### (Read it)\n\n- ACTION REQUIRED: remove old-flag.\n  - Another.\n \n## Changes by Kind\n\n- A change.\n"})
	for _, f := range []*facts{from, to} {
		if err := f.readNotes(changelog); err != nil {
			t.Fatal(err)
		}
	}
	got := draft(from, to)
	_, rows, ok := strings.Cut(got, "# CHECK flags of kube-apiserver")
	if !ok {
		t.Fatalf("the draft does not mark the flags that are not known:\n%s", got)
	}
	lines := slices.DeleteFunc(strings.Split(rows, "\n"), func(l string) bool { return strings.HasPrefix(l, "# CHECK flags of kube") })
	want := []string{
		": `constellation sandbox fetch` both versions, then run this again",
		"flags:", "  - source: flags", "    component: kubelet", "    removed:", "      - old-bool", "      - old-flag", "    defaults:", `      old-flag: "7"`,
		"# CHECK flags of etcd go to data/etcd.yaml: experimental-x",
		"values:",
		"  - { component: kube-apiserver, flag: enable-admission-plugins, refused: [Gone], source: admission }",
		"  - { component: kube-apiserver, flag: disable-admission-plugins, refused: [Gone], source: admission }",
		"  - { component: kube-apiserver, flag: runtime-config, refused: [batch/v1alpha1], source: absence }",
		"gates:", "  - source: gates", "    removed:", "      - Gone", "    lockedOn:", "      - On", "    lockedOff:", "      - Off",
		"# CHECK gates whose default changes: Stays is Beta and off",
		"apis:", "  - { group: apps, version: v1beta1, resource: policies, kind: Policy, source: lifecycle }",
		"  - { group: batch, version: v1alpha1, resource: things, kind: Thing, deleted: true, source: absence }",
		"# CHECK storage versions that change: Policy of apps from v1beta1 to v1",
		"kubeadm:", "  - etcd: 3.9.0-0", "    externalEtcd: v3.5.24", "    configs:", "      - kubeadm.k8s.io/v1beta5", "    removedGates:", "      - OldGate", "    source: kubeadm",
		"# CHECK etcd: v1.91.0 deploys 3.9.0-0 after 3.8.2-0; read the upgrade guide of the new minor and write data/etcd.yaml",
		"# CHECK kubelet: skew, container runtimes and cgroups",
		"# CHECK actions: \"Urgent Upgrade Notes\" of CHANGELOG/CHANGELOG-1.91.md",
		"# - ACTION REQUIRED: remove old-flag.", "# - Another.", "",
	}
	if d := cmp.Diff(want, lines); d != "" {
		t.Errorf("the draft differs (-want +got):\n%s", d)
	}
}

func TestSourcesThatChangedTheirFormAreErrors(t *testing.T) {
	f := &facts{}
	if err := f.readAPIs(write(t, map[string]string{"apps/v1/register.go": "package v1\n"})); err == nil {
		t.Error("API types without a group are read")
	}
	if _, err := parseGates([]byte("[]")); err == nil {
		t.Error("an empty list of feature gates is read")
	}
	dir := write(t, map[string]string{"constants/constants.go": "package constants\n", "features/features.go": ""})
	if err := f.readKubeadm(dir); err == nil || !strings.Contains(err.Error(), "is missing") {
		t.Errorf("constants without versions give %v", err)
	}
}

// cached returns the newest patch of a minor that was built on this computer.
func cached(t *testing.T, minor version.Version) string {
	t.Helper()
	t.Attr(testneeds.Attribute, "Kubernetes binaries")
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skip(err)
	}
	found, err := filepath.Glob(filepath.Join(cache, "constellation", "kubernetes", minor.MinorString()+".*", "bin", "kubelet"))
	if err != nil {
		t.Fatal(err)
	}
	if len(found) == 0 {
		t.Skipf("needs a patch of Kubernetes %s: run `bin/constellation sandbox fetch`", minor.MinorString())
	}
	return filepath.Base(filepath.Dir(filepath.Dir(found[0])))
}

// The data that people reviewed has what the generator finds in the sources and binaries of the same
// versions, no less and, apart from what only people know, no more.
func TestReviewedDataIsWhatTheSourcesSay(t *testing.T) {
	newest := lifecycle.Newest()
	before := version.MustParse(fmt.Sprintf("v1.%d.0", newest.Minor()-1))
	from, err := read(t.Context(), cached(t, before))
	if err != nil {
		t.Fatal(err)
	}
	to, err := read(t.Context(), cached(t, newest))
	if err != nil {
		t.Fatal(err)
	}
	var got lifecycle.Minor
	dec := yaml.NewDecoder(strings.NewReader(draft(from, to)))
	dec.KnownFields(true)
	if err := dec.Decode(&got); err != nil {
		t.Fatal(err)
	}
	want, ok := lifecycle.Of(newest)
	if !ok {
		t.Fatalf("%s has no data", newest)
	}
	byText := cmpopts.SortSlices(func(a, b any) bool { return fmt.Sprint(a) < fmt.Sprint(b) })
	for _, d := range []struct{ list, diff string }{
		{"flags", cmp.Diff(want.Flags, got.Flags, byText, cmpopts.EquateEmpty())},
		{"values", cmp.Diff(want.Values, got.Values, byText)},
		{"gates", cmp.Diff(want.Gates, got.Gates, byText, cmpopts.EquateEmpty())},
		{"apis", cmp.Diff(want.APIs, got.APIs, byText, cmpopts.IgnoreFields(lifecycle.API{}, "Replacement"))},
		{"kubeadm", cmp.Diff(want.Kubeadm, got.Kubeadm, byText)},
	} {
		if d.diff != "" {
			t.Errorf("the reviewed %s of %s differ from the sources (-reviewed +sources):\n%s", d.list, newest.MinorString(), d.diff)
		}
	}
	if len(want.Actions) == 0 || len(to.notes) < len(want.Actions) {
		t.Errorf("the changelog has %d notes, and the data %d actions", len(to.notes), len(want.Actions))
	}

	// etcd does not list all of its flags: those are tried.
	etcdOf := func(tag string) version.Version { return version.MustParse("v" + strings.Split(tag, "-")[0]) }
	gone := missing(slices.Collect(maps.Keys(from.flags["etcd"])), slices.Collect(maps.Keys(to.flags["etcd"])))
	reviewed := lifecycle.EtcdFlagsRemoved(etcdOf(from.etcd), etcdOf(to.etcd))
	if lost := missing(gone, reviewed); len(lost) > 0 {
		t.Errorf("the data lacks removed flags of etcd: %v", lost)
	}
	for _, name := range missing(reviewed, gone) {
		if !accepts(t, from.version, name) || accepts(t, to.version, name) {
			t.Errorf("etcd of %s does not accept --%s, or that of %s does", from.version, name, to.version)
		}
	}
}

// accepts reports whether the etcd of a version of Kubernetes has a flag.
func accepts(t *testing.T, kubernetes version.Version, flag string) bool {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(cache, "constellation", "kubernetes", kubernetes.String(), "bin", "etcd")
	return exec.CommandContext(t.Context(), program, "--"+flag+"=x", "--version").Run() == nil
}
