package main

import (
	"cmp"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// A hit is one place that breaks a rule.
type hit struct {
	path    string
	line    int
	rule    string
	text    string // that broke it
	instead string // remedy
}

func (h hit) String() string {
	return fmt.Sprintf("%s:%d: %s: %s", h.path, h.line, h.text, h.instead)
}

// check returns the hits in files, ordered by path and line.
func check(fsys fs.FS, files []string) ([]hit, error) {
	found := make([]checked, len(files))
	var work sync.WaitGroup
	next := make(chan int)
	for range runtime.GOMAXPROCS(0) {
		work.Go(func() {
			for i := range next {
				found[i] = checkFile(fsys, files[i])
			}
		})
	}
	for i := range files {
		next <- i
	}
	close(next)
	work.Wait()
	var hits []hit
	packages := map[string][]*source{}
	for i, c := range found {
		if c.err != nil {
			return nil, c.err
		}
		hits = append(hits, c.hits...)
		if c.source != nil {
			dir := path.Dir(files[i])
			packages[dir] = append(packages[dir], c.source)
		}
	}
	for _, p := range packages {
		hits = append(hits, checkShort(p)...)
		hits = append(hits, checkTables(p)...)
	}
	slices.SortStableFunc(hits, func(a, b hit) int {
		return cmp.Or(cmp.Compare(a.path, b.path), a.line-b.line)
	})
	return hits, nil
}

// checked is what the check of a file found.
type checked struct {
	hits   []hit
	source *source // of a Go file that is no generated one
	err    error
}

func checkFile(fsys fs.FS, f string) (c checked) {
	if slices.Contains(strings.Split(f, "/"), "testdata") {
		return c // recorded output
	}
	b, err := fs.ReadFile(fsys, f)
	if errors.Is(err, fs.ErrNotExist) {
		return c // deleted, and still in git's index
	}
	if err != nil {
		return checked{err: err}
	}
	if strings.HasSuffix(f, ".md") {
		return checked{hits: checkMarkdown(f, string(b))}
	}
	s, err := parse(f, b)
	if err != nil || s.generated {
		return checked{err: err}
	}
	return checked{hits: s.check(), source: s}
}

// text is prose in which a line break stands for the end of a paragraph, and everything that is
// no prose is masked.
type text struct {
	strings.Builder
	starts []int // offsets at which a line of the file starts
	lines  []int // numbers of these lines
}

// add appends s, which stands on a line of the file.
func (t *text) add(line int, s string) {
	t.starts = append(t.starts, t.Len())
	t.lines = append(t.lines, line)
	t.WriteString(s)
}

// line returns the line of the file on which an offset is.
func (t *text) line(offset int) int {
	i, found := slices.BinarySearch(t.starts, offset)
	if !found {
		i--
	}
	return t.lines[max(i, 0)]
}

// scan returns the hits in t. Exported holds the exported identifiers of the file, which are
// names and no prose.
func (t *text) scan(file string, openings bool, exported map[string]bool) []hit {
	s := t.String()
	var hits []hit
	for i, r := range rules {
		if r.opening {
			continue
		}
		for _, m := range compiled[i].FindAllStringIndex(s, -1) {
			found := s[m[0]:m[1]]
			first, _, _ := strings.Cut(found, " ")
			if isCode(s, m[0], m[1]) || exported[first] && first == found {
				continue
			}
			hits = append(hits, hit{file, t.line(m[0]), r.name, strings.TrimSpace(found), r.instead})
		}
	}
	if !openings {
		return hits
	}
	for _, x := range sentences(s) {
		sentence := s[x[0]:x[1]]
		if strings.HasSuffix(sentence, "?") {
			continue
		}
		for i, r := range rules {
			if r.opening {
				if found := compiled[i].FindString(sentence); found != "" {
					hits = append(hits, hit{file, t.line(x[0]), r.name, opening(sentence), r.instead})
				}
			}
		}
	}
	return hits
}

// opening returns the first words of a sentence.
func opening(s string) string {
	f := strings.Fields(s)
	if len(f) <= 4 {
		return strings.Join(f, " ")
	}
	return strings.Join(f[:4], " ") + " …"
}

// isCode reports whether s[from:to] is part of a name, a path or a quoted key.
func isCode(s string, from, to int) bool {
	return from > 0 && strings.IndexByte(`"'=/_-.$<{[@`, s[from-1]) >= 0 ||
		to < len(s) && strings.IndexByte(`"=/_-([`, s[to]) >= 0
}

// sentences returns the bounds of the sentences of s.
func sentences(s string) [][2]int {
	var all [][2]int
	start := 0
	end := func(i int) {
		from, to := start, i
		for from < to && unicode.IsSpace(rune(s[from])) {
			from++
		}
		for to > from && unicode.IsSpace(rune(s[to-1])) {
			to--
		}
		if from < to {
			all = append(all, [2]int{from, to})
		}
		start = i
	}
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\n':
			end(i)
		case '.', '!', '?':
			j := i + 1
			for j < len(s) && strings.IndexByte(`)"'*_`, s[j]) >= 0 {
				j++
			}
			if j+1 < len(s) && s[j] == ' ' && !abbreviated(s[:i+1]) {
				end(j)
			}
		}
	}
	end(len(s))
	return all
}

