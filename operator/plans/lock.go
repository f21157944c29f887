package plans

import (
	"context"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// LockName and LockNamespace name the Lease of whoever upgrades or replaces nodes of the cluster
// and wants nobody else to.
const (
	LockName      = "constellation-node-upgrades"
	LockNamespace = metav1.NamespaceSystem
)

const (
	lockDuration = time.Minute
	lockRenew    = 10 * time.Second
	lockPoll     = 5 * time.Second
)

// lock is our part in the cluster's lock. It is safe for concurrent use.
type lock struct {
	client client.Client
	live   client.Reader
	now    func() time.Time
	kick   chan struct{}

	mu      sync.Mutex
	wanted  map[string]func() // who wants it, and how they are woken
	holder  string            // who has it, as far as we know; empty: nobody
	ours    bool
	renewed time.Time // last success of ours
	// Whether another holder lives is judged by the own clock, from when its last sign of life was seen.
	sign string
	seen time.Time
}

func newLock(c client.Client, live client.Reader, now func() time.Time) *lock {
	return &lock{client: c, live: live, now: now, kick: make(chan struct{}, 1), wanted: map[string]func(){}}
}

// want says that somebody wants the lock, and is to be woken when they have it.
func (l *lock) want(who string, wake func()) {
	l.mu.Lock()
	_, known := l.wanted[who]
	l.wanted[who] = wake
	l.mu.Unlock()
	if !known {
		l.hurry()
	}
}

// drop says that somebody does not need it any more.
func (l *lock) drop(who string) {
	l.mu.Lock()
	_, known := l.wanted[who]
	delete(l.wanted, who)
	l.mu.Unlock()
	if known {
		l.hurry()
	}
}

func (l *lock) hurry() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// state returns who else has the lock, and whether who has it.
func (l *lock) state(who string) (other string, have bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ours && l.holder == who && l.now().Before(l.renewed.Add(lockDuration-lockRenew)) {
		return "", true
	}
	if l.holder == who {
		return "", false
	}
	return l.holder, false
}

// keep takes, renews and gives the lock up until ctx ends.
func (l *lock) keep(ctx context.Context) {
	t := time.NewTicker(lockRenew)
	defer t.Stop()
	poll := time.NewTicker(lockPoll)
	defer poll.Stop()
	for {
		l.turn(ctx)
		select {
		case <-ctx.Done():
			return // what was begun goes on, so the lock stays until it is over by itself
		case <-t.C:
		case <-poll.C:
		case <-l.kick:
		}
	}
}

// turn looks at the Lease once, and writes it if we have to.
func (l *lock) turn(ctx context.Context) {
	l.mu.Lock()
	idle := len(l.wanted) == 0 && !l.ours
	l.mu.Unlock()
	if idle {
		return
	}
	var lease coordinationv1.Lease
	err := l.live.Get(ctx, client.ObjectKey{Namespace: LockNamespace, Name: LockName}, &lease)
	if err != nil && !apierrors.IsNotFound(err) {
		return
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
	case holder == "" || l.now().After(l.seen.Add(lockDuration)):
		next = l.first()
	}
	mine := next != holder || wantedByHolder
	due := next != holder || l.now().Sub(l.renewed) >= lockRenew || !l.ours
	l.holder = holder
	if !wantedByHolder {
		l.ours = false
	}
	l.mu.Unlock()
	if !mine || !due {
		return
	}
	lease.Namespace, lease.Name = LockNamespace, LockName
	lease.Spec = coordinationv1.LeaseSpec{HolderIdentity: &next, LeaseDurationSeconds: new(int32(lockDuration / time.Second)), RenewTime: new(metav1.NewMicroTime(l.now()))}
	if exists {
		err = l.client.Update(ctx, &lease)
	} else {
		err = l.client.Create(ctx, &lease)
	}
	if err != nil {
		return // somebody was faster, or nobody answers
	}
	l.mu.Lock()
	was := l.ours && l.holder == next
	l.holder, l.ours, l.renewed, l.sign, l.seen = next, next != "", l.now(), lease.ResourceVersion, l.now()
	wake := l.wanted[next]
	l.mu.Unlock()
	if wake != nil && !was {
		wake()
	}
}

// first is the one of ours whose turn it is; empty: none wants it.
func (l *lock) first() string {
	out := ""
	for who := range l.wanted {
		if out == "" || who < out {
			out = who
		}
	}
	return out
}
