package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sandbox/recorder"
	"constellation/internal/testneeds"
)

// TestUpgradeOfTwoMinorsInOneSitting upgrades three control planes and two workers by two minors of
// Kubernetes with one command, given until it reports that nothing is left to do. Its path has three
// hops: the first minor, the etcd that the second minor requires, the second minor. The first two
// hops replace machines, the last one upgrades control planes in place. The console is killed in the
// first and in the last hop, and clients send requests all the time. A flag of the API server and a
// feature gate survive all hops. Patches and options of kubeadm are files of a machine, and survive
// the hop in place.
//
//	for v in v1.35.4 v1.36.4 v1.37.2; do bin/constellation sandbox fetch $v; done
//	CONSTELLATION_E2E_ROLLOUT=1 go test -timeout 60m -run TestUpgradeOfTwoMinorsInOneSitting .
func TestUpgradeOfTwoMinorsInOneSitting(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ROLLOUT", "25 minutes and Kubernetes v1.35.4, v1.36.4 and v1.37.2, built from source")
	const from, between, to, etcd = "v1.35.4", "v1.36.4", "v1.37.2", "3.6.11"
	for _, v := range []string{from, between, to} {
		testneeds.Kubernetes(t, v)
	}
	c := newCloud(t, 3, 2, "--kubernetes", from)
	c.run(10*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	c.wantNodes("control-plane-0", "control-plane-1", "control-plane-2", "worker-0", "worker-1")
	c.customizeConfig()
	l := c.startLoad()
	r := c.record()
	r.Begin()
	begun := time.Now()

	c.wantPath(to, plan.Target{Kubernetes: between}, plan.Target{Kubernetes: between, Etcd: etcd + "-0"}, plan.Target{Kubernetes: to})
	c.wantEtcd(c.hop(true, to), "3.6.8", "3.6.0")
	t.Logf("%s after %s", between, time.Since(begun).Round(time.Second))

	workers := c.workers()
	c.wantPath(to, plan.Target{Kubernetes: between, Etcd: etcd + "-0"}, plan.Target{Kubernetes: to})
	c.wantEtcd(c.hop(false, to), etcd, "3.6.0")
	t.Logf("etcd %s after %s", etcd, time.Since(begun).Round(time.Second))
	if is := c.workers(); is != workers {
		t.Errorf("workers are %s, were %s", is, workers)
	}
	if is := c.etcdTag(); is != etcd+"-0" {
		t.Errorf("after the hop of etcd the tag is %q", is)
	}

	planes := c.controlPlanes(etcd + "-0")
	c.customizeMachines(planes)
	c.kubectl("patch", "scalinggroup", "control-plane", "--type=merge", "-p", `{"spec":{"strategy":"InPlace"}}`)
	c.wantPath(to, plan.Target{Kubernetes: to})
	c.wantEtcd(c.hop(true, to), "3.7.0", "3.7.0")
	took := time.Since(begun)
	t.Logf("%s after %s", to, took.Round(time.Second))
	r.End()
	asked := l.end()

	if is := c.controlPlanes("3.7.0-0"); !slices.Equal(is, planes) {
		t.Errorf("control planes are %v, were %v", is, planes)
	}
	c.wantCustomized(planes)
	for _, n := range c.status().Nodes {
		if n.State != plan.NodeReady || n.Kubernetes != to {
			t.Errorf("%s is %s with Kubernetes %s", n.Name, n.State, n.Kubernetes)
		}
	}
	c.run(2*time.Minute, "upgrade", "apply", "--yes", "--kubernetes", to, "-o", "json").want(plan.ExitNothing)

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
	if len(lost)*500 > kept {
		t.Errorf("%d requests failed avoidably, %d succeeded", len(lost), kept)
	}
	if most := 50 * time.Millisecond; took/time.Duration(max(1, len(asked))) > most {
		t.Errorf("%d requests in %s, want one every %s", len(asked), took, most)
	}
}

// hop applies the next hop on the path to a version of Kubernetes, and returns what the result
// reports about etcd. If killed is set, the console is killed while nodes are upgraded, and the same
// command ends the hop.
func (c *cloud) hop(killed bool, kubernetes string) []string {
	c.t.Helper()
	verb := []string{"upgrade", "apply", "--yes", "--kubernetes", kubernetes, "-o", "json"}
	if killed {
		cmd, _, _ := c.until(plan.StepRollout, verb...)
		time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait() // killed
	}
	out := c.run(25*time.Minute, verb...).want(plan.ExitDone)
	var res plan.Result
	for line := range strings.Lines(out.stdout) {
		var ev plan.Event
		if err := json.Unmarshal([]byte(line), &ev); err != nil {
			c.t.Fatalf("%q: %v", line, err)
		}
		if ev.Kind == plan.KindResult {
			if err := json.Unmarshal(ev.Data, &res); err != nil {
				c.t.Fatal(err)
			}
		}
	}
	return res.Etcd
}
