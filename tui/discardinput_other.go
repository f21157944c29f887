//go:build !linux

package tui

import (
	"os"

	"golang.org/x/sys/unix"
)

// discardInput discards the unread input of a terminal. It does nothing to other files.
func discardInput(f *os.File) { _ = unix.IoctlSetPointerInt(int(f.Fd()), unix.TIOCFLUSH, 1) }
