package tui

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/machinecheck"
	"constellation/engine/plan"
)

// askingForSudo checks a machine after a prompt for the password of sudo.
func (e *enrolStage) askingForSudo(ctx context.Context, r machinecheck.Request, _ func(machinecheck.Result)) []machinecheck.Result {
	out := e.checked[:len(r.Targets)]
	if b, err := r.SSH.SudoPassword(ctx, r.Targets[0]); err != nil || string(b) != "hunter2 q" {
		out[0].Err, out[0].Error = lostConn, "wrong password"
	}
	return out
}

// A user adds the first machine with the keys of a terminal, and gives it back. The password is never written.
func TestMachineIsAddedOnATerminal(t *testing.T) {
	e := newEnrolStage(t)
	p := startOn(t, 80, 24, nil, nil, "-C", e.ws.Dir())
	p.sees("Prepare the machines")
	p.types("m")
	p.sees("No machine was added yet")
	p.types("a")
	p.sees("private key")
	p.types("root@10.0.0.11\t\t\x1b[C\r")
	p.sees("for sudo")
	p.types("hunter2 q\r")
	p.sees("Make these changes on 1 machine")
	p.accepts("prepared as control plane")
	p.types("\x1b")
	p.sees("waits for init")
	if got := e.machines(); len(got) != 1 || got[0].Name != "node-11" {
		t.Errorf("the configuration lists %+v", got)
	}
	p.types("\r")
	p.sees("not attested")
	p.types("x\r")
	p.sees("Reset and restore the machine")
	p.accepts("node-11 is removed")
	p.types("q")
	if code := p.ends(); code != 0 {
		t.Errorf("ended with %d", code)
	}
	p.restored()
	p.sees("machines were changed; come back: ")
	if strings.Contains(p.output(), "hunter2") {
		t.Errorf("the password was written:\n%q", p.output())
	}
	if got := e.machines(); len(got) > 0 {
		t.Errorf("the configuration lists %+v", got)
	}
}

// A user adds a machine that calls: the command works as it was written to a file, which is deleted. Esc makes it worthless.
func TestMachineThatCallsIsAddedOnATerminal(t *testing.T) {
	e := newCallStage(t)
	p := startOn(t, 80, 24, []string{"FAKE_BOOTSTRAPPER=" + e.bootstrapper}, nil, "-C", e.ws.Dir())
	file := filepath.Join(e.ws.Dir(), "constellation-worker-1-command.sh")
	waitFor := func(what string, is func() bool) {
		t.Helper()
		for end := time.Now().Add(stepTimeout); !is(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s; what was written:\n%q", what, p.output())
			}
		}
	}
	printed := func() (text string) {
		t.Helper()
		waitFor("the command is not in its file", func() bool {
			p.types("w") // it is off until the console listens
			b, err := os.ReadFile(file)
			text = string(b)
			return err == nil && strings.HasSuffix(text, "\nCONSTELLATION\n")
		})
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%v %v", err, info)
		}
		return text
	}
	deleted := func() {
		t.Helper()
		waitFor("the file is there after the wait", func() bool {
			_, err := os.Stat(file)
			return errors.Is(err, fs.ErrNotExist)
		})
	}
	p.sees("Prepare the machines")
	p.types("m")
	p.sees("No machine was added yet")
	p.types("a")
	p.sees("private key")
	p.types("\x1b[A\x1b[C\tworker_1=127.0.0.1\t")
	p.sees("cannot name a node")
	p.types("\x1b[A\x15worker-1=127.0.0.1\r")
	p.sees("Command for worker-1")
	void := printed()
	p.types("\x1b")
	p.sees("worthless now")
	deleted()
	if _, err := e.call(void, 0); err == nil {
		t.Error("the token of a wait that was cancelled is accepted")
	}
	p.types("\r")
	if lines, err := e.call(printed(), 0); err != nil || !strings.Contains(lines, "this machine is prepared as worker-1") {
		t.Fatalf("the call: %v\n%s", err, lines)
	}
	p.sees("Next: i runs init")
	deleted()
	if got := e.machines(); len(got) != 1 || got[0].Name != "worker-1" || got[0].Group != "control-plane" {
		t.Errorf("the configuration lists %+v", got)
	}
	p.types("q")
	if code := p.ends(); code != 0 {
		t.Errorf("ended with %d", code)
	}
	p.restored()
}

// Ctrl-C twice does not wait for a machine that is worked on. Its command is deleted all the same.
func TestCommandIsDeletedWhenTheConsoleIsLeftAtOnce(t *testing.T) {
	e := newCallStage(t)
	p := startOn(t, 80, 24, []string{"FAKE_BOOTSTRAPPER=" + e.bootstrapper, "FAKE_ENDLESS=1"}, nil, "-C", e.ws.Dir())
	p.sees("Prepare the machines")
	p.types("m")
	p.sees("No machine was added yet")
	p.types("a")
	p.sees("private key")
	p.types("\x1b[A\x1b[C\tworker-1=127.0.0.1\r")
	p.sees("set -eu")
	p.types("w")
	p.sees("constellation-worker-1-command.sh")
	file := filepath.Join(e.ws.Dir(), "constellation-worker-1-command.sh")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	called := make(chan struct{})
	go func() {
		defer close(called)
		_, _ = e.call(string(text), 0) // it ends with the console
	}()
	p.sees("check the machine")
	p.types("\x03")
	p.sees("Leave this run?")
	p.types("\x03")
	if code := p.ends(); code != plan.ExitStopped {
		t.Errorf("ended with %d", code)
	}
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the command is there after the console: %v", err)
	}
	p.restored()
	<-called
}

// accepts gives the affirmative answer to a question, and waits for its result.
func (p *onTerminal) accepts(result string) {
	p.t.Helper()
	p.types("\x1b[C")
	for end := time.Now().Add(stepTimeout); !strings.Contains(p.output(), result) && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		p.types("\r") // it is accepted once the question has been on the screen for a moment
	}
	p.sees(result)
}
