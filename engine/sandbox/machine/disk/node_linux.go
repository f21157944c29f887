package disk

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// node forwards all operations to the directory, and reports changes to the disk before they
// take effect.
type node struct {
	*fs.LoopbackNode
	d *disk
}

func (d *disk) node() (*node, error) {
	root, err := fs.NewLoopbackRoot(filepath.Join(d.parent.Name(), d.name))
	if err != nil {
		return nil, err
	}
	return &node{root.(*fs.LoopbackNode), d}, nil
}

// WrapChild makes a node of each inode, see [fs.NodeWrapChilder].
func (n *node) WrapChild(_ context.Context, ops fs.InodeEmbedder) fs.InodeEmbedder {
	return &node{ops.(*fs.LoopbackNode), n.d}
}

// path is the path of a name in this directory, relative to the disk's parent.
func (n *node) path(name string) string { return filepath.Join(n.d.name, n.Path(nil), name) }

// making runs a change that creates the name. Its undo removes the name.
func (n *node) making(name string, change func() syscall.Errno) syscall.Errno {
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	path := n.path(name)
	errno := change()
	if errno == fs.OK {
		n.d.renamed("", func() error { return removed(n.d.parent.Remove(path)) })
	}
	return errno
}

// The methods from Mkdir on are documented in package fs.
func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (i *fs.Inode, errno syscall.Errno) {
	errno = n.making(name, func() (e syscall.Errno) { i, e = n.LoopbackNode.Mkdir(ctx, name, mode, out); return e })
	return i, errno
}

func (n *node) Mknod(ctx context.Context, name string, mode, dev uint32, out *fuse.EntryOut) (i *fs.Inode, errno syscall.Errno) {
	errno = n.making(name, func() (e syscall.Errno) { i, e = n.LoopbackNode.Mknod(ctx, name, mode, dev, out); return e })
	return i, errno
}

func (n *node) Symlink(ctx context.Context, target, name string, out *fuse.EntryOut) (i *fs.Inode, errno syscall.Errno) {
	errno = n.making(name, func() (e syscall.Errno) { i, e = n.LoopbackNode.Symlink(ctx, target, name, out); return e })
	return i, errno
}

func (n *node) Link(ctx context.Context, target fs.InodeEmbedder, name string, out *fuse.EntryOut) (i *fs.Inode, errno syscall.Errno) {
	errno = n.making(name, func() (e syscall.Errno) { i, e = n.LoopbackNode.Link(ctx, target, name, out); return e })
	return i, errno
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (i *fs.Inode, h fs.FileHandle, f uint32, errno syscall.Errno) {
	// The kernel has found that the name does not exist.
	errno = n.making(name, func() (e syscall.Errno) {
		i, h, f, e = n.LoopbackNode.Create(ctx, name, flags|unix.O_EXCL, mode, out)
		return e
	})
	if errno != fs.OK {
		return nil, nil, 0, errno
	}
	_ = h.(fs.FileReleaser).Release(ctx)
	own, errno := n.handle(n.path(name), flags)
	return i, own, f, errno
}

func (n *node) Tmpfile(context.Context, uint32, uint32, *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	return nil, nil, 0, unix.EOPNOTSUPP
}

func (n *node) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	h, errno := n.handle(n.path(""), flags)
	if errno == fs.OK && flags&unix.O_TRUNC != 0 {
		errno = h.truncate(0)
	}
	return h, 0, errno
}

func (n *node) Unlink(_ context.Context, name string) syscall.Errno {
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	path, kept := n.path(name), n.d.keepAt()
	if err := n.d.parent.Rename(path, kept); err != nil {
		return fs.ToErrno(err)
	}
	n.d.renamed(kept, func() error { return n.d.parent.Rename(kept, path) })
	return fs.OK
}

func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno {
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	path := n.path(name)
	info, err := n.d.parent.Lstat(path)
	if err != nil {
		return fs.ToErrno(err)
	}
	errno := n.LoopbackNode.Rmdir(ctx, name)
	if errno == fs.OK {
		n.d.renamed("", func() error { return n.d.parent.Mkdir(path, info.Mode().Perm()) })
	}
	return errno
}

func (n *node) Rename(ctx context.Context, name string, to fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	other, ok := to.(*node)
	if !ok || flags&^unix.RENAME_NOREPLACE != 0 {
		return unix.EINVAL
	}
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	old, path, kept := n.path(name), other.path(newName), ""
	replaced, err := n.d.parent.Lstat(path)
	switch {
	case err != nil:
		if removed(err) != nil {
			return fs.ToErrno(err)
		}
	case replaced.IsDir(): // which is empty, or this fails
		if flags == 0 {
			return unix.EOPNOTSUPP
		}
	default:
		kept = n.d.keepAt()
		if err := n.d.parent.Link(path, kept); err != nil {
			return fs.ToErrno(err)
		}
	}
	if errno := n.LoopbackNode.Rename(ctx, name, to, newName, flags); errno != fs.OK {
		if kept != "" {
			_ = n.d.parent.Remove(kept)
		}
		return errno
	}
	n.d.renamed(kept, func() error {
		err := n.d.parent.Rename(path, old)
		if err == nil && kept != "" {
			err = n.d.parent.Rename(kept, path)
		}
		return err
	})
	return fs.OK
}

