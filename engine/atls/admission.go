package atls

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine/attestation"
)

// Admission bounds what strangers cost a server, and shares it fairly.
//
// A connection passes three pools: "hello" until its ClientHello is complete,
// "handshake" until the handshake has ended, and "connected" after that. A full
// pool never turns a newcomer away. It closes the oldest connection of the
// source that holds the most, so a source that holds none always gets a slot,
// and a source is bounded only while others need the room. If all callers share
// one address, as behind a load balancer with source NAT, the same rule closes
// the oldest connection of all: a caller gets through unless a full pool of newer
// connections arrives before it takes its next step.
//
// The server's own evidence is rationed separately: see [quotes].

// Bounds of a server that Config can change.
const (
	// defaultSilent is how many connections may be without a complete ClientHello.
	// Each costs about 10 kB.
	defaultSilent = 2048
	// defaultHello is when a connection without a complete ClientHello is closed.
	// That is several round trips of a satellite link.
	defaultHello = 3 * time.Second
	// defaultHandshakes is how many handshakes may be under way. Each costs about
	// 30 kB, and what the client sends.
	defaultHandshakes = 1024
	// defaultConnections is how many connections may be past the handshake.
	defaultConnections = 4096
)

const (
	// maxHello bounds a ClientHello in bytes. One of ours has about 1,700.
	maxHello = 16 << 10
	// maxFlight bounds what a client sends after its ClientHello until the end of
	// the handshake, in bytes.
	maxFlight = maxCertificate + 16<<10
	// maxFlights bounds in bytes what all clients of a server together have sent in
	// handshakes that are under way. TLS holds about three times as much.
	maxFlights = 32 << 20
)

// ErrBusy means that a server closed a connection because newer ones needed its
// slot.
var ErrBusy = errors.New("too many connections at once")

// errSlow means that a client took too long for a step.
var errSlow = errors.New("client took too long")

// pool holds connections, by source. A full pool closes the oldest connection of
// the source that holds the most.
type pool struct {
	name string
	room int
	// budget bounds the bytes that its connections have sent; zero: unbounded.
	budget int64

	mu     sync.Mutex
	n      int
	bytes  int64
	shares map[string]*share
	// levels[k] holds the shares of k slots, the one that got there first in front.
	levels []*list.List
	top    int // the highest level that may hold a share
}

// share is what one source holds of a pool.
type share struct {
	source string
	slots  *list.List // of *slot, oldest first
	bytes  int64
	// level is where the share stands in levels[at]; nil: nowhere.
	level *list.Element
	at    int
}

// slot is one connection in the pools of a server.
type slot struct {
	source string
	// end frees what the connection holds: it is called once, if the slot is taken
	// away.
	end   func()
	taken atomic.Pointer[error] // why the slot was taken away

	// pool is written under its mutex, or that of the pool that the slot moves to, and
	// read under that of either.
	pool atomic.Pointer[pool]
	// Guarded by the pool's mutex.
	share *share
	elem  *list.Element
	bytes int64
}

func newPool(name string, room int, budget int64) *pool {
	return &pool{name: name, room: room, budget: budget, shares: map[string]*share{}}
}

// add puts s into the pool under the name source, and takes the slot of another
// connection away if the pool is full.
func (p *pool) add(s *slot, source string) {
	p.mu.Lock()
	sh := p.shares[source]
	if sh == nil {
		sh = &share{source: source, slots: list.New()}
		p.shares[source] = sh
	}
	s.share, s.bytes = sh, 0
	s.pool.Store(p)
	s.elem = sh.slots.PushBack(s)
	p.n++
	p.level(sh)
	var victim *slot
	if p.n > p.room {
		for p.levels[p.top] == nil || p.levels[p.top].Len() == 0 {
			p.top--
		}
		victim = p.levels[p.top].Front().Value.(*share).slots.Front().Value.(*slot)
		p.drop(victim)
	}
	p.mu.Unlock()
	if victim != nil {
		victim.take(fmt.Errorf("%w: all %d %s slots are in use, and %s held the most", ErrBusy, p.room, p.name, sourceName(victim.source)))
	}
}

// grow notes that the client of s sent n bytes more.
func (p *pool) grow(s *slot, n int) {
	p.mu.Lock()
	if s.pool.Load() != p {
		p.mu.Unlock()
		return
	}
	s.bytes += int64(n)
	s.share.bytes += int64(n)
	p.bytes += int64(n)
	var victims []*slot
	for p.budget > 0 && p.bytes > p.budget {
		var most *share
		for _, sh := range p.shares {
			if most == nil || sh.bytes > most.bytes {
				most = sh
			}
		}
		victim := most.slots.Front().Value.(*slot)
		p.drop(victim)
		victims = append(victims, victim)
	}
	p.mu.Unlock()
	for _, v := range victims {
		v.take(fmt.Errorf("%w: handshakes hold more than %d bytes", ErrBusy, p.budget))
	}
}

