// Package callhome answers: how does a console prepare a machine that it cannot log in to?
//
// The machine connects to the console, which listens while it waits. The owner of the machine runs a
// command of [Listener.Command] there as root, or gives [Listener.CloudInit] to a new machine. It fetches a
// program by its digest, which calls the console (package caller). Then the [Host] runs commands on the
// machine as sshhost.Host does after a login.
//
// Each machine has a one-time token, in the memory of the console alone. It is bound to the address of
// the machine, expires, and is worthless after its first complete use or when the console ends.
package callhome

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"constellation/engine/callhome/caller"
	"constellation/engine/plan"
	"constellation/engine/provenance"
	"constellation/engine/sshhost"
)

// Machine is a machine that may call.
type Machine struct {
	Name string
	// Address is the one that it calls from.
	Address netip.Addr
	// Work completes the sentence "the console will ...": "prepare this machine as worker-1".
	Work string
}

// Options describe what a console waits for.
type Options struct {
	// Listen is ADDRESS:PORT. Without an address it is the one that routes to the first machine, and without a
	// port a free one.
	Listen   string
	Machines []Machine
	// Programs are the bootstrappers by the architecture, as `uname -m` prints it.
	Programs map[string]string
	// ValidFor is how long the tokens are valid.
	ValidFor time.Duration
	Now      func() time.Time
}

// Refusal is a call that was refused.
type Refusal struct {
	Time   time.Time `json:"time"`
	From   string    `json:"from"`
	Reason string    `json:"reason"`
}

// Events are what happens while a console waits. They are called from several goroutines.
type Events struct {
	// Work works on a machine that called, and returns lines for its owner. Without an error, the token is
	// used up. With one, the machine can call again.
	Work func(ctx context.Context, i int, h *Host) (lines []string, err error)
	// Refused is called for refused calls. It is not called for each one of a flood.
	Refused func(Refusal)
	// Expired is called when the time of a machine's token ends.
	Expired func(i int)
}

// Listener waits for machines.
type Listener struct {
	o        Options
	l        net.Listener
	cert     tls.Certificate
	pin      string
	expires  time.Time
	hosts    []string // of each machine: the address of this console
	programs map[string]program

	mu       sync.Mutex
	tokens   []token
	refusals int
	left     int           // tokens that are neither used nor expired
	idle     chan struct{} // closed when left is 0
	closing  bool
	calls    sync.WaitGroup // of admitted machines
}

type program struct{ file, digest string }

type token struct {
	text    string            // a secret
	digest  [sha256.Size]byte // of text
	active  bool
	used    time.Time // zero: not
	expired bool
}

// Limits on connections.
const (
	maxConnections = 64
	maxOfAddress   = 8
	maxRefusals    = 20
)

func usage(err error, remedy string) error {
	return &plan.Error{Op: "wait for machines", Err: err, Remedy: remedy, Exit: plan.ExitUsage}
}

// Listen begins to listen. The caller closes the listener, or calls Serve.
func Listen(ctx context.Context, o Options) (*Listener, error) {
	l := &Listener{o: o, programs: map[string]program{}, idle: make(chan struct{}), left: len(o.Machines), expires: o.Now().Add(o.ValidFor)}
	for arch, file := range o.Programs {
		digest, err := provenance.DigestFile(file)
		if err != nil {
			return nil, &plan.Error{Op: "read the bootstrapper", Err: err, Remedy: "check the file on this computer, then run the command again"}
		}
		l.programs[arch] = program{file, digest}
	}
	host, port, err := ParseListen(o.Listen)
	if err != nil {
		return nil, err
	}
	a, err := netip.ParseAddr(host)
	everywhere := err == nil && a.IsUnspecified()
	for _, m := range o.Machines {
		h := host
		if h == "" || everywhere {
			var err error
			if h, err = routeTo(ctx, m.Address); err != nil {
				return nil, &plan.Error{Op: "find the address that routes to " + m.Address.String(), Err: err, Remedy: "check the network of this computer, or name an address of it with --listen ADDRESS:PORT"}
			}
		}
		l.hosts = append(l.hosts, h)
		text := rand.Text()
		l.tokens = append(l.tokens, token{text: text, digest: sha256.Sum256([]byte(text))})
	}
	bind := host
	if bind == "" {
		if bind = l.hosts[0]; slices.ContainsFunc(l.hosts, func(h string) bool { return h != bind }) {
			return nil, usage(errors.New("different addresses of this computer route to the machines"), "name one that all of them reach with --listen ADDRESS:PORT, or all with --listen 0.0.0.0:0")
		}
	}
	if err := l.certify(); err != nil {
		return nil, fmt.Errorf("make the certificate of the console: %w", err)
	}
	raw, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(bind, port))
	if err != nil {
		return nil, &plan.Error{Op: "listen at " + net.JoinHostPort(bind, port), Err: err, Remedy: "name an address of this computer and a free port with --listen ADDRESS:PORT"}
	}
	l.l = raw
	return l, nil
}

