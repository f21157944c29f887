//go:build linux

package kubeadm

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Verbs of kubeadm upgrade.
const (
	UpgradePlan  = "plan"
	UpgradeApply = "apply"
	UpgradeNode  = "node"
	// UpgradeCoreDNS and UpgradeKubeProxy are phases of UpgradeNode. kubeadm ignores skipPhases when
	// it runs one phase; see [UpgradeConfiguration.SkipsAddon].
	UpgradeCoreDNS   = UpgradeNode + " phase addon " + CoreDNS
	UpgradeKubeProxy = UpgradeNode + " phase addon " + KubeProxy
)

// GateArgument is the first argument of a process that is to become kubeadm: see
// [Gate].
const GateArgument = "kubeadm-gate"

const (
	outputFile = "kubeadm.out"
	// maxOutput is how much of the output's file is kept, in bytes, once it was read.
	maxOutput = 8 << 20
	// lookEvery is the poll interval of a detached kubeadm's output. It writes to a file,
	// which gives no notification.
	lookEvery = 50 * time.Millisecond
	// clockTicks is how many of them a second has in /proc, on every platform of Go.
	clockTicks = 100
)

// ErrOutcomeUnknown means that kubeadm has ended with an unknown exit code, because the
// process that started it has ended. Running kubeadm again gives the result.
var ErrOutcomeUnknown = errors.New("the outcome is not known")

// ErrDeadline means that kubeadm took too long and was killed.
var ErrDeadline = errors.New("took too long and was stopped")

// Gate makes this process kubeadm, as [Detached.Start] asks for it. The program that
// uses Detached calls it first thing in main if its first argument is
// [GateArgument]. It does not return.
//
// A process behind the gate waits until its parent has recorded its process ID; if the
// parent dies before that, so does the process. So every running kubeadm can be found.
func Gate() {
	pass := os.NewFile(3, "gate")
	if n, _ := pass.Read(make([]byte, 1)); n != 1 || len(os.Args) < 3 {
		os.Exit(125)
	}
	syscall.CloseOnExec(3)
	err := syscall.Exec(os.Args[2], os.Args[2:], os.Environ())
	fmt.Fprintf(os.Stderr, "error: run %s: %v\n", os.Args[2], err)
	os.Exit(126)
}

// Detached runs kubeadm so that it goes on when the calling process ends, and can be
// followed by the next one. Runs of one host must not overlap; Detached does not see
// to that.
type Detached struct {
	// Path of the binary; "" means DefaultPath.
	Path string
	// Dir is where configuration and output lie. It must exist, be on a disk, and be
	// closed to others.
	Dir string
	// Timeout is how long kubeadm may take; zero means ten minutes. Silence of minutes
	// is normal.
	Timeout time.Duration
	// Grace is how long kubeadm may take to stop after that; zero means 10 s.
	Grace time.Duration
}

// Process is a kubeadm that was started by a Detached. It can be kept on disk.
type Process struct {
	// Verb is one of those of kubeadm upgrade.
	Verb string `json:"verb"`
	PID  int    `json:"pid"`
	// Start is when it started, in clock ticks since the boot: with Boot it distinguishes the
	// process from others that get its number later.
	Start uint64 `json:"start"`
	// Boot is the kernel's name of this boot.
	Boot string `json:"boot"`

	cmd *exec.Cmd // nil: started by another process
}

// BootID returns the kernel's name of this boot.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot's ID: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// Start starts kubeadm upgrade verb with c. started is called when the process
// exists and before it becomes kubeadm; if it fails, kubeadm never runs.
func (d Detached) Start(verb string, c Config, started func(Process) error) (*Process, error) {
	fail := func(err error) (*Process, error) { return nil, fmt.Errorf("kubeadm upgrade %s: %w", verb, err) }
	args := append([]string{"upgrade"}, strings.Fields(verb)...)
	switch verb {
	case UpgradePlan, UpgradeNode, UpgradeCoreDNS, UpgradeKubeProxy:
	case UpgradeApply:
		args = append(args, "--yes")
	default:
		return fail(errors.New("no such verb"))
	}
	config := filepath.Join(d.Dir, configFile)
	b, err := c.YAML()
	if err != nil {
		return fail(err)
	}
	if err := os.Remove(config); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fail(err)
	}
	if err := os.WriteFile(config, b, 0o600); err != nil {
		return fail(fmt.Errorf("write configuration: %w", err))
	}
	// A file, not a pipe: it keeps kubeadm's output while no reader is attached.
	out, err := os.OpenFile(filepath.Join(d.Dir, outputFile), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return fail(err)
	}
	defer out.Close()
	boot, err := BootID()
	if err != nil {
		return fail(err)
	}
	gate, pass, err := os.Pipe()
	if err != nil {
		return fail(err)
	}
	defer pass.Close()

	path := d.Path
	if path == "" {
		path = DefaultPath
	}
	// Its life is not bound to any context: that is what it is for.
	cmd := exec.Command("/proc/self/exe", append([]string{GateArgument, path}, append(args, "--config="+config)...)...) //nolint:noctx // kubeadm outlives its caller
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = out, out, []*os.File{gate}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	gate.Close()
	if err != nil {
		return fail(err)
	}
	p := &Process{Verb: verb, PID: cmd.Process.Pid, Boot: boot, cmd: cmd}
	_, p.Start, err = look(p.PID)
	if err == nil {
		err = started(*p)
	}
	if err == nil {
		_, err = pass.Write([]byte{1})
	}
	if err != nil {
		pass.Close()
		_ = cmd.Wait() // it ends by itself at a gate that is gone
		return fail(err)
	}
	return p, nil
}

