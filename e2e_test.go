package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/machine/machinetest"
	"constellation/internal/testneeds"
)

// These tests run bin/constellation as a user does, each against its own sandbox. `make test`
// builds the required programs.

// agnhost is the test workload image in a sandbox's registry.
var agnhost = build.AgnhostImage(current)

// cloud is the sandbox of one test and its workspace.
type cloud struct {
	t   *testing.T
	bin string // bin/ of this repository
	dir string // the workspace
	// as is the user who runs the program, env its additional environment.
	as    *syscall.SysProcAttr
	env   []string
	netns string // the file of the network namespace of the program; empty: this one
	real  bool   // its machines are real
}

// machineKind is a value of `sandbox up --machines`. A suite is one function, and one test for
// each kind runs it: tests of real machines run sequentially, tests of simulated machines in
// parallel. Features that only real machines have, such as reachable Services, are tested on
// these only.
type machineKind string

const (
	realMachines      machineKind = "real"
	simulatedMachines machineKind = "simulated"
)

// newCluster starts a sandbox with machines of a kind and creates a cluster. It returns the
// events of init.
func newCluster(t *testing.T, kind machineKind, controlPlanes, workers int, more ...string) (*cloud, *result) {
	t.Helper()
	var c *cloud
	if kind == realMachines {
		c = newCloud(t, controlPlanes, workers, more...)
		c.wantTraces()
	} else {
		c = newSimulated(t)
		up := c.run(time.Minute, append([]string{"sandbox", "up", "--machines", "simulated", "--control-planes", fmt.Sprint(controlPlanes), "--workers", fmt.Sprint(workers)}, more...)...)
		if !strings.Contains(up.want(plan.ExitDone).stdout, "machines are simulated") {
			t.Errorf("sandbox up does not report that machines are simulated:\n%s", up.stdout)
		}
	}
	c.run(time.Minute, "status").want(plan.ExitDone)
	r := c.run(8*time.Minute, "init", "--non-interactive", "--yes", "-o", "json").want(plan.ExitDone)
	if events := r.events(); events[0].Simulated != (kind == simulatedMachines) {
		t.Errorf("init on %s machines reports simulated: %t", kind, events[0].Simulated)
	}
	return c, r
}

// newReal returns a workspace for real machines, which it locks against other tests. It makes the
// test parallel: simulated machines run meanwhile.
func newReal(t *testing.T) *cloud {
	t.Helper()
	testneeds.Machines(t)
	t.Parallel()
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	c := &cloud{t: t, bin: filepath.Join(wd, "bin"), dir: t.TempDir(), real: true}
	if _, err := os.Stat(filepath.Join(c.bin, "constellation")); err != nil {
		t.Fatal("bin/constellation is missing: run `make build` first, or `make test`, which does")
	}
	unlock, err := machinetest.Lock()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unlock)
	return c
}

// newCloud starts a sandbox, and checks at the end of the test that nothing of it is left.
func newCloud(t *testing.T, controlPlanes, workers int, more ...string) *cloud {
	t.Helper()
	c := newReal(t)
	c.up(controlPlanes, workers, more...)
	return c
}

// up starts the sandbox of a workspace and removes it when the test ends.
func (c *cloud) up(controlPlanes, workers int, more ...string) {
	t := c.t
	t.Helper()
	t.Cleanup(func() {
		name := c.name()
		c.run(5*time.Minute, "sandbox", "down").want(plan.ExitDone)
		if left := leftovers(t, name); len(left) > 0 {
			t.Errorf("sandbox down left something behind:\n%s", strings.Join(left, "\n"))
		}
	})
	args := append([]string{"sandbox", "up", "--yes", "--control-planes", fmt.Sprint(controlPlanes), "--workers", fmt.Sprint(workers)}, more...)
	// Wait until the last process of an earlier test has ended.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Second) {
		r := c.run(10*time.Minute, args...)
		if r.code == plan.ExitBlocked && strings.Contains(r.stderr, "inotify") && time.Now().Before(deadline) {
			continue
		}
		r.want(plan.ExitDone)
		return
	}
}

// result is the output and exit code of a command.
type result struct {
	c              *cloud
	args           []string
	stdout, stderr string
	code           int
}

func (c *cloud) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := c.inNetwork(ctx, append([]string{filepath.Join(c.bin, "constellation"), "-C", c.dir}, args...)...)
	cmd.Env = append(append(os.Environ(), "NO_COLOR=1"), c.env...)
	cmd.SysProcAttr = c.as
	return cmd
}

