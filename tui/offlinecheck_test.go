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
		{"no threshold", nil, 0},
		{"a blocking finding", []string{"--fail-on", "blocking"}, 4},
		{"all in the baseline", []string{"--fail-on", "warning", "--baseline", "baseline.json"}, 0},
		{"the blocking one is ignored", []string{"--fail-on", "blocking", "--ignore", removed}, 0},
		{"warnings stay", []string{"--fail-on", "warning", "--ignore", removed}, 4},
		{"all are ignored", []string{"--fail-on", "warning", "--ignore", removed, "--ignore-file", "ignore.yaml"}, 0},
		{"the rule has ended", []string{"--fail-on", "blocking", "--ignore", "removed-apis-written,until=2020-01-01,reason=x"}, 4},
		{"no rule", []string{"--ignore", "x"}, 2},
		{"no baseline", []string{"--baseline", "none.json"}, 2},
		{"no rules", []string{"--ignore-file", "deploy/web.yaml"}, 2},
		{"unknown threshold", []string{"--fail-on", "all"}, 2},
		{"unknown version", []string{"--kubernetes", "2.0"}, 2},
		{"two sources", []string{"--from-backup", "x"}, 2},
		{"files and a cluster", []string{"--context", "prod"}, 2},
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
