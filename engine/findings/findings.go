// Package findings decides which findings of a check count in a pipeline, and writes them as
// SARIF.
//
// A finding does not count if a baseline has it, which is the output of an earlier check, or if
// a rule ignores it, for a reason and until a date. The package handles values and bytes; it
// opens no file.
package findings

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"constellation/engine/plan"
)

// Judged is a finding and why it does not count.
type Judged struct {
	plan.Finding
	// Known is set if the baseline has it.
	Known bool `json:"known,omitempty"`
	// Ignored is the rule that ignores it; nil without one.
	Ignored *Ignore `json:"ignored,omitempty"`
}

// Counts reports whether the finding is new and not ignored.
func (j *Judged) Counts() bool { return !j.Known && j.Ignored == nil }

// Identity identifies a finding in other runs of the check: its ID, its field, its objects and
// the files that it stands in. Counts, versions and lines may differ. Pods have random names:
// their namespace and owner stand for them.
func Identity(f *plan.Finding) string {
	var parts []string
	for _, o := range f.Objects {
		if !strings.HasPrefix(o, "pod/") {
			parts = append(parts, o)
		}
	}
	if len(parts) == 0 {
		for _, o := range f.Objects {
			namespace, _, _ := strings.Cut(strings.TrimPrefix(o, "pod/"), "/")
			parts = append(parts, "pods/"+namespace+"/"+f.Owner)
		}
	}
	for _, l := range f.Locations {
		parts = append(parts, "file/"+l.File)
	}
	slices.Sort(parts)
	b, err := json.Marshal(append([]string{f.ID, f.Field}, slices.Compact(parts)...))
	if err != nil {
		return f.ID // strings can be marshalled
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16])
}

// Baseline has the findings of an earlier check: how many of each identity and severity.
type Baseline struct {
	known map[string][]plan.Severity
}

// maxDocument bounds a baseline and a file with rules, in bytes.
const maxDocument = 64 << 20

// ReadBaseline reads the output of a check in JSON.
func ReadBaseline(r io.Reader) (*Baseline, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxDocument+1))
	if err != nil {
		return nil, fmt.Errorf("read baseline: %w", err)
	}
	if len(text) > maxDocument {
		return nil, fmt.Errorf("read baseline: it has more than %d MiB", maxDocument>>20)
	}
	var doc struct {
		Findings *[]plan.Finding `json:"findings"`
		// Hops are those of a cluster.
		Hops []struct {
			Findings []plan.Finding `json:"findings"`
		} `json:"hops"`
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return nil, fmt.Errorf("read baseline: %w", err)
	}
	if doc.Findings == nil && doc.Hops != nil {
		doc.Findings = &[]plan.Finding{}
		for _, h := range doc.Hops {
			*doc.Findings = append(*doc.Findings, h.Findings...)
		}
	}
	if doc.Findings == nil {
		return nil, errors.New("read baseline: it has no field findings: want the output of check -o json")
	}
	b := &Baseline{known: map[string][]plan.Severity{}}
	for i := range *doc.Findings {
		f := &(*doc.Findings)[i]
		if f.ID == "" {
			return nil, fmt.Errorf("read baseline: finding %d has no id", i+1)
		}
		id := Identity(f)
		b.known[id] = append(b.known[id], f.Severity)
	}
	return b, nil
}

// Ignore is a rule to ignore findings.
type Ignore struct {
	// ID is that of the finding.
	ID string `json:"id" yaml:"id"`
	// Object is one of its objects, "deployment/shop/web"; empty for every finding of the ID.
	Object string `json:"object,omitempty" yaml:"object"`
	// Reason is for other people, Until the last day on which the rule holds.
	Reason string `json:"reason" yaml:"reason"`
	Until  Date   `json:"until" yaml:"until"`
}

// String is "single-replica/deployment/shop/web".
func (i Ignore) String() string {
	if i.Object == "" {
		return i.ID
	}
	return i.ID + "/" + i.Object
}

// Date is a day, in UTC.
type Date struct{ time.Time }

// ParseDate parses "2027-03-31".
func ParseDate(s string) (Date, error) {
	t, err := time.Parse(time.DateOnly, s)
	if err != nil {
		return Date{}, fmt.Errorf("parse date %q: want a day such as 2027-03-31", s)
	}
	return Date{t}, nil
}

func (d Date) String() string { return d.Format(time.DateOnly) }

// MarshalText writes the day.
func (d Date) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText parses a day.
func (d *Date) UnmarshalText(b []byte) (err error) {
	*d, err = ParseDate(string(b))
	return err
}

// UnmarshalYAML parses a day.
func (d *Date) UnmarshalYAML(n *yaml.Node) (err error) {
	*d, err = ParseDate(n.Value)
	return err
}

// check returns an error unless the rule is complete. A rule without end would hide a finding
// for good.
func (i *Ignore) check() error {
	switch {
	case i.ID == "":
		return errors.New("it has no id")
	case strings.TrimSpace(i.Reason) == "":
		return fmt.Errorf("%s has no reason", i)
	case i.Until.IsZero():
		return fmt.Errorf("%s has no end: add until with a day such as 2027-03-31", i)
	}
	return nil
}

