//go:build !linux

package disk

import (
	"errors"
	"fmt"
	"os"
)

// Supported returns the reason why this computer cannot have faulty disks.
func Supported() error { return errors.New("disks that fail need Linux") }

// Main runs this program as the server of a disk, which requires Linux, and returns its exit code.
func Main([]string) int {
	fmt.Fprintln(os.Stderr, "serve disk: only Linux can")
	return 1
}