// abbreviated reports whether the full stop at the end of s belongs to an abbreviation.
func abbreviated(s string) bool {
	for _, a := range []string{"e.g.", "i.e.", "etc.", "vs.", "cf.", "..."} {
		if strings.HasSuffix(s, a) {
			return true
		}
	}
	return false
}

// words returns how many words s has.
func words(s string) (n int) {
	for f := range strings.FieldsSeq(s) {
		if strings.ContainsFunc(f, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }) {
			n++
		}
	}
	return n
}

var (
	codeSpan    = regexp.MustCompile("``[^`]*``|`[^`]*`")
	mdLink      = regexp.MustCompile(`!?\[([^\]]*)\]\([^)]*\)`)
	bareURL     = regexp.MustCompile(`<?https?://[^\s)>]+>?`)
	listItem    = regexp.MustCompile(`^\s*([-*+]|\d+[.)])\s+`)
	linkTarget  = regexp.MustCompile(`^\[[^\]]+\]:\s`)
	htmlComment = regexp.MustCompile(`(?s)<!--.*?-->`)
)

// mask replaces what is no prose in one line or paragraph: code by "X" of the same length,
// links by their text.
func mask(s string) string {
	keep := func(m string) string { return "X" + strings.Repeat("x", max(0, len(m)-1)) }
	return bareURL.ReplaceAllStringFunc(codeSpan.ReplaceAllStringFunc(s, keep), keep)
}

// checkMarkdown returns the hits of a page.
func checkMarkdown(file, page string) []hit {
	var hits []hit
	if n := len(strings.Fields(page)); maxWords[file] > 0 && n > maxWords[file] {
		hits = append(hits, hit{file, 1, "page length", fmt.Sprintf("page of %d words", n), fmt.Sprintf("at most %d: move details to docs/design or a package comment", maxWords[file])})
	}
	page = htmlComment.ReplaceAllStringFunc(page, func(m string) string { return strings.Repeat("\n", strings.Count(m, "\n")) })
	var para text
	flush := func() {
		s := para.String()
		hits = append(hits, para.scan(file, true, nil)...)
		for _, x := range sentences(s) {
			sentence := mdLink.ReplaceAllString(s[x[0]:x[1]], "$1")
			if n := words(sentence); n > maxSentence {
				hits = append(hits, hit{file, para.line(x[0]), "sentence length", fmt.Sprintf("sentence of %d words (%s)", n, opening(sentence)), fmt.Sprintf("at most %d words: split it", maxSentence)})
			}
		}
		para = text{}
	}
	fence := ""
	n := 0
	for line := range strings.Lines(page) {
		n++
		line = strings.TrimRight(line, "\r\n")
		trim := strings.TrimSpace(strings.TrimLeft(line, "> "))
		if fence != "" {
			if strings.HasPrefix(trim, fence) {
				fence = ""
			}
			continue
		}
		switch {
		case strings.HasPrefix(trim, "```"), strings.HasPrefix(trim, "~~~"):
			flush()
			fence = trim[:3]
		case trim == "", linkTarget.MatchString(trim):
			flush()
		case trim[0] == '#', trim[0] == '|':
			flush()
			var t text
			t.add(n, maskMarkdown(trim))
			hits = append(hits, t.scan(file, false, nil)...)
		default:
			if m := listItem.FindString(line); m != "" {
				flush()
				trim = strings.TrimSpace(line[len(m):])
			}
			if para.Len() > 0 {
				para.WriteByte(' ')
			}
			para.add(n, trim)
			if strings.Count(para.String(), "`")%2 == 0 {
				masked := maskMarkdown(para.String())
				para.Reset()
				para.WriteString(masked)
			}
		}
	}
	flush()
	return hits
}

