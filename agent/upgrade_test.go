//go:build linux

package agent

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"gopkg.in/yaml.v3"

	"constellation/agent/upgradeproto"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/engine/release/releasetest"
)

const (
	// standInEnv makes the test binary a stand-in for kubeadm and kubelet; its value is
	// the directory of files that control it.
	standInEnv = "AGENT_TEST_STAND_IN"
	// processEnv makes it an agent in a process of its own.
	processEnv = "AGENT_TEST_PROCESS"
)

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 1 && os.Args[1] == kubeadm.GateArgument:
		kubeadm.Gate()
	case os.Getenv(standInEnv) != "":
		os.Exit(standIn(os.Getenv(standInEnv)))
	case os.Getenv(processEnv) != "":
		os.Exit(process(os.Getenv(processEnv)))
	}
	os.Exit(m.Run())
}

// settings are those of an agent in a process of its own.
type settings struct {
	Root, Ctl, Socket, Health string
	Programs, Runtime         string // of packages
	PackagesWait              time.Duration
}

func (s settings) host() Host {
	return Host{
		Root: s.Root, Name: "node-0", KubeletHealth: s.Health, APIHealth: s.Health + "/readyz", APICalm: 50 * time.Millisecond,
		Programs: s.Programs, Runtime: s.Runtime, PackagesWait: s.PackagesWait,
		RestartKubelet: func(ctx context.Context) error {
			note(s.Ctl, "restart-kubelet")
			hang(ctx, s.Ctl, "restart-kubelet")
			return ctx.Err()
		},
	}
}

func process(arg string) int {
	var s settings
	if err := json.Unmarshal([]byte(arg), &s); err != nil {
		return 9
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	h := s.host()
	if b, err := os.ReadFile(filepath.Join(s.Ctl, "timeout")); err == nil {
		h.KubeadmTimeout, _ = time.ParseDuration(string(b))
	}
	if err := New(h, s.Socket, slog.New(slog.NewTextHandler(os.Stderr, nil))).Run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// note appends an action to the list of actions.
func note(ctl, deed string) {
	f, err := os.OpenFile(filepath.Join(ctl, "deeds"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		panic(err)
	}
	defer f.Close()
	fmt.Fprintln(f, deed)
}

// hang waits while the test requires it.
func hang(ctx context.Context, ctl, what string) {
	for ctx.Err() == nil && exists(filepath.Join(ctl, "hang-"+what)) {
		os.WriteFile(filepath.Join(ctl, "hanging-"+what), nil, 0o600)
		time.Sleep(5 * time.Millisecond)
	}
}

func exists(name string) bool { _, err := os.Lstat(name); return err == nil }

// standIn stands in for kubeadm and kubelet of a version.
func standIn(ctl string) int {
	version := os.Getenv("AGENT_TEST_VERSION")
	if os.Args[1] == "version" || os.Args[1] == "--version" {
		fmt.Println(version)
		return 0
	}
	verb := os.Args[2]
	if verb == "node" && os.Args[3] == "phase" && os.Args[4] == "addon" {
		verb = os.Args[5]
	}
	note(ctl, verb)
	fmt.Printf("[upgrade] Running %s of %s\n", verb, version)
	fmt.Fprintln(os.Stderr, "\x1b[33m[WARNING Swap]\x1b[0m: \xff\xfeswap is on")
	if exists(filepath.Join(ctl, "stubborn")) {
		signal.Ignore(syscall.SIGTERM)
	}
	hang(context.Background(), ctl, verb)
	if exists(filepath.Join(ctl, "flood")) {
		for i := range 30_000 {
			fmt.Println(i, strings.Repeat("flood ", 100))
		}
		fmt.Println(strings.Repeat("long ", 1<<20))
	}
	if os.Remove(filepath.Join(ctl, "skip-"+verb)) == nil {
		fmt.Println("[upgrade/addon] Skipping upgrade of addons because control plane instances [node-9] have not been upgraded")
		return 0
	}
	fail := filepath.Join(ctl, "fail-"+verb)
	if b, err := os.ReadFile(fail); err == nil {
		words := strings.SplitN(string(b), "\n", 2)
		if len(words) > 1 {
			os.WriteFile(fail, []byte(words[1]), 0o600)
		} else {
			os.Remove(fail)
		}
		fmt.Fprintln(os.Stderr, "error: "+words[0])
		return 1
	}
	if verb == "apply" && !exists(filepath.Join(ctl, "idle")) {
		manifests(filepath.Join(filepath.Dir(ctl), "root"), version)
	}
	fmt.Println("[upgrade/successful] SUCCESS!")
	return 0
}

// manifests writes the static pods of a control plane.
func manifests(root, version string) {
	dir := filepath.Join(root, "etc/kubernetes/manifests")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		panic(err)
	}
	for name, tag := range map[string]string{"etcd": "3.6.6-0", "kube-apiserver": version, "kube-controller-manager": version, "kube-scheduler": version} {
		b := fmt.Sprintf("spec: {containers: [{name: %s, image: 'registry.example:5000/%s:%s'}]}\n", name, name, tag)
		if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(b), 0o600); err != nil {
			panic(err)
		}
	}
}

// rig is a host whose Kubernetes is a stand-in, and its agent.
type rig struct {
	t        testing.TB
	settings settings
	mirror   *httptest.Server
	cmd      *exec.Cmd
	out      *bytes.Buffer
}

const from, to = "v1.35.4", "v1.36.3"

func newRig(t testing.TB, controlPlane bool) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "agent") // t.TempDir can be too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	ctl := filepath.Join(dir, "ctl")
	health := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/readyz" && exists(filepath.Join(ctl, "hang-api")) {
			os.WriteFile(filepath.Join(ctl, "hanging-api"), nil, 0o600)
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	t.Cleanup(health.Close)
	r := &rig{t: t, settings: settings{Root: filepath.Join(dir, "root"), Ctl: ctl, Socket: filepath.Join(dir, "s", "a.sock"), Health: health.URL}}
	if err := os.MkdirAll(r.settings.Ctl, 0o700); err != nil {
		t.Fatal(err)
	}
	releasetest.Furnish(t, r.settings.Root)
	for _, name := range []string{"kubeadm", "kubelet"} {
		r.write("usr/local/bin/"+name, string(r.program(from)), 0o755)
	}
	r.write("etc/kubernetes/kubelet.conf", "", 0o600)
	if controlPlane {
		manifests(r.settings.Root, from)
	}
	r.mirror = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		name, b := filepath.Base(req.URL.Path), r.program(filepath.Base(filepath.Dir(req.URL.Path)))
		w.Header().Set("Content-Length", fmt.Sprint(len(b)))
		w.Write(b[:10])
		w.(http.Flusher).Flush()
		hang(req.Context(), r.settings.Ctl, "install-"+name)
		w.Write(b[10:])
	}))
	t.Cleanup(r.mirror.Close)
	t.Cleanup(r.release)
	return r
}