// remove takes s out and reports whether it was still in.
func (p *pool) remove(s *slot) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.pool.Load() != p {
		return false
	}
	p.drop(s)
	return true
}

// drop takes s out. The caller holds mu.
func (p *pool) drop(s *slot) {
	sh := s.share
	sh.slots.Remove(s.elem)
	sh.bytes -= s.bytes
	p.bytes -= s.bytes
	p.n--
	s.share, s.elem = nil, nil
	s.pool.Store(nil)
	p.level(sh)
}

// level puts sh where its number of slots belongs. The caller holds mu.
func (p *pool) level(sh *share) {
	if sh.level != nil {
		p.levels[sh.at].Remove(sh.level)
		sh.level = nil
	}
	k := sh.slots.Len()
	if k == 0 {
		delete(p.shares, sh.source)
		return
	}
	for len(p.levels) <= k {
		p.levels = append(p.levels, nil)
	}
	if p.levels[k] == nil {
		p.levels[k] = list.New()
	}
	sh.level, sh.at = p.levels[k].PushBack(sh), k
	p.top = max(p.top, k)
}

func (p *pool) size() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.n
}

// take ends the connection of s, for a reason. s is in no pool any more.
func (s *slot) take(why error) {
	if s.taken.CompareAndSwap(nil, &why) {
		s.end()
	}
}

// why returns the reason for which the slot was taken away, or nil.
func (s *slot) why() error {
	if e := s.taken.Load(); e != nil {
		return *e
	}
	return nil
}

// move puts s from one pool into another one under the name source; nil is none.
// It fails if s was taken away. The pool must be the one that s is in.
func (s *slot) move(from, to *pool, source string) error {
	if !from.remove(s) {
		if err := s.why(); err != nil {
			return err
		}
		return net.ErrClosed
	}
	if to != nil {
		to.add(s, source)
	}
	return nil
}

// expire takes s away after d if it is still in p then. stop ends the wait.
func (s *slot) expire(p *pool, d time.Duration, what string) (stop func() bool) {
	return time.AfterFunc(d, func() {
		if p.remove(s) {
			s.take(fmt.Errorf("%w: %s within %s", errSlow, what, d))
		}
	}).Stop
}

// guard is a connection that leaves its pool when it is closed, and that bounds
// what it reads until the handshake is through.
type guard struct {
	net.Conn
	slot *slot
	in   *atomic.Pointer[pool] // the pool that slot is in; nil: none
	// limit is how many bytes may be read in this step, and left how many of them
	// were not; a negative one is no limit.
	limit, left int
}

func newGuard(raw net.Conn, s *slot) *guard {
	g := &guard{Conn: raw, slot: s, in: new(atomic.Pointer[pool]), limit: maxHello, left: maxHello}
	// gRPC closes the connection below if it fails right after the handshake. The slot gets no
	// notice of that, and must not be held indefinitely.
	runtime.AddCleanup(g, func(in *atomic.Pointer[pool]) {
		if p := in.Load(); p != nil {
			p.remove(s)
		}
	}, g.in)
	return g
}

// enter puts the connection into its first pool.
func (g *guard) enter(p *pool, source string) {
	g.in.Store(p)
	p.add(g.slot, source)
}

// Read implements net.Conn.
func (g *guard) Read(b []byte) (int, error) {
	if g.left < 0 {
		return g.Conn.Read(b)
	}
	if g.left == 0 {
		return 0, fmt.Errorf("%w: client sent too much, at most %d bytes are allowed in one step of the handshake", attestation.ErrDocument, g.limit)
	}
	n, err := g.Conn.Read(b[:min(len(b), g.left)])
	g.left -= n
	if p := g.in.Load(); p != nil && p.budget > 0 {
		p.grow(g.slot, n)
	}
	return n, err
}

// Close implements net.Conn.
func (g *guard) Close() error {
	if p := g.in.Load(); p != nil {
		p.remove(g.slot)
	}
	return g.Conn.Close()
}

// allow sets how many bytes the client may send in the next step; negative: any number.
func (g *guard) allow(n int) { g.limit, g.left = n, n }

// move is that of the slot.
func (g *guard) move(to *pool, source string) error {
	from := g.in.Load()
	if from == nil {
		return net.ErrClosed
	}
	// First, so that a concurrent Close finds the slot in one of both.
	g.in.Store(to)
	return g.slot.move(from, to, source)
}

// reset closes a connection so that the kernel keeps nothing of it.
func reset(c net.Conn) {
	if t, ok := c.(interface{ SetLinger(int) error }); ok {
		_ = t.SetLinger(0) // else it is closed in the ordinary way
	}
	c.Close()
}

// hungUp reports whether the other end has closed c. It reads nothing, and never
// waits.
func hungUp(c net.Conn) bool {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return false
	}
	rc, err := t.SyscallConn()
	if err != nil {
		return true
	}
	var gone bool
	err = rc.Control(func(fd uintptr) {
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		gone = n == 0 && err == nil || errors.Is(err, unix.ECONNRESET)
	})
	return err != nil || gone
}

