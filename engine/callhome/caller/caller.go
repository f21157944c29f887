// Package caller is a machine's half of a call home: a machine that no console can log in to connects to
// a console, which then runs commands on it. Package callhome is the console's half.
//
// The connection is TLS. The caller accepts one certificate, whose digest it has from the machine's
// owner, and sends its token only after the console proved that it has the certificate's key. Console and
// caller then exchange one line of JSON each, and the console is the client of HTTP/2 on the connection:
//
//	POST /run   runs a command. Argv is in the header, stdin in the body. The answer is a stream of frames
//	POST /say   prints a line for the owner
//	POST /end   ends the call: the owner reads the result
//
// The caller runs what the console sends, as the user that started it. The owner starts it with the
// console's command, and it ends with the call.
package caller

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"constellation/internal/delay"
)

// What both halves agree on.
const (
	// Protocol is the name of the protocol in TLS.
	Protocol = "constellation-callhome/1"
	// MaxLine bounds the lines of JSON, in bytes.
	MaxLine = 4 << 10
	// Silence is how long a connection may be silent before it is tested, and then until it is given up.
	Silence = 15 * time.Second

	// PathRun is the request that runs a command.
	PathRun = "/run"
	// PathSay is the request that prints a line.
	PathSay = "/say"
	// PathEnd is the request that ends the call.
	PathEnd = "/end"
	// ArgvHeader has the command: base64 of a JSON list.
	ArgvHeader = "Constellation-Argv"
)

// Hello is the line of the machine.
type Hello struct {
	Token string `json:"token"`
}

// Welcome is the answer of the console. With an error it is the last one.
type Welcome struct {
	// Work completes the sentence "the console will ...": "prepare this machine as worker-1".
	Work   string `json:"work,omitempty"`
	Error  string `json:"error,omitempty"`
	Remedy string `json:"remedy,omitempty"`
}

// End is the result of a call.
type End struct {
	Lines  []string `json:"lines,omitempty"`
	Error  string   `json:"error,omitempty"`
	Remedy string   `json:"remedy,omitempty"`
}

// Call is a call of a console.
type Call struct {
	// Console is its ADDRESS:PORT, Pin the SHA-256 of its certificate in hexadecimal.
	Console, Pin string
	// Token is the one-time token. It is a secret.
	Token string
	// Print gets each line for the owner.
	Print func(line string)
	// Env is the environment of commands; nil is that of the process.
	Env []string
	// Patience is how long the console may be unreachable; zero is DefaultPatience.
	Patience time.Duration
	// Dial connects to the console; nil is TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)

	running sync.WaitGroup // commands
}

// DefaultPatience is how long a caller tries to reach its console again.
const DefaultPatience = 3 * time.Minute

// firstWait is the time before the first retry.
const firstWait = 200 * time.Millisecond

// settle waits a while for commands of a lost connection, such as the one that holds the lock.
func (c *Call) settle() {
	done := make(chan struct{})
	go func() {
		c.running.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
	}
}

// Error is an end that repeating cannot change.
type Error struct {
	Err    error
	Remedy string
}

// Error returns the cause.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// ErrRefused means that the console did not accept the token.
var ErrRefused = errors.New("the console refused this machine")

var pinRE = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Run calls the console and serves it until it ends the call. A connection that is lost is made again, with
// exponential backoff.
func (c *Call) Run(ctx context.Context) error {
	if !pinRE.MatchString(c.Pin) {
		return &Error{errors.New("the digest of the console's certificate is not 64 hexadecimal digits"), "copy the whole command again"}
	}
	patience := cmp.Or(c.Patience, DefaultPatience)
	contact, wait := time.Now(), firstWait
	for {
		connected, err := c.once(ctx)
		var final *Error
		switch {
		case err == nil || errors.As(err, &final):
			return err
		case ctx.Err() != nil:
			return context.Cause(ctx)
		}
		if connected {
			contact, wait = time.Now(), firstWait
			c.settle()
		}
		if time.Since(contact) > patience {
			return &Error{fmt.Errorf("the console at %s cannot be reached: %w", c.Console, err), "check that the console still waits, and that no packet filter is in between; if it was started again, run the command that it prints now; if it ended well, nothing is left to do"}
		}
		c.Print(fmt.Sprintf("connection to %s failed, will retry: %v", c.Console, err))
		if !delay.For(ctx, wait) {
			return context.Cause(ctx)
		}
		wait = min(2*wait, 15*time.Second)
	}
}

