package simulated

import (
	"fmt"
	"io"
	"net"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// portForward connects streams with ports of a pod on the machine's network.
func (k *kubelet) portForward(w http.ResponseWriter, r *http.Request) {
	if _, err := httpstream.Handshake(r, w, []string{portforward.PortForwardProtocolV1Name}); err != nil {
		return // the response was sent
	}
	streams := make(chan httpstream.Stream, 8)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
		streams <- s
		return nil
	})
	if conn == nil {
		return
	}
	defer conn.Close()
	failures := map[string]httpstream.Stream{} // by request; it comes before its data stream
	for {
		select {
		case <-conn.CloseChan():
			return
		case s := <-streams:
			id := s.Headers().Get(corev1.PortForwardRequestIDHeader)
			if s.Headers().Get(corev1.StreamType) == corev1.StreamTypeError {
				failures[id] = s
				continue
			}
			if failures[id] == nil {
				return
			}
			go k.connect(r, s, failures[id])
			delete(failures, id)
		}
	}
}

// connect connects a stream with the port that it names.
func (k *kubelet) connect(r *http.Request, s, failure httpstream.Stream) {
	defer failure.Close()
	defer s.Close()
	port := s.Headers().Get(corev1.PortHeader)
	conn, err := new(net.Dialer).DialContext(r.Context(), "tcp", net.JoinHostPort(k.c.IP.String(), port))
	if err != nil {
		fmt.Fprintf(failure, "%s: error forwarding port %s: %v", StandIn, port, err)
		return
	}
	defer conn.Close()
	go func() {
		_, _ = io.Copy(conn, s)
		if c, ok := conn.(*net.TCPConn); ok {
			_ = c.CloseWrite()
		}
	}()
	_, _ = io.Copy(s, conn)
}
