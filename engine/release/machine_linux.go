package release

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// MachineTrust reads the release keys of the machine whose file system is at root. The error
// wraps ErrNoMachineKeys if there are none. A file that users other than root and this one can
// write is refused.
func MachineTrust(root string) (Trust, error) {
	path := filepath.Join("/", root, MachineKeys)
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Trust{}, fmt.Errorf("read /%s: %w", MachineKeys, ErrNoMachineKeys)
	}
	if err != nil {
		return Trust{}, fmt.Errorf("read release keys: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.Mode().IsRegular():
		return Trust{}, fmt.Errorf("read release keys: /%s is not a regular file", MachineKeys)
	case info.Mode().Perm()&0o022 != 0:
		return Trust{}, fmt.Errorf("read release keys: /%s has mode %#o, which is writable by others", MachineKeys, info.Mode().Perm())
	case !ok || st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return Trust{}, fmt.Errorf("read release keys: /%s does not belong to root", MachineKeys)
	case info.Size() > maxFile:
		return Trust{}, fmt.Errorf("read release keys: /%s has %d bytes, more than %d", MachineKeys, info.Size(), maxFile)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return Trust{}, fmt.Errorf("read release keys: %w", err)
	}
	keys, err := ParseKeys("release-keys", b)
	if err != nil {
		return Trust{}, err
	}
	return Trust{keys}, nil
}
