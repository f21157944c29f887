package sandbox

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"

	"constellation/engine"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/machine/machinetest"
	"constellation/engine/workspace"
	"constellation/internal/testneeds"
)

// TestMain makes this test binary the program that Up starts as daemon.
func TestMain(m *testing.M) {
	askIfTold()
	if len(os.Args) == 4 && os.Args[1] == "sandbox" && os.Args[2] == "daemon" {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		dirs, err := DefaultDirs()
		if err == nil {
			err = Serve(ctx, dirs, os.Args[3], slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})), nil)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// realSandboxes skips the test unless this computer can run real machines from its
// cache, and returns sandboxes with temporary state.
func realSandboxes(t *testing.T, want machine.Demand) (*Sandboxes, string) {
	t.Helper()
	testneeds.Machines(t)
	dirs, err := DefaultDirs()
	if err != nil {
		t.Skip(err)
	}
	if _, err := build.Load(dirs.Cache, build.DefaultVersion); err != nil {
		t.Skip(err)
	}
	for _, name := range []string{"bootstrapper", "agent", "joinservice", "operator"} {
		if _, err := build.ReleaseBinary("v1.1.0", name); err != nil {
			t.Skip(err, "; run `make binaries`")
		}
	}
	unlock, err := machinetest.Lock()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unlock)
	for _, p := range machine.Check(t.Context(), dirs.Cache, t.TempDir(), want) {
		t.Skip(p)
	}
	// The path is short, for the unix sockets below it. t.TempDir would follow mounts when it removes files.
	tmp, err := os.MkdirTemp("", "csb")
	if err != nil {
		t.Fatal(err)
	}
	dirs.State = filepath.Join(tmp, "constellation")
	workspace := filepath.Join(tmp, "demo")
	if err := os.Mkdir(workspace, 0o755); err != nil {
		t.Fatal(err)
	}
	s := New(dirs, os.Args[0], slog.New(slog.NewTextHandler(t.Output(), nil)))
	t.Cleanup(func() {
		if t.Failed() {
			for _, pattern := range []string{"sandbox/*/daemon.log", "sandbox/*/m/*/console.log"} {
				files, _ := filepath.Glob(filepath.Join(dirs.State, pattern))
				for _, f := range files {
					b, _ := os.ReadFile(f)
					t.Logf("%s:\n%s", f, lastLines(string(b), 60))
				}
			}
		}
		if err := s.Down(context.Background(), workspace, nil); err != nil {
			t.Error(err)
			return // do not delete anything mounted below tmp
		}
		os.RemoveAll(workspace)
		if err := os.Remove(tmp); err != nil {
			t.Errorf("down left files: %v", err)
		}
	})
	return s, workspace
}

// footprint lists the remains of the sandboxes below dir on this computer, except
// files: mounts, processes and cgroups that carry its path or one of the names, and
// processes in one of the network namespaces.
func footprint(t *testing.T, dir string, names []string, namespaces map[string]bool) []string {
	t.Helper()
	var out []string
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		out = append(out, "mount "+m.Mountpoint)
	}
	filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		for _, name := range names {
			if err == nil && e.IsDir() && strings.HasPrefix(e.Name(), name+"-") {
				out = append(out, "cgroup "+path)
			}
		}
		return nil
	})
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		if ns, err := os.Readlink(p + "/ns/net"); err == nil && namespaces[ns] {
			out = append(out, "network namespace "+ns)
		}
		cmdline, err := os.ReadFile(p + "/cmdline")
		if err == nil && strings.Contains(string(cmdline), dir) {
			out = append(out, "process "+strings.ReplaceAll(string(cmdline), "\x00", " "))
		}
	}
	return out
}

// networks returns the network namespaces of a sandbox.
func networks(t *testing.T, dir string) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	found, _ := filepath.Glob(filepath.Join(dir, "netns", "*"))
	for _, f := range found {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		out[fmt.Sprintf("net:[%d]", info.Sys().(*syscall.Stat_t).Ino)] = true
	}
	return out
}

// gone waits until footprint is empty.
func gone(t *testing.T, dir string, names []string, namespaces map[string]bool) {
	t.Helper()
	var left []string
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if left = footprint(t, dir, names, namespaces); len(left) == 0 {
			return
		}
	}
	t.Errorf("left on this computer:\n%s", strings.Join(left, "\n"))
}

