package machine

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"constellation/assets"
)

const rootfsKeyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// rootfsSuite is the release of Debian of the root file system. It is the same on every
// computer, regardless of its own Debian: the release whose systemd runs under cgroup v1
// and v2 and whose containerd every supported kubelet accepts. [DebianVariable] selects
// another one, for tests of enrolled machines.
func rootfsSuite() string {
	if suite := os.Getenv(DebianVariable); suite != "" {
		return suite
	}
	return "bookworm"
}

// rootfsPackages are added to Debian's minimal system. None of them may set sysctls
// or load modules during installation, since that affects this computer's kernel:
// procps does, so it is excluded. dbus and udev are not needed, and use inotify
// instances, which are scarce on the whole computer.
var rootfsPackages = []string{
	"systemd", "containerd", "runc", "containernetworking-plugins",
	"iptables", "nftables", "conntrack", "iproute2", "ethtool", "socat",
	"mount", "util-linux", "iputils-ping",
}

// Names in a directory that Rootfs has made.
const (
	rootfsTree    = "tree"
	rootfsContent = "content.json"
)

// marker is the file that only a machine's root has.
const marker = ".constellation-machine"

// initLink is the path of the first process's program: a link that only a machine's root has, so
// that runc starts nothing if the root is the wrong one.
const initLink = ".machine-init"

// change is one change of the installed system. Its text is part of rootfsKey.
type change interface {
	fmt.Stringer
	// apply makes the change below root, which it cannot leave.
	apply(root *os.Root) error
}

// The kinds of changes: a new file, a new link and a new directory, and a path that is removed.
// File and link replace what is at their path; a directory may exist.
type (
	newFile struct {
		path string
		data []byte // may be empty
		mode fs.FileMode
	}
	newLink struct{ path, to string }
	newDir  struct {
		path string
		mode fs.FileMode
	}
	removed struct{ path string }
)

// changeText is the text of all kinds of changes.
func changeText(path string, data []byte, isFile bool, link string, isDir bool, mode fs.FileMode) string {
	return fmt.Sprintf("%q %q %v %q %v %o\n", path, data, !isFile, link, isDir, mode)
}

func (c newFile) String() string { return changeText(c.path, c.data, true, "", false, c.mode) }
func (c newLink) String() string { return changeText(c.path, nil, false, c.to, false, 0) }
func (c newDir) String() string  { return changeText(c.path, nil, false, "", true, c.mode) }
func (c removed) String() string { return changeText(c.path, nil, false, "", false, 0) }

// maskedUnits never run in a machine: they would change this computer, wait for
// missing hardware, or use an inotify instance without need.
var maskedUnits = []string{
	"systemd-udevd.service", "systemd-udev-trigger.service", "systemd-udevd-control.socket", "systemd-udevd-kernel.socket",
	"systemd-sysctl.service", "systemd-modules-load.service", "kmod-static-nodes.service", "systemd-timesyncd.service",
	"systemd-binfmt.service", "proc-sys-fs-binfmt_misc.automount", "proc-sys-fs-binfmt_misc.mount",
	"systemd-ask-password-console.path", "systemd-ask-password-wall.path",
	"systemd-ask-password-console.service", "systemd-ask-password-wall.service",
	"dev-hugepages.mount", "sys-fs-fuse-connections.mount", "sys-kernel-config.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount",
	"systemd-random-seed.service", "systemd-hwdb-update.service", "systemd-pstore.service", "systemd-repart.service",
	"systemd-pcrphase.service", "systemd-pcrphase-sysinit.service", "systemd-firstboot.service", "systemd-machine-id-commit.service",
	"systemd-update-utmp.service", "systemd-update-utmp-runlevel.service", "systemd-initctl.socket", "systemd-journald-audit.socket",
	"systemd-logind.service", "systemd-user-sessions.service", "systemd-remount-fs.service", "systemd-journal-catalog-update.service",
	"getty.target", "getty-static.service", "getty@tty1.service", "console-getty.service",
	"cryptsetup.target", "integritysetup.target", "veritysetup.target", "remote-fs.target", "remote-cryptsetup.target",
	"apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer",
	"nftables.service",
}

// maskedGenerators look for disks, consoles and kernel parameters of real hardware.
var maskedGenerators = []string{
	"systemd-cryptsetup-generator", "systemd-debug-generator", "systemd-fstab-generator", "systemd-getty-generator",
	"systemd-gpt-auto-generator", "systemd-hibernate-resume-generator", "systemd-integritysetup-generator",
	"systemd-rc-local-generator", "systemd-run-generator", "systemd-system-update-generator", "systemd-sysv-generator",
	"systemd-veritysetup-generator",
}

