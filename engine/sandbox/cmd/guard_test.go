package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// TestDownOfAGuardedCluster deletes sandboxes on a terminal.
func TestDownOfAGuardedCluster(t *testing.T) {
	const kubeconfig = "apiVersion: v1\nkind: Config\ncurrent-context: admin@live\nclusters: [{name: c, cluster: {server: \"https://live.example:6443\"}}]\nusers: [{name: u}]\n"
	for _, tt := range []struct {
		name, cluster, guard, args, answer string
		question                           string // the name that is wanted; empty: there is no question
		exit                               int
	}{
		{name: "the name", cluster: "prod-eu", guard: "context: prod-*", answer: "prod-eu", question: "prod-eu"},
		{name: "another name", cluster: "prod-eu", guard: "context: prod-*", args: "--yes", answer: "prod-us", question: "prod-eu", exit: plan.ExitUnacknowledged},
		{name: "guarded by its context", cluster: "test", guard: "context: admin@*", answer: "y", question: "test", exit: plan.ExitUnacknowledged},
		{name: "guarded by its server", cluster: "test", guard: "server: https://live.example:6443", answer: "y", question: "test", exit: plan.ExitUnacknowledged},
		{name: "by its name", cluster: "test", guard: "context: prod-*", args: "--name prod-us", answer: "test", question: "prod-us", exit: plan.ExitUnacknowledged},
		{name: "another sandbox", cluster: "prod-eu", guard: "context: prod-*", args: "--name demo"},
		{name: "a cluster without a guard", cluster: "test", guard: "context: prod-*"},
		{name: "a script", cluster: "prod-eu", guard: "context: prod-*", args: "--non-interactive"},
		{name: "a script that reads events", cluster: "prod-eu", guard: "context: prod-*", args: "-o json"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, prefs := t.TempDir(), t.TempDir()
			config, err := workspace.GenerateConfig("sandbox", workspace.GenerateOptions{Name: tt.cluster, Kubernetes: "v1.35.4", Release: "v1.1.0", Image: "v1.1.0", ControlPlanes: 1, Workers: 1})
			if err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Join(prefs, "constellation"), 0o700); err != nil {
				t.Fatal(err)
			}
			running := filepath.Join(dir, ".fake-sandbox") // see rememberedSandbox
			for path, b := range map[string][]byte{
				filepath.Join(dir, workspace.ConfigFile):               config,
				filepath.Join(dir, workspace.KubeconfigFile):           []byte(kubeconfig),
				filepath.Join(prefs, "constellation/preferences.yaml"): []byte("guards:\n- " + tt.guard + "\n"),
				running: nil,
			} {
				if err := os.WriteFile(path, b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			out, exit := onTerminal(t, dir, []string{"XDG_CONFIG_HOME=" + prefs}, tt.answer+"\n", append([]string{"sandbox", "down"}, strings.Fields(tt.args)...)...)
			asked := strings.Contains(out, "guarded by your preferences")
			if exit != tt.exit || asked != (tt.question != "") || asked && !strings.Contains(out, "Type "+tt.question+" to change it") {
				t.Errorf("exit %d, want %d, and a question about %q in\n%s", exit, tt.exit, tt.question, out)
			}
			if _, err := os.Stat(running); (err == nil) != (tt.exit != 0) {
				t.Errorf("the sandbox runs: %t\n%s", err == nil, out)
			}
		})
	}
}

// onTerminal runs the program on a pseudo terminal and returns its output and its exit code.
func onTerminal(t *testing.T, dir string, env []string, typed string, args ...string) (string, int) {
	t.Helper()
	tty, own, err := pty.Open()
	if err != nil {
		t.Skipf("needs pseudo terminals: %v", err)
	}
	defer tty.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Args = append([]string{"constellation"}, args...) // see TestMain
	cmd.Dir = dir
	cmd.Env = append([]string{"TERM=xterm-256color", "HOME=" + dir, "PATH=" + os.Getenv("PATH")}, env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = own, own, own
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 4096)
		for typing := true; ; {
			n, err := tty.Read(buf)
			out.Write(buf[:n])
			if typing && bytes.HasSuffix(out.Bytes(), []byte(" to change it: ")) { // the prompt discards earlier input
				typing = false
				if _, err := io.WriteString(tty, typed); err != nil {
					t.Error(err)
				}
			}
			if err != nil {
				return // the other side of the terminal is closed
			}
		}
	}()
	err = cmd.Wait()
	own.Close()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	<-read
	return out.String(), cmd.ProcessState.ExitCode()
}
