package tui

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestRooms checks that imports between the rooms of the user interface go one way, and that
// each room depends on no more than it needs. No room imports the fake engine of the tests.
func TestRooms(t *testing.T) {
	values := []string{
		"constellation/engine", "constellation/engine/plain", "constellation/engine/plan", "constellation/engine/check", "constellation/engine/adopt",
		"constellation/engine/rollout", "constellation/engine/cluster", "constellation/engine/words", "constellation/engine/compat", "constellation/engine/workspace", "constellation/engine/cloud/providers", "constellation/engine/cloud/section", "constellation/engine/findings", "constellation/engine/provenance", "constellation/engine/mirror", "constellation/engine/version", "constellation/engine/preferences",
		"constellation/engine/enrol", "constellation/engine/machinecheck", "constellation/engine/sshhost", "constellation/engine/infra", "constellation/engine/conformance", "constellation/engine/support",
	}
	for _, tt := range []struct {
		dir   string
		ours  []string // packages of this module that it may import
		never []string // other modules that it must not import
	}{
		{dir: "term", ours: []string{"constellation/engine/plain", "constellation/tui/term/quiet"}, never: []string{"github.com/spf13/cobra"}},
		{dir: "view", ours: append([]string{"constellation/tui/term"}, values...), never: []string{"github.com/spf13/cobra", "github.com/charmbracelet/bubbletea", "github.com/charmbracelet/bubbles"}},
		{dir: "console", ours: append([]string{"constellation/tui/term", "constellation/tui/view"}, values...), never: []string{"github.com/spf13/cobra"}},
		{dir: ".", ours: append([]string{"constellation/tui/term", "constellation/tui/view", "constellation/tui/console", "constellation/engine/callhome"}, values...), never: []string{"github.com/charmbracelet/bubbletea", "github.com/charmbracelet/bubbles"}},
	} {
		t.Run(tt.dir, func(t *testing.T) {
			files, err := filepath.Glob(filepath.Join(tt.dir, "*.go"))
			if err != nil || len(files) == 0 {
				t.Fatalf("no files in %s: %v", tt.dir, err)
			}
			for _, name := range files {
				if strings.HasSuffix(name, "_test.go") {
					continue
				}
				f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
				if err != nil {
					t.Fatal(err)
				}
				for _, spec := range f.Imports {
					path, err := strconv.Unquote(spec.Path.Value)
					if err != nil {
						t.Fatal(err)
					}
					if strings.HasPrefix(path, "constellation/") && !slices.Contains(tt.ours, path) {
						t.Errorf("%s imports %s", name, path)
					}
					for _, n := range tt.never {
						if path == n || strings.HasPrefix(path, n+"/") {
							t.Errorf("%s imports %s", name, path)
						}
					}
				}
			}
		})
	}
}
