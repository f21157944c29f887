// Package footprint measures the memory of other processes, for benchmarks.
package footprint

import (
	"fmt"
	"os"
	"strings"
	"time"
)

// Peak is the peak memory of a process in bytes.
type Peak struct {
	// All is everything that the kernel counts, Own the share without page cache.
	All, Own float64
}

// Sample samples a process's memory a hundred times a second until it ends. The kernel's rusage of a
// child does not help, since it includes this process until the exec.
func Sample(pid int) <-chan Peak {
	most := make(chan Peak, 1)
	go func() {
		var m Peak
		defer func() { most <- m }()
		self, err := os.Readlink("/proc/self/exe")
		if err != nil {
			return
		}
		for ; ; time.Sleep(10 * time.Millisecond) {
			if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && exe == self {
				continue // before exec
			}
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
			if err != nil {
				return
			}
			kib := func(field string) (n float64, ok bool) {
				_, rest, ok := strings.Cut(string(b), field+":")
				_, err := fmt.Sscan(rest, &n)
				return n * 1024, ok && err == nil
			}
			all, ok := kib("VmHWM") // the highest it ever was
			if !ok {                // it has ended
				return
			}
			anonymous, _ := kib("RssAnon")
			m = Peak{max(m.All, all), max(m.Own, anonymous)}
		}
	}()
	return most
}
