package main

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine"
	"constellation/engine/sandbox/build"
)

// ordinaryUser is who these tests are where they are started by root.
const ordinaryUser = 54321

// newSimulated returns a workspace of an ordinary user, with a home of its own and the
// programs and Kubernetes of this one to read.
func newSimulated(t *testing.T) *cloud {
	t.Helper()
	if testing.Short() {
		t.Skip("starts control planes; not in -short")
	}
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	if !build.Cached(filepath.Join(cache, "constellation"), "v1.35.4") {
		t.Skip("no Kubernetes in the cache: run `constellation sandbox fetch v1.35.4`")
	}
	// Paths of sockets are short, and a home of root's is closed to others.
	home, err := os.MkdirTemp("/tmp", "con")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(home); err != nil {
			t.Error(err)
		}
	})
	c := &cloud{t: t, bin: filepath.Join(home, "bin"), dir: filepath.Join(home, "demo"), env: []string{
		"HOME=" + home, "XDG_CACHE_HOME=" + filepath.Join(home, ".cache"), "XDG_STATE_HOME=" + filepath.Join(home, "s"),
	}}
	share(t, filepath.Join(wd, "bin"), c.bin)
	for _, v := range build.Versions() {
		if build.Cached(filepath.Join(cache, "constellation"), v) {
			share(t, filepath.Join(cache, "constellation/kubernetes", v), filepath.Join(home, ".cache/constellation/kubernetes", v))
		}
	}
	if os.Geteuid() == 0 {
		c.as = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: ordinaryUser, Gid: ordinaryUser}}
		if err := filepath.WalkDir(home, func(p string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return err
			}
			return os.Chown(p, ordinaryUser, ordinaryUser)
		}); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		c.run(time.Minute, "sandbox", "down").want(engine.ExitDone)
		for _, left := range []string{filepath.Join(home, "s")} {
			if entries, _ := os.ReadDir(left); len(entries) > 0 {
				t.Errorf("sandbox down left %s", entries)
			}
		}
		if procs := processesOf(t, home); len(procs) > 0 {
			t.Errorf("sandbox down left processes:\n%s", strings.Join(procs, "\n"))
		}
	})
	return c
}

// share has a tree appear elsewhere for others to read, without a copy where that can be.
func share(t *testing.T, from, to string) {
	t.Helper()
	err := filepath.WalkDir(from, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, p)
		if err != nil {
			return err
		}
		dst := filepath.Join(to, rel)
		if d.IsDir() {
			return os.MkdirAll(dst, 0o755)
		}
		if !d.Type().IsRegular() || os.Link(p, dst) == nil {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if err := os.WriteFile(dst, b, info.Mode().Perm()|0o444); err != nil {
			return err
		}
		return os.Chtimes(dst, info.ModTime(), info.ModTime()) // by which the cache knows its files
	})
	if err != nil {
		t.Fatal(err)
	}
}

// processesOf lists what runs with a word of this test in its arguments.
func processesOf(t *testing.T, word string) (out []string) {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		b, _ := os.ReadFile(p) // the process may have ended meanwhile
		if cmd := strings.ReplaceAll(string(b), "\x00", " "); strings.Contains(cmd, word) {
			out = append(out, filepath.Base(filepath.Dir(p))+" "+cmd)
		}
	}
	return out
}

// status is what `constellation status` says.
func (c *cloud) status() engine.Status {
	c.t.Helper()
	r := c.run(time.Minute, "status", "-o", "json").want(engine.ExitDone)
	var st engine.Status
	if err := json.Unmarshal([]byte(r.stdout), &st); err != nil {
		c.t.Fatal(err)
	}
	return st
}

// wantVersions waits until there are as many nodes, all Ready, and all run these. A
// control plane is a Node before it is one.
func (c *cloud) wantVersions(image, kubernetes string, controlPlanes, workers int) {
	c.t.Helper()
	var want []string
	for range controlPlanes {
		want = append(want, "control-plane ready "+image+" "+kubernetes)
	}
	for range workers {
		want = append(want, "worker ready "+image+" "+kubernetes)
	}
	c.wantMachines(want...)
}