// sourceOf is who shares a quota: an IPv4 address, or the 64 bits of an IPv6
// address that one subscriber is given. All that have neither are one source.
func sourceOf(a net.Addr) string {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return ""
	}
	ip := t.AddrPort().Addr().Unmap().WithZone("")
	bits := ip.BitLen()
	if ip.Is6() {
		bits = 64
	}
	p, err := ip.Prefix(bits)
	if err != nil {
		return ""
	}
	if ip.Is4() {
		return p.Addr().String()
	}
	return p.String()
}

func sourceName(s string) string {
	if s == "" {
		return "a local source"
	}
	if p, err := netip.ParsePrefix(s); err == nil {
		return "network " + p.String()
	}
	return s
}

// quotes schedules the server's evidence. A TPM makes one quote at a time, which takes a
// millisecond with an emulator and up to a second with hardware, so a flood exhausts this
// first.
//
// The source with the fewest wasted quotes is first. A quote is wasted until its connection is
// proven: the client's evidence was accepted, or the server called [Prove]. One wasted quote
// of a source expires per forgiveEvery. Among equals, and within a source, the newest is
// first: the longest waiting client will give up first, and its quote would be lost.
//
// The zero value is ready to use.
type quotes struct {
	mu      sync.Mutex
	making  int // quotes, at the moment
	seq     uint64
	sources map[string]*debtor
	hungry  map[string]*debtor // those of sources that wait
}

const (
	// quotesAtOnce is two so that the next quote is at hand when the TPM ends one.
	quotesAtOnce = 2
	// forgiveEvery takes back one wasted quote.
	forgiveEvery = time.Second
	// maxDebtors bounds the sources that are remembered.
	maxDebtors = 4096
)

type debtor struct {
	wasted  float64
	at      time.Time // when wasted was right
	waiting []*quoter // newest last
}

type quoter struct {
	seq  uint64
	turn chan struct{}
}

// forgive brings wasted up to date.
func (d *debtor) forgive(now time.Time) {
	d.wasted = max(0, d.wasted-float64(now.Sub(d.at))/float64(forgiveEvery))
	d.at = now
}

// acquire waits until source may have a quote made. The error is ctx's. The caller
// calls release when the quote is made.
func (q *quotes) acquire(ctx context.Context, source string) error {
	now := time.Now()
	q.mu.Lock()
	d := q.debtor(source, now)
	if q.making < quotesAtOnce {
		q.making++
		d.forgive(now)
		d.wasted++
		q.mu.Unlock()
		return nil
	}
	q.seq++
	w := &quoter{seq: q.seq, turn: make(chan struct{})}
	d.waiting = append(d.waiting, w)
	q.hungry[source] = d
	q.mu.Unlock()
	select {
	case <-w.turn:
		return nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for i, o := range d.waiting {
		if o == w {
			d.waiting = append(d.waiting[:i], d.waiting[i+1:]...)
			if len(d.waiting) == 0 {
				delete(q.hungry, source)
			}
			return context.Cause(ctx)
		}
	}
	q.next(time.Now()) // the turn came at the same moment: it is passed on
	return context.Cause(ctx)
}

// release ends a quote.
func (q *quotes) release() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.next(time.Now())
}

// next starts the next waiter by the order above. The caller holds mu.
func (q *quotes) next(now time.Time) {
	var best *debtor
	var name string
	for s, d := range q.hungry {
		d.forgive(now)
		if best == nil || d.wasted < best.wasted || d.wasted == best.wasted && d.newest() > best.newest() {
			best, name = d, s
		}
	}
	if best == nil {
		q.making--
		return
	}
	n := len(best.waiting) - 1
	w := best.waiting[n]
	best.waiting[n] = nil
	best.waiting = best.waiting[:n]
	if n == 0 {
		delete(q.hungry, name)
	}
	best.wasted++
	close(w.turn)
}

func (d *debtor) newest() uint64 { return d.waiting[len(d.waiting)-1].seq }

// proven takes back that source wasted a quote.
func (q *quotes) proven(source string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if d := q.sources[source]; d != nil {
		d.forgive(time.Now())
		d.wasted = max(0, d.wasted-1)
	}
}

// debtor returns that of source, and forgets those that have nothing to tell. The
// caller holds mu.
func (q *quotes) debtor(source string, now time.Time) *debtor {
	if d := q.sources[source]; d != nil {
		return d
	}
	if q.sources == nil {
		q.sources, q.hungry = map[string]*debtor{}, map[string]*debtor{}
	}
	if len(q.sources) >= maxDebtors {
		var least string
		var found bool
		for s, d := range q.sources {
			if d.forgive(now); len(d.waiting) > 0 {
				continue
			}
			if d.wasted == 0 {
				delete(q.sources, s)
			} else if !found || d.wasted < q.sources[least].wasted {
				least, found = s, true
			}
		}
		if len(q.sources) >= maxDebtors && found {
			delete(q.sources, least)
		}
	}
	d := &debtor{at: now}
	q.sources[source] = d
	return d
}
