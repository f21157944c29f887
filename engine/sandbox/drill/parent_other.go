//go:build !linux

package drill

import "os/exec"

// dieWithParent does nothing: only Linux can promise it. The end of a drill still ends it.
func dieWithParent(*exec.Cmd) {}
