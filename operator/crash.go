//go:build crash

package operator

import (
	"os"
	"syscall"
)

// crashAt ends the process without a word when it comes to the point that the
// environment variable CONSTELLATION_CRASH_AT names, such as "before:create machine":
// the words are those of actionNames. If CONSTELLATION_CRASH_ONCE names a file, that
// happens once: the file is made first. Only binaries for tests are built like this.
func crashAt(point string) {
	if os.Getenv("CONSTELLATION_CRASH_AT") != point {
		return
	}
	if once := os.Getenv("CONSTELLATION_CRASH_ONCE"); once != "" {
		f, err := os.OpenFile(once, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return
		}
		_ = f.Close()
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}
