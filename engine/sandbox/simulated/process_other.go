//go:build !linux

package simulated

import (
	"context"
	"syscall"
)

// child leaves a process in the process group of its machine, which killAll ends as a whole:
// only Linux supports a parent-death signal.
func child() *syscall.SysProcAttr { return &syscall.SysProcAttr{} }

// killAll kills the process group of a machine's first process.
func killAll(_ context.Context, _ string, pid int) error {
	if pid > 1 {
		_ = syscall.Kill(-pid, syscall.SIGKILL) // it may be gone already; the first is among them
	}
	return nil
}

// freeze stops the process group of a machine's first process.
func freeze(_ context.Context, _ string, pid int) error { return syscall.Kill(-pid, syscall.SIGSTOP) }

// thaw resumes the process group.
func thaw(_ string, pid int) error { return syscall.Kill(-pid, syscall.SIGCONT) }
