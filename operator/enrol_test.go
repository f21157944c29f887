//go:build linux

package operator

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"constellation/agent"
	"constellation/agent/upgradeproto"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	signing "constellation/engine/release"
	"constellation/engine/release/releasetest"
	"constellation/engine/version"
	"constellation/internal/syncbuffer"
	"constellation/internal/testneeds"
	"constellation/operator/decision"
)

// oldAgentEnv makes the test binary an agent that verifies no statements; its value is the root
// of the host.
const oldAgentEnv = "OPERATOR_TEST_OLD_AGENT"

func init() {
	if root := os.Getenv(oldAgentEnv); root != "" && filepath.Base(os.Args[0]) == "agent" {
		os.Exit(oldAgentMain(root))
	}
}

// oldAgent does what agents of old images do with a request: it runs what the caller calls
// kubeadm. Journal, installation and the start of kubeadm are those of the agent.
type oldAgent struct {
	upgradeproto.UnimplementedAgentServer
	root string
}

func oldAgentMain(root string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	socket := filepath.Join(filepath.Dir(root), "s", "agent.sock")
	_ = os.Remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	g := grpc.NewServer()
	upgradeproto.RegisterAgentServer(g, oldAgent{root: root})
	context.AfterFunc(ctx, g.Stop)
	_ = g.Serve(l)
	return 0
}

func (a oldAgent) Status(ctx context.Context, _ *upgradeproto.StatusRequest) (*upgradeproto.StatusResponse, error) {
	return agent.Host{Root: a.root, Name: "worker-1"}.Status(ctx)
}

func (a oldAgent) Upgrade(req *upgradeproto.UpgradeRequest, stream grpc.ServerStreamingServer[upgradeproto.UpgradeResponse]) error {
	ctx := stream.Context()
	fail := func(err error) error {
		return stream.Send(&upgradeproto.UpgradeResponse{Seq: 1, Kind: &upgradeproto.UpgradeResponse_Failure{Failure: &upgradeproto.Failure{Stage: "node", Message: err.Error()}}})
	}
	l, err := component.FromProto(req.GetComponents())
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	tool, ok := l.ByName("kubeadm")
	if !ok {
		return status.Error(codes.InvalidArgument, "no kubeadm")
	}
	request, err := protojson.Marshal(req)
	if err != nil {
		return err
	}
	boot, err := kubeadm.BootID()
	if err != nil {
		return err
	}
	head, err := json.Marshal(map[string]any{"head": map[string]any{"request": json.RawMessage(request), "started": time.Now(), "boot": boot, "stage": "node"}})
	if err != nil {
		return err
	}
	dir := filepath.Join(a.root, "var/lib/constellation/agent")
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, "upgrade.jsonl"), append(head, '\n'), 0o600)); err != nil {
		return err
	}
	in := component.Installer{Root: a.root, Log: slog.New(slog.DiscardHandler)}
	if err := in.Install(ctx, component.List{tool}, nil); err != nil {
		return fail(err)
	}
	path := filepath.Join(a.root, "usr/local/bin/kubeadm")
	if v, err := exec.CommandContext(ctx, path, "version", "-o", "short").Output(); err != nil || strings.TrimSpace(string(v)) != req.GetKubernetesVersion() {
		return fail(fmt.Errorf("kubeadm is %q, want %s: %w", v, req.GetKubernetesVersion(), err))
	}
	v, err := version.Parse(req.GetKubernetesVersion())
	if err != nil {
		return fail(err)
	}
	c, err := kubeadm.NewUpgrade(kubeadm.Upgrade{Version: v})
	if err != nil {
		return fail(err)
	}
	d := kubeadm.Detached{Path: path, Dir: dir}
	p, err := d.Start(kubeadm.UpgradeNode, c, func(kubeadm.Process) error { return nil })
	if err == nil {
		err = d.Wait(context.WithoutCancel(ctx), p, 0, func(kubeadm.Line, int64) {})
	}
	if err != nil {
		return fail(err)
	}
	return stream.Send(&upgradeproto.UpgradeResponse{Seq: 1, Kind: &upgradeproto.UpgradeResponse_Success{Success: &upgradeproto.Success{}}})
}

