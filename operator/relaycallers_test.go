//go:build linux

package operator

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/agent/upgradeproto"
)

// idleAgent answers every Status.
type idleAgent struct {
	upgradeproto.UnimplementedAgentServer
}

func (idleAgent) Status(context.Context, *upgradeproto.StatusRequest) (*upgradeproto.StatusResponse, error) {
	return &upgradeproto.StatusResponse{}, nil
}

// forged is a token without a signature by the API server's key.
func forged(t *testing.T, account, audience string, expires time.Time, n int) string {
	t.Helper()
	b, err := json.Marshal(map[string]any{"aud": []string{audience}, "sub": account, "exp": expires.Unix(), "jti": n})
	if err != nil {
		t.Fatal(err)
	}
	return "e30." + base64.RawURLEncoding.EncodeToString(b) + ".c2ln"
}

// TestRelayUnderAFlood runs a relay with a real API server and the chart's rights. Strangers hold
// connections and send forged tokens by the hundred. The operator's calls continue, and the API server
// is asked for few reviews.
func TestRelayUnderAFlood(t *testing.T) {
	c := newCluster(t)
	dir := t.TempDir()
	socket := filepath.Join(dir, "a")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	agent := grpc.NewServer()
	upgradeproto.RegisterAgentServer(agent, idleAgent{})
	go func() { _ = agent.Serve(l) }()
	t.Cleanup(agent.Stop)

	var reviews atomic.Int64
	cfg, err := c.cp.ConfigFor("system:serviceaccount:"+namespace+":"+RelayName, "system:serviceaccounts", "system:serviceaccounts:"+namespace, "system:authenticated")
	if err != nil {
		t.Fatal(err)
	}
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			reviews.Add(1)
			return next.RoundTrip(r)
		})
	})
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(kubernetes.NewForConfigOrDie(cfg), namespace, "worker-1")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- relayTo(ctx, tcp, socket, g, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("relay ended: %v", err)
		}
	})
	dial := func() upgradeproto.AgentClient {
		t.Helper()
		conn, err := grpc.NewClient(tcp.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return upgradeproto.NewAgentClient(conn)
	}
	ask := func(a upgradeproto.AgentClient, token string) codes.Code {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		_, err := a.Status(metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token), &upgradeproto.StatusRequest{})
		return status.Code(err)
	}
	token := func() string {
		t.Helper()
		r, err := kubernetes.NewForConfigOrDie(c.cp.Config()).CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), OperatorAccount,
			&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{g.audience}}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return r.Status.Token
	}
	operator, good := dial(), token()
	for range 50 {
		if code := ask(operator, good); code != codes.OK {
			t.Fatalf("the operator's call: %s", code)
		}
	}
	if n := reviews.Load(); n != 1 {
		t.Errorf("50 calls with one token took %d reviews, want 1", n)
	}

	// A token's own claims are enough to refuse it.
	reviews.Store(0)
	stranger := dial()
	for want, tokens := range map[codes.Code][]string{
		codes.Unauthenticated: {
			"abc.def.ghi", "x", forged(t, g.account, RelayAudienceOf("worker-10"), time.Now().Add(time.Hour), 0),
			forged(t, g.account, "https://kubernetes.default.svc", time.Now().Add(time.Hour), 0), forged(t, g.account, g.audience, time.Now().Add(-time.Hour), 0),
		},
		codes.PermissionDenied: {forged(t, g.account+"s", g.audience, time.Now().Add(time.Hour), 0)},
	} {
		for _, token := range tokens {
			if code := ask(stranger, token); code != want {
				t.Errorf("%.20s…: %s, want %s", token, code, want)
			}
		}
	}
	if n := reviews.Load(); n != 0 {
		t.Errorf("%d tokens that no review could accept were reviewed", n)
	}

	// Forged tokens use up the reviews of strangers and none of the operator's.
	start := time.Now()
	for i := range 500 {
		if code := ask(stranger, forged(t, g.account, g.audience, time.Now().Add(time.Hour), i)); code != codes.Unauthenticated && code != codes.Unavailable {
			t.Fatalf("a forged token: %s", code)
		}
	}
	if n, most := reviews.Load(), reviewBurst+1+int64(reviewRate*time.Since(start).Seconds()); n > most {
		t.Errorf("500 forged tokens took %d reviews in %s, want at most %d", n, time.Since(start), most)
	}
	if code := ask(operator, token()); code != codes.OK {
		t.Errorf("the operator's renewed token during the flood: %s", code)
	}

	// Silent connections: each newcomer closes the oldest one, and never the operator's.
	var silent []net.Conn
	for range 3 * maxStrangersOfSource {
		conn, err := net.Dial("tcp", tcp.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		silent = append(silent, conn)
	}
	for i, conn := range silent[:2*maxStrangersOfSource] {
		if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("silent connection %d of %d is still open", i, len(silent))
		}
	}
	if code := ask(operator, good); code != codes.OK {
		t.Errorf("the operator's call besides silent connections: %s", code)
	}
	if code := ask(dial(), good); code != codes.OK {
		t.Errorf("a new connection of the operator beside silent ones: %s", code)
	}
	g.callers.mu.Lock()
	held := g.callers.strangers.Len()
	g.callers.mu.Unlock()
	if held > maxStrangersOfSource {
		t.Errorf("%d connections of strangers are open, want at most %d", held, maxStrangersOfSource)
	}
}

func TestReviewedTokensAreForgotten(t *testing.T) {
	now := time.Unix(1000, 0)
	g := newGate(nil, namespace, "worker-1")
	g.now = func() time.Time { return now }
	id := func(i byte) (a [32]byte) { a[0] = i; return a }
	g.accept(id(1), now, now.Add(time.Hour))
	g.accept(id(2), now, now.Add(5*time.Second))
	now = now.Add(4 * time.Second)
	if !g.accepted(id(1)) || !g.accepted(id(2)) {
		t.Error("a token is reviewed again at once")
	}
	now = now.Add(time.Second)
	if !g.accepted(id(1)) || g.accepted(id(2)) {
		t.Error("a token counts after it has expired")
	}
	now = now.Add(reviewedFor)
	if g.accepted(id(1)) {
		t.Errorf("a token is not reviewed again after %s", reviewedFor)
	}
	for i := range 100 {
		g.accept(id(byte(i)), now.Add(time.Duration(i)), now.Add(time.Hour))
	}
	if len(g.reviewed) != maxReviewed || !g.accepted(id(99)) {
		t.Errorf("%d are remembered, want %d, the last among them", len(g.reviewed), maxReviewed)
	}
}