// ParseListen returns host and port of [Options.Listen]. An empty host is not known yet, and port 0 is a free one.
func ParseListen(listen string) (host, port string, err error) {
	if listen == "" {
		return "", "0", nil
	}
	if host, port, err = net.SplitHostPort(listen); err != nil {
		return "", "", usage(fmt.Errorf("--listen %q is no ADDRESS:PORT", listen), "write it as 10.0.0.5:9443, or :9443 for the address that routes to the machine")
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return "", "", usage(fmt.Errorf("--listen %q has the port %q", listen, port), "write a number up to 65535; 0 is a free port")
	}
	if _, err := netip.ParseAddr(host); host != "" && err != nil {
		return "", "", usage(fmt.Errorf("--listen %q has no IP address", listen), "write an address of this computer, such as 10.0.0.5:9443")
	}
	return host, strconv.FormatUint(n, 10), nil
}

// routeTo returns the address of this computer that routes to ip. It sends nothing.
func routeTo(ctx context.Context, ip netip.Addr) (string, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "udp", net.JoinHostPort(ip.String(), "9"))
	if err != nil {
		return "", err
	}
	defer c.Close()
	host, _, err := net.SplitHostPort(c.LocalAddr().String())
	return host, err
}

// certify makes the certificate of this run. The machine compares its digest and nothing else.
func (l *Listener) certify() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return err
	}
	t := &x509.Certificate{SerialNumber: serial, Subject: pkix.Name{CommonName: "constellation machine add"}, NotBefore: l.o.Now().Add(-24 * time.Hour), NotAfter: l.expires.Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(der)
	l.cert, l.pin = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, hex.EncodeToString(sum[:])
	return nil
}

// Expires is when the tokens expire.
func (l *Listener) Expires() time.Time { return l.expires }

// Close stops listening.
func (l *Listener) Close() error { return l.l.Close() }

// Console returns the ADDRESS:PORT that a machine connects to.
func (l *Listener) Console(i int) string {
	_, port, _ := net.SplitHostPort(l.l.Addr().String())
	return net.JoinHostPort(l.hosts[i], port)
}

// Serve works on machines that call until none is left to wait for, or ctx ends.
func (l *Listener) Serve(ctx context.Context, e Events) {
	s := &http.Server{
		ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 10 * time.Second, MaxHeaderBytes: 8 << 10,
		ErrorLog: log.New(io.Discard, "", 0), // scanners
		Handler:  http.HandlerFunc(l.program),
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){
			caller.Protocol: func(_ *http.Server, c *tls.Conn, _ http.Handler) {
				l.call(ctx, c, e)
			},
		},
	}
	timer := time.NewTimer(l.expires.Sub(l.o.Now()))
	defer timer.Stop()
	go func() {
		_ = s.Serve(tls.NewListener(l.limited(), &tls.Config{Certificates: []tls.Certificate{l.cert}, MinVersion: tls.VersionTLS12, NextProtos: []string{caller.Protocol, "http/1.1"}}))
	}()
	select {
	case <-l.idle:
	case <-ctx.Done():
	case <-timer.C:
		for i := range l.o.Machines {
			if l.expire(i) {
				e.Expired(i)
			}
		}
		select { // machines that called in time are finished
		case <-l.idle:
		case <-ctx.Done():
		}
	}
	l.mu.Lock()
	l.closing = true
	l.mu.Unlock()
	_ = l.l.Close()
	l.calls.Wait() // each machine receives its result
	_ = s.Close()
}

// program serves a bootstrapper. It is no secret, and the machine verifies its digest.
func (l *Listener) program(w http.ResponseWriter, r *http.Request) {
	dir, arch := path.Split(r.URL.Path)
	p, ok := l.programs[arch]
	if !ok || dir != "/bootstrapper/" || r.Method != http.MethodGet {
		http.NotFound(w, r)
		return
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(10 * time.Minute))
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeFile(w, r, p.file)
}

