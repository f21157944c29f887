package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud/machines"
	"constellation/engine/plan"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/machine"
	"constellation/internal/testneeds"
)

// tpmSocket is the TPM of a machine of the sandbox, as the machine sees it.
const tpmSocket = "unix:/var/lib/constellation-tpm/tpm.sock"

// Linux machines whose keys are in their TPMs become a cluster, attackers of its join service are refused with the reason,
// and it is upgraded in place. With three control planes, one loses power while its agent upgrades it. The variable has the
// size.
//
// It takes 10 minutes with 1+2, so it is opt-in:
//
//	CONSTELLATION_E2E_ENROL_TPM=1+2 go test -timeout 30m -run TestEnrolledMachinesWithTPMs .
//	CONSTELLATION_E2E_ENROL_TPM=3+2 go test -timeout 40m -run TestEnrolledMachinesWithTPMs .
func TestEnrolledMachinesWithTPMs(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ENROL_TPM", "ten minutes")
	const to = "v1.37.2"
	testneeds.Kubernetes(t, to)
	controlPlanes, workers := 1, 2
	if size := os.Getenv("CONSTELLATION_E2E_ENROL_TPM"); strings.Contains(size, "+") {
		if n, err := fmt.Sscanf(size, "%d+%d", &controlPlanes, &workers); n != 2 || err != nil || controlPlanes < 1 || workers < 2 {
			t.Fatalf("CONSTELLATION_E2E_ENROL_TPM is %q, want 1 or a size such as 3+2", size)
		}
	}
	c := newReal(t)
	c.up(controlPlanes, workers+1)
	all := machineNames(controlPlanes, workers)
	stranger := fmt.Sprintf("worker-%d", workers) // in the network, and in no list
	a, login, connect := c.owner(append(all[:len(all):len(all)], stranger))

	a.run(time.Minute, "config", "generate", "machines").want(plan.ExitDone)
	a.edit("endpoint: api.example.com", "endpoint: 10.42.0.1")
	add := func(group string, names ...string) {
		t.Helper()
		args := []string{"machine", "add", "--group", group, "--tpm", tpmSocket, "--yes"}
		for _, n := range names {
			args = append(args, "--ssh", login[n])
		}
		a.run(3*time.Minute, args...).want(plan.ExitDone)
	}
	begin := time.Now()
	add("control-plane", all[:controlPlanes]...)
	add("worker", all[controlPlanes:]...)
	took := time.Since(begin).Round(100 * time.Millisecond)
	t.Logf("enrolment of %d machines: %s", len(all), took)
	if took > time.Minute {
		t.Errorf("enrolment of %d machines took %s, want at most a minute", len(all), took)
	}
	conf, err := os.ReadFile(filepath.Join(a.dir, "constellation-conf.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, field := range []string{"attested: true", `ek: "sha256:`, `tpm: "` + tpmSocket + `"`} {
		if n := bytes.Count(conf, []byte(field)); n != len(all) {
			t.Errorf("%d rows of the list have %s, want %d:\n%s", n, field, len(all), conf)
		}
	}
	a.edit("    machines:\n", a.componentRows(build.DefaultVersion, to)+"    machines:\n")

	connect()
	begin = time.Now()
	a.run(10*time.Minute, "init", "--yes", "-o", "json").wantAttested()
	t.Logf("init: %s", time.Since(begin).Round(time.Second))
	a.wantNodes(all...)
	a.run(time.Minute, "status").wantAttested()
	a.run(time.Minute, "status", "-o", "json").wantAttested()
	if out := a.run(time.Minute, "machine", "list").want(plan.ExitDone).stdout; strings.Count(out, " TPM ") != len(all) {
		t.Errorf("machine list:\n%s", out)
	}

	c.attacksJoins(a, login, stranger)
	c.changesFirmware(a, "worker-0")

	a.run(time.Minute, "upgrade", "check", "--kubernetes", to).wantAttested()
	if controlPlanes > 2 {
		c.losesPowerInUpgrade("control-plane-1")
	}
	begin = time.Now()
	a.run(20*time.Minute, "upgrade", "apply", "--kubernetes", to, "--yes", "-o", "json").wantAttested()
	t.Logf("apply: %s", time.Since(begin).Round(time.Second))
	if is, want := a.kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.nodeInfo.kubeletVersion}"), strings.TrimSpace(strings.Repeat(to+" ", len(all))); is != want {
		t.Errorf("kubelets run %q, want %s", is, to)
	}
	a.wantNodes(all...)
	a.run(time.Minute, "status").wantAttested()

	// Root on a worker gets no other identity, and stays revoked.
	const captured, controlPlane = "worker-1", "control-plane-0"
	c.administers(a)
	c.wantGuarded("after the upgrade")
	c.staysItself(captured, controlPlane)
	a.run(5*time.Minute, "machine", "revoke", captured, "--reason", "captured", "--yes", "-o", "json").wantAttested()
	a.eventually(2*time.Minute, "the Node of the revoked worker is deleted", func(out string) bool { return !strings.Contains(out, captured) }, "get", "nodes", "-o", "name")
	a.wantRefused(captured, "was revoked")
}

// changesFirmware has a member's TPM measure something else, which the status of its cluster reports until its
// administrator ends that.
func (c *cloud) changesFirmware(a *cloud, name string) {
	t := c.t
	t.Helper()
	a.eventually(2*time.Minute, "the registers of all machines are recorded", func(out string) bool {
		return strings.Count(out, "values") == len(strings.Fields(a.kubectl("get", "nodes", "-o", "name")))
	}, "-n", "constellation-system", "get", "configmap", machines.RegistersConfigMap, "-o", "jsonpath={.data}")
	if s := a.run(time.Minute, "status").want(plan.ExitDone).stdout; strings.Contains(s, "another boot") {
		t.Errorf("before the change:\n%s", s)
	}
	dirs, err := sandbox.DefaultDirs()
	if err != nil {
		t.Fatal(err)
	}
	tpm := filepath.Join(dirs.State, "sandbox", c.name(), "m", name, "tpm", "port")
	change := []attestation.MeasuredEvent{{PCR: 7, Digest: bytes.Repeat([]byte{7}, 32), Description: "other keys of Secure Boot"}}
	if err := attestationtest.Measure(t.Context(), "unix:"+filepath.Join(tpm, "tpm.sock"), filepath.Join(tpm, machine.EventLogName), change); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	a.eventually(2*time.Minute, "the change is recorded", func(out string) bool { return strings.Contains(out, `"changed":[7]`) },
		"-n", "constellation-system", "get", "configmap", machines.RegistersConfigMap, "-o", "jsonpath={.data."+name+"}")
	t.Logf("a change of register 7 was recorded after %s", time.Since(began).Round(time.Second))
	if s := a.run(time.Minute, "status").want(plan.ExitDone).stdout; !strings.Contains(s, "another boot") || !strings.Contains(s, name) {
		t.Errorf("after the change:\n%s", s)
	}
	a.kubectl("-n", "constellation-system", "patch", "configmap", machines.RegistersConfigMap, "--type", "merge", "-p", `{"data":{"`+name+`":null}}`)
	if s := a.run(time.Minute, "status").want(plan.ExitDone).stdout; strings.Contains(s, "another boot") {
		t.Errorf("after its end:\n%s", s)
	}
}

// administers gives c, outside of the machines' network, the kubeconfig of a's cluster.
func (c *cloud) administers(a *cloud) {
	c.t.Helper()
	var sandbox struct{ ClusterEndpoint string }
	if err := json.Unmarshal([]byte(c.run(time.Minute, "sandbox", "status", "-o", "json").want(plan.ExitDone).stdout), &sandbox); err != nil || sandbox.ClusterEndpoint == "" {
		c.t.Fatalf("sandbox status has no address of the API server: %v", err)
	}
	const name = "constellation-admin.conf"
	b, err := os.ReadFile(filepath.Join(a.dir, name))
	if err == nil {
		b = bytes.Replace(b, []byte("server: https://10.42.0.1:6443"), []byte("server: https://"+sandbox.ClusterEndpoint+"\n    tls-server-name: 10.42.0.1"), 1)
		err = os.WriteFile(filepath.Join(c.dir, name), b, 0o600)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// wantAttested fails the test unless the command succeeded and reports no machine as not attested.
func (r *result) wantAttested() *result {
	r.c.t.Helper()
	r.want(plan.ExitDone)
	for line := range strings.Lines(r.stdout + r.stderr) {
		if strings.Contains(line, "not attested") || strings.Contains(line, "notAttested") {
			r.c.t.Errorf("constellation %s: %s", strings.Join(r.args, " "), line)
		}
	}
	return r
}

// wantError fails the test unless stderr has a text.
func (r *result) wantError(text string) {
	r.c.t.Helper()
	if !strings.Contains(r.stderr, text) {
		r.c.t.Errorf("constellation %s: stderr lacks %q:\n%s", strings.Join(r.args, " "), text, tail(r.stderr))
	}
}

// attacksJoins attacks the join service of a's cluster from a machine that is not in its list.
func (c *cloud) attacksJoins(a *cloud, login map[string]string, stranger string) {
	t := c.t
	t.Helper()
	const worker = "worker-0"
	nodes := a.kubectl("get", "nodes", "-o", "name")

	// The disk of a worker in another machine: its programs, its configuration, and the reference to a key in its TPM.
	c.copies(worker, stranger, "etc/constellation", "etc/systemd/system", "usr/lib/constellation", "var/lib/constellation-identity", "var/lib/constellation-enrolment")
	c.asRoot(stranger, "systemctl daemon-reload && systemctl start constellation-bootstrapper")
	c.wantLogged(stranger, "constellation-bootstrapper", "its TPM is not the one that made the key: the identity was copied from another machine")

	// Its owner adds the copy, with the journal of the worker, under its own name, under that of the worker, and without the journal.
	add := []string{"machine", "add", "--tpm", tpmSocket, "--yes", "--ssh", login[stranger]}
	a.run(time.Minute, add...).want(plan.ExitBlocked).wantError("it has the journal of worker-0, which is another machine of this cluster: its disk was copied")
	a.run(time.Minute, append(add, "--name", worker)...).want(plan.ExitBlocked).wantError("it was reinstalled, or another machine has that name")
	c.asRoot(stranger, "rm -r /var/lib/constellation-enrolment")
	a.run(time.Minute, add...).want(plan.ExitFailed).wantError("the identity was copied from another machine, or the TPM was replaced")
	c.asRoot(stranger, `systemctl stop constellation-bootstrapper constellation-agent kubelet
rm -rf /etc/constellation /etc/systemd/system/{constellation-*,kubelet*} /usr/lib/constellation/{bootstrapper,agent} /var/lib/constellation /var/lib/constellation-identity /var/lib/constellation-enrolment; systemctl daemon-reload`)

	// A machine that was removed, with the certificate that it had.
	a.run(time.Minute, add...).want(plan.ExitDone)
	c.asRoot(stranger, "systemctl stop constellation-bootstrapper && mkdir /root/kept && cp -a --parents /etc/constellation /etc/systemd/system /usr/lib/constellation /var/lib/constellation-identity /root/kept")
	a.run(3*time.Minute, "machine", "remove", stranger, "--ssh", login[stranger], "--yes").want(plan.ExitDone)
	c.asRoot(stranger, "cp -a /root/kept/. / && rm -r /root/kept && systemctl daemon-reload && systemctl start constellation-bootstrapper")
	c.wantLogged(stranger, "constellation-bootstrapper", "does not list this instance yet, or no longer")
	a.wantRefused(stranger, "does not list this instance yet, or no longer")

	c.asRoot(stranger, "systemctl stop constellation-bootstrapper")
	if now := a.kubectl("get", "nodes", "-o", "name"); now != nodes {
		t.Errorf("nodes were\n%sand are\n%s", nodes, now)
	}
}

// copies copies files of a machine, by their paths below /, to another one.
func (c *cloud) copies(from, to string, files ...string) {
	c.t.Helper()
	packed, err := c.command(c.t.Context(), append([]string{"sandbox", "shell", from, "--", "tar", "-C", "/", "-c"}, files...)...).Output()
	if err != nil {
		c.t.Fatalf("pack files of %s: %v", from, err)
	}
	cmd := c.command(c.t.Context(), "sandbox", "shell", to, "--", "tar", "-C", "/", "-x")
	cmd.Stdin = bytes.NewReader(packed)
	if out, err := cmd.CombinedOutput(); err != nil {
		c.t.Fatalf("unpack files on %s: %v\n%s", to, err, out)
	}
}

// wantLogged waits until a unit of a machine has logged a text.
func (c *cloud) wantLogged(machine, unit, text string) {
	c.t.Helper()
	if out, code := c.asRoot(machine, `for i in $(seq 60); do journalctl -q -u "$1" --since -5min | grep -qF "$2" && exit 0; read -t 1 <> <(:) || :; done; journalctl -q -u "$1" -n 20; exit 1`, unit, text); code != 0 {
		c.t.Errorf("%s on %s has not logged %q:\n%s", unit, machine, text, out)
	}
}

// wantRefused waits until a join service has logged that it refused a ticket to a machine for a reason.
func (c *cloud) wantRefused(machine, reason string) {
	c.t.Helper()
	c.eventually(time.Minute, "the join service refuses "+machine, func(out string) bool {
		for line := range strings.Lines(out) {
			var entry struct{ Msg, Node, Err string }
			if json.Unmarshal([]byte(line), &entry) == nil && entry.Msg == "join ticket refused" && entry.Node == machine && strings.Contains(entry.Err, reason) {
				return true
			}
		}
		return false
	}, "-n", "constellation-system", "logs", "-l", "app.kubernetes.io/name=joinservice", "--tail=-1")
}
