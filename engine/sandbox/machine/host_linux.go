package machine

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// What a Host keeps in its directory:
//
//	machines.lock     held by the process that drives the machines
//	netns/hub         network namespace of the bridge
//	netns/m-<name>    network namespace of a machine
//	runc/             runc's own records
//	m/<name>/         a machine:
//	    machine.json  what is known of it
//	    upper, work   the overlay's own directories
//	    disk/         diskDirs
//	    root/         where the overlay is mounted while the machine runs
//	    bundle/       runc's configuration
//	    tpm/          see tpm
//	    console.log   what the first process and runc wrote
const (
	lockName     = "machines.lock"
	hubName      = "hub"
	recordName   = "machine.json"
	consoleName  = "console.log"
	machinesDir  = "m"
	networkDir   = "netns"
	runcDir      = "runc"
	machinePaths = 0o700
)

// Host is the machines of one sandbox, and the network between them. The machines
// live on when the Host's process ends; a new Host on the same directory finds them
// again. Its methods may be called concurrently; those that change one machine wait
// for each other.
type Host struct {
	dir string
	id  string // names the sandbox's cgroups; differs for each directory
	log *slog.Logger

	memory rootfsMemory

	mu     sync.Mutex
	lock   func()                 // releases machines.lock; nil until Network
	busy   map[string]*sync.Mutex // by machine
	memMax int64                  // bytes; 0 is no limit
}

// nameRule is a DNS label, short enough for paths and cgroups.
var nameRule = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)

// NewHost returns the host of the machines in dir, the directory of the sandbox with
// this name. It changes nothing yet, and may be used to look at machines, and to run
// commands in them, while another process drives them.
func NewHost(dir, name string, log *slog.Logger) (*Host, error) {
	if os.Geteuid() != 0 {
		return nil, ErrUnsupported
	}
	if !nameRule.MatchString(name) {
		return nil, fmt.Errorf("open machines: %q cannot be the name of a sandbox: it needs small letters, digits and -, at most 40", name)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open machines: %w", err)
	}
	if err := checkOverlayPath(dir); err != nil {
		return nil, fmt.Errorf("open machines: %w", err)
	}
	h := &Host{dir: dir, log: log, busy: map[string]*sync.Mutex{}}
	sum := sha256.Sum256([]byte(dir))
	h.id = name + "-" + hex.EncodeToString(sum[:4])
	if longest := (tpm{h.path(strings.Repeat("m", 40), "tpm")}).socket(); len(longest) > socketPathMax+20 {
		return nil, fmt.Errorf("open machines: the path %s is too long for sockets below it; choose a shorter one, for instance by XDG_STATE_HOME", dir)
	}
	return h, nil
}

func (h *Host) path(machine string, elements ...string) string {
	return filepath.Join(append([]string{h.dir, machinesDir, machine}, elements...)...)
}

func (h *Host) hub() string { return filepath.Join(h.dir, networkDir, hubName) }

func (h *Host) namespace(machine string) string {
	return filepath.Join(h.dir, networkDir, "m-"+machine)
}

func (h *Host) cgroup(machine string) string { return h.id + "/" + machine }

func (h *Host) tpm(machine string) tpm { return tpm{dir: h.path(machine, "tpm")} }

// Console returns the path of what the machine's first process and runc wrote. The
// machine's journal is in the machine.
func (h *Host) Console(name string) string { return h.path(name, consoleName) }

// Network makes this Host the one that drives the machines of its directory, and
// makes the bridge that joins them, if it is not there. The error wraps ErrBusy when
// another process drives them. Repeating it does nothing.
func (h *Host) Network(ctx context.Context) error {
	if err := h.drive(); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(h.dir, networkDir), machinePaths); err != nil {
		return fmt.Errorf("create network: %w", err)
	}
	return createHub(h.hub())
}

