package tui

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// guardedWorkspace returns a workspace of a cluster, and the variable with preferences that guard
// clusters called prod-*.
func guardedWorkspace(t *testing.T, name string) (dir, env string) {
	t.Helper()
	dir, prefs := t.TempDir(), t.TempDir()
	config, err := workspace.GenerateConfig("sandbox", workspace.GenerateOptions{Name: name, Kubernetes: "v1.35.4", Release: "v1.1.0", Image: "v1.1.0", ControlPlanes: 1, Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(prefs, "constellation"), 0o700); err != nil {
		t.Fatal(err)
	}
	for path, b := range map[string][]byte{
		filepath.Join(dir, workspace.ConfigFile):               config,
		filepath.Join(prefs, "constellation/preferences.yaml"): []byte("guards:\n- context: prod-*\n"),
	} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir, "XDG_CONFIG_HOME=" + prefs
}

// TestGuardedVerbsAskForTheName runs verbs that change a cluster on a terminal.
func TestGuardedVerbsAskForTheName(t *testing.T) {
	const question = "Type prod-eu to change it: "
	for _, tt := range []struct {
		name, cluster, args, answer string
		exit                        int
		asks                        bool
	}{
		{name: "the name", cluster: "prod-eu", args: "upgrade prepare --yes", answer: "prod-eu\n", asks: true},
		{name: "another name", cluster: "prod-eu", args: "upgrade prepare --yes", answer: "prod-us\n", exit: plan.ExitUnacknowledged, asks: true},
		{name: "a rollout", cluster: "prod-eu", args: "upgrade pause", answer: "\n", exit: plan.ExitUnacknowledged, asks: true},
		{name: "a node", cluster: "prod-eu", args: "upgrade skip worker-0", answer: "y\n", exit: plan.ExitUnacknowledged, asks: true},
		{name: "init", cluster: "prod-eu", args: "init --accessible --yes", answer: "y\n", exit: plan.ExitUnacknowledged, asks: true},
		{name: "a script", cluster: "prod-eu", args: "upgrade prepare --yes --non-interactive"},
		{name: "a script that reads events", cluster: "prod-eu", args: "upgrade prepare --yes -o json"},
		{name: "a script that pauses", cluster: "prod-eu", args: "upgrade pause --non-interactive"},
		{name: "a cluster without a guard", cluster: "test", args: "upgrade prepare --yes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, env := guardedWorkspace(t, tt.cluster)
			p := startWith(t, "", 120, 30, []string{stream(t, "prepare"), "FAKE_STAGE=cluster", env}, nil, append([]string{"-C", dir}, strings.Fields(tt.args)...)...)
			if tt.asks {
				p.sees(question)
				p.types(tt.answer)
			}
			if code := p.ends(); code != tt.exit || strings.Contains(p.output(), "Type prod-eu") != tt.asks {
				t.Errorf("exit %d, want %d\n%s", code, tt.exit, p.output())
			}
			if tt.exit != 0 {
				p.sees("nothing was changed")
			}
		})
	}
}

// TestGuardedConsoleOfAWorkspace opens the console of a workspace whose cluster is guarded.
func TestGuardedConsoleOfAWorkspace(t *testing.T) {
	dir, env := guardedWorkspace(t, "demo")
	path := filepath.Join(strings.TrimPrefix(env, "XDG_CONFIG_HOME="), "constellation", "preferences.yaml")
	if err := os.WriteFile(path, []byte("guards:\n- context: demo\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := startWith(t, "", 80, 24, []string{stream(t, "init"), "FAKE_STAGE=cluster", env}, nil, "-C", dir)
	p.sees("guarded: read-only until its name is typed")
	p.types("U")
	p.sees("Type demo to unlock")
	p.types("demo\r")
	p.sees("unlocked ") // the painter writes only what changed
	p.types("q")
	if code := p.ends(); code != 0 {
		t.Errorf("exit %d", code)
	}
	if err := os.WriteFile(path, []byte("guard: demo\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p = startWith(t, "", 80, 24, []string{stream(t, "init"), "FAKE_STAGE=cluster", env}, nil, "-C", dir)
	if code := p.ends(); code != plan.ExitUsage {
		t.Errorf("preferences that cannot be read: exit %d\n%s", code, p.output())
	}
	p.sees(`unknown field "guard"`) // the output may arrive after the end
}
