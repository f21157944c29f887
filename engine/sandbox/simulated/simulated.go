// Package simulated runs simulated machines: processes of an ordinary user that behave like
// machines of a cluster. They need no root, no network and no kernel features, so
// that every user can run a sandbox. Simulated parts say so in their names.
//
// A machine is a process of this program, with its own loopback address and a
// directory as its disk. It runs:
//
//   - The real bootstrapper, agent, join service and operator, and, on control planes,
//     the real certifier, key service, etcd, API server, controller manager and scheduler, as plain processes.
//   - A stand-in for the kubelet: bootstraps its credentials, registers the Node, renews
//     its Lease, runs static pods and the pods of our charts as processes, with their
//     environment, volumes and ServiceAccount tokens, and reports all others as Running.
//   - A stand-in for kubeadm: init and upgrade with the certificate, kubeconfig,
//     manifest, upload and token phases of the real one; join with a bootstrap token,
//     discovery by the CA's hash, and a further member of etcd.
//   - A stand-in for systemd, which supports only the kubelet, and a simulated TPM.
//
// Package sandbox drives a [Host], which has the contract of [machine.Host]; [Run] is
// the process of a machine. A machine isolates nothing: its processes have all permissions of
// their user. Images are not pulled, pods have no network of their own, Services are not
// reachable by their addresses, and the reported kernel, memory and disk of a machine are
// not measured.
//
// The stand-ins replace a machine's network namespace by
// rewriting the arguments of processes: 127.0.0.1 becomes the machine's own address, and
// mount paths of a pod become paths in the machine's directory.
package simulated

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine/release"
	"constellation/engine/sandbox/machine"
)

// MetadataPort is the port of the cloud's metadata server, at the machine's own address.
// The address identifies the machine.
const MetadataPort = 8081

// Nodes returns the range of the machines' loopback addresses that a sandbox tries first. One other
// name in 16,000 has the same.
func Nodes(sandbox string) netip.Prefix {
	d := sha256.Sum256([]byte(sandbox))
	return nodesAt(int(d[0]%64)*256 + int(d[1]))
}

// Ranges returns all ranges that a sandbox can have, in the order in which it tries them.
func Ranges(sandbox string) iter.Seq[netip.Prefix] {
	first := Nodes(sandbox).Addr().As4()
	return func(yield func(netip.Prefix) bool) {
		for n := range ranges {
			if !yield(nodesAt((int(first[1]-64)*256 + int(first[2]) + n) % ranges)) {
				return
			}
		}
	}
}

// ranges is the number of ranges that sandboxes can have.
const ranges = 64 * 256

func nodesAt(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{127, 64 + byte(n/256), byte(n), 0}), 24)
}

// Gateway is the address of the cloud and its load balancer in Nodes.
func Gateway(nodes netip.Prefix) netip.Addr { return nodes.Addr().Next() }

// alias is an address of a machine for kubeadm and the API server, because
// they refuse loopback addresses. Nothing listens there.
func alias(ip netip.Addr) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 42, 0, ip.As4()[3]})
}

// Check returns the reason why this computer cannot run simulated machines; nil if it can.
func Check(nodes netip.Prefix) error {
	l, err := net.Listen("tcp", net.JoinHostPort(Gateway(nodes).String(), "0")) //nolint:noctx // loopback
	if err != nil {
		err = fmt.Errorf("machines have addresses of loopback of their own, such as %s, and this computer has none: %w", Gateway(nodes), err)
		if runtime.GOOS == "darwin" {
			a := nodes.Addr().As4() // the cloud's and those of 39 machines
			err = fmt.Errorf("%w; an administrator adds them by `for n in $(seq 40); do sudo ifconfig lo0 alias %d.%d.%d.$n; done`", err, a[0], a[1], a[2])
		}
		return err
	}
	return l.Close()
}