// wantMachines waits until status tells of simulated nodes by role, state, image and
// Kubernetes, sorted.
func (c *cloud) wantMachines(want ...string) {
	c.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		st := c.status()
		var got []string
		for _, n := range st.Nodes {
			_, version, _ := strings.Cut(n.Image, "/images/")
			got = append(got, fmt.Sprintf("%s %s %s %s", n.Role, n.State, version, n.Kubernetes))
		}
		slices.Sort(got)
		if slices.Equal(got, want) && st.Simulated {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("nodes (simulated: %t) are\n%s\nwant\n%s", st.Simulated, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
}

// An ordinary user makes a cluster and brings it to the newest release that is here, hop
// by hop, as on real machines: each hop replaces machines, and that of Kubernetes changes
// the control plane in place before. In the last hop the workers stay the machines that they
// are, and their agents upgrade them.
func TestOrdinaryUserUpgradesOnSimulatedMachines(t *testing.T) {
	c := newSimulated(t)
	up := c.run(time.Minute, "sandbox", "up", "--machines", "simulated", "--release", "v1.0.0", "--image", "v1.0.0", "--kubernetes", "v1.35.4").want(engine.ExitDone)
	if !strings.Contains(up.stdout, "machines are simulated") {
		t.Errorf("sandbox up does not say that machines are simulated:\n%s", up.stdout)
	}
	events := c.run(5*time.Minute, "init", "--non-interactive", "--yes", "-o", "json").want(engine.ExitDone).events()
	if !events[0].Simulated {
		t.Error("the events of init do not say that machines are simulated")
	}
	c.wantVersions("v1.0.0", "v1.35.4", 1, 2)

	// The cloud's daemon dies; its machines do not notice, and another one finds them.
	before := c.status()
	pid := c.daemonPID()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	again := c.run(time.Minute, "sandbox", "up").want(engine.ExitDone)
	if !strings.Contains(again.stdout, "with the 3 machines that it had") {
		t.Errorf("sandbox up after the daemon's death:\n%s", again.stdout)
	}
	if got := c.status(); len(got.Nodes) != len(before.Nodes) || !got.Reachable {
		t.Errorf("after the daemon's death: %+v", got)
	}

	hops := []string{"v1.35.4"}
	if home := c.env[1]; build.Cached(filepath.Join(strings.TrimPrefix(home, "XDG_CACHE_HOME="), "constellation"), "v1.36.3") {
		hops = append(hops, "v1.36.3")
	}
	stayed := ""
	workers := func() string {
		return c.kubectl("get", "nodes", "-l", "!node-role.kubernetes.io/control-plane", "-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.uid} {.spec.unschedulable}{"\n"}{end}`)
	}
	for i, kubernetes := range hops {
		if i > 0 {
			c.kubectl("patch", "scalinggroup", "workers", "--type=merge", "-p", `{"spec":{"strategy":"InPlace"}}`)
			stayed = workers()
		}
		c.run(time.Minute, "upgrade", "check", "--write-config").want(engine.ExitDone)
		c.run(8*time.Minute, "upgrade", "apply", "--non-interactive", "--yes").want(engine.ExitDone)
		st := c.status()
		for _, n := range st.Nodes {
			if n.State != engine.NodeReady || n.Kubernetes != kubernetes {
				t.Errorf("%s is %s with Kubernetes %s, want it ready with %s", n.Name, n.State, n.Kubernetes, kubernetes)
			}
		}
	}
	if len(hops) > 1 {
		// The hop before left them as they were, so that nodes are not replaced twice.
		c.wantMachines("control-plane ready v1.1.0 v1.36.3", "worker ready v1.0.0 v1.36.3", "worker ready v1.0.0 v1.36.3")
		if now := workers(); now != stayed {
			t.Errorf("workers are\n%s\nbut should have stayed\n%s", now, stayed)
		}
	}
}

// Further control planes are members of etcd and API servers of their own; all machines
// come back by themselves when they are rebooted at once.
func TestSimulatedControlPlanesSurviveARebootOfAll(t *testing.T) {
	c := newSimulated(t)
	c.run(time.Minute, "sandbox", "up", "--machines", "simulated", "--control-planes", "3", "--workers", "2").want(engine.ExitDone)
	c.run(5*time.Minute, "init", "--non-interactive", "--yes").want(engine.ExitDone)
	c.wantVersions("v1.1.0", "v1.35.4", 3, 2)
	for _, m := range []string{"control-plane-0", "control-plane-1", "control-plane-2", "worker-0", "worker-1"} {
		// As a crash would: the cloud switches it on again.
		if err := unix.Kill(c.machinePID(m), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	var last string
	for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		r := c.run(time.Minute, "status", "-o", "json")
		var st engine.Status
		if err := json.Unmarshal([]byte(r.stdout), &st); err == nil && st.Reachable {
			ready := 0
			for _, n := range st.Nodes {
				if n.State == engine.NodeReady {
					ready++
				}
			}
			if last = fmt.Sprintf("%d of %d nodes are ready", ready, len(st.Nodes)); ready == 5 && c.booted(2) {
				break
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("the cluster did not come back: %s\n%s", last, tail(r.stdout+r.stderr))
		}
	}
}

func (c *cloud) sandboxDir() string {
	return filepath.Join(strings.TrimPrefix(c.env[2], "XDG_STATE_HOME="), "constellation/sandbox", c.name())
}

func (c *cloud) pidIn(elem ...string) int {
	c.t.Helper()
	b, err := os.ReadFile(filepath.Join(append([]string{c.sandboxDir()}, elem...)...))
	if err != nil {
		c.t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(b), &pid); err != nil || pid <= 1 {
		c.t.Fatalf("%q is no process", b)
	}
	return pid
}

func (c *cloud) daemonPID() int { return c.pidIn("daemon.pid") }

func (c *cloud) machinePID(name string) int { return c.pidIn("m", name, "pid") }

// booted reports whether each machine was switched on so often.
func (c *cloud) booted(times int) bool {
	c.t.Helper()
	records, err := filepath.Glob(filepath.Join(c.sandboxDir(), "m", "*", "machine.json"))
	if err != nil {
		c.t.Fatal(err)
	}
	for _, r := range records {
		var m struct {
			Boots int `json:"boots"`
		}
		if b, err := os.ReadFile(r); err != nil || json.Unmarshal(b, &m) != nil || m.Boots < times {
			return false
		}
	}
	return len(records) > 0
}
