package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// manifestFile describes the content of a cache. It is replaced as a whole after
// every finished file.
const manifestFile = "manifest.json"

type manifest struct {
	Version string            `json:"version"`
	Files   map[string]record `json:"files"` // by path below the version's directory, with slashes
}

// A record identifies one file.
type record struct {
	// Key identifies the inputs of the file. A file with another key is built again.
	Key    string `json:"key"`
	Digest string `json:"digest"` // "sha256:<64 hex>"
	Size   int64  `json:"size"`
	// Modified is the file's time when its digest was last verified. While it and
	// the size are unchanged, the file is not read again.
	Modified time.Time `json:"modified"`
	// Image is the digest of the image in an archive.
	Image string `json:"image,omitempty"`
	// From names the tools: "go1.26.8", or Debian packages and versions. A version of Kubernetes
	// beside them names the patch whose modules the program was compiled from. A published program
	// has the address and digest of its archive instead.
	From []string `json:"from"`
}

// A store is the cache of one version. It is not for concurrent use.
type store struct {
	dir   string
	files map[string]record
	stale bool // files differs from the manifest on disk
}

// cacheDir is the directory with the stores of all versions.
func (s *store) cacheDir() string { return filepath.Dir(filepath.Dir(s.dir)) }

func versionDir(cacheDir, version string) string {
	return filepath.Join(cacheDir, "kubernetes", version)
}

// openStore reads the manifest of version. A missing or invalid one is an
// empty cache: everything can be built again.
func openStore(cacheDir, version string) (*store, error) {
	s := &store{dir: versionDir(cacheDir, version), files: make(map[string]record)}
	b, err := os.ReadFile(filepath.Join(s.dir, manifestFile))
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read cache of Kubernetes %s: %w", version, err)
	}
	var m manifest
	if err := json.Unmarshal(b, &m); err == nil && m.Version == version {
		maps.Copy(s.files, m.Files)
	}
	return s, nil
}

func (s *store) path(name string) string { return filepath.Join(s.dir, filepath.FromSlash(name)) }

// has reports whether the file name is in the cache, with this key, and
// unmodified.
func (s *store) has(name, key string) bool {
	r, ok := s.files[name]
	if !ok || r.Key != key {
		return false
	}
	info, err := os.Stat(s.path(name))
	if err != nil || !info.Mode().IsRegular() || info.Size() != r.Size {
		return false
	}
	if info.ModTime().Equal(r.Modified) {
		return true
	}
	// Copied, restored or modified: only the digest decides.
	digest, _, err := digestFile(s.path(name))
	if err != nil || digest != r.Digest {
		return false
	}
	r.Modified = info.ModTime()
	s.files[name], s.stale = r, true
	return true
}

// hasProgram reports whether p is in the cache, in one of its forms.
func (s *store) hasProgram(p program, fromSource bool) bool {
	return slices.ContainsFunc(p.keys(fromSource), func(key string) bool { return s.has(p.path(), key) })
}

// missing returns the parts of r that s lacks. A published program is missing if all must be
// compiled, with fromSource.
func (s *store) missing(r recipe, fromSource bool) missing {
	var m missing
	for _, p := range r.programs() {
		if !s.hasProgram(p, fromSource) {
			m.programs = append(m.programs, p)
		}
	}
	m.tools = !s.has(toolsPath, toolsKey(r.date))
	for _, i := range r.images() {
		// With an input gone or changed, an image that was made from it stands only until
		// the input is there again: its key then says whether it is the same.
		if !s.has(i.path(), s.imageKey(r, i)) {
			m.images = append(m.images, i)
		}
	}
	return m
}

// imageKey is i's key with the inputs that the cache has now.
func (s *store) imageKey(r recipe, i imageSpec) string {
	var contents []string
	for _, name := range i.programs() {
		contents = append(contents, s.files["bin/"+name].Digest)
	}
	if i.tools {
		contents = append(contents, s.files[toolsPath].Digest)
	}
	return i.key(r.date, contents...)
}

