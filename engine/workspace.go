package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine/plan"
)

// Files of a workspace.
const (
	ConfigFile       = "constellation-conf.yaml"
	StateFile        = "constellation-state.yaml"        // 0600
	KubeconfigFile   = "constellation-admin.conf"        // 0600
	MasterSecretFile = "constellation-mastersecret.json" // 0600
	// pendingFile holds the kubeconfig from the moment it arrived until the machine
	// that made it was told so.
	pendingFile = ".constellation-admin.conf.pending"
	lockFile    = "lock" // in RunsDir
)

// Workspace is the directory that holds the files of one cluster. Every file is
// replaced as a whole: a reader sees the old or the new one, also after a crash.
type Workspace struct{ dir string }

// OpenWorkspace returns the workspace at dir, which must be a directory; "" means
// the current one. Nothing is read or written yet.
func OpenWorkspace(dir string) (*Workspace, error) {
	abs, err := filepath.Abs(dir)
	if err == nil {
		var info os.FileInfo
		if info, err = os.Stat(abs); err == nil && !info.IsDir() {
			err = errors.New("is not a directory")
		}
	}
	if err != nil {
		var p *fs.PathError
		if errors.As(err, &p) {
			err = p.Err
		}
		return nil, &plan.Error{Op: "open workspace " + dir, Err: err, Exit: plan.ExitUsage, Remedy: "make the directory, or name another one with -C"}
	}
	return &Workspace{abs}, nil
}

// Dir returns the absolute path of the workspace.
func (w *Workspace) Dir() string { return w.dir }

// Path returns the absolute path of one of its files.
func (w *Workspace) Path(name string) string { return filepath.Join(w.dir, name) }

func (w *Workspace) has(name string) bool {
	_, err := os.Lstat(w.Path(name))
	return err == nil
}

// errAbsent is inside the error of reading a file that is not there.
var errAbsent = fs.ErrNotExist

// absentFile says once what fs.ErrNotExist would repeat.
type absentFile struct{ name, dir string }

func (e absentFile) Error() string { return "there is no " + e.name + " in " + e.dir }

// Unwrap makes errors.Is(err, fs.ErrNotExist) true.
func (absentFile) Unwrap() error { return errAbsent }

// read returns the content of a file of at most maxFile bytes.
func (w *Workspace) read(name string) ([]byte, error) {
	info, err := os.Stat(w.Path(name))
	remedy := ""
	switch {
	case err == nil && info.IsDir():
		err, remedy = errors.New("it is a directory, want a file"), "move it away, or name another workspace with -C"
	case err == nil && !info.Mode().IsRegular():
		err, remedy = errors.New("it is not a file"), "move it away, or name another workspace with -C"
	case err == nil && info.Size() > maxFile:
		err = fmt.Errorf("it has %s, and more than %s is never right", sizeOf(info.Size()), sizeOf(maxFile))
		remedy = "is it the right file? Move it away and put the right one there"
	}
	var b []byte
	if err == nil {
		b, err = os.ReadFile(w.Path(name))
	}
	if err != nil {
		e := &plan.Error{Op: "read " + w.Path(name), Err: withoutPath(err), Exit: plan.ExitUsage, Remedy: remedy}
		if errors.Is(err, fs.ErrPermission) {
			e.Remedy = "run as the user that owns the file"
		}
		return nil, e
	}
	return b, nil
}

// sizeOf writes a number of bytes for people.
func sizeOf(n int64) string {
	if n >= 1<<20 {
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%d bytes", n)
}

// Config reads the configuration. A *ConfigErrors is inside the error if the file is
// there and wrong.
func (w *Workspace) Config() (*Config, error) {
	b, err := w.ReadConfig()
	if err != nil {
		return nil, err
	}
	c, err := ParseConfig(b)
	if err != nil {
		return nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "correct the file; `constellation config validate` checks it again"}
	}
	return c, nil
}