// maskMarkdown masks code and the addresses of links, and keeps the length.
func maskMarkdown(s string) string {
	s = mask(s)
	return mdLink.ReplaceAllStringFunc(s, func(m string) string {
		i := strings.LastIndex(m, "](")
		return m[:i+2] + strings.Repeat("x", len(m)-i-3) + ")"
	})
}

// A source is a parsed Go file.
type source struct {
	path      string
	set       *token.FileSet
	file      *ast.File
	generated bool
	exported  map[string]bool
}

func parse(file string, b []byte) (*source, error) {
	s := &source{path: file, set: token.NewFileSet(), exported: map[string]bool{}}
	f, err := parser.ParseFile(s.set, file, b, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	s.file, s.generated = f, ast.IsGenerated(f)
	ast.Inspect(f, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && id.IsExported() {
			s.exported[id.Name] = true
		}
		return true
	})
	return s, nil
}

// check returns the hits in comments, string literals and names of tests.
func (s *source) check() []hit {
	var hits []hit
	for _, g := range s.file.Comments {
		t := comment(s.set, g)
		hits = append(hits, t.scan(s.path, true, s.exported)...)
	}
	var tag *ast.BasicLit // of the field that is inspected
	ast.Inspect(s.file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.Field:
			tag = n.Tag
		case *ast.FuncDecl:
			if strings.HasSuffix(s.path, "_test.go") && n.Recv == nil {
				s.testName(n.Name, &hits)
			}
		}
		if l, ok := n.(*ast.BasicLit); ok && l != tag {
			s.literal(l, &hits)
		}
		return true
	})
	return hits
}

// literal adds the hits of l, if it is a string of more than one word.
func (s *source) literal(l *ast.BasicLit, hits *[]hit) {
	if l.Kind != token.STRING {
		return
	}
	value, err := strconv.Unquote(l.Value)
	if err != nil || !strings.Contains(value, " ") {
		return
	}
	line := s.set.Position(l.Pos()).Line
	var t text
	for v := range strings.Lines(value) {
		t.add(line, mask(v))
		if l.Value[0] == '`' {
			line++
		}
	}
	*hits = append(*hits, t.scan(s.path, true, s.exported)...)
}

// testName adds the hits of a test's name, read as words.
func (s *source) testName(name *ast.Ident, hits *[]hit) {
	for _, p := range []string{"Test", "Benchmark", "Fuzz"} {
		if rest, ok := strings.CutPrefix(name.Name, p); ok && rest != "" {
			var t text
			t.add(s.set.Position(name.Pos()).Line, splitCamel(rest))
			*hits = append(*hits, t.scan(s.path, false, nil)...)
		}
	}
}

// splitCamel returns a name as words: "NobodyWaits" becomes "Nobody Waits".
func splitCamel(s string) string {
	var b strings.Builder
	for i, r := range s {
		if i > 0 && unicode.IsUpper(r) {
			b.WriteByte(' ')
		}
		b.WriteRune(r)
	}
	return strings.ReplaceAll(b.String(), "_", " ")
}