// drive takes the lock on the machines.
func (h *Host) drive() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lock != nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Join(h.dir, machinesDir), machinePaths); err != nil {
		return fmt.Errorf("drive machines: %w", err)
	}
	// An ended context: the lock is had at once, or not.
	now, cancel := context.WithCancel(context.Background())
	cancel()
	unlock, err := lockFile(now, filepath.Join(h.dir, lockName))
	if errors.Is(err, context.Canceled) {
		return fmt.Errorf("drive machines of %s: %w", h.dir, ErrBusy)
	}
	if err != nil {
		return fmt.Errorf("drive machines: %w", err)
	}
	h.lock = unlock
	return nil
}

// driven is the error of a change to machines that this Host does not drive.
func (h *Host) driven() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lock == nil {
		return errors.New("the network was not made; call Network first")
	}
	return nil
}

// Close lets another Host drive the machines. They go on running.
func (h *Host) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lock != nil {
		h.lock()
		h.lock = nil
	}
	return nil
}

// LimitMemory bounds the memory of all machines together, in bytes; 0 is no limit.
// It counts from the next start of a machine on, and is forgotten with the Host.
func (h *Host) LimitMemory(bytes int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.memMax = bytes
}

// change locks one machine for a change.
func (h *Host) change(name string) (unlock func(), err error) {
	if err := h.driven(); err != nil {
		return nil, err
	}
	if !nameRule.MatchString(name) {
		return nil, fmt.Errorf("%q cannot be the name of a machine: it needs small letters, digits and -, at most 40", name)
	}
	h.mu.Lock()
	m, ok := h.busy[name]
	if !ok {
		m = new(sync.Mutex)
		h.busy[name] = m
	}
	h.mu.Unlock()
	m.Lock()
	return m.Unlock, nil
}

// record is a machine as it is written down.
type record struct {
	Machine
	// Init is the first process of the last boot.
	Init process `json:"init"`
}

// look fills in what is not written down but observed.
func (r record) look(t tpm) Machine {
	m := r.Machine
	m.PID, m.TPM = 0, ""
	switch {
	case r.Init.alive():
		m.Power, m.PID = Running, r.Init.PID
		m.TPM = t.address()
	case m.Boots == 0:
		m.Power = Creating
	default:
		m.Power = Off
	}
	return m
}

func (h *Host) read(name string) (record, error) {
	var r record
	err := readJSON(h.path(name, recordName), &r)
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, ErrNotFound
	}
	return r, err
}

// Machine says how one machine is. The error wraps ErrNotFound.
func (h *Host) Machine(name string) (Machine, error) {
	r, err := h.read(name)
	if err != nil {
		return Machine{}, fmt.Errorf("look at machine %s: %w", name, err)
	}
	return r.look(h.tpm(name)), nil
}

