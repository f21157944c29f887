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

// The root file system is the same on every computer, regardless of its own Debian: the
// release whose systemd runs under cgroup v1 and v2 and whose containerd every
// supported kubelet accepts.
const (
	rootfsSuite   = "bookworm"
	rootfsKeyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
)

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

// change is one change of the installed system.
type change struct {
	path string
	// At most one of the following; none means that the path is removed.
	data []byte // the file's content, may be empty
	link string
	dir  bool

	mode fs.FileMode // of file and directory
}

func (c change) String() string {
	return fmt.Sprintf("%q %q %v %q %v %o\n", c.path, c.data, c.data == nil, c.link, c.dir, c.mode)
}

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
		{path: marker, data: []byte("the root of a constellation machine\n"), mode: 0o444},
		{path: initLink, link: "/lib/systemd/systemd"},

		// debootstrap copies these from this computer.
		{path: "etc/hostname"},
		{path: "etc/resolv.conf"},
		{path: "etc/hosts"},
		{path: "etc/machine-id", data: []byte{}, mode: 0o444},
		{path: "etc/fstab", data: []byte{}, mode: 0o644},

		// Files that differ between installations, or only use space.
		{path: "var/log"},
		{path: "var/log", dir: true, mode: 0o755},
		{path: "var/cache"},
		{path: "var/cache", dir: true, mode: 0o755},
		{path: "var/lib/apt/lists"},
		{path: "var/lib/apt/lists", dir: true, mode: 0o755},
		{path: "usr/share/doc"},
		{path: "usr/share/man"},
		{path: "usr/share/info"},
		{path: "usr/share/locale"},
		{path: "etc/shadow-"},
		{path: "etc/passwd-"},
		{path: "etc/group-"},
		{path: "etc/gshadow-"},
		{path: "etc/.pwd.lock"},
		{path: "etc/ld.so.cache-"},

		{path: "etc/systemd/system/default.target", link: "/lib/systemd/system/multi-user.target"},
		// Shutdown does not wait long for slow processes.
		{path: "etc/systemd/system.conf.d/10-machine.conf", data: []byte("[Manager]\nDefaultTimeoutStopSec=10s\n"), mode: 0o644},
		{path: "etc/containerd/config.toml", data: containerdConfig(DefaultPauseImage), mode: 0o644},
		{path: "etc/containerd/certs.d/_default/hosts.toml", data: registryHosts(), mode: 0o644},
		{path: "etc/cni/net.d"},
		{path: "etc/cni/net.d", dir: true, mode: 0o755},
		{path: "etc/constellation", dir: true, mode: 0o755},
		{path: "usr/lib/constellation", dir: true, mode: 0o755},
	}
	// Mount points.
	for _, m := range diskDirs {
		changes = append(changes, change{path: strings.TrimPrefix(m.path, "/"), dir: true, mode: m.mode})
	}
	changes = append(changes, change{path: strings.TrimPrefix(TPMDir, "/"), dir: true, mode: 0o755})
	for _, u := range maskedUnits {
		changes = append(changes, change{path: "etc/systemd/system/" + u, link: "/dev/null"})
	}
	for _, g := range maskedGenerators {
		changes = append(changes, change{path: "etc/systemd/system-generators/" + g, link: "/dev/null"})
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
		changes = append(changes, change{path: f.path, data: data, mode: f.mode})
	}
	for _, by := range []string{"sysinit.target", "containerd.service", "kubelet.service"} {
		changes = append(changes, change{path: "etc/systemd/system/" + by + ".requires/machine-setup.service", link: "/" + units + "machine-setup.service"})
	}
	return changes, nil
}

// apply makes the change below root, which it cannot leave.
func (c change) apply(root *os.Root) error {
	all := func(string) (fs.FileMode, error) { return 0o755, nil }
	if c.dir {
		if err := makeDirs(root, c.path, all); err != nil {
			return err
		}
		return root.Chmod(c.path, c.mode)
	}
	if err := root.RemoveAll(c.path); err != nil {
		return err
	}
	if c.data == nil && c.link == "" {
		return nil
	}
	if err := makeDirs(root, filepath.Dir(c.path), all); err != nil {
		return err
	}
	if c.link != "" {
		return root.Symlink(c.link, c.path)
	}
	if err := root.WriteFile(c.path, c.data, c.mode); err != nil {
		return err
	}
	return root.Chmod(c.path, c.mode) // override the umask
}

// rootfsKey identifies the root file system by everything that determines its content and
// is known in advance.
func rootfsKey(changes []change) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s %q\n", rootfsSuite, rootfsPackages)
	for _, c := range changes {
		fmt.Fprint(h, c)
	}
	return rootfsSuite + "-" + hex.EncodeToString(h.Sum(nil))[:16]
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
		"--include="+strings.Join(rootfsPackages, ","), rootfsSuite, tree, mirror)
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
