package engine

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite docs/compatibility.md")

// The page is generated from the rules and the planner's texts, so it cannot drift.
func TestDocsMatchTheRules(t *testing.T) {
	page := filepath.Join("..", "docs", "compatibility.md")
	want := compatibilityPage()
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(got), want); diff != "" {
		t.Errorf("%s is not what `go test ./engine -run TestDocs -update` writes: %s", page, diff)
	}
}

func compatibilityPage() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line(`# Compatibility matrix and upgrade paths`)
	line(``)
	line("This page lists the rules that every upgrade must satisfy, and how a path is chosen. It is generated (`go test ./engine -run TestDocs -update`).")
	line(``)
	line(`## Terms`)
	line(``)
	line("A **release** is a version of this product. It has a CLI, services that run in the cluster, an OS image, and a list of supported")
	line("Kubernetes patches. A **hop** is one `constellation upgrade apply`. Versions are `MAJOR.MINOR.PATCH`, ordered as semver says:")
	line("v1.10.0 is newer than v1.9.0, v1.2.0-rc.1 is older than v1.2.0 and belongs to the minor v1.2, and build metadata does not count.")
	line(``)
	line(`## Rules`)
	line(``)
	line("Every hop is checked against all rules. The result of a rule is satisfied (`ok`), a warning (`warn`), a violation that forbids the")
	line("hop (`block`), or not evaluated because a version is unknown (`not-checked`, which never counts as `ok`).")
	line(``)
	line(`| rule | condition | source |`)
	line(`|---|---|---|`)
	for _, r := range rules {
		source := r.source
		if source == policyPage {
			source = "policy of this product"
		}
		line("| `%s` | %s | %s |", r.id, r.title, source)
	}
	line(``)
	line(`Notes on some rules:`)
	line(``)
	line("- **Unplanned components** keep their version. A Kubernetes patch that no release contains may stay while its minor is supported. It can")
	line("  be upgraded, but never downgraded.")
	line("- **Mixed versions.** Distances count from the oldest running version, downgrades from the newest. The target of a rollout in progress")
	line("  counts as running.")
	line("- **Charts are upgraded first.** New services run with the old Kubernetes and the old images, so they must support both. Nodes are")
	line("  replaced afterwards.")
	line("- **A new Kubernetes minor comes last.** All control planes must first have an image that supports it. Image and minor take two hops.")
	line("  `constellation upgrade prepare --acknowledge oldest-supports-kubernetes` changes both in one write. Control planes with the old image")
	line("  then run the new minor until they are replaced. `measurements-weaker` is the other rule that can be acknowledged, by ID only.")
	line("- **Faulty versions.** A release or a patch can be marked faulty after its publication. It is no longer an upgrade target, its CLI is not")
	line("  used, and clusters that run it get a warning.")
	line("- **A rollout in progress** may be completed, or continue with a newer patch. A new minor waits for its end.")
	line(``)
	line(`## Hops`)
	line(``)
	line("The CLI of a release runs the hop. A hop leads to:")
	line(``)
	line("- services: those of the CLI;")
	line("- image: the running one, or the newest of the CLI's minor that is offered and not faulty;")
	line("- Kubernetes: the running one, or the newest patch of its minor or of the next one that the release contains, offered and not faulty;")
	line("- workers: replaced, or kept (`keepWorkers: true` in the configuration). A later hop replaces kept workers. Their kubelets may be")
	line("  three minors behind, their image one minor behind the services.")
	line(``)
	line("At the end all nodes run the same versions. The chosen path has the fewest hops; among those the fewest replacements of workers, then")
	line("the fewest changes, then the newest patches. A named version (`--to`, `--kubernetes`) is met exactly. Pre-releases are targets only if")
	line("they are named.")
	line(``)
	line(`## Examples`)
	line(``)
	m := NewMatrix(two())
	line("The examples use two releases:")
	line(``)
	for i := range m.releases {
		k := &m.releases[i]
		from := "for new clusters"
		if !k.UpgradeFrom.IsZero() {
			from = "upgrade from " + k.UpgradeFrom.String() + " or newer"
		}
		var patches []string
		for _, p := range k.patches {
			patches = append(patches, p.version.String())
		}
		line("- %s (%s) with Kubernetes %s", k.Version, from, and(patches))
	}
	for _, e := range []struct {
		title string
		now   Running
		goal  Planned
	}{
		{"From the oldest to the newest", at("v1.0.0", "v1.0.0", "v1.34.3"), Planned{}},
		{"From the newest release to the newest Kubernetes", at("v1.1.0", "v1.1.0", "v1.35.4"), Planned{}},
		{"A patch that no release contains", at("v1.0.0", "v1.0.0", "v1.35.99"), to("v1.1.0", "", "")},
		{"A target that no release contains", at("v1.1.0", "v1.1.0", "v1.36.3"), to("", "", "v1.37.0")},
		{"A downgrade", at("v1.1.0", "v1.1.0", "v1.36.3"), to("v1.0.0", "", "")},
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
		line("**%s**: release %s and Kubernetes %s to %s.", e.title, e.now.Services, e.now.Kubernetes, and(goal))
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
			line("%d. with constellation %s: release %s, image %s, Kubernetes %s; %s replaced", h.Number, h.CLI, h.To.Release, h.To.Image, h.To.Kubernetes, and(nodes))
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
