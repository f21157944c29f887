package tui

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/distribution"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
)

// securityResults has each status, evidence of each form, and a name that must not reach the terminal.
func securityResults() []check.SecurityResult {
	of := func(id, section, title string, level int, s check.SecurityStatus) check.SecurityResult {
		return check.SecurityResult{SecurityCheck: check.SecurityCheck{ID: id, Section: section, Title: title, Sources: []string{strings.ToUpper(id[:3]) + id[3:]}, Level: level, Automated: true, LooksAt: "a field of each kubelet", Remedy: "do something"}, Status: s}
	}
	mode := of("cis-1.1.1", "1.1 Files of control planes", "The manifest is private", 1, check.SecurityNotVisible)
	mode.Reason, mode.Command, mode.Automated, mode.LooksAt = "the API does not show files of machines", "stat -c '%a %U:%G %n' /etc/kubernetes/manifests/kube-apiserver.yaml", false, "mode and owner of a file"
	second, third := mode, mode
	second.ID, third.ID = "cis-1.1.2", "cis-1.1.3"
	profiles := of("cis-1.2.15", "1.2 API server", "Profiles of the API server are off", 1, check.SecurityFailed)
	profiles.Evidence = []check.Evidence{{Text: "--profiling is not set", Wrong: true, Objects: []string{"node/a\x1b[31m", "node/b"}, More: 3}}
	passed := of("cis-1.2.2", "1.2 API server", "No file with fixed tokens is used", 1, check.SecurityPassed)
	env := of("cis-5.4.1", "5.4 Secrets", "Pods read Secrets from files, not from their environment", 2, check.SecurityFailed)
	env.Evidence = []check.Evidence{{Text: "a variable comes from a Secret", Wrong: true, Objects: []string{"deployment/shop/api", "deployment/shop/web"}}}
	limits := of("nsa-resource-limits", "NSA/CISA", "Containers have limits of CPU and memory", 0, check.SecurityManual)
	limits.Automated = false
	absent := of("cis-4.3.1", "5.4 Secrets", "kube-proxy serves metrics on the loopback address alone", 1, check.SecurityNotApplicable)
	absent.Reason = "there is no kube-proxy"
	return []check.SecurityResult{mode, second, third, passed, profiles, env, absent, limits}
}

func (clusters) Security(_ context.Context, s cluster.Selected, _ time.Duration, only string, _ func(plan.Event)) (check.Security, error) {
	if s.Context == "down" {
		return check.Security{}, errors.New("the API server does not answer")
	}
	out := check.Security{
		Schema: plan.Schema, Time: enginefake.Start, CLI: "v1.1.0", Name: "prod\x1b[31m", Server: "https://prod.example", Kubernetes: "v1.36.4", Nodes: 5, Workloads: 9, Counts: map[check.SecurityStatus]int{},
		Distribution: distribution.Distribution{Name: "kubeadm", Title: "kubeadm"}, Guides: []check.Guide{{ID: "cis", Title: "CIS Kubernetes Benchmark", Version: "1.12"}},
		MissingRules: "rules:\n- verbs: [\"list\"]\n",
	}
	for _, r := range securityResults() {
		if only == "" || r.ID == only {
			out.Results = append(out.Results, r)
			out.Counts[r.Status]++
		}
	}
	return out, nil
}

func (clusters) SecurityChecks() (out []check.SecurityCheck) {
	for _, r := range securityResults() {
		out = append(out, r.SecurityCheck)
	}
	return out
}

func (clusters) SecurityRole() string { return "kind: ClusterRole # security\n" }

