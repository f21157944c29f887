package operator

import (
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

func TestConnectionsToAHungServerAreClosed(t *testing.T) {
	var mu sync.Mutex
	first := ""
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		if first == "" {
			first = r.RemoteAddr
		}
		hangs := first == r.RemoteAddr
		mu.Unlock()
		if hangs {
			<-r.Context().Done()
		}
	}))
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	c := &rest.Config{Host: s.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true}, Timeout: time.Second}
	closeHungConnections(c)
	h, err := rest.HTTPClientFor(c)
	if err != nil {
		t.Fatal(err)
	}
	get := func() error {
		resp, err := h.Get(s.URL)
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	}
	if get() == nil {
		t.Error("the first connection responds, so the test shows nothing")
	}
	err = get()
	for errors.Is(err, net.ErrClosed) { // it began on the first connection while that was being closed
		err = get()
	}
	if err != nil {
		t.Errorf("the next request hangs as well: %v", err)
	}
}