func (r *rig) write(name, content string, mode os.FileMode) {
	r.t.Helper()
	p := filepath.Join(r.settings.Root, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(content), mode); err != nil {
		r.t.Fatal(err)
	}
}

// script configures the stand-in.
func (r *rig) script(name, content string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.settings.Ctl, name), []byte(content), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// release resumes everything that hangs.
func (r *rig) release() {
	found, _ := filepath.Glob(filepath.Join(r.settings.Ctl, "hang-*"))
	for _, f := range found {
		os.Remove(f)
	}
}

func (r *rig) hangs(what string) {
	r.t.Helper()
	until(r.t, what+" hangs", func() bool { return exists(filepath.Join(r.settings.Ctl, "hanging-"+what)) })
}

func (r *rig) deeds() string {
	b, _ := os.ReadFile(filepath.Join(r.settings.Ctl, "deeds"))
	return strings.Join(strings.Fields(string(b)), " ")
}

// program is the stand-in of a version.
func (r *rig) program(version string) []byte {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return fmt.Appendf(nil, "#!/bin/sh\n%s='%s' AGENT_TEST_VERSION=%s exec '%s' \"$@\"\n", standInEnv, r.settings.Ctl, version, exe)
}

func (r *rig) request(token string) *upgradeproto.UpgradeRequest {
	s := sha256.Sum256(r.program(to))
	digest := "sha256:" + hex.EncodeToString(s[:])
	var l component.List
	for _, name := range []string{"kubelet", "kubeadm"} { // signed in an order that no sorting would give
		l = append(l, component.Component{Name: name, URL: r.mirror.URL + "/" + to + "/" + name, Digest: digest, Path: "/usr/local/bin/" + name})
	}
	return &upgradeproto.UpgradeRequest{
		Token: token, KubernetesVersion: to, What: upgradeproto.What_APPLY, Components: component.ToProto(l),
		Configuration:       &upgradeproto.Configuration{IgnorePreflightErrors: []string{"Swap"}},
		ComponentsStatement: releasetest.Vouch(r.t, to, l),
	}
}

// vouched signs a request again whose components or version were changed, as the release
// builder would have.
func (r *rig) vouched(req *upgradeproto.UpgradeRequest) *upgradeproto.UpgradeRequest {
	r.t.Helper()
	l, err := component.FromProto(req.GetComponents())
	if err != nil {
		r.t.Fatal(err)
	}
	req.ComponentsStatement = releasetest.Vouch(r.t, req.GetKubernetesVersion(), l)
	return req
}

