//go:build !linux

package disk

import (
	"errors"
	"fmt"
	"os"
)

// Supported says why this computer cannot have disks that fail.
func Supported() error { return errors.New("disks that fail need Linux") }

// Main is this program as the server of a disk, which only Linux has, and returns its exit code.
func Main([]string) int {
	fmt.Fprintln(os.Stderr, "serve disk: only Linux can")
	return 1
}
