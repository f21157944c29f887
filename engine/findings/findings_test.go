package findings

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"constellation/engine/plan"
)

func found(id string, s plan.Severity, objects ...string) plan.Finding {
	return plan.Finding{ID: id, Severity: s, Title: "title of " + id, Objects: objects}
}

func baseline(t *testing.T, list ...plan.Finding) *Baseline {
	t.Helper()
	text, err := json.Marshal(map[string]any{"schema": "1.0", "findings": list})
	if err != nil {
		t.Fatal(err)
	}
	b, err := ReadBaseline(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func rule(t *testing.T, s string) Ignore {
	t.Helper()
	i, err := ParseIgnore(s)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func TestJudge(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	single, other := found("single-replica", plan.Warn, "deployment/shop/web"), found("single-replica", plan.Warn, "deployment/shop/other")
	pods := plan.Finding{ID: "termination", Severity: plan.Warn, Owner: "namespace shop", Objects: []string{"pod/shop/web-1"}}
	otherPods := pods
	otherPods.Objects = []string{"pod/shop/web-9"}
	file, moved := single, single
	file.Locations, moved.Locations = []plan.Location{{File: "a.yaml", Line: 3}}, []plan.Location{{File: "a.yaml", Line: 99}}
	for _, tt := range []struct {
		name   string
		rules  Rules
		found  []plan.Finding
		counts []int // positions in found
		notes  []string
	}{
		{name: "no rules", rules: Rules{}, found: []plan.Finding{single, other}, counts: []int{0, 1}},
		{name: "the baseline has one", rules: Rules{Baseline: baseline(t, single)}, found: []plan.Finding{single, other}, counts: []int{1}},
		{name: "a finding of the baseline got worse", rules: Rules{Baseline: baseline(t, single)}, found: []plan.Finding{found("single-replica", plan.Block, "deployment/shop/web")}, counts: []int{0}},
		{name: "a finding of the baseline got better", rules: Rules{Baseline: baseline(t, found("a", plan.Block, "x"))}, found: []plan.Finding{found("a", plan.Warn, "x")}},
		{name: "a finding of the baseline occurs twice", rules: Rules{Baseline: baseline(t, single)}, found: []plan.Finding{single, single}, counts: []int{1}},
		{name: "pods have new names", rules: Rules{Baseline: baseline(t, pods)}, found: []plan.Finding{otherPods}},
		{name: "lines moved", rules: Rules{Baseline: baseline(t, file)}, found: []plan.Finding{moved}},
		{name: "a finding of the baseline is in another file", rules: Rules{Baseline: baseline(t, file)}, found: []plan.Finding{single}, counts: []int{0}},
		{name: "ignored by object", rules: Rules{Ignore: []Ignore{rule(t, "single-replica/deployment/shop/web,until=2026-11-23,reason=a cache, warm soon")}}, found: []plan.Finding{single, other}, counts: []int{1}},
		{name: "ignored by ID", rules: Rules{Ignore: []Ignore{rule(t, "single-replica,until=2027-01-01,reason=x")}}, found: []plan.Finding{single, other}},
		{
			name:   "the rule has ended",
			rules:  Rules{Ignore: []Ignore{rule(t, "single-replica,until=2026-11-22,reason=x")}},
			found:  []plan.Finding{single},
			counts: []int{0},
			notes:  []string{"The rule that ignores single-replica ended on 2026-11-22: resolve the finding, or extend the rule."},
		},
		{
			name:   "the rule matches nothing",
			rules:  Rules{Ignore: []Ignore{rule(t, "pdb-room/poddisruptionbudget/a/b,until=2027-01-01,reason=x")}},
			found:  []plan.Finding{single},
			counts: []int{0},
			notes:  []string{"The rule that ignores pdb-room/poddisruptionbudget/a/b matches no finding: delete it."},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.rules.Now = now
			judged, notes := tt.rules.Judge(tt.found)
			var counts []int
			for i := range judged {
				if judged[i].Counts() {
					counts = append(counts, i)
				}
			}
			if !slices.Equal(counts, tt.counts) || !slices.Equal(notes, tt.notes) {
				t.Errorf("findings %v count, want %v; notes %q, want %q", counts, tt.counts, notes, tt.notes)
			}
			if got := len(FailWarning.Failing(judged)); got != len(tt.counts) {
				t.Errorf("%d findings fail, want %d", got, len(tt.counts))
			}
		})
	}
}

func TestThresholds(t *testing.T) {
	judged, _ := (&Rules{}).Judge([]plan.Finding{found("a", plan.Block), found("b", plan.Warn), found("c", plan.NotChecked), found("d", plan.Info)})
	for threshold, want := range map[Threshold]int{"": 0, FailBlocking: 1, FailWarning: 2} {
		if got := len(threshold.Failing(judged)); got != want {
			t.Errorf("%d findings fail at %q, want %d", got, threshold, want)
		}
	}
	if _, err := ParseThreshold("error"); err == nil {
		t.Error("an unknown threshold is accepted")
	}
}

func TestIncompleteRulesAreRefused(t *testing.T) {
	for value, want := range map[string]string{
		"single-replica":                               "it has no until",
		"single-replica,until=2027-01-01":              "it has no reason",
		"single-replica,until=soon,reason=x":           `parse date "soon"`,
		"single-replica,until=2027-01-01,reason= ":     "has no reason",
		",until=2027-01-01,reason=x":                   "it has no id",
		"single-replica,reason=x,until=2027-01-01":     "it has no reason",
		"single-replica,until=2027-02-30,reason=a day": "parse date",
	} {
		if _, err := ParseIgnore(value); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: the error is %v, want %q", value, err, want)
		}
	}
	for text, want := range map[string]string{
		"ignore:\n- {id: a, reason: b, until: 2027-01-01}\n": "",
		"":                                "",
		"ignore:\n- {id: a, reason: b}\n": "rule 1: a has no end",
		"ignore:\n- {id: a, until: 2027-01-01}\n":                         "rule 1: a has no reason",
		"ignore:\n- {id: a, why: b}\n":                                    "field why not found",
		"ignores: []\n":                                                   "field ignores not found",
		"ignore:\n- {id: a, object: o, reason: b, until: next week}\n":    "parse date",
		"ignore:\n- {id: a, object: [o], reason: b, until: 2027-01-01}\n": "cannot unmarshal",
	} {
		if _, err := ReadIgnores(strings.NewReader(text)); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: the error is %v, want %q", text, err, want)
		}
	}
}

