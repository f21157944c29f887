//go:build linux

package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/engine/cloud/notice"
)

// nodeServer serves one Node as an API server does.
type nodeServer struct {
	*httptest.Server

	mu      sync.Mutex
	down    int // so many requests fail
	patched []condition
}

func newNodeServer(t *testing.T) *nodeServer {
	t.Helper()
	s := &nodeServer{}
	s.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.down > 0 {
			s.down--
			http.Error(w, "etcd has no leader", http.StatusInternalServerError)
			return
		}
		switch {
		case r.Method == http.MethodGet && r.URL.Path == "/api/v1/nodes/worker-1":
			conditions := []map[string]string{{"type": "Ready", "status": "True"}}
			if n := len(s.patched); n > 0 {
				conditions = append(conditions, map[string]string{"type": s.patched[n-1].Type, "status": s.patched[n-1].Status, "reason": s.patched[n-1].Reason})
			}
			_ = json.NewEncoder(w).Encode(map[string]any{"status": map[string]any{"conditions": conditions}})
		case r.Method == http.MethodPatch && r.URL.Path == "/api/v1/nodes/worker-1/status":
			var patch struct {
				Status struct{ Conditions []condition }
			}
			b, _ := io.ReadAll(r.Body)
			if err := json.Unmarshal(b, &patch); err != nil || len(patch.Status.Conditions) != 1 || r.Header.Get("Content-Type") != "application/strategic-merge-patch+json" {
				t.Errorf("patch %s, %v", b, err)
				return
			}
			s.patched = append(s.patched, patch.Status.Conditions[0])
		default:
			t.Errorf("request %s %s", r.Method, r.URL.Path)
		}
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *nodeServer) states() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, c := range s.patched {
		out = append(out, c.Status+" "+c.Reason)
	}
	return strings.Join(out, ", ")
}

// joined returns a host that belongs to the server's cluster.
func (s *nodeServer) joined(t *testing.T) Host {
	t.Helper()
	root := t.TempDir()
	h := Host{Root: root, Name: "worker-1"}
	s.join(t, root)
	return h
}

// join writes the kubelet's credentials, as a join does.
func (s *nodeServer) join(t *testing.T, root string) {
	t.Helper()
	cert, key := testPair(t)
	pki := filepath.Join(root, "var/lib/kubelet/pki")
	conf := fmt.Sprintf("clusters:\n- name: c\n  cluster: {server: %q, certificate-authority-data: %s}\nusers:\n- name: u\n  user: {client-certificate: /var/lib/kubelet/pki/current.pem, client-key: /var/lib/kubelet/pki/current.pem}\n",
		s.URL, base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
	for dir, file := range map[string][]byte{filepath.Join(pki, "current.pem"): append(cert, key...), filepath.Join(root, "etc/kubernetes/kubelet.conf"): []byte(conf)} {
		if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(dir, file, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// testPair returns a certificate and its key in PEM.
func testPair(t *testing.T) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	b, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: b})
}

func TestAnnouncementsAreWritten(t *testing.T) {
	t.Parallel()
	s := newNodeServer(t)
	h := s.joined(t)
	for _, tt := range []struct {
		n    notice.Notice
		want string
	}{
		{want: ""}, // a Node without the condition stays as it is
		{n: notice.Notice{Reason: notice.Preempted, Within: 30 * time.Second}, want: "True Preempted"},
		{n: notice.Notice{Reason: notice.Preempted, Within: 30 * time.Second}, want: "True Preempted"},
		{n: notice.Notice{Reason: notice.HostTerminates}, want: "True Preempted, True HostTerminates"},
		{want: "True Preempted, True HostTerminates, False Ended"}, // as after a restart of the machine
		{want: "True Preempted, True HostTerminates, False Ended"},
	} {
		if _, err := h.note(t.Context(), tt.n); err != nil {
			t.Fatal(err)
		}
		if got := s.states(); got != tt.want {
			t.Errorf("after %+v: %s, want %s", tt.n, got, tt.want)
		}
	}
	if c := s.patched[0]; c.Type != notice.Condition || !strings.Contains(c.Message, "within 30s") || time.Since(c.LastTransitionTime) > time.Minute {
		t.Errorf("condition %+v", c)
	}
}

// TestAnnouncementsAreRetried has an API server that fails, and a host that joins later. Only the latest announcement is written.
func TestAnnouncementsAreRetried(t *testing.T) {
	t.Parallel()
	s := newNodeServer(t)
	s.down = 2
	root := t.TempDir()
	told := make(chan notice.Notice)
	a := New(Host{Root: root, Name: "worker-1"}, filepath.Join(shortDir(t), "a.sock"), slog.New(slog.DiscardHandler))
	a.Notices = func(ctx context.Context, tell func(notice.Notice), _ func(error)) {
		for {
			select {
			case n := <-told:
				tell(n)
			case <-ctx.Done():
				return
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	told <- notice.Notice{}
	told <- notice.Notice{Reason: notice.HostMigrates}
	told <- notice.Notice{Reason: notice.Preempted}
	s.join(t, root)
	for deadline := time.Now().Add(time.Minute); !strings.HasSuffix(s.states(), "True Preempted"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("written: %s", s.states())
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("agent ended with %v", err)
	}
}

// TestBadCredentialsOfTheKubelet checks that errors have no text of the file, which may contain a key.
func TestBadCredentialsOfTheKubelet(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"no YAML": "{SECRET", "no user": "clusters: [{cluster: {server: SECRET}}]", "no key": "clusters: [{cluster: {server: x}}]\nusers: [{user: {client-key-data: SECRET}}]"} {
		root := t.TempDir()
		if err := os.MkdirAll(filepath.Join(root, "etc/kubernetes"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "etc/kubernetes/kubelet.conf"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Host{Root: root, Name: "worker-1"}.note(t.Context(), notice.Notice{Reason: notice.Preempted})
		if err == nil || strings.Contains(err.Error(), "SECRET") || !strings.Contains(err.Error(), "kubelet's credentials") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