// customisation lists the changes that turn the installed system into a machine's.
func customisation() ([]change, error) {
	changes := []change{
		newFile{marker, []byte("the root of a constellation machine\n"), 0o444},
		newLink{initLink, "/lib/systemd/systemd"},

		// debootstrap copies these from this computer.
		removed{"etc/hostname"},
		removed{"etc/resolv.conf"},
		removed{"etc/hosts"},
		newFile{"etc/machine-id", []byte{}, 0o444},
		newFile{"etc/fstab", []byte{}, 0o644},

		// Files that differ between installations, or only use space.
		removed{"var/log"},
		newDir{"var/log", 0o755},
		removed{"var/cache"},
		newDir{"var/cache", 0o755},
		removed{"var/lib/apt/lists"},
		newDir{"var/lib/apt/lists", 0o755},
		removed{"usr/share/doc"},
		removed{"usr/share/man"},
		removed{"usr/share/info"},
		removed{"usr/share/locale"},
		removed{"etc/shadow-"},
		removed{"etc/passwd-"},
		removed{"etc/group-"},
		removed{"etc/gshadow-"},
		removed{"etc/.pwd.lock"},
		removed{"etc/ld.so.cache-"},

		newLink{"etc/systemd/system/default.target", "/lib/systemd/system/multi-user.target"},
		// Shutdown does not wait long for slow processes.
		newFile{"etc/systemd/system.conf.d/10-machine.conf", []byte("[Manager]\nDefaultTimeoutStopSec=10s\n"), 0o644},
		newFile{"etc/containerd/config.toml", containerdConfig(DefaultPauseImage), 0o644},
		newFile{"etc/containerd/certs.d/_default/hosts.toml", registryHosts(), 0o644},
		removed{"etc/cni/net.d"},
		newDir{"etc/cni/net.d", 0o755},
		newDir{"etc/constellation", 0o755},
		newDir{"usr/lib/constellation", 0o755},
	}
	// Mount points.
	for _, m := range diskDirs {
		changes = append(changes, newDir{strings.TrimPrefix(m.path, "/"), m.mode})
	}
	changes = append(changes, newDir{strings.TrimPrefix(TPMDir, "/"), 0o755})
	for _, u := range maskedUnits {
		changes = append(changes, newLink{"etc/systemd/system/" + u, "/dev/null"})
	}
	for _, g := range maskedGenerators {
		changes = append(changes, newLink{"etc/systemd/system-generators/" + g, "/dev/null"})
	}
	const units = "usr/lib/systemd/system/"
	for _, f := range []struct {
		from        fs.FS
		asset, path string
		mode        fs.FileMode
	}{
		{ownUnits, "units/machine-setup", "usr/lib/constellation/machine-setup", 0o755},
		{ownUnits, "units/machine-setup.service", units + "machine-setup.service", 0o644},
		{assets.Systemd(), "kubelet.service", units + "kubelet.service", 0o644},
		{assets.Systemd(), "10-kubeadm.conf", units + "kubelet.service.d/10-kubeadm.conf", 0o644},
		{assets.Systemd(), "10-kubelet.conf", "usr/lib/constellation/kubelet.conf.d/10-machine.conf", 0o644},
		{assets.Systemd(), "10-containerd.conf", units + "containerd.service.d/10-containerd.conf", 0o644},
		{assets.Systemd(), "10-journald.conf", "usr/lib/systemd/journald.conf.d/10-machine.conf", 0o644},
	} {
		data, err := fs.ReadFile(f.from, f.asset)
		if err != nil {
			return nil, fmt.Errorf("read unit: %w", err)
		}
		changes = append(changes, newFile{f.path, data, f.mode})
	}
	for _, by := range []string{"sysinit.target", "containerd.service", "kubelet.service"} {
		changes = append(changes, newLink{"etc/systemd/system/" + by + ".requires/machine-setup.service", "/" + units + "machine-setup.service"})
	}
	return changes, nil
}

func (c newFile) apply(root *os.Root) error {
	if err := makeRoom(root, c.path); err != nil {
		return err
	}
	if err := root.WriteFile(c.path, c.data, c.mode); err != nil {
		return err
	}
	return root.Chmod(c.path, c.mode) // override the umask
}

func (c newLink) apply(root *os.Root) error {
	if err := makeRoom(root, c.path); err != nil {
		return err
	}
	return root.Symlink(c.to, c.path)
}

func (c newDir) apply(root *os.Root) error {
	if err := makeDirs(root, c.path, plainDirs); err != nil {
		return err
	}
	return root.Chmod(c.path, c.mode)
}

func (c removed) apply(root *os.Root) error { return root.RemoveAll(c.path) }

// makeRoom removes what is at path and makes the directories above it.
func makeRoom(root *os.Root, path string) error {
	if err := root.RemoveAll(path); err != nil {
		return err
	}
	return makeDirs(root, filepath.Dir(path), plainDirs)
}

// plainDirs are the modes of directories that makeDirs makes.
func plainDirs(string) (fs.FileMode, error) { return 0o755, nil }

// rootfsKey identifies the root file system by everything that determines its content and
// is known in advance.
func rootfsKey(changes []change) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s %q\n", rootfsSuite(), rootfsPackages)
	for _, c := range changes {
		fmt.Fprint(h, c)
	}
	return rootfsSuite() + "-" + hex.EncodeToString(h.Sum(nil))[:16]
}

