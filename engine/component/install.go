//go:build unix

package component

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path"
	"strings"
	"sync"
	"syscall"
	"time"

	"constellation/internal/delay"
)

// Installer fetches components and puts them in place. Its zero value installs
// below "/". It is safe for concurrent use, also by several processes.
type Installer struct {
	// Root is the directory that paths of components start from; "" means "/".
	// Nothing outside of it is touched, whatever symbolic links say.
	Root string
	// Client downloads; nil means a client that bounds every wait for a
	// connection and refuses to be redirected from https to http.
	Client *http.Client
	// Log gets a line for each retry; nil means none.
	Log *slog.Logger
	// MaxPause is the longest pause between two attempts to download, unless a server
	// asks for a longer one; zero means 15 s.
	MaxPause time.Duration

	limits limits // zero fields mean the defaults
}

// limits are fields for the sake of tests.
type limits struct {
	size      int64         // largest download in bytes
	extracted int64         // largest content of an archive in bytes
	entries   int           // most entries of an archive
	attempts  int           // attempts in a row that bring less than progress
	progress  int64         // bytes that make an attempt worth another
	stall     time.Duration // window in which at least minRate must arrive
	pause     time.Duration // shortest pause between attempts
	pauseMax  time.Duration // longest pause, and the longest that a server can ask for is four of it
}

const (
	parallel = 4
	// minRate is the least that must arrive in every window of limits.stall, in bytes per second. A
	// server that sends less could delay a machine for days. Four downloads at this rate fit into
	// 1 Mbit/s.
	minRate = 16 << 10
	// reportEvery is the interval of progress reports.
	reportEvery = 100 * time.Millisecond
)

func (in *Installer) limit() limits {
	l := limits{
		size: 1 << 30, extracted: 2 << 30, entries: 20_000,
		attempts: 10, progress: 1 << 20, stall: 30 * time.Second, pause: 200 * time.Millisecond, pauseMax: 15 * time.Second,
	}
	set(&l.pauseMax, in.MaxPause)
	o := in.limits
	set(&l.size, o.size)
	set(&l.extracted, o.extracted)
	set(&l.entries, o.entries)
	set(&l.attempts, o.attempts)
	set(&l.progress, o.progress)
	set(&l.stall, o.stall)
	set(&l.pause, o.pause)
	set(&l.pauseMax, o.pauseMax)
	return l
}

func set[T comparable](to *T, v T) {
	var zero T
	if v != zero {
		*to = v
	}
}

func (in *Installer) log() *slog.Logger {
	if in.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return in.Log
}

