//go:build !linux

package sandbox

import (
	"os/exec"
	"strconv"
	"strings"
)

// startOf returns the start time of a process, and whether it is alive.
func startOf(pid int) (string, bool) {
	out, err := exec.Command("ps", "-o", "stat=,lstart=", "-p", strconv.Itoa(pid)).Output() //nolint:noctx // at once
	state, start, ok := strings.Cut(strings.TrimSpace(string(out)), " ")
	if err != nil || !ok || strings.HasPrefix(state, "Z") {
		return "", false
	}
	return strings.Join(strings.Fields(start), "-"), true // one word, as it is written down
}
