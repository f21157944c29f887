package benchmark

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"constellation/engine/check"
	"constellation/internal/golden"
)

// The list of checks is made from the table of checks, so it has every one.
func TestDocsListEveryCheck(t *testing.T) {
	const page = "../../../docs/security-checks.md"
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, begins := strings.Cut(string(b), "-update` -->\n")
	list, tail, ends := strings.Cut(rest, "<!-- end of checks -->")
	if !begins || !ends {
		t.Fatalf("%s has no place for the list of checks", page)
	}
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
	want.WriteString("\n")
	if golden.Updating() {
		if err := os.WriteFile(page, []byte(head+"-update` -->\n"+want.String()+"<!-- end of checks -->"+tail), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if list != want.String() {
		t.Errorf("%s lists other checks than there are; `go test ./engine/kube/benchmark -run TestDocs -update` writes\n%s", page, want.String())
	}
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
