package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine"
	"constellation/engine/cloud/cloudtest"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/simulated"
	"constellation/internal/testneeds"
)

// ordinaryUser is the user of these tests if root starts them.
const ordinaryUser = 54321

// simulatedTurns limits how many tests run simulated machines at the same time, beside the test with real machines.
var simulatedTurns = make(chan struct{}, 2)

// newSimulated returns a workspace of an unprivileged user with a separate home directory and
// read access to the built programs and Kubernetes. It waits for a place in simulatedTurns.
func newSimulated(t *testing.T) *cloud {
	t.Helper()
	testneeds.ControlPlane(t)
	simulatedTurns <- struct{}{}
	t.Cleanup(func() { <-simulatedTurns })
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	cache := filepath.Join(testneeds.Kubernetes(t, current), "..", "..", "..") // of this user
	// Socket paths must be short, and root's home is not readable by others.
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
		if build.Cached(cache, v) {
			share(t, filepath.Join(cache, "kubernetes", v), filepath.Join(home, ".cache/constellation/kubernetes", v))
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
		c.run(time.Minute, "sandbox", "down").want(plan.ExitDone)
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

// answersItsOwnerAlone requests the metadata of machines as the user of the sandbox and as
// another user, who must get no metadata at the address of any machine.
func (c *cloud) answersItsOwnerAlone() {
	c.t.Helper()
	if c.as == nil {
		c.t.Log("not root: cannot run as another user")
		return
	}
	var status struct {
		Sandbox struct {
			Machines []struct{ Name, IP string } `json:"machines"`
		} `json:"sandbox"`
	}
	if err := json.Unmarshal([]byte(c.run(time.Minute, "sandbox", "status", "-o", "json").want(plan.ExitDone).stdout), &status.Sandbox); err != nil {
		c.t.Fatal(err)
	}
	if len(status.Sandbox.Machines) == 0 {
		c.t.Fatal("sandbox status lists no machines")
	}
	ask := func(user uint32, address, path string) string {
		ctx, cancel := context.WithTimeout(c.t.Context(), 20*time.Second)
		defer cancel()
		host, port, _ := net.SplitHostPort(address)
		cmd := exec.CommandContext(ctx, "bash", "-c", `exec 3<>/dev/tcp/$1/$2; printf 'GET %s HTTP/1.1\r\nHost: %s:%s\r\nConnection: close\r\n\r\n' "$3" "$1" "$2" >&3; cat <&3`, "ask", host, port, path)
		cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
		out, _ := cmd.Output() // a connection that is cut may be an error to cat
		return string(out)
	}
	for _, m := range status.Sandbox.Machines {
		for _, path := range []string{"/v1/token", "/v1/initsecrethash", "/v1/peers", "/v1/self"} {
			address := net.JoinHostPort(m.IP, strconv.Itoa(simulated.MetadataPort))
			if out := ask(ordinaryUser, address, path); !strings.HasPrefix(out, "HTTP/1.1 200") && (path != "/v1/token" || !strings.HasPrefix(out, "HTTP/1.1 403")) {
				c.t.Errorf("%s: the owner got %q at %s", m.Name, out, path)
			}
			if out := ask(ordinaryUser+1, address, path); out != "" {
				c.t.Errorf("%s: another user got %q at %s", m.Name, out, path)
			}
		}
	}
}

// share makes a directory tree readable for others at another path, if possible without a copy.
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
		return os.Chtimes(dst, info.ModTime(), info.ModTime()) // by which the cache identifies its files
	})
	if err != nil {
		t.Fatal(err)
	}
}

// processesOf lists the processes with a name of this test in their arguments.
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

// status returns the output of `constellation status`.
func (c *cloud) status() engine.Status {
	c.t.Helper()
	r := c.run(time.Minute, "status", "-o", "json").want(plan.ExitDone)
	var st engine.Status
	if err := json.Unmarshal([]byte(r.stdout), &st); err != nil {
		c.t.Fatal(err)
	}
	return st
}

// wantVersions waits for a number of nodes that are all Ready and run the given versions. A
// joining control plane is a Node before it has its label.
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

