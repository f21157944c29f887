package tui

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"constellation/engine/offline"
	"constellation/internal/golden"
	"constellation/tui/internal/enginefake"
)

// checked runs `check` in a folder with manifests.
func checked(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	if err := os.MkdirAll("deploy", 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"deploy/web.yaml": `apiVersion: networking.k8s.io/v1beta1
kind: Ingress
metadata: {name: web, namespace: shop}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: "we|b[x](y)", namespace: shop}
spec:
  replicas: 1
  template:
    metadata: {labels: {app: web}}
    spec:
      containers: [{name: web, image: "ghcr.io/kedacore/keda:2.20.1"}]
  selector: {matchLabels: {app: web}}
`,
		"deploy/template.yaml": "apiVersion: v1\nkind: Service\nmetadata:\n  name: {{ .Values.name }}\n",
	} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var out, errs bytes.Buffer
	code = App{
		Release: "v1.1.0", Program: "constellation", Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs,
		Env: func(k string) string { return map[string]string{"LANG": "C.UTF-8"}[k] }, Now: func() time.Time { return enginefake.Start },
		CheckOffline: offline.Check,
	}.Run(append([]string{"check"}, args...))
	return out.String(), errs.String(), code
}

func TestCheckOfManifests(t *testing.T) {
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	for name, args := range map[string][]string{
		"manifests.txt": nil, "manifests.json": {"-o", "json"}, "manifests.md": {"-o", "markdown"}, "manifests.sarif": {"-o", "sarif"},
		"ignored.txt": {"--ignore", "single-replica,until=2099-01-01,reason=it is a cache", "--ignore", "pdb-room,until=2099-01-01,reason=x"},
	} {
		out, errs, code := checked(t, append([]string{"--manifests", "deploy", "--kubernetes", "1.37"}, args...)...)
		if code != 0 || errs != "" {
			t.Errorf("%s: exit %d, %s", name, code, errs)
		}
		golden.Equal(t, root+"/testdata/offline/"+name, out)
	}
}

func TestCheckCountsNewFindings(t *testing.T) {
	t.Chdir(t.TempDir())
	baseline, _, _ := checked(t, "--manifests", "deploy", "-o", "json")
	if err := os.WriteFile("baseline.json", []byte(baseline), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("ignore.yaml", []byte("ignore:\n- {id: single-replica, reason: a cache, until: 2099-01-01}\n- {id: add-on-versions, reason: tested by us, until: 2099-01-01}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	removed := "removed-apis-written/ingress/shop/web,until=2099-01-01,reason=x"
	for _, tt := range []struct {
		name string
		args []string
		want int
	}{
		{name: "no threshold", want: 0},
		{name: "a blocking finding", args: []string{"--fail-on", "blocking"}, want: 4},
		{name: "all in the baseline", args: []string{"--fail-on", "warning", "--baseline", "baseline.json"}, want: 0},
		{name: "the blocking one is ignored", args: []string{"--fail-on", "blocking", "--ignore", removed}, want: 0},
		{name: "warnings stay", args: []string{"--fail-on", "warning", "--ignore", removed}, want: 4},
		{name: "all are ignored", args: []string{"--fail-on", "warning", "--ignore", removed, "--ignore-file", "ignore.yaml"}, want: 0},
		{name: "the rule has ended", args: []string{"--fail-on", "blocking", "--ignore", "removed-apis-written,until=2020-01-01,reason=x"}, want: 4},
		{name: "no rule", args: []string{"--ignore", "x"}, want: 2},
		{name: "no baseline", args: []string{"--baseline", "none.json"}, want: 2},
		{name: "no rules", args: []string{"--ignore-file", "deploy/web.yaml"}, want: 2},
		{name: "unknown threshold", args: []string{"--fail-on", "all"}, want: 2},
		{name: "unknown version", args: []string{"--kubernetes", "2.0"}, want: 2},
		{name: "two sources", args: []string{"--from-backup", "x"}, want: 2},
		{name: "files and a cluster", args: []string{"--context", "prod"}, want: 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errs, code := checked(t, append([]string{"--manifests", "deploy", "--kubernetes", "v1.37.0", "-o", "json"}, tt.args...)...)
			if code != tt.want {
				t.Fatalf("exit %d, want %d: %s", code, tt.want, errs)
			}
			if code == 2 {
				return
			}
			var d offlineDocument
			if err := json.Unmarshal([]byte(out), &d); err != nil || d.Exit != code || d.Failing > 0 != (code == 4) {
				t.Errorf("%v: exit %d with %d failing", err, d.Exit, d.Failing)
			}
		})
	}
	if _, errs, code := checked(t, "--manifests", "none"); code != 1 || !strings.Contains(errs, "read manifests") {
		t.Errorf("no folder: exit %d, %s", code, errs)
	}
}

func TestCheckNamesExclusiveFlags(t *testing.T) {
	t.Chdir(t.TempDir())
	if _, errs, code := checked(t, "--manifests", "deploy", "--context", "prod"); code != 2 || !strings.Contains(errs, "--context and --manifests exclude each other") {
		t.Errorf("exit %d, %s", code, errs)
	}
	if _, errs, code := checked(t, "--manifests", "none"); code != 1 || !strings.Contains(errs, "name an existing folder") {
		t.Errorf("exit %d, %s", code, errs)
	}
}
