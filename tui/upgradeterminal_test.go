package tui

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
)

// hopStream writes the events of an upgrade to a file for the fake engine.
func hopStream(t *testing.T) string {
	t.Helper()
	events, _ := enginefake.HopEvents(t, enginefake.HopPlan())
	var b bytes.Buffer
	for _, ev := range events {
		if err := json.NewEncoder(&b).Encode(ev); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "upgrade.jsonl")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return "FAKE_RUN=" + path
}

// In accessible mode questions are plain lines, and no output is overwritten.
func TestAccessibleUpgradeAsksInPlainText(t *testing.T) {
	for _, tt := range []struct {
		name string
		env  []string
		args []string
	}{
		{name: "by the environment", env: []string{"ACCESSIBLE=1"}, args: []string{"upgrade", "apply"}},
		{name: "by a flag", args: []string{"upgrade", "apply", "--accessible"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := startOn(t, 80, 24, append(tt.env, hopStream(t), "FAKE_STAGE=cluster"), nil, tt.args...)
			p.sees("Type local-data to accept it: ")
			p.types("local-data\n")
			p.sees("Type oldest-supports-kubernetes to accept it: ")
			p.types("oldest-supports-kubernetes\n")
			p.sees("Upgrade cluster demo? [y/N]")
			if strings.Contains(p.output(), "join-config        start") {
				t.Errorf("it began before the answer:\n%s", p.output())
			}
			p.types("y\n")
			p.sees("cluster demo runs release v1.1.0")
			if code := p.ends(); code != 0 {
				t.Errorf("exit %d", code)
			}
			out := strings.ReplaceAll(p.output(), "\r\n", "\n")
			if i := strings.IndexAny(out, "\x1b\r\b"); i >= 0 {
				t.Errorf("%q moves the cursor", out[max(0, i-20):min(len(out), i+20)])
			}
		})
	}
}

// The accessible home screen runs the selected action, then asks again.
func TestAccessibleHomeAsksWhatNext(t *testing.T) {
	p := startOn(t, 80, 24, []string{"ACCESSIBLE=1", hopStream(t), "FAKE_STAGE=cluster"}, nil)
	p.sees("cluster   demo, initialised")
	p.sees("7  List past runs: constellation history")
	p.sees("Type a number from 1 to 7, or q to quit: ")
	p.types("8\n")
	p.types("1\n")
	p.sees("control plane  1/1 ready")
	p.seesTimes("Type a number", 3)
	p.types("q\n")
	if code := p.ends(); code != 0 {
		t.Errorf("exit %d", code)
	}
	out := strings.ReplaceAll(p.output(), "\r\n", "\n")
	if n := strings.Count(out, "Type a number"); n != 3 {
		t.Errorf("it asked %d times, want 3:\n%s", n, out)
	}
	if strings.ContainsAny(out, "\x1b\r\b") {
		t.Errorf("something moves the cursor: %q", out)
	}
}

func TestAccessibleInitAsksInPlainText(t *testing.T) {
	p := startOn(t, 80, 24, []string{stream(t, "init"), "FAKE_STAGE=ready"}, nil, "init", "--accessible")
	p.sees("Create cluster ")
	p.sees("? [y/N]")
	p.types("y\n")
	if code := p.ends(); code != 0 {
		t.Errorf("exit %d\n%s", code, p.output())
	}
	if out := strings.ReplaceAll(p.output(), "\r\n", "\n"); strings.ContainsAny(out, "\x1b\r\b") {
		t.Errorf("something moves the cursor: %q", out)
	}
}

// Signals end the console of an upgrade, restore the terminal and print how to come back.
func TestSignalsEndTheConsoleOfAnUpgrade(t *testing.T) {
	for sig, want := range map[syscall.Signal]int{syscall.SIGTERM: plan.ExitTerminated, syscall.SIGHUP: plan.ExitHungUp, syscall.SIGINT: plan.ExitInterrupted} {
		t.Run(sig.String(), func(t *testing.T) {
			skipIfIgnored(t, sig)
			p := startOn(t, 80, 24, []string{hopStream(t), "FAKE_STAGE=cluster", "FAKE_PACE=1"}, nil,
				"upgrade", "apply", "--yes", "--ack", "local-data", "--ack", "oldest-supports-kubernetes")
			p.sees("Let in machines of the new image")
			if err := p.cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if code := p.ends(); code != want {
				t.Errorf("ended with %d, want %d", code, want)
			}
			p.restored()
			p.sees("upgrade apply --ack local-data --ack oldest-supports-kubernetes")
		})
	}
}
