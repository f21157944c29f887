package sandbox

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// probeEvery is short because all clients of a failed control plane lose their connections
	// until the balancer detects the failure.
	probeEvery   = 500 * time.Millisecond
	probeTimeout = 2 * time.Second
	dialTimeout  = time.Second
	// downAfter is the number of consecutive failed probes after which a backend's connections are
	// cut. Otherwise its clients would wait for a machine that may never answer.
	downAfter = 2
	// drainFor limits how long connections stay on a backend that answers but reports not ready,
	// as an API server does during shutdown.
	drainFor = 20 * time.Second
	// shunFor keeps new connections away from a backend after a failed dial.
	shunFor = 2 * time.Second
)

// backend is a machine behind a balancer.
type backend struct {
	name string
	addr netip.AddrPort
}

type health int

const (
	unknown  health = iota // not probed yet, or there is no probe
	up                     // ready
	draining               // answers, but is not ready
	down                   // does not answer
)

type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// balancer distributes TCP connections over backends and removes them from unhealthy
// ones. It does not inspect the bytes.
type balancer struct {
	name string
	log  *slog.Logger
	// backends returns the existing machines, in order of preference.
	backends func() []backend
	dial     dialFunc
	// probe checks the health of one backend. If it is nil, only failed dials count.
	probe func(ctx context.Context, address string) health
	// ordered sends connections to the first healthy backend, not to the one with the fewest connections.
	ordered bool

	mu      sync.Mutex
	members map[netip.AddrPort]*member
	served  uint64 // connections up to now
	tunnels sync.WaitGroup
}

type member struct {
	backend
	health   health
	fails    int
	drainEnd time.Time
	shunned  time.Time // until
	conns    map[net.Conn]struct{}
	latest   uint64 // number of its last connection, counted over all backends; 0: none
}

// run probes until ctx ends, then cuts the remaining connections.
func (b *balancer) run(ctx context.Context) {
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	for {
		b.check(ctx)
		select {
		case <-ctx.Done():
			b.mu.Lock()
			for _, m := range b.members {
				m.cut()
			}
			b.mu.Unlock()
			b.tunnels.Wait()
			return
		case <-tick.C:
		}
	}
}

// check probes all backends concurrently, once.
func (b *balancer) check(ctx context.Context) {
	b.mu.Lock()
	b.sync()
	members := make([]*member, 0, len(b.members))
	for _, m := range b.members {
		members = append(members, m)
	}
	b.mu.Unlock()
	if b.probe == nil {
		return
	}
	var wg sync.WaitGroup
	for _, m := range members {
		wg.Go(func() {
			pctx, cancel := context.WithTimeout(ctx, probeTimeout)
			defer cancel()
			h := b.probe(pctx, m.addr.String())
			if ctx.Err() == nil {
				b.mu.Lock()
				defer b.mu.Unlock()
				b.judge(m, h)
			}
		})
	}
	wg.Wait()
}

// sync updates members from backends. The caller holds mu.
func (b *balancer) sync() {
	if b.members == nil {
		b.members = map[netip.AddrPort]*member{}
	}
	now := b.backends()
	for _, be := range now {
		if b.members[be.addr] == nil {
			b.members[be.addr] = &member{backend: be, conns: map[net.Conn]struct{}{}}
		}
	}
	for addr, m := range b.members {
		if !slices.Contains(now, m.backend) {
			m.cut()
			delete(b.members, addr)
		}
	}
}

// judge records the result of a probe. The caller holds mu.
func (b *balancer) judge(m *member, h health) {
	before := m.health
	switch h {
	case down:
		// A single lost probe is not significant. Two in a row are.
		if m.fails++; m.fails < downAfter && m.health != unknown {
			return
		}
		m.health = down
		m.cut()
	case draining:
		m.fails = 0
		if m.health != draining {
			m.drainEnd = time.Now().Add(drainFor)
		} else if time.Now().After(m.drainEnd) && b.anyUp() {
			m.cut()
		}
		m.health = draining
	default:
		m.fails, m.health = 0, h
	}
	if m.health != before {
		b.log.Debug("backend changed", "balancer", b.name, "node", m.name, "from", before.String(), "to", m.health.String())
	}
}

func (h health) String() string {
	return [...]string{"unknown", "up", "draining", "down"}[h]
}

func (b *balancer) anyUp() bool {
	for _, m := range b.members {
		if m.health == up {
			return true
		}
	}
	return false
}

func (m *member) cut() {
	for c := range m.conns {
		c.Close()
	}
}

