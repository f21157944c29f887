//go:build unix

package component

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"constellation/internal/tarcheck"
)

// manifest records the entries that an archive created in its directory, so that a later check
// can detect changes. It is stored beside the directory's content.
type manifest struct {
	Digest string  `json:"digest"`
	Size   int64   `json:"size"`
	Files  []entry `json:"files"`
}

// entry is one file, directory or symbolic link of an archive.
type entry struct {
	Name   string      `json:"name"`
	Mode   fs.FileMode `json:"mode"` // type and permission bits
	SHA256 string      `json:"sha256,omitempty"`
	Target string      `json:"target,omitempty"`
}

// maxManifest is in bytes; 20,000 entries of ordinary length are 3 MB.
const maxManifest = 64 << 20

func (c Component) manifestName() string { return "." + c.Name + ".manifest.json" }

// extract unpacks the archive f into d. Everything is unpacked and checked in a
// hidden directory first; then each entry is renamed to its place.
func (in *Installer) extract(ctx context.Context, d *os.Root, f *os.File, c Component) error {
	info, err := f.Stat()
	if err != nil {
		return extractError(c, err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return extractError(c, err)
	}
	staging := fmt.Sprintf(".%s.%s.staging", c.Name, c.short())
	if err := d.RemoveAll(staging); err != nil {
		return extractError(c, err)
	}
	if err := d.Mkdir(staging, 0o700); err != nil {
		return extractError(c, err)
	}
	// Files that cannot be removed now are removed by the next attempt.
	defer func() { _ = d.RemoveAll(staging) }()
	s, err := d.OpenRoot(staging)
	if err != nil {
		return extractError(c, err)
	}
	defer s.Close()

	u := unpacker{
		root: s, limits: in.limit(), names: tarcheck.Names{},
		kinds: map[string]fs.FileMode{".": fs.ModeDir}, listed: map[string]bool{}, files: map[string]int{},
	}
	if err := u.run(ctx, f); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return extractError(c, err)
	}
	// Before the first rename, so that a conflict leaves the directory as it was.
	for _, e := range u.entries {
		if i, err := d.Lstat(e.Name); err == nil && i.IsDir() != e.Mode.IsDir() {
			return extractError(c, fmt.Errorf("%s exists as something else", path.Join(c.Path, e.Name)))
		}
	}
	dirs := []string{"."}
	for _, e := range u.entries {
		if e.Mode.IsDir() {
			if err := d.Mkdir(e.Name, e.Mode.Perm()); err != nil && !errors.Is(err, fs.ErrExist) {
				return extractError(c, err)
			}
			dirs = append(dirs, e.Name)
			continue
		}
		if err := d.Rename(path.Join(staging, e.Name), e.Name); err != nil {
			return extractError(c, err)
		}
	}
	b, err := json.Marshal(manifest{c.Digest, info.Size(), u.entries})
	if err != nil {
		return extractError(c, err)
	}
	if err := writeSynced(d, path.Join(staging, "manifest"), b); err != nil {
		return extractError(c, err)
	}
	if err := d.Rename(path.Join(staging, "manifest"), c.manifestName()); err != nil {
		return extractError(c, err)
	}
	for _, name := range dirs {
		if err := syncDir(d, name); err != nil {
			return extractError(c, err)
		}
	}
	return nil
}

func extractError(c Component, err error) error {
	return &finalError{fmt.Errorf("extract into %s: %w", c.Path, bare(err))}
}

func writeSynced(d *os.Root, name string, b []byte) error {
	f, err := d.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(b); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return f.Close()
}