// adopt moves the finished file at path into the cache as name, and then records it.
func (s *store) adopt(path, name string, r record) error {
	var err error
	if r.Digest, r.Size, err = digestFile(path); err != nil {
		return fmt.Errorf("read %s: %w", filepath.Base(path), err)
	}
	to := s.path(name)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	if err := syncFile(path); err != nil {
		return err
	}
	if err := os.Rename(path, to); err != nil {
		return err
	}
	info, err := os.Stat(to)
	if err != nil {
		return err
	}
	r.Modified = info.ModTime()
	s.files[name], s.stale = r, true
	return s.save()
}

// save writes the manifest if it has changed.
func (s *store) save() error {
	if !s.stale {
		return nil
	}
	b, err := json.MarshalIndent(manifest{Version: filepath.Base(s.dir), Files: s.files}, "", "  ")
	if err != nil {
		return fmt.Errorf("write cache manifest: %w", err)
	}
	temp := s.path(manifestFile + ".new") // one writer at a time: the lock is held
	if err := os.WriteFile(temp, append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("write cache manifest: %w", err)
	}
	if err := syncFile(temp); err != nil {
		return err
	}
	if err := os.Rename(temp, s.path(manifestFile)); err != nil {
		return fmt.Errorf("write cache manifest: %w", err)
	}
	s.stale = false
	return nil
}

// stagePrefix is the name prefix of directories for unfinished work.
const stagePrefix = "stage-"

// stage makes a directory for unfinished work, on the cache's file system, and
// returns a function that removes it.
func (s *store) stage() (dir string, remove func(), err error) {
	dir, err = os.MkdirTemp(s.dir, stagePrefix)
	if err != nil {
		return "", nil, fmt.Errorf("make directory for unfinished work: %w", err)
	}
	return dir, func() { _ = s.sweep() }, nil // what stays is removed by the next build
}

// sweep removes unfinished work, including that of killed processes. The caller
// holds the lock.
func (s *store) sweep() error {
	root, err := os.OpenRoot(s.dir)
	if err != nil {
		return fmt.Errorf("open cache: %w", err)
	}
	defer root.Close()
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return fmt.Errorf("read cache: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() && strings.HasPrefix(e.Name(), stagePrefix) {
			if err := root.RemoveAll(e.Name()); err != nil {
				return fmt.Errorf("remove unfinished work: %w", err)
			}
		}
	}
	return nil
}

func (s *store) artifacts(r recipe) *Artifacts {
	a := &Artifacts{Version: r.version, Dir: s.dir, Binaries: make(map[string]string), Digests: make(map[string]string)}
	for _, p := range r.programs() {
		a.Binaries[p.name] = s.path(p.path())
		a.Digests[p.name] = s.files[p.path()].Digest
	}
	for _, i := range r.images() {
		a.Images = append(a.Images, Image{Ref: i.ref, Path: s.path(i.path()), Digest: s.files[i.path()].Image})
	}
	return a
}

// lockPoll is the interval at which a process polls a lock that another process holds. The
// kernel can block until a release, but not until a context ends.
const lockPoll = 100 * time.Millisecond

// lock takes the lock file at path for this process, and returns the function that releases
// it. The end of the process also releases it. While another process holds it, waiting is
// called once a second with a name for the holder.
func lock(ctx context.Context, path string, waiting func(holder string)) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for n := 0; ; n++ {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if n%int(time.Second/lockPoll) == 0 {
			waiting(holder(f))
		}
		select {
		case <-ctx.Done():
			err := fmt.Errorf("wait for %s: %w", holder(f), context.Cause(ctx))
			f.Close()
			return nil, err
		case <-tick.C:
		}
	}
	// A hint for waiting processes. A failure does not matter.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())), 0)
	}
	return func() { f.Close() }, nil
}

func holder(f *os.File) string {
	b := make([]byte, 20)
	n, _ := f.ReadAt(b, 0)
	if pid, err := strconv.Atoi(string(b[:n])); err == nil {
		return "process " + strconv.Itoa(pid)
	}
	return "another process"
}

// digestFile returns "sha256:<64 hex>" and the size of a file.
func digestFile(path string) (digest string, size int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	if size, err = io.CopyBuffer(h, f, make([]byte, 1<<20)); err != nil {
		return "", 0, err
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), size, nil
}

// syncFile ensures that the bytes reach the disk before
// the manifest that records them.
func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
