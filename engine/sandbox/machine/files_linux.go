package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// writeFile creates or replaces a file in one step: readers see the old content or
// the new, never a part.
func writeFile(path string, data []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.Remove(f.Name()) // gone already when all went well
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return writeFile(path, append(b, '\n'), 0o600)
}

func readJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// makeDirs makes those directories of the path that do not exist below root, with the
// modes that mode returns for each, whatever this process's umask is.
func makeDirs(root *os.Root, path string, mode func(dir string) (fs.FileMode, error)) error {
	if path == "." {
		return nil
	}
	dir := ""
	for element := range strings.SplitSeq(path, "/") {
		dir = filepath.Join(dir, element)
		m, err := mode(dir)
		if err != nil {
			return err
		}
		if err := root.Mkdir(dir, m); errors.Is(err, fs.ErrExist) {
			continue
		} else if err != nil {
			return err
		}
		if err := root.Chmod(dir, m); err != nil {
			return err
		}
	}
	return nil
}