// inNetwork is a program in the network of the cloud's programs.
func (c *cloud) inNetwork(ctx context.Context, args ...string) *exec.Cmd {
	if c.netns != "" {
		args = append([]string{"nsenter", "--net=" + c.netns}, args...)
	}
	return exec.CommandContext(ctx, args[0], args[1:]...)
}

func (c *cloud) run(limit time.Duration, args ...string) *result {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := c.command(ctx, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		c.t.Fatalf("constellation %s: %v", strings.Join(args, " "), err)
	}
	if ctx.Err() != nil {
		c.t.Fatalf("constellation %s: not done after %v\nstdout:\n%s\nstderr:\n%s", strings.Join(args, " "), limit, tail(out.String()), tail(errs.String()))
	}
	return &result{c: c, args: args, stdout: out.String(), stderr: errs.String(), code: cmd.ProcessState.ExitCode()}
}

// meanwhile runs a command beside the test. The function waits for it.
func (c *cloud) meanwhile(limit time.Duration, args ...string) func() *result {
	ended := make(chan *result, 1)
	go func() {
		defer close(ended) // also if run ends this goroutine because the command does not end
		ended <- c.run(limit, args...)
	}()
	return func() *result {
		c.t.Helper()
		r, ok := <-ended
		if !ok {
			c.t.FailNow()
		}
		return r
	}
}

func tail(s string) string {
	lines := strings.Split(s, "\n")
	return strings.Join(lines[max(0, len(lines)-60):], "\n")
}

func (r *result) want(code int) *result {
	r.c.t.Helper()
	if r.code != code {
		r.c.t.Fatalf("constellation %s: exit code %d, want %d\nstdout:\n%s\nstderr:\n%s", strings.Join(r.args, " "), r.code, code, tail(r.stdout), tail(r.stderr))
	}
	return r
}

// events parses the JSON Lines of a run and checks the invariants of every stream.
func (r *result) events() []plan.Event {
	t := r.c.t
	t.Helper()
	events := parseEvents(t, r.stdout)
	if len(events) == 0 {
		t.Fatalf("no events on stdout; stderr:\n%s", tail(r.stderr))
	}
	for i, e := range events {
		if e.Seq != uint64(i+1) {
			t.Fatalf("event %d has sequence number %d", i+1, e.Seq)
		}
	}
	last := events[len(events)-1]
	if events[0].Kind != plan.KindHello || last.Kind != plan.KindResult {
		t.Fatalf("the stream goes from %s to %s, want hello to result", events[0].Kind, last.Kind)
	}
	if last.Exit == nil || *last.Exit != r.code {
		t.Errorf("the result event has exit %v, the process %d", last.Exit, r.code)
	}
	return events
}

func parseEvents(t *testing.T, s string) []plan.Event {
	t.Helper()
	var events []plan.Event
	sc := bufio.NewScanner(strings.NewReader(s))
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		var e plan.Event
		if err := json.Unmarshal(sc.Bytes(), &e); err != nil {
			t.Fatalf("invalid event: %v: %q", err, sc.Text())
		}
		events = append(events, e)
	}
	return events
}

