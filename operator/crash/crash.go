//go:build crash

// Package crash has processes die at points that a test names. Only binaries that are built with
// the tag crash do; in all others it does nothing.
package crash

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// crashing is taken at the point where the process dies, and not given back.
var crashing sync.Mutex

// At ends the process without a word when it comes to one of the points that the
// environment variable CONSTELLATION_CRASH_AT names, with commas between them, such as
// "before:create machine,after:cordon": the words are those of what is done then. If
// CONSTELLATION_CRASH_ONCE names a directory, each happens once: a file with the
// point's name is made there first.
func At(point string) {
	if !slices.Contains(strings.Split(os.Getenv("CONSTELLATION_CRASH_AT"), ","), point) {
		return
	}
	crashing.Lock()
	if once := os.Getenv("CONSTELLATION_CRASH_ONCE"); once != "" {
		f, err := os.OpenFile(filepath.Join(once, point), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			crashing.Unlock()
			return
		}
		_ = f.Close()
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}
