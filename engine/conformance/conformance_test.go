package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine/plan"
)

// world is what the verbs of the suite change.
type world struct {
	*testing.T
	spec    Spec
	ran     []string
	created bool
	workers []string
	// takes is how long verbs take, exits their exit codes, once each.
	takes map[string]time.Duration
	exits map[string]int
	// dies ends the suite in a verb.
	dies   string
	cancel context.CancelCauseFunc
}

func newWorld(t *testing.T, change func(*Spec)) *world {
	w := &world{T: t, workers: []string{"worker-1"}, takes: map[string]time.Duration{}, exits: map[string]int{}}
	w.spec = Spec{
		Dir: t.TempDir(), Provider: "gcp", Cluster: "demo", Machines: 2, Hide: []string{"my-project"}, Pay: true,
		Cost: Cost{Budget: 5, Machine: 0.1, Other: 0.1, Source: "a list"}, Run: w.verb,
	}
	if change != nil {
		change(&w.spec)
	}
	return w
}

// verb executes a verb.
func (w *world) verb(ctx context.Context, out io.Writer, args ...string) (int, error) {
	command := strings.Join(args, " ")
	is := func(prefix string) bool { return strings.HasPrefix(command, prefix) }
	if !is("status") && !is("sandbox status") {
		w.ran = append(w.ran, command)
	}
	for prefix, takes := range w.takes {
		if is(prefix) {
			select {
			case <-time.After(takes):
			case <-ctx.Done():
				return plan.ExitInterrupted, nil
			}
		}
	}
	if w.dies != "" && is(w.dies) {
		w.dies = ""
		if is("machine revoke") { // the cluster goes on alone
			w.workers = []string{"worker-1x"}
		}
		w.cancel(errors.New("interrupted"))
		return plan.ExitInterrupted, nil
	}
	for prefix, exit := range w.exits {
		if is(prefix) {
			delete(w.exits, prefix)
			fmt.Fprintln(out, "step  something\nerror  project my-project has no machines\n  fix  wait")
			return exit, nil
		}
	}
	switch {
	case is("infra create"):
		w.created = true
	case is("infra terminate"):
		if !w.created {
			return plan.ExitNothing, nil
		}
		w.created = false
		fmt.Fprintln(out, `{"kind":"step"}`+"\n"+`{"kind":"result","text":"nothing of cluster demo is left in project my-project"}`)
	case is("machine revoke"):
		if !strings.Contains(command, w.workers[0]+" ") {
			return plan.ExitNothing, nil
		}
		w.workers = []string{w.workers[0] + "x"}
	case is("sandbox status"):
		fmt.Fprintf(out, `{"calls":{"list":%d}}`, len(w.ran))
	case is("status"):
		fmt.Fprintf(out, `{"nodes":[{"name":"control-plane-0","role":"control-plane","state":"ready","kubernetes":"v1.36.4","imageVersion":"v1.1.0"},{"name":%q,"role":"worker","state":"ready","kubernetes":"v1.36.4","imageVersion":"v1.1.0"}]}`, w.workers[0])
	}
	return plan.ExitDone, nil
}

// run runs the suite.
func (w *world) run() (*Report, error) {
	ctx, cancel := context.WithCancelCause(w.Context())
	defer cancel(nil)
	w.cancel = cancel
	return Run(ctx, "v1.1.0", w.spec)
}

func verdicts(r *Report) string {
	var out []string
	for _, s := range r.Steps {
		out = append(out, s.ID+" "+s.Verdict)
	}
	return strings.Join(out, ", ")
}

func (w *world) page() string {
	w.Helper()
	b, err := os.ReadFile(filepath.Join(w.spec.Dir, PageFile))
	if err != nil {
		w.Fatal(err)
	}
	return string(b)
}

func TestSuitePasses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	r, err := w.run()
	if err != nil || !r.Passed || r.Ended.IsZero() || w.created {
		t.Fatalf("%v: %s", err, verdicts(r))
	}
	want := []string{
		"infra plan", "infra create --non-interactive --yes", "config measure --write", "init --non-interactive --yes", "verify", "upgrade check --write-config",
		"upgrade apply --non-interactive --yes", "verify", "machine revoke worker-1 --replace --reason conformance --non-interactive --yes", "infra terminate --confirm demo --non-interactive -o json",
	}
	if !slices.Equal(w.ran, want) {
		t.Errorf("ran\n%s\nwant\n%s", strings.Join(w.ran, "\n"), strings.Join(want, "\n"))
	}
	page := w.page()
	for _, text := range []string{"# Conformance of provider gcp\n", "**Passed.**", "2 nodes, Kubernetes v1.36.4, images v1.1.0", "source: a list", "nothing of cluster demo is left in project PROJECT", "not counted"} {
		if !strings.Contains(page, text) {
			t.Errorf("the page lacks %q:\n%s", text, page)
		}
	}
	if strings.Contains(page, "my-project") || strings.Contains(page, "emulated") {
		t.Errorf("the page has\n%s", page)
	}
	if _, err := os.Stat(filepath.Join(w.spec.Dir, LogDir, "init.log")); err != nil {
		t.Error(err)
	}
}

