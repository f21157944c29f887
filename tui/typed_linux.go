package tui

import (
	"os"

	"golang.org/x/sys/unix"
)

// dropTyped discards the unread input of a terminal. It does nothing to other files.
func dropTyped(f *os.File) { _ = unix.IoctlSetInt(int(f.Fd()), unix.TCFLSH, unix.TCIFLUSH) }
