package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sandbox/recorder"
	"constellation/internal/testneeds"
)

// TestApplyThroughAHopOfEtcd upgrades three control planes and two workers to a minor of Kubernetes
// whose etcd does not start on the data of the running one. `upgrade apply` first brings the etcd in
// between, by replacement of the control planes alone, and then Kubernetes. The console is killed
// once in each hop, and clients send requests all the time. Each member of etcd is verified.
//
//	for v in v1.36.4 v1.37.2; do bin/constellation sandbox fetch $v; done
//	CONSTELLATION_E2E_ROLLOUT=1 go test -timeout 60m -run TestApplyThroughAHopOfEtcd .
func TestApplyThroughAHopOfEtcd(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ROLLOUT", "18 minutes")
	const from, to, between = etcdMinorFrom, etcdMinorTo, "3.6.11"
	testneeds.Kubernetes(t, from)
	testneeds.Kubernetes(t, to)
	c := newCloud(t, 3, 2, "--kubernetes", from)
	c.run(10*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	c.wantNodes("control-plane-0", "control-plane-1", "control-plane-2", "worker-0", "worker-1")
	c.olderEtcd(realMachines)
	l := c.startLoad()
	r := c.record()

	c.wantPath(to, plan.Target{Kubernetes: from, Etcd: between + "-0"}, plan.Target{Kubernetes: to})
	stay := c.workers()
	r.Begin()
	c.wantEtcd(c.hop(true, to), between, "3.6.0")
	if is := c.etcdTag(); is != between+"-0" {
		t.Errorf("after the hop of etcd the tag is %q", is)
	}
	if is := c.workers(); is != stay {
		t.Errorf("workers are %s, were %s", is, stay)
	}
	c.wantEtcd(c.hop(true, to), "3.7.0", "3.7.0")
	if is := c.etcdTag(); is != "" {
		t.Errorf("after the upgrade etcd is held back by the tag %q", is)
	}
	r.End()
	asked := l.end()
	journal := r.Journal()
	t.Logf("%d entries\n%s", len(journal), recorder.Summarize(journal))
	for _, b := range recorder.Check(journal, recorder.Limits{Join: 5 * time.Minute}) {
		t.Error(b)
	}
	kept, lost := judge(asked, journal)
	t.Logf("%d requests succeeded, %d failed unavoidably at machines that came or went, %d failed avoidably", kept, len(asked)-kept-len(lost), len(lost))
	for _, x := range lost[:min(len(lost), 10)] {
		t.Logf("lost: %s", x)
	}
	if len(lost)*500 > kept || kept < 5000 {
		t.Errorf("%d requests failed avoidably, %d succeeded", len(lost), kept)
	}
	for _, n := range c.status().Nodes {
		if n.State != plan.NodeReady || n.Kubernetes != to {
			t.Errorf("%s is %s with Kubernetes %s", n.Name, n.State, n.Kubernetes)
		}
	}
	c.run(2*time.Minute, "upgrade", "apply", "--yes", "--kubernetes", to, "-o", "json").want(plan.ExitNothing)
}

// wantPath compares the hops of the path to a version of Kubernetes.
func (c *cloud) wantPath(kubernetes string, want ...plan.Target) {
	c.t.Helper()
	var check struct {
		Path []struct{ To plan.Target }
	}
	if err := json.Unmarshal([]byte(c.run(2*time.Minute, "upgrade", "check", "--kubernetes", kubernetes, "-o", "json").stdout), &check); err != nil {
		c.t.Fatal(err)
	}
	var got []plan.Target
	for _, h := range check.Path {
		got = append(got, plan.Target{Kubernetes: h.To.Kubernetes, Etcd: h.To.Etcd})
	}
	if !slices.Equal(got, want) {
		c.t.Fatalf("the path is %+v, want %+v", got, want)
	}
}

// wantEtcd compares what the result of a hop reports with the pods of three members.
func (c *cloud) wantEtcd(told []string, version, storage string) {
	c.t.Helper()
	pods := strings.Fields(c.kubectl("-n", "kube-system", "get", "pods", "-l", "component=etcd", "-o", `jsonpath={range .items[*]}{.spec.nodeName}={.spec.containers[0].image}{"\n"}{end}`))
	nodes := strings.Fields(c.kubectl("get", "nodes", "-l", "node-role.kubernetes.io/control-plane", "-o", "jsonpath={.items[*].metadata.name}"))
	var want []string
	for _, n := range nodes {
		if image := n + "=registry.k8s.io/etcd:" + version + "-0"; !slices.Contains(pods, image) {
			c.t.Errorf("pods of etcd are %q, want %s", pods, image)
		}
		want = append(want, fmt.Sprintf("%s: etcd %s, storage version %s", n, version, storage))
	}
	if len(nodes) != 3 || !slices.Equal(told, want) {
		c.t.Errorf("the result has %q, want %q", told, want)
	}
}

// etcdTag returns the tag of etcd's image in kubeadm's configuration.
func (c *cloud) etcdTag() string {
	c.t.Helper()
	for line := range strings.Lines(c.kubectl("-n", "kube-system", "get", "configmap", "kubeadm-config", "-o", "jsonpath={.data.ClusterConfiguration}")) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "imageTag: "); ok {
			return v
		}
	}
	return ""
}

// workers returns the worker Nodes with their UIDs.
func (c *cloud) workers() string {
	c.t.Helper()
	return c.kubectl("get", "nodes", "-l", "!node-role.kubernetes.io/control-plane", "-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.uid}{"\n"}{end}`)
}
