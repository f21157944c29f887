// Package workspace answers: what do the files of a cluster's directory say, and how are they
// changed?
//
// A [Workspace] holds the configuration, the state, the master secret and the kubeconfig.
// Every file is read strictly, with the line of what is wrong, and written whole or not at
// all; secrets have mode 0600 and never appear in errors. The package asks neither a cloud
// nor a cluster.
package workspace

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/plan"
)

// foreign is the error of a file of another cluster.
func (w *Workspace) foreign(file, why, remedy string) error {
	return &plan.Error{Op: "use " + w.Path(file), Err: errors.New(why), Remedy: remedy, Exit: plan.ExitUsage}
}

// SameProvider returns an error unless configuration and state name the same machines.
func (w *Workspace) SameProvider(c *Config, s *State) error {
	if c.Provider.Name != s.Infrastructure.Provider {
		return w.foreign(StateFile, fmt.Sprintf("it is of provider %s, and the configuration names %s%s", s.Infrastructure.Provider, c.Provider.Name, c.At("provider")),
			fmt.Sprintf("move %s to a safe place, or use another directory with -C", strings.Join(w.ClusterFiles(), ", ")))
	}
	p, known := providers.Named(c.Provider.Name)
	if !known {
		return w.foreign(ConfigFile, "provider "+c.Provider.Name+" is not in this release", "use the program that wrote it")
	}
	if f := section.Differs(p.Config, p.State, c.Provider.Section, s.Infrastructure.Section); f != "" {
		want, have := c.Provider.Section[f], s.Infrastructure.Section[f]
		return w.foreign(StateFile, fmt.Sprintf("it belongs to %s %q, and the configuration names %q%s", p.Name, have, want, c.At("provider")),
			fmt.Sprintf("move %s to a safe place and %s, which writes that of %s. If %s is the one that you want, write %s: %s",
				strings.Join(w.ClusterFiles(), ", "), c.Advice().Create, c.Advice().Cloud, s.Advice().Cloud, sectionField(p.Name, f), have))
	}
	return nil
}

// Belong returns an error unless the workspace's files belong to one cluster.
func (w *Workspace) Belong(c *Config, s *State) error {
	if err := w.SameProvider(c, s); err != nil {
		return err
	}
	const away = "move it to a safe place, or use another directory with -C"
	foreign := w.foreign
	p, _ := providers.Named(c.Provider.Name)
	if p.Inventory {
		return nil // an adopted cluster has no master secret
	}
	v := s.ClusterValues
	for _, f := range []string{KubeconfigFile, PendingFile} {
		if len(v.ClusterID) == 0 && w.Has(f) {
			return foreign(f, "it belongs to another cluster: "+StateFile+" knows of none yet", away)
		}
	}
	m, err := w.MasterSecret()
	switch {
	case errors.Is(err, ErrAbsent) && len(v.ClusterID) > 0 && !w.Has(KubeconfigFile):
		return foreign(StateFile, "a cluster was begun with a master secret that is not there any more", "put "+MasterSecretFile+" back; without it, take the machines down and start over")
	case errors.Is(err, ErrAbsent):
	case err != nil:
		return err
	case len(v.ClusterID) > 0 && string(m.ClusterID(v.MeasurementSalt)) != string(v.ClusterID):
		return foreign(MasterSecretFile, "it belongs to another cluster: the cluster ID in "+StateFile+" is not derived from it", "put the file of this cluster back")
	}
	return nil
}

// OnMachines is the error of a verb that changes the cluster or its machines, if the cluster was adopted or the provider
// has machines that cannot be changed. An adopted cluster is upgraded with kubeadm ([ErrAdopted]).
func (w *Workspace) OnMachines(v plan.Verb) error {
	s, err := w.State()
	if err != nil {
		return nil // other callers report problems of the state
	}
	switch {
	case s.Unmanaged():
		return w.adoptedError()
	case s.Adopted() && (v == plan.VerbInit || v == plan.VerbRevoke):
		return &plan.Error{
			Op: "run " + string(v), Err: errors.New("the cluster was adopted: its machines join and leave by kubeadm"), Exit: plan.ExitUsage,
			Remedy: "run `kubeadm join` or `kubeadm reset` on the machine, then `constellation adopt --operator`",
		}
	}
	p, ok := providers.Named(s.Infrastructure.Provider)
	if !ok || p.Fixed == nil {
		return nil
	}
	reason, remedy := p.Fixed(s.Infrastructure.Section)
	if reason == "" {
		return nil
	}
	return &plan.Error{Op: "run " + string(v), Err: errors.New(reason), Remedy: remedy, Exit: plan.ExitUsage}
}

// ForeignKubeconfig is the error of a kubeconfig that leads to another cluster.
func (w *Workspace) ForeignKubeconfig() error {
	return &plan.Error{
		Op: "use " + w.Path(KubeconfigFile), Err: errors.New("it leads to another cluster than the one of " + StateFile), Exit: plan.ExitUsage,
		Remedy: "put the files of one cluster back together, or use another directory with -C",
	}
}

