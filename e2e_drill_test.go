package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
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
func TestDrillOfSimulatedMachines(t *testing.T) {
	t.Parallel()
	newSimulated(t).drill(simulatedMachines)
}

// All faults but those of etcd's disk, which needs /dev/fuse.
func TestDrillOfRealMachines(t *testing.T) {
	newReal(t).drill(realMachines, "--faults=api-429,api-500,api-latency,create-timeout,describe-lag,lost-delete,never-join,operator-killed,partial-list,console-killed,"+
		"power-cut,frozen,isolated,tpm-hangs,disk-full,disk-read-only,cut-to-cloud,console-cut,component-corrupt,component-truncate,registry-empty")
}

func (c *cloud) drill(kind machineKind, more ...string) {
	t := c.t
	t.Helper()
	// Who drills writes the journal, and the directory of artifacts is closed to others.
	journal := filepath.Join(filepath.Dir(c.dir), "drill.jsonl")
	if err := errors.Join(os.MkdirAll(c.dir, 0o755), os.WriteFile(journal, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if c.as != nil {
		if err := errors.Join(os.Chown(c.dir, ordinaryUser, ordinaryUser), os.Chown(journal, ordinaryUser, ordinaryUser)); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { c.run(5*time.Minute, "sandbox", "down") }) // whatever a drill leaves that hangs
	args := []string{"sandbox", "drill", "--machines", string(kind), "--kubernetes=v1.35.4", "--seed=1", "--count=3", "-o", "json", "--journal", journal}
	out := c.run(12*time.Minute, append(args, more...)...)
	t.Log(out.stderr)
	if err := os.WriteFile(filepath.Join(t.ArtifactDir(), "drill.jsonl"), []byte(read(t, journal)), 0o600); err != nil {
		t.Fatal(err)
	}
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
