package machine

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Files in a Host's directory:
//
//	machines.lock     held by the process that drives the machines
//	netns/hub         network namespace of the bridge
//	netns/m-<name>    network namespace of a machine
//	runc/             runc's own records
//	m/<name>/         a machine:
//	    machine.json  its record
//	    upper, work   the overlay's own directories
//	    disk/         diskDirs
//	    root/         the overlay's mount point while the machine runs
//	    bundle/       runc's configuration
//	    tpm/          see tpm
//	    disk.log      output of the process of a faulty disk
//	    console.log   output of the first process and runc
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

// Host is the machines of one sandbox, and their network. The machines
// survive the Host's process, and a new Host on the same directory adopts them.
// Its methods may be called concurrently. Changes to one machine are
// serialized.
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

// sandboxRule is a DNS label, short enough for paths and cgroups. nameRule is a DNS label, as host names are.
var (
	sandboxRule = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)
	nameRule    = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
)

// NewHost returns the host of the machines in dir, the directory of the sandbox with
// this name. It changes nothing. It can inspect machines, and run commands in them,
// while another process drives them.
func NewHost(dir, name string, log *slog.Logger) (*Host, error) {
	if os.Geteuid() != 0 {
		return nil, ErrUnsupported
	}
	if !sandboxRule.MatchString(name) {
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
	h.id = hostID(dir, name)
	if usual := (tpm{h.path(strings.Repeat("m", longestDir), "tpm")}).socket(); len(usual) > socketPathMax {
		return nil, fmt.Errorf("open machines: the path %s is too long for sockets below it; choose a shorter one, for instance by XDG_STATE_HOME", dir)
	}
	return h, nil
}

// hostID identifies the cgroups of the sandbox with this name in the absolute path dir.
func hostID(dir, name string) string {
	sum := sha256.Sum256([]byte(dir))
	return name + "-" + hex.EncodeToString(sum[:4])
}

func (h *Host) path(machine string, elements ...string) string {
	return filepath.Join(append([]string{h.dir, machinesDir, DirOf(machine)}, elements...)...)
}

func (h *Host) hub() string { return filepath.Join(h.dir, networkDir, hubName) }

func (h *Host) namespace(machine string) string {
	return filepath.Join(h.dir, networkDir, "m-"+machine)
}

func (h *Host) cgroup(machine string) string { return h.id + "/" + machine }

func (h *Host) tpm(machine string) tpm { return tpm{dir: h.path(machine, "tpm")} }

// Console returns the path of the output of the machine's first process and of runc. The
// machine's journal is in the machine.
func (h *Host) Console(name string) string { return h.path(name, consoleName) }

// Network takes the lock on the machines of the directory and
// makes their bridge, if it is missing. The error wraps ErrBusy if
// another process holds the lock. It is idempotent.
func (h *Host) Network(ctx context.Context) error {
	if err := h.drive(ctx); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(h.dir, networkDir), machinePaths); err != nil {
		return fmt.Errorf("create network: %w", err)
	}
	return createHub(h.hub())
}

// dying is how long a killed process may still hold its lock.
const dying = 3 * time.Second

// drive takes the lock on the machines.
func (h *Host) drive(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lock != nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Join(h.dir, machinesDir), machinePaths); err != nil {
		return fmt.Errorf("drive machines: %w", err)
	}
	// The kernel releases the lock of a killed process only after it has cleaned the process up,
	// which takes a moment on a busy computer.
	soon, cancel := context.WithTimeout(ctx, dying)
	defer cancel()
	unlock, err := lockFile(soon, filepath.Join(h.dir, lockName))
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return fmt.Errorf("drive machines of %s: %w", h.dir, ErrBusy)
	}
	if err != nil {
		return fmt.Errorf("drive machines: %w", err)
	}
	h.lock = unlock
	return nil
}

// driven returns an error if this Host does not hold the lock on the machines.
func (h *Host) driven() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lock == nil {
		return errors.New("the network was not made; call Network first")
	}
	return nil
}

// Close releases the lock on the machines. They keep running.
func (h *Host) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lock != nil {
		h.lock()
		h.lock = nil
	}
	return nil
}

// LimitMemory limits the memory of all machines together, in bytes; 0 is no limit.
// It takes effect at the next start of a machine, and lasts as long as the Host.
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
	if !nameRule.MatchString(strings.ReplaceAll(name, ".", "-")) || strings.Contains(name, ".") && len(name) != longestDir {
		return nil, fmt.Errorf("%q cannot be the name of a machine: it needs small letters, digits and -, at most 63", name)
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

// record is the stored record of a machine.
type record struct {
	Machine
	// Init is the first process of the last boot.
	Init process `json:"init"`
}

// look adds the observed state to the record.
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

// Machine returns the state of one machine. The error wraps ErrNotFound.
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
			continue // it is being created or removed
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
		name := e.Name()
		if r, err := h.read(name); err == nil {
			name = r.Name
		} // otherwise it is being created or removed, and has its directory alone
		names = append(names, name)
	}
	return names, nil
}

// Start makes a machine and boots it. It returns when the first process runs;
// [Host.WaitReady] waits for more. The error wraps ErrExists if the name is taken.
// After another error nothing of the machine is left, unless the cleanup failed too.
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
		// A failed start is cleaned up even after the context has ended.
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
		defer cancel()
		if rest := h.remove(clean, r); rest != nil {
			err = errors.Join(err, fmt.Errorf("clean up: %w", rest))
		}
	}()
	if err := h.writeDisk(spec); err != nil {
		return err
	}
	if err := h.etcdDisk(spec.Name).set(spec.Faults.diskSettings()); err != nil {
		return err
	}
	return h.powerOn(ctx, &r, firmware)
}

// enter records a machine before its creation, unless its name, its address
// or its pods' range is taken: these identify the remains to clean up after a failure.
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

// removeWithin limits the cleanup after a failure.
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

// Boot switches on a machine that is off. Its disk and the state of its TPM are
// kept, its PCRs are zero. The error wraps ErrNotFound. A running machine is left
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

// Reboot shuts a machine down in order, and switches it on again. Processes that
// have not ended after 20 seconds are killed. A machine that is off is only switched on.
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
	if err := freeze(ctx, h.cgroup(name), false); err != nil {
		return fmt.Errorf("reboot machine %s: %w", name, err)
	}
	// systemd's signal for poweroff, SIGRTMIN+4 in the C library's numbering.
	if err := r.Init.stop(ctx, unix.Signal(34+4), 20*time.Second); err != nil {
		return fmt.Errorf("reboot machine %s: %w", name, err)
	}
	return h.boot(ctx, name, firmware)
}

// Kill cuts the power without notice to the machine. Its disk is kept. The
// error wraps ErrNotFound. A machine that is off stays off.
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

// Remove kills a machine and removes its disk, its TPM and its network. It returns
// when nothing is left. A missing machine is no error.
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
	r.Name = name // also if the machine died before it was recorded
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
	return removeTree(filepath.Join(h.dir, machinesDir), DirOf(r.Name))
}

// Wait returns when the machine is off, for any reason.
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

// Sweep removes all resources of the sandbox's machines, including the remains of
// crashes: processes, mounts, namespaces, cgroups and files. Other files in the host's
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
		return nil // there have never been machines
	}
	if err := h.drive(ctx); err != nil {
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
	// The shared parents go last, because more machines could have used them.
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
