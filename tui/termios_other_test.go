//go:build !linux

package tui

import "golang.org/x/sys/unix"

const getTermios = unix.TIOCGETA