// Files in the directory of a machine.
const (
	recordName  = "machine.json"
	lockName    = "lock"
	pidName     = "pid"
	consoleName = "console.log"
	controlName = "ctl.sock"
	tpmDir      = "tpm"
	tpmSocket   = "tpm.sock"
	rootDir     = "root"
	agentDir    = "agent"
	// certifierDir is short, because the path of the socket in it must be.
	certifierDir    = "c"
	certifierSocket = "certifier.sock"
	// kmsDir and kmsKeysDir are those of the key service, as short.
	kmsDir     = "k"
	kmsKeysDir = "kk"
	// emptyDirs has a short path for each volume of a pod that begins empty, since there can be sockets in it.
	emptyDirs  = "e"
	bootIDFile = "proc/sys/kernel/random/boot_id"
	binDir     = "bin"
	podsDir    = "pods"

	machinesDir = "m" // short, because paths of sockets must be
	servicesDir = "services"
	standInsDir = "stand-ins"
	imagesDir   = "images"
	// releaseKeysName is the file of an image with the release keys.
	releaseKeysName = "release-keys.pem"
)

// Environment variables of all processes of a machine. The first also identifies them
// as such.
const (
	machineEnv = "CONSTELLATION_SIMULATED_MACHINE" // the directory
	programEnv = "CONSTELLATION_SIMULATED_PROGRAM" // this program
)

// record is the stored record of a machine.
type record struct {
	machine.Machine
	Sandbox    string       `json:"sandbox"`
	ProviderID string       `json:"providerID"`
	Nodes      netip.Prefix `json:"nodes"`
	// Cache is the directory of Kubernetes' binaries, Dir the sandbox's directory.
	Cache string `json:"cache"`
	Dir   string `json:"dir"`
	// Made means that its disk is complete.
	Made bool `json:"made"`
}

// Host runs the simulated machines in a directory. Its methods are those of
// [machine.Host] and may be called concurrently for different machines.
type Host struct {
	dir, sandbox, cache string
	log                 *slog.Logger
	lock                *os.File
}

// NewHost returns the host of the machines in dir, the directory of a sandbox. cache is
// package build's cache. NewHost changes nothing.
func NewHost(dir, sandbox, cache string, log *slog.Logger) *Host {
	return &Host{dir: dir, sandbox: sandbox, cache: cache, log: log}
}

// path returns a path in the directory of a machine, or of all machines.
func (h *Host) path(elem ...string) string {
	if len(elem) > 0 {
		elem = append([]string{machine.DirOf(elem[0])}, elem[1:]...)
	}
	return filepath.Join(append([]string{h.dir, machinesDir}, elem...)...)
}

// Network takes the lock on the machines. The error wraps [machine.ErrBusy].
func (h *Host) Network(context.Context) error {
	if err := os.MkdirAll(h.path(), 0o700); err != nil {
		return fmt.Errorf("drive simulated machines: %w", err)
	}
	f, held, err := tryLock(filepath.Join(h.dir, "machines.lock"))
	if err != nil {
		return fmt.Errorf("drive simulated machines: %w", err)
	}
	if held {
		return machine.ErrBusy
	}
	h.lock = f
	return nil
}

// Close releases the lock. Machines keep running.
func (h *Host) Close() error { return h.lock.Close() }

// Found reports whether there are simulated machines in dir, the directory of a sandbox,
// or remains of them.
func Found(dir string) bool {
	for _, name := range []string{machinesDir, imagesDir} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			return true
		}
	}
	return false
}

// LimitMemory does nothing: processes of a user have no common limit.
func (h *Host) LimitMemory(int64) {}

// Listen listens at an address of loopback.
func (h *Host) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	var lc net.ListenConfig
	return lc.Listen(ctx, network, address)
}

// Dial connects to an address of loopback.
func (h *Host) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, address)
}

// DialFrom connects to a loopback address, from that of a machine.
func (h *Host) DialFrom(ctx context.Context, name, network, address string) (net.Conn, error) {
	r, err := readRecord(h.path(name))
	if err != nil {
		return nil, fmt.Errorf("dial %s from machine %s: %w", address, name, err)
	}
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(r.IP, 0))}
	return d.DialContext(ctx, network, address)
}

// tryLock locks a file for this process, or reports that another process holds it.
func tryLock(path string) (f *os.File, held bool, err error) {
	f, err = os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, false, err
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err == nil {
		return f, false, nil
	}
	f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, true, nil
	}
	return nil, false, err
}

// running reports whether the process of the machine in dir is alive: it holds an exclusive
// lock, which ends with the process.
func running(dir string) (bool, error) {
	if _, err := os.Lstat(filepath.Join(dir, lockName)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return false, err
	}
	f, held, err := tryLock(filepath.Join(dir, lockName))
	if f != nil {
		f.Close()
	}
	return held, err
}

