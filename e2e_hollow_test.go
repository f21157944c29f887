package main

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/sandbox"
	"constellation/internal/testneeds"
)

// TestHollowSandbox watches a rollout of hollow machines as a user without root: it starts
// them, injects a fault, sets a target, and leaves nothing behind.
func TestHollowSandbox(t *testing.T) {
	testneeds.Time(t, "a minute")
	t.Parallel()
	c := newHollow(t)
	up := func(args ...string) *result {
		t.Helper()
		return c.run(2*time.Minute, append([]string{"sandbox", "up", "-o", "json"}, args...)...).want(plan.ExitDone)
	}
	const workers, all = 12, 13
	events := up("--hollow", fmt.Sprint(workers), "--control-planes", "1", "--image", "v1.0.0", "--boot", "300ms", "--join", "200ms", "--drain", "300ms").events()
	if last := events[len(events)-1]; !strings.Contains(last.Text, "hollow: all machines are simulated") {
		t.Errorf("up ends with %q", last.Text)
	}
	for file, mode := range map[string]fs.FileMode{"constellation-conf.yaml": 0o644, "constellation-state.yaml": 0o600, "constellation-admin.conf": 0o600} {
		if is := c.mode(file); is != mode {
			t.Errorf("%s has mode %o", file, is)
		}
	}
	var st engine.Status
	decode := func(v any, args ...string) {
		t.Helper()
		if err := json.Unmarshal([]byte(c.run(time.Minute, args...).want(plan.ExitDone).stdout), v); err != nil {
			t.Fatal(err)
		}
	}
	decode(&st, "status", "-o", "json")
	if !strings.HasPrefix(st.Cluster, "hollow-") || st.Counts["ready"] != all || st.Counts["current"] != all || st.Target.Image != "v1.0.0" || st.Target.Release != "v1.1.0" {
		t.Errorf("status: %+v", st)
	}
	nodes := strings.Fields(c.kubectl("get", "nodes", "-o", `jsonpath={range .items[*]}{.status.nodeInfo.osImage}{"\n"}{end}`))
	if len(nodes) != all || slices.ContainsFunc(nodes, func(image string) bool { return image != "hollow" }) {
		t.Errorf("kubectl sees nodes with the images %q", nodes)
	}

	// Operations that need real machines are rejected.
	for _, args := range [][]string{
		{"init", "--yes", "--non-interactive"},
		{"upgrade", "prepare"},
		{"upgrade", "apply", "--yes", "--non-interactive"},
		{"sandbox", "shell", "worker-1"},
	} {
		if r := c.run(time.Minute, args...).want(plan.ExitUsage); !strings.Contains(r.stderr, "hollow") {
			t.Errorf("%v: %s", args, r.stderr)
		}
	}

	// Replace a fault, skip a node, set the target, and watch the rollout.
	up("--fault", "api-429=0.1", "--fault", "lost-delete=0.2")
	c.run(time.Minute, "upgrade", "skip", "worker-3").want(plan.ExitDone)
	c.kubectl("patch", "nodeversion", "constellation-version", "--type", "merge", "-p",
		fmt.Sprintf(`{"spec":{"image":"sandboxes/%s/images/v1.1.0","imageVersion":"v1.1.0","rollout":{"maxSurge":4}}}`, c.name()))
	c.run(time.Minute, "upgrade", "pause").want(plan.ExitDone)
	c.run(time.Minute, "upgrade", "resume").want(plan.ExitDone)
	rollout := c.run(5*time.Minute, "watch", "-o", "json").want(plan.ExitDone).events()
	seen := map[string]bool{}
	for _, e := range rollout {
		if e.Kind == plan.KindNode {
			seen[e.Group+" "+e.To] = true
		}
	}
	for _, group := range []string{"control-plane", "workers"} {
		for _, state := range []string{plan.NodeGone, plan.NodeReady} {
			if !seen[group+" "+state] {
				t.Errorf("watch did not report that a node of %s became %s; events %v", group, state, seen)
			}
		}
	}
	decode(&st, "status", "-o", "json")
	if st.Counts["ready"] != all || st.Counts["current"] != all-1 {
		t.Errorf("after the rollout: %+v", st.Counts)
	}
	up("--fault", "none")
	c.run(time.Minute, "upgrade", "retry", "worker-3").want(plan.ExitDone)
	c.run(3*time.Minute, "watch", "-o", "json").want(plan.ExitDone)
	current := 0
	for _, e := range c.run(time.Minute, "watch", "--once", "-o", "json").want(plan.ExitDone).events() {
		if e.Kind == plan.KindNode && e.To == plan.NodeReady {
			current++
		}
	}
	if current != all {
		t.Errorf("watch --once reports %d nodes that are ready and at the target", current)
	}

	// When the daemon dies, the cluster ends with it, and status reports that.
	var box engine.SandboxStatus
	decode(&box, "sandbox", "status", "-o", "json")
	if box.State != "running" || !box.Hollow || len(box.Machines) != all || len(box.Faults) != 0 {
		t.Errorf("sandbox status: %+v", box.SandboxInfo)
	}
	pid, err := strconv.Atoi(strings.Fields(read(t, filepath.Join(filepath.Dir(box.Socket), "daemon.pid")))[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.wantNoProcesses()
	if r := c.run(time.Minute, "sandbox", "status").want(plan.ExitDone); !strings.Contains(r.stdout, "the hollow cluster have ended") {
		t.Errorf("status after the daemon's death:\n%s", r.stdout)
	}
	if r := up(); !strings.Contains(r.stdout, "a new cluster begins") {
		t.Errorf("up after the daemon's death:\n%s", r.stdout)
	}
	decode(&st, "status", "-o", "json")
	if st.Counts["ready"] != all || st.Target.Image != "v1.0.0" {
		t.Errorf("the new cluster: %+v", st)
	}
}

// newHollow returns a workspace of an unprivileged user, and checks at the end of the test
// that nothing of its sandbox is left.
func newHollow(t *testing.T) *cloud {
	t.Helper()
	testneeds.Hollow(t)
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := sandbox.DefaultDirs()
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(wd, "bin")
	if _, err := os.Stat(filepath.Join(bin, "constellation")); err != nil {
		t.Fatal("bin/constellation is missing: run `make build` first, or `make test`, which does")
	}
	// t.TempDir has mode 0700, and socket paths must be short.
	home, err := os.MkdirTemp("", "hollow")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	state, cache := filepath.Join(home, "state"), filepath.Join(home, "cache")
	c := &cloud{t: t, bin: bin, dir: filepath.Join(home, "ws"), env: []string{"HOME=" + home, "XDG_STATE_HOME=" + state, "XDG_CACHE_HOME=" + filepath.Dir(dirs.Cache)}}
	if os.Geteuid() == 0 {
		// The test runs as another user without root, who gets readable links to the programs.
		const nobody = 65534
		err := linked(filepath.Join(dirs.Cache, "kubernetes", current), filepath.Join(cache, "constellation", "kubernetes", current))
		if err == nil {
			err = linked(bin, filepath.Join(home, "bin"))
		}
		if err == nil {
			err = os.Chmod(home, 0o755)
		}
		if err == nil {
			err = os.Chown(home, nobody, nobody)
		}
		if err != nil {
			t.Logf("running as root: %v", err)
		} else {
			c.bin, c.env[2] = filepath.Join(home, "bin"), "XDG_CACHE_HOME="+cache
			c.as = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		}
	}
	t.Cleanup(func() {
		c.run(time.Minute, "sandbox", "down").want(plan.ExitDone)
		c.run(time.Minute, "sandbox", "down").want(plan.ExitDone) // again is no error
		c.wantNoProcesses()
		if _, err := os.Lstat(filepath.Join(state, "constellation")); err == nil {
			t.Errorf("sandbox down left %v", find(t, state))
		}
		if left := find(t, c.dir); len(left) > 0 {
			t.Errorf("sandbox down left %v in the workspace", left)
		}
	})
	return c
}

// linked copies a folder with hard links to its files.
func linked(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		switch {
		case err != nil:
			return err
		case d.IsDir():
			return os.MkdirAll(filepath.Join(to, rel), 0o755)
		case d.Type().IsRegular():
			return os.Link(path, filepath.Join(to, rel))
		}
		return nil
	})
}

// wantNoProcesses waits until no process of the sandbox is left.
func (c *cloud) wantNoProcesses() {
	c.t.Helper()
	home := filepath.Dir(c.dir)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		var left []string
		all, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			c.t.Fatal(err)
		}
		for _, p := range all {
			if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), home) { // it may have ended meanwhile
				left = append(left, strings.ReplaceAll(string(b), "\x00", " "))
			}
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("processes are left: %q", left)
		}
	}
}

// find lists the files below a folder.
func find(t *testing.T, dir string) (all []string) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			all = append(all, path)
		}
		return err
	}); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return all
}

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
