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

var update = flag.Bool("update", false, "write docs/compatibility.md anew")

// The page is made from the rules and from the planner's own words, so it says what
// the program does.
func TestDocsSayWhatTheRulesSay(t *testing.T) {
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
	line(`# What goes together, and the way from one to another`)
	line(``)
	line("This page is made from the program (`go test ./engine -run TestDocs -update`).")
	line(``)
	line(`## Words`)
	line(``)
	line("A **release** is a version of this product. It brings a CLI, services that run in the cluster, an OS image, and a list of patches of")
	line("Kubernetes that it supports. A **hop** is one `constellation upgrade apply`. Versions are `MAJOR.MINOR.PATCH`, ordered as semver says:")
	line("v1.10.0 is newer than v1.9.0, v1.2.0-rc.1 is older than v1.2.0 and belongs to the minor v1.2, and build metadata does not count.")
	line(``)
	line(`## Rules`)
	line(``)
	line("All rules are asked about every hop; none of them stops the others. A rule is satisfied (`ok`), has a remark (`warn`), forbids the hop")
	line("(`block`), or could not be asked because something is not known (`not-checked`, never taken for `ok`).")
	line(``)
	line(`| rule | what must be true | source |`)
	line(`|---|---|---|`)
	for _, r := range rules {
		source := r.source
		if source == policyPage {
			source = "policy of this product"
		}
		line("| `%s` | %s | %s |", r.id, r.title, source)
	}
	line(``)
	line(`Some of them in more words:`)
	line(``)
	line("- **As it is.** What is not planned stays. A patch of Kubernetes that no release has may stay as long as its minor is supported;")
	line("  it is left by going up, never by going down.")
	line("- **The oldest decides.** While versions are mixed, distances are counted from the oldest, and \"never down\" from the newest. What the")
	line("  operator was told to bring the cluster to counts as running.")
	line("- **Charts come first.** New services meet the Kubernetes and the images that run, so they must support them. New nodes come after that.")
	line("- **A new minor of Kubernetes comes last.** Every control plane must have an image that supports it before: image and minor take two hops.")
	line("  `constellation upgrade prepare --acknowledge oldest-supports-kubernetes` makes one of them, for one write; then control planes of the old")
	line("  image run the new minor until they are replaced. `measurements-weaker` is the other rule that can be acknowledged, by name only.")
	line("- **Faulty versions.** A release or a patch can be found faulty after it was released. It is not gone to any more, no CLI of it is used,")
	line("  and what runs it is told.")
	line("- **A rollout of nodes** that is under way may be ended, or led to a newer patch. A new minor waits for its end.")
	line(``)
	line(`## Hops`)
	line(``)
	line("A hop is made with the CLI of a release and leads to:")
	line(``)
	line("- services: those of the CLI;")
	line("- image: the one that runs, or the newest of the CLI's minor that is offered and not faulty;")
	line("- Kubernetes: the one that runs, or the newest patch of its minor or of the next one that the release has, that is offered and not faulty;")
	line("- workers: replaced, or kept (`keepWorkers: true` in the configuration). Kept workers are replaced by a later hop. Their kubelets may be")
	line("  three minors behind, their image one minor behind the services.")
	line(``)
	line("At the end all nodes run the same. The path that is shown has the fewest hops; among those the fewest replacements of workers, then the")
	line("fewest changes, then the newest patches. If a version is named (`--to`, `--kubernetes`) it is met exactly. Pre-releases are gone to only if")
	line("they are named.")
	line(``)
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
		line("- %s (%s) with Kubernetes %s", k.Version, from, and(patches))
	}
	for _, e := range []struct {
		title string
		now   Running
		goal  Planned
	}{
		{"From the oldest to the newest", at("v1.0.0", "v1.0.0", "v1.34.3"), Planned{}},
		{"From the newest release to the newest Kubernetes", at("v1.1.0", "v1.1.0", "v1.35.4"), Planned{}},
		{"A patch that no release has", at("v1.0.0", "v1.0.0", "v1.35.99"), to("v1.1.0", "", "")},
		{"Kubernetes that no release has", at("v1.1.0", "v1.1.0", "v1.36.3"), to("", "", "v1.37.0")},
		{"Back", at("v1.1.0", "v1.1.0", "v1.36.3"), to("v1.0.0", "", "")},
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