// up starts the agent's process.
func (r *rig) up() {
	r.t.Helper()
	arg, err := json.Marshal(r.settings)
	if err != nil {
		r.t.Fatal(err)
	}
	r.cmd = exec.Command(os.Args[0])
	r.cmd.Env = append(os.Environ(), processEnv+"="+string(arg))
	r.out = &bytes.Buffer{}
	r.cmd.Stdout, r.cmd.Stderr = r.out, r.out
	// Pipes that kubeadm's stand-in inherits must not block Wait.
	r.cmd.WaitDelay = time.Second
	if err := r.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	cmd := r.cmd
	r.t.Cleanup(func() {
		if cmd.ProcessState == nil {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
}

// kill ends the agent without a shutdown.
func (r *rig) kill() {
	r.t.Helper()
	r.cmd.Process.Kill()
	r.cmd.Wait()
}

func dial(t testing.TB, socket string) upgradeproto.AgentClient {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return upgradeproto.NewAgentClient(conn)
}

// client connects to the agent's process.
func (r *rig) client() upgradeproto.AgentClient { return dial(r.t, r.settings.Socket) }

// inside runs the agent in this process.
func (r *rig) inside() upgradeproto.AgentClient {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- New(r.settings.host(), r.settings.Socket, slog.New(slog.DiscardHandler)).Run(ctx) }()
	r.t.Cleanup(func() {
		r.release()
		cancel()
		if err := <-ended; err != nil {
			r.t.Errorf("agent ended with %v", err)
		}
	})
	return r.client()
}

// collect reads a stream to its end.
func collect(stream grpc.ServerStreamingClient[upgradeproto.UpgradeResponse], err error) ([]*upgradeproto.UpgradeResponse, error) {
	var all []*upgradeproto.UpgradeResponse
	for err == nil {
		var m *upgradeproto.UpgradeResponse
		if m, err = stream.Recv(); err == nil {
			all = append(all, m)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return all, err
}

// outline summarizes a stream; numbers must rise.
func outline(all []*upgradeproto.UpgradeResponse) string {
	var s []string
	last := uint64(0)
	for _, m := range all {
		if m.Seq <= last {
			s = append(s, fmt.Sprintf("SEQ %d AFTER %d", m.Seq, last))
		}
		last = m.Seq
		switch k := m.Kind.(type) {
		case *upgradeproto.UpgradeResponse_Progress:
			if k.Progress.State != done {
				s = append(s, k.Progress.Stage+":"+k.Progress.State)
			}
		case *upgradeproto.UpgradeResponse_Success:
			s = append(s, "success")
		case *upgradeproto.UpgradeResponse_Failure:
			s = append(s, "failure in "+k.Failure.Stage)
		}
	}
	return strings.Join(s, " ")
}

func lines(all []*upgradeproto.UpgradeResponse) (s []string) {
	for _, m := range all {
		if l := m.GetLog(); l != nil {
			s = append(s, l.Source+" "+l.Level+" "+l.Line)
		}
		if f := m.GetFailure(); f != nil {
			s = append(s, "failure "+f.Message)
		}
	}
	return s
}

// until polls until another goroutine or process has met the condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timed out: %s", what)
		}
	}
}

const straight = "verify:running install-kubeadm:running plan:running apply:running install-kubelet:running restart-kubelet:running wait-for-api:running success"

// A host's patches of its static pods survive the upgrade, because kubeadm gets their directory.
func TestPatchesOfTheHostAreApplied(t *testing.T) {
	r := newRig(t, true)
	r.write("etc/kubernetes/patches/kube-apiserver+json.yaml", "- {op: add, path: /metadata/annotations/mine, value: x}\n", 0o600)
	c := r.inside()
	if all, err := collect(c.Upgrade(t.Context(), r.request("t1"))); err != nil || outline(all) != straight {
		t.Fatalf("%v\n%s", err, outline(all))
	}
	b, err := os.ReadFile(filepath.Join(r.settings.Root, "var/lib/constellation/agent/kubeadm.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	want := "  patches:\n    directory: " + filepath.Join(r.settings.Root, "etc/kubernetes/patches") + "\n"
	if n := strings.Count(string(b), want); n != 2 {
		t.Errorf("the configuration names the patches %d times, want them for apply and node:\n%s", n, b)
	}

	// A link to the directory serves as well.
	r = newRig(t, true)
	r.write("etc/kubernetes/mine/kube-apiserver+json.yaml", "- {op: add, path: /metadata/annotations/mine, value: x}\n", 0o600)
	if err := os.Symlink("mine", filepath.Join(r.settings.Root, "etc/kubernetes/patches")); err != nil {
		t.Fatal(err)
	}
	if all, err := collect(r.inside().Upgrade(t.Context(), r.request("t1"))); err != nil || outline(all) != straight {
		t.Fatalf("with a link: %v\n%s", err, outline(all))
	}

	// A file in the place of the directory stops the upgrade: ignored, the patches would be lost.
	r = newRig(t, true)
	r.write("etc/kubernetes/patches", "", 0o600)
	all, err := collect(r.inside().Upgrade(t.Context(), r.request("t1")))
	if err != nil || !strings.HasSuffix(outline(all), "plan:failed failure in plan") {
		t.Errorf("%v\n%s", err, outline(all))
	}
}

// A host's own options of kubeadm upgrade survive, and options that are not understood stop it.
func TestUpgradeOptionsOfTheHostAreApplied(t *testing.T) {
	const file, head = "etc/kubernetes/kubeadm-upgrade.yaml", "apiVersion: kubeadm.k8s.io/v1beta4\nkind: UpgradeConfiguration\n"
	r := newRig(t, true)
	r.write(file, head+"apply:\n  certificateRenewal: false\n  skipPhases: [addon/coredns]\n  patches: {directory: /srv/patches}\n", 0o600)
	r.write("etc/kubernetes/patches/kube-apiserver+json.yaml", "- {op: add, path: /metadata/annotations/mine, value: x}\n", 0o600)
	if all, err := collect(r.inside().Upgrade(t.Context(), r.request("t1"))); err != nil || outline(all) != straight {
		t.Fatalf("%v\n%s", err, outline(all))
	}
	b, err := os.ReadFile(filepath.Join(r.settings.Root, "var/lib/constellation/agent/kubeadm.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var got kubeadm.UpgradeConfiguration
	if err := yaml.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if a := got.Apply; a.CertificateRenewal || !a.EtcdUpgrade || !slices.Equal(a.SkipPhases, []string{"addon/coredns"}) || a.Patches == nil || a.Patches.Directory != "/srv/patches" || a.KubernetesVersion != to {
		t.Errorf("apply is configured as %+v", a)
	}
	if n := got.Node; !n.CertificateRenewal || len(n.SkipPhases) > 0 || n.Patches == nil || n.Patches.Directory != filepath.Join(r.settings.Root, "etc/kubernetes/patches") {
		t.Errorf("node is configured as %+v", n)
	}

	for _, bad := range []string{"apply: {skipPhase: [addon]}\n", "apply: {skipPhases: [control-plane]}\n"} {
		r = newRig(t, true)
		r.write(file, head+bad, 0o600)
		all, err := collect(r.inside().Upgrade(t.Context(), r.request("t1")))
		if err != nil || !strings.HasSuffix(outline(all), "plan:failed failure in plan") || r.deeds() != "" {
			t.Errorf("%s: %v\n%s", bad, err, outline(all))
		}
	}
}

func TestUpgradeOfAControlPlane(t *testing.T) {
	r := newRig(t, true)
	c := r.inside()
	all, err := collect(c.Upgrade(t.Context(), r.request("t1")))
	if err != nil || outline(all) != straight {
		t.Fatalf("%v\n%s\n%v", err, outline(all), all)
	}
	if d := r.deeds(); d != "plan apply restart-kubelet" {
		t.Errorf("deeds: %s", d)
	}
	want := []string{
		"kubeadm info [upgrade] Running plan of v1.36.3", "kubeadm warn [WARNING Swap]: swap is on", "kubeadm info [upgrade/successful] SUCCESS!",
		"kubeadm info [upgrade] Running apply of v1.36.3", "kubeadm warn [WARNING Swap]: swap is on", "kubeadm info [upgrade/successful] SUCCESS!",
	}
	if got := lines(all); !slices.Equal(got, want) {
		t.Errorf("lines:\n%s", strings.Join(got, "\n"))
	}
	s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if s.KubeadmVersion != to || s.KubeletVersion != to || tag(s.StaticPods["kube-apiserver"]) != to {
		t.Errorf("runs %v", s)
	}
	run := s.Run
	if run.State != upgradeproto.Run_SUCCEEDED || run.Token != "t1" || run.Seq != all[len(all)-1].Seq || run.Started == nil || run.Updated == nil {
		t.Errorf("run: %v", run)
	}
	// The same request gets the same messages, from any number on, and changes nothing.
	for _, after := range []uint64{0, 5} {
		req := r.request("t1")
		req.After = after
		again, err := collect(c.Upgrade(t.Context(), req))
		if err != nil || !slices.EqualFunc(again, all[after:], func(a, b *upgradeproto.UpgradeResponse) bool { return proto.Equal(a, b) }) {
			t.Errorf("after %d: %v, %v", after, err, again)
		}
	}
	// Its token cannot be used for another request, and downgrades are refused.
	other := r.request("t1")
	other.What = upgradeproto.What_NODE
	if _, err := collect(c.Upgrade(t.Context(), other)); status.Code(err) != codes.InvalidArgument {
		t.Errorf("same token, other request: %v", err)
	}
	down := r.request("t2")
	down.KubernetesVersion = from
	if _, err := collect(c.Upgrade(t.Context(), r.vouched(down))); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "downgrade to") {
		t.Errorf("down: %v", err)
	}
	if d := r.deeds(); d != "plan apply restart-kubelet" {
		t.Errorf("deeds: %s", d)
	}
	if i, err := os.Stat(filepath.Join(r.settings.Root, "var/lib/constellation/agent", journalFile)); err != nil || i.Mode().Perm() != 0o600 {
		t.Errorf("journal: %v, %v", i, err)
	}
}

// The kubelet of a host that takes pods is kept, and replaced by a later request for the node.
func TestKubeletIsKept(t *testing.T) {
	const kept = "verify:running install-kubeadm:running plan:running apply:running wait-for-api:running success"
	r := newRig(t, true)
	c := r.inside()
	keep := r.request("t1")
	keep.KeepKubelet = true
	all, err := collect(c.Upgrade(t.Context(), keep))
	if err != nil || outline(all) != kept || r.deeds() != "plan apply" {
		t.Fatalf("%v\n%s\ndeeds: %s", err, outline(all), r.deeds())
	}
	s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{})
	if err != nil || s.KubeadmVersion != to || s.KubeletVersion != from || tag(s.StaticPods["kube-apiserver"]) != to {
		t.Errorf("%v; runs %v, want the kubelet of %s", err, s, from)
	}
	node := r.request("t2")
	node.What = upgradeproto.What_NODE
	if all, err := collect(c.Upgrade(t.Context(), node)); err != nil || !strings.HasSuffix(outline(all), "success") || r.deeds() != "plan apply node restart-kubelet" {
		t.Fatalf("%v\n%s\ndeeds: %s", err, outline(all), r.deeds())
	}
	if s, err = c.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil || s.KubeletVersion != to {
		t.Errorf("%v; the kubelet is %s, want %s", err, s.GetKubeletVersion(), to)
	}
}

// A run that keeps the kubelet still does so when a caller that only attaches resumes it.
func TestResumedRunKeepsTheKubelet(t *testing.T) {
	r := newRig(t, true)
	ctx, stop := context.WithCancel(t.Context())
	u, err := openUpgrader(ctx, r.settings.host(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	keep := r.request("t1")
	keep.KeepKubelet = true
	if err := u.journal.begin(keep, u.boot); err != nil { // the agent ends before it has done anything
		t.Fatal(err)
	}
	stop()
	u.close()
	all, err := collect(r.inside().Upgrade(t.Context(), r.request("t1")))
	if err != nil || !strings.HasSuffix(outline(all), "success") || r.deeds() != "plan apply" {
		t.Errorf("%v\n%s\ndeeds: %s", err, outline(all), r.deeds())
	}
}

func TestUpgradeOfAWorker(t *testing.T) {
	r := newRig(t, false)
	c := r.inside()
	req := r.request("t1")
	if _, err := collect(c.Upgrade(t.Context(), req)); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "not a control plane") {
		t.Errorf("apply on a worker: %v", err)
	}
	req.What = upgradeproto.What_NODE
	all, err := collect(c.Upgrade(t.Context(), req))
	if err != nil || outline(all) != "verify:running install-kubeadm:running node:running install-kubelet:running restart-kubelet:running wait-for-api:running success" {
		t.Fatalf("%v\n%s", err, outline(all))
	}
	if d := r.deeds(); d != "node restart-kubelet" {
		t.Errorf("deeds: %s", d)
	}
}

// The add-ons are upgraded by phases of kubeadm, and nothing else of the host changes.
func TestAddonsAreUpgraded(t *testing.T) {
	const head = "apiVersion: kubeadm.k8s.io/v1beta4\nkind: UpgradeConfiguration\n"
	const whole = "verify:running install-kubeadm:running addons:running success"
	const broken = "verify:running install-kubeadm:running addons:running addons:failed failure in addons"
	both := []string{"kube-proxy", "coredns"}
	for _, tt := range []struct {
		name, script, content, options string
		addons                         []string
		outline, deeds, line           string
	}{
		{name: "both, CoreDNS first as kubeadm does", addons: both, outline: whole, deeds: "coredns kube-proxy"},
		{name: "one of them", addons: []string{"coredns"}, outline: whole, deeds: "coredns"},
		{name: "the host's options skip one", addons: both, options: "apply: {skipPhases: [addon/coredns]}\n", outline: whole, deeds: "kube-proxy", line: "agent info the add-on coredns is left alone"},
		{name: "the host's options skip all", addons: both, options: "node: {skipPhases: [addon]}\n", outline: whole, line: "agent info the add-on kube-proxy is left alone"},
		{name: "a removed control plane is still listed for a while", addons: both, script: "skip-kube-proxy", outline: whole, deeds: "coredns kube-proxy kube-proxy", line: "is retried in 1s: it needs all control planes at its version"},
		{name: "the API server is unavailable for a while", addons: both, script: "fail-coredns", content: "connect: connection refused", outline: whole, deeds: "coredns coredns kube-proxy"},
		{name: "kubeadm fails", addons: both, script: "fail-coredns", content: "unable to decode CoreDNS", outline: broken, deeds: "coredns"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, true)
			manifests(r.settings.Root, to)
			if tt.script != "" {
				r.script(tt.script, tt.content)
			}
			if tt.options != "" {
				r.write("etc/kubernetes/kubeadm-upgrade.yaml", head+tt.options, 0o600)
			}
			req := r.request("t1")
			req.What, req.Addons = upgradeproto.What_ADDONS, tt.addons
			c := r.inside()
			all, err := collect(c.Upgrade(t.Context(), req))
			if err != nil || outline(all) != tt.outline || r.deeds() != tt.deeds {
				t.Fatalf("%v\n%s\n%s\n%v", err, outline(all), r.deeds(), all)
			}
			if said := strings.Join(lines(all), "\n"); !strings.Contains(said, tt.line) {
				t.Errorf("lines:\n%s\nwant %q", said, tt.line)
			}
			if s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil || s.GetKubeletVersion() != from || s.GetRun().GetWhat() != upgradeproto.What_ADDONS {
				t.Errorf("status %v, %v", s, err)
			}
		})
	}
}

// A killed agent is followed by another that repeats the phase of the add-ons.
func TestAddonsAfterTheAgentWasKilled(t *testing.T) {
	r := newRig(t, true)
	manifests(r.settings.Root, to)
	r.script("hang-coredns", "")
	req := r.request("t1")
	req.What, req.Addons = upgradeproto.What_ADDONS, []string{"coredns", "kube-proxy"}
	r.up()
	stream, err := r.client().Upgrade(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	r.hangs("coredns")
	r.kill()
	_, _ = collect(stream, nil)
	r.up()
	r.release()
	all, err := collect(r.client().Upgrade(t.Context(), req))
	if err != nil || !strings.HasSuffix(outline(all), "addons:running success") || r.deeds() != "coredns coredns kube-proxy" {
		t.Errorf("%v\n%s\n%s", err, outline(all), r.deeds())
	}
}

func TestClientsShareARun(t *testing.T) {
	r := newRig(t, true)
	r.script("hang-apply", "")
	c1, c2 := r.inside(), r.client()
	ctx, leave := context.WithCancel(t.Context())
	s1, err := c1.Upgrade(ctx, r.request("t1"))
	if err != nil {
		t.Fatal(err)
	}
	first, err := s1.Recv()
	if err != nil {
		t.Fatal(err)
	}
	r.hangs("apply")
	// A broken connection ends nothing, a second client with a token of its own gets all
	// messages, and another request is refused with the name of the run.
	leave()
	other := r.request("t3")
	other.KubernetesVersion = "v1.36.4"
	_, err = collect(c2.Upgrade(t.Context(), r.vouched(other)))
	if want := "upgrade of the control plane to v1.36.3 (t1) is in progress, in stage apply"; status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), want) {
		t.Errorf("busy: %v, want %q", err, want)
	}
	until(t, "the status has the latest line", func() bool {
		s, err := c2.Status(t.Context(), &upgradeproto.StatusRequest{})
		return err == nil && s.Run.State == upgradeproto.Run_RUNNING && s.Run.Stage == "apply" && s.Run.LastLine == "[WARNING Swap]: swap is on"
	})
	s2, err := c2.Upgrade(t.Context(), r.request("t2"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := s2.Recv()
	if err != nil || !proto.Equal(m, first) {
		t.Errorf("second client begins with %v, %v; the first with %v", m, err, first)
	}
	r.release()
	rest, err := collect(s2, nil)
	if err != nil || outline(append([]*upgradeproto.UpgradeResponse{m}, rest...)) != straight {
		t.Errorf("%v\n%s", err, outline(rest))
	}
	if d := r.deeds(); d != "plan apply restart-kubelet" {
		t.Errorf("deeds: %s", d)
	}
}

func TestRequestsAreRefused(t *testing.T) {
	r := newRig(t, true)
	c := r.inside()
	for _, tt := range []struct {
		name string
		code codes.Code
		want string
		do   func(*upgradeproto.UpgradeRequest)
	}{
		{name: "no token", code: codes.InvalidArgument, want: "token", do: func(r *upgradeproto.UpgradeRequest) { r.Token = "" }},
		{name: "a token with a line break", code: codes.InvalidArgument, want: "token", do: func(r *upgradeproto.UpgradeRequest) { r.Token = "a\nb" }},
		{name: "nothing to upgrade", code: codes.InvalidArgument, want: "what", do: func(r *upgradeproto.UpgradeRequest) { r.What = 0 }},
		{name: "add-ons without names", code: codes.InvalidArgument, want: "addons: want some", do: func(r *upgradeproto.UpgradeRequest) { r.What = upgradeproto.What_ADDONS }},
		{name: "add-ons of a node", code: codes.InvalidArgument, want: "addons: want some", do: func(r *upgradeproto.UpgradeRequest) { r.Addons = []string{"coredns"} }},
		{name: "a kept kubelet of a node's upgrade", code: codes.InvalidArgument, want: "keep_kubelet", do: func(r *upgradeproto.UpgradeRequest) { r.What, r.KeepKubelet = upgradeproto.What_NODE, true }},
		{name: "an unknown add-on", code: codes.InvalidArgument, want: "addons: want", do: func(r *upgradeproto.UpgradeRequest) {
			r.What, r.Addons = upgradeproto.What_ADDONS, []string{"coredns", "--help"}
		}},
		{name: "an add-on twice", code: codes.InvalidArgument, want: "addons: want", do: func(r *upgradeproto.UpgradeRequest) {
			r.What, r.Addons = upgradeproto.What_ADDONS, []string{"coredns", "coredns"}
		}},
		{name: "add-ons before the control plane", code: codes.FailedPrecondition, want: "add-ons follow the control plane", do: func(r *upgradeproto.UpgradeRequest) {
			r.What, r.Addons = upgradeproto.What_ADDONS, []string{"coredns"}
		}},
		{name: "no version", code: codes.InvalidArgument, want: "version", do: func(r *upgradeproto.UpgradeRequest) { r.KubernetesVersion = "" }},
		{name: "an option instead of a version", code: codes.InvalidArgument, want: "version", do: func(r *upgradeproto.UpgradeRequest) { r.KubernetesVersion = "--force" }},
		{name: "a version in another form", code: codes.InvalidArgument, want: "is not in canonical form", do: func(r *upgradeproto.UpgradeRequest) { r.KubernetesVersion = "1.36.3" }},
		{name: "a downgrade", code: codes.FailedPrecondition, want: "downgrade to", do: func(r *upgradeproto.UpgradeRequest) { r.KubernetesVersion = "v1.35.3" }},
		{name: "two minor versions at once", code: codes.FailedPrecondition, want: "more than one minor", do: func(r *upgradeproto.UpgradeRequest) { r.KubernetesVersion = "v1.37.0" }},
		{name: "another major", code: codes.FailedPrecondition, want: "more than one minor", do: func(r *upgradeproto.UpgradeRequest) { r.KubernetesVersion = "v2.36.3" }},
		{name: "no digest", code: codes.InvalidArgument, want: "digest", do: func(r *upgradeproto.UpgradeRequest) { r.Components[0].Digest = "" }},
		{name: "another path", code: codes.InvalidArgument, want: "path is", do: func(r *upgradeproto.UpgradeRequest) { r.Components[0].Path = "/usr/bin/kubeadm" }},
		{name: "another component", code: codes.InvalidArgument, want: "not one that", do: func(r *upgradeproto.UpgradeRequest) { r.Components[0].Name = "sudo" }},
		{name: "a file as an archive", code: codes.InvalidArgument, want: "path is", do: func(r *upgradeproto.UpgradeRequest) { r.Components[0].Extract = true }},
		{name: "another mode", code: codes.InvalidArgument, want: "mode", do: func(r *upgradeproto.UpgradeRequest) { r.Components[0].Mode = 0o500 }},
		{name: "a local file", code: codes.InvalidArgument, want: "url", do: func(r *upgradeproto.UpgradeRequest) { r.Components[0].Url = "file:///etc/shadow" }},
		{name: "no kubelet", code: codes.InvalidArgument, want: "kubelet is missing", do: func(r *upgradeproto.UpgradeRequest) { r.Components = r.Components[:1] }},
		{name: "all checks ignored", code: codes.InvalidArgument, want: "not the name of one check", do: func(r *upgradeproto.UpgradeRequest) { r.Configuration.IgnorePreflightErrors = []string{"ALL"} }},
		{name: "a check with a space", code: codes.InvalidArgument, want: "not the name of one check", do: func(r *upgradeproto.UpgradeRequest) { r.Configuration.IgnorePreflightErrors = []string{"Swap Mem"} }},
		{name: "another way to pull", code: codes.InvalidArgument, want: "pull policy", do: func(r *upgradeproto.UpgradeRequest) { r.Configuration.ImagePullPolicy = "Sometimes" }},
		{name: "a huge request", code: codes.ResourceExhausted, want: "larger than max", do: func(r *upgradeproto.UpgradeRequest) {
			r.Components[0].Url = "data:," + strings.Repeat("x", maxRequest)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := r.request("t1")
			tt.do(req)
			if tt.code == codes.FailedPrecondition {
				r.vouched(req) // the release builder is not the reason
			}
			_, err := collect(c.Upgrade(t.Context(), req))
			if status.Code(err) != tt.code || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %s with %q", err, tt.code, tt.want)
			}
		})
	}
	s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{})
	if err != nil || s.Run != nil || r.deeds() != "" {
		t.Errorf("%v, %v, %s; want no effect", s, err, r.deeds())
	}
}

func TestFailuresAreReportedAndRetried(t *testing.T) {
	for _, tt := range []struct{ name, script, content, outline, deeds, message string }{
		{name: "kubeadm refuses", script: "fail-apply", content: "[ERROR CoreDNSUnsupportedPlugins]: no", outline: "verify:running install-kubeadm:running plan:running apply:running apply:failed failure in apply", deeds: "plan apply", message: "CoreDNSUnsupportedPlugins"},
		{name: "the API server is unavailable for a while", script: "fail-plan", content: "dial tcp 10.0.0.1:6443: connect: connection refused\nfailed to get config map: context deadline exceeded", outline: straight, deeds: "plan plan plan apply restart-kubelet"},
		{name: "the Job of the health check is not done", script: "fail-apply", content: "[ERROR CreateJob]: Job did not complete in 15s", outline: straight, deeds: "plan apply apply restart-kubelet"},
		{name: "kubeadm succeeds without an effect", script: "idle", outline: "verify:running install-kubeadm:running plan:running apply:running apply:failed failure in apply", deeds: "plan apply", message: `kube-apiserver is "v1.35.4", want v1.36.3`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, true)
			r.script(tt.script, tt.content)
			c := r.inside()
			all, err := collect(c.Upgrade(t.Context(), r.request("t1")))
			if err != nil || outline(all) != tt.outline || r.deeds() != tt.deeds {
				t.Fatalf("%v\n%s\n%s", err, outline(all), r.deeds())
			}
			if tt.message == "" {
				return
			}
			if f := all[len(all)-1].GetFailure(); !strings.Contains(f.GetMessage(), tt.message) || f.GetRemedy() == "" {
				t.Errorf("failure %v, want %q", f, tt.message)
			}
			s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{})
			if err != nil || s.Run.State != upgradeproto.Run_FAILED || s.Run.Stage != "apply" || !strings.Contains(s.Run.Message, tt.message) {
				t.Errorf("status %v, %v", s.GetRun(), err)
			}
			// The same token gets the same messages; a new one is a new attempt.
			if again, err := collect(c.Upgrade(t.Context(), r.request("t1"))); err != nil || outline(again) != tt.outline {
				t.Errorf("%v\n%s", err, outline(again))
			}
			os.Remove(filepath.Join(r.settings.Ctl, "idle"))
			if again, err := collect(c.Upgrade(t.Context(), r.request("t2"))); err != nil || outline(again) != straight {
				t.Errorf("%v\n%s", err, outline(again))
			}
		})
	}
}