// unpacked reports whether the archive's content is in its directory, and the
// archive's size.
func unpacked(ctx context.Context, root *os.Root, rel string, c Component) (bool, int64, error) {
	d, err := root.OpenRoot(rel)
	if err != nil {
		return false, 0, nil
	}
	defer d.Close()
	f, err := d.Open(c.manifestName())
	if err != nil {
		return false, 0, nil
	}
	defer f.Close()
	var m manifest
	if err := json.NewDecoder(io.LimitReader(f, maxManifest)).Decode(&m); err != nil || m.Digest != c.Digest {
		return false, 0, nil
	}
	for _, e := range m.Files {
		i, err := d.Lstat(e.Name)
		if err != nil || i.Mode().Type() != e.Mode.Type() {
			return false, 0, nil
		}
		switch {
		case e.Mode.IsDir():
		case e.Mode.Type() == fs.ModeSymlink:
			if t, err := d.Readlink(e.Name); err != nil || t != e.Target {
				return false, 0, nil
			}
		default:
			if i.Mode() != e.Mode {
				return false, 0, nil
			}
			sum, err := hashFile(ctx, d, e.Name, sha256.New())
			if ctx.Err() != nil {
				return false, 0, ctx.Err()
			}
			if err != nil || sum != e.SHA256 {
				return false, 0, nil
			}
		}
	}
	return true, m.Size, nil
}

// unpacker writes the entries of one archive below root, which is empty at first.
type unpacker struct {
	root    *os.Root
	limits  limits
	entries []entry
	kinds   map[string]fs.FileMode // type bits of everything written, by name
	names   tarcheck.Names
	listed  map[string]bool // directories that the archive names itself
	files   map[string]int  // index in entries, of regular files
	size    int64           // bytes of all regular files
}

func (u *unpacker) run(ctx context.Context, r io.Reader) error {
	gz, err := gzip.NewReader(bufio.NewReaderSize(r, bufferSize))
	if err != nil {
		return fmt.Errorf("not a gzip archive: %w", err)
	}
	// Contents are counted entry by entry; this bound is for what the tar reader
	// skips by itself. Headers and padding are at most 1.5 kB an entry.
	bound := u.limits.extracted + int64(u.limits.entries)*1536 + (1 << 20)
	bounded := &boundedReader{ctx, gz, bound}
	tr := tar.NewReader(bounded)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return tarcheck.End(bounded)
		}
		if err != nil {
			return fmt.Errorf("read archive: %w", err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader { // a comment in the archive
			if u.limits.entries--; u.limits.entries < 0 {
				return errors.New("archive has too many entries")
			}
			continue
		}
		if err := u.add(h, tr); err != nil {
			return fmt.Errorf("entry %q: %w", clip(h.Name), err)
		}
	}
}

// add checks one entry and writes it.
func (u *unpacker) add(h *tar.Header, r io.Reader) error {
	name := path.Clean(h.Name)
	switch {
	case h.Name == "" || strings.ContainsRune(h.Name, 0) || !utf8.ValidString(h.Name):
		return errors.New("malformed name")
	case path.IsAbs(h.Name) || !filepath.IsLocal(name) || climbs(h.Name):
		return errors.New("leaves the directory")
	case len(name) > 1024 || strings.Count(name, "/") > 32:
		return errors.New("name is too long or too deep")
	}
	if err := u.names.Entry(h, name); err != nil {
		return err
	}
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return errors.New("is the directory itself")
		}
		return nil
	}
	if h.Mode&0o7000 != 0 {
		return errors.New("has set-user-ID, set-group-ID or sticky bit")
	}
	if len(u.entries) >= u.limits.entries {
		return errors.New("archive has too many entries")
	}
	kind, exists := u.kinds[name]
	if exists && (h.Typeflag != tar.TypeDir || !kind.IsDir() || u.listed[name]) {
		return errors.New("is there twice")
	}
	if err := u.parents(path.Dir(name)); err != nil {
		return err
	}
	perm := fs.FileMode(h.Mode) & 0o755 // nothing in a node's programs is writable by others
	switch h.Typeflag {
	case tar.TypeDir:
		return u.dir(name)
	case tar.TypeReg:
		return u.file(name, perm|0o400, h.Size, r)
	case tar.TypeSymlink:
		return u.symlink(name, h.Linkname)
	case tar.TypeLink:
		return u.link(name, h.Linkname)
	}
	return errors.New("is neither file, directory nor link")
}

