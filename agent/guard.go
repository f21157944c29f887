//go:build linux

package agent

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"constellation/internal/peercred"
)

// guard is a listener that closes the connections of all users except root and the operator.
// The file's mode has the same effect; the guard also holds if the mode is changed, or the
// socket is bind-mounted elsewhere.
type guard struct {
	net.Listener
	operator uint32
	log      *slog.Logger

	mu   sync.Mutex
	open map[uint32]int // connections by user
	// Refusals are logged once a second: there may be thousands.
	seldom  rate.Sometimes
	refused int
}

func newGuard(l net.Listener, operator uint32, log *slog.Logger) *guard {
	return &guard{Listener: l, operator: operator, log: log, open: map[uint32]int{}, seldom: rate.Sometimes{Interval: time.Second}}
}

// Accept returns the next connection of an authorized user. A machine's agent runs as root; a
// developer's also serves its own user, who could trace it anyway.
func (g *guard) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer, err := peercred.Of(c)
		uid := peer.UID
		if err == nil && !g.enter(uid) {
			err = errors.New("not served, or too many connections")
		}
		if err == nil {
			return &counted{Conn: c, release: sync.OnceFunc(func() { g.leave(uid) })}, nil
		}
		c.Close()
		g.refused++
		g.seldom.Do(func() {
			g.log.Warn("callers refused", "count", g.refused, "uid", uid, "err", err)
			g.refused = 0
		})
	}
}

// enter counts a connection of a user, unless the user has too many.
func (g *guard) enter(uid uint32) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	known := uid == 0 || uid == uint32(os.Geteuid()) || g.operator != 0 && uid == g.operator
	if !known || g.open[uid] >= maxConnections {
		return false
	}
	g.open[uid]++
	return true
}

func (g *guard) leave(uid uint32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open[uid]--
}

// counted decrements the count when it is closed.
type counted struct {
	net.Conn
	release func()
}

// Close implements net.Conn.
func (c *counted) Close() error {
	defer c.release()
	return c.Conn.Close()
}