// ReadConfig returns the text of the configuration.
func (w *Workspace) ReadConfig() ([]byte, error) {
	b, err := w.read(ConfigFile)
	if errors.Is(err, errAbsent) {
		return nil, &plan.Error{
			Op: "read configuration", Err: absentFile{ConfigFile, w.dir}, Exit: plan.ExitUsage,
			Remedy: "run `constellation sandbox up`, which writes one, or `constellation config generate sandbox`; -C names another directory",
		}
	}
	return b, err
}

// State reads the state file. A *ConfigErrors is inside the error if the file is
// there and wrong.
func (w *Workspace) State() (*State, error) {
	b, err := w.read(StateFile)
	if errors.Is(err, errAbsent) {
		e := &plan.Error{
			Op: "read state", Err: absentFile{StateFile, w.dir}, Exit: plan.ExitUsage,
			Remedy: "run `constellation sandbox up`, which makes machines and writes it; if they exist already, copy the file to this directory",
		}
		if w.has(KubeconfigFile) || w.has(MasterSecretFile) {
			// `sandbox up` would refuse: these are of a cluster that it does not know.
			e.Remedy = "restore the file from your copy: the other files here are of a cluster that it belongs to; if that is gone, move " +
				strings.Join(w.clusterFiles(), ", ") + " away first"
		}
		return nil, e
	}
	if err != nil {
		return nil, err
	}
	s, err := ParseState(b)
	if err != nil {
		return nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "restore the file from a backup; `constellation sandbox up` writes it anew if it is absent"}
	}
	return s, nil
}

// writeState replaces the state file.
func (w *Workspace) writeState(s *State) error {
	b, err := s.marshal()
	if err != nil {
		return fmt.Errorf("write %s: %w", StateFile, err)
	}
	return w.write(StateFile, b, 0o600)
}

// WriteConfig writes a new configuration and returns its path. It refuses to replace
// one.
func (w *Workspace) WriteConfig(b []byte) (string, error) {
	if w.has(ConfigFile) {
		return "", &plan.Error{
			Op: "write configuration", Err: fmt.Errorf("%s is there already", w.Path(ConfigFile)), Exit: plan.ExitUsage,
			Remedy: "move it away, or edit it",
		}
	}
	return w.Path(ConfigFile), w.write(ConfigFile, b, 0o644)
}

// ReplaceConfig replaces the configuration.
func (w *Workspace) ReplaceConfig(b []byte) error { return w.write(ConfigFile, b, 0o644) }

// Kubeconfig returns the administrator's kubeconfig. The error wraps fs.ErrNotExist
// if there is none.
func (w *Workspace) Kubeconfig() ([]byte, error) { return w.read(KubeconfigFile) }

// badKubeconfig is why the kubeconfig, which could be read, leads to no cluster.
func (w *Workspace) badKubeconfig(err error) *plan.Error {
	return &plan.Error{Op: "read " + w.Path(KubeconfigFile), Err: err, Exit: plan.ExitUsage, Remedy: "restore the file from a backup"}
}

// masterSecret returns the master secret, which wraps errAbsent if there is none.
func (w *Workspace) masterSecret() (MasterSecret, error) {
	b, err := w.read(MasterSecretFile)
	if err != nil {
		return MasterSecret{}, err
	}
	m, err := parseMasterSecret(b)
	if err != nil {
		return MasterSecret{}, &plan.Error{
			Op: "read " + w.Path(MasterSecretFile), Err: err, Exit: plan.ExitUsage,
			Remedy: "restore the file from your copy; nothing can replace it once the cluster exists",
		}
	}
	return m, nil
}

func (w *Workspace) writeMasterSecret(m MasterSecret) error {
	b, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("write %s: %w", MasterSecretFile, err)
	}
	return w.write(MasterSecretFile, append(b, '\n'), 0o600)
}

