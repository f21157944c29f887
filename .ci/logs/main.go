// Command logs writes docs/logs.md, the list of every message that the programs log, from the calls to log/slog in their source.
//
//	go run -C .ci ./logs -dir .. -o ../docs/logs.md
//
// A message is a constant: a string literal, a named constant, or string(m) where m has a
// type of that package named logMessage, whose constants are then all listed. Any other
// message is an error, because a variable message cannot be searched for.
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/constant"
	"go/types"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

// messageType is the name of the string type whose constants may be logged by a variable.
const messageType = "logMessage"

// programs are the parts of the list, each with the packages whose messages it holds.
var programs = []struct{ title, intro, prefix string }{
	{"Operator", "Pods `constellation-operator`, `constellation-plans` and `constellation-relay`.", "constellation/operator"},
	{"Join service", "Pods `join-service`.", "constellation/joinservice"},
	{"Agent", "Unit `constellation-agent` on each machine.", "constellation/agent"},
	{"Bootstrapper", "Unit `constellation-bootstrapper` on each machine.", "constellation/bootstrapper"},
	{"Certifier", "Process `bootstrapper certifier` on a control plane.", "constellation/engine/attestation/certifier/signer"},
	{"Key service", "Process `bootstrapper kms` on a control plane.", "constellation/engine/kms/plugin"},
	{"Sandbox", "The daemons and simulated machines of `constellation sandbox`.", "constellation/engine/sandbox"},
	{"Console", "With `--debug`: stderr, or `constellation-debug.log` in the workspace while the console is open. Also packages that several programs share.", "constellation"},
}

// levels are the methods of slog.Logger that log, with the index of the message among the arguments.
var levels = map[string]struct {
	level   string
	message int
}{
	"Debug": {"debug", 0}, "Info": {"info", 0}, "Warn": {"warn", 0}, "Error": {"error", 0},
	"DebugContext": {"debug", 1}, "InfoContext": {"info", 1}, "WarnContext": {"warn", 1}, "ErrorContext": {"error", 1},
	"Log": {"varies", 2}, "LogAttrs": {"varies", 2},
}

// message is one row of the list.
type message struct {
	program     int
	text, level string
	keys        []string
	pkg         string
}

func main() {
	dir := flag.String("dir", ".", "root of the module")
	out := flag.String("o", "", "file to write (default: standard output)")
	flag.Parse()
	if err := run(*dir, *out); err != nil {
		fmt.Fprintln(os.Stderr, "logs:", err)
		os.Exit(1)
	}
}

func run(dir, out string) error {
	cfg := &packages.Config{
		Dir:  dir,
		Mode: packages.NeedName | packages.NeedFiles | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo | packages.NeedImports | packages.NeedExportFile,
		Env:  append(os.Environ(), "GOWORK=off", "GOOS=linux", "GOARCH=amd64"),
	}
	pkgs, err := packages.Load(cfg, "./...")
	if err != nil {
		return fmt.Errorf("load packages of %s: %w", dir, err)
	}
	var (
		all  []message
		errs []error
	)
	for _, p := range pkgs {
		for _, e := range p.Errors {
			errs = append(errs, e)
		}
		m, err := messages(p)
		all = append(all, m...)
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	text := render(merge(all))
	if out == "" {
		_, err = os.Stdout.WriteString(text)
		return err
	}
	return os.WriteFile(filepath.Clean(out), []byte(text), 0o644)
}

// messages returns what a package logs.
func messages(p *packages.Package) ([]message, error) {
	var (
		found []message
		errs  []error
	)
	for _, f := range p.Syntax {
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			how, ok := logs(p.TypesInfo, call)
			if !ok || len(call.Args) <= how.message {
				return true
			}
			keys := keysOf(p.TypesInfo, call.Args[how.message+1:])
			texts := constants(p, call.Args[how.message])
			if len(texts) == 0 {
				errs = append(errs, fmt.Errorf("%s: the message is no constant; write a literal, or string(m) of a constant m of type %s", p.Fset.Position(call.Pos()), messageType))
			}
			for _, text := range texts {
				found = append(found, message{programOf(p.PkgPath), text, how.level, keys, strings.TrimPrefix(p.PkgPath, "constellation/")})
			}
			return true
		})
	}
	return found, errors.Join(errs...)
}

