//go:build linux

package agent

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"constellation/agent/upgradeproto"
	"constellation/engine/version"
	"constellation/internal/testneeds"
)

// shortDir is a directory of the test whose name is short, as that of a socket must be: the
// name of the test is not in it.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "agent")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// start runs an agent for host and returns a client; it ends with the test.
func start(t *testing.T, host Host) (upgradeproto.AgentClient, string) {
	t.Helper()
	socket := filepath.Join(shortDir(t), "a.sock")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- New(host, socket, slog.New(slog.DiscardHandler)).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("agent ended with %v", err)
		}
	})
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return upgradeproto.NewAgentClient(conn), socket
}

func write(t *testing.T, root, name, content string, mode os.FileMode) {
	t.Helper()
	p := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

func TestStatusOfHost(t *testing.T) {
	root := t.TempDir()
	write(t, root, "etc/os-release", "NAME=Debian\nIMAGE_VERSION=\"v1.1.0\"\n", 0o644)
	write(t, root, "usr/local/bin/kubeadm", "#!/bin/sh\n[ \"$1 $2 $3\" = 'version -o short' ] && echo v1.35.4\n", 0o755)
	write(t, root, "usr/local/bin/kubelet", "#!/bin/sh\n[ \"$1\" = --version ] && echo Kubernetes v1.35.4\n", 0o755)
	write(t, root, "etc/kubernetes/manifests/kube-apiserver.yaml", "spec: {containers: [{name: kube-apiserver, image: 'registry.k8s.io/kube-apiserver:v1.35.4'}]}", 0o600)
	write(t, root, "etc/kubernetes/manifests/.hidden.yaml", "not yaml: [", 0o600)
	write(t, root, "etc/kubernetes/kubelet.conf", "", 0o600)

	client, _ := start(t, Host{Root: root, Name: "control-plane-0"})
	got, err := client.Status(t.Context(), &upgradeproto.StatusRequest{}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	want := &upgradeproto.StatusResponse{
		VerifiesComponents: true, UpgradesPackages: true, AgentVersion: version.Release, KubeadmVersion: "v1.35.4", KubeletVersion: "v1.35.4", ImageVersion: "v1.1.0",
		StaticPods: map[string]string{"kube-apiserver": "registry.k8s.io/kube-apiserver:v1.35.4"},
		NodeName:   "control-plane-0", Role: "control-plane",
	}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("status (-want +got):\n%s", d)
	}
}

func TestStatusOfAHostOfNoCluster(t *testing.T) {
	client, _ := start(t, Host{Root: t.TempDir(), Name: "worker-0"})
	got, err := client.Status(t.Context(), &upgradeproto.StatusRequest{}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(&upgradeproto.StatusResponse{VerifiesComponents: true, UpgradesPackages: true, AgentVersion: version.Release}, got, protocmp.Transform()); d != "" {
		t.Errorf("status (-want +got):\n%s", d)
	}
}

func TestStatusNamesUnreadableParts(t *testing.T) {
	for _, tt := range []struct{ name, file, content, want string }{
		{name: "a kubelet that fails", file: "usr/local/bin/kubelet", content: "#!/bin/sh\nexit 3\n", want: "kubelet"},
		{name: "a kubeadm without output", file: "usr/local/bin/kubeadm", content: "#!/bin/sh\n", want: "no version in its output"},
		{name: "a static pod that is not YAML", file: "etc/kubernetes/manifests/etcd.yaml", content: "spec: [", want: "etcd.yaml"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := t.TempDir()
			write(t, root, tt.file, tt.content, 0o755)
			client, _ := start(t, Host{Root: root})
			_, err := client.Status(t.Context(), &upgradeproto.StatusRequest{}, grpc.WaitForReady(true))
			if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one that is unavailable and names %q", err, tt.want)
			}
		})
	}
}

