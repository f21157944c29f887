//go:build !linux

package simulated

import (
	"context"
	"syscall"
)

// child leaves a process in the group of its machine, which killAll ends as a whole:
// only Linux ends it with the one that started it.
func child() *syscall.SysProcAttr { return &syscall.SysProcAttr{} }

// killAll kills the process group of a machine's first process.
func killAll(_ context.Context, _ string, pid int) error {
	if pid > 1 {
		_ = syscall.Kill(-pid, syscall.SIGKILL) // gone already is as good; the first is among them
	}
	return nil
}

// freeze stops the process group of a machine's first process.
func freeze(_ context.Context, _ string, pid int) error { return syscall.Kill(-pid, syscall.SIGSTOP) }

// thaw lets it go on.
func thaw(_ string, pid int) error { return syscall.Kill(-pid, syscall.SIGCONT) }
