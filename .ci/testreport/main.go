// Command testreport summarises a run of `go test -json`: which requirements of tests were met, which
// tests were skipped and why, and which passed only when they were repeated.
//
//	go run ./testreport [-flaky FILE] [-slow N] TEST.json
//
// Tests declare requirements with package internal/testneeds. The flaky file has one line for each test
// that once passed only at its second run: date, package, test. A test that does so for the first time
// is appended. A listed test that does so again is an error, and the exit code is 1.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

func main() {
	flaky := flag.String("flaky", "", "list of tests that passed only when repeated")
	slow := flag.Int("slow", 0, "number of slowest packages to print")
	flag.Parse()
	ok, err := run(flag.Arg(0), *flaky, *slow, time.Now(), os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

func run(path, flakyPath string, slow int, now time.Time, out io.Writer) (ok bool, err error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	r, err := read(f)
	if err != nil {
		return false, fmt.Errorf("read %s: %w", path, err)
	}
	r.table(out)
	r.slowest(out, slow)
	if flakyPath == "" {
		return true, nil
	}
	return r.repeated(out, flakyPath, now)
}

// id identifies a test.
type id struct{ pkg, test string }

func (i id) String() string { return i.pkg + " " + i.test }

// record is what the events of a test state.
type record struct {
	needs   []string
	results []string // in order: pass, fail, skip
	reason  string   // of the last skip
}

type report struct {
	tests    map[id]*record
	packages map[string]float64 // seconds
}

// event is the part of test2json's events that is used here.
type event struct {
	Action, Package, Test, Output, Key, Value string
	Elapsed                                   float64
}

var logged = regexp.MustCompile(`^\s+[\w.-]+\.go:\d+: (.*)`)

func read(in io.Reader) (*report, error) {
	r := &report{tests: map[id]*record{}, packages: map[string]float64{}}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 64<<20)
	said := map[id]string{} // last logged line
	for lines.Scan() {
		if !strings.HasPrefix(lines.Text(), "{") {
			continue // output of the build
		}
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return nil, err
		}
		i := id{e.Package, e.Test}
		if e.Test == "" {
			if e.Action == "pass" || e.Action == "fail" {
				r.packages[e.Package] += e.Elapsed
			}
			continue
		}
		t := r.tests[i]
		if t == nil {
			t = &record{}
			r.tests[i] = t
		}
		switch e.Action {
		case "attr":
			if e.Key == "needs" && !slices.Contains(t.needs, e.Value) {
				t.needs = append(t.needs, e.Value)
			}
		case "output":
			if m := logged.FindStringSubmatch(e.Output); m != nil {
				said[i] = strings.TrimSpace(m[1])
			}
		case "pass", "fail", "skip":
			t.results = append(t.results, e.Action)
			if e.Action == "skip" {
				t.reason = cmp.Or(said[i], "no reason given")
			}
		}
	}
	return r, lines.Err()
}

func (t *record) last() string {
	if len(t.results) == 0 {
		return "fail" // its process ended before it
	}
	return t.results[len(t.results)-1]
}

const (
	nothing    = "nothing"
	undeclared = "other (not declared)"
)