func TestWrongContentIsNeverInstalled(t *testing.T) {
	r := newRig(t, true)
	c := r.inside()
	req := r.request("t1")
	bad := []byte("#!/bin/sh\n")
	req.Components[1].Url = "data:;base64," + base64.StdEncoding.EncodeToString(bad)
	all, err := collect(c.Upgrade(t.Context(), r.vouched(req)))
	if err != nil || outline(all) != "verify:running install-kubeadm:running install-kubeadm:failed failure in install-kubeadm" {
		t.Fatalf("%v\n%s", err, outline(all))
	}
	if s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil || s.KubeadmVersion != from {
		t.Errorf("%v, %v", s, err)
	}
	// Content with the right digest but another version is refused, too.
	req = r.request("t2")
	old := r.program(from)
	sum := sha256.Sum256(old)
	req.Components[1].Url, req.Components[1].Digest = r.mirror.URL+"/"+from+"/kubeadm", "sha256:"+hex.EncodeToString(sum[:])
	all, err = collect(c.Upgrade(t.Context(), r.vouched(req)))
	if err != nil || !strings.Contains(all[len(all)-1].GetFailure().GetMessage(), `kubeadm is "v1.35.4", want v1.36.3`) {
		t.Errorf("%v, %v", err, all)
	}
	if r.deeds() != "" {
		t.Errorf("deeds: %s", r.deeds())
	}
}

