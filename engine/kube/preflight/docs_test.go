package preflight

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"constellation/internal/golden"
)

// The list of checks is made from the table of checks, so it has every one.
func TestDocsListEveryCheck(t *testing.T) {
	const page = "../../../docs/upgrade-check.md"
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
	want.WriteString("\n| id | area | what should be so | source |\n|---|---|---|---|\n")
	seen := map[string]bool{}
	for _, c := range checks() {
		if c.id == "" || c.title == "" || c.area == "" || c.ref == "" || seen[c.id] {
			t.Errorf("check %q has no title, area or reference, or its id is taken: %+v", c.id, c.title)
		}
		seen[c.id] = true
		fmt.Fprintf(&want, "| `%s` | %s | %s | %s |\n", c.id, c.area, c.title, c.ref)
	}
	want.WriteString("\n")
	if golden.Updating() {
		if err := os.WriteFile(page, []byte(head+"-update` -->\n"+want.String()+"<!-- end of checks -->"+tail), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if list != want.String() {
		t.Errorf("%s lists other checks than there are; `go test ./engine/kube/preflight -run TestDocs -update` writes\n%s", page, want.String())
	}
}