func (c *cloud) kubectl(args ...string) string {
	c.t.Helper()
	out, err := c.tryKubectl(args...)
	if err != nil {
		c.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// tryKubectl is kubectl that may fail.
func (c *cloud) tryKubectl(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := c.inNetwork(ctx, append([]string{filepath.Join(c.bin, "kubectl"), "--kubeconfig", filepath.Join(c.dir, "constellation-admin.conf")}, args...)...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// wantNodes checks that exactly these machines are nodes, and all are Ready.
func (c *cloud) wantNodes(names ...string) {
	c.t.Helper()
	out := c.kubectl("get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status} {end}`)
	var want []string
	for _, n := range names {
		want = append(want, n+"=True")
	}
	got := strings.Fields(out)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		c.t.Fatalf("nodes %v, want %v", got, want)
	}
}

// wantVIP deploys a web server and requests its Service from every machine.
func (c *cloud) wantVIP(machines ...string) {
	c.t.Helper()
	c.kubectl("create", "deployment", "hello", "--image="+agnhost, "--replicas=3", "--", "/agnhost", "netexec", "--http-port=8080")
	c.kubectl("expose", "deployment", "hello", "--port=80", "--target-port=8080")
	c.kubectl("rollout", "status", "deployment/hello", "--timeout=110s")
	c.wantAnswer(machines...)
}

// wantAnswer requests the Service of wantVIP from every machine.
func (c *cloud) wantAnswer(machines ...string) {
	t := c.t
	t.Helper()
	vip := c.kubectl("get", "service", "hello", "-o", "jsonpath={.spec.clusterIP}")
	for _, m := range machines {
		// kube-proxy may need a moment after the pods are ready, so the probe retries until its deadline.
		probe := fmt.Sprintf(`for i in $(seq 60); do if exec 3<>/dev/tcp/%s/80; then printf 'GET /hostname HTTP/1.0\r\n\r\n' >&3; cat <&3; exit 0; fi; read -t 1 <> <(:) || :; done; exit 1`, vip)
		got := c.run(2*time.Minute, "sandbox", "shell", m, "--", "bash", "-c", probe).want(0).stdout
		if !strings.Contains(got, "hello-") {
			t.Errorf("the service answered %s with %q, want a pod's host name", m, got)
		}
	}
}

// name returns the name of the sandbox, which all its resources carry.
func (c *cloud) name() string {
	c.t.Helper()
	var status struct{ Name string }
	if err := json.Unmarshal([]byte(c.run(time.Minute, "sandbox", "status", "-o", "json").want(plan.ExitDone).stdout), &status); err != nil || status.Name == "" {
		c.t.Fatalf("sandbox status has no name: %v", err)
	}
	return status.Name
}

// leftovers lists all resources of the sandbox called name on this computer. While it runs
// there is at least one of every kind; see wantTraces.
func leftovers(t *testing.T, name string) []string {
	t.Helper()
	var out []string
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "/"+name+"/") {
			out = append(out, "mount "+line)
		}
	}
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		b, _ := os.ReadFile(p) // the process may have ended meanwhile
		if cmd := strings.ReplaceAll(string(b), "\x00", " "); strings.Contains(cmd, "/"+name+"/") || strings.Contains(cmd, "sandbox daemon "+name) {
			out = append(out, "process "+filepath.Base(filepath.Dir(p))+" "+cmd)
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(p string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), name) {
			out = append(out, "cgroup "+p)
		}
		return nil
	})
	state := os.Getenv("XDG_STATE_HOME")
	if state == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			t.Fatal(err)
		}
		state = filepath.Join(home, ".local", "state")
	}
	for _, pattern := range []string{name + "*", "." + name + "*"} {
		files, err := filepath.Glob(filepath.Join(state, "constellation", "sandbox", pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			out = append(out, "file "+f)
		}
	}
	return out
}

// wantTraces checks that leftovers finds a running sandbox. Otherwise an empty result after
// sandbox down would prove nothing.
func (c *cloud) wantTraces() {
	c.t.Helper()
	found := strings.Join(leftovers(c.t, c.name()), "\n")
	for _, kind := range []string{"mount ", "process ", "cgroup ", "file "} {
		if !strings.Contains(found, kind) {
			c.t.Errorf("no %sof a running sandbox found in:\n%s", kind, found)
		}
	}
}

func (c *cloud) mode(name string) os.FileMode {
	c.t.Helper()
	fi, err := os.Stat(filepath.Join(c.dir, name))
	if err != nil {
		c.t.Fatal(err)
	}
	return fi.Mode().Perm()
}

func TestClusterOfRealMachines(t *testing.T) {
	c, machines := lives(t, realMachines)
	c.wantVIP(machines...)
	c.callersKeepTheirAddress()
	c.survives(realMachines, machines)
}

func TestClusterOfSimulatedMachines(t *testing.T) {
	t.Parallel()
	c, machines := lives(t, simulatedMachines)
	c.answersItsOwnerAlone()
	c.findsTrouble() // of the API server, which is real for simulated machines, too
	c.survives(simulatedMachines, machines)
}

