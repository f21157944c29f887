package joinservice

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// memory is one Lease with the API server's optimistic locking, for tests in virtual
// time; turnHasOneWinner runs the same code on a real one.
type memory struct {
	mu      sync.Mutex
	lease   *coordinationv1.Lease
	version int
	down    bool
}

var leaseResource = schema.GroupResource{Group: "coordination.k8s.io", Resource: "leases"}

func (m *memory) getLease(context.Context, string) (*coordinationv1.Lease, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down {
		return nil, apierrors.NewServiceUnavailable("no leader of etcd")
	}
	if m.lease == nil {
		return nil, apierrors.NewNotFound(leaseResource, turnName)
	}
	return m.lease.DeepCopy(), nil
}

func (m *memory) createLease(_ context.Context, l *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lease != nil {
		return nil, apierrors.NewAlreadyExists(leaseResource, turnName)
	}
	return m.put(l), nil
}

func (m *memory) updateLease(_ context.Context, l *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lease == nil || m.lease.ResourceVersion != l.ResourceVersion {
		return nil, apierrors.NewConflict(leaseResource, turnName, errors.New("changed"))
	}
	return m.put(l), nil
}

func (m *memory) set(down bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.down = down
}

func (m *memory) put(l *coordinationv1.Lease) *coordinationv1.Lease {
	m.version++
	m.lease = l.DeepCopy()
	m.lease.ResourceVersion = strconv.Itoa(m.version)
	return m.lease.DeepCopy()
}

// held fails the test unless err reports that holder has the turn.
func held(t *testing.T, err error, holder string) {
	t.Helper()
	var h *turnHeldError
	if !errors.As(err, &h) || h.holder != holder {
		t.Fatalf("error %v, want that %s has the turn", err, holder)
	}
}

