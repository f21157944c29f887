package term

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// ReleaseStartupPages unmaps the resident pages of the program's file (MADV_DONTNEED). Most of them
// were needed only at startup, when packages initialise their tables. The kernel reloads
// pages from its cache on demand. Errors are ignored.
func ReleaseStartupPages() {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return
	}
	defer f.Close()
	var begin, end uintptr // of the current mapping; end is zero if it is not a candidate
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line := lines.Text()
		switch first, _, _ := strings.Cut(line, " "); {
		case first == "Anonymous:":
			// Modified pages would be lost, such as those that a loader has relocated.
			if end != 0 && strings.HasSuffix(line, " 0 kB") {
				_, _, _ = unix.Syscall(unix.SYS_MADVISE, begin, end-begin, unix.MADV_DONTNEED)
			}
		case strings.HasSuffix(first, ":"):
		case strings.HasSuffix(line, " "+exe):
			var rights string
			if n, _ := fmt.Sscanf(line, "%x-%x %4s", &begin, &end, &rights); n < 3 || strings.Contains(rights, "w") {
				end = 0
			}
		default:
			end = 0
		}
	}
}