// Machines lists all machines by name.
func (h *Host) Machines() ([]Machine, error) {
	names, err := h.names()
	if err != nil {
		return nil, err
	}
	var all []Machine
	for _, n := range names {
		m, err := h.Machine(n)
		if errors.Is(err, ErrNotFound) {
			continue // it is being made or removed
		}
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b Machine) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

func (h *Host) names() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(h.dir, machinesDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list machines: %w", err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

// Start makes a machine and boots it. It returns when the first process runs;
// [Host.WaitReady] waits for more. The error wraps ErrExists when the name is taken.
// After another error nothing of the machine is left, unless that is an error too.
func (h *Host) Start(ctx context.Context, spec Spec, firmware Firmware) (err error) {
	unlock, err := h.change(spec.Name)
	if err != nil {
		return fmt.Errorf("start machine: %w", err)
	}
	defer unlock()
	defer func() {
		if err != nil {
			err = fmt.Errorf("start machine %s: %w", spec.Name, err)
		}
	}()
	if err := checkSpec(spec); err != nil {
		return err
	}
	r := record{Machine: Machine{
		Name: spec.Name, IP: spec.IP, PodCIDR: spec.PodCIDR, Image: *spec.Image, Created: time.Now().UTC(),
	}}
	if err := h.enter(r); err != nil {
		return err
	}
	defer func() {
		if err == nil {
			return
		}
		// Also when the context has ended: a failed start leaves nothing.
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
		defer cancel()
		if rest := h.remove(clean, r); rest != nil {
			err = errors.Join(err, fmt.Errorf("clean up: %w", rest))
		}
	}()
	if err := h.writeDisk(spec); err != nil {
		return err
	}
	return h.powerOn(ctx, &r, firmware)
}

// enter writes down a machine that is about to be made, unless its name, its address
// or its pods' range is another's: what is cleaned up after a failure is known by them.
func (h *Host) enter(r record) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, err := os.Lstat(h.path(r.Name)); err == nil {
		return ErrExists
	}
	others, err := h.Machines()
	if err != nil {
		return err
	}
	for _, o := range others {
		if o.IP == r.IP || o.PodCIDR.Overlaps(r.PodCIDR) {
			return fmt.Errorf("its address %s or range %s is that of machine %s", r.IP, r.PodCIDR, o.Name)
		}
	}
	if err := os.MkdirAll(h.path(r.Name), machinePaths); err != nil {
		return err
	}
	return writeJSON(h.path(r.Name, recordName), r)
}

// removeWithin bounds how long it may take to clean up after a failure.
const removeWithin = 30 * time.Second

func checkSpec(spec Spec) error {
	if !spec.IP.Is4() || !Nodes.Contains(spec.IP) || spec.IP == Gateway || spec.IP == Nodes.Addr() {
		return fmt.Errorf("the address %s is not one for machines in %s", spec.IP, Nodes)
	}
	if !spec.PodCIDR.IsValid() || !spec.PodCIDR.Addr().Is4() || spec.PodCIDR.Masked() != spec.PodCIDR || spec.PodCIDR.Overlaps(Nodes) {
		return fmt.Errorf("%s is no range for pods", spec.PodCIDR)
	}
	if spec.Image == nil {
		return errors.New("it has no image")
	}
	for path, f := range spec.Files {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" {
			return fmt.Errorf("the path %q of a file is not absolute and clean", path)
		}
		if f.Mode&^fs.ModePerm != 0 {
			return fmt.Errorf("the mode %v of %s has more than permissions", f.Mode, path)
		}
	}
	return nil
}

// writeDisk makes the machine's disk: the overlay's upper directory, written before
// it is mounted, and the parts that are no overlay.
func (h *Host) writeDisk(spec Spec) error {
	dirs := map[string]fs.FileMode{"upper": 0o755, "work": 0o755, "root": 0o755, "bundle": 0o755, "disk": 0o755}
	for _, d := range diskDirs {
		dirs[diskDir("disk", d.path)] = d.mode
	}
	for _, d := range slices.Sorted(maps.Keys(dirs)) { // parents first
		dir := h.path(spec.Name, d)
		if err := os.Mkdir(dir, dirs[d]); err != nil {
			return fmt.Errorf("make disk: %w", err)
		}
		// The umask had a say; but this is what the machine sees.
		if err := os.Chmod(dir, dirs[d]); err != nil {
			return fmt.Errorf("make disk: %w", err)
		}
	}
	files, err := ownFiles(spec)
	if err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	for path, f := range spec.Files {
		files[path] = f
	}
	lower := lowerDirs(spec.Image)
	upper, err := os.OpenRoot(h.path(spec.Name, "upper"))
	if err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	defer upper.Close()
	for path, f := range files {
		if err := writeUpper(upper, lower, path, f); err != nil {
			return fmt.Errorf("make disk: write %s: %w", path, err)
		}
	}
	return nil
}

func lowerDirs(image *Image) []string {
	return []string{filepath.Join(image.Dir, imageLayer), filepath.Join(image.Rootfs, rootfsTree)}
}

