package bootstrapper

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"

	"constellation/internal/journal"
)

// replaceFile writes a file atomically, and returns when it is on disk.
func replaceFile(root *os.Root, name string, data []byte, mode fs.FileMode) error {
	tmp := name + ".new"
	err := root.Remove(tmp)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	var f *os.File
	if err == nil {
		f, err = root.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = root.Rename(tmp, name)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, errors.Join(err, root.Remove(tmp)))
	}
	dir, err := root.OpenRoot(path.Dir(name))
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	defer dir.Close()
	if err := journal.SyncDir(dir); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// removeAll removes files that may not exist.
func removeAll(root *os.Root, names ...string) error {
	for _, n := range names {
		if err := root.Remove(n); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove %s: %w", n, err)
		}
	}
	return journal.SyncDir(root)
}

func randomBytes(n int) ([]byte, error) {
	b := make([]byte, n)
	if _, err := rand.Read(b); err != nil {
		return nil, fmt.Errorf("read random bytes: %w", err)
	}
	return b, nil
}