// Install makes every component of l present: what already is there with the right
// content is left alone, the rest is fetched, at most four at a time.
//
// Content is hashed while it arrives, into a file beside its target, and becomes
// visible by a rename once it is complete, correct and on disk. A connection that
// breaks or goes silent is taken up again where it ended, until ten attempts in a
// row brought next to nothing. Errors that no repetition mends are final: the
// error wraps [ErrDigest] if the content is not the one named, syscall.ENOSPC if
// the disk is full. The target is then as it was and nothing is left beside it.
// After a crash or a cancelled ctx a partial file stays and the next Install goes
// on from it.
//
// The first error ends the rest of the work. progress, unless nil, is called with
// the bytes present and expected (0 if unknown), never concurrently, and once at
// the end of each component.
func (in *Installer) Install(ctx context.Context, l List, progress func(c Component, done, total int64)) error {
	if err := l.Validate(); err != nil {
		return err
	}
	root, err := os.OpenRoot(in.root())
	if err != nil {
		return fmt.Errorf("install components: %w", err)
	}
	defer root.Close()

	client := in.Client
	if client == nil {
		client = NewClient()
		defer client.CloseIdleConnections()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex // serialises calls of progress
		slots = make(chan struct{}, parallel)
	)
	for _, c := range l {
		wg.Go(func() {
			select {
			case slots <- struct{}{}:
				defer func() { <-slots }()
			case <-ctx.Done():
				return
			}
			report := func(done, total int64) {
				if progress != nil {
					mu.Lock()
					defer mu.Unlock()
					progress(c, done, total)
				}
			}
			if err := in.install(ctx, root, client, c, report); err != nil {
				cancel(fmt.Errorf("install %s: %w", c.Name, err)) // the first call counts
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// Verify returns nil if every component of l is installed as l says, and otherwise
// which are not; the error wraps [ErrDigest]. It reads every byte.
func (in *Installer) Verify(ctx context.Context, l List) error {
	if err := l.Validate(); err != nil {
		return err
	}
	root, err := os.OpenRoot(in.root())
	if err != nil {
		return fmt.Errorf("verify components: %w", err)
	}
	defer root.Close()
	var errs []error
	for _, c := range l {
		if ok, _, err := installed(ctx, root, c); err != nil {
			errs = append(errs, fmt.Errorf("verify %s: %w", c.Name, err))
		} else if !ok {
			errs = append(errs, fmt.Errorf("verify %s: %s is absent or altered: %w", c.Name, c.Path, ErrDigest))
		}
	}
	return errors.Join(errs...)
}

func (in *Installer) root() string {
	if in.Root == "" {
		return "/"
	}
	return in.Root
}

// install makes one component present.
func (in *Installer) install(ctx context.Context, root *os.Root, client *http.Client, c Component, report func(done, total int64)) error {
	rel := strings.TrimPrefix(c.Path, "/")
	dir := path.Dir(rel)
	if c.Extract {
		dir = rel // the archive waits inside the directory that it fills
	}
	if err := root.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("create directory /%s: %w", dir, bare(err))
	}
	d, err := root.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("open directory /%s: %w", dir, bare(err))
	}
	defer d.Close()

	temp := fmt.Sprintf(".%s.%s.partial", c.Name, c.short())
	var f *os.File
	for f == nil {
		ok, size, err := installed(ctx, root, c)
		if err != nil {
			return err
		}
		if ok {
			report(size, size)
			return nil
		}
		if f, err = lockFile(d, temp); err != nil {
			return fmt.Errorf("create file in /%s: %w", dir, bare(err))
		}
		if f == nil { // somebody else installs it
			if !delay.For(ctx, 100*time.Millisecond) {
				return context.Cause(ctx)
			}
		}
	}
	defer f.Close()

	size, err := in.fetch(ctx, client, c, f, report)
	if err == nil && c.Extract {
		if err = in.extract(ctx, d, f, c); err == nil {
			err = d.Remove(temp)
		}
	} else if err == nil {
		err = place(d, f, temp, path.Base(rel), c)
	}
	if err != nil {
		// After a permanent failure the partial download is useless; after a lost
		// connection or a killed process it is resumed.
		var final *finalError
		if errors.As(err, &final) {
			_ = d.Remove(temp) // the error at hand says more
		}
		return err
	}
	report(size, size)
	return nil
}

// place turns the complete file f, called temp in d, into base.
func place(d *os.Root, f *os.File, temp, base string, c Component) error {
	if i, err := d.Lstat(base); err == nil && i.IsDir() {
		return &finalError{fmt.Errorf("%s is a directory", c.Path)}
	}
	if err := f.Chmod(c.perm()); err != nil {
		return &finalError{fmt.Errorf("write %s: %w", c.Path, bare(err))}
	}
	if err := f.Sync(); err != nil {
		return &finalError{fmt.Errorf("write %s: %w", c.Path, bare(err))}
	}
	// Closed first: a file that is open for writing cannot be executed (ETXTBSY).
	if err := f.Close(); err != nil {
		return &finalError{fmt.Errorf("write %s: %w", c.Path, bare(err))}
	}
	if err := d.Rename(temp, base); err != nil {
		return &finalError{fmt.Errorf("write %s: %w", c.Path, bare(err))}
	}
	if err := syncDir(d, "."); err != nil {
		return fmt.Errorf("write %s: %w", c.Path, bare(err))
	}
	return nil
}

func (c Component) perm() fs.FileMode {
	if c.Mode == 0 {
		return 0o755
	}
	return fs.FileMode(c.Mode)
}

// installed reports whether c is present with its content and mode, and its size
// in bytes.
func installed(ctx context.Context, root *os.Root, c Component) (bool, int64, error) {
	rel := strings.TrimPrefix(c.Path, "/")
	if c.Extract {
		return unpacked(ctx, root, rel, c)
	}
	i, err := root.Lstat(rel)
	if err != nil || !i.Mode().IsRegular() {
		return false, 0, nil // if it cannot be looked at, it cannot be written either, which says so better
	}
	h := c.newHash()
	_, err = hashFile(ctx, root, rel, h)
	if err != nil {
		if ctx.Err() != nil {
			return false, 0, err
		}
		return false, 0, nil
	}
	if c.digestOf(h) != c.Digest {
		return false, 0, nil
	}
	if i.Mode() != c.perm() {
		if err := root.Chmod(rel, c.perm()); err != nil {
			return false, 0, fmt.Errorf("set mode of %s: %w", c.Path, bare(err))
		}
	}
	return true, i.Size(), nil
}

// hashFile hashes a file into h and returns the sum in hex digits.
func hashFile(ctx context.Context, root *os.Root, name string, h hash.Hash) (string, error) {
	f, err := root.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := hashInto(ctx, h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func hashInto(ctx context.Context, h hash.Hash, r io.Reader) error {
	buf := make([]byte, bufferSize)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := r.Read(buf)
		h.Write(buf[:n])
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// lockFile opens name in d for reading and writing, creates it if need be, and
// takes the lock on it. It returns nil if another process or goroutine holds it.
func lockFile(d *os.Root, name string) (*os.File, error) {
	f, err := d.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, nil
		}
		return nil, err
	}
	// The former holder may have renamed the file to its final name between the
	// two calls; writing to it now would damage what is installed.
	mine, err1 := f.Stat()
	now, err2 := d.Lstat(name)
	if err1 != nil || err2 != nil || !os.SameFile(mine, now) || !mine.Mode().IsRegular() {
		f.Close()
		if now != nil && !now.Mode().IsRegular() {
			return nil, &fs.PathError{Op: "open", Path: name, Err: errors.New("not a regular file")}
		}
		return nil, nil
	}
	return f, nil
}

func syncDir(d *os.Root, name string) error {
	f, err := d.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// finalError marks what no repetition mends.
type finalError struct{ err error }

func (e *finalError) Error() string { return e.err.Error() }
func (e *finalError) Unwrap() error { return e.err }

// bare takes the name of a temporary file out of an error: callers name the file
// that the user knows.
func bare(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	var l *os.LinkError
	if errors.As(err, &l) {
		return l.Err
	}
	return err
}