// writeUpper writes a file that hides the one of the image. A directory in the upper
// layer would also hide a link of that name below, and /bin with it, so that is
// refused; directories that exist below keep their mode.
func writeUpper(upper *os.Root, lower []string, path string, f File) error {
	path = strings.TrimPrefix(path, "/")
	err := makeDirs(upper, filepath.Dir(path), func(dir string) (fs.FileMode, error) {
		for _, l := range lower {
			info, err := os.Lstat(filepath.Join(l, dir))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err == nil && !info.IsDir() {
				err = fmt.Errorf("/%s is no directory", dir)
			}
			if err != nil {
				return 0, err
			}
			return info.Mode().Perm(), nil
		}
		return 0o755, nil
	})
	if err != nil {
		return err
	}
	mode := cmp.Or(f.Mode, 0o644)
	if err := upper.WriteFile(path, f.Data, mode); err != nil {
		return err
	}
	return upper.Chmod(path, mode)
}

// ownFiles are the files that make a machine this one.
func ownFiles(spec Spec) (map[string]File, error) {
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return nil, err
	}
	cni, err := cniList(spec.PodCIDR)
	if err != nil {
		return nil, err
	}
	return map[string]File{
		"/etc/hostname":   {Data: []byte(spec.Name + "\n")},
		"/etc/hosts":      {Data: fmt.Appendf(nil, "127.0.0.1 localhost\n::1 localhost ip6-localhost\n%s %s\n", spec.IP, spec.Name)},
		"/etc/machine-id": {Data: []byte(hex.EncodeToString(id) + "\n"), Mode: 0o444},
		// Nothing of this computer's: there is no way out of the sandbox's network. Who
		// asks for a name that is not the cluster's is told at once that nobody answers.
		"/etc/resolv.conf":                         {Data: []byte("nameserver " + Gateway.String() + "\noptions timeout:1 attempts:1\n")},
		"/etc/cni/net.d/10-constellation.conflist": {Data: cni},
		"/etc/containerd/config.toml":              {Data: containerdConfig(cmp.Or(spec.PauseImage, DefaultPauseImage))},
	}, nil
}

// powerOn boots a machine whose disk is there, from the TPM to the first process. On
// an error it may be half on; powerOff is for that.
func (h *Host) powerOn(ctx context.Context, r *record, firmware Firmware) error {
	start := time.Now()
	t := h.tpm(r.Name)
	if err := t.manufacture(ctx); err != nil {
		return err
	}
	if err := t.powerOn(ctx); err != nil {
		return err
	}
	if err := h.portOf(r.Machine).plug(); err != nil {
		return err
	}
	lower := lowerDirs(&r.Image)
	events, err := measure(ctx, r.Image.Rootfs, lower[0], &h.memory)
	if err != nil {
		return err
	}
	if !sameEvents(events, r.Image.Events) {
		h.log.Warn("image differs from what was made", "node", r.Name, "image", r.Image.Version)
	}
	if firmware != nil {
		boot := PowerOn{Machine: r.Name, TPM: t.address(), EventLog: t.eventLog(), Events: events, First: r.Boots == 0}
		if err := firmware(ctx, boot); err != nil {
			return fmt.Errorf("run firmware: %w", err)
		}
	}
	root := h.path(r.Name, "root")
	if err := mountOverlay(root, h.path(r.Name, "upper"), h.path(r.Name, "work"), lower...); err != nil {
		return err
	}
	if err := proveRoot(root); err != nil {
		return err
	}
	h.mu.Lock()
	limit := h.memMax
	err = restrictDevices(h.id)
	h.mu.Unlock()
	if err != nil {
		return err
	}
	if err := writeBundle(h.path(r.Name, "bundle"), bundleSpec{
		name: r.Name, root: root, namespace: h.namespace(r.Name), cgroup: cgroupParent + "/" + h.cgroup(r.Name),
		disk: h.path(r.Name, "disk"), tpm: t.port(),
	}); err != nil {
		return err
	}
	// In two steps: between them everything is in place, and nothing of the machine has
	// run yet.
	init, err := h.create(ctx, r.Name)
	if err != nil {
		return err
	}
	r.Init = init
	r.Boots++
	r.Booted = time.Now().UTC()
	if err := writeJSON(h.path(r.Name, recordName), r); err != nil {
		return err
	}
	if err := proveContainer(init.PID, root); err != nil {
		return err
	}
	if err := limitMemory(h.id, limit); err != nil {
		return err
	}
	if err := h.runc(ctx, "start", r.Name); err != nil {
		return err
	}
	h.log.Info("machine switched on", "node", r.Name, "image", r.Image.Version, "boot", r.Boots, "took", time.Since(start).Round(time.Millisecond))
	return nil
}

