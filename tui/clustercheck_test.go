package tui

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/adopt"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/distribution"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/internal/enginefake"
)

// clusters is a kubeconfig with one context, whose check has a fixed result.
type clusters struct{ found []plan.Finding }

func (clusters) Contexts(cluster.Access) ([]string, error) { return []string{"dev", "prod"}, nil }

func (clusters) Select(a cluster.Access) (cluster.Selected, error) {
	return cluster.Selected{Context: "prod", Server: "https://prod.example"}, nil
}

func (c clusters) Check(context.Context, cluster.Selected, time.Duration, check.ForeignRequest, func(plan.Event)) (check.ClusterCheck, error) {
	return check.ClusterCheck{
		Schema: plan.Schema, Time: enginefake.Start, CLI: "v1.1.0", Source: check.SourceCluster, Name: "prod\x1b[31m", Server: "https://prod.example", Kubernetes: "v1.33.4-eks-1", Target: "v1.35.0",
		Distribution:  distribution.Distribution{Name: "eks", Title: "Amazon EKS", Evidence: []string{"API server v1.33.4-eks-1"}, Managed: true},
		Hops:          []check.HopCheck{{From: "v1.33.4-eks-1", To: "v1.34.0", Findings: c.found}, {From: "v1.34.0", To: "v1.35.0", Findings: []plan.Finding{}}},
		NotApplicable: []check.Inapplicable{{ID: "etcd-size", Why: "Amazon EKS runs the control plane outside the cluster"}},
		MissingRules:  "rules:\n- verbs: [\"list\"]\n",
	}, nil
}

func (clusters) List(cluster.Access) (cluster.Contexts, error) {
	return cluster.Contexts{
		List:   []cluster.Context{{Name: "dev", Server: "https://dev.example"}, {Name: "prod", Server: "https://prod.example", Current: true}},
		Select: func(name string) (cluster.Selected, error) { return cluster.Selected{Context: name}, nil },
	}, nil
}

func (clusters) Look(_ context.Context, s cluster.Selected) check.Glance {
	return check.Glance{Context: s.Context, State: check.GlanceReachable, Kubernetes: "v1.35.4"}
}

func (clusters) Reach(context.Context, cluster.Selected) error { return nil }

func (clusters) Examine(context.Context, cluster.Selected, adopt.Request, func(plan.Event)) (adopt.Report, error) {
	return adopt.Report{}, nil
}

func (clusters) Kubeconfig(cluster.Access) ([]byte, error) { return nil, nil }

func (clusters) CheckRole(bool) string { return "kind: ClusterRole\n" }

func checkWith(t *testing.T, found []plan.Finding, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	a := App{
		Release: "v1.1.0", Program: "constellation", Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Clusters: clusters{found},
		Env: func(k string) string { return map[string]string{"LANG": "C.UTF-8"}[k] }, Now: func() time.Time { return enginefake.Start },
		Engine: func(*workspace.Workspace, *slog.Logger) (Engine, error) {
			return &enginefake.Engine{CheckData: enginefake.CheckIn(t, "trouble")}, nil
		},
	}
	code = a.Run(args)
	return out.String(), errs.String(), code
}

func TestCheckWithoutWorkspace(t *testing.T) {
	t.Chdir(t.TempDir())
	block := plan.Finding{ID: "pdb-room", Severity: plan.Block, Title: "PodDisruptionBudget shop/cart never allows an eviction", Source: "disruption", Command: "kubectl -n shop get pdb cart"}
	warn := plan.Finding{ID: "w", Severity: plan.Warn, Title: "a warning"}
	for _, tt := range []struct {
		found []plan.Finding
		args  []string
		code  int
		want  []string
	}{
		{found: nil, want: []string{"nothing found against the upgrade to v1.35.0", "Amazon EKS", "API server v1.33.4-eks-1", "Hop 2: v1.34.0 → v1.35.0", "etcd-size", "- verbs: [\"list\"]"}},
		{found: []plan.Finding{block}, want: []string{"1 finding can stop or break the upgrade"}},
		{found: []plan.Finding{block}, args: []string{"--fail-on", "blocking"}, code: 4, want: nil},
		{found: []plan.Finding{warn}, args: []string{"--fail-on", "blocking"}, want: nil},
		{found: []plan.Finding{warn}, args: []string{"--fail-on=warning"}, code: 4, want: nil},
		{found: nil, args: []string{"--fail-on=warning"}, want: nil},
		{found: nil, args: []string{"--fail-on=never"}, code: 2, want: []string{"want blocking or warning"}},
		{found: nil, args: []string{"--as-group=ops"}, code: 2, want: []string{"--as-group and --as-uid need --as"}},
		{found: nil, args: []string{"--contxt=x"}, code: 2, want: []string{"did you mean --context?"}},
		{found: nil, args: []string{"--print-rbac"}, want: []string{"kind: ClusterRole"}},
		{found: []plan.Finding{block}, args: []string{"--context=prod"}, want: []string{"kubectl --context prod -n shop get pdb cart"}},
		{found: []plan.Finding{block}, args: []string{"-o", "markdown"}, want: []string{"## Check of cluster `prod", "- **block**", "### Not applicable", "```yaml\nrules:"}},
	} {
		out, errs, code := checkWith(t, tt.found, append([]string{"check"}, tt.args...)...)
		if code != tt.code {
			t.Errorf("check %v: exit %d, want %d: %s", tt.args, code, tt.code, errs)
		}
		for _, w := range tt.want {
			if !strings.Contains(out+errs, w) {
				t.Errorf("check %v: output lacks %q:\n%s%s", tt.args, w, out, errs)
			}
		}
		if strings.Contains(out, "\x1b") {
			t.Errorf("check %v: an escape code of the context reaches the terminal", tt.args)
		}
	}
	out, _, code := checkWith(t, []plan.Finding{block}, "check", "-o", "json")
	var k check.ClusterCheck
	if err := json.Unmarshal([]byte(out), &k); err != nil || code != 0 || len(k.Findings()) != 1 || k.Distribution.Name != "eks" {
		t.Errorf("json: exit %d, %v: %s", code, err, out)
	}
}

