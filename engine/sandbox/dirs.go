package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/simulated"
)

// Dirs are the directories of sandboxes.
type Dirs struct {
	// Cache may be deleted at any time while no sandbox runs. It is filled again on demand.
	Cache string
	// State has a directory for each sandbox, below "sandbox".
	State string
}

// DefaultDirs follows XDG: $XDG_CACHE_HOME/constellation, by default below
// ~/.cache, and $XDG_STATE_HOME/constellation, by default below ~/.local/state.
func DefaultDirs() (Dirs, error) {
	find := func(variable string, below ...string) (string, error) {
		// XDG requires relative paths to be ignored.
		if dir := os.Getenv(variable); filepath.IsAbs(dir) {
			return filepath.Join(dir, "constellation"), nil
		}
		home, err := os.UserHomeDir()
		if err != nil {
			return "", fmt.Errorf("find directories: %w, nor is $%s", err, variable)
		}
		return filepath.Join(append(append([]string{home}, below...), "constellation")...), nil
	}
	cache, err := find("XDG_CACHE_HOME", ".cache")
	if err != nil {
		return Dirs{}, err
	}
	state, err := find("XDG_STATE_HOME", ".local", "state")
	if err != nil {
		return Dirs{}, err
	}
	return Dirs{cache, state}, nil
}

// Files in the directory of a sandbox. Package machine keeps its own beside them.
const (
	stateName      = "state.json"
	socketName     = "api.sock"
	logName        = "daemon.log"
	pidName        = "daemon.pid"
	secretName     = "init-secret" // hex
	caName         = "ca.pem"
	caKeyName      = "ca-key.pem"
	releaseKeyName = "release-key.pem" // signs what machines install
	enrolmentName  = "agent-enrolment" // brings the agent of the newest image to machines of older ones
	privateDirMode = 0o700
)

func (d Dirs) sandboxes() string { return filepath.Join(d.State, "sandbox") }

func (d Dirs) of(name string, file ...string) string {
	return filepath.Join(append([]string{d.sandboxes(), name}, file...)...)
}

var notNameRE = regexp.MustCompile(`[^a-z0-9]+`)

// defaultName derives the name of a workspace's sandbox: the base name, for readability, and
// a part of the digest of the whole path, because many workspaces are called "demo".
func defaultName(workspace string) string {
	base := strings.Trim(notNameRE.ReplaceAllString(strings.ToLower(filepath.Base(workspace)), "-"), "-")
	base = strings.Trim(base[:min(len(base), 24)], "-")
	sum := sha256.Sum256([]byte(workspace))
	return strings.TrimPrefix(base+"-", "-") + hex.EncodeToString(sum[:2])
}

// resolve returns the name of a sandbox, given that name or the
// absolute path of its workspace.
func (d Dirs) resolve(nameOrWorkspace string) (string, error) {
	if !filepath.IsAbs(nameOrWorkspace) {
		if !sandboxapi.ValidName(nameOrWorkspace) {
			return "", fmt.Errorf("%q cannot be the name of a sandbox: it needs small letters, digits and -, at most 40", nameOrWorkspace)
		}
		return nameOrWorkspace, nil
	}
	workspace := filepath.Clean(nameOrWorkspace)
	entries, err := os.ReadDir(d.sandboxes())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("look for sandboxes: %w", err)
	}
	for _, e := range entries {
		if s, err := readState(d.of(e.Name(), stateName)); err == nil && s.Workspace == workspace {
			return e.Name(), nil
		}
	}
	return defaultName(workspace), nil
}

// Machines gives access to the machines of a sandbox, of any kind.
type Machines interface {
	// Exec runs a command in the root directory of a machine, and returns its exit code.
	Exec(ctx context.Context, name string, command []string, stdio machine.Stdio) (int, error)
	// Dial connects to an address in the machines' network, DialFrom does so from a machine.
	Dial(ctx context.Context, network, address string) (net.Conn, error)
	DialFrom(ctx context.Context, name, network, address string) (net.Conn, error)
}

// Reach returns the control API of a running sandbox, as its owner, and access to its machines.
// nameOrWorkspace is as in [Sandboxes.Status].
func (d Dirs) Reach(nameOrWorkspace string, log *slog.Logger) (*sandboxapi.Client, Machines, error) {
	name, err := d.resolve(nameOrWorkspace)
	if err != nil {
		return nil, nil, err
	}
	st, err := readState(d.of(name, stateName))
	if err != nil {
		return nil, nil, fmt.Errorf("reach sandbox %s: %w", name, err)
	}
	host, err := d.host(name, st, log)
	if err != nil {
		return nil, nil, fmt.Errorf("reach sandbox %s: %w", name, err)
	}
	return sandboxapi.NewClient("unix:"+d.of(name, socketName), ""), host, nil
}

// host is what a sandbox needs from the computer: the platform of its fleet, and more.
type host interface {
	platform
	Machines
	Network(ctx context.Context) error
	Close() error
	LimitMemory(bytes int64)
	Listen(ctx context.Context, network, address string) (net.Listener, error)
	Sweep(ctx context.Context) error
}

