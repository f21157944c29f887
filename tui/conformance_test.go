package tui

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/conformance"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/internal/enginefake"
)

// conforms runs the program in dir with a suite that has an outcome. It returns what the suite was given.
func conforms(t *testing.T, dir string, passed bool, args ...string) (spec *conformance.Spec, out, errs string, code int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code = App{
		Release: "v1.1.0", Program: "constellation", Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr,
		Env: func(string) string { return "" }, Now: func() time.Time { return enginefake.Start },
		Engine: func(*workspace.Workspace, *slog.Logger) (Engine, error) { return &enginefake.Engine{}, nil },
		Conform: func(_ context.Context, tool string, s conformance.Spec) (*conformance.Report, error) {
			spec = &s
			s.Tell("Make a cluster of the machines")
			verdict := conformance.Passed
			if !passed {
				verdict = conformance.Failed
			}
			return &conformance.Report{
				Schema: plan.Schema, Tool: tool, Provider: s.Provider, Emulated: s.Emulated, Started: enginefake.Start, Ended: enginefake.Start.Add(time.Hour), Passed: passed,
				Steps: []conformance.Step{{ID: "init", Title: "Make a cluster of the machines", Verdict: verdict, Why: "because"}},
			}, nil
		},
	}.Run(append([]string{"-C", dir, "conformance"}, args...))
	return spec, stdout.String(), stderr.String(), code
}

func TestConformance(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if spec, _, errs, code := conforms(t, dir, true, "--provider", "gcp"); code != plan.ExitUsage || spec != nil || !strings.Contains(errs, "config generate gcp") {
		t.Errorf("without a configuration: exit %d, %s", code, errs)
	}
	if _, errs, code := func() (string, string, int) {
		var out, errs bytes.Buffer
		return out.String(), errs.String(), App{Program: "constellation", Stdout: &out, Stderr: &errs, Stdin: strings.NewReader(""), Env: func(string) string { return "" }, Now: time.Now}.Run([]string{"-C", dir, "config", "generate", "gcp"})
	}(); code != plan.ExitDone {
		t.Fatalf("exit %d, %s", code, errs)
	}
	for _, tt := range []struct {
		name   string
		args   string
		passed bool
		code   int
		out    string
		errs   string
	}{
		{name: "no provider", code: plan.ExitUsage, errs: "want gcp"},
		{name: "another provider", args: "--provider aws", code: plan.ExitUsage, errs: "want gcp"},
		{name: "passed", args: "--provider gcp --budget 5 --price-per-hour 0.1 --other-per-hour 0.2 --price-source list --limit 2h --i-pay", passed: true, out: "passed   Make a cluster of the machines: because\n\npassed\n", errs: "Make a cluster"},
		{name: "failed", args: "--provider gcp --i-pay", code: plan.ExitFailed, out: "\nfailed\n", errs: "not all steps passed"},
		{name: "markdown", args: "--provider gcp --i-pay -o markdown", passed: true, out: "# Conformance of provider gcp\n"},
		{name: "terminate", args: "--provider gcp --terminate", passed: true, out: "passed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			spec, out, errs, code := conforms(t, dir, tt.passed, strings.Fields(tt.args)...)
			if code != tt.code || !strings.Contains(out, tt.out) || !strings.Contains(errs, tt.errs) {
				t.Errorf("exit %d\n%s\n%s", code, out, errs)
			}
			if (spec != nil) != (code != plan.ExitUsage) {
				t.Errorf("the suite got %+v", spec)
			}
			if tt.name == "passed" {
				want := conformance.Cost{Budget: 5, Machine: 0.1, Other: 0.2, Source: "list"}
				if spec.Cost != want || !spec.Pay || spec.Terminate || spec.Limit != 2*time.Hour || spec.Machines != 3 || spec.Emulated || spec.Cluster == "" || strings.Join(spec.Hide, " ") != "my-project" {
					t.Errorf("the suite got %+v", spec)
				}
			}
		})
	}
	_, out, _, _ := conforms(t, dir, true, "--provider", "gcp", "-o", "json")
	var r conformance.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || !r.Passed || r.Tool != "v1.1.0" {
		t.Errorf("%v: %s", err, out)
	}
	if err := os.Remove(filepath.Join(dir, workspace.ConfigFile)); err != nil {
		t.Fatal(err)
	}
	if spec, _, errs, code := conforms(t, dir, true, "--provider", "gcp", "--terminate"); code != plan.ExitDone || !spec.Terminate {
		t.Errorf("without a configuration: exit %d, %s", code, errs)
	}
}
