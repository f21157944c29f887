package term

import (
	"os"

	"golang.org/x/sys/unix"
)

// DiscardInput discards the unread input of a terminal. It does nothing to other files.
func DiscardInput(f *os.File) { _ = unix.IoctlSetInt(int(f.Fd()), unix.TCFLSH, unix.TCIFLUSH) }