// Rootfs makes the root file system that all OS images share, and returns its
// directory in the cache. It is made once, with Debian's packages from the mirror
// that this computer uses, in about a minute. Later calls return at
// once. Concurrent calls, even in other processes, are serialized. progress may
// be nil; it is called from one goroutine.
func Rootfs(ctx context.Context, cacheDir string, progress func(Progress)) (string, error) {
	changes, err := customisation()
	if err != nil {
		return "", err
	}
	parent, err := filepath.Abs(filepath.Join(cacheDir, "rootfs"))
	if err != nil {
		return "", fmt.Errorf("make root file system: %w", err)
	}
	if err := checkOverlayPath(parent); err != nil {
		return "", err
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("make root file system: %w", err)
	}
	dir := filepath.Join(parent, rootfsKey(changes))
	if used(dir) == nil {
		return dir, nil
	}
	unlock, err := lockFile(ctx, filepath.Join(parent, "lock"))
	if err != nil {
		return "", fmt.Errorf("make root file system: %w", err)
	}
	defer unlock()
	if used(dir) == nil {
		return dir, nil // another process has made it
	}
	if err := removeUnfinished(parent); err != nil {
		return "", fmt.Errorf("make root file system: %w", err)
	}
	fresh, err := os.MkdirTemp(parent, unfinished)
	if err != nil {
		return "", fmt.Errorf("make root file system: %w", err)
	}
	defer func() { _ = removeTree(parent, filepath.Base(fresh)) }() // gone already after success
	start := time.Now()
	steps := 0
	report := func(text string) {
		if steps++; progress != nil {
			progress(Progress{Text: text, Current: int64(steps), Took: time.Since(start)})
		}
	}
	tree := filepath.Join(fresh, rootfsTree)
	if err := debootstrap(ctx, tree, report); err != nil {
		return "", err
	}
	report("adapting the system to machines")
	root, err := os.OpenRoot(tree)
	if err != nil {
		return "", fmt.Errorf("adapt root file system: %w", err)
	}
	defer root.Close()
	for _, c := range changes {
		if err := c.apply(root); err != nil {
			return "", fmt.Errorf("adapt root file system: %w", err)
		}
	}
	if err := forgetDates(root); err != nil {
		return "", fmt.Errorf("adapt root file system: %w", err)
	}
	report("measuring the root file system")
	found, err := scan(ctx, tree, nil)
	if err != nil {
		return "", err
	}
	if err := writeJSON(filepath.Join(fresh, rootfsContent), found); err != nil {
		return "", err
	}
	if err := os.Chmod(fresh, 0o755); err != nil {
		return "", fmt.Errorf("make root file system: %w", err)
	}
	if err := os.Rename(fresh, dir); err != nil {
		return "", fmt.Errorf("make root file system: %w", err)
	}
	return dir, nil
}

// forgetDates removes the date of the installation from the shadow file.
func forgetDates(root *os.Root) error {
	b, err := root.ReadFile("etc/shadow")
	if err != nil {
		return err
	}
	lines := strings.Split(string(b), "\n")
	for i, l := range lines {
		if f := strings.Split(l, ":"); len(f) > 2 {
			f[2] = "19700"
			lines[i] = strings.Join(f, ":")
		}
	}
	return root.WriteFile("etc/shadow", []byte(strings.Join(lines, "\n")), 0o640)
}

// debootstrap installs the packages into the new directory tree. Its mounts and processes are
// in their own mount and PID namespaces, which end with it in
// any case.
func debootstrap(ctx context.Context, tree string, report func(string)) error {
	mirror := debianMirror()
	// All users may read the system, regardless of the umask.
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", `umask 022 && exec "$@"`, "sh",
		tool("debootstrap"), "--variant=minbase", "--keyring="+rootfsKeyring,
		"--include="+strings.Join(rootfsPackages, ","), rootfsSuite(), tree, mirror)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive",
		// By default only root's login shell has these.
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	if proxy := aptProxy(ctx); proxy != "" && os.Getenv("http_proxy") == "" {
		cmd.Env = append(cmd.Env, "http_proxy="+proxy)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:   syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		Unshareflags: syscall.CLONE_NEWNS,
		Pdeathsig:    syscall.SIGKILL,
	}
	// The parent-death signal is sent when the thread ends that started the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("run debootstrap: %w", err)
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run debootstrap: %w", err)
	}
	var last string
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		line := lines.Text()
		if text, ok := strings.CutPrefix(line, "I: "); ok {
			report(strings.ToLower(text[:1]) + text[1:])
		}
		if strings.HasPrefix(line, "E: ") || strings.HasPrefix(line, "W: ") {
			last = line
		}
	}
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("run debootstrap: %w", ctx.Err())
		}
		return fmt.Errorf("run debootstrap with %s: %w: %s", mirror, err, last)
	}
	return nil
}

// unfinished is the name prefix of unfinished directories in the cache.
const unfinished = ".new-"

// removeUnfinished removes the remains of a crash from parent. The caller holds its lock.
func removeUnfinished(parent string) error {
	left, err := filepath.Glob(filepath.Join(parent, unfinished+"*"))
	if err != nil {
		return err
	}
	for _, l := range left {
		if err := removeTree(parent, filepath.Base(l)); err != nil {
			return err
		}
	}
	return nil
}
