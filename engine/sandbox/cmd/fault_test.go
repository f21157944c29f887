package main

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/plan"
)

// Faults of the whole cloud replace the active one of their kind; faults of machines are
// added one by one.
func TestSetAndClearFaults(t *testing.T) {
	box := &fakeSandbox{running: true}
	for _, tt := range []struct{ args, want string }{
		{"set quota=5 frozen=worker-0", "quota=5 frozen=worker-0"},
		{"set quota=7 frozen=worker-1", "frozen=worker-0 quota=7 frozen=worker-1"},
		{"set frozen=worker-1", "frozen=worker-0 quota=7 frozen=worker-1"},
		{"clear frozen=worker-0", "quota=7 frozen=worker-1"},
		{"set cut=worker-0:cloud registry-empty", "quota=7 frozen=worker-1 cut=worker-0:cloud registry-empty"},
		{"clear quota cut", "frozen=worker-1 registry-empty"},
		{"clear", ""},
	} {
		var out bytes.Buffer
		p := fakeParts()
		p.sandbox = func(*slog.Logger) (engine.Sandbox, error) { return box, nil }
		app := p.app()
		app.Stdin, app.Stdout, app.Stderr, app.Env = strings.NewReader(""), &out, &out, func(string) string { return "" }
		if code := app.Run(append([]string{"sandbox", "fault"}, strings.Fields(tt.args)...)); code != plan.ExitDone {
			t.Fatalf("%s: exit code %d: %s", tt.args, code, &out)
		}
		if got := strings.Join(box.spec.Faults, " "); got != tt.want {
			t.Errorf("after %q the faults are %q, want %q", tt.args, got, tt.want)
		}
	}
}
