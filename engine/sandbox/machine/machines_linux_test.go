package machine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"

	"github.com/creack/pty"
	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"constellation/engine/sandbox/machine/disk"
	"constellation/engine/sandbox/machine/machinetest"
	"constellation/internal/testneeds"
)

// crashEnv makes the test binary a sandbox's process that crashes. Its value is the point.
const crashEnv = "CONSTELLATION_MACHINE_TEST_CRASH"

func TestMain(m *testing.M) {
	if disk.IsServer(os.Args[1:]) { // a process of this program serves a machine's disk
		os.Exit(disk.Main(os.Args[1:]))
	}
	if where := os.Getenv(crashEnv); where != "" {
		crash(where, os.Args[1])
		return
	}
	os.Exit(m.Run())
}

// bench is the common setup of tests with real machines.
type bench struct {
	image *Image
	dir   string // of the sandbox
	host  *Host
}

// realMachines skips the test if machines cannot run, and otherwise returns a host
// in a new directory, with cleanup at the end. The root file system is in
// the user's cache, so that it is made once.
func realMachines(t *testing.T) *bench {
	t.Helper()
	testneeds.Machines(t)
	unlock, err := machinetest.Lock()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unlock)
	cacheDir := testCache(t)
	if problems := Check(t.Context(), cacheDir, os.TempDir(), Demand{Workers: 2}); len(problems) > 0 {
		t.Skip("this computer cannot run real machines: ", problems)
	}
	b := &bench{image: testImage(t, cacheDir)}
	// Not t.TempDir, whose cleanup ignores mounts below it.
	dir, err := os.MkdirTemp("", "machines-")
	if err != nil {
		t.Fatal(err)
	}
	b.dir = dir
	t.Cleanup(func() {
		if err := removeTree(filepath.Dir(dir), filepath.Base(dir)); err != nil {
			t.Error(err)
		}
	})
	if b.host, err = NewHost(dir, "test", slog.New(slog.NewTextHandler(t.Output(), nil))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := b.host.Sweep(ctx); err != nil {
			t.Error(err)
		}
	})
	return b
}

func testCache(t *testing.T) string {
	t.Helper()
	dir, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "constellation")
}

// testImage makes an image whose bootstrapper and agent are scripts that wait.
func testImage(t *testing.T, cacheDir string) *Image {
	t.Helper()
	rootfs, err := Rootfs(t.Context(), cacheDir, nil)
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec sleep infinity\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	// The image itself is not in the user's cache, but its root file system is.
	image, err := OSImage(t.Context(), t.TempDir(), rootfs, ImageSpec{Version: "v1.1.0", Bootstrapper: script, Agent: script}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return image
}

func (b *bench) spec(name string, number byte) Spec {
	return Spec{
		Name: name, Image: b.image,
		IP:      netip.AddrFrom4([4]byte{10, 42, 0, 10 + number}),
		PodCIDR: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, number, 0}), 24),
		Files: map[string]File{
			"/etc/constellation/environment": {Data: []byte("A=b\n")},
			"/etc/constellation/secret":      {Data: []byte("hush"), Mode: 0o600},
		},
	}
}

// firmware measures as a cloud does, and records its input.
func firmware(boots *[]PowerOn) Firmware {
	return func(ctx context.Context, p PowerOn) error {
		*boots = append(*boots, p)
		return attestationtest.Measure(ctx, p.TPM, p.EventLog, measured(p.Events))
	}
}

func measured(events []Event) []attestation.MeasuredEvent {
	var m []attestation.MeasuredEvent
	for _, e := range events {
		m = append(m, attestation.MeasuredEvent(e))
	}
	return m
}

// run runs a command in a machine and returns its output. A failure fails the test.
func (b *bench) run(t *testing.T, machine string, command ...string) string {
	t.Helper()
	var out, errs bytes.Buffer
	code, err := b.host.Exec(t.Context(), machine, command, Stdio{Out: &out, Err: &errs})
	if err != nil || code != 0 {
		t.Fatalf("%q in %s: code %d, err %v\n%s%s", command, machine, code, err, &out, &errs)
	}
	return strings.TrimSpace(out.String())
}

const bootIDFile = "/proc/sys/kernel/random/boot_id"

// testJournal checks that the journal of a machine has so many boots, and its first messages and those of containerd in the last one.
func testJournal(t *testing.T, b *bench, machine string, boots int) {
	t.Helper()
	// journalctl ends when its reader does.
	if got := b.run(t, machine, "timeout", "20", "sh", "-c", "journalctl --follow --unit=containerd --output=cat | head -n1"); !strings.Contains(got, "containerd") {
		t.Errorf("journalctl --follow prints %q for containerd", got)
	}
	id := strings.ReplaceAll(b.run(t, machine, "cat", bootIDFile), "-", "")
	listed := strings.Fields(b.run(t, machine, "sh", "-c", "journalctl --list-boots --quiet | awk '{print $2}'"))
	if len(listed) != boots || listed[len(listed)-1] != id {
		t.Errorf("the journal has the boots %q, want %d and the last one %s", listed, boots, id)
	}
	if got := b.run(t, machine, "journalctl", "--boot", "--unit=systemd-tmpfiles-setup", "--unit=machine-setup", "--output=cat"); !strings.Contains(got, "Finished ") {
		t.Errorf("the journal of this boot lacks its first units: %q", got)
	}
}

