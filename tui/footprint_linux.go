package tui

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// forgetStart gives back the memory that holds the program's file. Most of it was needed by
// the start alone: packages make tables of all kinds that there are, also of those that nobody
// asks for. The kernel keeps the file in its cache and brings back what is needed again. It is
// no harm if it cannot be done.
func forgetStart() {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return
	}
	defer f.Close()
	var begin, end uintptr // of the mapping that is read about; none if end is zero
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line := lines.Text()
		switch first, _, _ := strings.Cut(line, " "); {
		case first == "Anonymous:":
			// What was written would be lost, as by a loader that moved the program.
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
