package decision

import (
	"go/ast"
	"go/parser"
	gotoken "go/token"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestDecisionsArePure fails if the package imports more than plain values, or reads a clock.
func TestDecisionsArePure(t *testing.T) {
	allowed := []string{
		"cmp", "crypto/sha256", "encoding/hex", "fmt", "slices", "strconv", "strings", "sync", "time",
		"k8s.io/apimachinery/pkg/apis/meta/v1", "k8s.io/apimachinery/pkg/util/intstr",
		"constellation/engine/cloud", "constellation/engine/revocation", "constellation/engine/version", "constellation/operator/api/v1alpha1",
	}
	clock := []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick"}
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("find source: %d files, %v", len(files), err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		fset := gotoken.NewFileSet()
		f, err := parser.ParseFile(fset, file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range f.Imports {
			if path, err := strconv.Unquote(i.Path.Value); err != nil || !slices.Contains(allowed, path) {
				t.Errorf("%s imports %s", file, i.Path.Value)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok {
				x, ok := sel.X.(*ast.Ident)
				if ok && x.Name == "time" && slices.Contains(clock, sel.Sel.Name) {
					t.Errorf("%s: time.%s reads a clock, and the time is World.Now", fset.Position(sel.Pos()), sel.Sel.Name)
				}
			}
			return true
		})
	}
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").CombinedOutput()
	if err != nil {
		t.Fatalf("list imports: %v\n%s", err, out)
	}
	for path := range strings.FieldsSeq(string(out)) {
		for _, banned := range []string{"k8s.io/client-go", "sigs.k8s.io/controller-runtime", "google.golang.org/grpc", "constellation/operator/decision/"} {
			if strings.HasPrefix(path, banned) {
				t.Errorf("the import graph holds %s", path)
			}
		}
		if path == "constellation/operator" || path == "constellation/engine" {
			t.Errorf("the import graph holds %s", path)
		}
	}
}