// The whole lifecycle of two machines, with a comparison of this computer before and after.
func TestMachinesLeaveThisComputerAsItWas(t *testing.T) {
	b := realMachines(t)
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	before := observe(t, b)

	if err := b.host.Network(ctx); err != nil {
		t.Fatal(err)
	}
	b.host.LimitMemory(4 << 30)
	var boots []PowerOn
	names := []string{"control-plane-0", "worker-0"}
	for i, name := range names {
		start := time.Now()
		if err := b.host.Start(ctx, b.spec(name, byte(i)), firmware(&boots)); err != nil {
			t.Fatal(err)
		}
		if err := b.host.WaitReady(ctx, name); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: containerd answered %v after the start", name, time.Since(start).Round(time.Millisecond))
	}
	if err := b.host.Start(ctx, b.spec("worker-0", 1), nil); !errors.Is(err, ErrExists) {
		t.Errorf("a machine was started twice: %v", err)
	}
	double := b.spec("worker-7", 1)
	if err := b.host.Start(ctx, double, nil); err == nil {
		t.Error("two machines got one address")
	}
	during := observe(t, b)
	if during.namespaces == before.namespaces || len(during.ours) == 0 {
		t.Fatal("the observation does not see machines, so it proves nothing")
	}

	for _, name := range names {
		t.Run("systemd of "+name+" is content", func(t *testing.T) {
			if got := b.run(t, name, "systemctl", "is-system-running", "--wait"); got != "running" {
				t.Errorf("it is %s: %s", got, b.run(t, name, "systemctl", "--failed", "--plain"))
			}
			if got := b.run(t, name, "systemctl", "is-active", "containerd", "machine-setup", "constellation-agent", "constellation-bootstrapper"); got != "active\nactive\nactive\nactive" {
				t.Errorf("units are %q", got)
			}
			if got := b.run(t, name, "hostname"); got != name {
				t.Errorf("host name is %s", got)
			}
			if got := b.run(t, name, "sh", "-c", ". /etc/os-release; echo $ID $IMAGE_VERSION; cat /etc/constellation/environment; stat -c %a /etc/constellation/secret"); got != "debian v1.1.0\nA=b\n600" {
				t.Errorf("files are %q", got)
			}
		})
	}
	t.Run("a machine has the capabilities of the design", func(t *testing.T) {
		var want uint64
		for _, c := range capabilities {
			want |= 1 << capabilityBits[c]
		}
		for line := range strings.Lines(b.run(t, "worker-0", "grep", "Cap", "/proc/1/status")) {
			f := strings.Fields(line)
			got, err := strconv.ParseUint(f[1], 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			if f[0] == "CapInh:" || f[0] == "CapAmb:" {
				want := uint64(0)
				if got != want {
					t.Errorf("%s %x, want %x", f[0], got, want)
				}
			} else if got != want {
				t.Errorf("%s %x, want %x", f[0], got, want)
			}
		}
	})
	t.Run("a machine makes no system calls that reach the computer below", func(t *testing.T) {
		if got := b.run(t, "worker-0", "grep", "-w", "Seccomp:", "/proc/1/status"); !strings.HasSuffix(got, "2") {
			t.Errorf("of its first process: %s", got)
		}
		calls := map[int]unix.Errno{ // with these arguments the kernel itself would return other errors for most of them
			unix.SYS_KEXEC_LOAD: unix.EPERM, unix.SYS_KEXEC_FILE_LOAD: unix.EPERM, unix.SYS_INIT_MODULE: unix.EPERM, unix.SYS_FINIT_MODULE: unix.EPERM, unix.SYS_DELETE_MODULE: unix.EPERM,
			unix.SYS_REBOOT: unix.EPERM, unix.SYS_SETTIMEOFDAY: unix.EPERM, unix.SYS_CLOCK_SETTIME: unix.EPERM, unix.SYS_SWAPON: unix.EPERM, unix.SYS_SWAPOFF: unix.EPERM,
			unix.SYS_ACCT: unix.EPERM, unix.SYS_QUOTACTL: unix.EPERM, unix.SYS_SYSLOG: unix.EPERM, unix.SYS_OPEN_BY_HANDLE_AT: unix.EPERM, unix.SYS_FANOTIFY_INIT: unix.EPERM,
			unix.SYS_FANOTIFY_MARK: unix.EPERM, unix.SYS_PERF_EVENT_OPEN: unix.EPERM, unix.SYS_USERFAULTFD: unix.EPERM,
			unix.SYS_ADD_KEY: unix.ENOSYS, unix.SYS_KEYCTL: unix.ENOSYS, unix.SYS_REQUEST_KEY: unix.ENOSYS, unix.SYS_IO_URING_SETUP: unix.ENOSYS,
		}
		if only, err := onlyUnified(); err != nil {
			t.Fatal(err)
		} else if !only {
			calls[unix.SYS_BPF] = unix.EPERM
		}
		for _, machine := range []string{"control-plane-0", "worker-0"} {
			for number, want := range calls {
				got := b.run(t, machine, "perl", "-e", fmt.Sprintf("syscall(%d, -1, -1, -1, -1, -1, -1); print $!+0", number))
				if got != strconv.Itoa(int(want)) {
					t.Errorf("system call %d in %s fails with %s, want %d", number, machine, got, want)
				}
			}
		}
		// Without the filter the same calls return other errors, so the test observes the filter.
		if _, _, err := unix.Syscall6(unix.SYS_IO_URING_SETUP, ^uintptr(0), ^uintptr(0), 0, 0, 0, 0); err == unix.ENOSYS {
			t.Log("this computer has no io_uring itself")
		}
	})
	t.Run("a machine runs containers with a filter of their own, as another user", func(t *testing.T) {
		got := b.run(t, "worker-0", "sh", "-ec", `
			d=$(mktemp -d /var/lib/containerd/nested.XXXXXX); cd $d; mkdir rootfs; mount --bind / rootfs; runc spec
			sed -i 's/"terminal": true/"terminal": false/; s/"uid": 0/"uid": 65532/; s/"gid": 0/"gid": 65532/; s/"linux": {/"linux": {"seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}]},/' config.json
			perl -0pi -e 's/"args": \[[^\]]*\]/"args": ["sleep", "60"]/; s/("(?:bounding|effective|permitted)": \[)/$1"CAP_AUDIT_WRITE","CAP_MKNOD","CAP_NET_RAW",/g' config.json
			runc run --detach nested </dev/null >/dev/null 2>&1
			runc exec nested sh -c 'id -u; grep -w Seccomp_filters: /proc/self/status; mkdir /tmp/x 2>/dev/null || echo refused' </dev/null
			runc delete --force nested; umount rootfs; rm -r $d`)
		if want := "65532\nSeccomp_filters:\t2\nrefused"; got != want {
			t.Errorf("it says %q, want %q", got, want)
		}
	})
	t.Run("a machine cannot reach the computer below", func(t *testing.T) {
		for what, command := range map[string]string{
			"write a sysctl of the kernel":       "echo 1 > /proc/sys/kernel/dmesg_restrict",
			"write a sysctl of memory":           "echo 10 > /proc/sys/vm/swappiness",
			"write a limit of files":             "echo 1 > /proc/sys/fs/inotify/max_user_instances",
			"use sysrq":                          "echo h > /proc/sysrq-trigger",
			"set the clock":                      "date -s @0",
			"open a disk":                        "mknod /tmp/disk b " + diskNumber(t) + " && head -c1 /tmp/disk",
			"allow itself a disk":                "echo 'b *:* rwm' > /sys/fs/cgroup/devices/devices.allow",
			"write to sysfs":                     "echo x > /sys/kernel/uevent_helper",
			"read the kernel's log":              "head -c1 /dev/kmsg | grep .",
			"replace the socket of its TPM":      "rm " + TPMDir + "/tpm.sock",
			"see processes of the computer":      "grep -l '[m]achine.test' /proc/[0-9]*/cmdline",
			"find the directory of the machines": "ls " + b.dir,
		} {
			code, err := b.host.Exec(ctx, "worker-0", []string{"sh", "-c", command}, Stdio{})
			if err != nil {
				t.Fatal(err)
			}
			if code == 0 {
				t.Errorf("it can %s: %s", what, command)
			}
		}
	})
	t.Run("the kubelet finds the sysctls it wants", func(t *testing.T) {
		got := b.run(t, "worker-0", "sh", "-c", "cd /proc/sys; cat kernel/panic kernel/panic_on_oops vm/overcommit_memory vm/panic_on_oom net/ipv4/ip_forward")
		if got != "10\n1\n1\n0\n1" {
			t.Errorf("they are %q", got)
		}
		if got := b.run(t, "worker-0", "findmnt", "--noheadings", "--output", "PROPAGATION", "/"); !strings.Contains(got, "shared") {
			t.Errorf("mounts in the root are %s, want shared", got)
		}
	})
	t.Run("each machine has a boot ID of its own", func(t *testing.T) {
		b1, b2 := b.run(t, "control-plane-0", "cat", bootIDFile), b.run(t, "worker-0", "cat", bootIDFile)
		here, err := bootID()
		if err != nil || len(b1) != len(here) || len(b2) != len(here) || b1 == b2 || b1 == here || b2 == here {
			t.Errorf("they are %q and %q, this computer has %q (%v)", b1, b2, here, err)
		}
	})
	t.Run("the journal of a boot can be followed", func(t *testing.T) { testJournal(t, b, "worker-0", 1) })
	t.Run("machines reach each other and the cloud, and nothing else", func(t *testing.T) {
		b.run(t, "control-plane-0", "ping", "-c1", "-W2", "10.42.0.11")
		b.run(t, "worker-0", "ping", "-c1", "-W2", "10.42.0.10")
		for _, address := range []netip.AddrPort{netip.AddrPortFrom(Gateway, 8080), netip.AddrPortFrom(MetadataAddr, 80)} {
			l, err := b.host.Listen(ctx, "tcp", address.String())
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go greet(l)
			if got := b.run(t, "worker-0", "bash", "-c", fmt.Sprintf("cat < /dev/tcp/%s/%d", address.Addr(), address.Port())); got != "hello 10.42.0.11" {
				t.Errorf("%s says %q", address, got)
			}
		}
		if _, err := b.host.Listen(ctx, "tcp", "localhost:1"); err == nil {
			t.Error("a name was resolved on this computer")
		}
		// The other direction: socat in the machine serves, the cloud dials.
		server := make(chan struct{})
		go func() {
			defer close(server)
			_, _ = b.host.Exec(ctx, "worker-0", []string{"socat", "TCP-LISTEN:7000,reuseaddr", "EXEC:hostname"}, Stdio{})
		}()
		if got := dialUntil(t, ctx, b.host, "10.42.0.11:7000"); got != "worker-0" {
			t.Errorf("the machine has printed %q", got)
		}
		<-server
		if code, err := b.host.Exec(ctx, "worker-0", []string{"ping", "-c1", "-W1", "192.0.2.1"}, Stdio{}); err != nil || code == 0 {
			t.Errorf("a machine reaches the world: code %d, err %v", code, err)
		}
	})
	t.Run("pods of two machines reach each other", func(t *testing.T) {
		// containerd's steps for a pod, by hand: a namespace and the machine's CNI plugin.
		const addPod = `ip netns add pod && CNI_COMMAND=ADD CNI_CONTAINERID=pod CNI_NETNS=/run/netns/pod CNI_IFNAME=eth0 CNI_PATH=/usr/lib/cni \
			/usr/lib/cni/ptp >/dev/null <<END
{"cniVersion":"0.4.0","name":"constellation",$(grep -v cniVersion /etc/cni/net.d/10-constellation.conflist | tr -d '\n' | sed 's/.*"plugins": \[ *{//; s/} *, *{ *"capabilities.*//')}
END`
		for _, name := range names {
			b.run(t, name, "bash", "-c", addPod)
		}
		first := b.run(t, "control-plane-0", "ip", "netns", "exec", "pod", "hostname", "-I")
		second := b.run(t, "worker-0", "ip", "netns", "exec", "pod", "hostname", "-I")
		if !strings.HasPrefix(first, "10.244.0.") || !strings.HasPrefix(second, "10.244.1.") {
			t.Fatalf("pods have the addresses %s and %s", first, second)
		}
		b.run(t, "control-plane-0", "ip", "netns", "exec", "pod", "ping", "-c1", "-W2", second)
		b.run(t, "worker-0", "ip", "netns", "exec", "pod", "ping", "-c1", "-W2", first)
		b.run(t, "worker-0", "ping", "-c1", "-W2", first)
		// Connections to a deleted pod fail at once.
		var out bytes.Buffer
		code, err := b.host.Exec(ctx, "control-plane-0", []string{"ping", "-c1", "-W5", "10.244.1.250"}, Stdio{Out: &out, Err: &out})
		if err != nil || code == 0 || !strings.Contains(out.String(), "Unreachable") {
			t.Errorf("a pod that is not there: code %d, err %v, %s", code, err, &out)
		}
	})
	t.Run("commands", func(t *testing.T) { testExec(t, b) })
	t.Run("the TPM says what booted", func(t *testing.T) {
		want := attestation.PredictPCRs(measured(b.image.Events))
		for _, p := range boots {
			got, err := attestation.ReadPCRs(ctx, p.TPM, PCRBoot, PCRRootfs, PCRImage)
			if err != nil {
				t.Fatal(err)
			}
			for i, w := range want {
				if !bytes.Equal(got[i], w) {
					t.Errorf("%s: PCR %d is %x, want %x", p.Machine, i, got[i], w)
				}
			}
		}
		if got := b.run(t, "worker-0", "sh", "-c", "test -S "+TPMDir+"/tpm.sock && ls "+TPMDir); !strings.HasPrefix(got, EventLogName+"\ntpm.sock\n") {
			t.Errorf("the machine sees %q", got)
		}
	})
	t.Run("a reboot keeps the disk and resets the TPM", func(t *testing.T) {
		if err := attestation.ExtendClusterID(ctx, boots[1].TPM, []byte("cluster")); err != nil {
			t.Fatal(err)
		}
		earlier := b.run(t, "worker-0", "cat", bootIDFile)
		b.run(t, "worker-0", "sh", "-c", "echo kept > /etc/kept; echo kept > /var/lib/kubelet/kept; echo lost > /run/lost")
		start := time.Now()
		if err := b.host.Reboot(ctx, "worker-0", firmware(&boots)); err != nil {
			t.Fatal(err)
		}
		if err := b.host.WaitReady(ctx, "worker-0"); err != nil {
			t.Fatal(err)
		}
		t.Logf("rebooted in %v", time.Since(start).Round(time.Millisecond))
		if got := b.run(t, "worker-0", "sh", "-c", "cat /etc/kept /var/lib/kubelet/kept; ls /run/lost 2>/dev/null || echo gone"); got != "kept\nkept\ngone" {
			t.Errorf("the disk holds %q", got)
		}
		if later := b.run(t, "worker-0", "cat", bootIDFile); later == earlier || len(later) != len(earlier) {
			t.Errorf("the boot ID was %q and is %q", earlier, later)
		}
		testJournal(t, b, "worker-0", 2)
		if got := b.run(t, "worker-0", "ls", "/var/lib/cni/networks/constellation"); got != "last_reserved_ip.0\nlock" {
			t.Errorf("of the pods' addresses the machine remembers %q", got)
		}
		last := boots[len(boots)-1]
		if last.First || !boots[0].First || last.Machine != "worker-0" {
			t.Errorf("firmware got %+v", last)
		}
		pcrs, err := attestation.ReadPCRs(ctx, last.TPM, 15)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(pcrs[15], make([]byte, sha256.Size)) {
			t.Error("PCR 15 outlived the reboot")
		}
		b.run(t, "control-plane-0", "ping", "-c1", "-W2", "10.42.0.11")
	})
	t.Run("a power cut is noticed, and undone by a boot", func(t *testing.T) {
		off := make(chan error, 1)
		go func() { off <- b.host.Wait(ctx, "worker-0") }()
		if err := b.host.Kill(ctx, "worker-0"); err != nil {
			t.Fatal(err)
		}
		if err := <-off; err != nil {
			t.Error(err)
		}
		if m, err := b.host.Machine("worker-0"); err != nil || m.Power != Off || m.PID != 0 || m.TPM != "" {
			t.Errorf("the machine is %+v, err %v", m, err)
		}
		if _, err := b.host.Exec(ctx, "worker-0", []string{"true"}, Stdio{}); !errors.Is(err, ErrNotRunning) {
			t.Errorf("a command ran: %v", err)
		}
		if err := b.host.WaitReady(ctx, "worker-0"); !errors.Is(err, ErrNotRunning) {
			t.Errorf("it was waited for: %v", err)
		}
		if err := b.host.Boot(ctx, "worker-0", firmware(&boots)); err != nil {
			t.Fatal(err)
		}
		if err := b.host.WaitReady(ctx, "worker-0"); err != nil {
			t.Fatal(err)
		}
		if got := b.run(t, "worker-0", "cat", "/etc/kept"); got != "kept" {
			t.Errorf("the disk holds %q", got)
		}
	})
	t.Run("a machine that switches itself off is off", func(t *testing.T) {
		// The machine's own systemd ends it, so the command may not return an exit code.
		_, _ = b.host.Exec(ctx, "worker-0", []string{"systemctl", "poweroff"}, Stdio{})
		if err := b.host.Wait(ctx, "worker-0"); err != nil {
			t.Fatal(err)
		}
		if m, err := b.host.Machine("worker-0"); err != nil || m.Power != Off {
			t.Errorf("the machine is %+v, err %v", m, err)
		}
	})
	t.Run("a machine that never gets ready says what it waits for", func(t *testing.T) {
		spec := b.spec("worker-8", 8)
		spec.Files["/etc/containerd/config.toml"] = File{Data: []byte("no = configuration")}
		if err := b.host.Start(ctx, spec, nil); err != nil {
			t.Fatal(err)
		}
		// Its progress in a second depends on the load of this computer.
		var err error
		for ctx.Err() == nil && (err == nil || !strings.Contains(err.Error(), "containerd.service")) {
			soon, cancel := context.WithTimeout(ctx, time.Second)
			err = b.host.WaitReady(soon, "worker-8")
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("err is %v", err)
			}
		}
		if ctx.Err() != nil {
			t.Errorf("err is %v", err)
		}
		if err := b.host.Remove(ctx, "worker-8"); err != nil {
			t.Error(err)
		}
	})
	t.Run("all machines together are bounded", func(t *testing.T) {
		dirs, err := findCgroups(b.host.id)
		if err != nil {
			t.Fatal(err)
		}
		bounded := 0
		for _, d := range dirs {
			for _, f := range []string{"memory.limit_in_bytes", "memory.max"} {
				if v, err := os.ReadFile(filepath.Join(d, f)); err == nil && strings.TrimSpace(string(v)) == strconv.Itoa(4<<30) {
					bounded++
				}
			}
		}
		if bounded != 1 {
			t.Errorf("%d of %v hold the limit", bounded, dirs)
		}
	})
	t.Run("a failed start leaves nothing", func(t *testing.T) {
		refuse := func(context.Context, PowerOn) error { return errors.New("measured enough") }
		if err := b.host.Start(ctx, b.spec("worker-9", 9), refuse); err == nil || !strings.Contains(err.Error(), "measured enough") {
			t.Fatalf("err is %v", err)
		}
		if _, err := b.host.Machine("worker-9"); !errors.Is(err, ErrNotFound) {
			t.Errorf("the machine is there: %v", err)
		}
		if _, err := os.Lstat(b.host.path("worker-9")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("its directory is there: %v", err)
		}
	})

	for _, name := range names {
		start := time.Now()
		if err := b.host.Remove(ctx, name); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: removed in %v", name, time.Since(start).Round(time.Millisecond))
		if err := b.host.Remove(ctx, name); err != nil {
			t.Errorf("removing it again: %v", err)
		}
	}
	if err := b.host.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	before.compare(t, observe(t, b))
	during.gone(t)
}

