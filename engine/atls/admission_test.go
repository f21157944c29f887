package atls

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine/attestation"
)

// seat puts a slot of source into p and returns it.
func seat(p *pool, source string) *slot {
	s := &slot{source: source, end: func() {}}
	p.add(s, source)
	return s
}

func TestFullPoolClosesTheOldestOfWhoHoldsMost(t *testing.T) {
	p := newPool("hello", 6, 0)
	honest := seat(p, "honest")
	var flood []*slot
	for range 5 {
		flood = append(flood, seat(p, "flood"))
	}
	other := seat(p, "other")
	if flood[0].why() == nil || !errors.Is(flood[0].why(), ErrBusy) {
		t.Errorf("the oldest of the flood: %v", flood[0].why())
	}
	for range 1000 {
		flood = append(flood, seat(p, "flood"))
	}
	if honest.why() != nil || other.why() != nil {
		t.Errorf("closed for a flood of another source: %v, %v", honest.why(), other.why())
	}
	if n := p.size(); n != 6 {
		t.Errorf("it holds %d, want 6", n)
	}
	for i, s := range flood {
		if gone := s.why() != nil; gone != (i < len(flood)-4) {
			t.Errorf("connection %d of %d of the flood: closed %t", i, len(flood), gone)
		}
	}
	// Those that leave make room, and nothing is left of their sources.
	for _, s := range append(flood, honest, other) {
		p.remove(s)
	}
	if p.size() != 0 || len(p.shares) != 0 || p.bytes != 0 {
		t.Errorf("left: %d slots, %d sources, %d bytes", p.size(), len(p.shares), p.bytes)
	}
}

func TestPoolOfManySourcesClosesTheOldest(t *testing.T) {
	p := newPool("hello", 200, 0)
	var all []*slot
	for i := range 1000 {
		all = append(all, seat(p, fmt.Sprint("s", i)))
	}
	for i, s := range all {
		if gone := s.why() != nil; gone != (i < 800) {
			t.Fatalf("connection %d of 1000, each of its own source: closed %t", i, gone)
		}
	}
}

func TestPoolClosesWhoSentTheMost(t *testing.T) {
	p := newPool("handshake", 100, 1000)
	a, b, honest := seat(p, "flood"), seat(p, "flood"), seat(p, "honest")
	p.grow(a, 400)
	p.grow(b, 300)
	p.grow(honest, 300)
	if a.why() != nil || b.why() != nil || honest.why() != nil {
		t.Fatal("closed within the budget")
	}
	p.grow(honest, 1)
	if a.why() == nil || b.why() != nil || honest.why() != nil {
		t.Errorf("beyond the budget: %v, %v, %v", a.why(), b.why(), honest.why())
	}
	if p.bytes != 601 {
		t.Errorf("%d bytes are held, want 601", p.bytes)
	}
}

func TestSlotThatWasTakenAwayDoesNotMove(t *testing.T) {
	p, next := newPool("hello", 1, 0), newPool("handshake", 1, 0)
	s := seat(p, "a")
	seat(p, "a")
	if err := s.move(p, next, "a"); !errors.Is(err, ErrBusy) || next.size() != 0 {
		t.Errorf("got %v, and %d slots", err, next.size())
	}
}

func TestHelloHasADeadline(t *testing.T) {
	w := newWorld(t)
	cfg := w.serverConfig()
	cfg.HelloTimeout = 50 * time.Millisecond
	cr, sr := pipe(t)
	if _, err := cr.Write([]byte{22, 3, 1, 2, 0, 1}); err != nil { // the head of a ClientHello
		t.Fatal(err)
	}
	start := time.Now()
	_, _, err := NewServer(cfg).ServerHandshake(sr)
	if !errors.Is(err, errSlow) || time.Since(start) > 10*time.Second {
		t.Errorf("after %s: %v", time.Since(start), err)
	}
}

