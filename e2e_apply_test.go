package main

import (
	"encoding/json"
	"os"
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
