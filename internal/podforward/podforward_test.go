package podforward

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/streaming/pkg/httpstream"
)

// node is the API server and the kubelet of a port-forward: a connection with one pipe per stream.
type node struct {
	refusal string // reported on the error stream

	mu     sync.Mutex
	closed chan bool
	ends   map[string]net.Conn // the node's ends, by type of stream
}

func newNode(refusal string) *node {
	return &node{refusal: refusal, closed: make(chan bool), ends: map[string]net.Conn{}}
}

func (n *node) Dial(...string) (httpstream.Connection, string, error) { return n, "", nil }

func (n *node) CreateStream(h http.Header) (httpstream.Stream, error) {
	ours, theirs := net.Pipe()
	n.mu.Lock()
	defer n.mu.Unlock()
	kind := h.Get(corev1.StreamType)
	n.ends[kind] = theirs
	if kind == corev1.StreamTypeError {
		go func() {
			_, _ = io.WriteString(theirs, n.refusal)
			theirs.Close()
		}()
		return stream{ours, true}, nil
	}
	return stream{ours, false}, nil
}

func (n *node) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	select {
	case <-n.closed:
	default:
		close(n.closed)
	}
	return nil
}
func (n *node) CloseChan() <-chan bool             { return n.closed }
func (n *node) SetIdleTimeout(time.Duration)       {}
func (n *node) RemoveStreams(...httpstream.Stream) {}

type stream struct {
	net.Conn
	halfClose bool // Close ends only writes
}

func (s stream) Close() error {
	if s.halfClose {
		return nil
	}
	return s.Conn.Close()
}
func (s stream) Reset() error         { return s.Conn.Close() }
func (s stream) Headers() http.Header { return nil }
func (s stream) Identifier() uint32   { return 0 }

func TestData(t *testing.T) {
	n := newNode("")
	c, err := Dial(t.Context(), n, 9094, "here", "worker-0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(n.ends[corev1.StreamTypeData], n.ends[corev1.StreamTypeData]) }()
	if _, err := io.WriteString(c, "hello"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" {
		t.Errorf("read %q, %v, want the echo", b, err)
	}
	if c.LocalAddr().String() != "here" || c.RemoteAddr().String() != "worker-0" {
		t.Errorf("the ends are %s and %s", c.LocalAddr(), c.RemoteAddr())
	}
	pending := make(chan error, 1)
	go func() { _, err := c.Read(b); pending <- err }()
	c.Close()
	if err := <-pending; err == nil {
		t.Error("Close did not end a pending Read with an error")
	}
}

func TestRefusal(t *testing.T) {
	c, err := Dial(t.Context(), newNode("error forwarding port 9094 to pod x: dial tcp4 127.0.0.1:9094: connect: connection refused\n"), 9094, "here", "worker-0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, want := c.Refusal(10*time.Second), "dial tcp4 127.0.0.1:9094: connect: connection refused"; got != want {
		t.Errorf("Refusal returned %q, want %q", got, want)
	}
	c.CloseOnRefusal()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("a refused connection could be read")
	}
}

// blocked is a dialer that answers only when the test permits it.
type blocked struct {
	*node
	answer chan struct{}
}

func (b blocked) Dial(...string) (httpstream.Connection, string, error) {
	<-b.answer
	return b.node, "", nil
}

func TestLateConnectionIsClosed(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b := blocked{newNode(""), make(chan struct{})}
	if _, err := Dial(ctx, b, 1, "", ""); !errors.Is(err, context.Canceled) {
		t.Errorf("Dial returned %v, want context.Canceled", err)
	}
	close(b.answer)
	select {
	case <-b.closed:
	case <-time.After(10 * time.Second):
		t.Error("the late connection was not closed")
	}
}

// failing is a connection that opens no streams.
type failing struct{ *node }

func (f failing) Dial(...string) (httpstream.Connection, string, error) { return f, "", nil }
func (failing) CreateStream(http.Header) (httpstream.Stream, error) {
	return nil, errors.New("no more streams")
}

func TestConnectionWithoutStreamsIsClosed(t *testing.T) {
	f := failing{newNode("")}
	if _, err := Dial(t.Context(), f, 1, "", ""); err == nil || !strings.Contains(err.Error(), "no more streams") {
		t.Errorf("Dial returned %v", err)
	}
	select {
	case <-f.closed:
	default:
		t.Error("the connection was not closed")
	}
}
