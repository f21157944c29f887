package engine_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// mayNameSandbox are the files and directories of production code that may name the sandbox, each
// with its reason. A directory ends with a slash.
var mayNameSandbox = map[string]string{
	"engine/sandbox/":                   "the cloud itself",
	"engine/cloud/sandboxapi/":          "its client",
	"engine/cloud/providers/sandbox.go": "its entry in the registry",
	"engine/cloud/providers/gcp.go":     "a sandbox emulates this cloud",
	"engine/cloud/gcp/gcptest/":         "the emulator, which a sandbox contains",
	"engine/cloud/gcp/attest/":          "has the rules by which a program at the vendor refuses a sandbox's evidence",
	"engine/cloud/cloudtest/wire/":      "parts of the emulator, which a sandbox contains",

	"main.go":                          "wires the verb sandbox to its program",
	"engine/sandbox.go":                "contract of the verb sandbox, which another program implements",
	"engine/workspace/sandbox.go":      "files that the verb sandbox writes",
	"engine/workspace/configfill.go":   "values that the verb sandbox fills in",
	"engine/workspace/config.go":       "option of config generate: a running sandbox supplies the values",
	"engine/drill.go":                  "contract of sandbox drill",
	"engine/conformance/":              "runs its suite in a sandbox that emulates a cloud, too",
	"tui/invocation.go":                "the verb sandbox in the help",
	"tui/commands.go":                  "examples of the help",
	"tui/conformance.go":               "examples of the help, and a sandbox that emulates a cloud",
	"tui/config.go":                    "examples of the help, and the sandbox of a workspace",
	"tui/session.go":                   "executes the verb sandbox, and finds the sandbox of a workspace",
	"tui/console.go":                   "has the sandbox of a workspace",
	"tui/console/":                     "has the sandbox of a workspace",
	"tui/tui.go":                       "dependencies of the verb sandbox",
	"tui/view/explain.go":              "an example in a comment",
	"tui/view/timeline.go":             "streams of the verb sandbox have no plan",
	"internal/testneeds/":              "names the command that builds what a test needs",
	"tui/internal/enginefake/":         "fixtures of tests",
	"internal/swtpm/":                  "an emulator for tests",
	"engine/kube/kubetest/":            "values of the contract test",
	"engine/cloud/cloudtest/oddcloud/": "a cloud of tests, made of hollow machines",
	"engine/provenance/verify.go":      "name of the second program",
	"engine/provenance/others.go":      "name of the second program",
	"engine/lifecycle/next/":           "names the command that fetches a version of Kubernetes",

	"engine/cloud/cloud.go":                 "names the first subpackage",
	"engine/cloud/section/section.go":       "an example in a comment",
	"engine/cloud/providers/providers.go":   "calls its entry; an example in a comment",
	"operator/api/v1alpha1/scalinggroup.go": "an example of an ID in the API's description",
	"assets/crds/":                          "generated from it",
	"assets/samples/":                       "examples",
	"engine/attestation/internal/evidence/": "comments of the certificate's format",
}

var (
	sandboxRE = regexp.MustCompile(`(?i)sandbox`)
	// runtimeRE is what the container runtime calls a sandbox.
	runtimeRE = regexp.MustCompile(`(?i)pod_?sandbox|sandbox_image|sandboxImage|pause image|SandboxSize|iframe|sandbox=""`)
)

// traceRE is what only the sandbox's machines and its cloud have: addresses, paths and units.
var traceRE = regexp.MustCompile(`169\.254\.169\.254|10\.42\.0\.1\b|tpm\.sock|constellation-tpm|swtpm|machine-setup`)

// segmentRE takes the last segment of a path, as the sandbox has names at the end of IDs. IDs of other
// clouds can be opaque.
var segmentRE = regexp.MustCompile(`(LastIndex(Byte)?|path\.Base)\((\w+\.)*(id|ID|\w*[gG]roup(ID)?|\w*[pP]roviderID)\b`)

