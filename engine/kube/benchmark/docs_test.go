package benchmark

import (
	"fmt"
	"strings"
	"testing"

	"constellation/engine/check"
	"constellation/internal/golden"
)

// The list of checks is made from the table of checks, so it has every one.
func TestDocsListEveryCheck(t *testing.T) {
	var want strings.Builder
	want.WriteString("\n| id | what should be so | looks at | level | decided by | also in |\n|---|---|---|---|---|---|\n")
	seen := map[string]bool{}
	for _, c := range Checks() {
		if c.Title == "" || c.LooksAt == "" || c.Remedy == "" || len(c.Sources) == 0 || seen[c.ID] {
			t.Errorf("check %q has no title, remedy or source, or its ID is taken", c.ID)
		}
		seen[c.ID] = true
		fmt.Fprintf(&want, "| `%s` | %s | %s | %s | %s | %s |\n", c.ID, c.Title, strings.ReplaceAll(c.LooksAt, "*", `\*`), levelOf(c), decider(c), alsoIn(c))
	}
	golden.Section(t, "../../../docs/security-checks.md", "-update` -->\n", "<!-- end of checks -->", want.String()+"\n")
}

func levelOf(c check.SecurityCheck) string {
	if c.Level == 0 {
		return ""
	}
	return fmt.Sprint(c.Level)
}

func decider(c check.SecurityCheck) string {
	switch {
	case c.Automated:
		return "program"
	case strings.HasPrefix(c.LooksAt, "mode and owner of "):
		return "you, on the machine"
	}
	return "you"
}

func alsoIn(c check.SecurityCheck) string {
	if len(c.Sources) < 2 {
		return ""
	}
	return c.Sources[1]
}