func greet(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
		_, _ = io.WriteString(c, "hello "+host+"\n")
		_ = c.Close()
	}
}

// dialUntil dials until the server listens, and returns the response.
func dialUntil(t *testing.T, ctx context.Context, h *Host, address string) string {
	t.Helper()
	for {
		c, err := h.Dial(ctx, "tcp", address)
		if err == nil {
			defer c.Close()
			b, err := io.ReadAll(c)
			if err != nil {
				t.Fatal(err)
			}
			return strings.TrimSpace(string(b))
		}
		select {
		case <-ctx.Done():
			t.Fatal(err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// diskNumber is the device number of the disk that holds the temporary files.
func diskNumber(t *testing.T) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(os.TempDir(), &st); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%d %d", unix.Major(st.Dev), unix.Minor(st.Dev))
}

func testExec(t *testing.T, b *bench) {
	exec := func(t *testing.T, stdio Stdio, command ...string) int {
		t.Helper()
		code, err := b.host.Exec(t.Context(), "worker-0", command, stdio)
		if err != nil {
			t.Fatal(err)
		}
		return code
	}
	t.Run("have an exit code", func(t *testing.T) {
		for _, want := range []int{0, 1, 42} {
			if got := exec(t, Stdio{}, "sh", "-c", "exit "+strconv.Itoa(want)); got != want {
				t.Errorf("code is %d, want %d", got, want)
			}
		}
	})
	t.Run("that do not exist say so", func(t *testing.T) {
		var errs bytes.Buffer
		if code := exec(t, Stdio{Err: &errs}, "no-such-command"); code == 0 || !strings.Contains(errs.String(), "not found") {
			t.Errorf("code is %d: %s", code, &errs)
		}
	})
	t.Run("read and write", func(t *testing.T) {
		var out, errs bytes.Buffer
		exec(t, Stdio{In: strings.NewReader("words\n"), Out: &out, Err: &errs}, "sh", "-c", "cat; echo oops >&2")
		if out.String() != "words\n" || errs.String() != "oops\n" {
			t.Errorf("out %q, err %q", &out, &errs)
		}
	})
	t.Run("do not wait for input", func(t *testing.T) {
		r, w := io.Pipe()
		defer w.Close()
		if code := exec(t, Stdio{In: r}, "true"); code != 0 {
			t.Errorf("code is %d", code)
		}
	})
	t.Run("get a terminal when they want one", func(t *testing.T) {
		var out bytes.Buffer
		if code := exec(t, Stdio{TTY: true, Out: &out}, "sh", "-c", "test -t 0 && test -t 1 && while test \"$(stty size)\" = '0 0'; do sleep 0.01; done; stty size; exit 3"); code != 3 {
			t.Errorf("code is %d", code)
		}
		if got := strings.TrimSpace(out.String()); got != "24 80" {
			t.Errorf("out is %q", got)
		}
		out.Reset()
		exec(t, Stdio{Out: &out}, "sh", "-c", "test -t 0 || test -t 1 || echo none")
		if got := out.String(); got != "none\n" {
			t.Errorf("without one, out is %q", got)
		}
	})
	t.Run("use the terminal they are given", func(t *testing.T) {
		master, slave, err := pty.Open()
		if err != nil {
			t.Fatal(err)
		}
		defer master.Close()
		defer slave.Close()
		if err := pty.Setsize(master, &pty.Winsize{Rows: 11, Cols: 77}); err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.WriteString(master, "typed\n") }()
		var out bytes.Buffer
		code := exec(t, Stdio{TTY: true, In: slave, Out: &out}, "sh", "-c", "while test \"$(stty size)\" = '0 0'; do sleep 0.01; done; stty size; read word; echo got $word; exit 5")
		if code != 5 || !strings.Contains(out.String(), "11 77") || !strings.Contains(out.String(), "got typed") {
			t.Errorf("code is %d, out is %q", code, &out)
		}
	})
	t.Run("end with their context", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		// It ignores SIGTERM, so it must be killed.
		_, err := b.host.Exec(ctx, "worker-0", []string{"sh", "-c", "trap '' TERM; while :; do sleep 0.1; done # stubborn"}, Stdio{})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("err is %v", err)
		}
		if code := exec(t, Stdio{}, "sh", "-c", "grep -l 'stubbor[n]' /proc/[0-9]*/cmdline"); code == 0 {
			t.Error("the command lives on")
		}
	})
	t.Run("need a machine", func(t *testing.T) {
		if _, err := b.host.Exec(t.Context(), "nobody", []string{"true"}, Stdio{}); !errors.Is(err, ErrNotFound) {
			t.Errorf("err is %v", err)
		}
	})
}

