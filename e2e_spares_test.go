package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/internal/testneeds"
)

// A group of enrolled machines gets spares: it is scaled up, loses a machine and gets another one, and is scaled down. The
// machine that leaves resets itself, cannot act as its Node any more, and is a spare. So is the lost one when it is back.
//
// It takes ten minutes, so it is opt-in:
//
//	CONSTELLATION_E2E_ENROL=1 go test -run TestSparesOfEnrolledMachines .
func TestSparesOfEnrolledMachines(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ENROL", "ten minutes")
	c := newReal(t)
	c.up(1, 3)
	a, login, connect := c.owner(machineNames(1, 3))
	a.run(time.Minute, "config", "generate", "machines").want(plan.ExitDone)
	a.edit("endpoint: api.example.com", "endpoint: 10.42.0.1")
	const add = 3 * time.Minute
	a.run(add, "machine", "add", "--ssh", login["control-plane-0"], "--group", "control-plane", "--yes").want(plan.ExitDone)
	a.run(add, "machine", "add", "--ssh", login["worker-0"], "--label", "disk=ssd", "--taint", "batch=yes:NoSchedule", "--yes").want(plan.ExitDone)
	a.run(add, "machine", "add", "--ssh", login["worker-1"], "--ssh", login["worker-2"], "--spare", "--label", "kind=spare", "--yes").want(plan.ExitDone)
	a.edit("    machines:\n", "    replaceAfter: 1m\n"+a.componentRows(build.DefaultVersion)+"    machines:\n")
	connect()
	a.run(10*time.Minute, "init", "--yes").want(plan.ExitDone)
	a.wantNodes("control-plane-0", "worker-0")
	const settings = "jsonpath={.metadata.labels.disk} {.metadata.labels.kind} {.spec.taints[?(@.key=='batch')].value}"
	a.eventually(2*time.Minute, "label and taint of worker-0", func(out string) bool { return strings.Fields(out + " -")[0] == "ssd" && strings.HasSuffix(out, "yes") }, "get", "node", "worker-0", "-o", settings)
	a.usable("worker-1", "worker-2")

	resize := func(from, to string) {
		t.Helper()
		a.edit(from, to)
		a.run(5*time.Minute, "init", "--yes").want(plan.ExitDone)
	}
	begin := time.Now()
	resize("    machines:\n    ", "    workers: 2\n    machines:\n    ")
	took := func(what string) { t.Helper(); t.Logf("%s: %s", what, time.Since(begin).Round(time.Second)) }
	took("scaled up to 2 workers")
	first, second := "worker-1", "worker-2"
	if strings.Contains(a.kubectl("get", "nodes", "-o", "name"), second) {
		first, second = second, first
	}
	a.wantNodes("control-plane-0", "worker-0", first)
	a.eventually(time.Minute, "label of the spare", func(out string) bool { return strings.TrimSpace(out) == "spare" }, "get", "node", first, "-o", settings)

	// A machine loses power. A spare takes its place.
	begin = time.Now()
	c.run(time.Minute, "sandbox", "machine", "off", "worker-0").want(plan.ExitDone)
	a.eventually(6*time.Minute, second+" takes the place of worker-0", func(out string) bool {
		return strings.Contains(out, second+" True") && !strings.Contains(out, "worker-0")
	}, "get", "nodes", "-o", "jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}")
	took("a worker that lost power replaced")
	a.eventually(time.Minute, "the list shows that worker-0 is no spare yet", func(string) bool {
		return strings.Contains(a.run(time.Minute, "machine", "list").stdout, "spare, not usable: it has not reset itself")
	}, "get", "nodes")
	begin = time.Now()
	c.run(time.Minute, "sandbox", "machine", "on", "worker-0").want(plan.ExitDone)
	a.usable("worker-0")
	took("the lost worker a spare again")

	// Scaled down. The machine that leaves keeps a copy of its identity, which is worth nothing.
	for _, m := range []string{first, second} {
		c.asRoot(m, "mkdir -p /root/stolen && cp -a /etc/kubernetes /var/lib/kubelet/pki /root/stolen/ && cp $(command -v kubectl || echo /usr/local/bin/kubectl) /root/stolen/kubectl")
	}
	begin = time.Now()
	resize("workers: 2", "workers: 1")
	gone := ""
	a.eventually(5*time.Minute, "one of the two spares leaves", func(out string) bool {
		for _, m := range []string{first, second} {
			if !strings.Contains(out, m) {
				gone = m
			}
		}
		return gone != ""
	}, "get", "nodes", "-o", "name")
	took("scaled down to 1 worker")
	out, code := c.asRoot(gone, "cd /root/stolen && sed 's#/var/lib/kubelet/pki#/root/stolen/pki#' kubernetes/kubelet.conf >conf && echo '{\"apiVersion\":\"v1\",\"kind\":\"Node\",\"metadata\":{\"name\":\""+gone+"\"}}' | ./kubectl --kubeconfig conf create -f -")
	if code == 0 || !strings.Contains(out, "released from its group") {
		t.Errorf("%s with its old identity: %d, %s", gone, code, out)
	}
	a.usable(gone)
	took("the machine that left a spare again")
	if out, _ := c.asRoot(gone, "ls /etc/kubernetes /var/lib/kubelet"); strings.Contains(out, "kubelet.conf") {
		t.Errorf("%s was not reset: %s", gone, out)
	}

	// No spare is left for a group that needs one: it waits, and everything says so.
	for _, m := range []string{"worker-0", gone} {
		c.run(time.Minute, "sandbox", "machine", "off", m).want(plan.ExitDone)
	}
	a.eventually(4*time.Minute, "the spares are silent", func(string) bool {
		return strings.Count(a.run(time.Minute, "machine", "list").stdout, "has not asked to join since") == 2
	}, "get", "nodes")
	a.edit("workers: 1", "workers: 2")
	a.run(30*time.Second, "init", "--yes", "--timeout", "20s")
	a.eventually(time.Minute, "the operator reports the shortage", func(out string) bool { return strings.Contains(out, "NoSpare") }, "get", "nodeversion", "constellation-version", "-o", "jsonpath={.status.waiting}")
	if out := a.run(time.Minute, "status").stdout; !strings.Contains(out, "waits for a spare") {
		t.Errorf("status:\n%s", out)
	}
	c.run(time.Minute, "sandbox", "machine", "on", gone).want(plan.ExitDone)
	a.eventually(3*time.Minute, gone+" joins", func(out string) bool { return strings.Contains(out, gone) }, "get", "nodes", "-o", "name")
}

