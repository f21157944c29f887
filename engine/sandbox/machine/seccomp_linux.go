package machine

import (
	"slices"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// refused are system calls that nothing in a machine needs, and whose effect is on this
// computer, or that reach much of its kernel. They fail with EPERM.
var refused = []string{
	// Another kernel, its modules, its switch and its clock.
	"kexec_load", "kexec_file_load", "create_module", "init_module", "finit_module", "delete_module", "get_kernel_syms", "query_module",
	"reboot", "settimeofday", "stime", "clock_settime", "clock_settime64",
	// Its devices' ports, its swap, its accounting, its quotas, its log.
	"iopl", "ioperm", "pciconfig_read", "pciconfig_write", "pciconfig_iobase", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "syslog",
	// Files by handles or by events of a whole file system, of which a machine has a part.
	"open_by_handle_at", "fanotify_init", "fanotify_mark",
	// What watches or slows the kernel, and what nobody uses any more.
	"perf_event_open", "lookup_dcookie", "userfaultfd", "nfsservctl", "uselib", "ustat", "sysfs", "_sysctl", "vm86", "vm86old", "modify_ldt",
}

// absent are system calls whose users have another way where a kernel does not have them.
// They fail with ENOSYS: runc and systemd do without keys then, and go on after EPERM with
// an error.
var absent = []string{"add_key", "keyctl", "request_key", "io_uring_setup", "io_uring_enter", "io_uring_register"}

// harden narrows what a machine can do to this computer. It is no part of the bundle that
// is measured: it protects this computer, not the machine, and images that were measured
// before it must still be the same.
//
// unified says that this computer has cgroup v2 alone. There runc, which runs pods in a
// machine, decides on devices by a program of bpf.
func harden(s *specs.Spec, unified bool) {
	eperm, enosys := uint(syscall.EPERM), uint(syscall.ENOSYS)
	denied := slices.Clone(refused)
	if !unified {
		denied = append(denied, "bpf")
	}
	s.Linux.Seccomp = &specs.LinuxSeccomp{
		DefaultAction: specs.ActAllow,
		// All of a processor's ways into the kernel, or the older one would be a way around.
		Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32, specs.ArchAARCH64, specs.ArchARM},
		Syscalls: []specs.LinuxSyscall{
			{Names: denied, Action: specs.ActErrno, ErrnoRet: &eperm},
			{Names: absent, Action: specs.ActErrno, ErrnoRet: &enosys},
		},
	}
}
