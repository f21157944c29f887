// Package flood is a denial-of-service attack on a server of attested TLS, for tests of its
// effect on honest callers.
//
// Each of its connections is replaced when the server closes it. It never completes a
// handshake.
package flood

import (
	"context"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
)

// Flood configures an attack. It must name an Address; the zero value of the rest opens no
// connections.
type Flood struct {
	// Address is host and port of the server.
	Address string
	// Sources are the local addresses to connect from, in turn; empty: the system's
	// choice.
	Sources []netip.Addr
	// Silent is how many connections send nothing.
	Silent int
	// Half is how many connections begin a handshake and leave it: one half of them
	// after the first half of a ClientHello, the other one after all of it, so that
	// the server makes evidence.
	Half int
	// Rate bounds how many connections are opened per second; zero stands for 2,000.
	Rate int
}

// Running is a flood under way.
type Running struct {
	stop   context.CancelFunc
	wg     sync.WaitGroup
	opened atomic.Int64
	failed atomic.Int64
}

// Opened returns how many connections were opened up to now.
func (r *Running) Opened() int64 { return r.opened.Load() }

// Failed returns how often a connection could not be opened.
func (r *Running) Failed() int64 { return r.failed.Load() }

// Stop ends the flood and waits until its connections are closed. It may be called
// more than once.
func (r *Running) Stop() {
	r.stop()
	r.wg.Wait()
}

// Start begins f and returns when each connection was opened once, or with ctx's
// error. The flood ends with ctx, or with Stop.
func (f Flood) Start(ctx context.Context) (*Running, error) {
	hello, err := Hello()
	if err != nil {
		return nil, err
	}
	per := f.Rate
	if per <= 0 {
		per = 2000
	}
	pace := rate.NewLimiter(rate.Limit(per), max(1, per/100))
	r := &Running{}
	begin := ctx
	ctx, r.stop = context.WithCancel(ctx)
	var first sync.WaitGroup
	for i := range f.Silent + f.Half {
		var said []byte
		if i >= f.Silent {
			if said = hello; i%2 == 0 {
				said = hello[:len(hello)/2]
			}
		}
		d := net.Dialer{Timeout: 5 * time.Second, KeepAlive: -1}
		if len(f.Sources) > 0 {
			// Without a port, so that the kernel may use one port towards several servers.
			d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(f.Sources[i%len(f.Sources)], 0))
		}
		first.Add(1)
		opened := sync.OnceFunc(first.Done)
		r.wg.Go(func() {
			defer opened()
			for pace.Wait(ctx) == nil {
				c, err := d.DialContext(ctx, "tcp", f.Address)
				if err != nil {
					r.failed.Add(1)
					continue
				}
				r.opened.Add(1)
				opened()
				hold(ctx, c, said)
			}
		})
	}
	all := make(chan struct{})
	go func() { first.Wait(); close(all) }()
	select {
	case <-all:
	case <-begin.Done():
		r.Stop()
		return nil, begin.Err()
	}
	return r, nil
}

// hold sends said on c and keeps it until the server or ctx ends it.
func hold(ctx context.Context, c net.Conn, said []byte) {
	defer context.AfterFunc(ctx, func() { c.Close() })()
	defer c.Close()
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // else the ports of this computer are used up
	}
	if _, err := c.Write(said); err != nil {
		return
	}
	b := make([]byte, 256)
	for {
		if _, err := c.Read(b); err != nil {
			return
		}
	}
}

// environment carries a Flood, as JSON, to the process that Spawn starts.
const environment = "CONSTELLATION_TEST_FLOOD"

// Child is the process that Spawn starts, if this is one, and ends it. TestMain calls
// it before anything else.
func Child() {
	text := os.Getenv(environment)
	if text == "" {
		return
	}
	if err := child(text); err != nil {
		fmt.Fprintln(os.Stderr, "flood:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func child(text string) error {
	var f Flood
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		return fmt.Errorf("read flood: %w", err)
	}
	if err := Descriptors(uint64(f.Silent + f.Half + 100)); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // the parent ends this process by closing it
		stop()
	}()
	r, err := f.Start(ctx)
	if err != nil {
		return err
	}
	fmt.Println("open")
	<-ctx.Done()
	r.Stop()
	fmt.Println(r.Opened(), r.Failed())
	return nil
}

// Environment returns the variable, NAME=value, that makes a program which calls Child
// this flood. The value has no single quote.
func (f Flood) Environment() (string, error) {
	text, err := json.Marshal(f)
	if err != nil {
		return "", fmt.Errorf("write flood: %w", err)
	}
	return environment + "=" + string(text), nil
}

// Spawn begins f in a process of its own, so that it shares neither memory nor
// descriptors with the server, and returns when each connection was opened once. stop
// ends it and returns how many connections were opened, and how often that failed. It
// may be called once.
func (f Flood) Spawn(ctx context.Context) (stop func() (opened, failed int64, err error), err error) {
	env, err := f.Environment()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), env)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start flood: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start flood: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start flood: %w", err)
	}
	if _, err := fmt.Fscanln(out, new(string)); err != nil {
		in.Close()
		return nil, errors.Join(fmt.Errorf("start flood: %w", err), cmd.Wait())
	}
	return func() (opened, failed int64, err error) {
		in.Close()
		_, err = fmt.Fscanln(out, &opened, &failed)
		return opened, failed, errors.Join(err, cmd.Wait())
	}, nil
}

// Hello returns a ClientHello as the clients of attested TLS send it, with a nonce.
func Hello() ([]byte, error) {
	here, there := net.Pipe()
	defer there.Close()
	go func() {
		_ = tls.Client(here, &tls.Config{
			InsecureSkipVerify: true, MinVersion: tls.VersionTLS13,
			NextProtos: []string{"h2", "constellation-atls-1/" + hex.EncodeToString(make([]byte, 32))},
		}).HandshakeContext(context.Background()) // it ends when there is closed
		here.Close()
	}()
	b := make([]byte, 16<<10)
	n, err := there.Read(b)
	if err != nil {
		return nil, fmt.Errorf("make a ClientHello: %w", err)
	}
	return b[:n], nil
}

// Loopback returns n addresses of this computer, other than 127.0.0.1.
func Loopback(n int) []netip.Addr {
	out := make([]netip.Addr, n)
	for i := range out {
		out[i] = netip.AddrFrom4([4]byte{127, 9, byte(i / 250), byte(1 + i%250)})
	}
	return out
}

// Descriptors raises this process's soft limit of open files to its hard one, and
// returns an error if that is less than n.
func Descriptors(n uint64) error {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return fmt.Errorf("read limit of open files: %w", err)
	}
	if l.Cur < l.Max {
		l.Cur = l.Max
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
			return fmt.Errorf("raise limit of open files: %w", err)
		}
	}
	if l.Cur < n {
		return fmt.Errorf("raise limit of open files: this process may open %d, want %d", l.Cur, n)
	}
	return nil
}