// callersKeepTheirAddress opens a connection from a worker to the join service's node port. The
// service must log the worker's own address, because by that it refuses revoked machines. With
// externalTrafficPolicy: Cluster, kube-proxy rewrites it to the address of a control plane.
func (c *cloud) callersKeepTheirAddress() {
	c.t.Helper()
	address := func(node string) string {
		return c.kubectl("get", "node", node, "-o", `jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`)
	}
	port := c.kubectl("-n", "constellation-system", "get", "service", "joinservice", "-o", "jsonpath={.spec.ports[0].nodePort}")
	c.run(time.Minute, "sandbox", "shell", "worker-0", "--", "bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%s; echo no handshake >&3; cat <&3 >/dev/null", address("control-plane-0"), port))
	var peer string
	c.eventually(time.Minute, "the join service logs the connection", func(out string) bool {
		for line := range strings.Lines(out) {
			var entry struct{ Msg, Peer string }
			if json.Unmarshal([]byte(line), &entry) == nil && entry.Msg == "connection refused" {
				peer = entry.Peer
			}
		}
		return peer != ""
	}, "-n", "constellation-system", "logs", "-l", "app.kubernetes.io/name=joinservice", "--tail=-1")
	if want := address("worker-0"); !strings.HasPrefix(peer, want+":") {
		c.t.Errorf("the join service saw worker-0 as %s, want %s", peer, want)
	}
}

// lives creates a cluster of one control plane and two workers with an older release, checks
// that no secret leaks, and runs upgrade check, backup and restore.
func lives(t *testing.T, kind machineKind) (c *cloud, machines []string) {
	t.Helper()
	c, r := newCluster(t, kind, 1, 2, "--release", "v1.0.0", "--image", "v1.0.0")
	events := r.events()
	for _, kind := range []plan.Kind{plan.KindPlan, plan.KindCheck, plan.KindStep, plan.KindNode, plan.KindLog} {
		if !slices.ContainsFunc(events, func(e plan.Event) bool { return e.Kind == kind }) {
			t.Errorf("no %s event in the stream", kind)
		}
	}
	for name, mode := range map[string]os.FileMode{
		"constellation-mastersecret.json": 0o600, "constellation-admin.conf": 0o600, "constellation-state.yaml": 0o600,
	} {
		if got := c.mode(name); got != mode {
			t.Errorf("%s has mode %o, want %o", name, got, mode)
		}
	}
	noSecrets(t, c, r.stdout+r.stderr)

	machines = []string{"control-plane-0", "worker-0", "worker-1"}
	c.wantNodes(machines...)
	if out := c.run(time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitNothing).stderr; out == "" {
		t.Error("a second init printed nothing")
	}
	c.isClean(kind)
	c.restores()
	return c, machines
}

func TestInitOfThreeControlPlanesOnRealMachines(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ROLLOUT", "five minutes")
	c, _ := threeControlPlanes(t, realMachines)
	c.recovers(realMachines, "control-plane-1", "control-plane-2")
}

func TestInitOfThreeControlPlanesOnSimulatedMachines(t *testing.T) {
	t.Parallel()
	c, machines := threeControlPlanes(t, simulatedMachines)
	c.survivesACrash(machines)
	c.replacesALostControlPlane()
	c.recovers(simulatedMachines, "control-plane-1", "control-plane-3")
}

// replacesALostControlPlane deletes one of three control planes without a drain, so that its
// member stays in etcd. No other control plane can join while etcd has that member.
func (c *cloud) replacesALostControlPlane() {
	c.t.Helper()
	// After a crash of all API servers, one that knows no roles yet may still be reached.
	c.eventually(time.Minute, "a ConfigMap is created", func(out string) bool {
		return strings.Contains(out, "configmap/before")
	}, "create", "configmap", "before", "--from-literal=k=v", "-o", "name")
	c.run(time.Minute, "sandbox", "machine", "off", "control-plane-2").want(plan.ExitDone)
	c.run(time.Minute, "sandbox", "up", "--control-planes", "2").want(plan.ExitDone)
	c.eventually(4*time.Minute, "the Node of the lost machine is deleted", func(out string) bool {
		return !strings.Contains(out, "control-plane-2")
	}, "get", "nodes", "-o", "name")
	begun := time.Now()
	c.run(time.Minute, "sandbox", "up", "--control-planes", "3").want(plan.ExitDone)
	// Only a member of etcd has the label.
	c.eventually(4*time.Minute, "another control plane has replaced it", func(out string) bool {
		return strings.Contains(out, "control-plane-3")
	}, "get", "nodes", "-o", "name", "-l", "node-role.kubernetes.io/control-plane")
	c.wantReady(begun, []string{"control-plane-0", "control-plane-1", "control-plane-3", "worker-0"})
	c.wantEtcdMembers(3)
	if out := c.kubectl("get", "configmap", "before", "-o", "jsonpath={.data.k}"); out != "v" {
		c.t.Errorf("the object created before is %q", out)
	}
}