func TestEmulatedSuite(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(s *Spec) { s.Emulated, s.Pay, s.Cost = true, false, Cost{} })
	r, err := w.run()
	if err != nil || !r.Passed {
		t.Fatalf("%v: %s", err, verdicts(r))
	}
	if got := verdicts(r); !strings.HasPrefix(got, "plan skipped, create skipped, measure skipped, init passed") {
		t.Errorf("verdicts %s", got)
	}
	if last := w.ran[len(w.ran)-1]; last != "sandbox down" {
		t.Errorf("the last verb is %q", last)
	}
	if page := w.page(); !strings.HasPrefix(page, "# Conformance of provider gcp (emulated)\n") || !strings.Contains(page, "proves nothing about the vendor") || strings.Contains(page, "budget") {
		t.Errorf("the page has\n%s", page)
	}
	if c := r.step("init").Calls; c == nil || *c != 1 {
		t.Errorf("init has %v calls", c)
	}
}

func (r *Report) step(id string) *Step { return (&suite{report: r}).step(id) }

// TestSuiteFails has each step fail. Everything is deleted then.
func TestSuiteFails(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"infra plan", "infra create", "config measure", "init", "verify", "upgrade check", "upgrade apply", "machine revoke", "status"} {
		w := newWorld(t, nil)
		w.exits[verb] = plan.ExitFailed
		r, err := w.run()
		if err != nil || r.Passed || r.Ended.IsZero() || w.created {
			t.Errorf("%s: %v, %s", verb, err, verdicts(r))
			continue
		}
		n := slices.IndexFunc(r.Steps, func(s Step) bool { return s.Verdict == Failed })
		if n < 0 || !strings.Contains(r.Steps[n].Why, "project PROJECT has no machines") || !strings.HasSuffix(verdicts(r), "terminate passed") {
			t.Errorf("%s: %+v", verb, r.Steps)
		}
		if n+1 < len(r.Steps)-1 && r.Steps[n+1].Verdict != NotRun {
			t.Errorf("%s: the suite went on: %s", verb, verdicts(r))
		}
		if !strings.Contains(w.page(), "**Failed.**") {
			t.Errorf("the page has\n%s", w.page())
		}
	}
}

// TestSuiteResumes interrupts the suite in each verb. It continues there, and repeats nothing before.
func TestSuiteResumes(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"infra plan", "infra create", "config measure", "init", "verify", "upgrade apply", "machine revoke", "infra terminate"} {
		w := newWorld(t, nil)
		w.dies = verb
		_, err := w.run()
		if plan.ExitCode(err) != plan.ExitStopped || !strings.Contains(plan.Remedy(err), "--terminate") {
			t.Fatalf("%s: %v", verb, err)
		}
		if paid := strings.Contains(plan.Remedy(err), "cost money"); paid != (verb != "infra plan") {
			t.Errorf("%s: remedy %q", verb, plan.Remedy(err))
		}
		if !strings.Contains(w.page(), "**Not finished.**") {
			t.Errorf("the page has\n%s", w.page())
		}
		before := len(w.ran)
		r, err := w.run()
		if err != nil || !r.Passed || w.created {
			t.Fatalf("%s: %v, %s", verb, err, verdicts(r))
		}
		if verb == "machine revoke" && !strings.Contains(w.ran[before], " worker-1 ") {
			t.Errorf("another worker is revoked: %s", w.ran[before])
		}
		if !strings.HasPrefix(w.ran[before], verb) {
			t.Errorf("after %s the suite continued with %s", verb, w.ran[before])
		}
	}
}

func TestSuiteTerminates(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.dies = "upgrade apply"
	if _, err := w.run(); err == nil {
		t.Fatal("not interrupted")
	}
	w.spec.Terminate = true
	w.exits["infra terminate"] = plan.ExitFailed
	if _, err := w.run(); err == nil || !strings.Contains(plan.Remedy(err), "--terminate") {
		t.Errorf("a deletion that failed: %v", err)
	}
	r, err := w.run()
	if err != nil || r.Passed || w.created || r.Ended.IsZero() {
		t.Errorf("%v, %s", err, verdicts(r))
	}
	w.spec.Terminate = false // the next suite is a new one
	if r, err = w.run(); err != nil || !r.Passed {
		t.Errorf("%v, %s", err, verdicts(r))
	}
}

