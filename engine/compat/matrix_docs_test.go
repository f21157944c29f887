package compat

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"constellation/engine/lifecycle"
	"constellation/engine/words"
	"constellation/internal/golden"
)

// The page is made from the rules and from the planner's own words, so it says what
// the program does.
func TestDocsSayWhatTheRulesSay(t *testing.T) {
	page := filepath.Join("..", "..", "docs", "compatibility.md")
	want := compatibilityPage()
	golden.Equal(t, page, want)
}

func compatibilityPage() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line(`# Compatibility`)
	line(``)
	line("The compatibility matrix: which versions work together, and the path from one to another. `constellation upgrade check` applies it to your cluster")
	line("([upgrade-check.md](upgrade-check.md)). This page is generated (`go test ./engine/compat -run TestDocs -update`).")
	line(``)
	line(`## Terms`)
	line(``)
	line("A **release** is a version of this product. It has a CLI, services, an OS image, and a list of supported patches of Kubernetes.")
	line("A **hop** is one `constellation upgrade apply`. Versions are `MAJOR.MINOR.PATCH`, ordered as semver orders them: v1.10.0 is newer than v1.9.0.")
	line("v1.2.0-rc.1 is older than v1.2.0 and belongs to the minor v1.2. Build metadata is ignored.")
	line(``)
	line(`## Rules`)
	line(``)
	line("All rules apply to every hop; none of them stops the others. The result of a rule is `ok`, `warn`, or `block`, which forbids the hop. It is")
	line("`not-checked` if a version is unknown; that never counts as `ok`.")
	line(``)
	line(`| rule | condition | source |`)
	line(`|---|---|---|`)
	for _, r := range Rules {
		source := r.source
		if source == PolicyPage {
			source = "policy of this product"
		}
		line("| `%s` | %s | %s |", r.ID, r.title, source)
	}
	line(``)
	line(`Some of them in more detail:`)
	line(``)
	line("- **Unplanned parts stay.** A patch of Kubernetes that no release has may stay as long as its minor is supported. It can be upgraded, never")
	line("  downgraded.")
	line("- **The oldest version decides.** While versions are mixed, distances are counted from the oldest, and \"never down\" from the newest. The")
	line("  operator's target counts as running.")
	line("- **Charts come first.** New services meet the running Kubernetes and images, so they must support them. New nodes come after that.")
	line("- **A new minor of Kubernetes comes last.** Every control plane must have an image that supports it before: image and minor take two hops.")
	line("  `constellation upgrade prepare --acknowledge oldest-supports-kubernetes` makes one write of both. Then control planes of the old")
	line("  image run the new minor until they are replaced. `measurements-weaker` is the other rule that can be acknowledged, by ID only.")
	line("- **Faulty versions.** A release or a patch can be found faulty after its release. It is no upgrade target any more, and no CLI of it is used.")
	line("  A cluster that runs it gets a finding.")
	line("- **A running rollout of nodes** may be ended, or redirected to a newer patch. A new minor waits for its end.")
	line(``)
	line(`## Hops`)
	line(``)
	line("A hop is made with the CLI of a release and leads to:")
	line(``)
	line("- services: those of the CLI")
	line("- image: the running one, or the newest of the CLI's minor that is offered and not faulty")
	line("- Kubernetes: the running patch, or the newest patch of its minor or of the next one. The release must have it, the provider must offer it,")
	line("  and it must not be faulty")
	line("- workers: replaced, or kept (`keepWorkers: true` in the configuration). A later hop replaces kept workers. Their kubelets may be")
	line("  three minors behind, their image one minor behind the services")
	line(``)
	line("At the end of the path all nodes run the same versions. The path has the fewest hops. Among those it has the fewest replacements of workers,")
	line("then the fewest changes, then the newest patches. A version that is named (`--to`, `--kubernetes`) is met exactly. Pre-releases are chosen")
	line("only if they are named.")
	line(``)
	minorsPage(line)
	line(`## Examples`)
	line(``)
	m := NewMatrix(two())
	line("Two releases are known:")
	line(``)
	for i := range m.releases {
		k := &m.releases[i]
		from := "for new clusters"
		if !k.UpgradeFrom.IsZero() {
			from = "from " + k.UpgradeFrom.String() + " on"
		}
		var patches []string
		for _, p := range k.patches {
			patches = append(patches, p.version.String())
		}
		line("- %s (%s) with Kubernetes %s", k.Version, from, words.And(patches))
	}
	for _, e := range []struct {
		title string
		now   Running
		goal  Planned
	}{
		{title: "From the oldest to the newest", now: at("v1.0.0", "v1.0.0", "v1.34.3"), goal: Planned{}},
		{title: "From the newest release to the newest Kubernetes", now: at("v1.1.0", "v1.1.0", "v1.35.4"), goal: Planned{}},
		{title: "A patch that no release has", now: at("v1.0.0", "v1.0.0", "v1.35.99"), goal: to("v1.1.0", "", "")},
		{title: "Kubernetes that no release has", now: at("v1.1.0", "v1.1.0", "v1.36.3"), goal: to("", "", "v1.37.0")},
		{title: "Back", now: at("v1.1.0", "v1.1.0", "v1.36.3"), goal: to("v1.0.0", "", "")},
	} {
		if e.goal == (Planned{}) {
			e.goal = m.Goal(e.now, Planned{}, Offer{})
		}
		var goal []string
		if !e.goal.Services.IsZero() {
			goal = append(goal, "release "+e.goal.Services.String())
		}
		if !e.goal.Kubernetes.IsZero() {
			goal = append(goal, "Kubernetes "+e.goal.Kubernetes.String())
		}
		line(``)
		line("**%s**: release %s and Kubernetes %s to %s.", e.title, e.now.Services, e.now.Kubernetes, words.And(goal))
		line(``)
		hops, why := m.Path(e.now, e.goal, Offer{})
		for _, h := range hops {
			nodes := []string{}
			if h.ReplaceControlPlanes {
				nodes = append(nodes, "control planes")
			}
			if h.ReplaceWorkers {
				nodes = append(nodes, "workers")
			}
			line("%d. with constellation %s: release %s, image %s, Kubernetes %s; %s replaced", h.Number, h.CLI, h.To.Release, h.To.Image, h.To.Kubernetes, words.And(nodes))
			for _, w := range h.Why {
				line("   - %s", w)
			}
		}
		for _, r := range why {
			line("- `%s`: %s. %s.", r.Rule, r.Title, strings.ToUpper(r.Remedy[:1])+r.Remedy[1:])
		}
	}
	return b.String()
}