// host returns the platform of a sandbox's machines. If the state is missing (nil), the kind of
// machines is inferred from their remains.
func (d Dirs) host(name string, st *state, log *slog.Logger) (host, error) {
	if st != nil && st.Simulated || st == nil && simulated.Found(d.of(name)) {
		return simulated.NewHost(d.of(name), name, d.Cache, log), nil
	}
	return machine.NewHost(d.of(name), name, log)
}

// nodes returns the addresses of simulated machines that the sandboxes here have had since their first
// start, started or not.
func (d Dirs) nodes() map[netip.Prefix]bool {
	all := map[netip.Prefix]bool{}
	entries, _ := os.ReadDir(d.sandboxes())
	for _, e := range entries {
		if s, err := readState(d.of(e.Name(), stateName)); err == nil && s.Simulated && s.KubernetesPort != 0 {
			all[s.Nodes] = true
		}
	}
	return all
}

// residents lists the machines that the sandboxes here must keep, started or not. Unreadable
// states are skipped: their machines still count while they run. Without a running daemon,
// as after a crash of the computer, only running machines count.
func (d Dirs) residents() (all []machine.Resident) {
	entries, _ := os.ReadDir(d.sandboxes())
	for _, e := range entries {
		s, err := readState(d.of(e.Name(), stateName))
		if err != nil || s.Simulated {
			continue
		}
		daemon, err := readProcess(d.of(e.Name(), pidName))
		abandoned := err != nil || !daemon.alive()
		for _, i := range s.Instances {
			if i.Want == wantRunning && i.Boot != sandboxapi.BootFailed {
				all = append(all, machine.Resident{Dir: d.of(s.Name), Sandbox: s.Name, Name: i.Name, ControlPlane: i.Role == cloud.ControlPlane, Abandoned: abandoned})
			}
		}
	}
	return all
}

// lock serializes commands on the same sandbox. It blocks, and calls waiting once if that takes
// time. remove, called while the lock is held, also deletes the lock
// file.
func (d Dirs) lock(ctx context.Context, name string, waiting func()) (unlock func(remove bool), err error) {
	if err := os.MkdirAll(d.sandboxes(), privateDirMode); err != nil {
		return nil, fmt.Errorf("lock sandbox %s: %w", name, err)
	}
	path := filepath.Join(d.sandboxes(), "."+name+".lock")
	for told := false; ; {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock sandbox %s: %w", name, err)
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			// The previous owner may have deleted the file meanwhile. Then this lock
			// protects nothing.
			ours, err1 := f.Stat()
			theirs, err2 := os.Stat(path)
			if err1 == nil && err2 == nil && os.SameFile(ours, theirs) {
				return func(remove bool) {
					if remove {
						os.Remove(path)
					}
					f.Close()
				}, nil
			}
			f.Close()
			continue
		}
		f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, fmt.Errorf("lock sandbox %s: %w", name, err)
		}
		if !told {
			told = true
			waiting()
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for another verb on sandbox %s: %w", name, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// remove removes a sandbox's directory, unless something is mounted below it.
func (d Dirs) remove(name string) error {
	dir := d.of(name)
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	if len(mounts) > 0 {
		return fmt.Errorf("remove %s: %s is still mounted", dir, mounts[0].Mountpoint)
	}
	root, err := os.OpenRoot(d.sandboxes())
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	defer root.Close()
	if err := root.RemoveAll(name); err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	return nil
}

// tidy removes the directories that all sandboxes share, if no sandbox is left.
func (d Dirs) tidy() {
	for _, dir := range []string{d.sandboxes(), d.State} {
		if os.Remove(dir) != nil { // fails if the directory is not empty
			return
		}
	}
}

// process identifies a process of this computer, even after its number
// is used again.
type process struct {
	pid   int
	start string // in the kernel's format
}

// self returns this process.
func self() process {
	p := process{pid: os.Getpid()}
	p.start, _ = startOf(p.pid)
	return p
}

func (p process) alive() bool {
	start, ok := startOf(p.pid)
	return ok && start == p.start
}

// end terminates p, and kills it after grace. It returns when p is gone.
func (p process) end(ctx context.Context, grace time.Duration) error {
	send := func(sig syscall.Signal) error {
		if !p.alive() {
			return nil
		}
		if err := syscall.Kill(p.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("end process %d: %w", p.pid, err)
		}
		return nil
	}
	if err := send(syscall.SIGTERM); err != nil {
		return err
	}
	killed := false
	for start := time.Now(); p.alive(); {
		if !killed && time.Since(start) > grace {
			killed = true
			if err := send(syscall.SIGKILL); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("end process %d: %w", p.pid, context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

func (p process) write(file string) error {
	return writeFile(file, fmt.Appendf(nil, "%d %s\n", p.pid, p.start), 0o600)
}

func readProcess(file string) (process, error) {
	var p process
	b, err := os.ReadFile(file)
	if err != nil {
		return p, err
	}
	if _, err := fmt.Sscanf(string(b), "%d %s", &p.pid, &p.start); err != nil || p.pid <= 1 {
		return p, fmt.Errorf("read %s: not a process", file)
	}
	return p, nil
}
