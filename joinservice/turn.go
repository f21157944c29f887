package joinservice

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Control planes join one at a time: each adds a member to etcd, and two half-joined members
// can cost a small cluster its quorum. A Lease, the join turn, serializes them; the joiner's
// report renews it. The turn ends when the join is reported done or failed, or when the
// joiner's reports stop: a dead machine loses the turn within half a minute, including
// pingEvery, pingTimeout and the next one's retry.
//
// A turn also ends without progress. Requests for a ticket extend it for turnStart, a report
// without a new line for turnSilence, and a report with lines for turnLimit, all counted from
// its start. A joiner that used up the turn waits turnRest before it may get another, and
// other waiting joiners come first.
//
// Deleting the JoiningNode does not end a turn: the Node registers long before kubeadm has
// added the member to etcd.
const (
	turnName     = "control-plane-join"
	turnDuration = 15 * time.Second
	turnRenewal  = 4 * time.Second
	// turnStart is how long a ticket request extends a turn: a joiner with a ticket reports
	// within seconds.
	turnStart = time.Minute
	// turnSilence ends the turn of a joiner whose report has no new line. kubeadm waits five
	// minutes for the kubelet without output.
	turnSilence = 6 * time.Minute
	// turnLimit ends the turn of a joiner that reports without completing.
	turnLimit = 15 * time.Minute
	// turnRest is how long a joiner that used up the turn must let others go first. They retry
	// every turnRetry and a half.
	turnRest = 15 * time.Second
	// turnRetry is the retry interval of waiting control planes, and the poll interval of the
	// record while one waits.
	turnRetry = 2 * time.Second
	// turnGap is how long reads of the record may fail while it still counts as unchanged.
	turnGap = 5 * time.Second
	// turnInterest is how long a refused control plane counts as waiting.
	turnInterest = 30 * time.Second
)

// leases is the access to one Lease with optimistic locking.
type leases interface {
	getLease(ctx context.Context, name string) (*coordinationv1.Lease, error)
	createLease(ctx context.Context, l *coordinationv1.Lease) (*coordinationv1.Lease, error)
	updateLease(ctx context.Context, l *coordinationv1.Lease) (*coordinationv1.Lease, error)
}

// turn manages the Lease. A holder's liveness is judged by how long its record has not
// changed, on the local clock, so clocks need not agree. Time without an answer of the API
// server does not count: the holder could not renew either, which happens while a member is
// added to etcd.
type turn struct {
	leases leases
	// waiter signals watch that a control plane was refused.
	waiter chan struct{}

	mu      sync.Mutex
	version string    // of the last observed record
	since   time.Time // when that version was first seen
	seen    time.Time // when it was last seen
}

func newTurn(l leases) *turn { return &turn{leases: l, waiter: make(chan struct{}, 1)} }

// watch polls the record while a control plane waits for the turn, so that its age is known
// however rarely joiners retry. It ends with ctx.
func (t *turn) watch(ctx context.Context) {
	tick := time.NewTicker(turnRetry)
	defer tick.Stop()
	var until time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.waiter:
			until = time.Now().Add(turnInterest)
		case now := <-tick.C:
			if now.After(until) {
				continue
			}
			ctx, cancel := context.WithTimeout(ctx, turnGap)
			if l, err := t.leases.getLease(ctx, turnName); err == nil {
				t.observe(l, time.Now())
			}
			cancel()
		}
	}
}

// turnHeldError means that another control plane is joining.
type turnHeldError struct{ holder string }

func (e *turnHeldError) Error() string {
	return fmt.Sprintf("control plane %s is joining; one joins at a time", e.holder)
}

// turnUsedError means that a control plane used up the turn without joining.
type turnUsedError struct{ wait time.Duration }

func (e *turnUsedError) Error() string {
	return fmt.Sprintf("this control plane made no progress while it held the join turn; others go first for %s", e.wait.Round(time.Second))
}

// errTurnLost means that a node does not hold the turn, or no longer.
var errTurnLost = errors.New("this node does not hold the join turn")