// inside runs a shell command in a machine.
func inside(t *testing.T, s *Sandboxes, name, node, script string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out bytes.Buffer
	code, err := s.Exec(ctx, name, node, []string{"/bin/bash", "-c", script}, nil, &out, &out, false)
	if err != nil {
		t.Fatalf("%s: %v", node, err)
	}
	return code, out.String()
}

// fetch is a shell function: fetch HOST PORT PATH writes an HTTP body to stdout.
// Machines have no curl.
const fetch = `fetch() { exec 3<>/dev/tcp/$1/$2; printf 'GET %s HTTP/1.0\r\nHost: x\r\n\r\n' "$3" >&3; sed '1,/^\r$/d' <&3; exec 3>&-; }; `

func rss(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			return strings.TrimSpace(v)
		}
	}
	return "?"
}

func TestRealSandbox(t *testing.T) {
	s, workspace := realSandboxes(t, machine.Demand{ControlPlanes: 1, Workers: 2})
	ctx := t.Context()

	// Up.
	start := time.Now()
	var events []plan.Event
	info, err := s.Up(ctx, engine.SandboxSpec{Workspace: workspace, ControlPlanes: 1, Workers: 1}, func(e plan.Event) { events = append(events, e) })
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("up took %s", time.Since(start).Round(time.Millisecond))
	for _, e := range events {
		t.Logf("%s %s %s %s %s %s>%s %d", e.Kind, e.Step, e.State, e.Text, e.Node, e.From, e.To, e.TookMS)
	}
	name := info.Name
	if !strings.HasPrefix(name, "demo-") || len(info.InitSecret) != 32 || len(info.Measurements) == 0 || !strings.Contains(info.TrustRoots, "CERTIFICATE") {
		t.Errorf("info %+v", info)
	}
	pidOf := func() int {
		p, err := readProcess(s.dirs.of(name, pidName))
		if err != nil {
			t.Fatal(err)
		}
		return p.pid
	}
	client := sandboxapi.NewClient("unix:"+info.Socket, "")

	// Metadata, as machines see it.
	_, self := inside(t, s, name, "worker-0", fetch+"fetch 169.254.169.254 80 /v1/self")
	if !strings.Contains(self, `"providerID":"sandbox://`+name+`/worker-0"`) {
		t.Errorf("metadata of worker-0: %s", self)
	}
	_, token := inside(t, s, name, "control-plane-0", fetch+"fetch 169.254.169.254 80 /v1/token")
	_, noToken := inside(t, s, name, "worker-0", fetch+"fetch 169.254.169.254 80 /v1/token")
	if !strings.Contains(token, `"token"`) || strings.Contains(noToken, `"token"`) {
		t.Errorf("tokens: control plane %q, worker %q", token, noToken)
	}
	if code, out := inside(t, s, name, "worker-0", "cat /etc/constellation/environment && grep -c BEGIN /etc/constellation/attestation-roots.pem && hostname"); code != 0 || !strings.Contains(out, "CONSTELLATION_METADATA=http://169.254.169.254") {
		t.Errorf("files of the machine: %d %s", code, out)
	}

	// Attestation: the TPM quote of a machine matches the image's measurements,
	// under a key that this sandbox's cloud certified for this machine.
	host, err := machine.NewHost(s.dirs.of(name), name, s.log)
	if err != nil {
		t.Fatal(err)
	}
	vm, err := host.Machine("worker-0")
	if err != nil {
		t.Fatal(err)
	}
	roots, err := attestation.ParseRoots([]byte(info.TrustRoots))
	if err != nil {
		t.Fatal(err)
	}
	expected := attestation.Measurements{}
	for pcr, value := range info.Measurements {
		b, err := hex.DecodeString(value)
		if err != nil {
			t.Fatal(err)
		}
		expected[pcr] = attestation.Measurement{Expected: b}
	}
	quote, err := attestation.NewTPMIssuer(vm.TPM).Issue(ctx, make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	statement, err := attestation.NewTPMValidator(roots, expected, attestation.Options{UID: info.UID, Role: cloud.Worker, PCR15: attestation.PCR15Zero()}).
		Validate(ctx, quote, make([]byte, 32))
	if err != nil || statement.Identity.ProviderID != sandboxapi.ProviderID(name, "worker-0") || statement.Identity.IP != vm.IP || len(statement.Warnings) > 0 {
		t.Errorf("evidence of worker-0: %+v, %v", statement, err)
	}
	// The machine cannot get another identity once its system runs.
	cert, key, err := attestationtest.CreateCA("other")
	if err != nil {
		t.Fatal(err)
	}
	other, err := attestationtest.ParseCA(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	if err := attestationtest.Provision(ctx, vm.TPM, other, statement.Identity); !errors.Is(err, attestation.ErrTPM) {
		t.Errorf("the TPM of a machine that runs was provisioned again: %v", err)
	}
	if code, out := inside(t, s, name, "worker-0", "test -S /var/lib/constellation-tpm/tpm.sock && head -c 80 /usr/lib/constellation/peers.json"); code != 0 || !strings.Contains(out, "expected") {
		t.Errorf("TPM and peers in the machine: %d %s", code, out)
	}

	// Components: the downloaded bytes match the digest.
	list, err := client.Components(ctx, info.Kubernetes)
	if err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	kubelet, _ := list.List.ByName("kubelet")
	_, sum := inside(t, s, name, "worker-0", fetch+"fetch 10.42.0.1 8080 "+strings.TrimPrefix(kubelet.URL, "http://10.42.0.1:8080")+" | sha256sum")
	if !strings.HasPrefix(sum, strings.TrimPrefix(kubelet.Digest, "sha256:")) {
		t.Errorf("kubelet has digest %s, want %s", sum, kubelet.Digest)
	}
	t.Logf("kubelet downloaded and digested in %s", time.Since(start).Round(time.Millisecond))

	// Images, pulled by containerd. The daemon holds none in memory.
	a, err := build.Load(s.dirs.Cache, info.Kubernetes)
	if err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	for _, img := range a.Images {
		if code, out := inside(t, s, name, "control-plane-0", "ctr -n k8s.io images pull --hosts-dir /etc/containerd/certs.d "+img.Ref+" 2>&1 | tail -2"); code != 0 {
			t.Errorf("pull %s: %s", img.Ref, out)
		}
	}
	_, have := inside(t, s, name, "control-plane-0", "ctr -n k8s.io images ls -q")
	for _, img := range a.Images {
		if !strings.Contains(have, img.Ref) {
			t.Errorf("%s was not pulled", img.Ref)
		}
	}
	t.Logf("%d images pulled in %s; daemon's peak memory %s", len(a.Images), time.Since(start).Round(time.Millisecond), rss(pidOf()))
	if code, _ := inside(t, s, name, "worker-0", "ctr -n k8s.io images pull --hosts-dir /etc/containerd/certs.d registry.k8s.io/nothing:v1 2>/dev/null"); code == 0 {
		t.Error("an unavailable image was pulled")
	}

	// The load balancer, from this computer and from another machine.
	inside(t, s, name, "control-plane-0", "systemd-run -q --unit echo-6443 socat TCP-LISTEN:6443,fork,reuseaddr SYSTEM:'cat'")
	echo := func(network, address string) error {
		c, err := net.DialTimeout(network, address, time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(2 * time.Second))
		fmt.Fprintln(c, "hello")
		b := make([]byte, 6)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello\n" {
			return fmt.Errorf("%q, %w", b, err)
		}
		return nil
	}
	eventually(t, "the API server's port on the host leads to the machine", func() bool { return echo("tcp", info.ClusterEndpoint) == nil })
	if code, out := inside(t, s, name, "worker-0", "exec 3<>/dev/tcp/10.42.0.1/6443; echo hi >&3; read -t 30 x <&3; echo $x"); code != 0 || out != "hi\n" {
		t.Errorf("load balancer seen from a machine: %d %q", code, out)
	}

	// The daemon dies: machines keep running, status reports it, up adopts them.
	machines := func() map[string]int {
		all, err := host.Machines()
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]int{}
		for _, m := range all {
			out[m.Name] = m.PID
		}
		return out
	}
	living, port := machines(), info.ClusterEndpoint
	if err := syscall.Kill(pidOf(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the daemon is gone", func() bool { _, err := client.Groups(ctx); return errors.Is(err, cloud.ErrUnavailable) })
	if st, err := s.Status(ctx, workspace); err != nil || st.State != "stopped" || len(st.Machines) != 2 || st.Machines[0].Boot != "ready" {
		t.Errorf("status without a daemon: %+v, %v", st, err)
	}
	start = time.Now()
	if info, err = s.Up(ctx, engine.SandboxSpec{Workspace: workspace, Workers: 2}, nil); err != nil {
		t.Fatal(err)
	}
	t.Logf("up over a dead daemon, with one machine more, took %s", time.Since(start).Round(time.Millisecond))
	now := machines()
	if len(now) != 3 || now["control-plane-0"] != living["control-plane-0"] || now["worker-0"] != living["worker-0"] || living["worker-0"] == 0 {
		t.Errorf("machines were %v, are %v", living, now)
	}
	if info.ClusterEndpoint != port {
		t.Errorf("the port of this computer changed from %s to %s", port, info.ClusterEndpoint)
	}
	eventually(t, "the load balancer works again", func() bool { return echo("tcp", info.ClusterEndpoint) == nil })

	// A reboot keeps the disk.
	inside(t, s, name, "worker-1", "touch /var/lib/constellation-was-here")
	start = time.Now()
	if err := client.RebootInstance(ctx, sandboxapi.ProviderID(name, "worker-1")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "worker-1 is back", func() bool {
		i, err := client.Instance(ctx, sandboxapi.ProviderID(name, "worker-1"))
		return err == nil && i.State == cloud.Ready
	})
	t.Logf("reboot took %s", time.Since(start).Round(time.Millisecond))
	if code, _ := inside(t, s, name, "worker-1", "test -e /var/lib/constellation-was-here"); code != 0 {
		t.Error("the disk was lost in a reboot")
	}

	// Replacement: the next number, other addresses, no remains of the old machine.
	heir, err := client.CreateInstance(ctx, sandboxapi.GroupID(name, sandboxapi.WorkerGroup), "heir-of-worker-0")
	if err != nil || heir.Name != "worker-2" {
		t.Fatalf("replacement node %+v, %v", heir, err)
	}
	start = time.Now()
	if err := client.DeleteInstance(ctx, sandboxapi.ProviderID(name, "worker-0")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "worker-0 is gone", func() bool {
		_, err := client.Instance(ctx, sandboxapi.ProviderID(name, "worker-0"))
		return errors.Is(err, cloud.ErrNotFound)
	})
	t.Logf("removal took %s", time.Since(start).Round(time.Millisecond))
	if _, err := os.Lstat(s.dirs.of(name, "m", "worker-0")); err == nil {
		t.Error("files of worker-0 are left")
	}

	// A second up changes nothing. An up with another version is refused.
	if _, err := s.Up(ctx, engine.SandboxSpec{Workspace: workspace}, nil); err != nil {
		t.Error(err)
	}
	if _, err := s.Up(ctx, engine.SandboxSpec{Workspace: workspace, Kubernetes: "v1.36.3"}, nil); plan.ExitCode(err) != plan.ExitUsage || plan.Remedy(err) == "" {
		t.Errorf("up with another version: %v", err)
	}
	if resp, err := http.Get("http://" + info.InitEndpoint); err == nil {
		resp.Body.Close()
		t.Error("init got an answer although no bootstrapper listens")
	}

	// Down leaves nothing.
	t.Run("conforms", func(t *testing.T) {
		cloudtest.Run(t, cloudtest.Options{
			Cloud: client, Group: sandboxapi.GroupID(name, sandboxapi.WorkerGroup), Unknown: sandboxapi.ProviderID(name, "worker-999"),
			Images: []string{sandboxapi.ImageReference(name, "v1.0.0"), sandboxapi.ImageReference(name, "v1.1.0")},
		})
	})
	t.Logf("daemon's memory now %s", rss(pidOf()))
	namespaces := networks(t, s.dirs.of(name))
	kinds := map[string]bool{}
	for _, f := range footprint(t, s.dirs.State, []string{name}, namespaces) {
		kind, _, _ := strings.Cut(f, " ")
		kinds[kind] = true
	}
	if len(kinds) != 4 { // otherwise the search below would prove nothing
		t.Errorf("while it runs there are only %v", kinds)
	}
	start = time.Now()
	if err := s.Down(ctx, workspace, nil); err != nil {
		t.Fatal(err)
	}
	t.Logf("down took %s", time.Since(start).Round(time.Millisecond))
	gone(t, s.dirs.State, []string{name}, namespaces)
	if _, err := os.Lstat(s.dirs.State); err == nil {
		t.Error("the state directory is left")
	}
	if err := s.Down(ctx, workspace, nil); err != nil {
		t.Errorf("second down: %v", err)
	}
	if left := files(t, workspace); len(left) != 0 {
		t.Errorf("the workspace has %v", left)
	}
}

func TestRealSandboxSurvivesAccidents(t *testing.T) {
	s, ws := realSandboxes(t, machine.Demand{ControlPlanes: 2, Workers: 1})
	ctx := t.Context()
	other := ws + "-2"
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Down(context.Background(), other, nil); err != nil {
			t.Error(err)
		}
		os.RemoveAll(other)
	})

	// Two concurrent ups for the same workspace make one sandbox. Another one runs beside it,
	// with the same addresses.
	spec := engine.SandboxSpec{Workspace: ws, ControlPlanes: 1, Workers: -1, Faults: []string{"boot-delay=control-plane-0:1s"}}
	infos := make([]workspace.SandboxInfo, 3)
	var wg sync.WaitGroup
	for i, sp := range []engine.SandboxSpec{spec, spec, {Workspace: other, Name: "beside", ControlPlanes: -1, Workers: 1}} {
		wg.Go(func() {
			var err error
			if infos[i], err = s.Up(ctx, sp, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	first, beside := infos[0], infos[2]
	if first.UID != infos[1].UID || first.UID == beside.UID || first.ClusterEndpoint == beside.ClusterEndpoint {
		t.Errorf("sandboxes %+v", infos)
	}
	if _, out := inside(t, s, "beside", "worker-0", fetch+"fetch 169.254.169.254 80 /v1/peers"); !strings.Contains(out, "sandbox://beside/worker-0") || strings.Contains(out, first.Name) {
		t.Errorf("peers in the sandbox beside: %s", out)
	}

	// The daemon is killed while a machine is being created. The next up completes it.
	client := sandboxapi.NewClient("unix:"+first.Socket, "")
	pid := func(name string) int {
		p, err := readProcess(s.dirs.of(name, pidName))
		if err != nil {
			t.Fatal(err)
		}
		return p.pid
	}
	if err := client.SetGroupCount(ctx, sandboxapi.GroupID(first.Name, sandboxapi.ControlPlaneGroup), 2); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second machine is begun", func() bool { _, err := os.Lstat(s.dirs.of(first.Name, "m", "control-plane-1")); return err == nil })
	if err := syscall.Kill(pid(first.Name), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	// Another process took its port meanwhile: an error, because files contain the port.
	var squatter net.Listener
	eventually(t, "the port is free", func() bool { l, err := net.Listen("tcp", first.ClusterEndpoint); squatter = l; return err == nil })
	_, err := s.Up(ctx, engine.SandboxSpec{Workspace: ws}, nil)
	if err == nil || !strings.Contains(err.Error(), "address already in use") || plan.Remedy(err) == "" {
		t.Errorf("up with its port taken: %v", err)
	}
	squatter.Close()
	if _, err := s.Up(ctx, engine.SandboxSpec{Workspace: ws}, nil); err != nil {
		t.Fatal(err)
	}
	st, err := s.Status(ctx, first.Name)
	if err != nil || len(st.Machines) != 2 || st.Machines[0].Boot != "ready" || st.Machines[1].Boot != "ready" {
		t.Errorf("after the crash: %+v, %v", st, err)
	}

	// A hung daemon does not block up or down.
	stopped := pid(first.Name)
	if err := syscall.Kill(stopped, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it hangs", func() bool {
		soon, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		_, err := client.Groups(soon)
		return err != nil
	})
	short, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if _, err := s.Up(short, engine.SandboxSpec{Workspace: ws}, nil); err != nil {
		t.Errorf("up over a daemon that hangs: %v", err)
	}
	if _, ok := startOf(stopped); ok {
		t.Error("the daemon that hung is still there")
	}

	// The daemon is dead: down cleans up without it.
	namespaces := networks(t, s.dirs.of(first.Name))
	maps.Copy(namespaces, networks(t, s.dirs.of("beside")))
	for _, name := range []string{first.Name, "beside"} {
		if err := syscall.Kill(pid(name), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Down(ctx, first.Name, nil); err != nil {
		t.Error(err)
	}
	if err := s.Down(ctx, other, nil); err != nil { // found by its workspace, whatever its name
		t.Error(err)
	}
	gone(t, s.dirs.State, []string{first.Name, "beside"}, namespaces)
}
