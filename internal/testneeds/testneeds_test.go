package testneeds

import (
	"bytes"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"
)

// A test that runs the go command on other packages of the repository is repeated when they change.
func TestCallersOfGoDependOnTheTree(t *testing.T) {
	goCommand := regexp.MustCompile(`exec\.Command(Context)?\(.*"go", "(list|build|run|vet)"`)
	own := regexp.MustCompile(`"go", "list", "-deps", "\."`) // the test itself is built from these packages
	found := 0
	root := os.DirFS("../..")
	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && path != "." && (strings.HasPrefix(name, ".") || name == "bin" || name == "testdata") {
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, "bench_test.go") { // results of benchmarks are not cached
			return nil
		}
		b, err := fs.ReadFile(root, path)
		if err != nil {
			return err
		}
		calls := 0
		for line := range bytes.Lines(b) {
			if goCommand.Match(line) && !own.Match(line) {
				calls++
			}
		}
		found += calls
		if n := bytes.Count(b, []byte("testneeds.Tree()")); n < calls {
			t.Errorf("%s runs the go command %d times and calls testneeds.Tree %d times: its cached result can be of another tree", path, calls, n)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found == 0 {
		t.Error("no test runs the go command: the search is wrong")
	}
}