func TestInvalidBaselines(t *testing.T) {
	for _, text := range []string{"", "[]", "{}", `{"findings":[{}]}`, `{"findings":3}`, "{"} {
		if _, err := ReadBaseline(strings.NewReader(text)); err == nil || !strings.HasPrefix(err.Error(), "read baseline: ") {
			t.Errorf("%q: the error is %v", text, err)
		}
	}
	if b, err := ReadBaseline(strings.NewReader(`{"hops":[{"findings":[{"id":"a"}]},{"findings":[{"id":"b"}]}]}`)); err != nil || len(b.known) != 2 {
		t.Errorf("the baseline of a cluster is %+v, %v", b, err)
	}
	// The output for a cluster lists each finding once more, by hop.
	if b, err := ReadBaseline(strings.NewReader(`{"findings":[{"id":"a"}],"hops":[{"findings":[{"id":"a"}]}]}`)); err != nil || len(b.known) != 1 {
		t.Errorf("the baseline of a cluster is %+v, %v", b, err)
	} else {
		for _, known := range b.known {
			if len(known) != 1 {
				t.Errorf("one finding is known %d times", len(known))
			}
		}
	}
	if _, err := ReadBaseline(strings.NewReader(`{"findings":[]}`)); err != nil {
		t.Error(err)
	}
}

// schema is the one that OASIS publishes.
func schema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	f, err := os.Open("testdata/sarif-schema-2.1.0.json")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	doc, err := jsonschema.UnmarshalJSON(f)
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("sarif.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("sarif.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The document is valid with any names of objects and files.
func TestSARIFIsValid(t *testing.T) {
	s := schema(t)
	evil := "a\x1b[31m|b\nc[link](https://evil.example){0}\\<b>\u202e\xff"
	until, err := ParseDate("2027-01-01")
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]Report{
		"empty": {Tool: "v1.0.0"},
		"all": {Tool: "v1.0.0", Compared: true, Dir: "deploy/prod", Findings: []Judged{
			{Finding: plan.Finding{ID: "pdb-room", Severity: plan.Block, Title: evil, Detail: evil, Remedy: evil, Owner: evil, Command: evil, Reference: "https://kubernetes.io/docs/#x", Objects: []string{evil, evil}, Locations: []plan.Location{{File: evil, Line: 3}, {File: "a b/c:d.yaml"}}}},
			{Finding: found("pdb-room", plan.Warn, "x"), Known: true},
			{Finding: found("single-replica", plan.Warn), Ignored: &Ignore{ID: "single-replica", Reason: evil, Until: until}},
			{Finding: plan.Finding{ID: "drain-rehearsal", Severity: plan.NotChecked, Title: evil, Reference: "pkg/api of k8s.io"}},
			{Finding: found("api-health", plan.Info)},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			if err := WriteSARIF(&b, r); err != nil {
				t.Fatal(err)
			}
			doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b.Bytes()))
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Validate(doc); err != nil {
				t.Errorf("%v\n%s", err, b.Bytes())
			}
			if bytes.ContainsAny(b.Bytes(), "\x1b") {
				t.Error("the document has an escape character")
			}
			var log sarifLog
			if err := json.Unmarshal(b.Bytes(), &log); err != nil {
				t.Fatal(err)
			}
			run := log.Runs[0]
			if name == "empty" {
				if len(run.Results) != 0 {
					t.Error("there are results")
				}
				return
			}
			if len(run.Results) != 3 || len(run.Invocations[0].Notifications) != 1 || len(run.Tool.Driver.Rules) != 3 {
				t.Fatalf("%d results, %d notifications, %d rules", len(run.Results), len(run.Invocations[0].Notifications), len(run.Tool.Driver.Rules))
			}
			first := run.Results[0]
			if first.Level != "error" || first.Locations[0].Physical.Region.StartLine != 3 || first.BaselineState != "new" || run.Results[1].BaselineState != "unchanged" || run.Results[2].Suppressions[0].Kind != "external" {
				t.Errorf("results %+v", run.Results)
			}
			if got := first.Locations[1].Physical.Artifact.URI; got != "deploy/prod/a%20b/c:d.yaml" {
				t.Errorf("the URI is %s", got)
			}
			for _, part := range []string{"[link]", "{0}"} {
				if strings.Contains(strings.NewReplacer(`\[`, "", `\]`, "", "{{", "", "}}", "").Replace(first.Message.Text), part) {
					t.Errorf("the message has %s: %s", part, first.Message.Text)
				}
			}
		})
	}
	// The schema refuses something.
	if err := s.Validate(map[string]any{"version": "2.1.0"}); err == nil {
		t.Error("the schema accepts a document without runs")
	}
}
