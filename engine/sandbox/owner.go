package sandbox

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"

	"constellation/engine/cloud"
)

// Simulated machines are processes of this computer, and everything that they are offered is
// on its loopback, where every user may connect. So a simulated sandbox answers the user who
// runs it, and root, who can read its files anyway.

// ownerListener accepts connections of the user whose process this is, and of root. Others
// are closed unanswered, whatever they send.
type ownerListener struct {
	net.Listener
	log *slog.Logger
	// user returns who opened the other end.
	user func(net.Conn) (uid int, err error)
}

func forOwner(l net.Listener, log *slog.Logger) net.Listener {
	return ownerListener{Listener: l, log: log, user: peerUser}
}

// Accept implements net.Listener.
func (l ownerListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &ownerConn{Conn: c, check: sync.OnceValue(func() error { return l.admit(c) })}, nil
}

func (l ownerListener) admit(c net.Conn) error {
	uid, err := l.user(c)
	if err == nil && uid != 0 && uid != os.Geteuid() {
		err = fmt.Errorf("it is of user %d", uid)
	}
	if err != nil {
		l.log.Warn("connection refused", "at", c.LocalAddr(), "err", err)
		_ = c.Close()
		return fmt.Errorf("%w: %w", cloud.ErrDenied, err)
	}
	return nil
}

// ownerConn asks whose it is before anything is read: the listener waits for nobody.
type ownerConn struct {
	net.Conn
	check func() error
}

// Read implements net.Conn.
func (c *ownerConn) Read(b []byte) (int, error) {
	if err := c.check(); err != nil {
		return 0, err
	}
	return c.Conn.Read(b)
}

// atItsAddress serves h to those who ask for the listener's own address. A page in the
// owner's browser, whose connections are the owner's, can have its name lead here, but it
// cannot change which name is asked for.
func atItsAddress(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if l, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); !ok || r.Host != l.String() {
			http.Error(w, `{"error":"asked for by another name"}`, http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}
