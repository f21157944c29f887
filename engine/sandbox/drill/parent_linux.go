package drill

import (
	"os/exec"
	"syscall"
)

// dieWithParent makes the kernel kill the child when this process ends, however it ends.
func dieWithParent(c *exec.Cmd) {
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