// comment returns the prose of a group of comments, without directives and code blocks.
func comment(set *token.FileSet, g *ast.CommentGroup) *text {
	t := &text{}
	for _, c := range g.List {
		line := set.Position(c.Pos()).Line
		body, block := strings.CutPrefix(c.Text, "/*")
		body = strings.TrimSuffix(body, "*/")
		for l := range strings.Lines(body) {
			l = strings.TrimRight(l, "\r\n")
			if !block {
				if l = strings.TrimPrefix(l, "//"); l != "" && l[0] != ' ' && l[0] != '\t' {
					continue // a directive
				}
			}
			trim := strings.TrimSpace(l)
			switch {
			case trim == "", strings.HasPrefix(l, "\t"), strings.HasPrefix(l, " \t"):
				t.add(line, "\n")
			case listItem.MatchString(l), strings.HasPrefix(trim, "# "):
				t.add(line, "\n"+mask(trim[len(strings.TrimSpace(listItem.FindString(l))):])+" ")
			default:
				t.add(line, mask(trim)+" ")
			}
			line++
		}
	}
	return t
}

// checkShort returns the hits of short help in a package: literals that become the field Short of
// a composite literal, directly, through a field called short, or through a parameter of that name.
func checkShort(files []*source) []hit {
	params := shortParams(files)
	var hits []hit
	for _, s := range files {
		if strings.HasSuffix(s.path, "_test.go") {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CompositeLit:
				for _, e := range shortsOf(n) {
					hits = append(hits, s.short(e)...)
				}
			case *ast.CallExpr:
				if i, ok := params[called(n)]; ok && i < len(n.Args) {
					hits = append(hits, s.short(n.Args[i])...)
				}
			}
			return true
		})
	}
	return hits
}

// shortParams returns the functions with a parameter called short, and its index.
func shortParams(files []*source) map[string]int {
	params := map[string]int{}
	for _, s := range files {
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			i := 0
			for _, p := range f.Type.Params.List {
				for _, n := range p.Names {
					if n.Name == "short" {
						params[f.Name.Name] = i
					}
					i++
				}
			}
		}
	}
	return params
}

// shortsOf returns the values of the fields Short and short in a literal or in its rows.
func shortsOf(l *ast.CompositeLit) (all []ast.Expr) {
	index := shortField(l.Type)
	for _, e := range l.Elts {
		switch e := e.(type) {
		case *ast.KeyValueExpr:
			if id, ok := e.Key.(*ast.Ident); ok && (id.Name == "Short" || id.Name == "short") {
				all = append(all, e.Value)
			}
		case *ast.CompositeLit:
			if index >= 0 && index < len(e.Elts) {
				all = append(all, e.Elts[index])
			}
		}
	}
	return all
}

// called returns the name of the function or method that a call names.
func called(c *ast.CallExpr) string {
	switch f := c.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		return f.Sel.Name
	}
	return ""
}

// short returns the hits of one short help; none if e is no literal.
func (s *source) short(e ast.Expr) (hits []hit) {
	l, ok := e.(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return nil
	}
	value, err := strconv.Unquote(l.Value)
	if err != nil || value == "" {
		return nil
	}
	line := s.set.Position(l.Pos()).Line
	if n := utf8.RuneCountInString(value); n > maxShort {
		hits = append(hits, hit{s.path, line, "short help", fmt.Sprintf("short help of %d characters", n), fmt.Sprintf("at most %d", maxShort)})
	}
	if first, _, _ := strings.Cut(value, " "); !verbs[strings.TrimRight(first, ",:")] {
		hits = append(hits, hit{s.path, line, "short help", fmt.Sprintf("short help begins with %q", first), "begin with an imperative (list of verbs: .ci/prose/rules.go)"})
	}
	if strings.HasSuffix(value, ".") {
		hits = append(hits, hit{s.path, line, "short help", "short help ends with a full stop", "remove it"})
	}
	return hits
}

// shortField returns the index of the field short in the struct of which t is a slice; -1 if
// there is none.
func shortField(t ast.Expr) int {
	a, ok := t.(*ast.ArrayType)
	if !ok {
		return -1
	}
	st, ok := a.Elt.(*ast.StructType)
	if !ok {
		return -1
	}
	i := 0
	for _, f := range st.Fields.List {
		for _, n := range f.Names {
			if n.Name == "short" {
				return i
			}
			i++
		}
	}
	return -1
}
