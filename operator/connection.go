package operator

import (
	"net"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/connrotation"
)

// hangUp makes whoever uses c leave an API server that takes requests and answers none.
// That of a control plane whose member has left etcd is like that until its kubelet ends
// it, which takes minutes, and all requests share one connection. When one of them ran out of
// time all connections are cut, and the next one may lead to another API server.
func hangUp(c *rest.Config) {
	conns := connrotation.NewDialer((&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext)
	c.Dial = conns.DialContext
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return impatient{next, conns.CloseAll} })
}

type impatient struct {
	next http.RoundTripper
	cut  func()
}

// RoundTrip implements http.RoundTripper.
func (i impatient) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := i.next.RoundTrip(r)
	if err != nil {
		// The client's own timer may end the request a moment before its context knows that it is over.
		if deadline, ok := r.Context().Deadline(); ok && !time.Now().Before(deadline) {
			i.cut()
		}
	}
	return resp, err
}