func TestKubeadmThatHangsIsEnded(t *testing.T) {
	for _, stubborn := range []bool{false, true} {
		t.Run(fmt.Sprintf("stubborn %t", stubborn), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, true)
			r.script("hang-plan", "")
			r.script("timeout", "300ms")
			if stubborn {
				r.script("stubborn", "")
			}
			r.up()
			all, err := collect(r.client().Upgrade(t.Context(), r.request("t1")))
			if err != nil || outline(all) != "verify:running install-kubeadm:running plan:running plan:failed failure in plan" {
				t.Fatalf("%v\n%s\n%s", err, outline(all), r.out)
			}
			if m := all[len(all)-1].GetFailure().GetMessage(); !strings.Contains(m, "took too long") {
				t.Error(m)
			}
		})
	}
}

func TestFloodsOfLinesAreBounded(t *testing.T) {
	r := newRig(t, true)
	r.script("flood", "")
	c := r.inside()
	all, err := collect(c.Upgrade(t.Context(), r.request("t1")))
	if err != nil || all[len(all)-1].GetSuccess() == nil {
		t.Fatalf("%v\n%s", err, outline(all))
	}
	again, err := collect(c.Upgrade(t.Context(), r.request("t1")))
	if err != nil || len(again) > maxKept || again[len(again)-1].GetSuccess() == nil {
		t.Errorf("%d kept, %v", len(again), err)
	}
	state := filepath.Join(r.settings.Root, "var/lib/constellation/agent")
	for name, limit := range map[string]int64{journalFile: maxJournal + maxEntry, "kubeadm.out": 40 << 20} {
		if i, err := os.Stat(filepath.Join(state, name)); err != nil || i.Size() > limit {
			t.Errorf("%s: %v, %v", name, i.Size(), err)
		}
	}
	for _, m := range again {
		if len(m.GetLog().GetLine()) > 5000 {
			t.Errorf("a line of %d bytes", len(m.GetLog().GetLine()))
		}
	}
}

