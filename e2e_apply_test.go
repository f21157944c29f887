package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine"
	"constellation/engine/kubeadm"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/recorder"
	"constellation/engine/workspace"
	"constellation/internal/testneeds"
)

// TestApplyReplacesAnImage upgrades the image of one control plane and one worker with
// `upgrade apply`, as a CI pipeline would: rejected without --yes, rehearsed, detached after
// the target is set, paused, resumed, and reattached with the same command.
//
//	CONSTELLATION_E2E_ROLLOUT=1 go test -timeout 30m -run TestApplyReplacesAnImage .
func TestApplyReplacesAnImage(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ROLLOUT", "four minutes")
	c := newCloud(t, 1, 1, "--image", "v1.0.0", "--kubernetes", current)
	c.run(6*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	c.wantVIP("control-plane-0", "worker-0")
	verb := []string{"upgrade", "apply", "--non-interactive", "--to", "v1.1.0", "--kubernetes", current}
	apply := func(limit time.Duration, more ...string) *result {
		return c.run(limit, append(append([]string{}, verb...), more...)...)
	}
	apply(2 * time.Minute).want(plan.ExitUnacknowledged)
	apply(2*time.Minute, "--dry-run").want(plan.ExitDone)
	if left, err := filepath.Glob(filepath.Join(c.dir, "constellation-upgrade", "upgrade-*")); err != nil || len(left) > 0 {
		t.Errorf("a dry run left %v, %v", left, err)
	}
	if image := c.kubectl("get", "nodeversion", "constellation-version", "-o", "jsonpath={.spec.imageVersion}"); image != "v1.0.0" {
		t.Errorf("a dry run set the target to %s", image)
	}

	c.kubectl("create", "poddisruptionbudget", "hello", "--selector=app=hello", "--min-available=2")
	r := c.record()
	r.Begin()
	apply(4*time.Minute, "--yes", "--detach").want(plan.ExitDone)
	backups, err := filepath.Glob(filepath.Join(c.dir, "constellation-upgrade", "upgrade-*", "backups", "manifest.json"))
	if err != nil || len(backups) != 1 {
		t.Fatalf("backups %v, %v", backups, err)
	}
	c.run(time.Minute, "backup", "verify", filepath.Base(filepath.Dir(filepath.Dir(backups[0])))).want(plan.ExitDone)
	c.run(time.Minute, "upgrade", "pause").want(plan.ExitDone)
	c.run(time.Minute, "upgrade", "pause").want(plan.ExitNothing)
	c.run(time.Minute, "upgrade", "resume").want(plan.ExitDone)

	out := apply(10*time.Minute, "-o", "json")
	out.want(plan.ExitDone)
	seen := map[string]bool{}
	var last plan.Event
	for line := range strings.Lines(out.stdout) {
		last = plan.Event{}
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if last.Kind == plan.KindNode {
			seen[last.Node+" "+last.To] = true
		}
	}
	for _, want := range []string{"control-plane-1 ready", "control-plane-0 gone", "worker-1 ready", "worker-0 draining", "worker-0 gone"} {
		if !seen[want] {
			t.Errorf("no event that %s; events %v", want, seen)
		}
	}
	if last.Kind != plan.KindResult || last.State != plan.StateDone {
		t.Errorf("the last event is %+v", last)
	}
	r.End()
	journal := r.Journal()
	t.Logf("%d entries\n%s", len(journal), recorder.Summarize(journal))
	for _, b := range recorder.Check(journal, recorder.Limits{Join: 2 * time.Minute}) {
		t.Error(b)
	}
	c.wantNodes("control-plane-1", "worker-1")
	c.wantAnswer("control-plane-1", "worker-1")
	apply(2*time.Minute, "--yes").want(plan.ExitNothing)
}

// TestApplyIsKilledInEachStep kills the console at the beginning of each step and runs the
// same command again: the cluster reaches the target, and no step is done twice. While one
// console waits for nodes, a second one from another workspace is rejected and names the first.
//
//	CONSTELLATION_E2E_ROLLOUT=1 go test -timeout 30m -run TestApplyIsKilledInEachStep .
func TestApplyIsKilledInEachStep(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ROLLOUT", "three minutes")
	c := newCloud(t, 1, 1, "--image", "v1.0.0", "--kubernetes", current)
	c.run(6*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	verb := []string{"upgrade", "apply", "--yes", "--to", "v1.1.0", "--kubernetes", current, "-o", "json"}
	for _, step := range engine.ApplySteps {
		if step == plan.StepRollout {
			continue
		}
		cmd, _, _ := c.until(step, verb...)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		t.Logf("killed at %s", step)
	}
	for _, last := range []bool{false, true} {
		cmd, _, rest := c.until(plan.StepRollout, verb...)
		if !t.Run("a second console gets the name of the lock's holder", func(t *testing.T) {
			other := *c
			other.t, other.dir = t, t.TempDir()
			for _, name := range []string{workspace.ConfigFile, workspace.KubeconfigFile, workspace.StateFile} {
				b, err := os.ReadFile(filepath.Join(c.dir, name))
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(other.dir, name), b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			r := other.run(time.Minute, verb...)
			if r.want(plan.ExitHeld); !strings.Contains(r.stderr, fmt.Sprintf("(process %d in %s, run upgrade-", cmd.Process.Pid, c.dir)) {
				t.Errorf("stderr is %q", r.stderr)
			}
		}) {
			return
		}
		if !last {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			continue
		}
		for rest.Scan() { // to its end
		}
		if err := cmd.Wait(); err != nil {
			t.Fatalf("the last run ended with %v", err)
		}
	}
	c.wantNodes("control-plane-1", "worker-1")
	c.run(2*time.Minute, "upgrade", "apply", "--yes", "--to", "v1.1.0", "--kubernetes", current, "-o", "json").want(plan.ExitNothing)
}

// until starts a command that prints events. It returns when a step has begun or is done
// already, with the events so far and a scanner of the rest.
func (c *cloud) until(step string, args ...string) (cmd *exec.Cmd, told []plan.Event, rest *bufio.Scanner) {
	t := c.t
	t.Helper()
	cmd = c.command(t.Context(), args...)
	cmd.Stderr = t.Output()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	rest = bufio.NewScanner(out)
	rest.Buffer(nil, 1<<20)
	for rest.Scan() {
		var ev plan.Event
		if err := json.Unmarshal(rest.Bytes(), &ev); err != nil {
			t.Fatalf("%q: %v", rest.Text(), err)
		}
		told = append(told, ev)
		if ev.Kind == plan.KindStep && ev.Step == step {
			return cmd, told, rest
		}
		if ev.Kind == plan.KindResult {
			t.Fatalf("step %s never started: %s", step, ev.Text)
		}
	}
	t.Fatalf("the stream ended before step %s: %v", step, cmd.Wait())
	return nil, nil, nil
}

// current and next are the versions before and after the upgrades of these tests. .ci/test.sh
// builds both into the cache.
const current, next = build.DefaultVersion, build.NextVersion

// withNext skips the test if one of them is not in the cache.
func withNext(t *testing.T) {
	t.Helper()
	testneeds.Kubernetes(t, current)
	testneeds.Kubernetes(t, next)
}

// applies upgrades a cluster of one control plane and two workers with `upgrade apply`, while
// a second process watches. Both, and history and replay afterwards, must report the same
// number of replaced and upgraded nodes.
func (c *cloud) applies(to string, replaced int, args ...string) {
	t := c.t
	t.Helper()
	cmd, told, rest := c.until(plan.StepRollout, append([]string{"upgrade", "apply", "--non-interactive", "--yes", "-o", "json"}, args...)...)
	watched := c.meanwhile(30*time.Minute, "watch", "--kubeconfig", filepath.Join(c.dir, workspace.KubeconfigFile), "-o", "json")
	for rest.Scan() {
		told = append(told, parseEvents(t, rest.Text())...)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("apply ended with %v: %+v\n%s", err, told[len(told)-1], c.kubectl("get", "nodeversion,nodes,pendingnodes,joiningnodes", "-o", "wide"))
	}
	seen := watched().want(plan.ExitDone).events()
	replayed := c.run(time.Minute, "watch", "--replay", "last", "-o", "json").want(plan.ExitDone)
	want := totals(told)
	for who, events := range map[string][]plan.Event{"the second process": seen, "the replay": parseEvents(t, replayed.stdout)} {
		if got := totals(events); got != want {
			t.Errorf("%s ends with %s, apply with %s", who, got, want)
		}
	}
	if !strings.HasPrefix(want, "3 of 3 at the target, map[ready:3]") {
		t.Errorf("apply ends with %s", want)
	}
	for _, n := range c.status().Nodes {
		if n.State != plan.NodeReady || n.Kubernetes != to {
			t.Errorf("%s is %s with Kubernetes %s, want it ready with %s", n.Name, n.State, n.Kubernetes, to)
		}
	}
	var past rollout.PastRun
	if err := json.Unmarshal([]byte(c.run(time.Minute, "history", "last", "-o", "json").want(plan.ExitDone).stdout), &past); err != nil {
		t.Fatal(err)
	}
	if past.Status != plan.StateDone || past.Replaced != replaced || past.Failed != 0 || past.To.Kubernetes != to {
		t.Errorf("history has %+v", past)
	}
}

// TestApplyOnRealMachines upgrades image and Kubernetes minor in one hop, while clients send
// requests to a service with several replicas from inside and outside of the cluster. No
// avoidable request failure is allowed; see load. It is the only upgrade of real machines in
// the default test run. The upgraded cluster then keeps root on a worker in its place.
func TestApplyOnRealMachines(t *testing.T) {
	withNext(t)
	c, _ := newCluster(t, realMachines, 1, 2, "--image", "v1.0.0", "--kubernetes", current)
	l := c.startLoad()
	r := c.record()
	r.Begin()
	target := []string{"--to", "v1.1.0", "--kubernetes", next}
	c.wantGuarded("before the upgrade")
	guarded := c.guarded()
	c.applies(next, 3, append(target, "--ack", "oldest-supports-kubernetes")...)
	r.End()
	guarded()
	c.wantGuarded("after the upgrade")
	c.wantNoAutoApproval()
	asked := l.end()
	journal := r.Journal()
	t.Logf("%d entries\n%s", len(journal), recorder.Summarize(journal))
	for _, b := range recorder.Check(journal, recorder.Limits{Join: 2 * time.Minute}) {
		t.Error(b)
	}
	kept, lost := judge(asked, journal)
	t.Logf("%d requests succeeded, %d failed unavoidably at machines that came or went, %d failed avoidably", kept, len(asked)-kept-len(lost), len(lost))
	for _, x := range lost[:min(len(lost), 10)] {
		t.Logf("lost: %s", x)
	}
	// On an idle computer none fails. Under load kube-proxy may learn of a pod's end only after
	// the pod's grace period, which no rollout can prevent.
	if len(lost)*500 > kept {
		t.Errorf("%d requests failed avoidably", len(lost))
	}
	if least := 1000; kept < least {
		t.Errorf("%d requests are too little load; want %d", kept, least)
	}
	nodes := []string{"control-plane-1", "worker-2", "worker-3"}
	c.wantNodes(nodes...)
	c.wantAnswer(nodes...)
	c.run(2*time.Minute, append([]string{"upgrade", "apply", "--yes", "-o", "json"}, target...)...).want(plan.ExitNothing)

	c.rootOnAWorkerGetsNoOtherIdentity(nodes[2], nodes[0], nodes[1])
	c.wantRotated(2)
}

// wantRotated waits until the operator has rotated the key that encrypts Secrets, without a console.
func (c *cloud) wantRotated(generation int) {
	c.t.Helper()
	want := fmt.Sprintf("%d, all Secrets were written with it", generation)
	c.eventually(10*time.Minute, want, func(string) bool {
		out := c.run(time.Minute, "encryption", "status").want(plan.ExitDone).stdout
		return strings.Contains(out, want) && strings.Contains(out, "by constellation-operator") && strings.Contains(out, fmt.Sprintf("encrypts with generation %d", generation))
	}, "get", "nodes")
}

// TestApplyOnSimulatedMachines upgrades a cluster hop by hop to the newest release, as an
// unprivileged user. Each hop replaces machines, and the hop of Kubernetes first upgrades the
// control plane in place. In the last hop the agents upgrade the workers in place.
func TestApplyOnSimulatedMachines(t *testing.T) {
	t.Parallel()
	withNext(t)
	c, _ := newCluster(t, simulatedMachines, 1, 2, "--release", "v1.0.0", "--image", "v1.0.0", "--kubernetes", current)
	c.wantVersions("v1.0.0", current, 1, 2)

	// An older program published components without a signed statement. The first hop must
	// repair that, or no machine of the new image could join.
	for _, m := range strings.Fields(c.kubectl("-n", "kube-system", "get", "configmaps", "-o", "name")) {
		if strings.HasPrefix(m, "configmap/k8s-components-") {
			c.kubectl("-n", "kube-system", "annotate", m, "constellation.edgeless.systems/components-statement-")
		}
	}
	// The cloud's daemon dies. Its machines keep running, and a new daemon adopts them.
	before := c.status()
	if err := unix.Kill(c.daemonPID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	again := c.run(time.Minute, "sandbox", "up").want(plan.ExitDone)
	if !strings.Contains(again.stdout, "with the 3 machines that it had") {
		t.Errorf("sandbox up after the daemon's death:\n%s", again.stdout)
	}
	if got := c.status(); len(got.Nodes) != len(before.Nodes) || !got.Reachable {
		t.Errorf("after the daemon's death: %+v", got)
	}

	c.run(time.Minute, "upgrade", "check", "--write-config").want(plan.ExitDone)
	if found, err := c.escalations(t.Context(), kubeadm.JoinGroup); err != nil || len(found) == 0 {
		t.Errorf("release v1.0.0 has no admission policies, and %d attempts to escalate succeed (%v)", len(found), err)
	}
	c.applies(current, 1)
	c.wantGuarded("between two hops")
	c.wantNoAutoApproval()
	workers := func() string {
		return c.kubectl("get", "nodes", "-l", "!node-role.kubernetes.io/control-plane", "-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.uid} {.spec.unschedulable}{"\n"}{end}`)
	}
	c.kubectl("patch", "scalinggroup", "workers", "--type=merge", "-p", `{"spec":{"strategy":"InPlace"}}`)
	stayed := workers()
	// Release v1.0.0 offers no newer minor, so the cluster started with the etcd of its Kubernetes.
	c.applies(current, 1, "--kubernetes", next)
	if tag := c.etcdTag(); tag != etcdBefore {
		t.Errorf("after the hop of etcd the tag is %q, want %s", tag, etcdBefore)
	}
	// Without a goal, the path leads to the newest minor that this computer has compiled.
	c.run(time.Minute, "upgrade", "check", "--write-config", "--kubernetes", next).want(plan.ExitDone)
	guarded := c.guarded()
	c.applies(next, 3)
	guarded()
	c.wantGuarded("after the last hop")
	c.wantNoAutoApproval()
	// The previous hop kept the workers, so that nodes are not replaced twice.
	c.wantMachines("control-plane ready v1.1.0 "+next, "worker ready v1.0.0 "+next, "worker ready v1.0.0 "+next)
	if now := workers(); now != stayed {
		t.Errorf("workers are\n%s\nwant unchanged\n%s", now, stayed)
	}
	c.run(2*time.Minute, "upgrade", "apply", "--non-interactive", "--yes", "--kubernetes", next).want(plan.ExitNothing)
}

// totals summarises a stream at its end.
func totals(events []plan.Event) string {
	var b rollout.Board
	for _, e := range events {
		b.Apply(e)
	}
	done, total := b.Places()
	gone := []string{}
	for n := range b.Nodes() {
		if n.State == plan.NodeGone {
			gone = append(gone, n.Name)
		}
	}
	slices.Sort(gone)
	return fmt.Sprintf("%d of %d at the target, %v, gone %v", done, total, b.Counts(), gone)
}