// AdoptSandbox writes constellation-conf.yaml and constellation-state.yaml for a
// sandbox where they are absent, and constellation-admin.conf if its cluster comes with it,
// and returns the names of what it wrote or changed.
//
// Files that belong to something else are never touched: a state file of another
// sandbox, or of an earlier one of this name, is an error with ExitUsage that says
// what to do. Addresses that changed because the sandbox was started again are
// brought up to date.
func (w *Workspace) AdoptSandbox(i SandboxInfo) (written []string, err error) {
	switch s, err := w.State(); {
	case err == nil:
		if err := w.sameSandbox(s, i); err != nil {
			return nil, err
		}
		if len(i.InitSecret) == 0 {
			i.InitSecret = s.Infrastructure.InitSecret
		}
		fresh, err := newState(i)
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", StateFile, err)
		}
		fresh.ClusterValues = s.ClusterValues
		before, _ := s.marshal()
		after, err := fresh.marshal()
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", StateFile, err)
		}
		if !bytes.Equal(before, after) {
			if err := w.write(StateFile, after, 0o600); err != nil {
				return nil, err
			}
			written = append(written, StateFile)
		}
	case errors.Is(err, errAbsent):
		if err := w.checkLeftovers(i.Name); err != nil {
			return nil, err
		}
		s, err := newState(i)
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", StateFile, err)
		}
		if err := w.writeState(s); err != nil {
			return nil, err
		}
		written = append(written, StateFile)
	default:
		return nil, err
	}
	if !w.has(ConfigFile) {
		b, err := GenerateConfig("sandbox", GenerateOptions{Sandbox: &i})
		if err != nil {
			return written, err
		}
		if _, err := w.WriteConfig(b); err != nil {
			return written, err
		}
		written = append(written, ConfigFile)
	}
	if len(i.Kubeconfig) > 0 {
		if have, err := w.Kubeconfig(); err != nil || !bytes.Equal(have, i.Kubeconfig) {
			if err := w.write(KubeconfigFile, i.Kubeconfig, 0o600); err != nil {
				return written, err
			}
			written = append(written, KubeconfigFile)
		}
	}
	return written, nil
}