// climbs reports whether a name has ".." anywhere, even where it would stay inside.
func climbs(name string) bool {
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return true
		}
	}
	return false
}

// parents makes the directories that the archive left out. A symbolic link is no
// parent: what lies behind it is not ours to write to.
func (u *unpacker) parents(dir string) error {
	kind, ok := u.kinds[dir]
	if ok {
		if !kind.IsDir() {
			return errors.New("is below an entry that is not a directory")
		}
		return nil
	}
	if err := u.parents(path.Dir(dir)); err != nil {
		return err
	}
	return u.mkdir(dir)
}

func (u *unpacker) dir(name string) error {
	if _, ok := u.kinds[name]; !ok {
		if err := u.mkdir(name); err != nil {
			return err
		}
	}
	u.listed[name] = true
	return nil
}

func (u *unpacker) mkdir(name string) error {
	if len(u.entries) >= u.limits.entries {
		return errors.New("archive has too many entries")
	}
	if err := u.root.Mkdir(name, 0o755); err != nil {
		return err
	}
	u.kinds[name] = fs.ModeDir
	u.entries = append(u.entries, entry{Name: name, Mode: fs.ModeDir | 0o755})
	return nil
}

func (u *unpacker) file(name string, perm fs.FileMode, size int64, r io.Reader) error {
	if size < 0 || size > u.limits.extracted-u.size {
		return fmt.Errorf("archive holds more than %d bytes", u.limits.extracted)
	}
	u.size += size
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	// One byte more than announced would be a reader that lies.
	n, err := io.Copy(io.MultiWriter(f, h), io.LimitReader(r, size+1))
	if err != nil {
		return err
	}
	if n != size {
		return io.ErrUnexpectedEOF
	}
	if err := f.Chmod(perm); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	u.kinds[name] = 0
	u.files[name] = len(u.entries)
	u.entries = append(u.entries, entry{Name: name, Mode: perm, SHA256: hex.EncodeToString(h.Sum(nil))})
	return nil
}

// symlink makes a link that cannot lead out of the directory: relative, and with
// ".." only at the beginning. Then no other link can bend it: its own parents are
// real directories, and every further link on its way obeys the same rule.
func (u *unpacker) symlink(name, target string) error {
	if target == "" || path.IsAbs(target) || strings.ContainsRune(target, 0) || !utf8.ValidString(target) || len(target) > 1024 {
		return errors.New("links to outside of the directory")
	}
	rest := target
	for {
		after, ok := strings.CutPrefix(rest, "../")
		if !ok {
			break
		}
		rest = after
	}
	if rest != ".." && climbs(rest) || !filepath.IsLocal(path.Join(path.Dir(name), target)) {
		return errors.New("links to outside of the directory")
	}
	if err := u.root.Symlink(target, name); err != nil {
		return err
	}
	u.kinds[name] = fs.ModeSymlink
	u.entries = append(u.entries, entry{Name: name, Mode: fs.ModeSymlink, Target: target})
	return nil
}

// link makes a second name for a file of this archive.
func (u *unpacker) link(name, target string) error {
	if path.IsAbs(target) || climbs(target) {
		return errors.New("links to outside of the directory")
	}
	i, ok := u.files[path.Clean(target)]
	if !ok {
		return errors.New("links to a file that is not in the archive")
	}
	if err := u.root.Link(path.Clean(target), name); err != nil {
		return err
	}
	u.kinds[name] = 0
	u.files[name] = len(u.entries)
	e := u.entries[i]
	e.Name = name
	u.entries = append(u.entries, e)
	return nil
}

// boundedReader ends with an error, not with io.EOF, when its bound is reached or
// its context is.
type boundedReader struct {
	ctx  context.Context
	r    io.Reader
	left int64
}

func (b *boundedReader) Read(p []byte) (int, error) {
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	if b.left <= 0 {
		return 0, errors.New("archive is too large")
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.r.Read(p)
	b.left -= int64(n)
	return n, err
}

func clip(s string) string {
	if len(s) > 100 {
		return s[:100] + "..."
	}
	return s
}
