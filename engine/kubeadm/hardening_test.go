package kubeadm

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"constellation/engine/lifecycle"
	"constellation/engine/version"
	"constellation/internal/golden"
)

// The configuration of a cluster with items switched off.
func without(t *testing.T, v string, off ...string) Config {
	t.Helper()
	cluster := exampleCluster(v)
	cluster.Off = off
	c, err := NewInit(cluster, exampleNode())
	if err != nil {
		t.Fatal(err)
	}
	c.Init.BootstrapTokens[0].Token = joinToken
	return c
}

func text(t *testing.T, c Config) string {
	t.Helper()
	b, err := c.YAML()
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestEachItemCanBeSwitchedOff(t *testing.T) {
	all := text(t, without(t, "v1.36.4"))
	if got := text(t, without(t, "v1.36.4", "an item of a later release")); got != all {
		t.Error("an unknown item changes the configuration")
	}
	none := text(t, without(t, "v1.36.4", ItemNames()...))
	// What each item alone writes.
	marks := map[string][]string{
		itemAnonymous:   {"authentication-config"},
		itemAudit:       {"audit-log-path", "audit-policy-file", "name: audit-log\n"},
		itemExternalIPs: {"DenyServiceExternalIPs"},
		itemEvents:      {"EventRateLimit"},
		itemPodPids:     {"podPidsLimit: 4096"},
		itemProfiling:   {"name: profiling"},
		ItemPodSecurity: {AdmissionFile},
		itemSeccomp:     {"seccompDefault: true"},
		itemTerminated:  {"terminated-pod-gc-threshold"},
		itemTLS:         {"tls-min-version", "cipher-suites", "tlsMinVersion: VersionTLS12", "tlsCipherSuites"},
	}
	for _, i := range Items() {
		if i.Name == ItemNetworkPolicies {
			if off := text(t, without(t, "v1.36.4", i.Name)); off != all {
				t.Errorf("%s, which is of a chart, changes the configuration of kubeadm", i.Name)
			}
			continue
		}
		if len(marks[i.Name]) == 0 || i.Effect == "" || i.Source == "" {
			t.Errorf("item %+v has no mark, effect or source", i)
		}
		off := text(t, without(t, "v1.36.4", i.Name))
		for _, m := range marks[i.Name] {
			if !strings.Contains(all, m) || strings.Contains(off, m) || strings.Contains(none, m) {
				t.Errorf("%s: %q is in the whole configuration %t, without the item %t, without all items %t", i.Name, m, strings.Contains(all, m), strings.Contains(off, m), strings.Contains(none, m))
			}
		}
		for other, marks := range marks {
			for _, m := range marks {
				if other != i.Name && !strings.Contains(off, m) {
					t.Errorf("without %s there is no %q of %s", i.Name, m, other)
				}
			}
		}
	}
	if strings.Contains(none, "enable-admission-plugins") || strings.Contains(none, "admission-control-config-file") {
		t.Errorf("without all items:\n%s", none)
	}
	events := text(t, without(t, "v1.36.4", ItemPodSecurity))
	if !strings.Contains(events, "value: "+eventsFile) {
		t.Errorf("without Pod Security events have no limits:\n%s", events)
	}
}

// API servers of a later machine that joins read files that the first machine's configuration names.
func TestControlPlanesHaveEachFileOfTheConfiguration(t *testing.T) {
	files := ControlPlaneFiles()
	for _, off := range [][]string{nil, {ItemPodSecurity}, {itemEvents}, {itemAudit}, ItemNames()} {
		for _, a := range without(t, "v1.36.4", off...).Cluster.APIServer.ExtraArgs {
			if strings.HasPrefix(a.Value, HardeningDir) && len(files[a.Value]) == 0 {
				t.Errorf("without %v: --%s=%s, and control planes do not have that file", off, a.Name, a.Value)
			}
		}
	}
}

// Clusters keep their settings through upgrades, so no minor that the data know may refuse one.
func TestNoMinorRefusesASetting(t *testing.T) {
	minors := lifecycle.Minors()
	if len(minors) < 3 {
		t.Fatalf("data of %d minors", len(minors))
	}
	c := without(t, "v1.34.4")
	programs := map[string][]Arg{
		"kube-apiserver": c.Cluster.APIServer.ExtraArgs, "kube-controller-manager": c.Cluster.ControllerManager.ExtraArgs, "kube-scheduler": c.Cluster.Scheduler.ExtraArgs,
	}
	for _, m := range minors {
		for _, f := range m.Flags {
			for _, a := range programs[f.Component] {
				if slices.Contains(f.Removed, a.Name) {
					t.Errorf("%s of %s does not have --%s", f.Component, m.Kubernetes, a.Name)
				}
			}
		}
		for _, v := range m.Values {
			for _, a := range programs[v.Component] {
				for e := range strings.SplitSeq(a.Value, ",") {
					if a.Name == v.Flag && slices.Contains(v.Refused, e) {
						t.Errorf("%s of %s refuses %s in --%s", v.Component, m.Kubernetes, e, a.Name)
					}
				}
			}
		}
	}
	for _, a := range c.Cluster.Etcd.Local.ExtraArgs {
		if slices.Contains(lifecycle.EtcdFlagsRemoved(version.MustParse("v3.0.0"), version.MustParse("v99.0.0")), a.Name) {
			t.Errorf("etcd does not have --%s", a.Name)
		}
	}
}

// The page has each item.
func TestDocsListEveryItem(t *testing.T) {
	want := "\n| name | what it changes | source |\n|---|---|---|\n"
	for _, i := range Items() {
		want += fmt.Sprintf("| `%s` | %s. | %s |\n", i.Name, i.Effect, i.Source)
	}
	golden.Section(t, "../../docs/security.md", "-run TestDocsListEveryItem -update` -->\n", "<!-- end of items -->", want+"\n")
}