// crash is the process of a sandbox that starts a machine and is killed.
func crash(where, dir string) {
	die := func() { _ = syscall.Kill(os.Getpid(), syscall.SIGKILL); select {} }
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	ctx := context.Background()
	var b bench
	fail(readJSON(filepath.Join(dir, "image.json"), &b.image))
	h, err := NewHost(dir, "test", slog.New(slog.DiscardHandler))
	fail(err)
	fail(h.Network(ctx))
	var fw Firmware
	if where == "in the firmware" {
		fw = func(context.Context, PowerOn) error { die(); return nil }
	}
	if where == "while runc prepares the machine" {
		// The moment need not be exact: before, within and after runc.
		fw = func(context.Context, PowerOn) error {
			time.AfterFunc(60*time.Millisecond, die)
			return nil
		}
	}
	fail(h.Start(ctx, b.spec("worker-0", 1), fw))
	die()
}

// The next process adopts the remains of a killed process, uses them, and removes them completely.
func TestMachinesAfterACrash(t *testing.T) {
	for _, tt := range []struct {
		where string
		power []Power // possible states of the machine at that point
	}{
		{"in the firmware", []Power{Creating}},
		{"while runc prepares the machine", []Power{Creating, Running}},
		{"when the machine runs", []Power{Running}},
	} {
		t.Run(tt.where, func(t *testing.T) {
			b := realMachines(t)
			ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
			defer cancel()
			before := observe(t, b)
			if err := writeJSON(filepath.Join(b.dir, "image.json"), b.image); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(ctx, os.Args[0], b.dir)
			cmd.Env = append(os.Environ(), crashEnv+"="+tt.where)
			out, err := cmd.CombinedOutput()
			if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() {
				t.Fatalf("the process was not killed: %v: %s", err, out)
			}
			during := observe(t, b)
			if len(during.ours) == 0 {
				t.Fatal("nothing was left, so nothing can be swept")
			}
			machines, err := b.host.Machines()
			if err != nil {
				t.Fatal(err)
			}
			if len(machines) != 1 || !slices.Contains(tt.power, machines[0].Power) {
				t.Fatalf("found %+v", machines)
			}
			if tt.where == "when the machine runs" {
				if err := b.host.Network(ctx); err != nil {
					t.Fatal(err)
				}
				if err := b.host.WaitReady(ctx, "worker-0"); err != nil {
					t.Fatal(err)
				}
				// Another Host may inspect machines and run commands, but not drive them.
				other, err := NewHost(b.dir, "test", slog.New(slog.DiscardHandler))
				if err != nil {
					t.Fatal(err)
				}
				if err := other.Sweep(ctx); !errors.Is(err, ErrBusy) {
					t.Fatalf("machines of another process were swept: %v", err)
				}
				if code, err := other.Exec(ctx, "worker-0", []string{"ping", "-c1", "-W2", Gateway.String()}, Stdio{}); err != nil || code != 0 {
					t.Errorf("the machine lost its network: code %d, err %v", code, err)
				}
				if err := b.host.Reboot(ctx, "worker-0", nil); err != nil {
					t.Error(err)
				}
			}
			start := time.Now()
			if err := b.host.Sweep(ctx); err != nil {
				t.Fatal(err)
			}
			t.Logf("swept in %v", time.Since(start).Round(time.Millisecond))
			before.compare(t, observe(t, b))
			during.gone(t)
			left, err := os.ReadDir(b.dir)
			if err != nil {
				t.Fatal(err)
			}
			if len(left) != 1 || left[0].Name() != "image.json" {
				t.Errorf("in the directory there is still %v", left)
			}
			if err := b.host.Sweep(ctx); err != nil {
				t.Errorf("sweeping again: %v", err)
			}
		})
	}
}

