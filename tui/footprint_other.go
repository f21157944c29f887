//go:build !linux

package tui

// forgetStart does nothing here.
func forgetStart() {}
