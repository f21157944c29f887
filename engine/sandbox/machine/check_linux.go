package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Resources of one machine, as measured in a cluster. inotify instances: systemd 3,
// containerd and kube-proxy 1 each, the kubelet 5, 8 on a control plane, 1 more for
// each followed log, and on a control plane the API server 7 and the controller
// manager 2. The leading controller manager has 5 more: one per cluster, on any control plane.
const (
	inotifyControlPlane, inotifyWorker = 22, 11
	inotifyLeader                      = 5
	memoryControlPlane, memoryWorker   = 500 << 20, 250 << 20
	diskControlPlane, diskWorker       = 1400 << 20, 700 << 20
	diskRootfs                         = 900 << 20 // once, during creation
)

// need is a file of this computer that machines require, and the package
// that provides it.
type need struct{ file, pkg string }

// needs are programs that machines always require, rootfsNeeds those that create the root file
// system.
var (
	needs       = []need{{"runc", "runc"}, {"swtpm", "swtpm"}, {"swtpm_setup", "swtpm-tools"}}
	rootfsNeeds = []need{{"debootstrap", "debootstrap"}, {"gpgv", "gpgv"}, {rootfsKeyring, "debian-archive-keyring"}}
)

// missing lists the packages whose files do not exist.
func missing(all []need) []string {
	var packages []string
	for _, n := range all {
		var err error
		if filepath.IsAbs(n.file) {
			_, err = os.Stat(n.file)
		} else {
			_, err = program(n.file)
		}
		if err != nil {
			packages = append(packages, n.pkg)
		}
	}
	return packages
}

// Check returns the problems that keep this computer from starting the machines in want, with
// the cache and the sandbox's state in these directories, which need not exist. It changes
// nothing and leaves nothing behind. An empty result means that no problem
// was found.
func Check(ctx context.Context, cacheDir, stateDir string, want Demand) []Problem {
	if os.Geteuid() != 0 {
		// Most other checks need root.
		return []Problem{{ID: "root", What: "real machines need root, and this is user " + strconv.Itoa(os.Geteuid()), Remedy: "run the same command as root, for instance with sudo -E"}}
	}
	var problems []Problem
	for _, check := range []func() (*Problem, error){
		func() (*Problem, error) { return checkPackages(cacheDir) },
		checkCapabilities,
		checkCgroups,
		func() (*Problem, error) { return checkOverlay(stateDir) },
		checkNetwork,
		func() (*Problem, error) { return checkInotify(want) },
		func() (*Problem, error) { return checkMemory(want) },
		func() (*Problem, error) { return checkDisk(cacheDir, stateDir, want) },
	} {
		if ctx.Err() != nil {
			break
		}
		p, err := check()
		if err != nil {
			p = &Problem{ID: "check", What: "this computer could not be checked: " + err.Error(), Remedy: "see that /proc and /sys are mounted as usual"}
		}
		if p != nil {
			problems = append(problems, *p)
		}
	}
	return problems
}

// program searches for a program, also in the additional directories of root's login shell.
func program(name string) (string, error) {
	if p, err := exec.LookPath(name); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"} {
		if p, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("find %s: %w", name, exec.ErrNotFound)
}

// tool is the path of a program that Check has verified. If it is missing after all,
// running it fails.
func tool(name string) string {
	p, err := program(name)
	if err != nil {
		return name
	}
	return p
}

func checkPackages(cacheDir string) (*Problem, error) {
	changes, err := customisation()
	if err != nil {
		return nil, err
	}
	all := needs
	if _, err := os.Stat(filepath.Join(cacheDir, "rootfs", rootfsKey(changes))); err != nil {
		all = append(slices.Clone(needs), rootfsNeeds...)
	}
	return packagesProblem(missing(all)), nil
}

func packagesProblem(packages []string) *Problem {
	if len(packages) == 0 {
		return nil
	}
	p := &Problem{
		ID:       "packages",
		What:     "Debian packages are missing: " + strings.Join(packages, ", "),
		Remedy:   "run apt-get install --yes --no-install-recommends " + strings.Join(packages, " "),
		Packages: packages,
	}
	if _, err := program("apt-get"); err != nil {
		p.Packages = nil
		p.Remedy = "this is no Debian; install what these packages hold by its own means"
	}
	return p
}

var packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+$`)

// InstallPackages installs Debian packages with apt-get and copies its output to
// output, which may be nil. It refreshes the package lists only if needed.
// It does not prompt. Callers obtain consent first.
func InstallPackages(ctx context.Context, packages []string, output io.Writer) error {
	for _, p := range packages {
		if !packageName.MatchString(p) {
			return fmt.Errorf("install packages: %q is no name of a package", p)
		}
	}
	if len(packages) == 0 {
		return nil
	}
	if output == nil {
		output = io.Discard
	}
	apt, err := program("apt-get")
	if err != nil {
		return fmt.Errorf("install packages: %w", err)
	}
	var said bytes.Buffer
	run := func(args ...string) error {
		said.Reset()
		// Another apt-get may be running, as on a freshly started computer.
		cmd := exec.CommandContext(ctx, apt, append([]string{"-o", "DPkg::Lock::Timeout=120"}, args...)...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
		cmd.Stdout, cmd.Stderr = output, io.MultiWriter(output, &said)
		// An incomplete installation is worse than a late end.
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
		return cmd.Run()
	}
	install := append([]string{"install", "--yes", "--no-install-recommends"}, packages...)
	if err := run(install...); err == nil || ctx.Err() != nil {
		return err
	}
	if err := run("update"); err != nil {
		return fmt.Errorf("install packages: apt-get update: %w: %s", err, lastLine(said.Bytes()))
	}
	if err := run(install...); err != nil {
		return fmt.Errorf("install packages: apt-get install %s: %w: %s", strings.Join(packages, " "), err, lastLine(said.Bytes()))
	}
	return nil
}

// capabilityBits are the numbers of the capabilities that machines get.
var capabilityBits = map[string]uint{
	"CAP_CHOWN": unix.CAP_CHOWN, "CAP_DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE, "CAP_FOWNER": unix.CAP_FOWNER,
	"CAP_FSETID": unix.CAP_FSETID, "CAP_KILL": unix.CAP_KILL, "CAP_SETGID": unix.CAP_SETGID, "CAP_SETUID": unix.CAP_SETUID,
	"CAP_SETPCAP": unix.CAP_SETPCAP, "CAP_SETFCAP": unix.CAP_SETFCAP, "CAP_NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
	"CAP_NET_ADMIN": unix.CAP_NET_ADMIN, "CAP_NET_RAW": unix.CAP_NET_RAW, "CAP_SYS_CHROOT": unix.CAP_SYS_CHROOT,
	"CAP_SYS_PTRACE": unix.CAP_SYS_PTRACE, "CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN, "CAP_MKNOD": unix.CAP_MKNOD,
	"CAP_AUDIT_WRITE": unix.CAP_AUDIT_WRITE,
}

func checkCapabilities() (*Problem, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil, err
	}
	var have uint64
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, "CapEff:"); ok {
			if have, err = strconv.ParseUint(strings.TrimSpace(value), 16, 64); err != nil {
				return nil, fmt.Errorf("read capabilities: %w", err)
			}
		}
	}
	var missing []string
	for _, name := range capabilities {
		if have&(1<<capabilityBits[name]) == 0 {
			missing = append(missing, name)
		}
	}
	if len(missing) == 0 {
		return nil, nil
	}
	return &Problem{
		ID:     "capabilities",
		What:   "root is restricted here and cannot give machines " + strings.Join(missing, ", "),
		Remedy: "run it outside of this container, or in one that has these capabilities (docker run --privileged)",
	}, nil
}

func checkCgroups() (*Problem, error) {
	v2, err := ownCgroup("")
	if err != nil {
		return nil, err
	}
	v1, err := ownCgroup("memory")
	if err != nil {
		return nil, err
	}
	named, err := ownCgroup("name=systemd")
	if err != nil {
		return nil, err
	}
	switch {
	case v1 == "" && v2 == "":
		return &Problem{ID: "cgroups", What: "no cgroup hierarchy with a memory controller is mounted below /sys/fs/cgroup", Remedy: "mount cgroup v2 there, as systemd does"}, nil
	case v1 != "" && named == "":
		return &Problem{ID: "cgroups", What: "this computer uses cgroup v1 without the hierarchy name=systemd, which systemd in a machine needs", Remedy: "run mkdir -p /sys/fs/cgroup/systemd && mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd"}, nil
	}
	for _, dir := range []string{v1, named, v2} {
		if dir != "" && unix.Access(dir, unix.W_OK) != nil {
			return &Problem{ID: "cgroups", What: dir + " cannot be written to", Remedy: "run it where cgroups are writable (docker run --privileged --cgroupns=host)"}, nil
		}
	}
	return nil, nil
}

// existing returns dir or the nearest directory above it that exists.
func existing(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for {
		info, err := os.Stat(dir)
		if err == nil && info.IsDir() {
			return dir, nil
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) || dir == "/" {
			return "", fmt.Errorf("look at %s: %w", dir, err)
		}
		dir = filepath.Dir(dir)
	}
}

// checkOverlay mounts an overlay at the location of the machines' disks, in a mount
// namespace that ends with its thread.
func checkOverlay(stateDir string) (*Problem, error) {
	parent, err := existing(stateDir)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(parent, ".constellation-check-")
	if err != nil {
		return &Problem{ID: "overlay", What: "the directory of the machines' disks cannot be written to: " + err.Error(), Remedy: "choose another one by XDG_STATE_HOME"}, nil
	}
	defer func() { _ = removeTree(parent, filepath.Base(dir)) }()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, d := range []string{"lower", "upper", "work", "root"} {
		if err := os.Mkdir(at(d), 0o700); err != nil {
			return nil, err
		}
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: thread, namespace and mount end here
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = mountOverlay(at("root"), at("upper"), at("work"), at("lower"))
		}
		if err == nil {
			// On a disk without support for an overlay's attributes, writing fails.
			err = os.WriteFile(at("root/file"), nil, 0o600)
		}
		if err == nil {
			// Detached: the namespace ends anyway, and a process that reads it through /proc at
			// this moment would make the mount busy.
			err = unix.Unmount(at("root"), unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		done <- err
	}()
	if err := <-done; err != nil {
		return &Problem{
			ID: "overlay", What: "machines' disks are overlays, and none can be made in " + parent + ": " + err.Error(),
			Remedy: "choose a directory on ext4, xfs or btrfs by XDG_STATE_HOME, and see that the kernel has overlay",
		}, nil
	}
	return nil, nil
}

// checkNetwork makes a bridge with a veth pair in a network namespace that ends with its
// thread.
func checkNetwork() (*Problem, error) {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: thread and namespace end here
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("make network namespace: %w", err)
			}
			h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return err
			}
			defer h.Close()
			bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
			bridge.Name = bridgeName
			if err := h.LinkAdd(bridge); err != nil {
				return fmt.Errorf("add bridge: %w", err)
			}
			cable := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: "eth0"}
			cable.Name = "cable"
			if err := h.LinkAdd(cable); err != nil {
				return fmt.Errorf("add veth: %w", err)
			}
			return nil
		}()
	}()
	if err := <-done; err != nil {
		return &Problem{
			ID: "network", What: "the network between machines cannot be made: " + err.Error(),
			Remedy: "use a kernel with network namespaces, bridge and veth, or load the modules bridge and veth",
		}, nil
	}
	return nil, nil
}

// checkInotify counts the inotify instances of this user's processes. Machines share this
// limit with the rest of the computer, and it is small.
func checkInotify(want Demand) (*Problem, error) {
	b, err := os.ReadFile("/proc/sys/fs/inotify/max_user_instances")
	if err != nil {
		return nil, err
	}
	limit, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return nil, fmt.Errorf("read limit of inotify instances: %w", err)
	}
	used, err := inotifyInstances()
	if err != nil {
		return nil, err
	}
	return inotifyProblem(limit, used, want), nil
}

// inotifyProblem adds the instances in use, by machine as from inotifyInstances, those that
// existing machines will still open, and those of the wanted machines.
func inotifyProblem(limit int, used map[string]int, want Demand) *Problem {
	needs, leaders := map[string]int{}, map[string]int{} // by machine, and by sandbox
	for machine := range used {
		if machine != "" {
			needs[machine] = inotifyWorker // any kind of machine needs as many
		}
	}
	for _, r := range want.There {
		n := inotifyWorker
		if r.ControlPlane {
			n = inotifyControlPlane
		}
		sandbox := hostID(r.Dir, r.Sandbox)
		id := sandbox + "/" + r.Name
		if _, runs := used[id]; runs || !r.Abandoned {
			needs[id] = n
			if r.ControlPlane {
				leaders[sandbox] = max(leaders[sandbox], min(used[id]-n, inotifyLeader))
			}
		}
	}
	inUse, yet := 0, 0
	for _, n := range used {
		inUse += n
	}
	for machine, n := range needs {
		yet += max(0, n-used[machine])
	}
	for _, n := range leaders {
		yet += inotifyLeader - n
	}
	need := want.ControlPlanes*inotifyControlPlane + want.Workers*inotifyWorker
	if want.ControlPlanes > 0 && want.New {
		need += inotifyLeader
	}
	if inUse+yet+need <= limit {
		return nil
	}
	also := ""
	if yet > 0 {
		also = fmt.Sprintf(", and the machines that are there will take %d more", yet)
	}
	return &Problem{
		ID: "inotify",
		What: fmt.Sprintf("%d control planes and %d workers need %d inotify instances; %d of the %d that root may have on this computer are in use%s",
			want.ControlPlanes, want.Workers, need, inUse, limit, also),
		Remedy: fmt.Sprintf("take down another sandbox, start fewer machines, or raise the limit with sysctl fs.inotify.max_user_instances=%d", max(512, 2*(inUse+yet+need))),
	}
}

// inotifyInstances counts the inotify instances of root's processes by machine,
// as "<sandbox's cgroup>/<machine>", and "" for all others. An instance that two
// processes share counts twice, to be safe. Machines without instances are included.
func inotifyInstances() (map[string]int, error) {
	pids, err := processNumbers()
	if err != nil {
		return nil, err
	}
	used := map[string]int{}
	for _, pid := range pids {
		var st unix.Stat_t
		dir := "/proc/" + pid
		if unix.Stat(dir, &st) != nil || st.Uid != 0 {
			continue
		}
		fds, err := os.ReadDir(dir + "/fd")
		if err != nil || len(fds) == 0 {
			continue // a zombie
		}
		cgroups, err := os.ReadFile(dir + "/cgroup")
		if err != nil {
			continue // it has ended
		}
		n := 0
		for _, fd := range fds {
			if target, err := os.Readlink(dir + "/fd/" + fd.Name()); err == nil && target == "anon_inode:inotify" {
				n++
			}
		}
		used[machineOf(string(cgroups))] += n
	}
	return used, nil
}

// machineOf finds the machine in a process's list of cgroups, whose lines are
// "<number>:<controllers>:<path>"; "" if there is none.
func machineOf(cgroups string) string {
	for line := range strings.Lines(cgroups) {
		_, rest, found := strings.Cut(strings.TrimSpace(line), "/"+cgroupParent+"/")
		if !found {
			continue
		}
		if e := strings.SplitN(rest, "/", 3); len(e) >= 2 {
			return e[0] + "/" + e[1]
		}
	}
	return ""
}

func checkMemory(want Demand) (*Problem, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil, err
	}
	available := int64(-1)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "MemAvailable:" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				return nil, fmt.Errorf("read available memory: %w", err)
			}
			available = kib << 10
		}
	}
	need := int64(want.ControlPlanes)*memoryControlPlane + int64(want.Workers)*memoryWorker
	if available < 0 || need <= available {
		return nil, nil
	}
	return &Problem{
		ID:     "memory",
		What:   fmt.Sprintf("%d control planes and %d workers need about %s of memory, and %s is available", want.ControlPlanes, want.Workers, size(need), size(available)),
		Remedy: "start fewer machines or end other programs",
	}, nil
}

func checkDisk(cacheDir, stateDir string, want Demand) (*Problem, error) {
	changes, err := customisation()
	if err != nil {
		return nil, err
	}
	need := int64(want.ControlPlanes)*diskControlPlane + int64(want.Workers)*diskWorker
	state, err := free(stateDir)
	if err != nil {
		return nil, err
	}
	if need > state.bytes {
		return &Problem{
			ID:     "disk",
			What:   fmt.Sprintf("%d control planes and %d workers need about %s of disk, and %s is free in %s", want.ControlPlanes, want.Workers, size(need), size(state.bytes), state.dir),
			Remedy: "free some, or choose another directory by XDG_STATE_HOME",
		}, nil
	}
	if _, err := os.Stat(filepath.Join(cacheDir, "rootfs", rootfsKey(changes))); err == nil {
		return nil, nil
	}
	cache, err := free(cacheDir)
	if err != nil {
		return nil, err
	}
	left := cache.bytes
	if cache.fs == state.fs {
		left -= int64(want.ControlPlanes)*diskControlPlane + int64(want.Workers)*diskWorker
	}
	if diskRootfs > left {
		return &Problem{
			ID:     "disk",
			What:   fmt.Sprintf("making the machines' root file system needs %s of disk, and %s is left in %s", size(diskRootfs), size(max(left, 0)), cache.dir),
			Remedy: "free some, or choose another directory by XDG_CACHE_HOME",
		}, nil
	}
	return nil, nil
}

// room is the free space in a directory.
type room struct {
	dir   string // an existing one
	bytes int64
	fs    unix.Fsid
}

func free(dir string) (room, error) {
	dir, err := existing(dir)
	if err != nil {
		return room{}, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return room{}, fmt.Errorf("look at %s: %w", dir, err)
	}
	return room{dir: dir, bytes: int64(st.Bavail) * st.Bsize, fs: st.Fsid}, nil
}

// size formats bytes for users.
func size(bytes int64) string {
	if bytes < 1<<30 {
		return fmt.Sprintf("%d MiB", bytes>>20)
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}
