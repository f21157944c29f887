package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/version"
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
		"cmd/kubeadm/app/apis/kubeadm/v1/doc.go":                             "package v1\n",
	}
	for _, c := range configs {
		files["cmd/kubeadm/app/apis/kubeadm/"+c+"/doc.go"] = "package " + c + "\n"
	}
	dir := write(t, files)
	f := &facts{version: version.MustParse(v), flags: map[string][]string{}}
	if err := f.readGates(dir); err != nil {
		t.Fatal(err)
	}
	if err := f.readKubeadm(filepath.Join(dir, "cmd/kubeadm/app")); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestDraft(t *testing.T) {
	gate := func(name, locked, value string) string {
		return "- name: " + name + "\n  versionedSpecs:\n  - {default: false, lockToDefault: false}\n  - {default: " + value + ", lockToDefault: " + locked + "}\n"
	}
	from := kubernetes(t, "v1.90.1", gate("Gone", "true", "true")+gate("Stays", "false", "true")+gate("On", "false", "true")+gate("Off", "false", "false")+gate("LockedBefore", "true", "true"),
		"3.8.2-0", "\tOldGate = \"OldGate\"\n\tKept = \"Kept\"\n", "v1beta4", "v1beta5")
	to := kubernetes(t, "v1.91.0", gate("Stays", "false", "false")+gate("On", "true", "true")+gate("Off", "true", "false")+gate("LockedBefore", "true", "true")+gate("New", "true", "true"),
		"3.9.0-0", "\tKept = \"Kept\"\n", "v1beta5")
	from.flags["kubelet"], to.flags["kubelet"] = parseFlags("  -v, --v Level\n      --old-flag int   an old one\n      --stays\nsee --text\n"), parseFlags("      --stays\n  -v, --v Level\n")
	from.flags["etcd"], to.flags["etcd"] = []string{"experimental-x"}, nil
	for f, types := range map[*facts]map[string]string{
		from: {
			"batch/v1alpha1/register.go": "const GroupName = \"batch\"\n\t\t&Thing{},\n\t\t&ThingList{},\n",
			"apps/v1beta1/register.go":   "const GroupName = \"apps\"\n\t\t&Policy{},\n",
		},
		to: {
			"apps/v1beta1/register.go":                          "const GroupName = \"apps\"\n\t\t&Policy{},\n",
			"apps/v1beta1/zz_generated.prerelease-lifecycle.go": "func (in *Policy) APILifecycleRemoved() (major, minor int) {\n\treturn 1, 91\n}\n",
		},
	} {
		if err := f.readAPIs(write(t, types)); err != nil {
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
		"flags:", "  - source: flags", "    component: kubelet", "    removed:", "      - old-flag",
		"# CHECK flags of etcd go to data/etcd.yaml: experimental-x",
		"# CHECK values: admission plugins in pkg/kubeapiserver/options/plugins.go, group versions for runtime-config",
		"gates:", "  - source: gates", "    removed:", "      - Gone", "    lockedOn:", "      - On", "    lockedOff:", "      - Off",
		"apis:", "  - { group: apps, version: v1beta1, resource: policies, kind: Policy, source: lifecycle }",
		"  # CHECK deleted: true if no other version of the group reads stored objects",
		"  - { group: batch, version: v1alpha1, resource: things, kind: Thing, deleted: true, source: absence }",
		"kubeadm:", "  - etcd: 3.9.0-0", "    externalEtcd: v3.5.24", "    configs:", "      - kubeadm.k8s.io/v1beta5", "    removedGates:", "      - OldGate", "    source: kubeadm",
		"# CHECK etcd: v1.91.0 deploys 3.9.0-0 after 3.8.2-0; read the upgrade guide of the new minor and write data/etcd.yaml",
		"# CHECK kubelet: skew, container runtimes and cgroups",
		"# CHECK actions: \"Urgent Upgrade Notes\" of CHANGELOG/CHANGELOG-1.91.md", "",
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