// A pending connection in a machine does not keep it from being switched off.
func TestNamespaceGoesWhileSomebodyIsInIt(t *testing.T) {
	testneeds.Root(t, "to make a network namespace")
	path := filepath.Join(t.TempDir(), "netns")
	if err := createNamespace(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = removeNamespace(context.Background(), path) })
	err := inNamespace(path, func() error { return removeNamespace(t.Context(), path) })
	if err != nil {
		t.Error(err)
	}
	if there, err := isNamespace(path); there || err != nil {
		t.Errorf("it is there: %t, %v", there, err)
	}
}

func TestNothingIsRemovedBelowAMount(t *testing.T) {
	testneeds.Root(t, "to mount a file system")
	parent, err := os.MkdirTemp("", "machines-")
	if err != nil {
		t.Fatal(err)
	}
	mounted := filepath.Join(parent, "tree", "a", "mounted")
	if err := os.MkdirAll(mounted, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", mounted, "tmpfs", 0, "size=1m"); err != nil {
		t.Skip("tmpfs cannot be mounted here: ", err)
	}
	precious := filepath.Join(mounted, "precious")
	if err := os.WriteFile(precious, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := removeTree(parent, "tree"); err == nil || !strings.Contains(err.Error(), "mounted") {
		t.Errorf("err is %v", err)
	}
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
	if err := unmountBelow(t.Context(), parent); err != nil {
		t.Fatal(err)
	}
	if err := removeTree(parent, "tree"); err != nil {
		t.Error(err)
	}
	if err := removeTree(filepath.Dir(parent), filepath.Base(parent)); err != nil {
		t.Error(err)
	}
}

// A root that is not an overlay with a machine's marks must never be started.
func TestOnlyAMachinesRootIsStarted(t *testing.T) {
	for name, root := range map[string]func(t *testing.T) string{
		"this computer's root": func(*testing.T) string { return "/" },
		"an empty directory":   func(t *testing.T) string { return t.TempDir() },
		"a directory with the marks of a machine": func(t *testing.T) string {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, marker), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("/lib/systemd/systemd", filepath.Join(dir, initLink)); err != nil {
				t.Fatal(err)
			}
			return dir
		},
	} {
		t.Run(name, func(t *testing.T) {
			if err := proveRoot(root(t)); err == nil {
				t.Error("it was taken for a machine's root")
			}
		})
	}
	if err := proveContainer(os.Getpid(), "/"); err == nil {
		t.Error("a process of this computer was taken for a container")
	}
}