// candidates returns the backends for a new connection, in order of preference. If none is known to
// be healthy, it returns all: an unready server is better than none.
func (b *balancer) candidates() []*member {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sync()
	rank := map[netip.AddrPort]int{}
	for i, be := range b.backends() {
		rank[be.addr] = i
	}
	type candidate struct {
		m           *member
		class, load int
	}
	var all []candidate
	for _, m := range b.members {
		c := candidate{m: m, load: len(m.conns)}
		switch {
		case m.health == down:
			c.class = 3
		case time.Now().Before(m.shunned):
			c.class = 2
		case m.health == draining, m.health == unknown && b.probe != nil:
			c.class = 1
		}
		all = append(all, c)
	}
	if slices.ContainsFunc(all, func(c candidate) bool { return c.class == 0 }) {
		// Some backends are healthy, so the others are not dialled.
		all = slices.DeleteFunc(all, func(c candidate) bool { return c.class == 3 })
	}
	slices.SortFunc(all, func(x, y candidate) int {
		// Among backends with equal load, the least recently used comes first, so that a client that
		// reconnects reaches all of them.
		load := cmp.Or(cmp.Compare(x.load, y.load), cmp.Compare(x.m.latest, y.m.latest))
		if b.ordered {
			load = 0
		}
		return cmp.Or(cmp.Compare(x.class, y.class), load, cmp.Compare(rank[x.m.addr], rank[y.m.addr]))
	})
	out := make([]*member, len(all))
	for i, c := range all {
		out[i] = c.m
	}
	return out
}

// serve accepts connections from l until ctx ends. Several listeners may share a balancer.
func (b *balancer) serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	for {
		c, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				c.Close()
			}
			return nil
		case err != nil && errors.Is(err, net.ErrClosed):
			return err
		case err != nil:
			// The usual cause is a lack of file descriptors. Accepting again at once would spin.
			b.log.Warn("connection not accepted", "balancer", b.name, "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		b.tunnels.Go(func() { b.handle(ctx, c) })
	}
}

func (b *balancer) handle(ctx context.Context, client net.Conn) {
	defer client.Close()
	for _, m := range b.candidates() {
		dctx, cancel := context.WithTimeout(ctx, dialTimeout)
		server, err := b.dial(dctx, "tcp", m.addr.String())
		cancel()
		b.mu.Lock()
		if err != nil {
			m.shunned = time.Now().Add(shunFor)
			b.mu.Unlock()
			continue
		}
		m.shunned = time.Time{}
		current := b.members[m.addr] == m && ctx.Err() == nil
		if current {
			m.conns[server] = struct{}{}
			b.served++
			m.latest = b.served
		}
		b.mu.Unlock()
		if !current { // it was removed while we dialled
			server.Close()
			continue
		}
		tunnel(client, server)
		b.mu.Lock()
		delete(m.conns, server)
		b.mu.Unlock()
		return
	}
	// There is no backend: reset the connection, as a closed port does, instead of closing it.
	if tcp, ok := client.(interface{ SetLinger(int) error }); ok {
		_ = tcp.SetLinger(0) // otherwise the connection would close with FIN
	}
}

// tunnel copies in both directions until both are done or one fails.
func tunnel(client, server net.Conn) {
	defer server.Close()
	var wg sync.WaitGroup
	for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
		from, to := way[0], way[1]
		wg.Go(func() {
			// Between two TCP connections this uses splice(2): the bytes stay in the kernel.
			if _, err := io.Copy(to, from); err != nil {
				client.Close()
				server.Close()
				return
			}
			if half, ok := to.(interface{ CloseWrite() error }); ok {
				_ = half.CloseWrite() // the other direction may have closed everything
			}
		})
	}
	wg.Wait()
}

// readyz returns a probe that queries /readyz of an API server. It does not verify the server's
// certificate, because the balancer trusts none of the bytes.
func readyz(dial dialFunc) func(context.Context, string) health {
	client := &http.Client{Transport: &http.Transport{
		DialContext:         dial,
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12},
		MaxIdleConnsPerHost: 1,
		IdleConnTimeout:     10 * time.Second,
	}}
	return func(ctx context.Context, address string) health {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+"/readyz", nil)
		if err != nil {
			return down
		}
		resp, err := client.Do(req)
		if err != nil {
			return down
		}
		defer resp.Body.Close()
		// The connection is reused only if the body was read to its end.
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
		if resp.StatusCode != http.StatusOK {
			return draining
		}
		return up
	}
}
