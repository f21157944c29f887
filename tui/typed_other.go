//go:build !linux

package tui

import (
	"os"

	"golang.org/x/sys/unix"
)

// dropTyped forgets what was typed on a terminal and not read yet. Anything else than a
// terminal is left alone.
func dropTyped(f *os.File) { _ = unix.IoctlSetPointerInt(int(f.Fd()), unix.TIOCFLUSH, 1) }
