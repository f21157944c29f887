package sandbox

import (
	"net"
	"sync"
)

// cuttable is a listener on this computer's own ports. During the fault "console-cut", its
// connections block in both directions.
type cuttable struct {
	net.Listener
	fleet *fleet
}

// Accept waits for a connection.
func (l cuttable) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &cutConn{Conn: c, fleet: l.fleet, closed: make(chan struct{})}, nil
}

type cutConn struct {
	net.Conn
	fleet *fleet
	once  sync.Once
	// closed is closed together with the connection.
	closed chan struct{}
}

// pass blocks while the connection is open and the fault lasts.
func (c *cutConn) pass() {
	for {
		_, changed := c.fleet.snapshot()
		if !c.fleet.Faults().consoleCut {
			return
		}
		select {
		case <-changed:
		case <-c.closed:
			return
		}
	}
}

func (c *cutConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.pass()
	return n, err
}

func (c *cutConn) Write(b []byte) (int, error) {
	c.pass()
	return c.Conn.Write(b)
}

func (c *cutConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// CloseWrite closes the write side.
func (c *cutConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// SetLinger is like [net.TCPConn.SetLinger].
func (c *cutConn) SetLinger(sec int) error {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		return tcp.SetLinger(sec)
	}
	return nil
}