// checkLeftovers refuses files of a cluster that need a state file to belong to it.
func (w *Workspace) checkLeftovers(sandbox string) error {
	var names []string
	for _, f := range []string{KubeconfigFile, MasterSecretFile} {
		if w.has(f) {
			names = append(names, f)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return &plan.Error{
		Op: "write " + w.Path(StateFile), Err: fmt.Errorf("%s of another cluster would get mixed up with sandbox %s", strings.Join(names, " and "), sandbox),
		Exit: plan.ExitUsage, Remedy: "move these files to a safe place, or use another directory with -C",
	}
}

// sameSandbox returns an error unless s is the state of sandbox i.
func (w *Workspace) sameSandbox(s *State, i SandboxInfo) error {
	var why string
	switch have := s.Infrastructure; {
	case have.Sandbox == nil || have.Sandbox.Name != i.Name:
		why = fmt.Sprintf("it belongs to %s %q", have.Provider, have.Name)
	case have.UID != i.UID:
		why = fmt.Sprintf("it belongs to an earlier sandbox %q, which was taken down", i.Name)
	default:
		return nil
	}
	return &plan.Error{
		Op: "use " + w.Path(StateFile), Err: errors.New(why), Exit: plan.ExitUsage,
		Remedy: fmt.Sprintf("move %s away, or use another directory with -C", strings.Join(w.clusterFiles(), ", ")),
	}
}

// clusterFiles are the names of the files that belong to one cluster and are there.
func (w *Workspace) clusterFiles() (names []string) {
	for _, f := range []string{StateFile, KubeconfigFile, MasterSecretFile, pendingFile} {
		if w.has(f) {
			names = append(names, f)
		}
	}
	return names
}

// write replaces a file: written beside it, flushed to the disk, renamed over it,
// and the renaming flushed too. After an error the old file is what it was and
// nothing is left beside it.
func (w *Workspace) write(name string, b []byte, mode os.FileMode) error {
	path := w.Path(name)
	fail := func(err error) error {
		e := &plan.Error{Op: "write " + path, Err: withoutPath(err)}
		switch {
		case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
			e.Remedy = "free some space on the disk, then run the same command again"
		case errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS):
			e.Remedy = "make the directory writable for this user, or use another one with -C"
		}
		return e
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*") // 0600
	if err != nil {
		return fail(err)
	}
	tmp := f.Name()
	_, err = f.Write(b)
	if err == nil && mode != 0o600 {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		os.Remove(tmp)
		return fail(err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return fail(err)
	}
	return nil
}

// writeIn writes a file into a directory as a Workspace writes its own.
func writeIn(dir, name string, b []byte, mode os.FileMode) error {
	return (&Workspace{dir}).write(name, b, mode)
}

// rename gives a file its final name.
func (w *Workspace) rename(from, to string) error {
	err := os.Rename(w.Path(from), w.Path(to))
	if err == nil {
		err = syncDir(w.dir)
	}
	if err != nil {
		return &plan.Error{Op: "write " + w.Path(to), Err: withoutPath(err)}
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	// Some file systems cannot flush a directory; the rename is done all the same.
	if err := d.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOTSUP) {
		return err
	}
	return nil
}

// withoutPath takes operation and path out of err: callers name them better.
func withoutPath(err error) error {
	var p *fs.PathError
	var l *os.LinkError
	switch {
	case errors.As(err, &p):
		return p.Err
	case errors.As(err, &l):
		return l.Err
	}
	return err
}

// holder is who holds a workspace; it is written into the lock's file.
type holder struct {
	PID   int       `json:"pid"`
	Host  string    `json:"host"`
	Since time.Time `json:"since"`
	Run   string    `json:"run"`
}

// lock takes the workspace for one run. It is the kernel's lock: it ends with the
// process, however that ends. If somebody else has it, the error has ExitHeld and
// says who and since when.
func (w *Workspace) lock(run string, now time.Time) (unlock func(), err error) {
	dir := w.Path(plan.RunsDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, &plan.Error{Op: "make " + dir, Err: withoutPath(err), Remedy: "make the directory writable for this user, or use another one with -C"}
	}
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, &plan.Error{Op: "lock workspace " + w.dir, Err: withoutPath(err), Remedy: "make the directory writable for this user, or use another one with -C"}
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, &plan.Error{Op: "lock workspace " + w.dir, Err: err, Remedy: "use a directory on a local disk"}
		}
		var h holder
		b := make([]byte, 4096)
		n, _ := f.ReadAt(b, 0)
		who := "another process"
		if json.Unmarshal(b[:n], &h) == nil && h.PID > 0 {
			who = fmt.Sprintf("process %d on %s holds it since %s (run %s)", h.PID, h.Host, h.Since.Local().Format("15:04:05"), h.Run)
		}
		return nil, &plan.Error{Op: "lock workspace " + w.dir, Err: errors.New(who), Exit: plan.ExitHeld, Remedy: "wait for it to end, or end that process; what it began can be resumed"}
	}
	host, _ := os.Hostname()
	b, err := json.Marshal(holder{os.Getpid(), host, now, run})
	if err == nil {
		if err = f.Truncate(0); err == nil {
			_, err = f.WriteAt(b, 0)
		}
	}
	if err != nil && !errors.Is(err, syscall.ENOSPC) { // the lock holds without its text
		f.Close()
		return nil, &plan.Error{Op: "lock workspace " + w.dir, Err: withoutPath(err)}
	}
	return func() {
		_ = f.Truncate(0) // for tidiness; the lock counts, not its text
		f.Close()         // releases the lock
	}, nil
}

// loose returns the files with secrets that others than the owner may read.
func (w *Workspace) loose() (names []string) {
	for _, f := range []string{StateFile, KubeconfigFile, MasterSecretFile, pendingFile} {
		if info, err := os.Stat(w.Path(f)); err == nil && info.Mode().Perm()&0o077 != 0 {
			names = append(names, f)
		}
	}
	return names
}

// hostOf returns the host of host:port, or all of it if there is no port.
func hostOf(endpoint string) string {
	if h, _, err := net.SplitHostPort(endpoint); err == nil {
		return h
	}
	return endpoint
}

func isHostPort(s string) bool {
	h, p, err := net.SplitHostPort(s)
	if err != nil || h == "" || p == "" || strings.ContainsAny(h, "/ \t") {
		return false
	}
	port, err := strconv.ParseUint(p, 10, 16)
	return err == nil && port > 0
}

// absent is the error about a file that the workspace does not have. It wraps errAbsent.
func (w *Workspace) absent(name string) error { return absentFile{name, w.dir} }
