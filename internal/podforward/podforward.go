// Package podforward connects to ports of pods through the API server, as kubectl port-forward does, but
// opens no port on this machine. The API server authenticates the caller, and the kubelet the API server.
package podforward

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"
)

// maxRefusal is in bytes, of the error text that the node reports.
const maxRefusal = 1024

// SPDY returns a dialer for a pod. It requires only the right to create pods/portforward. The URL is for
// other dialers to the same pod.
func SPDY(c kubernetes.Interface, config *rest.Config, p *corev1.Pod) (httpstream.Dialer, *url.URL, error) {
	u := c.CoreV1().RESTClient().Post().Resource("pods").Namespace(p.Namespace).Name(p.Name).SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(rest.CopyConfig(config))
	if err != nil {
		return nil, nil, err
	}
	return spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, u), u, nil
}

// Conn is one connection to a port of a pod. Deadlines have no effect: callers that wait close the
// connection.
type Conn struct {
	conn        httpstream.Connection
	data        httpstream.Stream
	local, peer addr

	reported chan struct{} // closed when the node has ended its report
	refusal  bytes.Buffer  // readable then
}

// Dial opens a connection to a port. local and peer name its ends. The dialer takes no context, so a
// connection that arrives after the end of ctx is closed.
func Dial(ctx context.Context, dialer httpstream.Dialer, port int32, local, peer string) (*Conn, error) {
	type dialed struct {
		conn httpstream.Connection
		err  error
	}
	done, late := make(chan dialed), make(chan struct{})
	go func() {
		conn, _, err := dialer.Dial(portforward.PortForwardProtocolV1Name)
		select {
		case done <- dialed{conn, err}:
		case <-late:
			if err == nil {
				_ = conn.Close()
			}
		}
	}()
	var d dialed
	select {
	case d = <-done:
	case <-ctx.Done():
		close(late)
		return nil, ctx.Err()
	}
	if d.err != nil {
		return nil, d.err
	}
	c, err := open(d.conn, port)
	if err != nil {
		_ = d.conn.Close()
		return nil, err
	}
	c.local, c.peer = addr(local), addr(peer)
	return c, nil
}

func open(conn httpstream.Connection, port int32) (*Conn, error) {
	h := http.Header{}
	h.Set(corev1.PortHeader, strconv.Itoa(int(port)))
	h.Set(corev1.PortForwardRequestIDHeader, "0")
	h.Set(corev1.StreamType, corev1.StreamTypeError)
	failure, err := conn.CreateStream(h)
	if err != nil {
		return nil, err
	}
	if err := failure.Close(); err != nil { // nothing is written to it
		return nil, err
	}
	h.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := conn.CreateStream(h)
	if err != nil {
		return nil, err
	}
	c := &Conn{conn: conn, data: data, reported: make(chan struct{})}
	go func() {
		defer close(c.reported)
		_, _ = io.Copy(&c.refusal, io.LimitReader(failure, maxRefusal)) // it ends with the connection at the latest
	}()
	go func() {
		<-conn.CloseChan()
		// The end of the connection does not end a pending Read of a stream.
		_ = data.Reset()
		_ = failure.Reset()
	}()
	return c, nil
}

// Refusal returns the error that the node reports if it cannot connect to the port. It waits for the report
// up to d, and returns an empty string if there is none.
func (c *Conn) Refusal(d time.Duration) string {
	limit := time.NewTimer(d)
	defer limit.Stop()
	select {
	case <-c.reported:
	case <-limit.C:
		return ""
	}
	// "error forwarding port 9094 to pod ...: failed to execute portforward in network
	// namespace ...: dial tcp4 127.0.0.1:9094: connect: connection refused"
	text := strings.TrimSpace(c.refusal.String())
	if i := strings.LastIndex(text, "dial tcp"); i >= 0 {
		text = text[i:]
	}
	return text
}

// CloseOnRefusal closes the connection as soon as the node reports an error. Data that arrived before may
// be lost.
func (c *Conn) CloseOnRefusal() {
	go func() {
		if <-c.reported; c.refusal.Len() > 0 {
			_ = c.Close()
		}
	}()
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) { return c.data.Read(b) }

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (int, error) { return c.data.Write(b) }

// CloseData ends the data. The node can still report an error, until Close.
func (c *Conn) CloseData() error { return c.data.Reset() }

// Close implements net.Conn. It may be called more than once.
func (c *Conn) Close() error { return c.conn.Close() }

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.peer }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(time.Time) error { return nil }

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(time.Time) error { return nil }

type addr string

// Network implements net.Addr.
func (addr) Network() string { return "portforward" }

// String implements net.Addr.
func (a addr) String() string { return string(a) }