// take gives the turn to node, or extends it, and returns when it expires unless renewed. The
// error is a *turnHeldError if another node has it, and a *turnUsedError if node used up the
// turn.
func (t *turn) take(ctx context.Context, node string) (time.Time, error) {
	return t.change(ctx, func(l *coordinationv1.Lease, now time.Time) error {
		holder := holderOf(l)
		if holder != "" && holder != node && !t.expired(l, now) {
			select {
			case t.waiter <- struct{}{}:
			default: // the caller is informed already
			}
			return &turnHeldError{holder}
		}
		if holder == node {
			switch end := endOf(l); {
			case l.Spec.AcquireTime == nil || now.Sub(end) >= turnRest:
				// It rested, and no other control plane asked in the meantime.
			case now.Sub(l.Spec.AcquireTime.Time) < turnStart:
				hold(l, node, now)
				return nil
			case now.Before(end) && now.Sub(l.Spec.AcquireTime.Time) < turnLimit:
				return errTurnAsIs // its report renews it
			default:
				return &turnUsedError{end.Add(turnRest).Sub(now)}
			}
		}
		l.Spec.AcquireTime = &metav1.MicroTime{Time: now}
		if holder != node {
			n := int32(1)
			if l.Spec.LeaseTransitions != nil {
				n += *l.Spec.LeaseTransitions
			}
			l.Spec.LeaseTransitions = &n
		}
		hold(l, node, now)
		return nil
	})
}

// errTurnAsIs aborts an update of the Lease without a change.
var errTurnAsIs = errors.New("the turn is unchanged")

// endOf returns when the turn expires unless renewed, by the clock of the replica that renewed
// it last.
func endOf(l *coordinationv1.Lease) time.Time {
	if l.Spec.RenewTime == nil {
		return time.Time{}
	}
	return l.Spec.RenewTime.Add(turnDuration)
}

// renew extends the turn of a node that holds it. The error wraps errTurnLost if it does not,
// or has held it for too long.
func (t *turn) renew(ctx context.Context, node string) error {
	_, err := t.change(ctx, func(l *coordinationv1.Lease, now time.Time) error {
		if holder := holderOf(l); holder != node {
			return fmt.Errorf("%w: %q has it", errTurnLost, holder)
		}
		if l.Spec.AcquireTime == nil || now.Sub(l.Spec.AcquireTime.Time) >= turnLimit {
			return fmt.Errorf("%w: it has lasted %v", errTurnLost, turnLimit)
		}
		hold(l, node, now)
		return nil
	})
	return err
}

// release ends the turn of node. It is no error if node does not hold it.
func (t *turn) release(ctx context.Context, node string) error {
	_, err := t.change(ctx, func(l *coordinationv1.Lease, _ time.Time) error {
		if holderOf(l) != node {
			return errTurnLost
		}
		none := ""
		l.Spec.HolderIdentity = &none
		return nil
	})
	if errors.Is(err, errTurnLost) {
		return nil
	}
	return err
}

// change reads the Lease, lets edit change it, and writes it, with a retry after a conflict.
func (t *turn) change(ctx context.Context, edit func(*coordinationv1.Lease, time.Time) error) (time.Time, error) {
	for {
		now := time.Now()
		l, err := t.leases.getLease(ctx, turnName)
		missing := apierrors.IsNotFound(err)
		if missing {
			l = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: turnName}}
		} else if err != nil {
			return time.Time{}, fmt.Errorf("read control-plane turn: %w", err)
		}
		t.observe(l, now)
		if err := edit(l, now); errors.Is(err, errTurnAsIs) {
			return endOf(l), nil
		} else if err != nil {
			return time.Time{}, err
		}
		if missing {
			l, err = t.leases.createLease(ctx, l)
		} else {
			l, err = t.leases.updateLease(ctx, l)
		}
		if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || !missing && apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return time.Time{}, fmt.Errorf("write control-plane turn: %w", err)
		}
		t.observe(l, now)
		return now.Add(turnDuration), nil
	}
}

// observe records since when the record is unchanged.
func (t *turn) observe(l *coordinationv1.Lease, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.version != l.ResourceVersion || now.Sub(t.seen) > turnGap {
		t.version, t.since = l.ResourceVersion, now
	}
	t.seen = now
}

func (t *turn) expired(l *coordinationv1.Lease, now time.Time) bool {
	d := turnDuration
	if s := l.Spec.LeaseDurationSeconds; s != nil {
		d = time.Duration(*s) * time.Second
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.version == l.ResourceVersion && now.Sub(t.since) >= d
}

func holderOf(l *coordinationv1.Lease) string {
	if l.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.Spec.HolderIdentity
}

func hold(l *coordinationv1.Lease, node string, now time.Time) {
	seconds := int32(turnDuration / time.Second)
	l.Spec.HolderIdentity, l.Spec.LeaseDurationSeconds = &node, &seconds
	l.Spec.RenewTime = &metav1.MicroTime{Time: now}
}