// call is a connection of a machine.
func (l *Listener) call(ctx context.Context, c *tls.Conn, e Events) {
	stop := context.AfterFunc(ctx, func() {
		// The work ends first, and the machine receives the reason.
		time.AfterFunc(10*time.Second, func() { _ = c.Close() })
	})
	defer stop()
	from, _ := netip.ParseAddrPort(c.RemoteAddr().String())
	address := from.Addr().Unmap()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	r := bufio.NewReaderSize(c, caller.MaxLine)
	var hello caller.Hello
	if err := caller.ReadLine(r, &hello); err != nil {
		return
	}
	i, err := l.admit(hello.Token, address)
	w := caller.Welcome{}
	if err != nil {
		w.Error, w.Remedy = err.Error(), plan.Remedy(err)
		l.refuse(address, err, e)
	} else {
		w.Work = l.o.Machines[i].Work
	}
	b, encode := json.Marshal(w)
	if encode == nil {
		_, encode = c.Write(append(b, '\n'))
	}
	if err != nil {
		return
	}
	defer l.calls.Done()
	if encode != nil {
		l.release(i, false, e)
		return
	}
	_ = c.SetDeadline(time.Time{})
	lost := make(chan struct{})
	conn := &callConn{Conn: c, r: r, lost: lost}
	h, err := newHost(ctx, conn, address, lost)
	if err != nil {
		l.release(i, false, e)
		return
	}
	work, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() { // the work ends with the connection
		select {
		case <-lost:
			cancel(&plan.Error{Op: "prepare " + l.o.Machines[i].Name, Err: sshhost.ErrLost, Remedy: lostRemedy})
		case <-work.Done():
		}
	}()
	lines, err := e.Work(work, i, h)
	end := caller.End{Lines: lines}
	if err != nil {
		end.Error, end.Remedy = err.Error(), plan.Remedy(err)
	}
	if ctx.Err() != nil && err != nil {
		end.Error, end.Remedy = "the console ended", "repeat its command at the console, then run here what it prints"
	}
	l.release(i, err == nil, e)
	h.end(end)
}

// lostRemedy is what to do about a connection that was lost.
const lostRemedy = "the machine calls again by itself for some minutes; else run the command there again"

// callConn is the connection of a call. It closes lost when it is lost.
type callConn struct {
	net.Conn
	r    *bufio.Reader
	lost chan struct{}
	once sync.Once
}

func (c *callConn) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if err != nil {
		c.once.Do(func() { close(c.lost) })
	}
	return n, err
}

func (c *callConn) Close() error {
	c.once.Do(func() { close(c.lost) })
	return c.Conn.Close()
}

// admit finds the machine of a token and marks it as active.
func (l *Listener) admit(text string, from netip.Addr) (int, error) {
	digest := sha256.Sum256([]byte(text)) // the comparison's time depends on the digest alone
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.tokens, func(t token) bool { return t.digest == digest })
	if i < 0 {
		return 0, &plan.Error{Err: errors.New("the token is none of this console"), Remedy: "run the command that the console prints now, and copy all of it"}
	}
	m, t := l.o.Machines[i], &l.tokens[i]
	again := "repeat the command at the console, which makes a new token"
	switch {
	case l.closing:
		return 0, &plan.Error{Err: errors.New("the console ended"), Remedy: again}
	case !t.used.IsZero():
		return 0, &plan.Error{Err: fmt.Errorf("the token of %s was used at %s", m.Name, t.used.UTC().Format(time.RFC3339)), Remedy: "a token is for one use; if that was not this machine, somebody else had the token: remove that machine with `constellation machine remove " + m.Name + "`"}
	case t.expired || !l.o.Now().Before(l.expires):
		return 0, &plan.Error{Err: fmt.Errorf("the token of %s expired at %s", m.Name, l.expires.UTC().Format(time.RFC3339)), Remedy: again + "; --valid-for is how long"}
	case m.Address != from:
		return 0, &plan.Error{Err: fmt.Errorf("the token of %s is for %s, and the connection comes from %s", m.Name, m.Address, from), Remedy: "run the command on the machine with that address; behind address translation, or if it has several, name the one that the console sees with --source"}
	case t.active:
		return 0, &plan.Error{Err: fmt.Errorf("the token of %s is in use by another connection", m.Name), Remedy: "wait until it ended; a dead connection ends within " + (2 * caller.Silence).String()}
	}
	t.active = true
	l.calls.Add(1)
	return i, nil
}

// release ends the use of a token, for good if the work is done.
func (l *Listener) release(i int, done bool, e Events) {
	l.mu.Lock()
	t := &l.tokens[i]
	t.active = false
	if done {
		t.used = l.o.Now()
	}
	expired := !done && t.expired
	if done || expired {
		l.settle()
	}
	l.mu.Unlock()
	if expired {
		e.Expired(i)
	}
}

// expire ends a token whose time is over. It returns whether it did; one in use ends with its use.
func (l *Listener) expire(i int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := &l.tokens[i]
	if !t.used.IsZero() || t.expired {
		return false
	}
	t.expired = true
	if t.active {
		return false
	}
	l.settle()
	return true
}

