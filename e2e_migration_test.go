package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/internal/testneeds"
)

// TestExistingClusterOfSimulatedMachinesIsEncrypted upgrades a cluster that stores Secrets as they are. No console is there while its control
// plane is replaced. The configuration keeps the measurements of the former image: flags name the target.
func TestExistingClusterOfSimulatedMachinesIsEncrypted(t *testing.T) {
	t.Parallel()
	encryptsExisting(t, simulatedMachines, 1, "--to", "v1.1.0", "--kubernetes", current)
}

// TestExistingClusterOfThreeSimulatedControlPlanesIsEncrypted does the same with three of them.
func TestExistingClusterOfThreeSimulatedControlPlanesIsEncrypted(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ENCRYPTION", "five minutes with four API servers")
	encryptsExisting(t, simulatedMachines, 3)
}

// TestExistingClusterOfRealMachinesIsEncrypted does the same on real machines, with kubeadm itself and units.
func TestExistingClusterOfRealMachinesIsEncrypted(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ENCRYPTION", "ten minutes on three real control planes")
	encryptsExisting(t, realMachines, 3)
}

// encryptsExisting encrypts a cluster by an upgrade to the target that flags name, or to the next hop.
func encryptsExisting(t *testing.T, kind machineKind, controlPlanes int, target ...string) {
	old := []string{"--release", "v1.0.0", "--image", "v1.0.0"}
	var c *cloud
	if kind == realMachines {
		c = newCloud(t, controlPlanes, 0, old...)
	} else {
		c = newSimulated(t)
		c.run(time.Minute, append([]string{"sandbox", "up", "--machines", "simulated", "--control-planes", fmt.Sprint(controlPlanes), "--workers", "0"}, old...)...).want(plan.ExitDone)
	}
	file := filepath.Join(c.dir, workspace.ConfigFile)
	config := read(t, file)
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const off = "\nencryptSecrets: false\n"
	write(config + off)
	c.run(8*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	c.wantStored("first", false)
	const announced = "This upgrade encrypts the Secrets of the cluster in etcd."
	apply := append([]string{"upgrade", "apply", "--non-interactive", "--yes"}, target...)
	if len(target) == 0 {
		if out := c.run(time.Minute, "upgrade", "check", "--write-config").want(plan.ExitDone).stdout; strings.Contains(out, announced) {
			t.Errorf("the check announces an encryption in spite of `encryptSecrets: false`:\n%s", out)
		}
	}
	if out := c.run(2*time.Minute, append(apply, "--dry-run")...).want(plan.ExitDone).stdout; strings.Contains(out, "prepare-encryption") {
		t.Errorf("`encryptSecrets: false` does not leave Secrets as they are:\n%s", out)
	}
	write(strings.Replace(read(t, file), off, "\n", 1))
	if out := c.run(time.Minute, "upgrade", "check").stdout; len(target) == 0 && !strings.Contains(out, announced) {
		t.Errorf("the check does not announce the encryption:\n%s", out)
	}
	former := strings.Fields(c.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"))
	c.run(5*time.Minute, append(apply, "--detach")...).want(plan.ExitDone)
	c.wantState("encryptionPending: true")
	c.eventually(15*time.Minute, "all control planes are new", func(out string) bool {
		return strings.Count(out, " True") == controlPlanes && !slices.ContainsFunc(former, func(name string) bool { return strings.Contains(out, name+" ") })
	}, "get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`)

	// All of them wait for keys, also after a loss of power. The first console ends while it waits.
	begun := time.Now()
	names := strings.Fields(c.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"))
	c.run(2*time.Minute, "sandbox", "machine", "power-cut", "--all").want(plan.ExitDone)
	c.wantReady(begun, names)
	c.wantStored("second", false)
	c.run(30*time.Second, append(apply, "--timeout", "15s")...)
	begun = time.Now()
	c.run(8*time.Minute, apply...).want(plan.ExitDone)
	t.Logf("after an interruption, the cluster encrypts within %s", time.Since(begun).Round(100*time.Millisecond))
	c.wantState("encryptsSecrets: true")
	if state := read(t, c.dir+"/"+workspace.StateFile); strings.Contains(state, "encryptionPending") {
		t.Errorf("the state has a pending encryption:\n%s", state)
	}
	c.wantStored("third", true)
	for _, name := range []string{"first", "second"} {
		if v := c.kubectl("get", "secret", name, "-o", "jsonpath={.data.v}"); v == "" {
			t.Errorf("Secret %s lost its value", name)
		}
	}
	if r := c.run(2*time.Minute, append(apply, "--kubernetes", "v1.36.4")...); r.code != plan.ExitNothing {
		t.Errorf("another upgrade exits with %d, want %d:\n%s", r.code, plan.ExitNothing, r.stdout)
	}

	// Keys come back after a loss of power, and a further control plane gets them from another one.
	begun = time.Now()
	c.run(2*time.Minute, "sandbox", "machine", "power-cut", "--all").want(plan.ExitDone)
	c.wantReady(begun, names)
	c.eventually(time.Minute, "the API server is ready with its key service", func(out string) bool {
		return strings.Contains(out, "[+]kms-providers ok")
	}, "get", "--raw", "/readyz?verbose")
	c.run(time.Minute, "sandbox", "up", "--control-planes", fmt.Sprint(controlPlanes+1)).want(plan.ExitDone)
	c.eventually(5*time.Minute, "the control plane joined", func(out string) bool {
		return strings.Count(out, "True") == controlPlanes+1
	}, "get", "nodes", "-l", "node-role.kubernetes.io/control-plane", "-o", `jsonpath={range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`)
	c.eventually(2*time.Minute, "all API servers encrypt", func(string) bool {
		return strings.Count(c.run(time.Minute, "encryption", "status").want(plan.ExitDone).stdout, "encrypts with generation 1") == controlPlanes+1
	}, "get", "nodes")

	// And back.
	if r := c.run(time.Minute, "encryption", "disable", "--non-interactive", "--yes"); r.code != plan.ExitUsage {
		t.Errorf("`encryption disable` exits with %d although the next upgrade would encrypt, want %d:\n%s", r.code, plan.ExitUsage, r.stderr)
	}
	write(read(t, file) + off)
	c.run(time.Minute, "encryption", "disable", "--dry-run", "--non-interactive", "--yes").want(plan.ExitDone)
	c.run(10*time.Second, "encryption", "disable", "--non-interactive", "--yes", "--timeout", "3s")
	c.run(5*time.Minute, "encryption", "disable", "--non-interactive", "--yes").want(plan.ExitDone)
	c.wantStored("fourth", false)
	if out := c.run(time.Minute, "encryption", "status").want(plan.ExitDone).stdout; !strings.Contains(out, "not encrypted") {
		t.Errorf("status after `encryption disable`:\n%s", out)
	}
}

// wantStored makes a Secret, and finds out from the file of etcd whether it was encrypted.
func (c *cloud) wantStored(name string, encrypted bool) {
	t := c.t
	t.Helper()
	canary := "canary-" + name + fmt.Sprint(time.Now().UnixNano())
	c.kubectl("create", "secret", "generic", name, "--from-literal=v="+canary)
	c.kubectl("create", "configmap", name, "--from-literal=v=open-"+canary)
	at := ""
	if !c.real {
		at = "."
	}
	node := strings.Fields(c.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"))[0]
	// Both are in the log of etcd before the writes are answered. The ConfigMap has the same text after another prefix. One search sees
	// both, because etcd copies them meanwhile.
	want := "!"
	if !encrypted {
		want = ""
	}
	c.shell(time.Minute, node, nil, fmt.Sprintf(`found=$(grep -raohE '.{0,5}%[1]s' %[2]s/var/lib/etcd); grep -qF open-%[1]s <<<"$found" || exit 1
%[3]s grep -qvF open-%[1]s <<<"$found"`, canary, at, want))
}

func (c *cloud) wantState(text string) {
	c.t.Helper()
	if state := read(c.t, c.dir+"/"+workspace.StateFile); !strings.Contains(state, text) {
		c.t.Errorf("the state has no %q:\n%s", text, state)
	}
}