// once is one connection. connected is whether the console accepted the machine.
func (c *Call) once(ctx context.Context) (connected bool, err error) {
	conn, err := c.connect(ctx)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	b, err := json.Marshal(Hello{c.Token})
	if err != nil {
		return false, err
	}
	if _, err := conn.Write(append(b, '\n')); err != nil {
		return false, err
	}
	r := bufio.NewReaderSize(conn, MaxLine)
	var w Welcome
	if err := ReadLine(r, &w); err != nil {
		return false, fmt.Errorf("read the answer of the console: %w", err)
	}
	if w.Error != "" {
		return false, &Error{fmt.Errorf("%w: %s", ErrRefused, w.Error), w.Remedy}
	}
	_ = conn.SetDeadline(time.Time{})
	c.Print("the console at " + c.Console + " will " + w.Work)
	return true, c.serve(ctx, &link{Conn: conn, r: r})
}

// connect connects and verifies the console's certificate.
func (c *Call) connect(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	dial := c.Dial
	if dial == nil {
		dial = func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", address)
		}
	}
	raw, err := dial(ctx, c.Console)
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{Protocol},
		// The owner gave the digest of the one certificate that is right: names and authorities prove nothing more.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) > 0 {
				is := sha256.Sum256(s.PeerCertificates[0].Raw)
				if subtle.ConstantTimeCompare([]byte(hex.EncodeToString(is[:])), []byte(c.Pin)) == 1 {
					return nil
				}
			}
			return &Error{fmt.Errorf("another program than the console answers at %s: its certificate is not the one of the command", c.Console), "if the console was started again, run the command that it prints now; else somebody else answers at this address"}
		},
	})
	if err := conn.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, err
	}
	return conn, nil
}

// ReadLine reads a line of JSON of at most MaxLine bytes. r has a buffer of that size.
func ReadLine(r *bufio.Reader, v any) error {
	line, err := r.ReadSlice('\n')
	if err != nil {
		return err
	}
	return json.Unmarshal(line, v)
}

// link is a connection whose first bytes may be in a buffer. It remembers whether it was lost.
type link struct {
	net.Conn
	r    *bufio.Reader
	lost atomic.Bool
}

func (l *link) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if err != nil {
		l.lost.Store(true)
	}
	return n, err
}

func (l *link) Close() error {
	l.lost.Store(true)
	return l.Conn.Close()
}

// serve serves the console on a connection until it ends the call or the connection is lost.
func (c *Call) serve(ctx context.Context, conn *link) error {
	ended := make(chan End, 1)
	closed := make(chan struct{})
	var once sync.Once
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+PathRun, func(w http.ResponseWriter, r *http.Request) { c.run(w, r, conn.lost.Load) })
	mux.HandleFunc("POST "+PathSay, func(_ http.ResponseWriter, r *http.Request) {
		if line, err := io.ReadAll(io.LimitReader(r.Body, MaxLine)); err == nil {
			c.Print(string(line))
		}
	})
	mux.HandleFunc("POST "+PathEnd, func(w http.ResponseWriter, r *http.Request) {
		var e End
		if err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&e); err != nil {
			http.Error(w, "no JSON", http.StatusBadRequest)
			return
		}
		select {
		case ended <- e:
		default:
		}
	})
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true) // TLS is below
	s := &http.Server{
		Handler: mux, Protocols: &protocols, ReadHeaderTimeout: time.Minute,
		HTTP2: &http.HTTP2Config{SendPingTimeout: Silence, PingTimeout: Silence},
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateClosed {
				once.Do(func() { close(closed) })
			}
		},
	}
	defer s.Close()
	go func() { _ = s.Serve(&single{conn: conn, closed: closed}) }()
	var e End
	select {
	case e = <-ended:
		// The answer to the end is on its way: the console closes the connection.
		select {
		case <-closed:
		case <-time.After(2 * time.Second):
		}
	case <-closed:
		select {
		case e = <-ended:
		default:
			return errors.New("the connection was lost")
		}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	for _, line := range e.Lines {
		c.Print(line)
	}
	if e.Error != "" {
		return &Error{errors.New(e.Error), e.Remedy}
	}
	return nil
}

// single is a listener with one connection.
type single struct {
	conn   net.Conn
	closed chan struct{}
}

func (s *single) Accept() (net.Conn, error) {
	if c := s.conn; c != nil {
		s.conn = nil
		return c, nil
	}
	<-s.closed
	return nil, net.ErrClosed
}

func (s *single) Close() error   { return nil }
func (s *single) Addr() net.Addr { return &net.TCPAddr{} }
