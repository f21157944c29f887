package operator

import (
	"container/list"
	"net"
	"sync"
	"time"
)

// A relay listens on loopback in its pod, so callers come through a port-forward and most often
// from one address. Only its token distinguishes the operator from others. A connection without such
// a token so far is a stranger's. The relay limits the number and the duration of such connections.
const (
	// maxStrangers is how many connections of strangers may be open, and maxStrangersOfSource how
	// many from one address. A newcomer closes the oldest one.
	maxStrangers, maxStrangersOfSource = 64, 32
	// strangerTime is how long a caller has until its first call must be admitted.
	strangerTime = 20 * time.Second
)

// callers is a listener that bounds connections of strangers. It is safe for concurrent use. A nil
// pointer knows no connection.
type callers struct {
	net.Listener

	mu        sync.Mutex
	open      map[string]*caller // by remote address
	strangers *list.List         // of *caller, oldest first
	sources   map[string]int     // strangers by source
}

// caller is one connection.
type caller struct {
	net.Conn

	in      *callers
	source  string
	over    *time.Timer
	element *list.Element // nil: it is the operator's, or closed
}

func newCallers(l net.Listener) *callers {
	return &callers{Listener: l, open: map[string]*caller{}, strangers: list.New(), sources: map[string]int{}}
}

// Accept implements net.Listener.
func (c *callers) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	source := conn.RemoteAddr().String()
	if host, _, err := net.SplitHostPort(source); err == nil {
		source = host
	}
	n := &caller{Conn: conn, in: c, source: source}
	c.mu.Lock()
	old := c.roomFor(source)
	n.element = c.strangers.PushBack(n)
	n.over = time.AfterFunc(strangerTime, func() { _ = n.Close() })
	c.sources[source]++
	c.open[conn.RemoteAddr().String()] = n
	c.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
	return n, nil
}

// roomFor returns the connection that is closed for one from a source: the oldest of that source
// if it has its share, the oldest of all if there is no room, else nil.
func (c *callers) roomFor(source string) *caller {
	for e := c.strangers.Front(); e != nil; e = e.Next() {
		if s := e.Value.(*caller); s.source == source && c.sources[source] >= maxStrangersOfSource {
			return s
		}
	}
	if c.strangers.Len() >= maxStrangers {
		return c.strangers.Front().Value.(*caller)
	}
	return nil
}

// Close implements net.Conn.
func (n *caller) Close() error {
	n.in.mu.Lock()
	n.in.leave(n)
	if address := n.RemoteAddr().String(); n.in.open[address] == n {
		delete(n.in.open, address)
	}
	n.in.mu.Unlock()
	return n.Conn.Close()
}

// leave takes a connection from the strangers'.
func (c *callers) leave(n *caller) {
	if n.element == nil {
		return
	}
	n.over.Stop()
	c.strangers.Remove(n.element)
	n.element = nil
	if c.sources[n.source]--; c.sources[n.source] == 0 {
		delete(c.sources, n.source)
	}
}

// admitted notes that the operator has called from an address.
func (c *callers) admitted(address string) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := c.open[address]; n != nil {
		c.leave(n)
	}
}

// knows reports whether the operator has called on the connection from an address.
func (c *callers) knows(address string) bool {
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.open[address]
	return n != nil && n.element == nil
}
