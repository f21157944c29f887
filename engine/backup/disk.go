package backup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
)

// disk is a directory with all operations in it. All names are slash-separated and relative,
// and cannot leave it.
type disk struct {
	root *os.Root
	// before, if set, is called before each write operation, and can make it fail. Tests inject
	// crashes and failures there.
	before func(op, name string, n int) error
}

// Write operations of a disk.
const (
	opMkdir   = "mkdir"
	opCreate  = "create"
	opWrite   = "write"
	opCut     = "truncate"
	opSync    = "fsync"
	opSyncDir = "fsync directory"
	opRename  = "rename"
	opRemove  = "remove"
)

func (d *disk) ask(op, name string, n int) error {
	if d.before == nil {
		return nil
	}
	return d.before(op, name, n)
}

// openDisk opens dir, which this user must own.
func openDisk(dir string) (*disk, error) {
	info, err := os.Lstat(dir)
	if err == nil {
		err = own(info, true)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", dir, bare(err))
	}
	r, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", dir, bare(err))
	}
	now, err := r.Stat(".")
	if err == nil && !os.SameFile(info, now) {
		err = errors.New("it was replaced in the meantime")
	}
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("open %s: %w", dir, bare(err))
	}
	return &disk{root: r}, nil
}

// sub opens a directory of d, which this user must own.
func (d *disk) sub(name string) (*disk, error) {
	where := filepath.Join(d.root.Name(), name)
	info, err := d.root.Lstat(name)
	if err == nil {
		err = own(info, true)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", where, bare(err))
	}
	r, err := d.root.OpenRoot(name)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", where, bare(err))
	}
	now, err := r.Stat(".")
	if err == nil && !os.SameFile(info, now) {
		err = errors.New("it was replaced in the meantime")
	}
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("open %s: %w", where, bare(err))
	}
	return &disk{root: r, before: d.before}, nil
}

func (d *disk) close() { d.root.Close() }

// own returns an error unless info is of a directory, or a regular file, that this process's
// user owns and that no other user can write.
func own(info fs.FileInfo, dir bool) error {
	want := "regular file"
	if dir {
		want = "directory"
	}
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("%w: it is a symbolic link", ErrRefused)
	case dir && !info.IsDir(), !dir && !info.Mode().IsRegular():
		return fmt.Errorf("%w: it is not a %s", ErrRefused, want)
	}
	if s, ok := info.Sys().(*syscall.Stat_t); ok && int(s.Uid) != os.Geteuid() {
		return fmt.Errorf("%w: it belongs to user %d", ErrRefused, s.Uid)
	}
	if m := info.Mode().Perm(); m&0o022 != 0 {
		return fmt.Errorf("%w: others may write it (mode %04o)", ErrRefused, m)
	}
	return nil
}

// open opens a file of this user for reading.
func (d *disk) open(name string) (*os.File, fs.FileInfo, error) {
	info, err := d.root.Lstat(name)
	if err == nil {
		err = own(info, false)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("open %s: %w", name, bare(err))
	}
	f, err := d.root.OpenFile(name, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open %s: %w", name, bare(err))
	}
	now, err := f.Stat()
	if err == nil && !os.SameFile(info, now) {
		err = errors.New("it was replaced in the meantime")
	}
	if err != nil {
		f.Close()
		return nil, nil, fmt.Errorf("open %s: %w", name, bare(err))
	}
	return f, now, nil
}

// mkdir creates a directory, 0700. The error wraps fs.ErrExist if it exists.
func (d *disk) mkdir(name string) error {
	err := d.ask(opMkdir, name, 0)
	if err == nil {
		err = d.root.Mkdir(name, 0o700)
	}
	if err != nil {
		return fmt.Errorf("create %s: %w", filepath.Join(d.root.Name(), name), bare(err))
	}
	return nil
}

