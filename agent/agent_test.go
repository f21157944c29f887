package agent

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"constellation/agent/upgradeproto"
	"constellation/engine/version"
)

// start runs an agent for host and returns a client; it ends with the test.
func start(t *testing.T, host Host) (upgradeproto.AgentClient, string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "a.sock")
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

func TestStatusTellsWhatTheHostRuns(t *testing.T) {
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
		AgentVersion: version.Release, KubeadmVersion: "v1.35.4", KubeletVersion: "v1.35.4", ImageVersion: "v1.1.0",
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
	if d := cmp.Diff(&upgradeproto.StatusResponse{AgentVersion: version.Release}, got, protocmp.Transform()); d != "" {
		t.Errorf("status (-want +got):\n%s", d)
	}
}

func TestStatusNamesWhatItCannotRead(t *testing.T) {
	for _, tt := range []struct{ name, file, content, want string }{
		{"a kubelet that fails", "usr/local/bin/kubelet", "#!/bin/sh\nexit 3\n", "kubelet"},
		{"a kubeadm that says nothing", "usr/local/bin/kubeadm", "#!/bin/sh\n", "no version in its answer"},
		{"a static pod that is no YAML", "etc/kubernetes/manifests/etcd.yaml", "spec: [", "etcd.yaml"},
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

func TestSocketIsRootsAlone(t *testing.T) {
	_, socket := start(t, Host{Root: t.TempDir()})
	wait(t, socket)
	fi, err := os.Lstat(socket)
	if err != nil {
		t.Fatal(err)
	}
	if fi.Mode().Perm() != 0o600 {
		t.Errorf("socket has mode %o, want 600", fi.Mode().Perm())
	}
	if os.Geteuid() != 0 {
		t.Skip("to connect as another user, the test must be root")
	}
	// Even if someone loosens the mode, the kernel says who calls.
	for _, p := range []string{socket, filepath.Dir(socket), filepath.Dir(filepath.Dir(socket))} {
		if err := os.Chmod(p, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	// The test binary itself lies where only root may look.
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
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534, NoSetGroups: true}}
	cmd.Dir = "/"
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("run the test binary as another user: %v\n%s", err, out.String())
	}
	if !strings.Contains(out.String(), "hung up") {
		t.Errorf("another user was served: %s", out.String())
	}
}

// TestHelperConnect is the other user's half of TestSocketIsRootsAlone.
func TestHelperConnect(t *testing.T) {
	socket := os.Getenv("AGENT_TEST_SOCKET")
	if socket == "" {
		t.Skip("runs as a child of TestSocketIsRootsAlone")
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
	// gRPC servers speak first (SETTINGS), so whoever is let in reads something.
	if n, err := c.Read(make([]byte, 1)); n == 0 && err != nil && !os.IsTimeout(err) {
		os.Stdout.WriteString("hung up")
	}
}

func TestListenTakesOverOnlyFromTheDead(t *testing.T) {
	t.Run("a living agent is left alone", func(t *testing.T) {
		_, socket := start(t, Host{Root: t.TempDir()})
		wait(t, socket)
		err := New(Host{}, socket, slog.New(slog.DiscardHandler)).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), "another agent") {
			t.Errorf("second agent: %v, want a refusal", err)
		}
	})
	t.Run("the socket of a dead one is replaced", func(t *testing.T) {
		socket := filepath.Join(t.TempDir(), "a.sock")
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		l.Close()
		nl, err := listen(t.Context(), socket)
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
		if _, err := listen(t.Context(), path); err == nil || !strings.Contains(err.Error(), "no socket") {
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
	// Their places are free again, and who was served before still is.
	if _, err := client.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil {
		t.Error(err)
	}
	wait(t, socket)
}

func TestUnclearSocketIsNotRemoved(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may connect to any socket")
	}
	socket := filepath.Join(t.TempDir(), "a.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	os.Chmod(socket, 0)
	if _, err := listen(t.Context(), socket); err == nil {
		t.Error("took over a socket that somebody listens on")
	}
}