// Running reports whether p is still there.
func (p Process) Running() bool {
	boot, err := BootID()
	if err != nil || boot != p.Boot || p.PID <= 0 {
		return false
	}
	state, start, err := look(p.PID)
	return err == nil && start == p.Start && state != 'Z' && state != 'X'
}

// age is how long ago p started, by the monotonic clock.
func (p Process) age() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano()) - time.Duration(p.Start)*time.Second/clockTicks
}

// look reads state and start of a process.
func look(pid int) (state byte, start uint64, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, err
	}
	// The name, in parentheses, may hold anything.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 20 {
		return 0, 0, fmt.Errorf("read state of process %d: too short", pid)
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return fields[0][0], start, err
}

// Wait passes on what p says, from byte from of its output on, until it ends. lines
// gets each line and the byte after it, which is what a later Wait starts from; it is
// called by the same goroutine.
//
// When ctx ends, Wait returns its error and p goes on. When d.Timeout is over since
// p's start, its process group is ended and the error wraps [ErrDeadline]. The error
// is an [*Error] if kubeadm failed, and wraps [ErrOutcomeUnknown] if it was started
// by another process.
func (d Detached) Wait(ctx context.Context, p *Process, from int64, lines func(l Line, next int64)) error {
	command := "kubeadm upgrade " + p.Verb
	f, err := os.OpenFile(filepath.Join(d.Dir, outputFile), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	defer f.Close()
	o := &output{f: f, at: from}
	var last tail
	o.w.emit = func(raw string) {
		if l := parseLine(raw, nil); l.Text != "" {
			last.add(l)
			if lines != nil {
				lines(l, o.next)
			}
		}
	}
	ended := p.ended()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	limit := overdue{p: p, timeout: cmp.Or(d.Timeout, 10*time.Minute), grace: cmp.Or(d.Grace, 10*time.Second)}
	var exit error
	for over := false; !over; {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case exit = <-ended:
			over = true
		case <-tick.C:
			over = ended == nil && !p.Running()
		}
		if err := o.read(); err != nil {
			return fmt.Errorf("%s: read its output: %w", command, err)
		}
		if !over {
			limit.stop()
		}
	}
	o.w.flush()
	var e *exec.ExitError
	switch unknown := ended == nil; {
	case limit.passed() && (exit != nil || unknown):
		limit.killRest()
		return fmt.Errorf("%s: %w (%s)", command, ErrDeadline, limit.timeout)
	case unknown:
		return fmt.Errorf("%s: %w", command, ErrOutcomeUnknown)
	case exit == nil:
		return nil
	case errors.As(exit, &e):
		return &Error{Command: command, Code: e.ExitCode(), Message: last.message(), brief: last.brief(), cause: exit}
	}
	return fmt.Errorf("%s: %w", command, exit)
}

// ended returns a channel that receives the exit of p, or nil if p is no child of this process.
func (p *Process) ended() <-chan error {
	if p.cmd == nil {
		return nil
	}
	// This goroutine outlives Wait if ctx ends: nobody else collects the process.
	ended, cmd := make(chan error, 1), p.cmd
	p.cmd = nil
	go func() { ended <- cmd.Wait() }()
	return ended
}

// overdue stops the process group of a kubeadm that takes too long.
type overdue struct {
	p              *Process
	timeout, grace time.Duration
	asked          bool
}

func (o *overdue) passed() bool { return o.p.age() >= o.timeout }

// stop sends SIGTERM once after the timeout, and SIGKILL on every call after the grace period.
func (o *overdue) stop() {
	switch age := o.p.age(); {
	case age < o.timeout || !o.p.Running():
	case age >= o.timeout+o.grace:
		_ = syscall.Kill(-o.p.PID, syscall.SIGKILL)
	case !o.asked:
		o.asked = true
		_ = syscall.Kill(-o.p.PID, syscall.SIGTERM)
	}
}

// killRest kills the rest of the group. kubeadm was its first process, and no other process gets
// its number while one of the group lives.
func (o *overdue) killRest() {
	if _, _, err := look(o.p.PID); errors.Is(err, fs.ErrNotExist) {
		_ = syscall.Kill(-o.p.PID, syscall.SIGKILL)
	}
}

// output reads a file that somebody else appends to.
type output struct {
	f    *os.File
	at   int64 // read so far
	next int64 // end of the latest whole line
	w    lineWriter
}

// read passes on all there is.
func (o *output) read() error {
	i, err := o.f.Stat()
	if err != nil {
		return err
	}
	if i.Size() < o.at { // truncated by an earlier reader
		o.at = 0
	}
	buf := make([]byte, 16<<10)
	for {
		n, err := o.f.ReadAt(buf, o.at)
		for b := buf[:n]; len(b) > 0; {
			k := len(b)
			if i := bytes.IndexByte(b, '\n'); i >= 0 {
				k = i + 1
				o.next = o.at + int64(k)
			}
			o.at += int64(k)
			if _, err := o.w.Write(b[:k]); err != nil {
				return err
			}
			b = b[k:]
		}
		if o.at >= maxOutput {
			// A flood must not fill the disk. Output between reading and truncating is lost.
			if err := o.f.Truncate(0); err != nil {
				return err
			}
			o.at, o.next = 0, 0
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
