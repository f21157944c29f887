package tui

import (
	"os"

	"golang.org/x/sys/unix"
)

// discardInput discards the unread input of a terminal. It does nothing to other files.
func discardInput(f *os.File) { _ = unix.IoctlSetInt(int(f.Fd()), unix.TCFLSH, unix.TCIFLUSH) }