func readRecord(dir string) (record, error) {
	var r record
	b, err := os.ReadFile(filepath.Join(dir, recordName))
	if errors.Is(err, fs.ErrNotExist) {
		return r, machine.ErrNotFound
	}
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	return r, err
}

func (r record) write(dir string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(filepath.Join(dir, recordName), b, 0o600)
}

// Machine returns the state of one machine. The error wraps [machine.ErrNotFound].
func (h *Host) Machine(name string) (machine.Machine, error) {
	r, err := readRecord(h.path(name))
	if err != nil {
		return machine.Machine{}, fmt.Errorf("look at machine %s: %w", name, err)
	}
	m := r.Machine
	on, err := running(h.path(name))
	switch {
	case err != nil:
		return machine.Machine{}, fmt.Errorf("look at machine %s: %w", name, err)
	case !r.Made:
		m.Power = machine.Creating
	case on:
		m.Power, m.TPM = machine.Running, "unix:"+h.path(name, tpmDir, tpmSocket)
		_ = readPID(h.path(name), &m.PID)
	default:
		m.Power = machine.Off
	}
	return m, nil
}

func readPID(dir string, pid *int) error {
	b, err := os.ReadFile(filepath.Join(dir, pidName))
	if err != nil {
		return err
	}
	_, err = fmt.Sscan(string(b), pid)
	return err
}

// Console returns the path of the output of the machine's processes.
func (h *Host) Console(name string) string { return h.path(name, consoleName) }

// Start makes a machine and switches it on. The error wraps [machine.ErrExists].
func (h *Host) Start(ctx context.Context, spec machine.Spec, firmware machine.Firmware) error {
	dir := h.path(spec.Name)
	fail := func(err error) error { return fmt.Errorf("start simulated machine %s: %w", spec.Name, err) }
	if err := os.Mkdir(dir, 0o700); err != nil {
		if errors.Is(err, fs.ErrExist) {
			err = machine.ErrExists
		}
		return fail(err)
	}
	r := record{
		Machine: machine.Machine{Name: spec.Name, IP: spec.IP, PodCIDR: spec.PodCIDR, Image: *spec.Image, Created: time.Now().UTC()},
		Sandbox: h.sandbox, ProviderID: "sandbox://" + h.sandbox + "/" + spec.Name,
		Nodes: netip.PrefixFrom(spec.IP, 24).Masked(), Cache: h.cache, Dir: h.dir,
	}
	if err := r.write(dir); err != nil {
		return fail(err)
	}
	if err := furnish(dir, r, spec); err != nil {
		return fail(err)
	}
	r.Made = true
	if err := r.write(dir); err != nil {
		return fail(err)
	}
	return h.powerOn(ctx, r, firmware)
}

// furnish writes the disk of a new machine.
func furnish(dir string, r record, spec machine.Spec) error {
	files := map[string]machine.File{
		"/etc/hostname":                     {Data: []byte(r.Name + "\n")},
		"/etc/os-release":                   {Data: fmt.Appendf(nil, "NAME=%q\nIMAGE_VERSION=%s\n", "Constellation on a simulated machine", r.Image.Version)},
		"/usr/lib/constellation/peers.json": {},
	}
	var err error
	if files["/usr/lib/constellation/peers.json"], err = readFile(filepath.Join(r.Image.Dir, "peers.json")); err != nil {
		return err
	}
	switch keys, err := readFile(filepath.Join(r.Image.Dir, releaseKeysName)); {
	case err == nil:
		files["/"+release.MachineKeys] = keys
	case !errors.Is(err, fs.ErrNotExist): // images of older programs have none
		return err
	}
	for name, f := range spec.Files {
		files[name] = f
	}
	for name, f := range files {
		mode := f.Mode
		if mode == 0 {
			mode = 0o644
		}
		if err := writeBelow(filepath.Join(dir, rootDir), name, f.Data, mode); err != nil {
			return err
		}
	}
	for _, d := range []string{rootDir + "/usr/local/bin", rootDir + "/var/lib/kubelet", rootDir + "/var/log/pods", rootDir + "/tmp", rootDir + "/run", agentDir, certifierDir, kmsDir, kmsKeysDir, tpmDir, podsDir} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return err
		}
	}
	// It supports only the calls of the bootstrapper and the agent.
	return writeBelow(filepath.Join(dir, binDir), "systemctl", []byte("#!/bin/sh\n# systemd stand-in (simulated): knows the kubelet alone.\nexec \"$"+programEnv+"\" sandbox stand-in systemctl \"$@\"\n"), 0o755)
}