func (h *Host) portOf(m Machine) port {
	return port{hub: h.hub(), machine: h.namespace(m.Name), ip: m.IP, podCIDR: m.PodCIDR}
}

// proveRoot checks that root is a machine's root, and not by any mistake this
// computer's: an overlay, a mount of its own, with the marker and the first program
// that only a machine has.
func proveRoot(root string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		return fmt.Errorf("check root of machine: %w", err)
	}
	if st.Type != unix.OVERLAYFS_SUPER_MAGIC {
		return fmt.Errorf("check root of machine: %s is no overlay", root)
	}
	if info, err := os.Lstat(filepath.Join(root, marker)); err != nil || !info.Mode().IsRegular() {
		return fmt.Errorf("check root of machine: %s has no marker", root)
	}
	if target, err := os.Readlink(filepath.Join(root, initLink)); err != nil || target != "/lib/systemd/systemd" {
		return fmt.Errorf("check root of machine: %s has no first program", root)
	}
	for _, ours := range []string{marker, initLink} {
		if _, err := os.Lstat("/" + ours); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("check root of machine: /%s exists on this computer, which looks like a machine's root; refusing to go on", ours)
		}
	}
	return nil
}

// proveContainer checks that a process that runc has prepared, but not yet started, is
// in namespaces of its own and sees root as its root.
func proveContainer(pid int, root string) error {
	proc := "/proc/" + strconv.Itoa(pid)
	for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		theirs, err := os.Readlink(proc + "/ns/" + ns)
		if err != nil {
			return fmt.Errorf("check container: %w", err)
		}
		ours, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			return fmt.Errorf("check container: %w", err)
		}
		if theirs == ours {
			return fmt.Errorf("check container: it shares the %s namespace of this computer", ns)
		}
	}
	var theirs, expected unix.Stat_t
	if err := unix.Stat(proc+"/root/", &theirs); err != nil {
		return fmt.Errorf("check container: %w", err)
	}
	if err := unix.Stat(root, &expected); err != nil {
		return fmt.Errorf("check container: %w", err)
	}
	if theirs.Dev != expected.Dev || theirs.Ino != expected.Ino {
		return errors.New("check container: its root is not the machine's")
	}
	return nil
}