func TestKilledAgentContinues(t *testing.T) {
	for _, tt := range []struct {
		at    string // where it is killed
		stage string
		found bool // kubeadm still runs
	}{
		{at: "install-kubeadm", stage: "install-kubeadm", found: false},
		{at: "plan", stage: "plan", found: true},
		{at: "apply", stage: "apply", found: true},
		{at: "install-kubelet", stage: "install-kubelet", found: false},
		{at: "restart-kubelet", stage: "restart-kubelet", found: false},
		{at: "api", stage: "wait-for-api", found: false},
	} {
		t.Run(tt.at, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, true)
			r.script("hang-"+tt.at, "")
			r.up()
			stream, err := r.client().Upgrade(t.Context(), r.request("t1"))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := stream.Recv(); err != nil {
				t.Fatalf("%v\n%s", err, r.out)
			}
			r.hangs(tt.at)
			r.kill()
			before := r.deeds()

			r.up()
			c := r.client()
			s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{})
			if err != nil {
				t.Fatalf("%v\n%s", err, r.out)
			}
			want := upgradeproto.Run_INTERRUPTED
			if tt.found {
				want = upgradeproto.Run_RUNNING
			}
			if s.Run.State != want || s.Run.Stage != tt.stage || s.Run.Token != "t1" {
				t.Errorf("after the kill: %v, want %s in %s", s.Run, want, tt.stage)
			}
			if tt.found { // nothing else may begin
				other := r.request("t3")
				other.What = upgradeproto.What_NODE
				if _, err := collect(c.Upgrade(t.Context(), other)); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "is in progress, in stage") {
					t.Errorf("busy: %v", err)
				}
			}
			if d := r.deeds(); d != before {
				t.Errorf("deeds without a request: %s, before %s", d, before)
			}
			r.release()
			all, err := collect(c.Upgrade(t.Context(), r.request("t1")))
			if err != nil || !strings.HasSuffix(outline(all), straight) || strings.Contains(outline(all), "SEQ") {
				t.Fatalf("%v\n%s\n%s", err, outline(all), r.out)
			}
			if tt.found == strings.Contains(outline(all), interrupted) {
				t.Errorf("reported as %s", outline(all))
			}
			// One kubeadm at a time, and no line of it twice.
			var runs int
			for _, l := range lines(all) {
				if strings.HasPrefix(l, "kubeadm info [upgrade] Running") {
					runs++
				}
			}
			if deeds := strings.Fields(strings.ReplaceAll(r.deeds(), "restart-kubelet", "")); runs != len(deeds) {
				t.Errorf("%d runs of kubeadm reported, %d ran", runs, len(deeds))
			}
		})
	}
}

