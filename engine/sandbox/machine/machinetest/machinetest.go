// Package machinetest serializes tests that start machines: those share this
// computer's memory, cores and inotify instances, and some compare the state of the
// whole computer before and after.
package machinetest

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// Lock waits until no other test on this computer runs machines and returns the function that
// releases the lock. It also works between processes. The end of a process releases its lock.
func Lock() (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(os.TempDir(), "constellation-machines.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("wait for other tests: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("wait for other tests: %w", err)
	}
	return func() { f.Close() }, nil
}