func TestSecurityIsPrinted(t *testing.T) {
	t.Chdir(t.TempDir())
	const ignoreAPI = "--ignore=cis-5.4.1/deployment/shop/api,until=2030-01-01,reason=an old program"
	const ignoreProfiles = "--ignore=cis-1.2.15,until=2030-01-01,reason=for now"
	for _, tt := range []struct {
		name string
		args []string
		code int
		want []string
	}{
		{name: "text", args: nil, want: []string{
			"security of prod", "CIS Kubernetes Benchmark 1.12", "1.1.1 to 1.1.3 (3 checks): the API does not show files", "1 failed, 1 passed",
			"--profiling is not set: a", "b and 3 more", "fix do something", "not applicable: there is no kube-proxy", "2 failed", "1 of level 1", "- verbs: [\"list\"]", "[nsa-resource-limits]",
		}},
		{name: "the role", args: []string{"--print-rbac"}, want: []string{"kind: ClusterRole # security"}},
		{name: "one check", args: []string{"--explain", "1.2.15"}, want: []string{"cis-1.2.15", "level 1, decided by this program", "wrong", "node/b", "and 3 more", "a field of each kubelet"}},
		{name: "a file", args: []string{"--explain=cis-1.1.1"}, want: []string{"decided by what you see on the machine", "stat -c"}},
		{name: "a check for people", args: []string{"--explain", "resource-limits"}, want: []string{"decided by a person"}},
		{name: "an unknown check", args: []string{"--explain", "9.9.9"}, code: plan.ExitUsage, want: []string{"no check has this ID"}},
		{name: "markdown", args: []string{"-o", "markdown"}, want: []string{"## Security of `prod", "| `cis-1.2.15` | failed |", "```yaml\nrules:"}},
		{name: "level 1 blocks", args: []string{"--fail-on=blocking"}, code: plan.ExitBlocked, want: nil},
		{name: "level 1 ignored", args: []string{"--fail-on=blocking", ignoreProfiles}, want: []string{"cis-1.2.15 is ignored until 2030-01-01: for now."}},
		{name: "level 2 warns", args: []string{"--fail-on=warning", ignoreProfiles}, code: plan.ExitBlocked, want: nil},
		{name: "one of two workloads ignored", args: []string{"--fail-on=warning", ignoreProfiles, ignoreAPI}, code: plan.ExitBlocked, want: []string{"cis-5.4.1 deployment/shop/api is ignored"}},
		{name: "with a target", args: []string{"--kubernetes=v1.37"}, code: plan.ExitUsage, want: nil},
		{name: "SARIF", args: []string{"-o", "sarif"}, want: []string{`"cis-5.4.1"`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errs, code := checkWith(t, nil, append([]string{"check", "--security"}, tt.args...)...)
			if code != tt.code {
				t.Errorf("exit %d, want %d: %s", code, tt.code, errs)
			}
			for _, w := range tt.want {
				if !strings.Contains(out+errs, w) {
					t.Errorf("output lacks %q:\n%s%s", w, out, errs)
				}
			}
			if strings.Contains(out, "\x1b") {
				t.Error("an escape code of the cluster reaches the terminal")
			}
		})
	}
}

func TestSecurityInJSON(t *testing.T) {
	t.Chdir(t.TempDir())
	out, errs, code := checkWith(t, nil, "check", "--security", "-o", "json", "--fail-on=warning")
	var d securityDocument
	if err := json.Unmarshal([]byte(out), &d); err != nil || code != plan.ExitBlocked {
		t.Fatalf("exit %d, %v: %s", code, err, errs)
	}
	var objects []string
	for _, f := range d.Findings {
		objects = append(objects, f.ID+" "+string(f.Severity)+" "+strings.Join(f.Objects, " "))
	}
	want := []string{"cis-1.1.1 not-checked ", "cis-1.1.2 not-checked ", "cis-1.1.3 not-checked ", "cis-1.2.15 block ", "cis-5.4.1 warn deployment/shop/api", "cis-5.4.1 warn deployment/shop/web"}
	if strings.Join(objects, "\n") != strings.Join(want, "\n") || d.Failing != 3 || d.Exit != plan.ExitBlocked || len(d.Results) != 8 {
		t.Errorf("findings\n%s\nfailing %d, exit %d, %d results", strings.Join(objects, "\n"), d.Failing, d.Exit, len(d.Results))
	}
}