func readFile(path string) (machine.File, error) {
	b, err := os.ReadFile(path)
	return machine.File{Data: b}, err
}

func writeBelow(root, name string, data []byte, mode fs.FileMode) error {
	path := filepath.Join(root, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return replaceFile(path, data, mode)
}

// powerOn starts a machine's process, has its TPM measured, and opens its gate.
func (h *Host) powerOn(ctx context.Context, r record, firmware machine.Firmware) (err error) {
	dir := h.path(r.Name)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("switch simulated machine %s on: %w", r.Name, err), h.powerOff(context.WithoutCancel(ctx), r.Name))
		}
	}()
	events := Measure(r.Image)
	socket := filepath.Join(dir, tpmDir, tpmSocket)
	longest := max(len(socket)+len(".lock"), len(filepath.Join(dir, certifierDir, certifierSocket))+len(".new"))
	if longest > socketPathMax {
		return fmt.Errorf("the path %s is too long for a socket; choose a shorter directory by XDG_STATE_HOME", socket)
	}
	log := filepath.Join(dir, tpmDir, machine.EventLogName)
	for _, old := range []string{socket, log, filepath.Join(dir, controlName), filepath.Join(dir, pidName)} {
		if err := os.Remove(old); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	first := r.Boots == 0
	r.Boots++
	r.Booted = time.Now().UTC()
	if err := r.write(dir); err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	console, err := os.OpenFile(h.Console(r.Name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer console.Close()
	gate, pass, err := os.Pipe()
	if err != nil {
		return err
	}
	defer pass.Close()
	cmd := exec.Command(exe, "sandbox", "stand-in", "machine", dir) //nolint:noctx // it outlives this call
	cmd.Stdin, cmd.Stdout, cmd.Stderr = gate, console, console
	cmd.Dir = "/"
	cmd.Env = environment(dir, exe)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	gate.Close()
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	if err := poll(ctx, func() (bool, error) {
		select {
		case err := <-ended:
			if err == nil {
				err = errors.New("without an error")
			}
			return false, fmt.Errorf("it ended at once (%w); see its console: %s", err, h.Console(r.Name))
		default:
		}
		c, err := net.Dial("unix", socket) //nolint:noctx // local, and at once
		if err != nil {
			return false, nil //nolint:nilerr // not yet
		}
		c.Close()
		return true, nil
	}); err != nil {
		return err
	}
	if firmware != nil {
		if err := firmware(ctx, machine.PowerOn{Machine: r.Name, TPM: "unix:" + socket, EventLog: log, Events: events, First: first}); err != nil {
			return err
		}
	}
	_, err = pass.Write([]byte{1})
	return err
}

// socketPathMax is the maximum length of the path of a unix socket, on Linux and macOS.
const socketPathMax = 103

// environment is the whole environment of processes of a machine.
func environment(dir, exe string) []string {
	env := []string{
		machineEnv + "=" + dir, programEnv + "=" + exe,
		"PATH=" + filepath.Join(dir, binDir) + ":/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
		"HOME=" + filepath.Join(dir, rootDir), "TMPDIR=" + filepath.Join(dir, rootDir, "tmp"), "LANG=C.UTF-8",
	}
	return env
}

// Boot switches on a machine that is off.
func (h *Host) Boot(ctx context.Context, name string, firmware machine.Firmware) error {
	r, err := readRecord(h.path(name))
	if err != nil {
		return fmt.Errorf("boot simulated machine %s: %w", name, err)
	}
	// The remains of a crashed machine would block the start.
	if err := h.powerOff(ctx, name); err != nil {
		return err
	}
	return h.powerOn(ctx, r, firmware)
}

// Reboot ends all processes of a machine gracefully, and switches it on again.
func (h *Host) Reboot(ctx context.Context, name string, firmware machine.Firmware) error {
	var pid int
	if on, err := running(h.path(name)); err == nil && on && readPID(h.path(name), &pid) == nil {
		_ = syscall.Kill(pid, syscall.SIGTERM)
		grace, cancel := context.WithTimeout(ctx, stopGrace+5*time.Second)
		defer cancel()
		_ = h.off(grace, name) // otherwise it is killed
	}
	return h.Boot(ctx, name, firmware)
}

func (h *Host) off(ctx context.Context, name string) error {
	return poll(ctx, func() (bool, error) {
		on, err := running(h.path(name))
		return !on, err
	})
}

// Kill cuts the power. The error wraps [machine.ErrNotFound].
func (h *Host) Kill(ctx context.Context, name string) error {
	if _, err := readRecord(h.path(name)); err != nil {
		return fmt.Errorf("kill simulated machine %s: %w", name, err)
	}
	return h.powerOff(ctx, name)
}

// powerOff kills all processes of a machine and returns when they are gone.
func (h *Host) powerOff(ctx context.Context, name string) error {
	dir := h.path(name)
	var pid int
	if on, err := running(dir); err != nil {
		return err
	} else if on {
		// It writes its number after it has taken the lock.
		if err := poll(ctx, func() (bool, error) {
			if readPID(dir, &pid) == nil {
				return true, nil
			}
			on, err := running(dir)
			return !on, err
		}); err != nil {
			return err
		}
	}
	if err := killAll(ctx, dir, pid); err != nil {
		return fmt.Errorf("switch simulated machine %s off: %w", name, err)
	}
	if err := h.off(ctx, name); err != nil {
		return fmt.Errorf("switch simulated machine %s off: %w", name, err)
	}
	return nil
}

// Remove switches a machine off and removes its directory.
func (h *Host) Remove(ctx context.Context, name string) error {
	if _, err := os.Lstat(h.path(name)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove simulated machine %s: %w", name, machine.ErrNotFound)
	}
	if err := h.powerOff(ctx, name); err != nil {
		return err
	}
	root, err := os.OpenRoot(h.path())
	if err != nil {
		return fmt.Errorf("remove simulated machine %s: %w", name, err)
	}
	defer root.Close()
	if err := root.RemoveAll(machine.DirOf(name)); err != nil {
		return fmt.Errorf("remove simulated machine %s: %w", name, err)
	}
	return nil
}

// WaitReady waits until the machine's programs have started. The error wraps
// [machine.ErrNotRunning] if the machine goes off meanwhile.
func (h *Host) WaitReady(ctx context.Context, name string) error {
	return poll(ctx, func() (bool, error) {
		if on, err := running(h.path(name)); err != nil || !on {
			return false, errors.Join(err, fmt.Errorf("wait for simulated machine %s: %w", name, machine.ErrNotRunning))
		}
		c, err := net.Dial("unix", h.path(name, controlName)) //nolint:noctx // local, and at once
		if err != nil {
			return false, nil //nolint:nilerr // not yet
		}
		c.Close()
		return true, nil
	})
}

// Wait waits until the machine is off.
func (h *Host) Wait(ctx context.Context, name string) error { return h.off(ctx, name) }

// Exec runs a command with the environment of a machine, in its directory, as this user.
func (h *Host) Exec(ctx context.Context, name string, command []string, stdio machine.Stdio) (int, error) {
	dir := h.path(name)
	if _, err := readRecord(dir); err != nil {
		return 0, fmt.Errorf("run a command in machine %s: %w", name, err)
	}
	if on, err := running(dir); err != nil || !on {
		return 0, errors.Join(err, fmt.Errorf("run a command in machine %s: %w", name, machine.ErrNotRunning))
	}
	exe, err := os.Executable()
	if err != nil {
		return 0, fmt.Errorf("run a command in machine %s: %w", name, err)
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Dir = filepath.Join(dir, rootDir)
	cmd.Env = append(environment(dir, exe), "TERM="+os.Getenv("TERM"), "PS1=simulated "+name+" # ")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdio.In, stdio.Out, stdio.Err
	if stdio.TTY {
		cmd.Stderr = stdio.Out
	}
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	if err != nil {
		return 0, fmt.Errorf("run a command in machine %s: %w", name, err)
	}
	return 0, nil
}

// Sweep ends all processes of a crashed or finished sandbox.
func (h *Host) Sweep(ctx context.Context) error {
	entries, err := os.ReadDir(h.path())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("sweep simulated machines: %w", err)
	}
	for _, e := range entries {
		if err := h.powerOff(ctx, e.Name()); err != nil {
			return err
		}
	}
	return nil
}

// Image makes the OS image of a release: its programs, copied to dir, the directory of a
// sandbox, so that a rebuild changes no machine. peers is the content of peers.json, keys
// that of release-keys.pem.
func Image(dir, version string, programs map[string]string, peers, keys []byte) (machine.Image, error) {
	img := machine.Image{Version: version, Dir: filepath.Join(dir, imagesDir, version)}
	if err := os.MkdirAll(img.Dir, 0o755); err != nil {
		return img, err
	}
	for name, from := range programs {
		if err := copyFile(from, filepath.Join(img.Dir, name)); err != nil {
			return img, err
		}
	}
	if err := replaceFile(filepath.Join(img.Dir, "peers.json"), peers, 0o644); err != nil {
		return img, err
	}
	if err := replaceFile(filepath.Join(img.Dir, releaseKeysName), keys, 0o644); err != nil {
		return img, err
	}
	img.Events = Measure(img)
	return img, nil
}

// Service copies the program of an image of ours to where machines find it, and returns
// its path.
func Service(dir, name, version, from string) (string, error) {
	to := servicePath(dir, name, version)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return "", err
	}
	return to, copyFile(from, to)
}

func servicePath(dir, name, version string) string {
	return filepath.Join(dir, servicesDir, name+"-"+version)
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	return replaceFileFrom(to, in, 0o755)
}

// Measure returns the measurements of a machine of an image: that it is simulated, and its
// programs. An unreadable file has an empty measurement, which matches no requirement.
func Measure(img machine.Image) []machine.Event {
	boot := sha256.Sum256([]byte("simulated machine"))
	rootfs := sha256.Sum256([]byte("no root file system"))
	h := sha256.New()
	for _, name := range []string{"agent", "bootstrapper", "peers.json"} {
		if f, err := os.Open(filepath.Join(img.Dir, name)); err == nil {
			_, _ = io.Copy(h, f)
			f.Close()
		}
		fmt.Fprintf(h, "\x00%s\x00%s\x00", name, img.Version)
	}
	// Images of older programs have no release keys, and keep their measurements.
	if keys, err := os.ReadFile(filepath.Join(img.Dir, releaseKeysName)); err == nil {
		fmt.Fprintf(h, "%s\x00%s\x00", keys, releaseKeysName)
	}
	return []machine.Event{
		{PCR: machine.PCRBoot, Digest: boot[:], Description: "simulated machine"},
		{PCR: machine.PCRRootfs, Digest: rootfs[:], Description: "no root file system"},
		{PCR: machine.PCRImage, Digest: h.Sum(nil), Description: "programs of image " + img.Version},
	}
}

// StandIns writes the stand-ins that machines install instead of kubeadm and the
// kubelet of a version, and returns their paths by name.
func StandIns(dir, version string) (map[string]string, error) {
	out := map[string]string{}
	for name, script := range map[string]string{
		"kubeadm": "#!/bin/sh\n# kubeadm stand-in (simulated) for Kubernetes " + version + ".\nexec \"$" + programEnv + "\" sandbox stand-in kubeadm " + version + " \"$@\"\n",
		"kubelet": "#!/bin/sh\n# kubelet stand-in (simulated) for Kubernetes " + version + "; the machine itself does its work.\n" +
			"[ \"$1\" = --version ] && echo 'Kubernetes " + version + "' && exit 0\necho 'kubelet stand-in (simulated): only --version is known' >&2\nexit 1\n",
	} {
		path := filepath.Join(dir, standInsDir, version, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		if err := replaceFile(path, []byte(script), 0o755); err != nil {
			return nil, err
		}
		out[name] = path
	}
	return out, nil
}

// poll calls done every 20 ms until it returns true or an error, or ctx ends.
func poll(ctx context.Context, done func() (bool, error)) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := done()
		if err != nil || ok {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// Machines lists all machines by name.
func (h *Host) Machines() ([]machine.Machine, error) {
	entries, err := os.ReadDir(h.path())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var all []machine.Machine
	for _, e := range entries {
		m, err := h.Machine(e.Name())
		if errors.Is(err, machine.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b machine.Machine) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// Written lists the files of a machine's disk that match a pattern of [filepath.Match], an
// absolute path in the machine.
func (h *Host) Written(name, pattern string) ([]string, error) {
	return filepath.Glob(h.path(name, rootDir, filepath.FromSlash(pattern)))
}
