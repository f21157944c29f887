//go:build !linux

package tui

// releaseStartupPages does nothing on this platform.
func releaseStartupPages() {}
