//go:build !linux

package controlplane

import "os/exec"

// dieWithParent does nothing: only Linux can promise it. Stop still kills the child.
func dieWithParent(*exec.Cmd) {}
