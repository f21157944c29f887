// Package kubelettest stands for kubelets where the control plane is real and nothing
// else is.
package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// Kubelet forwards ports as a kubelet does, for pods in the network of this computer.
type Kubelet struct {
	server *httptest.Server
	ctx    context.Context
	end    context.CancelFunc

	mu    sync.Mutex
	conns map[httpstream.Connection]bool
}

// New starts a kubelet, which the caller closes.
func New() *Kubelet {
	k := &Kubelet{conns: map[httpstream.Connection]bool{}}
	k.ctx, k.end = context.WithCancel(context.Background())
	mux := http.NewServeMux()
	mux.HandleFunc("/portForward/{namespace}/{pod}", k.forward)
	k.server = httptest.NewUnstartedServer(mux)
	k.server.Config.ErrorLog = log.New(io.Discard, "", 0) // what breaks off is the test's own doing
	k.server.StartTLS()
	return k
}

// Register makes a Node called name whose kubelet it is.
func (k *Kubelet) Register(ctx context.Context, c kubernetes.Interface, name string) error {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := c.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{}); err != nil {
		return err
	}
	return k.Serve(ctx, c, name)
}

// Serve makes it the kubelet of the Node called name.
func (k *Kubelet) Serve(ctx context.Context, c kubernetes.Interface, name string) error {
	nodes := c.CoreV1().Nodes()
	n, err := nodes.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}}
	n.Status.DaemonEndpoints.KubeletEndpoint.Port = int32(k.server.Listener.Addr().(*net.TCPAddr).Port)
	_, err = nodes.UpdateStatus(ctx, n, metav1.UpdateOptions{})
	return err
}

// Cut ends all connections, as a machine does that dies.
func (k *Kubelet) Cut() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for c := range k.conns {
		_ = c.Close()
	}
}

// Close ends the kubelet and all connections.
func (k *Kubelet) Close() {
	k.end()
	k.Cut()
	k.server.Close()
}

func (k *Kubelet) forward(w http.ResponseWriter, r *http.Request) {
	if _, err := httpstream.Handshake(r, w, []string{portforward.PortForwardProtocolV1Name}); err != nil {
		return // it is answered
	}
	streams := make(chan httpstream.Stream, 8)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
		streams <- s
		return nil
	})
	if conn == nil {
		return
	}
	k.mu.Lock()
	k.conns[conn] = true
	k.mu.Unlock()
	defer func() {
		_ = conn.Close()
		k.mu.Lock()
		delete(k.conns, conn)
		k.mu.Unlock()
	}()
	failures := map[string]httpstream.Stream{} // by request; it comes before its data stream
	for {
		select {
		case <-conn.CloseChan():
			return
		case <-k.ctx.Done():
			return
		case s := <-streams:
			id := s.Headers().Get(corev1.PortForwardRequestIDHeader)
			if s.Headers().Get(corev1.StreamType) == corev1.StreamTypeError {
				failures[id] = s
				continue
			}
			go k.copy(s, failures[id])
		}
	}
}

// copy connects a stream with the port that it names.
func (k *Kubelet) copy(s, failure httpstream.Stream) {
	defer failure.Close()
	defer s.Close()
	port := s.Headers().Get(corev1.PortHeader)
	conn, err := new(net.Dialer).DialContext(k.ctx, "tcp4", "127.0.0.1:"+port)
	if err != nil {
		fmt.Fprintf(failure, "error forwarding port %s to pod: failed to execute portforward in network namespace: %v", port, err)
		return
	}
	defer conn.Close()
	go func() {
		_, _ = io.Copy(conn, s)
		if c, ok := conn.(*net.TCPConn); ok {
			_ = c.CloseWrite()
		}
	}()
	if _, err := io.Copy(s, conn); err != nil && !errors.Is(err, net.ErrClosed) {
		fmt.Fprintf(failure, "error forwarding port %s to pod: %v", port, err)
	}
}
