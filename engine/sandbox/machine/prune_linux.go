package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
)

// Prune removes root file systems and OS images that have not been used for the time
// unused from the cache, and returns their directories. Calls of Rootfs
// or OSImage count as use.
//
// It keeps the versions that this program would use, the directories in keep, and the layers of
// mounted overlays, of any owner. Removed directories are made again on
// demand. After an error it continues with the rest.
func Prune(ctx context.Context, cacheDir string, keep []string, unused time.Duration) ([]string, error) {
	changes, err := customisation()
	if err != nil {
		return nil, err
	}
	cacheDir, err = filepath.Abs(cacheDir)
	if err != nil {
		return nil, fmt.Errorf("prune cache: %w", err)
	}
	keep = append(slices.Clone(keep), filepath.Join(cacheDir, "rootfs", rootfsKey(changes)))
	var removed []string
	var errs []error
	// Images first: each of them needs its root file system.
	for _, kind := range []string{"os-images", "rootfs"} {
		dirs, err := pruneDir(ctx, filepath.Join(cacheDir, kind), keep, time.Now().Add(-unused))
		removed = append(removed, dirs...)
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return removed, fmt.Errorf("prune cache: %w", err)
	}
	return removed, nil
}

// pruneDir removes the directories in parent that were not used since the time since.
func pruneDir(ctx context.Context, parent string, keep []string, since time.Time) ([]string, error) {
	// Usually there are none. Then it needs no lock.
	if names, err := pruned(parent, keep, since); err != nil || len(names) == 0 {
		return nil, err
	}
	unlock, err := lockFile(ctx, filepath.Join(parent, "lock"))
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeUnfinished(parent); err != nil {
		return nil, err
	}
	names, err := pruned(parent, keep, since)
	if err != nil {
		return nil, err
	}
	var removed []string
	var errs []error
	for _, name := range names {
		// A partly removed directory must not exist under its name.
		gone := unfinished + name
		if err := os.Rename(filepath.Join(parent, name), filepath.Join(parent, gone)); err != nil {
			errs = append(errs, err)
			continue
		}
		removed = append(removed, filepath.Join(parent, name))
		errs = append(errs, removeTree(parent, gone))
	}
	return removed, errors.Join(errs...)
}

// pruned returns the names of directories to remove.
func pruned(parent string, keep []string, since time.Time) ([]string, error) {
	entries, err := os.ReadDir(parent)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	overlays, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("overlay"))
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	var names []string
	for _, e := range entries {
		dir := filepath.Join(parent, e.Name())
		info, err := e.Info()
		if err != nil || !info.IsDir() || strings.HasPrefix(e.Name(), unfinished) || slices.Contains(keep, dir) || !info.ModTime().Before(since) {
			continue
		}
		if slices.ContainsFunc(overlays, func(m *mountinfo.Info) bool { return strings.Contains(m.VFSOptions, dir+"/") }) {
			continue
		}
		names = append(names, e.Name())
	}
	return names, nil
}

// used marks dir as used by setting its modification time. The error wraps
// fs.ErrNotExist if there is no such directory.
func used(dir string) error {
	now := time.Now()
	return os.Chtimes(dir, now, now)
}