// settle counts a token down.
func (l *Listener) settle() {
	if l.left--; l.left == 0 {
		close(l.idle)
	}
}

func (l *Listener) refuse(from netip.Addr, err error, e Events) {
	l.mu.Lock()
	l.refusals++
	n := l.refusals
	l.mu.Unlock()
	r := Refusal{Time: l.o.Now().UTC(), From: from.String(), Reason: err.Error()}
	switch {
	case n == maxRefusals:
		r.Reason += "; later refusals are not reported"
		fallthrough
	case n < maxRefusals:
		e.Refused(r)
	}
}

// limited is a listener that closes connections above the limits at once. The total is of addresses that no
// machine is expected from.
type limited struct {
	net.Listener
	expected map[netip.Addr]bool

	mu        sync.Mutex
	strangers int
	of        map[netip.Addr]int
}

func (l *Listener) limited() *limited {
	out := &limited{Listener: l.l, expected: map[netip.Addr]bool{}, of: map[netip.Addr]int{}}
	for _, m := range l.o.Machines {
		out.expected[m.Address] = true
	}
	return out
}

func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from, _ := netip.ParseAddrPort(c.RemoteAddr().String())
		a := from.Addr().Unmap()
		l.mu.Lock()
		ok := l.of[a] < maxOfAddress && (l.expected[a] || l.strangers < maxConnections)
		if ok {
			l.add(a, 1)
		}
		l.mu.Unlock()
		if !ok {
			_ = c.Close()
			continue
		}
		return &counted{Conn: c, l: l, from: a}, nil
	}
}

// add counts connections of an address. The caller holds the mutex.
func (l *limited) add(a netip.Addr, n int) {
	if l.of[a] += n; l.of[a] == 0 {
		delete(l.of, a)
	}
	if !l.expected[a] {
		l.strangers += n
	}
}

type counted struct {
	net.Conn
	l      *limited
	from   netip.Addr
	closed atomic.Bool
}

func (c *counted) Close() error {
	if !c.closed.Swap(true) {
		c.l.mu.Lock()
		c.l.add(c.from, -1)
		c.l.mu.Unlock()
	}
	return c.Conn.Close()
}

// Command returns the command for a machine. It uses sudo if its user is not root, and contains the machine's token.
func (l *Listener) Command(i int) string { return `$([ "$(id -u)" = 0 ] || echo sudo) ` + l.script(i) }

// CloudInit returns user data that does the same when a machine boots for the first time.
func (l *Listener) CloudInit(i int) string {
	var b strings.Builder
	m := l.o.Machines[i]
	fmt.Fprintf(&b, "#cloud-config\n# %s at %s. It is valid until %s, and once.\nruncmd:\n  - |\n", m.Name, m.Address, l.expires.UTC().Format(time.RFC3339))
	for line := range strings.Lines(l.script(i)) {
		b.WriteString("    " + line)
	}
	return b.String()
}

// script is the shell's command. All that it runs has its digest there. Its lines fit into 80 columns, also in user data:
// they are copied from a terminal.
func (l *Listener) script(i int) string {
	var cases strings.Builder
	for _, arch := range slices.Sorted(maps.Keys(l.programs)) {
		fmt.Fprintf(&cases, "%s)\n  sum=%s ;;\n", arch, l.programs[arch].digest)
	}
	return fmt.Sprintf(`sh <<'CONSTELLATION'
set -eu
umask 077
fail() { echo "constellation: $1" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail 'run this command as root'
arch=$(uname -m)
case $arch in
%s*) fail "the console has no program for $arch" ;;
esac
dir=$(mktemp -d /var/lib/constellation-call.XXXXXX)
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
console=%s
url=https://$console/bootstrapper/$arch
if command -v curl >/dev/null; then
  curl -fsSk --noproxy '*' --connect-timeout 10 --retry 12 \
    --retry-delay 5 --retry-connrefused -o "$dir/bootstrapper" "$url" ||
    fail "fetch $url"
else
  command -v wget >/dev/null ||
    fail 'neither curl nor wget is here: install one of them'
  wget -q --no-proxy --no-check-certificate --tries=12 --waitretry=5 \
    --retry-connrefused -O "$dir/bootstrapper" "$url" || fail "fetch $url"
fi
echo "$sum  $dir/bootstrapper" | sha256sum -c --status - ||
  fail 'the program is not the one of this command'
chmod 700 "$dir/bootstrapper"
echo %s | "$dir/bootstrapper" call "$console" \
  %s
CONSTELLATION
`, cases.String(), l.Console(i), l.tokens[i].text, l.pin)
}
