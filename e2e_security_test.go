package main

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"testing"
	"time"

	"constellation/engine/check"
	"constellation/engine/plan"
)

// failedByDesign returns the checks that docs/security.md lists as failed in clusters that init makes.
func failedByDesign(t *testing.T) (ids []string) {
	t.Helper()
	b, err := os.ReadFile("docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	table := regexp.MustCompile(`(?s)<!-- failed checks -->\n(.*)<!-- end of failed checks -->`).FindSubmatch(b)
	if table == nil {
		t.Fatal("docs/security.md has no table of failed checks")
	}
	for _, row := range regexp.MustCompile("(?m)^\\| ((?:`[a-z0-9.-]+`(?:, )?)+) \\|").FindAllSubmatch(table[1], -1) {
		for _, id := range regexp.MustCompile("`([a-z0-9.-]+)`").FindAllSubmatch(row[1], -1) {
			ids = append(ids, string(id[1]))
		}
	}
	slices.Sort(ids)
	return ids
}

// failsAsListed compares a cluster that init made with the guides. The checks that fail must be those that
// docs/security.md has with a reason.
func (c *cloud) failsAsListed() {
	c.t.Helper()
	r := c.run(time.Minute, "check", "--security", "-o", "json").want(plan.ExitDone)
	var k check.Security
	if err := json.Unmarshal([]byte(r.stdout), &k); err != nil {
		c.t.Fatal(err)
	}
	var failed []string
	for _, x := range k.Results {
		if x.Status == check.SecurityFailed {
			failed = append(failed, x.ID)
		}
	}
	slices.Sort(failed)
	if want := failedByDesign(c.t); !slices.Equal(failed, want) {
		c.t.Errorf("failed checks of a new cluster, want those of docs/security.md:\n%s\n%s", failed, want)
	}
	if !k.Simulated || k.MissingRules != "" || k.Counts[check.SecurityPassed] < 50 {
		c.t.Errorf("simulated %t, missing rules %q, counts %v", k.Simulated, k.MissingRules, k.Counts)
	}
	c.run(time.Minute, "check", "--security", "--fail-on", "blocking").want(plan.ExitBlocked)
}
