//go:build !linux

package tui

// forgetStart does nothing on this platform.
func forgetStart() {}
