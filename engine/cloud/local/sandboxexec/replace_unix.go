//go:build unix

package sandboxexec

import (
	"os"
	"syscall"
)

// replace replaces this process by the program at path. It returns only on an error.
func replace(path string, argv []string) (int, error) {
	return 0, syscall.Exec(path, argv, os.Environ())
}
