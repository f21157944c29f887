//go:build !linux

package drill

import "os/exec"

// dieWithParent does nothing: only Linux supports it. The regular end of a drill ends the child.
func dieWithParent(*exec.Cmd) {}