// PlanFile is the file of the plan in the directory of a run.
const PlanFile = "plan.json"

// HeldBy returns the ID of the run that holds the workspace now; empty if none does.
func (w *Workspace) HeldBy() string {
	f, err := os.Open(w.Path(filepath.Join(plan.RunsDir, lockFile)))
	if err != nil {
		return ""
	}
	defer f.Close()
	if unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil {
		return "" // given back when f closes
	}
	var h holder
	b, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil || json.Unmarshal(b, &h) != nil {
		return ""
	}
	return h.Run
}

// Files of a workspace.
const (
	ConfigFile       = "constellation-conf.yaml"
	StateFile        = "constellation-state.yaml"        // 0600
	KubeconfigFile   = "constellation-admin.conf"        // 0600
	MasterSecretFile = "constellation-mastersecret.json" // 0600
	// PendingFile has the kubeconfig from its arrival until the machine that created it got the
	// acknowledgement.
	PendingFile = ".constellation-admin.conf.pending"
	lockFile    = "lock" // in RunsDir
)

// Workspace is the directory that holds the files of one cluster. Every file is
// replaced as a whole: a reader sees the old or the new one, also after a crash.
type Workspace struct{ root string }

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
func (w *Workspace) Dir() string { return w.root }

// Path returns the absolute path of one of its files.
func (w *Workspace) Path(name string) string { return filepath.Join(w.root, name) }

// Has reports whether a file exists.
func (w *Workspace) Has(name string) bool {
	_, err := os.Lstat(w.Path(name))
	return err == nil
}

// ErrAbsent is inside the error of reading a file that is not there.
var ErrAbsent = fs.ErrNotExist

// absentFile says once what fs.ErrNotExist would repeat.
type absentFile struct{ name, dir string }

func (e absentFile) Error() string { return "there is no " + e.name + " in " + e.dir }

// Unwrap makes errors.Is(err, fs.ErrNotExist) true.
func (absentFile) Unwrap() error { return ErrAbsent }

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
		err = fmt.Errorf("it has %s, and more than %s is never right", SizeOf(info.Size()), SizeOf(maxFile))
		remedy = "is it the right file? Move it away and put the right one there"
	}
	var b []byte
	if err == nil {
		b, err = os.ReadFile(w.Path(name))
	}
	if err != nil {
		e := &plan.Error{Op: "read " + w.Path(name), Err: WithoutPath(err), Exit: plan.ExitUsage, Remedy: remedy}
		if errors.Is(err, fs.ErrPermission) {
			e.Remedy = "run as the user that owns the file"
		}
		return nil, e
	}
	return b, nil
}

// SizeOf writes a number of bytes for people.
func SizeOf(n int64) string {
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
	if errors.Is(err, ErrAbsent) {
		return nil, &plan.Error{
			Op: "read configuration", Err: absentFile{ConfigFile, w.root}, Exit: plan.ExitUsage,
			Remedy: providers.Start() + "; -C names another directory",
		}
	}
	return b, err
}

// State reads the state file. A *ConfigErrors is inside the error if the file is
// there and wrong.
func (w *Workspace) State() (*State, error) {
	b, err := w.read(StateFile)
	if errors.Is(err, ErrAbsent) {
		e := &plan.Error{
			Op: "read state", Err: absentFile{StateFile, w.root}, Exit: plan.ExitUsage,
			Remedy: providers.Start() + "; if the machines exist already, copy the file to this directory",
		}
		if c, err := w.UnfilledConfig(); err == nil {
			switch p, ok := providers.Named(c.Provider.Name); {
			case ok && p.Enrolled:
				e.Remedy = "run `constellation machine add --group control-plane --ssh USER@HOST`, which writes it"
			case ok && p.Infra:
				e.Remedy = c.Advice().Create + ", which writes it; if the machines exist already, copy the file to this directory"
			}
		}
		if w.Has(KubeconfigFile) || w.Has(MasterSecretFile) {
			// The verb that creates machines would refuse: these are of a cluster that it does not know.
			e.Remedy = "restore the file from your copy: the other files here are of a cluster that it belongs to; if that is gone, move " +
				strings.Join(w.ClusterFiles(), ", ") + " away first"
		}
		return nil, e
	}
	if err != nil {
		return nil, err
	}
	s, err := ParseState(b)
	if err != nil {
		return nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "restore the file from a backup"}
	}
	return s, nil
}

// WriteState replaces the state file.
func (w *Workspace) WriteState(s *State) error {
	return writeState(s, func(name string, b []byte) error { return w.Write(name, b, 0o600) })
}

// WriteConfig writes a new configuration and returns its path. It refuses to replace
// one.
func (w *Workspace) WriteConfig(b []byte) (string, error) {
	if w.Has(ConfigFile) {
		return "", &plan.Error{
			Op: "write configuration", Err: fmt.Errorf("%s is there already", w.Path(ConfigFile)), Exit: plan.ExitUsage,
			Remedy: "move it away, or edit it",
		}
	}
	return w.Path(ConfigFile), w.Write(ConfigFile, b, 0o644)
}

