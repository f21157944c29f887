//go:build crash

// Package crash injects crashes: the process exits at points that a test names. It has an effect only
// in binaries that are built with the tag crash.
package crash

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// crashing is locked at the point of the crash, and never unlocked.
var crashing sync.Mutex

// At ends the process without a message if the environment variable CONSTELLATION_CRASH_AT
// contains the point. The variable is a comma-separated list such as
// "before:create machine,after:cordon", with the names of effects. If CONSTELLATION_CRASH_ONCE
// names a directory, each crash happens once: At first creates a file with the point's name there.
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
