// Command prose checks the language of comments, string literals, Markdown pages and short help.
// It also refuses rows of test tables whose fields have no names.
//
// It reads the files that git tracks. Rules are in rules.go, permitted exceptions in allow.txt.
// Go code is counted by directory and Markdown by file. A unit that is listed in baseline.txt may
// have as many hits as its line allows, every other unit none.
//
//	go run ./prose             report units with more hits than the baseline allows
//	go run ./prose PATH...     print every hit below PATH, whatever the baseline allows
//	go run ./prose -baseline   write the present numbers to baseline.txt
//
// The exit code is 1 if a unit has too many hits, and 2 if the check could not run.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	root := flag.String("C", "", "root of the repository (default: found by git)")
	rewrite := flag.Bool("baseline", false, "write the present numbers of hits to baseline.txt")
	flag.Parse()
	ok, err := run(*root, *rewrite, flag.Args(), os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

// Paths of the check's own data, relative to the root of the repository.
const (
	allowPath    = ".ci/prose/allow.txt"
	baselinePath = ".ci/prose/baseline.txt"
)

// maxPrinted is the number of hits of a unit that are printed. A unit can have hundreds after a move.
const maxPrinted = 20

// run checks the repository at root and reports whether it passes. Non-empty paths restrict
// the output to hits below them.
func run(root string, rewrite bool, paths []string, out io.Writer) (ok bool, err error) {
	if root == "" {
		top, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
		if err != nil {
			return false, fmt.Errorf("find the repository: %w", err)
		}
		root = strings.TrimSpace(string(top))
	}
	list, err := exec.Command("git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.go", "*.md").Output()
	if err != nil {
		return false, fmt.Errorf("list tracked files: %w", err)
	}
	var files []string
	for f := range strings.SplitSeq(strings.TrimRight(string(list), "\x00"), "\x00") {
		if f != "" && !slices.Contains(files, f) {
			files = append(files, f)
		}
	}
	fsys := os.DirFS(root)
	allowed, err := readAllow(fsys)
	if err != nil {
		return false, err
	}
	hits, err := check(fsys, files)
	if err != nil {
		return false, err
	}
	hits = allowed.filter(hits)
	if len(paths) > 0 {
		return printBelow(out, hits, root, paths)
	}

	counts := map[string]int{}
	for _, h := range hits {
		counts[unit(h.path)]++
	}
	if rewrite {
		return true, os.WriteFile(filepath.Join(root, baselinePath), formatBaseline(counts), 0o644)
	}
	base, err := readBaseline(fsys)
	if err != nil {
		return false, err
	}
	ok = true
	for _, u := range slices.Sorted(maps.Keys(counts)) {
		n := counts[u]
		if n <= base[u] {
			continue
		}
		ok = false
		printed := 0
		for _, h := range hits {
			if unit(h.path) == u && printed < maxPrinted {
				fmt.Fprintln(out, h)
				printed++
			}
		}
		fmt.Fprintf(out, "%s: %d hits, %d allowed by %s", u, n, base[u], baselinePath)
		if n > printed {
			fmt.Fprintf(out, "; `cd .ci && go run ./prose ../%s` prints all", u)
		}
		fmt.Fprintln(out)
	}
	for _, u := range slices.Sorted(maps.Keys(base)) {
		if counts[u] < base[u] {
			fmt.Fprintf(out, "note: %s: %d hits, %d allowed: run `make prose-baseline` to lower the limit\n", u, counts[u], base[u])
		}
	}
	for _, e := range allowed {
		if !e.used {
			ok = false
			fmt.Fprintf(out, "%s:%d: unused entry: remove it\n", allowPath, e.line)
		}
	}
	return ok, nil
}

// printBelow prints the hits below paths, which are relative to the working directory or to root.
func printBelow(out io.Writer, hits []hit, root string, paths []string) (ok bool, err error) {
	ok = true
	for _, p := range paths {
		rel := filepath.Clean(p)
		if abs, err := filepath.Abs(p); err == nil {
			if r, err := filepath.Rel(root, abs); err == nil && !strings.HasPrefix(r, "..") {
				if _, err := os.Stat(abs); err == nil {
					rel = r
				}
			}
		}
		if _, err := os.Stat(filepath.Join(root, rel)); err != nil {
			return false, err
		}
		for _, h := range hits {
			if rel == "." || h.path == rel || strings.HasPrefix(h.path, rel+"/") {
				ok = false
				fmt.Fprintln(out, h)
			}
		}
	}
	return ok, nil
}

// unit returns the path under which the hits of a file are counted: the file itself for
// Markdown, the directory for Go.
func unit(file string) string {
	if strings.HasSuffix(file, ".md") {
		return file
	}
	return filepath.Dir(file)
}

// An exception permits the hits of one rule in some files.
type exception struct {
	glob string // of paths; a suffix "/**" means everything below
	term string // name of a rule or the text that matched; "*" means every rule
	line int    // in allow.txt
	used bool
}

type exceptions []*exception

// readAllow reads allow.txt: one exception a line, as "glob | term | reason".
func readAllow(fsys fs.FS) (exceptions, error) {
	b, err := fs.ReadFile(fsys, allowPath)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all exceptions
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		col := strings.Split(line, "|")
		if len(col) != 3 || strings.TrimSpace(col[2]) == "" {
			return nil, fmt.Errorf("%s:%d: want \"glob | term | reason\"", allowPath, n)
		}
		all = append(all, &exception{glob: strings.TrimSpace(col[0]), term: strings.TrimSpace(col[1]), line: n})
	}
	return all, nil
}

// filter returns the hits without those that an exception permits.
func (all exceptions) filter(hits []hit) []hit {
	return slices.DeleteFunc(hits, func(h hit) bool {
		permitted := false
		for _, e := range all {
			if e.matches(h) {
				e.used, permitted = true, true
			}
		}
		return permitted
	})
}

func (e *exception) matches(h hit) bool {
	if e.term != "*" && e.term != h.rule && !strings.EqualFold(e.term, h.text) {
		return false
	}
	if dir, ok := strings.CutSuffix(e.glob, "/**"); ok {
		return strings.HasPrefix(h.path, dir+"/")
	}
	ok, _ := filepath.Match(e.glob, h.path)
	return ok
}

const baselineHead = `# Hits per unit that the prose check still allows, as "unit number". A number may fall, never rise.
# "make prose-baseline" writes the present numbers.
`

func formatBaseline(counts map[string]int) []byte {
	var b bytes.Buffer
	b.WriteString(baselineHead)
	for _, u := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(&b, "%s %d\n", u, counts[u])
	}
	return b.Bytes()
}

func readBaseline(fsys fs.FS) (map[string]int, error) {
	b, err := fs.ReadFile(fsys, baselinePath)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	counts := map[string]int{}
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		var u string
		var c int
		if _, err := fmt.Sscanf(line, "%s %d", &u, &c); err != nil {
			return nil, fmt.Errorf("%s:%d: want \"unit number\"", baselinePath, n)
		}
		counts[u] = c
	}
	return counts, nil
}
