package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestWhereIsIt checks the table of CONTRIBUTING.md that leads from a question to a function:
// every declaration that it names is in the file that it names.
func TestWhereIsIt(t *testing.T) {
	page, err := os.ReadFile("CONTRIBUTING.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(page), "\n## Where is it?\n")
	if !ok {
		t.Fatal("CONTRIBUTING.md has no section \"Where is it?\"")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	place := regexp.MustCompile("`([A-Za-z_.]+)` in `([a-z0-9_/]+\\.go)`")
	declared := map[string]map[string]bool{}
	rows := 0
	for row := range strings.Lines(section) {
		if !strings.HasPrefix(row, "| ") || strings.HasPrefix(row, "| Where") {
			continue
		}
		rows++
		places := place.FindAllStringSubmatch(row, -1)
		if cells := strings.Split(row, "|"); len(cells) != 5 || !place.MatchString(cells[2]) {
			t.Errorf("the row does not start at a function in a file: %s", row)
		}
		// Every file is named together with what is in it.
		if n := strings.Count(row, ".go`"); n != len(places) {
			t.Errorf("%d of %d files are named with a function in: %s", len(places), n, row)
		}
		for _, p := range places {
			name, file := p[1], p[2]
			if declared[file] == nil {
				declared[file] = declarations(t, file)
			}
			if !declared[file][name] {
				t.Errorf("%s has no %s", file, name)
			}
		}
	}
	if rows < 6 {
		t.Errorf("the table has %d rows, want one for each of the six questions at least", rows)
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfterN(string(readme), "\n", 25)
	if !strings.Contains(strings.Join(lines[:len(lines)-1], ""), "(CONTRIBUTING.md#where-is-it)") {
		t.Error("the first 24 lines of README.md do not link to the table")
	}
}

// TestFailuresAreTested checks that each test that docs/testing.md names is in the file that it names.
func TestFailuresAreTested(t *testing.T) {
	page, err := os.ReadFile("docs/testing.md")
	if err != nil {
		t.Fatal(err)
	}
	declared := map[string]map[string]bool{}
	places := regexp.MustCompile("`(Test[A-Za-z0-9]+)` in `([a-z0-9_/]+_test\\.go)`").FindAllStringSubmatch(string(page), -1)
	for _, p := range places {
		name, file := p[1], p[2]
		if declared[file] == nil {
			declared[file] = declarations(t, file)
		}
		if !declared[file][name] {
			t.Errorf("%s has no %s", file, name)
		}
	}
	if n := strings.Count(string(page), "`Test"); n != len(places) || n < 40 {
		t.Errorf("%d tests are named, %d of them with their file, want at least 40", n, len(places))
	}
}

// declarations returns the names that a file declares at the top level; methods with their
// type, such as Engine.Run.
func declarations(t *testing.T, file string) map[string]bool {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Error(err)
		return map[string]bool{}
	}
	names := map[string]bool{}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			name := d.Name.Name
			if d.Recv != nil {
				of := d.Recv.List[0].Type
				if p, ok := of.(*ast.StarExpr); ok {
					of = p.X
				}
				if id, ok := of.(*ast.Ident); ok {
					name = id.Name + "." + name
				}
			}
			names[name] = true
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					names[s.Name.Name] = true
				case *ast.ValueSpec:
					for _, n := range s.Names {
						names[n.Name] = true
					}
				}
			}
		}
	}
	return names
}
