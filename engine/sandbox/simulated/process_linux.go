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

// child makes the kernel end a process when the one that started it ends.
func child() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

// killAll kills every process of this user that is one of the machine in dir, and
// returns when there is none. Some outlive the process that started them, as kubeadm
// outlives an agent. The machine's own, first, goes last: it collects its children, which
// would stay as dead entries where nobody else does.
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
	mark := []byte(machineEnv + "=" + dir + "\x00")
	return poll(ctx, func() (bool, error) {
		entries, err := os.ReadDir("/proc")
		if err != nil {
			return false, err
		}
		none := true
		for _, e := range entries {
			pid, err := strconv.Atoi(e.Name())
			if err != nil || pid == os.Getpid() || pid == first {
				continue
			}
			env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
			if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
				continue // another user's, or gone
			}
			if err != nil {
				return false, err
			}
			if bytes.HasPrefix(env, mark) || bytes.Contains(env, append([]byte{0}, mark...)) {
				none = false
				_ = syscall.Kill(pid, syscall.SIGKILL)
			} else if len(env) == 0 && first > 1 && parent(pid) == first {
				none = false // dead, and not collected yet
			}
		}
		return none, nil
	})
}

// parent returns the number of a process's parent; 0 if it is gone.
func parent(pid int) int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	var state string
	var ppid int
	_, _ = fmt.Sscan(string(b[bytes.LastIndexByte(b, ')')+1:]), &state, &ppid)
	return ppid
}
