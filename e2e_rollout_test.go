package main

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime/pkg/log"

	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/recorder"
	"constellation/internal/testneeds"
)

// targetFile is the target that `upgrade prepare` writes for GitOps.
const targetFile = "constellation-nodeversion.yaml"

// reach connects to the sandbox's control API and to its machines.
func (c *cloud) reach(log *slog.Logger) (*sandboxapi.Client, sandbox.Machines) {
	c.t.Helper()
	dirs, err := sandbox.DefaultDirs()
	if err != nil {
		c.t.Fatal(err)
	}
	machines, host, err := dirs.Reach(c.name(), log)
	if err != nil {
		c.t.Fatal(err)
	}
	return machines, host
}

// record observes the cluster from outside, and requests the service hello from every machine.
func (c *cloud) record() *recorder.Recorder {
	t := c.t
	t.Helper()
	access, err := clientcmd.BuildConfigFromFlags("", filepath.Join(c.dir, "constellation-admin.conf"))
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	ctrl.SetLogger(logr.FromSlogHandler(log.Handler()))
	machines, host := c.reach(log)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	vip := c.kubectl("get", "service", "hello", "-o", "jsonpath={.spec.clusterIP}")
	r, err := recorder.Start(ctx, recorder.Config{
		Cluster: access, Cloud: machines, Host: host, Service: vip + ":80", Log: log,
		File: filepath.Join(t.ArtifactDir(), "rollout.jsonl"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// killOperator kills the process of the operator's leader with SIGKILL and returns its
// machine. It retries until there is a leader.
func (c *cloud) killOperator(r *recorder.Recorder) {
	c.t.Helper()
	for deadline := time.Now().Add(5 * time.Minute); time.Now().Before(deadline); time.Sleep(time.Second) {
		holder := ""
		for _, e := range slices.Backward(r.Journal()) {
			if f := recorder.As[*recorder.Lease](e.Fact); f != nil {
				holder = f.Holder
				break
			}
		}
		if holder == "" {
			continue
		}
		// Machines have no pkill. The operator's process is found by its executable.
		const kill = `for p in /proc/[0-9]*; do case "$(readlink $p/exe)" in */operator) kill -9 ${p#/proc/} && exit 0;; esac; done; exit 1`
		if out := c.run(time.Minute, "sandbox", "shell", holder, "--", "bash", "-c", kill); out.code == 0 {
			r.Note("the operator was killed on %s", holder)
			return
		}
	}
	c.t.Error("no operator found to kill")
}

// rollout sets the prepared target with kubectl, kills the operator during the rollout, waits
// until NodeVersion is Ready, and checks the recorder's invariants.
func (c *cloud) rollout(limit time.Duration, kills []func(recorder.Entry) bool) {
	t := c.t
	t.Helper()
	c.kubectl("create", "poddisruptionbudget", "hello", "--selector=app=hello", "--min-available=2")
	r := c.record()
	r.Begin()
	c.kubectl("patch", "nodeversion", "constellation-version", "--type=merge", "--patch-file", filepath.Join(c.dir, targetFile))
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	from := 0
	// next waits for a new matching entry.
	next := func(what string, is func(recorder.Entry) bool) {
		t.Helper()
		err := r.Wait(ctx, func(j []recorder.Entry) bool {
			for ; from < len(j); from++ {
				if is(j[from]) {
					from++
					return true
				}
			}
			return false
		})
		if err != nil {
			t.Fatalf("timeout after %v waiting until %s\n%s", limit, what, c.kubectl("get", "nodeversion,nodes,pendingnodes,joiningnodes", "-o", "wide"))
		}
	}
	next("the target is observed", func(e recorder.Entry) bool {
		return recorder.As[*recorder.Target](e.Fact) != nil && !recorder.As[*recorder.Target](e.Fact).Ready
	})
	for i, k := range kills {
		next(fmt.Sprintf("the operator is at the point of kill %d", i+1), k)
		c.killOperator(r)
	}
	next("NodeVersion is Ready", func(e recorder.Entry) bool {
		return recorder.As[*recorder.Target](e.Fact) != nil && recorder.As[*recorder.Target](e.Fact).Ready
	})
	// Each machine has requested the service since, and the autoscaler is enabled again.
	nodes := strings.Fields(c.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"))
	for _, n := range nodes {
		next("the service answers "+n, func(e recorder.Entry) bool {
			return recorder.As[*recorder.Probe](e.Fact) != nil && recorder.As[*recorder.Probe](e.Fact).From == n && recorder.As[*recorder.Probe](e.Fact).Err == ""
		})
	}
	c.eventually(2*time.Minute, "the autoscaler runs again", func(n string) bool { return n == "1" },
		"-n", "kube-system", "get", "deployment", "constellation-cluster-autoscaler", "-o", "jsonpath={.status.replicas}")
	r.End()
	journal := r.Journal()
	t.Logf("%d entries\n%s", len(journal), recorder.Summarize(journal))
	for _, b := range recorder.Check(journal, recorder.Limits{Join: 2 * time.Minute}) {
		t.Error(b)
	}
	c.wantAnswer(nodes...)
}

func adopted(e recorder.Entry) bool {
	return recorder.As[*recorder.Node](e.Fact) != nil && recorder.As[*recorder.Node](e.Fact).Donor != "" && !recorder.As[*recorder.Node](e.Fact).Ready
}

func cordoned(e recorder.Entry) bool {
	return recorder.As[*recorder.Node](e.Fact) != nil && recorder.As[*recorder.Node](e.Fact).CordonedByUs
}

// TestRolloutOfAnImage replaces one control plane and one worker with machines of a newer
// image. The operator is killed twice: after the new control plane has joined, and during a
// drain.
func TestRolloutOfAnImage(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ROLLOUT", "four minutes")
	c := newCloud(t, 1, 1, "--image", "v1.0.0", "--kubernetes", current)
	c.run(6*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	c.wantVIP("control-plane-0", "worker-0")
	// Name the target, so that there is one hop: with a second hop workers would be kept.
	c.run(2*time.Minute, "upgrade", "prepare", "--non-interactive", "--yes", "--to", "v1.1.0", "--kubernetes", current).want(plan.ExitDone)
	c.rollout(8*time.Minute, []func(recorder.Entry) bool{adopted, cordoned})
	c.wantNodes("control-plane-1", "worker-1")
}

// TestRolloutToTheNextKubernetes upgrades image and Kubernetes minor of three control planes
// and two workers with `upgrade prepare` and one kubectl command. The operator is killed twice
// during the rollout.
//
// It takes about twenty minutes and needs a second Kubernetes in the cache, so it is opt-in:
//
//	CONSTELLATION_E2E_ROLLOUT=1 go test -timeout 60m -run TestRolloutToTheNextKubernetes .
func TestRolloutToTheNextKubernetes(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ROLLOUT", "twenty minutes")
	withNext(t)
	c := newCloud(t, 3, 2, "--image", "v1.0.0", "--kubernetes", current)
	c.run(10*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	c.wantVIP("control-plane-0", "control-plane-1", "control-plane-2", "worker-0", "worker-1")
	c.run(2*time.Minute, "upgrade", "prepare", "--non-interactive", "--yes",
		"--to", "v1.1.0", "--kubernetes", next, "--acknowledge", "oldest-supports-kubernetes").want(plan.ExitDone)
	image := func(addon string) string {
		return c.kubectl("-n", "kube-system", "get", addon, "-o", "jsonpath={.spec.template.spec.containers[0].image}")
	}
	oldDNS := image("deployment/coredns")
	c.rollout(40*time.Minute, []func(recorder.Entry) bool{
		func(e recorder.Entry) bool {
			return recorder.As[*recorder.Target](e.Fact) != nil && recorder.As[*recorder.Target](e.Fact).Phase == "apply"
		},
		cordoned,
	})
	if out := c.kubectl("get", "nodes", "-o", `jsonpath={.items[*].status.nodeInfo.kubeletVersion}`); strings.Count(out, next) != 5 {
		t.Errorf("kubelets are %s, want five of %s", out, next)
	}
	// All control planes were replaced, and a join changes no add-on.
	if image := image("daemonset/kube-proxy"); !strings.HasSuffix(image, ":"+next) {
		t.Errorf("kube-proxy has the image %s, want tag %s", image, next)
	}
	if image := image("deployment/coredns"); image == oldDNS {
		t.Errorf("CoreDNS still has the image %s", image)
	}
	for _, addon := range []string{"daemonset/kube-proxy", "deployment/coredns"} {
		c.kubectl("-n", "kube-system", "rollout", "status", addon, "--timeout=3m")
	}
	if done := c.kubectl("get", "nodeversion", "constellation-version", "-o", "jsonpath={.status.addons.phase}"); done != "done" {
		t.Errorf("the add-ons are reported as %q, want done", done)
	}
}