// create lets runc prepare the container up to the point where its first process
// would be started.
func (h *Host) create(ctx context.Context, name string) (process, error) {
	console, err := os.OpenFile(h.Console(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return process{}, fmt.Errorf("open console: %w", err)
	}
	defer console.Close()
	unified, err := makeUnified(h.cgroup(name))
	if err != nil {
		return process{}, err
	}
	pidFile := h.path(name, "init.pid")
	if err := h.runcIn(ctx, unified, console, "create", "--bundle", h.path(name, "bundle"), "--pid-file", pidFile, name); err != nil {
		return process{}, err
	}
	b, err := os.ReadFile(pidFile)
	if err != nil {
		return process{}, fmt.Errorf("read number of first process: %w", err)
	}
	pid, err := strconv.Atoi(string(b))
	if err != nil {
		return process{}, fmt.Errorf("read number of first process: %w", err)
	}
	return identify(pid)
}

// runc runs runc to its end.
func (h *Host) runc(ctx context.Context, args ...string) error {
	return h.runcIn(ctx, "", nil, args...)
}

// runcIn runs runc to its end, in the v2 cgroup if it is not empty. The container gets
// output as its own; runc's words are in a log beside it.
func (h *Host) runcIn(ctx context.Context, cgroup string, output *os.File, args ...string) error {
	log, err := os.CreateTemp(h.dir, ".runc-*.log")
	if err != nil {
		return fmt.Errorf("run runc: %w", err)
	}
	defer os.Remove(log.Name())
	defer log.Close()
	cmd := exec.CommandContext(ctx, tool("runc"), append([]string{"--root", filepath.Join(h.dir, runcDir), "--log", log.Name()}, args...)...)
	if output != nil {
		cmd.Stdout, cmd.Stderr = output, output
	}
	// Its own process group: an interrupt at the terminal is not for machines.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if cgroup != "" {
		dir, err := os.Open(cgroup)
		if err != nil {
			return fmt.Errorf("run runc: %w", err)
		}
		defer dir.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		words, _ := os.ReadFile(log.Name())
		return fmt.Errorf("runc %s: %w: %s", args[0], err, lastLine(words))
	}
	return nil
}

// Boot switches on a machine that is off. Its disk and what its TPM keeps are as they
// were; its PCRs are zero. The error wraps ErrNotFound. A machine that runs is left
// alone.
func (h *Host) Boot(ctx context.Context, name string, firmware Firmware) error {
	unlock, err := h.change(name)
	if err != nil {
		return fmt.Errorf("boot machine: %w", err)
	}
	defer unlock()
	return h.boot(ctx, name, firmware)
}

func (h *Host) boot(ctx context.Context, name string, firmware Firmware) error {
	r, err := h.read(name)
	if err == nil && r.look(h.tpm(name)).Power == Creating {
		err = errors.New("it was never completed; remove it")
	}
	if err != nil {
		return fmt.Errorf("boot machine %s: %w", name, err)
	}
	if r.Init.alive() {
		return nil
	}
	if err := h.powerOff(ctx, r); err != nil {
		return fmt.Errorf("boot machine %s: %w", name, err)
	}
	if err := h.powerOn(ctx, &r, firmware); err != nil {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
		defer cancel()
		return fmt.Errorf("boot machine %s: %w", name, errors.Join(err, h.powerOff(clean, r)))
	}
	return nil
}

// Reboot shuts a machine down as its own reboot would, and switches it on again. What
// has not ended after 20 seconds is killed. One that is off is just switched on.
func (h *Host) Reboot(ctx context.Context, name string, firmware Firmware) error {
	unlock, err := h.change(name)
	if err != nil {
		return fmt.Errorf("reboot machine: %w", err)
	}
	defer unlock()
	r, err := h.read(name)
	if err != nil {
		return fmt.Errorf("reboot machine %s: %w", name, err)
	}
	// systemd's signal for poweroff, SIGRTMIN+4 as the C library counts.
	if err := r.Init.stop(ctx, unix.Signal(34+4), 20*time.Second); err != nil {
		return fmt.Errorf("reboot machine %s: %w", name, err)
	}
	return h.boot(ctx, name, firmware)
}

// Kill cuts the power: nothing in the machine gets to know. Its disk is kept. The
// error wraps ErrNotFound; a machine that is off stays off.
func (h *Host) Kill(ctx context.Context, name string) error {
	unlock, err := h.change(name)
	if err != nil {
		return fmt.Errorf("kill machine: %w", err)
	}
	defer unlock()
	r, err := h.read(name)
	if err == nil {
		err = h.powerOff(ctx, r)
	}
	if err != nil {
		return fmt.Errorf("kill machine %s: %w", name, err)
	}
	h.log.Info("machine switched off", "node", name)
	return nil
}

