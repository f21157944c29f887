package simulated

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"syscall"
	"time"
)

// child makes the kernel kill a process when its parent ends.
func child() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

// killAll kills every process of this user that belongs to the machine in dir, and
// returns when there is none. Some outlive their parent, as kubeadm
// outlives an agent. The machine's own process, first, goes last: it reaps its children, which
// would stay zombies if no other process reaps them.
func killAll(ctx context.Context, dir string, first int) error {
	if first > 1 {
		brief, cancel := context.WithTimeout(ctx, time.Second)
		_ = killBut(brief, dir, first)
		cancel()
		_ = syscall.Kill(first, syscall.SIGKILL)
	}
	return killBut(ctx, dir, 0)
}

// killBut kills all but the process first, and waits for the children of first as well.
func killBut(ctx context.Context, dir string, first int) error {
	return poll(ctx, func() (bool, error) {
		none := true
		err := eachProcess(dir, func(pid int, its, dead bool) {
			switch {
			case pid == first:
			case its:
				none = false
				_ = syscall.Kill(pid, syscall.SIGKILL) // it may be gone already
			case dead && first > 1:
				if ppid, _ := stat(pid); ppid == first {
					none = false // a zombie
				}
			}
		})
		return none, err
	})
}

// freeze stops all processes of the machine in dir, and returns when none runs any
// more, including those that they start meanwhile.
func freeze(ctx context.Context, dir string, _ int) error {
	return poll(ctx, func() (bool, error) {
		all := true
		err := eachProcess(dir, func(pid int, its, _ bool) {
			if _, state := stat(pid); its && state != "T" && state != "Z" && state != "" {
				all = false
				_ = syscall.Kill(pid, syscall.SIGSTOP) // it may be gone already
			}
		})
		return all, err
	})
}

// thaw resumes all processes of the machine in dir.
func thaw(dir string, _ int) error {
	return eachProcess(dir, func(pid int, its, _ bool) {
		if its {
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
	})
}

// eachProcess calls do for all other processes of this user. its means that it belongs to the
// machine in dir, dead that it is a zombie.
func eachProcess(dir string, do func(pid int, its, dead bool)) error {
	mark := []byte(machineEnv + "=" + dir + "\x00")
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // another user's, or gone
		}
		if err != nil {
			return err
		}
		do(pid, bytes.HasPrefix(env, mark) || bytes.Contains(env, append([]byte{0}, mark...)), len(env) == 0)
	}
	return nil
}

// stat returns the number of a process's parent, and its state as a letter; zero values if
// it is gone.
func stat(pid int) (parent int, state string) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, ""
	}
	_, _ = fmt.Sscan(string(b[bytes.LastIndexByte(b, ')')+1:]), &state, &parent)
	return parent, state
}
