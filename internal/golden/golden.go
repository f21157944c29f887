// Package golden compares what tests produce with files in the repository, and rewrites these files
// with the flag -update.
//
// It defines the flag once for all packages, so that `go test ./... -update` works wherever the
// package is imported. `make golden` finds these packages, runs them with the flag and prints the diff.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite golden files")

// Updating reports whether golden files are to be rewritten. Tests whose golden file is not written as
// a whole use it instead of [Equal].
func Updating() bool { return *update }

// Equal fails the test if got differs from the content of the file. With -update it writes the file.
func Equal[S string | []byte](t testing.TB, path string, got S) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("read golden file: %v (-update writes it)", err)
	}
	if string(got) != string(want) {
		t.Errorf("%s differs (-update rewrites it, `make golden` prints what changed):\n-want +got:\n%s\n--- got\n%s", path, cmp.Diff(string(want), string(got)), got)
	}
}

// Section fails the test if the part of a file between two markers, each of which occurs once, differs from got. With -update it
// writes that part.
func Section(t testing.TB, path, begin, end, got string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, begins := strings.Cut(string(b), begin)
	_, tail, ends := strings.Cut(rest, end)
	if !begins || !ends {
		t.Fatalf("%s has no part from %q to %q", path, begin, end)
	}
	Equal(t, path, head+begin+got+end+tail)
}