// TestTruncatedJournals starts an agent on every beginning of a journal, as a power
// cut leaves it.
func TestTruncatedJournals(t *testing.T) {
	r := newRig(t, true)
	all, err := collect(r.inside().Upgrade(t.Context(), r.request("t1")))
	if err != nil || outline(all) != straight {
		t.Fatalf("%v\n%s", err, outline(all))
	}
	state := filepath.Join(r.settings.Root, "var/lib/constellation/agent")
	b, err := os.ReadFile(filepath.Join(state, journalFile))
	if err != nil {
		t.Fatal(err)
	}
	b = bytes.ReplaceAll(b, []byte(`"boot":"`), []byte(`"boot":"earlier-`))
	whole := bytes.SplitAfter(b, []byte("\n"))
	for n := range whole {
		for _, cut := range []int{0, 10} { // within an entry too
			dir, err := os.OpenRoot(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			text := bytes.Join(whole[:n], nil)
			text = append(text, whole[n][:min(cut, len(whole[n]))]...)
			if err := dir.WriteFile(journalFile, text, 0o600); err != nil {
				t.Fatal(err)
			}
			j, err := openJournal(dir, "now", slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatalf("%d entries: %v", n, err)
			}
			run := j.run(false)
			switch {
			case n == 0:
				if run != nil {
					t.Errorf("no entry: %v", run)
				}
			case n == len(whole)-1:
				if run.State != upgradeproto.Run_SUCCEEDED {
					t.Errorf("all entries: %v", run)
				}
			default:
				if run.State != upgradeproto.Run_INTERRUPTED || run.Seq < all[len(all)-1].Seq {
					t.Errorf("%d entries: %v", n, run) // numbers of sent lines are not reused
				}
				if err := j.stageIs("verify", running, ""); err != nil {
					t.Errorf("%d entries: %v", n, err)
				}
			}
			j.close()
			dir.Close()
		}
	}
	t.Run("after a reboot the same request continues", func(t *testing.T) {
		r := newRig(t, true)
		text := bytes.ReplaceAll(bytes.Join(whole[:len(whole)/2], nil), nil, nil)
		req := r.request("t1")
		// The journal of another mirror's request would be another request.
		r.write("var/lib/constellation/agent/"+journalFile, string(text), 0o600)
		c := r.inside()
		s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{})
		if err != nil || s.Run.State != upgradeproto.Run_INTERRUPTED || s.Run.Message != "the host was restarted" {
			t.Fatalf("%v, %v", s.GetRun(), err)
		}
		got, err := collect(c.Upgrade(t.Context(), req))
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("another request with the token: %v, %v", outline(got), err)
		}
		req.Token = "t2"
		if got, err = collect(c.Upgrade(t.Context(), req)); err != nil || outline(got) != straight {
			t.Errorf("%s, %v", outline(got), err)
		}
	})
}

