//go:build !linux

package term

// ReleaseStartupPages does nothing on this platform.
func ReleaseStartupPages() {}