func TestChangedRootfsIsMeasuredAndRefused(t *testing.T) {
	rootfs, layer := t.TempDir(), t.TempDir()
	write := func(dir, name, data string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(data), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(rootfs, "tree/usr/lib/systemd/systemd", "init")
	write(rootfs, "tree/usr/bin/tool", "tool")
	write(layer, bootstrapperPath, "bootstrapper")
	write(layer, agentPath, "agent")
	made, err := scan(t.Context(), filepath.Join(rootfs, rootfsTree), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := writeJSON(filepath.Join(rootfs, rootfsContent), made); err != nil {
		t.Fatal(err)
	}
	var memory rootfsMemory
	pcrs := func() map[uint32]string {
		t.Helper()
		events, err := measure(t.Context(), rootfs, layer, &memory)
		if err != nil {
			t.Fatal(err)
		}
		all := map[uint32]string{}
		for i, p := range attestation.PredictPCRs(measured(events)) {
			all[i] = fmt.Sprintf("%x", p)
		}
		return all
	}
	changed := func(before, after map[uint32]string) (which []uint32) {
		for i := range before {
			if before[i] != after[i] {
				which = append(which, i)
			}
		}
		slices.Sort(which)
		return which
	}
	first := pcrs()
	if err := verifyRootfs(t.Context(), rootfs); err != nil {
		t.Error(err)
	}
	if got := slices.Sorted(maps.Keys(first)); !slices.Equal(got, []uint32{PCRBoot, PCRRootfs, PCRImage}) {
		t.Errorf("a boot measures into %v", got)
	}
	write(layer, agentPath, "@gent")
	second := pcrs()
	if got := changed(first, second); !slices.Equal(got, []uint32{PCRImage}) {
		t.Errorf("another agent changes %v", got)
	}
	write(rootfs, "tree/usr/bin/tool", "t00l")
	third := pcrs()
	if got := changed(second, third); !slices.Equal(got, []uint32{PCRRootfs}) {
		t.Errorf("another tool changes %v", got)
	}
	write(rootfs, "tree/usr/lib/systemd/systemd", "1nit")
	if got := changed(third, pcrs()); !slices.Equal(got, []uint32{PCRBoot, PCRRootfs}) {
		t.Errorf("another first program changes %v", got)
	}
	if err := verifyRootfs(t.Context(), rootfs); err == nil || !strings.Contains(err.Error(), "usr/bin/tool") {
		t.Errorf("a changed root file system can become an image: %v", err)
	}
}

func TestCheckNamesNumbersAndRemedies(t *testing.T) {
	if os.Geteuid() != 0 {
		problems := Check(t.Context(), t.TempDir(), t.TempDir(), Demand{Workers: 1})
		if len(problems) != 1 || problems[0].ID != "root" {
			t.Fatalf("without root: %v", problems)
		}
		return
	}
	dir := filepath.Join(t.TempDir(), "not", "there", "yet")
	problems := Check(t.Context(), dir, dir, Demand{ControlPlanes: 5000, Workers: 3000})
	byID := map[string]Problem{}
	for _, p := range problems {
		byID[p.ID] = p
	}
	for _, id := range []string{"inotify", "memory", "disk"} {
		p, ok := byID[id]
		if !ok {
			t.Errorf("8000 machines have no problem with %s", id)
			continue
		}
		if !strings.Contains(p.What, "5000") || !strings.Contains(p.What, "3000") || p.Remedy == "" {
			t.Errorf("%s: %q has no numbers or no remedy %q", id, p.What, p.Remedy)
		}
	}
	if _, err := os.Stat(filepath.Dir(dir)); !errors.Is(err, fs.ErrNotExist) {
		t.Error("looking made a directory")
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := program("runc"); err != nil {
		t.Skip("runc is not installed")
	}
	if p, err := checkPackages(testCache(t)); err != nil || p != nil {
		t.Errorf("root without /usr/sbin in PATH lacks packages: %v, %v", p, err)
	}
}

func TestRootfsWithoutAMirrorLeavesNothing(t *testing.T) {
	testneeds.Root(t, "to make a root file system")
	if p := missing(rootfsNeeds); len(p) > 0 {
		t.Skip("not installed: ", p)
	}
	t.Setenv("http_proxy", "http://127.0.0.1:1") // an unused port
	t.Setenv("https_proxy", "http://127.0.0.1:1")
	cacheDir := t.TempDir()
	_, err := Rootfs(t.Context(), cacheDir, nil)
	if err == nil || !strings.Contains(err.Error(), "debootstrap with http") {
		t.Fatalf("err is %v, want one that names the mirror", err)
	}
	t.Log(err)
	left, err := os.ReadDir(filepath.Join(cacheDir, "rootfs"))
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != 1 || left[0].Name() != "lock" {
		t.Errorf("in the cache there is %v", left)
	}
}

func TestInotifyInstancesAreCounted(t *testing.T) {
	testneeds.Root(t, "to see the files of all processes")
	const more = 3
	// Other processes open and close some, too, so it may take a few tries.
	total := func() (int, error) {
		used, err := inotifyInstances()
		n := 0
		for _, u := range used {
			n += u
		}
		return n, err
	}
	for range 50 {
		before, err := total()
		if err != nil {
			t.Fatal(err)
		}
		var fds []int
		for range more {
			fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
			if err != nil {
				t.Skip("no inotify instance is left: ", err)
			}
			fds = append(fds, fd)
		}
		after, err := total()
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		if err != nil {
			t.Fatal(err)
		}
		if after-before == more {
			return
		}
	}
	t.Error("three instances more are not counted as three")
}

// Machines without a cluster have only a few instances. They open the others once the cluster
// exists, when it is too late to refuse.
func TestInotifyInstancesThatMachinesWillTakeAreCounted(t *testing.T) {
	there := func(dir, sandbox, name string) Resident {
		return Resident{Dir: dir, Sandbox: sandbox, Name: name, ControlPlane: strings.HasPrefix(name, "control-plane")}
	}
	first := []Resident{there("/s/one", "one", "control-plane-0"), there("/s/one", "one", "worker-0"), there("/s/one", "one", "worker-1")}
	abandoned := slices.Clone(first)
	for i := range abandoned {
		abandoned[i].Abandoned = true
	}
	one, two := hostID("/s/one", "one")+"/", hostID("/s/two", "two")+"/"
	for name, tt := range map[string]struct {
		limit int
		used  map[string]int
		want  Demand
		what  string
	}{
		"an empty computer has room": {limit: 128, used: map[string]int{"": 20}, want: Demand{ControlPlanes: 3, Workers: 2, New: true}},
		"to the last one":            {limit: 113, used: map[string]int{"": 20}, want: Demand{ControlPlanes: 3, Workers: 2, New: true}},
		"one too many":               {limit: 112, used: map[string]int{"": 20}, want: Demand{ControlPlanes: 3, Workers: 2, New: true}, what: "3 control planes and 2 workers need 93 inotify instances; 20 of the 112 that root may have on this computer are in use"},
		"machines without a cluster will take theirs": {
			limit: 128,
			used:  map[string]int{"": 20, one + "control-plane-0": 4, one + "worker-0": 4, one + "worker-1": 4},
			want:  Demand{ControlPlanes: 1, Workers: 3, New: true, There: first},
			what:  "1 control planes and 3 workers need 60 inotify instances; 32 of the 128 that root may have on this computer are in use, and the machines that are there will take 37 more",
		},
		"machines that have not started yet will take theirs": {
			limit: 128,
			used:  map[string]int{"": 20},
			want:  Demand{ControlPlanes: 1, Workers: 3, New: true, There: first},
			what:  "1 control planes and 3 workers need 60 inotify instances; 20 of the 128 that root may have on this computer are in use, and the machines that are there will take 49 more",
		},
		"machines that are not going to be started take nothing": {
			limit: 128, used: map[string]int{"": 20}, want: Demand{ControlPlanes: 3, Workers: 2, New: true, There: abandoned},
		},
		"running machines without a daemon take theirs": {
			limit: 128,
			used:  map[string]int{"": 20, one + "control-plane-0": 4},
			want:  Demand{ControlPlanes: 3, Workers: 2, New: true, There: abandoned},
			what:  "3 control planes and 2 workers need 93 inotify instances; 24 of the 128 that root may have on this computer are in use, and the machines that are there will take 23 more",
		},
		"machines in a cluster have theirs, or more": {
			limit: 130, used: map[string]int{"": 15, one + "control-plane-0": 30, one + "worker-0": 12, one + "worker-1": 12}, want: Demand{ControlPlanes: 1, Workers: 2, New: true, There: first},
		},
		"a control plane more in a cluster, beside one that leads": {
			limit: 112,
			used:  map[string]int{"": 20, one + "control-plane-0": 27, one + "worker-0": 11, one + "worker-1": 11},
			want:  Demand{ControlPlanes: 2, There: first},
			what:  "2 control planes and 0 workers need 44 inotify instances; 69 of the 112 that root may have on this computer are in use",
		},
		"a control plane more in a cluster whose leader will take more": {
			limit: 112,
			used:  map[string]int{"": 20, one + "control-plane-0": 24, one + "worker-0": 11, one + "worker-1": 11},
			want:  Demand{ControlPlanes: 2, There: first},
			what:  "2 control planes and 0 workers need 44 inotify instances; 66 of the 112 that root may have on this computer are in use, and the machines that are there will take 3 more",
		},
		"unknown machines count as workers at least": {
			limit: 100,
			used:  map[string]int{"": 20, two + "a": 4, two + "b": 26},
			want:  Demand{ControlPlanes: 1, Workers: 2, New: true},
			what:  "1 control planes and 2 workers need 49 inotify instances; 50 of the 100 that root may have on this computer are in use, and the machines that are there will take 7 more",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := ""
			if p := inotifyProblem(tt.limit, tt.used, tt.want); p != nil {
				got = p.What
			}
			if got != tt.what {
				t.Errorf("got  %q\nwant %q", got, tt.what)
			}
		})
	}
}

func TestProcessesAreFoundInTheirMachine(t *testing.T) {
	for cgroups, want := range map[string]string{
		"0::/\n": "",
		"0::/system.slice/constellation.service\n":                                                               "",
		"12:pids:/constellation/demo-1a2b-00c0ffee/worker-0/init.scope\n0::/\n":                                  "demo-1a2b-00c0ffee/worker-0",
		"3:cpu:/\n0::/user.slice/constellation/demo-00c0ffee/control-plane-0/kubepods.slice/constellation/x/y\n": "demo-00c0ffee/control-plane-0",
		"0::/constellation/demo-00c0ffee\n":                                                                      "",
		"0::/constellation/demo-00c0ffee/worker-1\n":                                                             "demo-00c0ffee/worker-1",
	} {
		if got := machineOf(cgroups); got != want {
			t.Errorf("%q: in %q, want %q", cgroups, got, want)
		}
	}
}

// observation is the state of this computer that machines must not change.
type observation struct {
	sysctls, files map[string]string
	mounts         []string
	cgroups        []string
	links          []string
	namespaces     string // of the observing process, and how many of ours it can see
	ours           []string
	netns          []string // inodes of the sandbox's network namespaces
	host           *Host
}

// observe records the state of this computer. Other work runs concurrently, so it
// records stable state, and, in detail, state that is attributable to the host.
func observe(t *testing.T, b *bench) observation {
	t.Helper()
	o := observation{host: b.host, sysctls: map[string]string{}, files: map[string]string{}}
	_ = filepath.WalkDir("/proc/sys", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil
		}
		if slices.ContainsFunc(volatileSysctls, func(v string) bool { return strings.HasPrefix(path, "/proc/sys/"+v) }) {
			return nil
		}
		if value, err := os.ReadFile(path); err == nil {
			o.sysctls[path] = string(value)
		}
		return nil
	})
	if len(o.sysctls) < 100 {
		t.Fatalf("only %d sysctls were read", len(o.sysctls))
	}
	// A directory tree of ours beside the machines, and this computer's configuration.
	canary := filepath.Join(os.TempDir(), "machines-canary")
	if err := os.MkdirAll(canary, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = removeTree(filepath.Dir(canary), filepath.Base(canary)) })
	for i := range 20 {
		path := filepath.Join(canary, strconv.Itoa(i))
		if _, err := os.Lstat(path); err == nil {
			continue
		}
		if err := os.WriteFile(path, []byte(path), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{canary, "/etc"} {
		c, err := scan(t.Context(), dir, nil)
		if err != nil {
			t.Fatal(err)
		}
		for name, e := range c {
			o.files[filepath.Join(dir, name)] = e.Line + " " + e.Stamp
		}
	}
	for _, dir := range []string{"/", "/dev", "/root", "/home", "/usr", "/var", "/var/lib"} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, e := range entries {
			o.files["entry "+filepath.Join(dir, e.Name())] = e.Type().String()
		}
	}
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	o.files["host name"] = name
	modules, err := os.ReadFile("/proc/modules")
	if err == nil {
		for line := range strings.Lines(string(modules)) {
			o.files["module "+strings.Fields(line)[0]] = ""
		}
	}
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		line := m.Mountpoint + " " + m.FSType + " " + m.Options + " " + m.Optional
		switch {
		case strings.Contains(line+m.Source+m.VFSOptions, b.dir):
			o.ours = append(o.ours, "mount "+line)
		case !strings.HasPrefix(m.Mountpoint, os.TempDir()+"/") && !strings.Contains(m.Mountpoint, "/constellation/"):
			o.mounts = append(o.mounts, line)
		}
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		addresses, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			t.Fatal(err)
		}
		o.links = append(o.links, fmt.Sprint(l.Attrs().Name, l.Attrs().Flags, addresses))
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range routes {
		o.links = append(o.links, fmt.Sprint(r))
	}
	for _, ns := range []string{"mnt", "net", "pid", "ipc", "uts", "cgroup", "user"} {
		link, err := os.Readlink("/proc/thread-self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		o.namespaces += link + " "
	}
	hierarchies, err := cgroupMounts()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range hierarchies {
		entries, err := os.ReadDir(m)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if e.IsDir() && e.Name() != cgroupParent {
				o.cgroups = append(o.cgroups, filepath.Join(m, e.Name()))
			}
		}
	}
	ours, err := findCgroups(b.host.id)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range ours {
		o.ours = append(o.ours, "cgroup "+c)
	}
	holders, _ := filepath.Glob(filepath.Join(b.dir, networkDir, "*"))
	for _, h := range holders {
		var st unix.Stat_t
		if err := unix.Stat(h, &st); err != nil {
			t.Fatal(err)
		}
		o.netns = append(o.netns, fmt.Sprintf("net:[%d]", st.Ino))
	}
	if len(o.netns) > 0 {
		o.namespaces += fmt.Sprint(len(o.netns))
	}
	o.ours = append(o.ours, processesOf(t, b.dir, b.host.id, o.netns)...)
	return o
}

