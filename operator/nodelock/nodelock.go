// Package nodelock is the cluster-wide lock (mutual exclusion) for programs that upgrade or replace
// nodes. It is a Lease. Replacements of nodes and Plans take it.
//
// The holder is a name such as "plan system-upgrade/k3s-server", not a process. A new leader
// continues as the same holder. A holder that does not renew the Lease for a minute loses it.
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

// Poll is the interval at which a waiting process reads the Lease.
const Poll = 5 * time.Second

// annotationAwaited of the Lease is when Replacements last noted that they wait for the lock.
const annotationAwaited = "constellation.edgeless.systems/replacements-wait"

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
	wanted  map[string]func() // callers that want the lock, with their wake functions
	holder  string            // last known holder; empty: none
	ours    bool
	renewed time.Time // last renewal by this process
	trouble error     // error of the last read or write of the Lease
	// Another holder expires by our own clock, counted from when its last renewal was observed. The same holds for
	// the note that replacements wait.
	sign     string
	seen     time.Time
	note     string
	noteSeen time.Time
	passing  string // caller that gives its lock to replacements; empty: none
}

// New returns a lock that no caller wants yet. live reads the Lease, without a cache.
func New(c client.Client, live client.Reader, now func() time.Time) *Lock {
	return &Lock{client: c, live: live, now: now, kick: make(chan struct{}, 1), wanted: map[string]func(){}}
}

// Want requests the lock for who. wake is called when who holds the lock or cannot get it.
func (l *Lock) Want(who string, wake func()) {
	l.mu.Lock()
	_, known := l.wanted[who]
	l.wanted[who] = wake
	l.mu.Unlock()
	if !known {
		l.hurry()
	}
}

// Drop withdraws the request of who, or releases its lock.
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

// Pass gives the lock of who to Replacements, if these still wait for it. The request of who stays.
func (l *Lock) Pass(who string) {
	l.mu.Lock()
	l.passing = who
	l.mu.Unlock()
	l.hurry()
}

// Awaited reports whether Replacements wait for the lock that another caller holds.
func (l *Lock) Awaited() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.awaited()
}

func (l *Lock) awaited() bool {
	return l.note != "" && l.holder != Replacements && l.now().Before(l.noteSeen.Add(duration))
}

// State returns whether who holds the lock. If not, it returns the other holder, if known, or the
// error.
func (l *Lock) State(who string) (have bool, other string, trouble error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.passing == who:
		return false, "", l.trouble
	case l.ours && l.holder == who && l.now().Before(l.renewed.Add(duration-renew)):
		return true, "", nil
	case l.holder == who:
		l.hurry() // the Lease must be renewed, or taken over from our earlier process
		return false, "", l.trouble
	}
	return false, l.holder, l.trouble
}

// Keep takes, renews and releases the lock until ctx ends.
func (l *Lock) Keep(ctx context.Context) {
	t := time.NewTicker(Poll)
	defer t.Stop()
	for {
		l.turn(ctx)
		select {
		case <-ctx.Done():
			return // work in progress continues, so the lock is kept until it expires
		case <-t.C:
		case <-l.kick:
		}
	}
}

// turn reads the Lease once, and writes it if necessary.
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

// failed records the result of the last turn, and wakes waiting callers if it changed.
func (l *Lock) failed(err error) {
	l.mu.Lock()
	news := (err == nil) != (l.trouble == nil)
	l.trouble = err
	l.unlockAndWake(news)
}

// unlockAndWake unlocks l.mu and, after a change, wakes all callers that want the lock.
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
	next, what := l.observe(&lease)
	switch what {
	case nothing:
		return nil
	case announces:
		metav1.SetMetaDataAnnotation(&lease.ObjectMeta, annotationAwaited, l.now().UTC().Format(time.RFC3339Nano))
		return written(l.client.Update(ctx, &lease))
	case holds:
	}
	lease.Namespace, lease.Name = Namespace, Name
	lease.Spec = coordinationv1.LeaseSpec{HolderIdentity: &next, LeaseDurationSeconds: new(int32(duration / time.Second)), RenewTime: new(metav1.NewMicroTime(l.now()))}
	if next == Replacements {
		delete(lease.Annotations, annotationAwaited)
	}
	if exists {
		err = l.client.Update(ctx, &lease)
	} else {
		err = l.client.Create(ctx, &lease)
	}
	if err != nil {
		return written(err)
	}
	l.mu.Lock()
	had := l.ours && l.holder == next
	got := l.wanted[next]
	l.holder, l.ours, l.renewed, l.sign, l.seen = next, got != nil, l.now(), signOf(&lease), l.now()
	l.mu.Unlock()
	if got != nil && !had {
		got()
	}
	return nil
}

// written returns the error of a write of the Lease. If another process was faster, the next read shows that.
func written(err error) error {
	if err == nil || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return nil
	}
	return fmt.Errorf("write Lease %s/%s: %w", Namespace, Name, err)
}

// change is what a process writes to the Lease.
type change int

const (
	nothing   change = iota
	holds            // a new holder, or the renewal of the present one
	announces        // Replacements wait for another holder
)

// observe takes over what the Lease says, and decides what to write. next is the holder.
func (l *Lock) observe(lease *coordinationv1.Lease) (next string, _ change) {
	holder := ""
	if lease.Spec.HolderIdentity != nil {
		holder = *lease.Spec.HolderIdentity
	}
	l.mu.Lock()
	if sign := signOf(lease); l.sign != sign {
		l.sign, l.seen = sign, l.now()
	}
	knew, knewAwaited := l.holder, l.awaited()
	if note := lease.Annotations[annotationAwaited]; l.note != note {
		l.note, l.noteSeen = note, l.now()
	}
	next = l.next(holder)
	_, wantedByHolder := l.wanted[holder]
	mine := next != holder || wantedByHolder
	due := next != holder || l.now().Sub(l.renewed) >= renew || !l.ours
	passes := l.passing != ""
	l.holder, l.passing = holder, ""
	if !wantedByHolder {
		l.ours = false
	}
	_, replaces := l.wanted[Replacements]
	what := nothing
	switch {
	case mine && due:
		what = holds
	case !mine && replaces && l.now().After(l.noteSeen.Add(renew)):
		what = announces
	}
	// Waiting callers are woken for another holder, and the holder if it has to give way, or no longer has to.
	l.unlockAndWake(knew != holder || knewAwaited != l.awaited() || passes)
	return next, what
}

// next returns the holder after this turn; empty: none. The caller holds mu.
func (l *Lock) next(holder string) string {
	_, wanted := l.wanted[holder]
	switch {
	case wanted && holder != "" && holder == l.passing && l.awaited():
		return Replacements
	case wanted && holder != "": // renewed
		return holder
	case holder != "" && l.ours && l.holder == holder: // released, to the next caller of this process if any
		return l.first()
	case holder == "" || l.now().After(l.seen.Add(duration)):
		return l.first()
	}
	return holder
}

// signOf returns what changes with each renewal of the Lease by its holder.
func signOf(lease *coordinationv1.Lease) string {
	holder, renewed := "", ""
	if lease.Spec.HolderIdentity != nil {
		holder = *lease.Spec.HolderIdentity
	}
	if lease.Spec.RenewTime != nil {
		renewed = lease.Spec.RenewTime.String()
	}
	return holder + " " + renewed
}

// first returns the caller of this process that gets the lock next; empty: none wants it.
func (l *Lock) first() string {
	all := slices.Sorted(maps.Keys(l.wanted))
	if len(all) == 0 {
		return ""
	}
	return all[0]
}
