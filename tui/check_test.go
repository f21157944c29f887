package tui

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
	"constellation/tui/view"
)

// printedHere runs a verb in the current directory as workspace and returns its output.
func printedHere(t *testing.T, e *enginefake.Engine, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	t.Chdir(t.TempDir())
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	code = App{
		Release: "v1.1.0", Program: "constellation", Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs,
		Env: func(k string) string { return map[string]string{"LANG": "C.UTF-8"}[k] }, Now: func() time.Time { return enginefake.Start },
		Engine: func(*workspace.Workspace, *slog.Logger) (Engine, error) { return e, nil },
	}.Run(args)
	return strings.ReplaceAll(out.String(), dir, "/home/ops/demo"), errs.String(), code
}

func TestPrintedChecks(t *testing.T) {
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range enginefake.Checks {
		// The JSON output must equal the file that the check is read from.
		for _, f := range []struct{ format, file string }{{"text", "checked/" + name + ".txt"}, {"json", "../internal/enginefake/testdata/checks/" + name + ".json"}, {"markdown", "checked/" + name + ".md"}} {
			t.Run(name+"/"+f.format, func(t *testing.T) {
				out, errs, code := printedHere(t, &enginefake.Engine{CheckData: enginefake.CheckIn(t, name)}, "upgrade", "check", "-o", f.format)
				t.Chdir(root)
				if code != 0 || errs != "" {
					t.Errorf("exit %d, stderr %q", code, errs)
				}
				if i := strings.IndexAny(out, "\x1b\x07\u202e"); i >= 0 {
					t.Errorf("a control character is printed: %q", out[i:min(len(out), i+20)])
				}
				enginefake.CheckGolden(t, f.file, out)
			})
		}
	}
}

// The next command repeats the flags of the check.
func TestNextRepeatsFlags(t *testing.T) {
	for _, tt := range []struct {
		name, check string
		args        []string
		want        string
	}{
		{name: "none were given", check: "two-hops", want: "next  constellation upgrade check --write-config"},
		{
			name: "all were given", check: "two-hops",
			args: []string{"--to", "v1.1.0", "--kubernetes=1.36.3", "--feed", "my feed", "--feed-key", "a.pub", "--feed-key", "it's.pub", "--no-dry-run", "--no-preflight"},
			want: `next  constellation upgrade check --write-config --to v1.1.0 --kubernetes v1.36.3 --feed 'my feed' --feed-key a.pub --feed-key 'it'\''s.pub' --no-dry-run --no-preflight`,
		},
		{name: "a script asks", check: "two-hops", args: []string{"--non-interactive"}, want: "next  constellation upgrade check --write-config"},
		{name: "it was written", check: "written", args: []string{"--write-config", "--to", "v1.1.0"}, want: "next  constellation upgrade apply"},
		{name: "nothing to write", check: "newest", args: []string{"--to", "v1.1.0"}, want: ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errs, code := printedHere(t, &enginefake.Engine{CheckData: enginefake.CheckIn(t, tt.check)}, append([]string{"upgrade", "check"}, tt.args...)...)
			got := ""
			for l := range strings.Lines(out) {
				if strings.HasPrefix(l, "next ") {
					got += strings.TrimSuffix(l, "\n")
				}
			}
			if got != tt.want || code != 0 || errs != "" {
				t.Errorf("exit %d, stderr %q, says\n%s\nwant\n%s", code, errs, got, tt.want)
			}
		})
	}
}

// On a terminal, printed answers use its width.
func TestAnswersFitTheTerminal(t *testing.T) {
	for _, tt := range []struct{ columns, least, most int }{{columns: 60, least: 50, most: 60}, {columns: 80, least: 76, most: 80}, {columns: 118, least: 110, most: 118}, {columns: 200, least: 110, most: 120}, {columns: 40, least: 50, most: 60}} {
		t.Run(strconv.Itoa(tt.columns), func(t *testing.T) {
			p := startOn(t, uint16(tt.columns), 24, []string{answering(t, "two-hops")}, nil, "upgrade", "check")
			if code := p.ends(); code != 0 {
				t.Fatalf("ended with %d", code)
			}
			p.sees("Will change in hop 1")
			widest := 0
			for l := range strings.Lines(p.output()) {
				l = strings.TrimRight(l[strings.LastIndexByte(strings.TrimRight(l, "\r\n"), '\r')+1:], "\r\n")
				widest = max(widest, term.Width(term.StripStyle(l)))
			}
			if widest < tt.least || widest > tt.most {
				t.Errorf("the widest line has %d columns, want %d to %d:\n%s", widest, tt.least, tt.most, p.output())
			}
		})
	}
}