// TestNoSandboxInTheWalls keeps assumptions about the sandbox out of code that serves every
// cloud. The entry in the registry has the data of a provider.
func TestNoSandboxInTheWalls(t *testing.T) {
	used := map[string]bool{}
	allowed := func(path string) bool {
		for name := range mayNameSandbox {
			if path == name || strings.HasSuffix(name, "/") && strings.HasPrefix(path, name) {
				used[name] = true
				return true
			}
		}
		return false
	}
	root := os.DirFS("..")
	for _, top := range []string{"main.go", "agent", "assets", "bootstrapper", "engine", "internal", "joinservice", "operator", "tui"} {
		err := fs.WalkDir(root, top, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if d.IsDir() {
				if d.Name() == "testdata" {
					return fs.SkipDir
				}
				return nil
			}
			switch filepath.Ext(path) {
			case ".go", ".yaml", ".json", ".tpl", ".service", ".conf", "":
			default:
				return nil
			}
			if strings.HasSuffix(path, "_test.go") {
				return nil
			}
			b, err := fs.ReadFile(root, path)
			if err != nil {
				return err
			}
			// Most files have none of these, and expressions on each of their lines would take seconds.
			lower := bytes.ToLower(b)
			if !slices.ContainsFunc([]string{"sandbox", "lastindex", "path.base"}, func(s string) bool { return bytes.Contains(lower, []byte(s)) }) && !traceRE.Match(b) {
				return nil
			}
			for i, line := range strings.Split(string(b), "\n") {
				if sandboxRE.MatchString(runtimeRE.ReplaceAllString(line, "")) && !allowed(path) {
					t.Errorf("%s:%d names the sandbox: put it into the provider's entry, or into mayNameSandbox with a reason\n%s", path, i+1, line)
				}
				if segmentRE.MatchString(line) && !allowed(path) {
					t.Errorf("%s:%d takes the last segment of an ID: take the name from where the cloud or the cluster has it\n%s", path, i+1, line)
				}
				if traceRE.MatchString(line) && !allowed(path) {
					t.Errorf("%s:%d has an address, a path or a unit of the sandbox: put it into the provider's entry\n%s", path, i+1, line)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name := range mayNameSandbox {
		if _, err := fs.Stat(root, strings.TrimSuffix(name, "/")); err == nil && !used[name] {
			t.Errorf("%s names no sandbox: remove it from mayNameSandbox", name)
		}
	}
}

// mayImportSandbox are the directories of production code that may import the sandbox or its
// client.
var mayImportSandbox = map[string]string{
	"engine/sandbox":                  "the cloud itself",
	"engine/cloud/providers":          "the registry",
	"engine/cloud/cloudtest/oddcloud": "a cloud of tests, made of hollow machines",
	"":                                "main executes the program of the verb sandbox",
}

func TestSandboxIsImportedByTheRegistryAlone(t *testing.T) {
	root := os.DirFS("..")
	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "testdata" || path != "." && strings.HasPrefix(d.Name(), ".")) {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		dir := strings.TrimPrefix(filepath.Dir(path), ".")
		if _, ok := mayImportSandbox[dir]; ok || strings.HasPrefix(dir, "engine/sandbox/") || strings.HasPrefix(dir, "engine/cloud/sandboxapi") {
			return nil
		}
		b, err := fs.ReadFile(root, path)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, b, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, i := range f.Imports {
			if p := strings.Trim(i.Path.Value, `"`); strings.HasPrefix(p, "constellation/engine/sandbox") || strings.HasPrefix(p, "constellation/engine/cloud/sandboxapi") {
				t.Errorf("%s imports %s", path, p)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// mayUseLocal are the directories and files of production code that may use what the registry exports
// about the sandbox alone.
var mayUseLocal = map[string]string{
	"engine/sandbox/":             "the cloud itself",
	"engine/workspace/sandbox.go": "files that the verb sandbox writes",
}

// TestNoCloudIsADefault keeps the name and the values of the sandbox out of code that was not told to use
// it, such as defaults of flags.
func TestNoCloudIsADefault(t *testing.T) {
	root := os.DirFS("..")
	parse := func(path string) *ast.File {
		t.Helper()
		b, err := fs.ReadFile(root, path)
		if err != nil {
			t.Fatal(err)
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, b, 0)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	// Exported names of sandbox.go, and of functions that call its function.
	local := map[string]bool{}
	for _, d := range parse("engine/cloud/providers/sandbox.go").Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			local[d.Name.Name] = d.Name.IsExported()
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				if v, ok := spec.(*ast.ValueSpec); ok {
					for _, name := range v.Names {
						local[name.Name] = name.IsExported()
					}
				}
			}
		}
	}
	for _, d := range parse("engine/cloud/providers/providers.go").Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		ast.Inspect(f.Body, func(n ast.Node) bool {
			if c, ok := n.(*ast.CallExpr); ok {
				if callee, ok := c.Fun.(*ast.Ident); ok && callee.Name == "sandbox" {
					local[f.Name.Name] = true
				}
			}
			return true
		})
	}
	if !local["Local"] || !local["LocalValues"] {
		t.Fatalf("the registry exports %v about the sandbox", local)
	}
	used := map[string]bool{}
	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "testdata" || path != "." && strings.HasPrefix(d.Name(), ".")) {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		b, err := fs.ReadFile(root, path)
		if err != nil || !bytes.Contains(b, []byte(`"constellation/engine/cloud/providers"`)) {
			return err
		}
		ast.Inspect(parse(path), func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			if !ok || !local[s.Sel.Name] {
				return true
			}
			if x, ok := s.X.(*ast.Ident); !ok || x.Name != "providers" {
				return true
			}
			for name := range mayUseLocal {
				if path == name || strings.HasSuffix(name, "/") && strings.HasPrefix(path, name) {
					used[name] = true
					return true
				}
			}
			t.Errorf("%s uses providers.%s: take the provider from the configuration, the state or a flag", path, s.Sel.Name)
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range mayUseLocal {
		if !used[name] {
			t.Errorf("%s uses nothing of the sandbox: remove it from mayUseLocal", name)
		}
	}
}