func TestSocketIsForRootOnly(t *testing.T) {
	_, socket := start(t, Host{Root: t.TempDir()})
	wait(t, socket)
	fi, err := os.Lstat(socket)
	if err != nil {
		t.Fatal(err)
	}
	if fi.Mode().Perm() != 0o600 {
		t.Errorf("socket has mode %o, want 600", fi.Mode().Perm())
	}
	testneeds.Root(t, "to connect as another user")
	// Even if the mode is changed, the kernel reports the caller's user.
	for _, p := range []string{socket, filepath.Dir(socket), filepath.Dir(filepath.Dir(socket))} {
		if err := os.Chmod(p, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if out := connectAs(t, socket, 65534); !strings.Contains(out, "hung up") {
		t.Errorf("another user was served: %s", out)
	}
}

// TestHelperConnect is the other user's half of connectAs.
func TestHelperConnect(t *testing.T) {
	socket := os.Getenv("AGENT_TEST_SOCKET")
	if socket == "" {
		t.Skip("runs as a child of other tests")
	}
	c, err := net.Dial("unix", socket)
	if err != nil {
		os.Stdout.WriteString("cannot connect: " + err.Error())
		return
	}
	defer c.Close()
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	// gRPC servers speak first (SETTINGS), so an accepted client reads something.
	switch n, err := c.Read(make([]byte, 1)); {
	case n > 0:
		os.Stdout.WriteString("greeted")
	case err != nil && !os.IsTimeout(err):
		os.Stdout.WriteString("hung up")
	}
}

func TestListenTakesOverOnlyFromEndedAgents(t *testing.T) {
	t.Run("a running agent keeps its socket", func(t *testing.T) {
		_, socket := start(t, Host{Root: t.TempDir()})
		wait(t, socket)
		err := New(Host{}, socket, slog.New(slog.DiscardHandler)).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), "another agent") {
			t.Errorf("second agent: %v, want a refusal", err)
		}
	})
	t.Run("the socket of an agent that has ended is replaced", func(t *testing.T) {
		socket := filepath.Join(shortDir(t), "a.sock")
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		l.Close()
		nl, err := listen(t.Context(), socket, 0)
		if err != nil {
			t.Fatal(err)
		}
		nl.Close()
	})
	t.Run("a file is not removed", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "a.sock")
		if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := listen(t.Context(), path, 0); err == nil || !strings.Contains(err.Error(), "not a socket") {
			t.Errorf("listen: %v, want a refusal", err)
		}
		if b, _ := os.ReadFile(path); string(b) != "mine" {
			t.Error("the file is gone")
		}
	})
}

// wait returns when an agent answers on socket.
func wait(t *testing.T, socket string) {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := upgradeproto.NewAgentClient(conn).Status(t.Context(), &upgradeproto.StatusRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	client, socket := start(t, Host{Root: t.TempDir()})
	if _, err := client.Status(t.Context(), &upgradeproto.StatusRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	greeted := 0 // the client above has one
	var open []net.Conn
	for range 3 * maxConnections {
		c, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, _ := c.Read(make([]byte, 1)); n == 1 { // gRPC servers speak first
			greeted++
			open = append(open, c)
		} else {
			c.Close()
		}
	}
	if greeted >= maxConnections || greeted < maxConnections/2 {
		t.Errorf("%d of %d were served at a time", greeted, 3*maxConnections)
	}
	for _, c := range open {
		c.Close()
	}
	// Their slots are free again, and the earlier client is still served.
	if _, err := client.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil {
		t.Error(err)
	}
	wait(t, socket)
}

func TestSocketOfUnknownStateIsNotRemoved(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may connect to any socket")
	}
	socket := filepath.Join(shortDir(t), "a.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	os.Chmod(socket, 0)
	if _, err := listen(t.Context(), socket, 0); err == nil {
		t.Error("took over a socket with a listener")
	}
}

func TestThousandsOfConnections(t *testing.T) {
	client, socket := start(t, Host{Root: t.TempDir()})
	if _, err := client.Status(t.Context(), &upgradeproto.StatusRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	before := openFiles(t)
	// Kept open by the caller as long as it can.
	var open []net.Conn
	for range 10_000 {
		c, err := net.Dial("unix", socket)
		if err != nil {
			break // our own files are at their limit
		}
		if open = append(open, c); len(open) >= 500 {
			open[0].Close()
			open = open[1:]
		}
	}
	if _, err := client.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil {
		t.Errorf("the earlier client: %v", err)
	}
	for _, c := range open {
		c.Close()
	}
	wait(t, socket)
	until(t, "nothing is left open", func() bool { return openFiles(t) <= before+maxConnections })
}

func openFiles(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

func TestRequestsAreBounded(t *testing.T) {
	client, _ := start(t, Host{Root: t.TempDir()})
	var served, refused int
	for range 10 * requestBurst {
		switch _, err := client.EtcdMembers(t.Context(), &upgradeproto.EtcdMembersRequest{}, grpc.WaitForReady(true)); status.Code(err) {
		case codes.FailedPrecondition: // there is no etcd
			served++
		case codes.ResourceExhausted:
			refused++
		default:
			t.Fatal(err)
		}
	}
	if served < requestBurst || refused == 0 {
		t.Errorf("%d served, %d refused", served, refused)
	}
	until(t, "a slot is free again", func() bool {
		_, err := client.Status(t.Context(), &upgradeproto.StatusRequest{})
		return err == nil
	})
}

// FuzzFrames sends invalid or nearly valid HTTP/2: the agent disconnects and serves others.
func FuzzFrames(f *testing.F) {
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	settings := "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	for _, s := range []string{
		"", "GET / HTTP/1.1\r\n\r\n", preface, preface + settings,
		preface + settings + "\x00\xff\xff\x00\x00\x00\x00\x00\x01",                     // data without a stream
		preface + settings + "\x00\x00\x05\x01\x05\x00\x00\x00\x01\x82\x87\xff\xff\xff", // invalid headers
		preface + settings + "\xff\xff\xff\x01\x04\x00\x00\x00\x01",                     // longer than allowed
		preface + settings + "\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08",     // the reset of an idle stream
		preface + settings + "\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00",     // a window that does not grow
	} {
		f.Add([]byte(s))
	}
	socket, root := filepath.Join(f.TempDir(), "a.sock"), f.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- New(Host{Root: root}, socket, slog.New(slog.DiscardHandler)).Run(ctx)
	}()
	f.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			f.Errorf("agent ended with %v", err)
		}
	})
	client := dial(f, socket)
	f.Fuzz(func(t *testing.T, b []byte) {
		until(t, "the agent serves", func() bool {
			_, err := client.Status(t.Context(), &upgradeproto.StatusRequest{})
			return err == nil
		})
		c, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.Write(b)
		c.(*net.UnixConn).CloseWrite()
		c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.Copy(io.Discard, c); os.IsTimeout(err) {
			t.Error("the agent keeps a connection that has ended")
		}
	})
}

