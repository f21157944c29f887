package operator

import (
	"net"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/connrotation"
)

// closeHungConnections makes clients of c leave an API server that accepts requests and does not answer. After the
// member of a control plane has left etcd, its API server behaves like that for minutes, until
// the kubelet stops it. All requests share one connection. After the timeout of a request closeHungConnections
// closes all connections, so the next connection may reach another API server.
func closeHungConnections(c *rest.Config) {
	conns := connrotation.NewDialer((&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext)
	c.Dial = conns.DialContext
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return hungTransport{next, conns.CloseAll} })
}

type hungTransport struct {
	next http.RoundTripper
	cut  func()
}

// RoundTrip implements http.RoundTripper.
func (i hungTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := i.next.RoundTrip(r)
	if err != nil {
		// The client's own timer may end the request shortly before its context is done.
		if deadline, ok := r.Context().Deadline(); ok && !time.Now().Before(deadline) {
			i.cut()
		}
	}
	return resp, err
}