// TestSuiteKeepsToTheBudget has verbs that take hours.
func TestSuiteKeepsToTheBudget(t *testing.T) {
	for _, tt := range []struct {
		name   string
		budget float64
		limit  time.Duration
		most   time.Duration // from the beginning of the step that makes machines
	}{
		{name: "budget", budget: 1, most: 2 * time.Hour}, // 4 machines and the rest are 0.5 an hour
		{name: "limit", budget: 100, limit: 90 * time.Minute, most: 90 * time.Minute},
		{name: "default limit", budget: 100, most: DefaultLimit},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, func(s *Spec) { s.Cost.Budget, s.Limit = tt.budget, tt.limit })
				w.takes["infra plan"], w.takes["upgrade apply"], w.takes["infra terminate"] = 10*time.Hour, 10*time.Hour, 15*time.Minute
				begun := time.Now()
				r, err := w.run()
				if err != nil || r.Passed || w.created || r.step("upgrade").Verdict != Stopped || r.step("replace").Verdict != NotRun {
					t.Fatalf("%v, %s", err, verdicts(r))
				}
				if took := time.Since(begun) - 10*time.Hour; took > tt.most {
					t.Errorf("machines existed for %v, want %v at most", took, tt.most)
				}
				if r.Spent <= 0 || r.Spent > r.Cost.Budget {
					t.Errorf("spent %.2f of %.2f", r.Spent, r.Cost.Budget)
				}
			})
		})
	}
	// A suite that was interrupted for a day only deletes.
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		w.dies = "init"
		if _, err := w.run(); err == nil {
			t.Fatal("not interrupted")
		}
		time.Sleep(24 * time.Hour)
		before := len(w.ran)
		r, err := w.run()
		if err != nil || r.Passed || w.created || r.step("init").Verdict != Stopped || r.Spent <= r.Cost.Budget {
			t.Errorf("%v, %s", err, verdicts(r))
		}
		if ran := w.ran[before:]; slices.Contains(ran, "upgrade apply --non-interactive --yes") {
			t.Errorf("ran %v", ran)
		}
	})
}

func TestEstimate(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		cost Cost
		want string
	}{
		{name: "fits", cost: Cost{Budget: 5, Machine: 0.1, Other: 0.1}, want: "4 machines, 3h0m0s, 1.50"},
		{name: "little", cost: Cost{Budget: 1, Machine: 0.1, Other: 0.1}, want: "4 machines, 2h0m0s, 1.00"},
		{name: "too little", cost: Cost{Budget: 0.4, Machine: 0.1, Other: 0.1}, want: "pass a --budget of 0.50 or more"},
		{name: "no budget", cost: Cost{Machine: 0.1}, want: "pass --budget"},
		{name: "no prices", cost: Cost{Budget: 5}, want: "--price-per-hour"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e, err := Spec{Machines: 2, Cost: tt.cost}.Estimate()
			got := fmt.Sprintf("%d machines, %v, %.2f", e.Machines, e.Allowed, e.Most)
			if err != nil {
				got = plan.Remedy(err)
			}
			if !strings.Contains(got, tt.want) {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}

// TestSuiteIsNotPaid checks that nothing is made without the user's word, and that a resumed suite keeps its budget.
func TestSuiteIsNotPaid(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(s *Spec) { s.Pay = false })
	if _, err := w.run(); plan.ExitCode(err) != plan.ExitUnacknowledged || len(w.ran) > 0 || !strings.Contains(err.Error(), "1.50 at most, and the budget is 5.00") || !strings.Contains(plan.Remedy(err), "--i-pay") {
		t.Errorf("%v, ran %v", err, w.ran)
	}
	if _, err := os.Stat(filepath.Join(w.spec.Dir, RecordFile)); err == nil {
		t.Error("a suite was recorded")
	}
	w.spec.Pay, w.spec.Limit, w.dies = true, 2*time.Hour, "init"
	if _, err := w.run(); err == nil {
		t.Fatal("not interrupted")
	}
	w.spec.Cost, w.spec.Limit = Cost{}, 0
	r, err := w.run()
	if err != nil || !r.Passed || r.Cost.Budget != 5 || r.Limit != "2h0m0s" {
		t.Errorf("%v, %+v, limit %s", err, r.Cost, r.Limit)
	}
}

func TestForeignRecords(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	record := filepath.Join(w.spec.Dir, RecordFile)
	for text, want := range map[string]string{
		"{}": "no record of a suite",
		`{"schema":"` + plan.Schema + `","provider":"aws","steps":[{"id":"init","verdict":"running"}]}`: "suite of provider aws",
	} {
		if err := os.WriteFile(record, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := w.run(); err == nil || !strings.Contains(err.Error(), want) || len(w.ran) > 0 {
			t.Errorf("%s: %v, ran %v", text, err, w.ran)
		}
	}
}
