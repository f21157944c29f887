package machine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// content describes every file of a directory, by relative path. Its
// digest covers names, types, owners, modes, capabilities and bytes, but no times:
// equal content has an equal digest.
type content map[string]entry

// entry describes one file.
type entry struct {
	// Line is the input of the digest.
	Line string `json:"line"`
	// Stamp changes with every change of the file: a process cannot write to a file, or replace it,
	// and keep inode number and ctime. Only regular files have one.
	Stamp string `json:"stamp,omitempty"`
}

// scan describes the current content of dir. It does not read files again whose stamp is the
// same as in known.
func scan(ctx context.Context, dir string, known content) (content, error) {
	found := make(content, max(len(known), 64))
	digest, buffer := sha256.New(), make([]byte, 1<<18)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("stat of %s is of an unknown kind", path)
		}
		e := entry{}
		line := fmt.Sprintf("%q %o %d:%d", name, st.Mode, st.Uid, st.Gid)
		switch {
		case info.Mode().IsRegular():
			e.Stamp = fmt.Sprintf("%x.%x.%x.%x", st.Dev, st.Ino, st.Size, st.Ctim.Nano())
			if k, ok := known[name]; ok && k.Stamp == e.Stamp && strings.HasPrefix(k.Line, line+" ") {
				line = k.Line
				break
			}
			sum, err := hashFile(path, digest, buffer)
			if err != nil {
				return err
			}
			capability, err := fileCapability(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d %x %x", st.Size, sum, capability)
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" -> %q", target)
		case info.Mode()&fs.ModeDevice != 0:
			line += fmt.Sprintf(" device %x", st.Rdev)
		}
		e.Line = line
		found[name] = e
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read content of %s: %w", dir, err)
	}
	return found, nil
}

// digest is the SHA-256 of all lines, sorted by path.
func (c content) digest() []byte {
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(c)) {
		_, _ = io.WriteString(h, c[name].Line+"\n")
	}
	return h.Sum(nil)
}

// difference returns the first path in which two contents differ, for messages; empty if
// they are equal.
func (c content) difference(other content) string {
	names := slices.Sorted(maps.Keys(c))
	for name := range other {
		if _, ok := c[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		if c[name].Line != other[name].Line {
			return name
		}
	}
	return ""
}

// file returns the SHA-256 of a regular file, from the scan.
func (c content) file(name string) ([]byte, error) {
	fields := strings.Fields(strings.TrimPrefix(c[name].Line, fmt.Sprintf("%q", name)))
	if len(fields) < 4 || c[name].Stamp == "" {
		return nil, fmt.Errorf("%s is no regular file of the content", name)
	}
	return hex.DecodeString(fields[3])
}

func hashFile(path string, h hash.Hash, buffer []byte) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h.Reset()
	if _, err := io.CopyBuffer(h, onlyReader{f}, buffer); err != nil {
		return nil, err
	}
	return h.Sum(nil), nil
}

// onlyReader hides the file's WriteTo, which would not use our buffer.
type onlyReader struct{ io.Reader }

// fileCapability reads the file capabilities of a program.
func fileCapability(path string) ([]byte, error) {
	value := make([]byte, 64)
	n, err := unix.Lgetxattr(path, "security.capability", value)
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read capabilities of %s: %w", path, err)
	}
	return bytes.Clone(value[:n]), nil
}

// rootfsMemory caches the last scan of each root file system, so that the next is
// short. The zero value is empty. It is safe for concurrent use.
type rootfsMemory struct {
	mu   sync.Mutex
	seen map[string]content // by the directory from Rootfs
}

// scan describes the current root file system.
func (m *rootfsMemory) scan(ctx context.Context, rootfs string) (content, error) {
	// One scan at a time: machines that start together share the result.
	m.mu.Lock()
	defer m.mu.Unlock()
	known, ok := m.seen[rootfs]
	if !ok {
		if err := readJSON(filepath.Join(rootfs, rootfsContent), &known); err != nil {
			return nil, fmt.Errorf("read what the root file system held when it was made: %w", err)
		}
	}
	now, err := scan(ctx, filepath.Join(rootfs, rootfsTree), known)
	if err != nil {
		return nil, err
	}
	if m.seen == nil {
		m.seen = map[string]content{}
	}
	m.seen[rootfs] = now
	return now, nil
}