// ensure creates a directory unless this user has one there.
func (d *disk) ensure(name string) error {
	err := d.mkdir(name)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := d.root.Lstat(name)
	if err == nil {
		err = own(info, true)
	}
	if err != nil {
		return fmt.Errorf("use %s: %w", filepath.Join(d.root.Name(), name), bare(err))
	}
	return nil
}

// syncDir makes earlier creations, renames and removals in a directory durable.
func (d *disk) syncDir(name string) error {
	err := d.ask(opSyncDir, name, 0)
	if err == nil {
		var f *os.File
		if f, err = d.root.Open(name); err == nil {
			// Some file systems cannot sync a directory.
			if err = f.Sync(); errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTSUP) {
				err = nil
			}
			f.Close()
		}
	}
	if err != nil {
		return fmt.Errorf("sync %s: %w", path.Join(d.root.Name(), name), bare(err))
	}
	return nil
}

func (d *disk) rename(from, to string) error {
	err := d.ask(opRename, to, 0)
	if err == nil {
		err = d.root.Rename(from, to)
	}
	if err != nil {
		return fmt.Errorf("rename %s to %s: %w", from, to, bare(err))
	}
	return nil
}

// remove removes a file, a link or an empty directory. A missing one is no error.
func (d *disk) remove(name string) error {
	err := d.ask(opRemove, name, 0)
	if err == nil {
		err = d.root.Remove(name)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path.Join(d.root.Name(), name), bare(err))
	}
	return nil
}

// removeTree removes a directory recursively, without following links.
func (d *disk) removeTree(name string) error {
	entries, err := d.entries(name)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			err = d.removeTree(path.Join(name, e.Name()))
		} else {
			err = d.remove(path.Join(name, e.Name()))
		}
		if err != nil {
			return err
		}
	}
	return d.remove(name)
}

// entries lists a directory in the order of names.
func (d *disk) entries(name string) ([]fs.DirEntry, error) {
	all, err := fs.ReadDir(d.root.FS(), name)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", path.Join(d.root.Name(), name), bare(err))
	}
	return all, nil
}

// file is a new file that is being written.
type file struct {
	d    *disk
	name string
	f    *os.File
}

// create makes a new file, 0600.
func (d *disk) create(name string) (*file, error) {
	err := d.ask(opCreate, name, 0)
	var f *os.File
	if err == nil {
		f, err = d.root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", name, bare(err))
	}
	return &file{d, name, f}, nil
}

// Write implements [io.Writer].
func (f *file) Write(b []byte) (int, error) {
	if err := f.d.ask(opWrite, f.name, len(b)); err != nil {
		return 0, fmt.Errorf("write %s: %w", f.name, bare(err))
	}
	n, err := f.f.Write(b)
	if err != nil {
		return n, fmt.Errorf("write %s: %w", f.name, bare(err))
	}
	return n, nil
}

// cut truncates the file to n bytes; later writes continue there.
func (f *file) cut(n int64) error {
	err := f.d.ask(opCut, f.name, int(n))
	if err == nil {
		err = f.f.Truncate(n)
	}
	if err == nil {
		_, err = f.f.Seek(n, 0)
	}
	if err != nil {
		return fmt.Errorf("truncate %s: %w", f.name, bare(err))
	}
	return nil
}

// finish syncs the file to disk and closes it.
func (f *file) finish() error {
	err := f.d.ask(opSync, f.name, 0)
	if err == nil {
		err = f.f.Sync()
	}
	if e := f.f.Close(); err == nil {
		err = e
	}
	if err != nil {
		return fmt.Errorf("sync %s: %w", f.name, bare(err))
	}
	return nil
}

// bare strips operation and path from an error of package os: callers name them.
func bare(err error) error {
	var p *fs.PathError
	var l *os.LinkError
	switch {
	case errors.As(err, &p):
		err = p.Err
	case errors.As(err, &l):
		err = l.Err
	}
	if err != nil && strings.Contains(err.Error(), "path escapes from parent") {
		return fmt.Errorf("%w: it leaves the backup's directory", ErrRefused)
	}
	return err
}