func TestTurn(t *testing.T) {
	ctx := context.Background()
	for _, tt := range []struct {
		name string
		run  func(t *testing.T, a, b *turn, api *memory) // two replicas
	}{
		{"one node has the turn, and a repeated request extends it", func(t *testing.T, a, b *turn, api *memory) {
			if _, err := a.take(ctx, "cp-1"); err != nil {
				t.Fatal(err)
			}
			_, err := b.take(ctx, "cp-2")
			held(t, err, "cp-1")
			time.Sleep(10 * time.Second)
			until, err := b.take(ctx, "cp-1") // through another replica
			if err != nil || time.Until(until) != turnDuration {
				t.Fatalf("repeated request: until %v, %v", until, err)
			}
			time.Sleep(10 * time.Second)
			_, err = a.take(ctx, "cp-2")
			held(t, err, "cp-1")
		}},
		{"a dead holder loses the turn within 30 s", func(t *testing.T, a, b *turn, api *memory) {
			if _, err := a.take(ctx, "cp-1"); err != nil {
				t.Fatal(err)
			}
			// The connection of a dead machine is closed after pingEvery + pingTimeout; until then the
			// turn is renewed.
			died := time.Now()
			for time.Since(died) < pingEvery+pingTimeout {
				if err := a.renew(ctx, "cp-1"); err != nil {
					t.Fatal(err)
				}
				time.Sleep(turnRenewal)
			}
			for {
				_, err := b.take(ctx, "cp-2")
				if err == nil {
					break
				}
				held(t, err, "cp-1")
				time.Sleep(turnRetry * 3 / 2) // the longest retry delay of answer
			}
			if took := time.Since(died); took > 30*time.Second {
				t.Errorf("taken over after %v", took)
			}
		}},
		{"a renewed turn outlives its duration, an unrenewed one does not", func(t *testing.T, a, b *turn, api *memory) {
			if _, err := a.take(ctx, "cp-1"); err != nil {
				t.Fatal(err)
			}
			for range 20 {
				time.Sleep(turnRenewal)
				if err := b.renew(ctx, "cp-1"); err != nil {
					t.Fatal(err)
				}
				_, err := a.take(ctx, "cp-2")
				held(t, err, "cp-1")
			}
			time.Sleep(turnDuration + turnRetry)
			if _, err := a.take(ctx, "cp-2"); err != nil {
				t.Errorf("after it expired: %v", err)
			}
			if err := b.renew(ctx, "cp-1"); !errors.Is(err, errTurnLost) {
				t.Errorf("the former holder renewed: %v", err)
			}
		}},
		{"a released turn is free at once, and only its holder releases it", func(t *testing.T, a, b *turn, api *memory) {
			if _, err := a.take(ctx, "cp-1"); err != nil {
				t.Fatal(err)
			}
			if err := b.release(ctx, "cp-2"); err != nil {
				t.Fatal(err)
			}
			_, err := b.take(ctx, "cp-2")
			held(t, err, "cp-1")
			if err := b.release(ctx, "cp-1"); err != nil {
				t.Fatal(err)
			}
			if _, err := a.take(ctx, "cp-2"); err != nil {
				t.Fatal(err)
			}
			if err := a.release(ctx, "cp-1"); err != nil { // a late message of the former holder
				t.Fatal(err)
			}
			_, err = b.take(ctx, "cp-3")
			held(t, err, "cp-2")
		}},
		{"the holder keeps the turn while the API server is unavailable", func(t *testing.T, a, b *turn, api *memory) {
			// As while etcd gains a member: longer than a lease, in the middle of a join.
			if _, err := a.take(ctx, "cp-1"); err != nil {
				t.Fatal(err)
			}
			_, err := b.take(ctx, "cp-2")
			held(t, err, "cp-1")
			api.set(true)
			for range 12 {
				time.Sleep(turnRetry)
				if _, err := b.take(ctx, "cp-2"); err == nil {
					t.Fatal("taken while the API server is unavailable")
				}
				_ = a.renew(ctx, "cp-1")
			}
			api.set(false)
			// The first caller wins.
			_, err = b.take(ctx, "cp-2")
			held(t, err, "cp-1")
			if err := a.renew(ctx, "cp-1"); err != nil {
				t.Errorf("the holder lost the turn: %v", err)
			}
		}},
		{"a node with rare requests gets the turn, too", func(t *testing.T, a, b *turn, api *memory) {
			if _, err := a.take(ctx, "cp-1"); err != nil {
				t.Fatal(err)
			}
			_, err := b.take(ctx, "cp-2")
			held(t, err, "cp-1")
			time.Sleep(turnDuration + turnRetry)
			if _, err := b.take(ctx, "cp-2"); err != nil {
				t.Errorf("after the holder's silence: %v", err)
			}
		}},
		{"a joiner without progress loses the turn in the end", func(t *testing.T, a, b *turn, api *memory) {
			if _, err := a.take(ctx, "cp-1"); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			for a.renew(ctx, "cp-1") == nil {
				if time.Since(start) > turnLimit {
					t.Fatal("it is renewed indefinitely")
				}
				time.Sleep(turnRenewal)
			}
			_, err := b.take(ctx, "cp-2")
			held(t, err, "cp-1")
			time.Sleep(turnDuration + turnRetry)
			if _, err := b.take(ctx, "cp-2"); err != nil {
				t.Error(err)
			}
		}},
		{"a joiner that only requests tickets loses the turn to a waiting one", func(t *testing.T, a, b *turn, api *memory) {
			passes(t, a, b, turnStart+turnDuration+2*turnRetry, func() {})
		}},
		{"a joiner that reports no new lines loses the turn after the limit", func(t *testing.T, a, b *turn, api *memory) {
			passes(t, a, b, turnLimit+turnDuration+2*turnRetry, func() { _ = a.renew(ctx, "cp-1") })
		}},
		{"a control plane that used up the turn gets another if no other waits", func(t *testing.T, a, b *turn, api *memory) {
			start := time.Now()
			var used bool
			for {
				until, err := a.take(ctx, "cp-1")
				var u *turnUsedError
				switch {
				case err == nil && used:
					if d := time.Since(start); d > turnStart+turnDuration+turnRest+2*turnRetry || time.Until(until) != turnDuration {
						t.Errorf("the second turn came after %s and ends in %s", d, time.Until(until))
					}
					return
				case errors.As(err, &u):
					if used = true; u.wait <= 0 || u.wait > turnDuration+turnRest {
						t.Fatalf("it has to wait %s", u.wait)
					}
				case err != nil:
					t.Fatal(err)
				}
				if time.Since(start) > turnLimit {
					t.Fatalf("requests alone kept the turn for %s", turnLimit)
				}
				time.Sleep(turnRetry)
			}
		}},
		{"a repeated request does not extend a turn that a report keeps", func(t *testing.T, a, b *turn, api *memory) {
			if _, err := a.take(ctx, "cp-1"); err != nil {
				t.Fatal(err)
			}
			for start := time.Now(); time.Since(start) < 2*turnStart; time.Sleep(turnRenewal) {
				if err := a.renew(ctx, "cp-1"); err != nil {
					t.Fatal(err)
				}
			}
			renewed := time.Now().Add(-turnRenewal)
			time.Sleep(turnRetry)
			until, err := a.take(ctx, "cp-1")
			if err != nil || !until.Equal(renewed.Add(turnDuration)) {
				t.Errorf("asked again: until %v, %v, want %v", until, err, renewed.Add(turnDuration))
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &memory{}
				a, b := newTurn(m), newTurn(m)
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				go a.watch(ctx)
				go b.watch(ctx)
				tt.run(t, a, b, m)
			})
		})
	}
}

// passes lets cp-1 request the turn continuously, and fails the test unless cp-2, which
// retries as rarely as requested, gets it within limit.
func passes(t *testing.T, a, b *turn, limit time.Duration, meanwhile func()) {
	t.Helper()
	start := time.Now()
	if _, err := a.take(t.Context(), "cp-1"); err != nil {
		t.Fatal(err)
	}
	for next := start; ; time.Sleep(100 * time.Millisecond) {
		_, _ = a.take(t.Context(), "cp-1")
		meanwhile()
		if time.Now().Before(next) {
			continue
		}
		_, err := b.take(t.Context(), "cp-2")
		if err == nil {
			break
		}
		held(t, err, "cp-1")
		if time.Since(start) > limit {
			t.Fatalf("cp-1 keeps the turn for longer than %s by requests alone", limit)
		}
		next = time.Now().Add(turnRetry * 3 / 2)
	}
	_, err := a.take(t.Context(), "cp-1")
	held(t, err, "cp-2")
}

func TestTurnIsGivenToOneNode(t *testing.T) {
	m := &memory{}
	var wg sync.WaitGroup
	won := make(chan string, 100)
	for i := range 100 {
		wg.Go(func() {
			node := "cp-" + strconv.Itoa(i)
			if _, err := newTurn(m).take(t.Context(), node); err == nil {
				won <- node
			}
		})
	}
	wg.Wait()
	if len(won) != 1 {
		t.Errorf("%d nodes took the turn at once", len(won))
	}
}
