//go:build unix

package conformance

import "syscall"

// apart has a process in a group of its own.
func apart() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