// enrolRig is a worker whose agent verifies nothing, with a unit that starts its agent again.
type enrolRig struct {
	*hostRig
	program    []byte // the agent of the newer image
	enrolment  []byte
	downloads  atomic.Int64
	components component.Signed
}

func newEnrolRig(t *testing.T) *enrolRig {
	t.Helper()
	r := &enrolRig{hostRig: workerRig(t, "worker-1")}
	built := filepath.Join(r.dir, "built")
	testneeds.Tree()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", built, "constellation/agent/cmd")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the agent: %v\n%s", err, out)
	}
	var err error
	if r.program, err = os.ReadFile(built); err != nil {
		t.Fatal(err)
	}
	if r.enrolment, err = signing.Enrolment(r.program, releasetest.Key(t).PEM()); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		r.downloads.Add(1)
		w.Write(r.enrolment)
	}))
	t.Cleanup(server.Close)
	sum := sha256.Sum256(r.enrolment)
	r.components = r.hostRig.components(newKubernetes)
	r.components.Agent = &component.Component{Name: "kubeadm", URL: server.URL + "/agent", Digest: "sha256:" + hex.EncodeToString(sum[:]), Path: "/usr/local/bin/kubeadm", Mode: 0o755}
	if err := os.Remove(r.at0(signing.MachineKeys)); err != nil {
		t.Fatal(err)
	}

	// The old agent is this binary under the name that agents have.
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	r.write("root/usr/lib/constellation/agent", string(b), 0o755)
	r.write("s/x", "", 0o600)
	r.write("bin/systemctl", "#!/bin/sh\n", 0o755)

	// The host's own address, for the kubelet's health. Loopback has many.
	address := fmt.Sprintf("127.%d.%d.77", 100+os.Getpid()%100, os.Getpid()/100%250)
	health, err := net.Listen("tcp", address+":10248")
	if err != nil {
		t.Fatal(err)
	}
	kubelet := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
	go func() { _ = kubelet.Serve(health) }()
	t.Cleanup(func() { kubelet.Close() })

	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			cmd := exec.CommandContext(ctx, r.at0("usr/lib/constellation/agent"), "-root", r.host.Root, "-socket", r.socket(), "-name", "worker-1", "-address", address)
			cmd.Env = append(os.Environ(), oldAgentEnv+"="+r.host.Root, "PATH="+filepath.Join(r.dir, "bin")+":"+os.Getenv("PATH"))
			cmd.Stderr = os.Stderr
			cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
			_ = cmd.Run()
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return r
}

func (r *enrolRig) at0(name string) string {
	return filepath.Join(r.host.Root, filepath.FromSlash(name))
}

func (r *enrolRig) agentHost() *agentHost {
	r.t.Helper()
	h := r.client()
	h.node, h.what = "worker-1", upgradeproto.What_NODE
	r.until("the old agent answers", func() bool {
		_, err := h.Run(r.t.Context())
		return err == nil
	})
	return h
}

