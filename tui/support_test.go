package tui

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/support"
	"constellation/tui/internal/enginefake"
)

// bundled runs support-bundle, and returns its request and output.
func bundled(t *testing.T, result support.Result, fail error, args ...string) (got *support.Request, out, errs string, code int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	app := App{
		Release: "v1.1.0", Program: "constellation", Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr, Clusters: clusters{},
		Env: func(k string) string { return map[string]string{"LANG": "C.UTF-8"}[k] }, Now: func() time.Time { return enginefake.Start },
		SupportRole: func() string { return "kind: ClusterRole # support\n" },
		WriteSupportBundle: func(_ context.Context, r support.Request) (support.Result, error) {
			got = &r
			r.Progress("nodes\x1b[31m")
			result.File = r.File
			return result, fail
		},
	}
	code = app.Run(append([]string{supportVerb}, args...))
	return got, stdout.String(), stderr.String(), code
}

func TestSupportBundleRequests(t *testing.T) {
	t.Chdir(t.TempDir())
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	const named = "constellation-support-prod-20261121T070501Z.tar.gz"
	for _, tt := range []struct {
		name string
		args []string
		want support.Request
	}{
		{name: "without flags", args: nil, want: support.Request{File: filepath.Join(wd, named), MaxFile: support.DefaultMaxFile, MaxSize: support.DefaultMaxSize}},
		{name: "a file", args: []string{"--to", "x.tar.gz", "--overwrite", "--non-interactive"}, want: support.Request{File: filepath.Join(wd, "x.tar.gz"), Overwrite: true, MaxFile: support.DefaultMaxFile, MaxSize: support.DefaultMaxSize}},
		{name: "a folder", args: []string{"--to", wd}, want: support.Request{File: filepath.Join(wd, named), MaxFile: support.DefaultMaxFile, MaxSize: support.DefaultMaxSize}},
		{name: "selected", args: []string{"--since", "6h", "--node", "a", "--node", "b", "--max-file", "1", "--max-size", "2"}, want: support.Request{File: filepath.Join(wd, named), Since: enginefake.Start.Add(-6 * time.Hour), Nodes: []string{"a", "b"}, MaxFile: 1 << 20, MaxSize: 2 << 20}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, _, errs, code := bundled(t, support.Result{}, nil, tt.args...)
			if code != plan.ExitDone || r == nil {
				t.Fatalf("exit %d: %s", code, errs)
			}
			if r.File != tt.want.File || r.Overwrite != tt.want.Overwrite || !r.Since.Equal(tt.want.Since) || !slices.Equal(r.Nodes, tt.want.Nodes) || r.MaxFile != tt.want.MaxFile || r.MaxSize != tt.want.MaxSize {
				t.Errorf("got %+v, want %+v", r, tt.want)
			}
			if r.Workspace != nil || r.Cluster == nil || r.Cluster.Context != "prod" {
				t.Errorf("workspace %v, cluster %+v", r.Workspace, r.Cluster)
			}
		})
	}
	for _, bad := range [][]string{{"--max-file", "0"}, {"--max-size", "5000"}, {"--since", "soon"}, {"--as-uid", "1"}} {
		if r, _, errs, code := bundled(t, support.Result{}, nil, bad...); code != plan.ExitUsage || r != nil {
			t.Errorf("%v: exit %d, %s", bad, code, errs)
		}
	}
	if _, out, _, code := bundled(t, support.Result{}, nil, "--print-rbac"); code != plan.ExitDone || out != "kind: ClusterRole # support\n" {
		t.Errorf("--print-rbac: exit %d, %s", code, out)
	}
}

// TestSupportBundleOfAWorkspaceWithoutACluster has no kubeconfig, and then one that is damaged.
func TestSupportBundleOfAWorkspaceWithoutACluster(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	if err := os.MkdirAll(filepath.Join(dir, plan.RunsDir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "constellation-conf.yaml"), []byte("version: v9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r, _, errs, code := bundled(t, support.Result{}, nil)
	if code != plan.ExitDone || r.Workspace == nil || r.Cluster != nil || r.WhyNoCluster == nil || plan.Remedy(r.WhyNoCluster) == "" {
		t.Errorf("exit %d, %s: %+v", code, errs, r)
	}
}

func TestSupportBundleOutput(t *testing.T) {
	t.Chdir(t.TempDir())
	ix := support.Index{Schema: plan.Schema, Context: "prod", Server: "https://prod.example", Reachable: true, Files: make([]support.File, 40), Redacted: []support.Redaction{{Kind: "bootstrap token", Count: 2}, {Kind: "annotation", Count: 3}}}
	for range 12 {
		ix.Missing = append(ix.Missing, support.Missing{What: "logs\x1b[31m", Why: "the container has not started"})
	}
	ix.Missing = append(ix.Missing, support.Missing{What: "nodes", Why: support.RightMissing + "list nodes"})
	_, out, errs, code := bundled(t, support.Result{SHA256: "abcd", Size: 3 << 20, Index: ix}, nil, "--to", "it's.tar.gz")
	for _, want := range []string{"40 files written, 3.0 MiB", "sha256 abcd", "5 values redacted", "the container has not started", "1 part not collected for lack of a right", "and 4 more, in INDEX.txt", "Read it before you send it", "INDEX.txt"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q:\n%s", want, out)
		}
	}
	if code != plan.ExitDone || strings.Contains(out+errs, "\x1b") {
		t.Errorf("exit %d; %q %q", code, out, errs)
	}
	ix.Reachable = false
	if _, out, _, _ := bundled(t, support.Result{Index: ix}, nil); !strings.Contains(out, "the cluster did not answer") {
		t.Errorf("an unreachable cluster:\n%s", out)
	}
	_, out, _, code = bundled(t, support.Result{SHA256: "abcd", Index: ix}, nil, "-o", "json")
	var d support.Result
	if err := json.Unmarshal([]byte(out), &d); err != nil || code != plan.ExitDone || d.SHA256 != "abcd" || len(d.Index.Missing) != 13 {
		t.Errorf("exit %d, %v: %s", code, err, out)
	}
	fail := &plan.Error{Op: "write x", Err: errors.New("disk full"), Remedy: "free some space"}
	if _, out, errs, code := bundled(t, support.Result{}, fail); code != plan.ExitFailed || out != "" || !strings.Contains(errs, "disk full") {
		t.Errorf("exit %d, %q, %q", code, out, errs)
	}
}