func TestLostManifestIsRestored(t *testing.T) {
	r := newRig(t, true)
	manifest := filepath.Join(r.settings.Root, "etc/kubernetes/manifests/kube-apiserver.yaml")
	b, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	for _, stamp := range []string{"2026-11-21-10-00-00", "2026-11-21-11-00-00"} {
		r.write("etc/kubernetes/tmp/kubeadm-backup-manifests-"+stamp+"/kube-apiserver.yaml", string(b), 0o600)
		r.write("etc/kubernetes/tmp/kubeadm-backup-etcd-"+stamp+"/etcd/member/snap/db", "data", 0o600)
	}
	if err := os.Remove(manifest); err != nil {
		t.Fatal(err)
	}
	all, err := collect(r.inside().Upgrade(t.Context(), r.request("t1")))
	if err != nil || outline(all) != straight {
		t.Fatalf("%v\n%s", err, outline(all))
	}
	if got := lines(all)[0]; got != "agent warn static pod kube-apiserver was restored from its backup" {
		t.Errorf("first line: %s", got)
	}
	entries, err := os.ReadDir(filepath.Join(r.settings.Root, "etc/kubernetes/tmp"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if want := []string{"kubeadm-backup-etcd-2026-11-21-11-00-00", "kubeadm-backup-manifests-2026-11-21-11-00-00"}; !slices.Equal(names, want) {
		t.Errorf("left: %v", names)
	}
}

// A machine that loses power while kubeadm renews a certificate has no etcd and no API server then, so no request reaches its
// agent. The agent restores the files when it starts, without a request.
func TestIncompleteCertificateIsRestoredAtTheStart(t *testing.T) {
	r := newRig(t, true)
	const crt = "etc/kubernetes/pki/etcd/server.crt"
	r.write(crt, "", 0o644)
	certificates(t, filepath.Join(r.settings.Root, filepath.Dir(crt)))
	cert, err := os.ReadFile(filepath.Join(r.settings.Root, crt))
	if err != nil {
		t.Fatal(err)
	}
	r.script("hang-apply", "")
	r.up()
	if _, err := r.client().Upgrade(t.Context(), r.request("t1")); err != nil {
		t.Fatal(err)
	}
	r.hangs("apply")
	r.kill()
	r.release()
	until(t, "kubeadm is done", func() bool {
		b, _ := os.ReadFile(filepath.Join(r.settings.Root, "etc/kubernetes/manifests/kube-scheduler.yaml"))
		return strings.Contains(string(b), to)
	})
	r.write(crt, "", 0o644)
	lost := filepath.Join(r.settings.Root, "etc/kubernetes/manifests/etcd.yaml")
	b, err := os.ReadFile(lost)
	if err != nil {
		t.Fatal(err)
	}
	r.write("etc/kubernetes/tmp/kubeadm-backup-manifests-2026-11-21-10-00-00/etcd.yaml", string(b), 0o600)
	if err := os.Remove(lost); err != nil {
		t.Fatal(err)
	}

	r.up()
	if _, err := r.client().Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil {
		t.Fatalf("%v\n%s", err, r.out)
	}
	if b, err := os.ReadFile(filepath.Join(r.settings.Root, crt)); err != nil || !bytes.Equal(b, cert) {
		t.Errorf("the certificate is %q, %v\n%s", b, err, r.out)
	}
	if _, err := os.Stat(lost); err != nil {
		t.Errorf("the static pod: %v\n%s", err, r.out)
	}
	if all, err := collect(r.client().Upgrade(t.Context(), r.request("t1"))); err != nil || !strings.HasSuffix(outline(all), straight) {
		t.Fatalf("%v\n%s\n%s", err, outline(all), r.out)
	}
	if _, err := os.Stat(filepath.Join(r.settings.Root, "var/lib/constellation/agent/renewed")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("copies of keys are left: %v", err)
	}
}

func TestStoppedAgentDoesNotStopKubeadm(t *testing.T) {
	r := newRig(t, true)
	r.script("hang-apply", "")
	r.up()
	stream, err := r.client().Upgrade(t.Context(), r.request("t1"))
	if err != nil {
		t.Fatal(err)
	}
	r.hangs("apply")
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if _, err := collect(stream, nil); status.Code(err) != codes.Unavailable {
		t.Errorf("stream ended with %v", err)
	}
	if err := r.cmd.Wait(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		t.Errorf("agent ended with %v\n%s", err, r.out)
	}
	r.release() // kubeadm ends while no agent runs
	until(t, "kubeadm is done", func() bool {
		b, _ := os.ReadFile(filepath.Join(r.settings.Root, "etc/kubernetes/manifests/kube-scheduler.yaml"))
		return strings.Contains(string(b), to)
	})
	r.up()
	all, err := collect(r.client().Upgrade(t.Context(), r.request("t1")))
	if err != nil || !strings.HasSuffix(outline(all), straight) {
		t.Errorf("%v\n%s\n%s", err, outline(all), r.out)
	}
}

// TestJournalOfRelease110 reads a journal that the agent of release v1.1.0 wrote until a power cut, and
// appends to it.
func TestJournalOfRelease110(t *testing.T) {
	old, err := os.ReadFile("testdata/upgrade-v1.1.0.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := dir.WriteFile(journalFile, old, 0o600); err != nil {
		t.Fatal(err)
	}
	open := func() *journal {
		j, err := openJournal(dir, "boot-1", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(j.close)
		return j
	}
	j := open()
	req, started, final := j.latest()
	if req.GetToken() != "token-1" || req.GetKubernetesVersion() != "v1.36.3" || len(req.GetComponents()) != 1 || final || started.IsZero() {
		t.Errorf("the run is %v since %s, final %v", req, started, final)
	}
	if p, next := j.kubeadm(); p == nil || p.PID != 4711 || p.Start != 99 || p.Boot != "boot-1" || next != 190 {
		t.Errorf("kubeadm is %+v, read up to %d, want 190", p, next)
	}
	if r := j.run(false); r.GetSeq() != 6 || r.GetStage() != stageApply || r.GetLastLine() != "[upgrade] second line" {
		t.Errorf("the run is %v", r)
	}
	j.succeed()
	j.close()

	// The truncated line is gone, all others are as they were.
	b, err := dir.ReadFile(journalFile)
	if err != nil {
		t.Fatal(err)
	}
	whole := old[:bytes.LastIndexByte(old, '\n')+1]
	if !bytes.HasPrefix(b, whole) || bytes.Count(b, []byte("\n")) != bytes.Count(whole, []byte("\n"))+1 {
		t.Errorf("the journal is now\n%s\nwant one line after\n%s", b, whole)
	}
	if r := open().run(false); r.GetState() != upgradeproto.Run_SUCCEEDED || r.GetSeq() != 7 {
		t.Errorf("the run is now %v", r)
	}
}