// TestCheckInAWorkspace checks that check is upgrade check there, and refuses other clusters.
func TestCheckInAWorkspace(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	kubeconfig := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: https://%, certificate-authority-data: YQ==}}]\nusers: [{name: u, user: {client-certificate-data: YQ==, client-key-data: YQ==}}]\n"
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(workspace.ConfigFile, "x")
	write(workspace.KubeconfigFile, strings.Replace(kubeconfig, "%", "own.example", 1))
	out, errs, code := checkWith(t, nil, "check")
	if code != 0 || !strings.Contains(out, "upgrade check of cluster") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	if _, _, code = checkWith(t, nil, "check", "--fail-on=blocking"); code != 4 {
		t.Errorf("exit %d with --fail-on and blocking findings, want 4", code)
	}
	_, errs, code = checkWith(t, nil, "check", "--context", "prod")
	if code != 2 || !strings.Contains(errs, "https://prod.example") || !strings.Contains(errs, "https://own.example") {
		t.Errorf("a kubeconfig of another cluster: exit %d: %s", code, errs)
	}
	write(workspace.KubeconfigFile, strings.Replace(kubeconfig, "%", "prod.example", 1))
	if out, errs, code = checkWith(t, nil, "check", "--context", "prod"); code != 0 || !strings.Contains(out, "upgrade check of cluster") {
		t.Errorf("a kubeconfig of this cluster: exit %d: %s%s", code, out, errs)
	}
}

func TestSuggestions(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"chekc"}, "did you mean check?"},
		{[]string{"upgrade", "aply"}, "did you mean apply?"},
		{[]string{"xyzzy"}, `unknown command "xyzzy" for "constellation"`},
		{[]string{"status", "--outptu", "json"}, "did you mean --output?"},
	} {
		_, errs, code := checkWith(t, nil, tt.args...)
		if code != 2 || !strings.Contains(errs, tt.want) {
			t.Errorf("%v: exit %d, %q, want %q", tt.args, code, errs, tt.want)
		}
	}
}

func TestContextsAreCompleted(t *testing.T) {
	out, _, _ := checkWith(t, nil, "__complete", "check", "--context", "")
	if !strings.HasPrefix(out, "dev\nprod\n") {
		t.Errorf("completions: %q", out)
	}
}

func TestPluginOfKubectl(t *testing.T) {
	var out bytes.Buffer
	a := App{Program: "kubectl constellation", Stdout: &out, Stderr: io.Discard, Env: func(string) string { return "" }}
	if code := a.Run([]string{"check", "--help"}); code != 0 || !strings.Contains(out.String(), "kubectl constellation check [flags]") {
		t.Errorf("exit %d: %s", code, out.String())
	}
}

// kubectl completes a plugin's arguments by a program of another name.
func TestPluginCompletion(t *testing.T) {
	t.Chdir(t.TempDir())
	args := pluginArgs("/usr/local/bin/kubectl_complete-constellation", []string{"check", "--context", ""})
	out, errs, code := checkWith(t, nil, args...)
	if code != 0 || !strings.HasPrefix(out, "dev\nprod\n:") {
		t.Errorf("exit %d: %q %s", code, out, errs)
	}
	if got := pluginArgs("/usr/local/bin/kubectl-constellation", []string{"check"}); len(got) != 1 {
		t.Errorf("the plugin itself gets %q", got)
	}
}

// TestFindingsThatDoNotCountAreMarked checks the text and the markdown of a live cluster.
func TestFindingsThatDoNotCountAreMarked(t *testing.T) {
	t.Chdir(t.TempDir())
	found := []plan.Finding{{ID: "w", Severity: plan.Warn, Title: "a warning"}, {ID: "v", Severity: plan.Warn, Title: "another one"}}
	for _, format := range []string{"text", "markdown"} {
		out, errs, _ := checkWith(t, found, "check", "-o", format, "--ignore", "w,until=2099-01-01,reason=known")
		if !strings.Contains(out, "a warning (ignored until 2099-01-01: known)") || strings.Contains(out, "another one (") {
			t.Errorf("%s: %s%s", format, out, errs)
		}
	}
}

// userOf is a kubeconfig whose contexts have different users.
type userOf struct{ clusters }

func (userOf) Select(a cluster.Access) (cluster.Selected, error) {
	return cluster.Selected{Context: "prod", Server: "https://prod.example", Identity: a.Context}, nil
}

// TestCheckRefusesAnotherUser checks that a workspace's check does not use another user than the
// named context's.
func TestCheckRefusesAnotherUser(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for name, text := range map[string]string{
		workspace.ConfigFile:     "x",
		workspace.KubeconfigFile: "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: https://prod.example, certificate-authority-data: YQ==}}]\nusers: [{name: u, user: {client-certificate-data: YQ==, client-key-data: YQ==}}]\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var errs bytes.Buffer
	a := App{
		Program: "constellation", Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: &errs, Clusters: userOf{}, Env: func(string) string { return "" },
		Engine: func(*workspace.Workspace, *slog.Logger) (Engine, error) {
			return &enginefake.Engine{CheckData: enginefake.CheckIn(t, "trouble")}, nil
		},
	}
	if code := a.Run([]string{"check", "--context", "other"}); code != plan.ExitUsage || !strings.Contains(errs.String(), "its user is not the one of") {
		t.Errorf("exit %d: %s", code, errs.String())
	}
}