// table prints a row for each requirement. A test with two requirements is counted in both rows, a
// subtest that declares none belongs to its parent's row and is not counted.
func (r *report) table(out io.Writer) {
	type row struct {
		ran, failed, skipped int
		reasons              map[string]int
	}
	rows := map[string]*row{}
	for i, t := range r.tests {
		needs := t.needs
		switch {
		case len(needs) > 0:
		case t.last() == "skip":
			needs = []string{undeclared}
		case strings.Contains(i.test, "/"):
			continue
		default:
			needs = []string{nothing}
		}
		for _, n := range needs {
			w := rows[n]
			if w == nil {
				w = &row{reasons: map[string]int{}}
				rows[n] = w
			}
			switch t.last() {
			case "skip":
				w.skipped++
				w.reasons[t.reason]++
			case "fail":
				w.failed++
			default:
				w.ran++
			}
		}
	}
	names := slices.SortedFunc(maps.Keys(rows), func(a, b string) int {
		rank := func(n string) int {
			return map[string]int{nothing: -1, undeclared: 1}[n]
		}
		return cmp.Or(rank(a)-rank(b), strings.Compare(a, b))
	})
	fmt.Fprintf(out, "\n%-22s %7s %7s %7s   %s\n", "tests that need", "passed", "failed", "skipped", "why skipped")
	for _, n := range names {
		w := rows[n]
		reasons := slices.SortedFunc(maps.Keys(w.reasons), func(a, b string) int {
			return cmp.Or(w.reasons[b]-w.reasons[a], strings.Compare(a, b))
		})
		first := ""
		if len(reasons) > 0 {
			first = explain(reasons[0], w.reasons[reasons[0]])
		}
		fmt.Fprintf(out, "%-22s %7d %7d %7d   %s\n", n, w.ran, w.failed, w.skipped, first)
		for k, reason := range reasons {
			switch {
			case k == 0:
			case k < 5:
				fmt.Fprintf(out, "%-22s %7s %7s %7s   %s\n", "", "", "", "", explain(reason, w.reasons[reason]))
			case k == 5:
				fmt.Fprintf(out, "%-22s %7s %7s %7s   %d more reasons\n", "", "", "", "", len(reasons)-k)
			}
		}
	}
}

func explain(reason string, n int) string {
	if r := []rune(reason); len(r) > 90 {
		reason = string(r[:89]) + "…"
	}
	if n == 1 {
		return reason
	}
	return fmt.Sprintf("%s (%d×)", reason, n)
}

// slowest prints the packages whose tests took the most time.
func (r *report) slowest(out io.Writer, n int) {
	names := slices.SortedFunc(maps.Keys(r.packages), func(a, b string) int {
		return cmp.Or(cmp.Compare(r.packages[b], r.packages[a]), strings.Compare(a, b))
	})
	if n == 0 || len(names) == 0 {
		return
	}
	fmt.Fprintln(out, "\nslowest packages:")
	for _, p := range names[:min(n, len(names))] {
		fmt.Fprintf(out, "%7.1f s  %s\n", r.packages[p], p)
	}
}

// repeated compares the tests that passed only when they were repeated with the list.
func (r *report) repeated(out io.Writer, path string, now time.Time) (ok bool, err error) {
	listed, err := readFlaky(path)
	if err != nil {
		return false, err
	}
	var found []id
	for i, t := range r.tests {
		// Subtests are repeated with their parent.
		if !strings.Contains(i.test, "/") && slices.Contains(t.results, "fail") && t.last() == "pass" {
			found = append(found, i)
		}
	}
	slices.SortFunc(found, func(a, b id) int { return strings.Compare(a.String(), b.String()) })
	ok = true
	var added strings.Builder
	for _, i := range found {
		if date, old := listed[i]; old {
			ok = false
			fmt.Fprintf(out, "\nerror: %s passed only when repeated, as on %s: find the cause, then remove it from %s\n", i, date, path)
			continue
		}
		fmt.Fprintf(&added, "%s %s\n", now.UTC().Format(time.DateOnly), i)
		fmt.Fprintf(out, "\nwarning: %s passed only when repeated: commit its new line in %s. The next time is an error.\n", i, path)
	}
	if added.Len() == 0 {
		return ok, nil
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return false, err
	}
	_, err = f.WriteString(added.String())
	return ok, errors.Join(err, f.Close())
}

// readFlaky returns the date of each listed test.
func readFlaky(path string) (map[id]string, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	listed := map[id]string{}
	for n, line := range strings.Split(string(b), "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(line, "#") {
			continue
		}
		if len(fields) != 3 {
			return nil, fmt.Errorf("parse %s:%d: got %d fields, want date, package and test", path, n+1, len(fields))
		}
		if _, err := time.Parse(time.DateOnly, fields[0]); err != nil {
			return nil, fmt.Errorf("parse %s:%d: %w", path, n+1, err)
		}
		listed[id{fields[1], fields[2]}] = fields[0]
	}
	return listed, nil
}