// FuzzRequests parses what callers may send.
func FuzzRequests(f *testing.F) {
	good := (&rig{t: f, mirror: httptest.NewUnstartedServer(nil)}).request("t1")
	b, err := proto.Marshal(good)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:len(b)/2])
	f.Fuzz(func(t *testing.T, b []byte) {
		req := &upgradeproto.UpgradeRequest{}
		if proto.Unmarshal(b, req) != nil {
			return
		}
		o, err := parseOrder(req)
		if err != nil {
			return
		}
		for _, c := range append(slices.Clone(o.first), o.rest...) {
			if !strings.HasPrefix(c.Path, "/usr/local/bin") && c.Path != "/opt/cni/bin" || c.Digest == "" {
				t.Errorf("accepted %v", c)
			}
		}
	})
}

func TestOperatorsUserIsServed(t *testing.T) {
	testneeds.Root(t, "to give a socket away")
	const nobody = 65534
	dir, err := os.MkdirTemp("", "agent")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	os.Chmod(dir, 0o711)
	socket := filepath.Join(dir, "s", "a.sock")
	s := New(Host{Root: t.TempDir()}, socket, slog.New(slog.DiscardHandler))
	s.Operator = nobody
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	wait(t, socket)
	i, err := os.Lstat(socket)
	if err != nil {
		t.Fatal(err)
	}
	if o := i.Sys().(*syscall.Stat_t); o.Uid != nobody || i.Mode().Perm() != 0o600 {
		t.Errorf("socket of %d, mode %o", o.Uid, i.Mode().Perm())
	}
	// By the file's mode, and by the kernel's answer if the mode is changed.
	if out := connectAs(t, socket, nobody); !strings.Contains(out, "greeted") {
		t.Errorf("operator: %s", out)
	}
	if out := connectAs(t, socket, nobody-1); !strings.Contains(out, "permission denied") {
		t.Errorf("another user: %s", out)
	}
	os.Chmod(socket, 0o666)
	if out := connectAs(t, socket, nobody-1); !strings.Contains(out, "hung up") {
		t.Errorf("another user, by a socket that is open to all: %s", out)
	}
}

// connectAs connects to socket as another user and returns the result.
func connectAs(t *testing.T, socket string, uid uint32) string {
	t.Helper()
	// The test binary itself is in a directory that only root can read.
	b, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	helper := filepath.Join(filepath.Dir(socket), "helper")
	if err := os.WriteFile(helper, b, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), helper, "-test.run=^TestHelperConnect$")
	cmd.Env = append(os.Environ(), "AGENT_TEST_SOCKET="+socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid, NoSetGroups: true}}
	cmd.Dir = "/"
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("run the test binary as another user: %v\n%s", err, out)
	}
	return string(out)
}
