//go:build !unix

package conformance

import "syscall"

func apart() *syscall.SysProcAttr { return nil }
