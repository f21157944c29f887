//go:build linux

package sandbox

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"constellation/engine/cloud/sandboxapi"
	"constellation/internal/testneeds"
)

// dialerEnv makes this test binary fetch a URL and print the response.
const dialerEnv = "CONSTELLATION_TEST_ASKS"

func askIfTold() {
	if url := os.Getenv(dialerEnv); url != "" {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			panic(err)
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			os.Stdout.WriteString("no answer: " + err.Error())
			os.Exit(0)
		}
		b, _ := io.ReadAll(resp.Body)
		os.Stdout.WriteString(resp.Status + " " + string(b))
		os.Exit(0)
	}
}

// TestSimulatedSandboxesAnswerTheirOwner requests everything that machines can fetch, as
// root and as another user.
func TestSimulatedSandboxesAnswerTheirOwner(t *testing.T) {
	testneeds.Root(t, "to act as another user")
	a, f, _ := testAPI(t)
	scale(t, f, 1, 1)
	self := f.Instances()[0].IP.String()
	metadata := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.RemoteAddr = net.JoinHostPort(self, "40000") // every request is on loopback here
		a.metadata().ServeHTTP(w, r)
	})
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: atItsAddress(metadata)}
	go server.Serve(forOwner(l, discard()))
	t.Cleanup(func() { server.Close() })
	url := "http://" + l.Addr().String()
	m := sandboxapi.NewMetadata(url)
	if token, err := m.Token(t.Context()); err != nil || token == "" {
		t.Fatalf("the owner gets %q, %v", token, err)
	}
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "owner")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/ask", program, 0o755); err != nil {
		t.Fatal(err)
	}
	ask := func(path string, uid uint32) string {
		t.Helper()
		cmd := exec.Command(dir + "/ask")
		cmd.Dir, cmd.Env = "/", []string{dialerEnv + "=" + url + path}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("ask as %d: %v", uid, err)
		}
		return string(out)
	}
	for _, path := range []string{"/v1/token", "/v1/initsecrethash", "/v1/peers", "/v1/self", "/v1/loadbalancer", "/v1/podcidr"} {
		if out := ask(path, 0); !strings.HasPrefix(out, "200 OK {") {
			t.Errorf("the owner gets %q at %s", out, path)
		}
		if out := ask(path, 65534); !strings.HasPrefix(out, "no answer: ") {
			t.Errorf("another user gets %q at %s", out, path)
		}
	}
	// A DNS name that resolves to this address is refused, for every user.
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/v1/token", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = "evil.example:80"
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusForbidden {
		t.Errorf("by another name: %s %q", resp.Status, b)
	}
}

func TestPeerUser(t *testing.T) {
	for _, at := range []struct{ network, listen, dial string }{{network: "tcp4", listen: "127.0.0.1:0", dial: "127.0.0.1"}, {network: "tcp", listen: "[::]:0", dial: "127.0.0.1"}} {
		l, err := net.Listen(at.network, at.listen)
		if err != nil {
			t.Skip(err)
		}
		defer l.Close()
		_, port, _ := net.SplitHostPort(l.Addr().String())
		out, err := net.Dial("tcp", net.JoinHostPort(at.dial, port))
		if err != nil {
			t.Fatal(err)
		}
		in, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		if uid, err := peerUser(in); err != nil || uid != os.Geteuid() {
			t.Errorf("%s: user %d, %v, want %d", at.listen, uid, err, os.Geteuid())
		}
		// A socket whose process has closed it is shown as root's.
		out.Close()
		if uid, err := peerUser(in); err == nil {
			t.Errorf("%s: who has left is user %d", at.listen, uid)
		}
	}
}
