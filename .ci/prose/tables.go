package main

import (
	"fmt"
	"go/ast"
	"go/token"
	"strings"
)

// checkTables returns the rows of test tables that give more than maxColumns fields by position.
// A reader of a failed row would have to count commas. It reads the types that tests declare: rows
// of other types are data of the program. The files are those of one directory.
func checkTables(files []*source) []hit {
	declared := map[string]ast.Expr{} // types of a package's tests, by package and name
	for _, s := range files {
		if !strings.HasSuffix(s.path, "_test.go") {
			continue
		}
		for _, d := range s.file.Decls {
			if g, ok := d.(*ast.GenDecl); ok && g.Tok == token.TYPE {
				for _, t := range g.Specs {
					t := t.(*ast.TypeSpec)
					declared[s.file.Name.Name+"."+t.Name.Name] = t.Type
				}
			}
		}
	}
	var hits []hit
	for _, s := range files {
		if strings.HasSuffix(s.path, "_test.go") {
			t := tables{source: s, declared: declared}
			t.read()
			hits = append(hits, t.hits...)
		}
	}
	return hits
}

// tables finds the rows of tables in a file of tests.
type tables struct {
	*source
	declared map[string]ast.Expr
	local    []localType
	hits     []hit
}

// A localType is declared in a function.
type localType struct {
	name  string
	is    ast.Expr
	scope ast.Node
}

// read adds the hits of the file. Only an element of a list or map can leave out its type, so a
// literal without a type is a row.
func (t *tables) read() {
	var blocks []ast.Node
	var open []ast.Node
	ast.Inspect(t.file, func(n ast.Node) bool {
		switch n := n.(type) {
		case nil:
			if last := open[len(open)-1]; len(blocks) > 0 && blocks[len(blocks)-1] == last {
				blocks = blocks[:len(blocks)-1]
			}
			open = open[:len(open)-1]
			return true
		case *ast.BlockStmt:
			blocks = append(blocks, n)
		case *ast.TypeSpec:
			if len(blocks) > 0 {
				t.local = append(t.local, localType{n.Name.Name, n.Type, blocks[len(blocks)-1]})
			}
		case *ast.CompositeLit:
			if n.Type != nil {
				t.elements(n, n.Type)
			}
		}
		open = append(open, n)
		return true
	})
}

// elements adds the hits among the elements of l, a list or map of type of.
func (t *tables) elements(l *ast.CompositeLit, of ast.Expr) {
	var key, value ast.Expr
	switch of := t.resolve(of, l.Pos()).(type) {
	case *ast.ArrayType:
		value = of.Elt
	case *ast.MapType:
		key, value = of.Key, of.Value
	default:
		return
	}
	for _, e := range l.Elts {
		if kv, ok := e.(*ast.KeyValueExpr); ok {
			t.element(kv.Key, key)
			e = kv.Value
		}
		t.element(e, value)
	}
}

// element adds the hits of e, an element of type of.
func (t *tables) element(e, of ast.Expr) {
	l, ok := e.(*ast.CompositeLit)
	if !ok || l.Type != nil || len(l.Elts) == 0 {
		return
	}
	of = t.resolve(of, l.Pos())
	if p, ok := of.(*ast.StarExpr); ok {
		of = t.resolve(p.X, l.Pos())
	}
	if _, ok := of.(*ast.StructType); !ok {
		t.elements(l, of)
		return
	}
	if _, keyed := l.Elts[0].(*ast.KeyValueExpr); !keyed && len(l.Elts) > maxColumns {
		t.hits = append(t.hits, hit{t.path, t.set.Position(l.Pos()).Line, "positional row", fmt.Sprintf("row of %d fields without names", len(l.Elts)), `write the names: {name: "a node", in: ..., want: ...}`})
	}
}

// resolve returns the type behind a name that the tests declare, else of itself.
func (t *tables) resolve(of ast.Expr, at token.Pos) ast.Expr {
	for {
		id, ok := of.(*ast.Ident)
		if !ok {
			return of
		}
		is := t.declared[t.file.Name.Name+"."+id.Name]
		for _, l := range t.local { // in order, so an inner scope comes last
			if l.name == id.Name && l.scope.Pos() <= at && at < l.scope.End() {
				is = l.is
			}
		}
		if is == nil || is == of {
			return of
		}
		of = is
	}
}
