package machine

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// writeDisk makes the machine's disk: the overlay's upper directory, written before
// it is mounted, and the parts outside the overlay.
func (h *Host) writeDisk(spec Spec) error {
	dirs := map[string]fs.FileMode{"upper": 0o755, "work": 0o755, "root": 0o755, "bundle": 0o755, "disk": 0o755}
	for _, d := range diskDirs {
		dirs[diskDir("disk", d.path)] = d.mode
	}
	for _, d := range slices.Sorted(maps.Keys(dirs)) { // parents first
		dir := h.path(spec.Name, d)
		if err := os.Mkdir(dir, dirs[d]); err != nil {
			return fmt.Errorf("make disk: %w", err)
		}
		// The umask changed the mode, but the machine sees this directory.
		if err := os.Chmod(dir, dirs[d]); err != nil {
			return fmt.Errorf("make disk: %w", err)
		}
	}
	files, err := ownFiles(spec)
	if err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	for path, f := range spec.Files {
		files[path] = f
	}
	lower := lowerDirs(spec.Image)
	upper, err := os.OpenRoot(h.path(spec.Name, "upper"))
	if err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	defer upper.Close()
	for path, f := range files {
		if err := writeUpper(upper, lower, path, f); err != nil {
			return fmt.Errorf("make disk: write %s: %w", path, err)
		}
	}
	return nil
}

func lowerDirs(image *Image) []string {
	return []string{filepath.Join(image.Dir, imageLayer), filepath.Join(image.Rootfs, rootfsTree)}
}

// writeUpper writes a file that hides the one of the image. A directory in the upper
// layer would also hide a link of that name below, and /bin with it, so that is
// refused. Existing directories of the layers below keep their mode.
func writeUpper(upper *os.Root, lower []string, path string, f File) error {
	path = strings.TrimPrefix(path, "/")
	err := makeDirs(upper, filepath.Dir(path), func(dir string) (fs.FileMode, error) {
		for _, l := range lower {
			info, err := os.Lstat(filepath.Join(l, dir))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err == nil && !info.IsDir() {
				err = fmt.Errorf("/%s is no directory", dir)
			}
			if err != nil {
				return 0, err
			}
			return info.Mode().Perm(), nil
		}
		return 0o755, nil
	})
	if err != nil {
		return err
	}
	mode := cmp.Or(f.Mode, 0o644)
	if err := upper.WriteFile(path, f.Data, mode); err != nil {
		return err
	}
	return upper.Chmod(path, mode)
}

// ownFiles are the files that identify a machine.
func ownFiles(spec Spec) (map[string]File, error) {
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return nil, err
	}
	cni, err := cniList(spec.PodCIDR)
	if err != nil {
		return nil, err
	}
	return map[string]File{
		"/etc/hostname":   {Data: []byte(spec.Name + "\n")},
		"/etc/hosts":      {Data: fmt.Appendf(nil, "127.0.0.1 localhost\n::1 localhost ip6-localhost\n%s %s\n", spec.IP, spec.Name)},
		"/etc/machine-id": {Data: []byte(hex.EncodeToString(id) + "\n"), Mode: 0o444},
		// No configuration of this computer: there is no route out of the sandbox's network. A
		// query for a name outside the cluster fails at once.
		"/etc/resolv.conf":                         {Data: []byte("nameserver " + Gateway.String() + "\noptions timeout:1 attempts:1\n")},
		"/etc/cni/net.d/10-constellation.conflist": {Data: cni},
		"/etc/containerd/config.toml":              {Data: containerdConfig(cmp.Or(spec.PauseImage, DefaultPauseImage))},
	}, nil
}
