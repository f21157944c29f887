//go:build !linux

package tui

import (
	"os"

	"golang.org/x/sys/unix"
)

// dropTyped discards the unread input of a terminal. It does nothing to other files.
func dropTyped(f *os.File) { _ = unix.IoctlSetPointerInt(int(f.Fd()), unix.TIOCFLUSH, 1) }
