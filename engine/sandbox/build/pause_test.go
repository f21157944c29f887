package build

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"constellation/internal/testneeds"
)

func TestPause(t *testing.T) {
	needGo(t)
	path, err := Binary(t.Context(), t.TempDir(), DefaultVersion, "pause", nil)
	if err != nil {
		t.Fatal(err)
	}
	start := func(t *testing.T, attr *syscall.SysProcAttr) (*exec.Cmd, *bufio.Reader) {
		t.Helper()
		cmd := exec.Command(path)
		cmd.SysProcAttr = attr
		stderr, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd, bufio.NewReader(stderr)
	}
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run("succeeds on "+sig.String(), func(t *testing.T) {
			cmd, stderr := start(t, nil)
			if line, err := stderr.ReadString('\n'); err != nil || !strings.Contains(line, "not the first process") {
				t.Fatalf("it says %q, %v, want that it is not the first process", line, err)
			}
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("it ends with %v", err)
			}
		})
	}
	t.Run("buries the orphans of its pod", func(t *testing.T) {
		testneeds.Root(t, "to make a process namespace")
		nsenter := testneeds.Program(t, "nsenter", "util-linux")
		cmd, _ := start(t, &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID})
		pid := cmd.Process.Pid
		// The shell ends at once; what it started has no parent but pause, and dies later.
		script := "for i in 1 2 3 4 5; do sleep 0.3 & done"
		if err := exec.Command(nsenter, "-t", strconv.Itoa(pid), "-p", "sh", "-c", script).Run(); err != nil {
			t.Skipf("cannot enter the process namespace: %v", err)
		}
		if n := children(t, pid); n == 0 {
			t.Fatal("no orphan was handed over: nothing is tested")
		}
		until(t, "all orphans are buried", func() bool { return children(t, pid) == 0 })
	})
}

// until waits for a condition, or fails.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("in five seconds it did not happen that %s", what)
		}
	}
}

// children returns how many children a process has, including
// zombies.
func children(t *testing.T, pid int) int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(b), ") ") // after the name: state, parent
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(pid) {
			n++
		}
	}
	return n
}
