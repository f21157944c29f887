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

// Simulated machines are processes of this computer, and their services listen on loopback,
// where every user may connect. So a simulated sandbox accepts only the user who runs it,
// and root, who can read its files anyway.

// ownerListener accepts connections of this process's user, and of root. Others
// are closed without an answer.
type ownerListener struct {
	net.Listener
	log *slog.Logger
	// user returns the user who opened the other end.
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

// ownerConn checks the user at the first read, so that Accept does not block.
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

// atItsAddress restricts h to requests whose Host is the listener's own address. A web page in
// the owner's browser can resolve its name to this address (DNS rebinding), but it cannot
// change the Host header.
func atItsAddress(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if l, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); !ok || r.Host != l.String() {
			http.Error(w, `{"error":"asked for by another name"}`, http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}