// ReplaceConfig replaces the configuration.
func (w *Workspace) ReplaceConfig(b []byte) error { return w.Write(ConfigFile, b, 0o644) }

// Kubeconfig returns the administrator's kubeconfig. The error wraps fs.ErrNotExist
// if there is none.
func (w *Workspace) Kubeconfig() ([]byte, error) { return w.read(KubeconfigFile) }

// BadKubeconfig is why the kubeconfig, which could be read, leads to no cluster.
func (w *Workspace) BadKubeconfig(err error) *plan.Error {
	return &plan.Error{Op: "read " + w.Path(KubeconfigFile), Err: err, Exit: plan.ExitUsage, Remedy: "restore the file from a backup"}
}

// MasterSecret returns the master secret, which wraps errAbsent if there is none.
func (w *Workspace) MasterSecret() (MasterSecret, error) {
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

// WriteMasterSecret writes the secret with mode 0600.
func (w *Workspace) WriteMasterSecret(m MasterSecret) error {
	b, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("write %s: %w", MasterSecretFile, err)
	}
	return w.Write(MasterSecretFile, append(b, '\n'), 0o600)
}

// ClusterFiles are the names of the files that belong to one cluster and are there.
func (w *Workspace) ClusterFiles() (names []string) {
	for _, f := range []string{StateFile, KubeconfigFile, MasterSecretFile, PendingFile} {
		if w.Has(f) {
			names = append(names, f)
		}
	}
	return names
}

// Write replaces a file: written beside it, flushed to the disk, renamed over it,
// and the renaming flushed too. After an error the old file is what it was and
// nothing is left beside it.
func (w *Workspace) Write(name string, b []byte, mode os.FileMode) error {
	path := w.Path(name)
	fail := func(err error) error {
		e := &plan.Error{Op: "write " + path, Err: WithoutPath(err)}
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

// WriteIn writes a file into a directory as a Workspace writes its own.
func WriteIn(dir, name string, b []byte, mode os.FileMode) error {
	return (&Workspace{dir}).Write(name, b, mode)
}

// Rename gives a file its final name.
func (w *Workspace) Rename(from, to string) error {
	err := os.Rename(w.Path(from), w.Path(to))
	if err == nil {
		err = syncDir(w.root)
	}
	if err != nil {
		return &plan.Error{Op: "write " + w.Path(to), Err: WithoutPath(err)}
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

// WithoutPath takes operation and path out of err: callers name them better.
func WithoutPath(err error) error {
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

// Lock takes the workspace for one run. It is the kernel's lock: it ends with the
// process, however that ends. If somebody else has it, the error has ExitHeld and
// says who and since when.
func (w *Workspace) Lock(run string, now time.Time) (unlock func(), err error) {
	dir := w.Path(plan.RunsDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, &plan.Error{Op: "make " + dir, Err: WithoutPath(err), Remedy: "make the directory writable for this user, or use another one with -C"}
	}
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, &plan.Error{Op: "lock workspace " + w.root, Err: WithoutPath(err), Remedy: "make the directory writable for this user, or use another one with -C"}
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, &plan.Error{Op: "lock workspace " + w.root, Err: err, Remedy: "use a directory on a local disk"}
		}
		var h holder
		b := make([]byte, 4096)
		n, _ := f.ReadAt(b, 0)
		who := "another process"
		if json.Unmarshal(b[:n], &h) == nil && h.PID > 0 {
			who = fmt.Sprintf("process %d on %s holds it since %s (run %s)", h.PID, h.Host, h.Since.Local().Format("15:04:05"), h.Run)
		}
		return nil, &plan.Error{Op: "lock workspace " + w.root, Err: errors.New(who), Exit: plan.ExitHeld, Remedy: "wait for it to end, or end that process; what it began can be resumed"}
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
		return nil, &plan.Error{Op: "lock workspace " + w.root, Err: WithoutPath(err)}
	}
	return func() {
		_ = f.Truncate(0) // for tidiness; the lock counts, not its text
		f.Close()         // releases the lock
	}, nil
}

// Loose returns the files with secrets that others than the owner may read.
func (w *Workspace) Loose() (names []string) {
	for _, f := range []string{StateFile, KubeconfigFile, MasterSecretFile, PendingFile, AuthorityKeyFile, SigningKeyFile} {
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

// Absent is the error about a file that the workspace does not have. It wraps errAbsent.
func (w *Workspace) Absent(name string) error { return absentFile{name, w.root} }

// Load reads configuration and state and makes sure that they, and the files beside them,
// belong to one cluster that this program made: [ErrAdopted] is inside the error of an adopted one.
// Its errors have plan.ExitUsage.
func (w *Workspace) Load() (*Config, *State, error) {
	c, err := w.Config()
	if err != nil {
		return nil, nil, err
	}
	s, err := w.State()
	if err != nil {
		return nil, nil, err
	}
	if err := w.Belong(c, s); err != nil {
		return c, s, err
	}
	if s.Unmanaged() {
		return c, s, w.adoptedError()
	}
	return c, s, nil
}