// TestAgentsOfOldImagesAreEnrolled upgrades a worker in place whose agent verifies nothing. The
// operator enrols the agent once, so that it verifies from this upgrade on.
func TestAgentsOfOldImagesAreEnrolled(t *testing.T) {
	testneeds.Time(t, "20 s")
	r := newEnrolRig(t)
	h := r.agentHost()
	if verifies, err := h.verifies(t.Context()); err != nil || verifies {
		t.Fatalf("the old agent verifies: %t, %v", verifies, err)
	}
	var progress progressLog
	if err := h.Upgrade(t.Context(), "v1.36.3/0/c", newKubernetes, "c", r.components, false, progress.record); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(progress.phases(), "done") {
		t.Errorf("reported %v", progress.phases())
	}
	if verifies, err := h.verifies(t.Context()); err != nil || !verifies {
		t.Errorf("the new agent verifies: %t, %v", verifies, err)
	}
	if b, err := os.ReadFile(r.at0("usr/lib/constellation/agent")); err != nil || string(b) != string(r.program) {
		t.Errorf("another agent was installed: %d bytes, want %d, %v", len(b), len(r.program), err)
	}
	trust, err := signing.MachineTrust(r.host.Root)
	if err == nil {
		err = trust.Verify(r.components.Statement, version.MustParse(newKubernetes), runtime.GOARCH, r.components.List)
	}
	if err != nil {
		t.Errorf("the release keys: %v", err)
	}
	if b, err := os.ReadFile(r.at0("usr/local/bin/kubeadm")); err != nil || string(b) != string(r.script(newKubernetes)) {
		t.Errorf("kubeadm is not that of the list: %d bytes, %v", len(b), err)
	}
	// From here on the agent requires a statement.
	unsigned := r.components
	unsigned.Statement = ""
	if err := h.Upgrade(t.Context(), "v1.36.3/1/c", newKubernetes, "c", unsigned, false, progress.record); err == nil || !strings.Contains(err.Error(), "no statement of a release builder") {
		t.Errorf("components without a statement: %v", err)
	}
	if err := h.Upgrade(t.Context(), "v1.36.3/2/c", newKubernetes, "c", r.components, false, progress.record); err != nil || r.downloads.Load() != 1 {
		t.Errorf("second request: %v, the enrolment program was fetched %d times", err, r.downloads.Load())
	}
}

// TestEnrolmentThatFails makes the old agent download something else than was published. The upgrade
// does not start, and the next attempt succeeds.
func TestEnrolmentThatFails(t *testing.T) {
	testneeds.Time(t, "10 s")
	r := newEnrolRig(t)
	h := r.agentHost()
	bad := r.components
	wrong := *bad.Agent
	wrong.Digest = "sha256:" + strings.Repeat("ab", 32)
	bad.Agent = &wrong
	var progress progressLog
	err := h.Upgrade(t.Context(), "v1.36.3/0/c", newKubernetes, "c", bad, false, progress.record)
	if err == nil || !strings.Contains(err.Error(), "install the release keys and the verifying agent on worker-1") || !strings.Contains(err.Error(), "digest mismatch") {
		t.Errorf("got %v", err)
	}
	if r.at("node") {
		t.Error("the upgrade started in spite of the failure")
	}
	if err := h.Upgrade(t.Context(), "v1.36.3/1/c", newKubernetes, "c", r.components, false, progress.record); err != nil {
		t.Error(err)
	}
}

// TestEnrolmentWaitsForTheAgent begins an upgrade while the agent does not answer, as when it is
// being restarted. The upgrade waits for the agent and does not fail.
func TestEnrolmentWaitsForTheAgent(t *testing.T) {
	r := newHostRig(t)
	h := r.client()
	var log syncbuffer.Buffer
	h.log = slog.New(slog.NewTextHandler(&log, nil))
	if _, err := h.verifies(t.Context()); status.Code(err) != codes.Unavailable {
		t.Fatalf("an agent that is not reachable: %v", err)
	}
	c := r.components(newKubernetes)
	c.Agent = &component.Component{Name: "kubeadm", URL: r.mirror.URL + "/agent", Digest: "sha256:" + strings.Repeat("ab", 32), Path: "/usr/local/bin/kubeadm"}
	done := make(chan error, 1)
	go func() {
		done <- h.Upgrade(t.Context(), upgradeToken(newKubernetes, "c", decision.UpgradeRun{}), newKubernetes, "c", c, false, func(decision.UpgradeRun) {})
	}()
	r.until("the operator waits for the agent", func() bool {
		select {
		case err := <-done:
			t.Fatalf("the upgrade ended: %v", err)
		default:
		}
		return strings.Contains(log.String(), "agent not reachable")
	})
	r.up()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
