package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"constellation/engine"
)

// Drills replace the machines of a cluster while things go wrong, as a user would ask for
// them. Nothing of them is left. Kubernetes stays as it is, because the swap of it takes
// longer than all else:
//
//	make drills MACHINES=simulated N=40
//	make drills MACHINES=real N=5
func TestDrillsOfSimulatedMachines(t *testing.T) {
	for _, seed := range []int{1, 2, 3} {
		t.Run("seed "+strconv.Itoa(seed), func(t *testing.T) {
			t.Parallel() // most of it waits
			newSimulated(t).drill(simulatedMachines, seed)
		})
	}
}

func TestDrillOfRealMachines(t *testing.T) { newReal(t).drill(realMachines, 1) }

func (c *cloud) drill(kind machineKind, seed int) {
	t := c.t
	t.Helper()
	if err := os.MkdirAll(c.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if c.as != nil {
		if err := os.Chown(c.dir, ordinaryUser, ordinaryUser); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { c.run(5*time.Minute, "sandbox", "down") }) // whatever a drill leaves that hangs
	out := c.run(12*time.Minute, "sandbox", "drill", "--machines", string(kind), "--kubernetes=v1.35.4", "--seed", strconv.Itoa(seed), "--count=3", "-o", "json",
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
