package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/internal/testneeds"
)

// emulated returns the description of a sandbox that emulates a cloud, and the number of calls of its API.
func (c *cloud) emulated() (st engine.SandboxStatus, calls int) {
	c.t.Helper()
	if err := json.Unmarshal([]byte(c.run(time.Minute, "sandbox", "status", "-o", "json").want(plan.ExitDone).stdout), &st); err != nil {
		c.t.Fatal(err)
	}
	for _, n := range st.Calls {
		calls += n
	}
	return st, calls
}

// wantNoProblems fails the test for each call that the API of the emulated cloud does not have.
func (c *cloud) wantNoProblems() {
	c.t.Helper()
	b, err := os.ReadFile(filepath.Join(c.sandboxDir(), "daemon.log"))
	if err != nil {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, "outside the schema") {
			c.t.Error(strings.TrimSpace(line))
		}
	}
	if st, _ := c.emulated(); st.Problems != 0 {
		c.t.Errorf("%d calls are outside of the schema", st.Problems)
	}
}

// wantConsole fails the test unless the console of each machine has all texts. Directories of machines begin with prefix, and long
// names are cut.
func (c *cloud) wantConsole(prefix string, texts ...string) {
	c.t.Helper()
	all, err := filepath.Glob(filepath.Join(c.sandboxDir(), "m", prefix+"*", "console.log"))
	if err != nil || len(all) == 0 {
		c.t.Fatalf("consoles of %s: %v, %v", prefix, all, err)
	}
	for _, name := range all {
		b, err := os.ReadFile(name)
		if err != nil {
			c.t.Fatal(err)
		}
		for _, text := range texts {
			if !strings.Contains(string(b), text) {
				c.t.Errorf("%s lacks %q", name, text)
			}
		}
	}
}

// generation verifies the cluster, and returns by which generation its one control plane is certified.
func (c *cloud) generation() uint32 {
	c.t.Helper()
	var v engine.Verification
	if err := json.Unmarshal([]byte(c.run(time.Minute, "verify", "-o", "json").want(plan.ExitDone).stdout), &v); err != nil {
		c.t.Fatal(err)
	}
	if len(v.Machines) != 1 || v.Machines[0].Certifier == nil || v.Machines[0].WithoutAPI {
		c.t.Fatalf("verified %+v", v.Machines)
	}
	return v.Machines[0].Certifier.Generation
}