// processesOf lists processes that belong to a sandbox: by their arguments, their
// cgroup or their network.
func processesOf(t *testing.T, dir, id string, netns []string) []string {
	t.Helper()
	var found []string
	pids, err := processNumbers()
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		if pid == strconv.Itoa(os.Getpid()) {
			continue
		}
		if number, err := strconv.Atoi(pid); err != nil {
			t.Fatal(err)
		} else if _, running, err := startOf(number); err != nil || !running {
			continue // it has ended; this computer's first process may be slow to reap it
		}
		arguments, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		cgroup, _ := os.ReadFile("/proc/" + pid + "/cgroup")
		net, _ := os.Readlink("/proc/" + pid + "/ns/net")
		if bytes.Contains(arguments, []byte(dir)) || bytes.Contains(cgroup, []byte(id)) || slices.Contains(netns, net) {
			found = append(found, "process "+pid+" "+string(bytes.ReplaceAll(arguments, []byte{0}, []byte{' '})))
		}
	}
	return found
}

// volatileSysctls change all the time, or have side effects when read.
var volatileSysctls = []string{
	"fs/dentry-state", "fs/file-nr", "fs/inode-nr", "fs/inode-state", "fs/aio-nr", "fs/quota/", "fs/mqueue/",
	"kernel/random/", "kernel/pty/nr", "kernel/ns_last_pid", "kernel/perf_event_max_sample_rate", "kernel/sched_domain/",
	"net/netfilter/nf_conntrack_count", "net/ipv4/route/flush", "net/ipv6/route/flush", "vm/stat_refresh", "vm/compact_memory", "vm/drop_caches",
	"kernel/keys/", "kernel/hung_task_detect_count",
}

