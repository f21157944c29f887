package machine

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// diskDirs are the parts of a machine's disk on a regular file system: neither
// containerd's overlays nor etcd's fsync work well on an overlay.
var diskDirs = []struct {
	path string
	mode fs.FileMode
}{
	{"/var/lib/containerd", 0o711},
	{"/var/lib/kubelet", 0o700},
	{"/var/lib/etcd", 0o700},
	{"/var/log", 0o755},
}

// capabilities are the fourteen that containerd grants to containers, because runc fails if
// it cannot grant one of them, and three more that systemd, containerd and the kubelet
// need: NET_ADMIN for networks, SYS_ADMIN for mounts and namespaces, SYS_PTRACE to enter
// the namespaces of pods that run as another user. Measurements show that each is needed, see
// docs/machines.md. Excluded on purpose, because they affect the whole computer: SYS_TIME,
// SYS_MODULE, SYS_RAWIO, SYS_BOOT, SYS_RESOURCE, MAC_*.
var capabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
	"CAP_NET_ADMIN", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE",
}

// bundleSpec has the differences between machines of one version of this program. The
// zero value makes the bundle that is measured.
type bundleSpec struct {
	name      string
	root      string // the mounted overlay
	namespace string // of the network
	cgroup    string // relative
	disk      string // directory of the diskDirs
	tpm       string // directory of the TPM's socket
}

// diskDir is the path of a part of the machine's disk on this computer.
func diskDir(disk, path string) string {
	return filepath.Join(disk, filepath.Base(path))
}

// machineProcesses limits the number of processes and threads of one machine.
const machineProcesses = 8192

// bundle describes the container to runc.
func bundle(b bundleSpec) *specs.Spec {
	limit := int64(machineProcesses)
	root := uint32(0)
	mode := fs.FileMode(0o666)
	tmpfs := func(path string, options ...string) specs.Mount {
		return specs.Mount{Destination: path, Type: "tmpfs", Source: "tmpfs", Options: append([]string{"nosuid"}, options...)}
	}
	mounts := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		tmpfs("/dev", "noexec", "strictatime", "mode=755", "size=1m"),
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		tmpfs("/dev/shm", "noexec", "nodev", "mode=1777", "size=64m"),
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", "rw"}},
		tmpfs("/run", "nodev", "mode=755", "size=512m"),
		tmpfs("/tmp", "nodev", "mode=1777", "size=512m"),
	}
	for _, d := range diskDirs {
		mounts = append(mounts, specs.Mount{Destination: d.path, Type: "bind", Source: diskDir(b.disk, d.path), Options: []string{"bind", "rw"}})
	}
	mounts = append(mounts, specs.Mount{Destination: TPMDir, Type: "bind", Source: b.tpm, Options: []string{"bind", "ro", "nosuid", "nodev", "noexec"}})
	return &specs.Spec{
		Version:  "1.0.2",
		Hostname: b.name,
		Process: &specs.Process{
			Args: []string{"/" + initLink},
			Env:  []string{"container=oci", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			Cwd:  "/",
			Capabilities: &specs.LinuxCapabilities{
				Bounding: capabilities, Effective: capabilities, Permitted: capabilities,
			},
			// The defaults of distributions. This computer may not permit raising them later.
			Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_CORE", Soft: 0, Hard: 0}},
		},
		Root:   &specs.Root{Path: b.root},
		Mounts: mounts,
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.MountNamespace},
				{Type: specs.CgroupNamespace},
				{Type: specs.NetworkNamespace, Path: b.namespace},
			},
			CgroupsPath: b.cgroup,
			Resources: &specs.LinuxResources{
				// runc adds the default devices: null, zero, full, random, urandom, tty, ptmx, pts.
				Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
				Pids:    &specs.LinuxPids{Limit: &limit},
			},
			// The kernel log belongs to this computer. The kubelet only needs to open the device,
			// so it gets one without content.
			Devices: []specs.LinuxDevice{{Path: "/dev/kmsg", Type: "c", Major: 1, Minor: 3, FileMode: &mode, UID: &root, GID: &root}},
			MaskedPaths: []string{
				"/proc/sysrq-trigger", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi",
				"/sys/firmware", "/sys/kernel/debug", "/sys/kernel/security", "/sys/devices/virtual/powercap",
			},
			ReadonlyPaths: []string{
				"/proc/sys/kernel", "/proc/sys/vm", "/proc/sys/fs", "/proc/sys/abi", "/proc/sys/dev", "/proc/sys/debug", "/proc/sys/user",
				"/proc/irq", "/proc/bus", "/proc/acpi", "/proc/fs", "/proc/asound",
			},
		},
	}
}

// writeBundle writes the container's configuration to runc's bundle directory.
func writeBundle(dir string, b bundleSpec) error {
	s := bundle(b)
	unified, err := onlyUnified()
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	harden(s, unified)
	config, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	return writeFile(filepath.Join(dir, "config.json"), config, 0o600)
}
