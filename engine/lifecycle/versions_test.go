package lifecycle

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// versionRE finds a version of Kubernetes or etcd in a text.
var versionRE = regexp.MustCompile(`\bv?(1\.[2-9]\d|3\.\d+)(\.\d+)?\b`)

// Checks have no version of Kubernetes or etcd in their code: it belongs into the data, with a
// source. Addresses of documents may have one.
func TestChecksHaveNoVersionsInTheirCode(t *testing.T) {
	for _, dir := range []string{"../kube/preflight", "../check", "../compat"} {
		names, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		files, set := 0, token.NewFileSet()
		for _, name := range names {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			files++
			ast.Inspect(f, func(n ast.Node) bool {
				if what := versionIn(n); what != "" {
					t.Errorf("%s: %s is a version: move it into engine/lifecycle/data", set.Position(n.Pos()), what)
				}
				return true
			})
		}
		if files == 0 {
			t.Errorf("%s has no files", dir)
		}
	}
}

// versionIn returns the version that a node of a syntax tree has: a text with one, or a comparison
// with the number of a minor.
func versionIn(n ast.Node) string {
	switch n := n.(type) {
	case *ast.BasicLit:
		if n.Kind == token.STRING && !strings.Contains(n.Value, "https://") {
			return versionRE.FindString(n.Value)
		}
	case *ast.BinaryExpr:
		call, ok := n.X.(*ast.CallExpr)
		number, isNumber := n.Y.(*ast.BasicLit)
		if !ok || !isNumber || number.Kind != token.INT || len(number.Value) < 2 {
			return ""
		}
		if method, ok := call.Fun.(*ast.SelectorExpr); ok && method.Sel.Name == "Minor" {
			return number.Value
		}
	}
	return ""
}

func TestVersionsInCodeAreFound(t *testing.T) {
	for code, want := range map[string]string{
		`f("v1.37")`:                  "v1.37",
		`f("needs etcd 3.6.11")`:      "3.6.11",
		`v.Minor() >= 35`:             "35",
		`v.Minor() - 1`:               "",
		`f("https://x/v1.37")`:        "",
		`f("v1.%d", n)`:               "",
		`f("policy/v1beta1", "v2.0")`: "",
	} {
		e, err := parser.ParseExpr(code)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		ast.Inspect(e, func(n ast.Node) bool { got += versionIn(n); return true })
		if got != want {
			t.Errorf("%s has the version %q, want %q", code, got, want)
		}
	}
}