// threeControlPlanes creates a cluster of three control planes, each with an etcd member and
// an API server, and one worker.
func threeControlPlanes(t *testing.T, kind machineKind) (c *cloud, machines []string) {
	t.Helper()
	c, _ = newCluster(t, kind, 3, 1)
	machines = []string{"control-plane-0", "control-plane-1", "control-plane-2", "worker-0"}
	c.wantNodes(machines...)
	c.wantEtcdMembers(3)
	if kind == realMachines {
		c.wantVIP(machines...)
	}
	return c, machines
}

// wantEtcdMembers waits until n etcd pods are Running. A kubelet creates the mirror pod of a
// static pod at its next sync, up to 90 s after the member started to serve.
func (c *cloud) wantEtcdMembers(n int) {
	c.t.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	for {
		members := c.kubectl("-n", "kube-system", "get", "pods", "-l", "component=etcd", "--field-selector=status.phase=Running", "-o", "name")
		found := strings.Count(members, "pod/etcd-")
		if found == n {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%d etcd members, want %d:\n%s", found, n, c.kubectl("-n", "kube-system", "get", "pods", "-o", "wide"))
		}
		time.Sleep(2 * time.Second)
	}
}

// TestInitResumesAfterKill kills the console twice during init and runs the same command
// again. The unfinished state is in the cluster and in the bootstrapper, which are the same
// on real and simulated machines.
func TestInitResumesAfterKill(t *testing.T) {
	t.Parallel()
	c := newSimulated(t)
	c.run(time.Minute, "sandbox", "up", "--machines", "simulated", "--workers", "1").want(plan.ExitDone)

	kill := func(t *testing.T, when func(plan.Event) bool, then func(cmd *exec.Cmd)) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 6*time.Minute)
		defer cancel()
		cmd := c.command(ctx, "init", "--non-interactive", "--yes", "-o", "json")
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		var errs bytes.Buffer
		cmd.Stderr = &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		seen := false
		sc := bufio.NewScanner(stdout)
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			var e plan.Event
			if err := json.Unmarshal(sc.Bytes(), &e); err != nil {
				t.Errorf("invalid event: %q", sc.Text())
			}
			if !seen && when(e) {
				seen = true
				then(cmd)
			}
		}
		_ = cmd.Wait() // killed or detached: the exit code does not matter
		if !seen {
			t.Fatalf("the event at which to kill was never written; stderr:\n%s", tail(errs.String()))
		}
	}
	console := func(cmd *exec.Cmd) { _ = cmd.Process.Kill() }

	t.Run("console killed while the first node starts", func(t *testing.T) {
		kill(t, func(e plan.Event) bool { return e.Kind == plan.KindLog && e.Source == "kubeadm" }, console)
	})
	t.Run("console killed while charts are installed", func(t *testing.T) {
		kill(t, func(e plan.Event) bool {
			return e.Kind == plan.KindStep && e.Step == "charts" && e.State == plan.StateRunning
		}, console)
	})
	c.run(6*time.Minute, "init", "--non-interactive", "--yes", "-o", "json").want(plan.ExitDone).events()
	c.wantNodes("control-plane-0", "worker-0")
	runs, err := filepath.Glob(filepath.Join(c.dir, "constellation-upgrade", "init-*"))
	if err != nil || len(runs) == 0 {
		t.Errorf("no record of the runs (%v)", err)
	}
}

// noSecrets fails if a secret of the workspace occurs in s or in the record of a run.
func noSecrets(t *testing.T, c *cloud, s string) {
	t.Helper()
	var secrets []string
	var master struct{ Key, Salt string }
	b, err := os.ReadFile(filepath.Join(c.dir, "constellation-mastersecret.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &master); err != nil || master.Key == "" {
		t.Fatalf("read the master secret: %v", err)
	}
	secrets = append(secrets, master.Key, master.Salt)
	state, err := os.ReadFile(filepath.Join(c.dir, "constellation-state.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(state)) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok && k == "initSecret" {
			secrets = append(secrets, strings.Trim(strings.TrimSpace(v), `"'`))
		}
	}
	if len(secrets) < 3 || secrets[2] == "" {
		t.Fatal("the state file has no init secret")
	}
	records := map[string]string{"the output": s}
	err = filepath.WalkDir(filepath.Join(c.dir, "constellation-upgrade"), func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		records[p] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for where, text := range records {
		for _, secret := range append(secrets, "BEGIN RSA PRIVATE KEY", "BEGIN EC PRIVATE KEY", "client-key-data") {
			if strings.Contains(text, secret) {
				t.Errorf("%s contains a secret", where)
			}
		}
	}
}
