package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/internal/testneeds"
)

// Drills replace the machines of a cluster under fault injection, and clean up after
// themselves. Kubernetes keeps its version, because its upgrade takes longer than the rest:
//
//	make drills MACHINES=simulated N=40
//	make drills MACHINES=real N=5
func TestDrillOfSimulatedMachines(t *testing.T) {
	t.Parallel()
	newSimulated(t).drill(simulatedMachines, 1) // a minute of processor time each; `make soak` runs more
}

// All faults except those of etcd's disk, which need /dev/fuse. `make soak` runs it.
func TestDrillOfRealMachines(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_DRILL", "four minutes")
	newReal(t).drill(realMachines, 2, "--faults=api-429,api-500,api-latency,create-timeout,describe-lag,lost-delete,never-join,operator-killed,partial-list,console-killed,"+
		"power-cut,frozen,isolated,tpm-hangs,disk-full,disk-read-only,cut-to-cloud,console-cut,component-corrupt,component-truncate,registry-empty")
}

func (c *cloud) drill(kind machineKind, count int, more ...string) {
	t := c.t
	t.Helper()
	// The user of the drill writes the journal, and has no access to the artifact directory.
	journal := filepath.Join(filepath.Dir(c.dir), "drill.jsonl")
	if err := errors.Join(os.MkdirAll(c.dir, 0o755), os.WriteFile(journal, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if c.as != nil {
		if err := errors.Join(os.Chown(c.dir, ordinaryUser, ordinaryUser), os.Chown(journal, ordinaryUser, ordinaryUser)); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { c.run(5*time.Minute, "sandbox", "down") }) // ends a drill that hangs
	args := []string{"sandbox", "drill", "--machines", string(kind), "--kubernetes=" + current, "--seed=1", fmt.Sprint("--count=", count), "-o", "json", "--journal", journal}
	out := c.run(12*time.Minute, append(args, more...)...)
	t.Log(out.stderr)
	if err := os.WriteFile(filepath.Join(t.ArtifactDir(), "drill.jsonl"), []byte(read(t, journal)), 0o600); err != nil {
		t.Fatal(err)
	}
	var report engine.DrillReport
	if err := json.Unmarshal([]byte(out.stdout), &report); err != nil {
		t.Fatalf("%v: %s\n%s", err, out.stdout, out.stderr)
	}
	if out.code != plan.ExitDone || report.Outcome != engine.DrillPassed {
		t.Errorf("exit code %d, %s: %s\n%s", out.code, report.Outcome, report.Why, out.stdout)
	}
	if l, err := os.ReadDir(c.dir); err != nil || len(l) > 0 {
		t.Errorf("leftovers %v, %v", l, err)
	}
}
