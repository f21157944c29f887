package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// mountsBelow lists the mounts on dir or below it in this mount namespace, in
// the order of mounting.
func mountsBelow(dir string) ([]string, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return nil, fmt.Errorf("list mounts below %s: %w", dir, err)
	}
	var paths []string
	for _, m := range infos {
		paths = append(paths, m.Mountpoint)
	}
	return paths, nil
}

// unmountBelow unmounts everything on dir and below it, in reverse order. It never
// detaches lazily: a busy mount stays mounted and is an error.
func unmountBelow(ctx context.Context, dir string) error {
	for {
		paths, err := mountsBelow(dir)
		if err != nil {
			return err
		}
		if len(paths) == 0 {
			return nil
		}
		for _, p := range slices.Backward(paths) {
			if err := unmount(ctx, p); err != nil {
				return err
			}
		}
	}
}

// busyFor is how long an unmount waits for the kernel to release files: it closes the files of a
// killed process a little after it reports its end.
const busyFor = 5 * time.Second

func unmount(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, busyFor)
	defer cancel()
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		// EINVAL: it is not a mount (any more).
		if err == nil || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("unmount %s: %w", path, err)
		case <-time.After(wait):
		}
	}
}

// removeTree removes parent/name and everything in it, unless something is mounted
// there. It cannot leave parent by a symbolic link or "..".
func removeTree(parent, name string) error {
	dir := filepath.Join(parent, name)
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return fmt.Errorf("remove %s: %s is still mounted", dir, mounts[0])
	}
	root, err := os.OpenRoot(parent)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	defer root.Close()
	if err := root.RemoveAll(name); err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	return nil
}

// mountOverlay mounts an overlay of the directories lower, topmost first, on target.
func mountOverlay(target, upper, work string, lower ...string) error {
	for _, p := range append([]string{target, upper, work}, lower...) {
		if err := checkOverlayPath(p); err != nil {
			return err
		}
	}
	options := "lowerdir=" + strings.Join(lower, ":") + ",upperdir=" + upper + ",workdir=" + work
	// The kernel accepts one page of options, and truncates the rest.
	if len(options) >= os.Getpagesize() {
		return fmt.Errorf("mount overlay on %s: the paths are too long", target)
	}
	if err := unix.Mount("overlay", target, "overlay", 0, options); err != nil {
		return fmt.Errorf("mount overlay on %s: %w", target, err)
	}
	return nil
}

// checkOverlayPath refuses paths with characters that are special in mount options.
func checkOverlayPath(p string) error {
	if !filepath.IsAbs(p) || filepath.Clean(p) != p || strings.ContainsAny(p, ",:\\\"\n") {
		return fmt.Errorf("path %q cannot be used for machines: it must be absolute and without , : \\ and quotes", p)
	}
	return nil
}
