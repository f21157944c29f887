package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/sshhost/sshdtest"
	"constellation/internal/swtpm"
	"constellation/internal/testneeds"
)

// A new Debian in a virtual machine, with UEFI, a TPM, swap and a clock that is three hours ahead, is checked, mended,
// enrolled, restarted and given back. It has what machines of the sandbox share with their host: kernel, modules, clock, swap,
// firmware. No cluster is made: a control plane is too slow without hardware virtualization.
//
// QEMU emulates the processor, unless the variable is kvm. It takes ten minutes on a quiet computer, so it is opt-in:
//
//	CONSTELLATION_E2E_VM=1 CONSTELLATION_TEST_NETWORK=1 go test -timeout 90m -run TestFirstContactWithAVirtualMachine .
func TestFirstContactWithAVirtualMachine(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_VM", "ten minutes")
	testneeds.Root(t, "to install Debian in a folder")
	testneeds.Network(t, "to download Debian")
	v := newVM(t)
	begin := time.Now()
	took := func(what string) {
		t.Helper()
		t.Logf("%s: %s", what, time.Since(begin).Round(time.Second))
		begin = time.Now()
	}
	v.start()
	took("booted")
	if out := v.root("cat /sys/class/tpm/tpm0/tpm_version_major; stat -c %F /dev/tpmrm0; stat -c %F /sys/firmware/efi; systemd-detect-virt; swapon --noheadings --show=NAME"); !strings.HasPrefix(out, "2\ncharacter special file\ndirectory\n") || !strings.HasSuffix(out, "/dev/vdb\n") {
		t.Fatalf("TPM, firmware and swap of the machine: %s", out)
	}
	firmware := v.root("cd /sys/class/tpm/tpm0/pcr-sha256 && cat 0 2 7")
	if lines := strings.Fields(firmware); len(lines) != 3 || slices.ContainsFunc(lines, func(l string) bool { return strings.Trim(l, "0") == "" }) {
		t.Errorf("the firmware measured %q", lines)
	}

	// The first check finds what a new machine has, and --fix mends all of it but the clock.
	f := v.check(plan.ExitBlocked)
	f.want("block machine-clock", "2h5", "3h0m")
	f.want("block machine-swap", "/dev/vdb")
	f.want("block machine-sysctls", "net.ipv4.ip_forward is 0")
	f.want("warn machine-kernel-modules", "br_netfilter")
	f.lacks("machine-tpm", "machine-distribution", "machine-runtime", "machine-apparmor", "machine-ports", "machine-root")
	took("first check")
	f = v.check(plan.ExitBlocked, "--fix", "--yes")
	f.want("block machine-clock", "its time service", "ahead of")
	f.lacks("machine-swap", "machine-sysctls", "machine-kernel-modules")
	took("check with --fix")
	v.workspace()
	v.run("machine", "add", "--yes").want(plan.ExitBlocked)
	v.root(fmt.Sprintf("timedatectl set-ntp false; date -s @%d && hwclock --systohc --utc", time.Now().Unix()))
	before, etc := v.root(enrolledFiles), v.root(configurationFiles)
	f = v.check(plan.ExitDone)
	f.lacks("machine-swap", "machine-sysctls", "machine-kernel-modules")
	if clock := f.about("machine-clock"); !strings.HasPrefix(clock, "warn ") {
		t.Errorf("a clock that was set by hand: %q", clock)
	}
	took("clock set, checked again")

	// Enrolled, with its key in the TPM. Again, nothing changes.
	add := []string{"machine", "add", "--packages", v.packages, "--tpm-roots", v.vendor, "--label", "kind=vm", "--yes", "-o", "json"}
	a := v.run(add...).want(plan.ExitDone)
	took("enrolled")
	var added struct {
		Machines []struct{ Name, Address, Key, EK, Error string }
	}
	if err := json.Unmarshal([]byte(a.stdout), &added); err != nil || len(added.Machines) != 1 {
		t.Fatalf("machine add printed %s: %v", a.stdout, err)
	}
	row := v.row()
	for _, field := range []string{"name: " + vmName, `address: "` + vmAddress + `"`, "attested: true", `ek: "sha256:`, `vendor: "CN=swtpm-localca"`, `labels: "kind=vm"`} {
		if !strings.Contains(row, field) {
			t.Errorf("the row of the machine lacks %s: %s", field, row)
		}
	}
	if out := v.run("machine", "list").want(plan.ExitDone).stdout; !strings.Contains(out, vmName) || !strings.Contains(out, " TPM ") {
		t.Errorf("machine list:\n%s", out)
	}
	if out := v.root("systemctl is-active containerd constellation-bootstrapper constellation-agent"); out != "active\nactive\nactive\n" {
		t.Errorf("units are %q", out)
	}
	v.check(plan.ExitDone).want("warn machine-runtime", "containerd")

	// After a restart, settings and key are there.
	boot := v.root("cat /proc/sys/kernel/random/boot_id")
	begin = time.Now()
	v.restart(boot)
	took("restarted")
	if again := v.root("cd /sys/class/tpm/tpm0/pcr-sha256 && cat 0 2 7"); again != firmware {
		t.Errorf("the firmware measured\n%sand after the restart\n%s", firmware, again)
	}
	f = v.check(plan.ExitDone)
	f.lacks("machine-swap", "machine-sysctls", "machine-kernel-modules")
	f.want("warn machine-runtime", "containerd")
	if out := v.root("systemctl is-active containerd constellation-bootstrapper constellation-agent; swapon --noheadings --show=NAME; lsmod | grep -c ^br_netfilter; sysctl -n net.ipv4.ip_forward net.bridge.bridge-nf-call-iptables"); out != "active\nactive\nactive\n1\n1\n1\n" {
		t.Errorf("after the restart, units and settings are %q", out)
	}
	took("checked after the restart")
	v.run(add...).want(plan.ExitDone)
	if is := v.row(); is != row {
		t.Errorf("the row was\n%sand is\n%s", row, is)
	}
	took("enrolled again")

	// Given back as it was.
	v.run("machine", "remove", vmName, "--yes").want(plan.ExitDone)
	took("given back")
	for _, x := range []struct{ was, is string }{{before, v.root(enrolledFiles)}, {etc, v.root(configurationFiles)}} {
		was, is := strings.Split(x.was, "\n"), strings.Split(x.is, "\n")
		for _, line := range is {
			if !slices.Contains(was, line) {
				t.Errorf("left on the machine: %s", line)
			}
		}
		for _, line := range was {
			if !slices.Contains(is, line) {
				t.Errorf("missing on the machine: %s", line)
			}
		}
	}
	if out := v.run("machine", "list").want(plan.ExitDone).stdout; strings.Contains(out, vmName) {
		t.Errorf("machine list:\n%s", out)
	}
	f = v.check(plan.ExitDone)
	f.lacks("machine-runtime", "machine-enrolled", "machine-claimed", "machine-swap")
}

