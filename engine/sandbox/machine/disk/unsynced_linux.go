package disk

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// pageSize is the unit in which parts of a file are saved, and lost.
const pageSize = 4096

// unsyncedMax limits the saved bytes. Beyond it all writes count as written back, as
// the kernel does with too many dirty pages.
const unsyncedMax = 256 << 20

// disk is a directory, and the undo log since the last sync.
type disk struct {
	parent *os.Root
	name   string

	mu       sync.Mutex // held by every change of the directory, and permanently after cut
	settings Settings
	changed  chan struct{} // closed when settings changes
	names    []nameChange  // in the order of their numbers
	number   int64         // of the last change of names
	files    map[uint64]*file
	saved    int64 // bytes
}

// nameChange is a change of names that can be undone.
type nameChange struct {
	number int64
	undo   func() error
	kept   string // the file that undo needs, below the directory of removed files; "" if none
}

// file is a file with unsynced writes.
type file struct {
	f      *os.File
	layers []*layer // oldest first
}

// layer has the content of a file before the writes between two syncs.
type layer struct {
	sealed bool // a sync has begun since
	size   int64
	pages  map[int64][]byte // by number; nil if beyond the end, or zeros
}

// open opens a disk after its server has ended.
func open(dir, name string, s Settings) (*disk, error) {
	parent, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open disk: %w", err)
	}
	d := &disk{parent: parent, name: name, settings: s, changed: make(chan struct{}), files: map[uint64]*file{}}
	// Changes that were not rolled back are durable.
	if err := errors.Join(parent.RemoveAll(name+unsyncedSuffix), parent.Mkdir(name+unsyncedSuffix, 0o700)); err != nil {
		return nil, fmt.Errorf("open disk: %w", err)
	}
	return d, nil
}

func (d *disk) set(s Settings) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.settings = s
	close(d.changed)
	d.changed = make(chan struct{})
}

// linger waits for the additional duration of a sync that began at start.
func (d *disk) linger(start time.Time) {
	for {
		d.mu.Lock()
		left, changed := time.Until(start.Add(d.settings.Sync)), d.changed
		d.mu.Unlock()
		if left <= 0 {
			return
		}
		select {
		case <-time.After(left):
		case <-changed:
		}
	}
}

// save saves the old content of a range of a file before a change. The lock is held.
func (d *disk) save(f *os.File, off, n int64) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if d.saved > unsyncedMax {
		d.forget()
	}
	u := d.files[st.Ino]
	if u == nil {
		own, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		u = &file{f: os.NewFile(uintptr(own), f.Name())}
		d.files[st.Ino] = u
	}
	if len(u.layers) == 0 || u.layers[len(u.layers)-1].sealed {
		u.layers = append(u.layers, &layer{size: st.Size, pages: map[int64][]byte{}})
	}
	l := u.layers[len(u.layers)-1]
	for page := off / pageSize; page*pageSize < off+n; page++ {
		if _, have := l.pages[page]; have {
			continue
		}
		old := make([]byte, pageSize)
		read, err := u.f.ReadAt(old, page*pageSize)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if old = old[:read]; !slices.ContainsFunc(old, func(b byte) bool { return b != 0 }) {
			old = nil
		}
		l.pages[page] = old
		d.saved += int64(len(old))
	}
	return nil
}

// renamed records the undo of a change of names. The lock is held.
func (d *disk) renamed(kept string, undo func() error) {
	d.number++
	d.names = append(d.names, nameChange{number: d.number, undo: undo, kept: kept})
}

// keepAt returns a new path for a removed file. The lock is held.
func (d *disk) keepAt() string {
	return filepath.Join(d.name+unsyncedSuffix, strconv.FormatInt(d.number+1, 10))
}

// mark is a point in time: a sync that begins then makes all earlier changes durable.
type mark struct {
	number int64
	inode  uint64
	last   *layer
}

// begin is called before a sync of the file with this inode number. 0 is a directory.
func (d *disk) begin(inode uint64) mark {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := mark{number: d.number, inode: inode}
	if u := d.files[inode]; u != nil && len(u.layers) > 0 {
		m.last = u.layers[len(u.layers)-1]
		m.last.sealed = true
	}
	return m
}

// synced is called after the sync. It does not return after a power cut.
func (d *disk) synced(m mark) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.names) > 0 && d.names[0].number <= m.number {
		d.drop(d.names[0].kept)
		d.names = d.names[1:]
	}
	u := d.files[m.inode]
	if u == nil || m.last == nil {
		return
	}
	i := slices.Index(u.layers, m.last) // a concurrent sync may have removed it
	d.clean(m.inode, i+1)
}

// clean drops the oldest layers of a file. The lock is held.
func (d *disk) clean(inode uint64, layers int) {
	u := d.files[inode]
	for _, l := range u.layers[:layers] {
		d.saved -= l.bytes()
	}
	if u.layers = u.layers[layers:]; len(u.layers) == 0 {
		_ = u.f.Close()
		delete(d.files, inode)
	}
}

// drop makes the removal of a file durable. The lock is held.
func (d *disk) drop(kept string) {
	if kept == "" {
		return
	}
	f, err := d.parent.OpenFile(kept, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err == nil && st.Nlink == 1 && d.files[st.Ino] != nil {
		d.clean(st.Ino, len(d.files[st.Ino].layers))
	}
	_ = d.parent.Remove(kept) // remaining files are removed when the disk is opened again
}

// forget makes everything durable. The lock is held.
func (d *disk) forget() {
	for _, n := range d.names {
		d.drop(n.kept)
	}
	for _, u := range d.files {
		_ = u.f.Close()
	}
	d.names, d.files, d.saved = nil, map[uint64]*file{}, 0
}

func (l *layer) bytes() (n int64) {
	for _, p := range l.pages {
		n += int64(len(p))
	}
	return n
}

// cut simulates a power cut: it rolls back unsynced changes and blocks all later ones.
func (d *disk) cut(log *slog.Logger) error {
	d.mu.Lock() // permanently
	var errs []error
	pages := 0
	for _, u := range d.files {
		for _, l := range u.layers {
			pages += len(l.pages)
		}
	}
	log.Info("power was cut", "loss", d.settings.Loss, "unsyncedFiles", len(d.files), "unsyncedPages", pages, "unsyncedNames", len(d.names))
	if d.settings.Loss != Nothing {
		for _, u := range d.files {
			for _, l := range slices.Backward(u.layers) {
				errs = append(errs, l.restore(u.f, d.settings.Loss))
			}
		}
	}
	if d.settings.Loss == All {
		for _, n := range slices.Backward(d.names) {
			errs = append(errs, n.undo())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("undo unsynced writes: %w", err)
	}
	return nil
}

// restore restores a file to its content before a layer, or some pages of it.
func (l *layer) restore(f *os.File, loss Loss) error {
	size := l.size
	if loss == Torn {
		info, err := f.Stat()
		if err != nil {
			return err
		}
		size = info.Size()
	} else if err := f.Truncate(size); err != nil {
		return err
	}
	for page, old := range l.pages {
		at := page * pageSize
		if at >= size || loss == Torn && rand.IntN(2) == 0 {
			continue
		}
		// The rest of the page was zeros, or beyond the end.
		all := make([]byte, min(pageSize, size-at))
		copy(all, old)
		if _, err := f.WriteAt(all, at); err != nil {
			return err
		}
	}
	return nil
}

// removed ignores the error of a name that does not exist.
func removed(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