// detection is how a cluster shows that an action is required.
func detection(a lifecycle.Action) string {
	switch {
	case a.KubeletField != "":
		return fmt.Sprintf("`%s: %s` in the ConfigMap kubelet-config, or reported by a kubelet", a.KubeletField, a.KubeletValue)
	case a.Flag != "":
		return fmt.Sprintf("`--%s` of %s", a.Flag, a.Component)
	case a.Permission != "":
		return fmt.Sprintf("a bound ClusterRole that grants `%s`", a.Permission)
	case a.SharedSELinux:
		return "pods with different SELinux labels on one volume of a CSI driver with `seLinuxMount: true`"
	case a.Containing != "":
		return fmt.Sprintf("`%s` in `%s`", a.Containing, a.Objects)
	case a.Objects != "":
		return fmt.Sprintf("objects of `%s`", a.Objects)
	}
	return "not detected: " + a.Undetected
}

// minorsPage lists the data of package lifecycle.
func minorsPage(line func(string, ...any)) {
	line(`## What minors change`)
	line(``)
	line("`constellation upgrade check` compares the cluster with these lists, which are the files of `engine/lifecycle/data`. Of minors that are marked as")
	line("partial, and of minors that are not listed, it reports `not-checked` where it finds nothing.")
	line(``)
	code := func(names []string) string { return "`" + strings.Join(names, "`, `") + "`" }
	minors := lifecycle.Minors()
	for i := range minors {
		m := &minors[i]
		partial := ""
		if m.Partial {
			partial = " (partial)"
		}
		line("### Kubernetes %s%s", m.Kubernetes, partial)
		line(``)
		line("| what | names | source |")
		line("|---|---|---|")
		row := func(what, names, source string) { line("| %s | %s | %s |", what, names, m.Sources[source]) }
		for _, r := range m.Flags {
			row("flags removed, "+r.Component, code(r.Removed), r.Source)
		}
		for _, r := range m.Values {
			row(fmt.Sprintf("values refused, `--%s` of %s", r.Flag, r.Component), code(r.Refused), r.Source)
		}
		for _, r := range m.Gates {
			for _, g := range []struct {
				what  string
				names []string
			}{{"feature gates removed", r.Removed}, {"feature gates locked to true", r.LockedOn}, {"feature gates locked to false", r.LockedOff}} {
				if len(g.names) > 0 {
					row(g.what, code(g.names), r.Source)
				}
			}
		}
		for _, r := range m.APIs {
			what := "API removed"
			if r.Deleted {
				what = "API deleted with its stored objects"
			}
			row(what, fmt.Sprintf("`%s/%s` %s", r.Group, r.Version, r.Kind), r.Source)
		}
		for _, r := range m.Kubeadm {
			if len(r.Configs) > 0 {
				row("configuration that kubeadm reads", code(r.Configs), r.Source)
			}
			if len(r.RemovedGates) > 0 {
				row("feature gates removed, kubeadm", code(r.RemovedGates), r.Source)
			}
			if r.Etcd != "" {
				row("etcd that kubeadm deploys", "`"+r.Etcd+"`", r.Source)
			}
			if !r.ExternalEtcd.IsZero() {
				row("oldest external etcd", "`"+r.ExternalEtcd.String()+"`", r.Source)
			}
		}
		for _, r := range m.Kubelet {
			if r.MinorsBehind > 0 {
				row("minors that kubelets may be behind", strconv.Itoa(r.MinorsBehind), r.Source)
			}
			if len(r.Configs) > 0 {
				row("configuration that kubelets read", code(r.Configs), r.Source)
			}
			if r.RefusesCgroupV1 {
				row("kubelets do not start with cgroup v1", "unless `failCgroupV1: false`", r.Source)
			}
			if r.Runtime != "" {
				row("oldest runtime of kubelets", r.Runtime+" "+r.OldestRuntime.String(), r.Source)
			}
		}
		for _, a := range m.Actions {
			row("action required: "+a.Title, detection(a), a.Source)
		}
		line(``)
	}
	line("### etcd")
	line(``)
	line("| minor | can be upgraded from | source |")
	line("|---|---|---|")
	for _, s := range lifecycle.EtcdSteps() {
		line("| %s | %s or newer | %s |", s.Version, s.From, s.Source)
	}
	line(``)
	for _, r := range lifecycle.EtcdFlagRows() {
		line("Flags that etcd %s refuses:", r.Version)
		line(``)
		line("- %s", strings.ReplaceAll(code(r.Removed), ", ", "\n- "))
		line(``)
	}
}
