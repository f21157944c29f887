package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/kms"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/internal/testneeds"
)

const (
	secretCanary = "canary-8b5d20c6f1"
	openCanary   = "open-77e3a1b9"
)

// TestSecretsOfSimulatedMachinesAreEncrypted makes a cluster, adds control planes, and cuts the power of all machines at once.
func TestSecretsOfSimulatedMachinesAreEncrypted(t *testing.T) {
	t.Parallel()
	encryptsSecrets(t, simulatedMachines)
}

// TestSecretsOfRealMachinesAreEncrypted does the same on real machines, where units start the key service.
func TestSecretsOfRealMachinesAreEncrypted(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ENCRYPTION", "five minutes on three real control planes")
	encryptsSecrets(t, realMachines)
}

func encryptsSecrets(t *testing.T, kind machineKind) {
	c, _ := newCluster(t, kind, 1, 0)
	if state := read(t, c.dir+"/"+workspace.StateFile); !strings.Contains(state, "encryptsSecrets: true") {
		t.Fatalf("the state does not record the encryption:\n%s", state)
	}
	all := []string{"control-plane-0", "control-plane-1", "control-plane-2"}
	c.kubectl("create", "secret", "generic", "first", "--from-literal=v="+secretCanary)
	c.kubectl("create", "configmap", "open", "--from-literal=v="+openCanary)
	for n := 2; n <= len(all); n++ { // one after the other: each gets the keys of another one
		c.run(time.Minute, "sandbox", "up", "--control-planes", fmt.Sprint(n)).want(plan.ExitDone)
		c.eventually(5*time.Minute, "the control plane joined", func(out string) bool {
			return strings.Count(out, "True") == n
		}, "get", "nodes", "-l", "node-role.kubernetes.io/control-plane", "-o", `jsonpath={range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`)
	}
	value := func(name string) string {
		t.Helper()
		b, err := base64.StdEncoding.DecodeString(c.kubectl("get", "secret", name, "-o", "jsonpath={.data.v}"))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	c.kubectl("create", "secret", "generic", "second", "--from-literal=v="+secretCanary)

	begun := time.Now()
	c.run(2*time.Minute, "sandbox", "machine", "power-cut", "--all").want(plan.ExitDone)
	c.wantReady(begun, all)
	for _, name := range []string{"first", "second"} {
		if v := value(name); v != secretCanary {
			t.Errorf("after a power cut, Secret %s is %q", name, v)
		}
	}
	at := ""
	if kind == simulatedMachines { // the shell starts in the machine's root directory
		at = "."
	}
	for _, m := range all {
		// The ConfigMap shows that the search finds something. grep exits with 1 if it finds nothing, and with 2 if it cannot
		// read something. A file that etcd removes meanwhile is not there to be read at the next try.
		c.shell(time.Minute, m, nil, fmt.Sprintf(`grep -rqF -e %[1]s %[3]s/var/lib/etcd || exit 1
for try in 1 2 3; do rc=0; grep -rlF -e %[2]s %[3]s/var/lib/etcd %[3]s/etc %[3]s/var/lib/constellation || rc=$?; [ "$rc" = 2 ] || break; done
[ "$rc" = 1 ]`, openCanary, secretCanary, at))
		c.shell(time.Minute, m, nil, fmt.Sprintf("grep -q encryption-provider-config= %s/etc/kubernetes/manifests/kube-apiserver.yaml", at))
	}
	if out := c.kubectl("get", "--raw", "/readyz?verbose"); !strings.Contains(out, "[+]kms-providers ok") {
		t.Errorf("the API server reports\n%s", out)
	}
	c.rotatesKeys(all, at)
	c.recoversKeys(all, at, value)
}

// rotatesKeys rotates the key that encrypts Secrets, and starts an interrupted rotation again.
func (c *cloud) rotatesKeys(all []string, at string) {
	t := c.t
	t.Helper()
	id := func(generation uint32) string {
		t.Helper()
		w, err := workspace.OpenWorkspace(c.dir)
		if err != nil {
			t.Fatal(err)
		}
		m, err := w.MasterSecret()
		if err != nil {
			t.Fatal(err)
		}
		k, err := kms.First(m.KMSSecret(), generation)
		if err != nil {
			t.Fatal(err)
		}
		return k.ID()
	}
	c.run(time.Minute, "encryption", "rotate", "--dry-run", "--non-interactive", "--yes").want(plan.ExitDone)
	begun := time.Now()
	c.run(5*time.Second, "encryption", "rotate", "--non-interactive", "--yes", "--timeout", "3s") // it waits for API servers when it is stopped
	c.run(5*time.Minute, "encryption", "rotate", "--non-interactive", "--yes").want(plan.ExitDone)
	t.Logf("the key was rotated in %s", time.Since(begun).Round(100*time.Millisecond))
	var status engine.EncryptionStatus
	out := c.run(time.Minute, "encryption", "status", "-o", "json").want(plan.ExitDone).stdout
	if err := json.Unmarshal([]byte(out), &status); err != nil || status.Generation != 2 || status.Recorded != 2 || !status.Rewritten || len(status.APIServers) != len(all) {
		t.Fatalf("status %s, %v", out, err)
	}
	for _, a := range status.APIServers {
		if a.Generation != 2 {
			t.Errorf("the API server of %s encrypts with generation %d (%s)", a.Node, a.Generation, a.Problem)
		}
	}
	for _, m := range all {
		c.shell(time.Minute, m, nil, fmt.Sprintf("grep -rqF %s %s/var/lib/etcd", id(2), at))
	}
}

// recoversKeys has all control planes lose their keys and their power.
func (c *cloud) recoversKeys(all []string, at string, value func(string) string) {
	t := c.t
	t.Helper()
	c.run(time.Minute, "recover", "--non-interactive", "--yes", "--timeout", "30s").want(plan.ExitNothing)
	for _, m := range all {
		c.shell(time.Minute, m, nil, fmt.Sprintf("rm %s/var/lib/constellation/kms-key.json", at))
	}
	begun := time.Now()
	c.run(2*time.Minute, "sandbox", "machine", "power-cut", "--all").want(plan.ExitDone)
	secret := c.dir + "/" + workspace.MasterSecretFile
	if err := os.Rename(secret, secret+".kept"); err != nil {
		t.Fatal(err)
	}
	c.run(time.Minute, "recover", "--non-interactive", "--yes").want(plan.ExitUsage)
	if err := os.Rename(secret+".kept", secret); err != nil {
		t.Fatal(err)
	}
	c.run(5*time.Minute, "recover", "--non-interactive", "--yes").want(plan.ExitDone)
	t.Logf("all control planes had their keys %s after they lost their power", time.Since(begun).Round(100*time.Millisecond))
	c.wantReady(begun, all)
	for _, name := range []string{"first", "second"} {
		if v := value(name); v != secretCanary {
			t.Errorf("after a recovery, Secret %s is %q", name, v)
		}
	}
	c.kubectl("create", "secret", "generic", "third", "--from-literal=v="+secretCanary)
	for _, m := range all {
		c.shell(time.Minute, m, nil, fmt.Sprintf("test -s %s/var/lib/constellation/kms-key.json", at))
	}
	// The next boot needs no owner.
	begun = time.Now()
	c.run(2*time.Minute, "sandbox", "machine", "power-cut", "--all").want(plan.ExitDone)
	c.wantReady(begun, all)
	if v := value("third"); v != secretCanary {
		t.Errorf("after another power cut, a Secret is %q", v)
	}
}