// wantMachines waits until status has the given nodes, simulated or real as the machines are, by role, state, image and
// Kubernetes, sorted.
func (c *cloud) wantMachines(want ...string) {
	c.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Second) { // status is a process
		st := c.status()
		var got []string
		for _, n := range st.Nodes {
			_, version, _ := strings.Cut(n.Image, "/images/")
			got = append(got, fmt.Sprintf("%s %s %s %s", n.Role, n.State, version, n.Kubernetes))
		}
		slices.Sort(got)
		if slices.Equal(got, want) && st.Simulated == !c.real {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("nodes (simulated: %t) are\n%s\nwant\n%s", st.Simulated, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
}

// survivesACrash kills the processes of all simulated machines at once, and waits until the
// cloud has restarted them and their nodes are Ready.
func (c *cloud) survivesACrash(all []string) {
	c.t.Helper()
	begun := time.Now()
	for _, m := range all {
		if err := unix.Kill(c.machinePID(m), unix.SIGKILL); err != nil {
			c.t.Fatal(err)
		}
	}
	c.wantReady(begun, all)
	if !c.booted(2) {
		c.t.Error("a machine was not restarted")
	}
}

// TestCloudOfSimulatedMachinesConforms runs the conformance suite of clouds.
func TestCloudOfSimulatedMachinesConforms(t *testing.T) {
	t.Parallel()
	c := newSimulated(t)
	c.run(time.Minute, "sandbox", "up", "--machines", "simulated", "--control-planes", "1", "--workers", "0").want(plan.ExitDone)
	name := c.name()
	cloudtest.Run(t, cloudtest.Options{
		Cloud: sandboxapi.NewClient("unix:"+filepath.Join(c.sandboxDir(), "api.sock"), ""), Group: sandboxapi.GroupID(name, sandboxapi.WorkerGroup),
		Unknown: sandboxapi.ProviderID(name, "worker-999"), Images: []string{sandboxapi.ImageReference(name, "v1.0.0"), sandboxapi.ImageReference(name, "v1.1.0")},
	})
}

// TestControlPlaneLosesPowerDuringItsJoin cuts the power of a second control plane when it is a
// member of etcd and not yet a node. etcd has no quorum without it.
func TestControlPlaneLosesPowerDuringItsJoin(t *testing.T) {
	t.Parallel()
	c := newSimulated(t)
	c.run(time.Minute, "sandbox", "up", "--machines", "simulated", "--control-planes", "2", "--workers", "0").want(plan.ExitDone)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	init := c.command(ctx, "init", "--non-interactive", "--yes")
	if err := init.Start(); err != nil {
		t.Fatal(err)
	}
	dir := c.sandboxDir()
	says := func(machine, text string) bool {
		b, err := os.ReadFile(filepath.Join(dir, "m", machine, "console.log"))
		return err == nil && strings.Contains(string(b), text)
	}
	both := []string{"control-plane-0", "control-plane-1"}
	var joins string
	for joins == "" && ctx.Err() == nil {
		for _, m := range both { // either may have been the first
			if says(m, "Announced new etcd member") && says(m, "Creating static Pod manifest for \\\"kube-scheduler") {
				joins = m
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err := unix.Kill(c.machinePID(joins), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if says(joins, "this machine is a node") {
		t.Fatal("the machine had joined before its power was cut")
	}
	if err := init.Wait(); err != nil {
		t.Errorf("init: %v", err)
	}
	c.eventually(6*time.Minute, "both are control planes", func(out string) bool {
		return strings.Count(out, "node/") == 2
	}, "get", "nodes", "-o", "name", "-l", "node-role.kubernetes.io/control-plane")
	c.wantNodes(both...)
	c.wantEtcdMembers(2)
	if !says(joins, "removing this machine's member from etcd") {
		t.Error("its member was not removed from etcd")
	}
}

// sandboxDir is the directory of the sandbox. That of simulated machines is below a home of its own.
func (c *cloud) sandboxDir() string {
	c.t.Helper()
	if c.real {
		dirs, err := sandbox.DefaultDirs()
		if err != nil {
			c.t.Fatal(err)
		}
		return filepath.Join(dirs.State, "sandbox", c.name())
	}
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
		c.t.Fatalf("%q is not a process ID", b)
	}
	return pid
}

func (c *cloud) daemonPID() int { return c.pidIn("daemon.pid") }

func (c *cloud) machinePID(name string) int { return c.pidIn("m", name, "pid") }

// booted reports whether each machine was started n times.
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
