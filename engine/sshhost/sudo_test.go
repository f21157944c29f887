package sshhost_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/sshhost/sshdtest"
	"constellation/internal/testneeds"
)

// sudoers starts a server with a user of its own, whom these rules concern.
func sudoers(t *testing.T, rules string) *sshdtest.Server {
	t.Helper()
	return sshdtest.Start(t, sshdtest.Sudoers(t, rules))
}

// asks returns options that allow sudo and answer a prompt for its password.
func asks(s *sshdtest.Server, answer string) (o sshhost.Options, asked *int) {
	o, asked = s.Options(), new(int)
	o.Target.Sudo = true
	o.SudoPassword = func(_ context.Context, t sshhost.Target) ([]byte, error) {
		*asked++
		return []byte(answer), nil
	}
	return o, asked
}

var whoami = sshhost.Command{Argv: []string{"sh", "-c", "id -u; cat"}, Root: true}

// asRoot runs a command as root with this stdin, and checks that it got the whole of it and nothing else.
func asRoot(t *testing.T, h *sshhost.Host, stdin string) {
	t.Helper()
	c := whoami
	c.Stdin = strings.NewReader(stdin)
	if r := run(t, h, c); string(r.Stdout) != "0\n"+stdin || len(r.Stderr) > 0 || r.Exit != 0 {
		t.Errorf("root printed %q and %q, want 0 and %q", r.Stdout, r.Stderr, stdin)
	}
}

func TestSudoWithPassword(t *testing.T) {
	t.Parallel()
	s := sudoers(t, "tester ALL=(ALL) ALL")
	o, asked := asks(s, "right horse")
	h := dial(t, o)
	for _, stdin := range []string{"for the command\nand more", ""} {
		asRoot(t, h, stdin)
	}
	if *asked != 1 {
		t.Errorf("asked %d times for a password", *asked)
	}
	r := run(t, h, sshhost.Command{Argv: []string{"sh", "-c", "echo out; echo err >&2; exit 5"}, Root: true})
	if string(r.Stdout) != "out\n" || string(r.Stderr) != "err\n" || r.Exit != 5 {
		t.Errorf("%q %q %d", r.Stdout, r.Stderr, r.Exit)
	}
	// The password is in no argument of a process and in no environment.
	r = run(t, h, sshhost.Command{Argv: []string{"sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c 'right[ ]horse'"}, Root: true})
	if string(r.Stdout) != "0\n" {
		t.Errorf("%s processes show the password", r.Stdout)
	}
	// sudo keeps no credentials for others.
	if r = run(t, h, sshhost.Command{Argv: []string{"sudo", "-n", "true"}}); r.Exit == 0 {
		t.Error("sudo needs no password any more")
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := h.Upload(t.Context(), file, 0o640, 5, strings.NewReader("hello")); err != nil || read(t, file) != "hello" {
		t.Errorf("upload by sudo: %v", err)
	}
	noRemains(t, h, filepath.Dir(file), "file")
}

func TestSudoRefuses(t *testing.T) {
	t.Parallel()
	s := sudoers(t, "tester ALL=(ALL) ALL")
	o := s.Options()
	_, err := dial(t, o).Run(t.Context(), whoami)
	checkError(t, err, sshhost.ErrNotRoot, "--sudo")
	o.Target.Sudo = true
	_, err = dial(t, o).Run(t.Context(), whoami)
	checkError(t, err, sshhost.ErrSudoPassword, "NOPASSWD")
	o, asked := asks(s, "wrong secret")
	_, err = dial(t, o).Run(t.Context(), whoami)
	checkError(t, err, sshhost.ErrSudoPassword, "is wrong")
	if strings.Contains(err.Error()+plan.Remedy(err)+s.Log(t), "wrong secret") {
		t.Error("an error or a log has the password")
	}
	if *asked != 1 {
		t.Errorf("asked %d times", *asked)
	}

	none := sudoers(t, "root ALL=(ALL) ALL")
	o, _ = asks(none, "right horse")
	_, err = dial(t, o).Run(t.Context(), whoami)
	checkError(t, err, sshhost.ErrSudoRefused, "tester ALL=(ALL) ALL")
	tty := sudoers(t, "Defaults requiretty\ntester ALL=(ALL) NOPASSWD: ALL")
	o, _ = asks(tty, "right horse")
	_, err = dial(t, o).Run(t.Context(), whoami)
	checkError(t, err, sshhost.ErrSudoRefused, "!requiretty")
}

func TestSudoWithoutPassword(t *testing.T) {
	t.Parallel()
	o, asked := asks(sudoers(t, "tester ALL=(ALL) NOPASSWD: ALL"), "x")
	asRoot(t, dial(t, o), "stdin\n")
	if *asked != 0 {
		t.Errorf("asked %d times for a password that sudo does not need", *asked)
	}
}

// TestSudoIgnoresPassword has a password that sudo does not read, because its rules changed: it must not
// become the command's input.
func TestSudoIgnoresPassword(t *testing.T) {
	t.Parallel()
	s := sudoers(t, "tester ALL=(ALL) NOPASSWD: ALL")
	o, _ := asks(s, "right horse")
	h := dial(t, o)
	h.SetPassword([]byte("right horse"))
	asRoot(t, h, "input of the command")
}

func TestSudoThatIsTooSlow(t *testing.T) {
	t.Parallel()
	config := sshdtest.Sudoers(t, "tester ALL=(ALL) NOPASSWD: ALL")
	slow := filepath.Join(t.TempDir(), "sudo")
	if err := os.WriteFile(slow, []byte("#!/bin/sh\nexec sleep 60\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	config.Bind[testneeds.Program(t, "sudo", "sudo")] = slow
	o := sshdtest.Start(t, config).Options()
	o.Target.Sudo, o.Timeout = true, 5*time.Second
	_, err := dial(t, o).Run(t.Context(), whoami)
	checkError(t, err, sshhost.ErrSudoRefused, "--timeout")
	if err == nil || !strings.Contains(err.Error(), "within 5s") {
		t.Errorf("the error lacks the limit: %v", err)
	}
}