// TestGoogleCloudOfSimulatedMachines makes a cluster in an emulated Google Cloud, and replaces all of its machines. The
// console, the operator and the machines use it as they would use Google's.
func TestGoogleCloudOfSimulatedMachines(t *testing.T) {
	t.Parallel()
	c := newSimulated(t)
	up := []string{"sandbox", "up", "--cloud", "gcp", "--machines", "simulated"}
	c.run(time.Minute, append(up, "--fault", "lost-delete=0.5")...).want(plan.ExitUsage)
	c.run(time.Minute, append(up, "--control-planes", "1", "--workers", "1", "--image", "v1.0.0")...).want(plan.ExitDone)
	c.run(time.Minute, "sandbox", "up", "--cloud", "sandbox").want(plan.ExitUsage) // it is another one
	if out := c.run(time.Minute, "sandbox", "fault", "set", "lost-delete=0.5").want(plan.ExitUsage).stderr; !strings.Contains(out, "only the sandbox's own cloud can") {
		t.Errorf("a fault was refused with %s", out)
	}
	c.run(8*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	const oldImage, newImage = "constellation-v1-0-0", "constellation-v1-1-0"
	c.wantVersions(oldImage, current, 1, 1)
	for id := range strings.FieldsSeq(c.kubectl("get", "nodes", "-o", "jsonpath={.items[*].spec.providerID}")) {
		if !strings.HasPrefix(id, "gce://sandbox-"+c.name()+"/europe-west3-a/") {
			t.Errorf("a Node has the provider ID %s", id)
		}
	}

	c.wantConsole("control-pla", `"msg":"certifier started","generation":1`, `"msg":"attestation key certified"`)
	c.wantConsole("worker", `"msg":"certificate of this machine received"`)
	verified := c.run(time.Minute, "verify")
	verified.want(plan.ExitDone)
	if !strings.Contains(verified.stdout, "a TPM and the measurements of the configuration") {
		t.Errorf("verify prints\n%s", verified.stdout)
	}

	// A new daemon finds groups, operations and tokens again.
	if err := unix.Kill(c.daemonPID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.run(time.Minute, "sandbox", "up").want(plan.ExitDone)
	c.run(time.Minute, "upgrade", "check", "--write-config", "--to", "v1.1.0", "--kubernetes", current).want(plan.ExitDone)
	c.run(time.Minute, "verify").want(plan.ExitBlocked) // the configuration describes the next image
	_, before := c.emulated()
	begun := time.Now()
	c.run(15*time.Minute, "upgrade", "apply", "--non-interactive", "--yes").want(plan.ExitDone)
	took := time.Since(begun)
	_, after := c.emulated()
	c.wantVersions(newImage, current, 1, 1)
	c.wantConsole("control-pla", `"msg":"certifier keys sealed"`, `"msg":"certifier started","generation":1`)
	if g := c.generation(); g != 1 {
		t.Errorf("the certificate of the new control plane is of generation %d", g)
	}
	c.run(3*time.Minute, "certifier", "rotate", "--reason", "a drill", "--non-interactive", "--yes").want(plan.ExitDone)
	if g := c.generation(); g != 2 {
		t.Errorf("after a rotation, it is of generation %d", g)
	}
	c.wantConsole("control-pla", `"msg":"certifier keys rotated","caller_pid"`)
	if record := c.kubectl("-n", "kube-system", "get", "configmap", "join-config", "-o", "yaml"); !strings.Contains(record, "generation 2 by ") || !strings.Contains(record, ": a drill") {
		t.Errorf("the rotation is not recorded:\n%s", record)
	}
	c.kubectl("-n", "kube-system", "patch", "configmap", "join-config", "--type=merge", "-p", `{"data":{"certifierRotation":"{}"}}`)
	c.run(time.Minute, "certifier", "rotate", "--non-interactive", "--yes").want(plan.ExitBlocked)
	c.run(2*time.Minute, "upgrade", "apply", "--non-interactive", "--yes", "--to", "v1.1.0", "--kubernetes", current).want(plan.ExitNothing)
	c.wantNoProblems()
	t.Logf("2 machines were replaced in %v with %.1f calls for each", took.Round(time.Second), float64(after-before)/2)
}

// TestGoogleCloudOfRealMachines does the same with real machines, whose systemd starts the certifier, while the API throttles and
// fails.
func TestGoogleCloudOfRealMachines(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_GCP", "six minutes on two real machines in an emulated Google Cloud")
	c := newCloud(t, 1, 1, "--cloud", "gcp", "--machines", "real", "--image", "v1.0.0")
	c.run(8*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	c.wantVersions("constellation-v1-0-0", current, 1, 1)
	if g := c.generation(); g != 1 {
		t.Errorf("the certificate of the control plane is of generation %d", g)
	}
	c.run(time.Minute, "upgrade", "check", "--write-config", "--to", "v1.1.0", "--kubernetes", current).want(plan.ExitDone)
	_, before := c.emulated()
	begun := time.Now()
	applied := c.meanwhile(20*time.Minute, "upgrade", "apply", "--non-interactive", "--yes")
	// Faults from then on do not stop the checks before the rollout.
	c.eventually(5*time.Minute, "the rollout begins", func(out string) bool { return strings.TrimSpace(out) != "" },
		"get", "pendingnodes,joiningnodes", "-A", "-o", "name", "--ignore-not-found")
	c.run(time.Minute, "sandbox", "fault", "set", "api-500=0.1", "api-429=0.1").want(plan.ExitDone)
	applied().want(plan.ExitDone)
	took := time.Since(begun)
	c.run(time.Minute, "sandbox", "fault", "clear").want(plan.ExitDone)
	_, after := c.emulated()
	c.wantVersions("constellation-v1-1-0", current, 1, 1)
	if g := c.generation(); g != 1 {
		t.Errorf("the certificate of the new control plane is of generation %d", g)
	}
	c.run(3*time.Minute, "certifier", "rotate", "--non-interactive", "--yes").want(plan.ExitDone)
	if g := c.generation(); g != 2 {
		t.Errorf("after a rotation, it is of generation %d", g)
	}
	c.wantNoProblems()
	t.Logf("2 real machines were replaced in %v with %.1f calls for each", took.Round(time.Second), float64(after-before)/2)
}
