package tui

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/creack/pty"
)

// `make demo` exits with 0 when the user leaves the console, and prints how to come back.
// A failure keeps its exit code.
func TestDemoExitCode(t *testing.T) {
	script, err := os.ReadFile("../.ci/demo.sh") // Go repeats the test if this process reads a changed file
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ console, want int }{{0, 0}, {3, 0}, {7, 0}, {1, 1}, {4, 4}, {130, 130}} {
		t.Run(fmt.Sprintf("exit %d", tt.console), func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
				t.Fatal(err)
			}
			program := fmt.Sprintf("#!/bin/sh\n[ \"$1\" = sandbox ] && exit 0\necho console \"$@\"\nexit %d\n", tt.console)
			if err := os.WriteFile(filepath.Join(dir, "bin", "constellation"), []byte(program), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "Makefile"), []byte("bin/kubectl:\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			tty, own, err := pty.Open()
			if err != nil {
				t.Skipf("needs pseudo terminals: %v", err)
			}
			defer tty.Close()
			cmd := exec.Command("bash", "-c", string(script), "demo.sh")
			cmd.Dir = dir
			cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "DEMO_DIR=" + filepath.Join(dir, ".demo"), "KUBERNETES=v1.35.4"}
			cmd.Stdin, cmd.Stdout, cmd.Stderr = own, own, own
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
			err = cmd.Start()
			own.Close()
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(tty) // its end is an error of the terminal
			var exit *exec.ExitError
			if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			out := string(b)
			if code := cmd.ProcessState.ExitCode(); code != tt.want {
				t.Errorf("ended with %d, want %d\n%s", code, tt.want, out)
			}
			if !strings.Contains(out, "console -C .demo\r\n") || !strings.Contains(out, "Back to the console:  bin/constellation -C .demo\r\n") {
				t.Errorf("no command to come back:\n%s", out)
			}
			if left := strings.Contains(out, "The cluster is incomplete"); left != (tt.console == 7) {
				t.Errorf("says that the user left: %t\n%s", left, out)
			}
		})
	}
}
