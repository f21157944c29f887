package sandbox

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

// apiServer answers /readyz like a kube-apiserver and every other path with its name.
type apiServer struct {
	*httptest.Server
	backend
	ready atomic.Bool
}

func newAPIServer(t *testing.T, name string) *apiServer {
	t.Helper()
	s := &apiServer{}
	s.ready.Store(true)
	s.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" && !s.ready.Load() {
			http.Error(w, "shutting down", http.StatusInternalServerError)
			return
		}
		if r.URL.Path == "/watch" { // a response that never ends
			w.WriteHeader(http.StatusOK)
			fmt.Fprintln(w, name)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		}
		fmt.Fprint(w, name)
	}))
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	u, _ := url.Parse(s.URL)
	s.backend = backend{name, netip.MustParseAddrPort(u.Host)}
	return s
}

// balance serves b on a loopback port and returns its URL and a client that opens a new connection per request.
func balance(t *testing.T, b *balancer) (string, *http.Client) {
	t.Helper()
	b.name, b.log = "test", slog.New(slog.DiscardHandler)
	if b.dial == nil {
		b.dial = (&net.Dialer{}).DialContext
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{}, 2)
	go func() { b.serve(ctx, l); done <- struct{}{} }()
	go func() { b.run(ctx); done <- struct{}{} }()
	t.Cleanup(func() {
		cancel()
		for range 2 {
			select {
			case <-done:
			case <-time.After(5 * time.Second):
				t.Error("balancer did not end")
			}
		}
	})
	tr := httptest.NewTLSServer(nil) // for its client's trust in the test certificate
	defer tr.Close()
	base := tr.Client().Transport.(*http.Transport).Clone()
	base.DisableKeepAlives = true
	return "https://" + l.Addr().String(), &http.Client{Transport: base, Timeout: 5 * time.Second}
}

func ask(c *http.Client, url string) (string, error) {
	resp, err := c.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

// eventually waits for a condition that depends on probes.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(8 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("did not happen: %s", what)
}

func (b *balancer) healthOf(a backend) health {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := b.members[a.addr]; m != nil {
		return m.health
	}
	return unknown
}

func TestBalancerAvoidsServersThatAreNotReady(t *testing.T) {
	one, two := newAPIServer(t, "one"), newAPIServer(t, "two")
	dial := (&net.Dialer{}).DialContext
	b := &balancer{backends: func() []backend { return []backend{one.backend, two.backend} }, probe: readyz(dial)}
	url, client := balance(t, b)
	eventually(t, "both are up", func() bool { return b.healthOf(one.backend) == up && b.healthOf(two.backend) == up })

	// A client that reconnects reaches all backends, like a check of every API server.
	met := map[string]int{}
	for range 20 {
		got, err := ask(client, url)
		if err != nil {
			t.Fatal(err)
		}
		met[got]++
	}
	if met["one"] < 5 || met["two"] < 5 {
		t.Errorf("20 requests, one after the other, went to %v", met)
	}

	// Open streams are distributed: the second goes to the backend with fewer connections.
	var seen []string
	var streams []*http.Response
	for range 2 {
		resp, err := client.Get(url + "/watch")
		if err != nil {
			t.Fatal(err)
		}
		line, _ := bufio.NewReader(resp.Body).ReadString('\n')
		seen, streams = append(seen, line), append(streams, resp)
	}
	slices.Sort(seen)
	if !slices.Equal(seen, []string{"one\n", "two\n"}) {
		t.Errorf("two streams went to %q", seen)
	}

	one.ready.Store(false)
	eventually(t, "one drains", func() bool { return b.healthOf(one.backend) == draining })
	for range 10 {
		if got, err := ask(client, url); err != nil || got != "two" {
			t.Fatalf("got %q, %v from a server that is not ready", got, err)
		}
	}
	for _, s := range streams { // a draining server keeps the streams it has
		s.Body.Close()
	}

	// No backend is ready: an unready server is better than none.
	two.ready.Store(false)
	eventually(t, "two drains", func() bool { return b.healthOf(two.backend) == draining })
	if _, err := ask(client, url); err != nil {
		t.Errorf("no server is ready, and none was tried: %v", err)
	}
}

func TestBalancerCutsConnectionsToDeadServers(t *testing.T) {
	one, two := newAPIServer(t, "one"), newAPIServer(t, "two")
	var dead atomic.Bool // one's machine has vanished: packets to it get no answer
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		if dead.Load() && address == one.addr.String() {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	probe := func(ctx context.Context, address string) health { // no kept connection: a vanished machine has none
		c, err := dial(ctx, "tcp", address)
		if err != nil {
			return down
		}
		c.Close()
		return up
	}
	b := &balancer{backends: func() []backend { return []backend{one.backend, two.backend} }, probe: probe, dial: dial}
	url, client := balance(t, b)
	client.Timeout = 0
	eventually(t, "both are up", func() bool { return b.healthOf(one.backend) == up && b.healthOf(two.backend) == up })

	resp, err := client.Get(url + "/watch")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r := bufio.NewReader(resp.Body)
	if line, _ := r.ReadString('\n'); line != "one\n" {
		t.Fatalf("stream went to %q", line)
	}
	dead.Store(true)
	start := time.Now()
	for range 5 {
		if got, err := ask(client, url); err != nil || got != "two" {
			t.Fatalf("during failover: %q, %v", got, err)
		}
	}
	if _, err := r.ReadString('\n'); err == nil {
		t.Error("the stream of the dead server goes on")
	}
	if took := time.Since(start); took > 2*downAfter*(probeTimeout+probeEvery) {
		t.Errorf("failover took %s", took)
	}
}

func TestBalancerRefusesWithoutBackends(t *testing.T) {
	url, client := balance(t, &balancer{backends: func() []backend { return nil }})
	start := time.Now()
	if got, err := ask(client, url); err == nil {
		t.Errorf("got %q from nobody", got)
	}
	if took := time.Since(start); took > time.Second {
		t.Errorf("refusal took %s", took)
	}
}

func TestOrderedBalancerFollowsTheListAndDropsWhoLeft(t *testing.T) {
	one, two := newAPIServer(t, "one"), newAPIServer(t, "two")
	var list atomic.Pointer[[]backend]
	list.Store(&[]backend{one.backend, two.backend})
	b := &balancer{backends: func() []backend { return *list.Load() }, ordered: true}
	url, client := balance(t, b)
	for range 5 {
		if got, err := ask(client, url); err != nil || got != "one" {
			t.Fatalf("got %q, %v", got, err)
		}
	}
	stream, err := client.Get(url + "/watch")
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Body.Close()
	list.Store(&[]backend{two.backend})
	if got, err := ask(client, url); err != nil || got != "two" {
		t.Errorf("after one left: %q, %v", got, err)
	}
	if got, err := io.ReadAll(stream.Body); err == nil {
		t.Errorf("stream to a machine that left ended cleanly with %q", got)
	}
}

func TestTunnelKeepsHalfOpenConnections(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() { // answers only after the client has finished speaking
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b, _ := io.ReadAll(c)
		fmt.Fprintf(c, "%d bytes", len(b))
	}()
	be := backend{"one", netip.MustParseAddrPort(l.Addr().String())}
	url, _ := balance(t, &balancer{backends: func() []backend { return []backend{be} }})
	c, err := net.Dial("tcp", url[len("https://"):])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Write(make([]byte, 100_000))
	c.(*net.TCPConn).CloseWrite()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if got, err := io.ReadAll(c); err != nil || string(got) != "100000 bytes" {
		t.Errorf("got %q, %v", got, err)
	}
}