// Name and address of the virtual machine.
const (
	vmName    = "vm-0"
	vmAddress = "10.0.2.15"
)

// configurationFiles lists the files of /etc with their digests. Clock and programs of the machine write the others.
const configurationFiles = `cd /etc && find . -type f -not -name adjtime -not -path './apparmor.d/cache*' -not -name ld.so.cache -not -name '*-' | sort | xargs sha256sum`

// vm is a virtual machine of QEMU and the console of its owner, whose logins have --sudo.
type vm struct {
	*cloud
	accel    string
	files    string // firmware variables, disks
	packages string // Debian packages that an enrolment installs
	vendor   string // certificates of the vendor of the TPM
	login    string
	key      string // file of the private key
	known    string // known_hosts
	port     int
	tpm      string // control socket
}

// newVM installs Debian on a new disk.
func newVM(t *testing.T) *vm {
	t.Helper()
	for name, pkg := range map[string]string{"qemu-system-x86_64": "qemu-system-x86", "debootstrap": "debootstrap", "mkfs.ext4": "e2fsprogs", "mkswap": "util-linux", "unshare": "util-linux"} {
		testneeds.Program(t, name, pkg)
	}
	const code, vars = "/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"
	testneeds.File(t, code, "ovmf")
	testneeds.File(t, vars, "ovmf")
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	v := &vm{
		cloud: &cloud{t: t, bin: filepath.Join(wd, "bin"), dir: t.TempDir(), env: []string{"HOME=" + home, "SSH_AUTH_SOCK="}},
		accel: "tcg,thread=multi", files: t.TempDir(), port: freePort(t),
	}
	if os.Getenv("CONSTELLATION_E2E_VM") == "kvm" {
		v.accel = "kvm"
	}
	if _, err := os.Stat(filepath.Join(v.bin, "constellation")); err != nil {
		t.Fatal("bin/constellation is missing: run `make build` first")
	}
	v.tpm, v.vendor = swtpm.StartForQEMU(t)
	stock := stockDebian(t)
	v.packages = filepath.Join(stock, "packages")
	v.login = fmt.Sprintf("admin@127.0.0.1:%d", v.port)
	key, host := sshdtest.NewKey(t), sshdtest.NewKey(t)
	v.key, v.known = filepath.Join(home, ".ssh", "id_ed25519"), filepath.Join(home, ".ssh", "known_hosts")
	put := func(path string, mode os.FileMode, text string) {
		t.Helper()
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = os.WriteFile(path, []byte(text), mode)
		}
		if err == nil {
			err = os.Chmod(path, mode)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	put(v.key, 0o600, sshdtest.Private(t, key))
	put(v.known, 0o600, fmt.Sprintf("[127.0.0.1]:%d %s", v.port, sshdtest.Authorized(t, host)))

	// The settings of its owner.
	tree, esp := filepath.Join(v.files, "tree"), filepath.Join(v.files, "esp")
	v.shell(`cp -a "$1/tree" "$2" && cp -a "$1/esp" "$3" && cp "$4" vars.fd && : >"$2/etc/machine-id" && rm -f "$2"/etc/ssh/ssh_host_*`, stock, tree, esp, vars)
	put(filepath.Join(tree, "etc/hostname"), 0o644, vmName+"\n")
	put(filepath.Join(tree, "etc/hosts"), 0o644, "127.0.0.1 localhost\n127.0.1.1 "+vmName+"\n")
	put(filepath.Join(tree, "etc/resolv.conf"), 0o644, "nameserver 10.0.2.3\n")
	put(filepath.Join(esp, "loader/entries/debian.conf"), 0o644, "title Debian\nlinux /vmlinuz\ninitrd /initrd\noptions root=/dev/vda rw console=ttyS0 quiet systemd.default_timeout_start_sec=1h systemd.service_watchdogs=no\n") // an emulated machine can be slow
	put(filepath.Join(tree, "etc/fstab"), 0o644, "/dev/vda / ext4 defaults 0 1\n/dev/vdb none swap sw,x-systemd.device-timeout=1h 0 0\n")
	put(filepath.Join(tree, "etc/systemd/network/lan.network"), 0o644, "[Match]\nName=en*\n[Network]\nAddress="+vmAddress+"/24\nGateway=10.0.2.2\n")
	put(filepath.Join(tree, "etc/sudoers.d/admin"), 0o440, "admin ALL=(ALL) NOPASSWD: ALL\n")
	put(filepath.Join(tree, "etc/ssh/ssh_host_ed25519_key"), 0o600, sshdtest.Private(t, host))
	put(filepath.Join(tree, "home/admin/.ssh/authorized_keys"), 0o600, sshdtest.Authorized(t, key))
	v.shell(`chroot tree sh -ec 'useradd --shell /bin/bash admin && chown -R admin: /home/admin && systemctl -q enable systemd-networkd ssh' >&2
mkfs.ext4 -q -d tree root.img 6G && rm -r tree && truncate -s 64M swap.img && mkswap -q swap.img`)
	return v
}

// stockDebian installs Debian 12 in a folder of the cache and returns that: tree is the system, esp the content of its
// EFI system partition, packages has what an enrolment installs.
func stockDebian(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	// Nothing is started in the tree, so that no package changes settings of this computer's kernel.
	script := `umask 022
cd "$1"
debootstrap --variant=minbase "$2" tree
printf '#!/bin/sh\nexit 101\n' >tree/usr/sbin/policy-rc.d
chmod 755 . tree/usr/sbin/policy-rc.d
mount --bind tree tree
mount -t proc -o ro proc tree/proc
export DEBIAN_FRONTEND=noninteractive
chroot tree apt-get -qy --no-install-recommends install systemd-sysv systemd-timesyncd dbus udev kmod initramfs-tools linux-image-cloud-amd64 systemd-boot-efi openssh-server sudo iproute2 procps apparmor ca-certificates tpm-udev
chroot tree apt-get clean
chroot tree apt-get -qy --no-install-recommends --download-only install containerd runc containernetworking-plugins
mkdir -p packages esp/EFI/BOOT esp/loader/entries
mv tree/var/cache/apt/archives/*.deb packages/
rm tree/usr/sbin/policy-rc.d
cp tree/usr/lib/systemd/boot/efi/systemd-bootx64.efi esp/EFI/BOOT/BOOTX64.EFI
cp tree/boot/vmlinuz-* esp/vmlinuz
cp tree/boot/initrd.img-* esp/initrd
echo 'timeout 0' >esp/loader/loader.conf`
	dir := filepath.Join(cache, "constellation", "stock-debian", fmt.Sprintf("%s-%.16x", debian12, sha256.Sum256([]byte(script))))
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	fresh, err := os.MkdirTemp(filepath.Dir(dir), ".new-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(fresh) })
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-exc", script, "-", fresh, debian12)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("install Debian: %v\n%s", err, tail(string(out)))
	}
	if err := os.Rename(fresh, dir); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	return dir
}

// freePort returns a port of loopback that nothing listens at.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// shell runs commands in the folder of the machine's files.
func (v *vm) shell(script string, args ...string) {
	v.t.Helper()
	cmd := exec.CommandContext(v.t.Context(), "bash", append([]string{"-ec", script, "-"}, args...)...)
	cmd.Dir = v.files
	cmd.Env = append(os.Environ(), "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	if out, err := cmd.CombinedOutput(); err != nil {
		v.t.Fatalf("%s: %v\n%s", script, err, tail(string(out)))
	}
}

// start switches the machine on until the test ends, and waits for its sshd. It reaches no network but 127.0.0.1, from
// which port leads to its sshd.
func (v *vm) start() {
	v.t.Helper()
	console := filepath.Join(v.files, "console.log")
	cmd := exec.CommandContext(v.t.Context(), "qemu-system-x86_64", "-accel", v.accel, "-machine", "q35,smm=off", "-cpu", "max", "-m", "1024", "-smp", "1", "-nodefaults", "-display", "none",
		"-rtc", "base="+time.Now().UTC().Add(3*time.Hour).Format("2006-01-02T15:04:05"),
		"-drive", "if=pflash,format=raw,readonly=on,file=/usr/share/OVMF/OVMF_CODE_4M.fd", "-drive", "if=pflash,format=raw,file=vars.fd",
		"-drive", "if=none,id=root,format=raw,file=root.img", "-device", "virtio-blk-pci,drive=root",
		"-drive", "if=none,id=swap,format=raw,file=swap.img", "-device", "virtio-blk-pci,drive=swap",
		"-drive", "if=none,id=esp,format=raw,readonly=on,file=fat:esp", "-device", "virtio-blk-pci,drive=esp,bootindex=1",
		"-chardev", "socket,id=tpm,path="+v.tpm, "-tpmdev", "emulator,id=tpm,chardev=tpm", "-device", "tpm-crb,tpmdev=tpm",
		"-netdev", fmt.Sprintf("user,id=lan,restrict=on,hostfwd=tcp:127.0.0.1:%d-:22", v.port), "-device", "virtio-net-pci,netdev=lan", "-serial", "file:"+console)
	cmd.Dir = v.files
	var errs strings.Builder
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		v.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	v.t.Cleanup(func() {
		<-ended
		if b, err := os.ReadFile(console); v.t.Failed() && err == nil {
			v.t.Logf("console:\n%s\n%s", tail(string(b)), errs.String())
		}
	})
	v.await("", ended)
}

// await waits until the machine has another boot ID.
func (v *vm) await(boot string, ended <-chan struct{}) {
	v.t.Helper()
	for deadline := time.Now().Add(40 * time.Minute); ; pause(v.t.Context(), time.Second) {
		out, err := v.tryRoot("cat /proc/sys/kernel/random/boot_id; systemctl is-system-running --wait >/dev/null")
		if id, _, _ := strings.Cut(out, "\n"); err == nil && id+"\n" != boot {
			return
		}
		select {
		case <-ended:
			v.t.Fatal("QEMU ended")
		default:
		}
		if time.Now().After(deadline) {
			v.t.Fatalf("the machine did not boot: %v", err)
		}
	}
}

// restart restarts the machine, which had this boot ID.
func (v *vm) restart(boot string) {
	v.t.Helper()
	_, _ = v.tryRoot("systemctl reboot") // the connection ends
	v.await(boot, nil)
}

// root runs a script on the machine as root and returns its stdout.
func (v *vm) root(script string) string {
	v.t.Helper()
	out, err := v.tryRoot(script)
	if err != nil {
		v.t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return out
}

func (v *vm) tryRoot(script string) (string, error) {
	ctx, cancel := context.WithTimeout(v.t.Context(), 10*time.Minute)
	defer cancel()
	target, err := sshhost.ParseTarget(v.login)
	if err != nil {
		return "", err
	}
	target.Sudo, target.KeyFile = true, v.key
	h, err := sshhost.Dial(ctx, sshhost.Options{Target: target, KnownHosts: []string{v.known}, Timeout: vmTimeout})
	if err != nil {
		return "", err
	}
	defer h.Close()
	r, err := h.Run(ctx, sshhost.Command{Argv: []string{"sh", "-c", script}, Root: true})
	return string(r.Stdout), err
}

// vmTimeout is the limit of each connection: an emulated processor is slow.
const vmTimeout = 3 * time.Minute

// run runs a verb of the console against the machine.
func (v *vm) run(args ...string) *result {
	v.t.Helper()
	if !slices.Contains(args, "list") {
		args = append(args, "--ssh", v.login, "--sudo", "--timeout", vmTimeout.String())
	}
	return v.cloud.run(30*time.Minute, args...)
}

// workspace makes an empty workspace.
func (v *vm) workspace() {
	v.t.Helper()
	v.cloud.run(time.Minute, "config", "generate", "machines").want(plan.ExitDone)
	v.edit("endpoint: api.example.com", "endpoint: "+vmAddress)
}

// row returns the row of the machine in the configuration.
func (v *vm) row() string {
	v.t.Helper()
	b, err := os.ReadFile(filepath.Join(v.dir, "constellation-conf.yaml"))
	if err != nil {
		v.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, "name: "+vmName) {
			return line
		}
	}
	v.t.Fatalf("the configuration has no row of %s:\n%s", vmName, b)
	return ""
}

// vmFindings are the findings of a check.
type vmFindings struct {
	t   *testing.T
	all []string // SEVERITY ID: TITLE, OBJECTS, REMEDY
}

// check runs machine check.
func (v *vm) check(code int, more ...string) vmFindings {
	v.t.Helper()
	r := v.run(append([]string{"machine", "check", "-o", "json"}, more...)...).want(code)
	var doc struct {
		Machines []struct{ Findings []plan.Finding }
	}
	if err := json.Unmarshal([]byte(r.stdout), &doc); err != nil || len(doc.Machines) != 1 {
		v.t.Fatalf("machine check printed %s: %v", r.stdout, err)
	}
	f := vmFindings{t: v.t}
	for _, x := range doc.Machines[0].Findings {
		f.all = append(f.all, fmt.Sprintf("%s %s: %s %q %s", x.Severity, x.ID, x.Title, x.Objects, x.Remedy))
	}
	v.t.Logf("findings:\n%s", strings.Join(f.all, "\n"))
	return f
}

// want checks that there is one finding that begins with head and has one of the texts.
func (f vmFindings) want(head string, texts ...string) {
	f.t.Helper()
	for _, x := range f.all {
		if strings.HasPrefix(x, head+":") && (len(texts) == 0 || slices.ContainsFunc(texts, func(s string) bool { return strings.Contains(x, s) })) {
			return
		}
	}
	f.t.Errorf("no finding %s with one of %q", head, texts)
}

// about returns the finding with this ID; empty if there is none.
func (f vmFindings) about(id string) string {
	for _, x := range f.all {
		if strings.Contains(x, " "+id+": ") {
			return x
		}
	}
	return ""
}

// lacks checks that there are no findings with these IDs.
func (f vmFindings) lacks(ids ...string) {
	f.t.Helper()
	for _, id := range ids {
		if x := f.about(id); x != "" {
			f.t.Errorf("finding %s", x)
		}
	}
}