// A control plane loses power, and a spare takes its place as a member of etcd too. When it is back, it resets itself and is a
// spare. So is the control plane that leaves when the group gets smaller.
//
//	CONSTELLATION_E2E_ENROL=1 go test -run TestSpareControlPlane .
func TestSpareControlPlane(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ENROL", "ten minutes")
	c := newReal(t)
	c.up(4, 0)
	a, login, connect := c.owner(machineNames(4, 0))
	a.run(time.Minute, "config", "generate", "machines").want(plan.ExitDone)
	a.edit("endpoint: api.example.com", "endpoint: 10.42.0.1")
	const add = 3 * time.Minute
	a.run(add, "machine", "add", "--group", "control-plane", "--ssh", login["control-plane-0"], "--ssh", login["control-plane-1"], "--ssh", login["control-plane-2"], "--yes").want(plan.ExitDone)
	a.run(add, "machine", "add", "--group", "control-plane", "--ssh", login["control-plane-3"], "--spare", "--yes").want(plan.ExitDone)
	a.edit("    machines:\n", "    replaceAfter: 1m\n"+a.componentRows(build.DefaultVersion)+"    machines:\n")
	connect()
	a.run(10*time.Minute, "init", "--yes").want(plan.ExitDone)
	a.wantNodes("control-plane-0", "control-plane-1", "control-plane-2")
	a.wantEtcdMembers(3)
	a.usable("control-plane-3")

	begin := time.Now()
	c.run(time.Minute, "sandbox", "machine", "off", "control-plane-2").want(plan.ExitDone)
	a.eventually(8*time.Minute, "control-plane-3 takes the place of control-plane-2", func(out string) bool {
		return strings.Contains(out, "control-plane-3 True") && !strings.Contains(out, "control-plane-2")
	}, "get", "nodes", "-o", "jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}")
	a.wantEtcdMembers(3)
	t.Logf("a control plane that lost power replaced: %s", time.Since(begin).Round(time.Second))

	begin = time.Now()
	c.run(time.Minute, "sandbox", "machine", "on", "control-plane-2").want(plan.ExitDone)
	a.usable("control-plane-2")
	t.Logf("the lost control plane a spare again: %s", time.Since(begin).Round(time.Second))
	for _, dir := range []string{"/etc/kubernetes/pki", "/var/lib/etcd/member"} {
		if _, code := c.asRoot("control-plane-2", "test -e "+dir); code == 0 {
			t.Errorf("control-plane-2 has %s after its reset", dir)
		}
	}

	// It is the next to be assigned. The one that the list has as a spare is the first to leave.
	for _, group := range []struct {
		edit  [2]string
		nodes []string
	}{
		{[2]string{"    replaceAfter: 1m\n", "    controlPlanes: 4\n    replaceAfter: 1m\n"}, []string{"control-plane-0", "control-plane-1", "control-plane-2", "control-plane-3"}},
		{[2]string{"controlPlanes: 4", "controlPlanes: 3"}, []string{"control-plane-0", "control-plane-1", "control-plane-2"}},
	} {
		begin = time.Now()
		a.edit(group.edit[0], group.edit[1])
		a.run(5*time.Minute, "init", "--yes", "--timeout", "4m").want(plan.ExitDone)
		a.eventually(6*time.Minute, fmt.Sprint("the nodes are ", group.nodes), func(out string) bool {
			return slices.Equal(slices.Sorted(strings.FieldsSeq(out)), group.nodes)
		}, "get", "nodes", "-o", "jsonpath={.items[*].metadata.name}")
		a.wantEtcdMembers(len(group.nodes))
		t.Logf("%d control planes: %s", len(group.nodes), time.Since(begin).Round(time.Second))
	}
	a.usable("control-plane-3")
}

// usable waits until spares can be assigned.
func (c *cloud) usable(names ...string) {
	c.t.Helper()
	c.eventually(3*time.Minute, fmt.Sprintf("%s can be assigned", names), func(string) bool {
		out := c.run(time.Minute, "machine", "list").stdout
		for _, name := range names {
			ready := false
			for _, line := range strings.Split(out, "\n") {
				ready = ready || strings.HasPrefix(line, name) && strings.Contains(line, "ready to join")
			}
			if !ready {
				return false
			}
		}
		return true
	}, "get", "nodes")
}
