package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// process identifies a process beyond its number, which the kernel reuses: by its
// start time, and by the boot ID of this computer.
// The zero value is no process.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks after the boot
	Boot  string `json:"boot"`  // the boot's ID
}

// identify returns the running process with this number.
func identify(pid int) (process, error) {
	start, running, err := startOf(pid)
	if err != nil {
		return process{}, err
	}
	if !running {
		return process{}, fmt.Errorf("identify process %d: it has ended", pid)
	}
	boot, err := bootID()
	if err != nil {
		return process{}, err
	}
	return process{PID: pid, Start: start, Boot: boot}, nil
}

// startOf reads the start time of the process and whether it still runs. A zombie
// does not run.
func startOf(pid int) (start uint64, running bool, err error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, false, err
	}
	// The name, in parentheses, may hold anything; the state is the first field after it.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 20 {
		return 0, false, fmt.Errorf("read stat of process %d: %d fields", pid, len(fields))
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return 0, false, fmt.Errorf("read stat of process %d: %w", pid, err)
	}
	return start, fields[0] != "Z" && fields[0] != "X", nil
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot ID: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// alive reports whether exactly this process still runs.
func (p process) alive() bool {
	if p.PID <= 1 {
		return false
	}
	boot, err := bootID()
	if err != nil || boot != p.Boot {
		return false
	}
	start, running, err := startOf(p.PID)
	return err == nil && running && start == p.Start
}

// open returns a descriptor of the process, or -1 if it does not run any more. The
// descriptor stays valid even if the number is reused.
func (p process) open() (int, error) {
	if !p.alive() {
		return -1, nil
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, nil
	}
	if err != nil {
		return -1, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	// The number may have been reused between the check and the opening.
	if !p.alive() {
		_ = unix.Close(fd)
		return -1, nil
	}
	return fd, nil
}

// signal sends a signal; a process that is gone is no error.
func (p process) signal(s unix.Signal) error {
	fd, err := p.open()
	if err != nil || fd < 0 {
		return err
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, s, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to process %d: %w", unix.SignalName(s), p.PID, err)
	}
	return nil
}

// wait returns when the process has ended, or with the context's error. When the
// first process of a PID namespace has ended, all others of it have ended too.
func (p process) wait(ctx context.Context) error {
	fd, err := p.open()
	if err != nil || fd < 0 {
		return err
	}
	defer unix.Close(fd)
	stop := make(chan struct{})
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("wait for process %d: %w", p.PID, err)
	}
	unhook := context.AfterFunc(ctx, func() {
		defer close(stop)
		_, _ = unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	})
	defer func() {
		if !unhook() {
			<-stop // the function above still uses the descriptor
		}
		_ = unix.Close(wake)
	}()
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for process %d: %w", p.PID, err)
		}
		if fds[0].Revents != 0 {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// stop sends s to the process and kills it after grace. A
// grace of 0 kills at once.
func (p process) stop(ctx context.Context, s unix.Signal, grace time.Duration) error {
	if grace > 0 {
		if err := p.signal(s); err != nil {
			return err
		}
		polite, cancel := context.WithTimeout(ctx, grace)
		err := p.wait(polite)
		cancel()
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
	if err := p.signal(unix.SIGKILL); err != nil {
		return err
	}
	return p.wait(ctx)
}
