package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/sandbox/recorder"
)

// TestApplyReplacesAnImage takes one control plane and one worker from one image to the
// next with `upgrade apply` alone, as a pipeline would: refused without --yes, rehearsed,
// left when the target is set, paused and resumed, and taken up again with the same command.
//
//	CONSTELLATION_E2E_ROLLOUT=1 go test -timeout 30m -run TestApplyReplacesAnImage .
func TestApplyReplacesAnImage(t *testing.T) {
	if os.Getenv("CONSTELLATION_E2E_ROLLOUT") == "" {
		t.Skip("takes four minutes; set CONSTELLATION_E2E_ROLLOUT=1 to run it")
	}
	c := newCloud(t, 1, 1, "--image", "v1.0.0", "--kubernetes", "v1.35.4")
	c.run(6*time.Minute, "init", "--non-interactive", "--yes").want(engine.ExitDone)
	c.wantVIP("control-plane-0", "worker-0")
	verb := []string{"upgrade", "apply", "--non-interactive", "--to", "v1.1.0", "--kubernetes", "v1.35.4"}
	apply := func(limit time.Duration, more ...string) *result {
		return c.run(limit, append(append([]string{}, verb...), more...)...)
	}
	apply(2 * time.Minute).want(engine.ExitUnacknowledged)
	apply(2*time.Minute, "--dry-run").want(engine.ExitDone)
	if left, err := filepath.Glob(filepath.Join(c.dir, "constellation-upgrade", "upgrade-*")); err != nil || len(left) > 0 {
		t.Errorf("a rehearsal left %v, %v", left, err)
	}
	if image := c.kubectl("get", "nodeversion", "constellation-version", "-o", "jsonpath={.spec.imageVersion}"); image != "v1.0.0" {
		t.Errorf("a rehearsal set the target to %s", image)
	}

	c.kubectl("create", "poddisruptionbudget", "hello", "--selector=app=hello", "--min-available=2")
	r := c.record()
	r.Begin()
	apply(4*time.Minute, "--yes", "--detach").want(engine.ExitDone)
	backups, err := filepath.Glob(filepath.Join(c.dir, "constellation-upgrade", "upgrade-*", "backups", "manifest.json"))
	if err != nil || len(backups) != 1 {
		t.Fatalf("backups %v, %v", backups, err)
	}
	c.run(time.Minute, "backup", "verify", filepath.Base(filepath.Dir(filepath.Dir(backups[0])))).want(engine.ExitDone)
	c.run(time.Minute, "upgrade", "pause").want(engine.ExitDone)
	c.run(time.Minute, "upgrade", "pause").want(engine.ExitNothing)
	c.run(time.Minute, "upgrade", "resume").want(engine.ExitDone)

	out := apply(10*time.Minute, "-o", "json")
	out.want(engine.ExitDone)
	seen := map[string]bool{}
	var last engine.Event
	for line := range strings.Lines(out.stdout) {
		last = engine.Event{}
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if last.Kind == engine.KindNode {
			seen[last.Node+" "+last.To] = true
		}
	}
	for _, want := range []string{"control-plane-1 ready", "control-plane-0 gone", "worker-1 ready", "worker-0 draining", "worker-0 gone"} {
		if !seen[want] {
			t.Errorf("nobody told that %s; told were %v", want, seen)
		}
	}
	if last.Kind != engine.KindResult || last.State != engine.StateDone {
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
	apply(2*time.Minute, "--yes").want(engine.ExitNothing)
}

// TestApplyIsKilledInEachStep kills the console as soon as each of its steps has begun, and
// gives the same command again: the cluster gets where it was to go, once. While a console
// waits for nodes, a second one from another workspace is told who has the cluster.
//
//	CONSTELLATION_E2E_ROLLOUT=1 go test -timeout 30m -run TestApplyIsKilledInEachStep .
func TestApplyIsKilledInEachStep(t *testing.T) {
	if os.Getenv("CONSTELLATION_E2E_ROLLOUT") == "" {
		t.Skip("takes three minutes; set CONSTELLATION_E2E_ROLLOUT=1 to run it")
	}
	c := newCloud(t, 1, 1, "--image", "v1.0.0", "--kubernetes", "v1.35.4")
	c.run(6*time.Minute, "init", "--non-interactive", "--yes").want(engine.ExitDone)
	verb := []string{"upgrade", "apply", "--yes", "--to", "v1.1.0", "--kubernetes", "v1.35.4", "-o", "json"}
	// until starts the command in a workspace, and returns it when a step has begun or was
	// found done.
	until := func(step string) (cmd *exec.Cmd, rest *bufio.Scanner) {
		t.Helper()
		cmd = c.command(t.Context(), verb...)
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
			var ev engine.Event
			if err := json.Unmarshal(rest.Bytes(), &ev); err != nil {
				t.Fatalf("%q: %v", rest.Text(), err)
			}
			if ev.Kind == engine.KindStep && ev.Step == step {
				return cmd, rest
			}
			if ev.Kind == engine.KindResult {
				t.Fatalf("step %s never began: %s", step, ev.Text)
			}
		}
		t.Fatalf("the stream ended before step %s: %v", step, cmd.Wait())
		return nil, nil
	}
	for _, step := range engine.ApplySteps {
		if step == engine.StepRollout {
			continue
		}
		cmd, _ := until(step)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		t.Logf("killed at %s", step)
	}
	for _, last := range []bool{false, true} {
		cmd, rest := until(engine.StepRollout)
		if !t.Run("a second console is told who has the cluster", func(t *testing.T) {
			other := *c
			other.t, other.dir = t, t.TempDir()
			for _, name := range []string{engine.ConfigFile, engine.KubeconfigFile, engine.StateFile} {
				b, err := os.ReadFile(filepath.Join(c.dir, name))
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(other.dir, name), b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			r := other.run(time.Minute, verb...)
			if r.want(engine.ExitHeld); !strings.Contains(r.stderr, fmt.Sprintf("(process %d in %s, run upgrade-", cmd.Process.Pid, c.dir)) {
				t.Errorf("it says %q", r.stderr)
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
			t.Fatalf("the last one ended with %v", err)
		}
	}
	c.wantNodes("control-plane-1", "worker-1")
	c.run(2*time.Minute, "upgrade", "apply", "--yes", "--to", "v1.1.0", "--kubernetes", "v1.35.4", "-o", "json").want(engine.ExitNothing)
}
