package footprint

import (
	"os/exec"
	"testing"

	"constellation/internal/testneeds"
)

// The sample ends with the process and has what the process used: dd holds its block in memory.
func TestSample(t *testing.T) {
	dd := testneeds.Program(t, "dd", "coreutils")
	cmd := exec.Command(dd, "if=/dev/zero", "of=/dev/null", "bs=64M", "count=100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	sampled := Sample(cmd.Process.Pid)
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if m := <-sampled; m.All < 64<<20 || m.All > 256<<20 || m.Own > m.All {
		t.Errorf("dd with a block of 64 MiB had %.0f MiB, %.0f MiB of them its own", m.All/(1<<20), m.Own/(1<<20))
	}
}