// logs reports whether a call is one of a method of slog.Logger that logs.
func logs(info *types.Info, call *ast.CallExpr) (how struct {
	level   string
	message int
}, ok bool) {
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return how, false
	}
	f, ok := info.Uses[sel.Sel].(*types.Func)
	if !ok || f.Pkg() == nil || f.Pkg().Path() != "log/slog" {
		return how, false
	}
	how, ok = levels[f.Name()]
	return how, ok
}

// constants returns the messages that an expression can be: its constant value, or the
// constants of its package's messageType if it converts one of them.
func constants(p *packages.Package, e ast.Expr) []string {
	if tv := p.TypesInfo.Types[e]; tv.Value != nil && tv.Value.Kind() == constant.String {
		return []string{constant.StringVal(tv.Value)}
	}
	conv, ok := e.(*ast.CallExpr)
	if !ok || len(conv.Args) != 1 {
		return nil
	}
	named, ok := p.TypesInfo.TypeOf(conv.Args[0]).(*types.Named)
	if !ok || named.Obj().Name() != messageType || named.Obj().Pkg() != p.Types {
		return nil
	}
	var texts []string
	for _, tv := range p.TypesInfo.Types {
		if tv.Type == types.Type(named) && tv.Value != nil && constant.StringVal(tv.Value) != "" {
			texts = append(texts, constant.StringVal(tv.Value))
		}
	}
	slices.Sort(texts)
	return slices.Compact(texts)
}

// keysOf returns the constant keys among the arguments after the message: every second
// one of any values, and those of slog.Attr's constructors.
func keysOf(info *types.Info, args []ast.Expr) []string {
	text := func(e ast.Expr) (string, bool) {
		tv := info.Types[e]
		if tv.Value == nil || tv.Value.Kind() != constant.String {
			return "", false
		}
		return constant.StringVal(tv.Value), true
	}
	var keys []string
	for i := 0; i < len(args); i++ {
		if k, ok := text(args[i]); ok {
			keys = append(keys, k)
			i++ // its value
			continue
		}
		if c, ok := args[i].(*ast.CallExpr); ok && len(c.Args) > 0 {
			if k, ok := text(c.Args[0]); ok {
				keys = append(keys, k)
			}
		}
	}
	return keys
}

func programOf(pkg string) int {
	return slices.IndexFunc(programs, func(p struct{ title, intro, prefix string }) bool {
		return pkg == p.prefix || strings.HasPrefix(pkg, p.prefix+"/")
	})
}

// merge sorts messages and makes one row of those that are the same.
func merge(all []message) []message {
	slices.SortStableFunc(all, func(a, b message) int {
		return cmp.Or(cmp.Compare(a.program, b.program), strings.Compare(a.text, b.text), strings.Compare(a.level, b.level), strings.Compare(a.pkg, b.pkg))
	})
	var rows []message
	for _, m := range all {
		if n := len(rows); n > 0 && rows[n-1].program == m.program && rows[n-1].text == m.text && rows[n-1].level == m.level && rows[n-1].pkg == m.pkg {
			rows[n-1].keys = append(rows[n-1].keys, m.keys...)
			continue
		}
		rows = append(rows, m)
	}
	for i := range rows {
		rows[i].keys = unique(rows[i].keys)
	}
	return rows
}

// unique returns the keys without repetition, in the order of their first mention.
func unique(keys []string) []string {
	var u []string
	for _, k := range keys {
		if !slices.Contains(u, k) {
			u = append(u, k)
		}
	}
	return u
}

func render(rows []message) string {
	var b strings.Builder
	b.WriteString(`# Log messages

<!-- Generated by .ci/logs from the source; "make generate" rewrites it. -->

Every message that our programs log. A message is constant, so you can search for it. Everything variable is a key.
All programs log JSON or text lines of Go's log/slog. Keys that a logger carries along, such as the node or the request, are not listed.
`)
	for i, p := range programs {
		var mine []message
		for _, m := range rows {
			if m.program == i {
				mine = append(mine, m)
			}
		}
		if len(mine) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n| message | level | keys | package |\n|---|---|---|---|\n", p.title, p.intro)
		for _, m := range mine {
			keys := ""
			if len(m.keys) > 0 {
				keys = "`" + strings.Join(m.keys, "` `") + "`"
			}
			fmt.Fprintf(&b, "| %s | %s | %s | `%s` |\n", strings.ReplaceAll(m.text, "|", `\|`), m.level, keys, m.pkg)
		}
	}
	return b.String()
}
