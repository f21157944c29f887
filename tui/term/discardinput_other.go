//go:build !linux

package term

import (
	"os"

	"golang.org/x/sys/unix"
)

// DiscardInput discards the unread input of a terminal. It does nothing to other files.
func DiscardInput(f *os.File) { _ = unix.IoctlSetPointerInt(int(f.Fd()), unix.TIOCFLUSH, 1) }