func TestNewer(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{a: "v1.36.10", b: "v1.36.9", want: true},
		{a: "v1.36.3", b: "v1.36.3", want: false},
		{a: "v1.36.0-rc.1", b: "v1.36.0", want: false},
		{a: "v1.36.3", b: "", want: true},
		{a: "", b: "v1.36.3", want: false},
		{a: "v1.36.3", b: "v1.35.4-v1.36.3", want: true},
	} {
		if got := view.Newer(tt.a, tt.b); got != tt.want {
			t.Errorf("%q after %q: %v, want %v", tt.a, tt.b, got, tt.want)
		}
	}
}

func TestOwners(t *testing.T) {
	for _, tt := range []struct{ owner, want string }{
		{"kubectl-client-side-apply", "last changed with kubectl"},
		{"namespace shop, kubectl-client-side-apply", "namespace shop, last changed with kubectl"},
		{"namespace shop, kubectl; namespace web, kubectl-edit", "namespace shop, last changed with kubectl; namespace web, last changed with kubectl"},
		{"namespace kubectl, Helm release kubectl-tools", "namespace kubectl, Helm release kubectl-tools"},
		{"argocd-controller", "argocd-controller"},
		{"", ""},
	} {
		if got := view.OwnerText(tt.owner); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.owner, got, tt.want)
		}
	}
}

func TestEstimates(t *testing.T) {
	for _, tt := range []struct {
		least, most time.Duration
		want        string
	}{
		{least: 36 * time.Second, most: 12 * time.Minute, want: "36s to 12m"},
		{least: 90 * time.Second, most: 90*time.Second + time.Millisecond, want: "about 90s"},
		{least: 190 * time.Minute, most: 230 * time.Minute, want: "3h10m to 3h50m"},
		{least: 119 * time.Second, most: 2 * time.Hour, want: "119s to 2h00m"},
	} {
		if got := view.DurationRange(tt.least, tt.most); got != tt.want {
			t.Errorf("%s, %s: %q, want %q", tt.least, tt.most, got, tt.want)
		}
	}
}

// Output to a pipe does not truncate commands and addresses.
func TestPrintedCommandsAreWhole(t *testing.T) {
	k := enginefake.CheckIn(t, "trouble")
	out, _, _ := printedHere(t, &enginefake.Engine{CheckData: k}, "upgrade", "check")
	for _, f := range k.Findings {
		if f.Severity != plan.Info && (!strings.Contains(out, f.Command) || !strings.Contains(out, f.Reference)) {
			t.Errorf("%q or %q is not whole in\n%s", f.Command, f.Reference, out)
		}
	}
}

// Findings of several checks about one object are grouped.
func TestRelatedFindingsAreGrouped(t *testing.T) {
	finding := func(id, title, command string, objects ...string) plan.Finding {
		return plan.Finding{ID: id, Severity: plan.Block, Source: "disruption", Title: title, Command: command, Objects: objects}
	}
	const allow, scale = "kubectl -n shop patch poddisruptionbudget cart", "kubectl -n shop scale deployment/cart --replicas=2"
	k := &check.Check{Findings: []plan.Finding{
		finding("pdb-room", "the budget never lets a pod go", allow, "poddisruptionbudget/shop/cart", "pod/shop/cart-0"),
		finding("node-conditions", "worker-1 is not ready", "", "node/worker-1"),
		finding("drain-rehearsal", "the drain of worker-0 would hang on it", allow, "node/worker-0", "pod/shop/cart-0", "poddisruptionbudget/shop/cart", "pod/web/w-0"),
		finding("pdb-overlap", "the budget is not alone", scale, "poddisruptionbudget/shop/cart"),
		finding("volume-attachments", "a volume stays on worker-1", "", "volumeattachment/v", "node/worker-1"),
		finding("feed", "the feed is old", ""),
		finding("running", "an image is not known", ""),
	}}
	got := ""
	for _, l := range view.FindingGroups((&session{App: App{Now: func() time.Time { return enginefake.Start }, Env: func(string) string { return "" }}}).page(), 100, k) {
		got += strings.TrimRight(l, " ") + "\n"
	}
	want := `
  x disruption   the budget never lets a pod go
                 objects poddisruptionbudget/shop/cart, pod/shop/cart-0
                 command kubectl -n shop patch poddisruptionbudget cart
                 also    the drain of worker-0 would hang on it
                 also    the budget is not alone
                         kubectl -n shop scale deployment/cart --replicas=2
  x disruption   worker-1 is not ready
                 objects node/worker-1
  x disruption   a volume stays on worker-1
                 objects volumeattachment/v, node/worker-1
  x disruption   the feed is old
  x disruption   an image is not known
`
	if _, rest, _ := strings.Cut(got, "\n"); !strings.HasSuffix(rest, want[1:]) {
		t.Errorf("it says\n%s\nwant at its end\n%s", got, want)
	}
}