// compare reports every difference from the state before.
func (o observation) compare(t *testing.T, now observation) {
	t.Helper()
	for what, pair := range map[string][2]map[string]string{"sysctl": {o.sysctls, now.sysctls}, "file": {o.files, now.files}} {
		for name, before := range pair[0] {
			after, ok := pair[1][name]
			if !ok {
				t.Errorf("%s %s is gone", what, name)
			} else if after != before {
				t.Errorf("%s %s was %q and is %q", what, name, before, after)
			}
		}
		for name := range pair[1] {
			if _, ok := pair[0][name]; !ok {
				t.Errorf("%s %s is new", what, name)
			}
		}
	}
	for what, pair := range map[string][2][]string{
		"mounts": {o.mounts, now.mounts}, "cgroups": {o.cgroups, now.cgroups}, "network": {o.links, now.links},
		"leftovers": {o.ours, now.ours},
	} {
		if !slices.Equal(pair[0], pair[1]) {
			t.Errorf("%s were\n%s\nand are\n%s", what, strings.Join(pair[0], "\n"), strings.Join(pair[1], "\n"))
		}
	}
	if o.namespaces != now.namespaces {
		t.Errorf("namespaces were %s and are %s", o.namespaces, now.namespaces)
	}
}

// gone reports the processes that survive in the observed network namespaces.
func (o observation) gone(t *testing.T) {
	t.Helper()
	for _, p := range processesOf(t, o.host.dir, o.host.id, o.netns) {
		t.Errorf("%s lives on", p)
	}
}
