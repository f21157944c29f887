package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/sandbox/machine/machinetest"
)

// TestDrillOfRealMachines replaces the machines of a cluster while things go wrong, as a
// user would ask for it. Nothing of it is left. Kubernetes stays as it is, because another
// one takes longer to build than all tests together:
//
//	bin/constellation sandbox fetch v1.36.3 && make drills MACHINES=real N=5
func TestDrillOfRealMachines(t *testing.T) {
	if runtime.GOOS != "linux" || os.Geteuid() != 0 {
		t.Skip("real machines need Linux and root")
	}
	if testing.Short() {
		t.Skip("starts real machines; not in -short")
	}
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	unlock, err := machinetest.Lock()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unlock)
	c := &cloud{t: t, bin: filepath.Join(wd, "bin"), dir: t.TempDir()}
	t.Cleanup(func() { c.run(5*time.Minute, "sandbox", "down") }) // whatever a drill leaves that hangs
	out := c.run(12*time.Minute, "sandbox", "drill", "--machines=real", "--kubernetes=v1.35.4", "--seed=1", "--count=3", "-o", "json",
		"--journal", filepath.Join(t.ArtifactDir(), "drill.jsonl"))
	t.Log(out.stderr)
	var report engine.DrillReport
	if err := json.Unmarshal([]byte(out.stdout), &report); err != nil {
		t.Fatalf("%v: %s\n%s", err, out.stdout, out.stderr)
	}
	if out.code != engine.ExitDone || report.Outcome != engine.DrillPassed {
		t.Errorf("exit code %d, %s: %s\n%s", out.code, report.Outcome, report.Why, out.stdout)
	}
	if l, err := os.ReadDir(c.dir); err != nil || len(l) > 0 {
		t.Errorf("it left %v, %v", l, err)
	}
}