// powerOff ends everything of a machine that is not its disk. It finishes what was
// begun before, so it may be repeated, and what is not there is no error.
func (h *Host) powerOff(ctx context.Context, r record) error {
	// The kernel reports the first process gone when all of the machine are.
	if err := r.Init.stop(ctx, unix.SIGKILL, 0); err != nil {
		return err
	}
	// This also ends a container that a crash kept from being written down.
	if _, err := os.Lstat(filepath.Join(h.dir, runcDir, r.Name)); err == nil {
		if err := h.runc(ctx, "delete", "--force", r.Name); err != nil {
			return err
		}
	}
	if err := removeCgroups(ctx, h.cgroup(r.Name)); err != nil {
		return err
	}
	if err := unmountBelow(ctx, h.path(r.Name)); err != nil {
		return err
	}
	if err := h.tpm(r.Name).powerOff(ctx); err != nil {
		return err
	}
	return h.portOf(r.Machine).unplug(ctx)
}

// Remove kills a machine and removes its disk, its TPM and its network. It returns
// when nothing is left. That there is no such machine is no error.
func (h *Host) Remove(ctx context.Context, name string) error {
	unlock, err := h.change(name)
	if err != nil {
		return fmt.Errorf("remove machine: %w", err)
	}
	defer unlock()
	r, err := h.read(name)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("remove machine %s: %w", name, err)
	}
	if _, gone := os.Lstat(h.path(name)); gone != nil {
		return nil
	}
	r.Name = name // also of a machine that died before it was written down
	if err := h.remove(ctx, r); err != nil {
		return fmt.Errorf("remove machine %s: %w", name, err)
	}
	h.log.Info("machine removed", "node", name)
	return nil
}

func (h *Host) remove(ctx context.Context, r record) error {
	if err := h.powerOff(ctx, r); err != nil {
		return err
	}
	return removeTree(filepath.Join(h.dir, machinesDir), r.Name)
}

// Wait returns when the machine is off, for whatever reason.
func (h *Host) Wait(ctx context.Context, name string) error {
	r, err := h.read(name)
	if err == nil {
		err = r.Init.wait(ctx)
	}
	if err != nil {
		return fmt.Errorf("wait for machine %s: %w", name, err)
	}
	return nil
}

// Sweep removes everything that the sandbox's machines have, or that a crash left of
// them: processes, mounts, namespaces, cgroups and files. Other files in the host's
// directory stay. It refuses, with ErrBusy, while another process drives the machines,
// and may be repeated until it succeeds. Afterwards the Host is closed.
func (h *Host) Sweep(ctx context.Context) error {
	if err := h.sweep(ctx); err != nil {
		return fmt.Errorf("sweep %s: %w", h.dir, err)
	}
	return nil
}

func (h *Host) sweep(ctx context.Context) error {
	if _, err := os.Lstat(filepath.Join(h.dir, machinesDir)); errors.Is(err, fs.ErrNotExist) {
		return nil // there never were machines
	}
	if err := h.drive(); err != nil {
		return err
	}
	names, err := h.names()
	if err != nil {
		return err
	}
	errs := make([]error, len(names))
	var all sync.WaitGroup
	for i, name := range names {
		all.Go(func() { errs[i] = h.Remove(ctx, name) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	// What holds all of them stayed as long as more could come.
	if err := removeCgroups(ctx, h.id); err != nil {
		return err
	}
	for _, d := range []string{networkDir, runcDir, machinesDir} {
		if err := unmountBelow(ctx, filepath.Join(h.dir, d)); err != nil {
			return err
		}
		if err := removeTree(h.dir, d); err != nil {
			return err
		}
	}
	logs, err := filepath.Glob(filepath.Join(h.dir, ".runc-*.log"))
	if err != nil {
		return err
	}
	for _, l := range append(logs, filepath.Join(h.dir, lockName)) {
		if err := os.Remove(l); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return h.Close()
}