// Help and docs describe exit code 4 in the same words.
func TestExitCodeInHelpAndDocs(t *testing.T) {
	pages := ""
	for _, name := range []string{"../docs/workspace.md", "../docs/upgrade-check.md"} {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		pages += string(b)
	}
	const blocked = "every path is blocked or a finding blocks the next hop"
	out, _, _ := printedHere(t, &enginefake.Engine{}, "upgrade", "check", "--help")
	if n := strings.Count(strings.Join(strings.Fields(out), " "), blocked); n != 2 {
		t.Errorf("the help contains %d times %q:\n%s", n, blocked, out)
	}
	for _, row := range []string{"| 4 | - | something is newer, and " + blocked + " |", "| 4 | blocked by a finding; `upgrade check --exit-code`: " + blocked + " |"} {
		if !strings.Contains(pages, row) {
			t.Errorf("no page has the row %q", row)
		}
	}
}

// The page names every field of the JSON document.
func TestDocsNameEveryField(t *testing.T) {
	page, err := os.ReadFile("../docs/upgrade-check.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[reflect.Type]bool{}
	var visit func(reflect.Type)
	visit = func(v reflect.Type) {
		switch v.Kind() {
		case reflect.Pointer, reflect.Slice:
			visit(v.Elem())
			return
		case reflect.Struct:
		default:
			return
		}
		if seen[v] {
			return
		}
		seen[v] = true
		for i := range v.NumField() {
			f := v.Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if name == "" || name == "-" {
				continue
			}
			if !strings.Contains(string(page), "`"+name+"`") {
				t.Errorf("docs/upgrade-check.md does not name %s of %s", name, v)
			}
			visit(f.Type)
		}
	}
	visit(reflect.TypeFor[check.Check]())
	if len(seen) < 10 {
		t.Errorf("only %d types were visited", len(seen))
	}
}

// A check with several findings counts once.
func TestChecksAreCounted(t *testing.T) {
	var l view.RunningCheck
	tell := func(kind plan.Kind, object, state string) {
		ev := plan.Event{Kind: kind, Object: object, State: state}
		if state != "" && state != plan.StateRunning {
			ev.Data = json.RawMessage(`{"id":"x","severity":"` + state + `"}`)
		}
		l.Apply(ev)
	}
	for _, id := range []string{"pdb-room", "capacity", "drain-rehearsal", "evil\x1b[2J", "leaders"} {
		tell(plan.KindCheck, id, plan.StateRunning)
	}
	tell(plan.KindCheck, "pdb-room", "block")
	tell(plan.KindCheck, "pdb-room", "warn")
	l.Apply(plan.Event{Kind: plan.KindProgress, Object: "drain-rehearsal", Current: 42, Total: 300})
	l.Apply(plan.Event{Kind: plan.KindProgress, Object: "pdb-room", Current: 1, Total: 2})
	if got, want := l.Summary(), `1 of 5 checked; capacity, drain-rehearsal 42 of 300, evil\x1b[2J and 1 more`; got != want || len(l.Found) != 2 {
		t.Errorf("%q with %d findings, want %q", got, len(l.Found), want)
	}
}
