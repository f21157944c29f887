// Command pause holds the namespaces of a pod: it does nothing until it is told
// to stop, and buries the orphans that a shared process namespace hands to it.
//
// It exits 0 on SIGTERM, SIGINT and -v; kubeadm's upgrade check runs "pause -v" as
// a Job and waits for it to succeed. It is compiled for the sandbox from the
// embedded source, never linked into another program.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// version is the tag of the image that this program lives in; the linker sets it.
var version = "unknown"

func main() {
	for _, arg := range os.Args[1:] {
		if arg == "-v" || arg == "-V" {
			fmt.Println("pause", version)
			return
		}
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "pause: not the first process here: orphans will not be handed over")
	}
	bury() // children that ended before the signal was asked for
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		bury()
	}
}

// bury waits for every child that has ended. One SIGCHLD can stand for many.
func bury() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
	}
}