func (n *node) Setattr(ctx context.Context, h fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	size, resized := in.GetSize()
	if !resized {
		return n.LoopbackNode.Setattr(ctx, h, in, out)
	}
	own, ok := h.(*handle)
	if !ok {
		var errno syscall.Errno
		if own, errno = n.handle(n.path(""), unix.O_RDWR); errno != fs.OK {
			return errno
		}
		defer func() { _ = own.Release(ctx) }()
	}
	if errno := own.truncate(int64(size)); errno != fs.OK {
		return errno
	}
	in.Valid &^= fuse.FATTR_SIZE
	return n.LoopbackNode.Setattr(ctx, own, in, out)
}

// Fsync syncs an open file, or a directory.
func (n *node) Fsync(ctx context.Context, h fs.FileHandle, flags uint32) syscall.Errno {
	start := time.Now()
	var m mark
	var errno syscall.Errno
	if own, ok := h.(*handle); ok {
		m = n.d.begin(own.inode)
		errno = own.Fsync(ctx, flags)
	} else {
		m = n.d.begin(0)
		errno = syncDirectory(n.d.parent, n.path(""))
	}
	if errno == fs.OK {
		n.d.linger(start)
		n.d.synced(m)
	}
	return errno
}

func syncDirectory(root *os.Root, path string) syscall.Errno {
	f, err := root.Open(path)
	if err != nil {
		return fs.ToErrno(err)
	}
	defer f.Close()
	return fs.ToErrno(f.Sync())
}

// directory is an open directory.
type directory struct {
	fs.DirStream
	n *node
}

// OpendirHandle opens a directory with a handle that reports its syncs.
func (n *node) OpendirHandle(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	entries, errno := n.Readdir(context.Background())
	if errno != fs.OK {
		return nil, 0, errno
	}
	return &directory{entries, n}, 0, fs.OK
}

func (d *directory) Readdirent(ctx context.Context) (*fuse.DirEntry, syscall.Errno) {
	return d.DirStream.(fs.FileReaddirenter).Readdirent(ctx)
}

func (d *directory) Seekdir(ctx context.Context, off uint64) syscall.Errno {
	return d.DirStream.(fs.FileSeekdirer).Seekdir(ctx, off)
}

func (d *directory) Releasedir(context.Context, uint32) { d.Close() }

func (d *directory) Fsyncdir(ctx context.Context, flags uint32) syscall.Errno {
	return d.n.Fsync(ctx, nil, flags)
}

// CopyFileRange makes the kernel fall back to reads and writes.
func (n *node) CopyFileRange(context.Context, fs.FileHandle, uint64, *fs.Inode, fs.FileHandle, uint64, uint64, uint64) (uint32, syscall.Errno) {
	return 0, unix.EOPNOTSUPP
}

// handle is an open file.
type handle struct {
	*fs.LoopbackFile
	d     *disk
	f     *os.File // the LoopbackFile's
	inode uint64
}

// handle opens a file also for reading, so that overwritten data can be saved.
func (n *node) handle(path string, flags uint32) (*handle, syscall.Errno) {
	mode := os.O_RDONLY
	if flags&unix.O_ACCMODE != unix.O_RDONLY {
		mode = os.O_RDWR
	}
	f, err := n.d.parent.OpenFile(path, mode, 0)
	if err != nil {
		return nil, fs.ToErrno(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		_ = f.Close()
		return nil, fs.ToErrno(err)
	}
	return &handle{fs.NewLoopbackFileFromOS(f), n.d, f, st.Ino}, fs.OK
}

// PassthroughFd keeps the kernel from bypassing this process.
func (h *handle) PassthroughFd() (int, bool) { return 0, false }

// changing runs a change of a range of the file.
func (h *handle) changing(off, n int64, change func() syscall.Errno) syscall.Errno {
	h.d.mu.Lock()
	defer h.d.mu.Unlock()
	if err := h.d.save(h.f, off, n); err != nil {
		return fs.ToErrno(err)
	}
	return change()
}

func (h *handle) Write(ctx context.Context, data []byte, off int64) (n uint32, errno syscall.Errno) {
	errno = h.changing(off, int64(len(data)), func() (e syscall.Errno) { n, e = h.LoopbackFile.Write(ctx, data, off); return e })
	return n, errno
}

func (h *handle) Writev(ctx context.Context, data [][]byte, off int64) (n uint32, errno syscall.Errno) {
	var all int64
	for _, d := range data {
		all += int64(len(d))
	}
	errno = h.changing(off, all, func() (e syscall.Errno) { n, e = h.LoopbackFile.Writev(ctx, data, off); return e })
	return n, errno
}

func (h *handle) Allocate(ctx context.Context, off, size uint64, mode uint32) syscall.Errno {
	part := int64(size)
	if mode&^unix.FALLOC_FL_KEEP_SIZE == 0 {
		part = 0 // no byte changes, but maybe the size
	}
	return h.changing(int64(off), part, func() syscall.Errno { return h.LoopbackFile.Allocate(ctx, off, size, mode) })
}

func (h *handle) truncate(size int64) syscall.Errno {
	info, err := h.f.Stat()
	if err != nil {
		return fs.ToErrno(err)
	}
	return h.changing(size, max(0, info.Size()-size), func() syscall.Errno { return fs.ToErrno(h.f.Truncate(size)) })
}