// ParseIgnore parses the value of a flag: ID[/OBJECT],until=DATE,reason=TEXT. The reason goes
// to the end.
func ParseIgnore(s string) (Ignore, error) {
	fail := func(err error) (Ignore, error) {
		return Ignore{}, fmt.Errorf("parse rule %q: %w: want ID[/OBJECT],until=DATE,reason=TEXT", s, err)
	}
	name, rest, ok := strings.Cut(s, ",until=")
	if !ok {
		return fail(errors.New("it has no until"))
	}
	day, reason, ok := strings.Cut(rest, ",reason=")
	if !ok {
		return fail(errors.New("it has no reason"))
	}
	var i Ignore
	i.ID, i.Object, _ = strings.Cut(name, "/")
	i.Reason = reason
	var err error
	if i.Until, err = ParseDate(day); err != nil {
		return fail(err)
	}
	if err := i.check(); err != nil {
		return fail(err)
	}
	return i, nil
}

// ReadIgnores reads a file with rules:
//
//	ignore:
//	- id: single-replica
//	  object: deployment/shop/web # optional
//	  reason: it is a cache that is warm after a second
//	  until: 2027-03-31
//
// Unknown fields are errors.
func ReadIgnores(r io.Reader) ([]Ignore, error) {
	var doc struct {
		Ignore []Ignore `yaml:"ignore"`
	}
	dec := yaml.NewDecoder(io.LimitReader(r, maxDocument))
	dec.KnownFields(true)
	if err := dec.Decode(&doc); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read rules: %w", err)
	}
	for i := range doc.Ignore {
		if err := doc.Ignore[i].check(); err != nil {
			return nil, fmt.Errorf("read rules: rule %d: %w", i+1, err)
		}
	}
	return doc.Ignore, nil
}

// matches reports whether the rule is for a finding.
func (i *Ignore) matches(f *plan.Finding) bool {
	return i.ID == f.ID && (i.Object == "" || slices.Contains(f.Objects, i.Object))
}

// Rules decide which findings count. The zero value lets all count.
type Rules struct {
	Baseline *Baseline // nil without one
	Ignore   []Ignore
	// Now decides whether a rule has ended.
	Now time.Time
}

// Judge applies the rules. Notes are sentences for users about rules that have ended or match
// nothing.
func (r *Rules) Judge(found []plan.Finding) (judged []Judged, notes []string) {
	known := map[string][]plan.Severity{}
	if r.Baseline != nil {
		for id, severities := range r.Baseline.known {
			known[id] = slices.Clone(severities)
		}
	}
	used := make([]bool, len(r.Ignore))
	for i := range found {
		j := Judged{Finding: found[i]}
		id := Identity(&j.Finding)
		// What got worse is new. Several findings of one identity are matched one by one.
		if at := slices.IndexFunc(known[id], func(s plan.Severity) bool { return rank(s) <= rank(j.Severity) }); at >= 0 {
			j.Known = true
			known[id] = slices.Delete(known[id], at, at+1)
		}
		for k := range r.Ignore {
			rule := &r.Ignore[k]
			if !rule.matches(&j.Finding) {
				continue
			}
			used[k] = true
			if !r.ended(rule) && j.Ignored == nil {
				j.Ignored = rule
			}
		}
		judged = append(judged, j)
	}
	for k := range r.Ignore {
		switch rule := &r.Ignore[k]; {
		case used[k] && r.ended(rule):
			notes = append(notes, fmt.Sprintf("The rule that ignores %s ended on %s: resolve the finding, or extend the rule.", rule, rule.Until))
		case !used[k]:
			notes = append(notes, fmt.Sprintf("The rule that ignores %s matches no finding: delete it.", rule))
		}
	}
	return judged, notes
}

// ended reports whether the last day of a rule is over.
func (r *Rules) ended(i *Ignore) bool { return !r.Now.Before(i.Until.AddDate(0, 0, 1)) }

// Threshold is the severity from which findings fail a pipeline.
type Threshold string

// Thresholds. The zero value fails nothing.
const (
	FailBlocking Threshold = "blocking"
	FailWarning  Threshold = "warning"
)

// ParseThreshold parses the value of --fail-on.
func ParseThreshold(s string) (Threshold, error) {
	switch t := Threshold(s); t {
	case FailBlocking, FailWarning:
		return t, nil
	}
	return "", fmt.Errorf("unknown threshold %q: want blocking or warning", s)
}

// Failing returns the findings that count and reach the threshold.
func (t Threshold) Failing(judged []Judged) (out []Judged) {
	for _, j := range judged {
		if j.Counts() && (j.Severity == plan.Block && t != "" || j.Severity == plan.Warn && t == FailWarning) {
			out = append(out, j)
		}
	}
	return out
}

func rank(s plan.Severity) int {
	return cmp.Or(slices.Index([]plan.Severity{plan.Block, plan.Warn, plan.NotChecked, plan.Info}, s), 0)
}
