package machine

import (
	"slices"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// refused are system calls that no program in a machine needs, and that affect this
// computer, or reach much of its kernel. They fail with EPERM.
var refused = []string{
	// Another kernel, its modules, its switch and its clock.
	"kexec_load", "kexec_file_load", "create_module", "init_module", "finit_module", "delete_module", "get_kernel_syms", "query_module",
	"reboot", "settimeofday", "stime", "clock_settime", "clock_settime64",
	// Its devices' ports, its swap, its accounting, its quotas, its log.
	"iopl", "ioperm", "pciconfig_read", "pciconfig_write", "pciconfig_iobase", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "syslog",
	// Access to files by handle, or to events of a whole file system, which exceeds a machine's part.
	"open_by_handle_at", "fanotify_init", "fanotify_mark",
	// Tracing of the kernel, delays in it, and obsolete calls.
	"perf_event_open", "lookup_dcookie", "userfaultfd", "nfsservctl", "uselib", "ustat", "sysfs", "_sysctl", "vm86", "vm86old", "modify_ldt",
}

// absent are system calls with a fallback for kernels that lack them.
// They fail with ENOSYS: runc and systemd do without keys then. After EPERM they would
// report an error.
var absent = []string{"add_key", "keyctl", "request_key", "io_uring_setup", "io_uring_enter", "io_uring_register"}

// harden restricts a machine's access to this computer. It is not part of the measured
// bundle: it protects this computer, not the machine, and older measurements of images
// must stay valid.
//
// unified means that this computer has cgroup v2 alone. There runc, which runs pods in a
// machine, controls devices with a bpf program.
func harden(s *specs.Spec, unified bool) {
	eperm, enosys := uint(syscall.EPERM), uint(syscall.ENOSYS)
	denied := slices.Clone(refused)
	if !unified {
		denied = append(denied, "bpf")
	}
	s.Linux.Seccomp = &specs.LinuxSeccomp{
		DefaultAction: specs.ActAllow,
		// All system call ABIs of the processor, or the older one would bypass the filter.
		Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32, specs.ArchAARCH64, specs.ArchARM},
		Syscalls: []specs.LinuxSyscall{
			{Names: denied, Action: specs.ActErrno, ErrnoRet: &eperm},
			{Names: absent, Action: specs.ActErrno, ErrnoRet: &enosys},
		},
	}
}