func TestConnectionWithoutProofIsClosed(t *testing.T) {
	w := newWorld(t)
	for _, prove := range []bool{true, false} {
		cr, sr := pipe(t)
		cfg := Config{Purpose: PurposeInit, Issuer: w.node, ProofTimeout: 100 * time.Millisecond}
		got := make(chan AuthInfo, 1)
		creds := NewServer(cfg).(serverCredentials)
		go func() {
			_, info, err := creds.ServerHandshake(sr)
			if err != nil {
				t.Error(err)
				close(got)
				return
			}
			got <- info.(AuthInfo)
		}()
		client := Config{Purpose: PurposeInit, Validator: w.accepts(attestation.PCR15Zero())}
		conn, _, err := NewClient(client).ClientHandshake(t.Context(), "", cr)
		if err != nil {
			t.Fatal(err)
		}
		info, ok := <-got
		if !ok {
			return
		}
		if prove {
			info.proof()
			info.proof()
		}
		_ = conn.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		_, err = conn.Read(make([]byte, 1))
		var ne net.Error
		if open := errors.As(err, &ne) && ne.Timeout(); open != prove {
			t.Errorf("proven %t: the connection ended with %v", prove, err)
		}
		if n := creds.connected.size(); n != 0 {
			t.Errorf("proven %t: %d connections are counted", prove, n)
		}
	}
}

// fill takes all turns but one for good.
func fill(t *testing.T, q *quotes) {
	t.Helper()
	for range quotesAtOnce - 1 {
		if err := q.acquire(t.Context(), "busy"); err != nil {
			t.Fatal(err)
		}
	}
}

// order releases the waiters of a full queue one by one and returns their order.
func order(t *testing.T, q *quotes, sources ...string) (got []string) {
	t.Helper()
	if err := q.acquire(t.Context(), "first"); err != nil {
		t.Fatal(err)
	}
	turns := make(chan string)
	for _, s := range sources {
		go func() {
			if err := q.acquire(t.Context(), s); err != nil {
				t.Error(err)
			}
			turns <- s
		}()
		synctest.Wait() // they wait in this order
	}
	q.release()
	for range sources {
		got = append(got, <-turns)
		q.release()
	}
	return got
}

func TestQuotesGoToWhoWastedTheFewest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q quotes
		fill(t, &q)
		// Without wasted quotes: the newest first, and each source before any has two.
		if got, want := order(t, &q, "a", "a", "b"), []string{"b", "a", "a"}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		// a wasted two, b one, c none.
		if got, want := order(t, &q, "c", "b", "a"), []string{"c", "b", "a"}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		// a proved all of its; b and c did not.
		for range 3 {
			q.proven("a")
		}
		if got := order(t, &q, "a", "b", "c"); got[0] != "a" {
			t.Errorf("got %v, want a first", got)
		}
		// And everything is forgiven.
		time.Sleep(10 * forgiveEvery)
		if got, want := order(t, &q, "c", "b", "a"), []string{"a", "b", "c"}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

func TestQuotesOfThoseWhoGaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q quotes
		fill(t, &q)
		if err := q.acquire(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- q.acquire(ctx, "b") }()
		synctest.Wait()
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		q.release()
		if q.making != quotesAtOnce-1 || len(q.hungry) != 0 {
			t.Errorf("after all: %d quotes are being made, %d sources wait", q.making, len(q.hungry))
		}
		for i := range 3 * maxDebtors {
			if err := q.acquire(t.Context(), fmt.Sprint("s", i)); err != nil {
				t.Fatal(err)
			}
			q.release()
		}
		if n := len(q.sources); n > maxDebtors {
			t.Errorf("%d sources are remembered, want at most %d", n, maxDebtors)
		}
	})
}

func TestSources(t *testing.T) {
	for address, want := range map[string]string{
		"10.1.2.3:5":            "10.1.2.3",
		"[::ffff:10.1.2.3]:5":   "10.1.2.3",
		"[2001:db8:1:2:3::4]:5": "2001:db8:1:2::/64",
		"[fe80::1%lo]:5":        "fe80::/64",
	} {
		a, err := net.ResolveTCPAddr("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		if got := sourceOf(a); got != want {
			t.Errorf("%s is of source %q, want %q", address, got, want)
		}
	}
	if got := sourceOf(&net.UnixAddr{Name: "x"}); got != "" {
		t.Errorf("a socket is of source %q", got)
	}
}
