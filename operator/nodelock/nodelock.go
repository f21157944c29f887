// Package nodelock is the one lock of a cluster for whoever upgrades or replaces its nodes and
// wants nobody else to meanwhile: a Lease, which replacements of nodes and Plans take.
//
// Who holds it is a name such as "plan system-upgrade/k3s-server", not a process: whoever leads
// next continues as the same holder. A holder that shows no sign of life for a minute loses it.
package nodelock

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Name and Namespace are those of the Lease.
const (
	Name      = "constellation-node-upgrades"
	Namespace = metav1.NamespaceSystem
)

// Poll is how often somebody who waits looks at the Lease.
const Poll = 5 * time.Second

const (
	duration = time.Minute
	renew    = 10 * time.Second
)

// Lock is this process's part in the lock. It is safe for concurrent use.
type Lock struct {
	client client.Client
	live   client.Reader
	now    func() time.Time
	kick   chan struct{}

	mu      sync.Mutex
	wanted  map[string]func() // who wants it, and how they are woken
	holder  string            // who has it, as far as we know; empty: nobody
	ours    bool
	renewed time.Time // last success of ours
	trouble error     // of the last look at the Lease
	// Whether another holder lives is judged by the own clock, from when its last sign of life was seen.
	sign string
	seen time.Time
}

// New returns a lock that nobody of this process wants. The Lease is read by live, past any cache.
func New(c client.Client, live client.Reader, now func() time.Time) *Lock {
	return &Lock{client: c, live: live, now: now, kick: make(chan struct{}, 1), wanted: map[string]func(){}}
}

// Want says that who wants the lock, and is to be woken when they have it or cannot get it.
func (l *Lock) Want(who string, wake func()) {
	l.mu.Lock()
	_, known := l.wanted[who]
	l.wanted[who] = wake
	l.mu.Unlock()
	if !known {
		l.hurry()
	}
}

// Drop says that who does not need it any more.
func (l *Lock) Drop(who string) {
	l.mu.Lock()
	_, known := l.wanted[who]
	delete(l.wanted, who)
	l.mu.Unlock()
	if known {
		l.hurry()
	}
}

func (l *Lock) hurry() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// State returns whether who has the lock, and if not who else has it, as far as is known, or
// why it cannot be had.
func (l *Lock) State(who string) (have bool, other string, trouble error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.ours && l.holder == who && l.now().Before(l.renewed.Add(duration-renew)):
		return true, "", nil
	case l.holder == who:
		l.hurry() // it is renewed, or taken over from an earlier process of ours
		return false, "", l.trouble
	}
	return false, l.holder, l.trouble
}

// Keep takes, renews and gives the lock up until ctx ends.
func (l *Lock) Keep(ctx context.Context) {
	t := time.NewTicker(Poll)
	defer t.Stop()
	for {
		l.turn(ctx)
		select {
		case <-ctx.Done():
			return // what was begun continues, so the lock stays until it is over by itself
		case <-t.C:
		case <-l.kick:
		}
	}
}

// turn looks at the Lease once, and writes it if we have to.
func (l *Lock) turn(ctx context.Context) {
	l.mu.Lock()
	idle := len(l.wanted) == 0 && !l.ours
	l.mu.Unlock()
	if idle {
		return
	}
	if err := l.look(ctx); ctx.Err() == nil {
		l.failed(err)
	}
}

// failed notes how the last look went, and tells those who wait if that is news.
func (l *Lock) failed(err error) {
	l.mu.Lock()
	news := (err == nil) != (l.trouble == nil)
	l.trouble = err
	l.unlockAndWake(news)
}

// unlockAndWake gives l.mu back and, if there is news, wakes all who want the lock.
func (l *Lock) unlockAndWake(news bool) {
	var wake []func()
	if news {
		wake = slices.Collect(maps.Values(l.wanted))
	}
	l.mu.Unlock()
	for _, w := range wake {
		w()
	}
}

func (l *Lock) look(ctx context.Context) error {
	var lease coordinationv1.Lease
	err := l.live.Get(ctx, client.ObjectKey{Namespace: Namespace, Name: Name}, &lease)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("read Lease %s/%s: %w", Namespace, Name, err)
	}
	exists := err == nil
	holder := ""
	if lease.Spec.HolderIdentity != nil {
		holder = *lease.Spec.HolderIdentity
	}
	l.mu.Lock()
	if l.sign != lease.ResourceVersion {
		l.sign, l.seen = lease.ResourceVersion, l.now()
	}
	_, wantedByHolder := l.wanted[holder]
	next := holder
	switch {
	case holder != "" && wantedByHolder: // renewed
	case holder != "" && l.ours && l.holder == holder: // given up, to the next of ours if there is one
		next = l.first()
	case holder == "" || l.now().After(l.seen.Add(duration)):
		next = l.first()
	}
	mine := next != holder || wantedByHolder
	due := next != holder || l.now().Sub(l.renewed) >= renew || !l.ours
	another := l.holder != holder // told to those who wait for it
	l.holder = holder
	if !wantedByHolder {
		l.ours = false
	}
	l.unlockAndWake(another)
	if !mine || !due {
		return nil
	}
	lease.Namespace, lease.Name = Namespace, Name
	lease.Spec = coordinationv1.LeaseSpec{HolderIdentity: &next, LeaseDurationSeconds: new(int32(duration / time.Second)), RenewTime: new(metav1.NewMicroTime(l.now()))}
	if exists {
		err = l.client.Update(ctx, &lease)
	} else {
		err = l.client.Create(ctx, &lease)
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return nil // somebody was faster, which the next look shows
	}
	if err != nil {
		return fmt.Errorf("write Lease %s/%s: %w", Namespace, Name, err)
	}
	l.mu.Lock()
	was := l.ours && l.holder == next
	l.holder, l.ours, l.renewed, l.sign, l.seen = next, next != "", l.now(), lease.ResourceVersion, l.now()
	got := l.wanted[next]
	l.mu.Unlock()
	if got != nil && !was {
		got()
	}
	return nil
}

// first is the one of ours whose turn it is; empty: none wants it.
func (l *Lock) first() string {
	all := slices.Sorted(maps.Keys(l.wanted))
	if len(all) == 0 {
		return ""
	}
	return all[0]
}
