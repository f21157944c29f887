package preflight

import (
	"fmt"
	"strings"
	"testing"

	"constellation/internal/golden"
)

// The list of checks is made from the table of checks, so it has every one.
func TestDocsListEveryCheck(t *testing.T) {
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
	golden.Section(t, "../../../docs/upgrade-check.md", "-update` -->\n", "<!-- end of checks -->", want.String()+"\n")
}
