package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestBenchmarksOfTheScriptExist checks that each benchmark of .ci/bench.sh is in the package that
// the script names. The script finds out only when `make bench` reaches the section.
func TestBenchmarksOfTheScriptExist(t *testing.T) {
	script, err := os.ReadFile(".ci/bench.sh")
	if err != nil {
		t.Fatal(err)
	}
	calls := regexp.MustCompile(`(?m)\bgo_bench [a-z]+ (\S+) (\S+) \S+ \d`).FindAllStringSubmatch(string(script), -1)
	if len(calls) < 20 {
		t.Fatalf("found %d calls of go_bench, want 20 or more", len(calls))
	}
	declared := map[string][]string{}
	for _, c := range calls {
		dir := c[1]
		if _, ok := declared[dir]; !ok {
			declared[dir] = benchmarksIn(t, dir)
		}
		pattern, _, _ := strings.Cut(strings.Trim(c[2], `'"`), "/")
		name, err := regexp.Compile(pattern)
		if err != nil {
			t.Errorf("%s: %v", c[0], err)
			continue
		}
		found := false
		for _, b := range declared[dir] {
			found = found || name.MatchString(b)
		}
		if !found {
			t.Errorf("%s: package %s declares no such benchmark, only %q", c[0], dir, declared[dir])
		}
	}
}

// benchmarksIn returns the names of a package's benchmarks.
func benchmarksIn(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Benchmark") {
				names = append(names, fn.Name.Name)
			}
		}
	}
	return names
}
