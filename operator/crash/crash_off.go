//go:build !crash

// Package crash has processes die at points that a test names. Only binaries that are built with
// the tag crash do; in all others it does nothing.
package crash

// At does nothing; see the binaries that are built with the tag crash.
func At(string) {}
