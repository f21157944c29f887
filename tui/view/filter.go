package view

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine/rollout"
)

// Filter selects machines and log lines. It consists of terms, all of which must match:
//
//	state:drain,join  group:gpu  node:worker-1*  with:worker-9  source:operator  level:warn
//	age>5m  age<30s  try>1  !state:ready  any other word is searched in names and texts
//
// The value after a colon is a prefix or a glob pattern. The zero value matches everything.
type Filter struct {
	Terms   []filterTerm
	UsesAge bool // its result changes with time
}

type filterTerm struct {
	key    string // "" for a word
	not    bool
	values []string // lower case; one of them must match
	less   bool     // age and try: less instead of greater
	age    time.Duration
	try    int
}

// filterKeys are the keys of terms.
var filterKeys = []string{"state", "group", "node", "with", "source", "level", "age", "try"}

// ParseFilter parses a filter. Its error names the invalid term.
func ParseFilter(s string) (Filter, error) {
	var f Filter
	for _, word := range strings.Fields(strings.ToLower(s)) {
		var t filterTerm
		rest, not := strings.CutPrefix(word, "!")
		if not && rest != "" {
			t.not, word = true, rest
		}
		i := strings.IndexAny(word, ":<>")
		if i < 0 || !slices.Contains(filterKeys, word[:i]) {
			t.values = []string{word}
			f.Terms = append(f.Terms, t)
			continue
		}
		t.key = word[:i]
		op, value := word[i], word[i+1:]
		switch measured := t.key == "age" || t.key == "try"; {
		case measured != (op != ':'):
			if measured {
				return Filter{}, fmt.Errorf("%q: write %s>… or %s<…", word, t.key, t.key)
			}
			return Filter{}, fmt.Errorf("%q: write %s:…", word, t.key)
		case t.key == "age":
			d, err := time.ParseDuration(value)
			if err != nil {
				return Filter{}, fmt.Errorf("%q: want a time such as 90s, 5m or 1h", word)
			}
			t.age, f.UsesAge = d, true
		case t.key == "try":
			n, err := strconv.Atoi(value)
			if err != nil {
				return Filter{}, fmt.Errorf("%q: want a number", word)
			}
			t.try = n
		default:
			for v := range strings.SplitSeq(value, ",") {
				if _, err := path.Match(v, ""); err != nil {
					return Filter{}, fmt.Errorf("%q: not a pattern", word)
				}
				if v != "" {
					t.values = append(t.values, v)
				}
			}
			if len(t.values) == 0 {
				return Filter{}, fmt.Errorf("%q: want %s:VALUE", word, t.key)
			}
			if t.key == "state" && !slices.ContainsFunc(NodeStates, t.value) {
				return Filter{}, fmt.Errorf("%q: no such state, want one of %s", word, strings.Join(NodeStates, ", "))
			}
		}
		t.less = op == '<'
		f.Terms = append(f.Terms, t)
	}
	return f, nil
}

// value reports whether a text has one of the prefixes or matches one of the patterns.
func (t *filterTerm) value(s string) bool {
	s = strings.ToLower(s)
	return slices.ContainsFunc(t.values, func(v string) bool {
		if strings.ContainsAny(v, "*?[") {
			ok, _ := path.Match(v, s)
			return ok
		}
		return strings.HasPrefix(s, v)
	})
}

// word reports whether one of the texts contains the word.
func (t *filterTerm) word(texts ...string) bool {
	return slices.ContainsFunc(texts, func(s string) bool { return strings.Contains(strings.ToLower(s), t.values[0]) })
}

// all reports whether every term holds. holds judges a term without its negation; judged is false
// if the term is about something else.
func (f *Filter) all(holds func(*filterTerm) (ok, judged bool)) bool {
	for i := range f.Terms {
		if ok, judged := holds(&f.Terms[i]); judged && ok == f.Terms[i].not {
			return false
		}
	}
	return true
}

// Node reports whether a machine matches. Terms about lines are ignored.
func (f *Filter) Node(n *rollout.BoardNode, now time.Time) bool {
	return f.all(func(t *filterTerm) (ok, judged bool) {
		switch t.key {
		case "":
			return t.word(n.Name, n.Text, n.Counterpart), true
		case "state":
			return t.value(n.State), true
		case "group":
			return t.value(n.Group), true
		case "node":
			return t.value(n.Name), true
		case "with":
			return t.value(n.Counterpart), true
		case "age":
			return now.Sub(n.Since) > t.age != t.less, true
		case "try":
			return t.less && n.Attempts < t.try || !t.less && n.Attempts > t.try, true
		}
		return false, false
	})
}

// Line reports whether a log line matches. Terms about machines are ignored.
func (f *Filter) Line(x *rollout.BoardLine) bool {
	return f.all(func(t *filterTerm) (ok, judged bool) {
		switch t.key {
		case "":
			return t.word(x.Text, x.Node, x.Source), true
		case "node":
			return t.value(x.Node), true
		case "source":
			return t.value(x.Source), true
		case "level":
			return t.value(x.Level), true
		}
		return false, false
	})
}
